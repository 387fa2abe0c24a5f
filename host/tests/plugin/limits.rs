//! Every limit, obeyed and violated.

use std::time::{Duration, Instant};

use berth_host::{
    plugin::limits,
    reconcile::{Failure, Next},
};
use serde_json::json;

use crate::bench::*;

fn limit(failure: &Failure) -> &str {
    match failure {
        Failure::Limit(sentence) => sentence,
        other => panic!("not a limit: {other:?}"),
    }
}

#[tokio::test]
async fn cpu_is_limited_and_the_sentence_names_the_setting() {
    let bench = Bench::new("cpu: 200ms").await;
    let began = Instant::now();
    let failure = bench.failure(json!({ "do": "loop" })).await;
    assert!(limit(&failure).contains("200ms of CPU (`cpu` in plugin.yaml)"), "{failure}");
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    bench.still_works().await;
}

#[tokio::test]
async fn waiting_is_not_billed_as_cpu() {
    let bench = Bench::new("cpu: 100ms").await;
    bench.run(json!({ "do": "sleep", "ms": 600 })).await.expect("within the CPU limit");
}

#[tokio::test]
async fn the_whole_call_has_a_deadline_also_inside_of_a_host_call() {
    let bench = Bench::new("timeout: 300ms").await;
    let began = Instant::now();
    let failure = bench.failure(json!({ "do": "hostblock" })).await;
    assert!(matches!(&failure, Failure::Deadline(sentence) if sentence.contains("300ms (`timeout` in plugin.yaml)")), "{failure}");
    assert!(began.elapsed() < Duration::from_secs(5));
    bench.run(json!({ "do": "sleep", "ms": 50 })).await.expect("within the deadline");
}

