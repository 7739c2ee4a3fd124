//! Changes of the cluster: decided by crate `control` from its newest records, committed, and taken over by the parts of the node.

use std::collections::BTreeMap;

use admin::{AdminError, FilesystemInfo};
use anyhow::{Context, Result};
use base::DriveId;
use control::{Cluster, ControlView, FilesystemRecord, Owed, Plan, Seen};
use futures_util::future::join_all;

use super::drives::DriveEntry;
use super::filesystems::{Asker, FilesystemEntry, Told};
use super::local_drives::LocalDrives;
use super::management::{apply_upkeep, failed, no_filesystem};
use super::tiers::entry_of;
use super::{Node, State};

/// The condition of the drives now.
pub(super) fn seen(drives: &BTreeMap<DriveId, DriveEntry>) -> Seen {
    let those = |is: fn(&DriveEntry) -> bool| {
        drives.iter().filter(|(_, entry)| is(entry)).map(|(id, _)| *id).collect()
    };
    Seen { up: those(DriveEntry::is_up), readable: those(DriveEntry::is_readable), ..Seen::default() }
}

impl State {
    /// The condition of the drives now.
    pub(super) fn seen(&self) -> Seen {
        let unused = self.filesystems.values().flat_map(FilesystemEntry::unused).collect();
        Seen { unsteady: self.unsteady.clone(), unused, ..seen(&self.drives) }
    }

    /// Takes over the records of the cluster. A drive that is new counts as missing until the monitor opens it.
    fn take(&mut self, cluster: Cluster, paths: &LocalDrives) {
        for (id, record) in &cluster.drives {
            match self.drives.get_mut(id) {
                Some(entry) if entry.record.node == record.node => entry.record.clone_from(record),
                // It is new, or in another machine now.
                _ => {
                    let (record, path) = (record.clone(), paths.path_of(record.uuid));
                    self.drives.insert(*id, DriveEntry::closed(record, path));
                }
            }
        }
        for entry in self.filesystems.values_mut() {
            if let Some(record) = cluster.filesystems.get(&entry.record.id) {
                entry.record.clone_from(record);
            }
        }
        self.map = cluster.map();
        self.cluster = cluster;
    }
}

impl Node {
    /// The records of the cluster as they are now.
    pub(super) fn view(&self) -> Result<ControlView, AdminError> {
        self.control.view().map_err(AdminError::failed)
    }

    /// Decides a plan, commits it, takes it over and publishes it. Must not be called by a holder of the state: it waits for the
    /// control ledger, and others must not wait for that.
    pub(super) async fn plan<T>(&self, decide: impl FnMut(&mut Plan) -> Result<T>) -> Result<T> {
        let decided = self.control.plan(decide).await?;
        self.take_over().await?;
        Ok(decided)
    }

    /// As [`Node::plan`], for what always can be done.
    pub(super) async fn change(&self, decide: impl Fn(&mut Plan)) -> Result<()> {
        self.plan(|plan| {
            decide(plan);
            Ok(())
        })
        .await
    }

    /// Takes over the newest records, unless that was done, and publishes what has changed in the map.
    pub(super) async fn take_over(&self) -> Result<()> {
        let mut state = self.state.lock().await;
        // Read under the lock: of two changes at once, the newer one stays.
        let seq = self.control.seq()?;
        if seq == state.taken {
            return Ok(());
        }
        let cluster = Cluster::of(&self.control.view()?)?;
        let before = &state.cluster;
        let is_news = cluster.record.map_epoch != before.record.map_epoch
            || cluster.filesystems != before.filesystems
            || cluster.record.spare != before.record.spare;
        if cluster.record.upkeep != before.record.upkeep {
            apply_upkeep(&self.pace, cluster.record.upkeep);
        }
        state.take(cluster, &self.local_drives);
        state.taken = seq;
        if is_news {
            self.publish(&mut state);
        }
        Ok(())
    }

    /// The ways to the owners of all ledgers.
    async fn askers(&self) -> Vec<(String, Asker)> {
        let state = self.state.lock().await;
        state.filesystems.iter().map(|(name, entry)| (name.clone(), entry.asker())).collect()
    }

    /// Asks the owners of all ledgers.
    pub(super) async fn ask_all(&self) -> Result<BTreeMap<String, Told>> {
        let asks = self
            .askers()
            .await
            .into_iter()
            .map(|(name, asker)| async move { Ok((name, asker.ask().await?)) });
        join_all(asks).await.into_iter().collect()
    }

    /// The drives that are owed shards.
    pub(super) async fn owed(&self) -> Result<Owed> {
        let asks =
            self.askers().await.into_iter().map(|(name, asker)| async move { (name, asker.owed().await) });
        let answers = join_all(asks).await;
        let state = self.state.lock().await;
        let mut owed = Owed::new();
        for (name, shards) in answers {
            let Some(entry) = state.filesystems.get(&name) else { continue };
            owed.insert(entry.record.id, entry.holders(&state.cluster, &shards?));
        }
        Ok(owed)
    }

    /// Information about a filesystem.
    pub(super) async fn filesystem_info(&self, name: &str) -> Result<FilesystemInfo, AdminError> {
        let asker = entry_of(&mut *self.state.lock().await, name)?.asker();
        let told = asker.ask().await.map_err(failed)?;
        let state = self.state.lock().await;
        let State { drives, filesystems, cluster, .. } = &*state;
        let entry = filesystems.get(name).ok_or_else(|| no_filesystem(name))?;
        Ok(entry.info(&self.env, cluster, drives, &told))
    }

    /// Changes the record of a filesystem.
    pub(super) async fn plan_filesystem(
        &self,
        id: u32,
        change: impl Fn(FilesystemRecord) -> FilesystemRecord,
    ) -> Result<()> {
        self.plan(|plan| {
            let record = plan.next().filesystems.get(&id).cloned();
            plan.set_filesystem(change(record.context("the filesystem is gone")?));
            Ok(())
        })
        .await
    }
}
