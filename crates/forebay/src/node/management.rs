//! The management interface of the node: what operators see and do.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;

use admin::{
    AddDrive, AdminError, AuditInfo, BalanceFilesystem, CreateFilesystem, DriveInfo, FailDrive,
    FilesystemBalance, FilesystemInfo, FilesystemVerification, FsckInfo, MemoryInfo, MetaDir, MountRequest,
    NodeControl, NodeStatus, Placement, RemoveDrive, ReplaceDrive, SetLimits, SetNodes, SetPlacement,
    SetProfile, SetSpares, SetUpkeep, SpareInfo, UpkeepInfo, VerifyFilesystem, WhyInfo,
};
use anyhow::{Context, Result};
use base::DriveId;
use base::env::Env;
use base::program::VERSION;
use client::Limits;
use control::{ClusterRecord, FilesystemRecord, Plan, UpkeepRecord, WriteSet};
use layout::Profile;
use meta::log::Vacancy;
use posix::fuse::UnmountMode;
use upkeep::Pace;
use wire::BoxFuture;
use wire::event::Event;

use super::balancing::too_few;
use super::events::Watch;
use super::filesystems::{FilesystemEntry, FilesystemParts};
use super::history::Knowledge;
use super::limits::{check_limits, limit};
use super::memory::resident_bytes;
use super::problems::problems;
use super::{Node, NodeDir, NodeFile, State};
use crate::watchdog::{self, STUCK_AFTER};

/// The shortest and the longest limit of what users wait for, in microseconds.
const P99_US: RangeInclusive<u64> = 100..=60_000_000;

/// `node.json`, if a node wrote one.
pub(crate) fn read_node_file(env: &Env, dir: &NodeDir) -> Option<NodeFile> {
    let bytes = env.files.read(&dir.node_json()).ok()?;
    serde_json::from_slice(&bytes).ok()
}

/// Keeps the code of a refusal inside the error; any other error is `failed`.
pub(super) fn failed(error: anyhow::Error) -> AdminError {
    error.downcast().unwrap_or_else(|error| AdminError::failed(format!("{error:#}")))
}

pub(super) fn no_filesystem(name: &str) -> AdminError {
    AdminError::not_found(format!("no such filesystem: name={name} (see `forebay fs list`)"))
}

impl Node {
    pub(super) async fn status_now(&self) -> Result<NodeStatus> {
        let (told, members) = tokio::try_join!(self.ask_all(), async { Ok(self.engine_members().await) })?;
        let mut state = self.state.lock().await;
        let mut drives = self.drive_infos(&state);
        let mut filesystems = Vec::new();
        let State { drives: drives_now, filesystems: entries, cluster, .. } = &mut *state;
        for (name, entry) in entries {
            // A filesystem that was made in the meantime shows with the next look.
            let Some(told) = told.get(name) else { continue };
            entry.unmount_dead();
            let mut info = entry.info(&self.env, cluster, drives_now, told);
            info.tier.iter_mut().for_each(|tier| self.add_s3_traffic(tier));
            filesystems.push(info);
            let owed = entry.owed_bytes(cluster, &told.owed);
            for drive in &mut drives {
                drive.space.set_aside(owed.get(&DriveId(drive.id)).copied().unwrap_or(0));
            }
        }
        let space = drives.iter().map(|drive| drive.space).sum();
        let control = self.control_files.info(&self.env);
        let ledgers = filesystems.iter().map(|filesystem| &filesystem.ledger);
        let copies = ledgers.flat_map(|ledger| &ledger.copies).chain(&control);
        let metadata_bytes = copies.map(|copy| copy.size_bytes).sum();
        let log = self.log_info(&state, members);
        let mut problems = problems(&drives, &filesystems, &control, &self.next_steps(&state));
        let (spare, spare_problems) = state.spare();
        problems.extend(spare_problems);
        drop(state);
        let backups = self.backups_info()?;
        problems.extend(backups.iter().filter_map(Self::backup_text));
        let audit = self.audit_info();
        let access = access_problems(&audit, self.unreadable_keys()?);
        problems.extend(self.engine_problems(&log).chain(access));
        let (stuck, stacks) = stuck_problems();
        problems.extend(stuck);
        let upkeep = self.upkeep_info();
        let status = NodeStatus {
            alone: false,
            state: match problems.is_empty() {
                _ if filesystems.iter().any(|filesystem| filesystem.damage.is_lost()) => "damaged",
                true => "healthy",
                false => "degraded",
            }
            .to_owned(),
            problems,
            stacks,
            cluster: self.cluster.to_string(),
            version: VERSION.to_owned(),
            pid: std::process::id(),
            dir: self.dir.root().display().to_string(),
            uptime_s: (self.env.clock.boot_ns() - self.started_ns) / 1_000_000_000,
            space,
            metadata_bytes,
            upkeep,
            spare,
            backups,
            memory: MemoryInfo { budget_bytes: self.memory.budget_bytes, resident_bytes: resident_bytes() },
            s3: self.s3_url(),
            log,
            control,
            audit,
            drives,
            filesystems,
        };
        let kept = (self.env.clock.boot_ns(), status.clone());
        *self.last_status.lock().expect("no holder of this lock panics") = Some(kept);
        Ok(status)
    }

