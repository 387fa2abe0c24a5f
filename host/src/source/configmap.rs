//! Plugins in ConfigMaps of the host's own namespace, read through the API: a mounted ConfigMap would lag by up to two minutes.
//! The stable versions that the host keeps in ConfigMaps come the same way.

use std::{collections::BTreeMap, convert::Infallible, sync::Arc, time::Duration};

use k8s_openapi::ByteString;
use kube::Client;
use serde::Deserialize;
use tokio::sync::mpsc;
use tracing::warn;

use super::{Change, Content, Delivery, Kept, Place, RolledBack, Shelf};
use crate::{
    object::Object,
    package::Version,
    watch::{self, Store, Target},
};

/// A ConfigMap with this label set to `true` is a plugin; with [`STABLE`] it is the host's own, and holds the stable version of one.
pub const LABEL: &str = "berth.acme.io/plugin";
/// ConfigMaps of a page of the list: each may have 1.4 MB of text.
const PAGE: u32 = 8;
/// See [`LABEL`].
pub const STABLE: &str = "stable";
/// Annotation of a kept version: which one it is, as JSON.
pub const VERSION: &str = "berth.acme.io/version";
/// Annotation of a kept version: which versions were rolled back, and why, as JSON: a list, or the only one.
pub const ROLLED_BACK: &str = "berth.acme.io/rolled-back";

/// Name of the ConfigMap in which the host keeps the stable version of a plugin.
pub fn kept_name(plugin: &str) -> String {
    format!("{plugin}-{STABLE}")
}

/// Sends the changes of the plugins in a namespace until it is dropped. How the informer is doing can be read from `store`.
pub fn run(
    client: Client,
    namespace: &str,
    watch_timeout: Duration,
    store: Arc<Store>,
    shelf: Shelf,
    changes: mpsc::UnboundedSender<Change>,
) -> impl Future<Output = Infallible> + use<> {
    let path = format!("/api/v1/namespaces/{namespace}/configmaps");
    let target = Target { path, label_selector: Some(format!("{LABEL} in (true, {STABLE})")), watch_timeout, page: PAGE };
    watch::run(client, target, store, move |change| {
        for mut change in translate(change) {
            change.lay_down(&shelf);
            // Without a loader the process is about to end.
            let _ = changes.send(change);
        }
    })
}

fn translate(change: watch::Change) -> Vec<Change> {
    match change {
        watch::Change::Applied { new, .. } => match read(&new) {
            Ok(change) => vec![change],
            Err(error) => {
                warn!(object = %new.key, %error, "left out a ConfigMap");
                Vec::new()
            }
        },
        // What it was is not known any more; of the two, the loader knows only one.
        watch::Change::Deleted(old) => {
            vec![Change::Withdrawn { place: Place::ConfigMap, name: old.key.name.to_string() }, Change::Lost(old.uid.to_string())]
        }
        watch::Change::Synced => vec![Change::Synced(Place::ConfigMap)],
    }
}

fn read(object: &Object) -> serde_json::Result<Change> {
    let ConfigMap { metadata, data, binary_data } = serde_json::from_str(&object.json.read())?;
    let text = data.unwrap_or_default().into_iter().map(|(file, text)| (file, Content::from(text)));
    let binary = binary_data.unwrap_or_default().into_iter().map(|(file, ByteString(bytes))| (file, Content::from(bytes)));
    let files = text.chain(binary).collect();
    if metadata.labels.get(LABEL).is_some_and(|label| label == STABLE) {
        return kept(object, metadata, files).map(Change::Kept);
    }
    Ok(Change::Delivered(Delivery {
        place: Place::ConfigMap,
        name: object.key.name.to_string(),
        uid: Some(object.uid.to_string()),
        created: metadata.creation_timestamp.unwrap_or_default(),
        version: object.resource_version.to_string(),
        files,
    }))
}

