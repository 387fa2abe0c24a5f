//! The handler natively, against a gateway in memory.

use testing::{Fault, Next, Outgoing, Response, Script, Value, from_slice, from_str, json};

use super::*;

const KEY: &str = "emailrequests.notify.acme.io/t1/e1/u1";

fn mail() -> Value {
    json!({
        "apiVersion": "notify.acme.io/v1",
        "kind": "EmailRequest",
        "metadata": { "name": "e1", "namespace": "t1", "uid": "u1", "generation": 3 },
        "spec": { "to": "a@example.com", "template": "welcome", "locale": "en-GB" },
    })
}

fn script(answer: impl Fn(&Outgoing) -> Result<Response, Fault> + 'static) -> Context {
    Script::new().setting("gateway", "http://mail/").idempotency_key(KEY).at("2026-11-29T12:00:00Z").respond(answer).context()
}

fn run(mail: &Value, answer: Result<Response, Fault>) -> (Next, Option<Value>) {
    let outcome = testing::reconcile::<Mailer>(mail, &script(move |_| answer.clone()));
    (outcome.next, outcome.status.map(|status| from_str(&status).expect("a status is JSON")))
}

#[test]
fn the_spec_goes_to_the_gateway_under_the_key_of_the_object() {
    let ctx = script(|_| Ok(Response::new(202)));
    testing::reconcile::<Mailer>(&mail(), &ctx);
    let [sent] = &ctx.sent()[..] else { panic!("one request, not {:?}", ctx.sent()) };
    assert_eq!((sent.method.as_str(), sent.url.as_str()), ("POST", "http://mail/send"));
    assert_eq!(sent.header("idempotency-key"), Some(format!("\"{KEY}\"").as_str()));
    assert_eq!(sent.header("content-type"), Some("application/json"));
    assert_eq!(from_slice::<Value>(&sent.body).expect("JSON"), mail()["spec"]);
}

#[test]
fn a_mail_that_the_gateway_takes_is_sent() {
    for status in [200, 201, 202, 204] {
        let (next, written) = run(&mail(), Ok(Response::new(status)));
        assert_eq!(next, Next::AwaitChange);
        assert_eq!(
            written,
            Some(json!({
                "phase": "Sent",
                "conditions": [{
                    "type": "Sent",
                    "status": "True",
                    "reason": "Delivered",
                    "message": "the gateway has taken the mail",
                    "observedGeneration": 3,
                    "lastTransitionTime": "2026-11-29T12:00:00Z",
                }],
            }))
        );
    }
}

#[test]
fn a_key_used_for_other_content_is_sent_and_says_so() {
    let mut mail = mail();
    mail["status"] = json!({ "message": "connection refused", "foreign": { "kept": 1 } });
    let (next, written) = run(&mail, Ok(Response::new(422)));
    let written = written.expect("a status");
    assert_eq!(next, Next::AwaitChange);
    assert_eq!((&written["phase"], &written["foreign"]["kept"]), (&json!("Sent"), &json!(1)));
    assert!(written["message"].as_str().is_some_and(|message| message.contains("earlier version")), "{written}");
    assert_eq!(written["conditions"][0]["reason"], "EarlierVersionDelivered");
}

#[test]
fn the_message_of_earlier_failures_goes_when_the_mail_is_sent() {
    let mut mail = mail();
    mail["status"] = json!({ "message": "connection refused", "observedGeneration": 2 });
    let (_, written) = run(&mail, Ok(Response::new(200)));
    let written = written.expect("a status");
    assert_eq!((written.get("message"), &written["observedGeneration"]), (None, &json!(2)));
}

#[test]
fn what_may_heal_is_retried_and_writes_nothing() {
    for status in [408, 409, 425, 429, 500, 502, 503, 504] {
        let (next, written) = run(&mail(), Ok(Response::new(status).with_body("busy")));
        let Next::Retry(cause) = next else { panic!("{status} must be retried, not {next:?}") };
        assert!(cause.contains(&format!("POST http://mail/send was answered with {status}: busy")), "{cause}");
        assert_eq!(written, None);
    }
    let (next, written) = run(&mail(), Err(Fault::Io("connection refused".into())));
    assert_eq!((next, written), (Next::Retry("POST http://mail/send: connection refused".into()), None));
}

