//! Looks at a machine for what makes a node slow or stops it: before trouble comes, and also where no node runs.

mod drives;
mod machine;
mod network;

use std::time::Duration;

use base::NodeId;
use base::env::Env;
use base::units::format_size;
use wire::cluster::{CheckParts, Finding, Grade, NodeAddresses};
use wire::link::Fabric;

use crate::engine::{Engine, EngineAddress};
use crate::identity::IdentityFiles;
use crate::node::NodeDir;

/// How long disks may take: longer than all that is measured there.
const DISK_PATIENCE: Duration = Duration::from_secs(20);
/// How long the engine may take to answer.
const ENGINE_PATIENCE: Duration = Duration::from_secs(5);
const ENGINE_LOOKS: usize = 11;
/// An engine that takes longer for an answer makes all changes of metadata slow.
const ENGINE_SLOW: Duration = Duration::from_millis(20);

/// The ways from a node to others.
pub(crate) struct Ways<'a> {
    pub(crate) fabric: &'a Fabric,
    pub(crate) here: NodeId,
    pub(crate) nodes: &'a [NodeAddresses],
}

/// Looks at this machine, and measures what is asked. Ways are measured if there are some.
pub(crate) async fn look(
    env: &Env,
    dir: &NodeDir,
    parts: CheckParts,
    ways: Option<Ways<'_>>,
) -> Vec<Finding> {
    let machine = in_background(env, dir, machine::look).await;
    let mut findings = machine.unwrap_or_else(|| vec![hangs("machine", "the disk of the node's directory")]);
    findings.extend(engine(env, dir).await);
    let mut drives = None;
    if parts.drives {
        let looked = in_background(env, dir, drives::look).await;
        let (found, bytes_per_s) = looked.unwrap_or_else(|| (vec![hangs("drives", "a drive")], None));
        findings.extend(found);
        drives = bytes_per_s;
    }
    if let Some(ways) = ways.filter(|_| parts.network) {
        findings.extend(network::look(env, ways, drives).await);
    }
    findings
}

/// Runs what waits for disks. `None`: it does not end, and goes on in the background.
async fn in_background<T: Send + 'static>(
    env: &Env,
    dir: &NodeDir,
    work: impl FnOnce(&Env, &NodeDir) -> T + Send + 'static,
) -> Option<T> {
    let (env, dir) = (env.clone(), dir.clone());
    let working = tokio::task::spawn_blocking(move || work(&env, &dir));
    tokio::time::timeout(DISK_PATIENCE, working).await.ok()?.ok()
}

fn hangs(code: &str, what: &str) -> Finding {
    problem(
        code,
        format!("{what} does not answer within {} s", DISK_PATIENCE.as_secs()),
        "what needs it waits as long",
        "look at the device and its cable (dmesg), and which process hangs there (ps -e -o stat,wchan,comm)",
    )
}

fn well(code: &str, found: impl Into<String>) -> Finding {
    let (cost, advice) = Default::default();
    Finding { grade: Grade::Ok, code: code.to_owned(), found: found.into(), cost, advice }
}

fn unknown(code: &str, found: impl Into<String>) -> Finding {
    Finding { grade: Grade::Unknown, ..well(code, found) }
}

fn warning(code: &str, found: impl Into<String>, cost: &str, advice: &str) -> Finding {
    let (cost, advice) = (cost.to_owned(), advice.to_owned());
    Finding { grade: Grade::Warning, cost, advice, ..well(code, found) }
}

fn problem(code: &str, found: impl Into<String>, cost: &str, advice: &str) -> Finding {
    Finding { grade: Grade::Problem, ..warning(code, found, cost, advice) }
}

fn per_second(bytes: u64) -> String {
    format!("{}/s", format_size(bytes))
}

/// Milliseconds with one digit behind the point, or microseconds.
pub(crate) fn shown(time: Duration) -> String {
    match time.as_micros() {
        micros if micros < 1000 => format!("{micros} us"),
        micros => format!("{}.{} ms", micros / 1000, micros % 1000 / 100),
    }
}

/// The median of some times.
fn median(mut times: Vec<Duration>) -> Option<Duration> {
    times.sort_unstable();
    times.get(times.len() / 2).copied()
}

/// How fast the engine agrees on an answer, if one has the logs.
async fn engine(env: &Env, dir: &NodeDir) -> Option<Finding> {
    let log = IdentityFiles::new(env, dir).membership().ok().flatten()?.log?;
    let address: EngineAddress = log.parse().ok()?;
    let measured = async {
        let engine = Engine::connect(env, dir, &address).await?;
        let mut times = Vec::new();
        for _ in 0..ENGINE_LOOKS {
            let begun_ns = env.clock.boot_ns();
            engine.is_free(0).await?;
            times.push(Duration::from_nanos(env.clock.boot_ns() - begun_ns));
        }
        anyhow::Ok(times)
    };
    let why = match tokio::time::timeout(ENGINE_PATIENCE, measured).await {
        Ok(Ok(times)) => return median(times).map(|time| answers_in(&address, time)),
        Ok(Err(error)) => format!("{error:#}"),
        Err(_) => format!("{address} does not answer within {} s", ENGINE_PATIENCE.as_secs()),
    };
    let cost =
        "while its members do not agree, nothing in the metadata changes, and after a while nothing is read";
    let advice = format!("see {}", address.how_to_look());
    Some(problem("engine", format!("the engine with the logs cannot be used: {why}"), cost, &advice))
}

fn answers_in(address: &EngineAddress, time: Duration) -> Finding {
    let found = format!("the engine with the logs answers in {}: {address}", shown(time));
    if time < ENGINE_SLOW {
        return well("engine", found);
    }
    let cost = "creating, renaming, removing and each first fsync of a file wait at least that long";
    warning("engine", found, cost, "give its members disks that sync faster, and a shorter way between them")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_short_texts() {
        assert_eq!(shown(Duration::from_micros(80)), "80 us");
        assert_eq!(shown(Duration::from_micros(1_250)), "1.2 ms");
        assert_eq!(shown(Duration::from_millis(30)), "30.0 ms");
    }

    #[test]
    fn the_median_of_none_is_none() {
        let ms = Duration::from_millis;
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![ms(9), ms(1), ms(2)]), Some(ms(2)));
    }
}
