//! Children: objects that exist because another one does.

use std::collections::BTreeMap;

use serde::{Serialize, Serializer, ser::SerializeMap};
use serde_json::Value;

use crate::resource::{Kind, Readable};

/// An object that is to exist because the object of the run does: its kind, a name, and what it is to be like.
///
/// The host applies it as the plugin's ServiceAccount, adds the owner reference, and puts it into the owner's namespace. A field that
/// is not set here is left to whoever sets it.
///
/// ```
/// use berth_sdk::{Child, Kind, Readable, data, json, testing};
///
/// struct ConfigMap;
///
/// impl Readable for ConfigMap {
///     const KIND: Kind = Kind { group: "", version: "v1", kind: "ConfigMap", plural: "configmaps", namespaced: true };
///
///     fn read(_: &str) -> Result<Self, String> {
///         Ok(Self)
///     }
/// }
///
/// let child = Child::new::<ConfigMap>("greeting").label("app", "hello").field("data", json!({ "text": "Hello!" }));
/// let text = berth_sdk::to_json(&child).unwrap();
/// let expected = json!({
///     "apiVersion": "v1", "kind": "ConfigMap",
///     "metadata": { "name": "greeting", "labels": { "app": "hello" } },
///     "data": { "text": "Hello!" },
/// });
/// assert_eq!(testing::from_str::<testing::Value>(&text).unwrap(), expected);
/// ```
///
/// Anything else that serializes to a whole object is a child too, such as `json!({ "apiVersion": "v1", … })`.
#[derive(Clone, Debug, PartialEq)]
#[must_use = "a child does nothing until it is returned by `Action::children`"]
pub struct Child {
    kind: Kind,
    name: String,
    namespace: Option<String>,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    fields: BTreeMap<String, Value>,
}

impl Child {
    /// A child of a kind that the claim `owns`, by its name. Another object of the same kind must not have the same children, so derive
    /// the name from that of the object.
    pub fn new<K: Readable>(name: impl Into<String>) -> Self {
        Self {
            kind: K::KIND,
            name: name.into(),
            namespace: None,
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
            fields: BTreeMap::new(),
        }
    }

    /// The namespace of a child of a cluster-scoped object; others have their owner's.
    pub fn namespace(mut self, namespace: impl Into<String>) -> Self {
        self.namespace = Some(namespace.into());
        self
    }

    /// A label.
    pub fn label(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.labels.insert(key.into(), value.into());
        self
    }

    /// An annotation.
    pub fn annotation(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.annotations.insert(key.into(), value.into());
        self
    }

    /// The spec.
    pub fn spec(self, spec: impl Serialize) -> Self {
        self.field("spec", spec)
    }

    /// Another field beside the metadata, such as `data` of a ConfigMap.
    ///
    /// # Panics
    /// Where the value cannot be JSON, as a map whose keys are no texts.
    pub fn field(mut self, name: impl Into<String>, value: impl Serialize) -> Self {
        let name = name.into();
        let value = serde_json::to_value(value).unwrap_or_else(|error| panic!("`{name}` of a child cannot be JSON: {error}"));
        self.fields.insert(name, value);
        self
    }
}

#[derive(Serialize)]
struct Metadata<'c> {
    name: &'c str,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<&'c str>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    labels: &'c BTreeMap<String, String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    annotations: &'c BTreeMap<String, String>,
}

impl Serialize for Child {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { kind: Kind { group, version, kind, .. }, name, namespace, labels, annotations, fields } = self;
        let mut map = serializer.serialize_map(None)?;
        if group.is_empty() {
            map.serialize_entry("apiVersion", version)?;
        } else {
            map.serialize_entry("apiVersion", &[*group, *version].join("/"))?;
        }
        map.serialize_entry("kind", kind)?;
        map.serialize_entry("metadata", &Metadata { name, namespace: namespace.as_deref(), labels, annotations })?;
        for (field, value) in fields {
            map.serialize_entry(field, value)?;
        }
        map.end()
    }
}
