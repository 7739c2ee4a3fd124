//! The side of a connection that has services.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Poll;
use std::time::Duration;

use base::env::Env;
use base::program::Program;
use base::{DriveId, FsError, LedgerId, SessionId};
use serde::de::DeserializeOwned;
use tokio::io::{BufReader, ReadHalf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;

use super::outbox::{Outbox, outbox};
use super::{CALLS_MAX, Connection, EVENTS_MAX, PAYLOADS_BYTES_MAX, PING, SILENCE, Stream};
use crate::BoxFuture;
use crate::cluster::{ClusterService, Declined, HostService, JoinService};
use crate::drive::{DriveService, GetPurpose, PutPurpose, ShardKey};
use crate::encoding::{BadRequest, Operations};
use crate::frame::{BODY_BYTES_MAX, Frame, FrameKind, PAYLOAD_BYTES_MAX, read_frame_within};
use crate::message::{
    self, AnswerHead, AnswerTime, CLUSTER, DRIVE, DriveReply, DriveRequest, Envelope, GREET, GreetRequest,
    HOST, JOIN, OWNER, Packed, Payload, REPLICA, Refusal, SESSION, SessionRequest, StreamEvent, VIEW,
    Welcome,
};
use crate::meta::{EventSink, MetaReply, MetaRequest, MetaService, OwnerEvent};
use crate::replica::{ReplicaReply, ReplicaService};
use crate::rights::{ProofKey, Rights};
use crate::trace;
use crate::view::{ViewReply, ViewRequest, ViewService};

/// The services of a process.
#[derive(Clone, Default)]
pub struct Services {
    /// Owners, each with a number that changes whenever the ledger is opened anew.
    pub owners: BTreeMap<LedgerId, (u64, Arc<dyn MetaService>)>,
    /// Owners, as their standbys see them.
    pub replicas: BTreeMap<LedgerId, Arc<dyn ReplicaService>>,
    /// Hears of each request that is made for a user, with the ledger: upkeep gives way to users.
    pub note_use: Option<Arc<dyn Fn(LedgerId) + Send + Sync>>,
    /// Filesystems, as clients see them.
    pub views: Option<Arc<dyn ViewService>>,
    /// Drives.
    pub drives: BTreeMap<DriveId, Arc<dyn DriveService>>,
    /// Takes in processes that have a token.
    pub joins: Option<Arc<dyn JoinService>>,
    /// The control ledger.
    pub cluster: Option<Arc<dyn ClusterService>>,
    /// The host of the drives.
    pub host: Option<Arc<dyn HostService>>,
    /// The key of what nodes give to clients.
    pub proofs: Option<ProofKey>,
}

/// The longest message of a stranger: a request to join is far shorter.
const STRANGER_BYTES_MAX: u32 = 64 << 10;

/// How far the other side of a connection is trusted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trust {
    /// A node, or a process beside it. It has checked the rights of its users, and may do the upkeep.
    Full,
    /// A client that is no node. It says on behalf of which user it asks, and the owner checks that user's rights. What it asks without
    /// a user, it asks as nobody.
    Client(Arc<Rights>),
    /// It is not known. It may ask to join.
    Stranger,
}

/// Answers calls on connections.
pub struct Server {
    services: Mutex<Arc<Services>>,
    incarnation: u64,
    streams: Mutex<BTreeMap<u64, Arc<EventStream>>>,
    /// Sessions of clients that are no nodes.
    sessions: Mutex<HashMap<(LedgerId, SessionId), BoundSession>>,
    /// The programs of clients that are no nodes, as they told last.
    programs: Mutex<BTreeMap<u32, Program>>,
}

/// A session of a client, for as long as its stream is there.
struct BoundSession {
    client: u32,
    stream: Weak<EventStream>,
}

/// Events of one session, until they are acknowledged.
struct EventStream {
    number: u64,
    ledger: LedgerId,
    queue: Mutex<EventQueue>,
}