    /// Status without requests to other parts: the last answer, with facts that do not change.
    fn last_status(&self) -> NodeStatus {
        let last = self.last_status.lock().expect("no holder of this lock panics").clone();
        // Read after the lock: what was kept is not younger.
        let now = self.env.clock.boot_ns();
        let (known, mut status) = match last {
            Some((asked_ns, status)) => {
                (format!("the rest is as of {} s ago", now.saturating_sub(asked_ns) / 1_000_000_000), status)
            }
            None => ("nothing else is known yet".to_owned(), NodeStatus::default()),
        };
        status.state = "stuck".to_owned();
        status.problems = vec![format!(
            "the node does not answer: {known}; if it does not move again by itself, `forebay stop` ends it by force \
             within half a minute, which loses nothing acknowledged"
        )];
        let (stuck, stacks) = stuck_problems();
        status.problems.extend(stuck);
        status.stacks = stacks;
        status.cluster = self.cluster.to_string();
        status.version = VERSION.to_owned();
        status.pid = std::process::id();
        status.dir = self.dir.root().display().to_string();
        status.uptime_s = (now - self.started_ns) / 1_000_000_000;
        status.memory =
            MemoryInfo { budget_bytes: self.memory.budget_bytes, resident_bytes: resident_bytes() };
        status
    }

    fn audit_info(&self) -> AuditInfo {
        let stat = self.audit.stat();
        AuditInfo {
            written: stat.written,
            queued: stat.queued as u64,
            lost: stat.lost,
            problem: stat.problem,
        }
    }

    fn upkeep_info(&self) -> UpkeepInfo {
        UpkeepInfo {
            paused: self.pace.is_paused(),
            rate_bytes_per_s: self.pace.bytes_per_s(),
            keep_p99_below_us: self.pace.keep_p99_below_us(),
            p99_us: self.pace.p99_us(),
            held_to_bytes_per_s: self.pace.held_to_bytes_per_s(),
        }
    }

    async fn set_profile_now(&self, name: &str, profile: Profile) -> Result<FilesystemInfo> {
        let (id, before, up) = {
            let state = self.state.lock().await;
            let entry = state.filesystems.get(name).ok_or_else(|| no_filesystem(name))?;
            (entry.record.id, entry.record.profile, state.seen().up)
        };
        let seed = self.env.random.next_u64();
        let happened = Watch::profile_change(name, before, profile);
        self.plan_and_tell(happened, |plan| {
            let record = plan.next().filesystems.get(&id).cloned().context("the filesystem is gone")?;
            Ok(plan.set_profile(record, profile, &up, seed)?)
        })
        .await?;
        let mut state = self.state.lock().await;
        state.watch.knows_profile(name, profile);
        if let Some(entry) = state.filesystems.get_mut(name) {
            // Within a second the monitor checks whether all drives of the groups are up.
            entry.write_set = WriteSet { profile, groups: entry.record.groups.clone() };
        }
        self.publish(&mut state);
        drop(state);
        Ok(self.filesystem_info(name).await?)
    }

    /// Changes the limits of background work durably.
    async fn keep_upkeep(&self, request: SetUpkeep) -> Result<()> {
        self.change(|plan| {
            plan.set_cluster(|ClusterRecord { upkeep, .. }| {
                upkeep.rate_bytes_per_s = request.rate_bytes_per_s.or(upkeep.rate_bytes_per_s);
                upkeep.paused = request.paused.unwrap_or(upkeep.paused);
                upkeep.keep_p99_below_us = request.keep_p99_below_us.or(upkeep.keep_p99_below_us);
            });
        })
        .await
    }

