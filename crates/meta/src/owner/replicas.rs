//! An owner and its standbys: how far the log may be trimmed, and copies of the store.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use base::checksum::Crc32c;
use base::env::Env;
use base::{FsError, Seq};
use bytes::Bytes;
use wire::replica::{CopyPart, ReplicaReply, ReplicaRequest, STANDBY_WAIT_MAX};

use super::server::with_causes;
use crate::state::{Applied, State, every_key};

/// About the bytes of one part of a copy.
const PART_BYTES: usize = 1 << 20;
/// Most copies at a time. Each keeps old pages of the store.
const COPIES_MAX: usize = 4;
/// A copy of which no part is fetched for so long ends.
const COPY_IDLE_NS: u64 = 60_000_000_000;

/// See the module.
pub(super) struct Replicas {
    env: Env,
    state: Arc<dyn State>,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    standbys: BTreeMap<u64, Standing>,
    copies: BTreeMap<u64, Copying>,
}

/// A standby as the owner knows it.
struct Standing {
    /// The last entry in its store.
    stored: Seq,
    /// The log is kept for it until then.
    until_ns: u64,
}

/// A copy on its way.
struct Copying {
    replica: u64,
    content: Arc<dyn State>,
    applied: Applied,
    used_ns: u64,
    /// What was sent so far, up to a key; and the last part, in case that its answer was lost.
    sent: (Bytes, CopySum),
    last: Option<(Bytes, CopyPart)>,
}

/// The checksum of a copy.
#[derive(Default)]
pub(super) struct CopySum(Crc32c);

impl CopySum {
    pub(super) fn add<'a>(&mut self, pairs: impl Iterator<Item = (&'a [u8], &'a [u8])>) {
        for (key, value) in pairs {
            for bytes in [key, value] {
                self.0.update(&(bytes.len() as u32).to_le_bytes());
                self.0.update(bytes);
            }
        }
    }

    pub(super) fn finish(&self) -> u32 {
        self.0.finish()
    }
}

impl Replicas {
    pub(super) fn new(env: Env, state: Arc<dyn State>) -> Self {
        Self { env, state, inner: Mutex::default() }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no holder of this lock panics")
    }

    /// The last entry that may leave the log, when the owner's store has all up to `own`: a majority of the replicas has it.
    /// Standbys that said nothing for as long as they wished do not count.
    pub(super) fn trim_to(&self, own: Seq) -> Seq {
        let now_ns = self.env.clock.boot_ns();
        let mut inner = self.inner();
        inner.standbys.retain(|_, standing| now_ns < standing.until_ns);
        inner.copies.retain(|_, copy| now_ns < copy.used_ns + COPY_IDLE_NS);
        let mut stored: Vec<Seq> = inner.standbys.values().map(|standing| standing.stored).collect();
        stored.push(own);
        stored.sort_unstable();
        // The first of a majority, counted from the newest.
        let majority = stored.len() / 2 + 1;
        stored[stored.len() - majority].min(own)
    }

    /// Executes a request of a standby.
    pub(super) fn ask(&self, request: ReplicaRequest) -> Result<ReplicaReply, FsError> {
        match request {
            ReplicaRequest::Stored { replica, seq, wait_ms } => {
                self.heard(&mut self.inner(), replica, seq, wait_ms);
                Ok(ReplicaReply::Noted)
            }
            ReplicaRequest::Copy { replica, wait_ms, copy, after } => {
                self.copy((replica, wait_ms), copy, &after).map(ReplicaReply::Copied)
            }
        }
    }

    fn heard(&self, inner: &mut Inner, replica: u64, stored: Seq, wait_ms: u32) {
        let wait = Duration::from_millis(wait_ms.into()).min(STANDBY_WAIT_MAX);
        let until_ns = self.env.clock.boot_ns() + wait.as_nanos() as u64;
        inner.standbys.insert(replica, Standing { stored, until_ns });
    }

    fn copy(&self, (replica, wait_ms): (u64, u32), copy: u64, after: &Bytes) -> Result<CopyPart, FsError> {
        let now_ns = self.env.clock.boot_ns();
        let failed = |error: crate::state::StateError| {
            tracing::warn!(error = %with_causes(&error), "a copy of the local store fails");
            FsError::Io
        };
        let mut inner = self.inner();
        let number = if copy == 0 { self.env.random.next_u64().max(1) } else { copy };
        if copy == 0 {
            inner.copies.retain(|_, copy| copy.replica != replica && now_ns < copy.used_ns + COPY_IDLE_NS);
            if inner.copies.len() >= COPIES_MAX {
                return Err(FsError::WouldBlock);
            }
            // The log is kept from here on, before it is known how far the content goes.
            let stored = self.state.applied().map_err(failed)?.seq;
            self.heard(&mut inner, replica, stored, wait_ms);
            let content = self.state.snapshot().map_err(failed)?;
            let applied = content.applied().map_err(failed)?;
            let sent = (Bytes::new(), CopySum::default());
            let new = Copying { replica, content, applied, used_ns: now_ns, sent, last: None };
            inner.copies.insert(number, new);
        }
        let found = inner.copies.get_mut(&number).filter(|copy| copy.replica == replica);
        let Some(copying) = found else { return Err(FsError::NotFound) };
        copying.used_ns = now_ns;
        let stored = copying.applied.seq;
        let part = copying.part(number, after).map_err(failed)?;
        self.heard(&mut inner, replica, stored, wait_ms);
        part.ok_or(FsError::NotFound)
    }
}

impl Copying {
    /// The part behind the key `after`: the next one, or the last one again. `None` if it is neither.
    fn part(&mut self, copy: u64, after: &Bytes) -> Result<Option<CopyPart>, crate::state::StateError> {
        if let Some((last_after, part)) = &self.last
            && last_after == after
        {
            return Ok(Some(part.clone()));
        }
        if *after != self.sent.0 {
            return Ok(None);
        }
        let from = if after.is_empty() { Vec::new() } else { [after, &[0][..]].concat() };
        let (mut pairs, mut bytes, mut more) = (Vec::new(), 0, false);
        self.content.scan(&(from, every_key().1), &mut |key, value| {
            if bytes >= PART_BYTES {
                more = true;
                return ControlFlow::Break(());
            }
            bytes += key.len() + value.len();
            pairs.push((Bytes::copy_from_slice(key), Bytes::copy_from_slice(value)));
            ControlFlow::Continue(())
        })?;
        self.sent.1.add(pairs.iter().map(|(key, value)| (&key[..], &value[..])));
        if let Some((last, _)) = pairs.last() {
            self.sent.0 = last.clone();
        }
        let Applied { seq, epoch } = self.applied;
        let part = CopyPart { copy, seq, epoch, pairs, sum: self.sent.1.finish(), more };
        self.last = Some((after.clone(), part.clone()));
        Ok(Some(part))
    }
}
