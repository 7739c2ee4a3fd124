//! The allowed contents of one file after a crash, given the acknowledged operations.
//!
//! The file is divided into pieces. Each has the versions that its bytes may have, oldest first; readers see the last
//! version as long as nothing crashes. An fsync leaves only the last version. Beyond the durable size, a piece may also
//! be unwritten.

use std::collections::BTreeMap;
use std::ops::Range;

use super::content::{self, FileId, Generation, SECTOR_BYTES, UNWRITTEN};

/// The possible states of one file.
#[derive(Debug, Clone)]
pub(crate) struct FileState {
    pub(crate) id: FileId,
    /// Modes that it may have after a crash, oldest first; readers see the last one now.
    modes: Vec<u32>,
    /// The size that readers see now.
    pub(crate) size: u64,
    /// Smallest size after a crash. The largest is `size`: unsynced writes only make a file longer.
    size_durable: u64,
    /// Pieces by their start, without gaps, from 0 to `size`.
    pieces: BTreeMap<u64, Piece>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Piece {
    end: u64,
    versions: Vec<Generation>,
}

impl FileState {
    pub(crate) fn new(id: FileId, mode: u32) -> Self {
        Self { id, modes: vec![mode], size: 0, size_durable: 0, pieces: BTreeMap::new() }
    }

    /// A write that need not survive a crash.
    pub(crate) fn write(&mut self, range: Range<u64>, generation: Generation) {
        self.extend(range.end);
        self.split(range.start);
        self.split(range.end);
        for (_, piece) in self.pieces.range_mut(range) {
            piece.versions.push(generation);
        }
    }

    /// A write that is durable when it returns. Earlier writes keep their state.
    pub(crate) fn write_durable(&mut self, range: Range<u64>, generation: Generation) {
        self.write(range.clone(), generation);
        self.size_durable = self.size_durable.max(range.end);
        for (_, piece) in self.pieces.range_mut(range) {
            piece.versions = vec![generation];
        }
    }

    /// A change of mode, which becomes durable with the file's bytes.
    pub(crate) fn chmod(&mut self, mode: u32) {
        self.modes.push(mode);
    }

    pub(crate) fn may_have_mode(&self, mode: u32) -> bool {
        self.modes.contains(&mode)
    }

    /// After a crash: the file has this mode.
    pub(crate) fn has_mode(&mut self, mode: u32) {
        self.modes = vec![mode];
    }

    pub(crate) fn modes(&self) -> &[u32] {
        &self.modes
    }

    /// Makes all writes and the mode durable.
    pub(crate) fn sync(&mut self) {
        self.sync_data();
        self.modes.drain(..self.modes.len() - 1);
    }

    /// Makes all writes durable, but not the mode.
    pub(crate) fn sync_data(&mut self) {
        self.size_durable = self.size;
        for piece in self.pieces.values_mut() {
            piece.versions.drain(..piece.versions.len() - 1);
        }
    }

    /// Truncation is an operation on metadata: the size is durable when it returns. Removed bytes never come back.
    pub(crate) fn truncate(&mut self, size: u64) {
        if size < self.size {
            self.split(size);
            self.pieces.split_off(&size);
            self.size = size;
        }
        self.extend(size);
        self.size_durable = size;
    }

    /// The bytes that readers see now in a range inside the file.
    pub(crate) fn visible(&self, range: Range<u64>) -> Vec<u8> {
        let mut data = vec![0; (range.end - range.start) as usize];
        for (start, piece) in &self.pieces {
            let (from, to) = ((*start).max(range.start), piece.end.min(range.end));
            if let Some(newest) = piece.versions.last().filter(|_| from < to) {
                let part = &mut data[(from - range.start) as usize..(to - range.start) as usize];
                content::fill(self.id, *newest, from, part);
            }
        }
        data
    }

    /// Checks whether the file may contain `data` after a crash. Returns the state reduced to this content.
    ///
    /// # Errors
    /// The problem, for people.
    pub(crate) fn judge(&self, data: &[u8]) -> Result<Self, String> {
        let size = data.len() as u64;
        if !(self.size_durable..=self.size).contains(&size) {
            return Err(format!("size={size} expected={}..={}", self.size_durable, self.size));
        }
        let mut judged = Self { size, size_durable: size, pieces: BTreeMap::new(), ..self.clone() };
        for (start, piece) in &self.pieces {
            // Inside one sector and between the ends of writes, all bytes have the same version.
            let mut from = *start;
            while from < piece.end.min(size) {
                let to = ((from / SECTOR_BYTES + 1) * SECTOR_BYTES).min(piece.end).min(size);
                let part = &data[from as usize..to as usize];
                let found: Vec<Generation> = piece
                    .versions
                    .iter()
                    .copied()
                    .filter(|version| content::matches(self.id, *version, from, part))
                    .collect();
                if found.is_empty() {
                    return Err(self.explain(from..to, &piece.versions, data));
                }
                judged.pieces.insert(from, Piece { end: to, versions: found });
                from = to;
            }
        }
        judged.merge();
        Ok(judged)
    }

    fn explain(&self, range: Range<u64>, allowed: &[Generation], data: &[u8]) -> String {
        let start = range.start / SECTOR_BYTES * SECTOR_BYTES;
        let sector = &data[start as usize..data.len().min((start + SECTOR_BYTES) as usize)];
        let allowed: Vec<u64> = allowed.iter().map(|generation| generation.0).collect();
        format!(
            "bytes {}..{}: expected generation of {allowed:?}, found {}",
            range.start,
            range.end,
            content::describe(sector)
        )
    }

