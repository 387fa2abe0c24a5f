//! One informer per kind that a plugin serves or reads, started and stopped as the catalog changes, on every replica.
//!
//! # Guarantees
//! A kind that is reconciled is watched once, also where others read it. One that is only read is watched once for all who read it,
//! with the label selector of the claim where all of them have the same.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Deref,
    sync::{Arc, RwLock},
    time::Duration,
};

use kube::Client;

pub use self::collection::Collection;
use crate::{
    catalog::{Serving, Table, Versions},
    claim::{Claim, Read},
    object::{GroupKind, Key, Kind, Object, ObjectKey},
    watch::Change,
};

mod collection;

/// Where and how long to watch.
#[derive(Clone, Debug)]
pub struct Scope {
    /// Namespaces to watch; empty for all.
    pub namespaces: Vec<String>,
    /// How long the server is asked to keep a watch open.
    pub watch_timeout: Duration,
}

/// A kind that is watched, with the versions that serve it now.
#[derive(Debug)]
pub struct Watched {
    /// What serves it.
    pub versions: Arc<Versions>,
    collection: Arc<Collection>,
}

impl Watched {
    /// The claim of the version that serves the object.
    pub fn claim(&self, object: &Object) -> &Claim {
        &self.versions.pick(&object.uid).0.claim
    }

    /// Whether both are fed by the same informers.
    pub fn same_informers(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.collection, &other.collection)
    }
}

impl Deref for Watched {
    type Target = Collection;

    fn deref(&self) -> &Collection {
        &self.collection
    }
}

/// Who hears of changes: of objects, and of kinds.
pub trait Listener: Send + Sync + 'static {
    /// An object has changed in the store.
    fn object(&self, kind: &GroupKind, change: Change);
    /// An object of a kind that is only read has changed in its store.
    fn read(&self, kind: &GroupKind, change: Change);
    /// Another informer tells of a kind from now on: what happened to its objects between the two is not known.
    fn moved(&self, kind: &GroupKind);
    /// A kind is watched from now on, or other versions serve it (then `before` is what did).
    fn serves(&self, kind: &GroupKind, watched: &Arc<Watched>, before: Option<&Arc<Watched>>);
    /// A kind is no longer watched; `watched` is how it was.
    fn removed(&self, kind: &GroupKind, watched: &Arc<Watched>);
}

/// A kind that is only read, and which of its objects are watched: as in `kubectl -l`, empty for all.
type Source = (Kind, String);

/// The kinds that are watched now.
#[derive(Debug)]
pub struct Kinds {
    client_scope: Scope,
    watched: RwLock<BTreeMap<GroupKind, Arc<Watched>>>,
    read: RwLock<BTreeMap<Source, Arc<Collection>>>,
}

impl Kinds {
    /// None yet.
    pub fn new(scope: Scope) -> Self {
        Self { client_scope: scope, watched: RwLock::default(), read: RwLock::default() }
    }

    /// For tests: what is read of a kind, without informers.
    #[cfg(test)]
    pub(crate) fn reading(kind: &Kind, collection: Collection) -> Self {
        let kinds = Self::new(Scope { namespaces: Vec::new(), watch_timeout: Duration::from_secs(60) });
        kinds.read.write().expect("nobody else has it").insert((kind.clone(), String::new()), Arc::new(collection));
        kinds
    }

    /// The kind, if a plugin serves it.
    pub fn get(&self, kind: &GroupKind) -> Option<Arc<Watched>> {
        self.watched.read().expect("no panic while the lock is held").get(kind).cloned()
    }

    /// All that plugins serve.
    pub fn all(&self) -> Vec<(GroupKind, Arc<Watched>)> {
        self.watched
            .read()
            .expect("no panic while the lock is held")
            .iter()
            .map(|(kind, watched)| (kind.clone(), watched.clone()))
            .collect()
    }

    /// All that is watched only to be read.
    pub fn all_read(&self) -> Vec<(GroupKind, Arc<Collection>)> {
        let read = self.read.read().expect("no panic while the lock is held");
        read.iter().map(|((kind, _), collection)| (kind.group_kind(), collection.clone())).collect()
    }

    /// Where the objects of a kind, or at least those that this selector means, can be read.
    pub fn readable(&self, kind: &Kind, label_selector: &str) -> Option<Arc<Collection>> {
        if let Some(watched) = self.get(&kind.group_kind()).filter(|watched| watched.versions.stable.claim.reconciles == *kind) {
            return Some(watched.collection.clone());
        }
        let read = self.read.read().expect("no panic while the lock is held");
        let of = |label_selector: &str| read.get(&(kind.clone(), label_selector.to_owned())).cloned();
        of("").or_else(|| of(label_selector))
    }

