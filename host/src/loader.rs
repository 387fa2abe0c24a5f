//! Takes plugins from their sources through their gates into the catalog, and keeps the last good version of each.
//!
//! # Expected flow
//! Every replica runs a loader, so that a standby holds compiled plugins. A delivery is opened (size, digest, `plugin.yaml`), prepared
//! by the runtime (known world, compiled in a child process, described in a trial instance, its claim checked); that is done for
//! several plugins at once and again for the last delivery only. Then the cluster is asked: does the CustomResourceDefinition serve the
//! claimed version with a status, and may the host's account watch and write it? What has passed is swapped in.
//!
//! # Guarantees
//! See [`book`]: the last delivery wins, a failure keeps the last good version, one kind has one plugin. What is missing in the cluster
//! is found by watching the definitions, and a permission by asking once in 10 s: nothing has to be touched for a plugin to go on.
//!
//! # Caveats
//! The stable version of a plugin from a folder is kept in memory alone; that of one from a ConfigMap is [kept](crate::keep).

use std::{
    collections::{BTreeMap, BTreeSet},
    panic::AssertUnwindSafe,
    pin::pin,
    sync::Arc,
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture};
use tokio::{
    sync::{Semaphore, mpsc, watch},
    task::{AbortHandle, JoinSet},
    time::MissedTickBehavior,
};
use tracing::{info, warn};

pub use self::standing::{Keep, Refused, Standing, Standings};
use self::{
    access::{Access, Ask, Needs},
    book::{Book, Facts, Finished, Job, Loaded, Start},
};
use crate::{
    catalog::{Candidate, Catalog, Judged},
    claim::Claim,
    package::{self, Package, Refusal, reason},
    reconcile::Reconcile,
    source::{Change, Content, Delivery, Place},
};

pub mod access;
mod book;
mod crd;
mod standing;

/// How often a missing permission is asked for again, and what failed for the host's own reasons is tried again.
const RETRY: Duration = Duration::from_secs(10);

/// How long a plugin may wait at the start for an older one that may claim the same kind.
const HEAD_START: Duration = Duration::from_secs(10);

/// How many deliveries are read and prepared at a time: each is held in memory meanwhile, decompressed.
const AT_ONCE: usize = 4;
/// After so long, such as while its component is compiled, one stands in no other's way.
const TURN: Duration = Duration::from_millis(500);

/// The gates that need the component: what it claims, and its handler.
pub type Prepare = Arc<dyn Fn(Arc<Package>) -> BoxFuture<'static, Result<Prepared, Refusal>> + Send + Sync>;

/// A component that was compiled and described.
pub struct Prepared {
    /// What it said that it is, checked.
    pub claim: Arc<Claim>,
    /// Its handler under the settings and limits of the package.
    pub handler: Arc<dyn Reconcile>,
}

/// See the module.
pub struct Loader {
    prepare: Prepare,
    ask: Ask,
    catalog: Catalog,
    judgements: mpsc::UnboundedReceiver<Judged>,
    standings: watch::Sender<Arc<Standings>>,
    book: Book,
    facts: Facts,
    unsynced: BTreeSet<Place>,
    work: JoinSet<Done>,
    turns: Arc<Semaphore>,
    loading: BTreeMap<String, AbortHandle>,
    /// Deliveries of the start that are loaded once it is known what was kept: that comes first where it is needed, as a cold cache has
    /// one compiled after the other.
    waiting: BTreeMap<String, Job>,
    asking: BTreeSet<Needs>,
    unanswered: BTreeSet<Needs>,
}

/// What a task of the loader brings back.
enum Done {
    Loaded { name: String, number: u64, finished: Finished },
    Asked { needs: Needs, answer: Result<Access, String> },
}

impl Loader {
    /// A loader that waits for these sources before it is warm.
    pub fn new(prepare: Prepare, ask: Ask, sources: impl IntoIterator<Item = Place>) -> Self {
        let (catalog, judgements) = Catalog::new();
        Self {
            prepare,
            ask,
            catalog,
            judgements,
            standings: watch::Sender::new(Arc::default()),
            book: Book::default(),
            facts: Facts::default(),
            unsynced: sources.into_iter().collect(),
            work: JoinSet::new(),
            turns: Arc::new(Semaphore::new(AT_ONCE)),
            loading: BTreeMap::new(),
            waiting: BTreeMap::new(),
            asking: BTreeSet::new(),
            unanswered: BTreeSet::new(),
        }
    }

