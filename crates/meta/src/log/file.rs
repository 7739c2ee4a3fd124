//! The log of one machine: append-only files in a directory, one fdatasync per group commit.
//!
//! Files are named by the first entry they may hold. A file is written by one owner only: sealing starts a
//! new one, so nothing is ever appended after a torn frame. A file ends at its first invalid frame, or where the
//! next one begins: what it holds from there on was never acknowledged. If it ends before that, acknowledged
//! entries are missing and the log refuses to open.
//! Space is zeroed ahead of the append point, because an fdatasync that must also grow the file costs twice.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use base::env::{Caching, Env, File, OpenMode};
use base::units::MIB;
use base::{Epoch, Seq};
use wire::BoxFuture;

use super::frame::{BATCH_BYTES_MAX, BadFrame, Frame, FrameKind, HEADER_BYTES};
use super::{AppendError, LedgerLog, LogCaps, LogEntry, LogError, Tail};

const SIZES: Sizes = Sizes { file_bytes: 256 * MIB, zero_ahead_bytes: 8 * MIB };

const BATCHES_MAX: usize = 64;

/// Sizes that tests make small.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    /// A file that has grown to this is not appended to any more.
    pub(super) file_bytes: u64,
    /// Zeroed at a time.
    pub(super) zero_ahead_bytes: u64,
}

/// A log in a directory of its own.
pub struct FileLog {
    env: Env,
    dir: PathBuf,
    sizes: Sizes,
    inner: Mutex<Inner>,
}

struct Inner {
    epoch: Epoch,
    tail: Seq,
    /// Oldest first. Entries of a file are below the first entry of the next.
    files: Vec<LogFile>,
    writer: Option<Writer>,
    /// After a failed write nothing is known about the file, so nothing is appended any more.
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
    zero_ahead_bytes: u64,
}

