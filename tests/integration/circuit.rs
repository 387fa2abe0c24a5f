//! Objects that wait: while a circuit is open, while the plugin or the object is paused; and what the `Plugin` object says of it.

use std::time::{Duration, Instant};

use berth_tests::{
    cluster::{Cluster, ready_reason, ready_status},
    eventually::{always, eventually, scaled},
    host::{Flags, Host},
    resource::Resource,
    stage::{SOON, berth, probe, probing, settling},
};
use serde_json::{Value, json};

const KIND: &str = "Probe.probe.acme.io";

async fn until_open(host: &Host, value: f64) {
    eventually(SOON, async || match host.metric("berth_breaker_open", &[("kind", KIND)]).await {
        Some(open) if open == value => Ok(()),
        open => Err(format!("{open:?}")),
    })
    .await;
}

/// That an object of the test has no status for some time.
async fn stays_untouched(cluster: &Cluster, name: &str) {
    always(Duration::from_secs(2), async || match cluster.get(Resource::PROBE, name).await {
        object if object["status"].is_null() => Ok(()),
        object => Err(object.to_string()),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_only_traps_has_its_circuit_opened_and_nothing_is_dropped() {
    let cluster = Cluster::shared().await;
    let objects = scaled(10, 500);
    for number in 0..objects {
        cluster.create(Resource::PROBE, &format!("p{number}"), json!({"do": "trap"})).await;
    }
    let host = probing(&cluster, &probe(&json!({})), "backoff: {base: 200ms, max: 200ms}\n").await;
    until_open(&host, 1.0).await;
    let opened = Instant::now();
    for number in 0..objects {
        cluster.patch(Resource::PROBE, &format!("p{number}"), json!({"spec": {"do": "ok"}})).await;
    }
    // It probes after ten seconds.
    always(Duration::from_secs(8).saturating_sub(opened.elapsed()), async || {
        let done = cluster.list(Resource::PROBE, "").await.into_iter().find(|object| object["status"]["phase"] == "Done");
        done.map_or(Ok(()), |object| Err(object.to_string()))
    })
    .await;
    let plugin = cluster.get_in(cluster.system(), Resource::PLUGIN, "probe").await;
    assert_eq!((ready_status(&plugin), ready_reason(&plugin)), ("False", "CircuitOpen"), "{plugin}");
    for number in 0..objects {
        cluster.until_phase(Resource::PROBE, &format!("p{number}"), "Done", SOON).await;
    }
    until_open(&host, 0.0).await;
    cluster.until_in(cluster.system(), Resource::PLUGIN, "probe", SOON, |plugin| ready_reason(plugin) == "Serving").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_object_waits_visibly_and_goes_on() {
    let cluster = Cluster::shared().await;
    let host = probing(&cluster, &settling(), "settings: {do: ok}\n").await;
    let mut object = Resource::PROBE.object(cluster.namespace(), "p", json!({}));
    object.metadata.annotations = Some([("berth.acme.io/paused".to_owned(), "true".to_owned())].into());
    cluster.api(Resource::PROBE).create(&kube::api::PostParams::default(), &object).await.expect("created");
    cluster.until_in(cluster.system(), Resource::PLUGIN, "probe", SOON, |plugin| plugin["status"]["hosts"][0]["paused"] == 1).await;
    always(Duration::from_secs(2), async || {
        let object = cluster.get(Resource::PROBE, "p").await;
        if object["status"].is_null() { Ok(()) } else { Err(object.to_string()) }
    })
    .await;
    let said = berth(&cluster, &["plugins", "--namespace", cluster.system()]).await;
    let row: Vec<_> = said.lines().find(|line| line.starts_with("probe ")).expect("a line").split_whitespace().collect();
    assert_eq!((row[1], row[4]), (KIND, "True"), "{said}");
    assert_eq!(row[5..9], ["1", "0", "0", "1"], "one object, which is paused: {said}");
    assert!(berth(&cluster, &["plugins", "probe", "--namespace", cluster.system()]).await.contains("Authorized"));
    cluster.patch(Resource::PROBE, "p", json!({"metadata": {"annotations": {"berth.acme.io/paused": null}}})).await;
    cluster.until_phase(Resource::PROBE, "p", "Done", SOON).await;
    drop(host);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_on_which_the_handler_always_traps_hold_up_the_others_for_a_moment() {
    let cluster = Cluster::shared().await;
    let host = probing(&cluster, &settling(), "backoff: {base: 200ms, max: 200ms}\n").await;
    for number in 0..6 {
        cluster.create(Resource::PROBE, &format!("poison-{number}"), json!({"do": "trap"})).await;
    }
    until_open(&host, 1.0).await;
    for round in 0..2 {
        let name = format!("healthy-{round}");
        cluster.create(Resource::PROBE, &name, json!({"do": "ok"})).await;
        cluster.until_phase(Resource::PROBE, &name, "Done", SOON).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_plugin_stays_paused_whatever_is_written_to_its_configmap_and_goes_on() {
    let cluster = Cluster::shared().await;
    let _host = probing(&cluster, &settling(), "settings: {v: 1}\n").await;
    let paused = cluster.push("probe", &settling(), "settings: {v: 1}\npaused: true\n").await;
    cluster.until_plugin("probe", &paused, |plugin| ready_reason(plugin) == "Paused").await;
    cluster.create(Resource::PROBE, "p", json!({})).await;
    stays_untouched(&cluster, "p").await;
    let maps = Resource::CONFIG_MAP.api(cluster.client(), Some(cluster.system()));
    let touch = kube::api::Patch::Merge(json!({"metadata": {"annotations": {"example.com/note": "touched"}}}));
    let touched = maps.patch("probe", &kube::api::PatchParams::default(), &touch).await.expect("patched");
    let touched = touched.metadata.resource_version.expect("the API server gives one");
    cluster.until_plugin("probe", &touched, |plugin| ready_reason(plugin) == "Paused").await;
    let broken = cluster.push("probe", &[0; 4096], "paused: true\n").await;
    cluster.until_plugin("probe", &broken, |plugin| ready_reason(plugin) == "NotAComponent").await;
    stays_untouched(&cluster, "p").await;
    cluster.push("probe", &settling(), "settings: {v: 1}\n").await;
    cluster.until_phase(Resource::PROBE, "p", "Done", SOON).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_hosts_with_leases_and_namespaces_of_their_own_tell_of_one_plugin() {
    let cluster = Cluster::shared().await;
    let other = cluster.another_namespace().await;
    let version = cluster.push("probe", &settling(), "settings: {v: 1}\n").await;
    let _first = Host::start(&cluster, "first", &Flags::default()).await;
    let role = |kind: &str, more: Value| {
        let mut object = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind,
            "metadata": {"name": "berth-another", "namespace": cluster.system()}});
        object.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        object
    };
    let rule = json!({"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": ["another"],
        "verbs": ["get", "list", "watch", "update", "patch"]});
    let account = json!({"kind": "ServiceAccount", "name": "berth", "namespace": cluster.system()});
    let role_ref = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "berth-another"});
    let objects = [role("Role", json!({"rules": [rule]})), role("RoleBinding", json!({"roleRef": role_ref, "subjects": [account]}))];
    cluster.install(objects).await;
    let flags = ["--lease-name=another", &format!("--watch-namespace={other}")].map(str::to_owned);
    let second = Host::start(&cluster, "second", &Flags { more: flags.into(), ..Flags::default() }).await;
    second.until_leading().await;
    cluster.until_serving("probe", &version).await;
    cluster.create(Resource::PROBE, "here", json!({})).await;
    let there = Resource::PROBE.api(cluster.client(), Some(&other));
    for name in ["one", "two"] {
        let object = Resource::PROBE.object(&other, name, json!({}));
        there.create(&kube::api::PostParams::default(), &object).await.expect("created");
        cluster.until_in(&other, Resource::PROBE, name, SOON, |object| object["status"]["phase"] == "Done").await;
    }
    cluster.until_phase(Resource::PROBE, "here", "Done", SOON).await;
    let objects = |plugin: &Value, lease: &str| -> Option<u64> {
        let hosts = plugin["status"]["hosts"].as_array()?;
        hosts.iter().find(|host| host["name"] == lease)?["objects"].as_u64()
    };
    let both = |plugin: &Value| objects(plugin, "berth") == Some(1) && objects(plugin, "another") == Some(2);
    let plugin = cluster.until_in(cluster.system(), Resource::PLUGIN, "probe", SOON, both).await;
    assert_eq!((ready_reason(&plugin), &plugin["status"]["contract"]), ("Serving", &json!("0.1")), "{plugin}");
    // They do not correct each other without end.
    let before = cluster.get_in(cluster.system(), Resource::PLUGIN, "probe").await;
    always(Duration::from_secs(3), async || match cluster.get_in(cluster.system(), Resource::PLUGIN, "probe").await {
        now if now["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"] => Ok(()),
        now => Err(format!("{before}\n{now}")),
    })
    .await;
}
