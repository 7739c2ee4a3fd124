//! The side of a connection that calls.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::env::Env;
use base::program::Program;
use base::{DriveId, LedgerId};
use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite, BufReader};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::task::JoinHandle;

use super::outbox::{Outbox, outbox};
use super::{ACKNOWLEDGE_EVENTS, CALLS_MAX, Connection, Dial, PING, SILENCE};
use crate::drive::DriveStat;
use crate::encoding::{self, Operations};
use crate::frame::{Frame, FrameKind, read_frame, write_frame};
use crate::message::{
    self, AnswerHead, DRIVE, Envelope, GREET, GreetRequest, OWNER, Packed, Payload, Refusal, SESSION,
    SessionRequest, StreamEvent, Welcome,
};
use crate::meta::EventSink;
use crate::rights::{Grant, Proofs};
use crate::trace;

/// The code of the call by which a stream goes on.
const ATTACH: u16 = SESSION.0[2].1;
/// Larger payloads do not hold up metadata and events: they go by a connection for data.
const PROCESS_PAYLOAD_MAX: usize = 64 << 10;
/// The shortest and the longest pause between two attempts to connect.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(2));

/// Everything that a peer needs.
pub struct PeerOptions {
    /// Clock and randomness.
    pub env: Env,
    /// The runtime for its tasks.
    pub runtime: Handle,
    /// Opens connections.
    pub dial: Dial,
    /// Connections for data, beside the one for metadata and events.
    pub data_connections: usize,
    /// What this process was given, by any node.
    pub proofs: Arc<Proofs>,
}

/// A process with services, as its clients see it. Connections that break are opened anew, and calls without an answer are sent
/// again: all services execute a repetition once, or it does no harm.
pub struct Peer {
    shared: Arc<Shared>,
    lanes: Vec<Arc<Lane>>,
    next_lane: AtomicUsize,
    tasks: Vec<JoinHandle<()>>,
}

pub(super) struct Shared {
    env: Env,
    proofs: Arc<Proofs>,
    /// Ledgers there; `None` before the first connection.
    welcome: watch::Sender<Option<Welcome>>,
    sinks: Mutex<BTreeMap<u64, Sink>>,
    facts: Mutex<HashMap<DriveId, (u64, DriveStat)>>,
    /// Grows with every fact.
    facts_count: watch::Sender<u64>,
    contact: watch::Sender<Contact>,
}

/// Whether the other side can be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Contact {
    /// It has answered on the present connection for metadata.
    pub is_there: bool,
    /// How often such a connection broke.
    pub losses: u64,
}

/// Where the events of a stream go.
struct Sink {
    ledger: LedgerId,
    /// The other side knows it.
    is_open: bool,
    seen: u64,
    acknowledged: u64,
    sink: Arc<dyn EventSink>,
    /// The stream has a gap, or its owner is gone.
    lost: Arc<watch::Sender<bool>>,
}

/// One connection, and the calls on it.
struct Lane {
    is_first: bool,
    /// One for each call under way: the other side takes no more than `CALLS_MAX`.
    permits: Semaphore,
    calls: Mutex<Calls>,
}

#[derive(Default)]
struct Calls {
    last: u64,
    /// Calls without an answer, in the order in which they were sent.
    waiting: BTreeMap<u64, Waiting>,
    /// The present connection.
    out: Option<Outbox>,
    /// No call is taken any more.
    is_over: bool,
}

struct Waiting {
    frame: Frame,
    answer: oneshot::Sender<Packed>,
    /// The stream that the call opens.
    opens: Option<u64>,
}

/// Why a call has no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The other side did not execute it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The answer cannot be read.
    #[error("the answer is malformed")]
    Malformed,
    /// There was no answer in time. Whether it was executed is not known.
    #[error("no answer")]
    NoAnswer,
}

impl Lane {
    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes a call back that nobody waits for any more.
struct CallGuard<'a> {
    lane: &'a Lane,
    number: u64,
}

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        let mut calls = self.lane.calls();
        if calls.waiting.remove(&self.number).is_some()
            && let Some(out) = &calls.out
        {
            out.send(&Frame::empty(FrameKind::Cancel, self.number));
        }
    }
}

