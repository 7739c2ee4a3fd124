//! Events: the history of a cluster, for people.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How much an event matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Ordered by an administrator, or back to normal.
    Info,
    /// Worse than it should be, but nothing is lost and everything works.
    Warning,
    /// An administrator should look.
    Error,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Info => "info",
            Self::Warning => "warning",
            Self::Error => "error",
        })
    }
}

impl FromStr for Severity {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::Info, Self::Warning, Self::Error];
        let found = all.into_iter().find(|severity| severity.to_string() == text);
        found.ok_or_else(|| format!("{text:?} is none of info, warning, error"))
    }
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Counts events of the cluster, from 1.
    pub id: u32,
    /// When it was noticed, seconds since 1970.
    pub time_s: i64,
    /// How much it matters.
    pub severity: Severity,
    /// Its subject: `cluster`, `drive 3`, `store cold`, `filesystem main`.
    pub subject: String,
    /// One or two fixed words: `failed`, `break-in`.
    pub kind: String,
    /// A sentence for people.
    pub text: String,
}
