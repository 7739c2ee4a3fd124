//! The address of an engine, as `start --log` takes it: `etcd://HOST:PORT,…[?…]` or `postgres://HOST:PORT,…/DATABASE[?…]`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use base::ClusterId;
use base::env::Env;
use meta::log::{EtcdOptions, EtcdTls, PostgresOptions};
use wire::cluster::EngineMember;

use super::{Supervised, bracketed};
use crate::node::NodeDir;

/// What all logs of a cluster are filed under, unless another prefix was asked for.
const PREFIX: &str = "forebay/";
/// The largest number of servers that one can be given.
const SERVERS_MAX: usize = 16;
/// The role in PostgreSQL, and the database, unless others are given.
const USER: &str = "forebay";

const ETCD_FORM: &str = "etcd://HOST:PORT,HOST:PORT,…[?prefix=NAME&ca=FILE&cert=FILE&key=FILE]";
const POSTGRES_FORM: &str =
    "postgres://HOST:PORT,HOST:PORT,…/DATABASE[?user=NAME&password-file=FILE&ca=FILE&prefix=NAME&single=yes]";

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EngineAddress {
    /// `host:port` of the servers.
    servers: Vec<String>,
    /// What all logs are filed under; `None`: not chosen.
    prefix: Option<String>,
    /// Path of the authorities' certificates on each node. With it, only TLS is used.
    ca: Option<String>,
    kind: Kind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Kind {
    Etcd {
        /// Forebay runs the members, and their certificates are on their nodes.
        is_own: bool,
        /// Paths of this node's certificate and key, on each node.
        cert: Option<String>,
        key: Option<String>,
    },
    Postgres {
        database: String,
        user: Option<String>,
        /// Path of the file with the password, on each node.
        password_file: Option<String>,
        /// A server without a synchronous standby is accepted.
        is_single: bool,
    },
}

/// How a client of an engine connects.
pub(super) enum Options {
    Etcd(EtcdOptions),
    Postgres(PostgresOptions),
}

impl std::str::FromStr for EngineAddress {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let form = || format!("an engine is given as {ETCD_FORM} or {POSTGRES_FORM}");
        let (scheme, rest) = text.split_once("://").with_context(form)?;
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (place, kind) = match scheme {
            "etcd" => (place.trim_end_matches('/'), Kind::Etcd { is_own: false, cert: None, key: None }),
            "postgres" => {
                let (servers, database) = place.split_once('/').with_context(form)?;
                if database.is_empty() || database.contains('/') {
                    bail!("a database is missing; {}", form());
                }
                let database = database.to_owned();
                (servers, Kind::Postgres { database, user: None, password_file: None, is_single: false })
            }
            _ => bail!(form()),
        };
        let servers: Vec<String> = place.split(',').map(str::to_owned).collect();
        if servers.len() > SERVERS_MAX {
            bail!("{} servers are too many: give {SERVERS_MAX} at most", servers.len());
        }
        for server in &servers {
            control::check_address(server).with_context(form)?;
        }
        let mut address = Self { servers, prefix: None, ca: None, kind };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').with_context(form)?;
            address.set(name, value).map_err(|error| anyhow!("{error}; {}", form()))?;
        }
        address.check().map_err(|error| anyhow!("{error}; {}", form()))?;
        Ok(address)
    }
}

impl std::fmt::Display for EngineAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let servers = self.servers.join(",");
        let yes = |is_so: bool, word: &str| is_so.then(|| word.to_owned());
        let named = match &self.kind {
            Kind::Etcd { is_own, cert, key } => {
                write!(f, "etcd://{servers}")?;
                [
                    ("run", yes(*is_own, "own")),
                    ("prefix", self.prefix.clone()),
                    ("ca", self.ca.clone()),
                    ("cert", cert.clone()),
                    ("key", key.clone()),
                ]
            }
            Kind::Postgres { database, user, password_file, is_single } => {
                write!(f, "postgres://{servers}/{database}")?;
                [
                    ("user", user.clone()),
                    ("password-file", password_file.clone()),
                    ("prefix", self.prefix.clone()),
                    ("ca", self.ca.clone()),
                    ("single", yes(*is_single, "yes")),
                ]
            }
        };
        let named = named.into_iter().filter_map(|(name, value)| Some((name, value?)));
        for (index, (name, value)) in named.enumerate() {
            write!(f, "{}{name}={value}", if index == 0 { '?' } else { '&' })?;
        }
        Ok(())
    }
}

