//! Names and attributes: each call is at most one request to the owner.

use std::sync::atomic::Ordering;

use base::{FsError, Ino};
use wire::guard::Guard;
use wire::meta::{
    Attr, DirEntry, DirPosition, LeaseGrant, LeaseKind, MakeNode, MetaReply, MetaRequest, OpenIntent,
    RenameMode, SetAttr, Whiteout, XattrMode,
};

use crate::node::{Node, Remapping};
use crate::{Client, NameTerm, owned};

/// Pieces of a file's map that are kept while the file is not open.
const MAP_KEPT_MAX: usize = 1024;

const ACL_PREFIX: &[u8] = b"system.posix_acl_";

/// The state of the client when it sent a request. It tells whether a change here, or another owner, overtook the answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    /// Answers to changes of names so far.
    changes: u64,
    bond: u64,
}

/// A page of a directory.
#[derive(Debug)]
pub struct DirPage {
    /// Entries in order.
    pub entries: Vec<DirEntry>,
    /// The parent of this directory.
    pub parent: Ino,
    /// Whether no entries follow.
    pub end: bool,
    /// How long the names may be kept.
    pub term: NameTerm,
}

fn unexpected<T>(reply: &MetaReply) -> Result<T, FsError> {
    tracing::error!(?reply, "owner answered with a reply of the wrong kind");
    Err(FsError::Io)
}

impl Client {
    /// Notes the owner's answer about an inode and pins it. Returns its attributes as seen from here.
    ///
    /// `asked` is the value of [`Client::asking`] from before the request was sent.
    pub(crate) fn note(&self, attr: Attr, lease: Option<LeaseGrant>, pins: u64, asked: Asked) -> Attr {
        let node = self.inner.nodes.get(attr.ino);
        let mut state = node.lock();
        let (void, old) = {
            let given_up = self.inner.given_up.lock().expect("no holder of this lock panics");
            let void = lease.is_some_and(|lease| given_up.covers(lease));
            (void, given_up.is_changed_since(attr.ino, asked.changes))
        };
        if void || !self.is_answered_in_time(asked) {
            state.map.forget();
        } else {
            state.learn_lease(lease);
        }
        match old {
            true => state.learn_overtaken(attr),
            false => state.learn(attr),
        }
        state.pins += pins;
        state.seen(attr)
    }

    /// Whether a grant was given up before the answer that carries it came.
    pub(crate) fn is_void(&self, lease: LeaseGrant) -> bool {
        self.inner.given_up.lock().expect("no holder of this lock panics").covers(lease)
    }

    /// Call this before sending a request.
    pub(crate) fn asking(&self) -> Asked {
        let bond = self.inner.session.bonds.with(|bond| bond.number);
        Asked { changes: self.inner.changes.load(Ordering::Acquire), bond }
    }

    /// Whether a grant in the answer counts. The client tells the next owner which leases it has: one that it notes afterwards
    /// would be unknown there. Call this with the inode locked, or after noting the grant.
    pub(crate) fn is_answered_in_time(&self, asked: Asked) -> bool {
        self.inner.session.bonds.with(|bond| bond.number) == asked.bond
    }

    /// Notes that the answer to a change of the inode has come: answers to earlier requests do not count any more.
    fn overtake(&self, ino: Ino) {
        let now = self.inner.env.clock.boot_ns();
        let change = self.inner.changes.fetch_add(1, Ordering::AcqRel) + 1;
        self.inner.given_up.lock().expect("no holder of this lock panics").note_change(ino, change, now);
    }

    /// As [`Client::overtake`], for an answer that does not bring the new attributes.
    pub(crate) fn changed(&self, ino: Ino) {
        self.overtake(ino);
        if let Some(node) = self.inner.nodes.find(ino) {
            node.lock().forget_attr();
        }
    }

    /// Drops `count` references from lookups and creations.
    pub fn forget(&self, ino: Ino, count: u64) {
        let Some(node) = self.inner.nodes.find(ino) else { return };
        {
            let mut state = node.lock();
            state.pins = state.pins.saturating_sub(count);
        }
        drop(node);
        self.drop_if_idle(ino);
    }

    /// Whether references from lookups and creations are left.
    pub fn is_pinned(&self, ino: Ino) -> bool {
        self.inner.nodes.find(ino).is_some_and(|node| node.lock().pins > 0)
    }

