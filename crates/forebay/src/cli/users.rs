//! `user`, `key` and `policy`.

use std::io::Read;
use std::path::Path;

use admin::{AddKey, AddUser, KeyInfo, PolicyInfo, PolicyTarget, Standing, UserInfo};
use anyhow::{Context, Result, bail};
use comfy_table::Table;

use super::args::{
    AddKeyArgs, AddUserArgs, KeyCommand, OneKeyArgs, OneUserArgs, PolicyCommand, TargetArgs, UserCommand,
};
use super::output::{Format, print, table};
use super::{ask, env};

/// Longest secret or policy that is read.
const INPUT_BYTES_MAX: u64 = 64 * 1024;

pub(super) fn user(command: UserCommand) -> Result<()> {
    match command {
        UserCommand::Add(args) => add_user(args),
        UserCommand::List { dir, json } => {
            let users = ask(&dir, |client| async move { client.users().await })?;
            print(json.into(), &users, |users| user_table(users).to_string())
        }
        UserCommand::Remove(OneUserArgs { dir, name, json }) => {
            let user = ask(&dir, |client| async move { client.remove_user(&name).await })?;
            print(json.into(), &user, |user| {
                format!("user {} is removed, with {} keys", user.name, user.keys)
            })
        }
        UserCommand::Disable(args) => set_user(args, Standing::Disabled),
        UserCommand::Enable(args) => set_user(args, Standing::Enabled),
    }
}

fn add_user(args: AddUserArgs) -> Result<()> {
    let policy = args.policy.as_deref().map(read_policy).transpose()?;
    let AddUserArgs { dir, name, admin, uid, gid, groups, json, .. } = args;
    let request = AddUser { name, uid, gid, groups, admin, policy };
    let user = ask(&dir, |client| async move { client.add_user(&request).await })?;
    print(json.into(), &user, |user| {
        format!("user {} is added: next, `forebay key add {} {}`", user.name, dir.display(), user.name)
    })
}

fn set_user(args: OneUserArgs, standing: Standing) -> Result<()> {
    let OneUserArgs { dir, name, json } = args;
    let user = ask(&dir, |client| async move { client.set_user(&name, standing).await })?;
    print(json.into(), &user, |user| {
        format!("user {} is {}", user.name, if user.disabled { "disabled" } else { "enabled" })
    })
}

fn user_table(users: &[UserInfo]) -> Table {
    let mut table = table(&["USER", "ID", "UID", "GID", "GROUPS", "KEYS", "POLICY", "STATE"]);
    for user in users {
        let groups: Vec<String> = user.groups.iter().map(u32::to_string).collect();
        let policy = match (user.admin, user.has_policy) {
            (true, _) => "admin",
            (false, true) => "yes",
            (false, false) => "none",
        };
        table.add_row([
            user.name.clone(),
            user.id.to_string(),
            user.uid.to_string(),
            user.gid.to_string(),
            if groups.is_empty() { "-".to_owned() } else { groups.join(",") },
            user.keys.to_string(),
            policy.to_owned(),
            if user.disabled { "disabled" } else { "enabled" }.to_owned(),
        ]);
    }
    table
}

pub(super) fn key(command: KeyCommand) -> Result<()> {
    match command {
        KeyCommand::Add(args) => add_key(args),
        KeyCommand::List { dir, user, json } => list_keys(&dir, user, json.into()),
        KeyCommand::Remove(OneKeyArgs { dir, access_key, json }) => {
            let key = ask(&dir, |client| async move { client.remove_key(&access_key).await })?;
            print(json.into(), &key, |key| {
                format!("access key {} of {} is removed", key.access_key, key.user)
            })
        }
        KeyCommand::Disable(args) => set_key(args, Standing::Disabled),
        KeyCommand::Enable(args) => set_key(args, Standing::Enabled),
    }
}

fn add_key(args: AddKeyArgs) -> Result<()> {
    let secret_key = if args.secret_stdin { Some(read_text("-")?.trim_end().to_owned()) } else { None };
    let expires_in_s = args.expires.map(|time| time.as_secs());
    let AddKeyArgs { dir, user, access_key, credentials, json, .. } = args;
    let imported = secret_key.is_some();
    let request = AddKey { user, expires_in_s, access_key, secret_key };
    let key = ask(&dir, |client| async move { client.add_key(&request).await })?;
    print(json.into(), &key, |key| {
        if credentials {
            return format!(
                "[default]\naws_access_key_id = {}\naws_secret_access_key = {}",
                key.access_key, key.secret_key
            );
        }
        let secret = if imported { "as given" } else { &format!("{}  (shown only now)", key.secret_key) };
        let expires = key.expires_s.map_or("never".to_owned(), s3::format_instant);
        format!(
            "access key  {}\nsecret key  {secret}\nuser        {}\nexpires     {expires}",
            key.access_key, key.user
        )
    })
}

