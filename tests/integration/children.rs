//! Children: applied as the plugin's own account, kept as they are wanted, never taken from anybody.

use std::time::Duration;

use berth_tests::{
    account::{EVERYTHING, MAKER, account, grant_children, impersonation, labelled, rights},
    cluster::Cluster,
    eventually::{always, eventually},
    host::{Flags, Host},
    proxy::{Effect, Rule, Verb},
    resource::Resource,
    stage::{SOON, Stage, letters, probe, probing},
};
use kube::api::{DeleteParams, DynamicObject, Patch, PatchParams};
use serde_json::{Value, json};

/// The garbage collector looks for new kinds every 30 s, and a control plane that has just started has not seen ours yet.
const COLLECTED: Duration = Duration::from_secs(120);
const KIND: &str = "Probe.probe.acme.io";
const CONFIG: &str = "serviceAccountName: maker\nbackoff: {base: 100ms, max: 1s}\n";

/// Phases as a Deployment would have: an object is settled when it is `Done`, and its children live on.
fn claim() -> Value {
    let mut claim = letters(1);
    claim["owns"] = json!(["ConfigMap"]);
    claim
}

/// A host with a probe that owns ConfigMaps, and every grant that this takes.
async fn making(cluster: &Cluster) -> Host {
    making_with(cluster, CONFIG).await
}

async fn making_with(cluster: &Cluster, config: &str) -> Host {
    grant_children(cluster).await;
    serving(cluster, config).await
}

async fn serving(cluster: &Cluster, config: &str) -> Host {
    probing(cluster, &probe(&claim()), config).await
}

fn child(name: &str, data: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data})
}

fn wants(children: impl IntoIterator<Item = Value>) -> Value {
    json!({"do": "children", "children": children.into_iter().collect::<Vec<_>>()})
}

async fn until_child(cluster: &Cluster, name: &str, is: impl Fn(&Value) -> bool) -> Value {
    cluster.until(Resource::CONFIG_MAP, name, SOON, is).await
}

async fn until_gone(cluster: &Cluster, name: &str) {
    let api = cluster.api(Resource::CONFIG_MAP);
    eventually(COLLECTED, async || match api.get_opt(name).await {
        Ok(None) => Ok(()),
        Ok(Some(_)) => Err("it is still there".to_owned()),
        Err(error) => Err(error.to_string()),
    })
    .await;
}

/// Waits for an Event about an object whose note has these words.
async fn until_told(cluster: &Cluster, name: &str, reason: &str, words: &[&str]) -> String {
    eventually(SOON, async || {
        let events = cluster.list(Resource::EVENT, "").await;
        let notes: Vec<String> = events
            .iter()
            .filter(|event| event["regarding"]["name"] == name && event["reason"] == reason)
            .filter_map(|event| event["note"].as_str().map(str::to_owned))
            .collect();
        let told = notes.iter().find(|note| words.iter().all(|word| note.contains(word))).cloned();
        told.ok_or_else(|| format!("{notes:?}"))
    })
    .await
}

