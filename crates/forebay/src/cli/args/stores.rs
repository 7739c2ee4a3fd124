//! Commands about object stores.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use wire::store::{StoreAuth, StoreProtocol};

use super::size;

fn blob_size(text: &str) -> Result<u32, String> {
    u32::try_from(size(text)?).map_err(|_| "must be 4MiB to 64MiB".to_owned())
}

fn object_size(text: &str) -> Result<u32, String> {
    u32::try_from(size(text)?).map_err(|_| "must be 4GiB at most".to_owned())
}

fn protocol(text: &str) -> Result<StoreProtocol, String> {
    text.parse().map_err(|error: wire::store::ParseChoiceError| error.to_string())
}

fn auth_method(text: &str) -> Result<StoreAuth, String> {
    text.parse().map_err(|error: wire::store::ParseChoiceError| error.to_string())
}

/// Settings of a store.
#[derive(Debug, Args)]
pub(crate) struct StoreSettingsArgs {
    /// Its name or address.
    #[arg(long, value_name = "HOST")]
    pub(crate) hostname: Option<String>,
    /// HTTP, HTTPS, or HTTPS_UNVERIFIED, which takes any certificate. Default: HTTPS.
    #[arg(long, value_parser = protocol)]
    pub(crate) protocol: Option<StoreProtocol>,
    /// Its port. Default: 80 or 443.
    #[arg(long)]
    pub(crate) port: Option<u16>,
    /// Its bucket, and below which prefix everything is kept. Case counts.
    #[arg(long, value_name = "BUCKET[/PREFIX]")]
    pub(crate) bucket: Option<String>,
    /// Part of signatures. Default: us-east-1.
    #[arg(long)]
    pub(crate) region: Option<String>,
    /// AWSSignature4 or AWSSignature2. Default: AWSSignature4.
    #[arg(long, value_parser = auth_method)]
    pub(crate) auth_method: Option<StoreAuth>,
    /// Id of the key that requests are signed with. It needs to read, write and delete objects, nothing else.
    #[arg(long, value_name = "ID")]
    pub(crate) access_key_id: Option<String>,
    /// Its secret. Other users of this machine can see it while the command runs: --secret-stdin hides it.
    #[arg(long, value_name = "SECRET", conflicts_with = "secret_stdin")]
    pub(crate) secret_key: Option<String>,
    /// Read the secret from standard input.
    #[arg(long)]
    pub(crate) secret_stdin: bool,
    /// A file of certificates (PEM) that vouch for the store, beside those of the system; an empty one for none.
    #[arg(long, value_name = "FILE")]
    pub(crate) ca: Option<PathBuf>,
    /// Largest blob, 4MiB to 64MiB. Default: 64MiB.
    #[arg(long, value_name = "SIZE", value_parser = blob_size)]
    pub(crate) blob_size: Option<u32>,
    /// Uploads that a node has under way at most. Default: 64.
    #[arg(long, value_name = "N")]
    pub(crate) max_up: Option<u16>,
    /// Downloads that a node has under way at most. Default: 64.
    #[arg(long, value_name = "N")]
    pub(crate) max_down: Option<u16>,
    /// Removals that a node has under way at most. Default: 64.
    #[arg(long, value_name = "N")]
    pub(crate) max_remove: Option<u16>,
    /// Most requests of each kind that all nodes together have under way; 0: only the limits of each node. Default: 0.
    #[arg(long, value_name = "N")]
    pub(crate) max_cluster: Option<u16>,
    /// Mbit/s that uploads and downloads take together; 0 for as many as there are. Default: 0.
    #[arg(long, value_name = "MBPS")]
    pub(crate) bandwidth: Option<u32>,
    /// Keep the settings without trying them.
    #[arg(long)]
    pub(crate) skip_verification: bool,
}

/// A store and settings.
#[derive(Debug, Args)]
pub(crate) struct SetStoreArgs {
    /// The node's directory.
    pub(crate) dir: PathBuf,
    /// Its name: letters, digits and . _ @ + = -
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) settings: StoreSettingsArgs,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// A store.
#[derive(Debug, Args)]
pub(crate) struct OneStoreArgs {
    /// The node's directory.
    pub(crate) dir: PathBuf,
    /// Its name.
    pub(crate) name: String,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum StoreCommand {
    /// Add a store: an object is put, read and removed first.
    #[command(after_help = "Example:
  forebay store add /srv/forebay cold --hostname s3.example.org --bucket archive/forebay \\
      --access-key-id AKIA... --secret-stdin < secret")]
    Add(SetStoreArgs),
    /// List stores.
    List {
        /// The node's directory.
        dir: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show a store. Its secret is never shown.
    Show(OneStoreArgs),
    /// Change settings of a store; those that are not named stay.
    #[command(after_help = "Example:\n  forebay store update /srv/forebay cold --port 9000")]
    Update(SetStoreArgs),
    /// Remove a store. What is in its bucket stays there.
    Remove(OneStoreArgs),
    /// Put, read and remove objects; report each failure with advice.
    #[command(after_help = "Exit status 1 if something does not work.")]
    Validate(OneStoreArgs),
    /// Measure how fast a store is for this node: objects are put, got and removed as tiering does it.
    #[command(after_help = "Example:\n  forebay store bench /srv/forebay cold --size 8MiB --parallel 16")]
    Bench {
        #[command(flatten)]
        store: OneStoreArgs,
        /// Bytes of each object. Default: a blob.
        #[arg(long, value_name = "SIZE", value_parser = object_size)]
        size: Option<u32>,
        /// Requests under way. Default: as many blobs as tiering stores at a time.
        #[arg(long, value_name = "N")]
        parallel: Option<u16>,
        /// How long objects are put, and then got. Default: 5.
        #[arg(long, value_name = "N")]
        seconds: Option<u16>,
    },
}
