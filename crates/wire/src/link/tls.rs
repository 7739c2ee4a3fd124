//! Connections between machines: TCP with TLS 1.3. Both sides show certificates of the cluster's authority, which name them. A
//! stranger, which has none yet, is let in as such.

mod named;
mod verify;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use base::{ClusterId, NodeId};
use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::ServerName;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::sign::SingleCertAndKey;
use rustls::{ClientConfig, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite, BufReader};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::Connection;
use super::way::{self, Detour};
use crate::identity::{Fingerprint, Identity, IdentityError, Party, party_of};
use named::Named;
use verify::{Authority, Expected, NodeVerifier, in_plain_words, refused};

/// The protocol that both sides must name.
const PROTOCOL: &[u8] = b"forebay/1";
/// The one by which a way to another node is asked for.
const WAY: &[u8] = b"forebay-way/1";
/// How long the other side may take until both know each other.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// How long the node that is to lead to another one may take to let this process in. That other one is tried again soon.
const LEADER: Duration = Duration::from_secs(1);
/// Bytes that are read at once, about a record. `rustls` asks for 4 KiB at a time, which would be a call of the system each.
const READ_BYTES: usize = 16 << 10;

/// The algorithms. AES with short keys is the fastest, and is safe for longer than any connection lives.
fn provider() -> Arc<CryptoProvider> {
    use ring::cipher_suite::{
        TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256,
    };
    let cipher_suites =
        vec![TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256];
    Arc::new(CryptoProvider { cipher_suites, ..ring::default_provider() })
}

/// What the other side of a connection wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wants {
    /// To ask services.
    Services,
    /// A way to another node.
    Way,
}

/// Accepts connections from processes of the cluster.
pub struct Acceptor {
    tls: TlsAcceptor,
    cluster: ClusterId,
}

impl Acceptor {
    /// Accepts them as this process.
    ///
    /// # Errors
    /// If TLS cannot be set up with that identity.
    pub fn new(identity: &Identity) -> Result<Self, IdentityError> {
        let provider = provider();
        let clients = WebPkiClientVerifier::builder_with_provider(identity.roots.clone(), provider.clone())
            .allow_unauthenticated()
            .build()
            .map_err(|error| IdentityError::Unusable(rustls::Error::General(error.to_string())))?;
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(IdentityError::Unusable)?
            .with_client_cert_verifier(clients)
            .with_cert_resolver(Arc::new(SingleCertAndKey::from(identity.key.clone())));
        config.alpn_protocols = vec![PROTOCOL.to_vec(), WAY.to_vec()];
        // Each connection is checked anew: a resumed one would still have a certificate that has expired.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Self { tls: Arc::new(config).into(), cluster: identity.cluster() })
    }

    /// Takes a connection in. `None`: the other side has shown no certificate (it wants to join).
    ///
    /// # Errors
    /// If the certificate of the other side has expired, is not valid yet, or is of another authority or cluster; if the other side
    /// speaks another protocol, or takes longer than five seconds. The text says which.
    pub async fn accept(&self, stream: TcpStream) -> io::Result<(Connection, Option<Party>, Wants)> {
        let address = stream.peer_addr()?.to_string();
        stream.set_nodelay(true)?;
        let stream = shake_hands(&address, self.tls.accept(buffered(stream))).await?;
        let (_, session) = stream.get_ref();
        let wants = match session.alpn_protocol() {
            Some(WAY) => Wants::Way,
            other => check_protocol(&address, other, PROTOCOL).map(|()| Wants::Services)?,
        };
        let shown = session.peer_certificates().and_then(|chain| chain.first());
        let Some(certificate) = shown else { return Ok((Connection::over(stream), None, wants)) };
        let (party, cluster) =
            party_of(certificate).map_err(|error| refused(format!("{address}: {error}")))?;
        if cluster != self.cluster {
            return Err(refused(format!("the certificate at {address} is of another cluster")));
        }
        Ok((Connection::over(stream), Some(party), wants))
    }
}

/// Opens connections to processes of the cluster.
pub struct Connector {
    identity: Identity,
}

impl Connector {
    /// Opens them as this process.
    ///
    /// # Errors
    /// If TLS cannot be set up with that identity.
    pub fn new(identity: &Identity) -> Result<Self, IdentityError> {
        let connector = Self { identity: identity.clone() };
        connector.config(identity.party()).map_err(IdentityError::Unusable)?;
        Ok(connector)
    }

    fn config(&self, party: Party) -> Result<ClientConfig, rustls::Error> {
        let Identity { roots, key, .. } = &self.identity;
        let cluster = self.identity.cluster();
        let authority = Authority::Known(roots.clone());
        client_config(authority, cluster, Expected::Party(party), Some(SingleCertAndKey::from(key.clone())))
    }

