//! Leases and watches at scale: `cargo bench -p meta --bench leases [LEASES]`. Prints how long a request of another session takes
//! at most while the owner holds many leases, and how many messages a create costs in a directory that many clients share.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a benchmark measures real time")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use base::env::Env;
use base::{FsError, Ino, LedgerId, SessionId};
use bytes::Bytes;
use meta::log::MemLog;
use meta::owner::{EarlierSessions, Owner, OwnerOptions};
use meta::state::MemState;
use tokio::sync::mpsc;
use wire::meta::{
    EventSink, FileKind, MakeNode, MetaReply, MetaRequest, MetaService, OpenIntent, OwnerEvent, RequestId,
};

const SESSIONS: usize = 64;

/// A client without caches of its own: it gives back at once what the owner wants back.
struct Member {
    owner: Arc<Owner>,
    session: SessionId,
    seq: AtomicU64,
    events: Arc<AtomicU64>,
}

struct Sink {
    events: Arc<AtomicU64>,
    out: mpsc::UnboundedSender<OwnerEvent>,
}

impl EventSink for Sink {
    fn event(&self, event: OwnerEvent) {
        self.events.fetch_add(1, Ordering::Relaxed);
        let _ = self.out.send(event);
    }
}

impl Member {
    async fn new(owner: &Arc<Owner>) -> Arc<Self> {
        let (out, mut inbox) = mpsc::unbounded_channel();
        let events: Arc<AtomicU64> = Arc::default();
        let session = owner.connect(Arc::new(Sink { events: events.clone(), out })).await.unwrap();
        let member = Arc::new(Self { owner: owner.clone(), session, seq: AtomicU64::new(0), events });
        let answering = member.clone();
        tokio::spawn(async move {
            let mut seq = 0;
            while let Some(event) = inbox.recv().await {
                let answer = match event {
                    OwnerEvent::Recall { lease, keep } => MetaRequest::Release { lease, keep },
                    OwnerEvent::Forget { dir, name, number } => {
                        MetaRequest::Forgot { dir, names: vec![(name, number)] }
                    }
                    _ => continue,
                };
                seq += 1;
                let id = RequestId { session: answering.session, slot: 1, seq };
                let _ = answering.owner.call(id.into(), answer).await;
            }
        });
        member
    }

    async fn ask(&self, request: MetaRequest) -> Result<MetaReply, FsError> {
        let seq = self.seq.fetch_add(1, Ordering::Relaxed) + 1;
        self.owner.call(RequestId { session: self.session, slot: 0, seq }.into(), request).await
    }

    async fn make(&self, parent: Ino, name: String, kind: FileKind) -> Ino {
        let make = MakeNode {
            parent,
            name: Bytes::from(name),
            kind,
            mode: 0o755,
            umask: 0,
            uid: 0,
            gid: 0,
            rdev: 0,
            target: Bytes::new(),
            open: OpenIntent::None,
        };
        match self.ask(MetaRequest::Make(make)).await.unwrap() {
            MetaReply::Entry { attr, .. } => attr.ino,
            other => panic!("{other:?}"),
        }
    }
}

/// Asks for a sign of life again and again; keeps the longest time.
struct Probe {
    longest_us: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
}

impl Probe {
    fn start(member: Arc<Member>) -> Self {
        let (longest_us, over): (Arc<AtomicU64>, Arc<AtomicBool>) = Default::default();
        let (longest, ends) = (longest_us.clone(), over.clone());
        std::thread::Builder::new()
            .spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                while !ends.load(Ordering::Relaxed) {
                    let began = Instant::now();
                    runtime.block_on(member.ask(MetaRequest::Heartbeat { in_use_ver: u64::MAX })).unwrap();
                    longest.fetch_max(began.elapsed().as_micros() as u64, Ordering::Relaxed);
                    std::thread::park_timeout(Duration::from_micros(200));
                }
            })
            .unwrap();
        Self { longest_us, over }
    }

    fn take_ms(&self) -> f64 {
        self.longest_us.swap(0, Ordering::Relaxed) as f64 / 1000.0
    }
}

