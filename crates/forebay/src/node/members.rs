//! Adding, removing and replacing drives, and the changes of placement groups that follow.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use admin::{AddDrive, AdminError, DriveInfo, FailDrive, RemoveDrive, ReplaceDrive};
use anyhow::Result;
use base::{DriveId, LedgerId, PgId};
use control::{DriveRecord, FilesystemRecord};
use drive::Existing;
use layout::DriveState;
use wire::drive::{DriveHealth, DriveService};

use super::drives::{DriveEntry, NewDrive, format_drives};
use super::management::failed;
use super::{Node, State};

/// Attempts to open a drive that another process is still closing, and the pause between them.
const RETURN_ATTEMPTS: u32 = 100;
const RETURN_PAUSE: Duration = Duration::from_millis(50);

/// Shards of an inventory per request.
const LIST_PAGE: usize = 16_384;

fn conflict(message: String) -> AdminError {
    AdminError::conflict(message)
}

fn no_drive(id: DriveId) -> AdminError {
    AdminError::not_found(format!("no such drive: id={id} (see `forebay drive list`)"))
}

/// The groups of which a drive holds shards, with their ledgers.
async fn groups_held(state: &State, id: DriveId) -> Result<BTreeSet<(LedgerId, PgId)>> {
    let mut held = BTreeSet::new();
    let service = state.drives.get(&id).and_then(|entry| entry.service.as_ref());
    let Some(service) = service.filter(|service| service.health() == DriveHealth::Up) else {
        return Ok(held);
    };
    let mut after = None;
    loop {
        let page = service.list(after, LIST_PAGE).await?;
        held.extend(page.iter().map(|entry| (entry.key.ledger, entry.shape.pg)));
        after = page.last().map(|last| last.key);
        if page.len() < LIST_PAGE {
            return Ok(held);
        }
    }
}

impl Node {
    /// Publishes drives and groups to every client.
    pub(super) fn publish(&self, state: &mut State) {
        for entry in state.filesystems.values_mut() {
            entry.update(&state.map, &state.drives);
        }
        self.clients.update(state);
        self.publish_scrub(state);
    }

    /// Records a drive's state durably. The caller publishes it.
    pub(super) async fn set_drive_state(
        &self,
        state: &mut State,
        id: DriveId,
        next: DriveState,
        why: &str,
    ) -> Result<()> {
        self.plan(state, |plan| Ok(plan.set_drive_state(id, next))).await?;
        if let Some(entry) = state.drives.get_mut(&id) {
            entry.problem = Some(why.to_owned()).filter(|why| !why.is_empty());
        }
        Ok(())
    }

    /// Refuses to give up a dead drive whose data is needed.
    async fn check_expendable(&self, state: &State, id: DriveId) -> Result<(), AdminError> {
        let owed = state.owed().await.map_err(failed)?;
        match state.cluster.needs(id, &state.seen(), &owed) {
            None => Ok(()),
            Some(FilesystemRecord { name, .. }) => Err(conflict(format!(
                "filesystem {name} would lose data: too few other drives hold what is on drive {id}; bring it back \
                 (forebay drive return {id}) or repeat with --force to give that up"
            ))),
        }
    }

    /// Formats a drive, under a number that no other gets.
    async fn format_new(
        &self,
        state: &mut State,
        path: Option<PathBuf>,
        size_bytes: Option<u64>,
    ) -> Result<DriveRecord> {
        let id = self.plan(state, |plan| Ok(plan.next_drive())).await?.0;
        let in_use = state.drives.values().filter(|entry| entry.record.state != DriveState::Out);
        let smallest = in_use.map(|entry| entry.record.capacity_bytes).min();
        let path = path.unwrap_or_else(|| self.dir.drives().join(format!("{id}.img")));
        let is_file = !self.env.files.exists(&path);
        let size_bytes = if is_file { size_bytes.or(smallest) } else { None };
        let new_drive =
            NewDrive { path, size_bytes, existing: Existing::Keep, trim: self.drive_settings.trim };
        let (env, id_of_cluster) = (self.env.clone(), self.cluster);
        let format = move || format_drives(&env, id_of_cluster, id, &[new_drive]);
        Ok(tokio::task::spawn_blocking(format).await??.remove(0))
    }

    pub(super) async fn add_drive_now(&self, request: AddDrive) -> Result<DriveInfo> {
        let mut state = self.state.lock().await;
        let path = request.path.map(PathBuf::from);
        let record = self.format_new(&mut state, path, request.size_bytes).await?;
        let (seen, seed) = (state.seen(), self.env.random.next_u64());
        self.plan(&mut state, |plan| Ok(plan.add_drive(record.clone(), &seen, seed)?)).await?;
        self.take_in(&mut state, record).await
    }

