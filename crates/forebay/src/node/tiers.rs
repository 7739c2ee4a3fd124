//! Filesystems and their object stores: attaching, detaching, and the location of files.
//!
//! The record of a filesystem has the wanted state. Code that changes a record holds `stores_lock`, so that no store is
//! removed at the same time. Tiering is stopped without the lock of the node's state, because its uploads may take a
//! while.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use admin::{
    AdminError, AttachStore, FetchFileInfo, FetchStep, ForecastInfo, ForecastRequest, ReleaseInfo,
    TierControl, TierFile, TierInfo, TierLocationInfo, TierOpsInfo,
};
use anyhow::Result;
use base::env::Env;
use base::units::format_size;
use base::{ClusterId, NodeId};
use client::{Client, TierLink};
use control::{FilesystemGroupRecord, FilesystemRecord, StoreRecord, TierRecord};
use futures_util::future::join_all;
use layout::extent_bytes_max;
use tokio::sync::watch;
use upkeep::{S3Store, TierOptions, Tiering};
use wire::BoxFuture;
use wire::store::{ObjectStore, SeenBy, StoreAddress, StoreError, StoreHealth, StoreLimits};
use wire::tier::TierStat;

use super::events::TierSigns;
use super::filesystem_groups::{Times, check_own_times};
use super::filesystems::{FilesystemEntry, Told};
use super::helpers::Helpers;
use super::management::{failed, no_filesystem};
use super::memory::MemoryPlan;
use super::{Node, State};
use crate::remote::StoreAccess;

/// Limit of blobs that are made at a time.
const UPLOADS_MAX: u64 = 64;
/// How long a stop waits for uploads under way. An upload that is cut off leaves a blob that is found and deleted
/// later.
const STOP_DEADLINE: Duration = Duration::from_secs(5);
/// Longest stop of tiering for moving a store; uploads under way get half of it.
const MOVE_DEADLINE: Duration = Duration::from_secs(100);

/// The object store of a filesystem that is served, if it has one.
pub(super) struct TierEntry {
    cluster: ClusterId,
    here: NodeId,
    filesystem: u32,
    /// The group of the filesystem, with or without a store.
    pub(super) filesystem_group: FilesystemGroupRecord,
    pub(super) served_from_ns: u64,
    /// Memory for blobs that are being made.
    blobs_bytes: u64,
    fetched_bytes_max: u64,
    returning_bytes_max: u64,
    /// Publishes the store to all clients of the filesystem.
    sender: watch::Sender<Option<Arc<dyn ObjectStore>>>,
    reached: Option<Arc<S3Store>>,
    /// Whether it answers the other nodes, as they have told lately.
    seen_elsewhere: Vec<SeenBy>,
    /// The nodes, this one among them, that it does not answer.
    blind: watch::Sender<BTreeSet<NodeId>>,
    pub(super) store: String,
    /// The node's share of the limits from the store's settings.
    limits: StoreLimits,
    /// Where the store has its objects, see [`ObjectStore::place`].
    place: u64,
    /// Why the store cannot be used.
    problem: Option<String>,
    pub(super) tiering: Option<Tiering>,
    /// Until then tiering must not start, except by the code that stopped it: its store is being moved.
    stopped_until_ns: u64,
}

impl TierEntry {
    /// Without a store.
    pub(super) fn new(
        env: &Env,
        (cluster, here): (ClusterId, NodeId),
        filesystem: u32,
        memory: &MemoryPlan,
    ) -> Self {
        Self {
            cluster,
            here,
            filesystem,
            filesystem_group: FilesystemGroupRecord::default(),
            served_from_ns: env.clock.boot_ns(),
            blobs_bytes: memory.blobs_bytes,
            fetched_bytes_max: memory.fetched_bytes,
            returning_bytes_max: memory.returning_bytes,
            sender: watch::channel(None).0,
            reached: None,
            seen_elsewhere: Vec::new(),
            blind: watch::Sender::default(),
            store: String::new(),
            limits: StoreLimits::default(),
            place: 0,
            problem: None,
            tiering: None,
            stopped_until_ns: 0,
        }
    }

