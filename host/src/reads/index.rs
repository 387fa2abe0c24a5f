//! Who is to run again when something changes: what the last run of each object has read.
//!
//! # Guarantees
//! - What is noted before the store is read cannot be missed: a change that the read did not see comes after the note.
//! - What a run has noted stays until the next run of the object begins, or the object goes.
//! - An object does not wait for itself: its own changes are judged elsewhere.
//!
//! # Caveats
//! A run is remembered with a bounded number of reads. Beyond it, what is remembered of the kind is all of it, so that too much wakes
//! rather than too little.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard},
};

use crate::{
    label::Selector,
    object::{GroupKind, Key, Object, ObjectKey},
};

/// Reads of one run that are told apart. A scope takes some 300 bytes, so ten thousand objects that read so many take 200 MB.
const SCOPES: usize = 64;

/// What of a kind a run has read: one object, or those that a list would show.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Scope {
    /// None for every namespace, and for a kind without.
    pub namespace: Option<Arc<str>>,
    /// None for all objects.
    pub name: Option<Arc<str>>,
    /// What the claim and the query select.
    pub selector: Selector,
}

/// See the module. Cheap to clone; all clones share it.
#[derive(Clone, Debug, Default)]
pub struct Index {
    inner: Arc<Mutex<Inner>>,
}

/// Notes the reads of one run.
#[derive(Clone, Debug)]
pub struct Footprint {
    index: Index,
    key: Key,
    run: u64,
}

#[derive(Debug, Default)]
struct Inner {
    last_run: u64,
    waiting: HashMap<Key, Waiting>,
    kinds: HashMap<GroupKind, Readers>,
}

#[derive(Debug)]
struct Waiting {
    run: u64,
    scopes: BTreeSet<(GroupKind, Scope)>,
}

/// Who waits for objects of a kind.
#[derive(Debug, Default)]
struct Readers {
    named: HashMap<ObjectKey, BTreeMap<Scope, HashSet<Key>>>,
    lists: BTreeMap<Scope, HashSet<Key>>,
}

impl Scope {
    /// The one object that it is about.
    fn object(&self) -> Option<ObjectKey> {
        Some(ObjectKey { namespace: self.namespace.clone(), name: self.name.clone()? })
    }

    fn reaches(&self, key: &ObjectKey) -> bool {
        self.namespace.is_none() || self.namespace == key.namespace
    }
}

impl Index {
    /// A run begins: what the object's last run has read is forgotten.
    pub fn begin(&self, key: &Key) -> Footprint {
        let mut inner = self.lock();
        inner.forget(key);
        inner.last_run += 1;
        let run = inner.last_run;
        inner.waiting.insert(key.clone(), Waiting { run, scopes: BTreeSet::new() });
        drop(inner);
        Footprint { index: self.clone(), key: key.clone(), run }
    }

    /// A run is over. Nothing is kept of one that has read nothing.
    pub fn ended(&self, key: &Key) {
        let mut inner = self.lock();
        if inner.waiting.get(key).is_some_and(|waiting| waiting.scopes.is_empty()) {
            inner.waiting.remove(key);
        }
    }

    /// The object is gone.
    pub fn forget(&self, key: &Key) {
        self.lock().forget(key);
    }

    /// No object of the kind is run any more.
    pub fn forget_kind(&self, kind: &GroupKind) {
        let mut inner = self.lock();
        let keys: Vec<Key> = inner.waiting.keys().filter(|key| key.kind == *kind).cloned().collect();
        for key in keys {
            inner.forget(&key);
        }
    }

    /// The objects that have read what changed here, be it that it came, went or is another one. A new version without another
    /// content is no change.
    pub fn affected(&self, kind: &GroupKind, before: Option<&Object>, now: Option<&Object>) -> Vec<Key> {
        let inner = self.lock();
        let (Some(readers), Some(changed)) = (inner.kinds.get(kind), before.or(now)) else { return Vec::new() };
        let named = readers.named.get(&changed.key).into_iter().flatten();
        let lists = readers.lists.iter().filter(|(scope, _)| scope.reaches(&changed.key));
        let mut candidates = named.chain(lists).peekable();
        let same = || before.zip(now).is_some_and(|(before, now)| before.same_content(now));
        if candidates.peek().is_none() || same() {
            return Vec::new();
        }
        let labels: Vec<_> = [before, now].into_iter().flatten().map(Object::labels).collect();
        let selected = |scope: &Scope| labels.iter().any(|labels| scope.selector.matches(labels));
        let keys: BTreeSet<&Key> = candidates.filter(|(scope, _)| selected(scope)).flat_map(|(_, keys)| keys).collect();
        let itself = |key: &Key| key.kind == *kind && key.object == changed.key;
        keys.into_iter().filter(|key| !itself(key)).cloned().collect()
    }

