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

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    access::{Access, Needs},
    crd::{Crds, Gate},
    standing::{Refused, Standing},
};
use crate::{
    catalog::{Serving, Table},
    claim::Claim,
    object::newer,
    package::{Config, Digest, Refusal, reason},
    reconcile::Reconcile,
    source::{Delivery, Place},
};

/// A version that has passed the gates that do not depend on the cluster.
pub struct Loaded {
    /// Of its component.
    pub digest: Digest,
    /// Of its `plugin.yaml`.
    pub config_hash: String,
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

/// A version that passed every gate, and the uid of the CRD that it passed on.
type Passed = (Arc<Loaded>, Arc<str>);

/// Everything that was delivered, and what came of it.
#[derive(Default)]
pub struct Book {
    plugins: BTreeMap<String, Plugin>,
    numbers: u64,
}

struct Plugin {
    /// By place; the first is the one that counts.
    deliveries: BTreeMap<Place, Arc<Delivery>>,
    number: u64,
    candidate: Candidate,
    /// The last version that served.
    good: Option<Arc<Loaded>>,
    /// How it stood before, which stands while a new version is being loaded.
    stood: Option<Standing>,
}

enum Candidate {
    Loading,
    Refused(Refused),
    Ready(Arc<Loaded>),
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
}

impl Book {
    /// Takes in a delivery. A job, unless it is no news or is hidden by one from an earlier place.
    pub fn deliver(&mut self, delivery: Delivery) -> Option<Job> {
        let (name, place) = (delivery.name.clone(), delivery.place);
        let plugin = self.plugins.entry(name.clone()).or_insert_with(Plugin::new);
        if plugin.deliveries.get(&place).is_some_and(|known| !is_news(known, &delivery)) {
            return None;
        }
        plugin.deliveries.insert(place, Arc::new(delivery));
        let counts = plugin.deliveries.keys().next() == Some(&place);
        counts.then(|| self.job(&name)).flatten()
    }

    /// Takes in that a plugin is gone from a place. A job, where it is in another place as well.
    pub fn withdraw(&mut self, place: Place, name: &str) -> Option<Job> {
        let plugin = self.plugins.get_mut(name)?;
        let counted = plugin.deliveries.keys().next() == Some(&place);
        plugin.deliveries.remove(&place);
        if plugin.deliveries.is_empty() {
            self.plugins.remove(name);
            return None;
        }
        counted.then(|| self.job(name)).flatten()
    }

    /// The job for the delivery that counts, as a new one.
    fn job(&mut self, name: &str) -> Option<Job> {
        let plugin = self.plugins.get_mut(name)?;
        let delivery = plugin.deliveries.values().next()?.clone();
        self.numbers += 1;
        plugin.number = self.numbers;
        let ready = match std::mem::replace(&mut plugin.candidate, Candidate::Loading) {
            Candidate::Ready(loaded) => Some(loaded),
            _ => None,
        };
        let known = ready.into_iter().chain(plugin.good.clone()).collect();
        Some(Job { name: name.to_owned(), number: plugin.number, delivery, known })
    }

    /// Takes in what came of a job. False where a later delivery has overtaken it.
    pub fn finish(&mut self, name: &str, number: u64, finished: Finished) -> bool {
        let Some(plugin) = self.plugins.get_mut(name).filter(|plugin| plugin.number == number) else { return false };
        plugin.candidate = match finished {
            Ok(loaded) => Candidate::Ready(loaded),
            Err(refused) => Candidate::Refused(refused),
        };
        true
    }

    /// Jobs for the plugins that were refused for a reason of the host's own, which may have healed.
    pub fn retry(&mut self) -> Vec<Job> {
        let healing =
            |plugin: &Plugin| matches!(&plugin.candidate, Candidate::Refused(refused) if refused.refusal.reason == reason::HOST_FAILURE);
        let names: Vec<_> = self.plugins.iter().filter(|(_, plugin)| healing(plugin)).map(|(name, _)| name.clone()).collect();
        names.iter().filter_map(|name| self.job(name)).collect()
    }

