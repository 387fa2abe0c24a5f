//! Installs manifests: server-side apply of every object, in an order that works on an empty cluster.
//!
//! # Expected flow
//! Read [`Manifests`] from a file, a directory or a kustomization, then [`Manifests::apply`] them.
//!
//! # Guarantees
//! Namespaces and CRDs go first, and the rest waits until the CRDs are served. Applying the same manifests again changes nothing. Unknown
//! fields are refused, not dropped.

mod kustomization;
mod manifests;
mod shipped;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use kube::api::{DynamicObject, Patch, PatchParams, ValidationDirective};
use kube::core::GroupVersionKind;
use kube::discovery::{ApiCapabilities, ApiResource, Scope, pinned_kind};
use kube::{Api, Client};
use tracing::instrument::{WithDispatch, WithSubscriber};
use tracing::subscriber::NoSubscriber;

pub use manifests::{Document, Manifests};
pub use shipped::shipped;

/// The field manager of everything that is installed.
pub const FIELD_MANAGER: &str = "berth-install";

/// How long a CRD may take to be served, or an API server to have room again.
const PATIENCE: Duration = Duration::from_secs(30);
const PACE: Duration = Duration::from_millis(100);
/// A request that is not answered in this time is tried again.
const REQUEST: Duration = Duration::from_secs(10);

/// An object that was applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// Its kind.
    pub kind: String,
    /// Its namespace, if its kind has one.
    pub namespace: Option<String>,
    /// Its name.
    pub name: String,
}

/// Whether the API server is to store what it is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Store it.
    Store,
    /// Admit, validate and throw away.
    DryRun,
}

/// Applies the objects of a YAML text with any number of documents.
pub async fn apply(client: &Client, yaml: &str) -> Result<Vec<Applied>> {
    Manifests::parse("the manifest", yaml)?.apply(client, Mode::Store).await
}

impl Manifests {
    /// Applies every object. Objects of a namespaced kind that name no namespace go to the client's own.
    pub async fn apply(&self, client: &Client, mode: Mode) -> Result<Vec<Applied>> {
        let mut installation = Installation { client, mode, kinds: HashMap::new() };
        let mut applied = Vec::new();
        for stage in Stage::ALL {
            for document in self.documents().iter().filter(|document| Stage::of(document) == stage) {
                applied.push(installation.apply(document).await.with_context(|| document.to_string())?);
            }
            if stage == Stage::Definitions && mode == Mode::Store {
                for document in self.documents().iter().filter(|document| Stage::of(document) == stage) {
                    installation.wait_until_established(document).await.with_context(|| document.to_string())?;
                }
            }
        }
        Ok(applied)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Namespaces,
    Definitions,
    Rest,
}

impl Stage {
    const ALL: [Self; 3] = [Self::Namespaces, Self::Definitions, Self::Rest];

    fn of(document: &Document) -> Self {
        match document.kind() {
            "Namespace" => Self::Namespaces,
            "CustomResourceDefinition" => Self::Definitions,
            _ => Self::Rest,
        }
    }
}

struct Installation<'a> {
    client: &'a Client,
    mode: Mode,
    kinds: HashMap<GroupVersionKind, (ApiResource, ApiCapabilities)>,
}

