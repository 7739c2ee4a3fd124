//! What a log object has sealed its log with.

use std::sync::{Mutex, MutexGuard};

use super::Sealed;

/// See the module. If the answer to a seal was lost, the engine knows whether it counts.
#[derive(Default)]
pub(super) struct Seals(Mutex<Held>);

#[derive(Default)]
struct Held {
    held: Option<Sealed>,
    /// A later attempt without an answer.
    tried: Option<Sealed>,
}

impl Seals {
    fn lock(&self) -> MutexGuard<'_, Held> {
        self.0.lock().expect("no holder of this lock panics")
    }

    /// Notes a seal before it is attempted.
    pub(super) fn attempt(&self, owner: Sealed) {
        self.lock().tried = Some(owner);
    }

    /// Notes that a seal succeeded.
    pub(super) fn done(&self, owner: Sealed) {
        *self.lock() = Held { held: Some(owner), tried: None };
    }

    /// What this object sealed the log with, if that fits.
    pub(super) fn find(&self, fits: impl Fn(Sealed) -> bool) -> Option<Sealed> {
        let seals = self.lock();
        [seals.held, seals.tried].into_iter().flatten().find(|sealed| fits(*sealed))
    }
}
