//! Which function answers which request of the kernel.

use std::future::Future;
use std::sync::atomic::Ordering;

use base::{FsError, Ino};
use client::{Attr, Client, NameTerm, trace};
use fuse::{Errno, Op, Reply, Request, Serve, Terms};

use super::attr::{errno, file_attr};
use super::setid::Caller;
use super::{Fuse, requests};

impl Serve for Fuse {
    fn serve(&self, request: Request, reply: Reply) {
        let (caller, ino) = (Caller::from(&request), Ino(request.ino));
        if self.sends_callers {
            let client = self.client.for_caller(caller.credentials());
            return Self { client, sends_callers: false, ..self.clone() }.serve(request, reply);
        }
        match request.op {
            Op::Lookup { name } => self.lookup(ino, name, reply),
            Op::GetAttr => self.get_attr(ino, reply),
            Op::StatX => self.stat_x(ino, reply),
            Op::SetAttr(set) => self.set_attr(caller, ino, set, reply),
            Op::ReadLink => self.read_link(ino, reply),
            Op::Symlink { name, target } => self.symlink(caller, ino, (name, target), reply),
            Op::MakeNode { name, mode, umask, rdev } => {
                self.make_node(caller, ino, name, (mode, umask, rdev), reply)
            }
            Op::MakeDir { name, mode, umask } => self.make_dir(caller, ino, name, (mode, umask), reply),
            Op::Unlink { name } => self.unlink(ino, name, reply),
            Op::RemoveDir { name } => self.remove_dir(ino, name, reply),
            Op::Rename { name, new_parent, new_name, flags } => {
                self.rename(caller, (ino, name), (Ino(new_parent), new_name), flags, reply)
            }
            Op::Link { target, name } => self.link(Ino(target), ino, name, reply),
            Op::Open { flags } => self.open(ino, flags, reply),
            Op::Create { name, flags, mode, umask } => {
                self.create(caller, (ino, name), flags, (mode, umask), reply)
            }
            Op::Read(read) => self.read(ino, read, reply),
            Op::Write(write) => self.write(caller, ino, write, reply),
            Op::Flush { owner } => self.flush(ino, owner, reply),
            Op::Release { handle, flags, owner } => self.release(ino, handle, flags, owner, reply),
            Op::Sync => self.sync(ino, reply),
            Op::Allocate { offset, length, mode } => {
                self.allocate(caller, ino, (offset, length), mode, reply)
            }
            Op::Seek { offset, whence } => self.seek(ino, offset, whence, reply),
            Op::CopyRange { offset, to, to_offset, length, wide } => {
                self.copy_range(caller, (ino, offset), (Ino(to), to_offset), length, wide, reply)
            }
            Op::Ioctl { command, data } => self.ioctl(ino, command, &data, reply),
            Op::GetLock { owner, lock, flock } => self.get_lock(ino, owner, lock, flock, reply),
            Op::SetLock { handle, owner, lock, flock, wait } => {
                self.set_lock(ino, (handle, owner), lock, flock, wait, reply)
            }
            Op::OpenDir => self.open_dir(ino, reply),
            Op::ReadDir { handle, offset, size, plus } => {
                self.read_dir(ino, handle, offset, size, plus, reply)
            }
            Op::ReleaseDir { handle } => self.release_dir(handle, reply),
            Op::StatFs => self.stat_fs(reply),
            Op::GetXattr { name, size } => self.get_xattr(ino, name, size, reply),
            Op::ListXattr { size } => self.list_xattr(ino, size, reply),
            Op::SetXattr { name, value, flags } => self.set_xattr(caller, ino, (name, value), flags, reply),
            Op::RemoveXattr { name } => self.remove_xattr(ino, name, reply),
            Op::MakeUnnamed { mode, umask } => self.make_unnamed(caller, ino, (mode, umask), reply),
            // These do not come here.
            Op::Forget(_) | Op::Interrupt { .. } | Op::Destroy => reply.error(Errno::NOSYS),
        }
    }

    fn forget(&self, references: &[(u64, u64)]) {
        for (ino, count) in references {
            let ino = Ino(*ino);
            self.client.forget(ino, *count);
            if !self.client.is_pinned(ino) {
                self.cached.forget(ino);
            }
        }
    }
}

impl Fuse {
    /// Runs work that answers the request. If it waits, the program stays killable.
    pub(super) fn run<W: Future<Output = ()> + Send + 'static>(
        &self,
        reply: Reply,
        work: impl FnOnce(Client, Reply) -> W,
    ) {
        self.client.note_use();
        let parking = reply.park();
        // Its number goes with all that it causes.
        let trace = self.next_trace.fetch_add(1, Ordering::Relaxed);
        let work = trace::within(trace, work(self.client.clone(), reply));
        requests::run(&self.runtime, work, move || parking.park(), self.may_block);
    }
}

/// Attributes that the kernel may be told: it has no pages from before.
pub(super) async fn attr_of(client: &Client, ino: Ino) -> Result<Attr, FsError> {
    loop {
        let attr = client.getattr(ino).await?;
        if !client.wait_for_pages(ino).await {
            return Ok(attr);
        }
    }
}

/// Answers with a name and its inode, which is pinned once more in the client.
pub(super) fn reply_entry(client: &Client, reply: Reply, result: Result<(Attr, NameTerm), FsError>) {
    match result {
        Ok((attr, term)) => {
            let terms = Terms { name: client.name_term(&term), attr: client.attr_term(attr.ino) };
            if !reply.entry(&file_attr(&attr), terms) {
                client.forget(attr.ino, 1);
            }
        }
        Err(error) => reply.error(errno(error)),
    }
}

pub(super) fn reply_attr(client: &Client, reply: Reply, result: Result<Attr, FsError>) {
    match result {
        Ok(attr) => reply.attr(&file_attr(&attr), client.attr_term(attr.ino)),
        Err(error) => reply.error(errno(error)),
    }
}

pub(super) fn reply_done(reply: Reply, result: Result<(), FsError>) {
    match result {
        Ok(()) => reply.done(),
        Err(error) => reply.error(errno(error)),
    }
}
