//! Random requests of several sessions against a plain model of a filesystem, with crashes.
//!
//! After every request the replies are compared; after every few, the whole state is recounted. A crash loses only
//! changes that are not in the log: the model returns to its last commit.

use std::collections::{BTreeMap, BTreeSet};

use base::env::Random;
use base::env::sim::SimRandom;
use wire::meta::{MapEntry, PackMove, PiecePosition, RenameMode, SetAttr};
use wire::tier::{TierReply, TierRequest};

mod tier;

use super::audit::audit;
use super::*;

use FileKind::{Directory, Regular};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cell {
    Hole,
    Inline(u8),
    Extent(u64, u32),
}

#[derive(Debug, Clone)]
struct Node {
    kind: FileKind,
    nlink: u32,
    parent: u64,
    cells: Vec<Cell>,
    entries: BTreeMap<Bytes, u64>,
}

/// A minimal filesystem.
#[derive(Debug, Clone)]
struct Model {
    nodes: BTreeMap<u64, Node>,
    opens: BTreeSet<(u64, SessionId)>,
    next_ino: u64,
    /// Extents that were committed and not reported as deleted.
    issued: BTreeSet<u64>,
}

/// Inode, links and size in a reply.
type Shown = Option<(u64, u32, u64)>;

impl Model {
    fn new() -> Self {
        let root = Node { kind: Directory, nlink: 2, parent: 1, cells: vec![], entries: BTreeMap::new() };
        Self {
            nodes: BTreeMap::from([(1, root)]),
            opens: BTreeSet::new(),
            next_ino: 2,
            issued: BTreeSet::new(),
        }
    }

    fn dir(&self, ino: Ino) -> Result<&Node, FsError> {
        let node = self.nodes.get(&ino.0).ok_or(FsError::NotFound)?;
        if node.kind == Directory { Ok(node) } else { Err(FsError::NotDirectory) }
    }

    fn living_dir(&self, ino: Ino) -> Result<(), FsError> {
        if self.dir(ino)?.nlink > 0 { Ok(()) } else { Err(FsError::NotFound) }
    }

    fn file(&mut self, ino: Ino) -> Result<&mut Node, FsError> {
        let node = self.nodes.get_mut(&ino.0).ok_or(FsError::Stale)?;
        if node.kind == Regular { Ok(node) } else { Err(FsError::IsDirectory) }
    }

    fn show(&self, ino: u64) -> Shown {
        let node = &self.nodes[&ino];
        let size = if node.kind == Directory { node.entries.len() } else { node.cells.len() };
        Some((ino, node.nlink, size as u64))
    }

    fn add(&mut self, dir: Ino, name: &Bytes, ino: u64) {
        let is_dir = self.nodes[&ino].kind == Directory;
        if is_dir {
            self.nodes.get_mut(&ino).unwrap().parent = dir.0;
        }
        let dir = self.nodes.get_mut(&dir.0).unwrap();
        dir.entries.insert(name.clone(), ino);
        dir.nlink += u32::from(is_dir);
    }

    fn take(&mut self, dir: Ino, name: &Bytes) -> u64 {
        let ino = self.nodes.get_mut(&dir.0).unwrap().entries.remove(name).unwrap();
        if self.nodes[&ino].kind == Directory {
            self.nodes.get_mut(&dir.0).unwrap().nlink -= 1;
        }
        ino
    }

    fn drop_link(&mut self, ino: u64) -> Shown {
        let node = self.nodes.get_mut(&ino).unwrap();
        node.nlink = if node.kind == Directory { 0 } else { node.nlink - 1 };
        let shown = self.show(ino);
        self.collect(ino);
        shown
    }

    fn collect(&mut self, ino: u64) {
        let unnamed = self.nodes.get(&ino).is_some_and(|node| node.nlink == 0);
        if unnamed && !self.opens.iter().any(|(open, _)| *open == ino) {
            self.nodes.remove(&ino);
        }
    }

