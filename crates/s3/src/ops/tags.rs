//! Tags of objects and buckets.

use std::collections::BTreeSet;
use std::sync::Arc;

use client::object::Conditions;
use s3s::dto::*;
use s3s::xml::{Deserialize as _, Deserializer};
use s3s::{S3Request, S3Response, S3Result, s3_error};

use super::{Authorized, check_version};
use crate::bucket::TAGS;
use crate::error::{custom, object_error};
use crate::gate::Services;

const OBJECT_TAGS_MAX: usize = 10;
const BUCKET_TAGS_MAX: usize = 50;
const NAME_CHARS_MAX: usize = 128;
const VALUE_CHARS_MAX: usize = 256;

pub(crate) type Tags = Vec<(String, String)>;

fn check(tags: Tags, most: usize) -> S3Result<Tags> {
    if tags.len() > most {
        return Err(custom(
            "BadRequest",
            hyper::StatusCode::BAD_REQUEST,
            format!("Object tags cannot be greater than {most}"),
        ));
    }
    let mut names = BTreeSet::new();
    for (name, value) in &tags {
        if name.is_empty() || name.chars().count() > NAME_CHARS_MAX {
            return Err(s3_error!(InvalidTag, "The TagKey you have provided is invalid"));
        }
        if value.chars().count() > VALUE_CHARS_MAX {
            return Err(s3_error!(InvalidTag, "The TagValue you have provided is invalid"));
        }
        if !names.insert(name) {
            return Err(s3_error!(InvalidTag, "Cannot provide multiple Tags with the same key"));
        }
    }
    Ok(tags)
}

/// Parses the header `x-amz-tagging`: a query string.
pub(crate) fn parse_header(text: &str) -> S3Result<Tags> {
    let decode = |part: &str| urlencoding::decode(&part.replace('+', " ")).map(|part| part.into_owned());
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        Ok((decode(name)?, decode(value)?))
    };
    let tags: Result<Tags, std::string::FromUtf8Error> =
        text.split('&').filter(|part| !part.is_empty()).map(pair).collect();
    let tags = tags.map_err(|_| {
        s3_error!(InvalidArgument, "The header 'x-amz-tagging' shall be encoded as UTF-8 then URLEncoded URL query parameters without tag name duplicates.")
    })?;
    check(tags, OBJECT_TAGS_MAX)
}

/// Parses the field `tagging` of a form: an XML document.
pub(crate) fn parse_document(text: &str) -> S3Result<Tags> {
    let mut reader = Deserializer::new(text.as_bytes());
    let tagging = Tagging::deserialize(&mut reader).and_then(|tagging| reader.expect_eof().map(|()| tagging));
    let tagging =
        tagging.map_err(|_| s3_error!(MalformedXML, "The field 'tagging' shall be a Tagging document."))?;
    from_set(tagging.tag_set, OBJECT_TAGS_MAX)
}

fn from_set(set: TagSet, most: usize) -> S3Result<Tags> {
    let tags = set.into_iter().map(|tag| (tag.key.unwrap_or_default(), tag.value.unwrap_or_default()));
    check(tags.collect(), most)
}

fn to_set(tags: Tags) -> TagSet {
    tags.into_iter().map(|(key, value)| Tag { key: Some(key), value: Some(value) }).collect()
}

pub(crate) async fn get_object_tagging(
    core: &Arc<Services>,
    request: S3Request<GetObjectTaggingInput>,
) -> S3Result<S3Response<GetObjectTaggingOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    check_version(request.input.version_id.as_deref())?;
    let name = asked.name(&request.input.key)?;
    let info =
        core.client.head_object(name, Conditions::default(), asked.caller()).await.map_err(object_error)?;
    Ok(S3Response::new(GetObjectTaggingOutput { tag_set: to_set(info.meta.tags), version_id: None }))
}

async fn set_tags(core: &Services, asked: &Authorized, key: &str, tags: Tags) -> S3Result<()> {
    let name = asked.name(key)?;
    let set = core.client.set_object_tags(name, tags, asked.caller()).await;
    set.map(|_| ()).map_err(object_error)
}

