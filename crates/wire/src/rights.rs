//! What a client may do that is no node: its filesystems, and on behalf of which users it asks. And the proofs by which nodes know
//! again what another node has given to it: a message authentication code (HMAC-SHA-256, RFC 2104) with a key that all nodes have.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use base::{ExtentId, LedgerId, SessionId};
use bytes::Bytes;
use ring::hmac;
use serde::{Deserialize, Serialize};

use crate::message::Caller;
use crate::meta::{LeaseKind, MetaRequest, OpenIntent};

/// Ranges of extents that a client keeps proofs of, for each ledger. Later ones are far from use.
const RANGES_MAX: usize = 512;

/// Which users of a client's machine count as nobody.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Squash {
    /// Root does, the others count as themselves.
    #[default]
    Root,
    /// All do.
    All,
    /// None does.
    None,
}

/// The rights of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rights {
    /// Its number.
    pub client: u32,
    /// The ledgers of its filesystems.
    pub ledgers: BTreeSet<LedgerId>,
    /// The names of its filesystems.
    pub filesystems: BTreeSet<String>,
    /// It may change nothing.
    pub read_only: bool,
    /// Which of its users count as nobody.
    pub squash: Squash,
}

impl Rights {
    /// The user as which a request counts that the client makes for `caller`.
    pub fn squashed(&self, caller: Option<Caller>) -> Caller {
        match (self.squash, caller) {
            (Squash::All, _) | (_, None) => Caller::nobody(),
            (Squash::Root, Some(caller)) if caller.uid == 0 => Caller::nobody(),
            (_, Some(caller)) => caller,
        }
    }

    /// Whether they allow what `others` do, and more filesystems at most.
    pub fn include(&self, others: &Self) -> bool {
        let Self { client, ledgers, filesystems, read_only, squash } = self;
        let same = (*client, *read_only, *squash) == (others.client, others.read_only, others.squash);
        same && ledgers.is_superset(&others.ledgers) && filesystems.is_superset(&others.filesystems)
    }

    /// Whether the client may ask that of an owner of one of its ledgers. What its users may do is checked by the owner.
    pub fn allow(&self, request: &MetaRequest) -> bool {
        !self.read_only || only_reads(request)
    }
}

/// Whether a request leaves files as they are.
fn only_reads(request: &MetaRequest) -> bool {
    use MetaRequest as R;
    matches!(
        request,
        R::CloseSession
            | R::Heartbeat { .. }
            | R::Lookup { .. }
            | R::GetAttr { .. }
            | R::ReadDir { .. }
            | R::ReadLink { .. }
            | R::Open { intent: OpenIntent::None | OpenIntent::Read, .. }
            | R::Close { .. }
            | R::GetXattr { .. }
            | R::ListXattr { .. }
            | R::GetMap { .. }
            | R::StatFs
            | R::Acquire { kind: LeaseKind::Read, .. }
            | R::Release { .. }
            | R::ReleaseAll { .. }
            | R::Forgot { .. }
            | R::Lock { .. }
            | R::Unlock { .. }
            | R::TestLock { .. }
    )
}

/// Says that extents of a ledger were given to a client: they are its to write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// The first extent.
    pub first: ExtentId,
    /// Their number.
    pub count: u64,
    /// The proof.
    pub proof: Bytes,
}

impl Grant {
    fn has(&self, extent: ExtentId) -> bool {
        extent >= self.first && extent.0 - self.first.0 < self.count
    }
}

/// The key of proofs, which all nodes of a cluster have.
#[derive(Clone)]
pub struct ProofKey(hmac::Key);

impl ProofKey {
    /// That of a cluster with this secret.
    pub fn of(secret: &[u8]) -> Self {
        let root = hmac::Key::new(hmac::HMAC_SHA256, secret);
        let key = hmac::sign(&root, b"forebay proofs of clients 1");
        Self(hmac::Key::new(hmac::HMAC_SHA256, key.as_ref()))
    }

