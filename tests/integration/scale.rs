//! Many objects at once: a restart among finished ones, a compiler at work beside them, all of them failing, loops.

use std::{collections::BTreeMap, time::Duration};

use berth_tests::{
    cluster::Cluster,
    component::{gzip, slow_to_compile},
    eventually::{eventually, scaled},
    host::{Flags, Host},
    process::cpu,
    resource::Resource,
    stage::{SOON, Stage, letters, probe, probing},
};
use futures::StreamExt;
use serde_json::json;

const JOB: &str = "ReportJob.batch.acme.io";
const PROBE: &str = "Probe.probe.acme.io";
/// Requests of a test at once.
const AT_ONCE: usize = 20;

/// Does the same for many names, some at a time.
async fn for_all(count: usize, what: impl AsyncFn(String)) {
    let names = futures::stream::iter((0..count).map(|number| format!("p{number}")));
    names.for_each_concurrent(AT_ONCE, async |name| what(name).await).await;
}

async fn until_quiet(host: &Host, kind: &str) {
    for state in ["ready", "running"] {
        host.until_queued(kind, state, 0.0).await;
    }
}

fn label(job: &serde_json::Value) -> &str {
    job["metadata"]["labels"]["workqueue.acme.io/phase"].as_str().unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finished_objects_cost_a_start_no_run_and_no_write_but_of_a_wrong_label() {
    let stage = Stage::shared().await;
    let mut host = stage.report_host("").await;
    let count = scaled(200, 2000);
    for_all(count, async |name| drop(stage.job(&name, "sales", 0).await)).await;
    let is_done = |job: &serde_json::Value| job["status"]["phase"] == "Done" && label(job) == "done";
    for_all(count, async |name| drop(stage.cluster.until(Resource::JOB, &name, scaled(SOON, SOON * 10), is_done).await)).await;
    assert_eq!(host.terminate().await, Some(0));
    let wrong = json!({"metadata": {"labels": {"workqueue.acme.io/phase": "pending"}}});
    stage.cluster.patch(Resource::JOB, "p7", wrong).await;
    let (asked, mark) = (stage.exporter.requests().len(), host.proxy.mark());
    host.restart().await;
    stage.job("new", "sales", 0).await;
    let begun = async || if stage.exporter.requests_for(&stage.key("new")).is_empty() { Err("it waits behind the others") } else { Ok(()) };
    eventually(scaled(SOON, Duration::from_secs(5)), begun).await;
    for name in ["new", "p7"] {
        stage.cluster.until(Resource::JOB, name, SOON, is_done).await;
    }
    until_quiet(&host, JOB).await;
    let settled = host.metric("berth_reconcile_total", &[("kind", JOB), ("result", "settled")]).await;
    let ran = stage.exporter.requests().len() - asked;
    assert_eq!((settled, ran), (Some(count as f64), 1), "each was looked at, and none was run");
    let writes = host.proxy.since(mark).into_iter().filter(|entry| entry.seen.writes() && entry.seen.path.contains("/reportjobs/"));
    let mut written: Vec<String> = writes.map(|entry| entry.seen.path.split('/').next_back().unwrap_or_default().to_owned()).collect();
    written.sort();
    assert_eq!(written, ["new", "p7", "status"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_compiler_at_work_beside_many_objects_costs_no_lease() {
    let cluster = Cluster::shared().await;
    let version = cluster.push("probe", &probe(&json!({})), "").await;
    // The times that ship: those of the harness leave less than one server without a core may need.
    let natural = ["--lease-duration=15s", "--lease-renew-deadline=10s", "--lease-retry=2s", "--compile-cpu=10s"];
    let flags = Flags { more: natural.map(str::to_owned).into(), ..Flags::default() };
    let host = Host::start(&cluster, "host", &flags).await;
    cluster.until_serving("probe", &version).await;
    let slow = gzip(&slow_to_compile(&probe(&json!({}))));
    cluster.push_file("slow", "plugin.wasm.gz", &slow, "").await;
    let count = scaled(200, 2000);
    for_all(count, async |name| drop(cluster.create(Resource::PROBE, &name, json!({"do": "ok"})).await)).await;
    eventually(scaled(SOON, SOON * 10), async || {
        match host.metric("berth_reconcile_total", &[("kind", PROBE), ("result", "success")]).await {
            Some(done) if done >= count as f64 => Ok(()),
            done => Err(format!("{done:?} of {count} are done")),
        }
    })
    .await;
    until_quiet(&host, PROBE).await;
    let log = host.log();
    assert!(!log.contains("lease lost") && !log.contains("lease renewed too late"), "{log}");
    assert_eq!(host.metric("berth_leader", &[]).await, Some(1.0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_that_fail_again_and_again_are_one_event_for_each_change_of_state() {
    let cluster = Cluster::shared().await;
    let host = probing(&cluster, &probe(&letters(6)), "backoff: {base: 100ms, max: 200ms}\n").await;
    let count = scaled(30, 1000);
    // Every other one has something new to say with each failure.
    let what = |name: &str| if name.ends_with(['1', '3', '5', '7', '9']) { "flakyevents" } else { "flaky" };
    for_all(count, async |name| drop(cluster.create(Resource::PROBE, &name, json!({"do": what(&name), "fails": 99})).await)).await;
    for_all(count, async |name| drop(cluster.until_phase(Resource::PROBE, &name, "Failed", scaled(SOON, SOON * 10)).await)).await;
    until_quiet(&host, PROBE).await;
    let mut told: BTreeMap<(String, String), usize> = BTreeMap::new();
    for event in cluster.list(Resource::EVENT, "").await {
        let word = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
        *told.entry((word(&event["regarding"]["name"]), word(&event["reason"]))).or_default() += 1;
    }
    assert!(!told.is_empty());
    for ((name, reason), count) in told {
        let most = if reason == "Counted" { 3 } else { 1 };
        assert!(count <= most, "{count} Events {reason} of {name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loops_end_by_their_limit_beside_others_and_the_host_is_idle_again() {
    let cluster = Cluster::shared().await;
    let host = probing(&cluster, &probe(&letters(1)), "timeout: 2m\ncpu: 500ms\n").await;
    let loops = scaled(8, 50);
    for number in 0..loops {
        cluster.create(Resource::PROBE, &format!("loop-{number}"), json!({"do": "loop"})).await;
        // More than the loops, which would open the circuit breaker otherwise.
        for well in ["a", "b"] {
            cluster.create(Resource::PROBE, &format!("ok-{number}-{well}"), json!({"do": "ok"})).await;
        }
    }
    for number in 0..loops {
        let looped = cluster.until_phase(Resource::PROBE, &format!("loop-{number}"), "Failed", scaled(SOON, SOON * 4)).await;
        let message = looped["status"]["message"].as_str().unwrap_or_default();
        assert!(message.contains("of 500ms of CPU (`cpu` in plugin.yaml)"), "{message}");
        for well in ["a", "b"] {
            cluster.until_phase(Resource::PROBE, &format!("ok-{number}-{well}"), "Done", SOON).await;
        }
    }
    host.until_queued(PROBE, "running", 0.0).await;
    eventually(SOON, async || {
        let before = cpu(host.id()).expect("it runs");
        tokio::time::sleep(Duration::from_secs(3)).await;
        // One loop that goes on would take all of it, or a good part where others want the core too.
        match cpu(host.id()).expect("it runs") - before {
            used if used <= Duration::from_millis(600) => Ok(()),
            used => Err(format!("{used:?} of CPU in three seconds")),
        }
    })
    .await;
}
