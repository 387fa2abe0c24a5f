//! `cluster`: what a guest asks for reaches the reader of its run, and what that answers reaches the guest.

use berth_host::{
    object::ObjectKey,
    reads::Target,
    reconcile::{Failure, Next},
};
use serde_json::json;

use crate::bench::*;

#[tokio::test]
async fn an_object_comes_with_every_digit_and_one_that_is_not_there_as_nothing() {
    let bench = Bench::new("").await;
    let found = bench.status(json!({ "do": "get", "namespace": "t1", "name": "settings" })).await;
    assert_eq!(found.to_string(), r#"{"data":{"big":9007199254740993,"é":1.0},"found":true,"phase":"Done"}"#);
    assert_eq!(bench.status(json!({ "do": "get", "namespace": "t1", "name": "absent" })).await["found"], false);
    let first =
        Target { group: String::new(), version: "v1".into(), kind: "ConfigMap".into(), key: ObjectKey::new(Some("t1"), "settings") };
    assert_eq!(bench.cluster.targets.lock().expect("no panic")[0], first);
}

#[tokio::test]
async fn a_list_is_read_page_by_page_with_what_the_guest_asked_for() {
    let bench = Bench::new("").await;
    let listed = bench.status(json!({ "do": "list", "selector": "a=b", "limit": 2 })).await;
    assert_eq!((&listed["names"], &listed["pages"]), (&json!(["a", "b", "c"]), &json!(2)));
    let queries = bench.cluster.queries.lock().expect("no panic");
    let said: Vec<_> = queries.iter().map(|query| (query.label_selector.as_str(), query.limit, query.after.as_deref())).collect();
    assert_eq!(said, [("a=b", 2, None), ("a=b", 2, Some("t1/b"))]);
    assert!(queries.iter().all(|query| query.namespace.is_none() && query.kind.plural == "configmaps"));
}

#[tokio::test]
async fn why_a_read_is_not_answered_reaches_the_guest_and_a_denial_the_log() {
    let bench = Bench::new("").await;
    let events = Events::record();
    for (name, word) in [("denied", "forbidden"), ("odd", "other")] {
        let outcome = bench.run(json!({ "do": "get", "namespace": "t1", "name": name })).await.expect("an outcome");
        assert!(matches!(outcome.next, Next::Retry(_)), "{outcome:?}");
        assert_eq!(outcome.status.expect("a status")["unread"], word);
    }
    let said: Vec<_> = events.of_guests().iter().map(|event| event["fields"]["message"].to_string()).collect();
    assert_eq!(said, ["\"denied a read: not for you\""]);
}

#[tokio::test]
async fn a_read_that_the_host_owes_an_answer_is_no_failure_of_the_handlers_unless_it_has_coped() {
    let bench = Bench::new("").await;
    for (name, words) in [("late", "not listed the kind yet"), ("unasked", "connection refused")] {
        let failure = bench.failure(json!({ "do": "get", "namespace": "t1", "name": name })).await;
        assert!(matches!(&failure, Failure::Host(why) if why.contains(words)) && !failure.counts(), "{failure}");
        let coped = bench.run(json!({ "do": "get", "namespace": "t1", "name": name, "cope": true })).await.expect("an outcome");
        assert_eq!(coped.next, Next::AwaitChange);
    }
}

#[tokio::test]
async fn a_read_that_is_not_answered_ends_with_the_call_and_costs_no_cpu() {
    let bench = Bench::new("timeout: 300ms\ncpu: 100ms\n").await;
    let failure = bench.failure(json!({ "do": "get", "namespace": "t1", "name": "hangs" })).await;
    assert!(matches!(&failure, Failure::Deadline(why) if why.contains("300ms")), "{failure}");
    bench.still_works().await;
}
