//! Users, access keys and policies: builds the snapshot for requests from the control ledger, and applies changes by
//! operators.

use std::collections::HashMap;
use std::sync::Arc;

use ::s3::policy::{Policy, PolicyOf};
use ::s3::{
    AccountKey, AccountSet, AccountUser, Accounts, NodeKey, Purpose, SESSION_KEY_PREFIX, Secret, User,
};
use admin::{
    AddKey, AddUser, AdminError, KeyInfo, NewKey, PolicyInfo, PolicyTarget, Standing, UserControl, UserInfo,
};
use anyhow::{Context, Result, bail};
use base::Ino;
use base::env::Env;
use bytes::Bytes;
use client::{Client, FileKind};
use control::{AccessKeyRecord, Control, ControlChange, ControlView, RoleRecord, UserRecord, UsersRecord};
use wire::BoxFuture;

use super::{FIRST_FILESYSTEM, Node, NodeDir};

/// Prefix of the ids of new access keys.
const KEY_PREFIX: &str = "AKIA";
const FIRST_ADMIN: &str = "admin";
/// The setting of a bucket that holds its policy.
const BUCKET_POLICY: &str = "policy";
const NAME_BYTES_MAX: usize = 64;
const SECOND_NS: i64 = 1_000_000_000;
/// Longest life of a key that expires: a hundred years, so that sums do not overflow.
const EXPIRES_IN_S_MAX: u64 = 100 * 366 * 86_400;

/// Loads the key that seals secrets; creates it at the first start.
pub(crate) fn load_node_key(env: &Env, dir: &NodeDir) -> Result<NodeKey> {
    let path = dir.node_key();
    let shown = path.display();
    let bytes = if env.files.exists(&path) {
        env.files.read(&path).with_context(|| format!("cannot read {shown}"))?
    } else {
        let mut bytes = vec![0; NodeKey::BYTES];
        env.random.fill(&mut bytes);
        env.files.write_atomic(&path, &bytes).with_context(|| format!("cannot write {shown}"))?;
        bytes
    };
    let Ok(bytes) = <[u8; NodeKey::BYTES]>::try_from(bytes) else {
        bail!("{shown} is damaged: it must have {} bytes; restore it from a backup", NodeKey::BYTES);
    };
    Ok(NodeKey::new(&bytes, env.random.clone()))
}

/// Loads the users for requests. In a new cluster, creates the first administrator.
pub(super) async fn open_accounts(env: &Env, dir: &NodeDir, control: &Control) -> Result<Arc<Accounts>> {
    let accounts = Accounts::new(env.clone(), load_node_key(env, dir)?);
    if control.view()?.users_record()?.is_none() {
        create_admin(env, dir, control, &accounts).await?;
    }
    accounts.replace(account_set(&control.view()?, &accounts)?);
    Ok(Arc::new(accounts))
}

/// Writes the file before the commit: a crash in between leaves a file that the next start replaces, never a key whose
/// secret is lost.
async fn create_admin(env: &Env, dir: &NodeDir, control: &Control, accounts: &Accounts) -> Result<()> {
    let access_key = ::s3::new_access_key(env, KEY_PREFIX);
    let secret = ::s3::new_secret(env);
    let path = dir.admin_credentials();
    let text =
        format!("[default]\naws_access_key_id = {access_key}\naws_secret_access_key = {}\n", secret.expose());
    let written = env.files.write_atomic(&path, text.as_bytes());
    written.with_context(|| format!("cannot write {}", path.display()))?;
    let now_ns = env.clock.wall_ns();
    let user = UserRecord {
        id: 1,
        name: FIRST_ADMIN.to_owned(),
        uid: 0,
        gid: 0,
        groups: Vec::new(),
        admin: true,
        disabled: false,
        policy: None,
        created_ns: now_ns,
    };
    let key = key_record(accounts, &user, access_key, &secret, now_ns, None);
    let mut change = control.view()?.change();
    change.users(&UsersRecord { next_user: 2 }).user(&user).access_key(&key);
    control.commit(change).await?;
    tracing::info!(path = %path.display(), "first administrator was made");
    Ok(())
}

