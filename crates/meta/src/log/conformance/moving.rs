//! Logs that come from another engine.

use std::sync::Arc;

use base::{Epoch, LedgerId, Seq};

use super::super::{LogEngine, LogError, NOBODY, etcd, postgres};

const FIRST: LedgerId = LedgerId(0);
const OTHER: LedgerId = LedgerId(7);

async fn begin(engine: &dyn LogEngine, number: u64, ledger: LedgerId, (epoch, end): (u64, u64)) -> bool {
    engine.begin(number, ledger, (Epoch(epoch), Seq(end))).await.unwrap()
}

/// With a place of its own in each engine.
fn for_every_engine<W: Future<Output = ()>>(case: impl Fn(Arc<dyn LogEngine>) -> W) {
    let cluster = etcd::tests::Shared::get();
    cluster.runtime().block_on(case(Arc::new(cluster.place())));
    let servers = postgres::tests::Shared::get();
    servers.runtime().block_on(case(Arc::new(servers.place())));
}

#[test]
fn a_log_that_comes_from_elsewhere_goes_on_behind_its_last_entry() {
    for_every_engine(|engine| async move {
        assert!(engine.claim(9, (FIRST, Epoch(5))).await.unwrap());
        for _ in 0..2 {
            // The answer to the first request may have been lost.
            assert!(begin(&*engine, 9, OTHER, (5, 40)).await);
        }
        let log = engine.open(OTHER).await.unwrap();
        let fence = log.fence().await.unwrap();
        assert_eq!((fence.epoch, fence.nonce, fence.tail, fence.alive), (Epoch(5), NOBODY, Seq(40), 0));
        assert_eq!((log.first(), log.read(Seq(41), 1000).await.unwrap().len()), (Seq(41), 0));
        assert!(matches!(log.read(Seq(40), 1000).await, Err(LogError::Damaged(_))), "trimmed");
        assert!(matches!(log.seal(Epoch(5), 1).await, Err(LogError::Fenced(Epoch(5)))));
        assert_eq!(log.seal(Epoch(6), 1).await.unwrap().seq, Seq(40));
        log.append(Epoch(6), Seq(41), vec![b"x".to_vec()]).await.unwrap();
        assert_eq!(log.read(Seq(41), 1000).await.unwrap()[0].batch, b"x");
    });
}

#[test]
fn a_place_is_replaced_by_its_own_attempt_only_and_until_it_has_had_an_owner() {
    for_every_engine(|engine| async move {
        assert!(engine.claim(9, (FIRST, Epoch(5))).await.unwrap());
        assert!(begin(&*engine, 9, OTHER, (5, 40)).await && begin(&*engine, 9, FIRST, (3, 10)).await);
        assert!(!engine.claim(8, (FIRST, Epoch(5))).await.unwrap(), "another attempt");
        assert!(!begin(&*engine, 8, LedgerId(9), (1, 1)).await);
        // A later try knows more.
        assert!(!begin(&*engine, 9, OTHER, (7, 50)).await, "only after another claim");
        assert!(engine.claim(9, (FIRST, Epoch(5))).await.unwrap());
        assert!(begin(&*engine, 9, OTHER, (7, 50)).await && begin(&*engine, 9, FIRST, (5, 12)).await);
        let log = engine.open(FIRST).await.unwrap();
        assert_eq!(log.fence().await.unwrap().tail, Seq(12));
        log.seal(Epoch(6), 1).await.unwrap();
        for number in [8, 9] {
            assert!(!engine.claim(number, (FIRST, Epoch(5))).await.unwrap(), "the place has an owner");
        }
        let other = engine.open(OTHER).await.unwrap();
        assert_eq!(other.fence().await.unwrap().tail, Seq(50), "nothing was removed");
    });
}

#[test]
fn what_a_later_owner_has_begun_is_not_replaced_by_an_earlier_one_that_wakes_up() {
    for_every_engine(|engine| async move {
        assert!(engine.claim(9, (FIRST, Epoch(5))).await.unwrap());
        // The one with epoch 5 is suspended here, and another owner does all of it.
        assert!(engine.claim(9, (FIRST, Epoch(6))).await.unwrap());
        assert!(begin(&*engine, 9, OTHER, (4, 50)).await && begin(&*engine, 9, FIRST, (6, 12)).await);
        assert!(!begin(&*engine, 9, OTHER, (3, 40)).await && !begin(&*engine, 9, FIRST, (5, 10)).await);
        assert!(!engine.claim(9, (FIRST, Epoch(5))).await.unwrap());
        for (ledger, epoch, tail) in [(OTHER, 4, 50), (FIRST, 6, 12)] {
            let fence = engine.open(ledger).await.unwrap().fence().await.unwrap();
            assert_eq!((fence.epoch, fence.tail), (Epoch(epoch), Seq(tail)));
        }
        // The later owner itself may try again.
        assert!(engine.claim(9, (FIRST, Epoch(6))).await.unwrap());
        assert!(begin(&*engine, 9, FIRST, (6, 13)).await);
    });
}

#[test]
fn the_place_of_a_cluster_that_began_there_is_refused() {
    for_every_engine(|engine| async move {
        let log = engine.open(FIRST).await.unwrap();
        log.seal(Epoch(1), 1).await.unwrap();
        assert!(!engine.claim(9, (FIRST, Epoch(5))).await.unwrap());
        assert_eq!(log.fence().await.unwrap().epoch, Epoch(1));
    });
}
