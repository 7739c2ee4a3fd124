//! A log on several disks: copies of a [`FileLog`], each in a directory of its own.
//!
//! An append is acknowledged when every complete copy has synced it. A copy that fails is left out for good: all other
//! copies first record that, then acknowledge without it. To return, it is made anew from a complete copy. Hence the
//! rule for opening: all copies that the newest record names must be there, because a missing copy may have gone on
//! alone. Only an operator can declare it lost for good.

mod open;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

use base::env::{Env, File, spawn_thread};
use base::{Epoch, Seq};
use wire::BoxFuture;

use crate::keeper::Keeper;
use crate::state::WholeLog;

use super::file::{BATCHES_MAX, Copied, FileLog, LogSizes, frames};
use super::frame::ENTRY_BYTES_MAX;
use super::members::{Member, Members};
use super::{AppendError, Fence, LedgerLog, LogCaps, LogEntry, LogError, Room, Tail};

/// How copies are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CopyIo {
    /// At the same time, each copy after the first by its own thread. Another thread restores lost copies.
    #[default]
    Threads,
    /// One after another on the caller's thread, so that a simulation can be repeated.
    Inline,
}

/// What to do if a copy that may be newer is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StaleCopies {
    /// Report the copy and do not open.
    #[default]
    Refuse,
    /// Go on with the other copies: an operator knows that the missing ones are lost.
    Use,
}

/// How a mirrored log is opened.
#[derive(Debug, Clone, Copy, Default)]
pub struct MirrorOptions {
    /// How copies are written.
    pub io: CopyIo,
    /// What to do if a copy that may be newer is missing.
    pub stale: StaleCopies,
    /// Sizes of the log files.
    pub sizes: LogSizes,
}

/// The state of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CopyState {
    /// The copy is complete.
    InSync,
    /// The copy is left out for this reason. Restoring it is tried from time to time.
    Lost(String),
}

/// Status of a copy, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyStatus {
    /// Its directory.
    pub dir: PathBuf,
    /// Its state.
    pub state: CopyState,
}

/// A log with a few copies.
pub struct MirroredLog {
    shared: Arc<Shared>,
    keeper: Mutex<Option<Keeper>>,
}

struct Shared {
    env: Env,
    io: CopyIo,
    sizes: LogSizes,
    inner: Mutex<Inner>,
    /// A complete copy has only its reserve of room left.
    tight: AtomicBool,
    /// Held while a copy is made anew, which happens concurrently with appends.
    rejoining: Mutex<()>,
}

struct Inner {
    set: [u8; 16],
    abandoned: Vec<[u8; 16]>,
    generation: u64,
    copies: Vec<Copy>,
    epoch: Epoch,
    /// Of the last seal by this process; no other process writes the log beside it.
    nonce: u64,
    tail: Seq,
    /// No copy took the last append; the end of the log is unknown until a new seal.
    broken: bool,
}

struct Copy {
    dir: PathBuf,
    /// 0 until it is known.
    id: u64,
    state: Result<Complete, String>,
}

/// A complete copy.
struct Complete {
    log: Arc<FileLog>,
    worker: Option<Worker>,
    /// Locked while the copy is written.
    _lock: Arc<dyn File>,
}

struct Write {
    log: Arc<FileLog>,
    first: Seq,
    count: u64,
    bytes: Arc<Vec<u8>>,
    done: SyncSender<Result<(), AppendError>>,
}

