//! What drives and ledgers know of each other's history, so that an older copy of either is noticed.
//!
//! Drives keep the newest position of each ledger that they were told, and the control ledger keeps a mark of how far each
//! drive has come. Both are compared before anything is used, and told again at most every ten seconds.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use admin::NodeStatus;
use anyhow::Result;
use base::{DriveId, LedgerId};
use futures_util::future::join_all;
use layout::{ClusterMap, PlacementGroup};
use meta::control::{CONTROL_LEDGER, Control, ControlChange, DriveRecord};
use meta::history::{Evidence, OlderLedger, Witness};
use tokio::task::JoinHandle;
use wire::drive::DriveService;
use wire::event::Severity;
use wire::position::{KnownLedger, Position};

use super::drives::DriveEntry;
use super::events::Happened;
use super::{Node, State};

/// How often drives and the control ledger are told what is new.
const TELL_EVERY_NS: u64 = 10_000_000_000;
/// A drive that does not say by then what it knows, or does not keep what it is told, is left out.
const DRIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// What each drive knows of ledgers.
pub(super) struct Knowledge {
    drives: Vec<(DriveId, Vec<KnownLedger>)>,
    accept_older: bool,
}

/// What was told last.
#[derive(Default)]
pub(super) struct Told {
    at_ns: u64,
    filesystems: BTreeSet<(LedgerId, u64)>,
    /// The control ledger's newest batch at the end of that.
    control_seq: u64,
    /// Tells under way: at most one for each drive, which may hang.
    tells: BTreeMap<DriveId, JoinHandle<()>>,
}

impl Knowledge {
    /// Asks every drive that can be read.
    pub(super) async fn gather(drives: &BTreeMap<DriveId, DriveEntry>, accept_older: bool) -> Self {
        let mut known = Vec::new();
        for (id, entry) in drives {
            let Some(service) = entry.service.as_ref().filter(|_| entry.is_readable()) else { continue };
            if let Ok(Ok(ledgers)) = tokio::time::timeout(DRIVE_TIMEOUT, service.known_ledgers()).await {
                known.push((*id, ledgers));
            }
        }
        Self { drives: known, accept_older }
    }

    /// What they know of one ledger.
    pub(super) fn of(&self, ledger: LedgerId) -> Evidence {
        let of_drive = |(drive, known): &(DriveId, Vec<KnownLedger>)| {
            let known = known.iter().find(|known| known.ledger == ledger)?;
            Some(Witness { drive: *drive, known: *known })
        };
        Evidence {
            witnesses: self.drives.iter().filter_map(of_drive).collect(),
            accept_older: self.accept_older,
        }
    }
}

/// Drives that came back as older copies, and are not compared with the others yet.
pub(super) fn behind(map: &ClusterMap) -> BTreeSet<DriveId> {
    let itself = |group: &PlacementGroup| {
        let of_member = group.rebuilding.iter().filter(|rebuilding| {
            group.members.get(usize::from(rebuilding.position)) == Some(&rebuilding.from)
        });
        of_member.map(|rebuilding| rebuilding.from).collect::<Vec<_>>()
    };
    map.groups.iter().flat_map(itself).collect()
}

