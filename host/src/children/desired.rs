//! What a handler wants to exist, judged and dressed: the host names the owner, and the handler everything else.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::{
    claim::Claim,
    object::{Kind, Object, ObjectKey},
    text::cut,
};

/// On every child: the uid of its owner.
pub const OWNER_UID: &str = "berth.acme.io/owner-uid";
/// On every child: the mark of its owner's kind, by which the host lists the children of all objects of the kind.
pub const OWNER_KIND: &str = "berth.acme.io/owner-kind";
/// On every child: what was last applied, as a hash.
pub const APPLIED: &str = "berth.acme.io/applied";
/// The domain of the labels and annotations that the host goes by, in which no handler has any business.
const OWN_DOMAIN: &str = "berth.acme.io";

/// One object that is to exist.
#[derive(Clone, Debug)]
pub struct Child {
    /// Its kind, one that the claim owns.
    pub kind: Kind,
    /// Its namespace and name.
    pub key: ObjectKey,
    /// Of everything that is to be applied.
    pub hash: String,
    /// What is to be applied.
    pub document: Value,
}

impl std::fmt::Display for Child {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.kind.kind, self.key)
    }
}

/// Judges the children that a run wants for `owner`.
///
/// # Errors
/// A sentence about the first one that cannot be: the handler's fault.
pub fn desired(claim: &Claim, owner: &Object, wanted: Vec<Value>) -> Result<Vec<Child>, String> {
    let mut seen = BTreeSet::new();
    let children = wanted.into_iter().map(|document| child(claim, owner, document)).collect::<Result<Vec<_>, _>>()?;
    match children.iter().find(|child| !seen.insert((child.kind.group_kind(), child.key.clone()))) {
        Some(twice) => Err(format!("it returns the child {twice} twice")),
        None => Ok(children),
    }
}

fn child(claim: &Claim, owner: &Object, document: Value) -> Result<Child, String> {
    let Value::Object(mut document) = document else { return Err("one of its children is not a JSON object".into()) };
    let kind = kind(claim, &document)?;
    if document.get("status").is_some_and(|status| !status.is_null()) {
        return Err(format!("it returns a child of the kind {} with a status, which whoever runs the child writes", kind.kind));
    }
    document.remove("status");
    let metadata = match document.remove("metadata") {
        Some(Value::Object(metadata)) => metadata,
        _ => Map::new(),
    };
    let name = metadata.get("name").and_then(Value::as_str).filter(|name| is_path_segment(name));
    let Some(name) = name.map(str::to_owned) else {
        return Err(format!(
            "it returns a child of the kind {} without a valid `metadata.name`; a child needs a name of its own",
            kind.kind
        ));
    };
    let shown = format!("{} {}", kind.kind, cut(&name, 100));
    let key = ObjectKey::new(namespace(claim, owner, &kind, &metadata, &shown)?.as_deref(), &name);
    let mut document = Value::Object(document);
    document["metadata"] = dressed(claim, owner, &metadata, &key, &shown)?;
    let hash = hash(&document);
    document["metadata"]["annotations"][APPLIED] = hash.as_str().into();
    Ok(Child { kind, key, hash, document })
}

fn kind(claim: &Claim, document: &Map<String, Value>) -> Result<Kind, String> {
    let text = |field: &str| document.get(field).and_then(Value::as_str).unwrap_or_default();
    let (api_version, kind) = (text("apiVersion"), text("kind"));
    let owned = claim.owns.iter().find(|owned| owned.kind == kind && owned.api_version() == api_version);
    owned.cloned().ok_or_else(|| {
        let shown = format!("{} ({})", cut(kind, 100), cut(api_version, 100));
        format!("it returns a child of the kind {shown}, which is not one of the kinds that its claim `owns`")
    })
}

