//! `tier`, `fs attach` and `fs detach`.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::time::Duration;

use admin::{
    AdminClient, AttachStore, FETCH_FILES_MAX, FetchFile, FetchFileInfo, FetchStep, ForecastInfo, TierFile,
    TierInfo, TierLocationInfo, TierOpsInfo,
};
use anyhow::{Result, bail};
use base::units::format_duration;
use comfy_table::Table;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use serde::Serialize;
use wire::store::{OpState, StoreHealth};

use super::args::{AttachArgs, TierCommand};
use super::ask;
use super::filesystems::Mounted;
use super::output::{Format, bytes, print, table};
use super::progress::Progress;
use super::tree::{Tree, TreeFile};
use crate::node::NodeDir;

/// Fetch steps under way: the next one begins before the last one ends.
const STEPS: usize = 2;
/// Number of files that may fail before the fetch stops.
const PROBLEMS_MAX: usize = 16;
const HOUR_S: u64 = 3600;
const DAY_S: u64 = 24 * HOUR_S;
const POLL: Duration = Duration::from_millis(300);

/// Whether to wait for the end of the operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    No,
    Yes,
}

impl From<bool> for Wait {
    fn from(wait: bool) -> Self {
        if wait { Wait::Yes } else { Wait::No }
    }
}

/// Result of fetching a file.
#[derive(Debug, Serialize)]
struct Fetched {
    path: String,
    fetched_bytes: u64,
    /// Why the rest of the file did not come.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
    /// The file was deleted during the fetch and was not named by the user, so this is no error.
    #[serde(skip)]
    is_gone: bool,
}

/// Result of releasing a file.
#[derive(Debug, Serialize)]
struct Released {
    path: String,
    released_bytes: u64,
    not_uploaded_bytes: u64,
}

pub(super) fn tier(command: TierCommand) -> Result<()> {
    match command {
        TierCommand::Status { dir, json } => {
            let tiers = ask(&dir, |client| async move { client.tiers().await })?;
            print(json.into(), &tiers, |tiers| match tiers.as_slice() {
                [] => "no filesystem has an object store (see `forebay fs attach`)".to_owned(),
                tiers => tiers.iter().map(details).collect::<Vec<_>>().join("\n"),
            })
        }
        TierCommand::Ops { dir, store, json } => {
            let mut ops = ask(&dir, |client| async move { client.tier_ops().await })?;
            ops.retain(|of| store.as_ref().is_none_or(|store| of.store == *store));
            print(json.into(), &ops, |ops| ops_table(ops).to_string())
        }
        TierCommand::Forecast { dir, retention, json } => {
            let found = ask(&dir, |client| async move { client.tier_forecast(retention).await })?;
            print(json.into(), &found, |found| forecast_text(found))
        }
        TierCommand::Location { paths, json } => location(&paths, json.into()),
        TierCommand::Fetch { paths, json } => fetch(&paths, json.into()),
        TierCommand::Release { paths, json } => release(&paths, json.into()),
    }
}

pub(super) fn attach(args: AttachArgs) -> Result<()> {
    let AttachArgs { dir, name, store, retention, tiering_cue, group_times, json } = args;
    let request = AttachStore { store, retention_s: retention, cue_s: tiering_cue, group_times };
    let (info, was_leaving) = ask(&dir, |client| async move {
        let was_leaving =
            client.tiers().await?.iter().any(|tier| tier.filesystem == name && is_leaving(tier));
        Ok((client.attach_store(&name, &request).await?, was_leaving))
    })?;
    print(json.into(), &info, |info| {
        let stays = if was_leaving {
            "the detach is cancelled, what came back stays on the drives until it is due; "
        } else {
            ""
        };
        format!(
            "{stays}filesystem {} moves data to store {}: copied after {}, from the drives after {}{}",
            info.filesystem,
            info.store,
            format_duration(info.cue_s),
            format_duration(info.retention_s),
            as_group_says(info)
        )
    })
}