async fn until_hindered(host: &Host) {
    eventually(SOON, async || match host.metric("berth_reconcile_total", &[("kind", KIND), ("result", "children_hindered")]).await {
        Some(1.0..) => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_is_applied_as_the_plugins_account_with_its_owner_and_then_all_is_quiet() {
    let cluster = Cluster::shared().await;
    let host = making(&cluster).await;
    let owner = cluster.create(Resource::PROBE, "p", wants([child("c", json!({"a": "1"}))])).await;
    cluster.until_phase(Resource::PROBE, "p", "Done", SOON).await;
    let made = cluster.api(Resource::CONFIG_MAP).get("c").await.expect("it was made before the status said so");
    let references = made.metadata.owner_references.expect("an owner");
    assert_eq!((references[0].uid.as_str(), references[0].controller), (owner.metadata.uid.as_deref().expect("a uid"), Some(true)));
    let managers = made.metadata.managed_fields.expect("managed fields");
    assert_eq!(managers.iter().map(|entry| entry.manager.as_deref()).collect::<Vec<_>>(), [Some("berth:Probe.probe.acme.io")]);
    let user = format!("system:serviceaccount:{}:{MAKER}", cluster.system());
    let of_children: Vec<_> =
        host.proxy.entries().into_iter().filter(|entry| entry.seen.path.contains(&format!("{}/configmaps", cluster.namespace()))).collect();
    assert!(!of_children.is_empty());
    for entry in &of_children {
        assert_eq!(entry.seen.headers.get("impersonate-user").and_then(|user| user.to_str().ok()), Some(user.as_str()), "{entry}");
    }
    assert_eq!(of_children.iter().filter(|entry| entry.seen.writes()).count(), 1);
    // The figures of the `Plugin` object trail by their pace and a look.
    tokio::time::sleep(Duration::from_secs(22)).await;
    let mark = host.proxy.mark();
    tokio::time::sleep(Duration::from_secs(6)).await;
    let others: Vec<String> = host
        .proxy
        .since(mark)
        .iter()
        .filter(|entry| entry.seen.verb != Verb::Watch && !entry.seen.path.contains("/leases/"))
        .map(ToString::to_string)
        .collect();
    assert!(others.is_empty(), "{others:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_somebody_does_to_a_child_is_undone_and_what_they_add_stays() {
    let cluster = Cluster::shared().await;
    let host = making(&cluster).await;
    cluster.create(Resource::PROBE, "p", wants([child("c", json!({"a": "1"}))])).await;
    let made = until_child(&cluster, "c", |_| true).await;
    cluster.until_phase(Resource::PROBE, "p", "Done", SOON).await;
    cluster.patch(Resource::CONFIG_MAP, "c", json!({"data": {"a": "2", "b": "theirs"}})).await;
    let mended = until_child(&cluster, "c", |child| child["data"]["a"] == "1").await;
    assert_eq!((&mended["data"]["b"], &mended["metadata"]["uid"]), (&json!("theirs"), &made["metadata"]["uid"]));
    cluster.patch(Resource::CONFIG_MAP, "c", json!({"metadata": {"labels": null, "ownerReferences": null}})).await;
    until_child(&cluster, "c", |child| child["metadata"]["ownerReferences"][0]["kind"] == "Probe").await;
    cluster.api(Resource::CONFIG_MAP).delete("c", &DeleteParams::default()).await.expect("deleted");
    let again = until_child(&cluster, "c", |child| child["metadata"]["uid"] != made["metadata"]["uid"]).await;
    assert_eq!(again["data"], json!({"a": "1"}));
    // What nobody asked for changes nothing, and is no reason to run.
    let runs = async || host.metric("berth_reconcile_duration_seconds_count", &[("kind", KIND)]).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = runs().await;
    cluster.patch(Resource::CONFIG_MAP, "c", json!({"metadata": {"annotations": {"someone.io/note": "x"}}})).await;
    always(Duration::from_secs(2), async || if runs().await == before { Ok(()) } else { Err("it ran") }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_longer_wanted_is_deleted_and_what_was_never_the_owners_is_not() {
    let cluster = Cluster::shared().await;
    let _host = making(&cluster).await;
    cluster.create(Resource::PROBE, "other", wants([child("others", json!({}))])).await;
    cluster.create(Resource::PROBE, "p", wants([child("a", json!({})), child("b", json!({}))])).await;
    cluster.until_phase(Resource::PROBE, "p", "Done", SOON).await;
    cluster.until_phase(Resource::PROBE, "other", "Done", SOON).await;
    let uid = cluster.get(Resource::PROBE, "p").await["metadata"]["uid"].clone();
    let mut forged = child("forged", json!({}));
    forged["metadata"]["namespace"] = cluster.namespace().into();
    let mark = cluster.get(Resource::CONFIG_MAP, "a").await["metadata"]["labels"]["berth.acme.io/owner-kind"].clone();
    forged["metadata"]["labels"] = json!({"berth.acme.io/owner-uid": uid, "berth.acme.io/owner-kind": mark});
    cluster.install([forged]).await;
    cluster.patch(Resource::PROBE, "p", json!({"spec": wants([child("b", json!({}))])})).await;
    until_gone(&cluster, "a").await;
    cluster.patch(Resource::PROBE, "p", json!({"spec": {"children": null}})).await;
    cluster.until(Resource::PROBE, "p", SOON, |probe| probe["status"]["observedGeneration"] == 3).await;
    cluster.get(Resource::CONFIG_MAP, "b").await;
    cluster.patch(Resource::PROBE, "p", json!({"spec": {"children": []}})).await;
    until_gone(&cluster, "b").await;
    cluster.get(Resource::CONFIG_MAP, "others").await;
    cluster.get(Resource::CONFIG_MAP, "forged").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_goes_with_its_owner() {
    let cluster = Cluster::shared().await;
    let _host = making(&cluster).await;
    cluster.create(Resource::PROBE, "p", wants([child("c", json!({}))])).await;
    cluster.until_phase(Resource::PROBE, "p", "Done", SOON).await;
    cluster.delete(Resource::PROBE, "p").await;
    until_gone(&cluster, "c").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_field_of_another_manager_is_not_taken_and_the_sentence_names_both() {
    let cluster = Cluster::shared().await;
    let host = making(&cluster).await;
    cluster.create(Resource::PROBE, "p", wants([child("c", json!({"a": "1"}))])).await;
    cluster.until_phase(Resource::PROBE, "p", "Done", SOON).await;
    let api = cluster.api(Resource::CONFIG_MAP);
    let apply = async |data: Value| {
        let object: DynamicObject = serde_json::from_value(child("c", data)).expect("an object");
        api.patch("c", &PatchParams::apply("somebody"), &Patch::Apply(object)).await.expect("applied")
    };
    apply(json!({"b": "theirs"})).await;
    cluster.patch(Resource::PROBE, "p", json!({"spec": wants([child("c", json!({"a": "1", "b": "ours"}))])})).await;
    until_told(&cluster, "p", "ChildConflict", &[".data.b", "\"somebody\"", "ConfigMap"]).await;
    until_hindered(&host).await;
    let now = cluster.get(Resource::PROBE, "p").await;
    assert!(now["status"]["observedGeneration"] != 2 && now["status"]["retries"].as_u64().unwrap_or(0) == 0, "{now}");
    assert_eq!(cluster.get(Resource::CONFIG_MAP, "c").await["data"]["b"], "theirs");
    apply(json!({})).await;
    until_child(&cluster, "c", |child| child["data"]["b"] == "ours").await;
    cluster.until(Resource::PROBE, "p", SOON, |probe| probe["status"]["observedGeneration"] == 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_of_somebody_else_is_not_taken_over() {
    let cluster = Cluster::shared().await;
    let _host = making(&cluster).await;
    let mut theirs = child("c", json!({"theirs": "1"}));
    theirs["metadata"]["namespace"] = cluster.namespace().into();
    cluster.install([theirs]).await;
    let before = cluster.get(Resource::CONFIG_MAP, "c").await;
    cluster.create(Resource::PROBE, "p", wants([child("c", json!({"a": "1"}))])).await;
    until_told(&cluster, "p", "ChildExists", &["ConfigMap", "/c exists already"]).await;
    assert_eq!(cluster.get(Resource::CONFIG_MAP, "c").await, before);
    cluster.api(Resource::CONFIG_MAP).delete("c", &DeleteParams::default()).await.expect("deleted");
    cluster.until_phase(Resource::PROBE, "p", "Done", SOON).await;
    assert_eq!(cluster.get(Resource::CONFIG_MAP, "c").await["data"], json!({"a": "1"}));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_that_somebody_else_makes_at_the_same_time_is_given_back() {
    let cluster = Cluster::shared().await;
    let host = making(&cluster).await;
    let apply = host.proxy.rule(Rule::on(Verb::Patch, Effect::Hold).path("/configmaps/c").times(1));
    cluster.create(Resource::PROBE, "p", wants([child("c", json!({"a": "1"}))])).await;
    apply.reached(1).await;
    // Without a field that both want to be different, which the API server would tell.
    let mut theirs = child("c", json!({"theirs": "1"}));
    theirs["metadata"]["namespace"] = cluster.namespace().into();
    cluster.install([theirs]).await;
    let mut before = cluster.get(Resource::CONFIG_MAP, "c").await;
    apply.release();
    until_told(&cluster, "p", "ChildExists", &["ConfigMap", "/c exists already"]).await;
    let mut after = cluster.get(Resource::CONFIG_MAP, "c").await;
    for object in [&mut before, &mut after] {
        object["metadata"]["resourceVersion"].take();
    }
    assert_eq!(after, before);
    cluster.api(Resource::PROBE).delete("p", &DeleteParams::default()).await.expect("deleted");
    always(Duration::from_secs(2), async || match cluster.api(Resource::CONFIG_MAP).get_opt("c").await {
        Ok(Some(object)) if object.metadata.deletion_timestamp.is_none() => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_rule_is_a_sentence_while_the_neighbour_goes_on_and_heals_when_it_is_granted() {
    let stage = Stage::shared().await;
    let cluster = &stage.cluster;
    let without_create = ["get", "list", "watch", "patch", "delete"];
    cluster.install([labelled(cluster)].into_iter().chain(impersonation(cluster)).chain(rights(cluster, &without_create))).await;
    let version = cluster.push("probe", &probe(&claim()), CONFIG).await;
    let host = stage.email_host().await;
    cluster.until_serving("probe", &version).await;
    cluster.create(Resource::PROBE, "p", wants([child("c", json!({}))])).await;
    let account = format!("{}/{MAKER}", cluster.system());
    until_told(cluster, "p", "AccountForbidden", &["create configmaps", cluster.namespace(), &account]).await;
    until_hindered(&host).await;
    stage.mail("e1", "a@example.com").await;
    stage.until_mail("e1", "Sent").await;
    assert!(cluster.get(Resource::PROBE, "p").await["status"]["retries"].as_u64().unwrap_or(0) == 0);
    cluster.install(rights(cluster, &EVERYTHING)).await;
    cluster.until_phase(Resource::PROBE, "p", "Done", SOON).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_account_that_may_not_watch_children_is_told_and_its_objects_wait() {
    let cluster = Cluster::shared().await;
    let without_watch = ["get", "list", "create", "patch", "delete"];
    cluster.install([labelled(&cluster)].into_iter().chain(impersonation(&cluster)).chain(rights(&cluster, &without_watch))).await;
    let host = serving(&cluster, CONFIG).await;
    cluster.create(Resource::PROBE, "p", wants([child("c", json!({}))])).await;
    until_told(&cluster, "p", "AccountForbidden", &["watch configmaps", cluster.namespace()]).await;
    until_hindered(&host).await;
    let troubled = |plugin: &Value| plugin["status"]["reason"].as_str().is_some_and(|reason| reason.contains("watching its configmaps"));
    cluster.until_in(cluster.system(), Resource::PLUGIN, "probe", Duration::from_secs(90), troubled).await;
    cluster.install(rights(&cluster, &EVERYTHING)).await;
    cluster.until_phase(Resource::PROBE, "p", "Done", Duration::from_secs(60)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_another_version_wants_comes_about_for_what_was_hindered_and_for_what_was_settled() {
    let cluster = Cluster::shared().await;
    let settings = |name: &str| format!("{CONFIG}settings: {}\n", json!({"children": [child(name, json!({"a": "1"}))]}));
    let push = async |name: &str| {
        let version = cluster.push("probe", &probe(&claim()), &settings(name)).await;
        cluster.until_plugin("probe", &version, |_| true).await;
    };
    let metadata = json!({"name": "taken", "namespace": cluster.namespace()});
    cluster.install([json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"somebody": "else"}})]).await;
    // It is the first version: where a later one is hindered, the one before it runs instead.
    let host = making_with(&cluster, &settings("taken")).await;
    cluster.create(Resource::PROBE, "p", json!({"do": "children"})).await;
    until_told(&cluster, "p", "ChildExists", &["let the handler choose another name"]).await;
    until_hindered(&host).await;
    push("free").await;
    cluster.until_phase(Resource::PROBE, "p", "Done", SOON).await;
    let exists = async |name: &str| cluster.api(Resource::CONFIG_MAP).get_opt(name).await.expect("an answer").is_some();
    assert!(exists("free").await);
    push("other").await;
    eventually(SOON, async || if exists("other").await && !exists("free").await { Ok(()) } else { Err("the children are as before") })
        .await;
    assert!(exists("taken").await, "it is somebody else's");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn naming_an_account_gives_nothing_without_its_label_and_the_right_to_act_as_it() {
    let cluster = Cluster::shared().await;
    cluster.install([account(&cluster, json!({}))].into_iter().chain(rights(&cluster, &EVERYTHING))).await;
    let host = serving(&cluster, CONFIG).await;
    cluster.create(Resource::PROBE, "p", wants([child("c", json!({}))])).await;
    cluster.create(Resource::PROBE, "childless", json!({"do": "children"})).await;
    until_told(&cluster, "p", "AccountUnlabelled", &["no ServiceAccount", "/maker with the label berth.acme.io/impersonate"]).await;
    cluster.until_phase(Resource::PROBE, "childless", "Done", SOON).await;
    let mut of_another = labelled(&cluster);
    of_another["metadata"]["annotations"]["berth.acme.io/plugins"] = "another".into();
    cluster.install([of_another]).await;
    until_told(&cluster, "p", "AccountOfAnother", &["is not for the plugin probe", "berth.acme.io/plugins"]).await;
    cluster.install([labelled(&cluster)]).await;
    until_told(&cluster, "p", "ImpersonationForbidden", &["the host may not impersonate"]).await;
    assert!(cluster.api(Resource::CONFIG_MAP).get_opt("c").await.expect("an answer").is_none());
    cluster.install(impersonation(&cluster)).await;
    cluster.until_phase(Resource::PROBE, "p", "Done", Duration::from_secs(60)).await;
    // A label that is taken away counts at once.
    let accounts = kube::Api::<k8s_openapi::api::core::v1::ServiceAccount>::namespaced(cluster.client().clone(), cluster.system());
    let unlabel = json!({"metadata": {"labels": {"berth.acme.io/impersonate": "false"}}});
    accounts.patch(MAKER, &PatchParams::default(), &Patch::Merge(unlabel)).await.expect("patched");
    let noticed = "an account of a plugin may no longer be used";
    eventually(SOON, async || if host.log().contains(noticed) { Ok(()) } else { Err("not noticed yet") }).await;
    cluster.patch(Resource::PROBE, "p", json!({"spec": wants([child("d", json!({}))])})).await;
    let generation = cluster.get(Resource::PROBE, "p").await["metadata"]["generation"].clone();
    always(Duration::from_secs(4), async || match cluster.get(Resource::PROBE, "p").await {
        probe if probe["status"]["observedGeneration"] != generation => Ok(()),
        probe => Err(probe.to_string()),
    })
    .await;
    assert!(cluster.api(Resource::CONFIG_MAP).get_opt("d").await.expect("an answer").is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_hosts_own_account_is_never_lent_and_none_is_a_sentence() {
    let cluster = Cluster::shared().await;
    let own = json!({"apiVersion": "v1", "kind": "ServiceAccount",
        "metadata": {"name": "berth", "namespace": cluster.system(), "labels": {"berth.acme.io/impersonate": "true"}}});
    cluster.install([own]).await;
    cluster.create(Resource::PROBE, "p", wants([child("c", json!({}))])).await;
    let version = cluster.push("probe", &probe(&claim()), "serviceAccountName: berth\n").await;
    let _host = Host::start(&cluster, "host", &Flags::default()).await;
    cluster.until_serving("probe", &version).await;
    until_told(&cluster, "p", "AccountOfHost", &["berth is the host's own"]).await;
    cluster.push("probe", &probe(&claim()), "").await;
    until_told(&cluster, "p", "AccountUnnamed", &["serviceAccountName"]).await;
    assert!(cluster.api(Resource::CONFIG_MAP).get_opt("c").await.expect("an answer").is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_child_that_cannot_be_is_the_handlers_failure() {
    let cluster = Cluster::shared().await;
    let _host = making(&cluster).await;
    let secret = json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "c"}});
    let mut plugin = child("c", json!({}));
    plugin["metadata"]["labels"] = json!({"berth.acme.io/plugin": "true"});
    let mut elsewhere = child("c", json!({}));
    elsewhere["metadata"]["namespace"] = "kube-system".into();
    let invalid = child("c", json!({"a/b": "no valid key"}));
    for (name, child, words) in [
        ("kind", secret, "not one of the kinds that its claim `owns`"),
        ("label", plugin, "the host's own"),
        ("namespace", elsewhere, "in its own namespace"),
        ("schema", invalid, "a/b"),
    ] {
        cluster.create(Resource::PROBE, name, wants([child])).await;
        let failed = cluster.until_phase(Resource::PROBE, name, "Failed", SOON).await;
        assert!(failed["status"]["message"].as_str().is_some_and(|message| message.contains(words)), "{failed}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_happened_while_no_host_was_there_is_mended_and_nothing_else_is_written() {
    let cluster = Cluster::shared().await;
    let mut host = making(&cluster).await;
    for name in ["p", "q"] {
        cluster.create(Resource::PROBE, name, wants([child(name, json!({"a": "1"}))])).await;
        cluster.until_phase(Resource::PROBE, name, "Done", SOON).await;
    }
    assert_eq!(host.terminate().await, Some(0));
    let before = cluster.get(Resource::CONFIG_MAP, "q").await["metadata"]["resourceVersion"].clone();
    cluster.api(Resource::CONFIG_MAP).delete("p", &DeleteParams::default()).await.expect("deleted");
    let mark = host.proxy.mark();
    host.restart().await;
    until_child(&cluster, "p", |_| true).await;
    host.until_queued(KIND, "running", 0.0).await;
    host.until_queued(KIND, "ready", 0.0).await;
    assert_eq!(cluster.get(Resource::CONFIG_MAP, "q").await["metadata"]["resourceVersion"], before);
    let writes: Vec<String> = host
        .proxy
        .since(mark)
        .iter()
        .filter(|entry| entry.seen.writes() && entry.seen.path.contains(&format!("{}/configmaps", cluster.namespace())))
        .map(ToString::to_string)
        .collect();
    assert_eq!(writes.len(), 1, "{writes:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_answer_makes_nothing_twice_and_loses_no_outcome() {
    let cluster = Cluster::shared().await;
    let host = making(&cluster).await;
    let of_child = format!("{}/configmaps/c", cluster.namespace());
    let _lost = host.proxy.rule(Rule::on(Verb::Patch, Effect::CommitThenClose).path(&of_child).times(1));
    let runs = async || host.metric("berth_reconcile_duration_seconds_count", &[("kind", KIND)]).await;
    cluster.create(Resource::PROBE, "p", wants([child("c", json!({"a": "1"}))])).await;
    cluster.until_phase(Resource::PROBE, "p", "Done", SOON).await;
    let writes = host.proxy.entries().iter().filter(|entry| entry.seen.writes() && entry.seen.path.contains(&of_child)).count();
    assert_eq!((writes, runs().await), (1, Some(1.0)));
}
