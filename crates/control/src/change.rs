//! Changes of records, committed in one step.
//!
//! A record is a JSON object. Its member `revision` is the number of the batch that changed it last. Members that this version does
//! not know are kept: a newer version may have written them. Only what it knows to be no part of the record any more is dropped.

use std::sync::Arc;

use base::{NodeId, Seq};
use layout::PlacementGroup;
use meta::records::{Changes, RecordsError, RecordsSnapshot};
use meta::state::State;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::former::{OF_DRIVE, OF_FILESYSTEM};
use crate::ledger::{CLIENTS, CLUSTER, ControlError, DRIVES, FILESYSTEMS, GROUPS, KEYS, NODES, TOKENS};
use crate::{ClientRecord, ClusterRecord, DriveRecord, FilesystemRecord, NodeRecord, TokenRecord};

const REVISION: &str = "revision";

/// Changes of records, which were decided from one view.
pub struct ControlChange {
    view: Arc<RecordsSnapshot>,
    changes: Vec<(Vec<u8>, Next)>,
}

/// What becomes of a record.
enum Next {
    Removed,
    Is {
        record: Members,
        /// Members that earlier versions wrote and that are dropped.
        former: &'static [&'static str],
        /// How the record takes over what this version does not know of the present one.
        keep: fn(&mut Members, Members),
    },
}

type Members = Map<String, Value>;

/// A record as it is stored.
pub(crate) struct Stored(Members);

impl Stored {
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(bytes).map(Self)
    }

    pub(crate) fn record<T: DeserializeOwned>(mut self) -> Result<T, serde_json::Error> {
        self.0.remove(REVISION);
        serde_json::from_value(Value::Object(self.0))
    }

    /// The batch that changed the record last.
    fn revision(&self) -> Seq {
        Seq(self.0.get(REVISION).and_then(Value::as_u64).unwrap_or(0))
    }
}

impl ControlChange {
    pub(crate) fn new(view: Arc<RecordsSnapshot>) -> Self {
        Self { view, changes: Vec::new() }
    }

    pub(crate) fn put<T: Serialize + DeserializeOwned>(&mut self, key: Vec<u8>, record: &T) -> &mut Self {
        self.put_without(key, record, &[])
    }

    /// As [`Self::put`], for a record that had these members in earlier versions.
    fn put_without<T: Serialize + DeserializeOwned>(
        &mut self,
        key: Vec<u8>,
        record: &T,
        former: &'static [&'static str],
    ) -> &mut Self {
        self.changes.push((key, Next::Is { record: members(record), former, keep: keep_unknown::<T> }));
        self
    }

    pub(crate) fn remove(&mut self, key: Vec<u8>) -> &mut Self {
        self.changes.push((key, Next::Removed));
        self
    }

    /// Sets the cluster's record.
    pub fn cluster(&mut self, record: &ClusterRecord) -> &mut Self {
        self.put(KEYS.value(CLUSTER), record)
    }

    /// Adds or changes a node.
    pub fn node(&mut self, record: &NodeRecord) -> &mut Self {
        self.put(KEYS.control(NODES, record.id.0), record)
    }

    /// Removes a node.
    pub fn remove_node(&mut self, id: NodeId) -> &mut Self {
        self.remove(KEYS.control(NODES, id.0))
    }

    /// Adds or changes a token.
    pub fn token(&mut self, record: &TokenRecord) -> &mut Self {
        self.put(KEYS.control(TOKENS, record.id), record)
    }

    /// Removes a token.
    pub fn remove_token(&mut self, id: u32) -> &mut Self {
        self.remove(KEYS.control(TOKENS, id))
    }

    /// Adds or changes a client.
    pub fn client(&mut self, record: &ClientRecord) -> &mut Self {
        self.put(KEYS.control(CLIENTS, record.id), record)
    }

    /// Removes a client.
    pub fn remove_client(&mut self, id: u32) -> &mut Self {
        self.remove(KEYS.control(CLIENTS, id))
    }

    /// Adds or changes a drive.
    pub fn drive(&mut self, record: &DriveRecord) -> &mut Self {
        self.put_without(KEYS.control(DRIVES, record.id.0), record, OF_DRIVE)
    }

    /// Adds or changes a placement group.
    pub fn group(&mut self, record: &PlacementGroup) -> &mut Self {
        self.put(KEYS.control(GROUPS, record.id.0), record)
    }

    /// Adds or changes a filesystem.
    pub fn filesystem(&mut self, record: &FilesystemRecord) -> &mut Self {
        self.put_without(KEYS.control(FILESYSTEMS, record.id), record, OF_FILESYSTEM)
    }

    /// The new values of all records, as the batch `seq`.
    ///
    /// # Errors
    /// [`ControlError::Conflict`] if one of the records is another than in the view.
    pub(crate) fn decide(self, state: &dyn State, seq: Seq) -> Result<Changes, ControlError> {
        let mut changes = Changes::new();
        for (key, next) in self.changes {
            let read = |bytes: Option<Vec<u8>>| bytes.map(|bytes| Stored::read(&bytes)).transpose();
            let seen = read(self.view.get(&key)?)?;
            let stored = read(state.get(&key).map_err(RecordsError::Read)?)?;
            if stored.as_ref().map(Stored::revision) != seen.as_ref().map(Stored::revision) {
                return Err(ControlError::Conflict);
            }
            let value = match next {
                Next::Removed => None,
                Next::Is { mut record, former, keep } => {
                    if let Some(Stored(mut stored)) = stored {
                        stored.retain(|name, _| !former.contains(&name.as_str()));
                        keep(&mut record, stored);
                    }
                    record.insert(REVISION.to_owned(), seq.0.into());
                    Some(serde_json::to_vec(&record)?)
                }
            };
            changes.push((key, value));
        }
        Ok(changes)
    }
}