    /// Opens a drive that the control ledger has, and publishes it.
    async fn take_in(&self, state: &mut State, record: DriveRecord) -> Result<DriveInfo> {
        let id = record.id;
        let (env, cluster, settings) = (self.env.clone(), self.cluster, self.drive_settings);
        let open = move || DriveEntry::open(&env, cluster, record, settings);
        state.drives.insert(id, tokio::task::spawn_blocking(open).await?);
        self.publish(state);
        self.tell(state).await;
        self.drive_info(state, id)
    }

    pub(super) fn drive_info(&self, state: &State, id: DriveId) -> Result<DriveInfo> {
        let info = self.drive_infos(state).into_iter().find(|info| info.id == id.0);
        info.ok_or_else(|| anyhow::anyhow!("no such drive: id={id}"))
    }

    /// The state of every drive, for `status`.
    pub(super) fn drive_infos(&self, state: &State) -> Vec<DriveInfo> {
        let counts = state.cluster.group_counts();
        let slow: BTreeSet<DriveId> =
            state.filesystems.values().flat_map(|entry| entry.client.slow_drives()).collect();
        let behind = state.cluster.behind();
        let mut scrubs = self.scrub_infos();
        let mut info = |(id, entry): (&DriveId, &DriveEntry)| {
            let mut info = entry.info();
            info.scrub = scrubs.remove(id).unwrap_or_default();
            info.groups = counts.get(id).copied().unwrap_or(0);
            if behind.contains(id) && info.reason.is_none() {
                let reason = "it came back as an older copy: what it lacks is being restored from the others";
                info.reason = Some(reason.to_owned());
            }
            if entry.is_up() && slow.contains(id) {
                info.state = "suspect".to_owned();
                info.reason = Some("much slower than the others, spared where they suffice".to_owned());
            }
            info
        };
        state.drives.iter().map(&mut info).collect()
    }

    pub(super) async fn fail_drive_now(
        &self,
        id: DriveId,
        request: FailDrive,
    ) -> Result<DriveInfo, AdminError> {
        let mut state = self.state.lock().await;
        self.tell(&mut state).await;
        if !state.drives.contains_key(&id) {
            return Err(no_drive(id));
        }
        if !request.force {
            self.check_survives(&state, id).await?;
        }
        let why = "marked as failed by the operator";
        self.set_drive_state(&mut state, id, DriveState::Failed, why).await.map_err(failed)?;
        self.publish(&mut state);
        self.tell(&mut state).await;
        self.drive_info(&state, id).map_err(failed)
    }

    /// Refuses to remove a drive that data depends on. Every extent counts with the profile that it is stored with,
    /// which may differ from its filesystem's present profile.
    async fn check_survives(&self, state: &State, id: DriveId) -> Result<(), AdminError> {
        let held = groups_held(state, id).await.map_err(failed)?;
        let left = state.seen().without(id);
        for (name, entry) in &state.filesystems {
            let owed = entry.owed_holders(&state.cluster).await.map_err(failed)?;
            let present = entry.record.profile;
            for (profile, groups) in entry.record.all_sets() {
                // Groups of the present profile may get new extents at any moment.
                let is_used = |pg: &&PgId| profile == present || held.contains(&(entry.record.ledger, **pg));
                let gone = state.cluster.worst(groups.iter().filter(is_used), &left, &owed);
                if gone <= profile.m() {
                    continue;
                }
                let wait = if profile == present {
                    String::new()
                } else {
                    format!(" wait until everything is stored as {present} (forebay status), or")
                };
                return Err(conflict(format!(
                    "filesystem {name} would lose data: what is stored as {profile} survives {} lost drives and {gone} \
                     would be gone;{wait} repeat with --force to do it all the same",
                    profile.m()
                )));
            }
        }
        Ok(())
    }

