//! Whether the cluster has noted this start of the node: until then, the node acts on nothing that the cluster says. A copy of a node's
//! directory is refused (`control::starts`).

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use anyhow::{Result, bail};
use base::NodeId;
use control::NodeRecord;

use super::lock;
use crate::identity::{IdentityFiles, Starts};

/// How often a node asks anew, half a second apart, while another process seems to be it.
const VAIN_MAX: u32 = 20;

/// See the module.
pub(super) struct Admission {
    starts: Mutex<Starts>,
    is_admitted: AtomicBool,
    /// How often the start was not noted, because another process seems to be this node.
    vain: AtomicU32,
}

impl Admission {
    pub(super) fn begin(identity: &IdentityFiles) -> Result<Self> {
        let starts = Mutex::new(identity.begin_start()?);
        Ok(Self { starts, is_admitted: AtomicBool::new(false), vain: AtomicU32::new(0) })
    }

    /// The numbers of this start.
    pub(super) fn starts(&self) -> Starts {
        *lock(&self.starts)
    }

    pub(super) fn is_admitted(&self) -> bool {
        self.is_admitted.load(Ordering::Relaxed)
    }

    /// The owner has noted the start.
    pub(super) fn admit(&self) {
        self.is_admitted.store(true, Ordering::Relaxed);
    }

    /// The owner takes this for a copy. Returns whether that is certain: a process that was just stopped at another address may still
    /// count as there.
    pub(super) fn is_refused(&self, answers: bool) -> bool {
        !answers || self.vain.fetch_add(1, Ordering::Relaxed) >= VAIN_MAX
    }

    /// Takes note of the start that the cluster knows of this node.
    pub(super) fn note(&self, identity: &IdentityFiles, known: u64) -> Result<()> {
        let starts = self.starts();
        if known == starts.this {
            if starts.last != starts.this {
                *lock(&self.starts) = identity.end_start(starts)?;
            }
        } else if ![0, starts.last].contains(&known) {
            // The owner says whether this process may go on.
            self.is_admitted.store(false, Ordering::Relaxed);
            bail!("another start of this node was noted");
        }
        // Otherwise the owner has an earlier program, which notes no starts.
        Ok(())
    }

    /// Why the process must end, if another copy of the directory was started since this one was.
    pub(super) fn refusal(&self, record: &NodeRecord) -> Option<String> {
        let Starts { last, this } = self.starts();
        (!record.may_start(last, this)).then(|| is_copy(record.id, &record.addresses, false))
    }
}

/// Why a copy of a node's directory is refused.
pub(super) fn is_copy(node: NodeId, addresses: &[String], answers: bool) -> String {
    let at = addresses.join(", ");
    let other = match answers {
        true => format!("which answers at {at} now"),
        false => format!("which was started at {at} after this copy was made"),
    };
    format!(
        "this directory is a copy of that of node {node}, {other}: only one of them may run. If the other one is gone for good, or this one \
         was put back from a backup, let it join again: forebay token create at another node, and forebay join TOKEN here"
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use base::env::Env;

    use super::*;
    use crate::node::NodeDir;

    #[test]
    fn a_start_counts_once_the_cluster_shows_it() {
        let root = tempfile::tempdir().unwrap();
        let identity = IdentityFiles::new(&Env::real(), &NodeDir::new(root.path()));
        let start = || Admission::begin(&identity).unwrap();
        let first = start();
        let Starts { last, this } = first.starts();
        assert!(last == 0 && this != 0);
        // An owner with an earlier program notes nothing: the number stays.
        first.note(&identity, 0).unwrap();
        assert_eq!(start().starts(), first.starts());
        first.note(&identity, this).unwrap();
        assert_eq!(first.starts(), Starts { last: this, this });
        let second = start();
        assert!(second.starts().last == this && second.starts().this != this);
        // The cluster still shows the first one.
        second.note(&identity, this).unwrap();
        let mut record = NodeRecord::new(NodeId(2), "n");
        record.start = second.starts().this;
        assert_eq!(second.refusal(&record), None);
        second.admit();
        // A copy was started.
        record.start = 77;
        assert!(second.refusal(&record).unwrap().contains("copy of that of node 2"));
        assert!(second.note(&identity, 77).is_err() && !second.is_admitted());
        assert!(second.is_refused(false));
        assert!((0..VAIN_MAX).all(|_| !second.is_refused(true)) && second.is_refused(true));
    }
}