#[derive(Default)]
struct EventQueue {
    last: u64,
    waiting: VecDeque<StreamEvent>,
    /// The connection on which they go out.
    out: Option<Outbox>,
    /// Too many waited: the stream has a gap and is of no use any more.
    is_lost: bool,
}

/// An answer, and its share of the memory for payloads.
struct Answer {
    frame: Frame,
    memory: Option<OwnedSemaphorePermit>,
}

impl From<Frame> for Answer {
    fn from(frame: Frame) -> Self {
        Self { frame, memory: None }
    }
}

impl EventStream {
    fn queue(&self) -> MutexGuard<'_, EventQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn frame(&self, event: &StreamEvent) -> Frame {
        let body = crate::encoding::encode(event).into();
        let message = Packed { code: 0, body, payload: bytes::Bytes::new() };
        Frame { kind: FrameKind::Event, service: self.ledger.0, call: self.number, message }
    }

    /// Sends everything after `seen` on a connection, and all that follows. Returns `false` if the stream has a gap.
    fn attach(&self, seen: u64, out: &Outbox) -> bool {
        let mut queue = self.queue();
        queue.acknowledge(seen);
        if queue.is_lost {
            return false;
        }
        // If the connection has ended, the next one begins with the same events.
        queue.waiting.iter().for_each(|event| out.send(&self.frame(event)));
        queue.out = Some(out.clone());
        true
    }
}

impl EventQueue {
    fn acknowledge(&mut self, seen: u64) {
        while self.waiting.front().is_some_and(|event| event.number <= seen) {
            self.waiting.pop_front();
        }
    }
}

/// Where the owner leaves its events.
struct Sink(Arc<EventStream>);

impl EventSink for Sink {
    fn is_elsewhere(&self) -> bool {
        true
    }

    fn event(&self, event: OwnerEvent) {
        let mut queue = self.0.queue();
        if queue.is_lost {
            return;
        }
        queue.last += 1;
        let event = StreamEvent { number: queue.last, event };
        if queue.waiting.len() >= EVENTS_MAX {
            (queue.is_lost, queue.out) = (true, None);
            queue.waiting = VecDeque::new();
            return;
        }
        if let Some(out) = &queue.out {
            out.send(&self.0.frame(&event));
        }
        queue.waiting.push_back(event);
    }
}

impl Server {
    /// A server of these services.
    pub fn new(env: &Env, services: Services) -> Arc<Self> {
        let incarnation = env.random.next_u64();
        Arc::new(Self {
            services: Mutex::new(Arc::new(services)),
            incarnation,
            streams: Mutex::default(),
            sessions: Mutex::default(),
            programs: Mutex::default(),
        })
    }

    /// Has these services from now on.
    pub fn set_services(&self, services: Services) {
        *self.services.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(services);
    }

    /// The programs of clients that are no nodes, by their numbers, as they told last.
    pub fn programs(&self) -> BTreeMap<u32, Program> {
        self.programs.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note_program(&self, client: u32, program: Program) {
        self.programs.lock().unwrap_or_else(PoisonError::into_inner).insert(client, program);
    }

    pub(super) fn services(&self) -> Arc<Services> {
        self.services.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Serves a connection until it ends. Calls under way are given up then: what they do goes on, nobody gets the answer.
    ///
    /// # Errors
    /// If the connection fails, or the other side breaks its rules.
    pub async fn serve(
        self: Arc<Self>,
        Connection { stream, direct }: Connection,
        trust: Trust,
    ) -> io::Result<()> {
        let (reader, writer) = tokio::io::split(stream);
        let (out, outlet) = outbox(direct);
        let serving = Serving {
            server: self,
            trust,
            out,
            payloads: Arc::new(Semaphore::new(PAYLOADS_BYTES_MAX)),
            calls: JoinSet::new(),
            by_number: BTreeMap::new(),
        };
        tokio::select! {
            biased;
            // A side that does not read holds up nobody else.
            result = outlet.run(writer, SILENCE * 12) => result,
            result = serving.run(BufReader::new(reader)) => result,
        }
    }

    fn stream(&self, number: u64) -> Option<Arc<EventStream>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner).get(&number).cloned()
    }

