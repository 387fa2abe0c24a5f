//! The handler natively, against an exporter in memory.

use std::time::Duration;

use testing::{Fault, Next, Outcome, Response, Script, Value, from_slice, from_str, json};

use super::*;

const KEY: &str = "reportjobs.batch.acme.io/t1/r1/u1";

fn job() -> Value {
    json!({
        "apiVersion": "batch.acme.io/v1",
        "kind": "ReportJob",
        "metadata": { "name": "r1", "namespace": "t1", "uid": "u1", "generation": 1 },
        "spec": { "report": "sales", "format": "pdf", "priority": 5 },
    })
}

fn script() -> Script {
    Script::new().setting("exporter", "http://exporter").idempotency_key(KEY).at("2026-11-29T12:00:00Z")
}

fn run(job: &Value, answer: Result<Response, Fault>) -> Outcome {
    testing::reconcile::<Exporter>(job, &script().respond(move |_| answer.clone()).context())
}

fn exported() -> Result<Response, Fault> {
    Ok(Response::new(201).with_body(r#"{"url": "http://exporter/files/1.pdf", "more": 1}"#))
}

fn status(outcome: &Outcome) -> Value {
    from_str(outcome.status.as_deref().expect("a status")).expect("a status is JSON")
}

#[test]
fn the_report_is_put_under_the_key_of_the_object() {
    let ctx = script().respond(|_| exported()).context();
    testing::reconcile::<Exporter>(&job(), &ctx);
    let [sent] = &ctx.sent()[..] else { panic!("one request, not {:?}", ctx.sent()) };
    assert_eq!((sent.method.as_str(), sent.url.as_str()), ("PUT", "http://exporter/reports/reportjobs.batch.acme.io%2Ft1%2Fr1%2Fu1"));
    assert_eq!(from_slice::<Value>(&sent.body).expect("JSON"), job()["spec"]);
}

#[test]
fn a_report_that_is_there_is_done_with_its_url() {
    let outcome = run(&job(), exported());
    assert_eq!((&outcome.next, status(&outcome)), (&Next::AwaitChange, json!({ "phase": "Done", "url": "http://exporter/files/1.pdf" })));
}

#[test]
fn fields_of_others_and_of_the_host_stay_and_an_old_message_goes() {
    let mut job = job();
    job["status"] = json!({ "phase": "Pending", "retries": 2, "message": "no answer", "foreign": "x" });
    let expected = json!({ "phase": "Done", "url": "http://exporter/files/1.pdf", "retries": 2, "foreign": "x" });
    assert_eq!(status(&run(&job, exported())), expected);
}

#[test]
fn a_job_waits_for_its_time_without_a_request_or_a_write() {
    let at = |time: &str| {
        let mut job = job();
        job["spec"]["notBefore"] = json!(time);
        let ctx = script().respond(|_| exported()).context();
        let outcome = testing::reconcile::<Exporter>(&job, &ctx);
        (outcome.next, outcome.status.is_some(), ctx.sent().len())
    };
    assert_eq!(at("2026-11-29T12:00:30Z"), (Next::After(Duration::from_millis(30_001)), false, 0));
    assert_eq!(at("2026-11-29T13:00:00.5+01:00"), (Next::After(Duration::from_millis(501)), false, 0));
    assert_eq!(at("2999-01-01T00:00:00Z"), (Next::After(Duration::from_secs(3600)), false, 0));
    assert_eq!(at("2026-11-29T12:00:00Z"), (Next::AwaitChange, true, 1));
    assert_eq!(at("1969-12-31T23:59:59Z"), (Next::AwaitChange, true, 1));
}

#[test]
fn what_may_heal_is_retried() {
    for status in [408, 425, 429, 500, 503] {
        assert!(matches!(run(&job(), Ok(Response::new(status))).next, Next::Retry(_)), "{status}");
    }
    for body in ["", "<html>", "{}", r#"{"url": 7}"#] {
        let next = run(&job(), Ok(Response::new(200).with_body(body))).next;
        assert!(
            matches!(&next, Next::Retry(cause) if cause.contains("PUT http://exporter/reports/") && cause.contains("the answer")),
            "{next:?}"
        );
    }
    assert!(matches!(run(&job(), Err(Fault::Io("no answer in time".into()))).next, Next::Retry(_)));
    let next = run(&job(), Ok(Response::new(503).with_header("Retry-After", "12"))).next;
    assert!(matches!(next, Next::RetryAfter(delay, _) if delay == Duration::from_secs(12)), "{next:?}");
}

#[test]
fn what_cannot_heal_is_given_up() {
    for status in [400, 403, 404, 409, 422] {
        let outcome = run(&job(), Ok(Response::new(status).with_body("no report of this name")));
        assert!(matches!(&outcome.next, Next::GiveUp(cause) if cause.ends_with("no report of this name")), "{status}: {outcome:?}");
    }
}

#[test]
fn an_object_that_does_not_read_is_given_up_by_the_name_of_its_field() {
    for (field, value, named) in [
        ("format", json!("zip"), "spec.format: unknown variant `zip`, expected one of `pdf`, `csv`, `xlsx`"),
        ("priority", json!("high"), "spec.priority:"),
        ("notBefore", json!("tomorrow"), "spec.notBefore: `tomorrow` is not a time"),
        ("report", json!([1]), "spec.report:"),
    ] {
        let mut job = job();
        job["spec"][field] = value;
        let next = run(&job, exported()).next;
        assert!(matches!(&next, Next::GiveUp(cause) if cause.contains(named)), "{next:?}");
    }
}

#[test]
fn any_integer_is_a_priority_and_none_is_zero() {
    for priority in [i64::MIN, -1, 0, i64::MAX] {
        let mut job = job();
        job["spec"]["priority"] = json!(priority);
        assert_eq!(run(&job, exported()).next, Next::AwaitChange);
    }
    let mut job = job();
    job["spec"].as_object_mut().expect("a spec").remove("priority");
    assert_eq!(run(&job, exported()).next, Next::AwaitChange);
}

#[test]
fn the_claim_is_what_the_host_is_to_know() {
    use berth_sdk::claim::{Claim, DeadLetter, Describe, Progress};
    let Claim { progress, dead_letter, priority_field, hosts, .. } = Exporter::CLAIM;
    assert_eq!(
        progress,
        Some(Progress { phase_field: "status.phase", settled: &["Done", "Failed"], mirror_label: Some("workqueue.acme.io/phase") })
    );
    let expected = DeadLetter { after: Some(5), phase: "Failed", retries_field: Some("status.retries"), message_field: "status.message" };
    assert_eq!((dead_letter, priority_field, hosts), (Some(expected), Some("spec.priority"), &["$settings.exporter"][..]));
}

#[test]
fn crd_file_is_current() {
    berth_sdk::crd::check::<ReportJob>(concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/crds/reportjobs.batch.acme.io.yaml"));
}
