//! Events of the node for people: each look compares the present state with the state in the last events.
//!
//! Code that changes something also records the events of the change before the next change, see `Node::tell`. After a
//! restart the recorded events give the last known state. A state that may flicker (a store that answers now and then)
//! counts once it has lasted for several looks; there is one look a second.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};

use admin::ShortageInfo;
use anyhow::Result;
use base::DriveId;
use control::{Cluster, Control, ControlChange, ControlError, FilesystemRecord, Plan};
use layout::{ClusterMap, Profile};
use meta::owner::OwnerStat;
use tokio::sync::MutexGuard;
use wire::drive::DriveStat;
use wire::event::{Event, Severity};

use super::damage::SeenDamage;
use super::drives::DriveEntry;
use super::filesystems::FilesystemEntry;
use super::limits::shortage_text;
use super::{Node, State};

/// Looks before a store counts as down, or tiering as in trouble; as many before either counts as over.
const STAYS: u32 = 5;
/// Looks without content that leaves early before the sum is recorded.
const CALM: u32 = 60;
/// Limit of events that wait to be written.
const PENDING_MAX: usize = 1000;
/// States of a drive.
const DRIVE_STATES: [&str; 5] = ["up", "missing", "failed", "leaving", "out"];

/// An event without its number and time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Happened {
    severity: Severity,
    subject: String,
    kind: &'static str,
    text: String,
}

impl Happened {
    pub(super) fn new(
        severity: Severity,
        subject: impl Into<String>,
        kind: &'static str,
        text: impl Into<String>,
    ) -> Self {
        Self { severity, subject: subject.into(), kind, text: text.into() }
    }
}

impl Happened {
    /// The kind of the event, in a word or two.
    #[cfg(test)]
    pub(super) fn kind(&self) -> &'static str {
        self.kind
    }
}

/// The number of the next event of a cluster.
pub(super) fn next_event(control: &Control) -> Result<u32> {
    Ok(control.view()?.events()?.last().map_or(1, |event| event.id + 1))
}

impl Node {
    /// Reads the recorded events, so that a start does not repeat them, and so that the end of a recorded state is
    /// recorded too.
    pub(super) async fn recall_events(&self) -> Result<()> {
        let told = self.control.view()?.events()?;
        let mut state = self.state.lock().await;
        let State { drives, filesystems, watch, .. } = &mut *state;
        let stores = filesystems.iter().map(|(name, entry)| {
            (name.as_str(), entry.record.tier.map(|_| entry.tier.store.as_str()), &entry.record)
        });
        watch.recall(drives.keys().copied(), stores, &told);
        let restored = filesystems.iter().flat_map(|(name, entry)| entry.files.restored(&subject(name)));
        let restored = self.control_files.restored("cluster").into_iter().chain(restored).collect();
        watch.keep(self.env.clock.wall_ns() / 1_000_000_000, restored);
        drop(state);
        self.tell().await;
        Ok(())
    }

    /// Records events for what has changed since the last look. Code that changes something calls this at once, so that
    /// no state between two looks is missed. Events that cannot be written now are written later.
    pub(super) async fn tell(&self) {
        {
            let mut state = self.state.lock().await;
            let State { drives, filesystems, map, watch, .. } = &mut *state;
            let happened = watch.look(drives, filesystems, map);
            watch.keep(self.env.clock.wall_ns() / 1_000_000_000, happened);
        }
        if let Err(error) = self.write_events().await {
            tracing::warn!(%error, "events could not be written, trying again");
        }
    }

    /// Like `tell`, and also looks at states that must last before they count. Called once a second.
    pub(super) async fn tell_what_stays(&self) {
        {
            let mut state = self.state.lock().await;
            let State { drives, filesystems, watch, .. } = &mut *state;
            let happened = watch.look_at_levels(drives, filesystems);
            watch.keep(self.env.clock.wall_ns() / 1_000_000_000, happened);
        }
        self.tell().await;
    }