/// What a scan of one file found.
struct Scanned {
    epoch: Epoch,
    tail: Seq,
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
        let mut inner = Inner { epoch: Epoch(0), tail: Seq(0), files, writer: None, broken: false };
        if let Some(first) = inner.files.first() {
            inner.tail = Seq(first.first.0 - 1);
        }
        // An owner that was killed may have left entries that are in the page cache only. They count from now on,
        // and the next seal builds on them.
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
        }
        Ok(Self { env: env.clone(), dir: dir.to_owned(), sizes: SIZES, inner: Mutex::new(inner) })
    }

    #[cfg(test)]
    pub(super) fn with_sizes(self, sizes: Sizes) -> Self {
        Self { sizes, ..self }
    }

    fn seal_now(&self, epoch: Epoch) -> Result<Tail, LogError> {
        let mut inner = self.inner.lock().expect("no holder of this lock panics");
        if epoch <= inner.epoch {
            return Err(LogError::Fenced(inner.epoch));
        }
        let first = Seq(inner.tail.0 + 1);
        // Until this has succeeded nobody may append: it may already have replaced the file of the old owner.
        inner.broken = true;
        inner.writer = None;
        let writer = self.start_file(first, epoch)?;
        // A file that never got an entry has the same name; it held at most an older seal.
        inner.files.retain(|file| file.first != first);
        inner.files.push(LogFile { first, path: self.path_of(first) });
        inner.writer = Some(writer);
        inner.epoch = epoch;
        inner.broken = false;
        Ok(Tail { seq: inner.tail })
    }

    fn path_of(&self, first: Seq) -> PathBuf {
        self.dir.join(format!("{:016x}.log", first.0))
    }

    /// Creates the file that begins with `first`, with the seal of `epoch` as its first frame, in one step.
    fn start_file(&self, first: Seq, epoch: Epoch) -> Result<Writer, std::io::Error> {
        let staged = self.dir.join("next.tmp");
        // What an earlier attempt left may have failed to sync: syncing that file again would prove nothing.
        if self.env.files.exists(&staged) {
            self.env.files.remove_file(&staged)?;
        }
        let file = self.env.files.open(&staged, OpenMode::CreateNew, Caching::Buffered)?;
        let mut writer = Writer { file, at: 0, zeroed: 0, zero_ahead_bytes: self.sizes.zero_ahead_bytes };
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
        let mut inner = self.inner.lock().expect("no holder of this lock panics");
        if epoch != inner.epoch || first.0 != inner.tail.0 + 1 {
            return Err(AppendError::Fenced(inner.epoch));
        }
        if inner.broken {
            return Err(AppendError::Unknown(std::io::Error::other("an earlier write failed")));
        }
        if batches.len() > BATCHES_MAX || batches.iter().any(|batch| batch.len() > BATCH_BYTES_MAX) {
            return Err(AppendError::TooLarge);
        }
        if inner.writer.as_ref().is_none_or(|writer| writer.at >= self.sizes.file_bytes) {
            let writer = self.start_file(first, epoch).map_err(|error| failed(&mut inner, error))?;
            inner.files.retain(|file| file.first != first);
            inner.files.push(LogFile { first, path: self.path_of(first) });
            inner.writer = Some(writer);
        }
        let mut bytes = Vec::with_capacity(batches.iter().map(|batch| HEADER_BYTES + batch.len()).sum());
        for (index, batch) in (0u16..).zip(batches) {
            let seq = Seq(first.0 + u64::from(index));
            Frame { kind: FrameKind::Entry, index, epoch, seq, batch }.append_to(&mut bytes);
        }
        let writer = inner.writer.as_mut().expect("a writer was just made sure of");
        if let Err(error) = writer.reserve(bytes.len() as u64) {
            return Err(failed(&mut inner, error));
        }
        if let Err(error) = writer.append(&bytes) {
            // Whoever opens the file next must not take for durable what may be in the page cache only.
            let cut = writer.file.set_len(writer.at);
            inner.broken = true;
            return Err(AppendError::Unknown(cut.err().unwrap_or(error)));
        }
        inner.tail = Seq(first.0 + batches.len() as u64 - 1);
        Ok(())
    }

    fn read_now(&self, from: Seq, limit_bytes: usize) -> Result<Vec<LogEntry>, LogError> {
        let (files, tail) = {
            let inner = self.inner.lock().expect("no holder of this lock panics");
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

    fn trim_now(&self, up_to: Seq) -> Result<(), LogError> {
        let mut inner = self.inner.lock().expect("no holder of this lock panics");
        // The newest file stays: it carries the epoch and the tail.
        while inner.files.len() > 1 && inner.files[1].first.0 <= up_to.0 + 1 {
            let oldest = inner.files.remove(0);
            self.env.files.remove_file(&oldest.path)?;
        }
        Ok(())
    }
}

/// What became of an append that failed before any of its frames was written.
fn failed(inner: &mut Inner, error: std::io::Error) -> AppendError {
    if error.kind() == std::io::ErrorKind::StorageFull {
        return AppendError::Full(error);
    }
    inner.broken = true;
    AppendError::Unknown(error)
}

impl Writer {
    /// Makes sure of room for `len_bytes` more. Failing leaves nothing behind but zeros.
    fn reserve(&mut self, len_bytes: u64) -> Result<(), std::io::Error> {
        let end = self.at + len_bytes;
        if end > self.zeroed {
            let zeros = vec![0u8; (end + self.zero_ahead_bytes - self.zeroed) as usize];
            self.file.write_at(&zeros, self.zeroed)?;
            self.zeroed += zeros.len() as u64;
        }
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), std::io::Error> {
        self.file.write_at(bytes, self.at)?;
        self.file.sync_data()?;
        self.at += bytes.len() as u64;
        Ok(())
    }
}

/// Visits the valid frames of a file in order, with their offsets, and checks that they follow each other.
fn scan(env: &Env, file: &LogFile, visit: &mut dyn FnMut(Frame<'_>, usize)) -> Result<Scanned, LogError> {
    let bytes = env.files.read(&file.path)?;
    let mut scanned = Scanned { epoch: Epoch(0), tail: Seq(file.first.0 - 1) };
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
    refuse_later_frames(file, &bytes[at..], scanned.tail)?;
    Ok(scanned)
}

/// A torn frame is followed by nothing but frames of the same append. A valid entry of a later append means that
/// the bad frame was acknowledged once and is damaged now.
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
    fn seal(&self, epoch: Epoch) -> BoxFuture<'_, Result<Tail, LogError>> {
        Box::pin(async move { self.seal_now(epoch) })
    }

    fn epoch(&self) -> BoxFuture<'_, Result<Epoch, LogError>> {
        Box::pin(async move { Ok(self.inner.lock().expect("no holder of this lock panics").epoch) })
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
        LogCaps { batch_bytes_max: BATCH_BYTES_MAX, batches_per_append: BATCHES_MAX }
    }
}
