//! The byte format does not change by accident: a small drive that was written once is read, and written again byte for
//! byte.
//!
//! The fixture lists the blocks that are not zero: number as u32, then 4096 bytes. `FOREBAY_WRITE_GOLDEN=1`
//! writes it anew. A changed fixture needs a new format version or a compatible feature bit.

use std::path::{Path, PathBuf};

use crate::common::*;
use base::Ino;
use base::env::sim::Sim;
use base::env::{Env, Files};
use base::units::MIB;
use drive::{FORMAT_VERSION, dump, fsck};
use wire::drive::{DriveService, PutShard, ShardClass, ShardNote};

const CAPACITY: u64 = 17 * MIB;
const PATH: &str = "drive";

fn fixture() -> PathBuf {
    PathBuf::from(format!("tests/golden/drive-v{FORMAT_VERSION}.bin"))
}

/// The image that today's code writes.
fn written() -> Vec<u8> {
    let sim = Sim::new(1);
    format(&sim.env(), Path::new(PATH), CAPACITY);
    let drive = open(&sim.env(), Path::new(PATH)).unwrap();
    block_on(drive.put(put_of(key(1), ShardClass::Small, vec![0x11; 4096]))).unwrap();
    let note = ShardNote { ino: Ino(7), off: 1 << 33, key_version: 5 };
    let bulk = put_of(key(2), ShardClass::Bulk, vec![0x22; 8192]);
    block_on(drive.put(PutShard { note, position: Some(position(1, 6, 8)), ..bulk })).unwrap();
    block_on(drive.put(put_of(key(3), ShardClass::Small, vec![0x33; 4096]))).unwrap();
    block_on(drive.delete(vec![key(1)].into())).unwrap();
    block_on(drive.close()).unwrap();
    sim.files.read(Path::new(PATH)).unwrap()
}

fn pack(image: &[u8]) -> Vec<u8> {
    let blocks =
        image.chunks_exact(4096).enumerate().filter(|(_, block)| block.iter().any(|byte| *byte != 0));
    blocks.flat_map(|(index, block)| [&(index as u32).to_le_bytes(), block].concat()).collect()
}

fn unpack(packed: &[u8]) -> Vec<u8> {
    let mut image = vec![0; CAPACITY as usize];
    for piece in packed.chunks_exact(4100) {
        let at = u32::from_le_bytes(piece[..4].try_into().unwrap()) as usize * 4096;
        image[at..at + 4096].copy_from_slice(&piece[4..]);
    }
    image
}

fn golden() -> Vec<u8> {
    let env = Env::real();
    if std::env::var_os("FOREBAY_WRITE_GOLDEN").is_some() {
        env.files.create_dir_all(fixture().parent().unwrap()).unwrap();
        env.files.write_atomic(&fixture(), &pack(&written())).unwrap();
    }
    env.files.read(&fixture()).unwrap()
}

#[test]
fn the_same_bytes_are_written() {
    let (golden, written) = (golden(), pack(&written()));
    assert_eq!(golden.len(), written.len());
    for (golden, written) in golden.chunks(4100).zip(written.chunks(4100)) {
        let block = u32::from_le_bytes(written[..4].try_into().unwrap());
        assert!(golden == written, "block {block} of the device differs");
    }
}

#[test]
fn the_old_bytes_are_read() {
    let sim = Sim::new(1);
    sim.files.put_image(Path::new(PATH), &unpack(&golden()));
    assert!(fsck(&sim.env(), Path::new(PATH)).unwrap().clean);
    assert_eq!(dump(&sim.env(), Path::new(PATH)).unwrap().segments().count(), 3);
    let drive = open(&sim.env(), Path::new(PATH)).unwrap();
    assert_eq!(drive.stat().uuid, UUID);
    assert!(get(&drive, key(1), 0, 1).is_err());
    assert_eq!(get(&drive, key(2), 0, 2).unwrap().bytes, vec![0x22; 8192]);
    assert_eq!(get(&drive, key(3), 0, 1).unwrap().bytes, vec![0x33; 4096]);
}
