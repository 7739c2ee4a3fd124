//! The file of a backup: drawn in `docs/formats/backup.md`. Each section has its number and a checksum, and the end says how much there
//! was, so that a file that was cut, changed or put together is noticed.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use base::checksum::crc32c;
use base::codec::{DecodeError, Reader, Writer};
use base::env::{Caching, Env, File, OpenMode};
use base::{ClusterId, Epoch, LedgerId, Seq};
use bytes::Bytes;
use meta::state::Applied;

const MAGIC: &[u8; 8] = b"FBBACKUP";
const VERSION: u32 = 1;
/// Magic, version, cluster, time, checksum.
const HEADING_BYTES: usize = 8 + 4 + 16 + 8 + 4;
/// Kind, number, length.
const HEAD_BYTES: usize = 1 + 4 + 4;
/// Largest body of a section. Writers make them of about a MiB.
const BODY_BYTES_MAX: u32 = 256 << 20;

const LEDGER: u8 = 1;
const ROWS: u8 = 2;
const LEDGER_END: u8 = 3;
const END: u8 = 4;

/// Keys with their values, in the order of the keys.
pub(crate) type Rows = Vec<(Bytes, Bytes)>;

/// Why a file is no backup that can be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum BackupError {
    /// It is something else.
    #[error("it is no backup of metadata")]
    Other,
    /// Only a newer version understands it.
    #[error("it was written by a newer version of Forebay: format={0}")]
    Newer(u32),
    /// Its end is missing.
    #[error("it is not complete: it ends at byte {0}")]
    Cut(u64),
    /// Its content is not what was written.
    #[error("it is damaged at byte {at}: {what}")]
    Damaged {
        /// Where the section begins.
        at: u64,
        /// What is wrong.
        what: &'static str,
    },
    /// It cannot be read.
    #[error("it cannot be read")]
    Io(#[from] std::io::Error),
}

/// What a backup begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Heading {
    /// The cluster.
    pub(crate) cluster: ClusterId,
    /// When it was begun, in seconds of Unix time.
    pub(crate) made_s: i64,
}

/// The content of a ledger, or of all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Totals {
    /// Ledgers.
    pub(crate) ledgers: u32,
    /// Keys.
    pub(crate) rows: u64,
    /// Bytes of keys and values.
    pub(crate) bytes: u64,
}

impl Totals {
    fn add(&mut self, rows: &Rows) {
        self.rows += rows.len() as u64;
        self.bytes += rows.iter().map(|(key, value)| (key.len() + value.len()) as u64).sum::<u64>();
    }
}

/// A section of a backup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Section {
    /// A ledger begins, as it was at this entry.
    Ledger(LedgerId, Applied),
    /// A part of its store, behind the one before.
    Rows(Rows),
    /// The ledger ends. It had so much.
    LedgerEnd(Totals),
    /// The backup ends. It had so much.
    End(Totals),
}

impl Section {
    fn kind(&self) -> u8 {
        match self {
            Self::Ledger(..) => LEDGER,
            Self::Rows(_) => ROWS,
            Self::LedgerEnd(_) => LEDGER_END,
            Self::End(_) => END,
        }
    }

    fn encode(&self, number: u32) -> Vec<u8> {
        let mut body = Writer::new();
        match self {
            Self::Ledger(ledger, at) => {
                body.u32(ledger.0).u64(at.epoch.0).u64(at.seq.0);
            }
            Self::Rows(rows) => {
                for (key, value) in rows {
                    body.blob(key).blob(value);
                }
            }
            Self::LedgerEnd(totals) | Self::End(totals) => {
                body.u32(totals.ledgers).u64(totals.rows).u64(totals.bytes);
            }
        }
        let body = body.finish();
        let mut section = Writer::new();
        section.u8(self.kind()).u32(number).blob(&body);
        with_sum(section.finish())
    }

