//! The scenario of a seed: the machine, its clients, and the faults.

use layout::Profile;

use crate::world::Dice;

/// The parameters of a run.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Everything else follows from it.
    pub seed: u64,
    /// The profile of new data.
    pub profile: Profile,
    /// Number of drives: one more than the profile needs if drives die.
    pub drives: u32,
    /// Size of each drive.
    pub drive_bytes: u64,
    /// Directories with copies of the metadata.
    pub meta_dirs: u32,
    /// Clients of the filesystem.
    pub clients: u32,
    /// Processes, spread over the clients; each does one operation at a time.
    pub processes: u32,
    /// Operations of each process in each boot.
    pub operations: u32,
    /// Starts of the node; all boots but the last end with a loss of power.
    pub boots: u64,
    /// One in this number of requests is sent again.
    pub repeat_once_in: u64,
    /// Drives die and come back.
    pub drives_die: bool,
    /// Syncs of drives or of the log fail.
    pub syncs_fail: bool,
    /// Bits flip on drives.
    pub bits_flip: bool,
    /// Drives are slow at times.
    pub drives_slow: bool,
    /// Files become so large that the drives are full.
    pub fills: bool,
    /// Small pieces are packed, very soon.
    pub packs: bool,
    /// Everything on the drives is verified every few seconds.
    pub scrubs: bool,
    /// A drive is set aside for a while; new extents are narrower if need be.
    pub narrows: bool,
    /// A drive is given up or emptied, and others take its place.
    pub loses: bool,
    /// The profile of the filesystem changes.
    pub converts: bool,
    /// Data moves to an object store when it is a few seconds old.
    pub tiers: bool,
    /// The store is down at times, loses answers, and sometimes returns damaged bytes.
    pub store_fails: bool,
    /// The filesystem leaves the store in the last boot.
    pub detaches: bool,
    /// Between boots, an older copy of a drive takes its place.
    pub copies_return: bool,
    /// Reads last long enough for their extents to be dropped in the meantime.
    pub dawdles: bool,
    /// Appends to the log, or their answers, are lost at times.
    pub log_loses: bool,
    /// The log is on an engine of its own, and two owners take the ledger from each other.
    pub rivals: bool,
    /// Clients are cut off from the owner at times, some of them for longer than their sessions' term.
    pub cuts: bool,
    /// Largest entry of the log, so small at times that most batches take several entries.
    pub log_entry_bytes: usize,
    /// Each client and each host of the ledger is a machine of its own: their clocks run at different rates, and clients share
    /// nothing in memory.
    pub drifts: bool,
    /// The machine of a client dies while others work, and does not come back before the next boot.
    pub client_dies: bool,
    /// Changes of names return before they are durable.
    pub early: bool,
    /// Drives in one node; the last node may have fewer.
    pub node_drives: u32,
    /// New data goes near to where it is written.
    pub local: bool,
    /// The filesystem is for some of the nodes for a while.
    pub limits: bool,
    /// All shards are compared with the ledger every few seconds.
    pub verifies: bool,
    /// A drive loses shards and does not notice.
    pub forgets: bool,
    /// There is one drive more, which is added at some time, or replaces the drive that is lost.
    pub grows: bool,
    /// Clients other than the first restore shards on the drives of their nodes, so that the first need not.
    pub helps: bool,
    /// Bytes per second that a machine sends to others, and receives. Each client runs on the machine with the drives of one node.
    pub link_bytes_per_s: Option<u64>,
}

const MIB: u64 = 1 << 20;

