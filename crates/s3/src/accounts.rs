//! Users and keys as requests see them: a snapshot in memory of what the control ledger holds.
//!
//! The node replaces the snapshot as a whole after each change, so a change counts for the next request. Looking a key
//! up takes a read lock for as long as it takes to copy a pointer. Access keys are looked up by their id, which is not
//! secret; secrets and tokens are never compared with what a client sent: signatures are verified by the protocol, and
//! tokens are opened, which compares in constant time.
//!
//! A short-lived key ends with its time, with its user, and with the key that asked for it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, RwLock};

use base::env::Env;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};

use crate::identity::{Identities, Identity, IdentityError, PolicyRequest, Secret, User, Verdict};
use crate::policy::{Policy, PolicyOf, decide};
use crate::seal::{NodeKey, Purpose};

/// What short-lived access keys begin with, and no others.
pub const SESSION_KEY_PREFIX: &str = "ASIA";
/// Opened tokens that are remembered.
const SESSIONS_REMEMBERED_MAX: usize = 4096;
/// Longest token that is looked at.
const TOKEN_BYTES_MAX: usize = 16 * 1024;

/// A user.
#[derive(Debug, Clone)]
pub struct AccountUser {
    /// What requests see of it.
    pub user: Arc<User>,
    /// Its keys do not count.
    pub disabled: bool,
}

/// An access key.
#[derive(Debug, Clone)]
pub struct AccountKey {
    /// Its id.
    pub access_key: Arc<str>,
    /// Its secret; `None` if it was sealed with another node key.
    pub secret: Option<Secret>,
    /// Whose it is.
    pub user: u32,
    /// It does not count.
    pub disabled: bool,
    /// When it was made, nanoseconds since 1970; tells it from another one of the same id.
    pub created_ns: i64,
    /// When it ends, seconds since 1970.
    pub expires_s: Option<i64>,
}

/// All users, keys and roles.
#[derive(Debug, Default)]
pub struct AccountSet {
    /// Users by id.
    pub users: HashMap<u32, AccountUser>,
    /// Keys by id.
    pub keys: HashMap<Arc<str>, AccountKey>,
    /// What roles allow, by name.
    pub roles: HashMap<String, Arc<Policy>>,
}

/// Implements [`Identities`].
pub struct Accounts {
    env: Env,
    key: NodeKey,
    set: RwLock<Arc<AccountSet>>,
    /// Tokens that were opened, by their digest: an attacker learns nothing from the time that looking one up takes.
    sessions: Mutex<HashMap<[u8; 32], Arc<Session>>>,
}

/// What a session token says. JSON, sealed; `docs/formats/users.md` describes it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Claims {
    /// 1.
    pub(crate) version: u32,
    pub(crate) user: u32,
    /// The key that asked for it.
    pub(crate) parent: String,
    pub(crate) parent_created_ns: i64,
    pub(crate) expires_s: i64,
    /// A role that limits it, as that is defined at the time of each request.
    pub(crate) role: Option<String>,
    /// A policy that limits it.
    pub(crate) policy: Option<String>,
}

/// A token that was opened.
#[derive(Debug)]
struct Session {
    access_key: String,
    claims: Claims,
    policy: Option<Arc<Policy>>,
}

/// A short-lived key, for who asked for it.
#[derive(Debug)]
pub(crate) struct NewSession {
    pub(crate) access_key: String,
    pub(crate) secret: Secret,
    pub(crate) token: String,
}

impl Accounts {
    /// Nobody, until the first [`Accounts::replace`].
    pub fn new(env: Env, key: NodeKey) -> Self {
        Self { env, key, set: RwLock::default(), sessions: Mutex::default() }
    }

    /// Counts for the next request.
    pub fn replace(&self, set: AccountSet) {
        *self.set.write().expect("no holder of this lock panics") = Arc::new(set);
    }

    /// What seals secrets.
    pub fn node_key(&self) -> &NodeKey {
        &self.key
    }

    fn set(&self) -> Arc<AccountSet> {
        self.set.read().expect("no holder of this lock panics").clone()
    }

    pub(crate) fn now_s(&self) -> i64 {
        self.env.clock.wall_ns().div_euclid(1_000_000_000)
    }

    pub(crate) fn has_role(&self, name: &str) -> bool {
        self.set().roles.contains_key(name)
    }

    /// Makes a short-lived key for the holder of a lasting one.
    pub(crate) fn new_session(
        &self,
        identity: &Identity,
        duration_s: i64,
        role: Option<String>,
        policy: Option<String>,
    ) -> Result<(NewSession, i64), IdentityError> {
        let set = self.set();
        let parent = set.keys.get(&identity.access_key).ok_or(IdentityError::UnknownKey)?;
        let access_key = new_access_key(&self.env, SESSION_KEY_PREFIX);
        let expires_s = self.now_s() + duration_s;
        let claims = Claims {
            version: 1,
            user: identity.user.id,
            parent: identity.access_key.to_string(),
            parent_created_ns: parent.created_ns,
            expires_s,
            role,
            policy,
        };
        let claims = serde_json::to_vec(&claims).expect("claims are plain data");
        let sealed = self.key.seal(Purpose::SessionToken, access_key.as_bytes(), &claims);
        let secret = self.key.session_secret(&access_key);
        Ok((NewSession { secret, token: URL_SAFE_NO_PAD.encode(sealed), access_key }, expires_s))
    }

