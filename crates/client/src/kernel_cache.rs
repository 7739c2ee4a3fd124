//! Caches above the client, such as that of a kernel: how long they may keep answers, and how they are invalidated.
//!
//! A lease covers attributes, a watch covers names: the owner has a name forgotten before it changes. An answer may
//! arrive after that, so names may be kept only if no name of their directory was forgotten in the meantime.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::{FsError, Ino};
use bytes::Bytes;
use tokio::sync::watch;
use wire::meta::{ANSWER_AGE_MAX, LeaseGrant, MetaRequest, NAME_TERM};

use crate::Client;
use crate::names::Asked;
use crate::node::Node;

/// Directories share counters to bound their number. The only effect is that a name is sometimes asked for again.
const COUNTERS: usize = 64;

/// Directories that are remembered before the old ones among them are looked for.
const KEPT_DIRS: usize = 1024;

/// How long a recall waits for locked pages before it looks whether reads or writes wait for the same lease, and how often.
const PAGES_PATIENCE: Duration = Duration::from_millis(50);
const PAGES_ROUNDS: usize = 100;

/// How long attributes wait for such pages: longer than the owner takes to give up a client that is silent.
const DROP_PATIENCE: Duration = Duration::from_secs(30);

/// A kernel may lock a whole aligned block of this size for one page in it.
const LOCKED_BYTES_MAX: u64 = 2 << 20;

/// How often names were forgotten, and where caches above may keep names.
#[derive(Debug)]
pub(crate) struct Forgotten {
    counters: [AtomicU64; COUNTERS],
    kept: Mutex<KeptDirs>,
    /// Counts directories whose names caches above are told to forget just now.
    under_way: watch::Sender<usize>,
}

/// Caches above are told to forget names.
pub(crate) struct Forgetting(Client);

impl Drop for Forgetting {
    fn drop(&mut self) {
        self.0.inner.forgotten.under_way.send_modify(|count| *count -= 1);
    }
}

/// When caches above last got names of a directory that they may keep, by the boot clock.
#[derive(Debug, Default)]
struct KeptDirs {
    dirs: HashMap<Ino, u64>,
    prune_at: usize,
}

impl KeptDirs {
    fn note(&mut self, dir: Ino, now_ns: u64) {
        self.dirs.insert(dir, now_ns);
        if self.dirs.len() > self.prune_at.max(KEPT_DIRS) {
            self.dirs.retain(|_, kept_ns| now_ns < *kept_ns + NAME_TERM.as_nanos() as u64);
            self.prune_at = 2 * self.dirs.len();
        }
    }
}

impl Default for Forgotten {
    fn default() -> Self {
        Self {
            counters: std::array::from_fn(|_| AtomicU64::new(0)),
            kept: Mutex::default(),
            under_way: watch::Sender::new(0),
        }
    }
}

impl Forgotten {
    fn counter(&self, dir: Ino) -> &AtomicU64 {
        &self.counters[(dir.0 % COUNTERS as u64) as usize]
    }

    fn kept(&self) -> MutexGuard<'_, KeptDirs> {
        self.kept.lock().expect("no holder of this lock panics")
    }

    /// The directories of which caches above may keep names.
    pub(crate) fn kept_dirs(&self, now_ns: u64) -> Vec<Ino> {
        let kept = self.kept();
        let mut dirs: Vec<Ino> = kept
            .dirs
            .iter()
            .filter(|(_, kept_ns)| now_ns < **kept_ns + NAME_TERM.as_nanos() as u64)
            .map(|(dir, _)| *dir)
            .collect();
        dirs.sort_unstable();
        dirs
    }
}

/// The state that decides how long a cache may keep names: see [`Client::name_term`].
#[derive(Debug, Clone, Copy)]
pub struct NameTerm {
    pub(crate) dir: Ino,
    pub(crate) asked: Asked,
    pub(crate) asked_ns: u64,
    pub(crate) forgotten: u64,
    /// Whether the owner allows it.
    pub(crate) keep: bool,
}

impl Client {
    /// Call this before asking for names in `dir`.
    pub(crate) fn asking_names(&self, dir: Ino) -> NameTerm {
        let forgotten = self.inner.forgotten.counter(dir).load(Ordering::Acquire);
        let asked_ns = self.inner.env.clock.boot_ns();
        NameTerm { dir, asked: self.asking(), asked_ns, forgotten, keep: false }
    }

    /// How long a cache above may keep the names of an answer that it gets now, including the answer that a name is
    /// missing, unless it is invalidated earlier.
    pub fn name_term(&self, term: &NameTerm) -> Duration {
        let age_ns = self.inner.env.clock.boot_ns().saturating_sub(term.asked_ns);
        let is_late = Duration::from_nanos(age_ns) > ANSWER_AGE_MAX;
        let forgotten = self.inner.forgotten.counter(term.dir).load(Ordering::Acquire);
        let keeps = term.keep && !is_late && forgotten == term.forgotten;
        if !keeps {
            return Duration::ZERO;
        }
        self.inner.forgotten.kept().note(term.dir, self.inner.env.clock.boot_ns());
        if self.is_answered_in_time(term.asked) { NAME_TERM } else { Duration::ZERO }
    }

