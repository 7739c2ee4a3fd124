//! Buckets: top-level directories.

use std::sync::Arc;

use base::{FsError, Ino};
use client::object::ObjectError;
use client::{DirPosition, FileKind};
use s3s::dto::*;
use s3s::path::check_bucket_name;
use s3s::{S3Request, S3Response, S3Result, s3_error};

use super::acl::{check_grants, owner};
use super::canned::BucketAcl;
use super::{Authorized, refuse_unsupported, timestamp};
use crate::bucket::{OWNER, POLICY};
use crate::error::object_error;
use crate::gate::Services;

/// Directory entries read in one step.
const PAGE: u32 = 1000;
/// Buckets in one answer, unless the client asks for fewer.
const BUCKETS_MAX: usize = 10_000;
pub(crate) const REGION: &str = "us-east-1";

pub(crate) async fn list_buckets(
    core: &Arc<Services>,
    request: S3Request<ListBucketsInput>,
) -> S3Result<S3Response<ListBucketsOutput>> {
    let asked = Authorized::of(&request.extensions)?;
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
    core: &Arc<Services>,
    request: S3Request<CreateBucketInput>,
) -> S3Result<S3Response<CreateBucketOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let input = request.input;
    let acl = input.acl.as_ref().map_or(Ok(BucketAcl::Private), BucketAcl::of_canned)?;
    check_grants!(input, grant_write);
    refuse_unsupported(&[("Object lock", input.object_lock_enabled_for_bucket.unwrap_or(false))])?;
    if !is_bucket_name(&input.bucket) {
        return Err(s3_error!(InvalidBucketName, "The specified bucket is not valid."));
    }
    let mut settings = Vec::new();
    if let Some(identity) = asked.identity() {
        settings.push((OWNER.to_owned(), identity.user.id.to_string().into()));
    }
    if let Some(policy) = acl.change(None, &input.bucket)? {
        settings.push((POLICY.to_owned(), policy.into()));
    }
    let made = core.client.make_bucket(input.bucket.as_bytes(), settings, asked.caller()).await;
    core.buckets.forget(&input.bucket);
    match made {
        Ok(()) => {}
        Err(ObjectError::Fs(FsError::Exists)) => return Err(existing(core, &asked, &input.bucket).await),
        Err(error) => return Err(object_error(error)),
    }
    Ok(S3Response::new(CreateBucketOutput { location: Some(format!("/{}", input.bucket)) }))
}

/// Accepts the names that AWS accepts, except those with a dash beside a dot: host names cannot have them.
fn is_bucket_name(name: &str) -> bool {
    check_bucket_name(name) && !name.contains("-.") && !name.contains(".-")
}

async fn existing(core: &Services, asked: &Authorized, name: &str) -> s3s::S3Error {
    let Ok(bucket) = core.buckets.get(name).await else {
        return s3_error!(
            BucketAlreadyExists,
            "The requested bucket name is not available: there is a file of that name."
        );
    };
    let is_own = match (asked.identity(), bucket.owner) {
        (Some(identity), Some(owner)) => identity.user.id == owner,
        // Directories that were made on the mount belong to administrators.
        (Some(identity), None) => identity.user.admin,
        (None, _) => false,
    };
    match is_own {
        true => s3_error!(
            BucketAlreadyOwnedByYou,
            "Your previous request to create the named bucket succeeded and you already own it."
        ),
        false => s3_error!(
            BucketAlreadyExists,
            "The requested bucket name is not available: the bucket belongs to somebody else."
        ),
    }
}

pub(crate) async fn head_bucket(
    _core: &Arc<Services>,
    request: S3Request<HeadBucketInput>,
) -> S3Result<S3Response<HeadBucketOutput>> {
    Authorized::of(&request.extensions)?.bucket()?;
    Ok(S3Response::new(HeadBucketOutput {
        bucket_region: Some(REGION.to_owned()),
        ..HeadBucketOutput::default()
    }))
}

pub(crate) async fn get_bucket_location(
    _core: &Arc<Services>,
    request: S3Request<GetBucketLocationInput>,
) -> S3Result<S3Response<GetBucketLocationOutput>> {
    Authorized::of(&request.extensions)?.bucket()?;
    // S3 expresses its first region by an empty answer.
    Ok(S3Response::new(GetBucketLocationOutput { location_constraint: None }))
}

pub(crate) async fn get_bucket_versioning(
    _core: &Arc<Services>,
    request: S3Request<GetBucketVersioningInput>,
) -> S3Result<S3Response<GetBucketVersioningOutput>> {
    Authorized::of(&request.extensions)?.bucket()?;
    // Neither enabled nor suspended: versions were never enabled.
    Ok(S3Response::new(GetBucketVersioningOutput::default()))
}

pub(crate) async fn delete_bucket(
    core: &Arc<Services>,
    request: S3Request<DeleteBucketInput>,
) -> S3Result<S3Response<DeleteBucketOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    asked.bucket()?;
    let name = request.input.bucket;
    let removed = core.client.remove_bucket(name.as_bytes()).await;
    core.buckets.forget(&name);
    match removed {
        Ok(()) => Ok(S3Response::with_status(DeleteBucketOutput::default(), hyper::StatusCode::NO_CONTENT)),
        Err(ObjectError::Fs(FsError::NotEmpty)) => {
            Err(s3_error!(BucketNotEmpty, "The bucket you tried to delete is not empty"))
        }
        Err(ObjectError::Fs(FsError::NotFound | FsError::NotDirectory)) => {
            Err(s3_error!(NoSuchBucket, "The specified bucket does not exist"))
        }
        Err(error) => Err(object_error(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_new_buckets() {
        for name in ["abc", "a-b.c1", "x".repeat(63).as_str()] {
            assert!(is_bucket_name(name), "{name}");
        }
        for name in
            ["foo-.bar", "foo.-bar", "foo..bar", "-foo", "foo-", "Foo", "a_b", "ab", "x".repeat(64).as_str()]
        {
            assert!(!is_bucket_name(name), "{name}");
        }
    }
}
