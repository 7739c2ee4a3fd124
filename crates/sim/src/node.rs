//! A running node: the part of the simulation that a crash ends.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base::units::MIB;
use base::{ClusterId, DriveId, DriveUuid, Epoch, LedgerId, PgId};
use client::{Client, ClientOptions, Peers, Reach, Topology};
use control::Plan;
use drive::{Drive, Existing, FormatOptions, OpenOptions, Preallocate, Trim};
use layout::DriveState;
use meta::state::State;
use tokio::runtime::Handle;
use tokio::sync::watch;
use upkeep::{
    DamageKeeper, OrphanCollector, OrphanOptions, OtherNodes, Pace, PackOptions, Packer, Reclaimer,
    RepairStat, Repairer, ScrubTargets, Scrubber, Verifier, VerifyOptions,
};
use wire::drive::DriveService;

use crate::cluster::ControlNode;
use crate::disks::SimDrive;
use crate::helpers::Helpers;
use crate::owners::Owners;
use crate::spread::Links;
use crate::store::Tier;
use crate::world::{Machine, World};

pub(crate) const CLUSTER: ClusterId = ClusterId([7; 16]);
pub(crate) const LEDGER: LedgerId = LedgerId(1);
/// Packing starts soon, and often with few pieces.
const PACKING: PackOptions = PackOptions {
    age: Duration::from_secs(1),
    pause: Duration::from_millis(700),
    least_bytes: Some(16 << 10),
};
/// Only crashes close ranges, so no write to a drive is under way in a closed range.
const ORPHANS: OrphanOptions =
    OrphanOptions { settle: Duration::from_secs(3), pause: Duration::from_millis(1500) };

const VERIFYING: VerifyOptions =
    VerifyOptions { begin: Duration::from_secs(2), pause: Duration::from_secs(5) };

/// Interval at which the node acts on the state of the drives.
const TEND_EVERY: Duration = Duration::from_millis(900);

/// The drives that could be opened, by number.
pub(crate) type Drives = BTreeMap<u32, Arc<SimDrive>>;

/// See the module.
pub(crate) struct Node {
    pub(crate) control: ControlNode,
    pub(crate) owners: Arc<Owners>,
    pub(crate) drives: Drives,
    pub(crate) clients: Vec<Client>,
    helpers: Option<Arc<dyn OtherNodes>>,
    reclaimer: Reclaimer,
    repairer: Repairer,
    damage: DamageKeeper,
    packer: Option<Packer>,
    orphans: OrphanCollector,
    verifier: Option<Verifier>,
    scrubber: Scrubber,
    tier: tokio::sync::Mutex<Tier>,
    pace: Arc<Pace>,
    publish: watch::Sender<Arc<Topology>>,
    _scrubbed: watch::Sender<ScrubTargets>,
}

/// Directory of a copy of the log.
pub(crate) fn log_dir(copy: u32) -> PathBuf {
    PathBuf::from(format!("/node/meta-{copy}/ledger-1/log"))
}

/// Path of a drive.
pub(crate) fn drive_path(number: u32) -> PathBuf {
    Path::new("/node/drives").join(format!("{number}.img"))
}

