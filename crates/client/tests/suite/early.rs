//! Changes of names that return before they are durable.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use base::{Epoch, FsError, Ino, Seq};
use client::{Client, FileKind, MakeNode, OpenIntent, RenameMode};
use meta::log::{AppendError, Fence, LedgerLog, LogCaps, LogEntry, LogError, MemLog, Sealed, Tail};
use meta::owner::Owner;
use tokio::sync::watch;
use wire::BoxFuture;
use wire::meta::MetaService;

use crate::common::{World, create, find, new_file, pattern, read_all, run};

/// A log that takes nothing for some time.
struct StuckLog {
    log: MemLog,
    is_stuck: AtomicBool,
}

impl StuckLog {
    fn set_stuck(&self, is_stuck: bool) {
        self.is_stuck.store(is_stuck, Ordering::SeqCst);
    }
}

impl LedgerLog for StuckLog {
    fn seal(&self, epoch: Epoch, nonce: u64) -> BoxFuture<'_, Result<Tail, LogError>> {
        self.log.seal(epoch, nonce)
    }

    fn fence(&self) -> BoxFuture<'_, Result<Fence, LogError>> {
        self.log.fence()
    }

    fn renew(&self, owner: Sealed) -> BoxFuture<'_, Result<(), LogError>> {
        self.log.renew(owner)
    }

    fn append(
        &self,
        epoch: Epoch,
        first: Seq,
        batches: Vec<Vec<u8>>,
    ) -> BoxFuture<'_, Result<(), AppendError>> {
        Box::pin(async move {
            if self.is_stuck.load(Ordering::SeqCst) {
                return Err(AppendError::Unknown(std::io::ErrorKind::TimedOut.into()));
            }
            self.log.append(epoch, first, batches).await
        })
    }

    fn read(&self, from: Seq, limit_bytes: usize) -> BoxFuture<'_, Result<Vec<LogEntry>, LogError>> {
        self.log.read(from, limit_bytes)
    }

    fn trim(&self, up_to: Seq) -> BoxFuture<'_, Result<(), LogError>> {
        self.log.trim(up_to)
    }

    fn caps(&self) -> LogCaps {
        self.log.caps()
    }
}

/// An owner whose log can be stuck, and the seat of its clients.
struct Ledger {
    world: Arc<World>,
    log: Arc<StuckLog>,
    owner: Arc<Owner>,
    publish: watch::Sender<Arc<dyn MetaService>>,
}

impl Ledger {
    async fn open(world: &Arc<World>) -> Self {
        let log = Arc::new(StuckLog { log: world.log.clone(), is_stuck: AtomicBool::new(false) });
        let (next, of) = (world.clone(), log.clone());
        let owner = tokio::task::spawn_blocking(move || next.open_next(of)).await.unwrap();
        let publish = watch::channel(owner.clone() as Arc<dyn MetaService>).0;
        Self { world: world.clone(), log, owner, publish }
    }

    /// A client whose changes return early.
    async fn client(&self) -> Client {
        let client = self.world.client_of(self.publish.subscribe()).await;
        client.set_early(true);
        client
    }

    /// The owner is lost with all that its log did not take, and another follows.
    async fn lose_owner(&mut self) {
        let Self { log, owner, .. } = Self::open(&self.world).await;
        self.publish.send_replace(owner.clone());
        (self.log, self.owner) = (log, owner);
    }
}

async fn is_waiting<T>(work: impl Future<Output = T>) -> bool {
    tokio::time::timeout(Duration::from_millis(200), work).await.is_err()
}

fn directory(name: &str) -> MakeNode {
    MakeNode { kind: FileKind::Directory, open: OpenIntent::None, ..new_file(name) }
}

#[test]
fn changes_return_before_the_log_has_them_and_a_sync_waits_for_it() {
    run("2+1", |world| async move {
        let ledger = Ledger::open(&world).await;
        let (one, two) = (ledger.client().await, ledger.client().await);
        one.sync().await.unwrap();
        ledger.log.set_stuck(true);
        let dir = one.make(directory("dir")).await.unwrap().ino;
        let file = one.make(MakeNode { parent: dir, ..new_file("file") }).await.unwrap().ino;
        one.rename((dir, b"file"), (Ino::ROOT, b"moved"), RenameMode::Replace).await.unwrap();
        assert_eq!(find(&one, "moved").await.unwrap().ino, file);
        assert_eq!(one.getattr(dir).await.unwrap().size, 0);
        assert!(is_waiting(find(&two, "moved")).await, "it is seen by others when it is durable");
        assert!(is_waiting(one.fsync(file)).await);
        assert!(is_waiting(one.fsync(dir)).await);
        assert!(is_waiting(one.sync()).await);
        ledger.log.set_stuck(false);
        one.fsync(dir).await.unwrap();
        assert_eq!(find(&two, "moved").await.unwrap().ino, file);
        // A mount that is strict.
        one.set_early(false);
        ledger.log.set_stuck(true);
        assert!(is_waiting(one.unlink(Ino::ROOT, b"moved")).await);
        ledger.log.set_stuck(false);
        ledger.owner.stop();
    });
}

