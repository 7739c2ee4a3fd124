//! Whether the certificate at the other side is the right one, and what people are told if it is not.

use std::io;
use std::sync::Arc;

use base::ClusterId;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::WebPkiSupportedAlgorithms;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    AlertDescription, CertificateError, DigitallySignedStruct, Error, OtherError, RootCertStore,
    SignatureScheme,
};

use crate::identity::{Fingerprint, Party, party_of};

/// Who must have signed the certificate.
#[derive(Debug)]
pub(super) enum Authority {
    /// One of these.
    Known(Arc<RootCertStore>),
    /// The one with this fingerprint, whose certificate the other side sends.
    Fingerprint(Fingerprint),
}

/// Who must be there.
#[derive(Debug)]
pub(super) enum Expected {
    /// This one.
    Party(Party),
    /// Some node.
    AnyNode,
}

/// Checks the certificate of the side that accepts.
#[derive(Debug)]
pub(super) struct NodeVerifier {
    pub(super) authority: Authority,
    pub(super) cluster: ClusterId,
    pub(super) expected: Expected,
    pub(super) algorithms: WebPkiSupportedAlgorithms,
}

/// What is wrong with a certificate that is valid in itself.
#[derive(Debug, thiserror::Error)]
enum Wrong {
    #[error("is of another cluster")]
    Cluster,
    #[error("is not of the authority with the fingerprint {0}")]
    Authority(Fingerprint),
    #[error("does not name one process of a cluster")]
    Names,
    #[error("is that of {found}, not of {expected}")]
    Party { found: Party, expected: Party },
    #[error("is that of {0}, which is not a node")]
    NoNode(Party),
}

impl From<Wrong> for Error {
    fn from(wrong: Wrong) -> Self {
        CertificateError::Other(OtherError(Arc::new(wrong))).into()
    }
}

impl NodeVerifier {
    fn roots(&self, sent: &[CertificateDer<'_>]) -> Result<Arc<RootCertStore>, Error> {
        match &self.authority {
            Authority::Known(roots) => Ok(roots.clone()),
            Authority::Fingerprint(fingerprint) => {
                let found = sent.iter().find(|certificate| Fingerprint::of(certificate) == *fingerprint);
                let mut roots = RootCertStore::empty();
                roots.add(found.ok_or(Wrong::Authority(*fingerprint))?.clone().into_owned())?;
                Ok(Arc::new(roots))
            }
        }
    }

    fn check_names(&self, certificate: &CertificateDer<'_>) -> Result<(), Wrong> {
        let (found, cluster) = party_of(certificate).map_err(|_| Wrong::Names)?;
        if cluster != self.cluster {
            return Err(Wrong::Cluster);
        }
        match (&self.expected, found) {
            (Expected::Party(expected), found) if *expected == found => Ok(()),
            (Expected::Party(expected), found) => Err(Wrong::Party { found, expected: *expected }),
            (Expected::AnyNode, Party::Node(_)) => Ok(()),
            (Expected::AnyNode, found) => Err(Wrong::NoNode(found)),
        }
    }
}

impl ServerCertVerifier for NodeVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let roots = self.roots(intermediates)?;
        let parsed = ParsedCertificate::try_from(end_entity)?;
        verify_server_cert_signed_by_trust_anchor(&parsed, &roots, intermediates, now, self.algorithms.all)?;
        self.check_names(end_entity)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("only TLS 1.3 is used".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        rustls::crypto::verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

/// The other side is not one that we talk to.
pub(super) fn refused(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, text)
}

/// Says what went wrong, and with which address.
pub(super) fn in_plain_words(address: &str, error: io::Error) -> io::Error {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
    match inner {
        Some(Error::InvalidCertificate(wrong)) => refused(about_certificate(address, wrong)),
        Some(Error::AlertReceived(alert)) => refused(about_alert(address, *alert)),
        Some(Error::NoApplicationProtocol) => {
            refused(format!("{address} does not speak the protocol of the cluster"))
        }
        Some(Error::InvalidMessage(_)) => refused(format!("{address} does not speak TLS")),
        Some(other) => refused(format!("{address} is refused: {other}")),
        None => io::Error::new(error.kind(), format!("no connection with {address}: {error}")),
    }
}

fn about_certificate(address: &str, wrong: &CertificateError) -> String {
    let what = match wrong {
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "is not valid yet: check the clocks".to_owned()
        }
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => "has expired".to_owned(),
        // Authorities of the same name differ in their keys only.
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "is of another authority".to_owned()
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "is not meant for this side of a connection".to_owned()
        }
        CertificateError::Other(OtherError(wrong)) => match wrong.downcast_ref::<Wrong>() {
            Some(Wrong::Party { found, expected }) => {
                return format!("there is {found} at {address}, not {expected}");
            }
            _ => wrong.to_string(),
        },
        other => format!("cannot be used: {other}"),
    };
    format!("the certificate at {address} {what}")
}

/// What the other side tells of its reason is little.
fn about_alert(address: &str, alert: AlertDescription) -> String {
    match alert {
        AlertDescription::NoApplicationProtocol => {
            format!("{address} does not speak the protocol of the cluster")
        }
        AlertDescription::CertificateExpired => {
            format!(
                "{address} refuses our certificate: it has expired, or is not valid yet by the clock there"
            )
        }
        AlertDescription::UnknownCA | AlertDescription::DecryptError => {
            format!("{address} refuses our certificate: it is of another authority")
        }
        other => format!("{address} refuses us: {other:?}"),
    }
}
