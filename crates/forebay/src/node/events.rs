//! What happens to the node, kept for people: what is seen at each look is compared with what was seen before.
//!
//! What flickers (a store that answers now and then) counts once it has stayed for some looks, one a second.

use std::collections::BTreeMap;

use anyhow::Result;
use base::DriveId;
use meta::control::{Control, ControlChange};
use wire::event::{Event, Severity};

use super::drives::DriveEntry;
use super::filesystems::FilesystemEntry;
use super::{Node, State};

/// Looks for which a store must be down, or tiering in trouble, and as many for the end of it.
const STAYS: u32 = 5;
/// Looks without any after which content that left early is summed up.
const CALM: u32 = 60;

/// An event without its number and time.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Happened {
    severity: Severity,
    subject: String,
    kind: &'static str,
    text: String,
}

impl Happened {
    fn new(
        severity: Severity,
        subject: impl Into<String>,
        kind: &'static str,
        text: impl Into<String>,
    ) -> Self {
        Self { severity, subject: subject.into(), kind, text: text.into() }
    }
}

/// The number of the next event of a cluster.
pub(super) fn next_event(control: &Control) -> Result<u32> {
    Ok(control.events()?.last().map_or(1, |event| event.id + 1))
}

impl Node {
    /// Keeps what happened.
    async fn note(&self, happened: Vec<Happened>) -> Result<()> {
        if happened.is_empty() {
            return Ok(());
        }
        let mut next = self.next_event.lock().await;
        let time_s = self.env.clock.wall_ns() / 1_000_000_000;
        let mut change = ControlChange::default();
        for (id, happened) in (*next..).zip(&happened) {
            let Happened { severity, subject, kind, text } = happened;
            let (subject, kind, text) = (subject.clone(), (*kind).to_owned(), text.clone());
            change.event(&Event { id, time_s, severity: *severity, subject, kind, text });
        }
        self.control.commit(change).await?;
        *next += happened.len() as u32;
        Ok(())
    }

    /// Compares what is with what was, and keeps what changed.
    pub(super) async fn watch(&self, seen: &mut Watch) -> Result<()> {
        let told = if seen.looked { Vec::new() } else { self.control.events()? };
        let happened = {
            let state = self.state.lock().await;
            seen.recall(state.drives.keys().copied(), &told);
            seen.look(&state)
        };
        self.note(happened).await
    }
}

/// What was seen.
#[derive(Default)]
pub(super) struct Watch {
    /// Something was seen: what is new from now on was added.
    looked: bool,
    drives: BTreeMap<DriveId, String>,
    filesystems: BTreeMap<String, SeenFilesystem>,
    rebuilding: usize,
}

#[derive(Default)]
struct SeenFilesystem {
    profile: String,
    store: Option<String>,
    is_down: Level,
    problem: Level,
    early: Early,
}

/// What tiering tells of itself at a look.
pub(super) struct TierSigns {
    pub(super) is_down: bool,
    /// What the store says, or why tiering cannot go on.
    pub(super) problem: Option<String>,
    pub(super) released_early_bytes: u64,
}

impl Watch {
    /// Before the first look: drives are as they were when it was told last, so that no start tells it again.
    fn recall(&mut self, drives: impl Iterator<Item = DriveId>, told: &[Event]) {
        if self.looked {
            return;
        }
        for id in drives {
            let last = told.iter().rev().find(|event| event.subject == drive(id));
            self.drives.insert(id, last.map_or("up", |event| &event.kind).to_owned());
        }
    }

    fn look(&mut self, state: &State) -> Vec<Happened> {
        let mut happened = Vec::new();
        for (id, entry) in &state.drives {
            let now = entry.state();
            let before = self.drives.insert(*id, now.to_owned());
            happened.extend(drive_event(entry, before.as_deref(), now));
        }
        let rebuilding = state.map.groups.iter().filter(|group| !group.rebuilding.is_empty()).count();
        let before = std::mem::replace(&mut self.rebuilding, rebuilding);
        if before == 0 && rebuilding > 0 {
            let text = format!("{rebuilding} placement groups lack shards on their new members");
            happened.push(Happened::new(Severity::Warning, "cluster", "rebuild began", text));
        } else if before > 0 && rebuilding == 0 {
            let text = "every drive has what it should";
            happened.push(Happened::new(Severity::Info, "cluster", "rebuild ended", text));
        }
        for (name, entry) in &state.filesystems {
            let is_new = !self.filesystems.contains_key(name);
            if is_new && self.looked {
                let text = format!("profile {}", entry.record.profile);
                happened.push(Happened::new(Severity::Info, subject(name), "created", text));
            }
            self.filesystems.entry(name.clone()).or_default().look(name, entry, is_new, &mut happened);
        }
        self.looked = true;
        happened
    }
}

fn subject(filesystem: &str) -> String {
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
    let path = &entry.record.path;
    let problem = entry.problem.as_deref().map(|problem| format!(": {problem}")).unwrap_or_default();
    let text = match before {
        Some(before) if before == now => return None,
        Some(before) => format!("{path} was {before}{problem}"),
        None => format!("{path} was added"),
    };
    Some(Happened::new(severity, drive(entry.record.id), now, text))
}

