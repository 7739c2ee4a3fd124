//! The plan of a round besides its load: its end, and a fault before it.

use std::time::Duration;

use anyhow::Result;

use super::storage::{Layout, Storage};
use crate::random::Random;

/// How a round ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// SIGKILL at a random moment.
    Kill,
    /// The disks lose power at a random moment; the process sees errors for a while, then it is killed.
    Cut { seed: u64, kill_after: Duration },
    /// An orderly stop, which must keep even unsynced bytes.
    Stop,
}

/// A fault in the middle of a round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A drive answers late. No operation may fail.
    SlowDrive { ms: u64 },
    /// A drive fails requests of one kind from some moment on. No operation may fail: the profile tolerates it.
    BadDrive { what: &'static str },
    /// The disk with the metadata fails requests of one kind. Operations that still succeed must last.
    BadMeta { what: &'static str },
    /// The filesystem with the metadata has only `left_bytes` left.
    Full { left_bytes: u64 },
}

/// The disk with the metadata.
const META: usize = 0;

impl Fault {
    /// Whether operations may fail while the node runs.
    pub(crate) fn may_fail_operations(self) -> bool {
        matches!(self, Self::BadMeta { .. } | Self::Full { .. })
    }

    pub(crate) fn inject(self, storage: &Storage) -> Result<()> {
        match self {
            Self::SlowDrive { ms } => storage.command(&format!("slow {} {ms}", storage.first_drive())),
            Self::BadDrive { what } => storage.command(&format!("fail {} {what}", storage.first_drive())),
            Self::BadMeta { what } => storage.command(&format!("fail {META} {what}")),
            Self::Full { left_bytes } => storage.fill(left_bytes),
        }
    }
}

/// The plan of one round.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Round {
    pub(crate) end: End,
    pub(crate) fault: Option<Fault>,
}

impl Round {
    /// Every fifth round ends with an orderly stop, so that unsynced bytes are checked, too.
    pub(crate) fn new(number: u64, layout: Layout, random: &mut Random) -> Self {
        let end = match (number % 5, layout) {
            (0, _) => End::Stop,
            (1, _) | (_, Layout::Host) => End::Kill,
            _ => cut(random),
        };
        Self { end, fault: None }
    }

    /// A round with a fault. Their order prevents that one hides another: a node may not use a bad drive again.
    pub(crate) fn with_fault(number: u64, may_lose_drive: bool, random: &mut Random) -> Self {
        let what =
            |random: &mut Random| *random.pick(&["writes", "flushes", "everything"]).expect("not empty");
        let fault = match number % 5 {
            1 => Fault::SlowDrive { ms: 1 + random.below(80) },
            2 => Fault::BadMeta { what: what(random) },
            3 | 4 => Fault::Full { left_bytes: random.below(16 << 20) >> random.below(16) },
            _ if may_lose_drive => Fault::BadDrive { what: what(random) },
            _ => Fault::SlowDrive { ms: 1 },
        };
        let end = match (fault, random.below(3)) {
            (Fault::BadMeta { .. }, _) | (_, 0) => End::Kill,
            (Fault::SlowDrive { .. } | Fault::BadDrive { .. }, 1) => End::Stop,
            _ => cut(random),
        };
        Self { end, fault: Some(fault) }
    }

    /// Ends the faults of the disks once the process is gone.
    pub(crate) fn recover(self, storage: &Storage) -> Result<()> {
        for line in ["fail all nothing", "slow all 0"] {
            storage.command(line)?;
        }
        // A filesystem stops itself after errors; the next mount recovers it.
        if matches!(self.end, End::Cut { .. }) || matches!(self.fault, Some(Fault::BadMeta { .. })) {
            storage.restore()?;
        }
        if matches!(self.fault, Some(Fault::Full { .. })) {
            storage.empty()?;
        }
        Ok(())
    }
}

fn cut(random: &mut Random) -> End {
    // Half of the cuts leave no time to see an error.
    let kill_after = if random.percent(50) { 0 } else { random.below(200) };
    End::Cut { seed: random.next(), kill_after: Duration::from_millis(kill_after) }
}
