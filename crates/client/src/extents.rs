//! Extents on drives: encode, place and write. `read_extent` reads them.
//!
//! An extent is written once under an id of its own. A retry after a failure takes a new id and another
//! placement group, so that an id never stands for two contents.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use base::checksum::block_checksums;
use base::env::Env;
use base::units::BLOCK_BYTES;
use base::{DriveId, Epoch, ExtentId, FsError, LedgerId, PgId, ShardIndex};
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use layout::{ErasureCode, PlacementGroup, Profile, ShardRead, extent_bytes_max, shard_len};
use tokio::sync::watch;
use wire::drive::{
    DeleteShards, GetPurpose, GetShard, PutPurpose, PutShard, PutShardError, ShardBlocks, ShardClass,
    ShardKey, ShardNote, ShardShape,
};
use wire::meta::{ExtentRef, OwedShard};
use wire::position::Position;

use crate::bond::Bonds;
use crate::latency::{Latencies, RequestKind};
use crate::peers::Peers;
use crate::reach::Reach;
use crate::topology::Beside;
use crate::topology::Topology;

/// Extents above this are erasure coded at once, smaller ones are kept as copies.
pub(crate) const COPIES_BYTES_MAX: u32 = 256 << 10;
/// How often a write is tried, each time on another placement group.
const WRITE_ATTEMPTS: u32 = 4;
/// A drive that has not answered by then counts as silent. Callers wait less where others can take its place.
pub(crate) const DRIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Garbage that a drive has not deleted by then is found later by comparing inventories.
const DISCARD_TIMEOUT: Duration = Duration::from_millis(500);
/// How long a write with too few drives waits for other groups.
const TOPOLOGY_PATIENCE: Duration = Duration::from_millis(2500);
/// How often it checks for them. A `watch` would wake several writes in a random order.
const TOPOLOGY_LOOK: Duration = Duration::from_millis(20);

/// How the bytes of an extent are protected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protection {
    /// m + 1 copies: for small pieces, which the packer gathers later.
    Copies,
    /// k data and m parity shards.
    Coded,
}

/// How an extent is written, and why.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WriteHow {
    pub(crate) protection: Protection,
    pub(crate) purpose: PutPurpose,
    /// What it is near to.
    pub(crate) beside: Beside,
    /// The note that is stored with its shards.
    pub(crate) note: ShardNote,
}

/// An extent that is durable and may be committed.
#[derive(Debug, Clone)]
pub(crate) struct WrittenExtent {
    pub(crate) extent: ExtentRef,
    pub(crate) owed: Vec<OwedShard>,
    /// The epoch of the group that placed it.
    pub(crate) placed: Epoch,
}

/// Why an extent was not written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WriteExtentError {
    /// Extents are shorter now, because drives are missing: write it as several.
    TooLong {
        /// The most bytes of one extent.
        bytes_max: u32,
    },
    /// It is not durable, and it will never be read.
    Failed(FsError),
}

/// Why bytes of an extent could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadExtentError {
    /// Its shards are deleted: the map that named it is old.
    Gone,
    /// Fewer than k shards can be read, and some are deleted or owed. Which of the two is unknown while other drives do
    /// not answer.
    Doubtful,
    /// Fewer than k shards can be read.
    Unreadable,
    /// Only an object store has it, and the store does not deliver it.
    StoreFailed,
    /// Only an object store has it, and the bytes it delivers are damaged. Other ranges of the blob may be intact.
    Damaged,
}

/// Why a shard was not restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RestoreShardError {
    /// Its drive does not accept it now.
    NotNow,
    /// The extent is deleted: there is nothing to restore.
    Gone,
    /// Fewer than k shards can be read.
    Unreadable,
}

impl From<ReadExtentError> for RestoreShardError {
    fn from(error: ReadExtentError) -> Self {
        match error {
            ReadExtentError::Gone => Self::Gone,
            ReadExtentError::Doubtful
            | ReadExtentError::Unreadable
            | ReadExtentError::StoreFailed
            | ReadExtentError::Damaged => Self::Unreadable,
        }
    }
}

/// Reads and writes extents of one ledger.
pub(crate) struct ExtentIo {
    pub(crate) env: Env,
    pub(crate) ledger: LedgerId,
    /// The owner; every change on a drive carries its newest position.
    bonds: Arc<Bonds>,
    topology: watch::Receiver<Arc<Topology>>,
    codes: Mutex<HashMap<(u8, u8), Arc<ErasureCode>>>,
    pub(crate) latencies: Latencies,
    turn: OnceLock<u64>,
    pub(crate) peers: Peers,
    pub(crate) reach: Reach,
}