    /// The link that clients get.
    pub(super) fn link(&self) -> TierLink {
        TierLink {
            cluster: self.cluster,
            filesystem: self.filesystem,
            fetched_bytes_max: self.fetched_bytes_max,
            returning_bytes_max: self.returning_bytes_max,
            store: self.sender.subscribe(),
        }
    }

    /// How to reach the store, as JSON for clients in other processes; empty without a store.
    pub(super) fn access(&self) -> Vec<u8> {
        let settings = self.reached.as_ref().map(|store| store.settings());
        // The text of settings is valid JSON.
        settings.and_then(|settings| StoreAccess::to_json(settings).ok()).unwrap_or_default()
    }

    /// Ends tiering. Clients keep the store, so that content in the store stays readable.
    pub(super) async fn stop(&mut self) {
        end(self.tiering.take()).await;
    }

    fn set_store(
        &mut self,
        record: &StoreRecord,
        limits: StoreLimits,
        reached: Result<Arc<S3Store>, String>,
    ) {
        (self.store, self.limits, self.place) = (record.name.clone(), limits, record.address.place());
        (self.reached, self.problem) = match reached {
            Ok(reached) => (Some(reached), None),
            Err(problem) => (None, Some(problem)),
        };
        let store = self.reached.as_ref().map(|store| store.clone() as Arc<dyn ObjectStore>);
        self.sender.send_replace(store);
    }

    /// Health of the store for all nodes.
    fn store_health(&self) -> StoreHealth {
        let here = self.reached.iter().map(|store| SeenBy { node: self.here.0, ..store.health() });
        let mut seen: Vec<SeenBy> = here.chain(self.seen_elsewhere.iter().cloned()).collect();
        seen.sort_by_key(|seen| seen.node);
        StoreHealth::of(seen)
    }

    /// Notes whether the store answers other nodes.
    pub(super) fn note_seen(&mut self, elsewhere: Vec<SeenBy>) {
        self.seen_elsewhere = elsewhere;
        let seen = self.store_health().nodes;
        let blind = seen.iter().filter(|seen| seen.up == Some(false)).map(|seen| NodeId(seen.node));
        self.blind.send_replace(blind.collect());
    }

    /// The nodes that it does not answer.
    pub(super) fn blind(&self) -> watch::Receiver<BTreeSet<NodeId>> {
        self.blind.subscribe()
    }

    /// The error of the store if it does not answer this node, through which others may read from it.
    pub(super) fn why_down(&self) -> Option<String> {
        let health = self.reached.as_ref()?.health();
        let problem = health.problem.unwrap_or_default();
        (health.up == Some(false)).then(|| format!("store {} is DOWN: {problem}", self.store))
    }

    /// The state for events.
    pub(super) fn signs(&self) -> TierSigns {
        let health = self.store_health();
        let done = self.tiering.as_ref().map(Tiering::stat).unwrap_or_default();
        TierSigns {
            up: health.up,
            problem: self.problem.clone().or(health.problem).or(done.problem),
            released_early_bytes: done.released_early_bytes,
        }
    }

    fn forget_store(&mut self) {
        (self.problem, self.reached) = (None, None);
        self.seen_elsewhere.clear();
        self.sender.send_replace(None);
    }

    /// Times of the filesystem; those that it does not have are its group's.
    pub(super) fn times(&self, tier: TierRecord) -> Times {
        Times::of(tier, &self.filesystem_group)
    }

    pub(super) fn options(&self, record: &FilesystemRecord, tier: TierRecord) -> TierOptions {
        let (blob_bytes, uploads) = plan_uploads(self.blobs_bytes, self.limits, extent_bytes(record));
        let Times { retention_s, cue_s } = self.times(tier);
        let uploads_all = self.limits.cluster_max.map_or(usize::MAX, usize::from);
        let (place, detaching) = (self.place, tier.detaching);
        TierOptions { retention_s, cue_s, blob_bytes, uploads, uploads_all, place, detaching }
    }
}

/// Whether uploads under way have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    InTime,
    NotYet,
}

