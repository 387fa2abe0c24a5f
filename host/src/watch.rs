//! The informer: keeps a [`Store`] equal to one collection of the API server, and tells what changed.
//!
//! # Expected flow
//! List in pages, then watch from the list's version with bookmarks. A watch that ends is opened again where it left off; a version
//! that the server no longer knows (410, as HTTP status or inside the stream) leads to one new list.
//!
//! # Guarantees
//! - The store never goes back: an object is replaced only by a later version of it, whether it came from the watch, a list or the
//!   answer to one of our own writes ([`Store::observe`]).
//! - Whatever the server does, attempts are spaced by exponential backoff with jitter, also when it answers 200 and closes at once.
//! - A watch whose server falls silent ends by a deadline a little beyond the time that the server was asked to keep it open.
//!
//! # Caveats
//! Events may be missed and merged; only the state counts.

use std::{
    collections::{BTreeMap, HashSet},
    ops::Bound,
    sync::{Arc, RwLock},
    time::Duration,
};

use futures::TryStreamExt;
use kube::{
    Client,
    core::{
        WatchEvent,
        params::{ListParams, WatchParams},
        request::Request,
    },
};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::{sync::watch, time::Instant};

use crate::{
    memory,
    object::{Object, ObjectKey, newer},
};

/// Objects of a page of a list, where they are of the usual size: a page of large ones is a few megabytes.
pub const PAGE: u32 = 500;
/// What the server is given beyond the time that a watch may stay open, before the connection is taken for dead.
const SILENCE: Duration = Duration::from_secs(30);
/// Silence that is longer than any watch that works: servers send bookmarks about once a minute, and end a watch in time.
const HUSH: Duration = Duration::from_secs(400);
/// An ordinary request of the informer (a page of a list, or the answer that starts a watch).
const REQUEST: Duration = Duration::from_secs(60);
/// A watch that ends earlier than this counts as a failure, so that a server that closes at once is not hammered.
const SHORT: Duration = Duration::from_secs(5);
/// Also what servers that are too busy usually ask for.
const BACKOFF_BASE: Duration = Duration::from_secs(1);
/// Half a minute with its jitter: so long after its return, a server has been asked.
const BACKOFF_MAX: Duration = Duration::from_secs(25);
/// The same while credentials are refused: they are rotated without notice, and read again from their file at the next request.
const BACKOFF_MAX_UNAUTHORIZED: Duration = Duration::from_secs(8);
/// The longest that a server may ask to wait.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);
/// How often a collection that does not exist is asked for again.
const ABSENT: Duration = Duration::from_secs(10);

/// What to watch.
#[derive(Clone, Debug)]
pub struct Target {
    /// Path of the collection, such as `/apis/batch.acme.io/v1/reportjobs`.
    pub path: String,
    /// As in `kubectl -l`.
    pub label_selector: Option<String>,
    /// How long the server is asked to keep a watch open.
    pub watch_timeout: Duration,
    /// How many objects of a list are asked for at a time.
    pub page: u32,
}

/// A change of the store.
#[derive(Clone, Debug)]
pub enum Change {
    /// An object is new or later than before.
    Applied {
        /// What the store held before.
        old: Option<Arc<Object>>,
        /// What it holds now.
        new: Arc<Object>,
        /// Whether it came with a list rather than as a live event.
        listed: bool,
    },
    /// An object is gone.
    Deleted(Arc<Object>),
    /// A list is complete.
    Synced,
}

/// How the informer is doing.
#[derive(Clone, Debug, Default)]
pub struct Health {
    /// Whether a list has been completed and the collection still exists.
    pub synced: bool,
    /// When the server last sent something for this collection.
    pub last_contact: Option<Instant>,
    /// What went wrong since, in a sentence.
    pub error: Option<String>,
}

impl Health {
    /// What is wrong, in a sentence; none while the watch works.
    pub fn trouble(&self) -> Option<String> {
        match self {
            Self { error: Some(error), .. } => Some(error.clone()),
            Self { synced: false, .. } => Some("not listed yet".into()),
            Self { last_contact: Some(at), .. } if at.elapsed() > HUSH => Some(format!("nothing heard for {} s", at.elapsed().as_secs())),
            _ => None,
        }
    }
}