    /// What serves.
    pub fn catalog(&self) -> Catalog {
        self.catalog.clone()
    }

    /// How each plugin stands.
    pub fn standings(&self) -> watch::Receiver<Arc<Standings>> {
        self.standings.subscribe()
    }

    /// Loads until it is dropped, or until all sources are gone. `definitions` are the changes of an informer on
    /// CustomResourceDefinitions.
    pub async fn run(
        mut self,
        mut changes: mpsc::UnboundedReceiver<Change>,
        mut definitions: mpsc::UnboundedReceiver<crate::watch::Change>,
    ) {
        let mut head_start = std::pin::pin!(tokio::time::sleep(HEAD_START));
        self.facts.start = Start::Listing;
        let mut retry = tokio::time::interval(RETRY);
        retry.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let matters = tokio::select! {
                change = changes.recv() => match change {
                    Some(change) => self.take_change(change),
                    None => return,
                },
                Some(change) = definitions.recv() => self.take_definition(change),
                Some(judged) = self.judgements.recv() => self.book.judge(judged),
                Some(done) = self.work.join_next() => done.is_ok_and(|done| self.take_done(done)),
                _ = retry.tick() => self.try_again(),
                () = &mut head_start, if self.facts.start != Start::Over => {
                    self.facts.start = Start::Over;
                    true
                }
            };
            if matters {
                self.settle();
            }
        }
    }

    fn take_change(&mut self, change: Change) -> bool {
        let job = match change {
            Change::Delivered(delivery) => self.book.deliver(delivery),
            // The name may also be that of a ConfigMap in which a stable version is kept.
            Change::Withdrawn { place, name } if !self.book.knows(place, &name) => None,
            Change::Withdrawn { place, name } => {
                info!(plugin = name, ?place, "plugin withdrawn");
                self.abort(&name);
                self.book.withdraw(place, &name)
            }
            Change::Kept(kept) => {
                self.book.keep(kept);
                None
            }
            Change::Lost(uid) => {
                self.book.lose(&uid);
                None
            }
            Change::Synced(place) => {
                self.unsynced.remove(&place);
                if self.unsynced.is_empty() && self.facts.start == Start::Listing {
                    self.facts.start = Start::Loading;
                }
                None
            }
        };
        match job {
            Some(job) if self.facts.start == Start::Listing => drop(self.waiting.insert(job.name.clone(), job)),
            job => job.into_iter().for_each(|job| self.start(job)),
        }
        true
    }

    fn take_definition(&mut self, change: crate::watch::Change) -> bool {
        let crds = &mut self.facts.crds;
        match change {
            crate::watch::Change::Applied { new, .. } => crds.apply(&new),
            crate::watch::Change::Deleted(object) => crds.remove(&object.key.name),
            crate::watch::Change::Synced => crds.set_synced(),
        }
    }

    fn take_done(&mut self, done: Done) -> bool {
        match done {
            Done::Loaded { name, number, finished } => {
                let counts = self.book.finish(&name, number, finished);
                if counts {
                    self.loading.remove(&name);
                }
                counts
            }
            Done::Asked { needs, answer } => {
                self.asking.remove(&needs);
                match answer {
                    Ok(access) => self.facts.access.insert(needs, access.clone()) != Some(access),
                    Err(error) => {
                        warn!(?needs, error, "permissions could not be asked for");
                        self.unanswered.insert(needs);
                        false
                    }
                }
            }
        }
    }

    fn try_again(&mut self) -> bool {
        for job in self.book.retry() {
            self.start(job);
        }
        self.unanswered.clear();
        let denied = self.facts.access.iter().filter_map(|(needs, access)| match access {
            Access::Denied(missing, _) => Some((needs.clone(), Some(*missing))),
            Access::Granted => None,
        });
        for (needs, first) in denied.collect::<Vec<_>>() {
            self.ask(needs, first);
        }
        true
    }

    /// Loads a delivery; what is still being loaded of the same plugin is given up.
    fn start(&mut self, job: Job) {
        self.abort(&job.name);
        let name = job.name.clone();
        let task = self.work.spawn(finish(job, self.prepare.clone(), self.turns.clone()));
        self.loading.insert(name, task);
    }

    /// Starts what waits for nothing any more.
    fn start_waiting(&mut self) {
        if self.facts.start == Start::Listing {
            return;
        }
        let book = &self.book;
        let due: Vec<Job> = self.waiting.extract_if(.., |name, _| !book.is_restoring(name)).map(|(_, job)| job).collect();
        due.into_iter().for_each(|job| self.start(job));
    }

    fn abort(&mut self, name: &str) {
        self.waiting.remove(name);
        if let Some(task) = self.loading.remove(name) {
            task.abort();
        }
    }

    fn ask(&mut self, needs: Needs, first: Option<access::Permission>) {
        if !self.asking.insert(needs.clone()) {
            return;
        }
        let answer = (self.ask)(needs.clone(), first);
        self.work.spawn(async move { Done::Asked { needs, answer: answer.await } });
    }

    fn settle(&mut self) {
        let book::Verdict { table, plugins, wanted, restore } = self.book.settle(&self.facts);
        for name in restore {
            if let Some(job) = self.book.restore(&name) {
                self.work.spawn(finish(job, self.prepare.clone(), self.turns.clone()));
            }
        }
        self.start_waiting();
        // An answer is good for the version that it was asked for; permissions may be others by the time of the next one.
        self.facts.access.retain(|needs, _| wanted.contains(needs));
        for needs in wanted {
            if !self.facts.access.contains_key(&needs) && !self.unanswered.contains(&needs) {
                self.ask(needs, None);
            }
        }
        self.catalog.replace(table);
        let before = self.standings.borrow().clone();
        let synced = self.unsynced.is_empty();
        let warm = before.warm || (synced && plugins.values().all(|standing| !standing.loading));
        if warm {
            self.facts.start = Start::Over;
        }
        let standings = Standings { plugins, synced, warm };
        if *before != standings {
            announce(&before, &standings);
            self.standings.send_replace(Arc::new(standings));
        }
    }
}

