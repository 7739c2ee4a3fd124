//! A running node: what a crash ends.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use base::units::MIB;
use base::{ClusterId, DriveId, DriveUuid, Epoch, LedgerId, PgId};
use client::{Client, ClientOptions, Topology};
use drive::{Drive, Existing, FormatOptions, OpenOptions, Preallocate, Trim};
use layout::{ClusterMap, DriveState, MapDrive, PlacementGroup};
use meta::log::{CopyIo, LedgerLog, LogSizes, MirrorOptions, MirroredLog};
use meta::owner::{Owner, OwnerOptions};
use meta::state::{MirroredState, State};
use tokio::runtime::Handle;
use tokio::sync::watch;
use upkeep::{OrphanCollector, OrphanOptions, Pace, PackOptions, Packer, Reclaimer, Repairer};
use wire::drive::DriveService;

use crate::disks::SimDrive;
use crate::ledger::WatchedLog;
use crate::net::Link;
use crate::world::World;

const CLUSTER: ClusterId = ClusterId([7; 16]);
pub(crate) const LEDGER: LedgerId = LedgerId(1);
/// Directories with a local store; a third has a log only.
const STORES_MAX: usize = 2;
/// Short files: a boot fills some of them, and what is zeroed ahead is read whenever a log is opened.
const LOG_SIZES: LogSizes =
    LogSizes { file_bytes: 128 << 10, zero_ahead_bytes: 32 << 10, reserve_bytes: 32 << 10 };
/// Pieces are packed soon, and often with few others.
const PACKING: PackOptions = PackOptions {
    age: Duration::from_secs(1),
    pause: Duration::from_millis(700),
    least_bytes: Some(16 << 10),
};
/// Ranges are closed by crashes only, so no write to a drive is under way in one.
const ORPHANS: OrphanOptions =
    OrphanOptions { settle: Duration::from_secs(3), pause: Duration::from_millis(1500) };

/// The drives that could be opened, by number.
pub(crate) type Drives = BTreeMap<u32, Arc<SimDrive>>;

/// See the module.
pub(crate) struct Node {
    pub(crate) owner: Arc<Owner>,
    pub(crate) state: Arc<dyn State>,
    pub(crate) drives: Drives,
    pub(crate) clients: Vec<Client>,
    reclaimer: Reclaimer,
    repairer: Repairer,
    packer: Option<Packer>,
    orphans: OrphanCollector,
    _publish: watch::Sender<Arc<Topology>>,
}

/// Where a copy of the log is.
pub(crate) fn log_dir(copy: u32) -> PathBuf {
    PathBuf::from(format!("/node/meta-{copy}/ledger-1/log"))
}

/// Where a drive lies.
pub(crate) fn drive_path(number: u32) -> PathBuf {
    Path::new("/node/drives").join(format!("{number}.img"))
}

