//! The engine with real members of etcd that are killed, stopped, filled and replaced.

mod servers;
mod vacancy;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::env::Env;
use base::{Epoch, LedgerId, Seq};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep, timeout};

use super::super::entry::ENTRY_BYTES_MAX;
use super::super::testing::{
    FIRST, append_until_settled, batch, check_entries, check_reader, check_rivals, read_all, within,
};
use super::super::{AppendError, LedgerLog, LogError, Sealed, append_settled};
use super::proto::{Call, CompactionResponse, Header};
use super::{Etcd, EtcdLog, EtcdOptions, EtcdTls};
use servers::Servers;
pub(in super::super) use servers::Shared;

const LEDGER: LedgerId = LedgerId(1);

/// Tests with a cluster of their own run one after the other: each would disturb the others' deadlines.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

async fn open(etcd: &Etcd) -> Arc<EtcdLog> {
    Arc::new(EtcdLog::open(etcd, LEDGER).await.unwrap())
}

/// A log that the first owner has sealed and appended to.
async fn log_of(etcd: &Etcd, tail: u64) -> Arc<EtcdLog> {
    let log = open(etcd).await;
    log.seal(FIRST.epoch, FIRST.nonce).await.unwrap();
    for seq in 1..=tail {
        append_until_settled(&*log, FIRST, seq).await.unwrap();
    }
    log
}

#[test]
fn appends_go_on_when_the_leader_is_killed() {
    let _alone = alone();
    let mut servers = Servers::start(3);
    let etcd = servers.connect();
    let log = servers.runtime.block_on(log_of(&etcd, 10));
    let (done, stop) = (Arc::new(AtomicU64::new(10)), Arc::new(AtomicBool::new(false)));
    let (counter, stopper, appender) = (done.clone(), stop.clone(), log.clone());
    let stream = servers.runtime.spawn(async move {
        while !stopper.load(Ordering::Relaxed) {
            let next = counter.load(Ordering::Relaxed) + 1;
            append_until_settled(&*appender, FIRST, next).await.unwrap();
            counter.store(next, Ordering::Relaxed);
        }
    });
    let grows = |servers: &Servers| {
        let (before, done) = (done.load(Ordering::Relaxed), done.clone());
        let grown = async move {
            while done.load(Ordering::Relaxed) < before + 50 {
                sleep(Duration::from_millis(5)).await;
            }
        };
        servers.runtime.block_on(async { timeout(Duration::from_secs(30), grown).await }).unwrap();
    };
    for _ in 0..4 {
        grows(&servers);
        let leader = servers.leader().unwrap();
        servers.members[leader].kill();
        grows(&servers);
        servers.members[leader].start();
        assert!(servers.wait(Duration::from_secs(30)));
    }
    stop.store(true, Ordering::Relaxed);
    servers.runtime.block_on(stream).unwrap();
    let tail = done.load(Ordering::Relaxed);
    let entries = servers.runtime.block_on(async { read_all(&*open(&etcd).await).await });
    check_entries(&entries, FIRST, tail);
}

#[test]
fn without_a_majority_every_call_ends_and_later_the_log_goes_on() {
    let _alone = alone();
    let servers = Servers::start(3);
    let etcd = servers.connect();
    let log = servers.runtime.block_on(log_of(&etcd, 5));
    servers.members[1..].iter().for_each(|member| member.signal("-STOP"));
    servers.runtime.block_on(async {
        let (append, call) = (Duration::from_millis(2500), Duration::from_millis(5500));
        let batches = vec![batch(FIRST, 6)];
        let appended = within(append, "append", log.append(FIRST.epoch, Seq(6), batches)).await;
        assert!(matches!(appended, Err(AppendError::Unknown(_))), "{appended:?}");
        let (fence, renewed, read, trimmed, sealed) = tokio::join!(
            within(call, "fence", log.fence()),
            within(Duration::from_secs(3), "renew", log.renew(FIRST)),
            within(call, "read", log.read(Seq(1), 1000)),
            within(call, "trim", log.trim(Seq(3))),
            within(call, "seal", log.seal(Epoch(2), 12)),
        );
        assert!(matches!(fence, Err(LogError::Io(_))), "{fence:?}");
        assert!(matches!(renewed, Err(LogError::Io(_))), "{renewed:?}");
        assert!(matches!(read, Err(LogError::Io(_))), "{read:?}");
        assert!(matches!(trimmed, Err(LogError::Io(_))), "{trimmed:?}");
        assert!(matches!(sealed, Err(LogError::Io(_))), "{sealed:?}");
    });
    servers.members[1..].iter().for_each(|member| member.signal("-CONT"));
    let entries = servers.runtime.block_on(async {
        for seq in 6..=20 {
            let appended = append_until_settled(&*log, FIRST, seq);
            within(Duration::from_secs(30), "append", appended).await.unwrap();
        }
        read_all(&*log).await
    });
    check_entries(&entries, FIRST, 20);
}

