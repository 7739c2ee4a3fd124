//! The drives in this machine, for the owner of the control ledger, which says which ones there are.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use base::{ClusterId, DriveId};
use control::DriveRecord;
use layout::DriveState;
use tokio::sync::{Mutex, watch};
use wire::BoxFuture;
use wire::cluster::{Declined, HostReply, HostRequest, HostService, HostedDrive};
use wire::drive::{DriveHealth, DriveService};

use crate::node::{DriveEntry, DriveMaker, DriveSettings, LocalDrives, REOPEN_NS, REOPEN_NS_MAX, note_named};
use crate::remote::OwnDrives;

/// The drives of this node.
pub(super) struct DriveHost {
    maker: DriveMaker,
    drives: Mutex<BTreeMap<DriveId, Hosted>>,
    /// Serializes the making and opening of drives.
    making: Mutex<()>,
    /// Counts changes of the list.
    changes: watch::Sender<u64>,
}

struct Hosted {
    entry: DriveEntry,
    /// The control ledger has a record of it.
    is_known: bool,
    /// It had failed and was opened again by an order. Its record still says that it has failed, until the order is done.
    is_returning: bool,
    /// Time of the next attempt to open it, and the pause after that.
    reopen: (u64, u64),
}

impl Hosted {
    fn new(entry: DriveEntry, is_known: bool) -> Self {
        Self { entry, is_known, is_returning: false, reopen: (0, REOPEN_NS) }
    }
}

impl DriveHost {
    pub(super) fn new(maker: DriveMaker) -> Arc<Self> {
        Arc::new(Self {
            maker,
            drives: Mutex::default(),
            making: Mutex::default(),
            changes: watch::Sender::new(0),
        })
    }

    /// Where the drives are.
    pub(super) fn paths(&self) -> Arc<LocalDrives> {
        self.maker.paths.clone()
    }

    /// How they are opened.
    pub(super) fn settings(&self) -> DriveSettings {
        self.maker.settings
    }

