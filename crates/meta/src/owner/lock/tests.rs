use proptest::prelude::*;

use super::*;

const INO: Ino = Ino(5);
/// The number of bytes in a file of the model.
const BYTES: u64 = 12;

fn lock(owner: u64, exclusive: bool, start: u64, last: u64) -> FileLock {
    FileLock { ino: INO, owner, space: LockSpace::Range, exclusive, start, last, pid: 0 }
}

fn session(number: u64) -> SessionId {
    SessionId(number)
}

fn granted(events: &mut Events) -> Vec<(u64, u64)> {
    let granted = events.drain(..).filter_map(|(session, event)| match event {
        OwnerEvent::LockGranted { ticket } => Some((session.0, ticket)),
        _ => None,
    });
    granted.collect()
}

#[test]
fn locks_conflict_as_in_posix() {
    let (mut table, mut events) = (LockTable::default(), Events::new());
    assert_eq!(table.lock(session(1), lock(1, true, 0, 9), None, &mut events), Ok(Locking::Granted));
    assert_eq!(table.lock(session(2), lock(1, false, 9, 9), None, &mut events), Err(FsError::WouldBlock));
    assert_eq!(table.lock(session(2), lock(1, false, 10, 99), None, &mut events), Ok(Locking::Granted));
    // The holder may do what it likes with its own range.
    assert_eq!(table.lock(session(1), lock(1, false, 3, 5), None, &mut events), Ok(Locking::Granted));
    assert_eq!(table.lock(session(2), lock(1, false, 4, 4), None, &mut events), Ok(Locking::Granted));
    assert_eq!(table.test(session(2), &lock(1, true, 0, u64::MAX)), Some(lock(1, true, 0, 2)));
    table.unlock(session(1), lock(1, false, 0, u64::MAX), &mut events);
    assert_eq!(table.test(session(2), &lock(1, true, 0, u64::MAX)), None);
    // flock(2) and fcntl(2) do not see each other.
    let whole = FileLock { space: LockSpace::Whole, ..lock(1, true, 0, u64::MAX) };
    assert_eq!(table.lock(session(3), whole, None, &mut events), Ok(Locking::Granted));
    assert_eq!(table.lock(session(1), lock(2, true, 5, 4), None, &mut events), Err(FsError::Invalid));
}

#[test]
fn waiting_requests_are_granted_in_order() {
    let (mut table, mut events) = (LockTable::default(), Events::new());
    table.lock(session(1), lock(1, false, 0, 9), None, &mut events).unwrap();
    assert_eq!(table.lock(session(2), lock(1, true, 0, 9), Some(7), &mut events), Ok(Locking::Queued));
    assert_eq!(
        table.lock(session(2), lock(1, true, 0, 9), Some(7), &mut events),
        Ok(Locking::Queued),
        "a repetition"
    );
    // A reader that comes later does not overtake the writer.
    assert_eq!(table.lock(session(3), lock(1, false, 5, 5), Some(8), &mut events), Ok(Locking::Queued));
    assert_eq!(table.lock(session(3), lock(2, false, 20, 20), Some(9), &mut events), Ok(Locking::Granted));
    table.unlock(session(1), lock(1, false, 0, 5), &mut events);
    assert_eq!(granted(&mut events), []);
    table.unlock(session(1), lock(1, false, 6, 9), &mut events);
    assert_eq!(granted(&mut events), [(2, 7)]);
    table.unlock(session(2), lock(1, false, 0, 9), &mut events);
    assert_eq!(granted(&mut events), [(3, 8)]);
    table.unlock(session(3), lock(1, false, 0, 99), &mut events);
    table.unlock(session(3), lock(2, false, 0, 99), &mut events);
    assert!(table.files.is_empty() && table.awaited.is_empty() && table.sessions.is_empty());
}

