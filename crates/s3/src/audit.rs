//! The audit log: one line of JSON for each request, in files that are rotated by size.
//!
//! Requests reserve room in a bounded queue before they are served, and wait while it is full: a slow disk slows
//! requests down and loses no lines. A failing log never stops the service: while the disk refuses writes, or after a
//! wait of two seconds, requests continue. Records that then find no room are lost and counted; `status` shows the
//! count, and the log gets it in place of the lines once the disk works again.
//!
//! Lines are durable (`fdatasync`) within a second, and before the node has stopped.

use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use base::env::{Caching, Env, File, OpenMode};
use serde::Serialize;
use tokio::sync::Notify;

use crate::identity::{Audit, AuditRecord};
use crate::instant;

/// Limit of the queue.
const QUEUE_RECORDS_MAX: usize = 16 * 1024;
/// Records per write, at most.
const BATCH_RECORDS_MAX: usize = 1024;
/// How long a request waits for room in the queue.
const RESERVE_WAIT: Duration = Duration::from_secs(2);
/// How long the thread waits for more records after the first one: waking it for each costs more than writing it.
const GATHER: Duration = Duration::from_millis(20);
/// Interval of syncs, and of retries after the disk refused.
const SYNC_EVERY: Duration = Duration::from_secs(1);
const FILE_BYTES_MAX: u64 = 64 << 20;
/// Limit for all files together; beyond it the oldest are removed.
const ALL_BYTES_MAX: u64 = 1 << 30;
const SUFFIX: &str = ".jsonl";

/// The audit log of a node.
pub struct AuditLog {
    shared: Arc<Shared>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

/// State of the log.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuditStat {
    /// Records in the queue.
    pub queued: usize,
    /// Records written since the start of the node.
    pub written: u64,
    /// Records lost since the start of the node.
    pub lost: u64,
    /// Why writes fail now.
    pub problem: Option<String>,
}

struct Shared {
    state: Mutex<Queue>,
    /// Signalled when there are records to write, and at the stop.
    work: Condvar,
    /// Notified when the queue has room.
    room: Notify,
}

#[derive(Default)]
struct Queue {
    records: VecDeque<AuditRecord>,
    /// Room that is reserved by requests under way.
    reserved: usize,
    written: u64,
    lost: u64,
    /// Lost records that the log does not mention yet.
    lost_unsaid: u64,
    problem: Option<String>,
    stopping: bool,
}

impl Queue {
    fn has_room(&self) -> bool {
        self.records.len() + self.reserved < QUEUE_RECORDS_MAX || self.problem.is_some()
    }

    fn push(&mut self, record: AuditRecord) {
        self.reserved -= 1;
        if self.records.len() < QUEUE_RECORDS_MAX && !self.stopping {
            self.records.push_back(record);
        } else {
            self.lost += 1;
            self.lost_unsaid += 1;
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.state.lock().expect("no holder of this lock panics")
    }
}

impl AuditLog {
    /// Begins a new file in `dir`, which is created if it is missing. Retries later if the disk refuses.
    pub fn start(env: &Env, dir: &Path) -> Self {
        let shared = Arc::new(Shared { state: Mutex::default(), work: Condvar::new(), room: Notify::new() });
        let (writing, env, dir) = (shared.clone(), env.clone(), dir.to_owned());
        let body = move || write_until_stopped(&writing, &mut Writer::new(env, dir, FILE_BYTES_MAX));
        let writer = base::env::spawn_thread("audit", body);
        Self { shared, writer: Mutex::new(Some(writer)) }
    }

    /// The state of the log.
    pub fn stat(&self) -> AuditStat {
        let queue = self.shared.lock();
        AuditStat {
            queued: queue.records.len(),
            written: queue.written,
            lost: queue.lost,
            problem: queue.problem.clone(),
        }
    }

    /// Writes the queue, makes it durable and ends the thread. Records that the disk refuses now are lost. Blocks.
    pub fn stop(&self) {
        self.shared.lock().stopping = true;
        self.shared.work.notify_one();
        let writer = self.writer.lock().expect("no holder of this lock panics").take();
        if let Some(writer) = writer {
            writer.join().expect("a panic of a thread ends the process");
        }
    }
}

impl Audit for AuditLog {
    fn try_reserve(&self) -> bool {
        let mut queue = self.shared.lock();
        let has_room = queue.has_room();
        queue.reserved += usize::from(has_room);
        has_room
    }

