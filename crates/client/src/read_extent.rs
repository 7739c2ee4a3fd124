//! Reading extents: verify, ask other drives when one is late, reconstruct missing blocks.

use std::sync::Arc;
use std::time::Duration;

use base::checksum::blocks_match;
use base::units::BLOCK_BYTES;
use base::{DriveId, ShardIndex};
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt;
use futures_util::future::{Either, join_all, select};
use futures_util::stream::FuturesUnordered;
use layout::{ShardRead, read_plan};
use wire::BoxFuture;
use wire::drive::{DriveService, GetPurpose, GetShard, GetShardError, ShardKey};
use wire::meta::ExtentRef;

use crate::damage::{Flaw, Probe};
use crate::extents::{DRIVE_TIMEOUT, ExtentIo, ReadExtentError};
use crate::latency::RequestKind;
use crate::topology::Topology;

/// For moving data: the time after which other drives are asked for blocks that a drive has not delivered.
const MOVE_PATIENCE: Duration = Duration::from_secs(1);

/// Why a drive did not deliver blocks of a shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ShardFault {
    NotFound,
    Damaged,
    Unavailable,
}

/// How many shards cannot deliver the wanted blocks, by reason.
#[derive(Debug, Clone, Copy, Default)]
struct ShardFaults {
    not_found: usize,
    damaged: usize,
}

impl ShardFaults {
    fn with(self, fault: ShardFault) -> Self {
        Self {
            not_found: self.not_found + usize::from(fault == ShardFault::NotFound),
            damaged: self.damaged + usize::from(fault == ShardFault::Damaged),
        }
    }
}

/// The error for an extent whose shards have these faults.
fn unreadable(extent: &ExtentRef, faults: ShardFaults) -> ReadExtentError {
    let missing = faults.not_found;
    // If more shards are missing than could be owed, the whole extent was deleted.
    if missing > usize::from(extent.n - extent.k) {
        return ReadExtentError::Gone;
    }
    if missing > 0 {
        tracing::debug!(extent = %extent.id, pg = %extent.pg, missing, "extent cannot be read, or was deleted");
        return ReadExtentError::Doubtful;
    }
    tracing::error!(extent = %extent.id, pg = %extent.pg, "extent cannot be read");
    ReadExtentError::Unreadable
}

impl ExtentIo {
    /// Reads `out.len()` bytes of an extent, from `off` on.
    pub(crate) async fn read_into(
        &self,
        extent: &ExtentRef,
        off: u32,
        out: &mut [u8],
        purpose: GetPurpose,
    ) -> Result<(), ReadExtentError> {
        let len = u32::try_from(out.len()).expect("a piece is at most 16 MiB");
        let mut rest = out;
        let mut parts = Vec::new();
        for read in self.reads(extent, off, len) {
            let (part, later) = rest.split_at_mut(read.len_bytes as usize);
            rest = later;
            parts.push(async move {
                let bytes = self.read_shard(extent, read, purpose).await?;
                part.copy_from_slice(&bytes);
                Ok(())
            });
        }
        join_all(parts).await.into_iter().collect()
    }

    /// Reads `len` bytes of an extent, from `off` on, without copying them: the bytes of each drive, in order. For a
    /// whole extent, all but the last part are whole blocks.
    pub(crate) async fn read_parts(
        &self,
        extent: &ExtentRef,
        off: u32,
        len: u32,
        purpose: GetPurpose,
    ) -> Result<Vec<Bytes>, ReadExtentError> {
        let mut reads = self.reads(extent, off, len);
        if reads.len() == 1
            && let Some(read) = reads.next()
        {
            return Ok(vec![self.read_shard(extent, read, purpose).await?]);
        }
        join_all(reads.map(|read| self.read_shard(extent, read, purpose))).await.into_iter().collect()
    }

