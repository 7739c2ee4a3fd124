//! The rules for every log engine, checked for each of them: in memory, on simulated files, on real files, in etcd, in
//! PostgreSQL.
//!
//! A case with random numbers prints its seed when it fails.

mod moving;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use base::env::sim::{Sim, SimRandom};
use base::env::{Env, Files, Random};
use base::{Epoch, LedgerId, Seq};
use tokio::runtime::Handle;
use wire::BoxFuture;

use super::frame::ENTRY_BYTES_MAX;
use super::{
    AppendError, CopyIo, Fence, FileLog, LedgerLog, LogCaps, LogEngine, LogEntry, LogError, LogSizes, MemLog,
    MirrorOptions, MirroredLog, Sealed, Tail, entry, etcd, postgres,
};

/// Small sizes, so that a test fills several files.
pub(super) const SIZES: LogSizes = LogSizes { file_bytes: 8192, zero_ahead_bytes: 1024, reserve_bytes: 512 };

/// Engines do their work when polled and never wait; those that do are [`Waiting`].
pub(super) fn now<T>(mut future: BoxFuture<'_, T>) -> T {
    match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => unreachable!("no engine here waits"),
    }
}

/// An engine whose log can be opened again.
trait Engine {
    fn open(&self) -> Result<Arc<dyn LedgerLog>, LogError>;
}

struct Memory(MemLog);

impl Engine for Memory {
    fn open(&self) -> Result<Arc<dyn LedgerLog>, LogError> {
        Ok(Arc::new(self.0.clone()))
    }
}

struct InFiles {
    env: Env,
    dir: PathBuf,
}

impl Engine for InFiles {
    fn open(&self) -> Result<Arc<dyn LedgerLog>, LogError> {
        Ok(Arc::new(FileLog::open(&self.env, &self.dir)?.with_sizes(SIZES)))
    }
}

fn simulated(sim: &Sim) -> InFiles {
    InFiles { env: sim.env(), dir: PathBuf::from("/node/log") }
}

struct Mirrored {
    env: Env,
    dirs: Vec<PathBuf>,
    io: CopyIo,
}

impl Mirrored {
    fn new(env: Env, root: &Path, copies: u32, io: CopyIo) -> Self {
        let dirs: Vec<PathBuf> = (0..copies).map(|copy| root.join(copy.to_string()).join("log")).collect();
        for dir in &dirs {
            env.files.create_dir_all(dir.parent().unwrap()).unwrap();
        }
        Self { env, dirs, io }
    }
}

impl Engine for Mirrored {
    fn open(&self) -> Result<Arc<dyn LedgerLog>, LogError> {
        let options = MirrorOptions { io: self.io, sizes: SIZES, ..MirrorOptions::default() };
        Ok(Arc::new(MirroredLog::open(&self.env, &self.dirs, options)?))
    }
}

/// An engine that waits for answers, for callers that do not.
struct Waiting {
    log: Arc<dyn LedgerLog>,
    runtime: Handle,
}

impl LedgerLog for Waiting {
    fn seal(&self, epoch: Epoch, nonce: u64) -> BoxFuture<'_, Result<Tail, LogError>> {
        Box::pin(async move { self.runtime.block_on(self.log.seal(epoch, nonce)) })
    }

    fn fence(&self) -> BoxFuture<'_, Result<Fence, LogError>> {
        Box::pin(async move { self.runtime.block_on(self.log.fence()) })
    }

    fn renew(&self, owner: Sealed) -> BoxFuture<'_, Result<(), LogError>> {
        Box::pin(async move { self.runtime.block_on(self.log.renew(owner)) })
    }

    fn append(
        &self,
        epoch: Epoch,
        first: Seq,
        batches: Vec<Vec<u8>>,
    ) -> BoxFuture<'_, Result<(), AppendError>> {
        Box::pin(async move { self.runtime.block_on(self.log.append(epoch, first, batches)) })
    }

    fn read(&self, from: Seq, limit_bytes: usize) -> BoxFuture<'_, Result<Vec<LogEntry>, LogError>> {
        Box::pin(async move { self.runtime.block_on(self.log.read(from, limit_bytes)) })
    }

    fn trim(&self, up_to: Seq) -> BoxFuture<'_, Result<(), LogError>> {
        Box::pin(async move { self.runtime.block_on(self.log.trim(up_to)) })
    }

    fn caps(&self) -> LogCaps {
        self.log.caps()
    }

    fn first(&self) -> Seq {
        self.log.first()
    }
}

