//! Directories of the node's metadata: one to three, each with a copy of every ledger.
//!
//! The list is kept in the node's directory, so that a start needs no `--meta-dir`. A marker in each directory
//! distinguishes it from an empty mount point whose disk is not mounted. Where an engine has the logs, the directories have the
//! local stores only.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use admin::{MetaCopyInfo, MetaDir, NodeStatus};
use anyhow::{Context, Result, bail};
use base::env::{Caching, Env, OpenMode};
use base::{Epoch, LedgerId, Seq};
use control::CONTROL_LEDGER;
use meta::Keeper;
use meta::log::{CopyIo, CopyState, FileLog, LedgerLog, MirrorOptions, MirroredLog, StaleCopies};
use meta::state::{MirroredState, Remade, RemadeFrom, StateError, WholeLog};
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;
use wire::event::Severity;

use super::events::Happened;
use super::start::{CONTROL_CACHE_BYTES, refuse_half_import};
use super::{Node, NodeDir, State};
use crate::engine::Engine;

/// Limit of directories, and so of copies of each ledger.
const DIRS_MAX: usize = 3;
/// Number of directories with a local store; the others have logs only.
const STORES_MAX: usize = 2;
const MARKER: &str = "forebay-meta";
/// The local store of a ledger, and the file beside it with the number of the attempt that brought its log to the engine.
pub(crate) const STORE: &str = "state.redb";
const NUMBER: &str = "engine";

/// `meta-dirs.json`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Record {
    dirs: Vec<PathBuf>,
    /// Whether a cluster was created in the directories.
    created: bool,
}

/// The directories with metadata.
#[derive(Clone)]
pub(crate) struct MetaDirs {
    env: Env,
    path: PathBuf,
    record: Record,
    stale: StaleCopies,
    /// The engine that has the logs. Otherwise these directories have them.
    engine: Option<EngineLogs>,
}

/// Ledgers whose logs are in an engine. Each is opened once: its standby and its owner use the same local store.
#[derive(Clone)]
struct EngineLogs {
    engine: Engine,
    /// That of the attempt which brought the logs there.
    number: u64,
    runtime: Handle,
    whole: WholeLog,
    open: Arc<Mutex<BTreeMap<LedgerId, LedgerFiles>>>,
}

/// An open ledger on disk.
#[derive(Clone)]
pub(crate) struct LedgerFiles {
    pub(crate) log: Arc<dyn LedgerLog>,
    /// The log as files, if it is not in an engine.
    copies: Option<Arc<MirroredLog>>,
    pub(crate) state: Arc<MirroredState>,
    /// Restores lost replicas of the store.
    _keeper: Arc<Keeper>,
}

impl MetaDirs {
    /// Loads the directories of an existing node and adds those in `asked`; or begins the list of a new node.
    pub(crate) fn load(env: &Env, dir: &NodeDir, asked: &[PathBuf], stale: StaleCopies) -> Result<Self> {
        refuse_half_import(env, dir)?;
        Self::load_any(env, dir, asked, stale)
    }

    /// As [`MetaDirs::load`], also if an import has not ended.
    pub(crate) fn load_for_import(env: &Env, dir: &NodeDir) -> Result<Self> {
        Self::load_any(env, dir, &[], StaleCopies::Refuse)
    }

    fn load_any(env: &Env, dir: &NodeDir, asked: &[PathBuf], stale: StaleCopies) -> Result<Self> {
        let path = dir.meta_dirs();
        let old = env.files.exists(&NodeDir::ledger_in(&dir.meta(), CONTROL_LEDGER));
        let known = if env.files.exists(&path) {
            let bytes = env.files.read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            let record = serde_json::from_slice(&bytes);
            Some(record.with_context(|| format!("cannot read {}", path.display()))?)
        } else {
            old.then(|| Record { dirs: vec![dir.meta()], created: true })
        };
        let mut record = known.clone().unwrap_or(Record { dirs: Vec::new(), created: false });
        for asked in asked {
            let asked =
                std::path::absolute(asked).with_context(|| format!("cannot resolve {}", asked.display()))?;
            if !record.dirs.contains(&asked) {
                mark(env, &asked)?;
                record.dirs.push(asked);
            }
        }
        if record.dirs.is_empty() {
            mark(env, &dir.meta())?;
            record.dirs.push(dir.meta());
        }
        if old && known.is_none_or(|known| known.dirs.contains(&dir.meta())) {
            mark(env, &dir.meta())?;
        }
        let dirs = Self { env: env.clone(), path, record, stale, engine: None };
        dirs.check()?;
        dirs.save()?;
        Ok(dirs)
    }

