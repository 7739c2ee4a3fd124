//! The engine that has the logs of the ledgers, where several nodes reach it: etcd or PostgreSQL of the operator, or members of etcd that
//! Forebay runs on the first nodes.

mod address;
mod supervised;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use admin::EngineMemberInfo;
use anyhow::{Context, Result, bail};
use base::env::Env;
use base::{Epoch, LedgerId, Seq};
use control::CONTROL_LEDGER;
use meta::log::{Etcd, EtcdMember, LedgerLog, LogEngine, Postgres};

use crate::node::NodeDir;

pub(crate) use address::EngineAddress;
use address::Options;
pub(crate) use supervised::bracketed;
pub(crate) use supervised::{Supervised, new_authority};

/// How long a member may take to say that it is there.
const LOOK_PATIENCE: Duration = Duration::from_secs(1);

/// An engine that is connected.
#[derive(Clone)]
pub(crate) struct Engine {
    connected: Connected,
    /// Members of an engine of our own may be replaced.
    address: Arc<Mutex<EngineAddress>>,
}

#[derive(Clone)]
enum Connected {
    Etcd(Etcd),
    Postgres(Postgres),
}

impl Engine {
    /// Connects.
    pub(crate) async fn connect(env: &Env, dir: &NodeDir, address: &EngineAddress) -> Result<Self> {
        let connected = match address.options(env, dir)? {
            Options::Etcd(options) => Etcd::connect(&options, env).await.map(Connected::Etcd),
            Options::Postgres(options) => Postgres::connect(&options).await.map(Connected::Postgres),
        };
        let connected = connected.with_context(|| {
            let look = address.how_to_look();
            format!("the engine with the logs of the cluster cannot be used: {address} (see {look})")
        })?;
        Ok(Self { connected, address: Arc::new(Mutex::new(address.clone())) })
    }

    fn logs(&self) -> &dyn LogEngine {
        match &self.connected {
            Connected::Etcd(etcd) => etcd,
            Connected::Postgres(postgres) => postgres,
        }
    }

    /// For what only an etcd of Forebay is asked.
    fn etcd(&self) -> Result<&Etcd> {
        match &self.connected {
            Connected::Etcd(etcd) => Ok(etcd),
            Connected::Postgres(_) => bail!("the servers of {} are not run by Forebay", self.address()),
        }
    }

    /// Goes to these members of the same engine from now on.
    pub(crate) fn follow(&self, env: &Env, dir: &NodeDir, address: &EngineAddress) -> Result<()> {
        let Options::Etcd(options) = address.options(env, dir)? else {
            bail!("the servers of {address} are not run by Forebay");
        };
        self.etcd()?.set_members(&options)?;
        *self.address.lock().unwrap_or_else(PoisonError::into_inner) = address.clone();
        Ok(())
    }

    /// Fails unless its members agree on something now. Returns whether the place is free for the move with this number.
    pub(crate) async fn is_free(&self, number: u64) -> Result<bool> {
        let free = self.logs().is_free(number).await;
        free.with_context(|| format!("reading from {}", self.address()))
    }

    /// All its members.
    pub(crate) async fn list(&self) -> Result<Vec<EtcdMember>> {
        self.etcd()?
            .list_members()
            .await
            .with_context(|| format!("listing the members of {}", self.address()))
    }

    /// Takes a member in, without a vote. Returns its number.
    pub(crate) async fn add(&self, peer_url: &str) -> Result<u64> {
        self.etcd()?.add_learner(peer_url).await.with_context(|| format!("adding {peer_url} to etcd"))
    }

    /// Gives a member a vote, once it has what the others have.
    pub(crate) async fn promote(&self, id: u64) -> Result<()> {
        self.etcd()?.promote(id).await.context("giving the new member of etcd a vote")
    }

    /// Takes a member out.
    pub(crate) async fn remove(&self, id: u64) -> Result<()> {
        self.etcd()?.remove_member(id).await.context("taking a member out of etcd")
    }

    /// Claims the place for logs that come from elsewhere, of which that of the control ledger will begin with this epoch. Returns
    /// whether this move has it.
    pub(crate) async fn claim(&self, number: u64, epoch: Epoch) -> Result<bool> {
        let claimed = self.logs().claim(number, (CONTROL_LEDGER, epoch)).await;
        claimed.with_context(|| format!("claiming a place in {}", self.address()))
    }

    /// Which servers these are.
    pub(crate) fn system(&self) -> String {
        self.logs().system()
    }

    /// The number of the attempt that brought the logs here; 0: they began here.
    pub(crate) async fn number(&self) -> Result<u64> {
        self.logs().number().await.with_context(|| format!("reading from {}", self.address()))
    }

    /// Begins a log that comes from elsewhere behind its end. Returns whether the place is still that of this move.
    pub(crate) async fn begin(&self, number: u64, ledger: LedgerId, end: (Epoch, Seq)) -> Result<bool> {
        let begun = self.logs().begin(number, ledger, end).await;
        begun.with_context(|| format!("beginning the log of ledger {ledger} in {}", self.address()))
    }

    /// Its members, and whether they answer.
    pub(crate) async fn members(&self) -> Vec<EngineMemberInfo> {
        let members = self.logs().members(LOOK_PATIENCE).await.into_iter();
        members.map(|(address, answers)| EngineMemberInfo { address, answers }).collect()
    }

    /// Where it is.
    pub(crate) fn address(&self) -> EngineAddress {
        self.address.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The log of a ledger.
    pub(crate) async fn log(&self, ledger: LedgerId) -> Result<Arc<dyn LedgerLog>> {
        let log = self.logs().open(ledger).await;
        log.with_context(|| format!("the log of ledger {ledger} in {}", self.address()))
    }
}