#[test]
fn a_member_that_hangs_delays_signs_of_life_for_a_moment() {
    let _alone = alone();
    let servers = Servers::start(3);
    for member in &servers.members {
        // Only this one is known at first, so that the client begins with it.
        let mut endpoints: Vec<_> = servers.members.iter().map(|member| member.endpoint.clone()).collect();
        endpoints.sort_by_key(|endpoint| *endpoint != member.endpoint);
        let log = servers.runtime.block_on(open(&servers.connect_to(endpoints)));
        let owner = servers.runtime.block_on(async {
            let epoch = Epoch(log.fence().await.unwrap().epoch.0 + 1);
            log.seal(epoch, 5).await.unwrap();
            Sealed { epoch, nonce: 5 }
        });
        member.signal("-STOP");
        let slowest = servers.runtime.block_on(async {
            let mut slowest = Duration::ZERO;
            for _ in 0..5 {
                let started = Instant::now();
                while log.renew(owner).await.is_err() {
                    assert!(started.elapsed() < Duration::from_secs(30));
                }
                slowest = slowest.max(started.elapsed());
            }
            slowest
        });
        member.signal("-CONT");
        assert!(servers.wait(Duration::from_secs(30)));
        // A request to it ends after 2 s, and another leader is found within 2 s; the rest is for a busy machine.
        assert!(slowest < Duration::from_secs(10), "{slowest:?}");
    }
}

#[test]
fn after_a_seal_nothing_of_an_earlier_owner_is_appended() {
    let _alone = alone();
    let servers = Servers::start(3);
    let logs = [servers.connect(), servers.connect(), servers.connect()];
    let logs = logs.map(|etcd| servers.runtime.block_on(open(&etcd)) as Arc<dyn LedgerLog>);
    servers.runtime.block_on(check_rivals(&logs));
}

#[test]
fn the_log_is_complete_when_all_members_were_killed() {
    let _alone = alone();
    let mut servers = Servers::start(3);
    let etcd = servers.connect();
    let log = servers.runtime.block_on(log_of(&etcd, 30));
    for round in 1..=3 {
        servers.members.iter_mut().for_each(|member| member.kill());
        let unreachable = servers.runtime.block_on(log.fence());
        assert!(matches!(unreachable, Err(LogError::Io(_))), "{unreachable:?}");
        servers.members.iter_mut().for_each(|member| member.start());
        let entries = servers.runtime.block_on(async {
            for seq in round * 30 + 1..=round * 30 + 30 {
                let appended = append_until_settled(&*log, FIRST, seq);
                within(Duration::from_secs(60), "append", appended).await.unwrap();
            }
            read_all(&*log).await
        });
        check_entries(&entries, FIRST, round * 30 + 30);
    }
}

#[test]
fn readers_see_whole_runs_while_the_log_grows_and_is_trimmed() {
    let _alone = alone();
    let servers = Servers::start(3);
    let (etcd, other) = (servers.connect(), servers.connect());
    servers.runtime.block_on(async {
        let log = log_of(&etcd, 40).await;
        check_reader(&*log, open(&other).await, 40).await;
        assert_eq!(open(&other).await.first(), Seq(576));
    });
}

