//! Users and keys: a snapshot in memory of the records in the control ledger.
//!
//! After each change the node replaces the whole snapshot, so the next request sees the change. A lookup holds a read
//! lock only while it copies a pointer. Keys are found by their id, which is no secret. Secrets and tokens are never
//! compared with bytes from a client: the protocol verifies signatures, and opening a token compares in constant time.
//!
//! A short-lived key becomes invalid when it expires, and when its user or the key that requested it becomes invalid.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use base::env::Env;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};

use crate::identity::{Identities, Identity, IdentityError, PolicyRequest, Secret, User, Verdict};
use crate::policy::{Policy, PolicyOf, decide};
use crate::seal::{NodeKey, Purpose};

/// Prefix of the ids of short-lived keys; lasting keys never have it.
pub const SESSION_KEY_PREFIX: &str = "ASIA";
/// Size of the cache of opened tokens.
const SESSIONS_REMEMBERED_MAX: usize = 4096;
/// Longest token that is opened.
const TOKEN_BYTES_MAX: usize = 16 * 1024;

/// A user.
#[derive(Debug, Clone)]
pub struct AccountUser {
    /// The user as requests see it.
    pub user: Arc<User>,
    /// All keys of the user are refused.
    pub disabled: bool,
}

/// An access key.
#[derive(Debug, Clone)]
pub struct AccountKey {
    /// Its id.
    pub access_key: Arc<str>,
    /// Its secret; `None` if it was sealed with another node key.
    pub secret: Option<Secret>,
    /// Number of the key's user.
    pub user: u32,
    /// The key is refused.
    pub disabled: bool,
    /// Creation time, nanoseconds since 1970; distinguishes a key from an earlier key with the same id.
    pub created_ns: i64,
    /// Expiration, seconds since 1970.
    pub expires_s: Option<i64>,
}

/// All users, keys and roles.
#[derive(Debug, Default)]
pub struct AccountSet {
    /// Users by id.
    pub users: HashMap<u32, AccountUser>,
    /// Keys by id.
    pub keys: HashMap<Arc<str>, AccountKey>,
    /// Policies of roles, by name.
    pub roles: HashMap<String, Arc<Policy>>,
}

/// Implements [`Identities`].
pub struct Accounts {
    env: Env,
    key: NodeKey,
    set: RwLock<Arc<AccountSet>>,
    /// The boot time until which the set counts.
    valid_until_ns: AtomicU64,
    /// Cache of opened tokens, by digest: the time of a lookup tells an attacker nothing.
    sessions: Mutex<HashMap<[u8; 32], Arc<Session>>>,
}

/// Contents of a session token. JSON, sealed; `docs/formats/users.md` describes it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Claims {
    /// Always 1.
    pub(crate) version: u32,
    pub(crate) user: u32,
    /// The key that requested the session.
    pub(crate) parent: String,
    pub(crate) parent_created_ns: i64,
    pub(crate) expires_s: i64,
    /// Role that limits the key, as it is defined at the time of each request.
    pub(crate) role: Option<String>,
    /// Policy that limits the key.
    pub(crate) policy: Option<String>,
}

/// A token that was opened.
#[derive(Debug)]
struct Session {
    access_key: String,
    claims: Claims,
    policy: Option<Arc<Policy>>,
}

/// A short-lived key for the client that requested it.
#[derive(Debug)]
pub(crate) struct NewSession {
    pub(crate) access_key: String,
    pub(crate) secret: Secret,
    pub(crate) token: String,
}

impl Accounts {
    /// Without users, until the first [`Accounts::replace`].
    pub fn new(env: Env, key: NodeKey) -> Self {
        let valid_until_ns = AtomicU64::new(u64::MAX);
        Self { env, key, set: RwLock::default(), valid_until_ns, sessions: Mutex::default() }
    }

    /// Until this boot time the snapshot counts. Later, all requests are refused: keys may have been withdrawn since.
    pub fn set_valid_until(&self, boot_ns: u64) {
        self.valid_until_ns.store(boot_ns, Ordering::Relaxed);
    }

    /// Replaces the snapshot. The next request sees it.
    pub fn replace(&self, set: AccountSet) {
        *self.set.write().expect("no holder of this lock panics") = Arc::new(set);
    }

    /// The key that seals secrets.
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

    /// Makes a short-lived key for the holder of a lasting key.
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

    /// Opens a token, or takes it from the cache.
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
        // A role that was removed allows nothing.
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
    /// A lasting key and its user, unless one of them is disabled or the key has expired.
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
    fn is_current(&self) -> bool {
        self.env.clock.boot_ns() < self.valid_until_ns.load(Ordering::Relaxed)
    }

    fn secret(&self, access_key: &str) -> Option<Secret> {
        if access_key.starts_with(SESSION_KEY_PREFIX) {
            return Some(self.key.session_secret(access_key));
        }
        let set = self.set();
        match set.lasting(access_key, self.now_s()) {
            Ok((key, _)) => key.secret.clone(),
            // The secret is needed to verify the signature, so that only the holder of the key learns that it has
            // expired.
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

/// A new secret: 40 random letters and digits, 238 bits. Without special characters, so that it needs no quotes
/// anywhere.
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
