//! The network between clients and the owner: it delays messages, and delivers requests again that were not answered.
//! Messages travel as bytes.
//!
//! Requests of one client arrive in the order in which they were sent, as over one connection; those of different
//! clients in any order. Answers may overtake each other and recalls. A connection that breaks loses an answer: the
//! request is sent again under the same id, and only the last answer reaches the client.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::env::Clock;
use base::{FsError, SessionId};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, oneshot};
use wire::BoxFuture;
use wire::encoding::{self, Operations};
use wire::message::{
    self, AnswerHead, AnswerTime, Envelope, OWNER, Packed, Payload, SESSION, SessionRequest, StreamEvent,
};
use wire::meta::{
    Claim, Content, EventSink, HeldLease, LeaseKind, MapPiece, MetaReply, MetaRequest, MetaService,
    OwnerEvent, RequestId, Resumed, SESSION_TERM,
};
use wire::position::Position;

use crate::world::{Dice, World};

/// The connection of one client to the owner.
pub(crate) struct Link {
    world: Arc<World>,
    name: u32,
    owner: Arc<dyn MetaService>,
    dice: Arc<Dice>,
    requests: mpsc::UnboundedSender<Parcel>,
    /// The newest ledger position in an answer to the client.
    told: Arc<Mutex<Option<Position>>>,
}

/// A request on its way, as bytes.
struct Parcel {
    packed: Packed,
    sent_at: u64,
    reply: oneshot::Sender<Packed>,
}

/// State that the couriers of one link share.
#[derive(Clone)]
struct Route {
    world: Arc<World>,
    name: u32,
    owner: Arc<dyn MetaService>,
    dice: Arc<Dice>,
}

impl Link {
    /// The link of client `name` to an owner: the one of turn `turn` in boot `boot`. Its couriers run on the present runtime.
    pub(crate) fn new(
        world: &Arc<World>,
        (boot, turn): (u64, u64),
        name: u32,
        owner: Arc<dyn MetaService>,
    ) -> Arc<Self> {
        let dice = Arc::new(world.dice(0x6e65 + (boot << 32) + (turn << 24) + (u64::from(name) << 16)));
        let (requests, inbox) = mpsc::unbounded_channel();
        let route = Route { world: world.clone(), name, owner: owner.clone(), dice: dice.clone() };
        tokio::spawn(carry_requests(route, inbox));
        Arc::new(Self { world: world.clone(), name, owner, dice, requests, told: Arc::default() })
    }
}

/// Cuts clients off from the owner from time to time, until the future is dropped.
pub(crate) async fn cut(world: Arc<World>, boot: u64) {
    let dice = world.dice(0xc_0710 + (boot << 32));
    loop {
        tokio::time::sleep(Duration::from_millis(dice.below(20_000))).await;
        let name = dice.below(world.scenario.clients.into()) as u32;
        let until_ns = world.clock.boot_ns() + dice.below(*dice.of(&[2, 15, 45])) * 1_000_000_000;
        world.trace.event(format_args!("net {name} is cut off until {until_ns}"));
        world.promises().cut_until_ns.insert(name, until_ns);
    }
}

/// A random delay of a message: mostly short, sometimes long enough for other messages to overtake it.
pub(crate) fn delay(dice: &Dice) -> Duration {
    match dice.below(40) {
        0 => Duration::from_millis(20 + dice.below(300)),
        1..8 => Duration::from_millis(1 + dice.below(8)),
        8..24 => Duration::from_millis(1),
        _ => Duration::ZERO,
    }
}

/// A message of a client is on its way. While the client is cut off, it waits; that of a dead client does not arrive.
async fn travel(world: &World, name: u32, dice: &Dice) {
    loop {
        if world.promises().dead_clients.contains(&name) {
            return std::future::pending().await;
        }
        let until_ns = world.promises().cut_until_ns.get(&name).copied().unwrap_or_default();
        let left_ns = until_ns.saturating_sub(world.clock.boot_ns());
        if left_ns == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_nanos(left_ns)).await;
    }
    let delay = delay(dice);
    if delay.is_zero() {
        tokio::task::yield_now().await;
    } else {
        tokio::time::sleep(delay).await;
    }
}

async fn carry_requests(route: Route, mut inbox: mpsc::UnboundedReceiver<Parcel>) {
    while let Some(parcel) = inbox.recv().await {
        travel(&route.world, route.name, &route.dice).await;
        let route = route.clone();
        tokio::spawn(async move { route.deliver(parcel).await });
        // The owner gets the request before the next one is taken.
        tokio::task::yield_now().await;
    }
}

