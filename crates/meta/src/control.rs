//! The control ledger: the cluster's identity, drives, placement groups, filesystems and their groups, object stores,
//! users and events.
//!
//! It is ledger 0: the same log and the same kind of batches as a filesystem's, with records in JSON, because
//! there are few of them and operators read them. Every change is durable when the call returns.

mod events;
mod filesystem_groups;
mod stores;
mod users;

use std::sync::Arc;

use base::env::Env;
use base::{ClusterId, DriveId, DriveUuid, Epoch, LedgerId, Lineage, PgId, Seq};
use layout::{ClusterMap, DriveState, MapDrive, PlacementGroup, Profile};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;
use wire::drive::{DriveMark, ShardKey};

use crate::batch::Batch;
use crate::history::{Evidence, History};
use crate::keys::Keys;
use crate::log::{AppendError, LedgerLog, MemLog, Sealed, append_settled};
use crate::owner::{OwnerError, recover};
use crate::state::{Applied, State, StateError};
use crate::values::Value;

pub use filesystem_groups::FilesystemGroupRecord;
pub use stores::{StoreRecord, StoresRecord, TierRecord};
pub use users::{AccessKeyRecord, RoleRecord, UserRecord, UsersRecord};

/// The control ledger's number.
pub const CONTROL_LEDGER: LedgerId = LedgerId(0);

const DRIVES: u8 = b'd';
const FILESYSTEMS: u8 = b'f';
const GROUPS: u8 = b'g';
/// Distance by which the next numbers are moved ahead when an older control ledger goes on.
const LEAP: u32 = 1 << 16;

/// The cluster's record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterRecord {
    /// The cluster's id; it never changes.
    pub id: ClusterId,
    /// Counts changes of drives and placement groups.
    pub map_epoch: u64,
    /// The next drive's number.
    pub next_drive: u32,
    /// The next placement group's number.
    pub next_group: u32,
    /// The next filesystem's number.
    pub next_filesystem: u32,
    /// Limits of background work.
    #[serde(default)]
    pub upkeep: UpkeepRecord,
}

/// Limits of background work, as far as an operator has set them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UpkeepRecord {
    /// Bytes per second; `None` if never set.
    pub rate_bytes_per_s: Option<u64>,
    /// Whether background work is paused.
    pub paused: bool,
}

/// A drive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DriveRecord {
    /// Its number.
    pub id: DriveId,
    /// UUID on the drive itself.
    pub uuid: DriveUuid,
    /// Path of the device or file.
    pub path: String,
    /// Its failure domain; on one node, the drive itself.
    pub domain: u64,
    /// Size in bytes.
    pub capacity_bytes: u64,
    /// Whether the drive may be used.
    pub state: DriveState,
    /// Progress of its scrub.
    #[serde(default)]
    pub scrub: ScrubRecord,
    /// Lower bound of the drive's own mark: a drive whose mark is lower is an older copy of itself.
    #[serde(default)]
    pub mark: DriveMark,
}

/// Progress of the scrub of a drive. Times are nanoseconds since 1970.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScrubRecord {
    /// Start of the running pass.
    pub started_ns: Option<i64>,
    /// The last shard that the running pass has verified.
    pub after: Option<ShardKey>,
    /// All shards that existed by this time have been verified since.
    pub verified_ns: Option<i64>,
}

/// Placement groups that were planned for one profile.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupSet {
    /// The profile.
    pub profile: Profile,
    /// The groups.
    pub groups: Vec<PgId>,
}

/// A filesystem.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FilesystemRecord {
    /// Its number.
    pub id: u32,
    /// Its name, unique in the cluster.
    pub name: String,
    /// Its ledger.
    pub ledger: LedgerId,
    /// The profile of new data.
    pub profile: Profile,
    /// The placement groups of new data.
    pub groups: Vec<PgId>,
    /// Other groups that may hold its data: narrower groups, from times when drives were missing, and groups of former
    /// profiles. They are reused when they fit.
    #[serde(default)]
    pub sets: Vec<GroupSet>,
    /// Most bytes of content, on drives and in object stores together; `None`: no limit but the drives.
    pub provisioned_bytes: Option<u64>,
    /// Most of these bytes that may be on drives; `None`: no limit but the drives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ssd_bytes: Option<u64>,
    /// Path at which the node mounts it on start.
    pub mount: Option<String>,
    /// Mount options.
    #[serde(default)]
    pub mount_options: String,
    /// The object store to which its data moves, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tier: Option<TierRecord>,
    /// The number of its filesystem group; `None` for the group `default`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filesystem_group: Option<u32>,
}

