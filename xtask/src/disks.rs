//! `cargo xtask disks`: disks with a volatile write cache that lose power, fail or become slow on command.
//!
//! Each disk is a file of fixed size on a FUSE mount, for direct use or behind a loop device. A write is stable once
//! a later flush of the same disk has returned. When the power is cut, a seed decides for each 512 bytes of every
//! unstable write whether they are kept or lost. So writes are lost, torn and reordered, as far as the rules of disks
//! allow.
//!
//! Commands are lines written to the file `control` on the mount: see [`Command`].
#![allow(clippy::disallowed_methods, reason = "a test of real processes needs real time, threads and files")]

mod command;
mod disk;

#[cfg(test)]
mod tests;

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result};
use fuser::{
    BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty,
    ReplyEntry, ReplyOpen, ReplyWrite, Request, TimeOrNow, WriteFlags,
};

use crate::arguments::Arguments;
use command::Command;
use disk::{Data, Disks, Failed};

pub(crate) const USAGE: &str = "disks --dir DIR --mount MOUNT [--count 6] [--size-mib 1024]";

const TTL: Duration = Duration::from_secs(3600);
const ROOT: u64 = 1;
const CONTROL: u64 = 2;
/// The inode of disk 0.
const FIRST: u64 = 3;
const HANDLE: FileHandle = FileHandle(0);
/// Interval at which a waiting operation of a slow disk reads the delay again.
const DELAY_POLL: Duration = Duration::from_millis(20);
const THREADS: usize = 8;
const BACKGROUND_MAX: u16 = 256;

/// Serves until the filesystem is unmounted.
pub(crate) fn run(arguments: &[&str]) -> Result<()> {
    let arguments = Arguments::parse(arguments, &["dir", "mount", "count", "size-mib"], &[])
        .with_context(|| format!("usage: {USAGE}"))?;
    let directory = PathBuf::from(arguments.text("dir").context("--dir is missing")?);
    let mount = PathBuf::from(arguments.text("mount").context("--mount is missing")?);
    let size = arguments.value("size-mib", 1024_u64)? << 20;
    let disks = Disks::open(&directory, arguments.value("count", 6)?, size).context("make the disks")?;
    let mut config = Config::default();
    config.mount_options = vec![MountOption::FSName("disks".to_owned())];
    config.n_threads = Some(THREADS);
    config.clone_fd = true;
    let session = fuser::spawn_mount(Service { disks: Arc::new(disks), size }, &mount, &config)?;
    session.join().context("serve")
}

/// The path of disk `index` on the mount.
pub(crate) fn path_of(mount: &Path, index: usize) -> PathBuf {
    mount.join(index.to_string())
}

struct Service {
    disks: Arc<Disks>,
    size: u64,
}

impl Service {
    fn attr(&self, ino: INodeNo) -> Option<FileAttr> {
        let (kind, perm, size) = match ino.0 {
            ROOT => (FileType::Directory, 0o755, 0),
            CONTROL => (FileType::RegularFile, 0o600, 0),
            _ => {
                self.index(ino)?;
                (FileType::RegularFile, 0o600, self.size)
            }
        };
        let time = SystemTime::UNIX_EPOCH;
        Some(FileAttr {
            ino,
            size,
            blocks: size / 512,
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind,
            perm,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }

    fn index(&self, ino: INodeNo) -> Option<usize> {
        let index = usize::try_from(ino.0.checked_sub(FIRST)?).ok()?;
        (index < self.disks.count()).then_some(index)
    }

    /// Does the work after the delay of a slow disk, on its own thread so that other disks are not delayed. A shorter
    /// delay that is set later also shortens waits that have begun.
    fn serve(&self, ino: INodeNo, work: impl FnOnce(Result<(&Disks, usize), Errno>) + Send + 'static) {
        let Some(index) = self.index(ino) else { return work(Err(Errno::ENOENT)) };
        if self.disks.delay(index).is_zero() {
            return work(Ok((&self.disks, index)));
        }
        let disks = Arc::clone(&self.disks);
        std::thread::spawn(move || {
            let started = Instant::now();
            while let left = disks.delay(index).saturating_sub(started.elapsed())
                && !left.is_zero()
            {
                std::thread::sleep(left.min(DELAY_POLL));
            }
            work(Ok((&disks, index)));
        });
    }
}

impl From<Failed> for Errno {
    fn from(_: Failed) -> Self {
        Self::EIO
    }
}

fn reply_empty(reply: ReplyEmpty, result: Result<(), Errno>) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}

impl Filesystem for Service {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let _ = config.set_max_write(1 << 20);
        let _ = config.set_max_background(BACKGROUND_MAX);
        Ok(())
    }

    fn lookup(&self, _req: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let name = name.to_string_lossy();
        let ino = if name == "control" { Some(CONTROL) } else { name.parse().ok().map(|n: u64| n + FIRST) };
        match ino.and_then(|ino| self.attr(INodeNo(ino))) {
            Some(attr) => reply.entry(&TTL, &attr, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        match self.attr(ino) {
            Some(attr) => reply.attr(&TTL, &attr),
            None => reply.error(Errno::ENOENT),
        }
    }

    /// Sizes and modes are fixed; a shell that opens `control` with `>` truncates it.
    fn setattr(
        &self,
        req: &Request,
        ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        _size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        self.getattr(req, ino, fh, reply);
    }

    fn open(&self, _req: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        // No cache may sit in front of the disk.
        reply.opened(HANDLE, FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        if ino.0 == CONTROL {
            return reply.data(&[]);
        }
        self.serve(ino, move |disk| {
            match disk.and_then(|(disks, index)| Ok(disks.read(index, offset, size as usize)?)) {
                Ok(data) => reply.data(&data),
                Err(error) => reply.error(error),
            }
        });
    }

    fn write(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let len = data.len() as u32;
        if ino.0 == CONTROL {
            let command = std::str::from_utf8(data).ok().and_then(|text| text.parse::<Command>().ok());
            return match command.map(|command| self.disks.obey(command)) {
                Some(Ok(())) => reply.written(len),
                Some(Err(error)) => reply.error(error.into()),
                None => reply.error(Errno::EINVAL),
            };
        }
        let data = Data::Bytes(data.to_vec());
        self.serve(ino, move |disk| {
            match disk.and_then(|(disks, index)| Ok(disks.write(index, offset, data)?)) {
                Ok(()) => reply.written(len),
                Err(error) => reply.error(error),
            }
        });
    }

    fn fsync(&self, _req: &Request, ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        if ino.0 == CONTROL {
            return reply.ok();
        }
        self.serve(ino, move |disk| {
            reply_empty(reply, disk.and_then(|(disks, index)| Ok(disks.flush(index)?)));
        });
    }

    fn flush(&self, _req: &Request, _ino: INodeNo, _fh: FileHandle, _owner: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fallocate(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        // Plain allocation does nothing: the size is fixed. All other modes write zeros here.
        if mode & !1 == 0 {
            return reply.ok();
        }
        self.serve(ino, move |disk| {
            let zeros = Data::Zeros(length);
            reply_empty(reply, disk.and_then(|(disks, index)| Ok(disks.write(index, offset, zeros)?)));
        });
    }

    fn readdir(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let names =
            std::iter::once("control".to_owned()).chain((0..self.disks.count()).map(|n| n.to_string()));
        for (at, name) in (1..).zip(names).skip(offset as usize) {
            if reply.add(INodeNo(CONTROL + at - 1), at, FileType::RegularFile, name) {
                break;
            }
        }
        reply.ok();
    }
}