pub(super) fn detach(dir: &Path, name: &str, wait: Wait, format: Format) -> Result<()> {
    let mut info = ask(dir, |client| async move { client.detach_store(name).await })?;
    if wait == Wait::Yes {
        info = wait_for_detach(dir, info)?;
    }
    print(format, &info, |info| match info.state.as_str() {
        "detached" => format!("filesystem {} has left store {}", info.filesystem, info.store),
        _ => format!(
            "everything comes back from store {} to filesystem {}: {} to go (see `forebay tier status {}`)",
            info.store,
            info.filesystem,
            bytes(info.away_bytes),
            dir.display()
        ),
    })
}

/// Shows progress until the store is empty.
fn wait_for_detach(dir: &Path, mut info: TierInfo) -> Result<TierInfo> {
    let (mut progress, mut told) = (Progress::new(), None);
    let mut most = info.away_bytes;
    loop {
        most = most.max(info.away_bytes);
        progress.show_bytes(&format!("from store {}", info.store), info.away_bytes, most);
        if info.problem != told {
            info.problem.iter().for_each(|problem| progress.say(&format!("it does not go on: {problem}")));
            told = info.problem.clone();
        }
        std::thread::park_timeout(POLL);
        let tiers = ask(dir, |client| async move { client.tiers().await })?;
        match tiers.into_iter().find(|tier| tier.filesystem == info.filesystem) {
            Some(tier) if is_leaving(&tier) => info = tier,
            Some(tier) => bail!("filesystem {} was attached to store {} again", tier.filesystem, tier.store),
            None => {
                let state = "detached".to_owned();
                return Ok(TierInfo { state, problem: None, away_extents: 0, away_bytes: 0, ..info });
            }
        }
    }
}

fn is_leaving(tier: &TierInfo) -> bool {
    tier.state == "detaching"
}

fn forecast_text(all: &[ForecastInfo]) -> String {
    let mut table = table(&[
        "FILESYSTEM",
        "STORE",
        "RETENTION",
        "ON DRIVES",
        "WITH REDUNDANCY",
        "IN STORE",
        "PER DAY",
        "BLOBS PER DAY",
        "FETCHED PER DAY",
    ]);
    for one in all {
        let present = if one.is_present { " (now)" } else { "" };
        // Fetches of one minute allow no estimate for a day.
        let fetched = match one.fetched_s {
            seconds if seconds >= HOUR_S => bytes(one.fetched_bytes / seconds.max(1) * DAY_S),
            _ => "-".to_owned(),
        };
        let reckoned = if one.forecast.known_s < one.retention_s { "~" } else { "" };
        table.add_row([
            one.filesystem.clone(),
            one.store.clone(),
            format!("{}{present}", format_duration(one.retention_s)),
            format!("{reckoned}{}", bytes(one.forecast.drive_bytes)),
            format!("{reckoned}{}", bytes(one.forecast.drive_raw_bytes)),
            bytes(one.forecast.store_bytes),
            bytes(one.forecast.written_bytes_per_day),
            one.forecast.puts_per_day.to_string(),
            fetched,
        ]);
    }
    let known = all.iter().filter(|one| one.forecast.known_s < one.retention_s);
    let known = known.map(|one| {
        format!(
            "\n~ content of {} is known for {} only: the rest is reckoned from the rate of writing",
            one.filesystem,
            format_duration(one.forecast.known_s)
        )
    });
    format!("{table}{}", known.collect::<String>())
}

fn ops_table(all: &[TierOpsInfo]) -> Table {
    let mut table = table(&["STORE", "FILESYSTEMS", "VERB", "OBJECT", "BYTES", "BEGAN", "TOOK", "STATE"]);
    for of in all {
        for op in &of.ops {
            let state = match op.state {
                OpState::Waiting => "waiting".to_owned(),
                OpState::Running if op.attempts > 1 => format!("attempt {}", op.attempts),
                OpState::Running => "running".to_owned(),
                OpState::Done => "done".to_owned(),
                OpState::Failed => op.problem.clone().unwrap_or_else(|| "given up".to_owned()),
            };
            table.add_row([
                of.store.clone(),
                of.filesystems.join(", "),
                op.verb.clone(),
                op.key.clone(),
                bytes(op.bytes),
                s3::format_instant(op.began_s),
                format!("{}.{:03} s", op.took_ms / 1000, op.took_ms % 1000),
                state,
            ]);
        }
    }
    table
}

