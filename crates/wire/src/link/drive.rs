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
use crate::message::{DriveReply, DriveRequest};
use crate::position::{KnownLedger, Position};

/// How long a request waits for its answer.
const PATIENCE: Duration = Duration::from_secs(60);

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
        let asked = self.peer.ask_drive(self.id, &request, grant, PATIENCE);
        // A machine that is not reached does not answer soon. What was sent may be executed all the same.
        let answer = tokio::select! {
            biased;
            answer = asked => answer,
            () = self.gone() => Err(CallError::NoAnswer),
        };
        answer.map_err(|error| {
            tracing::debug!(drive = %self.id, %error, "no answer of a drive");
            self.failed()
        })
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
