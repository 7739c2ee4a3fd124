//! Logs locks and calls of this process that have not moved for half a minute, with the stacks of its threads.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use base::env::spawn_thread;
use base::watch::{self, Stuck};
use tokio::runtime::Handle;

use crate::log;

/// A lock or call counts as stuck after this time: no working disk or peer needs that long.
pub(crate) const STUCK_AFTER: Duration = Duration::from_secs(30);
const TICK: Duration = Duration::from_secs(5);
/// Threads of this process.
const TASKS: &str = "/proc/self/task";
/// Limit of threads whose stacks are reported.
const STACKS_MAX: usize = 512;

/// Stops its thread on drop.
pub(crate) struct Watchdog {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Watches this process, and whether the runtime still runs tasks.
    pub(crate) fn start(runtime: Handle) -> Self {
        let (stop, stopped) = channel();
        let thread = spawn_thread("watchdog", move || run(&runtime, &stopped));
        Self { stop: Some(stop), thread: Some(thread) }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn run(runtime: &Handle, stopped: &Receiver<()>) {
    let mut known = BTreeSet::new();
    let mut probe = None;
    while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(TICK) {
        if log::panicked() {
            // The panic hook should have ended the process by now.
            std::process::abort();
        }
        if probe.as_ref().is_none_or(tokio::task::JoinHandle::is_finished) {
            let call = watch::call("a task of the runtime, which has no thread free");
            probe = Some(runtime.spawn(async move { drop(call) }));
        }
        report(&watch::stuck(STUCK_AFTER), &mut known);
    }
}

/// Logs what has become stuck since the last report, with the stacks of all threads, and what is no longer stuck.
fn report(stuck: &[Stuck], known: &mut BTreeSet<String>) {
    let fresh: Vec<&Stuck> = stuck.iter().filter(|stuck| !known.contains(&stuck.key)).collect();
    for stuck in &fresh {
        tracing::error!("{stuck}");
    }
    if !fresh.is_empty() {
        tracing::error!("threads of this process:\n  {}", stacks().join("\n  "));
    }
    let keys: BTreeSet<String> = stuck.iter().map(|stuck| stuck.key.clone()).collect();
    let moved = known.difference(&keys).count();
    if moved > 0 {
        tracing::warn!(moved, still = keys.len(), "what was stuck has moved");
    }
    *known = keys;
}

/// What `status` says about locks and calls that have not moved for this time, each with the stack of its thread. Waits for
/// none of them.
pub(crate) fn problems(longer_than: Duration) -> Vec<String> {
    let stuck = watch::stuck(longer_than);
    stuck.iter().map(|stuck| format!("{stuck}; {}", stack(&task(stuck.thread)))).collect()
}

/// All threads of this process and the kernel functions they wait in, innermost first.
pub(crate) fn stacks() -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(TASKS) else { return Vec::new() };
    let threads = entries.filter_map(|entry| Some(entry.ok()?.path()));
    threads.take(STACKS_MAX).map(|thread| stack(&thread)).collect()
}

fn task(thread: u32) -> PathBuf {
    Path::new(TASKS).join(thread.to_string())
}

/// The name of a thread and the kernel functions it waits in, from its directory in /proc.
fn stack(thread: &Path) -> String {
    let text = |name: &str| text_of(&thread.join(name)).unwrap_or_default();
    let id = thread.file_name().unwrap_or_default().to_string_lossy();
    let frames = text("stack");
    let frames = frames.lines().map(|line| line.split_whitespace().last().unwrap_or_default());
    let frames: Vec<&str> = frames.map(|frame| frame.split('+').next().unwrap_or_default()).collect();
    let place = if frames.is_empty() { text("wchan") } else { frames.join(" < ") };
    format!("thread={id} name={} in {place}", text("comm"))
}

/// Files in /proc have no length to read by.
fn text_of(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    let file = rustix::fs::open(path, rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty())?;
    File::from(file).read_to_string(&mut text)?;
    Ok(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use base::watch::Lock;

    use super::*;

    #[test]
    fn stacks_name_every_thread() {
        let (stop, stopped) = channel::<()>();
        let (start, started) = channel();
        let thread = spawn_thread("waits-here", move || start.send(()).is_ok() && stopped.recv().is_err());
        started.recv().unwrap();
        let text = stacks();
        assert!(text.iter().any(|line| line.contains("waits-here")), "{text:?}");
        drop(stop);
        assert!(thread.join().unwrap());
    }

    #[test]
    fn status_names_a_stuck_lock_with_its_thread_and_who_waits() {
        let lock = Arc::new(Lock::new("a ledger's owner", ()));
        let (stop, stopped) = channel::<()>();
        let (start, started) = channel();
        let held = lock.clone();
        let holder = spawn_thread("holds-it", move || {
            let _held = held.lock();
            start.send(()).is_ok() && stopped.recv().is_err()
        });
        started.recv().unwrap();
        let waiter = spawn_thread("waits-for-it", move || drop(lock.lock()));
        let named = || problems(Duration::ZERO).into_iter().find(|text| text.contains("a ledger's owner"));
        while !named().is_some_and(|text| text.contains("waiting=1")) {
            std::thread::yield_now();
        }
        let text = named().unwrap();
        assert!(text.starts_with("the lock of a ledger's owner has not moved for"), "{text}");
        assert!(text.contains("watchdog.rs:") && text.contains("name=holds-it in "), "{text}");
        assert_eq!(problems(STUCK_AFTER), [""; 0]);
        drop(stop);
        assert!(holder.join().unwrap());
        waiter.join().unwrap();
    }
}
