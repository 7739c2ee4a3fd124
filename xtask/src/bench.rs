//! `cargo xtask bench`: the speed of Forebay beside a plain directory on the same disk and an empty FUSE filesystem.
//!
//! All are measured in one run, one after another, by the same loops. Ratios between them carry over to other machines
//! better than absolute figures. Each figure has the CPU time of the process and the load of the machine beside it.
#![allow(clippy::disallowed_methods, reason = "a measurement needs real time, threads and files")]

mod aims;
pub(crate) mod latency;
pub(crate) mod meter;
mod names;
mod table;
pub(crate) mod workload;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::Pid;

use crate::arguments::Arguments;
use crate::node::{Drives, Node, NodeOptions};
use meter::Figure;
use workload::Part;

pub(crate) const USAGE: &str =
    "bench --dir DIR [--forebay BINARY] [--profiles 1+0,r2,4+2] [--parts data,fsync,names,tree,creates] [--only WORD]
      [--mount-options LIST] [--given NAME=PATH=PID+PID,...] [--jobs 1,4,16] [--quick] [--json]";

/// Drives of every measured node, so that only the profile differs.
const DRIVES: u32 = 6;

/// The amount of work.
#[derive(Debug, Clone)]
pub(crate) struct Scale {
    /// Size of the file for sequential and random access, in bytes.
    pub(crate) file_bytes: u64,
    /// Duration of each loop that has no natural end.
    pub(crate) time: Duration,
    /// Names made by a storm of one or four jobs; with more, each makes as many as one of four.
    pub(crate) names: u64,
    /// The numbers of jobs of storms of names and of durable writes.
    pub(crate) jobs: Vec<u64>,
    /// Files of the unpacked tree.
    pub(crate) tree_files: usize,
    drive_size: &'static str,
}

const JOBS: &str = "1,4,16";

impl Scale {
    fn full(jobs: Vec<u64>) -> Self {
        let (file_bytes, time, drive_size) = (1 << 30, Duration::from_secs(5), "2G");
        Self { file_bytes, time, names: 5000, jobs, tree_files: 10_000, drive_size }
    }

    fn quick(jobs: Vec<u64>) -> Self {
        let (file_bytes, time, drive_size) = (128 << 20, Duration::from_millis(700), "512M");
        Self { file_bytes, time, names: 500, jobs, tree_files: 500, drive_size }
    }
}

/// A measured filesystem.
enum Kind {
    /// A directory on the disk that the other subjects use, too.
    Plain,
    Null(Child),
    Node(Node),
    /// What somebody else has mounted, and all processes that serve it, at other machines too.
    Given(Vec<Pid>),
}

pub(crate) struct Subject {
    name: String,
    root: PathBuf,
    kind: Kind,
}

impl Subject {
    fn plain(directory: &Path) -> Result<Self> {
        let root = directory.join("plain");
        std::fs::create_dir(&root)?;
        Ok(Self { name: "ext4".to_owned(), root, kind: Kind::Plain })
    }

