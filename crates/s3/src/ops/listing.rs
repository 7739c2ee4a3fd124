//! Listings of objects.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use client::object::{ChecksumKind, ListEntry, ListFrom, ListQuery, ListedObject, ObjectPage};
use s3s::dto::*;
use s3s::{S3Request, S3Response, S3Result, s3_error};

use super::acl::owner;
use super::{Authorized, strong, timestamp};
use crate::error::object_error;
use crate::gate::Services;
use crate::hash;

const KEYS_MAX: i32 = 1000;
/// Version id of an object in a bucket without versions.
const VERSION: &str = "null";
/// Pages that a page of version 1 may be combined from.
const PAGES_MAX: usize = 100;
/// Characters that stay as they are in encoded keys, besides letters and digits.
const PLAIN: &[u8] = b"-._~/*";

/// Whether XML 1.0 can hold a character.
pub(crate) fn is_xml_char(char: char) -> bool {
    matches!(char, '\t' | '\n' | '\r') || (char >= ' ' && !matches!(char, '\u{fffe}' | '\u{ffff}'))
}

/// Encoding of keys in the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Encoding {
    Plain,
    Url,
}

impl Encoding {
    pub(crate) fn of(encoding: Option<&EncodingType>) -> S3Result<Self> {
        match encoding.map(EncodingType::as_str) {
            None => Ok(Self::Plain),
            Some(EncodingType::URL) => Ok(Self::Url),
            Some(_) => Err(s3_error!(InvalidArgument, "Invalid Encoding Method specified in Request")),
        }
    }

    /// Writes a key. Without encoding, `None` for keys that XML cannot hold.
    pub(crate) fn write(self, key: &[u8]) -> Option<String> {
        if self == Self::Plain {
            let text = std::str::from_utf8(key).ok()?;
            return text.chars().all(is_xml_char).then(|| text.to_owned());
        }
        let mut text = String::with_capacity(key.len());
        for byte in key {
            if byte.is_ascii_alphanumeric() || PLAIN.contains(byte) {
                text.push(char::from(*byte));
            } else {
                use std::fmt::Write as _;
                let _ = write!(text, "%{byte:02X}");
            }
        }
        Some(text)
    }

    /// Writes a text from the request. Without encoding, characters that XML cannot hold are replaced.
    pub(crate) fn write_text(self, text: &str) -> String {
        let replaced =
            || text.chars().map(|char| if is_xml_char(char) { char } else { '\u{fffd}' }).collect();
        self.write(text.as_bytes()).unwrap_or_else(replaced)
    }
}

/// The continuation token: the place where the next page begins.
fn token(from: &ListFrom) -> Option<String> {
    let (kind, key) = match from {
        ListFrom::Start => return None,
        ListFrom::After(key) => (b'a', key),
        ListFrom::Past(prefix) => (b'p', prefix),
    };
    Some(URL_SAFE_NO_PAD.encode([&[kind], &key[..]].concat()))
}

fn parse_token(token: &str) -> S3Result<ListFrom> {
    let bytes = URL_SAFE_NO_PAD.decode(token).unwrap_or_default();
    match bytes.split_first() {
        Some((b'a', key)) => Ok(ListFrom::After(Bytes::copy_from_slice(key))),
        Some((b'p', prefix)) => Ok(ListFrom::Past(Bytes::copy_from_slice(prefix))),
        _ => Err(s3_error!(InvalidArgument, "The continuation token provided is incorrect")),
    }
}

/// Where a listing after `marker` begins. A marker that is a common prefix stands for all keys under it.
pub(crate) fn after(marker: &str, prefix: &str, delimiter: &str) -> ListFrom {
    let rest = marker.strip_prefix(prefix).unwrap_or_default();
    let is_group =
        !delimiter.is_empty() && rest.find(delimiter).is_some_and(|at| at + delimiter.len() == rest.len());
    let marker = Bytes::copy_from_slice(marker.as_bytes());
    if is_group { ListFrom::Past(marker) } else { ListFrom::After(marker) }
}

/// Parameters that both versions of the listing share.
struct Wanted<'a> {
    prefix: &'a str,
    delimiter: &'a str,
    limit: u32,
    encoding: Encoding,
    owners: bool,
}

