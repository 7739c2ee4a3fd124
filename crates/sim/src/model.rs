//! The reference model of a filesystem: operations, one after another, on a tree in memory.
//!
//! Metadata is durable when it is acknowledged, unless the checker says otherwise. Of a file's content the model keeps every version since the last one
//! that was promised to be durable: after a crash the content may be any of them, and no other.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::{FsError, Ino};
use client::RenameMode;

use crate::history::{Cut, Kind, Name, Op, OpId, Ret};
use crate::runs::Runs;

/// A node is named by the operation that created it; the root is `usize::MAX`.
type NodeId = usize;

pub(crate) const ROOT: NodeId = usize::MAX;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Node {
    /// Unknown until a process has seen it.
    ino: Option<Ino>,
    kind: Kind,
    nlink: u32,
    /// Entries of a directory.
    entries: BTreeMap<Name, NodeId>,
    parent: NodeId,
    /// The possible contents. There is more than one only after a crash, until a process reads the file.
    now: Vec<Runs>,
    /// Older contents, with their versions, that are durable or may be.
    past: Vec<(u64, Runs)>,
    version: u64,
    /// The client that wrote the content last, while only that client's memory may have it.
    writer: Option<u32>,
    /// A write of the file failed: its content is unknown.
    tainted: bool,
    xattrs: BTreeMap<Name, u8>,
    opens: BTreeMap<u32, u32>,
}

impl Node {
    fn new(ino: Option<Ino>, kind: Kind, parent: NodeId) -> Self {
        let nlink = if kind == Kind::Directory { 2 } else { 1 };
        Self {
            ino,
            kind,
            nlink,
            entries: BTreeMap::new(),
            parent,
            now: vec![Runs::default()],
            past: Vec::new(),
            version: 0,
            writer: None,
            tainted: false,
            xattrs: BTreeMap::new(),
            opens: BTreeMap::new(),
        }
    }

    fn change(&mut self, client: u32, change: impl Fn(&Runs) -> Runs) {
        let next = self.now.iter().map(change).collect();
        let before = std::mem::replace(&mut self.now, next);
        for content in before {
            // A content that recurs counts as its later version.
            match self.past.iter_mut().find(|(_, known)| *known == content) {
                Some((version, _)) => *version = self.version,
                None => self.past.push((self.version, content)),
            }
        }
        self.now.dedup();
        self.version += 1;
        self.writer = Some(client);
    }

    /// Keeps the contents that agree with what a process saw. Returns whether there are any.
    fn keep(&mut self, agrees: impl Fn(&Runs) -> bool) -> bool {
        if !self.tainted {
            self.now.retain(agrees);
        }
        !self.now.is_empty()
    }

    /// Drops the contents older than `version`, which a durable version has replaced.
    fn durable_since(&mut self, version: u64) {
        self.past.retain(|(past, _)| *past >= version);
    }

    fn crash(&mut self) {
        for (_, content) in std::mem::take(&mut self.past) {
            if !self.now.contains(&content) {
                self.now.push(content);
            }
        }
        self.opens.clear();
        self.writer = None;
    }
}

/// The promise of an operation with a result: these versions of nodes are durable.
pub(crate) type Promise = Vec<(NodeId, u64)>;

/// A filesystem. Cloning is cheap.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Model {
    nodes: BTreeMap<NodeId, Arc<Node>>,
}

/// `None` if the result is not allowed; else what it promises.
type Verdict = Option<Promise>;

impl Model {
    pub(crate) fn new() -> Self {
        let root = Node::new(Some(Ino::ROOT), Kind::Directory, ROOT);
        Self { nodes: BTreeMap::from([(ROOT, Arc::new(root))]) }
    }

    fn id_of(&self, ino: Ino) -> Option<NodeId> {
        self.nodes.iter().find(|(_, node)| node.ino == Some(ino)).map(|(id, _)| *id)
    }

    fn node(&self, id: NodeId) -> &Node {
        &self.nodes[&id]
    }

    fn edit(&mut self, id: NodeId) -> &mut Node {
        Arc::make_mut(self.nodes.get_mut(&id).expect("the caller has just found it"))
    }

