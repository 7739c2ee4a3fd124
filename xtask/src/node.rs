//! A node under test, driven by the command line, as users do.
#![allow(clippy::disallowed_methods, reason = "a test of real processes needs real time and files")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal};
use serde_json::Value;

/// Numbers the commands of this process.
static RUNS: AtomicU64 = AtomicU64::new(0);

/// How long a command or the death of a process may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// Options of a node's first start.
#[derive(Debug, Clone)]
pub(crate) struct NodeOptions {
    pub(crate) binary: PathBuf,
    pub(crate) profile: String,
    pub(crate) drives: Drives,
    /// Memory that it may use; `None`: chosen by the size of the machine.
    pub(crate) memory_mib: Option<u64>,
    /// How it is mounted.
    pub(crate) mount_options: String,
}

/// Drives of a new node.
#[derive(Debug, Clone)]
pub(crate) enum Drives {
    Files { count: u32, size: String },
    Devices(Vec<PathBuf>),
}

/// A node in a directory of its own. Stopped and unmounted when dropped.
#[derive(Debug)]
pub(crate) struct Node {
    binary: PathBuf,
    directory: PathBuf,
    mount: PathBuf,
    /// Process id of the last start. It is kept here because `node.json` may be on a disk that is gone.
    pid: Mutex<Option<Pid>>,
}

impl Node {
    /// Makes and starts a node in `directory`, which must not exist, mounted at `mount`.
    pub(crate) fn create(options: &NodeOptions, directory: &Path, mount: &Path) -> Result<Self> {
        let node = Self {
            binary: options.binary.clone(),
            directory: directory.to_path_buf(),
            mount: mount.to_path_buf(),
            pid: Mutex::new(None),
        };
        let mut command = node.command("start");
        match &options.drives {
            Drives::Files { count, size } => {
                command.args(["--drives", &count.to_string(), "--drive-size", size]);
            }
            Drives::Devices(paths) => {
                for path in paths {
                    command.arg("--drive").arg(path);
                }
            }
        }
        // Any free port, and another one if it is taken at a later start: several crash runs may go on at once.
        command.args(["--s3", "127.0.0.1:0", "--profile", &options.profile]).arg("--mount").arg(mount);
        command.args(["--mount-options", &options.mount_options]);
        if let Some(memory_mib) = options.memory_mib {
            command.arg("--memory").arg(format!("{memory_mib}MiB"));
        }
        run(&mut command)?;
        node.remember_pid()?;
        Ok(node)
    }

    /// Starts it again with the same settings.
    pub(crate) fn start(&self) -> Result<()> {
        run(&mut self.command("start"))?;
        self.remember_pid()?;
        Ok(())
    }

    pub(crate) fn stop(&self) -> Result<()> {
        run(&mut self.command("stop"))
    }

    pub(crate) fn mount(&self) -> &Path {
        &self.mount
    }

    /// The process of the last start.
    pub(crate) fn pid(&self) -> Result<Pid> {
        self.pid.lock().expect("no panic").context("the node was never started")
    }

    fn remember_pid(&self) -> Result<()> {
        *self.pid.lock().expect("no panic") = Some(self.read_pid()?);
        Ok(())
    }

    fn read_pid(&self) -> Result<Pid> {
        let path = self.directory.join("node.json");
        let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        let json: Value = serde_json::from_str(&text).context("parse node.json")?;
        let pid = json["pid"].as_i64().context("pid in node.json")?;
        Pid::from_raw(i32::try_from(pid)?).context("pid in node.json is a process")
    }

    /// Kills the process and waits until it is gone. The dead mount stays.
    pub(crate) fn kill(&self) -> Result<()> {
        let pid = self.pid()?;
        rustix::process::kill_process(pid, Signal::KILL).context("kill the node")?;
        let deadline = Instant::now() + PATIENCE;
        while is_alive(pid) {
            ensure!(Instant::now() < deadline, "node survives SIGKILL: pid={pid:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Checks the metadata of the node, which must be stopped.
    pub(crate) fn fsck(&self) -> Result<()> {
        run(&mut self.command("fsck"))
    }

    /// Whether this binary can check metadata.
    pub(crate) fn has_fsck(&self) -> bool {
        run(Command::new(&self.binary).args(["fsck", "--help"])).is_ok()
    }

    /// A report of the process for people: its threads and where they wait, and their stacks if gdb is installed.
    pub(crate) fn evidence(&self) -> String {
        let Ok(pid) = self.pid() else { return String::new() };
        let pid = pid.as_raw_pid().to_string();
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let read = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
        let lines = threads.map(|entry| entry.path()).map(|path| {
            format!("{} {} {}", path.display(), read(path.join("comm")), read(path.join("wchan")))
        });
        let mut text = lines.collect::<Vec<String>>().join("\n");
        let gdb = Command::new("gdb").args(["-p", &pid, "-batch", "-ex", "thread apply all bt 20"]).output();
        text += &gdb
            .map_or_else(|_| String::new(), |output| String::from_utf8_lossy(&output.stdout).into_owned());
        text
    }

    fn command(&self, verb: &str) -> Command {
        let mut command = Command::new(&self.binary);
        command.arg(verb).arg(&self.directory);
        command
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let pid = self.pid().ok().filter(|pid| runs_binary(*pid, &self.binary));
        if self.stop().is_err()
            && let Some(pid) = pid.filter(|pid| is_alive(*pid))
        {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
        let _ = rustix::mount::unmount(&self.mount, rustix::mount::UnmountFlags::DETACH);
    }
}

/// Whether the process still holds resources. A zombie does as long as other threads of it are dying.
pub(crate) fn is_alive(pid: Pid) -> bool {
    let pid = pid.as_raw_pid();
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name, which is in parentheses and may contain anything.
    let Some((_, rest)) = stat.rsplit_once(") ") else { return false };
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    !rest.starts_with('Z') || threads > 1
}

/// Whether the process runs `binary`: its id may belong to another program now.
fn runs_binary(pid: Pid, binary: &Path) -> bool {
    let running = std::fs::read_link(format!("/proc/{}/exe", pid.as_raw_pid()));
    running.is_ok_and(|running| running.file_name() == binary.file_name())
}

/// Runs a command to its end, with a deadline. Its output is in the error.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let shown = format!("{command:?}");
    // The output goes to a file, because a background process of the command may keep pipes open.
    let number = RUNS.fetch_add(1, Ordering::Relaxed);
    let log = std::env::temp_dir().join(format!("forebay-xtask-{}-{number}.log", std::process::id()));
    let file = std::fs::File::create(&log).context("create a log")?;
    command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
    let mut child = command.spawn().with_context(|| format!("run {shown}"))?;
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() > deadline {
            child.kill()?;
            child.wait()?;
            bail!("no end after {PATIENCE:?}: {shown}");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let output = std::fs::read_to_string(&log).unwrap_or_default();
    let _ = std::fs::remove_file(&log);
    ensure!(status.success(), "{shown}: {status}: {}", output.trim());
    Ok(())
}
