//! `status`.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use admin::{DriveInfo, FilesystemInfo, LogInfo, NodeStatus, SetUpkeep, ShardCounts, SpareInfo, UpkeepInfo};
use anyhow::Result;
use base::units::format_duration;

use super::ask;
use super::drives::drive_table;
use super::filesystems::filesystem_table;
use super::output::{Format, bytes, print};
use crate::checks::shown;

/// Exit status if some data cannot be read for good.
const DAMAGED: u8 = 3;

pub(super) fn status(dir: &Path, format: Format) -> Result<ExitCode> {
    let status = ask(dir, |client| async move { client.status().await })?;
    print(format, &status, text)?;
    Ok(if status.state == "damaged" { ExitCode::from(DAMAGED) } else { ExitCode::SUCCESS })
}

pub(super) fn metrics(dir: &Path) -> Result<()> {
    let told = ask(dir, |client| async move {
        let status = client.status().await?;
        // The owner of the metadata knows the nodes.
        let nodes = if status.alone { Vec::new() } else { client.nodes().await? };
        Ok(admin::metrics(&status, &nodes))
    })?;
    print!("{told}");
    Ok(())
}

pub(super) fn upkeep(dir: &Path, request: SetUpkeep, format: Format) -> Result<()> {
    let info = ask(dir, |client| async move { client.set_upkeep(&request).await })?;
    print(format, &info, |info| {
        let state = if info.paused { "paused" } else { "going on" };
        format!("background work: {state}, at most {}/s{}", bytes(info.rate_bytes_per_s), held_back(info))
    })
}

/// What users wait for, and what background work is held back to for them.
fn held_back(info: &UpkeepInfo) -> String {
    let time = |us: u64| shown(Duration::from_micros(us));
    let users = match info.p99_us {
        0 => String::new(),
        p99_us => format!("; 99 of 100 requests of users take at most {}", time(p99_us)),
    };
    let limit = match info.keep_p99_below_us {
        0 => "; it is not held back for users".to_owned(),
        limit_us => format!("; held back when that is more than {}", time(limit_us)),
    };
    let held = info.held_to_bytes_per_s.map_or(String::new(), |held| format!(", now to {}/s", bytes(held)));
    users + &limit + &held
}

/// One line while background work is held back.
fn pace(info: &UpkeepInfo) -> String {
    match info.held_to_bytes_per_s {
        Some(_) => {
            format!("pace    background work at most {}/s{}\n", bytes(info.rate_bytes_per_s), held_back(info))
        }
        None => String::new(),
    }
}

/// One line if space stays free for a loss.
pub(super) fn spare(spare: Option<&SpareInfo>) -> String {
    let Some(SpareInfo { domains, level, kept_bytes, left_bytes, used_bytes, all_bytes }) = spare else {
        return String::new();
    };
    let plural = if *domains == 1 { "" } else { "s" };
    let used = if *used_bytes == 0 { String::new() } else { format!(", {} are used", bytes(*used_bytes)) };
    let (kept, left, all) = (bytes(*kept_bytes), bytes(*left_bytes), bytes(*all_bytes));
    format!(
        "spare   {kept} of {all} stay free; {left} of that for the loss of {domains} {level}{plural}{used}\n"
    )
}

/// Work of repair and rebuild, one line for each filesystem that has some.
fn repairs(status: &NodeStatus) -> String {
    let line = |filesystem: &FilesystemInfo| {
        let repair = &filesystem.repair;
        let left = filesystem.owed_bytes + repair.rebuild_left_bytes;
        let eta = repair.eta_s.map_or(String::new(), |eta| format!(", {eta} s left"));
        let by =
            if repair.helpers == 0 { String::new() } else { format!(" by {} nodes", repair.helpers + 1) };
        let narrow = match filesystem.narrow_bytes {
            0 => String::new(),
            narrow => format!(", {} narrower than {}", bytes(narrow), filesystem.profile),
        };
        let balancing = match filesystem.balance_left_groups {
            Some(groups) => format!(", being balanced: {groups} placement groups left"),
            None if filesystem.balancing => ", being balanced".to_owned(),
            None => String::new(),
        };
        let busy = left + filesystem.narrow_bytes > 0 || filesystem.balancing;
        busy.then(|| {
            format!(
                "repair  {}: owed {}, to rebuild {}, {}/s{by}{eta}{narrow}{balancing}\n",
                filesystem.name,
                bytes(filesystem.owed_bytes),
                bytes(repair.rebuild_left_bytes),
                bytes(repair.bytes_per_s),
            )
        })
    };
    let paused =
        if status.upkeep.paused { "background work is paused (forebay upkeep --resume)\n" } else { "" };
    status.filesystems.iter().filter_map(line).collect::<String>() + paused
}

/// Damage, one line for each filesystem that has some.
fn damage(status: &NodeStatus) -> String {
    let line = |filesystem: &FilesystemInfo| {
        let damage = &filesystem.damage;
        (damage.found > 0).then(|| {
            format!(
                "damage  {}: {} shards and blobs found, {} repaired, {} when it was too late; {} files cannot be read \
                 now\n",
                filesystem.name, damage.found, damage.repaired, damage.unrepairable, damage.lost_files
            )
        })
    };
    status.filesystems.iter().filter_map(line).collect()
}

