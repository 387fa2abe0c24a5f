//! The files of `deploy/`, installed byte for byte.

use std::path::{Path, PathBuf};

use berth_host::controlplane::ControlPlane;
use berth_host::install::{Manifests, Mode};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use k8s_openapi::api::flowcontrol::v1::FlowSchema;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{DynamicObject, GroupVersionKind, ListParams, PostParams};
use kube::discovery::ApiResource;
use kube::{Api, Client, ResourceExt};
use tokio::sync::OnceCell;

use crate::{eventually, start};

const NAMESPACE: &str = "berth-system";

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("deploy")
}

/// One control plane for the tests of this file, with `deploy/` installed. It ends with the process.
async fn installed() -> &'static ControlPlane {
    static PLANE: OnceCell<ControlPlane> = OnceCell::const_new();
    PLANE
        .get_or_init(async || {
            let plane = start().await;
            let client = Client::try_from(plane.config()).unwrap();
            Manifests::read(&deploy()).unwrap().apply(&client, Mode::Store).await.unwrap();
            plane
        })
        .await
}

async fn admin() -> Client {
    Client::try_from(installed().await.config()).unwrap()
}

async fn host() -> Client {
    Client::try_from(installed().await.config_of(NAMESPACE, "berth").await.unwrap()).unwrap()
}

/// Puts stand-ins where `make plugins` puts the components.
fn plugins_with_stand_ins() -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    std::fs::create_dir(copy.path().join("rbac")).unwrap();
    for file in ["kustomization.yaml", "email-request.yaml", "report-job.yaml", "rbac/email-request.yaml", "rbac/report-job.yaml"] {
        std::fs::copy(deploy().join("plugins").join(file), copy.path().join(file)).unwrap();
    }
    for plugin in ["email-request", "report-job"] {
        std::fs::write(copy.path().join(format!("{plugin}.wasm")), b"\0asm\xff").unwrap();
    }
    copy
}

async fn may(client: &Client, verb: &str, resource: &str, namespace: &str, name: &str) -> bool {
    let (resource, group) = resource.split_once('.').unwrap_or((resource, ""));
    let (resource, subresource) = resource.split_once('/').unwrap_or((resource, ""));
    let text = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
    let attributes = ResourceAttributes {
        verb: text(verb),
        group: text(group),
        resource: text(resource),
        subresource: text(subresource),
        namespace: text(namespace),
        name: text(name),
        ..ResourceAttributes::default()
    };
    let spec = SelfSubjectAccessReviewSpec { resource_attributes: Some(attributes), ..SelfSubjectAccessReviewSpec::default() };
    let review = SelfSubjectAccessReview { spec, ..SelfSubjectAccessReview::default() };
    Api::all(client.clone()).create(&PostParams::default(), &review).await.unwrap().status.unwrap().allowed
}

#[tokio::test]
async fn installing_a_second_time_changes_nothing() {
    let client = admin().await;
    let versions = async || {
        let deployment = Api::<Deployment>::namespaced(client.clone(), NAMESPACE).get("berth").await.unwrap();
        let crds = Api::<CustomResourceDefinition>::all(client.clone()).list(&ListParams::default()).await.unwrap();
        let mut generations: Vec<_> = crds.iter().map(|crd| (crd.name_any(), crd.metadata.generation)).collect();
        generations.push(("berth".to_owned(), deployment.metadata.generation));
        generations
    };
    let before = versions().await;
    assert_eq!(before.len(), 4);
    Manifests::read(&deploy()).unwrap().apply(&client, Mode::Store).await.unwrap();
    assert_eq!(versions().await, before);
}

