//! One informer per kind that a plugin serves, started and stopped as the catalog changes, on every replica.

use std::{
    collections::BTreeMap,
    sync::{Arc, RwLock},
    time::Duration,
};

use kube::Client;
use tokio::task::AbortHandle;

use crate::{
    catalog::{Serving, Table, Versions},
    claim::Claim,
    object::{GroupKind, Key, Object, ObjectKey},
    watch::{self, Change, Health, Store, Target},
};

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
    informers: Arc<Informers>,
}

#[derive(Debug)]
struct Informers {
    /// A store for each namespace, or one for all.
    stores: Vec<(Option<String>, Arc<Store>)>,
    tasks: Vec<AbortHandle>,
}

impl Drop for Informers {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Watched {
    /// The store that holds, or would hold, the object.
    pub fn store(&self, key: &ObjectKey) -> Option<&Arc<Store>> {
        let of = |namespace: &Option<String>| namespace.is_none() || namespace.as_deref() == key.namespace.as_deref();
        self.informers.stores.iter().find(|(namespace, _)| of(namespace)).map(|(_, store)| store)
    }

    /// The claim of the version that serves the object.
    pub fn claim(&self, object: &Object) -> &Claim {
        &self.versions.pick(&object.uid).0.claim
    }

    /// The object as it is now.
    pub fn get(&self, key: &ObjectKey) -> Option<Arc<Object>> {
        self.store(key)?.get(key)
    }

    /// All objects of the kind, in no order.
    pub fn all(&self) -> Vec<Arc<Object>> {
        self.informers.stores.iter().flat_map(|(_, store)| store.all()).collect()
    }

    /// How many objects there are.
    pub fn len(&self) -> usize {
        self.informers.stores.iter().map(|(_, store)| store.len()).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether both are fed by the same informers.
    pub fn same_informers(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.informers, &other.informers)
    }

    /// How its informers are doing: the worst of them.
    pub fn health(&self) -> Health {
        let mut all = self.informers.stores.iter().map(|(_, store)| store.health());
        let first = all.next().unwrap_or_default();
        all.fold(first, |worst, next| Health {
            synced: worst.synced && next.synced,
            last_contact: worst.last_contact.min(next.last_contact),
            error: worst.error.or(next.error),
        })
    }
}

/// Who hears of changes: of objects, and of kinds.
pub trait Listener: Send + Sync + 'static {
    /// An object has changed in the store.
    fn object(&self, kind: &GroupKind, change: Change);
    /// A kind is watched from now on, or other versions serve it (then `before` is what did).
    fn serves(&self, kind: &GroupKind, watched: &Arc<Watched>, before: Option<&Arc<Watched>>);
    /// A kind is no longer watched.
    fn removed(&self, kind: &GroupKind);
}

/// The kinds that are watched now.
#[derive(Debug)]
pub struct Kinds {
    client_scope: Scope,
    watched: RwLock<BTreeMap<GroupKind, Arc<Watched>>>,
}

impl Kinds {
    /// None yet.
    pub fn new(scope: Scope) -> Self {
        Self { client_scope: scope, watched: RwLock::default() }
    }

    /// The kind, if a plugin serves it.
    pub fn get(&self, kind: &GroupKind) -> Option<Arc<Watched>> {
        self.watched.read().expect("no panic while the lock is held").get(kind).cloned()
    }

    /// All of them.
    pub fn all(&self) -> Vec<(GroupKind, Arc<Watched>)> {
        self.watched
            .read()
            .expect("no panic while the lock is held")
            .iter()
            .map(|(kind, watched)| (kind.clone(), watched.clone()))
            .collect()
    }

    /// Follows one table of the catalog. Informers go on across versions of a plugin; another API version, or another CRD of the same
    /// name, starts them anew.
    pub fn follow(&self, table: &Table, client: &Client, listener: &Arc<impl Listener>) {
        for (kind, versions) in table {
            let before = self.get(kind);
            if before.as_ref().is_some_and(|before| Arc::ptr_eq(&before.versions, versions)) {
                continue;
            }
            let informers = match &before {
                Some(before) if same_collection(&before.versions.stable, &versions.stable) => before.informers.clone(),
                _ => Arc::new(self.start(kind, &versions.stable, client, listener)),
            };
            let watched = Arc::new(Watched { versions: versions.clone(), informers });
            self.watched.write().expect("no panic while the lock is held").insert(kind.clone(), watched.clone());
            listener.serves(kind, &watched, before.as_ref());
        }
        let gone: Vec<_> = self.all().into_iter().map(|(kind, _)| kind).filter(|kind| !table.contains_key(kind)).collect();
        for kind in gone {
            self.watched.write().expect("no panic while the lock is held").remove(&kind);
            listener.removed(&kind);
        }
    }

    fn start(&self, kind: &GroupKind, serving: &Serving, client: &Client, listener: &Arc<impl Listener>) -> Informers {
        let resource = &serving.claim.reconciles;
        let namespaces: Vec<Option<String>> = match &self.client_scope.namespaces[..] {
            [] => vec![None],
            _ if !resource.namespaced => vec![None],
            names => names.iter().cloned().map(Some).collect(),
        };
        let mut informers = Informers { stores: Vec::new(), tasks: Vec::new() };
        for namespace in namespaces {
            let store = Arc::new(Store::default());
            let target = Target {
                path: resource.collection_path(namespace.as_deref()),
                label_selector: None,
                watch_timeout: self.client_scope.watch_timeout,
            };
            let (listener, kind) = (listener.clone(), kind.clone());
            let task = watch::run(client.clone(), target, store.clone(), move |change| listener.object(&kind, change));
            informers.tasks.push(tokio::spawn(task).abort_handle());
            informers.stores.push((namespace, store));
        }
        informers
    }
}

fn same_collection(a: &Serving, b: &Serving) -> bool {
    a.claim.reconciles == b.claim.reconciles && a.crd_uid == b.crd_uid
}

/// The key of an object of a kind.
pub fn key(kind: &GroupKind, object: &ObjectKey) -> Key {
    Key { kind: kind.clone(), object: object.clone() }
}
