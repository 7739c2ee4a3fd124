//! The stores on disk: damage, loss, full disks and crashes.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use base::env::sim::{Sim, SimRandom};
use base::env::{Files, Random};

use super::mirror::{Copying, Replica};
use super::*;

const CACHE_BYTES: usize = 1 << 20;

fn paths() -> [PathBuf; 2] {
    ["/a/state.redb", "/b/state.redb"].map(PathBuf::from)
}

fn machine(seed: u64) -> Sim {
    let sim = Sim::new(seed);
    for path in paths() {
        sim.env().files.create_dir_all(path.parent().unwrap()).unwrap();
    }
    sim
}

fn open(sim: &Sim, log_first: u64) -> Result<MirroredState, StateError> {
    MirroredState::open(&sim.env(), &paths(), CACHE_BYTES, Seq(log_first), WholeLog::No)
}

fn key(number: u64) -> Vec<u8> {
    format!("key {:05}", number % 700).into_bytes()
}

fn value(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(1 + number as usize % 9)
}

/// Applies batch `seq`, which changes ten keys.
fn apply(state: &dyn State, seq: u64) -> Result<(), StateError> {
    let changes: Vec<_> = (seq * 10..seq * 10 + 10)
        .map(|number| (key(number), (number % 13 > 0).then(|| value(number))))
        .collect();
    let mut changes = changes.iter().map(|(key, value)| (key.as_slice(), value.as_deref()));
    state.apply(&mut changes, Applied { seq: Seq(seq), epoch: Epoch(1) })
}

fn model(up_to: u64) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut model = BTreeMap::new();
    for number in 10..up_to * 10 + 10 {
        if number % 13 > 0 {
            model.insert(key(number), value(number))
        } else {
            model.remove(&key(number))
        };
    }
    model
}

fn content(state: &dyn State) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut all = BTreeMap::new();
    let visited = state.scan(&every_key(), &mut |key, value| {
        all.insert(key.to_vec(), value.to_vec());
        ControlFlow::Continue(())
    });
    visited.unwrap();
    all
}

fn two_replicas(seed: u64, batches: u64) -> Sim {
    let sim = machine(seed);
    let state = open(&sim, 1).unwrap();
    (1..=batches).for_each(|seq| apply(&state, seq).unwrap());
    sim
}

fn healthy(state: &MirroredState) -> Vec<bool> {
    state.replicas().iter().map(|replica| replica.state.is_ok()).collect()
}

#[test]
fn a_flipped_bit_anywhere_is_noticed_and_the_replica_is_made_anew() {
    /// All keys exist, so more pages are in use than after a few batches.
    const BATCHES: u64 = 70;
    let mut noticed = 0;
    for seed in 0..60 {
        let sim = two_replicas(seed, BATCHES);
        let random = SimRandom::new(seed);
        let path = &paths()[(seed % 2) as usize];
        let len = sim.files.read(path).unwrap().len() as u64;
        // Mostly where pages are in use.
        let at = random.next_u64() % if seed % 3 == 0 { len } else { len.min(300_000) };
        for byte in at..(at + 64).min(len) {
            sim.files.flip_bit(path, byte, (random.next_u64() % 8) as u8);
        }
        noticed += u32::from(RedbState::open(&sim.env(), path, CACHE_BYTES).is_err());
        let state = open(&sim, BATCHES + 1).unwrap_or_else(|error| panic!("seed={seed} at={at}: {error}"));
        assert_eq!(healthy(&state), [true, true], "seed={seed} at={at}");
        assert_eq!(state.applied().unwrap().seq, Seq(BATCHES), "seed={seed} at={at}");
        drop(state);
        for path in paths() {
            let state = RedbState::open(&sim.env(), &path, CACHE_BYTES).unwrap();
            assert!(content(&state) == model(BATCHES), "seed={seed} at={at} path={path:?}");
        }
    }
    // Most pages hold data of earlier transactions.
    assert!(noticed > 10, "{noticed}");
}

#[test]
fn a_replica_that_is_missing_is_made_anew() {
    for path in paths() {
        let sim = two_replicas(1, 20);
        sim.files.remove_file(&path).unwrap();
        let state = open(&sim, 20).unwrap();
        assert_eq!(state.applied().unwrap().seq, Seq(20));
        drop(state);
        assert!(content(&RedbState::open(&sim.env(), &path, CACHE_BYTES).unwrap()) == model(20));
    }
}