    fn living_dir(&self, ino: Ino) -> Result<NodeId, FsError> {
        let id = self.id_of(ino).ok_or(FsError::NotFound)?;
        if self.node(id).kind == Kind::Directory { Ok(id) } else { Err(FsError::NotDirectory) }
    }

    fn entry(&self, dir: NodeId, name: Name) -> Result<NodeId, FsError> {
        self.node(dir).entries.get(name).copied().ok_or(FsError::NotFound)
    }

    /// Notes that the node has this inode number. A node whose number no process has seen may get it now. Returns
    /// whether that is possible.
    fn is(&mut self, id: NodeId, ino: Ino) -> bool {
        match self.node(id).ino {
            Some(known) => known == ino,
            None => {
                let taken = self.id_of(ino).is_some();
                self.edit(id).ino = Some(ino);
                !taken
            }
        }
    }

    /// The entry of this name in a directory, or all its entries.
    pub(crate) fn names(&self, dir: Ino, name: Option<&str>) -> BTreeMap<Name, NodeId> {
        let Some(dir) = self.id_of(dir) else { return BTreeMap::new() };
        let wanted = |entry: &(&Name, &NodeId)| name.is_none_or(|name| name == *entry.0);
        self.node(dir).entries.iter().filter(wanted).map(|(name, id)| (*name, *id)).collect()
    }

    /// Adds nodes of an older state that are gone here.
    pub(crate) fn complete(&mut self, older: &Self) {
        for (id, node) in &older.nodes {
            self.nodes.entry(*id).or_insert_with(|| node.clone());
        }
    }

    /// This state of names and attributes, with the contents of a newer one, which has all nodes of this one.
    pub(crate) fn with_contents(&self, newer: &Self) -> Self {
        let with = |(id, node): (&NodeId, &Arc<Node>)| {
            let mut node = Node::clone(node);
            let content = newer.node(*id);
            node.ino = content.ino;
            (node.now, node.past) = (content.now.clone(), content.past.clone());
            (node.version, node.tainted) = (content.version, content.tainted);
            (*id, Arc::new(node))
        };
        Self { nodes: self.nodes.iter().map(with).collect() }
    }

    /// Applies a loss of power.
    pub(crate) fn crash(&mut self) {
        for node in self.nodes.values_mut() {
            Arc::make_mut(node).crash();
        }
        self.drop_dead();
    }

    /// Removes nodes that have neither a name nor a handle.
    fn drop_dead(&mut self) {
        self.nodes.retain(|_, node| node.nlink > 0 || !node.opens.is_empty());
    }

    pub(crate) fn keep_promise(&mut self, promise: &Promise) {
        for (id, version) in promise {
            if self.nodes.get(id).is_some_and(|node| node.past.iter().any(|(past, _)| past < version)) {
                self.edit(*id).durable_since(*version);
            }
        }
    }

    /// Applies the operation. `ret` is the result that the process saw; `None` if it saw none: then every possible
    /// outcome is allowed.
    pub(crate) fn apply(&mut self, id: OpId, client: u32, op: &Op, ret: Option<&Ret>) -> Verdict {
        let verdict = match op {
            Op::Make { .. } | Op::Unlink { .. } | Op::Rmdir { .. } | Op::Rename { .. } | Op::Link { .. } => {
                let result = self.change_names(id, client, op, ret);
                self.judge_names(id, result, ret)
            }
            Op::Lookup { parent, name } => self.lookup(*parent, name, ret?),
            Op::ReadDir { dir } => self.read_dir(*dir, ret?),
            _ => self.apply_to_inode(client, op, ret),
        };
        self.drop_dead();
        verdict
    }

    fn judge_names(&mut self, id: OpId, result: Result<(), FsError>, ret: Option<&Ret>) -> Verdict {
        match (result, ret) {
            (Ok(()), None | Some(Ret::Done)) => Some(Vec::new()),
            (Ok(()), Some(Ret::Found { ino, .. })) => self.is(id, *ino).then(Vec::new),
            // Without name and handle the inode may still be there for a while, but never comes back.
            (Err(FsError::Stale), Some(Ret::Failed(FsError::NotFound))) => Some(Vec::new()),
            (Err(expected), Some(Ret::Failed(error))) => (expected == *error).then(Vec::new),
            _ => None,
        }
    }

