//! What the host has to know of a CustomResourceDefinition, and the gate that compares it with a claim.

use std::{collections::BTreeMap, sync::Arc};

use serde::Deserialize;

use crate::{
    claim::Claim,
    object::{GroupKind, Kind, Object},
    package::{Refusal, reason},
};

/// A CustomResourceDefinition, reduced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Crd {
    uid: Arc<str>,
    kind: GroupKind,
    plural: String,
    namespaced: bool,
    established: bool,
    versions: Vec<Version>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Version {
    name: String,
    served: bool,
    has_status: bool,
    /// What the schema keeps of the status.
    status: Schema,
}

/// A schema, as far as it says which fields are kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct Schema {
    #[serde(rename = "x-kubernetes-preserve-unknown-fields")]
    open: bool,
    #[serde(rename = "additionalProperties", deserialize_with = "is_there")]
    any: bool,
    properties: BTreeMap<Box<str>, Schema>,
}

fn is_there<'de, D: serde::Deserializer<'de>>(value: D) -> Result<bool, D::Error> {
    serde::de::IgnoredAny::deserialize(value).map(|_| true)
}

impl Schema {
    /// Whether a field at this path, such as `a.b`, is kept.
    fn keeps(&self, path: &str) -> bool {
        let mut node = self;
        for field in path.split('.') {
            if node.open || node.any {
                return true;
            }
            let Some(next) = node.properties.get(field) else { return false };
            node = next;
        }
        true
    }
}

/// The definitions that are there, by name.
#[derive(Clone, Debug, Default)]
pub struct Crds {
    by_name: BTreeMap<Arc<str>, Crd>,
    synced: bool,
}

/// What the gate found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gate {
    /// Served as claimed; with the identity of the definition.
    Open(Arc<str>),
    /// Not known yet.
    Waiting,
    /// Not as claimed, for now.
    Shut(Refusal),
}

impl Crds {
    /// Takes in a definition as it is now. False where nothing that matters has changed.
    pub fn apply(&mut self, object: &Object) -> bool {
        match Crd::parse(object) {
            Some(crd) => self.by_name.insert(object.key.name.clone(), crd.clone()) != Some(crd),
            None => self.by_name.remove(&object.key.name).is_some(),
        }
    }

    /// Forgets a definition that is gone.
    pub fn remove(&mut self, name: &str) -> bool {
        self.by_name.remove(name).is_some()
    }

    /// All that are there have been taken in. False where that was known.
    pub fn set_synced(&mut self) -> bool {
        !std::mem::replace(&mut self.synced, true)
    }

    /// Whether the kind is served as it is claimed.
    pub fn gate(&self, claim: &Claim) -> Gate {
        let claimed = &claim.reconciles;
        let wanted = claimed.group_kind();
        let found = self.by_name.values().filter(|crd| crd.kind == wanted).max_by_key(|crd| crd.established);
        match found {
            None if !self.synced => Gate::Waiting,
            None => Gate::Shut(missing(claimed)),
            Some(crd) => crd.check(claim).map_or_else(Gate::Shut, |()| Gate::Open(crd.uid.clone())),
        }
    }
}

fn missing(claimed: &Kind) -> Refusal {
    let message = format!(
        "No CustomResourceDefinition {} is in the cluster; the plugin starts by itself once one is applied that serves {}.",
        claimed.resource(),
        claimed.version
    );
    Refusal::new(reason::WAITING_FOR_CRD, message)
}

