//! The owner of all ledgers on a machine that serves drives, mounts and S3 by itself, and is one of several that may own them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base::env::Env;
use base::{Epoch, LedgerId, Seq};
use control::{CONTROL_LEDGER, Cluster, Control, FilesystemRecord, LogMoveRecord, Plan};
use meta::history::Evidence;
use meta::log::{StaleCopies, Vacancy};
use meta::state::WholeLog;
use s3::AuditLog;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use wire::BoxFuture;
use wire::cluster::HostService;
use wire::link::Services;

use super::drives::{DriveEntry, DriveSettings};
use super::events::Watch;
use super::filesystems::{FilesystemEntry, FilesystemParts, OwnerPlace};
use super::history::Knowledge;
use super::ledgers::{LedgerFiles, MetaDirs};
use super::local_drives::LocalDrives;
use super::local_mounts::{LocalMounts, MountPlace};
use super::memory::MemoryPlan;
use super::network::{Network, addresses_of, ready_owner};
use super::others::{ForOthers, Others};
use super::settings::Settings;
use super::start::{CONTROL_CACHE_BYTES, StartOptions, paced, plan_cluster, prepare_dir};
use super::users::open_accounts;
use super::{Mounts, Node, NodeDir, NodeParts, State, moving};
use crate::engine::Engine;
use crate::identity::{IdentityFiles, Membership, OWNER};
use crate::remote::OwnDrives;

/// How often an owner looks whether it is one.
const LOOK: Duration = Duration::from_millis(300);

/// What the owner of the ledgers uses of its machine.
pub(crate) struct Seat {
    pub(crate) network: Arc<Network>,
    /// Opens the drives of the machine.
    pub(crate) host: Arc<dyn HostService>,
    /// Those that are open.
    pub(crate) drives: Arc<dyn OwnDrives>,
    /// Where they are.
    pub(crate) paths: Arc<LocalDrives>,
    pub(crate) drive_settings: DriveSettings,
    pub(crate) audit: Arc<AuditLog>,
    /// The local stores of the ledgers.
    pub(crate) ledgers: MetaDirs,
    pub(crate) memory: MemoryPlan,
    pub(crate) out_after: Option<Duration>,
    /// How often the logs were begun elsewhere, as far as this machine knows.
    pub(crate) recoveries: u32,
    /// What the owner serves. The machine offers it to others, beside its own services.
    pub(crate) offers: watch::Sender<Services>,
    /// Waits until the last owner of a ledger is gone for certain, and ends the standby of this machine. Returns what the log
    /// shows then.
    pub(crate) vacated: Box<dyn Fn(LedgerId) -> BoxFuture<'static, Result<Vacancy>> + Send + Sync>,
}

/// Another node has taken the ledgers: what this process has in memory is of no use any more.
#[derive(Debug, thiserror::Error)]
#[error("another node has taken the ledgers")]
pub(crate) struct Deposed;

/// The logs of the ledgers have moved: the last change in the control ledger says where. Nothing more may be added to them here.
#[derive(Debug, thiserror::Error)]
#[error("the logs of the ledgers have moved")]
pub(crate) struct MovedOn;

/// Why an owner of the ledgers is one no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// Another node has taken them.
    Deposed,
    /// The log or the store of a filesystem failed here.
    Halted,
    /// This node is to be away.
    Leaves,
    /// The logs are to move.
    Moves,
}

