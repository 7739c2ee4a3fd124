//! The engine with real servers of PostgreSQL that are killed, left without a standby, and replaced by it.

mod servers;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use base::{Epoch, LedgerId, Seq};
use tokio::time::Instant;

use super::{ENTRY_BYTES_MAX, Postgres, PostgresLog, PostgresOptions};
use crate::log::testing::{
    FIRST, append_until_settled, batch, check_entries, check_reader, check_rivals, read_all, within,
};
use crate::log::{AppendError, LedgerLog, LogEngine, LogError, Room, Sealed};
pub(in super::super) use servers::Shared;
use servers::{Servers, alone, wait_until};

const LEDGER: LedgerId = LedgerId(1);

async fn open(engine: &Postgres) -> Arc<PostgresLog> {
    Arc::new(PostgresLog::open(engine, LEDGER).await.unwrap())
}

/// A log that the first owner has sealed and appended to.
async fn log_of(engine: &Postgres, tail: u64) -> Arc<PostgresLog> {
    let log = open(engine).await;
    log.seal(FIRST.epoch, FIRST.nonce).await.unwrap();
    for seq in 1..=tail {
        append_until_settled(&*log, FIRST, seq).await.unwrap();
    }
    log
}

/// An owner that appends all the time.
struct Stream {
    done: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<()>,
}

impl Stream {
    fn start(servers: &Servers, log: Arc<PostgresLog>, tail: u64) -> Self {
        let (done, stop) = (Arc::new(AtomicU64::new(tail)), Arc::new(AtomicBool::new(false)));
        let (counter, stopper) = (done.clone(), stop.clone());
        let task = servers.runtime.spawn(async move {
            while !stopper.load(Ordering::Relaxed) {
                let next = counter.load(Ordering::Relaxed) + 1;
                append_until_settled(&*log, FIRST, next).await.unwrap();
                counter.store(next, Ordering::Relaxed);
            }
        });
        Self { done, stop, task }
    }

    fn wait_for(&self, more: u64) {
        let before = self.done.load(Ordering::Relaxed);
        wait_until("the log grows", || self.done.load(Ordering::Relaxed) >= before + more);
    }

    /// Ends it. Returns the last entry that was acknowledged.
    fn end(self, servers: &Servers) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        servers.runtime.block_on(self.task).unwrap();
        self.done.load(Ordering::Relaxed)
    }
}

#[test]
fn appends_go_on_when_the_primary_was_killed_and_then_the_standby_takes_its_place() {
    let _alone = alone();
    let mut servers = Servers::pair();
    // After the failover there is only one server.
    let engine = servers.try_connect(&PostgresOptions { is_single: true, ..servers.options() }).unwrap();
    let log = servers.runtime.block_on(log_of(&engine, 10));
    let stream = Stream::start(&servers, log, 10);
    for _ in 0..2 {
        stream.wait_for(30);
        servers.primary.kill();
        servers.primary.start();
        servers.wait_for_standby();
    }
    stream.wait_for(30);
    servers.primary.kill();
    servers.standby().promote();
    stream.wait_for(30);
    // The one that was replaced does not know that, and is not believed.
    servers.primary.set("synchronous_standby_names = ''");
    servers.primary.start();
    stream.wait_for(30);
    let before = servers.primary.sql("SELECT sum(tail) FROM forebay_logs");
    stream.wait_for(30);
    assert_eq!(servers.primary.sql("SELECT sum(tail) FROM forebay_logs"), before);
    let engine = servers.try_connect(&PostgresOptions { is_single: true, ..servers.options() }).unwrap();
    stream.wait_for(1);
    let tail = stream.end(&servers);
    let entries = servers.runtime.block_on(async { read_all(&*open(&engine).await).await });
    check_entries(&entries, FIRST, tail);
}

