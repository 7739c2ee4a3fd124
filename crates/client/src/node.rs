//! The state of one inode in a client.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};

use base::{FsError, Ino};
use bytes::Bytes;
use tokio::sync::watch;
use wire::meta::{Attr, FileKind, LeaseGrant, LeaseKind, SetAttr};

use crate::dirty::{Dirty, Flushing};
use crate::map_cache::MapCache;
use crate::session::EVENTS_PAUSE;
use crate::term::{Notice, Term};

/// One inode.
pub(crate) struct Node {
    pub(crate) ino: Ino,
    state: Mutex<NodeState>,
    /// Held while data is made durable or the size changes.
    pub(crate) flush: tokio::sync::Mutex<()>,
    /// Held while the owner is told of the first open or the last close.
    pub(crate) gate: tokio::sync::Mutex<()>,
    /// How many invalidations of caches above have left pages for later, and go on.
    pub(crate) dropping: watch::Sender<u32>,
    term: Arc<Term>,
}

/// Changes of attributes that are not durable yet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct AttrChanges {
    pub(crate) set: SetAttr,
    /// When the last change was made (wall clock).
    changed_ns: i64,
    /// Counts changes: a commit settles the changes only if none was added in the meantime.
    pub(crate) version: u64,
}

impl AttrChanges {
    /// The request to the owner: the changes and when they were made.
    pub(crate) fn request(&self) -> SetAttr {
        let is_empty = self.set.is_empty();
        SetAttr { ctime_ns: (!is_empty).then_some(self.changed_ns), ..self.set.clone() }
    }
}

#[derive(Debug, Default)]
pub(crate) struct NodeState {
    /// As the owner last reported; valid while there is a lease.
    attr: Option<Attr>,
    /// Of a directory: `attr` as it was when it was forgotten.
    forgotten: Option<Attr>,
    pub(crate) lease: Option<LeaseGrant>,
    /// Answers that carried the lease.
    answers: u64,
    /// The attributes changed since they were first learned.
    was_changed: bool,
    pub(crate) dirty: Dirty,
    /// Data taken from `dirty`, on its way to drives; older than `dirty`.
    pub(crate) flushing: Flushing,
    /// When the oldest byte in `dirty` was written (boot clock).
    pub(crate) dirty_since_ns: Option<u64>,
    /// When it was last written (wall clock).
    pub(crate) written_ns: i64,
    pub(crate) map: MapCache,
    /// Open handles here.
    pub(crate) opens: u32,
    /// The owner counts this inode as open by this session.
    pub(crate) registered: bool,
    /// It may have been told of the last close, without an answer: the next open must ask it.
    pub(crate) may_be_closed: bool,
    /// Creations that had begun when the owner was asked to open it.
    pub(crate) makes_before: u64,
    /// References by the protocol above: FUSE lookups.
    pub(crate) pins: u64,
    /// The error of a failed flush, for the next fsync or close.
    pub(crate) error: Option<FsError>,
    pub(crate) flush_scheduled: bool,
    /// The owner may have taken the lease unnoticed: it is asked until it answers.
    unsure: bool,
    /// The lease is being recalled.
    pub(crate) notice: Option<Notice>,
    /// The lease is about to be given up: no operation may begin under it.
    pub(crate) yielding: bool,
    /// Caches above were invalidated and may not keep the attributes again under this lease.
    pub(crate) recalled: bool,
    /// The owner may have changed size and map already, and has not answered: see [`Remapping`].
    remapping: bool,
    /// While the owner empties the file: the dirty bytes that were dropped because another answer showed the empty file.
    pub(crate) cut: Option<u64>,
    /// Reads and writes that wait for the owner: see [`Waiting`].
    waiting: Vec<Range<u64>>,
    /// Counts reads of what is known under the lease. Caches above keep what they got.
    pub(crate) reads: u64,
    /// Reads wait, while caches above are invalidated and the lease is given up.
    pub(crate) holds_reads: bool,
    /// Attributes changed under the exclusive lease; the owner learns of them with the next commit.
    pub(crate) held: AttrChanges,
    /// A read moved the access time; the owner does not know yet.
    pub(crate) atime_ns: Option<i64>,
}

