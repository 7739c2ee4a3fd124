//! The commands and their options.

mod blobs;
mod checks;
mod clusters;
mod events;
mod filesystem_groups;
mod filesystems;
mod logs;
mod meta;
mod nodes;
mod stores;
mod tiers;
mod users;

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use layout::Profile;

use crate::engine::EngineAddress;
use crate::node::{IoChoice, MetricsChoice, S3Options, TrimChoice};

pub(crate) use blobs::{BlobCommand, RangeName};
pub(crate) use checks::CheckArgs;
pub(crate) use clusters::{ClusterCommand, RecoverArgs, SparesArgs};
pub(crate) use events::EventsArgs;
pub(crate) use filesystem_groups::{FsGroupCommand, OneFsGroupArgs};
pub(crate) use filesystems::{FsCommand, LimitArgs, NodeList, PlacementArg};
pub(crate) use logs::{LedgerCommand, LogCommand};
pub(crate) use meta::{ExportArgs, ImportArgs, MetaCommand, ScheduleArgs};
pub(crate) use nodes::{
    AddressArgs, ClientCommand, Domain, JoinArgs, NodeCommand, Role, RoleArgs, S3Command, TokenCommand,
    UpgradeCommand,
};
pub(crate) use stores::{OneStoreArgs, SetStoreArgs, StoreCommand, StoreSettingsArgs};
pub(crate) use tiers::{AttachArgs, TierCommand};
pub(crate) use users::{
    AddKeyArgs, AddUserArgs, AuditCommand, KeyCommand, OneKeyArgs, OneUserArgs, PolicyCommand, TargetArgs,
    UserCommand,
};

/// Software-defined storage: local drives become one protected filesystem.
#[derive(Debug, Parser)]
#[command(name = "forebay", version, propagate_version = true, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

fn mount_options(text: &str) -> Result<String, String> {
    text.parse::<posix::fuse::MountFlags>().map(|_| text.to_owned()).map_err(|error| error.to_string())
}

const MOUNT_HELP: &str = "Options:
  writecache  reads from the page cache, writes made durable in the background; durable after fsync (default)
  readcache   the same, but closing a file waits until it is durable
  direct      the page cache is not used
  ro, rw      without or with changes
  relatime, noatime, nodiratime
  readahead=SIZE  read at most so far ahead of who reads in sequence, 0 to 64MiB; default 4MiB
  strict      creating, renaming, removing and the like return when they are durable; without it, within milliseconds
              after that, and what a crash leaves is a beginning of their order with all that was synced
  transport=device, transport=uring  requests by /dev/fuse (default) or by io_uring: small requests are cheaper,
              large reads slower; needs fuse.enable_uring=1
  process=node, process=own  answered by the node (default), or by a process of its own: while the node is away, programs
              wait instead of failing; small requests cost more

Examples:
  forebay mount /srv/forebay /mnt/data
  forebay mount /srv/forebay /mnt/data -o ro,noatime";

const STATUS_HELP: &str = "Exit status:
  0  all data can be read, as far as it was looked at, though fewer losses may be survived than should be
  1  the node could not be asked
  3  some data cannot be read for good: its state is `damaged`, and the problems name the files

Example:
  forebay status /srv/forebay --json";

const FSCK_HELP: &str = "Changes nothing. The bytes of shards are not read: that is `forebay drive fsck`.

Exit status:
  0  nothing is wrong
  1  there are findings; each says what is wrong, with what, and what to do
  2  it could not be checked

Example:
  forebay fsck /srv/forebay --json";

#[cfg(test)]
fn parse(text: &str) -> Result<Command, String> {
    use clap::Parser;
    Cli::try_parse_from(text.split(' ')).map(|cli| cli.command).map_err(|error| error.to_string())
}

/// A time in microseconds; 0: none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Microseconds(pub(crate) u64);

fn microseconds(text: &str) -> Result<Microseconds, String> {
    if text == "none" {
        return Ok(Microseconds(0));
    }
    let units = [("us", 1), ("ms", 1000), ("s", 1_000_000)];
    let parsed = units
        .iter()
        .find_map(|(unit, factor)| text.strip_suffix(unit)?.parse::<u64>().ok()?.checked_mul(*factor));
    parsed.map(Microseconds).ok_or_else(|| "a time such as 500us, 20ms, 1s, or none".to_owned())
}

