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
    Facts, Loaded, Verdict,
    restored::Restored,
    version::{can_be_tried, owner, paused, same_files, serving, taken},
};
use crate::{
    catalog::{Candidate, Serving, Table, Versions},
    package::{Refusal, Version, reason},
    source::{Delivery, Kept, Place, RolledBack},
    trial::Trial,
};

/// A version that passed every gate, and the uid of the CRD that it passed on.
type Passed = (Arc<Loaded>, Arc<str>);

/// How many versions are remembered as rolled back: the last ones, as older ones are hardly delivered again.
const ROLLED_BACK: usize = 8;

/// See the module.
#[derive(Default)]
pub(super) struct Plugin {
    /// By place; the first is the one that counts.
    pub(super) deliveries: BTreeMap<Place, Arc<Delivery>>,
    pub(super) number: u64,
    pub(super) delivered: Delivered,
    /// The last version that was delivered and loaded; while a later one is loaded or refused, only if it is on trial or good.
    pub(super) newest: Option<Arc<Loaded>>,
    /// The stable version: the last that has proven itself, or the first.
    pub(super) good: Option<Arc<Loaded>>,
    /// Whether `good` was found out here, so that what is kept has yet to follow. Otherwise `good` follows what is kept.
    pub(super) ahead: bool,
    pub(super) restored: Restored,
    /// The trial of the newest version.
    pub(super) trial: Option<(Version, Arc<Trial>)>,
    pub(super) rolled_back: Vec<RolledBack>,
    /// What the last `plugin.yaml` that could be read says.
    paused: Option<bool>,
    /// How it stood before, which stands while a new version is being loaded.
    stood: Option<Standing>,
}

/// What came of the delivery that counts.
#[derive(Default)]
pub(super) enum Delivered {
    #[default]
    Loading,
    Refused(Refused),
    Ready,
}

/// Whether a version can serve now.
enum Fitness {
    Fit(Arc<str>),
    Unknown,
    Unfit(Refusal),
}

impl Plugin {
    pub(super) fn delivery(&self) -> &Delivery {
        self.deliveries.values().next().expect("a plugin without deliveries is removed")
    }

    /// Another delivery counts, which is not loaded yet: what is in service goes on, unless it says that nothing is to be run.
    pub(super) fn begin(&mut self) {
        self.delivered = Delivered::Loading;
        self.paused = paused(self.delivery()).or(self.paused);
        let (good, trial) = (&self.good, &self.trial);
        let in_service = |newest: &Arc<Loaded>| {
            good.as_ref().is_some_and(|good| Arc::ptr_eq(good, newest)) || trial.as_ref().is_some_and(|(tried, _)| *tried == newest.version)
        };
        self.newest = self.newest.take().filter(in_service);
    }

    /// Whether the version that was kept is the stable one here, so that nobody needs its files.
    pub(super) fn holds(&self, kept: &Kept) -> bool {
        self.good.as_ref().is_some_and(|good| good.version == kept.version)
    }

    /// Whether nothing is known of it yet, not even which kind it claims.
    pub(super) fn is_unknown(&self) -> bool {
        self.good.is_none() && matches!(self.delivered, Delivered::Loading)
    }

    /// Takes in that somebody else has rolled versions back, or wants them to be tried again.
    pub(super) fn follow_rolled_back(&mut self, before: &[RolledBack], now: &[RolledBack]) {
        self.rolled_back.retain(|known| !before.contains(known) || now.contains(known));
        now.iter().filter(|new| !before.contains(new)).for_each(|new| self.roll_back(new.clone()));
    }

    /// The version is not to be tried again.
    pub(super) fn roll_back(&mut self, rolled_back: RolledBack) {
        self.rolled_back.retain(|known| known.version != rolled_back.version);
        self.rolled_back.push(rolled_back);
        let excess = self.rolled_back.len().saturating_sub(ROLLED_BACK);
        self.rolled_back.drain(..excess);
    }

