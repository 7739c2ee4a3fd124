//! What other machines ask the node: to join the cluster, for the records of the control ledger, and what operators want there. And
//! what operators see of nodes and tokens.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use admin::{
    AdminError, Answered, Api, ClientInfo, CreateToken, DrainNode, NewToken, NodeCheck, NodeDrain, NodeInfo,
    NodesControl, SetMaintenance, StopCheck, TokenInfo, TokenRights, UpgradeInfo,
};
use anyhow::{Context, Result, bail};
use base::NodeId;
use base::env::Env;
use bytes::Bytes;
use control::{
    CERTIFICATE_S, ClientRecord, ClientRights, Cluster, Control, Plan, SECRET_BYTES, Token, TokenRecord,
    key_of_request,
};
use layout::DriveState;
use tokio::runtime::Handle;
use tokio::sync::watch;
use wire::BoxFuture;
use wire::cluster::{
    CheckParts, ClusterReply, ClusterRequest, ClusterService, Declined, JoinReply, JoinRequest, JoinService,
    Joined, NewClient, NewNode,
};
use wire::identity::Party;
use wire::link::Services;

use super::management::failed;
use super::network::{Issuer, Network, addresses_of, ready_owner};
use super::settings::Settings;
use super::{Node, NodeDir, Seat, State};
use crate::identity::{IdentityFiles, RENEW_EVERY};

/// How long a token may be valid: a year.
const EXPIRES_IN_S_MAX: u64 = 366 * 86_400;
/// Requests of operators at other nodes of which the answers are kept.
const MANAGED_MAX: usize = 256;
/// Most addresses in a token.
const TOKEN_ADDRESSES_MAX: usize = 6;
/// How old a process may be that has just started, and how long another may take to say how old it is.
const START_S_MAX: u64 = 30;
const UPTIME_PATIENCE: Duration = Duration::from_secs(2);
/// Most tokens at a time.
const TOKENS_MAX: usize = 1000;

/// Other nodes of the cluster, as this one meets them.
pub(super) struct Others {
    /// The ways to them.
    pub(super) network: Arc<Network>,
    /// The cluster's authority.
    issuer: Issuer,
    pub(super) settings: Settings,
    /// The boot time at which the certificate is renewed.
    renew_ns: AtomicU64,
    /// Answers them. `None` before the node serves and after its end.
    answers: Mutex<Option<Arc<ForOthers>>>,
    /// Where the services go, if the machine offers them beside its own.
    offers: Option<watch::Sender<Services>>,
}

impl Others {
    /// Readies key, certificate and authority. Nobody is reached yet, and nobody is answered.
    pub(super) async fn open(
        env: &Env,
        dir: &NodeDir,
        control: &Control,
        runtime: &Handle,
        settings: Settings,
    ) -> Result<Self> {
        let issuer = ready_owner(env, dir, control, &settings).await?;
        let network = Arc::new(Network::new(env, runtime, &IdentityFiles::new(env, dir))?);
        let renew_ns = AtomicU64::new(env.clock.boot_ns() + RENEW_EVERY.as_nanos() as u64);
        Ok(Self { network, issuer, settings, renew_ns, answers: Mutex::default(), offers: None })
    }

    /// As a machine meets them that has a certificate already, and the key of the authority.
    pub(super) fn of_machine(env: &Env, dir: &NodeDir, control: &Control, seat: &Seat) -> Result<Self> {
        let issuer = Issuer::load(env, dir, &control.view()?.cluster()?)?;
        Ok(Self {
            network: seat.network.clone(),
            issuer,
            settings: Settings::default(),
            renew_ns: AtomicU64::new(u64::MAX),
            answers: Mutex::default(),
            offers: Some(seat.offers.clone()),
        })
    }