    /// Decides what serves. A version that has passed every gate becomes the last good one of its plugin.
    pub fn settle(&mut self, facts: &Facts) -> Verdict {
        let mut by_age: Vec<_> = self.plugins.iter_mut().collect();
        by_age.sort_by_key(|(_, plugin)| plugin.delivery().seniority());
        let mut verdict = Verdict { table: Table::new(), plugins: BTreeMap::new(), wanted: BTreeSet::new() };
        // A restart must not give a kind to a younger plugin because the older one takes longer to load.
        let mut older_unknown = facts.start == Start::Listing;
        for (name, plugin) in by_age {
            let standing = plugin.settle(name, facts, older_unknown, &mut verdict);
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

/// Whether a version can serve now.
enum Fitness {
    Fit(Arc<str>),
    Unknown,
    Unfit(Refusal),
}

impl Plugin {
    fn new() -> Self {
        Self { deliveries: BTreeMap::new(), number: 0, candidate: Candidate::Loading, good: None, stood: None }
    }

    fn delivery(&self) -> &Delivery {
        self.deliveries.values().next().expect("a plugin without deliveries is removed")
    }

    /// Whether nothing is known of it yet, not even which kind it claims.
    fn is_unknown(&self) -> bool {
        self.good.is_none() && matches!(self.candidate, Candidate::Loading)
    }

    fn settle(&mut self, name: &str, facts: &Facts, older_unknown: bool, verdict: &mut Verdict) -> Standing {
        let (passed, refused) = if older_unknown && self.good.is_none() { (None, None) } else { self.judge_candidate(facts, verdict) };
        let mut serving = None;
        if let Some((loaded, crd_uid)) = passed {
            serving = Some(serve(name, &loaded, crd_uid, &mut verdict.table));
            self.good = Some(loaded);
        } else if let Some(good) = self.good.clone() {
            serving = match facts.crds.gate(&good.claim.reconciles) {
                Gate::Open(crd_uid) if !taken(name, &good, &verdict.table) => Some(serve(name, &good, crd_uid, &mut verdict.table)),
                _ => None,
            };
        }
        self.stand(serving, refused)
    }

    /// The candidate where it passes every gate; else why not, where that is known.
    fn judge_candidate(&self, facts: &Facts, verdict: &mut Verdict) -> (Option<Passed>, Option<Refused>) {
        let loaded = match &self.candidate {
            Candidate::Loading => return (None, None),
            Candidate::Refused(refused) => return (None, Some(refused.clone())),
            Candidate::Ready(loaded) => loaded,
        };
        let refuse = |refusal| (None, Some(Refused { digest: Some(loaded.digest), refusal }));
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

    /// The gates that depend on the cluster. A version that serves already is not asked for its permissions again.
    fn fitness(&self, loaded: &Arc<Loaded>, facts: &Facts, wanted: &mut BTreeSet<Needs>) -> Fitness {
        let crd_uid = match facts.crds.gate(&loaded.claim.reconciles) {
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
    fn stand(&mut self, serving: Option<Arc<Serving>>, refused: Option<Refused>) -> Standing {
        let loading = refused.is_none() && !self.candidate_serves(serving.as_deref());
        let kind = match (&serving, &self.candidate) {
            (Some(serving), _) => Some(serving.claim.reconciles.clone()),
            (None, Candidate::Ready(loaded)) => Some(loaded.claim.reconciles.clone()),
            (None, _) => None,
        };
        let delivery = self.delivery();
        let mut standing = Standing {
            kind,
            place: delivery.place,
            uid: delivery.uid.clone(),
            version: delivery.version.clone(),
            serving,
            refused,
            loading,
        };
        if let Some(before) = self.stood.take().filter(|before| loading && standing.serving.is_some() && before.uid == standing.uid) {
            standing.version = before.version;
            standing.refused = before.refused;
        }
        self.stood = Some(standing.clone());
        standing
    }

    fn candidate_serves(&self, serving: Option<&Serving>) -> bool {
        match (&self.candidate, serving) {
            (Candidate::Ready(loaded), Some(serving)) => loaded.digest == serving.digest && loaded.config_hash == serving.config_hash,
            _ => false,
        }
    }
}

/// The older plugin that has the kind, if there is one: the table holds only what older ones serve.
fn owner<'t>(loaded: &Loaded, table: &'t Table) -> Option<&'t str> {
    table.get(&loaded.claim.reconciles.group_kind()).map(|serving| serving.name.as_str())
}

fn taken(name: &str, loaded: &Loaded, table: &Table) -> bool {
    owner(loaded, table).is_some_and(|owner| owner != name)
}

fn serve(name: &str, loaded: &Loaded, crd_uid: Arc<str>, table: &mut Table) -> Arc<Serving> {
    let serving = Arc::new(Serving {
        name: name.to_owned(),
        digest: loaded.digest,
        config_hash: loaded.config_hash.clone(),
        claim: loaded.claim.clone(),
        pace: loaded.config.pace(),
        timeout: loaded.config.timeout,
        paused: loaded.config.paused,
        crd_uid,
        handler: loaded.handler.clone(),
    });
    table.insert(loaded.claim.reconciles.group_kind(), serving.clone());
    serving
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use proptest::prelude::*;

    use super::*;
    use crate::{
        loader::crd::tests as crd,
        reconcile::{Next, Outcome, Request},
    };

    const MAP: Place = Place::ConfigMap;

    /// A plugin in a ConfigMap: its age is the order of the names.
    fn delivery(name: &str, version: u32) -> Delivery {
        let (uid, created) = (Some(format!("uid of {name}")), format!("2026-01-01T00:00:00Z {name}"));
        Delivery { place: MAP, name: name.into(), uid, created, version: version.to_string(), files: vec![] }
    }

    fn version(code: &str) -> Arc<Loaded> {
        let handler = |_: Request| async { Ok(Outcome::just(Next::AwaitChange)) }.boxed();
        let claim = Arc::new(Claim::full());
        let digest = Digest::of(code.as_bytes());
        Arc::new(Loaded { digest, config_hash: String::new(), config: Config::default(), claim, handler: Arc::new(handler) })
    }

    fn refused(code: &str) -> Finished {
        Err(Refused { digest: Some(Digest::of(code.as_bytes())), refusal: Refusal::new(reason::COMPILE_FAILED, "It is broken.") })
    }

    /// A cluster with the definition and all permissions.
    fn facts() -> Facts {
        let mut facts = Facts::default();
        facts.crds.apply(&crd::object(&crd::definition("crd")));
        facts.crds.set_synced();
        facts.access.insert(Needs::of(&Claim::full()), Access::Granted);
        facts
    }

    impl Book {
        fn load(&mut self, name: &str, number: u32, finished: Finished) {
            let job = self.deliver(delivery(name, number)).expect("a job");
            assert!(self.finish(name, job.number, finished));
        }

        /// The plugin and the code that serve the kind.
        fn serving(&mut self, facts: &Facts) -> Option<(String, Digest)> {
            let table = self.settle(facts).table;
            assert!(table.len() <= 1);
            table.into_values().next().map(|serving| (serving.name.clone(), serving.digest))
        }

        fn reason(&mut self, name: &str, facts: &Facts) -> Option<&'static str> {
            self.settle(facts).plugins[name].refused.as_ref().map(|refused| refused.refusal.reason)
        }
    }

    fn code(name: &str, code: &str) -> Option<(String, Digest)> {
        Some((name.to_owned(), Digest::of(code.as_bytes())))
    }

    #[test]
    fn the_last_delivery_wins_whichever_is_loaded_first() {
        let mut book = Book::default();
        let slow = book.deliver(delivery("p", 1)).expect("a job");
        let quick = book.deliver(delivery("p", 2)).expect("a job");
        assert!(book.finish("p", quick.number, Ok(version("2"))));
        assert!(!book.finish("p", slow.number, Ok(version("1"))));
        assert_eq!(book.serving(&facts()), code("p", "2"));
    }

    #[test]
    fn a_delivery_that_is_known_or_older_is_no_job() {
        let mut book = Book::default();
        book.load("p", 10, Ok(version("1")));
        assert!(book.deliver(delivery("p", 10)).is_none());
        assert!(book.deliver(delivery("p", 9)).is_none());
        let recreated = Delivery { uid: Some("another".into()), ..delivery("p", 9) };
        assert!(book.deliver(recreated).is_some());
    }

    #[test]
    fn a_refused_version_keeps_the_last_good_one_and_says_why() {
        let mut book = Book::default();
        book.load("p", 1, Ok(version("1")));
        assert_eq!(book.serving(&facts()), code("p", "1"));
        book.load("p", 2, refused("2"));
        assert_eq!(book.serving(&facts()), code("p", "1"));
        let standing = book.settle(&facts()).plugins.remove("p").expect("stands");
        assert_eq!(standing.refused.expect("refused").digest, Some(Digest::of(b"2")));
        let back = book.deliver(delivery("p", 3)).expect("a job");
        assert_eq!(back.known.len(), 1, "the good version need not be loaded again");
    }

    #[test]
    fn while_a_version_is_loaded_the_plugin_stands_as_before() {
        let mut book = Book::default();
        book.deliver(delivery("p", 1));
        assert!(book.settle(&facts()).plugins["p"].loading);
        let job = book.deliver(delivery("p", 2)).expect("a job");
        book.finish("p", job.number, Ok(version("1")));
        assert!(!book.settle(&facts()).plugins["p"].loading);
        book.deliver(delivery("p", 3));
        let standing = book.settle(&facts()).plugins.remove("p").expect("stands");
        assert_eq!((standing.loading, standing.version.as_str(), standing.serving.is_some()), (true, "2", true));
    }

    #[test]
    fn a_withdrawn_plugin_is_gone_and_a_delivered_one_is_back() {
        let mut book = Book::default();
        book.load("p", 1, Ok(version("1")));
        let in_flight = book.deliver(delivery("p", 2)).expect("a job");
        assert!(book.withdraw(MAP, "p").is_none());
        assert!(!book.finish("p", in_flight.number, Ok(version("2"))));
        assert_eq!(book.serving(&facts()), None);
        book.load("p", 3, Ok(version("1")));
        assert_eq!(book.serving(&facts()), code("p", "1"));
    }

    #[test]
    fn the_oldest_plugin_has_the_kind_and_the_next_takes_over() {
        let mut book = Book::default();
        book.load("b", 1, Ok(version("b")));
        assert_eq!(book.serving(&facts()), code("b", "b"));
        let older = book.deliver(delivery("a", 2)).expect("a job");
        assert_eq!(book.serving(&facts()), code("b", "b"), "until the older one can serve");
        book.finish("a", older.number, Ok(version("a")));
        assert_eq!(book.serving(&facts()), code("a", "a"));
        let told = book.settle(&facts()).plugins.remove("b").expect("stands");
        assert!(told.serving.is_none() && told.refused.expect("refused").refusal.message.contains("\"a\""));
        book.withdraw(MAP, "a");
        assert_eq!(book.serving(&facts()), code("b", "b"));
        assert_eq!(book.reason("b", &facts()), None);
    }

    #[test]
    fn at_the_start_a_younger_plugin_waits_until_the_older_ones_are_known() {
        let mut book = Book::default();
        let mut facts = Facts { start: Start::Listing, ..facts() };
        book.load("b", 1, Ok(version("b")));
        assert_eq!(book.serving(&facts), None);
        assert!(book.settle(&facts).plugins["b"].loading);
        let older = book.deliver(delivery("a", 2)).expect("a job");
        facts.start = Start::Loading;
        assert_eq!(book.serving(&facts), None);
        book.finish("a", older.number, Ok(version("a")));
        assert_eq!(book.serving(&facts), code("a", "a"));
        book.withdraw(MAP, "a");
        assert_eq!(book.serving(&facts), code("b", "b"));
        book.deliver(delivery("a", 3));
        assert_eq!(book.serving(&facts), code("b", "b"), "what serves goes on");
    }

    #[test]
    fn a_plugin_starts_with_its_definition_stops_without_it_and_starts_again() {
        let mut book = Book::default();
        book.load("p", 1, Ok(version("1")));
        let mut facts = facts();
        facts.crds.remove("ks.g.io");
        assert_eq!((book.serving(&facts), book.reason("p", &facts)), (None, Some(reason::WAITING_FOR_CRD)));
        for uid in ["first", "second"] {
            facts.crds.apply(&crd::object(&crd::definition(uid)));
            let table = book.settle(&facts).table;
            assert_eq!(table.values().next().map(|serving| &*serving.crd_uid), Some(uid));
            facts.crds.remove("ks.g.io");
            assert_eq!(book.serving(&facts), None);
        }
    }

    #[test]
    fn permissions_are_asked_for_before_a_version_serves_and_not_after() {
        let mut book = Book::default();
        book.load("p", 1, Ok(version("1")));
        let mut facts = facts();
        facts.access.clear();
        let needs = Needs::of(&Claim::full());
        let verdict = book.settle(&facts);
        assert!(verdict.table.is_empty() && verdict.wanted.contains(&needs) && verdict.plugins["p"].loading);
        let missing = needs.permissions().nth(1).expect("watch");
        facts.access.insert(needs.clone(), Access::Denied(missing));
        assert_eq!((book.serving(&facts), book.reason("p", &facts)), (None, Some(reason::FORBIDDEN)));
        facts.access.insert(needs, Access::Granted);
        assert_eq!(book.serving(&facts), code("p", "1"));
        facts.access.clear();
        assert!(book.settle(&facts).wanted.is_empty());
        assert_eq!(book.serving(&facts), code("p", "1"));
    }

    #[test]
    fn a_new_version_that_the_definition_does_not_serve_keeps_the_good_one() {
        let mut book = Book::default();
        book.load("p", 1, Ok(version("1")));
        assert!(book.serving(&facts()).is_some());
        let mut claim = Claim::full();
        claim.reconciles.version = "v2".into();
        let next = Loaded { claim: Arc::new(claim), ..Arc::into_inner(version("2")).expect("one owner") };
        book.load("p", 2, Ok(Arc::new(next)));
        assert_eq!((book.serving(&facts()), book.reason("p", &facts())), (code("p", "1"), Some(reason::VERSION_NOT_SERVED)));
    }

    #[test]
    fn a_folder_hides_a_config_map_of_the_same_name_for_as_long_as_it_has_the_plugin() {
        let mut book = Book::default();
        book.load("p", 1, Ok(version("map")));
        let folder = Delivery { place: Place::Directory, uid: None, ..delivery("p", 1) };
        let job = book.deliver(folder).expect("a job");
        book.finish("p", job.number, Ok(version("folder")));
        assert!(book.deliver(delivery("p", 2)).is_none());
        assert_eq!(book.serving(&facts()), code("p", "folder"));
        let job = book.withdraw(Place::Directory, "p").expect("a job");
        assert_eq!(job.delivery.version, "2");
    }

    #[test]
    fn only_what_failed_for_the_hosts_own_reasons_is_tried_again() {
        let mut book = Book::default();
        let failed = Refused { digest: None, refusal: Refusal::new(reason::HOST_FAILURE, "The disk is full.") };
        book.load("a", 1, refused("1"));
        book.load("b", 1, Err(failed));
        assert_eq!(book.retry().into_iter().map(|job| job.name).collect::<Vec<_>>(), ["b"]);
        assert!(book.retry().is_empty());
    }

    proptest! {
        #[test]
        fn once_a_plugin_serves_no_delivery_or_failure_stops_it(steps in prop::collection::vec((0..3_u8, any::<bool>()), 1..40)) {
            let mut book = Book::default();
            book.load("p", 1, Ok(version("1")));
            prop_assert!(book.serving(&facts()).is_some());
            let mut jobs = vec![];
            let mut denied = facts();
            let missing = Needs::of(&Claim::full()).permissions().next().expect("list");
            denied.access.insert(Needs::of(&Claim::full()), Access::Denied(missing));
            for (at, (step, good)) in steps.into_iter().enumerate() {
                let at = u32::try_from(at).expect("few");
                match step {
                    0 => jobs.extend(book.deliver(delivery("p", at + 2))),
                    1 => if let Some(job) = jobs.pop() {
                        book.finish("p", job.number, if good { Ok(version(&at.to_string())) } else { refused("bad") });
                    },
                    _ => jobs.reverse(),
                }
                let granted = facts();
                let serving = book.serving(if good { &denied } else { &granted });
                prop_assert!(serving.is_some());
            }
        }

        #[test]
        fn the_kind_always_belongs_to_the_oldest_that_is_loaded(steps in prop::collection::vec((0..4_u8, any::<bool>()), 1..40)) {
            let mut book = Book::default();
            let mut loaded = BTreeSet::new();
            for (at, (plugin, there)) in steps.into_iter().enumerate() {
                let name = format!("p{plugin}");
                if there {
                    book.load(&name, u32::try_from(at).expect("few") + 1, Ok(version(&name)));
                    loaded.insert(name);
                } else {
                    book.withdraw(MAP, &name);
                    loaded.remove(&name);
                }
                prop_assert_eq!(book.serving(&facts()).map(|(name, _)| name), loaded.first().cloned());
            }
        }
    }
}
