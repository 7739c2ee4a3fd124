//! The owner of a ledger: executes requests one after another and gathers their changes into batches.
//!
//! [`Core`] is a state machine without threads: the caller gives it requests, takes batches, and reports committed
//! batches. `server` runs it and connects it with the log. Invariants: a request that fails changes nothing; a repeated
//! request gets its first reply; no change is visible to other sessions before its batch is durable.

mod access;
mod acl;
mod awake;
mod copying;
mod damage;
mod data;
mod desk;
mod execute;
mod guard;
mod inodes;
mod lease;
mod lock;
mod names;
mod objects;
mod options;
mod pressure;
mod recovery;
mod repeats;
mod replicas;
mod resume;
mod rights;
mod server;
mod sessions;
mod space;
mod standby;
mod sweep;
mod tenure;
mod tier;
mod watch;
mod writing;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use base::{Epoch, ExtentId, FsError, Ino, LedgerId, MapId, PgId, Seq, SessionId};
use wire::guard::Guard;
use wire::message::FirstTime;
use wire::meta::{Attr, FileKind, LeaseGrant, LeaseKind, MetaReply, MetaRequest, OwnerEvent, RequestId};
use wire::object::ObjectError;

use crate::batch::{Batch, TakenBatch};
use crate::history::{Beginning, LEAP_IDS};
use crate::keys::Keys;
use crate::state::State;
use crate::store::{ChangeTable, Store, Txn, Writes};
use crate::values::{Inode, MapSegment, SessionRecord, Slot, Usage};
use data::CommitTimes;
use lease::{Events, Intent, LeaseTable};
use lock::LockTable;
use repeats::Repeats;
use watch::WatchTable;

#[cfg(any(fuzzing, feature = "fuzzing"))]
pub(crate) use acl::Acl;
pub use awake::Now;
pub use copying::{BadPart, CopyCheck};
pub use execute::{Early, Executed, Terms};
pub use options::{OwnerOptions, OwnerStat};
pub use recovery::OwnerError;
pub(crate) use recovery::{give_back, recover};
pub(crate) use replicas::Replicas;
pub use replicas::StandbyStat;
pub use server::Owner;
pub use standby::{Standby, StandbyOptions};
pub(crate) use tenure::{RENEW_PAUSE, Tenure};
pub(crate) use writing::trim_to;

/// Format of a ledger's state, kept under `V format`.
const LEDGER_FORMAT: u64 = 1;

/// A session of which nothing was heard for so long ends, with its open files and its ids.
const SESSION_KEPT_NS: u64 = 24 * 3600 * 1_000_000_000;

/// More inodes than an owner makes before they are durable: all of them are in two batches.
const EARLY_INOS: u64 = 1 << 16;

/// What becomes of the sessions of earlier owners.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum EarlierSessions {
    /// They end: their clients ended with the earlier owner.
    #[default]
    End,
    /// Those of clients in the owner's process end, the others resume.
    ResumeElsewhere,
    /// Their clients may be there: each has some time to claim its leases and open files, and nothing else is executed
    /// until all have done so, or that time is over.
    Resume,
}

impl EarlierSessions {
    fn resume(self, record: &SessionRecord) -> bool {
        match self {
            Self::End => false,
            Self::ResumeElsewhere => record.is_elsewhere,
            Self::Resume => true,
        }
    }
}

/// Why an operation did not finish.
#[derive(Debug)]
enum Stop {
    /// The operation failed for good.
    Fail(FsError),
    /// The operation waits for other sessions.
    Wait(Wait),
    /// The operation failed with a reason that only requests about objects have.
    Refuse(ObjectError),
}

impl From<ObjectError> for Stop {
    fn from(error: ObjectError) -> Self {
        Stop::Refuse(error)
    }
}

impl From<FsError> for Stop {
    fn from(error: FsError) -> Self {
        Stop::Fail(error)
    }
}

type Outcome = Result<MetaReply, Stop>;

