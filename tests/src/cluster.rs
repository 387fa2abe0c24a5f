//! A place of its own for each test on a real API server: namespaces named after the test, the host's account, and a dump on failure.
//!
//! # Expected flow
//! [`Cluster::shared`] for most tests; [`Cluster::alone`] where a test restarts the API server or changes what all share.
//!
//! # Guarantees
//! What ships under `deploy/` is installed byte for byte, once per control plane. A test's host has its own plugin namespace and its own
//! account there, bound to the shipped roles and to nothing else.
//!
//! # Caveats
//! Objects of finished tests stay: nobody watches their namespaces, and the control plane goes with the test process.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use anyhow::Context;
use berth_host::{
    controlplane::{ControlPlane, Options},
    install::{Manifests, Mode},
};
use kube::{
    Api, Client,
    api::{DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

use crate::{eventually::eventually, resource::Resource, workspace};

/// The namespace of everything under `deploy/`.
pub const SHIPPED_NAMESPACE: &str = "berth-system";
/// The account of the host, and the roles that it is bound to.
const ACCOUNT: &str = "berth";
/// Cluster roles of the shipped host and of its plugins, and of the probe.
const CLUSTER_ROLES: [&str; 4] = ["berth", "berth-plugin-email-request", "berth-plugin-report-job", "berth-plugin-probe"];
/// How long a name may be: the namespaces of a test add a few letters.
const LONGEST_NAME: usize = 44;

/// A control plane with everything installed.
#[derive(Debug)]
pub struct Plane {
    control: ControlPlane,
}

impl Plane {
    async fn start() -> anyhow::Result<Self> {
        let plane = Self { control: ControlPlane::start(Options::default()).await.context("starting a control plane")? };
        let client = Client::try_from(plane.control.config())?;
        for path in ["deploy", "deploy/plugins/rbac", "tests/guests/probe/crd.yaml"] {
            Manifests::read(&workspace::root().join(path))?
                .apply(&client, Mode::Store)
                .await
                .with_context(|| format!("installing {path}"))?;
        }
        let probe = cluster_role("berth-plugin-probe", Resource::PROBE.group, Resource::PROBE.plural);
        Manifests::of("the role of the probe", [probe])?.apply(&client, Mode::Store).await?;
        plane.label_policy_in_force(client).await;
        Ok(plane)
    }

    /// An admission policy takes a moment to be noticed.
    async fn label_policy_in_force(&self, client: Client) {
        let jobs = Resource::JOB.api(&client, Some("default"));
        let job = Resource::JOB.object("default", "probe", json!({"report": "sales", "format": "pdf"}));
        let dry_run = PostParams { dry_run: true, ..PostParams::default() };
        eventually(Duration::from_secs(60), async || match jobs.create(&dry_run, &job).await {
            Ok(created) if created.metadata.labels.is_some() => Ok(()),
            Ok(_) => Err("a new ReportJob has no label".to_owned()),
            Err(error) => Err(error.to_string()),
        })
        .await;
    }

    /// The control plane itself.
    pub fn control(&self) -> &ControlPlane {
        &self.control
    }

    /// The same, for a test that stops a server of a control plane that it has for itself.
    pub fn control_mut(&mut self) -> &mut ControlPlane {
        &mut self.control
    }
}

/// The one of this process, started by whoever comes first, from a thread that lives as long as the process.
fn shared() -> Arc<Plane> {
    static SHARED: OnceLock<Arc<Plane>> = OnceLock::new();
    let start = || {
        let (started, plane) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                started.send(Plane::start().await.map(Arc::new)).expect("somebody waits");
                std::future::pending::<()>().await;
            });
        });
        plane.recv().expect("the thread answers").unwrap_or_else(|error| panic!("no control plane for the tests: {error:?}"))
    };
    SHARED.get_or_init(start).clone()
}

/// A test's own part of a control plane.
pub struct Cluster {
    plane: Arc<Plane>,
    client: Client,
    namespace: String,
    system: String,
    token: String,
    directory: tempfile::TempDir,
}

impl Cluster {
    /// On the control plane that the tests share.
    pub async fn shared() -> Self {
        Self::shared_as(&test_name()).await
    }

