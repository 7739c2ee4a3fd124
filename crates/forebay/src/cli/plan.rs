//! `profile explain` and `capacity plan`: arithmetic, without a node.

use anyhow::Result;
use layout::{CapacityRequest, Profile, plan_capacity};

use super::output::{Format, print};

pub(super) fn explain(profile: Profile, domains: Option<u32>, format: Format) -> Result<()> {
    let explanation = profile.explain(domains.unwrap_or(u32::from(profile.n())));
    print(format, &explanation, ToString::to_string)
}

pub(super) fn capacity(
    raw_bytes: u64,
    nodes: u32,
    profile: Profile,
    spares: u32,
    format: Format,
) -> Result<()> {
    let plan = plan_capacity(CapacityRequest { raw_bytes, nodes, profile, spares })?;
    print(format, &plan, ToString::to_string)
}
