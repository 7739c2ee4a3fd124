//! A store with the rest of its log laid over it, for inspecting a ledger that has no running owner.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use base::Seq;

use super::{Applied, Pair, State, StateError, Visit};
use crate::batch::Assembler;
use crate::keys::KeyRange;
use crate::log::{LedgerLog, LogError};

/// Bytes of the log per read.
const PAGE_BYTES: usize = 32 << 20;

/// A store, and in memory the changes that only the log has.
pub struct Overlaid {
    bottom: Arc<dyn State>,
    changes: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
    applied: Applied,
}

impl Overlaid {
    /// Reads the entries of the log that `bottom` lacks.
    ///
    /// # Errors
    /// If either cannot be read, or the log does not continue the store.
    pub async fn replay(log: &dyn LedgerLog, bottom: Arc<dyn State>) -> Result<Self, LogError> {
        let store = |error: StateError| LogError::Damaged(error.to_string());
        let mut applied = bottom.applied().map_err(store)?;
        let mut changes = BTreeMap::new();
        if log.first().0 > applied.seq.0 + 1 {
            let what = format!("the log begins at {}, the store ends at {}", log.first(), applied.seq);
            return Err(LogError::Damaged(what));
        }
        let (mut assembler, mut read) = (Assembler::default(), applied.seq);
        loop {
            let entries = log.read(Seq(read.0 + 1), PAGE_BYTES).await?;
            if entries.is_empty() {
                break;
            }
            for entry in &entries {
                read = entry.seq;
                let damaged = |error| LogError::Damaged(format!("entry {}: {error}", entry.seq));
                if let Some(batch) = assembler.push(entry).map_err(damaged)? {
                    changes.extend(batch.changes);
                    applied = Applied { seq: entry.seq, epoch: entry.epoch };
                }
            }
        }
        Ok(Self { bottom, changes, applied })
    }
}

impl State for Overlaid {
    fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, StateError> {
        match self.changes.get(key) {
            Some(value) => Ok(value.clone()),
            None => self.bottom.get(key),
        }
    }

    fn scan(&self, (from, to): &KeyRange, visit: &mut Visit<'_>) -> Result<(), StateError> {
        if from >= to {
            return Ok(());
        }
        let mut above = self.changes.range(from.clone()..to.clone()).peekable();
        let mut ended = ControlFlow::Continue(());
        self.bottom.scan(&(from.clone(), to.clone()), &mut |key, value| {
            while let Some((newer, changed)) = above.next_if(|(newer, _)| newer.as_slice() < key) {
                if let Some(changed) = changed {
                    ended = visit(newer, changed);
                    if ended.is_break() {
                        return ended;
                    }
                }
            }
            ended = match above.next_if(|(newer, _)| newer.as_slice() == key) {
                Some((_, Some(changed))) => visit(key, changed),
                Some((_, None)) => ControlFlow::Continue(()),
                None => visit(key, value),
            };
            ended
        })?;
        for (key, changed) in above {
            if ended.is_break() {
                break;
            }
            if let Some(changed) = changed {
                ended = visit(key, changed);
            }
        }
        Ok(())
    }

    fn last(&self, range: &KeyRange) -> Result<Option<Pair>, StateError> {
        let mut last = None;
        self.scan(range, &mut |key, value| {
            last = Some((key.to_vec(), value.to_vec()));
            ControlFlow::Continue(())
        })?;
        Ok(last)
    }

    fn apply(
        &self,
        _changes: &mut dyn Iterator<Item = (&[u8], Option<&[u8]>)>,
        _applied: Applied,
    ) -> Result<(), StateError> {
        Err(StateError::Failed("what is looked at is not changed".to_owned()))
    }

    fn applied(&self) -> Result<Applied, StateError> {
        Ok(self.applied)
    }

    fn snapshot(&self) -> Result<Arc<dyn State>, StateError> {
        Err(StateError::Failed("what is looked at does not change".to_owned()))
    }
}
