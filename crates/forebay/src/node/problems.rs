//! Problems of a node and the advice for them: the lines of `status`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use admin::{DriveInfo, FilesystemInfo, MetaCopyInfo};
use base::units::format_duration;
use control::WideAbsence;

use super::damage::lost_data;
use super::limits::shortage_text;
use super::{Node, State};

/// Facts that decide about the next step with a drive.
pub(super) struct NextSteps {
    /// How long a drive may be away before other drives take over its positions.
    out_after: Duration,
    /// Drives that are members of groups.
    members: BTreeSet<u32>,
    /// Nodes in maintenance, and the seconds that are left.
    maintenance_s: BTreeMap<u32, u64>,
    /// Too much is away for the cluster to give it up by itself.
    absence: Option<WideAbsence>,
    /// Drives that do not answer and that a filesystem waits for, because it is for few nodes.
    bound: BTreeMap<u32, String>,
}

impl Node {
    pub(super) fn next_steps(&self, state: &State) -> NextSteps {
        let members = state.map.groups.iter().flat_map(|group| group.members.iter().map(|drive| drive.0));
        let now_s = self.env.clock.wall_ns() / 1_000_000_000;
        let nodes = state.cluster.nodes.values();
        let left = nodes.filter_map(|node| Some((node.id.0, node.maintenance_left_s(now_s)?)));
        let seen = state.seen();
        let away = state.drives.keys().filter(|id| !seen.readable.contains(id));
        let bound =
            away.filter_map(|id| Some((id.0, state.cluster.bound_to_drive(*id, &seen)?.name.clone())));
        NextSteps {
            out_after: self.out_after,
            members: members.collect(),
            maintenance_s: left.collect(),
            bound: bound.collect(),
            absence: state.cluster.wide_absence(&seen),
        }
    }
}

fn drive_problems(drives: &[DriveInfo], steps: &NextSteps) -> Vec<String> {
    let absence = steps.absence.iter().map(|absence| {
        format!(
            "{absence}: look for the one cause of it; what is lost for good you have to give up yourself (forebay drive \
             remove DIR ID --force)"
        )
    });
    let mut problems: Vec<String> = absence.collect();
    // A drive that is out, and that no group needs, is no problem.
    let matters = |drive: &&DriveInfo| drive.state != "up" && (drive.state != "out" || drive.groups > 0);
    for drive in drives.iter().filter(matters) {
        let (id, state, path) = (drive.id, &drive.state, &drive.path);
        let reason = drive.reason.as_ref().map(|reason| format!(" {reason}")).unwrap_or_default();
        problems.push(format!("drive {id} is {state}: path={path}{reason}{}", next_step(drive, steps)));
    }
    for drive in drives.iter().filter(|drive| drive.state == "up") {
        let reason = drive.reason.iter();
        problems.extend(reason.map(|reason| format!("drive {}: path={} {reason}", drive.id, drive.path)));
    }
    for drive in drives.iter().filter(|drive| drive.state == "out" && drive.groups > 0) {
        let id = drive.id;
        problems.push(if steps.members.contains(&id) {
            format!("what drive {id} held is not rebuilt yet: without a drive to spare, add one (forebay drive add)")
        } else {
            format!("what drive {id} held is being rebuilt on the drives that took its place")
        });
    }
    let damaged = drives.iter().filter(|drive| drive.damaged_shards > 0);
    problems.extend(damaged.map(|drive| {
        let DriveInfo { id, damaged_shards: count, path, .. } = drive;
        format!(
            "drive {id}: {count} shards are damaged: path={path}; repair restores them from other drives, as far as enough \
             of these can be read"
        )
    }));
    let full = drives.iter().filter(|drive| drive.full && drive.state == "up");
    let full: Vec<String> = full.map(|drive| drive.id.to_string()).collect();
    if !full.is_empty() {
        let (which, are) = if full.len() == 1 { ("drive", "is") } else { ("drives", "are") };
        problems.push(format!(
            "{which} {} {are} full, so writes may fail: delete some files, add drives (forebay drive add), or attach an \
             object store (forebay fs attach)",
            full.join(", ")
        ));
    }
    problems
}

