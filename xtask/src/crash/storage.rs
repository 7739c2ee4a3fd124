//! The storage of a node under test: a directory of this machine, or disks whose power can be cut (see `disks`).

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::disks;
use crate::node;

/// The use of the disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Everything in a directory of this machine: its power cannot be cut.
    Host,
    /// One disk with a filesystem that holds the node's directory and the drive files.
    Ext4,
    Xfs,
    /// A disk with a filesystem for the node's directory, and one without for each drive.
    Devices,
}

impl FromStr for Layout {
    type Err = std::io::Error;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "host" => Ok(Self::Host),
            "ext4" => Ok(Self::Ext4),
            "xfs" => Ok(Self::Xfs),
            "devices" => Ok(Self::Devices),
            _ => Err(std::io::Error::other(format!(
                "no such layout: {text}; there are: host ext4 xfs devices"
            ))),
        }
    }
}

/// Disks behind loop devices. Disks, devices and mounts are removed when dropped.
#[derive(Debug)]
pub(crate) struct Storage {
    /// The process that serves the disks.
    server: Child,
    service: PathBuf,
    /// Mount point of the filesystem on disk 0.
    mount: PathBuf,
    loops: Vec<PathBuf>,
}

/// Room for metadata, in MiB.
const META_MIB: u64 = 1024;
const PATIENCE: Duration = Duration::from_secs(20);
/// The filler shrinks by this much if there is not enough room.
const FILL_STEP: u64 = 64 << 10;

impl Storage {
    /// Makes the disks below `directory`, and a filesystem on the first disk.
    pub(crate) fn create(directory: &Path, layout: Layout, drives: u32, drive_mib: u64) -> Result<Self> {
        let (count, size_mib, filesystem) = match layout {
            Layout::Host => bail!("the power of this machine is not cut"),
            Layout::Ext4 => (1, META_MIB + u64::from(drives) * drive_mib * 11 / 10, "ext4"),
            Layout::Xfs => (1, META_MIB + u64::from(drives) * drive_mib * 11 / 10, "xfs"),
            Layout::Devices => (drives as usize + 1, META_MIB.max(drive_mib), "ext4"),
        };
        let (service, mount, files) =
            (directory.join("disks"), directory.join("machine"), directory.join("disk-files"));
        for path in [&service, &mount, &files] {
            std::fs::create_dir_all(path)?;
        }
        let server = Command::new(std::env::current_exe()?)
            .args(["disks", "--count", &count.to_string(), "--size-mib", &size_mib.to_string(), "--dir"])
            .arg(&files)
            .arg("--mount")
            .arg(&service)
            .stdin(Stdio::null())
            .spawn()
            .context("start the disks")?;
        let mut storage = Self { server, service, mount, loops: Vec::new() };
        storage.wait_for_service()?;
        for index in 0..count {
            storage.attach(index)?;
        }
        let mkfs = if filesystem == "xfs" { ["mkfs.xfs", "-q", "-f"] } else { ["mkfs.ext4", "-q", "-F"] };
        run(Command::new(mkfs[0]).args(&mkfs[1..]).arg(&storage.loops[0]))?;
        storage.mount()?;
        Ok(storage)
    }

    /// The parent of the node's directory.
    pub(crate) fn path(&self) -> &Path {
        &self.mount
    }

    /// The disk of the first drive.
    pub(crate) fn first_drive(&self) -> usize {
        usize::from(self.loops.len() > 1)
    }

    /// Devices to be used as drives.
    pub(crate) fn drives(&self) -> &[PathBuf] {
        &self.loops[1..]
    }

    /// Cuts the power: no later write becomes durable, and some of the unstable ones are lost.
    pub(crate) fn cut(&self, seed: u64) -> Result<()> {
        self.command(&format!("cut {seed}"))
    }

    /// Turns the power on after a cut; the filesystem recovers. No process may use the filesystem.
    pub(crate) fn restore(&self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while rustix::mount::unmount(&self.mount, rustix::mount::UnmountFlags::empty()).is_err() {
            ensure!(
                Instant::now() < deadline,
                "filesystem stays in use after a cut: {}",
                self.mount.display()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        self.command("on")?;
        self.mount()
    }

    /// Sends a command, see `disks::command::Command`.
    pub(crate) fn command(&self, line: &str) -> Result<()> {
        std::fs::write(self.service.join("control"), line).with_context(|| format!("tell the disks: {line}"))
    }

    /// Fills the filesystem except for about `left_bytes`.
    pub(crate) fn fill(&self, left_bytes: u64) -> Result<()> {
        let file = std::fs::File::create(self.filler()).context("create a filler")?;
        let free = rustix::fs::fstatvfs(&file)?;
        let mut len = (free.f_bavail * free.f_frsize).saturating_sub(left_bytes);
        // The node may have used some of the room by now, and the filesystem needs some for its own records.
        loop {
            match rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, len.max(1)) {
                Err(rustix::io::Errno::NOSPC) if len > FILL_STEP => len -= FILL_STEP,
                filled => return filled.context("fill up"),
            }
        }
    }

    pub(crate) fn empty(&self) -> Result<()> {
        match std::fs::remove_file(self.filler()) {
            // A power cut may have lost the filler.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            result => result.context("remove the filler"),
        }
    }

    fn filler(&self) -> PathBuf {
        self.mount.join("filler")
    }

    fn mount(&self) -> Result<()> {
        // The loop device already exists, so mount(8) must not make another one.
        run(Command::new("mount").arg(&self.loops[0]).arg(&self.mount))
    }

    fn attach(&mut self, index: usize) -> Result<()> {
        let disk = disks::path_of(&self.service, index);
        let output = Command::new("losetup").args(["--find", "--show"]).arg(&disk).output()?;
        ensure!(output.status.success(), "losetup: {}", String::from_utf8_lossy(&output.stderr).trim());
        self.loops.push(PathBuf::from(String::from_utf8(output.stdout)?.trim()));
        Ok(())
    }

    fn wait_for_service(&mut self) -> Result<()> {
        let parent = self.service.parent().context("has a parent")?.metadata()?.dev();
        let deadline = Instant::now() + PATIENCE;
        while self.service.metadata()?.dev() == parent {
            ensure!(self.server.try_wait()?.is_none(), "the disks ended early");
            ensure!(Instant::now() < deadline, "the disks are not mounted");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        // Otherwise an unmount would wait for a slow disk, or fail on a disk without power.
        for line in ["on", "fail all nothing", "slow all 0"] {
            let _ = self.command(line);
        }
        let deadline = Instant::now() + Duration::from_secs(5);
        while rustix::mount::unmount(&self.mount, rustix::mount::UnmountFlags::empty()).is_err()
            && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(20));
        }
        for device in &self.loops {
            let _ = Command::new("losetup").arg("--detach").arg(device).status();
        }
        let _ = rustix::mount::unmount(&self.service, rustix::mount::UnmountFlags::DETACH);
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

fn run(command: &mut Command) -> Result<()> {
    node::run(command)
}
