//! Extents on drives: encode, place and write; read, verify and reconstruct.
//!
//! An extent is written once under an id of its own. A retry after a failure takes a new id and another
//! placement group, so that an id never stands for two contents.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use base::checksum::{block_checksums, blocks_match};
use base::env::Env;
use base::units::BLOCK_BYTES;
use base::{ExtentId, FsError, LedgerId, ShardIndex};
use bytes::{Bytes, BytesMut};
use futures_util::future::join_all;
use layout::{ErasureCode, PlacementGroup, Profile, ShardRead, read_plan, shard_len};
use tokio::sync::watch;
use wire::drive::{
    DriveService, GetShard, GetShardError, PutPurpose, PutShard, PutShardError, ShardClass, ShardKey,
    ShardShape,
};
use wire::meta::{ExtentRef, OwedShard};

use crate::topology::Topology;

/// How often a write is tried on other placement groups.
const WRITE_ATTEMPTS: u32 = 4;
/// A drive that has not answered by then is gone on without, if enough others have.
const DRIVE_TIMEOUT: Duration = Duration::from_secs(20);

/// How the bytes of an extent are protected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protection {
    /// m + 1 copies: for small pieces, which the packer gathers later.
    Copies,
    /// k data and m parity shards.
    Coded,
}

/// An extent that is durable and may be committed.
#[derive(Debug, Clone)]
pub(crate) struct WrittenExtent {
    pub(crate) extent: ExtentRef,
    pub(crate) owed: Vec<OwedShard>,
}

/// Why bytes of an extent could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadExtentError {
    /// Its shards are deleted: the map that named it is old.
    Gone,
    /// Fewer than k shards can be read.
    Unreadable,
}

/// Reads and writes extents of one ledger.
pub(crate) struct ExtentIo {
    env: Env,
    ledger: LedgerId,
    profile: Profile,
    topology: watch::Receiver<Arc<Topology>>,
    codes: Mutex<HashMap<(u8, u8), Arc<ErasureCode>>>,
}

/// One extent's shards on the way to drives.
struct Stripe {
    profile: Profile,
    class: ShardClass,
    extent_len: u32,
    shards: Vec<Bytes>,
}

impl ExtentIo {
    pub(crate) fn new(
        env: Env,
        ledger: LedgerId,
        profile: Profile,
        topology: watch::Receiver<Arc<Topology>>,
    ) -> Self {
        Self { env, ledger, profile, topology, codes: Mutex::new(HashMap::new()) }
    }

    pub(crate) fn topology(&self) -> Arc<Topology> {
        self.topology.borrow().clone()
    }

    fn code(&self, k: u8, n: u8) -> Arc<ErasureCode> {
        let mut codes = self.codes.lock().expect("no holder of this lock panics");
        let build = || Arc::new(ErasureCode::new(k, n - k).expect("shapes are checked where they enter"));
        codes.entry((k, n)).or_insert_with(build).clone()
    }

    /// How extents written with this protection are spread.
    fn shape(&self, protection: Protection) -> Profile {
        let full = self.profile;
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
        protection: Protection,
        mut next_id: impl FnMut() -> F,
    ) -> Result<WrittenExtent, FsError>
    where
        F: Future<Output = Result<ExtentId, FsError>>,
    {
        let stripe = self.encode(data, protection);
        let mut error = FsError::Io;
        for attempt in 0..WRITE_ATTEMPTS {
            let topology = self.topology();
            let n = usize::from(stripe.profile.n());
            let Some(group) = topology.choose(self.env.random.next_u64(), n) else {
                tracing::error!("no placement group to write to");
                return Err(FsError::Io);
            };
            let id = next_id().await?;
            match self.put_all(&topology, group, id, &stripe).await {
                Ok(written) => return Ok(written),
                Err(failed) => {
                    tracing::warn!(%id, pg = %group.id, attempt, %failed, "extent not written, trying elsewhere");
                    // No commit will ever name this id, so what did get written is garbage.
                    self.discard(group, id, stripe.profile.n()).await;
                    error = failed;
                }
            }
        }
        Err(error)
    }

    fn encode(&self, data: Bytes, protection: Protection) -> Stripe {
        let profile = self.shape(protection);
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
        let class = match protection {
            Protection::Copies => ShardClass::Small,
            Protection::Coded => ShardClass::Bulk,
        };
        Stripe { profile, class, extent_len, shards }
    }

