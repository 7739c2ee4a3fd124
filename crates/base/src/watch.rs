//! Lists of held locks and running calls, so that a watchdog can report those that have not moved for long.
//!
//! No decision depends on them, so they need no simulated clock. The lists are locked for a few instructions only: a
//! query for stuck locks never waits for a stuck lock.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::panic::Location;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustix::time::ClockId;

static LOCKS: Mutex<Vec<Weak<LockState>>> = Mutex::new(Vec::new());
static CALLS: Mutex<BTreeMap<u64, Begun>> = Mutex::new(BTreeMap::new());
static NEXT_CALL: AtomicU64 = AtomicU64::new(0);

/// A lock or call that has not moved for long.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stuck {
    /// Identifies it as long as it is stuck.
    pub key: String,
    /// The lock or the call.
    pub what: String,
    /// How long it has been stuck, in seconds.
    pub for_s: u64,
    /// The thread that holds the lock or began the call.
    pub thread: u32,
    /// The place in the source where it was taken or begun.
    pub at: String,
    /// Threads that wait for the lock.
    pub waiting: u32,
}

impl std::fmt::Display for Stuck {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { what, for_s, thread, at, waiting, .. } = self;
        write!(out, "{what} has not moved for {for_s} s: thread={thread} at={at}")?;
        if *waiting > 0 { write!(out, " waiting={waiting}") } else { Ok(()) }
    }
}

#[derive(Debug, Clone, Copy)]
struct Begun {
    what: &'static str,
    since_ns: u64,
    thread: u32,
    at: &'static Location<'static>,
}

impl Begun {
    fn now(what: &'static str, at: &'static Location<'static>) -> Self {
        Self { what, since_ns: now_ns(), thread: this_thread(), at }
    }

    fn stuck(&self, key: String, what: String, waiting: u32, longer_than: Duration) -> Option<Stuck> {
        let ns = now_ns().saturating_sub(self.since_ns);
        if ns < longer_than.as_nanos() as u64 {
            return None;
        }
        let at = format!("{}:{}", self.at.file(), self.at.line());
        Some(Stuck { key, what, for_s: ns / 1_000_000_000, thread: self.thread, at, waiting })
    }
}

struct LockState {
    name: String,
    held: Mutex<Option<Begun>>,
    waiting: AtomicU32,
}

/// A mutex that the watchdog lists.
pub struct Lock<T> {
    state: Arc<LockState>,
    value: Mutex<T>,
}

impl<T> Lock<T> {
    /// A lock that is reported under this name.
    pub fn new(name: &str, value: T) -> Self {
        let state =
            Arc::new(LockState { name: name.to_owned(), held: Mutex::new(None), waiting: AtomicU32::new(0) });
        let mut locks = entered(&LOCKS);
        locks.retain(|lock| lock.strong_count() > 0);
        locks.push(Arc::downgrade(&state));
        Self { state, value: Mutex::new(value) }
    }

    /// Waits for the lock and takes it.
    ///
    /// # Panics
    /// If a holder panicked.
    #[track_caller]
    pub fn lock(&self) -> Guard<'_, T> {
        let at = Location::caller();
        let value = match self.value.try_lock() {
            Ok(value) => value,
            Err(_) => {
                self.state.waiting.fetch_add(1, Ordering::Relaxed);
                let value = self.value.lock();
                self.state.waiting.fetch_sub(1, Ordering::Relaxed);
                value.expect("no holder of this lock panics")
            }
        };
        *entered(&self.state.held) = Some(Begun::now("lock", at));
        Guard { value, state: &self.state }
    }
}

/// Holds a lock until it is dropped.
pub struct Guard<'a, T> {
    value: MutexGuard<'a, T>,
    state: &'a LockState,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        *entered(&self.state.held) = None;
    }
}

/// Lists a call until it is dropped.
#[derive(Debug)]
pub struct Call {
    id: u64,
}

/// Lists a call that should end within seconds. `what` describes it: the action and the kind of its object.
#[track_caller]
pub fn call(what: &'static str) -> Call {
    let id = NEXT_CALL.fetch_add(1, Ordering::Relaxed);
    entered(&CALLS).insert(id, Begun::now(what, Location::caller()));
    Call { id }
}

impl Drop for Call {
    fn drop(&mut self) {
        entered(&CALLS).remove(&self.id);
    }
}

/// Locks held and calls running for at least `longer_than`.
pub fn stuck(longer_than: Duration) -> Vec<Stuck> {
    let locks: Vec<Arc<LockState>> = entered(&LOCKS).iter().filter_map(Weak::upgrade).collect();
    let locks = locks.iter().filter_map(|lock| {
        let held = (*entered(&lock.held))?;
        let waiting = lock.waiting.load(Ordering::Relaxed);
        let key = format!("{} {}", lock.name, held.since_ns);
        held.stuck(key, format!("the lock of {}", lock.name), waiting, longer_than)
    });
    let mut found: Vec<Stuck> = locks.collect();
    let calls: Vec<(u64, Begun)> = entered(&CALLS).iter().map(|(id, call)| (*id, *call)).collect();
    found.extend(calls.iter().filter_map(|(id, call)| {
        call.stuck(format!("call {id}"), format!("\"{}\"", call.what), 0, longer_than)
    }));
    found
}

/// Locks a list even if a holder panicked: the lists are consistent after every instruction.
fn entered<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A cheap clock, a few milliseconds off.
fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(ClockId::MonotonicCoarse);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// The id of this thread in `/proc/self/task`.
fn this_thread() -> u32 {
    thread_local! {
        static ID: u32 = rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs();
    }
    ID.with(|id| *id)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(what: &str) -> Vec<Stuck> {
        stuck(Duration::ZERO).into_iter().filter(|stuck| stuck.what.contains(what)).collect()
    }

    #[test]
    fn a_lock_is_listed_while_it_is_held() {
        let lock = Lock::new("test lock one", 1);
        assert_eq!(found("test lock one"), []);
        let held = lock.lock();
        let listed = found("test lock one");
        assert_eq!((listed.len(), listed[0].thread), (1, this_thread()));
        assert!(listed[0].at.contains("watch.rs"), "{}", listed[0]);
        drop(held);
        assert_eq!(found("test lock one"), []);
    }

    #[test]
    fn threads_that_wait_for_a_lock_are_counted() {
        let lock = Lock::new("test lock two", 1);
        let held = lock.lock();
        std::thread::scope(|scope| {
            scope.spawn(|| drop(lock.lock()));
            while found("test lock two")[0].waiting == 0 {
                std::thread::yield_now();
            }
            drop(held);
        });
        assert_eq!(found("test lock two"), []);
    }

    #[test]
    fn a_call_is_listed_until_it_ends() {
        let running = call("test call");
        assert_eq!(found("test call").len(), 1);
        assert!(stuck(Duration::from_secs(30)).iter().all(|stuck| !stuck.what.contains("test call")));
        drop(running);
        assert_eq!(found("test call"), []);
    }
}
