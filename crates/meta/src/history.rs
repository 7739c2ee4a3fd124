//! The history of a ledger: stretches that owners began, each with a random *lineage*, and how what drives know of it
//! shows that the ledger at hand is an older one, or one that went another way.
//!
//! A drive keeps the newest [`Position`] that it was told. It belongs to the history at hand if its lineage began there
//! and its batch is not behind the beginning of the next one, or behind the end.

use std::ops::ControlFlow;

use base::{DriveId, ExtentId, LedgerId, Lineage, Seq};
use wire::position::{KnownLedger, Position};

use crate::keys::Keys;
use crate::state::{State, StateError};
use crate::values::Value;

/// How far the next ids are moved ahead when an older ledger goes on: further than the newer one can have come.
pub(crate) const LEAP_IDS: u64 = 1 << 40;

/// The stretches of a ledger's history up to its last durable batch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct History {
    ledger: LedgerId,
    /// The first batch of each stretch, in order.
    starts: Vec<(Seq, Lineage)>,
    tail: Seq,
}

/// What one drive knows of a ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Witness {
    /// The drive.
    pub drive: DriveId,
    /// What it knows.
    pub known: KnownLedger,
}

/// What the drives know of a ledger, and whether it may go on although it is older than that.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Evidence {
    /// Of each drive that has something to say.
    pub witnesses: Vec<Witness>,
    /// Go on with an older ledger: what it does not have is lost.
    pub accept_older: bool,
}

/// The ledger is older than what a drive has seen, or went another way since.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "metadata of ledger {ledger} is older than the drives: drive {drive} knows its batch {} of lineage {:016x}, and here it \
     {}. Put the newer metadata back. If that is lost for good, start with --accept-older-metadata: what only the newer \
     metadata had is lost then",
    position.seq,
    position.lineage.0,
    if *.is_known { format!("had batch {end} as the last one of that lineage") } else { "has no such lineage".to_owned() }
)]
pub struct OlderLedger {
    /// Which ledger.
    pub ledger: LedgerId,
    /// The drive that knows more.
    pub drive: DriveId,
    /// What it knows.
    pub position: Position,
    /// Whether the ledger at hand has its lineage.
    pub is_known: bool,
    /// The last batch that it has of it.
    pub end: Seq,
}

/// How an owner goes on with a ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Beginning {
    /// Of the stretch that it begins.
    pub(crate) lineage: Lineage,
    /// The highest extent of which a drive has a shard.
    pub(crate) highest_extent: Option<ExtentId>,
    /// Whether drives have seen a newer ledger.
    pub(crate) is_older: bool,
}

/// The stretch of a ledger's history that an owner has begun.
#[derive(Debug, Clone)]
pub(crate) struct Stretch {
    /// What came before.
    before: History,
    /// Its first batch.
    first: Seq,
    lineage: Lineage,
}

impl Stretch {
    /// Begins behind a history.
    pub(crate) fn after(before: History, lineage: Lineage) -> Self {
        Self { first: Seq(before.tail.0 + 1), before, lineage }
    }

    /// The history up to a durable batch.
    pub(crate) fn history(&self, committed: Seq) -> History {
        let before = self.before.clone();
        if committed < self.first { before } else { before.with(self.first, self.lineage, committed) }
    }

    /// The position of a durable batch.
    pub(crate) fn position(&self, committed: Seq) -> Option<Position> {
        if committed < self.first {
            return self.before.position();
        }
        Some(Position { ledger: self.before.ledger, lineage: self.lineage, seq: committed })
    }
}

impl History {
    /// Reads it from a state that has everything up to `tail`.
    ///
    /// # Errors
    /// If the state cannot be read, or a value of it not be decoded.
    pub fn read(state: &dyn State, ledger: LedgerId, tail: Seq) -> Result<Self, StateError> {
        let keys = Keys::new(ledger);
        let mut starts = Vec::new();
        let mut damaged = None;
        state.scan(&keys.lineages(), &mut |key, value| match u64::decode(value) {
            Ok(lineage) => {
                starts.push((Keys::seq_of_lineage(key), Lineage(lineage)));
                ControlFlow::Continue(())
            }
            Err(error) => {
                damaged = Some(StateError::Damaged(format!("lineages: {error}")));
                ControlFlow::Break(())
            }
        })?;
        damaged.map_or(Ok(Self { ledger, starts, tail }), Err)
    }

    /// The newest position.
    pub fn position(&self) -> Option<Position> {
        let (_, lineage) = self.starts.last()?;
        Some(Position { ledger: self.ledger, lineage: *lineage, seq: self.tail })
    }

