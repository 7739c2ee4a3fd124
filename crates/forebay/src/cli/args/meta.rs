//! Arguments of `meta`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::tiers::duration;

const EXPORT_HELP: &str = "The file has all ledgers: names, attributes, where content is on drives and in object stores, users, policies. It has no
content of files above 8 KiB. All that was durable when the command began is in it.

Content that upkeep moves later (packing, tiering, balance, profiles, deletion) is not found by an older file: export often, for
instance each hour, and keep the last ones.

Keys and secrets in it are sealed with DIR/node.key, which is not in the file, nor is DIR/identity: keep copies of both, apart from
the file. Names of files and small files are readable: only the owner of the file may read it.

Example:
  forebay meta export /srv/forebay /backup/forebay-meta";

const IMPORT_HELP: &str = "For a cluster that has lost its metadata. What came after the export is lost, as is content that upkeep has moved since.
The drives must be those of the cluster, and DIR must have its `identity` and `node.key`: no backup has these.

Without --yes the file is only checked. What was there is put aside in `former-N` beside it, and never removed. If the command is
interrupted, the node does not start until it was given again.

Logs in files begin anew behind the file: start the node then. If etcd had the logs and lost them, `forebay cluster recover` begins
them anew. Then look at what is there, and end the doubt about what is not: `forebay meta settle`.

Examples:
  forebay meta import /srv/forebay /backup/forebay-meta          check
  forebay meta import /srv/forebay /backup/forebay-meta --yes";

#[derive(Debug, Subcommand)]
pub(crate) enum MetaCommand {
    /// List the directories with metadata and the state of the copies in them.
    #[command(after_help = "Example:\n  forebay meta list /srv/forebay")]
    List {
        /// The node's directory.
        dir: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Keep a copy of all metadata in another directory, best on another disk.
    #[command(after_help = "Example:\n  forebay meta add-dir /srv/forebay /mnt/ssd2/forebay-meta")]
    AddDir {
        /// The node's directory.
        dir: PathBuf,
        /// A directory; created if it does not exist.
        path: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Give up newer metadata that drives have seen: extents that only it refers to are deleted from drives.
    #[command(after_help = "Example:\n  forebay meta settle /srv/forebay")]
    Settle {
        /// The node's directory.
        dir: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Go on without the copy in a directory. Its files stay and are worth nothing.
    #[command(after_help = "Example:\n  forebay meta remove-dir /srv/forebay /mnt/ssd2/forebay-meta")]
    RemoveDir {
        /// The node's directory.
        dir: PathBuf,
        /// A directory with metadata.
        path: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Copy all metadata of the cluster to a file, while everything runs: a backup.
    #[command(after_help = EXPORT_HELP)]
    Export(ExportArgs),
    /// Show or change when the cluster makes backups of its metadata by itself.
    #[command(after_help = SCHEDULE_HELP)]
    Schedule(ScheduleArgs),
    /// Make the metadata of a node anew from a file of `meta export`, after all of it was lost.
    #[command(after_help = IMPORT_HELP)]
    Import(ImportArgs),
}

const SCHEDULE_HELP: &str = "The node that owns the metadata makes a file as `meta export` does, and keeps the last ones. With an object store, the file
is there in parts of 64 MiB, below metadata/ in the store's prefix: joined in the order of their names they are the file that `meta import`
takes. A directory must be the same one at every machine that may own the metadata, such as a network filesystem.

`status` says so if the last attempt failed. Names and small files are readable in a backup: only administrators should read the bucket.

Examples:
  forebay meta schedule /srv/forebay --to store:cold --every 6h --keep 28
  forebay meta schedule /srv/forebay                                          show
  forebay meta schedule /srv/forebay --now
  forebay meta schedule /srv/forebay --off";

/// What `schedule` takes.
#[derive(Debug, Args)]
pub(crate) struct ScheduleArgs {
    /// The node's directory.
    pub(crate) dir: PathBuf,
    /// Where they go: store:NAME, or a directory.
    #[arg(long, value_name = "PLACE")]
    pub(crate) to: Option<String>,
    /// The time from one to the next. Default at first: 6h.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub(crate) every: Option<u64>,
    /// How many are kept. Default at first: 28.
    #[arg(long, value_name = "COUNT")]
    pub(crate) keep: Option<u32>,
    /// Make one at once.
    #[arg(long)]
    pub(crate) now: bool,
    /// Make no more, until --to or --now. Those that there are stay.
    #[arg(long, conflicts_with_all = ["to", "every", "keep", "now"])]
    pub(crate) off: bool,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// What `export` takes.
#[derive(Debug, Args)]
pub(crate) struct ExportArgs {
    /// The directory of a node that runs; any one of the cluster.
    pub(crate) dir: PathBuf,
    /// The file. It is there when it is complete.
    pub(crate) file: PathBuf,
    /// Replace a file that is there.
    #[arg(long)]
    pub(crate) force: bool,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// What `import` takes.
#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// The directory of the node that owned the metadata. The node must not run.
    pub(crate) dir: PathBuf,
    /// A file that `meta export` has made.
    pub(crate) file: PathBuf,
    /// Do it.
    #[arg(long)]
    pub(crate) yes: bool,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}
