//! One plugin in the book: what was delivered under its name, what came of it, and which versions of it serve.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    super::{
        access::{Access, Needs},
        crd::Gate,
        standing::{Keep, Refused, Standing},
    },
    Facts, Finished, Loaded, Verdict,
};
use crate::{
    catalog::{Candidate, Serving, Table, Versions},
    package::{Refusal, Version, reason},
    source::{Delivery, Kept, Place, RolledBack},
    trial::Trial,
};

/// A version that passed every gate, and the uid of the CRD that it passed on.
type Passed = (Arc<Loaded>, Arc<str>);

/// See the module.
pub(super) struct Plugin {
    /// By place; the first is the one that counts.
    pub(super) deliveries: BTreeMap<Place, Arc<Delivery>>,
    pub(super) number: u64,
    pub(super) delivered: Delivered,
    /// The stable version: the last that has proven itself, or the first.
    pub(super) good: Option<Arc<Loaded>>,
    /// Whether the kept version has been loaded, where that was needed.
    pub(super) restored: Restored,
    /// The trial of what was delivered.
    pub(super) trial: Option<(Version, Arc<Trial>)>,
    pub(super) rolled_back: Option<RolledBack>,
    /// How it stood before, which stands while a new version is being loaded.
    pub(super) stood: Option<Standing>,
}

/// What came of the delivery that counts.
pub(super) enum Delivered {
    Loading,
    Refused(Refused),
    Ready(Arc<Loaded>),
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Restored {
    Unasked,
    Loading(u64),
    Failed,
}

/// Whether a version can serve now.
enum Fitness {
    Fit(Arc<str>),
    Unknown,
    Unfit(Refusal),
}

impl Plugin {
    pub(super) fn new() -> Self {
        Self {
            deliveries: BTreeMap::new(),
            number: 0,
            delivered: Delivered::Loading,
            good: None,
            restored: Restored::Unasked,
            trial: None,
            rolled_back: None,
            stood: None,
        }
    }

    pub(super) fn delivery(&self) -> &Delivery {
        self.deliveries.values().next().expect("a plugin without deliveries is removed")
    }

    /// Whether it has a stable version.
    pub(super) fn has_good(&self) -> bool {
        self.good.is_some()
    }

    /// Whether nothing is known of it yet, not even which kind it claims.
    pub(super) fn is_unknown(&self) -> bool {
        self.good.is_none() && matches!(self.delivered, Delivered::Loading)
    }

    pub(super) fn settle(
        &mut self,
        name: &str,
        kept: Option<&Kept>,
        facts: &Facts,
        older_unknown: bool,
        verdict: &mut Verdict,
    ) -> Standing {
        let own = kept.filter(|kept| kept.owner == self.delivery().uid);
        if self.rolled_back.is_none() && self.good.is_none() {
            self.rolled_back = own.and_then(|kept| kept.rolled_back.clone());
        }
        let (passed, refused) = if older_unknown && self.good.is_none() { (None, None) } else { self.judge_delivered(facts, verdict) };
        if self.needs_kept(own, passed.as_ref(), refused.as_ref()) {
            if self.restored == Restored::Unasked {
                verdict.restore.push(name.to_owned());
            }
            return self.stand(None, None, kept);
        }
        let proven = |loaded: &Loaded| own.is_some_and(|kept| kept.version == loaded.version);
        let versions = match (passed, self.good.clone()) {
            (Some((loaded, crd_uid)), Some(good)) if can_be_tried(&good, &loaded) && !proven(&loaded) => {
                let stable = serving(name, &good, &crd_uid);
                Some(Versions { stable, candidate: Some(self.candidate(serving(name, &loaded, &crd_uid), &loaded)) })
            }
            (Some((loaded, crd_uid)), _) => {
                self.good = Some(loaded.clone());
                Some(Versions::only(serving(name, &loaded, &crd_uid)))
            }
            (None, Some(good)) => match facts.crds.gate(&good.claim) {
                Gate::Open(crd_uid) if !taken(name, &good, &verdict.table) => Some(Versions::only(serving(name, &good, &crd_uid))),
                _ => None,
            },
            (None, None) => None,
        };
        let versions = versions.map(Arc::new);
        if let Some(versions) = &versions {
            verdict.table.insert(versions.stable.claim.reconciles.group_kind(), versions.clone());
        }
        self.trial = self.trial.take().filter(|_| versions.as_ref().is_some_and(|versions| versions.candidate.is_some()));
        self.stand(versions.as_deref(), refused, kept)
    }

