//! Owners and readers of logs in engines that several nodes reach, for the tests of these engines.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use base::{Epoch, Seq};
use tokio::time::{Instant, sleep, timeout};

use super::{AppendError, LedgerLog, LogEntry, LogError, Sealed, append_settled};

/// The first owner of a log.
pub(super) const FIRST: Sealed = Sealed { epoch: Epoch(1), nonce: 11 };

/// The batch that only this owner appends at this place.
pub(super) fn batch(owner: Sealed, seq: u64) -> Vec<u8> {
    format!("{} {seq} {} ", owner.nonce, owner.epoch).into_bytes().repeat(seq as usize % 50 + 1)
}

/// Appends as an owner does: the same batch, until it is settled.
pub(super) async fn append_until_settled(
    log: &dyn LedgerLog,
    owner: Sealed,
    seq: u64,
) -> Result<(), AppendError> {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        match append_settled(log, owner, Seq(seq), &batch(owner, seq)).await {
            Err(AppendError::Unknown(_) | AppendError::Full(_)) if Instant::now() < end => {
                sleep(Duration::from_millis(20)).await;
            }
            settled => return settled,
        }
    }
}

pub(super) async fn read_all(log: &dyn LedgerLog) -> Vec<LogEntry> {
    let mut all: Vec<LogEntry> = vec![];
    loop {
        let page = log.read(Seq(all.len() as u64 + 1), 10_000).await.unwrap();
        if page.is_empty() {
            return all;
        }
        all.extend(page);
    }
}

/// The log holds exactly the batches 1 to `tail` of this owner.
#[track_caller]
pub(super) fn check_entries(entries: &[LogEntry], owner: Sealed, tail: u64) {
    assert_eq!(entries.len() as u64, tail);
    for (entry, seq) in entries.iter().zip(1..) {
        let expected = LogEntry { seq: Seq(seq), epoch: owner.epoch, batch: batch(owner, seq) };
        assert_eq!(*entry, expected);
    }
}

/// Fails unless it ends in time.
pub(super) async fn within<T>(limit: Duration, what: &str, work: impl Future<Output = T>) -> T {
    timeout(limit, work).await.unwrap_or_else(|_| panic!("{what} takes more than {limit:?}"))
}

/// What an owner saw between its seal and the next one.
struct Reign {
    owner: Sealed,
    tail: u64,
    acknowledged: u64,
}

/// Seals and appends, again and again.
async fn reign(log: Arc<dyn LedgerLog>, nonce: u64, rounds: usize) -> Vec<Reign> {
    let mut reigns = vec![];
    while reigns.len() < rounds {
        let epoch = Epoch(log.fence().await.unwrap().epoch.0 + 1);
        let owner = Sealed { epoch, nonce };
        let Ok(tail) = log.seal(epoch, nonce).await else { continue };
        let mut acknowledged = tail.seq.0;
        let end = Instant::now() + Duration::from_millis(100);
        // The last one leaves, so that the other does not wait for a successor.
        while reigns.len() + 1 < rounds || Instant::now() < end {
            match append_until_settled(&*log, owner, acknowledged + 1).await {
                Ok(()) => acknowledged += 1,
                Err(AppendError::Fenced(by)) => {
                    assert!(by > epoch);
                    break;
                }
                Err(error) => panic!("{error:?}"),
            }
            if acknowledged > tail.seq.0 + 20 {
                break;
            }
        }
        reigns.push(Reign { owner, tail: tail.seq.0, acknowledged });
    }
    reigns
}

/// Owners take the log from each other. Nothing of one is in the log behind the seal of the next.
pub(super) async fn check_rivals(logs: &[Arc<dyn LedgerLog>]) {
    let tasks: Vec<_> =
        logs.iter().zip(1..).map(|(log, nonce)| tokio::spawn(reign(log.clone(), nonce, 25))).collect();
    let mut reigns = vec![];
    for task in tasks {
        reigns.extend(task.await.unwrap());
    }
    let entries = read_all(&*logs[0]).await;
    let epochs: std::collections::BTreeSet<_> = reigns.iter().map(|reign| reign.owner.epoch).collect();
    assert_eq!(epochs.len(), reigns.len(), "an epoch was sealed twice");
    for Reign { owner, tail, acknowledged } in reigns {
        for entry in &entries {
            assert_eq!(entry.seq.0 > tail, entry.epoch >= owner.epoch, "{owner:?} {tail} {}", entry.seq);
        }
        for seq in tail + 1..=acknowledged {
            let entry = &entries[seq as usize - 1];
            assert_eq!((entry.seq, entry.epoch), (Seq(seq), owner.epoch));
            assert_eq!(entry.batch, batch(owner, seq));
        }
    }
}

/// The first owner appends up to 600 behind `tail`, and trims, while another reads.
pub(super) async fn check_reader(log: &dyn LedgerLog, reader: Arc<dyn LedgerLog>, tail: u64) {
    let stop = Arc::new(AtomicBool::new(false));
    let stopper = stop.clone();
    let readers = tokio::spawn(async move {
        let (mut next, mut pages, mut trimmed) = (1, 0, 0);
        while !stopper.load(Ordering::Relaxed) {
            match reader.read(Seq(next), 20_000).await {
                Ok(page) => {
                    for entry in &page {
                        let expected =
                            LogEntry { seq: Seq(next), epoch: FIRST.epoch, batch: batch(FIRST, next) };
                        assert_eq!(*entry, expected);
                        next += 1;
                    }
                    pages += 1;
                    // Sometimes it falls back to what may be trimmed.
                    next = if pages % 3 == 0 { next.saturating_sub(60).max(reader.first().0) } else { next };
                }
                Err(LogError::Damaged(what)) => {
                    assert!(what.contains("trimmed") && reader.first().0 > next, "{what} {next}");
                    trimmed += 1;
                    next = reader.first().0;
                }
                Err(error) => panic!("{error:?}"),
            }
        }
        (pages, trimmed)
    });
    for seq in tail + 1..=600 {
        append_until_settled(log, FIRST, seq).await.unwrap();
        if seq % 5 == 0 {
            log.trim(Seq(seq.saturating_sub(25))).await.unwrap();
        }
    }
    stop.store(true, Ordering::Relaxed);
    let (pages, trimmed) = readers.await.unwrap();
    assert!(pages > 20 && trimmed > 0, "pages={pages} trimmed={trimmed}");
    assert_eq!(log.first(), Seq(576));
}
