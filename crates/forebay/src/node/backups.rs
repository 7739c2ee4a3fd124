//! Copies of all metadata that the owner of the ledgers makes by itself, in a directory or in an object store.
//!
//! One is written to a file of a fixed name first, and noted before it gets its own: so what an interrupted attempt has left is found, and
//! removed, or taken for a backup if it is whole. The note is not in the copy itself. Names have the time beside the number: metadata that
//! was made anew from a copy gives its numbers again.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use admin::{AdminError, BackupControl, BackupInfo, BackupsInfo, SetBackups};
use anyhow::{Context, Result, bail};
use base::ClusterId;
use base::env::{Caching, Env, OpenMode};
use base::units::{format_duration, format_size};
use bytes::Bytes;
use control::{
    BackupPlace, BackupRecord, BackupsRecord, BegunRecord, ControlError, ControlView, StoreRecord,
};
use tokio::sync::{Notify, watch};
use upkeep::S3Store;
use wire::BoxFuture;
use wire::store::{ObjectStore as _, StoreError};

use super::Node;
use super::management::failed;
use crate::backup;

/// How often the owner looks whether one is due, and how long it rests after a failure.
const LOOK: Duration = Duration::from_secs(3);
const REST: Duration = Duration::from_secs(60);
/// The usual time from one to the next, and how many are kept.
const EVERY_S: u64 = 6 * 3600;
const KEEP: u32 = 28;
const EVERY_S_MIN: u64 = 60;
const EVERY_S_MAX: u64 = 30 * 86_400;
const KEEP_MAX: u32 = 1000;
/// Bytes of an object.
const PART_BYTES: u64 = 64 << 20;
/// What must stay free on the disk of the node's directory beside a copy that is on its way to a store.
const ROOM_BYTES: u64 = 1 << 30;
/// Attempts to change the plan.
const ATTEMPTS: u32 = 5;
/// The file that becomes a backup.
const DRAFT: &str = "forebay-backup.tmp";
/// How long a directory may take to tell what is in it.
const DIRECTORY_PATIENCE: Duration = Duration::from_secs(10);
/// A backup that is later than twice its time, and this, is a problem.
const LATE_S: u64 = 600;
/// How a store is named as a place.
const STORE: &str = "store:";

/// Makes backups until the node stops.
pub(super) async fn run(node: Weak<Node>, mut stopped: watch::Receiver<bool>, asked: Arc<Notify>) {
    let mut pause = LOOK;
    loop {
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = asked.notified() => {}
            _ = stopped.wait_for(|stop| *stop) => return,
        }
        let Some(node) = node.upgrade() else { return };
        let (runtime, mut stop) = (node.runtime.clone(), stopped.clone());
        // Files are written on a thread that may wait for them. If it waits for ever, nobody waits for it.
        let attempt = move || {
            let attempt = async {
                tokio::select! {
                    done = node.back_up_if_due() => node.note_backup(&done),
                    _ = stop.wait_for(|stop| *stop) => LOOK,
                }
            };
            runtime.block_on(attempt)
        };
        pause = tokio::select! {
            pause = tokio::task::spawn_blocking(attempt) => pause.unwrap_or(REST),
            _ = stopped.wait_for(|stop| *stop) => return,
        };
    }
}

fn name_of(cluster: ClusterId, backup: &BackupRecord) -> String {
    let cluster = cluster.to_string();
    let BackupRecord { number, begun_s, .. } = backup;
    format!("forebay-{}-{number:06}-{begun_s:08x}.backup", cluster.get(..8).unwrap_or(&cluster))
}

fn key_of(name: &str, part: u32) -> String {
    format!("metadata/{name}/{part:05}")
}

/// The file that becomes a backup. It is gone at the end, unless it has another name then.
struct Draft {
    env: Env,
    path: PathBuf,
}

impl Draft {
    fn of(env: &Env, directory: &Path) -> Self {
        Self { env: env.clone(), path: directory.join(DRAFT) }
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // An export writes beside it first.
        let staged = self.path.with_extension("tmp.new");
        for path in [&self.path, &staged].into_iter().filter(|path| self.env.files.exists(path)) {
            if let Err(error) = self.env.files.remove_file(path) {
                tracing::warn!(%error, path = %path.display(), "a copy of the metadata is left behind");
            }
        }
    }
}

