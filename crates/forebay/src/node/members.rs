//! Adding, removing and replacing drives, and the changes of placement groups that follow.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use admin::{AddDrive, AdminError, DriveInfo, FailDrive, RemoveDrive, ReplaceDrive};
use anyhow::{Result, bail};
use base::{DriveId, DriveUuid, LedgerId, NodeId, PgId};
use control::{DriveRecord, FilesystemRecord, NodeRecord, Plan};
use layout::DriveState;
use wire::drive::DriveHealth;

use super::drives::{DriveEntry, DriveMaker, OpenDrive};
use super::filesystems::ClusterFacts;
use super::management::failed;
use super::network::{addresses_of, proof_key};
use super::{Node, State};

/// How long it may take until a drive is used that came to this machine, and how often that is looked at.
const USED_PATIENCE: Duration = Duration::from_secs(15);
const USED_LOOK: Duration = Duration::from_millis(100);
/// How long it may take until a drive is seen to be out of use that left its machine.
const FORMER_PATIENCE: Duration = Duration::from_secs(12);
/// Shards of an inventory per request.
const LIST_PAGE: usize = 16_384;

fn conflict(message: String) -> AdminError {
    AdminError::conflict(message)
}

fn no_drive(id: DriveId) -> AdminError {
    AdminError::not_found(format!("no such drive: id={id} (see `forebay drive list`)"))
}

