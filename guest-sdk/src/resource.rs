//! What an object is to a handler: a kind, metadata, a spec and a status.

use std::collections::BTreeMap;

use serde::{Serialize, de::DeserializeOwned};

use crate::json;

/// A resource type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// API group, empty for the core group.
    pub group: &'static str,
    /// API version, such as `v1`.
    pub version: &'static str,
    /// Kind, such as `EmailRequest`.
    pub kind: &'static str,
    /// Plural resource name, such as `emailrequests`.
    pub plural: &'static str,
    /// Whether objects live in a namespace.
    pub namespaced: bool,
}

/// The part of an object's metadata that handlers use. Off wasm it is Kubernetes' `ObjectMeta`, which has the same fields and more.
#[cfg(target_family = "wasm")]
#[derive(Clone, Debug, Default, PartialEq, serde::Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Metadata {
    /// Name.
    pub name: Option<String>,
    /// None for a cluster-scoped object.
    pub namespace: Option<String>,
    /// Identity across deletion and re-creation.
    pub uid: Option<String>,
    /// Version of the spec.
    pub generation: Option<i64>,
    /// Labels.
    pub labels: Option<BTreeMap<String, String>>,
    /// Annotations.
    pub annotations: Option<BTreeMap<String, String>>,
}

/// The metadata of an object. On wasm it is a type of the SDK's own with `name`, `namespace`, `uid`, `generation`, `labels` and
/// `annotations`: use these alone.
#[cfg(not(target_family = "wasm"))]
pub type Metadata = k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// A custom resource. `#[resource]` implements it.
pub trait Resource: Sized {
    /// Its type.
    const KIND: Kind;
    /// What is wanted.
    type Spec: Serialize + DeserializeOwned;
    /// What was seen.
    type Status: Serialize + DeserializeOwned;

    /// Puts an object together.
    fn assemble(metadata: Metadata, spec: Self::Spec, status: Option<Self::Status>) -> Self;
    /// Name, namespace and the like.
    fn metadata(&self) -> &Metadata;
    /// What is wanted.
    fn spec(&self) -> &Self::Spec;
    /// What was seen.
    fn status(&self) -> Option<&Self::Status>;

    /// `metadata.name`.
    fn name(&self) -> &str {
        self.metadata().name.as_deref().unwrap_or_default()
    }

    /// `metadata.namespace`; none for a cluster-scoped object.
    fn namespace(&self) -> Option<&str> {
        self.metadata().namespace.as_deref()
    }

    /// `metadata.generation`: the version of the spec.
    fn generation(&self) -> i64 {
        self.metadata().generation.unwrap_or_default()
    }

    /// The value of a label.
    fn label(&self, key: &str) -> Option<&str> {
        lookup(self.metadata().labels.as_ref(), key)
    }

    /// The value of an annotation.
    fn annotation(&self, key: &str) -> Option<&str> {
        lookup(self.metadata().annotations.as_ref(), key)
    }
}

fn lookup<'m>(map: Option<&'m BTreeMap<String, String>>, key: &str) -> Option<&'m str> {
    map?.get(key).map(String::as_str)
}

/// The status of a resource. `#[resource(status = …)]` implements it.
pub trait Status: Serialize {
    /// Whose status.
    type Of: Resource;
}

/// An object that can be read from the cluster. Every `#[resource]` is one; for a kind of Kubernetes' own, say which fields matter:
///
/// ```
/// use std::collections::BTreeMap;
/// use berth_sdk::{Kind, Metadata, Readable, data};
///
/// #[data]
/// struct ConfigMap { data: Option<BTreeMap<String, String>> }
///
/// impl Readable for ConfigMap {
///     const KIND: Kind = Kind { group: "", version: "v1", kind: "ConfigMap", plural: "configmaps", namespaced: true };
///
///     fn read(text: &str) -> Result<Self, String> {
///         berth_sdk::from_json(text)
///     }
/// }
/// ```
pub trait Readable: Sized {
    /// Its type.
    const KIND: Kind;

    /// Reads the object from its JSON; the error is a sentence that names the field at fault.
    fn read(text: &str) -> Result<Self, String>;
}

impl<R: Resource> Readable for R {
    const KIND: Kind = <R as Resource>::KIND;

    fn read(text: &str) -> Result<Self, String> {
        json::object(text)
    }
}