    fn answers(&self) -> MutexGuard<'_, Option<Arc<ForOthers>>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn answer_with(&self, answers: ForOthers) {
        *self.answers() = Some(Arc::new(answers));
    }

    /// Offers these services and, once the node serves, what only other machines ask.
    pub(super) fn serve(&self, services: Services) {
        let Some(answers) = self.answers().clone() else { return };
        let services = Services { joins: Some(answers.clone()), cluster: Some(answers), ..services };
        match &self.offers {
            Some(offers) => drop(offers.send_replace(services)),
            None => self.network.serve(services),
        }
    }

    /// Renews the certificate of this node, if that was long ago.
    pub(super) async fn renew(&self, env: &Env, dir: &NodeDir, control: &Control) -> Result<()> {
        let now_ns = env.clock.boot_ns();
        if now_ns < self.renew_ns.load(Ordering::Relaxed) {
            return Ok(());
        }
        self.renew_ns.store(now_ns + RENEW_EVERY.as_nanos() as u64, Ordering::Relaxed);
        ready_owner(env, dir, control, &self.settings).await?;
        self.network.renew(&IdentityFiles::new(env, dir))
    }

    /// Takes connections in, if the node has an address for others.
    pub(super) async fn listen(&self, runtime: &Handle) -> Result<()> {
        match self.settings.listen {
            Some(address) => self.network.listen(address, runtime).await,
            None => Ok(()),
        }
    }

    /// What answers other nodes, while it does.
    pub(super) fn answering(&self) -> Option<Arc<ForOthers>> {
        self.answers().clone()
    }

    /// Answers nobody any more. Others are still reached.
    pub(super) async fn stop_answering(&self) {
        match &self.offers {
            Some(offers) => drop(offers.send_replace(Services::default())),
            None => self.network.stop_answering().await,
        }
        // The node and what answers for it refer to each other.
        self.answers().take();
    }

    /// Reaches nobody any more.
    pub(super) fn end(&self) {
        self.network.end();
    }
}

/// Answers other machines for the node.
pub(crate) struct ForOthers {
    node: Arc<Node>,
    api: Arc<Api>,
    /// The last requests of operators at other nodes, oldest first: a connection may break before the answer.
    managed: Mutex<VecDeque<Managed>>,
}

/// A request of an operator, and its answer once there is one.
struct Managed {
    request: (NodeId, u64),
    answer: watch::Receiver<Option<Answered>>,
}

impl ForOthers {
    pub(super) fn new(node: &Arc<Node>) -> Self {
        let api = Arc::new(Api::new(node.clone(), node.runtime.clone()));
        Self { node: node.clone(), api, managed: Mutex::default() }
    }

    /// Executes a request once. It goes on if its connection breaks.
    async fn manage(&self, request: (NodeId, u64), method: String, path: String, body: Bytes) -> Answered {
        let mut answer = {
            let mut managed = self.managed.lock().unwrap_or_else(PoisonError::into_inner);
            match managed.iter().find(|known| known.request == request) {
                Some(known) => known.answer.clone(),
                None => {
                    let (tell, answer) = watch::channel(None);
                    let api = self.api.clone();
                    self.node.runtime.spawn(async move {
                        tell.send_replace(Some(api.answer(&method, &path, body).await));
                    });
                    managed.push_back(Managed { request, answer: answer.clone() });
                    while managed.len() > MANAGED_MAX {
                        managed.pop_front();
                    }
                    answer
                }
            }
        };
        let gone = || AdminError::failed("the node stops").answer();
        match answer.wait_for(Option::is_some).await {
            Ok(answer) => answer.clone().unwrap_or_else(gone),
            Err(_) => gone(),
        }
    }
}

fn declined(error: impl std::fmt::Display) -> Declined {
    Declined(format!("{error:#}"))
}

impl JoinService for ForOthers {
    fn join(&self, request: JoinRequest) -> BoxFuture<'_, Result<JoinReply, Declined>> {
        Box::pin(async move {
            let new = match request {
                JoinRequest::Join(new) => new,
                JoinRequest::JoinClient(new) => return self.node.take_client_in(new).await.map_err(declined),
                JoinRequest::RenewClient { client, request } => {
                    return self.node.renew_client(client, &request).await.map_err(declined);
                }
            };
            let joined = self.node.take_node_in(new).await.map_err(|error| {
                tracing::warn!(error = %format!("{error:#}"), "a node may not join");
                declined(error)
            })?;
            tracing::info!(node = %joined.node, "a node has joined");
            Ok(JoinReply::Joined(joined))
        })
    }
}

