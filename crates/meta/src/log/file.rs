//! The log of one machine: append-only files in a directory, one fdatasync per group commit.
//!
//! A file is named by the first entry that it may hold. Only one owner writes a file: sealing starts a new one, so
//! nothing is appended after a torn frame. A file ends at its first invalid frame, or where the next file begins: bytes
//! from there on were never acknowledged. If it ends before that, acknowledged entries are missing and the log refuses
//! to open. Space is zeroed ahead of the append point, because an fdatasync that must also grow the file costs twice as
//! much.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use base::env::{Caching, Env, File, OpenMode};
use base::units::MIB;
use base::{Epoch, Seq};
use wire::BoxFuture;

use super::frame::{BadFrame, ENTRY_BYTES_MAX, Frame, FrameKind, HEADER_BYTES};
use super::{AppendError, Fence, LedgerLog, LogCaps, LogEntry, LogError, Room, Tail};

pub(super) const BATCHES_MAX: usize = 64;
/// Bytes copied at a time.
const COPY_BYTES: u64 = 4 * MIB;
const STAGED: &str = "next.tmp";

/// File sizes; tests and simulations make them small.
#[derive(Debug, Clone, Copy)]
pub struct LogSizes {
    /// A file of this length gets no further entries.
    pub file_bytes: u64,
    /// Bytes zeroed at a time.
    pub zero_ahead_bytes: u64,
    /// Least bytes zeroed behind the append point while the disk has room. They are what a full disk leaves.
    pub reserve_bytes: u64,
}

impl Default for LogSizes {
    fn default() -> Self {
        Self { file_bytes: 256 * MIB, zero_ahead_bytes: 8 * MIB, reserve_bytes: 8 * MIB }
    }
}

/// A log in its own directory.
pub struct FileLog {
    env: Env,
    dir: PathBuf,
    sizes: LogSizes,
    inner: Mutex<Inner>,
    /// The disk had no room when the reserve was to be refilled.
    full: AtomicBool,
}

struct Inner {
    epoch: Epoch,
    /// Of the last seal by this process; no other process writes the log beside it.
    nonce: u64,
    tail: Seq,
    /// Oldest first. The entries of a file come before the first entry of the next.
    files: Vec<LogFile>,
    writer: Option<Writer>,
    /// End of the newest file, if it is not being written.
    end: u64,
    /// After a failed write the content of the file is unknown, so nothing is appended any more.
    broken: bool,
}

#[derive(Debug, Clone)]
struct LogFile {
    first: Seq,
    path: PathBuf,
}

struct Writer {
    file: Arc<dyn File>,
    at: u64,
    zeroed: u64,
    sizes: LogSizes,
}

/// Bytes copied of each log file, by path in the source.
pub(super) type Copied = std::collections::BTreeMap<PathBuf, u64>;

/// The result of a scan of one file.
struct Scanned {
    epoch: Epoch,
    tail: Seq,
    /// Behind the last frame.
    end: u64,
}