#[test]
fn without_the_standby_every_call_ends_and_nothing_is_told_and_later_the_log_goes_on() {
    let _alone = alone();
    let mut servers = Servers::pair();
    let (engine, other) = (servers.connect(), servers.connect());
    let log = servers.runtime.block_on(log_of(&engine, 5));
    let reader = servers.runtime.block_on(open(&other));
    servers.standby().kill();
    servers.runtime.block_on(async {
        let (append, call) = (Duration::from_millis(2500), Duration::from_millis(6000));
        let batches = vec![batch(FIRST, 6)];
        let appended = within(append, "append", log.append(FIRST.epoch, Seq(6), batches)).await;
        assert!(matches!(appended, Err(AppendError::Unknown(_))), "{appended:?}");
        let (fence, renewed, trimmed, sealed) = tokio::join!(
            within(call, "fence", log.fence()),
            within(Duration::from_secs(3), "renew", log.renew(FIRST)),
            within(call, "trim", log.trim(Seq(3))),
            within(call, "seal", log.seal(Epoch(2), 12)),
        );
        assert!(matches!(fence, Err(LogError::Io(_))), "{fence:?}");
        assert!(matches!(renewed, Err(LogError::Io(_))), "{renewed:?}");
        assert!(matches!(trimmed, Err(LogError::Io(_))), "{trimmed:?}");
        assert!(matches!(sealed, Err(LogError::Io(_))), "{sealed:?}");
        assert_eq!(reader.read(Seq(1), 10_000).await.unwrap().len(), 5, "the standby had these");
    });
    // After a crash of the primary, all can see what its standby never got.
    servers.primary.kill();
    servers.primary.start();
    assert_eq!(servers.primary.sql("SELECT max(seq) FROM forebay_entries"), "6");
    servers.runtime.block_on(async {
        let read = within(Duration::from_secs(12), "read", reader.read(Seq(6), 10_000)).await;
        assert!(!matches!(&read, Ok(page) if !page.is_empty()), "{read:?}");
        let fence = within(Duration::from_secs(6), "fence", log.fence()).await;
        assert!(matches!(fence, Err(LogError::Io(_))), "{fence:?}");
    });
    servers.standby().start();
    servers.wait_for_standby();
    let entries = servers.runtime.block_on(async {
        for seq in 6..=20 {
            within(Duration::from_secs(30), "append", append_until_settled(&*log, FIRST, seq)).await.unwrap();
        }
        read_all(&*reader).await
    });
    check_entries(&entries, FIRST, 20);
}

#[test]
fn a_commit_without_the_standby_is_unknown() {
    let _alone = alone();
    let mut servers = Servers::pair();
    let engine = servers.connect();
    let log = servers.runtime.block_on(log_of(&engine, 3));
    servers.standby().kill();
    let started = Instant::now();
    let appender = log.clone();
    let append = servers
        .runtime
        .spawn(async move { appender.append(FIRST.epoch, Seq(4), vec![batch(FIRST, 4)]).await });
    // The operator loses patience.
    let cancel = "SELECT count(pg_cancel_backend(pid)) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
    wait_until("an append waits for the standby", || servers.primary.sql(cancel) != "0");
    let appended = servers.runtime.block_on(append).unwrap();
    let Err(AppendError::Unknown(error)) = appended else { panic!("{appended:?}") };
    assert!(error.to_string().contains("without its standby"), "{error} {:?}", started.elapsed());
    assert_eq!(servers.primary.sql("SELECT max(seq) FROM forebay_entries"), "4", "only here");
    servers.standby().start();
    servers.wait_for_standby();
    let entries = servers.runtime.block_on(async {
        for seq in 4..=6 {
            append_until_settled(&*log, FIRST, seq).await.unwrap();
        }
        read_all(&*log).await
    });
    check_entries(&entries, FIRST, 6);
}

/// What a refusal says.
#[track_caller]
fn check_refused(connected: Result<Postgres, LogError>, why: &str) {
    let Err(LogError::Io(error)) = connected else { panic!("{why}: {:?}", connected.err()) };
    let mut text = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    assert!(text.contains(why), "{text}");
}

#[test]
fn servers_that_may_lose_logs_and_wrong_settings_are_refused() {
    let shared = Shared::get();
    let servers = shared.servers();
    let options = servers.options();
    let connect = |options: PostgresOptions| servers.try_connect(&options);
    let standby = servers.standby.as_ref().unwrap().host();
    check_refused(connect(PostgresOptions { hosts: vec![standby], ..options.clone() }), "no primary");
    check_refused(
        connect(PostgresOptions { password: Some("x".to_owned()), ..options.clone() }),
        "password authentication failed",
    );
    check_refused(connect(PostgresOptions { database: "x".to_owned(), ..options.clone() }), "does not exist");
    check_refused(connect(PostgresOptions { hosts: vec![], ..options.clone() }), "no server");
    check_refused(connect(PostgresOptions { hosts: vec!["x".to_owned()], ..options.clone() }), "host:port");
    let ca_pem = Some(b"x".to_vec());
    check_refused(connect(PostgresOptions { ca_pem, ..options.clone() }), "none in PEM");
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    check_refused(connect(PostgresOptions { hosts: vec![closed.to_string()], ..options }), "no answer");
}

