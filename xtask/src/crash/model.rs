//! The required names and files of one worker, given the operations that returned.
//!
//! On a strict mount, operations on names and sizes are durable when they return, bytes and modes of files when fsync returns.
//! Otherwise, fsync makes all earlier operations on names durable, and a crash leaves a beginning of those after it. Only one
//! worker changes its names, so its own order of operations decides.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::content::{FileId, Generation};
use super::file::FileState;

/// Modes of new files and directories.
pub(crate) const FILE_MODE: u32 = 0o644;
pub(crate) const DIRECTORY_MODE: u32 = 0o755;

/// The inode of a name. Names are relative to the mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Entry {
    File(FileId),
    Directory,
    Symlink(String),
}

impl Entry {
    fn file(&self) -> Option<FileId> {
        match self {
            Self::File(id) => Some(*id),
            _ => None,
        }
    }
}

/// The promise of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Promise {
    Nothing,
    /// The file is opened with `O_DSYNC`.
    Durable,
}

/// Which system call makes bytes durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sync {
    All,
    Data,
}

/// One operation on a worker's names.
#[derive(Debug, Clone)]
pub(crate) enum Operation {
    Create {
        path: String,
        file: FileId,
    },
    Mkdir {
        path: String,
    },
    Rmdir {
        path: String,
    },
    Symlink {
        path: String,
        text: String,
    },
    Link {
        from: String,
        to: String,
    },
    Unlink {
        path: String,
    },
    Rename {
        from: String,
        to: String,
    },
    Chmod {
        path: String,
        mode: u32,
    },
    Truncate {
        path: String,
        size: u64,
    },
    Write {
        path: String,
        offset: u64,
        len: u64,
        generation: Generation,
        promise: Promise,
    },
    /// A store through a shared mapping, inside the file; durable if msync returned.
    Map {
        path: String,
        offset: u64,
        len: u64,
        generation: Generation,
        promise: Promise,
    },
    Fsync {
        path: String,
        sync: Sync,
    },
    Read {
        path: String,
        offset: u64,
        len: u64,
    },
    Close {
        file: FileId,
    },
}

impl Operation {
    /// The name of its object.
    pub(crate) fn path(&self) -> Option<&str> {
        match self {
            Self::Create { path, .. }
            | Self::Mkdir { path }
            | Self::Rmdir { path }
            | Self::Symlink { path, .. }
            | Self::Unlink { path }
            | Self::Chmod { path, .. }
            | Self::Truncate { path, .. }
            | Self::Write { path, .. }
            | Self::Map { path, .. }
            | Self::Fsync { path, .. }
            | Self::Read { path, .. } => Some(path),
            Self::Link { from, .. } | Self::Rename { from, .. } => Some(from),
            Self::Close { .. } => None,
        }
    }

