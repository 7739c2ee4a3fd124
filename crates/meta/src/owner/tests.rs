//! The owner without threads: the effects and errors of each operation, and the consistency of the whole state.

mod audit;
mod coherence;
mod content;
mod damage;
mod early;
mod guards;
mod history;
mod model;
mod names;
mod objects;
mod objects_model;
mod resume;
mod rights;
mod sessions;
mod tails;

use std::collections::{BTreeMap, HashMap};

use base::{Epoch, LeaseId, Lineage, PgId};
use bytes::Bytes;
use wire::meta::{CommitPiece, Content, ExtentRef, FreeExtent, MakeNode, MapPiece, OpenIntent};

use super::*;
use crate::state::{Applied, MemState};
use crate::values::Value;
use wire::object::ObjectReply;

/// All keys and values of a ledger.
type Dump = BTreeMap<Vec<u8>, Vec<u8>>;

const LEDGER: LedgerId = LedgerId(1);

/// An owner, the batches that it wrote, and the requests of its sessions.
struct Ledger {
    core: Core,
    state: MemState,
    log: Vec<Batch>,
    requests: HashMap<SessionId, u64>,
    now: Now,
}

/// The beginning of an owner whose drives know no newer ledger.
fn beginning(lineage: u64) -> Beginning {
    Beginning { lineage: Lineage(lineage), highest_extent: None, is_older: false }
}

impl Ledger {
    fn new() -> Self {
        Self::replay(&[])
    }

    /// A new owner on a state rebuilt from the log.
    fn replay(log: &[Batch]) -> Self {
        let state = MemState::default();
        for (seq, batch) in (1..).zip(log) {
            let mut changes = batch.changes.iter().map(|(key, value)| (key.as_slice(), value.as_deref()));
            state.apply(&mut changes, Applied { seq: Seq(seq), epoch: Epoch(1) }).unwrap();
        }
        let tail = Seq(log.len() as u64);
        let core = Core::new(LEDGER, Store::new(Arc::new(state.clone())), (Epoch(1), tail));
        let now = Now { wall_ns: 1_000, boot_ns: 0, awake_ns: 0, heard_ns: 0 };
        let mut ledger = Self { core, state, log: log.to_vec(), requests: HashMap::new(), now };
        ledger.core.start(now, beginning(log.len() as u64), EarlierSessions::End).unwrap();
        ledger.commit();
        ledger
    }

    /// The next owner, after all committed changes.
    fn restart(&self) -> Self {
        Self::replay(&self.log)
    }

    /// Time goes by.
    fn pass(&mut self, time_ns: u64) {
        self.now.awake_ns += time_ns;
        self.now.heard_ns += time_ns;
    }

    /// Makes all executed changes durable.
    fn commit(&mut self) {
        if let Some(batch) = self.core.take_batch(usize::MAX) {
            self.log.push(Batch::decode(&batch.entries[0]).unwrap());
            assert_eq!(batch.first.0, self.log.len() as u64, "batches are numbered without a gap");
            self.core.committed(batch.last());
        }
    }

    /// Moves committed changes to the local store.
    fn store(&mut self) {
        self.commit();
        if let Some(table) = self.core.freeze() {
            let applied = Applied { seq: self.core.last_batch(), epoch: Epoch(1) };
            self.state.apply(&mut table.iter(), applied).unwrap();
            self.core.thaw();
        }
    }

    fn session(&mut self) -> SessionId {
        self.core.connect(false, self.now).unwrap().0
    }

    fn next_id(&mut self, session: SessionId) -> RequestId {
        let seq = self.requests.entry(session).or_insert(0);
        *seq += 1;
        RequestId { session, slot: 0, seq: *seq }
    }

    fn ask(&mut self, session: SessionId, request: MetaRequest) -> Result<MetaReply, FsError> {
        let id = self.next_id(session);
        self.ask_as(id, &request)
    }

    /// Repeats the request until there is a reply. Sessions whose leases or names conflict give them up at once.
    fn ask_as(&mut self, id: RequestId, request: &MetaRequest) -> Result<MetaReply, FsError> {
        self.now.wall_ns += 1;
        for _ in 0..10 {
            match self.core.execute(id, Terms::default(), request, self.now) {
                Executed::Reply { reply, .. } => return reply,
                Executed::Wait(_) => self.answer_recalls(),
            }
        }
        panic!("waits for ever: {request:?}");
    }

    fn answer_recalls(&mut self) {
        for (session, event) in self.core.take_events() {
            self.answer_event(session, event);
        }
    }

    fn answer_event(&mut self, session: SessionId, event: OwnerEvent) {
        let answer = match event {
            OwnerEvent::Recall { lease, keep } => MetaRequest::Release { lease, keep },
            OwnerEvent::Forget { dir, name, number } => {
                MetaRequest::Forgot { dir, names: vec![(name, number)] }
            }
            OwnerEvent::Revoked { .. } | OwnerEvent::LockGranted { .. } | OwnerEvent::LockLost { .. } => {
                return;
            }
        };
        self.core.execute(RequestId { session, slot: 1, seq: 1 }, Terms::default(), &answer, self.now);
    }

