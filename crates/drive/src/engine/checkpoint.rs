//! Writing an index checkpoint beside user batches.
//!
//! Shards are copied slice by slice while the index changes. A slice may miss a change or contain one too early. Every
//! such change is in a frame behind the frontier, and replaying those frames in order gives the same result either way.

use base::LedgerId;
use wire::drive::ShardKey;

use super::{Durability, Engine, Job, Then};
use crate::buffer::AlignedBuf;
use crate::format::checkpoint::{
    ENTRY_BYTES, Items, RUN_BLOCKS_MAX, Run, SEGMENT_BYTES, SegmentNote, items_per_run,
};
use crate::format::frame::POSITION_BYTES;
use crate::format::segment::{SegmentClass, SegmentHeader};
use crate::format::superblock::CheckpointPointer;
use crate::format::{BLOCK, SUPERBLOCK_OFFSETS};
use crate::index::SegmentState;

/// Runs written by one job: half a MiB each.
const RUNS_PER_JOB: usize = 2;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Entries,
    Positions,
    Segments,
    /// All runs are written, but not yet durable.
    Sync,
    FirstSuperblock,
    SecondSuperblock,
}

impl Stage {
    /// Whether some runs are not written yet.
    fn has_runs(self) -> bool {
        matches!(self, Self::Entries | Self::Positions | Self::Segments)
    }
}

/// A checkpoint being written.
pub(super) struct Checkpointing {
    pointer: CheckpointPointer,
    notes: Vec<SegmentNote>,
    notes_written: usize,
    /// The older checkpoint, which stays readable beside this one.
    previous: CheckpointPointer,
    /// Segments that died before the older checkpoint: this checkpoint frees them.
    leaving: Vec<u32>,
    /// Segments that have died since the older checkpoint: the next checkpoint frees them.
    dead: Vec<u32>,
    cursor: Option<ShardKey>,
    position_cursor: Option<LedgerId>,
    /// Blocks used in the last index segment.
    used_blocks: u32,
    stage: Stage,
    closes: bool,
    /// Whether this checkpoint covers abandoned frames.
    covers: bool,
}

impl Checkpointing {
    /// Whether a superblock may already point to this checkpoint.
    pub(super) fn may_be_named(&self) -> bool {
        matches!(self.stage, Stage::FirstSuperblock | Stage::SecondSuperblock)
    }

    /// Marks this checkpoint as one that covers abandoned frames.
    pub(super) fn covers(&mut self) {
        self.covers = true;
    }
}

impl Engine {
    /// Starts a checkpoint if one is due and none is under way.
    pub(super) fn maybe_start_checkpoint(&mut self) {
        // Between jobs everything written is durable, as the frontier requires.
        if self.checkpoint.is_some() || self.running.is_some() || self.waits_for_host() {
            return;
        }
        let index = self.shared.index();
        let index_bytes = index.len() as u64 * ENTRY_BYTES as u64;
        // A large index is checkpointed less often, so that checkpoints take at most a quarter of the bandwidth.
        let mut due = self.appended_bytes >= self.limits.checkpoint_every_bytes.max(4 * index_bytes);
        let pressed = self.is_pressed();
        if !due && (pressed || index.free_segments() <= index.user_reserve() + 2) {
            let dead = index.dead_count();
            due = dead > 0 && (pressed || self.cleaning.is_none() || dead >= index.user_reserve() / 2);
        }
        drop(index);
        if due {
            self.start_checkpoint();
        }
    }

    /// Starts a checkpoint of everything that is durable now. The older checkpoint stays valid, and so does all that a
    /// recovery from it needs.
    pub(crate) fn start_checkpoint(&mut self) {
        let previous = self.superblock.checkpoint.clone();
        self.begin_checkpoint(previous, self.leaving.clone());
    }

    /// Starts a checkpoint of the decisions of recovery. No older checkpoint is used from then on.
    pub(crate) fn start_checkpoint_alone(&mut self) {
        let leaving = self.shared.index().dead_segments();
        self.begin_checkpoint(CheckpointPointer::default(), leaving);
    }