#[test]
fn the_delay_that_the_gateway_asks_for_is_passed_on() {
    for status in [409, 429, 503] {
        let (next, _) = run(&mail(), Ok(Response::new(status).with_header("retry-after", "7")));
        assert!(matches!(next, Next::RetryAfter(delay, _) if delay.as_secs() == 7), "{status}: {next:?}");
    }
    let (next, _) = run(&mail(), Ok(Response::new(503).with_header("Retry-After", "Sun, 29 Nov 2026 12:01:30 GMT")));
    assert!(matches!(next, Next::RetryAfter(delay, _) if delay.as_secs() == 90), "{next:?}");
}

#[test]
fn what_cannot_heal_is_given_up_with_its_cause_and_a_condition() {
    for status in [301, 400, 401, 403, 404, 410, 413] {
        let (next, written) = run(&mail(), Ok(Response::new(status).with_body("no such template\nat line 7")));
        let Next::GiveUp(cause) = next else { panic!("{status} must be given up, not {next:?}") };
        assert!(cause.starts_with("POST http://mail/send was answered with ") && cause.ends_with(": no such template"), "{cause}");
        let condition = &written.expect("a status")["conditions"][0];
        assert_eq!(
            (&condition["status"], &condition["observedGeneration"], &condition["message"]),
            (&json!("False"), &json!(3), &json!(cause))
        );
    }
}

#[test]
fn a_destination_that_is_not_allowed_yet_is_retried_with_the_way_to_allow_it() {
    let (next, _) = run(&mail(), Err(Fault::Denied));
    assert!(matches!(&next, Next::Retry(cause) if cause.contains("allowedHosts")), "{next:?}");
}

#[test]
fn a_missing_setting_is_retried_with_the_way_to_add_it() {
    let outcome = testing::reconcile::<Mailer>(&mail(), &Script::new().context());
    assert!(matches!(&outcome.next, Next::Retry(cause) if cause.contains("`gateway`") && cause.contains("plugin.yaml")), "{outcome:?}");
}

#[test]
fn an_object_that_does_not_read_is_given_up_by_the_name_of_its_field() {
    for (spec, field) in
        [(json!(7), "spec:"), (json!({ "to": [1] }), "spec.to:"), (json!({ "to": "a@b" }), "`template`"), (Value::Null, "no spec")]
    {
        let mut mail = mail();
        mail["spec"] = spec;
        let (next, written) = run(&mail, Ok(Response::new(200)));
        assert!(matches!(&next, Next::GiveUp(cause) if cause.contains(field) && cause.contains("EmailRequest")), "{next:?}");
        assert_eq!(written, None);
    }
}

#[test]
fn a_status_that_is_no_status_does_not_keep_the_mail_back() {
    let mut mail = mail();
    mail["status"] = json!({ "phase": 7, "conditions": "none" });
    let (next, written) = run(&mail, Ok(Response::new(200)));
    assert_eq!((next, &written.expect("a status")["phase"]), (Next::AwaitChange, &json!("Sent")));
}

#[test]
fn the_claim_is_what_the_host_is_to_know() {
    use berth_sdk::claim::{Claim, DeadLetter, Describe, Progress};
    let Claim { progress, dead_letter, hosts, priority_field, finalizer, .. } = Mailer::CLAIM;
    assert_eq!(progress, Some(Progress { phase_field: "status.phase", settled: &["Sent", "Failed"], mirror_label: None }));
    assert_eq!(dead_letter, Some(DeadLetter { after: None, phase: "Failed", retries_field: None, message_field: "status.message" }));
    assert_eq!((hosts, priority_field, finalizer), (&["$settings.gateway"][..], None, false));
    assert_eq!((Mailer::CLAIM.reconciles.plural, Mailer::CLAIM.reconciles.namespaced), ("emailrequests", true));
}

#[test]
fn crd_file_is_current() {
    berth_sdk::crd::check::<EmailRequest>(concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/crds/emailrequests.notify.acme.io.yaml"));
}
