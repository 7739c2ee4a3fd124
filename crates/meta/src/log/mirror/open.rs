//! Opening a mirrored log: finds its copies, decides which are complete, and aligns their ends.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use base::env::{Caching, Env, File, OpenMode};
use base::{Epoch, Seq};

use super::super::file::FileLog;
use super::super::members::Members;
use super::super::{LedgerLog, LogError};
use super::{Complete, Copy, CopyIo, Inner, MirrorOptions, MirroredLog, Shared, StaleCopies, Worker, reason};

/// The content of one directory.
struct CopyDir {
    dir: PathBuf,
    /// The error, if the directory cannot be read.
    content: Result<Content, String>,
}

struct Content {
    lock: Arc<dyn File>,
    record: Option<Members>,
    has_log: bool,
}

impl CopyDir {
    fn record(&self) -> Option<&Members> {
        self.content.as_ref().ok()?.record.as_ref()
    }
}

/// Locks a copy's directory, which is created if its parent exists: an unmounted disk must not be mistaken for an empty
/// one.
pub(super) fn take_lock(env: &Env, dir: &Path) -> Result<Arc<dyn File>, String> {
    if !dir.parent().is_some_and(|parent| env.files.exists(parent)) {
        return Err("directory is missing".to_owned());
    }
    env.files.create_dir_all(dir).map_err(reason)?;
    let lock = env.files.open(&dir.join("lock"), OpenMode::Create, Caching::Buffered).map_err(reason)?;
    match crate::lock::lock(&*lock) {
        Ok(()) => Ok(lock),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(IN_USE.to_owned()),
        Err(error) => Err(reason(error)),
    }
}

const IN_USE: &str = "in use by another process";

pub(super) fn has_log(env: &Env, dir: &Path) -> Result<bool, io::Error> {
    let files = env.files.list(dir)?;
    Ok(files.iter().any(|path| path.extension().is_some_and(|extension| extension == "log")))
}

fn look(env: &Env, dir: &Path) -> CopyDir {
    let content = take_lock(env, dir).and_then(|lock| {
        let record = Members::read(env, dir)?;
        let has_log = has_log(env, dir).map_err(reason)?;
        Ok(Content { lock, record, has_log })
    });
    CopyDir { dir: dir.to_owned(), content }
}

/// The membership that counts.
struct Decision {
    set: [u8; 16],
    abandoned: Vec<[u8; 16]>,
    generation: u64,
    /// The directories of complete copies with their ids.
    complete: Vec<(PathBuf, u64)>,
    /// Whether copies that may be newer were given up.
    forced: bool,
}

/// The first record, for a new log or one from before there were records.
fn first_record(env: &Env, found: &[CopyDir]) -> Result<Decision, LogError> {
    if let Some(CopyDir { dir, content: Err(error) }) = found.iter().find(|found| found.content.is_err()) {
        return Err(LogError::Stale(format!("{}: {error}", dir.display())));
    }
    let with_log: Vec<&CopyDir> =
        found.iter().filter(|found| found.content.as_ref().is_ok_and(|content| content.has_log)).collect();
    if with_log.len() > 1 {
        let dirs: Vec<String> = with_log.iter().map(|found| found.dir.display().to_string()).collect();
        return Err(LogError::Damaged(format!(
            "several logs and none says which is newer: {}",
            dirs.join(", ")
        )));
    }
    let seed = with_log.first().copied().or(found.first());
    let seed = seed.ok_or_else(|| io::Error::other("no directory for the log"))?;
    let (mut set, id) = ([0; 16], env.random.next_u64());
    env.random.fill(&mut set);
    let record = Members { set, abandoned: Vec::new(), generation: 0, own: id, in_sync: Vec::new() };
    let complete = vec![(seed.dir.clone(), id)];
    // Until the copy is recorded as complete, an empty record counts as no record.
    record.create(env, &seed.dir)?;
    Ok(Decision { set, abandoned: Vec::new(), generation: 0, complete, forced: false })
}