fn open_owner() -> Owner {
    Owner::open(OwnerOptions {
        ledger: LedgerId(1),
        log: Arc::new(MemLog::new()),
        state: Arc::new(MemState::default()),
        env: Env::real(),
        evidence: meta::history::Evidence::default(),
        vacant: None,
        earlier_sessions: EarlierSessions::End,
        unstored_bytes_max: 256 << 20,
        standby_grace: Duration::ZERO,
    })
    .unwrap()
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let leases: usize = std::env::args().skip(1).find_map(|text| text.parse().ok()).unwrap_or(2_000_000);
    let owner = Arc::new(tokio::task::spawn_blocking(open_owner).await.unwrap());
    let mut members = Vec::new();
    for _ in 0..SESSIONS {
        members.push(Member::new(&owner).await);
    }
    let probe = Probe::start(Member::new(&owner).await);

    let began = Instant::now();
    let dirs: Arc<Mutex<Vec<Ino>>> = Arc::default();
    let per_session = leases / SESSIONS;
    let work = members.iter().enumerate().map(|(number, member)| {
        let (member, dirs) = (member.clone(), dirs.clone());
        tokio::spawn(async move {
            let dir = member.make(Ino::ROOT, format!("dir {number}"), FileKind::Directory).await;
            dirs.lock().unwrap().push(dir);
            for file in 0..per_session {
                member.make(dir, format!("file {file}"), FileKind::Regular).await;
            }
        })
    });
    for task in work.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    let rate = leases as f64 / began.elapsed().as_secs_f64();
    println!("{leases} files made, a lease on each: {rate:.0}/s, longest wait {:.1} ms", probe.take_ms());
    // The local store catches up.
    tokio::time::sleep(Duration::from_secs(15)).await;
    probe.take_ms();
    tokio::time::sleep(Duration::from_secs(5)).await;
    println!("5 s without work: longest wait {:.1} ms", probe.take_ms());

    let began = Instant::now();
    let dir = dirs.lock().unwrap()[0];
    for file in 0..5000.min(per_session) {
        let name = Bytes::from(format!("file {file}"));
        members[SESSIONS - 1].ask(MetaRequest::Unlink { parent: dir, name }).await.unwrap();
    }
    let each_us = began.elapsed().as_micros() as f64 / 5000.0;
    println!(
        "5000 files of another session unlinked: {each_us:.0} us each, longest wait {:.1} ms",
        probe.take_ms()
    );
    members[1].ask(MetaRequest::CloseSession).await.unwrap();
    tokio::time::sleep(Duration::from_secs(5)).await;
    println!("a session with {per_session} leases ends: longest wait {:.1} ms", probe.take_ms());

    share_a_directory(&members).await;
    probe.over.store(true, Ordering::Relaxed);
    std::process::exit(0);
}

/// All but two members create files in one directory, which at first nobody has looked at.
async fn share_a_directory(members: &[Arc<Member>]) {
    let shared = members[0].make(Ino::ROOT, "shared".into(), FileKind::Directory).await;
    for looks in [false, true] {
        if looks {
            for member in &members[2..] {
                member.ask(MetaRequest::ReadDir { ino: shared, after: None, limit: 4096 }).await.unwrap();
            }
        }
        let before: u64 = members.iter().map(|member| member.events.load(Ordering::Relaxed)).sum();
        let began = Instant::now();
        let creates = 50 * (SESSIONS - 2);
        let work = members[2..].iter().enumerate().map(|(number, member)| {
            let member = member.clone();
            tokio::spawn(async move {
                for file in 0..50 {
                    member.make(shared, format!("{looks} {number} {file}"), FileKind::Regular).await;
                }
            })
        });
        for task in work.collect::<Vec<_>>() {
            task.await.unwrap();
        }
        let after: u64 = members.iter().map(|member| member.events.load(Ordering::Relaxed)).sum();
        let each = (after - before) as f64 / creates as f64;
        let rate = creates as f64 / began.elapsed().as_secs_f64();
        let who = if looks { "that all have listed before" } else { "that nobody looked at" };
        println!(
            "{} clients create in a directory {who}: {each:.2} events a create, {rate:.0}/s",
            SESSIONS - 2
        );
    }
}
