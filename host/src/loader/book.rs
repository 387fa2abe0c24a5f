//! The loader's decisions, without any I/O: what was delivered, what came of it, and what serves.
//!
//! # Expected flow
//! [`Book::deliver`] and [`Book::withdraw`] say what has to be loaded; [`Book::finish`] takes what came of it. After anything has changed
//! [`Book::settle`] says what serves, how each plugin stands and which permissions have to be asked for.
//!
//! # Guarantees
//! The last delivery wins: what came of an earlier one is ignored. What serves goes on serving until a later version has passed every
//! gate, or the plugin is withdrawn, or its CustomResourceDefinition is gone, or an older plugin takes its kind over. One kind has one
//! plugin, the oldest of those that can serve it.
//!
//! A version that follows a good one is on [trial](crate::trial) first, and one that failed its trial is not served again unless
//! there is nothing else. What was good before a restart is loaded from where it was [kept](Kept), as soon as it is needed; where two
//! hosts differ on which version is good, what was kept counts. A trial goes on while a later version is loaded, and if that is refused.
//!
//! Content that is the same is no news, whatever else was written to its ConfigMap. A pause holds from the moment that it is read, before
//! anything is loaded.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use self::plugin::{Delivered, Plugin};
use super::{
    access::{Access, Needs},
    crd::Crds,
    standing::{Refused, Standing},
};
use crate::{
    catalog::{Judged, Table},
    claim::Claim,
    object::newer,
    package::{Config, Version, reason},
    reconcile::Reconcile,
    source::{Delivery, Kept, Place, RolledBack},
    trial::Judgement,
};

mod plugin;
mod restored;
mod version;

/// A version that has passed the gates that do not depend on the cluster.
pub struct Loaded {
    /// Which one.
    pub version: Version,
    /// As it was delivered.
    pub delivery: Arc<Delivery>,
    /// What its `plugin.yaml` says.
    pub config: Config,
    /// What it said that it is.
    pub claim: Arc<Claim>,
    /// Its handler.
    pub handler: Arc<dyn Reconcile>,
}

/// A delivery that has to be loaded.
pub struct Job {
    /// The plugin.
    pub name: String,
    /// Tells deliveries apart.
    pub number: u64,
    /// The content.
    pub delivery: Arc<Delivery>,
    /// Versions that need not be loaded again.
    pub known: Vec<Arc<Loaded>>,
}

/// What came of a [`Job`]: a version, or the refusal with the digest as far as it came to one.
pub type Finished = Result<Arc<Loaded>, Refused>;

/// Everything that was delivered, and what came of it.
#[derive(Default)]
pub struct Book {
    plugins: BTreeMap<String, Plugin>,
    /// What was kept of each plugin, with or without one of that name.
    kept: BTreeMap<String, Kept>,
    /// Plugins that have been gone for some time, with what was kept of them.
    gone: BTreeSet<String>,
    numbers: u64,
}

/// What is known beside the deliveries.
#[derive(Default)]
pub struct Facts {
    /// How far the start of the host has come.
    pub start: Start,
    /// The definitions.
    pub crds: Crds,
    /// Answers about permissions.
    pub access: BTreeMap<Needs, Access>,
}

/// How far the start of the host has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Start {
    /// Not every source has told what it has.
    Listing,
    /// Every plugin is known, and some have yet to be loaded for the first time.
    Loading,
    /// The start is over, or has taken too long to be waited for.
    #[default]
    Over,
}

/// What follows from everything that is known.
pub struct Verdict {
    /// What serves.
    pub table: Table,
    /// How each plugin stands.
    pub plugins: BTreeMap<String, Standing>,
    /// Permissions that have to be known before a version can serve.
    pub wanted: BTreeSet<Needs>,
    /// Plugins whose kept version is needed: see [`Book::restore`].
    pub restore: Vec<String>,
}

