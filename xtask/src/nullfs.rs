//! `cargo xtask nullfs MOUNT`: a filesystem in memory behind FUSE, with the session settings that Forebay uses.
//!
//! Its cost is that of FUSE: the limit for any filesystem over the same transport. It supports only the needs of the
//! benchmark; an unlinked file is gone at once, even if it is open.
#![allow(clippy::disallowed_methods, reason = "a filesystem for measurements needs real time")]

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use fuse::{
    DirReply, Errno, FileAttr, FileType, InitFlags, Op, OpenFlags, Options, Reply, Request, Serve, Session,
    SetAttrRequest, StatFs, Terms, Time, Transport,
};

pub(crate) const USAGE: &str = "nullfs MOUNT [device|uring]";

/// How long the kernel may cache names and attributes.
const TTL: Duration = Duration::from_secs(10);
const TERMS: Terms = Terms { name: TTL, attr: TTL };
const REQUEST_BYTES_MAX: u32 = 1 << 20;
const READAHEAD_KIB: u32 = 4096;
const BACKGROUND_MAX: u16 = 128;

/// Mounts and serves until the filesystem is unmounted.
pub(crate) fn run(mount: &Path, transport: &[&str]) -> Result<()> {
    let transport = match transport {
        [] => Some(Transport::default()),
        [name] => Transport::named(name),
        _ => None,
    };
    let transport = transport.with_context(|| format!("usage: {USAGE}"))?;
    let options = Options {
        source: "nullfs".to_owned(),
        subtype: "nullfs",
        read_only: false,
        threads: std::thread::available_parallelism().map_or(4, usize::from).max(4),
        wanted: InitFlags::ASYNC_READ
            | InitFlags::ASYNC_DIO
            | InitFlags::DONT_MASK
            | InitFlags::DO_READDIRPLUS
            | InitFlags::READDIRPLUS_AUTO
            | InitFlags::PARALLEL_DIROPS
            | InitFlags::CACHE_SYMLINKS
            | InitFlags::HANDLE_KILLPRIV_V2
            | InitFlags::EXPLICIT_INVAL_DATA,
        request_bytes_max: REQUEST_BYTES_MAX,
        read_ahead_bytes: 4 * REQUEST_BYTES_MAX,
        background_max: BACKGROUND_MAX,
        transport,
    };
    let device = Session::open_device().context("open /dev/fuse")?;
    let session = Session::mount(device, mount, &options, |_, _| Arc::new(NullFs::new())).context("mount")?;
    ensure!(session.transport() == transport, "the kernel does not offer this transport");
    raise_readahead(mount)?;
    session.join();
    Ok(())
}

/// Raises read-ahead as Forebay does: the default of 128 KiB is too little for its extents.
fn raise_readahead(mount: &Path) -> Result<()> {
    let device = rustix::fs::stat(mount)?.st_dev;
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let knob = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
    std::fs::write(&knob, READAHEAD_KIB.to_string()).with_context(|| format!("write {knob}"))
}

struct NullFs {
    inodes: RwLock<HashMap<u64, Arc<RwLock<Inode>>>>,
    next: AtomicU64,
}

struct Inode {
    attr: FileAttr,
    body: Body,
}

enum Body {
    Bytes(Vec<u8>),
    Names(Names),
    Link(Vec<u8>),
}

/// A directory. The position of an entry never changes, so that entries can be removed during a listing.
#[derive(Default)]
struct Names {
    position_of: HashMap<Bytes, u64>,
    at: BTreeMap<u64, (Bytes, u64)>,
    next: u64,
}

impl Names {
    fn insert(&mut self, name: &Bytes, inode: u64) -> Option<u64> {
        let old = self.remove(name);
        self.next += 1;
        self.position_of.insert(name.clone(), self.next);
        self.at.insert(self.next, (name.clone(), inode));
        old
    }

    fn get(&self, name: &Bytes) -> Option<u64> {
        Some(self.at[self.position_of.get(name)?].1)
    }