    /// What keeps the plugin of a kind from its objects or from what it reads, in a sentence; none while all watches work.
    pub fn trouble(&self, kind: &GroupKind) -> Option<String> {
        let watched = self.get(kind)?;
        watched.health().trouble().or_else(|| {
            reads_of(&watched.versions).find_map(|read| {
                let trouble = self.readable(&read.kind, &read.label_selector)?.health().trouble()?;
                Some(format!("reading {}: {trouble}", read.kind.resource()))
            })
        })
    }

    /// Follows one table of the catalog. Informers go on across versions of a plugin; another API version, or another CRD of the same
    /// name, starts them anew. What is read is watched before a plugin that reads it serves.
    pub fn follow(&self, table: &Table, client: &Client, listener: &Arc<impl Listener>) {
        let before = self.collections();
        let only_read = only_read(table);
        for source in &only_read {
            self.start_reading(source, client, listener);
        }
        for (kind, versions) in table {
            let before = self.get(kind);
            if before.as_ref().is_some_and(|before| Arc::ptr_eq(&before.versions, versions)) {
                continue;
            }
            let collection = match &before {
                Some(before) if same_collection(&before.versions.stable, &versions.stable) => before.collection.clone(),
                _ => {
                    let (listener, kind) = (listener.clone(), kind.clone());
                    let on = move |change| listener.object(&kind, change);
                    Arc::new(Collection::watch(client, &self.client_scope, &versions.stable.claim.reconciles, "", on))
                }
            };
            let watched = Arc::new(Watched { versions: versions.clone(), collection });
            self.watched.write().expect("no panic while the lock is held").insert(kind.clone(), watched.clone());
            listener.serves(kind, &watched, before.as_ref());
        }
        let gone: Vec<_> = self.all().into_iter().map(|(kind, _)| kind).filter(|kind| !table.contains_key(kind)).collect();
        for kind in gone {
            let watched = self.watched.write().expect("no panic while the lock is held").remove(&kind);
            if let Some(watched) = watched {
                listener.removed(&kind, &watched);
            }
        }
        self.read.write().expect("no panic while the lock is held").retain(|source, _| only_read.contains(source));
        let now = self.collections();
        let same = |a: &[Arc<Collection>], b: &[Arc<Collection>]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| Arc::ptr_eq(a, b));
        for (kind, _) in before.iter().filter(|(kind, before)| now.get(kind).is_some_and(|now| !same(before, now))) {
            listener.moved(kind);
        }
    }

    /// What tells of each kind.
    fn collections(&self) -> BTreeMap<GroupKind, Vec<Arc<Collection>>> {
        let mut all: BTreeMap<_, Vec<_>> = BTreeMap::new();
        let reconciled = self.all().into_iter().map(|(kind, watched)| (kind, watched.collection.clone()));
        for (kind, collection) in reconciled.chain(self.all_read()) {
            all.entry(kind).or_default().push(collection);
        }
        all
    }

    fn start_reading(&self, source: &Source, client: &Client, listener: &Arc<impl Listener>) {
        let mut read = self.read.write().expect("no panic while the lock is held");
        read.entry(source.clone()).or_insert_with(|| {
            let (kind, label_selector) = source;
            let (listener, changed) = (listener.clone(), kind.group_kind());
            let on = move |change| listener.read(&changed, change);
            Arc::new(Collection::watch(client, &self.client_scope, kind, label_selector, on))
        });
    }
}

/// What has to be watched only because it is read. All who read a kind share one watch of the whole kind as soon as one of them needs
/// all of it.
fn only_read(table: &Table) -> BTreeSet<Source> {
    let reconciled = |kind: &Kind| table.get(&kind.group_kind()).is_some_and(|versions| versions.stable.claim.reconciles == *kind);
    let reads = || table.values().flat_map(|versions| reads_of(versions)).filter(|read| !reconciled(&read.kind));
    let selectors = |kind: &Kind| reads().filter(|read| read.kind == *kind).map(|read| &read.label_selector).collect::<BTreeSet<_>>();
    let narrowed = |kind: &Kind, label_selector: &str| match selectors(kind) {
        all if all.iter().any(|selector| selector.is_empty()) => String::new(),
        _ => label_selector.to_owned(),
    };
    reads().map(|read| (read.kind.clone(), narrowed(&read.kind, &read.label_selector))).collect()
}

/// What the versions of a plugin read.
fn reads_of(versions: &Versions) -> impl Iterator<Item = &Read> {
    let candidate = versions.candidate.as_ref().map(|candidate| &candidate.serving);
    std::iter::once(&versions.stable).chain(candidate).flat_map(|serving| &serving.claim.reads)
}

fn same_collection(a: &Serving, b: &Serving) -> bool {
    a.claim.reconciles == b.claim.reconciles && a.crd_uid == b.crd_uid
}