#[test]
fn a_long_log_is_trimmed_in_steps_and_only_by_its_owner() {
    let shared = Shared::get();
    let ledger = shared.next_ledger();
    shared.runtime().block_on(async {
        let log = EtcdLog::open(shared.etcd(), ledger).await.unwrap();
        let next = EtcdLog::open(shared.etcd(), ledger).await.unwrap();
        log.seal(Epoch(1), 1).await.unwrap();
        for append in 0..8 {
            log.append(Epoch(1), Seq(append * 100 + 1), vec![vec![7; 10]; 100]).await.unwrap();
        }
        assert!(matches!(next.trim(Seq(5)).await, Err(LogError::Fenced(Epoch(1)))));
        next.seal(Epoch(2), 2).await.unwrap();
        assert!(matches!(log.trim(Seq(5)).await, Err(LogError::Fenced(Epoch(2)))));
        assert_eq!(next.read(Seq(1), 1).await.unwrap()[0].seq, Seq(1));
        next.trim(Seq(700)).await.unwrap();
        assert_eq!(next.first(), Seq(701));
        assert!(matches!(next.read(Seq(700), 1).await, Err(LogError::Damaged(_))));
        assert_eq!(next.read(Seq(701), 1 << 20).await.unwrap().len(), 100);
        assert_eq!(EtcdLog::open(shared.etcd(), ledger).await.unwrap().first(), Seq(701));
    });
}

#[test]
fn a_full_etcd_refuses_appends_and_takes_them_when_there_is_room() {
    let _alone = alone();
    let quota = || ["--quota-backend-bytes".to_owned(), (24 << 20).to_string()];
    let servers = Servers::start_with(1, |_| (quota().to_vec(), None));
    let etcd = servers.connect();
    servers.runtime.block_on(async {
        let log = open(&etcd).await;
        log.seal(Epoch(1), 1).await.unwrap();
        let large = vec![3; ENTRY_BYTES_MAX];
        let mut tail = 0;
        loop {
            match append_settled(&*log, FIRST_OF_FULL, Seq(tail + 1), &large).await {
                Ok(()) => tail += 1,
                // Executed, and refused all the same: the next attempt settles it.
                Err(AppendError::Unknown(_)) if log.fence().await.unwrap().tail.0 > tail => {}
                Err(AppendError::Full(_)) => break,
                Err(error) => panic!("{error:?}"),
            }
            assert!(tail < 100);
        }
        assert!(tail > 5);
        assert_eq!(log.fence().await.unwrap().tail, Seq(tail), "nothing was appended");
        assert_eq!(log.room(), super::Room::Reserve);
        // Deleting needs no room; the rest is the operator's.
        log.trim(Seq(tail)).await.unwrap();
        let revision = log.inner.snapshot(crate::log::remote::SHORT).await.unwrap().revision;
        let limit = crate::log::remote::LONG.attempt;
        log.inner.client.once(super::CompactionRequest { revision }, limit).await.unwrap();
        // Their answers name no cluster, so they are not believed.
        let _ = log.inner.client.once(Defragment {}, limit).await;
        let status = log.inner.client.once(super::proto::StatusRequest {}, limit).await.unwrap();
        let member_id = status.header.unwrap().member_id;
        let _ = log.inner.client.once(Disarm { action: 2, member_id, alarm: 1 }, limit).await;
        append_settled(&*log, FIRST_OF_FULL, Seq(tail + 1), &large).await.unwrap();
        assert_eq!(log.room(), super::Room::Enough);
        assert_eq!(log.read(Seq(tail + 1), 1).await.unwrap()[0].batch, large);
    });
}

const FIRST_OF_FULL: Sealed = Sealed { epoch: Epoch(1), nonce: 1 };

/// What an operator does when etcd was full.
#[derive(Clone, PartialEq, prost::Message)]
struct Defragment {}

impl Call for Defragment {
    type Answer = CompactionResponse;
    const PATH: &'static str = "/etcdserverpb.Maintenance/Defragment";

    fn header(answer: &CompactionResponse) -> Option<&Header> {
        answer.header.as_ref()
    }
}

/// Ends an alarm, with `action` 2 and `alarm` 1 that of a full etcd.
#[derive(Clone, PartialEq, prost::Message)]
struct Disarm {
    #[prost(int32, tag = "1")]
    action: i32,
    #[prost(uint64, tag = "2")]
    member_id: u64,
    #[prost(int32, tag = "3")]
    alarm: i32,
}

impl Call for Disarm {
    type Answer = CompactionResponse;
    const PATH: &'static str = "/etcdserverpb.Maintenance/Alarm";

    fn header(answer: &CompactionResponse) -> Option<&Header> {
        answer.header.as_ref()
    }
}

