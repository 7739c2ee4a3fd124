//! The command line. Every command prints text for people, or with `--json` the same for programs.

mod args;
mod audit;
mod balancing;
mod blobs;
mod checks;
mod clusters;
mod drives;
mod events;
mod filesystem_groups;
mod filesystems;
mod fsck;
mod ledgers;
mod logs;
mod meta;
mod nodes;
mod output;
mod plan;
mod progress;
mod start;
mod status;
mod stores;
mod tiers;
mod tree;
mod upgrade;
mod users;
mod verification;

use std::collections::BTreeSet;
use std::future::Future;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::pin::Pin;
use std::process::ExitCode;
use std::time::Duration;

use admin::{AdminClient, BalanceFilesystem, CreateFilesystem, SetNodes};
use anyhow::{Context, Result};
use base::env::Env;
use tokio::runtime::Runtime;

pub(crate) use args::Cli;
use args::{AuditCommand, CapacityCommand, Command, FsCommand, LimitArgs, NodeList, ProfileCommand};

use crate::node::{NodeDir, is_locked};

/// How long a start waits until the drives of its node are in use, and how often it looks.
const DRIVES_PATIENCE: Duration = Duration::from_secs(10);
const DRIVES_LOOK: Duration = Duration::from_millis(100);
/// How long a process that has a node's directory may take until it answers.
const BEGINNING_PATIENCE: Duration = Duration::from_secs(5);

/// Runs one command.
pub(crate) fn run(cli: Cli) -> Result<ExitCode> {
    match cli.command {
        Command::Check(args) => Ok(checks::check(&args)),
        Command::Fsck { dir, json } => Ok(fsck::fsck(&dir, json.into())),
        Command::Status { dir, json } => status::status(&dir, json.into()),
        command => run_command(command).map(|()| ExitCode::SUCCESS),
    }
}

fn run_command(command: Command) -> Result<()> {
    match command {
        Command::Check(_) | Command::Fsck { .. } | Command::Status { .. } => {
            unreachable!("they have exit statuses of their own")
        }
        Command::Start(args) => start::start(*args),
        Command::Metrics { dir } => status::metrics(&dir),
        Command::Join(args) => nodes::join(args),
        Command::Node(command) => nodes::node(command),
        Command::S3(command) => nodes::s3(command),
        Command::Upgrade(command) => upgrade::upgrade(command),
        Command::Token(command) => nodes::token(command),
        Command::Stop { dir, keep_mounts } => start::stop(&dir, keep_mounts),
        Command::Mount { dir, path, options, fs, json } => {
            filesystems::mount(&dir, path, options, &fs, json.into())
        }
        Command::MountProcess { spec } => crate::mount::serve(&spec),
        Command::Umount { dir, fs, json } => filesystems::unmount(&dir, &fs, json.into()),
        Command::Fs(command) => filesystem(command),
        Command::Drive(command) => drives::drive(command),
        Command::Log(command) => logs::log(command),
        Command::Ledger(command) => ledgers::ledger(command),
        Command::Client(command) => nodes::client(command),
        Command::Cluster(command) => clusters::cluster(command),
        Command::Meta(command) => meta::meta(command),
        Command::User(command) => users::user(command),
        Command::Key(command) => users::key(command),
        Command::Policy(command) => users::policy(command),
        Command::Blob(command) => blobs::blob(command),
        Command::Store(command) => stores::store(command),
        Command::Tier(command) => tiers::tier(command),
        Command::Audit(AuditCommand::Tail { dir, lines, follow, json }) => {
            audit::tail(&dir, lines, follow, json.into())
        }
        Command::Events(args) => events::events(&args.dir, &args),
        Command::Profile(ProfileCommand::Explain { profile, domains, json }) => {
            plan::explain(profile, domains, json.into())
        }
        Command::Capacity(CapacityCommand::Plan { raw, nodes, profile, spares, json }) => {
            plan::capacity(raw, nodes, profile, spares, json.into())
        }
        Command::Upkeep { dir, pause, resume, rate, keep_p99_below, json } => {
            let paused = (pause || resume).then_some(pause);
            let keep_p99_below_us = keep_p99_below.map(|limit| limit.0);
            let request = admin::SetUpkeep { paused, rate_bytes_per_s: rate, keep_p99_below_us };
            status::upkeep(&dir, request, json.into())
        }
        Command::Sync { path } => filesystems::sync(&path),
        Command::Why { path, json } => filesystems::why(&path, json.into()),
    }
}

