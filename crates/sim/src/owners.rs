//! The owners of the ledger: one in each boot, or two hosts that take it from each other.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::units::MIB;
use base::{FsError, SessionId};
use meta::history::{Evidence, Witness};
use meta::log::{CopyIo, LedgerLog, LogSizes, MirrorOptions, MirroredLog};
use meta::owner::{EarlierSessions, Owner, OwnerOptions, Standby};
use meta::state::{MirroredState, RedbState, State};
use tokio::sync::{Notify, watch};
use wire::BoxFuture;
use wire::drive::DriveService;
use wire::message::Envelope;
use wire::meta::{Claim, EventSink, MetaReply, MetaRequest, MetaService, Resumed};
use wire::position::Position;

use crate::ledger::WatchedLog;
use crate::net::Link;
use crate::node::{Drives, LEDGER, log_dir, text};
use crate::world::{Dice, World};

/// Most directories with a local store; a third directory has a log only.
const STORES_MAX: usize = 2;
/// Short files: a boot fills some of them, and the space zeroed ahead is read whenever a log is opened.
const LOG_SIZES: LogSizes =
    LogSizes { file_bytes: 128 << 10, zero_ahead_bytes: 32 << 10, reserve_bytes: 32 << 10 };

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
    Evidence { witnesses, accept_older: false }
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

impl Owners {
    /// Opens the ledger on one of its hosts.
    pub(crate) async fn open(world: &Arc<World>, boot: u64, drives: &Drives) -> Result<Self, String> {
        let (log, states) = open_files(world)?;
        let host = world.dice(0x4057 + (boot << 32)).below(states.len() as u64) as usize;
        let log = Arc::new(WatchedLog::new(world, boot, (host, 0), log));
        let options = OwnerOptions {
            ledger: LEDGER,
            log: log.clone(),
            state: states[host].clone(),
            env: world.env(),
            evidence: evidence(drives).await,
            // All clients were on machines that lost power.
            earlier_sessions: EarlierSessions::End,
            unstored_bytes_max: 256 << 20,
        };
        let owner = Owner::open_here(options).await.map_err(|error| text(&error))?;
        let process = Process::new(owner);
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
            let pause = Duration::from_millis(500 + dice.below(25_000));
            let changed = tokio::select! {
                biased;
                _ = tokio::time::timeout(pause, peace.wait_for(|peace| *peace)) => Ok(()),
                followed = self.stand_by() => followed,
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

    /// The log as the host without the ledger sees it, for its next turn; and its local store.
    fn rival(&self) -> (Arc<WatchedLog>, usize) {
        let (host, turn) = {
            let present = self.present();
            (1 - present.host, present.turn + 1)
        };
        (
            Arc::new(WatchedLog::new(&self.world, self.boot, (host, turn), Arc::new(self.world.log.clone()))),
            host,
        )
    }

    /// The host without the ledger follows it, until it may take it: signs of life of the owner may be lost on the way.
    async fn stand_by(&self) -> Result<(), String> {
        let (log, host) = self.rival();
        let state = self.states[host].clone();
        let mut standby = Standby::new(LEDGER, log.clone(), state.clone()).map_err(|error| text(&error))?;
        let clock = self.world.env().clock;
        let trim = async {
            loop {
                tokio::time::sleep(Duration::from_secs(1)).await;
                // What both hosts have stored leaves the log.
                let stored = state.applied().map(|applied| log.trim(applied.seq));
                if let Ok(trimmed) = stored {
                    let _ = trimmed.await;
                }
            }
        };
        tokio::select! {
            biased;
            followed = standby.follow(&*clock) => followed.map_err(|error| text(&error)),
            () = trim => Ok(()),
        }
    }

    /// The present owner dies, or is cut off from the log; then the other host takes the ledger.
    async fn change_owner(&self, dice: &Dice, drives: &Drives) -> Result<(), String> {
        let world = &self.world;
        let (process, log, turn) = {
            let present = self.present();
            (present.process.clone(), present.log.clone(), present.turn + 1)
        };
        if dice.once_in(2) {
            world.trace.event(format_args!("the owner dies turn={turn}"));
            process.die();
        } else {
            world.trace.event(format_args!("the owner is cut off from the log turn={turn}"));
            log.set_cut(true);
        }
        let (next, host) = self.rival();
        let mut standby =
            Standby::new(LEDGER, next.clone(), self.states[host].clone()).map_err(|error| text(&error))?;
        standby.follow(&*world.env().clock).await.map_err(|error| text(&error))?;
        let options = || async {
            OwnerOptions {
                ledger: LEDGER,
                log: next.clone(),
                state: self.states[host].clone(),
                env: world.env(),
                evidence: evidence(drives).await,
                earlier_sessions: EarlierSessions::Resume,
                unstored_bytes_max: 256 << 20,
            }
        };
        let owner = Owner::open_here(options().await).await.map_err(|error| text(&error))?;
        world.trace.event(format_args!("host {host} has the ledger turn={turn}"));
        let taken = Process::new(owner);
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