fn size(text: &str) -> Result<u64, String> {
    base::units::parse_size(text).map_err(|error| error.to_string())
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start a node in a directory: a new cluster, or the one that is there.
    Start(Box<StartArgs>),
    /// Make this machine a node of a cluster that there is, and start it.
    Join(JoinArgs),
    /// Look at the nodes of the cluster.
    #[command(subcommand)]
    Node(NodeCommand),
    /// Where S3 is served.
    #[command(subcommand)]
    S3(S3Command),
    /// Look at the programs of the nodes while they are upgraded, and finish that.
    #[command(subcommand)]
    Upgrade(UpgradeCommand),
    /// List and remove clients: machines that mount and are no nodes.
    #[command(subcommand)]
    Client(ClientCommand),
    /// Make, list and remove tokens with which machines join.
    #[command(subcommand)]
    Token(TokenCommand),
    /// Stop a node: write everything out, unmount, end the process.
    #[command(after_help = "Example:\n  forebay stop /srv/forebay")]
    Stop {
        /// The node's directory.
        dir: PathBuf,
        /// Leave mounts with `process=own`: programs wait for the next start, for instance of a newer version.
        #[arg(long)]
        keep_mounts: bool,
    },
    /// Show the health, space, drives and filesystems of a node.
    #[command(after_help = STATUS_HELP)]
    Status {
        /// The node's directory.
        dir: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Look at the machine of a node for what makes it slow or stops it: before trouble comes.
    Check(CheckArgs),
    /// Print metrics of the node and the cluster as Prometheus reads them; `start --metrics` tells them at a port.
    #[command(after_help = "Example:\n  forebay metrics /srv/forebay > /var/lib/node_exporter/forebay.prom")]
    Metrics {
        /// The node's directory.
        dir: PathBuf,
    },
    /// Mount a filesystem of a running node.
    #[command(after_help = MOUNT_HELP)]
    Mount {
        /// The node's directory.
        dir: PathBuf,
        /// Where; a directory, which is made if it is not there, with those above it. Default: where it was mounted last, or
        /// DIR/mnt.
        path: Option<PathBuf>,
        /// Options, separated by commas. Default: those of the last time.
        #[arg(short, long, value_name = "LIST", value_parser = mount_options)]
        options: Option<String>,
        /// Which filesystem.
        #[arg(long, default_value = "main")]
        fs: String,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// The process of a mount; the node starts it.
    #[command(hide = true)]
    MountProcess {
        /// What to mount, as JSON.
        spec: String,
    },
    /// Unmount a filesystem. Refuses while files on it are open.
    #[command(after_help = "Example:\n  forebay umount /srv/forebay")]
    Umount {
        /// The node's directory.
        dir: PathBuf,
        /// Which filesystem.
        #[arg(long, default_value = "main")]
        fs: String,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Create and look at filesystems.
    #[command(subcommand)]
    Fs(FsCommand),
    /// Look at drives, add them, take them out; tools that work on a drive without a node.
    #[command(subcommand)]
    Drive(DriveCommand),
    /// Check everything: the tree, all counters, and that the drives hold all shards that they should and no others.
    #[command(after_help = FSCK_HELP)]
    Fsck {
        /// The node's directory. The node may run or not.
        dir: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show where the logs of the metadata are, and move them to an engine that several nodes reach.
    #[command(subcommand)]
    Log(LogCommand),
    /// Show which node owns the metadata and which ones follow it, and let another one own it.
    #[command(subcommand)]
    Ledger(LedgerCommand),
    /// Recover a cluster that has lost the logs of its metadata.
    #[command(subcommand)]
    Cluster(ClusterCommand),
    /// Look at the copies of the metadata, add and remove directories for them.
    #[command(subcommand)]
    Meta(MetaCommand),
    /// Add, list and remove users of the S3 endpoint.
    #[command(subcommand)]
    User(UserCommand),
    /// Add, list and remove access keys of users.
    #[command(subcommand)]
    Key(KeyCommand),
    /// Add, list, try and remove object stores.
    #[command(subcommand)]
    Store(StoreCommand),
    /// Show where filesystems have their content, fetch files from object stores, release them from the drives.
    #[command(subcommand)]
    Tier(TierCommand),
    /// Read blobs that tiering wrote, without a cluster.
    #[command(subcommand)]
    Blob(BlobCommand),
    /// Set and show policies: which requests users, roles and buckets allow.
    #[command(subcommand)]
    Policy(PolicyCommand),
    /// Show requests to the S3 endpoint and their senders.
    #[command(subcommand)]
    Audit(AuditCommand),
    /// Show events: drives that failed or came back, rebuilds, stores that were down, content that left early.
    Events(EventsArgs),
    /// Understand protection profiles.
    #[command(subcommand)]
    Profile(ProfileCommand),
    /// Plan a cluster.
    #[command(subcommand)]
    Capacity(CapacityCommand),
    /// Show or change how fast background work may go: repair, rebuild, packing, scrubs on demand. Settings last until they are changed.
    #[command(
        after_help = "Examples:\n  forebay upkeep /srv/forebay --rate 50MiB\n  forebay upkeep /srv/forebay --keep-p99-below 20ms"
    )]
    Upkeep {
        /// The node's directory.
        dir: PathBuf,
        /// Stop background work.
        #[arg(long)]
        pause: bool,
        /// Continue it.
        #[arg(long, conflicts_with = "pause")]
        resume: bool,
        /// Bytes per second at each node; half of that while foreground requests take twice as long as usual.
        #[arg(long, value_name = "SIZE", value_parser = size)]
        rate: Option<u64>,
        /// Hold background work back, to an eighth of its rate at least, while 99 of 100 requests of users take longer than this at
        /// any drive: 20ms, 1s, none. Repair of data that one more loss would lose is not held back.
        #[arg(long, value_name = "TIME", value_parser = microseconds)]
        keep_p99_below: Option<Microseconds>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Make all that was written to a filesystem durable, as sync(2) does elsewhere.
    #[command(after_help = "Example:\n  forebay sync /srv/forebay/mnt")]
    Sync {
        /// A path on a mounted filesystem.
        path: PathBuf,
    },
    /// Explain where a file's bytes are: inode, extents, placement group, drives, state.
    #[command(after_help = "Example:\n  forebay why /srv/forebay/mnt/some/file")]
    Why {
        /// A path on a mounted filesystem.
        path: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

/// What `start` takes.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forebay start /srv/forebay                                    one drive file, no redundancy
  forebay start /srv/forebay --drives 6 --profile 4+2           six drive files, any two may be lost
  forebay start /srv/forebay --drive /dev/sdb --drive /dev/sdc  two devices, two copies
  forebay start /srv/forebay --log etcd://10.0.0.7:2379 --address 10.0.0.1
  forebay start /srv/forebay --log postgres://10.0.0.7:5432,10.0.0.8:5432/forebay --address 10.0.0.1
                                                                the first of several machines, any of which may be lost
  forebay start /srv/forebay                                    again: everything as it was")]
pub(crate) struct StartArgs {
    /// The node's directory; created if it does not exist.
    pub(crate) dir: PathBuf,
    /// Make this many drive files in DIR/drives (new cluster only); fewer, as far as the profile allows, if the disk has
    /// no room for them. Default: as many as the profile needs, or 1.
    #[arg(long, value_name = "N")]
    pub(crate) drives: Option<u32>,
    /// Use this block device or file as a drive; may be repeated. In an existing cluster: a drive of it is here now.
    #[arg(long = "drive", value_name = "PATH")]
    pub(crate) drive_paths: Vec<PathBuf>,
    /// Size of each drive file, such as 10GiB. Default: a tenth of the free space shared out, 64 MiB to 10 GiB each.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) drive_size: Option<u64>,
    /// How data is protected: k+m, n/k/w, rN or 1+0 (new cluster only). Default: 1+0 on one drive, r2 on more.
    #[arg(long, value_name = "P")]
    pub(crate) profile: Option<Profile>,
    /// Where to mount; the directory is made if it is not there. Default: where it was mounted last, or DIR/mnt.
    #[arg(long, value_name = "PATH", conflicts_with = "no_mount")]
    pub(crate) mount: Option<PathBuf>,
    /// Mount options such as noatime,readcache. Default: those of the last time (see `forebay mount --help`).
    #[arg(long, value_name = "LIST", conflicts_with = "no_mount", value_parser = mount_options)]
    pub(crate) mount_options: Option<String>,
    /// Do not mount.
    #[arg(long)]
    pub(crate) no_mount: bool,
    /// Stay in the foreground and log to standard error.
    #[arg(long)]
    pub(crate) foreground: bool,
    /// How drives do I/O.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) io: IoChoice,
    /// How long a drive may be away, in seconds, before other drives take over its data (if there are any to spare).
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub(crate) out_after: u64,
    /// Memory that the node may use, such as 4GiB; at least 512MiB. Kept for the next start. Default: a quarter of the
    /// memory of the machine or of its control group, at most 4 GiB.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) memory: Option<u64>,
    /// Whether drives give unused space back to the device or filesystem below them. Kept for the next start. Default:
    /// devices.
    #[arg(long, value_enum, value_name = "WHICH")]
    pub(crate) trim: Option<TrimChoice>,
    /// Serve metrics of the node and the cluster at http://ADDRESS:PORT/metrics, for Prometheus. There is no password. Kept for the next
    /// start; `off` ends it. Default: off.
    #[arg(long, value_name = "ADDRESS:PORT|off")]
    pub(crate) metrics: Option<MetricsChoice>,
    /// Serve even if more drives are missing than the profile survives: some reads will fail.
    #[arg(long)]
    pub(crate) degraded: bool,
    /// Keep a copy of all metadata in this directory; may be repeated, at most three. Default: DIR/meta. Once given, it is
    /// remembered, and giving another one adds it.
    #[arg(long = "meta-dir", value_name = "PATH")]
    pub(crate) meta_dirs: Vec<PathBuf>,
    /// Start although a copy of the metadata that may be newer is missing: changes that were acknowledged only there
    /// are lost.
    #[arg(long)]
    pub(crate) force_stale_metadata: bool,
    /// Start although drives have seen newer metadata: changes that only it has are lost.
    #[arg(long)]
    pub(crate) accept_older_metadata: bool,
    /// Keep the logs of the metadata in this etcd (new cluster only), so that up to three nodes can own the metadata, one after
    /// another. Later: where the same etcd is now; after `forebay log move`, leave it out. With ca=FILE, and cert=FILE and key=FILE if etcd asks for them, over TLS.
    /// Or in PostgreSQL, which has a synchronous standby:
    /// postgres://HOST:PORT,…/DATABASE[?user=NAME&password-file=FILE&ca=FILE&prefix=NAME&single=yes]
    #[arg(long, value_name = "etcd://HOST:PORT,…[?prefix=NAME]")]
    pub(crate) log: Option<EngineAddress>,
    #[command(flatten)]
    pub(crate) address: AddressArgs,
    #[command(flatten)]
    pub(crate) s3: S3Args,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
    /// Report readiness on standard output and detach: how `start` runs itself in the background.
    #[arg(long, hide = true)]
    pub(crate) background_child: bool,
}

/// Where and how S3 is served. What is given is remembered for the next start.
#[derive(Debug, Args)]
pub(crate) struct S3Args {
    /// Serve S3 at this address; HTTP and TLS on the same port. Default: as last time; at the first start port 9000 of
    /// 127.0.0.1, or the next one that is free.
    #[arg(long = "s3", value_name = "ADDRESS:PORT")]
    pub(crate) listen: Option<SocketAddr>,
    /// Do not serve S3, from now on: until a start with --s3.
    #[arg(long, conflicts_with = "listen")]
    pub(crate) no_s3: bool,
    /// Buckets are also host names below this one: BUCKET.NAME; may be repeated. BUCKET.localhost always works.
    #[arg(long = "s3-domain", value_name = "NAME", conflicts_with = "no_s3")]
    pub(crate) domains: Vec<String>,
    /// Certificate for TLS, with those that vouch for it, in PEM. Default: DIR/s3/cert.pem, made at the first start.
    #[arg(long = "s3-cert", value_name = "PATH", requires = "key", conflicts_with = "no_s3")]
    pub(crate) certificate: Option<PathBuf>,
    /// Its private key, in PEM.
    #[arg(long = "s3-key", value_name = "PATH", requires = "certificate")]
    pub(crate) key: Option<PathBuf>,
}

impl S3Args {
    pub(crate) fn options(&self) -> S3Options {
        S3Options {
            off: self.no_s3,
            listen: self.listen,
            domains: self.domains.clone(),
            tls: self.certificate.clone().zip(self.key.clone()),
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum DriveCommand {
    /// List drives.
    #[command(after_help = "Example:\n  forebay drive list /srv/forebay")]
    List {
        /// The node's directory.
        dir: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show one drive.
    #[command(after_help = "Example:\n  forebay drive show /srv/forebay 3")]
    Show {
        /// The node's directory.
        dir: PathBuf,
        /// Its number.
        id: u32,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Add a drive. New data uses it at once; nothing is moved. One of this cluster that came from another machine keeps what it holds.
    #[command(after_help = "Example:\n  forebay drive add /srv/forebay --path /dev/sdd")]
    Add {
        /// The node's directory.
        dir: PathBuf,
        /// A block device or file. Default: a new file in DIR/drives.
        #[arg(long)]
        path: Option<PathBuf>,
        /// Size of a new file. Default: as the smallest drive.
        #[arg(long, value_name = "SIZE", value_parser = size)]
        size: Option<u64>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Take a drive out of service for good, as if it had died.
    #[command(after_help = "Example:\n  forebay drive fail /srv/forebay 3")]
    Fail {
        /// The node's directory.
        dir: PathBuf,
        /// Its number.
        id: u32,
        /// Even if a filesystem loses data by it.
        #[arg(long)]
        force: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Use a drive again that failed or was taken out of service. It gets only the shards that it missed.
    #[command(after_help = "Example:\n  forebay drive return /srv/forebay 3")]
    Return {
        /// The node's directory.
        dir: PathBuf,
        /// Its number.
        id: u32,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Verify everything on a drive, or on all, now. In the background a pass takes 14 days.
    #[command(after_help = "Example:\n  forebay drive scrub /srv/forebay --now")]
    Scrub {
        /// The node's directory.
        dir: PathBuf,
        /// Its number. Default: all drives.
        id: Option<u32>,
        /// Do it now, as fast as `forebay upkeep --rate` allows. Without it, show how far the scrub is.
        #[arg(long)]
        now: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Move all data off a drive, or rebuild it on other drives if it is dead. `status` shows the progress.
    #[command(after_help = "Example:\n  forebay drive remove /srv/forebay 3")]
    Remove {
        /// The node's directory.
        dir: PathBuf,
        /// Its number.
        id: u32,
        /// Even if the drive holds the last copy of data.
        #[arg(long)]
        force: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Replace a drive, dead or alive, by a new one, and move or rebuild its data.
    #[command(after_help = "Example:\n  forebay drive replace /srv/forebay 3 --path /dev/sdd")]
    Replace {
        /// The node's directory.
        dir: PathBuf,
        /// The number of the old drive.
        id: u32,
        /// A block device or file.
        #[arg(long)]
        path: PathBuf,
        /// Size of a new file. Default: as the old drive.
        #[arg(long, value_name = "SIZE", value_parser = size)]
        size: Option<u64>,
        /// Even if data is lost that only the old drive holds.
        #[arg(long)]
        force: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Print the contents of a drive. Needs no node; changes nothing.
    #[command(after_help = "Example:\n  forebay drive dump /srv/forebay/drives/0.img --segment 2")]
    Dump {
        /// The device or file.
        path: PathBuf,
        /// Also every frame and record of this segment.
        #[arg(long)]
        segment: Option<u32>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Verify everything on a drive. Needs no node; changes nothing.
    #[command(after_help = "Example:\n  forebay drive fsck /srv/forebay/drives/0.img")]
    Fsck {
        /// The device or file.
        path: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Measure the drive engine on a new file or an empty device. What is there is refused.
    #[command(after_help = "Example:\n  forebay drive bench /srv/test.img --size 2GiB")]
    Bench {
        /// The device, or a file that does not exist yet.
        path: PathBuf,
        /// Size of the file.
        #[arg(long, value_name = "SIZE", value_parser = size, default_value = "1GiB")]
        size: u64,
        /// Operations of 4 KiB per measurement.
        #[arg(long, default_value_t = 20_000)]
        operations: u64,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum ProfileCommand {
    /// The cost of a profile, and the losses that reads and writes survive.
    #[command(after_help = "Example:\n  forebay profile explain 12/7/9 --domains 12")]
    Explain {
        /// The profile.
        profile: Profile,
        /// Failure domains that there are. Default: as many as the profile is wide.
        #[arg(long, value_name = "N")]
        domains: Option<u32>,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum CapacityCommand {
    /// How much data a cluster holds.
    #[command(
        after_help = "Example:\n  forebay capacity plan --raw 184.32TB --nodes 8 --profile 5+2 --spares 1"
    )]
    Plan {
        /// Bytes of all drives together.
        #[arg(long, value_name = "SIZE", value_parser = size)]
        raw: u64,
        /// Nodes, each a failure domain.
        #[arg(long)]
        nodes: u32,
        /// How data is protected.
        #[arg(long, value_name = "P")]
        profile: Profile,
        /// Nodes whose worth of space is kept free for rebuilding.
        #[arg(long, default_value_t = 0)]
        spares: u32,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}