impl Book {
    /// Takes in a delivery. A job, unless it is no news or is hidden by one from an earlier place.
    pub fn deliver(&mut self, delivery: Delivery) -> Option<Job> {
        let (name, place) = (delivery.name.clone(), delivery.place);
        if let Some(kept) = self.kept.get_mut(&name).filter(|kept| kept.owner.is_none() && !self.plugins.contains_key(&name)) {
            kept.owner.clone_from(&delivery.uid);
        }
        let plugin = self.plugins.entry(name.clone()).or_default();
        let known = plugin.deliveries.get(&place);
        if known.is_some_and(|known| !is_news(known, &delivery)) {
            return None;
        }
        let same_content = known.is_some_and(|known| known.files == delivery.files);
        plugin.deliveries.insert(place, Arc::new(delivery));
        let counts = plugin.deliveries.keys().next() == Some(&place);
        (counts && !same_content).then(|| self.job(&name)).flatten()
    }

    /// Whether a plugin is known from this place.
    pub fn knows(&self, place: Place, name: &str) -> bool {
        self.plugins.get(name).is_some_and(|plugin| plugin.deliveries.contains_key(&place))
    }

    /// Takes in that a plugin is gone from a place. A job, where it is in another place as well.
    pub fn withdraw(&mut self, place: Place, name: &str) -> Option<Job> {
        let plugin = self.plugins.get_mut(name)?;
        let counted = plugin.deliveries.keys().next() == Some(&place);
        let delivery = plugin.deliveries.remove(&place)?;
        if plugin.deliveries.is_empty() {
            let good = self.plugins.remove(name).and_then(|plugin| plugin.good);
            self.remember(name, &delivery, good.as_deref());
            return None;
        }
        counted.then(|| self.job(name)).flatten()
    }

    /// What was kept of a plugin that is gone waits for the next one of its name, which may be the same under another uid, as
    /// `kubectl replace --force` makes it.
    fn remember(&mut self, name: &str, delivery: &Delivery, good: Option<&Loaded>) {
        let Some(kept) = self.kept.get_mut(name).filter(|kept| kept.is_of(delivery)) else { return };
        if let Some(good) = good {
            (kept.version, kept.files) = (good.version.clone(), good.delivery.files.clone());
        }
        kept.owner = None;
    }

    /// The job for the delivery that counts, as a new one.
    fn job(&mut self, name: &str) -> Option<Job> {
        let plugin = self.plugins.get_mut(name)?;
        let delivery = plugin.deliveries.values().next()?.clone();
        self.numbers += 1;
        plugin.number = self.numbers;
        plugin.begin();
        let known = plugin.newest.iter().chain(&plugin.good).cloned().collect();
        Some(Job { name: name.to_owned(), number: plugin.number, delivery, known })
    }

    /// Takes in what came of a job. False where a later delivery has overtaken it.
    pub fn finish(&mut self, name: &str, number: u64, finished: Finished) -> bool {
        let Some(plugin) = self.plugins.get_mut(name) else { return false };
        if plugin.restored.is_loaded_by(number) {
            let loaded = plugin.restored.finish(name, finished);
            plugin.good = loaded.filter(|_| plugin.good.is_none() || !plugin.ahead).or(plugin.good.take());
            return true;
        }
        if plugin.number != number {
            return false;
        }
        plugin.delivered = match finished {
            Ok(loaded) => {
                plugin.newest = Some(loaded);
                Delivered::Ready
            }
            Err(refused) => Delivered::Refused(refused),
        };
        true
    }

    /// Takes in what is kept of a plugin now.
    pub fn keep(&mut self, kept: Kept) {
        if let Some(plugin) = self.plugins.get_mut(&kept.name) {
            plugin.restored.observe(&kept.uid);
            // Only a change says something: by the leader, or by hand to have a version tried again.
            if let Some(before) = self.kept.get(&kept.name) {
                plugin.follow_rolled_back(&before.rolled_back, &kept.rolled_back);
            }
        }
        self.kept.insert(kept.name.clone(), kept);
    }

    /// Takes in that what was kept is gone. If the plugin is too, it is remembered for a while.
    pub fn lose(&mut self, uid: &str) {
        self.kept.values_mut().filter(|kept| kept.uid == uid && kept.owner.is_none()).for_each(|kept| kept.uid.clear());
        self.kept.retain(|_, kept| kept.uid != uid);
    }

