//! Buckets: top-level directories.

use std::sync::Arc;

use base::{FsError, Ino};
use bytes::Bytes;
use client::{DirPosition, FileKind, MakeNode, OpenIntent};
use s3s::dto::*;
use s3s::path::check_bucket_name;
use s3s::{S3Request, S3Response, S3Result, s3_error};

use super::acl::{check_bucket_acl_header, check_grants, owner};
use super::{Asked, refuse_unsupported, timestamp};
use crate::error::object_error;
use crate::gate::Core;

/// Permissions of a new bucket's directory.
const BUCKET_MODE: u32 = 0o755;
/// Directory entries looked at in one step.
const PAGE: u32 = 1000;
/// Buckets in one answer, unless the client asks for fewer.
const BUCKETS_MAX: usize = 10_000;
pub(crate) const REGION: &str = "us-east-1";

pub(crate) async fn list_buckets(
    core: &Arc<Core>,
    request: S3Request<ListBucketsInput>,
) -> S3Result<S3Response<ListBucketsOutput>> {
    let asked = Asked::of(&request.extensions)?;
    let input = request.input;
    let most = match input.max_buckets {
        None => BUCKETS_MAX,
        Some(most @ 1..=10_000) => most as usize,
        Some(_) => {
            return Err(s3_error!(
                InvalidArgument,
                "Argument max-buckets must be an integer between 1 and 10000"
            ));
        }
    };
    let prefix = input.prefix.clone().unwrap_or_default();
    let after = input.continuation_token.unwrap_or_default();
    let mut names: Vec<(String, i64)> = Vec::new();
    let mut position: Option<DirPosition> = None;
    loop {
        let page = core.client.readdir(Ino::ROOT, position.take(), PAGE).await;
        let page = page.map_err(|error| object_error(error.into()))?;
        for entry in &page.entries {
            let Ok(name) = std::str::from_utf8(&entry.name) else { continue };
            let is_bucket = entry.attr.kind == FileKind::Directory && !name.chars().any(char::is_control);
            if is_bucket && name.starts_with(&prefix) && name > after.as_str() {
                names.push((name.to_owned(), entry.attr.btime_ns));
            }
        }
        position =
            page.entries.last().map(|entry| DirPosition { name: entry.name.clone(), kind: entry.attr.kind });
        if page.end || position.is_none() {
            break;
        }
    }
    names.sort_unstable();
    let more = names.len() > most;
    names.truncate(most);
    let token = names.last().map(|(name, _)| name.clone()).filter(|_| more);
    let buckets = names.into_iter().map(|(name, made_ns)| Bucket {
        bucket_region: None,
        creation_date: Some(timestamp(made_ns)),
        name: Some(name),
    });
    Ok(S3Response::new(ListBucketsOutput {
        buckets: Some(buckets.collect()),
        continuation_token: token,
        owner: Some(Owner { display_name: Some(asked.user()), ..owner(asked.caller().uid) }),
        prefix: input.prefix,
    }))
}

pub(crate) async fn create_bucket(
    core: &Arc<Core>,
    request: S3Request<CreateBucketInput>,
) -> S3Result<S3Response<CreateBucketOutput>> {
    let asked = Asked::of(&request.extensions)?;
    let input = request.input;
    check_bucket_acl_header(input.acl.as_ref())?;
    check_grants!(input, grant_write);
    refuse_unsupported(&[("Object lock", input.object_lock_enabled_for_bucket.unwrap_or(false))])?;
    if !check_bucket_name(&input.bucket) {
        return Err(s3_error!(InvalidBucketName, "The specified bucket is not valid."));
    }
    let caller = asked.caller();
    let make = MakeNode {
        parent: Ino::ROOT,
        name: Bytes::copy_from_slice(input.bucket.as_bytes()),
        kind: FileKind::Directory,
        mode: BUCKET_MODE,
        umask: 0,
        uid: caller.uid,
        gid: caller.gid,
        rdev: 0,
        target: Bytes::new(),
        open: OpenIntent::None,
    };
    match core.client.make(make).await {
        Ok(attr) => core.client.forget(attr.ino, 1),
        Err(FsError::Exists) => return Err(existing(core, &input.bucket, caller.uid).await),
        Err(error) => return Err(object_error(error.into())),
    }
    core.buckets.forget(&input.bucket);
    Ok(S3Response::new(CreateBucketOutput { location: Some(format!("/{}", input.bucket)) }))
}

async fn existing(core: &Core, name: &str, uid: u32) -> s3s::S3Error {
    let Ok(bucket) = core.buckets.get(name).await else {
        return s3_error!(
            BucketAlreadyExists,
            "The requested bucket name is not available: there is a file of that name."
        );
    };
    match core.client.getattr(bucket.ino).await {
        Ok(attr) if attr.uid == uid => s3_error!(
            BucketAlreadyOwnedByYou,
            "Your previous request to create the named bucket succeeded and you already own it."
        ),
        _ => s3_error!(BucketAlreadyExists, "The requested bucket name is not available."),
    }
}

pub(crate) async fn head_bucket(
    _core: &Arc<Core>,
    request: S3Request<HeadBucketInput>,
) -> S3Result<S3Response<HeadBucketOutput>> {
    Asked::of(&request.extensions)?.bucket()?;
    Ok(S3Response::new(HeadBucketOutput {
        bucket_region: Some(REGION.to_owned()),
        ..HeadBucketOutput::default()
    }))
}

pub(crate) async fn get_bucket_location(
    _core: &Arc<Core>,
    request: S3Request<GetBucketLocationInput>,
) -> S3Result<S3Response<GetBucketLocationOutput>> {
    Asked::of(&request.extensions)?.bucket()?;
    // S3 names its first region by leaving it out.
    Ok(S3Response::new(GetBucketLocationOutput { location_constraint: None }))
}

pub(crate) async fn get_bucket_versioning(
    _core: &Arc<Core>,
    request: S3Request<GetBucketVersioningInput>,
) -> S3Result<S3Response<GetBucketVersioningOutput>> {
    Asked::of(&request.extensions)?.bucket()?;
    // Neither enabled nor suspended: there never were versions.
    Ok(S3Response::new(GetBucketVersioningOutput::default()))
}

pub(crate) async fn delete_bucket(
    core: &Arc<Core>,
    request: S3Request<DeleteBucketInput>,
) -> S3Result<S3Response<DeleteBucketOutput>> {
    let asked = Asked::of(&request.extensions)?;
    asked.bucket()?;
    let name = request.input.bucket;
    let removed = core.client.rmdir(Ino::ROOT, name.as_bytes()).await;
    core.buckets.forget(&name);
    match removed {
        Ok(()) => Ok(S3Response::with_status(DeleteBucketOutput::default(), hyper::StatusCode::NO_CONTENT)),
        Err(FsError::NotEmpty) => {
            Err(s3_error!(BucketNotEmpty, "The bucket you tried to delete is not empty"))
        }
        Err(error) => Err(object_error(error.into())),
    }
}
