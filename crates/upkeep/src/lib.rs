//! Brings what is to what should be: reconcilers that take no input and may be stopped at any point.
//!
//! [`Reclaimer`] returns the space of removed files. [`Repairer`] stores the shards that commits went ahead
//! without. Scrub, packing and tiering follow the same shape.

mod reclaim;
mod repair;

pub use reclaim::{ReclaimStat, Reclaimer};
pub use repair::{RepairStat, Repairer};