/// The history of all directories, except those that an operator has given up.
fn current_set<'a>(records: &[(&Path, &'a Members)]) -> Result<&'a Members, LogError> {
    let newest = |set: [u8; 16]| {
        let same = records.iter().filter(move |(_, record)| record.set == set);
        same.map(|(_, record)| *record).max_by_key(|record| record.generation)
    };
    let candidates = records.iter().filter_map(|(_, record)| newest(record.set));
    let mut winners = candidates.filter(|candidate| {
        records
            .iter()
            .all(|(_, other)| other.set == candidate.set || candidate.abandoned.contains(&other.set))
    });
    winners.next().ok_or_else(|| {
        let dirs: Vec<String> = records.iter().map(|(dir, _)| dir.display().to_string()).collect();
        LogError::Damaged(format!(
            "directories hold different histories: {}; leave out the wrong one",
            dirs.join(", ")
        ))
    })
}

fn decide(env: &Env, found: &[CopyDir], stale: StaleCopies) -> Result<Decision, LogError> {
    let records: Vec<(&Path, &Members)> =
        found.iter().filter_map(|found| Some((found.dir.as_path(), found.record()?))).collect();
    let records: Vec<_> = records
        .into_iter()
        .filter(|(_, record)| record.generation > 0 || !record.in_sync.is_empty())
        .collect();
    if records.is_empty() {
        return first_record(env, found);
    }
    let newest = current_set(&records)?;
    let of_set: Vec<_> = records.iter().filter(|(_, record)| record.set == newest.set).collect();
    for (index, (dir, record)) in of_set.iter().enumerate() {
        if let Some((twin, _)) = of_set[..index].iter().find(|(_, other)| other.own == record.own) {
            let (a, b) = (dir.display(), twin.display());
            return Err(LogError::Damaged(format!(
                "one copy is there twice: {a} and {b}; leave out the older one"
            )));
        }
    }
    let missing =
        newest.in_sync.iter().find(|member| !of_set.iter().any(|(_, record)| record.own == member.id));
    if let Some(member) = missing
        && stale == StaleCopies::Refuse
    {
        let at = found.iter().find(|found| found.dir.display().to_string() == member.path);
        let why = at.and_then(|found| found.content.as_ref().err()).map(|why| format!(" ({why})"));
        let why = why.unwrap_or_default();
        return Err(LogError::Stale(format!(
            "the copy in {} is not there and may be newer{why}",
            member.path
        )));
    }
    let complete: Vec<(PathBuf, u64)> = of_set
        .iter()
        .filter(|(_, record)| {
            // A crash may leave a copy without the newest record; it had everything before that.
            record.generation + 1 >= newest.generation
                && newest.in_sync.iter().any(|member| member.id == record.own)
        })
        .map(|(dir, record)| (dir.to_path_buf(), record.own))
        .collect();
    if complete.is_empty() {
        let what = "only parts of copies are there: a complete one is missing".to_owned();
        return Err(if missing.is_some() { LogError::Stale(what) } else { LogError::Damaged(what) });
    }
    let mut decision = Decision {
        set: newest.set,
        abandoned: newest.abandoned.clone(),
        generation: newest.generation,
        complete,
        forced: missing.is_some(),
    };
    if decision.forced {
        decision.abandoned.push(decision.set);
        env.random.fill(&mut decision.set);
    }
    Ok(decision)
}

/// Logs by directory, and the unusable ones with the reason.
type Opened = (Vec<(PathBuf, FileLog)>, Vec<(PathBuf, String)>);

/// Opens the logs of complete copies. A damaged log is left out if another one is intact.
fn open_logs(shared: &Shared, decision: &Decision) -> Result<Opened, LogError> {
    let (mut logs, mut bad, mut first_error) = (Vec::new(), Vec::new(), None);
    for (dir, _) in &decision.complete {
        match shared.open_file_log(dir) {
            Ok(log) => logs.push((dir.clone(), log)),
            Err(error @ LogError::NewerFormat(_)) => return Err(error),
            Err(error) => {
                bad.push((dir.clone(), error.to_string()));
                first_error.get_or_insert(error);
            }
        }
    }
    match first_error.filter(|_| logs.is_empty()) {
        Some(error) => Err(error),
        None => Ok((logs, bad)),
    }
}

