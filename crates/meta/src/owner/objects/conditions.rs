//! Conditions on objects, in the order of RFC 9110 section 13.2.2.

use wire::object::{Conditions, EtagMatch, ObjectError};

use super::super::{Op, Stop};
use super::record::{etag_of, size_of};
use crate::values::Inode;

const SECOND_NS: i64 = 1_000_000_000;

fn matches(wanted: &EtagMatch, inode: &Inode) -> bool {
    match wanted {
        EtagMatch::Any => true,
        EtagMatch::List(etags) => etags.contains(&etag_of(inode)),
    }
}

/// HTTP dates have whole seconds.
fn is_after(a_ns: i64, b_ns: i64) -> bool {
    a_ns.div_euclid(SECOND_NS) > b_ns.div_euclid(SECOND_NS)
}

/// Checks the conditions that readers and writers share.
fn check_common(inode: &Inode, conditions: &Conditions) -> Result<(), ObjectError> {
    let Conditions { if_match, if_unmodified_since_ns, if_modified_at_ns, if_size, .. } = conditions;
    let mtime_ns = inode.attr.mtime_ns;
    let fails = match (if_match, if_unmodified_since_ns) {
        (Some(wanted), _) => !matches(wanted, inode),
        (None, Some(since_ns)) => is_after(mtime_ns, *since_ns),
        (None, None) => false,
    };
    let other_time = |at_ns: &i64| is_after(mtime_ns, *at_ns) || is_after(*at_ns, mtime_ns);
    let other_size = |size: u64| size != size_of(inode);
    if fails || if_modified_at_ns.as_ref().is_some_and(other_time) || if_size.is_some_and(other_size) {
        return Err(ObjectError::PreconditionFailed);
    }
    Ok(())
}

impl Op<'_> {
    /// Checks the conditions of a read. `NotModified` if the reader has this version already.
    pub(super) fn check_reading(&self, inode: &Inode, conditions: &Conditions) -> Result<(), Stop> {
        check_common(inode, conditions)?;
        let has_it = match (&conditions.if_none_match, conditions.if_modified_since_ns) {
            (Some(wanted), _) => matches(wanted, inode),
            (None, Some(since_ns)) => !is_after(inode.attr.mtime_ns, since_ns),
            (None, None) => false,
        };
        if has_it { Err(ObjectError::NotModified.into()) } else { Ok(()) }
    }

    /// Checks the conditions of a change or removal of an existing or missing object.
    pub(super) fn check_changing(&self, there: Option<&Inode>, conditions: &Conditions) -> Result<(), Stop> {
        let Some(inode) = there else {
            let asks = Conditions { if_none_match: None, if_modified_since_ns: None, ..conditions.clone() };
            return if asks.is_empty() { Ok(()) } else { Err(ObjectError::NoSuchKey.into()) };
        };
        check_common(inode, conditions)?;
        if conditions.if_none_match.as_ref().is_some_and(|wanted| matches(wanted, inode)) {
            return Err(ObjectError::PreconditionFailed.into());
        }
        Ok(())
    }
}
