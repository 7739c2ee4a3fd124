//! `cargo xtask nullfs MOUNT`: a filesystem in memory behind FUSE, with the session settings that Forebay uses.
//!
//! Its cost is that of FUSE: the limit for any filesystem over the same transport. It supports only the needs of the
//! benchmark; an unlinked file is gone at once, even if it is open.
#![allow(clippy::disallowed_methods, reason = "a filesystem for measurements needs real time")]

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use fuser::{
    BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate,
    ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs,
    ReplyWrite, Request, SessionACL, TimeOrNow, WriteFlags,
};

pub(crate) const USAGE: &str = "nullfs MOUNT";

/// How long the kernel may cache names and attributes.
const TTL: Duration = Duration::from_secs(10);
const GENERATION: Generation = Generation(0);
const REQUEST_BYTES_MAX: u32 = 1 << 20;
const READAHEAD_KIB: u32 = 4096;
const BACKGROUND_MAX: u16 = 128;
const FILE_HANDLE: FileHandle = FileHandle(0);

/// Mounts and serves until the filesystem is unmounted.
pub(crate) fn run(mount: &Path) -> Result<()> {
    let mut config = Config::default();
    config.mount_options = vec![MountOption::FSName("nullfs".to_owned()), MountOption::DefaultPermissions];
    config.acl = SessionACL::All;
    config.n_threads = Some(std::thread::available_parallelism().map_or(4, usize::from).max(4));
    config.clone_fd = true;
    let session = fuser::spawn_mount(NullFs::new(), mount, &config).context("mount")?;
    raise_readahead(mount)?;
    session.join().context("serve")
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
    position_of: HashMap<OsString, u64>,
    at: BTreeMap<u64, (OsString, u64)>,
    next: u64,
}

impl Names {
    fn insert(&mut self, name: &OsStr, inode: u64) -> Option<u64> {
        let old = self.remove(name);
        self.next += 1;
        self.position_of.insert(name.to_owned(), self.next);
        self.at.insert(self.next, (name.to_owned(), inode));
        old
    }

    fn get(&self, name: &OsStr) -> Option<u64> {
        Some(self.at[self.position_of.get(name)?].1)
    }

    fn remove(&mut self, name: &OsStr) -> Option<u64> {
        let position = self.position_of.remove(name)?;
        self.at.remove(&position).map(|(_, inode)| inode)
    }
}

impl NullFs {
    fn new() -> Self {
        let root =
            Inode { attr: attr(1, FileType::Directory, 0o755, 0, 0), body: Body::Names(Names::default()) };
        Self {
            inodes: RwLock::new(HashMap::from([(1, Arc::new(RwLock::new(root)))])),
            next: AtomicU64::new(2),
        }
    }

    fn inode(&self, number: INodeNo) -> Result<Arc<RwLock<Inode>>, Errno> {
        self.inodes.read().expect("no panic").get(&number.0).cloned().ok_or(Errno::ENOENT)
    }

    fn names<T>(
        &self,
        parent: INodeNo,
        work: impl FnOnce(&mut Names) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let inode = self.inode(parent)?;
        let mut inode = inode.write().expect("no panic");
        match &mut inode.body {
            Body::Names(names) => work(names),
            _ => Err(Errno::ENOTDIR),
        }
    }

    fn attr(&self, number: INodeNo) -> Result<FileAttr, Errno> {
        Ok(self.inode(number)?.read().expect("no panic").attr)
    }

    fn find(&self, parent: INodeNo, name: &OsStr) -> Result<FileAttr, Errno> {
        let inode = self.inode(parent)?;
        let number = match &inode.read().expect("no panic").body {
            Body::Names(names) => names.get(name).ok_or(Errno::ENOENT)?,
            _ => return Err(Errno::ENOTDIR),
        };
        self.attr(INodeNo(number))
    }