impl EngineAddress {
    /// Takes a parameter.
    fn set(&mut self, name: &str, value: &str) -> Result<()> {
        if value.is_empty() {
            bail!("the parameter {name} is empty");
        }
        let place = match (name, &mut self.kind) {
            ("prefix", _) => &mut self.prefix,
            ("ca", _) => &mut self.ca,
            ("cert", Kind::Etcd { cert, .. }) => cert,
            ("key", Kind::Etcd { key, .. }) => key,
            ("user", Kind::Postgres { user, .. }) => user,
            ("password-file", Kind::Postgres { password_file, .. }) => password_file,
            ("run", Kind::Etcd { is_own, .. }) if value == "own" => {
                *is_own = true;
                return Ok(());
            }
            ("single", Kind::Postgres { is_single, .. }) if value == "yes" => {
                *is_single = true;
                return Ok(());
            }
            _ => bail!("the address of such an engine has no parameter {name:?}, or not with this value"),
        };
        *place = Some(value.to_owned());
        Ok(())
    }

    fn check(&self) -> Result<()> {
        let Kind::Etcd { cert, key, .. } = &self.kind else { return Ok(()) };
        if cert.is_some() != key.is_some() {
            bail!("cert and key belong together");
        }
        if cert.is_some() && self.ca.is_none() {
            bail!("with cert and key goes ca: the authority of the members");
        }
        Ok(())
    }

    /// The address with a prefix, which is that of the cluster unless another was chosen. After a recovery it is another one: what was
    /// there before is never taken for the logs.
    pub(crate) fn of_cluster(mut self, cluster: ClusterId, recoveries: u32) -> Self {
        self.prefix.get_or_insert_with(|| match recoveries {
            0 => format!("{PREFIX}{cluster}"),
            count => format!("{PREFIX}{cluster}.{count}"),
        });
        self
    }

    /// The same servers, without a place there.
    pub(crate) fn anywhere(self) -> Self {
        Self { prefix: None, ..self }
    }

    /// Whether a person who gives this address may mean these logs: one of the servers is the same, and no other place there is given.
    pub(crate) fn is_meant_by(&self, given: &Self) -> bool {
        std::mem::discriminant(&self.kind) == std::mem::discriminant(&given.kind)
            && self.servers.iter().any(|server| given.servers.contains(server))
            && (given.prefix.is_none() || given.prefix == self.prefix)
    }

    /// The same logs at other servers: what the new address leaves out stays.
    pub(crate) fn moved_to(&self, mut next: Self) -> Result<Self> {
        let is_same = match (&self.kind, &next.kind) {
            (Kind::Etcd { is_own, .. }, Kind::Etcd { is_own: next, .. }) => is_own == next,
            (Kind::Postgres { database, .. }, Kind::Postgres { database: next, .. }) => database == next,
            _ => false,
        };
        if !is_same {
            bail!("the logs of this cluster are at {self}; they do not move to another engine by --log");
        }
        if next.prefix.is_some() && next.prefix != self.prefix {
            bail!("the logs of this cluster begin with {:?} and stay there", self.prefix);
        }
        next.prefix.clone_from(&self.prefix);
        Ok(next)
    }

    /// What all logs are filed under.
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

    /// Whether this is the URL of one of its servers.
    pub(crate) fn has_server(&self, url: &str) -> bool {
        let server = url.trim_start_matches("https://");
        self.servers.iter().any(|one| one == server)
    }

    /// Whether Forebay runs its members.
    pub(crate) fn is_own(&self) -> bool {
        matches!(self.kind, Kind::Etcd { is_own: true, .. })
    }

