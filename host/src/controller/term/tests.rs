//! Which changes wake an object, and which are held until its run has settled.

use serde_json::json;

use super::*;
use crate::{claim::Pace, controller::mark::RETRY};

fn claim() -> Claim {
    Claim { priority_field: Some("spec.priority".into()), ..Claim::plain() }
}

fn object(uid: &str, version: u32, generation: i64, status: Value) -> Arc<Object> {
    let metadata = json!({"name": "n", "uid": uid, "resourceVersion": version.to_string(), "generation": generation});
    Arc::new(Object::parse(&json!({"metadata": metadata, "status": status}).to_string()).expect("parses"))
}

struct Bench {
    term: Term,
    key: Key,
}

impl Bench {
    fn new() -> Self {
        let key = Key { kind: claim().reconciles.group_kind(), object: crate::object::ObjectKey::new(None, "n") };
        let term = Term::new();
        let pace = Pace { concurrency: 4, backoff_base: Duration::from_secs(1), backoff_max: Duration::from_secs(300) };
        term.queue.open(key.kind.clone(), pace);
        Self { term, key }
    }

    fn observe(&self, object: &Object) {
        self.term.observe(&self.key, &claim(), object, false);
    }

    async fn turn(&self) -> Option<Turn> {
        tokio::time::timeout(Duration::from_millis(20), self.term.queue.next()).await.ok()
    }

    /// A turn of a new object that has begun.
    async fn running(&self, object: &Object) -> Turn {
        self.observe(object);
        let turn = self.turn().await.expect("new");
        self.term.begin(&self.key, object, turn.cause);
        turn
    }

    fn finish(&self, turn: Turn, last: &Object, current: &Arc<Object>) {
        self.term.finish(turn, Then::Wait, Some(last), &claim(), || Some(current.clone()));
    }
}

#[tokio::test(start_paused = true)]
async fn an_own_write_does_not_wake_whether_its_event_comes_before_or_after_its_answer() {
    let bench = Bench::new();
    let first = object("u", 1, 1, json!({}));
    let turn = bench.running(&first).await;
    let written = object("u", 2, 1, json!({"phase": "Done"}));
    bench.observe(&written);
    bench.finish(turn, &written, &written);
    bench.observe(&written);
    assert!(bench.turn().await.is_none());
}

#[tokio::test(start_paused = true)]
async fn a_foreign_change_during_a_run_leads_to_another_one() {
    let bench = Bench::new();
    let first = object("u", 1, 1, json!({}));
    let turn = bench.running(&first).await;
    let edited = object("u", 2, 2, json!({}));
    bench.observe(&edited);
    bench.finish(turn, &first, &edited);
    assert_eq!(bench.turn().await.expect("edited").cause, Cause::NewSpec);
}

#[tokio::test(start_paused = true)]
async fn a_foreign_reset_of_the_status_wakes_and_a_bare_new_version_does_not() {
    let bench = Bench::new();
    let done = object("u", 1, 1, json!({"phase": "Done"}));
    let turn = bench.running(&done).await;
    bench.finish(turn, &done, &done);
    bench.observe(&object("u", 2, 1, json!({"phase": "Done"})));
    assert!(bench.turn().await.is_none());
    bench.observe(&object("u", 3, 1, json!({})));
    assert_eq!(bench.turn().await.expect("reset").cause, Cause::Change);
}

#[tokio::test(start_paused = true)]
async fn a_recreated_object_starts_afresh_and_owes_nothing() {
    let bench = Bench::new();
    let first = object("u", 1, 1, json!({}));
    let turn = bench.running(&first).await;
    bench.term.counted(&bench.key, 1);
    let second = object("v", 5, 1, json!({}));
    bench.finish(turn, &first, &second);
    let turn = bench.turn().await.expect("recreated");
    assert_eq!((turn.cause, &*turn.uid), (Cause::NewSpec, "v"));
    let (pending, counted) = bench.term.begin(&bench.key, &second, Cause::Change);
    assert!(pending.is_none() && counted.is_none());
    turn.done(Then::Wait);
}

