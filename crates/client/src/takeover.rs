//! The change to another owner of the ledger: the client tells it the state that the earlier owner had in memory only.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use base::{FsError, Ino, LeaseId, SessionId};
use tokio::sync::watch;
use wire::message::{AnswerTime, Envelope};
use wire::meta::{
    Attr, CLAIMS_MAX, Claim, HeldLease, LeaseGrant, MetaReply, MetaRequest, MetaService, RequestId, Resumed,
};

use crate::early::Change;
use crate::{Client, EventQueue, Events};

/// Answers that came from the earlier owner in time take effect before the client looks at its state.
const SETTLE: Duration = Duration::from_millis(20);
/// Pause before an owner is asked again.
const PAUSE: Duration = Duration::from_millis(200);

/// Binds the session to each owner that follows.
pub(crate) async fn follow(
    client: Client,
    mut owners: watch::Receiver<Arc<dyn MetaService>>,
    events: Events,
) {
    while owners.changed().await.is_ok() {
        loop {
            let owner = owners.borrow_and_update().clone();
            let bond = client.inner.session.bonds.leave();
            tokio::time::sleep(SETTLE).await;
            let events = Arc::new(EventQueue { bond, events: events.clone() });
            let Err(error) = client.move_to(owner, events).await else { break };
            tracing::warn!(%error, "the new owner of the ledger does not take the session, trying again");
            tokio::time::sleep(PAUSE).await;
        }
        let session = client.inner.session.bonds.with(|bond| bond.session);
        tracing::info!(%session, "the ledger has a new owner");
    }
    client.inner.session.bonds.expect_no_other();
}

/// Takes the first items, at most [`CLAIMS_MAX`].
fn take<T>(from: &mut Vec<T>) -> Vec<T> {
    let rest = from.split_off(from.len().min(CLAIMS_MAX));
    std::mem::replace(from, rest)
}

impl Client {
    async fn move_to(&self, owner: Arc<dyn MetaService>, events: Arc<EventQueue>) -> Result<(), FsError> {
        let mut session = self.inner.session.bonds.with(|bond| bond.session);
        let repeated = self.repeat_early(&*owner, session).await?;
        let (mut leases, opens) = self.claims();
        let claimed: Vec<LeaseGrant> = leases.iter().map(|held| held.lease).collect();
        let resumed = match self.claim(&*owner, session, (leases.clone(), opens.clone()), &events).await {
            Err(FsError::StaleLease) => {
                tracing::warn!("the session has ended; what was not written is lost");
                session = owner.connect(events.clone()).await?;
                leases.clear();
                self.inner.locks.lose_all();
                self.claim(&*owner, session, (leases, opens), &events).await?
            }
            other => other?,
        };
        let holds: HashMap<LeaseId, LeaseGrant> =
            resumed.leases.iter().map(|lease| (lease.id, *lease)).collect();
        for lease in claimed {
            if holds.contains_key(&lease.id) {
                self.settle_answers(lease);
            } else {
                self.revoked(lease);
            }
        }
        resumed.changed.into_iter().for_each(|attr| self.learn_elsewhere(attr));
        self.inner.session.bind_early(events.bond, repeated);
        self.inner.session.bonds.bind(session, owner);
        Ok(())
    }

