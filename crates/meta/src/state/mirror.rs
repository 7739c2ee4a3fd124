//! A store in several files on different disks, all updated from the same log.
//!
//! Each replica records its own position, so none needs to know of the others: the newest is right. Reads go to the
//! first replica that works. A replica that fails is left out, and made anew from another one: at the next start, or by
//! [`MirroredState::keep`] while the others go on.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, RwLock};

use base::checksum::crc32c;
use base::env::Env;
use base::units::MIB;
use base::{Epoch, Seq};

use super::{Applied, Pair, RedbState, State, StateError, Visit, every_key};
use crate::keeper::Keeper;
use crate::keys::KeyRange;

/// Bytes copied per transaction when a replica is made anew. Changes wait during the transaction.
const COPY_BYTES: usize = if cfg!(test) { 1 << 10 } else { 4 * MIB as usize };

/// Whether a log has every batch from the first on, and at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WholeLog {
    /// A store can be rebuilt from the log alone.
    Yes,
    /// The log lacks batches that the stores have.
    No,
}

/// The position of an incomplete replica.
const INCOMPLETE: Applied = Applied { seq: Seq(0), epoch: Epoch(0) };

/// A replica, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaStatus {
    /// Its file.
    pub path: PathBuf,
    /// Its position, or why it is left out.
    pub state: Result<Seq, String>,
}

pub(super) struct Replica {
    path: PathBuf,
    state: RwLock<Result<Arc<RedbState>, String>>,
}

/// A replica that was damaged, and was made anew when it was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remade {
    /// Its file.
    pub path: PathBuf,
    /// Where its content comes from.
    pub from: RemadeFrom,
}

/// Where the content of a replica comes from that was made anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RemadeFrom {
    /// From the log; the damaged file stays beside it, as `state.damaged`.
    Log,
    /// From another replica.
    Replica,
}

/// A store with a few replicas.
pub struct MirroredState {
    env: Env,
    cache_bytes: usize,
    pub(super) replicas: Vec<Replica>,
    /// The replica that is being made anew: changes are applied to it as well. Locked while changes are applied.
    joining: Mutex<Option<Arc<RedbState>>>,
    remade: Vec<Remade>,
}

impl Replica {
    pub(super) fn healthy(&self) -> Option<Arc<RedbState>> {
        self.state.read().expect("no holder of this lock panics").as_ref().ok().cloned()
    }

    pub(super) fn lose(&self, error: &StateError) {
        tracing::error!(path = %self.path.display(), %error, "replica of the metadata store is left out");
        *self.state.write().expect("no holder of this lock panics") = Err(error.to_string());
    }

    /// Handles a failure to make the replica anew. A replica of which only the file's name is gone goes on serving.
    fn still_lost(&self, error: &StateError) {
        tracing::warn!(path = %self.path.display(), %error, "replica of the metadata store cannot be made anew");
        let mut state = self.state.write().expect("no holder of this lock panics");
        if state.is_err() {
            *state = Err(error.to_string());
        }
    }
}

impl MirroredState {
    /// Opens the replicas at `paths`, whose directories exist if their disks are there. A replica is made anew from the
    /// newest one if it is missing, damaged, or behind the log's first entry `log_first`.
    ///
    /// If all replicas are damaged and the log is whole, they begin empty, and get everything from the log. The damaged
    /// files are kept beside them.
    ///
    /// # Errors
    /// If no replica can be used, or another process uses one.
    pub fn open(
        env: &Env,
        paths: &[PathBuf],
        cache_bytes: usize,
        log_first: Seq,
        log: WholeLog,
    ) -> Result<Self, StateError> {
        let mut opened = Vec::new();
        for path in paths {
            let state = open_one(env, path, cache_bytes);
            if let Err(error @ StateError::InUse(_)) = state {
                return Err(error);
            }
            opened.push(state.and_then(|state| Ok((state.applied()?, state))));
        }
        let newest =
            opened.iter().filter_map(|state| Some(state.as_ref().ok()?.0)).max_by_key(|applied| applied.seq);
        let all_damaged = opened.iter().all(|state| matches!(state, Err(StateError::Damaged(_))));
        if newest.is_none() && all_damaged && !paths.is_empty() && log == WholeLog::Yes {
            return Self::open_empty(env, paths, cache_bytes);
        }
        let Some(newest) = newest else {
            return Err(opened
                .into_iter()
                .find_map(Result::err)
                .unwrap_or_else(|| StateError::Failed("no place for the metadata store".to_owned())));
        };
        let source =
            opened.iter().flatten().find(|(applied, _)| *applied == newest).map(|(_, state)| state.clone());
        let source = source.expect("the newest is one of them");
        let (mut replicas, mut remade) = (Vec::new(), Vec::new());
        for (path, state) in paths.iter().zip(opened) {
            let damaged = matches!(state, Err(StateError::Damaged(_)));
            let behind = |applied: Applied| applied.seq < newest.seq && applied.seq.0 + 1 < log_first.0;
            let state = match state {
                Ok((applied, state)) if !behind(applied) => Ok(state),
                Ok(_) | Err(StateError::Damaged(_)) => make_anew(env, path, cache_bytes, &source),
                Err(error) => Err(error),
            };
            let state = state.map_err(|error| {
                tracing::error!(path = %path.display(), %error, "replica of the metadata store is left out");
                error.to_string()
            });
            if damaged && state.is_ok() {
                remade.push(Remade { path: path.clone(), from: RemadeFrom::Replica });
            }
            replicas.push(Replica { path: path.clone(), state: RwLock::new(state) });
        }
        Ok(Self { env: env.clone(), cache_bytes, replicas, joining: Mutex::default(), remade })
    }

