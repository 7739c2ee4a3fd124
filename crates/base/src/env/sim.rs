//! A simulated clock, randomness and disk, so that runs can be replayed and crashes simulated. For tests only.
//!
//! The disk has a volatile write cache. [`SimFiles::crash`] keeps, loses, tears (at 512 bytes) or reorders
//! unsynced writes, as the seed decides; handles from before the crash are dead. Creations, renames and
//! removals are journaled in order: a crash keeps a prefix of those whose directory was not synced.
//! Directories themselves are durable at once.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

mod image;
mod pending;

use super::{Caching, Clock, Env, File, Files, OpenMode, Random};
use crate::units::BLOCK_BYTES;
use image::Image;
use pending::{Pending, Written, tear};

/// Clock, randomness and disk of a simulated node.
#[derive(Clone)]
pub struct Sim {
    /// Its clock: it stands still until a test moves it.
    pub clock: Arc<SimClock>,
    /// Its random numbers.
    pub random: Arc<SimRandom>,
    /// Its disk.
    pub files: Arc<SimFiles>,
}

impl Sim {
    /// `seed` and the calls determine every result.
    pub fn new(seed: u64) -> Self {
        Self {
            clock: Arc::new(SimClock::default()),
            random: Arc::new(SimRandom::new(seed)),
            files: Arc::new(SimFiles::new(seed ^ 0x5eed_d15c)),
        }
    }

    /// The environment for the code under test.
    pub fn env(&self) -> Env {
        Env { clock: self.clock.clone(), random: self.random.clone(), files: self.files.clone() }
    }
}

/// A clock that a test moves.
#[derive(Default)]
pub struct SimClock {
    boot_ns: AtomicU64,
    wall_offset_ns: AtomicI64,
}

impl SimClock {
    /// Moves time forward.
    pub fn advance_ns(&self, ns: u64) {
        self.boot_ns.fetch_add(ns, Ordering::SeqCst);
    }

    /// Sets wall time relative to boot time, so that it jumps.
    pub fn set_wall_offset_ns(&self, offset_ns: i64) {
        self.wall_offset_ns.store(offset_ns, Ordering::SeqCst);
    }
}

impl Clock for SimClock {
    fn boot_ns(&self) -> u64 {
        self.boot_ns.load(Ordering::SeqCst)
    }

    fn wall_ns(&self) -> i64 {
        self.boot_ns() as i64 + self.wall_offset_ns.load(Ordering::SeqCst)
    }
}

/// A seeded sequence (SplitMix64).
pub struct SimRandom {
    state: Mutex<SplitMix>,
}

impl SimRandom {
    /// The sequence of `seed`.
    pub fn new(seed: u64) -> Self {
        Self { state: Mutex::new(SplitMix(seed)) }
    }
}

impl Random for SimRandom {
    fn fill(&self, bytes: &mut [u8]) {
        let mut state = self.state.lock().expect("no holder of this lock panics");
        for piece in bytes.chunks_mut(8) {
            let word = state.next().to_le_bytes();
            piece.copy_from_slice(&word[..piece.len()]);
        }
    }
}

/// SplitMix64: small, and good enough for choosing test cases.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }
}

type InodeId = u64;

#[derive(Default)]
struct Inode {
    /// The content that reads return.
    current: Image,
    /// The content that certainly survives a crash.
    durable: Image,
    pending: Vec<Pending>,
    /// The file was truncated since the last sync.
    cut: bool,
    /// `current` and `durable` may differ in content.
    differs: bool,
    /// A write or sync has failed: `current` and `durable` may differ even after a sync.
    doubtful: bool,
    bad: Vec<Range<u64>>,
    /// The sync after this many more fails.
    sync_after: Option<u64>,
    /// The filesystem is full: the file has no space allocated from this offset on.
    full_from: Option<u64>,
    /// The handle that holds the lock.
    locked_by: Option<u64>,
}

/// An unsynced change of names.
enum NameChange {
    Link(PathBuf, InodeId),
    Unlink(PathBuf),
    Rename(PathBuf, PathBuf, InodeId),
}

impl NameChange {
    fn touches(&self, dir: &Path) -> bool {
        let inside = |path: &Path| parent(path) == dir;
        match self {
            Self::Link(path, _) | Self::Unlink(path) => inside(path),
            Self::Rename(from, to, _) => inside(from) || inside(to),
        }
    }