/// Ends tiering, and waits for its uploads up to [`STOP_DEADLINE`].
pub(super) async fn end(tiering: Option<Tiering>) -> Ended {
    let Some(tiering) = tiering else { return Ended::InTime };
    match tokio::time::timeout(STOP_DEADLINE, tiering.stop()).await {
        Ok(()) => Ended::InTime,
        Err(_) => {
            tracing::warn!("uploads under way are not waited for any longer");
            Ended::NotYet
        }
    }
}

/// Bytes of the longest extent of a filesystem.
fn extent_bytes(record: &FilesystemRecord) -> u32 {
    record.all_sets().map(|(profile, _)| extent_bytes_max(profile)).max().unwrap_or_default()
}

/// Largest blob, and number of blobs made at a time, for this memory. A single extent may make a larger blob.
pub(super) fn plan_uploads(memory_bytes: u64, limits: StoreLimits, extent_bytes: u32) -> (u32, usize) {
    let blob_bytes = memory_bytes.min(limits.blob_bytes.into());
    let most = UPLOADS_MAX.min(limits.uploads_max.max(1).into());
    let uploads = memory_bytes / blob_bytes.max(extent_bytes.into()).max(1);
    (blob_bytes as u32, uploads.clamp(1, most) as usize)
}

/// The tier record of a filesystem after a store is attached.
fn next_tier(
    known: Option<TierRecord>,
    store: u32,
    request: &AttachStore,
    group: &FilesystemGroupRecord,
) -> Result<TierRecord, AdminError> {
    let known = known.filter(|known| known.store == store && !request.group_times);
    let tier = TierRecord {
        store,
        retention_s: request.retention_s.or(known.and_then(|known| known.retention_s)),
        cue_s: request.cue_s.or(known.and_then(|known| known.cue_s)),
        detaching: false,
    };
    check_own_times(tier, group)?;
    Ok(tier)
}

pub(super) fn no_store_attached(name: &str) -> AdminError {
    AdminError::conflict(format!("filesystem {name} has no object store (see `forebay fs attach`)"))
}

impl FilesystemEntry {
    /// State of tiering, if there is a store.
    pub(super) fn tier_info(&self, told: &TierStat) -> Option<TierInfo> {
        let record = self.record.tier?;
        let times = self.tier.times(record);
        let done = self.tier.tiering.as_ref().map(Tiering::stat).unwrap_or_default();
        let tier = if self.owner.stat().halted { &done.tier } else { told };
        let store_health = self.tier.store_health();
        let unusable = self.tier.problem.clone().map(|problem| format!("it cannot be used: {problem}"));
        let overhead = Some(tier.overhead_per_mille()).filter(|overhead| *overhead < u64::MAX);
        Some(TierInfo {
            filesystem: self.record.name.clone(),
            store: self.tier.store.clone(),
            group: self.tier.filesystem_group.name.clone(),
            retention_s: times.retention_s,
            has_own_retention: record.retention_s.is_some(),
            cue_s: times.cue_s,
            has_own_cue: record.cue_s.is_some(),
            state: if record.detaching { "detaching" } else { "tiering" }.to_owned(),
            problem: unusable.or(store_health.problem.clone()).or(done.problem),
            queueing: tier.queueing,
            queued_extents: tier.queued.extents,
            queued_bytes: tier.queued.bytes,
            both_extents: tier.both.extents,
            both_bytes: tier.both.bytes,
            away_extents: tier.away.extents,
            away_bytes: tier.away.bytes,
            blobs: tier.blobs,
            stored_bytes: tier.stored_bytes,
            live_bytes: tier.live_bytes,
            overhead_percent: overhead.map(|per_mille| per_mille.div_ceil(10)),
            uploaded_bytes: done.uploaded_bytes,
            uploaded_by: done.uploaded_by.iter().map(|(node, bytes)| (node.0, *bytes)).collect(),
            released_bytes: done.released_bytes,
            released_early_bytes: done.released_early_bytes,
            deleted_blobs: done.deleted_blobs,
            rewritten_bytes: done.rewritten_bytes,
            returned_bytes: done.returned_bytes,
            fetched_bytes: self.client.fetched_bytes(),
            fill_percent: self.client.fill_per_mille().div_ceil(10),
            store_health,
        })
    }

