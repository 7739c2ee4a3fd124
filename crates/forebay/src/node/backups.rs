//! Copies of all metadata that the owner of the ledgers makes by itself, in a directory or in an object store.
//!
//! One is written to a file of a fixed name first, so that an interrupted attempt leaves nothing that has to be looked for; and one that
//! goes to a store is noted before its first part does. The note is not in the copy itself: metadata that was made anew from a copy would
//! take that for an interrupted attempt, and remove it. For the same reason names have the time beside the number.

use std::path::Path;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use admin::{AdminError, BackupControl, BackupInfo, BackupsInfo, SetBackups};
use anyhow::{Context, Result, bail};
use base::ClusterId;
use base::env::{Caching, Env, OpenMode};
use base::units::{format_duration, format_size};
use bytes::Bytes;
use control::{BackupPlace, BackupRecord, BackupsRecord, ControlError};
use tokio::sync::{Notify, watch};
use upkeep::S3Store;
use wire::BoxFuture;
use wire::store::ObjectStore as _;

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
        // Files are written on a thread that may wait for them.
        let attempt = move || {
            let attempt = async {
                tokio::select! {
                    done = node.back_up_if_due() => node.note_backup(&done),
                    _ = stop.wait_for(|stop| *stop) => LOOK,
                }
            };
            runtime.block_on(attempt)
        };
        pause = tokio::task::spawn_blocking(attempt).await.unwrap_or(REST);
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

