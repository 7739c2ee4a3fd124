//! The drive's state machine: requests and completions in, device operations and replies out.
//!
//! Invariants:
//! - At most one write job is under way. A batch is written, synced, then acknowledged, so a frame is acknowledged only
//!   when every earlier frame is durable.
//! - The index changes only when the batch with the change is durable.
//! - A segment is released only by a durable checkpoint that does not need it.
//! - After a failed write or sync the engine writes nothing more, unless the filesystem below was full: then the job is
//!   void, and its segments are abandoned (`host_full`).

pub(crate) mod append;
mod batch;
mod checkpoint;
mod clean;
mod debt;
mod host_full;
mod trim;
mod void;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::sync::Arc;

use base::LedgerId;
use base::env::Clock;
use tokio::sync::oneshot;
use wire::drive::{DeleteShards, PutPurpose, PutShard};
use wire::position::Position;

use crate::admission::Place;
use crate::buffer::AlignedBuf;
use crate::device::{Device, Done, Op, ReadVia};
use crate::format::superblock::Superblock;
use crate::index::Entry;
use crate::shared::Shared;
use append::{Change, Counters, HeaderBlocks};
use checkpoint::Checkpointing;
use clean::Cleaning;
use debt::{Debt, SpaceSample};
use host_full::HostRoom;
use trim::Trimming;
use void::Voids;

/// The outcome of a put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PutOutcome {
    Stored,
    /// A shard with this key exists already; the caller compares the two.
    Exists,
    NoSpace,
    Failed,
    /// The shard's extent was discarded.
    Void,
}

/// The drive has failed or is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ended;

/// A put that waits for its batch.
pub(crate) struct PutRequest {
    pub(crate) put: PutShard,
    /// Replace the shard if its entry is still this one, which was found damaged.
    pub(crate) replaces: Option<Entry>,
    pub(crate) reply: oneshot::Sender<PutOutcome>,
    /// The put's place in the queue.
    pub(crate) place: Option<Place>,
}

/// A delete that waits for its batch.
pub(crate) struct DeleteRequest {
    pub(crate) delete: DeleteShards,
    pub(crate) reply: oneshot::Sender<Result<(), Ended>>,
}

/// A read that the caller's thread could not do itself.
pub(crate) struct ReadRequest {
    pub(crate) offset: u64,
    pub(crate) buffer: AlignedBuf,
    pub(crate) via: ReadVia,
    pub(crate) class: ReadClass,
    pub(crate) reply: oneshot::Sender<io::Result<AlignedBuf>>,
}

/// The kind of caller that waits for a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadClass {
    Foreground,
    /// Upkeep: few of these reads run at a time, and they do not count as use of the drive.
    Background,
}

/// All requests to the engine.
pub(crate) enum Request {
    Put(Box<PutRequest>),
    Delete(DeleteRequest),
    /// Keep these positions. With `replace` they replace those kept of their ledgers, even newer ones.
    Keep {
        positions: Vec<Position>,
        replace: bool,
        reply: oneshot::Sender<Result<(), Ended>>,
    },
    Read(ReadRequest),
    /// Clean until there is room, or until cleaning gives nothing back any more.
    MakeRoom(oneshot::Sender<()>),
    /// Write everything, take a checkpoint, and end.
    Close(oneshot::Sender<Result<(), Ended>>),
}

enum Reading {
    Caller(oneshot::Sender<io::Result<AlignedBuf>>, ReadClass),
    Cleaner,
    Trimming,
}

/// Whether a job ends with its writes or with a sync after them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Durability {
    Later,
    Now,
}

/// The replies to send when a batch is durable.
#[derive(Default)]
struct Replies {
    puts: Vec<(oneshot::Sender<PutOutcome>, Option<Place>)>,
    /// Replies to deletes, and to requests to keep positions.
    deletes: Vec<oneshot::Sender<Result<(), Ended>>>,
}

/// The step that follows when a job is done.
enum Then {
    Batch {
        replies: Replies,
        changes: Vec<Change>,
        positions: Vec<Position>,
        headers: Vec<HeaderBlocks>,
        last_seq: u64,
    },
    Moved {
        changes: Vec<Change>,
        headers: Vec<HeaderBlocks>,
        last_seq: u64,
    },
    CheckpointWritten,
}

/// Writes that belong together.
struct Job {
    writes: Vec<(u64, AlignedBuf)>,
    durability: Durability,
    then: Then,
}

/// The job under way.
struct Running {
    writes_left: usize,
    durability: Durability,
    then: Then,
    /// The error of a write that found no room.
    full: Option<io::Error>,
}

