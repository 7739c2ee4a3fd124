//! Background work of a client: heartbeats, flushes of aged dirty data, recalls.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use base::{FsError, Ino};
use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use wire::meta::{LeaseGrant, LeaseKind, MetaRequest, OwnerEvent};

use crate::Client;
use crate::node::Node;
use crate::term::Notice;

const TICK: Duration = Duration::from_millis(250);
const TICKS_PER_ROUND: u64 = 4;
/// Written data is made durable after this time at the latest.
const DIRTY_AGE_NS: u64 = 5_000_000_000;
/// How long written data stays in memory after the last close.
const CLOSE_DELAY: Duration = Duration::from_millis(20);
/// How long a batch of closed files waits for a slow file.
const CLOSE_PATIENCE: Duration = Duration::from_millis(200);
/// Batches with files that are still being written while the next batch begins.
const LATE_BATCHES_MAX: usize = 256;
/// Closed files that are flushed together.
const CLOSES_AT_ONCE: usize = 64;
/// Rounds of flushing before the client stops trying to give up a lease.
const FLUSH_ROUNDS: u32 = 8;
/// Pause before an owner that could not be told of closed files is told again.
const CLOSE_PAUSE: Duration = Duration::from_secs(1);
/// Pause after a failed flush before it is tried again.
const FLUSH_PAUSE: Duration = Duration::from_millis(250);
/// Events of the owner that are handled together.
const EVENTS_AT_ONCE: usize = 1024;

pub(crate) async fn ticker(client: Client) {
    let mut interval = tokio::time::interval(TICK);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    for tick in 0u64.. {
        interval.tick().await;
        // Often, because deleted space comes back only when the heartbeats of all sessions say that no read uses it.
        if let Err(error) = client.inner.session.heartbeat().await {
            tracing::warn!(%error, "heartbeat was not answered");
        }
        client.inner.session.release_settled();
        client.refresh_room();
        if !tick.is_multiple_of(TICKS_PER_ROUND) {
            continue;
        }
        client.flush_aged();
        client.forget_maps();
        client.release_unused().await;
    }
}

/// Makes closed files durable and tells the owner. Files closed one after another share batches and messages. A slow
/// file that waits for room does not hold up the others: they may be the ones that give room back.
pub(crate) async fn closer(client: Client) {
    let mut late = JoinSet::new();
    loop {
        client.inner.closed_some.notified().await;
        tokio::time::sleep(CLOSE_DELAY).await;
        let flushed =
            std::mem::take(&mut *client.inner.flushed.lock().expect("no holder of this lock panics"));
        let closed = std::mem::take(&mut *client.inner.closed.lock().expect("no holder of this lock panics"));
        for some in flushed.chunks(CLOSES_AT_ONCE) {
            client.tell_closed(some).await;
        }
        for some in closed.chunks(CLOSES_AT_ONCE) {
            client.end_closed(some, &mut late).await;
        }
    }
}

impl Client {
    /// Flushes files and tells the owner of their closes. Files that take long are left to a task in `late`.
    async fn end_closed(&self, closed: &[Ino], late: &mut JoinSet<()>) {
        while late.try_join_next().is_some() {}
        if late.len() >= LATE_BATCHES_MAX {
            late.join_next().await;
        }
        let flushes = closed.iter().map(|ino| self.clone().flush_closed(*ino));
        let mut flushes: FuturesUnordered<_> = flushes.collect();
        let (mut ended, mut unnamed) = (Vec::new(), Vec::new());
        let deadline = tokio::time::Instant::now() + CLOSE_PATIENCE;
        while let Ok(Some((ino, node))) = tokio::time::timeout_at(deadline, flushes.next()).await {
            ended.push(ino);
            unnamed.extend(node);
        }
        self.tell_closed(&ended).await;
        if flushes.is_empty() && unnamed.is_empty() {
            return;
        }
        let client = self.clone();
        late.spawn(async move {
            let settled = join_all(unnamed.into_iter().map(|node| client.settle_unnamed(node)));
            let flushed = async {
                while let Some((ino, _)) = flushes.next().await {
                    client.inner.flushed.lock().expect("no holder of this lock panics").push(ino);
                    client.inner.closed_some.notify_one();
                }
            };
            tokio::join!(settled, flushed);
        });
    }

