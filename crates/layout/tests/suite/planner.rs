//! Histories of random clusters: they grow, shrink, are drained and break, and at every step the groups are valid, even
//! and moved little.
//!
//! `FOREBAY_PLANNER_CLUSTERS` is the number of clusters, `FOREBAY_PLANNER_LARGE=1` prints times for 10,000 drives.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use base::DriveId;
use layout::{
    DriveSlot, FailureDomain, Place, PlacementGroup, Profile, Spread, balance_groups, plan_placement_groups,
    replace_members, suggested_pg_count,
};

use crate::Dice;

const PROFILES: [&str; 8] = ["r2", "r3", "2+1", "2+2", "4+2", "5+2", "6+3", "12/7/9"];
const LEVELS: [FailureDomain; 4] =
    [FailureDomain::Drive, FailureDomain::Node, FailureDomain::Rack, FailureDomain::Zone];
const STEPS: u32 = 6;

/// A cluster with the groups of one profile.
struct Cluster {
    dice: Dice,
    /// Every drive there ever was, with its place.
    places: HashMap<DriveId, Place>,
    /// Drives that are there; weight 0 while they are drained.
    drives: Vec<DriveSlot>,
    nodes: u32,
    racks: u32,
    zones: u32,
    profile: Profile,
    rule: Spread,
    groups: Vec<PlacementGroup>,
}

/// What happened in all histories.
#[derive(Debug, Default)]
struct Totals {
    plans: u64,
    balances: u64,
    moved: u64,
    /// Fewest positions that had to move.
    least: u64,
    /// Moved positions beyond 110 % of that.
    excess_max: u64,
    ratio_max: f64,
    /// Groups that could not be valid, because the drives did not suffice.
    invalid: u64,
    /// Steps at which groups were being rebuilt, so that evenness was not looked at.
    busy: u64,
    deviation_max: f64,
}

impl Cluster {
    fn new(seed: u64) -> Option<Self> {
        let mut dice = Dice(seed);
        let nodes = match dice.between(0, 9) {
            0..=6 => dice.between(3, 20),
            7..=8 => dice.between(20, 60),
            _ => dice.between(60, 200),
        };
        let racks = if dice.once_in(3) { 1 } else { dice.between(2, (nodes / 2).max(2)) };
        let zones = if dice.once_in(2) { 1 } else { dice.between(1, 3.min(racks)) };
        let profile: Profile = dice.of(&PROFILES).parse().expect("a profile");
        let level = *dice.of(&LEVELS);
        let mut cluster = Self {
            dice,
            places: HashMap::new(),
            drives: Vec::new(),
            nodes: 0,
            racks,
            zones,
            profile,
            rule: Spread::default(),
            groups: Vec::new(),
        };
        (0..nodes).for_each(|_| cluster.add_node());
        let chosen = Spread::choose(&cluster.drives, profile, level);
        cluster.rule = chosen.or_else(|_| Spread::automatic(&cluster.drives, profile)).ok()?;
        let count = suggested_pg_count(cluster.drives.len() as u32, profile.n());
        cluster.groups = plan_placement_groups(&cluster.drives, profile, cluster.rule, count, seed)
            .expect("the rule fits");
        Some(cluster)
    }

    fn add_node(&mut self) {
        let rack = self.dice.between(0, self.racks - 1);
        let place = Place { zone: rack % self.zones, rack, node: self.nodes };
        self.nodes += 1;
        let (drives, weight) = (self.dice.between(1, 12), self.dice.between(1, 4));
        for _ in 0..drives {
            // Some nodes have equal drives, others a mixture.
            let weight = if rack.is_multiple_of(2) { weight } else { self.dice.between(1, 4) };
            self.add_drive(place, weight);
        }
    }

    fn add_drive(&mut self, place: Place, weight: u32) {
        let drive = DriveId(self.places.len() as u32);
        self.places.insert(drive, place);
        self.drives.push(DriveSlot { drive, place, weight_bytes: u64::from(weight) * 1_000_000_007 });
    }

