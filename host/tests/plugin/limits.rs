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
    let small = Bench::with(probe(), "", |config| config.limits.stack = 128 << 10).await;
    let failure = small.failure(json!({ "do": "deep" })).await;
    assert!(failure.to_string().contains("(the limit is 128Ki, `--stack` of berth run; recurse less)"), "{failure}");
    small.still_works().await;
    let failure = bench.failure(json!({ "do": "wide" })).await;
    assert!(matches!(&failure, Failure::Trap(cause) if cause.contains("recursion too deep")), "{failure}");
    bench.still_works().await;
}

#[tokio::test]
async fn data_for_the_host_and_handles_are_limited() {
    let bench = Bench::new("").await;
    let failure = bench.failure(json!({ "do": "hostflood" })).await;
    assert!(limit(&failure).contains("4Mi of data that one call may have (`limits.hostCall` in plugin.yaml)"), "{failure}");
    let failure = bench.failure(json!({ "do": "greedy" })).await;
    assert!(limit(&failure).contains("1000 handles that a run may have (`limits.handles` in plugin.yaml)"), "{failure}");
    assert_eq!(bench.status(json!({ "do": "greedy", "handles": 900 })).await["handles"], 900);
    let bench = Bench::new("limits: {handles: 2000, hostCall: 9Mi}").await;
    assert_eq!(bench.status(json!({ "do": "greedy", "handles": 1900 })).await["handles"], 1900);
    bench.run(json!({ "do": "hostflood" })).await.expect("within the raised limit");
}

#[tokio::test]
async fn an_outcome_is_limited_in_size_and_depth() {
    let bench = Bench::new("").await;
    let failure = bench.failure(json!({ "do": "bigstatus", "bytes": 1 << 20 })).await;
    assert!(limit(&failure).contains("the 1Mi that one may have (`limits.outcome` in plugin.yaml)"), "{failure}");
    let status = bench.status(json!({ "do": "bigstatus", "bytes": 1_000_000 })).await;
    assert_eq!(status["message"].as_str().map(str::len), Some(1_000_000));
    let failure = bench.failure(json!({ "do": "deepjson", "depth": 65 })).await;
    assert!(
        matches!(&failure, Failure::Refused(why) if why.contains("64 levels that one may have (`limits.jsonDepth` in plugin.yaml)")),
        "{failure}"
    );
    bench.status(json!({ "do": "deepjson", "depth": 64 })).await;
    let bench = Bench::new("limits: {outcome: 2Mi, jsonDepth: 100}").await;
    bench.status(json!({ "do": "bigstatus", "bytes": 1 << 20 })).await;
    bench.status(json!({ "do": "deepjson", "depth": 100 })).await;
    let failure = bench.failure(json!({ "do": "deepjson", "depth": 101 })).await;
    assert!(matches!(&failure, Failure::Refused(why) if why.contains("100 levels")), "{failure}");
}

#[tokio::test]
async fn children_count_towards_the_outcome() {
    let bench = Bench::new("").await;
    let children = |bytes: usize| json!({ "do": "children", "children": [{"a": "x".repeat(bytes / 2)}, {"b": "y".repeat(bytes / 2)}] });
    bench.run(children(1_000_000)).await.expect("within the limit");
    let failure = bench.failure(children(1 << 20)).await;
    assert!(limit(&failure).contains("`limits.outcome` in plugin.yaml"), "{failure}");
}

#[tokio::test]
async fn labels_headers_and_random_bytes_are_limited_and_nothing_raises_them() {
    let bench = Bench::new("").await;
    let labels = |count| {
        let labels: serde_json::Map<_, _> = (0..count).map(|number| (format!("probe.acme.io/l{number}"), json!("x"))).collect();
        json!({ "do": "labels", "labels": labels })
    };
    assert_eq!(bench.run(labels(64)).await.expect("within the limit").labels.len(), 64);
    let failure = bench.failure(labels(65)).await;
    assert!(limit(&failure).contains("65 labels, more than the 64 that one may have (fixed)"), "{failure}");
    let failure = bench.failure(json!({ "do": "hoard", "what": "header", "count": 1 })).await;
    assert!(limit(&failure).contains("headers of more than the 16Ki that a request may have (fixed)"), "{failure}");
    assert_eq!(bench.status(json!({ "do": "random", "bytes": 64 << 10 })).await["bytes"], 64 << 10);
    let failure = bench.failure(json!({ "do": "random", "bytes": (64 << 10) + 1 })).await;
    assert!(limit(&failure).contains("the 64Ki of random bytes that one call gives (fixed)"), "{failure}");
}

#[tokio::test]
async fn a_log_line_is_cut_and_counts_as_it_is_written() {
    let events = Events::record();
    let bench = Bench::new("limits: {log: 9Ki}").await;
    bench.run(json!({ "do": "logline", "bytes": 1 << 20, "fields": 1000 })).await.expect("the guest goes on");
    let written = events.of_guests();
    let length = |name: &str| written[0]["fields"][name].as_str().map(str::len).expect("a text");
    assert!((limits::LOG_LINE - 10..=limits::LOG_LINE).contains(&length("message")), "{}", length("message"));
    assert!((limits::LOG_LINE - 10..=limits::LOG_LINE).contains(&length("fields")), "{}", length("fields"));
    let bench = Bench::new("limits: {log: 8Ki}").await;
    bench.run(json!({ "do": "logline", "bytes": 1 << 20, "fields": 1000 })).await.expect("the guest goes on");
    let last = events.of_guests().pop().expect("a last word").to_string();
    assert!(last.contains("dropped 1 lines beyond the 8Ki"), "{last}");
}

