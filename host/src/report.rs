//! Tells how each plugin stands: as the status of a `Plugin` object, and as an Event when that changes.
//!
//! # Expected flow
//! Every replica watches the `Plugin` objects of its namespace. The leader compares them with what its loader says, and writes what is
//! different: at once when it becomes leader, when a plugin stands otherwise, and when somebody else has deleted an object; within some
//! seconds when somebody else has changed one. Of a plugin that a new leader has yet to load, what was said before stands for some seconds.
//!
//! Figures of what is at work go into an entry of this host's own, at a pace: nothing changes while nothing happens.
//!
//! # Guarantees
//! Nothing is written that is there already, and nothing outside the fence. The object of a plugin from a ConfigMap is owned by it, and
//! goes with it; the objects of plugins that are gone are deleted once every source has told what it has.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use kube::{
    Api, Client,
    api::{DeleteParams, DynamicObject, Patch, PatchParams, Preconditions},
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{Notify, watch};
use tracing::{debug, warn};

use self::pace::Paced;
pub use self::{
    figures::{Figures, LastFailure},
    status::{Condition, Status},
};
use crate::{
    events::Recorder,
    fence::{Fence, Leadership, Stopped},
    loader::{Standing, Standings},
    metrics::Metrics,
    object::{GroupKind, Kind, Object, ObjectKey, label},
    reconcile::Event,
    source::Place,
    watch::{Change, Store, Target},
};

mod figures;
mod pace;
mod status;

/// Who the API server is told that the writer is.
const FIELD_MANAGER: &str = "berth";
/// On every object that is ours to delete.
const MANAGED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", "berth");
/// The longest that one write may take.
const WRITE: Duration = Duration::from_secs(10);
/// When to look again after a write that failed, and how often the kinds' informers are asked how they are.
const AGAIN: Duration = Duration::from_secs(5);
/// How long a new leader leaves what was said of a plugin that it has yet to load: most likely it holds, and is said again in a moment.
const LOAD: Duration = Duration::from_secs(5);
/// How long a kind has to be in trouble before that is worth a write: a watch that ends and comes back is not.
const TROUBLE: Duration = Duration::from_secs(15);

/// The kind of the objects.
pub fn plugin_kind() -> Kind {
    let text = str::to_owned;
    Kind { group: text("berth.acme.io"), version: text("v1alpha1"), kind: text("Plugin"), plural: text("plugins"), namespaced: true }
}

/// How a kind is doing at work.
#[derive(Debug, Default)]
pub struct Live {
    /// What keeps it, or what its plugin reads, from being watched, in a sentence.
    pub trouble: Option<String>,
    /// While this host leads.
    pub figures: Option<Figures>,
}

/// Asks the controller how a kind is doing.
pub type Ask = Box<dyn Fn(&GroupKind) -> Live + Send + Sync>;

/// See the module.
pub struct Reporter {
    /// A client of the host's account.
    pub client: Client,
    /// The host's namespace.
    pub namespace: String,
    /// What the loader says.
    pub standings: watch::Receiver<Arc<Standings>>,
    /// What the controller says.
    pub live: Ask,
    /// Name of the Lease.
    pub lease: String,
    /// Name of this process.
    pub identity: String,
    /// Where Events go.
    pub recorder: Recorder,
    /// Where serving and refused plugins are counted, on every replica.
    pub metrics: Arc<Metrics>,
    /// How long the server is asked to keep a watch open.
    pub watch_timeout: Duration,
}

impl Reporter {
    /// Reports until it is dropped, or until leadership or loader are gone.
    pub async fn run(self, leadership: Leadership) {
        let store = Arc::new(Store::packing());
        let changed = Arc::new(Notify::new());
        let path = plugin_kind().collection_path(Some(&self.namespace));
        let target = Target { path, label_selector: None, watch_timeout: self.watch_timeout, page: crate::watch::PAGE };
        let written = Arc::new(Written::default());
        let (notify, known) = (changed.clone(), written.clone());
        let informer = crate::watch::run(self.client.clone(), target, store.clone(), move |change| {
            match &change {
                Change::Applied { new, .. } => known.shown(new),
                Change::Deleted(object) => known.forget(object),
                Change::Synced => {}
            }
            // A list of many objects is one reason to look, not many.
            if !matches!(change, Change::Applied { listed: true, .. }) {
                notify.notify_one();
            }
        });
        let counting = count(self.standings.clone(), self.metrics.clone());
        let writer = Writer { reporter: self, store, written, troubles: BTreeMap::new(), paced: BTreeMap::new(), rests: BTreeMap::new() };
        tokio::select! {
            never = informer => match never {},
            () = writer.run(leadership, &changed) => {}
            () = counting => {}
        }
    }
}

