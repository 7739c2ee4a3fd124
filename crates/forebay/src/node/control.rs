//! What the node's operator sees and does.

use std::path::PathBuf;

use admin::{
    AddDrive, AdminError, CreateFilesystem, DriveInfo, FilesystemInfo, MetaCopyInfo, MetaDir, MountRequest,
    NodeControl, NodeStatus, SpaceInfo, WhyInfo,
};
use anyhow::Result;
use base::env::Env;
use base::{DriveId, LedgerId};
use drive::Existing;
use layout::{DriveState, Profile};
use meta::control::{ControlChange, FilesystemRecord};
use posix::fuse::UnmountMode;
use wire::BoxFuture;

use super::drives::{DriveEntry, NewDrive, format_drives};
use super::filesystems::{FilesystemEntry, plan_groups};
use super::{Node, NodeDir, NodeFile, State};

/// `node.json`, if a node wrote one.
pub(crate) fn read_node_file(env: &Env, dir: &NodeDir) -> Option<NodeFile> {
    let bytes = env.files.read(&dir.node_json()).ok()?;
    serde_json::from_slice(&bytes).ok()
}

fn failed(error: anyhow::Error) -> AdminError {
    AdminError::failed(format!("{error:#}"))
}

fn no_filesystem(name: &str) -> AdminError {
    AdminError::not_found(format!("no such filesystem: name={name} (see `forebay fs list`)"))
}

impl Node {
    pub(super) async fn status_now(&self) -> Result<NodeStatus> {
        let mut state = self.state.lock().await;
        let drives: Vec<DriveInfo> = state.drives.values().map(DriveEntry::info).collect();
        let mut filesystems = Vec::new();
        let State { drives: drives_now, filesystems: entries, .. } = &mut *state;
        for entry in entries.values_mut() {
            entry.unmount_dead();
            filesystems.push(entry.info(drives_now).await?);
        }
        let mut space = SpaceInfo::default();
        for drive in &drives {
            space.capacity_bytes += drive.space.capacity_bytes;
            space.live_bytes += drive.space.live_bytes;
            space.garbage_bytes += drive.space.garbage_bytes;
            space.reserved_bytes += drive.space.reserved_bytes;
            space.free_bytes += drive.space.free_bytes;
        }
        let control = self.control_files.info();
        let problems = problems(&drives, &filesystems, &control);
        Ok(NodeStatus {
            state: if problems.is_empty() { "healthy" } else { "degraded" }.to_owned(),
            problems,
            cluster: self.cluster.to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            dir: self.dir.root().display().to_string(),
            uptime_s: (self.env.clock.boot_ns() - self.started_ns) / 1_000_000_000,
            space,
            control,
            drives,
            filesystems,
        })
    }

    async fn add_drive_now(&self, request: AddDrive) -> Result<DriveInfo> {
        let mut state = self.state.lock().await;
        let mut cluster = self.control.cluster()?;
        let id = cluster.next_drive;
        let smallest = state.drives.values().map(|entry| entry.record.capacity_bytes).min();
        let path = request.path.map_or_else(|| self.dir.drives().join(format!("{id}.img")), PathBuf::from);
        let is_file = !self.env.files.exists(&path);
        let size_bytes = if is_file { request.size_bytes.or(smallest) } else { None };
        let new_drive = NewDrive { path, size_bytes, existing: Existing::Keep };
        let (env, id_of_cluster) = (self.env.clone(), self.cluster);
        let format = move || format_drives(&env, id_of_cluster, id, &[new_drive]);
        let record = tokio::task::spawn_blocking(format).await??.remove(0);
        cluster.next_drive += 1;
        cluster.map_epoch += 1;
        let mut change = ControlChange::default();
        change.drive(&record);
        // New groups over all drives: new data finds the new drive, nothing is moved.
        let mut records: Vec<_> =
            state.drives.values().filter(|entry| entry.is_up()).map(|e| e.record.clone()).collect();
        records.push(record.clone());
        let all: Vec<_> = records.iter().collect();
        for entry in state.filesystems.values_mut() {
            if usize::from(entry.record.profile.n()) > all.len() {
                continue;
            }
            let groups = plan_groups(&self.env, &all, entry.record.profile, cluster.next_group)?;
            cluster.next_group += groups.len() as u32;
            for group in &groups {
                change.group(group);
                entry.record.groups.push(group.id);
            }
            change.filesystem(&entry.record);
        }
        change.cluster(&cluster);
        self.control.commit(change).await?;
        let entry = DriveEntry::open(&self.env, self.cluster, record, self.io);
        let info = entry.info();
        state.drives.insert(DriveId(id), entry);
        self.publish(&mut state)?;
        Ok(info)
    }

