//! Tests of the checker: it accepts allowed states and reports all others.

use std::fs;
use std::path::Path;

use super::content::{FileId, Generation};
use super::model::{Operation, Promise, Sync};
use super::worker::{self, Worker};

const FILE: FileId = FileId(0x1_0000_0001);
const OTHER: FileId = FileId(0x1_0000_0002);

/// Does the operations on a plain directory, then the damage, then compares. `expected` is a part of the only problem.
#[track_caller]
fn check(
    operations: &[Operation],
    in_flight: Option<Operation>,
    damage: impl Fn(&Path),
    expected: Result<(), &str>,
) {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    worker::prepare(root).unwrap();
    let mut workers = vec![Worker::new(0, (root, true), Path::new("none"), 1)];
    for operation in operations {
        workers[0].do_now(operation);
    }
    workers[0].in_flight = in_flight;
    damage(root);
    let problems = super::check(root, &mut workers).unwrap();
    match expected {
        Ok(()) => assert_eq!(problems, Vec::<String>::new()),
        Err(part) => assert!(problems.iter().any(|problem| problem.contains(part)), "{problems:?}"),
    }
    // The state that was found is the new model: a second comparison finds no problem.
    if expected.is_ok() {
        workers[0].in_flight = None;
        assert_eq!(super::check(root, &mut workers).unwrap(), Vec::<String>::new());
    }
}

fn create(path: &str, file: FileId) -> Operation {
    Operation::Create { path: path.to_owned(), file }
}

fn write(path: &str, offset: u64, len: u64, generation: u64) -> Operation {
    let generation = Generation(generation);
    Operation::Write { path: path.to_owned(), offset, len, generation, promise: Promise::Nothing }
}

fn fsync(path: &str) -> Operation {
    Operation::Fsync { path: path.to_owned(), sync: Sync::All }
}

fn unlink(path: &str) -> Operation {
    Operation::Unlink { path: path.to_owned() }
}

fn rename(from: &str, to: &str) -> Operation {
    Operation::Rename { from: from.to_owned(), to: to.to_owned() }
}

/// A file with one synced write.
fn synced() -> Vec<Operation> {
    vec![create("w0-a", FILE), write("w0-a", 0, 5000, 1), fsync("w0-a")]
}

fn with(mut operations: Vec<Operation>, more: &[Operation]) -> Vec<Operation> {
    operations.extend_from_slice(more);
    operations
}

#[test]
fn the_result_of_operations_is_accepted() {
    check(&synced(), None, |_| {}, Ok(()));
    let more = [
        Operation::Mkdir { path: "w0-d".to_owned() },
        Operation::Link { from: "w0-a".to_owned(), to: "w0-d/w0-b".to_owned() },
        Operation::Symlink { path: "shared/w0-s".to_owned(), text: "x".to_owned() },
        rename("w0-d", "shared/w0-e"),
        Operation::Truncate { path: "w0-a".to_owned(), size: 700 },
        Operation::Chmod { path: "w0-a".to_owned(), mode: 0o640 },
        Operation::Read { path: "shared/w0-e/w0-b".to_owned(), offset: 0, len: 700 },
        unlink("w0-a"),
    ];
    check(&with(synced(), &more), None, |_| {}, Ok(()));
}

#[test]
fn a_lost_synced_write_is_reported() {
    check(&synced(), None, |root| fs::write(root.join("w0-a"), b"").unwrap(), Err("size=0 expected=5000"));
    check(&synced(), None, |root| fs::write(root.join("w0-a"), [0; 5000]).unwrap(), Err("found zeros"));
    let twice = with(synced(), &[write("w0-a", 0, 4096, 2), fsync("w0-a")]);
    let roll_back = |root: &Path| {
        let mut data = fs::read(root.join("w0-a")).unwrap();
        super::content::fill(FILE, Generation(1), 512, &mut data[512..1024]);
        fs::write(root.join("w0-a"), data).unwrap();
    };
    check(&twice, None, roll_back, Err("bytes 512..1024: expected generation of [2], found bytes of"));
}

