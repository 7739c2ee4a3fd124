//! The object stores that this process uses: one connection to each, shared by all its filesystems and protocols. So its limits and
//! bandwidth hold for all of them together, and one check a second finds out whether it answers.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use base::env::Env;
use tokio::runtime::Handle;
use upkeep::{S3Store, StoreSettings, StoreSettingsError};

/// See the module.
#[derive(Default)]
pub(crate) struct Stores(Mutex<Vec<Weak<S3Store>>>);

impl Stores {
    /// The store with these settings. It is looked at until nothing uses it any more.
    pub(crate) fn of(
        &self,
        env: &Env,
        runtime: &Handle,
        settings: StoreSettings,
    ) -> Result<Arc<S3Store>, StoreSettingsError> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|store| store.strong_count() > 0);
        let same = known.iter().filter_map(Weak::upgrade).find(|store| *store.settings() == settings);
        if let Some(store) = same {
            return Ok(store);
        }
        let store = S3Store::new(env.clone(), settings)?;
        known.push(Arc::downgrade(&store));
        runtime.spawn(S3Store::watch(Arc::downgrade(&store)));
        Ok(store)
    }
}
