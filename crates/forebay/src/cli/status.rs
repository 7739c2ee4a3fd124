//! `status`.

use std::path::Path;

use admin::{FilesystemInfo, NodeStatus, SetUpkeep};
use anyhow::Result;

use super::ask;
use super::drives::drive_table;
use super::filesystems::filesystem_table;
use super::output::{Format, bytes, print};

pub(super) fn status(dir: &Path, format: Format) -> Result<()> {
    let status = ask(dir, |client| async move { client.status().await })?;
    print(format, &status, text)
}

pub(super) fn upkeep(dir: &Path, request: SetUpkeep, format: Format) -> Result<()> {
    let info = ask(dir, |client| async move { client.set_upkeep(&request).await })?;
    print(format, &info, |info| {
        let state = if info.paused { "paused" } else { "going on" };
        format!("repair and rebuild: {state}, at most {}/s", bytes(info.rate_bytes_per_s))
    })
}

/// What repair and rebuild do, one line for each filesystem that has something to do.
fn repairs(status: &NodeStatus) -> String {
    let line = |filesystem: &FilesystemInfo| {
        let repair = &filesystem.repair;
        let left = filesystem.owed_bytes + repair.rebuild_left_bytes;
        let eta = repair.eta_s.map_or(String::new(), |eta| format!(", {eta} s left"));
        let narrow = match filesystem.narrow_bytes {
            0 => String::new(),
            narrow => format!(", {} narrower than {}", bytes(narrow), filesystem.profile),
        };
        let busy = left + filesystem.narrow_bytes > 0;
        busy.then(|| {
            format!(
                "repair  {}: owed {}, to rebuild {}, {}/s{eta}{narrow}\n",
                filesystem.name,
                bytes(filesystem.owed_bytes),
                bytes(repair.rebuild_left_bytes),
                bytes(repair.bytes_per_s),
            )
        })
    };
    let paused =
        if status.upkeep.paused { "repair and rebuild are paused (forebay upkeep --resume)\n" } else { "" };
    status.filesystems.iter().filter_map(line).collect::<String>() + paused
}

fn text(status: &NodeStatus) -> String {
    let space = &status.space;
    let problems: String = status.problems.iter().map(|problem| format!("  ! {problem}\n")).collect();
    let threads = status.drives.iter().any(|drive| drive.io_path.as_deref() == Some("thread_pool"));
    let io = if threads { "  drives use threads: io_uring is not available or not wanted\n" } else { "" };
    format!(
        "{state}  cluster={cluster} version={version} pid={pid} up={up}s\n{problems}{io}\n\
         space  raw {raw} = live {live} + garbage {garbage} + reserved {reserved} + free {free}\n{repairs}\n{fs}\n\n{drives}",
        state = status.state,
        cluster = status.cluster,
        version = status.version,
        pid = status.pid,
        up = status.uptime_s,
        raw = bytes(space.capacity_bytes),
        live = bytes(space.live_bytes),
        garbage = bytes(space.garbage_bytes),
        reserved = bytes(space.reserved_bytes),
        free = bytes(space.free_bytes),
        repairs = repairs(status),
        fs = filesystem_table(&status.filesystems),
        drives = drive_table(&status.drives),
    )
}