/// Where the child is. The garbage collector follows no owner into another namespace.
fn namespace(claim: &Claim, owner: &Object, kind: &Kind, metadata: &Map<String, Value>, shown: &str) -> Result<Option<String>, String> {
    let given = metadata.get("namespace").and_then(Value::as_str).filter(|namespace| !namespace.is_empty());
    match (kind.namespaced, owner.key.namespace.as_deref()) {
        (true, Some(own)) if given.is_none_or(|given| given == own) => Ok(Some(own.to_owned())),
        (true, Some(own)) => Err(format!(
            "it wants the child {shown} in the namespace {:?}, but the children of an object are in its own namespace, {own:?}",
            cut(given.unwrap_or_default(), 100)
        )),
        (true, None) => match given.filter(|given| is_path_segment(given)) {
            Some(given) => Ok(Some(given.to_owned())),
            None => Err(format!("the child {shown} needs a `metadata.namespace`, as {} has none", claim.reconciles.kind)),
        },
        (false, Some(_)) => Err(format!(
            "the child {shown} is cluster-scoped, and would stay when its owner, which is in a namespace, goes: Kubernetes collects no such child"
        )),
        (false, None) => Ok(None),
    }
}

/// The metadata as it is applied: the handler's labels and annotations, and the host's own.
fn dressed(claim: &Claim, owner: &Object, metadata: &Map<String, Value>, key: &ObjectKey, shown: &str) -> Result<Value, String> {
    const OF_THE_HANDLER: [&str; 4] = ["name", "namespace", "labels", "annotations"];
    let foreign = metadata.iter().find(|(field, value)| !OF_THE_HANDLER.contains(&field.as_str()) && !is_empty(value));
    if let Some((field, _)) = foreign {
        let field = cut(field, 100);
        return Err(format!("it sets `metadata.{field}` of the child {shown}, which is the host's or the API server's to set"));
    }
    let mut labels = texts(metadata, "labels", shown)?;
    let kind = &claim.reconciles;
    labels.insert(OWNER_UID.into(), owner.uid.as_ref().into());
    labels.insert(OWNER_KIND.into(), kind.group_kind().mark().into());
    let mut dressed = json!({
        "name": key.name.as_ref(),
        "labels": labels,
        "annotations": texts(metadata, "annotations", shown)?,
        "ownerReferences": [{
            "apiVersion": kind.api_version(), "kind": kind.kind, "name": owner.key.name.as_ref(), "uid": owner.uid.as_ref(), "controller": true,
        }],
    });
    if let Some(namespace) = &key.namespace {
        dressed["namespace"] = namespace.as_ref().into();
    }
    Ok(dressed)
}

