//! `blob`: reads a blob without a cluster.

use std::io::{Read, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};
use base::checksum::crc32c;
use base::units::BLOCK_BYTES;
use layout::{BLOB_BYTES_MAX, BLOB_HEADER_BYTES, BlobHeader, BlobIndex, BlobRange, decode_packed_table};
use serde::Serialize;

use super::args::{BlobCommand, RangeName};
use super::output::{bytes, print, table};

/// A blob and its errors.
struct Blob {
    header: BlobHeader,
    index: BlobIndex,
    bytes: Vec<u8>,
}

#[derive(Serialize)]
struct BlobInfo {
    key: String,
    cluster: String,
    ledger: u32,
    filesystem: u32,
    serial: u64,
    term: u64,
    size_bytes: u64,
    data_bytes: u64,
    ranges: Vec<RangeInfo>,
    damaged_ranges: usize,
}

#[derive(Serialize)]
struct RangeInfo {
    index: usize,
    ino: u64,
    map: u64,
    off: u64,
    len: u32,
    blob_off: u64,
    extent: u64,
    layer: u64,
    crc32c: u32,
    intact: bool,
    /// The pieces of several files in it.
    pieces: Vec<PieceInfo>,
}

#[derive(Serialize)]
struct PieceInfo {
    index: usize,
    ino: u64,
    map: u64,
    off: u64,
    len: u32,
    blob_off: u64,
}

pub(super) fn blob(command: BlobCommand) -> Result<()> {
    match command {
        BlobCommand::Dump { file, json } => {
            let info = info(&load(&file)?);
            print(json.into(), &info, text)?;
            if info.damaged_ranges == 0 {
                Ok(())
            } else {
                bail!("{} ranges are damaged", info.damaged_ranges)
            }
        }
        BlobCommand::Cat { file, range: RangeName { range, piece } } => {
            let blob = load(&file)?;
            let Some(found) = blob.index.ranges.get(range) else {
                bail!("no such range: index={range} ranges={}", blob.index.ranges.len());
            };
            let Some(content) = blob.content(found) else { bail!("the blob ends before the range does") };
            if !is_intact(found, content) {
                bail!("the range is damaged: index={range}");
            }
            let content = match piece {
                None => content,
                Some(index) => piece_of(content, index)
                    .with_context(|| format!("no such piece: range={range} index={index}"))?,
            };
            Ok(std::io::stdout().write_all(content)?)
        }
    }
}

impl Blob {
    fn data_off(&self, range: &BlobRange) -> u64 {
        self.header.data_off() as u64 + u64::from(range.block) * BLOCK_BYTES
    }

    fn content(&self, range: &BlobRange) -> Option<&[u8]> {
        let start = self.data_off(range) as usize;
        self.bytes.get(start..start + range.len as usize)
    }
}

fn is_intact(range: &BlobRange, content: &[u8]) -> bool {
    crc32c(content) == range.crc32c
}

/// Loads a blob from a file or standard input.
fn load(file: &Path) -> Result<Blob> {
    let bytes = if file == Path::new("-") {
        let mut bytes = Vec::new();
        let mut input = std::io::stdin().take(u64::from(BLOB_BYTES_MAX) + 1);
        input.read_to_end(&mut bytes).context("reading standard input")?;
        bytes
    } else {
        super::env().files.read(file).with_context(|| format!("cannot read {}", file.display()))?
    };
    let shown = file.display();
    let Some((front, rest)) = bytes.split_at_checked(BLOB_HEADER_BYTES) else {
        bail!("not a blob: {shown} has only {} bytes", bytes.len());
    };
    let header = BlobHeader::decode(front)
        .with_context(|| format!("not a blob, or its header is damaged: {shown}"))?;
    let Some(index) = rest.get(..header.index_bytes()) else {
        bail!("the blob ends inside its index: {shown}");
    };
    let index =
        BlobIndex::decode(&header, index).with_context(|| format!("the index is damaged: {shown}"))?;
    Ok(Blob { header, index, bytes })
}

/// The bytes of one piece in a range that gathers several.
fn piece_of(content: &[u8], index: usize) -> Option<&[u8]> {
    let piece = decode_packed_table(content).get(index).copied()?;
    content.get(piece.extent_off as usize..)?.get(..piece.len as usize)
}

/// The pieces of a range that is intact and gathers several.
fn pieces(blob: &Blob, range: &BlobRange) -> Vec<PieceInfo> {
    let content = blob.content(range).filter(|content| is_intact(range, content)).unwrap_or_default();
    let piece = |(index, piece): (usize, layout::PackedPiece)| PieceInfo {
        index,
        ino: piece.map.file().unwrap_or_default().0,
        map: piece.map.0,
        off: piece.off,
        len: piece.len,
        blob_off: blob.data_off(range) + u64::from(piece.extent_off),
    };
    decode_packed_table(content).into_iter().enumerate().map(piece).collect()
}

