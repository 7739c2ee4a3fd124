//! A node that follows a ledger which another node owns, so that it can take it over quickly.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use base::env::Clock;
use base::{LedgerId, Seq};
use bytes::Bytes;
use wire::replica::{CopyPart, ReplicaReply, ReplicaRequest, ReplicaService};

use super::copying::CopyCheck;
use super::recovery::{Follower, OwnerError};
use crate::log::{Fence, LedgerLog, LogError, NOBODY, Vacancy};
use crate::state::{Applied, State, StateError, every_key};

/// For how long a log that did not answer must answer again before its owner counts as silent: an owner that lives tries to give a sign of
/// life more often.
const GRACE: Duration = Duration::from_millis(1500);
/// A look that takes this long has met an outage of the log.
const LATE: Duration = Duration::from_secs(1);
/// The pause between two looks at the log.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// A standby applies new entries at every fourth look, because each time is a write to its disk.
const LOOKS_PER_STEP: u32 = 4;
/// How long a standby waits for an answer of the owner to its reports, and for a part of a copy.
const PATIENCE: Duration = Duration::from_secs(5);

/// A watch over the owner of a ledger on another node. Two looks that show the same say that there was no sign of life between them, by this
/// node's own clock, whether the log answered in between or not.
#[derive(Default)]
struct Vigil {
    seen: Option<Fence>,
    /// When the first look that showed this was over.
    since_ns: u64,
    /// For how long the log has answered since then, without a pause.
    answered_ns: u64,
    looked_ns: Option<u64>,
}

impl Vigil {
    /// Looks at the log. Returns its fence, if it answers, and whether the ledger is vacant: the owner has given no sign of
    /// life for the log's lease, so its own lease has ended before, and not only because the log took none; or there is no owner,
    /// because nobody has taken the ledger yet, or the last one gave it back.
    async fn look(&mut self, log: &dyn LedgerLog, clock: &dyn Clock) -> (Option<Fence>, bool) {
        let lease = log.caps().lease;
        let lease_ns = lease.unwrap_or_default().as_nanos() as u64;
        let asked_ns = clock.boot_ns();
        let Ok(fence) = log.fence().await else {
            (self.looked_ns, self.answered_ns) = (None, 0);
            return (None, false);
        };
        let now_ns = clock.boot_ns();
        // A late answer comes from the end of an outage.
        let is_late = now_ns.saturating_sub(asked_ns) >= LATE.as_nanos() as u64;
        if self.seen != Some(fence) {
            (self.seen, self.since_ns, self.answered_ns) = (Some(fence), now_ns, 0);
        } else if is_late {
            self.answered_ns = 0;
        } else {
            // A suspended machine saw nothing in the meantime.
            let looked_ns = self.looked_ns.map_or(0, |looked_ns| asked_ns.saturating_sub(looked_ns));
            self.answered_ns += looked_ns.min(2 * LOOK_EVERY.as_nanos() as u64);
        }
        self.looked_ns = Some(if is_late { now_ns } else { asked_ns });
        let is_nobodys = lease.is_some() && fence.nonce == NOBODY;
        let is_silent = asked_ns.saturating_sub(self.since_ns) >= lease_ns
            && self.answered_ns >= lease_ns.min(GRACE.as_nanos() as u64);
        (Some(fence), is_nobodys || is_silent)
    }
}

/// How a standby takes part in a ledger.
pub struct StandbyOptions {
    /// The ledger.
    pub ledger: LedgerId,
    /// Its log.
    pub log: Arc<dyn LedgerLog>,
    /// A local store of its own, which may be older than the log's end, or empty.
    pub state: Arc<dyn State>,
    /// The present owner.
    pub owner: Arc<dyn ReplicaService>,
    /// A number that no other replica of the ledger has.
    pub replica: u64,
    /// For how long owners keep the log for this standby if they hear nothing of it.
    pub wait: Duration,
}

/// See the module.
pub struct Standby {
    options: StandbyOptions,
    follower: Follower,
    vigil: Vigil,
}

