//! The S3 operations by name. Any other operation answers `NotImplemented` with its name.

use std::sync::Arc;

use async_trait::async_trait;
use s3s::dto::*;
use s3s::{S3, S3Error, S3Request, S3Response, S3Result};

use crate::access::context;
use crate::gate::{RequestContext, Services};
use crate::ops::{acl, buckets, copy, delete, get, listing, multipart, probes, put, settings, tags};

/// The operations.
pub(crate) struct Api {
    pub(crate) core: Arc<Services>,
}

impl Api {
    fn complete(&self, context: &RequestContext, error: S3Error) -> S3Error {
        // A copy has two buckets; it checks their owners itself.
        let is_copy = ["CopyObject", "UploadPartCopy"].contains(&context.operation());
        match context.requester.get().and_then(|requester| requester.bucket.as_ref()).filter(|_| !is_copy) {
            Some(bucket) => self.core.conceal(context, bucket, error),
            None => error,
        }
    }
}

/// Defines one method for each operation; it calls the function of the same name.
macro_rules! operations {
    ($($module:ident :: $name:ident ( $input:ident ) -> $output:ident;)*) => {
        #[async_trait]
        impl S3 for Api {
            $(async fn $name(&self, request: S3Request<$input>) -> S3Result<S3Response<$output>> {
                let context = context(&request.extensions)?;
                let answer = $module::$name(&self.core, request).await;
                answer.map_err(|error| self.complete(&context, error))
            })*
        }
    };
}

operations! {
    acl::get_bucket_acl(GetBucketAclInput) -> GetBucketAclOutput;
    acl::get_object_acl(GetObjectAclInput) -> GetObjectAclOutput;
    acl::put_bucket_acl(PutBucketAclInput) -> PutBucketAclOutput;
    acl::put_object_acl(PutObjectAclInput) -> PutObjectAclOutput;
    buckets::create_bucket(CreateBucketInput) -> CreateBucketOutput;
    buckets::delete_bucket(DeleteBucketInput) -> DeleteBucketOutput;
    buckets::get_bucket_location(GetBucketLocationInput) -> GetBucketLocationOutput;
    buckets::get_bucket_versioning(GetBucketVersioningInput) -> GetBucketVersioningOutput;
    buckets::head_bucket(HeadBucketInput) -> HeadBucketOutput;
    buckets::list_buckets(ListBucketsInput) -> ListBucketsOutput;
    copy::copy_object(CopyObjectInput) -> CopyObjectOutput;
    copy::upload_part_copy(UploadPartCopyInput) -> UploadPartCopyOutput;
    delete::delete_object(DeleteObjectInput) -> DeleteObjectOutput;
    delete::delete_objects(DeleteObjectsInput) -> DeleteObjectsOutput;
    get::get_object(GetObjectInput) -> GetObjectOutput;
    get::get_object_attributes(GetObjectAttributesInput) -> GetObjectAttributesOutput;
    get::head_object(HeadObjectInput) -> HeadObjectOutput;
    listing::list_object_versions(ListObjectVersionsInput) -> ListObjectVersionsOutput;
    listing::list_objects(ListObjectsInput) -> ListObjectsOutput;
    listing::list_objects_v2(ListObjectsV2Input) -> ListObjectsV2Output;
    multipart::abort_multipart_upload(AbortMultipartUploadInput) -> AbortMultipartUploadOutput;
    multipart::complete_multipart_upload(CompleteMultipartUploadInput) -> CompleteMultipartUploadOutput;
    multipart::create_multipart_upload(CreateMultipartUploadInput) -> CreateMultipartUploadOutput;
    multipart::list_multipart_uploads(ListMultipartUploadsInput) -> ListMultipartUploadsOutput;
    multipart::list_parts(ListPartsInput) -> ListPartsOutput;
    multipart::upload_part(UploadPartInput) -> UploadPartOutput;
    probes::get_bucket_accelerate_configuration(GetBucketAccelerateConfigurationInput) -> GetBucketAccelerateConfigurationOutput;
    probes::get_bucket_encryption(GetBucketEncryptionInput) -> GetBucketEncryptionOutput;
    probes::get_bucket_lifecycle_configuration(GetBucketLifecycleConfigurationInput) -> GetBucketLifecycleConfigurationOutput;
    probes::get_bucket_logging(GetBucketLoggingInput) -> GetBucketLoggingOutput;
    probes::get_bucket_notification_configuration(GetBucketNotificationConfigurationInput) -> GetBucketNotificationConfigurationOutput;
    probes::get_bucket_ownership_controls(GetBucketOwnershipControlsInput) -> GetBucketOwnershipControlsOutput;
    probes::get_bucket_policy_status(GetBucketPolicyStatusInput) -> GetBucketPolicyStatusOutput;
    probes::get_bucket_replication(GetBucketReplicationInput) -> GetBucketReplicationOutput;
    probes::get_bucket_request_payment(GetBucketRequestPaymentInput) -> GetBucketRequestPaymentOutput;
    probes::get_bucket_website(GetBucketWebsiteInput) -> GetBucketWebsiteOutput;
    probes::get_object_lock_configuration(GetObjectLockConfigurationInput) -> GetObjectLockConfigurationOutput;
    probes::get_public_access_block(GetPublicAccessBlockInput) -> GetPublicAccessBlockOutput;
    put::put_object(PutObjectInput) -> PutObjectOutput;
    settings::delete_bucket_cors(DeleteBucketCorsInput) -> DeleteBucketCorsOutput;
    settings::delete_bucket_policy(DeleteBucketPolicyInput) -> DeleteBucketPolicyOutput;
    settings::get_bucket_cors(GetBucketCorsInput) -> GetBucketCorsOutput;
    settings::get_bucket_policy(GetBucketPolicyInput) -> GetBucketPolicyOutput;
    settings::put_bucket_cors(PutBucketCorsInput) -> PutBucketCorsOutput;
    settings::put_bucket_policy(PutBucketPolicyInput) -> PutBucketPolicyOutput;
    tags::delete_bucket_tagging(DeleteBucketTaggingInput) -> DeleteBucketTaggingOutput;
    tags::delete_object_tagging(DeleteObjectTaggingInput) -> DeleteObjectTaggingOutput;
    tags::get_bucket_tagging(GetBucketTaggingInput) -> GetBucketTaggingOutput;
    tags::get_object_tagging(GetObjectTaggingInput) -> GetObjectTaggingOutput;
    tags::put_bucket_tagging(PutBucketTaggingInput) -> PutBucketTaggingOutput;
    tags::put_object_tagging(PutObjectTaggingInput) -> PutObjectTaggingOutput;
}
