//! History marks of drives and ledgers: they reveal an older copy of either.
//!
//! Each drive keeps the newest position of each ledger that it received, and the control ledger keeps a mark with the
//! progress of each drive. Both are compared before any of them is used, and updated at most every ten seconds.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use admin::NodeStatus;
use anyhow::Result;
use base::{DriveId, LedgerId};
use client::Client;
use control::{CONTROL_LEDGER, Control, ControlError, DriveRecord, Plan};
use futures_util::future::join_all;
use meta::history::{Evidence, Older, Witness};
use tokio::task::JoinHandle;
use wire::drive::DriveMark;
use wire::event::Severity;
use wire::position::{KnownLedger, Position};

use super::drives::{DriveEntry, OpenDrive};
use super::events::Happened;
use super::local_drives::LocalDrives;
use super::{Node, State};

/// Interval of updates to drives and to the control ledger.
const TELL_EVERY_NS: u64 = 10_000_000_000;
/// Deadline of a drive to return or keep positions; a drive that misses it is left out.
const DRIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Positions of ledgers that each drive has.
pub(super) struct Knowledge {
    drives: Vec<(DriveId, Vec<KnownLedger>)>,
    older: Older,
    /// Ledgers that are older for certain.
    bereft: BTreeSet<LedgerId>,
}

/// The state after the last update.
#[derive(Default)]
pub(super) struct Reported {
    at_ns: u64,
    filesystems: BTreeSet<(LedgerId, u64)>,
    /// The control ledger's newest batch after the last update.
    control_seq: u64,
    /// Updates under way: at most one for each drive, because a drive may hang.
    tells: BTreeMap<DriveId, JoinHandle<()>>,
}

impl Knowledge {
    /// Reads the positions from every readable drive. If the ends of the logs of ledgers were lost, all are older ones, as an operator
    /// knows.
    pub(super) async fn gather(
        drives: &BTreeMap<DriveId, DriveEntry>,
        accept_older: bool,
        bereft: BTreeSet<LedgerId>,
    ) -> Self {
        let mut known = Vec::new();
        for (id, entry) in drives {
            let Some(service) = entry.service.as_ref().filter(|_| entry.is_readable()) else { continue };
            if let Ok(Ok(ledgers)) = tokio::time::timeout(DRIVE_TIMEOUT, service.known_ledgers()).await {
                known.push((*id, ledgers));
            }
        }
        let older = if accept_older || !bereft.is_empty() { Older::Accept } else { Older::Refuse };
        Self { drives: known, older, bereft }
    }

    /// Nothing is known of drives. The ends of the logs of these ledgers were lost.
    pub(super) fn of_bereft(bereft: BTreeSet<LedgerId>) -> Self {
        Self { drives: Vec::new(), older: Older::Refuse, bereft }
    }

    /// The positions of one ledger.
    pub(super) fn of(&self, ledger: LedgerId) -> Evidence {
        let of_drive = |(drive, known): &(DriveId, Vec<KnownLedger>)| {
            let known = known.iter().find(|known| known.ledger == ledger)?;
            Some(Witness { drive: *drive, known: *known })
        };
        Evidence {
            witnesses: self.drives.iter().filter_map(of_drive).collect(),
            older: if self.bereft.contains(&ledger) { Older::Certain } else { self.older },
        }
    }
}

/// A drive's progress, as it says it now.
struct Progress {
    id: DriveId,
    mark: DriveMark,
    /// It is an older copy of itself, and this is how far it says it is.
    older: Option<String>,
}

impl Progress {
    /// That of a drive, unless it was opened anew since it was taken into use.
    fn of(id: DriveId, drive: &OpenDrive) -> Option<Self> {
        let mark = drive.stat().mark;
        (!drive.is_another()).then(|| Self { id, mark, older: drive.older.clone() })
    }
}

/// The drives that have a service.
pub(super) fn services(drives: &BTreeMap<DriveId, DriveEntry>) -> Vec<(DriveId, OpenDrive)> {
    drives.iter().filter_map(|(id, entry)| Some((*id, entry.service.clone()?))).collect()
}

