//! Reads of the cluster: who may read what, and what wakes an object whose handler has read.

use std::time::Duration;

use berth_tests::{
    cluster::{Cluster, ready_reason, ready_status},
    eventually::eventually,
    host::{Flags, Host},
    proxy::{Answer, Effect, Entry, Rule, Verb},
    resource::Resource,
    stage::{SOON, probe},
};
use kube::api::DeleteParams;
use serde_json::{Value, json};

/// A refused informer tries again within half a minute.
const LATER: Duration = Duration::from_secs(60);

/// The probe with these reads, as the account `reader`.
const CONFIG: &str = "serviceAccountName: reader\nbackoff: {base: 100ms, max: 1s}\n";

/// Binds an account of the test's host namespace to rules: in a namespace, or in the whole cluster.
async fn bind(cluster: &Cluster, account: &str, namespace: Option<&str>, plural: &str, verbs: &[&str]) {
    let name = format!("{account}-{plural}-{}", cluster.namespace());
    let (role, binding) = match namespace {
        Some(_) => ("Role", "RoleBinding"),
        None => ("ClusterRole", "ClusterRoleBinding"),
    };
    let object = |kind: &str, mut more: Value| {
        more["apiVersion"] = "rbac.authorization.k8s.io/v1".into();
        more["kind"] = kind.into();
        more["metadata"] = json!({"name": name});
        if let Some(namespace) = namespace {
            more["metadata"]["namespace"] = namespace.into();
        }
        more
    };
    let rules = json!({"rules": [{"apiGroups": [""], "resources": [plural], "verbs": verbs}]});
    let bound = json!({
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": role, "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": cluster.system()}],
    });
    cluster.install([object(role, rules), object(binding, bound)]).await;
}

/// The account of the plugin, with the label that lets plugins act as it.
async fn account(cluster: &Cluster) {
    let labels = json!({"berth.acme.io/impersonate": "true"});
    let annotations = json!({"berth.acme.io/plugins": "probe"});
    let metadata = json!({"name": "reader", "namespace": cluster.system(), "labels": labels, "annotations": annotations});
    cluster.install([json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})]).await;
}

/// What the host's account watches for plugins to read, as `berth push` grants it.
async fn host_may_watch(cluster: &Cluster, plural: &str) {
    bind(cluster, "berth", None, plural, &["list", "watch"]).await;
}

/// Everything granted for reads of ConfigMaps in the test's namespace, and a host with the probe that claims these reads.
async fn reading(cluster: &Cluster, reads: Value, flags: &Flags) -> Host {
    account(cluster).await;
    host_may_watch(cluster, "configmaps").await;
    bind(cluster, "reader", Some(cluster.namespace()), "configmaps", &["get", "list"]).await;
    serving(cluster, reads, CONFIG, flags).await
}

/// A host with the probe that claims these reads.
async fn serving(cluster: &Cluster, reads: Value, config: &str, flags: &Flags) -> Host {
    let version = cluster.push("probe", &probe(&json!({"reads": reads})), config).await;
    let host = Host::start(cluster, "host", flags).await;
    cluster.until_plugin("probe", &version, |plugin| plugin["status"]["servingDigest"].is_string()).await;
    host
}

fn configmap(namespace: &str, name: &str, app: &str, value: &str) -> Value {
    let metadata = json!({"name": name, "namespace": namespace, "labels": {"app": app}});
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"value": value}})
}

fn get(namespace: &str, name: &str) -> Value {
    json!({"do": "get", "namespace": namespace, "name": name})
}

async fn until_read(cluster: &Cluster, name: &str, value: Value) -> Value {
    cluster.until(Resource::PROBE, name, SOON, |object| object["status"]["data"]["value"] == value).await
}

async fn until_listed(cluster: &Cluster, name: &str, names: &[&str]) -> Value {
    let names = json!(names);
    cluster.until(Resource::PROBE, name, SOON, |object| object["status"]["names"] == names).await
}

