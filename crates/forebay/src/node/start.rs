//! Starting a node: creates a cluster in an empty directory, or opens the existing one.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base::env::{Caching, Env, File, OpenMode};
use base::{ClusterId, DriveId, DriveUuid, Seq};
use control::{
    CONTROL_LEDGER, Cluster, ClusterRecord, Control, ControlError, DriveRecord, FilesystemRecord, NodeRecord,
    Plan, UpkeepRecord,
};
use layout::{DriveState, FailureDomain, Profile};
use meta::history::Evidence;
use meta::log::StaleCopies;
use posix::fuse::UnmountMode;
use s3::AuditLog;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::watch;
use upkeep::Pace;

use super::drives::{DriveEntry, DriveSettings, format_drives, plan_drives, uuid_at};
use super::events::Watch;
use super::filesystems::{FilesystemEntry, FilesystemParts, OwnerPlace};
use super::history::{Knowledge, note_drives, services};
use super::ledgers::{LedgerFiles, MetaDirs};
use super::local_drives::LocalDrives;
use super::local_mounts::{LocalMounts, MountPlace};
use super::management::{apply_upkeep, no_filesystem};
use super::memory::{self, MemoryPlan};
use super::others::{ForOthers, Others};
use super::plans::seen;
use super::seat::{bereft, note_recovered};
use super::settings::{MetricsChoice, Settings, TrimChoice};
use super::users::open_accounts;
use super::{CLIENTS_SOCKET, Mounts, Node, NodeDir, NodeParts, S3Options, State};
use crate::engine::EngineAddress;
use crate::identity::{OWNER, hostname};
use crate::mount::MountProcess;

/// How long a start waits for a killed process to end, and for one that only looks whether a node runs.
const DYING_MAX: Duration = Duration::from_secs(20);
const PASSING_MAX: Duration = Duration::from_millis(500);
/// Default time that a drive may be away before other drives take over its positions.
pub(super) const OUT_AFTER: Duration = Duration::from_secs(600);
const DYING_POLL: Duration = Duration::from_millis(20);
pub(crate) const CONTROL_CACHE_BYTES: usize = 16 << 20;
/// The filesystem that every cluster begins with. Its top-level directories are the buckets of S3.
pub(crate) const FIRST_FILESYSTEM: &str = "main";

/// How drives do I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(crate) enum IoChoice {
    /// io_uring, or threads where it is forbidden.
    #[default]
    Auto,
    /// Threads.
    Threads,
}

/// Options of `start`. Drives, size and profile apply to a new cluster only.
#[derive(Debug, Clone, Default)]
pub(crate) struct StartOptions {
    pub(crate) drives: Option<u32>,
    pub(crate) drive_paths: Vec<PathBuf>,
    pub(crate) drive_bytes: Option<u64>,
    pub(crate) profile: Option<Profile>,
    pub(crate) mount: Option<PathBuf>,
    pub(crate) mount_options: Option<String>,
    pub(crate) no_mount: bool,
    pub(crate) io: IoChoice,
    pub(crate) degraded: bool,
    /// How long a drive may be away before others take over its positions; `None` is the default.
    pub(crate) out_after: Option<Duration>,
    pub(crate) meta_dirs: Vec<PathBuf>,
    pub(crate) force_stale_metadata: bool,
    /// Go on with metadata that is older than what drives have seen.
    pub(crate) accept_older_metadata: bool,
    pub(crate) s3: S3Options,
    /// Memory that the node may use; `None` keeps the last value.
    pub(crate) memory_bytes: Option<u64>,
    /// Whether drives give space back; `None` keeps the last value.
    pub(crate) trim: Option<TrimChoice>,
    /// Where metrics are told; `None` keeps the last value.
    pub(crate) metrics: Option<MetricsChoice>,
    /// The engine that has the logs of the ledgers.
    pub(crate) log: Option<EngineAddress>,
    /// Where other machines reach the node; `None` keeps the last value.
    pub(crate) listen: Option<SocketAddr>,
    /// What others are told instead.
    pub(crate) advertise: Vec<String>,
}

