use base::env::Env;
use std::sync::atomic::{AtomicBool, Ordering};

use wire::BoxFuture;

use super::*;
use crate::{GroupSet, TierRecord};
use base::{Epoch, PgId, Seq};
use meta::keys::KeyRange;
use meta::log::{AppendError, Fence, LogCaps, LogEntry, LogError, MemLog, Tail};
use meta::state::{Applied, MemState, Pair, StateError, Visit};

/// A store whose disk becomes full and has room again.
#[derive(Default)]
struct Disk {
    state: MemState,
    full: AtomicBool,
}

impl State for Disk {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, StateError> {
        self.state.get(key)
    }

    fn scan(&self, range: &KeyRange, visit: &mut Visit<'_>) -> Result<(), StateError> {
        self.state.scan(range, visit)
    }

    fn last(&self, range: &KeyRange) -> Result<Option<Pair>, StateError> {
        self.state.last(range)
    }

    fn apply(
        &self,
        changes: &mut dyn Iterator<Item = (&[u8], Option<&[u8]>)>,
        applied: Applied,
    ) -> Result<(), StateError> {
        if self.full.load(Ordering::Relaxed) {
            return Err(StateError::NoSpace("dir=/disk".to_owned()));
        }
        self.state.apply(changes, applied)
    }

    fn applied(&self) -> Result<Applied, StateError> {
        self.state.applied()
    }

    fn snapshot(&self) -> Result<Arc<dyn State>, StateError> {
        self.state.snapshot()
    }
}

#[tokio::test]
async fn a_change_that_found_no_room_comes_into_force_later_and_the_next_one_is_refused_once() {
    let (log, disk) = (Arc::new(MemLog::new()), Arc::new(Disk::default()));
    let control = Control::open(&Env::real(), log.clone(), disk.clone(), None).await.unwrap();
    let first = Control::new_cluster(&Env::real());
    let with = |map_epoch| ClusterRecord { map_epoch, ..first.clone() };
    let commit = async |record: &ClusterRecord| {
        let mut change = control.view().unwrap().change();
        change.cluster(record);
        control.commit(change).await.map_err(|error| error.to_string())
    };
    commit(&first).await.unwrap();
    disk.full.store(true, Ordering::Relaxed);
    assert!(commit(&with(2)).await.unwrap_err().contains("dir=/disk"));
    assert_eq!(control.view().unwrap().cluster().unwrap(), first);
    assert!(commit(&with(3)).await.unwrap_err().contains("make room on its disk"), "there is no room yet");
    disk.full.store(false, Ordering::Relaxed);
    assert!(commit(&with(3)).await.unwrap_err().contains("repeat this one"));
    assert_eq!(control.view().unwrap().cluster().unwrap(), with(2), "it is in the log, and in force now");
    commit(&with(3)).await.unwrap();
    assert_eq!(control.view().unwrap().cluster().unwrap(), with(3));
    disk.full.store(true, Ordering::Relaxed);
    commit(&with(4)).await.unwrap_err();
    assert!(control.catch_up().await.is_err(), "there is no room yet");
    disk.full.store(false, Ordering::Relaxed);
    control.catch_up().await.unwrap();
    assert_eq!(control.view().unwrap().cluster().unwrap(), with(4));
    commit(&with(3)).await.unwrap();
    // A restart finds the same records.
    let again = Control::open(&Env::real(), log, Arc::new(MemState::default()), None).await.unwrap();
    assert_eq!(again.view().unwrap().cluster().unwrap(), with(3));
}

/// A log that loses requests or answers.
#[derive(Default)]
struct Lossy {
    log: MemLog,
    /// The next append is lost.
    loses: AtomicBool,
    /// Answers are lost.
    hides: AtomicBool,
    full: AtomicBool,
}

fn unanswered() -> std::io::Error {
    std::io::ErrorKind::TimedOut.into()
}

