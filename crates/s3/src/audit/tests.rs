use super::*;
use crate::identity::AuditEntry;
use base::env::sim::Sim;

const DIR: &str = "/audit";

fn record(request_id: &str) -> AuditRecord {
    AuditRecord {
        request_id: request_id.to_owned(),
        operation: "GetObject",
        status: 200,
        ..Default::default()
    }
}

/// All lines of all files, as JSON.
fn lines(env: &Env) -> Vec<serde_json::Value> {
    let files = audit_files(env, Path::new(DIR)).unwrap();
    let texts = files.iter().map(|path| String::from_utf8(env.files.read(path).unwrap()).unwrap());
    let texts: String = texts.collect();
    texts.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn writer(sim: &Sim) -> Writer {
    Writer::new(sim.env(), PathBuf::from(DIR), 1000)
}

#[test]
fn a_line_says_who_did_what() {
    let sim = Sim::new(1);
    let full = AuditRecord {
        began_ns: 1_795_320_306_000_000_000,
        duration_ns: 1_234_567,
        request_id: "r\"1\n".to_owned(),
        user: Some("ann".into()),
        access_key: Some("AKIAANN".into()),
        operation: "PutObject",
        bucket: Some("b".to_owned()),
        key: Some("a/ß".to_owned()),
        status: 403,
        error: Some("AccessDenied".to_owned()),
        bytes_in: 7,
        bytes_out: 9,
        source_ip: Some("10.1.2.3".parse().unwrap()),
    };
    writer(&sim).write(&[full, record("2")], 3).unwrap();
    let lines = lines(&sim.env());
    assert_eq!(lines[0]["lost"], 3);
    let expected = serde_json::json!({
        "time": "2026-11-22T04:05:06.000000Z", "duration_us": 1234, "request_id": "r\"1\n", "user": "ann",
        "access_key": "AKIAANN", "operation": "PutObject", "bucket": "b", "key": "a/ß", "status": 403,
        "error": "AccessDenied", "bytes_in": 7, "bytes_out": 9, "source_ip": "10.1.2.3",
    });
    assert_eq!(lines[1], expected);
    assert_eq!(lines[2]["request_id"], "2");
    assert!(lines[2].get("user").is_none());
}

#[test]
fn full_files_are_followed_by_others_and_the_oldest_go() {
    let sim = Sim::new(1);
    let mut writer = writer(&sim);
    let env = sim.env();
    for number in 0..400 {
        sim.clock.advance_ns(1_000_000);
        writer.write(&[record(&number.to_string())], 0).unwrap();
    }
    let files = audit_files(&env, Path::new(DIR)).unwrap();
    let bytes: usize = files.iter().map(|path| env.files.read(path).unwrap().len()).sum();
    assert!(files.len() > 2 && bytes <= 17_000, "{} {bytes}", files.len());
    let lines = lines(&env);
    let ids: Vec<usize> =
        lines.iter().map(|line| line["request_id"].as_str().unwrap().parse().unwrap()).collect();
    assert_eq!(ids, (ids[0]..400).collect::<Vec<_>>());
}

#[test]
fn what_a_full_disk_refused_is_written_later_and_once() {
    let sim = Sim::new(1);
    let mut writer = writer(&sim);
    writer.write(&[record("1")], 0).unwrap();
    sim.files.limit_space(0);
    let big = AuditRecord { key: Some("x".repeat(10_000)), ..record("2") };
    let error = writer.write(std::slice::from_ref(&big), 0).unwrap_err();
    assert!(error.to_string().starts_with("cannot write audit log: path=/audit/"), "{error}");
    sim.files.clear_faults();
    writer.write(&[big], 0).unwrap();
    let lines = lines(&sim.env());
    assert_eq!(lines.iter().map(|line| &line["request_id"]).collect::<Vec<_>>(), ["1", "2"]);
}

#[test]
fn lines_are_durable_after_a_second_and_a_failed_sync_begins_another_file() {
    let sim = Sim::new(1);
    let mut writer = writer(&sim);
    writer.write(&[record("1")], 0).unwrap();
    writer.sync_if_due().unwrap();
    assert!(writer.is_behind());
    sim.clock.advance_ns(1_000_000_000);
    writer.sync_if_due().unwrap();
    assert!(!writer.is_behind());
    writer.write(&[record("2")], 0).unwrap();
    sim.files.fail_sync_after(0);
    assert!(writer.sync().is_err());
    sim.files.clear_faults();
    writer.write(&[record("3")], 0).unwrap();
    assert_eq!(audit_files(&sim.env(), Path::new(DIR)).unwrap().len(), 2);
}

fn full_queue() -> Queue {
    let mut queue = Queue::default();
    for _ in 0..QUEUE_RECORDS_MAX {
        assert!(queue.has_room());
        queue.reserved += 1;
        queue.push(record("x"));
    }
    queue
}

#[test]
fn a_full_queue_makes_requests_wait_unless_the_disk_refuses() {
    let mut queue = full_queue();
    assert!(!queue.has_room());
    queue.records.pop_front();
    assert!(queue.has_room());
    queue.reserved += 1;
    assert!(!queue.has_room());
    queue.problem = Some("disk is full".to_owned());
    assert!(queue.has_room());
}

#[test]
fn what_does_not_fit_is_counted() {
    let mut queue = full_queue();
    queue.reserved += 1;
    queue.push(record("too many"));
    assert_eq!((queue.records.len(), queue.lost, queue.lost_unsaid), (QUEUE_RECORDS_MAX, 1, 1));
}

#[tokio::test]
async fn every_entry_is_written_also_of_requests_that_are_cut_off() {
    let dir = tempfile::tempdir().unwrap();
    let env = Env::real();
    let log = Arc::new(AuditLog::start(&env, dir.path()));
    for number in 0..3000 {
        let mut entry = AuditEntry::begin(log.clone()).await;
        entry.record.request_id = number.to_string();
    }
    log.stop();
    assert_eq!(log.stat(), AuditStat { queued: 0, written: 3000, lost: 0, problem: None });
    let files = audit_files(&env, dir.path()).unwrap();
    let text: String =
        files.iter().map(|path| String::from_utf8(env.files.read(path).unwrap()).unwrap()).collect();
    let ids = text
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["request_id"].clone());
    assert!(ids.eq((0..3000).map(|number| serde_json::Value::from(number.to_string()))));
}

#[tokio::test]
async fn what_the_disk_refuses_until_the_end_is_counted_as_lost() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    let env = Env::real();
    env.files.write_atomic(&file, b"").unwrap();
    // A file in place of the directory.
    let log = Arc::new(AuditLog::start(&env, &file));
    drop(AuditEntry::begin(log.clone()).await);
    log.stop();
    let stat = log.stat();
    assert_eq!((stat.written, stat.lost), (0, 1));
    assert!(stat.problem.unwrap().contains("cannot write audit log"));
}
