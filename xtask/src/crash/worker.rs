//! One worker: chooses operations by a seed, does them, and keeps account of their promises.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rustix::fs::OFlags;

use super::content::{self, FileId, Generation};
use super::mapper::Mapper;
use super::model::{DIRECTORY_MODE, Entry, FILE_MODE, Model, Operation, Promise, Sync};
use crate::bench::latency::Latencies;
use crate::random::Random;

/// A directory in which all workers make names.
pub(crate) const SHARED: &str = "shared";

const ENTRIES_MAX: usize = 60;
const FILE_BYTES_MAX: u64 = 8 << 20;
const BYTES_MAX: u64 = 40 << 20;
const OPEN_FILES_MAX: usize = 6;
/// Most operations that are remembered to explain a failure.
const HISTORY_MAX: usize = 10_000;

/// One worker with its names. It lives for all rounds.
#[derive(Debug)]
pub(crate) struct Worker {
    index: usize,
    root: PathBuf,
    random: Random,
    pub(crate) model: Model,
    /// The operation that failed at the moment of the crash: it may or may not have taken place.
    pub(crate) in_flight: Option<Operation>,
    pub(crate) operations: u64,
    /// Latencies of the operations since they were last taken.
    pub(crate) latencies: Latencies,
    names: u64,
    generation: u64,
    open: BTreeMap<FileId, File>,
    mapper_binary: PathBuf,
    mapper: Option<Mapper>,
    history: VecDeque<(Option<FileId>, String)>,
}

impl Worker {
    /// On a mount that is strict, or not.
    pub(crate) fn new(
        index: usize,
        (root, is_strict): (&Path, bool),
        mapper_binary: &Path,
        seed: u64,
    ) -> Self {
        Self {
            index,
            root: root.to_path_buf(),
            random: Random::new(seed ^ ((index as u64 + 1) << 48)),
            model: Model::new(is_strict),
            in_flight: None,
            operations: 0,
            latencies: Latencies::default(),
            names: 0,
            generation: 0,
            open: BTreeMap::new(),
            mapper_binary: mapper_binary.to_path_buf(),
            mapper: None,
            history: VecDeque::new(),
        }
    }

    /// The operations on a file, one line each, oldest first.
    fn history(&self, file: FileId) -> Vec<String> {
        self.history.iter().filter(|(of, _)| *of == Some(file)).map(|(_, line)| line.clone()).collect()
    }

    /// A problem found after a crash, with the operations on the first file that it names.
    pub(crate) fn explain(&self, problem: &str) -> String {
        let path = problem.trim_start_matches("lost: ").split(": ").next().unwrap_or_default();
        let history = self.model.file(path).map_or(Vec::new(), |file| self.history(file.id));
        std::iter::once(problem.to_owned()).chain(history).collect::<Vec<String>>().join("\n    ")
    }

    /// Marks the end of a round in the history of every file.
    pub(crate) fn remember_round(&mut self) {
        for file in self.model.files.keys().copied().collect::<Vec<FileId>>() {
            let size = self.model.files[&file].size;
            self.remember(Some(file), format!("-- restart, size={size}"));
        }
    }

    fn remember(&mut self, file: Option<FileId>, line: String) {
        if self.history.len() >= HISTORY_MAX {
            self.history.pop_front();
        }
        self.history.push_back((file, line));
    }

    /// Prefixes of the names that only this worker uses.
    pub(crate) fn prefixes(&self) -> Vec<String> {
        vec![format!("w{}-", self.index), format!("{SHARED}/w{}-", self.index)]
    }