    /// Refuses a store other than the one that is attached or being detached.
    fn check_attachable(&self, store: &StoreRecord) -> Result<(), AdminError> {
        let (name, present) = (&self.record.name, &self.tier.store);
        match self.record.tier.filter(|tier| tier.store != store.id) {
            Some(TierRecord { detaching: true, .. }) => Err(AdminError::conflict(format!(
                "filesystem {name} is leaving store {present}: wait until that is done (forebay fs detach --wait), or have it \
                 stay (forebay fs attach with store {present})"
            ))),
            Some(_) => Err(AdminError::conflict(format!(
                "filesystem {name} has store {present} already: detach it first (forebay fs detach --wait)"
            ))),
            _ => Ok(()),
        }
    }

    /// Refuses while an upload to the store's present place is under way.
    fn check_nothing_is_uploaded(&self) -> Result<(), AdminError> {
        if self.tier.tiering.is_none() && !self.client.is_uploading() {
            return Ok(());
        }
        Err(AdminError::conflict(format!(
            "filesystem {} has blobs on their way to the place that the store is at now: try again in a minute",
            self.record.name
        )))
    }

    /// Refuses to bring all content back to drives that have too little room.
    fn check_detachable(&self, told: &Told) -> Result<(), AdminError> {
        let (stat, tier) = (&told.stat, told.tier.as_ref());
        let extents = tier.map_or(0, |tier| tier.away.bytes);
        // Clones come back as separate extents. Only the sum of all content measures that; it includes inline content,
        // so the estimate is rather too high than too low.
        let away = extents.max(stat.used_bytes.saturating_sub(stat.drive_bytes));
        let room = self.client.free_bytes();
        if away <= room {
            return Ok(());
        }
        Err(AdminError::conflict(format!(
            "the drives have no room for what only store {} has of filesystem {}: away_max={} room={} (delete some of it, or \
             add drives with `forebay drive add`)",
            self.tier.store,
            self.record.name,
            format_size(away),
            format_size(room)
        )))
    }
}

fn check_uploads(state: &mut State, store: u32) -> Result<(), AdminError> {
    users_of(state, store).try_for_each(|user| user.check_nothing_is_uploaded())
}

/// Refuses a new place for a store that lacks the blobs of these filesystems.
async fn check_place(
    users: &[(String, Client)],
    record: &StoreRecord,
    store: &S3Store,
) -> Result<(), AdminError> {
    for (filesystem, client) in users {
        if let Some((key, error)) = client.missing_blob(store).await.map_err(AdminError::failed)? {
            return Err(lacks_blobs(filesystem, record, &key, &error));
        }
    }
    Ok(())
}

/// The error for a place that lacks blobs.
fn lacks_blobs(filesystem: &str, record: &StoreRecord, key: &str, error: &StoreError) -> AdminError {
    let StoreAddress { host, port, bucket, .. } = &record.address;
    AdminError::conflict(format!(
        "filesystem {filesystem} has blobs in store {} that are not at the new place: bucket {bucket} at {host}:{port}: GET \
         {key}: {error} (copy all of the store there first, or `forebay fs detach --wait` from the old place)",
        record.name
    ))
}

fn users_of(state: &mut State, store: u32) -> impl Iterator<Item = &mut FilesystemEntry> {
    let uses = move |entry: &&mut FilesystemEntry| entry.record.tier.is_some_and(|tier| tier.store == store);
    state.filesystems.values_mut().filter(uses)
}

pub(super) fn entry_of<'a>(state: &'a mut State, name: &str) -> Result<&'a mut FilesystemEntry, AdminError> {
    state.filesystems.get_mut(name).ok_or_else(|| no_filesystem(name))
}