/// Records the progress of these drives, and that drives which are older copies may lack shards. Runs before anything
/// is read from them. Returns events.
pub(super) async fn note_drives(
    control: &Control,
    paths: &LocalDrives,
    drives: &[(DriveId, OpenDrive)],
) -> Result<Vec<Happened>> {
    let progress: Vec<Progress> = drives.iter().filter_map(|(id, drive)| Progress::of(*id, drive)).collect();
    let decide = |plan: &mut Plan| {
        let mut happened = Vec::new();
        for Progress { id, mark, older } in &progress {
            let Some(record) = plan.next().drives.get(id).cloned() else { continue };
            if let Some(found) = older.as_ref().filter(|_| record.mark.incarnation < mark.incarnation) {
                plan.returned_with_gap(*id);
                let text = "an older copy of the drive is in its place: what it lacks is found by comparing it with the others, \
                            and restored";
                let place = match paths.path_of(record.uuid) {
                    Some(path) => format!("path={}", path.display()),
                    None => format!("node={}", record.node),
                };
                tracing::error!(drive = %id, found, noted = ?record.mark, text);
                happened.push(Happened::new(
                    Severity::Error,
                    format!("drive {id}"),
                    "older copy",
                    format!("{text}: {place}"),
                ));
            }
            if record.mark != *mark || record.may_know_lost {
                plan.set_drive(DriveRecord { mark: *mark, may_know_lost: false, ..record });
            }
        }
        Ok::<_, ControlError>(happened)
    };
    Ok(control.plan(decide).await?)
}

/// The drives that can be read.
pub(super) fn readable(drives: &BTreeMap<DriveId, DriveEntry>) -> Vec<(DriveId, OpenDrive)> {
    let readable = drives.iter().filter(|(_, entry)| entry.is_readable());
    readable.filter_map(|(id, entry)| Some((*id, entry.service.clone()?))).collect()
}

/// Sends these positions to all drives at once. A drive that misses the deadline keeps an older position.
pub(super) async fn tell_drives(drives: Vec<(DriveId, OpenDrive)>, positions: &[Position], replace: bool) {
    let keeps = drives.into_iter().map(|(id, service)| async move {
        let kept = service.keep_positions(positions.to_vec(), replace);
        if !matches!(tokio::time::timeout(DRIVE_TIMEOUT, kept).await, Ok(Ok(()))) {
            tracing::warn!(drive = %id, "drive was not told how far metadata has come");
        }
    });
    join_all(keeps).await;
}

impl Node {
    pub(super) fn positions(&self, state: &State) -> Vec<Position> {
        let filesystems = state.filesystems.values().filter_map(|entry| entry.position());
        self.control.history().position().into_iter().chain(filesystems).collect()
    }

    /// Replaces the positions on all drives: the operator decided to go on with this metadata, also if drives knew
    /// newer positions.
    pub(super) async fn go_on_with_this_metadata(&self) {
        let (drives, positions) = {
            let state = self.state.lock().await;
            (readable(&state.drives), self.positions(&state))
        };
        tell_drives(drives, &positions, true).await;
    }

    /// Compares all shards on drives that were older copies with the maps, so that shards of files that were deleted
    /// since are removed.
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

    /// Gives up newer metadata: from now on, extents that only it referred to are deleted as orphans.
    pub(super) async fn settle_metadata_now(&self) -> Result<NodeStatus> {
        let in_doubt: Vec<(String, Client)> = {
            let state = self.state.lock().await;
            let in_doubt = state.filesystems.values().filter(|entry| entry.owner.stat().in_doubt);
            in_doubt.map(|entry| (entry.record.name.clone(), entry.client.clone())).collect()
        };
        for (filesystem, client) in in_doubt {
            client.doubt(false).await?;
            tracing::warn!(filesystem, "newer metadata is given up");
        }
        {
            let state = self.state.lock().await;
            let readable = state.drives.iter().filter(|(_, entry)| entry.is_readable());
            self.recheck(&state, &readable.map(|(id, _)| *id).collect());
        }
        self.status_now().await
    }

