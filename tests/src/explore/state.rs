//! The end of a run, without what differs from run to run: what two runs of a scenario are compared by.

use std::collections::BTreeMap;

use kube::api::{DynamicObject, ListParams};
use serde_json::{Map, Value, json};

use super::world::World;
use crate::{
    cluster::{ready_reason, ready_status},
    resource::Resource,
};

/// Where the loader says which version is in a kept ConfigMap, and which one was rolled back to it.
const KEPT: [&str; 2] = ["berth.acme.io/version", "berth.acme.io/rolled-back"];
/// The cause of a failure is that of the last one, which may be the fault itself.
const CAUSE: &str = "(a cause)";

/// The state as it is now.
pub async fn state(world: &World) -> anyhow::Result<Value> {
    let cluster = &world.stage.cluster;
    let list = async |resource: Resource, namespace: &str| {
        let list = resource.api(cluster.client(), Some(namespace)).list(&ListParams::default()).await?;
        anyhow::Ok(list.items.into_iter().map(|object| serde_json::to_value::<DynamicObject>(object).expect("JSON")).collect::<Vec<_>>())
    };
    let (mut objects, mut uids) = (BTreeMap::new(), BTreeMap::new());
    for resource in [Resource::EMAIL, Resource::JOB, Resource::PROBE] {
        for object in list(resource, cluster.namespace()).await? {
            let name = format!("{} {}", resource.kind, text(&object["metadata"]["name"]));
            uids.insert(text(&object["metadata"]["uid"]), format!("(uid of {name})"));
            objects.insert(name, essence(resource, object));
        }
    }
    let children = list(Resource::CONFIG_MAP, cluster.namespace()).await?;
    let children: BTreeMap<String, Value> = children.into_iter().filter_map(|child| of_child(&child, &uids)).collect();
    let plugins = list(Resource::PLUGIN, cluster.system()).await?;
    let plugins: BTreeMap<String, Value> = plugins.iter().map(|plugin| (text(&plugin["metadata"]["name"]), of_plugin(plugin))).collect();
    let kept = list(Resource::CONFIG_MAP, cluster.system()).await?;
    let kept: BTreeMap<String, Value> = kept
        .iter()
        .filter(|map| map["immutable"] == true)
        .map(|map| (text(&map["metadata"]["name"]), KEPT.map(|key| map["metadata"]["annotations"][key].clone()).into()))
        .collect();
    let mails: Vec<_> = world.stage.gateway.deliveries().into_iter().map(|mail| json!([mail.key, mail.payload]).to_string()).collect();
    let reports: Vec<_> = world.stage.exporter.exports().into_iter().map(|export| json!([export.key, export.order]).to_string()).collect();
    let all = json!({
        "objects": objects, "children": children, "plugins": plugins, "kept": kept, "mails": sorted(mails), "reports": sorted(reports),
    });
    Ok(without_names(&all, world, &uids))
}