impl Node {
    /// Notes how an attempt ended. Returns how long to wait before the next look.
    fn note_backup(&self, done: &Result<()>) -> Duration {
        let problem = done.as_ref().err().map(|error| format!("{error:#}"));
        if let Some(error) = &problem {
            tracing::error!(error, "the metadata is not backed up, trying again");
        }
        let pause = if problem.is_some() { REST / super::filesystems::haste() } else { LOOK };
        *self.backup_problem.lock().unwrap_or_else(PoisonError::into_inner) = problem;
        pause
    }

    fn now_s(&self) -> i64 {
        self.env.clock.wall_ns() / 1_000_000_000
    }

    async fn back_up_if_due(&self) -> Result<()> {
        let Some(mut record) = self.view()?.backups()? else { return Ok(()) };
        let is_due = record.is_due(self.now_s());
        if is_due || record.off {
            self.settle_begun(&mut record).await.context("looking at what an interrupted backup has left")?;
        }
        if is_due { self.back_up(record).await } else { Ok(()) }
    }

    /// Takes an interrupted backup for one that was made, if it is whole, and removes what is there of it if not.
    async fn settle_begun(&self, record: &mut BackupsRecord) -> Result<()> {
        let Some(BegunRecord { at, backup }) = record.begun.clone() else { return Ok(()) };
        if self.is_whole(&at, &backup).await? {
            // At another place it stays, as those before it do.
            if at == record.to && !record.made.contains(&backup) {
                record.made.push(backup);
            }
        } else {
            self.remove_backup(&at, &backup).await?;
        }
        record.begun = None;
        self.keep_backups(record).await
    }

    /// Makes one, and removes the oldest ones that are too many.
    async fn back_up(&self, mut record: BackupsRecord) -> Result<()> {
        let (begun_s, number, asked) = (self.now_s(), record.next, record.asked);
        let (to, here) = (record.to.clone(), self.dir.root().to_path_buf());
        let directory = match &to {
            BackupPlace::Directory(directory) => PathBuf::from(directory),
            BackupPlace::Store(_) => here,
        };
        self.check_place(&record).await?;
        let draft = Draft::of(&self.env, &directory);
        let exported = backup::export(&self.env, &self.dir, &draft.path, true, &mut |_, _| {}).await;
        let bytes = exported.with_context(|| format!("writing {}", draft.path.display()))?.file_bytes;
        let parts = u32::try_from(bytes.div_ceil(PART_BYTES)).context("the metadata is too large")?;
        let made = BackupRecord { number, begun_s, bytes, parts };
        record.next += 1;
        record.begun = Some(BegunRecord { at: to.clone(), backup: made.clone() });
        self.keep_backups(&mut record).await?;
        let name = name_of(self.cluster, &made);
        match &to {
            BackupPlace::Directory(_) => {
                let renamed = self.env.files.rename(&draft.path, &directory.join(&name));
                renamed
                    .and_then(|()| self.env.files.sync_dir(&directory))
                    .with_context(|| format!("cannot make {name} in {}", directory.display()))?;
            }
            BackupPlace::Store(id) => {
                let store = self.backup_store(*id)?.with_context(|| format!("store {id} is gone"))?;
                self.upload(&store, &draft.path, (&name, bytes), &record).await?;
            }
        }
        drop(draft);
        tracing::info!(number, bytes, "the metadata is backed up");
        (record.served, record.begun) = (asked, None);
        record.made.push(made);
        self.keep_backups(&mut record).await?;
        while let Some(oldest) = record.surplus().cloned() {
            self.remove_backup(&to, &oldest).await.context("removing the oldest backup")?;
            record.made.remove(0);
            self.keep_backups(&mut record).await?;
        }
        Ok(())
    }