    fn decode(kind: u8, body: &[u8]) -> Result<Self, DecodeError> {
        let mut r = Reader::new(body);
        let section = match kind {
            LEDGER => {
                let (ledger, epoch) = (LedgerId(r.u32("ledger")?), Epoch(r.u64("epoch")?));
                Self::Ledger(ledger, Applied { seq: Seq(r.u64("seq")?), epoch })
            }
            ROWS => {
                let mut rows = Rows::new();
                while !r.rest().is_empty() {
                    let (key, value) = (r.blob("key")?, r.blob("value")?);
                    rows.push((Bytes::copy_from_slice(key), Bytes::copy_from_slice(value)));
                }
                Self::Rows(rows)
            }
            LEDGER_END | END => {
                let (ledgers, rows, bytes) = (r.u32("ledgers")?, r.u64("rows")?, r.u64("bytes")?);
                let totals = Totals { ledgers, rows, bytes };
                if kind == END { Self::End(totals) } else { Self::LedgerEnd(totals) }
            }
            _ => return Err(DecodeError { field: "kind" }),
        };
        r.finish("length")?;
        Ok(section)
    }
}

impl Heading {
    fn encode(self) -> Vec<u8> {
        let mut w = Writer::new();
        w.bytes(MAGIC).u32(VERSION).bytes(&self.cluster.0).i64(self.made_s);
        with_sum(w.finish())
    }

    fn decode(bytes: &[u8; HEADING_BYTES]) -> Result<Self, BackupError> {
        let damaged = |_| BackupError::Damaged { at: 0, what: "its beginning" };
        let mut r = Reader::new(bytes);
        if r.bytes(MAGIC.len(), "magic").map_err(damaged)? != MAGIC {
            return Err(BackupError::Other);
        }
        match r.u32("version").map_err(damaged)? {
            VERSION => {}
            // The bytes after it may be others.
            version if version > VERSION => return Err(BackupError::Newer(version)),
            _ => return Err(damaged(DecodeError { field: "version" })),
        }
        let cluster = r.bytes(16, "cluster").map_err(damaged)?;
        let cluster = ClusterId(cluster.try_into().expect("length was just checked"));
        let made_s = r.i64("time").map_err(damaged)?;
        if crc32c(&bytes[..HEADING_BYTES - 4]) != r.u32("checksum").map_err(damaged)? {
            return Err(damaged(DecodeError { field: "checksum" }));
        }
        Ok(Self { cluster, made_s })
    }
}

fn with_sum(mut bytes: Vec<u8>) -> Vec<u8> {
    let sum = crc32c(&bytes);
    bytes.extend_from_slice(&sum.to_le_bytes());
    bytes
}

/// Reads a backup from its beginning, and checks everything on the way.
pub(crate) struct BackupReader<R> {
    source: R,
    heading: Heading,
    at: u64,
    number: u32,
    seen: BTreeSet<LedgerId>,
    total: Totals,
    /// The ledger that was begun, and its last key.
    open: Option<(Totals, Bytes)>,
    is_ended: bool,
}

impl<R: Read> BackupReader<R> {
    pub(crate) fn new(mut source: R) -> Result<Self, BackupError> {
        let mut bytes = [0; HEADING_BYTES];
        let read = read_up_to(&mut source, &mut bytes)?;
        if read < HEADING_BYTES {
            let is_begun = read > 0 && bytes[..read.min(MAGIC.len())] == MAGIC[..read.min(MAGIC.len())];
            return Err(if is_begun { BackupError::Cut(read as u64) } else { BackupError::Other });
        }
        Ok(Self {
            source,
            heading: Heading::decode(&bytes)?,
            at: HEADING_BYTES as u64,
            number: 0,
            seen: BTreeSet::new(),
            total: Totals::default(),
            open: None,
            is_ended: false,
        })
    }

    pub(crate) fn heading(&self) -> Heading {
        self.heading
    }

    /// Bytes that were read.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    /// The next section; `None` behind the end.
    pub(crate) fn next(&mut self) -> Result<Option<Section>, BackupError> {
        if self.is_ended {
            return Ok(None);
        }
        let at = self.at;
        let section = self.read_section()?;
        let is_right = self.follow(&section);
        if !is_right {
            return Err(BackupError::Damaged { at, what: "a section is missing, or is in a wrong place" });
        }
        if self.is_ended && read_up_to(&mut self.source, &mut [0])? != 0 {
            return Err(BackupError::Damaged { at: self.at, what: "something follows its end" });
        }
        Ok(Some(section))
    }

