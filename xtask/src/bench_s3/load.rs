//! The load: workers with one connection each that send one request after another.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use hyper::Method;
use tokio::sync::Barrier;
use tokio::task::JoinSet;

use super::measure::{Before, Column, Tally, peak_bytes};
use super::server::Server;
use super::{KIB, Scale, figure_name};
use crate::bench::meter::process_ticks;
use crate::random::{Random, mix};
use crate::s3::{Ask, Connection, element, sha256_hex};

/// The body of a put.
#[derive(Debug, Clone)]
struct Content {
    bytes: Bytes,
    sha256: String,
}

impl Content {
    /// Random bytes: a server cannot leave them out.
    fn new(len: u64) -> Self {
        let mut random = Random::new(len);
        let bytes: Bytes = (0..len.div_ceil(8)).flat_map(|_| random.next().to_le_bytes()).collect();
        Self { sha256: sha256_hex(&bytes), bytes }
    }
}

/// The order in which workers take keys.
#[derive(Debug, Clone, Copy)]
enum Order {
    /// One after another, shared by all workers, again from the start at the end.
    Round,
    /// One after another, shared by all workers, each once.
    Once,
    Random,
}

/// Requests of one kind.
struct Job {
    method: Method,
    /// The path for the number of a key.
    path: Box<dyn Fn(u64) -> String + Send + Sync>,
    keys: u64,
    order: Order,
    content: Option<Content>,
    next: AtomicU64,
}

impl Job {
    fn new(
        method: Method,
        order: Order,
        path: impl Fn(u64) -> String + Send + Sync + 'static,
        keys: u64,
    ) -> Self {
        Self { method, path: Box::new(path), keys, order, content: None, next: AtomicU64::new(0) }
    }

    fn put(path: impl Fn(u64) -> String + Send + Sync + 'static, keys: u64, content: &Content) -> Self {
        Self { content: Some(content.clone()), ..Self::new(Method::PUT, Order::Round, path, keys) }
    }

    /// The number of the key for a worker's next request.
    fn key(&self, worker: u64, step: u64) -> Option<u64> {
        match self.order {
            Order::Random => Some(mix(worker << 40 ^ step) % self.keys),
            Order::Round => Some(self.next.fetch_add(1, Ordering::Relaxed) % self.keys),
            Order::Once => Some(self.next.fetch_add(1, Ordering::Relaxed)).filter(|key| *key < self.keys),
        }
    }

    /// Sends requests until the time is over or no keys are left.
    async fn work(&self, connection: &mut Connection, worker: u64, time: Duration) -> Result<Tally> {
        let mut tally = Tally::default();
        let end = Instant::now() + time;
        while Instant::now() < end
            && let Some(key) = self.key(worker, tally.operations)
        {
            let path = (self.path)(key);
            let mut ask = Ask::new(self.method.clone(), &path);
            if let Some(content) = &self.content {
                ask.body = content.bytes.clone();
                ask.sha256 = &content.sha256;
            }
            let began = Instant::now();
            let came = connection.count(&ask).await?;
            tally.latencies.note(began.elapsed());
            tally.operations += 1;
            tally.bytes += came + ask.body.len() as u64;
        }
        Ok(tally)
    }

    /// The number of different keys that were taken in turn.
    fn taken(&self) -> u64 {
        self.next.load(Ordering::Relaxed).min(self.keys)
    }
}

/// Does a job with `workers` workers. All are connected before it begins.
async fn crowd(server: &Server, job: &Arc<Job>, workers: u64, time: Duration) -> Result<(Before, Tally)> {
    let gate = Arc::new(Barrier::new(workers as usize + 1));
    let mut set = JoinSet::new();
    for worker in 0..workers {
        let (job, gate, target) = (job.clone(), gate.clone(), server.target.clone());
        set.spawn(async move {
            let connection = Connection::open(&target).await;
            gate.wait().await;
            gate.wait().await;
            job.work(&mut connection?, worker, time).await
        });
    }
    gate.wait().await;
    let before = Before::now(Some(server.pid))?;
    gate.wait().await;
    let mut all = Tally::default();
    while let Some(tally) = set.join_next().await {
        all.merge(&tally??);
    }
    Ok((before, all))
}