#[test]
fn without_a_healthy_replica_nothing_is_opened() {
    let sim = two_replicas(1, 20);
    for path in paths() {
        let mut image = sim.files.read(&path).unwrap();
        image.iter_mut().for_each(|byte| *byte ^= 0x55);
        sim.files.put_image(&path, &image);
    }
    assert!(matches!(open(&sim, 20).err(), Some(StateError::Damaged(_))));
    // A complete log makes them anew; the old files are kept.
    let state = MirroredState::open(&sim.env(), &paths(), CACHE_BYTES, Seq(1), WholeLog::Yes).unwrap();
    assert_eq!(state.applied().unwrap().seq, Seq(0));
    let remade = paths().map(|path| Remade { path, from: RemadeFrom::Log });
    assert_eq!(state.remade(), remade);
    (1..=20).for_each(|seq| apply(&state, seq).unwrap());
    drop(state);
    for path in paths() {
        assert!(content(&RedbState::open(&sim.env(), &path, CACHE_BYTES).unwrap()) == model(20));
        assert!(sim.env().files.exists(&path.with_extension("damaged")));
    }
}

#[test]
fn a_whole_log_makes_nothing_anew_while_a_replica_may_only_be_away() {
    let sim = two_replicas(1, 20);
    sim.files.put_image(&paths()[0], &[0x55; 8192]);
    let other = [paths()[0].clone(), PathBuf::from("/away/state.redb")];
    let state = MirroredState::open(&sim.env(), &other, CACHE_BYTES, Seq(1), WholeLog::Yes);
    assert!(state.is_err());
}

#[test]
fn a_replica_that_is_behind_waits_for_the_log_or_is_made_anew() {
    let sim = two_replicas(1, 20);
    let alone = RedbState::open(&sim.env(), &paths()[1], CACHE_BYTES).unwrap();
    (21..=25).for_each(|seq| apply(&alone, seq).unwrap());
    drop(alone);
    // The log still has the missing batches: the owner replays them.
    let state = open(&sim, 21).unwrap();
    assert_eq!((state.applied().unwrap().seq, state.newest().unwrap().seq), (Seq(20), Seq(25)));
    drop(state);
    let state = open(&sim, 22).unwrap();
    assert_eq!((state.applied().unwrap().seq, state.newest().unwrap().seq), (Seq(25), Seq(25)));
    assert!(content(&state) == model(25));
}

#[test]
fn a_replica_whose_disk_fails_is_left_out_and_the_other_goes_on() {
    for failing in 0..8 {
        let sim = two_replicas(1, 5);
        let state = open(&sim, 1).unwrap();
        sim.files.fail_sync_after(failing);
        (6..=12).for_each(|seq| apply(&state, seq).unwrap());
        assert!(content(&state) == model(12), "failing={failing}");
        drop(state);
        sim.files.crash();
        // The log was trimmed up to the position of the healthy replica.
        let state = open(&sim, 13).unwrap();
        assert_eq!(healthy(&state), [true, true]);
        assert!(content(&state) == model(12), "failing={failing}");
    }
}

#[test]
fn making_a_replica_anew_survives_a_crash_at_any_point() {
    for seed in 0..150 {
        let sim = two_replicas(seed, 12);
        sim.files.remove_file(&paths()[0]).unwrap();
        sim.files.cut_power_after(seed % 60);
        drop(open(&sim, 12));
        sim.files.crash();
        let state = open(&sim, 12).unwrap_or_else(|error| panic!("seed={seed}: {error}"));
        assert!(content(&state) == model(12), "seed={seed}");
    }
}

/// Two replicas, of which the one at `lost` is left out because its file went away.
fn one_lost(seed: u64, lost: usize) -> (Sim, MirroredState) {
    let sim = two_replicas(seed, 40);
    let state = open(&sim, 1).unwrap();
    sim.files.remove_file(&paths()[lost]).unwrap();
    state.replicas[lost].lose(&StateError::Failed("gone".to_owned()));
    (sim, state)
}

#[test]
fn a_lost_replica_is_made_anew_while_the_other_goes_on() {
    for lost in 0..2 {
        let (sim, state) = one_lost(1, lost);
        let (mut seq, mut copying) = (40, state.begin_copy(&state.replicas[lost]).unwrap());
        while !copying.step().unwrap() {
            seq += 1;
            apply(&state, seq).unwrap();
        }
        drop(copying);
        assert!(seq > 50, "changes came in between: {seq}");
        assert_eq!(healthy(&state), [true, true]);
        seq += 1;
        apply(&state, seq).unwrap();
        drop(state);
        let anew = RedbState::open(&sim.env(), &paths()[lost], CACHE_BYTES).unwrap();
        assert_eq!(anew.applied().unwrap().seq, Seq(seq));
        assert!(content(&anew) == model(seq), "lost={lost}");
    }
}

