use std::sync::Mutex;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use wire::store::MovePace;

use super::settings::tests::settings;
use super::*;

/// A server that gives prepared answers in turn, repeats the last one, and records its requests.
struct Server {
    asked: Arc<Mutex<Vec<String>>>,
    store: Arc<S3Store>,
    task: JoinHandle<()>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn read_request(stream: &mut TcpStream) -> Option<String> {
    let mut bytes = Vec::new();
    loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            let text = String::from_utf8_lossy(&bytes).into_owned();
            let length = text.lines().find_map(|line| line.strip_prefix("content-length: "));
            let length = length.map_or(0, |length| length.parse().unwrap());
            if bytes.len() >= end + 4 + length {
                return Some(text);
            }
        }
        let mut more = [0; 4096];
        match stream.read(&mut more).await {
            Ok(0) | Err(_) => return None,
            Ok(len) => bytes.extend_from_slice(&more[..len]),
        }
    }
}

async fn serve(listener: TcpListener, answers: Vec<String>, asked: Arc<Mutex<Vec<String>>>) {
    let mut turn = 0;
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        while let Some(request) = read_request(&mut stream).await {
            asked.lock().unwrap().push(request);
            let answer = &answers[turn.min(answers.len() - 1)];
            turn += 1;
            if answer == SILENCE {
                std::future::pending::<()>().await;
            }
            // An empty answer is a broken connection.
            if answer.is_empty() || stream.write_all(answer.as_bytes()).await.is_err() {
                break;
            }
        }
    }
}

fn store_at(port: u16) -> Arc<S3Store> {
    let mut settings = settings();
    settings.address.port = port;
    S3Store::new(Env::real(), settings).unwrap()
}

impl Server {
    async fn start(answers: &[&str]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let answers = answers.iter().map(|answer| (*answer).to_owned()).collect();
        let task = tokio::spawn(serve(listener, answers, asked.clone()));
        let store = store_at(port);
        Self { asked, store, task }
    }

    fn first_lines(&self) -> Vec<String> {
        let asked = self.asked.lock().unwrap();
        asked.iter().map(|request| request.lines().next().unwrap().to_owned()).collect()
    }
}

/// No answer, while the connection stays open.
const SILENCE: &str = "...";
const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
const BUSY: &str = "HTTP/1.1 503 Slow\r\ncontent-length: 21\r\n\r\n<Code>SlowDown</Code>";
const PART: &str = "HTTP/1.1 206 Part\r\ncontent-length: 3\r\n\r\nabc";

fn key() -> String {
    "B_1/k".to_owned()
}

#[tokio::test]
async fn an_object_goes_out_whole_and_signed() {
    let server = Server::start(&[OK]).await;
    let parts = vec![Bytes::from_static(b"one "), Bytes::from_static(b"two")];
    server.store.put(key(), parts.into()).await.unwrap();
    let request = server.asked.lock().unwrap()[0].clone();
    assert!(request.starts_with("PUT /Bucket/B_1/k HTTP/1.1\r\n"), "{request}");
    assert!(request.contains("content-length: 7\r\n") && request.ends_with("\r\n\r\none two"), "{request}");
    assert!(request.contains("authorization: AWS4-HMAC-SHA256 ") && request.contains("user-agent: Forebay/"));
}

/// Rests a millisecond after every 64 KiB.
struct Slow;

impl MovePace for Slow {
    fn rest_after(&self, bytes: u64) -> Duration {
        Duration::from_millis(bytes >> 16)
    }
}