    fn was_rolled_back(&self, version: &Version) -> Option<&RolledBack> {
        self.rolled_back.iter().find(|rolled_back| rolled_back.version == *version)
    }

    pub(super) fn settle(
        &mut self,
        name: &str,
        kept: Option<&Kept>,
        facts: &Facts,
        older_unknown: bool,
        verdict: &mut Verdict,
    ) -> Standing {
        let own = kept.filter(|kept| kept.is_of(self.delivery()));
        self.follow(own);
        if older_unknown && self.good.is_none() {
            return self.stand(None, None, kept);
        }
        let (passed, refused) = self.judge_newest(own, facts, verdict);
        let refused = match &self.delivered {
            Delivered::Loading => None,
            Delivered::Refused(refused) => Some(refused.clone()),
            Delivered::Ready => refused,
        };
        if own.is_some_and(|own| self.needs(own, passed.is_some())) {
            if self.restored.may_begin() {
                verdict.restore.push(name.to_owned());
            }
            if self.good.is_none() {
                let trouble = self.restored.trouble().map(|refusal| Refused { digest: None, refusal });
                return self.stand(None, trouble, kept);
            }
        }
        let versions = self.versions(name, passed, own, facts, &verdict.table).map(Arc::new);
        if let Some(versions) = &versions {
            verdict.table.insert(versions.stable.claim.reconciles.group_kind(), versions.clone());
        }
        self.trial = self.trial.take().filter(|_| versions.as_ref().is_some_and(|versions| versions.candidate.is_some()));
        self.stand(versions.as_deref(), refused, kept)
    }

    /// Follows what is kept of the plugin.
    fn follow(&mut self, own: Option<&Kept>) {
        let Some(own) = own else { return };
        match &self.good {
            None if self.rolled_back.is_empty() => self.rolled_back.clone_from(&own.rolled_back),
            None => {}
            // It is kept, or somebody else has found that it is no good.
            Some(good) => self.ahead &= good.version != own.version && own.rolled_back.iter().all(|other| other.version != good.version),
        }
    }

    /// Whether what was kept has to be loaded: it is neither what serves as the stable version nor what is about to.
    fn needs(&self, own: &Kept, passed: bool) -> bool {
        if self.restored.is_hopeless(passed) || self.good.as_ref().is_some_and(|good| self.ahead || good.version == own.version) {
            return false;
        }
        match (&self.delivered, &self.newest) {
            (Delivered::Loading, _) => !same_files(own, self.delivery()),
            (Delivered::Refused(_), _) | (Delivered::Ready, None) => true,
            (Delivered::Ready, Some(newest)) => newest.version != own.version,
        }
    }

    /// What serves. A version that has passed every gate and needs no trial becomes the good one.
    fn versions(&mut self, name: &str, passed: Option<Passed>, own: Option<&Kept>, facts: &Facts, table: &Table) -> Option<Versions> {
        let proven = |loaded: &Loaded| own.is_some_and(|own| own.version == loaded.version);
        let mut versions = match (passed, self.good.clone()) {
            (Some((loaded, crd_uid)), Some(good)) if can_be_tried(&good, &loaded) && !proven(&loaded) => {
                let stable = serving(name, &good, &crd_uid);
                Versions { candidate: Some(self.candidate(serving(name, &loaded, &crd_uid), &loaded)), ..Versions::only(stable) }
            }
            (Some((loaded, crd_uid)), _) => {
                let is_new = self.good.replace(loaded.clone()).is_none_or(|good| good.version != loaded.version);
                self.ahead |= is_new && own.is_some() && !proven(&loaded);
                Versions::only(serving(name, &loaded, &crd_uid))
            }
            (None, Some(good)) => match facts.crds.gate(&good.claim) {
                Gate::Open(crd_uid) if !taken(name, &good, table) => Versions::only(serving(name, &good, &crd_uid)),
                _ => return None,
            },
            (None, None) => return None,
        };
        versions.paused = self.is_paused();
        Some(versions)
    }

