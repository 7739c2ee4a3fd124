//! An object store as its clients see it: slow, down at times, with lost answers and damaged bytes; and tiering to it.
//! Its content survives crashes of the node.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::{ExtentId, Ino};
use bytes::Bytes;
use client::{Client, TierLink};
use layout::BLOB_BYTES_MIN;
use tokio::runtime::Handle;
use tokio::sync::watch;
use upkeep::{OtherNodes, Pace, TierOptions, Tiering};
use wire::BoxFuture;
use wire::store::{ObjectStore, Outgoing, StoreError};

use crate::net::delay;
use crate::node::CLUSTER;
use crate::world::{Dice, Machine, World};

/// Attempts per request, as with a real store: after some time the client stops waiting for an answer.
const ATTEMPTS: u32 = 5;
const LOST_AFTER: Duration = Duration::from_millis(800);
const DOWN_AFTER: Duration = Duration::from_secs(2);

/// The content of the store, and whether it answers.
#[derive(Default)]
pub(crate) struct Bucket {
    objects: Mutex<BTreeMap<String, Bytes>>,
    down: AtomicBool,
    /// Ranges that were damaged once.
    spoiled: Mutex<BTreeSet<(String, u64)>>,
}

impl Bucket {
    pub(crate) fn objects(&self) -> MutexGuard<'_, BTreeMap<String, Bytes>> {
        self.objects.lock().expect("no holder of this lock panics")
    }

    pub(crate) fn set_down(&self, world: &World, down: bool) {
        world.trace.event(format_args!("store down={down}"));
        self.down.store(down, Ordering::Relaxed);
    }
}

/// A client's access to the store.
struct SimStore {
    world: Arc<World>,
    dice: Dice,
}

impl SimStore {
    /// Tries a few times to get an answer. An answer may be lost after the work was done.
    async fn ask<T>(&self, what: &str, work: impl Fn() -> Result<T, StoreError>) -> Result<T, StoreError> {
        let lost = Err(StoreError::Unavailable("no answer".to_owned()));
        for _ in 0..ATTEMPTS {
            tokio::time::sleep(delay(&self.dice)).await;
            if self.world.bucket.down.load(Ordering::Relaxed) {
                tokio::time::sleep(DOWN_AFTER).await;
                continue;
            }
            let trouble = if self.world.scenario.store_fails { self.dice.below(16) } else { 16 };
            if trouble == 0 {
                tokio::time::sleep(LOST_AFTER).await;
                continue;
            }
            let answer = work();
            let shown = answer.as_ref().map(|_| ());
            self.world.trace.event(format_args!("store {what} {shown:?}"));
            if trouble == 1 {
                tokio::time::sleep(LOST_AFTER).await;
                continue;
            }
            tokio::time::sleep(delay(&self.dice)).await;
            return answer;
        }
        self.world.trace.event(format_args!("store {what} given up"));
        lost
    }

    /// Flips a bit, once for each range.
    fn spoil(&self, key: &str, from: u64, bytes: Bytes) -> Bytes {
        let spoils = self.world.scenario.store_fails && self.dice.once_in(20) && !bytes.is_empty();
        let mut spoiled = self.world.bucket.spoiled.lock().expect("no holder of this lock panics");
        if !spoils || !spoiled.insert((key.to_owned(), from)) {
            return bytes;
        }
        self.world.trace.event(format_args!("store spoils {key} from={from}"));
        let mut wrong = bytes.to_vec();
        let at = self.dice.below(wrong.len() as u64) as usize;
        wrong[at] ^= 4;
        wrong.into()
    }
}

impl ObjectStore for SimStore {
    fn put(&self, key: String, object: Outgoing) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            let bytes: Bytes = object.parts.concat().into();
            let put = || {
                let before = self.world.bucket.objects().insert(key.clone(), bytes.clone());
                if before.is_some_and(|before| before != bytes) {
                    self.world.promises().violate(format!("I15: blob {key} was stored twice"));
                }
                Ok(())
            };
            self.ask(&format!("put {key} {}", bytes.len()), put).await
        })
    }

    fn get(&self, key: String, range: Option<Range<u64>>) -> BoxFuture<'_, Result<Bytes, StoreError>> {
        Box::pin(async move {
            let what = format!("get {key} {range:?}");
            let get = || {
                let whole = self.world.bucket.objects().get(&key).cloned();
                let whole = whole.ok_or_else(|| StoreError::NotFound(key.clone()))?;
                let range = range.clone().unwrap_or(0..whole.len() as u64);
                if range.end > whole.len() as u64 {
                    return Err(StoreError::Unexpected(format!("{range:?} is not in {key}")));
                }
                let bytes = whole.slice(range.start as usize..range.end as usize);
                Ok(self.spoil(&key, range.start, bytes))
            };
            self.ask(&what, get).await
        })
    }

    fn delete(&self, key: String) -> BoxFuture<'_, Result<(), StoreError>> {
        Box::pin(async move {
            let delete = || {
                self.world.bucket.objects().remove(&key);
                Ok(())
            };
            self.ask(&format!("delete {key}"), delete).await
        })
    }
}

