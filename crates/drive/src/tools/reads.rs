//! Measures how fast a device reads. Nothing is written, so it may be in use.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use base::env::{Caching, Env, File, OpenMode, spawn_thread};
use base::units::{MIB, align_down, align_up};
use rustix::fs::{Mode, OFlags, SeekFrom};

use crate::buffer::AlignedBuf;
use crate::format::BLOCK;

/// Large reads, and how many of them are under way at a time.
const LARGE_BYTES: u64 = MIB;
const LARGE_DEPTH: usize = 4;
/// With less than this in a file, caches of the device would be measured.
const CONTENT_BYTES_MIN: u64 = 64 * MIB;
/// Most runs of a file that are looked at: reads in these tell enough.
const RUNS_MAX: usize = 4096;

/// A device that can be measured.
pub struct ReadBench {
    env: Env,
    file: Arc<dyn File>,
    /// Where bytes are stored: offset and length, whole mebibytes. Reads from holes in a file do not reach its device.
    runs: Vec<(u64, u64)>,
}

impl ReadBench {
    /// Opens a device or file. `None`: it has too little content to tell something.
    ///
    /// # Errors
    /// If it cannot be opened or looked at.
    pub fn open(env: &Env, path: &Path) -> io::Result<Option<Self>> {
        let file = env.files.open(path, OpenMode::Existing, Caching::Direct)?;
        let len = file.len()?;
        let runs = match file.is_device() {
            true => vec![(0, align_down(len, LARGE_BYTES))],
            false => runs_of(path, len)?,
        };
        let content: u64 = runs.iter().map(|(_, len)| len).sum();
        Ok((content >= CONTENT_BYTES_MIN).then(|| Self { env: env.clone(), file, runs }))
    }

    /// Bytes per second of random reads of 1 MiB, some at a time, for a while.
    ///
    /// # Errors
    /// The first error of a read.
    pub fn large(self: &Arc<Self>, lasts: Duration) -> io::Result<u64> {
        let begun_ns = self.env.clock.boot_ns();
        let until_ns = begun_ns + lasts.as_nanos() as u64;
        let readers: Vec<_> = (0..LARGE_DEPTH)
            .map(|_| {
                let bench = self.clone();
                spawn_thread("read-bench", move || bench.read_until(LARGE_BYTES, until_ns))
            })
            .collect();
        let mut bytes = 0;
        for reader in readers {
            let times = reader.join().map_err(|_| io::Error::other("a reader has ended early"))??;
            bytes += times.len() as u64 * LARGE_BYTES;
        }
        let took_ns = (self.env.clock.boot_ns() - begun_ns).max(1);
        Ok((u128::from(bytes) * 1_000_000_000 / u128::from(took_ns)) as u64)
    }

    /// The median time of a random read of 4 KiB, one after another, for a while.
    ///
    /// # Errors
    /// The first error of a read.
    pub fn small(&self, lasts: Duration) -> io::Result<Duration> {
        let until_ns = self.env.clock.boot_ns() + lasts.as_nanos() as u64;
        let mut times = self.read_until(BLOCK as u64, until_ns)?;
        times.sort_unstable();
        Ok(Duration::from_nanos(times[times.len() / 2]))
    }

    /// Reads at random places, at least once. Returns the time of each read in nanoseconds.
    fn read_until(&self, bytes: u64, until_ns: u64) -> io::Result<Vec<u64>> {
        let mut buffer = AlignedBuf::zeroed(bytes as usize);
        let mut times = Vec::new();
        loop {
            let begun_ns = self.env.clock.boot_ns();
            if begun_ns >= until_ns && !times.is_empty() {
                return Ok(times);
            }
            self.file.read_at(&mut buffer, self.place(bytes))?;
            times.push(self.env.clock.boot_ns() - begun_ns);
        }
    }

    /// The offset of a random run of `bytes` bytes that are no hole.
    fn place(&self, bytes: u64) -> u64 {
        let places: u64 = self.runs.iter().map(|(_, len)| len / bytes).sum();
        let mut place = self.env.random.next_u64() % places;
        for (offset, len) in &self.runs {
            if place < len / bytes {
                return offset + place * bytes;
            }
            place -= len / bytes;
        }
        unreachable!("the place is below the sum of all runs")
    }
}

/// The runs of a file that are no holes, in whole mebibytes.
fn runs_of(path: &Path, len: u64) -> io::Result<Vec<(u64, u64)>> {
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut runs = Vec::new();
    let mut at = 0;
    while at < len && runs.len() < RUNS_MAX {
        let start = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
            Ok(start) => start,
            // Only a hole follows.
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        at = rustix::fs::seek(&file, SeekFrom::Hole(start))?.max(start + 1);
        let (first, last) = (align_up(start, LARGE_BYTES), align_down(at.min(len), LARGE_BYTES));
        if first < last {
            runs.push((first, last - first));
        }
    }
    Ok(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_content_is_read_and_too_little_is_not_measured() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("drive");
        let env = Env::real();
        let file = env.files.open(&path, OpenMode::CreateNew, Caching::Buffered).unwrap();
        file.set_len(4 << 30).unwrap();
        let write = |at_mib: u64, count: u64| {
            for mib in at_mib..at_mib + count {
                file.write_at(&vec![7; MIB as usize], mib * MIB).unwrap();
            }
            file.sync_data().unwrap();
        };
        write(100, 40);
        assert!(ReadBench::open(&env, &path).unwrap().is_none());
        write(2000, 30);
        let bench = Arc::new(ReadBench::open(&env, &path).unwrap().unwrap());
        assert_eq!(bench.runs, [(100 * MIB, 40 * MIB), (2000 * MIB, 30 * MIB)]);
        for _ in 0..1000 {
            let mib = bench.place(MIB) / MIB;
            assert!((100..140).contains(&mib) || (2000..2030).contains(&mib), "{mib}");
        }
        assert!(bench.large(Duration::from_millis(50)).unwrap() > 0);
        assert!(bench.small(Duration::from_millis(50)).unwrap() > Duration::ZERO);
        assert!(ReadBench::open(&env, &dir.path().join("none")).is_err());
    }
}
