//! The log of all events of a run, as a hash: two runs of one seed must have the same hash.
//!
//! Every message, every disk operation and every result is one event. The machine loses power *at* an event, so that a
//! seed determines the moment of a crash exactly.

use std::collections::VecDeque;
use std::fmt::{self, Write};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use base::env::Clock;
use base::env::sim::SimFiles;
use tokio::sync::Notify;

use crate::world::WorldClock;

/// Most lines kept for people.
const LINES_KEPT: usize = 400_000;

/// The events of a run; see the module.
pub(crate) struct Trace {
    inner: Mutex<Inner>,
    clock: Arc<WorldClock>,
    /// The files whose power is cut. They report their events to this trace, so it holds only a weak reference.
    files: OnceLock<Weak<SimFiles>>,
    /// Notified when power was cut.
    pub(crate) cut: Notify,
}

struct Inner {
    hash: Fnv,
    events: u64,
    cut_at: Option<u64>,
    is_cut: bool,
    lines: Option<VecDeque<String>>,
}

/// 64-bit FNV-1a: good enough to tell two runs apart, and the same on every machine.
pub(crate) struct Fnv(pub(crate) u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Fnv {
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

impl Write for Fnv {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.add(text.as_bytes());
        Ok(())
    }
}

/// A hash of bytes, taken eight at a time.
pub(crate) fn sum(bytes: &[u8]) -> u64 {
    let mut hash = bytes.len() as u64;
    for word in bytes.chunks(8) {
        let mut eight = [0; 8];
        eight[..word.len()].copy_from_slice(word);
        hash = (hash ^ u64::from_le_bytes(eight)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }
    hash
}

impl Trace {
    pub(crate) fn new(clock: Arc<WorldClock>, keep_lines: bool) -> Self {
        let lines = keep_lines.then(VecDeque::new);
        let inner = Inner { hash: Fnv::default(), events: 0, cut_at: None, is_cut: false, lines };
        Self { inner: Mutex::new(inner), clock, files: OnceLock::new(), cut: Notify::new() }
    }

    pub(crate) fn cut_power_of(&self, files: &Arc<SimFiles>) {
        assert!(self.files.set(Arc::downgrade(files)).is_ok(), "a world has one disk");
    }

    /// Records an event, and cuts the power if it is the chosen one.
    pub(crate) fn event(&self, what: fmt::Arguments<'_>) {
        let now_us = self.clock.boot_ns() / 1000;
        let mut inner = self.inner.lock().expect("no holder of this lock panics");
        inner.events += 1;
        let number = inner.events;
        // Writing to a hash cannot fail.
        let _ = writeln!(inner.hash, "{now_us} {what}");
        if let Some(lines) = &mut inner.lines {
            if lines.len() == LINES_KEPT {
                lines.pop_front();
            }
            lines.push_back(format!("{number} {now_us}us {what}"));
        }
        if inner.cut_at == Some(number) {
            inner.cut_at = None;
            inner.is_cut = true;
            drop(inner);
            if let Some(files) = self.files.get().and_then(Weak::upgrade) {
                files.cut_power();
            }
            self.cut.notify_one();
        }
    }

    /// Cuts the power after this number of further events.
    pub(crate) fn cut_after(&self, events: Option<u64>) {
        let mut inner = self.inner.lock().expect("no holder of this lock panics");
        inner.cut_at = events.map(|events| inner.events + events.max(1));
        inner.is_cut = false;
    }

    /// Whether power was cut in this boot.
    pub(crate) fn is_cut(&self) -> bool {
        self.inner.lock().expect("no holder of this lock panics").is_cut
    }

    /// The hash and number of events so far.
    pub(crate) fn position(&self) -> (u64, u64) {
        let inner = self.inner.lock().expect("no holder of this lock panics");
        (inner.hash.0, inner.events)
    }

    /// The last lines, if they are kept.
    pub(crate) fn lines(&self) -> Vec<String> {
        let inner = self.inner.lock().expect("no holder of this lock panics");
        inner.lines.iter().flatten().cloned().collect()
    }
}
