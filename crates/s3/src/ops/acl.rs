//! Access control lists, as on AWS with "bucket owner enforced": they grant nothing. Policies and the permissions of
//! files decide about access.

use std::sync::Arc;

use client::object::Conditions;
use s3s::dto::*;
use s3s::{S3Error, S3Request, S3Response, S3Result, s3_error};

use super::canned::BucketAcl;
use super::{Authorized, check_version};
use crate::bucket::POLICY;
use crate::error::object_error;
use crate::gate::Services;

pub(crate) fn unsupported() -> S3Error {
    s3_error!(
        AccessControlListNotSupported,
        "The bucket does not allow ACLs: use policies, or the permissions of files."
    )
}

/// Accepts canned ACLs that change nothing.
pub(crate) fn check_canned(acl: Option<&str>) -> S3Result<()> {
    match acl {
        None | Some("private" | "bucket-owner-full-control" | "bucket-owner-read") => Ok(()),
        Some(_) => Err(unsupported()),
    }
}

pub(crate) fn check_object_acl_header(acl: Option<&ObjectCannedACL>) -> S3Result<()> {
    check_canned(acl.map(ObjectCannedACL::as_str))
}

/// Refuses grants in headers: the common ones of objects and buckets, and further ones by name.
macro_rules! check_grants {
    ($input:ident $(, $more:ident)?) => {
        $crate::ops::acl::refuse_grants(&[
            $input.grant_full_control.as_deref(),
            $input.grant_read.as_deref(),
            $input.grant_read_acp.as_deref(),
            $input.grant_write_acp.as_deref(),
            $($input.$more.as_deref(),)?
        ])?
    };
}
pub(crate) use check_grants;

pub(crate) fn refuse_grants(grants: &[Option<&str>]) -> S3Result<()> {
    if grants.iter().any(Option::is_some) { Err(unsupported()) } else { Ok(()) }
}

/// An owner, named by its user number on the filesystem.
pub(crate) fn owner(uid: u32) -> Owner {
    Owner { display_name: None, id: Some(uid.to_string()) }
}

pub(crate) fn full_control(uid: u32) -> Vec<Grant> {
    let grantee = Grantee {
        display_name: None,
        email_address: None,
        id: Some(uid.to_string()),
        type_: Type::from_static(Type::CANONICAL_USER),
        uri: None,
    };
    vec![Grant {
        grantee: Some(grantee),
        permission: Some(Permission::from_static(Permission::FULL_CONTROL)),
    }]
}

/// Whether the owner that a client names is this user.
pub(crate) fn is_own(owner: &Owner, uid: u32) -> bool {
    owner.id.as_deref().is_none_or(|id| id == uid.to_string())
}

/// Accepts an ACL that changes nothing, as GET returns it: programs that copy objects put it back.
fn check_policy(policy: Option<&AccessControlPolicy>, uid: u32) -> S3Result<()> {
    let Some(policy) = policy else { return Ok(()) };
    let id = uid.to_string();
    let gives_all = |grant: &Grant| {
        let permission = grant.permission.as_ref().map(Permission::as_str);
        let grantee = grant.grantee.as_ref().and_then(|grantee| grantee.id.as_deref());
        permission == Some(Permission::FULL_CONTROL) && grantee == Some(id.as_str())
    };
    let grants = policy.grants.as_deref().unwrap_or_default();
    match grants {
        [grant] if gives_all(grant) && policy.owner.as_ref().is_none_or(|owner| is_own(owner, uid)) => Ok(()),
        _ => Err(unsupported()),
    }
}

pub(crate) async fn get_bucket_acl(
    core: &Arc<Services>,
    request: S3Request<GetBucketAclInput>,
) -> S3Result<S3Response<GetBucketAclOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let bucket = asked.bucket()?;
    let attr = core.client.getattr(bucket.ino).await.map_err(|error| object_error(error.into()))?;
    let acl = BucketAcl::of_policy(bucket.setting(POLICY).map(AsRef::as_ref));
    Ok(S3Response::new(GetBucketAclOutput {
        grants: Some(acl.grants(attr.uid)),
        owner: Some(owner(attr.uid)),
    }))
}

pub(crate) async fn get_object_acl(
    core: &Arc<Services>,
    request: S3Request<GetObjectAclInput>,
) -> S3Result<S3Response<GetObjectAclOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    check_version(request.input.version_id.as_deref())?;
    let name = asked.name(&request.input.key)?;
    let info =
        core.client.head_object(name, Conditions::default(), asked.caller()).await.map_err(object_error)?;
    Ok(S3Response::new(GetObjectAclOutput {
        grants: Some(full_control(info.attr.uid)),
        owner: Some(owner(info.attr.uid)),
        request_charged: None,
    }))
}

pub(crate) async fn put_bucket_acl(
    core: &Arc<Services>,
    request: S3Request<PutBucketAclInput>,
) -> S3Result<S3Response<PutBucketAclOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let input = request.input;
    check_grants!(input, grant_write);
    let bucket = asked.bucket()?;
    let attr = core.client.getattr(bucket.ino).await.map_err(|error| object_error(error.into()))?;
    let wanted = match (&input.acl, &input.access_control_policy) {
        (Some(acl), _) => BucketAcl::of_canned(acl)?,
        (None, Some(policy)) => BucketAcl::of_grants(policy, attr.uid)?,
        (None, None) => BucketAcl::Private,
    };
    let policy = bucket.setting(POLICY).map(AsRef::as_ref);
    if wanted != BucketAcl::of_policy(policy) {
        let changed = wanted.change(policy, &bucket.name)?;
        core.buckets.set(bucket, POLICY, changed.map(Into::into)).await?;
    }
    Ok(S3Response::new(PutBucketAclOutput::default()))
}

pub(crate) async fn put_object_acl(
    core: &Arc<Services>,
    request: S3Request<PutObjectAclInput>,
) -> S3Result<S3Response<PutObjectAclOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let input = request.input;
    check_version(input.version_id.as_deref())?;
    check_object_acl_header(input.acl.as_ref())?;
    check_grants!(input, grant_write);
    let name = asked.name(&input.key)?;
    let info =
        core.client.head_object(name, Conditions::default(), asked.caller()).await.map_err(object_error)?;
    check_policy(input.access_control_policy.as_ref(), info.attr.uid)?;
    Ok(S3Response::new(PutObjectAclOutput::default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(grants: Vec<Grant>, owner_uid: u32, is_fine: bool) {
        let policy = AccessControlPolicy { grants: Some(grants), owner: Some(owner(owner_uid)) };
        let found = check_policy(Some(&policy), 7);
        let code = found.as_ref().err().map(|error| error.code().as_str());
        assert_eq!(code, (!is_fine).then_some("AccessControlListNotSupported"));
    }

    #[test]
    fn an_acl_may_be_put_back_as_it_was_read() {
        check(full_control(7), 7, true);
        check(full_control(8), 7, false);
        check(full_control(7), 8, false);
        check(Vec::new(), 7, false);
        check([full_control(7), full_control(8)].concat(), 7, false);
        let mut grants = full_control(7);
        grants[0].permission = Some(Permission::from_static(Permission::READ));
        check(grants, 7, false);
        assert!(check_policy(None, 7).is_ok());
    }
}
