//! `fsck`.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use admin::{FsckFilesystem, FsckInfo};
use anyhow::{Result, bail};
use base::env::spawn_thread;
use meta::fsck::FsckProgress;

use super::output::{Format, bytes, print};
use super::progress::Progress;
use super::{ask, env};
use crate::node::{NodeDir, fsck_stopped, is_locked};

const FINDINGS: u8 = 1;
const CANNOT_CHECK: u8 = 2;
const POLL: Duration = Duration::from_millis(100);

pub(super) fn fsck(dir: &Path, format: Format) -> ExitCode {
    let node_dir = NodeDir::new(dir);
    let checked = if is_locked(&super::env(), &node_dir) { running(dir) } else { stopped(&node_dir) };
    let shown = checked.and_then(|filesystems| {
        print(format, &filesystems, |filesystems| filesystems.iter().map(text).collect())?;
        Ok(filesystems.iter().map(|filesystem| filesystem.findings_count).sum::<u64>())
    });
    match shown {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(FINDINGS),
        Err(error) => {
            eprintln!("forebay: cannot check: {error:#}");
            ExitCode::from(CANNOT_CHECK)
        }
    }
}

fn text(filesystem: &FsckFilesystem) -> String {
    let count = |name: &str| filesystem.counts.get(name).copied().unwrap_or(0);
    let mut text = format!(
        "{}: {} inodes, {} names, {} pieces, {} extents, {} shards; {} shards owed, {} on drives that are not up, {} \
         ({}) of nothing, {} extents to be deleted\n",
        filesystem.name,
        count("inodes"),
        count("names"),
        count("pieces"),
        count("extents"),
        count("shards"),
        count("owed_shards"),
        count("unreachable_shards"),
        count("unreferenced_shards"),
        bytes(count("unreferenced_bytes")),
        count("free_extents"),
    );
    for finding in &filesystem.findings {
        text.push_str(&format!("  ! {}: {} ({})\n", finding.code, finding.what, finding.advice));
    }
    match filesystem.findings_count {
        0 => text.push_str("  clean\n"),
        found if found > filesystem.findings.len() as u64 => {
            text.push_str(&format!("  {found} findings in all\n"))
        }
        _ => {}
    }
    text
}

fn stopped(dir: &NodeDir) -> Result<Vec<FsckFilesystem>> {
    let progress = Arc::new(FsckProgress::default());
    let (dir, told) = (dir.clone(), progress.clone());
    let work = spawn_thread("fsck", move || fsck_stopped(&env(), &dir, &told));
    let mut bar = Progress::new();
    while !work.is_finished() {
        std::thread::park_timeout(POLL);
        let (phase, items) = progress.now();
        bar.show(&format!("checking {phase}: {items}"));
    }
    drop(bar);
    let checked = work.join().map_err(|_| anyhow::anyhow!("the check has panicked"))??;
    for drive in &checked.unreadable {
        eprintln!("drive {} counts as missing: {}", drive.id, drive.reason);
    }
    Ok(checked.filesystems)
}

fn running(dir: &Path) -> Result<Vec<FsckFilesystem>> {
    let mut info: FsckInfo = ask(dir, |client| async move { client.start_fsck().await })?;
    let mut bar = Progress::new();
    while info.running {
        std::thread::park_timeout(POLL);
        bar.show(&format!("checking {}: {}", info.phase, info.items));
        info = ask(dir, |client| async move { client.fsck().await })?;
    }
    drop(bar);
    match info.error {
        Some(error) => bail!("{error}"),
        None => Ok(info.filesystems),
    }
}