/// One extent's shards on the way to drives.
struct Stripe {
    profile: Profile,
    how: WriteHow,
    extent_len: u32,
    shards: Vec<Bytes>,
}

/// One shard on its way to a drive.
struct Put {
    drive: DriveId,
    purpose: PutPurpose,
    note: ShardNote,
    bytes: Bytes,
}

impl ExtentIo {
    pub(crate) fn new(
        env: Env,
        ledger: LedgerId,
        bonds: Arc<Bonds>,
        topology: watch::Receiver<Arc<Topology>>,
        peers: Peers,
        reach: Reach,
    ) -> Self {
        let (codes, latencies) = (Mutex::default(), Latencies::new());
        let turn = OnceLock::new();
        Self { env, ledger, bonds, topology, codes, latencies, turn, peers, reach }
    }

    /// A random number of this client: of copies on other nodes, not all clients read the first.
    pub(crate) fn turn(&self) -> u64 {
        *self.turn.get_or_init(|| self.env.random.next_u64() >> 8)
    }

    /// The newest durable position of the ledger that an answer told.
    fn position(&self) -> Option<Position> {
        self.bonds.with(|bond| bond.owner.as_ref()?.position())
    }

    /// The topology, and each later one.
    pub(crate) fn topologies(&self) -> watch::Receiver<Arc<Topology>> {
        self.topology.clone()
    }

    pub(crate) fn topology(&self) -> Arc<Topology> {
        self.topology.borrow().clone()
    }

    pub(crate) fn code(&self, k: u8, n: u8) -> Arc<ErasureCode> {
        let mut codes = self.codes.lock().expect("no holder of this lock panics");
        let build = || Arc::new(ErasureCode::new(k, n - k).expect("shapes are checked where they enter"));
        codes.entry((k, n)).or_insert_with(build).clone()
    }

    /// The profile by which extents with this protection are spread.
    fn shape(full: Profile, protection: Protection) -> Profile {
        match protection {
            Protection::Coded => full,
            Protection::Copies => {
                let (n, w) = (u32::from(full.m()) + 1, u32::from(full.w() - full.k()) + 1);
                Profile::new(n, 1, w).expect("as many copies as the profile survives losses, plus one")
            }
        }
    }

    /// Writes an extent durably. `next_id` gives a fresh id for every attempt.
    pub(crate) async fn write<F>(
        &self,
        data: Bytes,
        how: WriteHow,
        mut next_id: impl FnMut() -> F,
    ) -> Result<WrittenExtent, WriteExtentError>
    where
        F: Future<Output = Result<ExtentId, FsError>>,
    {
        let mut error = FsError::Io;
        let mut stripe: Option<Stripe> = None;
        let mut until = None;
        let mut attempt = 0;
        while attempt < WRITE_ATTEMPTS {
            let losses = self.reach.losses();
            let topology = self.topology();
            let profile = Self::shape(topology.profile, how.protection);
            let bytes_max = extent_bytes_max(topology.profile);
            if how.protection == Protection::Coded && data.len() > bytes_max as usize {
                return Err(WriteExtentError::TooLong { bytes_max });
            }
            let stripe = match stripe.take() {
                Some(same) if same.profile == profile => stripe.insert(same),
                _ => stripe.insert(self.encode(data.clone(), profile, how)),
            };
            let now_ns = self.env.clock.boot_ns();
            let is_slow = |drive| self.latencies.is_slow(drive, now_ns);
            // What failed near may work elsewhere.
            let beside = if attempt == 0 { how.beside } else { Beside::Nothing };
            let Some(group) = topology.choose(self.env.random.next_u64(), profile, beside, &is_slow) else {
                tracing::error!("no placement group to write to");
                return Err(WriteExtentError::Failed(FsError::Io));
            };
            let id = next_id().await.map_err(WriteExtentError::Failed)?;
            match self.put_all(&topology, group, id, stripe).await {
                Ok(written) => return Ok(written),
                Err(failed) => {
                    tracing::warn!(%id, pg = %group.id, attempt, %failed, "extent not written, trying elsewhere");
                    // No commit will ever name this id, so shards that were written are garbage.
                    self.discard(group.id, id, stripe.profile.n()).await;
                    error = failed;
                }
            }
            let may_wait = how.purpose == PutPurpose::Write && error == FsError::Io;
            if self.reach.was_away(losses).await || (may_wait && self.drives_returned(&topology, group).await)
            {
                continue;
            }
            if error == FsError::Io {
                // The planner takes several steps: each may be the one that helps.
                let now = tokio::time::Instant::now();
                let until = *until.get_or_insert(now + TOPOLOGY_PATIENCE);
                if self.other_topology(&topology, until).await {
                    continue;
                }
            }
            attempt += 1;
        }
        Err(WriteExtentError::Failed(error))
    }