impl Wanted<'_> {
    /// A place as a marker for the next request of version 1; `None` if a marker cannot express it.
    fn marker(&self, place: &ListFrom) -> Option<String> {
        let key = match place {
            ListFrom::Start => return None,
            ListFrom::After(key) | ListFrom::Past(key) => key,
        };
        std::str::from_utf8(key).ok()?;
        self.encoding.write(key)
    }

    /// Cuts a page after its last entry that can be a marker, if more pages follow and there is such an entry.
    fn end_at_marker(&self, page: &mut ObjectPage) {
        if page.next.as_ref().is_none_or(|next| self.marker(next).is_some()) {
            return;
        }
        if let Some(last) = page.entries.iter().rposition(|entry| self.marker(&behind(entry)).is_some()) {
            page.next = Some(behind(&page.entries[last]));
            page.entries.truncate(last + 1);
        }
    }
}

/// Where a listing continues after an entry.
fn behind(entry: &ListEntry) -> ListFrom {
    match entry {
        ListEntry::Object(object) => ListFrom::After(object.key.clone()),
        ListEntry::Prefix(prefix) => ListFrom::Past(prefix.clone()),
    }
}

async fn fetch(
    core: &Services,
    asked: &Authorized,
    wanted: &Wanted<'_>,
    from: ListFrom,
) -> S3Result<ObjectPage> {
    if wanted.limit == 0 {
        return Ok(ObjectPage { entries: Vec::new(), next: None });
    }
    let query = ListQuery {
        bucket: asked.bucket()?.ino,
        prefix: Bytes::copy_from_slice(wanted.prefix.as_bytes()),
        delimiter: Bytes::copy_from_slice(wanted.delimiter.as_bytes()),
        from,
        limit: wanted.limit,
    };
    core.client.list_objects(query, asked.caller()).await.map_err(object_error)
}

/// Fetches a page that ends at a name which can be a marker: cuts the page there, or extends it up to there.
async fn fetch_to_marker(
    core: &Services,
    asked: &Authorized,
    wanted: &Wanted<'_>,
    mut from: ListFrom,
) -> S3Result<ObjectPage> {
    let mut entries = Vec::new();
    for _ in 0..PAGES_MAX {
        let mut page = fetch(core, asked, wanted, from).await?;
        wanted.end_at_marker(&mut page);
        entries.append(&mut page.entries);
        match page.next {
            Some(next) if wanted.marker(&next).is_none() => from = next,
            next => return Ok(ObjectPage { entries, next }),
        }
    }
    Err(s3_error!(InvalidRequest, "Too many names in a row that cannot be markers: use ListObjectsV2."))
}

/// Objects and common prefixes for the answer. Keys that cannot be written are left out.
fn write_entries(found: Vec<ListEntry>, wanted: &Wanted<'_>) -> (Vec<Object>, Vec<CommonPrefix>) {
    let (mut contents, mut prefixes) = (Vec::with_capacity(found.len()), Vec::new());
    for entry in found {
        match entry {
            ListEntry::Object(object) => {
                if let Some(key) = wanted.encoding.write(&object.key) {
                    contents.push(describe(key, object, wanted.owners));
                }
            }
            ListEntry::Prefix(prefix) => {
                if let Some(prefix) = wanted.encoding.write(&prefix) {
                    prefixes.push(CommonPrefix { prefix: Some(prefix) });
                }
            }
        }
    }
    (contents, prefixes)
}

fn describe(key: String, object: ListedObject, owners: bool) -> Object {
    let checksum_type = object.checksum.map(|checksum| match checksum.kind {
        ChecksumKind::FullObject => ChecksumType::from_static(ChecksumType::FULL_OBJECT),
        ChecksumKind::Composite => ChecksumType::from_static(ChecksumType::COMPOSITE),
    });
    let algorithms =
        object.checksum.map(|checksum| vec![ChecksumAlgorithm::from_static(hash::name(checksum.algorithm))]);
    Object {
        checksum_algorithm: algorithms,
        checksum_type,
        e_tag: Some(strong(object.etag)),
        key: Some(key),
        last_modified: Some(timestamp(object.mtime_ns)),
        owner: owners.then(|| owner(object.uid)),
        restore_status: None,
        size: Some(object.size as i64),
        storage_class: Some(ObjectStorageClass::from_static(ObjectStorageClass::STANDARD)),
    }
}

fn limit(max_keys: Option<i32>) -> S3Result<u32> {
    let max_keys = max_keys.unwrap_or(KEYS_MAX);
    u32::try_from(max_keys.min(KEYS_MAX)).map_err(|_| {
        s3_error!(InvalidArgument, "Argument maxKeys must be an integer between 0 and 2147483647")
    })
}

