//! The owners of the ledger: one in each boot, or two hosts that take it from each other.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::env::Clock;
use base::units::MIB;
use base::{FsError, SessionId};
use meta::history::{Evidence, Witness};
use meta::log::{CopyIo, LedgerLog, LogSizes, MirrorOptions, MirroredLog};
use meta::owner::{EarlierSessions, Owner, OwnerError, OwnerOptions, Standby, StandbyOptions};
use meta::state::{MirroredState, RedbState, State};
use tokio::sync::{Notify, watch};
use wire::BoxFuture;
use wire::drive::DriveService;
use wire::message::{Envelope, REPLICA};
use wire::meta::{Claim, EventSink, MetaReply, MetaRequest, MetaService, Resumed};
use wire::position::Position;
use wire::replica::{ReplicaReply, ReplicaRequest, ReplicaService};

use crate::ledger::WatchedLog;
use crate::net::{self, Link};
use crate::node::{Drives, LEDGER, log_dir, text};
use crate::world::{Dice, Machine, World};

/// Most directories with a local store; a third directory has a log only.
const STORES_MAX: usize = 2;
/// Short files: a boot fills some of them, and the space zeroed ahead is read whenever a log is opened.
const LOG_SIZES: LogSizes =
    LogSizes { file_bytes: 128 << 10, zero_ahead_bytes: 32 << 10, reserve_bytes: 32 << 10 };

/// If the other host cannot take the ledger by then, the host of the earlier owner does.
const STANDBY_PATIENCE: Duration = Duration::from_secs(30);

/// The process of an owner. Clients reach it until it dies.
pub(crate) struct Process {
    owner: Mutex<Option<Arc<Owner>>>,
    death: Notify,
}

impl Process {
    fn new(owner: Owner) -> Arc<Self> {
        Arc::new(Self { owner: Mutex::new(Some(Arc::new(owner))), death: Notify::new() })
    }

    fn die(&self) {
        self.owner.lock().expect("no holder of this lock panics").take();
        self.death.notify_waiters();
    }

    pub(crate) fn owner(&self) -> Option<Arc<Owner>> {
        self.owner.lock().expect("no holder of this lock panics").clone()
    }

    /// The result of some work of the owner, if it lives that long.
    async fn living<T, F: Future<Output = Result<T, FsError>>>(
        &self,
        work: impl FnOnce(Arc<Owner>) -> F,
    ) -> Result<T, FsError> {
        let death = self.death.notified();
        tokio::pin!(death);
        death.as_mut().enable();
        let Some(owner) = self.owner() else { return Err(FsError::Disconnected) };
        tokio::select! {
            biased;
            () = death => Err(FsError::Disconnected),
            result = work(owner) => result,
        }
    }
}

impl MetaService for Process {
    fn position(&self) -> Option<Position> {
        self.owner()?.position()
    }

    fn connect(&self, events: Arc<dyn EventSink>) -> BoxFuture<'_, Result<SessionId, FsError>> {
        Box::pin(self.living(|owner| async move { owner.connect(events).await }))
    }

    fn resume(
        &self,
        session: SessionId,
        claim: Claim,
        events: Arc<dyn EventSink>,
    ) -> BoxFuture<'_, Result<Resumed, FsError>> {
        Box::pin(self.living(move |owner| async move { owner.resume(session, claim, events).await }))
    }

    fn call(&self, envelope: Envelope, request: MetaRequest) -> BoxFuture<'_, Result<MetaReply, FsError>> {
        Box::pin(self.living(move |owner| async move { owner.call(envelope, request).await }))
    }
}

impl ReplicaService for Process {
    fn ask(&self, request: ReplicaRequest) -> BoxFuture<'_, Result<ReplicaReply, FsError>> {
        Box::pin(self.living(move |owner| async move { owner.ask(request).await }))
    }
}

/// The present owner, as its standby reaches it. Some messages are lost.
struct OwnerLink {
    world: Arc<World>,
    process: Arc<Process>,
    dice: Dice,
}

impl ReplicaService for OwnerLink {
    fn ask(&self, request: ReplicaRequest) -> BoxFuture<'_, Result<ReplicaReply, FsError>> {
        Box::pin(async move {
            tokio::time::sleep(net::delay(&self.dice)).await;
            let request = net::arrived(&REPLICA, &request);
            self.world.trace.event(format_args!("standby asks {request:?}"));
            if self.dice.once_in(8) {
                return Err(FsError::Disconnected);
            }
            let reply = net::answered(self.process.ask(request).await);
            tokio::time::sleep(net::delay(&self.dice)).await;
            if self.dice.once_in(8) { Err(FsError::Disconnected) } else { reply }
        })
    }
}

/// A ledger at work on a host.
struct Present {
    process: Arc<Process>,
    log: Arc<WatchedLog>,
    host: usize,
    turn: u64,
}

/// See the module.
pub(crate) struct Owners {
    world: Arc<World>,
    boot: u64,
    present: Mutex<Present>,
    /// The local store of each host.
    states: Vec<Arc<dyn State>>,
    /// Where each client finds the present owner.
    seats: Vec<watch::Sender<Arc<dyn MetaService>>>,
}

