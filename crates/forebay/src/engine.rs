//! The engine that has the logs of the ledgers, where several nodes reach it: `etcd://HOST:PORT[,…][?prefix=…]`. It is one of the
//! operator, or Forebay runs its members on the first nodes.

mod supervised;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use admin::EngineMemberInfo;
use anyhow::{Context, Result, bail};
use base::env::Env;
use base::{ClusterId, Epoch, LedgerId, Seq};
use control::CONTROL_LEDGER;
use meta::log::{Etcd, EtcdLog, EtcdMember, EtcdOptions, EtcdTls, LedgerLog, LogEngine as _};

use wire::cluster::EngineMember;

use crate::node::NodeDir;

pub(crate) use supervised::bracketed;
pub(crate) use supervised::{Supervised, new_authority};

/// What all keys of a cluster begin with, unless another prefix was asked for.
const PREFIX: &str = "forebay/";
/// How long a member may take to say that it is there.
const LOOK_PATIENCE: Duration = Duration::from_secs(1);
/// The largest number of members that one can be given.
const ENDPOINTS_MAX: usize = 16;

/// An address of an engine, as `start --log` takes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EngineAddress {
    /// `host:port` of the members.
    members: Vec<String>,
    /// What all keys begin with; `None`: not chosen.
    prefix: Option<String>,
    /// Forebay runs the members, and their certificates are on their nodes.
    is_own: bool,
    /// Paths of the authorities' certificates, and of this node's certificate and key, on each node.
    ca: Option<String>,
    cert: Option<String>,
    key: Option<String>,
}

impl std::str::FromStr for EngineAddress {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let form =
            "an engine is given as etcd://HOST:PORT,HOST:PORT,…[?prefix=NAME&ca=FILE&cert=FILE&key=FILE]";
        let rest = text.strip_prefix("etcd://").context(form)?;
        let (members, query) = rest.split_once('?').unwrap_or((rest, ""));
        let members: Vec<String> = members.trim_end_matches('/').split(',').map(str::to_owned).collect();
        if members.len() > ENDPOINTS_MAX {
            bail!("{} members are too many: give {ENDPOINTS_MAX} at most", members.len());
        }
        for member in &members {
            control::check_address(member).context(form)?;
        }
        let mut address = Self { members, prefix: None, is_own: false, ca: None, cert: None, key: None };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').context(form)?;
            if (name, value) == ("run", "own") {
                address.is_own = true;
                continue;
            }
            let place = match name {
                "prefix" => &mut address.prefix,
                "ca" => &mut address.ca,
                "cert" => &mut address.cert,
                "key" => &mut address.key,
                _ => bail!("the address of an engine has no parameter {name:?}; {form}"),
            };
            if value.is_empty() {
                bail!("the parameter {name} is empty; {form}");
            }
            *place = Some(value.to_owned());
        }
        if address.cert.is_some() != address.key.is_some() {
            bail!("cert and key belong together; {form}");
        }
        if address.cert.is_some() && address.ca.is_none() {
            bail!("with cert and key goes ca: the authority of the members; {form}");
        }
        Ok(address)
    }
}

impl std::fmt::Display for EngineAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "etcd://{}", self.members.join(","))?;
        let own = self.is_own.then(|| "own".to_owned());
        let named = [
            ("run", &own),
            ("prefix", &self.prefix),
            ("ca", &self.ca),
            ("cert", &self.cert),
            ("key", &self.key),
        ];
        let named = named.into_iter().filter_map(|(name, value)| Some((name, value.as_ref()?)));
        for (index, (name, value)) in named.enumerate() {
            write!(f, "{}{name}={value}", if index == 0 { '?' } else { '&' })?;
        }
        Ok(())
    }
}

impl EngineAddress {
    /// The address with a prefix, which is that of the cluster unless another was chosen. After a recovery it is another one: what was
    /// there before is never taken for the logs.
    pub(crate) fn of_cluster(mut self, cluster: ClusterId, recoveries: u32) -> Self {
        self.prefix.get_or_insert_with(|| match recoveries {
            0 => format!("{PREFIX}{cluster}"),
            count => format!("{PREFIX}{cluster}.{count}"),
        });
        self
    }

    /// The same members, without a place there.
    pub(crate) fn anywhere(self) -> Self {
        Self { prefix: None, ..self }
    }

