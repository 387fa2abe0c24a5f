//! HTTP of guests: where it may go, what it carries, how long it may take.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{
    Router,
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::IntoResponse,
    routing::{any, get, post},
};
use berth_host::reconcile::{Failure, Next};
use serde_json::json;

use crate::bench::*;

/// A server that counts what reaches it.
struct Server {
    address: SocketAddr,
    seen: Arc<AtomicUsize>,
    task: tokio::task::JoinHandle<()>,
}

impl Server {
    async fn start() -> Self {
        let seen = Arc::new(AtomicUsize::new(0));
        let router = Router::new()
            .route("/hello", get(async || "hello"))
            .route("/host", get(async |headers: HeaderMap| headers[header::HOST].to_str().expect("text").to_owned()))
            .route("/echo", post(async |body: String| body))
            .route("/elsewhere", get(async || (StatusCode::FOUND, [(header::LOCATION, "/hello")]).into_response()))
            .route("/big", get(async || vec![b'x'; (1 << 20) + 1]))
            .route("/full", get(async || vec![b'x'; 1 << 20]))
            .route("/stall", any(async || std::future::pending::<String>().await))
            .layer(axum::middleware::from_fn_with_state(
                seen.clone(),
                async |State(seen): State<Arc<AtomicUsize>>, request, next: axum::middleware::Next| {
                    seen.fetch_add(1, Ordering::SeqCst);
                    next.run(request).await
                },
            ));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let task = tokio::spawn(async move { axum::serve(listener, router).await.expect("serves") });
        Self { address, seen, task }
    }