    fn apply(&self, names: &mut BTreeMap<PathBuf, InodeId>) {
        match self {
            Self::Link(path, inode) => {
                names.insert(path.clone(), *inode);
            }
            Self::Unlink(path) => {
                names.remove(path);
            }
            Self::Rename(from, to, inode) => {
                names.remove(from);
                names.insert(to.clone(), *inode);
            }
        }
    }
}

fn parent(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new(""))
}

/// Faults to come. `Some(n)`: after `n` more successes.
#[derive(Default)]
struct Faults {
    write_after: Option<u64>,
    sync_after: Option<u64>,
    power_after: Option<u64>,
    power_off: bool,
    space_bytes: Option<u64>,
}

/// An operation of a disk, reported just before it happens.
#[derive(Debug, Clone, Copy)]
pub enum DiskEvent<'a> {
    /// Bytes are written.
    Write {
        /// Where.
        offset: u64,
        /// The bytes.
        bytes: &'a [u8],
    },
    /// A file is made durable.
    Sync,
    /// The size of a file is set.
    SetLen(u64),
    /// A name is created, moved or removed.
    Name(&'a Path),
    /// The names of a directory are made durable.
    SyncDir(&'a Path),
}

/// Gets every [`DiskEvent`], with the number of its file, or 0.
pub type DiskWatch = Box<dyn Fn(u64, DiskEvent<'_>) + Send + Sync>;

struct Disk {
    random: SplitMix,
    /// Shortest and longest time of an operation, in nanoseconds.
    latency_ns: Option<(u64, u64)>,
    inodes: BTreeMap<InodeId, Inode>,
    names: BTreeMap<PathBuf, InodeId>,
    durable_names: BTreeMap<PathBuf, InodeId>,
    journal: Vec<NameChange>,
    dirs: BTreeSet<PathBuf>,
    faults: Faults,
    /// Counts crashes: handles of an earlier boot are dead.
    boot: u64,
    next_id: u64,
    writes: u64,
    syncs: u64,
}

/// Simulated files and directories. The module describes crashes.
pub struct SimFiles {
    disk: Arc<Mutex<Disk>>,
    watch: Arc<OnceLock<DiskWatch>>,
}

impl SimFiles {
    /// An empty disk; `seed` decides what crashes keep.
    pub fn new(seed: u64) -> Self {
        let disk = Disk {
            random: SplitMix(seed),
            latency_ns: None,
            inodes: BTreeMap::new(),
            names: BTreeMap::new(),
            durable_names: BTreeMap::new(),
            journal: Vec::new(),
            dirs: BTreeSet::new(),
            faults: Faults::default(),
            boot: 0,
            next_id: 1,
            writes: 0,
            syncs: 0,
        };
        Self { disk: Arc::new(Mutex::new(disk)), watch: Arc::default() }
    }

    /// Reports every operation to `watch`, just before it happens.
    ///
    /// # Panics
    /// If the disk has a watch.
    pub fn set_watch(&self, watch: DiskWatch) {
        assert!(self.watch.set(watch).is_ok(), "a disk has one watch");
    }

    /// Sets the time of operations for callers that wait without blocking: each takes a random time between the two.
    pub fn set_latency(&self, shortest: Duration, longest: Duration) {
        self.disk().latency_ns = Some((shortest.as_nanos() as u64, longest.as_nanos() as u64));
    }

    fn tell(&self, event: DiskEvent<'_>) {
        if let Some(watch) = self.watch.get() {
            watch(0, event);
        }
    }

    fn disk(&self) -> MutexGuard<'_, Disk> {
        lock(&self.disk)
    }

    /// Power fails and returns: unsynced changes are kept, lost or torn, and all handles die. Pending
    /// write, sync and power faults are cleared; bad ranges and the space limit stay.
    pub fn crash(&self) {
        let mut disk = self.disk();
        let disk = &mut *disk;
        for inode in disk.inodes.values_mut() {
            inode.crash(&mut disk.random);
        }
        let kept = disk.random.below(disk.journal.len() + 1);
        for change in disk.journal.drain(..).take(kept) {
            change.apply(&mut disk.durable_names);
        }
        disk.names = disk.durable_names.clone();
        disk.boot += 1;
        disk.faults = Faults { space_bytes: disk.faults.space_bytes, ..Faults::default() };
    }

    /// The write after `successes` more writes changes any part of its range and fails with `EIO`.
    pub fn fail_write_after(&self, successes: u64) {
        self.disk().faults.write_after = Some(successes);
    }

    /// The sync after `successes` more syncs fails with `EIO`. Dirty data is then clean in the cache, and may or may
    /// not be on the disk: a later sync proves nothing about it.
    pub fn fail_sync_after(&self, successes: u64) {
        self.disk().faults.sync_after = Some(successes);
    }

    /// As [`SimFiles::fail_sync_after`], for one file.
    pub fn fail_sync_of(&self, path: &Path, successes: u64) {
        self.disk().inode_of(path).sync_after = Some(successes);
    }

    /// All operations fail from now on, until [`SimFiles::crash`].
    pub fn cut_power(&self) {
        self.disk().faults.power_off = true;
    }

    /// All operations fail after `operations` more changes and syncs, until [`SimFiles::crash`].
    pub fn cut_power_after(&self, operations: u64) {
        self.disk().faults.power_after = Some(operations);
    }

    /// The filesystem that holds the file is full: from `offset` on, nothing of the file is allocated and writes fail
    /// with `ENOSPC`, some of them after a part of their bytes.
    pub fn fill_host_of(&self, path: &Path, offset: u64) {
        self.disk().inode_of(path).full_from = Some(offset);
    }

    /// The filesystem that holds the file has room again.
    pub fn free_host_of(&self, path: &Path) {
        self.disk().inode_of(path).full_from = None;
    }

    /// Limits the bytes of all files together. An extension beyond the limit fails with `ENOSPC`.
    pub fn limit_space(&self, bytes: u64) {
        self.disk().faults.space_bytes = Some(bytes);
    }

    /// Forgets all faults, bad ranges included.
    pub fn clear_faults(&self) {
        let mut disk = self.disk();
        disk.faults = Faults::default();
        for inode in disk.inodes.values_mut() {
            inode.bad.clear();
            inode.sync_after = None;
        }
    }

    /// Reads that touch these bytes fail with `EIO`.
    pub fn break_range(&self, path: &Path, bytes: Range<u64>) {
        self.disk().inode_of(path).bad.push(bytes);
    }

    /// Flips one bit, durably and silently. Bits beyond the end of the file are ignored.
    pub fn flip_bit(&self, path: &Path, byte: u64, bit: u8) {
        let mut disk = self.disk();
        let inode = disk.inode_of(path);
        for content in [&mut inode.current, &mut inode.durable] {
            content.flip(byte as usize, bit);
        }
    }

    /// Numbers of the 4 KiB pages of a file that are not all zeros: a flipped bit may matter there.
    pub fn used_pages(&self, path: &Path) -> Vec<u64> {
        self.disk().inode_of(path).current.used_pages().collect()
    }

    /// Writes and syncs so far.
    pub fn operations(&self) -> (u64, u64) {
        let disk = self.disk();
        (disk.writes, disk.syncs)
    }

    /// Replaces a file's content, durably and silently, with a damaged image for example.
    pub fn put_image(&self, path: &Path, bytes: &[u8]) {
        let mut disk = self.disk();
        let id = disk.names.get(path).copied().unwrap_or_else(|| {
            let id = disk.new_id();
            disk.names.insert(path.to_owned(), id);
            disk.durable_names.insert(path.to_owned(), id);
            id
        });
        disk.inodes.insert(
            id,
            Inode {
                current: Image::from_bytes(bytes),
                durable: Image::from_bytes(bytes),
                ..Inode::default()
            },
        );
    }
}

fn lock(disk: &Mutex<Disk>) -> MutexGuard<'_, Disk> {
    disk.lock().expect("no holder of this lock panics")
}