/// Advice for a drive that does not serve.
fn next_step(drive: &DriveInfo, steps: &NextSteps) -> String {
    let (id, after) = (drive.id, format_duration(steps.out_after.as_secs()));
    let others = match (steps.maintenance_s.get(&drive.node), &steps.absence) {
        (None, None) => match steps.bound.get(&id) {
            None => format!("after {after} away, drives to spare take over what it held"),
            Some(filesystem) => format!(
                "nobody takes over what it held by itself, because no drive at the nodes of filesystem {filesystem} could: let that use more \
                 nodes (forebay fs set --nodes), or give the drive up (forebay drive remove DIR {id} --force)"
            ),
        },
        (None, Some(_)) => "nobody takes over what it held by itself".to_owned(),
        (Some(left), _) => format!(
            "its node is in maintenance, and nobody takes over what it held for {} more",
            format_duration(*left)
        ),
    };
    match drive.state.as_str() {
        // Where it is, its reason asks for.
        "missing" if drive.path == "-" => format!(
            "; {others}; if it is lost, put another one in its place (forebay drive replace DIR {id} --path PATH)"
        ),
        "missing" => format!(
            "; it is used again within seconds once it is back; {others}; if it is lost, put another one in its place \
             (forebay drive replace DIR {id} --path PATH)"
        ),
        "failed" => format!(
            "; {others}; if it works again, take it back (forebay drive return DIR {id}), if not, put another one in its \
             place (forebay drive replace DIR {id} --path PATH)"
        ),
        _ => String::new(),
    }
}

/// Problems of the copies of a ledger.
fn copy_problems(whose: &str, copies: &[MetaCopyInfo]) -> Vec<String> {
    let bad = copies.iter().filter_map(|copy| Some((copy, copy.problem.as_ref()?)));
    bad.map(|(copy, problem)| format!("metadata of {whose} has no full copy in {}: {problem}", copy.dir))
        .collect()
}

/// What is wrong with the metadata of a filesystem.
fn ledger_problems(filesystem: &FilesystemInfo) -> Vec<String> {
    let mut problems = copy_problems(&format!("filesystem {}", filesystem.name), &filesystem.ledger.copies);
    let (name, reason) = (&filesystem.name, filesystem.ledger.reason.as_deref().unwrap_or_default());
    match filesystem.ledger.state.as_str() {
            "halted" => problems.push(format!(
                "filesystem {name} takes no requests: its metadata could not be written ({reason}); see the log file, \
                 then restart"
            )),
            "no_space" => {
                let dirs: Vec<&str> = filesystem.ledger.copies.iter().map(|copy| copy.dir.as_str()).collect();
                let dirs = dirs.join(", ");
                problems.push(format!("filesystem {name} takes no new data: {reason}; metadata is in {dirs}"));
            }
            _ => {}
        }
    if filesystem.ledger.in_doubt {
        problems.push(format!(
                "filesystem {name} goes on with older metadata: nothing on drives that only newer metadata refers to is \
                 deleted; put that back, or, if it is lost for good, run forebay meta settle DIR"
            ));
    }
    problems
}