/// The drives' knowledge of the ledger. A ledger that lost no batch is never older than that.
async fn evidence(drives: &Drives) -> Evidence {
    let mut witnesses = Vec::new();
    for (number, drive) in drives {
        // A drive that does not answer is no witness.
        let known = drive.known_ledgers().await.unwrap_or_default();
        let known = known.into_iter().filter(|known| known.ledger == LEDGER);
        witnesses.extend(known.map(|known| Witness { drive: base::DriveId(*number), known }));
    }
    Evidence { witnesses, ..Evidence::default() }
}

/// The log of the ledger, and the local store of each host.
type Files = (Arc<dyn LedgerLog>, Vec<Arc<dyn State>>);

/// Opens the disks of the hosts.
fn open_files(world: &World) -> Result<Files, String> {
    let env = world.env();
    if world.scenario.rivals {
        let mut states: Vec<Arc<dyn State>> = Vec::new();
        for host in 0..2 {
            let path = PathBuf::from(format!("/node/host-{host}/state.redb"));
            env.files.create_dir_all(path.parent().expect("it has one")).map_err(|error| text(&error))?;
            let state = RedbState::open(&env, &path, MIB as usize).map_err(|error| text(&error))?;
            states.push(Arc::new(state));
        }
        return Ok((Arc::new(world.log.clone()), states));
    }
    let logs: Vec<PathBuf> = (0..world.scenario.meta_dirs).map(log_dir).collect();
    for dir in &logs {
        env.files.create_dir_all(dir).map_err(|error| text(&error))?;
    }
    let options = MirrorOptions { io: CopyIo::Inline, sizes: LOG_SIZES, ..MirrorOptions::default() };
    let log = MirroredLog::open(&env, &logs, options).map_err(|error| text(&error))?;
    let stores: Vec<PathBuf> =
        logs.iter().take(STORES_MAX).map(|dir| dir.with_file_name("state.redb")).collect();
    let state = MirroredState::open(&env, &stores, MIB as usize, log.first(), log.whole());
    let state: Arc<dyn State> = Arc::new(state.map_err(|error| text(&error))?);
    Ok((Arc::new(log), vec![state]))
}

/// Opens the ledger on a host.
async fn open_on(
    world: &Arc<World>,
    host: usize,
    (log, state): (&Arc<WatchedLog>, &Arc<dyn State>),
    drives: &Drives,
    earlier_sessions: EarlierSessions,
) -> Result<Owner, OwnerError> {
    let options = OwnerOptions {
        ledger: LEDGER,
        log: log.clone(),
        state: state.clone(),
        env: world.env_of(Machine::Host(host)),
        evidence: evidence(drives).await,
        vacant: None,
        earlier_sessions,
        unstored_bytes_max: 256 << 20,
        standby_grace: Duration::ZERO,
    };
    Owner::open_here(options).await
}

impl Owners {
    /// Opens the ledger on one of its hosts: on the other one, if the store of this one is too old.
    pub(crate) async fn open(world: &Arc<World>, boot: u64, drives: &Drives) -> Result<Self, String> {
        let (log, states) = open_files(world)?;
        let log = Arc::new(WatchedLog::new(world, boot, 0, log));
        let first = world.dice(0x4057 + (boot << 32)).below(states.len() as u64) as usize;
        // All clients were on machines that lost power.
        let open = |host: usize| open_on(world, host, (&log, &states[host]), drives, EarlierSessions::End);
        let (owner, host) = match open(first).await {
            Err(OwnerError::Behind { .. }) if states.len() > 1 => (open(1 - first).await, 1 - first),
            opened => (opened, first),
        };
        let process = Process::new(owner.map_err(|error| text(&error))?);
        let link = |client| {
            let link: Arc<dyn MetaService> = Link::new(world, (boot, 0), client, process.clone());
            watch::channel(link).0
        };
        let seats = (0..world.scenario.clients).map(link).collect();
        let present = Mutex::new(Present { process, log, host, turn: 0 });
        Ok(Self { world: world.clone(), boot, present, states, seats })
    }