    /// A stream for the events of a session. Streams of sessions that are over go.
    fn new_stream(&self, number: u64, ledger: LedgerId) -> Arc<EventStream> {
        let stream = Arc::new(EventStream { number, ledger, queue: Mutex::default() });
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        // The owner holds the sink as long as the session lives.
        streams.retain(|_, stream| Arc::strong_count(stream) > 1);
        streams.insert(number, stream.clone());
        stream
    }

    /// The state of the drives, as events.
    fn facts(&self) -> Vec<Frame> {
        let fact = |(id, drive): (&DriveId, &Arc<dyn DriveService>)| {
            let body = crate::encoding::encode(&drive.stat()).into();
            let message = Packed { code: DRIVE.0[8].1, body, payload: bytes::Bytes::new() };
            Frame { kind: FrameKind::Event, service: id.0, call: 0, message }
        };
        self.services().drives.iter().map(fact).collect()
    }
}

/// A connection that is served.
struct Serving {
    server: Arc<Server>,
    trust: Trust,
    out: Outbox,
    payloads: Arc<Semaphore>,
    calls: JoinSet<u64>,
    by_number: BTreeMap<u64, tokio::task::AbortHandle>,
}

impl Serving {
    async fn run(mut self, mut from: BufReader<ReadHalf<impl Stream>>) -> io::Result<()> {
        let bytes_max = match self.trust {
            Trust::Stranger => STRANGER_BYTES_MAX,
            Trust::Full | Trust::Client(_) => BODY_BYTES_MAX + PAYLOAD_BYTES_MAX,
        };
        let mut tells_facts = false;
        let mut ticks = tokio::time::interval(PING);
        let mut heard = tokio::time::Instant::now();
        let mut reading = Box::pin(read_one(&mut from, bytes_max, self.payloads.clone()));
        loop {
            let (frame, memory) = tokio::select! {
                biased;
                Some(done) = self.calls.join_next() => {
                    if let Ok(number) = done {
                        self.by_number.remove(&number);
                    }
                    continue;
                }
                _ = ticks.tick() => {
                    if heard.elapsed() > SILENCE * 6 {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    if tells_facts {
                        self.server.facts().into_iter().for_each(|fact| self.send(fact));
                    }
                    continue;
                }
                read = &mut reading => match read? {
                    Some(read) => read,
                    None => return Ok(()),
                },
            };
            drop(reading);
            reading = Box::pin(read_one(&mut from, bytes_max, self.payloads.clone()));
            heard = tokio::time::Instant::now();
            match frame.kind {
                FrameKind::Call => {
                    if GREET.name(frame.message.code).is_some() {
                        tells_facts |= self.greet(&frame);
                        continue;
                    }
                    if self.calls.len() >= CALLS_MAX {
                        return Err(io::Error::other("too many calls are under way"));
                    }
                    self.begin(frame, memory).await;
                }
                FrameKind::Cancel => {
                    if let Some(call) = self.by_number.remove(&frame.call) {
                        call.abort();
                    }
                }
                FrameKind::Ping => {
                    self.acknowledge(&frame);
                    self.send(Frame::empty(FrameKind::Pong, frame.call));
                }
                FrameKind::Pong | FrameKind::Answer | FrameKind::Event => {}
            }
        }
    }

    fn send(&self, frame: Frame) {
        self.out.send(&frame);
    }

    /// A ping says which events arrived: pairs of a stream and a number.
    fn acknowledge(&self, frame: &Frame) {
        let seen: Vec<(u64, u64)> = crate::encoding::decode(&frame.message.body).unwrap_or_default();
        for (number, seen) in seen {
            if let Some(stream) = self.server.stream(number) {
                stream.queue().acknowledge(seen);
            }
        }
    }

    /// Answers a greeting. Returns whether the other side wants facts.
    fn greet(&self, frame: &Frame) -> bool {
        let code = frame.message.code;
        let request = message::open_envelope(&frame.message.body).map_err(BadRequest::Malformed).and_then(
            |(_, fields)| message::unpack_request(&GREET, code, fields, frame.message.payload.clone()),
        );
        let (answer, wants_facts) = match request {
            Ok(GreetRequest::Hello { .. }) if self.trust == Trust::Stranger => {
                (Ok(Welcome { incarnation: self.server.incarnation, ledgers: Vec::new() }), false)
            }
            Ok(GreetRequest::Hello { wants_facts, program }) => {
                if let Trust::Client(rights) = &self.trust {
                    self.server.note_program(rights.client, program);
                }
                let services = self.server.services();
                let ledgers =
                    services.owners.iter().map(|(ledger, (opened, _))| (*ledger, *opened)).collect();
                (Ok(Welcome { incarnation: self.server.incarnation, ledgers }), wants_facts)
            }
            Err(error) => (Err(refusal(&error)), false),
        };
        // When the other side has the answer, it knows the drives.
        if wants_facts {
            self.server.facts().into_iter().for_each(|fact| self.send(fact));
        }
        self.send(answer_frame(frame, AnswerHead::default(), &answer));
        wants_facts
    }

    /// Begins a call. It runs as far as it gets at once, so that calls begin in the order in which they arrived.
    async fn begin(&mut self, frame: Frame, memory: Option<OwnedSemaphorePermit>) {
        let number = frame.call;
        let (server, trust) = (self.server.clone(), self.trust.clone());
        let (out, payloads) = (self.out.clone(), self.payloads.clone());
        let mut work: BoxFuture<'static, u64> = Box::pin(async move {
            let answer = server.answer(&frame, trust, &out, payloads, memory).await;
            // If the connection has ended, the other side asks again.
            out.send_with(&answer.frame, answer.memory);
            number
        });
        let begun = std::future::poll_fn(|context| Poll::Ready(Pin::new(&mut work).poll(context))).await;
        if begun.is_pending() {
            self.by_number.insert(number, self.calls.spawn(work));
        }
    }
}