    /// The objects that have read something of a kind.
    pub fn readers(&self, kind: &GroupKind) -> Vec<Key> {
        let inner = self.lock();
        let of_kind = |waiting: &Waiting| waiting.scopes.iter().any(|(read, _)| read == kind);
        inner.waiting.iter().filter(|(_, waiting)| of_kind(waiting)).map(|(key, _)| key.clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no panic while the lock is held")
    }
}

impl Footprint {
    /// Takes note of a read that is about to happen.
    pub fn note(&self, kind: &GroupKind, scope: Scope) {
        let mut inner = self.index.lock();
        let Some(waiting) = inner.waiting.get_mut(&self.key).filter(|waiting| waiting.run == self.run) else { return };
        let whole = (kind.clone(), Scope::default());
        if waiting.scopes.contains(&whole) {
            return;
        }
        let noted = (kind.clone(), scope);
        if waiting.scopes.len() < SCOPES || waiting.scopes.contains(&noted) {
            if waiting.scopes.insert(noted.clone()) {
                inner.wait(&self.key, &noted);
            }
            return;
        }
        let narrower: Vec<_> = waiting.scopes.extract_if(.., |(other, _)| other == kind).collect();
        waiting.scopes.insert(whole.clone());
        for scope in &narrower {
            inner.stop_waiting(&self.key, scope);
        }
        inner.wait(&self.key, &whole);
    }
}

impl Inner {
    fn forget(&mut self, key: &Key) {
        let Some(waiting) = self.waiting.remove(key) else { return };
        for scope in &waiting.scopes {
            self.stop_waiting(key, scope);
        }
    }

    fn wait(&mut self, key: &Key, (kind, scope): &(GroupKind, Scope)) {
        let readers = self.kinds.entry(kind.clone()).or_default();
        let scopes = match scope.object() {
            Some(object) => readers.named.entry(object).or_default(),
            None => &mut readers.lists,
        };
        scopes.entry(scope.clone()).or_default().insert(key.clone());
    }