/// Writes down how far these drives have come, and that those that are older copies may lack shards: before anything is
/// read from them. Returns what is to be told.
pub(super) async fn note_drives(
    control: &Control,
    drives: &mut BTreeMap<DriveId, DriveEntry>,
    which: &[DriveId],
) -> Result<Vec<Happened>> {
    let mut change = ControlChange::default();
    let (mut marked, mut happened) = (Vec::new(), Vec::new());
    let mut groups: BTreeMap<_, PlacementGroup> =
        control.map()?.groups.into_iter().map(|group| (group.id, group)).collect();
    let mut changed = BTreeSet::new();
    for id in which {
        let Some((entry, service)) = drives.get(id).and_then(|entry| Some((entry, entry.service.as_ref()?)))
        else {
            continue;
        };
        let recovery = service.recovery();
        if recovery.has_gap && entry.record.mark.incarnation < service.stat().mark.incarnation {
            for group in groups.values_mut() {
                if let Some(next) = group.returned_with_gap(*id) {
                    changed.insert(next.id);
                    *group = next;
                }
            }
            let text = "an older copy of the drive is in its place: what it lacks is found by comparing it with the others, \
                        and restored";
            tracing::error!(drive = %id, found = ?recovery.found, noted = ?entry.record.mark, text);
            happened.push(Happened::new(
                Severity::Error,
                format!("drive {id}"),
                "older copy",
                format!("{text}: path={}", entry.record.path),
            ));
        }
        let record = DriveRecord { mark: service.stat().mark, ..entry.record.clone() };
        if record.mark != entry.record.mark {
            change.drive(&record);
            marked.push(record);
        }
    }
    if marked.is_empty() {
        return Ok(happened);
    }
    if !changed.is_empty() {
        let mut cluster = control.cluster()?;
        cluster.map_epoch += 1;
        change.cluster(&cluster);
        groups.values().filter(|group| changed.contains(&group.id)).for_each(|group| {
            change.group(group);
        });
    }
    control.commit(change).await?;
    for record in marked {
        if let Some(entry) = drives.get_mut(&record.id) {
            entry.record.mark = record.mark;
        }
    }
    Ok(happened)
}

/// Has drives keep these positions, all at once. One that does not in time has an older one.
pub(super) async fn tell_drives(
    drives: &BTreeMap<DriveId, DriveEntry>,
    positions: &[Position],
    replace: bool,
) {
    let services = drives.iter().filter(|(_, entry)| entry.is_readable());
    let keeps = services.filter_map(|(id, entry)| {
        let service = entry.service.clone()?;
        Some(async move {
            let kept = service.keep_positions(positions.to_vec(), replace);
            if !matches!(tokio::time::timeout(DRIVE_TIMEOUT, kept).await, Ok(Ok(()))) {
                tracing::warn!(drive = %id, "drive was not told how far metadata has come");
            }
        })
    });
    join_all(keeps).await;
}

impl Node {
    fn positions(&self, state: &State) -> Vec<Position> {
        let filesystems = state.filesystems.values().filter_map(|entry| entry.position());
        self.control.history().position().into_iter().chain(filesystems).collect()
    }

    /// The drives hear how far metadata has come, whatever they knew before: it was decided to go on with it.
    pub(super) async fn go_on_with_this_metadata(&self) {
        let state = self.state.lock().await;
        tell_drives(&state.drives, &self.positions(&state), true).await;
    }

    /// Has everything on drives that were older copies compared with the maps, so that what was deleted meanwhile goes.
    pub(super) fn recheck(&self, state: &State, drives: &BTreeSet<DriveId>) {
        for entry in state.filesystems.values() {
            for drive in drives.iter().copied() {
                let client = entry.client.clone();
                self.runtime.spawn(async move {
                    if let Err(error) = client.recheck(drive).await {
                        tracing::warn!(%drive, %error, "what is left of deleted files on the drive is not looked for");
                    }
                });
            }
        }
    }

    /// Newer metadata will not come back: what only it referred to is deleted from now on.
    pub(super) async fn settle_metadata_now(&self) -> Result<NodeStatus> {
        {
            let state = self.state.lock().await;
            for entry in state.filesystems.values().filter(|entry| entry.owner.stat().in_doubt) {
                entry.client.doubt(false).await?;
                tracing::warn!(filesystem = %entry.record.name, "newer metadata is given up");
            }
            let readable = state.drives.iter().filter(|(_, entry)| entry.is_readable());
            self.recheck(&state, &readable.map(|(id, _)| *id).collect());
        }
        self.status_now().await
    }