impl Route {
    async fn deliver(&self, Parcel { packed, sent_at, reply }: Parcel) {
        let name = self.name;
        let (envelope, request) = unpack::<MetaRequest>(&OWNER, packed);
        let id = envelope.request;
        self.world.trace.event(format_args!("net {name} {} {}", show_id(id), show_request(&request)));
        let asked_ns = self.world.clock.boot_ns();
        let asked_at = self.world.promises().reads.asked(id.session, &request, sent_at, asked_ns);
        let result = if self.dice.once_in(self.world.scenario.repeat_once_in) {
            self.deliver_twice(&envelope, &request).await
        } else {
            self.owner.call(envelope.clone(), request.clone()).await
        };
        self.note_reads(id.session, &result, sent_at, asked_at);
        self.note_heard(&envelope, &result);
        let head = AnswerHead { position: self.owner.position(), ..AnswerHead::default() };
        travel(&self.world, self.name, &self.dice).await;
        self.world.trace.event(format_args!("net {name} {} answer {}", show_id(id), show_answer(&result)));
        // A client that has gone on to another owner has the answer from there.
        let is_early = matches!(result, Ok(MetaReply::Early { .. }));
        if let Ok(answer) = result.clone().and_then(MetaReply::plain)
            && !reply.is_closed()
        {
            self.note_ids(&envelope, &request, &answer, is_early);
        }
        // The receiver is gone if the client is gone.
        let _ = reply.send(message::pack_answer(0, head, &Ok(result)));
    }

    /// The connection breaks before the answer comes. The request is sent again, while the owner still works on the
    /// first one or later.
    async fn deliver_twice(&self, envelope: &Envelope, request: &MetaRequest) -> Result<MetaReply, FsError> {
        let (owner, twice, again) = (self.owner.clone(), envelope.clone(), request.clone());
        let first = tokio::spawn(async move { owner.call(twice, again).await });
        travel(&self.world, self.name, &self.dice).await;
        let second = self.owner.call(envelope.clone(), request.clone()).await;
        let first = first.await.unwrap_or(Err(FsError::Unknown));
        if let (Ok(first), Ok(second)) = (&first, &second)
            && changes_something(request)
            && first.clone().plain() != second.clone().plain()
        {
            let what =
                format!("I3: a request sent twice has two answers: {request:?}: {first:?} and {second:?}");
            self.world.promises().violate(what);
        }
        second
    }

    /// I26: an owner repeats what an earlier one answered early, unless the client was away for a term.
    fn note_heard(&self, envelope: &Envelope, result: &Result<MetaReply, FsError>) {
        let now_ns = self.world.clock.boot_ns();
        let mut promises = self.world.promises();
        let is_lost = match result {
            Err(FsError::Disconnected) => return,
            Err(FsError::Unavailable | FsError::Unknown) => false,
            Err(_) => true,
            Ok(MetaReply::Early { reply, .. }) => reply.is_err(),
            Ok(_) => false,
        };
        let heard_ns = promises.heard_ns.insert(self.name, now_ns).unwrap_or(0);
        if !is_lost || !matches!(envelope.answer, AnswerTime::Again(_)) {
            return;
        }
        if now_ns < heard_ns + SESSION_TERM.as_nanos() as u64 {
            let id = envelope.request;
            promises.violate(format!(
                "I26: the next owner does not repeat {id:?}, and its client was not away: {result:?}"
            ));
        }
        // Others have not seen the change since then.
        let turn_ns =
            promises.turns_ns.iter().copied().find(|turn_ns| *turn_ns > heard_ns).unwrap_or(heard_ns);
        let since_ns = promises.names_lost_ns.get_or_insert(turn_ns);
        *since_ns = turn_ns.min(*since_ns);
    }

    /// I5: the owner must not hand out an extent for deletion that a session reads.
    fn note_reads(
        &self,
        session: SessionId,
        result: &Result<MetaReply, FsError>,
        sent_at: u64,
        asked_at: u64,
    ) {
        let now_ns = self.world.clock.boot_ns();
        let mut promises = self.world.promises();
        promises.reads.answered(session, sent_at, result.as_ref().ok());
        let Ok(MetaReply::Free { extents, .. }) = result else { return };
        for extent in extents {
            if let Some(why) = promises.reads.forbid(extent, asked_at, now_ns) {
                let (id, version) = (extent.id, extent.free_ver);
                promises.violate(format!("I5: extent {id} of version {version} is to be deleted, and {why}"));
            }
        }
    }

