//! The thread that restores lost copies of a log or a store.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use base::env::spawn_thread;

/// Interval between attempts to restore a lost copy: the first, and the longest after many failures.
const FIRST: Duration = Duration::from_secs(5);
const MAX: Duration = Duration::from_secs(300);

/// Ends its thread when dropped, after the running attempt.
pub struct Keeper {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    /// Calls `bring_back` repeatedly. It returns the number of copies that are still lost after its attempt.
    pub(crate) fn start(name: &str, bring_back: impl Fn() -> usize + Send + 'static) -> Self {
        let (stop, stopped) = channel();
        let thread = spawn_thread(name, move || keep(&bring_back, &stopped));
        Self { stop: Some(stop), thread: Some(thread) }
    }
}

fn keep(bring_back: &impl Fn() -> usize, stopped: &Receiver<()>) {
    let mut pause = FIRST;
    while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(pause) {
        pause = if bring_back() > 0 { (pause * 2).min(MAX) } else { FIRST };
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