    /// Whether what was kept has to be loaded before anything can serve: there is no good version, and the delivered one is not it.
    fn needs_kept(&self, kept: Option<&Kept>, passed: Option<&Passed>, refused: Option<&Refused>) -> bool {
        let Some(kept) = kept.filter(|_| self.good.is_none() && self.restored != Restored::Failed) else { return false };
        match passed {
            Some((loaded, _)) => loaded.version != kept.version,
            None => refused.is_some(),
        }
    }

    /// What became of the kept version. Where it cannot be loaded, it is as if there were none.
    pub(super) fn restored_as(&mut self, name: &str, finished: Finished) -> bool {
        match finished {
            Ok(loaded) => {
                self.good.get_or_insert(loaded);
                self.restored = Restored::Unasked;
            }
            Err(refused) => {
                let why = refused.refusal.message;
                tracing::warn!(plugin = name, why, "the stable version that was kept cannot be loaded");
                self.restored = Restored::Failed;
            }
        }
        true
    }

    /// The delivered version on its trial, which goes on if it had begun.
    fn candidate(&mut self, serving: Arc<Serving>, loaded: &Loaded) -> Candidate {
        let trial = match self.trial.take() {
            Some((version, trial)) if version == loaded.version => trial,
            _ => Arc::new(Trial::new(loaded.config.rollout)),
        };
        self.trial = Some((loaded.version.clone(), trial.clone()));
        Candidate { serving, trial }
    }

    /// The delivered version where it passes every gate; else why not, where that is known.
    fn judge_delivered(&self, facts: &Facts, verdict: &mut Verdict) -> (Option<Passed>, Option<Refused>) {
        let loaded = match &self.delivered {
            Delivered::Loading => return (None, None),
            Delivered::Refused(refused) => return (None, Some(refused.clone())),
            Delivered::Ready(loaded) => loaded,
        };
        let refuse = |refusal| (None, Some(Refused { digest: Some(loaded.version.digest), refusal }));
        if let Some(RolledBack { why, .. }) = self.rolled_back.as_ref().filter(|rolled_back| self.outlasts(rolled_back, loaded)) {
            let message = format!(
                "It was rolled back, as {}. Deliver another version, or see \"Rollback\" in docs/operating.md to try this one again.",
                why.trim_end_matches('.')
            );
            return refuse(Refusal::new(reason::ROLLED_BACK, message));
        }
        if let Some(owner) = owner(loaded, &verdict.table) {
            let message = format!(
                "{} is reconciled by the plugin {owner:?}, which is older; this one takes over when that one is deleted.",
                loaded.claim.reconciles.group_kind()
            );
            return refuse(Refusal::new(reason::KIND_TAKEN, message));
        }
        match self.fitness(loaded, facts, &mut verdict.wanted) {
            Fitness::Fit(crd_uid) => (Some((loaded.clone(), crd_uid)), None),
            Fitness::Unknown => (None, None),
            Fitness::Unfit(refusal) => refuse(refusal),
        }
    }

    /// Whether a version was rolled back, and there is, or may be, another one to serve in its place.
    fn outlasts(&self, rolled_back: &RolledBack, loaded: &Loaded) -> bool {
        rolled_back.version == loaded.version
            && (self.good.as_ref().map_or(self.restored != Restored::Failed, |good| good.version != loaded.version))
    }