#[tokio::test(start_paused = true)]
async fn an_event_before_its_lane_is_open_is_not_taken_for_seen() {
    let bench = Bench::new();
    let first = object("u", 1, 1, json!({}));
    bench.term.queue.close(&bench.key.kind);
    bench.observe(&first);
    let pace = Pace { concurrency: 4, backoff_base: Duration::from_secs(1), backoff_max: Duration::from_secs(300) };
    bench.term.queue.open(bench.key.kind.clone(), pace);
    assert!(bench.turn().await.is_none());
    bench.observe(&first);
    assert!(bench.turn().await.is_some());
}

#[tokio::test(start_paused = true)]
async fn an_edit_right_behind_an_own_write_leads_to_another_run() {
    let bench = Bench::new();
    let first = object("u", 1, 1, json!({}));
    let turn = bench.running(&first).await;
    let written = object("u", 2, 1, json!({"phase": "Done"}));
    let edited = object("u", 3, 2, json!({"phase": "Done"}));
    bench.observe(&edited);
    bench.finish(turn, &written, &edited);
    assert_eq!(bench.turn().await.expect("edited").cause, Cause::NewSpec);
}

#[tokio::test(start_paused = true)]
async fn an_edit_that_a_turn_meets_before_its_event_ends_the_old_account() {
    let bench = Bench::new();
    let first = object("u", 1, 1, json!({"retries": 3}));
    bench.observe(&first);
    let turn = bench.turn().await.expect("new");
    let edited = object("u", 2, 2, json!({"retries": 3}));
    let (_, counted_for) = bench.term.begin(&bench.key, &edited, Cause::NewSpec);
    assert_eq!(counted_for, Some(1));
    turn.done(Then::Wait);
}

#[tokio::test(start_paused = true)]
async fn an_object_deleted_during_its_run_is_forgotten_at_the_end() {
    let bench = Bench::new();
    let first = object("u", 1, 1, json!({}));
    let turn = bench.running(&first).await;
    bench.term.gone(&bench.key);
    bench.term.finish(turn, Then::Fail { cause: "gone".into(), after: None }, None, &claim(), || None);
    tokio::time::advance(Duration::from_secs(3)).await;
    assert!(bench.turn().await.is_none() && bench.term.lock().get(&bench.key).is_none());
}

#[tokio::test(start_paused = true)]
async fn a_deletion_does_not_wait_for_the_backoff_of_what_failed_before() {
    let bench = Bench::new();
    let first = object("u", 1, 1, json!({}));
    let turn = bench.running(&first).await;
    let failed = Then::Fail { cause: "down".into(), after: None };
    bench.term.finish(turn, failed, Some(&first), &claim(), || Some(first.clone()));
    let going = Object { deleting: true, generation: 2, ..Object::clone(&first) };
    bench.observe(&going);
    let turn = bench.turn().await.expect("at once");
    assert_eq!((turn.cause, turn.failures), (Cause::Deletion, 0));
    turn.done(Then::Wait);
}

#[tokio::test(start_paused = true)]
async fn drift_wakes_an_object_and_while_it_runs_is_left_to_the_end() {
    let bench = Bench::new();
    let first = object("u", 1, 1, json!({}));
    bench.observe(&first);
    assert!(bench.term.children_due(&bench.key), "what a former term left has to be looked at");
    let turn = bench.turn().await.expect("new");
    bench.term.begin(&bench.key, &first, Cause::NewSpec);
    bench.term.drifted(&bench.key, &claim(), &first);
    bench.term.children_done(&bench.key, || true);
    bench.finish(turn, &first, &first);
    assert!(bench.turn().await.is_none());
    assert!(bench.term.take_held_drift(&bench.key) && !bench.term.take_held_drift(&bench.key));
    assert!(!bench.term.children_due(&bench.key));
    bench.term.drifted(&bench.key, &claim(), &first);
    assert!(bench.term.children_due(&bench.key));
    assert_eq!(bench.turn().await.expect("drifted").cause, Cause::Change);
}