impl FileLog {
    /// Opens the log in `dir`, creating it if it is empty.
    ///
    /// # Errors
    /// `Damaged` if acknowledged entries are missing, `NewerFormat`, `Io`.
    pub fn open(env: &Env, dir: &Path) -> Result<Self, LogError> {
        env.files.create_dir_all(dir)?;
        if let Some(parent) = dir.parent() {
            env.files.sync_dir(parent)?;
        }
        let mut files: Vec<LogFile> = Vec::new();
        for path in env.files.list(dir)? {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let Some(stem) = name.strip_suffix(".log") else { continue };
            let first = u64::from_str_radix(stem, 16)
                .map_err(|_| LogError::Damaged(format!("unexpected file: {}", path.display())))?;
            files.push(LogFile { first: Seq(first), path });
        }
        files.sort_by_key(|file| file.first);
        let mut inner =
            Inner { epoch: Epoch(0), nonce: 0, tail: Seq(0), files, writer: None, end: 0, broken: false };
        if let Some(first) = inner.files.first() {
            inner.tail = Seq(first.first.0 - 1);
        }
        // A killed owner may have left entries that only the page cache has. They are valid from now on, and the next
        // seal builds on them.
        if let Some(newest) = inner.files.last() {
            env.files.open(&newest.path, OpenMode::Existing, Caching::Buffered)?.sync_data()?;
        }
        for file in &inner.files {
            if file.first.0 > inner.tail.0 + 1 {
                let missing = inner.tail.0 + 1;
                return Err(LogError::Damaged(format!(
                    "entries {missing}..{} are missing before {}",
                    file.first,
                    file.path.display()
                )));
            }
            let scanned = scan(env, file, &mut |_, _| {})?;
            inner.epoch = inner.epoch.max(scanned.epoch);
            inner.tail = scanned.tail;
            inner.end = scanned.end;
        }
        Ok(Self {
            env: env.clone(),
            dir: dir.to_owned(),
            sizes: LogSizes::default(),
            inner: Mutex::new(inner),
            full: AtomicBool::new(false),
        })
    }

    /// Begins a log behind the entry `end`, in a directory that has none: it has no entries yet, and its next owner has an epoch above
    /// `epoch`. Durable when it returns.
    ///
    /// # Errors
    /// `Damaged` if there is a log already, `Io`.
    pub fn begin(env: &Env, dir: &Path, (epoch, end): (Epoch, Seq)) -> Result<(), LogError> {
        let log = Self::open(env, dir)?;
        if !log.inner().files.is_empty() {
            return Err(LogError::Damaged(format!("there is a log already: {}", dir.display())));
        }
        log.start_file(Seq(end.0 + 1), epoch)?;
        Ok(())
    }

    pub(super) fn with_sizes(self, sizes: LogSizes) -> Self {
        Self { sizes, ..self }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no holder of this lock panics")
    }

    /// The epoch, and the last entry.
    pub(super) fn end(&self) -> (Epoch, Seq) {
        let inner = self.inner();
        (inner.epoch, inner.tail)
    }

    /// Removes the files of a log that is no longer needed.
    pub(super) fn wipe(env: &Env, dir: &Path) -> Result<(), std::io::Error> {
        for path in env.files.list(dir)? {
            if path.extension().is_some_and(|extension| extension == "log") {
                env.files.remove_file(&path)?;
            }
        }
        env.files.sync_dir(dir)
    }

    /// Copies to `to` the bytes that `copied` does not list yet. Entries appended during the copy are left for the next
    /// call. The last call is made while nothing is appended.
    pub(super) fn copy_to(&self, to: &Path, copied: &mut Copied) -> Result<(), std::io::Error> {
        let (files, written) = {
            let inner = self.inner();
            (inner.files.clone(), inner.writer.as_ref().map(|writer| writer.at))
        };
        for (index, file) in files.iter().enumerate() {
            let source = self.env.files.open(&file.path, OpenMode::Existing, Caching::Buffered)?;
            let newest = index + 1 == files.len();
            let end = written.filter(|_| newest).map_or_else(|| source.len(), Ok)?;
            let name = file.path.file_name().expect("files of a log have names");
            let target = self.env.files.open(&to.join(name), OpenMode::Create, Caching::Buffered)?;
            let at = copied.entry(file.path.clone()).or_insert(0);
            while *at < end {
                let mut bytes = vec![0; (end - *at).min(COPY_BYTES) as usize];
                source.read_at(&mut bytes, *at)?;
                target.write_at(&bytes, *at)?;
                *at += bytes.len() as u64;
            }
            target.sync_data()?;
        }
        self.env.files.sync_dir(to)
    }

