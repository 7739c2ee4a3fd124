use super::*;

fn file(sim: &Sim, name: &str) -> Arc<dyn File> {
    sim.files.open(Path::new(name), OpenMode::Create, Caching::Buffered).unwrap()
}

#[test]
fn synced_bytes_survive_every_crash_and_unsynced_ones_only_some() {
    let (mut kept, mut lost, mut torn) = (0, 0, 0);
    for seed in 0..200 {
        let sim = Sim::new(seed);
        let old = file(&sim, "d/f");
        old.write_at(&[1; 4096], 0).unwrap();
        old.sync_data().unwrap();
        sim.files.sync_dir(Path::new("d")).unwrap();
        old.write_at(&[2; 4096], 0).unwrap();
        sim.files.crash();
        assert!(old.len().is_err(), "handles die");
        let bytes = sim.files.read(Path::new("d/f")).unwrap();
        match bytes.iter().filter(|byte| **byte == 2).count() {
            0 => lost += 1,
            4096 => kept += 1,
            _ => torn += 1,
        }
        assert!(bytes.chunks(512).all(|sector| sector.iter().all(|byte| *byte == sector[0])));
    }
    assert!(kept > 20 && lost > 20 && torn > 20, "{kept} {lost} {torn}");
}

#[test]
fn a_failed_sync_leaves_the_bytes_in_doubt_for_ever() {
    let mut lost = 0;
    for seed in 0..100 {
        let sim = Sim::new(seed);
        let file = file(&sim, "f");
        sim.files.sync_dir(Path::new("")).unwrap();
        file.set_len(512).unwrap();
        file.sync_data().unwrap();
        sim.files.fail_sync_after(0);
        file.write_at(&[7; 512], 0).unwrap();
        assert!(file.sync_data().is_err());
        file.sync_data().unwrap();
        let mut bytes = [0; 512];
        file.read_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, [7; 512], "the cache shows them");
        sim.files.crash();
        lost += usize::from(sim.files.read(Path::new("f")).unwrap() != [7; 512]);
    }
    assert!((10..90).contains(&lost), "{lost}");
}

#[test]
fn an_unsynced_rename_may_be_lost_but_never_half_done() {
    let (mut old, mut new) = (0, 0);
    for seed in 0..100 {
        let sim = Sim::new(seed);
        sim.files.write_atomic(Path::new("f"), b"old").unwrap();
        let staged = file(&sim, "f.new");
        staged.write_at(b"new", 0).unwrap();
        staged.sync_data().unwrap();
        sim.files.rename(Path::new("f.new"), Path::new("f")).unwrap();
        sim.files.crash();
        match &sim.files.read(Path::new("f")).unwrap()[..] {
            b"old" => old += 1,
            b"new" => new += 1,
            other => panic!("{other:?}"),
        }
    }
    assert!(old > 10 && new > 10, "{old} {new}");
}

#[test]
fn an_atomic_write_survives_every_crash() {
    for seed in 0..100 {
        let sim = Sim::new(seed);
        sim.files.write_atomic(Path::new("f"), b"long content").unwrap();
        sim.files.write_atomic(Path::new("f"), b"short").unwrap();
        sim.files.crash();
        assert_eq!(sim.files.read(Path::new("f")).unwrap(), b"short");
    }
}

#[test]
fn faults_happen_as_requested() {
    let sim = Sim::new(1);
    let one = file(&sim, "f");
    sim.files.fail_write_after(1);
    one.write_at(b"a", 0).unwrap();
    assert!(one.write_at(b"b", 0).is_err());
    sim.files.break_range(Path::new("f"), 0..1);
    assert!(one.read_at(&mut [0], 0).is_err());
    sim.files.clear_faults();
    sim.files.limit_space(10);
    assert_eq!(one.write_at(&[0; 11], 0).unwrap_err().kind(), io::ErrorKind::StorageFull);
    sim.files.flip_bit(Path::new("f"), 0, 1);
    sim.files.cut_power_after(1);
    one.sync_data().unwrap();
    assert!(one.sync_data().is_err() && one.len().is_err());
    sim.files.crash();
    assert!(one.len().is_err());
}

#[test]
fn locks_exclude_and_end_with_the_handle_or_the_crash() {
    let sim = Sim::new(1);
    let (first, second) = (file(&sim, "f"), file(&sim, "f"));
    sim.files.sync_dir(Path::new("")).unwrap();
    first.try_lock().unwrap();
    assert_eq!(second.try_lock().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    drop(first);
    second.try_lock().unwrap();
    sim.files.crash();
    file(&sim, "f").try_lock().unwrap();
}

#[test]
fn direct_files_demand_alignment() {
    let sim = Sim::new(1);
    let direct = sim.files.open(Path::new("f"), OpenMode::Create, Caching::Direct).unwrap();
    assert_eq!(direct.write_at(&[0; 100], 0).unwrap_err().kind(), io::ErrorKind::InvalidInput);
}

#[test]
fn the_same_seed_gives_the_same_numbers() {
    let draw = |seed| Sim::new(seed).random.next_u64();
    assert_eq!(draw(5), draw(5));
    assert_ne!(draw(5), draw(6));
}
