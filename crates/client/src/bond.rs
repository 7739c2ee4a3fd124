//! The owner that a session is bound to, and waits until that changes.

use std::sync::{Arc, PoisonError, RwLock};

use base::SessionId;
use tokio::sync::Notify;
use wire::meta::MetaService;

/// A time under one owner, or between two.
#[derive(Clone)]
pub(crate) struct Bond {
    /// Grows whenever an owner is left or found.
    pub(crate) number: u64,
    pub(crate) session: SessionId,
    /// `None` while there is no owner.
    pub(crate) owner: Option<Arc<dyn MetaService>>,
    /// No other owner will follow.
    pub(crate) is_last: bool,
}

/// The present bond. Those who wait for its change go on in the order in which they began to wait: a watch channel would
/// wake them in random order, and a simulation could not be repeated.
pub(crate) struct Bonds {
    present: RwLock<Bond>,
    changed: Notify,
}

impl Bonds {
    /// Number of the bond to the first owner.
    pub(crate) const FIRST: u64 = 1;

    pub(crate) fn new(session: SessionId, owner: Arc<dyn MetaService>) -> Arc<Self> {
        let first = Bond { number: Self::FIRST, session, owner: Some(owner), is_last: false };
        Arc::new(Self { present: RwLock::new(first), changed: Notify::new() })
    }

    /// Looks at the present bond.
    pub(crate) fn with<T>(&self, look: impl FnOnce(&Bond) -> T) -> T {
        look(&self.present.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn change<T>(&self, change: impl FnOnce(&mut Bond) -> T) -> T {
        let result = change(&mut self.present.write().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_waiters();
        result
    }

    /// Waits for such a bond.
    pub(crate) async fn wait_for(&self, wanted: impl Fn(&Bond) -> bool) -> Bond {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // From here on no change is missed.
            changed.as_mut().enable();
            if let Some(bond) = self.with(|bond| wanted(bond).then(|| bond.clone())) {
                return bond;
            }
            changed.await;
        }
    }

    /// Whether the bond of this number is the present one. An owner may send events before the client has noted that it is
    /// bound: then this waits.
    pub(crate) async fn is_present(&self, number: u64) -> bool {
        let is_decided =
            |bond: &Bond| bond.number > number || (bond.number == number && bond.owner.is_some());
        self.wait_for(is_decided).await.number == number
    }

    /// Leaves the owner. Returns the number of the next bond.
    pub(crate) fn leave(&self) -> u64 {
        self.change(|bond| {
            bond.number += 1;
            bond.owner = None;
            bond.number + 1
        })
    }

    /// Binds the session, which may be a new one, to an owner.
    pub(crate) fn bind(&self, session: SessionId, owner: Arc<dyn MetaService>) {
        self.change(|bond| {
            bond.number += 1;
            (bond.session, bond.owner) = (session, Some(owner));
        });
    }

    /// No other owner will follow the present one.
    pub(crate) fn expect_no_other(&self) {
        self.change(|bond| bond.is_last = true);
    }
}
