//! The ways from a node to the others.

use std::time::Duration;

use base::env::Env;
use bytes::Bytes;
use futures_util::future::join_all;
use wire::cluster::{ClusterReply, ClusterRequest, ClusterService, Finding, NodeAddresses};
use wire::link::RemoteCluster;

use super::{Ways, median, per_second, problem, shown, warning, well};

/// Small messages that are timed.
const SMALL: usize = 21;
/// Large messages, how many are under way at a time, and for how long; less if there are many nodes.
const LARGE_BYTES: usize = 1 << 20;
const STREAMS: usize = 4;
const LASTS: Duration = Duration::from_millis(600);
const ALL: Duration = Duration::from_secs(15);
/// How long each message may take.
const PATIENCE: Duration = Duration::from_secs(2);
/// A way that takes longer makes each change of metadata slow.
const SLOW: Duration = Duration::from_millis(5);
/// Clocks that differ by more are named.
const CLOCK: Duration = Duration::from_millis(500);
/// A way that is this much slower than the median of all is named, in percent.
const SLOW_PERCENT: u64 = 50;

/// A way as it was measured.
struct Way {
    time: Duration,
    /// How far the other clock is ahead, and how exactly that is known.
    ahead_ns: i64,
    within: Duration,
    bytes_per_s: u64,
}

pub(super) async fn look(env: &Env, ways: Ways<'_>, drives: Option<u64>) -> Vec<Finding> {
    let others: Vec<&NodeAddresses> = ways.nodes.iter().filter(|node| node.node != ways.here).collect();
    let lasts = LASTS.min(ALL / u32::try_from(others.len().max(1)).unwrap_or(u32::MAX));
    let detours = ways.fabric.detours();
    let mut findings = Vec::new();
    let mut measured = Vec::new();
    for node in others {
        let name = format!("node {} ({})", node.node, node.addresses.join(" "));
        let peer = ways.fabric.peer(node.node).filter(|peer| peer.contact().borrow().is_there);
        let Some(peer) = peer else {
            findings.push(problem(
                "network",
                format!("{name} is not reached"),
                "its drives count as away, and what is written now is repaired later",
                "look whether it runs (forebay status), and at firewalls and routes to its addresses, TCP",
            ));
            continue;
        };
        if let Some((_, via)) = detours.iter().find(|(to, _)| *to == node.node) {
            findings.push(warning(
                "network",
                format!("{name} is reached through node {via} only"),
                "each message takes a longer way, and the node on it has the load",
                "look at firewalls and routes to its addresses, TCP",
            ));
        }
        match measure(env, &RemoteCluster::new(&peer), lasts).await {
            Ok(way) => measured.push((name, way)),
            Err(why) => findings.push(why.of(&name)),
        }
    }
    let mut speeds: Vec<u64> = measured.iter().map(|(_, way)| way.bytes_per_s).collect();
    speeds.sort_unstable();
    let usual = speeds.get(speeds.len() / 2).copied();
    for (name, way) in &measured {
        findings.extend(clock(name, way));
        findings.push(one(name, way, usual.unwrap_or(0)));
    }
    findings.extend(usual.zip(drives).map(|(network, drives)| ratio(network, drives)));
    findings
}

/// Why a way could not be measured.
enum Lost {
    /// Nothing came back.
    All,
    /// Small messages did, and large ones not.
    Large,
}

impl Lost {
    fn of(&self, name: &str) -> Finding {
        match self {
            Self::All => problem(
                "network",
                format!("{name} does not answer within {} s", PATIENCE.as_secs()),
                "programs that need its drives wait for each of these",
                "look at its load and at the network to it",
            ),
            Self::Large => problem(
                "mtu",
                format!("{name} answers small messages, and a large one not within {} s", PATIENCE.as_secs()),
                "data does not reach its drives",
                "let all interfaces and switches on the way have the same MTU (ping -M do -s 8972 ADDRESS), and look for losses",
            ),
        }
    }
}

async fn measure(env: &Env, way: &dyn ClusterService, lasts: Duration) -> Result<Way, Lost> {
    let mut times = Vec::new();
    let mut clocks = Vec::new();
    for _ in 0..SMALL {
        let (begun_ns, wall_ns) = (env.clock.boot_ns(), env.clock.wall_ns());
        let other_ns = probe(way, Bytes::new()).await.ok_or(Lost::All)?;
        let time = Duration::from_nanos(env.clock.boot_ns() - begun_ns);
        times.push(time);
        clocks.push((time, other_ns - (wall_ns + time.as_nanos() as i64 / 2)));
    }
    let large = Bytes::from(vec![0; LARGE_BYTES]);
    // Also opens the connection.
    probe(way, large.clone()).await.ok_or(Lost::Large)?;
    let begun_ns = env.clock.boot_ns();
    let until_ns = begun_ns + lasts.as_nanos() as u64;
    let streams = (0..STREAMS).map(|_| async {
        let mut bytes = 0;
        while env.clock.boot_ns() < until_ns {
            probe(way, large.clone()).await.ok_or(Lost::Large)?;
            bytes += LARGE_BYTES as u64;
        }
        Ok(bytes)
    });
    let sent: u64 = join_all(streams).await.into_iter().sum::<Result<u64, Lost>>()?;
    let took_ns = (env.clock.boot_ns() - begun_ns).max(1);
    let (within, ahead_ns) = clocks.into_iter().min().ok_or(Lost::All)?;
    Ok(Way {
        time: median(times).ok_or(Lost::All)?,
        ahead_ns,
        within,
        bytes_per_s: (u128::from(sent) * 1_000_000_000 / u128::from(took_ns)) as u64,
    })
}