    /// The gates that depend on the cluster. A version that serves already is not asked for its permissions again.
    fn fitness(&self, loaded: &Arc<Loaded>, facts: &Facts, wanted: &mut BTreeSet<Needs>) -> Fitness {
        let crd_uid = match facts.crds.gate(&loaded.claim) {
            Gate::Open(crd_uid) => crd_uid,
            Gate::Waiting => return Fitness::Unknown,
            Gate::Shut(refusal) => return Fitness::Unfit(refusal),
        };
        if self.good.as_ref().is_some_and(|good| Arc::ptr_eq(good, loaded)) {
            return Fitness::Fit(crd_uid);
        }
        let needs = Needs::of(&loaded.claim);
        let fitness = match facts.access.get(&needs) {
            Some(Access::Granted) => Fitness::Fit(crd_uid),
            Some(Access::Denied(missing)) => Fitness::Unfit(needs.refusal(*missing)),
            None => Fitness::Unknown,
        };
        wanted.insert(needs);
        fitness
    }

    /// How the plugin stands. While a version is being loaded it stands as before, so that a reload is one change and not two.
    fn stand(&mut self, versions: Option<&Versions>, refused: Option<Refused>, kept: Option<&Kept>) -> Standing {
        let loading = refused.is_none() && !versions.is_some_and(|versions| self.delivered_serves(versions.newest()));
        let kind = match (versions, &self.delivered) {
            (Some(versions), _) => Some(versions.stable.claim.reconciles.clone()),
            (None, Delivered::Ready(loaded)) => Some(loaded.claim.reconciles.clone()),
            (None, _) => None,
        };
        let delivery = self.delivery();
        let mut standing = Standing {
            kind,
            place: delivery.place,
            uid: delivery.uid.clone(),
            version: delivery.version.clone(),
            stable: versions.map(|versions| versions.stable.clone()),
            candidate: versions.and_then(|versions| versions.candidate.clone()),
            refused,
            loading,
            keep: self.to_keep(kept),
        };
        if let Some(before) = self.stood.take().filter(|before| loading && standing.stable.is_some() && before.uid == standing.uid) {
            standing.version = before.version;
            standing.refused = before.refused;
        }
        self.stood = Some(standing.clone());
        standing
    }

    /// What is to be kept of the plugin, in case that a later host has to do without what this one knows. A folder is the business of
    /// whoever writes it.
    fn to_keep(&self, kept: Option<&Kept>) -> Option<Keep> {
        let good = self.good.as_ref().filter(|good| good.delivery.place == Place::ConfigMap)?;
        let rolled_back = self.rolled_back.clone();
        let owner = self.delivery().uid.clone();
        let is_kept = kept.is_some_and(|kept| (&kept.owner, &kept.version, &kept.rolled_back) == (&owner, &good.version, &rolled_back));
        let is_own = |kept: &Kept| kept.owner == owner;
        let kept = kept.map(|kept| (kept.uid.clone(), is_own(kept).then(|| kept.version.clone())));
        Some(Keep { version: good.version.clone(), delivery: good.delivery.clone(), owner, rolled_back, kept, is_kept })
    }

    fn delivered_serves(&self, serving: &Serving) -> bool {
        matches!(&self.delivered, Delivered::Ready(loaded) if loaded.version == serving.version)
    }
}

/// Whether both can serve side by side: the same objects, in the same version of their API.
fn can_be_tried(good: &Loaded, loaded: &Loaded) -> bool {
    good.version != loaded.version && good.claim.reconciles == loaded.claim.reconciles
}

/// The older plugin that has the kind, if there is one: the table holds only what older ones serve.
fn owner<'t>(loaded: &Loaded, table: &'t Table) -> Option<&'t str> {
    table.get(&loaded.claim.reconciles.group_kind()).map(|versions| versions.stable.name.as_str())
}

fn taken(name: &str, loaded: &Loaded, table: &Table) -> bool {
    owner(loaded, table).is_some_and(|owner| owner != name)
}

fn serving(name: &str, loaded: &Loaded, crd_uid: &Arc<str>) -> Arc<Serving> {
    Arc::new(Serving {
        name: name.to_owned(),
        version: loaded.version.clone(),
        claim: loaded.claim.clone(),
        pace: loaded.config.pace(),
        timeout: loaded.config.timeout,
        service_account: loaded.config.service_account.clone(),
        paused: loaded.config.paused,
        redrive: loaded.config.redrive,
        crd_uid: crd_uid.clone(),
        handler: loaded.handler.clone(),
    })
}