fn filesystem(command: FsCommand) -> Result<()> {
    match command {
        FsCommand::Create { dir, name, profile, limits, group, placement, nodes, json } => {
            let (profile, LimitArgs { size, ssd }) = (profile.to_string(), limits);
            let placement = placement.map(Into::into).unwrap_or_default();
            let nodes = nodes.map_or_else(BTreeSet::new, |NodeList(nodes)| nodes);
            let request =
                CreateFilesystem { name, profile, size_bytes: size, ssd_bytes: ssd, group, placement, nodes };
            filesystems::create(&dir, &request, json.into())
        }
        FsCommand::List { dir, json } => filesystems::list(&dir, json.into()),
        FsCommand::Set { dir, name, nodes: Some(NodeList(nodes)), dry_run, json, .. } => {
            balancing::set_nodes(&dir, &name, &SetNodes { nodes, dry_run }, json.into())
        }
        FsCommand::Set { dir, name, profile, limits, group, placement, json, .. } => {
            let changes = filesystems::Changes { limits, group, placement, profile };
            filesystems::set(&dir, &name, changes, json.into())
        }
        FsCommand::Balance { dir, name, dry_run, abort, json } => {
            balancing::balance(&dir, &name, BalanceFilesystem { dry_run, abort }, json.into())
        }
        FsCommand::Verify { dir, name, now, json } => verification::verify(&dir, &name, now, json.into()),
        FsCommand::Group(command) => filesystem_groups::group(command),
        FsCommand::Attach(args) => tiers::attach(args),
        FsCommand::Detach { dir, name, wait, json } => tiers::detach(&dir, &name, wait.into(), json.into()),
        FsCommand::Show { dir, name, json } => filesystems::show(&dir, &name, json.into()),
    }
}

/// Calls the node in `dir`.
fn ask<T, F>(dir: &Path, call: impl FnOnce(AdminClient) -> F) -> Result<T>
where
    F: Future<Output = Result<T, admin::CallError>>,
{
    let node_dir = NodeDir::new(dir);
    let socket = node_dir.socket();
    wait_for_beginning(&node_dir, socket.as_path());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let client = AdminClient::new(socket.as_path());
    block_on(&runtime, call(client)).map_err(|error| match error {
        admin::CallError::NotRunning { .. } => {
            let (shown, log) = (node_dir.root().display(), node_dir.log_file());
            match is_locked(&env(), &node_dir) {
                true => anyhow::anyhow!(
                    "the node in {shown} does not answer yet: it starts (see {})",
                    log.display()
                ),
                false => anyhow::anyhow!("no node runs in {shown}: start it with `forebay start {shown}`"),
            }
        }
        other => anyhow::Error::new(other),
    })
}

/// Waits while a process has the directory and does not answer yet: it starts, or begins anew.
fn wait_for_beginning(dir: &NodeDir, socket: &Path) {
    let (env, begun_ns) = (env(), env().clock.boot_ns());
    let is_late = || Duration::from_nanos(env.clock.boot_ns() - begun_ns) >= BEGINNING_PATIENCE;
    while UnixStream::connect(socket).is_err() && is_locked(&env, dir) && !is_late() {
        std::thread::park_timeout(DRIVES_LOOK);
    }
}

/// Runs work that this process does itself, without a node. Tasks that it has left behind are not waited for.
fn run_here<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let done = block_on(&runtime, work);
    runtime.shutdown_background();
    done
}

/// Waits for work. The code of the runtime is compiled once, and not for each kind of work.
fn block_on<T>(runtime: &Runtime, work: impl Future<Output = T>) -> T {
    fn wait(runtime: &Runtime, work: Pin<&mut dyn Future<Output = ()>>) {
        runtime.block_on(work);
    }
    let mut done = None;
    wait(runtime, std::pin::pin!(async { done = Some(work.await) }));
    done.expect("work that has ended has a result")
}

/// The picture of the cluster that the node in `dir` has.
fn picture(dir: &Path) -> Result<admin::NodeStatus> {
    of_cluster(ask(dir, |client| async move { client.status().await })?)
}

/// Refuses what a node says that is alone: it knows nothing of the cluster.
fn of_cluster(status: admin::NodeStatus) -> Result<admin::NodeStatus> {
    match status.problems.first() {
        Some(problem) if status.alone => anyhow::bail!("{problem}"),
        _ => Ok(status),
    }
}

/// The state of the cluster, once the owner of the metadata uses the drives that a node has just opened. A drive that stays away is
/// not waited for for ever.
fn status_with_drives(dir: &Path, node: u32) -> Result<admin::NodeStatus> {
    ask(dir, |client| async move {
        let begun = tokio::time::Instant::now();
        loop {
            let status = match client.status().await {
                Ok(status) => status,
                // It begins anew just now, because the logs have moved or another node owns the metadata.
                Err(_) if begun.elapsed() < DRIVES_PATIENCE => {
                    tokio::time::sleep(DRIVES_LOOK).await;
                    continue;
                }
                Err(error) => return Err(error),
            };
            let lacks = status.drives.iter().any(|drive| drive.node == node && drive.state == "missing");
            if !lacks || begun.elapsed() >= DRIVES_PATIENCE {
                return Ok(status);
            }
            tokio::time::sleep(DRIVES_LOOK).await;
        }
    })
}

fn env() -> Env {
    Env::real()
}

fn absolute(path: &Path) -> Result<String> {
    let path = std::path::absolute(path).with_context(|| format!("cannot resolve {}", path.display()))?;
    path.into_os_string()
        .into_string()
        .map_err(|path| anyhow::anyhow!("path is not UTF-8: {}", path.display()))
}