    async fn write_events(&self) -> Result<()> {
        // Others wait here, so that no event is written twice.
        let next = self.next_event.lock().await;
        let (pending, dropped) = {
            let watch = &self.state.lock().await.watch;
            (watch.pending.clone(), watch.dropped)
        };
        if pending.is_empty() {
            return Ok(());
        }
        let mut change = self.control.view()?.change();
        let written = add_events(next, &mut change, &pending);
        self.control.commit(change).await?;
        self.state.lock().await.watch.wrote(pending.len(), dropped);
        written.are_written();
        Ok(())
    }

    /// Decides a plan and commits it together with its events.
    pub(super) async fn plan_and_tell(
        &self,
        happened: Vec<Happened>,
        decide: impl FnOnce(&mut Plan) -> Result<()>,
    ) -> Result<()> {
        let time_s = self.env.clock.wall_ns() / 1_000_000_000;
        let happened: VecDeque<_> = happened.into_iter().map(|happened| (time_s, happened)).collect();
        self.control.catch_up().await?;
        let next = self.next_event.lock().await;
        let view = self.control.view()?;
        let mut plan = Plan::new(Cluster::of(&view)?);
        decide(&mut plan)?;
        let mut change = plan.change(&view);
        let written = add_events(next, &mut change, &happened);
        let committed = self.control.commit(change).await;
        // Without an answer they may come into force later: their numbers are taken.
        if !matches!(committed, Err(ControlError::Conflict)) {
            written.are_written();
        }
        committed?;
        self.take_over().await
    }
}

/// Adds events to a change, under the next numbers.
fn add_events<'a>(
    next: MutexGuard<'a, u32>,
    change: &mut ControlChange,
    happened: &VecDeque<(i64, Happened)>,
) -> Numbered<'a> {
    for (id, (time_s, happened)) in (*next..).zip(happened) {
        let Happened { severity, subject, kind, text } = happened;
        let (subject, kind, text) = (subject.clone(), (*kind).to_owned(), text.clone());
        change.event(&Event { id, time_s: *time_s, severity: *severity, subject, kind, text });
    }
    Numbered { next, count: happened.len() as u32 }
}

/// The numbers of events that are being written.
struct Numbered<'a> {
    next: MutexGuard<'a, u32>,
    count: u32,
}

impl Numbered<'_> {
    fn are_written(mut self) {
        *self.next += self.count;
    }
}

/// The last state that was seen, and events that are to be written.
#[derive(Default)]
pub(super) struct Watch {
    drives: BTreeMap<DriveId, SeenDrive>,
    filesystems: BTreeMap<String, SeenFilesystem>,
    rebuilding: usize,
    /// Events that are not written yet, with their times, oldest first.
    pending: VecDeque<(i64, Happened)>,
    /// Number of events that were dropped because too many were pending.
    dropped: usize,
}

#[derive(Default)]
struct SeenDrive {
    state: String,
    full: Level,
    host_full: Level,
}

#[derive(Default)]
struct SeenFilesystem {
    profile: String,
    store: Option<String>,
    is_down: Level,
    problem: Level,
    metadata_full: Level,
    /// How often the disk with its metadata had become full by then.
    metadata_full_count: u64,
    full: Level,
    early: Early,
    damage: SeenDamage,
}

/// State of tiering at one look.
pub(super) struct TierSigns {
    /// Whether the store answers; `None` if unknown.
    pub(super) up: Option<bool>,
    /// The error of the store, or why tiering stopped.
    pub(super) problem: Option<String>,
    pub(super) released_early_bytes: u64,
}

/// The kind of the last event of a subject, among these kinds.
fn last<'a>(told: &[Event], subject: &str, kinds: &[&'a str]) -> Option<&'a str> {
    let of_subject = told.iter().rev().filter(|event| event.subject == subject);
    of_subject.filter_map(|event| kinds.iter().find(|kind| **kind == event.kind)).next().copied()
}

