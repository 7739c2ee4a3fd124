//! Requests that the protocol library does not know: the token service, and GETs of several ranges.

use std::sync::Arc;

use async_trait::async_trait;
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::http::Extensions;
use hyper::{Method, StatusCode, Uri};
use s3s::route::S3Route;
use s3s::{Body, S3Request, S3Response, S3Result, s3_error};

use crate::access::context;
use crate::accounts::Accounts;
use crate::gate::Services;
use crate::identity::{PolicyFacts, PolicyRequest};
use crate::multirange::RangeRoute;
use crate::sts;

/// Longest form of the token service: a session policy and a few names.
const FORM_BYTES_MAX: usize = 64 << 10;

/// Passes a request to the route that serves it.
pub(crate) struct Routes {
    pub(crate) ranges: RangeRoute,
    pub(crate) tokens: TokenRoute,
}

impl Routes {
    fn route(&self, method: &Method) -> &dyn S3Route {
        if method == Method::POST { &self.tokens } else { &self.ranges }
    }
}

#[async_trait]
impl S3Route for Routes {
    fn is_match(&self, method: &Method, uri: &Uri, headers: &HeaderMap, extensions: &mut Extensions) -> bool {
        self.route(method).is_match(method, uri, headers, extensions)
    }

    async fn check_access(&self, request: &mut S3Request<Body>) -> S3Result<()> {
        self.route(&request.method.clone()).check_access(request).await
    }

    async fn call(&self, request: S3Request<Body>) -> S3Result<S3Response<Body>> {
        self.route(&request.method.clone()).call(request).await
    }
}

/// Serves forms that are posted to the root.
pub(crate) struct TokenRoute {
    pub(crate) core: Arc<Services>,
    pub(crate) accounts: Arc<Accounts>,
}

#[async_trait]
impl S3Route for TokenRoute {
    fn is_match(&self, method: &Method, uri: &Uri, headers: &HeaderMap, _: &mut Extensions) -> bool {
        let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        method == Method::POST
            && uri.path() == "/"
            && kind.is_some_and(|kind| kind.starts_with("application/x-www-form-urlencoded"))
    }

    /// The token service itself checks access.
    async fn check_access(&self, request: &mut S3Request<Body>) -> S3Result<()> {
        match (&request.credentials, request.service.as_deref()) {
            (Some(_), Some("sts")) => Ok(()),
            (Some(_), _) => {
                Err(s3_error!(SignatureDoesNotMatch, "The request must be signed for the service sts."))
            }
            (None, _) => Err(s3_error!(AccessDenied, "Access Denied: requests must be signed.")),
        }
    }

    async fn call(&self, mut request: S3Request<Body>) -> S3Result<S3Response<Body>> {
        let context = context(&request.extensions)?;
        let access_key = request.credentials.as_ref().map(|credentials| credentials.access_key.as_str());
        let access_key = access_key.unwrap_or_default();
        let identity = self.core.identify(&context, access_key, &request.uri, &request.headers)?;
        let form = match request.input.bytes() {
            Some(form) => form,
            None => {
                let form = request.input.store_all_limited(FORM_BYTES_MAX).await;
                form.map_err(|error| s3_error!(InvalidRequest, "The form cannot be read: {error}"))?
            }
        };
        let client = PolicyRequest {
            identity: Some(&identity),
            action: "",
            bucket: "",
            key: None,
            owns_bucket: false,
            bucket_policy: None,
            source_ip: Some(context.origin.ip),
            is_secure: context.origin.is_secure,
            now_s: self.core.env.clock.wall_ns() / 1_000_000_000,
            prefix: None,
            delimiter: None,
            max_keys: None,
            more: PolicyFacts::default(),
        };
        let answer = sts::answer(&self.accounts, &identity, &client, &form, &context.request_id);
        context.facts.lock().expect("no holder of this lock panics").operation = answer.operation;
        let mut response = S3Response::new(Body::from(answer.body));
        response.status = StatusCode::from_u16(answer.status).ok();
        response.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/xml"));
        Ok(response)
    }
}