    /// The same under a name of its own, for a test that has several.
    pub async fn shared_as(name: &str) -> Self {
        let plane = tokio::task::spawn_blocking(shared).await.expect("the control plane of the tests starts");
        Self::on(plane, name).await.expect("a test gets its namespaces")
    }

    /// On a control plane of its own.
    pub async fn alone() -> Self {
        let plane = Plane::start().await.expect("a control plane starts");
        Self::on(Arc::new(plane), &test_name()).await.expect("a test gets its namespaces")
    }

    async fn on(plane: Arc<Plane>, name: &str) -> anyhow::Result<Self> {
        let client = Client::try_from(plane.control.config())?;
        let namespace = format!("{name}-{:04x}", rand::random::<u16>());
        let system = format!("{namespace}-sys");
        let role = Resource::ROLE.api(&client, Some(SHIPPED_NAMESPACE)).get(ACCOUNT).await.context("reading the shipped role")?;
        let mut objects = vec![
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}),
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": system}}),
            json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT, "namespace": system}}),
            json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": ACCOUNT, "namespace": system},
                "rules": role.data["rules"]}),
            json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": ACCOUNT, "namespace": system},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": ACCOUNT}, "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": system}]}),
        ];
        objects.extend(CLUSTER_ROLES.map(|role| cluster_role_binding(role, &namespace, &system)));
        Manifests::of("the namespaces of a test", objects)?.apply(&client, Mode::Store).await?;
        let token = plane.control.token_of(&system, ACCOUNT).await?;
        let directory = tempfile::Builder::new().prefix("berth-test-").tempdir().context("creating a temporary directory")?;
        Ok(Self { plane, client, namespace, system, token, directory })
    }

    /// The namespace of its objects.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The namespace of its plugins and of its Lease.
    pub fn system(&self) -> &str {
        &self.system
    }

    /// The administrator.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The token of the host's account.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// Another token of the host's account.
    pub async fn new_token(&self) -> String {
        self.plane.control.token_of(&self.system, ACCOUNT).await.expect("the account is there")
    }

    /// The control plane.
    pub fn plane(&self) -> &Plane {
        &self.plane
    }

    /// The control plane of [`Cluster::alone`].
    pub fn plane_mut(&mut self) -> &mut Plane {
        Arc::get_mut(&mut self.plane).expect("the control plane is this test's own")
    }

    /// A folder that goes with the test.
    pub fn directory(&self) -> &std::path::Path {
        self.directory.path()
    }

    /// Lets the test's host act for the plugin of one more kind.
    pub async fn allow(&self, group: &str, plural: &str) {
        let name = format!("berth-plugin-{plural}-{}", self.namespace);
        let objects = [cluster_role(&name, group, plural), cluster_role_binding(&name, &self.namespace, &self.system)];
        self.install(objects).await;
    }

    /// Takes away what the host may do for the plugin of a kind.
    pub async fn forbid(&self, role: &str) {
        let name = format!("{role}-{}", self.namespace);
        let bindings = Resource::CLUSTER_ROLE_BINDING.api(&self.client, None);
        bindings.delete(&name, &DeleteParams::default()).await.unwrap_or_else(|error| panic!("deleting {name}: {error}"));
    }

    /// Applies objects as they are.
    pub async fn install(&self, objects: impl IntoIterator<Item = Value>) {
        let manifests = Manifests::of("the objects of a test", objects).expect("the test's objects are objects");
        manifests.apply(&self.client, Mode::Store).await.expect("the API server takes the test's objects");
    }

    /// One more namespace for objects.
    pub async fn another_namespace(&self) -> String {
        let name = format!("{}-b", self.namespace);
        Resource::NAMESPACE
            .api(&self.client, None)
            .create(&PostParams::default(), &Resource::NAMESPACE.bare(&name))
            .await
            .expect("a namespace");
        name
    }

    /// The objects of a kind in the test's namespace.
    pub fn api(&self, resource: Resource) -> Api<DynamicObject> {
        resource.api(&self.client, Some(&self.namespace))
    }

    /// Creates an object with this spec in the test's namespace; the error is the API server's.
    pub async fn try_create(&self, resource: Resource, name: &str, spec: Value) -> kube::Result<DynamicObject> {
        self.api(resource).create(&PostParams::default(), &resource.object(&self.namespace, name, spec)).await
    }

    /// The same where it has to succeed.
    pub async fn create(&self, resource: Resource, name: &str, spec: Value) -> DynamicObject {
        self.try_create(resource, name, spec).await.unwrap_or_else(|error| panic!("creating {} {name}: {error}", resource.kind))
    }

    /// Merges a patch into an object of the test's namespace; the error is the API server's.
    pub async fn try_patch(&self, resource: Resource, name: &str, patch: Value) -> kube::Result<DynamicObject> {
        self.api(resource).patch(name, &PatchParams::default(), &Patch::Merge(patch)).await
    }

    /// The same where it has to succeed.
    pub async fn patch(&self, resource: Resource, name: &str, patch: Value) -> DynamicObject {
        self.try_patch(resource, name, patch).await.unwrap_or_else(|error| panic!("patching {} {name}: {error}", resource.kind))
    }

    /// Deletes an object and waits until it is gone.
    pub async fn delete(&self, resource: Resource, name: &str) {
        let api = self.api(resource);
        api.delete(name, &DeleteParams::default()).await.unwrap_or_else(|error| panic!("deleting {} {name}: {error}", resource.kind));
        eventually(Duration::from_secs(20), async || match api.get_opt(name).await {
            Ok(None) => Ok(()),
            Ok(Some(_)) => Err("it is still there".to_owned()),
            Err(error) => Err(error.to_string()),
        })
        .await;
    }

    /// An object as it is now.
    pub async fn get(&self, resource: Resource, name: &str) -> Value {
        self.get_in(&self.namespace, resource, name).await
    }

    /// An object of some namespace as it is now.
    pub async fn get_in(&self, namespace: &str, resource: Resource, name: &str) -> Value {
        let object = resource.api(&self.client, Some(namespace)).get(name).await;
        plain(object.unwrap_or_else(|error| panic!("reading {} {namespace}/{name}: {error}", resource.kind)))
    }

    /// Every object of a kind in the test's namespace, or those that a label selector finds.
    pub async fn list(&self, resource: Resource, selector: &str) -> Vec<Value> {
        let list = self.api(resource).list(&ListParams::default().labels(selector)).await;
        list.unwrap_or_else(|error| panic!("listing {}: {error}", resource.plural)).items.into_iter().map(plain).collect()
    }

    /// Waits until an object of the test's namespace is so.
    #[track_caller]
    pub fn until(&self, resource: Resource, name: &str, deadline: Duration, is: impl Fn(&Value) -> bool) -> impl Future<Output = Value> {
        self.until_in(&self.namespace, resource, name, deadline, is)
    }

    /// Waits until an object of some namespace is so.
    #[track_caller]
    pub fn until_in(
        &self,
        namespace: &str,
        resource: Resource,
        name: &str,
        deadline: Duration,
        is: impl Fn(&Value) -> bool,
    ) -> impl Future<Output = Value> {
        let api = resource.api(&self.client, Some(namespace));
        let name = name.to_owned();
        eventually(deadline, async move || match api.get(&name).await.map(plain) {
            Ok(object) if is(&object) => Ok(object),
            Ok(object) => Err(object.to_string()),
            Err(error) => Err(error.to_string()),
        })
    }

    /// Waits until `status.phase` of an object is this.
    #[track_caller]
    pub fn until_phase(&self, resource: Resource, name: &str, phase: &str, deadline: Duration) -> impl Future<Output = Value> {
        let phase = phase.to_owned();
        self.until(resource, name, deadline, move |object| object["status"]["phase"] == phase.as_str())
    }

    /// Puts a plugin into its ConfigMap. Returns the ConfigMap's resourceVersion.
    pub async fn push(&self, name: &str, component: &[u8], config: &str) -> String {
        self.push_file(name, "plugin.wasm", component, config).await
    }

    /// The same with the component in a file of this name, and no other file.
    pub async fn push_file(&self, name: &str, file: &str, component: &[u8], config: &str) -> String {
        let resource = Resource::CONFIG_MAP;
        let configmap = json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": name, "namespace": self.system, "labels": {"berth.acme.io/plugin": "true"}},
            "binaryData": {file: k8s_openapi::ByteString(component.to_vec())},
            "data": {"plugin.yaml": config},
        });
        let api = resource.api(&self.client, Some(&self.system));
        let applied = api.patch(name, &PatchParams::apply("test").force(), &Patch::Apply(configmap)).await;
        let applied = applied.unwrap_or_else(|error| panic!("pushing {name}: {error}"));
        applied.metadata.resource_version.expect("the API server gives one")
    }

    /// Waits until the `Plugin` object speaks of this version of the ConfigMap, and is so.
    #[track_caller]
    pub fn until_plugin(&self, name: &str, version: &str, is: impl Fn(&Value) -> bool) -> impl Future<Output = Value> {
        let version = version.to_owned();
        self.until_in(&self.system, Resource::PLUGIN, name, Duration::from_secs(90), move |plugin| {
            plugin["status"]["observedVersion"] == version.as_str() && is(plugin)
        })
    }

    /// Waits until this version of the ConfigMap serves, on trial or not.
    #[track_caller]
    pub fn until_serving(&self, name: &str, version: &str) -> impl Future<Output = Value> {
        self.until_plugin(name, version, |plugin| ["Serving", "OnTrial"].contains(&ready_reason(plugin)))
    }

    /// Everything that a person would look at when the test has failed.
    async fn dump(config: kube::Config, namespaces: [String; 2]) -> anyhow::Result<String> {
        let client = Client::try_from(config)?;
        let mut text = String::new();
        for namespace in namespaces {
            for resource in Resource::DUMPED {
                let Ok(list) = resource.api(&client, Some(&namespace)).list(&ListParams::default()).await else { continue };
                for object in list.items {
                    text += &format!("{}\n", plain(object));
                }
            }
        }
        Ok(text)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let (config, namespaces) = (self.plane.control.config(), [self.namespace.clone(), self.system.clone()]);
            let dump = std::thread::spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                runtime.block_on(async { tokio::time::timeout(Duration::from_secs(20), Self::dump(config, namespaces)).await? })
            });
            match dump.join() {
                Ok(Ok(text)) => eprintln!("--- objects of {}\n{text}---", self.namespace),
                Ok(Err(error)) => eprintln!("--- the objects of {} cannot be shown: {error:#}", self.namespace),
                Err(_) => eprintln!("--- the objects of {} cannot be shown", self.namespace),
            }
        }
    }
}

