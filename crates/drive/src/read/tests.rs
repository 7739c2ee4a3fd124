use std::path::Path;
use std::sync::Arc;

use base::checksum::block_checksums;
use base::env::sim::Sim;
use base::{ClusterId, DriveId, DriveUuid, Epoch, ExtentId, LedgerId, PgId, ShardIndex};
use wire::drive::{
    DriveService, GetPurpose, PutPurpose, PutShard, ShardClass, ShardKey, ShardNote, ShardShape,
};

use super::*;
use crate::{Existing, FormatOptions, OpenOptions, Preallocate};

fn drive() -> Arc<Drive> {
    let env = Sim::new(1).env();
    let options = FormatOptions {
        cluster: ClusterId([1; 16]),
        uuid: DriveUuid([2; 16]),
        capacity_bytes: Some(17 << 20),
        segment_bytes: Some(1 << 20),
        existing: Existing::Keep,
        preallocate: Preallocate::Reserve,
    };
    Drive::format(&env, Path::new("drive"), &options).unwrap();
    Drive::open(&env, DriveId(1), Path::new("drive"), &OpenOptions::new(options.cluster)).unwrap()
}

/// The extent number is the same in every ledger, so the block checksums are too for equal bytes.
fn put(ledger: u32, fill: u8) -> PutShard {
    let key = ShardKey { ledger: LedgerId(ledger), extent: ExtentId(5), shard: ShardIndex(0) };
    let bytes = Bytes::from(vec![fill; BLOCK]);
    PutShard {
        key,
        shape: ShardShape { pg: PgId(1), k: 1, m: 0, extent_len: 4096 },
        class: ShardClass::Small,
        purpose: PutPurpose::Write,
        note: ShardNote::default(),
        position: None,
        pg_epoch: Epoch(1),
        checksums: block_checksums(key.extent, key.shard, 0, &bytes),
        bytes,
    }
}

#[test]
fn a_place_that_another_shard_took_meanwhile_gives_nothing() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let drive = drive();
    runtime.block_on(async {
        let (mine, other) = (put(1, 0x11), put(2, 0x22));
        drive.put(mine.clone()).await.unwrap();
        let request = GetShard { key: mine.key, first_block: 0, blocks: 1, purpose: GetPurpose::Read };
        let place = drive.place(&request).unwrap();
        assert_eq!(
            drive
                .attempt(&request, &place, (ReadPath::DeviceOnly, ReadClass::Foreground))
                .await
                .unwrap()
                .bytes,
            mine.bytes
        );
        drive.delete(vec![mine.key].into()).await.unwrap();
        // Repeat until the segment is reused and the other ledger's shard lies exactly at the old place.
        for _ in 0..20_000 {
            drive.put(other.clone()).await.unwrap();
            let taken = drive.place(&GetShard { key: other.key, ..request }).unwrap();
            if (taken.entry.segment, taken.entry.block) == (place.entry.segment, place.entry.block) {
                break;
            }
            drive.delete(vec![other.key].into()).await.unwrap();
        }
        let blind =
            drive.read_place(&request, &place, (ReadPath::DeviceOnly, ReadClass::Foreground)).await.unwrap();
        assert_eq!(blind.bytes, other.bytes, "checksums alone do not tell ledgers apart");
        assert!(matches!(
            drive.attempt(&request, &place, (ReadPath::DeviceOnly, ReadClass::Foreground)).await,
            Err(Miss::Moved)
        ));
        assert!(matches!(drive.read(request).await, Err(GetShardError::NotFound { .. })));
    });
}
