//! Positions: an edge colouring, so that every drive appears equally often in every position.

use std::collections::BTreeMap;

use base::DriveId;

/// Orders the members of each group so that every drive appears equally often in each position.
///
/// Groups and drives form a bipartite graph with an edge per membership; positions are colours. With every drive
/// split into nodes of at most n edges, n colours suffice (König), and a node of n edges has each colour once.
pub(super) fn order_members(sets: &[Vec<DriveId>], n: usize) -> Vec<Vec<DriveId>> {
    let mut appearances: BTreeMap<DriveId, usize> = BTreeMap::new();
    let mut node_of: BTreeMap<(DriveId, usize), usize> = BTreeMap::new();
    let mut colouring = Colouring { n, group_edges: vec![None; sets.len() * n], drive_edges: Vec::new() };
    for (group, set) in sets.iter().enumerate() {
        for drive in set {
            let seen = appearances.entry(*drive).or_default();
            let next = node_of.len();
            let node = *node_of.entry((*drive, *seen / n)).or_insert(next);
            *seen += 1;
            colouring.drive_edges.resize(node_of.len() * n, None);
            colouring.add_edge(group, node);
        }
    }
    let mut drive_of = vec![DriveId(0); node_of.len()];
    node_of.into_iter().for_each(|((drive, _), node)| drive_of[node] = drive);
    let member = |edge: &Option<usize>| drive_of[edge.expect("every group has n members")];
    colouring.group_edges.chunks_exact(n).map(|edges| edges.iter().map(member).collect()).collect()
}

/// A partial edge colouring: the neighbour of each node for each colour.
struct Colouring {
    n: usize,
    group_edges: Vec<Option<usize>>,
    drive_edges: Vec<Option<usize>>,
}

impl Colouring {
    /// Colours one more edge. If its ends have no free colour in common, swaps two colours along a path.
    fn add_edge(&mut self, group: usize, drive: usize) {
        let free =
            |edges: &[Option<usize>]| edges.iter().position(Option::is_none).expect("fewer than n edges");
        let at_group = free(&self.group_edges[group * self.n..][..self.n]);
        let at_drive = free(&self.drive_edges[drive * self.n..][..self.n]);
        // The path from the drive by the group's free colour never ends at the group: the graph is bipartite.
        self.swap_path(drive, at_group, at_drive);
        self.group_edges[group * self.n + at_group] = Some(drive);
        self.drive_edges[drive * self.n + at_group] = Some(group);
    }

    /// Frees colour `taken` at the drive, where `free` is free, by swapping both along the path that starts there.
    fn swap_path(&mut self, drive: usize, taken: usize, free: usize) {
        let n = self.n;
        let mut edges = Vec::new();
        let mut end = drive;
        while let Some(group) = self.drive_edges[end * n + taken] {
            edges.push((group, end, taken));
            let Some(next) = self.group_edges[group * n + free] else { break };
            edges.push((group, next, free));
            end = next;
        }
        for (group, drive, colour) in &edges {
            self.group_edges[group * n + colour] = None;
            self.drive_edges[drive * n + colour] = None;
        }
        for (group, drive, colour) in edges {
            let swapped = if colour == taken { free } else { taken };
            self.group_edges[group * n + swapped] = Some(drive);
            self.drive_edges[drive * n + swapped] = Some(group);
        }
    }
}