/// The cache of one collection. Readers get the objects as shared text.
#[derive(Debug, Default)]
pub struct Store {
    /// In the order in which they are listed.
    objects: RwLock<BTreeMap<ObjectKey, Arc<Object>>>,
    health: watch::Sender<Health>,
    forgets_text: bool,
}

impl Store {
    /// A store for objects that are read once, as they come: changes have their text, what is kept has not. A component in a ConfigMap
    /// would otherwise be held as base64 for as long as the host runs.
    pub fn without_text() -> Self {
        Self { forgets_text: true, ..Self::default() }
    }

    /// The object, if there is one.
    pub fn get(&self, key: &ObjectKey) -> Option<Arc<Object>> {
        self.read().get(key).cloned()
    }

    /// At most so many objects after this one in the order of namespace and name: of one namespace, or with none of all.
    pub fn after(&self, last: Option<&ObjectKey>, namespace: Option<&str>, limit: usize) -> Vec<Arc<Object>> {
        let first = namespace.map(|namespace| ObjectKey::new(Some(namespace), ""));
        let from = match (last, &first) {
            (Some(last), Some(first)) if last < first => Bound::Included(first),
            (Some(last), _) => Bound::Excluded(last),
            (None, Some(first)) => Bound::Included(first),
            (None, None) => Bound::Unbounded,
        };
        let objects = self.read();
        let within = |key: &ObjectKey| namespace.is_none() || key.namespace.as_deref() == namespace;
        objects.range((from, Bound::Unbounded)).take_while(|(key, _)| within(key)).take(limit).map(|(_, object)| object.clone()).collect()
    }

    /// All objects.
    pub fn all(&self) -> Vec<Arc<Object>> {
        self.read().values().cloned().collect()
    }

