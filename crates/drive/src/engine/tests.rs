use std::time::Duration;

use base::checksum::block_checksums;
use base::env::sim::SimClock;
use base::{ClusterId, DriveId, DriveUuid, Epoch, ExtentId, LedgerId, PgId, ShardIndex};
use bytes::Bytes;
use tokio::sync::oneshot::Receiver;
use wire::drive::{DriveMark, IoPath, PutPurpose, ShardClass, ShardKey, ShardNote, ShardShape};

use super::*;
use crate::admission::Admission;
use crate::format::superblock::{CheckpointPointer, Features};
use crate::format::{BLOCK, Geometry};
use crate::index::Index;

/// A device that records operations and completes them when a test says so.
#[derive(Default)]
struct Manual {
    writes: Vec<u64>,
    syncs: Vec<u64>,
    reads: Vec<u64>,
}

impl Device for Manual {
    fn submit(&mut self, op: Op) {
        match op {
            Op::Read { token, .. } => self.reads.push(token),
            Op::Write { token, .. } => self.writes.push(token),
            Op::Sync { token } => self.syncs.push(token),
            Op::Punch { .. } => unreachable!("these engines give nothing back"),
        }
    }

    fn wait(&mut self, _done: &mut Vec<Done>, _timeout: Option<Duration>) {}

    fn poll(&mut self, _done: &mut Vec<Done>) {}

    fn io_path(&self) -> IoPath {
        IoPath::Simulated
    }
}

fn engine() -> Engine {
    let geometry = Geometry::new(33 << 20, 1 << 20).unwrap();
    let superblock = Superblock {
        version: crate::format::FORMAT_VERSION,
        features: Features::default(),
        cluster: ClusterId([1; 16]),
        uuid: DriveUuid([2; 16]),
        capacity_bytes: geometry.capacity_bytes,
        segment_bytes: geometry.segment_bytes,
        sequence: 2,
        incarnation: 1,
        gap_incarnation: 0,
        closed: false,
        checkpoint: CheckpointPointer::default(),
        previous: CheckpointPointer::default(),
    };
    let shared = Arc::new(Shared::new(
        DriveId(1),
        superblock.uuid,
        DriveMark::default(),
        Index::new(geometry),
        1 << 20,
        Admission::new(1 << 20, 100, 64 << 20),
    ));
    let limits = Limits {
        batch_bytes: 1 << 20,
        batch_records: 100,
        checkpoint_every_bytes: 1 << 30,
        trim_run_bytes: None,
    };
    Engine::new(shared, superblock, 1, limits, Arc::new(SimClock::default()))
}

fn key(extent: u64) -> ShardKey {
    ShardKey { ledger: LedgerId(1), extent: ExtentId(extent), shard: ShardIndex(0) }
}

fn put(engine: &mut Engine, device: &mut Manual, extent: u64, class: ShardClass) -> Receiver<PutOutcome> {
    let bytes = Bytes::from(vec![extent as u8; BLOCK]);
    let put = PutShard {
        key: key(extent),
        shape: ShardShape { pg: PgId(1), k: 1, m: 0, extent_len: 4096 },
        class,
        purpose: PutPurpose::Write,
        note: ShardNote::default(),
        position: None,
        pg_epoch: Epoch(1),
        checksums: block_checksums(ExtentId(extent), ShardIndex(0), 0, &bytes),
        bytes,
    };
    let (reply, answer) = oneshot::channel();
    let request = PutRequest { put, replaces: None, reply, place: None };
    engine.accept(Request::Put(Box::new(request)), device);
    answer
}

fn delete(engine: &mut Engine, device: &mut Manual, extent: u64) -> Receiver<Result<(), Ended>> {
    let (reply, answer) = oneshot::channel();
    engine.accept(Request::Delete(DeleteRequest { delete: vec![key(extent)].into(), reply }), device);
    answer
}

fn complete(engine: &mut Engine, device: &mut Manual, token: u64, result: io::Result<()>) {
    engine.complete(Done { token, result, buffer: None }, device);
    engine.pump(device);
}

/// Completes everything under way, writes first.
fn settle(engine: &mut Engine, device: &mut Manual) {
    engine.pump(device);
    while let Some(token) = device.writes.pop().or_else(|| device.syncs.pop()) {
        complete(engine, device, token, Ok(()));
    }
}