fn sorted(mut texts: Vec<String>) -> Vec<String> {
    texts.sort_unstable();
    texts
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// What of an object is to be the same.
fn essence(resource: Resource, mut object: Value) -> Value {
    let mut status = object["status"].take();
    without_times(&mut status);
    if let Some(status) = status.as_object_mut() {
        // An object that has failed once counts from zero again; one that has not has nothing to count.
        status.retain(|key, value| !(key == "retries" && *value == 0));
        if resource == Resource::JOB && status.get("phase").is_some_and(|phase| phase == "Failed") {
            status.insert("message".into(), CAUSE.into());
        }
    }
    let metadata = &mut object["metadata"];
    let mut annotations = metadata["annotations"].take();
    if let Some(mark) = annotations["berth.acme.io/gave-up"].as_str() {
        let mut mark: Value = serde_json::from_str(mark).unwrap_or_default();
        mark["cause"] = CAUSE.into();
        annotations["berth.acme.io/gave-up"] = mark;
    }
    json!({
        "spec": object["spec"].take(), "status": status, "labels": object["metadata"]["labels"].take(), "annotations": annotations,
        "finalizers": object["metadata"]["finalizers"].take(), "deleted": !object["metadata"]["deletionTimestamp"].is_null(),
        "generation": object["metadata"]["generation"].take(),
    })
}

/// A child of an object that is there; the garbage collector takes its time with the others.
fn of_child(child: &Value, owners: &BTreeMap<String, String>) -> Option<(String, Value)> {
    let metadata = &child["metadata"];
    let references = metadata["ownerReferences"].as_array();
    let owners: Vec<_> = references.into_iter().flatten().map(|owner| owners.get(&text(&owner["uid"]))).collect();
    let orphan = !owners.is_empty() && owners.iter().all(Option::is_none);
    let name = text(&metadata["name"]);
    (!orphan && name != "kube-root-ca.crt").then(|| (name, json!({"data": child["data"], "labels": metadata["labels"], "owners": owners})))
}

fn of_plugin(plugin: &Value) -> Value {
    let status = &plugin["status"];
    let fields = ["kind", "servingDigest", "servingVersion", "stableVersion", "candidateVersion", "refusedDigest", "refusedReason"];
    let mut essence: Map<String, Value> = fields.iter().map(|field| ((*field).to_owned(), status[*field].clone())).collect();
    essence.insert("ready".into(), json!([ready_status(plugin), ready_reason(plugin)]));
    essence.into()
}

fn without_times(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|key, _| key != "lastTransitionTime");
            fields.values_mut().for_each(without_times);
        }
        Value::Array(items) => items.iter_mut().for_each(without_times),
        _ => {}
    }
}

/// The same with the run's own names replaced.
fn without_names(value: &Value, world: &World, uids: &BTreeMap<String, String>) -> Value {
    let cluster = &world.stage.cluster;
    let mut text = value.to_string().replace(cluster.system(), "(system)").replace(cluster.namespace(), "(namespace)");
    for (uid, name) in uids {
        text = text.replace(uid, name);
    }
    serde_json::from_str(&text).expect("names are letters, digits and dashes")
}

/// Whatever two states do not have in common, line by line.
pub fn difference(expected: &Value, found: &Value) -> String {
    let mut lines = Vec::new();
    compare("", expected, found, &mut lines);
    lines.join("\n")
}

fn compare(path: &str, expected: &Value, found: &Value, lines: &mut Vec<String>) {
    match (expected, found) {
        (expected, found) if expected == found => {}
        (Value::Object(expected), Value::Object(found)) => {
            let mut keys: Vec<&String> = expected.keys().chain(found.keys()).collect();
            keys.sort_unstable();
            keys.dedup();
            for key in keys {
                let side = |fields: &Map<String, Value>| fields.get(key).cloned().unwrap_or_default();
                compare(&format!("{path}/{key}"), &side(expected), &side(found), lines);
            }
        }
        (expected, found) => lines.push(format!("{path}: {found} instead of {expected}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_two_states_do_not_have_in_common_is_said_line_by_line() {
        let one = json!({"a": {"b": 1, "c": [1]}, "d": 1});
        let other = json!({"a": {"b": 2, "c": [1]}, "e": 1});
        assert_eq!(difference(&one, &other), "/a/b: 2 instead of 1\n/d: null instead of 1\n/e: 1 instead of null");
        assert_eq!(difference(&one, &one), "");
    }

    #[test]
    fn times_counts_that_are_over_and_causes_are_no_part_of_an_object() {
        let job = |status: Value| essence(Resource::JOB, json!({"metadata": {}, "status": status}))["status"].take();
        assert_eq!(
            job(json!({"phase": "Done", "retries": 0, "conditions": [{"lastTransitionTime": "x"}]})),
            json!({"phase": "Done", "conditions": [{}]})
        );
        assert_eq!(
            job(json!({"phase": "Failed", "retries": 5, "message": "503"})),
            json!({"phase": "Failed", "retries": 5, "message": CAUSE})
        );
    }
}