#[test]
fn the_largest_entry_fits_and_a_larger_request_is_refused() {
    let shared = Shared::get();
    shared.runtime().block_on(async {
        let log = EtcdLog::open(shared.etcd(), shared.next_ledger()).await.unwrap();
        log.seal(Epoch(1), 1).await.unwrap();
        let large = vec![9; ENTRY_BYTES_MAX];
        log.append(Epoch(1), Seq(1), vec![large.clone()]).await.unwrap();
        let refused = log.append(Epoch(1), Seq(2), vec![large.clone(), large.clone()]).await;
        assert!(matches!(refused, Err(AppendError::TooLarge)), "{refused:?}");
        let refused = log.append(Epoch(1), Seq(2), vec![vec![]; 101]).await;
        assert!(matches!(refused, Err(AppendError::TooLarge)), "{refused:?}");
        log.append(Epoch(1), Seq(2), vec![vec![5; (1280 << 10) / 100 - 300]; 100]).await.unwrap();
        assert_eq!(log.fence().await.unwrap().tail, Seq(101));
        assert_eq!(log.read(Seq(1), 0).await.unwrap()[0].batch, large);
    });
}

#[test]
fn a_smaller_limit_of_etcd_is_reported_as_too_large() {
    let _alone = alone();
    let limit = || vec!["--max-request-bytes".to_owned(), "100000".to_owned()];
    let servers = Servers::start_with(1, |_| (limit(), None));
    let etcd = servers.connect();
    servers.runtime.block_on(async {
        let log = open(&etcd).await;
        log.seal(Epoch(1), 1).await.unwrap();
        for bytes in [150_000, 1_000_000] {
            let refused = log.append(Epoch(1), Seq(1), vec![vec![1; bytes]]).await;
            assert!(matches!(refused, Err(AppendError::TooLarge)), "{refused:?}");
        }
        log.append(Epoch(1), Seq(1), vec![vec![1; 90_000]]).await.unwrap();
    });
}

#[test]
fn a_log_that_went_backwards_is_noticed_at_once() {
    let _alone = alone();
    let mut servers = Servers::start(3);
    let etcd = servers.connect();
    let log = servers.runtime.block_on(log_of(&etcd, 20));
    let restart = |servers: &mut Servers, copy: (&str, &str)| {
        servers.members.iter_mut().for_each(|member| {
            member.kill();
            member.copy_data(copy.0, copy.1);
        });
        servers.members.iter_mut().for_each(|member| member.start());
        assert!(servers.wait(Duration::from_secs(30)));
    };
    restart(&mut servers, ("data", "backup"));
    servers.runtime.block_on(async {
        for seq in 21..=30 {
            append_until_settled(&*log, FIRST, seq).await.unwrap();
        }
    });
    restart(&mut servers, ("backup", "data"));
    servers.runtime.block_on(async {
        let appended = append_until_settled(&*log, FIRST, 31).await;
        let (acknowledged, tail) = (Seq(30), Seq(20));
        assert!(
            matches!(appended, Err(AppendError::RolledBack { acknowledged: a, tail: t }) if (a, t) == (acknowledged, tail)),
            "{appended:?}"
        );
        assert_eq!(log.fence().await.unwrap().tail, tail);
        assert_eq!(read_all(&*log).await.len(), 20);
    });
}

#[test]
fn another_cluster_in_the_place_of_this_one_is_refused() {
    let _alone = alone();
    let mut servers = Servers::start(3);
    let etcd = servers.connect();
    let log = servers.runtime.block_on(log_of(&etcd, 3));
    servers.members.iter_mut().for_each(|member| {
        member.kill();
        member.forget();
    });
    servers.members.iter_mut().for_each(|member| member.start());
    assert!(servers.wait(Duration::from_secs(30)));
    servers.runtime.block_on(async {
        let fence = log.fence().await;
        assert!(
            matches!(&fence, Err(LogError::Damaged(what)) if what.contains("another etcd cluster")),
            "{fence:?}"
        );
        let appended = append_until_settled(&*log, FIRST, 4).await;
        assert!(matches!(appended, Err(AppendError::Lost(_))), "{appended:?}");
    });
}

