//! The history of a ledger: stretches that owners began, each with a random *lineage*. It shows whether the ledger at
//! hand is older than the one that drives have seen, or diverged from it.
//!
//! A drive keeps the newest [`Position`] that it received. The position belongs to the history at hand if its lineage
//! began there, and its batch comes before the beginning of the next stretch and not behind the end.

use std::ops::ControlFlow;

use base::{DriveId, ExtentId, LedgerId, Lineage, Seq};
use wire::position::{KnownLedger, Position};

use crate::keys::Keys;
use crate::state::{State, StateError};
use crate::values::Value;

/// Distance by which the next ids are moved ahead when an older ledger goes on: further than the newer one can have
/// come.
pub(crate) const LEAP_IDS: u64 = 1 << 40;

/// The stretches of a ledger's history up to its last durable batch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct History {
    ledger: LedgerId,
    /// The first batch of each stretch, in order.
    starts: Vec<(Seq, Lineage)>,
    tail: Seq,
}

/// One drive's knowledge of a ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Witness {
    /// The drive.
    pub drive: DriveId,
    /// The drive's position and highest extent of the ledger.
    pub known: KnownLedger,
}

/// All drives' knowledge of a ledger, and whether the ledger may go on although it is older.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Evidence {
    /// One witness for each drive that knows the ledger.
    pub witnesses: Vec<Witness>,
    /// What to do with a ledger that is older than drives know.
    pub older: Older,
}

/// What to do with a ledger that is older than drives know.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Older {
    /// It is not opened.
    #[default]
    Refuse,
    /// It goes on. Changes that only the newer one had are lost.
    Accept,
    /// It goes on. The end of its log was lost, so it is older, also if no drive knows that.
    Certain,
}

/// The ledger is older than the one that a drive has seen, or diverged from it.
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
    /// The ledger.
    pub ledger: LedgerId,
    /// The drive that knows more.
    pub drive: DriveId,
    /// The position that the drive knows.
    pub position: Position,
    /// Whether the ledger at hand has the lineage of that position.
    pub is_known: bool,
    /// Its last batch of that lineage.
    pub end: Seq,
}

/// How an owner continues a ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Beginning {
    /// Lineage of the stretch that it begins.
    pub lineage: Lineage,
    /// The highest extent of which a drive has a shard.
    pub highest_extent: Option<ExtentId>,
    /// Whether drives have seen a newer ledger.
    pub is_older: bool,
}

/// The stretch of a ledger's history that an owner has begun.
#[derive(Debug, Clone)]
pub(crate) struct Stretch {
    /// The history before the stretch.
    before: History,
    /// First batch of the stretch.
    first: Seq,
    lineage: Lineage,
}

impl Stretch {
    /// Begins a stretch after a history.
    pub(crate) fn after(before: History, lineage: Lineage) -> Self {
        Self { first: Seq(before.tail.0 + 1), before, lineage }
    }

    /// The history up to the durable batch `committed`.
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
    /// Reads the history from a state that has every batch up to `tail`.
    ///
    /// # Errors
    /// If the state cannot be read, or a value cannot be decoded.
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

    /// This history with the stretch that begins at `first`, up to `tail`.
    #[must_use]
    pub(crate) fn with(mut self, first: Seq, lineage: Lineage, tail: Seq) -> Self {
        self.starts.push((first, lineage));
        self.tail = tail;
        self
    }

    /// Sets the newest batch.
    pub(crate) fn goes_on(&mut self, tail: Seq) {
        self.tail = tail;
    }

    /// The last batch of a lineage; `None` if the history has no such lineage.
    fn end_of(&self, lineage: Lineage) -> Option<Seq> {
        let at = self.starts.iter().position(|(_, known)| *known == lineage)?;
        Some(self.starts.get(at + 1).map_or(self.tail, |(next, _)| Seq(next.0 - 1)))
    }

    /// Checks that this history contains everything that a drive knows.
    ///
    /// # Errors
    /// The position that is not in this history.
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
    /// Decides how an owner continues a ledger with this history.
    ///
    /// # Errors
    /// If the ledger is older than the drives know, and the operator has not accepted that.
    pub fn decide(&self, history: &History, lineage: Lineage) -> Result<Beginning, OlderLedger> {
        let older = self.witnesses.iter().find_map(|witness| history.check(witness).err());
        if let Some(older) = &older {
            if self.older == Older::Refuse {
                return Err(older.clone());
            }
            tracing::warn!(%older, "an older ledger goes on, as was asked for");
        }
        let highest_extent = self.witnesses.iter().filter_map(|witness| witness.known.highest_extent).max();
        Ok(Beginning { lineage, highest_extent, is_older: older.is_some() || self.older == Older::Certain })
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
    fn an_older_ledger_goes_on_only_with_consent_or_after_a_loss() {
        let ledger = history(&[(1, 70)], 15);
        let decide = |older, witnesses: &[Witness]| {
            let evidence = Evidence { witnesses: witnesses.to_vec(), older };
            evidence.decide(&ledger, Lineage(9)).map(|beginning| beginning.is_older)
        };
        let newer = [knows(70, 16)];
        assert!(decide(Older::Refuse, &newer).is_err());
        assert_eq!(decide(Older::Accept, &newer), Ok(true));
        assert_eq!(decide(Older::Accept, &[]), Ok(false));
        // No drive needs to know of the loss.
        assert_eq!(decide(Older::Certain, &[]), Ok(true));
        assert_eq!(decide(Older::Certain, &newer), Ok(true));
    }

    #[test]
    fn the_error_says_what_to_do() {
        let error = history(&[(1, 70)], 15).check(&knows(70, 16)).unwrap_err().to_string();
        assert!(error.contains("--accept-older-metadata") && error.contains("batch 15"), "{error}");
        let error = history(&[(1, 70)], 15).check(&knows(255, 3)).unwrap_err().to_string();
        assert!(error.contains("lineage 00000000000000ff") && error.contains("no such lineage"), "{error}");
    }
}