impl ClusterService for ForOthers {
    fn ask(&self, request: ClusterRequest) -> BoxFuture<'_, Result<ClusterReply, Declined>> {
        Box::pin(async move {
            match request {
                ClusterRequest::Records { known, epoch, after, wait_ms } => {
                    let wait = Duration::from_millis(wait_ms.into());
                    let control = &self.node.control;
                    let news = control.news((known, epoch), &after, wait).await.map_err(declined)?;
                    if !control.holds() {
                        return Err(Declined("this node may not own the metadata any more".to_owned()));
                    }
                    Ok(ClusterReply::Records(news))
                }
                ClusterRequest::IsOwner | ClusterRequest::Owns { .. } => {
                    let control = &self.node.control;
                    Ok(ClusterReply::Owner(control.holds().then(|| control.epoch())))
                }
                ClusterRequest::Probe { .. } => {
                    Ok(ClusterReply::Probed { wall_ns: self.node.env.clock.wall_ns() })
                }
                ClusterRequest::Manage { node, id, method, path, body } => {
                    tracing::debug!(%node, method, path, "an operator asks at another node");
                    let (status, body) = self.manage((node, id), method, path, body).await;
                    Ok(ClusterReply::Managed { status, body })
                }
                ClusterRequest::Renew { node, request, addresses, last_start, this_start } => {
                    let starts = (last_start, this_start);
                    self.node.renew_certificate(node, &request, addresses, starts).await.map_err(declined)
                }
            }
        })
    }
}

impl Node {
    /// Takes a node in that has a token.
    async fn take_node_in(&self, new: NewNode) -> Result<Joined> {
        let now_ns = self.env.clock.wall_ns();
        let authority = &self.others.issuer.authority;
        let key = key_of_request(&new.request)?;
        let node = self.plan(|plan| Ok(plan.join(&new, &key, now_ns / 1_000_000_000)?)).await?;
        let issued = authority.issue(self.cluster, Party::Node(node), &new.request, now_ns)?;
        let state = self.state.lock().await;
        let witness = state.cluster.nodes.get(&node).is_some_and(|record| record.witness);
        let cluster_key = match witness {
            true => Vec::new(),
            false => self.env.files.read(&self.dir.node_key()).context("reading the key of the cluster")?,
        };
        let (log, authority_key) = self.for_owners(&state, node);
        Ok(Joined {
            node,
            certificate: issued.certificate_pem,
            authorities: authority.certificate_pem().to_owned(),
            cluster_key: Bytes::from(cluster_key),
            nodes: addresses_of(&state.cluster),
            log,
            authority_key,
            witness,
        })
    }

    /// Takes a client in that has a token.
    async fn take_client_in(&self, new: NewClient) -> Result<JoinReply> {
        let now_ns = self.env.clock.wall_ns();
        let key = key_of_request(&new.request)?;
        let client = self.plan(|plan| Ok(plan.join_client(&new, &key, now_ns / 1_000_000_000)?)).await?;
        tracing::info!(client, name = new.name, "a client has joined");
        self.certify_client(client, &new.request).await
    }

    /// Makes another certificate for a client, for the key that it joined with.
    async fn renew_client(&self, client: u32, request: &[u8]) -> Result<JoinReply> {
        let key = key_of_request(request)?;
        let known = self.state.lock().await.cluster.clients.get(&client).map(|record| record.key.clone());
        if known.as_ref() != Some(&key) {
            bail!("client {client} is not in the cluster with this key");
        }
        self.certify_client(client, request).await
    }

    async fn certify_client(&self, client: u32, request: &[u8]) -> Result<JoinReply> {
        let authority = &self.others.issuer.authority;
        let now_ns = self.env.clock.wall_ns();
        let issued = authority.issue(self.cluster, Party::Client(client), request, now_ns)?;
        let state = self.state.lock().await;
        Ok(JoinReply::JoinedClient {
            client,
            certificate: issued.certificate_pem,
            authorities: authority.certificate_pem().to_owned(),
            nodes: addresses_of(&state.cluster),
            read_only: state.cluster.clients.get(&client).is_some_and(|record| record.rights.read_only),
        })
    }

    /// Removes a client. Its connections end.
    async fn remove_client_now(&self, id: u32) -> Result<ClientInfo, AdminError> {
        let decide = |plan: &mut Plan| {
            let known = plan.next().clients.get(&id).map(|record| client_info(plan.next(), record));
            plan.remove_client(id);
            known.ok_or_else(|| {
                AdminError::not_found(format!("no such client: id={id} (see `forebay client list`)")).into()
            })
        };
        let info = self.plan(decide).await.map_err(failed)?;
        self.publish(&mut *self.state.lock().await);
        Ok(info)
    }

