//! Who a process of a cluster is: the names in its certificate, its key, and the authorities that it believes.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use base::{ClusterId, NodeId};
use rustls::RootCertStore;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use serde::{Deserialize, Serialize};

/// What the names of all parties end with.
const DOMAIN: &str = "forebay.internal";

/// A process of a cluster, as its certificate names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Party {
    /// A node.
    Node(NodeId),
    /// A client, which is no node.
    Client(u32),
}

impl Party {
    /// The DNS name in its certificate: `node-3.<32 hex digits of the cluster>.forebay.internal`.
    pub fn dns_name(self, cluster: ClusterId) -> String {
        let cluster = Hex(&cluster.0);
        match self {
            Self::Node(node) => format!("node-{node}.{cluster}.{DOMAIN}"),
            Self::Client(client) => format!("client-{client}.{cluster}.{DOMAIN}"),
        }
    }

    /// The party and cluster that a name names. `None` for any text that [`Party::dns_name`] does not make.
    pub fn parse(name: &str) -> Option<(Self, ClusterId)> {
        let (party, rest) = name.split_once('.')?;
        let (cluster, _) = rest.split_once('.')?;
        let (kind, number) = party.split_once('-')?;
        let number = number.parse().ok()?;
        let party = match kind {
            "node" => Self::Node(NodeId(number)),
            "client" => Self::Client(number),
            _ => return None,
        };
        let cluster = cluster.parse().ok()?;
        // Each party has one name, so that no two texts stand for the same.
        (party.dns_name(cluster) == name).then_some((party, cluster))
    }
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(node) => write!(f, "node {node}"),
            Self::Client(client) => write!(f, "client {client}"),
        }
    }
}

/// Bytes as lower-case hex digits.
struct Hex<'a>(&'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Why certificate, key and authorities cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IdentityError {
    /// The text is not PEM, or is damaged.
    #[error("not in PEM: what={what}")]
    Pem {
        /// Which of the texts.
        what: &'static str,
        /// Error of the parser.
        #[source]
        source: pem::Error,
    },
    /// The text has no certificate, or several where one is meant.
    #[error("not one certificate: what={what} certificates={count}")]
    Count {
        /// Which of the texts.
        what: &'static str,
        /// The certificates in it.
        count: usize,
    },
    /// A certificate cannot be read.
    #[error("certificate cannot be read: what={what}")]
    Unreadable {
        /// Which of the texts.
        what: &'static str,
        /// Error of the parser.
        #[source]
        source: rustls::Error,
    },
    /// The certificate does not name exactly one process of a cluster.
    #[error("certificate does not name one process of a cluster: names={names:?}")]
    Names {
        /// All DNS names in it.
        names: Vec<String>,
    },
    /// The key is of another certificate.
    #[error("key and certificate do not belong together")]
    Mismatch,
    /// The key cannot be used, or TLS cannot be set up.
    #[error("key cannot be used")]
    Unusable(#[source] rustls::Error),
}

/// Certificate, key, and the certificates of the authorities that a process believes. There are several while an old one is
/// replaced by a new one.
#[derive(Clone)]
pub struct Identity {
    /// The chain ends with the authorities, so that a stranger finds the one that it knows.
    pub(crate) key: Arc<CertifiedKey>,
    pub(crate) roots: Arc<RootCertStore>,
    party: Party,
    cluster: ClusterId,
}

impl Identity {
    /// Reads them from PEM. Certificates after the first one of `certificate_pem` lead from it to an authority.
    ///
    /// # Errors
    /// If a text cannot be read, if the certificate does not name exactly one party, or if the key is not that of the certificate.
    /// Its times are not looked at, nor who signed it: other parties say so when they refuse it.
    pub fn new(certificate_pem: &str, key_pem: &str, authorities_pem: &str) -> Result<Self, IdentityError> {
        let mut chain = certificates(certificate_pem, "certificate")?;
        let authorities = certificates(authorities_pem, "authorities")?;
        let mut roots = RootCertStore::empty();
        for authority in &authorities {
            let added = roots.add(authority.clone());
            added.map_err(|source| IdentityError::Unreadable { what: "authorities", source })?;
        }
        let (party, cluster) = party_of(&chain[0])?;
        chain.extend(authorities);
        let key = PrivateKeyDer::from_pem_slice(key_pem.as_bytes());
        let key = key.map_err(|source| IdentityError::Pem { what: "key", source })?;
        let provider = rustls::crypto::ring::default_provider();
        let key = CertifiedKey::from_der(chain, key, &provider).map_err(|error| match error {
            rustls::Error::InconsistentKeys(_) => IdentityError::Mismatch,
            other => IdentityError::Unusable(other),
        })?;
        Ok(Self { key: Arc::new(key), roots: Arc::new(roots), party, cluster })
    }