/// Pod security is enforced on pods: the Deployment would be accepted whatever its template says.
#[tokio::test]
async fn pods_of_the_deployment_are_admitted_by_the_namespace_that_enforces_the_restricted_profile() {
    let client = admin().await;
    let template = Api::<Deployment>::namespaced(client.clone(), NAMESPACE).get("berth").await.unwrap().spec.template;
    let mut pod = Pod { metadata: template.metadata.unwrap(), spec: template.spec, ..Pod::default() };
    pod.metadata.name = Some("trial".to_owned());
    let pods = Api::<Pod>::namespaced(client, NAMESPACE);
    let dry_run = PostParams { dry_run: true, ..PostParams::default() };
    pods.create(&dry_run, &pod).await.unwrap();

    pod.spec.as_mut().unwrap().security_context = None;
    let refused = pods.create(&dry_run, &pod).await.unwrap_err().to_string();
    assert!(refused.contains("violates PodSecurity \"restricted"), "{refused}");
}

#[tokio::test]
async fn the_host_may_do_what_it_needs_and_no_more() {
    let plugins = plugins_with_stand_ins();
    Manifests::read(plugins.path()).unwrap().apply(&admin().await, Mode::Store).await.unwrap();
    let host = host().await;
    for (verb, resource, namespace, name, expected) in [
        ("watch", "configmaps", NAMESPACE, "", true),
        ("get", "configmaps", "default", "", false),
        ("create", "configmaps", NAMESPACE, "", true),
        ("create", "configmaps", "default", "", false),
        ("get", "secrets", NAMESPACE, "", false),
        ("watch", "serviceaccounts", NAMESPACE, "", true),
        ("impersonate", "serviceaccounts", NAMESPACE, "default", false),
        ("impersonate", "users", "", "", false),
        ("create", "subjectaccessreviews.authorization.k8s.io", "", "", true),
        ("create", "pods", NAMESPACE, "", false),
        ("create", "leases.coordination.k8s.io", NAMESPACE, "", true),
        ("update", "leases.coordination.k8s.io", NAMESPACE, "berth", true),
        ("update", "leases.coordination.k8s.io", NAMESPACE, "another", false),
        ("update", "leases.coordination.k8s.io", "kube-system", "berth", false),
        ("patch", "plugins/status.berth.acme.io", NAMESPACE, "", true),
        ("watch", "customresourcedefinitions.apiextensions.k8s.io", "", "", true),
        ("patch", "customresourcedefinitions.apiextensions.k8s.io", "", "", false),
        ("create", "events.events.k8s.io", "default", "", true),
        ("watch", "reportjobs.batch.acme.io", "", "", true),
        ("patch", "reportjobs/status.batch.acme.io", "", "", true),
        ("patch", "reportjobs.batch.acme.io", "", "", true),
        ("delete", "reportjobs.batch.acme.io", "", "", false),
        ("watch", "emailrequests.notify.acme.io", "", "", true),
        ("patch", "emailrequests/status.notify.acme.io", "", "", true),
        ("patch", "emailrequests.notify.acme.io", "", "", true),
        ("update", "emailrequests.notify.acme.io", "", "", false),
    ] {
        let allowed = may(&host, verb, resource, namespace, name).await;
        assert_eq!(allowed, expected, "{verb} {resource} {name} in {namespace:?}");
    }
}

#[tokio::test]
async fn a_plugin_is_a_labelled_config_map_with_its_component_and_plugin_yaml() {
    let plugins = plugins_with_stand_ins();
    let client = admin().await;
    Manifests::read(plugins.path()).unwrap().apply(&client, Mode::Store).await.unwrap();
    let maps = Api::<ConfigMap>::namespaced(client, NAMESPACE);
    let labelled = maps.list(&ListParams::default().labels("berth.acme.io/plugin=true")).await.unwrap();
    let mut names: Vec<String> = labelled.iter().map(ResourceExt::name_any).collect();
    names.sort();
    assert_eq!(names, ["email-request", "report-job"]);
    let map = maps.get("email-request").await.unwrap();
    assert_eq!(map.binary_data.unwrap()["email-request.wasm"].0, b"\0asm\xff");
    assert!(map.data.unwrap()["plugin.yaml"].contains("gateway:"));
}