#[tokio::test(start_paused = true)]
async fn children_are_looked_at_again_for_another_version_and_where_other_informers_watch_them() {
    let bench = Bench::new();
    let first = object("u", 1, 1, json!({}));
    let turn = bench.running(&first).await;
    bench.term.children_done(&bench.key, || false);
    assert!(bench.term.children_due(&bench.key), "what watches them is not what they were judged by");
    bench.term.children_done(&bench.key, || true);
    bench.finish(turn, &first, &first);
    bench.term.wake(&bench.key, &claim(), &first, Cause::Read);
    assert!(!bench.term.children_due(&bench.key));
    bench.term.wake(&bench.key, &claim(), &first, Cause::Reload);
    assert!(bench.term.children_due(&bench.key));
}

#[tokio::test(start_paused = true)]
async fn of_runs_that_changes_of_what_was_read_lead_to_ten_in_a_row_come_at_once_and_then_one_a_second() {
    let bench = Bench::new();
    let first = object("u", 1, 1, json!({}));
    let turn = bench.running(&first).await;
    bench.finish(turn, &first, &first);
    let read = async || {
        bench.term.wake(&bench.key, &claim(), &first, Cause::Read);
        let turn = bench.turn().await.expect("runnable");
        // A version on trial, its second try, and the former version.
        for _ in 0..3 {
            bench.term.begin(&bench.key, &first, turn.cause);
        }
        bench.finish(turn, &first, &first);
    };
    for _ in 0..10 {
        assert!(!bench.term.read_later(&bench.key));
        read().await;
    }
    for _ in 0..5 {
        for _ in 0..3 {
            assert!(bench.term.read_later(&bench.key));
        }
        tokio::time::advance(Duration::from_millis(990)).await;
        assert_eq!(bench.term.due_readers(), []);
        tokio::time::advance(Duration::from_millis(10)).await;
        assert_eq!(bench.term.due_readers(), std::slice::from_ref(&bench.key), "once, however often it changed");
        assert!(!bench.term.read_later(&bench.key));
        read().await;
    }
    assert!(bench.term.read_later(&bench.key));
    bench.term.gone(&bench.key);
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(bench.term.due_readers(), []);
}

#[test]
fn any_integer_is_a_priority_and_anything_else_is_none() {
    let of = |priority: Value| {
        let text = json!({"metadata": {"name": "n"}, "spec": {"priority": priority}}).to_string();
        super::priority(&claim(), &Object::parse(&text).expect("parses"))
    };
    assert_eq!((of(json!(7)), of(json!(-3)), of(json!(1e300)), of(json!("high"))), (7, -3, i64::MAX, 0));
}

#[tokio::test(start_paused = true)]
async fn what_a_list_finds_unfinished_runs_before_what_it_finds_done() {
    let bench = Bench::new();
    let done = |observed: i64| json!({"phase": "Done", "observedGeneration": observed});
    let (plain, gone) = (json!({}), json!({"deletionTimestamp": "2026-01-01T00:00:00Z"}));
    for (name, status, more, cause) in [
        ("a", done(1), &plain, Cause::Resync),
        ("b", done(0), &plain, Cause::FirstList),
        ("c", json!({"phase": "Working", "observedGeneration": 1}), &plain, Cause::FirstList),
        ("d", Value::Null, &plain, Cause::FirstList),
        ("e", json!({"phase": "Failed", "observedGeneration": 1}), &plain, Cause::FirstList),
        ("f", done(1), &gone, Cause::FirstList),
        ("g", done(1), &json!({"annotations": {RETRY: "now"}}), Cause::FirstList),
    ] {
        let mut metadata = json!({"name": name, "uid": name, "resourceVersion": "1", "generation": 1});
        metadata.as_object_mut().expect("one").extend(more.as_object().expect("one").clone());
        let object = Object::parse(&json!({"metadata": metadata, "status": status}).to_string()).expect("parses");
        let key = Key { object: object.key.clone(), ..bench.key.clone() };
        bench.term.observe(&key, &Claim::full(), &object, true);
        let turn = bench.turn().await.expect("looked at");
        assert_eq!(turn.cause, cause, "{name}");
        turn.done(Then::Wait);
        // Without phases in its claim nothing is settled.
        bench.term.gone(&key);
        bench.term.observe(&key, &claim(), &object, true);
        assert_eq!(bench.turn().await.expect("looked at").cause, Cause::FirstList, "{name}");
        bench.term.gone(&key);
    }
}

