//! Access control lists, as far as a store without them goes: as on AWS with "bucket owner enforced". Who may do what is
//! up to policies and to the permissions of files.

use std::sync::Arc;

use client::object::Conditions;
use s3s::dto::*;
use s3s::{S3Error, S3Request, S3Response, S3Result, s3_error};

use super::{Asked, check_version};
use crate::error::object_error;
use crate::gate::Core;

fn unsupported() -> S3Error {
    s3_error!(
        AccessControlListNotSupported,
        "The bucket does not allow ACLs: use policies, or the permissions of files."
    )
}

/// Canned ACLs that mean what holds anyway.
fn check_canned(acl: Option<&str>) -> S3Result<()> {
    match acl {
        None | Some("private" | "bucket-owner-full-control" | "bucket-owner-read") => Ok(()),
        Some(_) => Err(unsupported()),
    }
}

pub(crate) fn check_object_acl_header(acl: Option<&ObjectCannedACL>) -> S3Result<()> {
    check_canned(acl.map(ObjectCannedACL::as_str))
}

pub(crate) fn check_bucket_acl_header(acl: Option<&BucketCannedACL>) -> S3Result<()> {
    check_canned(acl.map(BucketCannedACL::as_str))
}

/// Refuses grants in headers: those that objects and buckets have, and further ones by name.
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

/// An owner is named by the number of its user on the filesystem.
pub(crate) fn owner(uid: u32) -> Owner {
    Owner { display_name: None, id: Some(uid.to_string()) }
}

fn full_control(uid: u32) -> Vec<Grant> {
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

pub(crate) async fn get_bucket_acl(
    core: &Arc<Core>,
    request: S3Request<GetBucketAclInput>,
) -> S3Result<S3Response<GetBucketAclOutput>> {
    let asked = Asked::of(&request.extensions)?;
    let attr = core.client.getattr(asked.bucket()?.ino).await.map_err(|error| object_error(error.into()))?;
    Ok(S3Response::new(GetBucketAclOutput {
        grants: Some(full_control(attr.uid)),
        owner: Some(owner(attr.uid)),
    }))
}

pub(crate) async fn get_object_acl(
    core: &Arc<Core>,
    request: S3Request<GetObjectAclInput>,
) -> S3Result<S3Response<GetObjectAclOutput>> {
    let asked = Asked::of(&request.extensions)?;
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
    _core: &Arc<Core>,
    request: S3Request<PutBucketAclInput>,
) -> S3Result<S3Response<PutBucketAclOutput>> {
    let asked = Asked::of(&request.extensions)?;
    asked.bucket()?;
    let input = request.input;
    if input.access_control_policy.is_some() {
        return Err(unsupported());
    }
    check_bucket_acl_header(input.acl.as_ref())?;
    check_grants!(input, grant_write);
    Ok(S3Response::new(PutBucketAclOutput::default()))
}

pub(crate) async fn put_object_acl(
    core: &Arc<Core>,
    request: S3Request<PutObjectAclInput>,
) -> S3Result<S3Response<PutObjectAclOutput>> {
    let asked = Asked::of(&request.extensions)?;
    let input = request.input;
    check_version(input.version_id.as_deref())?;
    if input.access_control_policy.is_some() {
        return Err(unsupported());
    }
    check_object_acl_header(input.acl.as_ref())?;
    check_grants!(input, grant_write);
    let name = asked.name(&input.key)?;
    core.client.head_object(name, Conditions::default(), asked.caller()).await.map_err(object_error)?;
    Ok(S3Response::new(PutObjectAclOutput::default()))
}