impl NodeState {
    /// Attributes, with the effects of dirty data and held changes.
    pub(crate) fn attr(&self) -> Option<Attr> {
        let mut attr = self.attr?;
        if (self.lease.is_none() || self.unsure) && !self.is_gone(attr) {
            return None;
        }
        if self.has_dirty() {
            attr.size = attr.size.max(self.dirty_end());
            // Programs that look for holes must not take a file for empty because its bytes are still here.
            attr.stored_bytes += self.dirty.bytes() + self.flushing.bytes();
            attr.mtime_ns = self.written_ns;
            attr.ctime_ns = attr.ctime_ns.max(self.written_ns);
        }
        if !self.held.set.is_empty() {
            let set = &self.held.set;
            attr.mode = set.mode.map_or(attr.mode, |mode| mode & 0o7777);
            attr.uid = set.uid.unwrap_or(attr.uid);
            attr.gid = set.gid.unwrap_or(attr.gid);
            attr.atime_ns = set.atime_ns.unwrap_or(attr.atime_ns);
            attr.mtime_ns = set.mtime_ns.unwrap_or(attr.mtime_ns);
            attr.ctime_ns = attr.ctime_ns.max(self.held.changed_ns);
        }
        if let Some(atime_ns) = self.atime_ns {
            attr.atime_ns = attr.atime_ns.max(atime_ns);
        }
        Some(attr)
    }

    /// Takes attributes from the owner, unless newer ones are here already.
    pub(crate) fn learn(&mut self, attr: Attr) {
        if self.attr.is_none_or(|known| known.attr_ver <= attr.attr_ver) {
            if self.cut.is_some() && self.attr.is_some_and(|known| known.data_ver < attr.data_ver) {
                self.cut_off();
            }
            self.was_changed |= self.attr.is_some_and(|known| known.attr_ver < attr.attr_ver);
            self.attr = Some(attr);
        }
    }

    /// The owner has emptied the file: everything written before is void.
    pub(crate) fn cut_off(&mut self) {
        let dropped = self.dirty.bytes();
        self.cut = Some(self.cut.unwrap_or_default() + dropped);
        self.dirty.truncate(0);
        self.dirty_since_ns = None;
        // The file may not be empty: if the lease was given back in the meantime, others may have written to it.
        self.map.forget();
    }

    /// As [`NodeState::learn`], for an answer that a change from here may have overtaken. It may be newer than the
    /// known attributes, but it does not replace attributes that were forgotten because of that change.
    pub(crate) fn learn_overtaken(&mut self, attr: Attr) {
        if self.attr.is_some() {
            self.learn(attr);
        }
    }

    /// The owner has opened it for this session.
    pub(crate) fn opened(&mut self) {
        self.opens += 1;
        self.registered = true;
        self.may_be_closed = false;
    }

    pub(crate) fn learn_lease(&mut self, lease: Option<LeaseGrant>) {
        let Some(new) = lease else { return };
        if self.lease.is_none_or(|held| (held.id, held.seq) < (new.id, new.seq)) {
            self.notice = None;
        }
        // Answers may overtake each other; the newest names the grant as it is.
        match self.lease {
            Some(held) if held.id == new.id => {
                self.answers += 1;
                if held.seq > new.seq {
                    return;
                }
            }
            _ => {
                self.answers = 1;
                // No lease covered the time since the last one.
                self.map.forget();
            }
        }
        self.lease = Some(new);
        self.yielding = false;
        self.recalled = false;
    }

    /// No answer that carries the grant is on its way any more.
    pub(crate) fn settle_answers(&mut self, lease: LeaseGrant) {
        if self.lease.is_some_and(|held| held.id == lease.id) {
            self.answers = lease.seq;
        }
    }