    /// The engine that has the logs, and the key of the authority: what a node needs that may come to own the ledgers. Empty if none
    /// may.
    fn for_owners(&self, state: &State, node: NodeId) -> (String, String) {
        let Some(engine) = state.meta_dirs.engine() else { return Default::default() };
        let witness = state.cluster.nodes.get(&node).is_some_and(|record| record.witness);
        let key = if witness { String::new() } else { self.others.issuer.authority.key_pem().to_owned() };
        (engine.address().to_string(), key)
    }

    /// Whether the process at the known address of a node has run for longer than one that has just started.
    async fn runs_long(&self, node: NodeId) -> bool {
        let told = tokio::time::timeout(UPTIME_PATIENCE, self.uptime_of(node)).await;
        matches!(told, Ok(Ok(uptime_s)) if uptime_s >= START_S_MAX)
    }

    /// Makes another certificate for a node, for the key that it joined with, and notes where it is now.
    async fn renew_certificate(
        &self,
        node: NodeId,
        request: &[u8],
        addresses: Vec<String>,
        starts: (u64, u64),
    ) -> Result<ClusterReply> {
        let key = key_of_request(request)?;
        let known = self.state.lock().await.cluster.nodes.get(&node).cloned();
        let Some(known) = known.filter(|record| record.key == key) else {
            bail!("node {node} is not in the cluster with this key");
        };
        let is_copy = |answers| Ok(ClusterReply::IsCopy { addresses: known.addresses.clone(), answers });
        let is_new = starts.1 != 0 && starts.1 != known.start;
        if is_new && known.start != 0 && known.addresses != addresses && self.runs_long(node).await {
            return is_copy(true);
        }
        let now_s = self.env.clock.wall_ns() / 1_000_000_000;
        let may_start = self.plan(|plan| {
            let may_start = starts.1 == 0 || plan.start_node(node, starts);
            if may_start {
                plan.move_node(node, &addresses)?;
                plan.certify_node(node, now_s);
            }
            Ok(may_start)
        });
        if !may_start.await? {
            return is_copy(false);
        }
        let authority = &self.others.issuer.authority;
        let issued = authority.issue(self.cluster, Party::Node(node), request, self.env.clock.wall_ns())?;
        let authorities = authority.certificate_pem().to_owned();
        let (log, authority_key) = self.for_owners(&*self.state.lock().await, node);
        Ok(ClusterReply::Renewed { certificate: issued.certificate_pem, authorities, log, authority_key })
    }

    /// Takes a node without drives out of the cluster. Its certificate is of no use from then on.
    async fn remove_node_now(&self, id: u32) -> Result<NodeInfo, AdminError> {
        let id = NodeId(id);
        // A drive may be about to be made there.
        let _one_at_a_time = self.drives_lock.lock().await;
        let infos = self.node_infos().await;
        let info = infos.into_iter().find(|info| info.id == id.0).ok_or_else(|| {
            AdminError::not_found(format!("no such node: id={id} (see `forebay node list`)"))
        })?;
        if id == self.here() {
            return Err(AdminError::conflict(format!("node {id} owns the metadata and cannot be removed")));
        }
        let decide = |plan: &mut Plan| match plan.remove_node(id) {
            true => Ok(()),
            false => Err(AdminError::conflict(format!(
                "node {id} has drives: remove them first (forebay drive remove, see `forebay drive list`)"
            ))
            .into()),
        };
        self.plan(decide).await.map_err(failed)?;
        tracing::warn!(node = %id, "a node was removed");
        Ok(info)
    }

