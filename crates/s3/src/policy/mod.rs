//! Policies: who may do what with which buckets and objects, in a subset of the language of AWS.
//!
//! A request is allowed if some statement that applies to it allows it and none denies it; the order of statements means
//! nothing. [`Policy::parse`] refuses what it does not understand, so that a policy never means less than it says.
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

/// What an administrator may do even if the bucket's policy denies it, so that nobody is locked out for good.
const POLICY_ACTIONS: &[&str] = &["s3:GetBucketPolicy", "s3:PutBucketPolicy", "s3:DeleteBucketPolicy"];

/// A policy of a user, a role, a session or a bucket.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    statements: Vec<Statement>,
}

/// Where a policy belongs, which decides what it may contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicyOf<'a> {
    /// A user or a role: it names no principals.
    User,
    /// Short-lived keys: it names no principals and is shorter.
    Session,
    /// The bucket of this name: each statement names principals, and resources of this bucket only.
    Bucket(&'a str),
    /// The same for a bucket that was renamed since: its resources name it as it was called, and mean it as it is.
    RenamedBucket(&'a str),
}

impl PolicyOf<'_> {
    fn is_bucket(self) -> bool {
        matches!(self, Self::Bucket(_) | Self::RenamedBucket(_))
    }
}

/// Why a text is no policy.
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
    /// Whom it is about, and whether it is about all others instead; `None` in policies that belong to somebody.
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

/// A request with what is derived from it once.
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
    /// Names the place of what is wrong, not known or not supported.
    pub fn parse(text: &[u8], of: PolicyOf<'_>) -> Result<Self, PolicyError> {
        parse::parse(text, of)
    }

    /// Takes the place of a policy that cannot be read any more.
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

    /// Whether what it says depends on tags of the object that is there.
    pub(crate) fn looks_at_existing_tags(&self) -> bool {
        self.statements
            .iter()
            .flat_map(|statement| &statement.conditions)
            .any(Condition::looks_at_existing_tags)
    }

    /// Whether it allows something to everybody, wherever they are.
    pub(crate) fn is_public(&self) -> bool {
        self.statements.iter().any(|statement| {
            statement.effect == Effect::Allow
                && statement.is_about(None)
                && !statement.conditions.iter().any(Condition::limits_address)
        })
    }

    /// What it says about a request; a denial wins.
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

/// Whether a request may be done, by the policies of who asks and of the bucket.
///
/// An explicit denial wins. A user's own policy or the bucket's must allow; an administrator needs neither, like the
/// root user of an account, and whom the bucket belongs to neither. Whatever limits a session must allow as well.
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

/// An administrator with a key of its own, at the policy itself.
fn is_unlocking(request: &PolicyRequest<'_>) -> bool {
    let is_root = |identity: &Identity| identity.user.admin && identity.limits.is_empty();
    request.identity.is_some_and(is_root) && POLICY_ACTIONS.contains(&request.action)
}
