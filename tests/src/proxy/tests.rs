//! The fault proxy in front of a small upstream of the test's own.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use axum::routing::{get, patch};
use tokio::sync::mpsc;

use super::*;
use crate::{client, eventually::eventually};

/// An upstream that counts patches and whose watch sends what the test gives it.
struct Upstream {
    proxy: Proxy,
    client: client::Client,
    _server: Server,
    patches: Arc<AtomicUsize>,
    events: mpsc::UnboundedSender<String>,
}

async fn upstream() -> Upstream {
    let patches = Arc::new(AtomicUsize::new(0));
    let count = patches.clone();
    let (events, lines) = mpsc::unbounded_channel::<String>();
    let lines = Arc::new(tokio::sync::Mutex::new(lines));
    let watch = async move || {
        let lines = lines.clone().lock_owned().await;
        Body::from_stream(futures::stream::unfold(lines, |mut lines| async {
            let line = lines.recv().await?;
            Some((Ok::<_, std::io::Error>(line), lines))
        }))
    };
    let router = Router::new()
        .route("/api/v1/things", get(watch))
        .route("/api/v1/namespaces/a/things/b", get(|headers: HeaderMap| async move { format!("{:?}", headers.get("authorization")) }))
        .route(
            "/api/v1/namespaces/a/things/b/status",
            patch(|body: String| async move {
                count.fetch_add(1, Ordering::Relaxed);
                body
            }),
        );
    let server = Server::start(([127, 0, 0, 1], 0).into(), router).await.expect("listens");
    let proxy = Proxy::of_back_end(server.addr()).await.expect("starts");
    Upstream { proxy, client: client::Client::new(), _server: server, patches, events }
}

impl Upstream {
    async fn get(&self) -> anyhow::Result<client::Answer> {
        let url = format!("{}/api/v1/namespaces/a/things/b", self.proxy.url());
        self.client.send(axum::http::Method::GET, &url, &[("authorization", "Bearer t")], Bytes::new()).await
    }

    async fn patch(&self) -> anyhow::Result<client::Answer> {
        let url = format!("{}/api/v1/namespaces/a/things/b/status?x=y", self.proxy.url());
        self.client.send(axum::http::Method::PATCH, &url, &[], r#"{"a":1}"#.into()).await
    }

    /// The lines of a watch through the proxy; an `Err` if it breaks.
    async fn watch(&self) -> mpsc::UnboundedReceiver<Result<String, String>> {
        let url: Uri = format!("{}/api/v1/things?watch=true", self.proxy.url()).parse().expect("a URL");
        let client: Client<HttpConnector, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
        let mut body = client.get(url).await.expect("answers").into_body().into_data_stream();
        let (lines, received) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Some(chunk) = futures::StreamExt::next(&mut body).await {
                let chunk = chunk.map(|chunk| String::from_utf8_lossy(&chunk).into_owned()).map_err(|error| error.to_string());
                if lines.send(chunk).is_err() {
                    return;
                }
            }
        });
        received
    }
}

const SHORT: Duration = Duration::from_millis(150);