impl Node {
    /// Gives filesystems their groups and stores, and starts tiering. Runs before any file is read.
    pub(super) async fn start_tiers(&self) -> Result<()> {
        let stores = self.control.view()?.stores()?;
        let mut state = self.state.lock().await;
        self.join_filesystem_groups(&mut state)?;
        for entry in state.filesystems.values_mut() {
            let Some(tier) = entry.record.tier else { continue };
            match stores.iter().find(|store| store.id == tier.store) {
                Some(store) => {
                    entry.tier.set_store(store, self.limits_here(&store.address), self.reach(store));
                    entry.show_store();
                }
                None => {
                    entry.tier.store = tier.store.to_string();
                    entry.tier.problem = Some(format!("it is not known: id={}", tier.store));
                }
            }
            self.begin_tiering(entry);
        }
        Ok(())
    }

    pub(super) fn begin_tiering(&self, entry: &mut FilesystemEntry) {
        let Some(tier) = entry.record.tier else { return };
        let options = entry.tier.options(&entry.record, tier);
        let (env, client, pace) = (self.env.clone(), entry.client.clone(), self.pace.clone());
        let others = Some(Helpers::of(&self.others.network, &entry.record, entry.tier.blind()));
        entry.tier.tiering = Some(Tiering::start(env, client, others, pace, options, &self.runtime));
    }

    async fn commit_tier(&self, id: u32, tier: Option<TierRecord>) -> Result<()> {
        self.plan_filesystem(id, |record| FilesystemRecord { tier, ..record }).await
    }

    /// Completes detaching once all content is back, and restarts tiering that an unfinished change left stopped.
    pub(super) async fn finish_detached(&self) -> Result<()> {
        // A store that is being attached again, or changed, stays.
        let Ok(_alone) = self.stores_lock.try_lock() else { return Ok(()) };
        let mut left = Vec::new();
        for (name, entry) in &mut self.state.lock().await.filesystems {
            let Some(tier) = entry.record.tier else { continue };
            match &entry.tier.tiering {
                None if self.env.clock.boot_ns() >= entry.tier.stopped_until_ns => self.begin_tiering(entry),
                Some(tiering) if tier.detaching && tiering.stat().detached => {
                    left.push((name.clone(), entry.record.id));
                }
                _ => {}
            }
        }
        for (filesystem, id) in left {
            self.commit_tier(id, None).await?;
            let running = {
                let mut state = self.state.lock().await;
                let Some(entry) = state.filesystems.get_mut(&filesystem) else { continue };
                let store = std::mem::take(&mut entry.tier.store);
                tracing::info!(filesystem, store, "everything came back from the object store");
                let running = entry.tier.tiering.take();
                entry.tier.forget_store();
                running
            };
            end(running).await;
        }
        Ok(())
    }

    /// Refuses to remove a store that filesystems use.
    pub(super) fn check_unused(&self, store: &StoreRecord) -> Result<(), AdminError> {
        self.check_gets_no_backups(store)?;
        let filesystems = self.view()?.filesystems().map_err(AdminError::failed)?;
        let uses = |record: &&FilesystemRecord| record.tier.is_some_and(|tier| tier.store == store.id);
        match filesystems.iter().find(uses) {
            None => Ok(()),
            Some(user) => Err(AdminError::conflict(format!(
                "store {} is used by filesystem {}: detach it first (forebay fs detach --wait)",
                store.name, user.name
            ))),
        }
    }

    /// Keeps the settings of a store. Filesystems that use it reach it with them from then on.
    pub(super) async fn change_store(&self, record: &StoreRecord) -> Result<(), AdminError> {
        let mut state = self.state.lock().await;
        self.change_store_in(&mut state, record).await
    }

    async fn change_store_in(&self, state: &mut State, record: &StoreRecord) -> Result<(), AdminError> {
        let mut change = self.view()?.change();
        change.store(record);
        self.control.commit(change).await.map_err(AdminError::failed)?;
        let reached = self.reach(record);
        for entry in users_of(state, record.id) {
            self.follow_store(entry, record, reached.clone());
        }
        Ok(())
    }

    /// Has a filesystem use its store with other settings.
    fn follow_store(
        &self,
        entry: &mut FilesystemEntry,
        record: &StoreRecord,
        reached: Result<Arc<S3Store>, String>,
    ) {
        let before = entry.tier.limits;
        entry.tier.set_store(record, self.limits_here(&record.address), reached);
        entry.show_store();
        if entry.tier.limits != before || entry.tier.tiering.is_none() {
            // Uploads through the old connection run to their end.
            self.begin_tiering(entry);
        }
    }

