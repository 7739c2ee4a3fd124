//! Requests about the content of files.

use std::sync::atomic::Ordering;
use std::time::Duration;

use base::{FsError, Ino};
use bytes::Bytes;
use client::{AllocateMode, Attr, Client, NameTerm, NotTaken, OpenIntent, Place, SeekKind};
use fuse::abi::{WRITE_CACHE, WRITE_KILL_SUIDGID};
use fuse::{Errno, Kernel, OpenFlags, ReadRequest, Reply, Terms, WriteRequest};
use tokio::runtime::Handle;

use super::attr::{errno, file_attr};
use super::direct::{drop_pages, is_append_only};
use super::guard::{self, GuardRequest};
use super::serve::reply_done;
use super::setid::{Caller, has_set_id};
use super::{CacheMode, Fuse};

/// A write that waits keeps the buffer of its request if it has this many bytes. A shorter one is copied out of it.
const SHARED_BYTES_MIN: usize = 128 << 10;

pub(super) fn open_intent(flags: i32) -> OpenIntent {
    match flags & libc::O_ACCMODE {
        libc::O_RDONLY => OpenIntent::Read,
        _ if flags & libc::O_TRUNC != 0 => OpenIntent::Truncate,
        _ => OpenIntent::Write,
    }
}

/// Answers with a file that was made and opened, and its name, if it has one.
pub(super) fn reply_created(
    client: &Client,
    reply: Reply,
    result: Result<(Attr, Option<NameTerm>), FsError>,
    handle: u64,
    opened: OpenFlags,
) {
    match result {
        Ok((attr, term)) => {
            let name = term.map_or(Duration::ZERO, |term| client.name_term(&term));
            let terms = Terms { name, attr: client.attr_term(attr.ino) };
            if !reply.created(&file_attr(&attr), terms, handle, opened) {
                client.close_file(attr.ino);
                client.forget(attr.ino, 1);
            }
        }
        Err(error) => reply.error(errno(error)),
    }
}

/// The kernel has put bytes into its cache where it took the end of the file to be, but other machines had appended before. It has
/// these pages locked until it has the answer, so nothing waits here.
fn drop_misplaced(runtime: &Handle, kernel: &Kernel, ino: Ino, (assumed, off): (u64, u64), len: usize) {
    if assumed != off {
        let (first, last) = (assumed.min(off), assumed.max(off) + len as u64);
        let kernel = kernel.clone();
        runtime.spawn_blocking(move || kernel.forget_pages(ino.0, first as i64, (last - first) as i64));
    }
}

impl Fuse {
    pub(super) fn open_flags(&self) -> OpenFlags {
        match self.cache {
            CacheMode::Write | CacheMode::Read => OpenFlags::KEEP_CACHE | OpenFlags::PARALLEL_DIRECT_WRITES,
            CacheMode::Direct => OpenFlags::DIRECT_IO | OpenFlags::PARALLEL_DIRECT_WRITES,
        }
    }

    /// Those of a file that is opened with `flags`. Appends pass the page cache by: the kernel does not know where they end up.
    pub(super) fn open_flags_for(&self, flags: i32) -> OpenFlags {
        match is_append_only(flags) {
            true => OpenFlags::DIRECT_IO | OpenFlags::PARALLEL_DIRECT_WRITES,
            false => self.open_flags(),
        }
    }