/// All problems, one line each.
pub(super) fn problems(
    drives: &[DriveInfo],
    filesystems: &[FilesystemInfo],
    control: &[MetaCopyInfo],
    steps: &NextSteps,
) -> Vec<String> {
    let mut problems = copy_problems("the cluster", control);
    problems.extend(drive_problems(drives, steps));
    problems
        .extend(filesystems.iter().flat_map(|filesystem| lost_data(&filesystem.name, &filesystem.damage)));
    for filesystem in filesystems {
        problems.extend(ledger_problems(filesystem));
        if let Some(shortage) = &filesystem.shortage {
            let (name, text) = (&filesystem.name, shortage_text(shortage));
            problems.push(format!("filesystem {name} has no room: {text}"));
        }
        if filesystem.owed_shards > 0 {
            let (count, name, drives) = (filesystem.owed_shards, &filesystem.name, &filesystem.owed_drives);
            problems.push(format!(
                "{count} shards of {name} are owed to drives {drives:?}: files written without them survive fewer \
                 losses until repair has stored these shards, which it does when the drives are up"
            ));
        }
        if filesystem.write_profile != filesystem.profile {
            let (name, narrow) = (&filesystem.name, &filesystem.write_profile);
            problems.push(format!(
                "new data of {name} is written as {narrow}: too few drives are up for its profile"
            ));
        }
        if filesystem.repair.rebuilding_groups > 0 {
            let (count, name) = (filesystem.repair.rebuilding_groups, &filesystem.name);
            let left = base::units::format_size(filesystem.repair.rebuild_left_bytes);
            problems.push(format!("{count} placement groups of {name} are being rebuilt: left={left}"));
        }
        let missing = filesystem.verified.map_or(0, |verified| verified.shards.missing_shards);
        if missing > 0 {
            problems.push(format!(
                "{missing} shards of {} were not on the drives that should have them: they are restored where enough others are there (see `forebay fs \
                 verify`)",
                filesystem.name
            ));
        }
        if filesystem.groups_elsewhere > 0 && !filesystem.balancing {
            let (count, name) = (filesystem.groups_elsewhere, &filesystem.name);
            problems.push(format!(
                "{count} placement groups of {name} have data at nodes that are not for it: `forebay fs balance` moves it"
            ));
        }
        if filesystem.repair.lost_extents > 0 {
            let (count, name) = (filesystem.repair.lost_extents, &filesystem.name);
            problems.push(format!(
                "DATA LOSS: {count} extents of {name} have fewer shards left than reading needs; the log names them"
            ));
        }
        if let Some((tier, problem)) =
            filesystem.tier.as_ref().and_then(|tier| Some((tier, tier.problem.as_ref()?)))
        {
            problems.push(format!("filesystem {} and store {}: {problem}", filesystem.name, tier.store));
        }
        if filesystem.waiting_extents > 0 {
            let count = filesystem.waiting_extents;
            problems.push(format!("{count} deleted extents of {} wait for a drive", filesystem.name));
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use admin::{ScrubInfo, ShortageInfo, SpaceInfo};

    use super::*;

    fn drive(id: u32, state: &str, groups: u32) -> DriveInfo {
        DriveInfo {
            id,
            uuid: String::new(),
            node: 0,
            path: format!("/dev/{id}"),
            state: state.to_owned(),
            reason: None,
            full: false,
            io_path: None,
            space: SpaceInfo::default(),
            shards: 0,
            trimmed_bytes: 0,
            write_limit_bytes_per_s: None,
            groups,
            scrub: ScrubInfo::default(),
            damaged_shards: 0,
        }
    }

    #[track_caller]
    fn check(drives: &[DriveInfo], members: &[u32], said: &[&str], not_said: &str) {
        let members = members.iter().copied().collect();
        let maintenance_s = BTreeMap::from([(9, 7200)]);
        let bound = BTreeMap::from([(9, "walled".to_owned())]);
        let out_after = Duration::from_secs(600);
        let steps = NextSteps { out_after, members, maintenance_s, bound, absence: None };
        let problems = drive_problems(drives, &steps);
        assert_eq!(problems.is_empty(), said.is_empty(), "{problems:?}");
        let text = problems.join("\n");
        assert!(said.iter().all(|part| text.contains(part)), "{text}");
        assert!(!text.contains(not_said), "{text}");
    }

    #[test]
    fn a_drive_that_does_not_serve_comes_with_the_next_step() {
        let replace = "forebay drive replace DIR 2 --path PATH";
        check(&[drive(2, "missing", 8)], &[2], &["within seconds", "after 10m away", replace], "return");
        check(&[drive(2, "failed", 8)], &[2], &["forebay drive return DIR 2", replace], "within seconds");
        check(&[drive(2, "up", 8), drive(3, "out", 0)], &[2], &[], "drive");
        let in_maintenance = DriveInfo { node: 9, ..drive(2, "missing", 8) };
        check(&[in_maintenance], &[2], &["in maintenance, and nobody", "2h"], "after 10m");
        let bound = ["nodes of filesystem walled", "drive remove DIR 9 --force"];
        check(&[drive(9, "missing", 8)], &[9], &bound, "after 10m");
    }

    #[test]
    fn a_drive_without_a_path_does_not_come_back_by_itself() {
        let nowhere = DriveInfo { path: "-".to_owned(), ..drive(2, "missing", 8) };
        check(&[nowhere], &[2], &["after 10m away", "forebay drive replace DIR 2"], "within seconds");
    }

    #[test]
    fn a_drive_that_was_replaced_asks_for_no_other() {
        check(&[drive(2, "out", 8)], &[2], &["forebay drive add"], "took its place");
        check(&[drive(2, "out", 8)], &[6], &["took its place"], "drive add");
    }

    #[test]
    fn damaged_shards_are_a_problem_until_they_are_restored() {
        let damaged = DriveInfo { damaged_shards: 31, ..drive(2, "up", 8) };
        check(&[drive(0, "up", 8), damaged], &[0, 2], &["drive 2: 31 shards are damaged"], "drive 0");
    }

    #[test]
    fn a_filesystem_without_room_comes_with_what_is_used_up_and_the_next_step() {
        let check = |of: &str, tiered, said: &[&str]| {
            let of = of.to_owned();
            let text = shortage_text(&ShortageInfo { of, left_bytes: 0, refusing: true, tiered });
            assert!(said.iter().chain(&["fail with ENOSPC"]).all(|part| text.contains(part)), "{text}");
        };
        check("drives", false, &["drives are full", "forebay drive add", "forebay fs attach"]);
        check("drives", true, &["drives are full", "forebay drive add", "forebay tier status"]);
        check("ssd_quota", false, &["SSD quota", "forebay fs set --ssd", "forebay fs attach"]);
        check("ssd_quota", true, &["SSD quota", "forebay fs set --ssd", "forebay tier status"]);
        check("size", false, &["size", "forebay fs set --size"]);
    }

    #[test]
    fn full_drives_are_named_in_one_line() {
        let full = |id| DriveInfo { full: true, ..drive(id, "up", 8) };
        check(&[full(0), drive(1, "up", 8), full(2)], &[0, 1, 2], &["drives 0, 2 are full", "delete"], "1");
        check(&[full(4)], &[4], &["drive 4 is full"], "drives 4");
    }
}