#[test]
fn a_granted_request_that_weakens_a_lock_wakes_requests_ahead_of_it() {
    let (mut table, mut events) = (LockTable::default(), Events::new());
    table.lock(session(1), lock(1, true, 0, 0), None, &mut events).unwrap();
    table.lock(session(3), lock(3, true, 1, 1), None, &mut events).unwrap();
    // The second waits for the first byte, and the first, which has that, for the second byte.
    let ahead = table.lock(session(2), lock(2, false, 0, 0), Some(5), &mut events);
    let behind = table.lock(session(1), lock(1, false, 0, 1), Some(6), &mut events);
    assert_eq!((ahead, behind), (Ok(Locking::Queued), Ok(Locking::Queued)));
    table.unlock(session(3), lock(3, true, 1, 1), &mut events);
    assert_eq!(granted(&mut events), [(1, 6), (2, 5)]);
}

#[test]
fn a_request_that_is_given_up_leaves_nothing() {
    let (mut table, mut events) = (LockTable::default(), Events::new());
    table.lock(session(1), lock(1, true, 0, 9), None, &mut events).unwrap();
    let (two, three) = (lock(2, true, 0, 9), lock(3, false, 0, 9));
    table.lock(session(2), two, Some(1), &mut events).unwrap();
    table.lock(session(2), three, Some(2), &mut events).unwrap();
    table.cancel(session(2), two, 1, &mut events);
    table.unlock(session(1), lock(1, true, 0, 9), &mut events);
    assert_eq!(granted(&mut events), [(2, 2)]);
    // It was granted, but the caller did not know.
    table.cancel(session(2), three, 2, &mut events);
    assert_eq!(table.test(session(1), &lock(1, true, 0, 9)), None);
}

#[test]
fn circles_of_waits_are_refused() {
    let (mut table, mut events) = (LockTable::default(), Events::new());
    let other = |lock: FileLock| FileLock { ino: Ino(6), ..lock };
    table.lock(session(1), lock(1, true, 0, 0), None, &mut events).unwrap();
    table.lock(session(2), lock(1, true, 1, 1), None, &mut events).unwrap();
    table.lock(session(3), other(lock(1, true, 0, 0)), None, &mut events).unwrap();
    assert_eq!(table.lock(session(1), lock(1, true, 1, 1), Some(1), &mut events), Ok(Locking::Queued));
    assert_eq!(table.lock(session(2), other(lock(1, true, 0, 0)), Some(1), &mut events), Ok(Locking::Queued));
    assert_eq!(table.lock(session(3), lock(1, true, 0, 0), Some(1), &mut events), Err(FsError::Deadlock));
    // A circle through the order of the queue is one, too.
    assert_eq!(table.lock(session(4), lock(1, true, 5, 5), None, &mut events), Ok(Locking::Granted));
    assert_eq!(table.lock(session(4), lock(1, true, 1, 1), Some(1), &mut events), Ok(Locking::Queued));
    assert_eq!(table.lock(session(1), lock(2, true, 5, 5), Some(2), &mut events), Ok(Locking::Queued));
    // Another holder of the same session is somebody else.
    assert_eq!(table.lock(session(3), lock(9, true, 0, 0), Some(2), &mut events), Ok(Locking::Queued));
    table.end_session(session(1), &mut events);
    assert_eq!(granted(&mut events), [(3, 2)]);
}

#[test]
fn locks_of_the_silent_fall_when_others_want_them() {
    let (mut table, mut events) = (LockTable::default(), Events::new());
    table.lock(session(1), lock(1, true, 0, 4), None, &mut events).unwrap();
    table.lock(session(1), lock(1, true, 6, 9), None, &mut events).unwrap();
    table.revoke((session(2), &lock(1, true, 5, 7)), |gone| gone == session(1), &mut events);
    assert_eq!(events, [(session(1), OwnerEvent::LockLost { lock: lock(1, true, 6, 9) })]);
    assert_eq!(table.lock(session(2), lock(1, true, 5, 7), None, &mut events), Ok(Locking::Granted));
    assert_eq!(table.lock(session(2), lock(1, true, 4, 4), None, &mut events), Err(FsError::WouldBlock));
    assert!(!table.restore(session(1), lock(1, true, 6, 9), &mut events), "another session has it");
    events.clear();
    assert_eq!(table.lock(session(3), lock(1, true, 2, 2), Some(4), &mut events), Ok(Locking::Queued));
    table.expire(|gone| gone == session(2), &mut events);
    assert_eq!(granted(&mut events), []);
    table.expire(|gone| gone == session(1), &mut events);
    assert_eq!(granted(&mut events), [(3, 4)]);
}