    /// Lets the owner execute again what the earlier one answered before it was durable. Programs rely on that, so an owner
    /// executes it before all else; what comes too late is lost, and each file and directory in it has an error for `fsync`.
    /// Returns how many of them the owner has answered early.
    async fn repeat_early(&self, owner: &dyn MetaService, session: SessionId) -> Result<u64, FsError> {
        let changes = self.inner.session.leave_early();
        let ask = async |change: &Change| {
            let id = RequestId { session, slot: change.slot, seq: change.seq };
            let answer = AnswerTime::Again(change.first);
            let envelope = Envelope { caller: change.caller.clone(), answer, ..id.into() };
            owner.call(envelope, change.request.clone()).await
        };
        let (mut done, mut repeated) = (0, 0);
        for change in &changes {
            match ask(change).await {
                Ok(MetaReply::Early { reply, count, .. }) => {
                    repeated = count;
                    if let Err(error) = *reply {
                        tracing::error!(%error, "the new owner cannot repeat a change");
                        break;
                    }
                }
                Ok(_) => {}
                Err(error @ (FsError::Disconnected | FsError::Unavailable | FsError::Unknown)) => {
                    return Err(error);
                }
                Err(error) => {
                    tracing::error!(%error, "the new owner does not repeat a change");
                    break;
                }
            }
            done += 1;
        }
        // A repetition is answered when it is durable, and with it all before it.
        if let Some(last) = changes[..done].last() {
            ask(last).await?;
        }
        // All others open nothing: what they leave without a name is not kept for answers on their way.
        let closed = changes.iter().filter(|change| !matches!(change.request, MetaRequest::Make(_)));
        closed.for_each(|change| self.inner.session.note_repeated(change.slot, change.seq));
        self.inner.session.release(|_| true);
        if done < changes.len() {
            self.inner.session.note_lost();
        }
        changes.iter().skip(done).for_each(|change| self.lose(change));
        Ok(repeated)
    }

    fn lose(&self, change: &Change) {
        tracing::error!(request = ?change.request, "a change that was not durable is lost");
        for ino in &change.inos {
            if let Some(node) = self.inner.nodes.find(*ino) {
                let mut state = node.lock();
                state.error = Some(FsError::Io);
                state.forget_attr();
            }
        }
    }

    /// The leases that are held here, and the inodes that are open.
    fn claims(&self) -> (Vec<HeldLease>, Vec<Ino>) {
        let (mut leases, mut opens) = (Vec::new(), Vec::new());
        for node in self.inner.nodes.select(|state| state.lease.is_some() || state.registered) {
            let state = node.lock();
            opens.extend(state.registered.then_some(node.ino));
            let Some(lease) = state.lease else { continue };
            let (data_ver, attr_ver) = state.versions();
            leases.push(HeldLease { lease, data_ver, attr_ver });
        }
        (leases, opens)
    }

    /// Claims state in messages of bounded length.
    async fn claim(
        &self,
        owner: &dyn MetaService,
        session: SessionId,
        (mut leases, mut opens): (Vec<HeldLease>, Vec<Ino>),
        events: &Arc<EventQueue>,
    ) -> Result<Resumed, FsError> {
        let mut locks = self.inner.locks.held();
        let mut dirs = self.inner.forgotten.kept_dirs(self.inner.env.clock.boot_ns());
        let mut resumed = Resumed::default();
        let sent_ns = self.inner.session.term.now_ns();
        let mut begins = true;
        loop {
            let mut claim = Claim {
                in_use_ver: self.inner.session.in_use_ver(),
                leases: take(&mut leases),
                opens: take(&mut opens),
                dirs: take(&mut dirs),
                locks: take(&mut locks),
                unanswered: self.inner.session.unanswered(),
                more: false,
                begins: std::mem::take(&mut begins),
            };
            claim.more = !(leases.is_empty() && opens.is_empty() && dirs.is_empty() && locks.is_empty());
            let more = claim.more;
            let Resumed { leases, changed, lost_locks } =
                owner.resume(session, claim, events.clone()).await?;
            resumed.leases.extend(leases);
            resumed.changed.extend(changed);
            lost_locks.iter().for_each(|lock| self.inner.locks.note_lost(lock));
            if !more {
                self.inner.session.term.bound(events.bond, sent_ns);
                return Ok(resumed);
            }
        }
    }

    /// Answers of the earlier owner that carried the lease do not come any more.
    fn settle_answers(&self, lease: LeaseGrant) {
        let Some(node) = self.inner.nodes.find(lease.ino) else { return };
        node.lock().settle_answers(lease);
    }

    /// Takes attributes that changed under another owner.
    fn learn_elsewhere(&self, attr: Attr) {
        if let Some(node) = self.inner.nodes.find(attr.ino) {
            node.lock().learn(attr);
        }
    }
}