    /// Drives of a random drive, node or rack.
    fn some_drives(&mut self) -> BTreeSet<DriveId> {
        let all: Vec<DriveSlot> = self.drives.clone();
        let one = *self.dice.of(&all);
        let level = *self.dice.of(&LEVELS[..3]);
        let domain = one.place.domain(level, one.drive);
        let inside = all.iter().filter(|slot| slot.place.domain(level, slot.drive) == domain);
        inside.map(|slot| slot.drive).collect()
    }

    /// Changes the cluster and says how.
    fn change(&mut self) -> &'static str {
        match self.dice.between(0, 6) {
            0 => {
                let nodes = self.dice.between(1, self.nodes.div_ceil(4));
                (0..nodes).for_each(|_| self.add_node());
                "grown by nodes"
            }
            1 => {
                self.racks += 1;
                (0..3).for_each(|_| self.add_node());
                "grown by a rack"
            }
            2 => {
                let place = self.dice.of(&self.drives.clone()).place;
                let weight = self.dice.between(1, 4);
                self.add_drive(place, weight);
                "grown by a drive"
            }
            3 => {
                let leaving = self.some_drives();
                let drained = self.drives.iter_mut().filter(|slot| leaving.contains(&slot.drive));
                drained.for_each(|slot| slot.weight_bytes = 0);
                "drained"
            }
            4 => {
                let changed = self.some_drives();
                let weight = u64::from(self.dice.between(1, 4)) * 1_000_000_007;
                let slots = self.drives.iter_mut().filter(|slot| changed.contains(&slot.drive));
                slots.for_each(|slot| slot.weight_bytes = weight);
                "weighed"
            }
            _ => {
                let gone = self.some_drives();
                self.drives.retain(|slot| !gone.contains(&slot.drive));
                self.replace(&gone);
                "broken"
            }
        }
    }

    fn replace(&mut self, gone: &BTreeSet<DriveId>) {
        let changed = replace_members(&self.groups, gone, &self.drives, &self.places);
        let places = &self.places;
        for next in &changed {
            let group = &self.groups[next.id.0 as usize];
            assert_eq!((next.epoch.0, next.spread), (group.epoch.0 + 1, group.spread));
            for (old, new) in group.members.iter().zip(&next.members).filter(|(old, new)| old != new) {
                assert!(gone.contains(old) && !gone.contains(new), "only lost positions move");
            }
        }
        for next in changed {
            let group = &mut self.groups[next.id.0 as usize];
            assert!(overfull(&next, next.spread, places) <= overfull(group, next.spread, places));
            *group = next;
        }
        let weighted: Vec<DriveSlot> =
            self.drives.iter().filter(|slot| slot.weight_bytes > 0).copied().collect();
        let room = |group: &PlacementGroup| {
            let full = |slot: &DriveSlot| {
                let domain = slot.place.domain(group.spread.level, slot.drive);
                let inside = group
                    .members
                    .iter()
                    .filter(|member| self.places[*member].domain(group.spread.level, **member) == domain);
                inside.count() >= group.spread.per_domain.into() || group.members.contains(&slot.drive)
            };
            !weighted.iter().all(full)
        };
        for group in
            self.groups.iter().filter(|group| group.members.iter().any(|member| gone.contains(member)))
        {
            assert!(!room(group), "a lost position moves if there is room: {group:?}");
        }
    }

    /// Chooses a rule again: the same level, or the automatic one, or a lower level if it must be.
    fn choose_rule(&mut self) -> bool {
        let same = Spread::choose(&self.drives, self.profile, self.rule.level);
        let automatic = Spread::automatic(&self.drives, self.profile);
        let chosen = if self.dice.once_in(4) { automatic } else { same.or(automatic) };
        chosen.map(|rule| self.rule = rule).is_ok()
    }

    fn balance(&mut self, totals: &mut Totals) {
        let is_possible = self.choose_rule();
        let before = self.groups.clone();
        let changed = balance_groups(&self.groups, &self.drives, self.rule);
        if self.dice.once_in(8) {
            assert_eq!(changed, balance_groups(&self.groups, &self.drives, self.rule), "repeatable");
        }
        let forced = self.forced();
        let quotas = exact_quotas(&self.drives, self.rule, &self.groups);
        let least = least_moves(self, &quotas);
        assert!(least >= forced || self.groups.iter().any(|group| !group.rebuilding.is_empty()));
        let busy = self.groups.iter().any(|group| !group.rebuilding.is_empty());
        let mut moved = 0;
        for next in changed {
            let group = &mut self.groups[next.id.0 as usize];
            assert!(group.rebuilding.is_empty(), "a group that is rebuilt stays");
            assert_eq!(next.epoch.0, group.epoch.0 + 1);
            for (position, (old, new)) in group.members.iter().zip(&next.members).enumerate() {
                let rebuilding = next.rebuilding.iter().find(|entry| usize::from(entry.position) == position);
                assert_eq!(rebuilding.map(|entry| entry.from), (old != new).then_some(*old));
            }
            moved += next.rebuilding.len() as u64;
            *group = next;
        }
        for group in
            self.groups.iter().filter(|group| !busy || group.epoch.0 > 1 && group.spread == self.rule)
        {
            let valid = overfull(group, self.rule, &self.places) == 0;
            let left = group.members.iter().all(|member| quotas.contains_key(member));
            if is_possible && !busy {
                assert!(valid && left && group.spread == self.rule, "{:?} {group:?}", self.rule);
            }
            totals.invalid += u64::from(!valid || !left);
        }
        if busy || !is_possible {
            totals.busy += 1;
            return;
        }
        self.check_even(&quotas, totals);
        totals.balances += 1;
        let mut least = least;
        if moved > least + least / 10 {
            let needless = needless_moves(self, &before, &quotas);
            assert!(moved - needless >= least);
            least = moved - needless;
        }
        (totals.moved, totals.least) = (totals.moved + moved, totals.least + least);
        totals.excess_max = totals.excess_max.max(moved.saturating_sub(least + least / 10));
        if least > 20 {
            totals.ratio_max = totals.ratio_max.max(moved as f64 / least as f64);
        }
        assert!(moved <= least + least / 10 + 3, "moved={moved} least={least} forced={forced}");
    }

    /// Positions that must move in any case: those of drives that take no data, and those too many in a domain.
    fn forced(&self) -> u64 {
        let takes: BTreeSet<DriveId> =
            self.drives.iter().filter(|slot| slot.weight_bytes > 0).map(|slot| slot.drive).collect();
        let of_group = |group: &PlacementGroup| {
            let mut staying = group.clone();
            staying.members.retain(|member| takes.contains(member));
            group.members.len() - staying.members.len() + overfull(&staying, self.rule, &self.places)
        };
        self.groups.iter().map(|group| of_group(group) as u64).sum()
    }

    fn check_even(&self, quotas: &BTreeMap<DriveId, f64>, totals: &mut Totals) {
        let counts = counts(&self.groups);
        for (drive, quota) in quotas {
            let count = f64::from(counts.get(drive).copied().unwrap_or(0));
            let deviation = (count - quota).abs();
            totals.deviation_max = totals.deviation_max.max(deviation);
            let allowed = (0.05 * quota).max(1.0) + 1e-6;
            assert!(deviation <= allowed, "{drive}: has {count}, should have {quota}");
        }
    }

    /// A new plan is even at every level: each domain has its part of each group, rounded down or up.
    fn check_plan(&self) {
        for level in LEVELS {
            let domain = |drive: &DriveId| self.places[drive].domain(level, *drive);
            let mut sums: BTreeMap<u64, u64> = BTreeMap::new();
            let members = self.groups.iter().flat_map(|group| &group.members);
            members.for_each(|member| *sums.entry(domain(member)).or_default() += 1);
            for group in &self.groups {
                let mut inside: BTreeMap<u64, u64> = BTreeMap::new();
                group.members.iter().for_each(|member| *inside.entry(domain(member)).or_default() += 1);
                let groups = self.groups.len() as u64;
                let in_every_group = sums.iter().filter(|(_, sum)| **sum >= groups).map(|(domain, _)| domain);
                for domain in in_every_group.chain(inside.keys()) {
                    let expected = sums[domain] / groups..=sums[domain].div_ceil(groups);
                    let inside = inside.get(domain).copied().unwrap_or(0);
                    assert!(expected.contains(&inside), "{level} {domain}: {inside} of {expected:?}");
                }
            }
        }
    }

    /// Ends rebuilds, most of the time.
    fn rebuild(&mut self) {
        if !self.dice.once_in(5) {
            self.groups.iter_mut().for_each(|group| group.rebuilding.clear());
        }
    }
}

