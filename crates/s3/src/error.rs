//! Maps errors to S3 error codes.

use std::borrow::Cow;

use base::FsError;
use client::object::ObjectError;
use hyper::StatusCode;
use s3s::{S3Error, S3ErrorCode, s3_error};

use crate::hash::sha256_mismatch;
use crate::key::KeyError;

/// An error with a code that the protocol library does not know.
pub(crate) fn custom(
    code: &'static str,
    status: StatusCode,
    message: impl Into<Cow<'static, str>>,
) -> S3Error {
    let mut error = S3Error::with_message(S3ErrorCode::Custom(code.into()), message);
    error.set_status_code(status);
    error
}

/// The S3 error for an error of the filesystem.
fn fs_error(error: FsError) -> S3Error {
    match error {
        FsError::NotFound => s3_error!(NoSuchBucket, "The specified bucket does not exist"),
        FsError::Denied | FsError::NotPermitted => s3_error!(
            AccessDenied,
            "Access Denied: the permissions of the file, or of a directory above it, do not allow it."
        ),
        FsError::NoSpace => custom(
            "InsufficientStorage",
            StatusCode::INSUFFICIENT_STORAGE,
            "There is no room left on the drives or for the metadata: `forebay status` of the node says where.",
        ),
        FsError::QuotaExceeded => custom("QuotaExceeded", StatusCode::FORBIDDEN, "The quota is used up."),
        FsError::ReadOnly => {
            custom("ReadOnly", StatusCode::SERVICE_UNAVAILABLE, "The filesystem takes no changes now.")
        }
        FsError::NameTooLong => s3_error!(KeyTooLongError, "A part of the key is longer than 255 bytes."),
        FsError::TooLarge => s3_error!(EntityTooLarge),
        FsError::NotEmpty => s3_error!(BucketNotEmpty),
        FsError::Exists => s3_error!(BucketAlreadyExists),
        FsError::NotDirectory | FsError::IsDirectory | FsError::Invalid => {
            s3_error!(InvalidArgument, "The name does not fit what is there.")
        }
        FsError::Unsupported => s3_error!(NotImplemented, "Not supported on this kind of file."),
        FsError::TooManyLinks
        | FsError::NoAttribute
        | FsError::Range
        | FsError::ValueTooLarge
        | FsError::CrossDevice => s3_error!(InvalidRequest, "The filesystem refuses it."),
        FsError::WouldBlock
        | FsError::Deadlock
        | FsError::Interrupted
        | FsError::StaleLease
        | FsError::StaleMap
        | FsError::Stale => s3_error!(OperationAborted, "A conflicting change is under way: try again."),
        FsError::Unavailable | FsError::Disconnected | FsError::Retry => {
            s3_error!(ServiceUnavailable, "The filesystem does not answer: try again.")
        }
        FsError::Unknown => {
            s3_error!(
                ServiceUnavailable,
                "The filesystem does not answer. It may have happened: look, or try again."
            )
        }
        FsError::Io => s3_error!(InternalError, "Data could not be read or written: see the log."),
    }
}

/// The S3 error for an error of an object operation.
pub(crate) fn object_error(error: ObjectError) -> S3Error {
    match error {
        ObjectError::Fs(error) => fs_error(error),
        ObjectError::NoSuchKey => s3_error!(NoSuchKey, "The specified key does not exist."),
        ObjectError::PreconditionFailed => {
            s3_error!(PreconditionFailed, "At least one of the pre-conditions you specified did not hold")
        }
        ObjectError::NotModified => {
            let mut error = s3_error!(NotModified, "Not Modified");
            error.set_status_code(StatusCode::NOT_MODIFIED);
            error
        }
        ObjectError::ParentIsFile => custom(
            "ObjectParentIsFile",
            StatusCode::CONFLICT,
            "A part of the key is an object, which is a file and cannot be a directory too.",
        ),
        ObjectError::ExistingIsDirectory => custom(
            "ExistingObjectIsDirectory",
            StatusCode::CONFLICT,
            "The key is a prefix of other keys, which is a directory and cannot be a file too.",
        ),
        ObjectError::NoSuchUpload => s3_error!(
            NoSuchUpload,
            "The specified multipart upload does not exist. It may have been aborted or completed."
        ),
        ObjectError::InvalidPart(number) => s3_error!(
            InvalidPart,
            "Part {number} could not be found, or its ETag or checksum is not the one named."
        ),
        ObjectError::InvalidPartOrder => {
            s3_error!(InvalidPartOrder, "The list of parts was not in ascending order.")
        }
        ObjectError::PartTooSmall(number) => s3_error!(
            EntityTooSmall,
            "Your proposed upload is smaller than the minimum allowed size: part {number} has less than 5 MiB."
        ),
        ObjectError::MetadataTooLarge => s3_error!(MetadataTooLarge),
        ObjectError::SourceChanged => {
            s3_error!(OperationAborted, "The source changed while it was copied: try again.")
        }
        other => {
            tracing::error!(%other, "no S3 code for an error");
            s3_error!(InternalError)
        }
    }
}

/// The S3 error for an invalid key.
pub(crate) fn key_error(error: KeyError) -> S3Error {
    match error {
        KeyError::TooLong(_) | KeyError::NameTooLong(_) => s3_error!(KeyTooLongError, "{error}"),
        KeyError::Empty | KeyError::EmptyName | KeyError::DotName | KeyError::Zero => {
            s3_error!(InvalidArgument, "Object key cannot be a path: {error}")
        }
    }
}

/// The S3 error for a body that ended early. The types of these errors are private to the protocol library, so their
/// texts are compared.
pub(crate) fn body_error(error: &(dyn std::error::Error + 'static)) -> S3Error {
    let text = error.to_string();
    let has = |part: &str| text.contains(part);
    if has("Sha256Mismatch") {
        return sha256_mismatch();
    }
    if has("SignatureMismatch") {
        return s3_error!(SignatureDoesNotMatch, "The signature of a part of the body does not match.");
    }
    if has("too slowly") {
        return s3_error!(
            RequestTimeout,
            "Your socket connection to the server was not read from or written to within the timeout period."
        );
    }
    if has("too long") {
        return s3_error!(EntityTooLarge, "A signed frame of aws-chunked must not exceed 16 MiB.");
    }
    if has("LengthMismatch") || has("Incomplete") || has("broke off") {
        return s3_error!(
            IncompleteBody,
            "You did not provide the number of bytes specified by the Content-Length HTTP header."
        );
    }
    s3_error!(InvalidRequest, "The body cannot be decoded: {text}")
}