impl Node {
    /// Takes all ledgers, if the control ledger is still vacant as it was seen. After an error nothing is owned; after
    /// [`Deposed`], the process must begin anew.
    pub(crate) async fn take(env: Env, dir: NodeDir, seat: Seat, vacant: Vacancy) -> Result<Arc<Self>> {
        let files = seat.ledgers.opened(CONTROL_LEDGER, CONTROL_CACHE_BYTES).await?;
        let control = Control::open(&env, files.log.clone(), files.state.clone(), Some(vacant)).await?;
        if control.view()?.cluster()?.recoveries > seat.recoveries {
            control.resign().await;
            return Err(MovedOn.into());
        }
        let control = Arc::new(control);
        // From now on others wait for this node, however long the rest takes.
        let kept = control.clone();
        let mut keeping = tokio::spawn(async move { kept.keep().await });
        let taken = async {
            let node = Self::own((env, dir), seat, (control.clone(), files)).await?;
            if let Err(error) = node.serve().await {
                let _ = node.stop(Mounts::Keep).await;
                return Err(error);
            }
            Ok(node)
        };
        let taken = tokio::select! {
            taken = taken => taken,
            _ = &mut keeping => return Err(Deposed.into()),
        };
        match taken {
            Ok(node) => {
                *node.keeping.lock().await = Some(keeping);
                Ok(node)
            }
            Err(error) => {
                keeping.abort();
                control.resign().await;
                Err(error)
            }
        }
    }

    /// Opens the ledgers of the filesystems.
    async fn own(
        (env, dir): (Env, NodeDir),
        seat: Seat,
        (control, control_files): (Arc<Control>, LedgerFiles),
    ) -> Result<Arc<Self>> {
        control.begin(&env, &Evidence::default()).await?;
        note_engine(&control, &seat).await?;
        let cluster = Cluster::of(&control.view()?)?;
        let others = Others::of_machine(&env, &dir, &control, &seat)?;
        let (accounts, map) = (open_accounts(&env, &dir, &control).await?, cluster.map());
        let drives: BTreeMap<_, _> = cluster
            .drives
            .iter()
            .map(|(id, record)| (*id, DriveEntry::closed(record.clone(), seat.paths.path_of(record.uuid))))
            .collect();
        let (runtime, pace) = (Handle::current(), paced(&env, cluster.record.upkeep));
        let (budget, stores) = (seat.memory.budget_bytes, seat.ledgers.stores());
        let memory = MemoryPlan::new(budget, drives.len(), cluster.filesystems.len(), stores);
        let parts = FilesystemParts {
            env: &env,
            dir: &dir,
            cluster: cluster.record.id,
            meta_dirs: &seat.ledgers,
            runtime: &runtime,
            pace: &pace,
            map: &map,
            drives: &drives,
            // Each drive is asked before it is used.
            knowledge: &Knowledge::of_bereft(bereft(&cluster)),
            memory: &memory,
            nodes: cluster.nodes.len(),
            network: &others.network,
            place: OwnerPlace { here: seat.network.here(), is_all: false },
        };
        let filesystems = take_filesystems(&parts, &seat, &cluster).await?;
        note_recovered(&control, bereft(&cluster)).await?;
        // Each log goes on behind what its store has here.
        moving::forget_files(&env, &dir, &seat.ledgers)?;
        let (id, watch, meta_dirs) = (cluster.record.id, Watch::default(), seat.ledgers.clone());
        Self::assemble(NodeParts {
            local_mounts: LocalMounts::load(&env, &dir, Vec::new())?,
            env,
            dir,
            cluster: id,
            control,
            control_files,
            accounts,
            local_drives: seat.paths.clone(),
            others,
            audit: seat.audit.clone(),
            drive_settings: seat.drive_settings,
            memory,
            state: State {
                drives,
                filesystems,
                cluster,
                taken: Seq(0),
                map,
                watch,
                meta_dirs,
                unsteady: BTreeSet::new(),
            },
            pace,
            accepts_older: false,
            out_after: seat.out_after,
            seat: Some(seat),
            note: None,
            lock: None,
        })
    }

