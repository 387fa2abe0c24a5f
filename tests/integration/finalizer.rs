//! Finalizers: an object that a plugin has to undo something for is gone only when that is done.

use std::time::Duration;

use berth_tests::{
    cluster::{Cluster, ready_reason},
    eventually::{always, eventually},
    host::{Flags, Host},
    proxy::{Answer, Effect, Outcome, Rule, Seen, Verb},
    resource::Resource,
    stage::{SOON, letters, probe, probing},
};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use serde_json::{Value, json};

const KIND: &str = "Probe.probe.acme.io";
const QUICK: &str = "backoff: {base: 100ms, max: 1s}\n";

fn claim(finalizer: bool) -> Value {
    let mut claim = letters(1);
    claim["finalizer"] = finalizer.into();
    claim
}

async fn serving(cluster: &Cluster) -> Host {
    probing(cluster, &probe(&claim(true)), QUICK).await
}

/// Asks for a deletion, and does not wait for it.
async fn ask_to_delete(cluster: &Cluster, name: &str) {
    cluster.api(Resource::PROBE).delete(name, &DeleteParams::default()).await.expect("it is there");
}

async fn until_gone(cluster: &Cluster, name: &str) {
    let api = cluster.api(Resource::PROBE);
    eventually(SOON, async || match api.get_opt(name).await {
        Ok(None) => Ok(()),
        Ok(Some(object)) => Err(format!("{:?} {}", object.metadata.finalizers, object.data)),
        Err(error) => Err(error.to_string()),
    })
    .await;
}

async fn until_told(cluster: &Cluster, name: &str, reason: &str) -> String {
    eventually(SOON, async || {
        let events = cluster.list(Resource::EVENT, "").await;
        let told = events.iter().find(|event| event["regarding"]["name"] == name && event["reason"] == reason);
        told.and_then(|event| event["note"].as_str().map(str::to_owned)).ok_or("nobody said so")
    })
    .await
}

fn finalizers(object: &Value) -> Vec<&str> {
    object["metadata"]["finalizers"].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
}