    async fn create_filesystem_now(&self, request: CreateFilesystem) -> Result<FilesystemInfo> {
        let profile: Profile = request.profile.parse()?;
        let _no_group_goes = self.stores_lock.lock().await;
        let group = self.filesystem_group_or_default(request.group.as_deref())?;
        let nodes = self.checked_nodes(&request.nodes).await?;
        let (up, seed) = (self.state.lock().await.seen().up, self.env.random.next_u64());
        let decide = |plan: &mut Plan| {
            if plan.next().filesystems.values().any(|record| record.name == request.name) {
                let message = format!("filesystem exists: name={}", request.name);
                return Err(AdminError::conflict(message).into());
            }
            let id = plan.next_filesystem();
            let record = FilesystemRecord {
                name: request.name.clone(),
                provisioned_bytes: request.size_bytes.and_then(limit),
                ssd_bytes: request.ssd_bytes.and_then(limit),
                filesystem_group: group.reference(),
                writes_near: request.placement == Placement::Local,
                nodes: nodes.clone(),
                ..FilesystemRecord::new(id, profile)
            };
            plan.add_filesystem(record.clone(), &up, seed).map_err(|error| match nodes.is_empty() {
                true => anyhow::Error::from(error),
                false => too_few(&record, &error).into(),
            })?;
            plan.next().filesystems.get(&id).cloned().context("it was just planned")
        };
        let record = self.plan(decide).await?;
        let (map, drives, meta_dirs, nodes) = {
            let state = self.state.lock().await;
            let State { map, drives, meta_dirs, cluster, .. } = &*state;
            (map.clone(), drives.clone(), meta_dirs.clone(), cluster.nodes.len())
        };
        let knowledge = Knowledge::gather(&drives, false, BTreeSet::new()).await;
        let parts = FilesystemParts {
            env: &self.env,
            dir: &self.dir,
            cluster: self.cluster,
            meta_dirs: &meta_dirs,
            runtime: &self.runtime,
            pace: &self.pace,
            map: &map,
            drives: &drives,
            knowledge: &knowledge,
            memory: &self.memory,
            nodes,
            network: &self.others.network,
            place: self.place(),
        };
        let mut entry =
            FilesystemEntry::open(&parts, record, self.seat.as_ref().map(|_| Vacancy::default())).await?;
        entry.tier.filesystem_group = group;
        {
            let mut state = self.state.lock().await;
            if let Some(newest) = state.cluster.filesystems.get(&entry.record.id) {
                entry.record.clone_from(newest);
            }
            state.filesystems.insert(request.name.clone(), entry);
            self.publish(&mut state);
        }
        self.tell().await;
        Ok(self.filesystem_info(&request.name).await?)
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

/// Problems of the audit log and of the secrets of access keys.
fn access_problems(audit: &AuditInfo, unreadable_keys: usize) -> Vec<String> {
    let mut problems = Vec::new();
    if let Some(problem) = &audit.problem {
        problems.push(format!("{problem}; requests go on, and what the queue cannot hold is lost"));
    }
    if audit.lost > 0 {
        problems.push(format!("{} requests are missing in the audit log since the start", audit.lost));
    }
    if unreadable_keys > 0 {
        problems.push(format!(
            "secrets of {unreadable_keys} access keys were sealed with another node.key: restore that file, or remove \
             these keys (forebay key list)"
        ));
    }
    problems
}

/// Locks and calls that have been stuck for long, and then the stacks of all threads.
fn stuck_problems() -> (Vec<String>, Vec<String>) {
    let problems = watchdog::problems(STUCK_AFTER);
    let stacks = if problems.is_empty() { Vec::new() } else { watchdog::stacks() };
    (problems, stacks)
}

impl NodeControl for Node {
    fn status(&self) -> BoxFuture<'_, Result<NodeStatus, AdminError>> {
        Box::pin(async { self.status_now().await.map_err(failed) })
    }

    fn status_without_waiting(&self) -> NodeStatus {
        self.last_status()
    }

    fn events(&self) -> BoxFuture<'_, Result<Vec<Event>, AdminError>> {
        Box::pin(async { self.view()?.events().map_err(AdminError::failed) })
    }

