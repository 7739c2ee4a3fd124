//! Brings what is to what should be: reconcilers that take no input and may be stopped at any point.
//!
//! [`Reclaimer`] returns the space of removed files. [`Repairer`] stores the shards that commits went ahead
//! without, and rebuilds the shards of lost drives on others. [`Scrubber`] looks for damage, [`DamageKeeper`] finds the files that it took. [`Packer`] gathers small
//! pieces into full extents, [`OrphanCollector`] deletes what nothing refers to, [`Tiering`] moves what has aged to an object store.
//! [`Pace`] limits what they move. [`S3Store`] is such a store.

mod bucket;
mod damage;
mod forecast;
mod orphans;
mod pace;
mod packer;
mod reclaim;
mod repair;
mod scrub;
mod store;
mod task;
mod tiering;

pub use damage::{DamageKeeper, DamageStat, LostFile};
pub use forecast::Ages;
pub use orphans::{OrphanCollector, OrphanOptions, OrphanStat};
pub use pace::{BYTES_PER_S_MIN, Pace};
pub use packer::{PackOptions, PackStat, PackWait, Packer};
pub use reclaim::{ReclaimStat, Reclaimer};
pub use repair::{RepairStat, Repairer};
pub use scrub::{ScrubMark, ScrubStat, ScrubTargets, Scrubber};
pub use store::{S3Store, StoreSettings, StoreSettingsError};
pub use tiering::{GivesWay, TierOptions, Tiering, TieringStat};