fn eio(what: &str) -> io::Error {
    io::Error::other(format!("simulated: {what}"))
}

fn missing() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "simulated: no such file")
}

impl Inode {
    /// Applies any part of the pending writes to the disk, in any order.
    fn settle(&mut self, random: &mut SplitMix) {
        let mut pending = std::mem::take(&mut self.pending);
        let reorder = random.below(2) == 0;
        while !pending.is_empty() {
            let next = if reorder { random.below(pending.len()) } else { 0 };
            let write = pending.remove(next);
            match random.below(3) {
                0 => {}
                1 => write.apply(&mut self.durable),
                _ => tear(&mut self.durable, &write, random),
            }
        }
    }

    fn crash(&mut self, random: &mut SplitMix) {
        let grown = self.current.len();
        self.settle(random);
        // The new size may or may not be durable; bytes that were never written read as zeros.
        if random.below(2) == 0 && self.durable.len() < grown {
            self.durable.resize(grown);
        }
        if self.differs || self.current.len() != self.durable.len() {
            self.current = self.durable.clone();
        }
        (self.differs, self.doubtful, self.locked_by) = (false, false, None);
        (self.cut, self.sync_after) = (false, None);
    }

    fn sync(&mut self) {
        if self.doubtful {
            for write in self.pending.drain(..) {
                write.apply(&mut self.durable);
            }
            self.durable.resize(self.current.len());
            return;
        }
        // Only pending writes and truncated ranges differ.
        if std::mem::take(&mut self.cut) {
            self.pending.clear();
            self.durable = self.current.clone();
        }
        self.durable.resize(self.current.len());
        for write in self.pending.drain(..) {
            self.durable.share(&self.current, write.offset, write.written.len());
        }
        self.differs = false;
    }
}

