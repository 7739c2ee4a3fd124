//! `drive`.

use std::path::{Path, PathBuf};

use admin::{AddDrive, DriveInfo, FailDrive, RemoveDrive, ReplaceDrive};
use anyhow::{Result, bail};
use comfy_table::Table;

use super::args::DriveCommand;
use super::output::{Format, bytes, print, table};
use super::{absolute, ask, env, picture};

pub(super) fn drive(command: DriveCommand) -> Result<()> {
    match command {
        DriveCommand::List { dir, json } => list(&dir, json.into()),
        DriveCommand::Show { dir, id, json } => show(&dir, id, json.into()),
        DriveCommand::Add { dir, path, size, json } => add(&dir, path, size, json.into()),
        DriveCommand::Fail { dir, id, force, json } => fail(&dir, id, force, json.into()),
        DriveCommand::Scrub { dir, id, now: true, json } => scrub_now(&dir, id, json.into()),
        DriveCommand::Scrub { dir, id, now: false, json } => show_scrub(&dir, id, json.into()),
        DriveCommand::Return { dir, id, json } => return_(&dir, id, json.into()),
        DriveCommand::Remove { dir, id, force, json } => remove(&dir, id, RemoveDrive { force }, json.into()),
        DriveCommand::Replace { dir, id, path, size, force, json } => {
            let request = ReplaceDrive { path: absolute(&path)?, size_bytes: size, force };
            replace(&dir, id, &request, json.into())
        }
        DriveCommand::Dump { path, segment, json } => dump(&path, segment, json.into()),
        DriveCommand::Fsck { path, json } => fsck(&path, json.into()),
        DriveCommand::Bench { path, size, operations, json } => bench(&path, size, operations, json.into()),
    }
}

pub(super) fn drive_table(drives: &[DriveInfo]) -> Table {
    let mut table = table(&[
        "DRIVE", "NODE", "STATE", "CAPACITY", "LIVE", "GARBAGE", "FREE", "SHARDS", "I/O", "PATH", "REASON",
    ]);
    for drive in drives {
        table.add_row([
            drive.id.to_string(),
            drive.node.to_string(),
            drive.state.clone(),
            bytes(drive.space.capacity_bytes),
            bytes(drive.space.live_bytes),
            bytes(drive.space.garbage_bytes),
            bytes(drive.space.free_bytes),
            drive.shards.to_string(),
            drive.io_path.clone().unwrap_or_else(|| "-".to_owned()),
            drive.path.clone(),
            drive.reason.clone().unwrap_or_default(),
        ]);
    }
    table
}

fn show_one(format: Format, info: &DriveInfo) -> Result<()> {
    print(format, info, |info| drive_table(std::slice::from_ref(info)).to_string())
}

fn list(dir: &Path, format: Format) -> Result<()> {
    let status = picture(dir)?;
    print(format, &status.drives, |drives| drive_table(drives).to_string())
}

fn show(dir: &Path, id: u32, format: Format) -> Result<()> {
    let status = picture(dir)?;
    match status.drives.iter().find(|drive| drive.id == id) {
        Some(info) => show_one(format, info),
        None => bail!("no such drive: id={id} (see `forebay drive list {}`)", dir.display()),
    }
}

fn add(dir: &Path, path: Option<PathBuf>, size_bytes: Option<u64>, format: Format) -> Result<()> {
    let path = path.as_deref().map(absolute).transpose()?;
    let info =
        ask(dir, |client| async move { client.add_drive(&AddDrive { path, size_bytes, node: None }).await })?;
    show_one(format, &info)
}

fn fail(dir: &Path, id: u32, force: bool, format: Format) -> Result<()> {
    let info = ask(dir, |client| async move { client.fail_drive(id, FailDrive { force }).await })?;
    show_one(format, &info)
}

fn scrub_table(drives: &[DriveInfo]) -> Table {
    let mut table = table(&["DRIVE", "STATE", "OLDEST VERIFICATION", "DAMAGED SHARDS FOUND", "SCRUB"]);
    for drive in drives {
        let scrub = &drive.scrub;
        let oldest = scrub.oldest_s.map_or("never".to_owned(), |age_s| format!("{age_s} s ago"));
        let pass = if scrub.running { "now" } else { "in the background" };
        table.add_row([
            drive.id.to_string(),
            drive.state.clone(),
            oldest,
            scrub.bad_shards.to_string(),
            pass.to_owned(),
        ]);
    }
    table
}

fn scrub_now(dir: &Path, id: Option<u32>, format: Format) -> Result<()> {
    let drives = ask(dir, |client| async move { client.scrub_drive(id).await })?;
    print(format, &drives, |drives| scrub_table(drives).to_string())
}

fn show_scrub(dir: &Path, id: Option<u32>, format: Format) -> Result<()> {
    let mut drives = picture(dir)?.drives;
    drives.retain(|drive| id.is_none_or(|id| drive.id == id));
    print(format, &drives, |drives| scrub_table(drives).to_string())
}

fn return_(dir: &Path, id: u32, format: Format) -> Result<()> {
    let info = ask(dir, |client| async move { client.return_drive(id).await })?;
    show_one(format, &info)
}

fn remove(dir: &Path, id: u32, request: RemoveDrive, format: Format) -> Result<()> {
    let info = ask(dir, |client| async move { client.remove_drive(id, &request).await })?;
    show_one(format, &info)
}

fn replace(dir: &Path, id: u32, request: &ReplaceDrive, format: Format) -> Result<()> {
    let info = ask(dir, |client| async move { client.replace_drive(id, request).await })?;
    show_one(format, &info)
}

fn dump(path: &Path, segment: Option<u32>, format: Format) -> Result<()> {
    let dump = drive::dump(&env(), path)?;
    let segments: Vec<_> = match segment {
        Some(id) => match dump.segment(id) {
            Some(segment) => vec![segment],
            None => bail!("no such segment: segment={id} path={}", path.display()),
        },
        None => dump.segments().collect(),
    };
    // The dump is a tree; indented JSON suits people too.
    let value = serde_json::json!({ "superblocks": dump.superblocks, "segments": segments });
    print(format, &value, |value| serde_json::to_string_pretty(value).unwrap_or_default())
}

fn fsck(path: &Path, format: Format) -> Result<()> {
    let report = drive::fsck(&env(), path)?;
    print(format, &report, |report| serde_json::to_string_pretty(report).unwrap_or_default())?;
    if report.clean { Ok(()) } else { bail!("drive has errors: path={}", path.display()) }
}

fn bench(path: &Path, capacity_bytes: u64, operations: u64, format: Format) -> Result<()> {
    let existing = drive::Existing::Keep;
    let is_file = !env().files.exists(path);
    let options = drive::BenchOptions {
        capacity_bytes,
        existing,
        io: drive::PreferIo::Auto,
        operations,
        preallocate: drive::Preallocate::Reserve,
    };
    let report = drive::bench(&env(), path, &options)?;
    if is_file {
        env().files.remove_file(path)?;
    }
    print(format, &report, |report| {
        let mut table = table(&["MEASURED", "OPS/S", "MiB/S", "P50 us", "P99 us"]);
        for figure in &report.figures {
            table.add_row([
                figure.name.clone(),
                format!("{:.0}", figure.per_second),
                format!("{:.1}", figure.mib_per_second),
                format!("{:.0}", figure.p50_us),
                format!("{:.0}", figure.p99_us),
            ]);
        }
        format!("I/O through {:?}\n{table}", report.io_path)
    })
}
