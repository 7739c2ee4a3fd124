//! The engine with the logs of the ledgers is lost for good, or went backwards. A node that has followed the ledgers begins their logs
//! anew, in another engine or at another place, behind the end of its own local stores. What came after that end is lost.
//!
//! The number of recoveries is in the record of the cluster, in the place of each node, and in the epochs of owners from then on. By
//! it, nodes that know the lost logs only give them up when they hear of the new ones.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use base::env::Env;
use base::{ClusterId, LedgerId, NodeId};
use control::{CONTROL_LEDGER, Cluster, Control, Plan};
use futures_util::future::join_all;
use meta::history::{Evidence, Older};
use meta::log::StaleCopies;
use meta::state::{Applied, State as _, WholeLog};
use serde::Serialize;
use tokio::runtime::Handle;
use wire::cluster::{
    ClusterReply, ClusterRequest, ClusterService as _, EngineCondition, EngineSeat, HostReply, HostRequest,
    HostService as _, NodeAddresses, StoredLedger,
};
use wire::link::{RemoteCluster, RemoteHost};

use crate::engine::{Engine, EngineAddress, Supervised, new_authority};
use crate::identity::{IdentityFiles, Membership};
use crate::node::{CONTROL_CACHE_BYTES, MetaDirs, Network, NodeDir, member_of, prepare_dir};

/// How long the engine may take until it counts as lost.
const LOST_AFTER: Duration = Duration::from_secs(15);
/// How long another node may take to say what it has.
const ANSWER_PATIENCE: Duration = Duration::from_secs(5);
/// How long the new engine may take until it works, and the pause between two looks.
const ENGINE_PATIENCE: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(300);

/// A recovery counts more than moves that this node may have missed.
const RECOVERY_STEP: u32 = 256;

/// What an operator decides.
pub(crate) struct RecoverOptions {
    /// Where the logs are to be; `None`: in an engine of the same kind.
    pub(crate) log: Option<EngineAddress>,
    /// Nodes that do not answer and are not waited for.
    pub(crate) without: Vec<NodeId>,
    /// Also if another node has more.
    pub(crate) force: bool,
    /// It is to be done; otherwise it is only looked what would be done.
    pub(crate) yes: bool,
}

/// A ledger as a node has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct KnownLedger {
    /// Its filesystem, or `cluster`.
    pub(crate) name: String,
    /// The last entry.
    pub(crate) seq: u64,
}

/// What another node has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct OtherNode {
    /// Its number.
    pub(crate) node: u32,
    /// What it has; `None`: it does not answer.
    pub(crate) ledgers: Option<Vec<KnownLedger>>,
}

/// What was found, and done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Recovery {
    /// This node.
    pub(crate) node: u32,
    /// Where the logs were.
    pub(crate) lost: String,
    /// Why they are lost.
    pub(crate) why: String,
    /// What this node has. What came later is lost.
    pub(crate) ledgers: Vec<KnownLedger>,
    /// What others have.
    pub(crate) others: Vec<OtherNode>,
    /// Where the logs are now; `None`: nothing was done.
    pub(crate) log: Option<String>,
}

/// The local stores of a node, without their logs.
pub(super) struct LocalCopy {
    cluster: Cluster,
    ledgers: BTreeMap<LedgerId, Applied>,
}

impl LocalCopy {
    /// Reads them; `None`: there are none. Must not run on a thread of the runtime: it waits for disks.
    pub(super) fn read(ledgers: &MetaDirs) -> Result<Option<Self>> {
        let Some(control) = ledgers.store(CONTROL_LEDGER)? else { return Ok(None) };
        let mut found = BTreeMap::from([(CONTROL_LEDGER, control.newest()?)]);
        if found[&CONTROL_LEDGER] == Applied::default() {
            bail!("the copy of the metadata of the cluster on this node is not complete");
        }
        let cluster = Cluster::of(&Control::view_only(control).view()?)?;
        for record in cluster.filesystems.values() {
            let newest = ledgers.store(record.ledger)?.map(|state| state.newest()).transpose()?;
            found.insert(record.ledger, newest.unwrap_or_default());
        }
        Ok(Some(Self { cluster, ledgers: found }))
    }