    /// Fails before an export that would be at the wrong place, or fill the disk on which the metadata is.
    async fn check_place(&self, record: &BackupsRecord) -> Result<()> {
        if let BackupPlace::Directory(directory) = &record.to {
            let last = record.made.last().map(|last| Path::new(directory).join(name_of(self.cluster, last)));
            if let Some(last) = last.filter(|last| !self.env.files.exists(last)) {
                bail!(
                    "{} is not there at node {}: all machines that may own the metadata need the same directory; if you removed it, give \
                     the directory again (--to)",
                    last.display(),
                    self.here()
                );
            }
            return Ok(());
        }
        let copies = {
            let state = self.state.lock().await;
            let files = state.filesystems.values().map(|entry| &entry.files).chain([&self.control_files]);
            files.flat_map(|files| files.info(&self.env)).map(|copy| copy.size_bytes).sum::<u64>()
        };
        let free = self.env.files.free_bytes(self.dir.root()).context("looking at the free space")?;
        if free < copies + ROOM_BYTES {
            bail!(
                "no room in {} for a copy on its way to the store: free={} needed={}",
                self.dir.root().display(),
                format_size(free),
                format_size(copies + ROOM_BYTES)
            );
        }
        Ok(())
    }

    /// Sends a file to a store, in parts, as long as the plan stays what it is.
    async fn upload(
        &self,
        store: &S3Store,
        path: &Path,
        (name, bytes): (&str, u64),
        record: &BackupsRecord,
    ) -> Result<()> {
        let file = self.env.files.open(path, OpenMode::Existing, Caching::Buffered)?;
        for part in 0..bytes.div_ceil(PART_BYTES) {
            self.planned(record)?;
            let at = part * PART_BYTES;
            let mut content = vec![0; (bytes - at).min(PART_BYTES) as usize];
            file.read_at(&mut content, at).context("reading the local copy")?;
            let key = key_of(name, part as u32);
            let sent = store.put(key.clone(), vec![Bytes::from(content)].into()).await;
            sent.with_context(|| format!("sending {key}"))?;
        }
        Ok(())
    }

    /// The store, if there still is one.
    fn backup_store(&self, id: u32) -> Result<Option<Arc<S3Store>>> {
        let record = self.view()?.stores()?.into_iter().find(|record| record.id == id);
        record.map(|record| self.reach(&record).map_err(anyhow::Error::msg)).transpose()
    }

    /// Whether a backup that was begun has arrived whole. Its parts are sent in their order.
    async fn is_whole(&self, at: &BackupPlace, backup: &BackupRecord) -> Result<bool> {
        let name = name_of(self.cluster, backup);
        match at {
            BackupPlace::Directory(directory) => Ok(self.env.files.exists(&Path::new(directory).join(name))),
            BackupPlace::Store(id) => {
                let Some(store) = self.backup_store(*id)? else { return Ok(false) };
                let last = u64::from(backup.parts.saturating_sub(1));
                let end = backup.bytes - last * PART_BYTES;
                match store.get(key_of(&name, last as u32), Some(end - 1..end)).await {
                    Ok(_) => Ok(true),
                    Err(StoreError::NotFound(_)) => Ok(false),
                    Err(error) => Err(error.into()),
                }
            }
        }
    }

    async fn remove_backup(&self, from: &BackupPlace, backup: &BackupRecord) -> Result<()> {
        let name = name_of(self.cluster, backup);
        match from {
            BackupPlace::Directory(directory) => {
                let path = Path::new(directory).join(name);
                if self.env.files.exists(&path) {
                    let removed = self.env.files.remove_file(&path);
                    removed.with_context(|| format!("cannot remove {}", path.display()))?;
                }
                Ok(())
            }
            BackupPlace::Store(id) => {
                let Some(store) = self.backup_store(*id)? else {
                    tracing::warn!(name, store = id, "its store was removed: a backup is left behind");
                    return Ok(());
                };
                for part in 0..backup.parts {
                    let removed = store.delete(key_of(&name, part)).await;
                    removed.with_context(|| format!("removing part {part} of {name}"))?;
                }
                Ok(())
            }
        }
    }

    /// The view and the record in it, unless the plan is another one now.
    fn planned(&self, record: &BackupsRecord) -> Result<(ControlView, BackupsRecord)> {
        let view = self.view()?;
        let now = view.backups()?.filter(|now| now.is_same_plan(record));
        Ok((view, now.context("the plan of backups was changed")?))
    }

    /// Takes note of how far they are, unless the plan was changed in the meantime.
    async fn keep_backups(&self, record: &mut BackupsRecord) -> Result<()> {
        let (view, now) = self.planned(record)?;
        // Somebody may have asked since.
        record.asked = now.asked;
        let mut change = view.change();
        change.backups(record);
        Ok(self.control.commit(change).await?)
    }

