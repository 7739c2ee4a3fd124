//! Deleting objects.

use std::sync::Arc;

use client::object::{Conditions, EtagMatch, ObjectError};
use s3s::dto::*;
use s3s::{S3Error, S3Request, S3Response, S3Result, s3_error};

use super::listing::{Encoding, is_xml_char};
use super::{Authorized, check_version, nanoseconds, write_conditions};
use crate::error::object_error;
use crate::gate::Services;
use crate::identity::{AuditEntry, AuditRecord};

const KEYS_MAX: usize = 1000;

/// Whether the object is gone: a key that does not exist, or that cannot exist, counts as deleted.
fn is_gone(error: ObjectError) -> bool {
    matches!(error, ObjectError::NoSuchKey | ObjectError::ParentIsFile | ObjectError::ExistingIsDirectory)
}

pub(crate) async fn delete_object(
    core: &Arc<Services>,
    request: S3Request<DeleteObjectInput>,
) -> S3Result<S3Response<DeleteObjectOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let input = request.input;
    check_version(input.version_id.as_deref())?;
    let mut conditions = write_conditions(input.if_match.as_ref(), None);
    conditions.if_modified_at_ns = input.if_match_last_modified_time.as_ref().map(nanoseconds);
    conditions.if_size = input.if_match_size.and_then(|size| u64::try_from(size).ok());
    let is_conditional = !conditions.is_empty();
    let name = asked.name(&input.key)?;
    match core.client.delete_object(name, conditions, asked.caller()).await {
        Ok(_) => {}
        Err(error) if is_gone(error) && !is_conditional => {}
        Err(error) => return Err(object_error(error)),
    }
    Ok(S3Response::with_status(DeleteObjectOutput::default(), hyper::StatusCode::NO_CONTENT))
}

pub(crate) async fn delete_objects(
    core: &Arc<Services>,
    request: S3Request<DeleteObjectsInput>,
) -> S3Result<S3Response<DeleteObjectsOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let input = request.input;
    let objects = input.delete.objects;
    if objects.is_empty() || objects.len() > KEYS_MAX {
        return Err(s3_error!(MalformedXML, "A request deletes 1 to 1000 keys."));
    }
    let quiet = input.delete.quiet.unwrap_or(false);
    let bucket = asked.bucket()?;
    let mut outcomes: Vec<(String, S3Result<()>)> = Vec::with_capacity(objects.len());
    let mut wanted = Vec::new();
    for object in objects {
        let checked = check_answerable(&object.key)
            .and_then(|()| check_version(object.version_id.as_deref().filter(|version| !version.is_empty())))
            .and_then(|()| core.may_also(&asked.context, "s3:DeleteObject", bucket, Some(&object.key)))
            .and_then(|()| asked.name(&object.key));
        let outcome = checked.map(|name| {
            let conditions = Conditions {
                if_match: object.e_tag.as_ref().map(etag_match),
                if_modified_at_ns: object.last_modified_time.as_ref().map(nanoseconds),
                if_size: object.size.and_then(|size| u64::try_from(size).ok()),
                ..Conditions::default()
            };
            wanted.push((outcomes.len(), (name, conditions)));
        });
        outcomes.push((object.key, outcome));
    }
    let (places, keys): (Vec<usize>, Vec<_>) = wanted.into_iter().unzip();
    let conditional: Vec<bool> = keys.iter().map(|(_, conditions)| !conditions.is_empty()).collect();
    if !keys.is_empty() {
        let results = core.client.delete_objects(keys, asked.caller()).await;
        let results = match results {
            Ok(results) => results,
            Err(error) => {
                for (key, outcome) in outcomes {
                    let outcome = outcome.and_then(|()| Err(object_error(error)));
                    account(core, &asked, &key, &outcome).await;
                }
                return Err(object_error(error));
            }
        };
        for ((place, result), conditional) in places.into_iter().zip(results).zip(conditional) {
            outcomes[place].1 = match result {
                Ok(_) => Ok(()),
                Err(error) if is_gone(error) && !conditional => Ok(()),
                Err(error) => Err(object_error(error)),
            };
        }
    }
    for (key, outcome) in &outcomes {
        account(core, &asked, key, outcome).await;
    }
    let mut output = DeleteObjectsOutput::default();
    let (mut deleted, mut errors) = (Vec::new(), Vec::new());
    for (key, outcome) in outcomes {
        match outcome {
            Ok(()) => deleted.push(DeletedObject { key: Some(key), ..DeletedObject::default() }),
            Err(error) => errors.push(entry(key, &error)),
        }
    }
    output.deleted = (!quiet).then_some(deleted);
    output.errors = Some(errors).filter(|errors| !errors.is_empty());
    Ok(S3Response::new(output))
}

/// Writes an audit line for one of the keys of a request.
async fn account(core: &Services, asked: &Authorized, key: &str, outcome: &S3Result<()>) {
    let mut entry = AuditEntry::begin(core.audit.clone()).await;
    let identity = asked.identity();
    entry.record = AuditRecord {
        began_ns: core.env.clock.wall_ns(),
        request_id: asked.context.request_id.clone(),
        user: identity.map(|identity| identity.user.name.clone()),
        access_key: identity.map(|identity| identity.access_key.clone()),
        operation: "DeleteObjects",
        bucket: asked.bucket().ok().map(|bucket| bucket.name.clone()),
        key: Some(key.to_owned()),
        status: match outcome {
            Ok(()) => 204,
            Err(error) => error.status_code().map_or(500, |status| status.as_u16()),
        },
        error: outcome.as_ref().err().map(|error| error.code().as_str().to_owned()),
        source_ip: Some(asked.context.origin.ip),
        ..AuditRecord::default()
    };
}

/// Refuses a key that the answer, which is XML, cannot contain.
fn check_answerable(key: &str) -> S3Result<()> {
    match key.chars().all(is_xml_char) {
        true => Ok(()),
        false => Err(s3_error!(
            InvalidArgument,
            "XML cannot hold this key, which is percent-encoded here: delete it with a request of its own."
        )),
    }
}

fn etag_match(etag: &ETag) -> EtagMatch {
    match etag.value() {
        "*" => EtagMatch::Any,
        value => EtagMatch::List(vec![value.to_owned()]),
    }
}

fn entry(key: String, error: &S3Error) -> Error {
    let key = if check_answerable(&key).is_ok() { key } else { Encoding::Url.write_text(&key) };
    Error {
        code: Some(error.code().as_str().to_owned()),
        key: Some(key),
        message: error.message().map(str::to_owned),
        version_id: None,
    }
}