pub(crate) async fn list_objects(
    core: &Arc<Services>,
    request: S3Request<ListObjectsInput>,
) -> S3Result<S3Response<ListObjectsOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let input = request.input;
    let prefix = input.prefix.clone().unwrap_or_default();
    let delimiter = input.delimiter.clone().unwrap_or_default();
    let encoding = Encoding::of(input.encoding_type.as_ref())?;
    let limit = limit(input.max_keys)?;
    let from = match input.marker.as_deref() {
        None | Some("") => ListFrom::Start,
        Some(marker) => after(marker, &prefix, &delimiter),
    };
    let wanted = Wanted { prefix: &prefix, delimiter: &delimiter, limit, encoding, owners: true };
    let page = fetch_to_marker(core, &asked, &wanted, from).await?;
    let (contents, common_prefixes) = write_entries(page.entries, &wanted);
    Ok(S3Response::new(ListObjectsOutput {
        name: Some(input.bucket),
        prefix: Some(encoding.write_text(&prefix)),
        marker: Some(encoding.write_text(input.marker.as_deref().unwrap_or_default())),
        max_keys: Some(limit as i32),
        is_truncated: Some(page.next.is_some()),
        contents: Some(contents),
        common_prefixes: Some(common_prefixes),
        delimiter: echoed(input.delimiter, encoding),
        next_marker: page.next.as_ref().and_then(|next| wanted.marker(next)),
        encoding_type: input.encoding_type,
        request_charged: None,
    }))
}

pub(crate) async fn list_objects_v2(
    core: &Arc<Services>,
    request: S3Request<ListObjectsV2Input>,
) -> S3Result<S3Response<ListObjectsV2Output>> {
    let asked = Authorized::of(&request.extensions)?;
    let input = request.input;
    let prefix = input.prefix.clone().unwrap_or_default();
    let delimiter = input.delimiter.clone().unwrap_or_default();
    let encoding = Encoding::of(input.encoding_type.as_ref())?;
    let limit = limit(input.max_keys)?;
    let from = match (input.continuation_token.as_deref(), input.start_after.as_deref()) {
        (Some(token), _) => parse_token(token)?,
        (None, None | Some("")) => ListFrom::Start,
        (None, Some(start)) => after(start, &prefix, &delimiter),
    };
    let owners = input.fetch_owner.unwrap_or(false);
    let wanted = Wanted { prefix: &prefix, delimiter: &delimiter, limit, encoding, owners };
    let page = fetch(core, &asked, &wanted, from).await?;
    let (contents, common_prefixes) = write_entries(page.entries, &wanted);
    Ok(S3Response::new(ListObjectsV2Output {
        name: Some(input.bucket),
        prefix: Some(encoding.write_text(&prefix)),
        max_keys: Some(limit as i32),
        key_count: Some((contents.len() + common_prefixes.len()) as i32),
        continuation_token: input.continuation_token,
        is_truncated: Some(page.next.is_some()),
        next_continuation_token: page.next.as_ref().and_then(token),
        contents: Some(contents),
        common_prefixes: Some(common_prefixes),
        delimiter: echoed(input.delimiter, encoding),
        encoding_type: input.encoding_type,
        start_after: input.start_after.map(|start| encoding.write_text(&start)),
        request_charged: None,
    }))
}

/// The only version of each object, which S3 calls `null`.
pub(crate) async fn list_object_versions(
    core: &Arc<Services>,
    request: S3Request<ListObjectVersionsInput>,
) -> S3Result<S3Response<ListObjectVersionsOutput>> {
    let asked = Authorized::of(&request.extensions)?;
    let input = request.input;
    let prefix = input.prefix.clone().unwrap_or_default();
    let delimiter = input.delimiter.clone().unwrap_or_default();
    let encoding = Encoding::of(input.encoding_type.as_ref())?;
    let limit = limit(input.max_keys)?;
    let from = match input.key_marker.as_deref() {
        None | Some("") if input.version_id_marker.as_deref().is_some_and(|id| !id.is_empty()) => {
            return Err(s3_error!(
                InvalidArgument,
                "A version-id marker cannot be specified without a key marker."
            ));
        }
        None | Some("") => ListFrom::Start,
        Some(marker) => after(marker, &prefix, &delimiter),
    };
    let wanted = Wanted { prefix: &prefix, delimiter: &delimiter, limit, encoding, owners: true };
    let page = fetch_to_marker(core, &asked, &wanted, from).await?;
    let (contents, common_prefixes) = write_entries(page.entries, &wanted);
    let next = page.next.as_ref().and_then(|next| wanted.marker(next));
    Ok(S3Response::new(ListObjectVersionsOutput {
        name: Some(input.bucket),
        prefix: Some(encoding.write_text(&prefix)),
        key_marker: Some(encoding.write_text(input.key_marker.as_deref().unwrap_or_default())),
        version_id_marker: Some(input.version_id_marker.unwrap_or_default()),
        max_keys: Some(limit as i32),
        is_truncated: Some(page.next.is_some()),
        versions: Some(contents.into_iter().map(only_version).collect()),
        common_prefixes: Some(common_prefixes),
        delimiter: echoed(input.delimiter, encoding),
        next_version_id_marker: next.as_ref().map(|_| VERSION.to_owned()),
        next_key_marker: next,
        encoding_type: input.encoding_type,
        ..ListObjectVersionsOutput::default()
    }))
}

