//! Object stores in the control ledger. `docs/formats/stores.md` describes the records.

use serde::{Deserialize, Serialize};
use wire::store::StoreAddress;

use crate::ledger::KEYS;
use crate::{ControlChange, ControlError, ControlView};

const STORES: u8 = b's';
const COUNTER: &str = "stores";

/// The counter of object stores. Written with the first store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoresRecord {
    /// The next store's number.
    pub next_store: u32,
}

/// An object store. No `Debug`, because it holds a secret, although a sealed one.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreRecord {
    /// Its number, never used again.
    pub id: u32,
    /// Its name, unique; free again once the store is gone.
    pub name: String,
    /// Address of the store.
    pub address: StoreAddress,
    /// Secret of its access key: sealed, then base64.
    pub sealed_secret: String,
    /// Time of creation, in nanoseconds since 1970.
    pub created_ns: i64,
}

/// How a filesystem uses an object store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierRecord {
    /// The store's number.
    pub store: u32,
    /// Seconds for which uploaded data also stays on drives; `None`: as the filesystem group says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retention_s: Option<u64>,
    /// Seconds between the writing of data and its upload; `None`: as the filesystem group says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cue_s: Option<u64>,
    /// Whether the filesystem leaves the store: all data returns to the drives first.
    pub detaching: bool,
}

impl ControlChange {
    /// Sets the counter of stores.
    pub fn stores(&mut self, record: &StoresRecord) -> &mut Self {
        self.put(KEYS.value(COUNTER), record)
    }

    /// Adds or changes a store.
    pub fn store(&mut self, record: &StoreRecord) -> &mut Self {
        self.put(KEYS.control(STORES, record.id), record)
    }

    /// Removes a store.
    pub fn remove_store(&mut self, id: u32) -> &mut Self {
        self.remove(KEYS.control(STORES, id))
    }
}

impl ControlView {
    /// The counter of stores; `None` if there never was a store.
    pub fn stores_record(&self) -> Result<Option<StoresRecord>, ControlError> {
        self.one(COUNTER)
    }

    /// All stores by number.
    pub fn stores(&self) -> Result<Vec<StoreRecord>, ControlError> {
        self.all(STORES)
    }
}

#[cfg(test)]
mod tests {
    use base::env::Env;
    use std::sync::Arc;

    use wire::store::{StoreAuth, StoreLimits, StoreProtocol};

    use super::*;
    use crate::Control;
    use meta::log::{LedgerLog, MemLog};
    use meta::state::MemState;

    fn store() -> StoreRecord {
        let address = StoreAddress {
            protocol: StoreProtocol::HttpsUnverified,
            host: "s3.example.org".to_owned(),
            port: 443,
            bucket: "Bucket".to_owned(),
            prefix: "a/b".to_owned(),
            region: "us-east-1".to_owned(),
            auth: StoreAuth::V4,
            access_key: "AKIACOLD".to_owned(),
            ca: None,
            limits: StoreLimits::default(),
        };
        let sealed_secret = "c2VhbGVk".to_owned();
        StoreRecord { id: 3, name: "cold".to_owned(), address, sealed_secret, created_ns: 5 }
    }

    #[tokio::test]
    async fn stores_come_and_go_and_their_numbers_are_counted() {
        let log: Arc<dyn LedgerLog> = Arc::new(MemLog::new());
        {
            let control =
                Control::open(&Env::real(), log.clone(), Arc::new(MemState::default()), None).await.unwrap();
            assert_eq!(control.view().unwrap().stores_record().unwrap(), None);
            let mut change = control.view().unwrap().change();
            change.stores(&StoresRecord { next_store: 4 }).store(&store());
            control.commit(change).await.unwrap();
        }
        let control = Control::open(&Env::real(), log, Arc::new(MemState::default()), None).await.unwrap();
        assert_eq!(control.view().unwrap().stores_record().unwrap(), Some(StoresRecord { next_store: 4 }));
        assert!(control.view().unwrap().stores().unwrap() == [store()]);
        let mut change = control.view().unwrap().change();
        change.remove_store(3);
        control.commit(change).await.unwrap();
        assert!(control.view().unwrap().stores().unwrap().is_empty());
    }

    #[test]
    fn times_that_are_not_in_the_record_are_those_of_the_group() {
        for (text, times) in [
            (r#"{"store":3,"retention_s":86400,"cue_s":3600,"detaching":false}"#, (Some(86_400), Some(3600))),
            (r#"{"store":3,"cue_s":3600,"detaching":false}"#, (None, Some(3600))),
            (r#"{"store":3,"detaching":false}"#, (None, None)),
        ] {
            let record: TierRecord = serde_json::from_str(text).unwrap();
            assert_eq!((record.retention_s, record.cue_s), times);
            assert_eq!(serde_json::to_string(&record).unwrap(), text);
        }
    }

    #[test]
    fn the_record_is_that_of_the_documentation_and_unknown_members_do_not_matter() {
        let text = r#"{"id":3,"name":"cold","address":{"protocol":"HTTPS_UNVERIFIED","host":"s3.example.org","port":443,"bucket":"Bucket","prefix":"a/b","region":"us-east-1","auth":"AWSSignature4","access_key":"AKIACOLD","ca":null,"limits":{"blob_bytes":67108864,"uploads_max":64,"downloads_max":64,"removals_max":64}},"sealed_secret":"c2VhbGVk","created_ns":5}"#;
        assert_eq!(serde_json::to_string(&store()).unwrap(), text);
        assert!(
            serde_json::from_str::<StoreRecord>(&text.replacen('{', r#"{"more":1,"#, 1)).unwrap() == store()
        );
    }
}