    /// The shards to read for `len` bytes of an extent, from `off` on.
    fn reads(&self, extent: &ExtentRef, off: u32, len: u32) -> impl ExactSizeIterator<Item = ShardRead> {
        let copy = (extent.k == 1 && extent.n > 1).then(|| self.copy_to_read(extent)).flatten();
        let reads = read_plan(extent.extent_len, extent.k, off, len);
        reads.map(move |read| ShardRead { shard: copy.unwrap_or(read.shard), ..read })
    }

    /// Of an extent that is copies: the nearest one, and of several the one whose drive has the fewest reads under way. On other nodes,
    /// each client begins with another one. `None` if there is no group, or no copy can be read.
    fn copy_to_read(&self, extent: &ExtentRef) -> Option<ShardIndex> {
        let topology = self.topology();
        let (group, now_ns) = (topology.map.group(extent.pg)?, self.env.clock.boot_ns());
        let is_fit = |(index, drive): &(u8, &DriveId)| {
            let has_it = topology.readable(**drive).is_some() && !group.is_rebuilding(*index);
            has_it && !self.latencies.is_slow(**drive, now_ns)
        };
        let copies = (0u8..).zip(&group.members).take(extent.n.into()).filter(is_fit);
        let cost = |(index, drive): &(u8, &DriveId)| {
            let distance = topology.near.distance(&topology.map, **drive);
            let turn = if distance == 0 { 0 } else { self.turn() };
            let place = (u64::from(*index) + turn) % u64::from(extent.n);
            (distance, self.latencies.reads_under_way(**drive), place)
        };
        copies.min_by_key(cost).map(|(index, _)| ShardIndex(index))
    }

    /// Reads the wanted bytes of one shard.
    pub(crate) async fn read_shard(
        &self,
        extent: &ExtentRef,
        read: ShardRead,
        purpose: GetPurpose,
    ) -> Result<Bytes, ReadExtentError> {
        let start = read.skip_bytes as usize;
        let wanted = start..start + read.len_bytes as usize;
        loop {
            let (losses, topology) = (self.reach.losses(), self.topology());
            match self.read_blocks(extent, read, purpose).await {
                Ok(blocks) => return Ok(blocks.slice(wanted)),
                Err(_) if self.reach.was_away(losses).await => {}
                Err(faults)
                    if purpose == GetPurpose::Read && self.may_return(extent, faults, &topology).await => {}
                Err(faults) => return Err(unreadable(extent, faults)),
            }
        }
    }

    /// Whether an extent that was not read may be readable now, because a machine with some of its shards is back. One that may have
    /// been deleted is not waited for: a fresh map tells.
    async fn may_return(&self, extent: &ExtentRef, faults: ShardFaults, topology: &Arc<Topology>) -> bool {
        match topology.map.group(extent.pg) {
            Some(group) if faults.not_found == 0 => self.drives_returned(topology, group).await,
            _ => false,
        }
    }

