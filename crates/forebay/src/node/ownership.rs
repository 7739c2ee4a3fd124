//! Another node is to own the ledgers.

use admin::{AdminError, MoveLedgers};
use base::NodeId;
use control::Plan;

use super::draining::no_node;
use super::management::failed;
use super::{Node, State};

/// Entries that the next owner may lack of a ledger: it applies them within a moment.
const BEHIND_MAX: u64 = 10_000;

impl Node {
    /// Gives the ledgers to another node that follows them.
    pub(super) async fn move_ledgers_now(&self, MoveLedgers { node }: MoveLedgers) -> Result<(), AdminError> {
        let node = NodeId(node);
        self.check_next_owner(&*self.state.lock().await, node)?;
        let name = |plan: &mut Plan| {
            plan.set_cluster(|cluster| cluster.next_owner = Some(node));
            Ok(())
        };
        self.plan(name).await.map_err(failed)?;
        tracing::warn!(%node, "another node takes the metadata over, because an operator wants that");
        self.leaves.send_replace(true);
        Ok(())
    }

    /// Refuses a node that could not take the ledgers at once.
    fn check_next_owner(&self, state: &State, node: NodeId) -> Result<(), AdminError> {
        let conflict = |text: String| Err(AdminError::conflict(text));
        let record = state.cluster.nodes.get(&node).ok_or_else(|| no_node(node))?;
        if node == self.here() {
            return conflict(format!("node {node} owns the metadata already"));
        }
        if state.meta_dirs.engine().is_none() {
            return conflict(
                "the logs are in files of this node, so that no other one can own the metadata (forebay log move)".to_owned(),
            );
        }
        if !state.cluster.may_own(node) {
            return conflict(format!(
                "node {node} follows no ledgers: only the first three nodes do, and no witness (see `forebay ledger list`)"
            ));
        }
        if !self.is_reached(node) {
            return conflict(format!("node {node} does not answer"));
        }
        if record.maintenance_left_s(self.env.clock.wall_ns() / 1_000_000_000).is_some() {
            return conflict(format!("node {node} is in maintenance (forebay node maintenance --end)"));
        }
        for ledger in self.log_info(state, Vec::new()).ledgers {
            let has = ledger.standbys.iter().find(|standby| standby.node == node.0);
            if has.is_none_or(|standby| {
                standby.stored_seq == 0 || standby.stored_seq + BEHIND_MAX < ledger.last_seq
            }) {
                return conflict(format!(
                    "node {node} has not everything of ledger {} yet: wait until it has (see `forebay ledger list`)",
                    ledger.ledger
                ));
            }
        }
        Ok(())
    }
}
