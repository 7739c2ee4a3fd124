//! Pure arithmetic from a file range to extents, stripes, shards and drives.
//!
//! No I/O, no clock, no randomness: the same arguments give the same result on every machine, because writers, readers
//! and repair must compute the same layout.
//!
//! - [`Profile`]: the number of shards, and how many a read and an acknowledgement need.
//! - [`shard_len`], [`read_plan`]: which bytes of an extent lie in which block of which shard.
//! - [`ErasureCode`]: parity from data, lost shards from the others.
//! - [`plan_placement_groups`], [`replace_members`], [`balance_groups`]: which drives hold a stripe together.
//! - [`losses_survived`], [`writes_survive`]: how many nodes or racks may be lost.
//! - [`plan_capacity`]: usable space for users.
//! - [`BlobBuilder`], [`BlobIndex`]: ranges of files in one object of an object store.
//! - [`PackedPiece`]: the table at the end of an extent with pieces of several files.
//! - [`ClusterMap`]: drives and placement groups as the control ledger publishes them.

mod blob;
mod capacity;
mod cluster_map;
pub mod erasure;
mod packed;
mod placement;
mod profile;
mod stripe;

#[cfg(any(fuzzing, feature = "fuzzing"))]
pub use blob::fuzz_blob;
pub use blob::{
    BLOB_BYTES_MAX, BLOB_BYTES_MIN, BLOB_HEADER_BYTES, Blob, BlobBuilder, BlobHeader, BlobId, BlobIndex,
    BlobPlan, BlobRange,
};
pub use capacity::{CapacityError, CapacityPlan, CapacityRequest, RESERVE_PERCENT, plan_capacity};
pub use cluster_map::{ClusterMap, DriveState, MapDrive};
pub use erasure::{ErasureCode, ErasureCodeError, ReconstructError};
#[cfg(any(fuzzing, feature = "fuzzing"))]
pub use packed::fuzz_packed_table;
pub use packed::{
    PACKED_ENTRY_BYTES, PackedPiece, decode_packed_table, encode_packed_table, packed_table_bytes,
};
pub use placement::{
    DriveSlot, FailureDomain, Fitting, ParseFailureDomainError, Place, PlacementError, PlacementGroup,
    Rebuilding, Spread, acknowledgements_survive, balance_groups, losses_survived, plan_placement_groups,
    replace_members, return_members, suggested_pg_count, writes_survive,
};
pub use profile::{DegradedService, ParseProfileError, Profile, ProfileExplanation};
pub use stripe::{ReadPlan, ShardRead, extent_bytes_max, read_plan, shard_data_range, shard_len};

/// The most shards that one extent may have.
pub const SHARDS_MAX: u8 = 20;
