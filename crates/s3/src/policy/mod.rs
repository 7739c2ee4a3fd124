//! Policies: which users may do which actions on which buckets and objects, in a subset of the AWS policy language.
//!
//! A request is allowed if at least one statement allows it and none denies it; the order of statements has no effect.
//! [`Policy::parse`] refuses what it does not understand, so that a policy never means less than it says.
//! `docs/operate/users.md` lists the subset.

mod condition;
mod json;
mod parse;
mod pattern;
#[cfg(test)]
mod tests;

use crate::identity::{Identity, PolicyRequest, Verdict};

use condition::Condition;
use pattern::{Case, Pattern, Values};

/// Longest policy of a user, a role or a bucket, in bytes.
pub const POLICY_BYTES_MAX: usize = 20 * 1024;
/// Longest policy of a session, in bytes.
pub const SESSION_POLICY_BYTES_MAX: usize = 2048;

/// Actions that an administrator may do even if the bucket's policy denies them: otherwise a policy could lock out
/// every user.
const POLICY_ACTIONS: &[&str] = &["s3:GetBucketPolicy", "s3:PutBucketPolicy", "s3:DeleteBucketPolicy"];

/// A policy of a user, a role, a session or a bucket.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    statements: Vec<Statement>,
}

/// The owner of a policy, which decides what the policy may contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicyOf<'a> {
    /// A user or a role: it names no principals.
    User,
    /// Short-lived keys: it names no principals and is shorter.
    Session,
    /// The bucket of this name: each statement names principals, and resources of this bucket only.
    Bucket(&'a str),
    /// A bucket that was renamed later: the policy's resources have the old name given here, and apply to the bucket as
    /// it is.
    RenamedBucket(&'a str),
}

impl PolicyOf<'_> {
    fn is_bucket(self) -> bool {
        matches!(self, Self::Bucket(_) | Self::RenamedBucket(_))
    }
}

/// Why a text is not a policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("policy is not valid at {place}: {reason}")]
pub struct PolicyError {
    place: String,
    reason: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Effect {
    Allow,
    Deny,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Statement {
    effect: Effect,
    /// The principals of the statement, and whether it applies to all others instead (`NotPrincipal`); `None` in
    /// policies of a user, role or session.
    principals: Option<(Principals, bool)>,
    actions: Vec<Pattern>,
    not_actions: bool,
    resources: Vec<Pattern>,
    not_resources: bool,
    conditions: Vec<Condition>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Principals {
    Everybody,
    Users(Vec<String>),
}

/// A request, and values that are derived from it once.
struct Facts<'a> {
    request: &'a PolicyRequest<'a>,
    /// `BUCKET` or `BUCKET/KEY`.
    resource: &'a str,
    values: Values<'a>,
}

impl Policy {
    /// Reads a policy.
    ///
    /// # Errors
    /// Names the place of a member that is wrong, unknown or not supported.
    pub fn parse(text: &[u8], of: PolicyOf<'_>) -> Result<Self, PolicyError> {
        parse::parse(text, of)
    }

    /// A policy in place of a stored one that can no longer be read.
    pub fn deny_everything() -> Self {
        let all = || vec![Pattern::everything()];
        let statement = Statement {
            effect: Effect::Deny,
            principals: None,
            actions: all(),
            not_actions: false,
            resources: all(),
            not_resources: false,
            conditions: Vec::new(),
        };
        Self { statements: vec![statement] }
    }

    /// Whether a condition depends on tags of the existing object.
    pub(crate) fn looks_at_existing_tags(&self) -> bool {
        self.statements
            .iter()
            .flat_map(|statement| &statement.conditions)
            .any(Condition::looks_at_existing_tags)
    }

    /// Whether a statement allows something to all users from all addresses.
    pub(crate) fn is_public(&self) -> bool {
        self.statements.iter().any(|statement| {
            statement.effect == Effect::Allow
                && statement.is_about(None)
                && !statement.conditions.iter().any(Condition::limits_address)
        })
    }

    /// Effect of the policy on a request; a denial wins.
    fn effect(&self, facts: &Facts<'_>) -> Option<Effect> {
        let mut allowed = None;
        for statement in self.statements.iter().filter(|statement| statement.applies(facts)) {
            match statement.effect {
                Effect::Deny => return Some(Effect::Deny),
                Effect::Allow => allowed = Some(Effect::Allow),
            }
        }
        allowed
    }
}

impl Statement {
    fn applies(&self, facts: &Facts<'_>) -> bool {
        let any = |patterns: &[Pattern], text: &str, case| {
            patterns.iter().any(|pattern| pattern.matches(text, facts.values, case))
        };
        self.is_about(facts.values.user_name)
            && any(&self.actions, facts.request.action, Case::Ignored) != self.not_actions
            && any(&self.resources, facts.resource, Case::Differs) != self.not_resources
            && self.conditions.iter().all(|condition| condition.holds(facts))
    }

    fn is_about(&self, user: Option<&str>) -> bool {
        let Some((principals, others)) = &self.principals else { return true };
        let named = match principals {
            Principals::Everybody => true,
            Principals::Users(names) => user.is_some_and(|user| names.iter().any(|name| name == user)),
        };
        named != *others
    }
}

/// Whether a request may run, by the policies of its sender and of the bucket.
///
/// An explicit denial wins. The user's policy or the bucket's policy must allow the request. An administrator, like the
/// root user of an AWS account, and the owner of the bucket need neither. Each limit of a session must allow the
/// request as well.
pub fn decide(request: &PolicyRequest<'_>) -> Verdict {
    let joined;
    let resource = match request.key {
        Some(key) => {
            joined = format!("{}/{key}", request.bucket);
            &joined
        }
        None => request.bucket,
    };
    let user = request.identity.map(|identity| &identity.user);
    let user_id = user.map(|user| user.id.to_string());
    let values = Values { user_name: user.map(|user| &*user.name), user_id: user_id.as_deref() };
    let facts = Facts { request, resource, values };
    let own = user.and_then(|user| user.policy.as_ref()).and_then(|policy| policy.effect(&facts));
    let bucket = request.bucket_policy.and_then(|policy| policy.effect(&facts));
    let limits = request.identity.map_or(&[][..], |identity| &identity.limits);
    let limits: Vec<_> = limits.iter().map(|policy| policy.effect(&facts)).collect();
    let is_admin = user.is_some_and(|user| user.admin);
    let denied = limits.contains(&Some(Effect::Deny))
        || own == Some(Effect::Deny)
        || (bucket == Some(Effect::Deny) && !is_unlocking(request));
    if denied {
        return Verdict::Denied;
    }
    let granted =
        is_admin || request.owns_bucket || own == Some(Effect::Allow) || bucket == Some(Effect::Allow);
    let within_limits = limits.iter().all(|effect| *effect == Some(Effect::Allow));
    if granted && within_limits { Verdict::Allowed } else { Verdict::NotAllowed }
}

/// Whether an administrator, with a key that has no limits, reads or changes the policy itself.
fn is_unlocking(request: &PolicyRequest<'_>) -> bool {
    let is_root = |identity: &Identity| identity.user.admin && identity.limits.is_empty();
    request.identity.is_some_and(is_root) && POLICY_ACTIONS.contains(&request.action)
}