    /// Tells every client about the drives and groups as they are now.
    fn publish(&self, state: &mut State) -> Result<()> {
        let map = self.control.map()?;
        for entry in state.filesystems.values_mut() {
            entry.update(&map, &state.drives);
        }
        Ok(())
    }

    async fn fail_drive_now(&self, id: DriveId) -> Result<DriveInfo> {
        let mut state = self.state.lock().await;
        let entry = state.drives.get_mut(&id).ok_or_else(|| anyhow::anyhow!("no such drive: id={id}"))?;
        entry.record.state = DriveState::Failed;
        entry.problem = Some("marked as failed by the operator".to_owned());
        let record = entry.record.clone();
        let mut cluster = self.control.cluster()?;
        cluster.map_epoch += 1;
        let mut change = ControlChange::default();
        change.drive(&record).cluster(&cluster);
        self.control.commit(change).await?;
        self.publish(&mut state)?;
        let entry = state.drives.get_mut(&id).ok_or_else(|| anyhow::anyhow!("no such drive: id={id}"))?;
        Ok(entry.info())
    }

    async fn create_filesystem_now(&self, request: CreateFilesystem) -> Result<FilesystemInfo> {
        let profile: Profile = request.profile.parse()?;
        let mut state = self.state.lock().await;
        let mut cluster = self.control.cluster()?;
        let id = cluster.next_filesystem;
        let up: Vec<_> =
            state.drives.values().filter(|entry| entry.is_up()).map(|e| e.record.clone()).collect();
        let groups = plan_groups(&self.env, &up.iter().collect::<Vec<_>>(), profile, cluster.next_group)?;
        cluster.next_filesystem += 1;
        cluster.next_group += groups.len() as u32;
        cluster.map_epoch += 1;
        let record = FilesystemRecord {
            id,
            name: request.name.clone(),
            ledger: LedgerId(id),
            profile,
            groups: groups.iter().map(|group| group.id).collect(),
            provisioned_bytes: request.size_bytes,
            mount: None,
            mount_options: String::new(),
        };
        let mut change = ControlChange::default();
        change.cluster(&cluster).filesystem(&record);
        groups.iter().for_each(|group| {
            change.group(group);
        });
        self.control.commit(change).await?;
        let map = self.control.map()?;
        let entry =
            FilesystemEntry::open(&self.env, &state.meta_dirs, &self.runtime, record, &map, &state.drives)
                .await?;
        let info = entry.info(&state.drives).await?;
        state.filesystems.insert(request.name, entry);
        self.publish(&mut state)?;
        Ok(info)
    }

    async fn check_name(&self, name: &str) -> Result<(), AdminError> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if name.is_empty() || name.len() > 63 || !name.chars().all(allowed) {
            let message = format!("bad filesystem name: name={name:?} (1 to 63 letters, digits, - and _)");
            return Err(AdminError::invalid(message));
        }
        if self.state.lock().await.filesystems.contains_key(name) {
            return Err(AdminError::conflict(format!("filesystem exists: name={name}")));
        }
        Ok(())
    }
}

/// What is wrong with copies of a ledger.
fn copy_problems(whose: &str, copies: &[MetaCopyInfo]) -> Vec<String> {
    let bad = copies.iter().filter_map(|copy| Some((copy, copy.problem.as_ref()?)));
    bad.map(|(copy, problem)| format!("metadata of {whose} has no full copy in {}: {problem}", copy.dir))
        .collect()
}

fn problems(drives: &[DriveInfo], filesystems: &[FilesystemInfo], control: &[MetaCopyInfo]) -> Vec<String> {
    let mut problems = copy_problems("the cluster", control);
    for drive in drives.iter().filter(|drive| drive.state != "up") {
        let reason = drive.reason.clone().unwrap_or_default();
        problems.push(format!("drive {} is {}: path={} {reason}", drive.id, drive.state, drive.path));
    }
    for filesystem in filesystems {
        problems.extend(copy_problems(&format!("filesystem {}", filesystem.name), &filesystem.ledger.copies));
        let (name, reason) = (&filesystem.name, filesystem.ledger.reason.as_deref().unwrap_or_default());
        match filesystem.ledger.state.as_str() {
            "halted" => problems.push(format!(
                "filesystem {name} takes no requests: its metadata could not be written ({reason}); see the log file, \
                 then restart"
            )),
            "no_space" => problems.push(format!("filesystem {name} takes no new data: {reason}")),
            _ => {}
        }
        if filesystem.owed_shards > 0 {
            let (count, name, drives) = (filesystem.owed_shards, &filesystem.name, &filesystem.owed_drives);
            problems.push(format!(
                "{count} shards of {name} were written without drives {drives:?} and are owed to them: files of that \
                 time survive fewer losses (this version does not repair them)"
            ));
        }
        if filesystem.waiting_extents > 0 {
            let count = filesystem.waiting_extents;
            problems.push(format!("{count} deleted extents of {} wait for a drive", filesystem.name));
        }
    }
    problems
}