    /// Works until `stop` is set or, once `crashing` is set, until an operation fails.
    ///
    /// # Errors
    /// An operation that failed without a crash, or a read of wrong bytes.
    pub(crate) fn work(&mut self, stop: &AtomicBool, crashing: &AtomicBool) -> Result<(), String> {
        self.in_flight = None;
        while !stop.load(Ordering::Relaxed) {
            let operation = self.choose();
            let file = operation.path().and_then(|path| self.model.file(path)).map(|file| file.id);
            let start = Instant::now();
            let result = self.perform(&operation);
            self.latencies.note(start.elapsed());
            self.remember(file.or(operation.file()), operation.to_string());
            match result {
                Ok(()) => {
                    self.model.apply(&operation);
                    self.operations += 1;
                }
                Err(Failure::Io(error)) if crashing.load(Ordering::Relaxed) && is_of_a_crash(&error) => {
                    self.in_flight = Some(operation);
                    break;
                }
                Err(Failure::Io(error)) => return Err(format!("failed: {operation}: {error}")),
                Err(Failure::Wrong(problem)) => {
                    let history = file.map_or(Vec::new(), |file| self.history(file)).join("\n    ");
                    return Err(format!("{operation}: {problem}\n    {history}"));
                }
            }
        }
        self.open.clear();
        Ok(())
    }

    /// Does one operation and keeps account of it, for tests with given operations.
    #[cfg(test)]
    pub(crate) fn do_now(&mut self, operation: &Operation) {
        self.perform(operation).unwrap_or_else(|_| panic!("{operation}"));
        self.model.apply(operation);
    }

    fn perform(&mut self, operation: &Operation) -> Result<(), Failure> {
        let root = self.root.clone();
        let at = |path: &str| root.join(path);
        match operation {
            Operation::Create { path, file } => {
                let options = OpenOptions::new().read(true).write(true).create_new(true).clone();
                let handle = options.clone().mode(FILE_MODE).open(at(path))?;
                self.keep_open(*file, handle);
            }
            Operation::Mkdir { path } => std::fs::create_dir(at(path))?,
            Operation::Rmdir { path } => std::fs::remove_dir(at(path))?,
            Operation::Symlink { path, text } => std::os::unix::fs::symlink(text, at(path))?,
            Operation::Link { from, to } => std::fs::hard_link(at(from), at(to))?,
            Operation::Unlink { path } => std::fs::remove_file(at(path))?,
            Operation::Rename { from, to } => std::fs::rename(at(from), at(to))?,
            Operation::Chmod { path, mode } => {
                std::fs::set_permissions(at(path), std::fs::Permissions::from_mode(*mode))?;
            }
            Operation::Truncate { path, size } => self.handle(path)?.set_len(*size)?,
            Operation::Write { path, offset, len, generation, promise } => {
                let file = self.model.file(path).expect("chosen from the model").id;
                let mut data = vec![0; *len as usize];
                content::fill(file, *generation, *offset, &mut data);
                match promise {
                    Promise::Nothing => self.handle(path)?.write_all_at(&data, *offset)?,
                    Promise::Durable => {
                        let flags = OFlags::DSYNC.bits() as i32;
                        let handle = OpenOptions::new().write(true).custom_flags(flags).open(at(path))?;
                        handle.write_all_at(&data, *offset)?;
                    }
                }
            }
            Operation::Map { path, offset, len, generation, promise } => {
                let file = self.model.file(path).expect("chosen from the model").id;
                let mut data = vec![0; *len as usize];
                content::fill(file, *generation, *offset, &mut data);
                let mut mapper = match self.mapper.take() {
                    Some(mapper) => mapper,
                    None => Mapper::start(&self.mapper_binary)?,
                };
                mapper.store(&at(path), *offset, &data, *promise == Promise::Durable)?;
                // A mapper that failed may be dead, so it is not used again.
                self.mapper = Some(mapper);
            }
            Operation::Fsync { path, sync: Sync::All } => self.handle(path)?.sync_all()?,
            Operation::Fsync { path, sync: Sync::Data } => self.handle(path)?.sync_data()?,
            Operation::Read { path, offset, len } => self.read(path, *offset, *len)?,
            Operation::Close { file } => drop(self.open.remove(file)),
        }
        Ok(())
    }