    fn open_empty(env: &Env, paths: &[PathBuf], cache_bytes: usize) -> Result<Self, StateError> {
        let mut replicas = Vec::new();
        for path in paths {
            let aside = path.with_extension("damaged");
            let path_text = path.display().to_string();
            tracing::error!(path = path_text, aside = %aside.display(), "metadata store is damaged: made anew from the log");
            env.files.rename(path, &aside).map_err(|error| StateError::Failed(error.to_string()))?;
            let state = open_one(env, path, cache_bytes)?;
            replicas.push(Replica { path: path.clone(), state: RwLock::new(Ok(state)) });
        }
        let remade = paths.iter().map(|path| Remade { path: path.clone(), from: RemadeFrom::Log }).collect();
        Ok(Self { env: env.clone(), cache_bytes, replicas, joining: Mutex::default(), remade })
    }

    /// Starts a thread that restores lost replicas until the keeper is dropped.
    pub fn keep(self: &Arc<Self>) -> Keeper {
        let state = self.clone();
        Keeper::start("store-keeper", move || state.rejoin())
    }

    /// Tries to make anew each replica that was left out or whose file is gone. Returns the number of those still lost.
    pub fn rejoin(&self) -> usize {
        let mut still_lost = 0;
        for replica in &self.replicas {
            let gone = !self.env.files.exists(&replica.path);
            if replica.healthy().is_some() && !gone {
                continue;
            }
            let others =
                self.replicas.iter().any(|other| !std::ptr::eq(other, replica) && other.healthy().is_some());
            if gone && others {
                replica.lose(&StateError::Failed("its file is gone".to_owned()));
            }
            match self.make_anew_beside(replica) {
                Ok(()) => {
                    tracing::info!(path = %replica.path.display(), "replica of the metadata store is complete again");
                }
                Err(error) => {
                    still_lost += 1;
                    replica.still_lost(&error);
                }
            }
        }
        still_lost
    }

    fn make_anew_beside(&self, replica: &Replica) -> Result<(), StateError> {
        let mut copying = self.begin_copy(replica)?;
        while !copying.step()? {}
        Ok(())
    }

    /// Begins to make a replica anew while the others are in use.
    pub(super) fn begin_copy<'a>(&'a self, replica: &'a Replica) -> Result<Copying<'a>, StateError> {
        if !replica.path.parent().is_some_and(|parent| self.env.files.exists(parent)) {
            return Err(missing_directory(&replica.path));
        }
        let (staged, copy) = open_staged(&self.env, &replica.path, self.cache_bytes)?;
        let copy = Arc::new(copy);
        *self.joining.lock().expect("no holder of this lock panics") = Some(copy.clone());
        Ok(Copying { state: self, replica, staged, copy, next: every_key().0 })
    }

    /// Replicas that were damaged when the store was opened, and have all content again.
    pub fn remade(&self) -> &[Remade] {
        &self.remade
    }

    /// Each replica and its position.
    pub fn replicas(&self) -> Vec<ReplicaStatus> {
        let status = |replica: &Replica| {
            let state = replica.state.read().expect("no holder of this lock panics").clone();
            let state = state.and_then(|state| state.applied().map_err(|error| error.to_string()));
            ReplicaStatus { path: replica.path.clone(), state: state.map(|applied| applied.seq) }
        };
        self.replicas.iter().map(status).collect()
    }

    /// Reads from the first replica that works.
    fn read<T>(&self, read: impl Fn(&RedbState) -> Result<T, StateError>) -> Result<T, StateError> {
        let mut left_out: Option<(&Replica, StateError)> = None;
        for replica in &self.replicas {
            let Some(state) = replica.healthy() else { continue };
            // The last replica is never left out: its error is returned.
            if let Some((bad, error)) = left_out.take() {
                bad.lose(&error);
            }
            match read(&state) {
                Ok(value) => return Ok(value),
                Err(error) => left_out = Some((replica, error)),
            }
        }
        Err(left_out.map_or_else(|| StateError::Failed("no replica is left".to_owned()), |(_, error)| error))
    }

