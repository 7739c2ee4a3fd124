//! Runs the kernel's requests, as far as possible on the thread that reads them.
//!
//! Most requests end in their first poll. A request that must wait is parked. If the event that it waits for happens on
//! one of the kernel's threads, as a group commit does, that thread continues the parked request after answering its
//! own, which saves two context switches. Woken from any other thread, the request continues in the runtime.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use base::env::{after_blocking, with_blocking};
use tokio::runtime::Handle;

type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Waits for a wake-up.
const PARKED: u8 = 0;
/// Is being polled.
const POLLED: u8 = 1;
/// Is being polled, and was woken during the poll.
const WOKEN: u8 = 2;
/// Was woken and will be polled, or has ended.
const TAKEN: u8 = 3;

/// A request under way.
struct Parked {
    state: AtomicU8,
    work: Mutex<Option<Work>>,
    /// Called before the work waits for the first time.
    park: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    runtime: Handle,
}

/// Starts the work on this thread, which may do blocking work if `may_block`. `park` is called before it waits for the first
/// time.
pub(super) fn run(
    runtime: &Handle,
    work: impl Future<Output = ()> + Send + 'static,
    park: impl FnOnce() + Send + 'static,
    may_block: bool,
) {
    let _context = runtime.enter();
    let parked = Arc::new(Parked {
        state: AtomicU8::new(TAKEN),
        work: Mutex::new(Some(Box::pin(work))),
        park: Mutex::new(Some(Box::new(park))),
        runtime: runtime.clone(),
    });
    if may_block { with_blocking(|| parked.poll()) } else { parked.poll() }
}

impl Parked {
    /// Polls the work; the caller has set the state to [`TAKEN`].
    fn poll(self: Arc<Self>) {
        let waker = Waker::from(self.clone());
        let mut slot = self.work.lock().expect("no holder of this lock panics");
        let Some(work) = slot.as_mut() else { return };
        loop {
            self.state.store(POLLED, Ordering::Release);
            if let Poll::Ready(()) = work.as_mut().poll(&mut Context::from_waker(&waker)) {
                self.state.store(TAKEN, Ordering::Release);
                *slot = None;
                return;
            }
            if let Some(park) = self.park.lock().expect("no holder of this lock panics").take() {
                park();
            }
            let parked =
                self.state.compare_exchange(POLLED, PARKED, Ordering::AcqRel, Ordering::Acquire).is_ok();
            if parked {
                return;
            }
        }
    }

    /// Moves the work to the runtime, which has its own wakers.
    fn spawn(&self) {
        let work = self.work.lock().expect("no holder of this lock panics").take();
        if let Some(work) = work {
            self.runtime.spawn(work);
        }
    }
}

impl Wake for Parked {
    fn wake(self: Arc<Self>) {
        let next = |state| match state {
            PARKED => Some(TAKEN),
            POLLED => Some(WOKEN),
            _ => None,
        };
        if self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, next) != Ok(PARKED) {
            return;
        }
        let task = self.clone();
        if after_blocking(move || task.poll()).is_err() {
            self.spawn();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use tokio::sync::oneshot;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap()
    }

    /// Starts work that waits for `gate` and then reports the thread on which it ended.
    fn start(
        runtime: &Handle,
        gate: oneshot::Receiver<()>,
    ) -> std::sync::mpsc::Receiver<std::thread::ThreadId> {
        let (ended, end) = channel();
        run(
            runtime,
            async move {
                let _ = gate.await;
                ended.send(std::thread::current().id()).unwrap();
            },
            || {},
            true,
        );
        end
    }

    #[test]
    fn work_that_another_request_wakes_ends_on_its_thread() {
        let runtime = runtime();
        let (open, gate) = oneshot::channel();
        let end = start(runtime.handle(), gate);
        run(runtime.handle(), async move { open.send(()).unwrap() }, || {}, true);
        assert_eq!(end.try_recv(), Ok(std::thread::current().id()));
    }

    #[test]
    fn work_woken_from_elsewhere_ends_in_the_runtime() {
        let runtime = runtime();
        let (open, gate) = oneshot::channel();
        let end = start(runtime.handle(), gate);
        open.send(()).unwrap();
        assert_ne!(end.recv().unwrap(), std::thread::current().id());
    }

    #[test]
    fn work_that_wakes_itself_is_polled_again() {
        let runtime = runtime();
        let (ended, end) = channel();
        run(
            runtime.handle(),
            async move {
                let mut again = 3;
                std::future::poll_fn(|context| {
                    if again == 0 {
                        return Poll::Ready(());
                    }
                    again -= 1;
                    context.waker().wake_by_ref();
                    Poll::Pending
                })
                .await;
                ended.send(()).unwrap();
            },
            || {},
            true,
        );
        assert_eq!(end.try_recv(), Ok(()));
    }
}