    /// Connects to the node `wanted` through the node `via` at this address. The connection ends at the next change of `back`.
    ///
    /// # Errors
    /// As [`Connector::connect`], and if `wanted` is not reached from there.
    pub(super) async fn connect_through(
        &self,
        address: &str,
        via: NodeId,
        wanted: NodeId,
        back: watch::Receiver<u64>,
    ) -> io::Result<Connection> {
        let mut config = self.config(Party::Node(via)).map_err(io::Error::other)?;
        config.alpn_protocols = vec![WAY.to_vec()];
        let mut outer = tokio::time::timeout(LEADER, connect_tls(address, config)).await??;
        check_protocol(address, outer.get_ref().1.alpn_protocol(), WAY)?;
        way::ask(&mut outer, wanted).await?;
        let config = self.config(Party::Node(wanted)).map_err(io::Error::other)?;
        let name = format!("node {wanted}, reached through {address}");
        let inner = begin_tls(config, BufReader::with_capacity(READ_BYTES, outer))?;
        let inner = shake_hands(&name, inner).await?;
        check_protocol(&name, inner.get_ref().1.alpn_protocol(), PROTOCOL)?;
        Ok(Connection::over(Detour::new(Named { stream: inner, address: name }, back)))
    }

    /// Connects to `address` ("host:port", IPv6 in brackets; names are resolved), where this party must be.
    ///
    /// # Errors
    /// If nobody or somebody else is there, as [`Acceptor::accept`] does. Whether the other side accepts our own certificate
    /// shows only when something is read.
    pub async fn connect(&self, address: &str, party: Party) -> io::Result<Connection> {
        connect(address, self.config(party).map_err(io::Error::other)?).await
    }
}

/// Connects to a node of a cluster of which nothing is known but the fingerprint of its authority. No certificate is shown. The
/// node's certificate must come from that authority, be valid now, and name a node of `cluster`.
///
/// # Errors
/// As [`Connector::connect`].
pub async fn connect_as_stranger(
    address: &str,
    cluster: ClusterId,
    authority: Fingerprint,
) -> io::Result<Connection> {
    let config = client_config(Authority::Fingerprint(authority), cluster, Expected::AnyNode, None);
    connect(address, config.map_err(io::Error::other)?).await
}

fn client_config(
    authority: Authority,
    cluster: ClusterId,
    expected: Expected,
    key: Option<SingleCertAndKey>,
) -> Result<ClientConfig, rustls::Error> {
    let provider = provider();
    let algorithms = provider.signature_verification_algorithms;
    let verifier = Arc::new(NodeVerifier { authority, cluster, expected, algorithms });
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    let mut config = match key {
        Some(key) => builder.with_client_cert_resolver(Arc::new(key)),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![PROTOCOL.to_vec()];
    config.resumption = Resumption::disabled();
    config.enable_sni = false;
    Ok(config)
}

async fn connect(address: &str, config: ClientConfig) -> io::Result<Connection> {
    let stream = connect_tls(address, config).await?;
    check_protocol(address, stream.get_ref().1.alpn_protocol(), PROTOCOL)?;
    Ok(Connection::over(Named { stream, address: address.to_owned() }))
}

async fn connect_tls(address: &str, config: ClientConfig) -> io::Result<TlsStream<BufReader<TcpStream>>> {
    let connected = async {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        begin_tls(config, buffered(stream))?.await
    };
    shake_hands(address, connected).await
}

/// The handshake of the side that connects.
fn begin_tls<T: AsyncRead + AsyncWrite + Unpin>(
    config: ClientConfig,
    stream: T,
) -> io::Result<tokio_rustls::Connect<T>> {
    // The verifier knows whom it expects, and the name is not sent.
    let name = ServerName::try_from("forebay.internal").map_err(io::Error::other)?;
    Ok(TlsConnector::from(Arc::new(config)).connect(name, stream))
}

fn buffered(stream: TcpStream) -> BufReader<TcpStream> {
    BufReader::with_capacity(READ_BYTES, stream)
}

async fn shake_hands<T: AsyncRead + AsyncWrite>(
    address: &str,
    hands: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    match tokio::time::timeout(HANDSHAKE, hands).await {
        Ok(done) => done.map_err(|error| in_plain_words(address, error)),
        Err(_) => {
            let text = format!("{address} did not complete the handshake within {} s", HANDSHAKE.as_secs());
            Err(io::Error::new(io::ErrorKind::TimedOut, text))
        }
    }
}

fn check_protocol(address: &str, agreed: Option<&[u8]>, expected: &[u8]) -> io::Result<()> {
    match agreed {
        Some(agreed) if agreed == expected => Ok(()),
        _ => Err(refused(format!("{address} does not speak the protocol of the cluster"))),
    }
}