    /// The party that the certificate names.
    pub fn party(&self) -> Party {
        self.party
    }

    /// Its cluster.
    pub fn cluster(&self) -> ClusterId {
        self.cluster
    }
}

/// The certificates of a text, at least one.
fn certificates(pem: &str, what: &'static str) -> Result<Vec<CertificateDer<'static>>, IdentityError> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    let read = read.map_err(|source| IdentityError::Pem { what, source })?;
    if read.is_empty() {
        return Err(IdentityError::Count { what, count: 0 });
    }
    Ok(read)
}

/// The one party that a certificate names. It may have other names too, which say nothing.
pub(crate) fn party_of(certificate: &CertificateDer<'_>) -> Result<(Party, ClusterId), IdentityError> {
    let unreadable = |error: webpki::Error| {
        let source = rustls::Error::General(error.to_string());
        IdentityError::Unreadable { what: "certificate", source }
    };
    let certificate = webpki::EndEntityCert::try_from(certificate).map_err(unreadable)?;
    let names: Vec<&str> = certificate.valid_dns_names().collect();
    let mut parties = names.iter().filter_map(|name| Party::parse(name));
    match (parties.next(), parties.next()) {
        (Some(party), None) => Ok(party),
        _ => Err(IdentityError::Names { names: names.into_iter().map(str::to_owned).collect() }),
    }
}

/// SHA-256 of an authority's certificate. A process that knows nothing else of a cluster recognises its nodes by this.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint(pub [u8; 32]);

impl Fingerprint {
    /// That of a certificate in PEM.
    ///
    /// # Errors
    /// If the text is not exactly one certificate.
    pub fn of_pem(pem: &str) -> Result<Self, IdentityError> {
        let found = certificates(pem, "authority")?;
        match &found[..] {
            [one] => Ok(Self::of(one)),
            several => Err(IdentityError::Count { what: "authority", count: several.len() }),
        }
    }

