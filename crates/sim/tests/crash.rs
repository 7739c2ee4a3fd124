//! Whatever moment the machine loses power at: what was acknowledged as durable reads back, nothing is torn.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::time::Duration;

use base::env::Random;
use base::env::sim::SimRandom;
use base::{FsError, Ino};
use bytes::Bytes;
use client::{Client, FileKind, MakeNode, OpenIntent};
use sim::Machine;

/// A file whose name says what is in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct File {
    len: usize,
    /// What is known of it after a crash.
    state: Known,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    /// Created, acknowledged; its content may or may not be there.
    Exists,
    /// Its content was acknowledged by fsync.
    Durable,
    /// Removed, acknowledged.
    Gone,
    /// An operation on its name had no answer.
    Unknown,
}

fn content(number: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| ((at * 7 + at / 509 + number * 13) % 254 + 1) as u8).collect()
}

async fn write_one(client: &Client, number: u64, file: &mut File) -> Result<(), FsError> {
    let make = MakeNode {
        parent: Ino::ROOT,
        name: Bytes::from(number.to_string()),
        kind: FileKind::Regular,
        mode: 0o644,
        umask: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        target: Bytes::new(),
        open: OpenIntent::Write,
    };
    let ino = client.make(make).await?.ino;
    file.state = Known::Exists;
    client.write(ino, 0, &content(number, file.len)).await?;
    client.fsync(ino).await?;
    file.state = Known::Durable;
    Ok(())
}

/// Works until the power is cut, or for a while.
async fn work(client: &Client, random: &SimRandom, files: &mut BTreeMap<u64, File>) {
    for _ in 0..12 {
        let removed = files.iter().find(|(_, file)| file.state == Known::Durable).map(|(number, _)| *number);
        if let Some(number) = removed.filter(|_| random.next_u64().is_multiple_of(5)) {
            let file = files.get_mut(&number).unwrap();
            file.state = Known::Unknown;
            if client.unlink(Ino::ROOT, number.to_string().as_bytes()).await.is_err() {
                return;
            }
            file.state = Known::Gone;
            continue;
        }
        let number = files.len() as u64;
        let len = [100, 5_000, 60_000, 500_000, 1_500_000][(random.next_u64() % 5) as usize];
        let file = files.entry(number).or_insert(File { len, state: Known::Unknown });
        if write_one(client, number, file).await.is_err() {
            return;
        }
    }
}

async fn check(client: &Client, files: &mut BTreeMap<u64, File>, seed: u64) {
    for (number, file) in files {
        let found = client.lookup(Ino::ROOT, number.to_string().as_bytes()).await;
        let attr = match (found, file.state) {
            (Ok(attr), Known::Exists | Known::Durable | Known::Unknown) => attr,
            (Err(FsError::NotFound), Known::Gone | Known::Unknown) => {
                file.state = Known::Gone;
                continue;
            }
            (found, state) => panic!("seed={seed} file={number} state={state:?}: {found:?}"),
        };
        let bytes = client.read(attr.ino, 0, file.len + 1).await.unwrap_or_else(|error| {
            panic!("seed={seed} file={number} {file:?}: {error}");
        });
        let expected = content(*number, file.len);
        if file.state == Known::Durable {
            assert!(bytes == expected, "seed={seed} file={number} {file:?}: {} bytes", bytes.len());
        }
        // What was not acknowledged is there in part or not, but it is never something else.
        let sound = bytes.iter().zip(&expected).all(|(byte, wanted)| *byte == *wanted || *byte == 0);
        assert!(sound && bytes.len() <= file.len, "seed={seed} file={number} {file:?}");
        if file.state == Known::Unknown {
            file.state = Known::Exists;
        }
    }
}

/// Returns how many files were durable at the end.
#[track_caller]
fn crash_and_look(profile: &str, seed: u64) -> usize {
    let machine = Machine::new(seed, profile.parse().unwrap()).unwrap();
    let random = SimRandom::new(seed);
    let mut files = BTreeMap::new();
    for _round in 0..4 {
        let node = machine.start().unwrap_or_else(|error| panic!("seed={seed}: {error}"));
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.block_on(async {
            let client = node.client().await.unwrap();
            check(&client, &mut files, seed).await;
            if !random.next_u64().is_multiple_of(4) {
                machine.sim.files.cut_power_after(random.next_u64() % 150);
            }
            let worked =
                tokio::time::timeout(Duration::from_secs(60), work(&client, &random, &mut files)).await;
            worked.unwrap_or_else(|_| panic!("seed={seed}: a request hangs"));
        });
        machine.sim.files.crash();
        runtime.shutdown_background();
        node.stop();
    }
    files.values().filter(|file| file.state == Known::Durable).count()
}

#[test]
fn what_was_synced_on_one_drive_survives() {
    let durable: usize = (0..12).map(|seed| crash_and_look("1+0", seed)).sum();
    assert!(durable > 20, "the crashes come too early to prove anything: {durable}");
}

#[test]
fn what_was_synced_on_erasure_coded_drives_survives() {
    let durable: usize = (100..112).map(|seed| crash_and_look("2+1", seed)).sum();
    assert!(durable > 20, "the crashes come too early to prove anything: {durable}");
}