    /// Serves clients, and begins the work that an owner does.
    async fn serve(self: &Arc<Self>) -> Result<()> {
        self.take_over().await?;
        self.others.answer_with(ForOthers::new(self));
        self.publish(&mut *self.state.lock().await);
        self.start_tiers().await?;
        self.recall_events().await?;
        {
            let state = self.state.lock().await;
            self.recheck(&state, &state.cluster.behind());
        }
        self.start_scrub().await;
        super::engine_members::begin(self);
        self.start_monitor();
        let (next_owner, begun) = {
            let record = &self.state.lock().await.cluster.record;
            (record.next_owner, record.log_move.clone())
        };
        if next_owner.is_some() {
            // This is it, or the other one did not come.
            self.change(|plan| plan.set_cluster(|cluster| cluster.next_owner = None)).await?;
        }
        if begun.is_some_and(|begun| begun.waits_for_first_node()) {
            self.moves.send_replace(true);
        }
        Ok(())
    }

    /// The epoch with which this node owns the control ledger.
    pub(crate) fn epoch(&self) -> Epoch {
        self.control.epoch()
    }

    /// Whether it is the only owner of the control ledger for certain.
    pub(crate) fn holds(&self) -> bool {
        self.control.holds()
    }

    /// Waits until this node owns the ledgers no more.
    pub(crate) async fn ended(&self) -> Ended {
        loop {
            tokio::time::sleep(LOOK).await;
            if self.keeping.lock().await.as_ref().is_none_or(JoinHandle::is_finished) {
                return Ended::Deposed;
            }
            if *self.leaves.borrow() {
                return Ended::Leaves;
            }
            if *self.moves.borrow() {
                return Ended::Moves;
            }
            let state = self.state.lock().await;
            if state.filesystems.values().any(|entry| entry.owner.stat().halted) {
                // A node that has taken the ledgers stops the owners here one after another.
                return if self.control.holds() { Ended::Halted } else { Ended::Deposed };
            }
        }
    }

    /// Gives the control ledger back at once: others own the ledgers better.
    pub(crate) async fn give_back(&self) {
        if let Some(keeping) = self.keeping.lock().await.take() {
            keeping.abort();
        }
        self.control.resign().await;
    }

    /// What answers for this node.
    pub(crate) fn for_others(&self) -> Option<Arc<ForOthers>> {
        self.others.answering()
    }
}

/// Notes where the logs are, for nodes that joined when they were in files, and that they have not moved since.
async fn note_engine(control: &Control, seat: &Seat) -> Result<()> {
    let Some(engine) = seat.ledgers.engine() else { return Ok(()) };
    let (is_first, is_own) = (seat.network.here() == OWNER, engine.address().is_own());
    let address = engine.address().to_string();
    let decide = |plan: &mut Plan| -> Result<()> {
        // That of an engine of Forebay changes with its members.
        if plan.next().record.log.is_empty() || (!is_own && plan.next().record.log != address) {
            plan.set_cluster(|cluster| cluster.log.clone_from(&address));
        }
        let goes_on = plan.next().record.log_move.as_ref().is_some_and(LogMoveRecord::waits_for_first_node);
        if !(is_first && goes_on) {
            plan.fail_log_move("the node that owned the metadata ended in between; nothing has moved");
        }
        Ok(())
    };
    control.plan(decide).await
}

/// The ledgers of filesystems of which the ends of the logs were lost.
pub(super) fn bereft(cluster: &Cluster) -> BTreeSet<LedgerId> {
    let bereft = cluster.filesystems.values().filter(|record| record.has_lost_end);
    bereft.map(|record| record.ledger).collect()
}

/// Notes that these ledgers have moved their numbers ahead.
pub(super) async fn note_recovered(control: &Control, ledgers: BTreeSet<LedgerId>) -> Result<()> {
    if ledgers.is_empty() {
        return Ok(());
    }
    let decide = |plan: &mut Plan| -> Result<()> {
        let records: Vec<_> = plan.next().filesystems.values().cloned().collect();
        for record in records.into_iter().filter(|record| ledgers.contains(&record.ledger)) {
            plan.set_filesystem(FilesystemRecord { has_lost_end: false, ..record });
        }
        Ok(())
    };
    control.plan(decide).await
}

