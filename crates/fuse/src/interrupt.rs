//! Requests that wait, and signals to their programs.
//!
//! The kernel tells of any signal, once per request. A program expects EINTR from few calls: waits for locks get it for any
//! signal. All others get it only when the program is about to die; otherwise it would never die, for the kernel waits for
//! the reply. The work itself goes on: a half-done change would be worse.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use tokio::sync::Notify;

use crate::channel::{Channel, Parts};

/// Interrupts of requests that are not known: not yet, or not any more.
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
    /// Requests under way whose programs got a signal.
    watched: HashSet<u64>,
    /// Answered while the work goes on.
    answered: HashSet<u64>,
    early: VecDeque<u64>,
    /// The channels whose threads may work on a request that is not parked.
    channels: Vec<Arc<Channel>>,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Interrupts {
    state: Mutex<State>,
    /// Entries of `parked` and `answered`, or one more.
    count: AtomicUsize,
}

impl Interrupts {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread reads requests from this channel.
    pub(crate) fn add_channel(&self, channel: Arc<Channel>) {
        self.state().channels.push(channel);
    }

    /// The session has ended. The channels refer to this.
    pub(crate) fn drop_channels(&self) {
        self.state().channels.clear();
    }

    /// A request waits. Its reply must not have been sent.
    pub(crate) fn park(&self, unique: u64, pid: u32, channel: &Arc<Channel>, cancel: Option<Arc<Notify>>) {
        let mut state = self.state();
        channel.leave(unique);
        if state.answered.contains(&unique) {
            cancel.into_iter().for_each(|cancel| cancel.notify_one());
            return;
        }
        if let Some(parked) = state.parked.get_mut(&unique) {
            parked.cancel = cancel.or(parked.cancel.take());
        } else {
            state.parked.insert(unique, Parked { channel: channel.clone(), pid, cancel });
            self.count.fetch_add(1, Ordering::SeqCst);
        }
        if let Some(at) = state.early.iter().position(|early| *early == unique) {
            state.early.remove(at);
            interrupt(&mut state, unique);
        }
    }

    /// The work of a request has ended. Returns whether it may be answered.
    pub(crate) fn end(&self, unique: u64, channel: &Channel) -> bool {
        // In this order: `look` counts first, and looks at the channel then.
        channel.leave(unique);
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
        interrupt(&mut self.state(), unique);
    }

    /// Whether [`Interrupts::look`] must be called again soon: a second signal, which may be deadly, is not announced.
    pub(crate) fn is_watching(&self) -> bool {
        !self.state().watched.is_empty()
    }

    /// Answers requests of dying programs.
    pub(crate) fn look(&self) {
        let mut state = self.state();
        let watched: Vec<u64> = state.watched.iter().copied().collect();
        for unique in watched {
            let parked = state.parked.get(&unique).map(|parked| (parked.channel.clone(), parked.pid));
            let is_parked = parked.is_some();
            let Some((channel, pid)) = parked.or_else(|| serving(&state, unique)) else {
                state.watched.remove(&unique);
                continue;
            };
            if !is_dying(pid) {
                continue;
            }
            state.watched.remove(&unique);
            if is_parked {
                state.parked.remove(&unique);
            } else {
                self.count.fetch_add(1, Ordering::SeqCst);
                if channel.serves(unique).is_none() {
                    // It was answered in this moment.
                    self.count.fetch_sub(1, Ordering::SeqCst);
                    continue;
                }
            }
            state.answered.insert(unique);
            // The kernel has forgotten the request if the mount is gone.
            let _ = channel.answer(unique, Some(Errno::INTR), Parts::Slices(&[]));
        }
    }
}

/// The channel whose thread works on a request, and the process that sent it.
fn serving(state: &State, unique: u64) -> Option<(Arc<Channel>, u32)> {
    state.channels.iter().find_map(|channel| Some((channel.clone(), channel.serves(unique)?)))
}

fn interrupt(state: &mut State, unique: u64) {
    match state.parked.get(&unique) {
        Some(Parked { cancel: Some(cancel), .. }) => cancel.notify_one(),
        Some(_) => drop(state.watched.insert(unique)),
        None if serving(state, unique).is_some() => {
            state.watched.insert(unique);
            // It may be parked with the wish to hear of any signal.
            note_early(state, unique);
        }
        None => note_early(state, unique),
    }
}

fn note_early(state: &mut State, unique: u64) {
    if state.early.len() == EARLY_MAX {
        state.early.pop_front();
    }
    state.early.push_back(unique);
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
        assert!(interrupts.end(7, &channel) && interrupts.end(7, &channel));
        assert_eq!(interrupts.count.load(Ordering::SeqCst), 0);
    }

    /// A process id that no process has.
    const GONE: u32 = u32::MAX / 4;

    #[test]
    fn a_request_that_was_answered_early_is_not_answered_again() {
        let interrupts = Arc::new(Interrupts::default());
        let channel = Channel::closed(interrupts.clone());
        interrupts.add_channel(channel.clone());
        interrupts.park(7, GONE, &channel, None);
        interrupts.park(8, std::process::id(), &channel, None);
        // Its thread is busy with it, and parks it later.
        channel.begin(9, GONE);
        for unique in [7, 8, 9] {
            interrupts.interrupted(unique);
        }
        interrupts.look();
        assert!(interrupts.is_watching(), "8 is alive");
        interrupts.park(9, GONE, &channel, None);
        assert!(!interrupts.end(7, &channel) && interrupts.end(8, &channel) && !interrupts.end(9, &channel));
        interrupts.look();
        assert!(!interrupts.is_watching());
        assert_eq!(interrupts.count.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_request_that_is_answered_in_time_is_forgotten() {
        let interrupts = Arc::new(Interrupts::default());
        let channel = Channel::closed(interrupts.clone());
        interrupts.add_channel(channel.clone());
        channel.begin(9, GONE);
        interrupts.interrupted(9);
        assert!(interrupts.end(9, &channel));
        interrupts.look();
        assert!(!interrupts.is_watching() && interrupts.state().answered.is_empty());
    }
}