    pub(super) fn new_handle(&self) -> u64 {
        self.next_handle.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn open(&self, ino: Ino, flags: i32, reply: Reply) {
        let intent = open_intent(flags);
        let appends = flags & libc::O_APPEND != 0;
        let (opened, handle) = (self.open_flags_for(flags), self.new_handle());
        self.run(reply, |client, reply| async move {
            match client.open_file(ino, intent).await {
                // As in the kernel's own filesystems: a writer of an append-only file must open it with O_APPEND.
                Ok(attr) if attr.guard.append_only && intent != OpenIntent::Read && !appends => {
                    client.close_file(ino);
                    reply.error(Errno::PERM);
                }
                Ok(_) => {
                    // Closing a descriptor that can only read reports nothing.
                    let is_reader = intent == OpenIntent::Read;
                    let quiet = if is_reader { OpenFlags::NOFLUSH } else { OpenFlags::default() };
                    if !reply.opened(handle, opened | quiet) {
                        client.close_file(ino);
                    }
                }
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    pub(super) fn read(&self, ino: Ino, read: ReadRequest, reply: Reply) {
        self.cached.note_read(ino, read.flags);
        let access = match read.flags & libc::O_NOATIME {
            0 => client::ReadAccess::Noted,
            _ => client::ReadAccess::Quiet,
        };
        self.run(reply, |client, reply| async move {
            match client.read_parts(ino, read.offset, read.size as usize, access).await {
                Ok(parts) => reply.parts(&parts),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    pub(super) fn write(&self, caller: Caller, ino: Ino, write: WriteRequest, reply: Reply) {
        let WriteRequest { offset, data, write_flags, flags } = write;
        let kills_set_id = write_flags & WRITE_KILL_SUIDGID != 0
            && self.client.cached_attr(ino).is_none_or(|attr| has_set_id(attr.mode));
        let appends = flags & libc::O_APPEND != 0 && write_flags & WRITE_CACHE == 0;
        let place = if appends { Place::End } else { Place::At(offset) };
        // Asked once the bytes are taken: reads that were answered without them are noted by then.
        let (cached, len) = (self.cached.clone(), data.len());
        let passes = move || cached.are_passed(ino, flags, write_flags);
        let (runtime, kernel) = (self.runtime.clone(), self.kernel.clone());
        if !kills_set_id {
            self.client.note_use();
            match self.client.try_write(ino, place, &data) {
                Ok(off) if passes() => {
                    return self.run(reply, move |_, reply| async move {
                        drop_pages(kernel.clone(), ino, off, len).await;
                        reply.written(len as u32);
                        drop_misplaced(&runtime, &kernel, ino, (offset, off), len);
                    });
                }
                Ok(off) => {
                    reply.written(len as u32);
                    return drop_misplaced(&runtime, &kernel, ino, (offset, off), len);
                }
                Err(NotTaken::Failed(error)) => return reply.error(errno(error)),
                Err(NotTaken::WouldWait) => {}
            }
        }
        let data = if len < SHARED_BYTES_MIN { Bytes::copy_from_slice(&data) } else { data };
        let dropped = kills_set_id.then(|| self.kill_set_id(ino, caller));
        self.run(reply, move |client, reply| async move {
            if let Some(dropped) = dropped
                && let Err(error) = dropped.await
            {
                return reply.error(errno(error));
            }
            let written = client.write_to(ino, place, &data).await;
            if passes() {
                drop_pages(kernel.clone(), ino, written.unwrap_or(offset), len).await;
            }
            match written {
                Ok(off) => {
                    reply.written(len as u32);
                    drop_misplaced(&runtime, &kernel, ino, (offset, off), len);
                }
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    /// A descriptor is closed: its process gives up its range locks on the file.
    pub(super) fn flush(&self, ino: Ino, owner: u64, reply: Reply) {
        let unlock = self.unlock_process(ino, owner);
        if unlock.is_none() && self.cache != CacheMode::Read {
            return reply_done(reply, self.client.take_error(ino));
        }
        let waits = self.cache == CacheMode::Read;
        self.run(reply, |client, reply| async move {
            let flushed = if waits { client.fsync(ino).await } else { client.take_error(ino) };
            let unlocked = match unlock {
                Some(unlock) => unlock.await,
                None => Ok(()),
            };
            reply_done(reply, flushed.and(unlocked));
        });
    }

    pub(super) fn release(&self, ino: Ino, handle: u64, flags: u32, owner: u64, reply: Reply) {
        self.client.close_file(ino);
        let unlocks = self.unlock_handle(ino, handle, flags, owner);
        if unlocks.is_empty() {
            return reply.done();
        }
        self.run(reply, |_, reply| async move {
            for unlock in unlocks {
                if let Err(error) = unlock.await {
                    tracing::warn!(%ino, %error, "a lock was not given up at once when its file was closed");
                }
            }
            reply.done();
        });
    }

    pub(super) fn sync(&self, ino: Ino, reply: Reply) {
        self.run(reply, |client, reply| async move { reply_done(reply, client.fsync(ino).await) });
    }

    pub(super) fn allocate(
        &self,
        caller: Caller,
        ino: Ino,
        (offset, length): (u64, u64),
        mode: i32,
        reply: Reply,
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
            _ => return reply.error(Errno::OPNOTSUPP),
        };
        let dropped = self.drop_set_id(ino, caller);
        self.run(reply, |client, reply| async move {
            let allocated = match dropped.await {
                Ok(()) => client.allocate(ino, offset, length, mode).await,
                Err(error) => Err(error),
            };
            reply_done(reply, allocated);
        });
    }

    pub(super) fn seek(&self, ino: Ino, offset: u64, whence: i32, reply: Reply) {
        let kind = match whence {
            libc::SEEK_DATA => SeekKind::Data,
            libc::SEEK_HOLE => SeekKind::Hole,
            _ => return reply.error(Errno::INVAL),
        };
        if i64::try_from(offset).is_err() {
            return reply.error(Errno::NXIO);
        }
        self.run(reply, |client, reply| async move {
            match client.seek(ino, offset, kind).await {
                Ok(found) => reply.position(found),
                Err(FsError::NoAttribute) => reply.error(Errno::NXIO),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    pub(super) fn copy_range(
        &self,
        caller: Caller,
        from: (Ino, u64),
        to: (Ino, u64),
        length: u64,
        wide: bool,
        reply: Reply,
    ) {
        // One reply has 32 bits. The kernel asks for the rest again.
        const COPY_BYTES_MAX: u64 = 1 << 30;
        let dropped = self.drop_set_id(to.0, caller);
        self.run(reply, |client, reply| async move {
            if let Err(error) = dropped.await {
                return reply.error(errno(error));
            }
            match client.copy_range(from, to, length.min(COPY_BYTES_MAX)).await {
                Ok(copied) if wide => reply.copied(copied),
                Ok(copied) => reply.written(copied as u32),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    pub(super) fn ioctl(&self, ino: Ino, command: u32, data: &[u8], reply: Reply) {
        let request = match guard::parse(command, data) {
            Ok(request) => request,
            Err(FsError::NoAttribute) => return reply.error(Errno::NOTTY),
            Err(error) => return reply.error(errno(error)),
        };
        self.run(reply, |client, reply| async move {
            let answer = match request {
                GuardRequest::Get(form) => client.getattr(ino).await.map(|attr| form.encode(attr.guard)),
                GuardRequest::Set(guard) => client.set_guard(ino, guard).await.map(|_| Vec::new()),
            };
            match answer {
                Ok(bytes) => reply.ioctl(&bytes),
                Err(error) => reply.error(errno(error)),
            }
        });
    }
}