/// The context that a sealed secret is bound to.
fn seal_context(user: u32, access_key: &str) -> Vec<u8> {
    format!("{user} {access_key}").into_bytes()
}

fn key_record(
    accounts: &Accounts,
    user: &UserRecord,
    access_key: String,
    secret: &Secret,
    created_ns: i64,
    expires_s: Option<i64>,
) -> AccessKeyRecord {
    let context = seal_context(user.id, &access_key);
    let sealed = accounts.node_key().seal(Purpose::AccessKeySecret, &context, secret.expose().as_bytes());
    let sealed_secret = ::s3::to_base64(&sealed);
    AccessKeyRecord { access_key, user: user.id, sealed_secret, disabled: false, created_ns, expires_s }
}

fn open_secret(accounts: &Accounts, key: &AccessKeyRecord) -> Option<Secret> {
    let context = seal_context(key.user, &key.access_key);
    let sealed = ::s3::from_base64(&key.sealed_secret)?;
    let secret = accounts.node_key().open(Purpose::AccessKeySecret, &context, &sealed)?;
    String::from_utf8(secret).ok().map(Secret::new)
}

pub(crate) fn account_set(view: &ControlView, accounts: &Accounts) -> Result<AccountSet> {
    let mut set = AccountSet::default();
    for record in view.users()? {
        let policy = record.policy.as_ref().map(|text| Policy::parse(text.as_bytes(), PolicyOf::User));
        let policy = policy.transpose().unwrap_or_else(|error| {
            // Another version wrote it: the meaning of the policy is unknown, so it allows nothing.
            tracing::error!(user = record.name, %error, "policy of a user cannot be read: it allows nothing");
            Some(Policy::deny_everything())
        });
        let user = User {
            id: record.id,
            name: record.name.into(),
            uid: record.uid,
            gid: record.gid,
            groups: record.groups,
            admin: record.admin,
            policy: policy.map(Arc::new),
        };
        set.users.insert(record.id, AccountUser { user: Arc::new(user), disabled: record.disabled });
    }
    for record in view.access_keys()? {
        let secret = open_secret(accounts, &record);
        let access_key: Arc<str> = record.access_key.into();
        let key = AccountKey {
            access_key: access_key.clone(),
            secret,
            user: record.user,
            disabled: record.disabled,
            created_ns: record.created_ns,
            expires_s: record.expires_s,
        };
        set.keys.insert(access_key, key);
    }
    for role in view.roles()? {
        let policy = Policy::parse(role.policy.as_bytes(), PolicyOf::User).unwrap_or_else(|error| {
            tracing::error!(role = role.name, %error, "policy of a role cannot be read: it allows nothing");
            Policy::deny_everything()
        });
        set.roles.insert(role.name, Arc::new(policy));
    }
    Ok(set)
}

pub(super) fn check_name(what: &str, name: &str) -> Result<(), AdminError> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "._@+=-".contains(c);
    if name.is_empty() || name.len() > NAME_BYTES_MAX || name.starts_with('-') || !name.chars().all(fits) {
        return Err(AdminError::invalid(format!(
            "bad name of a {what}: name={name:?} (1 to {NAME_BYTES_MAX} letters, digits and . _ @ + = -)"
        )));
    }
    Ok(())
}

fn check_access_key(access_key: &str) -> Result<(), AdminError> {
    let fits = |c: char| c.is_ascii_graphic() && !"/,=&%\"".contains(c);
    if access_key.starts_with(SESSION_KEY_PREFIX) {
        return Err(AdminError::invalid(format!(
            "access keys that begin with {SESSION_KEY_PREFIX} are short-lived ones: access_key={access_key}"
        )));
    }
    if !(3..=128).contains(&access_key.len()) || !access_key.chars().all(fits) {
        return Err(AdminError::invalid(format!(
            "bad access key: access_key={access_key:?} (3 to 128 letters, digits and signs except / , = & % \")"
        )));
    }
    Ok(())
}