    /// Why a returning drive must not be used: it knows metadata that is newer than the node's, or does not say what it
    /// knows. With newer metadata known, no extent counts as an orphan any more, because that metadata may refer to it.
    async fn refusal(&self, opened: &DriveEntry) -> Option<String> {
        let id = opened.record.id;
        let service = opened.service.as_ref()?;
        let Ok(Ok(known)) = tokio::time::timeout(DRIVE_TIMEOUT, service.known_ledgers()).await else {
            return Some("it does not say which metadata it knows".to_owned());
        };
        for known in known {
            let witness = Witness { drive: id, known };
            if known.ledger == CONTROL_LEDGER {
                if let Err(older) = self.control.history().check(&witness) {
                    return Some(older.to_string());
                }
                continue;
            }
            let of_ledger = {
                let state = self.state.lock().await;
                let entry = state.filesystems.values().find(|entry| entry.record.ledger == known.ledger);
                entry.map(|entry| (entry.owner.clone(), entry.client.clone()))
            };
            let Some((owner, client)) = of_ledger else { continue };
            if let Err(older) = owner.history().check(&witness) {
                if !owner.stat().in_doubt
                    && let Err(error) = client.doubt(true).await
                {
                    tracing::error!(%error, "orphans are still looked for");
                }
                return Some(older.to_string());
            }
        }
        None
    }

    /// Takes a returning drive into use, unless it is refused. Returns why it is not used.
    pub(super) async fn admit(&self, mut opened: DriveEntry) -> Result<Option<String>> {
        let id = opened.record.id;
        if opened.record.may_know_lost
            && let Some(drive) = &opened.service
        {
            let positions = self.positions(&*self.state.lock().await);
            drive.keep_positions(positions, true).await?;
        }
        if let Some(refusal) = self.refusal(&opened).await {
            tracing::error!(drive = %id, refusal, "drive is not used");
            opened.problem = Some(refusal);
            // Its thread may take a moment to end.
            let service = opened.service.take();
            tokio::task::spawn_blocking(move || drop(service)).await?;
        }
        let Some(service) = opened.service else {
            self.note_problem(id, opened.problem.as_deref().unwrap_or_default()).await;
            return Ok(Some(opened.problem.unwrap_or_default()));
        };
        // Without a durable record the drive must not be used.
        let happened = match note_drives(&self.control, &self.local_drives, &[(id, service.clone())]).await {
            Ok(happened) => happened,
            Err(error) => {
                self.note_problem(id, &format!("its mark cannot be written: {error:#}")).await;
                return Err(error);
            }
        };
        self.take_over().await?;
        let mut state = self.state.lock().await;
        let Some(entry) = state.drives.get_mut(&id) else { return Ok(None) };
        (entry.service, entry.problem) = (Some(service), None);
        if !happened.is_empty() {
            state.watch.keep(self.env.clock.wall_ns() / 1_000_000_000, happened);
            self.publish(&mut state);
            self.recheck(&state, &BTreeSet::from([id]));
        }
        Ok(None)
    }

    /// Called often: at intervals, records the progress of the drives and sends them the positions of the ledgers.
    pub(super) async fn keep_history(&self, told: &mut Reported, now_ns: u64) -> Result<()> {
        if now_ns.saturating_sub(told.at_ns) < TELL_EVERY_NS {
            return Ok(());
        }
        told.at_ns = now_ns;
        let before = self.control.history().position().map_or(0, |position| position.seq.0);
        let drives = services(&self.state.lock().await.drives);
        note_drives(&self.control, &self.local_drives, &drives).await?;
        self.take_over().await?;
        let state = self.state.lock().await;
        // Changed marks alone are not sent: each send makes a new mark.
        let control_is_new = before != told.control_seq;
        told.control_seq = self.control.history().position().map_or(0, |position| position.seq.0);
        let positions = self.positions(&state);
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
            // If it fails, every user of the drive sees the error.
            let tell = async move { drop(service.keep_positions(positions, false).await) };
            told.tells.insert(*id, self.runtime.spawn(tell));
        }
        Ok(())
    }
}
