//! Bytes written but not yet durable, of one file.
//!
//! Runs never overlap and never cross a *window*, the largest extent of the filesystem's profile: a full window
//! becomes one extent, so sequential writers get full stripes.

use std::collections::BTreeMap;

use bytes::Bytes;

/// Runs that are on average shorter than this part of a window were not written sequentially.
const SCATTERED: u64 = 8;

/// Runs of written bytes by file offset.
#[derive(Debug, Default)]
pub(crate) struct Dirty {
    runs: BTreeMap<u64, Vec<u8>>,
    bytes: u64,
    changes: u64,
}

/// Runs on their way to drives, by file offset. They do not overlap.
#[derive(Debug, Default)]
pub(crate) struct Flushing {
    runs: BTreeMap<u64, Bytes>,
    bytes: u64,
}

impl Flushing {
    pub(crate) fn new(runs: BTreeMap<u64, Bytes>) -> Self {
        let bytes = runs.values().map(|run| run.len() as u64).sum();
        Self { runs, bytes }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn runs(&self) -> &BTreeMap<u64, Bytes> {
        &self.runs
    }

    /// The end of the last run.
    pub(crate) fn end(&self) -> u64 {
        self.runs.last_key_value().map_or(0, |(off, run)| off + run.len() as u64)
    }

    /// Removes the run that begins at `off`, because it is durable. Returns its length, or 0.
    pub(crate) fn arrived(&mut self, off: u64) -> u64 {
        let len = self.runs.remove(&off).map_or(0, |run| run.len() as u64);
        self.bytes -= len;
        len
    }

    /// The bytes in `[from, to)`, in order.
    pub(crate) fn slices(&self, from: u64, to: u64) -> impl Iterator<Item = (u64, Bytes)> {
        let first = self.runs.range(..from).next_back().map_or(from, |(start, _)| *start);
        self.runs.range(first..to.max(first)).filter_map(move |(off, run)| {
            let (start, end) = ((*off).max(from), (off + run.len() as u64).min(to));
            (start < end).then(|| (start, run.slice((start - off) as usize..(end - off) as usize)))
        })
    }
}

impl Dirty {
    /// Bytes held.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the bytes are in many short runs, unlike those of a sequential writer.
    pub(crate) fn is_scattered(&self, window: u64) -> bool {
        self.bytes < self.runs.len() as u64 * (window / SCATTERED)
    }

    /// Counts changes of the content that are made here.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    /// Counts a change of the content that the owner made for this client.
    pub(crate) fn remapped(&mut self) {
        self.changes += 1;
    }

    /// The end of the last run.
    pub(crate) fn end(&self) -> u64 {
        self.runs.last_key_value().map_or(0, |(off, run)| off + run.len() as u64)
    }

    /// Writes bytes over those that are there. Returns whether a window is full now.
    pub(crate) fn write(&mut self, off: u64, bytes: &[u8], window: u64) -> bool {
        self.changes += 1;
        let mut full = false;
        let (mut off, mut rest) = (off, bytes);
        while !rest.is_empty() {
            let room = window - off % window;
            let (part, later) = rest.split_at(rest.len().min(room as usize));
            full |= self.write_in_window(off, part, window);
            off += part.len() as u64;
            rest = later;
        }
        full
    }

    fn write_in_window(&mut self, off: u64, part: &[u8], window: u64) -> bool {
        let window_start = off - off % window;
        let before = self.runs.range_mut(window_start..=off).next_back();
        let start = match before {
            Some((start, run)) if start + run.len() as u64 >= off => {
                let at = (off - start) as usize;
                let overlap = part.len().min(run.len() - at);
                run[at..at + overlap].copy_from_slice(&part[..overlap]);
                extend(run, &part[overlap..], window);
                self.bytes += (part.len() - overlap) as u64;
                *start
            }
            _ => {
                self.runs.insert(off, part.to_vec());
                self.bytes += part.len() as u64;
                off
            }
        };
        self.absorb_following(start, window_start + window, window);
        self.runs[&start].len() as u64 == window
    }