/// Does what the command in a sentence does.
async fn follow(cluster: &Cluster, name: &str, sentence: &str) {
    let (_, command) = sentence.split_once("kubectl patch probes.probe.acme.io ").unwrap_or_else(|| panic!("no command: {sentence}"));
    assert!(command.starts_with(&format!("{name} -n {} --type=merge -p '", cluster.namespace())), "{sentence}");
    let patch: Value = serde_json::from_str(command.split('\'').nth(1).expect("a patch")).expect("JSON");
    cluster.api(Resource::PROBE).patch(name, &PatchParams::default(), &Patch::Merge(patch)).await.expect("patched");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_has_the_finalizer_before_its_first_run_and_is_finalized_once() {
    let cluster = Cluster::shared().await;
    let host = serving(&cluster).await;
    cluster.create(Resource::PROBE, "p", json!({"do": "ok"})).await;
    let done = cluster.until_phase(Resource::PROBE, "p", "Done", SOON).await;
    assert!(matches!(finalizers(&done)[..], [name] if name.len() == "berth.acme.io/".len() + 10), "{done}");
    let writes: Vec<String> = host
        .proxy
        .entries()
        .iter()
        .filter(|entry| entry.seen.writes() && entry.seen.path.contains("/probes/p"))
        .map(|entry| if entry.seen.path.ends_with("/status") { "status" } else { "finalizer" }.to_owned())
        .collect();
    assert_eq!(writes, ["finalizer", "status"]);
    ask_to_delete(&cluster, "p").await;
    until_gone(&cluster, "p").await;
    let runs = host.metric("berth_reconcile_duration_seconds_count", &[("kind", KIND)]).await;
    assert_eq!(runs, Some(2.0), "one to apply and one to finalize");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_finalize_run_that_fails_is_repeated_and_never_the_last() {
    let cluster = Cluster::shared().await;
    let _host = serving(&cluster).await;
    for (name, how) in [("flaky", json!({"finalize": "flaky", "fails": 3})), ("trap", json!({"finalize": "trap"}))] {
        cluster.create(Resource::PROBE, name, how).await;
        cluster.until_phase(Resource::PROBE, name, "Done", SOON).await;
        ask_to_delete(&cluster, name).await;
    }
    until_gone(&cluster, "flaky").await;
    // A dead letter after one failure is for the spec, and not for the deletion.
    let stays = cluster.until(Resource::PROBE, "trap", SOON, |trap| trap["status"]["message"].as_str().is_some()).await;
    assert!(stays["status"]["phase"] == "Done" && finalizers(&stays).len() == 1, "{stays}");
    until_told(&cluster, "trap", "FinalizeFailed").await;
    cluster.patch(Resource::PROBE, "trap", json!({"spec": {"finalize": "ok"}})).await;
    until_gone(&cluster, "trap").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn giving_up_keeps_the_object_and_says_by_which_command_it_goes() {
    let cluster = Cluster::shared().await;
    let host = serving(&cluster).await;
    cluster.create(Resource::PROBE, "p", json!({"finalize": "giveup", "cause": "the other side is gone"})).await;
    cluster.until_phase(Resource::PROBE, "p", "Done", SOON).await;
    ask_to_delete(&cluster, "p").await;
    let sentence = until_told(&cluster, "p", "FinalizeGaveUp").await;
    assert!(sentence.contains("the other side is gone"), "{sentence}");
    let runs = async || host.metric("berth_reconcile_duration_seconds_count", &[("kind", KIND)]).await;
    let before = runs().await;
    always(Duration::from_secs(2), async || if runs().await == before { Ok(()) } else { Err("it ran again") }).await;
    assert_eq!(cluster.get(Resource::PROBE, "p").await["status"]["message"], "the other side is gone");
    follow(&cluster, "p", &sentence).await;
    until_gone(&cluster, "p").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_finalizer_whose_plugin_goes_is_reported_and_a_plugin_that_comes_back_goes_on() {
    let cluster = Cluster::shared().await;
    let other = cluster.another_namespace().await;
    let version = cluster.push("probe", &probe(&claim(true)), QUICK).await;
    let host = Host::start(&cluster, "host", &Flags { more_namespaces: vec![other.clone()], ..Flags::default() }).await;
    cluster.until_serving("probe", &version).await;
    for name in ["p", "q"] {
        cluster.create(Resource::PROBE, name, json!({"do": "ok"})).await;
        cluster.until_phase(Resource::PROBE, name, "Done", SOON).await;
    }
    let elsewhere = Resource::PROBE.api(cluster.client(), Some(&other));
    let object = Resource::PROBE.object(&other, "r", json!({"do": "ok"}));
    elsewhere.create(&kube::api::PostParams::default(), &object).await.expect("created");
    cluster.until_in(&other, Resource::PROBE, "r", SOON, |object| object["status"]["phase"] == "Done").await;
    let configmaps = Resource::CONFIG_MAP.api(cluster.client(), Some(cluster.system()));
    configmaps.delete("probe", &DeleteParams::default()).await.expect("it was there");
    let sentence = until_told(&cluster, "p", "FinalizerOrphaned").await;
    assert!(host.log().contains("finalizers wait for a plugin that is gone"));
    ask_to_delete(&cluster, "p").await;
    ask_to_delete(&cluster, "q").await;
    follow(&cluster, "p", &sentence).await;
    until_gone(&cluster, "p").await;
    // A namespace waits for what is in it, and goes once somebody lets go of that.
    let namespaces = Resource::NAMESPACE.api(cluster.client(), None);
    namespaces.delete(&other, &DeleteParams::default()).await.expect("it is there");
    let waits = |object: &Value| object["metadata"]["deletionTimestamp"].is_string();
    let left = cluster.until_in(&other, Resource::PROBE, "r", SOON, waits).await;
    assert_eq!(finalizers(&left).len(), 1, "{left}");
    let patch = Patch::Merge(json!({"metadata": {"finalizers": null}}));
    elsewhere.patch("r", &PatchParams::default(), &patch).await.expect("patched");
    eventually(SOON, async || match namespaces.get_opt(&other).await {
        Ok(None) => Ok(()),
        Ok(Some(namespace)) => Err(namespace.data.to_string()),
        Err(error) => Err(error.to_string()),
    })
    .await;
    // Under another name too: the finalizer is of the kind.
    cluster.push("probe-again", &probe(&claim(true)), QUICK).await;
    until_gone(&cluster, "q").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_version_that_no_longer_claims_the_finalizer_holds_up_nobody() {
    let cluster = Cluster::shared().await;
    let _host = serving(&cluster).await;
    cluster.create(Resource::PROBE, "p", json!({"finalize": "giveup"})).await;
    cluster.until_phase(Resource::PROBE, "p", "Done", SOON).await;
    cluster.create(Resource::PROBE, "q", json!({"do": "ok"})).await;
    cluster.until_phase(Resource::PROBE, "q", "Done", SOON).await;
    let version = cluster.push("probe", &probe(&claim(false)), QUICK).await;
    cluster.until_plugin("probe", &version, |plugin| ready_reason(plugin) == "OnTrial").await;
    // While it is on trial, the former version finalizes what it has to.
    ask_to_delete(&cluster, "p").await;
    until_told(&cluster, "p", "FinalizeGaveUp").await;
    for number in 0..20 {
        cluster.create(Resource::PROBE, &format!("proof-{number}"), json!({"do": "ok"})).await;
    }
    cluster.until_plugin("probe", &version, |plugin| ready_reason(plugin) == "Serving").await;
    until_gone(&cluster, "p").await;
    ask_to_delete(&cluster, "q").await;
    until_gone(&cluster, "q").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crd_that_is_deleted_with_its_objects_has_them_finalized() {
    let cluster = Cluster::shared().await;
    let group = format!("brief-{:04x}.acme.io", rand::random::<u16>());
    cluster.allow(&group, "briefs").await;
    let anything = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let crd = json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": format!("briefs.{group}")},
        "spec": {"group": group, "scope": "Namespaced", "names": {"kind": "Brief", "plural": "briefs", "singular": "brief"},
            "versions": [{"name": "v1", "served": true, "storage": true, "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": anything, "status": anything}}}}]},
    });
    cluster.install([crd]).await;
    let claim = json!({"finalizer": true, "group": group, "kind": "Brief", "plural": "briefs"});
    let version = cluster.push("brief", &probe(&claim), QUICK).await;
    let _host = Host::start(&cluster, "host", &Flags::default()).await;
    cluster.until_serving("brief", &version).await;
    let metadata = |name: &str| json!({"name": name, "namespace": cluster.namespace()});
    let brief =
        |name: &str| json!({"apiVersion": format!("{group}/v1"), "kind": "Brief", "metadata": metadata(name), "spec": {"do": "ok"}});
    cluster.install([brief("p"), brief("q")]).await;
    let resource = kube::api::ApiResource::from_gvk_with_plural(&kube::core::GroupVersionKind::gvk(&group, "v1", "Brief"), "briefs");
    let briefs: kube::Api<kube::api::DynamicObject> = kube::Api::namespaced_with(cluster.client().clone(), cluster.namespace(), &resource);
    eventually(SOON, async || {
        let all = briefs.list(&ListParams::default()).await.map_err(|error| error.to_string())?.items;
        let held = all.iter().filter(|brief| brief.metadata.finalizers.is_some() && brief.data["status"]["phase"] == "Done").count();
        if held == 2 { Ok(()) } else { Err(format!("{held} of 2 have the finalizer")) }
    })
    .await;
    let crds = Resource::CRD.api(cluster.client(), None);
    let name = format!("briefs.{group}");
    crds.delete(&name, &DeleteParams::default()).await.expect("it is there");
    eventually(SOON, async || match crds.get_opt(&name).await {
        Ok(None) => Ok(()),
        Ok(Some(crd)) => Err(crd.data["status"]["conditions"].to_string()),
        Err(error) => Err(error.to_string()),
    })
    .await;
    cluster.until_plugin("brief", &version, |plugin| ready_reason(plugin) == "WaitingForCRD").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finalizers_of_others_stay_and_lost_answers_cost_nothing() {
    let cluster = Cluster::shared().await;
    let host = serving(&cluster).await;
    let of_object = |entry: &Seen| entry.path.ends_with("/probes/p");
    let _lost = host.proxy.rule(Rule::on(Verb::Patch, Effect::CommitThenClose).when(of_object).times(1));
    let mut object = Resource::PROBE.object(cluster.namespace(), "p", json!({"do": "ok"}));
    object.metadata.finalizers = Some(vec!["someone.io/else".into()]);
    cluster.api(Resource::PROBE).create(&kube::api::PostParams::default(), &object).await.expect("created");
    let done = cluster.until_phase(Resource::PROBE, "p", "Done", SOON).await;
    assert_eq!((finalizers(&done).len(), finalizers(&done)[0]), (2, "someone.io/else"));
    let _lost = host.proxy.rule(Rule::on(Verb::Patch, Effect::CommitThenClose).when(of_object).times(1));
    ask_to_delete(&cluster, "p").await;
    cluster.until(Resource::PROBE, "p", SOON, |object| finalizers(object) == ["someone.io/else"]).await;
    let runs = host.metric("berth_reconcile_duration_seconds_count", &[("kind", KIND)]).await;
    assert_eq!(runs, Some(2.0));
    cluster.patch(Resource::PROBE, "p", json!({"metadata": {"finalizers": null}})).await;
    until_gone(&cluster, "p").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_finalizer_that_cannot_be_added_or_taken_off_is_tried_at_growing_pauses() {
    let cluster = Cluster::shared().await;
    let host = serving(&cluster).await;
    let refusing = |name: &'static str| {
        let of_finalizer = move |entry: &Seen| entry.path.ends_with(name) && !entry.json()["metadata"]["finalizers"].is_null();
        host.proxy.rule(Rule::on(Verb::Patch, Effect::Answer(Answer::failure(500, "InternalError"))).when(of_finalizer).times(3))
    };
    let adding = refusing("/probes/p");
    cluster.create(Resource::PROBE, "p", json!({"do": "ok"})).await;
    cluster.until_phase(Resource::PROBE, "p", "Done", SOON).await;
    assert_eq!(adding.hits(), 3);
    let releasing = refusing("/probes/p");
    ask_to_delete(&cluster, "p").await;
    until_gone(&cluster, "p").await;
    assert_eq!(releasing.hits(), 3);
    let times: Vec<_> =
        host.proxy.entries().into_iter().filter(|entry| entry.outcome == Outcome::Answered(500)).map(|entry| entry.seen.at).collect();
    for tries in times.chunks(3) {
        let pauses: Vec<_> = tries.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(pauses[0] >= Duration::from_secs(1) && pauses[1] >= Duration::from_secs(2), "{pauses:?}");
    }
    assert_eq!(times.len(), 6);
}