    /// Removes what an attempt to make a cluster with its logs in an engine has left: a store whose log is elsewhere.
    pub(super) fn forget_attempt(&self) -> Result<()> {
        for dir in &self.record.dirs {
            let ledger = NodeDir::ledger_in(dir, CONTROL_LEDGER);
            let store = ledger.join(STORE);
            if self.env.files.exists(&store) && !self.env.files.exists(&ledger.join("log")) {
                self.env
                    .files
                    .remove_file(&store)
                    .with_context(|| format!("cannot remove {}", store.display()))?;
            }
        }
        Ok(())
    }

    /// The directories of a node of which an engine has the logs. Its requests run on the runtime. `whole` says whether a damaged
    /// store gets everything from the log, or a copy from the owner.
    ///
    /// # Errors
    /// If the engine does not answer.
    pub(crate) async fn with_engine(
        mut self,
        engine: Engine,
        runtime: &Handle,
        whole: WholeLog,
    ) -> Result<Self> {
        let number = engine.number().await?;
        let runtime = runtime.clone();
        self.engine = Some(EngineLogs { engine, number, runtime, whole, open: Arc::default() });
        Ok(self)
    }

    /// The local store of a ledger, also without its log; `None`: there is none here.
    pub(crate) fn store(&self, ledger: LedgerId) -> Result<Option<Arc<MirroredState>>> {
        if let Some(logs) = &self.engine {
            let open = logs.open.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(files) = open.get(&ledger) {
                return Ok(Some(files.state.clone()));
            }
        }
        let stores = self.stores_of(ledger);
        if !stores.iter().any(|store| self.env.files.exists(store)) {
            return Ok(None);
        }
        let state = MirroredState::open(&self.env, &stores, CONTROL_CACHE_BYTES, Seq(0), WholeLog::No);
        let state = state.with_context(|| format!("opening the local store of ledger {ledger}"))?;
        Ok(Some(Arc::new(state)))
    }

    /// The local store of a ledger goes on with the log that the attempt with this number has begun behind its end.
    pub(crate) fn go_on(&self, ledger: LedgerId, number: u64) -> Result<()> {
        let stores = self.stores_of(ledger);
        let there = stores.iter().filter(|store| self.env.files.exists(store));
        there.into_iter().try_for_each(|store| self.note_number(store, number))
    }

    /// The local stores that follow logs of the engine may also go on with those of the attempt with this number, which began them where
    /// they end. With which of both they do, the next start decides.
    pub(crate) fn may_go_on(&self, number: u64) -> Result<()> {
        let Some(logs) = &self.engine else { return Ok(()) };
        for dir in &self.record.dirs {
            for ledger in self.env.files.list(dir).unwrap_or_default() {
                let (store, path) = (ledger.join(STORE), ledger.join(NUMBER));
                if self.env.files.exists(&store)
                    && self.numbers(&path)?.is_some_and(|known| known.contains(&logs.number))
                {
                    self.write_numbers(&path, &[logs.number, number])?;
                }
            }
        }
        Ok(())
    }

    /// Fails if the disk of a directory is not there.
    pub(crate) fn check_all_there(&self) -> Result<()> {
        let is_away = |dir: &&PathBuf| !self.env.files.exists(&dir.join(MARKER));
        match self.record.dirs.iter().find(is_away) {
            Some(away) => bail!(
                "a directory of the metadata is not there: {}; mount its disk, or leave it out (forebay meta remove-dir)",
                away.display()
            ),
            None => Ok(()),
        }
    }