/// Waits until a read is not answered, for this reason and with these words in its sentence.
async fn until_unread(cluster: &Cluster, name: &str, reason: &str, words: &[&str]) {
    let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
    let is = move |object: &Value| {
        let sentence = object["status"]["error"].as_str().unwrap_or_default();
        object["status"]["unread"] == reason && words.iter().all(|word| sentence.contains(word))
    };
    cluster.until(Resource::PROBE, name, SOON, is).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_follows_an_object_through_its_changes_its_end_and_its_return() {
    let cluster = Cluster::shared().await;
    let _host = reading(&cluster, json!([{}]), &Flags::default()).await;
    let ns = cluster.namespace();
    cluster.create(Resource::PROBE, "p", get(ns, "settings")).await;
    cluster.until(Resource::PROBE, "p", SOON, |object| object["status"]["found"] == false).await;
    cluster.install([configmap(ns, "settings", "a", "1")]).await;
    until_read(&cluster, "p", json!("1")).await;
    cluster.patch(Resource::CONFIG_MAP, "settings", json!({"data": {"value": "2"}})).await;
    until_read(&cluster, "p", json!("2")).await;
    cluster.delete(Resource::CONFIG_MAP, "settings").await;
    cluster.until(Resource::PROBE, "p", SOON, |object| object["status"]["found"] == false).await;
    cluster.install([configmap(ns, "settings", "a", "3")]).await;
    until_read(&cluster, "p", json!("3")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_between_the_read_and_the_end_of_the_run_leads_to_another_run() {
    let cluster = Cluster::shared().await;
    let ns = cluster.namespace();
    cluster.install([configmap(ns, "settings", "a", "1")]).await;
    let host = reading(&cluster, json!([{}]), &Flags::default()).await;
    let mut slow = get(ns, "settings");
    slow["ms"] = 4000.into();
    cluster.create(Resource::PROBE, "p", slow).await;
    let answered = [("kind", "Probe.probe.acme.io"), ("result", "ok")];
    eventually(SOON, async || match host.metric("berth_reads_total", &answered).await {
        Some(1.0) => Ok(()),
        reads => Err(format!("{reads:?} reads")),
    })
    .await;
    cluster.patch(Resource::CONFIG_MAP, "settings", json!({"data": {"value": "2"}})).await;
    assert!(cluster.get(Resource::PROBE, "p").await["status"].is_null(), "the run has not ended yet");
    until_read(&cluster, "p", json!("2")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_is_paged_selected_and_followed_over_namespaces() {
    let cluster = Cluster::shared().await;
    let other = cluster.another_namespace().await;
    bind(&cluster, "reader", None, "configmaps", &["list"]).await;
    let flags = Flags { more_namespaces: vec![other.clone()], ..Flags::default() };
    let ns = cluster.namespace();
    let maps = ["d", "b", "c"].map(|name| configmap(ns, name, "x", "1"));
    cluster.install(maps.into_iter().chain([configmap(ns, "none", "y", "1"), configmap(&other, "a", "x", "1")])).await;
    let _host = reading(&cluster, json!([{"allNamespaces": true, "selector": "app in (x, y)"}]), &flags).await;
    cluster.create(Resource::PROBE, "paged", json!({"do": "list", "selector": "app!=y", "limit": 3})).await;
    let listed = until_listed(&cluster, "paged", &["b", "c", "d", "a"]).await;
    assert_eq!(listed["status"]["pages"], 2);
    cluster.create(Resource::PROBE, "there", json!({"do": "list", "namespace": other})).await;
    until_listed(&cluster, "there", &["a"]).await;
    // Out of the selection of the claim, and into that of the query.
    cluster.patch(Resource::CONFIG_MAP, "c", json!({"metadata": {"labels": {"app": "z"}}})).await;
    until_listed(&cluster, "paged", &["b", "d", "a"]).await;
    cluster.patch(Resource::CONFIG_MAP, "none", json!({"metadata": {"labels": {"app": "x"}}})).await;
    until_listed(&cluster, "paged", &["b", "d", "none", "a"]).await;
    cluster.create(Resource::PROBE, "outside", get("elsewhere", "x")).await;
    until_unread(&cluster, "outside", "forbidden", &["--watch-namespace elsewhere"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_claimed_is_forbidden_with_what_to_add() {
    let cluster = Cluster::shared().await;
    let _host = reading(&cluster, json!([{}]), &Flags::default()).await;
    let ns = cluster.namespace();
    let secret = json!({"do": "get", "of": {"kind": "Secret", "plural": "secrets"}, "namespace": ns, "name": "s"});
    cluster.create(Resource::PROBE, "secret", secret).await;
    cluster.create(Resource::PROBE, "elsewhere", get("kube-system", "x")).await;
    cluster.create(Resource::PROBE, "all", json!({"do": "list"})).await;
    until_unread(&cluster, "secret", "forbidden", &["does not claim to read Secret (v1)", "`read(Secret)`"]).await;
    until_unread(&cluster, "elsewhere", "forbidden", &["not in the namespace \"kube-system\"", "all-namespaces"]).await;
    until_unread(&cluster, "all", "forbidden", &["not in all namespaces"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plugin_without_an_account_reads_nothing() {
    let cluster = Cluster::shared().await;
    host_may_watch(&cluster, "configmaps").await;
    let ns = cluster.namespace();
    cluster.install([configmap(ns, "settings", "a", "1")]).await;
    let _host = serving(&cluster, json!([{}]), "backoff: {base: 100ms, max: 1s}\n", &Flags::default()).await;
    cluster.create(Resource::PROBE, "p", get(ns, "settings")).await;
    until_unread(&cluster, "p", "forbidden", &["no ServiceAccount to get configmaps", "`serviceAccountName`"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_plugins_account_has_to_be_labelled_and_granted_the_verb() {
    let cluster = Cluster::shared().await;
    host_may_watch(&cluster, "configmaps").await;
    let ns = cluster.namespace();
    let bare = json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "reader", "namespace": cluster.system()}});
    cluster.install([configmap(ns, "settings", "a", "1"), bare]).await;
    let _host = serving(&cluster, json!([{}]), CONFIG, &Flags::default()).await;
    cluster.create(Resource::PROBE, "p", get(ns, "settings")).await;
    let labelled = format!("there is no ServiceAccount {}/reader with the label berth.acme.io/impersonate", cluster.system());
    until_unread(&cluster, "p", "forbidden", &[&labelled]).await;
    account(&cluster).await;
    let place = format!("in the namespace {ns:?}");
    until_unread(&cluster, "p", "forbidden", &[&format!("{}/reader may not get configmaps {place}", cluster.system())]).await;
    bind(&cluster, "reader", Some(ns), "configmaps", &["get"]).await;
    until_read(&cluster, "p", json!("1")).await;
    cluster.create(Resource::PROBE, "list", json!({"do": "list", "namespace": ns})).await;
    until_unread(&cluster, "list", "forbidden", &["may not list configmaps", &place]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_secret_is_read_only_where_the_host_was_granted_secrets_too() {
    let cluster = Cluster::shared().await;
    account(&cluster).await;
    let ns = cluster.namespace();
    bind(&cluster, "reader", Some(ns), "secrets", &["get"]).await;
    let metadata = json!({"name": "s", "namespace": ns});
    cluster.install([json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"value": "1"}})]).await;
    let secrets = json!({"kind": "Secret", "plural": "secrets"});
    let host = serving(&cluster, json!([secrets]), CONFIG, &Flags::default()).await;
    let reads = |cope: bool| json!({"do": "get", "of": secrets, "namespace": ns, "name": "s", "cope": cope});
    cluster.create(Resource::PROBE, "p", reads(true)).await;
    cluster.create(Resource::PROBE, "q", reads(false)).await;
    until_unread(&cluster, "p", "other", &["the host cannot read secrets", "its own ServiceAccount needs list and watch"]).await;
    let troubled = cluster.until_in(cluster.system(), Resource::PLUGIN, "probe", LATER, |plugin| ready_reason(plugin) == "WatchFailing");
    let plugin = troubled.await;
    let reason = plugin["status"]["reason"].as_str().unwrap_or_default();
    assert!(ready_status(&plugin) == "False" && reason.contains("reading secrets") && reason.contains("forbidden"), "{plugin}");
    // What the host may not read is no failure of the handler's.
    let kind = [("kind", "Probe.probe.acme.io"), ("result", "failure")];
    assert_eq!(host.metric("berth_reconcile_total", &kind).await, Some(0.0));
    host_may_watch(&cluster, "secrets").await;
    for name in ["p", "q"] {
        cluster.until(Resource::PROBE, name, LATER, |object| object["status"]["data"]["value"] == "MQ==").await;
    }
    cluster.until_in(cluster.system(), Resource::PLUGIN, "probe", LATER, |plugin| ready_reason(plugin) == "Serving").await;
    assert!(host.metric("berth_reads_total", &[("kind", "Probe.probe.acme.io"), ("result", "error")]).await > Some(0.0));
}

/// A host with a probe that claims and may read its own kind, which this is.
async fn reading_probes(cluster: &Cluster) -> (Host, Value) {
    account(cluster).await;
    let ns = cluster.namespace();
    let probes = json!({"group": "probe.acme.io", "kind": "Probe", "plural": "probes"});
    let rules = json!([{"apiGroups": ["probe.acme.io"], "resources": ["probes"], "verbs": ["get"]}]);
    let (role, subject) = ("read-probes", json!({"kind": "ServiceAccount", "name": "reader", "namespace": cluster.system()}));
    cluster
        .install([
            json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": role, "namespace": ns}, "rules": rules}),
            json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": role, "namespace": ns},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": role}, "subjects": [subject]}),
        ])
        .await;
    let slow = "serviceAccountName: reader\nbackoff: {base: 2s, max: 2s}\n";
    (serving(cluster, json!([probes]), slow, &Flags::default()).await, probes)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_that_read_each_other_run_ten_times_and_then_once_a_second() {
    let cluster = Cluster::shared().await;
    let (host, probes) = reading_probes(&cluster).await;
    let began = std::time::Instant::now();
    for (name, other) in [("p", "q"), ("q", "p")] {
        let reads = json!({"do": "get", "of": probes, "namespace": cluster.namespace(), "name": other});
        cluster.create(Resource::PROBE, name, reads).await;
    }
    let kind = [("kind", "Probe.probe.acme.io")];
    let runs = async || host.metric("berth_reconcile_duration_seconds_count", &kind).await.unwrap_or_default();
    eventually(SOON, async || if runs().await >= 28.0 { Ok(()) } else { Err(format!("{} runs", runs().await)) }).await;
    let (runs, seconds) = (runs().await, began.elapsed().as_secs_f64());
    assert!(runs <= 2.0 * (10.0 + seconds + 2.0), "{runs} runs of two objects in {seconds:.1} s");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_of_what_was_read_while_the_outcome_could_not_be_written_leads_to_another_run() {
    let cluster = Cluster::shared().await;
    let ns = cluster.namespace();
    cluster.install([configmap(ns, "settings", "a", "1")]).await;
    let host = reading(&cluster, json!([{}]), &Flags::default()).await;
    let busy = Answer::failure(429, "TooManyRequests").retry_after(3);
    let busy = host.proxy.rule(Rule::on(Verb::Patch, Effect::Answer(busy)).path("/probes/p/status").times(1));
    cluster.create(Resource::PROBE, "p", get(ns, "settings")).await;
    eventually(SOON, async || if busy.hits() == 1 { Ok(()) } else { Err("no status was written") }).await;
    cluster.install([configmap(ns, "settings", "a", "2")]).await;
    until_read(&cluster, "p", json!("2")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_of_the_handlers_own_kind_is_followed_too_and_watched_once() {
    let cluster = Cluster::shared().await;
    let (host, probes) = reading_probes(&cluster).await;
    let ns = cluster.namespace();
    cluster.create(Resource::PROBE, "follower", json!({"do": "get", "of": probes, "namespace": ns, "name": "first"})).await;
    cluster.until(Resource::PROBE, "follower", SOON, |object| object["status"]["found"] == false).await;
    cluster.create(Resource::PROBE, "first", json!({"do": "flaky", "fails": 1})).await;
    cluster.until(Resource::PROBE, "follower", SOON, |object| object["status"]["found"] == true).await;
    // What the host itself writes to the one is news to the other.
    cluster.until(Resource::PROBE, "follower", SOON, |object| object["status"]["data"]["phase"] == "Done").await;
    assert_eq!(host.proxy.watches("/probes").count(), 1);
}

fn read_watches(host: &Host, cluster: &Cluster) -> usize {
    host.proxy.watches(&format!("/namespaces/{}/configmaps", cluster.namespace())).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_cost_one_watch_that_ends_with_the_plugin_and_questions_that_are_not_repeated() {
    let cluster = Cluster::shared().await;
    let ns = cluster.namespace();
    cluster.install([configmap(ns, "settings", "a", "1")]).await;
    let host = reading(&cluster, json!([{}]), &Flags::default()).await;
    for number in 0..20 {
        cluster.create(Resource::PROBE, &format!("p{number}"), get(ns, "settings")).await;
    }
    for number in 0..20 {
        until_read(&cluster, &format!("p{number}"), json!("1")).await;
    }
    assert_eq!(read_watches(&host, &cluster), 1);
    let entries = host.proxy.entries();
    let about = |part: &str| entries.iter().filter(|entry| entry.seen.path.contains(part)).count();
    assert_eq!((about("/subjectaccessreviews"), about("/serviceaccounts/reader")), (1, 0));
    let reads: Vec<String> =
        entries.iter().filter(|entry| entry.seen.path.contains("/configmaps/settings")).map(ToString::to_string).collect();
    assert!(reads.is_empty(), "{reads:#?}");

    // Once all is quiet, nothing is asked. The figures of the `Plugin` object trail by their pace and a look.
    tokio::time::sleep(Duration::from_secs(22)).await;
    let mark = host.proxy.mark();
    tokio::time::sleep(Duration::from_secs(6)).await;
    let expected = |entry: &&Entry| entry.seen.verb != Verb::Watch && !entry.seen.path.contains("/leases/");
    let others: Vec<String> = host.proxy.since(mark).iter().filter(expected).map(ToString::to_string).collect();
    assert!(others.is_empty(), "{others:#?}");

    let plugins = Resource::CONFIG_MAP.api(cluster.client(), Some(cluster.system()));
    plugins.delete("probe", &DeleteParams::default()).await.expect("it was there");
    eventually(SOON, async || match read_watches(&host, &cluster) {
        0 => Ok(()),
        open => Err(format!("{open} watches are open")),
    })
    .await;
}
