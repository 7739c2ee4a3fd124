//! Caches above the client, such as a kernel's: how long they may keep what they are told, and how they forget.
//!
//! Attributes are vouched for by a lease, names by a watch: the owner has a name forgotten before it changes. An answer
//! may come when that is over already, so names may only be kept if none of their directory was forgotten meanwhile.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use base::{FsError, Ino};
use bytes::Bytes;
use wire::meta::{ANSWER_AGE_MAX, LeaseGrant, MetaRequest, NAME_TERM};

use crate::Client;

/// Directories are counted together to bound their number: what is kept too rarely is asked again.
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

/// What decides how long names that were asked for may be kept: see [`Client::name_term`].
#[derive(Debug, Clone, Copy)]
pub struct NameTerm {
    pub(crate) dir: Ino,
    pub(crate) asked_ns: u64,
    pub(crate) forgotten: u64,
    /// What the owner said.
    pub(crate) keep: bool,
}

impl Client {
    /// To be called before names in `dir` are asked for.
    pub(crate) fn asking_names(&self, dir: Ino) -> NameTerm {
        let forgotten = self.inner.forgotten.counter(dir).load(Ordering::Acquire);
        NameTerm { dir, asked_ns: self.inner.env.clock.boot_ns(), forgotten, keep: false }
    }

    /// How long a cache above may keep the names of an answer that it is given now, also that one is missing, unless it
    /// is told earlier.
    pub fn name_term(&self, term: &NameTerm) -> Duration {
        let age_ns = self.inner.env.clock.boot_ns().saturating_sub(term.asked_ns);
        let is_late = Duration::from_nanos(age_ns) > ANSWER_AGE_MAX;
        let forgotten = self.inner.forgotten.counter(term.dir).load(Ordering::Acquire);
        let keeps = term.keep && !is_late && forgotten == term.forgotten;
        if keeps { NAME_TERM } else { Duration::ZERO }
    }

    /// How long a cache above may keep attributes that it is given now, unless it is told earlier.
    pub fn attr_term(&self, ino: Ino) -> Duration {
        let vouched = self.inner.nodes.find(ino).is_some_and(|node| {
            let state = node.lock();
            !state.recalled && state.attr().is_some()
        });
        if vouched { NAME_TERM } else { Duration::ZERO }
    }

    /// Makes caches above forget names that are about to change, and tells the owner.
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

    /// Makes caches above forget attributes and content.
    pub(crate) async fn invalidate_above(&self, lease: LeaseGrant) {
        let invalidate = self.inner.invalidate.lock().expect("no holder of this lock panics").clone();
        let Some(invalidate) = invalidate else { return };
        // As above.
        if tokio::task::spawn_blocking(move || invalidate.inode(lease.ino)).await.is_err() {
            tracing::error!("invalidation of kernel caches was cut off");
        }
    }
}
