//! Starting a node: creates a cluster in an empty directory, or opens the existing one.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base::env::{Caching, Env, File, OpenMode};
use base::{DriveId, Seq};
use control::{
    CONTROL_LEDGER, Cluster, Control, ControlError, DriveRecord, FilesystemRecord, NodeRecord, Plan,
    UpkeepRecord,
};
use layout::{DriveState, FailureDomain, Profile};
use meta::history::Evidence;
use meta::log::StaleCopies;
use posix::fuse::UnmountMode;
use s3::AuditLog;
use tokio::runtime::Handle;
use tokio::sync::{Mutex, watch};
use upkeep::{Pace, ScrubTargets};

use super::clients::Clients;
use super::drives::{DriveEntry, DriveSettings, format_drives, plan_drives};
use super::events::{Watch, next_event};
use super::filesystems::{FilesystemEntry, NodeParts};
use super::history::{Knowledge, note_drives, services};
use super::ledgers::{LedgerFiles, MetaDirs};
use super::management::{apply_upkeep, no_filesystem};
use super::memory::{self, MemoryPlan};
use super::plans::seen;
use super::reached::ReachedStores;
use super::settings::{Settings, TrimChoice};
use super::users::open_accounts;
use super::{CLIENTS_SOCKET, Mounts, Node, NodeDir, S3Options, State};
use crate::mount::MountProcess;

/// How long a start waits for a killed process to end.
const DYING_S_MAX: u64 = 20;
/// Default time that a drive may be away before other drives take over its positions.
const OUT_AFTER: Duration = Duration::from_secs(600);
const DYING_POLL: Duration = Duration::from_millis(20);
const CONTROL_CACHE_BYTES: usize = 16 << 20;
/// The filesystem that every cluster begins with.
const FIRST_FILESYSTEM: &str = "main";

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
}

/// Checks that the directory exists, is writable, and belongs to no other node.
fn prepare_dir(env: &Env, dir: &NodeDir) -> Result<Arc<dyn File>> {
    let root = dir.root().display();
    env.files.create_dir_all(dir.root()).with_context(|| format!("cannot create directory {root}"))?;
    let lock = env.files.open(&dir.lock(), OpenMode::Create, Caching::Buffered);
    let lock = lock.with_context(|| format!("cannot write to directory {root}"))?;
    take_lock(env, dir, &*lock)?;
    let private = rustix::fs::Mode::RWXU;
    for path in [dir.run(), dir.drives(), dir.audit()] {
        env.files.create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        rustix::fs::chmod(&path, private).with_context(|| format!("cannot protect {}", path.display()))?;
    }
    Ok(lock)
}

