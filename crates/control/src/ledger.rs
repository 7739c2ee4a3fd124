//! The control ledger: ledger 0, with records in JSON, because there are few of them and operators read them.
//!
//! Records are read from a view, which is the state of all of them at one moment, and changed by what was decided from it: a change
//! is refused if another has changed one of its records since.

use std::sync::Arc;

use base::env::Env;
use base::program::{FORMAT_LEVEL, VERSION};
use base::{ClusterId, Epoch, FsError, LedgerId, Lineage, Seq};
use layout::PlacementGroup;
use meta::history::{Evidence, History};
use meta::keys::Keys;
use meta::log::{LedgerLog, Vacancy};
use meta::owner::{OwnerError, StandbyStat};
use meta::records::{Records, RecordsError, RecordsOptions, RecordsSnapshot};
use meta::state::State;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use wire::BoxFuture;
use wire::replica::{ReplicaReply, ReplicaRequest, ReplicaService};

use crate::change::{ControlChange, Stored};
use crate::{ClientRecord, ClusterRecord, DriveRecord, FilesystemRecord, NodeRecord, TokenRecord};

/// The control ledger's number.
pub const CONTROL_LEDGER: LedgerId = LedgerId(0);
/// The keys of its records.
pub(crate) const KEYS: Keys = Keys::new(CONTROL_LEDGER);

pub(crate) const DRIVES: u8 = b'd';
pub(crate) const NODES: u8 = b'n';
pub(crate) const FILESYSTEMS: u8 = b'f';
pub(crate) const GROUPS: u8 = b'g';
/// From *join*.
pub(crate) const TOKENS: u8 = b'j';
pub(crate) const CLIENTS: u8 = b'c';
pub(crate) const CLUSTER: &str = "cluster";
/// Distance by which the next numbers are moved ahead when an older control ledger goes on.
const LEAP: u32 = 1 << 16;

/// Why the control ledger could not be read or changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The ledger could not be opened.
    #[error(transparent)]
    Open(#[from] OwnerError),
    /// A record is damaged, or a newer version wrote it in a way that this one cannot read.
    #[error("control record cannot be read: {0}")]
    Record(#[from] serde_json::Error),
    /// The log or the store failed, or another node owns the ledger. The change may come into force later, before any other.
    #[error("control ledger failed: {0}")]
    Failed(#[from] RecordsError),
    /// Another change came first. Nothing has changed: decide anew.
    #[error("another change of the cluster came first, repeat this one")]
    Conflict,
    /// Other nodes have a newer program, and an operator has allowed its formats.
    #[error(
        "the cluster writes formats of level {level} since `forebay upgrade finalize`, and this program ({VERSION}) knows those up to \
         level {FORMAT_LEVEL}: install the version that the other nodes have"
    )]
    TooOld {
        /// The cluster's format level.
        level: u32,
    },
    /// The cluster was never created.
    #[error("there is no cluster in this directory")]
    NoCluster,
}

/// The open control ledger.
pub struct Control {
    records: Records,
}

/// All records at one moment.
pub struct ControlView {
    records: Arc<RecordsSnapshot>,
}

impl Control {
    /// Opens the ledger and brings its store up to the end of its log: only if it is `vacant` as it was seen, or in
    /// any case.
    ///
    /// # Errors
    /// `Fenced` of the log, if another node was faster. Others as for an owner.
    pub async fn open(
        env: &Env,
        log: Arc<dyn LedgerLog>,
        state: Arc<dyn State>,
        vacant: Option<Vacancy>,
    ) -> Result<Self, ControlError> {
        let options = RecordsOptions { ledger: CONTROL_LEDGER, log, state, env: env.clone(), vacant };
        Ok(Self { records: Records::open(options).await? })
    }

    /// See [`Records::keep`].
    pub async fn keep(&self) {
        self.records.keep().await;
    }

    /// See [`Records::standbys`].
    pub fn standbys(&self) -> Vec<StandbyStat> {
        self.records.standbys()
    }

    /// See [`Records::holds`].
    pub fn holds(&self) -> bool {
        self.records.holds()
    }

    /// See [`Records::resign`].
    pub async fn resign(&self) {
        self.records.resign().await;
    }

    /// The epoch with which this owner sealed the log.
    pub fn epoch(&self) -> Epoch {
        self.records.epoch()
    }

    /// A read-only ledger: changes are refused.
    pub fn view_only(state: Arc<dyn State>) -> Self {
        Self { records: Records::view(CONTROL_LEDGER, state) }
    }

    /// Begins a stretch of the ledger's history, before any other change. If the ledger is an older one that is to go
    /// on, the next numbers are moved ahead, and so are the epochs of groups: ledgers of filesystems may have seen later ones.
    /// Returns whether it is an older one.
    ///
    /// # Errors
    /// If drives have seen a newer ledger, and the operator has not accepted the older one.
    pub async fn begin(&self, env: &Env, evidence: &Evidence) -> Result<bool, ControlError> {
        let lineage = Lineage(env.random.next_u64());
        let beginning = evidence.decide(&self.history(), lineage).map_err(OwnerError::from)?;
        self.records.catch_up().await?;
        let view = self.view()?;
        view.check_level()?;
        let mut change = view.change();
        if beginning.is_older {
            let mut cluster = view.cluster()?;
            cluster.map_epoch += u64::from(LEAP);
            cluster.next_drive += LEAP;
            cluster.next_group += LEAP;
            cluster.next_filesystem += LEAP;
            cluster.next_node += LEAP;
            cluster.next_token += LEAP;
            cluster.next_client += LEAP;
            change.cluster(&cluster);
            for node in view.nodes()?.into_iter().filter(|node| node.start != 0) {
                change.node(&NodeRecord { start: 0, ..node });
            }
            for group in view.groups()? {
                let epoch = Epoch(group.epoch.0 + u64::from(LEAP));
                change.group(&PlacementGroup { epoch, ..group });
            }
        }
        self.records.begin(lineage, |state, seq| change.decide(state, seq)).await?;
        Ok(beginning.is_older)
    }

