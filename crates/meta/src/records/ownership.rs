//! A ledger of records whose log several nodes reach: its owner, and the standbys of that owner.

use std::sync::Arc;
use std::time::Duration;

use base::env::Env;
use base::{FsError, Seq};
use tokio::sync::watch;
use wire::BoxFuture;
use wire::replica::{ReplicaReply, ReplicaRequest, ReplicaService, STANDBY_WAIT_MAX};

use super::{Changes, Records, RecordsError};
use crate::log::{AppendError, LedgerLog, LogError, Room};
use crate::owner::{RENEW_PAUSE, Replicas, StandbyStat, Tenure, give_back, trim_to};
use crate::state::State;

/// The log is trimmed once it holds as many entries that nobody needs.
const TRIM_ENTRIES: u64 = 256;
/// The pause between two looks at how far the log may be trimmed.
const TRIM_LOOK_EVERY: Duration = Duration::from_secs(5);
/// After this number of looks the log is asked to trim even if nothing is to go: its engine forgets old signs of life then.
const TRIM_LOOKS: u32 = 60;

/// Whether this is still the owner.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// As far as is known.
    Owner,
    /// Another owner has the ledger, or this one gave it back.
    Former,
    /// The log has lost changes that it had acknowledged.
    Bereft,
}

/// What an owner has and a view lacks.
pub(super) struct Ownership {
    env: Env,
    tenure: Tenure,
    replicas: Replicas,
    standing: watch::Sender<Standing>,
}

impl Ownership {
    /// The owner began to seal the log at `asked_ns`.
    pub(super) fn new(env: Env, log: &dyn LedgerLog, state: Arc<dyn State>, asked_ns: u64) -> Self {
        let term = log.caps().lease;
        let grace = term.map_or(Duration::ZERO, |_| STANDBY_WAIT_MAX);
        Self {
            tenure: Tenure::new(term, asked_ns),
            replicas: Replicas::new(env.clone(), state, grace),
            env,
            standing: watch::Sender::new(Standing::Owner),
        }
    }

    fn standing(&self) -> Standing {
        *self.standing.borrow()
    }

    /// It does not become the owner again.
    fn end(&self, standing: Standing) {
        self.tenure.end();
        self.standing.send_if_modified(|now| {
            let is_owner = *now == Standing::Owner;
            if is_owner {
                *now = standing;
            }
            is_owner
        });
    }
}

impl Records {
    /// Whether this is the only owner for certain now: then its records are the newest ones. A change may be tried all the
    /// same. A caller that answers others from the records asks this after it has read them.
    pub fn holds(&self) -> bool {
        self.ownership.as_ref().is_some_and(|ownership| {
            ownership.standing() == Standing::Owner && ownership.tenure.holds(&ownership.env)
        })
    }

    /// Keeps the ledger: gives signs of life to the log, and trims it in the background. Must run for as long as the ledger
    /// is open. Returns when another owner has it, when it was given back, or when the log went backwards; on an engine
    /// that no other node reaches, never.
    pub async fn keep(&self) {
        let Some(ownership) = &self.ownership else { return std::future::pending().await };
        let Some(term) = ownership.tenure.term else { return std::future::pending().await };
        let mut standing = ownership.standing.subscribe();
        let ended = async {
            // The sender lives as long as the ledger.
            let _ = standing.wait_for(|standing| *standing != Standing::Owner).await;
        };
        tokio::select! {
            biased;
            () = ended => {}
            () = self.keep_lease(ownership, term) => {}
            () = self.keep_short(ownership) => {}
        }
    }

    /// Gives the ledger back: a standby may take it at once. Changes are refused from now on; one that is under way ends before
    /// this returns. If it fails, standbys wait until the lease has ended.
    pub async fn resign(&self) {
        let Some(ownership) = self.ownership.as_ref() else { return };
        ownership.end(Standing::Former);
        let _end = self.end.lock().await;
        if ownership.tenure.term.is_some() {
            give_back(&*self.log, self.sealed).await;
        }
    }

    /// As [`Records::commit`], as the last change: this owner changes nothing afterwards, whether this succeeds or not. Only an error of
    /// `decide` leaves it the owner. It does not give the ledger back: standbys wait until its lease has ended.
    pub async fn commit_last<E: From<RecordsError>>(
        &self,
        decide: impl FnOnce(&dyn State, Seq) -> Result<Changes, E>,
    ) -> Result<(), E> {
        let end = || self.ownership.iter().for_each(|ownership| ownership.end(Standing::Former));
        self.change(decide, end).await
    }

    /// Nodes that follow the ledger and were heard of lately.
    pub fn standbys(&self) -> Vec<StandbyStat> {
        self.ownership.as_ref().map(|ownership| ownership.replicas.standbys()).unwrap_or_default()
    }

    /// Refuses changes of a view, and of an earlier owner.
    pub(super) fn check_owner(&self) -> Result<(), RecordsError> {
        match &self.ownership {
            None => Err(RecordsError::IsView),
            Some(ownership) if ownership.standing() == Standing::Former => Err(RecordsError::NotOwner),
            Some(_) => Ok(()),
        }
    }

    /// Remembers if the log will take nothing of this owner any more.
    pub(super) fn note_failure(&self, error: &AppendError) {
        let standing = match error {
            AppendError::Fenced(_) => Standing::Former,
            AppendError::RolledBack { .. } => Standing::Bereft,
            _ => return,
        };
        if let Some(ownership) = &self.ownership {
            ownership.end(standing);
        }
    }

    /// Gives signs of life. Ends when another owner has the ledger.
    async fn keep_lease(&self, ownership: &Ownership, term: Duration) {
        loop {
            let asked_ns = ownership.env.clock.boot_ns();
            match tokio::time::timeout(term, self.log.renew(self.sealed)).await {
                Ok(Ok(())) => ownership.tenure.renewed(asked_ns),
                Ok(Err(LogError::Fenced(_))) => return ownership.end(Standing::Former),
                failed => {
                    tracing::debug!(?failed, "ledger log takes no sign of life");
                    tokio::time::sleep(RENEW_PAUSE).await;
                    continue;
                }
            }
            tokio::time::sleep(term / 3).await;
        }
    }

    /// Trims the log from time to time.
    async fn keep_short(&self, ownership: &Ownership) {
        let mut looks = 0;
        loop {
            tokio::time::sleep(TRIM_LOOK_EVERY).await;
            looks += 1;
            let stored = match self.state.applied() {
                Ok(applied) => applied.seq,
                Err(error) => {
                    tracing::warn!(%error, "the store of records cannot be read");
                    continue;
                }
            };
            let (first, up_to) = (self.log.first(), trim_to(&*self.log, &ownership.replicas, stored));
            let unneeded = (up_to.0 + 1).saturating_sub(first.0);
            let is_due = unneeded >= TRIM_ENTRIES || self.log.room() == Room::Reserve;
            if !is_due && looks < TRIM_LOOKS {
                continue;
            }
            looks = 0;
            let up_to = if is_due { up_to } else { Seq(first.0.saturating_sub(1)) };
            if let Err(error) = self.log.trim(up_to).await {
                tracing::warn!(%error, "ledger log could not be trimmed");
            }
        }
    }
}

impl ReplicaService for Records {
    fn ask(&self, request: ReplicaRequest) -> BoxFuture<'_, Result<ReplicaReply, FsError>> {
        Box::pin(async move {
            let ownership = self.ownership.as_ref().filter(|_| self.holds());
            ownership.ok_or(FsError::Disconnected)?.replicas.ask(request)
        })
    }
}