/// Reads a frame, and waits until there is memory for its payload. The next one is not read before.
async fn read_one(
    from: &mut BufReader<ReadHalf<impl Stream>>,
    bytes_max: u32,
    payloads: Arc<Semaphore>,
) -> io::Result<Option<(Frame, Option<OwnedSemaphorePermit>)>> {
    let Some(frame) = read_frame_within(from, bytes_max).await? else { return Ok(None) };
    let memory = match frame.message.payload.len() {
        0 => None,
        len => Some(payloads.acquire_many_owned(len as u32).await.map_err(io::Error::other)?),
    };
    Ok(Some((frame, memory)))
}

fn refusal(error: &BadRequest) -> Refusal {
    match error {
        BadRequest::Unknown => Refusal::Unsupported,
        BadRequest::Malformed(_) => Refusal::Malformed,
    }
}

fn answer_frame<T: serde::Serialize + Payload>(
    call: &Frame,
    head: AnswerHead,
    answer: &Result<T, Refusal>,
) -> Frame {
    let mut message = message::pack_answer(call.message.code, head.clone(), answer);
    if message.body.len() > BODY_BYTES_MAX as usize {
        // The other side would end the connection, and ask again on the next one.
        tracing::error!(code = call.message.code, bytes = message.body.len(), "an answer is too long");
        message = message::pack_answer(call.message.code, head, &Err::<bool, _>(Refusal::TooLong));
    }
    Frame { kind: FrameKind::Answer, service: call.service, call: call.call, message }
}

