//! The kernel's requests, each translated to one call of the client.

use std::ffi::OsStr;
use std::future::Future;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use base::{FsError, Ino};
use client::{
    AllocateMode, Attr, Client, FileKind, MakeNode, NameTerm, NotTaken, OpenIntent, RenameMode, SeekKind,
    SetAttr, Whiteout, XattrMode,
};
use fuser::{
    BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenAccMode, OpenFlags, RenameFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl,
    ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};

use super::attr::{errno, file_attr, file_type, kind_of_mode, no_inode, ns_of};
use super::dir::{DOT, DOT_DOT, DirStream};
use super::direct::drop_pages;
use super::guard::{self, GuardRequest};
use super::setid::{Caller, has_set_id, mode_after_change};
use super::{CacheMode, Fuse, requests};

/// Most bytes in one request.
const REQUEST_BYTES_MAX: u32 = 1 << 20;
/// Most background requests (read-ahead, write-back) of the kernel at a time.
const BACKGROUND_MAX: u16 = 128;
/// Inode numbers are never reused, so one generation is enough.
const GENERATION: Generation = Generation(0);
/// Number of free inodes to report: only space is limited.
const FREE_INODES: u64 = 1 << 40;

/// File handles encode only whether the file may be written.
const READER: FileHandle = FileHandle(0);
const WRITER: FileHandle = FileHandle(1);

const ACCESS_LIST: &[u8] = b"system.posix_acl_access";
const ACL_NAMES: [&[u8]; 2] = [ACCESS_LIST, b"system.posix_acl_default"];

fn ino_of(number: INodeNo) -> Ino {
    Ino(number.0)
}

fn open_intent(flags: OpenFlags) -> OpenIntent {
    if flags.0 & libc::O_TRUNC != 0 && flags.acc_mode() != OpenAccMode::O_RDONLY {
        return OpenIntent::Truncate;
    }
    match flags.acc_mode() {
        OpenAccMode::O_RDONLY => OpenIntent::Read,
        OpenAccMode::O_WRONLY | OpenAccMode::O_RDWR => OpenIntent::Write,
    }
}

fn handle_of(intent: OpenIntent) -> FileHandle {
    if intent == OpenIntent::Read { READER } else { WRITER }
}

impl Fuse {
    fn run(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.client.note_use();
        requests::run(&self.runtime, work);
    }

    fn make(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        kind: FileKind,
        mode: u32,
        umask: u32,
    ) -> MakeNode {
        MakeNode {
            parent: ino_of(parent),
            name: name.as_bytes().to_vec().into(),
            kind,
            mode: mode & 0o7777,
            umask,
            uid: req.uid(),
            gid: req.gid(),
            rdev: 0,
            target: Vec::new().into(),
            open: OpenIntent::None,
        }
    }

    fn make_and_reply(&self, make: MakeNode, reply: ReplyEntry) {
        let client = self.client.clone();
        self.run(async move { reply_entry(&client, reply, client.make_named(make).await) });
    }

    fn open_flags(&self) -> FopenFlags {
        match self.cache {
            CacheMode::Write | CacheMode::Read => {
                FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
            }
            CacheMode::Direct => FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES,
        }
    }
}

fn reply_entry(client: &Client, reply: ReplyEntry, result: Result<(Attr, NameTerm), FsError>) {
    match result {
        Ok((attr, term)) => {
            let (attr_term, name_term) = (client.attr_term(attr.ino), client.name_term(&term));
            reply.entry_with_ttls(&attr_term, &name_term, &file_attr(&attr), GENERATION);
        }
        Err(error) => reply.error(errno(error)),
    }
}

fn reply_attr(client: &Client, reply: ReplyAttr, result: Result<Attr, FsError>) {
    match result {
        Ok(attr) => reply.attr(&client.attr_term(attr.ino), &file_attr(&attr)),
        Err(error) => reply.error(errno(error)),
    }
}

fn reply_empty(reply: ReplyEmpty, result: Result<(), FsError>) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(errno(error)),
    }
}

fn reply_xattr(reply: ReplyXattr, size: u32, result: Result<Vec<u8>, FsError>) {
    match result {
        Ok(value) if size == 0 => reply.size(value.len() as u32),
        Ok(value) if value.len() <= size as usize => reply.data(&value),
        Ok(_) => reply.error(Errno::ERANGE),
        Err(error) => reply.error(errno(error)),
    }
}