#[tokio::test]
async fn an_object_that_is_not_urgent_goes_out_whole_with_rests() {
    let server = Server::start(&[OK]).await;
    let parts: Vec<Bytes> = vec![vec![b'a'; 1 << 20].into(), vec![b'b'; 300_000].into()];
    let began_ns = server.store.env.clock.boot_ns();
    let object = Outgoing { parts: parts.clone(), pace: Some(Arc::new(Slow)) };
    server.store.put(key(), object).await.unwrap();
    // Five rests of 4 ms before the last bytes.
    let took_ns = server.store.env.clock.boot_ns() - began_ns;
    assert!(took_ns >= 20_000_000, "{took_ns} ns");
    let request = server.asked.lock().unwrap()[0].clone();
    let sent = parts.concat();
    assert!(request.as_bytes().ends_with(&sent), "{} bytes came", request.len());
}

#[tokio::test]
async fn a_range_has_exactly_the_requested_bytes() {
    let server = Server::start(&[PART]).await;
    assert_eq!(server.store.get(key(), Some(5..8)).await.unwrap(), "abc");
    assert!(server.asked.lock().unwrap()[0].contains("range: bytes=5-7\r\n"));
    let whole = Server::start(&["HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc"]).await;
    assert!(matches!(whole.store.get(key(), Some(5..8)).await, Err(StoreError::Unexpected(_))));
    let longer = Server::start(&["HTTP/1.1 206 Part\r\ncontent-length: 4\r\n\r\nabcd"]).await;
    assert!(matches!(longer.store.get(key(), Some(5..8)).await, Err(StoreError::Unexpected(_))));
}

#[tokio::test]
async fn passing_errors_are_tried_again_and_others_are_not() {
    let server = Server::start(&[BUSY, "", "HTTP/1.1 206 Part\r\ncontent-length: 2\r\n\r\nab", PART]).await;
    assert_eq!(server.store.get(key(), Some(0..3)).await.unwrap(), "abc");
    assert_eq!(server.first_lines().len(), 4);
    let denied = Server::start(&["HTTP/1.1 403 No\r\ncontent-length: 0\r\n\r\n", OK]).await;
    assert!(matches!(denied.store.put(key(), Outgoing::default()).await, Err(StoreError::Denied(_))));
    assert_eq!(denied.first_lines().len(), 1);
}

/// Makes the store count as down for long.
fn goes_down(store: &S3Store) {
    for _ in 0..3 {
        store.traffic.checked(Err(StoreError::Unavailable("why".to_owned())));
    }
    assert_eq!(store.health().up, Some(false));
    store.traffic.went_down_long_ago();
}