    fn begin_checkpoint(&mut self, previous: CheckpointPointer, leaving: Vec<u32>) {
        assert!(self.running.is_none(), "a checkpoint starts between two jobs");
        let index = self.shared.index();
        let mut dead = index.dead_segments();
        dead.retain(|id| !leaving.contains(id));
        let notes = index.notes(&leaving);
        drop(index);
        self.appended_bytes = 0;
        self.checkpoint = Some(Checkpointing {
            pointer: CheckpointPointer {
                generation: self.superblock.checkpoint.generation + 1,
                frontier_seq: self.counters.durable_seq,
                next_segment_generation: self.counters.next_generation,
                runs: 0,
                entries: 0,
                segments: Vec::new(),
            },
            notes,
            notes_written: 0,
            previous,
            leaving,
            dead,
            cursor: None,
            position_cursor: None,
            used_blocks: 0,
            stage: Stage::Entries,
            closes: false,
            covers: false,
        });
    }

    /// Writes the last checkpoint and ends the engine, once no request waits.
    pub(super) fn finish_closing(&mut self) {
        if self.closing.is_some() && self.backlog() == 0 && self.checkpoint.is_none() && !self.ended {
            self.cleaning = None;
            self.start_checkpoint();
            if let Some(checkpoint) = &mut self.checkpoint {
                checkpoint.closes = true;
            }
        }
    }