    /// Flushes a closed file. A file that may be removed once the owner knows of the close is not flushed but returned.
    async fn flush_closed(self, ino: Ino) -> (Ino, Option<Arc<Node>>) {
        let Some(node) = self.inner.nodes.find(ino) else { return (ino, None) };
        if node.lock().may_be_gone() {
            return (ino, Some(node));
        }
        if let Err(error) = self.flush(&node).await {
            tracing::error!(%ino, %error, "data could not be written after close; trying again");
        }
        (ino, None)
    }

    /// Settles a file without a name: its dirty data is needed only if another client has the file open.
    async fn settle_unnamed(&self, node: Arc<Node>) {
        let ino = node.ino;
        match self.call(MetaRequest::GetAttr { ino }).await {
            Err(FsError::Stale) => self.discard_dirty(&node).await,
            _ => {
                if let Err(error) = self.flush(&node).await {
                    tracing::error!(%ino, %error, "data could not be written after close; trying again");
                }
            }
        }
        drop(node);
        self.drop_if_idle(ino);
    }

    /// Drops maps of closed files if they take too much memory. The next open of such a file asks for its map again.
    fn forget_maps(&self) {
        let mut bytes = self.inner.nodes.sum(|state| state.map.memory_bytes());
        if bytes <= self.inner.map_bytes_max {
            return;
        }
        for node in self.inner.nodes.select(|state| state.opens == 0 && state.map.memory_bytes() > 0) {
            let mut state = node.lock();
            if state.opens == 0 {
                bytes -= bytes.min(state.map.memory_bytes());
                state.map.forget();
            }
            if bytes <= self.inner.map_bytes_max / 2 {
                return;
            }
        }
    }

    /// Leaves a file to the closer.
    pub(crate) fn note_closed(&self, ino: Ino) {
        self.inner.closed.lock().expect("no holder of this lock panics").push(ino);
        self.inner.closed_some.notify_one();
    }

    /// Tells the owner which files have no handle here any more. An open of such a file waits in the meantime, so that
    /// the close does not end it.
    async fn tell_closed(&self, closed: &[Ino]) {
        let nodes: Vec<_> = closed.iter().filter_map(|ino| self.inner.nodes.find(*ino)).collect();
        let mut gates = Vec::new();
        let mut ended = Vec::new();
        self.inner.close_rounds.fetch_add(1, Ordering::SeqCst);
        for node in &nodes {
            // An open is under way; the next round knows its result.
            let Ok(gate) = node.gate.try_lock() else {
                self.note_closed(node.ino);
                continue;
            };
            let mut state = node.lock();
            // The answer to its creation may not have come yet; then the creator has it open.
            if state.registered && self.inner.makes.is_under_way(state.makes_before) {
                self.note_closed(node.ino);
                continue;
            }
            if state.opens == 0 && std::mem::take(&mut state.registered) {
                ended.push(node.ino);
                gates.push(gate);
            }
        }
        let told = match ended.is_empty() {
            true => Ok(()),
            false => self.call(MetaRequest::Close { inos: ended.clone() }).await.map(drop),
        };
        if let Err(error) = told {
            tracing::warn!(%error, "owner was not told of closed files");
            // With the session, its open files have ended.
            if error != FsError::StaleLease {
                let untold = nodes.iter().filter(|node| ended.contains(&node.ino));
                untold.for_each(|node| {
                    let mut state = node.lock();
                    state.registered = true;
                    state.may_be_closed |= error == FsError::Unknown;
                });
            }
        }
        self.inner.close_rounds.fetch_add(1, Ordering::SeqCst);
        drop(gates);
        drop(nodes);
        closed.iter().for_each(|ino| self.drop_if_idle(*ino));
        if told.is_err() {
            // Otherwise the owner would keep those without a name for as long as the session lasts.
            tokio::time::sleep(CLOSE_PAUSE).await;
            ended.into_iter().for_each(|ino| self.note_closed(ino));
        }
    }