/// Makes `log` end like `best`. Both are complete, so they differ only in unacknowledged entries.
fn align(best: &FileLog, log: &FileLog) -> Result<(), LogError> {
    let ((epoch, tail), (own_epoch, own_tail)) = (best.end(), log.end());
    if (epoch, tail) == (own_epoch, own_tail) {
        return Ok(());
    }
    let common = tail.min(own_tail);
    let unlike = || LogError::Damaged(format!("copies differ at entry {common}"));
    if common >= best.first() && common >= log.first() && common > Seq(0) {
        let (ours, theirs) = (best.read_now(common, 1)?, log.read_now(common, 1)?);
        if ours.first() != theirs.first() {
            return Err(unlike());
        }
    } else if best.first().0 > common.0 + 1 {
        return Err(unlike());
    }
    let next = Seq(common.0 + 1);
    let entries = if tail > common { best.read_now(next, usize::MAX)? } else { Vec::new() };
    log.follow(common, &entries, epoch)
}

impl MirroredLog {
    /// Opens the log whose copies are in `dirs`, or creates it. New and left-out directories are made complete if
    /// possible; [`MirroredLog::copies`] has the result.
    ///
    /// # Errors
    /// `Stale` if a copy that may be newer is missing, `Damaged`, `NewerFormat`, `Io`.
    pub fn open(env: &Env, dirs: &[PathBuf], options: MirrorOptions) -> Result<Self, LogError> {
        let found: Vec<CopyDir> = dirs.iter().map(|dir| look(env, dir)).collect();
        let busy =
            found.iter().find(|found| found.content.as_ref().err().is_some_and(|error| error == IN_USE));
        if let Some(found) = busy {
            return Err(io::Error::other(format!("{IN_USE}: path={}", found.dir.display())).into());
        }
        let decision = decide(env, &found, options.stale)?;
        let inner = Inner {
            set: decision.set,
            abandoned: decision.abandoned.clone(),
            generation: decision.generation,
            copies: Vec::new(),
            epoch: Epoch(0),
            tail: Seq(0),
            nonce: 0,
            broken: false,
        };
        let shared = Shared {
            env: env.clone(),
            io: options.io,
            sizes: options.sizes,
            inner: Mutex::new(inner),
            tight: AtomicBool::new(false),
            rejoining: Mutex::new(()),
        };
        let (logs, mut bad) = open_logs(&shared, &decision)?;
        let best =
            (0..logs.len()).max_by_key(|index| logs[*index].1.end()).expect("at least one copy opened");
        for (index, (dir, log)) in logs.iter().enumerate() {
            if index != best
                && let Err(error) = align(&logs[best].1, log)
            {
                bad.push((dir.clone(), error.to_string()));
            }
        }
        assemble(&shared, &decision, found, logs, best, &bad)?;
        shared.rejoin();
        let mirrored = Self { shared: Arc::new(shared), keeper: Mutex::new(None) };
        mirrored.start_keeper();
        Ok(mirrored)
    }
}

/// Assembles the copies, and records the membership if it changed.
fn assemble(
    shared: &Shared,
    decision: &Decision,
    found: Vec<CopyDir>,
    logs: Vec<(PathBuf, FileLog)>,
    best: usize,
    bad: &[(PathBuf, String)],
) -> Result<(), LogError> {
    let mut inner = shared.inner();
    (inner.epoch, inner.tail) = logs[best].1.end();
    let mut logs: Vec<_> = logs.into_iter().map(Some).collect();
    let several = found.len() > 1;
    for found in found {
        let id = decision.complete.iter().find(|(dir, _)| *dir == found.dir).map_or(0, |(_, id)| *id);
        let reason = bad.iter().find(|(dir, _)| *dir == found.dir).map(|(_, reason)| reason.clone());
        let slot = logs.iter_mut().find(|log| log.as_ref().is_some_and(|(dir, _)| *dir == found.dir));
        let log = slot.and_then(Option::take).map(|(_, log)| log);
        let state = match (found.content, log, reason) {
            (Err(error), _, _) | (_, _, Some(error)) => Err(error),
            (Ok(content), Some(log), None) => {
                let worker = (shared.io == CopyIo::Threads && several).then(Worker::start);
                Ok(Complete { log: Arc::new(log), worker, _lock: content.lock })
            }
            (Ok(_), None, None) => Err("it is not complete".to_owned()),
        };
        inner.copies.push(Copy { dir: found.dir, id, state });
    }
    let as_recorded = bad.is_empty() && !decision.forced && decision.generation > 0;
    if !as_recorded {
        inner.record(&shared.env, None)?;
    }
    Ok(())
}
