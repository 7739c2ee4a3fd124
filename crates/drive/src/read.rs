//! Reading blocks: from the page cache on the caller's thread if they are there, else through the drive's
//! thread. What users read is kept in the page cache; what is moved comes past it into buffers that are used again.
//!
//! A shard may be moved or deleted, and its segment reused, while it is read. So bytes count only if the
//! index still names the same place in the same generation of its segment after the read.

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

/// Attempts to read a shard that is moved each time. Each needs a whole segment cleaned, so two are rare.
const ROUNDS_MAX: u32 = 64;

/// Where a shard lay when it was looked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    entry: Entry,
    generation: u64,
}

/// Where blocks are looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Look {
    /// In the page cache, which keeps what it has to read.
    PageCache,
    /// On the device. A look at what the page cache has would make the kernel read ahead into it.
    Device,
    /// On the device, and the checksums, too.
    DeviceOnly,
}

impl Look {
    /// The descriptor for what is not in memory.
    fn via(self) -> ReadVia {
        match self {
            Self::PageCache => ReadVia::Cache,
            Self::Device | Self::DeviceOnly => ReadVia::Direct,
        }
    }
}

/// Where, and for whom.
type How = (Look, ReadClass);

/// Why an attempt gave nothing.
#[derive(Debug)]
enum Miss {
    /// The shard was moved or deleted meanwhile.
    Moved,
    /// The device could not read it, or it does not match.
    Bad,
    Ended,
}

impl Drive {
    /// Reads and verifies blocks of a shard.
    pub(crate) async fn read(&self, request: GetShard) -> Result<ShardBlocks, GetShardError> {
        match request.purpose {
            GetPurpose::Read => self.look(request, (Look::PageCache, ReadClass::Foreground)).await,
            GetPurpose::Move => self.look(request, (Look::Device, ReadClass::Background)).await,
        }
    }

    /// The same as the device has them now.
    pub(crate) async fn read_device(&self, request: GetShard) -> Result<ShardBlocks, GetShardError> {
        self.look(request, (Look::DeviceOnly, ReadClass::Background)).await
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
                // The page cache may hold what was there before the shard; the device decides.
                Err(Miss::Bad) if look != Look::DeviceOnly => look = Look::DeviceOnly,
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

    /// Reads a place, and says whether the shard still was there when it had been read.
    async fn attempt(&self, request: &GetShard, place: &Place, how: How) -> Result<ShardBlocks, Miss> {
        let read = self.read_place(request, place, how).await;
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
        // Both reads are under way at the same time if neither is in memory.
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
        if how.0 != Look::DeviceOnly {
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
        if look == Look::PageCache && self.read_without_waiting(&mut buffer, offset) {
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

    /// Whether the whole buffer was in the page cache and is filled now.
    fn read_without_waiting(&self, buffer: &mut AlignedBuf, offset: u64) -> bool {
        let Some(fd) = self.files.cached.as_ref().and_then(|file| file.raw_fd()) else { return false };
        // SAFETY: the descriptor belongs to the file in `self.files`, which stays open while `self` lives.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let len = buffer.len();
        let read = rustix::io::preadv2(fd, &mut [IoSliceMut::new(buffer)], offset, ReadWriteFlags::NOWAIT);
        read == Ok(len)
    }
}

/// A read that may have ended already.
enum Started {
    Done(AlignedBuf),
    Waiting(oneshot::Receiver<io::Result<AlignedBuf>>),
}

#[cfg(test)]
mod tests;
