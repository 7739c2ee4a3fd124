//! Reconcilers: they bring the present state to the wanted state, take no input and may be stopped at any point.
//!
//! [`Reclaimer`] returns the space of removed files. [`Repairer`] stores the shards that commits went ahead without,
//! and rebuilds the shards of lost drives on others. [`Scrubber`] looks for damage, [`DamageKeeper`] finds the files
//! that it destroyed. [`Packer`] gathers small pieces into full extents, [`OrphanCollector`] deletes extents that
//! nothing refers to, [`Verifier`] finds shards that drives should have and do not, [`Tiering`] moves aged extents to an object store. [`Pace`] limits how fast they move data.
//! [`S3Store`] is such a store.

mod bucket;
mod damage;
mod forecast;
mod orphans;
mod others;
mod pace;
mod packer;
mod reclaim;
mod repair;
mod scrub;
mod store;
mod task;
mod tiering;
mod verify;

pub use damage::{DamageKeeper, DamageStat, LostFile};
pub use forecast::Ages;
pub use orphans::{OrphanCollector, OrphanOptions, OrphanStat};
pub use others::{BlobLoad, OtherNodes};
pub use pace::{BYTES_PER_S_MIN, Pace};
pub use packer::{PackOptions, PackStat, PackWait, Packer, UsedGroups};
pub use reclaim::{ReclaimStat, Reclaimer};
pub use repair::{RepairStat, Repairer};
pub use scrub::{ScrubMark, ScrubStat, ScrubTargets, Scrubber};
pub use store::{S3Store, StoreSettings, StoreSettingsError};
pub use tiering::{GivesWay, Steady, TierOptions, Tiering, TieringStat};
pub use verify::{Sweep, Verifier, VerifyOptions, VerifyStat};