    fn change_names(&mut self, id: OpId, client: u32, op: &Op, ret: Option<&Ret>) -> Result<(), FsError> {
        match op {
            Op::Make { parent, name, kind } => {
                let dir = self.living_dir(*parent)?;
                if self.entry(dir, name).is_ok() {
                    return Err(FsError::Exists);
                }
                let mut node = Node::new(None, *kind, dir);
                // The client that creates a file opens it.
                if *kind == Kind::File && ret.is_some() {
                    node.opens.insert(client, 1);
                }
                self.nodes.insert(id, Arc::new(node));
                self.add(dir, name, id);
                Ok(())
            }
            Op::Unlink { parent, name } => {
                let dir = self.living_dir(*parent)?;
                let target = self.entry(dir, name)?;
                if self.node(target).kind == Kind::Directory {
                    return Err(FsError::IsDirectory);
                }
                self.remove(dir, name);
                self.edit(target).nlink -= 1;
                Ok(())
            }
            Op::Rmdir { parent, name } => {
                let dir = self.living_dir(*parent)?;
                let target = self.entry(dir, name)?;
                if self.node(target).kind != Kind::Directory {
                    return Err(FsError::NotDirectory);
                }
                if !self.node(target).entries.is_empty() {
                    return Err(FsError::NotEmpty);
                }
                self.remove(dir, name);
                self.edit(target).nlink = 0;
                Ok(())
            }
            Op::Link { ino, parent, name } => self.link(*ino, *parent, name),
            Op::Rename { from, to, mode } => self.rename(*from, *to, *mode),
            _ => Err(FsError::Invalid),
        }
    }

    fn add(&mut self, dir: NodeId, name: Name, id: NodeId) {
        let is_dir = self.node(id).kind == Kind::Directory;
        let parent = self.edit(dir);
        parent.entries.insert(name, id);
        parent.nlink += u32::from(is_dir);
        if is_dir {
            self.edit(id).parent = dir;
        }
    }

    fn remove(&mut self, dir: NodeId, name: Name) {
        let is_dir = self.entry(dir, name).is_ok_and(|id| self.node(id).kind == Kind::Directory);
        let parent = self.edit(dir);
        parent.entries.remove(name);
        parent.nlink -= u32::from(is_dir);
    }

    fn link(&mut self, ino: Ino, parent: Ino, name: Name) -> Result<(), FsError> {
        let dir = self.living_dir(parent)?;
        let id = self.id_of(ino).ok_or(FsError::Stale)?;
        if self.node(id).kind == Kind::Directory {
            return Err(FsError::NotPermitted);
        }
        if self.node(id).nlink == 0 {
            return Err(FsError::NotFound);
        }
        if self.entry(dir, name).is_ok() {
            return Err(FsError::Exists);
        }
        self.edit(id).nlink += 1;
        self.add(dir, name, id);
        Ok(())
    }

    fn rename(&mut self, from: (Ino, Name), to: (Ino, Name), mode: RenameMode) -> Result<(), FsError> {
        let (old_dir, new_dir) = (self.living_dir(from.0)?, self.living_dir(to.0)?);
        let source = self.entry(old_dir, from.1)?;
        let target = self.entry(new_dir, to.1).ok();
        match (mode, target) {
            (RenameMode::NoReplace, Some(_)) => return Err(FsError::Exists),
            (RenameMode::Exchange, None) => return Err(FsError::NotFound),
            _ => {}
        }
        if target == Some(source) {
            return Ok(());
        }
        self.check_no_loop(source, new_dir)?;
        if let (RenameMode::Exchange, Some(target)) = (mode, target) {
            self.check_no_loop(target, old_dir)?;
            self.remove(old_dir, from.1);
            self.remove(new_dir, to.1);
            self.add(old_dir, from.1, target);
            self.add(new_dir, to.1, source);
            return Ok(());
        }
        if let Some(target) = target {
            match (self.node(source).kind, self.node(target).kind) {
                (Kind::Directory, Kind::File) => return Err(FsError::NotDirectory),
                (Kind::File, Kind::Directory) => return Err(FsError::IsDirectory),
                (Kind::Directory, _) if !self.node(target).entries.is_empty() => {
                    return Err(FsError::NotEmpty);
                }
                (Kind::Directory, _) => self.edit(target).nlink = 0,
                (Kind::File, _) => self.edit(target).nlink -= 1,
            }
            self.remove(new_dir, to.1);
        }
        self.remove(old_dir, from.1);
        self.add(new_dir, to.1, source);
        Ok(())
    }