    /// Versions of content and attributes, as the owner last reported them.
    pub(crate) fn versions(&self) -> (u64, u64) {
        self.attr.map_or((0, 0), |attr| (attr.data_ver, attr.attr_ver))
    }

    /// Whether an answer that carries the grant held here may still be on its way.
    fn awaits_answers(&self) -> bool {
        self.lease.is_some_and(|lease| lease.seq > self.answers)
    }

    pub(crate) fn forget_attr(&mut self) {
        if let Some(attr) = self.attr.filter(|attr| !self.is_gone(*attr)) {
            self.forgotten = (attr.kind == FileKind::Directory).then_some(attr);
            self.attr = None;
        }
    }

    /// The attributes of a directory that the owner does not know any more: it was removed, and programs that have it
    /// open may ask for them.
    pub(crate) fn removed_dir(&mut self) -> Option<Attr> {
        let last = self.attr.or(self.forgotten).filter(|attr| attr.kind == FileKind::Directory)?;
        self.attr = Some(Attr { nlink: 0, size: 0, ..last });
        self.attr
    }

    /// An inode without a name that is not open here may be unknown to the owner. While it is open, other clients that
    /// have it open may change it.
    fn is_gone(&self, attr: Attr) -> bool {
        attr.nlink == 0 && !self.registered
    }

    /// Whether the file may be removed with its last handle here: it has no name any more.
    pub(crate) fn may_be_gone(&self) -> bool {
        self.opens == 0 && self.is_behind() && self.attr.is_some_and(|attr| attr.nlink == 0)
    }

    /// Drops dirty data of a file that is gone, unless it is open again. Returns the number of bytes.
    pub(crate) fn discard_dirty(&mut self) -> u64 {
        let bytes = self.dirty.bytes();
        if self.opens > 0 {
            return 0;
        }
        self.drop_held();
        self.dirty.truncate(0);
        self.dirty_since_ns = None;
        self.error = None;
        bytes
    }

    pub(crate) fn has_dirty(&self) -> bool {
        self.dirty.bytes() + self.flushing.bytes() > 0
    }

    /// Whether the owner has yet to learn of a write or change.
    pub(crate) fn is_behind(&self) -> bool {
        self.has_dirty() || !self.held.set.is_empty()
    }

    /// Holds a change of attributes of a file that is being written, to be committed with its data. Returns `false` if
    /// the owner has to make the change.
    pub(crate) fn hold(&mut self, set: &SetAttr, now_ns: i64) -> bool {
        let in_use = self.opens > 0 || self.has_dirty();
        let may_change =
            |attr: Attr| attr.kind == FileKind::Regular && attr.nlink > 0 && !attr.guard.is_set();
        if !in_use || !self.attr.is_some_and(may_change) || set.size.is_some() || !self.may_write() {
            return false;
        }
        self.held.set = set.over(&self.held.set);
        self.held.changed_ns = now_ns;
        self.held.version += 1;
        if set.atime_ns.is_some() {
            self.atime_ns = None;
        }
        true
    }

    /// Notes a write. It overrides an earlier change of the modification time.
    pub(crate) fn wrote(&mut self, now_ns: i64) {
        self.written_ns = now_ns;
        if self.held.set.mtime_ns.take().is_some() {
            self.held.version += 1;
        }
    }

    /// The change `committed` is durable.
    pub(crate) fn settle_held(&mut self, committed: &AttrChanges) {
        if self.held.version == committed.version {
            self.drop_held();
        }
    }

    /// The owner took the lease away: data written under it is lost. Returns the number of bytes.
    pub(crate) fn lose_lease(&mut self) -> u64 {
        let bytes = self.dirty.bytes();
        self.lease = None;
        self.notice = None;
        self.yielding = false;
        self.recalled = false;
        self.map.forget();
        self.forget_attr();
        self.drop_held();
        self.dirty.truncate(0);
        bytes
    }

    pub(crate) fn drop_held(&mut self) {
        self.held.set = SetAttr::default();
    }