/// Members above what the rule allows, or listed twice.
fn overfull(group: &PlacementGroup, rule: Spread, places: &HashMap<DriveId, Place>) -> usize {
    let mut inside: BTreeMap<u64, usize> = BTreeMap::new();
    for member in &group.members {
        *inside.entry(places[member].domain(rule.level, *member)).or_default() += 1;
    }
    let different: BTreeSet<&DriveId> = group.members.iter().collect();
    assert_eq!(different.len(), group.members.len(), "{group:?}");
    inside.values().map(|count| count.saturating_sub(rule.per_domain.into())).sum()
}

fn counts(groups: &[PlacementGroup]) -> BTreeMap<DriveId, u32> {
    let mut counts = BTreeMap::new();
    for member in groups.iter().flat_map(|group| &group.members) {
        *counts.entry(*member).or_default() += 1;
    }
    counts
}

/// The share of each drive with weight, found in another way than the planner does: by bisection of the level up to which
/// everything is filled.
fn exact_quotas(drives: &[DriveSlot], rule: Spread, groups: &[PlacementGroup]) -> BTreeMap<DriveId, f64> {
    let total: f64 = groups.iter().map(|group| group.members.len() as f64).sum();
    let cap = groups.len() as f64;
    let mut domains: BTreeMap<u64, Vec<DriveSlot>> = BTreeMap::new();
    for slot in drives.iter().filter(|slot| slot.weight_bytes > 0) {
        domains.entry(slot.place.domain(rule.level, slot.drive)).or_default().push(*slot);
    }
    let filled = |drives: &[DriveSlot], level: f64| -> f64 {
        drives.iter().map(|slot| (slot.weight_bytes as f64 * level).min(cap)).sum()
    };
    let domain_cap = |drives: &[DriveSlot]| drives.len().min(rule.per_domain.into()) as f64 * cap;
    let all = |level: f64| -> f64 {
        domains.values().map(|drives| filled(drives, level).min(domain_cap(drives))).sum()
    };
    let level = bisect(&all, total);
    let mut quotas = BTreeMap::new();
    for drives in domains.values() {
        let inside = |level: f64| filled(drives, level);
        let level = if filled(drives, level) > domain_cap(drives) {
            bisect(&inside, domain_cap(drives))
        } else {
            level
        };
        quotas.extend(drives.iter().map(|slot| (slot.drive, (slot.weight_bytes as f64 * level).min(cap))));
    }
    quotas
}

