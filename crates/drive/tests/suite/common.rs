//! Helpers that the tests of an open drive share.

use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use base::checksum::block_checksums;
use base::env::Env;
use base::units::MIB;
use base::{ClusterId, DriveId, DriveUuid, Epoch, ExtentId, LedgerId, Lineage, PgId, Seq, ShardIndex};
use bytes::Bytes;
use drive::{Drive, Existing, FormatOptions, OpenDriveError, OpenOptions, Preallocate};
use wire::drive::{
    DriveService, GetPurpose, GetShard, GetShardError, PutPurpose, PutShard, ShardBlocks, ShardClass,
    ShardKey, ShardNote, ShardShape,
};
use wire::position::Position;

pub const CLUSTER: ClusterId = ClusterId([7; 16]);
pub const UUID: DriveUuid = DriveUuid([9; 16]);

/// Polls the future until it is ready; sleeps in between if it waits for another thread.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = std::pin::pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// Waits for all futures, polling them in turn, so that they share group commits.
pub fn join_all<'a, T>(futures: Vec<Pin<Box<dyn Future<Output = T> + Send + 'a>>>) -> Vec<T> {
    let mut slots: Vec<_> = futures.into_iter().map(|future| (Some(future), None)).collect();
    block_on(std::future::poll_fn(|context| {
        let mut pending = false;
        for (future, result) in &mut slots {
            let Some(running) = future else { continue };
            match running.as_mut().poll(context) {
                Poll::Ready(value) => {
                    *result = Some(value);
                    *future = None;
                }
                Poll::Pending => pending = true,
            }
        }
        if pending { Poll::Pending } else { Poll::Ready(()) }
    }));
    slots.into_iter().map(|(_, result)| result.unwrap()).collect()
}

pub fn key(extent: u64) -> ShardKey {
    ShardKey { ledger: LedgerId(1), extent: ExtentId(extent), shard: ShardIndex((extent % 5) as u8) }
}

/// Bytes derived from the shard's key.
pub fn content(key: ShardKey, blocks: u32) -> Vec<u8> {
    let seed = key.extent.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(key.ledger.0);
    let word = |word: u64| (seed ^ word.wrapping_mul(0x1234_5678_9abc_def1)).to_le_bytes();
    (0..u64::from(blocks) * 512).flat_map(word).collect()
}

pub fn put_of(key: ShardKey, class: ShardClass, bytes: Vec<u8>) -> PutShard {
    PutShard {
        key,
        shape: ShardShape { pg: PgId(4), k: 4, m: 2, extent_len: bytes.len() as u32 },
        class,
        purpose: PutPurpose::Write,
        note: ShardNote::default(),
        position: None,
        pg_epoch: Epoch(1),
        checksums: block_checksums(key.extent, key.shard, 0, &bytes),
        bytes: Bytes::from(bytes),
    }
}

pub fn put(key: ShardKey, blocks: u32) -> PutShard {
    let class = if blocks > 16 { ShardClass::Bulk } else { ShardClass::Small };
    put_of(key, class, content(key, blocks))
}

pub fn position(ledger: u32, lineage: u64, seq: u64) -> Position {
    Position { ledger: LedgerId(ledger), lineage: Lineage(lineage), seq: Seq(seq) }
}

pub fn get(
    drive: &Drive,
    key: ShardKey,
    first_block: u32,
    blocks: u32,
) -> Result<ShardBlocks, GetShardError> {
    block_on(drive.get(GetShard { key, first_block, blocks, purpose: GetPurpose::Read }))
}

pub fn format_options(capacity: u64) -> FormatOptions {
    FormatOptions {
        cluster: CLUSTER,
        uuid: UUID,
        capacity_bytes: Some(capacity),
        segment_bytes: Some(MIB),
        existing: Existing::Keep,
        preallocate: Preallocate::Reserve,
    }
}

pub fn format(env: &Env, path: &Path, capacity: u64) {
    Drive::format(env, path, &format_options(capacity)).unwrap();
}

pub fn open(env: &Env, path: &Path) -> Result<Arc<Drive>, OpenDriveError> {
    open_with(env, path, &OpenOptions::new(CLUSTER))
}

pub fn open_with(env: &Env, path: &Path, options: &OpenOptions) -> Result<Arc<Drive>, OpenDriveError> {
    Drive::open(env, DriveId(1), path, options)
}

/// The four parts of the space always add up to the whole.
#[track_caller]
pub fn check_stat(drive: &Drive) {
    let stat = drive.stat();
    let sum = stat.live_bytes + stat.garbage_bytes + stat.reserved_bytes + stat.free_bytes;
    assert_eq!(sum, stat.capacity_bytes, "{stat:?}");
}