    /// The attributes that the owner reported, as seen from here.
    pub(crate) fn seen(&self, reported: Attr) -> Attr {
        let is_newer = |known: &Attr| known.attr_ver > reported.attr_ver;
        // The answer to a later change may have come first, and the lease may be given back since.
        self.attr().or(self.attr.filter(is_newer)).unwrap_or(reported)
    }

    /// Whether the owner may not know of writes that are here, and may have taken the lease under which they were made.
    pub(crate) fn is_unsure_and_behind(&self) -> bool {
        self.unsure && self.is_behind()
    }

    pub(crate) fn dirty_end(&self) -> u64 {
        self.dirty.end().max(self.flushing.end())
    }

    pub(crate) fn holds(&self, kind: LeaseKind) -> bool {
        !self.yielding && !self.unsure && self.lease.is_some_and(|lease| lease.kind >= kind)
    }

    /// A range with all reads and writes that wait for the owner, if there are any.
    pub(crate) fn waiting(&self) -> Option<Range<u64>> {
        let first = self.waiting.iter().map(|range| range.start).min()?;
        let last = self.waiting.iter().map(|range| range.end).max()?;
        Some(first..last)
    }

    /// Whether changes may stay here until they are committed.
    pub(crate) fn may_write(&self) -> bool {
        self.holds(LeaseKind::Exclusive) && !self.remapping
    }

    fn is_idle(&self) -> bool {
        self.pins == 0 && self.opens == 0 && !self.registered && !self.is_behind() && !self.flush_scheduled
    }
}

/// Held while a read or write waits for the owner. A cache above may have the pages of its range locked so long.
pub(crate) struct Waiting<'a> {
    node: &'a Node,
    range: Range<u64>,
}

impl<'a> Waiting<'a> {
    pub(crate) fn new(node: &'a Node, range: Range<u64>) -> Self {
        node.lock().waiting.push(range.clone());
        Self { node, range }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut state = self.node.lock();
        if let Some(at) = state.waiting.iter().position(|range| *range == self.range) {
            state.waiting.swap_remove(at);
        }
    }
}

/// Held while the owner changes size and map of a file in one step. A map that is requested then may be from after
/// the step, and the size here is from before it, so no map is requested. Nor are writes taken: they would lie over the
/// state before the step, and a crash could leave the step without them. Belongs to the holder of the flush lock.
pub(crate) struct Remapping<'a>(&'a Node);

impl<'a> Remapping<'a> {
    pub(crate) fn new(node: &'a Node) -> Self {
        let mut state = node.lock();
        state.remapping = true;
        state.map.outdate();
        Self(node)
    }
}

impl Drop for Remapping<'_> {
    fn drop(&mut self) {
        self.0.lock().remapping = false;
    }
}