#[test]
fn signs_of_life_are_counted_and_only_the_owner_gives_them() {
    let shared = Shared::get();
    shared.runtime().block_on(async {
        let ledger = shared.next_ledger();
        let log = EtcdLog::open(shared.etcd(), ledger).await.unwrap();
        let other = EtcdLog::open(shared.etcd(), ledger).await.unwrap();
        let owner = Sealed { epoch: Epoch(4), nonce: 9 };
        assert!(matches!(log.renew(owner).await, Err(LogError::Fenced(Epoch(0)))));
        log.seal(owner.epoch, owner.nonce).await.unwrap();
        for alive in 1..=5 {
            log.renew(owner).await.unwrap();
            log.append(owner.epoch, Seq(alive), vec![vec![1]]).await.unwrap();
            assert_eq!(other.fence().await.unwrap().alive, alive);
        }
        for wrong in [Sealed { nonce: 8, ..owner }, Sealed { epoch: Epoch(3), ..owner }] {
            assert!(matches!(other.renew(wrong).await, Err(LogError::Fenced(Epoch(4)))));
        }
        other.seal(Epoch(5), 1).await.unwrap();
        assert!(matches!(log.renew(owner).await, Err(LogError::Fenced(Epoch(5)))));
        assert_eq!(log.fence().await.unwrap().alive, 5);
    });
}

#[test]
fn of_two_seals_with_the_same_epoch_one_counts() {
    let shared = Shared::get();
    shared.runtime().block_on(async {
        let ledger = shared.next_ledger();
        for epoch in 1..=30 {
            let logs = [
                EtcdLog::open(shared.etcd(), ledger).await.unwrap(),
                EtcdLog::open(shared.etcd(), ledger).await.unwrap(),
            ];
            let (one, two) = tokio::join!(logs[0].seal(Epoch(epoch), 1), logs[1].seal(Epoch(epoch), 2));
            let winner = match (&one, &two) {
                (Ok(_), Err(LogError::Fenced(_))) => 0,
                (Err(LogError::Fenced(_)), Ok(_)) => 1,
                _ => panic!("{one:?} {two:?}"),
            };
            assert_eq!(logs[0].fence().await.unwrap().nonce, winner + 1);
            for (log, index) in logs.iter().zip(0..) {
                let appended = log.append(Epoch(epoch), Seq(epoch), vec![vec![1]]).await;
                let is_appended = index == winner;
                assert!(appended.is_ok() == is_appended, "{appended:?}");
            }
        }
    });
}

#[test]
fn a_gap_is_damage() {
    let shared = Shared::get();
    shared.runtime().block_on(async {
        let ledger = shared.next_ledger();
        let log = EtcdLog::open(shared.etcd(), ledger).await.unwrap();
        log.seal(Epoch(1), 1).await.unwrap();
        log.append(Epoch(1), Seq(1), vec![vec![1]; 50]).await.unwrap();
        let remove = async |seq: u64, end: u64| {
            let keys = &log.inner.keys;
            let success = vec![super::RequestOp::delete(keys.entry(Seq(seq)), keys.entry(Seq(end)))];
            let request = super::TxnRequest { success, ..super::TxnRequest::default() };
            log.inner.client.once(request, crate::log::remote::SHORT.attempt).await.unwrap();
        };
        remove(20, 21).await;
        // A whole part of a page is missing, or one entry; what is before may still be read.
        let damaged = log.read(Seq(20), 1 << 20).await;
        assert!(matches!(&damaged, Err(LogError::Damaged(what)) if what.contains("missing")), "{damaged:?}");
        let damaged = log.read(Seq(19), 1 << 20).await;
        assert!(matches!(damaged, Err(LogError::Damaged(_))), "{damaged:?}");
        assert_eq!(log.read(Seq(19), 0).await.unwrap().len(), 1);
        remove(50, 51).await;
        let damaged = log.read(Seq(50), 1 << 20).await;
        assert!(matches!(damaged, Err(LogError::Damaged(_))), "{damaged:?}");
        assert_eq!(log.first(), Seq(1));
    });
}

#[test]
fn history_is_forgotten_but_not_the_newest() {
    let shared = Shared::get();
    shared.runtime().block_on(async {
        let log = EtcdLog::open(shared.etcd(), shared.next_ledger()).await.unwrap();
        log.seal(Epoch(1), 1).await.unwrap();
        let (mut noted, mut marks) = (vec![], vec![]);
        for seq in 1..=3 {
            log.append(Epoch(1), Seq(seq), vec![vec![1]]).await.unwrap();
            noted.push(log.inner.snapshot(crate::log::remote::SHORT).await.unwrap().revision);
            log.inner.history.lock().unwrap().bytes += super::COMPACT_BYTES;
            log.trim(Seq(seq)).await.unwrap();
            marks.push(log.inner.history.lock().unwrap().revision);
        }
        let read_at = |seq, revision| log.inner.read_range(Seq(seq), 1, revision);
        assert!(matches!(read_at(1, noted[0]).await, Err(LogError::Io(_))), "forgotten");
        assert!(read_at(2, marks[1]).await.is_ok(), "too new");
        let before = log.inner.history.lock().unwrap().revision;
        log.append(Epoch(1), Seq(4), vec![vec![1]]).await.unwrap();
        log.trim(Seq(4)).await.unwrap();
        assert_eq!(log.inner.history.lock().unwrap().revision, before, "not that often");
    });
}