impl Watch {
    /// The state before the first look, from the recorded events.
    fn recall<'a>(
        &mut self,
        drives: impl Iterator<Item = DriveId>,
        filesystems: impl Iterator<Item = (&'a str, Option<&'a str>, &'a FilesystemRecord)>,
        told: &[Event],
    ) {
        let began =
            |subject: &str, begin, end| Level::told(last(told, subject, &[begin, end]) == Some(begin));
        for id in drives {
            let subject = drive(id);
            let seen = SeenDrive {
                state: last(told, &subject, &DRIVE_STATES).unwrap_or("up").to_owned(),
                full: began(&subject, "full", "has room"),
                host_full: began(&subject, "host full", "host has room"),
            };
            self.drives.insert(id, seen);
        }
        for (name, store, record) in filesystems {
            let subject = subject(name);
            let is_down = |store| began(&format!("store {store}"), "down", "up");
            let seen = SeenFilesystem {
                profile: record.profile.to_string(),
                store: store.map(str::to_owned),
                is_down: store.map(is_down).unwrap_or_default(),
                problem: began(&subject, "tiering pauses", "tiering goes on"),
                metadata_full: began(&subject, "metadata full", "metadata has room"),
                metadata_full_count: 0,
                full: began(&subject, "full", "has room"),
                early: Early::recalled(began(&subject, "break-in", "break-in ended").told),
                damage: SeenDamage::recalled(began(&subject, "data unreadable", "data readable").told),
            };
            self.filesystems.insert(name.to_owned(), seen);
        }
        self.rebuilding = usize::from(began("cluster", "rebuild began", "rebuild ended").told);
    }

    /// Queues events after those that could not be written before; beyond the limit the oldest are dropped.
    pub(super) fn keep(&mut self, time_s: i64, happened: Vec<Happened>) {
        self.pending.extend(happened.into_iter().map(|happened| (time_s, happened)));
        let too_many = self.pending.len().saturating_sub(PENDING_MAX);
        self.pending.drain(..too_many);
        self.dropped += too_many;
    }

    /// `count` events are written: the oldest ones when `dropped` events had been dropped.
    fn wrote(&mut self, count: usize, dropped: usize) {
        let since = self.dropped - dropped;
        let left = count.saturating_sub(since).min(self.pending.len());
        self.pending.drain(..left);
    }

    /// Changes in steps; each step gives an event.
    fn look(
        &mut self,
        drives: &BTreeMap<DriveId, DriveEntry>,
        filesystems: &BTreeMap<String, FilesystemEntry>,
        map: &ClusterMap,
    ) -> Vec<Happened> {
        let mut happened = Vec::new();
        for (id, entry) in drives {
            let now = entry.state();
            let before = match self.drives.entry(*id) {
                Entry::Vacant(vacant) => {
                    vacant.insert(SeenDrive { state: now.to_owned(), ..SeenDrive::default() });
                    None
                }
                Entry::Occupied(seen) => Some(std::mem::replace(&mut seen.into_mut().state, now.to_owned())),
            };
            happened.extend(drive_event(entry, before.as_deref(), now));
        }
        let rebuilding = map.groups.iter().filter(|group| !group.rebuilding.is_empty()).count();
        happened.extend(self.look_at_rebuilds(rebuilding));
        for (name, entry) in filesystems {
            let profile = entry.record.profile.to_string();
            let store = entry.record.tier.map(|_| entry.tier.store.clone());
            match self.filesystems.get_mut(name) {
                Some(seen) => seen.look(name, &profile, store, &mut happened),
                None => {
                    let text = format!("profile {profile}");
                    happened.push(Happened::new(Severity::Info, subject(name), "created", text));
                    let seen = SeenFilesystem { profile, store, ..SeenFilesystem::default() };
                    self.filesystems.insert(name.clone(), seen);
                }
            }
        }
        happened
    }

    fn look_at_rebuilds(&mut self, rebuilding: usize) -> Option<Happened> {
        let before = std::mem::replace(&mut self.rebuilding, rebuilding);
        match (before, rebuilding) {
            (0, 1..) => {
                let text = format!("{rebuilding} placement groups lack shards on their new members");
                Some(Happened::new(Severity::Warning, "cluster", "rebuild began", text))
            }
            (1.., 0) => {
                let text = "every drive has what it should";
                Some(Happened::new(Severity::Info, "cluster", "rebuild ended", text))
            }
            _ => None,
        }
    }