    fn flush_aged(&self) {
        let now = self.inner.env.clock.boot_ns();
        let aged = |since: u64| now.saturating_sub(since) >= DIRTY_AGE_NS;
        let stalled = self.inner.stalled.lock().expect("no holder of this lock panics").is_some();
        let due = self.inner.nodes.select(|state| {
            !state.flush_scheduled && state.dirty_since_ns.is_some_and(|since| stalled || aged(since))
        });
        for node in due {
            node.lock().flush_scheduled = true;
            self.schedule_flush(node);
        }
    }

    async fn release_unused(&self) {
        let leases =
            std::mem::take(&mut *self.inner.to_release.lock().expect("no holder of this lock panics"));
        // An inode that was looked up again in the meantime may use the same grant.
        let unused: Vec<LeaseGrant> =
            leases.into_iter().filter(|lease| self.inner.nodes.find(lease.ino).is_none()).collect();
        if !unused.is_empty()
            && let Err(error) = self.call(MetaRequest::ReleaseAll { leases: unused }).await
        {
            tracing::warn!(%error, "leases were not given back");
        }
    }

    /// Notes that the owner recalls a lease.
    fn note_recall(&self, lease: LeaseGrant, notice: Notice) {
        self.void(lease);
        let Some(node) = self.inner.nodes.find(lease.ino) else { return };
        let mut state = node.lock();
        if state.lease.is_some_and(|held| held.id == lease.id) {
            state.notice = Some(state.notice.map_or(notice, |earlier| earlier.and(notice)));
        }
    }

    /// Flushes the data under a lease, invalidates caches above, and gives the lease back.
    ///
    /// The lease stays usable until the last moment, so that a write under way never waits for a lease while
    /// invalidation waits for that write. Nor does invalidation wait for a read or write that waits for the owner,
    /// which may wait for this recall.
    async fn recalled(&self, lease: LeaseGrant, keep: Option<LeaseKind>) {
        let Some(node) = self.inner.nodes.find(lease.ino) else {
            self.release(lease, None).await;
            return;
        };
        let (mut round, mut invalidated) = (0, None);
        while round < FLUSH_ROUNDS {
            // A writer that never pauses would always have dirty data, so new writes wait from the second round on.
            node.lock().yielding = round > 0;
            if let Err(error) = self.flush_for_recall(&node).await {
                tracing::error!(ino = %lease.ino, %error, "data could not be written before giving up a lease");
                if node.lock().lease.is_none_or(|held| held.id != lease.id) {
                    return;
                }
                // The owner still counts the lease as held, and others wait for it. The error may pass.
                tokio::time::sleep(FLUSH_PAUSE).await;
                continue;
            }
            if keep.is_none() {
                let reads = {
                    let mut state = node.lock();
                    // Caches above must not keep attributes that they read from now on.
                    state.recalled = true;
                    // A reader that never pauses would fill them anew each time.
                    state.holds_reads = round > 0;
                    state.reads
                };
                if invalidated.replace(reads) != Some(reads) {
                    self.invalidate_for_recall(&node).await;
                }
            }
            if self.give_up(&node, lease, keep, invalidated) {
                self.release(lease, keep).await;
                return;
            }
            round += 1;
        }
        tracing::error!(ino = %lease.ino, "lease could not be given up: its data keeps becoming dirty");
    }

    /// Writes dirty data. The holder of the flush lock may wait for another client that waits for this lease, so the
    /// lock is taken only if there is data to write: then the lease is exclusive, and no request on this inode waits
    /// for others. For the same reason no access time is sent.
    async fn flush_for_recall(&self, node: &Node) -> Result<(), FsError> {
        if !node.lock().is_behind() {
            return Ok(());
        }
        let _flush = node.flush.lock().await;
        self.flush_locked(node).await
    }

    /// Remembers that a grant is given up, because answers that carry it may still arrive.
    pub(crate) fn void(&self, lease: LeaseGrant) {
        let now = self.inner.env.clock.boot_ns();
        self.inner.given_up.lock().expect("no holder of this lock panics").note(lease, now);
    }