    fn close(&mut self, session: SessionId) {
        let closed: Vec<u64> =
            self.opens.iter().filter(|open| open.1 == session).map(|open| open.0).collect();
        self.opens.retain(|open| open.1 != session);
        closed.into_iter().for_each(|ino| self.collect(ino));
    }

    fn below(&self, dir: Ino, moved: u64) -> bool {
        let mut at = dir.0;
        while at != 1 && at != moved {
            at = self.nodes[&at].parent;
        }
        at == moved
    }

    fn remove(&mut self, parent: Ino, name: &Bytes, wanted: FileKind) -> Result<Shown, FsError> {
        let ino = *self.dir(parent)?.entries.get(name).ok_or(FsError::NotFound)?;
        let node = &self.nodes[&ino];
        match (node.kind == Directory, wanted == Directory) {
            (true, false) => return Err(FsError::IsDirectory),
            (false, true) => return Err(FsError::NotDirectory),
            _ if !node.entries.is_empty() => return Err(FsError::NotEmpty),
            _ => {}
        }
        self.take(parent, name);
        Ok(self.drop_link(ino))
    }

    fn rename(&mut self, from: (Ino, &Bytes), to: (Ino, &Bytes), mode: RenameMode) -> Result<Shown, FsError> {
        self.living_dir(from.0)?;
        self.living_dir(to.0)?;
        let source = *self.dir(from.0)?.entries.get(from.1).ok_or(FsError::NotFound)?;
        let target = self.dir(to.0)?.entries.get(to.1).copied();
        match (mode, target) {
            (RenameMode::NoReplace, Some(_)) => return Err(FsError::Exists),
            (RenameMode::Exchange, None) => return Err(FsError::NotFound),
            _ => {}
        }
        if target == Some(source) {
            return Ok(self.show(source));
        }
        let is_dir = |ino: u64| self.nodes[&ino].kind == Directory;
        let loops = is_dir(source) && self.below(to.0, source);
        let back =
            mode == RenameMode::Exchange && target.is_some_and(|ino| is_dir(ino) && self.below(from.0, ino));
        if loops || back {
            return Err(FsError::Invalid);
        }
        if let (Some(target), RenameMode::Exchange) = (target, mode) {
            self.take(from.0, from.1);
            self.take(to.0, to.1);
            self.add(to.0, to.1, source);
            self.add(from.0, from.1, target);
            return Ok(self.show(source));
        }
        if let Some(target) = target {
            match (is_dir(source), is_dir(target)) {
                (true, false) => return Err(FsError::NotDirectory),
                (false, true) => return Err(FsError::IsDirectory),
                _ if !self.nodes[&target].entries.is_empty() => return Err(FsError::NotEmpty),
                _ => {}
            }
            self.take(to.0, to.1);
            self.drop_link(target);
        }
        self.take(from.0, from.1);
        self.add(to.0, to.1, source);
        Ok(self.show(source))
    }

    fn make(&mut self, session: SessionId, make: &MakeNode) -> Result<Shown, FsError> {
        self.living_dir(make.parent)?;
        if self.dir(make.parent)?.entries.contains_key(&make.name) {
            return Err(FsError::Exists);
        }
        let ino = self.next_ino;
        self.next_ino += 1;
        let nlink = if make.kind == Directory { 2 } else { 1 };
        let node = Node { kind: make.kind, nlink, parent: 0, cells: vec![], entries: BTreeMap::new() };
        self.nodes.insert(ino, node);
        self.add(make.parent, &make.name, ino);
        if make.open != OpenIntent::None {
            self.opens.insert((ino, session));
        }
        Ok(self.show(ino))
    }

    fn link(&mut self, ino: Ino, parent: Ino, name: &Bytes) -> Result<Shown, FsError> {
        self.living_dir(parent)?;
        let node = self.nodes.get(&ino.0).ok_or(FsError::Stale)?;
        match (node.kind, node.nlink) {
            (Directory, _) => return Err(FsError::NotPermitted),
            (_, 0) => return Err(FsError::NotFound),
            _ => {}
        }
        if self.dir(parent)?.entries.contains_key(name) {
            return Err(FsError::Exists);
        }
        self.nodes.get_mut(&ino.0).unwrap().nlink += 1;
        self.add(parent, name, ino.0);
        Ok(self.show(ino.0))
    }

