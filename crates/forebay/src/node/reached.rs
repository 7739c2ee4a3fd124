//! Object stores in use: one connection to each per node, shared by all filesystems that use the store. So its limits
//! and bandwidth hold for all of them together, and one check a second finds out whether it answers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use upkeep::S3Store;

/// A store in use, and the task that checks whether it answers.
pub(super) struct Reached {
    store: Arc<S3Store>,
    looks: JoinHandle<()>,
}

impl Reached {
    pub(super) fn store(&self) -> &Arc<S3Store> {
        &self.store
    }
}

impl Drop for Reached {
    fn drop(&mut self) {
        self.looks.abort();
    }
}

/// All stores in use, by number.
#[derive(Default)]
pub(super) struct ReachedStores(Mutex<HashMap<u32, Weak<Reached>>>);

impl ReachedStores {
    /// The store, if a filesystem uses it.
    pub(super) fn find(&self, id: u32) -> Option<Arc<Reached>> {
        self.0.lock().expect("no holder of this lock panics").get(&id)?.upgrade()
    }

    /// Replaces the connection to a store. It stays listed while a caller keeps the result.
    pub(super) fn set(&self, id: u32, store: Arc<S3Store>, runtime: &Handle) -> Arc<Reached> {
        let watched = store.clone();
        let looks = runtime.spawn(async move { watched.watch().await });
        let reached = Arc::new(Reached { store, looks });
        let mut known = self.0.lock().expect("no holder of this lock panics");
        known.retain(|_, reached| reached.strong_count() > 0);
        known.insert(id, Arc::downgrade(&reached));
        reached
    }
}