fn members<T: Serialize>(record: &T) -> Members {
    match serde_json::to_value(record) {
        Ok(Value::Object(members)) => members,
        other => unreachable!("records are structs of plain data: {other:?}"),
    }
}

/// Takes over what this version does not know of the stored record, in nested objects too.
fn keep_unknown<T: Serialize + DeserializeOwned>(next: &mut Members, stored: Members) {
    // Nobody decided anything from a record that cannot be read, so nothing of it is kept.
    let Ok(record) = serde_json::from_value::<T>(Value::Object(stored.clone())) else { return };
    take_over(next, stored, &members(&record));
}

fn take_over(next: &mut Members, stored: Members, known: &Members) {
    for (name, value) in stored {
        match (value, known.get(&name), next.get_mut(&name)) {
            (Value::Object(stored), Some(Value::Object(known)), Some(Value::Object(next))) => {
                take_over(next, stored, known);
            }
            (value, None, None) => drop(next.insert(name, value)),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use base::env::Env;
    use meta::log::{LedgerLog, MemLog};
    use meta::records::{Records, RecordsOptions};
    use meta::state::MemState;
    use serde::Deserialize;
    use serde_json::json;

    use super::*;
    use crate::{CONTROL_LEDGER, Control, RoleRecord};

    async fn control() -> Control {
        let log: Arc<dyn LedgerLog> = Arc::new(MemLog::new());
        Control::open(&Env::real(), log, Arc::new(MemState::default()), None).await.unwrap()
    }

    fn role(policy: &str) -> RoleRecord {
        RoleRecord { name: "reader".to_owned(), policy: policy.to_owned() }
    }

    #[tokio::test]
    async fn of_two_changes_from_one_view_the_second_is_refused_if_they_share_a_record() {
        let control = control().await;
        let [mut one, mut two, mut other] = std::array::from_fn(|_| control.view().unwrap().change());
        one.role(&role("one"));
        two.role(&role("two")).remove_user(7);
        other.role(&RoleRecord { name: "writer".to_owned(), policy: String::new() });
        control.commit(one).await.unwrap();
        assert!(matches!(control.commit(two).await, Err(ControlError::Conflict)));
        control.commit(other).await.unwrap();
        let [mut removal, mut late] = std::array::from_fn(|_| control.view().unwrap().change());
        removal.remove_role("reader");
        late.role(&role("late"));
        control.commit(removal).await.unwrap();
        assert!(matches!(control.commit(late).await, Err(ControlError::Conflict)), "the record is gone");
        let mut again = control.view().unwrap().change();
        again.role(&role("again"));
        control.commit(again).await.unwrap();
        let roles = control.view().unwrap().roles().unwrap();
        assert_eq!(roles.iter().map(|role| role.policy.as_str()).collect::<Vec<_>>(), ["again", ""]);
    }

    #[derive(Serialize, Deserialize)]
    struct Inner {
        known: u32,
    }

    #[derive(Serialize, Deserialize)]
    struct Outer {
        name: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        inner: Option<Inner>,
    }

    async fn rewritten(stored: Value, next: &Outer) -> Value {
        let state: Arc<dyn State> = Arc::new(MemState::default());
        let log = Arc::new(MemLog::new());
        let options = RecordsOptions {
            ledger: CONTROL_LEDGER,
            log,
            state: state.clone(),
            env: Env::real(),
            vacant: None,
        };
        let records = Records::open(options).await.unwrap();
        let key = KEYS.value("outer");
        let bytes = serde_json::to_vec(&stored).unwrap();
        records.commit(|_, _| Ok::<_, ControlError>(vec![(key.clone(), Some(bytes))])).await.unwrap();
        let mut change = ControlChange::new(Arc::new(records.snapshot().unwrap()));
        change.put(key.clone(), next);
        records.commit(|state, seq| change.decide(state, seq)).await.unwrap();
        serde_json::from_slice(&state.get(&key).unwrap().unwrap()).unwrap()
    }

    #[tokio::test]
    async fn what_a_newer_version_wrote_into_a_record_stays() {
        let inner = |known| Some(Inner { known });
        let name = || "new".to_owned();
        let stored = json!({"name": "old", "more": [1], "inner": {"known": 1, "more": 2}, "revision": 1});
        assert_eq!(
            rewritten(stored.clone(), &Outer { name: name(), inner: inner(3) }).await,
            json!({"name": "new", "more": [1], "inner": {"known": 3, "more": 2}, "revision": 2}),
        );
        assert_eq!(
            rewritten(stored, &Outer { name: name(), inner: None }).await,
            json!({"name": "new", "more": [1], "revision": 2}),
            "what it belonged to is gone",
        );
        assert_eq!(
            rewritten(json!({"name": "old"}), &Outer { name: name(), inner: inner(3) }).await,
            json!({"name": "new", "inner": {"known": 3}, "revision": 2}),
        );
        assert_eq!(
            rewritten(json!({"more": 1}), &Outer { name: name(), inner: None }).await,
            json!({"name": "new", "revision": 2}),
            "it cannot be read, so nobody decided anything from it",
        );
    }
}
