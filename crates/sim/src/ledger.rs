//! The ledger's log in simulation: it has latency, and it must keep what it acknowledged.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use base::{Epoch, Seq};
use meta::log::{AppendError, Fence, LedgerLog, LogCaps, LogEntry, LogError, Room, Sealed, Tail};
use wire::BoxFuture;

use crate::net::delay;
use crate::world::{Dice, World};

/// The longest page.
const PAGE_BYTES: usize = 2000;

/// A log with latency whose promises are checked.
pub(crate) struct WatchedLog {
    world: Arc<World>,
    inner: Arc<dyn LedgerLog>,
    /// The host does not reach the log.
    cut: AtomicBool,
    dice: Dice,
    /// Whether requests or answers are lost.
    losses: Dice,
}

impl WatchedLog {
    /// The log as an owner or a standby sees it. `turn` numbers the owners of a boot.
    pub(crate) fn new(world: &Arc<World>, boot: u64, turn: u64, inner: Arc<dyn LedgerLog>) -> Self {
        let (dice, losses) = (
            world.dice(0x106 + (boot << 32) + (turn << 16)),
            world.dice(0x1057 + (boot << 32) + (turn << 16)),
        );
        Self { world: world.clone(), inner, cut: AtomicBool::new(false), dice, losses }
    }

    /// Cuts the host off from the log, or ends that.
    pub(crate) fn set_cut(&self, cut: bool) {
        self.cut.store(cut, Ordering::Relaxed);
    }

    /// Whether the log loses a request or an answer now.
    fn is_unreachable(&self) -> bool {
        self.cut.load(Ordering::Relaxed) || (self.world.scenario.log_loses && self.losses.once_in(8))
    }

    /// I1: batches follow each other, and come from the owner that sealed the log last.
    fn note_append(&self, epoch: Epoch, first: Seq, last: u64) {
        let mut promises = self.world.promises();
        let (acked, sealed) = (promises.acked_seq, promises.sealed_epoch);
        if first.0 != acked + 1 || epoch.0 != sealed {
            promises.violate(format!(
                "I1: batch {first} of epoch {epoch} follows batch {acked} of epoch {sealed}"
            ));
        }
        promises.acked_seq = last;
    }

    /// I1 and I2: no earlier epoch seals the log, and what it acknowledged is there.
    fn note_seal(&self, epoch: Epoch, tail: Seq) {
        let mut promises = self.world.promises();
        let (acked, sealed) = (promises.acked_seq, promises.sealed_epoch);
        if tail.0 < acked {
            promises.violate(format!("I2: the log ends at {tail} but acknowledged {acked}"));
        }
        if epoch.0 <= sealed {
            promises.violate(format!("I1: epoch {epoch} sealed the log after {sealed}"));
        }
        (promises.sealed_epoch, promises.acked_seq) = (epoch.0, tail.0);
    }

    fn unreachable() -> std::io::Error {
        std::io::ErrorKind::TimedOut.into()
    }
}

impl LedgerLog for WatchedLog {
    fn seal(&self, epoch: Epoch, nonce: u64) -> BoxFuture<'_, Result<Tail, LogError>> {
        Box::pin(async move {
            tokio::time::sleep(delay(&self.dice)).await;
            if self.cut.load(Ordering::Relaxed) {
                return Err(LogError::Io(Self::unreachable()));
            }
            let tail = self.inner.seal(epoch, nonce).await?;
            self.world.trace.event(format_args!("log seal epoch={epoch} tail={}", tail.seq));
            self.note_seal(epoch, tail.seq);
            if self.is_unreachable() {
                return Err(LogError::Io(Self::unreachable()));
            }
            Ok(tail)
        })
    }

    fn fence(&self) -> BoxFuture<'_, Result<Fence, LogError>> {
        Box::pin(async move {
            if self.is_unreachable() {
                return Err(LogError::Io(Self::unreachable()));
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
                return Err(AppendError::Unknown(Self::unreachable()));
            }
            if batches.iter().any(|entry| entry.len() > self.caps().entry_bytes_max) {
                return Err(AppendError::TooLarge);
            }
            let last = first.0 + batches.len() as u64 - 1;
            self.world.trace.event(format_args!("log append epoch={epoch} seq={first}..={last}"));
            self.inner.append(epoch, first, batches).await?;
            self.note_append(epoch, first, last);
            tokio::time::sleep(delay(&self.dice)).await;
            if self.is_unreachable() {
                return Err(AppendError::Unknown(Self::unreachable()));
            }
            Ok(())
        })
    }

    fn renew(&self, owner: Sealed) -> BoxFuture<'_, Result<(), LogError>> {
        Box::pin(async move {
            tokio::time::sleep(delay(&self.dice)).await;
            if self.is_unreachable() {
                return Err(LogError::Io(Self::unreachable()));
            }
            self.inner.renew(owner).await?;
            tokio::time::sleep(delay(&self.dice)).await;
            Ok(())
        })
    }

    /// Pages are short, so that readers can die between them.
    fn read(&self, from: Seq, limit_bytes: usize) -> BoxFuture<'_, Result<Vec<LogEntry>, LogError>> {
        Box::pin(async move {
            tokio::time::sleep(delay(&self.dice)).await;
            self.inner.read(from, limit_bytes.min(PAGE_BYTES)).await
        })
    }

    fn trim(&self, up_to: Seq) -> BoxFuture<'_, Result<(), LogError>> {
        self.inner.trim(up_to)
    }

    fn caps(&self) -> LogCaps {
        let caps = self.inner.caps();
        LogCaps { entry_bytes_max: caps.entry_bytes_max.min(self.world.scenario.log_entry_bytes), ..caps }
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
