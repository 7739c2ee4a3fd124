//! Connections to a store: to all addresses of its name in turn, with TLS as configured.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{WebPkiSupportedAlgorithms, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use wire::store::StoreProtocol;

use super::CONNECT_TIMEOUT;
use super::settings::{StoreSettings, StoreSettingsError};

/// Idle connections are closed after this time.
const IDLE: Duration = Duration::from_secs(60);
/// A connection that is silent for so long is probed, and ends if that is not answered: after one that broke in use, the next attempt
/// should not meet another one that is as dead.
const SILENCE: Duration = Duration::from_secs(8);
const PROBE_EVERY: Duration = Duration::from_secs(3);
const PROBES: u32 = 3;
/// The most idle connections.
const IDLE_MAX: usize = 64;

pub(super) fn client(settings: &StoreSettings) -> Result<reqwest::Client, StoreSettingsError> {
    let builder = reqwest::Client::builder()
        .use_preconfigured_tls(tls(settings)?)
        .dns_resolver(Arc::new(RoundRobin::default()))
        .connect_timeout(CONNECT_TIMEOUT)
        .pool_idle_timeout(IDLE)
        .pool_max_idle_per_host(IDLE_MAX)
        .tcp_nodelay(true)
        .tcp_keepalive(SILENCE)
        .tcp_keepalive_interval(PROBE_EVERY)
        .tcp_keepalive_retries(PROBES)
        // A redirected request would carry a signature of another host.
        .redirect(reqwest::redirect::Policy::none())
        // Proxy settings in the environment are not meant for a store that an operator named.
        .no_proxy()
        .http1_only();
    builder.build().map_err(|error| StoreSettingsError::Client(error.to_string()))
}

fn tls(settings: &StoreSettings) -> Result<ClientConfig, StoreSettingsError> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone());
    let builder = builder.with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| StoreSettingsError::Client(error.to_string()))?;
    if settings.address.protocol == StoreProtocol::HttpsUnverified {
        let verifier = Arc::new(AnyCertificate(provider.signature_verification_algorithms));
        return Ok(builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth());
    }
    Ok(builder.with_root_certificates(roots(settings)?).with_no_client_auth())
}

/// The certificates of the system and those of the operator.
fn roots(settings: &StoreSettings) -> Result<RootCertStore, StoreSettingsError> {
    let mut roots = RootCertStore::empty();
    if settings.address.protocol == StoreProtocol::Http {
        return Ok(roots);
    }
    // Unreadable certificates are left out: the handshake fails if one of them is needed.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let Some(pem) = &settings.address.ca else { return Ok(roots) };
    let mut given = 0;
    for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        let certificate = certificate.map_err(|error| StoreSettingsError::Certificates(error.to_string()))?;
        roots.add(certificate).map_err(|error| StoreSettingsError::Certificates(error.to_string()))?;
        given += 1;
    }
    match given {
        0 => Err(StoreSettingsError::Certificates("there is none in PEM".to_owned())),
        _ => Ok(roots),
    }
}

/// Accepts every certificate; signatures by it are still checked.
#[derive(Debug)]
struct AnyCertificate(WebPkiSupportedAlgorithms);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(message, certificate, signature, &self.0)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, certificate, signature, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_schemes()
    }
}

/// Resolves the name for each new connection, and begins with another address each time. The connector tries the others
/// if that one does not answer.
#[derive(Default)]
struct RoundRobin {
    turns: Arc<AtomicUsize>,
}

fn rotated(mut addresses: Vec<SocketAddr>, turn: usize) -> Vec<SocketAddr> {
    addresses.sort_unstable();
    addresses.dedup();
    let len = addresses.len().max(1);
    addresses.rotate_left(turn % len);
    addresses
}

impl Resolve for RoundRobin {
    fn resolve(&self, name: Name) -> Resolving {
        let turns = self.turns.clone();
        Box::pin(async move {
            // The connector sets the port from the URL.
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let addresses = rotated(found.collect(), turns.fetch_add(1, Ordering::Relaxed));
            Ok(Box::new(addresses.into_iter()) as Addrs)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_connection_begins_with_the_next_address() {
        let address = |last: u8| SocketAddr::from(([127, 0, 0, last], 0));
        let all = vec![address(2), address(1), address(3), address(2)];
        let firsts: Vec<_> = (0..4).map(|turn| rotated(all.clone(), turn)[0]).collect();
        assert_eq!(firsts, [address(1), address(2), address(3), address(1)]);
        assert!(rotated(Vec::new(), 5).is_empty());
    }
}
