//! A ledger in etcd that is given back, or that two nodes take at once.

use std::sync::Arc;
use std::time::Duration;

use base::env::Env;
use base::{Epoch, LedgerId, Seq};
use tokio::time::timeout;

use super::{EtcdLog, Shared};
use crate::log::{AppendError, LedgerLog, LogError, NOBODY, Vacancy};
use crate::owner::{OwnerError, Standby, StandbyOptions};
use crate::records::{Records, RecordsError, RecordsOptions};
use crate::state::{MemState, State};

/// After an owner that gave no sign of life.
fn vacancy(epoch: u64) -> Vacancy {
    Vacancy { epoch: Epoch(epoch), alive: 0 }
}

async fn take(
    shared: &Shared,
    ledger: LedgerId,
    state: &Arc<dyn State>,
    after: Option<u64>,
) -> Result<Arc<Records>, OwnerError> {
    let log = Arc::new(EtcdLog::open(shared.etcd(), ledger).await.unwrap());
    let options =
        RecordsOptions { ledger, log, state: state.clone(), env: Env::real(), vacant: after.map(vacancy) };
    Ok(Arc::new(Records::open(options).await?))
}

async fn put(records: &Records, key: &[u8]) -> Result<(), RecordsError> {
    records.commit(|_, _| Ok(vec![(key.to_vec(), Some(vec![1]))])).await
}

fn is_fenced<T>(taken: &Result<T, OwnerError>) -> bool {
    matches!(taken, Err(OwnerError::Log { source: LogError::Fenced(_), .. }))
}

#[test]
fn a_ledger_that_was_given_back_is_anybodys_at_once() {
    let shared = Shared::get();
    shared.runtime().block_on(async {
        let ledger = shared.next_ledger();
        let state = || Arc::new(MemState::default()) as Arc<dyn State>;
        let one = take(&shared, ledger, &state(), Some(0)).await.unwrap();
        put(&one, b"a").await.unwrap();
        one.resign().await;
        assert!(matches!(put(&one, b"b").await, Err(RecordsError::NotOwner)));
        let log = Arc::new(EtcdLog::open(shared.etcd(), ledger).await.unwrap());
        let fence = log.fence().await.unwrap();
        assert_eq!((fence.epoch, fence.nonce, fence.tail), (Epoch(2), NOBODY, Seq(1)));
        // Nobody appends as nobody.
        assert!(matches!(log.append(Epoch(2), Seq(2), vec![vec![1]]).await, Err(AppendError::Fenced(_))));
        let copy = state();
        let options =
            StandbyOptions { ledger, log, state: copy.clone(), owner: one, replica: 2, wait: Duration::ZERO };
        let mut standby = Standby::new(options).unwrap();
        let followed = timeout(Duration::from_secs(2), standby.follow(&*Env::real().clock)).await;
        assert_eq!(followed.unwrap().unwrap(), vacancy(2));
        assert!(is_fenced(&take(&shared, ledger, &state(), Some(1)).await));
        let two = take(&shared, ledger, &copy, Some(2)).await.unwrap();
        put(&two, b"c").await.unwrap();
        assert!(two.holds() && two.snapshot().unwrap().get(b"a").unwrap().is_some());
    });
}

#[test]
fn of_nodes_that_take_a_vacant_ledger_at_once_one_gets_it() {
    let shared = Shared::get();
    shared.runtime().block_on(async {
        let ledger = shared.next_ledger();
        let states = [(); 2].map(|()| Arc::new(MemState::default()) as Arc<dyn State>);
        for epoch in 0..10 {
            let taking = |index: usize| take(&shared, ledger, &states[index], Some(epoch));
            let (one, two) = tokio::join!(taking(0), taking(1));
            let winner = match (&one, &two) {
                (Ok(winner), lost) | (lost, Ok(winner)) if is_fenced(lost) => winner,
                _ => panic!("{} {}", one.is_ok(), two.is_ok()),
            };
            put(winner, &[epoch as u8]).await.unwrap();
            assert_eq!(winner.seq().unwrap(), Seq(epoch + 1));
        }
    });
}

#[test]
fn signs_of_life_are_forgotten_also_if_nothing_is_trimmed() {
    let shared = Shared::get();
    shared.runtime().block_on(async {
        let log = EtcdLog::open(shared.etcd(), shared.next_ledger()).await.unwrap();
        log.seal(Epoch(1), 1).await.unwrap();
        let noted = || log.inner.history.lock().unwrap().revision;
        log.trim(Seq(0)).await.unwrap();
        let first = noted();
        assert!(first > 0);
        log.trim(Seq(0)).await.unwrap();
        assert_eq!(noted(), first, "not that often");
        log.inner.history.lock().unwrap().bytes += super::super::COMPACT_BYTES;
        log.trim(Seq(0)).await.unwrap();
        let at_first = log.inner.read_range(Seq(1), 1, first - 1).await;
        assert!(matches!(at_first, Err(LogError::Io(_))), "forgotten");
    });
}