    /// Why a drive that was away may not be used: it knows metadata that is newer than what the node has. Then nothing
    /// is taken for an orphan any more, for it may belong to that.
    pub(super) async fn refuse_if_ahead(&self, state: &State, opened: &DriveEntry) -> Option<OlderLedger> {
        let id = opened.record.id;
        let service = opened.service.as_ref()?;
        let known = tokio::time::timeout(DRIVE_TIMEOUT, service.known_ledgers()).await.ok()?.ok()?;
        for known in known {
            let witness = Witness { drive: id, known };
            if known.ledger == CONTROL_LEDGER {
                if let Err(older) = self.control.history().check(&witness) {
                    return Some(older);
                }
                continue;
            }
            let of_ledger = state.filesystems.values().find(|entry| entry.record.ledger == known.ledger);
            let Some(entry) = of_ledger else { continue };
            if let Err(older) = entry.owner.history().check(&witness) {
                if !entry.owner.stat().in_doubt
                    && let Err(error) = entry.client.doubt(true).await
                {
                    tracing::error!(%error, "orphans are still looked for");
                }
                return Some(older);
            }
        }
        None
    }

    /// Takes a drive that was away into use, unless it knows newer metadata than the node has.
    pub(super) async fn admit(&self, state: &mut State, mut opened: DriveEntry) -> Result<()> {
        let id = opened.record.id;
        if let Some(older) = self.refuse_if_ahead(state, &opened).await {
            tracing::error!(drive = %id, %older, "drive is not used");
            opened.problem = Some(older.to_string());
            // The end of its thread may take a moment.
            let service = opened.service.take();
            tokio::task::spawn_blocking(move || drop(service)).await?;
        }
        let Some(entry) = state.drives.get_mut(&id) else { return Ok(()) };
        (entry.service, entry.problem) = (opened.service, opened.problem);
        if entry.service.is_none() {
            return Ok(());
        }
        let noted = note_drives(&self.control, &mut state.drives, &[id]).await;
        let happened = match noted {
            Ok(happened) => happened,
            Err(error) => {
                // What is not noted may not be relied on.
                if let Some(entry) = state.drives.get_mut(&id) {
                    entry.service = None;
                    entry.problem = Some(format!("its mark cannot be written: {error:#}"));
                }
                return Err(error);
            }
        };
        if !happened.is_empty() {
            state.map = self.control.map()?;
            state.watch.keep(self.env.clock.wall_ns() / 1_000_000_000, happened);
            self.publish(state)?;
            self.recheck(state, &BTreeSet::from([id]));
        }
        Ok(())
    }

    /// Now and then: notes how far the drives have come, and tells them how far metadata has.
    pub(super) async fn keep_history(&self, state: &mut State, told: &mut Told, now_ns: u64) -> Result<()> {
        if now_ns.saturating_sub(told.at_ns) < TELL_EVERY_NS {
            return Ok(());
        }
        told.at_ns = now_ns;
        let before = self.control.history().position().map_or(0, |position| position.seq.0);
        let ids: Vec<DriveId> = state.drives.keys().copied().collect();
        note_drives(&self.control, &mut state.drives, &ids).await?;
        // Marks alone are no news: a drive that is told of them makes another one.
        let control_is_new = before != told.control_seq;
        told.control_seq = self.control.history().position().map_or(0, |position| position.seq.0);
        let positions = self.positions(state);
        let of_files = positions.iter().filter(|position| position.ledger != CONTROL_LEDGER);
        let filesystems = of_files.map(|position| (position.ledger, position.seq.0)).collect();
        if filesystems == told.filesystems && !control_is_new {
            return Ok(());
        }
        told.filesystems = filesystems;
        for (id, entry) in state.drives.iter().filter(|(_, entry)| entry.is_readable()) {
            let Some(service) = entry.service.clone() else { continue };
            if told.tells.get(id).is_some_and(|tell| !tell.is_finished()) {
                continue;
            }
            let positions = positions.clone();
            // Whether it fails is seen by all who use the drive.
            let tell = async move { drop(service.keep_positions(positions, false).await) };
            told.tells.insert(*id, self.runtime.spawn(tell));
        }
        Ok(())
    }
}