    /// Succeeds if at least w shards are durable; says which are owed.
    async fn put_all(
        &self,
        topology: &Topology,
        group: &PlacementGroup,
        id: ExtentId,
        stripe: &Stripe,
    ) -> Result<WrittenExtent, FsError> {
        let profile = stripe.profile;
        let puts =
            (0u8..).zip(&stripe.shards).zip(&group.members).map(|((index, bytes), drive)| async move {
                let shard = ShardIndex(index);
                let Some(service) = topology.usable(*drive) else {
                    return Err(PutShardError::Failed { drive: *drive });
                };
                let request = PutShard {
                    key: ShardKey { ledger: self.ledger, extent: id, shard },
                    shape: ShardShape {
                        pg: group.id,
                        k: profile.k(),
                        m: profile.m(),
                        extent_len: stripe.extent_len,
                    },
                    class: stripe.class,
                    purpose: PutPurpose::Write,
                    pg_epoch: group.epoch,
                    checksums: block_checksums(id, shard, 0, bytes),
                    bytes: bytes.clone(),
                };
                let late = Err(PutShardError::Failed { drive: *drive });
                tokio::time::timeout(DRIVE_TIMEOUT, put_patiently(service, request)).await.unwrap_or(late)
            });
        let results = join_all(puts).await;
        let mut owed = Vec::new();
        let mut full = false;
        for ((index, result), drive) in (0u8..).zip(&results).zip(&group.members) {
            let Err(error) = result else { continue };
            full |= matches!(error, PutShardError::NoSpace { .. });
            owed.push(OwedShard { shard: ShardIndex(index), drive: *drive });
        }
        if results.len() - owed.len() < usize::from(profile.w()) {
            return Err(if full { FsError::NoSpace } else { FsError::Io });
        }
        let (k, n) = (profile.k(), profile.n());
        let extent = ExtentRef { id, pg: group.id, k, n, extent_len: stripe.extent_len, extent_off: 0 };
        Ok(WrittenExtent { extent, owed })
    }

    /// Deletes an extent that was never committed and never will be. What a silent drive keeps of it is found by
    /// comparing inventories.
    async fn discard(&self, group: &PlacementGroup, id: ExtentId, n: u8) {
        let topology = self.topology();
        let deletes = (0..n).zip(&group.members).filter_map(|(shard, drive)| {
            let service = topology.usable(*drive)?.clone();
            let key = ShardKey { ledger: self.ledger, extent: id, shard: ShardIndex(shard) };
            Some(async move { service.delete(vec![key]).await })
        });
        join_all(deletes).await;
    }

    /// As [`ExtentIo::discard`], for extents whose commit was refused.
    pub(crate) async fn discard_refused(&self, extents: impl Iterator<Item = ExtentRef>) {
        let topology = self.topology();
        for extent in extents {
            if let Some(group) = topology.map.group(extent.pg) {
                self.discard(group, extent.id, extent.n).await;
            }
        }
    }

    /// Reads `out.len()` bytes of an extent, from `off` on.
    pub(crate) async fn read_into(
        &self,
        extent: &ExtentRef,
        off: u32,
        out: &mut [u8],
    ) -> Result<(), ReadExtentError> {
        let len = u32::try_from(out.len()).expect("a piece is at most 16 MiB");
        let mut rest = out;
        let mut parts = Vec::new();
        for read in read_plan(extent.extent_len, extent.k, off, len) {
            let (part, later) = rest.split_at_mut(read.len_bytes as usize);
            rest = later;
            parts.push(async move {
                let bytes = self.read_shard(extent, read).await?;
                part.copy_from_slice(&bytes);
                Ok(())
            });
        }
        join_all(parts).await.into_iter().collect()
    }

    /// Reads bytes that lie on one drive without copying them; `None` if they lie on several.
    pub(crate) async fn read_one(
        &self,
        extent: &ExtentRef,
        off: u32,
        len: u32,
    ) -> Option<Result<Bytes, ReadExtentError>> {
        let mut plan = read_plan(extent.extent_len, extent.k, off, len);
        let read = plan.next()?;
        if plan.next().is_some() {
            return None;
        }
        Some(self.read_shard(extent, read).await)
    }

