//! `status`.

use std::path::Path;

use admin::NodeStatus;
use anyhow::Result;

use super::ask;
use super::drives::drive_table;
use super::filesystems::filesystem_table;
use super::output::{Format, bytes, print};

pub(super) fn status(dir: &Path, format: Format) -> Result<()> {
    let status = ask(dir, |client| async move { client.status().await })?;
    print(format, &status, text)
}

fn text(status: &NodeStatus) -> String {
    let space = &status.space;
    let problems: String = status.problems.iter().map(|problem| format!("  ! {problem}\n")).collect();
    let threads = status.drives.iter().any(|drive| drive.io_path.as_deref() == Some("thread_pool"));
    let io = if threads { "  drives use threads: io_uring is not available or not wanted\n" } else { "" };
    format!(
        "{state}  cluster={cluster} version={version} pid={pid} up={up}s\n{problems}{io}\n\
         space  raw {raw} = live {live} + garbage {garbage} + reserved {reserved} + free {free}\n\n{fs}\n\n{drives}",
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
        fs = filesystem_table(&status.filesystems),
        drives = drive_table(&status.drives),
    )
}