    /// I15: ids that are handed out are new.
    fn note_ids(&self, envelope: &Envelope, request: &MetaRequest, answer: &MetaReply, is_early: bool) {
        let id = envelope.request;
        let mut promises = self.world.promises();
        let first_id = match (request, answer) {
            (MetaRequest::Make(_), MetaReply::Entry { attr, .. }) => attr.ino.0,
            (MetaRequest::AllocExtents, MetaReply::Range { first, .. }) => first.0,
            _ => return,
        };
        // A client that left the owner just then has not used its answer, and asks the next one.
        if let Some((before, was_early)) = promises.handed_out.insert(id, (first_id, is_early)) {
            // A client does not use an early answer before all that it depends on has come. One that was used is sent again
            // with its inode.
            let was_used = !was_early || matches!(envelope.answer, AnswerTime::Again(_));
            if before != first_id && was_used {
                promises.violate(format!("I3: {id:?} has two answers: {before} and {first_id}"));
            }
            return;
        }
        if let MetaReply::Range { count, .. } = answer {
            let end = first_id + count;
            let before = promises.ranges.range(..end).next_back().map(|(from, len)| from + len);
            if before.is_some_and(|before| before > first_id) {
                promises.violate(format!("I15: extent ids from {first_id} on were handed out twice"));
            }
            promises.ranges.insert(first_id, *count);
        } else if !promises.inos.insert(first_id) {
            promises.violate(format!("I15: inode {first_id} was handed out twice"));
        }
    }
}

fn show_id(id: RequestId) -> String {
    format!("{}/{}/{}", id.session, id.slot, id.seq)
}

/// The piece without its bytes, which may be many.
fn show_piece(piece: &MapPiece) -> String {
    match &piece.content {
        Content::Inline(bytes) => format!("{}+{}:{}", piece.off, piece.len, crate::trace::sum(bytes)),
        Content::Extent(extent) | Content::Tiered(extent, _) => {
            format!("{}+{}@{}+{}", piece.off, piece.len, extent.id, extent.extent_off)
        }
    }
}

fn show_request(request: &MetaRequest) -> String {
    match request {
        MetaRequest::Commit { ino, lease, pieces, size, .. } => {
            let pieces: Vec<_> = pieces
                .iter()
                .map(|commit| format!("{} owed={:?}", show_piece(&commit.piece), commit.owed))
                .collect();
            format!("Commit ino={ino} lease={lease} size={size} {}", pieces.join(" "))
        }
        other => format!("{other:?}"),
    }
}

fn show_answer(answer: &Result<MetaReply, FsError>) -> String {
    match answer {
        Ok(MetaReply::Map { pieces, end }) => {
            let pieces: Vec<_> = pieces.iter().map(show_piece).collect();
            format!("Map end={end} {}", pieces.join(" "))
        }
        other => format!("{other:?}"),
    }
}

/// Whether a repetition of the request must get the first answer.
fn changes_something(request: &MetaRequest) -> bool {
    use MetaRequest as R;
    match request {
        R::Make(_)
        | R::MakeUnnamed(_)
        | R::Unlink { .. }
        | R::Rmdir { .. }
        | R::Link { .. }
        | R::SetXattr { .. }
        | R::SetAttr { .. }
        | R::NoteRead { .. }
        | R::SetGuard { .. }
        | R::Commit { .. }
        | R::AllocExtents
        | R::CloneRange { .. } => true,
        R::Rename { .. } => false,
        _ => false,
    }
}

impl MetaService for Link {
    fn position(&self) -> Option<Position> {
        *self.told.lock().expect("no holder of this lock panics")
    }