    async fn read_shard(&self, extent: &ExtentRef, read: ShardRead) -> Result<Bytes, ReadExtentError> {
        let start = read.skip_bytes as usize;
        let wanted = start..start + read.len_bytes as usize;
        let blocks = match self.get_blocks(extent, read.shard, read).await {
            Ok(blocks) => blocks,
            Err(error) => self.recover_blocks(extent, read, error).await?,
        };
        Ok(blocks.slice(wanted))
    }

    /// Blocks of one shard from its drive, verified.
    async fn get_blocks(
        &self,
        extent: &ExtentRef,
        shard: ShardIndex,
        read: ShardRead,
    ) -> Result<Bytes, Lack> {
        let topology = self.topology();
        let group = topology.map.group(extent.pg).ok_or(Lack::Unavailable)?;
        let drive = *group.members.get(usize::from(shard.0)).ok_or(Lack::Unavailable)?;
        let service = topology.usable(drive).ok_or(Lack::Unavailable)?;
        let key = ShardKey { ledger: self.ledger, extent: extent.id, shard };
        let request = GetShard { key, first_block: read.first_block, blocks: read.blocks };
        let answer = tokio::time::timeout(DRIVE_TIMEOUT, service.get(request)).await;
        match answer.map_err(|_| Lack::Unavailable)? {
            Ok(blocks) => {
                let whole = blocks.bytes.len() as u64 == u64::from(read.blocks) * BLOCK_BYTES;
                if whole && blocks_match(extent.id, shard, read.first_block, &blocks.bytes, &blocks.checksums)
                {
                    Ok(blocks.bytes)
                } else {
                    tracing::error!(%drive, ?key, "drive returned blocks that do not match their checksums");
                    Err(Lack::Unavailable)
                }
            }
            Err(GetShardError::NotFound { .. }) => Err(Lack::NotFound),
            Err(error) => {
                tracing::warn!(%drive, ?key, %error, "shard cannot be read, using others");
                Err(Lack::Unavailable)
            }
        }
    }

    /// The same blocks from k other shards.
    async fn recover_blocks(
        &self,
        extent: &ExtentRef,
        read: ShardRead,
        first: Lack,
    ) -> Result<Bytes, ReadExtentError> {
        let mut missing = usize::from(first == Lack::NotFound);
        let mut present: Vec<(ShardIndex, Bytes)> = Vec::new();
        let mut candidates = (0..extent.n).map(ShardIndex).filter(|shard| *shard != read.shard);
        let k = usize::from(extent.k);
        while present.len() < k {
            let wave: Vec<ShardIndex> = candidates.by_ref().take(k - present.len()).collect();
            if wave.is_empty() {
                break;
            }
            let gets = wave.iter().map(|shard| self.get_blocks(extent, *shard, read));
            for (shard, got) in wave.iter().zip(join_all(gets).await) {
                match got {
                    Ok(bytes) => present.push((*shard, bytes)),
                    Err(lack) => missing += usize::from(lack == Lack::NotFound),
                }
            }
        }
        if present.len() < k {
            // If more shards say "deleted" than could be owed, the whole extent was.
            let deleted = missing > usize::from(extent.n - extent.k);
            let error = if deleted { ReadExtentError::Gone } else { ReadExtentError::Unreadable };
            if !deleted {
                tracing::error!(extent = %extent.id, pg = %extent.pg, present = present.len(), k, "extent cannot be read");
            }
            return Err(error);
        }
        if k == 1 {
            return Ok(present.remove(0).1);
        }
        let mut out = vec![0u8; present[0].1.len()];
        let sources: Vec<(ShardIndex, &[u8])> =
            present.iter().map(|(shard, bytes)| (*shard, bytes.as_ref())).collect();
        let code = self.code(extent.k, extent.n);
        match code.reconstruct(&sources, &mut [(read.shard, &mut out)]) {
            Ok(()) => Ok(Bytes::from(out)),
            Err(error) => {
                tracing::error!(extent = %extent.id, %error, "extent cannot be reconstructed");
                Err(ReadExtentError::Unreadable)
            }
        }
    }
}

/// Puts a shard, coming again as long as the drive says that it is busy.
async fn put_patiently(service: &Arc<dyn DriveService>, request: PutShard) -> Result<(), PutShardError> {
    loop {
        match service.put(request.clone()).await {
            Err(PutShardError::Busy { retry_after_ms, .. }) => {
                tokio::time::sleep(Duration::from_millis(u64::from(retry_after_ms))).await;
            }
            other => return other,
        }
    }
}

/// Why a shard's blocks are not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lack {
    NotFound,
    Unavailable,
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
