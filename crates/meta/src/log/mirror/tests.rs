//! Copies that fail, vanish, return and rot.

use std::collections::BTreeSet;
use std::os::fd::RawFd;

use base::env::sim::{Sim, SimRandom};
use base::env::{Caching, Files, OpenMode, Random};

use super::super::conformance::{SIZES, append, check_entries, now};
use super::*;

/// A simulated disk whose directories can be cut off.
#[derive(Clone)]
struct Disks {
    files: Arc<dyn Files>,
    dead: Arc<Mutex<BTreeSet<PathBuf>>>,
}

impl Disks {
    fn check(&self, path: &Path) -> std::io::Result<()> {
        let dead = self.dead.lock().unwrap().iter().any(|dir| path.starts_with(dir));
        if dead { Err(std::io::Error::other("simulated: disk is gone")) } else { Ok(()) }
    }
}

struct OnDisk {
    disks: Disks,
    path: PathBuf,
    file: Arc<dyn File>,
}

impl Files for Disks {
    fn open(&self, path: &Path, mode: OpenMode, caching: Caching) -> std::io::Result<Arc<dyn File>> {
        self.check(path)?;
        let file = self.files.open(path, mode, caching)?;
        Ok(Arc::new(OnDisk { disks: self.clone(), path: path.to_owned(), file }))
    }
    fn create_dir_all(&self, path: &Path) -> std::io::Result<()> {
        self.check(path).and_then(|()| self.files.create_dir_all(path))
    }
    fn list(&self, path: &Path) -> std::io::Result<Vec<PathBuf>> {
        self.check(path).and_then(|()| self.files.list(path))
    }
    fn rename(&self, from: &Path, to: &Path) -> std::io::Result<()> {
        self.check(from).and_then(|()| self.files.rename(from, to))
    }
    fn remove_file(&self, path: &Path) -> std::io::Result<()> {
        self.check(path).and_then(|()| self.files.remove_file(path))
    }
    fn sync_dir(&self, path: &Path) -> std::io::Result<()> {
        self.check(path).and_then(|()| self.files.sync_dir(path))
    }
    fn exists(&self, path: &Path) -> bool {
        self.check(path).is_ok() && self.files.exists(path)
    }
    fn free_bytes(&self, path: &Path) -> std::io::Result<u64> {
        self.check(path).and_then(|()| self.files.free_bytes(path))
    }
}

impl OnDisk {
    fn alive(&self) -> std::io::Result<&dyn File> {
        self.disks.check(&self.path).map(|()| &*self.file)
    }
}

impl File for OnDisk {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        self.alive()?.read_at(buffer, offset)
    }
    fn write_at(&self, bytes: &[u8], offset: u64) -> std::io::Result<()> {
        self.alive()?.write_at(bytes, offset)
    }
    fn sync_data(&self) -> std::io::Result<()> {
        self.alive()?.sync_data()
    }
    fn len(&self) -> std::io::Result<u64> {
        self.alive()?.len()
    }
    fn set_len(&self, len_bytes: u64) -> std::io::Result<()> {
        self.alive()?.set_len(len_bytes)
    }
    fn allocate(&self, len_bytes: u64) -> std::io::Result<()> {
        self.alive()?.allocate(len_bytes)
    }
    fn punch(&self, offset: u64, len_bytes: u64) -> std::io::Result<()> {
        self.alive()?.punch(offset, len_bytes)
    }
    fn try_lock(&self) -> std::io::Result<()> {
        self.alive()?.try_lock()
    }
    fn unlock(&self) -> std::io::Result<()> {
        self.alive()?.unlock()
    }
    fn raw_fd(&self) -> Option<RawFd> {
        None
    }
}

struct Machine {
    sim: Sim,
    disks: Disks,
    dirs: Vec<PathBuf>,
}

