//! Processes that perform random operations on files through a client, and record the results.

use std::sync::Arc;
use std::time::Duration;

use base::{FsError, Ino};
use bytes::Bytes;
use client::{AllocateMode, Client, FileKind, MakeNode, OpenIntent, RenameMode, XattrMode};

use crate::history::{Cut, History, Kind, Name, Op, Ret};
use crate::locks;
use crate::runs::Runs;
use crate::world::{Dice, World};

const NAMES: [Name; 6] = ["a", "b", "c", "d", "e", "f"];
const XATTRS: [Name; 2] = ["user.one", "user.two"];
/// Longer than any operation takes, however slow the drives: a recall ends after 60 s at most, a request to a drive
/// after 10 s, and waiters on a full log get an error after 5 s.
const HANG: Duration = Duration::from_secs(600);
const HANDLES_MAX: usize = 4;
const FILE_BYTES: u64 = 96 << 10;
const LARGE_ON_SMALL: u64 = 290_000;

/// One process.
pub(crate) struct Process {
    world: Arc<World>,
    history: Arc<History>,
    client: Client,
    client_number: u32,
    dice: Dice,
    dirs: Vec<Ino>,
    /// Files that the process has seen, open or not.
    files: Vec<Ino>,
    /// Open handles; an inode may be there twice.
    handles: Vec<Ino>,
}

fn kind_of(kind: FileKind) -> Kind {
    if kind == FileKind::Directory { Kind::Directory } else { Kind::File }
}

/// The result in the form of the history.
fn ret(result: Result<Ret, FsError>) -> Ret {
    result.unwrap_or_else(Ret::Failed)
}

impl Process {
    pub(crate) fn new(
        world: &Arc<World>,
        history: &Arc<History>,
        client: Client,
        client_number: u32,
        dice: Dice,
    ) -> Self {
        Self {
            world: world.clone(),
            history: history.clone(),
            client,
            client_number,
            dice,
            dirs: vec![Ino::ROOT],
            files: Vec::new(),
            handles: Vec::new(),
        }
    }

    /// Performs some random operations, then closes open files. Ends early if the service has stopped.
    pub(crate) async fn work(mut self, operations: u32) {
        // Tiering waits ten seconds for more extents to upload.
        let pause_ms = if self.world.scenario.tiers { 4000 } else { 400 };
        for _ in 0..operations {
            let ret = if !self.handles.is_empty() && self.dice.once_in(12) {
                self.lock(*self.dice.of(&self.handles)).await
            } else {
                let op = self.choose();
                self.perform(op).await
            };
            if matches!(ret, Ret::Failed(FsError::Unavailable | FsError::Unknown)) {
                if self.world.scenario.cuts {
                    break;
                }
                return;
            }
            if self.dice.once_in(8) {
                tokio::time::sleep(Duration::from_millis(self.dice.below(pause_ms))).await;
            }
        }
        while let Some(ino) = self.handles.last().copied() {
            self.perform(Op::Close { ino }).await;
        }
    }

    /// Reads everything: names, attributes, contents.
    pub(crate) async fn survey(&mut self) {
        let mut dirs = vec![Ino::ROOT];
        let mut seen = std::collections::BTreeSet::new();
        while let Some(dir) = dirs.pop() {
            let Ret::Entries(entries) = self.perform(Op::ReadDir { dir }).await else { continue };
            for (_, ino, kind) in entries {
                self.perform(Op::GetAttr { ino }).await;
                if kind == Kind::Directory {
                    dirs.push(ino);
                } else if seen.insert(ino) {
                    self.survey_file(ino).await;
                }
            }
        }
    }

    async fn survey_file(&mut self, ino: Ino) {
        if self.perform(Op::Open { ino, cut: Cut::Keep }).await != Ret::Done {
            return;
        }
        self.perform(Op::Read { ino, off: 0, len: 8 << 20 }).await;
        locks::check_free(&self.world, &self.client, ino).await;
        for name in XATTRS {
            self.perform(Op::GetXattr { ino, name }).await;
        }
        self.perform(Op::Close { ino }).await;
    }

    /// Holds a lock for some time. The history does not show it.
    async fn lock(&self, ino: Ino) -> Ret {
        let held = tokio::time::timeout(HANG, locks::hold_one(&self.world, &self.client, ino)).await;
        let Ok(held) = held else {
            self.world.promises().violate(format!("I12: a lock on inode {ino} hangs"));
            return Ret::Failed(FsError::Unknown);
        };
        ret(held.map(|()| Ret::Done))
    }

    fn name(&self) -> Name {
        self.dice.of::<Name>(&NAMES)
    }

    fn xattr(&self) -> Name {
        self.dice.of::<Name>(&XATTRS)
    }

    fn dir(&self) -> Ino {
        *self.dice.of(&self.dirs)
    }

    fn choose(&mut self) -> Op {
        let on_handle = !self.handles.is_empty() && !self.dice.once_in(3);
        if on_handle { self.choose_on_file() } else { self.choose_on_names() }
    }

