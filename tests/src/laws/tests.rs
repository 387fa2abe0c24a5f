//! Each law is broken on purpose.

use super::*;
use crate::exporter::Order;

fn object(status: Value) -> Value {
    json!({
        "metadata": {"namespace": "t1", "name": "a", "uid": "u", "generation": 2, "labels": {PHASE_LABEL: "done"}},
        "spec": {"to": "a@example.com"}, "status": status,
    })
}

fn job(status: Value) -> Value {
    let mut job = object(status);
    job["spec"] = json!({"report": "sales", "format": "pdf", "priority": 0});
    job
}

fn delivery(payload: Value) -> Delivery {
    Delivery { key: "emailrequests.notify.acme.io/t1/a/u".into(), payload, id: "mail-1".into(), at_ms: 0 }
}

/// What is broken by one object of a kind that is served, of which so many are in the queue.
fn seen(resource: Resource, object: Value, scheduled: f64) -> Sight {
    Sight {
        served: vec![Served { resource, scheduled: Some(scheduled) }],
        objects: vec![(resource, object)],
        deliveries: Some(vec![delivery(json!({"to": "a@example.com"}))]),
        exports: Some(vec![Export {
            key: "reportjobs.batch.acme.io/t1/a/u".into(),
            order: Order { report: "sales".into(), format: "pdf".into() },
            at_ms: 0,
        }]),
    }
}

fn broken(resource: Resource, object: Value, scheduled: f64) -> String {
    seen(resource, object, scheduled).broken().join("\n")
}

#[test]
fn what_is_finished_or_waits_in_the_queue_breaks_no_law() {
    let done = json!({"phase": "Done", "observedGeneration": 2, "url": "u"});
    assert_eq!(broken(Resource::JOB, job(done), 0.0), "");
    assert_eq!(broken(Resource::EMAIL, object(json!({"phase": "Sent", "observedGeneration": 2})), 0.0), "");
    assert_eq!(broken(Resource::EMAIL, object(Value::Null), 1.0), "");
}

#[test]
fn a_second_delivery_of_an_object_breaks_the_first_law() {
    let mut sight = seen(Resource::EMAIL, object(json!({"phase": "Sent", "observedGeneration": 2})), 0.0);
    sight.deliveries.as_mut().expect("some").push(delivery(Value::Null));
    assert_eq!(sight.broken(), ["L1: t1/a/u was delivered 2 times"]);
}

#[test]
fn an_object_that_is_neither_finished_nor_scheduled_breaks_the_second_law() {
    let message = broken(Resource::EMAIL, object(Value::Null), 0.0);
    assert!(message.starts_with("L2: 0 of these emailrequests") && message.ends_with(": t1/a"), "{message}");
    let mut deleted = object(Value::Null);
    deleted["metadata"]["deletionTimestamp"] = "now".into();
    assert_eq!(broken(Resource::PROBE, deleted.clone(), 0.0), "");
    deleted["metadata"]["finalizers"] = json!(["berth.acme.io/0123456789"]);
    assert!(broken(Resource::PROBE, deleted, 0.0).starts_with("L2"));
    let mut paused = object(Value::Null);
    paused["metadata"]["annotations"] = json!({"berth.acme.io/paused": "true"});
    assert_eq!(broken(Resource::EMAIL, paused, 0.0), "");
    let mut given_up = object(Value::Null);
    given_up["metadata"]["annotations"] = json!({"berth.acme.io/gave-up": "{\"generation\":2}"});
    assert_eq!(broken(Resource::PROBE, given_up.clone(), 0.0), "");
    given_up["metadata"]["generation"] = 3.into();
    assert!(broken(Resource::PROBE, given_up, 0.0).starts_with("L2"));
}

#[test]
fn a_phase_of_another_generation_breaks_the_third_law() {
    for observed in [json!(3), json!(1), Value::Null] {
        let message = broken(Resource::EMAIL, object(json!({"phase": "Failed", "observedGeneration": observed})), 1.0);
        assert!(message.starts_with("L3: EmailRequest t1/a"), "{observed}: {message}");
    }
    assert_eq!(broken(Resource::EMAIL, object(json!({"observedGeneration": 1})), 1.0), "");
}

#[test]
fn a_success_without_its_effect_breaks_the_third_law() {
    let sent = object(json!({"phase": "Sent", "observedGeneration": 2}));
    let mut sight = seen(Resource::EMAIL, sent.clone(), 0.0);
    sight.deliveries = Some(Vec::new());
    assert!(sight.broken().concat().contains("nothing was delivered"));
    sight.deliveries = Some(vec![delivery(json!({"to": "b@example.com"}))]);
    assert!(sight.broken().concat().contains("b@example.com"));
    sight.objects[0].1["status"]["message"] = "an earlier version was".into();
    assert_eq!(sight.broken(), Vec::<String>::new());
    let done = json!({"phase": "Done", "observedGeneration": 2, "url": "u"});
    let mut sight = seen(Resource::JOB, job(done), 0.0);
    sight.exports.as_mut().expect("some")[0].order.format = "csv".into();
    assert!(sight.broken().concat().contains("csv"));
    sight.exports = Some(Vec::new());
    assert!(sight.broken().concat().contains("no report was made"));
}

#[test]
fn a_label_that_is_not_the_phase_breaks_the_fourth_law() {
    let message = broken(Resource::JOB, job(json!({"phase": "Pending"})), 1.0);
    assert!(message.starts_with("L4: ReportJob t1/a"), "{message}");
}

#[test]
fn of_a_kind_that_is_not_served_only_what_is_never_true_is_said() {
    let mut sight = seen(Resource::JOB, job(json!({"phase": "Pending"})), 0.0);
    sight.served.clear();
    assert_eq!(sight.broken(), Vec::<String>::new());
    sight.objects[0].1["status"]["observedGeneration"] = 3.into();
    assert!(sight.broken().concat().starts_with("L3"));
}