fn check_secret(secret: &str) -> Result<(), AdminError> {
    if !(8..=128).contains(&secret.len()) || !secret.chars().all(|c| c.is_ascii_graphic()) {
        return Err(AdminError::invalid("bad secret key: it needs 8 to 128 letters, digits and signs"));
    }
    Ok(())
}

fn no_user(name: &str) -> AdminError {
    AdminError::not_found(format!("no such user: name={name} (see `forebay user list`)"))
}

fn no_key(access_key: &str) -> AdminError {
    AdminError::not_found(format!("no such access key: access_key={access_key} (see `forebay key list`)"))
}

fn no_policy(whose: &str, name: &str) -> AdminError {
    AdminError::not_found(format!("{whose} has no policy: name={name}"))
}

/// Records for a list of users or keys.
struct Records {
    view: ControlView,
    users: Vec<UserRecord>,
    keys: Vec<AccessKeyRecord>,
}

impl Records {
    fn user(&self, name: &str) -> Result<&UserRecord, AdminError> {
        self.users.iter().find(|user| user.name == name).ok_or_else(|| no_user(name))
    }

    fn key(&self, access_key: &str) -> Result<&AccessKeyRecord, AdminError> {
        self.keys.iter().find(|key| key.access_key == access_key).ok_or_else(|| no_key(access_key))
    }

    fn user_info(&self, user: &UserRecord) -> UserInfo {
        UserInfo {
            name: user.name.clone(),
            id: user.id,
            uid: user.uid,
            gid: user.gid,
            groups: user.groups.clone(),
            admin: user.admin,
            disabled: user.disabled,
            has_policy: user.policy.is_some(),
            keys: self.keys.iter().filter(|key| key.user == user.id).count(),
            created_s: user.created_ns / SECOND_NS,
        }
    }

    fn key_info(&self, node: &Node, key: &AccessKeyRecord) -> KeyInfo {
        let users: HashMap<u32, &UserRecord> = self.users.iter().map(|user| (user.id, user)).collect();
        let user = users.get(&key.user);
        let now_s = node.env.clock.wall_ns() / SECOND_NS;
        let state = match user {
            Some(user) if user.disabled || key.disabled => "disabled",
            _ if key.expires_s.is_some_and(|expires_s| now_s >= expires_s) => "expired",
            _ if open_secret(&node.accounts, key).is_none() => "unreadable",
            _ => "active",
        };
        KeyInfo {
            access_key: key.access_key.clone(),
            user: user.map(|user| user.name.clone()).unwrap_or_default(),
            state: state.to_owned(),
            created_s: key.created_ns / SECOND_NS,
            expires_s: key.expires_s,
        }
    }
}

impl Node {
    fn records(&self) -> Result<Records, AdminError> {
        let view = self.view()?;
        let users = view.users().map_err(AdminError::failed)?;
        let keys = view.access_keys().map_err(AdminError::failed)?;
        Ok(Records { view, users, keys })
    }

    /// Makes a change durable; the next request sees it.
    async fn commit_users(&self, change: ControlChange) -> Result<(), AdminError> {
        self.control.commit(change).await.map_err(AdminError::failed)?;
        let set = account_set(&self.view()?, &self.accounts).map_err(AdminError::failed)?;
        self.accounts.replace(set);
        Ok(())
    }

    /// Number of keys whose secrets cannot be read, because the node's key was lost.
    pub(super) fn unreadable_keys(&self) -> Result<usize> {
        let keys = self.control.view()?.access_keys()?;
        Ok(keys.iter().filter(|key| open_secret(&self.accounts, key).is_none()).count())
    }

    pub(super) async fn users_now(&self) -> Result<Vec<UserInfo>, AdminError> {
        let records = self.records()?;
        Ok(records.users.iter().map(|user| records.user_info(user)).collect())
    }

