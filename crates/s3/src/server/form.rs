//! The fields of a form before its file: replaces `${filename}` in the key, and reads fields that the protocol library
//! does not know.
//!
//! The library does neither and offers no hook for it. A form's signature covers its policy only; the policy is
//! compared with the key after the replacement.

use std::ops::Range;

use bytes::{Bytes, BytesMut};

use crate::screen::is_about_encryption;

/// Most bytes before the file: the limit of the protocol library for fields, and the heads of all parts.
const HEAD_BYTES_MAX: usize = 128 << 10;
const VARIABLE: &str = "${filename}";

/// The beginning of a form, held back until the file begins.
pub(crate) struct FormHead {
    boundary: Vec<u8>,
    held: BytesMut,
    /// The next parse happens at this length, twice that of the last one: parsing after every small piece would take
    /// quadratic time.
    enough: usize,
}

/// Fields that the protocol library ignores. If a name appears more than once, the last one counts, as in the library.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct FormFields {
    /// The session token.
    pub(crate) token: Option<String>,
    /// A canned ACL.
    pub(crate) acl: Option<String>,
    /// Tags, as a document.
    pub(crate) tagging: Option<String>,
    /// Whether any field asks for encryption.
    pub(crate) encryption: bool,
    /// The policy, in base64.
    pub(crate) policy: Option<String>,
    /// Whether there is a signature, of either version.
    pub(crate) is_signed: bool,
    /// Whether the form asks for a redirect after the upload.
    pub(crate) redirects: bool,
}

/// A form up to its file.
#[derive(Debug, Default, PartialEq, Eq)]
struct Start {
    key: Option<Range<usize>>,
    filename: String,
    fields: FormFields,
}

/// Result of parsing a form.
#[derive(Debug, PartialEq, Eq)]
enum Scan {
    /// The file has not begun yet.
    More,
    /// The form cannot be parsed or has no file: the protocol library decides about it.
    Nothing,
    File(Start),
}

/// Bytes to pass on, and the parsed fields.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FormStart {
    pub(crate) bytes: Bytes,
    pub(crate) fields: FormFields,
}

impl FormHead {
    /// For a form of this content type.
    pub(crate) fn new(content_type: &str) -> Option<Self> {
        let (_, value) = content_type.split_once("boundary=")?;
        let value = value.split(';').next().unwrap_or_default().trim().trim_matches('"');
        let boundary = format!("--{value}").into_bytes();
        (!value.is_empty()).then(|| Self { boundary, held: BytesMut::new(), enough: 0 })
    }

    /// Takes the next bytes; some time after the file begins, returns all bytes that were held back.
    pub(crate) fn take(&mut self, bytes: &[u8]) -> Option<FormStart> {
        self.held.extend_from_slice(bytes);
        if self.held.len() < self.enough.min(HEAD_BYTES_MAX) {
            return None;
        }
        self.enough = self.held.len() * 2;
        match scan(&self.held, &self.boundary) {
            Scan::More if self.held.len() < HEAD_BYTES_MAX => None,
            found => Some(self.go_on(found)),
        }
    }

    /// Returns all bytes held back, at the end of the body.
    pub(crate) fn finish(&mut self) -> FormStart {
        let found = scan(&self.held, &self.boundary);
        self.go_on(found)
    }

    fn go_on(&mut self, found: Scan) -> FormStart {
        let whole = self.held.split().freeze();
        let Scan::File(start) = found else {
            return FormStart { bytes: whole, fields: FormFields::default() };
        };
        let bytes = start.key.and_then(|key| named(&whole, key, &start.filename)).unwrap_or(whole);
        FormStart { bytes, fields: start.fields }
    }
}

/// The form with its file name in the key; `None` if the key has no `${filename}`.
fn named(whole: &[u8], key: Range<usize>, filename: &str) -> Option<Bytes> {
    let text = std::str::from_utf8(&whole[key.clone()]).ok().filter(|text| text.contains(VARIABLE))?;
    // Some browsers send the whole path.
    let name = filename.rsplit(['/', '\\']).next().unwrap_or(filename);
    let replaced = text.replace(VARIABLE, name);
    Some([&whole[..key.start], replaced.as_bytes(), &whole[key.end..]].concat().into())
}

fn find(bytes: &[u8], from: usize, wanted: &[u8]) -> Option<usize> {
    let tail = bytes.get(from..)?;
    tail.windows(wanted.len()).position(|window| window == wanted).map(|at| from + at)
}

/// The value of a parameter in the head of a part.
fn parameter<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let line = head.lines().find(|line| {
        line.split_once(':').is_some_and(|(name, _)| name.trim().eq_ignore_ascii_case("content-disposition"))
    })?;
    let (_, rest) = line.split_once(&format!("; {name}=\""))?;
    rest.split_once('"').map(|(value, _)| value)
}