    /// Joins the run at `start` with the runs that it reaches.
    fn absorb_following(&mut self, start: u64, window_end: u64, window: u64) {
        loop {
            let end = start + self.runs[&start].len() as u64;
            let Some((&next, _)) = self.runs.range(start + 1..window_end).next() else { return };
            if next > end {
                return;
            }
            let following = self.runs.remove(&next).expect("it was just found");
            let covered = ((end - next) as usize).min(following.len());
            self.bytes -= covered as u64;
            let run = self.runs.get_mut(&start).expect("the caller's run");
            extend(run, &following[covered..], window);
        }
    }

    /// Forgets bytes at and after `size`.
    pub(crate) fn truncate(&mut self, size: u64) {
        self.discard(size, u64::MAX);
    }

    /// Forgets bytes in `[from, to)`.
    pub(crate) fn discard(&mut self, from: u64, to: u64) {
        self.changes += 1;
        let reaching = self.runs.range(..from).next_back().map(|(start, _)| *start);
        let first = reaching.unwrap_or(from);
        let touched: Vec<u64> = self.runs.range(first..to).map(|(start, _)| *start).collect();
        for start in touched {
            let run = self.runs.remove(&start).expect("it was just found");
            let end = start + run.len() as u64;
            self.bytes -= run.len() as u64;
            for (part_from, part_to) in [(start, end.min(from)), (start.max(to), end)] {
                if part_from < part_to {
                    let part = run[(part_from - start) as usize..(part_to - start) as usize].to_vec();
                    self.bytes += part.len() as u64;
                    self.runs.insert(part_from, part);
                }
            }
        }
    }

    /// Takes everything.
    pub(crate) fn take_all(&mut self) -> BTreeMap<u64, Bytes> {
        self.bytes = 0;
        std::mem::take(&mut self.runs).into_iter().map(|(off, run)| (off, Bytes::from(run))).collect()
    }

    /// Takes full windows only.
    pub(crate) fn take_full(&mut self, window: u64) -> BTreeMap<u64, Bytes> {
        let full: Vec<u64> =
            self.runs.iter().filter(|(_, run)| run.len() as u64 == window).map(|(off, _)| *off).collect();
        let mut taken = BTreeMap::new();
        for off in full {
            let run = self.runs.remove(&off).expect("it was just found");
            self.bytes -= run.len() as u64;
            taken.insert(off, Bytes::from(run));
        }
        taken
    }

    /// Puts back runs that could not be made durable, below newer writes.
    pub(crate) fn put_back(&mut self, runs: &BTreeMap<u64, Bytes>, window: u64) {
        let newer = std::mem::take(&mut self.runs);
        self.bytes = 0;
        for (off, run) in runs {
            self.write(*off, run, window);
        }
        for (off, run) in newer {
            self.write(off, &run, window);
        }
    }

    /// Copies of the bytes in `[from, to)`, in order.
    pub(crate) fn copies(&self, from: u64, to: u64) -> impl Iterator<Item = (u64, Bytes)> {
        let first = self.runs.range(..from).next_back().map_or(from, |(start, _)| *start);
        self.runs.range(first..to).filter_map(move |(off, run)| {
            let (start, end) = ((*off).max(from), (off + run.len() as u64).min(to));
            let part = || Bytes::copy_from_slice(&run[(start - off) as usize..(end - off) as usize]);
            (start < end).then(|| (start, part()))
        })
    }
}

/// Appends, with capacity for at most a window, so that uncounted memory never exceeds the counted.
fn extend(run: &mut Vec<u8>, part: &[u8], window: u64) {
    let len = run.len() + part.len();
    if len > run.capacity() {
        let capacity = len.next_power_of_two().min(window as usize).max(len);
        run.reserve_exact(capacity - run.len());
    }
    run.extend_from_slice(part);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WINDOW: u64 = 16;

    #[derive(Debug, Clone)]
    enum Step {
        Write(u64, Vec<u8>),
        Discard(u64, u64),
        TakeFull,
        TakeAll,
        FailedFlush,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            8 => (0..80u64, proptest::collection::vec(any::<u8>(), 1..40))
                .prop_map(|(off, bytes)| Step::Write(off, bytes)),
            2 => (0..80u64, 0..40u64).prop_map(|(from, len)| Step::Discard(from, from + len)),
            1 => Just(Step::TakeFull),
            1 => Just(Step::TakeAll),
            1 => Just(Step::FailedFlush),
        ]
    }

