//! The log of a node. Lines go through a bounded queue to a thread that writes them, so that logging never waits for a
//! disk or a pipe, never fails and never panics. Lines that do not fit into the queue are dropped, and their number is
//! written.
//!
//! Repeated warnings and errors from one place in the source are throttled: after [`REPEATS_MAX`] lines in ten seconds
//! only their number is written.

use std::collections::HashMap;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use base::env::{Caching, Env, OpenMode, spawn_thread};
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::fmt::format::Writer as TextWriter;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt};

/// Capacity of the queue.
const QUEUE_LINES: usize = 4096;
/// A longer line is cut.
const LINE_BYTES_MAX: usize = 16 << 10;
/// Most lines of one place in the source within [`WINDOW`].
const REPEATS_MAX: u32 = 20;
const WINDOW: Duration = Duration::from_secs(10);
/// How long a process waits at its end for its last lines.
const LAST_LINES: Duration = Duration::from_secs(2);
/// How long a process that panicked may take to log the panic.
const PANIC_DEADLINE: Duration = Duration::from_secs(5);

static PANICKED: AtomicBool = AtomicBool::new(false);

/// The destination of lines.
pub(crate) enum Sink {
    /// Standard error.
    Terminal,
    /// A file that lines are appended to.
    File {
        /// The file.
        file: Arc<dyn base::env::File>,
        /// Offset of its end.
        at: u64,
    },
}

impl Sink {
    /// Appends to the file at `path`, creating it and its directory if need be.
    pub(crate) fn file(env: &Env, path: &Path) -> Result<Self> {
        let parent = path.parent().context("the log file is in a directory")?;
        let made = env.files.create_dir_all(parent);
        made.with_context(|| format!("cannot create directory {}", parent.display()))?;
        let file = env.files.open(path, OpenMode::Create, Caching::Buffered);
        let file = file.with_context(|| format!("cannot open {}", path.display()))?;
        let at = file.len()?;
        Ok(Self::File { file, at })
    }

    /// After a short write, the next line overwrites the incomplete one.
    fn write(&mut self, line: &[u8]) -> std::io::Result<()> {
        match self {
            Self::Terminal => std::io::stderr().write_all(line),
            Self::File { file, at } => {
                file.write_at(line, *at)?;
                *at += line.len() as u64;
                Ok(())
            }
        }
    }
}

/// Handle for sending lines to the log.
#[derive(Clone)]
pub(crate) struct Log {
    lines: SyncSender<Vec<u8>>,
    counts: Arc<Counts>,
}

#[derive(Default)]
struct Counts {
    queued: AtomicU64,
    done: AtomicU64,
    /// Lines dropped since the last line that was written.
    lost: AtomicU64,
}

impl Log {
    /// Starts the thread that writes to `sink`, and sends all tracing events to it.
    pub(crate) fn start(env: &Env, sink: Sink) -> Self {
        let (log, queue) = Self::new();
        let throttle = Arc::new(Throttle { env: env.clone(), log: log.clone(), places: Mutex::default() });
        let (counts, sweeping) = (log.counts.clone(), throttle.clone());
        // The thread lives as long as the process, because the last line is never known.
        let _ = spawn_thread("log", move || write_lines(sink, &queue, &counts, &sweeping));
        let filter =
            EnvFilter::try_from_env("FOREBAY_LOG").unwrap_or_else(|_| EnvFilter::new("info,s3s=off"));
        let format = Traced(fmt::format().with_ansi(false));
        let lines = fmt::layer().event_format(format).with_ansi(false).log_internal_errors(false);
        let lines = lines.with_writer(log.clone());
        tracing_subscriber::registry().with(filter).with(ThrottleLayer(throttle)).with(lines).init();
        log
    }

    fn new() -> (Self, Receiver<Vec<u8>>) {
        let (lines, queue) = sync_channel(QUEUE_LINES);
        (Self { lines, counts: Arc::default() }, queue)
    }