    fn seen(&self) -> usize {
        self.seen.load(Ordering::SeqCst)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A bench whose guest may send to `http://mail.demo`, which leads to the server, and to the server's own address.
async fn bench(server: &Server, more: &str) -> Bench {
    let address = server.address;
    let component =
        claiming(&json!({ "hosts": ["$settings.url", format!("http://{address}"), "http://localhost:1", "http://claimed.demo"] }));
    let yaml = format!(
        "settings: {{url: 'http://mail.demo/x'}}\nallowedHosts: ['http://mail.demo', 'http://{address}', 'http://localhost:1', 'http://allowed.demo']\n{more}"
    );
    Bench::with(&component, &yaml, |config| config.resolve = vec![format!("mail.demo:80={address}").parse().expect("an entry")]).await
}

#[tokio::test]
async fn an_allowed_request_goes_out_and_its_answer_comes_back() {
    let server = Server::start().await;
    let bench = bench(&server, "").await;
    let status = bench.status(json!({ "do": "http", "url": "http://mail.demo/hello" })).await;
    assert_eq!((&status["code"], &status["body"]), (&json!(200), &json!("hello")));
    let status = bench.status(json!({ "do": "http", "url": "http://mail.demo/host" })).await;
    assert_eq!(status["body"], "mail.demo");
    let status = bench.status(json!({ "do": "http", "url": format!("http://{}/echo", server.address), "body": "é".repeat(5000) })).await;
    assert_eq!(status["body"].as_str().map(str::len), Some(10_000));
    let status = bench.status(json!({ "do": "http", "url": "http://mail.demo/full" })).await;
    assert_eq!(status["length"], 1 << 20);
}

#[tokio::test]
async fn redirects_are_the_guests_to_follow() {
    let server = Server::start().await;
    let status = bench(&server, "").await.status(json!({ "do": "http", "url": "http://mail.demo/elsewhere" })).await;
    assert_eq!((&status["code"], server.seen()), (&json!(302), 1));
}

#[tokio::test]
async fn what_is_not_both_claimed_and_allowed_is_denied_and_the_log_says_how_to_allow_it() {
    let events = Events::record();
    let server = Server::start().await;
    let bench = bench(&server, "").await;
    let port = server.address.port();
    for (url, words) in [
        (format!("http://{}.demo/", "long.".repeat(45)), "http://long.long."),
        ("http://claimed.demo/".to_owned(), "add http://claimed.demo:80 to `allowedHosts`"),
        ("http://allowed.demo/".into(), "does not ask for it"),
        ("http://other.demo/".into(), "http://other.demo:80"),
        ("https://mail.demo/".into(), "https://mail.demo:443"),
        ("http://mail.demo:81/".into(), "http://mail.demo:81"),
        (format!("http://mail.demo@127.0.0.1:{port}/"), "user or password"),
        (format!("http://localhost:{port}/"), "localhost"),
    ] {
        for body in [json!(null), json!("a body")] {
            let outcome = bench.run(json!({ "do": "http", "url": url, "body": body })).await.expect("the guest copes");
            assert_eq!(outcome.next, Next::Retry("ErrorCode::HttpRequestDenied".into()), "{url}");
            let last = events.of_guests().pop().expect("a line").to_string();
            assert!(last.contains(words), "{url}: {last}");
        }
    }
    assert_eq!(server.seen(), 0);
}

#[tokio::test]
async fn a_wildcard_covers_one_label_and_a_head_that_is_late_is_the_limit_of_the_first_byte() {
    let server = Server::start().await;
    let component = claiming(&json!({ "hosts": ["http://*.demo.io"] }));
    let yaml = "allowedHosts: ['http://*.demo.io']\nlimits: {httpFirstByte: 100ms}";
    let resolve = |name: &str| format!("{name}:80={}", server.address).parse().expect("an entry");
    let set = |config: &mut berth_host::plugin::RuntimeConfig| config.resolve = vec![resolve("a.demo.io"), resolve("b.a.demo.io")];
    let bench = Bench::with(&component, yaml, set).await;
    assert_eq!(bench.status(json!({ "do": "http", "url": "http://a.demo.io/hello" })).await["code"], 200);
    for url in ["http://b.a.demo.io/hello", "http://demo.io/hello", "http://*.demo.io/hello"] {
        let outcome = bench.run(json!({ "do": "http", "url": url })).await.expect("the guest copes");
        assert_eq!(outcome.next, Next::Retry("ErrorCode::HttpRequestDenied".into()), "{url}");
    }
    let began = Instant::now();
    let outcome = bench.run(json!({ "do": "http", "url": "http://a.demo.io/stall" })).await.expect("the guest copes");
    let late = "ErrorCode::HttpResponseTimeout (there was no answer from http://a.demo.io:80 within the 100ms that it may take \
                (`limits.httpFirstByte` in plugin.yaml))";
    assert_eq!(outcome.next, Next::Retry(late.into()));
    assert!(began.elapsed() < Duration::from_secs(5), "the default is 5 s beside 2 s for the connection");
}

#[tokio::test]
async fn a_connection_that_is_late_is_a_limit_that_the_sentence_names() {
    // The kernel takes the connection, and nobody ever answers to the handshake.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = silent.local_addr().expect("bound");
    let component = claiming(&json!({ "hosts": ["https://mail.demo", "http://mail.demo"] }));
    let yaml = "allowedHosts: ['https://mail.demo', 'http://mail.demo']\nlimits: {httpConnect: 150ms}";
    let server = Server::start().await;
    let ways = [format!("mail.demo:443={address}"), format!("mail.demo:80={}", server.address)];
    let set = |config: &mut berth_host::plugin::RuntimeConfig| config.resolve = ways.map(|way| way.parse().expect("an entry")).to_vec();
    let bench = Bench::with(&component, yaml, set).await;
    let began = Instant::now();
    let outcome = bench.run(json!({ "do": "http", "url": "https://mail.demo/" })).await.expect("the guest copes");
    let late = "ErrorCode::ConnectionTimeout (there was no connection to https://mail.demo:443 within the 150ms that it may take \
                (`limits.httpConnect` in plugin.yaml))";
    assert_eq!(outcome.next, Next::Retry(late.into()));
    assert!(began.elapsed() < Duration::from_secs(2), "the default is 2 s");
    assert_eq!(bench.status(json!({ "do": "http", "url": "http://mail.demo/hello" })).await["code"], 200);
}

#[tokio::test]
async fn methods_that_show_a_request_or_open_a_tunnel_are_denied() {
    let events = Events::record();
    let server = Server::start().await;
    let bench = bench(&server, "").await;
    for method in ["TRACE", "TRACK", "track", "CONNECT"] {
        let outcome = bench.run(json!({ "do": "http", "url": "http://mail.demo/hello", "method": method })).await.expect("the guest copes");
        assert_eq!(outcome.next, Next::Retry("ErrorCode::HttpRequestDenied".into()), "{method}");
        let last = events.of_guests().pop().expect("a line").to_string();
        assert!(last.contains(&format!("denied a {method} request")), "{last}");
    }
    assert_eq!(server.seen(), 0);
    bench.run(json!({ "do": "http", "url": "http://mail.demo/hello", "method": "PURGE" })).await.expect("sent");
    assert_eq!(server.seen(), 1);
}

/// What a server gets of a request whose run ends in this way, to the end of the connection.
async fn got(end: &str) -> String {
    use tokio::io::AsyncReadExt;
    let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = server.local_addr().expect("bound");
    let url = format!("http://{address}/");
    let bench =
        Bench::with(&claiming(&json!({ "hosts": [url] })), &format!("allowedHosts: ['http://{address}']\ntimeout: 1s"), |_| {}).await;
    let read = async {
        let (mut connection, _) = server.accept().await.expect("a connection");
        let mut text = Vec::new();
        // A connection that is reset has ended too.
        let _ = connection.read_to_end(&mut text).await;
        String::from_utf8_lossy(&text).into_owned()
    };
    let (text, _) = tokio::join!(read, bench.run(json!({ "do": "half", "url": url, "end": end, "ms": 100 })));
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_a_request_is_never_ended_as_if_it_were_whole() {
    for end in ["return", "trap", "hang"] {
        let text = got(end).await;
        assert!(text.contains("half of it") && !text.contains("0\r\n\r\n"), "{end}: {text:?}");
    }
}

#[tokio::test]
async fn a_name_that_leads_to_this_machine_is_denied_although_it_is_allowed() {
    let events = Events::record();
    let server = Server::start().await;
    let outcome = bench(&server, "").await.run(json!({ "do": "http", "url": "http://localhost:1/" })).await.expect("the guest copes");
    assert_eq!(outcome.next, Next::Retry("ErrorCode::DestinationIpProhibited".into()));
    assert!(events.of_guests().pop().is_some_and(|last| last.to_string().contains("--resolve localhost:1=")), "{:?}", events.messages());
}

#[tokio::test]
async fn requests_of_a_run_and_the_size_of_an_answer_are_limited() {
    let server = Server::start().await;
    let bench = bench(&server, "").await;
    let status = bench.status(json!({ "do": "httpflood", "url": "http://mail.demo/hello", "times": 20 })).await;
    assert_eq!((&status["code"], server.seen()), (&json!(200), 20));
    let failure = bench.failure(json!({ "do": "httpflood", "url": "http://mail.demo/hello", "times": 21 })).await;
    assert!(
        matches!(&failure, Failure::Limit(sentence) if sentence.contains("20 HTTP requests that a run may (`limits.httpRequests` in plugin.yaml)")),
        "{failure}"
    );
    assert_eq!(server.seen(), 40);
    let failure = bench.failure(json!({ "do": "http", "url": "http://mail.demo/big" })).await;
    assert!(
        matches!(&failure, Failure::Limit(sentence) if sentence.contains("mail.demo is larger than the 1Mi that one may have (`limits.httpResponse`")),
        "{failure}"
    );
    let bench = self::bench(&server, "limits: {httpRequests: 21, httpResponse: 2Mi}").await;
    bench.status(json!({ "do": "httpflood", "url": "http://mail.demo/hello", "times": 21 })).await;
    assert_eq!(bench.status(json!({ "do": "http", "url": "http://mail.demo/big" })).await["length"], (1 << 20) + 1);
}

/// Takes one request, never answers it or drips an answer, and ends when the client has closed the connection.
async fn until_closed(server: &tokio::net::TcpListener, drips: bool) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let (connection, _) = server.accept().await.expect("a connection");
    let (mut requests, mut answers) = connection.into_split();
    let mut request = Vec::new();
    let answer = async {
        if drips && answers.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n").await.is_ok() {
            while answers.write_all(b"x").await.is_ok() {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        // It is the end of what the client sends that counts.
        std::future::pending::<()>().await
    };
    tokio::select! {
        // A connection that is reset has ended too.
        _ = requests.read_to_end(&mut request) => {}
        () = answer => {}
    }
    assert!(request.starts_with(b"GET / "), "{:?}", String::from_utf8_lossy(&request));
}

#[tokio::test]
async fn an_answer_that_never_comes_or_drips_ends_with_the_call() {
    let (server, slow) = (Server::start().await, tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port"));
    let component = claiming(&json!({ "hosts": ["http://mail.demo", "http://slow.demo"] }));
    let yaml = "allowedHosts: ['http://mail.demo', 'http://slow.demo']\ntimeout: 400ms";
    let ways = [format!("mail.demo:80={}", server.address), format!("slow.demo:80={}", slow.local_addr().expect("bound"))];
    let set = |config: &mut berth_host::plugin::RuntimeConfig| config.resolve = ways.map(|way| way.parse().expect("an entry")).to_vec();
    let bench = Bench::with(&component, yaml, set).await;
    for drips in [false, true] {
        let run = bench.run(json!({ "do": "http", "url": "http://slow.demo/" }));
        // Well before a connection without work would be closed (10 s).
        let ended = tokio::time::timeout(Duration::from_secs(8), async { tokio::join!(run, until_closed(&slow, drips)) }).await;
        match ended.expect("the call ends, and its connection is closed").0 {
            Err(Failure::Deadline(_)) => {}
            Ok(outcome) => assert_eq!(outcome.next, Next::Retry("ErrorCode::HttpResponseTimeout".into()), "{drips}: no limit of ours"),
            Err(other) => panic!("{drips}: {other}"),
        }
    }
    bench.status(json!({ "do": "http", "url": "http://mail.demo/hello" })).await;
}

#[tokio::test]
async fn a_lost_lease_aborts_the_request_in_flight_and_sends_no_other() {
    let server = Server::start().await;
    let bench = bench(&server, "").await;
    let close = async {
        while server.seen() == 0 {
            tokio::task::yield_now().await;
        }
        bench.gate.close();
    };
    let (result, ()) = tokio::join!(bench.run(json!({ "do": "http", "url": "http://mail.demo/stall" })), close);
    assert_eq!(result, Err(Failure::Fenced));
    assert_eq!(bench.run(json!({ "do": "http", "url": "http://mail.demo/hello" })).await, Err(Failure::Fenced));
    assert_eq!(server.seen(), 1);
}

#[tokio::test]
async fn a_refused_connection_is_an_error_that_the_guest_can_retry() {
    let server = Server::start().await;
    let bench = bench(&server, "").await;
    drop(server);
    tokio::task::yield_now().await;
    let outcome = bench.run(json!({ "do": "http", "url": "http://mail.demo/hello" })).await.expect("the guest copes");
    assert_eq!(outcome.next, Next::Retry("ErrorCode::ConnectionRefused".into()));
}