    /// Makes the log end like another copy of it: cuts off the entries above `common`, appends `entries`, which follow
    /// `common`, and seals with `epoch`.
    pub(super) fn follow(&self, common: Seq, entries: &[LogEntry], epoch: Epoch) -> Result<(), LogError> {
        let mut inner = self.inner();
        inner.tail = inner.tail.min(common);
        let mut bytes = Vec::new();
        let mut rest = entries;
        while let Some(begin) = rest.first() {
            let count = rest.iter().take_while(|entry| entry.epoch == begin.epoch).count();
            let (run, later) = rest.split_at(count);
            self.begin_file(&mut inner, begin.epoch)?;
            for entry in run {
                bytes.clear();
                let (epoch, seq) = (entry.epoch, entry.seq);
                Frame { kind: FrameKind::Entry, index: 0, epoch, seq, batch: &entry.batch }
                    .append_to(&mut bytes);
                let writer = inner.writer.as_mut().expect("a file was just begun");
                writer.reserve(bytes.len() as u64)?;
                writer.append(&bytes)?;
                inner.tail = entry.seq;
            }
            inner.epoch = begin.epoch;
            rest = later;
        }
        self.begin_file(&mut inner, epoch)?;
        inner.epoch = epoch;
        inner.stop_writing();
        Ok(())
    }

    /// Begins a new file for the entries after the last one.
    fn begin_file(&self, inner: &mut Inner, epoch: Epoch) -> Result<(), std::io::Error> {
        let first = Seq(inner.tail.0 + 1);
        let writer = self.start_file(first, epoch)?;
        inner.stop_writing();
        if let Some(before) = inner.files.last().filter(|file| file.first < first) {
            // If this fails it costs only space: the bytes there were never acknowledged, or are zeros.
            let file = self.env.files.open(&before.path, OpenMode::Existing, Caching::Buffered);
            let _ =
                file.and_then(|file| if file.len()? > inner.end { file.set_len(inner.end) } else { Ok(()) });
        }
        // A file without an entry has the same name; it held at most an older seal. A file that begins later holds
        // entries that were cut off.
        let cut: Vec<LogFile> = inner.files.extract_if(.., |file| file.first >= first).collect();
        for file in cut.iter().filter(|file| file.first > first) {
            self.env.files.remove_file(&file.path)?;
        }
        inner.files.push(LogFile { first, path: self.path_of(first) });
        self.set_full(writer.zeroed < writer.at + self.sizes.reserve_bytes);
        inner.writer = Some(writer);
        Ok(())
    }

    pub(super) fn seal_now(&self, epoch: Epoch, nonce: u64) -> Result<Tail, LogError> {
        let mut inner = self.inner();
        if epoch <= inner.epoch {
            return Err(LogError::Fenced(inner.epoch));
        }
        // Until this has succeeded no append is allowed: it may already have replaced the file of the old owner.
        inner.broken = true;
        inner.stop_writing();
        self.begin_file(&mut inner, epoch)?;
        (inner.epoch, inner.nonce) = (epoch, nonce);
        inner.broken = false;
        Ok(Tail { seq: inner.tail })
    }

    fn path_of(&self, first: Seq) -> PathBuf {
        self.dir.join(format!("{:016x}.log", first.0))
    }

    /// Creates the file that begins with `first`, with the seal of `epoch` as its first frame, in one atomic step.
    fn start_file(&self, first: Seq, epoch: Epoch) -> Result<Writer, std::io::Error> {
        let staged = self.dir.join(STAGED);
        // A file left by an earlier attempt may have failed to sync: syncing it again would prove nothing.
        if self.env.files.exists(&staged) {
            self.env.files.remove_file(&staged)?;
        }
        let file = self.env.files.open(&staged, OpenMode::CreateNew, Caching::Buffered)?;
        let mut writer = Writer { file, at: 0, zeroed: 0, sizes: self.sizes };
        let mut bytes = Vec::new();
        Frame { kind: FrameKind::Seal, index: 0, epoch, seq: Seq(first.0 - 1), batch: &[] }
            .append_to(&mut bytes);
        writer.reserve(bytes.len() as u64)?;
        writer.append(&bytes)?;
        self.env.files.rename(&staged, &self.path_of(first))?;
        self.env.files.sync_dir(&self.dir)?;
        Ok(writer)
    }

