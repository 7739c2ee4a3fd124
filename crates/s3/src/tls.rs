//! The TLS certificate: from the operator, or self-signed at the first start.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use base::env::Env;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// Configuration of TLS connections.
pub type TlsConfig = rustls::ServerConfig;

/// Paths of certificate and key.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// PEM: the certificate, then its chain.
    pub certificate: PathBuf,
    /// PEM: the private key of the certificate.
    pub key: PathBuf,
}

/// Why TLS cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file could not be read or written.
    #[error("cannot use file: path={path}")]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system.
        #[source]
        source: std::io::Error,
    },
    /// The file is not PEM, or holds something else than a certificate or key.
    #[error("not in PEM, or not what belongs there: path={path}")]
    Pem {
        /// Path of the file.
        path: PathBuf,
        /// Error of the parser.
        #[source]
        source: rustls::pki_types::pem::Error,
    },
    /// Certificate and key do not match, or are not supported.
    #[error("cannot use certificate and key")]
    Unusable(#[source] rustls::Error),
    /// The self-signed certificate could not be made.
    #[error("cannot make a certificate")]
    Make(#[source] rcgen::Error),
}

impl TlsFiles {
    /// Reads certificate and key.
    pub fn load(&self, env: &Env) -> Result<Arc<rustls::ServerConfig>, TlsError> {
        let pem = read(env, &self.certificate)?;
        let bad = |path: &Path| {
            let path = path.to_owned();
            move |source| TlsError::Pem { path, source }
        };
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
        let chain = chain.map_err(bad(&self.certificate))?;
        if chain.is_empty() {
            return Err(bad(&self.certificate)(rustls::pki_types::pem::Error::NoItemsFound));
        }
        let key = PrivateKeyDer::from_pem_slice(&read(env, &self.key)?).map_err(bad(&self.key))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(TlsError::Unusable)?
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .map_err(TlsError::Unusable)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }

    /// Makes a self-signed certificate for `names`, unless the files exist.
    pub fn make_missing(&self, env: &Env, names: Vec<String>) -> Result<(), TlsError> {
        if env.files.exists(&self.certificate) && env.files.exists(&self.key) {
            return Ok(());
        }
        let made = rcgen::generate_simple_self_signed(names).map_err(TlsError::Make)?;
        write(env, &self.key, made.signing_key.serialize_pem().as_bytes())?;
        write(env, &self.certificate, made.cert.pem().as_bytes())
    }
}

fn read(env: &Env, path: &Path) -> Result<Vec<u8>, TlsError> {
    env.files.read(path).map_err(|source| TlsError::File { path: path.to_owned(), source })
}

fn write(env: &Env, path: &Path, bytes: &[u8]) -> Result<(), TlsError> {
    env.files.write_atomic(path, bytes).map_err(|source| TlsError::File { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_made_once_and_can_be_used() {
        let dir = tempfile::tempdir().unwrap();
        let env = Env::real();
        let files = TlsFiles { certificate: dir.path().join("cert.pem"), key: dir.path().join("key.pem") };
        files.make_missing(&env, vec!["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
        let made = env.files.read(&files.certificate).unwrap();
        files.make_missing(&env, vec!["localhost".to_owned()]).unwrap();
        assert_eq!(env.files.read(&files.certificate).unwrap(), made);
        files.load(&env).unwrap();
        let swapped = TlsFiles { certificate: files.key.clone(), key: files.certificate.clone() };
        assert!(matches!(swapped.load(&env), Err(TlsError::Pem { .. })));
        let missing = TlsFiles { key: dir.path().join("none"), ..files };
        assert!(matches!(missing.load(&env), Err(TlsError::File { .. })));
    }
}