    pub(crate) fn drop_if_idle(&self, ino: Ino) {
        let Some(dropped) = self.inner.nodes.drop_if_idle(ino) else { return };
        if dropped.was_changed {
            self.overtake(ino);
        }
        let Some(lease) = dropped.lease else { return };
        // Before the lease is given back: a late answer must not make it look held.
        if dropped.awaits_answers {
            self.void(lease);
        }
        self.inner.to_release.lock().expect("no holder of this lock panics").push(lease);
    }

    /// Finds a name and pins its inode.
    pub async fn lookup(&self, parent: Ino, name: &[u8]) -> Result<Attr, FsError> {
        self.find(parent, name).await?.0.ok_or(FsError::NotFound)
    }

    /// As [`Client::lookup`], for a cache above: also returns how long it may keep the name, or its absence.
    pub async fn find(&self, parent: Ino, name: &[u8]) -> Result<(Option<Attr>, NameTerm), FsError> {
        let (asked, term) = (self.asking(), self.asking_names(parent));
        match self.call(MetaRequest::Lookup { parent, name: owned(name) }).await? {
            MetaReply::Entry { attr, lease, keep } => {
                let attr = self.note(attr, lease, 1, asked);
                let seen = match self.lacks_writes(attr.ino).await {
                    Ok(false) => Ok(attr),
                    Ok(true) => self.getattr(attr.ino).await,
                    Err(error) => Err(error),
                };
                let seen = seen.inspect_err(|_| self.forget(attr.ino, 1))?;
                Ok((Some(seen), NameTerm { keep, ..term }))
            }
            MetaReply::Missing { keep } => Ok((None, NameTerm { keep, ..term })),
            other => unexpected(&other),
        }
    }

    /// Attributes without a request to the owner, if a lease covers them.
    pub fn cached_attr(&self, ino: Ino) -> Option<Attr> {
        self.inner.nodes.find(ino)?.lock().attr()
    }

