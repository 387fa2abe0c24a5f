//! Every way that a run can end, and what is written for it.

use serde_json::json;

use super::*;

fn claim(after: Option<u32>) -> Claim {
    let retries_field = after.map(|_| "status.retries".into());
    let mut claim = Claim::full();
    claim.dead_letter = claim.dead_letter.map(|letter| DeadLetter { after, retries_field, ..letter });
    claim
}

fn object(generation: i64, status: Value) -> (Object, Value) {
    let text = json!({"metadata": {"name": "n", "uid": "u", "generation": generation}, "status": status}).to_string();
    let object = Object::parse(&text).expect("parses");
    let value = object.value();
    (object, value)
}

fn run(status: Value, failures: u32, result: Result<Outcome, Failure>) -> Settlement {
    let (object, value) = object(2, status);
    settle(&claim(Some(5)), &object, &value, failures, result)
}

fn outcome(status: Value, next: Next) -> Result<Outcome, Failure> {
    Ok(Outcome { status: Some(status), ..Outcome::just(next) })
}

#[test]
fn success_writes_the_status_stamps_the_generation_and_forgives() {
    let settled = run(
        json!({"phase": "Pending", "retries": 3, "message": "was down", "foreign": 1}),
        3,
        outcome(json!({"phase": "Done", "url": "u", "foreign": 1}), Next::AwaitChange),
    );
    assert_eq!(settled.status, Some(json!({"phase": "Done", "url": "u", "retries": 0, "message": null, "observedGeneration": 2})));
    assert!(matches!(settled.then, Then::Wait));
}

#[test]
fn nothing_is_written_where_nothing_differs() {
    let same = json!({"phase": "Done", "observedGeneration": 2});
    assert_eq!(run(same.clone(), 0, outcome(same, Next::AwaitChange)).status, None);
}

#[test]
fn a_timer_is_no_failure_and_no_acknowledgement() {
    let settled = run(json!({"phase": "Pending"}), 0, Ok(Outcome::just(Next::After(Duration::from_secs(9)))));
    assert_eq!(settled.status, None);
    assert!(matches!(settled.then, Then::After(after) if after == Duration::from_secs(9)));
}

#[test]
fn every_kind_of_failure_counts_one_and_sets_its_cause() {
    for result in [
        Ok(Outcome::just(Next::Retry("down".into()))),
        Ok(Outcome::just(Next::RetryAfter(Duration::from_secs(7), "down".into()))),
        Err(Failure::Trap("unreachable".into())),
        Err(Failure::Deadline("too late".into())),
        Err(Failure::Limit("too much memory".into())),
        Err(Failure::Refused("bad label".into())),
    ] {
        let settled = run(json!({"phase": "Pending", "retries": 1}), 1, result);
        let patch = settled.status.expect("differs");
        assert_eq!(patch["retries"], 2);
        assert!(patch["message"].as_str().is_some_and(|message| !message.is_empty()));
        assert!(patch.get("observedGeneration").is_none() && patch.get("phase").is_none());
        assert!(matches!(settled.then, Then::Fail { .. }) && settled.counted);
    }
}

#[test]
fn the_last_failure_is_the_dead_letter_with_its_cause() {
    let settled = run(json!({"phase": "Pending", "retries": 4}), 4, Err(Failure::Trap("boom".into())));
    assert_eq!(
        settled.status,
        Some(json!({"phase": "Failed", "retries": 5, "message": "the handler trapped: boom", "observedGeneration": 2}))
    );
    assert!(matches!(settled.then, Then::Stop));
    assert_eq!(settled.events[0].reason, "DeadLettered");
}

#[test]
fn without_a_limit_failures_go_on_with_their_cause_in_the_status() {
    let (object, value) = object(2, Value::Null);
    let settled = settle(&claim(None), &object, &value, 400, Ok(Outcome::just(Next::Retry("down".into()))));
    assert_eq!(settled.status, Some(json!({"message": "down"})));
    assert!(matches!(settled.then, Then::Fail { .. }));
}

#[test]
fn giving_up_is_terminal_for_this_version_of_the_spec() {
    let settled = run(Value::Null, 0, Ok(Outcome::just(Next::GiveUp("no such template".into()))));
    assert_eq!(settled.status, Some(json!({"phase": "Failed", "message": "no such template", "observedGeneration": 2})));
    assert!(matches!(settled.then, Then::Stop));
    let own = run(Value::Null, 0, outcome(json!({"phase": "Failed", "message": "mine"}), Next::GiveUp("theirs".into())));
    assert_eq!(own.status.expect("differs")["message"], "mine");
}