    fn place_text(&self, place: &BackupPlace) -> String {
        match place {
            BackupPlace::Directory(directory) => directory.clone(),
            BackupPlace::Store(id) => {
                let stores = self.view().ok().and_then(|view| view.stores().ok()).unwrap_or_default();
                let store = stores.into_iter().find(|store| store.id == *id);
                format!("{STORE}{}", store.map_or_else(|| id.to_string(), |store| store.name))
            }
        }
    }

    /// The backups of the cluster, if there is a plan of them.
    pub(super) fn backups_info(&self) -> Result<Option<BackupsInfo>, AdminError> {
        let Some(record) = self.view()?.backups().map_err(AdminError::failed)? else { return Ok(None) };
        let now_s = self.now_s();
        let info = |made: &BackupRecord| BackupInfo {
            name: name_of(self.cluster, made),
            begun_s: made.begun_s,
            age_s: u64::try_from(now_s - made.begun_s).unwrap_or(0),
            size_bytes: made.bytes,
        };
        Ok(Some(BackupsInfo {
            to: self.place_text(&record.to),
            every_s: record.every_s,
            keep: record.keep,
            off: record.off,
            due: record.is_due(now_s),
            begun: record.begun.as_ref().map(|begun| info(&begun.backup)),
            made: record.made.iter().map(info).collect(),
            problem: self.backup_problem.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }))
    }

    async fn set_backups_now(&self, request: SetBackups) -> Result<Option<BackupsInfo>, AdminError> {
        let files = match request.to.as_deref().filter(|to| !to.starts_with(STORE)) {
            Some(directory) => self.files_in(directory).await?,
            None => BTreeSet::new(),
        };
        let _no_store_goes = self.stores_lock.lock().await;
        let mut attempt = 1;
        loop {
            let view = self.view()?;
            let before = view.backups().map_err(AdminError::failed)?;
            let mut change = view.change();
            change.backups(&self.next_backups(before, &request, &files)?);
            match self.control.commit(change).await {
                // One that is being made notes how far it is.
                Err(ControlError::Conflict) if attempt < ATTEMPTS => attempt += 1,
                done => break done.map_err(|error| failed(error.into()))?,
            }
        }
        self.note_backup(&Ok(()));
        self.backup_asked.notify_one();
        self.backups_info()
    }

    /// The plan as it should be next. `files` are those in the directory that is given.
    fn next_backups(
        &self,
        before: Option<BackupsRecord>,
        request: &SetBackups,
        files: &BTreeSet<PathBuf>,
    ) -> Result<BackupsRecord, AdminError> {
        let to = request.to.as_ref().map(|to| self.backup_place(to)).transpose()?;
        let mut record = match (before, &to) {
            (Some(before), _) => before,
            (None, Some(to)) => BackupsRecord {
                every_s: EVERY_S,
                keep: KEEP,
                to: to.clone(),
                next: 1,
                off: false,
                asked: 0,
                served: 0,
                begun: None,
                made: Vec::new(),
            },
            (None, None) => {
                return Err(AdminError::invalid(
                    "no backups are made yet: say where they go (--to store:NAME or --to DIRECTORY)",
                ));
            }
        };
        record.every_s = request.every_s.unwrap_or(record.every_s);
        record.keep = request.keep.unwrap_or(record.keep);
        record.asked += u64::from(request.now);
        record.off = request.off || record.off && !request.now && to.is_none();
        if !(EVERY_S_MIN..=EVERY_S_MAX).contains(&record.every_s) || !(1..=KEEP_MAX).contains(&record.keep) {
            return Err(AdminError::invalid(format!(
                "a backup is made each minute to each 30 days, and 1 to {KEEP_MAX} are kept: every={} keep={}",
                format_duration(record.every_s),
                record.keep
            )));
        }
        if let Some(to) = to {
            let last = record.made.last().map(|last| PathBuf::from(name_of(self.cluster, last)));
            let is_gone =
                matches!(to, BackupPlace::Directory(_)) && last.is_some_and(|last| !files.contains(&last));
            if to != record.to || is_gone {
                // What is at the earlier place stays there.
                (record.to, record.made) = (to, Vec::new());
            }
        }
        Ok(record)
    }

