//! What a handler returns, as the host takes it.

use std::time::Duration;

use berth_host::reconcile::{Failure, Next, Request};
use serde_json::{Value, json};

use crate::bench::*;

#[tokio::test]
async fn the_guest_gets_what_the_host_knows_and_every_digit_survives() {
    let bench = Bench::new("settings: {greeting: hello}").await;
    let status = bench.status(json!({ "do": "ok" })).await;
    assert_eq!((&status["settings"]["greeting"], &status["key"]), (&json!("hello"), &json!("probes.probe.acme.io/t1/p1/u1")));
    let spec = r#"{"do":"roundtrip","big":9007199254740993,"one":1.0,"text":"é\u0000"}"#;
    let outcome = bench.handler.reconcile(bench.request(spec)).await.expect("accepted");
    assert_eq!(outcome.status.expect("a status").to_string(), r#"{"big":9007199254740993,"do":"roundtrip","one":1.0,"text":"é\u0000"}"#);
}

#[tokio::test]
async fn attempts_and_the_last_failure_reach_the_guest() {
    let bench = Bench::new("").await;
    let request = |attempt, last: Option<&str>| Request {
        attempt,
        last_failure: last.map(str::to_owned),
        ..bench.request(r#"{"do":"flaky","fails":2}"#)
    };
    let first = bench.handler.reconcile(request(1, None)).await.expect("accepted");
    assert_eq!(first.next, Next::Retry("attempt 1".into()));
    let last = bench.handler.reconcile(request(2, Some("attempt 1"))).await.expect("accepted");
    assert_eq!((last.next, last.status.expect("a status")["lastFailure"].as_str()), (Next::AwaitChange, Some("attempt 1")));
}

#[tokio::test]
async fn causes_and_delays_come_through() {
    let bench = Bench::new("").await;
    let next = async |spec| bench.run(spec).await.expect("accepted").next;
    assert_eq!(next(json!({ "do": "giveup", "cause": "no such template" })).await, Next::GiveUp("no such template".into()));
    assert_eq!(next(json!({ "do": "retryafter", "ms": 7000 })).await, Next::RetryAfter(Duration::from_secs(7), "asked to wait".into()));
    let Next::Retry(cause) = next(json!({ "do": "retry", "cause": "x".repeat(5000) })).await else { panic!("another word") };
    assert!(cause.len() <= 1024 && cause.ends_with('…'));
}

#[tokio::test]
async fn labels_stay_within_the_claim() {
    let bench = Bench::new("").await;
    let labels =
        bench.run(json!({ "do": "labels", "labels": {"probe.acme.io/a": "x", "probe.acme.io/b": null} })).await.expect("accepted").labels;
    assert_eq!(labels, [("probe.acme.io/a".into(), Some("x".into())), ("probe.acme.io/b".into(), None)]);
    for (spec, words) in [
        (json!({ "do": "badlabel" }), "outside the `label-prefixes`"),
        (json!({ "do": "labels", "labels": {"probe.acme.io/": "x"} }), "no valid key"),
        (json!({ "do": "labels", "labels": {"probe.acme.io/a": "x y"} }), "letters, digits"),
        (json!({ "do": "rawstatus", "text": "{" }), "not JSON"),
        (json!({ "do": "rawstatus", "text": "[]" }), "not a JSON object"),
    ] {
        let failure = bench.failure(spec).await;
        assert!(matches!(&failure, Failure::Refused(why) if why.contains(words)), "{failure}");
    }
}

#[tokio::test]
async fn children_come_through_up_to_their_number_and_depth() {
    let bench = Bench::new("").await;
    let children = async |children: Value| bench.run(json!({ "do": "children", "children": children })).await;
    assert_eq!(children(Value::Null).await.expect("accepted").children, None);
    assert_eq!(children(json!([])).await.expect("accepted").children, Some(vec![]));
    assert_eq!(children(json!([{"kind": "Job"}])).await.expect("accepted").children, Some(vec![json!({"kind": "Job"})]));
    let many = children(json!(vec![json!({}); 101])).await.expect_err("too many");
    assert!(matches!(&many, Failure::Limit(why) if why.contains("101 children") && why.contains("100")), "{many}");
    let more = Bench::new("limits: {children: 101}").await;
    let raised = more.run(json!({ "do": "children", "children": vec![json!({}); 101] })).await.expect("within the raised limit");
    assert_eq!(raised.children.map(|children| children.len()), Some(101));
    let deep = (0..70).fold(json!(1), |value, _| json!({ "a": value }));
    let deep = children(json!([deep])).await.expect_err("too deep");
    assert!(matches!(&deep, Failure::Refused(why) if why.contains("64")), "{deep}");
}

#[tokio::test]
async fn the_first_ten_events_are_kept() {
    let bench = Bench::new("").await;
    let events = bench.run(json!({ "do": "events", "events": 12 })).await.expect("accepted").events;
    assert_eq!((events.len(), events[9].note.as_str()), (10, "event 9"));
}