impl SeenFilesystem {
    fn look(&mut self, name: &str, entry: &FilesystemEntry, is_new: bool, happened: &mut Vec<Happened>) {
        let profile = entry.record.profile.to_string();
        let before = std::mem::replace(&mut self.profile, profile.clone());
        if !is_new && before != profile {
            let text = format!("{profile}, {before} before; what is there already is converted");
            happened.push(Happened::new(Severity::Info, subject(name), "profile", text));
        }
        let store = entry.record.tier.map(|_| entry.tier.store.clone());
        let before = std::mem::replace(&mut self.store, store.clone());
        if !is_new && before != store {
            let (kind, text) = match (&store, &before) {
                (Some(store), _) => ("attached", format!("to store {store}")),
                (None, before) => {
                    ("detached", format!("from store {}", before.as_deref().unwrap_or_default()))
                }
            };
            happened.push(Happened::new(Severity::Info, subject(name), kind, text));
        }
        if let Some(store) = store {
            self.look_at_tier(name, &store, &entry.tier.signs(), happened);
        }
    }

    fn look_at_tier(&mut self, name: &str, store: &str, signs: &TierSigns, happened: &mut Vec<Happened>) {
        let problem = signs.problem.clone().unwrap_or_default();
        let of_store = || format!("store {store}");
        match self.is_down.look(signs.is_down) {
            Some(true) => happened.push(Happened::new(Severity::Error, of_store(), "down", problem.clone())),
            Some(false) => happened.push(Happened::new(Severity::Info, of_store(), "up", "it answers again")),
            None => {}
        }
        match self.problem.look(signs.problem.is_some() && !signs.is_down) {
            Some(true) => {
                happened.push(Happened::new(Severity::Warning, subject(name), "tiering pauses", problem))
            }
            Some(false) if !signs.is_down => {
                let text = "nothing is in the way any more";
                happened.push(Happened::new(Severity::Info, subject(name), "tiering goes on", text));
            }
            _ => {}
        }
        match self.early.look(signs.released_early_bytes) {
            Some(EarlyIs::Begun) => {
                let text = "drives are filling up: what the store has leaves them before its retention is over; \
                            reads of it get slower, nothing is lost";
                happened.push(Happened::new(Severity::Warning, subject(name), "break-in", text));
            }
            Some(EarlyIs::Over(bytes)) => {
                let text = format!("{} left the drives early", base::units::format_size(bytes));
                happened.push(Happened::new(Severity::Info, subject(name), "break-in ended", text));
            }
            None => {}
        }
    }
}

/// Something that is so or not, and counts once it has stayed.
#[derive(Debug, Default)]
struct Level {
    told: bool,
    looks: u32,
}

impl Level {
    /// What it has become, if that has stayed for long enough.
    fn look(&mut self, now: bool) -> Option<bool> {
        self.looks = if now == self.told { 0 } else { self.looks + 1 };
        if self.looks < STAYS {
            return None;
        }
        (self.told, self.looks) = (now, 0);
        Some(now)
    }
}

/// Content that leaves early.
#[derive(Debug, Default)]
struct Early {
    bytes: Option<u64>,
    /// How much had left before it began, and looks since the last that left.
    since: Option<(u64, u32)>,
}

#[derive(Debug, PartialEq, Eq)]
enum EarlyIs {
    Begun,
    Over(u64),
}

impl Early {
    fn look(&mut self, bytes: u64) -> Option<EarlyIs> {
        // The counter begins anew with every process, and with other limits.
        let before = self.bytes.replace(bytes).unwrap_or(bytes).min(bytes);
        match (&mut self.since, bytes > before) {
            (None, true) => {
                self.since = Some((before, 0));
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

    #[test]
    fn a_start_does_not_tell_again_what_was_told_of_drives() {
        let event = |id, subject: &str, kind: &str| {
            let (subject, kind, text) = (subject.to_owned(), kind.to_owned(), String::new());
            Event { id, time_s: 0, severity: Severity::Info, subject, kind, text }
        };
        let told =
            [event(1, "drive 1", "failed"), event(2, "drive 1", "up"), event(3, "drive 12", "missing")];
        let mut watch = Watch::default();
        watch.recall([1, 2, 12].map(DriveId).into_iter(), &told);
        let known: Vec<&str> = watch.drives.values().map(String::as_str).collect();
        assert_eq!(known, ["up", "up", "missing"]);
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

    #[test]
    fn a_store_that_is_down_is_told_of_the_store_and_other_trouble_of_the_filesystem() {
        let mut seen = SeenFilesystem::default();
        let mut kinds = |is_down: bool, problem: Option<&str>| -> Vec<(String, &'static str)> {
            let problem = problem.map(str::to_owned);
            let signs = TierSigns { is_down, problem, released_early_bytes: 0 };
            let mut happened = Vec::new();
            (0..STAYS).for_each(|_| seen.look_at_tier("main", "cold", &signs, &mut happened));
            happened.into_iter().map(|happened| (happened.subject, happened.kind)).collect()
        };
        let one = |subject: &str, kind| vec![(subject.to_owned(), kind)];
        assert_eq!(kinds(true, Some("no answer")), one("store cold", "down"));
        assert_eq!(kinds(false, None), one("store cold", "up"));
        assert_eq!(kinds(false, Some("quota")), one("filesystem main", "tiering pauses"));
        assert_eq!(kinds(false, None), one("filesystem main", "tiering goes on"));
    }
}