    fn null(directory: &Path, name: &str, transport: &str) -> Result<Self> {
        let root = directory.join(name);
        std::fs::create_dir(&root)?;
        let before = rustix::fs::stat(&root)?.st_dev;
        let child = Command::new(std::env::current_exe()?)
            .arg("nullfs")
            .arg(&root)
            .arg(transport)
            .stdin(Stdio::null())
            .spawn()
            .context("start nullfs")?;
        let subject = Self { name: name.to_owned(), root: root.clone(), kind: Kind::Null(child) };
        let deadline = Instant::now() + Duration::from_secs(10);
        while rustix::fs::stat(&root)?.st_dev == before {
            ensure!(Instant::now() < deadline, "nullfs is not mounted");
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(subject)
    }

    fn node(directory: &Path, options: &NodeOptions) -> Result<Self> {
        let name = options.profile.clone();
        let directory = directory.join(name.replace(['+', '/'], "-"));
        let node = Node::create(options, &directory, &directory.join("mnt"))?;
        Ok(Self { name, root: node.mount().to_path_buf(), kind: Kind::Node(node) })
    }

    /// `NAME=PATH=PID+PID`.
    fn given(text: &str) -> Result<Self> {
        let parts: Vec<&str> = text.split('=').collect();
        let [name, root, pids] = parts[..] else { bail!("not NAME=PATH=PID+PID: {text}") };
        let pid = |pid: &str| Pid::from_raw(pid.parse().ok()?);
        let pids = pids.split('+').map(|text| pid(text).with_context(|| format!("no process: {text}")));
        let kind = Kind::Given(pids.collect::<Result<_>>()?);
        Ok(Self { name: name.to_owned(), root: PathBuf::from(root), kind })
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The processes that serve it. Their CPU time is counted.
    fn pids(&self) -> Vec<Pid> {
        match &self.kind {
            Kind::Plain => Vec::new(),
            Kind::Null(child) => i32::try_from(child.id()).ok().and_then(Pid::from_raw).into_iter().collect(),
            Kind::Node(node) => node.pid().into_iter().collect(),
            Kind::Given(pids) => pids.clone(),
        }
    }

    /// Drops the caches of the kernel and of the process, if that may be started anew.
    pub(crate) fn make_cold(&self) -> Result<()> {
        if let Kind::Node(node) = &self.kind {
            node.stop()?;
            node.start()?;
        }
        rustix::fs::sync();
        std::fs::write("/proc/sys/vm/drop_caches", "3").context("drop caches; this needs root")
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        if let Kind::Null(child) = &mut self.kind {
            let _ = rustix::mount::unmount(&self.root, rustix::mount::UnmountFlags::DETACH);
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Measures a node for each profile.
fn measure_profiles(
    directory: &Path,
    arguments: &Arguments,
    scale: &Scale,
    measure: &mut dyn FnMut(Subject) -> Result<()>,
) -> Result<()> {
    let profiles = arguments.text("profiles").unwrap_or("1+0,r2,4+2");
    for profile in profiles.split(',').filter(|name| !name.is_empty()) {
        let options = NodeOptions {
            binary: PathBuf::from(arguments.text("forebay").unwrap_or("target/release/forebay")),
            profile: profile.to_owned(),
            drives: Drives::Files { count: DRIVES, size: scale.drive_size.to_owned() },
            memory_mib: None,
            mount_options: arguments.text("mount-options").unwrap_or_default().to_owned(),
        };
        match Subject::node(directory, &options) {
            Ok(subject) => {
                measure(subject)?;
                std::fs::remove_dir_all(directory.join(profile.replace(['+', '/'], "-")))?;
            }
            Err(error) => eprintln!("FAIL {profile}: {error:#}"),
        }
    }
    Ok(())
}

/// Runs the subcommand.
pub(crate) fn run(arguments: &[&str]) -> Result<()> {
    let arguments = Arguments::parse(
        arguments,
        &["dir", "forebay", "profiles", "parts", "only", "mount-options", "given", "jobs"],
        &["quick", "json"],
    )
    .with_context(|| format!("usage: {USAGE}"))?;
    let directory = PathBuf::from(arguments.text("dir").context("--dir is missing")?);
    let jobs = arguments.text("jobs").unwrap_or(JOBS).split(',').map(str::parse);
    let jobs = jobs.collect::<Result<_, _>>().context("--jobs are numbers")?;
    let scale = if arguments.is_set("quick") { Scale::quick(jobs) } else { Scale::full(jobs) };
    let parts = arguments.text("parts").map_or_else(|| Ok(Part::ALL.to_vec()), Part::list)?;
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or_default();
    eprintln!("load of the machine before the start: {load}; other work distorts what follows");
    let archive = names::pack_tree(&directory, scale.tree_files)?;
    let mut columns: Vec<(String, Vec<Figure>)> = Vec::new();
    let mut measure = |subject: Subject| -> Result<()> {
        eprintln!("measuring {}", subject.name);
        let mut meter = meter::Meter::new(&directory, arguments.text("only"))?;
        if let Err(error) = workload::run(&parts, &subject, &scale, &archive, &mut meter) {
            // The other columns are still of use.
            eprintln!("FAIL {}: {error:#}", subject.name);
        }
        columns.push((subject.name.clone(), meter.figures()));
        if matches!(subject.kind, Kind::Plain) {
            std::fs::remove_dir_all(&subject.root)?;
        }
        Ok(())
    };
    match arguments.text("given") {
        Some(given) => given.split(',').try_for_each(|text| measure(Subject::given(text)?))?,
        None => {
            measure(Subject::plain(&directory)?)?;
            measure(Subject::null(&directory, "null", "device")?)?;
            // Kernels offer it only if it is switched on.
            if std::fs::write("/sys/module/fuse/parameters/enable_uring", "Y").is_ok() {
                measure(Subject::null(&directory, "null-uring", "uring")?)?;
            }
            measure_profiles(&directory, &arguments, &scale, &mut measure)?;
        }
    }
    if arguments.is_set("json") {
        println!("{}", table::json(&columns));
    } else {
        print!("{}", table::text(&columns));
    }
    Ok(())
}