#[test]
fn what_is_the_hosts_own_affair_is_not_counted() {
    for failure in [Failure::Fenced, Failure::Host("no slot".into())] {
        let settled = run(json!({"retries": 1}), 1, Err(failure));
        assert!(settled.status.is_none() && !settled.counted && settled.events.is_empty());
        assert!(matches!(settled.then, Then::Again(_)));
    }
}

#[test]
fn long_causes_are_cut() {
    let settled = run(Value::Null, 0, Ok(Outcome::just(Next::Retry("x".repeat(3 << 20)))));
    assert!(settled.status.expect("differs")["message"].as_str().is_some_and(|message| message.len() <= MESSAGE_MAX));
}

#[test]
fn standing_follows_phase_and_generation() {
    let standing_of = |generation, status| {
        let (object, value) = object(generation, status);
        standing(&claim(Some(5)), &object, &value)
    };
    assert_eq!(standing_of(2, json!({"phase": "Done", "observedGeneration": 2})), Standing::Settled);
    assert_eq!(standing_of(3, json!({"phase": "Failed", "observedGeneration": 2})), Standing::Stale);
    assert_eq!(standing_of(2, json!({"phase": "Pending", "observedGeneration": 2})), Standing::Open);
    assert_eq!(standing_of(2, json!({"phase": 7})), Standing::Open);
    assert_eq!(standing_of(2, Value::Null), Standing::Open);
}

#[test]
fn reopening_clears_phase_and_account() {
    assert_eq!(reopen(&claim(Some(5))), Some(json!({"phase": null, "retries": 0, "message": null})));
}

#[test]
fn the_mirror_is_the_lower_cased_phase_or_says_why_not() {
    let claim = claim(Some(5));
    let mirrored = |phase: &str| mirror(&claim, &json!({"status": {"phase": phase}}));
    assert_eq!(mirrored("Done"), Some(Ok(("workqueue.acme.io/phase".into(), Some("done".into())))));
    assert_eq!(mirror(&claim, &json!({})), Some(Ok(("workqueue.acme.io/phase".into(), None))));
    assert_eq!(mirrored("Done with warnings"), Some(Err("done with warnings".into())));
    assert_eq!(mirrored(&"x".repeat(64)), Some(Err("x".repeat(64))));
}

fn farewell_of(status: Value, failures: u32, result: Result<Outcome, Failure>) -> Settlement {
    let (object, value) = object(2, status);
    farewell(&claim(Some(1)), &object, &value, failures, result)
}

#[test]
fn only_success_takes_the_finalizer_off() {
    let released = farewell_of(json!({"phase": "Done", "observedGeneration": 1}), 0, Ok(Outcome::just(Next::AwaitChange)));
    assert!(released.release && released.status.is_none() && released.then == Then::Wait);
    for result in [
        Ok(Outcome::just(Next::After(Duration::from_secs(9)))),
        Ok(Outcome::just(Next::Retry("down".into()))),
        Ok(Outcome::just(Next::GiveUp("gone".into()))),
        Err(Failure::Trap("unreachable".into())),
        Err(Failure::Fenced),
        Err(Failure::Host("busy".into())),
    ] {
        assert!(!farewell_of(json!({}), 0, result.clone()).release, "{result:?}");
    }
}

#[test]
fn failures_at_the_deletion_are_said_and_not_counted() {
    let given = json!({"phase": "Done", "retries": 4, "observedGeneration": 1});
    for failures in [0, 1, 99] {
        let failed =
            farewell_of(given.clone(), failures, outcome(json!({"retries": 9, "observedGeneration": 9}), Next::Retry("down".into())));
        let status = json!({"phase": null, "message": "down"});
        assert_eq!((failed.status, failed.verdict, failed.counted), (Some(status), Verdict::Failure, false));
        assert_eq!(failed.events.len(), usize::from(failures == 0));
        assert!(matches!(failed.then, Then::Fail { .. }));
    }
}

#[test]
fn giving_up_at_the_deletion_names_the_command_that_lets_go() {
    let kept = farewell_of(json!({}), 0, Ok(Outcome::just(Next::GiveUp("no such bucket".into()))));
    assert!(kept.events[0].note.contains("no such bucket") && kept.events[0].note.contains("kubectl patch ks.g.io n"), "{kept:?}");
    assert_eq!(kept.then, Then::Stop);
}

#[test]
fn an_object_is_dead_by_the_phase_of_its_dead_letter() {
    let dead = |phase: &str| is_dead(&claim(Some(5)), &json!({"status": {"phase": phase}}));
    assert!(dead("Failed") && !dead("Done") && !is_dead(&Claim::plain(), &json!({"status": {"phase": "Failed"}})));
}