/// Binds the account of a test to a cluster role.
fn cluster_role_binding(role: &str, namespace: &str, system: &str) -> Value {
    json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": format!("{role}-{namespace}")},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": system}]})
}

/// What the host may do for a plugin of this kind, as in `deploy/plugins/rbac`.
pub fn cluster_role(name: &str, group: &str, plural: &str) -> Value {
    json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": [
        {"apiGroups": [group], "resources": [plural], "verbs": ["get", "list", "watch", "patch"]},
        {"apiGroups": [group], "resources": [format!("{plural}/status")], "verbs": ["patch"]},
    ]})
}

/// An object without what nobody reads.
fn plain(mut object: DynamicObject) -> Value {
    object.metadata.managed_fields = None;
    serde_json::to_value(object).expect("an object is JSON")
}

/// The reason of the condition `Ready`.
pub fn ready_reason(object: &Value) -> &str {
    ready(object, "reason")
}

/// The status of the condition `Ready`.
pub fn ready_status(object: &Value) -> &str {
    ready(object, "status")
}

fn ready<'o>(object: &'o Value, field: &str) -> &'o str {
    let conditions = object["status"]["conditions"].as_array().into_iter().flatten();
    conditions.filter(|condition| condition["type"] == "Ready").find_map(|condition| condition[field].as_str()).unwrap_or_default()
}

/// The name of the running test as a namespace may be called; threads of tests are named after them.
fn test_name() -> String {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("test").rsplit("::").next().unwrap_or("test").replace('_', "-").to_lowercase();
    let name = name.get(..LONGEST_NAME).unwrap_or(&name).trim_matches('-').to_owned();
    if name.is_empty() { "test".to_owned() } else { name }
}
