//! A node: starts and stops drives, ledgers, filesystems and the management socket in order.

mod backups;
mod balancing;
mod clients;
mod damage;
mod draining;
mod drives;
mod elsewhere;
mod endpoint;
mod engine_members;
mod events;
mod filesystem_groups;
mod filesystems;
mod forecast;
mod fsck;
mod helpers;
mod history;
mod ledgers;
mod limits;
mod local_drives;
mod local_file;
mod local_mounts;
mod management;
mod members;
mod memory;
mod monitor;
mod mounted;
mod moving;
mod network;
mod node_file;
mod others;
mod ownership;
mod paths;
mod plans;
mod problems;
mod scrub;
mod seat;
mod settings;
mod spares;
mod start;
mod stop_check;
mod store_sights;
mod stores;
mod tiered_files;
mod tiers;
mod upgrade;
mod users;
mod verification;
mod why;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use admin::NodeStatus;
use anyhow::{Context, Result};
use base::env::{Env, File};
use base::program::VERSION;
use base::{ClusterId, DriveId, NodeId, Seq};
use control::{Cluster, Control};
use layout::ClusterMap;
use s3::{Accounts, AuditLog};
use tokio::runtime::Handle;
use tokio::sync::{Mutex, watch};
use tokio::task::JoinHandle;
use upkeep::{Pace, ScrubTargets, Scrubber};
use wire::meta::MetaService;

use crate::identity::only_epoch;
use events::{Watch, next_event};
use filesystems::{FilesystemEntry, OwnerPlace};
use history::{note_drives, readable, services, tell_drives};
use ledgers::LedgerFiles;
use others::Others;
use start::OUT_AFTER;

pub(crate) use clients::{CLIENTS_SOCKET, Clients};
pub(crate) use drives::{DriveEntry, DriveMaker, DriveSettings};
pub(crate) use endpoint::{Endpoint, EndpointParts, S3Options};
pub(crate) use engine_members::{client_address, member_of};
pub(crate) use fsck::fsck_stopped;
pub(crate) use ledgers::{MetaDirs, STORE};
pub(crate) use local_drives::LocalDrives;
pub(crate) use local_mounts::{LocalMounts, MountPlace};
pub(crate) use management::read_node_file;
pub(crate) use memory::{MemoryPlan, budget as memory_budget};
pub(crate) use monitor::{REOPEN_NS, REOPEN_NS_MAX};
pub(crate) use moving::{FILES, OWN_ENGINE, be_first_node, is_unfinished, replica_of_node};
pub(crate) use network::{DATA_CONNECTIONS, Network, PORT, SILENCE_PATIENCE, addresses_of, proof_key};
pub(crate) use node_file::{Addresses, NodeFile};
pub(crate) use paths::NodeDir;
pub(crate) use seat::{Deposed, Ended, MovedOn, Seat, found};
pub(crate) use settings::{MetricsChoice, TrimChoice};
pub(crate) use start::{
    CONTROL_CACHE_BYTES, FIRST_FILESYSTEM, IoChoice, StartOptions, hold_dir, is_locked, kept_settings,
    last_pid, note_named, prepare_dir, read_proc, remove_leftovers, tell_metrics,
};
pub(crate) use stores::reach_store;
pub(crate) use users::{account_set, load_node_key};

/// What becomes of mounts in processes of their own when a node stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mounts {
    /// They are unmounted.
    Unmount,
    /// Those of earlier runs of the node stay: this one failed to start.
    KeepEarlier,
    /// They stay: programs wait for the next start.
    Keep,
}

