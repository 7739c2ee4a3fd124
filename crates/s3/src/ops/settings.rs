//! Settings of a bucket: its policy and its CORS rules.

use std::sync::Arc;

use s3s::dto::*;
use s3s::{S3Request, S3Response, S3Result, s3_error};

use super::Authorized;
use crate::bucket::{CORS, POLICY};
use crate::cors::CorsRules;
use crate::gate::Services;
use crate::policy::{Policy as ParsedPolicy, PolicyOf};

const POLICY_BYTES_MAX: usize = 20 << 10;

pub(crate) async fn get_bucket_policy(
    _core: &Arc<Services>,
    request: S3Request<GetBucketPolicyInput>,
) -> S3Result<S3Response<GetBucketPolicyOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let text = asked.bucket()?.setting(POLICY).and_then(|text| String::from_utf8(text.to_vec()).ok());
    match text {
        Some(text) => Ok(S3Response::new(GetBucketPolicyOutput { policy: Some(text) })),
        None => Err(s3_error!(NoSuchBucketPolicy, "The bucket policy does not exist")),
    }
}

pub(crate) async fn put_bucket_policy(
    core: &Arc<Services>,
    request: S3Request<PutBucketPolicyInput>,
) -> S3Result<S3Response<PutBucketPolicyOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let bucket = asked.bucket()?;
    let text = request.input.policy;
    if text.len() > POLICY_BYTES_MAX {
        return Err(s3_error!(MalformedPolicy, "The policy is too long: bytes={} most=20480.", text.len()));
    }
    ParsedPolicy::parse(text.as_bytes(), PolicyOf::Bucket(&bucket.name))
        .map_err(|error| s3_error!(MalformedPolicy, "{error}"))?;
    core.buckets.set(bucket, POLICY, Some(text.into())).await?;
    Ok(S3Response::with_status(PutBucketPolicyOutput::default(), hyper::StatusCode::NO_CONTENT))
}

pub(crate) async fn delete_bucket_policy(
    core: &Arc<Services>,
    request: S3Request<DeleteBucketPolicyInput>,
) -> S3Result<S3Response<DeleteBucketPolicyOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    core.buckets.set(asked.bucket()?, POLICY, None).await?;
    Ok(S3Response::with_status(DeleteBucketPolicyOutput::default(), hyper::StatusCode::NO_CONTENT))
}

pub(crate) async fn get_bucket_cors(
    _core: &Arc<Services>,
    request: S3Request<GetBucketCorsInput>,
) -> S3Result<S3Response<GetBucketCorsOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    match &asked.bucket()?.cors {
        Some(rules) => Ok(S3Response::new(GetBucketCorsOutput { cors_rules: Some(rules.to_s3()) })),
        None => Err(s3_error!(NoSuchCORSConfiguration, "The CORS configuration does not exist")),
    }
}

pub(crate) async fn put_bucket_cors(
    core: &Arc<Services>,
    request: S3Request<PutBucketCorsInput>,
) -> S3Result<S3Response<PutBucketCorsOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let rules = CorsRules::from_s3(request.input.cors_configuration.cors_rules)?;
    core.buckets.set(asked.bucket()?, CORS, Some(rules.to_bytes()?)).await?;
    Ok(S3Response::new(PutBucketCorsOutput::default()))
}

pub(crate) async fn delete_bucket_cors(
    core: &Arc<Services>,
    request: S3Request<DeleteBucketCorsInput>,
) -> S3Result<S3Response<DeleteBucketCorsOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    core.buckets.set(asked.bucket()?, CORS, None).await?;
    Ok(S3Response::with_status(DeleteBucketCorsOutput::default(), hyper::StatusCode::NO_CONTENT))
}