/// Why the control ledger could not be read or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The ledger could not be opened.
    #[error(transparent)]
    Open(#[from] OwnerError),
    /// A record is damaged or was written by a newer version.
    #[error("control record cannot be read: {0}")]
    Record(#[from] serde_json::Error),
    /// The log or the store failed; restart the node.
    #[error("control ledger failed: {0}")]
    Failed(String),
    /// The cluster was never created.
    #[error("there is no cluster in this directory")]
    NoCluster,
}

/// The open control ledger.
pub struct Control {
    keys: Keys,
    log: Arc<dyn LedgerLog>,
    state: Arc<dyn State>,
    owner: Sealed,
    end: Mutex<End>,
    history: std::sync::Mutex<History>,
    is_view: bool,
}

/// The end of the ledger.
struct End {
    /// The last batch that is known to be in the log.
    seq: Seq,
    /// A change that has begun and is not in force. It comes before any other, or a restart decides on it.
    late: Option<Late>,
}

/// How far a change came.
enum Late {
    /// It may be in the log as the next batch.
    Unknown(Batch),
    /// It is the last batch of the log; the store had no room for it.
    Unstored(Batch),
}

/// Changes of records, committed in one step.
#[derive(Debug, Default)]
pub struct ControlChange {
    changes: Vec<(Vec<u8>, Option<Vec<u8>>)>,
}

impl ControlChange {
    fn put<T: Serialize>(&mut self, key: Vec<u8>, record: &T) -> &mut Self {
        let bytes = serde_json::to_vec(record).expect("records are plain data");
        self.changes.push((key, Some(bytes)));
        self
    }

    fn remove(&mut self, key: Vec<u8>) -> &mut Self {
        self.changes.push((key, None));
        self
    }

    /// Sets the cluster's record.
    pub fn cluster(&mut self, record: &ClusterRecord) -> &mut Self {
        self.put(Keys::new(CONTROL_LEDGER).value("cluster"), record)
    }

    /// Adds or changes a drive.
    pub fn drive(&mut self, record: &DriveRecord) -> &mut Self {
        self.put(Keys::new(CONTROL_LEDGER).control(DRIVES, record.id.0), record)
    }

    /// Adds or changes a placement group.
    pub fn group(&mut self, record: &PlacementGroup) -> &mut Self {
        self.put(Keys::new(CONTROL_LEDGER).control(GROUPS, record.id.0), record)
    }

    /// Adds or changes a filesystem.
    pub fn filesystem(&mut self, record: &FilesystemRecord) -> &mut Self {
        self.put(Keys::new(CONTROL_LEDGER).control(FILESYSTEMS, record.id), record)
    }
}

impl FilesystemRecord {
    /// All its groups by profile, those of the current profile first.
    pub fn all_sets(&self) -> impl Iterator<Item = (Profile, &[PgId])> {
        let others = self.sets.iter().map(|set| (set.profile, set.groups.as_slice()));
        std::iter::once((self.profile, self.groups.as_slice())).chain(others)
    }

    /// Adds groups of a profile.
    pub fn add_groups(&mut self, profile: Profile, groups: impl IntoIterator<Item = PgId>) {
        if profile == self.profile {
            self.groups.extend(groups);
            return;
        }
        match self.sets.iter_mut().find(|set| set.profile == profile) {
            Some(set) => set.groups.extend(groups),
            None => self.sets.push(GroupSet { profile, groups: groups.into_iter().collect() }),
        }
    }

    /// Changes the profile of new data. Groups that were planned for it earlier are reused; the groups of the old
    /// profile stay.
    pub fn set_profile(&mut self, profile: Profile) {
        if profile == self.profile {
            return;
        }
        let at = self.sets.iter().position(|set| set.profile == profile);
        let groups = at.map(|at| self.sets.remove(at).groups).unwrap_or_default();
        let former = GroupSet { profile: self.profile, groups: std::mem::replace(&mut self.groups, groups) };
        self.sets.push(former);
        self.profile = profile;
    }
}

impl Control {
    /// Opens the ledger and brings its store up to the end of its log.
    /// `nonce` is a random number that tells this owner from others.
    pub async fn open(
        nonce: u64,
        log: Arc<dyn LedgerLog>,
        state: Arc<dyn State>,
    ) -> Result<Self, ControlError> {
        let (owner, tail) = recover(CONTROL_LEDGER, &log, &state, nonce).await?;
        let history = History::read(&*state, CONTROL_LEDGER, tail);
        let history = history.map_err(|source| OwnerError::Store { ledger: CONTROL_LEDGER, source })?;
        Ok(Self {
            keys: Keys::new(CONTROL_LEDGER),
            log,
            state,
            owner,
            end: Mutex::new(End { seq: tail, late: None }),
            history: std::sync::Mutex::new(history),
            is_view: false,
        })
    }

    /// A read-only ledger: changes are refused.
    pub fn view(state: Arc<dyn State>) -> Self {
        Self {
            keys: Keys::new(CONTROL_LEDGER),
            log: Arc::new(MemLog::new()),
            state,
            owner: Sealed { epoch: Epoch(u64::MAX), nonce: 0 },
            end: Mutex::new(End { seq: Seq(0), late: None }),
            history: std::sync::Mutex::default(),
            is_view: true,
        }
    }

    /// Begins a stretch of the ledger's history, before any other change. If the ledger is an older one that is to go
    /// on, the next numbers are moved ahead. Returns whether it is an older one.
    ///
    /// # Errors
    /// If drives have seen a newer ledger, and the operator has not accepted the older one.
    pub async fn begin(&self, env: &Env, evidence: &Evidence) -> Result<bool, ControlError> {
        let lineage = Lineage(env.random.next_u64());
        let beginning = evidence.decide(&self.history(), lineage).map_err(OwnerError::from)?;
        let mut change = ControlChange::default();
        if beginning.is_older {
            let mut cluster = self.cluster()?;
            cluster.map_epoch += u64::from(LEAP);
            cluster.next_drive += LEAP;
            cluster.next_group += LEAP;
            cluster.next_filesystem += LEAP;
            change.cluster(&cluster);
        }
        let first = Seq(self.end.lock().await.seq.0 + 1);
        change.changes.push((self.keys.lineage(first), Some(lineage.0.encode())));
        self.commit(change).await?;
        let mut history = self.history.lock().expect("no holder of this lock panics");
        *history = history.clone().with(first, lineage, first);
        Ok(beginning.is_older)
    }

    /// The ledger's history up to its newest batch.
    pub fn history(&self) -> History {
        self.history.lock().expect("no holder of this lock panics").clone()
    }

    /// The record of a new cluster, with a new identity.
    pub fn new_cluster(env: &Env) -> ClusterRecord {
        let mut id = [0; 16];
        env.random.fill(&mut id);
        ClusterRecord {
            id: ClusterId(id),
            map_epoch: 1,
            next_drive: 0,
            next_group: 0,
            next_filesystem: 1,
            upkeep: UpkeepRecord::default(),
        }
    }

    /// Makes the changes durable, all or none. One commit runs at a time.
    ///
    /// # Errors
    /// The change may come into force later, before any other change.
    pub async fn commit(&self, change: ControlChange) -> Result<(), ControlError> {
        let mut end = self.end.lock().await;
        if self.is_view {
            return Err(ControlError::Failed("it is only looked at".to_owned()));
        }
        if self.finish_late(&mut end).await? {
            // The caller decided by what it read before, such as free ids.
            return Err(ControlError::Failed(
                "an earlier change is in force only now, because its store had no room or its log did not answer: repeat \
                 this one"
                    .to_owned(),
            ));
        }
        // Also if this future is dropped.
        end.late = Some(Late::Unknown(Batch { changes: change.changes }));
        let appended = self.append(&mut end).await;
        if !matches!(appended, Ok(()) | Err(AppendError::Unknown(_))) {
            end.late = None;
        }
        appended.map_err(|error| ControlError::Failed(error.to_string()))?;
        self.store(&mut end).map_err(|error| ControlError::Failed(error.to_string()))
    }

    /// Puts an earlier change into force that the log did not answer, or for which the store had no room. A caller that
    /// reads records after this, and before it commits, need not repeat its change.
    pub async fn catch_up(&self) -> Result<(), ControlError> {
        self.finish_late(&mut *self.end.lock().await).await.map(drop)
    }

    /// As [`Control::catch_up`]. Returns whether there was such a change.
    async fn finish_late(&self, end: &mut End) -> Result<bool, ControlError> {
        if end.late.is_none() {
            return Ok(false);
        }
        // After any error the change stays the next one, because an earlier attempt may have succeeded.
        self.append(end).await.map_err(|error| ControlError::Failed(error.to_string()))?;
        self.store(end).map_err(|error| {
            ControlError::Failed(format!(
                "its store cannot be written, make room on its disk or restart the node: {error}"
            ))
        })?;
        Ok(true)
    }

    /// Appends the late change as the next batch, unless it is in the log.
    async fn append(&self, end: &mut End) -> Result<(), AppendError> {
        let Some(Late::Unknown(batch)) = &end.late else { return Ok(()) };
        let next = Seq(end.seq.0 + 1);
        append_settled(&*self.log, self.owner, next, &batch.encode()).await?;
        end.seq = next;
        self.history.lock().expect("no holder of this lock panics").goes_on(next);
        if let Some(Late::Unknown(batch)) = end.late.take() {
            end.late = Some(Late::Unstored(batch));
        }
        Ok(())
    }

    /// Stores the late change, which is the last batch of the log.
    fn store(&self, end: &mut End) -> Result<(), StateError> {
        let Some(Late::Unstored(batch)) = &end.late else { return Ok(()) };
        let mut pairs = batch.changes.iter().map(|(key, value)| (key.as_slice(), value.as_deref()));
        self.state.apply(&mut pairs, Applied { seq: end.seq, epoch: self.owner.epoch })?;
        end.late = None;
        Ok(())
    }

    fn one<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, ControlError> {
        let bytes = self.state.get(&self.keys.value(name));
        let bytes = bytes.map_err(|error| ControlError::Failed(error.to_string()))?;
        Ok(bytes.map(|bytes| serde_json::from_slice(&bytes)).transpose()?)
    }

    fn all<T: DeserializeOwned>(&self, table: u8) -> Result<Vec<T>, ControlError> {
        let mut records = Vec::new();
        let visited = self.state.scan(&self.keys.controls(table), &mut |_, bytes| {
            records.push(serde_json::from_slice(bytes));
            std::ops::ControlFlow::Continue(())
        });
        visited.map_err(|error| ControlError::Failed(error.to_string()))?;
        Ok(records.into_iter().collect::<Result<_, _>>()?)
    }

    /// The cluster's record, unless the directory is new.
    pub fn cluster(&self) -> Result<ClusterRecord, ControlError> {
        self.one("cluster")?.ok_or(ControlError::NoCluster)
    }

    /// All drives, by number.
    pub fn drives(&self) -> Result<Vec<DriveRecord>, ControlError> {
        self.all(DRIVES)
    }

    /// All filesystems, by number.
    pub fn filesystems(&self) -> Result<Vec<FilesystemRecord>, ControlError> {
        self.all(FILESYSTEMS)
    }

    /// The cluster map for clients: drives and placement groups.
    pub fn map(&self) -> Result<ClusterMap, ControlError> {
        let epoch = Epoch(self.cluster()?.map_epoch);
        let drives = self.drives()?;
        let drives = drives.iter().map(|drive| MapDrive {
            id: drive.id,
            uuid: drive.uuid,
            domain: drive.domain,
            state: drive.state,
        });
        Ok(ClusterMap { epoch, drives: drives.collect(), groups: self.all(GROUPS)? })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use wire::BoxFuture;

    use super::*;
    use crate::keys::KeyRange;
    use crate::log::{Fence, LogCaps, LogEntry, LogError, Tail};
    use crate::state::{MemState, Pair, Visit};

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
        let control = Control::open(1, log.clone(), disk.clone()).await.unwrap();
        let first = Control::new_cluster(&Env::real());
        let with = |map_epoch| ClusterRecord { map_epoch, ..first.clone() };
        let commit = async |record: &ClusterRecord| {
            let mut change = ControlChange::default();
            change.cluster(record);
            control.commit(change).await.map_err(|error| error.to_string())
        };
        commit(&first).await.unwrap();
        disk.full.store(true, Ordering::Relaxed);
        assert!(commit(&with(2)).await.unwrap_err().contains("dir=/disk"));
        assert_eq!(control.cluster().unwrap(), first);
        assert!(
            commit(&with(3)).await.unwrap_err().contains("make room on its disk"),
            "there is no room yet"
        );
        disk.full.store(false, Ordering::Relaxed);
        assert!(commit(&with(3)).await.unwrap_err().contains("repeat this one"));
        assert_eq!(control.cluster().unwrap(), with(2), "it is in the log, and in force now");
        commit(&with(3)).await.unwrap();
        assert_eq!(control.cluster().unwrap(), with(3));
        disk.full.store(true, Ordering::Relaxed);
        commit(&with(4)).await.unwrap_err();
        assert!(control.catch_up().await.is_err(), "there is no room yet");
        disk.full.store(false, Ordering::Relaxed);
        control.catch_up().await.unwrap();
        assert_eq!(control.cluster().unwrap(), with(4));
        commit(&with(3)).await.unwrap();
        // A restart finds the same records.
        let again = Control::open(1, log, Arc::new(MemState::default())).await.unwrap();
        assert_eq!(again.cluster().unwrap(), with(3));
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
        let control = Control::open(1, log.clone(), Arc::new(MemState::default())).await.unwrap();
        let first = Control::new_cluster(&Env::real());
        let commit = async |map_epoch| {
            let mut change = ControlChange::default();
            change.cluster(&ClusterRecord { map_epoch, ..first.clone() });
            control.commit(change).await.map_err(|error| error.to_string())
        };
        commit(1).await.unwrap();
        log.loses.store(true, Ordering::Relaxed);
        commit(2).await.unwrap_err();
        assert_eq!(control.cluster().unwrap().map_epoch, 1);
        assert!(commit(3).await.unwrap_err().contains("repeat this one"));
        assert_eq!(control.cluster().unwrap().map_epoch, 2);
        commit(3).await.unwrap();
        assert_eq!(control.cluster().unwrap().map_epoch, 3);
        // The log has the change, but cannot say so before it is full for a moment.
        log.hides.store(true, Ordering::Relaxed);
        commit(4).await.unwrap_err();
        log.hides.store(false, Ordering::Relaxed);
        log.full.store(true, Ordering::Relaxed);
        commit(5).await.unwrap_err();
        log.full.store(false, Ordering::Relaxed);
        assert!(commit(5).await.unwrap_err().contains("repeat this one"));
        assert_eq!(control.cluster().unwrap().map_epoch, 4);
        let again = Control::open(2, log, Arc::new(MemState::default())).await.unwrap();
        assert_eq!(again.cluster().unwrap().map_epoch, 4);
    }

    #[tokio::test]
    async fn what_was_committed_is_there_after_reopening_even_without_the_store() {
        let log: Arc<dyn LedgerLog> = Arc::new(MemLog::new());
        let cluster = Control::new_cluster(&Env::real());
        let filesystem = FilesystemRecord {
            id: 1,
            name: "main".to_owned(),
            ledger: LedgerId(1),
            profile: "4+2".parse().unwrap(),
            groups: vec![PgId(0)],
            sets: vec![GroupSet { profile: "2+2".parse().unwrap(), groups: vec![PgId(1)] }],
            provisioned_bytes: None,
            ssd_bytes: None,
            mount: None,
            mount_options: String::new(),
            tier: None,
            filesystem_group: None,
        };
        {
            let control = Control::open(1, log.clone(), Arc::new(MemState::default())).await.unwrap();
            assert!(matches!(control.cluster(), Err(ControlError::NoCluster)));
            let mut change = ControlChange::default();
            change.cluster(&cluster).filesystem(&filesystem);
            control.commit(change).await.unwrap();
        }
        let control = Control::open(1, log, Arc::new(MemState::default())).await.unwrap();
        assert_eq!(control.cluster().unwrap(), cluster);
        assert_eq!(control.filesystems().unwrap(), [filesystem]);
        assert!(control.drives().unwrap().is_empty());
    }

    #[test]
    fn a_filesystem_without_a_store_has_the_record_that_it_always_had() {
        let old = r#"{"id":1,"name":"main","ledger":1,"profile":"4+2","groups":[0],"sets":[],"provisioned_bytes":null,"mount":null,"mount_options":""}"#;
        let mut record: FilesystemRecord = serde_json::from_str(old).unwrap();
        assert_eq!(record.tier, None);
        assert_eq!(serde_json::to_string(&record).unwrap(), old);
        let (retention_s, cue_s) = (Some(86_400), Some(3600));
        record.tier = Some(TierRecord { store: 3, retention_s, cue_s, detaching: false });
        let text = serde_json::to_string(&record).unwrap();
        assert!(text.ends_with(r#""tier":{"store":3,"retention_s":86400,"cue_s":3600,"detaching":false}}"#));
        assert_eq!(serde_json::from_str::<FilesystemRecord>(&text).unwrap(), record);
    }
}