    /// Divides the limits of stores among the nodes that there are now, if these were `before` at the last call.
    pub(super) async fn divide_limits(&self, before: &mut u16) -> Result<()> {
        let nodes = self.others.network.nodes_count();
        if nodes == std::mem::replace(before, nodes) {
            return Ok(());
        }
        let mut state = self.state.lock().await;
        for record in self.control.view()?.stores()? {
            let limits = self.limits_here(&record.address);
            for entry in users_of(&mut state, record.id).filter(|entry| entry.tier.limits != limits) {
                self.follow_store(entry, &record, self.reach(&record));
            }
        }
        Ok(())
    }

    /// Like `change_store`, for a store that moves to another place. Refuses if blobs of filesystems are missing there:
    /// their content would be lost.
    pub(super) async fn move_store(
        &self,
        record: &StoreRecord,
        store: Arc<S3Store>,
    ) -> Result<(), AdminError> {
        let users: Vec<_> = {
            let mut state = self.state.lock().await;
            users_of(&mut state, record.id)
                .map(|user| (user.record.name.clone(), user.client.clone()))
                .collect()
        };
        // Refuses a place that lacks blobs or does not answer before uploads are stopped.
        check_place(&users, record, &store).await?;
        self.stop_uploads(record.id).await;
        // No upload runs before, during and after the check, so that no blob is at the old place only. Uploads of other nodes may, and
        // are of no use from now on.
        let mut checked = check_uploads(&mut *self.state.lock().await, record.id);
        for (_, client) in &users {
            checked =
                checked.and(client.tier_place(record.address.place()).await.map_err(AdminError::failed));
        }
        if checked.is_ok() {
            checked = check_place(&users, record, &store).await;
        }
        let mut state = self.state.lock().await;
        let moved = match checked.and(check_uploads(&mut state, record.id)) {
            Ok(()) => self.change_store_in(&mut state, record).await,
            Err(refused) => Err(refused),
        };
        for user in users_of(&mut state, record.id) {
            user.tier.stopped_until_ns = 0;
            if user.tier.tiering.is_none() {
                self.begin_tiering(user);
            }
        }
        moved
    }

    /// Stops tiering of all filesystems that use a store until the move has ended, and waits for uploads under way.
    async fn stop_uploads(&self, store: u32) {
        let mut stopping = Vec::new();
        {
            let mut state = self.state.lock().await;
            for user in users_of(&mut state, store) {
                user.tier.stopped_until_ns = self.env.clock.boot_ns() + MOVE_DEADLINE.as_nanos() as u64;
                stopping.extend(user.tier.tiering.take());
            }
        }
        let stopped = join_all(stopping.into_iter().map(Tiering::stop));
        if tokio::time::timeout(MOVE_DEADLINE / 2, stopped).await.is_err() {
            tracing::warn!(store, "uploads under way are not waited for any longer");
        }
    }

    /// Adds bytes that the S3 endpoint fetched with its own client.
    pub(super) fn add_s3_traffic(&self, tier: &mut TierInfo) {
        let (filesystem, bytes) = self.s3_fetched();
        if tier.filesystem == filesystem {
            tier.fetched_bytes += bytes;
        }
    }

    /// State of tiering of one filesystem.
    async fn tier_info_of(&self, name: &str) -> Result<TierInfo, AdminError> {
        let asker = entry_of(&mut *self.state.lock().await, name)?.asker();
        let told = asker.ask().await.map_err(failed)?;
        let mut state = self.state.lock().await;
        let entry = entry_of(&mut state, name)?;
        told.tier.and_then(|tier| entry.tier_info(&tier)).ok_or_else(|| no_store_attached(name))
    }

    async fn tiers_now(&self) -> Result<Vec<TierInfo>, AdminError> {
        let told = self.ask_all().await.map_err(failed)?;
        let state = self.state.lock().await;
        let tiers = state.filesystems.iter().filter_map(|(name, entry)| {
            let mut info = entry.tier_info(told.get(name)?.tier.as_ref()?)?;
            self.add_s3_traffic(&mut info);
            Some(info)
        });
        Ok(tiers.collect())
    }