#[tokio::test]
async fn a_request_passes_with_its_token_and_is_recorded_with_its_answer() {
    let upstream = upstream().await;
    assert_eq!(upstream.get().await.expect("answered").text(), r#"Some("Bearer t")"#);
    assert_eq!(upstream.patch().await.expect("answered").text(), r#"{"a":1}"#);
    let entries = upstream.proxy.entries();
    assert_eq!(entries[0].seen.bearer(), Some("t"));
    assert_eq!(entries[1].to_string(), "Patch /api/v1/namespaces/a/things/b/status?x=y -> Answered(200)");
    assert_eq!((entries[1].seen.json()["a"].as_u64(), entries[1].seen.writes(), entries[0].seen.writes()), (Some(1), true, false));
    assert_eq!(upstream.proxy.since(1).len(), 1);
}

#[tokio::test]
async fn a_rule_acts_on_its_verb_and_path_a_number_of_times_and_the_newest_first() {
    let upstream = upstream().await;
    let proxy = &upstream.proxy;
    let busy =
        proxy.rule(Rule::on(Verb::Patch, Effect::Answer(Answer::failure(429, "TooManyRequests").retry_after(7))).path("/status").times(2));
    let first = proxy.rule(Rule::any(Effect::Answer(Answer::new(502, "text/html", "<html>"))).when(|seen| seen.query == "x=y").times(1));
    assert_eq!(upstream.get().await.expect("answered").status, 200);
    let answers = [upstream.patch().await, upstream.patch().await, upstream.patch().await, upstream.patch().await];
    let answers = answers.map(|answer| answer.expect("answered"));
    assert_eq!(answers.each_ref().map(|answer| answer.status), [502, 429, 429, 200]);
    assert_eq!((answers[1].headers["retry-after"].as_bytes(), answers[1].json()["code"].as_u64()), (b"7".as_slice(), Some(429)));
    assert_eq!((first.hits(), busy.hits(), upstream.patches.load(Ordering::Relaxed)), (1, 2, 1));
}

#[tokio::test]
async fn closed_and_black_holed_requests_do_not_reach_the_server_and_committed_ones_do() {
    let upstream = upstream().await;
    let rule = upstream.proxy.rule(Rule::on(Verb::Patch, Effect::Close));
    assert!(upstream.patch().await.is_err());
    rule.release();
    let rule = upstream.proxy.rule(Rule::on(Verb::Patch, Effect::BlackHole));
    assert!(tokio::time::timeout(SHORT, upstream.patch()).await.is_err());
    rule.release();
    assert_eq!(upstream.patches.load(Ordering::Relaxed), 0);
    let _rule = upstream.proxy.rule(Rule::on(Verb::Patch, Effect::CommitThenClose));
    assert!(upstream.patch().await.is_err());
    assert_eq!(upstream.patches.load(Ordering::Relaxed), 1);
    let outcomes: Vec<_> = upstream.proxy.entries().iter().map(|entry| entry.outcome).collect();
    assert_eq!(outcomes, [Outcome::Closed, Outcome::Unanswered, Outcome::Dropped(200)]);
}

#[tokio::test]
async fn a_held_request_goes_on_when_released_and_never_if_its_client_left() {
    let upstream = upstream().await;
    let held = upstream.proxy.rule(Rule::on(Verb::Patch, Effect::Hold));
    assert!(tokio::time::timeout(SHORT, upstream.patch()).await.is_err());
    let (answer, ()) = tokio::join!(upstream.patch(), async {
        held.reached(2).await;
        let one = async || if held.holding() == 1 { Ok(()) } else { Err("the one whose client left is held too") };
        eventually(Duration::from_secs(5), one).await;
        assert_eq!(upstream.patches.load(Ordering::Relaxed), 0);
        held.release();
    });
    assert_eq!(answer.expect("answered").status, 200);
    assert_eq!(upstream.patches.load(Ordering::Relaxed), 1);
    let held = upstream.proxy.rule(Rule::on(Verb::Patch, Effect::HoldAnswer));
    let (answer, ()) = tokio::join!(upstream.patch(), async {
        held.committed(1).await;
        assert_eq!(upstream.patches.load(Ordering::Relaxed), 2);
        held.release();
    });
    assert_eq!(answer.expect("answered").status, 200);
    let busy = Effect::CommitThenAnswer(Answer::failure(500, "InternalError"));
    let _lying = upstream.proxy.rule(Rule::on(Verb::Patch, busy));
    assert_eq!((upstream.patch().await.expect("answered").status, upstream.patches.load(Ordering::Relaxed)), (500, 3));
}

#[tokio::test]
async fn a_delayed_request_is_late_and_nothing_else() {
    let upstream = upstream().await;
    let _rule = upstream.proxy.rule(Rule::any(Effect::Delay(SHORT)));
    let start = Instant::now();
    assert_eq!(upstream.patch().await.expect("answered").status, 200);
    assert!(start.elapsed() >= SHORT);
}

#[tokio::test]
async fn a_watch_streams_stalls_loses_events_and_expires() {
    let upstream = upstream().await;
    let mut lines = upstream.watch().await;
    let send = |line: &str| upstream.events.send(line.to_owned()).expect("the upstream lives");
    send("one\n");
    assert_eq!(lines.recv().await, Some(Ok("one\n".into())));
    let watches = upstream.proxy.watches("/things");
    assert_eq!((watches.count(), upstream.proxy.watches("/others").count()), (1, 0));
    watches.stall();
    send("two\nthr");
    assert!(tokio::time::timeout(SHORT, lines.recv()).await.is_err());
    watches.resume();
    assert_eq!(lines.recv().await, Some(Ok("two\n".into())));
    watches.inject("between");
    assert_eq!(lines.recv().await, Some(Ok("between\n".into())));
    send("ee\n");
    assert_eq!(lines.recv().await, Some(Ok("three\n".into())));
    watches.deafen();
    send("lost\n");
    assert!(tokio::time::timeout(SHORT, lines.recv()).await.is_err());
    watches.resume();
    watches.expire();
    let expired = lines.recv().await.expect("a line").expect("in order");
    assert!(expired.contains(r#""type":"ERROR""#) && expired.contains("410"), "{expired}");
    assert_eq!(lines.recv().await, None);
    eventually(Duration::from_secs(5), async || match upstream.proxy.watches("").count() {
        0 => Ok(()),
        open => Err(format!("{open} open")),
    })
    .await;
}

#[tokio::test]
async fn a_watch_can_be_cut_and_a_new_one_can_be_empty_or_silent() {
    let upstream = upstream().await;
    let mut lines = upstream.watch().await;
    upstream.proxy.watches("").cut();
    assert!(lines.recv().await.expect("an end").is_err());
    let rule = upstream.proxy.rule(Rule::on(Verb::Watch, Effect::Answer(Answer::empty_watch())));
    assert_eq!(upstream.watch().await.recv().await, None);
    rule.release();
    let rule = upstream.proxy.rule(Rule::on(Verb::Watch, Effect::Answer(Answer::expired_watch())));
    assert!(upstream.watch().await.recv().await.expect("a line").expect("in order").contains("Expired"));
    rule.release();
    let _rule = upstream.proxy.rule(Rule::on(Verb::Watch, Effect::SilentStream));
    assert!(tokio::time::timeout(SHORT, upstream.watch().await.recv()).await.is_err());
}

#[tokio::test]
async fn a_proxy_that_is_down_refuses_and_comes_back_with_the_same_address() {
    let upstream = upstream().await;
    upstream.proxy.down().await;
    assert!(upstream.get().await.is_err());
    upstream.proxy.up().expect("the port is its own");
    assert_eq!(upstream.get().await.expect("answered").status, 200);
}

#[tokio::test]
async fn a_kube_client_works_through_the_proxy_with_its_token() {
    let upstream = upstream().await;
    let server = kube::Config::new(format!("http://{}", upstream.proxy.addr()).parse().expect("a URL"));
    let dir = tempfile::tempdir().expect("temporary directory");
    for proxy in [Proxy::start(&server).await.expect("starts"), Proxy::without_http2(&server).await.expect("starts")] {
        let mut base = kube::Config::new("https://nowhere".parse().expect("a URL"));
        base.auth_info.token = Some(String::from("secret").into());
        let path = proxy.kubeconfig(dir.path(), Credential::Token("secret")).expect("written");
        let kubeconfig = kube::config::Kubeconfig::read_from(path).expect("readable");
        let read = kube::Config::from_custom_kubeconfig(kubeconfig, &Default::default()).await.expect("complete");
        for config in [proxy.config(&base), read] {
            let client = kube::Client::try_from(config).expect("a client");
            let request = axum::http::Request::get("/api/v1/namespaces/a/things/b").body(Vec::new()).expect("a request");
            assert_eq!(client.request_text(request).await.expect("answered"), r#"Some("Bearer secret")"#);
        }
    }
}
