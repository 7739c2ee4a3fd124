//! Changes of the cluster: decided by crate `control` from its newest records, committed, and taken over by the parts of the node.

use std::collections::BTreeMap;

use admin::AdminError;
use anyhow::{Context, Result};
use base::DriveId;
use control::{Cluster, ControlView, FilesystemRecord, Owed, Plan, Seen};

use super::Node;
use super::State;
use super::drives::DriveEntry;

/// The condition of the drives now.
pub(super) fn seen(drives: &BTreeMap<DriveId, DriveEntry>) -> Seen {
    let those = |is: fn(&DriveEntry) -> bool| {
        drives.iter().filter(|(_, entry)| is(entry)).map(|(id, _)| *id).collect()
    };
    Seen { up: those(DriveEntry::is_up), readable: those(DriveEntry::is_readable) }
}

impl State {
    /// The condition of the drives now.
    pub(super) fn seen(&self) -> Seen {
        seen(&self.drives)
    }

    /// The drives that are owed shards.
    pub(super) async fn owed(&self) -> Result<Owed> {
        let mut owed = Owed::new();
        for entry in self.filesystems.values() {
            owed.insert(entry.record.id, entry.owed_holders(&self.cluster).await?);
        }
        Ok(owed)
    }

    /// Takes over the records of the cluster.
    pub(super) fn take(&mut self, cluster: Cluster) {
        for (id, entry) in &mut self.drives {
            if let Some(record) = cluster.drives.get(id) {
                entry.record.clone_from(record);
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

    /// Decides a plan, commits it, and takes it over. The caller publishes it.
    pub(super) async fn plan<T>(
        &self,
        state: &mut State,
        decide: impl FnMut(&mut Plan) -> Result<T>,
    ) -> Result<T> {
        let (decided, cluster) = self.control.plan(decide).await?;
        if let Some(cluster) = cluster {
            state.take(cluster);
        }
        Ok(decided)
    }

    /// Changes the record of a filesystem.
    pub(super) async fn plan_filesystem(
        &self,
        state: &mut State,
        id: u32,
        change: impl Fn(FilesystemRecord) -> FilesystemRecord,
    ) -> Result<()> {
        self.plan(state, |plan| {
            let record = plan.next().filesystems.get(&id).cloned();
            plan.set_filesystem(change(record.context("the filesystem is gone")?));
            Ok(())
        })
        .await
    }
}