    fn is_paused(&self) -> bool {
        self.paused.unwrap_or_else(|| self.good.as_ref().is_some_and(|good| good.config.paused))
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

    /// The newest version where it passes every gate; else why not, where that is known.
    fn judge_newest(&self, own: Option<&Kept>, facts: &Facts, verdict: &mut Verdict) -> (Option<Passed>, Option<Refused>) {
        let Some(loaded) = &self.newest else { return (None, None) };
        let refuse = |refusal| (None, Some(Refused { digest: Some(loaded.version.digest), refusal }));
        let rolled_back = self.was_rolled_back(&loaded.version).filter(|_| self.can_do_without(loaded, own));
        if let Some(RolledBack { why, .. }) = rolled_back {
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

    /// Whether there is, or may be, another version to serve in the place of this one.
    fn can_do_without(&self, loaded: &Loaded, own: Option<&Kept>) -> bool {
        match &self.good {
            Some(good) => good.version != loaded.version,
            None if self.restored.is_loading() => true,
            None => own.is_some_and(|own| own.version != loaded.version && !self.restored.is_hopeless(false)),
        }
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
            Some(Access::Denied(missing, namespace)) => Fitness::Unfit(needs.refusal(*missing, namespace.as_deref())),
            None => Fitness::Unknown,
        };
        wanted.insert(needs);
        fitness
    }

    /// How the plugin stands. While a version is being loaded it stands as before, so that a reload is one change and not two.
    fn stand(&mut self, versions: Option<&Versions>, refused: Option<Refused>, kept: Option<&Kept>) -> Standing {
        let loading = refused.is_none() && !versions.is_some_and(|versions| self.delivered_serves(versions.newest()));
        let kind = match (versions, &self.newest) {
            (Some(versions), _) => Some(versions.stable.claim.reconciles.clone()),
            (None, newest) => newest.as_ref().map(|loaded| loaded.claim.reconciles.clone()),
        };
        let delivery = self.delivery();
        let mut standing = Standing {
            kind,
            place: delivery.place,
            uid: delivery.uid.clone(),
            version: delivery.version.clone(),
            stable: versions.map(|versions| versions.stable.clone()),
            candidate: versions.and_then(|versions| versions.candidate.clone()),
            paused: self.is_paused(),
            refused,
            loading,
            keep: self.to_keep(kept),
        };
        if let Some(before) = self.stood.take().filter(|before| loading && standing.stable.is_some() && before.uid == standing.uid) {
            // Of a delivery that has never been judged nothing is said, although an earlier version serves.
            standing.version = if before.stable.is_some() { before.version } else { String::new() };
            standing.refused = before.refused.filter(|_| before.stable.is_some());
        }
        self.stood = Some(standing.clone());
        standing
    }

    /// What is to be kept of the plugin, in case that a later host has to do without what this one knows. A folder is the business of
    /// whoever writes it. A version that was rolled back, and serves because there is nothing else, is not kept in the place of another.
    fn to_keep(&self, kept: Option<&Kept>) -> Option<Keep> {
        let good = self.good.as_ref().filter(|good| good.delivery.place == Place::ConfigMap)?;
        if self.was_rolled_back(&good.version).is_some() {
            return None;
        }
        let rolled_back = self.rolled_back.clone();
        let owner = self.delivery().uid.clone();
        let kept = kept.filter(|kept| !kept.uid.is_empty());
        let is_kept = kept.is_some_and(|kept| (&kept.owner, &kept.version, &kept.rolled_back) == (&owner, &good.version, &rolled_back));
        let is_own = |kept: &Kept| kept.is_of(self.delivery());
        let kept = kept.map(|kept| (kept.uid.clone(), is_own(kept).then(|| kept.version.clone())));
        Some(Keep { version: good.version.clone(), delivery: good.delivery.clone(), owner, rolled_back, kept, is_kept })
    }

    fn delivered_serves(&self, serving: &Serving) -> bool {
        let newest = self.newest.as_ref().filter(|_| matches!(self.delivered, Delivered::Ready));
        newest.is_some_and(|newest| newest.version == serving.version)
    }
}