    fn put(&mut self, ino: Ino, off: u64, cells: &[Cell]) -> Result<Shown, FsError> {
        let (off, end) = (off as usize, off as usize + cells.len());
        let file = self.file(ino)?;
        file.cells.resize(file.cells.len().max(end), Cell::Hole);
        file.cells[off..end].copy_from_slice(cells);
        Ok(self.show(ino.0))
    }

    /// The effect of the request on the model. Read-only requests are compared elsewhere.
    fn run(&mut self, session: SessionId, request: &MetaRequest) -> Result<Shown, FsError> {
        use MetaRequest as R;
        match request {
            R::Make(make) => self.make(session, make),
            R::Unlink { parent, name } => self.remove(*parent, name, Regular),
            R::Rmdir { parent, name } => self.remove(*parent, name, Directory),
            R::Rename { parent, name, new_parent, new_name, mode, whiteout: _ } => {
                self.rename((*parent, name), (*new_parent, new_name), *mode)
            }
            R::Link { ino, parent, name } => self.link(*ino, *parent, name),
            R::GetAttr { ino } if self.nodes.contains_key(&ino.0) => Ok(self.show(ino.0)),
            R::GetAttr { .. } => Err(FsError::Stale),
            R::SetAttr { ino, set } => {
                let size = set.size.unwrap() as usize;
                self.file(*ino)?.cells.resize(size, Cell::Hole);
                Ok(self.show(ino.0))
            }
            R::Punch { ino, off, len } => {
                let file = self.file(*ino)?;
                let end = (off + len).min(file.cells.len() as u64) as usize;
                file.cells
                    .get_mut(*off as usize..end)
                    .into_iter()
                    .flatten()
                    .for_each(|cell| *cell = Cell::Hole);
                Ok(self.show(ino.0))
            }
            R::CloneRange { from, from_off, to, to_off, len } => {
                let source = self.file(*from)?.cells.clone();
                self.file(*to)?;
                let cells =
                    source.get(*from_off as usize..(from_off + len) as usize).ok_or(FsError::Invalid)?;
                self.put(*to, *to_off, cells)
            }
            R::Open { ino, intent } => {
                let node = self.nodes.get_mut(&ino.0).ok_or(FsError::Stale)?;
                match (node.kind, intent) {
                    (Directory, OpenIntent::Write | OpenIntent::Truncate) => {
                        return Err(FsError::IsDirectory);
                    }
                    (_, OpenIntent::Truncate) => node.cells.clear(),
                    _ => {}
                }
                self.opens.insert((ino.0, session));
                Ok(self.show(ino.0))
            }
            R::Close { inos } => {
                for ino in inos {
                    self.opens.remove(&(ino.0, session));
                    self.collect(ino.0);
                }
                Ok(None)
            }
            other => panic!("not modelled: {other:?}"),
        }
    }
}

fn shown(reply: &MetaReply) -> Shown {
    match reply {
        MetaReply::Attr(attr)
        | MetaReply::Entry { attr, .. }
        | MetaReply::Renamed { moved: attr, .. }
        | MetaReply::Punched { attr, .. } => Some((attr.ino.0, attr.nlink, attr.size)),
        _ => None,
    }
}

pub(super) fn cells_of(pieces: &[MapPiece], size: u64) -> Vec<Cell> {
    let mut cells = vec![Cell::Hole; size as usize];
    for piece in pieces {
        for at in 0..piece.len {
            cells[(piece.off + at) as usize] = match &piece.content {
                Content::Inline(bytes) => Cell::Inline(bytes[at as usize]),
                Content::Extent(extent) | Content::Tiered(extent, _) => {
                    Cell::Extent(extent.id.0, extent.extent_off + at as u32)
                }
            };
        }
    }
    cells
}