    async fn create_token_now(
        &self,
        CreateToken { expires_in_s, uses, client, witness }: CreateToken,
    ) -> Result<NewToken, AdminError> {
        if !(1..=EXPIRES_IN_S_MAX).contains(&expires_in_s) || uses == 0 {
            return Err(AdminError::invalid(
                "a token is valid for a second to a year, and for at least one node",
            ));
        }
        let addresses = self.addresses().await;
        if addresses.is_empty() || !self.others.network.is_listening() {
            let dir = self.dir.root().display();
            return Err(AdminError::conflict(format!(
                "other machines cannot reach this node: start it with an address of this machine (forebay stop {dir}; \
                 forebay start {dir} --address ADDRESS)"
            )));
        }
        if witness && client.is_some() {
            return Err(AdminError::invalid("a token is for clients or for witnesses"));
        }
        let mut secret = vec![0; SECRET_BYTES];
        self.env.random.fill(&mut secret);
        let now_ns = self.env.clock.wall_ns();
        let expires_s = now_ns / 1_000_000_000 + expires_in_s as i64;
        let decide = |plan: &mut Plan| {
            if plan.next().tokens.len() >= TOKENS_MAX {
                return Err(AdminError::conflict(
                    "there are too many tokens: remove some (forebay token list)",
                )
                .into());
            }
            let rights = client.as_ref().map(|asked| rights_of(plan.next(), asked)).transpose()?;
            let record = TokenRecord {
                client: rights,
                witness,
                ..TokenRecord::new(plan.next_token(), &secret, expires_s, uses, now_ns)
            };
            plan.set_token(record.clone());
            Ok(record)
        };
        let record = self.plan(decide).await.map_err(failed)?;
        let token = Token {
            cluster: self.cluster,
            authority: self.others.issuer.fingerprint,
            id: record.id,
            secret: secret.into(),
            addresses,
            is_for_clients: record.client.is_some(),
            is_for_witnesses: record.witness,
        };
        Ok(NewToken { info: info(&record, now_ns), token: token.to_string() })
    }

    /// Where a new node finds the cluster: this node first, which answers it.
    async fn addresses(&self) -> Vec<String> {
        let state = self.state.lock().await;
        let nodes = state.cluster.nodes.values();
        let (here, others): (Vec<_>, Vec<_>) = nodes.partition(|node| node.id == self.here());
        let all = here.into_iter().chain(others).flat_map(|node| node.addresses.clone());
        all.take(TOKEN_ADDRESSES_MAX).collect()
    }

    async fn remove_token_now(&self, id: u32) -> Result<TokenInfo, AdminError> {
        let decide = |plan: &mut Plan| {
            let record = plan.next().tokens.get(&id).cloned();
            plan.remove_token(id);
            record.ok_or_else(|| {
                AdminError::not_found(format!("no such token: id={id} (see `forebay token list`)")).into()
            })
        };
        let record = self.plan(decide).await.map_err(failed)?;
        Ok(info(&record, self.env.clock.wall_ns()))
    }

    pub(super) async fn node_infos(&self) -> Vec<NodeInfo> {
        let told = self.conditions().await;
        let state = self.state.lock().await;
        let Cluster { nodes, drives, .. } = &state.cluster;
        let now_s = self.env.clock.wall_ns() / 1_000_000_000;
        let info = |record: &control::NodeRecord| {
            let drives =
                drives.values().filter(|drive| drive.node == record.id && drive.state != DriveState::Out);
            let sizes: Vec<u64> = drives.map(|drive| drive.capacity_bytes).collect();
            let is_there = self.is_reached(record.id);
            let told = told.get(&record.id);
            NodeInfo {
                version: told.map(|told| told.condition.version.clone()),
                uptime_s: told.map(|told| told.condition.uptime_s),
                latency_us: told.map(|told| told.latency.as_micros() as u64),
                clock_ahead_ms: told.map(|told| told.ahead_ns / 1_000_000),
                s3: told.and_then(|told| told.condition.s3.clone()),
                id: record.id.0,
                name: record.name.clone(),
                zone: record.zone.clone(),
                rack: record.rack.clone(),
                addresses: record.addresses.clone(),
                state: if is_there { "up" } else { "unreachable" }.to_owned(),
                drives: sizes.len() as u32,
                capacity_bytes: sizes.iter().sum(),
                owner: record.id == self.here(),
                witness: record.witness,
                certificate_days: record.certified_s.map(|made_s| (made_s + CERTIFICATE_S - now_s) / 86_400),
                maintenance_s: record.maintenance_left_s(now_s),
            }
        };
        nodes.values().map(info).collect()
    }
}