/// An item that a request is about to change and other sessions may have cached.
#[derive(Debug)]
enum Touched {
    /// Attributes or content of an inode.
    Inode(Ino),
    /// The meaning of a name in a directory.
    Name(Ino, bytes::Bytes),
}

/// What a request waits for: all of it.
pub type Wait = Vec<(Ino, Conflict)>;

/// Why a request waits for other sessions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Conflict {
    /// They have leases on the inode.
    Leases(Intent),
    /// They cache this name in the directory.
    Name(bytes::Bytes),
    /// The lease that the caller wants cannot be granted: its own is being recalled, or others have shared leases.
    Grant,
}

#[derive(Debug, Clone, Copy)]
struct OpenRange {
    first: ExtentId,
    count: u64,
    session: SessionId,
}

/// State that the owner keeps in memory only.
#[derive(Debug)]
struct Volatile {
    /// The place of the object store: blobs at another one are of no use.
    store_place: u64,
    leases: LeaseTable,
    watches: WatchTable,
    locks: LockTable,
    opens: HashMap<Ino, Vec<SessionId>>,
    ranges: Vec<OpenRange>,
    /// Sessions, and for each the oldest map version that its reads use.
    sessions: HashMap<SessionId, u64>,
    /// Sessions with a mark in the ledger that they were silent for their term, and since when this owner knows.
    silent: BTreeMap<SessionId, u64>,
    /// Sessions that hold nothing and ask for nothing. Those that may outlive the owner have the same mark.
    idle: BTreeSet<SessionId>,
    /// When each session last sent a request that was no heartbeat, and the last durable batch then.
    active: HashMap<SessionId, (u64, Seq)>,
    /// The batches that take such marks back: until then, the next owner would not wait for the session.
    woken: HashMap<SessionId, Seq>,
    /// Which sessions outlive this owner.
    earlier: EarlierSessions,
    /// Sessions of an earlier owner that have not claimed their state yet and are waited for.
    absent: BTreeSet<SessionId>,
    /// The same, for as long as they last; and the open inodes that they have claimed so far.
    unclaimed: BTreeMap<SessionId, HashSet<Ino>>,
    /// Requests that an earlier owner executed, by session and slot; and whether the request came again.
    inherited: HashMap<(SessionId, u32), (u64, bool)>,
    repeats: Repeats,
    /// The number of changes that were answered early, by session.
    early: HashMap<SessionId, u64>,
    events: Events,
    /// Sessions that have ended since [`Core::take_ended`].
    ended: Vec<SessionId>,
    /// Inodes that are gone: requests that wait for them are to be answered.
    gone: Vec<Ino>,
    /// Whether extents of this ledger are or were tiered.
    tiers: bool,
    /// Whether drives may hold shards to which only a newer ledger refers.
    in_doubt: bool,
    /// The least epoch of each group by which extents may be committed.
    groups: HashMap<PgId, Epoch>,
    /// Maps that have or had unreadable pieces.
    lost_in: HashSet<MapId>,
}

/// The state machine of an owner.
pub struct Core {
    keys: Keys,
    store: Store,
    volatile: Volatile,
    pending: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
    pending_bytes: usize,
    /// Number of the batch for the next change.
    next_seq: Seq,
    committed: Seq,
    epoch: Epoch,
}

impl Core {
    /// An owner of `epoch` whose log ends at `tail`; `store` has every batch up to there.
    pub fn new(ledger: LedgerId, store: Store, (epoch, tail): (Epoch, Seq)) -> Self {
        let volatile = Volatile {
            store_place: 0,
            leases: LeaseTable::new(epoch),
            watches: WatchTable::default(),
            locks: LockTable::default(),
            opens: HashMap::new(),
            ranges: Vec::new(),
            sessions: HashMap::new(),
            silent: BTreeMap::new(),
            idle: BTreeSet::new(),
            active: HashMap::new(),
            woken: HashMap::new(),
            earlier: EarlierSessions::default(),
            absent: BTreeSet::new(),
            unclaimed: BTreeMap::new(),
            inherited: HashMap::new(),
            repeats: Repeats::default(),
            early: HashMap::new(),
            events: Events::new(),
            ended: Vec::new(),
            gone: Vec::new(),
            tiers: false,
            in_doubt: false,
            groups: HashMap::new(),
            lost_in: HashSet::new(),
        };
        let next_seq = Seq(tail.0 + 1);
        let keys = Keys::new(ledger);
        let (pending, pending_bytes, committed) = (BTreeMap::new(), 0, tail);
        Self { keys, store, volatile, pending, pending_bytes, next_seq, committed, epoch }
    }