async fn count(mut standings: watch::Receiver<Arc<Standings>>, metrics: Arc<Metrics>) {
    loop {
        let now = standings.borrow_and_update().clone();
        let serving = now.plugins.iter().filter_map(|(name, standing)| {
            let serving = standing.serving()?;
            Some((name.clone(), serving.claim.reconciles.group_kind().to_string(), serving.version.digest.short()))
        });
        metrics.plugins(serving, now.plugins.values().filter(|standing| standing.refused.is_some()).count());
        if standings.changed().await.is_err() {
            return;
        }
    }
}

/// The answers to our own writes, which may be ahead of the watch.
#[derive(Default)]
struct Written(Mutex<BTreeMap<ObjectKey, Arc<Object>>>);

impl Written {
    fn note(&self, object: Object) {
        self.0.lock().expect("no panic while the lock is held").insert(object.key.clone(), Arc::new(object));
    }

    /// The watch is where the write is, or further.
    fn shown(&self, object: &Object) {
        let mut objects = self.0.lock().expect("no panic while the lock is held");
        if objects.get(&object.key).is_some_and(|written| !written.newer_than(object)) {
            objects.remove(&object.key);
        }
    }

    fn forget(&self, gone: &Object) {
        let mut objects = self.0.lock().expect("no panic while the lock is held");
        if objects.get(&gone.key).is_some_and(|object| object.uid == gone.uid) {
            objects.remove(&gone.key);
        }
    }

    /// The later one of what the watch has shown and what was written.
    fn latest(&self, key: &ObjectKey, shown: Option<Arc<Object>>) -> Option<Arc<Object>> {
        let written = self.0.lock().expect("no panic while the lock is held").get(key).cloned();
        match (shown, written) {
            (Some(shown), Some(written)) if written.newer_than(&shown) => Some(written),
            (shown, written) => shown.or(written),
        }
    }
}

struct Writer {
    reporter: Reporter,
    store: Arc<Store>,
    written: Arc<Written>,
    /// Since when a kind has been in trouble, and what is told of it.
    troubles: BTreeMap<GroupKind, (Instant, String)>,
    /// By plugin.
    paced: BTreeMap<String, Paced>,
    /// By plugin, where there was nothing to write.
    rests: BTreeMap<String, Rest>,
}

/// What there was nothing to write for. Most plugins are looked at for the sake of another one.
struct Rest {
    standings: Arc<Standings>,
    basis: Basis,
}

/// What decides, beside the plugin's standing, whether its object is written.
#[derive(PartialEq)]
struct Basis {
    /// Uid and version.
    object: Option<(Arc<str>, Box<str>)>,
    trouble: Option<String>,
    figures: Option<Figures>,
}

impl Basis {
    fn of(object: Option<&Object>, trouble: Option<&str>, figures: Option<&Figures>) -> Self {
        let object = object.map(|object| (object.uid.clone(), object.resource_version.clone()));
        Self { object, trouble: trouble.map(str::to_owned), figures: figures.cloned() }
    }
}

/// Why the term's work ended.
enum Ended {
    Term,
    Host,
}

impl Writer {
    async fn run(mut self, mut leadership: Leadership, changed: &Notify) {
        let mut last = None;
        while let Some(fence) = leadership.acquired(last).await {
            last = Some(fence.epoch());
            let ended = self.lead(&fence, changed).await;
            self.rests.clear();
            if let Ended::Host = ended {
                return;
            }
        }
    }

    async fn lead(&mut self, fence: &Fence, changed: &Notify) -> Ended {
        let began = Instant::now();
        loop {
            let standings = self.reporter.standings.borrow_and_update().clone();
            self.observe_troubles(&standings);
            if self.store.health().synced && self.write(&standings, began, fence).await == Err(Stopped::Fenced) {
                return Ended::Term;
            }
            tokio::select! {
                () = fence.lost() => return Ended::Term,
                changed = self.reporter.standings.changed() => if changed.is_err() { return Ended::Host },
                () = changed.notified() => {}
                () = tokio::time::sleep(AGAIN) => {}
            }
        }
    }

