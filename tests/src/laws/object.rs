//! What the laws read off one object.

use serde_json::Value;

use super::KINDS;
use crate::resource::Resource;

/// What the probe is done with without saying so in the status.
const SILENT: [&str; 8] = ["sleep", "hostblock", "labels", "badlabel", "events", "logflood", "loginject", "stdout"];

/// `namespace/name`.
pub fn name_of(object: &Value) -> String {
    let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default();
    format!("{}/{}", text("namespace"), text("name"))
}

/// `namespace/name/uid` of an idempotency key, which begins with the resource.
pub fn identity(key: &str) -> &str {
    key.split_once('/').map_or(key, |(_, identity)| identity)
}

/// Whether there is work to do on an object, now or later.
pub fn is_open(resource: Resource, object: &Value) -> bool {
    let (status, metadata) = (&object["status"], &object["metadata"]);
    if !metadata["deletionTimestamp"].is_null() {
        let finalizers = metadata["finalizers"].as_array().into_iter().flatten();
        return finalizers.filter_map(Value::as_str).any(|finalizer| finalizer.starts_with("berth.acme.io/"));
    }
    let annotation = |name: &str| metadata["annotations"][format!("berth.acme.io/{name}")].as_str();
    if annotation("paused") == Some("true") {
        return false;
    }
    let mark: Value = annotation("gave-up").and_then(|mark| serde_json::from_str(mark).ok()).unwrap_or_default();
    if annotation("retry").is_none() && mark["generation"].is_i64() && mark["generation"] == metadata["generation"] {
        return false;
    }
    let phases = KINDS.iter().find(|(of, _)| *of == resource).map_or(&[][..], |(_, phases)| phases);
    let silent = resource == Resource::PROBE && object["spec"]["do"].as_str().is_some_and(|word| SILENT.contains(&word));
    let finished = phases.is_empty() || phases.iter().any(|phase| status["phase"] == *phase);
    !(silent || (finished && status["observedGeneration"] == metadata["generation"]))
}