fn list_keys(dir: &Path, user: Option<String>, format: Format) -> Result<()> {
    let (keys, users) = ask(dir, |client| async move { Ok((client.keys().await?, client.users().await?)) })?;
    if let Some(name) = user.as_ref().filter(|name| !users.iter().any(|user| user.name == **name)) {
        bail!("no such user: name={name} (see `forebay user list {}`)", dir.display());
    }
    let wanted = |key: &KeyInfo| user.as_ref().is_none_or(|user| key.user == *user);
    let keys: Vec<KeyInfo> = keys.into_iter().filter(wanted).collect();
    print(format, &keys, |keys| {
        let mut table = table(&["ACCESS KEY", "USER", "STATE", "CREATED", "EXPIRES"]);
        for key in keys {
            table.add_row([
                key.access_key.clone(),
                key.user.clone(),
                key.state.clone(),
                s3::format_instant(key.created_s),
                key.expires_s.map_or("never".to_owned(), s3::format_instant),
            ]);
        }
        table.to_string()
    })
}

fn set_key(args: OneKeyArgs, standing: Standing) -> Result<()> {
    let OneKeyArgs { dir, access_key, json } = args;
    let key = ask(&dir, |client| async move { client.set_key(&access_key, standing).await })?;
    print(json.into(), &key, |key| format!("access key {} of {} is {}", key.access_key, key.user, key.state))
}

pub(super) fn policy(command: PolicyCommand) -> Result<()> {
    match command {
        PolicyCommand::Set { target, source } => {
            let policy = PolicyInfo { target: policy_target(&target), policy: read_policy(&source)? };
            let set = ask(&target.dir, |client| async move { client.set_policy(&policy).await })?;
            print(Format::Text, &set, |set| format!("policy of {} is set", describe(&set.target)))
        }
        PolicyCommand::Show { target } => {
            let of = policy_target(&target);
            let policy = ask(&target.dir, |client| async move { client.policy(&of).await })?;
            print(Format::Text, &policy, |policy| policy.policy.clone())
        }
        PolicyCommand::Remove { target } => {
            let of = policy_target(&target);
            let removed = ask(&target.dir, |client| async move { client.remove_policy(&of).await })?;
            print(Format::Text, &removed, |removed| {
                format!("policy of {} is removed", describe(&removed.target))
            })
        }
        PolicyCommand::List { dir, json } => {
            let policies = ask(&dir, |client| async move { client.policies().await })?;
            print(json.into(), &policies, |policies| {
                let mut table = table(&["POLICY OF", "BYTES"]);
                for policy in policies {
                    table.add_row([describe(&policy.target), policy.policy.len().to_string()]);
                }
                table.to_string()
            })
        }
    }
}

fn policy_target(args: &TargetArgs) -> PolicyTarget {
    match (&args.user, &args.role, &args.bucket) {
        (Some(user), ..) => PolicyTarget::User(user.clone()),
        (_, Some(role), _) => PolicyTarget::Role(role.clone()),
        (_, _, bucket) => PolicyTarget::Bucket(bucket.clone().expect("one of the three is required")),
    }
}

fn describe(target: &PolicyTarget) -> String {
    match target {
        PolicyTarget::User(name) => format!("user {name}"),
        PolicyTarget::Role(name) => format!("role {name}"),
        PolicyTarget::Bucket(name) => format!("bucket {name}"),
    }
}

/// A built-in policy by name, or the text of a file.
fn read_policy(source: &str) -> Result<String> {
    let actions = match source {
        "readonly" => {
            r#""s3:GetBucketLocation", "s3:GetObject", "s3:GetObjectAttributes", "s3:GetObjectTagging", "s3:ListAllMyBuckets", "s3:ListBucket""#
        }
        "readwrite" => r#""s3:*""#,
        "writeonly" => {
            r#""s3:AbortMultipartUpload", "s3:ListMultipartUploadParts", "s3:PutObject", "s3:PutObjectTagging""#
        }
        source => return read_text(source),
    };
    Ok(format!(
        "{{\n  \"Version\": \"2012-10-17\",\n  \"Statement\": [\n    {{\n      \"Effect\": \"Allow\",\n      \
         \"Action\": [{actions}],\n      \"Resource\": \"*\"\n    }}\n  ]\n}}\n"
    ))
}

/// Text of a file, or of standard input.
pub(super) fn read_text(source: &str) -> Result<String> {
    let mut text = String::new();
    if source == "-" {
        let mut input = std::io::stdin().take(INPUT_BYTES_MAX);
        input.read_to_string(&mut text).context("reading standard input")?;
        return Ok(text);
    }
    let bytes = env().files.read(Path::new(source));
    let bytes = bytes.with_context(|| format!("cannot read {source}"))?;
    String::from_utf8(bytes).map_err(|_| anyhow::anyhow!("not text: path={source}"))
}
