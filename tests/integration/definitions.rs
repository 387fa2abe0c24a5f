//! The life of a CustomResourceDefinition beside its plugin: it comes late, goes, comes again, changes its versions, lacks what is needed.

use std::{collections::BTreeSet, time::Duration};

use berth_tests::{
    behaviour::{Behaviour, Hold},
    cluster::{Cluster, ready_reason},
    eventually::{always, eventually},
    host::{Flags, Host},
    resource::Resource,
    stage::{SOON, Stage, probe},
};
use kube::{
    Api,
    api::{ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
    core::GroupVersionKind,
};
use serde_json::{Value, json};

/// A kind of the test's own, with a group that no other test has.
struct Kind<'c> {
    cluster: &'c Cluster,
    group: String,
}

impl<'c> Kind<'c> {
    /// With the permissions for it.
    async fn new(cluster: &'c Cluster, word: &str) -> Self {
        let group = format!("{word}-{:04x}.acme.io", rand::random::<u16>());
        cluster.allow(&group, "lates").await;
        Self { cluster, group }
    }

    fn claim(&self, version: &str) -> Vec<u8> {
        probe(&json!({"group": self.group, "version": version, "kind": "Late", "plural": "lates"}))
    }

    fn name(&self) -> String {
        format!("lates.{}", self.group)
    }

    /// The definition with these versions, each served or not; the last one that is, is stored.
    fn definition(&self, versions: &[(&str, bool)]) -> Value {
        let anything = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
        let stored = versions.iter().rfind(|(_, served)| *served).map(|(name, _)| *name);
        let version = |(name, served): &(&str, bool)| {
            json!({"name": name, "served": served, "storage": Some(*name) == stored, "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": anything, "status": anything}}}})
        };
        json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": self.name()},
            "spec": {"group": self.group, "scope": "Namespaced", "names": {"kind": "Late", "plural": "lates", "singular": "late"},
                "versions": versions.iter().map(version).collect::<Vec<_>>()},
        })
    }

    async fn define(&self, versions: &[(&str, bool)]) {
        self.cluster.install([self.definition(versions)]).await;
    }

    async fn undefine(&self) {
        let crds = Resource::CRD.api(self.cluster.client(), None);
        crds.delete(&self.name(), &DeleteParams::default()).await.expect("it is there");
        until_undefined(&crds, &self.name()).await;
    }

    fn api(&self, version: &str) -> Api<DynamicObject> {
        let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(&self.group, version, "Late"), "lates");
        Api::namespaced_with(self.cluster.client().clone(), self.cluster.namespace(), &resource)
    }

    /// Creates an object; a definition that has just come may not be served yet.
    async fn create(&self, version: &str, name: &str, what: &str) {
        let api = self.api(version);
        let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(&self.group, version, "Late"), "lates");
        let object = DynamicObject::new(name, &resource).data(json!({"spec": {"do": what}}));
        eventually(SOON, async || api.create(&PostParams::default(), &object).await.map(drop)).await;
    }

    async fn until_done(&self, version: &str, name: &str) -> Value {
        let api = self.api(version);
        eventually(SOON, async || match api.get(name).await {
            Ok(late) if late.data["status"]["phase"] == "Done" => Ok(late.data),
            Ok(late) => Err(late.data.to_string()),
            Err(error) => Err(error.to_string()),
        })
        .await
    }

    /// What a host has warned of about the definition and the watch of its objects, without the times.
    fn warnings(&self, host: &Host) -> Vec<String> {
        let (name, path) = (self.name(), format!("/apis/{}/", self.group));
        let log = host.log();
        let warnings = log.lines().filter_map(|line| Some(line.split_once("WARN")?.1));
        warnings.filter(|warning| warning.contains(&name) || warning.contains(&path)).map(str::to_owned).collect()
    }

    /// Requests of a host for objects of the kind.
    fn requests(&self, host: &Host) -> usize {
        let path = format!("/apis/{}/", self.group);
        host.proxy.entries().iter().filter(|entry| entry.seen.path.contains(&path)).count()
    }
}

