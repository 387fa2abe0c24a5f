//! What the host has to know of a CustomResourceDefinition, and the gate that compares it with a claim.

use std::{collections::BTreeMap, sync::Arc};

use serde::Deserialize;

use crate::{
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
    pub fn gate(&self, claimed: &Kind) -> Gate {
        let wanted = claimed.group_kind();
        let found = self.by_name.values().filter(|crd| crd.kind == wanted).max_by_key(|crd| crd.established);
        match found {
            None if !self.synced => Gate::Waiting,
            None => Gate::Shut(missing(claimed)),
            Some(crd) => crd.check(claimed).map_or_else(Gate::Shut, |()| Gate::Open(crd.uid.clone())),
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
        let Definition { spec, status } = serde_json::from_str(&object.json).ok()?;
        let version = |VersionSpec { name, served, subresources }| Version { name, served, has_status: subresources.status.is_some() };
        Some(Self {
            uid: object.uid.clone(),
            kind: GroupKind { group: spec.group.into(), kind: spec.names.kind.into() },
            plural: spec.names.plural,
            namespaced: spec.scope == "Namespaced",
            established: !object.deleting && status.conditions.iter().any(|c| c.r#type == "Established" && c.status == "True"),
            versions: spec.versions.into_iter().map(version).collect(),
        })
    }

    fn check(&self, claimed: &Kind) -> Result<(), Refusal> {
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
        if !self.established {
            let message = format!("The CustomResourceDefinition {name} is not established; the plugin starts by itself once it is.");
            return Err(Refusal::new(reason::WAITING_FOR_CRD, message));
        }
        Ok(())
    }
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
        serde_json::json!({
            "metadata": { "name": "ks.g.io", "uid": uid },
            "spec": {
                "group": "g.io", "scope": "Namespaced", "names": { "kind": "K", "plural": "ks" },
                "versions": [{ "name": "v1", "served": true, "subresources": { "status": {} } }, { "name": "v0", "served": false }]
            },
            "status": { "conditions": [{ "type": "Established", "status": "True" }] }
        })
    }

    pub(in crate::loader) fn object(value: &serde_json::Value) -> Object {
        Object::parse(&value.to_string()).expect("parses")
    }

    fn kind() -> Kind {
        crate::claim::Claim::plain().reconciles
    }

    fn gate(value: &serde_json::Value, claimed: &Kind) -> Gate {
        let mut crds = Crds::default();
        crds.apply(&object(value));
        crds.gate(claimed)
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
        assert_eq!(crds.gate(&kind()), Gate::Waiting);
        assert!(crds.set_synced() && !crds.set_synced());
        assert!(matches!(crds.gate(&kind()), Gate::Shut(refusal) if refusal.reason == reason::WAITING_FOR_CRD));
        assert!(crds.apply(&object(&definition("u"))) && !crds.apply(&object(&definition("u"))));
        assert!(crds.apply(&object(&definition("another"))));
        assert!(crds.remove("ks.g.io") && !crds.remove("ks.g.io"));
        assert!(matches!(crds.gate(&kind()), Gate::Shut(_)));
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
        assert_eq!(shut(&deleting, &kind()).reason, reason::WAITING_FOR_CRD);
    }
}