    fn append_now(&self, epoch: Epoch, first: Seq, batches: &[Vec<u8>]) -> Result<(), AppendError> {
        let bytes = frames(epoch, first, batches)?;
        self.prepare(epoch, first, bytes.len() as u64)?;
        self.write(first, batches.len() as u64, &bytes)
    }

    /// Checks that frames of this length may be appended next and makes room for them. Appends nothing yet.
    pub(super) fn prepare(&self, epoch: Epoch, first: Seq, len_bytes: u64) -> Result<(), AppendError> {
        let mut inner = self.inner();
        if epoch != inner.epoch || first.0 != inner.tail.0 + 1 {
            return Err(AppendError::Fenced(inner.epoch));
        }
        if inner.broken {
            return Err(AppendError::Unknown(std::io::Error::other("an earlier write failed")));
        }
        if inner.writer.as_ref().is_none_or(|writer| writer.at >= self.sizes.file_bytes)
            && let Err(error) = self.begin_file(&mut inner, epoch)
        {
            // A file may exceed its size limit, so that the log need not refuse requests that free space.
            let fits = inner.writer.as_ref().is_some_and(|writer| writer.at + len_bytes <= writer.zeroed);
            if error.kind() != std::io::ErrorKind::StorageFull || !fits {
                return Err(failed(&mut inner, error));
            }
            self.set_full(true);
        }
        let full = self.full.load(Ordering::Relaxed);
        let writer = inner.writer.as_mut().expect("a writer was just made sure of");
        // While the disk is full, `refill` retries from time to time; not every append does.
        if full && writer.at + len_bytes <= writer.zeroed {
            return Ok(());
        }
        match writer.reserve(len_bytes) {
            Ok(room) => {
                self.set_full(room == Room::Reserve);
                Ok(())
            }
            Err(error) => Err(failed(&mut inner, error)),
        }
    }

    /// Writes the prepared frames and syncs them.
    pub(super) fn write(&self, first: Seq, count: u64, bytes: &[u8]) -> Result<(), AppendError> {
        let mut inner = self.inner();
        let writer = inner.writer.as_mut().expect("prepared");
        if let Err(error) = writer.append(bytes) {
            // The next process to open the file must not take bytes for durable that only the page cache may have.
            let cut = writer.file.set_len(writer.at);
            inner.broken = true;
            return Err(AppendError::Unknown(cut.err().unwrap_or(error)));
        }
        inner.tail = Seq(first.0 + count - 1);
        Ok(())
    }

    fn set_full(&self, full: bool) {
        self.full.store(full, Ordering::Relaxed);
    }

    pub(super) fn room_now(&self) -> Room {
        if self.full.load(Ordering::Relaxed) { Room::Reserve } else { Room::Enough }
    }

    pub(super) fn refill_now(&self) {
        let mut inner = self.inner();
        if self.room_now() == Room::Reserve
            && !inner.broken
            && let Some(writer) = inner.writer.as_mut()
        {
            // A failure that matters recurs in the next append.
            self.set_full(!matches!(writer.reserve(0), Ok(Room::Enough)));
        }
    }

    pub(super) fn read_now(&self, from: Seq, limit_bytes: usize) -> Result<Vec<LogEntry>, LogError> {
        let (files, tail) = {
            let inner = self.inner();
            (inner.files.clone(), inner.tail)
        };
        if files.first().is_some_and(|file| from < file.first) && from.0 > 0 {
            return Err(LogError::Damaged(format!("entries up to {from} are trimmed")));
        }
        let mut entries = Vec::new();
        let mut taken = 0;
        for (index, file) in files.iter().enumerate() {
            let next_first = files.get(index + 1).map_or(Seq(tail.0 + 1), |next| next.first);
            if next_first <= from {
                continue;
            }
            scan(&self.env, file, &mut |frame, _| {
                let wanted = frame.kind == FrameKind::Entry && frame.seq >= from && frame.seq < next_first;
                if wanted && (taken == 0 || taken < limit_bytes) {
                    taken += frame.batch.len().max(1);
                    let entry = LogEntry { seq: frame.seq, epoch: frame.epoch, batch: frame.batch.to_vec() };
                    entries.push(entry);
                }
            })?;
            if taken >= limit_bytes {
                break;
            }
        }
        Ok(entries)
    }