impl Installation<'_> {
    async fn apply(&mut self, document: &Document) -> Result<Applied> {
        let (api, namespace) = self.api(document).await?;
        let parameters = PatchParams {
            dry_run: self.mode == Mode::DryRun,
            force: true,
            field_manager: Some(FIELD_MANAGER.to_owned()),
            field_validation: Some(ValidationDirective::Strict),
        };
        let patch = Patch::Apply(document.object());
        patiently(async || api.patch(document.name(), &parameters, &patch).await).await?;
        Ok(Applied { kind: document.kind().to_owned(), namespace, name: document.name().to_owned() })
    }

    async fn api(&mut self, document: &Document) -> Result<(Api<DynamicObject>, Option<String>)> {
        let (resource, capabilities) = self.kind(&document.group_version_kind()?).await?;
        let client = self.client.clone();
        Ok(match capabilities.scope {
            Scope::Cluster => (Api::all_with(client, &resource), None),
            Scope::Namespaced => {
                let namespace = document.namespace().unwrap_or_else(|| self.client.default_namespace()).to_owned();
                (Api::namespaced_with(client, &namespace, &resource), Some(namespace))
            }
        })
    }

    async fn kind(&mut self, kind: &GroupVersionKind) -> Result<(ApiResource, ApiCapabilities)> {
        if let Some(known) = self.kinds.get(kind) {
            return Ok(known.clone());
        }
        let start = Instant::now();
        let found = loop {
            match pinned_kind(self.client, kind).await {
                Ok(found) => break found,
                // Discovery may lag behind a CRD that is established.
                Err(error) if start.elapsed() < PATIENCE && is_missing_kind(&error) && self.mode == Mode::Store => {
                    tokio::time::sleep(PACE).await;
                }
                Err(error) if is_missing_kind(&error) => bail!("the API server does not serve {} {}", kind.api_version(), kind.kind),
                Err(error) => return Err(plain(error)),
            }
        };
        Ok(self.kinds.entry(kind.clone()).or_insert(found).clone())
    }

    async fn wait_until_established(&mut self, document: &Document) -> Result<()> {
        let (api, _) = self.api(document).await?;
        let start = Instant::now();
        let crd = loop {
            let crd = patiently(async || api.get(document.name()).await).await?;
            let conditions = crd.data.pointer("/status/conditions").and_then(serde_json::Value::as_array);
            let of = |kind: &str| conditions.into_iter().flatten().find(|condition| condition["type"] == kind);
            if of("Established").is_some_and(|condition| condition["status"] == "True") {
                break crd;
            }
            if start.elapsed() > PATIENCE {
                let why =
                    of("NamesAccepted").and_then(|condition| condition["message"].as_str()).unwrap_or("the API server is still at it");
                bail!("not served after {PATIENCE:?}: {why}");
            }
            tokio::time::sleep(PACE).await;
        };
        // Established means accepted: for a moment more it is not found, or its storage is not ready.
        for path in lists(&crd.data) {
            let request = || http::Request::get(&path).body(Vec::new()).context("its names make no valid path");
            while let Err(error) = expecting_failures(self.client.request_text(request()?)).await {
                let not_yet = may_heal(&error) || is_missing_kind(&error);
                if !not_yet || start.elapsed() > PATIENCE {
                    // Who may not list it may still go on; and what does not heal, the objects of the kind will tell.
                    break;
                }
                tokio::time::sleep(PACE).await;
            }
        }
        Ok(())
    }
}

/// The paths that list one object of each version that a CRD serves.
fn lists(crd: &serde_json::Value) -> Vec<String> {
    let text = |value: &serde_json::Value, pointer: &str| {
        value.pointer(pointer).and_then(serde_json::Value::as_str).unwrap_or_default().to_owned()
    };
    let (group, plural) = (text(crd, "/spec/group"), text(crd, "/spec/names/plural"));
    let versions = crd.pointer("/spec/versions").and_then(serde_json::Value::as_array).into_iter().flatten();
    let served = versions.filter(|version| version["served"] == true);
    served.map(|version| format!("/apis/{group}/{}/{plural}?limit=1", text(version, "/name"))).collect()
}

/// Server-side apply is idempotent, so what may heal is tried again for a while.
async fn patiently<T>(request: impl AsyncFn() -> kube::Result<T>) -> Result<T> {
    let start = Instant::now();
    loop {
        let failure = match tokio::time::timeout(REQUEST, expecting_failures(request())).await {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) if may_heal(&error) => plain(error),
            Ok(Err(error)) => return Err(plain(error)),
            Err(_) => anyhow!("the API server did not answer within {REQUEST:?}"),
        };
        if start.elapsed() > PATIENCE {
            return Err(failure);
        }
        tokio::time::sleep(PACE).await;
    }
}

/// kube logs every failed answer as an error. Where failures are part of a wait, only its end is news.
pub(crate) fn expecting_failures<F: Future>(request: F) -> WithDispatch<F> {
    request.with_subscriber(NoSubscriber::new())
}

fn may_heal(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => matches!(status.code, 429 | 500..),
        kube::Error::Service(_) | kube::Error::HyperError(_) => true,
        _ => false,
    }
}

fn is_missing_kind(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => status.code == 404,
        kube::Error::Discovery(_) => true,
        _ => false,
    }
}

/// The API server's own sentence, without the client's wrapping.
fn plain(error: kube::Error) -> anyhow::Error {
    match error {
        kube::Error::Api(status) if !status.message.is_empty() => anyhow!("{}", status.message),
        other => other.into(),
    }
}
