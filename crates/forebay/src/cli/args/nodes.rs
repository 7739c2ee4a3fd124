//! Arguments of `join`, `node`, `s3` and `token`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use control::Token;
use wire::rights::Squash;

use super::size;
use crate::node::PORT;

const JOIN_HELP: &str = "The other machine must run with an address: forebay start DIR --address ADDRESS. The new node is started, and its
drives take new data of all filesystems at once. What is stored moves only if `forebay fs balance` asks for that.

Examples:
  forebay token create /srv/forebay                              on a node of the cluster
  forebay join forebay1.AbC... /srv/forebay --drive /dev/sdb     on the new machine
  forebay join forebay1.AbC... /srv/forebay --drives 2 --domain rack=r1

With a token for clients (forebay token create --role client), this machine becomes a client: nothing is started, and
forebay mount DIR PATH mounts. With a token for witnesses (--role witness), it gets no drives, and only votes on the metadata.";

/// What `join` takes.
#[derive(Debug, Args)]
#[command(after_help = JOIN_HELP)]
pub(crate) struct JoinArgs {
    /// A token, as `forebay token create` prints it.
    pub(crate) token: Token,
    /// The directory of the new node; created if it does not exist.
    pub(crate) dir: PathBuf,
    /// Use this block device or file as a drive; may be repeated.
    #[arg(long = "drive", value_name = "PATH")]
    pub(crate) drive_paths: Vec<PathBuf>,
    /// Make this many drive files in DIR/drives. Default: 1 if no drive is named.
    #[arg(long, value_name = "N", conflicts_with = "drive_paths")]
    pub(crate) drives: Option<u32>,
    /// Size of each drive file, such as 10GiB. Default: as the smallest drive of the cluster.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) drive_size: Option<u64>,
    /// Name of the node, unique in the cluster. Default: the name of the machine.
    #[arg(long)]
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) address: AddressArgs,
    /// Where the machine stands: zone, rack or both. Copies of data are spread over them.
    #[arg(long, value_name = "rack=R,zone=Z", value_delimiter = ',', value_parser = domain)]
    pub(crate) domain: Vec<Domain>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Where other machines reach a node.
#[derive(Debug, Clone, Args)]
pub(crate) struct AddressArgs {
    /// Let other machines reach this node at this address; port 7740 if none is given. Kept for the next start.
    #[arg(long, value_name = "ADDRESS[:PORT]", value_parser = listen)]
    pub(crate) address: Option<SocketAddr>,
    /// What the others are told instead, where that is not the same; may be repeated.
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) advertise: Vec<String>,
}

/// A failure domain of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Domain {
    Rack(String),
    Zone(String),
}

fn domain(text: &str) -> Result<Domain, String> {
    match text.split_once('=') {
        Some(("rack", name)) if !name.is_empty() => Ok(Domain::Rack(name.to_owned())),
        Some(("zone", name)) if !name.is_empty() => Ok(Domain::Zone(name.to_owned())),
        _ => Err("it is rack=NAME or zone=NAME".to_owned()),
    }
}

fn listen(text: &str) -> Result<SocketAddr, String> {
    let with_port = || text.parse().map(|ip| SocketAddr::new(ip, PORT));
    text.parse().or_else(|_| with_port()).map_err(|_| "an IP address, with or without a port".to_owned())
}

fn duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let unit_s = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return Err("a number with s, m, h or d, such as 1h".to_owned()),
    };
    let number: u64 = number.parse().map_err(|_| "a number with s, m, h or d, such as 1h".to_owned())?;
    number.checked_mul(unit_s).map(Duration::from_secs).ok_or_else(|| "too long".to_owned())
}

