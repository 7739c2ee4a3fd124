//! What the cluster should be: nodes, drives, placement groups, filesystems and their groups, object stores, users and events, as
//! records of the control ledger, and how one state of them leads to the next.

mod absence;
mod authority;
mod backups;
mod balancing;
mod change;
mod clients;
mod cluster;
mod events;
mod filesystem_groups;
mod follower;
mod former;
mod joining;
mod ledger;
mod log_moves;
mod members;
mod protection;
mod records;
mod spares;
mod starts;
mod stores;
mod upgrade;
mod users;
mod write_sets;

pub use absence::WideAbsence;
pub use authority::{Authority, AuthorityError, CERTIFICATE_S, Issued, NewKey, key_of_request};
pub use backups::{BackupPlace, BackupRecord, BackupsRecord, BegunRecord};
pub use balancing::{BalanceForecast, BalanceWait, Balancing};
pub use change::ControlChange;
pub use clients::{ClientRecord, ClientRights};
pub use cluster::{Cluster, Plan, SEATS};
pub use filesystem_groups::FilesystemGroupRecord;
pub use follower::Follower;
pub use former::FormerMount;
pub use joining::{JoinError, NotAToken, SECRET_BYTES, Token, TokenRecord, check_address};
pub use ledger::{CONTROL_LEDGER, Control, ControlError, ControlView};
pub use log_moves::LogMoveRecord;
pub use members::Finished;
pub use protection::{Owed, Seen};
pub use records::{
    ClusterRecord, DriveRecord, FilesystemRecord, GroupSet, MAINTENANCE_S_MAX, NodeRecord, ScrubRecord,
    UpkeepRecord,
};
pub use spares::{NoUse, Spare, SpareRecord};
pub use stores::{StoreRecord, StoresRecord, TierRecord};
pub use upgrade::Upgrade;
pub use users::{AccessKeyRecord, RoleRecord, UserRecord, UsersRecord};
pub use write_sets::{Patience, WriteSet};