#[tokio::test]
async fn a_report_job_bears_the_label_of_the_queue_from_its_creation() {
    let client = admin().await;
    let samples = Manifests::read(&deploy().join("samples")).unwrap();
    assert_eq!(samples.documents().len(), 101);
    // The API server takes note of a policy a moment after it is stored; what is created from then on is labelled.
    let kind = GroupVersionKind::gvk("batch.acme.io", "v1", "ReportJob");
    let jobs = Api::<DynamicObject>::namespaced_with(client.clone(), "default", &ApiResource::from_gvk(&kind));
    let trial = |name: &str| {
        let json = serde_json::json!({
            "apiVersion": "batch.acme.io/v1", "kind": "ReportJob", "metadata": {"name": name},
            "spec": {"report": "sales", "format": "pdf", "priority": 5},
        });
        serde_json::from_value::<DynamicObject>(json).unwrap()
    };
    let mut tries = 0;
    eventually("a policy in force", async || {
        tries += 1;
        let dry_run = PostParams { dry_run: true, ..PostParams::default() };
        let created = jobs.create(&dry_run, &trial(&format!("trial-{tries}"))).await.map_err(|error| error.to_string())?;
        match created.labels().get("workqueue.acme.io/phase").map(String::as_str) {
            Some("pending") => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;

    samples.apply(&client, Mode::Store).await.unwrap();
    let queue = jobs.list(&ListParams::default().labels("workqueue.acme.io/phase=pending")).await.unwrap();
    assert_eq!(queue.items.len(), 100);
    assert!(queue.iter().all(|job| job.data["status"]["phase"] == "Pending"));
}

#[tokio::test]
async fn renewals_of_the_lease_have_the_priority_of_leader_election() {
    let schemas = Api::<FlowSchema>::all(admin().await);
    let expected = schemas.get("berth-leases").await.unwrap().uid().unwrap();
    let lease = Lease { metadata: kube::api::ObjectMeta { name: Some("berth".into()), ..Default::default() }, ..Lease::default() };
    let body = serde_json::to_vec(&lease).unwrap();
    let host = host().await;
    // The API server takes note of a flow schema a moment after it is stored.
    eventually("the flow schema's own level", async || {
        let request = http::Request::post(format!("/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases?dryRun=All"))
            .header("content-type", "application/json")
            .body(kube::client::Body::from(body.clone()))
            .unwrap();
        let answer = host.send(request).await.unwrap();
        assert!(answer.status().is_success(), "{answer:?}");
        let schema = answer.headers().get("x-kubernetes-pf-flowschema-uid").map(|uid| uid.to_str().unwrap().to_owned());
        if schema.as_deref() == Some(expected.as_str()) { Ok(()) } else { Err(format!("{schema:?}")) }
    })
    .await;
}

#[tokio::test]
async fn what_the_api_server_refuses_is_told_with_file_kind_name_and_its_sentence() {
    let client = admin().await;
    let wrong = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: fine}\n---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: wrong}\ndatta: {a: b}\n";
    let error = Manifests::parse("x.yaml", wrong).unwrap().apply(&client, Mode::Store).await.unwrap_err();
    let sentence = format!("{error:#}");
    assert!(sentence.starts_with("x.yaml, document 2: ConfigMap wrong: "), "{sentence}");
    assert!(sentence.contains(".datta: field not declared in schema") || sentence.contains("unknown field \"datta\""), "{sentence}");

    let unserved = "apiVersion: acme.io/v1\nkind: Nothing\nmetadata: {name: a}\n";
    let error = Manifests::parse("y.yaml", unserved).unwrap().apply(&client, Mode::DryRun).await.unwrap_err();
    assert_eq!(format!("{error:#}"), "y.yaml: Nothing a: the API server does not serve acme.io/v1 Nothing");
}
