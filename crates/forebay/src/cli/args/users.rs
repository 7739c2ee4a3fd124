//! Commands about users, access keys and policies.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, Subcommand};

const POLICY_HELP: &str =
    "SOURCE is a file with a policy in the language of AWS, - for standard input, or one of
  readonly   list buckets and objects, read objects
  readwrite  everything with objects and buckets
  writeonly  store objects, nothing else";

/// A time such as `90s`, `12h` or `1d5h`, of at least a second.
fn duration(text: &str) -> Result<Duration, String> {
    match base::units::parse_duration(text) {
        Ok(0) => Err("must be longer than nothing, such as 12h".to_owned()),
        Ok(seconds) => Ok(Duration::from_secs(seconds)),
        Err(error) => Err(error.to_string()),
    }
}

/// A new user.
#[derive(Debug, Args)]
#[command(after_help = format!("{POLICY_HELP}

Examples:
  forebay user add /srv/forebay ann --policy readwrite
  forebay user add /srv/forebay bob --uid 1001 --gid 1001 --policy bob.json"))]
pub(crate) struct AddUserArgs {
    /// The node's directory.
    pub(crate) dir: PathBuf,
    /// Its name: letters, digits and . _ @ + = -
    pub(crate) name: String,
    /// May do everything that no bucket's policy denies.
    #[arg(long)]
    pub(crate) admin: bool,
    /// User number on the filesystem: permissions there count as well, and files belong to it. Default: 0, so that
    /// policies alone decide.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) uid: u32,
    /// Primary group: the group of files that the user creates.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) gid: u32,
    /// Its other groups, separated by commas.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(crate) groups: Vec<u32>,
    /// The user's policy. Default: none, so that only policies of buckets grant anything.
    #[arg(long, value_name = "SOURCE")]
    pub(crate) policy: Option<String>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// One of the node's users.
#[derive(Debug, Args)]
pub(crate) struct OneUserArgs {
    /// The node's directory.
    pub(crate) dir: PathBuf,
    /// Its name.
    pub(crate) name: String,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum UserCommand {
    /// Add a user. It needs an access key to do anything: `forebay key add`.
    Add(AddUserArgs),
    /// List users.
    #[command(after_help = "Example:\n  forebay user list /srv/forebay --json")]
    List {
        /// The node's directory.
        dir: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Remove a user with its keys, at once. Its name is free again.
    #[command(after_help = "Example:\n  forebay user remove /srv/forebay ann")]
    Remove(OneUserArgs),
    /// Refuse all keys of a user, short-lived ones too.
    #[command(after_help = "Example:\n  forebay user disable /srv/forebay ann")]
    Disable(OneUserArgs),
    /// Accept them again.
    #[command(after_help = "Example:\n  forebay user enable /srv/forebay ann")]
    Enable(OneUserArgs),
}

/// A new access key.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forebay key add /srv/forebay ann                           prints the key and, once, its secret
  forebay key add /srv/forebay ann --expires 12h
  forebay key add /srv/forebay ann --credentials >~/.aws/credentials
  forebay key add /srv/forebay ann --access-key OLD --secret-stdin <old-secret")]
pub(crate) struct AddKeyArgs {
    /// The node's directory.
    pub(crate) dir: PathBuf,
    /// Whose key.
    pub(crate) user: String,
    /// How long it lasts, such as 30m, 12h or 90d. Default: until it is removed.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) expires: Option<Duration>,
    /// Take over this id from another system.
    #[arg(long, value_name = "ID", requires = "secret_stdin")]
    pub(crate) access_key: Option<String>,
    /// Take over the secret, one line of standard input.
    #[arg(long, requires = "access_key")]
    pub(crate) secret_stdin: bool,
    /// Print the key as a file of AWS credentials.
    #[arg(long, conflicts_with = "json")]
    pub(crate) credentials: bool,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// One of the node's access keys.
#[derive(Debug, Args)]
pub(crate) struct OneKeyArgs {
    /// The node's directory.
    pub(crate) dir: PathBuf,
    /// Its id.
    pub(crate) access_key: String,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Add an access key. A user may have any number.
    Add(AddKeyArgs),
    /// List access keys, without their secrets.
    #[command(after_help = "Example:\n  forebay key list /srv/forebay --user ann")]
    List {
        /// The node's directory.
        dir: PathBuf,
        /// Only those of this user.
        #[arg(long, value_name = "NAME")]
        user: Option<String>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Remove an access key, at once. Short-lived keys that were made with it end as well.
    #[command(after_help = "Example:\n  forebay key remove /srv/forebay AKIAEXAMPLE")]
    Remove(OneKeyArgs),
    /// Refuse an access key.
    #[command(after_help = "Example:\n  forebay key disable /srv/forebay AKIAEXAMPLE")]
    Disable(OneKeyArgs),
    /// Accept it again.
    #[command(after_help = "Example:\n  forebay key enable /srv/forebay AKIAEXAMPLE")]
    Enable(OneKeyArgs),
}

/// What a policy belongs to.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("target").required(true).args(["user", "role", "bucket"])))]
pub(crate) struct TargetArgs {
    /// The node's directory.
    pub(crate) dir: PathBuf,
    /// What this user may do.
    #[arg(long, value_name = "NAME")]
    pub(crate) user: Option<String>,
    /// What short-lived keys that take this role are limited to.
    #[arg(long, value_name = "NAME")]
    pub(crate) role: Option<String>,
    /// The bucket whose policy this is: it decides which users may do what with the bucket.
    #[arg(long, value_name = "NAME")]
    pub(crate) bucket: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum PolicyCommand {
    /// Set or replace a policy. It counts for the next request.
    #[command(after_help = format!("{POLICY_HELP}

Examples:
  forebay policy set /srv/forebay --user ann readonly
  forebay policy set /srv/forebay --bucket photos photos.json
  forebay policy set /srv/forebay --role backup - <backup.json"))]
    Set {
        #[command(flatten)]
        target: TargetArgs,
        /// A file, - or a name, see below.
        source: String,
    },
    /// Print a policy.
    #[command(after_help = "Example:\n  forebay policy show /srv/forebay --user ann")]
    Show {
        #[command(flatten)]
        target: TargetArgs,
    },
    /// Remove a policy. A role goes with it.
    #[command(after_help = "Example:\n  forebay policy remove /srv/forebay --bucket photos")]
    Remove {
        #[command(flatten)]
        target: TargetArgs,
    },
    /// List the policies of users and roles.
    #[command(after_help = "Example:\n  forebay policy list /srv/forebay --json")]
    List {
        /// The node's directory.
        dir: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expected_s: Option<u64>) {
        assert_eq!(duration(text).ok().map(|time| time.as_secs()), expected_s, "{text}");
    }

    #[test]
    fn times_have_a_unit() {
        check("90s", Some(90));
        check("15m", Some(900));
        check("12h", Some(43_200));
        check("30d", Some(2_592_000));
        check("1w", Some(604_800));
        for text in ["", "h", "12", "0s", "-1h", "1.5h", "1y", "ü", "99999999999999999d"] {
            check(text, None);
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum AuditCommand {
    /// Print the last requests, one a line: time, status, result, user, operation, bucket and key, bytes, duration,
    /// client address.
    #[command(
        after_help = "Example:\n  forebay audit tail /srv/forebay --follow --json | jq 'select(.status == 403)'"
    )]
    Tail {
        /// The node's directory; the node need not run.
        dir: PathBuf,
        /// How many.
        #[arg(long, short = 'n', value_name = "N", default_value_t = 20)]
        lines: usize,
        /// Go on with those that come.
        #[arg(long, short)]
        follow: bool,
        /// Print the lines as they are in the log, which is JSON.
        #[arg(long)]
        json: bool,
    },
}