    /// A reader on the same machine sees the latest bytes, durable or not.
    fn read(&mut self, path: &str, offset: u64, len: u64) -> Result<(), Failure> {
        let mut data = vec![0; len as usize];
        self.handle(path)?.read_exact_at(&mut data, offset)?;
        let expected = self.model.file(path).expect("chosen from the model").visible(offset..offset + len);
        match data.iter().zip(&expected).position(|(found, expected)| found != expected) {
            None => Ok(()),
            Some(at) => {
                let position = offset + at as u64;
                let sector = (position / content::SECTOR_BYTES * content::SECTOR_BYTES).max(offset) - offset;
                let of = |data: &[u8]| {
                    content::describe(&data[sector as usize..data.len().min(sector as usize + 512)])
                };
                let text = format!("read at {position}: found {}, expected {}", of(&data), of(&expected));
                Err(Failure::Wrong(text))
            }
        }
    }

    fn handle(&mut self, path: &str) -> io::Result<&File> {
        let id = self.model.file(path).expect("chosen from the model").id;
        if !self.open.contains_key(&id) {
            let handle = OpenOptions::new().read(true).write(true).open(self.root.join(path))?;
            self.keep_open(id, handle);
        }
        Ok(&self.open[&id])
    }

    fn keep_open(&mut self, id: FileId, handle: File) {
        if self.open.len() >= OPEN_FILES_MAX {
            self.open.pop_first();
        }
        self.open.insert(id, handle);
    }

    fn choose(&mut self) -> Operation {
        // A choice may be impossible now; the creation of a file is always possible.
        for _ in 0..20 {
            if let Some(operation) = self.try_choose() {
                return operation;
            }
        }
        self.create()
    }

    fn try_choose(&mut self) -> Option<Operation> {
        let too_many =
            self.model.entries.len() >= ENTRIES_MAX || self.model.size_total() + FILE_BYTES_MAX > BYTES_MAX;
        let choice = self.random.below(100);
        if too_many && choice < 30 {
            return self.unlink();
        }
        match choice {
            0..11 if !too_many => Some(self.create()),
            11..16 => self.unlink(),
            16..23 => self.rename(),
            23..26 if !too_many => self.link(),
            26..28 if !too_many => {
                let text = format!("to-{}", self.random.below(1000));
                Some(Operation::Symlink { path: self.fresh_name(), text })
            }
            28..31 if !too_many => Some(Operation::Mkdir { path: self.fresh_name() }),
            31..33 => self.rmdir(),
            33..36 => {
                let (path, _) = self.any_file()?;
                Some(Operation::Chmod { path, mode: 0o600 | self.random.below(0o100) as u32 })
            }
            // The account has no states with sizes of before.
            36..42 if self.model.is_strict() => self.truncate(),
            42..67 if !too_many => self.write(),
            67..72 => self.map(),
            72..87 => {
                let (path, _) = self.any_file()?;
                let sync = if self.random.percent(70) { Sync::All } else { Sync::Data };
                Some(Operation::Fsync { path, sync })
            }
            87..95 => self.choose_read(),
            95..100 => self.open.keys().next().map(|file| Operation::Close { file: *file }),
            _ => None,
        }
    }

    fn create(&mut self) -> Operation {
        let path = self.fresh_name();
        Operation::Create { path, file: FileId(((self.index as u64 + 1) << 32) | self.names) }
    }

    fn write(&mut self) -> Option<Operation> {
        let (path, size) = self.any_file()?;
        self.generation += 1;
        // Sizes around the limits of small writes, and beyond a whole stripe.
        let len_max = *self.random.pick(&[600, 9 << 10, 70 << 10, 300 << 10, 2 << 20])?;
        let mut len = 1 + self.random.below(len_max);
        let mut offset = match self.random.below(10) {
            0..5 => size,
            5..9 => self.random.below(size + 1),
            _ => size + self.random.below(100 << 10),
        };
        if self.random.percent(50) {
            (offset, len) = (offset / 4096 * 4096, len.next_multiple_of(4096));
        }
        if offset + len > FILE_BYTES_MAX {
            return None;
        }
        let promise = if self.random.percent(12) { Promise::Durable } else { Promise::Nothing };
        Some(Operation::Write { path, offset, len, generation: Generation(self.generation), promise })
    }

