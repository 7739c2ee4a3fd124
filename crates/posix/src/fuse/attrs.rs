//! Requests about attributes, extended attributes, and the filesystem as a whole.

use base::{FsError, Ino};
use bytes::Bytes;
use client::{Attr, SetAttr, XattrMode};
use fuse::{Errno, Reply, SetAttrRequest, StatFs, Time};

use super::Fuse;
use super::attr::{errno, file_attr};
use super::serve::{attr_of, reply_attr, reply_done};
use super::setid::{Caller, mode_after_change};

/// Number of free inodes to report: only space is limited.
const FREE_INODES: u64 = 1 << 40;

const ACCESS_LIST: &[u8] = b"system.posix_acl_access";
const ACL_NAMES: [&[u8]; 2] = [ACCESS_LIST, b"system.posix_acl_default"];

fn reply_xattr(reply: Reply, size: u32, result: Result<Vec<u8>, FsError>) {
    match result {
        Ok(value) if size == 0 => reply.xattr_size(value.len() as u32),
        Ok(value) if value.len() <= size as usize => reply.data(&value),
        Ok(_) => reply.error(Errno::RANGE),
        Err(error) => reply.error(errno(error)),
    }
}

impl Fuse {
    /// Attributes that are known here, and that the kernel may be told at once.
    fn known_attr(&self, ino: Ino) -> Option<Attr> {
        self.client.cached_attr(ino).filter(|_| !self.client.leaves_pages(ino))
    }

    pub(super) fn get_attr(&self, ino: Ino, reply: Reply) {
        if let Some(attr) = self.known_attr(ino) {
            return reply_attr(&self.client, reply, Ok(attr));
        }
        self.run(reply, |client, reply| async move {
            reply_attr(&client, reply, attr_of(&client, ino).await);
        });
    }

    /// Programs that ask for the time of creation, which no other reply has, send this once for each inode.
    pub(super) fn stat_x(&self, ino: Ino, reply: Reply) {
        if let Some(attr) = self.known_attr(ino) {
            return reply.statx(&file_attr(&attr), self.client.attr_term(ino));
        }
        self.run(reply, |client, reply| async move {
            match attr_of(&client, ino).await {
                Ok(attr) => reply.statx(&file_attr(&attr), client.attr_term(ino)),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    pub(super) fn set_attr(&self, caller: Caller, ino: Ino, request: SetAttrRequest, reply: Reply) {
        let now = self.client.wall_ns();
        let ns = |time: Time| match time {
            Time::At(ns) => ns,
            Time::Now => now,
        };
        let SetAttrRequest { mode, uid, gid, size, .. } = request;
        let (atime_ns, mtime_ns) = (request.atime.map(ns), request.mtime.map(ns));
        let mut set = SetAttr { mode, uid, gid, size, atime_ns, mtime_ns, ctime_ns: None };
        // A change of owner clears the set-id bits. So does a change of size by a caller without the right to keep them.
        let kills_set_id = uid.is_some() || gid.is_some() || request.kills_set_id;
        self.run(reply, |client, reply| async move {
            if kills_set_id && set.mode.is_none() {
                set.mode = mode_after_change(&client, ino, caller).await;
            }
            reply_attr(&client, reply, client.setattr(ino, set).await);
        });
    }

    pub(super) fn stat_fs(&self, reply: Reply) {
        const BLOCK: u64 = 4096;
        self.run(reply, |client, reply| async move {
            match client.statfs().await {
                Ok(stat) => reply.stat_fs(&StatFs {
                    blocks: stat.total_bytes / BLOCK,
                    free: stat.free_bytes / BLOCK,
                    files: stat.inodes + FREE_INODES,
                    free_files: FREE_INODES,
                    block_bytes: BLOCK as u32,
                    name_max: 255,
                }),
                Err(error) => reply.error(errno(error)),
            }
        });
    }

    pub(super) fn set_xattr(
        &self,
        caller: Caller,
        ino: Ino,
        (name, value): (Bytes, Bytes),
        flags: i32,
        reply: Reply,
    ) {
        let mode = match flags {
            0 => XattrMode::Set,
            libc::XATTR_CREATE => XattrMode::Create,
            libc::XATTR_REPLACE => XattrMode::Replace,
            _ => return reply.error(Errno::INVAL),
        };
        let dropped = (name == ACCESS_LIST).then(|| self.drop_set_gid(ino, caller));
        self.run(reply, |client, reply| async move {
            if let Some(dropped) = dropped
                && let Err(error) = dropped.await
            {
                return reply.error(errno(error));
            }
            reply_done(reply, client.setxattr(ino, &name, &value, mode).await);
        });
    }

    pub(super) fn get_xattr(&self, ino: Ino, name: Bytes, size: u32, reply: Reply) {
        self.run(reply, |client, reply| async move {
            let value = client.getxattr(ino, &name).await;
            reply_xattr(reply, size, value.map(|value| value.to_vec()));
        });
    }

    pub(super) fn list_xattr(&self, ino: Ino, size: u32, reply: Reply) {
        self.run(reply, |client, reply| async move {
            let names = client.listxattr(ino).await;
            let joined =
                names.map(|names| names.iter().flat_map(|name| name.iter().copied().chain([0])).collect());
            reply_xattr(reply, size, joined);
        });
    }

    pub(super) fn remove_xattr(&self, ino: Ino, name: Bytes, reply: Reply) {
        self.run(reply, |client, reply| async move {
            let result = match client.removexattr(ino, &name).await {
                // An ACL that equals the mode is not stored; removing it is no error.
                Err(FsError::NoAttribute) if ACL_NAMES.contains(&&name[..]) => Ok(()),
                other => other,
            };
            reply_done(reply, result);
        });
    }
}