/// A ledger of its own in an engine that all tests share.
struct Remote<'a> {
    engine: &'a dyn LogEngine,
    runtime: Handle,
    ledger: LedgerId,
}

impl Engine for Remote<'_> {
    fn open(&self) -> Result<Arc<dyn LedgerLog>, LogError> {
        let runtime = self.runtime.clone();
        let log = runtime.block_on(self.engine.open(self.ledger))?;
        Ok(Arc::new(Waiting { log, runtime }))
    }
}

fn for_every_engine(case: impl Fn(&dyn Engine)) {
    case(&Memory(MemLog::new()));
    case(&simulated(&Sim::new(1)));
    let dir = tempfile::tempdir().unwrap();
    case(&InFiles { env: Env::real(), dir: dir.path().join("log") });
    case(&Mirrored::new(Sim::new(1).env(), Path::new("/node"), 2, CopyIo::Inline));
    case(&Mirrored::new(Env::real(), dir.path(), 3, CopyIo::Threads));
    let cluster = etcd::tests::Shared::get();
    case(&Remote { engine: cluster.etcd(), runtime: cluster.runtime(), ledger: cluster.next_ledger() });
    let servers = postgres::tests::Shared::get();
    case(&Remote { engine: servers.engine(), runtime: servers.runtime(), ledger: servers.next_ledger() });
}

fn batch(number: u64) -> Vec<u8> {
    format!("batch {number} ").into_bytes().repeat(number as usize % 7 + 1)
}

pub(super) fn append(
    log: &dyn LedgerLog,
    epoch: u64,
    seqs: std::ops::RangeInclusive<u64>,
) -> Result<(), AppendError> {
    let first = Seq(*seqs.start());
    now(log.append(Epoch(epoch), first, seqs.map(batch).collect()))
}

fn read_all(log: &dyn LedgerLog, from: u64, limit_bytes: usize) -> Vec<LogEntry> {
    let mut all: Vec<LogEntry> = Vec::new();
    loop {
        let next = all.last().map_or(from, |entry| entry.seq.0 + 1);
        let page = now(log.read(Seq(next), limit_bytes)).unwrap();
        if page.is_empty() {
            return all;
        }
        all.extend(page);
    }
}

/// The log holds exactly the entries `from..=to`, each with its bytes.
#[track_caller]
pub(super) fn check_entries(log: &dyn LedgerLog, from: u64, to: u64) {
    let expected: Vec<_> = (from..=to).map(|seq| (seq, batch(seq))).collect();
    for limit_bytes in [100, 1 << 20] {
        let entries = read_all(log, from, limit_bytes);
        let found: Vec<_> = entries.into_iter().map(|entry| (entry.seq.0, entry.batch)).collect();
        assert_eq!(found, expected);
    }
}

#[test]
fn entries_come_back_in_order_with_the_epoch_that_wrote_them() {
    for_every_engine(|engine| {
        let log = engine.open().unwrap();
        assert_eq!(now(log.fence()).unwrap().epoch, Epoch(0));
        assert_eq!(now(log.seal(Epoch(3), 0)).unwrap().seq, Seq(0));
        append(&*log, 3, 1..=5).unwrap();
        append(&*log, 3, 6..=6).unwrap();
        assert_eq!(now(log.seal(Epoch(7), 0)).unwrap().seq, Seq(6));
        append(&*log, 7, 7..=9).unwrap();
        drop(log);
        let log = engine.open().unwrap();
        check_entries(&*log, 1, 9);
        let epochs: Vec<u64> = read_all(&*log, 1, 1 << 20).iter().map(|entry| entry.epoch.0).collect();
        assert_eq!(epochs, [3, 3, 3, 3, 3, 3, 7, 7, 7]);
        assert_eq!(now(log.fence()).unwrap().epoch, Epoch(7));
        assert_eq!(now(log.seal(Epoch(8), 0)).unwrap().seq, Seq(9));
    });
}