    pub(super) async fn remove_drive_now(
        &self,
        id: DriveId,
        request: RemoveDrive,
    ) -> Result<DriveInfo, AdminError> {
        let mut state = self.state.lock().await;
        self.tell(&mut state).await;
        let entry = state.drives.get(&id).ok_or_else(|| no_drive(id))?;
        if matches!(entry.record.state, DriveState::Out | DriveState::Leaving) {
            return Err(conflict(format!("drive is {} already: id={id}", entry.state())));
        }
        let alive = entry.is_readable();
        let seen = state.seen();
        let (member_of, replaced) = (state.cluster.groups_with(id), state.cluster.replaceable(id, &seen));
        if alive && replaced < member_of {
            return Err(conflict(format!(
                "drive {id} cannot be removed: {} of its {member_of} placement groups have no other drive to go to; add \
                 one first (forebay drive add), or put one in its place (forebay drive replace {id} --path PATH)",
                member_of - replaced
            )));
        }
        if !alive && !request.force {
            self.check_expendable(&state, id).await?;
        }
        self.plan(&mut state, |plan| Ok(plan.give_up(id, &seen))).await.map_err(failed)?;
        if let Some(entry) = state.drives.get_mut(&id) {
            entry.problem = Some(if alive { "being emptied" } else { "removed" }.to_owned());
        }
        self.publish(&mut state);
        self.tell(&mut state).await;
        self.drive_info(&state, id).map_err(failed)
    }

    pub(super) async fn replace_drive_now(
        &self,
        id: DriveId,
        request: ReplaceDrive,
    ) -> Result<DriveInfo, AdminError> {
        let mut state = self.state.lock().await;
        self.tell(&mut state).await;
        let entry = state.drives.get(&id).ok_or_else(|| no_drive(id))?;
        if !state.cluster.groups.values().any(|group| group.members.contains(&id)) {
            return Err(conflict(format!("drive holds no position that another could take: id={id}")));
        }
        let alive = entry.is_readable();
        if !alive && !request.force {
            self.check_expendable(&state, id).await?;
        }
        let size_bytes = request.size_bytes.or(Some(entry.record.capacity_bytes));
        let path = Some(PathBuf::from(request.path));
        let new = self.format_new(&mut state, path, size_bytes).await.map_err(failed)?;
        let seen = state.seen();
        self.plan(&mut state, |plan| Ok(plan.replace(id, new.clone(), &seen))).await.map_err(failed)?;
        if let Some(entry) = state.drives.get_mut(&id) {
            entry.problem = Some(format!("replaced by drive {}", new.id));
        }
        self.take_in(&mut state, new).await.map_err(failed)
    }

    /// Uses a drive again. A drive whose service failed is opened anew: it has everything that was acknowledged before,
    /// and repair writes the shards that it is owed since.
    pub(super) async fn return_drive_now(&self, id: DriveId) -> Result<DriveInfo, AdminError> {
        let mut state = self.state.lock().await;
        self.tell(&mut state).await;
        let entry = state.drives.get_mut(&id).ok_or_else(|| no_drive(id))?;
        match entry.record.state {
            DriveState::Out | DriveState::Leaving => {
                let state = entry.state();
                return Err(conflict(format!(
                    "drive is {state}, others have its positions: id={id}; use it as a new one (forebay drive add)"
                )));
            }
            DriveState::Up if entry.is_up() => return Err(conflict(format!("drive is up: id={id}"))),
            DriveState::Up | DriveState::Failed => {}
        }
        let health = entry.service.as_ref().map(|service| service.health());
        if health != Some(DriveHealth::Up) {
            let old = entry.service.take();
            let record = DriveRecord { state: DriveState::Up, ..entry.record.clone() };
            self.publish(&mut state);
            // Its thread may take a moment to end.
            tokio::task::spawn_blocking(move || drop(old)).await.map_err(AdminError::failed)?;
            let opened = self.open_again(record).await.map_err(failed)?;
            self.admit(&mut state, opened).await.map_err(failed)?;
            let entry = state.drives.get(&id).ok_or_else(|| no_drive(id))?;
            if entry.service.is_none() {
                let problem = entry.problem.as_deref().unwrap_or_default();
                return Err(conflict(format!("drive cannot be used: id={id}: {problem}")));
            }
        }
        self.set_drive_state(&mut state, id, DriveState::Up, "").await.map_err(failed)?;
        self.publish(&mut state);
        self.tell(&mut state).await;
        self.drive_info(&state, id).map_err(failed)
    }

    async fn open_again(&self, record: DriveRecord) -> Result<DriveEntry> {
        let mut attempt = 0;
        loop {
            let (env, cluster, record) = (self.env.clone(), self.cluster, record.clone());
            let settings = self.drive_settings;
            let open = move || DriveEntry::open(&env, cluster, record, settings);
            let opened = tokio::task::spawn_blocking(open).await?;
            attempt += 1;
            // Requests under way on the old service keep the device open until they end.
            let in_use = opened.problem.as_deref().is_some_and(|problem| problem.contains("in use"));
            if !in_use || attempt == RETURN_ATTEMPTS {
                return Ok(opened);
            }
            tokio::time::sleep(RETURN_PAUSE).await;
        }
    }
}
