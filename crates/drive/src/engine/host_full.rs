//! A full filesystem below a file-backed drive: a temporary state.
//!
//! A job that finds no room is void: the segments that it wrote to are abandoned, and its requests are answered with
//! "no room". Its frames may be on the device, whole or in part. So before anything is appended again, two checkpoints
//! cover them, and no recovery reads them. These checkpoints also find out whether there is room again.

use std::io;

use super::append::HeaderBlocks;
use super::checkpoint::Checkpointing;
use super::{Ended, Engine, PutOutcome, Replies, Then};
use crate::index::SegmentState;

/// Pause in writing after the host had no room.
const RETRY_NS: u64 = 1_000_000_000;
/// Checkpoints that cover what a failed job may have written: the newest and the older one, from which recovery may
/// start.
const COVERS: u8 = 2;

/// What the engine knows about room on the host.
#[derive(Debug, Default)]
pub(super) struct HostRoom {
    /// Checkpoints that must still be written before anything is appended.
    covers: u8,
    /// Boot time before which nothing is written.
    retry_ns: u64,
}

impl HostRoom {
    /// Demands checkpoints that cover the decisions of a replay, or the remains of a failed job.
    pub(super) fn cover(&mut self) {
        self.covers = COVERS;
    }

    /// Whether appending waits for checkpoints.
    pub(super) fn is_covering(&self) -> bool {
        self.covers > 0
    }

    /// The first of these checkpoints is the only valid one: a recovery from an older one would read what must be
    /// covered.
    pub(super) fn covers_alone(&self) -> bool {
        self.covers == COVERS
    }

    pub(super) fn covered(&mut self) {
        self.covers = self.covers.saturating_sub(1);
    }
}

/// Whether an error says that the filesystem or the user's quota is full.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

impl Engine {
    /// Whether the host had no room a moment ago.
    pub(super) fn waits_for_host(&self) -> bool {
        self.clock.boot_ns() < self.host.retry_ns
    }

    /// Pauses writing: the failed work is retried later.
    pub(super) fn pause_writing(&mut self) {
        self.host.retry_ns = self.clock.boot_ns() + RETRY_NS;
    }

    /// When the pause ends, if something is to be written then.
    pub(super) fn host_retry_ns(&self) -> Option<u64> {
        let due = self.host.is_covering() || self.checkpoint.is_some();
        (due && self.running.is_none() && !self.ended).then_some(self.host.retry_ns)
    }

    /// Every operation of this job has ended, and some found no room.
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

    /// Abandons these frames: nothing is appended behind them.
    fn leave_frames(&mut self, headers: &[HeaderBlocks], last_seq: u64) {
        let mut index = self.shared.index_mut();
        for header in headers {
            if index.segment(header.segment).state == SegmentState::Open {
                index.seal(header.segment);
            }
        }
        drop(index);
        // No other write is under way: every frame up to here is durable or abandoned.
        self.counters.durable_seq = last_seq;
        self.host.cover();
        self.leave_checkpoint();
    }

    /// Gives up a checkpoint that found no room. If a superblock may name it already, it goes on later with the same
    /// superblock.
    fn leave_checkpoint(&mut self) {
        if self.checkpoint.as_ref().is_some_and(Checkpointing::may_be_named) {
            self.end_closing();
        } else if let Some(checkpoint) = self.checkpoint.take() {
            self.abort_checkpoint(&checkpoint);
        }
    }

    /// To be called before the first request: covers frames that a crash tore and a replay left out.
    pub(crate) fn cover_replay(&mut self) {
        self.host.cover();
    }

    /// Starts the next checkpoint that covers abandoned frames.
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

    /// Answers waiting requests: no room.
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