/// The key of an object of a kind.
pub fn key(kind: &GroupKind, object: &ObjectKey) -> Key {
    Key { kind: kind.clone(), object: object.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::tests::serving;

    fn kind(kind: &str) -> Kind {
        Kind {
            group: "g.io".into(),
            version: "v1".into(),
            kind: kind.into(),
            plural: format!("{}s", kind.to_lowercase()),
            namespaced: true,
        }
    }

    /// Plugins that reconcile a kind and read others.
    fn table(plugins: &[(&str, &[(Kind, &str)])]) -> Table {
        let plugin = |(reconciles, reads): &(&str, &[(Kind, &str)])| {
            let read =
                |(kind, selector): &(Kind, &str)| Read { kind: kind.clone(), all_namespaces: false, label_selector: (*selector).into() };
            let claim = Claim { reconciles: kind(reconciles), reads: reads.iter().map(read).collect(), ..Claim::plain() };
            let plain = Arc::into_inner(serving(b"1", "a")).expect("nobody else has it");
            let versions = Versions::only(Arc::new(Serving { claim: Arc::new(claim.clone()), ..plain }));
            (claim.reconciles.group_kind(), Arc::new(versions))
        };
        plugins.iter().map(plugin).collect()
    }

    fn watched(plugins: &[(&str, &[(Kind, &str)])]) -> Vec<String> {
        only_read(&table(plugins)).into_iter().map(|(kind, selector)| format!("{} {selector}", kind.plural)).collect()
    }

    #[test]
    fn what_is_only_read_is_watched_once_with_the_selector_that_all_have() {
        assert_eq!(watched(&[("A", &[(kind("C"), "x"), (kind("D"), "")]), ("B", &[(kind("C"), "x")])]), ["cs x", "ds "]);
        assert_eq!(watched(&[("A", &[(kind("C"), "x")]), ("B", &[(kind("C"), "y")])]), ["cs x", "cs y"]);
        assert_eq!(watched(&[("A", &[(kind("C"), "x")]), ("B", &[(kind("C"), "")])]), ["cs "]);
    }

    /// Writes down what it hears of.
    #[derive(Default)]
    struct Heard(std::sync::Mutex<Vec<String>>);

    impl Heard {
        fn note(&self, what: &str, kind: &GroupKind) {
            self.0.lock().expect("no panic").push(format!("{what} {}", kind.kind));
        }

        fn take(&self) -> Vec<String> {
            std::mem::take(&mut self.0.lock().expect("no panic"))
        }
    }

    impl Listener for Heard {
        fn object(&self, _: &GroupKind, _: Change) {}
        fn read(&self, _: &GroupKind, _: Change) {}

        fn moved(&self, kind: &GroupKind) {
            self.note("moved", kind);
        }

        fn serves(&self, kind: &GroupKind, _: &Arc<Watched>, _: Option<&Arc<Watched>>) {
            self.note("serves", kind);
        }

        fn removed(&self, kind: &GroupKind, _: &Arc<Watched>) {
            self.note("removed", kind);
        }
    }

    #[tokio::test]
    async fn a_kind_that_is_told_of_by_another_informer_has_moved() {
        let nowhere = kube::Config::new("http://127.0.0.1:1".parse().expect("a URL"));
        let client = Client::try_from(nowhere).expect("a client");
        let kinds = Kinds::new(Scope { namespaces: Vec::new(), watch_timeout: Duration::from_secs(60) });
        let heard = Arc::new(Heard::default());
        let follow = |plugins: &[(&str, &[(Kind, &str)])]| {
            kinds.follow(&table(plugins), &client, &heard);
            let watches = kinds.collections().into_values().flatten().count();
            (heard.take(), watches)
        };
        let reader: (&str, &[(Kind, &str)]) = ("A", &[(kind("C"), "x")]);
        let hears = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        assert_eq!(follow(&[reader]), (hears(&["serves A"]), 2));
        assert_eq!(follow(&[reader, ("D", &[])]), (hears(&["serves A", "serves D"]), 3));
        assert_eq!(follow(&[reader, ("C", &[])]), (hears(&["serves A", "serves C", "removed D", "moved C"]), 2));
        assert_eq!(follow(&[reader]), (hears(&["serves A", "removed C", "moved C"]), 2));
        assert_eq!(follow(&[("A", &[(kind("C"), "")])]), (hears(&["serves A", "moved C"]), 2));
        assert_eq!(follow(&[]), (hears(&["removed A"]), 0));
    }

    #[test]
    fn what_is_reconciled_is_not_watched_once_more_unless_in_another_version() {
        assert!(watched(&[("A", &[(kind("B"), ""), (kind("A"), "")]), ("B", &[])]).is_empty());
        let beta = Kind { version: "v1beta1".into(), ..kind("B") };
        assert_eq!(watched(&[("A", &[(beta, "")]), ("B", &[])]), ["bs "]);
    }
}