/// Whether a client may ask that of a drive: it reads the content of its filesystems, writes extents that it was given, and takes back
/// what it has written.
fn may_ask_drive(
    rights: &Rights,
    key: Option<&ProofKey>,
    envelope: &Envelope,
    request: &DriveRequest,
) -> bool {
    let may_write = |shard: &ShardKey| {
        let granted = key
            .zip(envelope.grant.as_ref())
            .is_some_and(|(key, grant)| key.allows(rights.client, shard.ledger, grant, shard.extent));
        granted && !rights.read_only && rights.ledgers.contains(&shard.ledger)
    };
    match request {
        DriveRequest::Get(get) => rights.ledgers.contains(&get.key.ledger),
        DriveRequest::Put(put) => put.purpose == PutPurpose::Write && may_write(&put.key),
        DriveRequest::Delete(delete) => delete.keys.iter().all(may_write),
        DriveRequest::Stat => true,
        DriveRequest::KeepPositions { .. }
        | DriveRequest::KnownLedgers
        | DriveRequest::List { .. }
        | DriveRequest::Scrub { .. }
        | DriveRequest::MakeRoom => false,
    }
}

fn refused(call: &Frame, refusal: Refusal) -> Frame {
    answer_frame(call, AnswerHead::default(), &Err::<bool, _>(refusal))
}

fn answered<T: serde::Serialize + Payload>(call: &Frame, answer: Result<T, Declined>) -> Frame {
    answer_frame(call, AnswerHead::default(), &Ok(answer))
}

fn request_of<T: DeserializeOwned + Payload>(
    operations: &Operations,
    Frame { message, .. }: &Frame,
    fields: &[u8],
) -> Result<T, Refusal> {
    message::unpack_request(operations, message.code, fields, message.payload.clone())
        .map_err(|error| refusal(&error))
}

/// Works on what a user's request has caused, and says so to those that look for it.
async fn traced<T>(frame: &Frame, trace: u64, work: impl Future<Output = T>) -> T {
    if trace == 0 {
        return work.await;
    }
    let begun = tokio::time::Instant::now();
    trace::within(trace, async {
        let done = work.await;
        let code = frame.message.code;
        let operation = [&OWNER, &DRIVE, &SESSION, &CLUSTER, &HOST, &VIEW, &REPLICA, &JOIN];
        let operation = operation.iter().find_map(|of| of.name(code)).unwrap_or("unknown");
        tracing::debug!(
            operation,
            took_us = begun.elapsed().as_micros() as u64,
            "a request of a node was answered"
        );
        done
    })
    .await
}

impl Server {
    async fn answer(
        &self,
        frame: &Frame,
        trust: Trust,
        out: &Outbox,
        payloads: Arc<Semaphore>,
        memory: Option<OwnedSemaphorePermit>,
    ) -> Answer {
        let code = frame.message.code;
        let Ok((mut envelope, fields)) = message::open_envelope(&frame.message.body) else {
            return refused(frame, Refusal::Malformed).into();
        };
        if let Trust::Client(rights) = &trust {
            envelope.caller = Some(rights.squashed(envelope.caller));
            // The owner takes the client's word for what it repeats.
            envelope.answer = AnswerTime::Durable;
        }
        let (limit, trace) = (Duration::from_millis(envelope.deadline_ms.into()), envelope.trace);
        let work = async {
            if JOIN.name(code).is_some() {
                self.ask_joins(frame, fields).await.into()
            } else if trust == Trust::Stranger {
                refused(frame, Refusal::Forbidden).into()
            } else if CLUSTER.name(code).is_some() {
                self.ask_cluster(frame, fields, &trust).await.into()
            } else if HOST.name(code).is_some() {
                self.ask_host(frame, fields, &trust).await.into()
            } else if OWNER.name(code).is_some() {
                self.ask_owner(frame, envelope, fields, &trust).await.into()
            } else if SESSION.name(code).is_some() {
                self.bind(frame, fields, out, &trust).await.into()
            } else if REPLICA.name(code).is_some() {
                let answer = self.ask_replica(frame, fields, &trust).await;
                answer_frame(frame, AnswerHead::default(), &answer).into()
            } else if VIEW.name(code).is_some() {
                let answer = self.ask_views(frame, fields, &trust).await;
                answer_frame(frame, AnswerHead::default(), &answer).into()
            } else {
                let asked = (&envelope, fields, &trust);
                let (answer, memory) = self.ask_drive(frame, asked, payloads, memory).await;
                Answer { frame: answer_frame(frame, AnswerHead::default(), &answer), memory }
            }
        };
        let work = traced(frame, trace, work);
        if limit.is_zero() {
            return work.await;
        }
        tokio::time::timeout(limit, work).await.unwrap_or_else(|_| refused(frame, Refusal::Late).into())
    }