fn text(error: &dyn std::error::Error) -> String {
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
    for number in 0..world.scenario.drives {
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

/// Placement groups over all drives: every rotation of them, cut to the profile's width.
fn groups(world: &World) -> Vec<PlacementGroup> {
    let (drives, n) = (world.scenario.drives, u32::from(world.scenario.profile.n()));
    let count = if drives > n { drives } else { 1 };
    let group = |number: u32| PlacementGroup {
        id: PgId(number),
        epoch: Epoch(1),
        members: (0..n).map(|at| DriveId((number + at) % drives)).collect(),
        rebuilding: Vec::new(),
    };
    (0..count).map(group).collect()
}

fn open_drives(world: &Arc<World>, boot: u64) -> Result<(Topology, Drives), String> {
    let groups = groups(world);
    let mut topology = Topology {
        groups: groups.iter().map(|group| group.id).collect(),
        map: ClusterMap { epoch: Epoch(1), drives: Vec::new(), groups },
        drives: HashMap::new(),
        profile: world.scenario.profile,
        narrow: Vec::new(),
    };
    let mut drives = Drives::new();
    for number in 0..world.scenario.drives {
        let (id, uuid) = (DriveId(number), DriveUuid([number as u8; 16]));
        let mut options = OpenOptions::new(CLUSTER);
        options.checkpoint_every_bytes = 2 * MIB;
        (options.trim, options.trim_run_bytes) = (Trim::Always, 64 << 10);
        let opened = Drive::open(&world.env(), id, &drive_path(number), &options);
        topology.map.drives.push(MapDrive { id, uuid, domain: u64::from(number), state: DriveState::Up });
        let drive = match opened {
            Ok(drive) => drive,
            // Damaged beyond use: it counts as lost, and the others make up for it.
            Err(_) if world.promises().hurt_drives.contains(&number) => {
                world.promises().drive_lost = true;
                continue;
            }
            Err(error) => return Err(format!("drive {number}: {}", text(&error))),
        };
        let drive = Arc::new(SimDrive::new(world, boot, id, drive));
        topology.drives.insert(id, drive.clone() as Arc<dyn DriveService>);
        drives.insert(number, drive);
    }
    Ok((topology, drives))
}

impl Node {
    /// Starts the node on whatever is on the disk, as tasks of the present runtime.
    ///
    /// # Errors
    /// Why it does not start, for people.
    pub(crate) async fn start(world: &Arc<World>, boot: u64) -> Result<Self, String> {
        let env = world.env();
        let (topology, drives) = open_drives(world, boot)?;
        let logs: Vec<PathBuf> = (0..world.scenario.meta_dirs).map(log_dir).collect();
        for dir in &logs {
            env.files.create_dir_all(dir).map_err(|error| text(&error))?;
        }
        let options = MirrorOptions { io: CopyIo::Inline, sizes: LOG_SIZES, ..MirrorOptions::default() };
        let log = MirroredLog::open(&env, &logs, options).map_err(|error| text(&error))?;
        let stores: Vec<PathBuf> =
            logs.iter().take(STORES_MAX).map(|dir| dir.with_file_name("state.redb")).collect();
        let state = MirroredState::open(&env, &stores, MIB as usize, log.first());
        let log = Arc::new(WatchedLog::new(world, boot, log));
        let state: Arc<dyn State> = Arc::new(state.map_err(|error| text(&error))?);
        let options =
            OwnerOptions { ledger: LEDGER, log, state: state.clone(), env, unstored_bytes_max: 256 << 20 };
        let owner = Arc::new(Owner::open_here(options).await.map_err(|error| text(&error))?);
        let (publish, topology) = watch::channel(Arc::new(topology));
        let mut clients = Vec::new();
        for number in 0..world.scenario.clients {
            let options = ClientOptions {
                env: world.env(),
                runtime: Handle::current(),
                ledger: LEDGER,
                meta: Link::new(world, boot, number, owner.clone()),
                topology: topology.clone(),
                profile: world.scenario.profile,
                provisioned_bytes: None,
                dirty_bytes_max: 4 * MIB,
                map_bytes_max: 4096,
                tier: client::TierLink::none(),
            };
            clients.push(Client::open(options).await.map_err(|error| text(&error))?);
        }
        let reclaimer = Reclaimer::start(clients[0].clone(), &Handle::current());
        let pace = Arc::new(Pace::new(world.env()));
        let (client, runtime) = (clients[0].clone(), Handle::current());
        let repairer = Repairer::start(world.env(), client.clone(), pace.clone(), &runtime);
        let start_packer = || Packer::start(world.env(), client.clone(), pace.clone(), PACKING, &runtime);
        let packer = world.scenario.packs.then(start_packer);
        let orphans = OrphanCollector::start(world.env(), client, pace, ORPHANS, &runtime);
        world.trace.event(format_args!("node is up boot={boot}"));
        Ok(Self { owner, state, drives, clients, reclaimer, repairer, packer, orphans, _publish: publish })
    }

    /// Moves nothing any more, so that everything can come to rest.
    pub(crate) async fn stop_packing(&mut self) {
        if let Some(packer) = self.packer.take() {
            packer.stop().await;
        }
    }

    /// Ends clients and owner in good order, so that everything is in the local store.
    ///
    /// # Errors
    /// What could not be made durable or does not end.
    pub(crate) async fn stop(mut self) -> Result<(Arc<dyn State>, Drives), String> {
        self.stop_packing().await;
        self.orphans.stop().await;
        self.repairer.stop().await;
        self.reclaimer.stop().await;
        for client in &self.clients {
            client.close().await.map_err(|error| format!("client does not close: {error}"))?;
        }
        self.owner.stop();
        for _ in 0..100 {
            let stat = self.owner.stat();
            if stat.halted {
                return Err("the owner has halted".to_owned());
            }
            if self.state.applied().is_ok_and(|applied| applied.seq.0 == stat.committed_seq) {
                return Ok((self.state, self.drives));
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        Err("the owner does not end".to_owned())
    }
}
