//! An owner in another process.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use base::{FsError, LedgerId, SessionId};
use bytes::Bytes;
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use super::Peer;
use super::peer::CallError;
use crate::BoxFuture;
use crate::claim::{Claim, Resumed};
use crate::message::{Envelope, OWNER, Payload, Refusal, SessionRequest};
use crate::meta::{EventSink, MetaReply, MetaRequest, MetaService};
use crate::position::Position;
use crate::rights::Grant;
use crate::trace;

/// How long a call without a deadline waits for its answer.
const PATIENCE: Duration = Duration::from_secs(120);

/// One opening of a ledger at a peer. When the other side opens the ledger anew, or has lost events, every call fails with
/// `Disconnected`: then sessions are claimed through a new `RemoteOwner`.
pub struct RemoteOwner {
    peer: Arc<Peer>,
    ledger: LedgerId,
    stream: u64,
    lost: Arc<watch::Sender<bool>>,
    position: Mutex<Option<Position>>,
}

impl RemoteOwner {
    /// The owner of a ledger at a peer, as it is now.
    pub fn new(peer: &Arc<Peer>, ledger: LedgerId) -> Arc<Self> {
        let stream = peer.env().random.next_u64();
        let lost = Arc::new(watch::Sender::new(false));
        Arc::new(Self { peer: peer.clone(), ledger, stream, lost, position: Mutex::default() })
    }

    /// Whether it is of no use any more.
    pub fn is_lost(&self) -> bool {
        *self.lost.borrow()
    }

    /// Another owner has the ledger: calls without an answer end.
    pub fn give_up(&self) {
        self.lost.send_replace(true);
    }

    /// Waits until it is of no use any more.
    pub async fn lost(&self) {
        // The sender lives as long as this.
        let _ = self.lost.subscribe().wait_for(|lost| *lost).await;
    }

    async fn unless_lost<T>(&self, work: impl Future<Output = Result<T, FsError>>) -> Result<T, FsError> {
        tokio::select! {
            biased;
            () = self.lost() => Err(FsError::Disconnected),
            result = work => result,
        }
    }

    async fn bind<R: DeserializeOwned + Payload>(
        &self,
        events: Arc<dyn EventSink>,
        request: SessionRequest,
    ) -> Result<(Bytes, R), FsError> {
        // A claim may take several messages; a new session has a new stream.
        let goes_on = matches!(request, SessionRequest::Resume { .. });
        self.peer.listen(self.stream, self.ledger, events, self.lost.clone(), goes_on);
        let bound = self.peer.bind::<Result<R, FsError>>(self.ledger, self.stream, &request, PATIENCE);
        let (head, reply) = self.unless_lost(async { bound.await.map_err(as_fs_error) }).await?;
        Ok((head.proof, reply?))
    }
}

pub(super) fn as_fs_error(error: CallError) -> FsError {
    match error {
        CallError::Refused(Refusal::Elsewhere | Refusal::Late) | CallError::NoAnswer => FsError::Disconnected,
        CallError::Refused(Refusal::Unsupported) => FsError::Unsupported,
        CallError::Refused(Refusal::Forbidden) => FsError::NotPermitted,
        CallError::Refused(Refusal::Malformed | Refusal::TooLong) | CallError::Malformed => FsError::Io,
    }
}

impl Drop for RemoteOwner {
    fn drop(&mut self) {
        self.peer.forget(self.stream);
    }
}

impl MetaService for RemoteOwner {
    fn connect(&self, events: Arc<dyn EventSink>) -> BoxFuture<'_, Result<SessionId, FsError>> {
        Box::pin(async move {
            let request = SessionRequest::Connect { stream: self.stream };
            let (proof, session) = self.bind(events, request).await?;
            self.peer.proofs().keep_session(self.ledger, session, proof);
            Ok(session)
        })
    }

    fn resume(
        &self,
        session: SessionId,
        claim: Claim,
        events: Arc<dyn EventSink>,
    ) -> BoxFuture<'_, Result<Resumed, FsError>> {
        let proof = self.peer.proofs().of_session(self.ledger, session);
        Box::pin(async move {
            let request = SessionRequest::Resume { stream: self.stream, session, claim, proof };
            Ok(self.bind(events, request).await?.1)
        })
    }

    fn position(&self) -> Option<Position> {
        *self.position.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call(
        &self,
        mut envelope: Envelope,
        request: MetaRequest,
    ) -> BoxFuture<'_, Result<MetaReply, FsError>> {
        Box::pin(async move {
            if envelope.deadline_ms == 0 {
                envelope.deadline_ms = PATIENCE.as_millis() as u32;
            }
            envelope.trace = trace::current();
            let asked = self.peer.ask_owner(&OWNER, self.ledger, &envelope, &request);
            let (head, reply) = self.unless_lost(async { asked.await.map_err(as_fs_error) }).await?;
            let mut newest = self.position.lock().unwrap_or_else(PoisonError::into_inner);
            // Answers overtake each other.
            if head.position.map(|position| position.seq) > newest.map(|newest| newest.seq) {
                *newest = head.position;
            }
            if let Ok(MetaReply::Range { first, count }) = &reply {
                let grant = Grant { first: *first, count: *count, proof: head.proof };
                self.peer.proofs().keep_extents(self.ledger, grant);
            }
            reply
        })
    }
}
