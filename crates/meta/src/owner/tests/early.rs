//! Answers before changes are durable: their conditions, and their repetition at the next owner.

use base::env::Random;
use base::env::sim::SimRandom;
use wire::message::AnswerTime;
use wire::meta::{Claim, RenameMode, SetAttr};

use super::*;

use FileKind::{Directory, Regular};

const EARLY: Terms<'static> = Terms { caller: None, answer: AnswerTime::Early };

/// A change that was answered early.
#[derive(Debug, Clone)]
struct Change {
    id: RequestId,
    request: MetaRequest,
    after: Seq,
    first: FirstTime,
}

impl Ledger {
    /// Sends a request that may be answered early. `Ok`: it was; `Err`: the batch for which its answer waits.
    fn early(&mut self, session: SessionId, request: &MetaRequest) -> Result<MetaReply, Seq> {
        let id = self.next_id(session);
        self.now.wall_ns += 1;
        loop {
            match self.core.execute(id, EARLY, request, self.now) {
                Executed::Reply { reply, after, early: Some(early) } => {
                    return Ok(early.reply(reply, after));
                }
                Executed::Reply { reply, after, early: None } => {
                    reply.unwrap();
                    return Err(after);
                }
                Executed::Wait(_) => self.answer_recalls(),
            }
        }
    }

    /// The next owner of a ledger whose last changes were lost. It waits for the sessions.
    fn after_loss(&self) -> Self {
        let mut before = Self::new();
        before.log.clone_from(&self.log);
        before.requests.clone_from(&self.requests);
        before.core.take_batch(usize::MAX);
        before.take_over()
    }

    fn again(&mut self, change: &Change) -> Executed {
        let terms = Terms { caller: None, answer: AnswerTime::Again(change.first) };
        self.core.execute(change.id, terms, &change.request, self.now)
    }
}

fn make(parent: Ino, name: &str, kind: FileKind) -> MetaRequest {
    MetaRequest::Make(node(parent, name, kind))
}

#[test]
fn an_answer_is_early_if_it_depends_only_on_what_its_session_knows() {
    let mut ledger = Ledger::new();
    let (me, other) = (ledger.session(), ledger.session());
    ledger.commit();
    let Ok(MetaReply::Early { reply, after, .. }) = ledger.early(me, &make(Ino::ROOT, "dir", Directory))
    else {
        panic!("the answer is not early");
    };
    let Ok(MetaReply::Entry { attr: dir, .. }) = *reply else { panic!("{reply:?}") };
    assert!(after > ledger.core.committed);
    // Reads of the session, and errors, do not wait either. They tell on how many changes they may depend.
    let counted = |answer| match answer {
        Ok(MetaReply::Early { reply, count, first, .. }) => (reply.is_ok(), count, first.is_some()),
        other => panic!("{other:?}"),
    };
    assert_eq!(counted(ledger.early(me, &MetaRequest::GetAttr { ino: dir.ino })), (true, 1, false));
    assert_eq!(counted(ledger.early(me, &make(Ino::ROOT, "dir", Regular))), (false, 1, false));
    assert_eq!(counted(ledger.early(me, &make(dir.ino, "file", Regular))), (true, 2, true));
    // Another session does.
    let lookup = MetaRequest::Lookup { parent: Ino::ROOT, name: name("dir") };
    assert_eq!(ledger.early(other, &lookup), Err(after));
    let listed = MetaRequest::ReadDir { ino: dir.ino, after: None, limit: 10 };
    assert_eq!(ledger.early(other, &listed), Err(after));
    // What it changes depends on what it has not seen, and so does what the first session changes after that.
    assert_eq!(ledger.early(other, &make(dir.ino, "theirs", Regular)), Err(after));
    assert_eq!(ledger.early(me, &make(dir.ino, "mine", Regular)), Err(after));
    assert!(matches!(ledger.early(me, &make(Ino::ROOT, "root", Regular)), Ok(MetaReply::Early { .. })));
    ledger.commit();
    assert!(matches!(ledger.early(other, &make(dir.ino, "later", Regular)), Ok(MetaReply::Early { .. })));
}