    /// Whether the last checkpoint is under way. Frames appended during it would not be replayed.
    pub(super) fn is_sealed(&self) -> bool {
        self.ended || self.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.closes)
    }

    /// The next writes of the checkpoint under way.
    pub(super) fn checkpoint_job(&mut self) -> Option<Job> {
        if self.waits_for_host() {
            return None;
        }
        let mut checkpoint = self.checkpoint.take()?;
        let mut writes = Vec::new();
        while writes.len() < RUNS_PER_JOB && checkpoint.stage.has_runs() {
            let items = self.next_items(&mut checkpoint);
            if self.place_run(&mut checkpoint, items, &mut writes).is_err() {
                self.abort_checkpoint(&checkpoint);
                return None;
            }
        }
        let durability = match checkpoint.stage {
            Stage::Entries | Stage::Positions | Stage::Segments => Durability::Later,
            Stage::Sync => Durability::Now,
            Stage::FirstSuperblock | Stage::SecondSuperblock => {
                writes.push(self.superblock_write(&checkpoint));
                Durability::Now
            }
        };
        self.checkpoint = Some(checkpoint);
        Some(Job { writes, durability, then: Then::CheckpointWritten })
    }

    fn next_items(&self, checkpoint: &mut Checkpointing) -> Items {
        let run_blocks = RUN_BLOCKS_MAX.min(self.shared.geometry.segment_blocks() - 1);
        if checkpoint.stage == Stage::Entries {
            let limit = items_per_run(run_blocks, ENTRY_BYTES);
            let index = self.shared.index();
            let entries: Vec<_> =
                index.after(checkpoint.cursor).take(limit).map(|(key, entry)| (*key, *entry)).collect();
            checkpoint.cursor = entries.last().map(|(key, _)| *key).or(checkpoint.cursor);
            checkpoint.pointer.entries += entries.len() as u64;
            if entries.len() < limit {
                checkpoint.stage = Stage::Positions;
            }
            return Items::Entries(entries);
        }
        if checkpoint.stage == Stage::Positions {
            return self.next_positions(checkpoint, items_per_run(run_blocks, POSITION_BYTES));
        }
        let limit = items_per_run(run_blocks, SEGMENT_BYTES);
        let rest = &checkpoint.notes[checkpoint.notes_written..];
        let notes = rest[..rest.len().min(limit)].to_vec();
        checkpoint.notes_written += notes.len();
        if checkpoint.notes_written == checkpoint.notes.len() {
            checkpoint.stage = Stage::Sync;
        }
        Items::Segments(notes)
    }

    fn next_positions(&self, checkpoint: &mut Checkpointing, limit: usize) -> Items {
        let after = checkpoint.position_cursor;
        let positions: Vec<_> = self.shared.index().positions_after(after).take(limit).copied().collect();
        checkpoint.position_cursor = positions.last().map(|position| position.ledger).or(after);
        if positions.len() < limit {
            checkpoint.stage = Stage::Segments;
        }
        Items::Positions(positions)
    }

    /// Places a run, in a new index segment if the last one is full.
    fn place_run(
        &mut self,
        checkpoint: &mut Checkpointing,
        items: Items,
        writes: &mut Vec<(u64, AlignedBuf)>,
    ) -> Result<(), super::append::NoRoom> {
        let geometry = self.shared.geometry;
        let run = Run { generation: checkpoint.pointer.generation, index: checkpoint.pointer.runs, items };
        let bytes = run.encode();
        let blocks = (bytes.len() / BLOCK) as u32;
        if checkpoint.used_blocks == 0 || checkpoint.used_blocks + blocks > geometry.segment_blocks() {
            let generation = self.counters.take_generation();
            let mut index = self.shared.index_mut();
            let segment = index
                .take_free(SegmentState::Index, SegmentClass::Index, generation)
                .ok_or(super::append::NoRoom)?;
            drop(index);
            let header =
                SegmentHeader { uuid: self.shared.uuid, segment, generation, class: SegmentClass::Index };
            writes.push((geometry.offset(segment, 0), header.encode()));
            checkpoint.pointer.segments.push(segment);
            checkpoint.used_blocks = 1;
        }
        let segment = *checkpoint.pointer.segments.last().expect("a segment was just taken");
        writes.push((geometry.offset(segment, checkpoint.used_blocks), bytes));
        checkpoint.used_blocks += blocks;
        checkpoint.pointer.runs += 1;
        Ok(())
    }

    fn superblock_write(&self, checkpoint: &Checkpointing) -> (u64, AlignedBuf) {
        let mut superblock = self.superblock.clone();
        superblock.sequence += 1;
        superblock.checkpoint = checkpoint.pointer.clone();
        superblock.previous = checkpoint.previous.clone();
        superblock.closed = checkpoint.closes;
        // The superblocks take turns, so that a torn write leaves the other one intact.
        let slot = SUPERBLOCK_OFFSETS[(superblock.sequence % 2) as usize];
        (slot, superblock.encode())
    }

    /// Handles the end of one step of the checkpoint on the device.
    pub(super) fn checkpoint_written(&mut self) {
        let Some(mut checkpoint) = self.checkpoint.take() else { return };
        match checkpoint.stage {
            Stage::Entries | Stage::Positions | Stage::Segments => {}
            Stage::Sync => checkpoint.stage = Stage::FirstSuperblock,
            Stage::FirstSuperblock => {
                self.superblock.sequence += 1;
                checkpoint.stage = Stage::SecondSuperblock;
            }
            Stage::SecondSuperblock => {
                self.superblock.sequence += 1;
                self.adopt_checkpoint(checkpoint);
                return;
            }
        }
        self.checkpoint = Some(checkpoint);
    }

    /// Both superblocks point to the checkpoint: frees the segments that only still older checkpoints needed.
    fn adopt_checkpoint(&mut self, checkpoint: Checkpointing) {
        let replaced = std::mem::replace(&mut self.superblock.checkpoint, checkpoint.pointer);
        let older = std::mem::replace(&mut self.superblock.previous, checkpoint.previous);
        self.superblock.closed = checkpoint.closes;
        let mut unneeded = older.segments;
        if self.superblock.previous.generation != replaced.generation {
            unneeded.extend(replaced.segments);
        }
        self.leaving = checkpoint.dead;
        self.sums.reclaimed_bytes += checkpoint.leaving.len() as u64 * self.shared.geometry.segment_bytes;
        let mut index = self.shared.index_mut();
        for segment in unneeded.into_iter().chain(checkpoint.leaving) {
            index.release(segment);
        }
        drop(index);
        if checkpoint.covers {
            self.covered();
        }
        if checkpoint.closes
            && let Some(reply) = self.closing.take()
        {
            self.ended = true;
            let _ = reply.send(Ok(()));
        }
    }

    /// Gives up the checkpoint because no segment is free: the older one stays valid.
    pub(super) fn abort_checkpoint(&mut self, checkpoint: &Checkpointing) {
        tracing::warn!(drive = %self.shared.drive, "no room for an index checkpoint");
        self.pause_writing();
        self.nothing_idle = true;
        let mut index = self.shared.index_mut();
        for segment in &checkpoint.pointer.segments {
            index.release(*segment);
        }
        drop(index);
        self.end_closing();
    }

    /// If the drive is being closed, ends without a last checkpoint.
    pub(super) fn end_closing(&mut self) {
        if let Some(reply) = self.closing.take() {
            // Everything acknowledged is durable; the next open only has more frames to replay.
            self.ended = true;
            let _ = reply.send(Ok(()));
        }
    }
}