#[test]
fn an_unsynced_write_may_be_lost() {
    let operations = [create("w0-a", FILE), write("w0-a", 0, 5000, 1)];
    check(&operations, None, |root| fs::write(root.join("w0-a"), b"").unwrap(), Ok(()));
    check(&operations, None, |root| fs::write(root.join("w0-a"), b"foreign").unwrap(), Err("without a mark"));
}

#[test]
fn a_lost_name_is_reported() {
    check(&synced(), None, |root| fs::remove_file(root.join("w0-a")).unwrap(), Err("lost: w0-a"));
    let renamed = with(synced(), &[rename("w0-a", "w0-b")]);
    check(
        &renamed,
        None,
        |root| fs::rename(root.join("w0-b"), root.join("w0-a")).unwrap(),
        Err("lost: w0-b"),
    );
}

#[test]
fn a_deleted_file_that_is_back_is_reported() {
    let operations = with(synced(), &[unlink("w0-a")]);
    let resurrect = |root: &Path| {
        let mut data = vec![0; 5000];
        super::content::fill(FILE, Generation(1), 0, &mut data);
        fs::write(root.join("w0-a"), data).unwrap();
    };
    check(&operations, None, resurrect, Err("deleted file is back: w0-a file=0x100000001"));
}

#[test]
fn an_unexpected_name_is_reported() {
    check(&synced(), None, |root| fs::write(root.join("stray"), b"").unwrap(), Err("unexplained: stray"));
    check(&synced(), None, |root| fs::write(root.join("w0-c"), b"").unwrap(), Err("unexplained: w0-c"));
}

#[test]
fn an_operation_in_flight_may_have_taken_place() {
    let gone = |root: &Path| fs::remove_file(root.join("w0-a")).unwrap();
    check(&synced(), Some(unlink("w0-a")), gone, Ok(()));
    check(&synced(), Some(unlink("w0-a")), |_| {}, Ok(()));
    check(&synced(), Some(create("w0-b", OTHER)), gone, Err("lost: w0-a"));
    let both = |root: &Path| {
        fs::copy(root.join("w0-a"), root.join("w0-b")).unwrap();
    };
    check(&synced(), Some(rename("w0-a", "w0-b")), both, Err("w0-"));
    let cut = |root: &Path| {
        fs::OpenOptions::new().write(true).open(root.join("w0-a")).unwrap().set_len(10).unwrap();
    };
    let truncate = |size| Operation::Truncate { path: "w0-a".to_owned(), size };
    check(&synced(), Some(truncate(10)), cut, Ok(()));
    check(&synced(), Some(truncate(11)), cut, Err("size=10"));
}

#[test]
fn contents_of_two_files_are_not_exchanged() {
    let operations = with(synced(), &[create("w0-b", OTHER), write("w0-b", 0, 5000, 2), fsync("w0-b")]);
    let exchange = |root: &Path| {
        fs::copy(root.join("w0-b"), root.join("w0-a")).unwrap();
    };
    check(&operations, None, exchange, Err("found bytes of file=0x100000002"));
}

#[test]
fn links_are_counted() {
    let operations = with(synced(), &[Operation::Link { from: "w0-a".to_owned(), to: "w0-b".to_owned() }]);
    let separate = |root: &Path| {
        fs::remove_file(root.join("w0-b")).unwrap();
        fs::copy(root.join("w0-a"), root.join("w0-b")).unwrap();
    };
    check(&operations, None, separate, Err("links=1 expected=2"));
}

#[test]
fn random_rounds_on_a_plain_directory_are_clean() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let arguments = ["--dir", path, "--plain", "--rounds", "3", "--round-ms", "200", "--seed", "5"];
    assert!(super::run(&arguments).unwrap());
}
