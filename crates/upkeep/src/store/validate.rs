//! Checks whether a store can be used: runs every kind of request once.

use base::ClusterId;
use bytes::Bytes;
use wire::store::{ObjectStore, StoreCheck, StoreError};

use super::S3Store;

/// The stored byte.
const BYTE: &[u8] = b"f";
/// How often the byte is read if other bytes come back.
const READS: u32 = 3;

/// The keys of the objects with which a node validates a store.
fn keys(cluster: ClusterId, node: u32) -> (String, String) {
    (key(cluster, node, "rw"), key(cluster, node, "remove"))
}

/// The key of an object with which a node tries a store.
pub(super) fn key(cluster: ClusterId, node: u32, what: &str) -> String {
    let guid = cluster.to_string();
    let (prefix, suffix) = guid.split_once('-').expect("a cluster's id is written with dashes");
    format!("{prefix}/verify/{node}/{what}/{suffix}")
}

fn note(checks: &mut Vec<StoreCheck>, verb: &str, key: &str, result: Result<(), StoreError>) -> bool {
    let error = result.err();
    checks.push(StoreCheck {
        verb: verb.to_owned(),
        key: key.to_owned(),
        advice: error.as_ref().map(|error| error.advice().to_owned()),
        problem: error.as_ref().map(StoreError::to_string),
    });
    error.is_none()
}

impl S3Store {
    /// Stores a byte, reads it, removes an object that does not exist, and removes the byte. If the byte cannot be
    /// stored, it ends there. Returns the steps in order.
    pub async fn validate(&self, cluster: ClusterId, node: u32) -> Vec<StoreCheck> {
        let (stored, absent) = keys(cluster, node);
        let mut checks = Vec::new();
        let put = self.put(stored.clone(), vec![Bytes::from_static(BYTE)].into()).await;
        if !note(&mut checks, "PUT", &stored, put) {
            return checks;
        }
        let got = self.get_byte(&stored).await;
        if note(&mut checks, "GET", &stored, got) {
            let removed = self.delete(absent.clone()).await;
            note(&mut checks, "DELETE", &absent, removed);
        }
        let removed = self.delete(stored.clone()).await;
        note(&mut checks, "DELETE", &stored, removed);
        checks
    }

    async fn get_byte(&self, key: &str) -> Result<(), StoreError> {
        for _ in 0..READS {
            if self.get(key.to_owned(), None).await? == BYTE {
                return Ok(());
            }
        }
        Err(StoreError::Unexpected("other bytes came back than were stored".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn validation_objects_have_their_documented_names() {
        let (stored, absent) = keys(ClusterId([0xab; 16]), 3);
        assert_eq!(stored, "abababab/verify/3/rw/abab-abab-abab-abababababab");
        assert_eq!(absent, "abababab/verify/3/remove/abab-abab-abab-abababababab");
    }
}