impl NodeControl for Node {
    fn status(&self) -> BoxFuture<'_, Result<NodeStatus, AdminError>> {
        Box::pin(async { self.status_now().await.map_err(failed) })
    }

    fn add_drive(&self, request: AddDrive) -> BoxFuture<'_, Result<DriveInfo, AdminError>> {
        Box::pin(async { self.add_drive_now(request).await.map_err(failed) })
    }

    fn fail_drive(&self, id: u32) -> BoxFuture<'_, Result<DriveInfo, AdminError>> {
        Box::pin(async move {
            if !self.state.lock().await.drives.contains_key(&DriveId(id)) {
                return Err(AdminError::not_found(format!(
                    "no such drive: id={id} (see `forebay drive list`)"
                )));
            }
            self.fail_drive_now(DriveId(id)).await.map_err(failed)
        })
    }

    fn create_filesystem(
        &self,
        request: CreateFilesystem,
    ) -> BoxFuture<'_, Result<FilesystemInfo, AdminError>> {
        Box::pin(async {
            self.check_name(&request.name).await?;
            self.create_filesystem_now(request).await.map_err(failed)
        })
    }

    fn mount(
        &self,
        name: String,
        request: MountRequest,
    ) -> BoxFuture<'_, Result<FilesystemInfo, AdminError>> {
        Box::pin(async move {
            let mut state = self.state.lock().await;
            let State { drives, filesystems, .. } = &mut *state;
            let entry = filesystems.get_mut(&name).ok_or_else(|| no_filesystem(&name))?;
            entry.unmount_dead();
            if let Some(path) = entry.mount_path() {
                let message = format!("filesystem {name} is mounted already: path={}", path.display());
                return Err(AdminError::conflict(message));
            }
            let kept = entry.record.mount.clone().map(PathBuf::from);
            let path = request.path.map(PathBuf::from).or(kept).unwrap_or_else(|| self.dir.default_mount());
            self.mount_and_remember(entry, path, request.options).await.map_err(failed)?;
            let info = entry.info(drives).await.map_err(failed)?;
            drop(state);
            self.write_node_file().await.map_err(failed)?;
            Ok(info)
        })
    }

    fn unmount(&self, name: String) -> BoxFuture<'_, Result<FilesystemInfo, AdminError>> {
        Box::pin(async move {
            let mut state = self.state.lock().await;
            let State { drives, filesystems, .. } = &mut *state;
            let entry = filesystems.get_mut(&name).ok_or_else(|| no_filesystem(&name))?;
            let Some(path) = entry.mount_path() else {
                return Err(AdminError::conflict(format!("filesystem {name} is not mounted")));
            };
            entry.unmount(UnmountMode::IfIdle).await.map_err(|error| {
                let path = path.display();
                AdminError::conflict(format!(
                    "cannot unmount {path}: {error:#}; close the files that are open on it"
                ))
            })?;
            let info = entry.info(drives).await.map_err(failed)?;
            drop(state);
            self.write_node_file().await.map_err(failed)?;
            Ok(info)
        })
    }

    fn add_meta_dir(&self, request: MetaDir) -> BoxFuture<'_, Result<NodeStatus, AdminError>> {
        Box::pin(async { self.add_meta_dir_now(request).await.map_err(failed) })
    }

    fn remove_meta_dir(&self, request: MetaDir) -> BoxFuture<'_, Result<NodeStatus, AdminError>> {
        Box::pin(async { self.remove_meta_dir_now(request).await.map_err(failed) })
    }

    fn why(&self, name: String, path: String) -> BoxFuture<'_, Result<WhyInfo, AdminError>> {
        Box::pin(async move { self.why_now(&name, &path).await })
    }
}