    async fn tier_ops_now(&self) -> Vec<TierOpsInfo> {
        let state = self.state.lock().await;
        let mut infos: Vec<TierOpsInfo> = Vec::new();
        for entry in state.filesystems.values() {
            let Some(reached) = &entry.tier.reached else { continue };
            let filesystem = entry.record.name.clone();
            match infos.iter_mut().find(|info| info.store == entry.tier.store) {
                Some(info) => info.filesystems.push(filesystem),
                None => infos.push(TierOpsInfo {
                    filesystems: vec![filesystem],
                    store: entry.tier.store.clone(),
                    ops: reached.ops(),
                }),
            }
        }
        infos
    }

    async fn attach_store_now(&self, name: &str, request: AttachStore) -> Result<TierInfo, AdminError> {
        let _one_at_a_time = self.stores_lock.lock().await;
        let record = self.store_record(&request.store)?;
        let reached = self.reach(&record).map_err(|problem| {
            AdminError::conflict(format!("store {} cannot be used: {problem}", record.name))
        })?;
        let (id, tier, running) = {
            let mut state = self.state.lock().await;
            let entry = entry_of(&mut state, name)?;
            entry.check_attachable(&record)?;
            let tier = next_tier(entry.record.tier, record.id, &request, &entry.tier.filesystem_group)?;
            (entry.record.id, tier, entry.tier.tiering.take())
        };
        end(running).await;
        let committed = self.commit_tier(id, Some(tier)).await;
        let mut state = self.state.lock().await;
        let entry = entry_of(&mut state, name)?;
        if committed.is_ok() {
            entry.tier.set_store(&record, self.limits_here(&record.address), Ok(reached));
            entry.show_store();
        }
        self.begin_tiering(entry);
        committed.map_err(failed)?;
        drop(state);
        self.tell().await;
        self.tier_info_of(name).await
    }

    async fn detach_store_now(&self, name: &str) -> Result<TierInfo, AdminError> {
        let _one_at_a_time = self.stores_lock.lock().await;
        let asker = {
            let mut state = self.state.lock().await;
            let entry = entry_of(&mut state, name)?;
            let tier = entry.record.tier.ok_or_else(|| no_store_attached(name))?;
            (!tier.detaching).then(|| entry.asker())
        };
        let Some(asker) = asker else { return self.tier_info_of(name).await };
        let told = asker.ask().await.map_err(failed)?;
        let (id, tier, running) = {
            let mut state = self.state.lock().await;
            let entry = entry_of(&mut state, name)?;
            entry.check_detachable(&told)?;
            let tier = entry.record.tier.ok_or_else(|| no_store_attached(name))?;
            (entry.record.id, tier, entry.tier.tiering.take())
        };
        end(running).await;
        let detaching = TierRecord { detaching: true, ..tier };
        let committed = self.commit_tier(id, Some(detaching)).await;
        let mut state = self.state.lock().await;
        let entry = entry_of(&mut state, name)?;
        self.begin_tiering(entry);
        committed.map_err(failed)?;
        drop(state);
        self.tier_info_of(name).await
    }
}

