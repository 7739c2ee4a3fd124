//! The node's key: seals secrets for the ledger and session tokens for clients, and derives secrets of short-lived
//! keys.
//!
//! Each purpose has a key of its own: HMAC-SHA-256 of the node's key and the name of the purpose. Sealed bytes are
//! `nonce:12 | ciphertext | tag:16`: AES-256-GCM with a random nonce, bound to a context that is not stored in them.
//! `docs/formats/users.md` draws it.

use std::sync::Arc;

use base::env::Random;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::hmac;

use crate::identity::Secret;

const NONCE_BYTES: usize = 12;
/// 40 characters in base64, as on AWS.
const SECRET_BYTES: usize = 30;

/// Keys derived from the node's key. Never printed.
pub struct NodeKey {
    secrets: LessSafeKey,
    tokens: LessSafeKey,
    stores: LessSafeKey,
    session_secrets: hmac::Key,
    random: Arc<dyn Random>,
}

/// The purpose of a seal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// The secret of an access key, in the ledger.
    AccessKeySecret,
    /// A session token.
    SessionToken,
    /// The secret that signs requests to an object store, in the ledger.
    StoreSecret,
}

impl NodeKey {
    /// Length of the key in bytes.
    pub const BYTES: usize = 32;

    /// Derives the keys.
    pub fn new(key: &[u8; Self::BYTES], random: Arc<dyn Random>) -> Self {
        let root = hmac::Key::new(hmac::HMAC_SHA256, key);
        let derive = |purpose: &str| hmac::sign(&root, purpose.as_bytes());
        let sealing = |purpose: &str| {
            let key = UnboundKey::new(&AES_256_GCM, derive(purpose).as_ref());
            LessSafeKey::new(key.expect("HMAC-SHA-256 gives 32 bytes"))
        };
        Self {
            secrets: sealing("forebay access key secret"),
            tokens: sealing("forebay session token"),
            stores: sealing("forebay object store secret"),
            session_secrets: hmac::Key::new(hmac::HMAC_SHA256, derive("forebay session secret").as_ref()),
            random,
        }
    }

    fn key(&self, purpose: Purpose) -> &LessSafeKey {
        match purpose {
            Purpose::AccessKeySecret => &self.secrets,
            Purpose::SessionToken => &self.tokens,
            Purpose::StoreSecret => &self.stores,
        }
    }

    /// Encrypts. Only the same node key, with the same purpose and context, can open the result.
    pub fn seal(&self, purpose: Purpose, context: &[u8], plain: &[u8]) -> Vec<u8> {
        let mut nonce = [0; NONCE_BYTES];
        self.random.fill(&mut nonce);
        let mut sealed = nonce.to_vec();
        let mut body = plain.to_vec();
        let nonce = Nonce::assume_unique_for_key(nonce);
        let done = self.key(purpose).seal_in_place_append_tag(nonce, Aad::from(context), &mut body);
        done.expect("what is sealed is far shorter than the 64 GiB that the cipher takes");
        sealed.extend_from_slice(&body);
        sealed
    }

    /// Opens sealed bytes; `None` if they were changed, or sealed with another key, purpose or context.
    pub fn open(&self, purpose: Purpose, context: &[u8], sealed: &[u8]) -> Option<Vec<u8>> {
        let (nonce, body) = sealed.split_at_checked(NONCE_BYTES)?;
        let nonce = Nonce::try_assume_unique_for_key(nonce).ok()?;
        let mut body = body.to_vec();
        let plain = self.key(purpose).open_in_place(nonce, Aad::from(context), &mut body).ok()?;
        Some(plain.to_vec())
    }

    /// The secret of a short-lived access key. It is derived from the key's id, so that a signature can be verified
    /// before the token is opened, and no secret is stored.
    pub fn session_secret(&self, access_key: &str) -> Secret {
        let tag = hmac::sign(&self.session_secrets, access_key.as_bytes());
        Secret::new(STANDARD.encode(&tag.as_ref()[..SECRET_BYTES]))
    }
}

/// Sealed bytes as text.
pub fn to_base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

/// Decodes the output of [`to_base64`].
pub fn from_base64(text: &str) -> Option<Vec<u8>> {
    STANDARD.decode(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::env::Env;
    use proptest::prelude::*;

    fn node_key(first: u8) -> NodeKey {
        let mut key = [7; NodeKey::BYTES];
        key[0] = first;
        NodeKey::new(&key, Env::real().random)
    }

    const GOLDEN_SEALED: &[u8] = &[
        0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0x09, 0x0a, 0x0b, 0x42, 0xae, 0xdb, 0xa3, 0xff,
        0x37, 0x80, 0xa8, 0xc9, 0x11, 0x1b, 0xf2, 0x3d, 0x8b, 0xe4, 0xeb, 0x9f, 0x55, 0xa8, 0xd6, 0xe6, 0x74,
    ];
    const GOLDEN_SECRET: &str = "CJ5VaOliwVLiUeG6fPBfH4UZpN+VMeGX7qnSq0rL";
    const USE: Purpose = Purpose::AccessKeySecret;

    #[test]
    fn what_was_sealed_opens_again_and_only_as_it_was() {
        let key = node_key(1);
        let sealed = key.seal(USE, b"context", b"secret");
        assert_eq!(key.open(USE, b"context", &sealed).unwrap(), b"secret");
        assert_eq!(key.open(USE, b"another", &sealed), None);
        assert_eq!(key.open(Purpose::SessionToken, b"context", &sealed), None);
        assert_eq!(key.open(Purpose::StoreSecret, b"context", &sealed), None);
        assert_eq!(node_key(2).open(USE, b"context", &sealed), None);
        assert_ne!(key.seal(USE, b"context", b"secret"), sealed);
        for at in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            assert_eq!(key.open(USE, b"context", &changed), None, "{at}");
            assert_eq!(key.open(USE, b"context", &sealed[..at]), None, "{at}");
        }
    }

    #[test]
    fn the_format_is_that_of_the_documentation() {
        // Computed from docs/formats/users.md with another implementation: key 01 07 07 …, nonce 00 01 … 0b.
        let sealed = GOLDEN_SEALED;
        assert_eq!(node_key(1).open(USE, b"1 AKIAEXAMPLE", sealed).unwrap(), b"secret");
        assert_eq!(node_key(1).session_secret("ASIAEXAMPLE").expose(), GOLDEN_SECRET);
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            prop_assert_eq!(node_key(1).open(USE, b"", &bytes), None);
        }
    }
}