/// A running node.
pub(crate) struct Node {
    env: Env,
    dir: NodeDir,
    cluster: ClusterId,
    control: Arc<Control>,
    control_files: LedgerFiles,
    accounts: Arc<Accounts>,
    /// Where the drives of this machine are.
    local_drives: Arc<LocalDrives>,
    /// Other nodes: the ways to them, and what they may ask.
    others: Others,
    /// The machine, if it serves drives, mounts and S3 by itself.
    seat: Option<Seat>,
    /// Gives signs of life, where others may own the ledgers.
    keeping: Mutex<Option<JoinHandle<()>>>,
    /// Where this machine mounts filesystems.
    local_mounts: LocalMounts,
    /// Serializes orders about drives.
    drives_lock: Mutex<()>,
    /// Serializes changes of users.
    users_lock: Mutex<()>,
    /// Serializes changes of object stores and of the times of tiering.
    stores_lock: Mutex<()>,
    /// Object stores that filesystems use.
    /// The number of the next event.
    next_event: Mutex<u32>,
    audit: Arc<AuditLog>,
    /// Services for clients in other processes.
    clients: clients::Clients,
    runtime: Handle,
    drive_settings: DriveSettings,
    memory: MemoryPlan,
    started_ns: u64,
    state: Mutex<State>,
    pace: Arc<Pace>,
    scrubber: std::sync::Mutex<Option<Scrubber>>,
    scrub_targets: watch::Sender<ScrubTargets>,
    /// The operator goes on with this metadata, also if drives know newer one.
    accepts_older: bool,
    /// How long a drive may be away before others take over its positions.
    out_after: Duration,
    monitor: std::sync::Mutex<Option<JoinHandle<()>>>,
    fsck: std::sync::Mutex<fsck::FsckJob>,
    stop_serving: watch::Sender<bool>,
    /// Whether the logs of the ledgers are to move to an engine.
    moves: watch::Sender<bool>,
    /// The ledgers are to be given to another node.
    leaves: watch::Sender<bool>,
    /// Held by the one that prepares that.
    move_lock: Mutex<()>,
    /// What is wrong with the members of an engine of our own.
    engine_problem: std::sync::Mutex<Option<String>>,
    /// The plan of backups was changed.
    backup_asked: Arc<tokio::sync::Notify>,
    /// Why the last attempt to back the metadata up failed.
    backup_problem: std::sync::Mutex<Option<String>>,
    /// The thread of the management socket. It ends with its last connection; the process does not wait for it.
    serving: std::sync::Mutex<Option<std::thread::JoinHandle<()>>>,
    /// The last answer to `status`, with its time: the fallback when no new one comes.
    last_status: std::sync::Mutex<Option<(u64, NodeStatus)>>,
    s3: std::sync::Mutex<Option<endpoint::Endpoint>>,
    /// What to tell about the drives that this start made.
    note: Option<String>,
    /// Held for as long as the node runs; the machine holds it if it serves by itself.
    _lock: Option<Arc<dyn File>>,
}

struct State {
    drives: BTreeMap<DriveId, DriveEntry>,
    filesystems: BTreeMap<String, FilesystemEntry>,
    /// The records of the cluster that the node acts on.
    cluster: Cluster,
    /// The change of the control ledger up to which they were taken over.
    taken: Seq,
    /// Its map.
    map: ClusterMap,
    watch: Watch,
    meta_dirs: MetaDirs,
    /// Drives that come and go.
    unsteady: BTreeSet<DriveId>,
}

/// What the start of a node has opened.
struct NodeParts {
    env: Env,
    dir: NodeDir,
    cluster: ClusterId,
    control: Arc<Control>,
    control_files: LedgerFiles,
    accounts: Arc<Accounts>,
    local_drives: Arc<LocalDrives>,
    others: Others,
    seat: Option<Seat>,
    local_mounts: LocalMounts,
    audit: Arc<AuditLog>,
    drive_settings: DriveSettings,
    memory: MemoryPlan,
    state: State,
    pace: Arc<Pace>,
    accepts_older: bool,
    out_after: Option<Duration>,
    note: Option<String>,
    lock: Option<Arc<dyn File>>,
}

