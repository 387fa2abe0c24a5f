//! What ships under `deploy/`: CRDs that refuse bad input, the label of a new job, pods for the restricted profile.

use std::time::Duration;

use berth_tests::{
    cluster::{Cluster, SHIPPED_NAMESPACE},
    eventually::eventually,
    resource::Resource,
    stage::guest,
    workspace,
};
use kube::api::{DynamicObject, PostParams};
use serde_json::{Value, json};

/// The refusal of a spec, as the API server words it.
async fn refusal(cluster: &Cluster, resource: Resource, spec: Value) -> String {
    match cluster.try_create(resource, "bad", spec.clone()).await {
        Err(kube::Error::Api(status)) if status.code == 422 => status.message,
        Err(error) => panic!("refused in another way: {error}"),
        Ok(_) => panic!("not refused: {spec}"),
    }
}

#[test]
fn a_shipped_component_is_small() {
    for name in ["email_request", "report_job"] {
        let file = workspace::root().join("deploy/plugins").join(format!("{}.wasm", name.replace('_', "-")));
        let shipped = std::fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}: run `make plugins`", file.display()));
        for bytes in [guest(name).len(), shipped.len()] {
            assert!(bytes < 250_000, "{name} has {bytes} bytes: was it built with link-time optimisation, as a `cdylib` and nothing else?");
        }
    }
}

fn with(mut good: Value, field: &str, value: Value) -> Value {
    good[field] = value;
    good
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_email_request_is_refused_with_a_sentence_about_its_field() {
    let cluster = Cluster::shared().await;
    let good = json!({"to": "a@example.com", "template": "welcome", "locale": "en-GB"});
    for (field, value, sentence) in [
        ("to", json!("nobody"), "to must be one mail address"),
        ("to", json!("a@x.org, b@x.org"), "to must be one mail address"),
        ("template", json!("a b"), "template must be a name"),
        ("locale", json!("english please"), "locale must be a language tag"),
        ("to", json!(7), "must be of type string"),
        ("to", Value::Null, "spec.to: Required value"),
    ] {
        let message = refusal(&cluster, Resource::EMAIL, with(good.clone(), field, value.clone())).await;
        assert!(message.contains(sentence) && message.contains(&format!("spec.{field}")), "{field}: {value}: {message}");
    }
    cluster.create(Resource::EMAIL, "good", good).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_report_job_is_refused_with_a_sentence_about_its_field() {
    let cluster = Cluster::shared().await;
    let good =
        json!({"report": "sales", "format": "pdf", "priority": -9_007_199_254_740_993_i64, "notBefore": "2026-01-02T03:04:05+01:00"});
    for (field, value, sentence) in [
        ("report", json!("../etc"), "report must be a name"),
        ("format", json!("zip"), "pdf"),
        ("priority", json!("high"), "must be of type integer"),
        ("notBefore", json!("tomorrow"), "notBefore"),
    ] {
        let message = refusal(&cluster, Resource::JOB, with(good.clone(), field, value.clone())).await;
        assert!(message.contains(sentence) && message.contains(&format!("spec.{field}")), "{field}: {value}: {message}");
    }
    let job = cluster.create(Resource::JOB, "good", good).await;
    assert_eq!(job.data["spec"]["priority"].to_string(), "-9007199254740993");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_report_job_is_pending_and_labelled_from_the_first_moment_without_any_host() {
    let cluster = Cluster::shared().await;
    let job = cluster.create(Resource::JOB, "job", json!({"report": "sales", "format": "csv"})).await;
    assert_eq!(job.data["status"]["phase"], "Pending");
    assert_eq!(cluster.list(Resource::JOB, "workqueue.acme.io/phase=pending").await.len(), 1);
    let mine = json!({"apiVersion": "batch.acme.io/v1", "kind": "ReportJob", "metadata": {"name": "mine", "namespace": cluster.namespace(),
        "labels": {"team": "a"}}, "spec": {"report": "sales", "format": "csv"}});
    cluster.install([mine]).await;
    assert_eq!(cluster.get(Resource::JOB, "mine").await["metadata"]["labels"], json!({"team": "a", "workqueue.acme.io/phase": "pending"}));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_pods_of_the_deployment_are_admitted_by_the_restricted_profile() {
    let cluster = Cluster::shared().await;
    let deployment = cluster.get_in(SHIPPED_NAMESPACE, Resource::DEPLOYMENT, "berth").await;
    assert_eq!(deployment["spec"]["replicas"], 2);
    let template = &deployment["spec"]["template"];
    let mut pod: DynamicObject = serde_json::from_value(template.clone()).expect("a template is an object");
    pod.metadata.name = Some("pod".into());
    pod.types = Some(kube::core::TypeMeta { api_version: "v1".into(), kind: "Pod".into() });
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    let pods = Resource::POD.api(cluster.client(), Some(SHIPPED_NAMESPACE));
    // The default ServiceAccount's token controller may not have got there yet.
    eventually(Duration::from_secs(20), async || pods.create(&dry_run, &pod).await).await;
    let mut root = pod;
    root.data["spec"]["containers"][0]["securityContext"] = json!({"allowPrivilegeEscalation": true});
    let error = pods.create(&dry_run, &root).await.expect_err("the namespace enforces the profile").to_string();
    assert!(error.contains("violates PodSecurity"), "{error}");
}
