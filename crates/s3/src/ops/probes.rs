//! Reads of settings that are not supported. They answer as AWS does when nothing is set, because programs read them
//! before anything else; writes of these settings are refused.

use std::sync::Arc;

use hyper::StatusCode;
use s3s::dto::*;
use s3s::{S3Request, S3Response, S3Result, s3_error};

use super::Authorized;
use crate::error::custom;
use crate::gate::Services;

type Answer<T> = S3Result<S3Response<T>>;

fn check<T>(request: &S3Request<T>) -> S3Result<()> {
    Authorized::of(&request.extensions)?.bucket().map(|_| ())
}

pub(crate) async fn get_bucket_accelerate_configuration(
    _core: &Arc<Services>,
    request: S3Request<GetBucketAccelerateConfigurationInput>,
) -> Answer<GetBucketAccelerateConfigurationOutput> {
    check(&request)?;
    Ok(S3Response::new(GetBucketAccelerateConfigurationOutput::default()))
}

pub(crate) async fn get_bucket_encryption(
    _core: &Arc<Services>,
    request: S3Request<GetBucketEncryptionInput>,
) -> Answer<GetBucketEncryptionOutput> {
    check(&request)?;
    Err(custom(
        "ServerSideEncryptionConfigurationNotFoundError",
        StatusCode::NOT_FOUND,
        "The server side encryption configuration was not found",
    ))
}

pub(crate) async fn get_bucket_lifecycle_configuration(
    _core: &Arc<Services>,
    request: S3Request<GetBucketLifecycleConfigurationInput>,
) -> Answer<GetBucketLifecycleConfigurationOutput> {
    check(&request)?;
    Err(custom(
        "NoSuchLifecycleConfiguration",
        StatusCode::NOT_FOUND,
        "The lifecycle configuration does not exist",
    ))
}

pub(crate) async fn get_bucket_logging(
    _core: &Arc<Services>,
    request: S3Request<GetBucketLoggingInput>,
) -> Answer<GetBucketLoggingOutput> {
    check(&request)?;
    Ok(S3Response::new(GetBucketLoggingOutput::default()))
}

pub(crate) async fn get_bucket_notification_configuration(
    _core: &Arc<Services>,
    request: S3Request<GetBucketNotificationConfigurationInput>,
) -> Answer<GetBucketNotificationConfigurationOutput> {
    check(&request)?;
    Ok(S3Response::new(GetBucketNotificationConfigurationOutput::default()))
}

pub(crate) async fn get_bucket_ownership_controls(
    _core: &Arc<Services>,
    request: S3Request<GetBucketOwnershipControlsInput>,
) -> Answer<GetBucketOwnershipControlsOutput> {
    check(&request)?;
    let enforced = ObjectOwnership::from_static(ObjectOwnership::BUCKET_OWNER_ENFORCED);
    let rules = vec![OwnershipControlsRule { object_ownership: enforced }];
    let ownership_controls = Some(OwnershipControls { rules });
    Ok(S3Response::new(GetBucketOwnershipControlsOutput { ownership_controls }))
}

pub(crate) async fn get_bucket_policy_status(
    _core: &Arc<Services>,
    request: S3Request<GetBucketPolicyStatusInput>,
) -> Answer<GetBucketPolicyStatusOutput> {
    let asked = Authorized::of(&request.extensions)?;
    match &asked.bucket()?.policy {
        Some(policy) => {
            let policy_status = Some(PolicyStatus { is_public: Some(policy.is_public()) });
            Ok(S3Response::new(GetBucketPolicyStatusOutput { policy_status }))
        }
        None => Err(s3_error!(NoSuchBucketPolicy, "The bucket policy does not exist")),
    }
}

pub(crate) async fn get_bucket_replication(
    _core: &Arc<Services>,
    request: S3Request<GetBucketReplicationInput>,
) -> Answer<GetBucketReplicationOutput> {
    check(&request)?;
    Err(custom(
        "ReplicationConfigurationNotFoundError",
        StatusCode::NOT_FOUND,
        "The replication configuration was not found",
    ))
}

pub(crate) async fn get_bucket_request_payment(
    _core: &Arc<Services>,
    request: S3Request<GetBucketRequestPaymentInput>,
) -> Answer<GetBucketRequestPaymentOutput> {
    check(&request)?;
    let payer = Some(Payer::from_static(Payer::BUCKET_OWNER));
    Ok(S3Response::new(GetBucketRequestPaymentOutput { payer }))
}

pub(crate) async fn get_bucket_website(
    _core: &Arc<Services>,
    request: S3Request<GetBucketWebsiteInput>,
) -> Answer<GetBucketWebsiteOutput> {
    check(&request)?;
    Err(custom(
        "NoSuchWebsiteConfiguration",
        StatusCode::NOT_FOUND,
        "The specified bucket does not have a website configuration",
    ))
}

pub(crate) async fn get_object_lock_configuration(
    _core: &Arc<Services>,
    request: S3Request<GetObjectLockConfigurationInput>,
) -> Answer<GetObjectLockConfigurationOutput> {
    check(&request)?;
    Err(custom(
        "ObjectLockConfigurationNotFoundError",
        StatusCode::NOT_FOUND,
        "Object Lock configuration does not exist for this bucket",
    ))
}

pub(crate) async fn get_public_access_block(
    _core: &Arc<Services>,
    request: S3Request<GetPublicAccessBlockInput>,
) -> Answer<GetPublicAccessBlockOutput> {
    check(&request)?;
    Err(custom(
        "NoSuchPublicAccessBlockConfiguration",
        StatusCode::NOT_FOUND,
        "The public access block configuration was not found",
    ))
}