    /// Creates the root directory of a new ledger, or checks the format of an existing one. Sessions of an earlier owner end
    /// or are waited for.
    pub(crate) fn start(
        &mut self,
        now: Now,
        beginning: Beginning,
        sessions: EarlierSessions,
    ) -> Result<(), FsError> {
        let keys = self.keys;
        let earlier: Vec<(SessionId, SessionRecord)> = {
            let txn = self.store.begin();
            match txn.get::<u64>(&keys.value("format"))? {
                Some(LEDGER_FORMAT) => {}
                Some(format) => {
                    tracing::error!(format, "ledger was written by a newer version");
                    return Err(FsError::Unsupported);
                }
                None => {}
            }
            self.volatile.tiers = txn.get_bytes(&keys.value("tier"))?.is_some();
            self.volatile.in_doubt = txn.get_bytes(&keys.value("in_doubt"))?.is_some();
            for (key, bytes) in txn.scan(&keys.groups(), usize::MAX)? {
                self.volatile.groups.insert(Keys::pg_of_group(&key), Epoch(txn.decode(&key, &bytes)?));
            }
            let lost = txn.scan(&keys.all_lost(None), usize::MAX)?;
            self.volatile.lost_in = lost.iter().map(|(key, _)| Keys::piece_of_lost(key).0).collect();
            let sessions = txn.scan(&keys.sessions(), usize::MAX)?;
            let earlier =
                sessions.iter().map(|(key, bytes)| Ok((Keys::session_of_key(key), txn.decode(key, bytes)?)));
            earlier.collect::<Result<_, FsError>>()?
        };
        self.internal(now, |op| op.format_if_new())?;
        self.internal(now, |op| op.begin_stretch(beginning))?;
        // Inodes that were made and answered early may not be in the ledger.
        let unknown = if earlier.is_empty() { 0 } else { EARLY_INOS };
        self.internal(now, |op| Ok(op.advance("next_ino", unknown).map(drop)?))?;
        // The next owner will do the same.
        self.volatile.earlier = sessions;
        let (resuming, ending): (Vec<_>, Vec<_>) =
            earlier.into_iter().partition(|(_, record)| sessions.resume(record));
        for (session, _) in ending {
            self.internal(now, |op| op.end_session(session))?;
        }
        if resuming.is_empty() { Ok(()) } else { self.internal(now, |op| op.await_sessions(&resuming)) }
    }

    fn internal(
        &mut self,
        now: Now,
        act: impl FnOnce(&mut Op<'_>) -> Result<(), Stop>,
    ) -> Result<(), FsError> {
        let id = RequestId { session: SessionId(0), slot: 0, seq: 0 };
        let mut op = self.begin(id, now);
        match act(&mut op) {
            Ok(()) => {
                let (writes, _) = op.txn.finish();
                self.take(writes, SessionId(0));
                Ok(())
            }
            Err(Stop::Fail(error)) => Err(error),
            Err(Stop::Wait(_) | Stop::Refuse(_)) => Err(FsError::Io),
        }
    }

    fn begin(&mut self, id: RequestId, now: Now) -> Op<'_> {
        Op {
            txn: self.store.begin_for(id.session),
            keys: self.keys,
            volatile: &mut self.volatile,
            session: id.session,
            now,
            again: None,
            made: Ino(0),
            seq: self.next_seq,
            committed: self.committed,
            epoch: self.epoch,
        }
    }