    /// Forgets what was kept of plugins that were gone the last time too.
    fn forget_gone(&mut self) {
        let is_gone = |kept: &Kept| kept.owner.is_none() && kept.uid.is_empty();
        self.kept.retain(|name, kept| !(is_gone(kept) && self.gone.contains(name)));
        self.gone = self.kept.iter().filter(|(_, kept)| is_gone(kept)).map(|(name, _)| name.clone()).collect();
    }

    /// Whether the kept version of a plugin is being loaded.
    pub fn is_restoring(&self, name: &str) -> bool {
        self.plugins.get(name).is_some_and(|plugin| plugin.restored.is_loading())
    }

    /// The job for the kept version of a plugin.
    pub fn restore(&mut self, name: &str) -> Option<Job> {
        let (plugin, kept) = (self.plugins.get_mut(name)?, self.kept.get(name)?);
        self.numbers += 1;
        plugin.restored.begin(self.numbers, &kept.uid);
        let delivery = Delivery { files: kept.files.clone(), ..plugin.delivery().clone() };
        Some(Job { name: name.to_owned(), number: self.numbers, delivery: Arc::new(delivery), known: Vec::new() })
    }

    /// Takes in how a trial ended. False where it was about another version than the one on trial now.
    pub fn judge(&mut self, judged: Judged) -> bool {
        let Judged { name, version, judgement } = judged;
        let Some(plugin) = self.plugins.get_mut(&name) else { return false };
        if plugin.trial.as_ref().is_none_or(|(tried, _)| *tried != version) {
            return false;
        }
        plugin.trial = None;
        match judgement {
            Judgement::Passed => {
                plugin.good = plugin.newest.clone().filter(|newest| newest.version == version).or(plugin.good.take());
                plugin.ahead = true;
            }
            Judgement::Failed(why) => plugin.roll_back(RolledBack { version, why }),
        }
        true
    }

    /// Jobs for the plugins that were refused for a reason of the host's own, which may have healed.
    pub fn retry(&mut self) -> Vec<Job> {
        self.plugins.values_mut().for_each(|plugin| plugin.restored.retry());
        self.forget_gone();
        let healing =
            |plugin: &Plugin| matches!(&plugin.delivered, Delivered::Refused(refused) if refused.refusal.reason == reason::HOST_FAILURE);
        let names: Vec<_> = self.plugins.iter().filter(|(_, plugin)| healing(plugin)).map(|(name, _)| name.clone()).collect();
        names.iter().filter_map(|name| self.job(name)).collect()
    }

    /// Decides what serves. A version that has passed every gate becomes the last good one of its plugin.
    pub fn settle(&mut self, facts: &Facts) -> Verdict {
        let mut by_age: Vec<_> = self.plugins.iter_mut().collect();
        by_age.sort_by_key(|(_, plugin)| plugin.delivery().seniority());
        let mut verdict = Verdict { table: Table::new(), plugins: BTreeMap::new(), wanted: BTreeSet::new(), restore: Vec::new() };
        // A restart must not give a kind to a younger plugin because the older one takes longer to load.
        let mut older_unknown = facts.start == Start::Listing;
        for (name, plugin) in by_age {
            let standing = plugin.settle(name, self.kept.get(name), facts, older_unknown, &mut verdict);
            // Its content is not needed again: what is good stays.
            if let Some(kept) = self.kept.get_mut(name).filter(|kept| plugin.holds(kept)) {
                kept.files = Vec::new();
            }
            older_unknown |= facts.start == Start::Loading && plugin.is_unknown();
            verdict.plugins.insert(name.clone(), standing);
        }
        verdict
    }
}

/// Whether a delivery differs from the one known, and is not an older one of the same object that was seen late.
fn is_news(known: &Delivery, delivery: &Delivery) -> bool {
    let same_object = known.uid == delivery.uid && known.uid.is_some();
    if same_object { newer(&delivery.version, &known.version) } else { (&known.uid, &known.version) != (&delivery.uid, &delivery.version) }
}

#[cfg(test)]
mod tests;