pub(crate) async fn put_object_tagging(
    core: &Arc<Services>,
    request: S3Request<PutObjectTaggingInput>,
) -> S3Result<S3Response<PutObjectTaggingOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    check_version(request.input.version_id.as_deref())?;
    let (key, bucket) = (&request.input.key, asked.bucket()?);
    let tags = from_set(request.input.tagging.tag_set, OBJECT_TAGS_MAX);
    // Policies look at the new tags; errors in the tags are reported after authorization.
    let given = tags.as_deref().ok();
    core.may_with_tags(&asked.context, "s3:PutObjectTagging", bucket, key, given).await?;
    set_tags(core, &asked, key, tags?).await?;
    Ok(S3Response::new(PutObjectTaggingOutput::default()))
}

pub(crate) async fn delete_object_tagging(
    core: &Arc<Services>,
    request: S3Request<DeleteObjectTaggingInput>,
) -> S3Result<S3Response<DeleteObjectTaggingOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    check_version(request.input.version_id.as_deref())?;
    set_tags(core, &asked, &request.input.key, Vec::new()).await?;
    Ok(S3Response::new(DeleteObjectTaggingOutput::default()))
}

pub(crate) async fn get_bucket_tagging(
    _core: &Arc<Services>,
    request: S3Request<GetBucketTaggingInput>,
) -> S3Result<S3Response<GetBucketTaggingOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let stored = asked.bucket()?.setting(TAGS);
    let tags = stored.and_then(|text| serde_json::from_slice::<Tags>(text).ok());
    match tags {
        Some(tags) => Ok(S3Response::new(GetBucketTaggingOutput { tag_set: to_set(tags) })),
        None => Err(s3_error!(NoSuchTagSet, "The TagSet does not exist")),
    }
}

pub(crate) async fn put_bucket_tagging(
    core: &Arc<Services>,
    request: S3Request<PutBucketTaggingInput>,
) -> S3Result<S3Response<PutBucketTaggingOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let tags = from_set(request.input.tagging.tag_set, BUCKET_TAGS_MAX)?;
    let text = serde_json::to_vec(&tags).map_err(s3s::S3Error::internal_error)?;
    core.buckets.set(asked.bucket()?, TAGS, Some(text.into())).await?;
    Ok(S3Response::with_status(PutBucketTaggingOutput::default(), hyper::StatusCode::NO_CONTENT))
}

pub(crate) async fn delete_bucket_tagging(
    core: &Arc<Services>,
    request: S3Request<DeleteBucketTaggingInput>,
) -> S3Result<S3Response<DeleteBucketTaggingOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    core.buckets.set(asked.bucket()?, TAGS, None).await?;
    Ok(S3Response::with_status(DeleteBucketTaggingOutput::default(), hyper::StatusCode::NO_CONTENT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_header(text: &str, expected: Result<&[(&str, &str)], &str>) {
        match (parse_header(text), expected) {
            (Ok(tags), Ok(expected)) => {
                let tags: Vec<_> = tags.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
                assert_eq!(tags, expected);
            }
            (Err(error), Err(code)) => assert_eq!(error.code().as_str(), code),
            (result, _) => panic!("{result:?}"),
        }
    }

    #[test]
    fn tags_in_headers() {
        check_header("a=1&b=x%20y+z&c", Ok(&[("a", "1"), ("b", "x y z"), ("c", "")]));
        check_header("", Ok(&[]));
        check_header("a=1&a=2", Err("InvalidTag"));
        check_header("=1", Err("InvalidTag"));
        check_header("a=%ff", Err("InvalidArgument"));
        check_header(&"x".repeat(129), Err("InvalidTag"));
        check_header("a&b&c&d&e&f&g&h&i&j&k", Err("BadRequest"));
    }

    #[test]
    fn tags_in_forms() {
        let one = "<Tagging><TagSet><Tag><Key>a</Key><Value>x &amp; y</Value></Tag></TagSet></Tagging>";
        assert_eq!(parse_document(one).unwrap(), [("a".to_owned(), "x & y".to_owned())]);
        for bad in ["", "a=1", "<Tagging>", "<Delete/>"] {
            assert_eq!(parse_document(bad).unwrap_err().code().as_str(), "MalformedXML", "{bad}");
        }
    }
}
