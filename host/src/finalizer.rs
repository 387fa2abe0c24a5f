//! The host's finalizer on an object: its name, adding it and taking it away.
//!
//! # Guarantees
//! The list of finalizers is written under the resourceVersion that it was read at, so finalizers of others are neither lost nor
//! brought back. A finalizer is never added to an object that is being deleted, which the API server would refuse.

use http::{Method, StatusCode};
use serde::Deserialize;
use serde_json::json;

use crate::{
    fence::Fence,
    object::{GroupKind, Kind, Object},
    status::{CONFLICTS, MERGE_PATCH, WriteError, Writer, Written, same_work},
};

/// What the names of the host's finalizers begin with.
const DOMAIN: &str = "berth.acme.io/";

/// The name of the finalizer for objects of a kind: of fixed length, and the same whatever the plugin is called.
pub fn name(kind: &GroupKind) -> String {
    format!("{DOMAIN}{}", kind.mark())
}

/// The finalizers of an object.
pub fn of(object: &Object) -> Vec<String> {
    #[derive(Deserialize)]
    struct Parts {
        metadata: Metadata,
    }
    #[derive(Deserialize)]
    struct Metadata {
        #[serde(default)]
        finalizers: Vec<String>,
    }
    serde_json::from_str(&object.json.read()).map(|Parts { metadata }| metadata.finalizers).unwrap_or_default()
}

/// Whether the object waits for the host's finalizer.
pub fn holds(object: &Object, kind: &GroupKind) -> bool {
    // Most objects have none, which is seen without reading them.
    object.json.read().contains(DOMAIN) && of(object).contains(&name(kind))
}

/// The command by which a person takes the finalizer off this object as it is now.
pub fn removal(kind: &Kind, object: &Object) -> String {
    let own = name(&kind.group_kind());
    let left: Vec<String> = of(object).into_iter().filter(|finalizer| *finalizer != own).collect();
    let namespace = object.key.namespace.as_deref().map(|namespace| format!(" -n {namespace}")).unwrap_or_default();
    let patch = json!({ "metadata": { "finalizers": left } });
    format!("kubectl patch {} {}{namespace} --type=merge -p '{patch}'", kind.resource(), object.key.name)
}

/// Adds the finalizer to the object, unless it is there.
///
/// # Errors
/// `Changed` where the object is another one or is being deleted by now.
pub async fn add(writer: &Writer, kind: &Kind, given: &Object, fence: &Fence) -> Result<Written, WriteError> {
    write(writer, kind, given, true, fence).await
}

/// Takes the finalizer off the object. An object whose last one it was is gone by then, and is returned as it was.
///
/// # Errors
/// `Gone` where there is no such object any more.
pub async fn remove(writer: &Writer, kind: &Kind, given: &Object, fence: &Fence) -> Result<Written, WriteError> {
    write(writer, kind, given, false, fence).await
}

async fn write(writer: &Writer, kind: &Kind, given: &Object, present: bool, fence: &Fence) -> Result<Written, WriteError> {
    let name = name(&kind.group_kind());
    let path = kind.object_path(&given.key);
    let (mut object, mut merged) = (given.clone(), false);
    for _ in 0..CONFLICTS {
        let mut finalizers = of(&object);
        if finalizers.contains(&name) == present {
            return Ok(Written { object, merged });
        }
        if present {
            finalizers.push(name.clone());
        } else {
            finalizers.retain(|finalizer| *finalizer != name);
        }
        let body = json!({ "metadata": { "resourceVersion": object.resource_version, "finalizers": finalizers } });
        let reply = writer.exchange(Method::PATCH, &path, Some((MERGE_PATCH, &body)), fence).await?;
        match reply.status {
            status if status.is_success() => return Ok(Written { object: reply.object(false)?, merged }),
            StatusCode::NOT_FOUND => return Err(WriteError::Gone),
            StatusCode::CONFLICT => {
                let current = writer.read(kind, given, fence).await?.ok_or(WriteError::Gone)?;
                let another = current.uid != given.uid || (present && current.deleting);
                if another {
                    return Err(WriteError::Changed(Box::new(current)));
                }
                merged = merged || !same_work(given, &current);
                object = current;
            }
            _ => return Err(reply.error(false)),
        }
    }
    Err(WriteError::Later { after: std::time::Duration::from_secs(1), cause: format!("{CONFLICTS} conflicts in a row") })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind() -> Kind {
        Kind {
            group: "batch.acme.io".into(),
            version: "v1".into(),
            kind: "ReportJob".into(),
            plural: "reportjobs".into(),
            namespaced: true,
        }
    }

    fn object(finalizers: &[&str]) -> Object {
        let text = json!({ "metadata": { "name": "n", "namespace": "t1", "finalizers": finalizers } }).to_string();
        Object::parse(&text).expect("parses")
    }

    #[test]
    fn the_name_is_of_the_kind_and_of_fixed_length() {
        let name = name(&kind().group_kind());
        assert_eq!(name.len(), "berth.acme.io/".len() + 10);
        assert!(holds(&object(&["x.io/y", &name]), &kind().group_kind()));
        assert!(!holds(&object(&["x.io/y"]), &kind().group_kind()));
        assert!(!holds(&Object::parse(r#"{"metadata":{"name":"n"}}"#).expect("parses"), &kind().group_kind()));
    }

    #[test]
    fn the_command_leaves_the_finalizers_of_others() {
        let own = name(&kind().group_kind());
        assert_eq!(
            removal(&kind(), &object(&["x.io/y", &own])),
            r#"kubectl patch reportjobs.batch.acme.io n -n t1 --type=merge -p '{"metadata":{"finalizers":["x.io/y"]}}'"#
        );
        assert!(removal(&kind(), &object(&[&own])).ends_with(r#"'{"metadata":{"finalizers":[]}}'"#));
    }
}