impl LedgerLog for Lossy {
    fn seal(&self, epoch: Epoch, nonce: u64) -> BoxFuture<'_, Result<Tail, LogError>> {
        self.log.seal(epoch, nonce)
    }

    fn fence(&self) -> BoxFuture<'_, Result<Fence, LogError>> {
        if self.hides.load(Ordering::Relaxed) {
            return Box::pin(async { Err(LogError::Io(unanswered())) });
        }
        self.log.fence()
    }

    fn append(
        &self,
        epoch: Epoch,
        first: Seq,
        batches: Vec<Vec<u8>>,
    ) -> BoxFuture<'_, Result<(), AppendError>> {
        if self.loses.swap(false, Ordering::Relaxed) {
            return Box::pin(async { Err(AppendError::Unknown(unanswered())) });
        }
        if self.full.load(Ordering::Relaxed) {
            return Box::pin(async { Err(AppendError::Full(std::io::ErrorKind::StorageFull.into())) });
        }
        let appended = self.log.append(epoch, first, batches);
        if self.hides.load(Ordering::Relaxed) {
            return Box::pin(async { Err(AppendError::Unknown(unanswered())) });
        }
        appended
    }

    fn read(&self, from: Seq, limit_bytes: usize) -> BoxFuture<'_, Result<Vec<LogEntry>, LogError>> {
        self.log.read(from, limit_bytes)
    }

    fn trim(&self, up_to: Seq) -> BoxFuture<'_, Result<(), LogError>> {
        self.log.trim(up_to)
    }

    fn caps(&self) -> LogCaps {
        self.log.caps()
    }
}

#[tokio::test]
async fn a_change_that_the_log_did_not_take_comes_before_any_other() {
    let log = Arc::new(Lossy::default());
    let control =
        Control::open(&Env::real(), log.clone(), Arc::new(MemState::default()), None).await.unwrap();
    let first = Control::new_cluster(&Env::real());
    let commit = async |map_epoch| {
        let mut change = control.view().unwrap().change();
        change.cluster(&ClusterRecord { map_epoch, ..first.clone() });
        control.commit(change).await.map_err(|error| error.to_string())
    };
    commit(1).await.unwrap();
    log.loses.store(true, Ordering::Relaxed);
    commit(2).await.unwrap_err();
    assert_eq!(control.view().unwrap().cluster().unwrap().map_epoch, 1);
    assert!(commit(3).await.unwrap_err().contains("repeat this one"));
    assert_eq!(control.view().unwrap().cluster().unwrap().map_epoch, 2);
    commit(3).await.unwrap();
    assert_eq!(control.view().unwrap().cluster().unwrap().map_epoch, 3);
    // The log has the change, but cannot say so before it is full for a moment.
    log.hides.store(true, Ordering::Relaxed);
    commit(4).await.unwrap_err();
    log.hides.store(false, Ordering::Relaxed);
    log.full.store(true, Ordering::Relaxed);
    commit(5).await.unwrap_err();
    log.full.store(false, Ordering::Relaxed);
    assert!(commit(5).await.unwrap_err().contains("repeat this one"));
    assert_eq!(control.view().unwrap().cluster().unwrap().map_epoch, 4);
    let again = Control::open(&Env::real(), log, Arc::new(MemState::default()), None).await.unwrap();
    assert_eq!(again.view().unwrap().cluster().unwrap().map_epoch, 4);
}

#[tokio::test]
async fn what_was_committed_is_there_after_reopening_even_without_the_store() {
    let log: Arc<dyn LedgerLog> = Arc::new(MemLog::new());
    let cluster = Control::new_cluster(&Env::real());
    let filesystem = FilesystemRecord {
        name: "main".to_owned(),
        groups: vec![PgId(0)],
        sets: vec![GroupSet { profile: "2+2".parse().unwrap(), groups: vec![PgId(1)] }],
        ..FilesystemRecord::new(1, "4+2".parse().unwrap())
    };
    {
        let control =
            Control::open(&Env::real(), log.clone(), Arc::new(MemState::default()), None).await.unwrap();
        assert!(matches!(control.view().unwrap().cluster(), Err(ControlError::NoCluster)));
        let mut change = control.view().unwrap().change();
        change.cluster(&cluster).filesystem(&filesystem);
        control.commit(change).await.unwrap();
    }
    let control = Control::open(&Env::real(), log, Arc::new(MemState::default()), None).await.unwrap();
    assert_eq!(control.view().unwrap().cluster().unwrap(), cluster);
    assert_eq!(control.view().unwrap().filesystems().unwrap(), [filesystem]);
    assert!(control.view().unwrap().drives().unwrap().is_empty());
}