    pub(super) async fn add_user_now(&self, request: AddUser) -> Result<UserInfo, AdminError> {
        check_name("user", &request.name)?;
        if let Some(policy) = &request.policy {
            check_policy(policy, PolicyOf::User)?;
        }
        let _one_at_a_time = self.users_lock.lock().await;
        let records = self.records()?;
        if records.user(&request.name).is_ok() {
            return Err(AdminError::conflict(format!("user exists: name={}", request.name)));
        }
        let counter = records.view.users_record().map_err(AdminError::failed)?;
        let id = counter.map_or(1, |counter| counter.next_user);
        let user = UserRecord {
            id,
            name: request.name,
            uid: request.uid,
            gid: request.gid,
            groups: request.groups,
            admin: request.admin,
            disabled: false,
            policy: request.policy,
            created_ns: self.env.clock.wall_ns(),
        };
        let mut change = records.view.change();
        change.users(&UsersRecord { next_user: id + 1 }).user(&user);
        self.commit_users(change).await?;
        Ok(records.user_info(&user))
    }

    pub(super) async fn remove_user_now(&self, name: &str) -> Result<UserInfo, AdminError> {
        let _one_at_a_time = self.users_lock.lock().await;
        let records = self.records()?;
        let user = records.user(name)?;
        let mut change = records.view.change();
        change.remove_user(user.id);
        for key in records.keys.iter().filter(|key| key.user == user.id) {
            change.remove_access_key(&key.access_key);
        }
        self.commit_users(change).await?;
        Ok(records.user_info(user))
    }

    pub(super) async fn set_user_now(&self, name: &str, standing: Standing) -> Result<UserInfo, AdminError> {
        let _one_at_a_time = self.users_lock.lock().await;
        let records = self.records()?;
        let user = UserRecord { disabled: standing == Standing::Disabled, ..records.user(name)?.clone() };
        let mut change = records.view.change();
        change.user(&user);
        self.commit_users(change).await?;
        Ok(records.user_info(&user))
    }

    pub(super) async fn keys_now(&self) -> Result<Vec<KeyInfo>, AdminError> {
        let records = self.records()?;
        Ok(records.keys.iter().map(|key| records.key_info(self, key)).collect())
    }

    pub(super) async fn add_key_now(&self, request: AddKey) -> Result<NewKey, AdminError> {
        let access_key = request.access_key.unwrap_or_else(|| ::s3::new_access_key(&self.env, KEY_PREFIX));
        check_access_key(&access_key)?;
        let secret = match request.secret_key {
            Some(secret) => {
                check_secret(&secret)?;
                Secret::new(secret)
            }
            None => ::s3::new_secret(&self.env),
        };
        let now_ns = self.env.clock.wall_ns();
        let expires_s = match request.expires_in_s {
            Some(seconds) if (1..=EXPIRES_IN_S_MAX).contains(&seconds) => {
                Some(now_ns / SECOND_NS + seconds as i64)
            }
            Some(seconds) => {
                let message =
                    format!("time is out of range: seconds={seconds} least=1 most={EXPIRES_IN_S_MAX}");
                return Err(AdminError::invalid(message));
            }
            None => None,
        };
        let _one_at_a_time = self.users_lock.lock().await;
        let records = self.records()?;
        let user = records.user(&request.user)?;
        if records.key(&access_key).is_ok() {
            return Err(AdminError::conflict(format!("access key exists: access_key={access_key}")));
        }
        let key = key_record(&self.accounts, user, access_key, &secret, now_ns, expires_s);
        let mut change = records.view.change();
        change.access_key(&key);
        self.commit_users(change).await?;
        let secret_key = secret.expose().to_owned();
        Ok(NewKey { access_key: key.access_key, secret_key, user: user.name.clone(), expires_s })
    }

