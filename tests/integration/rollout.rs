//! Versions that undo themselves: trial, rollback, staged rollout, what survives a restart; circuit breaker, redrive and pause.

use std::{process::Command, time::Duration};

use berth_tests::{
    behaviour::Behaviour,
    cluster::{Cluster, ready_reason, ready_status},
    eventually::{always, eventually},
    host::{Flags, Host},
    resource::Resource,
    stage::{SOON, Stage, probe},
    workspace,
};
use serde_json::{Value, json};

const KIND: &str = "Probe.probe.acme.io";
const QUICK: &str = "backoff: {base: 100ms, max: 300ms}\n";

/// A probe that settles and dead-letters.
fn settling() -> Vec<u8> {
    probe(&json!({
        "progress": {"phaseField": "status.phase", "settled": ["Done", "Failed"]},
        "deadLetter": {"after": 5, "phase": "Failed", "retriesField": "status.retries", "messageField": "status.message"},
    }))
}

/// A host on which this component with this configuration serves.
async fn serving(cluster: &Cluster, component: &[u8], config: &str) -> Host {
    let version = cluster.push("probe", component, config).await;
    let host = Host::start(cluster, "host", &Flags::default()).await;
    cluster.until_serving("probe", &version).await;
    host
}

/// Puts an object there and waits until it is done. Returns the settings with which it was.
async fn run(cluster: &Cluster, name: &str) -> Value {
    cluster.create(Resource::PROBE, name, json!({})).await;
    let object = cluster.until_phase(Resource::PROBE, name, "Done", SOON).await;
    assert!(object["status"]["retries"].as_u64().unwrap_or_default() == 0, "no failure counts against it: {object}");
    object["status"]["settings"].clone()
}

/// Waits until the stable version is kept, and returns the ConfigMap.
async fn kept(cluster: &Cluster, is: impl Fn(&Value) -> bool) -> Value {
    cluster.until_in(cluster.system(), Resource::CONFIG_MAP, "probe-stable", SOON, is).await
}