impl Crd {
    fn parse(object: &Object) -> Option<Self> {
        let Definition { spec, status } = serde_json::from_str(&object.json.read()).ok()?;
        let version = |VersionSpec { name, served, subresources, schema }| {
            let Schema { open, mut properties, .. } = schema.root;
            let status = properties.remove("status").unwrap_or(Schema { open, ..Schema::default() });
            Version { name, served, has_status: subresources.status.is_some(), status }
        };
        Some(Self {
            uid: object.uid.clone(),
            kind: GroupKind { group: spec.group.into(), kind: spec.names.kind.into() },
            plural: spec.names.plural,
            namespaced: spec.scope == "Namespaced",
            // One that is being deleted serves on for as long as it has objects, and finalizers of these are the plugin's to take off.
            established: status.conditions.iter().any(|c| c.r#type == "Established" && c.status == "True"),
            versions: spec.versions.into_iter().map(version).collect(),
        })
    }

    fn check(&self, claim: &Claim) -> Result<(), Refusal> {
        let claimed = &claim.reconciles;
        let name = claimed.resource();
        if self.plural != claimed.plural || self.namespaced != claimed.namespaced {
            let scope = |namespaced| if namespaced { "namespaced" } else { "cluster-scoped" };
            let message = format!(
                "The plugin claims {claimed} as {} ({}), but the CustomResourceDefinition has it as {} ({}).",
                claimed.plural,
                scope(claimed.namespaced),
                self.plural,
                scope(self.namespaced)
            );
            return Err(Refusal::new(reason::KIND_MISMATCH, message));
        }
        let Some(version) = self.versions.iter().find(|version| version.name == claimed.version && version.served) else {
            let served: Vec<_> = self.versions.iter().filter(|version| version.served).map(|version| version.name.as_str()).collect();
            let message = format!(
                "The CustomResourceDefinition {name} does not serve {}, which the plugin claims; it serves {}.",
                claimed.version,
                if served.is_empty() { "no version".to_owned() } else { served.join(", ") }
            );
            return Err(Refusal::new(reason::VERSION_NOT_SERVED, message));
        };
        if !version.has_status {
            let message = format!(
                "The CustomResourceDefinition {name} lacks the status subresource in {}: add \"subresources: {{ status: {{}} }}\" to that version.",
                version.name
            );
            return Err(Refusal::new(reason::NO_STATUS_SUBRESOURCE, message));
        }
        if let Some(field) = written(claim).find(|field| !version.status.keeps(field.strip_prefix("status.").unwrap_or(field))) {
            let message = format!(
                "The schema of the CustomResourceDefinition {name} has no {field} in {}, so the API server drops it; the handler's claim needs \
                 it: add it to the schema.",
                version.name
            );
            return Err(Refusal::new(reason::NO_STATUS_FIELD, message));
        }
        if !self.established {
            let message = format!("The CustomResourceDefinition {name} is not established; the plugin starts by itself once it is.");
            return Err(Refusal::new(reason::WAITING_FOR_CRD, message));
        }
        Ok(())
    }
}

/// The fields of the status that the host writes for a claim, or reads to know what is settled.
fn written(claim: &Claim) -> impl Iterator<Item = &str> {
    let progress = claim.progress.iter().flat_map(|progress| ["status.observedGeneration", &*progress.phase_field]);
    let letters = claim.dead_letter.iter().flat_map(|letter| letter.retries_field.as_deref().into_iter().chain([&*letter.message_field]));
    progress.chain(letters)
}

#[derive(Deserialize)]
struct Definition {
    spec: Spec,
    #[serde(default)]
    status: Status,
}

#[derive(Deserialize)]
struct Spec {
    group: String,
    names: Names,
    scope: String,
    versions: Vec<VersionSpec>,
}

#[derive(Deserialize)]
struct Names {
    kind: String,
    plural: String,
}

#[derive(Deserialize)]
struct VersionSpec {
    name: String,
    served: bool,
    #[serde(default)]
    subresources: Subresources,
    #[serde(default)]
    schema: VersionSchema,
}

#[derive(Default, Deserialize)]
struct VersionSchema {
    #[serde(default, rename = "openAPIV3Schema")]
    root: Schema,
}

#[derive(Default, Deserialize)]
struct Subresources {
    status: Option<serde::de::IgnoredAny>,
}

#[derive(Default, Deserialize)]
struct Status {
    #[serde(default)]
    conditions: Vec<Condition>,
}

#[derive(Deserialize)]
struct Condition {
    r#type: String,
    status: String,
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A definition of `K` in `g.io` that serves `v1`.
    pub(in crate::loader) fn definition(uid: &str) -> serde_json::Value {
        let fields = serde_json::json!({ "observedGeneration": {}, "phase": {}, "retries": {}, "message": {} });
        let schema = serde_json::json!({ "openAPIV3Schema": { "properties": { "status": { "properties": fields } } } });
        serde_json::json!({
            "metadata": { "name": "ks.g.io", "uid": uid },
            "spec": {
                "group": "g.io", "scope": "Namespaced", "names": { "kind": "K", "plural": "ks" },
                "versions": [
                    { "name": "v1", "served": true, "subresources": { "status": {} }, "schema": schema },
                    { "name": "v0", "served": false, "schema": schema }
                ]
            },
            "status": { "conditions": [{ "type": "Established", "status": "True" }] }
        })
    }