    /// Reads blocks of one shard. If damage keeps all of them from coming from the same shards, they are read in
    /// halves, down to single blocks: then damage to other blocks of other shards does not matter.
    fn read_blocks<'a>(
        &'a self,
        extent: &'a ExtentRef,
        read: ShardRead,
        purpose: GetPurpose,
    ) -> BoxFuture<'a, Result<Bytes, ShardFaults>> {
        Box::pin(async move {
            match self.read_together(extent, read, purpose).await {
                Err(faults) if faults.damaged > 0 && read.blocks > 1 => {}
                done => return done,
            }
            let mut joined = BytesMut::with_capacity(read.blocks as usize * BLOCK_BYTES as usize);
            let half = read.blocks / 2;
            for (first, blocks) in [(0, half), (half, read.blocks - half)] {
                let (first_block, len_bytes) = (read.first_block + first, blocks * BLOCK_BYTES as u32);
                let part = ShardRead { shard: read.shard, first_block, blocks, skip_bytes: 0, len_bytes };
                joined.extend_from_slice(&self.read_blocks(extent, part, purpose).await?);
            }
            Ok(joined.freeze())
        })
    }

    /// Reads blocks of one shard, all from its drive or all from the same other shards. If its drive is late, others
    /// are asked as well, and the first answer is taken.
    async fn read_together(
        &self,
        extent: &ExtentRef,
        read: ShardRead,
        purpose: GetPurpose,
    ) -> Result<Bytes, ShardFaults> {
        let direct = self.get_blocks(extent, read.shard, read, purpose);
        tokio::pin!(direct);
        let patience = self.patience(purpose);
        match tokio::time::timeout(patience, &mut direct).await {
            Ok(Ok(blocks)) => Ok(blocks),
            Ok(Err(fault)) => {
                let recovered = self.recover_blocks(extent, read, purpose).await;
                let blocks = recovered.map_err(|faults| faults.with(fault))?;
                if fault == ShardFault::NotFound {
                    self.peers.0.damage.note(extent, read.shard, Flaw::Missing);
                }
                Ok(blocks)
            }
            Err(_) => {
                let others = self.recover_blocks(extent, read, purpose);
                tokio::pin!(others);
                match select(direct, others).await {
                    Either::Left((Ok(blocks), _)) => Ok(blocks),
                    Either::Left((Err(fault), others)) => others.await.map_err(|faults| faults.with(fault)),
                    Either::Right((Ok(blocks), _)) => {
                        if purpose == GetPurpose::Read {
                            self.note_late(extent, read.shard);
                        }
                        Ok(blocks)
                    }
                    Either::Right((Err(faults), direct)) => direct.await.map_err(|fault| faults.with(fault)),
                }
            }
        }
    }

    /// The time without an answer after which other drives are asked.
    fn patience(&self, purpose: GetPurpose) -> Duration {
        match purpose {
            GetPurpose::Read => self.latencies.read_patience(),
            // Such a read waits for reads of users, so its time says nothing about the drive.
            GetPurpose::Move => MOVE_PATIENCE,
        }
    }

    /// Notes that the drive of a shard was so late that others answered in its place.
    fn note_late(&self, extent: &ExtentRef, shard: ShardIndex) {
        let now = self.env.clock.boot_ns();
        let waited_ns = self.latencies.read_patience().as_nanos() as u64;
        if let Some(drive) = self.topology().holders(extent.pg, shard).next() {
            self.latencies.gave_up(drive, RequestKind::Read, waited_ns, now);
        }
    }

    /// Blocks of one shard from a drive that holds it, verified.
    async fn get_blocks(
        &self,
        extent: &ExtentRef,
        shard: ShardIndex,
        read: ShardRead,
        purpose: GetPurpose,
    ) -> Result<Bytes, ShardFault> {
        let topology = self.topology();
        let mut fault = ShardFault::Unavailable;
        for drive in topology.holders(extent.pg, shard) {
            let Some(service) = topology.readable(drive) else { continue };
            match self.get_from(drive, &**service, extent, (shard, read, purpose)).await {
                Ok(bytes) => return Ok(bytes),
                Err(error) => fault = error,
            }
            if fault == ShardFault::Damaged {
                self.peers.0.damage.note(extent, shard, Flaw::Damaged);
            }
        }
        Err(fault)
    }

    /// Probes a whole shard on a drive.
    pub(crate) async fn probe_drive(
        &self,
        drive: DriveId,
        service: &dyn DriveService,
        extent: &ExtentRef,
        read: ShardRead,
    ) -> Probe {
        match self.get_from(drive, service, extent, (read.shard, read, GetPurpose::Move)).await {
            Ok(_) => Probe::Whole,
            Err(ShardFault::Damaged) => Probe::Damaged,
            Err(ShardFault::NotFound) => Probe::Missing,
            Err(ShardFault::Unavailable) => Probe::Silent,
        }
    }

    async fn get_from(
        &self,
        drive: DriveId,
        service: &dyn DriveService,
        extent: &ExtentRef,
        (shard, read, purpose): (ShardIndex, ShardRead, GetPurpose),
    ) -> Result<Bytes, ShardFault> {
        let key = ShardKey { ledger: self.ledger, extent: extent.id, shard };
        let request = GetShard { key, first_block: read.first_block, blocks: read.blocks, purpose };
        let started_ns = self.env.clock.boot_ns();
        let under_way = self.latencies.reads_from(drive);
        let answer = tokio::time::timeout(DRIVE_TIMEOUT, service.get(request)).await;
        drop(under_way);
        if purpose == GetPurpose::Read {
            let now = self.env.clock.boot_ns();
            self.latencies.answered(drive, RequestKind::Read, now.saturating_sub(started_ns), now);
        }
        match answer.map_err(|_| ShardFault::Unavailable)? {
            Ok(blocks) => {
                let whole = blocks.bytes.len() as u64 == u64::from(read.blocks) * BLOCK_BYTES;
                if whole && blocks_match(extent.id, shard, read.first_block, &blocks.bytes, &blocks.checksums)
                {
                    Ok(blocks.bytes)
                } else {
                    tracing::error!(%drive, ?key, "drive returned blocks that do not match their checksums");
                    Err(ShardFault::Damaged)
                }
            }
            Err(GetShardError::NotFound { .. }) => Err(ShardFault::NotFound),
            Err(GetShardError::Corrupt { .. }) => {
                tracing::error!(%drive, ?key, "shard is damaged, using others");
                Err(ShardFault::Damaged)
            }
            Err(error) => {
                tracing::warn!(%drive, ?key, %error, "shard cannot be read, using others");
                Err(ShardFault::Unavailable)
            }
        }
    }

    /// Recovers the same blocks from k other shards: asks k, and another one for each that fails or is late. The error
    /// tells the faults of the others.
    async fn recover_blocks(
        &self,
        extent: &ExtentRef,
        read: ShardRead,
        purpose: GetPurpose,
    ) -> Result<Bytes, ShardFaults> {
        let mut faults = ShardFaults::default();
        let mut present: Vec<(ShardIndex, Bytes)> = Vec::new();
        let k = usize::from(extent.k);
        let mut others: Vec<ShardIndex> =
            (0..extent.n).map(ShardIndex).filter(|shard| *shard != read.shard).collect();
        // Slow drives come last; shards are taken from the end.
        let topology = self.topology();
        let now_ns = self.env.clock.boot_ns();
        let slow = |shard: &ShardIndex| {
            let holder = topology.holders(extent.pg, *shard).next();
            holder.is_some_and(|drive| self.latencies.is_slow(drive, now_ns))
        };
        others.sort_by_key(|shard| (slow(shard), *shard));
        others.reverse();
        let get = |shard| async move { (shard, self.get_blocks(extent, shard, read, purpose).await) };
        let mut gets: FuturesUnordered<_> = (0..k).filter_map(|_| others.pop()).map(get).collect();
        while present.len() < k && !gets.is_empty() {
            let patience = tokio::time::sleep(self.patience(purpose));
            tokio::select! {
                biased;
                Some((shard, got)) = gets.next() => match got {
                    Ok(bytes) => present.push((shard, bytes)),
                    Err(fault) => {
                        faults = faults.with(fault);
                        gets.extend(others.pop().map(get));
                    }
                },
                () = patience, if !others.is_empty() => gets.extend(others.pop().map(get)),
            }
        }
        if present.len() < k {
            return Err(faults);
        }
        self.reconstruct(extent, read.shard, present).ok_or(faults)
    }

    fn reconstruct(
        &self,
        extent: &ExtentRef,
        shard: ShardIndex,
        mut present: Vec<(ShardIndex, Bytes)>,
    ) -> Option<Bytes> {
        if extent.k == 1 {
            return Some(present.remove(0).1);
        }
        let mut out = vec![0u8; present[0].1.len()];
        let sources: Vec<(ShardIndex, &[u8])> =
            present.iter().map(|(shard, bytes)| (*shard, bytes.as_ref())).collect();
        let code = self.code(extent.k, extent.n);
        match code.reconstruct(&sources, &mut [(shard, &mut out)]) {
            Ok(()) => Some(Bytes::from(out)),
            Err(error) => {
                tracing::error!(extent = %extent.id, %error, "extent cannot be reconstructed");
                None
            }
        }
    }
}