    /// The proof that a session is that of a client.
    pub fn of_session(&self, client: u32, ledger: LedgerId, session: SessionId) -> Bytes {
        self.sign(b's', client, ledger, &[session.0])
    }

    /// The proof that extents are a client's to write.
    pub fn of_extents(&self, client: u32, ledger: LedgerId, first: ExtentId, count: u64) -> Bytes {
        self.sign(b'e', client, ledger, &[first.0, count])
    }

    /// Whether a client may write an extent.
    pub fn allows(&self, client: u32, ledger: LedgerId, grant: &Grant, extent: ExtentId) -> bool {
        let text = text(b'e', client, ledger, &[grant.first.0, grant.count]);
        grant.has(extent) && hmac::verify(&self.0, &text, &grant.proof).is_ok()
    }

    /// Whether a proof is that of this session.
    pub fn is_of_session(&self, client: u32, ledger: LedgerId, session: SessionId, proof: &[u8]) -> bool {
        hmac::verify(&self.0, &text(b's', client, ledger, &[session.0]), proof).is_ok()
    }

    fn sign(&self, kind: u8, client: u32, ledger: LedgerId, numbers: &[u64]) -> Bytes {
        Bytes::copy_from_slice(hmac::sign(&self.0, &text(kind, client, ledger, numbers)).as_ref())
    }
}

/// What is signed. Each kind has its own length, so none can be taken for another.
fn text(kind: u8, client: u32, ledger: LedgerId, numbers: &[u64]) -> Vec<u8> {
    let mut text = vec![kind];
    text.extend_from_slice(&client.to_le_bytes());
    text.extend_from_slice(&ledger.0.to_le_bytes());
    numbers.iter().for_each(|number| text.extend_from_slice(&number.to_le_bytes()));
    text
}

/// The proofs that a process was given, for all nodes that it reaches.
#[derive(Default)]
pub struct Proofs {
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    sessions: HashMap<(LedgerId, SessionId), Bytes>,
    /// By the first extent.
    ranges: BTreeMap<(LedgerId, ExtentId), Grant>,
}

impl Proofs {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the proof of a session. Nodes get none.
    pub(crate) fn keep_session(&self, ledger: LedgerId, session: SessionId, proof: Bytes) {
        if !proof.is_empty() {
            let mut known = self.known();
            // A process has one session of a ledger at a time.
            known.sessions.retain(|(other, _), _| *other != ledger);
            known.sessions.insert((ledger, session), proof);
        }
    }

    pub(crate) fn of_session(&self, ledger: LedgerId, session: SessionId) -> Bytes {
        self.known().sessions.get(&(ledger, session)).cloned().unwrap_or_default()
    }

    /// Keeps the proof of extents.
    pub(crate) fn keep_extents(&self, ledger: LedgerId, grant: Grant) {
        if grant.proof.is_empty() {
            return;
        }
        let mut known = self.known();
        known.ranges.insert((ledger, grant.first), grant);
        let all = (ledger, ExtentId(0))..=(ledger, ExtentId(u64::MAX));
        if known.ranges.range(all.clone()).count() > RANGES_MAX
            && let Some(oldest) = known.ranges.range(all).next().map(|(key, _)| *key)
        {
            known.ranges.remove(&oldest);
        }
    }