    fn note_use(&self, ledger: LedgerId) {
        self.services().note_use.iter().for_each(|note| note(ledger));
    }

    fn owner(&self, frame: &Frame) -> Result<Arc<dyn MetaService>, Refusal> {
        let services = self.services();
        let found = services.owners.get(&LedgerId(frame.service));
        found.map(|(_, owner)| owner.clone()).ok_or(Refusal::Elsewhere)
    }

    async fn ask_owner(&self, frame: &Frame, envelope: Envelope, fields: &[u8], trust: &Trust) -> Frame {
        let ledger = LedgerId(frame.service);
        let message = &frame.message;
        let request =
            message::unpack_request::<MetaRequest>(&OWNER, message.code, fields, message.payload.clone())
                .map_err(|error| refusal(&error));
        let (head, answer) = match (self.owner(frame), request) {
            (Ok(_), Ok(_)) if !self.has_session(trust, ledger, envelope.request.session) => {
                (AnswerHead::default(), Err(Refusal::Forbidden))
            }
            (Ok(_), Ok(request)) if matches!(trust, Trust::Client(rights) if !rights.allow(&request)) => {
                (AnswerHead::default(), Ok(Err(FsError::ReadOnly)))
            }
            (Ok(owner), Ok(request)) => {
                if !matches!(request, MetaRequest::Heartbeat { .. }) {
                    self.note_use(ledger);
                }
                let answer = owner.call(envelope, request).await;
                let proof = match (trust, &answer) {
                    (Trust::Client(rights), Ok(MetaReply::Range { first, count })) => {
                        self.prove(|key| key.of_extents(rights.client, ledger, *first, *count))
                    }
                    _ => bytes::Bytes::new(),
                };
                (AnswerHead { position: owner.position(), proof }, Ok(answer))
            }
            (Err(refusal), _) | (_, Err(refusal)) => (AnswerHead::default(), Err(refusal)),
        };
        answer_frame(frame, head, &answer)
    }

    async fn ask_replica(
        &self,
        frame: &Frame,
        fields: &[u8],
        trust: &Trust,
    ) -> Result<Result<ReplicaReply, FsError>, Refusal> {
        let Packed { code, payload, .. } = &frame.message;
        let request = message::unpack_request(&REPLICA, *code, fields, payload.clone());
        let request = request.map_err(|error| refusal(&error))?;
        let services = self.services();
        let owner = services.replicas.get(&LedgerId(frame.service)).ok_or(Refusal::Elsewhere)?;
        match trust {
            Trust::Full => Ok(owner.ask(request).await),
            // The log and the store have the files of all users.
            Trust::Client(_) | Trust::Stranger => Ok(Err(FsError::NotPermitted)),
        }
    }