fn locate(mounted: &Mounted) -> Result<TierLocationInfo> {
    let (name, inside) = (mounted.filesystem.as_str(), mounted.inside.as_str());
    ask(&mounted.dir, |client| async move { client.tier_location(name, inside).await })
}

fn location(paths: &[PathBuf], format: Format) -> Result<()> {
    let tree = Tree::of(paths)?;
    let files = tree.each(|file| Ok(TierLocationInfo { path: file.shown(), ..locate(&file.mounted)? }))?;
    print(format, &files, |files| {
        let mut table = table(&["FILE", "SIZE", "SSD WRITE CACHE", "SSD READ CACHE", "OBJECT STORE"]);
        for file in files {
            table.add_row([
                file.path.clone(),
                exact(file.size),
                exact(file.ssd_write_cache_bytes),
                exact(file.ssd_read_cache_bytes),
                exact(file.object_store_bytes),
            ]);
        }
        table.to_string()
    })?;
    tree.end()
}

/// Bytes, exact and in a readable unit.
fn exact(count: u64) -> String {
    if count < 1024 { bytes(count) } else { format!("{count} ({})", bytes(count)) }
}

/// A file to fetch: its index, and its next step.
type Pending = (usize, FetchFile);

/// Fetches files, many in one step: content in the same blob comes at once. A file that fails does not delay the
/// others.
fn fetch(paths: &[PathBuf], format: Format) -> Result<()> {
    let tree = Tree::of(paths)?;
    let mut fetched: Vec<Fetched> = tree
        .files
        .iter()
        .map(|file| Fetched { path: file.shown(), fetched_bytes: 0, problem: None, is_gone: false })
        .collect();
    // Neighbours in the list are mostly in one filesystem.
    let mut pending: BTreeMap<(PathBuf, String), VecDeque<Pending>> = BTreeMap::new();
    for (number, TreeFile { mounted, .. }) in tree.files.iter().enumerate() {
        let file = FetchFile { path: mounted.inside.clone(), offset: 0 };
        let filesystem = (mounted.dir.clone(), mounted.filesystem.clone());
        pending.entry(filesystem).or_default().push_back((number, file));
    }
    let mut progress = FetchProgress::new(fetched.len());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (mut problems, mut left) = (Vec::new(), 0);
    for ((dir, filesystem), files) in pending {
        let client = AdminClient::new(NodeDir::new(&dir).socket().as_path());
        let has_enough = problems.len() >= PROBLEMS_MAX;
        let came = |number: usize, info: &FetchFileInfo| {
            let file: &mut Fetched = &mut fetched[number];
            file.fetched_bytes += info.bytes;
            file.is_gone = info.problem.is_some() && tree.files[number].is_gone();
            if !file.is_gone {
                file.problem.clone_from(&info.problem);
                problems.extend(info.problem.iter().map(|problem| format!("{}: {problem}", file.path)));
            }
            progress.fetched(info);
            problems.len() < PROBLEMS_MAX
        };
        let rest = match has_enough {
            true => files,
            false => runtime.block_on(fetch_all(&client, &filesystem, files, came))?,
        };
        for (number, _) in rest {
            fetched[number].problem = Some("given up, as too many others did not come back".to_owned());
            left += 1;
        }
    }
    drop(progress);
    fetched.retain(|file| !file.is_gone);
    problems.extend(tree.problems);
    fetch_end(&fetched, &problems, left, format)
}

