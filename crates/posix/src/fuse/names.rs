//! Requests about names.

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

impl Fuse {
    pub(super) fn lookup(&self, parent: Ino, name: Bytes, reply: Reply) {
        self.run(reply, |client, reply| async move {
            match found(&client, parent, &name).await {
                Ok((Some(attr), term)) => reply_entry(&client, reply, Ok((attr, term))),
                Ok((None, term)) => reply.no_entry(client.name_term(&term)),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    fn make_and_reply(&self, make: MakeNode, reply: Reply) {
        self.run(reply, |client, reply| async move {
            reply_entry(&client, reply, client.make_named(make).await);
        });
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
        self.run(reply, |client, reply| async move {
            reply_done(reply, client.unlink(parent, &name).await);
        });
    }

    pub(super) fn remove_dir(&self, parent: Ino, name: Bytes, reply: Reply) {
        self.run(reply, |client, reply| async move {
            reply_done(reply, client.rmdir(parent, &name).await);
        });
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
        self.run(reply, |client, reply| async move {
            let (from, to) = ((from.0, &from.1[..]), (to.0, &to.1[..]));
            reply_done(reply, client.rename_leaving(from, to, mode, whiteout).await);
        });
    }

    pub(super) fn link(&self, target: Ino, parent: Ino, name: Bytes, reply: Reply) {
        self.run(reply, |client, reply| async move {
            reply_entry(&client, reply, client.link_named(target, parent, &name).await);
        });
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
        self.run(reply, |client, reply| async move {
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
            let result = result.map(|(attr, term)| (attr, Some(term)));
            super::files::reply_created(&client, reply, result, handle, opened);
        });
    }
}
