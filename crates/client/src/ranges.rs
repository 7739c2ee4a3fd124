//! Ranges of files: reserve, punch, zero, find data, share.

use base::units::BLOCK_BYTES;
use base::{FsError, Ino};
use wire::meta::{FILE_BYTES_MAX, MapPiece, MetaReply, MetaRequest, SetAttr};

use crate::Client;
use crate::node::Node;

/// Longest range that one clone request takes.
pub(crate) const CLONE_BYTES: u64 = 1 << 30;
/// How often a copy is tried again because the source became shorter.
const CLONE_ATTEMPTS: u32 = 16;

/// Modes of `fallocate`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AllocateMode {
    /// Ensure that there is room for writes into the range, and extend the file over it.
    Extend,
    /// As `Extend`, without extending the file.
    KeepSize,
    /// Make the range a hole.
    Punch,
    /// Make the range zeros, extending the file over it.
    Zero,
    /// As `Zero`, without extending the file.
    ZeroKeepSize,
}

/// Targets of `lseek`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SeekKind {
    /// The next block that has stored bytes.
    Data,
    /// The next block that has none, or the end of the file.
    Hole,
}

impl Client {
    /// Reserves, punches or zeroes a range.
    pub async fn allocate(&self, ino: Ino, off: u64, len: u64, mode: AllocateMode) -> Result<(), FsError> {
        let end = off.checked_add(len).filter(|end| *end <= FILE_BYTES_MAX).ok_or(FsError::TooLarge)?;
        let size = self.getattr(ino).await?.size;
        match mode {
            AllocateMode::Extend | AllocateMode::KeepSize => {
                // No block is overwritten in place, so none can be reserved: only room is checked.
                let free_bytes = self.statfs().await?.free_bytes;
                if len > free_bytes && len - self.stored_in(ino, off, end).await? > free_bytes {
                    return Err(FsError::NoSpace);
                }
            }
            AllocateMode::Punch | AllocateMode::Zero | AllocateMode::ZeroKeepSize => {
                self.punch(ino, off, end).await?;
            }
        }
        let extend = matches!(mode, AllocateMode::Extend | AllocateMode::Zero);
        if extend && end > size {
            self.setattr(ino, SetAttr { size: Some(end), ..SetAttr::default() }).await?;
        }
        Ok(())
    }

    /// Bytes in `[from, to)` that are stored.
    async fn stored_in(&self, ino: Ino, from: u64, to: u64) -> Result<u64, FsError> {
        let node = self.inner.nodes.get(ino);
        self.flush(&node).await?;
        let (mut at, mut stored) = (from, 0);
        while let Some(piece) = self.data_after(&node, at, to).await? {
            let end = piece.end().min(to);
            stored += end - piece.off.max(at);
            at = end;
        }
        Ok(stored)
    }

    async fn punch(&self, ino: Ino, off: u64, end: u64) -> Result<(), FsError> {
        let node = self.inner.nodes.get(ino);
        let _flush = node.flush.lock().await;
        let _remapping = self.remap(&node, || true).await?;
        let mut from = off;
        while from < end {
            let request = MetaRequest::Punch { ino, off: from, len: end - from };
            let MetaReply::Punched { attr, next_off } = self.call(request).await? else {
                return Err(FsError::Io);
            };
            let mut state = node.lock();
            state.map.remove(from, next_off);
            state.dirty.remapped();
            state.learn(attr);
            if next_off <= from {
                return Err(FsError::Io);
            }
            from = next_off;
        }
        Ok(())
    }

    /// The offset of the next data or hole at or after `off`, in blocks: a block with any data is data, so holes are
    /// whole blocks. The end of the file is a hole.
    ///
    /// # Errors
    /// `NoAttribute`, which POSIX calls ENXIO, if `off` is beyond the end or no data follows.
    pub async fn seek(&self, ino: Ino, off: u64, kind: SeekKind) -> Result<u64, FsError> {
        let node = self.inner.nodes.get(ino);
        self.flush(&node).await?;
        let size = self.getattr(ino).await?.size;
        if off >= size {
            return Err(FsError::NoAttribute);
        }
        let mut block = block_of(off);
        while block < size {
            let found = match (self.data_after(&node, block, size).await?, kind) {
                (Some(piece), SeekKind::Data) => Some(block_of(piece.off.max(block))),
                (None, SeekKind::Data) => return Err(FsError::NoAttribute),
                (Some(piece), SeekKind::Hole) if piece.off < block + BLOCK_BYTES => {
                    block = piece.end().next_multiple_of(BLOCK_BYTES);
                    None
                }
                (_, SeekKind::Hole) => Some(block),
            };
            if let Some(found) = found {
                return Ok(found.max(off));
            }
        }
        Ok(size)
    }

    /// The first piece with bytes in `[from, size)`.
    async fn data_after(&self, node: &Node, from: u64, size: u64) -> Result<Option<MapPiece>, FsError> {
        let mut at = from;
        while at < size {
            let (known_end, generation, piece) = {
                let state = node.lock();
                let end = state.map.known_end(at);
                (end, state.map.generation(), state.map.pieces(at, end).into_iter().next())
            };
            match piece {
                Some(piece) => return Ok(Some(piece).filter(|piece| piece.off < size)),
                None if known_end <= at => self.fetch_map(node, at, generation).await?,
                None => at = known_end,
            }
        }
        Ok(None)
    }

    /// Makes a range of `to` share the bytes of a range of `from`. Returns the number of bytes, fewer than `len` at the
    /// end of `from`.
    pub async fn copy_range(&self, from: (Ino, u64), to: (Ino, u64), len: u64) -> Result<u64, FsError> {
        let source = self.inner.nodes.get(from.0);
        let target = self.inner.nodes.get(to.0);
        // Two flush locks are taken in the order of inodes, so that two copies never wait for each other.
        let (first, second) = if from.0 <= to.0 { (&source, &target) } else { (&target, &source) };
        let _first = first.flush.lock().await;
        let _second = if from.0 == to.0 { None } else { Some(second.flush.lock().await) };
        for attempt in 1.. {
            self.flush_locked(&source).await?;
            let _remapping = self.remap(&target, || true).await?;
            let size = self.getattr(from.0).await?.size;
            let len = len.min(size.saturating_sub(from.1)).min(CLONE_BYTES);
            if len == 0 {
                return Ok(0);
            }
            if from.0 == to.0 && from.1 < to.1 + len && to.1 < from.1 + len {
                return Err(FsError::Invalid);
            }
            let request =
                MetaRequest::CloneRange { from: from.0, from_off: from.1, to: to.0, to_off: to.1, len };
            let asked = self.asking();
            match self.call(request).await {
                Ok(reply) => {
                    let mut state = target.lock();
                    state.map.forget();
                    state.dirty.remapped();
                    drop(state);
                    self.learned(to.0, reply, asked)?;
                    return Ok(len);
                }
                // Another client has made the source shorter in the meantime.
                Err(FsError::Invalid) if attempt < CLONE_ATTEMPTS => {}
                Err(error) => return Err(error),
            }
        }
        Err(FsError::Io)
    }
}

/// Where the block of a byte begins.
fn block_of(off: u64) -> u64 {
    off - off % BLOCK_BYTES
}