    /// States that last for a while and may flicker.
    fn look_at_levels(
        &mut self,
        drives: &BTreeMap<DriveId, DriveEntry>,
        filesystems: &BTreeMap<String, FilesystemEntry>,
    ) -> Vec<Happened> {
        let mut happened = Vec::new();
        for (id, entry) in drives {
            let (Some(stat), Some(seen)) = (entry.stat_if_readable(), self.drives.get_mut(id)) else {
                continue;
            };
            happened.extend(seen.look_at_room(*id, &entry.path_text(), &stat));
        }
        for (name, entry) in filesystems {
            let Some(seen) = self.filesystems.get_mut(name) else { continue };
            happened.extend(seen.damage.look(name, &entry.damage.stat()));
            happened.extend(seen.look_at_metadata(name, &entry.owner.stat()));
            happened.extend(seen.look_at_room(name, entry.shortage()));
            if let Some(store) = entry.record.tier.map(|_| entry.tier.store.clone()) {
                seen.look_at_tier(name, &store, &entry.tier.signs(), &mut happened);
            }
        }
        happened
    }

    /// Events for a change of a profile, which its commit records: `knows_profile` follows that.
    pub(super) fn profile_change(name: &str, before: Profile, now: Profile) -> Vec<Happened> {
        if before == now {
            return Vec::new();
        }
        vec![profile_event(name, &before.to_string(), &now.to_string())]
    }

    pub(super) fn knows_profile(&mut self, name: &str, profile: Profile) {
        if let Some(seen) = self.filesystems.get_mut(name) {
            seen.profile = profile.to_string();
        }
    }
}

fn profile_event(name: &str, before: &str, now: &str) -> Happened {
    let text = format!("{now}, {before} before; what is there already is converted");
    Happened::new(Severity::Info, subject(name), "profile", text)
}

pub(super) fn subject(filesystem: &str) -> String {
    format!("filesystem {filesystem}")
}

fn drive(id: DriveId) -> String {
    format!("drive {id}")
}

fn drive_event(entry: &DriveEntry, before: Option<&str>, now: &'static str) -> Option<Happened> {
    let severity = match now {
        "failed" => Severity::Error,
        "missing" => Severity::Warning,
        "out" if before != Some("leaving") => Severity::Warning,
        _ => Severity::Info,
    };
    let path = entry.path_text();
    let problem = entry.problem.as_deref().map(|problem| format!(": {problem}")).unwrap_or_default();
    let text = match before {
        Some(before) if before == now => return None,
        Some(before) => format!("{path} was {before}{problem}"),
        None => format!("{path} was added"),
    };
    Some(Happened::new(severity, drive(entry.record.id), now, text))
}

impl SeenDrive {
    fn look_at_room(&mut self, id: DriveId, path: &str, stat: &DriveStat) -> Vec<Happened> {
        let full = self.full.look_at_once(stat.full).map(|full| match full {
            true => (
                Severity::Warning,
                "full",
                "takes no new data; delete some, or add drives (forebay drive add)",
            ),
            false => (Severity::Info, "has room", "takes new data again"),
        });
        let host_full = self.host_full.look_at_once(stat.host_full).map(|full| match full {
            true => {
                (Severity::Error, "host full", "the filesystem that holds it is full: free some space there")
            }
            false => (Severity::Info, "host has room", "the filesystem that holds it has room again"),
        });
        let told = full.into_iter().chain(host_full);
        told.map(|(severity, kind, text)| Happened::new(severity, drive(id), kind, format!("{path}: {text}")))
            .collect()
    }
}

impl SeenFilesystem {
    fn look(&mut self, name: &str, profile: &str, store: Option<String>, happened: &mut Vec<Happened>) {
        let before = std::mem::replace(&mut self.profile, profile.to_owned());
        if before != profile {
            happened.push(profile_event(name, &before, profile));
        }
        let before = std::mem::replace(&mut self.store, store.clone());
        if before != store {
            (self.is_down, self.problem) = (Level::default(), Level::default());
            let (kind, text) = match (&store, &before) {
                (Some(store), _) => ("attached", format!("to store {store}")),
                (None, before) => {
                    ("detached", format!("from store {}", before.as_deref().unwrap_or_default()))
                }
            };
            happened.push(Happened::new(Severity::Info, subject(name), kind, text));
        }
    }