    fn map(&mut self) -> Option<Operation> {
        let (path, size) = self.any_file()?;
        if size == 0 {
            return None;
        }
        self.generation += 1;
        let offset = self.random.below(size);
        let len = 1 + self.random.below((size - offset).min(200 << 10));
        let promise = if self.random.percent(40) { Promise::Durable } else { Promise::Nothing };
        Some(Operation::Map { path, offset, len, generation: Generation(self.generation), promise })
    }

    fn truncate(&mut self) -> Option<Operation> {
        let (path, size) = self.any_file()?;
        let size = match self.random.below(10) {
            0..2 => 0,
            2..8 => self.random.below(size + 1),
            _ => (size + self.random.below(300 << 10)).min(FILE_BYTES_MAX),
        };
        Some(Operation::Truncate { path, size })
    }

    fn choose_read(&mut self) -> Option<Operation> {
        let (path, size) = self.any_file()?;
        let offset = self.random.below(size + 1);
        let len = self.random.below(size - offset + 1).min(1 << 20);
        Some(Operation::Read { path, offset, len })
    }

    fn unlink(&mut self) -> Option<Operation> {
        let path = self.any_path(|entry| *entry != Entry::Directory)?;
        Some(Operation::Unlink { path })
    }

    fn link(&mut self) -> Option<Operation> {
        let (from, _) = self.any_file()?;
        Some(Operation::Link { from, to: self.fresh_name() })
    }

    fn rmdir(&mut self) -> Option<Operation> {
        let path = self.any_path(|entry| *entry == Entry::Directory)?;
        let below = format!("{path}/");
        let is_empty = !self.model.entries.keys().any(|path| path.starts_with(&below));
        is_empty.then_some(Operation::Rmdir { path })
    }

    /// A rename to a fresh name or, unless it is a directory, to an existing name of the same kind.
    fn rename(&mut self) -> Option<Operation> {
        let from = self.any_path(|_| true)?;
        let to = if self.random.percent(50) && self.model.entries[&from] != Entry::Directory {
            self.any_path(|entry| *entry != Entry::Directory)?
        } else {
            self.fresh_name()
        };
        let is_into_itself = to.starts_with(&format!("{from}/"));
        (from != to && !is_into_itself).then_some(Operation::Rename { from, to })
    }

    /// A name that was never used, in the root, the shared directory, or one of the worker's directories.
    fn fresh_name(&mut self) -> String {
        self.names += 1;
        let name = format!("w{}-{}", self.index, self.names);
        match self.random.below(10) {
            0..2 => name,
            2..5 => format!("{SHARED}/{name}"),
            _ => match self.any_path(|entry| *entry == Entry::Directory) {
                Some(directory) if directory.len() < 100 => format!("{directory}/{name}"),
                _ => name,
            },
        }
    }

    fn any_path(&mut self, accept: impl Fn(&Entry) -> bool) -> Option<String> {
        let paths: Vec<&String> =
            self.model.entries.iter().filter(|(_, entry)| accept(entry)).map(|(path, _)| path).collect();
        self.random.pick(&paths).map(|path| (*path).clone())
    }

    fn any_file(&mut self) -> Option<(String, u64)> {
        let path = self.any_path(|entry| matches!(entry, Entry::File(_)))?;
        let size = self.model.file(&path)?.size;
        Some((path, size))
    }
}

/// Why an operation failed.
enum Failure {
    Io(io::Error),
    Wrong(String),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Whether an error comes from a mount without its process, or from a process whose disks are gone or full.
fn is_of_a_crash(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let errors =
        [Errno::NOTCONN, Errno::CONNABORTED, Errno::IO, Errno::STALE, Errno::INTR, Errno::ROFS, Errno::NOSPC];
    errors.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}

/// Makes the directory that all workers share.
pub(crate) fn prepare(root: &Path) -> io::Result<()> {
    let shared = root.join(SHARED);
    std::fs::create_dir(&shared)?;
    std::fs::set_permissions(shared, std::fs::Permissions::from_mode(DIRECTORY_MODE))
}
