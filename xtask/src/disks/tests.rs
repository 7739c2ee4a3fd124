//! Tests of the disks: they lose unstable writes only.

use super::command::{Command, Failing, Which};
use super::disk::{Data, Disks, Failed};

const SIZE: u64 = 1 << 20;

fn bytes(value: u8, len: usize) -> Data {
    Data::Bytes(vec![value; len])
}

fn disks(directory: &tempfile::TempDir) -> Disks {
    Disks::open(directory.path(), 2, SIZE).unwrap()
}

#[test]
fn flushed_writes_survive_a_cut_and_others_are_kept_by_sector() {
    let directory = tempfile::tempdir().unwrap();
    let (mut lost, mut kept) = (0, 0);
    for seed in 0..20 {
        let disks = disks(&directory);
        disks.write(0, 0, bytes(1, 8192)).unwrap();
        disks.flush(0).unwrap();
        disks.write(0, 4096, bytes(2, 4096)).unwrap();
        // A flush of another disk has no effect on this one.
        disks.flush(1).unwrap();
        disks.obey(Command::Cut(seed)).unwrap();
        assert_eq!(disks.read(0, 0, 512), Err(Failed));
        disks.obey(Command::On).unwrap();
        let data = disks.read(0, 0, 8192).unwrap();
        assert!(data[..4096].iter().all(|byte| *byte == 1));
        for sector in data[4096..].chunks(512) {
            assert!(sector.iter().all(|byte| *byte == sector[0]), "a sector is torn");
            if sector[0] == 1 { lost += 1 } else { kept += 1 }
        }
    }
    assert!(lost > 20 && kept > 20, "lost={lost} kept={kept}");
}

#[test]
fn failures_are_of_one_kind_on_one_disk() {
    let directory = tempfile::tempdir().unwrap();
    let disks = disks(&directory);
    disks.obey("fail 1 flushes".parse().unwrap()).unwrap();
    assert_eq!(
        (disks.write(1, 0, bytes(1, 1)), disks.flush(1), disks.flush(0)),
        (Ok(()), Err(Failed), Ok(()))
    );
    disks.obey(Command::Fail(Which::All, Failing::Everything)).unwrap();
    assert_eq!((disks.read(0, 0, 1), disks.write(1, 0, bytes(1, 1))), (Err(Failed), Err(Failed)));
    disks.obey("fail all nothing".parse().unwrap()).unwrap();
    assert_eq!(disks.read(1, 0, 1), Ok(vec![1]));
}

#[test]
fn malformed_commands_are_refused() {
    for line in ["", "cut", "cut x", "fail 1", "fail 1 sometimes", "slow 1 x", "on on"] {
        assert!(line.parse::<Command>().is_err(), "{line}");
    }
}

#[test]
fn zeros_may_be_lost_in_a_cut() {
    let directory = tempfile::tempdir().unwrap();
    let mut seen = [false; 2];
    for seed in 0..20 {
        let disks = disks(&directory);
        disks.write(0, 0, bytes(7, 8192)).unwrap();
        disks.flush(0).unwrap();
        disks.write(0, 4096, Data::Zeros(4096)).unwrap();
        assert_eq!(disks.read(0, 4095, 2), Ok(vec![7, 0]));
        disks.obey(Command::Cut(seed)).unwrap();
        disks.obey(Command::On).unwrap();
        let byte = disks.read(0, 4096, 1).unwrap()[0];
        assert_eq!(disks.read(0, 4096, 4096), Ok(vec![byte; 4096]));
        seen[usize::from(byte == 7)] = true;
    }
    assert_eq!(seen, [true, true]);
}