    /// Full between two looks counts too.
    fn look_at_metadata(&mut self, name: &str, owner: &OwnerStat) -> Option<Happened> {
        let count = std::mem::replace(&mut self.metadata_full_count, owner.no_space_count);
        let is_full = owner.no_space || owner.no_space_count > count;
        let (severity, kind, text) = match self.metadata_full.look_at_once(is_full)? {
            true => {
                let text = "a disk with its metadata is full: creating and writing fail with ENOSPC; free some space on \
                            that disk, or delete files here; it goes on by itself when there is room";
                (Severity::Error, "metadata full", text)
            }
            false => (Severity::Info, "metadata has room", "new data is taken again"),
        };
        Some(Happened::new(severity, subject(name), kind, text))
    }

    /// A refused write counts at once; little room must last, because it may pass by itself.
    fn look_at_room(&mut self, name: &str, shortage: Option<ShortageInfo>) -> Option<Happened> {
        let full = match &shortage {
            Some(shortage) if shortage.refusing => self.full.look_at_once(true),
            shortage => self.full.look(shortage.is_some()),
        };
        Some(match (full?, shortage) {
            (true, Some(shortage)) => {
                Happened::new(Severity::Warning, subject(name), "full", shortage_text(&shortage))
            }
            _ => Happened::new(Severity::Info, subject(name), "has room", "new data is taken again"),
        })
    }

    fn look_at_tier(&mut self, name: &str, store: &str, signs: &TierSigns, happened: &mut Vec<Happened>) {
        let problem = signs.problem.clone().unwrap_or_default();
        let of_store = || format!("store {store}");
        // After a start the state of a store is unknown until its first answer: until then the recorded state counts.
        let is_down = signs.up.map_or(self.is_down.told, |up| !up);
        let pauses = match (&signs.problem, signs.up) {
            (None, None) | (_, Some(false)) => self.problem.told,
            (problem, _) => problem.is_some(),
        };
        match self.is_down.look(is_down) {
            Some(true) => happened.push(Happened::new(Severity::Error, of_store(), "down", problem.clone())),
            Some(false) => happened.push(Happened::new(Severity::Info, of_store(), "up", "it answers again")),
            None => {}
        }
        match self.problem.look(pauses) {
            Some(true) => {
                happened.push(Happened::new(Severity::Warning, subject(name), "tiering pauses", problem))
            }
            Some(false) => {
                let text = "nothing is in the way any more";
                happened.push(Happened::new(Severity::Info, subject(name), "tiering goes on", text));
            }
            None => {}
        }
        match self.early.look(signs.released_early_bytes) {
            Some(EarlyIs::Begun) => {
                let text = "drives are filling up: what the store has leaves them before its retention is over; \
                            reads of it get slower, nothing is lost";
                happened.push(Happened::new(Severity::Warning, subject(name), "break-in", text));
            }
            Some(EarlyIs::Over(bytes)) => {
                let since = if self.early.is_recalled() { " since the last start" } else { "" };
                let text = format!("{} left the drives early{since}", base::units::format_size(bytes));
                happened.push(Happened::new(Severity::Info, subject(name), "break-in ended", text));
            }
            None => {}
        }
    }
}

/// A state that is on or off, and counts once it has lasted.
#[derive(Debug, Default)]
struct Level {
    told: bool,
    looks: u32,
}

impl Level {
    fn told(told: bool) -> Self {
        Self { told, looks: 0 }
    }

    /// The new state, if it changed: on counts at once, off once it has lasted.
    fn look_at_once(&mut self, now: bool) -> Option<bool> {
        if now && !self.told {
            *self = Self::told(true);
            return Some(true);
        }
        self.look(now)
    }

    /// The new state, if it changed and has lasted.
    fn look(&mut self, now: bool) -> Option<bool> {
        self.looks = if now == self.told { 0 } else { self.looks + 1 };
        if self.looks < STAYS {
            return None;
        }
        (self.told, self.looks) = (now, 0);
        Some(now)
    }
}

/// Content that left the drives early.
#[derive(Debug, Default)]
struct Early {
    bytes: Option<u64>,
    /// Bytes that had left before this began, and looks since the last that left.
    since: Option<(u64, u32)>,
    /// It began before the last start of the node.
    is_recalled: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum EarlyIs {
    Begun,
    Over(u64),
}

impl Early {
    /// The number of bytes that had left before a restart is unknown.
    fn recalled(began: bool) -> Self {
        Self { bytes: None, since: began.then_some((0, 0)), is_recalled: began }
    }