/// How large batches and checkpoints get.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Payload after which a batch takes no more puts.
    pub(crate) batch_bytes: u64,
    /// Records after which a batch takes no more requests.
    pub(crate) batch_records: usize,
    /// Bytes appended between checkpoints, at least.
    pub(crate) checkpoint_every_bytes: u64,
    /// Shortest dead run that is given back to the host; `None` if no space is given back.
    pub(crate) trim_run_bytes: Option<u64>,
}

/// The drive's state machine; see the module for its invariants.
pub(crate) struct Engine {
    shared: Arc<Shared>,
    superblock: Superblock,
    limits: Limits,
    counters: Counters,
    clock: Arc<dyn Clock>,
    /// Puts of new data that wait.
    puts: VecDeque<Box<PutRequest>>,
    /// Repairs that wait.
    repairs: VecDeque<Box<PutRequest>>,
    deletes: VecDeque<DeleteRequest>,
    /// Waiting requests to keep positions.
    keeps: Vec<oneshot::Sender<Result<(), Ended>>>,
    /// The newest reported ledger positions, which may not be durable here yet.
    told: BTreeMap<LedgerId, Position>,
    reads: HashMap<u64, Reading>,
    running: Option<Running>,
    checkpoint: Option<Checkpointing>,
    /// Segments that were dead when the last checkpoint started; the next one frees them.
    leaving: Vec<u32>,
    cleaning: Option<Cleaning>,
    trimming: Trimming,
    debt: Debt,
    voids: Voids,
    /// Totals for samples of `debt`, since the drive was opened.
    sums: SpaceSample,
    next_token: u64,
    appended_bytes: u64,
    /// The last job was a background job, so the next one is for users.
    background_was_last: bool,
    /// A request found no room and waits for cleaning.
    pressed: bool,
    /// Callers that wait for room before they send a put.
    room_waiters: Vec<oneshot::Sender<()>>,
    /// Segments cleaned since a user's request last succeeded.
    cleaned_in_vain: u32,
    /// No segment gives back `1 / vain_worth` of its size, and none has changed since the search, which takes long.
    vain_worth: u64,
    background_reads: usize,
    /// When a user request last reached the engine; reads from the page cache do not.
    last_request_ns: u64,
    /// Earliest time at which idle cleaning may go on.
    idle_not_before_ns: u64,
    /// There was no idle work to do, and no request has come since.
    nothing_idle: bool,
    closing: Option<oneshot::Sender<Result<(), Ended>>>,
    host: HostRoom,
    ended: bool,
}

impl Engine {
    /// Starts the engine with the result of recovery.
    pub(crate) fn new(
        shared: Arc<Shared>,
        superblock: Superblock,
        next_seq: u64,
        limits: Limits,
        clock: Arc<dyn Clock>,
    ) -> Self {
        let next_generation = u64::from(superblock.incarnation) << 32 | 1;
        Self {
            shared,
            superblock,
            limits,
            counters: Counters { next_seq, durable_seq: next_seq - 1, next_generation },
            clock,
            puts: VecDeque::new(),
            repairs: VecDeque::new(),
            deletes: VecDeque::new(),
            keeps: Vec::new(),
            told: BTreeMap::new(),
            reads: HashMap::new(),
            running: None,
            checkpoint: None,
            leaving: Vec::new(),
            cleaning: None,
            trimming: Trimming::new(limits.trim_run_bytes),
            debt: Debt::default(),
            voids: Voids::default(),
            sums: SpaceSample::default(),
            next_token: 0,
            appended_bytes: 0,
            background_was_last: false,
            pressed: false,
            room_waiters: Vec::new(),
            cleaned_in_vain: 0,
            vain_worth: 0,
            background_reads: 0,
            last_request_ns: 0,
            idle_not_before_ns: 0,
            nothing_idle: false,
            closing: None,
            host: HostRoom::default(),
            ended: false,
        }
    }