#[test]
fn a_server_that_confirms_before_it_is_safe_is_refused() {
    let _alone = alone();
    let mut servers = Servers::single();
    let single = servers.options();
    let connect = |servers: &Servers, options: &PostgresOptions| servers.try_connect(options);
    check_refused(connect(&servers, &PostgresOptions { is_single: false, ..single.clone() }), "single=yes");
    connect(&servers, &single).unwrap();
    servers.primary.set("full_page_writes = off");
    wait_until("the setting counts", || servers.primary.sql("SHOW full_page_writes") == "off");
    check_refused(connect(&servers, &single), "full_page_writes is off");
    servers.primary.set("full_page_writes = on\nfsync = off");
    wait_until("the setting counts", || servers.primary.sql("SHOW fsync") == "off");
    check_refused(connect(&servers, &single), "fsync is off");
    servers.primary.set("fsync = on\nsynchronous_commit = off");
    wait_until("the setting counts", || servers.primary.sql("SHOW synchronous_commit") == "off");
    let engine = connect(&servers, &single).unwrap();
    let rows = engine.client.once("SHOW synchronous_commit", &[], Duration::from_secs(5));
    let rows = servers.runtime.block_on(rows).unwrap();
    assert_eq!(rows[0].get::<_, String>(0), "on", "of this session");
    servers.primary.kill();
}

#[test]
fn another_system_at_the_same_address_is_noticed() {
    let _alone = alone();
    let mut servers = Servers::single();
    let engine = servers.connect();
    let log = servers.runtime.block_on(log_of(&engine, 3));
    // A server that is made anew is another system. A copy of the files would be the same one.
    servers.primary.kill();
    servers.primary.make_anew();
    servers.primary.start();
    let fence = servers.runtime.block_on(log.fence());
    assert!(
        matches!(&fence, Err(LogError::Damaged(what)) if what.contains("another PostgreSQL")),
        "{fence:?}"
    );
}

#[test]
fn a_log_that_went_backwards_or_is_gone_is_noticed() {
    let shared = Shared::get();
    let ledger = shared.next_ledger();
    let operator = &shared.servers().primary;
    shared.runtime().block_on(async {
        let log = PostgresLog::open(shared.engine(), ledger).await.unwrap();
        log.seal(FIRST.epoch, FIRST.nonce).await.unwrap();
        for seq in 1..=5 {
            append_until_settled(&log, FIRST, seq).await.unwrap();
        }
        let of_log =
            format!("(SELECT id FROM forebay_logs WHERE ledger = {ledger} AND prefix = 'forebay/test')");
        operator.sql(&format!("DELETE FROM forebay_entries WHERE log = {of_log} AND seq = 4"));
        assert_eq!(log.read(Seq(1), 1).await.unwrap().len(), 1);
        let read = log.read(Seq(3), 10_000).await;
        assert!(
            matches!(&read, Err(LogError::Damaged(what)) if what.contains("entry 4 is missing")),
            "{read:?}"
        );
        let read = log.read(Seq(4), 10_000).await;
        assert!(
            matches!(&read, Err(LogError::Damaged(what)) if what.contains("entry 4 is missing")),
            "{read:?}"
        );
        operator.sql(&format!("UPDATE forebay_logs SET tail = 3 WHERE id = {of_log}"));
        let appended = append_until_settled(&log, FIRST, 6).await;
        assert!(matches!(appended, Err(AppendError::RolledBack { tail: Seq(3), .. })), "{appended:?}");
        operator.sql(&format!("UPDATE forebay_logs SET format = 2 WHERE id = {of_log}"));
        assert!(matches!(log.fence().await, Err(LogError::NewerFormat(_))));
        assert!(matches!(log.read(Seq(1), 1).await, Err(LogError::NewerFormat(_))));
        operator.sql(&format!("DELETE FROM forebay_logs WHERE id = {of_log}"));
        assert!(matches!(log.fence().await, Err(LogError::Damaged(_))));
        assert!(matches!(log.read(Seq(1), 1).await, Err(LogError::Damaged(_))));
    });
}