    /// The proof for an extent.
    pub(crate) fn of_extent(&self, ledger: LedgerId, extent: ExtentId) -> Option<Grant> {
        let known = self.known();
        let before = known.ranges.range((ledger, ExtentId(0))..=(ledger, extent)).next_back();
        before.map(|(_, grant)| grant.clone()).filter(|grant| grant.has(extent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEDGER: LedgerId = LedgerId(3);

    fn rights(squash: Squash, read_only: bool) -> Rights {
        let (ledgers, filesystems) = (BTreeSet::from([LEDGER]), BTreeSet::from(["main".to_owned()]));
        Rights { client: 7, ledgers, filesystems, read_only, squash }
    }

    #[test]
    fn users_count_as_themselves_as_far_as_their_client_is_trusted() {
        let user = Caller { uid: 1000, gid: 100, groups: vec![4] };
        let as_whom = |squash, caller: Option<&Caller>| rights(squash, false).squashed(caller.cloned());
        for squash in [Squash::Root, Squash::All, Squash::None] {
            assert_eq!(as_whom(squash, None), Caller::nobody());
        }
        assert_eq!(as_whom(Squash::Root, Some(&user)), user);
        assert_eq!(as_whom(Squash::Root, Some(&Caller::root())), Caller::nobody());
        assert_eq!(as_whom(Squash::All, Some(&user)), Caller::nobody());
        assert_eq!(as_whom(Squash::None, Some(&Caller::root())), Caller::root());
    }

    #[test]
    fn more_filesystems_end_no_connection_and_everything_else_does() {
        let now = rights(Squash::Root, false);
        let mut more = now.clone();
        more.ledgers.insert(LedgerId(4));
        assert!(more.include(&now) && now.include(&now) && !now.include(&more));
        assert!(!rights(Squash::All, false).include(&now) && !rights(Squash::Root, true).include(&now));
    }

    #[test]
    fn a_client_that_only_reads_changes_nothing() {
        let read = rights(Squash::Root, true);
        assert!(read.allow(&MetaRequest::StatFs) && read.allow(&MetaRequest::CloseSession));
        for request in [MetaRequest::AllocExtents, MetaRequest::PurgeStep, MetaRequest::ExtentRanges] {
            assert!(!read.allow(&request), "{request:?}");
            assert!(rights(Squash::Root, false).allow(&request), "{request:?}");
        }
    }

    #[test]
    fn a_proof_is_of_one_client_one_ledger_and_one_range() {
        let key = ProofKey::of(b"secret");
        let grant =
            Grant { first: ExtentId(100), count: 10, proof: key.of_extents(7, LEDGER, ExtentId(100), 10) };
        let allows =
            |client, ledger, grant: &Grant, extent| key.allows(client, ledger, grant, ExtentId(extent));
        assert!(allows(7, LEDGER, &grant, 100) && allows(7, LEDGER, &grant, 109));
        for extent in [0, 99, 110, u64::MAX] {
            assert!(!allows(7, LEDGER, &grant, extent), "{extent}");
        }
        assert!(!allows(8, LEDGER, &grant, 100) && !allows(7, LedgerId(4), &grant, 100));
        assert!(!allows(7, LEDGER, &Grant { count: 11, ..grant.clone() }, 110));
        assert!(!allows(7, LEDGER, &Grant { proof: Bytes::new(), ..grant.clone() }, 100));
        assert!(!ProofKey::of(b"other").allows(7, LEDGER, &grant, ExtentId(100)));
        let proof = key.of_session(7, LEDGER, SessionId(9));
        assert!(key.is_of_session(7, LEDGER, SessionId(9), &proof));
        assert!(!key.is_of_session(8, LEDGER, SessionId(9), &proof));
        assert!(!key.is_of_session(7, LEDGER, SessionId(8), &proof));
        assert!(!key.is_of_session(7, LEDGER, SessionId(9), &[]));
    }

    #[test]
    fn a_process_finds_the_proof_of_an_extent() {
        let proofs = Proofs::default();
        let grant = |first| Grant { first: ExtentId(first), count: 10, proof: Bytes::from_static(b"p") };
        proofs.keep_extents(LEDGER, grant(100));
        proofs.keep_extents(LEDGER, grant(200));
        let found = |extent| proofs.of_extent(LEDGER, ExtentId(extent)).map(|grant| grant.first.0);
        assert_eq!((found(100), found(109), found(110), found(205)), (Some(100), Some(100), None, Some(200)));
        assert_eq!(proofs.of_extent(LedgerId(4), ExtentId(100)), None);
        (0..2 * RANGES_MAX as u64).for_each(|at| proofs.keep_extents(LEDGER, grant(1000 + 10 * at)));
        assert_eq!((found(100), found(1000 + 20 * RANGES_MAX as u64 - 1).is_some()), (None, true));
    }
}