    pub(super) fn trim_now(&self, up_to: Seq) -> Result<(), LogError> {
        let mut inner = self.inner();
        // The newest file stays: it holds the epoch and the tail.
        while inner.files.len() > 1 && inner.files[1].first.0 <= up_to.0 + 1 {
            let oldest = inner.files.remove(0);
            self.env.files.remove_file(&oldest.path)?;
        }
        Ok(())
    }
}

impl Inner {
    fn stop_writing(&mut self) {
        if let Some(writer) = self.writer.take() {
            self.end = writer.at;
        }
    }
}

/// Encodes the frames of one append.
pub(super) fn frames(epoch: Epoch, first: Seq, batches: &[Vec<u8>]) -> Result<Vec<u8>, AppendError> {
    if batches.len() > BATCHES_MAX || batches.iter().any(|batch| batch.len() > ENTRY_BYTES_MAX) {
        return Err(AppendError::TooLarge);
    }
    let mut bytes = Vec::with_capacity(batches.iter().map(|batch| HEADER_BYTES + batch.len()).sum());
    for (index, batch) in (0u16..).zip(batches) {
        let seq = Seq(first.0 + u64::from(index));
        Frame { kind: FrameKind::Entry, index, epoch, seq, batch }.append_to(&mut bytes);
    }
    Ok(bytes)
}

/// The error of an append that failed before any of its frames was written.
fn failed(inner: &mut Inner, error: std::io::Error) -> AppendError {
    if error.kind() == std::io::ErrorKind::StorageFull {
        return AppendError::Full(error);
    }
    inner.broken = true;
    AppendError::Unknown(error)
}

impl Writer {
    /// Ensures room for `len_bytes` more and tries to keep the reserve behind it. A failure leaves only zeros behind.
    fn reserve(&mut self, len_bytes: u64) -> Result<Room, std::io::Error> {
        let end = self.at + len_bytes;
        if end + self.sizes.reserve_bytes <= self.zeroed {
            return Ok(Room::Enough);
        }
        let zeros =
            vec![0u8; (end + self.sizes.reserve_bytes + self.sizes.zero_ahead_bytes - self.zeroed) as usize];
        match self.file.write_at(&zeros, self.zeroed) {
            Ok(()) => {
                self.zeroed += zeros.len() as u64;
                Ok(Room::Enough)
            }
            Err(error) if error.kind() == std::io::ErrorKind::StorageFull => self.make_do(end, error),
            Err(error) => Err(error),
        }
    }

    /// On a full disk, zeroes only the bytes that this append needs.
    fn make_do(&mut self, end: u64, error: std::io::Error) -> Result<Room, std::io::Error> {
        if end > self.zeroed {
            let zeros = vec![0u8; (end - self.zeroed) as usize];
            self.file.write_at(&zeros, self.zeroed).map_err(|_| error)?;
            self.zeroed = end;
        }
        Ok(Room::Reserve)
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), std::io::Error> {
        self.file.write_at(bytes, self.at)?;
        self.file.sync_data()?;
        self.at += bytes.len() as u64;
        Ok(())
    }
}

