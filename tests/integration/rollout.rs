//! Versions that undo themselves: trial, rollback, staged rollout, and what survives a restart.

use berth_tests::{
    cluster::{Cluster, ready_reason, ready_status},
    eventually::eventually,
    host::{Flags, Host},
    resource::Resource,
    stage::{SOON, probing, settling},
};
use kube::api::DeleteParams;
use serde_json::{Value, json};

const KIND: &str = "Probe.probe.acme.io";
const QUICK: &str = "backoff: {base: 100ms, max: 300ms}\n";

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

/// Whether something was rolled back to what is kept.
fn has_quarantine(kept: &Value) -> bool {
    kept["metadata"]["annotations"]["berth.acme.io/rolled-back"].is_string()
}

/// Runs of the probe on trial that ended so.
async fn tried(host: &Host, result: &str) -> f64 {
    host.metric("berth_candidate_runs_total", &[("kind", KIND), ("result", result)]).await.unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_version_that_traps_where_the_former_did_not_is_rolled_back_and_stays_so() {
    let cluster = Cluster::shared().await;
    let mut host = probing(&cluster, &settling(), "settings: {do: ok, v: 1}\n").await;
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
    assert_eq!(host.log().matches("a new version is on trial").count(), 1, "not tried again");

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
    let host = probing(&cluster, &settling(), "settings: {do: ok, v: 1}\n").await;
    let first = kept(&cluster, |map| map["immutable"] == true).await;
    let next = cluster.push("probe", &settling(), "settings: {do: ok, v: 2}\n").await;
    let on_trial = cluster.until_plugin("probe", &next, |plugin| ready_reason(plugin) == "OnTrial").await;
    assert_eq!(on_trial["status"]["contract"], "0.1", "{on_trial}");
    for number in 0..20 {
        cluster.create(Resource::PROBE, &format!("p{number}"), json!({})).await;
    }
    // A minute would make it the stable one too.
    let passes = async |plugin: Value| if ready_reason(&plugin) == "Serving" { Ok(plugin) } else { Err(plugin.to_string()) };
    let passed = eventually(SOON, async || passes(cluster.get_in(cluster.system(), Resource::PLUGIN, "probe").await).await).await;
    assert!(passed["status"]["candidateVersion"].is_null(), "{passed}");
    assert_eq!((tried(&host, "good").await >= 20.0, tried(&host, "worse").await), (true, 0.0));
    for number in 0..20 {
        let done = cluster.until_phase(Resource::PROBE, &format!("p{number}"), "Done", SOON).await;
        assert_eq!(done["status"]["settings"]["v"], 2, "{done}");
    }
    let second = kept(&cluster, |map| map["metadata"]["uid"] != first["metadata"]["uid"]).await;
    assert!(second["data"]["plugin.yaml"].as_str().is_some_and(|text| text.contains("v: 2")), "{}", second["data"]);
    assert_eq!(second["metadata"]["ownerReferences"][0]["name"], "probe");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_starts_with_only_a_bad_version_serves_the_good_one_that_was_kept() {
    let cluster = Cluster::shared().await;
    let mut host = probing(&cluster, &settling(), "settings: {do: ok, v: 1}\n").await;
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
    let _host = probing(&cluster, &settling(), &format!("settings: {{do: ok, v: 1}}\n{QUICK}")).await;
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
    let _host = probing(&cluster, &settling(), "settings: {do: ok, v: 1}\n").await;
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
async fn a_version_that_misses_its_deadline_where_the_former_did_not_is_rolled_back() {
    let cluster = Cluster::shared().await;
    let host = probing(&cluster, &settling(), "settings: {do: ok, v: 1}\n").await;
    let slow = cluster.push("probe", &settling(), "settings: {do: hostblock, v: 2}\ntimeout: 300ms\n").await;
    cluster.until_plugin("probe", &slow, |plugin| ready_reason(plugin) == "OnTrial").await;
    for number in 0..3 {
        assert_eq!(run(&cluster, &format!("p{number}")).await["v"], 1);
    }
    let rolled_back = cluster.until_plugin("probe", &slow, |plugin| ready_reason(plugin) == "RolledBack").await;
    let why = rolled_back["status"]["refusedReason"].as_str().unwrap_or_default();
    assert!(why.contains("in 3 of 3 runs") && why.contains("timeout"), "{why}");
    assert_eq!(tried(&host, "worse").await, 3.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_staged_version_that_traps_is_rolled_back_and_every_object_is_the_former_ones() {
    let cluster = Cluster::shared().await;
    let _host = probing(&cluster, &settling(), "settings: {do: ok, v: 1}\n").await;
    let config = "settings: {do: trap, v: 2}\nrollout: {staged: {share: 50%, for: 1h}}\n";
    let bad = cluster.push("probe", &settling(), config).await;
    cluster.until_plugin("probe", &bad, |plugin| ready_reason(plugin) == "OnTrial").await;
    for number in 0..10 {
        assert_eq!(run(&cluster, &format!("p{number}")).await["v"], 1);
    }
    cluster.until_plugin("probe", &bad, |plugin| ready_reason(plugin) == "RolledBack").await;
    kept(&cluster, has_quarantine).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_version_whose_children_nobody_may_write_is_rolled_back_and_does_not_pass_by_time() {
    let cluster = Cluster::shared().await;
    let claim = json!({
        "progress": {"phaseField": "status.phase", "settled": ["Done", "Failed"]},
        "owns": ["ConfigMap"],
    });
    let host = probing(&cluster, &berth_tests::stage::probe(&claim), "settings: {do: ok, v: 1}\n").await;
    let config = "settings: {do: children, v: 2}\nserviceAccountName: mistyped\n";
    let bad = cluster.push("probe", &berth_tests::stage::probe(&claim), config).await;
    cluster.until_plugin("probe", &bad, |plugin| ready_reason(plugin) == "OnTrial").await;
    let child = json!({"children": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "child"}}]});
    for number in 0..3 {
        let name = format!("p{number}");
        cluster.create(Resource::PROBE, &name, child.clone()).await;
        let done = cluster.until_phase(Resource::PROBE, &name, "Done", SOON).await;
        assert_eq!(done["status"]["settings"]["v"], 1, "{done}");
    }
    let rolled_back = cluster.until_plugin("probe", &bad, |plugin| ready_reason(plugin) == "RolledBack").await;
    assert!(rolled_back["status"]["refusedReason"].as_str().is_some_and(|why| why.contains("children")), "{rolled_back}");
    assert_eq!(tried(&host, "worse").await, 3.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_rolled_back_stays_so_when_its_configmap_is_touched_hidden_or_replaced() {
    let cluster = Cluster::shared().await;
    let host = probing(&cluster, &settling(), "settings: {do: ok, v: 1}\n").await;
    let bad = cluster.push("probe", &settling(), "settings: {do: trap, v: 2}\n").await;
    cluster.until_plugin("probe", &bad, |plugin| ready_reason(plugin) == "OnTrial").await;
    assert_eq!(run(&cluster, "p").await["v"], 1);
    kept(&cluster, has_quarantine).await;
    let maps = Resource::CONFIG_MAP.api(cluster.client(), Some(cluster.system()));
    let patched = async |patch: Value| {
        let patch = kube::api::Patch::Merge(patch);
        let map = maps.patch("probe", &kube::api::PatchParams::default(), &patch).await.expect("patched");
        map.metadata.resource_version.expect("the API server gives one")
    };
    let label = |value: Value| json!({"metadata": {"labels": {"berth.acme.io/plugin": value}}});
    let touched = patched(json!({"metadata": {"annotations": {"example.com/note": "touched"}}})).await;
    cluster.until_plugin("probe", &touched, |plugin| ready_reason(plugin) == "RolledBack").await;

    patched(label(Value::Null)).await;
    eventually(SOON, async || match host.metric("berth_plugin_info", &[("plugin", "probe")]).await {
        None | Some(0.0) => Ok(()),
        Some(_) => Err("it still serves"),
    })
    .await;
    let shown = patched(label("true".into())).await;
    cluster.until_plugin("probe", &shown, |plugin| ready_reason(plugin) == "RolledBack").await;
    assert_eq!(run(&cluster, "shown").await["v"], 1);

    let before = kept(&cluster, has_quarantine).await;
    maps.delete("probe", &DeleteParams::default()).await.expect("deleted");
    let replaced = cluster.push("probe", &settling(), "settings: {do: trap, v: 2}\n").await;
    cluster.until_plugin("probe", &replaced, |plugin| ready_reason(plugin) == "RolledBack").await;
    assert_eq!(run(&cluster, "replaced").await["v"], 1);
    kept(&cluster, |map| map["metadata"]["uid"] != before["metadata"]["uid"] && has_quarantine(map)).await;
    assert_eq!(host.log().matches("a new version is on trial").count(), 1, "it was tried once");
}
