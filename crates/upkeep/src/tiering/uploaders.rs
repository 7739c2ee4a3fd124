//! The nodes that make blobs: this one and all others that are reached. Each gets the blobs of which its drives have the most, in
//! proportion to what it has to do already. A node that fails pauses, and the others go on.

use std::collections::HashMap;
use std::sync::Arc;

use base::NodeId;
use client::Client;
use wire::tier::DueExtent;

use super::backoff::Backoff;
use crate::others::OtherNodes;

/// A share is compared in thousandths.
const SHARES: u64 = 1000;

/// See the module.
pub(super) struct Uploaders {
    others: Option<Arc<dyn OtherNodes>>,
    /// Blobs that a node makes at a time.
    each: usize,
    /// Blobs made at a time in all.
    all: usize,
    nodes: HashMap<NodeId, Uploader>,
}

#[derive(Default)]
struct Uploader {
    under_way: usize,
    pause: Backoff,
}

impl Uploaders {
    pub(super) fn new(others: Option<Arc<dyn OtherNodes>>, each: usize, all: usize) -> Self {
        Self { others, each, all, nodes: HashMap::new() }
    }

    /// This node.
    pub(super) fn here(&self) -> NodeId {
        self.others.as_ref().map_or(NodeId(0), |others| others.here())
    }

    /// The others, if a blob is for one of them.
    pub(super) fn others_for(&self, node: NodeId) -> Option<Arc<dyn OtherNodes>> {
        self.others.clone().filter(|others| node != others.here())
    }

    /// The nodes that may make another blob at `now_ns`.
    pub(super) fn free(&self, now_ns: u64) -> Vec<NodeId> {
        if self.nodes.values().map(|node| node.under_way).sum::<usize>() >= self.all {
            return Vec::new();
        }
        let is_free = |node: &NodeId| match self.nodes.get(node) {
            Some(known) => known.under_way < known.pause.tries_max(self.each, now_ns),
            None => true,
        };
        self.able().into_iter().filter(is_free).collect()
    }

    /// The nodes that are reached, without those that the store does not answer while it answers others.
    fn able(&self) -> Vec<NodeId> {
        let (others, blind) = match &self.others {
            Some(others) => (others.reached(), others.blind()),
            None => Default::default(),
        };
        let present = std::iter::once(self.here()).chain(others);
        let (blind, seeing): (Vec<NodeId>, Vec<NodeId>) = present.partition(|node| blind.contains(node));
        // If it answers none, the next attempts find out whether it does again.
        if seeing.is_empty() { blind } else { seeing }
    }

    /// The one of `free` that makes a blob of these extents.
    pub(super) fn choose(&self, client: &Client, free: &[NodeId], load: &[DueExtent]) -> Option<NodeId> {
        if let [only] = free {
            return Some(*only);
        }
        let held = client.bytes_by_node(load.iter().map(|due| &due.extent));
        let here = self.here();
        let share = |node: &NodeId| {
            let under_way = self.nodes.get(node).map_or(0, |node| node.under_way) as u64;
            // Of equals, this one: nothing has to be told.
            (held.get(node).copied().unwrap_or(0) * SHARES / (under_way + 1), *node == here)
        };
        free.iter().copied().max_by_key(share)
    }

    pub(super) fn began(&mut self, node: NodeId) {
        self.nodes.entry(node).or_default().under_way += 1;
    }

    /// Notes the end of a blob, and why it failed.
    pub(super) fn ended(&mut self, node: NodeId, failure: Option<String>, now_ns: u64) {
        let known = self.nodes.entry(node).or_default();
        known.under_way = known.under_way.saturating_sub(1);
        match failure {
            None => known.pause.clear(),
            Some(reason) => known.pause.failed(reason, now_ns),
        }
    }

    /// Nothing is left to be uploaded.
    pub(super) fn clear(&mut self) {
        self.nodes.retain(|_, node| node.under_way > 0);
    }

    /// Why this node makes no blobs.
    pub(super) fn reason_here(&self) -> Option<String> {
        self.nodes.get(&self.here()).and_then(|here| here.pause.reason())
    }

