//! How nodes join: a token allows it, for a time and a number of uses. The ledger has the hash of its secret.

use std::fmt;
use std::str::FromStr;

use base::program::FIRST_LEVEL;
use base::{ClusterId, NodeId};
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};
use wire::cluster::NewNode;
use wire::encoding;
use wire::identity::Fingerprint;

use crate::authority::hex;
use crate::{ClientRights, ControlError, NodeRecord, Plan};

/// What the text of a token begins with.
const PREFIX: &str = "forebay1.";
/// Bytes of a token's secret.
pub const SECRET_BYTES: usize = 16;
/// Most nodes of a cluster.
const NODES_MAX: usize = 1024;
const NAME_BYTES_MAX: usize = 63;
const ADDRESSES_MAX: usize = 8;

/// A token, as the control ledger has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenRecord {
    /// Its number, never used again.
    pub id: u32,
    /// SHA-256 of its secret, in hex.
    pub hash: String,
    /// The time from which on it is of no use, in seconds since 1970.
    pub expires_s: i64,
    /// How many nodes may still join with it.
    pub uses_left: u32,
    /// Time of creation, in nanoseconds since 1970.
    pub created_ns: i64,
    /// It is for clients, which may do this; `None`: for nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<ClientRights>,
    /// It is for witnesses, which run a member of an engine and nothing else.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub witness: bool,
}

/// A token, as an operator carries it to a new node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Token {
    /// The cluster.
    pub cluster: ClusterId,
    /// Its authority.
    pub authority: Fingerprint,
    /// Its number.
    pub id: u32,
    /// Its secret.
    pub secret: bytes::Bytes,
    /// Nodes that let others join: `host:port`.
    pub addresses: Vec<String>,
    /// It is for clients, not for nodes.
    #[serde(default)]
    pub is_for_clients: bool,
    /// It is for witnesses.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_for_witnesses: bool,
}

/// A text that is no token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "this is not a token: it is one long word that begins with {PREFIX}, as `forebay token create` prints it"
)]
pub struct NotAToken;

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut bytes = encoding::encode(self);
        bytes.extend_from_slice(&base::checksum::crc32c(&bytes).to_le_bytes());
        write!(f, "{PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes))
    }
}

impl FromStr for Token {
    type Err = NotAToken;

    fn from_str(text: &str) -> Result<Self, NotAToken> {
        let text = text.trim().strip_prefix(PREFIX).ok_or(NotAToken)?;
        let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| NotAToken)?;
        let (bytes, sum) = bytes.split_at(bytes.len().checked_sub(4).ok_or(NotAToken)?);
        if base::checksum::crc32c(bytes).to_le_bytes() != sum {
            return Err(NotAToken);
        }
        encoding::decode(bytes).map_err(|_| NotAToken)
    }
}

impl TokenRecord {
    /// The record of a token with this secret.
    pub fn new(id: u32, secret: &[u8], expires_s: i64, uses_left: u32, created_ns: i64) -> Self {
        Self { id, hash: hash(secret), expires_s, uses_left, created_ns, client: None, witness: false }
    }
}

fn hash(secret: &[u8]) -> String {
    hex(digest(&SHA256, secret).as_ref())
}

/// Why a node may not join.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The token is not known, or the secret is wrong.
    #[error("the token is not one of this cluster, or was removed: make one with `forebay token create`")]
    Unknown,
    /// It has expired.
    #[error(
        "the token has expired {0} s ago by the clock of the cluster: make one with `forebay token create`"
    )]
    Expired(i64),
    /// It was used.
    #[error("the token was used already: make one with `forebay token create`")]
    Used,
    /// Another node has the name.
    #[error("there is a node of that name: name={0}; give another with --name")]
    NameTaken(String),
    /// It is no name.
    #[error("bad name of a node: name={0:?} (1 to {NAME_BYTES_MAX} letters, digits and . _ -)")]
    BadName(String),
    /// Others could not reach the node.
    #[error("bad address of a node: {0:?} (host:port, at most {ADDRESSES_MAX} of them)")]
    BadAddress(String),
    /// The node has an older program than the cluster needs.
    #[error(
        "the cluster writes formats of level {cluster}, and the program of this node knows those up to level {node}: install the version \
         that the other nodes have"
    )]
    TooOld {
        /// The cluster's format level.
        cluster: u32,
        /// That of the program.
        node: u32,
    },
    /// The cluster is full.
    #[error("the cluster has as many nodes or clients as it can have")]
    Full,
    /// A client shows a token for nodes.
    #[error("the token is for nodes: make one with `forebay token create --role client`")]
    ForNodes,
    /// A node shows a token for clients.
    #[error("the token is for clients, which store nothing: make one with `forebay token create`")]
    ForClients,
    /// The control ledger cannot be changed.
    #[error(transparent)]
    Ledger(#[from] ControlError),
}