    async fn ask_views(
        &self,
        frame: &Frame,
        fields: &[u8],
        trust: &Trust,
    ) -> Result<Result<ViewReply, FsError>, Refusal> {
        let Packed { code, payload, .. } = &frame.message;
        let request = message::unpack_request(&VIEW, *code, fields, payload.clone());
        let request: ViewRequest = request.map_err(|error| refusal(&error))?;
        let services = self.services();
        let views = services.views.as_ref().ok_or(Refusal::Elsewhere)?;
        let may_ask = match trust {
            Trust::Full => true,
            Trust::Client(rights) => {
                request.filesystem().is_none_or(|name| rights.filesystems.contains(name))
            }
            Trust::Stranger => false,
        };
        if !may_ask {
            return Ok(Err(FsError::NotPermitted));
        }
        let mut answer = views.ask(request).await;
        if let Ok(ViewReply::Filesystem(view)) = &mut answer
            && *trust != Trust::Full
        {
            // The keys of the object store are for all that is there.
            view.store = bytes::Bytes::new();
        }
        Ok(answer)
    }

    async fn ask_joins(&self, frame: &Frame, fields: &[u8]) -> Frame {
        match (request_of(&JOIN, frame, fields), self.services().joins.clone()) {
            (Ok(request), Some(service)) => answered(frame, service.join(request).await),
            (Err(refusal), _) => refused(frame, refusal),
            (_, None) => refused(frame, Refusal::Elsewhere),
        }
    }

    async fn ask_cluster(&self, frame: &Frame, fields: &[u8], trust: &Trust) -> Frame {
        match (request_of(&CLUSTER, frame, fields), self.services().cluster.clone()) {
            _ if *trust != Trust::Full => refused(frame, Refusal::Forbidden),
            (Ok(request), Some(service)) => answered(frame, service.ask(request).await),
            (Err(refusal), _) => refused(frame, refusal),
            (_, None) => refused(frame, Refusal::Elsewhere),
        }
    }

    async fn ask_host(&self, frame: &Frame, fields: &[u8], trust: &Trust) -> Frame {
        match (request_of(&HOST, frame, fields), self.services().host.clone()) {
            _ if *trust != Trust::Full => refused(frame, Refusal::Forbidden),
            (Ok(request), Some(service)) => answered(frame, service.ask(request).await),
            (Err(refusal), _) => refused(frame, refusal),
            (_, None) => refused(frame, Refusal::Elsewhere),
        }
    }

    /// The proof of something that was given to a client. Where there is no key of proofs, the client has no use of it elsewhere.
    fn prove(&self, sign: impl FnOnce(&ProofKey) -> bytes::Bytes) -> bytes::Bytes {
        self.services().proofs.as_ref().map(sign).unwrap_or_default()
    }

    /// Whether the other side may ask for a session: it is a node, or the session is its own and of its filesystems.
    fn has_session(&self, trust: &Trust, ledger: LedgerId, session: SessionId) -> bool {
        match trust {
            Trust::Full => true,
            Trust::Client(rights) => {
                let sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
                let bound = sessions.get(&(ledger, session));
                rights.ledgers.contains(&ledger) && bound.is_some_and(|bound| bound.client == rights.client)
            }
            Trust::Stranger => false,
        }
    }

    /// A session is a client's from now on.
    fn note_session(&self, rights: &Rights, ledger: LedgerId, session: SessionId, stream: &Arc<EventStream>) {
        let mut sessions = self.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.retain(|_, bound| bound.stream.strong_count() > 0);
        let bound = BoundSession { client: rights.client, stream: Arc::downgrade(stream) };
        sessions.insert((ledger, session), bound);
    }