    /// The ledger's history up to its newest batch.
    pub fn history(&self) -> History {
        self.records.history()
    }

    /// The record of a new cluster, with a new identity.
    pub fn new_cluster(env: &Env) -> ClusterRecord {
        let mut id = [0; 16];
        env.random.fill(&mut id);
        ClusterRecord::new(ClusterId(id))
    }

    /// Makes the changes durable, all or none. One commit runs at a time.
    ///
    /// # Errors
    /// [`ControlError::Conflict`] if one of the records has changed since the view from which the change was decided. After
    /// [`ControlError::Failed`] the change may come into force later, before any other change.
    pub async fn commit(&self, change: ControlChange) -> Result<(), ControlError> {
        self.records.commit(|state, seq| change.decide(state, seq)).await
    }

    /// As [`Control::commit`], as the last change of this owner, and as the batch with this number: see [`Records::commit_last`].
    ///
    /// # Errors
    /// [`ControlError::Conflict`] also if another change has become that batch.
    pub async fn commit_last(&self, change: ControlChange, seq: Seq) -> Result<(), ControlError> {
        let decide = |state: &dyn State, next| {
            if next == seq { change.decide(state, next) } else { Err(ControlError::Conflict) }
        };
        self.records.commit_last(decide).await
    }

    /// Puts an earlier change into force that the log did not answer, or for which the store had no room.
    pub async fn catch_up(&self) -> Result<(), ControlError> {
        Ok(self.records.catch_up().await?)
    }

    /// The last change that is in force. A copy of the records from before it is out of date.
    pub fn seq(&self) -> Result<Seq, ControlError> {
        Ok(self.records.seq()?)
    }

    /// All records as they are now.
    pub fn view(&self) -> Result<ControlView, ControlError> {
        Ok(ControlView::of(Arc::new(self.records.snapshot()?)))
    }

    pub(crate) fn records(&self) -> &Records {
        &self.records
    }
}

impl ReplicaService for Control {
    fn ask(&self, request: ReplicaRequest) -> BoxFuture<'_, Result<ReplicaReply, FsError>> {
        self.records.ask(request)
    }
}

impl ControlView {
    pub(crate) fn of(records: Arc<RecordsSnapshot>) -> Self {
        Self { records }
    }

    /// A change that is decided from this view.
    pub fn change(&self) -> ControlChange {
        ControlChange::new(self.records.clone())
    }

    pub(crate) fn one<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, ControlError> {
        let bytes = self.records.get(&KEYS.value(name))?;
        bytes.map(|bytes| Ok(Stored::read(&bytes)?.record()?)).transpose()
    }

    pub(crate) fn all<T: DeserializeOwned>(&self, table: u8) -> Result<Vec<T>, ControlError> {
        let records = self.records.all(&KEYS.controls(table))?;
        records.iter().map(|bytes| Ok(Stored::read(bytes)?.record()?)).collect()
    }

    /// The cluster's record, unless the directory is new.
    pub fn cluster(&self) -> Result<ClusterRecord, ControlError> {
        self.check_level()?;
        self.one(CLUSTER)?.ok_or(ControlError::NoCluster)
    }

    /// Fails if the cluster writes formats that this program does not know.
    fn check_level(&self) -> Result<(), ControlError> {
        #[derive(Default, Deserialize)]
        struct Leveled {
            #[serde(default)]
            format_level: u32,
        }
        let Leveled { format_level: level } = self.one(CLUSTER)?.unwrap_or_default();
        if level > FORMAT_LEVEL { Err(ControlError::TooOld { level }) } else { Ok(()) }
    }

    /// All nodes, by number.
    pub fn nodes(&self) -> Result<Vec<NodeRecord>, ControlError> {
        self.all(NODES)
    }

    /// All drives, by number.
    pub fn drives(&self) -> Result<Vec<DriveRecord>, ControlError> {
        self.all(DRIVES)
    }

    /// All tokens, by number.
    pub fn tokens(&self) -> Result<Vec<TokenRecord>, ControlError> {
        self.all(TOKENS)
    }

    /// All clients, by number.
    pub fn clients(&self) -> Result<Vec<ClientRecord>, ControlError> {
        self.all(CLIENTS)
    }

    /// All placement groups, by number.
    pub fn groups(&self) -> Result<Vec<PlacementGroup>, ControlError> {
        self.all(GROUPS)
    }

    /// All filesystems, by number.
    pub fn filesystems(&self) -> Result<Vec<FilesystemRecord>, ControlError> {
        self.all(FILESYSTEMS)
    }
}

#[cfg(test)]
mod tests;