    /// What people call it.
    pub(crate) fn name(&self) -> &'static str {
        match self.kind {
            Kind::Etcd { .. } => "etcd",
            Kind::Postgres { .. } => "PostgreSQL",
        }
    }

    /// The command that shows an operator how it is.
    pub(crate) fn how_to_look(&self) -> String {
        match &self.kind {
            Kind::Etcd { .. } => "`etcdctl endpoint status`".to_owned(),
            Kind::Postgres { database, .. } => {
                format!("`psql -d {database} -c 'SELECT * FROM pg_stat_replication'` at the primary")
            }
        }
    }

    /// The command by which an operator removes logs that nothing uses.
    pub(crate) fn how_to_clear(&self) -> String {
        let prefix = self.prefix();
        match &self.kind {
            Kind::Etcd { .. } => format!("etcdctl del --prefix {prefix}/"),
            Kind::Postgres { database, .. } => format!(
                "psql -d {database}: DELETE FROM forebay_moves WHERE prefix = '{prefix}'; DELETE FROM forebay_entries USING \
                 forebay_logs WHERE log = id AND prefix = '{prefix}'; DELETE FROM forebay_logs WHERE prefix = '{prefix}'"
            ),
        }
    }

    pub(super) fn options(&self, env: &Env, dir: &NodeDir) -> Result<Options> {
        let read =
            |path: &Path| env.files.read(path).with_context(|| format!("cannot read {}", path.display()));
        let named = |path: &Option<String>| path.as_ref().map(PathBuf::from);
        match &self.kind {
            Kind::Etcd { is_own, cert, key } => {
                let [ca, cert, key] = match is_own {
                    true => Supervised::new(env, dir).certificates().map(Some),
                    false => [named(&self.ca), named(cert), named(key)],
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
                let endpoints = self.servers.iter().map(|server| format!("{scheme}://{server}")).collect();
                Ok(Options::Etcd(EtcdOptions { endpoints, tls, prefix: self.prefix().to_owned() }))
            }
            Kind::Postgres { database, user, password_file, is_single } => {
                let ca_pem = named(&self.ca).map(|path| read(&path)).transpose()?;
                let password = named(password_file).map(|path| {
                    let text = String::from_utf8(read(&path)?)
                        .with_context(|| format!("the password in {} is no text", path.display()))?;
                    anyhow::Ok(text.trim_end_matches(['\n', '\r']).to_owned())
                });
                Ok(Options::Postgres(PostgresOptions {
                    hosts: self.servers.clone(),
                    database: database.clone(),
                    user: user.clone().unwrap_or_else(|| USER.to_owned()),
                    password: password.transpose()?,
                    ca_pem,
                    prefix: self.prefix().to_owned(),
                    is_single: *is_single,
                }))
            }
        }
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
        check("etcd://a:1?run=other", None);
        check("etcd://a:1?single=yes", None);
        check("postgres://a:1/logs", Some("postgres://a:1/logs"));
        let full = "postgres://a:1,[::1]:2/logs?user=u&password-file=/p&prefix=x&ca=/ca&single=yes";
        check(full, Some(full));
        check("postgres://a:1", None);
        check("postgres://a:1/", None);
        check("postgres://a:1/b/c", None);
        check("postgres://a/b", None);
        check("postgres://a:1/b?single=no", None);
        check("postgres://a:1/b?run=own", None);
        check("postgres://a:1/b?cert=/c&key=/k", None);
        check("postgres://a:1/b?password=secret", None);
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
    fn servers_that_the_logs_have_left_are_known_again() {
        let parse = |text: &str| text.parse::<EngineAddress>().unwrap();
        let left = parse("etcd://a:1,b:2?prefix=x");
        assert!(left.is_meant_by(&parse("etcd://b:2")) && left.is_meant_by(&parse("etcd://a:1?prefix=x")));
        for other in ["etcd://c:2", "etcd://a:1?prefix=y", "postgres://a:1/logs"] {
            assert!(!left.is_meant_by(&parse(other)), "{other}");
        }
        assert!(left.how_to_clear().ends_with("x/"), "not also what begins with it");
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
        let known = parse("postgres://a:1/logs").of_cluster(ClusterId([1; 16]), 0);
        let next = known.moved_to(parse("postgres://b:1,c:2/logs?single=yes")).unwrap();
        assert!(next.prefix() == known.prefix() && next.to_string().contains("single=yes"));
        assert!(known.moved_to(parse("postgres://a:1/other")).is_err());
        assert!(known.moved_to(parse("etcd://a:1")).is_err());
    }
}
