//! Which handler serves which kind, now.
//!
//! # Expected flow
//! The loader replaces the table when a plugin has passed its gates or has gone; the controller [picks](Catalog::pick) for each run
//! and [subscribes](Catalog::subscribe) to start and stop the informers of kinds.
//!
//! # Guarantees
//! A table is one value, swapped at once: no reader sees half a change. What was picked stays whole for as long as a run holds it, so
//! a run that began on an old version ends on it. A table that is equal to the one before wakes nobody.

use std::{collections::BTreeMap, fmt, sync::Arc, time::Duration};

use tokio::sync::watch;

use crate::{
    claim::{Claim, Pace},
    object::GroupKind,
    package::Digest,
    reconcile::Reconcile,
};

/// One version of one plugin, ready to run: immutable.
pub struct Serving {
    /// Name of the plugin.
    pub name: String,
    /// Of its component.
    pub digest: Digest,
    /// Of its `plugin.yaml`. Digest and hash together tell one version from another.
    pub config_hash: String,
    /// What it said that it is.
    pub claim: Arc<Claim>,
    /// How its runs are paced.
    pub pace: Pace,
    /// The longest that a run may take.
    pub timeout: Duration,
    /// Whether no object of the kind is run for now.
    pub paused: bool,
    /// Identity of the CustomResourceDefinition. With another one, every object of the kind is another one too: an informer on the
    /// old one sees nothing more.
    pub crd_uid: Arc<str>,
    /// The handler.
    pub handler: Arc<dyn Reconcile>,
}

/// Whether it is the same version in the same place: then there is nothing to swap.
impl PartialEq for Serving {
    fn eq(&self, other: &Self) -> bool {
        let version = |serving: &Self| (serving.digest, serving.name.clone(), serving.config_hash.clone(), serving.crd_uid.clone());
        version(self) == version(other)
    }
}

impl fmt::Debug for Serving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Serving").field("name", &self.name).field("digest", &self.digest).finish_non_exhaustive()
    }
}

/// Kinds with what serves them.
pub type Table = BTreeMap<GroupKind, Arc<Serving>>;

/// The table in use. Cheap to clone; all clones share it.
#[derive(Clone, Debug)]
pub struct Catalog {
    table: Arc<watch::Sender<Arc<Table>>>,
}

impl Default for Catalog {
    fn default() -> Self {
        Self { table: Arc::new(watch::Sender::new(Arc::default())) }
    }
}

impl Catalog {
    /// What serves the kind.
    pub fn pick(&self, kind: &GroupKind) -> Option<Arc<Serving>> {
        self.table.borrow().get(kind).cloned()
    }

    /// The table now and at each change. Changes in quick succession may be seen as one.
    pub fn subscribe(&self) -> watch::Receiver<Arc<Table>> {
        self.table.subscribe()
    }

    /// Swaps the table. False, and nobody is woken, where it is the same. A version that stays keeps its `Arc`.
    pub fn replace(&self, mut table: Table) -> bool {
        self.table.send_if_modified(|current| {
            for (kind, serving) in &mut table {
                if let Some(before) = current.get(kind).filter(|before| *before == serving) {
                    *serving = before.clone();
                }
            }
            let unchanged = table.len() == current.len()
                && table.iter().zip(current.iter()).all(|((kind, new), (old_kind, old))| kind == old_kind && Arc::ptr_eq(new, old));
            if !unchanged {
                *current = Arc::new(table);
            }
            !unchanged
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use futures::FutureExt;

    use super::*;
    use crate::{
        package::Config,
        reconcile::{Next, Outcome, Request},
    };

    /// `K` in `g.io` served by `p` with this code.
    pub(crate) fn serving(code: &[u8], config_hash: &str) -> Arc<Serving> {
        let handler = |_: Request| async { Ok(Outcome::just(Next::AwaitChange)) }.boxed();
        Arc::new(Serving {
            name: "p".into(),
            digest: Digest::of(code),
            config_hash: config_hash.into(),
            claim: Arc::new(Claim::plain()),
            pace: Config::default().pace(),
            timeout: Duration::from_secs(10),
            paused: false,
            crd_uid: "u".into(),
            handler: Arc::new(handler),
        })
    }

    fn table(serving: Arc<Serving>) -> Table {
        Table::from([(serving.claim.reconciles.group_kind(), serving)])
    }

    #[test]
    fn the_same_version_is_no_change_and_keeps_its_identity() {
        let catalog = Catalog::default();
        let mut seen = catalog.subscribe();
        let first = serving(b"1", "a");
        let kind = first.claim.reconciles.group_kind();
        assert!(catalog.replace(table(first.clone())));
        seen.mark_unchanged();
        assert!(!catalog.replace(table(serving(b"1", "a"))));
        assert!(!seen.has_changed().expect("open"));
        assert!(Arc::ptr_eq(&catalog.pick(&kind).expect("serves"), &first));
    }

    #[test]
    fn other_bytes_another_configuration_and_removal_are_changes() {
        let catalog = Catalog::default();
        let kind = serving(b"1", "a").claim.reconciles.group_kind();
        for (code, config) in [(b"1", "a"), (b"2", "a"), (b"2", "b")] {
            assert!(catalog.replace(table(serving(code, config))), "{config}");
            assert_eq!(catalog.pick(&kind).expect("serves").digest, Digest::of(code));
        }
        assert!(catalog.replace(Table::new()));
        assert!(catalog.pick(&kind).is_none());
    }
}