pub(crate) fn text(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

/// Formats the drives of a new node.
pub(crate) fn format(world: &World) -> Result<(), String> {
    for number in 0..world.scenario.all_drives() {
        let options = FormatOptions {
            cluster: CLUSTER,
            uuid: DriveUuid([number as u8; 16]),
            capacity_bytes: Some(world.scenario.drive_bytes),
            segment_bytes: None,
            existing: Existing::Keep,
            preallocate: Preallocate::Reserve,
        };
        Drive::format(&world.env(), &drive_path(number), &options).map_err(|error| text(&error))?;
    }
    Ok(())
}

/// Opens the drives that are not given up.
fn open_drives(world: &Arc<World>, boot: u64) -> Result<(Drives, Option<DriveId>), String> {
    let (mut drives, mut behind) = (Drives::new(), None);
    for number in 0..world.scenario.all_drives() {
        let id = DriveId(number);
        if world.cluster().state(id) == DriveState::Out && world.scenario.newcomer() != Some(number) {
            continue;
        }
        let mut options = OpenOptions::new(CLUSTER);
        options.mark = world.cluster().mark(id);
        options.checkpoint_every_bytes = 2 * MIB;
        (options.trim, options.trim_run_bytes) = (Trim::Always, 64 << 10);
        let drive = match Drive::open(&world.env(), id, &drive_path(number), &options) {
            Ok(drive) => drive,
            // A drive damaged beyond use counts as lost, and the others replace its shards.
            Err(_) if world.promises().hurt_drives.contains(&number) => {
                world.promises().drive_lost = true;
                continue;
            }
            Err(error) => return Err(format!("drive {number}: {}", text(&error))),
        };
        if drive.recovery().has_gap {
            let found = drive.recovery().found;
            world
                .trace
                .event(format_args!("drive {number} is an older copy: {found:?} of {:?}", options.mark));
            if world.scenario.copies_return && number == world.scenario.victim() {
                behind = Some(id);
            } else if !world.promises().hurt_drives.contains(&number) {
                return Err(format!("drive {number} counts as an older copy of itself"));
            }
        }
        drives.insert(number, Arc::new(SimDrive::new(world, boot, id, drive)));
    }
    Ok((drives, behind))
}

fn scrub_targets(drives: &Drives, client: Client) -> ScrubTargets {
    let service = |(number, drive): (&u32, &Arc<SimDrive>)| {
        (DriveId(*number), Arc::clone(drive) as Arc<dyn DriveService>)
    };
    ScrubTargets { drives: drives.iter().map(service).collect(), clients: [(LEDGER, client)].into() }
}

/// The cluster map as a client knows it, which is on the node of its number. Another machine learns of each change some time later.
fn map_of(
    world: &World,
    (boot, client): (u64, u32),
    mut all: watch::Receiver<Arc<Topology>>,
) -> watch::Receiver<Arc<Topology>> {
    let lags = client > 0 && world.scenario.drifts;
    let is_local = world.scenario.local;
    if !lags && !is_local {
        return all;
    }
    let seen = move |all: &Arc<Topology>| {
        let mut places = all.map.drives.iter().map(|drive| drive.place);
        let here = places.find(|place| place.node == client).filter(|_| is_local);
        Arc::new(Topology::clone(all).seen_from(here, is_local))
    };
    let (tell, told) = watch::channel(seen(&all.borrow_and_update()));
    let dice = world.dice(0x1a_7e00 + (boot << 32) + u64::from(client));
    tokio::spawn(async move {
        while all.changed().await.is_ok() {
            if lags {
                tokio::time::sleep(Duration::from_millis(dice.below(*dice.of(&[10, 500, 4000])))).await;
            }
            let next = seen(&all.borrow_and_update());
            tell.send_replace(next);
        }
    });
    told
}

/// Has the owner look again at what a drive holds that returned as an older copy.
async fn recheck(world: &World, client: &Client) -> Result<(), String> {
    let victim = DriveId(world.scenario.victim());
    if world.cluster().is_behind(victim) {
        client.recheck(victim).await.map_err(|error| format!("recheck: {error}"))?;
    }
    Ok(())
}

impl Node {
    /// Starts the node from its disks, as tasks of the present runtime.
    ///
    /// # Errors
    /// Why it does not start, as text.
    pub(crate) async fn start(world: &Arc<World>, boot: u64) -> Result<Self, String> {
        let control = ControlNode::open(world, boot).await?;
        let (drives, behind) = open_drives(world, boot)?;
        control.note_marks(world, &drives, behind).await;
        control.take_back(world).await;
        let set = control.write_set(world).await;
        let topology = world.cluster().topology(&drives, set);
        let owners = Arc::new(Owners::open(world, boot, &drives).await?);
        let (publish, topology) = watch::channel(Arc::new(topology));
        let mut tier = Tier::new(world, boot);
        let mut clients = Vec::new();
        let peers = Peers::default();
        let links = world.scenario.link_bytes_per_s.map(Links::new);
        for number in 0..world.scenario.clients {
            let options = ClientOptions {
                env: world.env_of(Machine::Client(number)),
                runtime: Handle::current(),
                ledger: LEDGER,
                owner: owners.seat(number),
                topology: match &links {
                    Some(links) => links.of(number, topology.clone()),
                    None => map_of(world, (boot, number), topology.clone()),
                },
                profile: world.cluster().profile(),
                dirty_bytes_max: 4 * MIB,
                map_bytes_max: 4096,
                tier: tier.link(),
                // A machine with a clock of its own shares nothing in memory.
                peers: if world.scenario.drifts { Peers::default() } else { peers.clone() },
                reach: Reach::here(),
            };
            let client = Client::open(options).await.map_err(|error| text(&error))?;
            client.set_early(world.scenario.early);
            clients.push(client);
        }
        let reclaimer = Reclaimer::start(clients[0].clone(), &Handle::current());
        let env = || world.env_of(Machine::Client(0));
        let (pace, client, runtime) = (Arc::new(Pace::new(env())), clients[0].clone(), Handle::current());
        let helpers = Helpers::of(world, boot, &clients);
        let repairer = Repairer::start(env(), client.clone(), helpers.clone(), pace.clone(), &runtime);
        let start_packer = || Packer::start(env(), client.clone(), pace.clone(), PACKING, &runtime);
        let packer = world.scenario.packs.then(start_packer);
        let damage = DamageKeeper::start(env(), client.clone(), pace.clone(), &runtime);
        let orphans = OrphanCollector::start(env(), client.clone(), pace.clone(), ORPHANS, &runtime);
        let verify = || Verifier::start(env(), client.clone(), pace.clone(), VERIFYING, &runtime);
        let verifier = world.scenario.verifies.then(verify);
        let (scrubbed, targets) = watch::channel(scrub_targets(&drives, client));
        let scrubber = Scrubber::start(env(), [], targets, pace.clone(), &runtime);
        tier.start(&clients[0], helpers.clone(), &pace);
        recheck(world, &clients[0]).await?;
        world.trace.event(format_args!("node is up boot={boot}"));
        Ok(Self {
            control,
            owners,
            drives,
            clients,
            helpers,
            reclaimer,
            repairer,
            damage,
            packer,
            orphans,
            verifier,
            scrubber,
            tier: tokio::sync::Mutex::new(tier),
            pace,
            publish,
            _scrubbed: scrubbed,
        })
    }

    /// Publishes the present drives and groups to clients.
    pub(crate) async fn publish(&self, world: &World) {
        let set = self.control.write_set(world).await;
        let topology = world.cluster().topology(&self.drives, set);
        self.publish.send_replace(Arc::new(topology));
    }

    /// Gives drives up that nobody can read.
    pub(crate) async fn give_up(&self, world: &World, lost: &[DriveId]) {
        let mut seen = world.cluster().seen();
        for id in lost {
            seen.up.remove(id);
            seen.readable.remove(id);
        }
        let decide = |plan: &mut Plan| lost.iter().for_each(|id| plan.give_up(*id, &seen));
        self.control.plan(world, decide).await;
        self.publish(world).await;
    }

    /// The groups whose new members have all their shards, with the epoch for which that holds.
    pub(crate) fn rebuilt(&self) -> HashMap<PgId, Epoch> {
        self.repairer.rebuilt()
    }

    /// Whether the drives that got positions have all their shards.
    pub(crate) fn is_rebuilt(&self, world: &World) -> bool {
        let rebuilt = self.rebuilt();
        world.cluster().rebuilding().iter().all(|group| rebuilt.get(&group.id) == Some(&group.epoch))
    }

    /// The progress of repair.
    pub(crate) fn repair_stat(&self) -> RepairStat {
        self.repairer.stat()
    }

    /// Begins to detach the object store, unless that has begun.
    pub(crate) async fn detach(&self, world: &World) {
        let mut tier = self.tier.lock().await;
        if world.promises().detaching && tier.is_running() {
            return;
        }
        world.trace.event(format_args!("the store is left from now on"));
        world.promises().detaching = true;
        tier.stop().await;
        tier.start(&self.clients[0], self.helpers.clone(), &self.pace);
    }

    /// Describes tiering work that is still to be done.
    pub(crate) async fn untiered(&self, world: &World) -> Option<String> {
        let dead = world.promises().dead_clients.clone();
        for (_, client) in (0..).zip(&self.clients).filter(|(number, _)| !dead.contains(number)) {
            client.return_numbers().await;
        }
        if let Ok(dead) = self.clients[0].dead_blobs().await
            && !dead.is_empty()
        {
            return Some(format!("blobs are not deleted: {dead:?}"));
        }
        self.tier.lock().await.unfinished()
    }

    /// Reacts to changes of the drives, until the future is dropped.
    pub(crate) async fn tend(&self, world: &World) {
        loop {
            tokio::time::sleep(TEND_EVERY).await;
            self.control.note_marks(world, &self.drives, None).await;
            let rebuilt = self.rebuilt();
            if self.control.finish(world, &rebuilt).await {
                world.trace.event(format_args!("placement groups are rebuilt"));
            }
            // Also what somebody changed who did not come to publish it.
            if world.cluster().map().epoch != self.publish.borrow().map.epoch {
                self.publish(world).await;
            }
            if world.scenario.scrubs {
                self.scrub(world);
            }
        }
    }

    /// Starts a scrub of every drive, unless one is under way.
    fn scrub(&self, world: &World) {
        let stats = self.scrubber.stats();
        for number in self.drives.keys() {
            let id = DriveId(*number);
            let under_way = stats.get(&id).is_some_and(|stat| stat.now);
            if !under_way && world.cluster().state(id) != DriveState::Out {
                self.scrubber.scrub_now(id);
            }
        }
    }

    /// Reacts to changes of the drives for `time`.
    pub(crate) async fn rest(&self, world: &World, time: Duration) {
        // `tend` does not end by itself.
        let _ = tokio::time::timeout(time, self.tend(world)).await;
    }

    /// Describes upkeep work that is still to be done.
    pub(crate) fn unfinished(&self, world: &World) -> Option<String> {
        if let Some(group) = world.cluster().rebuilding().first() {
            return Some(format!("placement groups are not rebuilt, such as {group:?}"));
        }
        let lost = self.damage.stat().sums;
        if lost.pieces + lost.unnoted > 0 {
            return Some(format!("pieces are said to be unreadable: {lost:?}"));
        }
        let left = self.packer.as_ref().map_or(0, |packer| packer.stat().convert_bytes);
        (left > 0).then(|| format!("{left} bytes lie in extents of another shape"))
    }

    /// Verifies all shards until none is missing. Returns what is wrong.
    pub(crate) async fn verify(&self, world: &World, (rest, times): (Duration, u32)) -> Option<String> {
        let verifier = self.verifier.as_ref()?;
        for _ in 0..times {
            let number = verifier.verify_now();
            self.rest(world, rest).await;
            let last = verifier.stat().last.filter(|last| last.number >= number);
            if last.is_some_and(|last| last.total.missing == 0) {
                let found = verifier.stat().found;
                let is_wrong = found > 0 && !world.scenario.forgets && !world.is_faulty();
                return is_wrong.then(|| format!("{found} shards are said to be missing, and none was lost"));
            }
        }
        Some(format!("verification does not end: {:?}", verifier.stat()))
    }

    /// Stops the packer, so that the node can come to rest.
    pub(crate) async fn stop_packing(&mut self) {
        if let Some(packer) = self.packer.take() {
            packer.stop().await;
        }
    }

    /// Ends clients and owner in order, so that everything is in the local store.
    ///
    /// # Errors
    /// What could not be made durable, or does not end.
    pub(crate) async fn stop(mut self, world: &World) -> Result<(Arc<dyn State>, Drives), String> {
        self.control.note_marks(world, &self.drives, None).await;
        self.stop_packing().await;
        self.tier.lock().await.stop().await;
        self.scrubber.stop().await;
        self.damage.stop().await;
        self.orphans.stop().await;
        if let Some(verifier) = self.verifier.take() {
            verifier.stop().await;
        }
        self.repairer.stop().await;
        self.reclaimer.stop().await;
        let dead = world.promises().dead_clients.clone();
        for (_, client) in (0..).zip(&self.clients).filter(|(number, _)| !dead.contains(number)) {
            client.close().await.map_err(|error| format!("client does not close: {error}"))?;
        }
        let Some(owner) = self.owners.owner() else { return Err("there is no owner".to_owned()) };
        let state = self.owners.state();
        owner.stop();
        for _ in 0..100 {
            let stat = owner.stat();
            if stat.halted {
                return Err("the owner has halted".to_owned());
            }
            if state.applied().is_ok_and(|applied| applied.seq.0 == stat.committed_seq) {
                return Ok((state, self.drives));
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        Err("the owner does not end".to_owned())
    }
}