    pub(super) async fn remove_key_now(&self, access_key: &str) -> Result<KeyInfo, AdminError> {
        let _one_at_a_time = self.users_lock.lock().await;
        let records = self.records()?;
        let info = records.key_info(self, records.key(access_key)?);
        let mut change = records.view.change();
        change.remove_access_key(access_key);
        self.commit_users(change).await?;
        Ok(info)
    }

    pub(super) async fn set_key_now(
        &self,
        access_key: &str,
        standing: Standing,
    ) -> Result<KeyInfo, AdminError> {
        let _one_at_a_time = self.users_lock.lock().await;
        let records = self.records()?;
        let disabled = standing == Standing::Disabled;
        let key = AccessKeyRecord { disabled, ..records.key(access_key)?.clone() };
        let mut change = records.view.change();
        change.access_key(&key);
        self.commit_users(change).await?;
        Ok(records.key_info(self, &key))
    }

    pub(super) async fn policies_now(&self) -> Result<Vec<PolicyInfo>, AdminError> {
        let view = self.view()?;
        let users = view.users().map_err(AdminError::failed)?;
        let of_users = users.into_iter().filter_map(|user| {
            Some(PolicyInfo { target: PolicyTarget::User(user.name), policy: user.policy? })
        });
        let roles = view.roles().map_err(AdminError::failed)?;
        let of_roles = roles
            .into_iter()
            .map(|role| PolicyInfo { target: PolicyTarget::Role(role.name), policy: role.policy });
        Ok(of_users.chain(of_roles).collect())
    }

    pub(super) async fn policy_now(&self, target: PolicyTarget) -> Result<PolicyInfo, AdminError> {
        let policy = match &target {
            PolicyTarget::User(name) => {
                let policy = self.records()?.user(name)?.policy.clone();
                policy.ok_or_else(|| no_policy("user", name))?
            }
            PolicyTarget::Role(name) => {
                let roles = self.view()?.roles().map_err(AdminError::failed)?;
                let role = roles.into_iter().find(|role| role.name == *name);
                role.map(|role| role.policy).ok_or_else(|| no_role(name))?
            }
            PolicyTarget::Bucket(name) => {
                let (client, bucket) = self.bucket(name).await?;
                let settings = client.bucket_settings(bucket).await.map_err(AdminError::failed)?;
                let policy = settings.into_iter().find(|(setting, _)| setting == BUCKET_POLICY);
                let (_, policy) = policy.ok_or_else(|| no_policy("bucket", name))?;
                String::from_utf8_lossy(&policy).into_owned()
            }
        };
        Ok(PolicyInfo { target, policy })
    }

    pub(super) async fn set_policy_now(&self, info: PolicyInfo) -> Result<PolicyInfo, AdminError> {
        let _one_at_a_time = self.users_lock.lock().await;
        let records = self.records()?;
        let mut change = records.view.change();
        match &info.target {
            PolicyTarget::User(name) => {
                check_policy(&info.policy, PolicyOf::User)?;
                let policy = Some(info.policy.clone());
                change.user(&UserRecord { policy, ..records.user(name)?.clone() });
            }
            PolicyTarget::Role(name) => {
                check_name("role", name)?;
                check_policy(&info.policy, PolicyOf::User)?;
                change.role(&RoleRecord { name: name.clone(), policy: info.policy.clone() });
            }
            PolicyTarget::Bucket(name) => {
                check_policy(&info.policy, PolicyOf::Bucket(name))?;
                let (client, bucket) = self.bucket(name).await?;
                let policy = Some(Bytes::from(info.policy.clone()));
                let set = client.set_bucket_setting(bucket, BUCKET_POLICY, policy).await;
                set.map_err(AdminError::failed)?;
                return Ok(info);
            }
        }
        self.commit_users(change).await?;
        Ok(info)
    }