    fn backup_place(&self, text: &str) -> Result<BackupPlace, AdminError> {
        match text.strip_prefix(STORE) {
            Some(name) => Ok(BackupPlace::Store(self.store_record(name)?.id)),
            None => Ok(BackupPlace::Directory(text.to_owned())),
        }
    }

    /// The names in a directory of this machine, which may hang.
    async fn files_in(&self, directory: &str) -> Result<BTreeSet<PathBuf>, AdminError> {
        let path = PathBuf::from(directory);
        if !path.is_absolute() {
            return Err(AdminError::invalid(format!(
                "neither {STORE}NAME nor an absolute path: {directory}"
            )));
        }
        let env = self.env.clone();
        let listed = tokio::task::spawn_blocking(move || env.files.list(&path));
        let Ok(Ok(Ok(listed))) = tokio::time::timeout(DIRECTORY_PATIENCE, listed).await else {
            return Err(AdminError::invalid(format!(
                "no such directory at node {}, which owns the metadata: {directory}",
                self.here()
            )));
        };
        Ok(listed.iter().filter_map(|path| path.file_name()).map(PathBuf::from).collect())
    }

    /// Refuses to move a store with backups of the metadata: they are not at the new place.
    pub(super) fn check_has_no_backups(&self, store: &StoreRecord) -> Result<(), AdminError> {
        let backups = self.view()?.backups().map_err(AdminError::failed)?;
        let has = |backups: BackupsRecord| {
            let at = BackupPlace::Store(store.id);
            let is_begun = backups.begun.is_some_and(|begun| begun.at == at);
            is_begun || backups.to == at && (!backups.off || !backups.made.is_empty())
        };
        if !backups.is_some_and(has) {
            return Ok(());
        }
        Err(AdminError::conflict(format!(
            "store {} has backups of the metadata, which would not be at the other place: let them go elsewhere first (forebay meta \
             schedule --to)",
            store.name
        )))
    }

    /// Refuses to remove a store to which backups of the metadata go.
    pub(super) fn check_gets_no_backups(&self, store: &StoreRecord) -> Result<(), AdminError> {
        let backups = self.view()?.backups().map_err(AdminError::failed)?;
        if backups.is_some_and(|backups| !backups.off && backups.to == BackupPlace::Store(store.id)) {
            return Err(AdminError::conflict(format!(
                "store {} gets the backups of the metadata: end that first (forebay meta schedule --off)",
                store.name
            )));
        }
        Ok(())
    }

    /// What is wrong with the backups.
    pub(super) fn backup_text(info: &BackupsInfo) -> Option<String> {
        let BackupsInfo { to, every_s, off, made, problem, .. } = info;
        let last = match made.last() {
            Some(last) => format!("the last backup is {} old", format_duration(last.age_s)),
            None => "there is none yet".to_owned(),
        };
        let is_late = made.last().is_some_and(|last| last.age_s > 2 * every_s + LATE_S);
        match problem {
            _ if *off => None,
            Some(problem) => Some(format!(
                "the metadata is not backed up to {to}: {problem}; {last} (see forebay meta schedule DIR)"
            )),
            None if is_late => Some(format!(
                "the metadata is not backed up to {to}, and nothing says why: {last}; see whether that place answers"
            )),
            None => None,
        }
    }
}

impl BackupControl for Node {
    fn backups(&self) -> BoxFuture<'_, Result<Option<BackupsInfo>, AdminError>> {
        Box::pin(async { self.backups_info() })
    }

    fn set_backups(&self, request: SetBackups) -> BoxFuture<'_, Result<Option<BackupsInfo>, AdminError>> {
        Box::pin(self.set_backups_now(request))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_sort_by_number() {
        let name = |number, begun_s| {
            name_of(ClusterId([0xab; 16]), &BackupRecord { number, begun_s, bytes: 0, parts: 1 })
        };
        assert_eq!(name(7, 0x6929_0000), "forebay-abababab-000007-69290000.backup");
        assert!(name(99, 2) < name(100, 1));
        assert_eq!(key_of(&name(7, 1), 3), "metadata/forebay-abababab-000007-00000001.backup/00003");
    }
}
