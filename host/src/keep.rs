//! Keeps the stable version of each plugin in a ConfigMap, so that which version is stable survives the process.
//!
//! # Expected flow
//! The leader compares what the loader says [is to be kept](Keep) with what is there, and writes the difference: `NAME-stable`, immutable,
//! owned by the plugin's own ConfigMap, with the files of the stable version, which version that is, and which ones were rolled back.
//! The source of ConfigMaps reads it on every replica.
//!
//! # Guarantees
//! Nothing is written outside the fence, and nothing over a ConfigMap of that name that is not the host's. A kept version gives way to
//! one that has proven itself, never to one that was rolled back. What cannot be written is tried again.
//!
//! # Caveats
//! The data of an immutable ConfigMap cannot change, so another version is a deletion and a creation. A crash in between is harmless:
//! what has just become stable is what the plugin's own ConfigMap holds.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use k8s_openapi::{
    ByteString,
    api::core::v1::ConfigMap,
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference},
};
use kube::{
    Api, Client,
    api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions},
};
use serde_json::json;
use tokio::{sync::watch, time::Instant};

use crate::{
    fence::{Fence, Leadership, Stopped},
    loader::{Keep, Standings},
    package::{CONFIG_FILE, Version},
    source::{
        RolledBack,
        configmap::{LABEL, ROLLED_BACK, STABLE, VERSION, kept_name},
    },
};

/// The longest that one write may take.
const WRITE: Duration = Duration::from_secs(10);
/// When a write that failed, or that the watch has not shown, is done again.
const AGAIN: Duration = Duration::from_secs(10);

/// See the module.
pub struct Keeper {
    /// A client of the host's account.
    pub client: Client,
    /// The host's namespace.
    pub namespace: String,
    /// What the loader says.
    pub standings: watch::Receiver<Arc<Standings>>,
}

/// What was written last for a plugin, and when.
type Written = BTreeMap<String, (Version, Vec<RolledBack>, Instant)>;

impl Keeper {
    /// Keeps until it is dropped, or until leadership or loader are gone.
    pub async fn run(mut self, mut leadership: Leadership) {
        let mut last = None;
        while let Some(fence) = leadership.acquired(last).await {
            last = Some(fence.epoch());
            let mut written = Written::new();
            loop {
                let standings = self.standings.borrow_and_update().clone();
                if standings.synced && self.write(&standings, &mut written, &fence).await == Err(Stopped::Fenced) {
                    break;
                }
                tokio::select! {
                    () = fence.lost() => break,
                    changed = self.standings.changed() => if changed.is_err() { return },
                    () = tokio::time::sleep(AGAIN) => {}
                }
            }
        }
    }

    async fn write(&self, standings: &Standings, written: &mut Written, fence: &Fence) -> Result<(), Stopped> {
        for (name, standing) in &standings.plugins {
            let Some(keep) = standing.keep.as_ref().filter(|keep| !keep.is_kept) else { continue };
            let wish = (&keep.version, &keep.rolled_back);
            if written.get(name).is_some_and(|(version, rolled_back, at)| (version, rolled_back) == wish && at.elapsed() < AGAIN) {
                continue;
            }
            written.insert(name.clone(), (keep.version.clone(), keep.rolled_back.clone(), Instant::now()));
            match fence.guard(WRITE, self.keep(name, keep)).await {
                Ok(Ok(())) => tracing::info!(plugin = name, version = %keep.version, "the stable version is kept"),
                Ok(Err(error)) => tracing::warn!(plugin = name, %error, "the stable version could not be kept"),
                Err(Stopped::Fenced) => return Err(Stopped::Fenced),
                Err(error) => tracing::warn!(plugin = name, %error, "the stable version could not be kept"),
            }
        }
        Ok(())
    }

    async fn keep(&self, name: &str, keep: &Keep) -> kube::Result<()> {
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.namespace);
        let kept_name = kept_name(name);
        if let Some((uid, version)) = &keep.kept {
            if version.as_ref() == Some(&keep.version) {
                let annotations = json!({ ROLLED_BACK: rolled_back(keep) });
                let patch = json!({ "metadata": { "uid": uid, "annotations": annotations } });
                return api.patch_metadata(&kept_name, &PatchParams::default(), &Patch::Merge(patch)).await.map(drop);
            }
            let preconditions = Preconditions { uid: Some(uid.clone()), resource_version: None };
            match api.delete(&kept_name, &DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() }).await {
                Err(kube::Error::Api(answer)) if answer.code == 404 => {}
                other => drop(other?),
            }
        }
        let config_map = config_map(name, keep).map_err(|error| kube::Error::Service(error.into()))?;
        api.create(&PostParams::default(), &config_map).await.map(drop)
    }
}

fn text(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("versions are JSON")
}

/// The annotation, where there is something to say.
fn rolled_back(keep: &Keep) -> Option<String> {
    (!keep.rolled_back.is_empty()).then(|| text(&keep.rolled_back))
}

fn config_map(name: &str, keep: &Keep) -> std::io::Result<ConfigMap> {
    let Keep { version, delivery, owner, .. } = keep;
    let reference = |uid: &String| OwnerReference {
        api_version: "v1".into(),
        kind: "ConfigMap".into(),
        name: name.to_owned(),
        uid: uid.clone(),
        ..OwnerReference::default()
    };
    let (mut data, mut binary) = (BTreeMap::new(), BTreeMap::new());
    for (file, content) in &delivery.files {
        let bytes = content.read()?;
        match std::str::from_utf8(&bytes) {
            Ok(text) if file == CONFIG_FILE => drop(data.insert(file.clone(), text.to_owned())),
            _ => drop(binary.insert(file.clone(), ByteString(bytes.to_vec()))),
        }
    }
    let rolled_back = rolled_back(keep).map(|text| (ROLLED_BACK.to_owned(), text));
    Ok(ConfigMap {
        metadata: ObjectMeta {
            name: Some(kept_name(name)),
            labels: Some([(LABEL.to_owned(), STABLE.to_owned())].into()),
            annotations: Some([(VERSION.to_owned(), text(version))].into_iter().chain(rolled_back).collect()),
            owner_references: Some(owner.iter().map(reference).collect()),
            ..ObjectMeta::default()
        },
        data: Some(data),
        binary_data: Some(binary),
        immutable: Some(true),
    })
}