    /// If machines with drives of a group are not reached, which may be why a request failed: waits until another attempt makes
    /// sense, because one is back, or the drives or groups are others. Returns whether it does.
    pub(crate) async fn drives_returned(&self, known: &Arc<Topology>, group: &PlacementGroup) -> bool {
        let patience = self.reach.drive_patience;
        let away = known.unreachable(group);
        if away == 0 || patience.is_zero() {
            return false;
        }
        tracing::warn!(away, "machines with drives are not reached, waiting for them");
        let back = async {
            while Arc::ptr_eq(&self.topology.borrow(), known) && known.unreachable(group) >= away {
                tokio::time::sleep(TOPOLOGY_LOOK).await;
            }
        };
        tokio::time::timeout(patience, back).await.is_ok()
    }

    /// How long operations wait for machines of some of these groups that are not reached; zero if all are.
    pub(crate) fn waits_for(&self, groups: impl Iterator<Item = PgId>) -> Duration {
        let topology = self.topology();
        let mut groups = groups.filter_map(|pg| topology.map.group(pg));
        let is_away = groups.any(|group| topology.unreachable(group) > 0);
        if is_away { self.reach.drive_patience } else { Duration::ZERO }
    }

    /// Waits for other drives or groups: the planner has to see first that drives are gone. Returns whether there are others, before it was
    /// too late. Without a change the next attempt may still find a better group.
    async fn other_topology(&self, known: &Arc<Topology>, until: tokio::time::Instant) -> bool {
        while tokio::time::Instant::now() < until {
            if !Arc::ptr_eq(&self.topology.borrow(), known) {
                return true;
            }
            tokio::time::sleep(TOPOLOGY_LOOK).await;
        }
        false
    }

    /// Waits a moment for another cluster map than `known`, by which the ledger did not commit an extent.
    pub(crate) async fn newer_map(&self, known: &Arc<Topology>) {
        self.other_topology(known, tokio::time::Instant::now() + TOPOLOGY_PATIENCE).await;
    }

    fn encode(&self, data: Bytes, profile: Profile, how: WriteHow) -> Stripe {
        let (k, m) = (profile.k(), profile.m());
        let extent_len = u32::try_from(data.len()).expect("an extent is at most 16 MiB");
        let shard_bytes = shard_len(extent_len, k) as usize;
        let padded = pad(data, shard_bytes * usize::from(k));
        let mut shards: Vec<Bytes> =
            (0..usize::from(k)).map(|j| padded.slice(j * shard_bytes..(j + 1) * shard_bytes)).collect();
        if k == 1 {
            shards.extend((0..m).map(|_| padded.clone()));
        } else if m > 0 {
            let mut parity = vec![0u8; shard_bytes * usize::from(m)];
            let data: Vec<&[u8]> = shards.iter().map(|shard| shard.as_ref()).collect();
            let mut rows: Vec<&mut [u8]> = parity.chunks_exact_mut(shard_bytes).collect();
            self.code(k, profile.n()).encode(&data, &mut rows);
            let parity = Bytes::from(parity);
            shards.extend((0..usize::from(m)).map(|i| parity.slice(i * shard_bytes..(i + 1) * shard_bytes)));
        }
        Stripe { profile, how, extent_len, shards }
    }