impl TierControl for Node {
    fn tiers(&self) -> BoxFuture<'_, Result<Vec<TierInfo>, AdminError>> {
        Box::pin(self.tiers_now())
    }

    fn tier_ops(&self) -> BoxFuture<'_, Result<Vec<TierOpsInfo>, AdminError>> {
        Box::pin(async move { Ok(self.tier_ops_now().await) })
    }

    fn tier_forecast(
        &self,
        request: ForecastRequest,
    ) -> BoxFuture<'_, Result<Vec<ForecastInfo>, AdminError>> {
        Box::pin(self.tier_forecast_now(request))
    }

    fn attach_store(
        &self,
        name: String,
        request: AttachStore,
    ) -> BoxFuture<'_, Result<TierInfo, AdminError>> {
        Box::pin(async move { self.attach_store_now(&name, request).await })
    }

    fn detach_store(&self, name: String) -> BoxFuture<'_, Result<TierInfo, AdminError>> {
        Box::pin(async move { self.detach_store_now(&name).await })
    }

    fn tier_location(
        &self,
        name: String,
        path: String,
    ) -> BoxFuture<'_, Result<TierLocationInfo, AdminError>> {
        Box::pin(self.tier_location_now(name, path))
    }

    fn tier_fetch(
        &self,
        name: String,
        step: FetchStep,
    ) -> BoxFuture<'_, Result<Vec<FetchFileInfo>, AdminError>> {
        Box::pin(async move { self.tier_fetch_now(&name, step).await })
    }

    fn tier_release(&self, name: String, file: TierFile) -> BoxFuture<'_, Result<ReleaseInfo, AdminError>> {
        Box::pin(async move { self.tier_release_now(&name, &file.path).await })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use base::units::MIB;

    use super::*;

    type Requested = (Option<u64>, Option<u64>);

    const KNOWN: TierRecord =
        TierRecord { store: 1, retention_s: Some(7200), cue_s: Some(60), detaching: false };

    fn request((retention_s, cue_s): Requested) -> AttachStore {
        AttachStore { store: "cold".to_owned(), retention_s, cue_s, group_times: false }
    }

    #[track_caller]
    fn check(known: Option<TierRecord>, request: AttachStore, expected: Result<Requested, &str>) {
        match (next_tier(known, 1, &request, &FilesystemGroupRecord::default()), expected) {
            (Ok(tier), Ok(times)) => assert_eq!((tier.retention_s, tier.cue_s), times),
            (Err(error), Err(text)) => assert!(error.message.contains(text), "{error}"),
            (got, _) => panic!("{got:?} is not {expected:?}"),
        }
    }

    #[test]
    fn what_is_not_said_about_times_is_as_it_was_or_left_to_the_group() {
        check(None, request((None, None)), Ok((None, None)));
        check(None, request((Some(60), None)), Ok((Some(60), None)));
        check(Some(KNOWN), request((None, None)), Ok((Some(7200), Some(60))));
        check(Some(KNOWN), request((None, Some(90))), Ok((Some(7200), Some(90))));
        check(Some(KNOWN), request((Some(3600), None)), Ok((Some(3600), Some(60))));
        let other = TierRecord { store: 2, ..KNOWN };
        check(Some(other), request((None, None)), Ok((None, None)));
        let group_times = AttachStore { group_times: true, ..request((None, None)) };
        check(Some(KNOWN), group_times, Ok((None, None)));
    }

    #[test]
    fn the_cue_is_at_least_ten_seconds_and_at_most_a_third_of_the_retention() {
        check(None, request((Some(30), Some(10))), Ok((Some(30), Some(10))));
        check(None, request((Some(30), Some(11))), Err("a third of the retention: cue=11s retention=30s"));
        check(
            None,
            request((None, Some(9))),
            Err("between 10s and a third of the retention: cue=9s retention=1d"),
        );
        check(None, request((Some(29), None)), Err("cue=9s retention=29s"));
        check(Some(KNOWN), request((Some(90), None)), Err("cue=1m retention=1m30s"));
    }

    #[test]
    fn uploads_follow_the_memory_that_there_is() {
        let mib = |mib: u32| mib << 20;
        for (memory_mib, (blob_bytes, uploads_max), extent, expected) in [
            (128, (mib(64), 64), mib(4), (mib(64), 2)),
            (128, (mib(4), 64), mib(2), (mib(4), 32)),
            (128, (mib(4), 8), mib(2), (mib(4), 8)),
            (32, (mib(64), 64), mib(4), (mib(32), 1)),
            (128, (mib(4), 64), mib(12), (mib(4), 10)),
            (4, (mib(64), 64), mib(12), (mib(4), 1)),
        ] {
            let limits = StoreLimits { blob_bytes, uploads_max, ..StoreLimits::default() };
            assert_eq!(plan_uploads(memory_mib * MIB, limits, extent), expected);
        }
    }
}
