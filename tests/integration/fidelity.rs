//! What is not the handler's to change stays as it is, and what is too long, too large or no label is still dealt with.

use std::{collections::BTreeSet, time::Duration};

use berth_tests::{
    cluster::Cluster,
    eventually::{always, eventually},
    host::Host,
    proxy::Entry,
    resource::Resource,
    stage::{SOON, Stage, letters, probe, probing},
};
use kube::api::{DynamicObject, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

const LABEL: &str = "workqueue.acme.io/phase";

fn claim() -> Value {
    let mut claim = letters(1);
    claim["progress"]["mirrorLabel"] = LABEL.into();
    claim
}

async fn serving(cluster: &Cluster) -> Host {
    probing(cluster, &probe(&claim()), "").await
}

/// Creates an object with these annotations.
async fn create(cluster: &Cluster, name: &str, spec: Value, annotation: usize) {
    let mut object = Resource::PROBE.object(cluster.namespace(), name, spec);
    if annotation > 0 {
        object.metadata.annotations = Some([("someone.io/notes".to_owned(), "n".repeat(annotation))].into());
    }
    let created = cluster.api(Resource::PROBE).create(&PostParams::default(), &object).await;
    created.unwrap_or_else(|error| panic!("creating {name}: {error}"));
}

fn label(object: &Value) -> &str {
    object["metadata"]["labels"][LABEL].as_str().unwrap_or_default()
}

/// The writes of a host to its objects.
fn writes(host: &Host) -> Vec<Entry> {
    host.proxy.entries().into_iter().filter(|entry| entry.seen.writes() && entry.seen.path.contains("/probes/")).collect()
}

fn keys(value: &Value) -> BTreeSet<&str> {
    value.as_object().into_iter().flatten().map(|(key, _)| key.as_str()).collect()
}

/// That a write is of the status or of labels and annotations, and of nothing else.
fn assert_modest(Entry { seen, .. }: &Entry) {
    let body = seen.json();
    let only = |of: &Value, allowed: &[&str]| keys(of).is_subset(&allowed.iter().copied().collect());
    let modest = if seen.path.ends_with("/status") {
        only(&body, &["metadata", "status"]) && only(&body["metadata"], &["resourceVersion"])
    } else {
        only(&body, &["metadata"]) && only(&body["metadata"], &["resourceVersion", "labels", "annotations"])
    };
    assert!(modest && seen.path.contains("/probes/"), "{seen}: {body}");
}

/// Thirty managers own the same fields, so that what is said of them is far more than what they are.
async fn manage(cluster: &Cluster, name: &str) {
    let shared: Value = (0..66).map(|number| (format!("{number:0>150}"), json!(number))).collect::<serde_json::Map<_, _>>().into();
    let object = Resource::PROBE.object(cluster.namespace(), name, json!({"do": "given", "shared": shared}));
    for manager in 0..30 {
        let params = PatchParams::apply(&format!("manager-{manager}"));
        cluster.api(Resource::PROBE).patch(name, &params, &Patch::Apply(&object)).await.expect("applied");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_but_the_status_and_the_labels_of_the_object_itself_is_ever_written() {
    let cluster = Cluster::shared().await;
    let mut spec = json!({"do": "roundtrip", "phase": "Done", "x-new": {"deep": [1, {"a": [null]}]}, "text": "\u{202e}\u{1f600}\u{0}",
        "one": 1.0, "exp": 1e3, "negative": -7});
    spec["big"] = json!(9_007_199_254_740_993_i64);
    spec["huge"] = json!(i64::MIN);
    create(&cluster, "other", json!({"do": "requeuemax"}), 0).await;
    create(&cluster, "echo", spec, 200 << 10).await;
    let spoof = json!({"phase": "Done", "observedGeneration": 99, "retries": 77, "apiVersion": "x/v9",
        "metadata": {"name": "other", "finalizers": ["x.io/y"], "labels": {"a": "b"}}, "spec": {"do": "trap"}});
    create(&cluster, "spoof", json!({"do": "rawstatus", "text": spoof.to_string()}), 0).await;
    manage(&cluster, "managed").await;
    let before: Vec<DynamicObject> = objects(&cluster).await;
    assert!(before.iter().any(|object| serde_json::to_vec(&object.metadata.managed_fields).expect("JSON").len() > 300_000));
    let host = serving(&cluster).await;
    for name in ["echo", "spoof", "managed"] {
        cluster.until(Resource::PROBE, name, SOON, |object| object["status"]["phase"] == "Done" && label(object) == "done").await;
    }
    let count = writes(&host).len();
    always(Duration::from_secs(2), async || match writes(&host).len() {
        now if now == count => Ok(()),
        _ => Err(format!("{:?}", writes(&host).last())),
    })
    .await;
    // Each twice: a status and a label; the one that waits has only a label to lose.
    assert!(count <= 7, "{:#?}", writes(&host));
    writes(&host).iter().for_each(assert_modest);
    assert!(host.proxy.entries().iter().all(|entry| !entry.seen.writes() || !entry.seen.json().to_string().contains("managedFields")));
    for (old, new) in before.iter().zip(objects(&cluster).await) {
        assert_eq!((&old.data["spec"], &old.metadata.annotations), (&new.data["spec"], &new.metadata.annotations));
        assert_eq!((old.metadata.generation, &old.metadata.finalizers), (new.metadata.generation, &new.metadata.finalizers));
    }
    let echo = cluster.get(Resource::PROBE, "echo").await;
    for (field, value) in echo["spec"].as_object().expect("a spec") {
        assert_eq!(echo["status"][field].to_string(), value.to_string(), "{field}");
    }
    assert_eq!(echo["status"]["big"].to_string(), "9007199254740993");
    let spoofed = cluster.get(Resource::PROBE, "spoof").await;
    assert_eq!((&spoofed["status"]["observedGeneration"], &spoofed["status"]["retries"]), (&json!(1), &Value::Null), "{spoofed}");
    let managed = cluster.get(Resource::PROBE, "managed").await;
    assert!(!managed["status"]["metadata"].to_string().contains("managedFields"), "{managed}");
    assert!(managed["status"]["length"].as_u64().is_some_and(|length| length < 20_000), "{}", managed["status"]["length"]);
}

async fn objects(cluster: &Cluster) -> Vec<DynamicObject> {
    cluster.api(Resource::PROBE).list(&Default::default()).await.expect("listed").items
}

async fn until_told(cluster: &Cluster, name: &str, reason: &str) -> Value {
    eventually(SOON, async || {
        let events = cluster.list(Resource::EVENT, "").await;
        let told = events.into_iter().find(|event| event["regarding"]["name"] == name && event["reason"] == reason);
        told.ok_or_else(|| format!("nobody said {reason}"))
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_longest_name_is_as_good_as_any() {
    let stage = Stage::shared().await;
    let name = "n".repeat(253);
    let mails = stage.push_email_request().await;
    let probes = stage.cluster.push("probe", &probe(&claim()), "").await;
    let host = stage.report_host("").await;
    stage.cluster.until_serving("email-request", &mails).await;
    stage.cluster.until_serving("probe", &probes).await;
    stage.mail(&name, "a@example.com").await;
    stage.job(&name, "sales", 0).await;
    stage.cluster.create(Resource::PROBE, &name, json!({"do": "retry", "cause": "no paper"})).await;
    stage.until_mail(&name, "Sent").await;
    stage.cluster.until(Resource::JOB, &name, SOON, |job| job["status"]["phase"] == "Done" && label(job) == "done").await;
    stage.cluster.until_phase(Resource::PROBE, &name, "Failed", SOON).await;
    let told = until_told(&stage.cluster, &name, "DeadLettered").await;
    assert!(told["note"].as_str().is_some_and(|note| note.contains("no paper")), "{told}");
    assert_eq!((stage.gateway.deliveries().len(), stage.exporter.exports().len()), (1, 1));
    drop(host);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_label_or_does_not_fit_costs_neither_the_status_nor_the_label() {
    let cluster = Cluster::shared().await;
    let host = serving(&cluster).await;
    // A phase that no label can hold is written, and said.
    for (name, phase) in [("spaced", "Done with warnings"), ("long", &*"L".repeat(64))] {
        create(&cluster, name, json!({"do": "rawstatus", "text": json!({"phase": phase}).to_string()}), 0).await;
        let object = cluster.until_phase(Resource::PROBE, name, phase, SOON).await;
        assert_eq!(label(&object), "", "{object}");
        until_told(&cluster, name, "InvalidLabel").await;
    }
    // So is a label of the handler's own that is none.
    create(&cluster, "labelled", json!({"do": "labels", "labels": {"probe.acme.io/x": "a b"}}), 0).await;
    let object = cluster.until_phase(Resource::PROBE, "labelled", "Failed", SOON).await;
    assert!(object["status"]["message"].as_str().is_some_and(|message| message.contains("at most 63 letters")), "{object}");
    // Annotations of others that leave no room for those of the host.
    create(&cluster, "annotated", json!({"do": "giveup", "cause": "no paper"}), 262_120).await;
    let object = cluster.until(Resource::PROBE, "annotated", SOON, |object| label(object) == "failed").await;
    assert_eq!(object["status"]["message"], "no paper");
    // An object so large that its status does not fit beside it.
    let pad = "p".repeat(900 << 10);
    create(&cluster, "large", json!({"do": "bigstatus", "bytes": 700 << 10, "pad": pad}), 0).await;
    let object = cluster.until_phase(Resource::PROBE, "large", "Failed", SOON).await;
    let message = object["status"]["message"].as_str().unwrap_or_default();
    assert!(message.contains("too large") && message.len() <= 1024, "{message}");
    for state in ["ready", "delayed", "running"] {
        host.until_queued("Probe.probe.acme.io", state, 0.0).await;
    }
    let count = writes(&host).len();
    always(Duration::from_secs(2), async || if writes(&host).len() == count { Ok(()) } else { Err("it writes on") }).await;
}
