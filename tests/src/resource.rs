//! The kinds that tests name.

use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject},
    core::GroupVersionKind,
};
use serde_json::{Value, json};

/// A kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resource {
    /// API group, empty for the core group.
    pub group: &'static str,
    /// API version.
    pub version: &'static str,
    /// Kind.
    pub kind: &'static str,
    /// Plural, as in a URL.
    pub plural: &'static str,
}

impl Resource {
    /// EmailRequest.
    pub const EMAIL: Self = Self::of("notify.acme.io", "v1", "EmailRequest", "emailrequests");
    /// ReportJob.
    pub const JOB: Self = Self::of("batch.acme.io", "v1", "ReportJob", "reportjobs");
    /// The kind of the probe, whose objects say what its handler does.
    pub const PROBE: Self = Self::of("probe.acme.io", "v1", "Probe", "probes");
    /// What the host says of a plugin.
    pub const PLUGIN: Self = Self::of("berth.acme.io", "v1alpha1", "Plugin", "plugins");
    /// ConfigMap.
    pub const CONFIG_MAP: Self = Self::of("", "v1", "ConfigMap", "configmaps");
    /// Namespace.
    pub const NAMESPACE: Self = Self::of("", "v1", "Namespace", "namespaces");
    /// Pod.
    pub const POD: Self = Self::of("", "v1", "Pod", "pods");
    /// Deployment.
    pub const DEPLOYMENT: Self = Self::of("apps", "v1", "Deployment", "deployments");
    /// Lease.
    pub const LEASE: Self = Self::of("coordination.k8s.io", "v1", "Lease", "leases");
    /// Event.
    pub const EVENT: Self = Self::of("events.k8s.io", "v1", "Event", "events");
    /// Role.
    pub const ROLE: Self = Self::of("rbac.authorization.k8s.io", "v1", "Role", "roles");
    /// ClusterRoleBinding.
    pub const CLUSTER_ROLE_BINDING: Self = Self::of("rbac.authorization.k8s.io", "v1", "ClusterRoleBinding", "clusterrolebindings");
    /// CustomResourceDefinition.
    pub const CRD: Self = Self::of("apiextensions.k8s.io", "v1", "CustomResourceDefinition", "customresourcedefinitions");
    /// What is shown when a test has failed.
    pub const DUMPED: [Self; 6] = [Self::EMAIL, Self::JOB, Self::PROBE, Self::PLUGIN, Self::LEASE, Self::EVENT];

    const fn of(group: &'static str, version: &'static str, kind: &'static str, plural: &'static str) -> Self {
        Self { group, version, kind, plural }
    }

    /// The same for kube.
    pub fn api_resource(self) -> ApiResource {
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(self.group, self.version, self.kind), self.plural)
    }

    /// The objects of one namespace, or of all.
    pub fn api(self, client: &Client, namespace: Option<&str>) -> Api<DynamicObject> {
        match namespace {
            Some(namespace) => Api::namespaced_with(client.clone(), namespace, &self.api_resource()),
            None => Api::all_with(client.clone(), &self.api_resource()),
        }
    }

    /// An object with a spec.
    pub fn object(self, namespace: &str, name: &str, spec: Value) -> DynamicObject {
        DynamicObject::new(name, &self.api_resource()).within(namespace).data(json!({"spec": spec}))
    }

    /// An object with nothing but a name.
    pub fn bare(self, name: &str) -> DynamicObject {
        DynamicObject::new(name, &self.api_resource())
    }
}
