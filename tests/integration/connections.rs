//! The connections to the API server: how many there are, what they speak, and how a dead one is found out.

use std::{collections::BTreeMap, time::Duration};

use axum::http::Version;
use berth_host::client;
use berth_tests::{
    cluster::Cluster,
    eventually::eventually,
    proxy::{Entry, Outcome, Proxy, Verb},
    resource::Resource,
    stage::{SOON, Stage},
};
use futures::AsyncBufReadExt;
use kube::{
    Client,
    core::{params::WatchParams, request::Request},
};

/// How many watches came by each connection.
fn by_connection(entries: &[Entry]) -> BTreeMap<usize, usize> {
    let mut connections = BTreeMap::new();
    for entry in entries.iter().filter(|entry| entry.seen.verb == Verb::Watch) {
        *connections.entry(entry.seen.connection).or_default() += 1;
    }
    connections
}

/// Opens that many watches at once and waits until each has its first event.
async fn watch(client: &Client, path: &str, count: usize) -> Vec<impl futures::AsyncBufRead + use<>> {
    let open = futures::future::join_all((0..count).map(|_| async {
        let request = Request::new(path).watch(&WatchParams::default(), "0").expect("a request");
        let mut stream = Box::pin(client.request_stream(request).await.expect("a watch"));
        let mut line = String::new();
        stream.read_line(&mut line).await.expect("an event");
        assert!(line.contains("ADDED"), "{line}");
        stream
    }));
    tokio::time::timeout(SOON, open).await.expect("none waits for another")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watches_share_connections_as_far_as_the_server_allows_and_requests_have_another() {
    let cluster = Cluster::shared().await;
    let control = cluster.plane().control();
    let proxy = Proxy::start(&control.config()).await.expect("a proxy");
    let client = client::connect(proxy.config(&control.config())).expect("a client");
    let watches = watch(&client, "/api/v1/namespaces", 120).await;
    let mut counts: Vec<usize> = by_connection(&proxy.entries()).into_values().collect();
    counts.sort_unstable();
    assert_eq!(counts, [20, 100]);
    assert_eq!(proxy.accepted(), 2);
    for _ in 0..2 {
        client.apiserver_version().await.expect("an answer");
        let last = proxy.entries().last().expect("an entry").seen.clone();
        assert_eq!((last.version, last.connection), (Version::HTTP_2, 2), "it does not wait behind events");
    }
    drop(watches);
    // Places are free again.
    let _watches = watch(&client, "/api/v1/namespaces", 100).await;
    assert_eq!(proxy.accepted(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_takes_fewer_requests_on_a_connection_gets_more_connections_and_they_end_when_nobody_needs_them() {
    let cluster = Cluster::shared().await;
    let control = cluster.plane().control();
    let proxy = Proxy::taking(&control.config(), 8).await.expect("a proxy");
    let client = client::connect(proxy.config(&control.config())).expect("a client");
    let watches = watch(&client, "/api/v1/namespaces", 20).await;
    assert!(by_connection(&proxy.entries()).into_values().all(|count| count <= 8), "{:?}", by_connection(&proxy.entries()));
    assert_eq!(proxy.accepted(), 3);
    drop(watches);
    let mark = proxy.mark();
    let _watches = watch(&client, "/api/v1/namespaces", 9).await;
    assert_eq!((proxy.accepted(), by_connection(&proxy.since(mark)).into_values().collect::<Vec<_>>()), (4, vec![8, 1]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_is_given_up_takes_its_connection_out_of_use() {
    let cluster = Cluster::shared().await;
    let control = cluster.plane().control();
    let proxy = Proxy::start(&control.config()).await.expect("a proxy");
    let client = client::connect(proxy.config(&control.config())).expect("a client");
    let ask = async || client.apiserver_version().await.expect("an answer");
    ask().await;
    let watches = watch(&client, "/api/v1/namespaces", 1).await;
    proxy.fall_silent();
    assert!(tokio::time::timeout(Duration::from_secs(1), ask()).await.is_err(), "nothing comes by it");
    for _ in 0..2 {
        tokio::time::timeout(SOON, ask()).await.expect("by another one");
    }
    assert_eq!(proxy.accepted(), 3);
    drop(watches);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_that_wait_for_a_connection_hear_why_there_is_none() {
    let cluster = Cluster::shared().await;
    let control = cluster.plane().control();
    let proxy = Proxy::start(&control.config()).await.expect("a proxy");
    let client = client::connect(proxy.config(&control.config())).expect("a client");
    let ask = async || futures::future::join_all((0..5).map(|_| client.apiserver_version())).await;
    for answer in ask().await {
        answer.expect("an answer");
    }
    proxy.down().await;
    // These may go by the connection that was there.
    assert!(ask().await.iter().all(Result::is_err));
    for answer in ask().await {
        let error = answer.expect_err("it is down").to_string();
        assert!(error.contains("no connection: ") && error.contains("Connection refused"), "{error}");
    }
    proxy.up().expect("its port is its own");
    for answer in ask().await {
        answer.expect("an answer");
    }
    assert_eq!(proxy.accepted(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_http2_is_served_by_http1() {
    let cluster = Cluster::shared().await;
    let control = cluster.plane().control();
    let proxy = Proxy::without_http2(&control.config()).await.expect("a proxy");
    let client = client::connect(proxy.config(&control.config())).expect("a client");
    let _watches = watch(&client, "/api/v1/namespaces", 20).await;
    client.apiserver_version().await.expect("an answer");
    let mut entries = proxy.entries();
    assert!(entries.iter().all(|entry| entry.seen.version == Version::HTTP_11));
    entries.retain(|entry| entry.outcome == Outcome::Answered(200));
    assert_eq!(by_connection(&entries).len(), 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_falls_silent_is_found_out_and_all_its_watches_go_on_by_one_new_one() {
    let stage = Stage::shared().await;
    let host = stage.email_host().await;
    stage.mail("e1", "a@example.com").await;
    stage.until_mail("e1", "Sent").await;
    let (mark, before) = (host.proxy.mark(), host.proxy.accepted());
    host.proxy.fall_silent();
    stage.mail("e2", "a@example.com").await;
    // 30 s of silence, and 15 for an answer to the ping.
    stage.cluster.until_phase(Resource::EMAIL, "e2", "Sent", Duration::from_secs(60)).await;
    let watched =
        |entries: &[Entry], path: &str| entries.iter().any(|entry| entry.seen.verb == Verb::Watch && entry.seen.path.ends_with(path));
    eventually(SOON, async || {
        let since = host.proxy.since(mark);
        let missing = ["/emailrequests", "/configmaps", "/customresourcedefinitions"].map(|path| (path, watched(&since, path)));
        if missing.iter().all(|(_, there)| *there) { Ok(()) } else { Err(format!("{missing:?}")) }
    })
    .await;
    // That of the Lease is another client's.
    let mut since = host.proxy.since(mark);
    since.retain(|entry| !entry.seen.path.contains("/leases"));
    let connections = by_connection(&since);
    assert!(connections.len() == 1 && connections.keys().all(|connection| *connection >= before), "{connections:?}");
}