#[test]
fn a_filesystem_without_a_store_has_the_record_that_it_always_had() {
    let old = r#"{"id":1,"name":"main","ledger":1,"profile":"4+2","groups":[0],"sets":[],"provisioned_bytes":null}"#;
    let mut record: FilesystemRecord = serde_json::from_str(old).unwrap();
    assert_eq!(record.tier, None);
    assert_eq!(serde_json::to_string(&record).unwrap(), old);
    let (retention_s, cue_s) = (Some(86_400), Some(3600));
    record.tier = Some(TierRecord { store: 3, retention_s, cue_s, detaching: false });
    let text = serde_json::to_string(&record).unwrap();
    assert!(text.ends_with(r#""tier":{"store":3,"retention_s":86400,"cue_s":3600,"detaching":false}}"#));
    assert_eq!(serde_json::from_str::<FilesystemRecord>(&text).unwrap(), record);
}

#[tokio::test]
async fn an_older_ledger_goes_on_above_all_that_others_may_have_seen() {
    let (log, state) = (Arc::new(MemLog::new()), Arc::new(MemState::default()));
    let control = Control::open(&Env::real(), log, state, None).await.unwrap();
    let cluster = Control::new_cluster(&Env::real());
    let group = PlacementGroup { epoch: Epoch(5), ..PlacementGroup::new(PgId(1), vec![base::DriveId(0)]) };
    let mut change = control.view().unwrap().change();
    change.cluster(&cluster).group(&group);
    control.commit(change).await.unwrap();
    let lost = Evidence { older: meta::history::Older::Certain, ..Evidence::default() };
    for (evidence, leap) in [(Evidence::default(), 0), (lost, u64::from(LEAP))] {
        assert_eq!(control.begin(&Env::real(), &evidence).await.unwrap(), leap > 0);
        let view = control.view().unwrap();
        assert_eq!(view.groups().unwrap()[0].epoch, Epoch(5 + leap));
        assert_eq!(view.cluster().unwrap().map_epoch, cluster.map_epoch + leap);
    }
}

#[tokio::test]
async fn after_the_last_change_nothing_follows_and_it_is_the_batch_that_was_expected() {
    let (log, store) = (Arc::new(MemLog::new()), Arc::new(MemState::default()));
    let control = Control::open(&Env::real(), log.clone(), store.clone(), None).await.unwrap();
    let first = Control::new_cluster(&Env::real());
    let change = |map_epoch: u64| {
        let mut change = control.view().unwrap().change();
        change.cluster(&ClusterRecord { map_epoch, ..first.clone() });
        change
    };
    control.commit(change(2)).await.unwrap();
    let expected = Seq(control.seq().unwrap().0 + 1);
    let (late, early) = (Seq(expected.0 + 1), control.seq().unwrap());
    for other in [late, early] {
        let refused = control.commit_last(change(9), other).await;
        assert!(matches!(refused, Err(ControlError::Conflict)), "{refused:?}");
    }
    // It goes on being the owner.
    control.commit(change(3)).await.unwrap();
    assert!(matches!(control.commit_last(change(9), expected).await, Err(ControlError::Conflict)));
    control.commit_last(change(4), late).await.unwrap();
    for refused in [
        control.commit(change(5)).await,
        control.catch_up().await,
        control.commit_last(change(5), Seq(late.0 + 1)).await,
    ] {
        assert!(matches!(refused, Err(ControlError::Failed(_))), "{refused:?}");
    }
    assert_eq!(log.fence().await.unwrap().tail, late);
    let next = Control::open(&Env::real(), log, store, None).await.unwrap();
    assert_eq!(next.view().unwrap().cluster().unwrap().map_epoch, 4);
}