impl Machine {
    fn new(seed: u64, copies: usize) -> Self {
        let sim = Sim::new(seed);
        let disks = Disks { files: sim.files.clone(), dead: Arc::default() };
        let dirs: Vec<PathBuf> =
            ["/a", "/b", "/c"][..copies].iter().map(|disk| Path::new(disk).join("ledger/log")).collect();
        for dir in &dirs {
            sim.files.create_dir_all(dir.parent().unwrap()).unwrap();
        }
        Self { sim, disks, dirs }
    }

    fn env(&self) -> Env {
        Env { files: Arc::new(self.disks.clone()), ..self.sim.env() }
    }

    fn open(&self, stale: StaleCopies) -> Result<MirroredLog, LogError> {
        let options = MirrorOptions { io: CopyIo::Inline, stale, sizes: SIZES };
        MirroredLog::open(&self.env(), &self.dirs, options)
    }

    fn kill(&self, disk: &str) {
        self.disks.dead.lock().unwrap().insert(PathBuf::from(disk));
    }

    fn revive(&self, disk: &str) {
        self.disks.dead.lock().unwrap().remove(Path::new(disk));
    }

    /// The only log file of a copy.
    fn file(&self, copy: usize) -> PathBuf {
        let files = self.sim.files.list(&self.dirs[copy]).unwrap();
        files.into_iter().filter(|path| path.extension().is_some_and(|end| end == "log")).min().unwrap()
    }
}

fn in_sync(log: &MirroredLog) -> Vec<bool> {
    log.copies().iter().map(|copy| copy.state == CopyState::InSync).collect()
}

/// Two copies with entries 1 to 5.
fn two_copies() -> (Machine, MirroredLog) {
    let machine = Machine::new(1, 2);
    let log = machine.open(StaleCopies::Refuse).unwrap();
    now(log.seal(Epoch(1), 0)).unwrap();
    (1..=5).for_each(|seq| append(&log, 1, seq..=seq).unwrap());
    assert_eq!(in_sync(&log), [true, true]);
    (machine, log)
}

#[test]
fn either_copy_alone_has_everything_if_both_were_complete() {
    for disk in ["/a", "/b"] {
        let (machine, log) = two_copies();
        drop(log);
        machine.kill(disk);
        assert!(matches!(machine.open(StaleCopies::Refuse).err(), Some(LogError::Stale(_))));
        let log = machine.open(StaleCopies::Use).unwrap();
        check_entries(&log, 1, 5);
        now(log.seal(Epoch(2), 0)).unwrap();
        append(&log, 2, 6..=6).unwrap();
        drop(log);
        // The copy that was given up is made anew, never the other one.
        machine.revive(disk);
        let log = machine.open(StaleCopies::Refuse).unwrap();
        assert_eq!(in_sync(&log), [true, true]);
        check_entries(&log, 1, 6);
    }
}

#[test]
fn a_copy_that_fails_is_left_out_and_made_anew_when_it_works_again() {
    for disk in ["/a", "/b"] {
        let (machine, log) = two_copies();
        machine.kill(disk);
        append(&log, 1, 6..=6).unwrap();
        assert_eq!(in_sync(&log), [disk != "/a", disk != "/b"]);
        assert_eq!(log.rejoin(), 1);
        append(&log, 1, 7..=20).unwrap();
        machine.revive(disk);
        assert_eq!(log.rejoin(), 0);
        append(&log, 1, 21..=21).unwrap();
        drop(log);
        machine.kill(if disk == "/a" { "/b" } else { "/a" });
        check_entries(&machine.open(StaleCopies::Use).unwrap(), 1, 21);
    }
}

#[test]
fn a_copy_that_was_left_out_is_never_taken_for_current() {
    for disk in ["/a", "/b"] {
        let (machine, log) = two_copies();
        machine.kill(disk);
        append(&log, 1, 6..=6).unwrap();
        drop(log);
        machine.revive(disk);
        let other = if disk == "/a" { "/b" } else { "/a" };
        machine.kill(other);
        assert!(matches!(machine.open(StaleCopies::Refuse).err(), Some(LogError::Stale(_))));
        machine.revive(other);
        let log = machine.open(StaleCopies::Refuse).unwrap();
        check_entries(&log, 1, 6);
        assert_eq!(in_sync(&log), [true, true]);
    }
}