#[test]
fn an_append_that_does_not_continue_the_log_leaves_nothing() {
    for_every_engine(|engine| {
        let log = engine.open().unwrap();
        now(log.seal(Epoch(1), 0)).unwrap();
        append(&*log, 1, 1..=3).unwrap();
        for first in [0, 1, 3, 5] {
            assert!(matches!(append(&*log, 1, first..=first), Err(AppendError::Fenced(Epoch(1)))), "{first}");
        }
        append(&*log, 1, 4..=4).unwrap();
        check_entries(&*log, 1, 4);
        drop(log);
        check_entries(&*engine.open().unwrap(), 1, 4);
    });
}

#[test]
fn a_seal_fences_every_lower_epoch_for_good() {
    for_every_engine(|engine| {
        let log = engine.open().unwrap();
        now(log.seal(Epoch(2), 0)).unwrap();
        append(&*log, 2, 1..=2).unwrap();
        for epoch in [0, 1, 2] {
            assert!(matches!(now(log.seal(Epoch(epoch), 0)), Err(LogError::Fenced(Epoch(2)))));
        }
        now(log.seal(Epoch(5), 0)).unwrap();
        assert!(matches!(append(&*log, 2, 3..=3), Err(AppendError::Fenced(Epoch(5)))));
        assert!(matches!(append(&*log, 6, 3..=3), Err(AppendError::Fenced(Epoch(5)))));
        check_entries(&*log, 1, 2);
        drop(log);
        let log = engine.open().unwrap();
        assert!(append(&*log, 2, 3..=3).is_err());
        assert!(matches!(now(log.seal(Epoch(5), 0)), Err(LogError::Fenced(Epoch(5)))));
        check_entries(&*log, 1, 2);
    });
}

#[test]
fn the_fence_is_the_last_seal_and_the_end_of_the_log() {
    for_every_engine(|engine| {
        let log = engine.open().unwrap();
        let check = |epoch, nonce, tail| {
            assert_eq!(
                now(log.fence()).unwrap(),
                Fence { epoch: Epoch(epoch), nonce, tail: Seq(tail), alive: 0 }
            );
        };
        check(0, 0, 0);
        now(log.seal(Epoch(2), 77)).unwrap();
        check(2, 77, 0);
        append(&*log, 2, 1..=3).unwrap();
        assert!(append(&*log, 2, 3..=3).is_err());
        assert!(now(log.seal(Epoch(2), 78)).is_err());
        check(2, 77, 3);
        now(log.seal(Epoch(3), 78)).unwrap();
        check(3, 78, 3);
    });
}

#[test]
fn pages_cover_every_entry_once() {
    for_every_engine(|engine| {
        let log = engine.open().unwrap();
        for epoch in 1..=4 {
            now(log.seal(Epoch(epoch), 0)).unwrap();
            for seq in epoch * 20 - 19..=epoch * 20 {
                append(&*log, epoch, seq..=seq).unwrap();
            }
        }
        for limit_bytes in [0, 1, 7, 100, 1000, 1 << 20] {
            for from in [1, 2, 20, 21, 55, 80] {
                let found: Vec<u64> =
                    read_all(&*log, from, limit_bytes).iter().map(|entry| entry.seq.0).collect();
                assert_eq!(found, (from..=80).collect::<Vec<_>>(), "from={from} limit={limit_bytes}");
            }
            let page = now(log.read(Seq(1), limit_bytes)).unwrap();
            let bytes: usize = page.iter().rev().skip(1).map(|entry| entry.batch.len()).sum();
            assert!(bytes <= limit_bytes, "a page is at most one entry too long");
        }
        assert!(now(log.read(Seq(81), 100)).unwrap().is_empty());
    });
}

#[test]
fn a_trim_keeps_everything_above_its_argument_and_where_the_log_ends() {
    for_every_engine(|engine| {
        let mut tail = 0;
        for (epoch, up_to) in (1..).zip([0, 3, 12, 12, 29, 60, 1000]) {
            let log = engine.open().unwrap();
            assert_eq!(now(log.seal(Epoch(epoch), 0)).unwrap().seq, Seq(tail));
            for seq in tail + 1..=tail + 10 {
                append(&*log, epoch, seq..=seq).unwrap();
            }
            tail += 10;
            now(log.trim(Seq(up_to))).unwrap();
            check_entries(&*log, up_to.min(tail) + 1, tail);
            assert!(log.first().0 <= up_to.min(tail) + 1);
            drop(log);
            check_entries(&*engine.open().unwrap(), up_to.min(tail) + 1, tail);
        }
        let log = engine.open().unwrap();
        assert!(matches!(now(log.read(Seq(1), 100)), Err(LogError::Damaged(_))), "trimmed, not empty");
    });
}

