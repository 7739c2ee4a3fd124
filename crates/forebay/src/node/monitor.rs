//! Checks the drives once a second and acts on the result: opens drives that are back, gives the positions of drives
//! that stay away to others, chooses the groups for new extents.
//!
//! Each step compares the present state with the wanted state, so that a restart continues where the last process
//! ended.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use anyhow::Result;
use base::{DriveId, PgId};
use control::{Balancing, FilesystemRecord, Owed, Patience, Plan, WriteSet};
use layout::{DriveState, PlacementGroup};
use tokio::sync::watch;

use super::Node;
use super::drives::DriveEntry;
use super::filesystems::{FilesystemEntry, haste};
use super::history::Reported;
use super::{backups, store_sights};

pub(super) const TICK: Duration = Duration::from_secs(1);
/// How long drives may be away before new extents get narrower, if enough drives are left for that.
const NARROW_AFTER_NS: u64 = 30_000_000_000;
/// How long the monitor waits for the owner of a ledger.
const OWNER_PATIENCE: Duration = Duration::from_secs(5);
/// How long a new owner waits for the first word of nodes that are not reached, and of any node.
const LOOK_MIN: Duration = Duration::from_secs(3);
const LOOK_MAX: Duration = Duration::from_secs(10);
/// A drive that was lost so often in so long a time comes and goes, until it was there for so long.
const LOSSES_MAX: usize = 3;
const LOSSES_NS: u64 = 600_000_000_000;
const STEADY_NS: u64 = 300_000_000_000;
/// How long a node that has taken over gives up nothing.
const TAKEOVER_NS: u64 = 300_000_000_000;
/// Groups that move at a time while a filesystem is being balanced.
pub(super) const BALANCED_AT_ONCE: usize = 16;
/// Interval at which the progress of the scrub is recorded.
const MARK_EVERY_NS: u64 = 600_000_000_000;
/// Pauses between attempts to open a drive that is missing.
pub(crate) const REOPEN_NS: u64 = 1_000_000_000;
pub(crate) const REOPEN_NS_MAX: u64 = 30_000_000_000;

fn hastened(wait_ns: u64) -> u64 {
    wait_ns / u64::from(haste())
}

/// State of the monitor. Times are of the boot clock.
#[derive(Default)]
struct Seen {
    /// The state of each drive, and how often it had been opened.
    states: BTreeMap<DriveId, (&'static str, u32)>,
    changed_ns: u64,
    down_since_ns: BTreeMap<DriveId, u64>,
    /// When drives were lost lately.
    losses: BTreeMap<DriveId, Vec<u64>>,
    unsteady: BTreeSet<DriveId>,
    /// Time of the next attempt to open a missing drive, and the pause after it.
    reopen: BTreeMap<DriveId, (u64, u64)>,
    /// Time when the progress of the scrub was last recorded.
    marked_ns: u64,
    /// How many nodes there were.
    nodes: u16,
    told: Reported,
}

impl Seen {
    /// Notes the states of the drives. Returns whether one changed.
    fn look(&mut self, drives: &BTreeMap<DriveId, DriveEntry>, now_ns: u64) -> bool {
        let state_of = |entry: &DriveEntry| (entry.state(), entry.incarnation());
        let states: BTreeMap<_, _> = drives.iter().map(|(id, entry)| (*id, state_of(entry))).collect();
        for (id, entry) in drives {
            if entry.is_readable() || entry.record.state == DriveState::Out {
                self.down_since_ns.remove(id);
            } else {
                self.down_since_ns.entry(*id).or_insert(now_ns);
            }
        }
        if states == self.states {
            return false;
        }
        for (id, (state, incarnation)) in &states {
            let Some((before, opened)) = self.states.get(id).copied() else { continue };
            if before != *state {
                tracing::warn!(drive = %id, before, state, "drive changed its state");
            }
            // It may have been away between two looks.
            if before != "missing" && (*state == "missing" || *incarnation != opened) {
                self.note_loss(*id, now_ns);
            }
        }
        (self.states, self.changed_ns) = (states, now_ns);
        true
    }