/// What goes with a request that this task makes.
fn envelope_of(limit: Duration) -> Envelope {
    Envelope { deadline_ms: limit.as_millis() as u32, trace: trace::current(), ..Envelope::default() }
}

impl Peer {
    /// Begins to connect.
    pub fn new(options: PeerOptions) -> Arc<Self> {
        let PeerOptions { env, runtime, dial, data_connections, proofs } = options;
        let shared = Arc::new(Shared {
            env,
            proofs,
            welcome: watch::Sender::new(None),
            sinks: Mutex::default(),
            facts: Mutex::default(),
            facts_count: watch::Sender::new(0),
            contact: watch::Sender::new(Contact::default()),
        });
        let lane = |index| {
            let permits = Semaphore::new(CALLS_MAX / 2);
            Arc::new(Lane { is_first: index == 0, permits, calls: Mutex::default() })
        };
        let lanes: Vec<_> = (0..=data_connections).map(lane).collect();
        let keep =
            |lane: &Arc<Lane>| runtime.spawn(keep_connected(shared.clone(), lane.clone(), dial.clone()));
        let tasks = lanes.iter().map(keep).collect();
        Arc::new(Self { shared, lanes, next_lane: AtomicUsize::new(0), tasks })
    }

    /// Waits for the first connection. Returns the ledgers there, with the number of their opening.
    pub async fn ledgers(&self) -> Vec<(LedgerId, u64)> {
        let mut welcome = self.shared.welcome.subscribe();
        // The sender lives as long as the peer.
        let _ = welcome.wait_for(Option::is_some).await;
        welcome.borrow().as_ref().map(|welcome| welcome.ledgers.clone()).unwrap_or_default()
    }

    /// Asks an owner, on the connection for metadata.
    pub(super) async fn ask_owner<T: Serialize + Payload, R: DeserializeOwned + Payload>(
        &self,
        operations: &Operations,
        ledger: LedgerId,
        envelope: &Envelope,
        request: &T,
    ) -> Result<(AnswerHead, R), CallError> {
        let limit = Duration::from_millis(envelope.deadline_ms.into());
        let message = message::pack_request(operations, envelope, request);
        self.ask(&self.lanes[0], ledger.0, message, limit, None).await
    }

    /// Asks an owner to bind a session. Its events come in this stream.
    pub(super) async fn bind<R: DeserializeOwned + Payload>(
        &self,
        ledger: LedgerId,
        stream: u64,
        request: &SessionRequest,
        limit: Duration,
    ) -> Result<(AnswerHead, R), CallError> {
        let envelope = envelope_of(limit);
        let message = message::pack_request(&SESSION, &envelope, request);
        self.ask(&self.lanes[0], ledger.0, message, limit, Some(stream)).await
    }

    /// Whether the other side can be reached. When it is there again, the state of its drives is known.
    pub fn contact(&self) -> watch::Receiver<Contact> {
        self.shared.contact.subscribe()
    }

    /// Waits until it was not reached for so long.
    pub async fn is_away(&self, time: Duration) {
        let mut contact = self.contact();
        loop {
            // The sender lives as long as the peer.
            let _ = contact.wait_for(|contact| !contact.is_there).await;
            let back = contact.wait_for(|contact| contact.is_there);
            if tokio::time::timeout(time, back).await.is_err() {
                return;
            }
        }
    }

    /// Asks a service of which a process has one, on the connection for metadata.
    pub(super) async fn ask_process<T: Serialize + Payload, R: DeserializeOwned + Payload>(
        &self,
        operations: &Operations,
        request: &T,
        limit: Duration,
    ) -> Result<R, CallError> {
        let envelope = envelope_of(limit);
        let message = message::pack_request(operations, &envelope, request);
        let lane =
            if message.payload.len() > PROCESS_PAYLOAD_MAX { self.data_lane() } else { &self.lanes[0] };
        self.ask(lane, 0, message, limit, None).await.map(|(_, reply)| reply)
    }

    /// One of the connections for data, each in its turn; that for metadata if there is no other.
    fn data_lane(&self) -> &Lane {
        let turn = self.next_lane.fetch_add(1, Ordering::Relaxed);
        match self.lanes.len() - 1 {
            0 => &self.lanes[0],
            data => &self.lanes[1 + turn % data],
        }
    }