/// Visits the valid frames of a file in order, with their offsets, and checks that they are consecutive.
fn scan(env: &Env, file: &LogFile, visit: &mut dyn FnMut(Frame<'_>, usize)) -> Result<Scanned, LogError> {
    let bytes = env.files.read(&file.path)?;
    let mut scanned = Scanned { epoch: Epoch(0), tail: Seq(file.first.0 - 1), end: 0 };
    let mut at = 0;
    loop {
        let frame = match Frame::parse(&bytes[at..]) {
            Ok(frame) => frame,
            Err(BadFrame::NewerFormat(format)) => {
                return Err(LogError::NewerFormat(format!("file={} format={format}", file.path.display())));
            }
            Err(BadFrame::Invalid) => break,
        };
        let follows = match frame.kind {
            FrameKind::Seal => frame.seq == scanned.tail,
            FrameKind::Entry => frame.seq.0 == scanned.tail.0 + 1,
        };
        if !follows || frame.epoch < scanned.epoch {
            break;
        }
        scanned.epoch = frame.epoch;
        scanned.tail = frame.seq;
        visit(frame, at);
        at += frame.len_bytes();
    }
    scanned.end = at as u64;
    refuse_later_frames(file, &bytes[at..], scanned.tail)?;
    Ok(scanned)
}

/// A torn frame is followed only by frames of the same append. A valid entry of a later append means that the bad frame
/// was once acknowledged and is damaged now.
fn refuse_later_frames(file: &LogFile, bytes: &[u8], tail: Seq) -> Result<(), LogError> {
    let magic = *b"FBLG";
    let mut at = 1;
    while at + HEADER_BYTES <= bytes.len() {
        let Some(found) = find(&bytes[at..], &magic) else { return Ok(()) };
        at += found;
        if let Ok(frame) = Frame::parse(&bytes[at..])
            && frame.seq.0.saturating_sub(u64::from(frame.index)) > tail.0 + 1
        {
            let path = file.path.display();
            return Err(LogError::Damaged(format!(
                "entry {} of {path} is unreadable but {} is there",
                tail.0 + 1,
                frame.seq
            )));
        }
        at += 1;
    }
    Ok(())
}

fn find(haystack: &[u8], needle: &[u8; 4]) -> Option<usize> {
    let mut at = 0;
    while let Some(found) = haystack[at..].iter().position(|byte| *byte == needle[0]) {
        at += found;
        if haystack[at..].starts_with(needle) {
            return Some(at);
        }
        at += 1;
    }
    None
}

impl LedgerLog for FileLog {
    fn seal(&self, epoch: Epoch, nonce: u64) -> BoxFuture<'_, Result<Tail, LogError>> {
        Box::pin(async move { self.seal_now(epoch, nonce) })
    }

    fn fence(&self) -> BoxFuture<'_, Result<Fence, LogError>> {
        Box::pin(async move {
            let inner = self.inner();
            let fence = Fence { epoch: inner.epoch, nonce: inner.nonce, tail: inner.tail, alive: 0 };
            if inner.broken { Err(LogError::broken()) } else { Ok(fence) }
        })
    }

    fn append(
        &self,
        epoch: Epoch,
        first: Seq,
        batches: Vec<Vec<u8>>,
    ) -> BoxFuture<'_, Result<(), AppendError>> {
        Box::pin(async move { self.append_now(epoch, first, &batches) })
    }

    fn read(&self, from: Seq, limit_bytes: usize) -> BoxFuture<'_, Result<Vec<LogEntry>, LogError>> {
        Box::pin(async move { self.read_now(from, limit_bytes) })
    }

    fn trim(&self, up_to: Seq) -> BoxFuture<'_, Result<(), LogError>> {
        Box::pin(async move { self.trim_now(up_to) })
    }

    fn caps(&self) -> LogCaps {
        LogCaps { entry_bytes_max: ENTRY_BYTES_MAX, batches_per_append: BATCHES_MAX, lease: None }
    }

    fn first(&self) -> Seq {
        self.inner().files.first().map_or(Seq(1), |file| file.first)
    }

    fn room(&self) -> Room {
        self.room_now()
    }

    fn refill(&self) {
        self.refill_now();
    }
}