    pub(crate) fn of(certificate: &CertificateDer<'_>) -> Self {
        let digest = ring::digest::digest(&ring::digest::SHA256, certificate);
        Self(digest.as_ref().try_into().expect("SHA-256 has 32 bytes"))
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Hex(&self.0).fmt(f)
    }
}

/// The text is not 64 hexadecimal digits.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a fingerprint of 64 hexadecimal digits")]
pub struct ParseFingerprintError;

impl FromStr for Fingerprint {
    type Err = ParseFingerprintError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digit = |byte: u8| char::from(byte).to_digit(16).ok_or(ParseFingerprintError);
        let digits: Result<Vec<u32>, _> = text.bytes().map(digit).collect();
        let bytes: Vec<u8> =
            digits?.chunks(2).map(|pair| pair.iter().fold(0, |all, one| all << 4 | *one as u8)).collect();
        match text.len() {
            64 => bytes.try_into().map(Self).map_err(|_| ParseFingerprintError),
            _ => Err(ParseFingerprintError),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::authority::{Authority, CLUSTER};

    fn check(party: Party, name: &str) {
        let name = format!("{name}.30313233343536373839616263646566.forebay.internal");
        assert_eq!(party.dns_name(CLUSTER), name);
        assert_eq!(Party::parse(&name), Some((party, CLUSTER)));
    }

    #[test]
    fn names_come_back() {
        check(Party::Node(NodeId(3)), "node-3");
        check(Party::Node(NodeId(u32::MAX)), "node-4294967295");
        check(Party::Client(0), "client-0");
    }

    #[test]
    fn each_party_has_one_name() {
        let cluster = "30313233343536373839616263646566";
        let others = [
            format!("node-03.{cluster}.forebay.internal"),
            format!("node-+3.{cluster}.forebay.internal"),
            format!("node--3.{cluster}.forebay.internal"),
            format!("node-4294967296.{cluster}.forebay.internal"),
            format!("node-.{cluster}.forebay.internal"),
            format!("Node-3.{cluster}.forebay.internal"),
            format!("drive-3.{cluster}.forebay.internal"),
            format!("node-3.{cluster}.forebay.internal."),
            format!("node-3.{cluster}.forebay.example"),
            format!("a.node-3.{cluster}.forebay.internal"),
            format!("*.{cluster}.forebay.internal"),
            format!("node-3.{}.forebay.internal", cluster.replace("6465", "64E5")),
            format!("node-3.{CLUSTER}.forebay.internal"),
            "node-3.3031.forebay.internal".to_owned(),
            "node-3".to_owned(),
            String::new(),
        ];
        for name in others {
            assert_eq!(Party::parse(&name), None, "{name}");
        }
    }

    /// The error of an identity in which these are put together.
    #[track_caller]
    fn check_error(certificate: &str, key: &str, authorities: &str, message: &str) {
        let error = Identity::new(certificate, key, authorities).err().expect("it is refused");
        assert!(error.to_string().contains(message), "{error}");
    }

    #[test]
    fn certificate_key_and_authorities_are_checked() {
        let authority = Authority::new();
        let node = Party::Node(NodeId(3)).dns_name(CLUSTER);
        let client = Party::Client(3).dns_name(CLUSTER);
        let (certificate, key) = authority.issue(&[&node, "node3.example.com"], |_| {});
        let identity = Identity::new(&certificate, &key, &authority.pem()).unwrap();
        assert_eq!((identity.party(), identity.cluster()), (Party::Node(NodeId(3)), CLUSTER));
        let (_, other_key) = authority.issue(&[&node], |_| {});
        check_error(&certificate, &other_key, &authority.pem(), "do not belong together");
        check_error(&certificate, &certificate, &authority.pem(), "not in PEM: what=key");
        check_error(&key, &key, &authority.pem(), "not one certificate: what=certificate certificates=0");
        check_error(&certificate, &key, "", "not one certificate: what=authorities certificates=0");
        check_error(&certificate, &key, &certificate[..100], "not in PEM: what=authorities");
        for names in [vec!["node3.example.com"], vec![&node, &client], vec![&node, &node]] {
            let (certificate, key) = authority.issue(&names, |_| {});
            check_error(&certificate, &key, &authority.pem(), "does not name one process");
        }
    }

    #[test]
    fn fingerprints_are_text_and_those_of_one_certificate() {
        let authority = Authority::new();
        let fingerprint = Fingerprint::of_pem(&authority.pem()).unwrap();
        let text = fingerprint.to_string();
        assert_eq!((text.len(), text.parse()), (64, Ok(fingerprint)));
        assert_ne!(Fingerprint::of_pem(&Authority::new().pem()).unwrap(), fingerprint);
        for bad in
            ["", &text[1..], &format!("{text}0"), &text.replace(&text[..1], "g"), &format!("+{}", &text[1..])]
        {
            assert_eq!(bad.parse::<Fingerprint>(), Err(ParseFingerprintError), "{bad}");
        }
        assert!(Fingerprint::of_pem(&(authority.pem() + &authority.pem())).is_err());
    }
}
