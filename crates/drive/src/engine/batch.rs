//! User batches: chooses the waiting requests for the next group commit.

use std::collections::{HashSet, VecDeque};

use wire::drive::{PutPurpose, ShardKey};
use wire::position::Position;

use super::append::{Item, Plan};
use super::{DeleteRequest, Durability, Engine, Job, Limits, PutOutcome, PutRequest, Replies, Then};
use crate::admission::REPAIR_PART;
use crate::format::BLOCK;
use crate::format::frame::RecordOp;
use crate::format::segment::SegmentClass;
use crate::index::{Index, Purpose};

/// Most ledger positions in one batch.
const POSITIONS_MAX: usize = 1024;

/// What to do with the put at the head of the queue.
enum Verdict {
    Add,
    Answer(PutOutcome),
}

impl Engine {
    /// The next group commit, if a request waits and there is room.
    pub(super) fn user_job(&mut self) -> Option<Job> {
        if self.backlog() == 0 || self.is_sealed() || self.host.is_covering() {
            return None;
        }
        let shared = self.shared.clone();
        let mut index = shared.index_mut();
        let mut plan = Plan::with_positions(self.unkept_positions(&index));
        let mut replies = Replies::default();
        let mut keys = HashSet::new();
        self.take_deletes(&mut index, &mut plan, &mut replies, &mut keys);
        self.take_all_puts(&mut index, &mut plan, &mut replies, &mut keys);
        self.take_keeps(&mut index, &mut plan, &mut replies);
        if plan.is_empty() {
            return None;
        }
        self.pressed = false;
        let last_seq = plan.commit_space(&mut index);
        drop(index);
        self.shared.admission.batch_began(self.clock.boot_ns());
        let encoded = plan.encode(shared.geometry, shared.uuid, self.counters.durable_seq);
        let written_bytes = encoded.writes.iter().map(|(_, buffer)| buffer.len() as u64).sum::<u64>();
        self.appended_bytes += written_bytes;
        self.sums.written_bytes += written_bytes;
        let then = Then::Batch {
            replies,
            changes: encoded.changes,
            positions: encoded.positions,
            headers: encoded.headers,
            last_seq,
        };
        Some(Job { writes: encoded.writes, durability: Durability::Now, then })
    }

    /// Takes deletes first, because they make room. A put and a delete of one shard never share a batch.
    fn take_deletes(
        &mut self,
        index: &mut Index,
        plan: &mut Plan,
        replies: &mut Replies,
        keys: &mut HashSet<ShardKey>,
    ) {
        while let Some(request) = self.deletes.pop_front() {
            let full = plan.records + request.delete.keys.len() > self.limits.batch_records;
            if full && !plan.is_empty() {
                self.deletes.push_front(request);
                return;
            }
            match self.take_delete(index, plan, keys, request) {
                Ok(Some(reply)) => replies.deletes.push(reply),
                Ok(None) => {}
                Err(request) => {
                    self.deletes.push_front(request);
                    self.pressed = true;
                    return;
                }
            }
        }
    }

    /// Adds the tombstones of one request. If there is no room for all of them, the request is returned. The tombstones
    /// already added do no harm, as the caller wants those shards deleted anyway.
    fn take_delete(
        &mut self,
        index: &mut Index,
        plan: &mut Plan,
        keys: &mut HashSet<ShardKey>,
        request: DeleteRequest,
    ) -> Result<Option<tokio::sync::oneshot::Sender<Result<(), super::Ended>>>, DeleteRequest> {
        let mut waits = false;
        if request.delete.is_void {
            self.voids.add(&request.delete.keys);
        }
        for key in &request.delete.keys {
            if index.get(key).is_none() {
                continue;
            }
            waits = true;
            if keys.contains(key) {
                continue;
            }
            let purpose = if self.can_reclaim(index) { Purpose::Delete } else { Purpose::DeleteInNeed };
            if plan
                .add(index, &mut self.counters, SegmentClass::Small, purpose, Item::tombstone(*key))
                .is_err()
            {
                return Err(request);
            }
            keys.insert(*key);
        }
        if waits {
            return Ok(Some(request.reply));
        }
        // None of these shards is stored, and all durable changes are applied: the delete is done.
        let _ = request.reply.send(Ok(()));
        Ok(None)
    }

    /// Notes a position of a ledger that a caller reports as durable.
    pub(super) fn note_position(&mut self, position: Position, replace: bool) {
        let known = self.told.get(&position.ledger).copied();
        let known = known.or_else(|| self.shared.index().position(position.ledger));
        if replace || known.is_none_or(|known| known.seq < position.seq) {
            self.told.insert(position.ledger, position);
        }
    }