impl StartOptions {
    /// Without those that were for the node as it was: it has changed since.
    pub(crate) fn of_known_node(self) -> Self {
        Self {
            drives: None,
            drive_bytes: None,
            profile: None,
            mount: None,
            mount_options: None,
            force_stale_metadata: false,
            accept_older_metadata: false,
            // The logs may have moved.
            log: None,
            ..self
        }
    }
}

/// Checks that the directory exists, is writable, and belongs to no other node, and that its metadata is not half of an import.
pub(crate) fn prepare_dir(env: &Env, dir: &NodeDir) -> Result<Arc<dyn File>> {
    let lock = hold_dir(env, dir)?;
    refuse_half_import(env, dir)?;
    Ok(lock)
}

/// As [`prepare_dir`], for an import.
pub(crate) fn hold_dir(env: &Env, dir: &NodeDir) -> Result<Arc<dyn File>> {
    let root = dir.root().display();
    env.files.create_dir_all(dir.root()).with_context(|| format!("cannot create directory {root}"))?;
    let lock = env.files.open(&dir.lock(), OpenMode::Create, Caching::Buffered);
    let lock = lock.with_context(|| format!("cannot write to directory {root}"))?;
    take_lock(env, dir, &*lock)?;
    // For people and `stop`, also while the node starts. A full disk is no reason not to start.
    let _ = lock.set_len(0).and_then(|()| lock.write_at(std::process::id().to_string().as_bytes(), 0));
    let private = rustix::fs::Mode::RWXU;
    for path in [dir.run(), dir.drives(), dir.audit()] {
        env.files.create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        rustix::fs::chmod(&path, private).with_context(|| format!("cannot protect {}", path.display()))?;
    }
    Ok(lock)
}

/// Fails while the metadata may be partly that of a backup.
pub(super) fn refuse_half_import(env: &Env, dir: &NodeDir) -> Result<()> {
    if env.files.exists(&dir.meta_import()) {
        let shown = dir.root().display();
        bail!("an import of metadata into {shown} has not ended: run `forebay meta import` again");
    }
    Ok(())
}

/// The process that took the directory last.
pub(crate) fn last_pid(env: &Env, dir: &NodeDir) -> Option<u32> {
    String::from_utf8(env.files.read(&dir.lock()).ok()?).ok()?.parse().ok()
}

/// Whether a process serves this directory: such a process holds the lock until it ends.
pub(crate) fn is_locked(env: &Env, dir: &NodeDir) -> bool {
    let lock = env.files.open(&dir.lock(), OpenMode::Existing, Caching::Buffered);
    lock.is_ok_and(|lock| lock.try_lock().is_err())
}