impl Standby {
    /// A standby that begins where its store ends.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn new(options: StandbyOptions) -> Result<Self, OwnerError> {
        let follower = Follower::new(options.ledger, options.log.clone(), options.state.clone())?;
        Ok(Self { options, follower, vigil: Vigil::default() })
    }

    /// Applies new entries of the log to the store about once a second, until the ledger is vacant: the owner has given no
    /// sign of life for the lease of the log, or has given the ledger back. Returns what the log shows: a node that takes the
    /// ledger while it shows that takes it from nobody. Other nodes may see the same vacancy.
    ///
    /// While the log does not answer, it waits, and for a moment after that, in which an owner that lives shows itself. If the log was trimmed beyond the end of the store, it takes a copy of the
    /// owner's store; without an owner, it waits for one.
    ///
    /// # Errors
    /// `RolledBack` and others as for an owner.
    pub async fn follow(&mut self, clock: &dyn Clock) -> Result<Vacancy, OwnerError> {
        let log = self.options.log.clone();
        let mut look: u32 = 0;
        loop {
            let (fence, is_vacant) = self.vigil.look(&*log, clock).await;
            if let Some(fence) = fence
                && (is_vacant || look.is_multiple_of(LOOKS_PER_STEP))
                && self.step(fence.tail, is_vacant).await?
                && is_vacant
                // That may have taken long: the owner may have come back.
                && self.vigil.look(&*log, clock).await == (Some(fence), true)
            {
                return Ok(fence.vacancy());
            }
            look = look.wrapping_add(1);
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Applies all entries up to `tail`. Returns whether the store has them.
    async fn step(&mut self, tail: Seq, is_vacant: bool) -> Result<bool, OwnerError> {
        match self.follower.catch_up(tail).await {
            Ok(()) if is_vacant => Ok(true),
            Ok(()) => {
                let StandbyOptions { replica, wait, .. } = self.options;
                let (seq, wait_ms) = (self.stored()?.seq, wait.as_millis() as u32);
                let stored = ReplicaRequest::Stored { replica, seq, wait_ms };
                // An owner that does not hear of it keeps more of the log, or less: then there are copies. A look must not be
                // late for that.
                let _ = tokio::time::timeout(LOOK_EVERY, self.options.owner.ask(stored)).await;
                Ok(true)
            }
            Err(OwnerError::Log { source: LogError::Io(error), .. }) => {
                tracing::debug!(%error, "ledger log does not answer");
                Ok(false)
            }
            Err(OwnerError::Behind { .. }) => {
                self.copy().await?;
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    fn stored(&self) -> Result<Applied, OwnerError> {
        self.options.state.applied().map_err(|source| self.store_error(source))
    }

    fn store_error(&self, source: StateError) -> OwnerError {
        OwnerError::Store { ledger: self.options.ledger, source }
    }

    /// Replaces the content of the store by a copy of the owner's, if it gives one. A store that has a part of a copy is at
    /// position 0, so that nothing but another copy, or the whole log, completes it.
    async fn copy(&mut self) -> Result<(), OwnerError> {
        let ledger = self.options.ledger;
        let seen = self.options.state.newest().map_err(|source| self.store_error(source))?.seq;
        tracing::info!(%ledger, "the log was trimmed beyond this store: copying the owner's");
        let mut check = CopyCheck::default();
        while !check.is_complete() {
            let (copy, after) = check.next();
            let Some(part) = self.ask_part(copy, after.clone()).await else { return Ok(()) };
            if part.seq < seen {
                return Err(OwnerError::RolledBack { ledger, seen, tail: part.seq });
            }
            if let Err(error) = check.take(&part) {
                tracing::warn!(%ledger, %error);
                return Ok(());
            }
            self.put(&part, &after).map_err(|source| self.store_error(source))?;
            if !part.more {
                let applied = Applied { seq: part.seq, epoch: part.epoch };
                let done = self.options.state.apply(&mut std::iter::empty(), applied);
                done.map_err(|source| self.store_error(source))?;
            }
        }
        self.follower = Follower::new(ledger, self.options.log.clone(), self.options.state.clone())?;
        Ok(())
    }

    async fn ask_part(&self, copy: u64, after: Bytes) -> Option<CopyPart> {
        let StandbyOptions { replica, wait, .. } = self.options;
        let request = ReplicaRequest::Copy { replica, wait_ms: wait.as_millis() as u32, copy, after };
        match tokio::time::timeout(PATIENCE, self.options.owner.ask(request)).await {
            Ok(Ok(ReplicaReply::Copied(part))) => Some(part),
            answer => {
                tracing::debug!(?answer, "the owner gives no copy of its store");
                None
            }
        }
    }

    /// Puts a part, which begins behind the key `after`, in place of what the store has in its range.
    fn put(&self, part: &CopyPart, after: &[u8]) -> Result<(), StateError> {
        let state = &self.options.state;
        let follows = |key: &[u8]| [key, &[0]].concat();
        let from = if after.is_empty() { Vec::new() } else { follows(after) };
        let to = match part.pairs.last() {
            Some((last, _)) if part.more => follows(last),
            _ => every_key().1,
        };
        let mut changes: BTreeMap<Vec<u8>, Option<&[u8]>> = BTreeMap::new();
        state.scan(&(from, to), &mut |key, _| {
            changes.insert(key.to_vec(), None);
            std::ops::ControlFlow::Continue(())
        })?;
        changes.extend(part.pairs.iter().map(|(key, value)| (key.to_vec(), Some(&value[..]))));
        state.apply(&mut changes.iter().map(|(key, value)| (&key[..], *value)), Applied::default())
    }
}