    fn note_loss(&mut self, id: DriveId, now_ns: u64) {
        let losses = self.losses.entry(id).or_default();
        losses.retain(|lost_ns| now_ns.saturating_sub(*lost_ns) < LOSSES_NS);
        losses.push(now_ns);
        if losses.len() >= LOSSES_MAX && self.unsteady.insert(id) {
            tracing::warn!(drive = %id, losses = losses.len(), "drive comes and goes: new data goes elsewhere");
        }
    }

    /// Drives that come and go.
    fn unsteady(&mut self, now_ns: u64) -> &BTreeSet<DriveId> {
        let Self { unsteady, losses, .. } = self;
        let last_ns = |id: &DriveId| losses.get(id).and_then(|lost| lost.last()).copied().unwrap_or(0);
        unsteady.retain(|id| now_ns.saturating_sub(last_ns(id)) < hastened(STEADY_NS));
        unsteady
    }
}

/// Runs until the node stops.
async fn run(node: Weak<Node>, mut stopped: watch::Receiver<bool>) {
    let mut seen = Seen::default();
    loop {
        let _ = tokio::time::timeout(TICK, stopped.wait_for(|stop| *stop)).await;
        let Some(node) = node.upgrade().filter(|_| !*stopped.borrow()) else { return };
        if let Err(error) = node.tick(&mut seen).await {
            tracing::error!(error = %format!("{error:#}"), "drives could not be looked after, trying again");
        }
        node.tell_what_stays().await;
    }
}

impl Node {
    /// Starts what looks after drives, what asks other nodes about object stores, and what makes backups.
    pub(super) fn start_monitor(self: &Arc<Self>) {
        let drives = run(Arc::downgrade(self), self.stop_serving.subscribe());
        let stores = store_sights::run(Arc::downgrade(self), self.stop_serving.subscribe());
        let backups =
            backups::run(Arc::downgrade(self), self.stop_serving.subscribe(), self.backup_asked.clone());
        let monitor = self.runtime.spawn(async move {
            tokio::join!(drives, stores, backups);
        });
        *self.monitor.lock().expect("no holder of this lock panics") = Some(monitor);
    }

    async fn tick(&self, seen: &mut Seen) -> Result<()> {
        // Without room for it, the commits below fail and say so.
        let _ = self.control.catch_up().await;
        self.take_over().await?;
        self.reopen_missing(seen).await?;
        self.follow_drives_elsewhere().await?;
        let now = self.env.clock.boot_ns();
        let mut state = self.state.lock().await;
        if seen.look(&state.drives, now) {
            self.publish(&mut state);
        }
        state.unsteady.clone_from(seen.unsteady(now));
        if state.cluster.wide_absence(&state.seen()).is_some() {
            // What is left of it later is waited for anew.
            seen.down_since_ns.values_mut().for_each(|since| *since = now);
        }
        drop(state);
        self.follow_drives(seen, now).await?;
        self.look_at_users().await;
        let waited = now.saturating_sub(seen.changed_ns) >= NARROW_AFTER_NS;
        let patience = if waited { Patience::Over } else { Patience::Left };
        if self.has_looked(now).await {
            self.update_write_sets(patience).await?;
        }
        self.move_to_shares().await?;
        self.finish_detached().await?;
        self.divide_limits(&mut seen.nodes).await?;
        self.revive_mounts(&mut *self.state.lock().await).await;
        self.keep_history(&mut seen.told, now).await?;
        if self.seat.is_none() {
            self.others.renew(&self.env, &self.dir, &self.control).await?;
        }
        if now.saturating_sub(seen.marked_ns) >= MARK_EVERY_NS {
            seen.marked_ns = now;
            let kept = tokio::time::timeout(OWNER_PATIENCE, self.keep_scrub_marks()).await;
            kept.unwrap_or(Ok(()))?;
        }
        Ok(())
    }

    /// Holds background work back while users wait for drives.
    async fn look_at_users(&self) {
        let state = self.state.lock().await;
        let open = state.drives.values().filter_map(|entry| entry.service.as_ref());
        self.pace.look(open.map(|drive| drive.stat().foreground));
    }