    /// Succeeds if at least w shards are durable; returns which are owed. Once w are stored, it does not wait for
    /// drives that take much longer than the others.
    async fn put_all(
        &self,
        topology: &Topology,
        group: &PlacementGroup,
        id: ExtentId,
        stripe: &Stripe,
    ) -> Result<WrittenExtent, FsError> {
        let (k, n, w) = (stripe.profile.k(), stripe.profile.n(), stripe.profile.w());
        let extent = ExtentRef { id, pg: group.id, k, n, extent_len: stripe.extent_len, extent_off: 0 };
        let spared = self.spared(topology, group, stripe.profile);
        let started_ns = self.env.clock.boot_ns();
        let members = || (0u8..).zip(group.members.iter().copied());
        let mut puts: FuturesUnordered<_> = members()
            .zip(&stripe.shards)
            .filter(|((_, drive), _)| !spared.contains(drive))
            .map(|((index, drive), bytes)| async move {
                let shard = ShardIndex(index);
                let WriteHow { purpose, note, .. } = stripe.how;
                let put = Put { drive, purpose, note, bytes: bytes.clone() };
                (index, self.put_shard(topology, group, &extent, shard, put).await)
            })
            .collect();
        let mut stored = vec![false; usize::from(n)];
        let mut failed = spared.len();
        let mut full = false;
        let patience = tokio::time::sleep(self.latencies.write_patience());
        tokio::pin!(patience);
        while !puts.is_empty() {
            let enough = stored.iter().filter(|stored| **stored).count() >= usize::from(w);
            tokio::select! {
                biased;
                Some((index, result)) = puts.next() => match result {
                    Ok(()) => stored[usize::from(index)] = true,
                    Err(error) => {
                        full |= matches!(error, PutShardError::NoSpace { .. });
                        failed += 1;
                    }
                },
                () = &mut patience, if enough => break,
            }
            if failed > usize::from(n - w) {
                // Waiting for the others does not help.
                break;
            }
        }
        let now = self.env.clock.boot_ns();
        let unstored: Vec<_> =
            members().filter(|(index, _)| stored.get(usize::from(*index)) == Some(&false)).collect();
        if !puts.is_empty() && failed <= usize::from(n - w) {
            let waited_ns =
                now.saturating_sub(started_ns).max(self.latencies.write_patience().as_nanos() as u64);
            for (_, drive) in unstored
                .iter()
                .filter(|(_, drive)| !spared.contains(drive) && topology.usable(*drive).is_some())
            {
                self.latencies.gave_up(*drive, RequestKind::Write, waited_ns, now);
            }
        }
        let owed: Vec<OwedShard> = unstored
            .into_iter()
            .map(|(index, drive)| OwedShard { shard: ShardIndex(index), drive })
            .collect();
        if owed.len() > usize::from(n - w) {
            return Err(if full { FsError::NoSpace } else { FsError::Io });
        }
        Ok(WrittenExtent { extent, owed, placed: group.epoch })
    }

    /// Slow members that a write can do without.
    fn spared(&self, topology: &Topology, group: &PlacementGroup, profile: Profile) -> Vec<DriveId> {
        let members = group.members.iter().take(profile.n().into());
        let (up, down): (Vec<DriveId>, Vec<DriveId>) =
            members.copied().partition(|drive| topology.usable(*drive).is_some());
        let may_owe = usize::from(profile.n() - profile.w()).saturating_sub(down.len());
        let now = self.env.clock.boot_ns();
        up.into_iter().filter(|drive| self.latencies.spares(*drive, now)).take(may_owe).collect()
    }

    /// Stores one shard on a drive. A busy drive is asked again after the time that it names.
    async fn put_shard(
        &self,
        topology: &Topology,
        group: &PlacementGroup,
        extent: &ExtentRef,
        shard: ShardIndex,
        put: Put,
    ) -> Result<(), PutShardError> {
        let Put { drive, purpose, note, bytes } = put;
        let Some(service) = topology.usable(drive) else {
            return Err(PutShardError::Failed { drive });
        };
        let ExtentRef { id, k, n, extent_len, .. } = *extent;
        let copies = k == 1 && extent_len <= COPIES_BYTES_MAX;
        let request = PutShard {
            key: ShardKey { ledger: self.ledger, extent: id, shard },
            shape: ShardShape { pg: group.id, k, m: n - k, extent_len },
            note,
            position: self.position(),
            class: if copies { ShardClass::Small } else { ShardClass::Bulk },
            purpose,
            pg_epoch: group.epoch,
            checksums: block_checksums(id, shard, 0, &bytes),
            bytes,
        };
        // Time spent waiting for a busy drive counts: if all are busy, none is given up for it.
        let started_ns = self.env.clock.boot_ns();
        let attempts = async {
            loop {
                let result = service.put(request.clone()).await;
                let now = self.env.clock.boot_ns();
                let Err(PutShardError::Busy { retry_after_ms, .. }) = result else {
                    self.latencies.answered(drive, RequestKind::Write, now.saturating_sub(started_ns), now);
                    return result;
                };
                tokio::time::sleep(Duration::from_millis(retry_after_ms.max(1).into())).await;
            }
        };
        let late = Err(PutShardError::Failed { drive });
        tokio::time::timeout(DRIVE_TIMEOUT, attempts).await.unwrap_or(late)
    }

