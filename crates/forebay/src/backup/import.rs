//! `meta import`: the stores of all ledgers are made anew from a backup, in the directory of a node that does not run.
//!
//! Everything is made beside its place first. Then a file says that an import is under way, and no node starts here until it is gone: what
//! was there is put aside, and what was made gets its place. An import that did not end is given again, and begins anew.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use base::env::Env;
use base::{LedgerId, Seq};
use control::{CONTROL_LEDGER, Cluster, Control, Plan};
use meta::history::{Evidence, Older};
use meta::log::{CopyIo, FileLog, LedgerLog as _, MirrorOptions, MirroredLog};
use meta::state::{Applied, MemState, MirroredState, State, WholeLog};
use serde::Serialize;

use super::export::cluster_of;
use super::file::{BackupReader, FromFile, Heading, Rows, Section, Totals};
use super::{LedgerInfo, Tell, ledger_info};
use crate::identity::IdentityFiles;
use crate::node::{CONTROL_CACHE_BYTES, MetaDirs, NodeDir, STORE, hold_dir, is_locked};

/// Where stores are made, below a directory with metadata.
const STAGED: &str = "import";
/// Bytes that are written to a store at a time, and its page cache.
const APPLY_BYTES: usize = 16 << 20;
const CACHE_BYTES: usize = 64 << 20;

/// What begins the logs of the ledgers after an import.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Next {
    /// The import did: the node is started.
    Start,
    /// `cluster recover` does: an engine had them.
    Recover,
}

/// What was found in a backup, and done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Imported {
    /// The cluster.
    pub(crate) cluster: String,
    /// When the backup was begun, in seconds of Unix time.
    pub(crate) made_s: i64,
    /// What each ledger has.
    pub(crate) ledgers: Vec<LedgerInfo>,
    /// The next step.
    pub(crate) next: Next,
    /// What the node lacks that no backup has.
    pub(crate) lacks: Vec<String>,
    /// Whether the metadata of the node is that of the backup now.
    pub(crate) done: bool,
    /// Where the metadata is that was there before.
    pub(crate) aside: Vec<PathBuf>,
}

/// Checks a backup, and makes the metadata of a node from it if that is asked for. Before the last step, what was there is there, or the
/// node does not start.
pub(crate) async fn import(
    env: &Env,
    dir: &NodeDir,
    path: &Path,
    yes: bool,
    tell: &mut Tell<'_>,
) -> Result<Imported> {
    if env.files.exists(&dir.client_json()) {
        bail!("{} is of a client, which has no metadata", dir.root().display());
    }
    let _lock = match yes {
        true => Some(hold_dir(env, dir)?),
        false if is_locked(env, dir) => bail!("node is running: dir={}", dir.root().display()),
        false => None,
    };
    let unusable = || format!("{} cannot be imported", path.display());
    let checked = Checked::read(env, path, tell).with_context(unusable)?;
    let next = checked.next_step(env, dir).with_context(unusable)?;
    let lacks = [dir.node_key()].into_iter().filter(|path| !env.files.exists(path));
    let ledgers = checked.ledgers.iter();
    let mut imported = Imported {
        cluster: checked.heading.cluster.to_string(),
        made_s: checked.heading.made_s,
        ledgers: ledgers
            .map(|(ledger, (at, totals))| ledger_info(&checked.cluster, *ledger, *at, *totals))
            .collect(),
        next,
        lacks: lacks.map(|path| path.display().to_string()).collect(),
        done: false,
        aside: Vec::new(),
    };
    if yes {
        imported.aside = put(env, dir, path, next, tell).await?;
        imported.done = true;
    }
    Ok(imported)
}

/// A backup that is whole.
struct Checked {
    heading: Heading,
    ledgers: BTreeMap<LedgerId, (Applied, Totals)>,
    cluster: Cluster,
}