    /// Takes changes into the next batch. `known_to` is the session that gets the answer before they are durable, or 0.
    fn take(&mut self, writes: Writes, known_to: SessionId) {
        self.pending_bytes +=
            writes.iter().map(|(k, v)| k.len() + v.as_ref().map_or(0, Vec::len) + 9).sum::<usize>();
        self.pending.extend(writes.clone());
        self.store.apply(self.next_seq, known_to, writes);
    }

    /// An inode on which a request must still wait for a release.
    pub fn awaits(&self, session: SessionId, wait: &Wait, now: Now) -> Option<Ino> {
        let Volatile { leases, watches, .. } = &self.volatile;
        let is_awaited = |(ino, conflict): &&(Ino, Conflict)| match conflict {
            Conflict::Leases(intent) => leases.awaits(*ino, session, *intent),
            Conflict::Name(name) => watches.awaits(*ino, name, session, now.boot_ns),
            Conflict::Grant => false,
        };
        wait.iter().find(is_awaited).map(|(ino, _)| *ino)
    }

    /// Whether a session that has locked these directories must forget a name in one of them, for which it needs the lock.
    pub fn must_forget(&self, session: SessionId, dirs: &[Ino]) -> bool {
        dirs.iter().any(|dir| self.volatile.watches.is_told(*dir, session))
    }

    /// Sessions that have ended since the last call: nothing is to be sent to them any more.
    pub fn take_ended(&mut self) -> Vec<SessionId> {
        std::mem::take(&mut self.volatile.ended)
    }

    /// Inodes that were removed, or lost a lease of a silent session, since the last call: requests that wait for them may
    /// be retried.
    pub fn take_gone(&mut self) -> Vec<Ino> {
        let mut gone = std::mem::take(&mut self.volatile.gone);
        gone.extend(self.volatile.leases.take_revoked());
        gone
    }

    /// Events for sessions, since the last call.
    pub fn take_events(&mut self) -> Vec<(SessionId, OwnerEvent)> {
        std::mem::take(&mut self.volatile.events)
    }

    /// Revokes leases whose recall was not answered in time, and locks of silent sessions that others wait for. Names that no
    /// session can have cached any more count as forgotten. Returns inodes whose waiting requests may be retried.
    pub fn expire_recalls(&mut self, now: Now) -> Vec<Ino> {
        let Volatile { leases, watches, locks, events, .. } = &mut self.volatile;
        locks.expire(|holder| leases.is_silent(holder, now.awake_ns), events);
        let mut touched = leases.expire(now.awake_ns, events);
        touched.extend(watches.expire(now.boot_ns));
        touched
    }

    /// Bytes of changes that are not in a batch yet.
    pub fn pending_bytes(&self) -> usize {
        self.pending_bytes
    }

    /// The changes since the last call, as the next batch, in entries of at most `entry_bytes_max` bytes.
    pub fn take_batch(&mut self, entry_bytes_max: usize) -> Option<TakenBatch> {
        if self.pending.is_empty() {
            return None;
        }
        let batch = Batch { changes: std::mem::take(&mut self.pending).into_iter().collect() };
        self.pending_bytes = 0;
        let (first, entries) = (self.next_seq, batch.entries(entry_bytes_max));
        self.next_seq = Seq(first.0 + entries.len() as u64);
        Some(TakenBatch { first, entries })
    }

    /// Reports that every batch up to `seq` is durable.
    pub fn committed(&mut self, seq: Seq) {
        self.committed = self.committed.max(seq);
        self.volatile.woken.retain(|_, woken| *woken > seq);
    }

    /// The newest batch that was taken, durable or not.
    pub fn last_batch(&self) -> Seq {
        Seq(self.next_seq.0 - 1)
    }

    /// Whether drives may hold shards to which only a newer ledger refers: then no extent counts as an orphan.
    pub fn is_in_doubt(&self) -> bool {
        self.volatile.in_doubt
    }

    /// The newest durable batch.
    pub fn committed_seq(&self) -> Seq {
        self.committed
    }

