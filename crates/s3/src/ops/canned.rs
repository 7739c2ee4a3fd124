//! Canned ACLs of buckets, expressed by a statement in the bucket's policy, or by none.

use s3s::dto::{AccessControlPolicy, BucketCannedACL, Grant, Grantee, Permission, Type};
use s3s::{S3Error, S3Result, s3_error};
use serde_json::{Value, json};

use super::acl::{full_control, is_own, unsupported};

/// The group of all users, with a signature or without.
const ALL_USERS: &str = "http://acs.amazonaws.com/groups/global/AllUsers";
/// Id of the statement that stands for the ACL `public-read` of a bucket.
const PUBLIC_READ: &str = "AclPublicRead";
/// Actions that reading a bucket allows on AWS: its lists, not the objects in it.
const READ_ACTIONS: [&str; 3] = ["s3:ListBucket", "s3:ListBucketMultipartUploads", "s3:ListBucketVersions"];

/// Meaning of an ACL for a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BucketAcl {
    Private,
    PublicRead,
}

impl BucketAcl {
    /// Parses a canned ACL.
    ///
    /// # Errors
    /// `AccessControlListNotSupported` if nothing here has the same meaning.
    pub(crate) fn of_canned(acl: &BucketCannedACL) -> S3Result<Self> {
        match acl.as_str() {
            BucketCannedACL::PRIVATE => Ok(Self::Private),
            // AWS ignores these for buckets.
            "bucket-owner-full-control" | "bucket-owner-read" => Ok(Self::Private),
            BucketCannedACL::PUBLIC_READ => Ok(Self::PublicRead),
            _ => Err(unsupported()),
        }
    }

    /// Parses a list of grants as GET returns it: programs that copy buckets put it back.
    pub(crate) fn of_grants(policy: &AccessControlPolicy, uid: u32) -> S3Result<Self> {
        let grants = policy.grants.clone().unwrap_or_default();
        if !policy.owner.as_ref().is_none_or(|owner| is_own(owner, uid)) {
            return Err(unsupported());
        }
        let read = [Self::Private, Self::PublicRead].into_iter();
        read.into_iter().find(|acl| same(&acl.grants(uid), &grants)).ok_or_else(unsupported)
    }

    /// The ACL that the policy of a bucket expresses.
    pub(crate) fn of_policy(policy: Option<&[u8]>) -> Self {
        match policy.and_then(|text| serde_json::from_slice(text).ok()) {
            Some(policy) if statements(&policy).iter().any(is_public_read) => Self::PublicRead,
            _ => Self::Private,
        }
    }

    /// The grants of this ACL.
    pub(crate) fn grants(self, uid: u32) -> Vec<Grant> {
        let mut grants = full_control(uid);
        if self == Self::PublicRead {
            let grantee = Grantee {
                display_name: None,
                email_address: None,
                id: None,
                type_: Type::from_static(Type::GROUP),
                uri: Some(ALL_USERS.to_owned()),
            };
            let permission = Some(Permission::from_static(Permission::READ));
            grants.push(Grant { grantee: Some(grantee), permission });
        }
        grants
    }

    /// The policy of a bucket after its ACL was changed to this one; `None` if no statement is left.
    pub(crate) fn change(self, policy: Option<&[u8]>, bucket: &str) -> S3Result<Option<String>> {
        let mut policy = match policy {
            Some(text) => serde_json::from_slice(text).map_err(S3Error::internal_error)?,
            None => json!({ "Version": "2012-10-17", "Statement": [] }),
        };
        let mut kept: Vec<Value> = statements(&policy);
        kept.retain(|statement| !is_public_read(statement));
        if self == Self::PublicRead {
            kept.push(json!({
                "Sid": PUBLIC_READ,
                "Effect": "Allow",
                "Principal": "*",
                "Action": READ_ACTIONS,
                "Resource": format!("arn:aws:s3:::{bucket}"),
            }));
        }
        if kept.is_empty() {
            return Ok(None);
        }
        policy["Statement"] = Value::Array(kept);
        let text = policy.to_string();
        match text.len() <= crate::policy::POLICY_BYTES_MAX {
            true => Ok(Some(text)),
            false => Err(s3_error!(
                InvalidRequest,
                "The ACL would be a statement of the bucket's policy, which is too long with it: bytes={} most={}.",
                text.len(),
                crate::policy::POLICY_BYTES_MAX
            )),
        }
    }
}

fn statements(policy: &Value) -> Vec<Value> {
    match &policy["Statement"] {
        Value::Array(statements) => statements.clone(),
        one @ Value::Object(_) => vec![one.clone()],
        _ => Vec::new(),
    }
}

fn is_public_read(statement: &Value) -> bool {
    statement["Sid"] == PUBLIC_READ
}

/// Whether two lists grant the same, in the same order; display names do not matter.
fn same(expected: &[Grant], given: &[Grant]) -> bool {
    let key = |grant: &Grant| {
        let grantee = grant.grantee.as_ref().map(|grantee| (grantee.id.clone(), grantee.uri.clone()));
        (grantee, grant.permission.clone())
    };
    expected.len() == given.len() && expected.iter().zip(given).all(|(one, other)| key(one) == key(other))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{Policy, PolicyOf};

    const OTHER: &str =
        r#"{"Statement":{"Effect":"Deny","Principal":"*","Action":"s3:*","Resource":"arn:aws:s3:::b/x"}}"#;

    #[test]
    fn a_canned_acl_is_a_statement_of_the_policy() {
        for before in [None, Some(OTHER.as_bytes())] {
            let public = BucketAcl::PublicRead.change(before, "b").unwrap().unwrap();
            assert_eq!(BucketAcl::of_policy(Some(public.as_bytes())), BucketAcl::PublicRead);
            Policy::parse(public.as_bytes(), PolicyOf::Bucket("b")).unwrap();
            let again = BucketAcl::PublicRead.change(Some(public.as_bytes()), "b").unwrap();
            assert_eq!(again.as_deref(), Some(&*public));
            let private = BucketAcl::Private.change(Some(public.as_bytes()), "b").unwrap();
            assert_eq!(BucketAcl::of_policy(private.as_deref().map(str::as_bytes)), BucketAcl::Private);
            assert_eq!(private.is_some(), before.is_some());
        }
        assert_eq!(BucketAcl::of_policy(Some(OTHER.as_bytes())), BucketAcl::Private);
        let long = OTHER.replace("b/x", &format!("b/{}", "x".repeat(crate::policy::POLICY_BYTES_MAX)));
        assert!(BucketAcl::PublicRead.change(Some(long.as_bytes()), "b").is_err());
    }

    #[test]
    fn grants_may_be_put_back_as_they_were_read() {
        for acl in [BucketAcl::Private, BucketAcl::PublicRead] {
            let policy = AccessControlPolicy { grants: Some(acl.grants(7)), owner: None };
            assert_eq!(BucketAcl::of_grants(&policy, 7).unwrap(), acl);
            assert!(BucketAcl::of_grants(&policy, 8).is_err());
        }
        let mut grants = BucketAcl::PublicRead.grants(7);
        grants[1].permission = Some(Permission::from_static(Permission::WRITE));
        assert!(BucketAcl::of_grants(&AccessControlPolicy { grants: Some(grants), owner: None }, 7).is_err());
    }
}
