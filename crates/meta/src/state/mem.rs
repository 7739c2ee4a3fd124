//! A store in memory, for tests.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::{Applied, Pair, State, StateError, Visit};
use crate::keys::KeyRange;

#[derive(Debug, Default)]
struct Inner {
    /// Shared with running scans, so that a visitor may read as well.
    map: Arc<BTreeMap<Vec<u8>, Vec<u8>>>,
    applied: Applied,
}

/// A store that lives as long as its clones.
#[derive(Debug, Clone, Default)]
pub struct MemState {
    inner: Arc<Mutex<Inner>>,
}

impl MemState {
    fn map(&self) -> Arc<BTreeMap<Vec<u8>, Vec<u8>>> {
        self.inner.lock().expect("no holder of this lock panics").map.clone()
    }
}

impl State for MemState {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, StateError> {
        Ok(self.map().get(key).cloned())
    }

    fn scan(&self, (from, to): &KeyRange, visit: &mut Visit<'_>) -> Result<(), StateError> {
        let map = self.map();
        let range = map.range(from.clone()..to.clone());
        for (key, value) in range {
            if visit(key, value).is_break() {
                break;
            }
        }
        Ok(())
    }

    fn last(&self, (from, to): &KeyRange) -> Result<Option<Pair>, StateError> {
        let map = self.map();
        let last = map.range(from.clone()..to.clone()).next_back();
        Ok(last.map(|(key, value)| (key.clone(), value.clone())))
    }

    fn apply(
        &self,
        changes: &mut dyn Iterator<Item = (&[u8], Option<&[u8]>)>,
        applied: Applied,
    ) -> Result<(), StateError> {
        let mut inner = self.inner.lock().expect("no holder of this lock panics");
        let map = Arc::make_mut(&mut inner.map);
        for (key, value) in changes {
            match value {
                Some(value) => map.insert(key.to_vec(), value.to_vec()),
                None => map.remove(key),
            };
        }
        inner.applied = applied;
        Ok(())
    }

    fn applied(&self) -> Result<Applied, StateError> {
        Ok(self.inner.lock().expect("no holder of this lock panics").applied)
    }

    fn snapshot(&self) -> Result<Arc<dyn State>, StateError> {
        let inner = self.inner.lock().expect("no holder of this lock panics");
        let copy = Inner { map: inner.map.clone(), applied: inner.applied };
        Ok(Arc::new(Self { inner: Arc::new(Mutex::new(copy)) }))
    }
}