fn scan(form: &[u8], boundary: &[u8]) -> Scan {
    let mut start = Start::default();
    if form.len() >= boundary.len() && !form.starts_with(boundary) {
        return Scan::Nothing;
    }
    let mut at = 0;
    loop {
        let head_from = at + boundary.len();
        let Some(head_to) = find(form, head_from, b"\r\n\r\n") else { return Scan::More };
        let Ok(head) = std::str::from_utf8(&form[head_from..head_to]) else { return Scan::Nothing };
        let Some(name) = parameter(head, "name") else { return Scan::Nothing };
        if name.eq_ignore_ascii_case("file") {
            start.filename = parameter(head, "filename").unwrap_or_default().to_owned();
            return Scan::File(start);
        }
        let value_from = head_to + 4;
        let end = [b"\r\n", boundary].concat();
        let Some(value_to) = find(form, value_from, &end) else { return Scan::More };
        let value = || std::str::from_utf8(&form[value_from..value_to]).ok().map(str::to_owned);
        match name.to_ascii_lowercase().as_str() {
            "key" => start.key = Some(value_from..value_to),
            "x-amz-security-token" => start.fields.token = value(),
            "acl" => start.fields.acl = value(),
            "tagging" => start.fields.tagging = value(),
            "policy" => start.fields.policy = value(),
            "signature" | "x-amz-signature" => start.fields.is_signed = true,
            "redirect" | "success_action_redirect" => start.fields.redirects = true,
            name if is_about_encryption(name) => start.fields.encryption = true,
            _ => {}
        }
        at = value_to + 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(key: &str, filename: &str) -> String {
        format!(
            "--b\r\nContent-Disposition: form-data; name=\"key\"\r\n\r\n{key}\r\n\
             --b\r\nContent-Disposition: form-data; name=\"x-amz-security-token\"\r\n\r\ntoken\r\n\
             --b\r\nContent-Disposition: form-data; name=\"Tagging\"\r\n\r\n<Tagging/>\r\n\
             --b\r\nContent-Disposition: form-data; name=\"X-Amz-Server-Side-Encryption-Customer-Key\"\r\n\r\nk\r\n\
             --b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{filename}\"\r\n\
             Content-Type: text/plain\r\n\r\n--b ${{filename}}\r\n--b--\r\n"
        )
    }

    #[track_caller]
    fn check(key: &str, filename: &str, expected: &str) {
        let (sent, expected) = (form(key, filename), form(expected, filename));
        for step in [1, 7, 100, sent.len()] {
            let mut head = FormHead::new("multipart/form-data; boundary=b").unwrap();
            let mut start = None;
            let mut rest = Vec::new();
            for piece in sent.as_bytes().chunks(step) {
                match &start {
                    Some(_) => rest.extend_from_slice(piece),
                    None => start = head.take(piece),
                }
            }
            let start = start.unwrap_or_else(|| head.finish());
            let got = [&start.bytes[..], &rest].concat();
            assert_eq!(String::from_utf8(got).unwrap(), expected, "in steps of {step}");
            let fields = FormFields {
                token: Some("token".to_owned()),
                acl: None,
                tagging: Some("<Tagging/>".to_owned()),
                encryption: true,
                ..FormFields::default()
            };
            assert_eq!(start.fields, fields);
        }
    }

    #[test]
    fn keys_get_the_name_of_the_file() {
        check("user/${filename}", "a b.txt", "user/a b.txt");
        check("${filename}-${filename}", "x", "x-x");
        check("user/${filename}", "C:\\pictures\\x.jpg", "user/x.jpg");
        check("user/${filename}", "", "user/");
        check("plain", "x", "plain");
    }

    #[test]
    fn what_is_no_form_passes_as_it_is() {
        for sent in ["hello", "--c\r\n\r\n", "--b\r\nContent-Disposition: form-data\r\n\r\nx"] {
            let mut head = FormHead::new("multipart/form-data; boundary=\"b\"").unwrap();
            let start = head.take(sent.as_bytes()).unwrap();
            assert_eq!(start, FormStart { bytes: sent.into(), fields: FormFields::default() });
        }
        let mut head = FormHead::new("multipart/form-data; boundary=b").unwrap();
        assert_eq!(head.take(b"--b\r\nContent"), None);
        assert_eq!(head.finish().bytes, "--b\r\nContent");
        assert_eq!(head.take(b"--b\r\n"), None);
        assert!(head.take(&vec![b'-'; HEAD_BYTES_MAX + 1]).is_some());
        assert!(FormHead::new("multipart/form-data").is_none());
    }
}