    /// How far they have come.
    pub(super) fn stored(&self) -> Vec<StoredLedger> {
        let stored = self.ledgers.iter();
        stored.map(|(ledger, at)| StoredLedger { ledger: *ledger, seq: at.seq, epoch: at.epoch }).collect()
    }

    /// Fails if one of them is empty, or is a part of a copy.
    fn check(&self) -> Result<()> {
        let incomplete = self.ledgers.iter().find(|(_, at)| **at == Applied::default());
        match incomplete {
            Some((ledger, _)) => bail!("the copy of {} on this node is not complete", self.name_of(*ledger)),
            None => Ok(()),
        }
    }

    fn name_of(&self, ledger: LedgerId) -> String {
        let filesystem = self.cluster.filesystems.values().find(|record| record.ledger == ledger);
        filesystem.map_or_else(|| "cluster".to_owned(), |record| record.name.clone())
    }

    fn named(&self, stored: &[StoredLedger]) -> Vec<KnownLedger> {
        let known =
            |stored: &StoredLedger| KnownLedger { name: self.name_of(stored.ledger), seq: stored.seq.0 };
        stored.iter().map(known).collect()
    }

    /// A ledger of which another node has more.
    fn is_behind(&self, other: &[StoredLedger]) -> Option<StoredLedger> {
        let is_more = |other: &&StoredLedger| {
            let own = self.ledgers.get(&other.ledger).copied().unwrap_or_default();
            // After a takeover, a lower number may be of a later epoch only if the log went backwards before.
            (other.epoch, other.seq) > (own.epoch, own.seq)
        };
        other.iter().find(is_more).copied()
    }
}

/// The parts of a recovery.
struct Recovering<'a> {
    env: &'a Env,
    dir: &'a NodeDir,
    membership: Membership,
    known: EngineAddress,
    ledgers: MetaDirs,
    copy: LocalCopy,
}

/// Looks what a recovery would do, and does it if that is asked for. The node must not run.
pub(crate) async fn recover(env: &Env, dir: &NodeDir, options: RecoverOptions) -> Result<Recovery> {
    let identity = IdentityFiles::new(env, dir);
    let shown = dir.root().display();
    let in_files = || {
        format!(
            "the logs of the cluster in {shown} are not in an engine: if they are damaged, see `forebay meta` and \
             `forebay start --help`"
        )
    };
    let membership = identity.membership()?.with_context(in_files)?;
    let known: EngineAddress = membership.log.as_deref().with_context(in_files)?.parse()?;
    let _lock = prepare_dir(env, dir)?;
    let ledgers = MetaDirs::load(env, dir, &[], StaleCopies::Refuse)?;
    let looked = ledgers.clone();
    let copy = tokio::task::spawn_blocking(move || LocalCopy::read(&looked)).await??;
    let copy = copy
        .context("this node has no copy of the metadata: only the first three nodes of a cluster have one")?;
    copy.check()?;
    let recovering = Recovering { env, dir, membership, known, ledgers, copy };
    let why = recovering.why_lost().await?;
    let others = recovering.ask_others(&identity).await?;
    let others_shown = others.iter().map(|(node, stored)| OtherNode {
        node: node.0,
        ledgers: stored.as_deref().map(|stored| recovering.copy.named(stored)),
    });
    let mut recovery = Recovery {
        node: recovering.membership.node.0,
        lost: recovering.known.to_string(),
        why,
        ledgers: recovering.copy.named(&recovering.copy.stored()),
        others: others_shown.collect(),
        log: None,
    };
    if options.yes {
        recovering.check_others(&others, &options)?;
        recovery.log = Some(recovering.begin_anew(&identity, options.log).await?.to_string());
    }
    Ok(recovery)
}