    /// Positions that are not durable on this drive. Called between two batches, so no position is being written.
    fn unkept_positions(&mut self, index: &Index) -> Vec<Position> {
        self.told.retain(|ledger, told| index.position(*ledger) != Some(*told));
        self.told.values().take(POSITIONS_MAX).copied().collect()
    }

    /// Takes requests to keep positions: the next batch writes all those positions, unless they are durable already.
    fn take_keeps(&mut self, index: &mut Index, plan: &mut Plan, replies: &mut Replies) {
        if self.keeps.is_empty() {
            return;
        }
        if self.told.is_empty() {
            for reply in self.keeps.drain(..) {
                let _ = reply.send(Ok(()));
            }
            return;
        }
        let purpose = if self.can_reclaim(index) { Purpose::Delete } else { Purpose::DeleteInNeed };
        if plan.is_empty() && plan.add_positions(index, &mut self.counters, purpose).is_err() {
            self.pressed = true;
            return;
        }
        if self.told.len() <= POSITIONS_MAX {
            replies.deletes.append(&mut self.keeps);
        }
    }

    /// Takes puts. Repairs take turns with new data: they get a part of the batch and the room that new data leaves.
    fn take_all_puts(
        &mut self,
        index: &mut Index,
        plan: &mut Plan,
        replies: &mut Replies,
        keys: &mut HashSet<ShardKey>,
    ) {
        let whole = self.limits;
        let part = Limits {
            batch_bytes: whole.batch_bytes / REPAIR_PART,
            batch_records: plan.records + whole.batch_records / REPAIR_PART as usize,
            ..whole
        };
        let mut repairs = std::mem::take(&mut self.repairs);
        let mut puts = std::mem::take(&mut self.puts);
        self.take_puts(&mut repairs, part, index, plan, replies, keys);
        self.take_puts(&mut puts, whole, index, plan, replies, keys);
        self.take_puts(&mut repairs, whole, index, plan, replies, keys);
        (self.repairs, self.puts) = (repairs, puts);
    }

    fn take_puts(
        &mut self,
        queue: &mut VecDeque<Box<PutRequest>>,
        limits: Limits,
        index: &mut Index,
        plan: &mut Plan,
        replies: &mut Replies,
        keys: &mut HashSet<ShardKey>,
    ) {
        while let Some(request) = queue.pop_front() {
            let full = plan.records >= limits.batch_records || plan.payload_bytes >= limits.batch_bytes;
            if full || keys.contains(&request.put.key) {
                queue.push_front(request);
                return;
            }
            if self.voids.has(&request.put.key) {
                let _ = request.reply.send(PutOutcome::Void);
                continue;
            }
            if let Verdict::Answer(outcome) = verdict(index, &request) {
                let _ = request.reply.send(outcome);
                continue;
            }
            // A caller that gave up may have deleted the shard since: stored now, the shard would never go away.
            if request.reply.is_closed() {
                continue;
            }
            let item = put_item(&request);
            let class = SegmentClass::from(request.put.class);
            let len_bytes = request.put.bytes.len() as u64;
            if plan.add(index, &mut self.counters, class, purpose(&request), item).is_ok() {
                self.shared.take(len_bytes);
                keys.insert(request.put.key);
                replies.puts.push((request.reply, request.place));
            } else if plan.is_empty() && !self.can_reclaim(index) && self.running.is_none() {
                self.shared.refuse(&index.usage(), len_bytes);
                let _ = request.reply.send(PutOutcome::NoSpace);
            } else {
                queue.push_front(request);
                self.pressed = true;
                return;
            }
        }
    }
}

fn verdict(index: &Index, request: &PutRequest) -> Verdict {
    match (index.get(&request.put.key), request.replaces) {
        (None, _) if !index.may_grow() => Verdict::Answer(PutOutcome::NoSpace),
        (None, _) => Verdict::Add,
        (Some(entry), Some(replaced)) if entry == replaced => Verdict::Add,
        (Some(_), _) => Verdict::Answer(PutOutcome::Exists),
    }
}

fn purpose(request: &PutRequest) -> Purpose {
    match request.put.purpose {
        PutPurpose::Write => Purpose::Put,
        PutPurpose::Repair => Purpose::Repair,
    }
}

fn put_item(request: &PutRequest) -> Item {
    let put = &request.put;
    Item {
        op: RecordOp::Put,
        key: put.key,
        shape: put.shape,
        note: put.note,
        blocks: (put.bytes.len() / BLOCK) as u32,
        sums: put.checksums.clone(),
        payload: put.bytes.clone(),
    }
}
