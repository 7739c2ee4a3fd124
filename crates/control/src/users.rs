//! Users, access keys and roles in the control ledger. `docs/formats/users.md` describes the records.

use serde::{Deserialize, Serialize};

use crate::ledger::KEYS;
use crate::{ControlChange, ControlError, ControlView};

const USERS: u8 = b'u';
const ACCESS_KEYS: u8 = b'k';
const ROLES: u8 = b'r';
const COUNTER: &str = "users";

/// The counter of users. Written with the first user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsersRecord {
    /// The next user's number.
    pub next_user: u32,
}

/// A user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserRecord {
    /// Its number, never used again.
    pub id: u32,
    /// Its name, unique; free again once the user is gone.
    pub name: String,
    /// User number on the filesystem.
    pub uid: u32,
    /// Group number of the inodes that it creates.
    pub gid: u32,
    /// Its supplementary groups.
    pub groups: Vec<u32>,
    /// Whether it may do everything without a policy.
    pub admin: bool,
    /// Whether its keys are invalid for now.
    pub disabled: bool,
    /// Its policy, as JSON text.
    pub policy: Option<String>,
    /// Time of creation, in nanoseconds since 1970.
    pub created_ns: i64,
}

/// An access key.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccessKeyRecord {
    /// Its id, unique; free again once the key is gone.
    pub access_key: String,
    /// Number of the user that owns the key.
    pub user: u32,
    /// Its secret: sealed, then base64.
    pub sealed_secret: String,
    /// Whether it is invalid for now.
    pub disabled: bool,
    /// Time of creation, in nanoseconds since 1970.
    pub created_ns: i64,
    /// Time of expiry, in seconds since 1970.
    pub expires_s: Option<i64>,
}

/// A role: a limit on the rights of the keys that take it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoleRecord {
    /// Its name, unique.
    pub name: String,
    /// Its policy, as JSON text.
    pub policy: String,
}

impl ControlChange {
    /// Sets the counter of users.
    pub fn users(&mut self, record: &UsersRecord) -> &mut Self {
        self.put(KEYS.value(COUNTER), record)
    }

    /// Adds or changes a user.
    pub fn user(&mut self, record: &UserRecord) -> &mut Self {
        self.put(KEYS.control(USERS, record.id), record)
    }

    /// Removes a user, but not its keys.
    pub fn remove_user(&mut self, id: u32) -> &mut Self {
        self.remove(KEYS.control(USERS, id))
    }

    /// Adds or changes an access key.
    pub fn access_key(&mut self, record: &AccessKeyRecord) -> &mut Self {
        self.put(KEYS.control_named(ACCESS_KEYS, &record.access_key), record)
    }

    /// Removes an access key.
    pub fn remove_access_key(&mut self, access_key: &str) -> &mut Self {
        self.remove(KEYS.control_named(ACCESS_KEYS, access_key))
    }

    /// Adds or changes a role.
    pub fn role(&mut self, record: &RoleRecord) -> &mut Self {
        self.put(KEYS.control_named(ROLES, &record.name), record)
    }

    /// Removes a role.
    pub fn remove_role(&mut self, name: &str) -> &mut Self {
        self.remove(KEYS.control_named(ROLES, name))
    }
}

impl ControlView {
    /// The counter of users; `None` if there never was a user.
    pub fn users_record(&self) -> Result<Option<UsersRecord>, ControlError> {
        self.one(COUNTER)
    }

    /// All users by number.
    pub fn users(&self) -> Result<Vec<UserRecord>, ControlError> {
        self.all(USERS)
    }

    /// All access keys by id.
    pub fn access_keys(&self) -> Result<Vec<AccessKeyRecord>, ControlError> {
        self.all(ACCESS_KEYS)
    }

    /// All roles by name.
    pub fn roles(&self) -> Result<Vec<RoleRecord>, ControlError> {
        self.all(ROLES)
    }
}

#[cfg(test)]
mod tests {
    use base::env::Env;
    use std::sync::Arc;

    use super::*;
    use crate::Control;
    use meta::log::{LedgerLog, MemLog};
    use meta::state::MemState;

    fn user() -> UserRecord {
        let name = "ann".to_owned();
        UserRecord {
            id: 7,
            name,
            uid: 1000,
            gid: 1000,
            groups: vec![4],
            admin: false,
            disabled: false,
            policy: Some("{}".to_owned()),
            created_ns: 5,
        }
    }

    fn access_key() -> AccessKeyRecord {
        AccessKeyRecord {
            access_key: "AKIAANN".to_owned(),
            user: 7,
            sealed_secret: "c2VhbGVk".to_owned(),
            disabled: false,
            created_ns: 5,
            expires_s: Some(9),
        }
    }

    #[tokio::test]
    async fn users_keys_and_roles_come_and_go() {
        let log: Arc<dyn LedgerLog> = Arc::new(MemLog::new());
        let role = RoleRecord { name: "reader".to_owned(), policy: "{}".to_owned() };
        {
            let control =
                Control::open(&Env::real(), log.clone(), Arc::new(MemState::default()), None).await.unwrap();
            assert_eq!(control.view().unwrap().users_record().unwrap(), None);
            let mut change = control.view().unwrap().change();
            change.users(&UsersRecord { next_user: 8 }).user(&user()).access_key(&access_key()).role(&role);
            control.commit(change).await.unwrap();
        }
        let control = Control::open(&Env::real(), log, Arc::new(MemState::default()), None).await.unwrap();
        assert_eq!(control.view().unwrap().users_record().unwrap(), Some(UsersRecord { next_user: 8 }));
        assert_eq!(control.view().unwrap().users().unwrap(), [user()]);
        assert!(control.view().unwrap().access_keys().unwrap() == [access_key()]);
        assert_eq!(control.view().unwrap().roles().unwrap(), [role]);
        let mut change = control.view().unwrap().change();
        change.remove_user(7).remove_access_key("AKIAANN").remove_role("reader");
        control.commit(change).await.unwrap();
        assert!(
            control.view().unwrap().users().unwrap().is_empty()
                && control.view().unwrap().roles().unwrap().is_empty()
        );
        assert!(control.view().unwrap().access_keys().unwrap().is_empty());
    }

    #[test]
    fn records_are_those_of_the_documentation_and_unknown_members_do_not_matter() {
        let text = r#"{"id":7,"name":"ann","uid":1000,"gid":1000,"groups":[4],"admin":false,"disabled":false,"policy":"{}","created_ns":5}"#;
        assert_eq!(serde_json::to_string(&user()).unwrap(), text);
        let key = r#"{"access_key":"AKIAANN","user":7,"sealed_secret":"c2VhbGVk","disabled":false,"created_ns":5,"expires_s":9}"#;
        assert_eq!(serde_json::to_string(&access_key()).unwrap(), key);
        let more = |text: &str| text.replacen('{', r#"{"more":1,"#, 1);
        assert_eq!(serde_json::from_str::<UserRecord>(&more(text)).unwrap(), user());
        assert!(serde_json::from_str::<AccessKeyRecord>(&more(key)).unwrap() == access_key());
    }
}
