//! The cluster's authority: it says by certificates which process is which node. Its key is on the nodes that may own the control
//! ledger, never in the ledger.

use base::ClusterId;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType, DnValue,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PublicKeyData,
};
use ring::digest::{SHA256, digest};
use time::{Duration, OffsetDateTime};
use wire::identity::Party;

/// Clocks of machines differ: certificates are valid from a day before they were made.
const BACKDATED: Duration = Duration::days(1);
/// How long a certificate of a process is valid.
const VALID: Duration = Duration::days(365);
/// The same in seconds.
pub const CERTIFICATE_S: i64 = VALID.whole_seconds();
/// How long the authority's certificate is valid.
const AUTHORITY_VALID: Duration = Duration::days(20 * 365);

/// Why a certificate or a key could not be made or read.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// Certificates cannot be made with this.
    #[error("the key of the cluster's authority does not work: {0}")]
    Unusable(#[source] rcgen::Error),
    /// A request for a certificate is malformed, or its sender does not have the key.
    #[error("the request for a certificate is not valid: {0}")]
    BadRequest(#[source] rcgen::Error),
}

/// A new key of a process, and the request for its certificate.
pub struct NewKey {
    /// The private key (PEM).
    pub key_pem: String,
    /// The request (PKCS #10, DER).
    pub request: Vec<u8>,
}

impl NewKey {
    /// Makes a key.
    pub fn make() -> Result<Self, AuthorityError> {
        let key = KeyPair::generate().map_err(AuthorityError::Unusable)?;
        Self::request(&key)
    }

    /// A request for the certificate of a key that there is.
    pub fn of_pem(key_pem: &str) -> Result<Self, AuthorityError> {
        Self::request(&KeyPair::from_pem(key_pem).map_err(AuthorityError::Unusable)?)
    }

    fn request(key: &KeyPair) -> Result<Self, AuthorityError> {
        let request = CertificateParams::default().serialize_request(key);
        let request = request.map_err(AuthorityError::Unusable)?;
        Ok(Self { key_pem: key.serialize_pem(), request: request.der().to_vec() })
    }
}

/// The fingerprint of the key in a request.
///
/// # Errors
/// If the request is malformed, or was not signed with its key.
pub fn key_of_request(request: &[u8]) -> Result<String, AuthorityError> {
    Ok(key_of(&parse(request)?))
}

fn parse(request: &[u8]) -> Result<CertificateSigningRequestParams, AuthorityError> {
    CertificateSigningRequestParams::from_der(&request.into()).map_err(AuthorityError::BadRequest)
}

fn key_of(request: &CertificateSigningRequestParams) -> String {
    hex(digest(&SHA256, &request.public_key.subject_public_key_info()).as_ref())
}

/// Makes certificates.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate_pem: String,
    key_pem: String,
}

/// A certificate, and the fingerprint of its key: that stays when the certificate is renewed.
pub struct Issued {
    /// The certificate (PEM).
    pub certificate_pem: String,
    /// SHA-256 of the public key, in hex.
    pub key: String,
}

impl Authority {
    /// A new authority.
    ///
    /// # Errors
    /// If there is no randomness for its key.
    pub fn make(cluster: ClusterId, now_ns: i64) -> Result<Self, AuthorityError> {
        Self::make_named(format!("Forebay cluster {cluster}"), now_ns)
    }

    /// A new authority with this name.
    ///
    /// # Errors
    /// As for [`Authority::make`].
    pub fn make_named(text: String, now_ns: i64) -> Result<Self, AuthorityError> {
        let key = KeyPair::generate().map_err(AuthorityError::Unusable)?;
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        name(&mut params, text);
        valid(&mut params, now_ns, AUTHORITY_VALID);
        let certificate = params.self_signed(&key).map_err(AuthorityError::Unusable)?;
        let (certificate_pem, key_pem) = (certificate.pem(), key.serialize_pem());
        Ok(Self { issuer: Issuer::new(params, key), certificate_pem, key_pem })
    }

    /// The authority of this certificate and key.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn of_pem(certificate_pem: &str, key_pem: &str) -> Result<Self, AuthorityError> {
        let key = KeyPair::from_pem(key_pem).map_err(AuthorityError::Unusable)?;
        let issuer = Issuer::from_ca_cert_pem(certificate_pem, key).map_err(AuthorityError::Unusable)?;
        Ok(Self { issuer, certificate_pem: certificate_pem.to_owned(), key_pem: key_pem.to_owned() })
    }

    /// Its certificate.
    pub fn certificate_pem(&self) -> &str {
        &self.certificate_pem
    }

    /// Its key.
    pub fn key_pem(&self) -> &str {
        &self.key_pem
    }

    /// Makes the certificate of a party. Nothing is taken from the request but its key.
    ///
    /// # Errors
    /// If the request is malformed, or was not signed with its key.
    pub fn issue(
        &self,
        cluster: ClusterId,
        party: Party,
        request: &[u8],
        now_ns: i64,
    ) -> Result<Issued, AuthorityError> {
        let mut request = parse(request)?;
        let dns_name = party.dns_name(cluster);
        let mut params = CertificateParams::new(vec![dns_name.clone()]).map_err(AuthorityError::Unusable)?;
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        name(&mut params, dns_name);
        valid(&mut params, now_ns, VALID);
        request.params = params;
        let certificate = request.signed_by(&self.issuer).map_err(AuthorityError::Unusable)?;
        Ok(Issued { certificate_pem: certificate.pem(), key: key_of(&request) })
    }

    /// Makes a key and a certificate for a program at a host, valid for as long as the authority. Returns certificate and key.
    ///
    /// # Errors
    /// If the host is no name and no address.
    pub fn issue_to_host(&self, host: &str, now_ns: i64) -> Result<(String, String), AuthorityError> {
        let key = KeyPair::generate().map_err(AuthorityError::Unusable)?;
        let mut params = CertificateParams::new(vec![host.to_owned()]).map_err(AuthorityError::Unusable)?;
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        name(&mut params, host.to_owned());
        valid(&mut params, now_ns, AUTHORITY_VALID);
        let certificate = params.signed_by(&key, &self.issuer).map_err(AuthorityError::Unusable)?;
        Ok((certificate.pem(), key.serialize_pem()))
    }
}

fn name(params: &mut CertificateParams, name: String) {
    params.distinguished_name.push(DnType::CommonName, DnValue::Utf8String(name));
}

fn valid(params: &mut CertificateParams, now_ns: i64, time: Duration) {
    let now = OffsetDateTime::from_unix_timestamp_nanos(now_ns.into()).unwrap_or(OffsetDateTime::UNIX_EPOCH);
    params.not_before = now - BACKDATED;
    params.not_after = now + time;
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
