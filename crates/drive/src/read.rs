//! Reading blocks: on the caller's thread if the page cache has them, else through the drive's thread. Blocks that
//! users read are kept in the page cache; blocks that are moved bypass it and use pooled buffers.
//!
//! A shard may be moved or deleted, and its segment reused, during a read. So bytes are valid only if the index after
//! the read still names the same place in the same generation of its segment, and the drive is not closed.

use std::io::{self, IoSliceMut};
use std::os::fd::BorrowedFd;

use base::checksum::blocks_match;
use bytes::Bytes;
use rustix::io::ReadWriteFlags;
use tokio::sync::oneshot;
use wire::drive::{GetPurpose, GetShard, GetShardError, ShardBlocks};

use crate::buffer::AlignedBuf;
use crate::device::ReadVia;
use crate::drive::Drive;
use crate::engine::{ReadClass, ReadRequest, Request};
use crate::format::BLOCK;
use crate::format::frame::{NOTE_BYTES, decode_note};
use crate::index::Entry;
use crate::sums::BlockId;

/// Most attempts to read a shard that keeps moving. Each move needs a whole segment to be cleaned, so even two are
/// rare.
const ROUNDS_MAX: u32 = 64;

/// The place of a shard at the time of the lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    entry: Entry,
    generation: u64,
}

/// The source of the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReadPath {
    /// The page cache, which keeps the blocks that it has to read.
    PageCache,
    /// The device. Probing the page cache would make the kernel read ahead into it.
    Device,
    /// The device, also for the checksums.
    DeviceOnly,
}

impl ReadPath {
    /// The descriptor for bytes that are not in memory.
    fn via(self) -> ReadVia {
        match self {
            Self::PageCache => ReadVia::Cache,
            Self::Device | Self::DeviceOnly => ReadVia::Direct,
        }
    }
}

/// The source of the bytes, and the class of the caller.
type How = (ReadPath, ReadClass);

/// Why an attempt returned no blocks.
#[derive(Debug)]
enum Miss {
    /// The shard was moved or deleted during the read.
    Moved,
    /// The device could not read the bytes, or they do not match their checksums.
    Bad,
    Ended,
}

impl Drive {
    /// Reads and verifies blocks of a shard.
    pub(crate) async fn read(&self, request: GetShard) -> Result<ShardBlocks, GetShardError> {
        match request.purpose {
            GetPurpose::Read => self.look(request, (ReadPath::PageCache, ReadClass::Foreground)).await,
            GetPurpose::Move => self.look(request, (ReadPath::Device, ReadClass::Background)).await,
        }
    }

    /// Reads and verifies the blocks from the device, past all caches.
    pub(crate) async fn read_device(&self, request: GetShard) -> Result<ShardBlocks, GetShardError> {
        self.look(request, (ReadPath::DeviceOnly, ReadClass::Background)).await
    }

    async fn look(&self, request: GetShard, how: How) -> Result<ShardBlocks, GetShardError> {
        let GetShard { key, first_block, blocks, .. } = request;
        let drive = self.shared.drive;
        if self.shared.has_failed() {
            return Err(GetShardError::Failed { drive });
        }
        let (mut look, class) = how;
        for _ in 0..ROUNDS_MAX {
            let Some(place) = self.place(&request) else {
                return Err(GetShardError::NotFound { drive, key });
            };
            let inside = first_block.checked_add(blocks).is_some_and(|end| end <= place.entry.blocks);
            if blocks == 0 || !inside {
                return Err(GetShardError::OutOfRange { drive, key });
            }
            if place.entry.damaged {
                return Err(GetShardError::Corrupt { drive, key });
            }
            match self.attempt(&request, &place, (look, class)).await {
                Ok(blocks) => return Ok(blocks),
                Err(Miss::Moved) => {}
                Err(Miss::Ended) => return Err(GetShardError::Failed { drive }),
                // The page cache may hold bytes from before the shard was written; the device decides.
                Err(Miss::Bad) if look != ReadPath::DeviceOnly => look = ReadPath::DeviceOnly,
                Err(Miss::Bad) => {
                    self.shared.note_corrupt(key, &place.entry);
                    return Err(GetShardError::Corrupt { drive, key });
                }
            }
        }
        Err(GetShardError::Corrupt { drive, key })
    }

    fn place(&self, request: &GetShard) -> Option<Place> {
        let index = self.shared.index();
        let entry = index.get(&request.key)?;
        Some(Place { entry, generation: index.segment(entry.segment).generation })
    }

