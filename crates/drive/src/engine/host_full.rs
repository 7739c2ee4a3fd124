//! A full filesystem below a file-backed drive: a state that passes.
//!
//! A job that finds no room counts for nothing: what it wrote is in segments that are left, and those who wait for it
//! are told that there is no room. Its frames may be on the device, whole or in part. So before anything is appended
//! again, two checkpoints cover them: no recovery looks at them then. These checkpoints also find out whether there
//! is room again.

use std::io;

use super::append::HeaderBlocks;
use super::checkpoint::Checkpointing;
use super::{Ended, Engine, PutOutcome, Replies, Then};
use crate::index::SegmentState;

/// How long nothing is written after the host had no room.
const RETRY_NS: u64 = 1_000_000_000;
/// Checkpoints that cover what a failed job may have written: one that is read and the one before it.
const COVERS: u8 = 2;

/// What is known of room on the host.
#[derive(Debug, Default)]
pub(super) struct HostRoom {
    /// Checkpoints to be written before anything is appended.
    covers: u8,
    /// Nothing is written before.
    retry_ns: u64,
}

impl HostRoom {
    /// What a replay decided, or a failed job left, is to be covered.
    pub(super) fn cover(&mut self) {
        self.covers = COVERS;
    }

    /// Whether appending waits for checkpoints.
    pub(super) fn is_covering(&self) -> bool {
        self.covers > 0
    }

    /// The first of these checkpoints is valid alone: a recovery from an older one would meet what is covered.
    pub(super) fn covers_alone(&self) -> bool {
        self.covers == COVERS
    }

    pub(super) fn covered(&mut self) {
        self.covers = self.covers.saturating_sub(1);
    }
}

/// Whether an error says that the filesystem, or what the user may have of it, is full.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

impl Engine {
    /// Whether the host had no room a moment ago.
    pub(super) fn waits_for_host(&self) -> bool {
        self.clock.boot_ns() < self.host.retry_ns
    }

    /// What found no room is tried again later.
    pub(super) fn pause_writing(&mut self) {
        self.host.retry_ns = self.clock.boot_ns() + RETRY_NS;
    }

    /// Until when, if anything is to be written then.
    pub(super) fn host_retry_ns(&self) -> Option<u64> {
        let due = self.host.is_covering() || self.checkpoint.is_some();
        (due && self.running.is_none() && !self.ended).then_some(self.host.retry_ns)
    }

    /// Everything of this job has ended, some of it without room.
    pub(super) fn leave_job(&mut self, then: Then, error: &io::Error) {
        if !self.shared.is_host_full() {
            tracing::error!(
                drive = %self.shared.drive, uuid = %self.shared.uuid, %error,
                "the filesystem that holds the drive is full: nothing is written until it has room"
            );
        }
        self.shared.set_host_full(true);
        self.pause_writing();
        match then {
            Then::Batch { replies, headers, last_seq, .. } => {
                self.shared.admission.batch_ended(self.clock.boot_ns());
                self.leave_frames(&headers, last_seq);
                refuse(replies);
            }
            Then::Moved { headers, last_seq, .. } => {
                self.cleaning = None;
                self.leave_frames(&headers, last_seq);
            }
            Then::CheckpointWritten => self.leave_checkpoint(),
        }
    }

    /// Nothing is appended behind these frames.
    fn leave_frames(&mut self, headers: &[HeaderBlocks], last_seq: u64) {
        let mut index = self.shared.index_mut();
        for header in headers {
            if index.segment(header.segment).state == SegmentState::Open {
                index.seal(header.segment);
            }
        }
        drop(index);
        // Nothing else is under way: everything up to here is durable or left.
        self.counters.durable_seq = last_seq;
        self.host.cover();
        self.leave_checkpoint();
    }

    /// A checkpoint without room is given up, unless a superblock may name it already: then it goes on later, with the
    /// same superblock.
    fn leave_checkpoint(&mut self) {
        if self.checkpoint.as_ref().is_some_and(Checkpointing::may_be_named) {
            self.end_closing();
        } else if let Some(checkpoint) = self.checkpoint.take() {
            self.abort_checkpoint(&checkpoint);
        }
    }

    /// To be called before the first request: a replay has left out frames that a crash tore.
    pub(crate) fn cover_replay(&mut self) {
        self.host.cover();
    }

    /// Starts the next checkpoint that covers what was left.
    pub(super) fn cover(&mut self) {
        if !self.host.is_covering()
            || self.checkpoint.is_some()
            || self.running.is_some()
            || self.waits_for_host()
        {
            return;
        }
        if self.host.covers_alone() {
            self.start_checkpoint_alone();
        } else {
            self.start_checkpoint();
        }
        self.checkpoint.iter_mut().for_each(Checkpointing::covers);
    }

    /// One of these checkpoints is valid.
    pub(super) fn covered(&mut self) {
        self.host.covered();
        if !self.host.is_covering() && self.shared.is_host_full() {
            tracing::info!(drive = %self.shared.drive, "the filesystem that holds the drive has room again");
            self.shared.set_host_full(false);
        }
    }

    /// Answers waiting requests: there is no room.
    pub(super) fn refuse_changes(&mut self) {
        for request in self.puts.drain(..).chain(self.repairs.drain(..)) {
            let _ = request.reply.send(PutOutcome::NoSpace);
        }
        for request in self.deletes.drain(..) {
            let _ = request.reply.send(Err(Ended));
        }
        for reply in self.keeps.drain(..) {
            let _ = reply.send(Err(Ended));
        }
        for waiter in self.room_waiters.drain(..) {
            let _ = waiter.send(());
        }
    }
}

fn refuse(replies: Replies) {
    for (reply, _place) in replies.puts {
        let _ = reply.send(PutOutcome::NoSpace);
    }
    for reply in replies.deletes {
        let _ = reply.send(Err(Ended));
    }
}