#[tokio::test(start_paused = true)]
async fn delays_in_a_row_are_counted_until_a_write_is_made_or_the_object_is_another() {
    let bench = Bench::new();
    let first = object("u", 1, 1, json!({}));
    let turn = bench.running(&first).await;
    let counts = |times: usize| (0..times).map(|_| bench.term.delayed(&bench.key)).collect::<Vec<_>>();
    assert_eq!(counts(3), [0, 1, 2]);
    bench.finish(turn, &first, &first);
    assert_eq!(counts(1), [3]);
    bench.term.on_time(&bench.key);
    assert_eq!(counts(2), [0, 1]);
    bench.observe(&object("v", 2, 1, json!({})));
    assert_eq!(counts(1), [0]);
}

#[tokio::test(start_paused = true)]
async fn a_request_to_try_again_during_a_run_cuts_the_backoff_after_it() {
    let bench = Bench::new();
    let first = object("u", 1, 1, json!({}));
    let turn = bench.running(&first).await;
    let metadata = json!({"name": "n", "uid": "u", "resourceVersion": "2", "generation": 1, "annotations": {RETRY: "now"}});
    let asked = Arc::new(Object::parse(&json!({"metadata": metadata, "status": {}}).to_string()).expect("parses"));
    bench.observe(&asked);
    let failed = Then::Fail { cause: "down".into(), after: None };
    bench.term.finish(turn, failed, Some(&first), &claim(), || Some(asked.clone()));
    let turn = bench.turn().await.expect("at once");
    assert_eq!((turn.cause, turn.failures), (Cause::Redrive, 0));
    turn.done(Then::Wait);
}

#[test]
fn a_failure_after_a_recovery_is_another_one() {
    let bench = Bench::new();
    let version = Version { digest: crate::package::Digest::of(b"1"), config_hash: String::new() };
    let failed = || bench.term.failed(&bench.key, &version, "down");
    let time = || bench.term.last_failure(&bench.key.kind).expect("failed").time;
    failed();
    let long_ago = "2026-01-01T00:00:00Z".to_owned();
    bench.term.failures.lock().expect("free").values_mut().for_each(|(last, _)| last.time.clone_from(&long_ago));
    failed();
    assert_eq!(time(), long_ago, "it goes on");
    bench.term.recovered(&bench.key);
    assert_eq!(time(), long_ago, "it was the last one");
    failed();
    assert_ne!(time(), long_ago);
}

#[tokio::test(start_paused = true)]
async fn an_object_rests_until_anything_changes_that_its_look_depended_on() {
    let bench = Bench::new();
    let version = |code: &[u8]| Version { digest: crate::package::Digest::of(code), config_hash: "c".into() };
    let done = object("u", 5, 1, json!({"phase": "Done"}));
    let rest = Rest::of(&done, &version(b"1"), false);
    assert!(!bench.term.rests(&bench.key, rest), "nobody has looked yet");
    let turn = bench.running(&done).await;
    bench.term.lay_to_rest(&bench.key, rest);
    bench.finish(turn, &done, &done);
    assert!(bench.term.rests(&bench.key, Rest::of(&done, &version(b"1"), false)));
    for changed in [
        Rest::of(&object("v", 5, 1, json!({"phase": "Done"})), &version(b"1"), false),
        Rest::of(&object("u", 6, 1, json!({"phase": "Done"})), &version(b"1"), false),
        Rest::of(&done, &version(b"2"), false),
        Rest::of(&done, &Version { config_hash: "d".into(), ..version(b"1") }, false),
        Rest::of(&done, &version(b"1"), true),
    ] {
        assert!(!bench.term.rests(&bench.key, changed));
    }
    bench.term.gone(&bench.key);
    assert!(!bench.term.rests(&bench.key, rest), "another object of that name is another one");
}