    fn choose_on_names(&mut self) -> Op {
        let (parent, name) = (self.dir(), self.name());
        match self.dice.below(20) {
            0..6 => Op::Make { parent, name, kind: Kind::File },
            6..8 => Op::Make { parent, name, kind: Kind::Directory },
            8..11 => Op::Lookup { parent, name },
            11 => Op::ReadDir { dir: parent },
            12..14 => Op::Unlink { parent, name },
            14 => Op::Rmdir { parent, name },
            15..17 => {
                let modes =
                    [RenameMode::Replace, RenameMode::Replace, RenameMode::NoReplace, RenameMode::Exchange];
                Op::Rename {
                    from: (parent, name),
                    to: (self.dir(), self.name()),
                    mode: *self.dice.of(&modes),
                }
            }
            17 => Op::GetAttr { ino: parent },
            18 if !self.files.is_empty() => Op::Link { ino: *self.dice.of(&self.files), parent, name },
            _ if !self.files.is_empty() && self.handles.len() < HANDLES_MAX => {
                let cut = if self.dice.once_in(6) { Cut::Empty } else { Cut::Keep };
                Op::Open { ino: *self.dice.of(&self.files), cut }
            }
            _ => Op::Lookup { parent, name },
        }
    }

    fn choose_on_file(&mut self) -> Op {
        let ino = *self.dice.of(&self.handles);
        let off = self.offset();
        match self.dice.below(24) {
            0..7 => Op::Write { ino, off, len: self.write_len(), byte: 1 + self.dice.below(255) as u8 },
            7..11 => Op::Read { ino, off, len: 1 + self.dice.below(FILE_BYTES) },
            11..14 => Op::Fsync { ino },
            14..16 => Op::GetAttr { ino },
            16 => Op::Truncate { ino, size: off },
            17 => Op::Punch { ino, off, len: 1 + self.dice.below(20_000) },
            18 => {
                let to = *self.dice.of(&self.handles);
                if to == ino {
                    return Op::Read { ino, off: 0, len: FILE_BYTES };
                }
                Op::Copy { from: (ino, off), to: (to, self.offset()), len: 1 + self.dice.below(40_000) }
            }
            19 => Op::SetXattr { ino, name: self.xattr(), value: self.dice.below(256) as u8 },
            20 => Op::GetXattr { ino, name: self.xattr() },
            21 => Op::RemoveXattr { ino, name: self.xattr() },
            _ => Op::Close { ino },
        }
    }

    fn offset(&self) -> u64 {
        match self.dice.below(4) {
            0 => 0,
            1 => self.dice.below(FILE_BYTES / 4096) * 4096,
            2 => self.dice.below(300),
            _ => self.dice.below(FILE_BYTES),
        }
    }

    fn write_len(&self) -> u64 {
        let small = 1 + self.dice.below(300);
        let fills = self.world.scenario.fills;
        match self.dice.below(16) {
            // On small drives a shard, and so a run of bytes, cannot be much longer than a third of a segment.
            0..4 if fills => LARGE_ON_SMALL,
            0..5 => small,
            5..9 => 1 + self.dice.below(8 << 10),
            9..12 => (1 + self.dice.below(4)) * 4096,
            12..14 => 8_000 + self.dice.below(30_000),
            14 => 30_000 + self.dice.below(100_000),
            _ if fills => LARGE_ON_SMALL,
            _ => 250_000 + self.dice.below(200_000),
        }
    }

    /// Performs one operation and records it.
    async fn perform(&mut self, op: Op) -> Ret {
        let id = self.history.begin(self.client_number, &op);
        if let Op::Write { ino, .. } = &op {
            self.world.promises().written.entry(self.client_number).or_default().insert(ino.0);
        }
        let result = tokio::time::timeout(HANG, self.execute(&op)).await;
        let Ok(result) = result else {
            self.world.promises().violate(format!("I12: #{id} {op:?} hangs"));
            return Ret::Failed(FsError::Unknown);
        };
        let ret = ret(result);
        self.history.end(id, &ret);
        self.learn(&op, &ret);
        self.check_failure(&op, &ret);
        ret
    }

    /// Reports errors that the scenario does not explain.
    fn check_failure(&self, op: &Op, ret: &Ret) {
        let scenario = &self.world.scenario;
        let Ret::Failed(error) = ret else { return };
        let faulty = self.world.is_faulty();
        let explained = match error {
            FsError::Io => faulty || scenario.store_fails || scenario.cuts,
            FsError::StaleLease | FsError::Unavailable | FsError::Unknown => faulty || scenario.cuts,
            FsError::NoSpace => scenario.fills || faulty,
            _ => true,
        };
        // A request during a power failure may be answered by the remains of the node.
        if !explained && !self.world.trace.is_cut() {
            self.world.promises().violate(format!("{op:?} failed without a reason: {error}"));
        }
    }

