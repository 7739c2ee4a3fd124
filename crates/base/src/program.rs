//! What a program says of itself to others of other versions.

use serde::{Deserialize, Serialize};

/// Version of this program.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The newest *format level* of this program: the number of the newest set of formats that it reads and writes, in logs, local stores,
/// drives, blobs and records. A cluster has a level too, and all its nodes write the formats of that one: a format of a newer level is
/// written once `forebay upgrade finalize` has raised the level of the cluster. Until then, each node can go back to its last program.
pub const FORMAT_LEVEL: u32 = 1;

/// The level of clusters and programs that say nothing of it.
pub const FIRST_LEVEL: u32 = 1;

/// A program, as it tells others.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// Its version; empty: a program that says nothing.
    pub version: String,
    /// Its newest format level; 0: a program that says nothing.
    pub format_level: u32,
}

impl Program {
    /// This program.
    pub fn this() -> Self {
        Self { version: VERSION.to_owned(), format_level: FORMAT_LEVEL }
    }

    /// Its newest format level.
    pub fn level(&self) -> u32 {
        self.format_level.max(FIRST_LEVEL)
    }
}