fn kept(object: &Object, metadata: Metadata, files: Vec<(String, Content)>) -> serde_json::Result<Kept> {
    let Metadata { annotations, owner_references, .. } = metadata;
    let missing = |what: &str| serde::de::Error::custom(format!("a stable version without {what}"));
    let version: Version = serde_json::from_str(annotations.get(VERSION).ok_or_else(|| missing("the annotation berth.acme.io/version"))?)?;
    let rolled_back: Option<OneOrMore> = annotations.get(ROLLED_BACK).map(|text| serde_json::from_str(text)).transpose()?;
    let rolled_back = match rolled_back {
        None => Vec::new(),
        Some(OneOrMore::One(one)) => vec![one],
        Some(OneOrMore::More(more)) => more,
    };
    let owner = owner_references.into_iter().next().ok_or_else(|| missing("an owner"))?;
    Ok(Kept { name: owner.name, uid: object.uid.to_string(), owner: Some(owner.uid), version, rolled_back, files })
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    More(Vec<RolledBack>),
    One(RolledBack),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ConfigMap {
    metadata: Metadata,
    data: Option<BTreeMap<String, String>>,
    binary_data: Option<BTreeMap<String, ByteString>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    creation_timestamp: Option<String>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
    #[serde(default)]
    owner_references: Vec<Owner>,
}

#[derive(Deserialize)]
struct Owner {
    name: String,
    uid: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::package::Digest;

    #[test]
    fn text_and_binary_files_are_delivered_with_what_tells_age_and_version() {
        let text = serde_json::json!({
            "metadata": { "name": "p", "namespace": "berth-system", "uid": "u", "resourceVersion": "7", "creationTimestamp": "2026-01-02T03:04:05Z" },
            "data": { "plugin.yaml": "paused: true" },
            "binaryData": { "plugin.wasm": "AGFzbQ==" }
        });
        let new = Arc::new(Object::parse(&text.to_string()).expect("parses"));
        let expected = Delivery {
            place: Place::ConfigMap,
            name: "p".into(),
            uid: Some("u".into()),
            created: "2026-01-02T03:04:05Z".into(),
            version: "7".into(),
            files: vec![("plugin.yaml".into(), Content::from("paused: true")), ("plugin.wasm".into(), Content::from("\0asm"))],
        };
        assert_eq!(translate(watch::Change::Applied { old: None, new: new.clone(), listed: true }), [Change::Delivered(expected)]);
        let withdrawn = Change::Withdrawn { place: Place::ConfigMap, name: "p".into() };
        assert_eq!(translate(watch::Change::Deleted(new)), [withdrawn, Change::Lost("u".into())]);
    }

    #[test]
    fn an_empty_config_map_is_delivered_so_that_it_can_be_refused() {
        let object = Object::parse(r#"{"metadata":{"name":"p"}}"#).expect("parses");
        assert!(matches!(read(&object), Ok(Change::Delivered(delivery)) if delivery.files.is_empty()));
    }

    #[test]
    fn a_kept_version_is_read_with_what_was_rolled_back_to_it_and_left_out_where_it_says_nothing() {
        let version = |code: &[u8]| Version { digest: Digest::of(code), config_hash: "abc".into() };
        let rolled_back = RolledBack { version: version(b"2"), why: "it trapped".into() };
        let text = |annotations: serde_json::Value| {
            serde_json::json!({
                "metadata": {
                    "name": "p-stable", "uid": "u", "labels": { LABEL: STABLE }, "annotations": annotations,
                    "ownerReferences": [{ "apiVersion": "v1", "kind": "ConfigMap", "name": "p", "uid": "owner" }]
                },
                "binaryData": { "plugin.wasm": "AGFzbQ==" }
            })
        };
        let json = |value: &serde_json::Value| value.to_string();
        let whole = |rolled_back: serde_json::Value| {
            text(serde_json::json!({
                VERSION: serde_json::to_string(&version(b"1")).expect("json"),
                ROLLED_BACK: json(&rolled_back),
            }))
        };
        let expected = Kept {
            name: "p".into(),
            uid: "u".into(),
            owner: Some("owner".into()),
            version: version(b"1"),
            rolled_back: vec![rolled_back.clone()],
            files: vec![("plugin.wasm".into(), Content::from("\0asm"))],
        };
        let parse = |text: serde_json::Value| read(&Object::parse(&text.to_string()).expect("parses"));
        for annotation in [serde_json::json!(rolled_back), serde_json::json!([rolled_back])] {
            assert_eq!(parse(whole(annotation)).expect("kept"), Change::Kept(expected.clone()));
        }
        assert!(parse(text(serde_json::json!({}))).is_err_and(|error| error.to_string().contains("berth.acme.io/version")));
    }
}