    fn read_section(&mut self) -> Result<Section, BackupError> {
        let at = self.at;
        let damaged = |what| BackupError::Damaged { at, what };
        let mut head = [0; HEAD_BYTES];
        self.fill(&mut head)?;
        let mut r = Reader::new(&head);
        let malformed = |_| damaged("a section is malformed");
        let (kind, number) = (r.u8("kind").map_err(malformed)?, r.u32("number").map_err(malformed)?);
        let len = r.u32("length").map_err(malformed)?;
        if len > BODY_BYTES_MAX {
            return Err(damaged("a section is too long"));
        }
        let mut bytes = head.to_vec();
        // No more memory than the file has bytes.
        let read = self.source.by_ref().take(u64::from(len) + 4).read_to_end(&mut bytes)?;
        self.at += read as u64;
        if read < len as usize + 4 {
            return Err(BackupError::Cut(self.at));
        }
        let (checked, sum) = bytes.split_at(bytes.len() - 4);
        if crc32c(checked).to_le_bytes() != sum {
            return Err(damaged("a checksum does not match"));
        }
        if number != self.number {
            return Err(damaged("a section is missing, or is in a wrong place"));
        }
        self.number += 1;
        Section::decode(kind, &checked[HEAD_BYTES..]).map_err(malformed)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), BackupError> {
        let read = read_up_to(&mut self.source, bytes)?;
        self.at += read as u64;
        if read < bytes.len() { Err(BackupError::Cut(self.at)) } else { Ok(()) }
    }

    /// Whether a section may come next, and agrees with those before.
    fn follow(&mut self, section: &Section) -> bool {
        match section {
            Section::Ledger(ledger, _) if self.open.is_none() => {
                self.open = Some((Totals { ledgers: 1, ..Totals::default() }, Bytes::new()));
                self.total.ledgers += 1;
                self.seen.insert(*ledger)
            }
            Section::Rows(rows) => {
                let Some((totals, last)) = &mut self.open else { return false };
                let is_behind = rows.first().is_some_and(|(first, _)| first > last);
                let is_sorted = rows.is_sorted_by(|(one, _), (next, _)| one < next);
                totals.add(rows);
                self.total.add(rows);
                if let Some((key, _)) = rows.last() {
                    *last = key.clone();
                }
                is_behind && is_sorted
            }
            Section::LedgerEnd(told) => self.open.take().is_some_and(|(totals, _)| totals == *told),
            Section::End(told) if self.open.is_none() => {
                self.is_ended = true;
                *told == self.total
            }
            Section::Ledger(..) | Section::End(_) => false,
        }
    }
}