/// Takes the ledgers of all filesystems. After an error, none.
async fn take_filesystems(
    parts: &FilesystemParts<'_>,
    seat: &Seat,
    cluster: &Cluster,
) -> Result<BTreeMap<String, FilesystemEntry>> {
    let mut filesystems = BTreeMap::new();
    for record in cluster.filesystems.values().cloned() {
        let name = record.name.clone();
        let opened = async {
            let vacant = (seat.vacated)(record.ledger).await?;
            FilesystemEntry::open(parts, record, Some(vacant)).await
        };
        match opened.await {
            Ok(entry) => drop(filesystems.insert(name, entry)),
            Err(error) => {
                for (_, entry) in filesystems {
                    let _ = entry.stop(Mounts::Keep).await;
                }
                return Err(error.context(format!("opening filesystem {name}")));
            }
        }
    }
    Ok(filesystems)
}

/// Makes a cluster whose logs are in an engine. This machine becomes its first node; it is started like any other then. Returns what
/// to tell about the drives.
pub(crate) async fn found(env: &Env, dir: &NodeDir, options: &StartOptions) -> Result<Option<String>> {
    let address = options.log.clone().context("there is no engine")?;
    let listen = options.listen.context(
        "a cluster with its logs in an engine needs an address at which others reach this machine: --address ADDRESS",
    )?;
    let _lock = prepare_dir(env, dir)?;
    let mut settings = Settings::default();
    settings.listen_at(Some(listen), &options.advertise)?;
    let record = Control::new_cluster(env);
    let address = address.of_cluster(record.id, 0);
    let engine = Engine::connect(env, dir, &address).await?;
    let log = engine.log(CONTROL_LEDGER).await?;
    if log.fence().await?.epoch != Epoch(0) {
        bail!(
            "another cluster has its logs there: prefix={}; choose another one (?prefix=NAME), or join that cluster \
             (forebay join)",
            address.prefix()
        );
    }
    let ledgers = MetaDirs::load(env, dir, &options.meta_dirs, StaleCopies::Refuse)?;
    if ledgers.is_created() {
        let root = dir.root().display();
        bail!(
            "the ledgers in {root} are in files: start the node without --log, then move them (forebay log move)"
        );
    }
    ledgers.forget_attempt()?;
    let ledgers = ledgers.with_engine(engine, &Handle::current(), WholeLog::Yes).await?;
    let (drives, mounts) =
        (LocalDrives::load(env, dir, Vec::new())?, LocalMounts::load(env, dir, Vec::new())?);
    // First what may fail: nothing is in the engine then.
    let (plan, note) = plan_cluster(env, dir, record, (&drives, &mounts), options)?;
    let files = ledgers.opened(CONTROL_LEDGER, CONTROL_CACHE_BYTES).await?;
    let control =
        Control::open(env, files.log.clone(), files.state.clone(), Some(Vacancy::default())).await?;
    control.begin(env, &Evidence::default()).await?;
    control.commit(plan.change(&control.view()?)).await?;
    ready_owner(env, dir, &control, &settings).await?;
    open_accounts(env, dir, &control).await?;
    let cluster = Cluster::of(&control.view()?)?;
    if !options.no_mount
        && let Some(first) = cluster.filesystems.keys().next()
    {
        let path = options.mount.clone().unwrap_or_else(|| dir.default_mount());
        let path: PathBuf = std::path::absolute(path)?;
        let options = options.mount_options.clone().unwrap_or_default();
        mounts.set(*first, MountPlace { path: Some(path.to_string_lossy().into_owned()), options })?;
    }
    // This file makes it a node.
    IdentityFiles::new(env, dir).keep_membership(&Membership {
        cluster: cluster.record.id,
        node: OWNER,
        listen,
        addresses: settings.advertised(),
        nodes: addresses_of(&cluster),
        log: Some(address.to_string()),
        recoveries: 0,
        left: Vec::new(),
        leaves_engine: None,
        witness: false,
    })?;
    control.resign().await;
    Ok(note)
}
