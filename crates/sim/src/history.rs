//! The operations of processes and their results, in the order in which they happened.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use base::env::Clock;
use base::{FsError, Ino};
use client::RenameMode;

use crate::runs::Runs;
use crate::world::World;

/// The name of a directory entry.
pub(crate) type Name = &'static str;

/// One operation of a process.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    Make { parent: Ino, name: Name, kind: Kind },
    Lookup { parent: Ino, name: Name },
    ReadDir { dir: Ino },
    GetAttr { ino: Ino },
    Unlink { parent: Ino, name: Name },
    Rmdir { parent: Ino, name: Name },
    Rename { from: (Ino, Name), to: (Ino, Name), mode: RenameMode },
    Link { ino: Ino, parent: Ino, name: Name },
    Open { ino: Ino, cut: Cut },
    Close { ino: Ino },
    Read { ino: Ino, off: u64, len: u64 },
    Write { ino: Ino, off: u64, len: u64, byte: u8 },
    Truncate { ino: Ino, size: u64 },
    Punch { ino: Ino, off: u64, len: u64 },
    Copy { from: (Ino, u64), to: (Ino, u64), len: u64 },
    Fsync { ino: Ino },
    SetXattr { ino: Ino, name: Name, value: u8 },
    GetXattr { ino: Ino, name: Name },
    RemoveXattr { ino: Ino, name: Name },
}

impl Op {
    /// Whether it may return before it is durable.
    pub(crate) fn may_be_early(&self) -> bool {
        self.changes_names()
            || matches!(
                self,
                Self::Truncate { .. }
                    | Self::SetXattr { .. }
                    | Self::RemoveXattr { .. }
                    | Self::Open { cut: Cut::Empty, .. }
            )
    }

    pub(crate) fn changes_names(&self) -> bool {
        matches!(
            self,
            Self::Make { .. }
                | Self::Unlink { .. }
                | Self::Rmdir { .. }
                | Self::Rename { .. }
                | Self::Link { .. }
        )
    }
}

/// The kind of a created inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Kind {
    File,
    Directory,
}

/// Whether a file is emptied when it is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    Keep,
    Empty,
}

/// The result of an operation, as its process sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ret {
    Done,
    Found {
        ino: Ino,
        kind: Kind,
    },
    /// Without link count and size, if the same client changed names at that time: it learns of its own changes when it
    /// gets the answers, as does the kernel above it.
    Attr {
        kind: Kind,
        nlink: Option<u32>,
        size: Option<u64>,
    },
    Entries(Vec<(String, Ino, Kind)>),
    Data(Runs),
    Copied(u64),
    Value(u8),
    Failed(FsError),
}

impl Ret {
    /// Whether the outcome is open: the operation may have happened, and may even happen later.
    pub(crate) fn is_doubtful(&self) -> bool {
        matches!(
            self,
            Self::Failed(FsError::Unavailable | FsError::Unknown | FsError::Io | FsError::StaleLease)
        )
    }
}

/// Numbers operations in the order of their beginning.
pub(crate) type OpId = usize;

/// An event of a history.
#[derive(Debug, Clone)]
pub(crate) enum Moment {
    /// A process of a client began an operation.
    Begin { id: OpId, client: u32, op: Op },
    /// The process got the result.
    End { id: OpId, ret: Ret },
    /// Power was lost: operations without an answer by then never get one.
    Crash,
}

/// The recorded events, in order.
pub(crate) struct History {
    world: Arc<World>,
    /// With their times.
    moments: Mutex<Vec<(u64, Moment)>>,
}

impl History {
    pub(crate) fn new(world: &Arc<World>) -> Self {
        Self { world: world.clone(), moments: Mutex::default() }
    }

    fn push(&self, make: impl FnOnce(OpId) -> Moment) -> OpId {
        let mut moments = self.moments.lock().expect("no holder of this lock panics");
        let id = moments.len();
        moments.push((self.world.clock.boot_ns(), make(id)));
        id
    }

    pub(crate) fn begin(&self, client: u32, op: &Op) -> OpId {
        self.world.trace.event(format_args!("begin {client} {op:?}"));
        self.push(|id| Moment::Begin { id, client, op: op.clone() })
    }

    pub(crate) fn end(&self, id: OpId, ret: &Ret) {
        let moment = Moment::End { id, ret: ret.clone() };
        self.world.trace.event(format_args!("end {}", show(&moment)));
        self.push(|_| moment);
    }

    /// The history, without attributes that a client need not know exactly while its own changes are under way.
    fn weakened(mut moments: Vec<Moment>) -> Vec<Moment> {
        let mut changing: BTreeMap<OpId, u32> = BTreeMap::new();
        let mut asking: BTreeMap<OpId, (u32, bool)> = BTreeMap::new();
        for moment in &mut moments {
            match moment {
                Moment::Begin { id, client, op } if op.changes_names() => {
                    changing.insert(*id, *client);
                    asking
                        .values_mut()
                        .filter(|(asker, _)| asker == client)
                        .for_each(|(_, weak)| *weak = true);
                }
                Moment::Begin { id, client, op: Op::GetAttr { .. } } => {
                    asking.insert(*id, (*client, changing.values().any(|other| other == client)));
                }
                Moment::End { id, ret } => {
                    changing.remove(id);
                    if let (Some((_, true)), Ret::Attr { kind, nlink, size }) = (asking.remove(id), ret) {
                        *nlink = None;
                        *size = size.filter(|_| *kind == Kind::File);
                    }
                }
                Moment::Begin { .. } => {}
                Moment::Crash => (changing, asking) = Default::default(),
            }
        }
        moments
    }

    pub(crate) fn crash(&self) {
        self.push(|_| Moment::Crash);
    }

    /// The history up to a time.
    pub(crate) fn take(&self, until_ns: u64) -> Vec<Moment> {
        let moments = std::mem::take(&mut *self.moments.lock().expect("no holder of this lock panics"));
        let before = moments.into_iter().take_while(|(at_ns, _)| *at_ns < until_ns);
        Self::weakened(before.map(|(_, moment)| moment).collect())
    }
}

/// One line of text; long data is cut.
pub(crate) fn show(moment: &Moment) -> String {
    let mut text = match moment {
        Moment::Begin { id, client, op } => format!("#{id} client {client}: {op:?}"),
        Moment::End { id, ret: Ret::Data(data) } => format!("#{id} -> {}", data.show()),
        Moment::End { id, ret } => format!("#{id} -> {ret:?}"),
        Moment::Crash => "power is lost".to_owned(),
    };
    text.truncate(300);
    text
}