    /// Why no node makes blobs, by the first that failed: this one, if it could.
    pub(super) fn reason(&self) -> Option<String> {
        let reason = |node: NodeId| self.nodes.get(&node).and_then(|known| known.pause.reason());
        let reasons: Option<Vec<String>> = self.able().into_iter().map(reason).collect();
        reasons?.into_iter().next()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use base::Epoch;
    use client::{OwedEntry, RepairOutcome};
    use wire::BoxFuture;

    use super::*;
    use crate::others::BlobLoad;

    const S: u64 = 1_000_000_000;

    struct Three(Vec<u32>);

    impl OtherNodes for Three {
        fn here(&self) -> NodeId {
            NodeId(1)
        }

        fn reached(&self) -> Vec<NodeId> {
            vec![NodeId(2), NodeId(3)]
        }

        fn blind(&self) -> BTreeSet<NodeId> {
            self.0.iter().copied().map(NodeId).collect()
        }

        fn restore(
            &self,
            _: NodeId,
            _: Epoch,
            _: Vec<OwedEntry>,
        ) -> BoxFuture<'_, Option<Vec<RepairOutcome>>> {
            Box::pin(async { None })
        }

        fn upload(&self, _: NodeId, _: BlobLoad) -> BoxFuture<'_, Result<u64, String>> {
            Box::pin(async { Err("it does not".to_owned()) })
        }
    }

    fn numbers(nodes: &[NodeId]) -> Vec<u32> {
        nodes.iter().map(|node| node.0).collect()
    }

    #[test]
    fn a_node_that_fails_pauses_and_the_others_go_on() {
        let mut uploaders = Uploaders::new(Some(Arc::new(Three(Vec::new()))), 2, 5);
        assert_eq!(numbers(&uploaders.free(0)), [1, 2, 3]);
        uploaders.began(NodeId(2));
        uploaders.ended(NodeId(2), Some("down".to_owned()), S);
        assert_eq!(numbers(&uploaders.free(S)), [1, 3]);
        assert_eq!(uploaders.reason(), None, "the others go on");
        // One attempt finds out whether it works again.
        assert_eq!(numbers(&uploaders.free(3 * S)), [1, 2, 3]);
        uploaders.began(NodeId(2));
        assert_eq!(numbers(&uploaders.free(3 * S)), [1, 3]);
        for node in [1, 2, 3] {
            uploaders.began(NodeId(node));
            uploaders.ended(NodeId(node), Some(format!("node {node}")), 4 * S);
        }
        assert_eq!(uploaders.reason().as_deref(), Some("node 1"));
        assert_eq!(uploaders.reason_here().as_deref(), Some("node 1"));
    }

    #[test]
    fn nodes_that_the_store_does_not_answer_are_left_out_unless_all_are() {
        let free =
            |blind: &[u32]| numbers(&Uploaders::new(Some(Arc::new(Three(blind.to_vec()))), 2, 5).free(0));
        assert_eq!(free(&[2]), [1, 3]);
        assert_eq!(free(&[1, 3]), [2]);
        assert_eq!(free(&[1, 2, 3]), [1, 2, 3]);
        // What these do not try is no reason.
        let mut uploaders = Uploaders::new(Some(Arc::new(Three(vec![1, 3]))), 2, 5);
        uploaders.began(NodeId(2));
        uploaders.ended(NodeId(2), Some("full".to_owned()), S);
        assert_eq!(uploaders.reason().as_deref(), Some("full"));
    }

    #[test]
    fn there_are_limits_for_each_node_and_for_all() {
        let mut uploaders = Uploaders::new(Some(Arc::new(Three(Vec::new()))), 2, 5);
        for node in [1, 1, 2, 2] {
            uploaders.began(NodeId(node));
        }
        assert_eq!(numbers(&uploaders.free(0)), [3]);
        uploaders.began(NodeId(3));
        assert_eq!(numbers(&uploaders.free(0)), [], "five are under way");
        uploaders.ended(NodeId(1), None, 0);
        assert_eq!(numbers(&uploaders.free(0)), [1, 3]);
        let mut alone = Uploaders::new(None, 2, 64);
        assert_eq!(alone.free(0).len(), 1);
        alone.began(alone.here());
        alone.ended(alone.here(), Some("full".to_owned()), 0);
        assert_eq!((alone.free(0).len(), alone.reason().as_deref()), (0, Some("full")));
    }
}