/// Removes files that a killed process left. Called only after the control ledger was opened: a node that still runs,
/// although its lock file was deleted, keeps them.
fn remove_leftovers(env: &Env, dir: &NodeDir) -> Result<()> {
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
        let pid = super::management::read_node_file(env, dir).map(|file| file.pid);
        let waited_s = (env.clock.boot_ns() - begun) / 1_000_000_000;
        if pid.is_none_or(|pid| !is_dying(pid)) || waited_s >= DYING_S_MAX {
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
pub(super) fn read_proc(path: &Path) -> Result<String> {
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

/// Returns what to tell about the drives.
async fn create_cluster(
    env: &Env,
    dir: &NodeDir,
    control: &Control,
    options: &StartOptions,
) -> Result<Option<String>> {
    let (count, profile) = choose(options)?;
    let record = Control::new_cluster(env);
    let trim = options.trim.unwrap_or_default();
    let counts = (count, u32::from(profile.n()));
    let planned = plan_drives(env, dir, &options.drive_paths, counts, options.drive_bytes, trim)?;
    let drives = format_drives(env, record.id, record.next_drive, &planned.drives)?;
    let view = control.view()?;
    let mut plan = Plan::new(Cluster::new(record));
    plan.set_cluster(|cluster| cluster.next_drive += drives.len() as u32);
    let id = plan.next_node();
    plan.set_node(NodeRecord {
        id,
        name: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        zone: String::new(),
        rack: String::new(),
    });
    let up = drives.iter().map(|drive| drive.id).collect();
    drives.into_iter().for_each(|drive| plan.set_drive(drive));
    let filesystem = FilesystemRecord {
        name: FIRST_FILESYSTEM.to_owned(),
        mount_options: options.mount_options.clone().unwrap_or_default(),
        ..FilesystemRecord::new(plan.next_filesystem(), profile)
    };
    plan.add_filesystem(filesystem, &up, env.random.next_u64())?;
    control.commit(plan.change(&view)).await?;
    Ok(planned.note)
}

/// Refuses other drives or another profile for an existing cluster.
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
    for path in &options.drive_paths {
        let path = std::path::absolute(path)?.to_string_lossy().into_owned();
        if !cluster.drives.values().any(|drive| drive.path == path) {
            bail!("{path} is not a drive of this cluster: add it with `forebay drive add`");
        }
    }
    Ok(())
}

/// Refuses to serve a filesystem whose data cannot be read.
fn check_enough(
    cluster: &Cluster,
    drives: &BTreeMap<DriveId, DriveEntry>,
    options: &StartOptions,
) -> Result<()> {
    let (seen, behind) = (seen(drives), cluster.behind());
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

/// The last settings, changed by the options. Invalid values change nothing.
fn settings(env: &Env, dir: &NodeDir, options: &StartOptions) -> Result<Settings> {
    let known = Settings::load(env, dir)?;
    let mut settings = known;
    settings.memory_bytes = options.memory_bytes.or(known.memory_bytes);
    settings.trim = options.trim.unwrap_or(known.trim);
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
    control: &Control,
    drives: &mut BTreeMap<DriveId, DriveEntry>,
    is_new: bool,
    options: &StartOptions,
) -> Result<(Knowledge, Watch, Cluster)> {
    let knowledge = Knowledge::gather(drives, options.accept_older_metadata).await;
    if !is_new {
        control.begin(env, &knowledge.of(CONTROL_LEDGER)).await?;
    }
    let returned = note_drives(control, &services(drives)).await?;
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
fn paced(env: &Env, upkeep: UpkeepRecord) -> Arc<Pace> {
    let pace = Arc::new(Pace::new(env.clone()));
    apply_upkeep(&pace, upkeep);
    pace
}

async fn open_filesystems(
    parts: &NodeParts<'_>,
    records: Vec<FilesystemRecord>,
) -> Result<BTreeMap<String, FilesystemEntry>> {
    let mut filesystems = BTreeMap::new();
    // Mounts that have outlived the node wait for their owners, and these only for so long for them.
    let (waiting, others): (Vec<_>, Vec<_>) =
        records.into_iter().partition(|record| MountProcess::find(parts.env, parts.dir, record.id).is_some());
    for record in others.into_iter().chain(waiting) {
        let name = record.name.clone();
        let entry = FilesystemEntry::open(parts, record).await;
        filesystems.insert(name.clone(), entry.with_context(|| format!("opening filesystem {name}"))?);
    }
    Ok(filesystems)
}

impl Node {
    /// Starts the node. After an error nothing runs and nothing is mounted.
    pub(crate) async fn start(env: Env, dir: NodeDir, options: StartOptions) -> Result<Arc<Self>> {
        let (runtime, (stop_serving, _)) = (Handle::current(), watch::channel(false));
        let (lock, settings) = (prepare_dir(&env, &dir)?, settings(&env, &dir, &options)?);
        let mut meta_dirs = load_meta_dirs(&env, &dir, &options)?;
        let Opened { control, files, created } = open_control(&env, &dir, &mut meta_dirs, &options).await?;
        remove_leftovers(&env, &dir)?;
        let before = Cluster::of(&control.view()?)?;
        let (cluster, counts) = (before.record.id, (before.drives.len(), before.filesystems.len()));
        let memory = plan_memory(&env, &settings, &meta_dirs, counts)?;
        let drive_settings = DriveSettings { io: options.io, trim: settings.trim, memory: memory.drive };
        let open = |record: DriveRecord| (record.id, DriveEntry::open(&env, cluster, record, drive_settings));
        let mut drives: BTreeMap<_, _> = before.drives.into_values().map(open).collect();
        let (knowledge, watch, records) =
            compare_histories(&env, &control, &mut drives, created.is_some(), &options).await?;
        let (accounts, map) = (open_accounts(&env, &dir, &control).await?, records.map());
        check_enough(&records, &drives, &options)?;
        let (pace, served) = (paced(&env, records.record.upkeep), records.filesystems.values().cloned());
        let parts = NodeParts {
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
        };
        let filesystems = open_filesystems(&parts, served.collect()).await?;
        let state = State { drives, filesystems, cluster: records, taken: Seq(0), map, watch, meta_dirs };
        let node = Arc::new(Self {
            started_ns: env.clock.boot_ns(),
            accounts,
            drives_lock: Mutex::new(()),
            users_lock: Mutex::new(()),
            stores_lock: Mutex::new(()),
            reached: ReachedStores::default(),
            next_event: Mutex::new(next_event(&control)?),
            audit: Arc::new(AuditLog::start(&env, &dir.audit())),
            clients: Clients::new(&env),
            env,
            dir,
            cluster,
            control,
            control_files: files,
            runtime,
            drive_settings,
            memory,
            state: Mutex::new(state),
            pace,
            scrubber: std::sync::Mutex::new(None),
            scrub_targets: watch::Sender::new(ScrubTargets::default()),
            out_after: options.out_after.unwrap_or(OUT_AFTER),
            monitor: std::sync::Mutex::new(None),
            fsck: std::sync::Mutex::default(),
            stop_serving,
            serving: std::sync::Mutex::default(),
            last_status: std::sync::Mutex::default(),
            s3: std::sync::Mutex::default(),
            note: created.and_then(|created| created.note),
            _lock: lock,
        });
        if let Err(error) = node.finish_start(&options).await {
            // Everything that was started is stopped again; the first error is the one to show.
            let _ = node.stop(Mounts::KeepEarlier).await;
            return Err(error);
        }
        Ok(node)
    }

    async fn finish_start(self: &Arc<Self>, options: &StartOptions) -> Result<()> {
        if options.accept_older_metadata {
            self.go_on_with_this_metadata().await;
        }
        self.start_tiers().await?;
        // A mount in another process may wait for its owner, and others here for the leases of that mount.
        self.clients.update(&*self.state.lock().await);
        self.clients.listen(&self.dir, &self.runtime)?;
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
        let monitor = super::monitor::run(Arc::downgrade(self), self.stop_serving.subscribe());
        let monitor = self.runtime.spawn(monitor);
        *self.monitor.lock().expect("no holder of this lock panics") = Some(monitor);
        self.start_s3(&options.s3).await?;
        let (runtime, stopped) = (self.runtime.clone(), self.stop_serving.subscribe());
        let serving = admin::serve(self.clone(), socket.as_path(), runtime, stopped)?;
        *self.serving.lock().expect("no holder of this lock panics") = Some(serving);
        self.write_node_file().await
    }

    async fn mount_at_start(&self, options: &StartOptions) -> Result<()> {
        let names: Vec<String> = self.state.lock().await.filesystems.keys().cloned().collect();
        for name in names {
            let mut state = self.state.lock().await;
            let Some(entry) = state.filesystems.get_mut(&name) else { continue };
            let first = name == FIRST_FILESYSTEM;
            let asked = options.mount.clone().filter(|_| first);
            let kept = entry.record.mount.clone().map(PathBuf::from);
            let default = first.then(|| self.dir.default_mount());
            let path = asked.or(kept).or(default).filter(|_| !options.no_mount);
            let path = path.map(std::path::absolute).transpose()?;
            let flags = options.mount_options.clone().filter(|_| first);
            let stays = match &path {
                Some(path) => entry.keeps_mount(path, flags.as_deref()).await,
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

    /// Mounts the filesystem, and records the place so that the next start mounts it there too.
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
        let mount_options = mount_options.unwrap_or_else(|| entry.record.mount_options.clone());
        entry.mount((&self.env, &self.dir, &self.runtime), &path, &mount_options, &self.memory).await?;
        let remembered = path.to_string_lossy().into_owned();
        let (id, record) = (entry.record.id, &entry.record);
        if record.mount.as_ref() == Some(&remembered) && record.mount_options == mount_options {
            return Ok(());
        }
        drop(state);
        self.plan_filesystem(id, |record| FilesystemRecord {
            mount: Some(remembered.clone()),
            mount_options: mount_options.clone(),
            ..record
        })
        .await
    }
}

/// The control ledger of a start.
struct Opened {
    control: Control,
    files: LedgerFiles,
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
    let control = Control::open(env.random.next_u64(), files.log.clone(), files.state.clone()).await?;
    let mut created = None;
    let view = control.view()?;
    match Cluster::of(&view) {
        Ok(cluster) => check_unchanged(&cluster, options)?,
        Err(ControlError::NoCluster) if meta_dirs.is_created() => {
            let dirs: Vec<String> = meta_dirs.paths().iter().map(|dir| dir.display().to_string()).collect();
            bail!("metadata of this node is gone: it should be in {}", dirs.join(", "));
        }
        Err(ControlError::NoCluster) => {
            control.begin(env, &Evidence::default()).await?;
            created = Some(Created { note: create_cluster(env, dir, &control, options).await? });
        }
        Err(error) => return Err(error.into()),
    }
    meta_dirs.set_created()?;
    Ok(Opened { control, files, created })
}