impl Filesystem for Fuse {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = InitFlags::FUSE_ASYNC_READ
            | InitFlags::FUSE_ASYNC_DIO
            | InitFlags::FUSE_EXPORT_SUPPORT
            | InitFlags::FUSE_BIG_WRITES
            | InitFlags::FUSE_DONT_MASK
            | InitFlags::FUSE_DO_READDIRPLUS
            | InitFlags::FUSE_READDIRPLUS_AUTO
            | InitFlags::FUSE_PARALLEL_DIROPS
            | InitFlags::FUSE_POSIX_ACL
            | InitFlags::FUSE_CACHE_SYMLINKS
            | InitFlags::FUSE_HANDLE_KILLPRIV_V2
            | InitFlags::FUSE_EXPLICIT_INVAL_DATA
            | InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP;
        // Not FUSE_ATOMIC_O_TRUNC: with it the kernel drops the pages of a running program before it finds that O_TRUNC
        // is not allowed (ETXTBSY), and the program dies. An older kernel has fewer flags; it does the rest itself.
        let _ = config.add_capabilities(wanted & config.capabilities());
        let _ = config.set_max_write(REQUEST_BYTES_MAX);
        if let Err(most) = config.set_max_readahead(4 * REQUEST_BYTES_MAX) {
            let _ = config.set_max_readahead(most);
        }
        let _ = config.set_max_background(BACKGROUND_MAX);
        let _ = config.set_time_granularity(Duration::from_nanos(1));
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let (client, name) = (self.client.clone(), name.to_owned());
        self.run(async move {
            match client.find(ino_of(parent), name.as_bytes()).await {
                Ok((Some(attr), term)) => reply_entry(&client, reply, Ok((attr, term))),
                // Inode 0: the kernel remembers that the name is not there.
                Ok((None, term)) => reply.entry(&client.name_term(&term), &no_inode(), GENERATION),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn forget(&self, _req: &Request, ino: INodeNo, nlookup: u64) {
        let ino = ino_of(ino);
        self.client.forget(ino, nlookup);
        if !self.client.is_pinned(ino) {
            self.cached.forget(ino);
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        let ino = ino_of(ino);
        if let Some(attr) = self.client.cached_attr(ino) {
            return reply_attr(&self.client, reply, Ok(attr));
        }
        let client = self.client.clone();
        self.run(async move { reply_attr(&client, reply, client.getattr(ino).await) });
    }

    fn setattr(
        &self,
        req: &Request,
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
        let client = self.client.clone();
        let now = client.wall_ns();
        let ns = |time: TimeOrNow| match time {
            TimeOrNow::SpecificTime(time) => ns_of(time),
            TimeOrNow::Now => now,
        };
        let (atime_ns, mtime_ns) = (atime.map(ns), mtime.map(ns));
        let mut set = SetAttr { mode, uid, gid, size, atime_ns, mtime_ns, ctime_ns: None };
        // A change of owner clears the set-id bits. So does a change of size by a caller without the right to keep
        // them.
        let caller = Caller::from(req);
        let kills_set_id = uid.is_some() || gid.is_some() || size.is_some() && !caller.keeps_set_id();
        let ino = ino_of(ino);
        self.run(async move {
            if kills_set_id && set.mode.is_none() {
                set.mode = mode_after_change(&client, ino, caller).await;
            }
            reply_attr(&client, reply, client.setattr(ino, set).await);
        });
    }

    fn readlink(&self, _req: &Request, ino: INodeNo, reply: ReplyData) {
        let client = self.client.clone();
        self.run(async move {
            match client.readlink(ino_of(ino)).await {
                Ok(target) => reply.data(&target),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn mknod(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let Some(kind) = kind_of_mode(mode) else { return reply.error(Errno::EINVAL) };
        let mut make = self.make(req, parent, name, kind, mode, umask);
        make.rdev = rdev;
        self.make_and_reply(make, reply);
    }

    fn mkdir(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        self.make_and_reply(self.make(req, parent, name, FileKind::Directory, mode, umask), reply);
    }

    fn symlink(&self, req: &Request, parent: INodeNo, link_name: &OsStr, target: &Path, reply: ReplyEntry) {
        let mut make = self.make(req, parent, link_name, FileKind::Symlink, 0o777, 0);
        make.target = target.as_os_str().as_bytes().to_vec().into();
        self.make_and_reply(make, reply);
    }

    fn unlink(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (client, name) = (self.client.clone(), name.to_owned());
        self.run(async move { reply_empty(reply, client.unlink(ino_of(parent), name.as_bytes()).await) });
    }

    fn rmdir(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (client, name) = (self.client.clone(), name.to_owned());
        self.run(async move { reply_empty(reply, client.rmdir(ino_of(parent), name.as_bytes()).await) });
    }

    fn rename(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let leaves = flags.contains(RenameFlags::RENAME_WHITEOUT);
        let whiteout = leaves.then(|| Whiteout { uid: req.uid(), gid: req.gid() });
        let mode = match flags.bits() & !libc::RENAME_WHITEOUT {
            0 => RenameMode::Replace,
            libc::RENAME_NOREPLACE => RenameMode::NoReplace,
            libc::RENAME_EXCHANGE if !leaves => RenameMode::Exchange,
            _ => return reply.error(Errno::EINVAL),
        };
        let (client, name, newname) = (self.client.clone(), name.to_owned(), newname.to_owned());
        self.run(async move {
            let (from, to) = ((ino_of(parent), name.as_bytes()), (ino_of(newparent), newname.as_bytes()));
            reply_empty(reply, client.rename_leaving(from, to, mode, whiteout).await);
        });
    }

    fn link(&self, _req: &Request, ino: INodeNo, newparent: INodeNo, newname: &OsStr, reply: ReplyEntry) {
        let (client, name) = (self.client.clone(), newname.to_owned());
        self.run(async move {
            let linked = client.link_named(ino_of(ino), ino_of(newparent), name.as_bytes()).await;
            reply_entry(&client, reply, linked);
        });
    }

    fn open(&self, _req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let (client, ino, intent) = (self.client.clone(), ino_of(ino), open_intent(flags));
        let appends = flags.0 & libc::O_APPEND != 0;
        let opened = self.open_flags();
        self.run(async move {
            match client.open_file(ino, intent).await {
                // As in the kernel's own filesystems: a writer of an append-only file must open it with O_APPEND.
                Ok(attr) if attr.guard.append_only && intent != OpenIntent::Read && !appends => {
                    client.close_file(ino);
                    reply.error(Errno::EPERM);
                }
                Ok(_) => {
                    // Closing a read-only handle reports nothing.
                    let handle = handle_of(intent);
                    let quiet =
                        if handle == READER { FopenFlags::FOPEN_NOFLUSH } else { FopenFlags::empty() };
                    reply.opened(handle, opened | quiet);
                }
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let mut make = self.make(req, parent, name, FileKind::Regular, mode, umask);
        make.open = OpenIntent::Write;
        let (client, opened, name) = (self.client.clone(), self.open_flags(), name.to_owned());
        let exclusive = flags & libc::O_EXCL != 0;
        self.run(async move {
            let mut result = client.make_named(make).await;
            if matches!(result, Err(FsError::Exists)) && !exclusive {
                // Another client created it first: then this is an open.
                result = match client.find(ino_of(parent), name.as_bytes()).await {
                    Ok((Some(attr), term)) => {
                        let opened = client.open_file(attr.ino, open_intent(OpenFlags(flags))).await;
                        opened.map(|attr| (attr, term))
                    }
                    Ok((None, _)) => Err(FsError::NotFound),
                    Err(error) => Err(error),
                };
            }
            match result {
                Ok((attr, term)) => {
                    let term = client.name_term(&term).min(client.attr_term(attr.ino));
                    reply.created(&term, &file_attr(&attr), GENERATION, WRITER, opened);
                }
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.cached.note_read(ino_of(ino), flags);
        let client = self.client.clone();
        self.run(async move {
            match client.read(ino_of(ino), offset, size as usize).await {
                Ok(bytes) => reply.data(&bytes),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn write(
        &self,
        req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let ino = ino_of(ino);
        let kills_set_id = write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID)
            && self.client.cached_attr(ino).is_none_or(|attr| has_set_id(attr.mode));
        let drops_pages = self.cached.are_passed(ino, flags, write_flags);
        if !kills_set_id && !drops_pages {
            self.client.note_use();
            match self.client.try_write(ino, offset, data) {
                Ok(()) => return reply.written(data.len() as u32),
                Err(NotTaken::Failed(error)) => return reply.error(errno(error)),
                Err(NotTaken::WouldWait) => {}
            }
        }
        let (client, data, kernel) = (self.client.clone(), data.to_vec(), self.kernel.clone());
        let dropped = kills_set_id.then(|| self.kill_set_id(ino, req.into()));
        self.run(async move {
            if let Some(dropped) = dropped
                && let Err(error) = dropped.await
            {
                return reply.error(errno(error));
            }
            let written = client.write(ino, offset, &data).await;
            if drops_pages {
                drop_pages(kernel, ino, offset, data.len()).await;
            }
            match written {
                Ok(()) => reply.written(data.len() as u32),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn flush(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply_empty(reply, self.client.take_error(ino_of(ino)));
    }

    fn release(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.client.close_file(ino_of(ino));
        reply.ok();
    }

    fn fsync(&self, _req: &Request, ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        let client = self.client.clone();
        self.run(async move { reply_empty(reply, client.fsync(ino_of(ino)).await) });
    }

    fn opendir(&self, _req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let handle = self.next_handle.fetch_add(1, Ordering::Relaxed);
        let stream = Arc::new(tokio::sync::Mutex::new(DirStream::new(ino_of(ino))));
        self.dirs.lock().expect("no holder of this lock panics").insert(handle, stream);
        reply.opened(FileHandle(handle), FopenFlags::empty());
    }

    fn releasedir(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.dirs.lock().expect("no holder of this lock panics").remove(&fh.0);
        reply.ok();
    }

    fn readdir(&self, _req: &Request, ino: INodeNo, fh: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let Some(stream) = self.dir(fh) else { return reply.error(Errno::EBADF) };
        let client = self.client.clone();
        self.run(async move {
            let mut stream = stream.lock().await;
            let result = stream.after(&client, offset).await.map(<[_]>::to_vec);
            let entries = match result {
                Ok(entries) => entries,
                Err(error) => return reply.error(errno(error)),
            };
            let dots = [(DOT, ino, "."), (DOT_DOT, INodeNo(stream.parent().0), "..")];
            for (cookie, number, name) in dots {
                if offset < cookie && reply.add(number, cookie, fuser::FileType::Directory, name) {
                    return reply.ok();
                }
            }
            for entry in entries {
                let name = OsStr::from_bytes(&entry.name);
                if reply.add(INodeNo(entry.attr.ino.0), entry.cookie, file_type(entry.attr.kind), name) {
                    break;
                }
            }
            reply.ok();
        });
    }

    fn readdirplus(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let Some(stream) = self.dir(fh) else { return reply.error(Errno::EBADF) };
        let client = self.client.clone();
        self.run(async move {
            let mut stream = stream.lock().await;
            let result = stream.after(&client, offset).await.map(<[_]>::to_vec);
            let entries = match result {
                Ok(entries) => entries,
                Err(error) => return reply.error(errno(error)),
            };
            let dots = [(DOT, ino_of(ino), "."), (DOT_DOT, stream.parent(), "..")];
            for (cookie, number, name) in dots.into_iter().filter(|dot| offset < dot.0) {
                let attr = match client.getattr(number).await {
                    Ok(attr) => file_attr(&attr),
                    Err(error) => return reply.error(errno(error)),
                };
                if reply.add(attr.ino, cookie, name, &client.attr_term(number), &attr, GENERATION) {
                    return reply.ok();
                }
            }
            for entry in entries {
                let attr = stream.pin(&client, &entry);
                let term = stream.term(&client).min(client.attr_term(attr.ino));
                let (name, attr) = (OsStr::from_bytes(&entry.name), file_attr(&attr));
                if reply.add(attr.ino, entry.cookie, name, &term, &attr, GENERATION) {
                    // The entry did not fit, so the kernel does not count the lookup.
                    client.forget(entry.attr.ino, 1);
                    break;
                }
            }
            reply.ok();
        });
    }

    fn fsyncdir(&self, _req: &Request, _ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        // A change of names is durable before its call returns.
        reply.ok();
    }

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        const BLOCK: u64 = 4096;
        let client = self.client.clone();
        self.run(async move {
            match client.statfs().await {
                Ok(stat) => {
                    let (total, free) = (stat.total_bytes / BLOCK, stat.free_bytes / BLOCK);
                    let files = stat.inodes + FREE_INODES;
                    reply.statfs(total, free, free, files, FREE_INODES, BLOCK as u32, 255, BLOCK as u32);
                }
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn setxattr(
        &self,
        req: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let mode = match flags {
            0 => XattrMode::Set,
            libc::XATTR_CREATE => XattrMode::Create,
            libc::XATTR_REPLACE => XattrMode::Replace,
            _ => return reply.error(Errno::EINVAL),
        };
        let (client, name, value) = (self.client.clone(), name.to_owned(), value.to_vec());
        let ino = ino_of(ino);
        let dropped = (name.as_bytes() == ACCESS_LIST).then(|| self.drop_set_gid(ino, req.into()));
        self.run(async move {
            if let Some(dropped) = dropped
                && let Err(error) = dropped.await
            {
                return reply.error(errno(error));
            }
            reply_empty(reply, client.setxattr(ino, name.as_bytes(), &value, mode).await);
        });
    }

    fn getxattr(&self, _req: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let (client, name) = (self.client.clone(), name.to_owned());
        self.run(async move {
            let value = client.getxattr(ino_of(ino), name.as_bytes()).await;
            reply_xattr(reply, size, value.map(|value| value.to_vec()));
        });
    }

    fn listxattr(&self, _req: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let client = self.client.clone();
        self.run(async move {
            let names = client.listxattr(ino_of(ino)).await;
            let joined =
                names.map(|names| names.iter().flat_map(|name| name.iter().copied().chain([0])).collect());
            reply_xattr(reply, size, joined);
        });
    }

    fn removexattr(&self, _req: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (client, name) = (self.client.clone(), name.to_owned());
        self.run(async move {
            let result = match client.removexattr(ino_of(ino), name.as_bytes()).await {
                // An ACL that equals the mode is not stored; removing it is no error.
                Err(FsError::NoAttribute) if ACL_NAMES.contains(&name.as_bytes()) => Ok(()),
                other => other,
            };
            reply_empty(reply, result);
        });
    }

    fn fallocate(
        &self,
        req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        const KEEP: i32 = libc::FALLOC_FL_KEEP_SIZE;
        const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | KEEP;
        const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE;
        const ZERO_KEEP: i32 = ZERO | KEEP;
        let mode = match mode {
            0 => AllocateMode::Extend,
            KEEP => AllocateMode::KeepSize,
            PUNCH => AllocateMode::Punch,
            ZERO => AllocateMode::Zero,
            ZERO_KEEP => AllocateMode::ZeroKeepSize,
            _ => return reply.error(Errno::EOPNOTSUPP),
        };
        let (client, ino) = (self.client.clone(), ino_of(ino));
        let dropped = self.drop_set_id(ino, req.into());
        self.run(async move {
            let allocated = match dropped.await {
                Ok(()) => client.allocate(ino, offset, length, mode).await,
                Err(error) => Err(error),
            };
            reply_empty(reply, allocated);
        });
    }

    fn lseek(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let kind = match whence {
            libc::SEEK_DATA => SeekKind::Data,
            libc::SEEK_HOLE => SeekKind::Hole,
            _ => return reply.error(Errno::EINVAL),
        };
        let Ok(offset) = u64::try_from(offset) else { return reply.error(Errno::ENXIO) };
        let client = self.client.clone();
        self.run(async move {
            match client.seek(ino_of(ino), offset, kind).await {
                Ok(found) => reply.offset(found as i64),
                Err(FsError::NoAttribute) => reply.error(Errno::ENXIO),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn ioctl(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        _flags: IoctlFlags,
        cmd: u32,
        in_data: &[u8],
        _out_size: u32,
        reply: ReplyIoctl,
    ) {
        let (client, ino) = (self.client.clone(), ino_of(ino));
        let request = match guard::parse(cmd, in_data) {
            Ok(request) => request,
            Err(FsError::NoAttribute) => return reply.error(Errno::ENOTTY),
            Err(error) => return reply.error(errno(error)),
        };
        self.run(async move {
            let answer = match request {
                GuardRequest::Get(form) => client.getattr(ino).await.map(|attr| form.encode(attr.guard)),
                GuardRequest::Set(guard) => client.set_guard(ino, guard).await.map(|_| Vec::new()),
            };
            match answer {
                Ok(bytes) => reply.ioctl(0, &bytes),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn copy_file_range(
        &self,
        req: &Request,
        ino_in: INodeNo,
        _fh_in: FileHandle,
        offset_in: u64,
        ino_out: INodeNo,
        _fh_out: FileHandle,
        offset_out: u64,
        len: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        // The reply counts in 32 bits; the kernel requests the rest again.
        const COPY_BYTES_MAX: u64 = 1 << 30;
        let client = self.client.clone();
        let (from, to) = ((ino_of(ino_in), offset_in), (ino_of(ino_out), offset_out));
        let dropped = self.drop_set_id(to.0, req.into());
        self.run(async move {
            if let Err(error) = dropped.await {
                return reply.error(errno(error));
            }
            match client.copy_range(from, to, len.min(COPY_BYTES_MAX)).await {
                Ok(copied) => reply.written(copied as u32),
                Err(error) => reply.error(errno(error)),
            }
        });
    }
}

impl Fuse {
    fn dir(&self, handle: FileHandle) -> Option<Arc<tokio::sync::Mutex<DirStream>>> {
        self.dirs.lock().expect("no holder of this lock panics").get(&handle.0).cloned()
    }
}
