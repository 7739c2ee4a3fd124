//! The set-id bits, which a change by an unprivileged user clears.
//!
//! With FUSE_HANDLE_KILLPRIV_V2 the kernel leaves clearing them to the filesystem. A write says so in a flag;
//! truncations and changes of ranges do not. Here root may keep the bits; in the kernel a process with CAP_FSETID may.

use std::fs::File;
use std::future::Future;
use std::io;

use base::{FsError, Ino};
use client::{Client, FileKind, SetAttr};
use fuse::{ATTRIBUTES_ONLY, Request};

use super::Fuse;

const SET_UID: u32 = 0o4000;
const SET_GID: u32 = 0o2000;
const GROUP_EXEC: u32 = 0o10;

/// The process that sent a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Caller {
    pub(super) uid: u32,
    pub(super) gid: u32,
    pid: u32,
}

impl From<&Request> for Caller {
    fn from(request: &Request) -> Self {
        Self { uid: request.uid, gid: request.gid, pid: request.pid }
    }
}

impl Caller {
    /// As the owner of the metadata knows it.
    pub(super) fn credentials(self) -> client::Caller {
        let status = read_status(self.pid).unwrap_or_default();
        client::Caller { uid: self.uid, gid: self.gid, groups: groups(&status).collect() }
    }

    /// Whether changes by this caller never clear the bits.
    pub(super) fn keeps_set_id(self) -> bool {
        self.uid == 0
    }

    /// Whether the caller is in the group. The request has one group; the others come from `/proc`. A process that is
    /// not visible there has none.
    fn is_in(self, gid: u32) -> bool {
        let status = || read_status(self.pid).unwrap_or_default();
        self.keeps_set_id() || self.gid == gid || groups(&status()).any(|group| group == gid)
    }
}

fn read_status(pid: u32) -> io::Result<String> {
    let path = format!("/proc/{pid}/status");
    let file = rustix::fs::open(path, rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty())?;
    io::read_to_string(File::from(file))
}

/// The supplementary groups in the text of `/proc/PID/status`.
fn groups(status: &str) -> impl Iterator<Item = u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("Groups:")).unwrap_or("");
    line.split_ascii_whitespace().filter_map(|group| group.parse().ok())
}

/// Whether the mode has a bit that may have to be cleared.
pub(super) fn has_set_id(mode: u32) -> bool {
    mode & (SET_UID | SET_GID) != 0
}

/// The mode without the bits that a change of content clears; `None` if it has none of them. If the group may not
/// execute, set-gid stays for members of the group.
fn without_set_id(mode: u32, is_member: impl FnOnce() -> bool) -> Option<u32> {
    let drops_gid = mode & SET_GID != 0 && (mode & GROUP_EXEC != 0 || !is_member());
    let next = mode & !SET_UID & !(if drops_gid { SET_GID } else { 0 });
    (next != mode).then_some(next)
}

/// The mode after a change of owner or content by the caller; `None` if it stays the same.
pub(super) async fn mode_after_change(client: &Client, ino: Ino, caller: Caller) -> Option<u32> {
    let attr = client.getattr(ino).await.ok()?;
    if attr.kind == FileKind::Directory {
        return None;
    }
    without_set_id(attr.mode, || caller.is_in(attr.gid))
}

impl Fuse {
    /// To be awaited before the caller changes content by a request without a kill flag.
    pub(super) fn drop_set_id(
        &self,
        ino: Ino,
        caller: Caller,
    ) -> impl Future<Output = Result<(), FsError>> + Send + use<> {
        let dropped = self.kill_set_id(ino, caller);
        async move { if caller.keeps_set_id() { Ok(()) } else { dropped.await } }
    }

    /// To be awaited before a change of content whose request has the kill flag.
    pub(super) fn kill_set_id(
        &self,
        ino: Ino,
        caller: Caller,
    ) -> impl Future<Output = Result<(), FsError>> + Send + use<> {
        let (client, kernel) = (self.client.clone(), self.kernel.clone());
        async move {
            let Some(mode) = mode_after_change(&client, ino, caller).await else { return Ok(()) };
            client.setattr(ino, SetAttr { mode: Some(mode), ..SetAttr::default() }).await?;
            // The kernel takes the new size and times from the reply, but keeps the old mode. Only attributes are
            // invalidated here: that waits for no request.
            kernel.forget_pages(ino.0, ATTRIBUTES_ONLY, 0);
            Ok(())
        }
    }

    /// To be awaited before the caller sets an access list. As in chmod(2), set-gid is only for members of the group.
    pub(super) fn drop_set_gid(
        &self,
        ino: Ino,
        caller: Caller,
    ) -> impl Future<Output = Result<(), FsError>> + Send + use<> {
        let client = self.client.clone();
        async move {
            let attr = client.getattr(ino).await?;
            if attr.mode & SET_GID == 0 || caller.is_in(attr.gid) {
                return Ok(());
            }
            let set = SetAttr { mode: Some(attr.mode & !SET_GID), ..SetAttr::default() };
            client.setattr(ino, set).await.map(|_| ())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ordinary_change_takes_the_bits_that_ext4_takes() {
        let check = |mode, member, after| {
            assert_eq!(without_set_id(mode, || member), after, "mode={mode:o} member={member}");
        };
        check(0o6777, true, Some(0o777));
        check(0o4755, false, Some(0o755));
        check(0o2755, true, Some(0o755));
        check(0o2767, true, None);
        check(0o2767, false, Some(0o767));
        check(0o6767, true, Some(0o2767));
        check(0o777, false, None);
    }

    #[test]
    fn groups_of_a_process_are_read() {
        let status = "Name:\tsh\nGid:\t5\t5\t5\t5\nGroups:\t4 24 1000 \nNStgid:\t7\n";
        assert_eq!(groups(status).collect::<Vec<_>>(), [4, 24, 1000]);
        assert_eq!(groups("Groups:\t \n").count(), 0);
        assert_eq!(groups("").count(), 0);
    }
}