fn panicked() -> Refused {
    let message = "The host panicked while it loaded the plugin; the log has more. It is tried again every 10 s.";
    Refused { digest: None, refusal: Refusal::new(reason::HOST_FAILURE, message) }
}

/// Loads a job, whatever happens.
async fn finish(job: Job, prepare: Prepare, turns: Arc<Semaphore>) -> Done {
    let (name, number) = (job.name.clone(), job.number);
    let turn = turns.acquire().await.expect("it is never closed");
    let mut loading = pin!(AssertUnwindSafe(load(job, prepare)).catch_unwind());
    let loaded = match tokio::time::timeout(TURN, &mut loading).await {
        Ok(loaded) => loaded,
        Err(_) => {
            drop(turn);
            loading.await
        }
    };
    Done::Loaded { name, number, finished: loaded.unwrap_or_else(|_| Err(panicked())) }
}

/// The gates that do not depend on the cluster.
async fn load(job: Job, prepare: Prepare) -> Finished {
    let Job { name, delivery, known, .. } = job;
    let delivered = delivery.clone();
    let opened = tokio::task::spawn_blocking(move || open(&name, &delivered)).await;
    let package = match opened {
        Ok(opened) => Arc::new(opened.map_err(|refusal| Refused { digest: None, refusal })?),
        Err(_) => return Err(panicked()),
    };
    let (version, config) = (package.version(), package.config.clone());
    if let Some(same) = known.into_iter().find(|known| known.version == version) {
        return Ok(same);
    }
    let refused = |refusal| Refused { digest: Some(package.digest), refusal };
    let Prepared { claim, handler } = prepare(package.clone()).await.map_err(refused)?;
    Ok(Arc::new(Loaded { version, delivery, config, claim, handler }))
}

fn open(name: &str, delivery: &Delivery) -> Result<Package, Refusal> {
    let read = |(file, content): &(String, Content)| match content.read() {
        Ok(bytes) => Ok((file.clone(), bytes)),
        Err(error) => Err(Refusal::new(reason::HOST_FAILURE, format!("The host cannot read back {file:?}, which was delivered: {error}."))),
    };
    let files = delivery.files.iter().map(read).collect::<Result<Vec<_>, _>>()?;
    package::open(name, files.into_iter())
}