    fn stop_waiting(&mut self, key: &Key, (kind, scope): &(GroupKind, Scope)) {
        let Some(readers) = self.kinds.get_mut(kind) else { return };
        match scope.object() {
            Some(object) => {
                if let Some(scopes) = readers.named.get_mut(&object) {
                    take_out(scopes, scope, key);
                    if scopes.is_empty() {
                        readers.named.remove(&object);
                    }
                }
            }
            None => take_out(&mut readers.lists, scope, key),
        }
        if readers.named.is_empty() && readers.lists.is_empty() {
            self.kinds.remove(kind);
        }
    }
}

fn take_out(scopes: &mut BTreeMap<Scope, HashSet<Key>>, scope: &Scope, key: &Key) {
    if let Some(keys) = scopes.get_mut(scope) {
        keys.remove(key);
        if keys.is_empty() {
            scopes.remove(scope);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn kind(name: &str) -> GroupKind {
        GroupKind { group: "".into(), kind: name.into() }
    }

    fn key(name: &str) -> Key {
        Key { kind: kind("K"), object: ObjectKey::new(Some("n"), name) }
    }

    fn named(namespace: &str, name: &str) -> Scope {
        Scope { namespace: Some(namespace.into()), name: Some(name.into()), selector: Selector::default() }
    }

    fn list(namespace: Option<&str>, selector: &str) -> Scope {
        Scope { namespace: namespace.map(Arc::from), name: None, selector: selector.parse().expect("valid") }
    }

    fn object(namespace: &str, name: &str, version: u64, labels: Value, data: &str) -> Object {
        let metadata = json!({"namespace": namespace, "name": name, "resourceVersion": version.to_string(), "labels": labels});
        Object::parse(&json!({"metadata": metadata, "data": data}).to_string()).expect("parses")
    }

    #[test]
    fn a_change_an_arrival_and_a_departure_of_what_was_read_by_name_wake() {
        let index = Index::default();
        index.begin(&key("a")).note(&kind("C"), named("n", "c"));
        let (first, second) = (object("n", "c", 1, json!({}), "x"), object("n", "c", 2, json!({}), "y"));
        let affected = |before: Option<&Object>, now: Option<&Object>| index.affected(&kind("C"), before, now);
        assert_eq!(affected(None, Some(&first)), [key("a")]);
        assert_eq!(affected(Some(&first), Some(&second)), [key("a")]);
        assert_eq!(affected(Some(&second), None), [key("a")]);
        assert!(affected(Some(&first), Some(&object("n", "c", 3, json!({}), "x"))).is_empty(), "a bare new version");
        assert!(affected(None, Some(&object("m", "c", 1, json!({}), "x"))).is_empty(), "another namespace");
        assert!(index.affected(&kind("D"), None, Some(&first)).is_empty(), "another kind");
        assert_eq!((index.readers(&kind("C")), index.readers(&kind("D"))), (vec![key("a")], vec![]));
    }

    #[test]
    fn a_list_wakes_by_what_enters_changes_in_or_leaves_its_selection() {
        let index = Index::default();
        index.begin(&key("a")).note(&kind("C"), list(Some("n"), "app=x"));
        let (out, inside) = (object("n", "c", 1, json!({}), "x"), object("n", "c", 2, json!({"app": "x"}), "x"));
        let affected = |before: Option<&Object>, now: Option<&Object>| index.affected(&kind("C"), before, now);
        assert_eq!(affected(Some(&out), Some(&inside)), [key("a")]);
        assert_eq!(affected(Some(&inside), Some(&out)), [key("a")]);
        assert!(affected(None, Some(&out)).is_empty());
        assert!(affected(None, Some(&object("m", "c", 2, json!({"app": "x"}), "x"))).is_empty());
        index.begin(&key("b")).note(&kind("C"), list(None, ""));
        assert_eq!(affected(None, Some(&object("m", "c", 2, json!({}), "x"))), [key("b")]);
    }

    #[test]
    fn the_next_run_replaces_what_the_last_one_read_and_a_late_note_of_it_counts_no_more() {
        let index = Index::default();
        let first = index.begin(&key("a"));
        first.note(&kind("C"), named("n", "c"));
        let second = index.begin(&key("a"));
        second.note(&kind("C"), named("n", "d"));
        first.note(&kind("C"), named("n", "c"));
        assert!(index.affected(&kind("C"), None, Some(&object("n", "c", 1, json!({}), "x"))).is_empty());
        assert_eq!(index.affected(&kind("C"), None, Some(&object("n", "d", 1, json!({}), "x"))), [key("a")]);
    }

    #[test]
    fn nothing_is_kept_of_a_run_that_has_read_nothing() {
        let index = Index::default();
        let (nothing, something) = (index.begin(&key("a")), index.begin(&key("b")));
        something.note(&kind("C"), named("n", "c"));
        for name in ["a", "b"] {
            index.ended(&key(name));
        }
        nothing.note(&kind("C"), named("n", "c"));
        assert_eq!(index.lock().waiting.keys().collect::<Vec<_>>(), [&key("b")]);
    }

    #[test]
    fn nothing_is_left_of_an_object_or_a_kind_that_is_forgotten() {
        let index = Index::default();
        for name in ["a", "b"] {
            let footprint = index.begin(&key(name));
            footprint.note(&kind("C"), named("n", "c"));
            footprint.note(&kind("C"), list(None, "x"));
        }
        index.forget(&key("a"));
        assert_eq!(index.affected(&kind("C"), None, Some(&object("n", "c", 1, json!({}), "x"))), [key("b")]);
        index.forget_kind(&kind("K"));
        let inner = index.lock();
        assert!(inner.waiting.is_empty() && inner.kinds.is_empty(), "{inner:?}");
    }

    #[test]
    fn an_object_does_not_wake_itself_by_reading_its_own_kind() {
        let index = Index::default();
        for name in ["a", "b"] {
            index.begin(&key(name)).note(&kind("K"), list(Some("n"), ""));
        }
        assert_eq!(index.affected(&kind("K"), None, Some(&object("n", "a", 1, json!({}), "x"))), [key("b")]);
    }

    #[test]
    fn too_many_reads_of_a_run_are_remembered_as_the_whole_kind() {
        let index = Index::default();
        let footprint = index.begin(&key("a"));
        footprint.note(&kind("D"), named("n", "d"));
        for number in 0..2 * SCOPES {
            footprint.note(&kind("C"), named("n", &number.to_string()));
        }
        assert!(index.lock().waiting[&key("a")].scopes.len() <= SCOPES);
        assert_eq!(index.affected(&kind("C"), None, Some(&object("m", "any", 1, json!({}), "x"))), [key("a")]);
        assert_eq!(index.affected(&kind("D"), None, Some(&object("n", "d", 1, json!({}), "x"))), [key("a")]);
        assert!(index.lock().kinds[&kind("C")].named.is_empty());
    }
}