#[test]
fn a_put_is_acknowledged_after_all_writes_of_its_batch_and_their_sync() {
    let (mut engine, mut device) = (engine(), Manual::default());
    let mut small = put(&mut engine, &mut device, 1, ShardClass::Small);
    let mut bulk = put(&mut engine, &mut device, 2, ShardClass::Bulk);
    engine.pump(&mut device);
    assert_eq!((device.writes.len(), device.syncs.len()), (2, 0), "one frame per class");
    // A put that comes now waits for the next batch.
    let mut later = put(&mut engine, &mut device, 3, ShardClass::Small);
    let first = device.writes.remove(0);
    complete(&mut engine, &mut device, first, Ok(()));
    assert_eq!((device.writes.len(), device.syncs.len()), (1, 0), "no sync before the last write");
    let second = device.writes.remove(0);
    complete(&mut engine, &mut device, second, Ok(()));
    assert_eq!((device.writes.len(), device.syncs.len()), (0, 1), "nothing is written beside a sync");
    assert!(small.try_recv().is_err() && bulk.try_recv().is_err());
    assert!(engine.shared.index().get(&key(1)).is_none(), "not visible before it is durable");
    let sync = device.syncs.remove(0);
    complete(&mut engine, &mut device, sync, Ok(()));
    assert_eq!((small.try_recv(), bulk.try_recv()), (Ok(PutOutcome::Stored), Ok(PutOutcome::Stored)));
    assert!(later.try_recv().is_err());
    settle(&mut engine, &mut device);
    assert_eq!(later.try_recv(), Ok(PutOutcome::Stored));
}

#[test]
fn a_put_and_a_delete_of_one_shard_never_share_a_batch() {
    let (mut engine, mut device) = (engine(), Manual::default());
    let mut first = put(&mut engine, &mut device, 1, ShardClass::Small);
    let mut second = put(&mut engine, &mut device, 1, ShardClass::Small);
    settle(&mut engine, &mut device);
    assert_eq!((first.try_recv(), second.try_recv()), (Ok(PutOutcome::Stored), Ok(PutOutcome::Exists)));
    let mut gone = delete(&mut engine, &mut device, 1);
    let mut again = put(&mut engine, &mut device, 1, ShardClass::Small);
    engine.pump(&mut device);
    assert_eq!(device.writes.len(), 1);
    settle(&mut engine, &mut device);
    assert_eq!((gone.try_recv(), again.try_recv()), (Ok(Ok(())), Ok(PutOutcome::Stored)));
    assert!(engine.shared.index().get(&key(1)).is_some());
}

#[test]
fn a_shard_of_a_discarded_extent_is_not_stored_by_a_late_put() {
    let (mut engine, mut device) = (engine(), Manual::default());
    let discard = |engine: &mut Engine, device: &mut Manual, extent| {
        let (reply, mut answer) = oneshot::channel();
        let delete = DeleteShards { keys: vec![key(extent)], position: None, is_void: true };
        engine.accept(Request::Delete(DeleteRequest { delete, reply }), device);
        settle(engine, device);
        assert_eq!(answer.try_recv(), Ok(Ok(())));
    };
    let mut stored = put(&mut engine, &mut device, 1, ShardClass::Small);
    settle(&mut engine, &mut device);
    assert_eq!(stored.try_recv(), Ok(PutOutcome::Stored));
    // Whether it was there or not.
    for extent in [1, 2] {
        discard(&mut engine, &mut device, extent);
        let mut late = put(&mut engine, &mut device, extent, ShardClass::Small);
        settle(&mut engine, &mut device);
        assert_eq!(late.try_recv(), Ok(PutOutcome::Void));
        assert!(engine.shared.index().get(&key(extent)).is_none());
    }
    // A usual delete does not forbid a later put.
    let mut gone = delete(&mut engine, &mut device, 3);
    let mut again = put(&mut engine, &mut device, 3, ShardClass::Small);
    settle(&mut engine, &mut device);
    assert_eq!((gone.try_recv(), again.try_recv()), (Ok(Ok(())), Ok(PutOutcome::Stored)));
}

#[test]
fn a_put_that_was_given_up_while_it_waited_is_not_stored_after_the_delete() {
    let (mut engine, mut device) = (engine(), Manual::default());
    let _under_way = put(&mut engine, &mut device, 1, ShardClass::Small);
    engine.pump(&mut device);
    drop(put(&mut engine, &mut device, 2, ShardClass::Small));
    let mut gone = delete(&mut engine, &mut device, 2);
    settle(&mut engine, &mut device);
    assert_eq!(gone.try_recv(), Ok(Ok(())));
    assert!(engine.shared.index().get(&key(2)).is_none(), "nobody would delete it any more");
}