#[test]
fn a_full_disk_refuses_appends_until_there_is_room() {
    let _alone = alone();
    let servers = Servers::single();
    let engine = servers.connect();
    servers.runtime.block_on(async {
        let log = log_of(&engine, 2).await;
        let full = "CREATE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS \
                    $$ BEGIN RAISE EXCEPTION 'full' USING ERRCODE = 'disk_full'; END $$";
        servers.primary.sql(full);
        let trigger = "CREATE TRIGGER no_room BEFORE INSERT ON forebay_entries EXECUTE FUNCTION no_room()";
        servers.primary.sql(trigger);
        let appended = log.append(FIRST.epoch, Seq(3), vec![batch(FIRST, 3)]).await;
        assert!(matches!(appended, Err(AppendError::Full(_))), "{appended:?}");
        assert_eq!(log.room(), Room::Reserve);
        assert_eq!(log.fence().await.unwrap().tail, Seq(2), "nothing was appended");
        // Where it is not known that nothing was.
        servers.primary.sql(&trigger.replace("forebay_entries", "forebay_logs").replace("INSERT", "UPDATE"));
        let appended = log.append(FIRST.epoch, Seq(3), vec![batch(FIRST, 3)]).await;
        assert!(matches!(appended, Err(AppendError::Unknown(_))), "{appended:?}");
        servers.primary.sql("DROP FUNCTION no_room CASCADE");
        append_until_settled(&*log, FIRST, 3).await.unwrap();
        assert_eq!(log.room(), Room::Enough);
        check_entries(&read_all(&*log).await, FIRST, 3);
    });
}

#[test]
fn after_a_seal_nothing_of_an_earlier_owner_is_appended() {
    let shared = Shared::get();
    let ledger = shared.next_ledger();
    let logs = [(); 3].map(|()| shared.runtime().block_on(shared.engine().open(ledger)).unwrap());
    shared.runtime().block_on(check_rivals(&logs));
}

#[test]
fn readers_see_whole_runs_while_the_log_grows_and_is_trimmed() {
    let shared = Shared::get();
    let ledger = shared.next_ledger();
    shared.runtime().block_on(async {
        let log = PostgresLog::open(shared.engine(), ledger).await.unwrap();
        let other = shared.engine().open(ledger).await.unwrap();
        log.seal(FIRST.epoch, FIRST.nonce).await.unwrap();
        check_reader(&log, other, 0).await;
        assert_eq!(shared.engine().open(ledger).await.unwrap().first(), Seq(576));
    });
    let rows = format!(
        "SELECT count(*) FROM forebay_entries e JOIN forebay_logs l ON l.id = e.log WHERE ledger = {ledger}"
    );
    assert_eq!(shared.servers().primary.sql(&rows), "25", "trimmed entries take no room");
}

#[test]
fn a_long_log_is_trimmed_in_steps_and_only_by_its_owner() {
    let shared = Shared::get();
    let ledger = shared.next_ledger();
    shared.runtime().block_on(async {
        let log = PostgresLog::open(shared.engine(), ledger).await.unwrap();
        let next = PostgresLog::open(shared.engine(), ledger).await.unwrap();
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
        assert_eq!(next.read(Seq(0), 1 << 20).await.unwrap()[0].seq, Seq(701));
    });
}

#[test]
fn the_largest_entries_fit_and_signs_of_life_count() {
    let shared = Shared::get();
    shared.runtime().block_on(async {
        let log = PostgresLog::open(shared.engine(), shared.next_ledger()).await.unwrap();
        // As large as numbers get.
        let owner = Sealed { epoch: Epoch(u64::MAX - 1), nonce: u64::MAX };
        log.seal(owner.epoch, owner.nonce).await.unwrap();
        let large = vec![9; ENTRY_BYTES_MAX];
        log.append(owner.epoch, Seq(1), vec![large.clone()]).await.unwrap();
        let refused = log.append(owner.epoch, Seq(2), vec![large.clone(), large.clone()]).await;
        assert!(matches!(refused, Err(AppendError::TooLarge)), "{refused:?}");
        log.append(owner.epoch, Seq(2), vec![vec![5; (1280 << 10) / 100 - 300]; 100]).await.unwrap();
        assert_eq!(log.read(Seq(1), 0).await.unwrap()[0].batch, large);
        for alive in 1..=3 {
            log.renew(owner).await.unwrap();
            let fence = log.fence().await.unwrap();
            assert_eq!((fence.epoch, fence.nonce, fence.tail), (owner.epoch, owner.nonce, Seq(101)));
            assert_eq!(fence.alive, alive);
        }
        let other = Sealed { nonce: 1, ..owner };
        assert!(matches!(log.renew(other).await, Err(LogError::Fenced(epoch)) if epoch == owner.epoch));
    });
}