/// Prints the result. Fails if a file did not come back.
fn fetch_end(fetched: &[Fetched], problems: &[String], left: usize, format: Format) -> Result<()> {
    print(format, &fetched, |files| {
        let came = files.iter().filter(|file| file.problem.is_none());
        came.map(|file| format!("{}: {} came back\n", file.path, bytes(file.fetched_bytes))).collect()
    })?;
    problems.iter().for_each(|problem| eprintln!("{problem}"));
    let came = fetched.iter().filter(|file| file.problem.is_none()).count();
    let all = came + problems.len() + left;
    match (problems.len(), left) {
        (0, _) => Ok(()),
        (count, 0) => bail!("files that did not come back: {count} of {all}"),
        (count, left) => bail!(
            "files that did not come back: {count} of {all}; given up, with {left} others still to come"
        ),
    }
}

/// Fetches files of one filesystem, step by step, while `came` returns true. Returns the files that are left.
async fn fetch_all(
    client: &AdminClient,
    filesystem: &str,
    mut pending: VecDeque<Pending>,
    mut came: impl FnMut(usize, &FetchFileInfo) -> bool,
) -> Result<VecDeque<Pending>> {
    let (mut steps, mut goes_on) = (FuturesUnordered::new(), true);
    loop {
        while goes_on && steps.len() < STEPS && !pending.is_empty() {
            let share = pending.len().div_ceil(STEPS - steps.len()).min(FETCH_FILES_MAX);
            let some: Vec<Pending> = pending.drain(..share).collect();
            let step = FetchStep { files: some.iter().map(|(_, file)| file.clone()).collect() };
            steps.push(async move { (some, client.tier_fetch(filesystem, &step).await) });
        }
        let Some((some, infos)) = steps.next().await else { return Ok(pending) };
        for ((number, file), info) in some.into_iter().zip(infos?).rev() {
            goes_on &= came(number, &info);
            if let Some(offset) = info.next_offset {
                pending.push_front((number, FetchFile { offset, ..file }));
            }
        }
    }
}

/// Progress of a fetch in which only begun files have a known size.
struct FetchProgress {
    line: Progress,
    files: usize,
    begun: usize,
    ended: usize,
    known_bytes: u64,
    fetched_bytes: u64,
}

impl FetchProgress {
    fn new(files: usize) -> Self {
        let line = Progress::new();
        Self { line, files, begun: 0, ended: 0, known_bytes: 0, fetched_bytes: 0 }
    }

    fn fetched(&mut self, file: &FetchFileInfo) {
        self.fetched_bytes += file.bytes;
        self.begun += usize::from(file.away_bytes.is_some());
        self.known_bytes += file.away_bytes.unwrap_or_default();
        self.ended += usize::from(file.next_offset.is_none());
        let Self { line, files, begun, ended, known_bytes, fetched_bytes } = self;
        // Estimate: files that are not begun have the average size of the others.
        let all_bytes = *known_bytes / (*begun).max(1) as u64 * *files as u64;
        line.show_bytes(
            &format!("file {ended} of {files}"),
            all_bytes.saturating_sub(*fetched_bytes),
            all_bytes,
        );
    }
}

fn release(paths: &[PathBuf], format: Format) -> Result<()> {
    let tree = Tree::of(paths)?;
    let files = tree.each(|file| {
        let mounted = &file.mounted;
        let (name, inside) = (mounted.filesystem.as_str(), TierFile { path: mounted.inside.clone() });
        let done = ask(&mounted.dir, |client| async move { client.tier_release(name, &inside).await })?;
        Ok(Released {
            path: file.shown(),
            released_bytes: done.released_bytes,
            not_uploaded_bytes: done.not_uploaded_bytes,
        })
    })?;
    print(format, &files, |files| files.iter().map(released_text).collect())?;
    tree.end()
}

fn released_text(file: &Released) -> String {
    let stays = match file.not_uploaded_bytes {
        0 => String::new(),
        stays => format!(", {} stay until they are uploaded", bytes(stays)),
    };
    format!("{}: {} left the drives{stays}\n", file.path, bytes(file.released_bytes))
}