fn info(record: &TokenRecord, now_ns: i64) -> TokenInfo {
    let left_s = u64::try_from(record.expires_s - now_ns / 1_000_000_000).unwrap_or(0);
    let state = match (record.uses_left, left_s) {
        (0, _) => "used",
        (_, 0) => "expired",
        _ => "valid",
    };
    let role = match record.client {
        Some(_) => "client",
        None if record.witness => "witness",
        None => "node",
    };
    TokenInfo {
        id: record.id,
        role: role.to_owned(),
        state: state.to_owned(),
        expires_in_s: left_s,
        uses_left: record.uses_left,
    }
}

/// What an operator allows to clients.
fn rights_of(cluster: &Cluster, asked: &TokenRights) -> Result<ClientRights> {
    let find = |name: &String| {
        let found = cluster.filesystems.values().find(|record| record.name == *name);
        found.map(|record| record.id).ok_or_else(|| {
            AdminError::not_found(format!("no such filesystem: name={name} (see `forebay fs list`)"))
        })
    };
    let filesystem = asked.filesystem.as_ref().map(find).transpose()?;
    Ok(ClientRights { filesystem, read_only: asked.read_only, squash: asked.squash })
}

fn client_info(cluster: &Cluster, record: &ClientRecord) -> ClientInfo {
    let ClientRights { filesystem, read_only, squash } = &record.rights;
    let name_of = |id: &u32| cluster.filesystems.get(id).map(|record| record.name.clone());
    ClientInfo {
        id: record.id,
        name: record.name.clone(),
        filesystem: filesystem.as_ref().map(|id| name_of(id).unwrap_or_else(|| id.to_string())),
        read_only: *read_only,
        squash: *squash,
        version: None,
    }
}

impl NodesControl for Node {
    fn nodes(&self) -> BoxFuture<'_, Result<Vec<NodeInfo>, AdminError>> {
        Box::pin(async { Ok(self.node_infos().await) })
    }

    fn stop_check(&self, id: u32) -> BoxFuture<'_, Result<StopCheck, AdminError>> {
        Box::pin(self.stop_check_now(id))
    }

    fn check(&self, id: u32, what: CheckParts) -> BoxFuture<'_, Result<NodeCheck, AdminError>> {
        Box::pin(self.check_now(id, what))
    }

    fn drain_node(&self, id: u32, request: DrainNode) -> BoxFuture<'_, Result<NodeDrain, AdminError>> {
        Box::pin(self.drain_node_now(id, request))
    }

    fn set_maintenance(
        &self,
        id: u32,
        request: SetMaintenance,
    ) -> BoxFuture<'_, Result<NodeInfo, AdminError>> {
        Box::pin(self.set_maintenance_now(id, request))
    }

    fn remove_node(&self, id: u32) -> BoxFuture<'_, Result<NodeInfo, AdminError>> {
        Box::pin(self.remove_node_now(id))
    }

    fn upgrade(&self) -> BoxFuture<'_, Result<UpgradeInfo, AdminError>> {
        Box::pin(async { Ok(self.upgrade_now().await) })
    }

    fn finalize_upgrade(&self) -> BoxFuture<'_, Result<UpgradeInfo, AdminError>> {
        Box::pin(self.finalize_upgrade_now())
    }

    fn create_token(&self, request: CreateToken) -> BoxFuture<'_, Result<NewToken, AdminError>> {
        Box::pin(self.create_token_now(request))
    }

    fn tokens(&self) -> BoxFuture<'_, Result<Vec<TokenInfo>, AdminError>> {
        Box::pin(async {
            let now_ns = self.env.clock.wall_ns();
            let state = self.state.lock().await;
            Ok(state.cluster.tokens.values().map(|record| info(record, now_ns)).collect())
        })
    }

    fn remove_token(&self, id: u32) -> BoxFuture<'_, Result<TokenInfo, AdminError>> {
        Box::pin(self.remove_token_now(id))
    }

    fn clients(&self) -> BoxFuture<'_, Result<Vec<ClientInfo>, AdminError>> {
        Box::pin(async {
            let state = self.state.lock().await;
            let (clients, programs) = (state.cluster.clients.values(), self.others.network.client_programs());
            let info = |record: &control::ClientRecord| {
                let version = programs.get(&record.id).map(|program| program.version.clone());
                ClientInfo { version, ..client_info(&state.cluster, record) }
            };
            Ok(clients.map(info).collect())
        })
    }

    fn remove_client(&self, id: u32) -> BoxFuture<'_, Result<ClientInfo, AdminError>> {
        Box::pin(self.remove_client_now(id))
    }
}