/// Where a growing function reaches a value.
fn bisect(function: &dyn Fn(f64) -> f64, value: f64) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..200 {
        let middle = (low + high) / 2.0;
        if function(middle) < value { low = middle } else { high = middle }
    }
    high
}

/// The fewest positions that must move so that each drive has its share, rounded down or up, and each group follows the
/// rule: all but those that can stay together, which are a maximal flow from groups over domains and drives.
fn least_moves(cluster: &Cluster, quotas: &BTreeMap<DriveId, f64>) -> u64 {
    let mut flow = Flow::default();
    let (source, sink, rounded_up) = (flow.node(), flow.node(), flow.node());
    let down = |quota: f64| (quota + 1e-6).floor();
    let mut nodes: BTreeMap<DriveId, usize> = BTreeMap::new();
    for (drive, quota) in quotas {
        let node = flow.node();
        nodes.insert(*drive, node);
        flow.edge(node, sink, down(*quota) as u64);
        flow.edge(node, rounded_up, u64::from(quota - down(*quota) > 1e-6));
    }
    let total: u64 = cluster.groups.iter().map(|group| group.members.len() as u64).sum();
    let sum_down: f64 = quotas.values().map(|quota| down(*quota)).sum();
    flow.edge(rounded_up, sink, total - sum_down as u64);
    for group in &cluster.groups {
        let mut domains: BTreeMap<u64, usize> = BTreeMap::new();
        for member in group.members.iter().filter(|member| quotas.contains_key(member)) {
            let domain = cluster.places[member].domain(cluster.rule.level, *member);
            let node = *domains.entry(domain).or_insert_with(|| {
                let node = flow.node();
                flow.edge(source, node, cluster.rule.per_domain.into());
                node
            });
            flow.edge(node, nodes[member], 1);
        }
    }
    total - flow.most(source, sink)
}