    /// How many objects there are.
    pub fn len(&self) -> usize {
        self.read().len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How the informer is doing.
    pub fn health(&self) -> Health {
        self.health.borrow().clone()
    }

    /// Waits until a list has been completed, or it is known why there is none.
    pub async fn listed(&self) {
        let listed = |health: &Health| health.synced || health.error.is_some();
        self.health.subscribe().wait_for(listed).await.map(drop).expect("the sender is here");
    }

    /// Takes in a state that was seen otherwise than by the watch, such as the answer to a write. Returns what is now the latest.
    pub fn observe(&self, object: Arc<Object>) -> Arc<Object> {
        let mut objects = self.objects.write().expect("no panic while the lock is held");
        match objects.get(&object.key) {
            Some(held) if !object.newer_than(held) => held.clone(),
            // Not there: it was deleted meanwhile, or it belongs to a collection that is no longer watched. Only the watch adds.
            None => object,
            Some(_) => {
                objects.insert(object.key.clone(), object.clone());
                object
            }
        }
    }

    /// Drops an object that a request of ours found to be gone. The watch would tell too, but later.
    pub fn forget(&self, key: &ObjectKey, uid: &str) {
        let mut objects = self.objects.write().expect("no panic while the lock is held");
        if objects.get(key).is_some_and(|held| &*held.uid == uid) {
            objects.remove(key);
        }
    }

    /// For tests: takes in an object as the watch would.
    #[cfg(test)]
    pub(crate) fn insert(&self, object: Object) -> Option<Change> {
        self.apply(object, false)
    }

    /// For tests: as if a list were complete.
    #[cfg(test)]
    pub(crate) fn set_synced(&self) {
        self.note(|health| health.synced = true);
    }

    /// For tests: as after a list of these.
    #[cfg(test)]
    pub(crate) fn listed_with(objects: impl IntoIterator<Item = Object>) -> Self {
        let store = Self::default();
        for object in objects {
            store.apply(object, true);
        }
        store.note(|health| health.synced = true);
        store
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, BTreeMap<ObjectKey, Arc<Object>>> {
        self.objects.read().expect("no panic while the lock is held")
    }

    fn apply(&self, object: Object, listed: bool) -> Option<Change> {
        let new = Arc::new(object);
        let mut objects = self.objects.write().expect("no panic while the lock is held");
        let old = objects.get(&new.key).cloned();
        if old.as_ref().is_some_and(|old| old.resource_version != new.resource_version && !new.newer_than(old)) {
            return None;
        }
        let kept = if self.forgets_text { Arc::new(Object { json: "".into(), ..Object::clone(&new) }) } else { new.clone() };
        objects.insert(new.key.clone(), kept);
        Some(Change::Applied { old, new, listed })
    }

    /// A deletion carries the version at which it happened; a later re-creation of the same name stays.
    fn delete(&self, gone: &Object) -> Option<Change> {
        let mut objects = self.objects.write().expect("no panic while the lock is held");
        let held = objects.get(&gone.key)?;
        if held.uid != gone.uid && held.newer_than(gone) {
            return None;
        }
        objects.remove(&gone.key).map(Change::Deleted)
    }

    /// Drops what a complete list as of `version` did not hold.
    fn retain(&self, listed: &HashSet<ObjectKey>, version: &str) -> Vec<Change> {
        let mut objects = self.objects.write().expect("no panic while the lock is held");
        let gone: Vec<_> =
            objects.values().filter(|object| !listed.contains(&object.key) && !newer(&object.resource_version, version)).cloned().collect();
        for object in &gone {
            objects.remove(&object.key);
        }
        gone.into_iter().map(Change::Deleted).collect()
    }

    fn clear(&self) -> Vec<Change> {
        let gone = std::mem::take(&mut *self.objects.write().expect("no panic while the lock is held"));
        gone.into_values().map(Change::Deleted).collect()
    }

    fn note(&self, change: impl FnOnce(&mut Health)) {
        self.health.send_modify(change);
    }

    fn contact(&self) {
        self.note(|health| {
            health.last_contact = Some(Instant::now());
            health.error = None;
        });
    }
}

/// Why a list or watch ended.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("the server no longer knows version {0}")]
    Expired(String),
    #[error("the server does not know {0}")]
    Absent(String),
    #[error("the server closed the watch after {0:?}")]
    Short(Duration),
    #[error("no answer within {0:?}")]
    Silent(Duration),
    #[error("{verb} {path}: {source}")]
    Request { verb: &'static str, path: String, source: Box<kube::Error> },
    #[error("unreadable answer to {verb} {path}: {source}")]
    Malformed { verb: &'static str, path: String, source: serde_json::Error },
}

#[derive(Deserialize)]
struct RawList<'a> {
    metadata: RawListMeta,
    #[serde(borrow, default)]
    items: Option<Vec<&'a RawValue>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawListMeta {
    #[serde(default)]
    resource_version: String,
    #[serde(default, rename = "continue")]
    next: Option<String>,
}

/// Keeps `store` equal to the collection until it is dropped, calling `on` for each change.
pub async fn run(client: Client, target: Target, store: Arc<Store>, mut on: impl FnMut(Change) + Send) -> std::convert::Infallible {
    let informer = Informer { client, target, store };
    let mut version: Option<String> = None;
    let mut failures = 0_u32;
    // What was last warned of.
    let mut warned = None;
    loop {
        let started = Instant::now();
        let ended = match version.take() {
            None => match informer.list(&mut on).await {
                Ok(listed) => {
                    version = Some(listed);
                    continue;
                }
                Err(ended) => ended,
            },
            Some(mut at) => {
                let ended = informer.watch(&mut at, &mut on).await;
                version = Some(at);
                match ended {
                    Ok(()) if started.elapsed() >= SHORT => {
                        (failures, warned) = (0, None);
                        continue;
                    }
                    Ok(()) => Ended::Short(started.elapsed()),
                    Err(ended) => ended,
                }
            }
        };
        if started.elapsed() >= SHORT {
            (failures, warned) = (0, None);
        }
        failures += 1;
        report(&informer.target.path, &ended, failures, &mut warned);
        let delay = informer.ended(ended, failures, &mut version, &mut on);
        tokio::time::sleep(delay).await;
    }
}

struct Informer {
    client: Client,
    target: Target,
    store: Arc<Store>,
}

impl Informer {
    /// Decides what follows an end: from which version to go on, and after which delay.
    fn ended(&self, ended: Ended, failures: u32, version: &mut Option<String>, on: &mut impl FnMut(Change)) -> Duration {
        let path = &self.target.path;
        let delay = match &ended {
            Ended::Expired(_) => {
                *version = None;
                // The first new list follows at once; a server that keeps saying 410 gets the backoff.
                if failures <= 1 { Duration::ZERO } else { backoff(failures) }
            }
            Ended::Absent(_) => {
                *version = None;
                let gone = self.store.clear();
                self.store.note(|health| health.synced = false);
                if !gone.is_empty() || failures == 1 {
                    tracing::warn!(path, dropped = gone.len(), "the API server does not serve this resource; waiting for it");
                }
                gone.into_iter().for_each(on);
                ABSENT
            }
            Ended::Request { source, .. } if is_unauthorized(source) => backoff(failures).min(jittered(BACKOFF_MAX_UNAUTHORIZED)),
            Ended::Short(_) | Ended::Silent(_) | Ended::Request { .. } | Ended::Malformed { .. } => backoff(failures),
        };
        self.store.note(|health| health.error = Some(ended.to_string()));
        delay.max(asked_to_wait(&ended))
    }

    async fn list(&self, on: &mut impl FnMut(Change)) -> Result<String, Ended> {
        let mut listed = HashSet::new();
        let mut params =
            ListParams { limit: Some(self.target.page), label_selector: self.target.label_selector.clone(), ..ListParams::default() };
        let version = loop {
            let request =
                Request::new(&self.target.path).list(&params).map_err(|error| self.failed("list", kube::Error::BuildRequest(error)))?;
            let text = tokio::time::timeout(REQUEST, self.client.request_text(request))
                .await
                .map_err(|_| Ended::Silent(REQUEST))?
                .map_err(|error| self.failed("list", error))?;
            let malformed = |source| Ended::Malformed { verb: "list", path: self.target.path.clone(), source };
            let page: RawList = serde_json::from_str(&text).map_err(malformed)?;
            for item in page.items.into_iter().flatten() {
                let Some(object) = self.parse(item.get()) else { continue };
                listed.insert(object.key.clone());
                self.store.apply(object, true).into_iter().for_each(&mut *on);
            }
            self.store.contact();
            match page.metadata.next.filter(|next| !next.is_empty()) {
                Some(next) => params.continue_token = Some(next),
                None => break page.metadata.resource_version,
            }
        };
        self.store.retain(&listed, &version).into_iter().for_each(&mut *on);
        self.store.note(|health| health.synced = true);
        memory::burst();
        on(Change::Synced);
        Ok(version)
    }

    /// Watches from `at`, moving it along, until the server ends the watch.
    async fn watch(&self, at: &mut String, on: &mut impl FnMut(Change)) -> Result<(), Ended> {
        let timeout = jittered(self.target.watch_timeout);
        let params = WatchParams {
            label_selector: self.target.label_selector.clone(),
            timeout: Some(u32::try_from(timeout.as_secs().clamp(1, 290)).expect("at most 290")),
            bookmarks: true,
            ..WatchParams::default()
        };
        let deadline = Instant::now() + timeout + SILENCE;
        let request =
            Request::new(&self.target.path).watch(&params, at).map_err(|error| self.failed("watch", kube::Error::BuildRequest(error)))?;
        let events = tokio::time::timeout(REQUEST, self.client.request_events::<Box<RawValue>>(request))
            .await
            .map_err(|_| Ended::Silent(REQUEST))?
            .map_err(|error| self.failed("watch", error))?;
        let mut events = std::pin::pin!(events);
        self.store.contact();
        loop {
            let event = tokio::time::timeout_at(deadline, events.try_next()).await.map_err(|_| Ended::Silent(timeout + SILENCE))?;
            let Some(event) = event.map_err(|error| self.failed("watch", error))? else { return Ok(()) };
            self.store.contact();
            match event {
                WatchEvent::Added(raw) | WatchEvent::Modified(raw) => {
                    let Some(object) = self.parse(raw.get()) else { continue };
                    object.resource_version.as_ref().clone_into(at);
                    self.store.apply(object, false).into_iter().for_each(&mut *on);
                }
                WatchEvent::Deleted(raw) => {
                    let Some(object) = self.parse(raw.get()) else { continue };
                    object.resource_version.as_ref().clone_into(at);
                    self.store.delete(&object).into_iter().for_each(&mut *on);
                }
                WatchEvent::Bookmark(bookmark) => *at = bookmark.metadata.resource_version,
                WatchEvent::Error(status) => return Err(self.failed("watch", kube::Error::Api(status))),
            }
        }
    }

    /// An object that cannot be read is left out, and nothing else.
    fn parse(&self, text: &str) -> Option<Object> {
        Object::parse(text).inspect_err(|error| tracing::warn!(path = self.target.path, %error, "left out an object")).ok()
    }

    fn failed(&self, verb: &'static str, error: kube::Error) -> Ended {
        match &error {
            kube::Error::Api(status) if status.code == 410 || status.reason == "Expired" => Ended::Expired(status.message.clone()),
            kube::Error::Api(status) if status.code == 404 => Ended::Absent(self.target.path.clone()),
            _ => Ended::Request { verb, path: self.target.path.clone(), source: Box::new(error) },
        }
    }
}

/// One warning of each cause in a row of failures; a watch that ended early is a cause that may be told by the next failure.
fn report(path: &str, ended: &Ended, failures: u32, warned: &mut Option<String>) {
    let cause = ended.to_string();
    match ended {
        Ended::Absent(_) => {}
        Ended::Short(_) => tracing::debug!(path, failures, cause, "watch ended early"),
        _ if warned.as_ref() == Some(&cause) => tracing::debug!(path, failures, cause, "watch still interrupted"),
        _ => {
            tracing::warn!(path, cause, "watch interrupted");
            *warned = Some(cause);
        }
    }
}

/// How long the server asks to wait, within reason.
fn asked_to_wait(ended: &Ended) -> Duration {
    let Ended::Request { source, .. } = ended else { return Duration::ZERO };
    let kube::Error::Api(status) = &**source else { return Duration::ZERO };
    let seconds = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
    Duration::from_secs(seconds.into()).min(RETRY_AFTER_MAX)
}

fn is_unauthorized(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 401)
}

/// Exponential with up to 20 % added, so that replicas that lost the same server do not come back in step.
fn backoff(failures: u32) -> Duration {
    jittered(BACKOFF_BASE.saturating_mul(2_u32.saturating_pow(failures.saturating_sub(1).min(10))).min(BACKOFF_MAX))
}

fn jittered(duration: Duration) -> Duration {
    duration.mul_f64(1.0 + rand::random::<f64>() * 0.2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(name: &str, uid: &str, version: u32) -> Object {
        Object::parse(&format!(r#"{{"metadata":{{"name":"{name}","uid":"{uid}","resourceVersion":"{version}"}}}}"#)).expect("parses")
    }

    #[test]
    fn the_store_never_goes_back_to_an_older_version() {
        let store = Store::default();
        assert!(matches!(store.apply(object("a", "1", 5), true), Some(Change::Applied { old: None, .. })));
        assert_eq!(&*store.observe(object("a", "1", 9).into()).resource_version, "9");
        assert!(store.apply(object("a", "1", 7), false).is_none(), "an event older than the answer to our write");
        assert_eq!(&*store.observe(object("a", "1", 8).into()).resource_version, "9");
        assert!(store.apply(object("a", "1", 10), false).is_some());
    }

    #[test]
    fn a_store_without_text_tells_the_text_and_keeps_the_rest() {
        let store = Store::without_text();
        let text = object("a", "1", 5).json;
        assert!(matches!(store.apply(object("a", "1", 5), true), Some(Change::Applied { new, .. }) if new.json == text));
        assert!(matches!(&store.all()[..], [kept] if kept.json.is_empty() && &*kept.uid == "1"));
        assert!(store.apply(object("a", "1", 4), false).is_none());
        assert!(matches!(store.delete(&object("a", "1", 6)), Some(Change::Deleted(_))));
    }

    #[test]
    fn a_deletion_takes_the_object_but_not_its_successor() {
        let store = Store::default();
        store.apply(object("a", "1", 5), false);
        store.apply(object("a", "2", 8), false);
        assert!(store.delete(&object("a", "1", 7)).is_none());
        assert!(matches!(store.delete(&object("a", "2", 9)), Some(Change::Deleted(_))));
        assert_eq!(&*store.observe(object("a", "2", 8).into()).resource_version, "8");
        assert!(store.is_empty(), "an answer to a write does not bring a deleted object back");
    }

    #[test]
    fn a_list_drops_what_it_does_not_hold_unless_that_is_later_than_the_list() {
        let store = Store::default();
        store.apply(object("old", "1", 5), true);
        store.apply(object("new", "2", 12), true);
        let gone = store.retain(&HashSet::new(), "10");
        assert!(matches!(&gone[..], [Change::Deleted(gone)] if &*gone.key.name == "old"));
        assert_eq!(store.len(), 1);
    }

    #[test]
    fn objects_come_in_the_order_of_namespace_and_name_from_any_place() {
        let store = Store::default();
        for (namespace, name) in [("b", "x"), ("a", "y"), ("a", "x"), ("b", "y"), ("c", "x")] {
            let text = format!(r#"{{"metadata":{{"namespace":"{namespace}","name":"{name}"}}}}"#);
            store.apply(Object::parse(&text).expect("parses"), true);
        }
        let after = |last: Option<(&str, &str)>, namespace, limit| {
            let last = last.map(|(namespace, name)| ObjectKey::new(Some(namespace), name));
            store.after(last.as_ref(), namespace, limit).iter().map(|object| object.key.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(after(None, None, 3), ["a/x", "a/y", "b/x"]);
        assert_eq!(after(Some(("b", "x")), None, 3), ["b/y", "c/x"]);
        assert_eq!(after(Some(("a", "z")), None, 1), ["b/x"], "the place need not be an object any more");
        assert_eq!(after(None, Some("b"), 9), ["b/x", "b/y"]);
        assert_eq!(after(Some(("a", "x")), Some("b"), 9), ["b/x", "b/y"]);
        assert!(after(Some(("c", "x")), Some("b"), 9).is_empty() && after(None, Some("d"), 9).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn waiting_for_a_list_ends_with_it_or_with_the_cause_that_there_is_none() {
        for cause in [None, Some("403".to_owned())] {
            let store = Arc::new(Store::default());
            let waiting = tokio::spawn({
                let store = store.clone();
                async move { store.listed().await }
            });
            tokio::task::yield_now().await;
            store.contact();
            tokio::task::yield_now().await;
            assert!(!waiting.is_finished());
            store.note(|health| (health.synced, health.error) = (cause.is_none(), cause));
            assert!(tokio::time::timeout(Duration::from_secs(1), waiting).await.is_ok());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_is_well_while_it_is_synced_and_heard_of() {
        assert!(Health::default().trouble().is_some());
        let health = Health { synced: true, last_contact: Some(Instant::now()), error: None };
        assert_eq!(health.trouble(), None);
        assert!(Health { error: Some("unauthorized".into()), ..health.clone() }.trouble().is_some());
        tokio::time::advance(HUSH + Duration::from_secs(1)).await;
        assert!(health.trouble().is_some_and(|sentence| sentence.contains("nothing heard")));
    }

    #[test]
    fn each_cause_of_an_interruption_is_warned_of_once_whatever_came_before_it() {
        let mut warned = None;
        let failed = |code: u16| {
            let status = kube::core::Status::failure("no", "Forbidden").with_code(code);
            Ended::Request { verb: "watch", path: "/p".into(), source: Box::new(kube::Error::Api(Box::new(status))) }
        };
        report("/p", &Ended::Short(Duration::ZERO), 1, &mut warned);
        assert_eq!(warned, None);
        report("/p", &Ended::Silent(SILENCE), 2, &mut warned);
        let silent = warned.clone();
        report("/p", &failed(403), 3, &mut warned);
        assert!(silent.is_some() && warned != silent && warned.is_some());
    }

    #[test]
    fn a_server_that_says_how_long_to_wait_is_waited_for() {
        let busy = |seconds: u32| {
            let details = serde_json::from_value(serde_json::json!({"retryAfterSeconds": seconds})).expect("details");
            let status =
                kube::core::Status { details: Some(details), ..kube::core::Status::failure("busy", "TooManyRequests").with_code(429) };
            asked_to_wait(&Ended::Request { verb: "watch", path: "/p".into(), source: Box::new(kube::Error::Api(Box::new(status))) })
        };
        assert_eq!((busy(0), busy(7), busy(u32::MAX)), (Duration::ZERO, Duration::from_secs(7), RETRY_AFTER_MAX));
        assert_eq!(asked_to_wait(&Ended::Short(Duration::ZERO)), Duration::ZERO);
    }

    #[test]
    fn backoff_grows_to_its_cap_with_jitter() {
        assert!(backoff(1) >= BACKOFF_BASE && backoff(1) <= BACKOFF_BASE.mul_f64(1.2));
        assert!(backoff(40) >= BACKOFF_MAX && backoff(40) <= BACKOFF_MAX.mul_f64(1.2));
    }
}