/// The thread that writes one copy.
struct Worker {
    jobs: Option<Sender<Write>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    fn start() -> Self {
        let (jobs, queue) = channel::<Write>();
        let thread = spawn_thread("log-copy", move || {
            while let Ok(Write { log, first, count, bytes, done }) = queue.recv() {
                // The appender waits for the answer.
                let _ = done.send(log.write(first, count, &bytes));
            }
        });
        Self { jobs: Some(jobs), thread: Some(thread) }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Inner {
    fn complete(&self) -> impl Iterator<Item = (usize, &Complete)> {
        self.copies.iter().enumerate().filter_map(|(index, copy)| Some((index, copy.state.as_ref().ok()?)))
    }

    fn members(&self, own: u64) -> Members {
        let complete = self.copies.iter().filter(|copy| copy.state.is_ok());
        let member = |copy: &Copy| Member { id: copy.id, path: copy.dir.display().to_string() };
        Members {
            set: self.set,
            abandoned: self.abandoned.clone(),
            generation: self.generation,
            own,
            in_sync: complete.map(member).collect(),
        }
    }

    /// Makes the membership durable on every complete copy, on a new one last. Copies on which that fails are left out
    /// as well.
    ///
    /// # Errors
    /// If no copy is left.
    fn record(&mut self, env: &Env, newcomer: Option<usize>) -> Result<(), std::io::Error> {
        loop {
            self.generation += 1;
            let mut order: Vec<usize> = self.complete().map(|(index, _)| index).collect();
            order.sort_by_key(|index| Some(*index) == newcomer);
            if order.is_empty() {
                return Err(std::io::Error::other("no copy of the log is left"));
            }
            let mut failed = Vec::new();
            for index in order {
                let copy = &self.copies[index];
                if let Err(error) = self.members(copy.id).update(env, &copy.dir) {
                    failed.push((index, error.to_string()));
                }
            }
            if failed.is_empty() {
                return Ok(());
            }
            self.lose(failed);
        }
    }

    fn lose(&mut self, failed: Vec<(usize, String)>) {
        for (index, reason) in failed {
            let copy = &mut self.copies[index];
            tracing::error!(dir = %copy.dir.display(), reason, "copy of the ledger log is left out");
            copy.state = Err(reason);
        }
    }

    /// Leaves out failed copies, after the other copies have recorded that. If all copies failed, none is left out.
    fn go_on_without(&mut self, env: &Env, failed: Vec<(usize, String)>) -> Result<(), std::io::Error> {
        if failed.is_empty() {
            return Ok(());
        }
        if failed.len() == self.complete().count() {
            let reason = failed.into_iter().map(|(_, reason)| reason).next().unwrap_or_default();
            return Err(std::io::Error::other(reason));
        }
        self.lose(failed);
        self.record(env, None)
    }

    /// Writes to all complete copies at once and returns the failed ones.
    fn write_all(&self, first: Seq, count: u64, bytes: &Arc<Vec<u8>>) -> Vec<(usize, String)> {
        let mut waiting = Vec::new();
        let mut inline = Vec::new();
        let here = self.complete().next().map(|(index, _)| index);
        for (index, copy) in self.complete() {
            let jobs = copy.worker.as_ref().and_then(|worker| worker.jobs.as_ref());
            match jobs.filter(|_| Some(index) != here) {
                Some(jobs) => {
                    let (done, result) = sync_channel(1);
                    let (log, bytes) = (copy.log.clone(), bytes.clone());
                    let sent = jobs.send(Write { log, first, count, bytes, done });
                    waiting.push((index, sent.is_ok().then_some(result)));
                }
                None => inline.push((index, &copy.log)),
            }
        }
        let mut outcomes: Vec<(usize, Result<(), AppendError>)> =
            inline.into_iter().map(|(index, log)| (index, log.write(first, count, bytes))).collect();
        for (index, result) in waiting {
            let gone = || AppendError::Unknown(std::io::Error::other("its thread has ended"));
            let outcome = result.and_then(|result| result.recv().ok()).unwrap_or_else(|| Err(gone()));
            outcomes.push((index, outcome));
        }
        outcomes.into_iter().filter_map(|(index, outcome)| Some((index, reason(outcome.err()?)))).collect()
    }
}

/// An error and its causes as text.
fn reason(error: impl std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

impl Shared {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no holder of this lock panics")
    }

    fn seal(&self, epoch: Epoch, nonce: u64) -> Result<Tail, LogError> {
        let mut inner = self.inner();
        if epoch <= inner.epoch {
            return Err(LogError::Fenced(inner.epoch));
        }
        inner.broken = true;
        let logs: Vec<_> = inner.complete().map(|(index, copy)| (index, copy.log.clone())).collect();
        let mut failed = Vec::new();
        let mut first_error = None;
        for (index, log) in logs {
            if let Err(error) = log.seal_now(epoch, nonce) {
                failed.push((index, error.to_string()));
                first_error.get_or_insert(error);
            }
        }
        if failed.len() == inner.complete().count() {
            return Err(
                first_error.unwrap_or_else(|| std::io::Error::other("no copy of the log is left").into())
            );
        }
        inner.go_on_without(&self.env, failed)?;
        (inner.epoch, inner.nonce) = (epoch, nonce);
        inner.broken = false;
        self.note_room(&inner);
        Ok(Tail { seq: inner.tail })
    }

    /// To be called after any step that may have used up the room of a copy or left out a tight copy.
    fn note_room(&self, inner: &Inner) {
        let tight = inner.complete().any(|(_, copy)| copy.log.room_now() == Room::Reserve);
        self.tight.store(tight, Ordering::Relaxed);
    }

    fn append(&self, epoch: Epoch, first: Seq, batches: &[Vec<u8>]) -> Result<(), AppendError> {
        let bytes = Arc::new(frames(epoch, first, batches)?);
        let mut inner = self.inner();
        if epoch != inner.epoch || first.0 != inner.tail.0 + 1 {
            return Err(AppendError::Fenced(inner.epoch));
        }
        if inner.broken {
            return Err(AppendError::Unknown(std::io::Error::other("an earlier write failed")));
        }
        // Reserves room on every copy first: a refused append is on no copy.
        let mut failed = Vec::new();
        for (index, copy) in inner.complete() {
            match copy.log.prepare(epoch, first, bytes.len() as u64) {
                Ok(()) => {}
                Err(AppendError::Full(error)) => {
                    self.note_room(&inner);
                    return Err(AppendError::Full(error));
                }
                Err(error) => failed.push((index, reason(error))),
            }
        }
        let done = inner.go_on_without(&self.env, failed).and_then(|()| {
            let failed = inner.write_all(first, batches.len() as u64, &bytes);
            inner.go_on_without(&self.env, failed)
        });
        self.note_room(&inner);
        if let Err(error) = done {
            inner.broken = true;
            return Err(AppendError::Unknown(error));
        }
        inner.tail = Seq(first.0 + batches.len() as u64 - 1);
        Ok(())
    }

    fn read(&self, from: Seq, limit_bytes: usize) -> Result<Vec<LogEntry>, LogError> {
        let logs: Vec<_> = {
            let inner = self.inner();
            inner.complete().map(|(index, copy)| (index, copy.log.clone())).collect()
        };
        let mut failed = Vec::new();
        let mut first_error = None;
        for (index, log) in logs {
            match log.read_now(from, limit_bytes) {
                Ok(entries) => {
                    self.inner().go_on_without(&self.env, failed)?;
                    return Ok(entries);
                }
                Err(error) => {
                    failed.push((index, error.to_string()));
                    first_error.get_or_insert(error);
                }
            }
        }
        Err(first_error.unwrap_or_else(|| std::io::Error::other("no copy of the log is left").into()))
    }

    fn trim(&self, up_to: Seq) -> Result<(), LogError> {
        let inner = self.inner();
        let mut result = Ok(());
        for (_, copy) in inner.complete() {
            result = result.and(copy.log.trim_now(up_to));
        }
        result
    }

    /// Tries to restore every copy that is left out. Returns the number of those that are still out.
    fn rejoin(&self) -> usize {
        let _alone = self.rejoining.lock().expect("no holder of this lock panics");
        let lost: Vec<PathBuf> = {
            let inner = self.inner();
            inner.copies.iter().filter(|copy| copy.state.is_err()).map(|copy| copy.dir.clone()).collect()
        };
        let mut still_lost = 0;
        for dir in lost {
            match self.make_anew(&dir) {
                Ok(()) => tracing::info!(dir = %dir.display(), "copy of the ledger log is complete again"),
                Err(error) => {
                    still_lost += 1;
                    tracing::warn!(dir = %dir.display(), error, "copy of the ledger log cannot be made anew");
                    let mut inner = self.inner();
                    if let Some(copy) = inner.copies.iter_mut().find(|copy| copy.dir == dir)
                        && copy.state.is_err()
                    {
                        copy.state = Err(error);
                    }
                }
            }
        }
        still_lost
    }

    /// Copies the log of a complete copy to `dir`, mostly concurrently with appends, and makes it a member.
    fn make_anew(&self, dir: &Path) -> Result<(), String> {
        let (source, set, abandoned) = {
            let inner = self.inner();
            let (_, complete) = inner.complete().next().ok_or("no copy of the log is left")?;
            (complete.log.clone(), inner.set, inner.abandoned.clone())
        };
        let lock = open::take_lock(&self.env, dir)?;
        let found = Members::read(&self.env, dir).unwrap_or(None);
        if found.as_ref().is_some_and(|found| found.set != set && !abandoned.contains(&found.set)) {
            return Err("it belongs to another log; nothing was changed".to_owned());
        }
        let has_log = open::has_log(&self.env, dir).map_err(reason)?;
        if found.is_none() && has_log && !self.env.files.exists(&dir.join("members")) {
            return Err("it holds a log that is not a copy of this one; nothing was changed".to_owned());
        }
        let incomplete = {
            let inner = self.inner();
            let taken = |id: u64| inner.copies.iter().any(|copy| copy.dir != dir && copy.id == id);
            let own = found.map(|found| found.own).filter(|own| !taken(*own));
            inner.members(own.unwrap_or_else(|| self.env.random.next_u64()))
        };
        // From here on this copy must not count as complete, even after a crash.
        incomplete.create(&self.env, dir).map_err(reason)?;
        FileLog::wipe(&self.env, dir).map_err(reason)?;
        let mut copied = Copied::new();
        source.copy_to(dir, &mut copied).map_err(reason)?;
        let mut inner = self.inner();
        if !inner.complete().any(|(_, complete)| Arc::ptr_eq(&complete.log, &source)) {
            return Err("the copy that it was made from failed".to_owned());
        }
        source.copy_to(dir, &mut copied).map_err(reason)?;
        let log = self.open_file_log(dir).map_err(reason)?;
        if log.end() != source.end() {
            return Err(format!("it ends at {:?} and not at {:?}", log.end(), source.end()));
        }
        let worker = (self.io == CopyIo::Threads).then(Worker::start);
        let index = inner.copies.iter().position(|copy| copy.dir == dir).ok_or("it was removed meanwhile")?;
        inner.copies[index].id = incomplete.own;
        inner.copies[index].state = Ok(Complete { log: Arc::new(log), worker, _lock: lock });
        if let Err(error) = inner.record(&self.env, Some(index)) {
            inner.broken = true;
            return Err(reason(error));
        }
        match &inner.copies[index].state {
            Ok(_) => Ok(()),
            Err(error) => Err(error.clone()),
        }
    }

    fn open_file_log(&self, dir: &Path) -> Result<FileLog, LogError> {
        Ok(FileLog::open(&self.env, dir)?.with_sizes(self.sizes))
    }
}

impl MirroredLog {
    /// Each copy and its state.
    pub fn copies(&self) -> Vec<CopyStatus> {
        let inner = self.shared.inner();
        let status = |copy: &Copy| CopyStatus {
            dir: copy.dir.clone(),
            state: match &copy.state {
                Ok(_) => CopyState::InSync,
                Err(reason) => CopyState::Lost(reason.clone()),
            },
        };
        inner.copies.iter().map(status).collect()
    }

    /// Tries to restore every copy that is left out. Returns the number of those that are still out.
    pub fn rejoin(&self) -> usize {
        self.shared.rejoin()
    }

    /// Adds a copy in an empty directory, whose parent must exist, and makes it complete.
    ///
    /// # Errors
    /// Why the copy is not complete; it is not added then.
    pub fn add(&self, dir: &Path) -> Result<(), String> {
        let _alone = self.shared.rejoining.lock().expect("no holder of this lock panics");
        {
            let mut inner = self.shared.inner();
            if inner.copies.iter().any(|copy| copy.dir == dir) {
                return Err(format!("there is a copy already: dir={}", dir.display()));
            }
            inner.copies.push(Copy { dir: dir.to_owned(), id: 0, state: Err("being made".to_owned()) });
        }
        let made = self.shared.make_anew(dir);
        match &made {
            Ok(()) => self.start_keeper(),
            Err(_) => self.shared.inner().copies.retain(|copy| copy.dir != dir),
        }
        made
    }

    /// Whether a store can be rebuilt from this log alone.
    pub fn whole(&self) -> WholeLog {
        let inner = self.shared.inner();
        let first = inner.complete().map(|(_, copy)| copy.log.first()).max();
        let is_whole = first == Some(Seq(1)) && inner.tail >= Seq(1);
        if is_whole { WholeLog::Yes } else { WholeLog::No }
    }

    /// Removes the copy in `dir` for good. The files in the directory stay and are stale.
    ///
    /// # Errors
    /// If it is the only complete copy, or the other copies cannot record it.
    pub fn remove(&self, dir: &Path) -> Result<(), String> {
        let _alone = self.shared.rejoining.lock().expect("no holder of this lock panics");
        let mut inner = self.shared.inner();
        let complete = inner.copies.iter().filter(|copy| copy.dir != dir && copy.state.is_ok()).count();
        if complete == 0 {
            return Err(format!("it is the only complete copy: dir={}", dir.display()));
        }
        inner.copies.retain(|copy| copy.dir != dir);
        let recorded = inner.record(&self.shared.env, None);
        recorded.map_err(|error| {
            inner.broken = true;
            reason(error)
        })
    }

    /// A single copy needs no thread.
    fn start_keeper(&self) {
        let mut keeper = self.keeper.lock().expect("no holder of this lock panics");
        let alone = self.shared.inner().copies.len() < 2;
        if self.shared.io == CopyIo::Inline || alone || keeper.is_some() {
            return;
        }
        let shared = self.shared.clone();
        *keeper = Some(Keeper::start("log-keeper", move || shared.rejoin()));
    }
}

impl LedgerLog for MirroredLog {
    fn seal(&self, epoch: Epoch, nonce: u64) -> BoxFuture<'_, Result<Tail, LogError>> {
        Box::pin(async move { self.shared.seal(epoch, nonce) })
    }

    fn fence(&self) -> BoxFuture<'_, Result<Fence, LogError>> {
        Box::pin(async move {
            let inner = self.shared.inner();
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
        Box::pin(async move { self.shared.append(epoch, first, &batches) })
    }

    fn read(&self, from: Seq, limit_bytes: usize) -> BoxFuture<'_, Result<Vec<LogEntry>, LogError>> {
        Box::pin(async move { self.shared.read(from, limit_bytes) })
    }

    fn trim(&self, up_to: Seq) -> BoxFuture<'_, Result<(), LogError>> {
        Box::pin(async move { self.shared.trim(up_to) })
    }

    fn caps(&self) -> LogCaps {
        LogCaps { entry_bytes_max: ENTRY_BYTES_MAX, batches_per_append: BATCHES_MAX, lease: None }
    }

    fn first(&self) -> Seq {
        self.shared.inner().complete().map(|(_, copy)| copy.log.first()).min().unwrap_or(Seq(1))
    }

    fn room(&self) -> Room {
        if self.shared.tight.load(Ordering::Relaxed) { Room::Reserve } else { Room::Enough }
    }

    fn refill(&self) {
        let inner = self.shared.inner();
        inner.complete().for_each(|(_, copy)| copy.log.refill_now());
        self.shared.note_room(&inner);
    }
}