impl Checked {
    /// Reads all of a backup, and checks it.
    fn read(env: &Env, path: &Path, tell: &mut Tell<'_>) -> Result<Self> {
        let file = FromFile::open(env, path)?;
        let (len, mut reader) = (file.len(), BackupReader::new(file)?);
        let (heading, mut ledgers) = (reader.heading(), BTreeMap::new());
        let (state, mut open) = (Arc::new(MemState::default()), (CONTROL_LEDGER, Applied::default()));
        while let Some(section) = reader.next()? {
            match section {
                Section::Ledger(ledger, at) => open = (ledger, at),
                Section::Rows(rows) if open.0 == CONTROL_LEDGER => apply(&*state, &rows, open.1)?,
                Section::Rows(_) | Section::End(_) => {}
                Section::LedgerEnd(totals) => drop(ledgers.insert(open.0, (open.1, totals))),
            }
            tell(reader.at(), Some(len));
        }
        let cluster = cluster_of(state).context("its records of the cluster cannot be used")?;
        if cluster.record.id != heading.cluster {
            bail!("its records are of cluster {}, and it says {}", cluster.record.id, heading.cluster);
        }
        let lacking = cluster.filesystems.values().find(|record| !ledgers.contains_key(&record.ledger));
        if let Some(record) = lacking {
            bail!("it lacks the metadata of filesystem {}", record.name);
        }
        Ok(Self { heading, ledgers, cluster })
    }

    /// What is to be done after the import. Fails if the directory is not that of a node which may own this cluster's metadata.
    fn next_step(&self, env: &Env, dir: &NodeDir) -> Result<Next> {
        let (identity, shown) = (IdentityFiles::new(env, dir), dir.root().display());
        let record = &self.cluster.record;
        if let Some(membership) = identity.membership()? {
            if membership.cluster != record.id {
                bail!("{shown} is of cluster {}, and it is of cluster {}", membership.cluster, record.id);
            }
            if membership.log.is_none() {
                bail!("the metadata of this cluster belongs to its first node: import there");
            }
            if !self.cluster.may_own(membership.node) {
                bail!("only the first three nodes of the cluster may have its metadata: import there");
            }
            return Ok(Next::Recover);
        }
        if !record.log.is_empty() {
            bail!(
                "an engine had the logs of cluster {}, and {shown} is no node of it: import at a node that has joined it \
                 (its `identity`, from a copy, makes {shown} that)",
                record.id
            );
        }
        match identity.authorities()? {
            Some(known) if known == record.authorities => Ok(Next::Start),
            Some(_) => bail!("{shown} is of another cluster than {}", record.id),
            None => bail!(
                "{shown} has no keys of cluster {}: put its `identity` and `node.key` back there, from a copy; no backup of \
                 metadata has them",
                record.id
            ),
        }
    }
}

fn apply(state: &dyn State, rows: &Rows, at: Applied) -> Result<()> {
    let mut pairs = rows.iter().map(|(key, value)| (&key[..], Some(&value[..])));
    Ok(state.apply(&mut pairs, at)?)
}

/// Puts the metadata of a backup in the place of what is there. Returns where that is now.
async fn put(env: &Env, dir: &NodeDir, path: &Path, next: Next, tell: &mut Tell<'_>) -> Result<Vec<PathBuf>> {
    let mut meta_dirs = MetaDirs::load_for_import(env, dir)?;
    let there = meta_dirs.there();
    let dirs = if there.is_empty() { vec![dir.meta()] } else { there };
    let (place, files) = (&dirs[0], &env.files);
    let staged = place.join(STAGED);
    clear(env, &staged)?;
    let ledgers = build(env, &staged, path, next, tell)?;
    if next == Next::Start {
        note_lost_end(env, &staged).await?;
    }
    let mark = dir.meta_import();
    let begun = files.write_atomic(&mark, b"an import of metadata has not ended\n");
    begun.with_context(|| format!("cannot write {}", mark.display()))?;
    let aside = put_aside(env, &dirs)?;
    meta_dirs.put_in(&dirs)?;
    for ledger in ledgers {
        let (from, to) = (NodeDir::ledger_in(&staged, ledger), NodeDir::ledger_in(place, ledger));
        files.rename(&from, &to).with_context(|| format!("cannot make {}", to.display()))?;
    }
    files.sync_dir(place).with_context(|| format!("cannot write {}", place.display()))?;
    clear(env, &staged)?;
    let ended = files.remove_file(&mark).and_then(|()| files.sync_dir(dir.root()));
    ended.with_context(|| format!("cannot remove {}", mark.display()))?;
    Ok(aside)
}

/// Removes what an earlier import has made.
fn clear(env: &Env, staged: &Path) -> Result<()> {
    if !env.files.exists(staged) {
        return Ok(());
    }
    std::fs::remove_dir_all(staged).with_context(|| format!("cannot remove {}", staged.display()))
}