    fn check_no_loop(&self, moved: NodeId, into: NodeId) -> Result<(), FsError> {
        let mut at = into;
        while at != ROOT {
            if at == moved {
                return Err(FsError::Invalid);
            }
            at = self.node(at).parent;
        }
        Ok(())
    }

    fn lookup(&mut self, parent: Ino, name: Name, ret: &Ret) -> Verdict {
        let found = self.living_dir(parent).and_then(|dir| self.entry(dir, name));
        let agrees = match (found, ret) {
            (Ok(id), Ret::Found { ino, kind }) => self.node(id).kind == *kind && self.is(id, *ino),
            (Err(expected), Ret::Failed(error)) => expected == *error,
            _ => false,
        };
        agrees.then(Vec::new)
    }

    fn read_dir(&mut self, dir: Ino, ret: &Ret) -> Verdict {
        let agrees = match (self.living_dir(dir), ret) {
            (Ok(dir), Ret::Entries(seen)) => {
                let entries = self.node(dir).entries.clone();
                entries.len() == seen.len()
                    && entries.iter().zip(seen).all(|((name, id), (seen, ino, kind))| {
                        name == seen && self.node(*id).kind == *kind && self.is(*id, *ino)
                    })
            }
            (Err(expected), Ret::Failed(error)) => expected == *error,
            _ => false,
        };
        agrees.then(Vec::new)
    }

    fn apply_to_inode(&mut self, client: u32, op: &Op, ret: Option<&Ret>) -> Verdict {
        let (Op::GetAttr { ino }
        | Op::Open { ino, .. }
        | Op::Close { ino }
        | Op::Read { ino, .. }
        | Op::Write { ino, .. }
        | Op::Truncate { ino, .. }
        | Op::Punch { ino, .. }
        | Op::Copy { to: (ino, _), .. }
        | Op::Fsync { ino }
        | Op::SetXattr { ino, .. }
        | Op::GetXattr { ino, .. }
        | Op::RemoveXattr { ino, .. }) = op
        else {
            return None;
        };
        // An inode without name and handle may go at any moment, and nothing is promised about it.
        let Some(id) = self.id_of(*ino) else { return Some(Vec::new()) };
        match op {
            Op::GetAttr { .. } => self.get_attr(id, client, ret?),
            Op::Open { cut, .. } => self.open(id, client, *cut, ret),
            Op::Close { .. } => self.close(id, client),
            Op::SetXattr { name, value, .. } => {
                self.edit(id).xattrs.insert(name, *value);
                done(ret)
            }
            Op::GetXattr { name, .. } => {
                let expected = self
                    .node(id)
                    .xattrs
                    .get(name)
                    .map_or(Ret::Failed(FsError::NoAttribute), |v| Ret::Value(*v));
                (*ret? == expected).then(Vec::new)
            }
            Op::RemoveXattr { name, .. } => match self.edit(id).xattrs.remove(name) {
                Some(_) => done(ret),
                None => (ret == Some(&Ret::Failed(FsError::NoAttribute))).then(Vec::new),
            },
            _ => self.apply_to_content(id, client, op, ret),
        }
    }

    fn get_attr(&mut self, id: NodeId, client: u32, ret: &Ret) -> Verdict {
        let Ret::Attr { kind, nlink, size } = ret else { return None };
        let node = self.edit(id);
        if node.kind != *kind || nlink.is_some_and(|nlink| nlink != node.nlink) {
            return None;
        }
        let Some(size) = *size else { return Some(Vec::new()) };
        if node.kind == Kind::Directory {
            return (node.entries.len() as u64 == size).then(Vec::new);
        }
        let agrees = node.keep(|content| content.len() == size);
        agrees.then(|| self.seen(id, client))
    }

    /// Another client sees content only when it is durable.
    fn seen(&self, id: NodeId, client: u32) -> Promise {
        let node = self.node(id);
        if node.writer.is_none_or(|writer| writer == client) { Vec::new() } else { vec![(id, node.version)] }
    }

