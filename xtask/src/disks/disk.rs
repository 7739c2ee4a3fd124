//! The disks: stable bytes, bytes that readers see, and the loss of unstable writes in a power cut.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use rustix::fs::FallocateFlags;

use super::command::{Command, Failing};
use crate::random::Random;

const SECTOR_BYTES: usize = 512;
const COPY_BYTES: usize = 1 << 20;
/// Size of a disk's cache. Beyond it, the oldest writes become stable without a flush.
const CACHE_BYTES_MAX: usize = 64 << 20;

/// The request fails with EIO.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failed;

impl From<io::Error> for Failed {
    fn from(_: io::Error) -> Self {
        Self
    }
}

/// The bytes of a write.
#[derive(Debug)]
pub(crate) enum Data {
    Bytes(Vec<u8>),
    /// A number of zeros, for which a file needs no room.
    Zeros(u64),
}

impl Data {
    fn len(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Zeros(len) => *len,
        }
    }

    fn put(&self, file: &File, offset: u64) -> io::Result<()> {
        match self {
            Self::Bytes(bytes) => file.write_all_at(bytes, offset),
            Self::Zeros(len) => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                Ok(rustix::fs::fallocate(file, flags, offset, *len)?)
            }
        }
    }

    /// Writes each sector with this chance. A run of zeros is written as a whole or not at all.
    fn put_in_part(
        &self,
        file: &File,
        offset: u64,
        keep_percent: u64,
        random: &mut Random,
    ) -> io::Result<()> {
        match self {
            Self::Bytes(bytes) => {
                for (at, sector) in (offset..).step_by(SECTOR_BYTES).zip(bytes.chunks(SECTOR_BYTES)) {
                    if random.percent(keep_percent) {
                        file.write_all_at(sector, at)?;
                    }
                }
                Ok(())
            }
            Self::Zeros(_) if random.percent(keep_percent) => self.put(file, offset),
            Self::Zeros(_) => Ok(()),
        }
    }

    /// Bytes that it takes in the cache.
    fn memory_bytes(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Zeros(_) => 0,
        }
    }
}

/// A write without a later flush.
struct Unstable {
    offset: u64,
    data: Data,
}

struct Disk {
    /// The bytes that readers see.
    current: File,
    /// The bytes after a power cut, without the unstable writes.
    stable: File,
    unstable: Vec<Unstable>,
    unstable_bytes: usize,
    failing: Failing,
    delay: Duration,
    is_powered: bool,
}

impl Disk {
    fn open(directory: &Path, index: usize, size: u64) -> io::Result<Self> {
        let open = |name: &str| -> io::Result<File> {
            let path = directory.join(format!("{index}.{name}"));
            let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
            file.set_len(size)?;
            Ok(file)
        };
        Ok(Self {
            current: open("current")?,
            stable: open("stable")?,
            unstable: Vec::new(),
            unstable_bytes: 0,
            failing: Failing::Nothing,
            delay: Duration::ZERO,
            is_powered: true,
        })
    }

    fn ensure_works(&self, request: Failing) -> Result<(), Failed> {
        let fails = self.failing == Failing::Everything || self.failing == request;
        if self.is_powered && !fails { Ok(()) } else { Err(Failed) }
    }

    fn write(&mut self, offset: u64, data: Data) -> io::Result<()> {
        data.put(&self.current, offset)?;
        self.unstable_bytes += data.memory_bytes();
        self.unstable.push(Unstable { offset, data });
        if self.unstable_bytes > CACHE_BYTES_MAX {
            self.settle(self.unstable.len() / 2)?;
        }
        Ok(())
    }

    /// Makes the oldest `count` writes stable.
    fn settle(&mut self, count: usize) -> io::Result<()> {
        for write in self.unstable.drain(..count) {
            write.data.put(&self.stable, write.offset)?;
            self.unstable_bytes -= write.data.memory_bytes();
        }
        Ok(())
    }

    /// Loses power: each write is lost, kept or torn, with the same chance.
    fn cut(&mut self, random: &mut Random) -> io::Result<()> {
        self.is_powered = false;
        for write in &self.unstable {
            let keep_percent = *random.pick(&[0, 50, 100]).expect("not empty");
            write.data.put_in_part(&self.stable, write.offset, keep_percent, random)?;
        }
        let mut buffer = vec![0; COPY_BYTES];
        for write in std::mem::take(&mut self.unstable) {
            let end = write.offset + write.data.len();
            for at in (write.offset..end).step_by(COPY_BYTES) {
                let part = &mut buffer[..(end - at).min(COPY_BYTES as u64) as usize];
                self.stable.read_exact_at(part, at)?;
                self.current.write_all_at(part, at)?;
            }
        }
        self.unstable_bytes = 0;
        Ok(())
    }
}

/// All disks of one machine.
pub(crate) struct Disks(Vec<Mutex<Disk>>);

impl Disks {
    /// Empty disks, kept in files of `directory`.
    pub(crate) fn open(directory: &Path, count: usize, size: u64) -> io::Result<Self> {
        (0..count)
            .map(|index| Disk::open(directory, index, size).map(Mutex::new))
            .collect::<io::Result<_>>()
            .map(Self)
    }

    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn delay(&self, index: usize) -> Duration {
        self.disk(index).delay
    }

    pub(crate) fn read(&self, index: usize, offset: u64, len: usize) -> Result<Vec<u8>, Failed> {
        let disk = self.disk(index);
        disk.ensure_works(Failing::Reads)?;
        let mut data = vec![0; len];
        let mut filled = 0;
        while filled < len {
            match disk.current.read_at(&mut data[filled..], offset + filled as u64)? {
                0 => break,
                count => filled += count,
            }
        }
        data.truncate(filled);
        Ok(data)
    }

    pub(crate) fn write(&self, index: usize, offset: u64, data: Data) -> Result<(), Failed> {
        let mut disk = self.disk(index);
        disk.ensure_works(Failing::Writes)?;
        Ok(disk.write(offset, data)?)
    }

    pub(crate) fn flush(&self, index: usize) -> Result<(), Failed> {
        let mut disk = self.disk(index);
        disk.ensure_works(Failing::Flushes)?;
        let count = disk.unstable.len();
        Ok(disk.settle(count)?)
    }

    pub(crate) fn obey(&self, command: Command) -> Result<(), Failed> {
        // All locks at once: all disks lose power at the same moment.
        let mut disks: Vec<MutexGuard<'_, Disk>> = (0..self.count()).map(|index| self.disk(index)).collect();
        for (index, disk) in disks.iter_mut().enumerate() {
            match command {
                Command::Fail(which, failing) if which.is(index) => disk.failing = failing,
                Command::Slow(which, delay) if which.is(index) => disk.delay = delay,
                Command::Cut(seed) => disk.cut(&mut Random::new(seed ^ ((index as u64) << 40)))?,
                Command::On => disk.is_powered = true,
                Command::Fail(..) | Command::Slow(..) => {}
            }
        }
        Ok(())
    }

    fn disk(&self, index: usize) -> MutexGuard<'_, Disk> {
        self.0[index].lock().expect("a panic ends the process")
    }
}
