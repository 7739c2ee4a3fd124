//! A real block device. Skipped, with the reason printed, where loop devices cannot be made.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::*;
use base::env::{Caching, Env, OpenMode};
use base::units::MIB;
use drive::{Drive, Existing, FormatOptions, OpenDriveError, fsck};
use wire::drive::DriveService;

/// A loop device over a file; detached on drop.
struct Loop {
    device: PathBuf,
}

impl Loop {
    fn over(file: &Path) -> Result<Self, String> {
        let output = Command::new("losetup").args(["--find", "--show"]).arg(file).output();
        let output = output.map_err(|error| error.to_string())?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        Ok(Self { device: String::from_utf8_lossy(&output.stdout).trim().into() })
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.device).status();
    }
}

/// Bytes that a file takes up on its filesystem.
fn taken_bytes(file: &Path) -> u64 {
    std::fs::metadata(file).unwrap().blocks() * 512
}

#[test]
fn an_idle_drive_tells_its_device_what_is_free() {
    let env = Env::real();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("backing");
    env.files.write_atomic(&file, &vec![7; 64 * MIB as usize]).unwrap();
    let device = match Loop::over(&file) {
        Ok(device) => device,
        Err(reason) => {
            eprintln!("skipped: no loop device: {reason}");
            return;
        }
    };
    let existing = Existing::Overwrite;
    let options = FormatOptions { capacity_bytes: None, existing, ..format_options(0) };
    Drive::format(&env, &device.device, &options).unwrap();
    assert!(taken_bytes(&file) >= 64 * MIB);
    let drive = open(&env, &device.device).unwrap();
    block_on(drive.put(put(key(1), 20))).unwrap();
    // The drive's thread gives space back by itself, some time after the put.
    let clock = env.clock.clone();
    let deadline_ns = clock.boot_ns() + 60_000_000_000;
    while drive.stat().trimmed_bytes < 60 * MIB {
        assert!(clock.boot_ns() < deadline_ns, "{:?}", drive.stat());
        std::thread::park_timeout(std::time::Duration::from_millis(5));
    }
    assert!(taken_bytes(&file) < 8 * MIB, "{} bytes are still taken", taken_bytes(&file));
    assert_eq!(get(&drive, key(1), 0, 20).unwrap().bytes, content(key(1), 20));
    block_on(drive.close()).unwrap();
    // The device stays locked until the drive is dropped.
    drop(drive);
    assert!(fsck(&env, &device.device).unwrap().clean);
}

#[test]
fn a_block_device_works_like_a_file() {
    let env = Env::real();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("backing");
    env.files.open(&file, OpenMode::CreateNew, Caching::Buffered).unwrap().set_len(64 * MIB).unwrap();
    let device = match Loop::over(&file) {
        Ok(device) => device,
        Err(reason) => {
            eprintln!("skipped: no loop device: {reason}");
            return;
        }
    };
    let options = FormatOptions { capacity_bytes: None, segment_bytes: None, ..format_options(0) };
    Drive::format(&env, &device.device, &options).unwrap();
    let drive = open(&env, &device.device).unwrap();
    assert_eq!(drive.stat().capacity_bytes, 64 * MIB);
    assert!(matches!(open(&env, &device.device), Err(OpenDriveError::InUse { .. })));
    let puts = (1..100).map(|extent| drive.put(put(key(extent), 1 + (extent % 30) as u32))).collect();
    assert!(join_all(puts).iter().all(Result::is_ok));
    drop(drive);
    let report = fsck(&env, &device.device).unwrap();
    assert!(report.clean && report.shards == 99, "{report:?}");
    let drive = open(&env, &device.device).unwrap();
    for extent in 1..100 {
        let blocks = 1 + (extent % 30) as u32;
        assert_eq!(get(&drive, key(extent), 0, blocks).unwrap().bytes, content(key(extent), blocks));
    }
    block_on(drive.close()).unwrap();
    let again = Drive::format(&env, &device.device, &options);
    assert!(again.is_err(), "a drive is not formatted over");
}