    fn remove(&mut self, name: &Bytes) -> Option<u64> {
        let position = self.position_of.remove(name)?;
        self.at.remove(&position).map(|(_, inode)| inode)
    }
}

impl NullFs {
    fn new() -> Self {
        let root = Inode {
            attr: FileAttr { ino: 1, ..attr(FileType::Directory, 0o755, 0, 0) },
            body: Body::Names(Names::default()),
        };
        Self {
            inodes: RwLock::new(HashMap::from([(1, Arc::new(RwLock::new(root)))])),
            next: AtomicU64::new(2),
        }
    }

    fn inode(&self, number: u64) -> Result<Arc<RwLock<Inode>>, Errno> {
        self.inodes.read().expect("no panic").get(&number).cloned().ok_or(Errno::NOENT)
    }

    fn names<T>(&self, parent: u64, work: impl FnOnce(&mut Names) -> Result<T, Errno>) -> Result<T, Errno> {
        let inode = self.inode(parent)?;
        let mut inode = inode.write().expect("no panic");
        match &mut inode.body {
            Body::Names(names) => work(names),
            _ => Err(Errno::NOTDIR),
        }
    }

    fn attr(&self, number: u64) -> Result<FileAttr, Errno> {
        Ok(self.inode(number)?.read().expect("no panic").attr)
    }

    fn find(&self, parent: u64, name: &Bytes) -> Result<FileAttr, Errno> {
        let inode = self.inode(parent)?;
        let number = match &inode.read().expect("no panic").body {
            Body::Names(names) => names.get(name).ok_or(Errno::NOENT)?,
            _ => return Err(Errno::NOTDIR),
        };
        self.attr(number)
    }

    fn make(&self, parent: u64, name: &Bytes, new: FileAttr, body: Body) -> Result<FileAttr, Errno> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let attr = FileAttr { ino: number, ..new };
        let inode = Arc::new(RwLock::new(Inode { attr, body }));
        self.inodes.write().expect("no panic").insert(number, inode);
        self.names(parent, |names| match names.get(name) {
            Some(_) => Err(Errno::EXIST),
            None => {
                names.insert(name, number);
                Ok(attr)
            }
        })
    }

    fn unname(&self, parent: u64, name: &Bytes) -> Result<(), Errno> {
        let number = self.names(parent, |names| names.remove(name).ok_or(Errno::NOENT))?;
        self.drop_link(number);
        Ok(())
    }

    fn drop_link(&self, number: u64) {
        let Ok(inode) = self.inode(number) else { return };
        let links = {
            let mut inode = inode.write().expect("no panic");
            inode.attr.nlink = inode.attr.nlink.saturating_sub(1);
            inode.attr.nlink
        };
        if links == 0 || matches!(inode.read().expect("no panic").body, Body::Names(_)) {
            self.inodes.write().expect("no panic").remove(&number);
        }
    }

    /// The entries of a directory from a position on: position, name, inode.
    fn list(&self, number: u64, offset: u64) -> Result<Vec<(u64, Bytes, u64)>, Errno> {
        self.names(number, |names| {
            Ok(names
                .at
                .range(offset + 1..)
                .take(512)
                .map(|(at, (name, inode))| (*at, name.clone(), *inode))
                .collect())
        })
    }
}

fn now_ns() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as i64)
}

fn attr(kind: FileType, mode: u32, uid: u32, gid: u32) -> FileAttr {
    let now = now_ns();
    FileAttr {
        ino: 0,
        kind,
        mode: mode & 0o7777,
        nlink: if kind == FileType::Directory { 2 } else { 1 },
        uid,
        gid,
        rdev: 0,
        size: 0,
        blocks: 0,
        block_bytes: 4096,
        atime_ns: now,
        mtime_ns: now,
        ctime_ns: now,
        btime_ns: now,
    }
}

fn time(given: Time) -> i64 {
    match given {
        Time::At(ns) => ns,
        Time::Now => now_ns(),
    }
}

fn set_size(inode: &mut Inode, size: u64) {
    if let Body::Bytes(bytes) = &mut inode.body {
        bytes.resize(size as usize, 0);
        inode.attr.size = size;
        inode.attr.blocks = size.div_ceil(512);
    }
}