impl Node {
    /// A node of these parts. It serves nothing yet.
    fn assemble(parts: NodeParts) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            cluster: parts.cluster,
            next_event: Mutex::new(next_event(&parts.control)?),
            control: parts.control,
            control_files: parts.control_files,
            accounts: parts.accounts,
            local_drives: parts.local_drives,
            others: parts.others,
            seat: parts.seat,
            keeping: Mutex::default(),
            local_mounts: parts.local_mounts,
            drives_lock: Mutex::new(()),
            users_lock: Mutex::default(),
            stores_lock: Mutex::default(),
            audit: parts.audit,
            clients: Clients::new(&parts.env, only_epoch(parts.state.cluster.record.recoveries)),
            runtime: Handle::current(),
            drive_settings: parts.drive_settings,
            memory: parts.memory,
            started_ns: parts.env.clock.boot_ns(),
            env: parts.env,
            dir: parts.dir,
            state: Mutex::new(parts.state),
            pace: parts.pace,
            scrubber: std::sync::Mutex::new(None),
            scrub_targets: watch::Sender::new(ScrubTargets::default()),
            accepts_older: parts.accepts_older,
            out_after: parts.out_after.unwrap_or(OUT_AFTER),
            monitor: std::sync::Mutex::new(None),
            fsck: std::sync::Mutex::default(),
            stop_serving: watch::Sender::new(false),
            moves: watch::Sender::new(false),
            leaves: watch::Sender::new(false),
            move_lock: Mutex::default(),
            engine_problem: std::sync::Mutex::default(),
            backup_asked: Arc::default(),
            backup_problem: std::sync::Mutex::default(),
            serving: std::sync::Mutex::default(),
            last_status: std::sync::Mutex::default(),
            s3: std::sync::Mutex::default(),
            note: parts.note,
            _lock: parts.lock,
        }))
    }

    /// What to tell about the drives that this start made, in one line.
    pub(crate) fn note(&self) -> Option<&str> {
        self.note.as_deref()
    }

    /// The number of this node.
    fn here(&self) -> NodeId {
        self.others.network.here()
    }

    fn place(&self) -> OwnerPlace {
        OwnerPlace { here: self.here(), is_all: self.seat.is_none() }
    }

    /// Whether this process opens the drives of a node itself.
    fn opens(&self, node: NodeId) -> bool {
        self.place().own() == Some(node)
    }

    /// Writes everything out and stops all parts in the order of their dependencies. Returns the first error.
    pub(crate) async fn stop(&self, mounts: Mounts) -> Result<()> {
        let result = self.stop_but_control(mounts).await;
        // Nobody else may take the ledgers before they are closed.
        self.give_back().await;
        result
    }

    /// As [`Node::stop`], but this node goes on owning the control ledger.
    async fn stop_but_control(&self, mounts: Mounts) -> Result<()> {
        // Fails if no receiver is left.
        let _ = self.stop_serving.send(true);
        let monitor = self.monitor.lock().expect("no holder of this lock panics").take();
        if let Some(monitor) = monitor {
            // The monitor ends after its current step; a panic would have ended the process.
            let _ = monitor.await;
        }
        self.others.stop_answering().await;
        let mut result = self.stop_s3().await;
        if mounts == Mounts::Keep {
            self.clients.stop().await;
        }
        result = result.and(self.stop_ledgers(mounts).await);
        if self.seat.is_none() {
            result = result.and(self.stop_machine().await);
        }
        result
    }

    /// Ends filesystems and their owners, and notes how far drives and ledgers have come.
    async fn stop_ledgers(&self, mounts: Mounts) -> Result<()> {
        let mut result = self.control.catch_up().await.context("storing a change of the control ledger");
        result = result.and(self.keep_scrub_marks().await);
        self.tell().await;
        let mut state = self.state.lock().await;
        let scrubber = self.scrubber.lock().expect("no holder of this lock panics").take();
        if let Some(scrubber) = scrubber {
            scrubber.stop().await;
        }
        self.scrub_targets.send_replace(ScrubTargets::default());
        let mut positions = Vec::new();
        for (name, entry) in std::mem::take(&mut state.filesystems) {
            let owner = entry.owner.clone();
            let stopped = entry.stop(mounts).await.with_context(|| format!("stopping filesystem {name}"));
            positions.extend(owner.position());
            result = result.and(stopped);
        }
        self.clients.stop().await;
        positions.extend(self.control.history().position());
        tell_drives(readable(&state.drives), &positions, false).await;
        let noted = note_drives(&self.control, &self.local_drives, &services(&state.drives)).await;
        result.and(noted.map(drop).context("noting how far the drives have come"))
    }

    /// Ends what is of this machine: drives, the ways to others, files.
    async fn stop_machine(&self) -> Result<()> {
        let mut result = Ok(());
        let drives = std::mem::take(&mut self.state.lock().await.drives);
        for (id, entry) in drives {
            let closed = entry.close().await.with_context(|| format!("closing drive {id}"));
            result = result.and(closed);
        }
        self.others.end();
        let audit = self.audit.clone();
        let stopped = tokio::task::spawn_blocking(move || audit.stop()).await;
        result = result.and(stopped.context("ending the audit log"));
        // While it moves the logs, `stop` finds the process by this.
        let node_json = (!*self.moves.borrow()).then(|| self.dir.node_json());
        let sockets = [self.dir.run().join("admin.sock"), self.dir.run().join(CLIENTS_SOCKET)];
        for path in sockets.into_iter().chain(node_json) {
            if self.env.files.exists(&path) {
                result = result.and(self.env.files.remove_file(&path).context("removing the runtime files"));
            }
        }
        result
    }

    async fn write_node_file(&self) -> Result<()> {
        let state = self.state.lock().await;
        let first = state.filesystems.values().min_by_key(|entry| entry.record.id);
        let file = NodeFile {
            pid: std::process::id(),
            mount: first.and_then(|entry| entry.mount_path()),
            addresses: Addresses { admin: self.dir.run().join("admin.sock") },
            s3: self.s3_url(),
            filesystem: first.map(|entry| entry.record.name.clone()).unwrap_or_default(),
            cluster: self.cluster,
            version: VERSION.to_owned(),
        };
        let bytes = serde_json::to_vec_pretty(&file).context("encoding node.json")?;
        self.env.files.write_atomic(&self.dir.node_json(), &bytes).context("writing node.json")
    }
}