    fn dump(&self) -> Dump {
        self.core.store.begin().scan(&(vec![], vec![255; 16]), usize::MAX).unwrap().into_iter().collect()
    }

    /// Checks that the request fails and nothing changes.
    #[track_caller]
    fn refuses(&mut self, session: SessionId, request: MetaRequest, expected: FsError) {
        let (before, pending) = (self.dump(), self.core.pending_bytes());
        assert_eq!(self.ask(session, request.clone()), Err(expected), "{request:?}");
        assert_eq!(self.dump(), before, "a refused request left something: {request:?}");
        assert_eq!(self.core.pending_bytes(), pending);
    }

    #[track_caller]
    fn attr(&mut self, session: SessionId, request: MetaRequest) -> Attr {
        match self.ask(session, request.clone()) {
            Ok(MetaReply::Attr(attr) | MetaReply::Entry { attr, .. }) => attr,
            other => panic!("{request:?}: {other:?}"),
        }
    }

    fn stat(&mut self, session: SessionId, ino: Ino) -> Attr {
        self.attr(session, MetaRequest::GetAttr { ino })
    }

    #[track_caller]
    fn make(&mut self, session: SessionId, parent: Ino, name: &str, kind: FileKind) -> Ino {
        self.attr(session, MetaRequest::Make(node(parent, name, kind))).ino
    }

    fn write_lease(&mut self, session: SessionId, ino: Ino) -> LeaseId {
        match self.ask(session, MetaRequest::Acquire { ino, kind: LeaseKind::Exclusive }) {
            Ok(MetaReply::Lease(lease)) => lease.id,
            other => panic!("{other:?}"),
        }
    }

    /// Ids for new extents.
    fn extents(&mut self, session: SessionId) -> u64 {
        match self.ask(session, MetaRequest::AllocExtents) {
            Ok(MetaReply::Range { first, .. }) => first.0,
            other => panic!("{other:?}"),
        }
    }

    /// Commits pieces at once; the file grows to hold them.
    fn write(&mut self, session: SessionId, ino: Ino, pieces: &[MapPiece]) -> Result<MetaReply, FsError> {
        let lease = self.write_lease(session, ino);
        let size = pieces.iter().map(MapPiece::end).max().unwrap_or(0);
        let pieces = pieces
            .iter()
            .map(|piece| CommitPiece { piece: piece.clone(), owed: Vec::new(), placed: Epoch(0) })
            .collect();
        self.ask(
            session,
            MetaRequest::Commit {
                ino,
                lease,
                pieces,
                size,
                mtime_ns: 7,
                set: wire::meta::SetAttr::default(),
            },
        )
    }

    fn map(&mut self, session: SessionId, ino: Ino) -> Vec<MapPiece> {
        let mut all: Vec<MapPiece> = Vec::new();
        loop {
            let off = all.last().map_or(0, MapPiece::end);
            match self.ask(session, MetaRequest::GetMap { ino, off, limit: 3 }) {
                Ok(MetaReply::Map { pieces, end }) => {
                    all.extend(pieces);
                    if end {
                        return all;
                    }
                }
                other => panic!("{other:?}"),
            }
        }
    }

    fn free(&mut self, session: SessionId) -> Vec<u64> {
        self.next_free(session).0.iter().map(|extent| extent.id.0).collect()
    }

    fn next_free(&mut self, session: SessionId) -> (Vec<FreeExtent>, bool) {
        match self.ask(session, MetaRequest::NextFree { after: None, limit: 1000 }) {
            Ok(MetaReply::Free { extents, withheld }) => (extents, withheld),
            other => panic!("{other:?}"),
        }
    }

    fn purge(&mut self, session: SessionId) {
        while self.ask(session, MetaRequest::PurgeStep) == Ok(MetaReply::Purged { more: true }) {}
    }

    /// Reports that no read of the session uses an old map.
    fn beat(&mut self, session: SessionId) {
        self.ask(session, MetaRequest::Heartbeat { in_use_ver: self.core.committed.0 + 1 }).unwrap();
    }
}

fn node(parent: Ino, name: &str, kind: FileKind) -> MakeNode {
    MakeNode {
        parent,
        name: Bytes::copy_from_slice(name.as_bytes()),
        kind,
        mode: 0o644,
        umask: 0,
        uid: 1,
        gid: 2,
        rdev: 0,
        target: if kind == FileKind::Symlink { Bytes::from_static(b"to") } else { Bytes::new() },
        open: OpenIntent::None,
    }
}

fn name(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

/// Bytes `[extent_off, extent_off + len)` of an extent of `extent_len` bytes, at `off`.
fn piece(off: u64, len: u64, id: u64, extent_off: u32, extent_len: u32) -> MapPiece {
    let extent = ExtentRef { id: ExtentId(id), pg: PgId(0), k: 4, n: 6, extent_len, extent_off };
    MapPiece { off, len, content: Content::Extent(extent) }
}

fn inline(off: u64, text: &str) -> MapPiece {
    MapPiece { off, len: text.len() as u64, content: Content::Inline(name(text)) }
}