    fn positions(&self) -> Result<Vec<Applied>, StateError> {
        let healthy = self.replicas.iter().filter_map(Replica::healthy);
        healthy.map(|state| state.applied()).collect()
    }
}

/// A replica that is being made anew while the others are in use.
///
/// The keys are copied in order, in parts; each part is read and written in one step. Changes between the steps are
/// applied to the copy as well. So after every step the copy equals the others up to the last copied key.
pub(super) struct Copying<'a> {
    state: &'a MirroredState,
    replica: &'a Replica,
    staged: PathBuf,
    copy: Arc<RedbState>,
    next: Vec<u8>,
}

impl Copying<'_> {
    /// Copies the next part. Returns whether it was the last one; then the replica is in use.
    pub(super) fn step(&mut self) -> Result<bool, StateError> {
        let mut joining = self.state.joining.lock().expect("no holder of this lock panics");
        if joining.is_none() {
            return Err(StateError::Failed("its disk failed while it was made anew".to_owned()));
        }
        let sources = self.state.replicas.iter();
        // It may be the replica itself, if only its file's name is gone.
        let source = sources.filter_map(Replica::healthy).next();
        let source = source.ok_or_else(|| StateError::Failed("no replica is left".to_owned()))?;
        let range = (self.next.clone(), every_key().1);
        let (pairs, last) = first_pairs(&source, &range)?;
        put_all(&self.copy, &pairs, INCOMPLETE)?;
        let Some(end) = pairs.last().map(|(key, _)| [key.as_slice(), &[0]].concat()) else {
            return self.finish(&mut joining, source.applied()?);
        };
        if first_pairs(&self.copy, &(range.0, end.clone()))?.0 != pairs {
            return Err(reads_back_differently(&self.staged));
        }
        self.next = end;
        if last { self.finish(&mut joining, source.applied()?) } else { Ok(false) }
    }

    fn finish(&self, joining: &mut Option<Arc<RedbState>>, applied: Applied) -> Result<bool, StateError> {
        put_all(&self.copy, &[], applied)?;
        put_in_place(&self.state.env, &self.staged, &self.replica.path)?;
        *joining = None;
        *self.replica.state.write().expect("no holder of this lock panics") = Ok(self.copy.clone());
        Ok(true)
    }
}

impl Drop for Copying<'_> {
    fn drop(&mut self) {
        *self.state.joining.lock().expect("no holder of this lock panics") = None;
    }
}

/// The first pairs of a range, and whether these are all.
fn first_pairs(state: &RedbState, range: &KeyRange) -> Result<(Vec<Pair>, bool), StateError> {
    let (mut pairs, mut bytes, mut last) = (Vec::new(), 0, true);
    state.scan(range, &mut |key, value| {
        if bytes >= COPY_BYTES {
            last = false;
            return ControlFlow::Break(());
        }
        bytes += key.len() + value.len();
        pairs.push((key.to_vec(), value.to_vec()));
        ControlFlow::Continue(())
    })?;
    Ok((pairs, last))
}

fn missing_directory(path: &Path) -> StateError {
    StateError::Failed(format!("directory is missing: path={}", path.display()))
}

fn reads_back_differently(path: &Path) -> StateError {
    StateError::Failed(format!("what was copied reads back differently: path={}", path.display()))
}

fn io(error: std::io::Error) -> StateError {
    StateError::Failed(error.to_string())
}

/// Makes an empty store next to `path`.
fn open_staged(env: &Env, path: &Path, cache_bytes: usize) -> Result<(PathBuf, RedbState), StateError> {
    let staged = path.with_extension("redb.new");
    if env.files.exists(&staged) {
        env.files.remove_file(&staged).map_err(io)?;
    }
    let copy = RedbState::open(env, &staged, cache_bytes)?;
    Ok((staged, copy))
}

fn put_in_place(env: &Env, staged: &Path, path: &Path) -> Result<(), StateError> {
    env.files.rename(staged, path).map_err(io)?;
    env.files.sync_dir(path.parent().unwrap_or(Path::new(""))).map_err(io)
}

fn open_one(env: &Env, path: &Path, cache_bytes: usize) -> Result<Arc<RedbState>, StateError> {
    if !path.parent().is_some_and(|parent| env.files.exists(parent)) {
        return Err(missing_directory(path));
    }
    RedbState::open(env, path, cache_bytes).map(Arc::new)
}