/// Removes files that a killed process left. Called only after the control ledger was opened: a node that still runs,
/// although its lock file was deleted, keeps them.
pub(crate) fn remove_leftovers(env: &Env, dir: &NodeDir) -> Result<()> {
    for path in
        [dir.node_json(), dir.run().join("admin.sock"), dir.run().join(CLIENTS_SOCKET), dir.stop_error()]
    {
        if env.files.exists(&path) {
            env.files.remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}

/// Takes the node's lock. Waits for a killed process to end.
fn take_lock(env: &Env, dir: &NodeDir, lock: &dyn File) -> Result<()> {
    let begun = env.clock.boot_ns();
    while lock.try_lock().is_err() {
        let pid = last_pid(env, dir);
        // This process may have begun anew while one that it was starting still had its files.
        let is_ending = pid.is_some_and(|pid| pid == std::process::id() || is_dying(pid));
        let patience = if is_ending { DYING_MAX } else { PASSING_MAX };
        if Duration::from_nanos(env.clock.boot_ns() - begun) >= patience {
            let pid = pid.map(|pid| format!(": pid={pid}")).unwrap_or_default();
            bail!("node is running already: dir={}{pid}", dir.root().display());
        }
        std::thread::park_timeout(DYING_POLL);
    }
    Ok(())
}

/// Whether the process was killed: it is a zombie, gone, or has SIGKILL pending.
fn is_dying(pid: u32) -> bool {
    const KILLED: u64 = 1 << 8;
    let path = PathBuf::from(format!("/proc/{pid}/status"));
    let Ok(status) = read_proc(&path) else { return true };
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let pending = |name| field(name).and_then(|mask| u64::from_str_radix(mask, 16).ok()).unwrap_or(0);
    let ending = field("State:").is_some_and(|state| state.starts_with(['Z', 'X']));
    ending || (pending("SigPnd:") | pending("ShdPnd:")) & KILLED != 0
}

/// Reads a file of /proc; these have no size that tells how much to read.
pub(crate) fn read_proc(path: &Path) -> Result<String> {
    let file = rustix::fs::open(path, rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty())?;
    let mut text = String::new();
    std::fs::File::from(file).read_to_string(&mut text)?;
    Ok(text)
}

/// Drives and profile of a new cluster, checked against each other before the first write.
fn choose(options: &StartOptions) -> Result<(u32, Profile)> {
    if options.drives.is_some() && !options.drive_paths.is_empty() {
        bail!(
            "--drives and --drive exclude each other: the first makes files, the second names devices or files"
        );
    }
    let named = (!options.drive_paths.is_empty()).then_some(options.drive_paths.len() as u32);
    let count =
        named.or(options.drives).or(options.profile.map(|profile| u32::from(profile.n()))).unwrap_or(1);
    if count == 0 || count > 1024 {
        bail!("number of drives is out of range: drives={count} allowed=1..=1024");
    }
    let default = if count >= 2 { Profile::from_copies(2)? } else { Profile::SINGLE };
    let profile = options.profile.unwrap_or(default);
    if u32::from(profile.n()) > count {
        bail!(
            "profile {profile} needs {} failure domains, and there are {count} drives: give more drives or a narrower \
             profile (see `forebay profile explain {profile} --domains {count}`)",
            profile.n()
        );
    }
    Ok((count, profile))
}

/// Makes the drives of a new cluster, and plans its records. Also returns what to tell about the drives.
pub(super) fn plan_cluster(
    env: &Env,
    dir: &NodeDir,
    record: ClusterRecord,
    (paths, mounts): (&LocalDrives, &LocalMounts),
    options: &StartOptions,
) -> Result<(Plan, Option<String>)> {
    let (count, profile) = choose(options)?;
    let trim = options.trim.unwrap_or_default();
    let counts = (count, u32::from(profile.n()));
    let planned = plan_drives(env, dir, &options.drive_paths, counts, options.drive_bytes, trim)?;
    let drives = format_drives(env, (record.id, OWNER), record.next_drive, &planned.drives)?;
    paths.set(drives.iter().map(|(drive, path)| (drive.uuid, path.clone())))?;
    let mut plan = Plan::new(Cluster::new(record));
    plan.set_cluster(|cluster| cluster.next_drive += drives.len() as u32);
    let id = plan.next_node();
    plan.set_node(NodeRecord::new(id, hostname()));
    let up = drives.iter().map(|(drive, _)| drive.id).collect();
    drives.into_iter().for_each(|(drive, _)| plan.set_drive(drive));
    let filesystem = FilesystemRecord {
        name: FIRST_FILESYSTEM.to_owned(),
        ..FilesystemRecord::new(plan.next_filesystem(), profile)
    };
    let options = options.mount_options.clone().unwrap_or_default();
    mounts.set(filesystem.id, MountPlace { path: None, options })?;
    plan.add_filesystem(filesystem, &up, env.random.next_u64())?;
    Ok((plan, planned.note))
}

/// Refuses another number of drives or another profile for an existing cluster.
fn check_unchanged(cluster: &Cluster, options: &StartOptions) -> Result<()> {
    let drives = cluster.drives.values().filter(|drive| drive.state != DriveState::Out).count() as u32;
    if let Some(wanted) = options.drives.filter(|wanted| *wanted != drives) {
        bail!("this cluster has {drives} drives, not {wanted}: add drives with `forebay drive add`");
    }
    if let (Some(wanted), Some(first)) = (options.profile, cluster.filesystems.values().next())
        && first.profile != wanted
    {
        bail!("filesystem {} has profile {}, not {wanted}: leave out --profile", first.name, first.profile);
    }
    Ok(())
}

/// Notes where the named drives of an existing cluster are: a device may have another name than before. Refuses what is no drive
/// of the cluster.
pub(crate) fn note_named(
    env: &Env,
    cluster: ClusterId,
    is_known: impl Fn(DriveUuid) -> bool + Copy,
    paths: &LocalDrives,
    named: &[PathBuf],
) -> Result<()> {
    let mut found: BTreeMap<DriveUuid, PathBuf> = BTreeMap::new();
    for path in named {
        let path = std::path::absolute(path)?;
        match uuid_at(env, cluster, &path).filter(|uuid| is_known(*uuid)) {
            Some(uuid) => {
                let other = found.insert(uuid, path.clone()).filter(|other| *other != path);
                if let Some(other) = other {
                    let (one, two) = (other.display(), path.display());
                    bail!("{one} and {two} are the same drive of this cluster: name one of them");
                }
            }
            // A drive that is away now, or damaged, stays where it was.
            None if paths.drive_at(&path).is_some_and(is_known) => {}
            None => {
                let path = path.display();
                bail!("{path} is not a drive of this cluster: add it with `forebay drive add`");
            }
        }
    }
    paths.set(found)
}

/// Opens the drives. Those that cannot be opened are in the list with the reason.
fn open_drives(
    env: &Env,
    before: Cluster,
    paths: &LocalDrives,
    settings: DriveSettings,
) -> BTreeMap<DriveId, DriveEntry> {
    let cluster = before.record.id;
    let open = |record: DriveRecord| {
        let path = paths.path_of(record.uuid);
        (record.id, DriveEntry::open(env, cluster, record, path, settings))
    };
    before.drives.into_values().map(open).collect()
}

/// Refuses to serve a filesystem whose data cannot be read.
fn check_enough(
    cluster: &Cluster,
    drives: &BTreeMap<DriveId, DriveEntry>,
    options: &StartOptions,
) -> Result<()> {
    let (mut seen, behind) = (seen(drives), cluster.behind());
    // Those at other nodes may come later.
    let elsewhere = drives.iter().filter(|(_, entry)| entry.record.node != OWNER).map(|(id, _)| *id);
    seen.readable.extend(elsewhere);
    for filesystem in cluster.filesystems.values() {
        let reads = cluster.reads_survive(filesystem, &seen, &BTreeSet::new(), FailureDomain::Drive);
        if reads >= 0 || options.degraded {
            continue;
        }
        let groups = filesystem.all_sets().flat_map(|(_, groups)| groups);
        let groups = groups.filter_map(|pg| cluster.groups.get(pg));
        let needed: BTreeSet<DriveId> = groups.flat_map(|group| group.members.iter().copied()).collect();
        let lost = drives
            .iter()
            .filter(|(id, entry)| needed.contains(id) && (!entry.is_readable() || behind.contains(id)));
        let lost: Vec<&DriveEntry> = lost.map(|(_, entry)| entry).collect();
        let survives = usize::from(filesystem.profile.m());
        let reasons = lost.iter().map(|entry| {
            let why =
                if behind.contains(&entry.record.id) { "an older copy of it" } else { "marked as failed" };
            let state = entry.problem.clone().unwrap_or_else(|| why.to_owned());
            format!("\n  drive {}: {state}", entry.record.id)
        });
        let what = if lost.iter().any(|entry| behind.contains(&entry.record.id)) {
            "do not answer or are older copies"
        } else {
            "do not answer"
        };
        bail!(
            "filesystem {} ({}) survives {survives} lost drives, and {} {what}; start with --degraded to \
             read what is left{}",
            filesystem.name,
            filesystem.profile,
            lost.len(),
            reasons.collect::<String>()
        );
    }
    Ok(())
}

/// Tells metrics at an address until the node stops.
pub(crate) async fn tell_metrics(
    address: SocketAddr,
    answers: Arc<dyn admin::Answer>,
    stopped: watch::Receiver<bool>,
) -> Result<()> {
    let listener = TcpListener::bind(address).await;
    let listener = listener.with_context(|| {
        format!("metrics cannot be told at {address}: give another address with --metrics, or --metrics off")
    })?;
    tokio::spawn(admin::serve_metrics(answers, listener, stopped));
    Ok(())
}

/// The last settings, changed by the options. Invalid values change nothing.
pub(crate) fn kept_settings(env: &Env, dir: &NodeDir, options: &StartOptions) -> Result<Settings> {
    let known = Settings::load(env, dir)?;
    let mut settings = known.clone();
    settings.memory_bytes = options.memory_bytes.or(known.memory_bytes);
    settings.trim = options.trim.unwrap_or(known.trim);
    match options.metrics {
        Some(MetricsChoice::At(address)) => settings.metrics = Some(address),
        Some(MetricsChoice::Off) => settings.metrics = None,
        None => {}
    }
    settings.listen_at(options.listen, &options.advertise)?;
    memory::budget(env, settings.memory_bytes)?;
    if settings != known {
        settings.save(env, dir)?;
    }
    Ok(settings)
}

fn plan_memory(
    env: &Env,
    settings: &Settings,
    meta_dirs: &MetaDirs,
    (drives, filesystems): (usize, usize),
) -> Result<MemoryPlan> {
    let budget_bytes = memory::budget(env, settings.memory_bytes)?;
    let memory = MemoryPlan::new(budget_bytes, drives, filesystems, meta_dirs.stores());
    drive::keep_spare_buffers(memory.spare_bytes);
    Ok(memory)
}

/// Compares the positions in the cluster's metadata and on the drives with each other, before either is used. A new
/// cluster has nothing to compare.
async fn compare_histories(
    env: &Env,
    Opened { control, local_drives, created, .. }: &Opened,
    drives: &mut BTreeMap<DriveId, DriveEntry>,
    options: &StartOptions,
) -> Result<(Knowledge, Watch, Cluster)> {
    let bereft = bereft(&Cluster::of(&control.view()?)?);
    let knowledge = Knowledge::gather(drives, options.accept_older_metadata, bereft).await;
    if created.is_none() {
        control.begin(env, &knowledge.of(CONTROL_LEDGER)).await?;
    }
    let returned = note_drives(control, local_drives, &services(drives)).await?;
    let mut watch = Watch::default();
    watch.keep(env.clock.wall_ns() / 1_000_000_000, returned);
    let cluster = Cluster::of(&control.view()?)?;
    for (id, entry) in drives {
        entry.record.clone_from(cluster.drives.get(id).context("no drive was removed")?);
    }
    Ok((knowledge, watch, cluster))
}

fn load_meta_dirs(env: &Env, dir: &NodeDir, options: &StartOptions) -> Result<MetaDirs> {
    let stale = if options.force_stale_metadata { StaleCopies::Use } else { StaleCopies::Refuse };
    MetaDirs::load(env, dir, &options.meta_dirs, stale)
}

/// The pace of background work, with the limits that were set last.
pub(super) fn paced(env: &Env, upkeep: UpkeepRecord) -> Arc<Pace> {
    let pace = Arc::new(Pace::new(env.clone()));
    apply_upkeep(&pace, upkeep);
    pace
}

async fn open_filesystems(
    parts: &FilesystemParts<'_>,
    records: Vec<FilesystemRecord>,
) -> Result<BTreeMap<String, FilesystemEntry>> {
    let mut filesystems = BTreeMap::new();
    // Mounts that have outlived the node wait for their owners, and these only for so long for them.
    let (waiting, others): (Vec<_>, Vec<_>) =
        records.into_iter().partition(|record| MountProcess::find(parts.env, parts.dir, record.id).is_some());
    for record in others.into_iter().chain(waiting) {
        let name = record.name.clone();
        let entry = FilesystemEntry::open(parts, record, None).await;
        filesystems.insert(name.clone(), entry.with_context(|| format!("opening filesystem {name}"))?);
    }
    Ok(filesystems)
}

impl Node {
    /// Starts the node. After an error nothing runs and nothing is mounted.
    pub(crate) async fn start(env: Env, dir: NodeDir, options: StartOptions) -> Result<Arc<Self>> {
        let runtime = Handle::current();
        let (lock, settings) = (prepare_dir(&env, &dir)?, kept_settings(&env, &dir, &options)?);
        let mut meta_dirs = load_meta_dirs(&env, &dir, &options)?;
        let opened = open_control(&env, &dir, &mut meta_dirs, &options).await?;
        remove_leftovers(&env, &dir)?;
        let before = Cluster::of(&opened.control.view()?)?;
        let (cluster, counts) = (before.record.id, (before.drives.len(), before.filesystems.len()));
        let memory = plan_memory(&env, &settings, &meta_dirs, counts)?;
        let drive_settings = DriveSettings { io: options.io, trim: settings.trim, memory: memory.drive };
        let mut drives = open_drives(&env, before, &opened.local_drives, drive_settings);
        let (knowledge, watch, records) = compare_histories(&env, &opened, &mut drives, &options).await?;
        let (accounts, map) = (open_accounts(&env, &dir, &opened.control).await?, records.map());
        let others = Others::open(&env, &dir, &opened.control, &runtime, settings).await?;
        check_enough(&records, &drives, &options)?;
        let (pace, served) = (paced(&env, records.record.upkeep), records.filesystems.values().cloned());
        let parts = FilesystemParts {
            env: &env,
            dir: &dir,
            cluster,
            meta_dirs: &meta_dirs,
            runtime: &runtime,
            pace: &pace,
            map: &map,
            drives: &drives,
            knowledge: &knowledge,
            memory: &memory,
            nodes: records.nodes.len(),
            network: &others.network,
            place: OwnerPlace { here: OWNER, is_all: true },
        };
        let filesystems = open_filesystems(&parts, served.collect()).await?;
        let unsteady = BTreeSet::new();
        let state =
            State { drives, filesystems, cluster: records, taken: Seq(0), map, watch, meta_dirs, unsteady };
        let node = Self::assemble(NodeParts {
            audit: Arc::new(AuditLog::start(&env, &dir.audit())),
            env,
            dir,
            cluster,
            control: Arc::new(opened.control),
            control_files: opened.files,
            accounts,
            local_drives: opened.local_drives,
            others,
            seat: None,
            local_mounts: opened.local_mounts,
            drive_settings,
            memory,
            state,
            pace,
            accepts_older: options.accept_older_metadata,
            out_after: options.out_after,
            note: opened.created.and_then(|created| created.note),
            lock: Some(lock),
        })?;
        node.begin(&options).await.map(|()| node)
    }

    async fn begin(self: &Arc<Self>, options: &StartOptions) -> Result<()> {
        let begun = self.finish_start(options).await;
        if begun.is_err() {
            // Everything that was started is stopped again; the first error is the one to show.
            let _ = self.stop(Mounts::KeepEarlier).await;
        }
        begun
    }

    async fn finish_start(self: &Arc<Self>, options: &StartOptions) -> Result<()> {
        let bereft = bereft(&self.state.lock().await.cluster);
        if options.accept_older_metadata || !bereft.is_empty() {
            self.go_on_with_this_metadata().await;
        }
        note_recovered(&self.control, bereft).await?;
        self.forget_gone(&self.state.lock().await.cluster);
        self.start_tiers().await?;
        // A mount in another process may wait for its owner, and others here for the leases of that mount.
        self.clients.listen(&self.dir, &self.runtime)?;
        self.join_others().await?;
        self.recall_events().await?;
        if let Err(error) = self.choose_groups_at_start().await {
            tracing::warn!(error = %format!("{error:#}"), "no groups chosen at the start, the monitor tries again");
        }
        self.mount_at_start(options).await?;
        {
            let state = self.state.lock().await;
            self.recheck(&state, &state.cluster.behind());
        }
        let socket = self.dir.socket();
        self.start_scrub().await;
        self.start_monitor();
        self.start_s3(&options.s3).await?;
        let (runtime, stopped) = (self.runtime.clone(), self.stop_serving.subscribe());
        let serving = admin::serve(self.clone(), socket.as_path(), runtime, stopped)?;
        *self.serving.lock().expect("no holder of this lock panics") = Some(serving);
        if let Some(address) = self.others.settings.metrics {
            let api = Arc::new(admin::Api::new(self.clone(), self.runtime.clone()));
            tell_metrics(address, api, self.stop_serving.subscribe()).await?;
        }
        self.write_node_file().await
    }

    /// Serves what clients and other nodes ask for, and takes the drives of other nodes into use.
    async fn join_others(self: &Arc<Self>) -> Result<()> {
        self.take_over().await?;
        self.others.answer_with(ForOthers::new(self));
        self.publish(&mut *self.state.lock().await);
        self.others.listen(&self.runtime).await?;
        self.wait_for_nodes().await;
        self.follow_drives_elsewhere().await
    }

    /// Forgets what this machine knows of what the cluster has no more. An error can wait for the next start.
    fn forget_gone(&self, cluster: &Cluster) {
        let is_known = |uuid| cluster.drives.values().any(|drive| drive.uuid == uuid);
        let kept = self.local_drives.keep_only(is_known);
        let kept = kept.and(self.local_mounts.keep_only(|id| cluster.filesystems.contains_key(&id)));
        if let Err(error) = kept {
            tracing::warn!(error = %format!("{error:#}"), "what is gone stays in the lists of drives and mounts");
        }
    }

    async fn mount_at_start(&self, options: &StartOptions) -> Result<()> {
        let names: Vec<String> = self.state.lock().await.filesystems.keys().cloned().collect();
        for name in names {
            let mut state = self.state.lock().await;
            let Some(entry) = state.filesystems.get_mut(&name) else { continue };
            let first = name == FIRST_FILESYSTEM;
            let asked = options.mount.clone().filter(|_| first);
            let before = self.local_mounts.of(entry.record.id);
            let kept = before.path.map(PathBuf::from);
            let default = first.then(|| self.dir.default_mount());
            let path = asked.or(kept).or(default).filter(|_| !options.no_mount);
            let path = path.map(std::path::absolute).transpose()?;
            let flags = options.mount_options.clone().filter(|_| first);
            let stays = match &path {
                Some(path) => entry.keeps_mount(path, flags.as_deref(), &before.options).await,
                None => entry.unmount(UnmountMode::Detach).await.map(|()| false),
            };
            match stays {
                Ok(true) => continue,
                Ok(false) => {}
                Err(error) => {
                    // Its process holds what it could not write out. A later mount tries again.
                    tracing::error!(filesystem = name, "the earlier mount has not ended: {error:#}");
                    continue;
                }
            }
            drop(state);
            if let Some(path) = path {
                self.mount_and_remember(&name, path, flags).await?;
            }
        }
        Ok(())
    }

    /// Mounts the filesystem, and remembers the place so that the next start mounts it there too.
    pub(super) async fn mount_and_remember(
        &self,
        name: &str,
        path: PathBuf,
        mount_options: Option<String>,
    ) -> Result<()> {
        let mut state = self.state.lock().await;
        let entry = state.filesystems.get_mut(name).ok_or_else(|| no_filesystem(name))?;
        if !self.env.files.exists(&path) {
            match self.env.files.create_dir_all(&path) {
                // `mount` sees a dead mount of a killed process, the check above does not.
                Err(error) if !matches!(error.kind(), ErrorKind::AlreadyExists | ErrorKind::NotConnected) => {
                    bail!("cannot make the mount point {}: {error}", path.display());
                }
                _ => {}
            }
        }
        let id = entry.record.id;
        let options = mount_options.unwrap_or_else(|| self.local_mounts.of(id).options);
        entry.mount((&self.env, &self.dir, &self.runtime), &path, &options, &self.memory).await?;
        drop(state);
        self.local_mounts.set(id, MountPlace { path: Some(path.to_string_lossy().into_owned()), options })
    }
}

/// The control ledger of a start.
struct Opened {
    control: Control,
    files: LedgerFiles,
    local_drives: Arc<LocalDrives>,
    local_mounts: LocalMounts,
    /// The cluster is new.
    created: Option<Created>,
}

struct Created {
    /// What to tell about the drives.
    note: Option<String>,
}

async fn open_control(
    env: &Env,
    dir: &NodeDir,
    meta_dirs: &mut MetaDirs,
    options: &StartOptions,
) -> Result<Opened> {
    let files = meta_dirs.open(CONTROL_LEDGER, CONTROL_CACHE_BYTES)?;
    let control = Control::open(env, files.log.clone(), files.state.clone(), None).await?;
    let mut created = None;
    let view = control.view()?;
    let local_drives = LocalDrives::load(env, dir, view.former_paths()?)?;
    let local_mounts = LocalMounts::load(env, dir, view.former_mounts()?)?;
    match Cluster::of(&view) {
        Ok(cluster) => {
            check_unchanged(&cluster, options)?;
            local_drives.make()?;
            local_mounts.make()?;
            let is_known = |uuid: DriveUuid| cluster.drives.values().any(|drive| drive.uuid == uuid);
            note_named(env, cluster.record.id, is_known, &local_drives, &options.drive_paths)?;
        }
        Err(ControlError::NoCluster) if meta_dirs.is_created() => {
            let dirs: Vec<String> = meta_dirs.paths().iter().map(|dir| dir.display().to_string()).collect();
            bail!("metadata of this node is gone: it should be in {}", dirs.join(", "));
        }
        Err(ControlError::NoCluster) => {
            control.begin(env, &Evidence::default()).await?;
            let local = (&local_drives, &local_mounts);
            let record = Control::new_cluster(env);
            let (plan, note) = plan_cluster(env, dir, record, local, options)?;
            control.commit(plan.change(&control.view()?)).await?;
            created = Some(Created { note });
        }
        Err(error) => return Err(error.into()),
    }
    meta_dirs.set_created()?;
    Ok(Opened { control, files, local_drives: Arc::new(local_drives), local_mounts, created })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use base::env::spawn_thread;

    use super::*;

    #[test]
    fn a_lock_that_is_held_for_a_moment_does_not_end_a_start() {
        let root = tempfile::tempdir().unwrap();
        let (env, dir) = (Env::real(), NodeDir::new(root.path()));
        let first = hold_dir(&env, &dir).unwrap();
        // The number in it is that of this process, as after it has begun anew.
        let held = spawn_thread("held", move || {
            std::thread::park_timeout(Duration::from_millis(700));
            drop(first);
        });
        let second = hold_dir(&env, &dir).unwrap();
        held.join().unwrap();
        // Another process looks whether a node runs.
        second.write_at(b"1", 0).and_then(|()| second.set_len(1)).unwrap();
        let looks = spawn_thread("looks", move || {
            std::thread::park_timeout(Duration::from_millis(100));
            drop(second);
        });
        let third = hold_dir(&env, &dir).unwrap();
        looks.join().unwrap();
        third.write_at(b"1", 0).and_then(|()| third.set_len(1)).unwrap();
        let error = format!("{:#}", hold_dir(&env, &dir).err().unwrap());
        assert!(error.contains("running already") && error.contains("pid=1"), "{error}");
    }
}