    /// Accepts a request. Apart from reads, which start at once, nothing happens before [`Engine::pump`].
    pub(crate) fn accept(&mut self, request: Request, device: &mut dyn Device) {
        let background = matches!(&request, Request::Read(read) if read.class == ReadClass::Background);
        if !background {
            self.last_request_ns = self.clock.boot_ns();
            self.nothing_idle = false;
        }
        match request {
            Request::Put(put) => {
                if let Some(position) = put.put.position {
                    self.note_position(position, false);
                }
                match put.put.purpose {
                    PutPurpose::Write => self.puts.push_back(put),
                    PutPurpose::Repair => self.repairs.push_back(put),
                }
            }
            Request::Delete(delete) => {
                if let Some(position) = delete.delete.position {
                    self.note_position(position, false);
                }
                self.deletes.push_back(delete);
            }
            Request::Keep { positions, replace, reply } => {
                positions.into_iter().for_each(|position| self.note_position(position, replace));
                self.keeps.push(reply);
            }
            Request::Read(ReadRequest { offset, buffer, via, class, reply }) => {
                let token = self.token();
                self.background_reads += usize::from(background);
                self.reads.insert(token, Reading::Caller(reply, class));
                device.submit(Op::Read { token, offset, buffer, via });
            }
            Request::MakeRoom(reply) => self.room_waiters.push(reply),
            Request::Close(reply) => self.closing = Some(reply),
        }
    }

    /// The number of puts, deletes and positions that wait; above some number the caller stops accepting.
    pub(crate) fn backlog(&self) -> usize {
        self.puts.len() + self.repairs.len() + self.deletes.len() + self.keeps.len()
    }

    /// Background reads under way.
    pub(crate) fn background_reads(&self) -> usize {
        self.background_reads
    }

    /// Reads under way.
    pub(crate) fn reads_in_flight(&self) -> usize {
        self.reads.len()
    }

    /// Whether the engine has ended: closed, or failed and asked to close.
    pub(crate) fn has_ended(&self) -> bool {
        self.ended && self.reads.is_empty() && self.running.is_none() && !self.trimming.is_under_way()
    }

    /// Whether [`Engine::pump`] would make progress without a completion.
    pub(crate) fn wants_pump(&self) -> bool {
        if self.running.is_some() || self.ended || self.shared.has_failed() {
            return false;
        }
        match &self.cleaning {
            _ if self.checkpoint.is_some() || self.host.is_covering() => !self.waits_for_host(),
            Some(cleaning) => cleaning.wants_step() && self.may_step(&self.shared.index()),
            None => {
                (self.idle_work_ready() && !self.trimming.is_under_way())
                    || !self.room_waiters.is_empty()
                    || (self.pressed && self.can_reclaim(&self.shared.index()))
            }
        }
    }

    /// Starts every operation that can start.
    pub(crate) fn pump(&mut self, device: &mut dyn Device) {
        if self.shared.has_failed() {
            self.give_up();
            return;
        }
        if self.ended {
            self.give_up();
            return;
        }
        self.pressed &= self.backlog() > 0;
        self.answer_room_waiters();
        if self.host.is_covering() {
            self.refuse_changes();
            self.cover();
        } else {
            self.step_cleaning(device);
            self.maybe_start_checkpoint();
        }
        if self.running.is_none()
            && let Some(job) = self.next_job()
        {
            self.start(job, device);
        }
    }

    fn next_job(&mut self) -> Option<Job> {
        if self.background_was_last
            && let Some(job) = self.user_job()
        {
            self.background_was_last = false;
            return Some(job);
        }
        if let Some(job) = self.background_job() {
            self.background_was_last = true;
            return Some(job);
        }
        let job = self.user_job();
        if job.is_none() {
            self.finish_closing();
        }
        job
    }

    fn background_job(&mut self) -> Option<Job> {
        if let Some(job) = self.checkpoint_job() {
            return Some(job);
        }
        self.move_job()
    }

    fn start(&mut self, job: Job, device: &mut dyn Device) {
        assert!(!job.writes.is_empty(), "a job writes something");
        self.running = Some(Running {
            writes_left: job.writes.len(),
            durability: job.durability,
            then: job.then,
            full: None,
        });
        for (offset, buffer) in job.writes {
            let token = self.token();
            device.submit(Op::Write { token, offset, buffer });
        }
    }

    /// Handles a completion.
    pub(crate) fn complete(&mut self, done: Done, device: &mut dyn Device) {
        if let Some(reading) = self.reads.remove(&done.token) {
            let result = done.result.and_then(|()| done.buffer.ok_or_else(|| io::Error::other("no buffer")));
            match reading {
                // The receiver is gone if the caller gave up.
                Reading::Caller(reply, class) => {
                    self.background_reads -= usize::from(class == ReadClass::Background);
                    drop(reply.send(result));
                }
                Reading::Cleaner => self.cleaner_read(done.token, result),
                Reading::Trimming => self.header_read(result),
            }
            return;
        }
        if self.punched(done.token, &done.result) {
            return;
        }
        let Some(running) = &mut self.running else { return };
        match done.result {
            Ok(()) => {}
            Err(error) if host_full::is_full(&error) => running.full = Some(error),
            Err(error) => {
                self.shared.fail(format!("write or sync: {error}"));
                // The other writes of the job may still be in flight; their completions find no job.
                self.running = None;
                self.give_up();
                return;
            }
        }
        running.writes_left = running.writes_left.saturating_sub(1);
        if running.writes_left > 0 {
            return;
        }
        if let Some(error) = running.full.take() {
            let running = self.running.take().expect("it was there a moment ago");
            self.leave_job(running.then, &error);
            return;
        }
        if running.durability == Durability::Now {
            running.durability = Durability::Later;
            running.writes_left = 1;
            let token = self.token();
            device.submit(Op::Sync { token });
            return;
        }
        let running = self.running.take().expect("it was there a moment ago");
        self.finish(running.then);
    }