/// A network, to find its maximal flow (Dinic).
#[derive(Default)]
struct Flow {
    /// Where an edge leads and what it still takes. The edge back is at the index xor 1.
    edges: Vec<(usize, u64)>,
    of_node: Vec<Vec<usize>>,
    costs: Vec<i64>,
}

impl Flow {
    fn node(&mut self) -> usize {
        self.of_node.push(Vec::new());
        self.of_node.len() - 1
    }

    fn edge(&mut self, from: usize, to: usize, takes: u64) {
        self.of_node[from].push(self.edges.len());
        self.of_node[to].push(self.edges.len() + 1);
        self.edges.extend([(to, takes), (from, 0)]);
    }

    /// An edge of which a part is used.
    fn used_edge(&mut self, from: usize, to: usize, takes: u64, used: u64, cost: i64) {
        let back = self.edges.len() + 1;
        self.edge(from, to, takes.saturating_sub(used));
        self.edges[back].1 = used;
        self.costs.extend([cost, -cost]);
    }

    /// Uses cycles of negative cost until there is none, and says what that saved (Bellman and Ford).
    fn cancel_cycles(&mut self) -> u64 {
        let mut saved = 0i64;
        'search: loop {
            let nodes = self.of_node.len();
            let (mut cost, mut by) = (vec![0i64; nodes], vec![usize::MAX; nodes]);
            loop {
                let mut changed = false;
                for (edge, (to, takes)) in self.edges.iter().enumerate() {
                    let from = self.edges[edge ^ 1].0;
                    if *takes > 0 && cost[from] + self.costs[edge] < cost[*to] {
                        (cost[*to], by[*to], changed) = (cost[from] + self.costs[edge], edge, true);
                    }
                }
                if !changed {
                    return saved as u64;
                }
                let cycles = self.cycles(&by);
                for cycle in &cycles {
                    saved -= cycle.iter().map(|edge| self.costs[*edge]).sum::<i64>();
                    for edge in cycle {
                        self.edges[*edge].1 -= 1;
                        self.edges[*edge ^ 1].1 += 1;
                    }
                }
                if !cycles.is_empty() {
                    continue 'search;
                }
            }
        }
    }

    /// Cycles of the edges over which nodes were reached.
    fn cycles(&self, by: &[usize]) -> Vec<Vec<usize>> {
        let mut seen = vec![usize::MAX; by.len()];
        let mut cycles = Vec::new();
        for start in 0..by.len() {
            let mut node = start;
            while seen[node] == usize::MAX && by[node] != usize::MAX {
                seen[node] = start;
                node = self.edges[by[node] ^ 1].0;
            }
            if seen[node] == start && by[node] != usize::MAX {
                let (end, mut cycle) = (node, Vec::new());
                loop {
                    cycle.push(by[node]);
                    node = self.edges[by[node] ^ 1].0;
                    if node == end {
                        break;
                    }
                }
                cycles.push(cycle);
            }
        }
        cycles
    }

    fn most(&mut self, source: usize, sink: usize) -> u64 {
        let mut sum = 0;
        loop {
            let mut depth = vec![usize::MAX; self.of_node.len()];
            depth[source] = 0;
            let mut waiting = std::collections::VecDeque::from([source]);
            while let Some(node) = waiting.pop_front() {
                for (to, takes) in self.of_node[node].iter().map(|edge| self.edges[*edge]) {
                    if takes > 0 && depth[to] == usize::MAX {
                        depth[to] = depth[node] + 1;
                        waiting.push_back(to);
                    }
                }
            }
            if depth[sink] == usize::MAX {
                return sum;
            }
            let mut next = vec![0; self.of_node.len()];
            sum += self.push(source, sink, u64::MAX, &depth, &mut next);
        }
    }

    fn push(&mut self, node: usize, sink: usize, most: u64, depth: &[usize], next: &mut [usize]) -> u64 {
        if node == sink {
            return most;
        }
        let mut sum = 0;
        while sum < most && next[node] < self.of_node[node].len() {
            let edge = self.of_node[node][next[node]];
            let (to, takes) = self.edges[edge];
            if takes > 0 && depth[to] == depth[node] + 1 {
                let pushed = self.push(to, sink, takes.min(most - sum), depth, next);
                self.edges[edge].1 -= pushed;
                self.edges[edge ^ 1].1 += pushed;
                sum += pushed;
            }
            if sum < most {
                next[node] += 1;
            }
        }
        sum
    }
}