fn only_version(object: Object) -> ObjectVersion {
    ObjectVersion {
        checksum_algorithm: object.checksum_algorithm,
        checksum_type: object.checksum_type,
        e_tag: object.e_tag,
        is_latest: Some(true),
        key: object.key,
        last_modified: object.last_modified,
        owner: object.owner,
        restore_status: None,
        size: object.size,
        storage_class: Some(ObjectVersionStorageClass::from_static(ObjectVersionStorageClass::STANDARD)),
        version_id: Some(VERSION.to_owned()),
    }
}

/// The delimiter for the answer: an empty one counts as none.
pub(crate) fn echoed(delimiter: Option<String>, encoding: Encoding) -> Option<String> {
    delimiter.filter(|delimiter| !delimiter.is_empty()).map(|delimiter| encoding.write_text(&delimiter))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_say_where_to_go_on() {
        for from in [ListFrom::After("a/b".into()), ListFrom::Past(Bytes::from_static(b"\xff/"))] {
            assert_eq!(parse_token(&token(&from).unwrap()).unwrap(), from);
        }
        for bad in ["", "x", "zz", "%%%"] {
            assert_eq!(parse_token(bad).unwrap_err().code().as_str(), "InvalidArgument");
        }
    }

    #[test]
    fn a_common_prefix_as_marker_stands_for_its_keys() {
        assert_eq!(after("a/", "", "/"), ListFrom::Past("a/".into()));
        assert_eq!(after("p/a/", "p/", "/"), ListFrom::Past("p/a/".into()));
        assert_eq!(after("a/b", "", "/"), ListFrom::After("a/b".into()));
        assert_eq!(after("a/", "", ""), ListFrom::After("a/".into()));
        assert_eq!(after("a/", "b", "/"), ListFrom::After("a/".into()));
    }

    #[track_caller]
    fn check_end(prefixes: &[&'static [u8]], count: usize, next: &'static [u8]) {
        let wanted = Wanted { prefix: "", delimiter: "/", limit: 9, encoding: Encoding::Url, owners: false };
        let entries: Vec<_> =
            prefixes.iter().map(|prefix| ListEntry::Prefix(Bytes::from_static(prefix))).collect();
        let mut page = ObjectPage { next: entries.last().map(behind), entries };
        wanted.end_at_marker(&mut page);
        assert_eq!((page.entries.len(), page.next), (count, Some(ListFrom::Past(Bytes::from_static(next)))));
    }

    #[test]
    fn pages_end_at_names_that_can_be_markers() {
        check_end(&[b"\xff/", b"b/"], 2, b"b/");
        check_end(&[b"a/", b"b/", b"\xfe/", b"\xff/"], 2, b"b/");
        check_end(&[b"\xfe/", b"\xff/"], 2, b"\xff/");
    }

    #[test]
    fn keys_that_xml_cannot_hold_are_only_seen_encoded() {
        assert_eq!(Encoding::Url.write(b"a b/\xff+\x01").unwrap(), "a%20b/%FF%2B%01");
        assert_eq!(Encoding::Plain.write("a b/ß+".as_bytes()).unwrap(), "a b/ß+");
        assert_eq!(Encoding::Plain.write(b"\xff"), None);
        assert_eq!(Encoding::Plain.write(b"\x01"), None);
        assert_eq!(Encoding::Plain.write(b"\r\n\t").unwrap(), "\r\n\t");
        assert_eq!(Encoding::Plain.write("a\u{fffd}\u{10ffff}".as_bytes()).unwrap(), "a\u{fffd}\u{10ffff}");
        for text in ["\u{fffe}", "a\u{ffff}"] {
            assert_eq!(Encoding::Plain.write(text.as_bytes()), None);
        }
        assert_eq!(Encoding::Plain.write_text("a\u{fffe}\x01b"), "a\u{fffd}\u{fffd}b");
        assert_eq!(Encoding::Url.write_text("\u{fffe}"), "%EF%BF%BE");
    }
}