async fn berth(cluster: &Cluster, arguments: &[&str]) -> String {
    let mut command = Command::new(workspace::berth().expect("the binary is built"));
    command.args(arguments).arg("--kubeconfig").arg(cluster.plane().control().kubeconfig());
    let output = tokio::task::spawn_blocking(move || command.output().expect("it runs")).await.expect("it ends");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {text}");
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_version_that_traps_where_the_former_did_not_is_rolled_back_and_stays_so() {
    let cluster = Cluster::shared().await;
    let mut host = serving(&cluster, &settling(), "settings: {do: ok, v: 1}\n").await;
    assert_eq!(run(&cluster, "before").await["v"], 1);
    let bad = cluster.push("probe", &settling(), "settings: {do: trap, v: 2}\n").await;
    let on_trial = cluster.until_plugin("probe", &bad, |plugin| ready_reason(plugin) == "OnTrial").await;
    assert!(on_trial["status"]["candidateVersion"].is_string(), "{on_trial}");
    assert_ne!(on_trial["status"]["candidateVersion"], on_trial["status"]["stableVersion"]);
    assert_eq!(run(&cluster, "during").await["v"], 1, "the former version's second opinion counts");
    let rolled_back = cluster.until_plugin("probe", &bad, |plugin| ready_reason(plugin) == "RolledBack").await;
    assert_eq!((ready_status(&rolled_back), &rolled_back["status"]["candidateVersion"]), ("True", &Value::Null), "{rolled_back}");
    let why = rolled_back["status"]["refusedReason"].as_str().unwrap_or_default();
    assert!(why.contains("in 1 of 1 runs") && why.contains("trap"), "{why}");
    assert_eq!(run(&cluster, "after").await["v"], 1);

    kept(&cluster, |map| map["metadata"]["annotations"]["berth.acme.io/rolled-back"].is_string()).await;
    host.kill();
    host.restart().await;
    let again = cluster.until_plugin("probe", &bad, |plugin| ready_reason(plugin) == "RolledBack").await;
    assert_eq!(again["status"]["stableVersion"], rolled_back["status"]["stableVersion"]);
    assert_eq!(run(&cluster, "restarted").await["v"], 1);
    assert!(
        !host.log().contains("a new version is on trial") || host.log().matches("a new version is on trial").count() == 1,
        "not tried again"
    );

    let good = cluster.push("probe", &settling(), "settings: {do: ok, v: 3}\n").await;
    cluster.until_plugin("probe", &good, |plugin| ready_reason(plugin) == "OnTrial").await;
    assert_eq!(run(&cluster, "mended").await["v"], 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_leader_knows_what_was_rolled_back_and_does_not_try_it_again() {
    let cluster = Cluster::shared().await;
    let named = |name: &str| Flags { identity: Some(name.to_owned()), ..Flags::default() };
    let version = cluster.push("probe", &settling(), "settings: {do: ok, v: 1}\n").await;
    let mut first = Host::start(&cluster, "first", &named("first")).await;
    cluster.until_serving("probe", &version).await;
    let second = Host::start(&cluster, "second", &named("second")).await;
    let bad = cluster.push("probe", &settling(), "settings: {do: trap, v: 2}\n").await;
    cluster.until_plugin("probe", &bad, |plugin| ready_reason(plugin) == "OnTrial").await;
    assert_eq!(run(&cluster, "during").await["v"], 1);
    kept(&cluster, |map| map["metadata"]["annotations"]["berth.acme.io/rolled-back"].is_string()).await;
    eventually(SOON, async || match second.metric("berth_plugins_refused", &[]).await {
        Some(1.0) => Ok(()),
        refused => Err(format!("the standby has refused {refused:?}")),
    })
    .await;
    first.terminate().await;
    second.until_leading().await;
    assert_eq!(run(&cluster, "after").await["v"], 1);
    let failures = second.metric("berth_reconcile_total", &[("kind", KIND), ("result", "failure")]).await;
    assert_eq!((failures, second.log().contains("the version on trial failed")), (Some(0.0), false));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_good_runs_make_a_version_the_stable_one_and_that_is_kept() {
    let cluster = Cluster::shared().await;
    let _host = serving(&cluster, &settling(), "settings: {do: ok, v: 1}\n").await;
    let first = kept(&cluster, |map| map["immutable"] == true).await;
    let next = cluster.push("probe", &settling(), "settings: {do: ok, v: 2}\n").await;
    cluster.until_plugin("probe", &next, |plugin| ready_reason(plugin) == "OnTrial").await;
    for number in 0..20 {
        assert_eq!(run(&cluster, &format!("p{number}")).await["v"], 2);
    }
    let passed = cluster.until_plugin("probe", &next, |plugin| ready_reason(plugin) == "Serving").await;
    assert!(passed["status"]["candidateVersion"].is_null(), "{passed}");
    let second = kept(&cluster, |map| map["metadata"]["uid"] != first["metadata"]["uid"]).await;
    assert!(second["data"]["plugin.yaml"].as_str().is_some_and(|text| text.contains("v: 2")), "{}", second["data"]);
    assert_eq!(second["metadata"]["ownerReferences"][0]["name"], "probe");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_starts_with_only_a_bad_version_serves_the_good_one_that_was_kept() {
    let cluster = Cluster::shared().await;
    let mut host = serving(&cluster, &settling(), "settings: {do: ok, v: 1}\n").await;
    kept(&cluster, |_| true).await;
    host.terminate().await;
    let zeros = cluster.push("probe", &[0; 4096], "").await;
    host.restart().await;
    // A list may be older than the ConfigMap in which the good one is kept, which the watch brings then.
    let serves = |plugin: &Value| ready_reason(plugin) == "NotAComponent" && ready_status(plugin) == "True";
    cluster.until_plugin("probe", &zeros, serves).await;
    assert_eq!(run(&cluster, "p").await["v"], 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_that_the_former_version_has_too_counts_once_and_rolls_nothing_back() {
    let cluster = Cluster::shared().await;
    let _host = serving(&cluster, &settling(), &format!("settings: {{do: ok, v: 1}}\n{QUICK}")).await;
    let next = cluster.push("probe", &settling(), &format!("settings: {{do: ok, v: 2}}\n{QUICK}")).await;
    cluster.until_plugin("probe", &next, |plugin| ready_reason(plugin) == "OnTrial").await;
    cluster.create(Resource::PROBE, "trap", json!({"do": "trap"})).await;
    let letter = cluster.until_phase(Resource::PROBE, "trap", "Failed", SOON).await;
    assert_eq!(letter["status"]["retries"], 5, "{letter}");
    assert_eq!(run(&cluster, "good").await["v"], 2);
    let plugin = cluster.get_in(cluster.system(), Resource::PLUGIN, "probe").await;
    assert!(plugin["status"]["refusedReason"].is_null(), "{plugin}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_staged_version_serves_a_share_of_the_objects_first_and_then_all() {
    let cluster = Cluster::shared().await;
    let _host = serving(&cluster, &settling(), "settings: {do: ok, v: 1}\n").await;
    let config = "settings: {do: ok, v: 2}\nrollout: {staged: {share: 50%, for: 15s}}\n";
    let next = cluster.push("probe", &settling(), config).await;
    let staged = cluster.until_plugin("probe", &next, |plugin| ready_reason(plugin) == "OnTrial").await;
    assert!(staged["status"]["reason"].as_str().is_some_and(|reason| reason.contains("50% of the objects")), "{staged}");
    let mut seen = [0, 0];
    for number in 0..20 {
        let v = run(&cluster, &format!("p{number}")).await["v"].as_u64().expect("a number");
        seen[usize::try_from(v).expect("small") - 1] += 1;
    }
    assert!(seen[0] > 0 && seen[1] > 0, "{seen:?}");
    cluster.until_plugin("probe", &next, |plugin| ready_reason(plugin) == "Serving").await;
    for number in 0..4 {
        assert_eq!(run(&cluster, &format!("later-{number}")).await["v"], 2);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_only_traps_has_its_circuit_opened_and_nothing_is_dropped() {
    let cluster = Cluster::shared().await;
    let host = serving(&cluster, &probe(&json!({})), "backoff: {base: 200ms, max: 200ms}\n").await;
    for number in 0..10 {
        cluster.create(Resource::PROBE, &format!("p{number}"), json!({"do": "trap"})).await;
    }
    let open = async |value: f64| {
        eventually(SOON, async || match host.metric("berth_breaker_open", &[("kind", KIND)]).await {
            Some(open) if open == value => Ok(()),
            open => Err(format!("{open:?}")),
        })
        .await;
    };
    open(1.0).await;
    let plugin = cluster.until_in(cluster.system(), Resource::PLUGIN, "probe", SOON, |plugin| ready_reason(plugin) == "CircuitOpen").await;
    assert_eq!(ready_status(&plugin), "False", "{plugin}");
    let failures = async || host.metric("berth_reconcile_total", &[("kind", KIND), ("result", "failure")]).await.unwrap_or_default();
    eventually(SOON, async || {
        if host.metric("berth_queue_depth", &[("kind", KIND), ("state", "running")]).await == Some(0.0) { Ok(()) } else { Err("runs") }
    })
    .await;
    let before = failures().await;
    for number in 0..10 {
        cluster.patch(Resource::PROBE, &format!("p{number}"), json!({"spec": {"do": "ok"}})).await;
    }
    assert!(failures().await <= before + 1.0, "objects wait while it is open");
    for number in 0..10 {
        cluster.until_phase(Resource::PROBE, &format!("p{number}"), "Done", SOON).await;
    }
    open(0.0).await;
    cluster.until_in(cluster.system(), Resource::PLUGIN, "probe", SOON, |plugin| ready_reason(plugin) == "Serving").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_letter_is_tried_again_by_hand() {
    let stage = Stage::shared().await;
    let _host = stage.report_host(QUICK).await;
    stage.exporter.control(Behaviour::fail(503).only("broken"));
    for name in ["one", "two", "three"] {
        stage.job(name, "broken", 0).await;
    }
    for name in ["one", "two", "three"] {
        stage.until_job(name, "Failed").await;
        let marked =
            stage.cluster.until(Resource::JOB, name, SOON, |job| job["metadata"]["annotations"]["berth.acme.io/gave-up"].is_string()).await;
        let mark: Value =
            serde_json::from_str(marked["metadata"]["annotations"]["berth.acme.io/gave-up"].as_str().expect("text")).expect("JSON");
        assert!(mark["cause"].as_str().is_some_and(|cause| cause.contains("503")) && mark["generation"] == 1, "{mark}");
    }
    stage.exporter.behave();
    let said = berth(&stage.cluster, &["retry", "reportjob/one", "--namespace", stage.cluster.namespace()]).await;
    assert!(said.contains("had been given up on") && said.contains("503"), "{said}");
    let done = stage.until_job("one", "Done").await;
    assert_eq!(done["status"]["retries"].as_u64().unwrap_or_default(), 0, "{done}");
    let clean =
        stage.cluster.until(Resource::JOB, "one", SOON, |job| job["metadata"]["annotations"]["berth.acme.io/gave-up"].is_null()).await;
    assert!(clean["metadata"]["annotations"]["berth.acme.io/retry"].is_null(), "{clean}");
    assert_eq!(stage.cluster.get(Resource::JOB, "two").await["status"]["phase"], "Failed");
    let said = berth(&stage.cluster, &["retry", "reportjobs.batch.acme.io", "--all", "--namespace", stage.cluster.namespace()]).await;
    assert!(said.contains("2 objects"), "{said}");
    for name in ["two", "three"] {
        stage.until_job(name, "Done").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_letter_is_tried_again_by_a_new_version_if_its_plugin_yaml_says_so() {
    let stage = Stage::shared().await;
    let _host = stage.report_host(QUICK).await;
    stage.exporter.control(Behaviour::fail(503).only("broken"));
    stage.job("bad", "broken", 0).await;
    stage.until_job("bad", "Failed").await;
    stage.exporter.behave();
    let next = stage.push_report_job_as("report_job_v2", &format!("redrive: true\n{QUICK}")).await;
    stage.cluster.until_plugin("report-job", &next, |plugin| ready_reason(plugin) == "OnTrial").await;
    // A version on trial has to prove itself first.
    for number in 0..20 {
        stage.job(&format!("job-{number}"), "sales", 0).await;
    }
    assert_eq!(stage.until_job("bad", "Done").await["status"]["message"], "exported by version 2");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_given_up_on_without_a_field_for_it_is_remembered_after_a_restart() {
    let cluster = Cluster::shared().await;
    let mut host = serving(&cluster, &probe(&json!({})), "").await;
    cluster.create(Resource::PROBE, "p", json!({"do": "giveup"})).await;
    cluster.until(Resource::PROBE, "p", SOON, |object| object["metadata"]["annotations"]["berth.acme.io/gave-up"].is_string()).await;
    host.kill();
    host.restart().await;
    let count =
        async |result: &'static str| host.metric("berth_reconcile_total", &[("kind", KIND), ("result", result)]).await.unwrap_or_default();
    eventually(SOON, async || match count("settled").await {
        1.0.. => Ok(()),
        settled => Err(format!("{settled} settled")),
    })
    .await;
    assert_eq!(count("give_up").await, 0.0, "it is not run again");
    cluster.patch(Resource::PROBE, "p", json!({"spec": {"do": "ok"}})).await;
    let done = cluster.until_phase(Resource::PROBE, "p", "Done", SOON).await;
    assert!(done["metadata"]["annotations"]["berth.acme.io/gave-up"].is_null() || done["status"]["phase"] == "Done", "{done}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_object_waits_visibly_and_goes_on() {
    let cluster = Cluster::shared().await;
    let host = serving(&cluster, &settling(), "settings: {do: ok}\n").await;
    let mut object = Resource::PROBE.object(cluster.namespace(), "p", json!({}));
    object.metadata.annotations = Some([("berth.acme.io/paused".to_owned(), "true".to_owned())].into());
    cluster.api(Resource::PROBE).create(&kube::api::PostParams::default(), &object).await.expect("created");
    cluster.until_in(cluster.system(), Resource::PLUGIN, "probe", SOON, |plugin| plugin["status"]["hosts"][0]["paused"] == 1).await;
    always(Duration::from_secs(2), async || {
        let object = cluster.get(Resource::PROBE, "p").await;
        if object["status"].is_null() { Ok(()) } else { Err(object.to_string()) }
    })
    .await;
    assert!(berth(&cluster, &["plugins", "--namespace", cluster.system()]).await.contains("probe"));
    assert!(berth(&cluster, &["plugins", "probe", "--namespace", cluster.system()]).await.contains("Authorized"));
    cluster.patch(Resource::PROBE, "p", json!({"metadata": {"annotations": {"berth.acme.io/paused": null}}})).await;
    cluster.until_phase(Resource::PROBE, "p", "Done", SOON).await;
    drop(host);
}
