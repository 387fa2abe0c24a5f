//! The objects of one kind as the host's informers hold them: one informer for each watched namespace, or one for all.

use std::sync::Arc;

use kube::Client;
use tokio::task::AbortHandle;

use super::Scope;
use crate::{
    object::{Kind, Object, ObjectKey},
    watch::{self, Change, Health, Store, Target},
};

/// How many objects are looked at in one go, under the store's lock.
const BATCH: usize = 500;

/// See the module. Dropping it stops its informers.
#[derive(Debug)]
pub struct Collection {
    /// A store for each namespace, in their order, or one for all.
    stores: Vec<(Option<String>, Arc<Store>)>,
    tasks: Vec<AbortHandle>,
}

impl Drop for Collection {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Collection {
    /// Starts the informers of a kind, or of those of its objects that a selector means.
    pub fn watch(
        client: &Client,
        scope: &Scope,
        kind: &Kind,
        label_selector: &str,
        on: impl Fn(Change) + Clone + Send + Sync + 'static,
    ) -> Self {
        let mut namespaces: Vec<Option<String>> = match &scope.namespaces[..] {
            [] => vec![None],
            _ if !kind.namespaced => vec![None],
            names => names.iter().cloned().map(Some).collect(),
        };
        namespaces.sort();
        namespaces.dedup();
        let mut collection = Self { stores: Vec::new(), tasks: Vec::new() };
        for namespace in namespaces {
            let store = Arc::new(Store::packing());
            let target = Target {
                path: kind.collection_path(namespace.as_deref()),
                label_selector: Some(label_selector.to_owned()).filter(|selector| !selector.is_empty()),
                watch_timeout: scope.watch_timeout,
                page: watch::PAGE,
            };
            let task = watch::run(client.clone(), target, store.clone(), on.clone());
            collection.tasks.push(tokio::spawn(task).abort_handle());
            collection.stores.push((namespace, store));
        }
        collection
    }

    /// The store that holds, or would hold, the object.
    pub fn store(&self, key: &ObjectKey) -> Option<&Arc<Store>> {
        let of = |namespace: &Option<String>| namespace.is_none() || namespace.as_deref() == key.namespace.as_deref();
        self.stores.iter().find(|(namespace, _)| of(namespace)).map(|(_, store)| store)
    }

    /// The namespaces that are watched; none where all are.
    pub fn namespaces(&self) -> Option<Vec<&str>> {
        self.stores.iter().map(|(namespace, _)| namespace.as_deref()).collect()
    }

    /// The object as it is now.
    pub fn get(&self, key: &ObjectKey) -> Option<Arc<Object>> {
        self.store(key)?.get(key)
    }

    /// All objects.
    pub fn all(&self) -> Vec<Arc<Object>> {
        self.stores.iter().flat_map(|(_, store)| store.all()).collect()
    }

    /// The objects after `last` in the order of namespace and name, of one namespace or with none of all.
    pub fn after<'c>(&'c self, last: Option<ObjectKey>, namespace: Option<&'c str>) -> impl Iterator<Item = Arc<Object>> + 'c {
        let stores = self.stores.iter().filter(move |(of, _)| namespace.is_none() || of.is_none() || of.as_deref() == namespace);
        stores.flat_map(move |(_, store)| {
            let mut last = last.clone();
            let batches = std::iter::from_fn(move || {
                let batch = store.after(last.as_ref(), namespace, BATCH);
                last = Some(batch.last()?.key.clone());
                Some(batch)
            });
            batches.flatten()
        })
    }

    /// How many objects there are.
    pub fn len(&self) -> usize {
        self.stores.iter().map(|(_, store)| store.len()).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How its informers are doing: the worst of them.
    pub fn health(&self) -> Health {
        let mut all = self.stores.iter().map(|(_, store)| store.health());
        let first = all.next().unwrap_or_default();
        all.fold(first, |worst, next| Health {
            synced: worst.synced && next.synced,
            last_contact: worst.last_contact.min(next.last_contact),
            error: worst.error.or(next.error),
        })
    }

    /// Waits until all has been listed once, or it is known why not.
    pub async fn listed(&self) {
        for (_, store) in &self.stores {
            store.listed().await;
        }
    }

    /// For tests: without informers.
    #[cfg(test)]
    pub(crate) fn of_stores(stores: Vec<(Option<String>, Arc<Store>)>) -> Self {
        Self { stores, tasks: Vec::new() }
    }
}