    /// Tells of each change of the list.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn note_change(&self) {
        self.changes.send_modify(|count| *count += 1);
    }

    /// The drives that are open.
    pub(super) async fn services(&self) -> BTreeMap<DriveId, Arc<dyn DriveService>> {
        let drives = self.drives.lock().await;
        let open = drives.iter().filter_map(|(id, hosted)| Some((*id, hosted.entry.local()?)));
        open.collect()
    }

    /// Notes where the named drives are, and forgets places of drives that are gone. Called once, with the first records.
    pub(super) async fn note_places(
        &self,
        cluster: ClusterId,
        records: &BTreeMap<DriveId, DriveRecord>,
        named: &[PathBuf],
    ) -> Result<()> {
        let is_known = |uuid| records.values().any(|record| record.uuid == uuid);
        // A drive that is being made has a place and no record yet.
        let _one_at_a_time = self.making.lock().await;
        let drives = self.drives.lock().await;
        let is_made = |uuid| drives.values().any(|hosted| hosted.entry.record().uuid == uuid);
        self.maker.paths.keep_only(|uuid| is_known(uuid) || is_made(uuid))?;
        note_named(&self.maker.env, cluster, is_known, &self.maker.paths, named)
    }

    /// Takes the records of this node's drives over: opens new ones, and closes those that are not to be used any more.
    pub(super) async fn follow(&self, records: &BTreeMap<DriveId, DriveRecord>) {
        let mut drives = self.drives.lock().await;
        for (id, record) in records {
            match drives.get_mut(id) {
                Some(hosted) => {
                    hosted.is_known = true;
                    hosted.is_returning &= record.state == DriveState::Failed;
                    hosted.entry.set_record(record.clone());
                }
                None => {
                    let path = self.maker.paths.path_of(record.uuid);
                    drives.insert(*id, Hosted::new(DriveEntry::closed(record.clone(), path), true));
                }
            }
        }
        let is_out = |id: &DriveId| records.get(id).is_none_or(|record| record.state == DriveState::Out);
        let gone: Vec<Hosted> =
            drives.extract_if(.., |id, hosted| hosted.is_known && is_out(id)).map(|(_, gone)| gone).collect();
        // A drive that failed may be used again: its place stays known.
        let failed = drives
            .values_mut()
            .filter(|hosted| hosted.entry.record().state == DriveState::Failed && !hosted.is_returning);
        let failed = failed.filter_map(|hosted| {
            let closed = DriveEntry::closed(hosted.entry.record().clone(), hosted.entry.path().cloned());
            hosted.entry.local()?;
            Some(std::mem::replace(&mut hosted.entry, closed))
        });
        let closing: Vec<DriveEntry> = failed.chain(gone.into_iter().map(|gone| gone.entry)).collect();
        drop(drives);
        if !closing.is_empty() {
            self.note_change();
        }
        for entry in closing {
            close(entry).await;
        }
    }

    /// Opens drives that are missing and are there again.
    pub(super) async fn open_missing(&self, now_ns: u64) {
        let due: Vec<(DriveRecord, Option<PathBuf>)> = {
            let mut drives = self.drives.lock().await;
            let missing = drives.values_mut().filter(|hosted| hosted.is_known && hosted.entry.is_missing());
            let due = missing.filter(|hosted| hosted.reopen.0 <= now_ns).map(|hosted| {
                let pause = hosted.reopen.1;
                hosted.reopen = (now_ns + pause, (pause * 2).min(REOPEN_NS_MAX));
                (hosted.entry.record().clone(), hosted.entry.path().cloned())
            });
            due.collect()
        };
        for (record, path) in due {
            if let Err(error) = self.open(record, path).await {
                tracing::error!(error = %format!("{error:#}"), "a drive cannot be opened");
            }
        }
    }

    /// Opens a drive, in the place of what was open before. Returns its problem.
    async fn open(&self, record: DriveRecord, path: Option<PathBuf>) -> Result<Option<String>> {
        let id = record.id;
        let _one_at_a_time = self.making.lock().await;
        if self.drives.lock().await.get(&id).is_some_and(|hosted| hosted.entry.local().is_some()) {
            return Ok(None);
        }
        let opened = self.maker.open_again(record, path).await?;
        let problem = opened.problem().map(str::to_owned);
        let mut drives = self.drives.lock().await;
        let Some(hosted) = drives.get_mut(&id) else {
            bail!("the drive is not one of this node any more: id={id}");
        };
        hosted.entry = opened;
        drop(drives);
        self.note_change();
        Ok(problem)
    }

    /// Opens a drive again whose service has failed.
    async fn reopen(&self, id: DriveId) -> Result<()> {
        let (old, record, path) = {
            let mut drives = self.drives.lock().await;
            let hosted =
                drives.get_mut(&id).with_context(|| format!("this node has no such drive: id={id}"))?;
            hosted.is_returning = true;
            let health = hosted.entry.local().map(|drive| drive.health());
            if health == Some(DriveHealth::Up) {
                return Ok(());
            }
            let record = DriveRecord { state: DriveState::Up, ..hosted.entry.record().clone() };
            (hosted.entry.take_service(), record, hosted.entry.path().cloned())
        };
        self.note_change();
        // Its thread may take a moment to end.
        tokio::task::spawn_blocking(move || drop(old)).await?;
        match self.open(record, path).await? {
            None => Ok(()),
            Some(problem) => bail!("{problem}"),
        }
    }

    async fn format(&self, id: DriveId, path: Option<String>, size_bytes: Option<u64>) -> Result<HostReply> {
        // The request may be a repetition: its connection broke before the answer.
        let _one_at_a_time = self.making.lock().await;
        let other = {
            let mut drives = self.drives.lock().await;
            match drives.get(&id) {
                Some(made) if made.is_known => bail!("this node has the drive already: id={id}"),
                Some(made)
                    if path.is_none() || made.entry.path() == path.as_ref().map(PathBuf::from).as_ref() =>
                {
                    return Ok(formatted(&made.entry));
                }
                // An earlier owner had it made, and did not use it.
                _ => drives.remove(&id),
            }
        };
        if let Some(other) = other {
            close(other.entry).await;
        }
        let entry = self.maker.make(id, path.map(PathBuf::from), size_bytes).await?;
        if let Some(problem) = entry.problem() {
            bail!("{problem}");
        }
        let reply = formatted(&entry);
        self.drives.lock().await.insert(id, Hosted::new(entry, false));
        self.note_change();
        Ok(reply)
    }

    /// Notes where a drive of the cluster is now, which may come from another machine, and opens it soon if it is of this node. If it
    /// is open, there is a copy of it at the path, which is not noted.
    async fn locate(&self, path: String) -> Result<HostReply> {
        let _one_at_a_time = self.making.lock().await;
        let Some((uuid, path)) = self.maker.drive_at(path.into()).await? else {
            return Ok(HostReply::Located(None));
        };
        let mut drives = self.drives.lock().await;
        let known = drives.values_mut().find(|hosted| hosted.entry.record().uuid == uuid);
        if known.as_ref().is_none_or(|hosted| hosted.entry.local().is_none()) {
            self.maker.paths.set([(uuid, path.clone())])?;
        }
        if let Some(hosted) = known {
            hosted.entry.set_path(path);
            hosted.reopen = (0, REOPEN_NS);
        }
        Ok(HostReply::Located(Some(uuid)))
    }

    /// Closes a drive that was made and is not used after all.
    async fn close_unknown(&self, id: DriveId) -> Result<()> {
        let entry = {
            let mut drives = self.drives.lock().await;
            match drives.get(&id) {
                Some(hosted) if hosted.is_known => bail!("the cluster has the drive: id={id}"),
                _ => drives.remove(&id),
            }
        };
        self.note_change();
        if let Some(hosted) = entry {
            close(hosted.entry).await;
        }
        Ok(())
    }

    pub(super) async fn hosted(&self) -> Vec<HostedDrive> {
        let drives = self.drives.lock().await;
        drives.iter().map(|(id, hosted)| hosted.entry.hosted(*id)).collect()
    }

    /// Closes all drives.
    pub(super) async fn stop(&self) {
        let drives = std::mem::take(&mut *self.drives.lock().await);
        self.note_change();
        for hosted in drives.into_values() {
            close(hosted.entry).await;
        }
    }
}

