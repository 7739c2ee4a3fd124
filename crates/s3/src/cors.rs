//! Cross-origin rules of buckets (CORS).

use bytes::Bytes;
use hyper::Method;
use hyper::header::{self, HeaderMap, HeaderValue};
use s3s::dto::CORSRule;
use s3s::{S3Error, S3Result, s3_error};
use serde::{Deserialize, Serialize};

const RULES_MAX: usize = 100;
const METHODS: [&str; 5] = ["GET", "PUT", "POST", "DELETE", "HEAD"];

/// Cross-origin headers of a request from a browser.
pub(crate) struct Cross {
    origin: HeaderValue,
    method: String,
    headers: Vec<String>,
}

impl Cross {
    pub(crate) fn of(method: &Method, headers: &HeaderMap) -> Option<Self> {
        let origin = headers.get(header::ORIGIN)?.clone();
        let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
        let named = text(header::ACCESS_CONTROL_REQUEST_METHOD);
        // S3 also takes the method of another request from the header of preflights.
        if method != Method::OPTIONS && named.is_none() {
            return Some(Self { origin, method: method.to_string(), headers: Vec::new() });
        }
        let wanted = text(header::ACCESS_CONTROL_REQUEST_HEADERS).unwrap_or_default();
        let wanted = wanted.split(',').map(|name| name.trim().to_ascii_lowercase());
        Some(Self {
            origin,
            method: named?.to_owned(),
            headers: wanted.filter(|name| !name.is_empty()).collect(),
        })
    }
}

/// One rule; JSON in a setting of the bucket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Rule {
    id: Option<String>,
    origins: Vec<String>,
    methods: Vec<String>,
    headers: Vec<String>,
    expose: Vec<String>,
    max_age_s: Option<i32>,
}

/// The rules of a bucket; the first rule that matches is used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CorsRules(Vec<Rule>);

/// Whether a text matches a pattern with at most one `*`.
fn fits(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((start, end)) => {
            text.len() >= start.len() + end.len() && text.starts_with(start) && text.ends_with(end)
        }
    }
}

impl CorsRules {
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        serde_json::from_slice(text).ok()
    }

    pub(crate) fn to_bytes(&self) -> S3Result<Bytes> {
        serde_json::to_vec(self).map(Bytes::from).map_err(S3Error::internal_error)
    }

    pub(crate) fn from_s3(rules: Vec<CORSRule>) -> S3Result<Self> {
        if rules.is_empty() || rules.len() > RULES_MAX {
            return Err(s3_error!(MalformedXML, "A CORS configuration has 1 to 100 rules."));
        }
        let rules = rules.into_iter().map(|rule| {
            if let Some(method) =
                rule.allowed_methods.iter().find(|method| !METHODS.contains(&method.as_str()))
            {
                return Err(s3_error!(
                    InvalidRequest,
                    "Found unsupported HTTP method in CORS config. Unsupported method is {method}"
                ));
            }
            let headers = rule.allowed_headers.unwrap_or_default();
            if let Some(pattern) =
                rule.allowed_origins.iter().chain(&headers).find(|pattern| pattern.matches('*').count() > 1)
            {
                return Err(s3_error!(InvalidRequest, "{pattern} can not have more than one wildcard."));
            }
            Ok(Rule {
                id: rule.id,
                origins: rule.allowed_origins,
                methods: rule.allowed_methods,
                headers,
                expose: rule.expose_headers.unwrap_or_default(),
                max_age_s: rule.max_age_seconds,
            })
        });
        Ok(Self(rules.collect::<S3Result<_>>()?))
    }

    pub(crate) fn to_s3(&self) -> Vec<CORSRule> {
        let some = |list: &Vec<String>| Some(list.clone()).filter(|list| !list.is_empty());
        let rule = |rule: &Rule| CORSRule {
            allowed_headers: some(&rule.headers),
            allowed_methods: rule.methods.clone(),
            allowed_origins: rule.origins.clone(),
            expose_headers: some(&rule.expose),
            id: rule.id.clone(),
            max_age_seconds: rule.max_age_s,
        };
        self.0.iter().map(rule).collect()
    }

    /// The first rule that allows the request.
    pub(crate) fn matching(&self, cross: &Cross) -> Option<&Rule> {
        let origin = cross.origin.to_str().ok()?;
        self.0.iter().find(|rule| {
            rule.origins.iter().any(|pattern| fits(pattern, origin))
                && rule.methods.contains(&cross.method)
                && cross.headers.iter().all(|name| rule.allows_header(name))
        })
    }
}

impl Rule {
    /// Whether the rule allows a request header; letter case does not matter. `name` is in lower case.
    fn allows_header(&self, name: &str) -> bool {
        self.headers.iter().any(|pattern| fits(&pattern.to_ascii_lowercase(), name))
    }