    /// Whether each drive had the time to answer since this node became the owner: before that, nothing is decided from the absence
    /// of drives.
    async fn has_looked(&self, now_ns: u64) -> bool {
        let since = Duration::from_nanos(now_ns.saturating_sub(self.started_ns));
        if self.seat.is_none() || since >= LOOK_MAX {
            return true;
        }
        let state = self.state.lock().await;
        let missing = state.drives.values().filter(|entry| entry.is_missing());
        let mut missing = missing.map(|entry| entry.record.node);
        missing.all(|node| since >= LOOK_MIN && !self.is_reached(node))
    }

    /// Opens missing drives that are back. A drive that failed is left alone: what it could not write then, it must not
    /// write now.
    async fn reopen_missing(&self, seen: &mut Seen) -> Result<()> {
        // An order about drives may be opening one.
        let Ok(_alone) = self.drives_lock.try_lock() else { return Ok(()) };
        let now = self.env.clock.boot_ns();
        let missing: Vec<_> = {
            let state = self.state.lock().await;
            let missing =
                state.drives.values().filter(|entry| entry.is_missing() && self.opens(entry.record.node));
            missing.map(|entry| (entry.record.clone(), entry.path.clone())).collect()
        };
        seen.reopen.retain(|id, _| missing.iter().any(|(record, _)| record.id == *id));
        for (record, path) in missing {
            let id = record.id;
            let (due_ns, pause_ns) = seen.reopen.entry(id).or_insert((0, REOPEN_NS));
            let is_there = path.as_ref().is_some_and(|path| self.env.files.exists(path));
            if now < *due_ns || !is_there {
                continue;
            }
            (*due_ns, *pause_ns) = (now + *pause_ns, (*pause_ns * 2).min(REOPEN_NS_MAX));
            let (env, cluster, settings) = (self.env.clone(), self.cluster, self.drive_settings);
            let open = move || DriveEntry::open(&env, cluster, record, path, settings);
            let opened = tokio::task::spawn_blocking(open).await?;
            // The record may have changed while the drive was opened.
            let is_missing = self.state.lock().await.drives.get(&id).is_some_and(DriveEntry::is_missing);
            if is_missing {
                self.admit(opened).await?;
                self.tell().await;
            }
        }
        Ok(())
    }

    /// Puts drives out that were away for too long, gives the positions of drives that go to others, and ends rebuilds.
    async fn follow_drives(&self, seen: &Seen, now_ns: u64) -> Result<()> {
        let limit_ns = self.out_after.as_nanos() as u64;
        let overdue =
            seen.down_since_ns.iter().filter(|(_, since)| now_ns.saturating_sub(**since) >= limit_ns);
        let mut overdue: Vec<DriveId> = overdue.map(|(id, _)| *id).collect();
        let since_takeover_ns = now_ns.saturating_sub(self.started_ns);
        if self.seat.is_some() && since_takeover_ns < hastened(TAKEOVER_NS) {
            overdue.clear();
        }
        if !overdue.is_empty() {
            let now_s = self.env.clock.wall_ns() / 1_000_000_000;
            let state = self.state.lock().await;
            overdue.retain(|id| !state.cluster.is_in_maintenance(*id, now_s));
        }
        let mut owed = Owed::new();
        if !overdue.is_empty() {
            // An owner that does not answer must not hold up the rest: then the drives stay for now.
            match tokio::time::timeout(OWNER_PATIENCE, self.owed()).await {
                Ok(Ok(known)) => owed = known,
                Ok(Err(_)) | Err(_) => overdue.clear(),
            }
        }
        let (drives, rebuilt, mut trial) = {
            let state = self.state.lock().await;
            let rebuilt: Vec<_> = state.filesystems.values().map(FilesystemEntry::rebuilt).collect();
            (state.seen(), rebuilt, Plan::new(state.cluster.clone()))
        };
        let is_rebuilt =
            |group: &PlacementGroup| rebuilt.iter().all(|groups| groups.get(&group.id) == Some(&group.epoch));
        let decide = |plan: &mut Plan| {
            let retired = plan.retire(&overdue, &drives, &owed);
            (retired, plan.reassign(&drives), plan.finish(is_rebuilt))
        };
        // Most often there is nothing to do, and then the records are not read.
        decide(&mut trial);
        if trial.is_empty() {
            return Ok(());
        }
        let (retired, moved, finished) = self.plan(|plan| Ok(decide(plan))).await?;
        for id in &retired {
            tracing::error!(drive = %id, "drive was away for too long: others take over what it held");
            self.note_problem(*id, "away for too long").await;
        }
        if moved > 0 {
            tracing::warn!(groups = moved, "others take over positions of drives that go");
        }
        if finished.groups > 0 {
            tracing::info!(groups = finished.groups, "placement groups are rebuilt");
        }
        for id in &finished.empty {
            tracing::info!(drive = %id, "everything is moved off the drive");
            self.note_problem(*id, "everything was moved off it").await;
        }
        Ok(())
    }