/// Marks the times that come from the filesystem group.
fn as_group_says(tier: &TierInfo) -> String {
    let which = match (tier.has_own_cue, tier.has_own_retention) {
        (false, false) => "both",
        (false, true) => "the first",
        (true, false) => "the second",
        (true, true) => return String::new(),
    };
    format!(", {which} as filesystem group {} says", tier.group)
}

/// Retention and cue, with their origin.
fn times(tier: &TierInfo) -> String {
    let whose = |is_own: bool| if is_own { "its own" } else { "the group's" };
    format!(
        "cue {} ({}), retention {} ({})",
        format_duration(tier.cue_s),
        whose(tier.has_own_cue),
        format_duration(tier.retention_s),
        whose(tier.has_own_retention)
    )
}

/// One line for `status`.
pub(super) fn line(tier: &TierInfo) -> String {
    let leaving = if is_leaving(tier) { ", everything comes back" } else { "" };
    format!(
        "tier    {}: store {}, {}, {} not uploaded, {} in both places, {} in the store only{leaving}\n",
        tier.filesystem,
        tier.store,
        times(tier),
        bytes(tier.queued_bytes),
        bytes(tier.both_bytes),
        bytes(tier.away_bytes),
    )
}

fn answers(up: Option<bool>, since_s: i64) -> String {
    match up {
        // It never did.
        Some(false) if since_s == 0 => "DOWN".to_owned(),
        Some(true) => format!("UP since {}", s3::format_instant(since_s)),
        Some(false) => format!("DOWN since {}", s3::format_instant(since_s)),
        None => "not asked yet".to_owned(),
    }
}

/// Health of the store; with each node's view, if there are several.
fn health(health: &StoreHealth) -> String {
    let mut text = answers(health.up, health.since_s);
    if health.nodes.len() > 1 {
        for seen in &health.nodes {
            text += &format!("; node {} {}", seen.node, answers(seen.up, seen.since_s));
        }
    }
    text
}

fn details(tier: &TierInfo) -> String {
    let extents = |count: u64, size: u64| format!("{} in {count} extents", bytes(size));
    let queueing = if tier.queueing { ", older content is still being counted" } else { "" };
    let overhead = match tier.overhead_percent {
        Some(percent) => format!("{percent} % more than files have of them"),
        None => "files have nothing of them any more".to_owned(),
    };
    let mut lines = vec![
        ("filesystem", tier.filesystem.clone()),
        ("store", format!("{} ({})", tier.store, health(&tier.store_health))),
        ("state", tier.state.clone()),
        ("group", tier.group.clone()),
        ("times", times(tier)),
        ("not uploaded", format!("{}{queueing}", extents(tier.queued_extents, tier.queued_bytes))),
        ("in both", extents(tier.both_extents, tier.both_bytes)),
        ("store only", extents(tier.away_extents, tier.away_bytes)),
        ("blobs", format!("{}, {}: {overhead}", tier.blobs, bytes(tier.stored_bytes))),
        ("drives", format!("{} % full", tier.fill_percent)),
        (
            "since start",
            format!(
                "{} uploaded, {} released ({} early), {} fetched, {} rewritten, {} returned, {} blobs deleted",
                bytes(tier.uploaded_bytes),
                bytes(tier.released_bytes),
                bytes(tier.released_early_bytes),
                bytes(tier.fetched_bytes),
                bytes(tier.rewritten_bytes),
                bytes(tier.returned_bytes),
                tier.deleted_blobs,
            ),
        ),
    ];
    if tier.uploaded_by.len() > 1 {
        let nodes = tier.uploaded_by.iter().map(|(node, some)| format!("node {node} {}", bytes(*some)));
        lines.push(("uploaded by", nodes.collect::<Vec<_>>().join(", ")));
    }
    lines.extend(tier.problem.clone().map(|problem| ("problem", problem)));
    lines.iter().map(|(name, value)| format!("{name:<13} {value}\n")).collect()
}