    async fn execute(&self, op: &Op) -> Result<Ret, FsError> {
        let client = &self.client;
        client.note_use();
        match op {
            Op::Make { parent, name, kind } => self.make(*parent, name, *kind).await,
            Op::Lookup { parent, name } => {
                let attr = client.lookup(*parent, name.as_bytes()).await?;
                client.forget(attr.ino, 1);
                Ok(Ret::Found { ino: attr.ino, kind: kind_of(attr.kind) })
            }
            Op::ReadDir { dir } => {
                let page = client.readdir(*dir, None, 1000).await?;
                let mut entries: Vec<_> = page
                    .entries
                    .iter()
                    .map(|entry| {
                        let name = String::from_utf8_lossy(&entry.name).into_owned();
                        (name, entry.attr.ino, kind_of(entry.attr.kind))
                    })
                    .collect();
                entries.sort();
                Ok(Ret::Entries(entries))
            }
            Op::GetAttr { ino } => {
                let attr = client.getattr(*ino).await?;
                let (nlink, size) = (Some(attr.nlink), Some(attr.size));
                Ok(Ret::Attr { kind: kind_of(attr.kind), nlink, size })
            }
            Op::Unlink { parent, name } => client.unlink(*parent, name.as_bytes()).await.map(|()| Ret::Done),
            Op::Rmdir { parent, name } => client.rmdir(*parent, name.as_bytes()).await.map(|()| Ret::Done),
            Op::Rename { from, to, mode } => {
                let (from, to) = ((from.0, from.1.as_bytes()), (to.0, to.1.as_bytes()));
                client.rename(from, to, *mode).await.map(|()| Ret::Done)
            }
            Op::Link { ino, parent, name } => {
                let attr = client.link(*ino, *parent, name.as_bytes()).await?;
                client.forget(attr.ino, 1);
                Ok(Ret::Done)
            }
            _ => self.execute_on_file(op).await,
        }
    }

    async fn make(&self, parent: Ino, name: Name, kind: Kind) -> Result<Ret, FsError> {
        let (file_kind, open) = match kind {
            Kind::File => (FileKind::Regular, OpenIntent::Write),
            Kind::Directory => (FileKind::Directory, OpenIntent::None),
        };
        let make = MakeNode {
            parent,
            name: Bytes::from_static(name.as_bytes()),
            kind: file_kind,
            mode: 0o755,
            umask: 0,
            uid: 0,
            gid: 0,
            rdev: 0,
            target: Bytes::new(),
            open,
        };
        let attr = self.client.make(make).await?;
        self.client.forget(attr.ino, 1);
        Ok(Ret::Found { ino: attr.ino, kind })
    }

    async fn execute_on_file(&self, op: &Op) -> Result<Ret, FsError> {
        let client = &self.client;
        match op {
            Op::Open { ino, cut } => {
                let intent = if *cut == Cut::Empty { OpenIntent::Truncate } else { OpenIntent::Read };
                client.open_file(*ino, intent).await?;
            }
            Op::Close { ino } => client.close_file(*ino),
            Op::Read { ino, off, len } => {
                return client.read(*ino, *off, *len as usize).await.map(|data| Ret::Data(Runs::of(&data)));
            }
            Op::Write { ino, off, len, byte } => {
                client.write(*ino, *off, &vec![*byte; *len as usize]).await?
            }
            Op::Truncate { ino, size } => {
                let set = client::SetAttr { size: Some(*size), ..client::SetAttr::default() };
                client.setattr(*ino, set).await?;
            }
            Op::Punch { ino, off, len } => client.allocate(*ino, *off, *len, AllocateMode::Punch).await?,
            Op::Copy { from, to, len } => return client.copy_range(*from, *to, *len).await.map(Ret::Copied),
            Op::Fsync { ino } => client.fsync(*ino).await?,
            Op::SetXattr { ino, name, value } => {
                client.setxattr(*ino, name.as_bytes(), &[*value], XattrMode::Set).await?;
            }
            Op::GetXattr { ino, name } => {
                let value = client.getxattr(*ino, name.as_bytes()).await?;
                return Ok(Ret::Value(value.first().copied().unwrap_or_default()));
            }
            Op::RemoveXattr { ino, name } => client.removexattr(*ino, name.as_bytes()).await?,
            _ => return Err(FsError::Invalid),
        }
        Ok(Ret::Done)
    }

    /// Remembers files and handles for later operations.
    fn learn(&mut self, op: &Op, ret: &Ret) {
        match (op, ret) {
            (Op::Make { kind: Kind::File, .. }, Ret::Found { ino, .. }) => {
                self.handles.push(*ino);
                self.files.push(*ino);
            }
            (Op::Make { .. } | Op::Lookup { .. }, Ret::Found { ino, kind }) => {
                let known = if *kind == Kind::Directory { &mut self.dirs } else { &mut self.files };
                if !known.contains(ino) {
                    known.push(*ino);
                }
                let keep_from = known.len().saturating_sub(6);
                // The root stays.
                known.drain(usize::from(*kind == Kind::Directory).min(keep_from)..keep_from);
            }
            (Op::Open { ino, .. }, Ret::Done) => self.handles.push(*ino),
            (Op::Close { ino }, _) => {
                if let Some(at) = self.handles.iter().position(|handle| handle == ino) {
                    self.handles.swap_remove(at);
                }
            }
            _ => {}
        }
    }
}