    /// The same logs at other members: what the new address leaves out stays.
    pub(crate) fn moved_to(&self, mut next: Self) -> Result<Self> {
        if next.is_own != self.is_own {
            bail!("the logs of this cluster are at {self}; they do not move to another etcd by --log");
        }
        if next.prefix.is_some() && next.prefix != self.prefix {
            bail!("the logs of this cluster begin with {:?} and stay there", self.prefix);
        }
        next.prefix.clone_from(&self.prefix);
        Ok(next)
    }

    /// What all keys begin with.
    pub(crate) fn prefix(&self) -> &str {
        self.prefix.as_deref().unwrap_or_default()
    }

    /// An engine whose members Forebay runs.
    pub(crate) fn own(members: &[EngineMember], cluster: ClusterId, recoveries: u32) -> Result<Self> {
        let members =
            members.iter().map(|member| format!("{}:{}", bracketed(&member.host), member.client_port));
        let address = format!("etcd://{}?run=own", members.collect::<Vec<_>>().join(","));
        Ok(address.parse::<Self>()?.of_cluster(cluster, recoveries))
    }

    /// Whether Forebay runs its members.
    pub(crate) fn is_own(&self) -> bool {
        self.is_own
    }

    fn options(&self, env: &Env, dir: &NodeDir) -> Result<EtcdOptions> {
        let read =
            |path: &Path| env.files.read(path).with_context(|| format!("cannot read {}", path.display()));
        let own = self.is_own.then(|| Supervised::new(env, dir).certificates());
        let named = |path: &Option<String>| path.as_ref().map(PathBuf::from);
        let [ca, cert, key] = match own {
            Some(paths) => paths.map(Some),
            None => [named(&self.ca), named(&self.cert), named(&self.key)],
        };
        let tls = match &ca {
            None => None,
            Some(ca) => {
                let identity = cert.as_ref().zip(key.as_ref());
                let identity_pem = identity.map(|(cert, key)| anyhow::Ok((read(cert)?, read(key)?)));
                Some(EtcdTls { ca_pem: read(ca)?, identity_pem: identity_pem.transpose()? })
            }
        };
        let scheme = if tls.is_some() { "https" } else { "http" };
        let endpoints = self.members.iter().map(|member| format!("{scheme}://{member}")).collect();
        Ok(EtcdOptions { endpoints, tls, prefix: self.prefix().to_owned() })
    }
}

/// An engine that is connected.
#[derive(Clone)]
pub(crate) struct Engine {
    etcd: Etcd,
    /// Members of an engine of our own may be replaced.
    address: Arc<Mutex<EngineAddress>>,
}

impl Engine {
    /// Connects.
    pub(crate) async fn connect(env: &Env, dir: &NodeDir, address: &EngineAddress) -> Result<Self> {
        let etcd = Etcd::connect(&address.options(env, dir)?, env).await;
        let etcd = etcd.with_context(|| {
            format!("the engine with the logs of the cluster cannot be used: {address} (see `etcdctl endpoint status`)")
        })?;
        Ok(Self { etcd, address: Arc::new(Mutex::new(address.clone())) })
    }

    /// Goes to these members of the same engine from now on.
    pub(crate) fn follow(&self, env: &Env, dir: &NodeDir, address: &EngineAddress) -> Result<()> {
        self.etcd.set_members(&address.options(env, dir)?)?;
        *self.address.lock().unwrap_or_else(PoisonError::into_inner) = address.clone();
        Ok(())
    }

    /// Fails unless its members agree on something now. Returns whether the place is free for the move with this number.
    pub(crate) async fn is_free(&self, number: u64) -> Result<bool> {
        let free = self.etcd.is_free(number).await;
        free.with_context(|| format!("reading from {}", self.address()))
    }

    /// All its members.
    pub(crate) async fn list(&self) -> Result<Vec<EtcdMember>> {
        self.etcd.list_members().await.with_context(|| format!("listing the members of {}", self.address()))
    }

    /// Takes a member in, without a vote. Returns its number.
    pub(crate) async fn add(&self, peer_url: &str) -> Result<u64> {
        self.etcd.add_learner(peer_url).await.with_context(|| format!("adding {peer_url} to etcd"))
    }

    /// Gives a member a vote, once it has what the others have.
    pub(crate) async fn promote(&self, id: u64) -> Result<()> {
        self.etcd.promote(id).await.context("giving the new member of etcd a vote")
    }