#[test]
fn a_batch_above_the_limit_is_refused_before_it_can_be_lost() {
    for_every_engine(|engine| {
        let log = engine.open().unwrap();
        now(log.seal(Epoch(1), 0)).unwrap();
        let max = log.caps().entry_bytes_max;
        assert_eq!(max, if log.caps().lease.is_none() { ENTRY_BYTES_MAX } else { entry::ENTRY_BYTES_MAX });
        let result = now(log.append(Epoch(1), Seq(1), vec![vec![1; max + 1]]));
        assert!(matches!(result, Err(AppendError::TooLarge)), "{result:?}");
        append(&*log, 1, 1..=2).unwrap();
        drop(log);
        check_entries(&*engine.open().unwrap(), 1, 2);
    });
}

/// A log file's path by its first entry.
fn file_of(first: u64) -> PathBuf {
    Path::new("/node/log").join(format!("{first:016x}.log"))
}

/// Where entry `seq` begins in the only file, which begins with a seal.
fn offset_of(seq: u64) -> usize {
    32 + (1..seq).map(|before| 32 + batch(before).len()).sum::<usize>()
}

fn log_of_four(sim: &Sim) -> InFiles {
    let engine = simulated(sim);
    let log = engine.open().unwrap();
    now(log.seal(Epoch(1), 0)).unwrap();
    (1..=4).for_each(|seq| append(&*log, 1, seq..=seq).unwrap());
    engine
}

#[test]
fn any_damaged_bit_of_an_entry_with_others_behind_it_is_reported() {
    for bit in 0..(32 + batch(2).len()) * 8 {
        let sim = Sim::new(1);
        let engine = log_of_four(&sim);
        sim.files.flip_bit(&file_of(1), (offset_of(2) + bit / 8) as u64, (bit % 8) as u8);
        let opened = engine.open().err();
        assert!(matches!(opened, Some(LogError::Damaged(_))), "bit {bit}: {opened:?}");
    }
}

#[test]
fn a_missing_file_is_reported() {
    let sim = Sim::new(1);
    let engine = simulated(&sim);
    let log = engine.open().unwrap();
    for epoch in 1..=3 {
        now(log.seal(Epoch(epoch), 0)).unwrap();
        append(&*log, epoch, epoch..=epoch).unwrap();
    }
    sim.files.remove_file(&file_of(2)).unwrap();
    assert!(matches!(engine.open().err(), Some(LogError::Damaged(_))));
}

#[test]
fn files_that_are_not_appended_to_any_more_keep_nothing_of_what_was_zeroed_ahead() {
    let sim = Sim::new(1);
    let engine = log_of_four(&sim);
    let log = engine.open().unwrap();
    now(log.seal(Epoch(2), 0)).unwrap();
    let end = 5 + 3 * SIZES.file_bytes / batch(5).len() as u64;
    (5..=end).for_each(|seq| append(&*log, 2, seq..=seq).unwrap());
    let mut files = sim.files.list(Path::new("/node/log")).unwrap();
    files.sort();
    let (_, before) = files.split_last().unwrap();
    assert!(before.len() > 2, "{before:?}");
    for (file, next) in before.iter().zip(&files[1..]) {
        let first = u64::from_str_radix(next.file_stem().unwrap().to_str().unwrap(), 16).unwrap();
        assert!(sim.files.read(file).unwrap().ends_with(&batch(first - 1)), "{}", file.display());
    }
    check_entries(&*engine.open().unwrap(), 1, end);
}

#[test]
fn a_frame_of_a_newer_version_is_refused() {
    let sim = Sim::new(1);
    let engine = log_of_four(&sim);
    let mut bytes = sim.files.read(&file_of(1)).unwrap();
    let (at, len) = (offset_of(4), batch(4).len());
    bytes[at + 4] = 2;
    let sum = base::checksum::crc32c(&bytes[at..at + 28])
        ^ base::checksum::crc32c(&bytes[at + 32..at + 32 + len]).rotate_left(1);
    bytes[at + 28..at + 32].copy_from_slice(&sum.to_le_bytes());
    sim.files.put_image(&file_of(1), &bytes);
    assert!(matches!(engine.open().err(), Some(LogError::NewerFormat(_))));
}