    fn extend(&mut self, size: u64) {
        if size > self.size {
            self.pieces.insert(self.size, Piece { end: size, versions: vec![UNWRITTEN] });
            self.size = size;
        }
    }

    /// Splits the piece at `at`, if that is inside the file.
    fn split(&mut self, at: u64) {
        let Some((_, piece)) = self.pieces.range_mut(..at).next_back().filter(|(_, piece)| piece.end > at)
        else {
            return;
        };
        let second = piece.clone();
        piece.end = at;
        self.pieces.insert(at, second);
    }

    /// Joins neighbours with the same versions.
    fn merge(&mut self) {
        let mut merged: Vec<(u64, Piece)> = Vec::new();
        for (start, piece) in std::mem::take(&mut self.pieces) {
            match merged.last_mut() {
                Some((_, last)) if last.versions == piece.versions => last.end = piece.end,
                _ => merged.push((start, piece)),
            }
        }
        self.pieces = merged.into_iter().collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileId = FileId(9);

    enum Step {
        Write(Range<u64>, u64),
        WriteDurable(Range<u64>, u64),
        Sync,
        Truncate(u64),
    }
    use Step::{Sync, Truncate, Write, WriteDurable};

    /// Does the steps, then checks whether the file may consist of these ranges and generations after a crash.
    #[track_caller]
    fn check(steps: &[Step], found: &[(u64, u64)], expected: Result<(), &str>) {
        let mut file = FileState::new(FILE, 0o644);
        for step in steps {
            match step {
                Write(range, generation) => file.write(range.clone(), Generation(*generation)),
                WriteDurable(range, generation) => file.write_durable(range.clone(), Generation(*generation)),
                Sync => file.sync(),
                Truncate(size) => file.truncate(*size),
            }
        }
        let mut data = Vec::new();
        for (end, generation) in found {
            let start = data.len();
            data.resize(*end as usize, 0);
            content::fill(FILE, Generation(*generation), start as u64, &mut data[start..]);
        }
        match (file.judge(&data), expected) {
            (Ok(judged), Ok(())) => {
                let size = data.len() as u64;
                assert_eq!((judged.size, judged.visible(0..size)), (size, data));
            }
            (Err(found), Err(expected)) => assert!(found.contains(expected), "{found}"),
            (found, _) => panic!("{found:?}"),
        }
    }

    #[test]
    fn synced_bytes_stay() {
        check(&[Write(0..2000, 1), Sync], &[(2000, 1)], Ok(()));
        check(&[Write(0..2000, 1), Sync], &[], Err("size=0 expected=2000..=2000"));
        check(&[Write(0..2000, 1), Sync], &[(2000, 0)], Err("found zeros"));
        check(&[Write(0..2000, 1), Sync, Write(0..2000, 2), Sync], &[(2000, 1)], Err("generation=1"));
    }

    #[test]
    fn synced_bytes_are_not_torn() {
        check(&[Write(0..2000, 1), Sync, Write(0..2000, 2), Sync], &[(512, 2), (2000, 1)], Err("512..1024"));
    }

    #[test]
    fn unsynced_bytes_are_old_or_new() {
        let steps = [Write(0..2000, 1), Sync, Write(500..3000, 2)];
        check(&steps, &[(2000, 1)], Ok(()));
        check(&steps, &[(500, 1), (3000, 2)], Ok(()));
        check(&steps, &[(1024, 1), (2500, 2)], Ok(()));
        check(&steps, &[(2000, 1), (2500, 0)], Ok(()));
        check(&steps, &[(2000, 7)], Err("found bytes of file=0x9 offset=0 generation=7"));
        check(&steps, &[(1999, 1)], Err("size=1999"));
        check(&steps, &[(500, 1), (3001, 2)], Err("size=3001"));
    }

    #[test]
    fn truncated_bytes_do_not_come_back() {
        let steps = [Write(0..4000, 1), Sync, Truncate(1000), Truncate(3000)];
        check(&steps, &[(1000, 1), (3000, 0)], Ok(()));
        check(&steps, &[(3000, 1)], Err("1000..1024"));
        check(&steps, &[(4000, 1)], Err("size=4000"));
        check(&[Write(0..4000, 1), Truncate(1000)], &[(1000, 0)], Ok(()));
        check(&[Write(0..4000, 1), Truncate(1000)], &[(500, 1)], Err("size=500"));
    }

    #[test]
    fn a_durable_write_promises_nothing_about_earlier_ones() {
        let steps = [Write(0..1000, 1), WriteDurable(2000..3000, 2)];
        check(&steps, &[(1000, 1), (2000, 0), (3000, 2)], Ok(()));
        check(&steps, &[(2000, 0), (3000, 2)], Ok(()));
        check(&steps, &[(1000, 1), (3000, 0)], Err("2000..2048"));
        check(&steps, &[(1000, 1)], Err("size=1000 expected=3000..=3000"));
    }

    #[test]
    fn gaps_are_zero() {
        check(&[Write(5000..6000, 1), Sync], &[(5000, 0), (6000, 1)], Ok(()));
        check(&[Write(5000..6000, 1), Sync], &[(6000, 1)], Err("0..512"));
    }
}