    pub(super) async fn remove_policy_now(&self, target: PolicyTarget) -> Result<PolicyInfo, AdminError> {
        let _one_at_a_time = self.users_lock.lock().await;
        let records = self.records()?;
        let info = self.policy_now(target).await?;
        let mut change = records.view.change();
        match &info.target {
            PolicyTarget::User(name) => {
                change.user(&UserRecord { policy: None, ..records.user(name)?.clone() });
            }
            PolicyTarget::Role(name) => {
                change.remove_role(name);
            }
            PolicyTarget::Bucket(name) => {
                let (client, bucket) = self.bucket(name).await?;
                let set = client.set_bucket_setting(bucket, BUCKET_POLICY, None).await;
                set.map_err(AdminError::failed)?;
                return Ok(info);
            }
        }
        self.commit_users(change).await?;
        Ok(info)
    }

    /// The directory of a bucket.
    async fn bucket(&self, name: &str) -> Result<(Client, Ino), AdminError> {
        let missing = || AdminError::not_found(format!("no such bucket: name={name}"));
        let state = self.state.lock().await;
        let client = state.filesystems.get(FIRST_FILESYSTEM).ok_or_else(missing)?.client.clone();
        drop(state);
        match client.lookup(Ino::ROOT, name.as_bytes()).await {
            Ok(attr) if attr.kind == FileKind::Directory => Ok((client, attr.ino)),
            Ok(_) | Err(base::FsError::NotFound | base::FsError::NameTooLong) => Err(missing()),
            Err(error) => Err(AdminError::failed(error)),
        }
    }
}

fn no_role(name: &str) -> AdminError {
    AdminError::not_found(format!("no such role: name={name} (see `forebay policy list`)"))
}

fn check_policy(text: &str, of: PolicyOf<'_>) -> Result<(), AdminError> {
    Policy::parse(text.as_bytes(), of).map(|_| ()).map_err(|error| AdminError::invalid(error.to_string()))
}

impl UserControl for Node {
    fn users(&self) -> BoxFuture<'_, Result<Vec<UserInfo>, AdminError>> {
        Box::pin(self.users_now())
    }

    fn add_user(&self, request: AddUser) -> BoxFuture<'_, Result<UserInfo, AdminError>> {
        Box::pin(self.add_user_now(request))
    }

    fn remove_user(&self, name: String) -> BoxFuture<'_, Result<UserInfo, AdminError>> {
        Box::pin(async move { self.remove_user_now(&name).await })
    }

    fn set_user(&self, name: String, standing: Standing) -> BoxFuture<'_, Result<UserInfo, AdminError>> {
        Box::pin(async move { self.set_user_now(&name, standing).await })
    }

    fn keys(&self) -> BoxFuture<'_, Result<Vec<KeyInfo>, AdminError>> {
        Box::pin(self.keys_now())
    }

    fn add_key(&self, request: AddKey) -> BoxFuture<'_, Result<NewKey, AdminError>> {
        Box::pin(self.add_key_now(request))
    }

    fn remove_key(&self, access_key: String) -> BoxFuture<'_, Result<KeyInfo, AdminError>> {
        Box::pin(async move { self.remove_key_now(&access_key).await })
    }

    fn set_key(&self, access_key: String, standing: Standing) -> BoxFuture<'_, Result<KeyInfo, AdminError>> {
        Box::pin(async move { self.set_key_now(&access_key, standing).await })
    }

    fn policies(&self) -> BoxFuture<'_, Result<Vec<PolicyInfo>, AdminError>> {
        Box::pin(self.policies_now())
    }

    fn policy(&self, target: PolicyTarget) -> BoxFuture<'_, Result<PolicyInfo, AdminError>> {
        Box::pin(self.policy_now(target))
    }

    fn set_policy(&self, policy: PolicyInfo) -> BoxFuture<'_, Result<PolicyInfo, AdminError>> {
        Box::pin(self.set_policy_now(policy))
    }

    fn remove_policy(&self, target: PolicyTarget) -> BoxFuture<'_, Result<PolicyInfo, AdminError>> {
        Box::pin(self.remove_policy_now(target))
    }
}
