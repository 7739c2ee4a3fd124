//! The logs of the ledgers go on elsewhere: they have moved from the engine that had them, or they were lost.
//!
//! Both count as recoveries: owners have higher epochs from then on, and nodes that know an earlier place give it up. A move is the last
//! change in the old log of the control ledger, and loses nothing; after a loss, the ledgers go on behind what one node had.

use base::ClusterId;
use serde::{Deserialize, Serialize};

use crate::{ClusterRecord, Plan};

/// A move of the logs that was begun.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogMoveRecord {
    /// Where they are to be: an engine with its place there; empty: files of the first node.
    pub to: String,
    /// Counts the tries since the last move.
    #[serde(default)]
    pub tries: u32,
    /// Why it failed, once it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

impl LogMoveRecord {
    /// Whether the first node is to own the ledgers, and move them into its files.
    pub fn waits_for_first_node(&self) -> bool {
        self.to.is_empty() && self.problem.is_none()
    }
}

impl ClusterRecord {
    /// The number of the next move's attempt in an engine: whichever node tries it takes over what an earlier try has left.
    pub fn move_number(&self) -> u64 {
        number_of_move(self.id, self.recoveries + 1)
    }

    /// The number of the attempt that brought the logs where they are, for a local store that has followed them since `known`
    /// recoveries; `None`: something was lost since then, or nothing has moved.
    pub fn moved_since(&self, known: u32) -> Option<u64> {
        let first = self.recoveries - self.moves.min(self.recoveries);
        (first..self.recoveries).contains(&known).then(|| number_of_move(self.id, self.recoveries))
    }
}

fn number_of_move(cluster: ClusterId, recoveries: u32) -> u64 {
    let ClusterId(id) = cluster;
    let half = |at: usize| id[at..at + 8].iter().fold(0u64, |all, byte| all << 8 | u64::from(*byte));
    half(0) ^ half(8).rotate_left(1) ^ u64::from(recoveries)
}

impl Plan {
    /// A move begins. Nothing has changed until [`Plan::move_logs`].
    pub fn begin_log_move(&mut self, to: &str) {
        self.set_cluster(|cluster| {
            let tries = cluster.log_move.as_ref().map_or(0, |earlier| earlier.tries) + 1;
            cluster.log_move = Some(LogMoveRecord { to: to.to_owned(), tries, problem: None });
        });
    }

    /// The move that was begun last has failed, unless it is known already that and why it has.
    pub fn fail_log_move(&mut self, problem: &str) {
        if self.next().record.log_move.as_ref().is_none_or(|begun| begun.problem.is_some()) {
            return;
        }
        self.set_cluster(|cluster| {
            cluster.log_move = cluster
                .log_move
                .take()
                .map(|begun| LogMoveRecord { problem: Some(problem.to_owned()), ..begun });
        });
    }

    /// From the next change on, the logs are at `log`; empty: in files of the first node.
    pub fn move_logs(&mut self, log: &str) {
        self.set_cluster(|cluster| {
            log.clone_into(&mut cluster.log);
            cluster.recoveries += 1;
            cluster.moves += 1;
            cluster.log_move = None;
        });
    }

    /// The end of the logs was lost: the ledgers go on behind what one node had of them, with their logs at `log`. What drives and
    /// filesystems saw of the lost end counts for nothing.
    pub fn recover(&mut self, log: &str, recoveries: u32) {
        self.set_cluster(|cluster| {
            log.clone_into(&mut cluster.log);
            cluster.recoveries = recoveries;
            cluster.moves = 0;
            cluster.log_move = None;
        });
        self.lose_end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::members::tests::cluster;

    #[test]
    fn after_a_loss_of_the_logs_nothing_that_was_seen_of_their_end_counts() {
        let before = cluster(&[6], "4+2");
        let mut plan = Plan::new(before.clone());
        plan.recover("etcd://a:1?prefix=x.1", 1);
        let now = plan.into_next();
        assert_eq!((now.record.recoveries, now.record.log.as_str()), (1, "etcd://a:1?prefix=x.1"));
        assert!(now.drives.values().all(|drive| drive.may_know_lost));
        assert!(now.filesystems.values().all(|filesystem| filesystem.has_lost_end));
        assert_eq!(now.groups, before.groups);
    }

    #[test]
    fn stores_go_on_after_moves_and_not_after_a_loss() {
        let mut plan = Plan::new(cluster(&[6], "4+2"));
        plan.recover("etcd://a:1?prefix=x.1", 1);
        assert_eq!(plan.next().record.moved_since(0), None);
        assert_eq!(plan.next().record.moved_since(1), None, "nothing has moved");
        let number = plan.next().record.move_number();
        plan.begin_log_move("etcd://b:1?prefix=x.2");
        plan.fail_log_move("it does not answer");
        plan.fail_log_move("another reason");
        plan.begin_log_move("etcd://b:1?prefix=x.2");
        let begun = plan.next().record.log_move.clone();
        assert_eq!(
            begun,
            Some(LogMoveRecord { to: "etcd://b:1?prefix=x.2".into(), tries: 2, problem: None })
        );
        assert_eq!(plan.next().record.move_number(), number, "another try takes the place over");
        plan.move_logs("etcd://b:1?prefix=x.2");
        let record = plan.next().record.clone();
        assert_eq!((record.recoveries, record.moves, &record.log_move), (2, 1, &None));
        assert_eq!(record.moved_since(0), None, "that is from before the loss");
        assert_eq!(record.moved_since(1), Some(number));
        assert_eq!(record.moved_since(2), None);
        plan.move_logs("");
        let record = plan.next().record.clone();
        assert!(record.log.is_empty() && record.moved_since(1).is_some_and(|last| last != number));
        plan.recover("etcd://a:1?prefix=x.4", 4);
        assert_eq!(plan.next().record.moved_since(3), None);
        assert!(plan.next().drives.values().all(|drive| drive.may_know_lost));
    }
}