#[test]
fn the_next_owner_has_what_was_answered_early() {
    run("2+1", |world| async move {
        let mut ledger = Ledger::open(&world).await;
        let (one, two) = (ledger.client().await, ledger.client().await);
        let old = create(&one, "old").await;
        one.close_file(old);
        one.sync().await.unwrap();
        for round in 0..3u64 {
            ledger.log.set_stuck(true);
            let dir = one.make(directory(&format!("dir {round}"))).await.unwrap().ino;
            let file = one.make(MakeNode { parent: dir, ..new_file("file") }).await.unwrap().ino;
            one.write(file, 0, &pattern(round, 30_000)).await.unwrap();
            let unnamed = one.make(MakeNode { parent: dir, ..new_file("gone") }).await.unwrap().ino;
            one.write(unnamed, 0, b"open").await.unwrap();
            one.unlink(dir, b"gone").await.unwrap();
            let from = if round == 0 { "old".to_owned() } else { format!("renamed {}", round - 1) };
            let to = format!("renamed {round}");
            one.rename((Ino::ROOT, from.as_bytes()), (Ino::ROOT, to.as_bytes()), RenameMode::Replace)
                .await
                .unwrap();
            let before = (one.getattr(dir).await.unwrap(), one.getattr(old).await.unwrap());
            ledger.lose_owner().await;
            one.fsync(file).await.unwrap();
            assert_eq!((one.getattr(dir).await.unwrap(), one.getattr(old).await.unwrap()), before);
            assert_eq!(find(&two, &format!("dir {round}")).await.unwrap().ino, dir);
            assert_eq!(find(&two, &to).await.unwrap().ino, old);
            assert_eq!(find(&two, &from).await, Err(FsError::NotFound));
            let found = two.lookup(dir, b"file").await.unwrap();
            assert_eq!(found.ino, file);
            assert!(read_all(&two, file).await.unwrap() == pattern(round, 30_000));
            assert_eq!(read_all(&one, unnamed).await.unwrap(), b"open");
            assert_eq!(two.lookup(dir, b"gone").await.unwrap_err(), FsError::NotFound);
        }
        ledger.owner.stop();
    });
}

#[test]
fn a_burst_is_bounded_and_other_requests_go_on_while_the_log_is_stuck() {
    run("2+1", |world| async move {
        let ledger = Ledger::open(&world).await;
        let one = ledger.client().await;
        let quiet = one.make(directory("quiet")).await.unwrap().ino;
        one.sync().await.unwrap();
        ledger.log.set_stuck(true);
        let mut made = 0;
        while made < 1000 && !is_waiting(one.make(directory(&format!("dir {made}")))).await {
            made += 1;
        }
        assert!((100..400).contains(&made), "{made}");
        assert_eq!(one.lookup(quiet, b"nothing").await.unwrap_err(), FsError::NotFound);
        assert_eq!(one.getattr(quiet).await.unwrap().size, 0);
        ledger.log.set_stuck(false);
        for number in made + 1..made + 300 {
            one.make(directory(&format!("dir {number}"))).await.unwrap();
        }
        one.sync().await.unwrap();
        ledger.owner.stop();
    });
}

#[test]
fn what_is_lost_is_reported_once_to_those_who_sync_it() {
    run("2+1", |world| async move {
        let ledger = Ledger::open(&world).await;
        let one = ledger.client().await;
        let dir = one.make(directory("dir")).await.unwrap().ino;
        one.sync().await.unwrap();
        ledger.log.set_stuck(true);
        let file = one.make(MakeNode { parent: dir, ..new_file("file") }).await.unwrap().ino;
        // The next owner knows nothing of the session: the ledger was started anew.
        let other = tokio::task::spawn_blocking(|| World::new("2+1", 0)).await.unwrap();
        ledger.publish.send_replace(other.owner.clone());
        assert_eq!(one.fsync(file).await, Err(FsError::Io));
        assert_eq!(one.fsync(file).await, Ok(()));
        assert_eq!(one.fsync(dir).await, Err(FsError::Io));
        create(&one, "new").await;
        assert_eq!(one.sync().await, Err(FsError::Io), "something was lost since the last one");
        one.sync().await.unwrap();
        tokio::task::spawn_blocking(move || other.owner.stop()).await.unwrap();
    });
}