struct Run {
    seed: u64,
    random: SimRandom,
    ledger: Ledger,
    model: Model,
    /// The model as of the last batch.
    committed: Model,
    sessions: Vec<(SessionId, u64)>,
    /// The state after each batch.
    snapshots: Vec<Dump>,
    /// The former bytes of packed extents: packing must not change the content of a file.
    packed: HashMap<(u64, u32), Cell>,
    /// Pieces of maps as some earlier scan found them.
    scanned: Vec<MapEntry>,
    /// Extents with shards on drives.
    on_drives: BTreeSet<u64>,
    /// The running search for orphans.
    search: Option<Search>,
    /// Blobs in the object store.
    stored: BTreeSet<u64>,
    /// Blobs that are being stored.
    storing: Vec<u64>,
}

/// Extents of closed ranges that the scan has not met so far.
struct Search {
    session: SessionId,
    candidates: BTreeSet<u64>,
    after: Option<PiecePosition>,
}

impl Run {
    fn new(seed: u64) -> Self {
        let ledger = Ledger::new();
        let snapshots = vec![Dump::new(), ledger.dump()];
        let random = SimRandom::new(seed);
        let (model, committed) = (Model::new(), Model::new());
        Self {
            seed,
            random,
            ledger,
            model,
            committed,
            sessions: Vec::new(),
            snapshots,
            packed: HashMap::new(),
            scanned: Vec::new(),
            on_drives: BTreeSet::new(),
            search: None,
            stored: BTreeSet::new(),
            storing: Vec::new(),
        }
    }

    /// The content of a cell before it was packed.
    fn unpacked(&self, cell: Cell) -> Cell {
        match cell {
            Cell::Extent(id, at) => self.packed.get(&(id, at)).copied().unwrap_or(cell),
            other => other,
        }
    }

    fn scan(&mut self, after: Option<PiecePosition>) -> (Vec<MapEntry>, Option<PiecePosition>) {
        let session = self.sessions[0].0;
        match self.ledger.ask(session, MetaRequest::ScanMap { after, limit: 3 }) {
            Ok(MetaReply::Scan { entries, next }) => (entries, next),
            other => panic!("{other:?}"),
        }
    }

    /// Packs some of the pieces that scans found; they may have changed since.
    fn pack(&mut self) {
        let mut after = None;
        loop {
            let (entries, next) = self.scan(after);
            self.scanned.extend(entries);
            after = next;
            if after.is_none() || self.below(3) == 0 {
                break;
            }
        }
        let at = self.below(self.sessions.len() as u64) as usize;
        let (session, id) = (self.sessions[at].0, self.sessions[at].1);
        let (mut moves, mut len) = (Vec::new(), 0);
        for entry in std::mem::take(&mut self.scanned) {
            match self.below(4) {
                0 => self.scanned.push(entry),
                1 => {}
                _ => {
                    let cells = cells_of(&[MapPiece { off: 0, ..entry.piece.clone() }], entry.piece.len);
                    for (at, cell) in (len..).zip(cells) {
                        self.packed.insert((id, at), self.unpacked(cell));
                    }
                    let (map, extent_off) = (entry.map, len);
                    len += entry.piece.len as u32;
                    moves.push(PackMove { map, piece: entry.piece, extent_off });
                }
            }
        }
        if moves.is_empty() {
            return;
        }
        self.sessions[at].1 = id + 1;
        self.on_drives.insert(id);
        let extent = ExtentRef { id: ExtentId(id), pg: PgId(0), k: 4, n: 6, extent_len: len, extent_off: 0 };
        match self
            .ledger
            .ask(session, MetaRequest::Repack { extent, owed: Vec::new(), moves, placed: Epoch(0) })
        {
            Ok(MetaReply::Repacked { moved_bytes: 0 }) => {}
            Ok(MetaReply::Repacked { .. }) => drop(self.model.issued.insert(id)),
            other => panic!("{other:?}"),
        }
    }