/// Takes the store down and up again, until the future is dropped.
pub(crate) async fn trouble(world: Arc<World>, boot: u64) {
    let dice = world.dice(0x57_0000 + (boot << 32));
    loop {
        tokio::time::sleep(Duration::from_millis(500 + dice.below(20_000))).await;
        world.bucket.set_down(&world, true);
        tokio::time::sleep(Duration::from_millis(dice.below(15_000))).await;
        world.bucket.set_down(&world, false);
    }
}

/// Tiering of the running node.
pub(crate) struct Tier {
    world: Arc<World>,
    store: watch::Sender<Option<Arc<dyn ObjectStore>>>,
    tiering: Option<Tiering>,
}

impl Tier {
    pub(crate) fn new(world: &Arc<World>, boot: u64) -> Self {
        let store = SimStore { world: world.clone(), dice: world.dice(0x57_00ff + (boot << 32)) };
        let store = world.scenario.tiers.then(|| Arc::new(store) as Arc<dyn ObjectStore>);
        Self { world: world.clone(), store: watch::channel(store).0, tiering: None }
    }

    /// The link for a client.
    pub(crate) fn link(&self) -> TierLink {
        TierLink {
            cluster: CLUSTER,
            filesystem: 1,
            fetched_bytes_max: 0,
            returning_bytes_max: 0,
            store: self.store.subscribe(),
        }
    }

    /// Starts or resumes tiering, with small blobs and short delays.
    pub(crate) fn start(&mut self, client: &Client, others: Option<Arc<dyn OtherNodes>>, pace: &Arc<Pace>) {
        if !self.world.scenario.tiers {
            return;
        }
        let dice = self.world.dice(0x57_00aa);
        let options = TierOptions {
            retention_s: 1 + dice.below(8),
            cue_s: dice.below(3),
            blob_bytes: BLOB_BYTES_MIN,
            uploads: 1 + dice.below(3) as usize,
            uploads_all: 1 + dice.below(6) as usize,
            place: 0,
            detaching: self.world.promises().detaching,
        };
        let (env, runtime) = (self.world.env_of(Machine::Client(0)), Handle::current());
        self.tiering = Some(Tiering::start(env, client.clone(), others, pace.clone(), options, &runtime));
    }

    /// Whether tiering runs. A restart that was interrupted after the stop leaves it stopped.
    pub(crate) fn is_running(&self) -> bool {
        self.tiering.is_some()
    }

    pub(crate) async fn stop(&mut self) {
        if let Some(tiering) = self.tiering.take() {
            tiering.stop().await;
        }
    }

    /// Describes extents that are not in the store yet, or not off the drives.
    pub(crate) fn unfinished(&self) -> Option<String> {
        let stat = self.tiering.as_ref()?.stat();
        if self.world.promises().detaching {
            return (!stat.detached).then(|| format!("the store is not left: {stat:?}"));
        }
        (stat.tier.queueing || stat.tier.queued.extents + stat.tier.both.extents > 0)
            .then(|| format!("extents have not left the drives: {stat:?}"))
    }
}

/// A user has a file brought back to the drives, or released from them.
pub(crate) async fn move_file(client: &Client, dice: &Dice) {
    let (client, ino, comes) = (client.clone(), Ino(2 + dice.below(40)), dice.once_in(2));
    // The move runs to its end, even if its caller stops waiting. It also ends if the file is gone or the store is
    // down.
    let step = async move {
        if comes {
            return client.fetch_files(&[(ino, 0)], None).await.remove(0).map(drop);
        }
        let page = client.file_parts(ino, 0).await?;
        let ids: Vec<ExtentId> = page.parts.iter().filter_map(|part| part.extent).collect();
        client.release_extents(ids).await.map(drop)
    };
    let _ = tokio::spawn(step).await;
}