#[test]
fn a_seal_without_an_answer_is_the_owners_all_the_same() {
    let shared = Shared::get();
    shared.runtime().block_on(async {
        let log = PostgresLog::open(shared.engine(), shared.next_ledger()).await.unwrap();
        let other = PostgresLog::open(shared.engine(), LedgerId(log.inner.ledger as u32)).await.unwrap();
        other.seal(FIRST.epoch, FIRST.nonce).await.unwrap();
        // As if the answer to its own attempt had been lost.
        log.inner.seals.attempt(FIRST);
        assert_eq!(log.fence().await.unwrap().nonce, FIRST.nonce);
        append_until_settled(&log, FIRST, 1).await.unwrap();
        log.trim(Seq(1)).await.unwrap();
        assert_eq!(log.first(), Seq(2));
    });
}

#[test]
fn tables_are_made_once_by_nodes_that_begin_at_once() {
    let _alone = alone();
    let servers = Servers::single();
    let options = servers.options();
    servers.runtime.block_on(async {
        let connected = futures_util::future::join_all((0..6).map(|_| Postgres::connect(&options))).await;
        for engine in connected {
            assert_eq!(open(&engine.unwrap()).await.fence().await.unwrap().tail, Seq(0));
        }
    });
    assert_eq!(servers.primary.sql("SELECT count(*) FROM forebay_logs"), "1");
}

#[test]
fn members_are_the_servers_and_whether_they_answer() {
    let shared = Shared::get();
    let servers = shared.servers();
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let mut options = servers.options();
    options.hosts.push(closed.clone());
    let engine = servers.try_connect(&options).unwrap();
    let members = shared.runtime().block_on(engine.members(Duration::from_secs(5)));
    let expected: Vec<_> = options.hosts.iter().map(|host| (host.clone(), *host != closed)).collect();
    assert_eq!(members, expected);
}

/// A server that takes connections and says nothing.
#[test]
fn a_server_that_hangs_is_left_for_the_primary() {
    let shared = Shared::get();
    let servers = shared.servers();
    let hanging = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let host = hanging.local_addr().unwrap().to_string();
    let mut options = servers.options();
    options.hosts = vec![host.clone()];
    let started = Instant::now();
    check_refused(servers.try_connect(&options), "no connection");
    assert!(started.elapsed() < Duration::from_secs(8), "{:?}", started.elapsed());
    options.hosts = vec![host, servers.primary.host()];
    let engine = servers.try_connect(&options).unwrap();
    shared.runtime().block_on(async {
        let log = PostgresLog::open(&engine, shared.next_ledger()).await.unwrap();
        log.seal(FIRST.epoch, FIRST.nonce).await.unwrap();
        within(Duration::from_secs(2), "append", log.append(FIRST.epoch, Seq(1), vec![vec![1]]))
            .await
            .unwrap();
    });
}

#[test]
fn a_caller_needs_no_runtime_of_its_own() {
    let shared = Shared::get();
    let log = shared.runtime().block_on(shared.engine().open(shared.next_ledger())).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(log.seal(Epoch(1), 1)).unwrap();
    runtime.block_on(log.append(Epoch(1), Seq(1), vec![vec![1]])).unwrap();
    assert_eq!(runtime.block_on(log.fence()).unwrap().tail, Seq(1));
}

/// A certificate for this machine, by an authority of its own. Returns the authority, the certificate and its key.
fn certificate() -> [String; 3] {
    let mut params = rcgen::CertificateParams::new(vec![]).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let key = rcgen::KeyPair::generate().unwrap();
    let authority = params.self_signed(&key).unwrap();
    let issuer = rcgen::Issuer::new(params, key);
    let params = rcgen::CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
    let key = rcgen::KeyPair::generate().unwrap();
    [authority.pem(), params.signed_by(&key, &issuer).unwrap().pem(), key.serialize_pem()]
}

#[test]
fn with_an_authority_only_tls_is_used() {
    let _alone = alone();
    let mut servers = Servers::single();
    let [ca, pem, key] = certificate();
    let with = |ca: &str| PostgresOptions { ca_pem: Some(ca.as_bytes().to_vec()), ..servers.options() };
    let (trusting, mistaken) = (with(&ca), with(&certificate()[0]));
    check_refused(servers.try_connect(&trusting), "TLS");
    servers.primary.write("server.crt", &pem);
    servers.primary.write("server.key", &key);
    servers.primary.set("ssl = on");
    servers.primary.kill();
    servers.primary.start();
    let engine = servers.try_connect(&trusting).unwrap();
    let log = servers.runtime.block_on(log_of(&engine, 3));
    check_entries(&servers.runtime.block_on(read_all(&*log)), FIRST, 3);
    let is_encrypted =
        "SELECT bool_and(ssl) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE usename = 'forebay'";
    assert_eq!(servers.primary.sql(is_encrypted), "t");
    check_refused(servers.try_connect(&mistaken), "certificate");
}