/// The last comparison of all shards with the metadata, one line for each filesystem that has any.
fn verified(status: &NodeStatus) -> String {
    let line = |filesystem: &FilesystemInfo| {
        let verified = filesystem.verified.filter(|verified| verified.shards.expected_shards > 0)?;
        let ShardCounts { expected_shards, owed_shards, unknown_shards, missing_shards } = verified.shards;
        let found = expected_shards.saturating_sub(owed_shards + unknown_shards + missing_shards);
        let (name, age) = (&filesystem.name, format_duration(verified.age_s));
        Some(format!("verified {name}: {found} of {expected_shards} shards were on their drives {age} ago\n"))
    };
    status.filesystems.iter().filter_map(line).collect()
}

/// Packing of content on the drives, one line for each filesystem that has content.
fn packing(status: &NodeStatus) -> String {
    let line = |filesystem: &FilesystemInfo| {
        let (pack, orphans) = (&filesystem.pack, &filesystem.orphans);
        let left = match (pack.left_bytes, pack.convert_bytes) {
            (0, 0) => String::new(),
            (left, 0) => format!(", to pack {}", bytes(left)),
            (left, convert) => {
                let eta = pack.eta_s.map_or(String::new(), |eta| format!(", {eta} s left"));
                let (left, convert) = (bytes(left), bytes(convert));
                format!(", to pack {left}, to convert {convert} ({}/s{eta})", bytes(pack.bytes_per_s))
            }
        };
        let why = match pack.state.as_str() {
            "repair_first" => ", repair goes first",
            "no_room" => ", too little room on the drives",
            _ => "",
        };
        let percent = pack.waste_bytes * 100 / pack.allocated_bytes.max(1);
        let orphan = match orphans.deleted_extents {
            0 => String::new(),
            deleted => format!(", {deleted} orphans deleted"),
        };
        (pack.sweeps > 0 && pack.stored_bytes + pack.inline_bytes > 0).then(|| {
            format!(
                "packing {}: {} allocated for {}, {percent} % waste{left}{why}{orphan}\n",
                filesystem.name,
                bytes(pack.allocated_bytes),
                bytes(pack.stored_bytes),
            )
        })
    };
    status.filesystems.iter().filter_map(line).collect()
}

/// State of tiering, one line for each filesystem that has a store.
fn tiers(status: &NodeStatus) -> String {
    status
        .filesystems
        .iter()
        .filter_map(|filesystem| filesystem.tier.as_ref())
        .map(super::tiers::line)
        .collect()
}

/// Drives that slow writes down to the speed at which they clean.
fn debt(status: &NodeStatus) -> String {
    let line = |drive: &DriveInfo| {
        let limit = drive.write_limit_bytes_per_s?;
        Some(format!(
            "debt   drive {}: deleted space grows faster than it is cleaned, so it takes {}/s of new data\n",
            drive.id,
            bytes(limit)
        ))
    };
    status.drives.iter().filter_map(line).collect()
}

/// Where the logs are, unless only this node is known.
fn logs(log: &LogInfo) -> String {
    let nodes: BTreeSet<u32> = log.ledgers.iter().flat_map(|it| &it.standbys).map(|it| it.node).collect();
    let nodes: Vec<String> = nodes.iter().map(u32::to_string).collect();
    let follow = match nodes.len() {
        0 => "no other node follows".to_owned(),
        1 => format!("node {} follows", nodes[0]),
        _ => format!("nodes {} follow", nodes.join(" and ")),
    };
    match log.at.as_str() {
        "" | "files" => String::new(),
        engine => format!("  metadata in {engine}: node {} owns it, {follow}\n", log.owner),
    }
}

fn text(status: &NodeStatus) -> String {
    let space = &status.space;
    let problems: String = status.problems.iter().map(|problem| format!("  ! {problem}\n")).collect();
    let threads = status.drives.iter().any(|drive| drive.io_path.as_deref() == Some("thread_pool"));
    let io = if threads { "  drives use threads: io_uring is not available or not wanted\n" } else { "" };
    let memory =
        format!("memory {} of {}\n", bytes(status.memory.resident_bytes), bytes(status.memory.budget_bytes));
    let s3 =
        status.s3.as_ref().map(|url| format!("  S3 at {url}, TLS on the same port\n")).unwrap_or_default();
    format!(
        "{state}  cluster={cluster} version={version} pid={pid} up={up}s\n{problems}{io}{logs}{s3}\n\
         space  raw {raw} = live {live} + owed {owed} + garbage {garbage} + reserved {reserved} + free {free}; \
         metadata {metadata}\n{spare}{memory}{repairs}{pace}{damage}{verified}{packing}{tiers}{debt}\n{fs}\n\n{drives}",
        state = status.state,
        logs = logs(&status.log),
        cluster = status.cluster,
        version = status.version,
        pid = status.pid,
        up = status.uptime_s,
        raw = bytes(space.capacity_bytes),
        live = bytes(space.live_bytes),
        owed = bytes(space.owed_bytes),
        metadata = bytes(status.metadata_bytes),
        garbage = bytes(space.garbage_bytes),
        reserved = bytes(space.reserved_bytes),
        free = bytes(space.free_bytes),
        spare = spare(status.spare.as_ref()),
        verified = verified(status),
        repairs = repairs(status),
        pace = pace(&status.upkeep),
        damage = damage(status),
        packing = packing(status),
        tiers = tiers(status),
        debt = debt(status),
        fs = filesystem_table(&status.filesystems),
        drives = drive_table(&status.drives),
    )
}