    proptest! {
        #[test]
        fn runs_hold_the_written_bytes(steps in proptest::collection::vec(step(), 0..40)) {
            let mut dirty = Dirty::default();
            let mut model: BTreeMap<u64, u8> = BTreeMap::new();
            for step in steps {
                match step {
                    Step::Write(off, bytes) => {
                        dirty.write(off, &bytes, WINDOW);
                        model.extend((off..).zip(bytes));
                    }
                    Step::Discard(from, to) => {
                        dirty.discard(from, to);
                        model.retain(|at, _| *at < from || *at >= to);
                    }
                    Step::TakeFull => for (off, run) in dirty.take_full(WINDOW) {
                        prop_assert_eq!((off % WINDOW, run.len() as u64), (0, WINDOW));
                        for (at, byte) in (off..).zip(run) {
                            prop_assert_eq!(model.remove(&at), Some(byte));
                        }
                    }
                    Step::TakeAll => {
                        let mut flushing = Flushing::new(dirty.take_all());
                        let bytes_in = |flushing: &Flushing, from, to| -> BTreeMap<u64, u8> {
                            flushing.slices(from, to).flat_map(|(off, run)| (off..).zip(run)).collect()
                        };
                        prop_assert_eq!(&bytes_in(&flushing, 0, u64::MAX), &model);
                        prop_assert_eq!(flushing.bytes(), model.len() as u64);
                        prop_assert_eq!(flushing.end(), model.last_key_value().map_or(0, |(at, _)| at + 1));
                        for (from, to) in [(0, 0), (5, 6), (17, 43), (43, 17), (60, 200)] {
                            let part = model.iter().filter(|(at, _)| (from..to).contains(*at));
                            prop_assert_eq!(bytes_in(&flushing, from, to), part.map(|(at, byte)| (*at, *byte)).collect());
                        }
                        let offs: Vec<u64> = flushing.runs().keys().copied().collect();
                        let arrived: u64 = offs.into_iter().map(|off| flushing.arrived(off)).sum();
                        prop_assert_eq!((arrived, flushing.bytes(), flushing.arrived(3)), (model.len() as u64, 0, 0));
                        model.clear();
                    }
                    Step::FailedFlush => {
                        let taken = dirty.take_all();
                        dirty.write(3, &[1, 2, 3], WINDOW);
                        dirty.put_back(&taken, WINDOW);
                        model.extend([(3, 1), (4, 2), (5, 3)]);
                    }
                }
                prop_assert_eq!(dirty.bytes(), model.len() as u64);
                prop_assert_eq!(dirty.end(), model.last_key_value().map_or(0, |(at, _)| at + 1));
                for (off, run) in &dirty.runs {
                    prop_assert!(run.capacity() as u64 <= WINDOW);
                    prop_assert!(off / WINDOW == (off + run.len() as u64 - 1) / WINDOW && !run.is_empty());
                }
                let seen: BTreeMap<u64, u8> = dirty.copies(10, 60).flat_map(|(off, run)| (off..).zip(run)).collect();
                let expected: BTreeMap<u64, u8> = model.range(10..60).map(|(at, byte)| (*at, *byte)).collect();
                prop_assert_eq!(seen, expected);
            }
        }
    }
}