#[test]
fn a_file_that_was_removed_is_noticed_and_made_anew() {
    let sim = two_replicas(1, 40);
    let state = open(&sim, 1).unwrap();
    // One of the two, and then both at once: each still has data that the other needs.
    for lost in [&paths()[1..], &paths()[..]] {
        lost.iter().for_each(|path| sim.files.remove_file(path).unwrap());
        assert_eq!(state.rejoin(), 0);
        assert_eq!(healthy(&state), [true, true]);
        for path in paths() {
            assert!(sim.env().files.exists(&path), "{path:?}");
        }
    }
    drop(state);
    for path in paths() {
        assert!(content(&RedbState::open(&sim.env(), &path, CACHE_BYTES).unwrap()) == model(40));
    }
}

#[test]
fn a_replica_whose_disk_fails_again_stays_left_out() {
    for failing in 0..12 {
        let (sim, state) = one_lost(1, 1);
        sim.files.fail_sync_after(failing);
        let (mut seq, mut copying) = (40, state.begin_copy(&state.replicas[1]));
        loop {
            seq += 1;
            // Either the copy fails, or the only remaining replica: then the store fails.
            let applied = apply(&state, seq);
            match copying.as_mut().map(Copying::step) {
                Ok(Ok(false)) if applied.is_ok() => {}
                _ => break,
            }
        }
        drop(copying);
        sim.files.clear_faults();
        if healthy(&state)[0] {
            assert_eq!(state.rejoin(), 0, "failing={failing}");
            apply(&state, seq + 1).unwrap();
            assert_eq!(healthy(&state), [true, true], "failing={failing}");
            let contents = state.replicas.iter().map(|replica| content(&*replica.healthy().unwrap()));
            let contents: Vec<_> = contents.collect();
            assert!(contents[0] == contents[1], "failing={failing}");
        }
    }
}

#[test]
fn making_a_replica_anew_beside_the_other_survives_a_crash_at_any_point() {
    for seed in 0..150 {
        let (sim, state) = one_lost(seed, 0);
        sim.files.cut_power_after(seed % 75);
        let mut seq = 40;
        if let Ok(mut copying) = state.begin_copy(&state.replicas[0]) {
            while let Ok(false) = copying.step() {
                if apply(&state, seq + 1).is_err() {
                    break;
                }
                seq += 1;
            }
        }
        drop(state);
        sim.files.crash();
        let state = open(&sim, 1).unwrap_or_else(|error| panic!("seed={seed}: {error}"));
        let newest = state.newest().unwrap().seq.0;
        assert!((seq..=seq + 1).contains(&newest), "seed={seed}: {newest} {seq}");
        let newest_one = |replica: &&Replica| replica.healthy().unwrap().applied().unwrap().seq.0 == newest;
        let newest_one = state.replicas.iter().find(newest_one).unwrap().healthy().unwrap();
        assert!(content(&*newest_one) == model(newest), "seed={seed}");
    }
}

#[test]
fn a_full_disk_is_no_failure() {
    for room in (0..40).map(|step| step * 50_000) {
        let sim = two_replicas(1, 3);
        let state = open(&sim, 1).unwrap();
        let used: u64 = paths().iter().map(|path| sim.files.read(path).unwrap().len() as u64).sum();
        sim.files.limit_space(used + room);
        let mut seq = 3;
        while seq < 200 {
            match apply(&state, seq + 1) {
                Ok(()) => seq += 1,
                Err(StateError::NoSpace(_)) => break,
                Err(error) => panic!("room={room}: {error}"),
            }
        }
        // Both replicas are readable, and neither has half a batch.
        assert_eq!(healthy(&state), [true, true]);
        assert!(state.applied().unwrap().seq.0 == seq);
        sim.files.clear_faults();
        (seq + 1..=seq + 5).for_each(|seq| apply(&state, seq).unwrap());
        assert!(content(&state) == model(seq + 5), "room={room}");
    }
}

#[test]
fn running_out_of_space_in_the_middle_is_no_failure_either() {
    // The simulated disk reports room until it is used up.
    let dir = Path::new("/a");
    for room in (0..30).map(|step| 4 * 1024 * 1024 + step * 30_000) {
        let sim = machine(1);
        let state = RedbState::open(&sim.env(), &dir.join("state.redb"), CACHE_BYTES).unwrap();
        apply(&state, 1).unwrap();
        sim.files.limit_space(sim.files.read(&dir.join("state.redb")).unwrap().len() as u64 + room);
        let big = vec![7; 6 << 20];
        let mut changes = [(b"big".as_slice(), Some(big.as_slice()))].into_iter();
        let result = state.apply(&mut changes, Applied { seq: Seq(2), epoch: Epoch(1) });
        assert!(matches!(result, Err(StateError::NoSpace(_))), "{result:?}");
        assert!(content(&state) == model(1));
        sim.files.clear_faults();
        apply(&state, 2).unwrap();
        assert!(content(&state) == model(2));
    }
}
