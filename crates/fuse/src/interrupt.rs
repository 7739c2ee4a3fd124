//! Requests that wait, and signals to their programs.
//!
//! The kernel tells of any signal, once per request. A program expects EINTR from few calls: waits for locks get it for any
//! signal. All others get it only when the program is about to die; otherwise it would never die, for the kernel waits for
//! the reply. The work itself goes on: a half-done change would be worse.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use tokio::sync::Notify;

use crate::channel::Channel;

/// How often a program that got a signal is looked at: another signal, which may be deadly, is not announced.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// Interrupts of requests that are not registered: not yet, or not any more.
const EARLY_MAX: usize = 256;

struct Parked {
    channel: Arc<Channel>,
    pid: u32,
    /// Gets EINTR for any signal.
    cancel: Option<Arc<Notify>>,
}

#[derive(Default)]
struct State {
    parked: HashMap<u64, Parked>,
    /// Parked requests whose programs got a signal.
    watched: HashSet<u64>,
    /// Answered while the work goes on.
    answered: HashSet<u64>,
    early: VecDeque<u64>,
    has_ended: bool,
}

/// See the module.
#[derive(Default)]
pub struct Interrupts {
    state: Mutex<State>,
    /// Entries of `parked` and `answered`.
    count: AtomicUsize,
    changed: Condvar,
}

impl Interrupts {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A request waits. Its reply must not have been sent.
    pub(crate) fn park(&self, unique: u64, pid: u32, channel: &Arc<Channel>, cancel: Option<Arc<Notify>>) {
        let mut state = self.state();
        if let Some(parked) = state.parked.get_mut(&unique) {
            parked.cancel = cancel.or(parked.cancel.take());
        } else {
            state.parked.insert(unique, Parked { channel: channel.clone(), pid, cancel });
            self.count.fetch_add(1, Ordering::SeqCst);
        }
        if let Some(at) = state.early.iter().position(|early| *early == unique) {
            state.early.remove(at);
            self.interrupted_locked(&mut state, unique);
        }
    }

    /// The work of a request has ended. Returns whether it may be answered.
    pub(crate) fn end(&self, unique: u64) -> bool {
        if self.count.load(Ordering::SeqCst) == 0 {
            return true;
        }
        let mut state = self.state();
        let was_parked = state.parked.remove(&unique).is_some();
        let was_answered = state.answered.remove(&unique);
        if was_parked || was_answered {
            self.count.fetch_sub(1, Ordering::SeqCst);
        }
        !was_answered
    }

    /// The program of a request got a signal.
    pub(crate) fn interrupted(&self, unique: u64) {
        self.interrupted_locked(&mut self.state(), unique);
    }

    fn interrupted_locked(&self, state: &mut State, unique: u64) {
        match state.parked.get(&unique) {
            Some(Parked { cancel: Some(cancel), .. }) => cancel.notify_one(),
            Some(_) => {
                state.watched.insert(unique);
                self.changed.notify_all();
            }
            None => {
                if state.early.len() == EARLY_MAX {
                    state.early.pop_front();
                }
                state.early.push_back(unique);
            }
        }
    }