/// Makes a store of each ledger, and a log where logs are files. Returns the ledgers.
fn build(env: &Env, staged: &Path, path: &Path, next: Next, tell: &mut Tell<'_>) -> Result<Vec<LedgerId>> {
    let file = FromFile::open(env, path)?;
    let (len, mut reader) = (file.len(), BackupReader::new(file)?);
    let (mut ledgers, mut open) = (Vec::new(), None);
    while let Some(section) = reader.next()? {
        match (section, &mut open) {
            (Section::Ledger(ledger, at), open) => {
                ledgers.push(ledger);
                *open = Some(Building::begin(env, NodeDir::ledger_in(staged, ledger), at)?);
            }
            (Section::Rows(rows), Some(building)) => building.add(rows)?,
            (Section::LedgerEnd(_), open) => {
                if let Some(building) = open.take() {
                    building.finish(env, next)?;
                }
            }
            (Section::Rows(_) | Section::End(_), _) => {}
        }
        tell(reader.at(), Some(len));
    }
    env.files.sync_dir(staged).with_context(|| format!("cannot write {}", staged.display()))?;
    Ok(ledgers)
}

/// A ledger whose store is made.
struct Building {
    dir: PathBuf,
    at: Applied,
    state: MirroredState,
    rows: Rows,
    bytes: usize,
}

impl Building {
    fn begin(env: &Env, dir: PathBuf, at: Applied) -> Result<Self> {
        env.files.create_dir_all(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let state = MirroredState::open(env, &[dir.join(STORE)], CACHE_BYTES, Seq(0), WholeLog::No)?;
        Ok(Self { dir, at, state, rows: Rows::new(), bytes: 0 })
    }

    /// The store is at no position before all is there.
    fn add(&mut self, rows: Rows) -> Result<()> {
        self.bytes += rows.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>();
        self.rows.extend(rows);
        if self.bytes >= APPLY_BYTES { self.flush(Applied::default()) } else { Ok(()) }
    }

    fn flush(&mut self, at: Applied) -> Result<()> {
        self.bytes = 0;
        apply(&self.state, &std::mem::take(&mut self.rows), at)
            .with_context(|| format!("cannot write {}", self.dir.display()))
    }

    fn finish(mut self, env: &Env, next: Next) -> Result<()> {
        self.flush(self.at)?;
        if next == Next::Start {
            FileLog::begin(env, &self.dir.join("log"), (self.at.epoch, self.at.seq))?;
        }
        env.files.sync_dir(&self.dir).with_context(|| format!("cannot write {}", self.dir.display()))
    }
}

/// Notes in the control ledger, as its next owner, that the ledgers are older ones: numbers that the lost ones may have given are skipped.
async fn note_lost_end(env: &Env, staged: &Path) -> Result<()> {
    let ledger = NodeDir::ledger_in(staged, CONTROL_LEDGER);
    let options = MirrorOptions { io: CopyIo::Inline, ..MirrorOptions::default() };
    let log = MirroredLog::open(env, &[ledger.join("log")], options)?;
    let (first, whole) = (log.first(), log.whole());
    let state = MirroredState::open(env, &[ledger.join(STORE)], CONTROL_CACHE_BYTES, first, whole)?;
    let control = Control::open(env, Arc::new(log), Arc::new(state), None).await?;
    control.begin(env, &Evidence { older: Older::Certain, ..Evidence::default() }).await?;
    let decide = |plan: &mut Plan| -> Result<()> {
        plan.lose_end();
        Ok(())
    };
    control.plan(decide).await
}

/// Puts all ledgers in these directories aside. Returns where they are.
fn put_aside(env: &Env, dirs: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let files = &env.files;
    let name = |number: u32| format!("former-{number}");
    let is_free = |number: &u32| !dirs.iter().any(|dir| files.exists(&dir.join(name(*number))));
    let number = (1..).find(is_free).context("there are too many former ones")?;
    let mut aside = Vec::new();
    for dir in dirs.iter().filter(|dir| files.exists(dir)) {
        let shown = || format!("cannot put aside what is in {}", dir.display());
        let is_ledger = |path: &PathBuf| {
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("ledger-"))
        };
        let ledgers: Vec<PathBuf> =
            files.list(dir).with_context(shown)?.into_iter().filter(is_ledger).collect();
        if ledgers.is_empty() {
            continue;
        }
        let former = dir.join(name(number));
        files.create_dir_all(&former).with_context(shown)?;
        for ledger in ledgers {
            let name = ledger.file_name().context("a ledger has a name")?;
            files.rename(&ledger, &former.join(name)).with_context(shown)?;
        }
        files.sync_dir(&former).and_then(|()| files.sync_dir(dir)).with_context(shown)?;
        aside.push(former);
    }
    Ok(aside)
}