#[test]
fn after_a_failed_sync_nothing_is_appended_until_a_new_seal() {
    for seed in 0..200 {
        let sim = Sim::new(seed);
        let engine = log_of_four(&sim);
        let log = engine.open().unwrap();
        now(log.seal(Epoch(2), 0)).unwrap();
        append(&*log, 2, 5..=5).unwrap();
        sim.files.fail_sync_after(0);
        assert!(matches!(append(&*log, 2, 6..=6), Err(AppendError::Unknown(_))));
        assert!(matches!(append(&*log, 2, 6..=6), Err(AppendError::Unknown(_))), "nothing retries a sync");
        assert!(matches!(append(&*log, 2, 7..=7), Err(AppendError::Fenced(_))));
        let tail = now(log.seal(Epoch(3), 0)).unwrap().seq.0;
        append(&*log, 3, tail + 1..=tail + 2).unwrap();
        check_entries(&*log, 1, tail + 2);
        drop(log);
        sim.files.crash();
        check_entries(&*engine.open().unwrap_or_else(|error| panic!("seed {seed}: {error}")), 1, tail + 2);
    }
}

#[test]
fn an_owner_whose_successor_failed_to_seal_loses_nothing_it_acknowledged() {
    for seed in 0..50 {
        for faults in 0..6 {
            let sim = Sim::new(seed);
            let engine = simulated(&sim);
            let log = engine.open().unwrap();
            now(log.seal(Epoch(1), 0)).unwrap();
            sim.files.cut_power_after(faults);
            assert!(now(log.seal(Epoch(2), 0)).is_err());
            sim.files.clear_faults();
            let acknowledged = if append(&*log, 1, 1..=1).is_ok() { 1 } else { 0 };
            drop(log);
            sim.files.crash();
            let log = engine.open().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            assert!(now(log.seal(Epoch(3), 0)).unwrap().seq.0 >= acknowledged, "seed={seed} faults={faults}");
        }
    }
}

#[test]
fn a_full_disk_refuses_an_append_and_takes_it_when_there_is_room() {
    for room in 0..300 {
        let sim = Sim::new(1);
        let engine = log_of_four(&sim);
        let log = engine.open().unwrap();
        now(log.seal(Epoch(2), 0)).unwrap();
        let used: u64 =
            [1, 5].iter().map(|first| sim.files.read(&file_of(*first)).unwrap().len() as u64).sum();
        sim.files.limit_space(used + room * 32);
        let mut tail = 4;
        while tail < 400 {
            match append(&*log, 2, tail + 1..=tail + 1) {
                Ok(()) => tail += 1,
                Err(AppendError::Full(_)) => break,
                Err(error) => panic!("room {room}: {error:?}"),
            }
        }
        check_entries(&*log, 1, tail);
        sim.files.clear_faults();
        append(&*log, 2, tail + 1..=tail + 3).unwrap();
        drop(log);
        sim.files.crash();
        check_entries(&*engine.open().unwrap(), 1, tail + 3);
    }
}

/// The owner's knowledge, and what the log may hold.
struct Model {
    epoch: u64,
    /// Last entry that must be there.
    acknowledged: u64,
    /// Last entry that may be there. The entries beyond `acknowledged` may be missing from any point on.
    attempted: u64,
    trimmed: u64,
}

/// Appends, seals and trims until something fails or `steps` are done.
fn work(log: &dyn LedgerLog, random: &SimRandom, model: &mut Model, steps: u64) {
    for _ in 0..steps {
        match random.next_u64() % 10 {
            0 => {
                let up_to = model.acknowledged.saturating_sub(random.next_u64() % 12);
                model.trimmed = model.trimmed.max(up_to);
                if now(log.trim(Seq(up_to))).is_err() {
                    return;
                }
            }
            1 => match now(log.seal(Epoch(model.epoch + 1), 0)) {
                Ok(tail) => {
                    model.epoch += 1;
                    assert_eq!(tail.seq.0, model.acknowledged);
                }
                Err(_) => return,
            },
            _ => {
                let last = model.acknowledged + 1 + random.next_u64() % 4;
                model.attempted = model.attempted.max(last);
                match append(log, model.epoch, model.acknowledged + 1..=last) {
                    Ok(()) => model.acknowledged = last,
                    Err(_) => return,
                }
            }
        }
    }
}