    fn add_drive(&self, request: AddDrive) -> BoxFuture<'_, Result<DriveInfo, AdminError>> {
        Box::pin(async { self.add_drive_now(request).await.map_err(failed) })
    }

    fn fail_drive(&self, id: u32, request: FailDrive) -> BoxFuture<'_, Result<DriveInfo, AdminError>> {
        Box::pin(self.fail_drive_now(DriveId(id), request))
    }

    fn return_drive(&self, id: u32) -> BoxFuture<'_, Result<DriveInfo, AdminError>> {
        Box::pin(self.return_drive_now(DriveId(id)))
    }

    fn remove_drive(&self, id: u32, request: RemoveDrive) -> BoxFuture<'_, Result<DriveInfo, AdminError>> {
        Box::pin(self.remove_drive_now(DriveId(id), request))
    }

    fn replace_drive(&self, id: u32, request: ReplaceDrive) -> BoxFuture<'_, Result<DriveInfo, AdminError>> {
        Box::pin(self.replace_drive_now(DriveId(id), request))
    }

    fn scrub_drive(&self, id: Option<u32>) -> BoxFuture<'_, Result<Vec<DriveInfo>, AdminError>> {
        Box::pin(self.scrub_drive_now(id.map(DriveId)))
    }

    fn set_upkeep(&self, request: SetUpkeep) -> BoxFuture<'_, Result<UpkeepInfo, AdminError>> {
        Box::pin(async move {
            if let Some(rate) = request.rate_bytes_per_s
                && rate < upkeep::BYTES_PER_S_MIN
            {
                let least = base::units::format_size(upkeep::BYTES_PER_S_MIN);
                return Err(AdminError::invalid(format!(
                    "rate is too low: bytes_per_s={rate} least={least}"
                )));
            }
            if let Some(limit_us) = request.keep_p99_below_us
                && !(limit_us == 0 || P99_US.contains(&limit_us))
            {
                return Err(AdminError::invalid(format!(
                    "the limit must be between {} us and {} s, or none: microseconds={limit_us}",
                    P99_US.start(),
                    P99_US.end() / 1_000_000
                )));
            }
            self.keep_upkeep(request).await.map_err(failed)?;
            Ok(self.upkeep_info())
        })
    }

    fn set_spares(&self, request: SetSpares) -> BoxFuture<'_, Result<Option<SpareInfo>, AdminError>> {
        Box::pin(self.set_spares_now(request))
    }

    fn set_profile(
        &self,
        name: String,
        request: SetProfile,
    ) -> BoxFuture<'_, Result<FilesystemInfo, AdminError>> {
        Box::pin(async move {
            let profile = request.profile.parse().map_err(|error| AdminError::invalid(format!("{error}")))?;
            if !self.state.lock().await.filesystems.contains_key(&name) {
                return Err(no_filesystem(&name));
            }
            self.set_profile_now(&name, profile).await.map_err(failed)
        })
    }

    fn balance(
        &self,
        name: String,
        request: BalanceFilesystem,
    ) -> BoxFuture<'_, Result<FilesystemBalance, AdminError>> {
        Box::pin(self.balance_now(name, request))
    }

    fn set_placement(
        &self,
        name: String,
        request: SetPlacement,
    ) -> BoxFuture<'_, Result<FilesystemInfo, AdminError>> {
        Box::pin(async move { self.set_placement_now(&name, request.placement).await })
    }

    fn verify(
        &self,
        name: String,
        request: VerifyFilesystem,
    ) -> BoxFuture<'_, Result<FilesystemVerification, AdminError>> {
        Box::pin(self.verify_now(name, request))
    }

    fn set_nodes(
        &self,
        name: String,
        request: SetNodes,
    ) -> BoxFuture<'_, Result<FilesystemBalance, AdminError>> {
        Box::pin(async move { self.set_nodes_now(&name, request).await })
    }

    fn set_limits(
        &self,
        name: String,
        request: SetLimits,
    ) -> BoxFuture<'_, Result<FilesystemInfo, AdminError>> {
        Box::pin(async move { self.set_limits_now(&name, request).await })
    }

    fn create_filesystem(
        &self,
        request: CreateFilesystem,
    ) -> BoxFuture<'_, Result<FilesystemInfo, AdminError>> {
        Box::pin(async {
            self.check_name(&request.name).await?;
            let (size, ssd) = (request.size_bytes.and_then(limit), request.ssd_bytes.and_then(limit));
            let limits = Limits { provisioned_bytes: size, ssd_bytes: ssd, ..Limits::default() };
            check_limits(&request.name, limits)?;
            self.create_filesystem_now(request).await.map_err(failed)
        })
    }

    fn mount(
        &self,
        name: String,
        request: MountRequest,
    ) -> BoxFuture<'_, Result<FilesystemInfo, AdminError>> {
        Box::pin(async move {
            let path = {
                let mut state = self.state.lock().await;
                let entry = state.filesystems.get_mut(&name).ok_or_else(|| no_filesystem(&name))?;
                if entry.is_unmounting() {
                    return Err(AdminError::conflict(format!("filesystem {name} is being unmounted")));
                }
                entry.unmount_leaving().await.map_err(failed)?;
                if let Some(path) = entry.mount_path() {
                    let message = format!("filesystem {name} is mounted already: path={}", path.display());
                    return Err(AdminError::conflict(message));
                }
                let kept = self.local_mounts.of(entry.record.id).path.map(PathBuf::from);
                request.path.map(PathBuf::from).or(kept).unwrap_or_else(|| self.dir.default_mount())
            };
            self.mount_and_remember(&name, path, request.options).await.map_err(failed)?;
            self.write_node_file().await.map_err(failed)?;
            self.filesystem_info(&name).await
        })
    }

    fn unmount(&self, name: String) -> BoxFuture<'_, Result<FilesystemInfo, AdminError>> {
        Box::pin(async move {
            let (path, mut unmounting) = {
                let mut state = self.state.lock().await;
                let entry = state.filesystems.get_mut(&name).ok_or_else(|| no_filesystem(&name))?;
                let Some(path) = entry.mount_path() else {
                    return Err(AdminError::conflict(format!("filesystem {name} is not mounted")));
                };
                (path, entry.begin_unmount())
            };
            let unmounted = unmounting.run(UnmountMode::IfIdle).await;
            if let Some(entry) = self.state.lock().await.filesystems.get_mut(&name) {
                entry.end_unmount(unmounting);
            }
            unmounted.map_err(|error| {
                let path = path.display();
                AdminError::conflict(format!(
                    "cannot unmount {path}: {error:#}; close the files that are open on it"
                ))
            })?;
            self.write_node_file().await.map_err(failed)?;
            self.filesystem_info(&name).await
        })
    }

    fn sync(&self, name: String) -> BoxFuture<'_, Result<(), AdminError>> {
        Box::pin(async move {
            // Nothing waits for this, which may take long.
            let (client, process) = {
                let state = self.state.lock().await;
                let entry = state.filesystems.get(&name).ok_or_else(|| no_filesystem(&name))?;
                (entry.client.clone(), entry.mount_process().cloned())
            };
            let mut synced = client.sync().await.map_err(anyhow::Error::from);
            if let Some(process) = process {
                synced = synced.and(process.sync().await);
            }
            synced.map_err(|error| {
                AdminError::conflict(format!(
                    "not all of filesystem {name} is durable: {error:#}; `forebay status` says what is wrong with its drives"
                ))
            })
        })
    }

    fn add_meta_dir(&self, request: MetaDir) -> BoxFuture<'_, Result<NodeStatus, AdminError>> {
        Box::pin(async { self.add_meta_dir_now(request).await.map_err(failed) })
    }

    fn remove_meta_dir(&self, request: MetaDir) -> BoxFuture<'_, Result<NodeStatus, AdminError>> {
        Box::pin(async { self.remove_meta_dir_now(request).await.map_err(failed) })
    }

    fn settle_metadata(&self) -> BoxFuture<'_, Result<NodeStatus, AdminError>> {
        Box::pin(async { self.settle_metadata_now().await.map_err(failed) })
    }

    fn start_fsck(self: Arc<Self>) -> BoxFuture<'static, Result<FsckInfo, AdminError>> {
        Box::pin(async { self.start_fsck_now().await.map_err(failed) })
    }

    fn fsck(&self) -> BoxFuture<'_, Result<FsckInfo, AdminError>> {
        Box::pin(async { self.fsck_now() })
    }

    fn why(&self, name: String, path: String) -> BoxFuture<'_, Result<WhyInfo, AdminError>> {
        Box::pin(async move { self.why_now(&name, &path).await })
    }
}

/// Applies the limits of background work.
pub(super) fn apply_upkeep(pace: &Pace, upkeep: UpkeepRecord) {
    if let Some(rate) = upkeep.rate_bytes_per_s {
        pace.set_bytes_per_s(rate);
    }
    pace.set_paused(upkeep.paused);
    if let Some(limit_us) = upkeep.keep_p99_below_us {
        pace.set_keep_p99_below_us(limit_us);
    }
}