/// The file that becomes a backup.
const COPY: &str = "forebay-backup.tmp";

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
        match self.view()?.backups()? {
            Some(record) if record.is_due(self.now_s()) => self.back_up(record).await,
            _ => Ok(()),
        }
    }

    /// Makes one, and removes the oldest ones that are too many.
    async fn back_up(&self, mut record: BackupsRecord) -> Result<()> {
        if let Some(begun) = record.begun.take() {
            self.remove_backup(&record.to, &begun)
                .await
                .context("removing what is left of an interrupted backup")?;
        }
        let (begun_s, number) = (self.now_s(), record.next);
        record.next += 1;
        let made = match record.to.clone() {
            BackupPlace::Directory(directory) => {
                let directory = Path::new(&directory);
                let copy = directory.join(COPY);
                let made = BackupRecord { number, begun_s, bytes: self.export_to(&copy).await?, parts: 1 };
                let path = directory.join(name_of(self.cluster, &made));
                let renamed =
                    self.env.files.rename(&copy, &path).and_then(|()| self.env.files.sync_dir(directory));
                renamed.with_context(|| format!("cannot make {}", path.display()))?;
                made
            }
            BackupPlace::Store(id) => {
                let store = self.backup_store(id)?;
                self.check_room_for_copy().await?;
                let copy = self.dir.root().join(COPY);
                let bytes = self.export_to(&copy).await?;
                let parts = u32::try_from(bytes.div_ceil(PART_BYTES)).context("the metadata is too large")?;
                let begun = BackupRecord { number, begun_s, bytes, parts };
                self.keep_backups(&BackupsRecord { begun: Some(begun.clone()), ..record.clone() }).await?;
                upload(&self.env, &store, &copy, (&name_of(self.cluster, &begun), bytes)).await?;
                self.env.files.remove_file(&copy).context("removing the local copy")?;
                begun
            }
        };
        tracing::info!(number, bytes = made.bytes, "the metadata is backed up");
        (record.asked, record.begun) = (false, None);
        record.made.push(made);
        self.keep_backups(&record).await?;
        while let Some(oldest) = record.surplus().cloned() {
            self.remove_backup(&record.to, &oldest).await.context("removing the oldest backup")?;
            record.made.remove(0);
            self.keep_backups(&record).await?;
        }
        Ok(())
    }

    async fn export_to(&self, path: &Path) -> Result<u64> {
        let exported = backup::export(&self.env, &self.dir, path, true, &mut |_, _| {}).await;
        Ok(exported.with_context(|| format!("writing {}", path.display()))?.file_bytes)
    }

    /// A copy on its way to a store must not fill the disk on which the metadata is.
    async fn check_room_for_copy(&self) -> Result<()> {
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

    fn backup_store(&self, id: u32) -> Result<Arc<S3Store>> {
        let record = self.view()?.stores()?.into_iter().find(|record| record.id == id);
        let record = record.with_context(|| format!("store {id} is gone"))?;
        self.reach(&record).map_err(anyhow::Error::msg)
    }

    async fn remove_backup(&self, from: &BackupPlace, backup: &BackupRecord) -> Result<()> {
        let name = name_of(self.cluster, backup);
        match from {
            BackupPlace::Directory(directory) => {
                let path = Path::new(directory).join(name);
                if self.env.files.exists(&path) {
                    self.env
                        .files
                        .remove_file(&path)
                        .with_context(|| format!("cannot remove {}", path.display()))?;
                }
                Ok(())
            }
            BackupPlace::Store(id) => {
                let store = self.backup_store(*id)?;
                for part in 0..backup.parts {
                    store
                        .delete(key_of(&name, part))
                        .await
                        .with_context(|| format!("removing part {part} of {name}"))?;
                }
                Ok(())
            }
        }
    }

    /// Takes note of how far they are, unless the plan was changed in the meantime.
    async fn keep_backups(&self, record: &BackupsRecord) -> Result<()> {
        let view = self.view()?;
        if !view.backups()?.is_some_and(|now| now.is_same_plan(record)) {
            bail!("the plan of backups was changed");
        }
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
            made: record.made.iter().map(info).collect(),
            problem: self.backup_problem.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }))
    }

    async fn set_backups_now(&self, request: SetBackups) -> Result<Option<BackupsInfo>, AdminError> {
        let _no_store_goes = self.stores_lock.lock().await;
        let mut attempt = 1;
        loop {
            let view = self.view()?;
            let before = view.backups().map_err(AdminError::failed)?;
            let mut change = view.change();
            change.backups(&self.next_backups(before, &request)?);
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

    /// The plan as it should be next.
    fn next_backups(
        &self,
        before: Option<BackupsRecord>,
        request: &SetBackups,
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
                asked: false,
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
        record.asked |= request.now;
        record.off = request.off;
        if !(EVERY_S_MIN..=EVERY_S_MAX).contains(&record.every_s) || !(1..=KEEP_MAX).contains(&record.keep) {
            return Err(AdminError::invalid(format!(
                "a backup is made each minute to each 30 days, and 1 to {KEEP_MAX} are kept: every={} keep={}",
                format_duration(record.every_s),
                record.keep
            )));
        }
        if let Some(to) = to.filter(|to| *to != record.to) {
            // What is at the earlier place stays there.
            (record.to, record.made, record.begun) = (to, Vec::new(), None);
        }
        Ok(record)
    }

    fn backup_place(&self, text: &str) -> Result<BackupPlace, AdminError> {
        if let Some(name) = text.strip_prefix(STORE) {
            return Ok(BackupPlace::Store(self.store_record(name)?.id));
        }
        let path = Path::new(text);
        if !path.is_absolute() {
            return Err(AdminError::invalid(format!("neither {STORE}NAME nor an absolute path: {text}")));
        }
        if self.env.files.list(path).is_err() {
            return Err(AdminError::invalid(format!(
                "no such directory at node {}, which owns the metadata: {text}",
                self.here()
            )));
        }
        Ok(BackupPlace::Directory(text.to_owned()))
    }

    /// What is wrong with the backups.
    pub(super) fn backup_text(info: &BackupsInfo) -> Option<String> {
        let last = match info.made.last() {
            Some(last) => format!("the last backup is {} old", format_duration(last.age_s)),
            None => "there is none yet".to_owned(),
        };
        let problem = info.problem.as_ref()?;
        Some(format!(
            "the metadata is not backed up to {}: {problem}; {last} (see forebay meta schedule DIR)",
            info.to
        ))
    }
}

/// Sends a file to a store, in parts.
async fn upload(env: &Env, store: &S3Store, path: &Path, (name, bytes): (&str, u64)) -> Result<()> {
    let file = env.files.open(path, OpenMode::Existing, Caching::Buffered)?;
    for part in 0..bytes.div_ceil(PART_BYTES) {
        let at = part * PART_BYTES;
        let mut content = vec![0; (bytes - at).min(PART_BYTES) as usize];
        file.read_at(&mut content, at).context("reading the local copy")?;
        let key = key_of(name, part as u32);
        store
            .put(key.clone(), vec![Bytes::from(content)].into())
            .await
            .with_context(|| format!("sending {key}"))?;
    }
    Ok(())
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