/// Counts one operation. Returns whether it is the one that fails.
fn counts_down(counter: &mut Option<u64>) -> bool {
    match counter {
        Some(0) => {
            *counter = None;
            true
        }
        Some(left) => {
            *left -= 1;
            false
        }
        None => false,
    }
}

impl Disk {
    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn inode_of(&mut self, path: &Path) -> &mut Inode {
        let id = self.names.get(path).copied().expect("the test names a file that exists");
        self.inodes.get_mut(&id).expect("names lead to inodes")
    }

    fn powered(&self) -> io::Result<()> {
        if self.faults.power_off { Err(eio("power is off")) } else { Ok(()) }
    }

    fn step(&mut self) -> io::Result<()> {
        self.powered()?;
        if counts_down(&mut self.faults.power_after) {
            self.faults.power_off = true;
        }
        self.powered()
    }

    fn used_bytes(&self) -> u64 {
        self.inodes.values().map(|inode| inode.current.len() as u64).sum()
    }

    /// Extends a file unless that exceeds the space limit.
    fn grow(&mut self, id: InodeId, len: usize) -> io::Result<()> {
        let have = self.inodes.get(&id).map_or(0, |inode| inode.current.len());
        let more = len.saturating_sub(have) as u64;
        if more > 0 && self.faults.space_bytes.is_some_and(|limit| self.used_bytes() + more > limit) {
            return Err(io::Error::new(io::ErrorKind::StorageFull, "simulated: no space"));
        }
        let inode = self.inodes.get_mut(&id).ok_or_else(missing)?;
        if more > 0 {
            inode.current.resize(len);
        }
        Ok(())
    }

    fn change_name(&mut self, change: NameChange) -> io::Result<()> {
        self.step()?;
        change.apply(&mut self.names);
        self.journal.push(change);
        Ok(())
    }
}