    fn make(&self, parent: INodeNo, name: &OsStr, new: FileAttr, body: Body) -> Result<FileAttr, Errno> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let attr = FileAttr { ino: INodeNo(number), ..new };
        let inode = Arc::new(RwLock::new(Inode { attr, body }));
        self.inodes.write().expect("no panic").insert(number, inode);
        self.names(parent, |names| match names.get(name) {
            Some(_) => Err(Errno::EEXIST),
            None => {
                names.insert(name, number);
                Ok(attr)
            }
        })
    }

    fn unname(&self, parent: INodeNo, name: &OsStr) -> Result<(), Errno> {
        let number = self.names(parent, |names| names.remove(name).ok_or(Errno::ENOENT))?;
        self.drop_link(number);
        Ok(())
    }

    fn drop_link(&self, number: u64) {
        let Ok(inode) = self.inode(INodeNo(number)) else { return };
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
    fn list(&self, number: INodeNo, offset: u64) -> Result<Vec<(u64, OsString, u64)>, Errno> {
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

fn attr(number: u64, kind: FileType, mode: u32, uid: u32, gid: u32) -> FileAttr {
    let now = SystemTime::now();
    FileAttr {
        ino: INodeNo(number),
        size: 0,
        blocks: 0,
        atime: now,
        mtime: now,
        ctime: now,
        crtime: now,
        kind,
        perm: (mode & 0o7777) as u16,
        nlink: if kind == FileType::Directory { 2 } else { 1 },
        uid,
        gid,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

fn time(given: TimeOrNow) -> SystemTime {
    match given {
        TimeOrNow::SpecificTime(time) => time,
        TimeOrNow::Now => SystemTime::now(),
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
    let Body::Bytes(bytes) = &mut inode.body else { return Err(Errno::EISDIR) };
    if offset > bytes.len() {
        bytes.resize(offset, 0);
    }
    let inside = data.len().min(bytes.len() - offset);
    bytes[offset..offset + inside].copy_from_slice(&data[..inside]);
    bytes.extend_from_slice(&data[inside..]);
    inode.attr.size = bytes.len() as u64;
    inode.attr.blocks = inode.attr.size.div_ceil(512);
    inode.attr.mtime = SystemTime::now();
    Ok(())
}

fn reply_entry(reply: ReplyEntry, result: Result<FileAttr, Errno>) {
    match result {
        Ok(attr) => reply.entry(&TTL, &attr, GENERATION),
        Err(error) => reply.error(error),
    }
}

fn reply_empty(reply: ReplyEmpty, result: Result<(), Errno>) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}

impl Filesystem for NullFs {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = InitFlags::FUSE_ASYNC_READ
            | InitFlags::FUSE_ASYNC_DIO
            | InitFlags::FUSE_ATOMIC_O_TRUNC
            | InitFlags::FUSE_BIG_WRITES
            | InitFlags::FUSE_DO_READDIRPLUS
            | InitFlags::FUSE_READDIRPLUS_AUTO
            | InitFlags::FUSE_PARALLEL_DIROPS
            | InitFlags::FUSE_CACHE_SYMLINKS
            | InitFlags::FUSE_HANDLE_KILLPRIV_V2
            | InitFlags::FUSE_EXPLICIT_INVAL_DATA;
        let _ = config.add_capabilities(wanted & config.capabilities());
        let _ = config.set_max_write(REQUEST_BYTES_MAX);
        if let Err(most) = config.set_max_readahead(4 * REQUEST_BYTES_MAX) {
            let _ = config.set_max_readahead(most);
        }
        let _ = config.set_max_background(BACKGROUND_MAX);
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        reply_entry(reply, self.find(parent, name));
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        match self.attr(ino) {
            Ok(attr) => reply.attr(&TTL, &attr),
            Err(error) => reply.error(error),
        }
    }

    fn setattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let inode = match self.inode(ino) {
            Ok(inode) => inode,
            Err(error) => return reply.error(error),
        };
        let mut inode = inode.write().expect("no panic");
        if let Some(size) = size {
            set_size(&mut inode, size);
        }
        let attr = &mut inode.attr;
        attr.perm = mode.map_or(attr.perm, |mode| (mode & 0o7777) as u16);
        attr.uid = uid.unwrap_or(attr.uid);
        attr.gid = gid.unwrap_or(attr.gid);
        attr.atime = atime.map_or(attr.atime, time);
        attr.mtime = mtime.map_or(attr.mtime, time);
        reply.attr(&TTL, &inode.attr);
    }

    fn readlink(&self, _req: &Request, ino: INodeNo, reply: ReplyData) {
        match self.inode(ino) {
            Ok(inode) => match &inode.read().expect("no panic").body {
                Body::Link(text) => reply.data(text),
                _ => reply.error(Errno::EINVAL),
            },
            Err(error) => reply.error(error),
        }
    }

    fn mknod(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _rdev: u32,
        reply: ReplyEntry,
    ) {
        let new = attr(0, FileType::RegularFile, mode & !umask, req.uid(), req.gid());
        reply_entry(reply, self.make(parent, name, new, Body::Bytes(Vec::new())));
    }

    fn mkdir(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let new = attr(0, FileType::Directory, mode & !umask, req.uid(), req.gid());
        reply_entry(reply, self.make(parent, name, new, Body::Names(Names::default())));
    }

    fn unlink(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        reply_empty(reply, self.unname(parent, name));
    }

    fn rmdir(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let is_empty =
            self.find(parent, name).and_then(|attr| self.names(attr.ino, |names| Ok(names.at.is_empty())));
        let result = match is_empty {
            Ok(true) => self.unname(parent, name),
            Ok(false) => Err(Errno::ENOTEMPTY),
            Err(error) => Err(error),
        };
        reply_empty(reply, result);
    }

    fn symlink(&self, req: &Request, parent: INodeNo, link_name: &OsStr, target: &Path, reply: ReplyEntry) {
        let text = target.as_os_str().as_bytes().to_vec();
        let new =
            FileAttr { size: text.len() as u64, ..attr(0, FileType::Symlink, 0o777, req.uid(), req.gid()) };
        reply_entry(reply, self.make(parent, link_name, new, Body::Link(text)));
    }

    fn rename(
        &self,
        _req: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        _flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let moved = self.names(parent, |names| names.remove(name).ok_or(Errno::ENOENT));
        let result =
            moved.and_then(|number| self.names(newparent, |names| Ok(names.insert(newname, number))));
        if let Ok(Some(replaced)) = result {
            self.drop_link(replaced);
        }
        reply_empty(reply, result.map(drop));
    }

    fn link(&self, _req: &Request, ino: INodeNo, newparent: INodeNo, newname: &OsStr, reply: ReplyEntry) {
        let result = self.names(newparent, |names| Ok(names.insert(newname, ino.0))).and_then(|_| {
            let inode = self.inode(ino)?;
            let mut inode = inode.write().expect("no panic");
            inode.attr.nlink += 1;
            Ok(inode.attr)
        });
        reply_entry(reply, result);
    }

    fn open(&self, _req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        // The kernel leaves O_TRUNC to the filesystem.
        if flags.0 & rustix::fs::OFlags::TRUNC.bits() as i32 != 0
            && let Ok(inode) = self.inode(ino)
        {
            set_size(&mut inode.write().expect("no panic"), 0);
        }
        reply.opened(FILE_HANDLE, open_flags());
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
        let inode = match self.inode(ino) {
            Ok(inode) => inode,
            Err(error) => return reply.error(error),
        };
        let inode = inode.read().expect("no panic");
        match &inode.body {
            Body::Bytes(bytes) => {
                let start = (offset as usize).min(bytes.len());
                reply.data(&bytes[start..bytes.len().min(start + size as usize)]);
            }
            _ => reply.error(Errno::EISDIR),
        }
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
        let result = self
            .inode(ino)
            .and_then(|inode| write_at(&mut inode.write().expect("no panic"), offset as usize, data));
        match result {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(error),
        }
    }

    fn flush(&self, _req: &Request, _ino: INodeNo, _fh: FileHandle, _owner: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _req: &Request, _ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn readdir(&self, _req: &Request, ino: INodeNo, _fh: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let entries = match self.list(ino, offset) {
            Ok(entries) => entries,
            Err(error) => return reply.error(error),
        };
        for (at, name, number) in entries {
            let kind = self.attr(INodeNo(number)).map_or(FileType::RegularFile, |attr| attr.kind);
            if reply.add(INodeNo(number), at, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn readdirplus(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let entries = match self.list(ino, offset) {
            Ok(entries) => entries,
            Err(error) => return reply.error(error),
        };
        for (at, name, number) in entries {
            let Ok(attr) = self.attr(INodeNo(number)) else { continue };
            if reply.add(INodeNo(number), at, name, &TTL, &attr, GENERATION) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        reply.statfs(1 << 24, 1 << 24, 1 << 24, 1 << 24, 1 << 24, 4096, 255, 4096);
    }

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        let new = attr(0, FileType::RegularFile, mode & !umask, req.uid(), req.gid());
        match self.make(parent, name, new, Body::Bytes(Vec::new())) {
            Ok(attr) => reply.created(&TTL, &attr, GENERATION, FILE_HANDLE, open_flags()),
            Err(error) => reply.error(error),
        }
    }
}

fn open_flags() -> FopenFlags {
    FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
}