    /// Attributes of an inode.
    pub async fn getattr(&self, ino: Ino) -> Result<Attr, FsError> {
        loop {
            if let Some(attr) = self.cached_attr(ino) {
                return Ok(attr);
            }
            let asked = self.asking();
            match self.call(MetaRequest::GetAttr { ino }).await {
                Ok(MetaReply::Entry { attr, lease, .. }) => {
                    let attr = self.note(attr, lease, 0, asked);
                    if !self.lacks_writes(ino).await? {
                        return Ok(attr);
                    }
                }
                Ok(other) => return unexpected(&other),
                Err(FsError::Stale) => return self.removed_dir(ino).ok_or(FsError::Stale),
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether an answer of the owner lacks what was written here: it is not certain that the client still has its lease. Waits
    /// until the client has it, or has lost it with what was written.
    async fn lacks_writes(&self, ino: Ino) -> Result<bool, FsError> {
        let Some(node) = self.inner.nodes.find(ino) else { return Ok(false) };
        if !node.lock().is_unsure_and_behind() {
            return Ok(false);
        }
        self.inner.session.be_certain().await?;
        node.recall_settled().await;
        Ok(true)
    }

    fn removed_dir(&self, ino: Ino) -> Option<Attr> {
        self.inner.nodes.find(ino)?.lock().removed_dir()
    }

    /// Creates an inode and pins it.
    pub async fn make(&self, make: MakeNode) -> Result<Attr, FsError> {
        self.make_named(make).await.map(|(attr, _)| attr)
    }

    /// As [`Client::make`], for a cache above: also returns how long it may keep the name.
    pub async fn make_named(&self, make: MakeNode) -> Result<(Attr, NameTerm), FsError> {
        let (parent, opened) = (make.parent, make.open != OpenIntent::None);
        let _under_way = opened.then(|| self.inner.makes.begin());
        let (asked, term) = (self.asking(), self.asking_names(parent));
        match self.call(MetaRequest::Make(make)).await? {
            MetaReply::Entry { attr, lease, keep } => {
                self.changed(parent);
                let attr =
                    if opened { self.made(attr, lease, asked) } else { self.note(attr, lease, 1, asked) };
                Ok((attr, NameTerm { keep, ..term }))
            }
            other => unexpected(&other),
        }
    }

    /// Makes a file without a name in a directory, opens and pins it. [`Client::link`] can name it.
    pub async fn make_unnamed(&self, make: MakeNode) -> Result<Attr, FsError> {
        let _under_way = self.inner.makes.begin();
        let asked = self.asking();
        match self.call(MetaRequest::MakeUnnamed(make)).await? {
            MetaReply::Entry { attr, lease, .. } => Ok(self.made(attr, lease, asked)),
            other => unexpected(&other),
        }
    }

    /// Notes and pins a file that the session has just made and opened.
    fn made(&self, made: Attr, lease: Option<LeaseGrant>, asked: Asked) -> Attr {
        let attr = self.note(made, lease, 1, asked);
        let node = self.inner.nodes.get(attr.ino);
        let mut state = node.lock();
        state.opened();
        // Others here may have found the file and written to it before this answer came.
        if state.lease.is_some() && attr.data_ver == made.data_ver {
            state.map.learn_empty();
        }
        attr
    }

    /// A page of entries. Pins none of them.
    pub async fn readdir(
        &self,
        ino: Ino,
        after: Option<DirPosition>,
        limit: u32,
    ) -> Result<DirPage, FsError> {
        let term = self.asking_names(ino);
        match self.call(MetaRequest::ReadDir { ino, after, limit }).await? {
            MetaReply::Dir { entries, parent, end, keep } => {
                Ok(DirPage { entries, parent, end, term: NameTerm { keep, ..term } })
            }
            other => unexpected(&other),
        }
    }

    /// Pins an entry of a page, whose term is given, and returns its attributes as seen from here.
    pub fn pin_entry(&self, term: &NameTerm, entry: &DirEntry) -> Attr {
        self.note(entry.attr, entry.lease, 1, term.asked)
    }

    /// The target of a symbolic link.
    pub async fn readlink(&self, ino: Ino) -> Result<bytes::Bytes, FsError> {
        match self.call(MetaRequest::ReadLink { ino }).await? {
            MetaReply::Bytes(target) => Ok(target),
            other => unexpected(&other),
        }
    }

    async fn remove(&self, parent: Ino, request: MetaRequest) -> Result<(), FsError> {
        let asked = self.asking();
        let reply = self.call(request).await?;
        self.changed(parent);
        match reply {
            MetaReply::Attr(attr) => {
                self.learn_if_known(attr, asked);
                Ok(())
            }
            other => unexpected(&other),
        }
    }

    pub(crate) fn learn_if_known(&self, attr: Attr, asked: Asked) {
        match self.inner.nodes.find(attr.ino) {
            Some(_) => {
                self.note(attr, None, 0, asked);
            }
            None => self.overtake(attr.ino),
        }
    }

    /// Removes a name of a file.
    pub async fn unlink(&self, parent: Ino, name: &[u8]) -> Result<(), FsError> {
        self.remove(parent, MetaRequest::Unlink { parent, name: owned(name) }).await
    }

    /// Removes an empty directory.
    pub async fn rmdir(&self, parent: Ino, name: &[u8]) -> Result<(), FsError> {
        self.remove(parent, MetaRequest::Rmdir { parent, name: owned(name) }).await
    }

    /// Makes data of a file durable before it takes the place of another: after a crash there must be the old content
    /// or the new, not an empty file.
    async fn flush_before_rename(&self, parent: Ino, name: &[u8]) -> Result<(), FsError> {
        if self.inner.dirty_bytes.load(Ordering::Relaxed) == 0 {
            return Ok(());
        }
        let asked = self.asking();
        let attr = match self.call(MetaRequest::Lookup { parent, name: owned(name) }).await? {
            MetaReply::Entry { attr, lease, .. } => self.note(attr, lease, 0, asked),
            MetaReply::Missing { .. } => return Err(FsError::NotFound),
            other => return unexpected(&other),
        };
        match self.inner.nodes.find(attr.ino) {
            Some(node) if node.lock().has_dirty() => match self.flush(&node).await {
                // The file has lost all its names in the meantime. The rename moves the file that has this name now.
                Err(FsError::Stale) => Ok(()),
                flushed => flushed,
            },
            _ => Ok(()),
        }
    }

    /// Moves a name. Data written to the file is durable before its new name is.
    pub async fn rename(
        &self,
        from: (Ino, &[u8]),
        to: (Ino, &[u8]),
        mode: RenameMode,
    ) -> Result<(), FsError> {
        self.rename_leaving(from, to, mode, None).await
    }

    /// As [`Client::rename`], and leaves a whiteout under the old name.
    pub async fn rename_leaving(
        &self,
        from: (Ino, &[u8]),
        to: (Ino, &[u8]),
        mode: RenameMode,
        whiteout: Option<Whiteout>,
    ) -> Result<(), FsError> {
        self.flush_before_rename(from.0, from.1).await?;
        let (parent, new_parent) = (from.0, to.0);
        let (name, new_name) = (owned(from.1), owned(to.1));
        let asked = self.asking();
        let request = MetaRequest::Rename { parent, name, new_parent, new_name, mode, whiteout };
        self.moves_names([parent, new_parent]);
        let reply = self.call(request).await?;
        self.changed(parent);
        self.changed(new_parent);
        match reply {
            MetaReply::Renamed { moved, other } => {
                self.learn_if_known(moved, asked);
                other.into_iter().for_each(|attr| self.learn_if_known(attr, asked));
                Ok(())
            }
            other => unexpected(&other),
        }
    }

    /// Adds a name to a file, and pins it.
    pub async fn link(&self, ino: Ino, parent: Ino, name: &[u8]) -> Result<Attr, FsError> {
        self.link_named(ino, parent, name).await.map(|(attr, _)| attr)
    }

    /// As [`Client::link`], for a cache above: also returns how long it may keep the name.
    pub async fn link_named(&self, ino: Ino, parent: Ino, name: &[u8]) -> Result<(Attr, NameTerm), FsError> {
        let term = self.asking_names(parent);
        match self.call(MetaRequest::Link { ino, parent, name: owned(name) }).await? {
            MetaReply::Entry { attr, keep, .. } => {
                self.changed(parent);
                // The inode may be forgotten here before the answer to an older request comes.
                self.overtake(ino);
                Ok((self.note(attr, None, 1, self.asking()), NameTerm { keep, ..term }))
            }
            other => unexpected(&other),
        }
    }

    /// Changes attributes. For a file that is being written here they become durable with its data. Otherwise the
    /// owner has them on return; dirty data goes first, so that its times do not override the new ones.
    pub async fn setattr(&self, ino: Ino, set: SetAttr) -> Result<Attr, FsError> {
        let node = self.inner.nodes.get(ino);
        if set.size.is_some() {
            return self.set_size(&node, set).await;
        }
        // The owner checks the rights to a change of mode or owner when it is made.
        let is_checked = self.caller.is_some() && (set.mode, set.uid, set.gid) != (None, None, None);
        if !is_checked && let Some(attr) = self.hold(&node, &set) {
            return Ok(attr);
        }
        let guard = node.flush.lock().await;
        let asked = self.asking();
        let times = set.mtime_ns.is_some() || set.atime_ns.is_some();
        if times || !node.lock().held.set.is_empty() {
            self.flush_locked(&node).await?;
        }
        if times {
            node.lock().atime_ns = None;
        }
        let reply = self.call(MetaRequest::SetAttr { ino, set }).await;
        drop(guard);
        self.learned(ino, reply?, asked)
    }

    /// Sets or clears the protection of an inode. Earlier writes are durable on return.
    pub async fn set_guard(&self, ino: Ino, guard: Guard) -> Result<Attr, FsError> {
        let node = self.inner.nodes.get(ino);
        let _flush = node.flush.lock().await;
        let _remapping = self.remap(&node, || true).await?;
        let asked = self.asking();
        let reply = self.call(MetaRequest::SetGuard { ino, guard }).await?;
        self.learned(ino, reply, asked)
    }

    /// Holds a change of attributes under the exclusive lease, if it may wait for the next commit.
    fn hold(&self, node: &Node, set: &SetAttr) -> Option<Attr> {
        let mut state = node.lock();
        if !state.hold(set, self.inner.env.clock.wall_ns()) {
            return None;
        }
        state.dirty_since_ns.get_or_insert(self.inner.env.clock.boot_ns());
        if state.opens == 0 {
            self.note_closed(node.ino);
        }
        state.attr()
    }

    /// Sends held changes of attributes to the owner before an ACL is read or changed, because the ACL and the mode
    /// depend on each other.
    async fn settle_mode(&self, ino: Ino, xattr: &[u8]) -> Result<(), FsError> {
        if !xattr.starts_with(ACL_PREFIX) {
            return Ok(());
        }
        match self.inner.nodes.find(ino) {
            Some(node) if !node.lock().held.set.is_empty() => self.flush(&node).await,
            _ => Ok(()),
        }
    }

    /// Notes the attributes in the answer to a request that was sent at `asked`.
    pub(crate) fn learned(&self, ino: Ino, reply: MetaReply, asked: Asked) -> Result<Attr, FsError> {
        match reply {
            MetaReply::Attr(attr) if attr.ino == ino => Ok(self.note(attr, None, 0, asked)),
            other => unexpected(&other),
        }
    }

    /// The value of an extended attribute.
    pub async fn getxattr(&self, ino: Ino, name: &[u8]) -> Result<bytes::Bytes, FsError> {
        self.settle_mode(ino, name).await?;
        match self.call(MetaRequest::GetXattr { ino, name: owned(name) }).await? {
            MetaReply::Bytes(value) => Ok(value),
            other => unexpected(&other),
        }
    }

    /// Sets an extended attribute.
    pub async fn setxattr(
        &self,
        ino: Ino,
        name: &[u8],
        value: &[u8],
        mode: XattrMode,
    ) -> Result<(), FsError> {
        self.settle_mode(ino, name).await?;
        let request = MetaRequest::SetXattr { ino, name: owned(name), value: owned(value), mode };
        let asked = self.asking();
        let reply = self.call(request).await?;
        self.learned(ino, reply, asked).map(|_| ())
    }

    /// The names of all extended attributes.
    pub async fn listxattr(&self, ino: Ino) -> Result<Vec<bytes::Bytes>, FsError> {
        match self.call(MetaRequest::ListXattr { ino }).await? {
            MetaReply::Names(names) => Ok(names),
            other => unexpected(&other),
        }
    }

    /// Removes an extended attribute.
    pub async fn removexattr(&self, ino: Ino, name: &[u8]) -> Result<(), FsError> {
        self.settle_mode(ino, name).await?;
        let asked = self.asking();
        let reply = self.call(MetaRequest::RemoveXattr { ino, name: owned(name) }).await?;
        self.learned(ino, reply, asked).map(|_| ())
    }

    /// Opens an inode. The first open of a file here takes one message, further ones none.
    pub async fn open_file(&self, ino: Ino, intent: OpenIntent) -> Result<Attr, FsError> {
        let node = self.inner.nodes.get(ino);
        let _gate = node.gate.lock().await;
        let need = if intent == OpenIntent::Read { LeaseKind::Read } else { LeaseKind::Exclusive };
        if intent != OpenIntent::Truncate {
            let mut state = node.lock();
            if state.registered
                && !state.may_be_closed
                && state.holds(need)
                && let Some(attr) = state.attr()
            {
                if intent == OpenIntent::Write && attr.guard.immutable {
                    return Err(FsError::NotPermitted);
                }
                state.opens += 1;
                return Ok(attr);
            }
        }
        let flush = if intent == OpenIntent::Truncate { Some(node.flush.lock().await) } else { None };
        let _remapping = flush.as_ref().map(|_| Remapping::new(&node));
        let (asked, makes_before) = (self.asking(), self.inner.makes.begun());
        node.lock().cut = flush.as_ref().map(|_| 0);
        let reply = self.call(MetaRequest::Open { ino, intent }).await;
        let cut = {
            let mut state = node.lock();
            if let Ok(MetaReply::Entry { attr, .. }) = &reply {
                state.opened();
                state.makes_before = makes_before;
                if flush.is_some() {
                    state.cut_off();
                    state.learn(*attr);
                }
            }
            state.cut.take()
        };
        self.dirty_gone(cut.unwrap_or_default());
        match reply? {
            MetaReply::Entry { attr, lease, .. } => Ok(self.note(attr, lease, 0, asked)),
            other => unexpected(&other),
        }
    }

    /// Closes a handle. After the last one, dirty data is made durable in the background.
    pub fn close_file(&self, ino: Ino) {
        let Some(node) = self.inner.nodes.find(ino) else { return };
        let last = {
            let mut state = node.lock();
            state.opens = state.opens.saturating_sub(1);
            if state.opens == 0 && state.map.len() > MAP_KEPT_MAX {
                state.map.forget();
            }
            state.opens == 0
        };
        if last {
            self.note_closed(ino);
        }
    }
}