/// How a run ends before the log is opened again.
fn interrupt(sim: &Sim, random: &SimRandom) {
    match random.next_u64() % 3 {
        // The process ends but the machine does not.
        0 => sim.files.clear_faults(),
        _ => sim.files.crash(),
    }
}

#[test]
fn after_any_crash_the_log_is_what_was_acknowledged_and_a_run_of_what_was_not() {
    for seed in 0..1500 {
        crash_and_look(seed, |sim| Box::new(simulated(sim)));
    }
}

#[test]
fn after_any_crash_a_mirrored_log_is_that_too() {
    for seed in 0..1500 {
        let copies = 1 + (seed % 3) as u32;
        crash_and_look(seed, |sim| {
            Box::new(Mirrored::new(sim.env(), Path::new("/node"), copies, CopyIo::Inline))
        });
    }
}

#[track_caller]
fn crash_and_look(seed: u64, make: impl Fn(&Sim) -> Box<dyn Engine>) {
    {
        let sim = Sim::new(seed);
        let random = SimRandom::new(seed ^ 0x00c0_ffee);
        let engine = make(&sim);
        let mut model = Model { epoch: 0, acknowledged: 0, attempted: 0, trimmed: 0 };
        for round in 0..6 {
            let fail =
                |error: LogError| -> Arc<dyn LedgerLog> { panic!("seed={seed} round={round}: {error}") };
            let log = engine.open().unwrap_or_else(fail);
            let epoch = now(log.fence()).unwrap().epoch.0;
            assert!(epoch >= model.epoch, "seed={seed} round={round}: fence went back");
            let tail = now(log.seal(Epoch(epoch + 1), 0)).unwrap().seq.0;
            let allowed = model.acknowledged..=model.attempted.max(model.acknowledged);
            assert!(allowed.contains(&tail), "seed={seed} round={round}: tail={tail} allowed={allowed:?}");
            check_entries(&*log, model.trimmed + 1, tail);
            model = Model { epoch: epoch + 1, acknowledged: tail, attempted: tail, ..model };
            match random.next_u64() % 3 {
                0 => sim.files.cut_power_after(random.next_u64() % 30),
                1 => sim.files.fail_sync_after(random.next_u64() % 10),
                _ => {}
            }
            let steps = random.next_u64() % 20;
            work(&*log, &random, &mut model, steps);
            drop(log);
            interrupt(&sim, &random);
        }
    }
}

#[test]
fn a_log_of_files_begins_behind_an_entry() {
    let sim = Sim::new(1);
    let files = simulated(&sim);
    FileLog::begin(&files.env, &files.dir, (Epoch(4), Seq(300))).unwrap();
    let again = FileLog::begin(&files.env, &files.dir, (Epoch(4), Seq(300)));
    assert!(matches!(again, Err(LogError::Damaged(_))), "there is one");
    let log = files.open().unwrap();
    assert_eq!(log.first(), Seq(301));
    let fence = now(log.fence()).unwrap();
    assert_eq!((fence.epoch, fence.tail), (Epoch(4), Seq(300)));
    assert!(matches!(now(log.seal(Epoch(4), 7)), Err(LogError::Fenced(Epoch(4)))));
    assert_eq!(now(log.seal(Epoch(5), 7)).unwrap(), Tail { seq: Seq(300) });
    append(&*log, 5, 301..=301).unwrap();
    drop(log);
    let log = files.open().unwrap();
    assert_eq!(now(log.fence()).unwrap().tail, Seq(301));
    check_entries(&*log, 301, 301);
    // With a second directory, it is copied there.
    let dirs = vec![files.dir.clone(), PathBuf::from("/node/other/log")];
    files.env.files.create_dir_all(dirs[1].parent().unwrap()).unwrap();
    let options = MirrorOptions { io: CopyIo::Inline, sizes: SIZES, ..MirrorOptions::default() };
    drop(log);
    let log = MirroredLog::open(&files.env, &dirs, options).unwrap();
    assert!(log.copies().iter().all(|copy| copy.state == super::CopyState::InSync), "{:?}", log.copies());
    assert_eq!((log.whole(), now(log.fence()).unwrap().tail), (crate::state::WholeLog::No, Seq(301)));
}