    fn reserve(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async {
            let wait = async {
                loop {
                    let mut room = std::pin::pin!(self.shared.room.notified());
                    // From here on a notification counts, so none is missed between the check and the wait.
                    room.as_mut().enable();
                    if self.try_reserve() {
                        return;
                    }
                    room.await;
                }
            };
            if tokio::time::timeout(RESERVE_WAIT, wait).await.is_err() {
                self.shared.lock().reserved += 1;
            }
        })
    }

    fn record(&self, record: AuditRecord) {
        let wakes = {
            let mut queue = self.shared.lock();
            queue.push(record);
            [1, BATCH_RECORDS_MAX].contains(&queue.records.len())
        };
        if wakes {
            self.shared.work.notify_one();
        }
    }
}

/// The thread: takes a batch, writes it, wakes waiting requests, until it is stopped and the queue is empty.
fn write_until_stopped(shared: &Shared, writer: &mut Writer) {
    let mut batch: Vec<AuditRecord> = Vec::new();
    loop {
        let (lost, stopping) = take(shared, &mut batch, writer.is_behind());
        let result = if batch.is_empty() && lost == 0 { writer.sync() } else { writer.write(&batch, lost) };
        let result = result.and_then(|()| if stopping { writer.sync() } else { writer.sync_if_due() });
        if let Err(error) = &result {
            tracing::error!(%error, "audit log cannot be written");
        }
        let mut queue = shared.lock();
        match result {
            Ok(()) => {
                queue.problem = None;
                queue.written += batch.len() as u64;
                queue.lost_unsaid -= lost;
                batch.clear();
            }
            Err(error) => {
                queue.problem = Some(error.to_string());
                if stopping {
                    let left = (batch.len() + queue.records.len()) as u64;
                    tracing::error!(lines = left, "audit log ends without these lines");
                    queue.lost += left;
                }
            }
        }
        let done = stopping && (queue.records.is_empty() || queue.problem.is_some());
        drop(queue);
        shared.room.notify_waiters();
        if done {
            return;
        }
    }
}

/// Waits for records and moves them to `batch`, after those left there by a failed write. Returns the number of lost
/// records that the log must mention, and whether the log is stopped.
fn take(shared: &Shared, batch: &mut Vec<AuditRecord>, behind: bool) -> (u64, bool) {
    let mut queue = shared.lock();
    let idle = |queue: &mut Queue| queue.records.is_empty() && !queue.stopping;
    if !batch.is_empty() || behind {
        // After an error, or while records are not durable yet, the wait is short.
        let failed = !batch.is_empty();
        let waits = |queue: &mut Queue| !queue.stopping && (failed || idle(queue));
        let waited = shared.work.wait_timeout_while(queue, SYNC_EVERY, waits);
        queue = waited.expect("no holder of this lock panics").0;
    } else {
        queue = shared.work.wait_while(queue, idle).expect("no holder of this lock panics");
    }
    let few = |queue: &mut Queue| !queue.stopping && queue.records.len() < BATCH_RECORDS_MAX;
    if !queue.records.is_empty() {
        let waited = shared.work.wait_timeout_while(queue, GATHER, few);
        queue = waited.expect("no holder of this lock panics").0;
    }
    let count = queue.records.len().min(BATCH_RECORDS_MAX.saturating_sub(batch.len()));
    batch.extend(queue.records.drain(..count));
    (queue.lost_unsaid, queue.stopping)
}

/// Why a write failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot write audit log: path={path} ({source})")]
struct WriteError {
    path: String,
    source: io::Error,
}

/// Appends to the newest file and begins new files. Synchronous, so that a test can drive it.
struct Writer {
    env: Env,
    dir: PathBuf,
    file_bytes_max: u64,
    file: Option<(Arc<dyn File>, PathBuf)>,
    at: u64,
    unsynced: bool,
    synced_ns: u64,
}

impl Writer {
    fn new(env: Env, dir: PathBuf, file_bytes_max: u64) -> Self {
        let synced_ns = env.clock.boot_ns();
        Self { env, dir, file_bytes_max, file: None, at: 0, unsynced: false, synced_ns }
    }

    fn is_behind(&self) -> bool {
        self.unsynced
    }

