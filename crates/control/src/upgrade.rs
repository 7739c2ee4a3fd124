//! Format levels: when the nodes of a cluster may write formats that its earlier programs cannot read.

use std::collections::BTreeMap;

use base::NodeId;

use crate::{Cluster, Plan};

/// How far the upgrade of the nodes has come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upgrade {
    /// The format level that the nodes write.
    pub level: u32,
    /// The newest level that a node knows.
    pub newest: u32,
    /// The level to which the cluster can be raised; not above `level`: to none.
    pub possible: u32,
    /// The nodes that know less than `newest`, or do not say what they know.
    pub behind: Vec<NodeId>,
}

impl Upgrade {
    /// `told` has the newest level of each node that answers. What a node knows that does not answer is not known: it may have gone
    /// back to its last program.
    pub fn of(cluster: &Cluster, told: &BTreeMap<NodeId, u32>) -> Self {
        let level = cluster.record.format_level;
        let levels: BTreeMap<NodeId, Option<u32>> =
            cluster.nodes.keys().map(|node| (*node, told.get(node).copied())).collect();
        let newest = levels.values().flatten().copied().max().unwrap_or(level).max(level);
        // `None` is the least of all.
        let least = levels.values().min().copied().flatten();
        let behind = levels.iter().filter(|(_, known)| **known < Some(newest)).map(|(node, _)| *node);
        Self { level, newest, possible: least.unwrap_or(level).max(level), behind: behind.collect() }
    }
}

impl Plan {
    /// Raises the format level as far as the programs of all nodes allow. It is never lowered.
    pub fn finalize_upgrade(&mut self, told: &BTreeMap<NodeId, u32>) -> Upgrade {
        let before = Upgrade::of(self.next(), told);
        if before.possible > before.level {
            self.set_cluster(|cluster| cluster.format_level = before.possible);
        }
        Upgrade { level: before.possible, ..before }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::members::tests::cluster;

    /// A cluster of three nodes of level 1.
    fn plan() -> Plan {
        let mut plan = Plan::new(cluster(&[1, 1, 1], "r2"));
        plan.set_cluster(|cluster| cluster.format_level = 1);
        plan
    }

    fn told(levels: &[(u32, u32)]) -> BTreeMap<NodeId, u32> {
        levels.iter().map(|(node, level)| (NodeId(*node), *level)).collect()
    }

    #[test]
    fn the_level_is_raised_to_what_all_nodes_know_and_never_lowered() {
        let mut plan = plan();
        let upgrade = |plan: &mut Plan, levels: &[(u32, u32)]| {
            let Upgrade { level, newest, behind, .. } = plan.finalize_upgrade(&told(levels));
            assert_eq!(plan.next().record.format_level, level);
            (level, newest, behind.iter().map(|node| node.0).collect::<Vec<_>>())
        };
        assert_eq!(upgrade(&mut plan, &[(0, 1), (1, 1), (2, 1)]), (1, 1, vec![]));
        assert_eq!(upgrade(&mut plan, &[(0, 2), (1, 1), (2, 2)]), (1, 2, vec![1]));
        assert_eq!(upgrade(&mut plan, &[(0, 2), (2, 2)]), (1, 2, vec![1]), "a node that does not answer");
        assert_eq!(upgrade(&mut plan, &[(0, 4), (1, 3), (2, 3)]), (3, 4, vec![1, 2]));
        // Their programs would not start, and if they do, nothing is written for them.
        assert_eq!(upgrade(&mut plan, &[(0, 2), (1, 2), (2, 2)]), (3, 3, vec![0, 1, 2]));
        assert_eq!(upgrade(&mut plan, &[]), (3, 3, vec![0, 1, 2]));
    }
}