    /// Moves data of filesystems that are being balanced, a few groups at a time.
    async fn move_to_shares(&self) -> Result<()> {
        // Nothing would move, and an abort would have more to bring back.
        if self.pace.is_paused() {
            return Ok(());
        }
        let (drives, mut trial) = {
            let state = self.state.lock().await;
            if !state.cluster.filesystems.values().any(|record| record.balancing) {
                return Ok(());
            }
            (state.seen(), Plan::new(state.cluster.clone()))
        };
        let decide = |plan: &mut Plan| -> Vec<(String, Balancing)> {
            let records: Vec<FilesystemRecord> = plan.next().filesystems.values().cloned().collect();
            let records = records.into_iter().filter(|record| record.balancing);
            let mut balance = |record: FilesystemRecord| {
                (record.name.clone(), plan.balance(record, &drives, BALANCED_AT_ONCE))
            };
            records.map(&mut balance).collect()
        };
        decide(&mut trial);
        if trial.is_empty() {
            return Ok(());
        }
        let decided = self.plan(|plan| Ok(decide(plan))).await?;
        let mut state = self.state.lock().await;
        for (filesystem, balancing) in decided {
            let later = match balancing {
                Balancing::Moves { groups, left } => {
                    tracing::info!(filesystem, groups, left, "data moves to its share");
                    Some(left)
                }
                Balancing::Done => {
                    tracing::info!(filesystem, "every drive has its share");
                    None
                }
                Balancing::Waits => continue,
            };
            if let Some(entry) = state.filesystems.get_mut(&filesystem) {
                entry.balance_left = later;
            }
        }
        Ok(())
    }

    /// With too few drives for any write, plans narrower groups before the first client reads the free space.
    pub(super) async fn choose_groups_at_start(&self) -> Result<()> {
        self.update_write_sets(Patience::Left).await
    }

    /// Chooses the groups of every filesystem, and plans groups that are missing.
    async fn update_write_sets(&self, patience: Patience) -> Result<()> {
        let seed = self.env.random.next_u64();
        let (seen, mut trial) = {
            let state = self.state.lock().await;
            (state.seen(), Plan::new(state.cluster.clone()))
        };
        let decide = |plan: &mut Plan| -> Result<Vec<(u32, WriteSet)>> {
            let records: Vec<_> = plan.next().filesystems.values().cloned().collect();
            let sets = records.into_iter().map(|record| {
                let id = record.id;
                Ok((id, plan.write_set(record, &seen, patience, seed)?))
            });
            sets.collect()
        };
        let mut sets = decide(&mut trial)?;
        if !trial.is_empty() {
            sets = self.plan(decide).await?;
        }
        let mut state = self.state.lock().await;
        let mut changed = false;
        for entry in state.filesystems.values_mut() {
            let Some((_, next)) = sets.iter().find(|(id, _)| *id == entry.record.id) else { continue };
            let is_of_profile = |group: &PgId| entry.record.groups.contains(group);
            if *next != entry.write_set || !next.groups.iter().all(is_of_profile) {
                entry.others_written_ns = self.env.clock.boot_ns();
            }
            if *next != entry.write_set {
                let (name, profile) = (&entry.record.name, next.profile);
                tracing::info!(filesystem = %name, %profile, groups = next.groups.len(), "new extents go elsewhere");
                entry.write_set = next.clone();
                changed = true;
            }
        }
        if changed {
            self.publish(&mut state);
        }
        Ok(())
    }
}
