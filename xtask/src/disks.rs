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

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use fuse::{
    DirReply, Errno, FileAttr, FileType, InitFlags, Op, OpenFlags, Options, ReadRequest, Reply, Request,
    Serve, Session, Terms, Transport, WriteRequest,
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
    let options = Options {
        source: "disks".to_owned(),
        subtype: "disks",
        read_only: false,
        threads: THREADS,
        wanted: InitFlags::ASYNC_READ,
        request_bytes_max: 1 << 20,
        read_ahead_bytes: 1 << 20,
        background_max: BACKGROUND_MAX,
        transport: Transport::Device,
    };
    let device = Session::open_device().context("open /dev/fuse")?;
    let service = Service { disks: Arc::new(disks), size };
    Session::mount(device, &mount, &options, |_, _| Arc::new(service)).context("mount")?.join();
    Ok(())
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
    fn attr(&self, ino: u64) -> Option<FileAttr> {
        let (kind, mode, size) = match ino {
            ROOT => (FileType::Directory, 0o755, 0),
            CONTROL => (FileType::Regular, 0o600, 0),
            _ => {
                self.index(ino)?;
                (FileType::Regular, 0o600, self.size)
            }
        };
        Some(FileAttr {
            ino,
            kind,
            mode,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            size,
            blocks: size / 512,
            block_bytes: 4096,
            atime_ns: 0,
            mtime_ns: 0,
            ctime_ns: 0,
            btime_ns: 0,
        })
    }

    fn index(&self, ino: u64) -> Option<usize> {
        let index = usize::try_from(ino.checked_sub(FIRST)?).ok()?;
        (index < self.disks.count()).then_some(index)
    }

    /// Does the work after the delay of a slow disk, on its own thread so that other disks are not delayed. A shorter
    /// delay that is set later also shortens waits that have begun.
    fn work(&self, ino: u64, work: impl FnOnce(Result<(&Disks, usize), Errno>) + Send + 'static) {
        let Some(index) = self.index(ino) else { return work(Err(Errno::NOENT)) };
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
        Self::IO
    }
}

fn reply_done(reply: Reply, result: Result<(), Errno>) {
    match result {
        Ok(()) => reply.done(),
        Err(error) => reply.error(error),
    }
}

impl Serve for Service {
    fn serve(&self, request: Request, reply: Reply) {
        let ino = request.ino;
        match request.op {
            Op::Lookup { name } => self.lookup(&name, reply),
            // Sizes and modes are fixed; a shell that opens `control` with `>` truncates it.
            Op::GetAttr | Op::SetAttr(_) => match self.attr(ino) {
                Some(attr) => reply.attr(&attr, TTL),
                None => reply.error(Errno::NOENT),
            },
            Op::Open { .. } => {
                // No cache may sit in front of the disk.
                reply.opened(0, OpenFlags::DIRECT_IO | OpenFlags::PARALLEL_DIRECT_WRITES);
            }
            Op::OpenDir => drop(reply.opened(0, OpenFlags::default())),
            Op::Read(read) => self.read(ino, read, reply),
            Op::Write(write) => self.write(ino, write, reply),
            Op::Sync if ino == CONTROL => reply.done(),
            Op::Sync => self.work(ino, move |disk| {
                reply_done(reply, disk.and_then(|(disks, index)| Ok(disks.flush(index)?)));
            }),
            // Plain allocation does nothing: the size is fixed. All other modes write zeros here.
            Op::Allocate { mode, .. } if mode & !1 == 0 => reply.done(),
            Op::Allocate { offset, length, .. } => self.work(ino, move |disk| {
                let zeros = Data::Zeros(length);
                reply_done(reply, disk.and_then(|(disks, index)| Ok(disks.write(index, offset, zeros)?)));
            }),
            Op::ReadDir { offset, size, plus: false, .. } => self.read_dir(offset, size, reply),
            Op::Flush { .. } | Op::Release { .. } | Op::ReleaseDir { .. } => reply.done(),
            _ => reply.error(Errno::NOSYS),
        }
    }

    fn forget(&self, _references: &[(u64, u64)]) {}
}

impl Service {
    fn lookup(&self, name: &[u8], reply: Reply) {
        let name = String::from_utf8_lossy(name);
        let ino = if name == "control" { Some(CONTROL) } else { name.parse().ok().map(|n: u64| n + FIRST) };
        match ino.and_then(|ino| self.attr(ino)) {
            Some(attr) => drop(reply.entry(&attr, Terms { name: TTL, attr: TTL })),
            None => reply.error(Errno::NOENT),
        }
    }

    fn read(&self, ino: u64, read: ReadRequest, reply: Reply) {
        if ino == CONTROL {
            return reply.data(&[]);
        }
        self.work(ino, move |disk| {
            match disk.and_then(|(disks, index)| Ok(disks.read(index, read.offset, read.size as usize)?)) {
                Ok(data) => reply.data(&data),
                Err(error) => reply.error(error),
            }
        });
    }

    fn write(&self, ino: u64, write: WriteRequest, reply: Reply) {
        let len = write.data.len() as u32;
        if ino == CONTROL {
            let command = std::str::from_utf8(&write.data).ok().and_then(|text| text.parse::<Command>().ok());
            return match command.map(|command| self.disks.obey(command)) {
                Some(Ok(())) => reply.written(len),
                Some(Err(error)) => reply.error(error.into()),
                None => reply.error(Errno::INVAL),
            };
        }
        let data = Data::Bytes(write.data.to_vec());
        self.work(ino, move |disk| {
            match disk.and_then(|(disks, index)| Ok(disks.write(index, write.offset, data)?)) {
                Ok(()) => reply.written(len),
                Err(error) => reply.error(error),
            }
        });
    }

    fn read_dir(&self, offset: u64, size: u32, reply: Reply) {
        let names =
            std::iter::once("control".to_owned()).chain((0..self.disks.count()).map(|n| n.to_string()));
        let mut out = DirReply::new(size);
        for (at, name) in (1..).zip(names).skip(offset as usize) {
            if !out.add(CONTROL + at - 1, FileType::Regular, at, name.as_bytes()) {
                break;
            }
        }
        reply.dir(&out);
    }
}