/// How many moves fewer would have sufficed: as long as there is a cycle of exchanges that saves a move, it is used.
fn needless_moves(cluster: &Cluster, before: &[PlacementGroup], quotas: &BTreeMap<DriveId, f64>) -> u64 {
    let mut flow = Flow::default();
    let (sink, rounded_up) = (flow.node(), flow.node());
    let down = |quota: f64| (quota + 1e-6).floor() as u64;
    let counts = counts(&cluster.groups);
    let mut domains: BTreeMap<u64, Vec<(DriveId, usize)>> = BTreeMap::new();
    let mut left = cluster.groups.iter().map(|group| group.members.len() as u64).sum::<u64>();
    left -= quotas.values().map(|quota| down(*quota)).sum::<u64>();
    for (drive, quota) in quotas {
        let (node, count) = (flow.node(), u64::from(counts.get(drive).copied().unwrap_or(0)));
        let domain = cluster.places[drive].domain(cluster.rule.level, *drive);
        domains.entry(domain).or_default().push((*drive, node));
        let above = count.saturating_sub(down(*quota));
        flow.used_edge(node, sink, down(*quota), count - above, 0);
        flow.used_edge(node, rounded_up, u64::from(quota - down(*quota) as f64 > 1e-6), above, 0);
        left -= above;
    }
    flow.used_edge(rounded_up, sink, left, 0, 0);
    for (old, new) in before.iter().zip(&cluster.groups) {
        let group = flow.node();
        for drives in domains.values() {
            let inside = drives.iter().filter(|(drive, _)| new.members.contains(drive)).count();
            let domain = flow.node();
            flow.used_edge(group, domain, cluster.rule.per_domain.into(), inside as u64, 0);
            for (drive, node) in drives {
                let cost = i64::from(!old.members.contains(drive));
                flow.used_edge(domain, *node, 1, u64::from(new.members.contains(drive)), cost);
            }
        }
    }
    flow.cancel_cycles()
}

fn run(seed: u64, totals: &mut Totals) {
    let Some(mut cluster) = Cluster::new(seed) else { return };
    totals.plans += 1;
    let quotas = exact_quotas(&cluster.drives, cluster.rule, &cluster.groups);
    cluster.check_even(&quotas, totals);
    cluster.check_plan();
    assert!(cluster.groups.iter().all(|group| overfull(group, cluster.rule, &cluster.places) == 0));
    for step in 0..STEPS {
        let (what, nodes) = (cluster.change(), cluster.nodes);
        if cluster.drives.iter().all(|slot| slot.weight_bytes == 0) {
            return;
        }
        cluster.rebuild();
        let run = std::panic::AssertUnwindSafe(|| cluster.balance(totals));
        if let Err(panic) = std::panic::catch_unwind(run) {
            let (profile, rule) = (cluster.profile, cluster.rule);
            eprintln!("seed={seed} step={step} {what}: nodes={nodes} profile={profile} rule={rule:?}");
            std::panic::resume_unwind(panic);
        }
        cluster.rebuild();
    }
}