    /// Begins the log of a ledger as files of this node, behind this end. What an earlier attempt has left there goes.
    pub(crate) fn begin_files(&self, ledger: LedgerId, end: (Epoch, Seq)) -> Result<()> {
        self.check_all_there()?;
        // The next start makes the copies in the other directories.
        for (index, dir) in self.ledger_dirs(ledger).into_iter().enumerate() {
            let log = dir.join("log");
            self.env
                .files
                .create_dir_all(&log)
                .with_context(|| format!("cannot create {}", log.display()))?;
            for file in self.env.files.list(&log).with_context(|| format!("cannot read {}", log.display()))? {
                self.env
                    .files
                    .remove_file(&file)
                    .with_context(|| format!("cannot remove {}", file.display()))?;
            }
            if index == 0 {
                FileLog::begin(&self.env, &log, end)
                    .with_context(|| format!("cannot begin {}", log.display()))?;
            }
            self.env.files.sync_dir(&dir).with_context(|| format!("cannot write {}", dir.display()))?;
        }
        Ok(())
    }

    /// The local stores of a ledger.
    fn stores_of(&self, ledger: LedgerId) -> Vec<PathBuf> {
        self.ledger_dirs(ledger).iter().take(STORES_MAX).map(|dir| dir.join(STORE)).collect()
    }

    fn note_number(&self, store: &Path, number: u64) -> Result<()> {
        self.write_numbers(&store.with_file_name(NUMBER), &[number])
    }

    /// The attempts with whose logs the store beside this file may go on; `None`: there is no such file.
    fn numbers(&self, path: &Path) -> Result<Option<Vec<u64>>> {
        if !self.env.files.exists(path) {
            return Ok(None);
        }
        let bytes = self.env.files.read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let lines = String::from_utf8_lossy(&bytes).into_owned();
        Ok(Some(lines.lines().filter_map(|line| u64::from_str_radix(line, 16).ok()).collect()))
    }

    fn write_numbers(&self, path: &Path, numbers: &[u64]) -> Result<()> {
        let lines: String = numbers.iter().map(|number| format!("{number:016x}\n")).collect();
        let written = self.env.files.write_atomic(path, lines.as_bytes());
        written.with_context(|| format!("cannot write {}", path.display()))
    }

    /// Puts a store aside whose log was lost, if the logs were begun anew behind what another node had of them: it may have entries that
    /// are others now.
    fn put_former_aside(&self, store: &Path, number: u64) -> Result<()> {
        let files = &self.env.files;
        if let Some(known) = self.numbers(&store.with_file_name(NUMBER))? {
            if known == [number] {
                return Ok(());
            }
            if !known.contains(&number) && files.exists(store) {
                let aside = store.with_extension("former");
                let shown = aside.display().to_string();
                tracing::warn!(
                    aside = shown,
                    "the logs were recovered: this store is put aside, and made anew"
                );
                files.rename(store, &aside).with_context(|| format!("cannot rename {}", store.display()))?;
            }
        } else if !files.exists(store.parent().unwrap_or(store)) {
            // Its disk is not there.
            return Ok(());
        }
        self.note_number(store, number)
    }

    /// The engine that has the logs.
    pub(crate) fn engine(&self) -> Option<&Engine> {
        self.engine.as_ref().map(|logs| &logs.engine)
    }

    fn check(&self) -> Result<()> {
        let count = self.record.dirs.len();
        if count > DIRS_MAX {
            bail!("too many directories for metadata: dirs={count} most={DIRS_MAX}");
        }
        Ok(())
    }

    fn save(&self) -> Result<()> {
        let bytes =
            serde_json::to_vec_pretty(&self.record).context("encoding the list of metadata directories")?;
        let written = self.env.files.write_atomic(&self.path, &bytes);
        written.with_context(|| format!("cannot write {}", self.path.display()))
    }

