//! A drive in another process.

use std::sync::Arc;
use std::time::Duration;

use base::DriveId;

use super::peer::CallError;
use super::{PING, Peer, SILENCE};
use crate::BoxFuture;
use crate::drive::{
    DeleteShards, DriveFailed, DriveHealth, DriveService, DriveStat, GetShard, GetShardError, PutShard,
    PutShardError, ScrubStep, ShardBlocks, ShardEntry, ShardKey,
};
use crate::message::{DriveReply, DriveRequest, Refusal};
use crate::position::{KnownLedger, Position};

/// How long a request waits for its answer.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often a process is asked that tells of a drive and then says that it does not have it.
const ATTEMPTS: u32 = 5;
/// How often it is looked whether that has changed.
const LOOK: Duration = Duration::from_millis(20);

/// A drive at a peer. Its health and figures are the last that the peer told; they come each second.
pub struct RemoteDrive {
    peer: Arc<Peer>,
    id: DriveId,
}

impl RemoteDrive {
    /// A drive at a peer, once the peer has told its state.
    pub async fn new(peer: &Arc<Peer>, id: DriveId) -> Arc<Self> {
        peer.first_fact(id).await;
        Arc::new(Self { peer: peer.clone(), id })
    }

    /// A drive at a peer, if the peer has told its state.
    pub fn if_told(peer: &Arc<Peer>, id: DriveId) -> Option<Arc<Self>> {
        peer.fact(id)?;
        Some(Arc::new(Self { peer: peer.clone(), id }))
    }

    /// A drive at a peer, of which the peer may have told nothing yet: until then it is not reached.
    pub fn expected(peer: &Arc<Peer>, id: DriveId) -> Arc<Self> {
        Arc::new(Self { peer: peer.clone(), id })
    }

    async fn ask(&self, request: DriveRequest) -> Result<DriveReply, DriveFailed> {
        let named = match &request {
            DriveRequest::Put(put) => Some(put.key),
            DriveRequest::Delete(delete) => delete.keys.first().copied(),
            _ => None,
        };
        let grant = named.and_then(|key| self.peer.proofs().of_extent(key.ledger, key.extent));
        let mut attempts = 0;
        let answer = loop {
            let asked = self.peer.ask_drive(self.id, &request, grant.clone(), PATIENCE);
            // A machine that is not reached does not answer soon. What was sent may be executed all the same.
            let answer = tokio::select! {
                biased;
                answer = asked => answer,
                () = self.gone() => Err(CallError::NoAnswer),
            };
            attempts += 1;
            let is_refused = matches!(answer, Err(CallError::Refused(Refusal::Elsewhere)));
            if !(is_refused && attempts < ATTEMPTS && self.is_told_again().await) {
                break answer;
            }
        };
        answer.map_err(|error| {
            tracing::debug!(drive = %self.id, %error, "no answer of a drive");
            self.failed()
        })
    }

    /// The process said that it does not have the drive. It may be about to end, and says so to requests that came before its
    /// connections end; or it has just begun, and is about to open the drive. Waits until one of that shows, so that nobody takes the
    /// drive for failed, or for a moment. Returns whether the process has told the state of the drive since.
    async fn is_told_again(&self) -> bool {
        let contact = self.peer.contact();
        let before = *contact.borrow();
        let told = || self.peer.fact(self.id).map(|(told_ns, _)| told_ns);
        let told_before = told();
        let shows = async {
            while *contact.borrow() == before && told() == told_before {
                tokio::time::sleep(LOOK).await;
            }
        };
        if before.is_there {
            let _ = tokio::time::timeout(2 * PING, shows).await;
        }
        told() != told_before
    }

    /// Waits until the drive is not reached any more.
    async fn gone(&self) {
        while self.known().0 <= SILENCE {
            tokio::time::sleep(PING).await;
        }
    }

    fn failed(&self) -> DriveFailed {
        DriveFailed { drive: self.id }
    }

    fn known(&self) -> (Duration, DriveStat) {
        let Some((told_ns, stat)) = self.peer.fact(self.id) else {
            return (Duration::MAX, DriveStat::unknown());
        };
        let age_ns = self.peer.env().clock.boot_ns().saturating_sub(told_ns);
        (Duration::from_nanos(age_ns), stat)
    }
}

macro_rules! answer {
    ($drive:expr, $request:expr, $kind:ident) => {
        match $drive.ask($request).await? {
            DriveReply::$kind(result) => result,
            _ => Err($drive.failed()),
        }
    };
}

impl DriveService for RemoteDrive {
    fn put(&self, request: PutShard) -> BoxFuture<'_, Result<(), PutShardError>> {
        Box::pin(async move {
            match self.ask(DriveRequest::Put(request)).await {
                Ok(DriveReply::Put(result)) => result,
                _ => Err(PutShardError::Failed { drive: self.id }),
            }
        })
    }

    fn get(&self, request: GetShard) -> BoxFuture<'_, Result<ShardBlocks, GetShardError>> {
        Box::pin(async move {
            match self.ask(DriveRequest::Get(request)).await {
                Ok(DriveReply::Get(result)) => result,
                _ => Err(GetShardError::Failed { drive: self.id }),
            }
        })
    }

    fn delete(&self, request: DeleteShards) -> BoxFuture<'_, Result<(), DriveFailed>> {
        Box::pin(async move { answer!(self, DriveRequest::Delete(request), Delete) })
    }

    fn keep_positions(
        &self,
        positions: Vec<Position>,
        replace: bool,
    ) -> BoxFuture<'_, Result<(), DriveFailed>> {
        Box::pin(
            async move { answer!(self, DriveRequest::KeepPositions { positions, replace }, KeepPositions) },
        )
    }

    fn known_ledgers(&self) -> BoxFuture<'_, Result<Vec<KnownLedger>, DriveFailed>> {
        Box::pin(async move { answer!(self, DriveRequest::KnownLedgers, KnownLedgers) })
    }

    fn list(
        &self,
        after: Option<ShardKey>,
        limit: usize,
    ) -> BoxFuture<'_, Result<Vec<ShardEntry>, DriveFailed>> {
        let limit = u32::try_from(limit).unwrap_or(u32::MAX);
        Box::pin(async move { answer!(self, DriveRequest::List { after, limit }, List) })
    }

    fn scrub(
        &self,
        after: Option<ShardKey>,
        budget_bytes: u64,
    ) -> BoxFuture<'_, Result<ScrubStep, DriveFailed>> {
        Box::pin(async move { answer!(self, DriveRequest::Scrub { after, budget_bytes }, Scrub) })
    }

    fn make_room(&self) -> BoxFuture<'_, Result<(), DriveFailed>> {
        Box::pin(async move { answer!(self, DriveRequest::MakeRoom, MakeRoom) })
    }

    fn health(&self) -> DriveHealth {
        let (age, stat) = self.known();
        if age > SILENCE { DriveHealth::Unreachable } else { stat.health }
    }

    fn stat(&self) -> DriveStat {
        let (age, stat) = self.known();
        DriveStat {
            health: self.health(),
            age_ms: u32::try_from(age.as_millis()).unwrap_or(u32::MAX),
            ..stat
        }
    }
}