    fn is_recalled(&self) -> bool {
        self.is_recalled
    }

    fn look(&mut self, bytes: u64) -> Option<EarlyIs> {
        // The counter restarts with every process, and with new limits.
        let before = self.bytes.replace(bytes).unwrap_or(bytes).min(bytes);
        match (&mut self.since, bytes > before) {
            (None, true) => {
                (self.since, self.is_recalled) = (Some((before, 0)), false);
                Some(EarlyIs::Begun)
            }
            (None, false) => None,
            (Some((_, calm)), true) => {
                *calm = 0;
                None
            }
            (Some((began, calm)), false) => {
                *calm += 1;
                let over = (*calm >= CALM).then(|| EarlyIs::Over(bytes.saturating_sub(*began)));
                if over.is_some() {
                    self.since = None;
                }
                over
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_flickers_is_told_once_it_stays() {
        let mut level = Level::default();
        let mut told =
            |signs: &str| -> Vec<bool> { signs.chars().filter_map(|sign| level.look(sign == 'x')).collect() };
        assert!(told("x.xx.xxxx.xxxx.").is_empty());
        assert_eq!(told("xxxxx"), [true]);
        assert!(told("xxxxxxxx....x....xxxxx").is_empty());
        assert_eq!(told("....."), [false]);
    }

    fn event(id: u32, subject: &str, kind: &str) -> Event {
        let (subject, kind, text) = (subject.to_owned(), kind.to_owned(), String::new());
        Event { id, time_s: 0, severity: Severity::Info, subject, kind, text }
    }

    #[test]
    fn a_start_does_not_tell_again_what_was_told_of_drives() {
        let told = [
            event(1, "drive 1", "failed"),
            event(2, "drive 1", "up"),
            event(3, "drive 12", "missing"),
            event(4, "drive 12", "host full"),
        ];
        let mut watch = Watch::default();
        watch.recall([1, 2, 12].map(DriveId).into_iter(), std::iter::empty(), &told);
        let known: Vec<&str> = watch.drives.values().map(|seen| seen.state.as_str()).collect();
        assert_eq!(known, ["up", "up", "missing"]);
        assert!(watch.drives[&DriveId(12)].host_full.told);
    }

    #[test]
    fn a_start_tells_the_end_of_a_rebuild_whose_beginning_was_told() {
        let check = |told: &[Event], rebuilding, expected: Option<&str>| {
            let mut watch = Watch::default();
            watch.recall(std::iter::empty(), std::iter::empty(), told);
            assert_eq!(watch.look_at_rebuilds(rebuilding).map(|happened| happened.kind), expected);
        };
        let began = [event(1, "cluster", "rebuild began")];
        let ended = [event(1, "cluster", "rebuild began"), event(2, "cluster", "rebuild ended")];
        check(&began, 0, Some("rebuild ended"));
        check(&began, 7, None);
        check(&ended, 0, None);
        check(&ended, 7, Some("rebuild began"));
        check(&[], 7, Some("rebuild began"));
    }

    #[test]
    fn what_cannot_be_written_down_is_kept_and_not_without_end() {
        let mut watch = Watch::default();
        for time_s in 0..1500 {
            watch.keep(time_s, vec![profile_event("main", "r2", "r3")]);
        }
        assert_eq!(watch.pending.len(), PENDING_MAX);
        assert_eq!(watch.pending[0].0, 500);
    }

    #[test]
    fn fullness_is_told_at_once_and_its_end_once_it_stays() {
        let mut level = Level::default();
        assert_eq!(level.look_at_once(true), Some(true));
        let told: Vec<bool> = "..x....x".chars().filter_map(|sign| level.look_at_once(sign == 'x')).collect();
        assert!(told.is_empty());
        let told: Vec<bool> = ".....".chars().filter_map(|sign| level.look_at_once(sign == 'x')).collect();
        assert_eq!(told, [false]);
    }

    #[test]
    fn a_refused_write_is_told_at_once_and_next_to_no_room_once_it_stays() {
        let mut seen = SeenFilesystem::default();
        let shortage =
            |refusing| ShortageInfo { of: "drives".to_owned(), left_bytes: 0, refusing, tiered: false };
        let mut kinds = |shortages: &[Option<bool>]| -> Vec<&'static str> {
            let look = |refusing: &Option<bool>| seen.look_at_room("main", refusing.map(shortage));
            shortages.iter().filter_map(look).map(|happened| happened.kind).collect()
        };
        assert!(kinds(&[Some(false), Some(false), None, Some(false), Some(false)]).is_empty());
        assert_eq!(kinds(&[Some(true), Some(true), None, Some(false), None]), ["full"]);
        assert_eq!(kinds(&[None; 9]), ["has room"]);
        assert_eq!(kinds(&[Some(false); 9]), ["full"]);
    }

    #[test]
    fn a_disk_with_metadata_that_was_full_between_two_looks_is_told() {
        let mut seen = SeenFilesystem::default();
        let mut kind = |no_space, no_space_count| {
            let owner = OwnerStat { no_space, no_space_count, ..OwnerStat::default() };
            seen.look_at_metadata("main", &owner).map(|happened| happened.kind)
        };
        assert_eq!(kind(false, 0), None);
        assert_eq!(kind(false, 1), Some("metadata full"));
        let kinds: Vec<_> = (0..6).filter_map(|_| kind(false, 1)).collect();
        assert_eq!(kinds, ["metadata has room"]);
        assert_eq!(kind(true, 2), Some("metadata full"));
    }

    #[test]
    fn content_that_leaves_early_is_told_at_its_beginning_and_summed_up_at_its_end() {
        let mut early = Early::default();
        assert_eq!(early.look(500), None, "from before");
        assert_eq!(early.look(700), Some(EarlyIs::Begun));
        assert_eq!(early.look(900), None);
        for _ in 1..CALM {
            assert_eq!(early.look(900), None);
        }
        assert_eq!(early.look(950), None, "it was not over");
        let all: Vec<_> = (0..200).filter_map(|_| early.look(950)).collect();
        assert_eq!(all, [EarlyIs::Over(450)]);
        assert_eq!(early.look(0), None, "counted anew");
        assert_eq!(early.look(1), Some(EarlyIs::Begun));
    }

    /// Events while tiering shows this state for [`STAYS`] looks.
    fn tiering(
        seen: &mut SeenFilesystem,
        up: Option<bool>,
        problem: Option<&str>,
    ) -> Vec<(String, &'static str)> {
        let problem = problem.map(str::to_owned);
        let signs = TierSigns { up, problem, released_early_bytes: 0 };
        let mut happened = Vec::new();
        (0..STAYS).for_each(|_| seen.look_at_tier("main", "cold", &signs, &mut happened));
        happened.into_iter().map(|happened| (happened.subject, happened.kind)).collect()
    }

    #[test]
    fn a_store_that_is_down_is_told_of_the_store_and_other_trouble_of_the_filesystem() {
        let mut seen = SeenFilesystem::default();
        let mut kinds = |up, problem| tiering(&mut seen, Some(up), problem);
        let one = |subject: &str, kind| vec![(subject.to_owned(), kind)];
        assert_eq!(kinds(false, Some("no answer")), one("store cold", "down"));
        assert_eq!(kinds(true, None), one("store cold", "up"));
        assert_eq!(kinds(true, Some("quota")), one("filesystem main", "tiering pauses"));
        assert_eq!(kinds(false, Some("no answer")), one("store cold", "down"));
        let both = [("store cold".to_owned(), "up"), ("filesystem main".to_owned(), "tiering goes on")];
        assert_eq!(kinds(true, None), both);
    }

    #[test]
    fn a_store_that_was_told_to_be_down_is_told_to_be_up_once_that_is_known() {
        let mut seen = SeenFilesystem { is_down: Level::told(true), ..SeenFilesystem::default() };
        assert!(tiering(&mut seen, None, None).is_empty(), "nobody asked it yet");
        assert!(tiering(&mut seen, Some(false), Some("no answer")).is_empty(), "that was told");
        assert_eq!(tiering(&mut seen, Some(true), None), [("store cold".to_owned(), "up")]);
    }
}