impl Recovering<'_> {
    fn own_engine(&self) -> Supervised {
        Supervised::new(self.env, self.dir)
    }

    /// Why the logs are lost. Fails if they are not.
    async fn why_lost(&self) -> Result<String> {
        let own = self.own_engine();
        let runs_here = self.known.is_own() && own.condition()? == EngineCondition::Present;
        if runs_here {
            // It may be the member that makes a majority.
            let member = own.clone();
            tokio::task::spawn_blocking(move || member.start()).await??;
        }
        let looked = tokio::time::timeout(LOST_AFTER, self.look_at_engine()).await;
        if runs_here {
            tokio::task::spawn_blocking(move || own.end()).await??;
        }
        match looked {
            Ok(Ok(Some(behind))) => Ok(behind),
            Ok(Ok(None)) => bail!(
                "the logs at {} answer and have all that this node has: nothing is to be recovered, start the node (forebay start {})",
                self.known,
                self.dir.root().display()
            ),
            Ok(Err(error)) => Ok(format!("{error:#}")),
            Err(_) => Ok("it does not answer".to_owned()),
        }
    }

    /// Waits until the engine answers. Returns what its logs lack; `None`: nothing.
    async fn look_at_engine(&self) -> Result<Option<String>> {
        let engine = loop {
            match Engine::connect(self.env, self.dir, &self.known).await {
                Ok(engine) => break engine,
                Err(error) => {
                    tracing::debug!(error = %format!("{error:#}"), "the engine does not answer");
                    tokio::time::sleep(LOOK).await;
                }
            }
        };
        for (ledger, stored) in &self.copy.ledgers {
            let fence = engine.log(*ledger).await?.fence().await?;
            if fence.tail < stored.seq {
                let name = self.copy.name_of(*ledger);
                let (tail, seq) = (fence.tail, stored.seq);
                return Ok(Some(format!(
                    "the log of {name} went backwards: it ends at {tail}, this node has {seq}"
                )));
            }
        }
        Ok(None)
    }

    /// What the other nodes have. Fails if one of them owns the ledgers.
    async fn ask_others(&self, identity: &IdentityFiles) -> Result<Vec<(NodeId, Option<Vec<StoredLedger>>)>> {
        let network = Network::new(self.env, &Handle::current(), identity)?;
        network.set_nodes(&self.membership.nodes, &Handle::current());
        let others = self.membership.nodes.iter().filter(|node| node.node != self.membership.node);
        let asks = others.map(|other| {
            let peer = network.fabric.peer(other.node);
            async move {
                let Some(peer) = peer else { return (other.node, false, None) };
                let asked = async {
                    let owner = RemoteCluster::new(&peer).ask(ClusterRequest::IsOwner).await;
                    let owns = matches!(owner, Ok(ClusterReply::Owner(Some(_))));
                    (owns, RemoteHost::new(&peer).ask(HostRequest::Stored).await)
                };
                match tokio::time::timeout(ANSWER_PATIENCE, asked).await {
                    Ok((owns, Ok(HostReply::Stored(stored)))) => (other.node, owns, Some(stored)),
                    Ok((owns, answer)) => {
                        tracing::debug!(node = %other.node, ?answer, "a node does not say what it has");
                        (other.node, owns, None)
                    }
                    Err(_) => (other.node, false, None),
                }
            }
        });
        let answers = join_all(asks).await;
        network.end();
        if let Some((owner, ..)) = answers.iter().find(|(_, owns, _)| *owns) {
            bail!(
                "node {owner} owns the metadata as far as it knows: if nothing goes on all the same, stop its process, and recover there"
            );
        }
        Ok(answers.into_iter().map(|(node, _, stored)| (node, stored)).collect())
    }

    /// Whether a node never had a copy.
    fn is_witness(&self, node: NodeId) -> bool {
        self.copy.cluster.nodes.get(&node).is_some_and(|record| record.witness)
    }

    /// Fails if another node should recover, or may be the one.
    fn check_others(
        &self,
        others: &[(NodeId, Option<Vec<StoredLedger>>)],
        options: &RecoverOptions,
    ) -> Result<()> {
        for (node, stored) in others {
            match stored {
                None if !self.is_witness(*node) && !options.without.contains(node) => bail!(
                    "node {node} does not answer, and may have more than this one: start its process, or say with --without {node} \
                     that its copy is lost or may be given up"
                ),
                None => {}
                Some(stored) => {
                    if let Some(more) = self.copy.is_behind(stored).filter(|_| !options.force) {
                        let name = self.copy.name_of(more.ledger);
                        bail!(
                            "node {node} has more: it has {name} up to {}; recover there, or give --force to lose that",
                            more.seq
                        );
                    }
                }
            }
        }
        Ok(())
    }

    /// Begins the logs anew. The place of this node in its cluster, at the end, decides: before it is written, the command may be given
    /// again.
    async fn begin_anew(
        &self,
        identity: &IdentityFiles,
        given: Option<EngineAddress>,
    ) -> Result<EngineAddress> {
        let (env, cluster) = (self.env, self.membership.cluster);
        let number = env.random.next_u64();
        let known = self.membership.recoveries.max(self.copy.cluster.record.recoveries);
        let recoveries = (known / RECOVERY_STEP + 1) * RECOVERY_STEP;
        let is_given = given.is_some();
        let address = match given {
            Some(given) => given.of_cluster(cluster, recoveries),
            None if self.known.is_own() => self.make_member(cluster, recoveries, number).await?,
            None => self.known.clone().anywhere().of_cluster(cluster, recoveries),
        };
        let engine = connect(env, self.dir, &address).await.with_context(|| match is_given {
            false => "give another engine with --log",
            true => "nothing was changed",
        })?;
        let control =
            self.copy.ledgers.get(&CONTROL_LEDGER).context("there is no copy of the control ledger")?;
        if !engine.claim(number, control.epoch.recovered(recoveries)).await? {
            bail!("there is something at {} already: give another place (?prefix=NAME)", address.prefix());
        }
        for (ledger, stored) in self.copy.ledgers.iter().rev() {
            let end = (stored.epoch.recovered(recoveries), stored.seq);
            if !engine.begin(number, *ledger, end).await? {
                bail!("somebody else begins logs at {}", address.prefix());
            }
        }
        for ledger in self.copy.ledgers.keys() {
            self.ledgers.go_on(*ledger, number)?;
        }
        self.note(engine, &address, recoveries).await?;
        identity.keep_membership(&Membership {
            log: Some(address.to_string()),
            recoveries,
            ..self.membership.clone()
        })?;
        if address.is_own() {
            // The node starts it again.
            let own = self.own_engine();
            tokio::task::spawn_blocking(move || own.end()).await??;
        }
        Ok(address)
    }

    /// Makes an engine of one member here. Others get theirs when they are back.
    async fn make_member(&self, cluster: ClusterId, recoveries: u32, number: u64) -> Result<EngineAddress> {
        let Membership { node, addresses, listen, .. } = &self.membership;
        let member = member_of(&NodeAddresses { node: *node, addresses: addresses.clone() })?;
        let (authority, authority_key) = new_authority(cluster, self.env.clock.wall_ns())?;
        let address = EngineAddress::own(std::slice::from_ref(&member), cluster, recoveries)?;
        let (name, members) = (member.name.clone(), vec![member]);
        let seat = EngineSeat { number, name, members, authority, authority_key, joins: false };
        let (own, listen) = (self.own_engine(), listen.ip());
        tokio::task::spawn_blocking(move || own.give_up().and_then(|()| own.begin(listen, &seat))).await??;
        Ok(address)
    }

    /// Notes in the control ledger, as its next owner, what was lost.
    async fn note(&self, engine: Engine, address: &EngineAddress, recoveries: u32) -> Result<()> {
        let ledgers = self.ledgers.clone().with_engine(engine, &Handle::current(), WholeLog::No).await?;
        let files = ledgers.opened(CONTROL_LEDGER, CONTROL_CACHE_BYTES).await?;
        let vacant = files.log.fence().await?.vacancy();
        let control = Control::open(self.env, files.log.clone(), files.state.clone(), Some(vacant)).await?;
        control.begin(self.env, &Evidence { older: Older::Certain, ..Evidence::default() }).await?;
        let log = address.to_string();
        let decide = |plan: &mut Plan| -> Result<()> {
            plan.recover(&log, recoveries);
            Ok(())
        };
        control.plan(decide).await?;
        control.resign().await;
        Ok(())
    }
}

/// Connects to an engine that may begin just now.
async fn connect(env: &Env, dir: &NodeDir, address: &EngineAddress) -> Result<Engine> {
    let mut why = None;
    let connected = async {
        loop {
            match Engine::connect(env, dir, address).await {
                Ok(engine) => return engine,
                Err(error) => why = Some(error),
            }
            tokio::time::sleep(LOOK).await;
        }
    };
    match tokio::time::timeout(ENGINE_PATIENCE, connected).await {
        Ok(engine) => Ok(engine),
        Err(_) => Err(why.unwrap_or_else(|| anyhow::anyhow!("{address} does not answer"))),
    }
}
