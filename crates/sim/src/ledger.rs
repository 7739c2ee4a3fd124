//! The ledger's log in simulation: it has latency, and it must keep what it acknowledged.

use std::sync::Arc;

use base::{Epoch, Seq};
use meta::log::{AppendError, Fence, LedgerLog, LogCaps, LogEntry, LogError, MirroredLog, Room, Tail};
use wire::BoxFuture;

use crate::net::delay;
use crate::world::{Dice, World};

/// A log with latency whose promises are checked.
pub(crate) struct WatchedLog {
    world: Arc<World>,
    inner: MirroredLog,
    dice: Dice,
    /// Whether requests or answers are lost.
    losses: Dice,
}

impl WatchedLog {
    pub(crate) fn new(world: &Arc<World>, boot: u64, inner: MirroredLog) -> Self {
        let (dice, losses) = (world.dice(0x106 + (boot << 32)), world.dice(0x1057 + (boot << 32)));
        Self { world: world.clone(), inner, dice, losses }
    }

    /// Whether the log loses a request or an answer now.
    fn is_unreachable(&self) -> bool {
        self.world.scenario.log_loses && self.losses.once_in(8)
    }
}

impl LedgerLog for WatchedLog {
    fn seal(&self, epoch: Epoch, nonce: u64) -> BoxFuture<'_, Result<Tail, LogError>> {
        Box::pin(async move {
            let tail = self.inner.seal(epoch, nonce).await?;
            self.world.trace.event(format_args!("log seal epoch={epoch} tail={}", tail.seq));
            let mut promises = self.world.promises();
            if tail.seq.0 < promises.acked_seq {
                let acked = promises.acked_seq;
                promises.violate(format!("I2: the log ends at {} but acknowledged {acked}", tail.seq));
            }
            if epoch.0 <= promises.sealed_epoch {
                let sealed = promises.sealed_epoch;
                promises.violate(format!("I1: epoch {epoch} sealed the log after {sealed}"));
            }
            promises.sealed_epoch = epoch.0;
            promises.acked_seq = tail.seq.0;
            Ok(tail)
        })
    }

    fn fence(&self) -> BoxFuture<'_, Result<Fence, LogError>> {
        Box::pin(async move {
            if self.is_unreachable() {
                return Err(LogError::Io(std::io::ErrorKind::TimedOut.into()));
            }
            self.inner.fence().await
        })
    }

    fn append(
        &self,
        epoch: Epoch,
        first: Seq,
        batches: Vec<Vec<u8>>,
    ) -> BoxFuture<'_, Result<(), AppendError>> {
        Box::pin(async move {
            tokio::time::sleep(delay(&self.dice)).await;
            if self.is_unreachable() {
                return Err(AppendError::Unknown(std::io::ErrorKind::TimedOut.into()));
            }
            let last = first.0 + batches.len() as u64 - 1;
            self.world.trace.event(format_args!("log append epoch={epoch} seq={first}..={last}"));
            self.inner.append(epoch, first, batches).await?;
            tokio::time::sleep(delay(&self.dice)).await;
            let mut promises = self.world.promises();
            if first.0 != promises.acked_seq + 1 || epoch.0 != promises.sealed_epoch {
                let (acked, sealed) = (promises.acked_seq, promises.sealed_epoch);
                promises.violate(format!(
                    "I1: batch {first} of epoch {epoch} follows batch {acked} of epoch {sealed}"
                ));
            }
            promises.acked_seq = last;
            drop(promises);
            if self.is_unreachable() {
                return Err(AppendError::Unknown(std::io::ErrorKind::TimedOut.into()));
            }
            Ok(())
        })
    }

    fn read(&self, from: Seq, limit_bytes: usize) -> BoxFuture<'_, Result<Vec<LogEntry>, LogError>> {
        self.inner.read(from, limit_bytes)
    }

    fn trim(&self, up_to: Seq) -> BoxFuture<'_, Result<(), LogError>> {
        self.inner.trim(up_to)
    }

    fn caps(&self) -> LogCaps {
        self.inner.caps()
    }

    fn first(&self) -> Seq {
        self.inner.first()
    }

    fn room(&self) -> Room {
        self.inner.room()
    }

    fn refill(&self) {
        self.inner.refill();
    }
}