#[test]
fn damage_in_one_copy_is_repaired_from_the_other() {
    for copy in 0..2 {
        for bit in (0..2000).step_by(37) {
            let (machine, log) = two_copies();
            drop(log);
            machine.sim.files.flip_bit(&machine.file(copy), bit / 8, (bit % 8) as u8);
            let log = machine.open(StaleCopies::Refuse).unwrap();
            check_entries(&log, 1, 5);
            assert_eq!(in_sync(&log), [true, true], "copy={copy} bit={bit}");
            drop(log);
            machine.kill(["/b", "/a"][copy]);
            check_entries(&machine.open(StaleCopies::Use).unwrap(), 1, 5);
        }
    }
}

#[test]
fn a_copy_whose_record_is_damaged_does_not_count() {
    let (machine, log) = two_copies();
    drop(log);
    let members = machine.dirs[1].join("members");
    let bytes = vec![0xff; machine.sim.files.read(&members).unwrap().len()];
    machine.sim.files.put_image(&members, &bytes);
    assert!(matches!(machine.open(StaleCopies::Refuse).err(), Some(LogError::Stale(_))));
    let log = machine.open(StaleCopies::Use).unwrap();
    check_entries(&log, 1, 5);
    assert_eq!(in_sync(&log), [true, true]);
}

#[test]
fn a_directory_with_another_log_is_left_alone() {
    let (machine, log) = two_copies();
    drop(log);
    let mut other = Machine::new(1, 1);
    other.sim = machine.sim.clone();
    other.disks = machine.disks.clone();
    other.dirs = vec![PathBuf::from("/c/ledger/log")];
    machine.sim.files.create_dir_all(Path::new("/c/ledger")).unwrap();
    let log = other.open(StaleCopies::Refuse).unwrap();
    now(log.seal(Epoch(1), 0)).unwrap();
    drop(log);
    let all = Machine { dirs: [machine.dirs.clone(), other.dirs.clone()].concat(), ..machine };
    assert!(matches!(all.open(StaleCopies::Refuse).err(), Some(LogError::Damaged(_))));
    let log = Machine { dirs: all.dirs[..2].to_vec(), ..all }.open(StaleCopies::Refuse).unwrap();
    assert!(log.add(&other.dirs[0]).unwrap_err().contains("belongs to another log"));
    assert_eq!(in_sync(&log), [true, true]);
}

#[test]
fn a_log_from_before_there_were_copies_gets_one_and_can_lose_it_again() {
    let machine = Machine::new(1, 2);
    let log = FileLog::open(&machine.env(), &machine.dirs[0]).unwrap();
    now(LedgerLog::seal(&log, Epoch(1), 0)).unwrap();
    append(&log, 1, 1..=3).unwrap();
    drop(log);
    let log = machine.open(StaleCopies::Refuse).unwrap();
    assert_eq!(in_sync(&log), [true, true]);
    check_entries(&log, 1, 3);
    log.remove(&machine.dirs[0]).unwrap();
    assert!(log.remove(&machine.dirs[1]).is_err());
    now(log.seal(Epoch(2), 0)).unwrap();
    append(&log, 2, 4..=4).unwrap();
    drop(log);
    let rest = Machine { dirs: machine.dirs[1..].to_vec(), ..machine };
    check_entries(&rest.open(StaleCopies::Refuse).unwrap(), 1, 4);
}

#[test]
fn a_disk_that_is_not_mounted_is_not_taken_for_a_new_one() {
    let machine = Machine::new(1, 2);
    machine.kill("/b");
    assert!(matches!(machine.open(StaleCopies::Refuse).err(), Some(LogError::Stale(_))));
}