fn write_at(inode: &mut Inode, offset: usize, data: &[u8]) -> Result<(), Errno> {
    let Body::Bytes(bytes) = &mut inode.body else { return Err(Errno::ISDIR) };
    if offset > bytes.len() {
        bytes.resize(offset, 0);
    }
    let inside = data.len().min(bytes.len() - offset);
    bytes[offset..offset + inside].copy_from_slice(&data[..inside]);
    bytes.extend_from_slice(&data[inside..]);
    inode.attr.size = bytes.len() as u64;
    inode.attr.blocks = inode.attr.size.div_ceil(512);
    inode.attr.mtime_ns = now_ns();
    Ok(())
}

fn reply_entry(reply: Reply, result: Result<FileAttr, Errno>) {
    match result {
        Ok(attr) => drop(reply.entry(&attr, TERMS)),
        Err(error) => reply.error(error),
    }
}

fn reply_done(reply: Reply, result: Result<(), Errno>) {
    match result {
        Ok(()) => reply.done(),
        Err(error) => reply.error(error),
    }
}

impl Serve for NullFs {
    fn serve(&self, request: Request, reply: Reply) {
        let Request { ino, uid, gid, .. } = request;
        match request.op {
            Op::Lookup { name } => reply_entry(reply, self.find(ino, &name)),
            Op::GetAttr => match self.attr(ino) {
                Ok(attr) => reply.attr(&attr, TTL),
                Err(error) => reply.error(error),
            },
            Op::SetAttr(set) => match self.set_attr(ino, &set) {
                Ok(attr) => reply.attr(&attr, TTL),
                Err(error) => reply.error(error),
            },
            Op::ReadLink => self.read_link(ino, reply),
            Op::MakeNode { name, mode, umask, .. } => {
                let new = attr(FileType::Regular, mode & !umask, uid, gid);
                reply_entry(reply, self.make(ino, &name, new, Body::Bytes(Vec::new())));
            }
            Op::MakeDir { name, mode, umask } => {
                let new = attr(FileType::Directory, mode & !umask, uid, gid);
                reply_entry(reply, self.make(ino, &name, new, Body::Names(Names::default())));
            }
            Op::Symlink { name, target } => {
                let new = FileAttr { size: target.len() as u64, ..attr(FileType::Symlink, 0o777, uid, gid) };
                reply_entry(reply, self.make(ino, &name, new, Body::Link(target.to_vec())));
            }
            Op::Unlink { name } => reply_done(reply, self.unname(ino, &name)),
            Op::RemoveDir { name } => reply_done(reply, self.remove_dir(ino, &name)),
            Op::Rename { name, new_parent, new_name, .. } => {
                reply_done(reply, self.rename((ino, &name), (new_parent, &new_name)));
            }
            Op::Link { target, name } => reply_entry(reply, self.link(target, ino, &name)),
            Op::Open { flags } => {
                // The kernel leaves O_TRUNC to the filesystem.
                if flags & rustix::fs::OFlags::TRUNC.bits() as i32 != 0
                    && let Ok(inode) = self.inode(ino)
                {
                    set_size(&mut inode.write().expect("no panic"), 0);
                }
                reply.opened(0, open_flags());
            }
            Op::Create { name, mode, umask, .. } => {
                let new = attr(FileType::Regular, mode & !umask, uid, gid);
                match self.make(ino, &name, new, Body::Bytes(Vec::new())) {
                    Ok(attr) => drop(reply.created(&attr, TERMS, 0, open_flags())),
                    Err(error) => reply.error(error),
                }
            }
            Op::Read(read) => self.read(ino, read.offset as usize, read.size as usize, reply),
            Op::Write(write) => self.write(ino, write.offset as usize, &write.data, reply),
            Op::OpenDir => drop(reply.opened(0, OpenFlags::default())),
            Op::ReadDir { offset, size, plus, .. } => self.read_dir(ino, offset, size, plus, reply),
            Op::StatFs => reply.stat_fs(&StatFs {
                blocks: 1 << 24,
                free: 1 << 24,
                files: 1 << 24,
                free_files: 1 << 24,
                block_bytes: 4096,
                name_max: 255,
            }),
            Op::Flush { .. } | Op::Sync | Op::Release { .. } | Op::ReleaseDir { .. } => reply.done(),
            _ => reply.error(Errno::NOSYS),
        }
    }