    /// Reconstructs a shard and stores it on the drive that should have it now. Returns its length in bytes.
    pub(crate) async fn restore_shard(
        &self,
        extent: &ExtentRef,
        shard: ShardIndex,
    ) -> Result<u64, RestoreShardError> {
        let topology = self.topology();
        let group = topology.map.group(extent.pg).ok_or(RestoreShardError::NotNow)?;
        let drive = *group.members.get(usize::from(shard.0)).ok_or(RestoreShardError::NotNow)?;
        let len_bytes = shard_len(extent.extent_len, extent.k);
        let blocks = len_bytes / BLOCK_BYTES as u32;
        let read = ShardRead { shard, first_block: 0, blocks, skip_bytes: 0, len_bytes };
        // A late shard may have arrived after all, and a drive that is being emptied may have it.
        let bytes = self.read_shard(extent, read, GetPurpose::Move).await?;
        let note = self.note_of(&topology, extent).await;
        let put = Put { drive, purpose: PutPurpose::Repair, note, bytes };
        self.put_shard(&topology, group, extent, shard, put).await.map_err(|error| {
            tracing::debug!(%drive, %error, "restored shard was not stored");
            match error {
                PutShardError::Void { .. } => RestoreShardError::Gone,
                _ => RestoreShardError::NotNow,
            }
        })?;
        Ok(u64::from(len_bytes))
    }

    /// The note that is stored with the shards of an extent, from the first drive that answers.
    async fn note_of(&self, topology: &Topology, extent: &ExtentRef) -> ShardNote {
        for shard in (0..extent.n).map(ShardIndex) {
            let key = ShardKey { ledger: self.ledger, extent: extent.id, shard };
            let get = GetShard { key, first_block: 0, blocks: 1, purpose: GetPurpose::Move };
            for service in topology.holders(extent.pg, shard).filter_map(|drive| topology.readable(drive)) {
                let answer = tokio::time::timeout(DRIVE_TIMEOUT, service.get(get)).await;
                if let Ok(Ok(ShardBlocks { note: Some(note), .. })) = answer {
                    return note;
                }
            }
        }
        ShardNote::default()
    }

    /// A request to delete shards.
    pub(crate) fn deletion(&self, keys: Vec<ShardKey>) -> DeleteShards {
        DeleteShards { keys, position: self.position(), is_void: false }
    }

    /// Deletes one shard that was stored for an extent that is gone.
    pub(crate) async fn drop_shard(&self, pg: PgId, id: ExtentId, shard: ShardIndex) {
        let topology = self.topology();
        let Some(group) = topology.map.group(pg) else { return };
        let member = group.members.get(usize::from(shard.0));
        let Some(service) = member.and_then(|drive| topology.usable(*drive)) else { return };
        let key = ShardKey { ledger: self.ledger, extent: id, shard };
        if let Err(error) = service.delete(self.deletion(vec![key])).await {
            tracing::warn!(?key, %error, "shard of a deleted extent is left behind");
        }
    }

    /// Deletes an extent that was not and will not be committed, also where its group had its positions before. Shards on
    /// silent drives are found later by comparing inventories.
    async fn discard(&self, pg: PgId, id: ExtentId, n: u8) {
        let topology = self.topology();
        let topology = &topology;
        let holders = (0..n).map(ShardIndex).flat_map(|shard| {
            topology.holders(pg, shard).filter_map(move |drive| Some((shard, topology.readable(drive)?)))
        });
        let deletes = holders.map(|(shard, service)| {
            let key = ShardKey { ledger: self.ledger, extent: id, shard };
            let discard = DeleteShards { is_void: true, ..self.deletion(vec![key]) };
            tokio::time::timeout(DISCARD_TIMEOUT, service.delete(discard))
        });
        join_all(deletes).await;
    }

    /// As [`ExtentIo::discard`], for extents whose commit was refused.
    pub(crate) async fn discard_refused(&self, extents: impl Iterator<Item = ExtentRef>) {
        for extent in extents {
            self.discard(extent.pg, extent.id, extent.n).await;
        }
    }
}

fn pad(data: Bytes, len: usize) -> Bytes {
    if data.len() == len {
        return data;
    }
    let mut padded = BytesMut::with_capacity(len);
    padded.extend_from_slice(&data);
    padded.resize(len, 0);
    padded.freeze()
}