pub(crate) fn check_name(name: &str) -> Result<(), JoinError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let is_good =
        (1..=NAME_BYTES_MAX).contains(&name.len()) && name.chars().all(fits) && !name.starts_with('-');
    if is_good { Ok(()) } else { Err(JoinError::BadName(name.to_owned())) }
}

/// Checks an address: a host and a port.
///
/// # Errors
/// If it is none.
pub fn check_address(address: &str) -> Result<(), JoinError> {
    let port = address.rsplit_once(':').filter(|(host, _)| {
        let is_v6 = host.starts_with('[') && host.ends_with(']') && host.len() > 2;
        !host.is_empty() && host.len() < 256 && (is_v6 || !host.contains([':', '/', ' ']))
    });
    let port = port.and_then(|(_, port)| port.parse::<u16>().ok()).filter(|port| *port > 0);
    port.map(drop).ok_or_else(|| JoinError::BadAddress(address.to_owned()))
}

fn check_addresses(addresses: &[String]) -> Result<(), JoinError> {
    if addresses.is_empty() || addresses.len() > ADDRESSES_MAX {
        return Err(JoinError::BadAddress(addresses.join(", ")));
    }
    addresses.iter().try_for_each(|address| check_address(address))
}

impl Plan {
    /// Notes where others reach a node.
    ///
    /// # Errors
    /// If an address is none.
    pub fn move_node(&mut self, id: NodeId, addresses: &[String]) -> Result<(), JoinError> {
        check_addresses(addresses)?;
        if let Some(node) = self.next().nodes.get(&id).filter(|node| node.addresses != addresses) {
            self.set_node(NodeRecord { addresses: addresses.to_vec(), ..node.clone() });
        }
        Ok(())
    }

    /// Notes until when a node is away on purpose; `None`: it is not.
    pub fn set_maintenance(&mut self, id: NodeId, until_s: Option<i64>) {
        if let Some(node) = self.next().nodes.get(&id).filter(|node| node.maintenance_until_s != until_s) {
            self.set_node(NodeRecord { maintenance_until_s: until_s, ..node.clone() });
        }
    }

    /// A token, by its secret.
    pub(crate) fn known_token(&self, id: u32, secret: &[u8]) -> Result<TokenRecord, JoinError> {
        let token = self.next().tokens.get(&id).filter(|token| token.hash == hash(secret));
        token.cloned().ok_or(JoinError::Unknown)
    }

    pub(crate) fn use_token(&mut self, token: TokenRecord, now_s: i64) -> Result<(), JoinError> {
        if now_s >= token.expires_s {
            return Err(JoinError::Expired(now_s - token.expires_s));
        }
        let uses_left = token.uses_left.checked_sub(1).ok_or(JoinError::Used)?;
        self.set_token(TokenRecord { uses_left, ..token });
        Ok(())
    }

    /// Takes a node in, and uses the token. `key` is the fingerprint of its key: a node that joined with it before is the same
    /// node. It may have other addresses now; its name and place stay.
    ///
    /// # Errors
    /// If the token is not valid, or the node cannot be as it wants to be.
    pub fn join(&mut self, new: &NewNode, key: &str, now_s: i64) -> Result<NodeId, JoinError> {
        let token = self.known_token(new.token, &new.secret)?;
        if token.client.is_some() {
            return Err(JoinError::ForClients);
        }
        let (cluster, node) = (self.next().record.format_level, new.format_level.max(FIRST_LEVEL));
        if node < cluster {
            return Err(JoinError::TooOld { cluster, node });
        }
        let known = self.next().nodes.values().find(|node| node.key == key).map(|node| node.id);
        if let Some(id) = known {
            self.move_node(id, &new.addresses)?;
            self.certify_node(id, now_s);
            // A person says which copy of its directory counts.
            self.forget_start(id);
            return Ok(id);
        }
        check_name(&new.name)?;
        check_addresses(&new.addresses)?;
        if self.next().nodes.values().any(|node| node.name == new.name) {
            return Err(JoinError::NameTaken(new.name.clone()));
        }
        if self.next().nodes.len() >= NODES_MAX {
            return Err(JoinError::Full);
        }
        let witness = token.witness;
        self.use_token(token, now_s)?;
        let id = self.next_node();
        self.set_node(NodeRecord {
            witness,
            zone: new.zone.clone(),
            rack: new.rack.clone(),
            addresses: new.addresses.clone(),
            key: key.to_owned(),
            certified_s: Some(now_s),
            ..NodeRecord::new(id, new.name.clone())
        });
        Ok(id)
    }
}

#[cfg(test)]
mod tests;
