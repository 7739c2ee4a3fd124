//! Logs that come from another engine.

use base::{Epoch, LedgerId, Seq};

use super::super::{Etcd, EtcdLog};
use super::Shared;
use crate::log::{LedgerLog, LogError, NOBODY};

const FIRST: LedgerId = LedgerId(0);
const OTHER: LedgerId = LedgerId(7);

/// A place of its own for a test.
fn place(shared: &Shared) -> Etcd {
    let etcd = shared.etcd();
    Etcd { prefix: format!("{}/move-{}", etcd.prefix, shared.next_ledger()), ..etcd.clone() }
}

async fn begin(etcd: &Etcd, number: u64, ledger: LedgerId, (epoch, end): (u64, u64)) -> bool {
    etcd.begin(number, ledger, (Epoch(epoch), Seq(end))).await.unwrap()
}

#[test]
fn a_log_that_comes_from_elsewhere_goes_on_behind_its_last_entry() {
    let shared = Shared::get();
    shared.runtime().block_on(async {
        let etcd = place(&shared);
        assert!(etcd.claim(9, FIRST).await.unwrap());
        for _ in 0..2 {
            // The answer to the first request may have been lost.
            assert!(begin(&etcd, 9, OTHER, (5, 40)).await);
        }
        let log = EtcdLog::open(&etcd, OTHER).await.unwrap();
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
    let shared = Shared::get();
    shared.runtime().block_on(async {
        let etcd = place(&shared);
        assert!(etcd.claim(9, FIRST).await.unwrap());
        assert!(begin(&etcd, 9, OTHER, (5, 40)).await && begin(&etcd, 9, FIRST, (3, 10)).await);
        assert!(!etcd.claim(8, FIRST).await.unwrap(), "another attempt");
        assert!(!begin(&etcd, 8, LedgerId(9), (1, 1)).await);
        // A later try knows more.
        assert!(!begin(&etcd, 9, OTHER, (7, 50)).await, "only after another claim");
        assert!(etcd.claim(9, FIRST).await.unwrap());
        assert!(begin(&etcd, 9, OTHER, (7, 50)).await && begin(&etcd, 9, FIRST, (5, 12)).await);
        let log = EtcdLog::open(&etcd, FIRST).await.unwrap();
        assert_eq!(log.fence().await.unwrap().tail, Seq(12));
        log.seal(Epoch(6), 1).await.unwrap();
        for number in [8, 9] {
            assert!(!etcd.claim(number, FIRST).await.unwrap(), "the place has an owner");
        }
        let other = EtcdLog::open(&etcd, OTHER).await.unwrap();
        assert_eq!(other.fence().await.unwrap().tail, Seq(50), "nothing was removed");
    });
}

#[test]
fn the_place_of_a_cluster_that_began_there_is_refused() {
    let shared = Shared::get();
    shared.runtime().block_on(async {
        let etcd = place(&shared);
        let log = EtcdLog::open(&etcd, FIRST).await.unwrap();
        log.seal(Epoch(1), 1).await.unwrap();
        assert!(!etcd.claim(9, FIRST).await.unwrap());
        assert_eq!(log.fence().await.unwrap().epoch, Epoch(1));
    });
}
