//! Adding, removing and replacing drives, and the changes of placement groups that follow.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::time::Duration;

use admin::{AddDrive, AdminError, DriveInfo, FailDrive, RemoveDrive, ReplaceDrive};
use anyhow::{Result, bail};
use base::{DriveId, LedgerId, PgId};
use drive::Existing;
use layout::{DriveSlot, DriveState, PlacementGroup, Rebuilding, replace_members};
use meta::control::{ClusterRecord, ControlChange, DriveRecord};
use wire::drive::{DriveHealth, DriveService};

use super::drives::{DriveEntry, NewDrive, format_drives};
use super::filesystems::{exposure, exposure_without, plan_groups};
use super::history::behind;
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

fn failed(error: anyhow::Error) -> AdminError {
    AdminError::failed(format!("{error:#}"))
}

fn domains(state: &State) -> HashMap<DriveId, u64> {
    state.drives.iter().map(|(id, entry)| (*id, entry.record.domain)).collect()
}

fn slots(state: &State) -> Vec<DriveSlot> {
    state.drives.values().filter(|entry| entry.is_up()).map(DriveEntry::slot).collect()
}

/// Number of groups that need each drive: as a member, or for shards that were not moved off it yet.
pub(super) fn group_counts(groups: &[PlacementGroup]) -> BTreeMap<DriveId, u32> {
    let mut counts = BTreeMap::new();
    for group in groups {
        let sources = group.rebuilding.iter().map(|rebuilding| rebuilding.from);
        let needed: BTreeSet<DriveId> = group.members.iter().copied().chain(sources).collect();
        for drive in needed {
            *counts.entry(drive).or_default() += 1;
        }
    }
    counts
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
    pub(super) fn publish(&self, state: &mut State) -> Result<()> {
        state.map = self.control.map()?;
        for entry in state.filesystems.values_mut() {
            entry.update(&state.map, &state.drives);
        }
        self.clients.update(state);
        self.publish_scrub(state);
        Ok(())
    }

    /// Records a drive's state durably. The caller publishes it.
    pub(super) async fn set_drive_state(
        &self,
        state: &mut State,
        id: DriveId,
        next: DriveState,
        why: &str,
    ) -> Result<()> {
        let Some(entry) = state.drives.get_mut(&id) else { bail!("no such drive: id={id}") };
        let record = DriveRecord { state: next, ..entry.record.clone() };
        let mut cluster = self.control.cluster()?;
        cluster.map_epoch += 1;
        let mut change = ControlChange::default();
        change.drive(&record).cluster(&cluster);
        self.control.commit(change).await?;
        entry.record = record;
        entry.problem = Some(why.to_owned()).filter(|why| !why.is_empty());
        state.map = self.control.map()?;
        Ok(())
    }

    /// Whether other drives could take over a position of this one.
    pub(super) fn can_replace(&self, state: &State, id: DriveId) -> bool {
        !self.replaced(state, &BTreeSet::from([id])).is_empty()
    }

    /// A filesystem that loses data without this drive, because too few other drives hold it.
    pub(super) async fn holds_the_last(&self, state: &State, id: DriveId) -> Result<Option<String>> {
        for (name, entry) in &state.filesystems {
            let owed = entry.owed_holders(&state.map).await?;
            for (profile, groups) in entry.record.all_sets() {
                let groups = groups.iter().filter_map(|pg| state.map.group(*pg));
                let mut concerned = groups.filter(|group| group.members.contains(&id));
                if concerned.any(|group| exposure(group, &state.drives, &owed) > profile.m()) {
                    return Ok(Some(name.clone()));
                }
            }
        }
        Ok(None)
    }

    /// Refuses to give up a dead drive whose data is needed.
    async fn check_expendable(&self, state: &State, id: DriveId) -> Result<(), AdminError> {
        match self.holds_the_last(state, id).await.map_err(failed)? {
            None => Ok(()),
            Some(name) => Err(conflict(format!(
                "filesystem {name} would lose data: too few other drives hold what is on drive {id}; bring it back \
                 (forebay drive return {id}) or repeat with --force to give that up"
            ))),
        }
    }

    fn replaced(&self, state: &State, gone: &BTreeSet<DriveId>) -> Vec<PlacementGroup> {
        let spare: Vec<DriveSlot> =
            slots(state).into_iter().filter(|slot| !gone.contains(&slot.drive)).collect();
        replace_members(&state.map.groups, gone, &spare, &domains(state))
    }

    /// Gives positions of drives that are out or leaving to other drives. Returns whether there were any.
    pub(super) async fn reassign(&self, state: &mut State) -> Result<bool> {
        let counts = group_counts(&state.map.groups);
        let going = |entry: &&DriveEntry| matches!(entry.record.state, DriveState::Out | DriveState::Leaving);
        let gone: BTreeSet<DriveId> =
            state.drives.values().filter(going).map(|entry| entry.record.id).collect();
        if !gone.iter().any(|id| counts.contains_key(id)) {
            return Ok(false);
        }
        let changed = self.replaced(state, &gone);
        if changed.is_empty() {
            return Ok(false);
        }
        tracing::warn!(groups = changed.len(), drives = ?gone, "others take over positions of drives that go");
        self.commit_groups(state, &changed, ControlChange::default()).await?;
        Ok(true)
    }

    async fn commit_groups(
        &self,
        state: &mut State,
        groups: &[PlacementGroup],
        mut change: ControlChange,
    ) -> Result<()> {
        let mut cluster = self.control.cluster()?;
        cluster.map_epoch += 1;
        change.cluster(&cluster);
        groups.iter().for_each(|group| {
            change.group(group);
        });
        self.control.commit(change).await?;
        state.map = self.control.map()?;
        Ok(())
    }

    /// Records groups whose new members have all shards, and drives that no group needs any more.
    pub(super) async fn finish_rebuilds(&self, state: &mut State) -> Result<bool> {
        let rebuilding = state.map.groups.iter().filter(|group| !group.rebuilding.is_empty());
        let mut done: Vec<PlacementGroup> = rebuilding.cloned().collect();
        for entry in state.filesystems.values() {
            let rebuilt = entry.rebuilt();
            done.retain(|group| rebuilt.get(&group.id) == Some(&group.epoch));
        }
        done.iter_mut().for_each(|group| group.rebuilding.clear());
        if !done.is_empty() {
            tracing::info!(groups = done.len(), "placement groups are rebuilt");
            self.commit_groups(state, &done, ControlChange::default()).await?;
        }
        let needed = group_counts(&state.map.groups);
        let leaving = state.drives.values().filter(|entry| entry.record.state == DriveState::Leaving);
        let empty: Vec<DriveId> =
            leaving.map(|entry| entry.record.id).filter(|id| !needed.contains_key(id)).collect();
        for id in &empty {
            tracing::info!(drive = %id, "everything is moved off the drive");
            self.set_drive_state(state, *id, DriveState::Out, "everything was moved off it").await?;
        }
        Ok(!done.is_empty() || !empty.is_empty())
    }

    async fn format_new(
        &self,
        state: &State,
        path: Option<PathBuf>,
        size_bytes: Option<u64>,
    ) -> Result<(DriveRecord, ClusterRecord)> {
        let mut cluster = self.control.cluster()?;
        let id = cluster.next_drive;
        let in_use = state.drives.values().filter(|entry| entry.record.state != DriveState::Out);
        let smallest = in_use.map(|entry| entry.record.capacity_bytes).min();
        let path = path.unwrap_or_else(|| self.dir.drives().join(format!("{id}.img")));
        let is_file = !self.env.files.exists(&path);
        let size_bytes = if is_file { size_bytes.or(smallest) } else { None };
        let new_drive =
            NewDrive { path, size_bytes, existing: Existing::Keep, trim: self.drive_settings.trim };
        let (env, id_of_cluster) = (self.env.clone(), self.cluster);
        let format = move || format_drives(&env, id_of_cluster, id, &[new_drive]);
        let record = tokio::task::spawn_blocking(format).await??.remove(0);
        cluster.next_drive += 1;
        cluster.map_epoch += 1;
        Ok((record, cluster))
    }

    pub(super) async fn add_drive_now(&self, request: AddDrive) -> Result<DriveInfo> {
        let mut state = self.state.lock().await;
        let path = request.path.map(PathBuf::from);
        let (record, mut cluster) = self.format_new(&state, path, request.size_bytes).await?;
        let mut change = ControlChange::default();
        change.drive(&record);
        // New groups over all drives: new data uses the new drive, stored data is not moved.
        let up = state.drives.values().filter(|entry| entry.is_up()).map(|entry| entry.record.clone());
        let records: Vec<_> = up.chain([record.clone()]).collect();
        let all: Vec<_> = records.iter().collect();
        for entry in state.filesystems.values_mut() {
            let profile = entry.record.profile;
            if usize::from(profile.n()) > all.len() {
                continue;
            }
            let groups = plan_groups(&self.env, &all, profile, cluster.next_group)?;
            cluster.next_group += groups.len() as u32;
            entry.record.add_groups(profile, groups.iter().map(|group| group.id));
            groups.iter().for_each(|group| {
                change.group(group);
            });
            change.filesystem(&entry.record);
        }
        change.cluster(&cluster);
        self.control.commit(change).await?;
        self.take_in(&mut state, record).await
    }

    /// Opens a drive that the control ledger has, and publishes it.
    async fn take_in(&self, state: &mut State, record: DriveRecord) -> Result<DriveInfo> {
        let id = record.id;
        let (env, cluster, settings) = (self.env.clone(), self.cluster, self.drive_settings);
        let open = move || DriveEntry::open(&env, cluster, record, settings);
        state.drives.insert(id, tokio::task::spawn_blocking(open).await?);
        self.publish(state)?;
        self.tell(state).await;
        self.drive_info(state, id)
    }

    pub(super) fn drive_info(&self, state: &State, id: DriveId) -> Result<DriveInfo> {
        let info = self.drive_infos(state).into_iter().find(|info| info.id == id.0);
        info.ok_or_else(|| anyhow::anyhow!("no such drive: id={id}"))
    }

    /// The state of every drive, for `status`.
    pub(super) fn drive_infos(&self, state: &State) -> Vec<DriveInfo> {
        let counts = group_counts(&state.map.groups);
        let slow: BTreeSet<DriveId> =
            state.filesystems.values().flat_map(|entry| entry.client.slow_drives()).collect();
        let behind = behind(&state.map);
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
        self.publish(&mut state).map_err(failed)?;
        self.tell(&mut state).await;
        self.drive_info(&state, id).map_err(failed)
    }

    /// Refuses to remove a drive that data depends on. Every extent counts with the profile that it is stored with,
    /// which may differ from its filesystem's present profile.
    async fn check_survives(&self, state: &State, id: DriveId) -> Result<(), AdminError> {
        let held = groups_held(state, id).await.map_err(failed)?;
        for (name, entry) in &state.filesystems {
            let owed = entry.owed_holders(&state.map).await.map_err(failed)?;
            let present = entry.record.profile;
            for (profile, groups) in entry.record.all_sets() {
                // Groups of the present profile may get new extents at any moment.
                let is_used = |pg: &&PgId| profile == present || held.contains(&(entry.record.ledger, **pg));
                let groups = groups.iter().filter(is_used);
                let groups = groups.filter_map(|pg| state.map.group(*pg));
                let gone = groups.map(|group| exposure_without(group, &state.drives, &owed, Some(id))).max();
                let Some(gone) = gone.filter(|gone| *gone > profile.m()) else { continue };
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
        let member_of = group_counts(&state.map.groups).get(&id).copied().unwrap_or(0);
        let replaced = self.replaced(&state, &BTreeSet::from([id])).len() as u32;
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
        let next = if alive { DriveState::Leaving } else { DriveState::Out };
        let why = if alive { "being emptied" } else { "removed" };
        self.set_drive_state(&mut state, id, next, why).await.map_err(failed)?;
        self.reassign(&mut state).await.map_err(failed)?;
        self.publish(&mut state).map_err(failed)?;
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
        if !state.map.groups.iter().any(|group| group.members.contains(&id)) {
            return Err(conflict(format!("drive holds no position that another could take: id={id}")));
        }
        let alive = entry.is_readable();
        if !alive && !request.force {
            self.check_expendable(&state, id).await?;
        }
        let size_bytes = request.size_bytes.or(Some(entry.record.capacity_bytes));
        let old = DriveRecord {
            state: if alive { DriveState::Leaving } else { DriveState::Out },
            ..entry.record.clone()
        };
        let path = Some(PathBuf::from(request.path));
        let (new, cluster) = self.format_new(&state, path, size_bytes).await.map_err(failed)?;
        let mut groups = state.map.groups.clone();
        groups.retain(|group| group.members.contains(&id));
        for group in &mut groups {
            group.epoch.0 += 1;
            for (position, member) in (0u8..).zip(&mut group.members).filter(|(_, member)| **member == id) {
                *member = new.id;
                group.rebuilding.push(Rebuilding { position, from: id });
            }
        }
        let mut change = ControlChange::default();
        change.drive(&old).drive(&new).cluster(&cluster);
        groups.iter().for_each(|group| {
            change.group(group);
        });
        self.control.commit(change).await.map_err(|error| failed(error.into()))?;
        if let Some(entry) = state.drives.get_mut(&id) {
            entry.record = old;
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
            self.publish(&mut state).map_err(failed)?;
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
        self.publish(&mut state).map_err(failed)?;
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