    fn line(&self, bytes: &[u8]) {
        let mut line = bytes[..bytes.len().min(LINE_BYTES_MAX)].to_vec();
        if line.len() < bytes.len() {
            line.extend_from_slice(b" (cut)\n");
        }
        self.counts.queued.fetch_add(1, Ordering::Relaxed);
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) = self.lines.try_send(line) {
            self.counts.lost.fetch_add(1, Ordering::Relaxed);
            self.counts.done.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits up to [`LAST_LINES`] for the queue to be written. Takes no lock.
    #[allow(clippy::disallowed_methods, reason = "the process ends; an event would need a lock")]
    pub(crate) fn flush(&self) {
        let until = self.counts.queued.load(Ordering::Relaxed);
        let pause = Duration::from_millis(10);
        let mut waited = Duration::ZERO;
        while self.counts.done.load(Ordering::Relaxed) < until && waited < LAST_LINES {
            std::thread::sleep(pause);
            waited += pause;
        }
    }

    /// From now on a panic of any thread is logged and ends the process: an invariant is broken, so nothing more must
    /// be written, and no thread may wait for the one that panicked.
    ///
    /// The hook takes no lock that another thread of the process may hold: a panic can happen anywhere. [`panicked`] is
    /// for the watchdog, which ends the process if the hook hangs.
    #[allow(clippy::disallowed_methods, reason = "the process ends")]
    pub(crate) fn abort_on_panic(&self) {
        let log = self.clone();
        std::panic::set_hook(Box::new(move |panic| {
            if PANICKED.swap(true, Ordering::SeqCst) {
                std::thread::sleep(PANIC_DEADLINE);
                std::process::abort();
            }
            log.line(format!("{} ERROR panic, the node ends: {panic}\n", timestamp()).as_bytes());
            log.line(format!("{}\n", std::backtrace::Backtrace::force_capture()).as_bytes());
            log.flush();
            std::process::abort();
        }));
    }
}

/// Whether a thread has panicked.
pub(crate) fn panicked() -> bool {
    PANICKED.load(Ordering::SeqCst)
}

/// Lines that end with the number of the user's request that they are about, if they are about one.
struct Traced<F>(F);

impl<S, N, F> FormatEvent<S, N> for Traced<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut to: TextWriter<'_>,
        event: &Event<'_>,
    ) -> std::fmt::Result {
        let trace = wire::trace::current();
        if trace == 0 {
            return self.0.format_event(context, to, event);
        }
        let mut line = String::new();
        self.0.format_event(context, TextWriter::new(&mut line), event)?;
        writeln!(to, "{} trace={}", line.trim_end(), wire::trace::text(trace))
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = LineWriter<'a>;

    fn make_writer(&'a self) -> LineWriter<'a> {
        LineWriter(self)
    }
}

/// Sends one event to the log as a whole.
pub(crate) struct LineWriter<'a>(&'a Log);

impl Write for LineWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.line(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn write_lines(mut sink: Sink, queue: &Receiver<Vec<u8>>, counts: &Counts, throttle: &Throttle) {
    loop {
        match queue.recv_timeout(WINDOW) {
            Ok(line) => write_line(&mut sink, &line, counts),
            Err(RecvTimeoutError::Timeout) => throttle.sweep(),
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Writes a line, after the number of lines dropped before it.
fn write_line(sink: &mut Sink, line: &[u8], counts: &Counts) {
    let lost = counts.lost.swap(0, Ordering::Relaxed);
    let note = format!("{}  WARN log: lines could not be written: count={lost}\n", timestamp());
    let written = if lost > 0 { sink.write(note.as_bytes()) } else { Ok(()) };
    match written {
        Ok(()) if sink.write(line).is_ok() => {}
        Ok(()) => drop(counts.lost.fetch_add(1, Ordering::Relaxed)),
        Err(_) => drop(counts.lost.fetch_add(lost + 1, Ordering::Relaxed)),
    }
    counts.done.fetch_add(1, Ordering::Relaxed);
}

fn timestamp() -> String {
    let mut text = String::new();
    // Writing into a string cannot fail; a line without a time is better than none.
    let _ = SystemTime.format_time(&mut TextWriter::new(&mut text));
    text
}

/// Counts repeated warnings.
struct Throttle {
    env: Env,
    log: Log,
    places: Mutex<HashMap<Identifier, Place>>,
}

/// A place in the source that logs warnings.
struct Place {
    since_ns: u64,
    lines: u32,
    /// Lines that were left out since.
    more: u64,
    /// Module of the place, and its last message.
    target: &'static str,
    message: String,
}

impl Place {
    fn new(metadata: &Metadata<'static>, since_ns: u64) -> Self {
        Self { since_ns, lines: 0, more: 0, target: metadata.target(), message: String::new() }
    }

    fn is_over(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.since_ns) >= WINDOW.as_nanos() as u64
    }

    fn summary(&self) -> Option<String> {
        let Self { more, target, message, .. } = self;
        let seconds = WINDOW.as_secs();
        (*more > 0).then(|| {
            format!("{}  WARN {target}: the same {more} times more in {seconds} s: {message}\n", timestamp())
        })
    }
}

impl Throttle {
    /// Whether a line of this place may be written.
    fn allows(&self, event: &Event<'_>) -> bool {
        let metadata = event.metadata();
        if *metadata.level() > Level::WARN {
            return true;
        }
        let now_ns = self.env.clock.boot_ns();
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let place = places.entry(metadata.callsite()).or_insert_with(|| Place::new(metadata, now_ns));
        if place.is_over(now_ns) {
            let ended = std::mem::replace(place, Place::new(metadata, now_ns));
            ended.summary().into_iter().for_each(|text| self.log.line(text.as_bytes()));
        }
        if place.lines < REPEATS_MAX {
            place.lines += 1;
            return true;
        }
        if place.more == 0 {
            event.record(&mut Message(&mut place.message));
        }
        place.more += 1;
        false
    }

    /// Writes the number of left-out lines for places that no longer warn.
    fn sweep(&self) {
        let now_ns = self.env.clock.boot_ns();
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        places.retain(|_, place| {
            if !place.is_over(now_ns) {
                return true;
            }
            place.summary().into_iter().for_each(|text| self.log.line(text.as_bytes()));
            false
        });
    }
}

/// Extracts the message from an event.
struct Message<'a>(&'a mut String);

impl Visit for Message<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "message" {
            *self.0 = format!("{value:?}");
        }
    }
}

struct ThrottleLayer(Arc<Throttle>);

impl<S: Subscriber> Layer<S> for ThrottleLayer {
    fn event_enabled(&self, event: &Event<'_>, _context: Context<'_, S>) -> bool {
        self.0.allows(event)
    }
}

#[cfg(test)]
mod tests;