    /// Adds the headers that tell the browser what is allowed.
    pub(crate) fn answer(&self, cross: &Cross, headers: &mut HeaderMap) {
        let mut set = |name, text: &str| {
            if let Ok(value) = HeaderValue::from_str(text) {
                headers.insert(name, value);
            }
        };
        let any = self.origins.iter().any(|pattern| pattern == "*");
        if !any {
            set(header::ACCESS_CONTROL_ALLOW_CREDENTIALS, "true");
        }
        set(header::ACCESS_CONTROL_ALLOW_METHODS, &self.methods.join(", "));
        if !cross.headers.is_empty() {
            set(header::ACCESS_CONTROL_ALLOW_HEADERS, &cross.headers.join(", "));
        }
        if !self.expose.is_empty() {
            set(header::ACCESS_CONTROL_EXPOSE_HEADERS, &self.expose.join(", "));
        }
        if let Some(max_age_s) = self.max_age_s {
            set(header::ACCESS_CONTROL_MAX_AGE, &max_age_s.to_string());
        }
        set(header::VARY, "Origin, Access-Control-Request-Headers, Access-Control-Request-Method");
        let origin = if any { HeaderValue::from_static("*") } else { cross.origin.clone() };
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(origin: &str, method: &str, wanted: &str, expected: bool) {
        let rule = CORSRule {
            allowed_headers: Some(vec!["x-amz-*".to_owned(), "Content-Type".to_owned()]),
            allowed_methods: vec!["GET".to_owned(), "PUT".to_owned()],
            allowed_origins: vec!["https://*.example.com".to_owned()],
            expose_headers: None,
            id: None,
            max_age_seconds: Some(60),
        };
        let rules = CorsRules::from_s3(vec![rule]).unwrap();
        let rules = CorsRules::parse(&rules.to_bytes().unwrap()).unwrap();
        let told = rules.to_s3();
        assert_eq!(told[0].allowed_headers.as_deref().unwrap(), ["x-amz-*", "Content-Type"], "as it was put");
        let mut headers = HeaderMap::new();
        headers.insert(header::ORIGIN, origin.parse().unwrap());
        headers.insert(header::ACCESS_CONTROL_REQUEST_METHOD, method.parse().unwrap());
        headers.insert(header::ACCESS_CONTROL_REQUEST_HEADERS, wanted.parse().unwrap());
        let cross = Cross::of(&Method::OPTIONS, &headers).unwrap();
        let rule = rules.matching(&cross);
        assert_eq!(rule.is_some(), expected);
        if let Some(rule) = rule {
            let mut answer = HeaderMap::new();
            rule.answer(&cross, &mut answer);
            assert_eq!(answer[header::ACCESS_CONTROL_ALLOW_ORIGIN], origin);
            assert_eq!(answer[header::ACCESS_CONTROL_MAX_AGE], "60");
        }
    }

    #[test]
    fn origins_methods_and_headers_must_all_fit() {
        check("https://a.example.com", "PUT", "content-type, X-Amz-Date", true);
        check("https://a.example.com", "PUT", "", true);
        check("https://example.org", "PUT", "", false);
        check("https://a.example.com", "DELETE", "", false);
        check("https://a.example.com", "GET", "authorization", false);
    }

    #[test]
    fn the_method_may_be_named_in_any_request() {
        let mut headers = HeaderMap::new();
        headers.insert(header::ORIGIN, "https://a.example".parse().unwrap());
        let method = |method, headers: &HeaderMap| Cross::of(&method, headers).map(|cross| cross.method);
        assert_eq!(method(Method::GET, &headers).as_deref(), Some("GET"));
        assert_eq!(method(Method::OPTIONS, &headers), None);
        headers.insert(header::ACCESS_CONTROL_REQUEST_METHOD, "PUT".parse().unwrap());
        assert_eq!(method(Method::GET, &headers).as_deref(), Some("PUT"));
        assert_eq!(method(Method::OPTIONS, &headers).as_deref(), Some("PUT"));
    }

    #[test]
    fn rules_that_make_no_sense_are_refused() {
        let rule = |method: &str, origin: &str| CORSRule {
            allowed_headers: None,
            allowed_methods: vec![method.to_owned()],
            allowed_origins: vec![origin.to_owned()],
            expose_headers: None,
            id: None,
            max_age_seconds: None,
        };
        assert!(CorsRules::from_s3(vec![rule("PATCH", "*")]).is_err());
        assert!(CorsRules::from_s3(vec![rule("GET", "*.*")]).is_err());
        assert!(CorsRules::from_s3(Vec::new()).is_err());
        assert!(CorsRules::from_s3(vec![rule("GET", "*")]).is_ok());
    }
}