/// Sends a message. Returns the wall clock of the other node.
async fn probe(way: &dyn ClusterService, body: Bytes) -> Option<i64> {
    match tokio::time::timeout(PATIENCE, way.ask(ClusterRequest::Probe { body })).await {
        Ok(Ok(ClusterReply::Probed { wall_ns })) => Some(wall_ns),
        _ => None,
    }
}

fn one(name: &str, way: &Way, usual: u64) -> Finding {
    let found = format!("{name} answers in {}, and takes {}", shown(way.time), per_second(way.bytes_per_s));
    if way.time > SLOW {
        let cost = "each change of metadata there and each small write to its drives takes that long";
        return warning(
            "network",
            found,
            cost,
            "nodes of one cluster should be in one building: look at the way",
        );
    }
    if way.bytes_per_s * 100 < usual * SLOW_PERCENT {
        let found = format!("{found}, where others take {}", per_second(usual));
        let cost = "each stripe is as slow as the way to its slowest drive";
        return warning(
            "network",
            found,
            cost,
            "look at the speed of its link (ethtool), its cable, and for losses (ip -s link)",
        );
    }
    well("network", found)
}

fn clock(name: &str, way: &Way) -> Option<Finding> {
    let off = Duration::from_nanos(way.ahead_ns.unsigned_abs());
    let (ahead, seconds) = (if way.ahead_ns > 0 { "ahead of" } else { "behind" }, off.as_secs_f64());
    (off > CLOCK + way.within).then(|| {
        warning(
            "clock",
            format!("the clock of {name} is {seconds:.1} s {ahead} the one here"),
            "times of files and lines of logs do not compare; S3 requests fail when a clock is off by 15 minutes",
            "run a client of NTP on both (systemd-timesyncd, chrony)",
        )
    })
}

/// Network and drives beside each other: what is read or written moves over both.
fn ratio(network: u64, drives: u64) -> Finding {
    let found = format!(
        "the network takes {} to a node, and the drives here read {} at once",
        per_second(network),
        per_second(drives)
    );
    if network >= drives {
        return well("balance", found);
    }
    let cost = "the network is the limit before the drives are";
    warning(
        "balance",
        found,
        cost,
        "a faster or a second link per node; twice what the drives read is a good measure",
    )
}

#[cfg(test)]
mod tests {
    use wire::BoxFuture;
    use wire::cluster::{Declined, Grade};

    use super::*;

    /// A node that answers messages up to a size, with a clock that is ahead.
    struct Answers {
        env: Env,
        most: usize,
        ahead_ns: i64,
    }

    impl ClusterService for Answers {
        fn ask(&self, request: ClusterRequest) -> BoxFuture<'_, Result<ClusterReply, Declined>> {
            Box::pin(async move {
                let ClusterRequest::Probe { body } = request else { return Err(Declined("no".to_owned())) };
                if body.len() > self.most {
                    std::future::pending::<()>().await;
                }
                tokio::task::yield_now().await;
                Ok(ClusterReply::Probed { wall_ns: self.env.clock.wall_ns() + self.ahead_ns })
            })
        }
    }

    async fn measured(most: usize, ahead_ns: i64) -> Result<Way, Lost> {
        let env = Env::real();
        measure(&env, &Answers { env: env.clone(), most, ahead_ns }, Duration::from_millis(20)).await
    }

    #[tokio::test]
    async fn a_way_is_measured_with_the_other_clock() {
        let way = measured(LARGE_BYTES, 3_000_000_000).await.ok().unwrap();
        assert!(way.bytes_per_s > 0);
        assert_eq!(
            clock("it", &way).map(|it| it.found),
            Some("the clock of it is 3.0 s ahead of the one here".to_owned())
        );
        let way = measured(LARGE_BYTES, -100_000_000).await.ok().unwrap();
        assert!(clock("it", &way).is_none(), "{}", way.ahead_ns);
    }

    #[tokio::test]
    async fn large_messages_that_are_lost_are_told_from_a_node_that_is_away() {
        assert!(matches!(measured(LARGE_BYTES - 1, 0).await, Err(Lost::Large)));
        assert!(matches!(measured(0, 0).await, Err(Lost::Large)));
        let (time, ahead_ns, within) = (Duration::from_micros(200), 0, Duration::ZERO);
        let way = |bytes_per_s| Way { time, ahead_ns, within, bytes_per_s };
        assert_eq!(one("it", &way(500), 1000).grade, Grade::Ok);
        assert_eq!(one("it", &way(499), 1000).grade, Grade::Warning);
        assert_eq!(
            one("it", &Way { time: Duration::from_millis(6), ..way(1000) }, 1000).grade,
            Grade::Warning
        );
        assert_eq!((ratio(10, 10).grade, ratio(9, 10).grade), (Grade::Ok, Grade::Warning));
    }
}
