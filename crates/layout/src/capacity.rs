//! Usable space for users of a planned cluster.

use std::fmt;

use base::units::format_size;
use serde::{Deserialize, Serialize};

use crate::Profile;

/// Share of the space for data kept free for metadata, for cleaning segments and for repair.
pub const RESERVE_PERCENT: u64 = 10;

/// A cluster of equal nodes, each a failure domain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CapacityRequest {
    /// Raw bytes of all drives of all nodes.
    pub raw_bytes: u64,
    /// Nodes.
    pub nodes: u32,
    /// The protection of data.
    pub profile: Profile,
    /// Number of nodes whose space stays free, spread over all nodes, so that this many lost nodes can be rebuilt.
    pub spares: u32,
}

/// The uses of raw space. They sum up to `raw_bytes`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapacityPlan {
    /// The cluster that was planned.
    pub request: CapacityRequest,
    /// Kept free to rebuild lost nodes.
    pub spare_bytes: u64,
    /// Parity shards or further copies.
    pub parity_bytes: u64,
    /// [`RESERVE_PERCENT`] of the rest.
    pub reserve_bytes: u64,
    /// For user data.
    pub usable_bytes: u64,
}

/// Why there is no plan.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CapacityError {
    /// A stripe needs more nodes than remain without the spares.
    #[error(
        "too few nodes: nodes={nodes} spares={spares} needed={needed} (n of profile {profile}, beside the spares)"
    )]
    TooFewNodes {
        /// Nodes given.
        nodes: u32,
        /// Spare nodes among them.
        spares: u32,
        /// Nodes that the profile needs beside the spares.
        needed: u32,
        /// The profile.
        profile: Profile,
    },
}

/// Usable space: `raw x (nodes - spares) / nodes x k / n x 0.9`.
///
/// # Errors
/// If the nodes without the spares are fewer than the profile's width.
pub fn plan_capacity(request: CapacityRequest) -> Result<CapacityPlan, CapacityError> {
    let CapacityRequest { raw_bytes, nodes, profile, spares } = request;
    let needed = u32::from(profile.n());
    if nodes.saturating_sub(spares) < needed {
        return Err(CapacityError::TooFewNodes { nodes, spares, needed, profile });
    }
    let spare_bytes = share(raw_bytes, spares.into(), nodes.into());
    let placed = raw_bytes - spare_bytes;
    let parity_bytes = share(placed, profile.m().into(), profile.n().into());
    let data = placed - parity_bytes;
    let reserve_bytes = share(data, RESERVE_PERCENT, 100);
    Ok(CapacityPlan { request, spare_bytes, parity_bytes, reserve_bytes, usable_bytes: data - reserve_bytes })
}

/// `bytes x part / whole`, rounded up: a reserve is never smaller than promised.
fn share(bytes: u64, part: u64, whole: u64) -> u64 {
    let share = (u128::from(bytes) * u128::from(part)).div_ceil(u128::from(whole));
    u64::try_from(share).expect("a part is at most the whole")
}

impl fmt::Display for CapacityPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CapacityRequest { raw_bytes, nodes, profile, spares } = self.request;
        writeln!(f, "{nodes} nodes, profile {profile}, {spares} spare")?;
        let rows = [
            ("raw", raw_bytes),
            ("spare nodes", self.spare_bytes),
            ("parity", self.parity_bytes),
            ("reserve", self.reserve_bytes),
            ("usable", self.usable_bytes),
        ];
        for (name, bytes) in rows {
            let percent = 100.0 * bytes as f64 / raw_bytes.max(1) as f64;
            let decimal = format!("{:.2} TB", bytes as f64 / 1e12);
            writeln!(f, "  {name:<12}{decimal:>14}{:>14}{percent:>8.1} %", format_size(bytes))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn plan(raw_bytes: u64, nodes: u32, profile: &str, spares: u32) -> Result<CapacityPlan, CapacityError> {
        plan_capacity(CapacityRequest { raw_bytes, nodes, profile: profile.parse().unwrap(), spares })
    }

    #[test]
    fn eight_nodes_with_five_plus_two_and_a_spare_give_104_terabytes() {
        let plan = plan(184_320_000_000_000, 8, "5+2", 1).unwrap();
        assert_eq!(plan.usable_bytes, 103_680_000_000_000);
        let text = plan.to_string();
        for part in ["8 nodes, profile 5+2, 1 spare", "184.32 TB", "103.68 TB", "56.2 %"] {
            assert!(text.contains(part), "{part}\n{text}");
        }
    }

    #[test]
    fn too_few_nodes_beside_the_spares_are_refused_with_the_numbers() {
        let error = plan(1 << 40, 7, "5+2", 1).unwrap_err().to_string();
        assert!(error.contains("nodes=7 spares=1 needed=7 (n of profile 5+2"), "{error}");
        assert!(plan(1 << 40, 0, "1+0", 0).is_err());
        assert!(plan(1 << 40, 2, "1+0", 5).is_err());
        assert!(plan(0, 1, "1+0", 0).is_ok());
    }

    #[test]
    fn reserves_are_rounded_up() {
        let plan = plan(100, 7, "4+2", 1).unwrap();
        assert_eq!((plan.spare_bytes, plan.parity_bytes, plan.reserve_bytes), (15, 29, 6));
        assert_eq!(plan.usable_bytes, 50);
    }

    proptest! {
        #[test]
        fn the_parts_sum_up_to_raw(raw in any::<u64>(), nodes in 1u32..5000, k in 1u32..=16, m in 0u32..=4, spares in 0u32..9) {
            let profile = Profile::from_data_and_parity(k, m).unwrap();
            if let Ok(plan) = plan_capacity(CapacityRequest { raw_bytes: raw, nodes, profile, spares }) {
                prop_assert_eq!(plan.spare_bytes + plan.parity_bytes + plan.reserve_bytes + plan.usable_bytes, raw);
            }
        }
    }
}