    fn present(&self) -> MutexGuard<'_, Present> {
        self.present.lock().expect("no holder of this lock panics")
    }

    /// Where a client finds the present owner.
    pub(crate) fn seat(&self, client: u32) -> watch::Receiver<Arc<dyn MetaService>> {
        self.seats[client as usize].subscribe()
    }

    /// The present owner.
    pub(crate) fn owner(&self) -> Option<Arc<Owner>> {
        self.present().process.owner()
    }

    /// The local store of the present owner.
    pub(crate) fn state(&self) -> Arc<dyn State> {
        self.states[self.present().host].clone()
    }

    /// Takes the ledger from one host to the other from time to time, until `peace` is true.
    pub(crate) async fn fight(self: Arc<Self>, drives: Drives, mut peace: watch::Receiver<bool>) {
        let dice = self.world.dice(0x41_7a15 + (self.boot << 32));
        loop {
            // An owner that does not live for the term of a dead session leaves the wait for it to the next owner.
            let shortest_ms = if self.world.scenario.client_dies { 25_000 } else { 500 };
            let pause = Duration::from_millis(shortest_ms + dice.below(25_000));
            let changed = tokio::select! {
                biased;
                _ = tokio::time::timeout(pause, peace.wait_for(|peace| *peace)) => Ok(()),
                followed = self.stand_by(&dice) => followed,
            };
            if *peace.borrow() {
                return;
            }
            let changed = match changed {
                Ok(()) => self.change_owner(&dice, &drives).await,
                Err(error) => Err(error),
            };
            if let Err(error) = changed {
                // After a power cut everything fails.
                if !self.world.trace.is_cut() {
                    self.world.promises().violate(format!("the ledger is not taken over: {error}"));
                }
                return;
            }
        }
    }

    /// The log of the next owner.
    fn next_log(&self) -> Arc<WatchedLog> {
        let turn = self.present().turn + 1;
        Arc::new(WatchedLog::new(&self.world, self.boot, turn, Arc::new(self.world.log.clone())))
    }

    /// A standby on the host without the ledger, and the clock of that host.
    fn standby(&self, log: Arc<WatchedLog>) -> Result<(Standby, Arc<dyn Clock>), String> {
        let (process, host, turn) = {
            let present = self.present();
            (present.process.clone(), 1 - present.host, present.turn)
        };
        let dice = self.world.dice(0x57_a11d + (self.boot << 32) + (turn << 24));
        let wait = Duration::from_secs(*dice.of(&[1, 3, 60]));
        let owner = Arc::new(OwnerLink { world: self.world.clone(), process, dice });
        let (state, replica) = (self.states[host].clone(), host as u64);
        let standby = Standby::new(StandbyOptions { ledger: LEDGER, log, state, owner, replica, wait });
        let clock = self.world.env_of(Machine::Host(host)).clock;
        Ok((standby.map_err(|error| text(&error))?, clock))
    }

    /// The host without the ledger follows it, until it may take it: signs of life of the owner may be lost on the way. Some
    /// hosts are away for a while before.
    async fn stand_by(&self, dice: &Dice) -> Result<(), String> {
        tokio::time::sleep(Duration::from_secs(dice.below(*dice.of(&[1, 1, 20])))).await;
        let (mut standby, clock) = self.standby(self.next_log())?;
        standby.follow(&*clock).await.map(drop).map_err(|error| text(&error))
    }

    /// The present owner dies, or is cut off from the log; then the other host takes the ledger.
    async fn change_owner(&self, dice: &Dice, drives: &Drives) -> Result<(), String> {
        let world = &self.world;
        let (process, log, mut host, turn) = {
            let present = self.present();
            (present.process.clone(), present.log.clone(), 1 - present.host, present.turn + 1)
        };
        if dice.once_in(2) {
            world.trace.event(format_args!("the owner dies turn={turn}"));
            process.die();
        } else {
            world.trace.event(format_args!("the owner is cut off from the log turn={turn}"));
            log.set_cut(true);
        }
        let next = self.next_log();
        let (mut standby, clock) = self.standby(next.clone())?;
        match tokio::time::timeout(STANDBY_PATIENCE, standby.follow(&*clock)).await {
            Ok(followed) => drop(followed.map_err(|error| text(&error))?),
            Err(_) => {
                world.trace.event(format_args!("the store of host {host} is too old turn={turn}"));
                process.die();
                host = 1 - host;
            }
        }
        let owner = loop {
            let opening = open_on(world, host, (&next, &self.states[host]), drives, EarlierSessions::Resume);
            // Some die while they take the ledger: before or after the seal, or while they apply the log.
            let life = if dice.once_in(3) { Duration::from_millis(dice.below(40)) } else { Duration::MAX };
            match tokio::time::timeout(life, opening).await {
                Ok(owner) => break owner,
                Err(_) => world.trace.event(format_args!("host {host} dies while it takes the ledger")),
            }
        };
        let taken = Process::new(owner.map_err(|error| text(&error))?);
        world.trace.event(format_args!("host {host} has the ledger turn={turn}"));
        world.promises().turns_ns.push(world.clock.boot_ns());
        *self.present() = Present { process: taken.clone(), log: next, host, turn };
        for (client, seat) in (0..).zip(&self.seats) {
            // Clients learn of it one by one.
            tokio::time::sleep(Duration::from_millis(dice.below(300))).await;
            seat.send_replace(Link::new(world, (self.boot, turn), client, taken.clone()));
        }
        tokio::time::sleep(Duration::from_millis(dice.below(4000))).await;
        log.set_cut(false);
        // An owner that was cut off steps down once it reaches the log again.
        for _ in 0..100 {
            if process.owner().is_none_or(|owner| owner.stat().halted) {
                process.die();
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Err("the earlier owner does not step down".to_owned())
    }
}