    /// The directories that are there.
    pub(crate) fn there(&self) -> Vec<PathBuf> {
        self.record.dirs.iter().filter(|dir| self.env.files.exists(&dir.join(MARKER))).cloned().collect()
    }

    /// The metadata is in these directories from now on.
    pub(crate) fn put_in(&mut self, dirs: &[PathBuf]) -> Result<()> {
        dirs.iter().try_for_each(|dir| mark(&self.env, dir))?;
        self.record = Record { dirs: dirs.to_vec(), created: true };
        self.save()
    }

    /// Whether a cluster was created in these directories.
    pub(super) fn is_created(&self) -> bool {
        self.record.created
    }

    /// Records that a cluster exists: from now on a start that finds none fails.
    pub(super) fn set_created(&mut self) -> Result<()> {
        if self.record.created {
            return Ok(());
        }
        self.record.created = true;
        self.save()
    }

    pub(super) fn paths(&self) -> &[PathBuf] {
        &self.record.dirs
    }

    /// Number of local stores of each ledger.
    pub(super) fn stores(&self) -> usize {
        self.record.dirs.len().min(STORES_MAX)
    }

    /// Adds a directory to the list. The caller makes the copies.
    pub(super) fn add(&mut self, dir: &Path) -> Result<()> {
        if self.record.dirs.iter().any(|known| known == dir) {
            bail!("metadata is there already: dir={}", dir.display());
        }
        if self.record.dirs.len() >= DIRS_MAX {
            bail!("metadata is in {DIRS_MAX} directories already: remove one first");
        }
        mark(&self.env, dir)?;
        self.record.dirs.push(dir.to_owned());
        self.save()
    }

    pub(super) fn remove(&mut self, dir: &Path) -> Result<()> {
        self.record.dirs.retain(|known| known != dir);
        self.save()
    }

    /// The directory of a ledger's copy; created if the disk is mounted.
    pub(super) fn make_ledger_dir(&self, dir: &Path, ledger: LedgerId) -> Result<PathBuf> {
        let path = NodeDir::ledger_in(dir, ledger);
        if self.env.files.exists(&dir.join(MARKER)) {
            let made = self.env.files.create_dir_all(&path).and_then(|()| self.env.files.sync_dir(dir));
            made.with_context(|| format!("cannot create {}", path.display()))?;
        }
        Ok(path)
    }

    /// Opens a ledger, or creates it. Must not run on a thread of the runtime: it waits for disks and the engine.
    pub(super) fn open(&self, ledger: LedgerId, cache_bytes: usize) -> Result<LedgerFiles> {
        match &self.engine {
            Some(logs) => self.open_in_engine(logs, ledger, cache_bytes),
            None => self.open_files(ledger, cache_bytes),
        }
    }

    /// As [`MetaDirs::open`], for a task of the runtime.
    pub(crate) async fn opened(&self, ledger: LedgerId, cache_bytes: usize) -> Result<LedgerFiles> {
        let dirs = self.clone();
        tokio::task::spawn_blocking(move || dirs.open(ledger, cache_bytes)).await?
    }

    fn open_in_engine(&self, logs: &EngineLogs, ledger: LedgerId, cache_bytes: usize) -> Result<LedgerFiles> {
        let mut open = logs.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(files) = open.get(&ledger) {
            return Ok(files.clone());
        }
        let log = logs.runtime.block_on(logs.engine.log(ledger))?;
        let stores = self.stores_of(ledger);
        stores.iter().try_for_each(|store| self.put_former_aside(store, logs.number))?;
        let state = MirroredState::open(&self.env, &stores, cache_bytes, log.first(), logs.whole);
        let state = state.with_context(|| format!("opening the local store of ledger {ledger}"))?;
        let state = Arc::new(state);
        let keeper = Arc::new(state.keep());
        let files = LedgerFiles { log, copies: None, state, _keeper: keeper };
        open.insert(ledger, files.clone());
        Ok(files)
    }

