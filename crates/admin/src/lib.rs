//! The management interface of a node: REST with JSON, over a socket that only the node's owner can open.
//!
//! The command line is one client. [`NodeControl`] is the interface of a node; [`serve`] offers it on a socket;
//! [`AdminClient`] calls it. Every answer to `GET` is what `--json` prints.

mod api;
mod backups;
mod balancing;
mod client;
mod damage;
mod filesystem_groups;
mod logs;
mod metrics;
mod nodes;
mod placement;
mod server;
mod stores;
mod tiers;
mod users;
mod verification;

pub use api::{
    AddDrive, AdminError, CreateFilesystem, DriveInfo, ExtentInfo, FailDrive, FilesystemInfo, FsckFilesystem,
    FsckFinding, FsckInfo, LedgerInfo, MemoryInfo, MetaCopyInfo, MetaDir, MountRequest, NodeControl,
    NodeStatus, OrphanInfo, PackInfo, RemoveDrive, RepairInfo, ReplaceDrive, ScrubInfo, SetLimits,
    SetProfile, SetSpares, SetUpkeep, ShardInfo, ShortageInfo, SpaceInfo, SpareInfo, UpkeepInfo, WhyInfo,
};
pub use backups::{BackupControl, BackupInfo, BackupsInfo, SetBackups};
pub use balancing::{BalanceFilesystem, DriveShare, FilesystemBalance, Survives};
pub use client::{AdminClient, CallError, percent_encode};
pub use damage::{DamageInfo, LostFileInfo};
pub use filesystem_groups::{
    FilesystemGroupControl, FilesystemGroupInfo, MoveFilesystem, SetFilesystemGroup,
};
pub use logs::{EngineMemberInfo, LedgerLog, LogControl, LogInfo, LogMove, MoveLedgers, StandbyInfo};
pub use metrics::metrics;
pub use nodes::{
    ClientInfo, CreateToken, DrainNode, NewToken, NodeCheck, NodeDrain, NodeInfo, NodesControl, ProgramInfo,
    SetMaintenance, StopCheck, TokenInfo, TokenRights, UpgradeInfo,
};
pub use placement::{Placement, SetNodes, SetPlacement};
pub use server::{Answer, Answered, Api, ServeError, serve, serve_answers, serve_metrics};
pub use stores::{BenchStore, SetStore, StoreControl, StoreInfo, StoreValidationInfo, Verify};
pub use tiers::{
    AttachStore, FETCH_FILES_MAX, FetchFile, FetchFileInfo, FetchStep, ForecastInfo, ForecastRequest,
    ReleaseInfo, TierControl, TierFile, TierInfo, TierLocationInfo, TierOpsInfo,
};
pub use users::{
    AddKey, AddUser, AuditInfo, KeyInfo, NewKey, PolicyInfo, PolicyTarget, Standing, UserControl, UserInfo,
};
pub use verification::{
    FilesystemVerification, GroupVerification, ShardCounts, VerifiedInfo, VerifyFilesystem,
};