#[test]
fn there_are_limits() {
    let (mut table, mut events) = (LockTable::default(), Events::new());
    for at in 0..FILE_LOCKS_MAX as u64 {
        table.lock(session(1), lock(1, true, at * 2, at * 2), None, &mut events).unwrap();
    }
    assert_eq!(table.lock(session(2), lock(1, true, 1, 1), None, &mut events), Err(FsError::Range));
}

/// What a lock table is: for each byte, the holders of it.
#[derive(Default)]
struct Model {
    bytes: HashMap<(Holder, u64), bool>,
}

impl Model {
    fn may(&self, holder: Holder, lock: &FileLock) -> bool {
        self.bytes.iter().all(|((other, byte), exclusive)| {
            *other == holder || !(lock.start..=lock.last).contains(byte) || !(*exclusive || lock.exclusive)
        })
    }

    fn set(&mut self, holder: Holder, lock: &FileLock, held: Option<bool>) {
        for byte in lock.start..=lock.last.min(BYTES) {
            match held {
                Some(exclusive) => drop(self.bytes.insert((holder, byte), exclusive)),
                None => drop(self.bytes.remove(&(holder, byte))),
            }
        }
    }
}

proptest! {
    #[test]
    fn the_table_is_as_its_model(
        steps in proptest::collection::vec((0..5u8, 1..3u64, 0..2u64, any::<bool>(), 0..BYTES, 0..BYTES), 1..80)
    ) {
        let (mut table, mut model, mut events) = (LockTable::default(), Model::default(), Events::new());
        let mut waiting: Vec<(Holder, u64, FileLock)> = Vec::new();
        for (ticket, (step, number, owner, exclusive, one, two)) in (0u64..).zip(steps) {
            let lock = lock(owner, exclusive, one.min(two), one.max(two));
            let holder = (session(number), owner);
            match step {
                0 => {
                    let expected = if model.may(holder, &lock) { Ok(Locking::Granted) } else { Err(FsError::WouldBlock) };
                    prop_assert_eq!(table.lock(holder.0, lock, None, &mut events), expected);
                    if expected.is_ok() {
                        model.set(holder, &lock, Some(exclusive));
                    }
                }
                1 => {
                    let ahead = waiting.iter().any(|(other, _, wanted)| *other != holder && wanted.conflicts(&lock));
                    match table.lock(holder.0, lock, Some(ticket), &mut events) {
                        Ok(Locking::Granted) => {
                            prop_assert!(model.may(holder, &lock) && !ahead);
                            model.set(holder, &lock, Some(exclusive));
                        }
                        Ok(Locking::Queued) => {
                            prop_assert!(!model.may(holder, &lock) || ahead);
                            waiting.push((holder, ticket, lock));
                        }
                        Err(error) => prop_assert_eq!(error, FsError::Deadlock),
                    }
                }
                2 if !waiting.is_empty() => {
                    let (holder, ticket, lock) = waiting.remove(one as usize % waiting.len());
                    table.cancel(holder.0, lock, ticket, &mut events);
                }
                _ => {
                    table.unlock(holder.0, lock, &mut events);
                    model.set(holder, &lock, None);
                }
            }
            for (session, ticket) in granted(&mut events) {
                let at = waiting.iter().position(|(holder, other, _)| (holder.0.0, *other) == (session, ticket)).unwrap();
                let (holder, _, lock) = waiting.remove(at);
                prop_assert!(model.may(holder, &lock));
                model.set(holder, &lock, Some(lock.exclusive));
            }
            // Each waiting request has a reason to wait.
            for (at, (holder, _, lock)) in waiting.iter().enumerate() {
                let ahead = waiting[..at].iter().any(|(other, _, wanted)| other != holder && wanted.conflicts(lock));
                prop_assert!(!model.may(*holder, lock) || ahead);
            }
        }
        for byte in 0..BYTES {
            let probe = FileLock { start: byte, last: byte, ..lock(99, true, 0, 0) };
            let held = model.bytes.keys().any(|(_, other)| *other == byte);
            prop_assert_eq!(table.test(session(99), &probe).is_some(), held);
        }
    }
}