#[derive(Debug, Subcommand)]
pub(crate) enum S3Command {
    /// Show the URL of each node's endpoint: for clients, and for the load balancer before them.
    #[command(after_help = ENDPOINTS_HELP)]
    Endpoints {
        /// The directory of a node.
        dir: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum UpgradeCommand {
    /// Show the program of each node and client, and whether newer formats may be written.
    #[command(after_help = UPGRADE_HELP)]
    Status {
        /// The directory of any node.
        dir: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Let all nodes write the newest formats that they know, for good: programs that do not know them do not start any more. Refused
    /// while a node has an older program, or does not answer.
    #[command(after_help = UPGRADE_HELP)]
    Finalize {
        /// The directory of any node.
        dir: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

const UPGRADE_HELP: &str = "An upgrade goes from node to node, while the cluster works: forebay node stop-check, forebay stop DIR --keep-mounts, the new
program, forebay start DIR, until `forebay upgrade status` shows no older one. Until `forebay upgrade finalize`, each node can go
back to its last program in the same way.

Examples:
  forebay upgrade status /srv/forebay
  forebay upgrade finalize /srv/forebay";

#[derive(Debug, Subcommand)]
pub(crate) enum NodeCommand {
    /// List the nodes of the cluster.
    #[command(after_help = "Example:\n  forebay node list /srv/forebay")]
    List {
        /// The directory of any node.
        dir: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Move everything off the drives of a node, in the background, so that it can be removed. Reads use the drives until they are empty.
    #[command(after_help = DRAIN_HELP)]
    Drain {
        /// The directory of any node.
        dir: PathBuf,
        /// The number of the node.
        id: u32,
        /// Only say what would move.
        #[arg(long)]
        dry_run: bool,
        /// Stop emptying it: its drives are in use again. Groups that have moved stay where they are.
        #[arg(long, conflicts_with = "dry_run")]
        abort: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Say what would stop if a node were stopped now: data that could not be read or written, metadata without a majority. Fails if
    /// something would.
    #[command(
        after_help = "Example:\n  forebay node stop-check /srv/forebay 2 && ssh node2 forebay stop /srv/forebay"
    )]
    StopCheck {
        /// The directory of any node.
        dir: PathBuf,
        /// The number of the node that is to be stopped.
        id: u32,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Say that a node is going to be away on purpose: until then, nobody takes over what its drives hold. Refused if something would
    /// stop with it. If it owns the metadata, another node takes that over at once.
    #[command(
        after_help = "Examples:\n  forebay node maintenance /srv/forebay 2 --for 2h\n  forebay node maintenance /srv/forebay 2 --end"
    )]
    Maintenance {
        /// The directory of any node.
        dir: PathBuf,
        /// The number of the node.
        id: u32,
        /// For how long, at most 7d.
        #[arg(long = "for", value_name = "TIME", value_parser = duration, required_unless_present = "end")]
        time: Option<Duration>,
        /// It is over.
        #[arg(long, conflicts_with = "time")]
        end: bool,
        /// Also if something stops with the node.
        #[arg(long, conflicts_with = "end")]
        force: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Take a node out of the cluster: its certificate is of no use from then on. Its drives must be out before.
    #[command(after_help = "Example:\n  forebay node remove /srv/forebay 3")]
    Remove {
        /// The directory of any other node.
        dir: PathBuf,
        /// Its number.
        id: u32,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

const DRAIN_HELP: &str = "Refused if other drives cannot take everything: too few for a profile, or too little room. `forebay drive list` shows the
drives as `leaving` and then as `out`, `forebay status` what is left, with rate and remaining time.

Example:
  forebay node drain /srv/forebay 2 --dry-run
  forebay node drain /srv/forebay 2      and when its drives are out: forebay node remove /srv/forebay 2";

const ENDPOINTS_HELP: &str = "Any request may go to any endpoint. A load balancer asks each for /ready.

Examples:
  forebay s3 endpoints /srv/forebay
  forebay s3 endpoints /srv/forebay --json | jq -r '.[].url // empty'";

const TOKEN_HELP: &str = "A node may do everything, and is trusted like root of the cluster. A client only mounts: it reads and writes the filesystems
of its token, as the users on its machine, whose rights the nodes check. Root of a client machine acts as each of its
users, and as root only with --squash none. A witness has no drives, mounts and S3; the last changes of the metadata pass through its etcd.

Examples:
  forebay token create /srv/forebay --expires 2h --uses 3
  forebay token create /srv/forebay --role client --fs main --uses 20
  forebay token create /srv/forebay --role client --ro --squash all
  forebay token create /srv/forebay --role witness";

/// What joins with a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Role {
    /// A machine with drives, mounts and S3.
    Node,
    /// A machine that only mounts.
    Client,
    /// A machine with a vote on the metadata and nothing else: the third where two have drives.
    Witness,
}

/// Which users of a client count as nobody.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SquashArg {
    /// Root does, the others count as themselves.
    Root,
    /// All do.
    All,
    /// None does: root of the client is root.
    None,
}

impl From<SquashArg> for Squash {
    fn from(squash: SquashArg) -> Self {
        match squash {
            SquashArg::Root => Self::Root,
            SquashArg::All => Self::All,
            SquashArg::None => Self::None,
        }
    }
}

/// For whom a token is.
#[derive(Debug, Args)]
pub(crate) struct RoleArgs {
    /// What joins with it.
    #[arg(long, value_enum, default_value_t = Role::Node)]
    pub(crate) role: Role,
    /// The only filesystem that clients may use. Default: all.
    #[arg(long, value_name = "NAME")]
    pub(crate) fs: Option<String>,
    /// Clients may change nothing.
    #[arg(long)]
    pub(crate) ro: bool,
    /// Which users of clients count as nobody. Default: root.
    #[arg(long, value_enum)]
    pub(crate) squash: Option<SquashArg>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ClientCommand {
    /// List the clients of the cluster, which are no nodes.
    #[command(after_help = "Example:\n  forebay client list /srv/forebay")]
    List {
        /// The directory of any node.
        dir: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Remove a client: its connections end, and its certificate is of no use any more.
    #[command(alias = "evict", after_help = "Example:\n  forebay client remove /srv/forebay 3")]
    Remove {
        /// The directory of any node.
        dir: PathBuf,
        /// Its number.
        id: u32,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Make a token with which other machines join the cluster. It is a secret.
    #[command(after_help = TOKEN_HELP)]
    Create {
        /// The directory of any node.
        dir: PathBuf,
        /// How long it is valid.
        #[arg(long, value_name = "TIME", default_value = "1h", value_parser = duration)]
        expires: Duration,
        /// How many machines may join with it.
        #[arg(long, value_name = "N", default_value_t = 1)]
        uses: u32,
        #[command(flatten)]
        role: RoleArgs,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// List tokens.
    #[command(after_help = "Example:\n  forebay token list /srv/forebay")]
    List {
        /// The directory of any node.
        dir: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Remove a token: no machine can join with it any more.
    #[command(after_help = "Example:\n  forebay token remove /srv/forebay 3")]
    Remove {
        /// The directory of any node.
        dir: PathBuf,
        /// Its number.
        id: u32,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_durations_and_domains() {
        assert_eq!(listen("10.0.0.1").unwrap().to_string(), "10.0.0.1:7740");
        assert_eq!(listen("[::1]:80").unwrap().to_string(), "[::1]:80");
        assert_eq!(listen("::1").unwrap().to_string(), "[::1]:7740");
        assert!(listen("host:80").is_err());
        assert_eq!(duration("90m").unwrap(), Duration::from_secs(5400));
        assert!(
            duration("1w").is_err() && duration("h").is_err() && duration("99999999999999999999h").is_err()
        );
        assert!(duration("9999999999999999d").is_err());
        assert_eq!(domain("rack=r1").unwrap(), Domain::Rack("r1".to_owned()));
        assert!(domain("row=1").is_err() && domain("rack=").is_err());
    }
}