    fn observe_troubles(&mut self, standings: &Standings) {
        let serving = standings.plugins.values().filter_map(|standing| standing.stable.as_ref());
        let kinds = serving.map(|serving| serving.claim.reconciles.group_kind());
        let now = Instant::now();
        let troubles = kinds.filter_map(|kind| {
            let text = (self.reporter.live)(&kind).trouble?;
            let known = self.troubles.remove(&kind);
            // What it has come to when it is told, which may not be what it began with; from then on it stays, as each change is a write.
            let told = known.as_ref().is_some_and(|(since, _)| now.duration_since(*since) >= TROUBLE);
            let since = known.as_ref().map_or(now, |(since, _)| *since);
            Some((kind, (since, known.filter(|_| told).map_or(text, |(_, told)| told))))
        });
        self.troubles = troubles.collect();
    }

    fn trouble(&self, standing: &Standing) -> Option<&str> {
        let (since, text) = self.troubles.get(&standing.kind.as_ref()?.group_kind())?;
        (since.elapsed() >= TROUBLE).then_some(text)
    }

    /// Writes what is different. What fails is logged, and tried again when the loop comes round.
    async fn write(&mut self, standings: &Arc<Standings>, began: Instant, fence: &Fence) -> Result<(), Stopped> {
        let now = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        for (name, standing) in &standings.plugins {
            let object = self.present(name).filter(|object| !object.deleting);
            let figures = self.figures(standing);
            let basis = Basis::of(object.as_deref(), self.trouble(standing), figures.as_ref());
            // A trial goes on by itself.
            let rests = self.rests.get(name).is_some_and(|rest| rest.standings.plugins.get(name) == Some(standing) && rest.basis == basis);
            if rests && standing.candidate.is_none() {
                self.rests.insert(name.clone(), Rest { standings: standings.clone(), basis });
                continue;
            }
            // No standing is kept for longer than it is needed.
            self.rests.remove(name);
            let found = object.map(|object| object.value()).unwrap_or_default();
            let before = serde_json::from_value(found["status"].clone()).ok();
            let status = Status::of(standing, self.trouble(standing), figures.as_ref(), before.as_ref(), &now);
            let wanted = self.object(name, standing);
            let head = (!holds(&found["metadata"], &wanted["metadata"])).then_some(wanted);
            let unknown = standing.loading && standing.stable.is_none();
            if head.is_none() && before.is_some() && unknown && !standings.warm && began.elapsed() < LOAD {
                continue;
            }
            if head.is_some() || before.as_ref() != Some(&status) {
                // Several hosts may see a plugin otherwise, and each of them hears of what the others write.
                if head.is_none() && self.paced.get(name).is_some_and(|paced| !paced.may_say(&status)) {
                    continue;
                }
                if self.guarded(name, fence, self.apply(name, head, &status)).await? {
                    self.paced.entry(name.clone()).or_default().said(&status);
                    self.tell(name, standing, before.as_ref(), &status, fence);
                }
                continue;
            }
            let Some(figures) = figures.filter(|figures| !tells(&found["status"], figures)) else {
                self.rests.insert(name.clone(), Rest { standings: standings.clone(), basis });
                continue;
            };
            if self.paced.entry(name.clone()).or_default().figures() {
                self.guarded(name, fence, self.apply_figures(name, &figures)).await?;
            }
        }
        self.paced.retain(|name, _| standings.plugins.contains_key(name));
        self.rests.retain(|name, _| standings.plugins.contains_key(name));
        if standings.synced {
            for gone in self.store.all().iter().filter(|object| !standings.plugins.contains_key(&*object.key.name) && is_ours(object)) {
                self.guarded(&gone.key.name, fence, self.delete(gone)).await?;
            }
        }
        Ok(())
    }

    /// Runs a write under the fence. Whether it was done; a failure is logged.
    async fn guarded(&self, name: &str, fence: &Fence, write: impl Future<Output = kube::Result<()>>) -> Result<bool, Stopped> {
        match fence.guard(WRITE, write).await {
            Ok(Ok(())) => {
                debug!(plugin = name, "Plugin object written");
                return Ok(true);
            }
            Ok(Err(error)) => warn!(plugin = name, %error, "Plugin object not written"),
            Err(Stopped::Fenced) => return Err(Stopped::Fenced),
            Err(error) => warn!(plugin = name, %error, "Plugin object not written"),
        }
        Ok(false)
    }

    async fn apply(&self, name: &str, head: Option<Value>, status: &Status) -> kube::Result<()> {
        let (api, parameters) = (self.api(), PatchParams::apply(FIELD_MANAGER).force());
        if let Some(head) = head {
            api.patch(name, &parameters, &Patch::Apply(head)).await?;
        }
        let kind = plugin_kind();
        let body = json!({ "apiVersion": kind.api_version(), "kind": kind.kind, "metadata": { "name": name }, "status": status });
        let written = api.patch_status(name, &parameters, &Patch::Apply(body)).await?;
        self.note(&written);
        Ok(())
    }