fn info(blob: &Blob) -> BlobInfo {
    let header = &blob.header;
    let ranges = blob.index.ranges.iter().enumerate().map(|(index, range)| RangeInfo {
        index,
        ino: range.ino.0,
        map: range.map.0,
        off: range.off,
        len: range.len,
        blob_off: blob.data_off(range),
        extent: range.extent.0,
        layer: range.layer,
        crc32c: range.crc32c,
        intact: blob.content(range).is_some_and(|content| is_intact(range, content)),
        pieces: pieces(blob, range),
    });
    let ranges: Vec<_> = ranges.collect();
    BlobInfo {
        key: header.id.key(header.cluster),
        cluster: header.cluster.to_string(),
        ledger: header.id.ledger.0,
        filesystem: header.filesystem,
        serial: header.id.serial,
        term: header.id.term.0,
        size_bytes: header.blob_bytes() as u64,
        data_bytes: ranges.iter().map(|range| u64::from(range.len)).sum(),
        damaged_ranges: ranges.iter().filter(|range| !range.intact).count(),
        ranges,
    }
}

fn text(info: &BlobInfo) -> String {
    let mut table = table(&["RANGE", "INODE", "MAP", "OFFSET", "LENGTH", "AT", "CRC32C", "STATE"]);
    for range in &info.ranges {
        table.add_row([
            range.index.to_string(),
            range.ino.to_string(),
            range.map.to_string(),
            range.off.to_string(),
            range.len.to_string(),
            range.blob_off.to_string(),
            format!("{:08x}", range.crc32c),
            if range.intact { "intact" } else { "DAMAGED" }.to_owned(),
        ]);
        for piece in &range.pieces {
            table.add_row([
                format!("{}.{}", range.index, piece.index),
                piece.ino.to_string(),
                piece.map.to_string(),
                piece.off.to_string(),
                piece.len.to_string(),
                piece.blob_off.to_string(),
                String::new(),
                "piece".to_owned(),
            ]);
        }
    }
    format!(
        "blob        {}\ncluster     {}\nfilesystem  {}\nsize        {} with {} of data in {} ranges\n\n{table}",
        info.key,
        info.cluster,
        info.filesystem,
        bytes(info.size_bytes),
        bytes(info.data_bytes),
        info.ranges.len(),
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use base::{ClusterId, Epoch, ExtentId, Ino, LedgerId, MapId};
    use layout::{BLOB_BYTES_MIN, BlobBuilder, BlobId, PackedPiece, encode_packed_table};

    fn sample() -> Vec<u8> {
        let mut builder = BlobBuilder::new(BLOB_BYTES_MIN);
        let range = |ino| BlobRange {
            ino: Ino(ino),
            map: MapId(ino),
            off: 0,
            len: 0,
            block: 0,
            extent: ExtentId(ino),
            layer: 0,
            crc32c: 0,
        };
        builder.push(range(5), vec![bytes::Bytes::from_static(b"first")]);
        builder.push(range(6), vec![vec![6; 5000].into()]);
        let piece = |ino, extent_off| PackedPiece {
            map: MapId::first_of(Ino(ino)).unwrap(),
            off: 0,
            extent_off,
            len: 3,
        };
        let table = encode_packed_table(&[piece(8, 0), piece(9, 3)]);
        builder.push(range(0), vec![[b"oneTWO".as_slice(), &table].concat().into()]);
        let id = BlobId { ledger: LedgerId(1), serial: 12, term: Epoch(3) };
        builder.finish(ClusterId([1; 16]), id, 1).parts.concat()
    }

    fn loaded(content: &[u8]) -> Result<Blob> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("blob");
        super::super::env().files.write_atomic(&path, content).unwrap();
        load(&path)
    }

    #[test]
    fn a_blob_tells_what_it_holds_and_what_of_it_is_damaged() {
        let mut content = sample();
        let whole = info(&loaded(&content).unwrap());
        assert_eq!((whole.serial, whole.data_bytes, whole.damaged_ranges), (12, 5005 + 6 + 64, 0));
        assert!(whole.key.ends_with("/d/I_21/3"), "{}", whole.key);
        assert_eq!(
            loaded(&content).unwrap().content(&loaded(&content).unwrap().index.ranges[0]).unwrap(),
            b"first"
        );
        let told: Vec<_> = whole.ranges[2].pieces.iter().map(|piece| (piece.ino, piece.len)).collect();
        assert_eq!(told, [(8, 3), (9, 3)]);
        assert!(text(&whole).contains("2.1"), "{}", text(&whole));
        let blob = loaded(&content).unwrap();
        let packed = blob.content(&blob.index.ranges[2]).unwrap();
        assert_eq!((piece_of(packed, 1), piece_of(packed, 2)), (Some(b"TWO".as_slice()), None));
        *content.last_mut().unwrap() ^= 1;
        let at = whole.ranges[1].blob_off as usize;
        content[at] ^= 1;
        let damaged = info(&loaded(&content).unwrap());
        assert_eq!(damaged.ranges.iter().map(|range| range.intact).collect::<Vec<_>>(), [true, false, true]);
        assert!(text(&damaged).contains("DAMAGED"));
    }

    #[test]
    fn what_is_cut_off_is_said() {
        let content = sample();
        let error = |len: usize| format!("{:#}", loaded(&content[..len]).err().unwrap());
        assert!(error(100).contains("not a blob"));
        assert!(error(5000).contains("inside its index"));
        let cut = info(&loaded(&content[..content.len() - 4096]).unwrap());
        assert_eq!(cut.damaged_ranges, 1);
    }
}