    /// Continues the search for orphans, or begins one.
    fn search(&mut self) {
        let session = self.sessions[0].0;
        let Some(mut search) = self.search.take().filter(|search| search.session == session) else {
            let closed = self.ledger.ask(session, MetaRequest::ExtentRanges);
            let Ok(MetaReply::Ranges { closed, .. }) = closed else { panic!("{closed:?}") };
            let inside =
                |id: &&u64| closed.iter().any(|(first, count)| **id >= first.0 && **id - first.0 < *count);
            let candidates = self.on_drives.iter().filter(inside).copied().collect();
            self.search = Some(Search { session, candidates, after: None });
            return;
        };
        let (entries, next) = self.scan(search.after);
        for entry in entries {
            if let Some(extent) = entry.piece.content.extent() {
                search.candidates.remove(&extent.id.0);
            }
        }
        search.after = next;
        if next.is_some() {
            self.search = Some(search);
            return;
        }
        let ids = search.candidates.iter().copied().map(ExtentId).collect();
        let confirmed = self.ledger.ask(session, MetaRequest::ConfirmOrphans { ids });
        let Ok(MetaReply::Orphans(orphans)) = confirmed else { panic!("{confirmed:?}") };
        for id in orphans {
            let used = self.model.issued.contains(&id.0);
            assert!(!used, "seed={} a live extent would be deleted: {id}", self.seed);
            self.on_drives.remove(&id.0);
        }
    }

    /// Once writing has ended, every shard on a drive is referred to or waits for its deletion.
    fn search_to_the_end(&mut self) {
        for (session, _) in std::mem::take(&mut self.sessions) {
            self.ledger.ask(session, MetaRequest::CloseSession).unwrap();
            self.model.close(session);
        }
        self.connect();
        self.search = None;
        self.search();
        while self.search.is_some() {
            self.search();
        }
        assert!(self.on_drives.is_subset(&self.model.issued), "seed={} something leaked", self.seed);
        let (mut after, mut referred) = (None, BTreeSet::new());
        loop {
            let (entries, next) = self.scan(after);
            referred.extend(entries.iter().filter_map(|entry| match &entry.piece.content {
                Content::Extent(extent) => Some(extent.id.0),
                Content::Inline(_) | Content::Tiered(..) => None,
            }));
            after = next;
            if after.is_none() {
                break;
            }
        }
        assert!(referred.is_subset(&self.on_drives), "seed={} something is gone", self.seed);
        let session = self.sessions[0].0;
        let closed = self.ledger.ask(session, MetaRequest::ExtentRanges);
        let Ok(MetaReply::Ranges { closed, .. }) = closed else { panic!("{closed:?}") };
        for (first, _) in closed {
            self.ledger.ask(session, MetaRequest::RangeVerified { first }).unwrap();
        }
        let left = self.ledger.ask(session, MetaRequest::ExtentRanges);
        assert!(matches!(&left, Ok(MetaReply::Ranges { closed, .. }) if closed.is_empty()), "{left:?}");
        self.commit();
    }

    fn below(&self, limit: u64) -> u64 {
        self.random.next_u64() % limit
    }

    fn ino(&self) -> Ino {
        let known = self.model.nodes.keys();
        let at = self.below(2 + known.len() as u64) as usize;
        // Some requests miss: they name an inode that was removed, or none yet.
        known.copied().nth(at).map_or_else(|| Ino(1 + self.below(self.model.next_ino)), Ino)
    }

    fn name(&self) -> Bytes {
        name(["a", "b", "c"][self.below(3) as usize])
    }

    fn commit(&mut self) {
        self.ledger.commit();
        if self.snapshots.len() <= self.ledger.log.len() {
            self.snapshots.push(self.ledger.dump());
        }
        self.committed = self.model.clone();
    }

    fn connect(&mut self) {
        let session = self.ledger.session();
        let first = self.ledger.extents(session);
        self.sessions.push((session, first));
        self.commit();
    }