    /// Notes that names are about to move to these directories. With the answer, a kernel moves the names that it keeps, and does not
    /// ask for them. Every later owner must know that it has them.
    pub(crate) fn moves_names(&self, dirs: [Ino; 2]) {
        let is_above = self.inner.invalidate.lock().expect("no holder of this lock panics").is_some();
        if is_above {
            let now_ns = self.inner.env.clock.boot_ns();
            let mut kept = self.inner.forgotten.kept();
            dirs.into_iter().for_each(|dir| kept.note(dir, now_ns));
        }
    }

    /// How long a cache above may keep attributes that it gets now, unless it is invalidated earlier.
    pub fn attr_term(&self, ino: Ino) -> Duration {
        let vouched = self.inner.nodes.find(ino).is_some_and(|node| {
            let state = node.lock();
            !state.recalled && state.attr().is_some()
        });
        if vouched { NAME_TERM.min(self.inner.session.term.left()) } else { Duration::ZERO }
    }

    pub(crate) fn forgetting(&self) -> Forgetting {
        self.inner.forgotten.under_way.send_modify(|count| *count += 1);
        Forgetting(self.clone())
    }

    /// Waits until caches above have forgotten all names that they were told to forget.
    pub async fn has_forgotten_names(&self) {
        let mut under_way = self.inner.forgotten.under_way.subscribe();
        // The sender lives as long as the client.
        let _ = under_way.wait_for(|count| *count == 0).await;
    }

    /// Makes caches above forget names that are about to change, then tells the owner.
    pub(crate) async fn forget_names(&self, dir: Ino, names: Vec<(Bytes, u64)>, forgetting: Forgetting) {
        self.inner.forgotten.counter(dir).fetch_add(1, Ordering::AcqRel);
        let invalidate = self.inner.invalidate.lock().expect("no holder of this lock panics").clone();
        let mut names = names;
        if let Some(invalidate) = invalidate {
            // The kernel may make this wait for requests that are under way: never on a runtime worker.
            let work = tokio::task::spawn_blocking(move || {
                names.iter().for_each(|(name, _)| invalidate.entry(dir, name));
                names
            });
            let Ok(forgotten) = work.await else {
                tracing::error!(%dir, "invalidation of kernel caches was cut off");
                return;
            };
            names = forgotten;
        }
        drop(forgetting);
        match self.answer(MetaRequest::Forgot { dir, names }).await {
            Ok(_) | Err(FsError::Unavailable | FsError::Unknown) => {}
            Err(error) => tracing::warn!(%dir, %error, "owner was not told of forgotten names"),
        }
    }

    /// As [`Client::invalidate_above`], but does not wait for pages that are locked by reads and writes which wait for the owner: it may
    /// wait for this recall. They are dropped as soon as these are answered.
    pub(crate) async fn invalidate_for_recall(&self, node: &Arc<Node>) {
        let invalidate = self.inner.invalidate.lock().expect("no holder of this lock panics").clone();
        let Some(invalidate) = invalidate else { return };
        let (ino, above) = (node.ino, invalidate.clone());
        let mut all = tokio::task::spawn_blocking(move || above.inode(ino));
        for round in 0..PAGES_ROUNDS {
            if tokio::time::timeout(PAGES_PATIENCE, &mut all).await.is_ok() {
                return;
            }
            let Some(mut range) = node.lock().waiting() else { continue };
            if round > 0 {
                range = range.start / LOCKED_BYTES_MAX * LOCKED_BYTES_MAX
                    ..range.end.next_multiple_of(LOCKED_BYTES_MAX);
            }
            let above = invalidate.clone();
            let around = tokio::task::spawn_blocking(move || above.inode_around(ino, range));
            if tokio::time::timeout(PAGES_PATIENCE, around).await.is_ok() {
                node.dropping.send_modify(|count| *count += 1);
                let node = node.clone();
                self.inner.runtime.spawn(async move {
                    let _ = all.await;
                    node.dropping.send_modify(|count| *count -= 1);
                });
                return;
            }
        }
        if all.await.is_err() {
            tracing::error!("invalidation of kernel caches was cut off");
        }
    }

    /// Waits until caches above have dropped the pages of an inode that a recall left to them, up to 30 s. Before that, a cache that
    /// learns of a greater size shows zeros behind the old end. Returns whether it waited and they are gone: then attributes that
    /// were read before may be old.
    pub async fn wait_for_pages(&self, ino: Ino) -> bool {
        let Some(node) = self.inner.nodes.find(ino).filter(|node| *node.dropping.borrow() > 0) else {
            return false;
        };
        let mut dropping = node.dropping.subscribe();
        // The sender lives as long as the node.
        let dropped = dropping.wait_for(|count| *count == 0);
        tokio::time::timeout(DROP_PATIENCE, dropped).await.is_ok()
    }

    /// Whether [`Client::wait_for_pages`] would wait.
    pub fn leaves_pages(&self, ino: Ino) -> bool {
        self.inner.nodes.find(ino).is_some_and(|node| *node.dropping.borrow() > 0)
    }

    /// Makes caches above forget attributes and content of an inode.
    pub(crate) async fn invalidate_above(self, lease: LeaseGrant) {
        let invalidate = self.inner.invalidate.lock().expect("no holder of this lock panics").clone();
        let Some(invalidate) = invalidate else { return };
        // See [`Client::forget_names`].
        if tokio::task::spawn_blocking(move || invalidate.inode(lease.ino)).await.is_err() {
            tracing::error!("invalidation of kernel caches was cut off");
        }
    }
}