    fn open(&mut self, id: NodeId, client: u32, cut: Cut, ret: Option<&Ret>) -> Verdict {
        let node = self.edit(id);
        if ret.is_some() {
            *node.opens.entry(client).or_insert(0) += 1;
        }
        if cut == Cut::Keep {
            return done(ret);
        }
        node.change(client, |_| Runs::default());
        let version = node.version;
        done(ret).map(|_| vec![(id, version)])
    }

    fn close(&mut self, id: NodeId, client: u32) -> Verdict {
        let node = self.edit(id);
        let left = node.opens.get_mut(&client)?;
        *left -= 1;
        if *left == 0 {
            node.opens.remove(&client);
        }
        Some(Vec::new())
    }

    fn apply_to_content(&mut self, id: NodeId, client: u32, op: &Op, ret: Option<&Ret>) -> Verdict {
        if let (Op::Write { .. }, Some(Ret::Failed(FsError::NoSpace))) = (op, ret) {
            return Some(Vec::new());
        }
        match op {
            Op::Read { off, len, .. } => {
                let Some(Ret::Data(data)) = ret else { return None };
                let agrees = self.edit(id).keep(|content| content.part(*off, off + len) == *data);
                agrees.then(|| self.seen(id, client))
            }
            Op::Write { off, len, byte, .. } => {
                let before = self.seen(id, client);
                self.edit(id).change(client, |content| content.with(*off, &Runs::fill(*len, *byte)));
                done(ret).map(|_| before)
            }
            Op::Truncate { size, .. } => {
                self.edit(id).change(client, |content| content.resized(*size));
                self.all_durable(id, ret)
            }
            Op::Punch { off, len, .. } => {
                self.edit(id).change(client, |content| {
                    let hole = content.len().min(off + len).saturating_sub(*off);
                    content.with(*off, &Runs::fill(hole, 0))
                });
                self.all_durable(id, ret)
            }
            // Content that another client wrote and has not flushed is not made durable by this client's fsync.
            Op::Fsync { .. } if self.node(id).writer.is_some_and(|writer| writer != client) => done(ret),
            Op::Fsync { .. } => self.all_durable(id, ret),
            Op::Copy { from, to, len } => self.copy(*from, (id, to.1), *len, client, ret),
            _ => None,
        }
    }

    fn all_durable(&self, id: NodeId, ret: Option<&Ret>) -> Verdict {
        done(ret).map(|_| vec![(id, self.node(id).version)])
    }

    /// Whether a copy of these bytes copies any, as far as is known.
    pub(crate) fn copies(&self, from: (Ino, u64), len: u64) -> bool {
        let node = self.id_of(from.0).map(|id| self.node(id));
        node.filter(|node| !node.tainted && node.now.len() == 1)
            .is_some_and(|node| node.now[0].part(from.1, from.1 + len).len() > 0)
    }

    fn copy(
        &mut self,
        from: (Ino, u64),
        to: (NodeId, u64),
        len: u64,
        client: u32,
        ret: Option<&Ret>,
    ) -> Verdict {
        let Some(source) = self.id_of(from.0) else {
            self.edit(to.0).tainted = true;
            return Some(Vec::new());
        };
        // After a crash the content of the source may be unknown; then that of the copy is unknown too.
        let node = self.node(source);
        if node.tainted || node.now.len() > 1 {
            self.edit(to.0).tainted = true;
            return Some(Vec::new());
        }
        let part = node.now[0].part(from.1, from.1 + len);
        match ret {
            None => {}
            Some(Ret::Copied(count)) if *count == part.len() => {}
            _ => return None,
        }
        // A copy of nothing asks nobody, and promises nothing.
        if part.len() == 0 {
            return Some(Vec::new());
        }
        self.edit(to.0).change(client, |content| content.with(to.1, &part));
        let promise = [source, to.0].map(|id| (id, self.node(id).version));
        Some(promise.to_vec())
    }

    /// A write of the file may have failed for good: its content is unknown from now on.
    pub(crate) fn taint(&mut self, ino: Ino) {
        if let Some(id) = self.id_of(ino) {
            self.edit(id).tainted = true;
        }
    }
}

fn done(ret: Option<&Ret>) -> Verdict {
    ret.is_none_or(|ret| *ret == Ret::Done).then(Vec::new)
}
