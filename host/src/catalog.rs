//! Which handler serves which object, now.
//!
//! # Expected flow
//! The loader replaces the table when a plugin has passed its gates or has gone; the controller [picks](Versions::pick) for each run
//! and [subscribes](Catalog::subscribe) to start and stop the informers of kinds. What it finds out about a version on trial goes back
//! with [`Catalog::judge`].
//!
//! # Guarantees
//! A table is one value, swapped at once: no reader sees half a change. What was picked stays whole for as long as a run holds it, so
//! a run that began on an old version ends on it. A table that is equal to the one before wakes nobody.

use std::{collections::BTreeMap, fmt, sync::Arc, time::Duration};

use tokio::sync::{mpsc, watch};

use crate::{
    account::Actor,
    claim::{Claim, Pace},
    object::GroupKind,
    package::Version,
    reconcile::Reconcile,
    trial::{Judgement, Trial},
};

/// One version of one plugin, ready to run: immutable.
pub struct Serving {
    /// Name of the plugin.
    pub name: String,
    /// Which one.
    pub version: Version,
    /// What it said that it is.
    pub claim: Arc<Claim>,
    /// How its runs are paced.
    pub pace: Pace,
    /// The longest that a run may take.
    pub timeout: Duration,
    /// Name of the ServiceAccount that it acts as for reads and children; none gives it neither.
    pub service_account: Option<String>,
    /// Whether it is to try again what a former version gave up on.
    pub redrive: bool,
    /// Identity of the CustomResourceDefinition. With another one, every object of the kind is another one too: an informer on the
    /// old one sees nothing more.
    pub crd_uid: Arc<str>,
    /// The handler.
    pub handler: Arc<dyn Reconcile>,
}

/// Whether it is the same version in the same place: then there is nothing to swap.
impl PartialEq for Serving {
    fn eq(&self, other: &Self) -> bool {
        let place = |serving: &Self| (serving.name.clone(), serving.crd_uid.clone());
        self.version == other.version && place(self) == place(other)
    }
}

impl fmt::Debug for Serving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Serving").field("name", &self.name).field("version", &self.version).finish_non_exhaustive()
    }
}

/// The versions of one plugin that serve its kind.
#[derive(Debug, PartialEq)]
pub struct Versions {
    /// The one that has proven itself, or the first.
    pub stable: Arc<Serving>,
    /// The one that is to take its place.
    pub candidate: Option<Candidate>,
    /// Whether no object of the kind is run for now, whichever version serves it.
    pub paused: bool,
}

/// A version on trial.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// What serves.
    pub serving: Arc<Serving>,
    /// Which objects, and what came of it so far.
    pub trial: Arc<Trial>,
}

impl Serving {
    /// As whom it acts, if it does.
    pub fn actor(&self) -> Option<Actor> {
        self.service_account.clone().map(|account| Actor { plugin: self.name.clone(), account })
    }
}

impl Versions {
    /// One version alone.
    pub fn only(stable: Arc<Serving>) -> Self {
        Self { stable, candidate: None, paused: false }
    }

    /// The version that serves the object with this uid, and its trial where it is on one.
    pub fn pick(&self, uid: &str) -> (&Arc<Serving>, Option<&Arc<Trial>>) {
        match &self.candidate {
            Some(Candidate { serving, trial }) if trial.takes_part(uid) => (serving, Some(trial)),
            _ => (&self.stable, None),
        }
    }

    /// The version that was delivered last: its word on pace counts for the whole kind.
    pub fn newest(&self) -> &Arc<Serving> {
        self.candidate.as_ref().map_or(&self.stable, |candidate| &candidate.serving)
    }
}

/// Whether it is the same version on the same trial.
impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.serving == other.serving && Arc::ptr_eq(&self.trial, &other.trial)
    }
}

/// Kinds with what serves them.
pub type Table = BTreeMap<GroupKind, Arc<Versions>>;

/// What became of a version on trial.
#[derive(Debug)]
pub struct Judged {
    /// The plugin.
    pub name: String,
    /// Which version of it.
    pub version: Version,
    /// How it did.
    pub judgement: Judgement,
}

/// The table in use. Cheap to clone; all clones share it.
#[derive(Clone, Debug)]
pub struct Catalog {
    table: Arc<watch::Sender<Arc<Table>>>,
    judged: mpsc::UnboundedSender<Judged>,
}