/// The groups of which a drive holds shards, with their ledgers.
pub(super) async fn groups_held(service: Option<OpenDrive>) -> Result<BTreeSet<(LedgerId, PgId)>> {
    let mut held = BTreeSet::new();
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
        let nodes = addresses_of(&state.cluster);
        self.others.network.set_nodes(&nodes, &self.runtime);
        self.others.network.set_witnesses(&state.cluster);
        self.others.network.set_guests(state.cluster.client_rights(), &self.runtime);
        let places = state.cluster.node_places().into_values().collect();
        let mut facts = ClusterFacts { nodes, places, spare_millionths: 0 };
        for entry in state.filesystems.values_mut() {
            let spare = state.cluster.spare(&entry.record).ok().flatten();
            facts.spare_millionths = spare.map_or(0, |spare| spare.millionths());
            entry.update(&state.map, &state.drives, &facts);
        }
        let mut services = self.clients.update(state, self.control.clone());
        services.proofs = proof_key(&self.env, &self.dir);
        self.others.serve(services);
        self.publish_scrub(state);
    }

    /// Notes why a drive is as it is; nothing if there is no reason.
    pub(super) async fn note_problem(&self, id: DriveId, why: &str) {
        if let Some(entry) = self.state.lock().await.drives.get_mut(&id) {
            entry.problem = Some(why.to_owned()).filter(|why| !why.is_empty());
        }
    }

    /// Records a drive's state durably.
    async fn set_drive_state(&self, id: DriveId, next: DriveState, why: &str) -> Result<()> {
        self.change(|plan| plan.set_drive_state(id, next)).await?;
        self.note_problem(id, why).await;
        Ok(())
    }

    /// Refuses to give up a dead drive whose data is needed.
    async fn check_expendable(&self, id: DriveId) -> Result<(), AdminError> {
        let owed = self.owed().await.map_err(failed)?;
        let state = self.state.lock().await;
        match state.cluster.needs(id, &state.seen(), &owed) {
            None => Ok(()),
            Some(FilesystemRecord { name, .. }) => Err(conflict(format!(
                "filesystem {name} would lose data: too few other drives hold what is on drive {id}; bring it back \
                 (forebay drive return {id}) or repeat with --force to give that up"
            ))),
        }
    }

    fn drive_maker(&self) -> DriveMaker {
        DriveMaker {
            env: self.env.clone(),
            dir: self.dir.clone(),
            cluster: self.cluster,
            node: self.here(),
            settings: self.drive_settings,
            paths: self.local_drives.clone(),
        }
    }

    /// Formats a drive at a node, under a number that no other gets, and opens it.
    async fn format_new(
        &self,
        node: NodeId,
        path: Option<String>,
        size_bytes: Option<u64>,
    ) -> Result<DriveEntry> {
        let smallest = {
            let state = self.state.lock().await;
            let in_use = state.drives.values().filter(|entry| entry.record.state != DriveState::Out);
            in_use.map(|entry| entry.record.capacity_bytes).min()
        };
        let size_bytes = size_bytes.or(smallest);
        let id = self.plan(|plan| Ok(plan.next_drive())).await?;
        if self.opens(node) {
            self.drive_maker().make(id, path.map(PathBuf::from), size_bytes).await
        } else {
            self.format_elsewhere(node, id, path, size_bytes).await
        }
    }

    /// Takes a new drive into use with a plan. It is there before the plan, so that nobody finds it missing.
    async fn take_in(
        &self,
        entry: DriveEntry,
        mut decide: impl FnMut(&mut Plan, &DriveRecord) -> Result<()>,
    ) -> Result<DriveInfo> {
        let record = entry.record.clone();
        self.state.lock().await.drives.insert(record.id, entry);
        if let Err(error) = self.plan(|plan| decide(plan, &record)).await {
            let unused = self.state.lock().await.drives.remove(&record.id);
            tokio::task::spawn_blocking(move || drop(unused)).await?;
            if !self.opens(record.node) {
                self.close_elsewhere(record.node, record.id).await;
            }
            return Err(error);
        }
        self.publish(&mut *self.state.lock().await);
        self.tell().await;
        self.drive_info_of(record.id).await
    }

    pub(super) async fn add_drive_now(&self, request: AddDrive) -> Result<DriveInfo> {
        let one_at_a_time = self.drives_lock.lock().await;
        let node = request.node.map_or(self.here(), NodeId);
        let is_witness = |node: &NodeRecord| node.witness;
        if self.state.lock().await.cluster.nodes.get(&node).is_some_and(is_witness) {
            bail!(conflict(format!("node {node} is a witness, which has no drives: add it at another node")));
        }
        if let Some(path) = &request.path
            && let Some(id) = self.find_drive(node, path).await?
        {
            self.change(|plan| plan.move_drive(id, node)).await?;
            // It is taken into use as any drive that is there again.
            drop(one_at_a_time);
            return self.wait_until_used(id).await;
        }
        let entry = self.format_new(node, request.path, request.size_bytes).await?;
        let (seen, seed) = (self.state.lock().await.seen(), self.env.random.next_u64());
        self.take_in(entry, |plan, record| Ok(plan.add_drive(record.clone(), &seen, seed)?)).await
    }

    /// The drive of the cluster that is at a path of a node. One that is in use, or was given up, is refused.
    async fn find_drive(&self, node: NodeId, path: &str) -> Result<Option<DriveId>> {
        let uuid = match self.opens(node) {
            true => self.drive_maker().drive_at(path.into()).await?.map(|(uuid, _)| uuid),
            false => self.locate_at(node, path).await?,
        };
        let Some(uuid) = uuid else { return Ok(None) };
        // Its former machine may just have ended.
        let begun = tokio::time::Instant::now();
        while self.is_in_use(uuid).await && begun.elapsed() < FORMER_PATIENCE {
            tokio::time::sleep(USED_LOOK).await;
        }
        let mut state = self.state.lock().await;
        let known = state.drives.iter_mut().find(|(_, entry)| entry.record.uuid == uuid);
        let Some((id, entry)) = known else { return Ok(None) };
        if entry.record.is_given_up() {
            bail!(
                "{path} is drive {id} of this cluster, which is {}: others have what it held; erase it (wipefs --all), and it \
                 can be added as a new one",
                entry.state()
            );
        }
        if entry.is_readable() {
            bail!(
                "{path} is drive {id} of this cluster, or a copy of it, and in use: node={} path={}",
                entry.record.node,
                entry.path_text()
            );
        }
        if self.opens(node) {
            let path = std::path::absolute(path)?;
            self.local_drives.set([(uuid, path.clone())])?;
            entry.set_path(path);
        }
        Ok(Some(*id))
    }

    async fn is_in_use(&self, uuid: DriveUuid) -> bool {
        let state = self.state.lock().await;
        state.drives.values().any(|entry| entry.record.uuid == uuid && entry.is_readable())
    }

    /// Waits until a drive is used that is there again.
    async fn wait_until_used(&self, id: DriveId) -> Result<DriveInfo> {
        let begun = tokio::time::Instant::now();
        loop {
            let info = self.drive_info_of(id).await?;
            match info.state.as_str() {
                "missing" if begun.elapsed() < USED_PATIENCE => tokio::time::sleep(USED_LOOK).await,
                "missing" => bail!(
                    "drive {id} belongs to node {} now, and is not in use yet: {}",
                    info.node,
                    info.reason.unwrap_or_default()
                ),
                _ => return Ok(info),
            }
        }
    }

    async fn drive_info_of(&self, id: DriveId) -> Result<DriveInfo> {
        self.drive_info(&*self.state.lock().await, id)
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
            if entry.is_up() && state.unsteady.contains(id) {
                info.state = "suspect".to_owned();
                info.reason =
                    Some("it came and went, so it gets no new data where others suffice".to_owned());
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
        let _one_at_a_time = self.drives_lock.lock().await;
        self.tell().await;
        if !self.state.lock().await.drives.contains_key(&id) {
            return Err(no_drive(id));
        }
        if !request.force {
            self.check_survives(id).await?;
        }
        let why = "marked as failed by the operator";
        self.set_drive_state(id, DriveState::Failed, why).await.map_err(failed)?;
        self.tell().await;
        self.drive_info_of(id).await.map_err(failed)
    }

    /// Refuses to remove a drive that data depends on. Every extent counts with the profile that it is stored with,
    /// which may differ from its filesystem's present profile.
    async fn check_survives(&self, id: DriveId) -> Result<(), AdminError> {
        let service = self.state.lock().await.drives.get(&id).and_then(|entry| entry.service.clone());
        let held = groups_held(service).await.map_err(failed)?;
        let owed = self.owed().await.map_err(failed)?;
        let nothing = BTreeSet::new();
        let state = self.state.lock().await;
        let left = state.seen().without(id);
        for record in state.cluster.filesystems.values() {
            let owed = owed.get(&record.id).unwrap_or(&nothing);
            let (name, present) = (&record.name, record.profile);
            for (profile, groups) in record.all_sets() {
                // Groups of the present profile may get new extents at any moment.
                let is_used = |pg: &&PgId| profile == present || held.contains(&(record.ledger, **pg));
                let gone = state.cluster.worst(groups.iter().filter(is_used), &left, owed);
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
        let _one_at_a_time = self.drives_lock.lock().await;
        self.tell().await;
        let alive = {
            let state = self.state.lock().await;
            let entry = state.drives.get(&id).ok_or_else(|| no_drive(id))?;
            if entry.record.is_given_up() {
                return Err(conflict(format!("drive is {} already: id={id}", entry.state())));
            }
            let (alive, seen) = (entry.is_readable(), state.seen());
            let (member_of, replaced) = (state.cluster.groups_with(id), state.cluster.replaceable(id, &seen));
            if alive && replaced < member_of {
                return Err(conflict(format!(
                    "drive {id} cannot be removed: {} of its {member_of} placement groups have no other drive to go to; add \
                     one first (forebay drive add), or put one in its place (forebay drive replace {id} --path PATH)",
                    member_of - replaced
                )));
            }
            alive
        };
        if !alive && !request.force {
            self.check_expendable(id).await?;
        }
        // A drive that came back in the meantime is emptied.
        let seen = self.state.lock().await.seen();
        self.change(|plan| plan.give_up(id, &seen)).await.map_err(failed)?;
        self.note_problem(id, if alive { "being emptied" } else { "removed" }).await;
        self.tell().await;
        self.drive_info_of(id).await.map_err(failed)
    }

    pub(super) async fn replace_drive_now(
        &self,
        id: DriveId,
        request: ReplaceDrive,
    ) -> Result<DriveInfo, AdminError> {
        let _one_at_a_time = self.drives_lock.lock().await;
        self.tell().await;
        let (alive, capacity_bytes, node) = {
            let state = self.state.lock().await;
            let entry = state.drives.get(&id).ok_or_else(|| no_drive(id))?;
            if !state.cluster.groups.values().any(|group| group.members.contains(&id)) {
                return Err(conflict(format!("drive holds no position that another could take: id={id}")));
            }
            (entry.is_readable(), entry.record.capacity_bytes, entry.record.node)
        };
        if !alive && !request.force {
            self.check_expendable(id).await?;
        }
        let size_bytes = request.size_bytes.or(Some(capacity_bytes));
        let new = self.format_new(node, Some(request.path), size_bytes).await.map_err(failed)?;
        let why = format!("replaced by drive {}", new.record.id);
        let seen = self.state.lock().await.seen();
        let replace = |plan: &mut Plan, new: &DriveRecord| {
            plan.replace(id, new.clone(), &seen);
            Ok(())
        };
        let info = self.take_in(new, replace).await.map_err(failed)?;
        self.note_problem(id, &why).await;
        Ok(info)
    }

    /// Uses a drive again. A drive whose service failed is opened anew: it has everything that was acknowledged before,
    /// and repair writes the shards that it is owed since.
    pub(super) async fn return_drive_now(&self, id: DriveId) -> Result<DriveInfo, AdminError> {
        let _one_at_a_time = self.drives_lock.lock().await;
        self.tell().await;
        let anew = {
            let mut state = self.state.lock().await;
            let entry = state.drives.get_mut(&id).ok_or_else(|| no_drive(id))?;
            if entry.record.is_given_up() {
                return Err(conflict(format!(
                    "drive is {}, others have its positions: id={id}; use it as a new one (forebay drive add)",
                    entry.state()
                )));
            }
            if entry.is_up() {
                return Err(conflict(format!("drive is up: id={id}")));
            }
            let health = entry.service.as_ref().map(|service| service.health());
            // A host closes a drive that has failed.
            let is_open = self.opens(entry.record.node) && health == Some(DriveHealth::Up);
            let anew = (!is_open).then(|| {
                let record = DriveRecord { state: DriveState::Up, ..entry.record.clone() };
                (entry.service.take(), record, entry.path.clone())
            });
            if anew.is_some() {
                self.publish(&mut state);
            }
            anew
        };
        if let Some((old, record, path)) = anew {
            // Its thread may take a moment to end.
            tokio::task::spawn_blocking(move || drop(old)).await.map_err(AdminError::failed)?;
            let opened = match self.opens(record.node) {
                true => self.drive_maker().open_again(record, path).await,
                false => self.reopen_elsewhere(record).await,
            };
            let opened = opened.map_err(failed)?;
            if let Some(problem) = self.admit(opened).await.map_err(failed)? {
                return Err(conflict(format!("drive cannot be used: id={id}: {problem}")));
            }
        }
        self.set_drive_state(id, DriveState::Up, "").await.map_err(failed)?;
        self.publish(&mut *self.state.lock().await);
        self.tell().await;
        self.drive_info_of(id).await.map_err(failed)
    }
}