fn texts(metadata: &Map<String, Value>, field: &str, shown: &str) -> Result<Map<String, Value>, String> {
    let texts = match metadata.get(field) {
        None | Some(Value::Null) => return Ok(Map::new()),
        Some(Value::Object(texts)) => texts,
        Some(_) => return Err(format!("`metadata.{field}` of the child {shown} is not a mapping")),
    };
    if let Some((key, _)) = texts.iter().find(|(_, value)| !value.is_string()) {
        return Err(format!("`metadata.{field}` of the child {shown} has the key {:?} with a value that is no text", cut(key, 100)));
    }
    let is_own = |key: &str| {
        let domain = key.split('/').next().unwrap_or_default();
        domain.strip_suffix(OWN_DOMAIN).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    };
    match texts.keys().find(|key| is_own(key)) {
        Some(key) => Err(format!("`metadata.{field}` of the child {shown} has the key {:?}, which is the host's own", cut(key, 100))),
        None => Ok(texts.clone()),
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

/// What may stand in the path of a request: names of all kinds are within it, and nothing that leads to another path is.
fn is_path_segment(name: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte);
    !name.is_empty() && name.len() <= 253 && name.bytes().all(fits) && !name.bytes().all(|byte| byte == b'.')
}

fn hash(document: &Value) -> String {
    let digest = Sha256::digest(document.to_string());
    digest[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn config_maps() -> Kind {
        let text = str::to_owned;
        Kind { group: String::new(), version: text("v1"), kind: text("ConfigMap"), plural: text("configmaps"), namespaced: true }
    }

    pub fn claim() -> Claim {
        let nodes = Kind { kind: "Node".into(), plural: "nodes".into(), namespaced: false, ..config_maps() };
        Claim { owns: vec![config_maps(), nodes], ..Claim::plain() }
    }

    pub fn owner(namespace: Option<&str>) -> Object {
        let metadata = json!({"name": "o", "namespace": namespace, "uid": "u1", "generation": 1, "resourceVersion": "1"});
        Object::parse(&json!({ "metadata": metadata }).to_string()).expect("parses")
    }

    pub fn config_map(name: &str, data: Value) -> Value {
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "labels": {"app": "x"}}, "data": data})
    }

    fn sentence(document: Value) -> String {
        desired(&claim(), &owner(Some("t1")), vec![document]).expect_err("refused")
    }

    #[test]
    fn a_child_gets_its_namespace_its_owner_and_the_marks_of_the_host() {
        let children = desired(&claim(), &owner(Some("t1")), vec![config_map("c", json!({"a": "1"}))]).expect("valid");
        let Child { key, document, hash, .. } = &children[0];
        assert_eq!(
            (key.to_string().as_str(), &document["metadata"]["namespace"], &document["data"]["a"]),
            ("t1/c", &json!("t1"), &json!("1"))
        );
        let reference = json!({"apiVersion": "g.io/v1", "kind": "K", "name": "o", "uid": "u1", "controller": true});
        assert_eq!(document["metadata"]["ownerReferences"], json!([reference]));
        assert_eq!((&document["metadata"]["labels"]["app"], &document["metadata"]["labels"][OWNER_UID]), (&json!("x"), &json!("u1")));
        assert_eq!(document["metadata"]["annotations"][APPLIED], hash.as_str());
    }

    #[test]
    fn the_hash_is_of_what_is_wanted() {
        let hash = |data: Value| desired(&claim(), &owner(Some("t1")), vec![config_map("c", data)]).expect("valid")[0].hash.clone();
        assert_eq!(hash(json!({"a": "1"})), hash(json!({"a": "1"})));
        assert_ne!(hash(json!({"a": "1"})), hash(json!({"a": "2"})));
    }

    #[test]
    fn what_is_not_the_handlers_to_say_is_refused_with_its_name() {
        let with = |field: &str, value: Value| {
            let mut child = config_map("c", json!({}));
            child["metadata"][field] = value;
            child
        };
        for (child, words) in [
            (json!(7), "not a JSON object"),
            (json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "c"}}), "Secret (v1), which is not one of the kinds"),
            (json!({"apiVersion": "v2", "kind": "ConfigMap", "metadata": {"name": "c"}}), "ConfigMap (v2)"),
            (json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"generateName": "c-"}}), "needs a name"),
            (with("name", json!("../secrets/x")), "needs a name"),
            (with("name", json!("..")), "needs a name"),
            (with("name", json!("a?force=true")), "needs a name"),
            (with("namespace", json!("kube-system")), "in its own namespace, \"t1\""),
            (with("ownerReferences", json!([{"uid": "x"}])), "metadata.ownerReferences"),
            (with("managedFields", json!([{}])), "metadata.managedFields"),
            (with("finalizers", json!(["x.io/y"])), "metadata.finalizers"),
            (with("resourceVersion", json!("1")), "metadata.resourceVersion"),
            (with("labels", json!({"a": 1})), "no text"),
            (with("labels", json!({"berth.acme.io/plugin": "true"})), "the host's own"),
            (with("annotations", json!({"x.berth.acme.io/y": "true"})), "the host's own"),
            (json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "status": {"a": 1}}), "with a status"),
            (json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "c"}}), "cluster-scoped"),
        ] {
            let sentence = sentence(child);
            assert!(sentence.contains(words), "{words}: {sentence}");
        }
        let twice = desired(&claim(), &owner(Some("t1")), vec![config_map("c", json!({})), config_map("c", json!({}))]);
        assert!(twice.expect_err("refused").contains("twice"));
    }

    #[test]
    fn a_cluster_scoped_owner_says_where_its_children_are() {
        let mut child = config_map("c", json!({}));
        assert!(desired(&claim(), &owner(None), vec![child.clone()]).expect_err("refused").contains("metadata.namespace"));
        child["metadata"]["namespace"] = json!("t2");
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}});
        let children = desired(&claim(), &owner(None), vec![child, node]).expect("valid");
        assert_eq!(children.iter().map(|child| child.key.to_string()).collect::<Vec<_>>(), ["t2/c", "n"]);
    }

    #[test]
    fn what_is_null_or_empty_counts_as_not_said() {
        let mut child = config_map("c", json!({}));
        child["metadata"]["creationTimestamp"] = Value::Null;
        child["metadata"]["ownerReferences"] = json!([]);
        child["status"] = Value::Null;
        assert!(desired(&claim(), &owner(Some("t1")), vec![child]).is_ok());
    }
}