    /// The same with the stretch that begins at `first`, up to `tail`.
    #[must_use]
    pub(crate) fn with(mut self, first: Seq, lineage: Lineage, tail: Seq) -> Self {
        self.starts.push((first, lineage));
        self.tail = tail;
        self
    }

    /// The newest batch is this one.
    pub(crate) fn goes_on(&mut self, tail: Seq) {
        self.tail = tail;
    }

    /// The last batch of a lineage; `None` if it has none of it.
    fn end_of(&self, lineage: Lineage) -> Option<Seq> {
        let at = self.starts.iter().position(|(_, known)| *known == lineage)?;
        Some(self.starts.get(at + 1).map_or(self.tail, |(next, _)| Seq(next.0 - 1)))
    }

    /// Whether everything that a drive knows is in this history.
    ///
    /// # Errors
    /// What it knows that is not.
    pub fn check(&self, witness: &Witness) -> Result<(), OlderLedger> {
        let Some(position) = witness.known.position else { return Ok(()) };
        let end = self.end_of(position.lineage);
        if end.is_some_and(|end| position.seq <= end) {
            return Ok(());
        }
        Err(OlderLedger {
            ledger: self.ledger,
            drive: witness.drive,
            position,
            is_known: end.is_some(),
            end: end.unwrap_or_default(),
        })
    }
}

impl Evidence {
    /// What becomes of a ledger with this history.
    ///
    /// # Errors
    /// If it is older than what drives know, and that was not accepted.
    pub(crate) fn judge(&self, history: &History, lineage: Lineage) -> Result<Beginning, OlderLedger> {
        let older = self.witnesses.iter().find_map(|witness| history.check(witness).err());
        if let Some(older) = &older {
            if !self.accept_older {
                return Err(older.clone());
            }
            tracing::warn!(%older, "an older ledger goes on, as was asked for");
        }
        let highest_extent = self.witnesses.iter().filter_map(|witness| witness.known.highest_extent).max();
        Ok(Beginning { lineage, highest_extent, is_older: older.is_some() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEDGER: LedgerId = LedgerId(3);

    fn history(starts: &[(u64, u64)], tail: u64) -> History {
        let starts = starts.iter().map(|(first, lineage)| (Seq(*first), Lineage(*lineage))).collect();
        History { ledger: LEDGER, starts, tail: Seq(tail) }
    }

    fn knows(lineage: u64, seq: u64) -> Witness {
        let position = Some(Position { ledger: LEDGER, lineage: Lineage(lineage), seq: Seq(seq) });
        Witness { drive: DriveId(2), known: KnownLedger { ledger: LEDGER, position, highest_extent: None } }
    }

    #[test]
    fn a_drive_knows_nothing_that_its_ledger_has_not() {
        let history = history(&[(1, 70), (10, 80), (20, 90)], 30);
        for (lineage, seq) in [(70, 1), (70, 9), (80, 10), (80, 19), (90, 20), (90, 30)] {
            assert_eq!(history.check(&knows(lineage, seq)), Ok(()), "{lineage} {seq}");
        }
        let nothing = KnownLedger { ledger: LEDGER, position: None, highest_extent: None };
        assert_eq!(history.check(&Witness { drive: DriveId(0), known: nothing }), Ok(()));
    }

    #[test]
    fn an_older_ledger_is_noticed() {
        assert!(history(&[(1, 70), (10, 80)], 15).check(&knows(80, 16)).is_err(), "past the end");
        assert!(history(&[(1, 70)], 15).check(&knows(80, 12)).is_err(), "a lineage that it never had");
        assert!(history(&[], 0).check(&knows(70, 1)).is_err(), "an empty one");
    }

    #[test]
    fn a_fork_is_noticed_even_if_it_grew_past_what_drives_know() {
        // The drive knows batch 15 of lineage 80; the copy ended at 12, and its own stretch came to 40.
        let fork = history(&[(1, 70), (10, 80), (13, 91)], 40);
        assert!(fork.check(&knows(80, 15)).is_err());
        assert!(fork.check(&knows(80, 13)).is_err(), "the batch is another one");
        assert_eq!(fork.check(&knows(80, 12)), Ok(()));
    }

    #[test]
    fn the_error_says_what_to_do() {
        let error = history(&[(1, 70)], 15).check(&knows(70, 16)).unwrap_err().to_string();
        assert!(error.contains("--accept-older-metadata") && error.contains("batch 15"), "{error}");
        let error = history(&[(1, 70)], 15).check(&knows(255, 3)).unwrap_err().to_string();
        assert!(error.contains("lineage 00000000000000ff") && error.contains("no such lineage"), "{error}");
    }
}