/// Reads until the buffer is full or the source ends.
fn read_up_to(source: &mut impl Read, buffer: &mut [u8]) -> Result<usize, std::io::Error> {
    let mut read = 0;
    while read < buffer.len() {
        match source.read(&mut buffer[read..]) {
            Ok(0) => break,
            Ok(more) => read += more,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(read)
}

/// A file from its beginning.
pub(crate) struct FromFile {
    file: Arc<dyn File>,
    at: u64,
    len: u64,
}

impl FromFile {
    /// Opens a backup.
    pub(crate) fn open(env: &Env, path: &Path) -> Result<Self> {
        let file = env.files.open(path, OpenMode::Existing, Caching::Buffered);
        let file = file.with_context(|| format!("cannot read {}", path.display()))?;
        let len = file.len().with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Self { file, at: 0, len })
    }

    /// Its bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }
}

impl Read for FromFile {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = (self.len - self.at).min(buffer.len() as u64) as usize;
        self.file.read_at(&mut buffer[..count], self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}

/// Where a writer has come to.
#[derive(Clone, Copy)]
pub(crate) struct Mark {
    at: u64,
    number: u32,
    total: Totals,
}

impl Mark {
    /// Bytes of the file so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.at
    }
}

/// Writes a backup beside its place, and puts it there at its end. Dropped before, it leaves nothing.
pub(crate) struct BackupWriter {
    env: Env,
    path: PathBuf,
    staged: PathBuf,
    file: Arc<dyn File>,
    mark: Mark,
    ledger: Totals,
    is_finished: bool,
}

impl BackupWriter {
    /// Begins a backup, which only its owner may read.
    pub(crate) fn begin(env: &Env, path: &Path, heading: Heading) -> Result<Self> {
        let mut staged = path.as_os_str().to_owned();
        staged.push(".new");
        let staged = PathBuf::from(staged);
        let shown = || format!("cannot write {}", staged.display());
        let file = env.files.open(&staged, OpenMode::Create, Caching::Buffered).with_context(shown)?;
        if file.try_lock().is_err() {
            bail!("another export writes {}", staged.display());
        }
        rustix::fs::chmod(&staged, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).with_context(shown)?;
        let bytes = heading.encode();
        file.set_len(0).and_then(|()| file.write_at(&bytes, 0)).with_context(shown)?;
        Ok(Self {
            env: env.clone(),
            path: path.to_owned(),
            file,
            mark: Mark { at: bytes.len() as u64, number: 0, total: Totals::default() },
            ledger: Totals::default(),
            is_finished: false,
            staged,
        })
    }

    /// Where it has come to, between two ledgers.
    pub(crate) fn mark(&self) -> Mark {
        self.mark
    }

    /// Takes back what was written behind a mark.
    pub(crate) fn rewind(&mut self, mark: Mark) {
        self.mark = mark;
    }

    pub(crate) fn begin_ledger(&mut self, ledger: LedgerId, at: Applied) -> Result<()> {
        self.ledger = Totals { ledgers: 1, ..Totals::default() };
        self.mark.total.ledgers += 1;
        self.put(&Section::Ledger(ledger, at))
    }

    /// Writes rows, if there are any.
    pub(crate) fn rows(&mut self, rows: Rows) -> Result<()> {
        if rows.is_empty() {
            return Ok(());
        }
        self.ledger.add(&rows);
        self.mark.total.add(&rows);
        self.put(&Section::Rows(rows))
    }

    /// Ends a ledger. Returns what it has.
    pub(crate) fn end_ledger(&mut self) -> Result<Totals> {
        self.put(&Section::LedgerEnd(self.ledger))?;
        Ok(self.ledger)
    }

    /// Ends the backup: it is in its place, durably. Returns what it has, and the bytes of the file.
    pub(crate) fn finish(mut self) -> Result<(Totals, u64)> {
        let total = self.mark.total;
        self.put(&Section::End(total))?;
        let shown = || format!("cannot write {}", self.path.display());
        // Something may be left behind the last mark.
        self.file.set_len(self.mark.at).and_then(|()| self.file.sync_data()).with_context(shown)?;
        let files = &self.env.files;
        files.rename(&self.staged, &self.path).with_context(shown)?;
        self.is_finished = true;
        let parent = self.path.parent().context("a file has a directory")?;
        files.sync_dir(parent).with_context(shown)?;
        Ok((total, self.mark.at))
    }

    fn put(&mut self, section: &Section) -> Result<()> {
        let bytes = section.encode(self.mark.number);
        if bytes.len() > BODY_BYTES_MAX as usize {
            bail!("a part of a store is too large for a backup: bytes={}", bytes.len());
        }
        let written = self.file.write_at(&bytes, self.mark.at);
        written.with_context(|| format!("cannot write {}", self.staged.display()))?;
        self.mark.number += 1;
        self.mark.at += bytes.len() as u64;
        Ok(())
    }
}

impl Drop for BackupWriter {
    fn drop(&mut self) {
        if !self.is_finished {
            // What stays is replaced by the next export.
            let _ = self.env.files.remove_file(&self.staged);
        }
    }
}

#[cfg(test)]
mod tests;
