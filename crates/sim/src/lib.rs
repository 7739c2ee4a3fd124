//! A whole node in one process on a simulated disk: for tests that crash it and look at what is left.
//!
//! [`Machine`] is what survives a crash: files. [`Node`] is what a crash ends: drives, the owner of one ledger, and
//! clients. The disk, its faults and what a crash keeps follow from the seed and the order of calls. The owner has
//! threads and clients run on a runtime, so that order is *not* the same in every run of one seed: a seed makes a
//! failure likely to come back, not certain. What the tests assert holds in every order.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use base::env::Env;
use base::env::sim::Sim;
use base::units::MIB;
use base::{ClusterId, DriveId, DriveUuid, Epoch, FsError, LedgerId, PgId};
use client::{Client, ClientOptions, Topology};
use drive::{Drive, Existing, FormatOptions, OpenOptions, Preallocate};
use layout::{ClusterMap, DriveState, MapDrive, PlacementGroup, Profile};
use meta::log::FileLog;
use meta::owner::{Owner, OwnerOptions};
use meta::state::RedbState;
use tokio::sync::watch;
use wire::drive::DriveService;

const CLUSTER: ClusterId = ClusterId([7; 16]);
const LEDGER: LedgerId = LedgerId(1);
const DRIVE_BYTES: u64 = 48 * MIB;

/// A machine: its disk, and how the filesystem on it is protected.
pub struct Machine {
    /// Clock, randomness and files.
    pub sim: Sim,
    profile: Profile,
}

/// Why a node did not start: a person would read it.
#[derive(Debug, thiserror::Error)]
#[error("node does not start: {0}")]
pub struct StartError(String);

fn failed(error: impl std::fmt::Display) -> StartError {
    StartError(error.to_string())
}

impl Machine {
    /// A machine with one formatted drive file for each shard of the profile.
    ///
    /// # Errors
    /// If a drive cannot be formatted.
    pub fn new(seed: u64, profile: Profile) -> Result<Self, StartError> {
        let machine = Self { sim: Sim::new(seed), profile };
        for number in 0..u32::from(profile.n()) {
            let options = FormatOptions {
                cluster: CLUSTER,
                uuid: DriveUuid([number as u8; 16]),
                capacity_bytes: Some(DRIVE_BYTES),
                segment_bytes: Some(MIB),
                existing: Existing::Keep,
                preallocate: Preallocate::Reserve,
            };
            Drive::format(&machine.env(), &drive_path(number), &options).map_err(failed)?;
        }
        Ok(machine)
    }

    fn env(&self) -> Env {
        self.sim.env()
    }

    /// Starts the node on whatever is on the disk. Must not be called on a runtime.
    ///
    /// # Errors
    /// If a drive or the ledger cannot be opened.
    pub fn start(&self) -> Result<Node, StartError> {
        let ids = 0..u32::from(self.profile.n());
        let mut topology = Topology { groups: vec![PgId(0)], profile: self.profile, ..Topology::default() };
        let members = ids.clone().map(DriveId).collect();
        let group = PlacementGroup::new(PgId(0), members);
        topology.map = ClusterMap { epoch: Epoch(1), drives: Vec::new(), groups: vec![group] };
        for number in ids {
            let (id, uuid) = (DriveId(number), DriveUuid([number as u8; 16]));
            let options = OpenOptions::new(CLUSTER);
            let drive = Drive::open(&self.env(), id, &drive_path(number), &options).map_err(failed)?;
            topology.drives.insert(id, drive as Arc<dyn DriveService>);
            let domain = u64::from(number);
            topology.map.drives.push(MapDrive { id, uuid, domain, state: DriveState::Up });
        }
        let dir = Path::new("/node/meta/ledger-1");
        let log = Arc::new(FileLog::open(&self.env(), &dir.join("log")).map_err(failed)?);
        let state =
            Arc::new(RedbState::open(&self.env(), &dir.join("state.redb"), MIB as usize).map_err(failed)?);
        let options = OwnerOptions { ledger: LEDGER, log, state, env: self.env() };
        let owner = Arc::new(Owner::open(options).map_err(failed)?);
        let (publish, topology) = watch::channel(Arc::new(topology));
        Ok(Node { env: self.env(), profile: self.profile, owner, topology, _publish: publish })
    }
}

fn drive_path(number: u32) -> PathBuf {
    Path::new("/node/drives").join(format!("{number}.img"))
}

/// A running node.
pub struct Node {
    env: Env,
    profile: Profile,
    owner: Arc<Owner>,
    topology: watch::Receiver<Arc<Topology>>,
    _publish: watch::Sender<Arc<Topology>>,
}

impl Node {
    /// A client of the node's filesystem. Its tasks run on the present runtime.
    ///
    /// # Errors
    /// If the owner does not answer.
    pub async fn client(&self) -> Result<Client, FsError> {
        Client::open(ClientOptions {
            env: self.env.clone(),
            runtime: tokio::runtime::Handle::current(),
            ledger: LEDGER,
            meta: self.owner.clone(),
            topology: self.topology.clone(),
            profile: self.profile,
            provisioned_bytes: None,
            dirty_bytes_max: 16 * MIB,
        })
        .await
    }

    /// Ends the owner's threads in good order.
    pub fn stop(&self) {
        self.owner.stop();
    }
}