/// Copies `source` in key order to a new file, reads it back, and moves it to the place of the old file.
fn make_anew(
    env: &Env,
    path: &Path,
    cache_bytes: usize,
    source: &RedbState,
) -> Result<Arc<RedbState>, StateError> {
    tracing::warn!(path = %path.display(), "replica of the metadata store is made anew");
    let (staged, copy) = open_staged(env, path, cache_bytes)?;
    let applied = source.applied()?;
    let mut pairs: Vec<Pair> = Vec::new();
    let (mut bytes, mut sum, mut result) = (0, Sum::default(), Ok(()));
    source.scan(&every_key(), &mut |key, value| {
        sum.add(key, value);
        bytes += key.len() + value.len();
        pairs.push((key.to_vec(), value.to_vec()));
        if bytes >= COPY_BYTES {
            result = put_all(&copy, &pairs, INCOMPLETE);
            pairs.clear();
            bytes = 0;
        }
        if result.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    result?;
    put_all(&copy, &pairs, applied)?;
    let mut found = Sum::default();
    copy.scan(&every_key(), &mut |key, value| {
        found.add(key, value);
        ControlFlow::Continue(())
    })?;
    if found != sum {
        return Err(reads_back_differently(&staged));
    }
    put_in_place(env, &staged, path)?;
    Ok(Arc::new(copy))
}

fn put_all(state: &RedbState, pairs: &[Pair], applied: Applied) -> Result<(), StateError> {
    state.apply(&mut pairs.iter().map(|(key, value)| (key.as_slice(), Some(value.as_slice()))), applied)
}

/// A running checksum over keys and values in order.
#[derive(Debug, Default, PartialEq, Eq)]
struct Sum {
    pairs: u64,
    crc: u32,
}

impl Sum {
    fn add(&mut self, key: &[u8], value: &[u8]) {
        self.pairs += 1;
        self.crc = self.crc.rotate_left(1) ^ crc32c(key) ^ crc32c(value).rotate_left(7);
    }
}

impl State for MirroredState {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, StateError> {
        self.read(|state| state.get(key))
    }

    fn scan(&self, range: &KeyRange, visit: &mut Visit<'_>) -> Result<(), StateError> {
        // A scan that fails half way continues on the next replica behind the last visited key.
        let visit = std::cell::RefCell::new(visit);
        let from = std::cell::RefCell::new(range.0.clone());
        self.read(|state| {
            let rest = (from.borrow().clone(), range.1.clone());
            state.scan(&rest, &mut |key, value| {
                let mut next = from.borrow_mut();
                next.clear();
                next.extend_from_slice(key);
                next.push(0);
                drop(next);
                (visit.borrow_mut())(key, value)
            })
        })
    }

    fn last(&self, range: &KeyRange) -> Result<Option<Pair>, StateError> {
        self.read(|state| state.last(range))
    }

    fn apply(
        &self,
        changes: &mut dyn Iterator<Item = (&[u8], Option<&[u8]>)>,
        applied: Applied,
    ) -> Result<(), StateError> {
        let changes: Vec<_> = changes.collect();
        let mut joining = self.joining.lock().expect("no holder of this lock panics");
        let mut done = 0;
        let mut failures = Vec::new();
        for replica in &self.replicas {
            let Some(state) = replica.healthy() else { continue };
            match state.apply(&mut changes.iter().copied(), applied) {
                Ok(()) => done += 1,
                Err(error) => failures.push((replica, error)),
            }
        }
        if done > 0
            && let Some(copy) = &*joining
            && let Err(error) = copy.apply(&mut changes.iter().copied(), INCOMPLETE)
        {
            tracing::warn!(%error, "replica of the metadata store cannot be made anew");
            *joining = None;
        }
        // If a disk is full the change is retried later: applying it again on the other replicas does no harm.
        if let Some((_, error)) = failures.iter().find(|(_, error)| matches!(error, StateError::NoSpace(_))) {
            return Err(error.clone());
        }
        if done > 0 {
            failures.iter().for_each(|(replica, error)| replica.lose(error));
            return Ok(());
        }
        Err(failures
            .pop()
            .map_or_else(|| StateError::Failed("no replica is left".to_owned()), |(_, error)| error))
    }

    fn applied(&self) -> Result<Applied, StateError> {
        Ok(self.positions()?.into_iter().min_by_key(|applied| applied.seq).unwrap_or_default())
    }

    fn newest(&self) -> Result<Applied, StateError> {
        Ok(self.positions()?.into_iter().max_by_key(|applied| applied.seq).unwrap_or_default())
    }

    fn snapshot(&self) -> Result<Arc<dyn State>, StateError> {
        self.read(|state| state.snapshot())
    }
}