    /// Asks a drive, on one of the connections for data.
    pub(super) async fn ask_drive<T: Serialize + Payload, R: DeserializeOwned + Payload>(
        &self,
        drive: DriveId,
        request: &T,
        grant: Option<Grant>,
        limit: Duration,
    ) -> Result<R, CallError> {
        let envelope = Envelope { grant, ..envelope_of(limit) };
        let packed = message::pack_request(&DRIVE, &envelope, request);
        self.ask(self.data_lane(), drive.0, packed, limit, None).await.map(|(_, reply)| reply)
    }

    async fn ask<R: DeserializeOwned + Payload>(
        &self,
        lane: &Lane,
        service: u32,
        message: Packed,
        limit: Duration,
        opens: Option<u64>,
    ) -> Result<(AnswerHead, R), CallError> {
        let until = tokio::time::Instant::now() + limit;
        // Without waiting if there is room: calls leave in the order in which they are made.
        let _permit = match lane.permits.try_acquire() {
            Ok(permit) => permit,
            Err(_) => {
                let permit = tokio::time::timeout_at(until, lane.permits.acquire()).await;
                permit.map_err(|_| CallError::NoAnswer)?.map_err(|_| CallError::NoAnswer)?
            }
        };
        let (answer, arrival) = oneshot::channel();
        let number = {
            let mut calls = lane.calls();
            if calls.is_over {
                return Err(CallError::NoAnswer);
            }
            calls.last += 1;
            let frame = Frame { kind: FrameKind::Call, service, call: calls.last, message };
            if let Some(out) = &calls.out {
                // If that connection has just broken, the next one sends it.
                out.send(&frame);
            }
            let number = calls.last;
            calls.waiting.insert(number, Waiting { frame, answer, opens });
            number
        };
        let _guard = CallGuard { lane, number };
        let arrived = tokio::time::timeout_at(until, arrival).await.map_err(|_| CallError::NoAnswer)?;
        let packed = arrived.map_err(|_| CallError::NoAnswer)?;
        let (head, answer) =
            message::unpack_answer(&packed.body, packed.payload).map_err(|_| CallError::Malformed)?;
        Ok((head, answer?))
    }

    /// Events of this stream go to `sink` from now on. A stream that goes on keeps its count. `lost` is set if the stream breaks.
    pub(super) fn listen(
        &self,
        stream: u64,
        ledger: LedgerId,
        sink: Arc<dyn EventSink>,
        lost: Arc<watch::Sender<bool>>,
        goes_on: bool,
    ) {
        match self.shared.sinks().entry(stream) {
            Entry::Occupied(mut known) if goes_on => known.get_mut().sink = sink,
            other => {
                let sink = Sink { ledger, is_open: false, seen: 0, acknowledged: 0, sink, lost };
                other.insert_entry(sink);
            }
        }
    }

    /// Events of this stream go nowhere any more.
    pub(super) fn forget(&self, stream: u64) {
        self.shared.sinks().remove(&stream);
    }

    /// The newest state of a drive, and the time at which it was told; `None`: it was never told.
    pub(super) fn fact(&self, drive: DriveId) -> Option<(u64, DriveStat)> {
        self.shared.facts.lock().unwrap_or_else(PoisonError::into_inner).get(&drive).cloned()
    }

    /// Waits until the state of a drive is known.
    pub(super) async fn first_fact(&self, drive: DriveId) {
        let mut count = self.shared.facts_count.subscribe();
        while self.fact(drive).is_none() {
            // The sender lives as long as the peer.
            let _ = count.changed().await;
        }
    }

    pub(super) fn proofs(&self) -> &Proofs {
        &self.shared.proofs
    }

    pub(super) fn env(&self) -> &Env {
        &self.shared.env
    }