    fn finish(&mut self, then: Then) {
        self.vain_worth = 0;
        match then {
            Then::Batch { replies, changes, positions, headers, last_seq } => {
                self.cleaned_in_vain = 0;
                self.shared.admission.batch_ended(self.clock.boot_ns());
                self.apply(&changes, &positions, &headers, last_seq);
                self.look_at_debt();
                for (reply, place) in replies.puts {
                    drop(place);
                    let _ = reply.send(PutOutcome::Stored);
                }
                for reply in replies.deletes {
                    let _ = reply.send(Ok(()));
                }
            }
            Then::Moved { changes, headers, last_seq } => {
                self.apply(&changes, &[], &headers, last_seq);
            }
            Then::CheckpointWritten => self.checkpoint_written(),
        }
    }

    fn apply(&mut self, changes: &[Change], positions: &[Position], headers: &[HeaderBlocks], last_seq: u64) {
        let mut index = self.shared.index_mut();
        for change in changes {
            match change {
                Change::Set(key, entry) => index.set(*key, *entry),
                Change::Remove(key) => index.remove(key),
            }
        }
        positions.iter().for_each(|position| index.set_position(*position));
        drop(index);
        for header in headers {
            self.shared.remember_header(header);
        }
        self.counters.durable_seq = last_seq;
        self.shared.set_durable_seq(last_seq);
    }

    /// Samples the reclaim debt, and sets or lifts the limit on new data.
    fn look_at_debt(&mut self) {
        let now_ns = self.clock.boot_ns();
        if !self.debt.is_due(now_ns) {
            return;
        }
        let (garbage_bytes, room_bytes) = {
            let index = self.shared.index();
            (index.usage().garbage_bytes, index.room_bytes())
        };
        let limit = self.debt.look(now_ns, SpaceSample { garbage_bytes, room_bytes, ..self.sums });
        if self.shared.admission.limit(limit) {
            let limit_mib_per_s = limit.map(|limit| limit >> 20);
            tracing::info!(drive = %self.shared.drive, ?limit_mib_per_s, "reclaim debt changes what is taken");
        }
    }

    /// Fails all waiting requests. Reads in flight still end by themselves.
    fn give_up(&mut self) {
        if let Some(Running { then: Then::Batch { replies, .. }, .. }) = self.running.take() {
            fail(replies);
        }
        for request in self.puts.drain(..).chain(self.repairs.drain(..)) {
            let _ = request.reply.send(PutOutcome::Failed);
        }
        for request in self.deletes.drain(..) {
            let _ = request.reply.send(Err(Ended));
        }
        for reply in self.keeps.drain(..) {
            let _ = reply.send(Err(Ended));
        }
        self.room_waiters.clear();
        self.checkpoint = None;
        self.cleaning = None;
        if let Some(reply) = self.closing.take() {
            let _ = reply.send(Err(Ended));
            self.ended = true;
        }
    }

    /// Stops without writing anything more: as after a crash, except that acknowledged data is durable.
    pub(crate) fn abandon(&mut self) {
        self.give_up();
        self.ended = true;
    }

    fn token(&mut self) -> u64 {
        self.next_token += 1;
        self.next_token - 1
    }
}

fn fail(replies: Replies) {
    for (reply, _place) in replies.puts {
        let _ = reply.send(PutOutcome::Failed);
    }
    for reply in replies.deletes {
        let _ = reply.send(Err(Ended));
    }
}

/// Runs the engine until it waits for a request, on the calling thread. For devices that finish at once.
pub(crate) fn run_inline(engine: &mut Engine, device: &mut dyn Device) {
    let mut done = Vec::new();
    loop {
        engine.pump(device);
        device.poll(&mut done);
        if done.is_empty() && !engine.wants_pump() {
            return;
        }
        for one in done.drain(..) {
            engine.complete(one, device);
        }
    }
}

#[cfg(test)]
mod tests;
