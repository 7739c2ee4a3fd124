//! The outcome of an append that failed or was not answered: the fence of the log tells it.

use base::{Epoch, Seq};

use super::{AppendError, Fence, LedgerLog, LogError, Sealed};

/// The outcome of an append of one batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Settled {
    /// The batch is in the log.
    Appended,
    /// The batch is not in the log, and the owner may append it: the same bytes, because their effects may be known.
    Missing,
    /// Another owner has sealed the log.
    Fenced(Epoch),
    /// The log ends before the batch that precedes this one, or after this one.
    RolledBack,
}

/// Settles an append of batch `seq`. The owner has at most one append under way, so the log ends with this batch or with
/// the one before it.
fn settle(owner: Sealed, seq: Seq, fence: Fence) -> Settled {
    if (fence.epoch, fence.nonce) != (owner.epoch, owner.nonce) {
        Settled::Fenced(fence.epoch)
    } else if fence.tail == seq {
        Settled::Appended
    } else if fence.tail.0 + 1 == seq.0 {
        Settled::Missing
    } else {
        Settled::RolledBack
    }
}

/// Attempts to append one batch, once. The fence settles an unknown outcome, and also a refusal: an earlier attempt at the
/// same batch may have succeeded.
///
/// # Errors
/// After `Full` and `Unknown` the same batch may be appended again; all others are final.
pub(crate) async fn append_settled(
    log: &dyn LedgerLog,
    owner: Sealed,
    seq: Seq,
    bytes: &[u8],
) -> Result<(), AppendError> {
    let error = match log.append(owner.epoch, seq, vec![bytes.to_vec()]).await {
        Err(error @ (AppendError::Unknown(_) | AppendError::Fenced(_))) => error,
        other => return other,
    };
    let fence = match log.fence().await {
        Ok(fence) => fence,
        Err(LogError::Io(unreachable)) => return Err(AppendError::Unknown(unreachable)),
        Err(_) => return Err(AppendError::Lost(Box::new(error))),
    };
    match settle(owner, seq, fence) {
        Settled::Appended => Ok(()),
        Settled::Missing => Err(AppendError::Unknown(std::io::Error::other(error))),
        Settled::Fenced(epoch) => Err(AppendError::Fenced(epoch)),
        Settled::RolledBack => {
            Err(AppendError::RolledBack { acknowledged: Seq(seq.0 - 1), tail: fence.tail })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fence_tells_the_outcome_of_an_append() {
        let check = |epoch, nonce, tail, expected| {
            let fence = Fence { epoch: Epoch(epoch), nonce, tail: Seq(tail), alive: 0 };
            let owner = Sealed { epoch: Epoch(3), nonce: 7 };
            assert_eq!(settle(owner, Seq(20), fence), expected, "{fence:?}");
        };
        check(3, 7, 20, Settled::Appended);
        check(3, 7, 19, Settled::Missing);
        check(3, 7, 18, Settled::RolledBack);
        check(3, 7, 21, Settled::RolledBack);
        check(3, 8, 20, Settled::Fenced(Epoch(3)));
        check(4, 7, 19, Settled::Fenced(Epoch(4)));
        check(2, 7, 19, Settled::Fenced(Epoch(2)));
    }
}
