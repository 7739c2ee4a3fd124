//! Shards that drives should have: which are there, and which are not.

use std::collections::BTreeSet;

use base::ShardIndex;
use client::{Client, RepairOutcome, ShardCount, Verified};
use wire::drive::{DriveService, ShardKey};
use wire::meta::{Content, ExtentRef};

use crate::common::{Fault, World, create, pattern, read_all, run};

/// The extents of all files.
async fn extents(client: &Client) -> Vec<ExtentRef> {
    let (entries, next) = client.scan_map(None).await.unwrap();
    assert_eq!(next, None);
    let of = |content: &Content| if let Content::Extent(extent) = content { Some(*extent) } else { None };
    entries.iter().filter_map(|entry| of(&entry.piece.content)).collect()
}

fn total(verified: &Verified) -> ShardCount {
    verified.groups.values().fold(ShardCount::default(), |sum, count| sum.and(*count))
}

/// Takes a shard from its drive, which takes that for a deletion.
async fn lose(world: &World, client: &Client, extent: &ExtentRef, shard: u8) {
    let key = ShardKey { ledger: client.ledger(), extent: extent.id, shard: ShardIndex(shard) };
    world.drives[usize::from(shard)].delete(vec![key].into()).await.unwrap();
}

#[test]
fn a_parity_shard_that_is_missing_is_found_and_restored_before_somebody_needs_it() {
    run("4+2", |world| async move {
        let client = world.client().await;
        let mut files = Vec::new();
        for (number, len) in [100, 9000, 200_000, 3 << 20, (9 << 20) + 5].into_iter().enumerate() {
            let ino = create(&client, &number.to_string()).await;
            let bytes = pattern(number as u64, len);
            client.write(ino, 0, &bytes).await.unwrap();
            client.fsync(ino).await.unwrap();
            files.push((ino, bytes));
        }
        let extents = extents(&client).await;
        let expected: u64 = extents.iter().map(|extent| u64::from(extent.n)).sum();
        let whole = ShardCount { expected, ..ShardCount::default() };
        assert!(expected > 20);
        assert_eq!(total(&client.verify(&extents).await), whole);
        // One is the last shard of copies, the others are parity.
        let lost: BTreeSet<_> = extents.iter().map(|extent| (extent.id, ShardIndex(extent.n - 1))).collect();
        for extent in &extents {
            lose(&world, &client, extent, extent.n - 1).await;
        }
        let verified = client.verify(&extents).await;
        assert_eq!(total(&verified), ShardCount { missing: lost.len() as u64, ..whole });
        let found: BTreeSet<_> = verified.missing.iter().map(|(extent, shard)| (extent.id, *shard)).collect();
        assert_eq!(found, lost);
        // Reads need no parity, so nobody else notices.
        for (ino, bytes) in &files {
            assert!(read_all(&client, *ino).await.unwrap() == *bytes);
        }
        assert!(client.take_damaged().is_empty());
        for (extent, shard) in &verified.missing {
            client.report_missing(extent, *shard);
        }
        for (entry, _) in client.take_damaged() {
            assert!(matches!(client.repair_shard(&entry).await, RepairOutcome::Stored { .. }));
        }
        assert_eq!(total(&client.verify(&extents).await), whole);
    });
}

#[test]
fn of_a_drive_that_does_not_answer_nothing_is_called_missing() {
    run("4+2", |world| async move {
        let client = world.client().await;
        let ino = create(&client, "a").await;
        client.write(ino, 0, &pattern(1, 9 << 20)).await.unwrap();
        client.fsync(ino).await.unwrap();
        let extents = extents(&client).await;
        let stripes = extents.iter().filter(|extent| extent.n == 6).count() as u64;
        for fault in [Fault::Away, Fault::Failed, Fault::Erring] {
            world.drives[4].set(fault);
            let count = total(&client.verify(&extents).await);
            assert_eq!((count.missing, count.unknown), (0, stripes), "{fault:?}");
        }
        world.drives[4].set(Fault::None);
        assert_eq!(total(&client.verify(&extents).await).unknown, 0);
    });
}