    /// Takes a member out.
    pub(crate) async fn remove(&self, id: u64) -> Result<()> {
        self.etcd.remove_member(id).await.context("taking a member out of etcd")
    }

    /// Claims the place for logs that come from elsewhere. Returns whether this move has it.
    pub(crate) async fn claim(&self, number: u64) -> Result<bool> {
        let claimed = self.etcd.claim(number, CONTROL_LEDGER).await;
        claimed.with_context(|| format!("claiming a place in {}", self.address()))
    }

    /// The number of the attempt that brought the logs here; 0: they began here.
    pub(crate) async fn number(&self) -> Result<u64> {
        self.etcd.number().await.with_context(|| format!("reading from {}", self.address()))
    }

    /// Begins a log that comes from elsewhere behind its end. Returns whether the place is still that of this move.
    pub(crate) async fn begin(&self, number: u64, ledger: LedgerId, end: (Epoch, Seq)) -> Result<bool> {
        let begun = self.etcd.begin(number, ledger, end).await;
        begun.with_context(|| format!("beginning the log of ledger {ledger} in {}", self.address()))
    }

    /// Its members, and whether they answer.
    pub(crate) async fn members(&self) -> Vec<EngineMemberInfo> {
        let members = self.etcd.members(LOOK_PATIENCE).await.into_iter();
        members.map(|(address, answers)| EngineMemberInfo { address, answers }).collect()
    }

    /// Where it is.
    pub(crate) fn address(&self) -> EngineAddress {
        self.address.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The log of a ledger.
    pub(crate) async fn log(&self, ledger: LedgerId) -> Result<Arc<dyn LedgerLog>> {
        let log = EtcdLog::open(&self.etcd, ledger).await;
        Ok(Arc::new(log.with_context(|| format!("the log of ledger {ledger} in {}", self.address()))?))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, shown: Option<&str>) {
        let address = text.parse::<EngineAddress>();
        assert_eq!(address.ok().map(|address| address.to_string()).as_deref(), shown, "{text}");
    }

    #[test]
    fn an_address_names_members_and_files_and_nothing_else() {
        check("etcd://10.0.0.1:2379", Some("etcd://10.0.0.1:2379"));
        check("etcd://a:1,b:2/?prefix=x", Some("etcd://a:1,b:2?prefix=x"));
        check("etcd://a:1?ca=/ca&cert=/c&key=/k", Some("etcd://a:1?ca=/ca&cert=/c&key=/k"));
        check("etcd://", None);
        check("etcd://a", None);
        check("http://a:1", None);
        check("etcd://a:1,", None);
        check("etcd://a:1?cert=/c", None);
        check("etcd://a:1?cert=/c&key=/k", None);
        check("etcd://a:1?prefix=", None);
        check("etcd://a:1?more=1", None);
    }

    #[test]
    fn an_engine_of_our_own_is_found_again() {
        let member = |host: &str| EngineMember {
            name: "node-0".to_owned(),
            host: host.to_owned(),
            client_port: 7741,
            peer_port: 7742,
        };
        let own =
            EngineAddress::own(&[member("10.0.0.1"), member("fd00::1")], ClusterId([1; 16]), 0).unwrap();
        assert!(
            own.is_own()
                && own.to_string().starts_with("etcd://10.0.0.1:7741,[fd00::1]:7741?run=own&prefix=")
        );
        assert_eq!(own.to_string().parse::<EngineAddress>().unwrap(), own);
        assert!(!"etcd://a:1".parse::<EngineAddress>().unwrap().is_own());
    }

    #[test]
    fn other_members_have_the_same_logs() {
        let parse = |text: &str| text.parse::<EngineAddress>().unwrap();
        let known = parse("etcd://a:1").of_cluster(ClusterId([1; 16]), 0);
        assert!(known.prefix().starts_with("forebay/"), "{known}");
        let next = known.moved_to(parse("etcd://b:2")).unwrap();
        assert_eq!(next.prefix(), known.prefix());
        assert!(known.moved_to(parse("etcd://b:2?prefix=x")).is_err());
        assert!(known.moved_to(parse("etcd://a:1?run=own")).is_err());
        let own = parse("etcd://a:1?run=own").of_cluster(ClusterId([1; 16]), 0);
        assert!(own.moved_to(parse("etcd://a:1")).is_err(), "its members would not be started");
    }
}