    pub(in crate::loader) fn object(value: &serde_json::Value) -> Object {
        Object::parse(&value.to_string()).expect("parses")
    }

    fn kind() -> Kind {
        Claim::full().reconciles
    }

    fn gate(value: &serde_json::Value, claimed: &Kind) -> Gate {
        let mut crds = Crds::default();
        crds.apply(&object(value));
        crds.gate(&Claim { reconciles: claimed.clone(), ..Claim::full() })
    }

    fn shut(value: &serde_json::Value, claimed: &Kind) -> Refusal {
        match gate(value, claimed) {
            Gate::Shut(refusal) => refusal,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_definition_that_serves_the_claim_opens_with_its_identity() {
        assert_eq!(gate(&definition("u"), &kind()), Gate::Open("u".into()));
    }

    #[test]
    fn a_definition_is_missed_only_after_all_have_been_seen() {
        let mut crds = Crds::default();
        assert_eq!(crds.gate(&Claim::full()), Gate::Waiting);
        assert!(crds.set_synced() && !crds.set_synced());
        assert!(matches!(crds.gate(&Claim::full()), Gate::Shut(refusal) if refusal.reason == reason::WAITING_FOR_CRD));
        assert!(crds.apply(&object(&definition("u"))) && !crds.apply(&object(&definition("u"))));
        assert!(crds.apply(&object(&definition("another"))));
        assert!(crds.remove("ks.g.io") && !crds.remove("ks.g.io"));
        assert!(matches!(crds.gate(&Claim::full()), Gate::Shut(_)));
    }

    #[test]
    fn each_way_not_to_be_as_claimed_has_its_sentence() {
        let mut unserved = definition("u");
        unserved["spec"]["versions"][0]["name"] = "v2".into();
        assert!(shut(&unserved, &kind()).message.contains("does not serve v1, which the plugin claims; it serves v2"));
        let mut no_status = definition("u");
        no_status["spec"]["versions"][0]["subresources"] = serde_json::json!({});
        assert!(shut(&no_status, &kind()).message.contains("lacks the status subresource in v1"));
        let cluster_scoped = Kind { namespaced: false, ..kind() };
        assert_eq!(shut(&definition("u"), &cluster_scoped).reason, reason::KIND_MISMATCH);
        let other_plural = Kind { plural: "kses".into(), ..kind() };
        assert!(shut(&definition("u"), &other_plural).message.contains("as kses (namespaced), but"));
        let mut young = definition("u");
        young["status"] = serde_json::json!({});
        assert!(shut(&young, &kind()).message.contains("not established"));
        let mut deleting = definition("u");
        deleting["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        assert_eq!(gate(&deleting, &kind()), Gate::Open("u".into()), "its objects have yet to be finalized");
    }

    #[test]
    fn a_field_that_the_schema_would_drop_is_named() {
        let with = |schema: serde_json::Value| {
            let mut definition = definition("u");
            definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"] = schema;
            gate(&definition, &kind())
        };
        let open = serde_json::json!({ "x-kubernetes-preserve-unknown-fields": true });
        let fields = serde_json::json!({ "observedGeneration": {}, "phase": {}, "message": {} });
        for whole in [
            open.clone(),
            serde_json::json!({ "properties": { "status": open } }),
            serde_json::json!({ "properties": { "status": { "additionalProperties": true } } }),
        ] {
            assert_eq!(with(whole), Gate::Open("u".into()));
        }
        for (schema, field) in [
            (serde_json::json!({ "properties": { "status": { "properties": fields } } }), "status.retries"),
            (serde_json::json!({ "properties": { "status": { "type": "object" } } }), "status.observedGeneration"),
            (serde_json::json!({ "type": "object" }), "status.observedGeneration"),
        ] {
            let Gate::Shut(refusal) = with(schema) else { panic!("open") };
            assert!(refusal.reason == reason::NO_STATUS_FIELD && refusal.message.contains(&format!("has no {field} in v1")), "{refusal}");
        }
        let mut crds = Crds::default();
        let mut bare = definition("u");
        bare["spec"]["versions"][0]["schema"] = serde_json::json!({});
        crds.apply(&object(&bare));
        assert_eq!(crds.gate(&Claim::plain()), Gate::Open("u".into()), "a claim without such fields needs none");
    }
}
