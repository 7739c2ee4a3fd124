//! Requests about names.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::{FsError, Ino};
use bytes::Bytes;
use client::{Attr, Client, FileKind, MakeNode, NameTerm, OpenIntent, RenameMode, Whiteout};
use fuse::{Errno, Reply};

use super::Fuse;
use super::attr::{errno, kind_of_mode};
use super::serve::{attr_of, reply_done, reply_entry};
use super::setid::Caller;

/// An inode to make, not open.
pub(super) fn make(
    caller: Caller,
    parent: Ino,
    name: Bytes,
    kind: FileKind,
    (mode, umask): (u32, u32),
) -> MakeNode {
    MakeNode {
        parent,
        name,
        kind,
        mode: mode & 0o7777,
        umask,
        uid: caller.uid,
        gid: caller.gid,
        rdev: 0,
        target: Bytes::new(),
        open: OpenIntent::None,
    }
}

/// Looks a name up, for a kernel that has no pages of the inode from before.
async fn found(client: &Client, parent: Ino, name: &[u8]) -> Result<(Option<Attr>, NameTerm), FsError> {
    let (attr, term) = client.find(parent, name).await?;
    let Some(attr) = attr else { return Ok((None, term)) };
    if !client.leaves_pages(attr.ino) {
        return Ok((Some(attr), term));
    }
    let newer = attr_of(client, attr.ino).await;
    let newer = newer.inspect_err(|_| client.forget(attr.ino, 1))?;
    Ok((Some(newer), term))
}

/// Threads whose change of a name was refused for a moment.
///
/// The kernel holds the locks of the directories until a change is answered, and needs them to forget a name in the same directories. If
/// another machine waits for that, and this one for that machine, one of them is refused. ESTALE makes the kernel let the locks go, look
/// the path up and ask again: once for each system call. The answer to that lookup waits until all names are forgotten that are to be.
#[derive(Debug, Default)]
pub(super) struct Refused(Mutex<HashMap<u32, Vec<Ino>>>);

/// How long the kernel may take to forget names.
const FORGETS_WITHIN: Duration = Duration::from_secs(1);
/// Most threads that are remembered: each of them asks again at once.
const REFUSED_MAX: usize = 4096;

impl Refused {
    fn threads(&self) -> MutexGuard<'_, HashMap<u32, Vec<Ino>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the change that a thread asks for may be refused.
    fn may_be(&self, thread: u32) -> bool {
        thread != 0 && self.threads().remove(&thread).is_none()
    }

    /// Whether a thread that was refused looks a name up without the locks of its change.
    fn looks_again(&self, thread: u32, parent: Ino) -> bool {
        self.threads().get(&thread).is_some_and(|dirs| !dirs.contains(&parent))
    }

    fn note(&self, thread: u32, dirs: Vec<Ino>) {
        let mut threads = self.threads();
        if threads.len() >= REFUSED_MAX {
            threads.clear();
        }
        threads.insert(thread, dirs);
    }
}

impl Fuse {
    /// Runs a change of names, and answers with what comes of it.
    fn change<T: Send, W: Future<Output = Result<T, FsError>> + Send>(
        &self,
        dirs: Vec<Ino>,
        reply: Reply,
        work: impl FnOnce(Client) -> W + Send + 'static,
        answer: impl FnOnce(&Client, Reply, Result<T, FsError>) + Send + 'static,
    ) {
        let (thread, refused) = (reply.pid(), self.refused.clone());
        let refusable = refused.may_be(thread);
        self.run(reply, move |client, reply| async move {
            let result = work(client.refusable(refusable)).await;
            if matches!(result, Err(FsError::Retry)) {
                refused.note(thread, dirs);
            }
            answer(&client, reply, result);
        });
    }

