//! Certificates for tests.

use base::{ClusterId, NodeId};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose,
};

use crate::identity::{Fingerprint, Identity, Party};

/// The cluster of the tests.
pub(crate) const CLUSTER: ClusterId = ClusterId(*b"0123456789abcdef");
/// Another one, whose authority may be the same.
pub(crate) const OTHER_CLUSTER: ClusterId = ClusterId(*b"fedcba9876543210");

/// Signs certificates. All have the same name, and keys of their own.
pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.distinguished_name.push(DnType::CommonName, "authority of a cluster");
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub(crate) fn pem(&self) -> String {
        self.0.pem()
    }

    pub(crate) fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of_pem(&self.pem()).unwrap()
    }

    /// A certificate with these names, good for both sides of a connection, and its key.
    pub(crate) fn issue(
        &self,
        names: &[&str],
        change: impl FnOnce(&mut CertificateParams),
    ) -> (String, String) {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        (certificate.pem(), key.serialize_pem())
    }

    /// A party that believes this authority.
    pub(crate) fn party(&self, party: Party, cluster: ClusterId) -> Identity {
        self.changed(party, cluster, |_| {})
    }

    /// As [`Authority::party`], with a certificate that differs.
    pub(crate) fn changed(
        &self,
        party: Party,
        cluster: ClusterId,
        change: impl FnOnce(&mut CertificateParams),
    ) -> Identity {
        let (certificate, key) = self.issue(&[&party.dns_name(cluster)], change);
        Identity::new(&certificate, &key, &self.pem()).unwrap()
    }

    pub(crate) fn node(&self, node: u32) -> Identity {
        self.party(Party::Node(NodeId(node)), CLUSTER)
    }
}

/// The times of a certificate that was valid once.
pub(crate) fn expired(params: &mut CertificateParams) {
    params.not_after = rcgen::date_time_ymd(2020, 1, 1);
}

/// The times of a certificate that will be valid.
pub(crate) fn not_yet_valid(params: &mut CertificateParams) {
    params.not_before = rcgen::date_time_ymd(4000, 1, 1);
}