impl Catalog {
    /// An empty one, and where the judgements come out.
    pub fn new() -> (Self, mpsc::UnboundedReceiver<Judged>) {
        let (judged, judgements) = mpsc::unbounded_channel();
        (Self { table: Arc::new(watch::Sender::new(Arc::default())), judged }, judgements)
    }

    /// What serves the kind.
    pub fn get(&self, kind: &GroupKind) -> Option<Arc<Versions>> {
        self.table.borrow().get(kind).cloned()
    }

    /// The table now and at each change. Changes in quick succession may be seen as one.
    pub fn subscribe(&self) -> watch::Receiver<Arc<Table>> {
        self.table.subscribe()
    }

    /// Tells the loader what became of a version on trial.
    pub fn judge(&self, serving: &Serving, judgement: Judgement) {
        // Without a loader the process is about to end.
        let _ = self.judged.send(Judged { name: serving.name.clone(), version: serving.version.clone(), judgement });
    }

    /// Swaps the table. False, and nobody is woken, where it is the same. What stays keeps its `Arc`.
    pub fn replace(&self, mut table: Table) -> bool {
        self.table.send_if_modified(|current| {
            for (kind, versions) in &mut table {
                if let Some(before) = current.get(kind).filter(|before| *before == versions) {
                    *versions = before.clone();
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
        package::{Config, Digest},
        reconcile::{Next, Outcome, Request},
        trial::Rollout,
    };

    /// `K` in `g.io` served by `p` with this code.
    pub(crate) fn serving(code: &[u8], config_hash: &str) -> Arc<Serving> {
        let handler = |_: Request| async { Ok(Outcome::just(Next::AwaitChange)) }.boxed();
        Arc::new(Serving {
            name: "p".into(),
            version: Version { digest: Digest::of(code), config_hash: config_hash.into() },
            claim: Arc::new(Claim::plain()),
            pace: Config::default().pace(),
            timeout: Duration::from_secs(10),
            service_account: None,
            redrive: false,
            crd_uid: "u".into(),
            handler: Arc::new(handler),
        })
    }

    fn table(serving: Arc<Serving>) -> Table {
        Table::from([(serving.claim.reconciles.group_kind(), Arc::new(Versions::only(serving)))])
    }

    #[test]
    fn the_same_version_is_no_change_and_keeps_its_identity() {
        let (catalog, _judgements) = Catalog::new();
        let mut seen = catalog.subscribe();
        let first = serving(b"1", "a");
        let kind = first.claim.reconciles.group_kind();
        assert!(catalog.replace(table(first.clone())));
        seen.mark_unchanged();
        assert!(!catalog.replace(table(serving(b"1", "a"))));
        assert!(!seen.has_changed().expect("open"));
        assert!(Arc::ptr_eq(&catalog.get(&kind).expect("serves").stable, &first));
    }

    #[test]
    fn other_bytes_another_configuration_and_removal_are_changes() {
        let (catalog, _judgements) = Catalog::new();
        let kind = serving(b"1", "a").claim.reconciles.group_kind();
        for (code, config) in [(b"1", "a"), (b"2", "a"), (b"2", "b")] {
            assert!(catalog.replace(table(serving(code, config))), "{config}");
            assert_eq!(catalog.get(&kind).expect("serves").stable.version.digest, Digest::of(code));
        }
        assert!(catalog.replace(Table::new()));
        assert!(catalog.get(&kind).is_none());
    }

    #[test]
    fn a_version_on_trial_serves_its_share_and_the_stable_one_the_rest() {
        let trial = Arc::new(Trial::new(Rollout::Staged { share: 50, time: Duration::from_secs(1) }));
        let candidate = Some(Candidate { serving: serving(b"2", ""), trial: trial.clone() });
        let versions = Versions { stable: serving(b"1", ""), candidate, paused: false };
        for uid in ["a", "b", "c", "d", "e", "f"] {
            let (picked, on_trial) = versions.pick(uid);
            let expected = if trial.takes_part(uid) { b"2" } else { b"1" };
            assert_eq!((picked.version.digest, on_trial.is_some()), (Digest::of(expected), trial.takes_part(uid)));
        }
        assert_ne!(versions, Versions::only(serving(b"1", "")));
        let paused = Versions { paused: true, ..Versions::only(serving(b"1", "")) };
        assert_ne!(paused, Versions::only(serving(b"1", "")), "a pause is a change");
    }
}