#[tokio::test]
async fn memory_is_limited_and_twenty_bombs_at_once_leave_the_host_alive() {
    let bench = Bench::new("memory: 16Mi").await;
    let bombs = (0..20).map(|_| bench.failure(json!({ "do": "bomb" })));
    for failure in futures::future::join_all(bombs).await {
        assert!(limit(&failure).contains("memory limit of 16Mi (`memory` in plugin.yaml)"), "{failure}");
    }
    bench.still_works().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sixty_four_deep_recursions_at_once_trap_one_by_one() {
    let bench = Bench::new("").await;
    let calls = (0..64).map(|number| bench.failure(json!({ "do": if number % 2 == 0 { "deep" } else { "deephost" } })));
    for failure in futures::future::join_all(calls).await {
        assert!(matches!(&failure, Failure::Trap(cause) if cause.contains("call stack exhausted")), "{failure}");
    }
    let failure = bench.failure(json!({ "do": "wide" })).await;
    assert!(matches!(&failure, Failure::Trap(cause) if cause.contains("recursion too deep")), "{failure}");
    bench.still_works().await;
}

#[tokio::test]
async fn data_for_the_host_and_handles_are_limited() {
    let bench = Bench::new("").await;
    let failure = bench.failure(json!({ "do": "hostflood" })).await;
    assert!(limit(&failure).contains("4Mi of data"), "{failure}");
    let failure = bench.failure(json!({ "do": "greedy" })).await;
    assert!(limit(&failure).contains("1000 handles"), "{failure}");
    assert_eq!(bench.status(json!({ "do": "greedy", "handles": 900 })).await["handles"], 900);
}

#[tokio::test]
async fn an_outcome_is_limited_in_size_and_depth() {
    let bench = Bench::new("").await;
    let failure = bench.failure(json!({ "do": "bigstatus", "bytes": 1 << 20 })).await;
    assert!(limit(&failure).contains("1Mi"), "{failure}");
    let status = bench.status(json!({ "do": "bigstatus", "bytes": 1_000_000 })).await;
    assert_eq!(status["message"].as_str().map(str::len), Some(1_000_000));
    let failure = bench.failure(json!({ "do": "deepjson", "depth": 65 })).await;
    assert!(matches!(&failure, Failure::Refused(why) if why.contains("64 levels")), "{failure}");
    bench.status(json!({ "do": "deepjson", "depth": 64 })).await;
}

#[tokio::test]
async fn a_status_that_is_too_large_for_its_message_keeps_its_phase() {
    let claim = json!({
        "progress": {"phaseField": "status.phase", "settled": ["Done", "Failed"]},
        "deadLetter": {"phase": "Failed", "messageField": "status.message"},
    });
    let bench = Bench::with(&claiming(&claim), "", |_| {}).await;
    let status = bench.status(json!({ "do": "bigstatus", "bytes": 3 << 20 })).await;
    let message = status["message"].as_str().expect("a text");
    assert!(message.ends_with('…') && message.len() <= limits::SENTENCE, "{}", message.len());
    assert_eq!(status["phase"], "Done");
}

#[tokio::test]
async fn any_delay_is_accepted_and_kept_within_reason() {
    let bench = Bench::new("").await;
    let next = async |what| bench.run(json!({ "do": what })).await.expect("accepted").next;
    assert_eq!(next("requeue0").await, Next::After(Duration::ZERO));
    assert_eq!(next("requeuemax").await, Next::After(limits::LONGEST_WAIT));
}

#[tokio::test]
async fn logs_are_limited_and_how_much_was_dropped_is_said() {
    let events = Events::record();
    let bench = Bench::new("").await;
    bench.run(json!({ "do": "logflood", "bytes": 4 << 20 })).await.expect("the guest goes on");
    let written = events.of_guests();
    let bytes: usize = written.iter().filter_map(|event| event["fields"]["message"].as_str().map(str::len)).sum();
    assert!(bytes <= (64 << 10) + 200, "{bytes}");
    let last = written.last().expect("a last word").to_string();
    assert!(last.contains("dropped 4048 lines beyond the 64Ki that a run may log (`limits.log` in plugin.yaml)"), "{last}");
    let bench = Bench::new("limits: {log: 2Mi}").await;
    let before = events.of_guests().len();
    bench.run(json!({ "do": "logflood", "bytes": 1 << 20 })).await.expect("the guest goes on");
    let written = events.of_guests().split_off(before);
    assert!(!written.iter().any(|line| line.to_string().contains("dropped")), "raised, nothing is dropped");
}

#[tokio::test]
async fn log_lines_cannot_forge_others_and_name_their_speaker() {
    let events = Events::record();
    let bench = Bench::new("").await;
    bench.run(json!({ "do": "loginject" })).await.expect("the guest goes on");
    bench.run(json!({ "do": "stdout" })).await.expect("the guest goes on");
    let written = events.of_guests();
    assert_eq!(written[0]["fields"]["message"], "first\\nlevel=ERROR second \\u{1b}[31mred\\u{7} \\u{202e}txet");
    assert_eq!((&written[0]["fields"]["object"], &written[0]["fields"]["plugin"]), (&json!("t1/p1"), &json!("probe")));
    assert_eq!(written[0]["fields"]["digest"].as_str().map(str::len), Some(12));
    assert!(!written[0]["fields"]["fields"].as_str().expect("fields").contains(['\r', '\n']));
    assert_eq!((&written[1]["fields"]["message"], &written[1]["level"]), (&json!("to stdout"), &json!("INFO")));
    assert_eq!((&written[2]["fields"]["message"], &written[2]["level"]), (&json!("to stderr, unfinished"), &json!("WARN")));
}

#[tokio::test]
async fn a_host_gives_no_more_than_its_flags_say() {
    let mut config = berth_host::plugin::RuntimeConfig::new(BERTH, cache());
    config.ceilings.max_memory = 64 << 20;
    config.ceilings.max_component = 1 << 20;
    let runtime = berth_host::plugin::Runtime::new(config).expect("a runtime");
    let prepared = runtime.prepare(&package(probe(), "")).await.expect("accepted");
    assert!(prepared.handler(&package(probe(), "memory: 64Mi")).is_ok());
    let refusal = prepared.handler(&package(probe(), "memory: 65Mi")).err().expect("refused");
    assert!(refusal.message.contains("`--max-memory` of berth run"), "{refusal}");
    let large = [probe(), &[0, 0x81, 0x80, 0x40, 0], &vec![0; 1 << 20]].concat();
    let refusal = runtime.prepare(&package(large, "")).await.err().expect("refused");
    assert!(refusal.message.contains("`--max-component` of berth run"), "{refusal}");
}
