//! The commands of the disks.

use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, bail, ensure};

/// The disks of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    One(usize),
    All,
}

impl Which {
    pub(crate) fn is(self, index: usize) -> bool {
        self == Self::All || self == Self::One(index)
    }
}

/// Requests that fail with EIO.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failing {
    Nothing,
    Reads,
    Writes,
    Flushes,
    Everything,
}

/// One line: `fail DISK nothing|reads|writes|flushes|everything`, `slow DISK MS`, `cut SEED`, `on`, where DISK is a
/// number or `all`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Command {
    Fail(Which, Failing),
    Slow(Which, Duration),
    /// All disks lose power at the same moment: unstable writes are lost in part, and all requests fail until `on`.
    Cut(u64),
    On,
}

impl FromStr for Command {
    type Err = anyhow::Error;

    fn from_str(line: &str) -> Result<Self, Self::Err> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let which = |word: &str| -> Result<Which, anyhow::Error> {
            Ok(if word == "all" { Which::All } else { Which::One(word.parse().context("number of a disk")?) })
        };
        ensure!(!words.is_empty(), "empty command");
        Ok(match words[..] {
            ["fail", disk, what] => {
                let failing = match what {
                    "nothing" => Failing::Nothing,
                    "reads" => Failing::Reads,
                    "writes" => Failing::Writes,
                    "flushes" => Failing::Flushes,
                    "everything" => Failing::Everything,
                    _ => bail!("cannot fail: what={what}"),
                };
                Self::Fail(which(disk)?, failing)
            }
            ["slow", disk, ms] => Self::Slow(which(disk)?, Duration::from_millis(ms.parse()?)),
            ["cut", seed] => Self::Cut(seed.parse()?),
            ["on"] => Self::On,
            _ => bail!("unknown command: {line}"),
        })
    }
}