/// A connection to a member that can lose answers.
struct Proxy {
    endpoint: String,
    is_deaf: Arc<AtomicBool>,
}

impl Proxy {
    async fn start(member: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let (is_deaf, member) = (Arc::new(AtomicBool::new(false)), member["http://".len()..].to_owned());
        let deaf = is_deaf.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (server, deaf) = (TcpStream::connect(&member).await.unwrap(), deaf.clone());
                tokio::spawn(async move { Self::forward(client, server, &deaf).await });
            }
        });
        Self { endpoint, is_deaf }
    }

    /// Ends the connection when an answer comes and is to be lost.
    async fn forward(client: TcpStream, server: TcpStream, deaf: &AtomicBool) -> io::Result<()> {
        let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
            (client.into_split(), server.into_split());
        let requests = tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut to_server).await });
        let mut buffer = vec![0; 65536];
        loop {
            let count = tokio::io::AsyncReadExt::read(&mut from_server, &mut buffer).await?;
            if count == 0 || deaf.load(Ordering::Relaxed) {
                requests.abort();
                return Ok(());
            }
            tokio::io::AsyncWriteExt::write_all(&mut to_client, &buffer[..count]).await?;
        }
    }
}

#[test]
fn lost_answers_to_seals_and_appends_are_settled_by_the_fence() {
    let _alone = alone();
    let servers = Servers::start(1);
    let proxy = servers.runtime.block_on(Proxy::start(&servers.members[0].endpoint));
    let (near, far) = (servers.connect(), servers.connect_to(vec![proxy.endpoint.clone()]));
    servers.runtime.block_on(async {
        let (witness, log) = (open(&near).await, open(&far).await);
        let deaf = |is_deaf| proxy.is_deaf.store(is_deaf, Ordering::Relaxed);
        // The look before the seal gets its answer, the seal itself does not.
        let owner = Sealed { epoch: Epoch(1), nonce: 5 };
        let mut rounds = 0;
        let lost = loop {
            rounds += 1;
            let epoch = Epoch(witness.fence().await.unwrap().epoch.0 + 1);
            let (sealed, ()) = tokio::join!(log.seal(epoch, 5), async {
                sleep(Duration::from_micros(rounds * 200)).await;
                deaf(true);
            });
            let fence = witness.fence().await.unwrap();
            deaf(false);
            if sealed.is_err() && fence.epoch == epoch {
                break Sealed { epoch, ..owner };
            }
            assert!(rounds < 200, "no answer is lost");
        };
        let fence = loop {
            if let Ok(fence) = log.fence().await {
                break fence;
            }
        };
        assert_eq!((fence.epoch, fence.nonce), (lost.epoch, lost.nonce));
        append_until_settled(&*log, lost, 1).await.unwrap();
        deaf(true);
        let appended = log.append(lost.epoch, Seq(2), vec![batch(lost, 2)]).await;
        assert!(matches!(appended, Err(AppendError::Unknown(_))), "{appended:?}");
        assert_eq!(witness.fence().await.unwrap().tail, Seq(2), "only the answer was lost");
        deaf(false);
        for seq in 2..=4 {
            append_until_settled(&*log, lost, seq).await.unwrap();
        }
        log.renew(lost).await.unwrap();
        check_entries(&read_all(&*log).await, lost, 4);
        log.trim(Seq(1)).await.unwrap();
        assert_eq!(log.first(), Seq(2));
    });
}

