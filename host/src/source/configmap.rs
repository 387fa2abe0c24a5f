//! Plugins in ConfigMaps of the host's own namespace, read through the API: a mounted ConfigMap would lag by up to two minutes.

use std::{collections::BTreeMap, convert::Infallible, sync::Arc, time::Duration};

use bytes::Bytes;
use k8s_openapi::ByteString;
use kube::Client;
use serde::Deserialize;
use tokio::sync::mpsc;
use tracing::warn;

use super::{Change, Delivery, Place};
use crate::{
    object::Object,
    watch::{self, Store, Target},
};

/// A ConfigMap with this label set to `true` is a plugin.
pub const LABEL: &str = "berth.acme.io/plugin";

/// Sends the changes of the plugins in a namespace until it is dropped. How the informer is doing can be read from `store`.
pub fn run(
    client: Client,
    namespace: &str,
    watch_timeout: Duration,
    store: Arc<Store>,
    changes: mpsc::UnboundedSender<Change>,
) -> impl Future<Output = Infallible> + use<> {
    let path = format!("/api/v1/namespaces/{namespace}/configmaps");
    let target = Target { path, label_selector: Some(format!("{LABEL}=true")), watch_timeout };
    watch::run(client, target, store, move |change| {
        if let Some(change) = translate(change) {
            // Without a loader the process is about to end.
            let _ = changes.send(change);
        }
    })
}

fn translate(change: watch::Change) -> Option<Change> {
    match change {
        watch::Change::Applied { new, .. } => match delivery(&new) {
            Ok(delivery) => Some(Change::Delivered(delivery)),
            Err(error) => {
                warn!(object = %new.key, %error, "left out a ConfigMap");
                None
            }
        },
        watch::Change::Deleted(old) => Some(Change::Withdrawn { place: Place::ConfigMap, name: old.key.name.to_string() }),
        watch::Change::Synced => Some(Change::Synced(Place::ConfigMap)),
    }
}

fn delivery(object: &Object) -> serde_json::Result<Delivery> {
    let ConfigMap { metadata, data, binary_data } = serde_json::from_str(&object.json)?;
    let text = data.unwrap_or_default().into_iter().map(|(file, text)| (file, Bytes::from(text)));
    let binary = binary_data.unwrap_or_default().into_iter().map(|(file, ByteString(bytes))| (file, Bytes::from(bytes)));
    Ok(Delivery {
        place: Place::ConfigMap,
        name: object.key.name.to_string(),
        uid: Some(object.uid.to_string()),
        created: metadata.creation_timestamp.unwrap_or_default(),
        version: object.resource_version.to_string(),
        files: text.chain(binary).collect(),
    })
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
}

#[cfg(test)]
mod tests {
    use super::*;

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
            files: vec![("plugin.yaml".into(), Bytes::from_static(b"paused: true")), ("plugin.wasm".into(), Bytes::from_static(b"\0asm"))],
        };
        assert_eq!(translate(watch::Change::Applied { old: None, new: new.clone(), listed: true }), Some(Change::Delivered(expected)));
        let withdrawn = Change::Withdrawn { place: Place::ConfigMap, name: "p".into() };
        assert_eq!(translate(watch::Change::Deleted(new)), Some(withdrawn));
    }

    #[test]
    fn an_empty_config_map_is_delivered_so_that_it_can_be_refused() {
        let object = Object::parse(r#"{"metadata":{"name":"p"}}"#).expect("parses");
        assert!(delivery(&object).expect("delivered").files.is_empty());
    }
}