    /// The file, if the operation has one.
    pub(crate) fn file(&self) -> Option<FileId> {
        match self {
            Self::Create { file, .. } | Self::Close { file } => Some(*file),
            _ => None,
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

/// A worker's names and files.
#[derive(Debug, Clone, Default)]
pub(crate) struct Model {
    pub(crate) entries: BTreeMap<String, Entry>,
    pub(crate) files: BTreeMap<FileId, FileState>,
    /// Files without a name, to distinguish a deleted file that came back from one that was never made.
    pub(crate) deleted: BTreeSet<FileId>,
    /// On a mount that is not strict.
    behind: Option<Behind>,
}

/// The states that a crash may leave besides the present one.
#[derive(Debug, Clone, Default)]
struct Behind {
    /// The names before each operation on names since the last fsync.
    names: Vec<BTreeMap<String, Entry>>,
    /// Files that lost their last name since then.
    files: BTreeMap<FileId, FileState>,
}

impl Model {
    /// Nothing, on a mount that is strict or not.
    pub(crate) fn new(is_strict: bool) -> Self {
        Self { behind: (!is_strict).then(Behind::default), ..Self::default() }
    }

    pub(crate) fn is_strict(&self) -> bool {
        self.behind.is_none()
    }

    fn note_names(&mut self, operation: &Operation) {
        let Some(behind) = &mut self.behind else { return };
        match operation {
            Operation::Create { .. }
            | Operation::Mkdir { .. }
            | Operation::Rmdir { .. }
            | Operation::Symlink { .. }
            | Operation::Link { .. }
            | Operation::Unlink { .. }
            | Operation::Rename { .. } => behind.names.push(self.entries.clone()),
            Operation::Fsync { .. }
            | Operation::Write { promise: Promise::Durable, .. }
            | Operation::Map { promise: Promise::Durable, .. } => *behind = Behind::default(),
            _ => {}
        }
    }

    /// The states with fewer operations on names, the newest first.
    fn earlier(&self) -> impl Iterator<Item = Self> {
        let behind = self
            .behind
            .iter()
            .flat_map(|behind| behind.names.iter().rev().zip(std::iter::repeat(&behind.files)));
        behind.map(|(names, gone)| {
            let mut earlier = Self { entries: names.clone(), files: gone.clone(), ..self.clone() };
            earlier.files.extend(self.files.clone());
            let ids: BTreeSet<FileId> = names.values().filter_map(Entry::file).collect();
            earlier.files.retain(|id, _| ids.contains(id));
            earlier.deleted.retain(|id| !ids.contains(id));
            earlier
        })
    }

    /// Applies an operation that returned success.
    pub(crate) fn apply(&mut self, operation: &Operation) {
        self.note_names(operation);
        match operation {
            Operation::Create { path, file } => {
                self.entries.insert(path.clone(), Entry::File(*file));
                self.files.insert(*file, FileState::new(*file, FILE_MODE));
            }
            Operation::Mkdir { path } => drop(self.entries.insert(path.clone(), Entry::Directory)),
            Operation::Symlink { path, text } => {
                self.entries.insert(path.clone(), Entry::Symlink(text.clone()));
            }
            Operation::Rmdir { path } | Operation::Unlink { path } => self.remove(path),
            Operation::Link { from, to } => {
                let entry = self.entries[from].clone();
                self.entries.insert(to.clone(), entry);
            }
            Operation::Rename { from, to } => self.rename(from, to),
            Operation::Chmod { path, mode } => self.change(path, |file| file.chmod(*mode)),
            Operation::Truncate { path, size } => self.change(path, |file| file.truncate(*size)),
            Operation::Write { path, offset, len, generation, promise }
            | Operation::Map { path, offset, len, generation, promise } => {
                let range = *offset..offset + len;
                self.change(path, |file| match promise {
                    Promise::Nothing => file.write(range, *generation),
                    Promise::Durable => file.write_durable(range, *generation),
                });
            }
            // fdatasync makes no promise about the mode.
            Operation::Fsync { path, sync: Sync::All } => self.change(path, FileState::sync),
            Operation::Fsync { path, sync: Sync::Data } => self.change(path, FileState::sync_data),
            Operation::Read { .. } | Operation::Close { .. } => {}
        }
    }

    /// The possible states if `in_flight` may or may not have taken place.
    pub(crate) fn possible(&self, in_flight: Option<&Operation>) -> Vec<Self> {
        let mut possible = self.latest(in_flight);
        possible.extend(self.earlier());
        possible
    }

    /// The possible states with all operations that returned.
    fn latest(&self, in_flight: Option<&Operation>) -> Vec<Self> {
        match in_flight {
            None | Some(Operation::Fsync { .. } | Operation::Read { .. } | Operation::Close { .. }) => {
                vec![self.clone()]
            }
            Some(
                Operation::Write { path, offset, len, generation, .. }
                | Operation::Map { path, offset, len, generation, .. },
            ) => {
                let mut written = self.clone();
                written.change(path, |file| file.write(*offset..offset + len, *generation));
                vec![written]
            }
            Some(operation) => {
                let mut after = self.clone();
                after.apply(operation);
                vec![self.clone(), after]
            }
        }
    }

    /// Makes everything durable, as an orderly stop does.
    pub(crate) fn sync_all(&mut self) {
        self.files.values_mut().for_each(FileState::sync);
        self.settle();
    }

    /// The names are what a crash left, or durable.
    pub(crate) fn settle(&mut self) {
        self.behind = self.behind.take().map(|_| Behind::default());
    }

    pub(crate) fn file(&self, path: &str) -> Option<&FileState> {
        match self.entries.get(path)? {
            Entry::File(id) => self.files.get(id),
            _ => None,
        }
    }

    pub(crate) fn links(&self, file: FileId) -> usize {
        self.entries.values().filter(|entry| **entry == Entry::File(file)).count()
    }

    pub(crate) fn size_total(&self) -> u64 {
        self.files.values().map(|file| file.size).sum()
    }

    fn change(&mut self, path: &str, change: impl FnOnce(&mut FileState)) {
        if let Some(Entry::File(id)) = self.entries.get(path) {
            change(self.files.get_mut(id).expect("every named file has a state"));
        }
    }

    fn remove(&mut self, path: &str) {
        if let Some(Entry::File(file)) = self.entries.remove(path)
            && self.links(file) == 0
        {
            let state = self.files.remove(&file);
            if let (Some(behind), Some(state)) = (&mut self.behind, state) {
                behind.files.insert(file, state);
            }
            self.deleted.insert(file);
        }
    }

    fn rename(&mut self, from: &str, to: &str) {
        // Two names of one file: by POSIX, rename does nothing.
        if let (Some(Entry::File(a)), Some(Entry::File(b))) = (self.entries.get(from), self.entries.get(to))
            && a == b
        {
            return;
        }
        self.remove(to);
        let below = format!("{from}/");
        let moved: Vec<String> =
            self.entries.keys().filter(|path| *path == from || path.starts_with(&below)).cloned().collect();
        for path in moved {
            let entry = self.entries.remove(&path).expect("listed above");
            self.entries.insert(format!("{to}{}", &path[from.len()..]), entry);
        }
    }
}