    fn connect(&self, events: Arc<dyn EventSink>) -> BoxFuture<'_, Result<SessionId, FsError>> {
        Box::pin(async move {
            let (queue, inbox) = mpsc::unbounded_channel();
            let (world, dice, name) = (self.world.clone(), self.dice.clone(), self.name);
            tokio::spawn(carry_events(world, dice, name, inbox, events));
            let queue = Queue { world: self.world.clone(), events: queue };
            travel(&self.world, self.name, &self.dice).await;
            let session = self.owner.connect(Arc::new(queue)).await?;
            self.world.trace.event(format_args!("net {name} session {session}"));
            let mut promises = self.world.promises();
            if !promises.sessions.insert(session.0) {
                promises.violate(format!("I15: session {session} was handed out twice"));
            }
            Ok(session)
        })
    }

    fn resume(
        &self,
        session: SessionId,
        claim: Claim,
        events: Arc<dyn EventSink>,
    ) -> BoxFuture<'_, Result<Resumed, FsError>> {
        Box::pin(async move {
            let name = self.name;
            self.world.trace.event(format_args!("net {name} resume {session} {claim:?}"));
            let (queue, inbox) = mpsc::unbounded_channel();
            tokio::spawn(carry_events(self.world.clone(), self.dice.clone(), name, inbox, events));
            let queue = Queue { world: self.world.clone(), events: queue };
            travel(&self.world, self.name, &self.dice).await;
            // A file that is not open may be gone. A client that has a lease and no attributes yet has written nothing under it.
            let is_written = |held: &&HeldLease| {
                let is_open = claim.opens.contains(&held.lease.ino);
                held.lease.kind >= LeaseKind::Shared && held.attr_ver > 0 && is_open
            };
            let written: Vec<HeldLease> = claim.leases.iter().filter(is_written).copied().collect();
            let now_ns = self.world.clock.boot_ns();
            let sent_at = {
                let mut promises = self.world.promises();
                let sent_at = promises.reads.sent();
                promises.reads.tells(session, claim.in_use_ver, sent_at, now_ns);
                sent_at
            };
            let is_last = !claim.more;
            let request = SessionRequest::Resume { stream: 0, session, claim, proof: bytes::Bytes::new() };
            let SessionRequest::Resume { claim, .. } = arrived(&SESSION, &request) else {
                unreachable!("a request arrives as it was sent")
            };
            let resumed = answered(self.owner.resume(session, claim, Arc::new(queue)).await);
            if resumed.is_ok() && is_last {
                self.world.promises().reads.told_for_certain(session, sent_at);
            }
            travel(&self.world, self.name, &self.dice).await;
            self.world.trace.event(format_args!("net {name} resumed {resumed:?}"));
            if let Ok(resumed) = &resumed {
                let lost = written.iter().filter(|held| !resumed.leases.contains(&held.lease));
                lost.for_each(|held| self.world.note_revoked(held.lease.ino));
            }
            resumed
        })
    }

    fn call(&self, envelope: Envelope, request: MetaRequest) -> BoxFuture<'_, Result<MetaReply, FsError>> {
        Box::pin(async move {
            let packed = message::pack_request(&OWNER, &envelope, &request);
            let (reply, answer) = oneshot::channel();
            let sent_at = self.world.promises().reads.sent();
            // If there is no courier, the runtime is ending.
            let _ = self.requests.send(Parcel { packed, sent_at, reply });
            let Ok(packed) = answer.await else { return Err(FsError::Unknown) };
            let (AnswerHead { position, .. }, answer) = unpack_answer(packed);
            let mut told = self.told.lock().expect("no holder of this lock panics");
            // Answers overtake each other.
            if position.map(|position| position.seq) > told.map(|told| told.seq) {
                *told = position;
            }
            answer
        })
    }
}

struct Queue {
    world: Arc<World>,
    events: mpsc::UnboundedSender<OwnerEvent>,
}

impl EventSink for Queue {
    fn event(&self, event: OwnerEvent) {
        if let OwnerEvent::Revoked { lease } = &event {
            self.world.trace.event(format_args!("net revoked {lease:?}"));
            self.world.note_revoked(lease.ino);
        }
        // A client that is gone has no leases to recall.
        let _ = self.events.send(event);
    }
}

async fn carry_events(
    world: Arc<World>,
    dice: Arc<Dice>,
    name: u32,
    mut inbox: mpsc::UnboundedReceiver<OwnerEvent>,
    events: Arc<dyn EventSink>,
) {
    while let Some(event) = inbox.recv().await {
        travel(&world, name, &dice).await;
        world.trace.event(format_args!("net {name} event {event:?}"));
        let event = encoding::encode(&StreamEvent { number: 0, event });
        let event: StreamEvent = encoding::decode(&event).expect("an event arrives as it was sent");
        events.event(event.event);
    }
}

/// A request as it arrives: it travels as bytes.
pub(crate) fn arrived<T: Serialize + DeserializeOwned + Payload>(operations: &Operations, request: &T) -> T {
    unpack(operations, message::pack_request(operations, &Envelope::default(), request)).1
}

/// An answer as it arrives.
pub(crate) fn answered<T: Serialize + DeserializeOwned + Payload>(answer: T) -> T {
    unpack_answer(message::pack_answer(0, AnswerHead::default(), &Ok(answer))).1
}

fn unpack<T: DeserializeOwned + Payload>(operations: &Operations, packed: Packed) -> (Envelope, T) {
    let (envelope, fields) =
        message::open_envelope(&packed.body).expect("an envelope arrives as it was sent");
    let request = message::unpack_request(operations, packed.code, fields, packed.payload);
    (envelope, request.expect("a request arrives as it was sent"))
}

fn unpack_answer<T: DeserializeOwned + Payload>(packed: Packed) -> (AnswerHead, T) {
    let answer = message::unpack_answer(&packed.body, packed.payload);
    let (head, answer) = answer.expect("an answer arrives as it was sent");
    (head, answer.expect("no request is refused"))
}