#[tokio::test]
async fn a_plugin_without_a_log_runs_as_well() {
    let events = Events::record();
    let bench = Bench::new("limits: {log: 0}").await;
    bench.run(json!({ "do": "stdout" })).await.expect("what it writes goes nowhere");
    let said = events.of_guests();
    assert!(said.len() == 1 && said[0].to_string().contains("dropped 2 lines beyond the 0"), "{said:?}");
}

#[tokio::test]
async fn a_run_waits_for_memory_that_others_of_its_plugin_have_and_that_is_not_its_own_time() {
    let bench = Bench::with(probe(), "memory: 32Mi\ntimeout: 1s", |config| config.limits.sandbox_memory = 128 << 20).await;
    let began = Instant::now();
    let runs = (0..6).map(|_| bench.run(json!({ "do": "sleep", "ms": 500 })));
    for result in futures::future::join_all(runs).await {
        result.expect("each has its own second");
    }
    assert!(began.elapsed() >= Duration::from_millis(1500), "two at once, as half of the host's memory is for one plugin");
    let prepared = prepare_in(|config| config.limits.sandbox_memory = 128 << 20).await;
    let refusal = prepared.handler(&package(probe(), "memory: 65Mi")).err().expect("refused");
    assert!(refusal.message.contains("the 64Mi that is half of `--sandbox-memory`"), "{refusal}");
}

/// The name of the test below, and what says that it is the process of its own.
const ALONE: (&str, &str) = ("limits::what_a_run_makes_the_host_keep_is_taken_from_its_own_memory", "BERTH_TEST_ALONE");

/// In a process of its own, as it looks at the memory of the whole process.
#[test]
fn what_a_run_makes_the_host_keep_is_taken_from_its_own_memory() {
    if std::env::var_os(ALONE.1).is_some() {
        return tokio::runtime::Runtime::new().expect("a runtime").block_on(hoard_everything());
    }
    let program = std::env::current_exe().expect("a test");
    let run = std::process::Command::new(program).args([ALONE.0, "--exact", "--nocapture"]).env(ALONE.1, "1").output().expect("started");
    assert!(run.status.success(), "{}{}", String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(String::from_utf8_lossy(&run.stdout).contains("1 passed"), "{ALONE:?} is not its name any more");
}

async fn hoard_everything() {
    /// What is around the 16 MiB of the guest: wasmtime, and what the allocator keeps.
    const AROUND: u64 = 40 << 20;
    let bench = Bench::new("memory: 24Mi\ncpu: 30s\ntimeout: 60s").await;
    bench.still_works().await;
    std::fs::write("/proc/self/clear_refs", "5").expect("Linux resets the peak");
    let before = peak();
    // It is refused where its time is up first, which depends on the machine.
    let trial = prepare(&claiming(&json!({ "describe": "hoard" }))).await;
    assert!(peak().saturating_sub(before) < AROUND + (64 << 20), "{} MiB: {:?}", (peak() - before) >> 20, trial.err());
    for what in ["bodies", "responses", "methods", "paths", "authorities", "fields", "reads"] {
        std::fs::write("/proc/self/clear_refs", "5").expect("Linux resets the peak");
        let before = peak();
        let result = bench.run(json!({ "do": "hoard", "what": what, "count": 900 })).await;
        let grown = peak().saturating_sub(before);
        assert!(grown < AROUND, "{what}: {} MiB, and {result:?}", grown >> 20);
        println!("{what}: {} KiB, {}", grown >> 10, if let Err(failure) = &result { failure.to_string() } else { "all taken".into() });
        let spent = matches!(&result, Err(Failure::Limit(why)) if why.contains("memory limit of 24Mi (`memory` in plugin.yaml)"));
        assert!(spent || result.is_ok(), "{what}: {result:?}");
        bench.still_works().await;
    }
}

/// The most memory that this process had at once since the last reset, in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("Linux says it");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
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
    assert!(last.contains("dropped 4055 lines beyond the 64Ki that a run may log (`limits.log` in plugin.yaml)"), "{last}");
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
    config.limits.ceilings.max_memory = 64 << 20;
    config.limits.ceilings.max_component = 1 << 20;
    let runtime = berth_host::plugin::Runtime::new(config).expect("a runtime");
    let prepared = runtime.prepare(&package(probe(), "")).await.expect("accepted");
    assert!(prepared.handler(&package(probe(), "memory: 64Mi")).is_ok());
    let refusal = prepared.handler(&package(probe(), "memory: 65Mi")).err().expect("refused");
    assert!(refusal.message.contains("`--max-memory` of berth run"), "{refusal}");
    let large = [probe(), &[0, 0x81, 0x80, 0x40, 0], &vec![0; 1 << 20]].concat();
    let refusal = runtime.prepare(&package(large, "")).await.err().expect("refused");
    assert!(refusal.message.contains("`--max-component` of berth run"), "{refusal}");
}