    async fn apply_figures(&self, name: &str, figures: &Figures) -> kube::Result<()> {
        let kind = plugin_kind();
        let body = json!({
            "apiVersion": kind.api_version(), "kind": kind.kind, "metadata": { "name": name }, "status": { "hosts": [figures] },
        });
        let manager = format!("{FIELD_MANAGER}-host-{}", figures.name);
        let written = self.api().patch_status(name, &PatchParams::apply(&manager).force(), &Patch::Apply(body)).await?;
        self.note(&written);
        Ok(())
    }

    fn note(&self, written: &DynamicObject) {
        if let Some(object) = serde_json::to_string(written).ok().and_then(|text| Object::parse(&text).ok()) {
            self.written.note(object);
        }
    }

    /// What this host has to tell of a plugin.
    fn figures(&self, standing: &Standing) -> Option<Figures> {
        let kind = standing.kind.as_ref().filter(|_| standing.stable.is_some())?.group_kind();
        let figures = (self.reporter.live)(&kind).figures?;
        Some(Figures { name: self.reporter.lease.clone(), holder: self.reporter.identity.clone(), ..figures })
    }

    async fn delete(&self, object: &Object) -> kube::Result<()> {
        let preconditions = Preconditions { uid: Some(object.uid.to_string()), resource_version: None };
        let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        match self.api().delete(&object.key.name, &parameters).await {
            Err(kube::Error::Api(answer)) if matches!(answer.code, 404 | 409) => Ok(()),
            other => other.map(drop),
        }
    }

    /// The object without its status.
    fn object(&self, name: &str, standing: &Standing) -> Value {
        let kind = plugin_kind();
        let owners: Vec<Value> =
            standing.uid.iter().map(|uid| json!({ "apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": uid })).collect();
        json!({
            "apiVersion": kind.api_version(),
            "kind": kind.kind,
            "metadata": { "name": name, "namespace": self.reporter.namespace, "labels": { MANAGED_BY.0: MANAGED_BY.1 }, "ownerReferences": owners },
        })
    }

    /// An Event about the ConfigMap, or where there is none about the `Plugin` object, when a verdict is another one than before.
    fn tell(&self, name: &str, standing: &Standing, before: Option<&Status>, status: &Status, fence: &Fence) {
        let said =
            |status: &Status| status.ready().map(|ready| (ready.reason.clone(), ready.message.clone(), status.serving_digest.clone()));
        if status.is_loading() || before.and_then(said) == said(status) {
            return;
        }
        let Some(ready) = status.ready() else { return };
        let (kind, object) = match (standing.place, &standing.uid) {
            (Place::ConfigMap, Some(uid)) => (config_map_kind(), self.reference(name, uid, &standing.version)),
            _ => match self.present(name) {
                Some(object) => (plugin_kind(), Object::clone(&object)),
                None => return,
            },
        };
        let event =
            Event { warning: status.is_warning(), reason: ready.reason.clone(), action: "Load".into(), note: ready.message.clone() };
        self.reporter.recorder.publish(&kind, &object, &event, fence);
    }

    fn reference(&self, name: &str, uid: &str, version: &str) -> Object {
        let (key, json) = (self.key(name), "".into());
        Object { key, uid: uid.into(), generation: 0, resource_version: version.into(), deleting: false, rest: 0, json }
    }

    fn present(&self, name: &str) -> Option<Arc<Object>> {
        let key = self.key(name);
        self.written.latest(&key, self.store.get(&key))
    }

    fn key(&self, name: &str) -> ObjectKey {
        ObjectKey::new(Some(&self.reporter.namespace), name)
    }

    fn api(&self) -> Api<DynamicObject> {
        Api::namespaced_with(self.reporter.client.clone(), &self.reporter.namespace, &plugin_kind().api_resource())
    }
}

/// Whether a status has these very figures already.
fn tells(status: &Value, figures: &Figures) -> bool {
    let entries = status["hosts"].as_array().into_iter().flatten();
    entries.filter_map(|entry| Figures::deserialize(entry).ok()).any(|entry| entry == *figures)
}

fn config_map_kind() -> Kind {
    let text = str::to_owned;
    Kind { group: String::new(), version: text("v1"), kind: text("ConfigMap"), plural: text("configmaps"), namespaced: true }
}

