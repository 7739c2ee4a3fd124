//! The records of the control ledger at a node that does not own it: a copy that follows.

use std::sync::Arc;
use std::time::Duration;

use base::{Epoch, Seq};
use bytes::Bytes;
use meta::records::RecordsSnapshot;
use meta::state::{Applied, MemState, State};
use wire::cluster::{ClusterRequest, RECORDS_WAIT_MAX, RecordsNews};

use crate::{Control, ControlError, ControlView};

/// Most bytes of records in an answer, unless one change is larger.
const NEWS_BYTES: usize = 2 << 20;

impl Control {
    /// Answers a node that has the records up to `known`, as the owner of that epoch told them: the changes since, or all records in
    /// parts. Waits for news.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub async fn news(
        &self,
        (known, told_by): (Seq, Epoch),
        after: &[u8],
        wait: Duration,
    ) -> Result<RecordsNews, ControlError> {
        let epoch = self.records().epoch();
        if after.is_empty() && told_by == epoch {
            let mut newest = self.records().newest();
            // The sender lives as long as the ledger.
            let news = newest.wait_for(|seq| *seq != known);
            if tokio::time::timeout(wait.min(RECORDS_WAIT_MAX), news).await.is_err() {
                return Ok(RecordsNews { seq: known, epoch, ..RecordsNews::default() });
            }
            if let Some(news) = self.changes_since(known) {
                return Ok(news);
            }
        }
        let snapshot = self.records().snapshot()?;
        let (pairs, more) = snapshot.part(after, NEWS_BYTES)?;
        let records = pairs.into_iter().map(|(key, value)| (key.into(), value.into())).collect();
        Ok(RecordsNews { seq: snapshot.seq()?, epoch, is_copy: true, records, more })
    }

    fn changes_since(&self, known: Seq) -> Option<RecordsNews> {
        let mut news = RecordsNews { seq: known, epoch: self.records().epoch(), ..RecordsNews::default() };
        let mut bytes = 0;
        for (seq, changes) in self.records().changes_since(known)? {
            if bytes >= NEWS_BYTES {
                news.more = true;
                break;
            }
            news.seq = seq;
            for (key, value) in changes.iter() {
                bytes += key.len() + value.as_ref().map_or(0, Vec::len);
                let value = value.as_deref().map(Bytes::copy_from_slice).unwrap_or_default();
                news.records.push((Bytes::copy_from_slice(key), value));
            }
        }
        Some(news)
    }
}

/// A copy of the records.
#[derive(Default)]
pub struct Follower {
    state: MemState,
    seq: Seq,
    epoch: Epoch,
    /// A copy that has not fully arrived.
    copy: Option<Copying>,
}

struct Copying {
    at: (Seq, Epoch),
    state: MemState,
    last: Bytes,
}

impl Follower {
    /// What to ask the owner next.
    pub fn question(&self) -> ClusterRequest {
        let after = self.copy.as_ref().map(|copy| copy.last.clone()).unwrap_or_default();
        let wait_ms = RECORDS_WAIT_MAX.as_millis() as u32;
        ClusterRequest::Records { known: self.seq, epoch: self.epoch, after, wait_ms }
    }

    /// Takes the answer over. Returns whether the copy has changed, and is whole.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn take(&mut self, news: RecordsNews) -> Result<bool, ControlError> {
        let RecordsNews { seq, epoch, is_copy, records, more } = news;
        if !is_copy {
            self.copy = None;
            let is_news = seq != self.seq;
            apply(&self.state, &records, seq)?;
            self.seq = seq;
            return Ok(is_news);
        }
        let mut copy = match self.copy.take() {
            Some(copy) if copy.at == (seq, epoch) => copy,
            // The records have changed since the first part. This part is of no use: it may not be the first.
            Some(_) => return Ok(false),
            None => Copying { at: (seq, epoch), state: MemState::default(), last: Bytes::new() },
        };
        apply(&copy.state, &records, seq)?;
        if let Some((last, _)) = records.last() {
            copy.last = last.clone();
        }
        if more {
            self.copy = Some(copy);
            return Ok(false);
        }
        (self.state, self.seq, self.epoch) = (copy.state, seq, epoch);
        Ok(true)
    }

    /// Whether it has all records of one moment.
    pub fn is_whole(&self) -> bool {
        self.copy.is_none() && self.seq > Seq(0)
    }

    /// The records, as they are in the copy now.
    pub fn view(&self) -> Result<ControlView, ControlError> {
        let state = self.state.snapshot().map_err(meta::records::RecordsError::Read)?;
        Ok(ControlView::of(Arc::new(RecordsSnapshot::of(state))))
    }
}

fn apply(state: &MemState, records: &[(Bytes, Bytes)], seq: Seq) -> Result<(), ControlError> {
    let mut changes = records
        .iter()
        .map(|(key, value)| (key.as_ref(), Some(value.as_ref()).filter(|value| !value.is_empty())));
    let applied = Applied { seq, epoch: Epoch(0) };
    state.apply(&mut changes, applied).map_err(meta::records::RecordsError::Read)?;
    Ok(())
}

#[cfg(test)]
mod tests;