/// The measurement of one server.
struct Bench<'a> {
    server: &'a Server,
    scale: &'a Scale,
    column: &'a mut Column,
}

/// Long enough for any job that has an end.
const NO_END: Duration = Duration::from_secs(3600);
/// Longest wait for a server to become idle. It is idle if it uses at most `SETTLED_TICKS` of CPU in a `SETTLE_STEP`.
const SETTLE: Duration = Duration::from_secs(20);
const SETTLE_STEP: Duration = Duration::from_millis(500);
const SETTLED_TICKS: u64 = 3;
const BUCKETS: u64 = 100;
const BUCKET_WORKERS: u64 = 64;
/// Number of turns for one and many buckets.
pub(super) const TURNS: u64 = 3;

/// Does all measurements on one server.
pub(super) async fn run_all(server: &Server, scale: &Scale, column: &mut Column) -> Result<()> {
    let mut bench = Bench { server, scale, column };
    bench.make_bucket("bench").await?;
    for size in scale.sizes {
        bench.objects(*size).await?;
    }
    bench.lists().await?;
    bench.buckets().await?;
    column.peak_bytes = Some(peak_bytes(server.pid)?);
    Ok(())
}

impl Bench<'_> {
    async fn make_bucket(&self, bucket: &str) -> Result<()> {
        let path = format!("/{bucket}");
        let mut connection = Connection::open(&self.server.target).await?;
        connection.send(&Ask::new(Method::PUT, &path)).await?.ok().context("create a bucket")?;
        Ok(())
    }

    /// Does a job and records its figure.
    async fn measure(&mut self, name: String, job: &Arc<Job>, workers: u64) -> Result<()> {
        let (before, tally) = crowd(self.server, job, workers, self.scale.time).await?;
        self.column.keep(name, tally, &before, Some(self.server.pid))
    }

    /// Waits until the server is idle, for at most [`SETTLE`]: it may still work on earlier requests.
    async fn settle(&self) -> Result<()> {
        let end = Instant::now() + SETTLE;
        while Instant::now() < end {
            let before = process_ticks(self.server.pid)?;
            tokio::time::sleep(SETTLE_STEP).await;
            if process_ticks(self.server.pid)? - before <= SETTLED_TICKS {
                break;
            }
        }
        Ok(())
    }

    /// Does a job to its end without a measurement.
    async fn prepare(&self, job: &Arc<Job>) -> Result<()> {
        crowd(self.server, job, 64, NO_END).await.map(drop)
    }

    /// Whether any figure of these kinds is wanted.
    fn wants(&self, verbs: &[&str], size: u64, workers: &[u64]) -> bool {
        let wants =
            |verb: &&str| workers.iter().any(|count| self.column.wants(&figure_name(verb, size, *count)));
        verbs.iter().any(wants)
    }

    /// Puts, gets, heads and deletions of one size.
    async fn objects(&mut self, size: u64) -> Result<()> {
        let content = Content::new(size);
        let keys = (self.scale.bytes_max / size).clamp(1, 100_000);
        for workers in self.scale.workers {
            if !self.wants(&["PUT", "DELETE"], size, &[*workers]) {
                continue;
            }
            let path = move |key| format!("/bench/put-{size}/{workers}/{:02}/{key}", key % 100);
            let put = Arc::new(Job::put(path, keys, &content));
            self.settle().await?;
            self.measure(figure_name("PUT", size, *workers), &put, *workers).await?;
            let delete = Arc::new(Job::new(Method::DELETE, Order::Once, path, put.taken()));
            self.measure(figure_name("DELETE", size, *workers), &delete, *workers).await?;
            // The rest, for which the time did not suffice.
            self.prepare(&delete).await?;
        }
        if !self.wants(&["GET", "HEAD"], size, self.scale.workers) {
            return Ok(());
        }
        let (path, keys) = (move |key| format!("/bench/get-{size}/{key}"), keys.min(2000));
        self.prepare(&Arc::new(Job { order: Order::Once, ..Job::put(path, keys, &content) })).await?;
        self.settle().await?;
        // The objects are now in the page cache, if the server uses it.
        self.prepare(&Arc::new(Job::new(Method::GET, Order::Once, path, keys))).await?;
        for (verb, method) in [("GET", Method::GET), ("HEAD", Method::HEAD)] {
            for workers in self.scale.workers.iter().copied() {
                let name = figure_name(verb, size, workers);
                if self.column.wants(&name) {
                    let job = Job::new(method.clone(), Order::Random, path, keys);
                    self.measure(name, &Arc::new(job), workers).await?;
                }
            }
        }
        self.prepare(&Arc::new(Job::new(Method::DELETE, Order::Once, path, keys))).await
    }

    /// Lists many keys, in one directory and in a tree.
    async fn lists(&mut self) -> Result<()> {
        let flat = |key: u64| format!("/bench/flat/key-{key:07}");
        let deep = |key: u64| {
            let number = mix(key);
            format!(
                "/bench/deep/{:02}/{:02}/{:02}/key-{key:07}",
                number % 10,
                number / 10 % 10,
                number / 100 % 10
            )
        };
        type Path = fn(u64) -> String;
        let shapes: [(&str, Path); 2] = [("flat", flat), ("deep", deep)];
        for (shape, path) in shapes {
            let name = format!("LIST {shape}, 1 worker");
            if !self.column.wants(&name) {
                continue;
            }
            let job = Job::put(path, self.scale.keys, &Content::new(8));
            self.prepare(&Arc::new(Job { order: Order::Once, ..job })).await?;
            self.settle().await?;
            let before = Before::now(Some(self.server.pid))?;
            let tally = self.list(shape).await?;
            self.column.keep(name, tally, &before, Some(self.server.pid))?;
        }
        Ok(())
    }

    /// Lists all keys below a prefix, page after page, until the time is over.
    async fn list(&self, shape: &str) -> Result<Tally> {
        let mut connection = Connection::open(&self.server.target).await?;
        let mut tally = Tally::default();
        let end = Instant::now() + self.scale.time;
        while Instant::now() < end {
            let (mut listed, mut token) = (0, String::new());
            loop {
                let query = match token.as_str() {
                    "" => format!("list-type=2&prefix={shape}%2F"),
                    token => format!("continuation-token={}&list-type=2&prefix={shape}%2F", encode(token)),
                };
                let began = Instant::now();
                let ask = Ask { query: &query, ..Ask::new(Method::GET, "/bench") };
                let answer = connection.send(&ask).await?.ok()?;
                tally.latencies.note(began.elapsed());
                tally.bytes += answer.body.len() as u64;
                let document = std::str::from_utf8(&answer.body)?;
                listed += document.matches("<Key>").count() as u64;
                match element(document, "NextContinuationToken") {
                    Some(next) => token = next.to_owned(),
                    None => break,
                }
            }
            ensure!(listed == self.scale.keys, "listed {listed} of {} keys", self.scale.keys);
            tally.operations += listed;
        }
        Ok(tally)
    }

    /// The same work in one bucket and in many, in turns.
    async fn buckets(&mut self) -> Result<()> {
        if !self.column.wants("1 bucket") {
            return Ok(());
        }
        for bucket in 0..BUCKETS {
            self.make_bucket(&format!("bucket-{bucket}")).await?;
        }
        let content = Content::new(4 * KIB);
        for turn in 0..TURNS {
            for (buckets, text) in [(1, "1 bucket"), (BUCKETS, "100 buckets")] {
                let path = move |key| format!("/bucket-{}/{turn}-{buckets}/{key}", key % buckets);
                let put = Arc::new(Job::put(path, 10_000, &content));
                self.measure(format!("PUT {text}, turn {turn}"), &put, BUCKET_WORKERS).await?;
                let get = Job::new(Method::GET, Order::Random, path, put.taken());
                self.measure(format!("GET {text}, turn {turn}"), &Arc::new(get), BUCKET_WORKERS).await?;
            }
        }
        Ok(())
    }
}

/// Encodes a token as a value of a query.
fn encode(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let encode = |byte: u8| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(encode).collect()
}