    fn forget(&self, _references: &[(u64, u64)]) {}
}

impl NullFs {
    fn set_attr(&self, ino: u64, set: &SetAttrRequest) -> Result<FileAttr, Errno> {
        let inode = self.inode(ino)?;
        let mut inode = inode.write().expect("no panic");
        if let Some(size) = set.size {
            set_size(&mut inode, size);
        }
        let attr = &mut inode.attr;
        attr.mode = set.mode.map_or(attr.mode, |mode| mode & 0o7777);
        attr.uid = set.uid.unwrap_or(attr.uid);
        attr.gid = set.gid.unwrap_or(attr.gid);
        attr.atime_ns = set.atime.map_or(attr.atime_ns, time);
        attr.mtime_ns = set.mtime.map_or(attr.mtime_ns, time);
        Ok(*attr)
    }

    fn read_link(&self, ino: u64, reply: Reply) {
        match self.inode(ino) {
            Ok(inode) => match &inode.read().expect("no panic").body {
                Body::Link(text) => reply.data(text),
                _ => reply.error(Errno::INVAL),
            },
            Err(error) => reply.error(error),
        }
    }

    fn remove_dir(&self, parent: u64, name: &Bytes) -> Result<(), Errno> {
        let dir = self.find(parent, name)?;
        match self.names(dir.ino, |names| Ok(names.at.is_empty()))? {
            true => self.unname(parent, name),
            false => Err(Errno::NOTEMPTY),
        }
    }

    fn rename(&self, from: (u64, &Bytes), to: (u64, &Bytes)) -> Result<(), Errno> {
        let number = self.names(from.0, |names| names.remove(from.1).ok_or(Errno::NOENT))?;
        if let Some(replaced) = self.names(to.0, |names| Ok(names.insert(to.1, number)))? {
            self.drop_link(replaced);
        }
        Ok(())
    }

    fn link(&self, ino: u64, parent: u64, name: &Bytes) -> Result<FileAttr, Errno> {
        self.names(parent, |names| Ok(names.insert(name, ino)))?;
        let inode = self.inode(ino)?;
        let mut inode = inode.write().expect("no panic");
        inode.attr.nlink += 1;
        Ok(inode.attr)
    }

    fn read(&self, ino: u64, offset: usize, size: usize, reply: Reply) {
        let inode = match self.inode(ino) {
            Ok(inode) => inode,
            Err(error) => return reply.error(error),
        };
        let inode = inode.read().expect("no panic");
        match &inode.body {
            Body::Bytes(bytes) => {
                let start = offset.min(bytes.len());
                reply.data(&bytes[start..bytes.len().min(start + size)]);
            }
            _ => reply.error(Errno::ISDIR),
        }
    }

    fn write(&self, ino: u64, offset: usize, data: &[u8], reply: Reply) {
        let inode = self.inode(ino);
        match inode.and_then(|inode| write_at(&mut inode.write().expect("no panic"), offset, data)) {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(error),
        }
    }

    fn read_dir(&self, ino: u64, offset: u64, size: u32, plus: bool, reply: Reply) {
        let entries = match self.list(ino, offset) {
            Ok(entries) => entries,
            Err(error) => return reply.error(error),
        };
        let mut out = DirReply::new(size);
        for (at, name, number) in entries {
            let Ok(attr) = self.attr(number) else { continue };
            let fits = match plus {
                true => out.add_plus(&attr, TERMS, at, &name),
                false => out.add(number, attr.kind, at, &name),
            };
            if !fits {
                break;
            }
        }
        reply.dir(&out);
    }
}

fn open_flags() -> OpenFlags {
    OpenFlags::KEEP_CACHE | OpenFlags::PARALLEL_DIRECT_WRITES
}
