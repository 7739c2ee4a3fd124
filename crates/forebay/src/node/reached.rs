//! Object stores as filesystems reach them: each once on a node, however many filesystems use it. So its limits and its
//! bandwidth hold for all of them together, and it is asked once a second whether it answers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use upkeep::S3Store;

/// A store that is in use, and what looks whether it answers.
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

/// All that are in use, by their numbers.
#[derive(Default)]
pub(super) struct ReachedStores(Mutex<HashMap<u32, Weak<Reached>>>);

impl ReachedStores {
    /// The one that filesystems use, if any does.
    pub(super) fn find(&self, id: u32) -> Option<Arc<Reached>> {
        self.0.lock().expect("no holder of this lock panics").get(&id)?.upgrade()
    }

    /// Filesystems are to use this one from now on. It is known for as long as somebody keeps the result.
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
