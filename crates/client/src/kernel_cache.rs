//! Caches above the client, such as that of a kernel: how long they may keep answers, and how they are invalidated.
//!
//! A lease covers attributes, a watch covers names: the owner has a name forgotten before it changes. An answer may
//! arrive after that, so names may be kept only if no name of their directory was forgotten in the meantime.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use base::{FsError, Ino};
use bytes::Bytes;
use wire::meta::{ANSWER_AGE_MAX, LeaseGrant, MetaRequest, NAME_TERM};

use crate::Client;

/// Directories share counters to bound their number. The only effect is that a name is sometimes asked for again.
const COUNTERS: usize = 64;

/// How often names were forgotten.
#[derive(Debug)]
pub(crate) struct Forgotten([AtomicU64; COUNTERS]);

impl Default for Forgotten {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Forgotten {
    fn counter(&self, dir: Ino) -> &AtomicU64 {
        &self.0[(dir.0 % COUNTERS as u64) as usize]
    }
}

/// The state that decides how long a cache may keep names: see [`Client::name_term`].
#[derive(Debug, Clone, Copy)]
pub struct NameTerm {
    pub(crate) dir: Ino,
    pub(crate) asked_ns: u64,
    pub(crate) forgotten: u64,
    /// Whether the owner allows it.
    pub(crate) keep: bool,
}

impl Client {
    /// Call this before asking for names in `dir`.
    pub(crate) fn asking_names(&self, dir: Ino) -> NameTerm {
        let forgotten = self.inner.forgotten.counter(dir).load(Ordering::Acquire);
        NameTerm { dir, asked_ns: self.inner.env.clock.boot_ns(), forgotten, keep: false }
    }

    /// How long a cache above may keep the names of an answer that it gets now, including the answer that a name is
    /// missing, unless it is invalidated earlier.
    pub fn name_term(&self, term: &NameTerm) -> Duration {
        let age_ns = self.inner.env.clock.boot_ns().saturating_sub(term.asked_ns);
        let is_late = Duration::from_nanos(age_ns) > ANSWER_AGE_MAX;
        let forgotten = self.inner.forgotten.counter(term.dir).load(Ordering::Acquire);
        let keeps = term.keep && !is_late && forgotten == term.forgotten;
        if keeps { NAME_TERM } else { Duration::ZERO }
    }

    /// How long a cache above may keep attributes that it gets now, unless it is invalidated earlier.
    pub fn attr_term(&self, ino: Ino) -> Duration {
        let vouched = self.inner.nodes.find(ino).is_some_and(|node| {
            let state = node.lock();
            !state.recalled && state.attr().is_some()
        });
        if vouched { NAME_TERM } else { Duration::ZERO }
    }

    /// Makes caches above forget names that are about to change, then tells the owner.
    pub(crate) async fn forget_names(&self, dir: Ino, names: Vec<(Bytes, u64)>) {
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
        match self.answer(MetaRequest::Forgot { dir, names }).await {
            Ok(_) | Err(FsError::Unavailable) => {}
            Err(error) => tracing::warn!(%dir, %error, "owner was not told of forgotten names"),
        }
    }

    /// Makes caches above forget attributes and content of an inode.
    pub(crate) async fn invalidate_above(&self, lease: LeaseGrant) {
        let invalidate = self.inner.invalidate.lock().expect("no holder of this lock panics").clone();
        let Some(invalidate) = invalidate else { return };
        // See [`Client::forget_names`].
        if tokio::task::spawn_blocking(move || invalidate.inode(lease.ino)).await.is_err() {
            tracing::error!("invalidation of kernel caches was cut off");
        }
    }
}
