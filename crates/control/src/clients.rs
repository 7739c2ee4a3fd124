//! Clients: machines that mount filesystems and are no nodes. A token says what they may do, and their records keep that.

use std::collections::{BTreeMap, BTreeSet};

use base::LedgerId;
use serde::{Deserialize, Serialize};
use wire::cluster::NewClient;
use wire::rights::{Rights, Squash};

use crate::joining::{JoinError, check_name};
use crate::{Cluster, Plan};

/// Most clients of a cluster.
const CLIENTS_MAX: usize = 10_000;

/// What a client may do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientRights {
    /// The number of the only filesystem that it may use; `None`: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filesystem: Option<u32>,
    /// It may change nothing.
    #[serde(default)]
    pub read_only: bool,
    /// Which of its users count as nobody.
    #[serde(default)]
    pub squash: Squash,
}

/// A client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientRecord {
    /// Its number, never used again.
    pub id: u32,
    /// Its name, unique among clients.
    pub name: String,
    /// The fingerprint of its key, in hex.
    pub key: String,
    /// What it may do.
    pub rights: ClientRights,
}

impl Cluster {
    /// What each client may do now, by number.
    pub fn client_rights(&self) -> BTreeMap<u32, Rights> {
        let rights = |client: &ClientRecord| {
            let filesystems = self.filesystems.values();
            let its = filesystems.filter(|record| client.rights.filesystem.is_none_or(|id| id == record.id));
            let (ledgers, filesystems): (BTreeSet<LedgerId>, BTreeSet<String>) =
                its.map(|record| (record.ledger, record.name.clone())).unzip();
            let ClientRights { read_only, squash, .. } = client.rights;
            (client.id, Rights { client: client.id, ledgers, filesystems, read_only, squash })
        };
        self.clients.values().map(rights).collect()
    }
}

impl Plan {
    /// Takes a client in, and uses the token. As [`Plan::join`].
    ///
    /// # Errors
    /// If the token is not valid or not for clients, or the client cannot be as it wants to be.
    pub fn join_client(&mut self, new: &NewClient, key: &str, now_s: i64) -> Result<u32, JoinError> {
        let token = self.known_token(new.token, &new.secret)?;
        let Some(rights) = token.client.clone() else { return Err(JoinError::ForNodes) };
        if let Some(known) = self.next().clients.values().find(|client| client.key == key) {
            return Ok(known.id);
        }
        check_name(&new.name)?;
        if self.next().clients.values().any(|client| client.name == new.name) {
            return Err(JoinError::NameTaken(new.name.clone()));
        }
        if self.next().clients.len() >= CLIENTS_MAX {
            return Err(JoinError::Full);
        }
        self.use_token(token, now_s)?;
        let id = self.next().record.next_client;
        self.set_cluster(|cluster| cluster.next_client += 1);
        self.set_client(ClientRecord { id, name: new.name.clone(), key: key.to_owned(), rights });
        Ok(id)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use base::ClusterId;
    use bytes::Bytes;

    use super::*;
    use crate::{ClusterRecord, FilesystemRecord, TokenRecord};

    fn plan(rights: Option<ClientRights>) -> Plan {
        let mut plan = Plan::new(Cluster::new(ClusterRecord::new(ClusterId([1; 16]))));
        let mut token = TokenRecord::new(plan.next_token(), b"secret", 100, 2, 0);
        token.client = rights;
        plan.set_token(token);
        for id in [1, 2] {
            let record = FilesystemRecord::new(id, "2+1".parse().unwrap());
            plan.set_filesystem(FilesystemRecord { name: format!("fs{id}"), ..record });
        }
        plan
    }

    fn wish(name: &str) -> NewClient {
        let (secret, request) = (Bytes::from_static(b"secret"), Bytes::new());
        NewClient { token: 0, secret, name: name.to_owned(), request }
    }

    #[test]
    fn a_token_for_clients_takes_in_clients_with_its_rights() {
        let rights = ClientRights { filesystem: Some(2), read_only: true, squash: Squash::All };
        let mut plan = plan(Some(rights));
        assert_eq!(plan.join_client(&wish("one"), "k1", 5).unwrap(), 0);
        // The answer got lost.
        assert_eq!(plan.join_client(&wish("one"), "k1", 500).unwrap(), 0);
        assert!(matches!(plan.join_client(&wish("one"), "k2", 5), Err(JoinError::NameTaken(_))));
        assert_eq!(plan.join_client(&wish("two"), "k2", 5).unwrap(), 1);
        assert!(matches!(plan.join_client(&wish("three"), "k3", 5), Err(JoinError::Used)));
        let all = plan.next().client_rights();
        let its = &all[&1];
        assert_eq!((its.ledgers.len(), its.filesystems.contains("fs2")), (1, true));
        assert!(its.read_only && its.squash == Squash::All && its.client == 1);
        assert!(plan.remove_client(0) && !plan.remove_client(0));
        assert_eq!(plan.next().client_rights().len(), 1);
    }

    #[test]
    fn tokens_are_for_nodes_or_for_clients() {
        let mut of_nodes = plan(None);
        assert!(matches!(of_nodes.join_client(&wish("one"), "k", 5), Err(JoinError::ForNodes)));
        let everything = ClientRights { filesystem: None, read_only: false, squash: Squash::None };
        let mut of_clients = plan(Some(everything));
        let node = wire::cluster::NewNode {
            token: 0,
            secret: Bytes::from_static(b"secret"),
            name: "n".to_owned(),
            request: Bytes::new(),
            addresses: vec!["a:1".to_owned()],
            zone: String::new(),
            rack: String::new(),
            format_level: 1,
        };
        assert!(matches!(of_clients.join(&node, "k", 5), Err(JoinError::ForClients)));
        of_clients.join_client(&wish("one"), "k", 5).unwrap();
        assert_eq!(of_clients.next().client_rights()[&0].filesystems.len(), 2);
        let mut late = plan(Some(ClientRights { filesystem: None, read_only: false, squash: Squash::None }));
        assert!(matches!(late.join_client(&wish("one"), "k", 100), Err(JoinError::Expired(0))));
        let wrong = NewClient { secret: Bytes::from_static(b"x"), ..wish("one") };
        assert!(matches!(late.join_client(&wrong, "k", 5), Err(JoinError::Unknown)));
    }
}