#[test]
fn a_caller_needs_no_runtime_of_its_own() {
    let shared = Shared::get();
    let log = shared.runtime().block_on(EtcdLog::open(shared.etcd(), shared.next_ledger())).unwrap();
    shared.runtime().block_on(log.seal(Epoch(1), 1)).unwrap();
    let mut appended = log.append(Epoch(1), Seq(1), vec![vec![1]]);
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    // Begun by a thread without a runtime, and continued by one with a runtime that has neither time nor network.
    let _ = appended.as_mut().poll(&mut context);
    tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap()
        .block_on(async {
            let appended = futures_util::FutureExt::now_or_never(&mut appended);
            appended.unwrap_or(Ok(()))
        })
        .unwrap();
    drop(appended);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let append_next = || {
        let next = runtime.block_on(log.fence()).unwrap().tail.0 + 1;
        runtime.block_on(log.append(Epoch(1), Seq(next), vec![vec![1]])).is_ok()
    };
    // What was dropped may be executed between the two calls, once.
    assert!(append_next() || append_next());
}

/// An authority and certificates of a server and a client, for etcd in files of this directory.
fn tls_files(dir: &std::path::Path) -> (Vec<String>, Option<EtcdTls>) {
    let mut params = rcgen::CertificateParams::new(vec![]).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate().unwrap();
    let authority = params.self_signed(&key).unwrap();
    let issuer = rcgen::Issuer::new(params, key);
    let signed = |usage| {
        let mut params = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        params.extended_key_usages = vec![usage, rcgen::ExtendedKeyUsagePurpose::ClientAuth];
        let key = rcgen::KeyPair::generate().unwrap();
        (params.signed_by(&key, &issuer).unwrap().pem(), key.serialize_pem())
    };
    let server = signed(rcgen::ExtendedKeyUsagePurpose::ServerAuth);
    let client = signed(rcgen::ExtendedKeyUsagePurpose::ClientAuth);
    let file = |name: &str, pem: &str| {
        let path = dir.join(name);
        Env::real().files.open(&path, base::env::OpenMode::CreateNew, base::env::Caching::Buffered).unwrap();
        let file = Env::real().files.open(&path, base::env::OpenMode::Existing, base::env::Caching::Buffered);
        file.unwrap().write_at(pem.as_bytes(), 0).unwrap();
        path.display().to_string()
    };
    let args = [
        ("--cert-file", file("server.pem", &server.0)),
        ("--key-file", file("server.key", &server.1)),
        ("--trusted-ca-file", file("ca.pem", &authority.pem())),
    ];
    let mut args: Vec<_> = args.into_iter().flat_map(|(name, value)| [name.to_owned(), value]).collect();
    args.push("--client-cert-auth".to_owned());
    let identity_pem = Some((client.0.into_bytes(), client.1.into_bytes()));
    (args, Some(EtcdTls { ca_pem: authority.pem().into_bytes(), identity_pem }))
}

#[test]
fn members_are_reached_over_tls_with_certificates_on_both_sides() {
    let _alone = alone();
    let servers = Servers::start_with(1, tls_files);
    let etcd = servers.connect();
    let log = servers.runtime.block_on(log_of(&etcd, 3));
    check_entries(&servers.runtime.block_on(read_all(&*log)), FIRST, 3);
    let endpoints = vec![servers.members[0].endpoint.clone()];
    let connect = |tls: Option<EtcdTls>| {
        let options = EtcdOptions { endpoints: endpoints.clone(), tls, prefix: "forebay/test".to_owned() };
        servers.runtime.block_on(Etcd::connect(&options, &Env::real())).err()
    };
    let (_, strangers) = tls_files(tempfile::tempdir().unwrap().path());
    assert!(matches!(connect(strangers), Some(LogError::Io(_))), "another authority");
    let anonymous = EtcdTls { identity_pem: None, ..servers.tls.clone().unwrap() };
    assert!(matches!(connect(Some(anonymous)), Some(LogError::Io(_))), "no certificate");
    assert!(matches!(connect(None), Some(LogError::Io(_))), "https without an authority");
}

#[test]
fn wrong_settings_and_absent_members_are_reported() {
    let connect = |endpoints: &[String]| {
        let options =
            EtcdOptions { endpoints: endpoints.to_vec(), tls: None, prefix: "forebay/test".to_owned() };
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        runtime.unwrap().block_on(Etcd::connect(&options, &Env::real())).err()
    };
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for wrong in [
        vec![],
        vec!["127.0.0.1:2379".to_owned()],
        vec!["http://".to_owned()],
        vec![format!("http://{closed}")],
    ] {
        let error = connect(&wrong);
        assert!(matches!(error, Some(LogError::Io(_))), "{wrong:?} {error:?}");
    }
}
