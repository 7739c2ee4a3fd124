use super::*;

use std::process::{Command, Stdio};

use base::env::sim::Sim;

/// Set in the child process that a test starts.
const CHILD: &str = "FOREBAY_LOG_TEST_CHILD";

fn throttle(env: &Env) -> (Arc<Throttle>, Receiver<Vec<u8>>) {
    let (log, queue) = Log::new();
    (Arc::new(Throttle { env: env.clone(), log, places: Mutex::default() }), queue)
}

/// Log lines of events that `act` traces through a throttle.
fn traced(throttle: &Arc<Throttle>, queue: &Receiver<Vec<u8>>, act: impl FnOnce()) -> Vec<String> {
    let lines = fmt::layer().with_ansi(false).with_writer(throttle.log.clone());
    let layers = tracing_subscriber::registry().with(ThrottleLayer(throttle.clone())).with(lines);
    tracing::subscriber::with_default(layers, act);
    queue.try_iter().map(|line| String::from_utf8(line).unwrap()).collect()
}

#[test]
fn a_warning_that_repeats_is_counted() {
    let sim = Sim::new(1);
    let env = sim.env();
    let (throttle, queue) = throttle(&env);
    let warn = |count: u32| (0..count).for_each(|number| tracing::warn!(number, "a disk is full"));
    let lines = traced(&throttle, &queue, || warn(1000));
    assert_eq!(lines.len(), REPEATS_MAX as usize);
    sim.clock.advance_ns(WINDOW.as_nanos() as u64);
    throttle.sweep();
    let lines = traced(&throttle, &queue, || ());
    assert_eq!(lines.len(), 1);
    assert!(lines[0].contains("the same 980 times more in 10 s: a disk is full"), "{}", lines[0]);
    assert_eq!(traced(&throttle, &queue, || warn(1)).len(), 1);
}

#[test]
fn information_is_never_left_out() {
    let (throttle, queue) = throttle(&Env::real());
    let lines = traced(&throttle, &queue, || (0..100).for_each(|drive| tracing::info!(drive, "opened")));
    assert_eq!(lines.len(), 100);
}

#[test]
fn a_full_queue_takes_no_more_and_says_so() {
    let (log, queue) = Log::new();
    (0..QUEUE_LINES + 7).for_each(|_| log.line(b"line\n"));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log/node.log");
    let mut sink = Sink::file(&Env::real(), &path).unwrap();
    queue.try_iter().for_each(|line| write_line(&mut sink, &line, &log.counts));
    let text = String::from_utf8(Env::real().files.read(&path).unwrap()).unwrap();
    assert!(text.lines().next().unwrap().ends_with("lines could not be written: count=7"), "{text}");
    assert_eq!(text.lines().count(), QUEUE_LINES + 1);
}

/// A file on a disk that is full until the flag is cleared.
struct Full(AtomicBool, Mutex<Vec<u8>>);

impl base::env::File for Full {
    fn read_at(&self, _buffer: &mut [u8], _offset: u64) -> std::io::Result<()> {
        unreachable!("a log is not read")
    }
    fn write_at(&self, bytes: &[u8], offset: u64) -> std::io::Result<()> {
        let mut content = self.1.lock().unwrap();
        content.truncate(offset as usize);
        if self.0.load(Ordering::Relaxed) {
            content.extend(&bytes[..bytes.len() / 2]);
            return Err(std::io::ErrorKind::StorageFull.into());
        }
        content.extend(bytes);
        Ok(())
    }
    fn sync_data(&self) -> std::io::Result<()> {
        Ok(())
    }
    fn len(&self) -> std::io::Result<u64> {
        Ok(0)
    }
    fn set_len(&self, _len_bytes: u64) -> std::io::Result<()> {
        Ok(())
    }
    fn allocate(&self, _len_bytes: u64) -> std::io::Result<()> {
        Ok(())
    }
    fn punch(&self, _offset: u64, _len_bytes: u64) -> std::io::Result<()> {
        Ok(())
    }
    fn try_lock(&self) -> std::io::Result<()> {
        Ok(())
    }
    fn unlock(&self) -> std::io::Result<()> {
        Ok(())
    }
    fn raw_fd(&self) -> Option<std::os::fd::RawFd> {
        None
    }
}

#[test]
fn lines_that_a_full_disk_does_not_take_are_counted_and_leave_no_torn_line() {
    let file = Arc::new(Full(AtomicBool::new(true), Mutex::default()));
    let mut sink = Sink::File { file: file.clone(), at: 0 };
    let counts = Counts::default();
    (0..3).for_each(|_| write_line(&mut sink, b"lost\n", &counts));
    file.0.store(false, Ordering::Relaxed);
    write_line(&mut sink, b"kept\n", &counts);
    let text = String::from_utf8(file.1.lock().unwrap().clone()).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(lines[0].ends_with("lines could not be written: count=3"), "{text}");
    assert_eq!(lines[1], "kept");
}

/// As in a node whose parent has ended and whose disk is full: every write fails.
#[test]
fn a_panic_ends_the_process_though_nothing_can_be_written() {
    if std::env::var_os(CHILD).is_some() {
        let file = Arc::new(Full(AtomicBool::new(true), Mutex::default()));
        let log = Log::start(&Env::real(), Sink::File { file, at: 0 });
        log.abort_on_panic();
        tracing::warn!("a line that cannot be written");
        let thread = spawn_thread("panics", || panic!("as it must"));
        let _ = thread.join();
        // Reached only if the panic did not end the process.
        std::process::exit(0);
    }
    let this = std::env::current_exe().unwrap();
    let name = "log::tests::a_panic_ends_the_process_though_nothing_can_be_written";
    let mut child = Command::new(this);
    child.args(["--exact", name, "--nocapture"]).env(CHILD, "1");
    let mut child = child.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    let status = child.wait().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(6), "{status}");
}