    /// Stops using the lease, unless the inode has dirty data again, or caches above may have content from after the `invalidated`
    /// reads. Returns whether it stopped.
    fn give_up(
        &self,
        node: &Arc<Node>,
        lease: LeaseGrant,
        keep: Option<LeaseKind>,
        invalidated: Option<u64>,
    ) -> bool {
        let mut state = node.lock();
        state.holds_reads = false;
        if state.is_behind() || invalidated.is_some_and(|reads| state.reads != reads) {
            return false;
        }
        if state.lease.is_some_and(|held| held.id == lease.id) {
            state.lease = keep.map(|kind| LeaseGrant { kind, ..lease });
            state.notice.take_if(|notice| keep <= notice.keep);
            state.yielding = false;
            state.recalled = false;
        }
        if keep.is_none() {
            state.map.forget();
            state.forget_attr();
        }
        true
    }

    async fn release(&self, lease: LeaseGrant, keep: Option<LeaseKind>) {
        match self.answer(MetaRequest::Release { lease, keep }).await {
            Ok(_) | Err(FsError::Unavailable | FsError::Unknown) => {}
            Err(error) => tracing::warn!(ino = %lease.ino, %error, "lease was not given back"),
        }
    }

    /// The owner took the lease away: dirty data under it is lost, and the next fsync returns an error.
    pub(crate) fn revoked(&self, lease: LeaseGrant) {
        self.void(lease);
        let Some(node) = self.inner.nodes.find(lease.ino) else { return };
        let lost = {
            let mut state = node.lock();
            match state.lease {
                Some(held) if held.id == lease.id => {}
                // Caches above may have content from the time of the earlier one.
                Some(_) => return drop(self.inner.runtime.spawn(self.clone().invalidate_above(lease))),
                None => return,
            }
            let is_changed = !state.held.set.is_empty();
            let lost = state.lose_lease();
            if is_changed {
                state.error = Some(FsError::Io);
                tracing::error!(ino = %lease.ino, "lease was revoked, a change of attributes is lost");
            }
            if lost > 0 {
                state.error = Some(FsError::Io);
                tracing::error!(ino = %lease.ino, lost, "lease was revoked, unwritten data is lost");
            }
            lost
        };
        self.dirty_gone(lost);
        self.inner.runtime.spawn(self.clone().invalidate_above(lease));
    }
}

pub(crate) async fn events(client: Client, mut inbox: mpsc::UnboundedReceiver<(u64, OwnerEvent)>) {
    let mut happened = Vec::new();
    while inbox.recv_many(&mut happened, EVENTS_AT_ONCE).await > 0 {
        if client.inner.closing.load(Ordering::Relaxed) {
            return;
        }
        let mut names: BTreeMap<Ino, Vec<(Bytes, u64)>> = BTreeMap::new();
        for (bond, event) in happened.drain(..) {
            // An earlier owner has no say any more. It may have taken a lease for another client before it ended.
            if !client.inner.session.bonds.is_present(bond).await {
                if let OwnerEvent::Revoked { lease } = event {
                    client.revoked(lease);
                }
                continue;
            }
            match event {
                OwnerEvent::Recall { lease, keep } => {
                    client.note_recall(lease, client.inner.session.term.notice(bond, keep));
                    let client = client.clone();
                    tokio::spawn(async move { client.recalled(lease, keep).await });
                }
                OwnerEvent::Revoked { lease } => client.revoked(lease),
                OwnerEvent::LockGranted { ticket } => client.inner.locks.note_granted(ticket),
                OwnerEvent::LockLost { lock } => {
                    tracing::error!(ino = %lock.ino, pid = lock.pid, "another client got a lock that was held here");
                    client.inner.locks.note_lost(&lock);
                }
                OwnerEvent::Forget { dir, name, number } => {
                    names.entry(dir).or_default().push((name, number));
                }
            }
            client.inner.session.term.took(bond);
        }
        // Names of one directory share a message. A directory that is busy above does not hold up the others.
        for (dir, names) in names {
            let (client, forgetting) = (client.clone(), client.forgetting());
            tokio::spawn(async move { client.forget_names(dir, names, forgetting).await });
        }
    }
}