#[test]
fn an_own_change_that_waits_for_durability_makes_those_after_it_wait() {
    let mut ledger = Ledger::new();
    let me = ledger.session();
    let ino = ledger.make(me, Ino::ROOT, "file", Regular);
    ledger.commit();
    ledger.write(me, ino, &[inline(0, "text")]).unwrap();
    let set = SetAttr { mode: Some(0o600), ..SetAttr::default() };
    assert!(ledger.early(me, &MetaRequest::SetAttr { ino, set }).is_err());
    assert!(ledger.early(me, &MetaRequest::GetAttr { ino }).is_err());
}

#[test]
fn only_requests_for_names_and_attributes_are_answered_early() {
    let mut ledger = Ledger::new();
    let me = ledger.session();
    ledger.commit();
    assert!(ledger.early(me, &MetaRequest::AllocExtents).is_err());
    let id = ledger.next_id(me);
    let request = make(Ino::ROOT, "file", Regular);
    let strict = ledger.core.execute(id, Terms::default(), &request, ledger.now);
    assert!(matches!(strict, Executed::Reply { early: None, .. }));
}

#[test]
fn a_repetition_of_an_early_answer_waits_until_it_is_durable() {
    let mut ledger = Ledger::new();
    let me = ledger.session();
    ledger.commit();
    let request = make(Ino::ROOT, "file", Regular);
    ledger.early(me, &request).unwrap();
    let id = RequestId { session: me, slot: 0, seq: ledger.requests[&me] };
    for terms in [Terms::default(), EARLY] {
        let Executed::Reply { reply: Ok(MetaReply::Entry { .. }), after, early: None } =
            ledger.core.execute(id, terms, &request, ledger.now)
        else {
            panic!("not the first answer");
        };
        assert_eq!(after, ledger.core.next_seq);
    }
}

#[test]
fn what_comes_again_too_late_is_refused_and_changes_nothing() {
    let mut ledger = Ledger::new();
    let me = ledger.session();
    ledger.commit();
    let request = make(Ino::ROOT, "file", Regular);
    let Ok(MetaReply::Early { after, first: Some(first), .. }) = ledger.early(me, &request) else {
        panic!("not early")
    };
    let id = RequestId { session: me, slot: 0, seq: ledger.requests[&me] };
    let change = Change { id, request, after, first };
    let mut next = ledger.after_loss();
    next.resume(me, &Claim { in_use_ver: u64::MAX, ..Claim::default() });
    let before = next.dump();
    assert!(matches!(next.again(&change), Executed::Reply { reply: Err(FsError::StaleLease), .. }));
    assert_eq!(next.dump(), before);
    // Its number is not given to another inode.
    let other = next.make(me, Ino::ROOT, "other", Regular);
    assert!(other > first.ino, "{other} {first:?}");
}