    /// The directory of a ledger in each of these directories, as far as their disks are there.
    fn ledger_dirs(&self, ledger: LedgerId) -> Vec<PathBuf> {
        let make = |dir: &PathBuf| match self.make_ledger_dir(dir, ledger) {
            Ok(path) => path,
            Err(error) => {
                tracing::error!("{error:#}");
                NodeDir::ledger_in(dir, ledger)
            }
        };
        self.record.dirs.iter().map(make).collect()
    }

    fn open_files(&self, ledger: LedgerId, cache_bytes: usize) -> Result<LedgerFiles> {
        let dirs = self.ledger_dirs(ledger);
        let logs: Vec<PathBuf> = dirs.iter().map(|dir| dir.join("log")).collect();
        let options = MirrorOptions { io: CopyIo::Threads, stale: self.stale, ..MirrorOptions::default() };
        let log = Arc::new(MirroredLog::open(&self.env, &logs, options)?);
        let stores: Vec<PathBuf> = dirs.iter().take(STORES_MAX).map(|dir| dir.join(STORE)).collect();
        let state = MirroredState::open(&self.env, &stores, cache_bytes, log.first(), log.whole());
        let state = state.map_err(|error| match error {
            StateError::Damaged(_) => anyhow::Error::new(error)
                .context(format!(
                    "no local store of ledger {ledger} can be used, and its log begins with batch {} and cannot make it \
                     anew: put back state.redb from a copy of {} (see `forebay meta add-dir` for copies that repair \
                     this)",
                    log.first().0,
                    dirs[0].display()
                )),
            error => error.into(),
        })?;
        let state = Arc::new(state);
        let keeper = Arc::new(state.keep());
        Ok(LedgerFiles { log: log.clone(), copies: Some(log), state, _keeper: keeper })
    }
}

/// Writes the marker of a metadata directory.
fn mark(env: &Env, dir: &Path) -> Result<()> {
    let marker = dir.join(MARKER);
    if env.files.exists(&marker) {
        return Ok(());
    }
    env.files.create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let private = rustix::fs::Mode::RWXU;
    rustix::fs::chmod(dir, private).with_context(|| format!("cannot protect {}", dir.display()))?;
    let made = env.files.open(&marker, OpenMode::Create, Caching::Buffered);
    made.and_then(|_| env.files.sync_dir(dir)).with_context(|| format!("cannot write to {}", dir.display()))
}

/// Size of the files in a directory in bytes; a file that disappears during the sum counts 0.
fn files_bytes(env: &Env, dir: &Path) -> u64 {
    let size = |path: PathBuf| {
        let file = env.files.open(&path, OpenMode::Existing, Caching::Buffered).ok()?;
        file.len().ok()
    };
    env.files.list(dir).unwrap_or_default().into_iter().filter_map(size).sum()
}

fn store_problem(reason: &String) -> String {
    format!("local store: {reason}; it is made anew as soon as that works")
}

/// A local store of a ledger whose log is in an engine.
fn store_info(env: &Env, path: &Path, stored: Result<Seq, String>) -> MetaCopyInfo {
    let base = path.parent().unwrap_or(path);
    MetaCopyInfo {
        dir: base.parent().unwrap_or(base).display().to_string(),
        size_bytes: files_bytes(env, base),
        log_complete: true,
        stored_seq: stored.as_ref().ok().map(|seq| seq.0),
        problem: stored.as_ref().err().map(store_problem),
    }
}