fn is_ours(object: &Object) -> bool {
    !object.deleting && label(&object.value(), MANAGED_BY.0) == Some(MANAGED_BY.1)
}

/// Whether the metadata has the labels that are wanted, and exactly the owners.
fn holds(found: &Value, wanted: &Value) -> bool {
    let uids = |metadata: &Value| -> Vec<Value> {
        metadata["ownerReferences"].as_array().into_iter().flatten().map(|owner| owner["uid"].clone()).collect()
    };
    found["labels"][MANAGED_BY.0] == wanted["labels"][MANAGED_BY.0] && uids(found) == uids(wanted) && found["name"] == wanted["name"]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_head_is_written_when_the_label_or_the_owner_is_another() {
        let metadata =
            |label: &str, owner: &str| json!({ "name": "p", "labels": { MANAGED_BY.0: label }, "ownerReferences": [{ "uid": owner }] });
        let wanted = metadata("berth", "1");
        assert!(holds(&metadata("berth", "1"), &wanted));
        assert!(!holds(&metadata("berth", "2"), &wanted));
        assert!(!holds(&metadata("helm", "1"), &wanted));
        assert!(!holds(&Value::Null, &wanted));
        assert!(!holds(&json!({ "name": "p", "labels": { MANAGED_BY.0: "berth" } }), &wanted));
    }

    #[test]
    fn an_answer_to_a_write_counts_until_the_watch_is_past_it_or_the_object_is_gone() {
        let object = |uid: &str, version: u32| {
            let text = json!({ "metadata": { "name": "p", "uid": uid, "resourceVersion": version.to_string() } }).to_string();
            Object::parse(&text).expect("parses")
        };
        let written = Written::default();
        let key = ObjectKey::new(None, "p");
        let latest = |shown: Option<Object>| written.latest(&key, shown.map(Arc::new)).map(|object| object.resource_version.to_string());
        written.note(object("1", 5));
        assert_eq!(latest(None).as_deref(), Some("5"));
        assert_eq!(latest(Some(object("1", 4))).as_deref(), Some("5"));
        assert_eq!(latest(Some(object("1", 6))).as_deref(), Some("6"));
        written.forget(&object("another", 4));
        assert_eq!(latest(None).as_deref(), Some("5"));
        written.forget(&object("1", 7));
        assert_eq!(latest(None), None);
        written.note(object("2", 9));
        written.shown(&object("2", 8));
        assert_eq!(latest(None).as_deref(), Some("9"));
        written.shown(&object("2", 9));
        assert_eq!(latest(None), None);
    }

    #[test]
    fn the_definition_in_deploy_has_every_field_that_is_written() {
        let text = include_str!("../../deploy/crds/plugins.berth.acme.io.yaml");
        let definition: Value = serde_saphyr::from_str(text).expect("YAML");
        let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"];
        let text = || Some(String::new());
        let full = Status {
            kind: text(),
            digest: text(),
            serving_digest: text(),
            serving_version: text(),
            stable_version: text(),
            candidate_version: text(),
            candidate_digest: text(),
            contract: text(),
            sdk: text(),
            refused_digest: text(),
            refused_reason: text(),
            conditions: vec![Condition::default()],
            ..Status::default()
        };
        let figures = Figures { circuit: text(), last_failure: Some(LastFailure::default()), ..Figures::default() };
        let mut written = serde_json::to_value(full).expect("JSON");
        written["hosts"] = json!([figures]);
        let names = |value: &Value| value.as_object().expect("an object").keys().cloned().collect::<std::collections::BTreeSet<_>>();
        assert_eq!(names(&written), names(schema));
        let host = &schema["hosts"]["items"]["properties"];
        assert_eq!(names(&written["hosts"][0]), names(host));
        assert_eq!(names(&written["hosts"][0]["lastFailure"]), names(&host["lastFailure"]["properties"]));
        assert_eq!(names(&written["conditions"][0]), names(&schema["conditions"]["items"]["properties"]));
        assert_eq!(definition["spec"]["names"]["plural"].as_str(), Some(plugin_kind().plural.as_str()));
        let columns = definition["spec"]["versions"][0]["additionalPrinterColumns"].as_array().expect("columns");
        let names: Vec<_> = columns.iter().map(|column| column["name"].as_str().expect("a name").to_uppercase()).collect();
        assert_eq!(names, ["KIND", "DIGEST", "READY", "STABLE", "CANDIDATE", "REASON", "AGE"]);
    }
}