struct Model {
    acknowledged: u64,
    attempted: u64,
    epoch: u64,
    /// The complete copies after the last acknowledgement.
    complete: Vec<bool>,
}

/// Works for a while with disks that fail and return.
fn work(machine: &Machine, log: &MirroredLog, random: &SimRandom, model: &mut Model) {
    for _ in 0..random.next_u64() % 25 {
        let disk = ["/a", "/b", "/c"][(random.next_u64() % 3) as usize];
        match random.next_u64() % 12 {
            0 => machine.kill(disk),
            1 | 2 => machine.revive(disk),
            3 | 4 => drop(log.rejoin()),
            5 => match now(log.seal(Epoch(model.epoch + 1), 0)) {
                Ok(tail) => {
                    model.epoch += 1;
                    assert_eq!(tail.seq.0, model.acknowledged);
                }
                Err(_) => return,
            },
            6 if random.next_u64().is_multiple_of(3) => {
                machine.sim.files.fail_sync_after(random.next_u64() % 8)
            }
            7 if random.next_u64().is_multiple_of(8) => {
                machine.sim.files.cut_power_after(random.next_u64() % 20)
            }
            _ => {
                let last = model.acknowledged + 1 + random.next_u64() % 3;
                model.attempted = model.attempted.max(last);
                if append(log, model.epoch, model.acknowledged + 1..=last).is_err() {
                    return;
                }
                model.acknowledged = last;
            }
        }
        model.complete = in_sync(log);
    }
}

/// Opens with the disks that are there. Returns `None` if the refusal was right.
fn reopen(machine: &Machine, random: &SimRandom, model: &Model, seed: u64) -> Option<MirroredLog> {
    let alive = |disk: &str| !machine.disks.dead.lock().unwrap().contains(Path::new(disk));
    let alive: Vec<bool> = ["/a", "/b", "/c"].map(alive)[..machine.dirs.len()].to_vec();
    match machine.open(StaleCopies::Refuse) {
        Ok(log) => Some(log),
        Err(error) => {
            assert!(alive.contains(&false), "seed={seed}: {error}");
            let survivor = alive.iter().zip(&model.complete).any(|(alive, complete)| *alive && *complete);
            if !survivor || !random.next_u64().is_multiple_of(2) {
                ["/a", "/b", "/c"].iter().for_each(|disk| machine.revive(disk));
                return None;
            }
            // With one complete copy no entry is lost.
            Some(machine.open(StaleCopies::Use).unwrap_or_else(|error| panic!("seed={seed}: {error}")))
        }
    }
}

#[test]
fn nothing_acknowledged_is_lost_while_one_complete_copy_survives() {
    let mut refused = 0;
    for seed in 0..3000 {
        let machine = Machine::new(seed, 2 + (seed % 2) as usize);
        let random = SimRandom::new(seed ^ 0xd15c);
        let mut model =
            Model { acknowledged: 0, attempted: 0, epoch: 0, complete: vec![true; machine.dirs.len()] };
        for round in 0..8 {
            let Some(log) = reopen(&machine, &random, &model, seed) else {
                refused += 1;
                continue;
            };
            let epoch = now(log.fence()).unwrap().epoch.0;
            let sealed = now(log.seal(Epoch(epoch + 1), 0));
            let tail = sealed.unwrap_or_else(|error| panic!("seed={seed} round={round}: {error}")).seq.0;
            let allowed = model.acknowledged..=model.attempted.max(model.acknowledged);
            assert!(allowed.contains(&tail), "seed={seed} round={round}: tail={tail} allowed={allowed:?}");
            check_entries(&log, 1, tail);
            model = Model { acknowledged: tail, attempted: tail, epoch: epoch + 1, complete: in_sync(&log) };
            work(&machine, &log, &random, &mut model);
            drop(log);
            match random.next_u64() % 3 {
                0 => machine.sim.files.clear_faults(),
                _ => machine.sim.files.crash(),
            }
        }
    }
    assert!(refused > 100, "{refused}");
}
