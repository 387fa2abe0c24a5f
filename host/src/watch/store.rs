//! What an informer knows: the objects of one collection, and how it is doing.

use std::{
    collections::{BTreeMap, HashSet},
    ops::Bound,
    sync::{
        Arc, OnceLock, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use tokio::{sync::watch, time::Instant};

use super::Change;
use crate::object::{Model, Object, ObjectKey, newer};

/// Silence that is longer than any watch that works: servers send bookmarks about once a minute, and end a watch in time.
const HUSH: Duration = Duration::from_secs(400);

/// How much text is packed before others get a turn: less than a millisecond.
const IN_A_ROW: usize = 256 << 10;

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

/// The cache of one collection.
#[derive(Debug, Default)]
pub struct Store {
    /// In the order in which they are listed.
    objects: RwLock<BTreeMap<ObjectKey, Kept>>,
    health: watch::Sender<Health>,
    texts: Texts,
    model: OnceLock<Model>,
    round: AtomicU32,
}

#[derive(Debug)]
struct Kept {
    object: Arc<Object>,
    /// Which round it was when it came.
    since: u32,
}

/// What becomes of the texts of objects that are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Texts {
    #[default]
    Whole,
    /// While the objects rest.
    Packed,
    Forgotten,
}

impl Store {
    /// A store for objects that are read once, as they come: changes have their text, what is kept has not. A component in a ConfigMap
    /// would otherwise be held as base64 for as long as the host runs.
    pub fn without_text() -> Self {
        Self { texts: Texts::Forgotten, ..Self::default() }
    }

    /// A store for many objects few of which change. Their texts are packed as they are listed, and later once nothing has happened to
    /// an object from one bookmark to the next.
    pub fn packing() -> Self {
        Self { texts: Texts::Packed, ..Self::default() }
    }

    /// The object, if there is one.
    pub fn get(&self, key: &ObjectKey) -> Option<Arc<Object>> {
        self.read().get(key).map(|kept| kept.object.clone())
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
        objects
            .range((from, Bound::Unbounded))
            .take_while(|(key, _)| within(key))
            .take(limit)
            .map(|(_, kept)| kept.object.clone())
            .collect()
    }

    /// All objects.
    pub fn all(&self) -> Vec<Arc<Object>> {
        self.read().values().map(|kept| kept.object.clone()).collect()
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
        let kept = self.keep(&object, false);
        match self.write().get_mut(&object.key) {
            Some(held) if !object.newer_than(&held.object) => held.object.clone(),
            // Not there: it was deleted meanwhile, or it belongs to a collection that is no longer watched. Only the watch adds.
            None => object,
            Some(held) => {
                *held = kept;
                object
            }
        }
    }

    /// Drops an object that a request of ours found to be gone. The watch would tell too, but later.
    pub fn forget(&self, key: &ObjectKey, uid: &str) {
        let mut objects = self.write();
        if objects.get(key).is_some_and(|held| &*held.object.uid == uid) {
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

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<ObjectKey, Kept>> {
        self.objects.read().expect("no panic while the lock is held")
    }

    fn write(&self) -> RwLockWriteGuard<'_, BTreeMap<ObjectKey, Kept>> {
        self.objects.write().expect("no panic while the lock is held")
    }

    /// How an object is kept.
    fn keep(&self, object: &Arc<Object>, listed: bool) -> Kept {
        let since = self.round.load(Ordering::Relaxed);
        let object = match self.texts {
            Texts::Forgotten => Arc::new(Object { json: "".into(), ..Object::clone(object) }),
            Texts::Packed if listed => self.pack(object),
            Texts::Packed | Texts::Whole => object.clone(),
        };
        Kept { object, since }
    }

    fn pack(&self, object: &Object) -> Arc<Object> {
        Arc::new(object.packed(self.model.get_or_init(|| Model::of(&object.json))))
    }

    /// Packs what has not changed since this was called last. Returns how many objects that are.
    pub(super) async fn pack_resting(&self) -> usize {
        if self.texts != Texts::Packed {
            return 0;
        }
        let round = self.round.fetch_add(1, Ordering::Relaxed);
        let rests = |kept: &&Kept| kept.since < round && !kept.object.json.is_packed();
        let resting: Vec<Arc<Object>> = self.read().values().filter(rests).map(|kept| kept.object.clone()).collect();
        let (count, mut bytes) = (resting.len(), 0);
        for object in resting {
            bytes += object.json.len();
            if bytes > IN_A_ROW {
                tokio::task::yield_now().await;
                bytes = 0;
            }
            let packed = self.pack(&object);
            if let Some(kept) = self.write().get_mut(&object.key)
                && Arc::ptr_eq(&kept.object, &object)
            {
                kept.object = packed;
            }
        }
        count
    }

    /// Lets an object have in common what it can with one that is held: itself before, or its neighbour, which most likely is in the same
    /// namespace.
    pub(super) fn share(&self, object: &mut Object) {
        if let Some((_, near)) = self.read().range(..=&object.key).next_back() {
            object.share(&near.object);
        }
    }

    pub(super) fn apply(&self, object: Object, listed: bool) -> Option<Change> {
        let new = Arc::new(object);
        // Another list tells of most objects what is known.
        let known = if listed { self.get(&new.key) } else { None };
        let kept = match known.filter(|known| known.resource_version == new.resource_version) {
            Some(object) => Kept { object, since: 0 },
            None => self.keep(&new, listed),
        };
        let mut objects = self.write();
        let old = objects.get(&new.key).map(|held| held.object.clone());
        if old.as_ref().is_some_and(|old| old.resource_version != new.resource_version && !new.newer_than(old)) {
            return None;
        }
        objects.insert(new.key.clone(), kept);
        Some(Change::Applied { old, new, listed })
    }

    /// A deletion carries the version at which it happened; a later re-creation of the same name stays.
    pub(super) fn delete(&self, gone: &Object) -> Option<Change> {
        let mut objects = self.write();
        let held = &objects.get(&gone.key)?.object;
        if held.uid != gone.uid && held.newer_than(gone) {
            return None;
        }
        objects.remove(&gone.key).map(|kept| Change::Deleted(kept.object))
    }

    /// Drops what a complete list as of `version` did not hold.
    pub(super) fn retain(&self, listed: &HashSet<ObjectKey>, version: &str) -> Vec<Change> {
        let is_gone = |key: &ObjectKey, kept: &mut Kept| !listed.contains(key) && !newer(&kept.object.resource_version, version);
        self.write().extract_if(.., is_gone).map(|(_, kept)| Change::Deleted(kept.object)).collect()
    }

    pub(super) fn clear(&self) -> Vec<Change> {
        let gone = std::mem::take(&mut *self.write());
        gone.into_values().map(|kept| Change::Deleted(kept.object)).collect()
    }

    pub(super) fn note(&self, change: impl FnOnce(&mut Health)) {
        self.health.send_modify(change);
    }

    pub(super) fn contact(&self) {
        self.note(|health| {
            health.last_contact = Some(Instant::now());
            health.error = None;
        });
    }
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
        assert!(matches!(store.apply(object("a", "1", 5), true), Some(Change::Applied { new, .. }) if new.json.read() == text.read()));
        assert!(matches!(&store.all()[..], [kept] if kept.json.is_empty() && &*kept.uid == "1"));
        assert!(store.apply(object("a", "1", 4), false).is_none());
        assert!(matches!(store.delete(&object("a", "1", 6)), Some(Change::Deleted(_))));
    }

    #[tokio::test]
    async fn a_store_that_packs_tells_of_objects_as_they_are_and_packs_those_that_rest() {
        let store = Store::packing();
        let packed = || store.read().values().map(|kept| kept.object.json.is_packed()).collect::<Vec<_>>();
        let text = |object: &Object| object.json.read().into_owned();
        let like = |name: &str, version| text(&object(name, "1", version));
        let told = |change: Option<Change>| match change {
            Some(Change::Applied { old, new, .. }) => (old.map(|old| text(&old)), text(&new)),
            other => panic!("{other:?}"),
        };
        assert_eq!(told(store.apply(object("a", "1", 5), true)), (None, like("a", 5)));
        assert_eq!(told(store.apply(object("b", "1", 6), true)), (None, like("b", 6)));
        assert_eq!(packed(), [true, true]);
        let held = store.get(&ObjectKey::new(None, "b")).expect("it is there");
        assert_eq!(told(store.apply(object("b", "1", 6), true)), (Some(like("b", 6)), like("b", 6)));
        assert!(store.get(&held.key).is_some_and(|known| Arc::ptr_eq(&known, &held)), "another list does not pack it again");
        assert_eq!(store.all().iter().map(|object| text(object)).collect::<Vec<_>>(), [like("a", 5), like("b", 6)]);
        assert_eq!(told(store.apply(object("a", "1", 7), false)), (Some(like("a", 5)), like("a", 7)));
        assert!(store.apply(object("b", "1", 5), false).is_none(), "older than what is packed");
        assert_eq!(packed(), [false, true]);
        assert_eq!(store.pack_resting().await, 0, "it has changed since");
        assert_eq!(text(&store.observe(object("b", "1", 8).into())), like("b", 8));
        assert_eq!(store.pack_resting().await, 1);
        assert_eq!(packed(), [true, false]);
        let a = store.get(&ObjectKey::new(None, "a")).expect("it is there");
        assert_eq!((text(&a), text(&a.clone().whole()), a.whole().json.is_packed()), (like("a", 7), like("a", 7), false));
        assert!(matches!(store.delete(&object("a", "1", 9)), Some(Change::Deleted(gone)) if text(&gone) == like("a", 7)));
        assert_eq!(store.pack_resting().await, 1);
        assert!(matches!(&store.retain(&HashSet::new(), "9")[..], [Change::Deleted(gone)] if text(gone) == like("b", 8)));
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
}