/// One line for each change that an operator wants to know of.
fn announce(before: &Standings, now: &Standings) {
    for (name, standing) in &now.plugins {
        let old = before.plugins.get(name);
        if let Some(serving) = standing.stable.as_ref().filter(|serving| old.and_then(|old| old.stable.as_ref()) != Some(serving)) {
            info!(plugin = name, kind = %serving.claim.reconciles, version = %serving.version, paused = standing.paused, "plugin serves");
        }
        let on_trial = standing.candidate.as_ref().filter(|candidate| old.and_then(|old| old.candidate.as_ref()) != Some(candidate));
        if let Some(Candidate { serving, trial }) = on_trial {
            info!(plugin = name, version = %serving.version, rollout = ?trial.rollout(), "a new version is on trial");
        }
        if let Some(refused) = standing.refused.as_ref().filter(|refused| old.and_then(|old| old.refused.as_ref()) != Some(refused)) {
            let digest = refused.digest.map(tracing::field::display);
            warn!(plugin = name, reason = refused.refusal.reason, why = refused.refusal.message, digest, "plugin refused");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::{
        catalog::Serving,
        loader::crd::tests as crd,
        reconcile::{Next, Outcome, Request},
        source::Delivery,
    };

    fn prepared() -> Prepared {
        let handler = |_: Request| async { Ok(Outcome::just(Next::AwaitChange)) }.boxed();
        Prepared { claim: Arc::new(Claim::plain()), handler: Arc::new(handler) }
    }

    fn delivery(name: &str, version: &str, code: &'static [u8]) -> Change {
        let files = vec![("p.wasm".to_owned(), Content::from(code))];
        let (name, version, created) = (name.to_owned(), version.to_owned(), String::new());
        Change::Delivered(Delivery { place: Place::ConfigMap, name, uid: Some("u".into()), created, version, files })
    }

    /// A running loader on a cluster with the definition.
    struct Running {
        changes: mpsc::UnboundedSender<Change>,
        definitions: mpsc::UnboundedSender<crate::watch::Change>,
        catalog: Catalog,
        standings: watch::Receiver<Arc<Standings>>,
        _task: JoinSet<()>,
    }

    fn run(prepare: Prepare, ask: Ask) -> Running {
        let loader = Loader::new(prepare, ask, [Place::ConfigMap]);
        let (changes, from_source) = mpsc::unbounded_channel();
        let (definitions, from_informer) = mpsc::unbounded_channel();
        let (catalog, standings) = (loader.catalog(), loader.standings());
        let mut task = JoinSet::new();
        task.spawn(loader.run(from_source, from_informer));
        let new = Arc::new(crd::object(&crd::definition("crd")));
        definitions.send(crate::watch::Change::Applied { old: None, new, listed: true }).expect("runs");
        definitions.send(crate::watch::Change::Synced).expect("runs");
        Running { changes, definitions, catalog, standings, _task: task }
    }

    fn synced(running: Running) -> Running {
        running.send(Change::Synced(Place::ConfigMap));
        running
    }

    impl Running {
        fn send(&self, change: Change) {
            self.changes.send(change).expect("runs");
        }

        async fn until(&mut self, what: impl FnMut(&Arc<Standings>) -> bool) {
            let reached = tokio::time::timeout(Duration::from_secs(60), self.standings.wait_for(what)).await;
            let reached = reached.map(|standings| standings.is_ok());
            assert_eq!(reached, Ok(true), "{:?}", self.standings.borrow());
        }

        fn serving(&self) -> Option<Arc<Serving>> {
            self.catalog.subscribe().borrow().values().next().map(|versions| versions.stable.clone())
        }
    }

    fn granted() -> Ask {
        Box::new(|_, _| async { Ok(Access::Granted) }.boxed())
    }

    #[tokio::test(start_paused = true)]
    async fn a_delivery_goes_through_its_gates_into_the_catalog_and_out_with_its_definition() {
        let mut running = run(Arc::new(|_| async { Ok(prepared()) }.boxed()), granted());
        assert!(!running.standings.borrow().warm);
        running.send(delivery("p", "1", b"1"));
        running.send(Change::Synced(Place::ConfigMap));
        running.until(|standings| standings.warm && standings.plugins["p"].stable.is_some()).await;
        assert_eq!(running.serving().expect("serves").version.digest, package::Digest::of(b"1"));
        let gone = Arc::new(crd::object(&crd::definition("crd")));
        running.definitions.send(crate::watch::Change::Deleted(gone)).expect("runs");
        running.until(|standings| standings.plugins["p"].refused.is_some()).await;
        assert!(running.serving().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn one_slow_component_holds_up_no_other_and_is_given_up_for_a_later_one() {
        let prepare: Prepare = Arc::new(|package| {
            async move {
                if &*package.component == b"slow" {
                    std::future::pending::<()>().await;
                }
                Ok(prepared())
            }
            .boxed()
        });
        let mut running = synced(run(prepare, granted()));
        running.send(delivery("a", "1", b"slow"));
        running.send(delivery("b", "1", b"quick"));
        running.until(|standings| standings.plugins.get("b").is_some_and(|b| b.stable.is_some())).await;
        running.send(delivery("a", "2", b"quick"));
        running.until(|standings| standings.plugins["a"].refused.is_some() || standings.plugins["a"].stable.is_some()).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_panic_while_loading_is_the_hosts_failure_and_tried_again() {
        let tries = Arc::new(Mutex::new(0));
        let prepare: Prepare = Arc::new({
            let tries = tries.clone();
            move |_| {
                let tries = tries.clone();
                async move {
                    let mut tries = tries.lock().expect("not poisoned yet").to_owned();
                    tries += 1;
                    assert!(tries > 1, "the first try panics");
                    Ok(prepared())
                }
                .boxed()
            }
        });
        let mut running = synced(run(prepare, granted()));
        running.send(delivery("p", "1", b"1"));
        running.until(|standings| standings.plugins.get("p").is_some_and(|p| p.refused.is_some())).await;
        let reason = running.standings.borrow().plugins["p"].refused.as_ref().map(|refused| refused.refusal.reason);
        assert_eq!(reason, Some(reason::HOST_FAILURE));
        *tries.lock().expect("not poisoned") = 1;
        running.until(|standings| standings.plugins["p"].stable.is_some()).await;
    }

    #[tokio::test(start_paused = true)]
    async fn at_the_start_what_was_kept_is_loaded_before_what_was_delivered_and_serves_meanwhile() {
        let order = Arc::new(Mutex::new(Vec::new()));
        let prepare: Prepare = Arc::new({
            let order = order.clone();
            move |package| {
                order.lock().expect("not poisoned").push(package.component.clone());
                async move {
                    if &*package.component == b"2" {
                        tokio::time::sleep(Duration::from_secs(30)).await;
                    }
                    Ok(prepared())
                }
                .boxed()
            }
        });
        let mut running = run(prepare, granted());
        running.send(delivery("p", "1", b"2"));
        let version = package::Version { digest: package::Digest::of(b"1"), config_hash: String::new() };
        let files = vec![("p.wasm".to_owned(), Content::from("1"))];
        let (name, uid, owner) = ("p".to_owned(), "uid of kept".to_owned(), Some("u".to_owned()));
        running.send(Change::Kept(crate::source::Kept { name, uid, owner, version, rolled_back: vec![], files }));
        running.send(Change::Synced(Place::ConfigMap));
        running.until(|standings| standings.plugins.get("p").is_some_and(|p| p.stable.is_some())).await;
        assert_eq!(running.serving().expect("serves").version.digest, package::Digest::of(b"1"));
        assert!(!running.standings.borrow().warm, "the delivered one is being loaded");
        running.until(|standings| standings.warm).await;
        assert_eq!(*order.lock().expect("not poisoned"), ["1", "2"]);
        assert!(running.standings.borrow().plugins["p"].candidate.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_missing_permission_is_asked_for_once_in_ten_seconds_until_it_is_there() {
        let asked = Arc::new(Mutex::new(Vec::new()));
        let ask: Ask = Box::new({
            let asked = asked.clone();
            move |needs, first| {
                let mut asked = asked.lock().expect("not poisoned");
                asked.push(first);
                let missing = needs.permissions().nth(1).expect("watch");
                let access = if asked.len() < 4 { Access::Denied(missing, None) } else { Access::Granted };
                async move { Ok(access) }.boxed()
            }
        });
        let mut running = synced(run(Arc::new(|_| async { Ok(prepared()) }.boxed()), ask));
        let started = tokio::time::Instant::now();
        running.send(delivery("p", "1", b"1"));
        running.until(|standings| standings.plugins.get("p").is_some_and(|p| p.refused.is_some())).await;
        running.until(|standings| standings.plugins["p"].stable.is_some()).await;
        assert_eq!(started.elapsed().as_secs(), 30);
        let asked = asked.lock().expect("not poisoned");
        assert!(asked.len() == 4 && asked[0].is_none() && asked[1].is_some(), "{asked:?}");
    }
}