impl Files for SimFiles {
    fn open(&self, path: &Path, mode: OpenMode, caching: Caching) -> io::Result<Arc<dyn File>> {
        if mode != OpenMode::Existing {
            self.tell(DiskEvent::Name(path));
        }
        let mut disk = self.disk();
        disk.powered()?;
        let found = disk.names.get(path).copied();
        let inode = match (found, mode) {
            (Some(_), OpenMode::CreateNew) => {
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, "simulated: file exists"));
            }
            (Some(id), _) => id,
            (None, OpenMode::Existing) => return Err(missing()),
            (None, _) => {
                let id = disk.new_id();
                disk.change_name(NameChange::Link(path.to_owned(), id))?;
                disk.inodes.insert(id, Inode::default());
                id
            }
        };
        let (boot, handle) = (disk.boot, disk.new_id());
        let watch = self.watch.clone();
        Ok(Arc::new(SimFile { disk: self.disk.clone(), watch, inode, boot, handle, caching }))
    }

    fn create_dir_all(&self, path: &Path) -> io::Result<()> {
        let mut disk = self.disk();
        disk.powered()?;
        disk.dirs.extend(path.ancestors().map(Path::to_owned));
        Ok(())
    }

    fn list(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        let disk = self.disk();
        disk.powered()?;
        let files = disk.names.keys().filter(|name| parent(name) == path);
        let dirs = disk.dirs.iter().filter(|name| *name != path && parent(name) == path);
        Ok(files.chain(dirs).cloned().collect())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.tell(DiskEvent::Name(to));
        let mut disk = self.disk();
        let id = disk.names.get(from).copied().ok_or_else(missing)?;
        disk.change_name(NameChange::Rename(from.to_owned(), to.to_owned(), id))
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.tell(DiskEvent::Name(path));
        let mut disk = self.disk();
        disk.names.get(path).ok_or_else(missing)?;
        disk.change_name(NameChange::Unlink(path.to_owned()))
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.tell(DiskEvent::SyncDir(path));
        let mut disk = self.disk();
        disk.step()?;
        let disk = &mut *disk;
        // Later changes may depend on earlier ones, so everything up to the last change in `path` becomes durable.
        let last = disk.journal.iter().rposition(|change| change.touches(path));
        for change in disk.journal.drain(..last.map_or(0, |last| last + 1)) {
            change.apply(&mut disk.durable_names);
        }
        Ok(())
    }

    fn exists(&self, path: &Path) -> bool {
        let disk = self.disk();
        disk.names.contains_key(path) || disk.dirs.contains(path)
    }

    fn free_bytes(&self, _path: &Path) -> io::Result<u64> {
        let disk = self.disk();
        Ok(disk.faults.space_bytes.map_or(1 << 40, |limit| limit.saturating_sub(disk.used_bytes())))
    }
}

struct SimFile {
    disk: Arc<Mutex<Disk>>,
    watch: Arc<OnceLock<DiskWatch>>,
    inode: InodeId,
    boot: u64,
    handle: u64,
    caching: Caching,
}

impl SimFile {
    fn tell(&self, event: DiskEvent<'_>) {
        if let Some(watch) = self.watch.get() {
            watch(self.inode, event);
        }
    }

    fn alive(&self) -> io::Result<MutexGuard<'_, Disk>> {
        let disk = lock(&self.disk);
        disk.powered()?;
        if disk.boot == self.boot { Ok(disk) } else { Err(eio("the handle is from before a crash")) }
    }

    /// Checks the alignment that `O_DIRECT` demands.
    fn check_alignment(&self, start: *const u8, len: usize, offset: u64) -> io::Result<()> {
        let aligned =
            [start as u64, len as u64, offset].iter().all(|value| value.is_multiple_of(BLOCK_BYTES));
        if self.caching == Caching::Buffered || aligned {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::InvalidInput, "simulated: not aligned for O_DIRECT"))
    }

    fn write_pending(&self, disk: &mut Disk, written: Written, offset: u64) -> io::Result<()> {
        disk.step()?;
        disk.writes += 1;
        let offset = usize::try_from(offset).map_err(io::Error::other)?;
        disk.grow(self.inode, offset + written.len())?;
        let fails = counts_down(&mut disk.faults.write_after);
        let Disk { inodes, random, .. } = disk;
        let inode = inodes.get_mut(&self.inode).ok_or_else(missing)?;
        let write = Pending { offset, written };
        inode.differs = true;
        if fails {
            tear(&mut inode.current, &write, random);
            inode.doubtful = true;
            inode.pending.push(write);
            return Err(eio("write error"));
        }
        write.apply(&mut inode.current);
        inode.pending.push(write);
        Ok(())
    }
}

