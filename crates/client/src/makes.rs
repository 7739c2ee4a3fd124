//! Creations whose answers have not come.
//!
//! A creation opens the inode that it makes, but until its answer comes this client does not know of that open. In the
//! meantime others here may find the inode, open and close it; they must not tell the owner that its last handle is
//! gone.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard};

/// Creations under way, by number.
#[derive(Debug, Default)]
pub(crate) struct Makes(Mutex<Numbers>);

#[derive(Debug, Default)]
struct Numbers {
    begun: u64,
    under_way: BTreeSet<u64>,
}

impl Makes {
    /// Begins a creation; it ends when the result is dropped.
    pub(crate) fn begin(&self) -> UnderWay<'_> {
        let mut numbers = self.lock();
        numbers.begun += 1;
        let number = numbers.begun;
        numbers.under_way.insert(number);
        UnderWay { makes: self, number }
    }

    /// The number of creations that have begun.
    pub(crate) fn begun(&self) -> u64 {
        self.lock().begun
    }

    /// Whether one of the first `begun` creations is under way.
    pub(crate) fn is_under_way(&self, begun: u64) -> bool {
        self.lock().under_way.first().is_some_and(|oldest| *oldest <= begun)
    }

    fn lock(&self) -> MutexGuard<'_, Numbers> {
        self.0.lock().expect("no holder of this lock panics")
    }
}

/// A creation under way.
pub(crate) struct UnderWay<'a> {
    makes: &'a Makes,
    number: u64,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.makes.lock().under_way.remove(&self.number);
    }
}