    /// Changes to write to the local store. Only committed changes may go there, so the caller must call this when no
    /// batch is being appended.
    pub fn freeze(&mut self) -> Option<Arc<ChangeTable>> {
        self.store.freeze()
    }

    /// Reports that the frozen changes are in the local store.
    pub fn thaw(&mut self) {
        self.store.thaw();
    }

    /// Bytes of changes that are in memory only.
    pub fn unstored_bytes(&self) -> usize {
        self.store.active_bytes()
    }

    /// The local store.
    pub fn bottom(&self) -> Arc<dyn State> {
        self.store.bottom()
    }
}

/// A running operation.
struct Op<'a> {
    txn: Txn<'a>,
    keys: Keys,
    volatile: &'a mut Volatile,
    session: SessionId,
    now: Now,
    /// An earlier owner executed the request and answered early. Nobody was asked for the leases and names that were in the way
    /// then: a session that claims one again did not hear that it was revoked. The session claims its own grants later.
    again: Option<FirstTime>,
    /// The inode that was made.
    made: Ino,
    seq: Seq,
    committed: Seq,
    epoch: Epoch,
}

impl Op<'_> {
    fn repeated(&self, id: RequestId, slot_key: &[u8]) -> Result<Option<MetaReply>, FsError> {
        let Some(slot) = self.txn.get::<Slot>(slot_key)? else { return Ok(None) };
        if slot.seq > id.seq {
            return Err(FsError::Invalid);
        }
        if slot.seq < id.seq {
            return Ok(None);
        }
        slot.reply().map(Some)
    }

    fn run(&mut self, request: &MetaRequest) -> Outcome {
        use MetaRequest as R;
        match request {
            R::CloseSession => self.end_session(self.session).map(|()| MetaReply::Done),
            R::Heartbeat { in_use_ver } => self.heartbeat(*in_use_ver),
            R::Lookup { parent, name } => self.lookup(*parent, name),
            R::GetAttr { ino } => self.getattr(*ino),
            R::ReadDir { ino, after, limit } => self.readdir(*ino, after.as_ref(), *limit),
            R::ReadLink { ino } => self.readlink(*ino),
            R::Make(make) => self.make(make),
            R::MakeUnnamed(make) => self.make_unnamed(make),
            R::Open { ino, intent } => self.open(*ino, *intent),
            R::Close { inos } => self.close(inos),
            R::SetAttr { ino, set } => self.setattr(*ino, set),
            R::SetGuard { ino, guard } => self.set_guard(*ino, *guard),
            R::NoteRead { ino, atime_ns } => self.note_read(*ino, *atime_ns),
            R::Unlink { parent, name } => self.unlink(*parent, name),
            R::Rmdir { parent, name } => self.rmdir(*parent, name),
            R::Rename { parent, name, new_parent, new_name, mode, whiteout } => {
                self.rename((*parent, name), (*new_parent, new_name), *mode, *whiteout)
            }
            R::Link { ino, parent, name } => self.link(*ino, *parent, name),
            R::SetXattr { ino, name, value, mode } => self.setxattr(*ino, name, value, *mode),
            R::GetXattr { ino, name } => self.getxattr(*ino, name),
            R::ListXattr { ino } => self.listxattr(*ino),
            R::RemoveXattr { ino, name } => self.removexattr(*ino, name),
            R::GetMap { ino, off, limit } => self.getmap(*ino, *off, *limit),
            R::Commit { ino, lease, pieces, size, mtime_ns, set } => {
                let times = CommitTimes { mtime_ns: *mtime_ns, set };
                self.commit(*ino, *lease, pieces, *size, times)
            }
            R::Punch { ino, off, len } => self.punch(*ino, *off, *len),
            R::CloneRange { from, from_off, to, to_off, len } => {
                self.clone_range((*from, *from_off), (*to, *to_off), *len)
            }
            R::AllocExtents => self.alloc_extents(),
            R::StatFs => self.statfs(),
            R::Acquire { ino, kind } => self.acquire(*ino, *kind),
            R::Release { lease, keep } => Ok(self.release(*lease, *keep)),
            R::ReleaseAll { leases } => Ok(self.release_all(leases)),
            R::Forgot { dir, names } => {
                for (name, number) in names {
                    self.volatile.watches.forgot(*dir, self.session, name, *number);
                }
                Ok(MetaReply::Done)
            }
            R::NextFree { after, limit } => self.next_free(*after, *limit),
            R::Freed { extents, drives } => self.freed(extents, drives),
            R::Owed { after, limit } => self.owed(*after, *limit),
            R::Repaired { shards } => self.repaired(shards),
            R::PurgeStep => self.purge_step(),
            R::ScanMap { after, limit } => self.scan_map(*after, *limit),
            R::Repack { extent, owed, moves, placed } => self.repack(extent, (owed, *placed), moves),
            R::AdvanceGroups { groups } => self.advance_groups(groups),
            R::Doubt { in_doubt } => Ok(self.set_in_doubt(*in_doubt)),
            R::RecheckRanges { ranges } => self.recheck_ranges(ranges),
            R::ExtentRanges => self.extent_ranges(),
            R::ConfirmOrphans { ids } => self.confirm_orphans(ids),
            R::RangeVerified { first } => self.range_verified(*first),
            R::Rehydrate(pieces) => self.rehydrate(pieces),
            R::Tier(request) => self.tier(request),
            R::Damage(request) => self.damage(request).map(MetaReply::Damage),
            R::Object(request) => self.object(request).map(|reply| MetaReply::Object(Box::new(reply))),
            R::Lock { lock, ticket } => self.lock(*lock, *ticket),
            R::Unlock { lock, ticket } => Ok(self.unlock(*lock, *ticket)),
            R::TestLock { lock } => Ok(self.test_lock(lock)),
        }
    }

    fn inode(&self, ino: Ino) -> Result<Inode, FsError> {
        self.txn.get(&self.keys.inode(ino))?.ok_or(FsError::Stale)
    }

    fn directory(&self, ino: Ino) -> Result<Inode, FsError> {
        let inode = self.txn.get::<Inode>(&self.keys.inode(ino))?.ok_or(FsError::NotFound)?;
        if inode.attr.kind == FileKind::Directory { Ok(inode) } else { Err(FsError::NotDirectory) }
    }

    /// A directory that accepts new names. A removed directory may still be open, but no name leads to it.
    fn living_directory(&self, ino: Ino) -> Result<Inode, FsError> {
        self.directory(ino)
            .and_then(|inode| if inode.attr.nlink > 0 { Ok(inode) } else { Err(FsError::NotFound) })
    }

    fn put_inode(&mut self, inode: &Inode) {
        self.txn.update(self.keys.inode(inode.attr.ino), inode);
    }

    fn number(&self, name: &str) -> Result<u64, FsError> {
        Ok(self.txn.get::<u64>(&self.keys.value(name))?.unwrap_or(1))
    }

    /// Returns the next value of a cursor that is never reused, and advances it by `count`.
    fn advance(&mut self, name: &str, count: u64) -> Result<u64, FsError> {
        // The cursor is written anyway, and no answer tells what others took from it.
        let first = self.txn.aside(|| self.number(name))?;
        self.txn.update(self.keys.value(name), &(first + count));
        Ok(first)
    }

    /// The number of a new inode.
    fn next_ino(&mut self) -> Result<Ino, FsError> {
        self.made = match self.again {
            None => Ino(self.advance("next_ino", 1)?),
            Some(FirstTime { ino, .. }) => {
                if ino.0 >= self.number("next_ino")? || self.txn.get_bytes(&self.keys.inode(ino))?.is_some() {
                    return Err(FsError::StaleLease);
                }
                ino
            }
        };
        Ok(self.made)
    }

    fn is_open(&self, ino: Ino) -> bool {
        self.volatile.opens.get(&ino).is_some_and(|sessions| sessions.contains(&self.session))
    }

    /// Notes that the session has an inode open.
    fn note_open(&mut self, ino: Ino) {
        if self.again.is_none() && !self.is_open(ino) {
            self.volatile.opens.entry(ino).or_default().push(self.session);
        }
    }

    fn account(&mut self, bytes: i64, inodes: i64) -> Result<(), FsError> {
        if bytes == 0 && inodes == 0 {
            return Ok(());
        }
        let key = self.keys.value("usage");
        let usage = self.txn.aside(|| self.txn.get::<Usage>(&key))?.unwrap_or_default();
        let next = Usage {
            stored_bytes: usage.stored_bytes.checked_add_signed(bytes).ok_or(FsError::Io)?,
            inodes: usage.inodes.checked_add_signed(inodes).ok_or(FsError::Io)?,
        };
        self.txn.update(key, &next);
        Ok(())
    }

    /// Fails with [`Stop::Wait`] while a conflicting lease of another session exists.
    fn clear(&mut self, ino: Ino, intent: Intent) -> Result<(), Stop> {
        let Volatile { leases, events, .. } = &mut *self.volatile;
        if self.again.is_some() {
            leases.revoke_conflicting(ino, self.session, intent, events);
            return Ok(());
        }
        let clear = leases.clear(ino, self.session, intent, self.now.awake_ns, events);
        if clear { Ok(()) } else { Err(Stop::Wait(vec![(ino, Conflict::Leases(intent))])) }
    }

    /// Fails with [`Stop::Wait`] while another session caches one of these. All those sessions get their recalls at
    /// once.
    fn clear_all(&mut self, touched: &[Touched]) -> Result<(), Stop> {
        let Volatile { leases, watches, events, .. } = &mut *self.volatile;
        let now_ns = self.now.boot_ns;
        let mut wait = Wait::new();
        for touched in touched {
            if self.again.is_some() {
                // Names that others were not told of, because they did not answer, are forgotten by time.
                if let Touched::Inode(ino) = touched {
                    leases.revoke_conflicting(*ino, self.session, Intent::Change, events);
                }
                continue;
            }
            let (clear, conflict) = match touched {
                Touched::Inode(ino) => (
                    leases.clear(*ino, self.session, Intent::Change, self.now.awake_ns, events),
                    (*ino, Conflict::Leases(Intent::Change)),
                ),
                Touched::Name(dir, name) => (
                    watches.clear(*dir, name, self.session, now_ns, events),
                    (*dir, Conflict::Name(name.clone())),
                ),
            };
            wait.extend((!clear).then_some(conflict));
        }
        if wait.is_empty() { Ok(()) } else { Err(Stop::Wait(wait)) }
    }

    /// Notes that the caller learns of a name. Returns whether it may cache the name.
    fn watch_name(&mut self, dir: Ino, name: &bytes::Bytes) -> bool {
        let (watches, now_ns) = (&mut self.volatile.watches, self.now.boot_ns);
        self.again.is_none()
            && !watches.is_shared(dir, now_ns)
            && watches.watch_name(dir, self.session, name, now_ns)
    }

    fn grant(&mut self, ino: Ino, kind: LeaseKind) -> Option<LeaseGrant> {
        if self.again.is_some() {
            return None;
        }
        self.volatile.leases.grant(ino, self.session, kind)
    }

    /// Replies with the attributes, and with an attribute lease if no other lease conflicts.
    fn entry(&mut self, attr: Attr) -> MetaReply {
        let lease = self.grant(attr.ino, LeaseKind::Attr);
        MetaReply::Entry { attr, lease, keep: false }
    }

    fn acquire(&mut self, ino: Ino, kind: LeaseKind) -> Outcome {
        self.inode(ino)?;
        let intent = if kind >= LeaseKind::Shared { Intent::Change } else { Intent::Read };
        self.clear(ino, intent)?;
        self.grant(ino, kind).map(MetaReply::Lease).ok_or_else(|| Stop::Wait(vec![(ino, Conflict::Grant)]))
    }

    fn release(&mut self, lease: LeaseGrant, keep: Option<LeaseKind>) -> MetaReply {
        self.volatile.leases.release(self.session, lease, keep, self.now.awake_ns);
        MetaReply::Done
    }

    fn release_all(&mut self, leases: &[LeaseGrant]) -> MetaReply {
        for lease in leases {
            self.volatile.leases.release(self.session, *lease, None, self.now.awake_ns);
        }
        MetaReply::Done
    }

    fn format_if_new(&mut self) -> Result<(), Stop> {
        if self.txn.get::<u64>(&self.keys.value("format"))?.is_some() {
            return Ok(());
        }
        self.txn.put(self.keys.value("format"), &LEDGER_FORMAT);
        self.txn.put(self.keys.value("layer"), &u64::from(crate::keys::LIVE_LAYER));
        self.txn.put(self.keys.value("next_ino"), &(Ino::ROOT.0 + 1));
        let mut root = self.new_inode(Ino::ROOT, FileKind::Directory, 0o755);
        root.attr.nlink = 2;
        root.parent = Ino::ROOT;
        self.put_inode(&root);
        self.account(0, 1)?;
        Ok(())
    }

    /// Begins a stretch of the ledger's history. An older ledger skips all ids that the newer one may have handed out.
    fn begin_stretch(&mut self, beginning: Beginning) -> Result<(), Stop> {
        let Beginning { lineage, highest_extent, is_older } = beginning;
        self.txn.put(self.keys.lineage(self.seq), &lineage.0);
        if is_older {
            for name in ["next_ino", "next_map", "next_extent", "next_session", "next_upload", "next_blob"] {
                self.advance(name, LEAP_IDS)?;
            }
            self.set_in_doubt(true);
        }
        if let Some(highest) = highest_extent
            && self.number("next_extent")? <= highest.0
        {
            self.txn.put(self.keys.value("next_extent"), &(highest.0 + 1));
        }
        Ok(())
    }

    /// Sets whether drives may hold shards to which only a newer ledger refers.
    fn set_in_doubt(&mut self, in_doubt: bool) -> MetaReply {
        if in_doubt {
            self.txn.put(self.keys.value("in_doubt"), &1);
        } else {
            self.txn.delete(self.keys.value("in_doubt"));
        }
        self.volatile.in_doubt = in_doubt;
        MetaReply::Done
    }

    fn new_inode(&self, ino: Ino, kind: FileKind, mode: u32) -> Inode {
        let now = self.now.wall_ns;
        let attr = Attr {
            ino,
            kind,
            mode,
            uid: 0,
            gid: 0,
            nlink: 1,
            rdev: 0,
            size: 0,
            stored_bytes: 0,
            atime_ns: now,
            mtime_ns: now,
            ctime_ns: now,
            btime_ns: now,
            data_ver: 1,
            attr_ver: 1,
            guard: Guard::default(),
        };
        Inode {
            attr,
            flags: 0,
            quotas: [0; 3],
            tier_policy: 0,
            parent: Ino(0),
            next_cookie: FIRST_COOKIE,
            segments: Vec::new(),
            target: bytes::Bytes::new(),
            object: None,
        }
    }

    /// The first map of a new file.
    fn first_segments(&mut self, ino: Ino) -> Result<Vec<MapSegment>, FsError> {
        self.segments(MapId::first_of(ino))
    }

    /// A map in place of another one of the same file.
    fn next_segments(&mut self, before: MapId) -> Result<Vec<MapSegment>, FsError> {
        self.segments(before.next_of_file())
    }

    /// One segment with this map, or with one that does not tell its file.
    fn segments(&mut self, map: Option<MapId>) -> Result<Vec<MapSegment>, FsError> {
        let map = map.map_or_else(|| self.advance("next_map", 1).map(MapId), Ok)?;
        Ok(vec![MapSegment { file_off: 0, len: wire::meta::FILE_BYTES_MAX, map, map_off: 0 }])
    }
}

/// Cookies 1 and 2 are `.` and `..`.
const FIRST_COOKIE: u64 = 3;