impl File for SimFile {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.check_alignment(buffer.as_ptr(), buffer.len(), offset)?;
        let mut disk = self.alive()?;
        let inode = disk.inodes.get_mut(&self.inode).ok_or_else(missing)?;
        let end = offset + buffer.len() as u64;
        if inode.bad.iter().any(|bad| bad.start < end && offset < bad.end) {
            return Err(eio("read error"));
        }
        inode.current.read(offset as usize, buffer).ok_or(io::ErrorKind::UnexpectedEof.into())
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.check_alignment(bytes.as_ptr(), bytes.len(), offset)?;
        self.tell(DiskEvent::Write { offset, bytes });
        let mut disk = self.alive()?;
        let full_from = disk.inodes.get(&self.inode).and_then(|inode| inode.full_from);
        if full_from.is_some_and(|from| offset + bytes.len() as u64 > from) {
            let kept = (disk.random.below(bytes.len() + 4096)) / 4096 * 4096;
            self.write_pending(&mut disk, Written::Bytes(bytes[..kept.min(bytes.len())].to_vec()), offset)?;
            return Err(io::Error::new(io::ErrorKind::StorageFull, "simulated: the host is full"));
        }
        self.write_pending(&mut disk, Written::Bytes(bytes.to_vec()), offset)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.tell(DiskEvent::Sync);
        let mut disk = self.alive()?;
        disk.step()?;
        disk.syncs += 1;
        let fails = counts_down(&mut disk.faults.sync_after);
        let Disk { inodes, random, .. } = &mut *disk;
        let inode = inodes.get_mut(&self.inode).ok_or_else(missing)?;
        let fails = counts_down(&mut inode.sync_after) || fails;
        if fails {
            inode.doubtful = true;
            inode.settle(random);
            return Err(eio("sync error"));
        }
        inode.sync();
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        let disk = self.alive()?;
        Ok(disk.inodes.get(&self.inode).ok_or_else(missing)?.current.len() as u64)
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.tell(DiskEvent::SetLen(len_bytes));
        let mut disk = self.alive()?;
        disk.step()?;
        disk.grow(self.inode, len_bytes as usize)?;
        let inode = disk.inodes.get_mut(&self.inode).ok_or_else(missing)?;
        inode.cut |= (len_bytes as usize) < inode.current.len();
        inode.current.resize(len_bytes as usize);
        inode.differs = true;
        // Writes beyond the new end never reach the disk. The next sync makes the truncation durable. A crash before it
        // may bring back bytes beyond the new end, which is harmless.
        inode.pending.retain_mut(|write| {
            write.written.truncate((len_bytes as usize).saturating_sub(write.offset));
            write.written.len() > 0
        });
        Ok(())
    }

    fn allocate(&self, len_bytes: u64) -> io::Result<()> {
        let mut disk = self.alive()?;
        disk.step()?;
        disk.grow(self.inode, len_bytes as usize)
    }

    fn punch(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        let mut disk = self.alive()?;
        let have = disk.inodes.get(&self.inode).ok_or_else(missing)?.current.len() as u64;
        let len = len_bytes.min(have.saturating_sub(offset));
        // Not reported to the watch: nothing depends on the time at which a hole appears.
        self.write_pending(&mut disk, Written::Zeros(len as usize), offset)
    }

    fn try_lock(&self) -> io::Result<()> {
        let mut disk = self.alive()?;
        let inode = disk.inodes.get_mut(&self.inode).ok_or_else(missing)?;
        if inode.locked_by.is_some_and(|holder| holder != self.handle) {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        inode.locked_by = Some(self.handle);
        Ok(())
    }

    fn unlock(&self) -> io::Result<()> {
        let mut disk = self.alive()?;
        let inode = disk.inodes.get_mut(&self.inode).ok_or_else(missing)?;
        inode.locked_by.take_if(|holder| *holder == self.handle);
        Ok(())
    }

    fn raw_fd(&self) -> Option<RawFd> {
        None
    }

    fn latency(&self) -> Option<Duration> {
        let mut disk = lock(&self.disk);
        let (shortest, longest) = disk.latency_ns?;
        let spread = disk.random.below((longest - shortest) as usize + 1) as u64;
        Some(Duration::from_nanos(shortest + spread))
    }
}

impl Drop for SimFile {
    fn drop(&mut self) {
        let mut disk = lock(&self.disk);
        let boot = disk.boot;
        if let Some(inode) = disk.inodes.get_mut(&self.inode)
            && inode.locked_by == Some(self.handle)
            && boot == self.boot
        {
            inode.locked_by = None;
        }
    }
}

#[cfg(test)]
mod tests;