#[tokio::test]
async fn a_store_that_is_down_gets_each_read_once() {
    let server = Server::start(&[BUSY, PART, PART]).await;
    goes_down(&server.store);
    assert!(matches!(server.store.get(key(), Some(0..3)).await, Err(StoreError::Busy(_))));
    assert_eq!(server.first_lines().len(), 1);
    // Its answer is taken, and shows that it is back.
    assert_eq!(server.store.get(key(), Some(0..3)).await.unwrap(), "abc");
    assert_eq!(server.store.health().up, Some(true));
    // A store that may be back in a moment is waited for.
    let server = Server::start(&[BUSY, PART]).await;
    (0..3).for_each(|_| server.store.traffic.checked(Err(StoreError::Unavailable("why".to_owned()))));
    assert_eq!(server.store.get(key(), Some(0..3)).await.unwrap(), "abc");
    // Writes, for which no reader waits, are still tried again.
    let server = Server::start(&[BUSY, OK]).await;
    goes_down(&server.store);
    server.store.put(key(), Outgoing::default()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_down_and_silent_is_not_waited_for() {
    let server = Server::start(&[SILENCE]).await;
    goes_down(&server.store);
    let began = tokio::time::Instant::now();
    let error = server.store.get(key(), Some(0..64 << 20)).await.unwrap_err();
    let took = began.elapsed();
    assert!(took <= Duration::from_secs(5), "{error} after {took:?}");
}

#[tokio::test]
async fn a_read_is_not_tried_again_after_the_store_goes_down() {
    let server = Server::start(&[BUSY, BUSY, PART]).await;
    let get = server.store.get(key(), Some(0..3));
    let down = async {
        while server.first_lines().is_empty() {
            tokio::task::yield_now().await;
        }
        goes_down(&server.store);
    };
    let (got, ()) = futures_util::future::join(get, down).await;
    assert!(matches!(got, Err(StoreError::Busy(_))), "{got:?}");
    assert!(server.first_lines().len() <= 2);
}

#[tokio::test]
async fn removing_a_missing_object_succeeds_unless_the_bucket_is_missing() {
    let missing = "HTTP/1.1 404 No\r\ncontent-length: 22\r\n\r\n<Code>NoSuchKey</Code>";
    let server = Server::start(&["HTTP/1.1 204 Gone\r\n\r\n", missing]).await;
    server.store.delete(key()).await.unwrap();
    server.store.delete(key()).await.unwrap();
    let bucket = "HTTP/1.1 404 No\r\ncontent-length: 25\r\n\r\n<Code>NoSuchBucket</Code>";
    let server = Server::start(&[bucket]).await;
    assert!(matches!(server.store.delete(key()).await, Err(StoreError::NotFound(_))));
}

#[tokio::test]
async fn a_validation_stores_reads_and_removes_and_stops_at_a_failure() {
    let byte = "HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nf";
    let server = Server::start(&[OK, byte, "HTTP/1.1 204 Gone\r\n\r\n"]).await;
    let cluster = base::ClusterId([0xab; 16]);
    let checks = server.store.validate(cluster, 0).await;
    assert!(checks.iter().all(|check| check.problem.is_none()), "{checks:?}");
    let verbs: Vec<_> = checks.iter().map(|check| check.verb.as_str()).collect();
    assert_eq!(verbs, ["PUT", "GET", "DELETE", "DELETE"]);
    assert_eq!(server.first_lines().len(), 4);

    let other = "HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\ng";
    let server = Server::start(&[OK, other, byte, "HTTP/1.1 204 Gone\r\n\r\n"]).await;
    let checks = server.store.validate(cluster, 0).await;
    assert!(checks.iter().all(|check| check.problem.is_none()), "one answer is damaged: {checks:?}");
    let server = Server::start(&[OK, other]).await;
    let checks = server.store.validate(cluster, 0).await;
    assert!(checks[1].problem.as_ref().unwrap().contains("other bytes"), "{checks:?}");

    let no = "HTTP/1.1 403 No\r\ncontent-length: 34\r\n\r\n<Code>SignatureDoesNotMatch</Code>\n";
    let server = Server::start(&[no]).await;
    let checks = server.store.validate(cluster, 0).await;
    assert_eq!(checks.len(), 1, "{checks:?}");
    let check = &checks[0];
    assert_eq!(check.problem.as_deref(), Some("refused: status 403, SignatureDoesNotMatch"));
    assert!(check.advice.as_ref().unwrap().contains("--auth-method"));
}

#[tokio::test]
async fn a_check_of_health_accepts_any_answer_but_about_the_bucket_and_the_key() {
    async fn check(code: &str) -> Result<(), StoreError> {
        let status = if code.starts_with("NoSuch") { 404 } else { 403 };
        let body = format!("<Code>{code}</Code>");
        let answer = format!("HTTP/1.1 {status} No\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        Server::start(&[&answer]).await.store.check_health().await
    }
    assert_eq!(check("NoSuchKey").await, Ok(()));
    assert_eq!(check("AccessDenied").await, Ok(()));
    assert!(matches!(check("NoSuchBucket").await, Err(StoreError::NotFound(_))));
    assert!(matches!(check("InvalidAccessKeyId").await, Err(StoreError::Denied(_))));
    assert!(matches!(check("ExpiredToken").await, Err(StoreError::Denied(_))));
}

#[tokio::test]
async fn a_refused_connection_is_reported_with_the_reason() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let store = store_at(port);
    let error = store.once(&Ask::new(Method::GET, key())).await.unwrap_err();
    assert!(error.to_string().contains("cannot connect"), "{error}");
}