    /// Writes lines, after a line with the number of lost records. After an error all of them must be written again.
    fn write(&mut self, records: &[AuditRecord], lost: u64) -> Result<(), WriteError> {
        let mut lines = Vec::new();
        if lost > 0 {
            let time = instant::format_ns(self.env.clock.wall_ns());
            append_line(&mut lines, &LostLine { time, lost });
        }
        for record in records {
            append_line(&mut lines, &Line::new(record));
        }
        if self.at >= self.file_bytes_max {
            self.sync()?;
            self.file = None;
        }
        let (file, path) = match &self.file {
            Some(file) => file.clone(),
            None => self.begin_file()?,
        };
        let written = file.write_at(&lines, self.at);
        written.map_err(|source| WriteError { path: path.display().to_string(), source })?;
        self.at += lines.len() as u64;
        self.unsynced = true;
        Ok(())
    }

    fn sync_if_due(&mut self) -> Result<(), WriteError> {
        let waited = self.env.clock.boot_ns() - self.synced_ns;
        if waited >= SYNC_EVERY.as_nanos() as u64 { self.sync() } else { Ok(()) }
    }

    /// Makes the file durable. After an error a new file is begun: the contents of the old one are unknown.
    fn sync(&mut self) -> Result<(), WriteError> {
        self.synced_ns = self.env.clock.boot_ns();
        let Some((file, path)) = self.file.as_ref().filter(|_| self.unsynced) else { return Ok(()) };
        self.unsynced = false;
        let synced = file.sync_data();
        let failed = synced.map_err(|source| WriteError { path: path.display().to_string(), source });
        if failed.is_err() {
            self.file = None;
        }
        failed
    }

    /// Begins a file named after the time, so that names sort by time.
    fn begin_file(&mut self) -> Result<(Arc<dyn File>, PathBuf), WriteError> {
        let now = instant::format_ns(self.env.clock.wall_ns()).replace(':', "-");
        let path = self.dir.join(format!("{}{SUFFIX}", now.trim_end_matches('Z')));
        let begun = self.env.files.create_dir_all(&self.dir).and_then(|()| {
            self.remove_old()?;
            let file = self.env.files.open(&path, OpenMode::Create, Caching::Buffered)?;
            self.env.files.sync_dir(&self.dir)?;
            Ok((file.len()?, file))
        });
        let (len, file) = begun.map_err(|source| WriteError { path: path.display().to_string(), source })?;
        self.at = len;
        self.file = Some((file.clone(), path.clone()));
        Ok((file, path))
    }

    /// Removes the oldest files while all together exceed [`ALL_BYTES_MAX`].
    fn remove_old(&self) -> io::Result<()> {
        let paths = audit_files(&self.env, &self.dir)?;
        let mut left =
            (ALL_BYTES_MAX / FILE_BYTES_MAX * self.file_bytes_max).saturating_sub(self.file_bytes_max);
        for path in paths.iter().rev() {
            let file = self.env.files.open(path, OpenMode::Existing, Caching::Buffered)?;
            match left.checked_sub(file.len()?) {
                Some(rest) => left = rest,
                None => {
                    left = 0;
                    self.env.files.remove_file(path)?;
                }
            }
        }
        Ok(())
    }
}

/// The files of an audit log, oldest first.
pub fn audit_files(env: &Env, dir: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = env.files.list(dir)?;
    paths.retain(|path| path.as_os_str().as_encoded_bytes().ends_with(SUFFIX.as_bytes()));
    paths.sort();
    Ok(paths)
}

/// A line; `docs/formats/users.md` lists the members.
#[derive(Serialize)]
struct Line<'a> {
    time: String,
    duration_us: u64,
    request_id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    user: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    access_key: Option<&'a str>,
    operation: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    bucket: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<&'a str>,
    status: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
    bytes_in: u64,
    bytes_out: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    source_ip: Option<std::net::IpAddr>,
}

#[derive(Serialize)]
struct LostLine {
    time: String,
    lost: u64,
}

impl<'a> Line<'a> {
    fn new(record: &'a AuditRecord) -> Self {
        Self {
            time: instant::format_ns(record.began_ns),
            duration_us: record.duration_ns / 1000,
            request_id: &record.request_id,
            user: record.user.as_deref(),
            access_key: record.access_key.as_deref(),
            operation: record.operation,
            bucket: record.bucket.as_deref(),
            key: record.key.as_deref(),
            status: record.status,
            error: record.error.as_deref(),
            bytes_in: record.bytes_in,
            bytes_out: record.bytes_out,
            source_ip: record.source_ip,
        }
    }
}

fn append_line(lines: &mut Vec<u8>, line: &impl Serialize) {
    serde_json::to_writer(&mut *lines, line).expect("lines are plain data, and memory takes them");
    lines.push(b'\n');
}

#[cfg(test)]
mod tests;