fn formatted(entry: &DriveEntry) -> HostReply {
    let record = entry.record();
    HostReply::Formatted { uuid: record.uuid, capacity_bytes: record.capacity_bytes }
}

async fn close(entry: DriveEntry) {
    let id = entry.record().id;
    if let Err(error) = entry.close().await {
        tracing::warn!(drive = %id, error = %format!("{error:#}"), "a drive was not closed in order");
    }
}

impl OwnDrives for DriveHost {
    fn open(&self) -> BoxFuture<'_, BTreeMap<DriveId, Arc<dyn DriveService>>> {
        Box::pin(self.services())
    }
}

impl HostService for DriveHost {
    fn ask(&self, request: HostRequest) -> BoxFuture<'_, Result<HostReply, Declined>> {
        Box::pin(async move {
            let done = |()| HostReply::Done;
            let reply = match request {
                HostRequest::Format { drive, path, size_bytes } => self.format(drive, path, size_bytes).await,
                HostRequest::Reopen { drive } => self.reopen(drive).await.map(done),
                HostRequest::Close { drive } => self.close_unknown(drive).await.map(done),
                HostRequest::Drives => Ok(HostReply::Drives(self.hosted().await)),
                HostRequest::Locate { path } => self.locate(path).await,
                HostRequest::StartEngine(_)
                | HostRequest::EndEngine { .. }
                | HostRequest::Engine
                | HostRequest::Stored
                | HostRequest::TryLog { .. }
                | HostRequest::Condition
                | HostRequest::Check { .. }
                | HostRequest::Restore(_)
                | HostRequest::Upload(_) => Err(anyhow::anyhow!("this opens drives only")),
            };
            reply.map_err(|error| Declined(format!("{error:#}")))
        })
    }
}