    /// Reads from a place, and checks that the shard was still there after the read.
    async fn attempt(&self, request: &GetShard, place: &Place, how: How) -> Result<ShardBlocks, Miss> {
        let read = self.read_place(request, place, how).await;
        if self.shared.is_closed() {
            return Err(Miss::Ended);
        }
        if self.place(request) == Some(*place) { read } else { Err(Miss::Moved) }
    }

    async fn read_place(&self, request: &GetShard, place: &Place, how: How) -> Result<ShardBlocks, Miss> {
        let entry = place.entry;
        let sums_at = entry.sums_at as usize + request.first_block as usize * 4;
        // The note lies in front of all checksums.
        let with_note = request.purpose == GetPurpose::Move;
        let from = if with_note { entry.sums_at as usize - NOTE_BYTES } else { sums_at };
        let end = sums_at + request.blocks as usize * 4;
        let data_offset = self.shared.geometry.offset(entry.segment, entry.block + request.first_block);
        // Start both reads before waiting, in case neither is in memory.
        let data = self.start_read(data_offset, request.blocks, how).await?;
        let header = self.header_bytes(place, from, end, how).await;
        let data = self.finish_read(data).await?;
        let header = header?;
        let checksums: Vec<u32> = header[sums_at - from..]
            .chunks_exact(4)
            .map(|sum| u32::from_le_bytes([sum[0], sum[1], sum[2], sum[3]]))
            .collect();
        let key = request.key;
        if !blocks_match(key.extent, key.shard, request.first_block, &data, &checksums) {
            return Err(Miss::Bad);
        }
        let note = with_note.then(|| decode_note(&header[..NOTE_BYTES]).unwrap_or_default());
        Ok(ShardBlocks { bytes: Bytes::from_owner(data), checksums, note })
    }

    /// The bytes of frame headers from `at` to `to` of a segment, from the cache or the device.
    async fn header_bytes(&self, place: &Place, at: usize, to: usize, how: How) -> Result<Vec<u8>, Miss> {
        let first = (at / BLOCK) as u32;
        let end = to.div_ceil(BLOCK) as u32;
        let id = |block| BlockId { segment: place.entry.segment, generation: place.generation, block };
        let mut bytes = Vec::with_capacity((end - first) as usize * BLOCK);
        if how.0 != ReadPath::DeviceOnly {
            for block in first..end {
                let Some(cached) = self.shared.sums.get(&id(block)) else { break };
                bytes.extend_from_slice(&cached[..]);
            }
        }
        if bytes.len() < (end - first) as usize * BLOCK {
            let offset = self.shared.geometry.offset(place.entry.segment, first);
            let read = self.start_read(offset, end - first, how).await?;
            let read = self.finish_read(read).await?;
            for (block, content) in (first..end).zip(read.chunks_exact(BLOCK)) {
                self.shared.sums.insert(id(block), content);
            }
            bytes = read.to_vec();
        }
        let start = at - first as usize * BLOCK;
        Ok(bytes[start..start + to - at].to_vec())
    }

    async fn start_read(&self, offset: u64, blocks: u32, (look, class): How) -> Result<Started, Miss> {
        let mut buffer = AlignedBuf::any_blocks(blocks);
        if look == ReadPath::PageCache && self.read_without_waiting(&mut buffer, offset) {
            return Ok(Started::Done(buffer));
        }
        let (reply, answer) = oneshot::channel();
        let request = ReadRequest { offset, buffer, via: look.via(), class, reply };
        self.send(Request::Read(request)).await.map_err(|_| Miss::Ended)?;
        Ok(Started::Waiting(answer))
    }

    async fn finish_read(&self, started: Started) -> Result<AlignedBuf, Miss> {
        match started {
            Started::Done(buffer) => Ok(buffer),
            Started::Waiting(answer) => match self.wait(answer).await {
                Some(result) => result.map_err(|_| Miss::Bad),
                None => Err(Miss::Ended),
            },
        }
    }

    /// Fills the buffer from the page cache. Returns whether the whole buffer was there.
    fn read_without_waiting(&self, buffer: &mut AlignedBuf, offset: u64) -> bool {
        let Some(fd) = self.files.cached.as_ref().and_then(|file| file.raw_fd()) else { return false };
        // SAFETY: the descriptor belongs to the file in `self.files`, which stays open while `self` lives.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let len = buffer.len();
        let read = rustix::io::preadv2(fd, &mut [IoSliceMut::new(buffer)], offset, ReadWriteFlags::NOWAIT);
        read == Ok(len)
    }
}

/// A read that may be done already.
enum Started {
    Done(AlignedBuf),
    Waiting(oneshot::Receiver<io::Result<AlignedBuf>>),
}

#[cfg(test)]
mod tests;