impl Node {
    /// Waits until size and map are of one moment.
    pub(crate) async fn remapped(&self) {
        while self.lock().remapping {
            drop(self.flush.lock().await);
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, NodeState> {
        let mut state = self.state.lock().expect("no holder of this lock panics");
        let is_over = || self.term.is_over() || state.notice.is_some_and(|notice| self.term.is_past(notice));
        state.unsure = state.lease.is_some() && is_over();
        state
    }

    /// Waits while reads may not begin.
    pub(crate) async fn may_read(&self) {
        while self.lock().holds_reads {
            tokio::time::sleep(EVENTS_PAUSE).await;
        }
    }

    /// Waits while the owner may have taken a lease that it recalls: soon it has the lease, or says that it took it.
    pub(crate) async fn recall_settled(&self) {
        let is_past = || self.lock().notice.is_some_and(|notice| self.term.is_past(notice));
        while is_past() {
            tokio::time::sleep(EVENTS_PAUSE).await;
        }
    }

    /// All data in `[from, to)` that is not durable yet, older bytes first.
    pub(crate) fn above(state: &NodeState, from: u64, to: u64) -> Vec<(u64, Bytes)> {
        state.flushing.slices(from, to).chain(state.dirty.copies(from, to)).collect()
    }

    pub(crate) fn is_regular(state: &NodeState) -> bool {
        state.attr.is_none_or(|attr| attr.kind == FileKind::Regular)
    }
}

/// The state of a forgotten inode that late answers depend on.
pub(crate) struct Dropped {
    /// The lease to give back.
    pub(crate) lease: Option<LeaseGrant>,
    /// An answer that carries this grant, in its present or an earlier state, may still come.
    pub(crate) awaits_answers: bool,
    /// Late answers may be older than the forgotten state.
    pub(crate) was_changed: bool,
}

const SHARDS: u64 = 64;

/// All inodes that the client knows.
pub(crate) struct NodeTable {
    shards: Vec<Mutex<HashMap<Ino, Arc<Node>>>>,
    term: Arc<Term>,
}

impl NodeTable {
    pub(crate) fn new(term: Arc<Term>) -> Self {
        Self { shards: (0..SHARDS).map(|_| Mutex::default()).collect(), term }
    }

    fn shard(&self, ino: Ino) -> MutexGuard<'_, HashMap<Ino, Arc<Node>>> {
        self.shards[(ino.0 % SHARDS) as usize].lock().expect("no holder of this lock panics")
    }

    pub(crate) fn get(&self, ino: Ino) -> Arc<Node> {
        let make = || {
            let state = Mutex::new(NodeState::default());
            Arc::new(Node {
                ino,
                state,
                flush: tokio::sync::Mutex::new(()),
                gate: tokio::sync::Mutex::new(()),
                dropping: watch::Sender::new(0),
                term: self.term.clone(),
            })
        };
        self.shard(ino).entry(ino).or_insert_with(make).clone()
    }

    pub(crate) fn find(&self, ino: Ino) -> Option<Arc<Node>> {
        self.shard(ino).get(&ino).cloned()
    }

    /// Forgets the inode if nothing depends on it here.
    pub(crate) fn drop_if_idle(&self, ino: Ino) -> Option<Dropped> {
        let mut shard = self.shard(ino);
        let node = shard.get(&ino)?;
        // Another holder of the Arc is in the middle of an operation on it.
        if Arc::strong_count(node) > 1 || !node.lock().is_idle() {
            return None;
        }
        let node = shard.remove(&ino)?;
        let state = node.lock();
        Some(Dropped {
            lease: state.lease,
            awaits_answers: state.awaits_answers(),
            was_changed: state.was_changed,
        })
    }

    /// The sum of a number over all inodes.
    pub(crate) fn sum(&self, number: impl Fn(&NodeState) -> u64) -> u64 {
        let of_shard = |shard: &Mutex<HashMap<Ino, Arc<Node>>>| -> u64 {
            let shard = shard.lock().expect("no holder of this lock panics");
            shard.values().map(|node| number(&node.lock())).sum()
        };
        self.shards.iter().map(of_shard).sum()
    }

    /// Inodes that match `wanted`, by number.
    pub(crate) fn select(&self, wanted: impl Fn(&NodeState) -> bool) -> Vec<Arc<Node>> {
        let mut found = Vec::new();
        for shard in &self.shards {
            let shard = shard.lock().expect("no holder of this lock panics");
            found.extend(shard.values().filter(|node| wanted(&node.lock())).cloned());
        }
        // The same order in every run.
        found.sort_unstable_by_key(|node| node.ino);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_lease_forgets_a_map_learned_without_one() {
        let grant =
            |id| LeaseGrant { ino: Ino(3), id: base::LeaseId(id), kind: LeaseKind::Exclusive, seq: 1 };
        let mut state = NodeState::default();
        state.map.learn_empty();
        state.learn_lease(Some(grant(1)));
        assert_eq!(state.map.known_end(0), 0);
        state.map.learn_empty();
        state.learn_lease(Some(LeaseGrant { seq: 2, ..grant(1) }));
        assert_eq!(state.map.known_end(0), u64::MAX, "the lease covered it all the time");
        state.learn_lease(Some(grant(2)));
        assert_eq!(state.map.known_end(0), 0, "the owner took the first lease unnoticed");
    }
}