#[test]
fn after_a_failed_sync_everything_fails_and_nothing_is_written() {
    let (mut engine, mut device) = (engine(), Manual::default());
    let mut first = put(&mut engine, &mut device, 1, ShardClass::Small);
    engine.pump(&mut device);
    let mut waiting = put(&mut engine, &mut device, 2, ShardClass::Small);
    let write = device.writes.remove(0);
    complete(&mut engine, &mut device, write, Ok(()));
    let sync = device.syncs.remove(0);
    complete(&mut engine, &mut device, sync, Err(io::Error::other("broken")));
    assert!(first.try_recv().is_err(), "its fate is unknown, so it is not acknowledged");
    assert_eq!(waiting.try_recv(), Ok(PutOutcome::Failed));
    let mut after = delete(&mut engine, &mut device, 1);
    engine.pump(&mut device);
    assert_eq!(after.try_recv(), Ok(Err(Ended)));
    assert!(device.writes.is_empty() && device.syncs.is_empty());
    assert!(engine.shared.failure().unwrap().contains("broken"));
}

#[test]
fn a_segment_is_free_only_when_no_checkpoint_in_either_superblock_needs_it() {
    let (mut engine, mut device) = (engine(), Manual::default());
    // Enough shards to seal the first segment, all of them deleted again.
    for extent in 0..300 {
        let mut stored = put(&mut engine, &mut device, extent, ShardClass::Small);
        settle(&mut engine, &mut device);
        assert_eq!(stored.try_recv(), Ok(PutOutcome::Stored));
    }
    for extent in 0..300 {
        drop(delete(&mut engine, &mut device, extent));
    }
    settle(&mut engine, &mut device);
    assert!(!engine.shared.index().dead_segments().is_empty());
    // After the first checkpoint there is still an older one, whose recovery would need the dead segments.
    engine.start_checkpoint();
    finish_checkpoint(&mut engine, &mut device, |_| {});
    assert!(!engine.shared.index().dead_segments().is_empty());
    let free = engine.shared.index().free_segments();
    engine.start_checkpoint();
    let syncs = finish_checkpoint(&mut engine, &mut device, |engine| {
        assert!(engine.shared.index().free_segments() < free, "freed too early");
    });
    assert_eq!(syncs, 3, "the runs, then each superblock");
    assert!(engine.shared.index().dead_segments().is_empty());
    assert!(engine.shared.index().free_segments() >= free);
}

/// Completes the checkpoint under way. Returns the number of syncs.
fn finish_checkpoint(engine: &mut Engine, device: &mut Manual, check: impl Fn(&Engine)) -> u32 {
    let mut syncs = 0;
    while engine.checkpoint.is_some() {
        engine.pump(device);
        check(engine);
        let token = device.writes.pop().unwrap_or_else(|| {
            syncs += 1;
            device.syncs.pop().expect("a checkpoint always waits for something")
        });
        engine.complete(Done { token, result: Ok(()), buffer: None }, device);
    }
    syncs
}

#[test]
fn nothing_is_appended_beside_the_last_checkpoint() {
    let (mut engine, mut device) = (engine(), Manual::default());
    let mut accepted = put(&mut engine, &mut device, 1, ShardClass::Small);
    let (reply, mut closed) = oneshot::channel();
    engine.accept(Request::Close(reply), &mut device);
    // A checkpoint that was due anyway is not the last one: the put still comes before that.
    engine.start_checkpoint();
    while engine.checkpoint.is_some() {
        engine.pump(&mut device);
        let token = device.writes.pop().or_else(|| device.syncs.pop()).unwrap();
        engine.complete(Done { token, result: Ok(()), buffer: None }, &mut device);
    }
    assert!(closed.try_recv().is_err());
    while accepted.try_recv() != Ok(PutOutcome::Stored) {
        engine.pump(&mut device);
        let token = device.writes.pop().or_else(|| device.syncs.pop()).unwrap();
        engine.complete(Done { token, result: Ok(()), buffer: None }, &mut device);
    }
    engine.pump(&mut device);
    let mut late = put(&mut engine, &mut device, 2, ShardClass::Small);
    settle(&mut engine, &mut device);
    assert_eq!(closed.try_recv(), Ok(Ok(())));
    assert!(engine.has_ended() && engine.superblock.closed);
    assert_eq!(late.try_recv(), Ok(PutOutcome::Failed));
    assert_eq!(engine.superblock.checkpoint.frontier_seq, engine.counters.durable_seq);
}