/// Sessions change a tree, with early answers where they may be. The owner is lost with its last changes; the next one
/// executes these again. Then the tree is as if nothing had happened.
#[test]
fn what_was_answered_early_is_the_same_at_the_next_owner() {
    for seed in 0..300 {
        let random = SimRandom::new(seed);
        let below = |limit: u64| random.next_u64() % limit;
        let mut ledger = Ledger::new();
        let sessions: Vec<SessionId> = (0..1 + below(3)).map(|_| ledger.session()).collect();
        ledger.commit();
        let mut inos = vec![Ino::ROOT];
        let mut changes: Vec<Change> = Vec::new();
        for _ in 0..below(60) {
            let session = sessions[below(sessions.len() as u64) as usize];
            let request = some_request(&below, &inos);
            let id = ledger.next_id(session);
            let id = RequestId { slot: 2 + below(5) as u32, ..id };
            // A slot is used again when its change is durable.
            let is_same = |change: &Change| (change.id.session, change.id.slot) == (id.session, id.slot);
            if changes.iter().any(is_same) {
                ledger.commit();
                changes.retain(|change| !is_same(change));
            }
            ledger.now.wall_ns += 1;
            match ledger.core.execute(id, EARLY, &request, ledger.now) {
                Executed::Reply { reply, after, early: Some(Early { first: Some(first), .. }) } => {
                    let reply = reply.unwrap();
                    inos.extend(reply.attrs().iter().map(|attr| attr.ino).filter(|ino| *ino == first.ino));
                    changes.push(Change { id, request, after, first });
                }
                Executed::Reply { early: Some(_), .. } => {}
                Executed::Reply { after, .. } if after > ledger.core.committed => ledger.commit(),
                Executed::Reply { .. } => {}
                Executed::Wait(_) => ledger.answer_recalls(),
            }
            if below(10) == 0 {
                ledger.commit();
            }
            changes.retain(|change| change.after > ledger.core.committed || below(2) == 0);
        }
        let mut next = ledger.after_loss();
        for session in &sessions {
            let known: Vec<Change> =
                changes.iter().filter(|change| change.id.session == *session).cloned().collect();
            for change in &known {
                let executed = next.again(change);
                assert!(
                    matches!(executed, Executed::Reply { reply: Ok(_), .. }),
                    "seed={seed} {change:?}: {executed:?}"
                );
            }
        }
        for session in sessions {
            next.resume(session, &Claim { in_use_ver: u64::MAX, ..Claim::default() });
        }
        let (found, expected) = (tree(&next), tree(&ledger));
        let differs = |(key, value): &(&Vec<u8>, &Vec<u8>)| expected.get(*key) != Some(value);
        let wrong: Vec<_> = found.iter().filter(differs).collect();
        let lost: Vec<_> = expected.keys().filter(|key| !found.contains_key(*key)).collect();
        assert!(wrong.is_empty() && lost.is_empty(), "seed={seed} wrong={wrong:?} lost={lost:?}");
    }
}

/// Keys and values, but for those of owners, and without the leases in kept answers: they are claimed.
fn tree(ledger: &Ledger) -> Dump {
    let keys = ledger.core.keys;
    let within = |key: &Vec<u8>, range: &crate::keys::KeyRange| range.0 <= *key && *key < range.1;
    let lineages = (keys.lineage(Seq(0)), keys.lineage(Seq(u64::MAX)));
    let slots = (keys.slot(SessionId(0), 0), keys.slot(SessionId(u64::MAX), 0));
    let is_of_owner = |key: &Vec<u8>| *key == keys.value("next_ino") || within(key, &lineages);
    let mut tree: Dump = ledger.dump().into_iter().filter(|(key, _)| !is_of_owner(key)).collect();
    for (_, bytes) in tree.iter_mut().filter(|(key, _)| within(key, &slots)) {
        let (slot, _) = Slot::decode_with_tail(bytes).unwrap();
        *bytes = format!("{} {:?}", slot.seq, slot.reply().unwrap().attrs()).into_bytes();
    }
    tree
}

fn some_request(below: &impl Fn(u64) -> u64, inos: &[Ino]) -> MetaRequest {
    let ino = || inos[below(inos.len() as u64) as usize];
    let any = || name(["a", "b", "c"][below(3) as usize]);
    let (parent, new_parent) = (ino(), ino());
    match below(10) {
        0..3 => MetaRequest::Make(MakeNode { name: any(), ..node(parent, "", Directory) }),
        3 | 4 => MetaRequest::Make(MakeNode { name: any(), ..node(parent, "", Regular) }),
        5 => MetaRequest::Unlink { parent, name: any() },
        6 => MetaRequest::Rmdir { parent, name: any() },
        7 => {
            let (name, new_name, mode) = (any(), any(), RenameMode::Replace);
            MetaRequest::Rename { parent, name, new_parent, new_name, mode, whiteout: None }
        }
        8 => MetaRequest::Link { ino: ino(), parent, name: any() },
        _ => {
            let set = SetAttr { mode: Some(0o600 + below(64) as u32), ..SetAttr::default() };
            MetaRequest::SetAttr { ino: ino(), set }
        }
    }
}