    /// Drops all changes since the last batch, all sessions, and the inodes that only sessions kept.
    fn crash(&mut self) {
        self.ledger = self.ledger.restart();
        self.model = self.committed.clone();
        // Inode numbers that early answers may have named are skipped.
        self.model.next_ino += if self.sessions.is_empty() { 0 } else { EARLY_INOS };
        for (session, _) in std::mem::take(&mut self.sessions) {
            self.model.close(session);
        }
        (self.search, self.scanned) = (None, Vec::new());
        self.commit();
    }

    fn request(&self) -> MetaRequest {
        use MetaRequest as R;
        let (ino, parent, name) = (self.ino(), self.ino(), self.name());
        let (off, len) = (self.below(40), 1 + self.below(30));
        let intent = [OpenIntent::None, OpenIntent::Read, OpenIntent::Write, OpenIntent::Truncate]
            [self.below(4) as usize];
        let mode = [RenameMode::Replace, RenameMode::NoReplace, RenameMode::Exchange][self.below(3) as usize];
        match self.below(14) {
            0 | 1 => R::Make(MakeNode { name, open: intent, ..node(parent, "", Regular) }),
            2 | 3 => R::Make(MakeNode { name, ..node(parent, "", Directory) }),
            4 => R::Unlink { parent, name },
            5 => R::Rmdir { parent, name },
            6 | 7 => R::Rename {
                parent,
                name,
                new_parent: self.ino(),
                new_name: self.name(),
                mode,
                whiteout: None,
            },
            8 => R::Link { ino, parent, name },
            9 => R::SetAttr { ino, set: SetAttr { size: Some(self.below(60)), ..SetAttr::default() } },
            10 => R::Punch { ino, off, len },
            11 => R::CloneRange { from: ino, from_off: self.below(9), to: self.ino(), to_off: off, len },
            12 => R::Open { ino, intent },
            _ => R::Close { inos: vec![ino] },
        }
    }

    fn step(&mut self) {
        let at = self.below(self.sessions.len() as u64) as usize;
        let session = self.sessions[at].0;
        let request = self.request();
        let id = self.ledger.next_id(session);
        let reply = self.ledger.ask_as(id, &request);
        let expected = self.model.run(session, &request);
        let found = reply.clone().map(|reply| shown(&reply));
        assert_eq!(found, expected, "seed={} request={request:?}", self.seed);
        let repeatable = !matches!(request, MetaRequest::Open { .. } | MetaRequest::Close { .. });
        if self.below(10) == 0 && repeatable && reply.is_ok() {
            assert_eq!(self.ledger.ask_as(id, &request), reply, "seed={} again: {request:?}", self.seed);
        }
    }

    /// Commits two or three pieces, some of which share an extent.
    fn write(&mut self) {
        let (at, ino) = (self.below(self.sessions.len() as u64) as usize, self.ino());
        if self.model.file(ino).is_err() {
            return;
        }
        let (session, id) = (self.sessions[at].0, self.sessions[at].1);
        let mut pieces = Vec::new();
        for part in 0..1 + self.below(3) as u32 {
            let (off, len) = (self.below(40), 1 + self.below(8));
            let apart = |other: &MapPiece| other.end() <= off || off + len <= other.off;
            if !pieces.iter().all(apart) {
                continue;
            }
            if self.below(2) == 0 {
                pieces.push(inline(off, &"inline bytes"[..len as usize]));
            } else {
                self.sessions[at].1 = id + 1;
                self.model.issued.insert(id);
                self.on_drives.insert(id);
                pieces.push(piece(off, len, id, part * 8, 24));
            }
        }
        self.ledger.write(session, ino, &pieces).unwrap();
        for piece in &pieces {
            let cells = cells_of(&[MapPiece { off: 0, ..piece.clone() }], piece.len);
            self.model.put(ino, piece.off, &cells).unwrap();
        }
    }