impl LedgerFiles {
    /// Each directory, with the problem of its copy.
    pub(super) fn info(&self, env: &Env) -> Vec<MetaCopyInfo> {
        let replicas = self.state.replicas();
        let Some(log) = &self.copies else {
            return replicas
                .into_iter()
                .map(|replica| store_info(env, &replica.path, replica.state))
                .collect();
        };
        let copies = log.copies().into_iter().map(|copy| {
            let base = copy.dir.parent().unwrap_or(&copy.dir).to_owned();
            let replica = replicas.iter().find(|replica| replica.path.parent() == Some(base.as_path()));
            let store = replica.map(|replica| replica.state.clone());
            let log_problem = match copy.state {
                CopyState::InSync => None,
                CopyState::Lost(reason) => Some(format!("log: {reason}")),
            };
            let store_problem = store.as_ref().and_then(|store| store.as_ref().err()).map(store_problem);
            MetaCopyInfo {
                dir: base.parent().unwrap_or(&base).display().to_string(),
                size_bytes: files_bytes(env, &base) + files_bytes(env, &copy.dir),
                log_complete: log_problem.is_none(),
                stored_seq: store.and_then(Result::ok).map(|seq| seq.0),
                problem: log_problem.or(store_problem),
            }
        });
        copies.collect()
    }

    /// Events of local stores that were damaged when they were opened.
    pub(super) fn restored(&self, subject: &str) -> Vec<Happened> {
        let event = |remade: &Remade| {
            let from = match remade.from {
                RemadeFrom::Log => "the log; the damaged file stays beside it as state.damaged",
                RemadeFrom::Replica => "another copy",
            };
            let text = format!("{} was damaged and was made anew from {from}", remade.path.display());
            Happened::new(Severity::Warning, subject, "metadata restored", text)
        };
        self.state.remade().iter().map(event).collect()
    }
}

impl Node {
    /// Makes copies of all ledgers in a further directory. Local stores get their replica at the next start.
    pub(super) async fn add_meta_dir_now(&self, request: MetaDir) -> Result<NodeStatus> {
        let dir = PathBuf::from(request.path);
        let mut state = self.state.lock().await;
        let ledgers = self.ledgers(&state)?;
        // The list is written first: the next start must find a copy that counts.
        state.meta_dirs.add(&dir)?;
        let (meta_dirs, to) = (state.meta_dirs.clone(), dir.clone());
        let copy = move || -> Result<()> {
            for (ledger, log) in &ledgers {
                let path = meta_dirs.make_ledger_dir(&to, *ledger)?.join("log");
                if let Err(error) = log.add(&path) {
                    for (ledger, log) in &ledgers {
                        // A copy that was not made yet cannot be removed.
                        let _ = log.remove(&NodeDir::ledger_in(&to, *ledger).join("log"));
                    }
                    bail!("cannot copy ledger {ledger} to {}: {error}", path.display());
                }
            }
            Ok(())
        };
        let copied = tokio::task::spawn_blocking(copy).await?;
        if copied.is_err() {
            state.meta_dirs.remove(&dir)?;
        }
        drop(state);
        copied?;
        self.status_now().await
    }

    /// Stops using the copies in a directory.
    pub(super) async fn remove_meta_dir_now(&self, request: MetaDir) -> Result<NodeStatus> {
        let dir = PathBuf::from(request.path);
        let mut state = self.state.lock().await;
        if !state.meta_dirs.paths().contains(&dir) {
            bail!("metadata is not there: dir={}", dir.display());
        }
        for (ledger, log) in self.ledgers(&state)? {
            let removed = log.remove(&NodeDir::ledger_in(&dir, ledger).join("log"));
            removed.map_err(|error| anyhow::anyhow!("cannot leave out {}: {error}", dir.display()))?;
        }
        state.meta_dirs.remove(&dir)?;
        drop(state);
        self.status_now().await
    }

    /// The logs of all ledgers.
    fn ledgers(&self, state: &State) -> Result<Vec<(LedgerId, Arc<MirroredLog>)>> {
        let filesystems = state.filesystems.values().map(|entry| (entry.record.ledger, &entry.files));
        let all = std::iter::once((CONTROL_LEDGER, &self.control_files)).chain(filesystems);
        let log = |(ledger, files): (LedgerId, &LedgerFiles)| {
            let log = files
                .copies
                .clone()
                .context("the logs of this cluster are in an engine, not in directories")?;
            Ok((ledger, log))
        };
        all.map(log).collect()
    }
}
