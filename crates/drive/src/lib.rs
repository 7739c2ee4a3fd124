//! One drive: append-only segments on a block device or file, an index in memory, checkpoints and recovery.
//!
//! A drive stores shards: immutable runs of whole blocks under a key, each block with a checksum that is bound to that
//! key. Acknowledged shards survive power loss; a shard that the drive cannot vouch for is never returned. The byte
//! format is drawn in `docs/formats/drive.md`.

mod admission;
mod buffer;
mod device;
mod drive;
mod engine;
mod error;
mod foreground;
mod format;
#[cfg(any(fuzzing, feature = "fuzzing"))]
pub mod fuzzing;
mod index;
mod prepare;
mod read;
mod recovery;
mod scan;
mod scrub;
mod shared;
mod sums;
mod tools;

pub use buffer::keep_spare_buffers;
pub use device::uring::io_uring_works;
pub use drive::{Drive, OpenOptions, PreferIo, ReadCache, Trim};
pub use error::{FormatDriveError, OpenDriveError};
pub use format::FORMAT_VERSION;
pub use format::frame::{FrameHeader, RecordOp};
pub use format::segment::{SegmentClass, SegmentHeader};
pub use format::superblock::{CheckpointPointer, Features, Superblock};
pub use prepare::{Existing, FormatOptions, Preallocate};
pub use recovery::RecoveryReport;
pub use tools::ToolError;
pub use tools::bench::{BenchFigure, BenchOptions, BenchReport, bench};
pub use tools::dump::{Dump, FrameDump, RecordDump, SegmentDump, SuperblockDump, dump};
pub use tools::fsck::{FsckReport, fsck};
pub use tools::inventory::inventory;
pub use tools::reads::ReadBench;