    /// Answers requests of dying programs, until the session ends. Needs a thread.
    pub(crate) fn watch(&self) {
        let mut state = self.state();
        while !state.has_ended {
            let watched: Vec<u64> = state.watched.iter().copied().collect();
            for unique in watched {
                match state.parked.get(&unique) {
                    None => drop(state.watched.remove(&unique)),
                    Some(parked) if is_dying(parked.pid) => {
                        let channel = parked.channel.clone();
                        state.parked.remove(&unique);
                        state.watched.remove(&unique);
                        state.answered.insert(unique);
                        // The kernel has forgotten the request if the mount is gone.
                        let _ = channel.answer(unique, Some(Errno::INTR), &[]);
                    }
                    Some(_) => {}
                }
            }
            let is_idle = state.watched.is_empty();
            state = match is_idle {
                true => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                false => {
                    let waited = self.changed.wait_timeout(state, LOOK_AGAIN);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// The session has ended.
    pub(crate) fn end_all(&self) {
        self.state().has_ended = true;
        self.changed.notify_all();
    }
}

/// Whether a thread is about to die of a signal, or is gone.
fn is_dying(pid: u32) -> bool {
    // The kernel's own, or one of another pid namespace: nothing is known.
    if pid == 0 {
        return false;
    }
    match crate::session::read_text(&format!("/proc/{pid}/status")) {
        Ok(status) => has_deadly_signal(&status),
        Err(error) => error == Errno::NOENT || error == Errno::SRCH,
    }
}

/// Whether a pending signal ends the process, by the text of `/proc/PID/status`.
fn has_deadly_signal(status: &str) -> bool {
    const fn bit(signal: i32) -> u64 {
        1 << (signal - 1)
    }
    /// By default these do not end a process.
    const HARMLESS: u64 = bit(libc::SIGCHLD)
        | bit(libc::SIGCONT)
        | bit(libc::SIGSTOP)
        | bit(libc::SIGTSTP)
        | bit(libc::SIGTTIN)
        | bit(libc::SIGTTOU)
        | bit(libc::SIGURG)
        | bit(libc::SIGWINCH);
    let mask = |name: &str| {
        let text = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        text.and_then(|text| u64::from_str_radix(text.trim(), 16).ok()).unwrap_or(0)
    };
    let pending = mask("SigPnd") | mask("ShdPnd");
    let harmless = mask("SigBlk") | mask("SigIgn") | mask("SigCgt") | HARMLESS;
    // The kernel gives SIGKILL to each thread of a process that another signal ends.
    pending & bit(libc::SIGKILL) != 0 || pending & !harmless != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(pending: u64, blocked: u64, ignored: u64, caught: u64) -> String {
        format!(
            "Name:\tsh\nSigQ:\t1/2\nSigPnd:\t{:016x}\nShdPnd:\t{pending:016x}\nSigBlk:\t{blocked:016x}\n\
             SigIgn:\t{ignored:016x}\nSigCgt:\t{caught:016x}\n",
            0
        )
    }

    #[test]
    fn only_signals_that_end_the_process_count() {
        let term = 1u64 << (libc::SIGTERM - 1);
        let kill = 1u64 << (libc::SIGKILL - 1);
        assert!(has_deadly_signal(&status(term, 0, 0, 0)));
        assert!(!has_deadly_signal(&status(term, term, 0, 0)));
        assert!(!has_deadly_signal(&status(term, 0, term, 0)));
        assert!(!has_deadly_signal(&status(term, 0, 0, term)));
        assert!(has_deadly_signal(&status(kill, u64::MAX, u64::MAX, u64::MAX)));
        assert!(!has_deadly_signal(&status(1 << (libc::SIGCHLD - 1), 0, 0, 0)));
        assert!(!has_deadly_signal(&status(0, 0, 0, 0)));
        assert!(!has_deadly_signal(""));
    }

    #[test]
    fn a_thread_that_is_gone_is_dying() {
        assert!(!is_dying(std::process::id()));
        assert!(!is_dying(0));
        assert!(is_dying(u32::MAX / 4));
    }

    #[test]
    fn an_interrupt_may_come_before_its_request_is_registered() {
        let (interrupts, cancel) = (Arc::new(Interrupts::default()), Arc::new(Notify::new()));
        let channel = Channel::closed(interrupts.clone());
        interrupts.interrupted(7);
        interrupts.park(7, 1, &channel, Some(cancel.clone()));
        let notified = cancel.notified();
        tokio::pin!(notified);
        assert!(notified.as_mut().enable());
        assert!(interrupts.end(7) && interrupts.end(7));
    }

    #[test]
    fn a_request_that_was_answered_early_is_not_answered_again() {
        let interrupts = Arc::new(Interrupts::default());
        let channel = Channel::closed(interrupts.clone());
        // This program is gone.
        interrupts.park(7, u32::MAX / 4, &channel, None);
        interrupts.park(8, std::process::id(), &channel, None);
        interrupts.interrupted(7);
        interrupts.interrupted(8);
        let watching = interrupts.clone();
        let watcher = base::env::spawn_thread("watch", move || watching.watch());
        while !interrupts.state().answered.contains(&7) {
            std::thread::yield_now();
        }
        assert!(!interrupts.end(7) && interrupts.end(8));
        interrupts.end_all();
        watcher.join().unwrap();
        assert_eq!(interrupts.count.load(Ordering::SeqCst), 0);
    }
}