    /// Opens a token, or remembers that it was opened.
    fn session(&self, access_key: &str, token: &str) -> Result<Arc<Session>, IdentityError> {
        if token.len() > TOKEN_BYTES_MAX {
            return Err(IdentityError::InvalidToken);
        }
        let id: [u8; 32] =
            digest(&SHA256, token.as_bytes()).as_ref().try_into().expect("SHA-256 has 32 bytes");
        let known = self.sessions.lock().expect("no holder of this lock panics").get(&id).cloned();
        if let Some(known) = known {
            let same = known.access_key == access_key;
            return if same { Ok(known) } else { Err(IdentityError::InvalidToken) };
        }
        let session = Arc::new(self.open_token(access_key, token).ok_or(IdentityError::InvalidToken)?);
        let mut sessions = self.sessions.lock().expect("no holder of this lock panics");
        if sessions.len() >= SESSIONS_REMEMBERED_MAX {
            sessions.clear();
        }
        sessions.insert(id, session.clone());
        Ok(session)
    }

    fn open_token(&self, access_key: &str, token: &str) -> Option<Session> {
        let sealed = URL_SAFE_NO_PAD.decode(token).ok()?;
        let claims = self.key.open(Purpose::SessionToken, access_key.as_bytes(), &sealed)?;
        let claims: Claims = serde_json::from_slice(&claims).ok()?;
        let parse = |text: &String| Policy::parse(text.as_bytes(), PolicyOf::Session).ok().map(Arc::new);
        let policy = match &claims.policy {
            Some(text) => Some(parse(text)?),
            None => None,
        };
        (claims.version == 1).then(|| Session { access_key: access_key.to_owned(), claims, policy })
    }

    fn identify_session(&self, access_key: &str, token: &str) -> Result<Identity, IdentityError> {
        let session = self.session(access_key, token)?;
        let set = self.set();
        let claims = &session.claims;
        let (parent, user) = set.lasting(&claims.parent, self.now_s())?;
        if parent.created_ns != claims.parent_created_ns || parent.user != claims.user {
            return Err(IdentityError::UnknownKey);
        }
        if self.now_s() >= claims.expires_s {
            return Err(IdentityError::Expired);
        }
        // A role that is gone allows nothing any more.
        let role = claims.role.as_ref().map(|role| set.roles.get(role).cloned().unwrap_or_default());
        Ok(Identity {
            user: user.user.clone(),
            access_key: access_key.into(),
            limits: role.into_iter().chain(session.policy.clone()).collect(),
            is_session: true,
        })
    }
}

impl AccountSet {
    /// A lasting key and its user, if both count.
    fn lasting(&self, access_key: &str, now_s: i64) -> Result<(&AccountKey, &AccountUser), IdentityError> {
        let key = self.keys.get(access_key).filter(|key| !key.disabled).ok_or(IdentityError::UnknownKey)?;
        let user = self.users.get(&key.user).filter(|user| !user.disabled);
        let user = user.ok_or(IdentityError::UnknownKey)?;
        if key.expires_s.is_some_and(|expires_s| now_s >= expires_s) {
            return Err(IdentityError::Expired);
        }
        Ok((key, user))
    }
}

impl Identities for Accounts {
    fn secret(&self, access_key: &str) -> Option<Secret> {
        if access_key.starts_with(SESSION_KEY_PREFIX) {
            return Some(self.key.session_secret(access_key));
        }
        let set = self.set();
        match set.lasting(access_key, self.now_s()) {
            Ok((key, _)) => key.secret.clone(),
            // The signature is verified, so that only its holder is told that the time of a key is over.
            Err(IdentityError::Expired) => set.keys.get(access_key)?.secret.clone(),
            Err(_) => None,
        }
    }

    fn identify(&self, access_key: &str, session_token: Option<&str>) -> Result<Identity, IdentityError> {
        match (access_key.starts_with(SESSION_KEY_PREFIX), session_token) {
            (true, Some(token)) => self.identify_session(access_key, token),
            (true, None) | (false, Some(_)) => Err(IdentityError::InvalidToken),
            (false, None) => {
                let set = self.set();
                let (key, user) = set.lasting(access_key, self.now_s())?;
                let (user, access_key) = (user.user.clone(), key.access_key.clone());
                Ok(Identity { user, access_key, limits: Vec::new(), is_session: false })
            }
        }
    }

    fn may(&self, request: &PolicyRequest<'_>) -> Verdict {
        decide(request)
    }
}

/// A new access key's id: the prefix and 16 random characters, 80 bits.
pub fn new_access_key(env: &Env, prefix: &str) -> String {
    const ALPHABET: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";
    let mut bytes = [0; 16];
    env.random.fill(&mut bytes);
    let letters = bytes.iter().map(|byte| char::from(ALPHABET[usize::from(byte % 32)]));
    prefix.chars().chain(letters).collect()
}

/// A new secret: 40 random letters and digits, 238 bits. Without signs, so that it needs no quotes anywhere.
pub fn new_secret(env: &Env) -> Secret {
    const ALPHABET: &[u8; 62] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
    let mut secret = String::with_capacity(40);
    while secret.len() < 40 {
        let mut byte = [0];
        env.random.fill(&mut byte);
        // 248 is the largest multiple of 62 in a byte: every letter is as likely as any other.
        if byte[0] < 248 {
            secret.push(char::from(ALPHABET[usize::from(byte[0] % 62)]));
        }
    }
    Secret::new(secret)
}

#[cfg(test)]
pub(crate) mod tests;
