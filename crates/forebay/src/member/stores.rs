//! The object stores of the cluster at a node without metadata: whether they answer it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use anyhow::Result;
use base::env::Env;
use control::{ControlView, StoreRecord};
use s3::Accounts;
use tokio::runtime::Handle;
use upkeep::S3Store;
use wire::store::SeenBy;

use super::lock;
use crate::node::{Network, reach_store};

/// Those that filesystems use, by number. They are looked at as long as they are here.
#[derive(Default)]
pub(super) struct MemberStores(Mutex<BTreeMap<u32, Result<Arc<S3Store>, String>>>);

impl MemberStores {
    /// Takes the records of stores over.
    pub(super) fn take_over(
        &self,
        view: &ControlView,
        (env, runtime): (&Env, &Handle),
        network: &Network,
        accounts: &Accounts,
    ) -> Result<()> {
        let used: BTreeSet<u32> =
            view.filesystems()?.iter().filter_map(|filesystem| Some(filesystem.tier?.store)).collect();
        let reach = |record: &StoreRecord| reach_store((env, runtime), network, accounts, record);
        let records = view.stores()?.into_iter().filter(|record| used.contains(&record.id));
        let next = records.map(|record| (record.id, reach(&record))).collect();
        // The earlier ones end now, when the next ones are there: what did not change stays open.
        *lock(&self.0) = next;
        Ok(())
    }

    /// Whether each answers this node.
    pub(super) fn seen(&self, node: u32) -> Vec<(u32, SeenBy)> {
        let seen = |store: &Result<Arc<S3Store>, String>| match store {
            Ok(store) => SeenBy { node, ..store.health() },
            Err(problem) => SeenBy { node, up: Some(false), since_s: 0, problem: Some(problem.clone()) },
        };
        lock(&self.0).iter().map(|(id, store)| (*id, seen(store))).collect()
    }
}
