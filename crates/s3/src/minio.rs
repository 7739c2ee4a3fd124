//! Health checks of load balancers, at `/live` and `/ready` and at MinIO's addresses; and the administration of MinIO's tools, which is not
//! supported.

use std::time::Duration;

use base::Ino;
use hyper::{Method, Response, StatusCode};
use s3s::{Body, s3_error};

use crate::gate::{Services, refuse};

/// How long the filesystem may take to answer before it counts as not ready.
const READY_TIME_MAX: Duration = Duration::from_secs(5);

/// The question in a request to such an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MinioQuestion {
    /// Whether the process runs.
    IsLive,
    /// Whether users and keys are known and the filesystem answers.
    IsReady,
    /// Administration by MinIO tools.
    Admin,
}

impl MinioQuestion {
    /// The question in a request; `None` for a request of S3. `bucket` and `key` are the address in the terms of S3.
    pub(crate) fn of(method: &Method, bucket: &str, key: &str) -> Option<Self> {
        let reads = [Method::GET, Method::HEAD].contains(method);
        match (bucket, key) {
            ("live", "") if reads => return Some(Self::IsLive),
            ("ready", "") if reads => return Some(Self::IsReady),
            ("minio", _) => {}
            _ => return None,
        }
        match key {
            "health/live" if reads => Some(Self::IsLive),
            "health/ready" | "health/cluster" | "health/cluster/read" if reads => Some(Self::IsReady),
            _ if key.starts_with("admin/v") => Some(Self::Admin),
            _ => None,
        }
    }

    /// The operation's name in the audit log.
    pub(crate) fn operation(self) -> &'static str {
        match self {
            Self::IsLive | Self::IsReady => "HealthCheck",
            Self::Admin => "MinioAdmin",
        }
    }

    pub(crate) async fn answer(self, core: &Services) -> Response<Body> {
        match self {
            Self::IsLive => Response::new(Body::empty()),
            Self::IsReady => {
                let asked = tokio::time::timeout(READY_TIME_MAX, core.client.getattr(Ino::ROOT)).await;
                let mut response = Response::new(Body::empty());
                if !matches!(asked, Ok(Ok(_))) || !core.identities.is_current() {
                    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
                }
                response
            }
            Self::Admin => refuse(s3_error!(
                NotImplemented,
                "This is Forebay, not MinIO: mc admin does not work here. Use forebay status, user, key and policy on the node."
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(method: Method, bucket: &str, key: &str, expected: Option<MinioQuestion>) {
        assert_eq!(MinioQuestion::of(&method, bucket, key), expected, "{method} {bucket} {key}");
    }

    #[test]
    fn addresses_of_minio_are_known() {
        use MinioQuestion::{Admin, IsLive, IsReady};
        check(Method::GET, "minio", "health/live", Some(IsLive));
        check(Method::HEAD, "minio", "health/ready", Some(IsReady));
        check(Method::GET, "minio", "health/cluster", Some(IsReady));
        check(Method::GET, "live", "", Some(IsLive));
        check(Method::HEAD, "ready", "", Some(IsReady));
        check(Method::PUT, "ready", "", None);
        check(Method::GET, "ready", "key", None);
        check(Method::PUT, "minio", "health/live", None);
        check(Method::GET, "minio", "health/live/x", None);
        check(Method::GET, "minio2", "health/live", None);
        check(Method::GET, "minio", "admin/v3/info", Some(Admin));
        check(Method::PUT, "minio", "admin/v4/x", Some(Admin));
        check(Method::GET, "minio", "administration", None);
    }
}
