//! Where a system is measured: namespaces and back ends of its own on one control plane, and ways to fill them quickly.

use std::{
    path::{Path, PathBuf},
    sync::{
        LazyLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::Context;
use berth_tests::{
    cluster::Cluster, eventually::eventually, exporter::Exporter, gateway::Gateway, resource::Resource, stage::guest, workspace,
};
use futures::{
    StreamExt, TryStreamExt,
    stream::{self, BoxStream},
};
use kube::{
    Api,
    api::{DeleteParams, DynamicObject, ListParams, PostParams, WatchEvent, WatchParams},
};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::{Value, json};

/// Objects that are created at once. More would only wait in the API server.
const AT_ONCE: usize = 32;
/// The library's default: the level that `berth push` takes would take longer than what is measured.
const ZSTD_LEVEL: i32 = 3;
/// How long a change of a CRD takes to be noticed at most.
const NOTICED: Duration = Duration::from_secs(30);
/// Between two looks at something that is timed.
pub const LOOK: Duration = Duration::from_millis(2);

/// A place for one measurement.
pub struct Bed {
    /// The namespaces.
    pub cluster: Cluster,
    /// Where mails go.
    pub gateway: Gateway,
    /// Where reports are made.
    pub exporter: Exporter,
    folder: tempfile::TempDir,
    cache: PathBuf,
    objects: AtomicUsize,
}

impl Bed {
    /// A new one, on the control plane of this process.
    pub async fn new(name: &str) -> anyhow::Result<Self> {
        let cluster = Cluster::shared_as(name).await;
        // In memory where there is such a folder: the back ends write to disk before they answer, and are not what is measured.
        let memory = Path::new("/dev/shm");
        let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let folder = tempfile::Builder::new().prefix("berth-bench-").tempdir_in(parent).context("creating a folder")?;
        let gateway = Gateway::start(&folder.path().join("gateway")).await?;
        let exporter = Exporter::start(&folder.path().join("exporter")).await?;
        let cache = cluster.plane().control().directory().join("compiled");
        Ok(Self { cluster, gateway, exporter, folder, cache, objects: AtomicUsize::new(0) })
    }

    /// With a cache of compiled plugins that nobody else has.
    pub fn with_cold_cache(mut self) -> Self {
        self.cache = self.folder.path().join("compiled");
        self
    }

    /// Its folder, which goes with it.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Where Berth keeps what it compiled.
    pub fn cache(&self) -> &Path {
        &self.cache
    }

    /// How many objects were put in.
    pub fn objects(&self) -> usize {
        self.objects.load(Ordering::Relaxed)
    }

    /// Delivers the shipped plugin of a kind, as it ships.
    pub async fn plugin(&self, kind: Resource) -> anyhow::Result<()> {
        let component = if kind == Resource::EMAIL { "email_request" } else { "report_job" };
        self.plugin_as(kind, &guest(component)).await
    }

    /// Delivers another component as the plugin of a kind.
    pub async fn plugin_as(&self, kind: Resource, component: &[u8]) -> anyhow::Result<()> {
        let name = if kind == Resource::EMAIL { "email-request" } else { "report-job" };
        let config = workspace::deploy(&format!("plugins/{name}.yaml"))?;
        self.push(name, component, &config).await
    }

    /// Delivers a component as `berth push` does: compressed.
    pub async fn push(&self, name: &str, component: &[u8], config: &str) -> anyhow::Result<()> {
        let compressed = zstd::encode_all(component, ZSTD_LEVEL)?;
        self.cluster.push_file(name, "plugin.wasm.zst", &compressed, config).await;
        Ok(())
    }

    /// Creates so many objects that want something to be done.
    pub async fn fill(&self, kind: Resource, count: usize) -> anyhow::Result<()> {
        self.create(kind, (0..count).map(|number| self.wanting(kind, &format!("o{number:06}"))).collect()).await
    }

    /// An object that wants something to be done.
    pub fn wanting(&self, kind: Resource, name: &str) -> DynamicObject {
        let spec = match kind {
            Resource::EMAIL => json!({"to": "a@example.com", "template": "welcome", "locale": "en-GB"}),
            _ => json!({"report": "sales", "format": "pdf", "priority": 0}),
        };
        kind.object(self.cluster.namespace(), name, spec)
    }

    /// Creates so many objects for which all is done, and which the API server keeps as about so many bytes, `managedFields` included.
    ///
    /// A status is written with the object rather than after it, for which the kind loses its subresource for a while.
    pub async fn seed(&self, kind: Resource, count: usize, size: usize) -> anyhow::Result<()> {
        let definitions = Resource::CRD.api(self.cluster.client(), None);
        let name = format!("{}.{}", kind.plural, kind.group);
        let original = definitions.get(&name).await.with_context(|| format!("reading {name}"))?;
        let mut without = original.clone();
        let version = without.data.pointer_mut("/spec/versions/0").and_then(Value::as_object_mut).context("a CRD has a version")?;
        version.remove("subresources").context("the kind has a status")?;
        replace(&definitions, without).await?;
        let bare = self.until_statuses_are_given(kind, true).await;
        let pad = size.saturating_sub(bare);
        let objects: Vec<_> = (0..count).map(|number| self.settled(kind, &format!("s{number:06}"), pad)).collect();
        self.create(kind, objects).await?;
        replace(&definitions, original).await?;
        self.until_statuses_are_given(kind, false).await;
        Ok(())
    }

    fn settled(&self, kind: Resource, name: &str, pad: usize) -> DynamicObject {
        let mut object = self.wanting(kind, name);
        let phase = if kind == Resource::EMAIL { "Sent" } else { "Done" };
        object.data["status"] = json!({"phase": phase, "observedGeneration": 1});
        if kind == Resource::JOB {
            object.metadata.labels = Some([("workqueue.acme.io/phase".to_owned(), "done".to_owned())].into());
        }
        object.metadata.annotations = Some([("p".to_owned(), prose(name, pad))].into());
        object
    }

    /// How much JSON the objects of a kind are, without `managedFields`. A storage that was set up anew answers 429 for a while.
    pub async fn bytes(&self, kind: Resource) -> usize {
        let api = self.cluster.api(kind);
        eventually(NOTICED, async || {
            let objects = api.list(&ListParams::default()).await.map_err(|error| error.to_string())?.items;
            let text = |mut object: DynamicObject| {
                object.metadata.managed_fields = None;
                serde_json::to_string(&object).map_or(0, |text| text.len())
            };
            Ok::<_, String>(objects.into_iter().map(text).sum())
        })
        .await
    }

    /// How large an object without padding is then.
    async fn until_statuses_are_given(&self, kind: Resource, given: bool) -> usize {
        let api = self.cluster.api(kind);
        let probe = self.settled(kind, "probe", 0);
        let dry_run = PostParams { dry_run: true, ..PostParams::default() };
        // Its storage is set up anew, and answers 429 meanwhile.
        let listed = async || api.list_metadata(&ListParams::default().limit(1)).await.map(drop).map_err(|error| error.to_string());
        eventually(NOTICED, listed).await;
        eventually(NOTICED, async || match api.create(&dry_run, &probe).await {
            Ok(object) if object.data["status"]["observedGeneration"].is_null() != given => {
                Ok(serde_json::to_string(&object).map_or(0, |text| text.len()))
            }
            Ok(object) => Err(format!("a new object has the status {}", object.data["status"])),
            Err(error) => Err(error.to_string()),
        })
        .await
    }

    /// Creates an object that wants something to be done at each beat, and deletes it once so many have come since, until it is told to
    /// stop. Returns how many were created.
    pub async fn keep_filling(
        &self,
        kind: Resource,
        prefix: &str,
        beat: Duration,
        keep: usize,
        stop: &AtomicBool,
    ) -> anyhow::Result<usize> {
        let api = self.cluster.api(kind);
        let mut beat = tokio::time::interval(beat);
        let mut created = 0_usize;
        while !stop.load(Ordering::Relaxed) {
            beat.tick().await;
            api.create(&PostParams::default(), &self.wanting(kind, &format!("{prefix}{created}"))).await?;
            if let Some(old) = created.checked_sub(keep) {
                api.delete(&format!("{prefix}{old}"), &DeleteParams::background()).await?;
            }
            created += 1;
        }
        Ok(created)
    }

    /// Deletes objects, many at once.
    pub async fn remove(&self, kind: Resource, names: impl Iterator<Item = String>) -> anyhow::Result<()> {
        let (api, params) = (self.cluster.api(kind), DeleteParams::background());
        let gone = async |name: String| api.delete(&name, &params).await.map(drop).with_context(|| format!("deleting {name}"));
        stream::iter(names.map(Ok)).try_for_each_concurrent(AT_ONCE, gone).await
    }

    /// Creates objects, many at once.
    pub async fn create(&self, kind: Resource, objects: Vec<DynamicObject>) -> anyhow::Result<()> {
        let count = objects.len();
        let api = self.cluster.api(kind);
        let params = PostParams::default();
        stream::iter(objects)
            .map(|object| {
                let (api, params) = (api.clone(), params.clone());
                async move { api.create(&params, &object).await.map(drop).with_context(|| format!("creating {:?}", object.metadata.name)) }
            })
            .buffer_unordered(AT_ONCE)
            .try_collect::<()>()
            .await?;
        self.objects.fetch_add(count, Ordering::Relaxed);
        Ok(())
    }

    /// How many effects the back end of a kind has seen: mails, or reports.
    pub fn effects(&self, kind: Resource) -> usize {
        if kind == Resource::EMAIL { self.gateway.delivered() } else { self.exporter.exported() }
    }

    /// Waits until the back end of a kind has seen so many effects.
    pub async fn until_effects(&self, kind: Resource, count: usize, deadline: Duration) -> anyhow::Result<Instant> {
        let start = Instant::now();
        while self.effects(kind) < count {
            anyhow::ensure!(start.elapsed() < deadline, "{} of {count} {} are done after {deadline:?}", self.effects(kind), kind.plural);
            tokio::time::sleep(LOOK).await;
        }
        Ok(Instant::now())
    }

    /// Waits until every object of a kind is settled.
    pub async fn until_all_settled(&self, kind: Resource) {
        let phase = if kind == Resource::EMAIL { "Sent" } else { "Done" };
        eventually(Duration::from_secs(120), async || {
            let objects = self.cluster.list(kind, "").await;
            match objects.iter().find(|object| object["status"]["phase"] != phase || (kind == Resource::JOB && label(object) != "done")) {
                None => Ok(()),
                Some(object) => Err(object.to_string()),
            }
        })
        .await;
    }
}

/// What happens to the objects of a kind from now on.
pub async fn from_now(api: &Api<DynamicObject>) -> anyhow::Result<BoxStream<'static, kube::Result<WatchEvent<DynamicObject>>>> {
    let now = api.list_metadata(&ListParams::default().limit(1)).await?.metadata.resource_version.unwrap_or_default();
    Ok(api.watch(&WatchParams::default().timeout(290), &now).await?.boxed())
}

/// So many bytes of English words, in another order for each name: texts that are packed have to be like what people write, and neither a
/// row of one letter nor parts of one another.
fn prose(name: &str, bytes: usize) -> String {
    static WORDS: LazyLock<Vec<&str>> = LazyLock::new(|| {
        let text = concat!(include_str!("../../docs/plugins.md"), include_str!("../../docs/security.md"));
        // What JSON writes as it is.
        let plain = |word: &&str| word.chars().all(|letter| letter.is_ascii_alphanumeric() || ",.;:-()".contains(letter));
        text.split_whitespace().filter(plain).collect()
    });
    let mut random = StdRng::seed_from_u64(name.bytes().fold(0_u64, |seed, byte| seed.wrapping_mul(31).wrapping_add(byte.into())));
    let mut text = String::new();
    while text.len() < bytes {
        text.push_str(WORDS[random.random_range(0..WORDS.len())]);
        text.push(' ');
    }
    text.truncate(bytes);
    text
}

fn label(object: &Value) -> &str {
    object["metadata"]["labels"]["workqueue.acme.io/phase"].as_str().unwrap_or_default()
}

async fn replace(definitions: &Api<DynamicObject>, mut to: DynamicObject) -> anyhow::Result<()> {
    let name = to.metadata.name.clone().context("it has a name")?;
    // Its status changes by itself.
    to.metadata.resource_version = definitions.get(&name).await?.metadata.resource_version;
    definitions.replace(&name, &PostParams::default(), &to).await.with_context(|| format!("replacing {name}"))?;
    Ok(())
}