    async fn bind(&self, frame: &Frame, fields: &[u8], out: &Outbox, trust: &Trust) -> Frame {
        let mut head = AnswerHead::default();
        let request =
            message::unpack_request(&SESSION, frame.message.code, fields, frame.message.payload.clone());
        let (owner, request) = match (self.owner(frame), request) {
            (Ok(owner), Ok(request)) => (owner, request),
            (Err(refusal), _) => return refused(frame, refusal),
            (_, Err(error)) => return refused(frame, refusal(&error)),
        };
        let ledger = LedgerId(frame.service);
        let rights = match trust {
            Trust::Full => None,
            Trust::Client(rights) if rights.ledgers.contains(&ledger) => Some(rights),
            Trust::Client(_) | Trust::Stranger => return refused(frame, Refusal::Forbidden),
        };
        match request {
            SessionRequest::Connect { stream } => {
                // Sent again: the session is registered twice, and the first one ends by its silence.
                let stream = self.new_stream(stream, ledger);
                stream.attach(0, out);
                let answer = owner.connect(Arc::new(Sink(stream.clone()))).await;
                if let (Some(rights), Ok(session)) = (rights, &answer) {
                    self.note_session(rights, ledger, *session, &stream);
                    head.proof = self.prove(|key| key.of_session(rights.client, ledger, *session));
                }
                answer_frame(frame, head, &Ok::<Result<_, FsError>, _>(answer))
            }
            SessionRequest::Resume { stream, session, claim, proof } => {
                if let Some(rights) = rights {
                    let key = self.services().proofs.clone();
                    let is_its =
                        key.is_some_and(|key| key.is_of_session(rights.client, ledger, session, &proof));
                    if !is_its && !self.has_session(trust, ledger, session) {
                        return refused(frame, Refusal::Forbidden);
                    }
                }
                let stream = self.stream(stream).unwrap_or_else(|| self.new_stream(stream, ledger));
                let is_whole = stream.attach(0, out);
                let answer = match is_whole {
                    true => owner.resume(session, claim, Arc::new(Sink(stream.clone()))).await,
                    false => Err(FsError::Disconnected),
                };
                if let (Some(rights), Ok(_)) = (rights, &answer) {
                    self.note_session(rights, ledger, session, &stream);
                }
                answer_frame(frame, head, &Ok::<Result<_, FsError>, _>(answer))
            }
            SessionRequest::Attach { stream, seen } => {
                let is_whole = self.stream(stream).is_some_and(|stream| stream.attach(seen, out));
                answer_frame(frame, head, &Ok(is_whole))
            }
        }
    }

    async fn ask_drive(
        &self,
        frame: &Frame,
        (envelope, fields, trust): (&Envelope, &[u8], &Trust),
        payloads: Arc<Semaphore>,
        memory: Option<OwnedSemaphorePermit>,
    ) -> (Result<DriveReply, Refusal>, Option<OwnedSemaphorePermit>) {
        let message = &frame.message;
        let mut request: DriveRequest =
            match message::unpack_request(&DRIVE, message.code, fields, message.payload.clone()) {
                Ok(request) => request,
                Err(error) => return (Err(refusal(&error)), memory),
            };
        let services = self.services();
        let Some(drive) = services.drives.get(&DriveId(frame.service)).cloned() else {
            return (Err(Refusal::Elsewhere), memory);
        };
        if let Trust::Client(rights) = trust {
            if !may_ask_drive(rights, services.proofs.as_ref(), envelope, &request) {
                tracing::warn!(client = rights.client, "a client asked a drive for what it has no right to");
                return (Err(Refusal::Forbidden), memory);
            }
            // The drive would believe that the ledger has come so far.
            match &mut request {
                DriveRequest::Put(put) => put.position = None,
                DriveRequest::Delete(delete) => delete.position = None,
                _ => {}
            }
        }
        match &request {
            DriveRequest::Get(get) if get.purpose == GetPurpose::Read => self.note_use(get.key.ledger),
            DriveRequest::Put(put) if put.purpose == PutPurpose::Write => self.note_use(put.key.ledger),
            _ => {}
        }
        let memory = match &request {
            DriveRequest::Get(get) => {
                // The answer has a payload, not the request.
                let bytes = (u64::from(get.blocks) << 12).min(PAYLOADS_BYTES_MAX as u64) as u32;
                payloads.acquire_many_owned(bytes).await.ok()
            }
            _ => memory,
        };
        let reply = request.execute(&*drive).await;
        (Ok(reply), memory)
    }
}