async fn until_undefined(crds: &Api<DynamicObject>, name: &str) {
    eventually(SOON, async || match crds.get_opt(name).await {
        Ok(None) => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_definition_may_come_after_its_plugin_go_and_come_again() {
    let stage = Stage::shared().await;
    let kind = Kind::new(&stage.cluster, "late").await;
    let version = stage.cluster.push("late", &kind.claim("v1"), "").await;
    let host = stage.email_host().await;
    let waiting = stage.cluster.until_plugin("late", &version, |plugin| ready_reason(plugin) == "WaitingForCRD").await;
    assert!(waiting["status"]["reason"].as_str().is_some_and(|reason| reason.contains(&kind.name())), "{waiting}");
    always(Duration::from_secs(2), async || match kind.requests(&host) {
        0 => Ok(()),
        requests => Err(format!("{requests} requests for what is not there")),
    })
    .await;
    kind.define(&[("v1", true)]).await;
    kind.create("v1", "first", "ok").await;
    kind.create("v1", "again", "requeue0").await;
    kind.until_done("v1", "first").await;
    stage.cluster.until_serving("late", &version).await;

    let told = kind.warnings(&host).len();
    kind.undefine().await;
    stage.cluster.until_plugin("late", &version, |plugin| ready_reason(plugin) == "WaitingForCRD").await;
    let gauge = format!("Late.{}", kind.group);
    eventually(SOON, async || match (host.proxy.watches(&kind.group).count(), host.metric("berth_objects", &[("kind", &gauge)]).await) {
        (0, None) => Ok(()),
        left => Err(format!("watches and objects: {left:?}")),
    })
    .await;
    let asked = kind.requests(&host);
    stage.mail("e1", "a@example.com").await;
    stage.until_mail("e1", "Sent").await;
    always(Duration::from_secs(2), async || match kind.requests(&host) - asked {
        0 => Ok(()),
        requests => Err(format!("{requests} requests for what is gone")),
    })
    .await;
    // Not there, not established, not served yet.
    assert!(told <= 3, "{:#?}", kind.warnings(&host));
    // Being deleted, gone, and what the watch heard of each: a line for each, and none again.
    let warnings = kind.warnings(&host).split_off(told);
    let different = warnings.iter().collect::<BTreeSet<_>>().len();
    assert!(different == warnings.len() && different <= 4, "{warnings:#?}");

    // Gone and there again before anybody could notice.
    kind.define(&[("v1", true)]).await;
    kind.create("v1", "second", "ok").await;
    kind.until_done("v1", "second").await;
    kind.undefine().await;
    kind.define(&[("v1", true)]).await;
    kind.create("v1", "second", "ok").await;
    kind.until_done("v1", "second").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_is_given_the_version_that_it_claims_whichever_is_stored_and_is_told_when_that_is_gone() {
    let cluster = Cluster::shared().await;
    let kind = Kind::new(&cluster, "moved").await;
    kind.define(&[("v1", true), ("v1beta1", true)]).await;
    let version = cluster.push("late", &kind.claim("v1beta1"), "").await;
    let _host = Host::start(&cluster, "host", &Flags::default()).await;
    cluster.until_serving("late", &version).await;
    for (name, of) in [("old", "v1beta1"), ("new", "v1")] {
        kind.create(of, name, "given").await;
        assert_eq!(kind.until_done(of, name).await["status"]["apiVersion"], format!("{}/v1beta1", kind.group));
    }
    // The storage moves on, as a migration would have it: every object is written once more.
    kind.define(&[("v1beta1", true), ("v1", true)]).await;
    let objects = kind.api("v1");
    for name in ["old", "new"] {
        let touch = json!({"metadata": {"labels": {"migrated": "yes"}}});
        objects.patch(name, &PatchParams::default(), &Patch::Merge(touch)).await.expect("it is there");
    }
    kind.create("v1", "between", "given").await;
    assert_eq!(kind.until_done("v1", "between").await["status"]["apiVersion"], format!("{}/v1beta1", kind.group));
    kind.define(&[("v1beta1", false), ("v1", true)]).await;
    let told = cluster.until_plugin("late", &version, |plugin| ready_reason(plugin) == "VersionNotServed").await;
    assert!(told["status"]["reason"].as_str().is_some_and(|reason| reason.contains("it serves v1.")), "{told}");
    kind.create("v1", "after", "given").await;
    let version = cluster.push("late", &kind.claim("v1"), "").await;
    cluster.until_serving("late", &version).await;
    assert_eq!(kind.until_done("v1", "after").await["status"]["apiVersion"], format!("{}/v1", kind.group));
    let all = objects.list(&ListParams::default()).await.expect("it is served");
    assert!(all.items.iter().all(|late| late.data["status"]["phase"] == "Done"), "{all:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_definition_without_the_status_subresource_is_said_and_no_handler_is_run_for_it() {
    let cluster = Cluster::shared().await;
    let kind = Kind::new(&cluster, "bare").await;
    let mut definition = kind.definition(&[("v1", true)]);
    definition["spec"]["versions"][0].as_object_mut().expect("a version").remove("subresources");
    let bare = json!({"spec": {"versions": definition["spec"]["versions"]}});
    cluster.install([definition]).await;
    kind.create("v1", "late", "ok").await;
    let version = cluster.push("late", &kind.claim("v1"), "").await;
    let host = Host::start(&cluster, "host", &Flags::default()).await;
    let plugin = cluster.until_plugin("late", &version, |plugin| ready_reason(plugin) == "NoStatusSubresource").await;
    assert!(plugin["status"]["reason"].as_str().is_some_and(|reason| reason.contains("status subresource")), "{plugin}");
    always(Duration::from_secs(2), async || match kind.requests(&host) {
        0 => Ok(()),
        requests => Err(format!("{requests} requests")),
    })
    .await;
    assert!(kind.api("v1").get("late").await.expect("it is there").data["status"].is_null());
    kind.define(&[("v1", true)]).await;
    kind.until_done("v1", "late").await;
    // Once more, while it serves.
    let crds = Resource::CRD.api(cluster.client(), None);
    crds.patch(&kind.name(), &PatchParams::default(), &Patch::Merge(bare)).await.expect("patched");
    cluster.until_plugin("late", &version, |plugin| ready_reason(plugin) == "NoStatusSubresource").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crd_that_is_recreated_during_a_run_does_not_lose_its_new_objects() {
    let stage = Stage::on(Cluster::alone().await).await;
    let host = stage.email_host().await;
    stage.gateway.control(Behaviour::hold(Hold::Before));
    stage.mail("e1", "a@example.com").await;
    eventually(SOON, async || if stage.gateway.held() == 1 { Ok(()) } else { Err("nothing is held") }).await;
    let crds = Resource::CRD.api(stage.cluster.client(), None);
    let name = "emailrequests.notify.acme.io";
    let definition = crds.get(name).await.expect("installed");
    crds.delete(name, &DeleteParams::default()).await.expect("deleted");
    until_undefined(&crds, name).await;
    let mut definition = serde_json::to_value(definition).expect("JSON");
    definition["metadata"] = json!({"name": name});
    definition.as_object_mut().expect("an object").remove("status");
    stage.cluster.install([definition]).await;
    stage.mail("e1", "a@example.com").await;
    stage.gateway.behave();
    stage.until_mail("e1", "Sent").await;
    drop(host);
}