#[test]
fn clusters_stay_valid_even_and_calm_over_their_history() {
    let clusters = std::env::var("FOREBAY_PLANNER_CLUSTERS").ok().and_then(|text| text.parse().ok());
    let first = std::env::var("FOREBAY_PLANNER_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    let mut totals = Totals::default();
    for seed in first..first + clusters.unwrap_or(40) {
        run(seed, &mut totals);
    }
    println!("{totals:?} ratio={:.4}", totals.moved as f64 / totals.least.max(1) as f64);
    assert!(totals.balances * 2 > totals.busy, "most steps were looked at");
}

/// Times for 10,000 drives with 100 positions each.
#[test]
#[allow(clippy::disallowed_methods, reason = "only printed")]
fn a_large_cluster_is_planned_and_balanced() {
    if std::env::var("FOREBAY_PLANNER_LARGE").is_err() {
        return;
    }
    let timed = |what: &str, run: &mut dyn FnMut() -> usize| {
        let begun = std::time::Instant::now();
        let result = run();
        println!("{what}: {:.2?} ({result})", begun.elapsed());
    };
    let slot = |number: u32| {
        let place = Place { zone: number / 2500, rack: number / 250, node: number / 10 };
        DriveSlot { drive: DriveId(number), place, weight_bytes: 1_000_000 * u64::from(1 + number / 10 % 3) }
    };
    let mut drives: Vec<DriveSlot> = (0..10_000).map(slot).collect();
    let profile: Profile = "9+3".parse().unwrap();
    let rule = Spread { level: FailureDomain::Node, per_domain: 1 };
    let racks = Spread { level: FailureDomain::Rack, per_domain: 1 };
    let count = suggested_pg_count(10_000, profile.n());
    let mut groups = Vec::new();
    timed("plan 10,000 drives", &mut || {
        groups = plan_placement_groups(&drives, profile, rule, count, 1).unwrap();
        groups.len()
    });
    let flat = Spread::default();
    let mut by_drive = Vec::new();
    timed("plan 10,000 drives without places", &mut || {
        let flat_drives = drives.iter().map(|slot| DriveSlot { place: Place::default(), ..*slot });
        by_drive = plan_placement_groups(&flat_drives.collect::<Vec<_>>(), profile, flat, count, 1).unwrap();
        by_drive.len()
    });
    let moved = |changed: Vec<PlacementGroup>| changed.iter().map(|group| group.rebuilding.len()).sum();
    timed("balance: nothing to do", &mut || moved(balance_groups(&groups, &drives, rule)));
    timed("balance: one per rack", &mut || moved(balance_groups(&groups, &drives, racks)));
    timed("balance: from drives to one per rack", &mut || moved(balance_groups(&by_drive, &drives, racks)));
    timed("balance: a third by weight", &mut || {
        let equal: Vec<DriveSlot> =
            drives.iter().map(|slot| DriveSlot { weight_bytes: 1, ..*slot }).collect();
        moved(balance_groups(&groups, &equal, rule))
    });
    timed("balance: 1,000 drives more", &mut || {
        let more: Vec<DriveSlot> = drives.iter().copied().chain((10_000..11_000).map(slot)).collect();
        moved(balance_groups(&groups, &more, rule))
    });
    let gone: BTreeSet<DriveId> = (0..250).map(DriveId).collect();
    let places: HashMap<DriveId, Place> = drives.iter().map(|slot| (slot.drive, slot.place)).collect();
    timed("replace a rack of 250 drives", &mut || {
        let spare: Vec<DriveSlot> =
            drives.iter().filter(|slot| !gone.contains(&slot.drive)).copied().collect();
        replace_members(&groups, &gone, &spare, &places).len()
    });
    timed("balance: a rack drained", &mut || {
        drives.iter_mut().take(250).for_each(|slot| slot.weight_bytes = 0);
        moved(balance_groups(&groups, &drives, rule))
    });
}