impl Scenario {
    /// The scenario of a seed.
    pub fn new(seed: u64) -> Self {
        let dice = Dice::new(seed ^ 0x5ce0_a710);
        let profile: Profile =
            dice.of(&["1+0", "1+0", "r2", "r3", "2+1", "4+2"]).parse().expect("these are profiles");
        let spare = profile.m() > 0 && dice.once_in(2);
        let drives_die = spare && dice.once_in(2);
        let fills = dice.once_in(6);
        let mut scenario = Self {
            seed,
            profile,
            drives: u32::from(profile.n()) + u32::from(spare),
            drive_bytes: if fills { 20 * MIB } else { 256 * MIB },
            meta_dirs: *dice.of(&[1, 1, 2, 3]),
            clients: 1 + dice.below(3) as u32,
            processes: 1 + dice.below(4) as u32,
            operations: 20 + dice.below(60) as u32,
            boots: 1 + dice.below(4),
            repeat_once_in: *dice.of(&[20, 100, u64::MAX]),
            drives_die,
            syncs_fail: dice.once_in(5),
            bits_flip: profile.m() > 0 && !drives_die && dice.once_in(4),
            drives_slow: dice.once_in(4),
            fills,
            packs: dice.once_in(2),
            scrubs: dice.once_in(3),
            narrows: dice.once_in(2),
            loses: dice.once_in(2) && spare && !fills,
            converts: dice.once_in(4) && profile.m() > 0 && !fills,
            tiers: dice.once_in(2),
            store_fails: dice.once_in(2),
            detaches: dice.once_in(3),
            copies_return: dice.once_in(3),
            dawdles: dice.once_in(4),
            log_loses: dice.once_in(4),
            rivals: dice.once_in(3),
            cuts: dice.once_in(4),
            log_entry_bytes: *dice.of(&[usize::MAX, usize::MAX, 4096, 300]),
            drifts: dice.once_in(3),
            client_dies: dice.once_in(2),
            early: dice.once_in(2),
            node_drives: *dice.of(&[1, 2, 2]),
            grows: dice.once_in(3) && !fills,
            local: dice.once_in(3),
            limits: dice.once_in(3) && !fills,
            verifies: dice.once_in(2),
            forgets: dice.once_in(2) && profile.m() > 0 && !fills,
            helps: true,
            link_bytes_per_s: None,
        };
        // At most one drive may lack shards at a time.
        scenario.copies_return &= profile.m() > 0
            && !(drives_die || scenario.bits_flip || scenario.syncs_fail || scenario.loses || fills);
        scenario.forgets &= scenario.verifies
            && !(drives_die || scenario.bits_flip || scenario.syncs_fail || scenario.copies_return);
        scenario.narrows &= !fills && profile.narrowed(scenario.drives - 1).is_some();
        // Extents that need another shape get it from the packer.
        scenario.packs |= scenario.narrows || scenario.converts;
        scenario.scrubs |= scenario.bits_flip;
        scenario.client_dies &= scenario.drifts && scenario.clients > 1;
        (scenario.store_fails, scenario.detaches) =
            (scenario.store_fails && scenario.tiers, scenario.detaches && scenario.tiers && !fills);
        scenario
    }

    /// Machines with drives and one client each, behind a network, without work and faults.
    pub(crate) fn quiet(machines: u32, node_drives: u32, helps: bool, link_bytes_per_s: u64) -> Self {
        Self {
            seed: 1,
            profile: "r2".parse().expect("this is a profile"),
            drives: machines * node_drives,
            drive_bytes: 256 * MIB,
            meta_dirs: 1,
            clients: machines,
            processes: 0,
            operations: 0,
            boots: 1,
            repeat_once_in: u64::MAX,
            drives_die: false,
            syncs_fail: false,
            bits_flip: false,
            drives_slow: false,
            fills: false,
            packs: false,
            scrubs: false,
            narrows: false,
            loses: true,
            converts: false,
            tiers: false,
            store_fails: false,
            detaches: false,
            copies_return: false,
            dawdles: false,
            log_loses: false,
            rivals: false,
            cuts: false,
            log_entry_bytes: usize::MAX,
            drifts: false,
            client_dies: false,
            early: false,
            node_drives,
            grows: false,
            helps,
            local: false,
            limits: false,
            verifies: false,
            forgets: false,
            link_bytes_per_s: Some(link_bytes_per_s),
        }
    }

    /// The drive that comes later.
    pub(crate) fn newcomer(&self) -> Option<u32> {
        self.grows.then_some(self.drives)
    }

    /// Every drive, with the one that comes later.
    pub(crate) fn all_drives(&self) -> u32 {
        self.drives + u32::from(self.grows)
    }

    /// The drive that is lost or damaged, the same in every boot, so that the other drives can replace its shards.
    pub(crate) fn victim(&self) -> u32 {
        (self.seed % u64::from(self.drives)) as u32
    }
}
