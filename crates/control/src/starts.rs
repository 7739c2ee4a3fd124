//! A node's directory exists once. Each start has a random number, which the directory and the record of the node have: a copy of the
//! directory from before a start does not know it, and is refused.

use base::NodeId;

use crate::{NodeRecord, Plan};

impl NodeRecord {
    /// Whether a start may follow: `last` is the last one that the directory knows, `this` its own number.
    pub fn may_start(&self, last: u64, this: u64) -> bool {
        self.start == 0 || [last, this].contains(&self.start)
    }
}

impl Plan {
    /// Notes a start. Returns false if the node was started from another copy of its directory since.
    pub fn start_node(&mut self, id: NodeId, (last, this): (u64, u64)) -> bool {
        let Some(node) = self.next().nodes.get(&id).cloned() else { return false };
        let may = node.may_start(last, this);
        if may && node.start != this {
            self.set_node(NodeRecord { start: this, ..node });
        }
        may
    }

    /// Any copy of the node's directory may start next.
    pub fn forget_start(&mut self, id: NodeId) {
        if let Some(node) = self.next().nodes.get(&id).filter(|node| node.start != 0) {
            self.set_node(NodeRecord { start: 0, ..node.clone() });
        }
    }

    /// Notes when the certificate of a node was made.
    pub fn certify_node(&mut self, id: NodeId, now_s: i64) {
        if let Some(node) = self.next().nodes.get(&id).filter(|node| node.certified_s != Some(now_s)) {
            self.set_node(NodeRecord { certified_s: Some(now_s), ..node.clone() });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::members::tests::cluster;

    #[test]
    fn a_copy_of_a_directory_does_not_start_once_the_original_has() {
        let mut plan = Plan::new(cluster(&[1, 1], "r2"));
        let node = *plan.next().nodes.keys().last().unwrap();
        assert!(plan.start_node(node, (0, 7)), "the first that tells its number");
        assert!(plan.start_node(node, (0, 7)), "the answer was lost");
        assert!(plan.start_node(node, (7, 7)), "it renews later");
        assert!(plan.start_node(node, (7, 8)));
        let copy = (7, 9);
        assert!(!plan.start_node(node, copy));
        assert_eq!(plan.next().nodes[&node].start, 8);
        // It was not copied after its start, but the end of the logs was lost.
        plan.lose_end();
        assert!(plan.start_node(node, (8, 10)));
        plan.forget_start(node);
        assert!(plan.start_node(node, copy), "it has joined again");
        assert!(!plan.start_node(NodeId(99), (0, 1)));
    }
}
