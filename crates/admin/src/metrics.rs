//! The state of a node and its cluster as metrics of Prometheus, in the text format of OpenMetrics. Names, units and meaning are in
//! `docs/operate/metrics.md`. All are made from the answers of `status` and `node list`, so they say the same as these.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::api::{DriveInfo, FilesystemInfo, NodeStatus, SpaceInfo, SpareInfo};
use crate::logs::LogInfo;
use crate::nodes::NodeInfo;
use crate::verification::VerifiedInfo;

/// The media type of [`metrics`].
pub const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type Labels = Vec<(&'static str, String)>;

/// One value of a metric.
type Sample = (Labels, f64);

/// Metrics on their way to text.
#[derive(Default)]
struct Exposition(Registry);

impl Exposition {
    /// A value that goes up and down.
    fn gauge(&mut self, name: &str, help: &str, samples: impl IntoIterator<Item = Sample>) {
        let family = Family::<Labels, Gauge<f64, AtomicU64>>::default();
        for (labels, value) in samples {
            family.get_or_create(&labels).set(value);
        }
        self.0.register(name, help, family);
    }

    /// A sum since the start of the process. Its name ends with `_total` in the text.
    fn counter(&mut self, name: &str, help: &str, samples: impl IntoIterator<Item = Sample>) {
        let family = Family::<Labels, Counter<f64, AtomicU64>>::default();
        for (labels, value) in samples {
            family.get_or_create(&labels).inc_by(value);
        }
        self.0.register(name, help, family);
    }
}

fn one(value: f64) -> [Sample; 1] {
    [(Labels::new(), value)]
}

fn flag(value: bool) -> f64 {
    if value { 1.0 } else { 0.0 }
}

/// The metrics of a node. `nodes` are those of the cluster, as far as they are known.
pub fn metrics(status: &NodeStatus, nodes: &[NodeInfo]) -> String {
    let mut all = Exposition::default();
    process(&mut all, status);
    for_nodes(&mut all, nodes);
    // Without an answer of the owner of the metadata, nothing is known of the cluster now.
    if !status.alone {
        for_drives(&mut all, &status.drives);
        for_filesystems(&mut all, &status.filesystems);
        for_upkeep(&mut all, &status.filesystems);
        for_verification(&mut all, &status.filesystems);
        for_tiers(&mut all, &status.filesystems);
        for_logs(&mut all, &status.log);
        status.spare.iter().for_each(|spare| for_spare(&mut all, spare));
    }
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = encode(&mut text, &all.0);
    text
}

fn process(all: &mut Exposition, status: &NodeStatus) {
    let version = vec![("version", status.version.clone()), ("cluster", status.cluster.clone())];
    all.gauge("forebay_build_info", "Version of the program, and the cluster", [(version, 1.0)]);
    all.gauge("forebay_uptime_seconds", "Time since the start of the node", one(status.uptime_s as f64));
    let healthy = flag(status.state == "healthy");
    all.gauge("forebay_healthy", "Whether status says healthy", one(healthy));
    all.gauge(
        "forebay_stuck",
        "Whether a lock or call of the node does not move",
        one(flag(status.state == "stuck")),
    );
    all.gauge(
        "forebay_alone",
        "Whether the owner of the metadata does not answer this node",
        one(flag(status.alone)),
    );
    all.gauge("forebay_problems", "Problems that status lists", one(status.problems.len() as f64));
    let memory = [("resident", status.memory.resident_bytes), ("budget", status.memory.budget_bytes)];
    let memory = memory.map(|(kind, bytes)| (vec![("kind", kind.to_owned())], bytes as f64));
    all.gauge("forebay_memory_bytes", "Memory of the node's process, and its limit", memory);
    all.gauge(
        "forebay_metadata_bytes",
        "Copies of the metadata on the owner's disks",
        one(status.metadata_bytes as f64),
    );
}

fn for_spare(all: &mut Exposition, spare: &SpareInfo) {
    let kinds = [("kept", spare.kept_bytes), ("left", spare.left_bytes), ("used", spare.used_bytes)];
    let kinds = kinds.map(|(kind, bytes)| (vec![("kind", kind.to_owned())], bytes as f64));
    all.gauge(
        "forebay_spare_bytes",
        "Space of the drives that stays free for a loss, and what losses have used of it",
        kinds,
    );
}

fn for_nodes(all: &mut Exposition, nodes: &[NodeInfo]) {
    let labels = |node: &NodeInfo| vec![("node", node.id.to_string()), ("name", node.name.clone())];
    let up = nodes.iter().map(|node| (labels(node), flag(node.state == "up")));
    all.gauge("forebay_node_up", "Whether the owner of the metadata reaches the node", up);
    let owner = nodes.iter().map(|node| (labels(node), flag(node.owner)));
    all.gauge("forebay_node_owner", "Whether the node owns the metadata", owner);
    let left = nodes.iter().map(|node| (labels(node), node.maintenance_s.unwrap_or(0) as f64));
    all.gauge("forebay_node_maintenance_seconds", "How long the maintenance of the node still lasts", left);
}

fn drive_labels(drive: &DriveInfo) -> Labels {
    vec![("drive", drive.id.to_string()), ("node", drive.node.to_string())]
}

fn for_drives(all: &mut Exposition, drives: &[DriveInfo]) {
    let values =
        |value: fn(&DriveInfo) -> f64| drives.iter().map(move |drive| (drive_labels(drive), value(drive)));
    let states = drives.iter().map(|drive| {
        let mut labels = drive_labels(drive);
        labels.push(("state", drive.state.clone()));
        (labels, 1.0)
    });
    all.gauge("forebay_drive_state", "1 with the present state of the drive", states);
    all.gauge("forebay_drive_up", "Whether the drive is up", values(|drive| flag(drive.state == "up")));
    all.gauge("forebay_drive_full", "Whether the drive takes no new data", values(|drive| flag(drive.full)));
    let space = drives.iter().flat_map(|drive| {
        let SpaceInfo { capacity_bytes, live_bytes, owed_bytes, garbage_bytes, reserved_bytes, free_bytes } =
            drive.space;
        [
            ("capacity", capacity_bytes),
            ("live", live_bytes),
            ("owed", owed_bytes),
            ("garbage", garbage_bytes),
            ("reserved", reserved_bytes),
            ("free", free_bytes),
        ]
        .map(|(kind, bytes)| {
            let mut labels = drive_labels(drive);
            labels.push(("kind", kind.to_owned()));
            (labels, bytes as f64)
        })
    });
    all.gauge(
        "forebay_drive_space_bytes",
        "Space of the drive; all kinds but capacity add up to that",
        space,
    );
    all.gauge("forebay_drive_shards", "Shards on the drive", values(|drive| drive.shards as f64));
    all.gauge(
        "forebay_drive_damaged_shards",
        "Shards that are known to be damaged now",
        values(|drive| drive.damaged_shards as f64),
    );
    all.counter(
        "forebay_drive_bad_shards",
        "Damaged shards that scrubs have found",
        values(|drive| drive.scrub.bad_shards as f64),
    );
    let scrubbed =
        drives.iter().filter_map(|drive| Some((drive_labels(drive), drive.scrub.oldest_s? as f64)));
    all.gauge("forebay_drive_verified_seconds", "Time since the oldest verification of a shard", scrubbed);
}

fn of_filesystems(
    filesystems: &[FilesystemInfo],
    value: fn(&FilesystemInfo) -> f64,
) -> impl Iterator<Item = Sample> {
    filesystems
        .iter()
        .map(move |filesystem| (vec![("filesystem", filesystem.name.clone())], value(filesystem)))
}

fn for_filesystems(all: &mut Exposition, filesystems: &[FilesystemInfo]) {
    let values = |value: fn(&FilesystemInfo) -> f64| of_filesystems(filesystems, value);
    all.gauge("forebay_filesystem_size_bytes", "Size as df shows it", values(|it| it.total_bytes as f64));
    all.gauge("forebay_filesystem_free_bytes", "Room for content", values(|it| it.free_bytes as f64));
    all.gauge(
        "forebay_filesystem_used_bytes",
        "Content, before redundancy",
        values(|it| it.used_bytes as f64),
    );
    all.gauge(
        "forebay_filesystem_drive_bytes",
        "Content on drives, before redundancy",
        values(|it| it.ssd_used_bytes as f64),
    );
    all.gauge(
        "forebay_filesystem_inodes",
        "Files, directories and other kinds",
        values(|it| it.inodes as f64),
    );
    all.gauge(
        "forebay_filesystem_refusing",
        "Whether writes are refused for lack of room",
        values(|it| flag(it.shortage.as_ref().is_some_and(|shortage| shortage.refusing))),
    );
    all.gauge(
        "forebay_filesystem_serving",
        "Whether the metadata of the filesystem takes changes",
        values(|it| flag(it.ledger.state == "serving")),
    );
    all.counter(
        "forebay_filesystem_commits",
        "Batches of changes of the metadata, from the first one on",
        values(|it| it.ledger.committed_seq as f64),
    );
}

fn for_verification(all: &mut Exposition, filesystems: &[FilesystemInfo]) {
    let values = |value: fn(&VerifiedInfo) -> u64| {
        filesystems.iter().filter_map(move |filesystem| {
            let value = value(&filesystem.verified?);
            Some((vec![("filesystem", filesystem.name.clone())], value as f64))
        })
    };
    all.gauge(
        "forebay_verified_seconds",
        "Time since the last comparison of all shards with the metadata",
        values(|it| it.age_s),
    );
    all.gauge(
        "forebay_unknown_shards",
        "Of its shards, those on drives that did not answer, or on their way",
        values(|it| it.shards.unknown_shards),
    );
    all.gauge(
        "forebay_missing_shards",
        "Of its shards, those that the drive did not have",
        values(|it| it.shards.missing_shards),
    );
}

fn for_upkeep(all: &mut Exposition, filesystems: &[FilesystemInfo]) {
    let values = |value: fn(&FilesystemInfo) -> f64| of_filesystems(filesystems, value);
    all.gauge("forebay_owed_shards", "Shards that repair has to write", values(|it| it.owed_shards as f64));
    all.gauge("forebay_owed_bytes", "Bytes of these shards", values(|it| it.owed_bytes as f64));
    all.gauge(
        "forebay_rebuild_left_bytes",
        "Bytes left to rebuild",
        values(|it| it.repair.rebuild_left_bytes as f64),
    );
    all.gauge(
        "forebay_rebuilding_groups",
        "Placement groups that are being rebuilt",
        values(|it| it.repair.rebuilding_groups as f64),
    );
    all.counter(
        "forebay_repaired_bytes",
        "Owed shards that were stored",
        values(|it| it.repair.repaired_bytes as f64),
    );
    all.counter(
        "forebay_rebuilt_bytes",
        "Shards that rebuilds stored",
        values(|it| it.repair.rebuilt_bytes as f64),
    );
    all.counter(
        "forebay_healed_shards",
        "Damaged or missing shards that were restored",
        values(|it| it.repair.healed_shards as f64),
    );
    all.gauge(
        "forebay_lost_extents",
        "Extents with fewer shards than a read needs, drives that are away included",
        values(|it| it.repair.lost_extents as f64),
    );
    all.gauge(
        "forebay_lost_bytes",
        "Content that is lost for good",
        values(|it| it.damage.lost_bytes as f64),
    );
    all.gauge("forebay_narrow_bytes", "Data narrower than its profile", values(|it| it.narrow_bytes as f64));
    all.counter(
        "forebay_reclaimed_extents",
        "Extents that were deleted",
        values(|it| it.reclaimed_extents as f64),
    );
    all.counter(
        "forebay_packed_bytes",
        "Bytes that packing wrote anew",
        values(|it| it.pack.packed_bytes as f64),
    );
}

fn for_tiers(all: &mut Exposition, filesystems: &[FilesystemInfo]) {
    let tiers: Vec<(Labels, &crate::tiers::TierInfo)> = filesystems
        .iter()
        .filter_map(|it| {
            let tier = it.tier.as_ref()?;
            Some((vec![("filesystem", it.name.clone()), ("store", tier.store.clone())], tier))
        })
        .collect();
    let values = |value: fn(&crate::tiers::TierInfo) -> f64| {
        tiers.iter().map(move |(labels, tier)| (labels.clone(), value(tier)))
    };
    all.gauge(
        "forebay_tier_queued_bytes",
        "Content that waits for its upload",
        values(|it| it.queued_bytes as f64),
    );
    all.gauge(
        "forebay_tier_both_bytes",
        "Content on drives and in the store",
        values(|it| it.both_bytes as f64),
    );
    all.gauge("forebay_tier_away_bytes", "Content in the store only", values(|it| it.away_bytes as f64));
    all.gauge("forebay_tier_stored_bytes", "Blobs in the store", values(|it| it.stored_bytes as f64));
    all.gauge("forebay_tier_blobs", "Number of blobs in use", values(|it| it.blobs as f64));
    all.gauge(
        "forebay_tier_stopped",
        "Whether an error stops tiering",
        values(|it| flag(it.problem.is_some())),
    );
}

fn for_logs(all: &mut Exposition, log: &LogInfo) {
    let standbys = || {
        log.ledgers.iter().flat_map(|ledger| {
            ledger.standbys.iter().map(move |standby| {
                let labels = vec![("ledger", ledger.ledger.clone()), ("node", standby.node.to_string())];
                (labels, ledger.last_seq, standby)
            })
        })
    };
    let last = log.ledgers.iter().map(|it| (vec![("ledger", it.ledger.clone())], it.last_seq as f64));
    all.gauge("forebay_log_last_entry", "Number of the last entry of the log", last);
    let behind = standbys().map(|(labels, last, it)| (labels, last.saturating_sub(it.stored_seq) as f64));
    all.gauge("forebay_log_standby_behind_entries", "Entries that a node which may take over lacks", behind);
    let ages = standbys().map(|(labels, _, it)| (labels, it.age_s as f64));
    all.gauge("forebay_log_standby_age_seconds", "Time since the owner heard of that node", ages);
    let members = log.members.iter().map(|it| (vec![("address", it.address.clone())], flag(it.answers)));
    all.gauge("forebay_log_member_up", "Whether a server of the engine with the logs answers", members);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::logs::{EngineMemberInfo, LedgerLog, StandbyInfo};

    #[test]
    fn values_labels_and_the_end_are_those_of_the_format() {
        let standby = StandbyInfo { node: 2, stored_seq: 7, age_s: 1 };
        let status = NodeStatus {
            state: "healthy".to_owned(),
            version: "1".to_owned(),
            cluster: "a\"b\\".to_owned(),
            log: LogInfo {
                ledgers: vec![LedgerLog { ledger: "main".to_owned(), last_seq: 9, standbys: vec![standby] }],
                members: vec![EngineMemberInfo { address: "https://a:1".to_owned(), answers: false }],
                ..LogInfo::default()
            },
            ..NodeStatus::default()
        };
        let text = metrics(&status, &[]);
        for line in [
            "forebay_healthy 1.0",
            "forebay_build_info{version=\"1\",cluster=\"a\\\"b\\\\\"} 1.0",
            "forebay_log_standby_behind_entries{ledger=\"main\",node=\"2\"} 2.0",
            "forebay_log_member_up{address=\"https://a:1\"} 0.0",
            "# TYPE forebay_log_member_up gauge",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in {text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn a_node_alone_says_nothing_of_the_cluster() {
        let log = LogInfo { ledgers: vec![LedgerLog::default()], ..LogInfo::default() };
        let text = metrics(&NodeStatus { alone: true, log, ..NodeStatus::default() }, &[]);
        assert!(text.contains("forebay_alone 1.0\n") && !text.contains("forebay_log_last_entry{"), "{text}");
    }
}