    /// Purges and frees like the node's upkeep.
    fn reclaim(&mut self) {
        let session = self.sessions[0].0;
        self.ledger.purge(session);
        self.commit();
        for (session, _) in self.sessions.clone() {
            self.ledger.beat(session);
        }
        let reply = self.ledger.ask(session, MetaRequest::NextFree { after: None, limit: 1000 });
        let Ok(MetaReply::Free { extents, .. }) = reply else { panic!("{reply:?}") };
        for extent in &extents {
            assert!(self.model.issued.remove(&extent.id.0), "seed={} freed twice: {extent:?}", self.seed);
            self.on_drives.remove(&extent.id.0);
        }
        self.ledger.ask(session, MetaRequest::Freed { extents, drives: Vec::new() }).unwrap();
    }

    fn check(&mut self) {
        audit(&self.ledger.dump(), &self.model.issued);
        let session = self.sessions[0].0;
        let request = TierRequest::Blobs { after: None, limit: 1000 };
        let TierReply::Blobs(blobs) = self.tier(session, request) else { panic!() };
        for blob in blobs {
            assert!(self.stored.contains(&blob.serial), "seed={} blob {} is gone", self.seed, blob.serial);
        }
        for (ino, node) in self.model.nodes.clone() {
            let attr = self.ledger.stat(session, Ino(ino));
            assert_eq!(Some((ino, attr.nlink, attr.size)), self.model.show(ino), "seed={}", self.seed);
            if node.kind == Regular {
                let map = self.ledger.map(session, Ino(ino));
                let content = |cells: Vec<Cell>| -> Vec<Cell> {
                    cells.into_iter().map(|cell| self.unpacked(cell)).collect()
                };
                let (found, expected) = (content(cells_of(&map, attr.size)), content(node.cells));
                assert_eq!(found, expected, "seed={} ino={ino}", self.seed);
                continue;
            }
            for (name, ino) in &node.entries {
                let lookup = MetaRequest::Lookup { parent: attr.ino, name: name.clone() };
                assert_eq!(self.ledger.attr(session, lookup).ino.0, *ino, "seed={}", self.seed);
            }
        }
    }

    fn run(&mut self, steps: u64) {
        self.connect();
        for step in 0..steps {
            match self.below(60) {
                0..8 => self.commit(),
                8 => {
                    self.commit();
                    self.ledger.store();
                }
                9 if self.sessions.len() < 4 => self.connect(),
                10 => {
                    let at = self.below(self.sessions.len() as u64) as usize;
                    let (session, _) = self.sessions.swap_remove(at);
                    self.ledger.ask(session, MetaRequest::CloseSession).unwrap();
                    self.model.close(session);
                    self.connect();
                }
                11 => {
                    self.crash();
                    self.connect();
                }
                12 => self.reclaim(),
                13..25 => self.write(),
                25..29 => self.pack(),
                29..34 => self.search(),
                34..44 => self.tier_step(),
                _ => self.step(),
            }
            if step % 16 == 0 {
                self.check();
            }
        }
        self.commit();
        self.check();
        for (session, _) in std::mem::take(&mut self.sessions) {
            self.ledger.ask(session, MetaRequest::CloseSession).unwrap();
            self.model.close(session);
        }
        self.connect();
        self.leave();
        self.check();
        self.search_to_the_end();
    }

    /// Checks that every prefix of the log gives the state at the time of its last batch.
    fn check_prefixes(&self) {
        let state = MemState::default();
        let everything = (vec![], vec![255; 16]);
        for (seq, expected) in self.snapshots.iter().enumerate() {
            if let Some(batch) = seq.checked_sub(1).map(|at| &self.ledger.log[at]) {
                let mut changes = batch.changes.iter().map(|(key, value)| (key.as_slice(), value.as_deref()));
                state.apply(&mut changes, Applied { seq: Seq(seq as u64), epoch: Epoch(1) }).unwrap();
            }
            let rebuilt = Store::new(Arc::new(state.clone())).begin().scan(&everything, usize::MAX).unwrap();
            assert!(rebuilt.into_iter().eq(expected.clone()), "seed={} batch={seq}", self.seed);
        }
    }
}

#[test]
fn random_requests_do_what_a_plain_filesystem_does_and_survive_crashes() {
    for seed in 0..150 {
        let mut run = Run::new(seed);
        run.run(400);
        run.check_prefixes();
    }
}