    /// Ends all connections for good, also if others still hold the peer. Calls have no answer from now on, and streams are lost.
    pub(super) fn end(&self) {
        self.tasks.iter().for_each(JoinHandle::abort);
        for lane in &self.lanes {
            // Those who wait are told when their senders go.
            *lane.calls() = Calls { is_over: true, ..Calls::default() };
        }
        for (_, sink) in std::mem::take(&mut *self.shared.sinks()) {
            sink.lost.send_replace(true);
        }
        self.shared.contact.send_modify(|contact| contact.is_there = false);
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Shared {
    fn sinks(&self) -> MutexGuard<'_, BTreeMap<u64, Sink>> {
        self.sinks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_fact(&self, drive: DriveId, body: &[u8]) {
        let Ok(stat) = encoding::decode::<DriveStat>(body) else { return };
        let now_ns = self.env.clock.boot_ns();
        self.facts.lock().unwrap_or_else(PoisonError::into_inner).insert(drive, (now_ns, stat));
        self.facts_count.send_modify(|count| *count += 1);
    }

    /// Passes an event on, unless it has come before. Returns whether it is time to acknowledge.
    fn note_event(&self, stream: u64, body: &[u8]) -> io::Result<bool> {
        let event: StreamEvent = encoding::decode(body).map_err(io::Error::other)?;
        let mut sinks = self.sinks();
        let Some(sink) = sinks.get_mut(&stream) else { return Ok(false) };
        if event.number <= sink.seen {
            return Ok(false);
        }
        if event.number != sink.seen + 1 {
            return Err(io::Error::other("an event is missing"));
        }
        sink.seen = event.number;
        sink.sink.event(event.event);
        Ok(sink.seen >= sink.acknowledged + ACKNOWLEDGE_EVENTS)
    }

    /// The last event that arrived, of each stream in which some are not acknowledged.
    fn acknowledgements(&self) -> Vec<(u64, u64)> {
        let mut sinks = self.sinks();
        let fresh = sinks.iter_mut().filter(|(_, sink)| sink.seen > sink.acknowledged);
        fresh
            .map(|(stream, sink)| {
                sink.acknowledged = sink.seen;
                (*stream, sink.seen)
            })
            .collect()
    }

    fn note_open(&self, stream: u64) {
        if let Some(sink) = self.sinks().get_mut(&stream) {
            sink.is_open = true;
        }
    }

    /// The calls by which all streams go on, on a new connection. Their numbers are those of the streams.
    fn attachments(&self) -> Vec<Frame> {
        let sinks = self.sinks();
        let open = sinks.iter().filter(|(_, sink)| sink.is_open);
        open.map(|(stream, sink)| {
            let request = SessionRequest::Attach { stream: *stream, seen: sink.seen };
            let message = message::pack_request(&SESSION, &Envelope::default(), &request);
            Frame { kind: FrameKind::Call, service: sink.ledger.0, call: *stream, message }
        })
        .collect()
    }

    fn note_attached(&self, frame: &Frame) {
        let answer = message::unpack_answer::<bool>(&frame.message.body, Bytes::new());
        if !matches!(answer, Ok((_, Ok(true))))
            && let Some(sink) = self.sinks().remove(&frame.call)
        {
            sink.lost.send_replace(true);
        }
    }

    /// Ledgers that were opened anew since the last connection have other owners: calls to the earlier ones have no answer, and
    /// their streams are lost.
    fn note_welcome(&self, welcome: Welcome, calls: &mut Calls) {
        let earlier = self.welcome.borrow().clone();
        let is_same = |ledger: u32| {
            earlier.as_ref().is_none_or(|earlier| {
                let opening = |welcome: &Welcome| {
                    let found = welcome.ledgers.iter().find(|(id, _)| id.0 == ledger);
                    found.map(|(_, opened)| (welcome.incarnation, *opened))
                };
                opening(earlier) == opening(&welcome)
            })
        };
        let is_for_owner = |code| OWNER.name(code).is_some() || SESSION.name(code).is_some();
        calls
            .waiting
            .retain(|_, waiting| !is_for_owner(waiting.frame.message.code) || is_same(waiting.frame.service));
        self.sinks().retain(|_, sink| {
            let stays = is_same(sink.ledger.0);
            if !stays {
                sink.lost.send_replace(true);
            }
            stays
        });
        self.welcome.send_replace(Some(welcome));
    }
}

/// Connects, and connects again, for ever.
async fn keep_connected(shared: Arc<Shared>, lane: Arc<Lane>, dial: Dial) {
    let mut pause = PAUSES.0;
    loop {
        let mut is_greeted = false;
        let result = match tokio::time::timeout(SILENCE, dial()).await {
            Ok(Ok(stream)) => use_connection(&shared, &lane, stream, &mut is_greeted).await,
            Ok(Err(error)) => Err(error),
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        };
        lane.calls().out = None;
        if lane.is_first && is_greeted {
            shared.contact.send_modify(|contact| {
                *contact = Contact { is_there: false, losses: contact.losses + 1 };
            });
        }
        if let Err(error) = result {
            tracing::debug!(%error, "connection ended");
        }
        pause = if is_greeted { PAUSES.0 } else { (pause * 2).min(PAUSES.1) };
        tokio::time::sleep(pause).await;
    }
}

/// Greets, sends all calls without an answer, and works until the connection breaks.
async fn use_connection(
    shared: &Shared,
    lane: &Lane,
    Connection { stream, direct }: Connection,
    is_greeted: &mut bool,
) -> io::Result<()> {
    let (from, mut to) = tokio::io::split(stream);
    let mut from = BufReader::new(from);
    let welcome = greet(shared, &mut from, &mut to, lane).await?;
    *is_greeted = true;
    let (out, outlet) = outbox(direct);
    {
        let mut calls = lane.calls();
        if calls.is_over {
            return Ok(());
        }
        if lane.is_first {
            shared.note_welcome(welcome, &mut calls);
            shared.attachments().iter().for_each(|frame| out.send(frame));
        }
        calls.waiting.values().for_each(|waiting| out.send(&waiting.frame));
        calls.out = Some(out.clone());
        // Under the lock, so that the end of the peer comes before or after all this.
        if lane.is_first {
            shared.contact.send_modify(|contact| contact.is_there = true);
        }
    }
    let receive = async {
        loop {
            let frame = next_frame(&mut from).await?;
            match frame.kind {
                FrameKind::Answer if frame.message.code == ATTACH => shared.note_attached(&frame),
                FrameKind::Answer => {
                    let mut calls = lane.calls();
                    if let Some(waiting) = calls.waiting.remove(&frame.call) {
                        waiting.opens.iter().for_each(|stream| shared.note_open(*stream));
                        // If the receiver is gone, nobody waits.
                        let _ = waiting.answer.send(frame.message);
                    }
                }
                FrameKind::Event if frame.message.code == 0 => {
                    if shared.note_event(frame.call, &frame.message.body)? {
                        out.send(&ping(shared));
                    }
                }
                FrameKind::Event => shared.note_fact(DriveId(frame.service), &frame.message.body),
                FrameKind::Ping => out.send(&Frame::empty(FrameKind::Pong, frame.call)),
                FrameKind::Pong | FrameKind::Call | FrameKind::Cancel => {}
            }
        }
    };
    let send = outlet.run(to, SILENCE);
    let give_signs = async {
        loop {
            tokio::time::sleep(PING).await;
            out.send(&if lane.is_first { ping(shared) } else { Frame::empty(FrameKind::Ping, 0) });
        }
    };
    tokio::select! {
        biased;
        result = receive => result,
        result = send => result,
        () = give_signs => Ok(()),
    }
}

/// Says hello, and waits for the answer.
async fn greet(
    shared: &Shared,
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    lane: &Lane,
) -> io::Result<Welcome> {
    let hello = GreetRequest::Hello { wants_facts: lane.is_first, program: Program::this() };
    let message = message::pack_request(&GREET, &Envelope::default(), &hello);
    write_frame(to, &Frame { kind: FrameKind::Call, service: 0, call: 0, message }).await?;
    loop {
        let frame = next_frame(from).await?;
        if frame.kind == FrameKind::Event && frame.message.code != 0 {
            shared.note_fact(DriveId(frame.service), &frame.message.body);
        }
        if (frame.kind, frame.call) == (FrameKind::Answer, 0) {
            let (_, welcome) = message::unpack_answer::<Welcome>(&frame.message.body, Bytes::new())
                .map_err(io::Error::other)?;
            return welcome.map_err(io::Error::other);
        }
    }
}

async fn next_frame(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Frame> {
    let frame = tokio::time::timeout(SILENCE, read_frame(from)).await??;
    frame.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

fn ping(shared: &Shared) -> Frame {
    let mut frame = Frame::empty(FrameKind::Ping, 0);
    frame.message.body = encoding::encode(&shared.acknowledgements()).into();
    frame
}