    pub(super) fn lookup(&self, parent: Ino, name: Bytes, reply: Reply) {
        let looks_again = self.refused.looks_again(reply.pid(), parent);
        self.run(reply, move |client, reply| async move {
            let found = found(&client, parent, &name).await;
            if looks_again {
                let _ = tokio::time::timeout(FORGETS_WITHIN, client.has_forgotten_names()).await;
            }
            match found {
                Ok((Some(attr), term)) => reply_entry(&client, reply, Ok((attr, term))),
                Ok((None, term)) => reply.no_entry(client.name_term(&term)),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn make_and_reply(&self, make: MakeNode, reply: Reply) {
        self.change(
            vec![make.parent],
            reply,
            |client| async move { client.make_named(make).await },
            reply_entry,
        );
    }

    pub(super) fn make_node(
        &self,
        caller: Caller,
        parent: Ino,
        name: Bytes,
        (mode, umask, rdev): (u32, u32, u32),
        reply: Reply,
    ) {
        let Some(kind) = kind_of_mode(mode) else { return reply.error(Errno::INVAL) };
        let make = make(caller, parent, name, kind, (mode, umask));
        self.make_and_reply(MakeNode { rdev, ..make }, reply);
    }

    pub(super) fn make_dir(&self, caller: Caller, parent: Ino, name: Bytes, modes: (u32, u32), reply: Reply) {
        self.make_and_reply(make(caller, parent, name, FileKind::Directory, modes), reply);
    }

    pub(super) fn symlink(&self, caller: Caller, parent: Ino, (name, target): (Bytes, Bytes), reply: Reply) {
        let make = make(caller, parent, name, FileKind::Symlink, (0o777, 0));
        self.make_and_reply(MakeNode { target, ..make }, reply);
    }

    pub(super) fn read_link(&self, ino: Ino, reply: Reply) {
        self.run(reply, |client, reply| async move {
            match client.readlink(ino).await {
                Ok(target) => reply.data(&target),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    pub(super) fn unlink(&self, parent: Ino, name: Bytes, reply: Reply) {
        let work = move |client: Client| async move { client.unlink(parent, &name).await };
        self.change(vec![parent], reply, work, |_, reply, result| reply_done(reply, result));
    }

    pub(super) fn remove_dir(&self, parent: Ino, name: Bytes, reply: Reply) {
        let work = move |client: Client| async move { client.rmdir(parent, &name).await };
        self.change(vec![parent], reply, work, |_, reply, result| reply_done(reply, result));
    }

    pub(super) fn rename(
        &self,
        caller: Caller,
        from: (Ino, Bytes),
        to: (Ino, Bytes),
        flags: u32,
        reply: Reply,
    ) {
        let leaves = flags & libc::RENAME_WHITEOUT != 0;
        let whiteout = leaves.then_some(Whiteout { uid: caller.uid, gid: caller.gid });
        let mode = match flags & !libc::RENAME_WHITEOUT {
            0 => RenameMode::Replace,
            libc::RENAME_NOREPLACE => RenameMode::NoReplace,
            libc::RENAME_EXCHANGE if !leaves => RenameMode::Exchange,
            _ => return reply.error(Errno::INVAL),
        };
        let dirs = vec![from.0, to.0];
        let work = move |client: Client| async move {
            let (from, to) = ((from.0, &from.1[..]), (to.0, &to.1[..]));
            client.rename_leaving(from, to, mode, whiteout).await
        };
        self.change(dirs, reply, work, |_, reply, result| reply_done(reply, result));
    }

    pub(super) fn link(&self, target: Ino, parent: Ino, name: Bytes, reply: Reply) {
        let work = move |client: Client| async move { client.link_named(target, parent, &name).await };
        self.change(vec![parent], reply, work, reply_entry);
    }

    /// O_TMPFILE.
    pub(super) fn make_unnamed(&self, caller: Caller, dir: Ino, modes: (u32, u32), reply: Reply) {
        let make = make(caller, dir, Bytes::new(), FileKind::Regular, modes);
        let (opened, handle) = (self.open_flags(), self.new_handle());
        self.run(reply, |client, reply| async move {
            let made = client.make_unnamed(make).await.map(|attr| (attr, None));
            super::files::reply_created(&client, reply, made, handle, opened);
        });
    }

    pub(super) fn create(
        &self,
        caller: Caller,
        (parent, name): (Ino, Bytes),
        flags: i32,
        modes: (u32, u32),
        reply: Reply,
    ) {
        let make = MakeNode {
            open: OpenIntent::Write,
            ..make(caller, parent, name.clone(), FileKind::Regular, modes)
        };
        let (opened, handle) = (self.open_flags_for(flags), self.new_handle());
        let exclusive = flags & libc::O_EXCL != 0;
        let work = move |client: Client| async move {
            let mut result = client.make_named(make).await;
            if matches!(result, Err(FsError::Exists)) && !exclusive {
                // Another client created it first: then this is an open.
                result = match client.find(parent, &name).await {
                    Ok((Some(attr), term)) => {
                        let opened = client.open_file(attr.ino, super::files::open_intent(flags)).await;
                        opened.map(|attr| (attr, term))
                    }
                    Ok((None, _)) => Err(FsError::NotFound),
                    Err(error) => Err(error),
                };
            }
            result.map(|(attr, term)| (attr, Some(term)))
        };
        self.change(vec![parent], reply, work, move |client, reply, result| {
            super::files::reply_created(client, reply, result, handle, opened);
        });
    }
}
