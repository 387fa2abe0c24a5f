//! The reconcile loop: takes turns from the queue, runs handlers, and settles what they return.
//!
//! # Expected flow
//! Informers run on every replica. While this process leads, there is a [`Term`] with a queue; each turn of it reads the object from
//! the cache, runs the handler that serves the kind, and writes what follows. When the lease is in doubt, the term and everything that
//! runs in it is dropped.
//!
//! # Guarantees
//! - At most one run per object at a time, across versions of a plugin.
//! - A failure of a version on trial is the former version's to judge: what that makes of the object is what counts.
//! - Every effect of a turn, the handler's and ours, happens under the fence of the term.
//! - A run's outcome is written, or the run is repeated on the object as it is then; an outcome that the API server cannot take now is
//!   kept and written later without another run.
//! - A panic in a turn ends that turn alone.

use std::{
    collections::HashSet,
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, RwLock, Weak},
    time::Duration,
};

use futures::FutureExt;
use kube::Client;
use tokio::{task::JoinSet, time::MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::{
    authority::Authority,
    catalog::{Catalog, Serving, Versions},
    children::{Children, OnDrift},
    events::Recorder,
    fence::{Fence, Leadership},
    kinds::{self, Kinds, Listener, Scope, Watched},
    metrics::{Metrics, Verdict},
    object::{GroupKind, Key, Object},
    package::Version,
    queue::{Cause, Depth, Then, Turn},
    reader::Cluster,
    report::{Figures, Live},
    status::{WriteError, Writer},
    trial::Trial,
    watch::Change,
};

mod breaker;
mod children;
mod finalize;
pub mod mark;
mod opinion;
mod settle;
mod step;
mod term;
mod write;

use breaker::{Breaker, Change as Switch, Flow, Run};
use mark::Moment;
use term::Term;
use write::State;

/// An object with this annotation set to `true` is not run.
pub const PAUSED: &str = "berth.acme.io/paused";
/// How often gauges are set and late mirror labels are looked for.
const TICK: Duration = Duration::from_millis(250);
/// How many late mirror labels are set at each tick: a plugin that comes to ten thousand objects is no burst of writes.
const MIRRORS: usize = 16;
/// When a late mirror label that could not be set is tried again.
const MIRROR_AGAIN: Duration = Duration::from_secs(5);

/// How the controller behaves.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What is watched.
    pub scope: Scope,
    /// How often every object is looked at although nothing is known to have changed.
    pub resync: Duration,
    /// The deadline of each write.
    pub write_deadline: Duration,
    /// How long runs may go on after a request to stop.
    pub grace: Duration,
}

/// What the controller works with.
pub struct Means {
    /// A client of the host's account.
    pub client: Client,
    /// Which versions serve.
    pub catalog: Catalog,
    /// Whether this process may act.
    pub leadership: Leadership,
    /// Where turns are counted.
    pub metrics: Arc<Metrics>,
    /// Where Events go.
    pub recorder: Recorder,
    /// What plugins may read.
    pub authority: Authority,
    /// What writes their children.
    pub children: Children,
}

/// See the module.
pub struct Controller {
    client: Client,
    catalog: Catalog,
    leadership: Leadership,
    settings: Settings,
    metrics: Arc<Metrics>,
    recorder: Recorder,
    writer: Writer,
    kinds: Arc<Kinds>,
    cluster: Arc<Cluster>,
    children: Children,
    on_drift: OnDrift,
    term: RwLock<Option<Arc<Term>>>,
    pruned: Mutex<HashSet<(GroupKind, String)>>,
}

/// How a turn ended.
struct End {
    then: Then,
    verdict: Verdict,
    /// The state that was last given or written.
    last: Option<Arc<Object>>,
    /// Which version's handler was run, if one was.
    ran: Option<Version>,
    /// What went wrong in a handler: in this turn, or in the one whose outcome is written now.
    fault: Option<Fault>,
}

/// How a handler failed.
#[derive(Clone, Debug)]
struct Fault {
    /// In a sentence.
    cause: String,
    /// Whether it trapped or broke a limit, rather than said that it failed.
    broken: bool,
    /// Whether the other side told it to come back later.
    waits: bool,
    /// Which version of the plugin it is.
    version: Version,
}

impl End {
    /// Of a turn in which no handler was run.
    fn of(then: Then, verdict: Verdict, last: Option<Arc<Object>>) -> Self {
        Self { then, verdict, last, ran: None, fault: None }
    }

    /// The same of one in which this version's handler was run.
    fn after_run(self, ran: Option<Version>, fault: Option<Fault>) -> Self {
        Self { ran, fault: fault.or(self.fault), ..self }
    }

    /// Whether the handler trapped or broke a limit; none where it was not run.
    fn ran_broken(&self) -> Option<bool> {
        match (&self.fault, &self.ran) {
            (Some(fault), _) => Some(fault.broken),
            (None, Some(_)) => Some(false),
            (None, None) => None,
        }
    }
}

/// Everything that one turn works with.
struct Work<'a> {
    key: &'a Key,
    watched: &'a Watched,
    /// The version that serves the object.
    serving: &'a Arc<Serving>,
    /// The trial that it is on, if it is.
    trial: Option<&'a Arc<Trial>>,
    term: &'a Term,
    fence: Fence,
}

impl<'a> Work<'a> {
    /// The same, for the stable version.
    fn of_stable(&self) -> Work<'a> {
        Work { serving: &self.watched.versions.stable, trial: None, fence: self.fence.clone(), ..*self }
    }
}

impl Controller {
    /// A controller that does nothing until it is [run](Self::run).
    pub fn new(means: Means, settings: Settings) -> Arc<Self> {
        let Means { client, catalog, leadership, metrics, recorder, authority, children } = means;
        let kinds = Arc::new(Kinds::new(settings.scope.clone()));
        Arc::new_cyclic(|this: &Weak<Self>| Self {
            on_drift: {
                let this = this.clone();
                Arc::new(move |kind, owner, uid| {
                    if let Some(controller) = this.upgrade() {
                        controller.drifted(kind, owner, uid);
                    }
                })
            },
            children,
            writer: Writer::new(client.clone(), settings.write_deadline),
            cluster: Cluster::new(kinds.clone(), authority, metrics.clone()),
            kinds,
            client,
            catalog,
            leadership,
            settings,
            metrics,
            recorder,
            term: RwLock::default(),
            pruned: Mutex::default(),
        })
    }

    /// The kinds that are watched, for health and metrics.
    pub fn kinds(&self) -> &Kinds {
        &self.kinds
    }

    /// How a kind is doing.
    pub fn live(&self, kind: &GroupKind) -> Live {
        let Some(watched) = self.kinds.get(kind) else { return Live::default() };
        let figures = self.current_term().map(|term| {
            let count = |number: usize| u64::try_from(number).unwrap_or(u64::MAX);
            let Depth { ready, delayed, .. } = term.queue.depth_of(kind);
            let circuit = match term.breaker(kind, |breaker| breaker.flow()) {
                Flow::Free => None,
                Flow::One => Some("half-open".to_owned()),
                Flow::None => Some("open".to_owned()),
            };
            Figures {
                objects: count(watched.len()),
                waiting: count(ready),
                delayed: count(delayed),
                paused: count(term.paused(kind)),
                circuit,
                last_failure: term.last_failure(kind),
                ..Figures::default()
            }
        });
        let trouble = self.kinds.trouble(kind).or_else(|| self.children.of(kind)?.trouble());
        Live { trouble, figures }
    }

    /// Runs until `shutdown`, and then until the last effect is done or the grace period is over.
    pub async fn run(self: &Arc<Self>, shutdown: CancellationToken) {
        let mut tables = self.catalog.subscribe();
        let follow = async {
            loop {
                let table = tables.borrow_and_update().clone();
                self.kinds.follow(&table, &self.client, self);
                if tables.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        };
        let lead = async {
            let mut leadership = self.leadership.clone();
            let mut last = None;
            loop {
                let fence = tokio::select! {
                    fence = leadership.acquired(last) => fence,
                    () = shutdown.cancelled() => None,
                };
                let Some(fence) = fence else { return };
                last = Some(fence.epoch());
                self.term(fence, &shutdown).await;
            }
        };
        tokio::select! {
            () = follow => {}
            () = lead => {}
        }
    }

    /// One term of leadership.
    async fn term(self: &Arc<Self>, fence: Fence, shutdown: &CancellationToken) {
        tracing::info!(epoch = fence.epoch(), "leading");
        self.metrics.leader(true);
        let term = Arc::new(Term::new());
        *self.term.write().expect("no panic while the lock is held") = Some(term.clone());
        for (kind, watched) in self.kinds.all() {
            self.open(&term, &kind, &watched, None);
        }
        let mut turns = JoinSet::new();
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut resync = tokio::time::interval_at(tokio::time::Instant::now() + self.settings.resync, self.settings.resync);
        let orderly = loop {
            tokio::select! {
                () = fence.lost() => break false,
                () = shutdown.cancelled() => break true,
                turn = term.queue.next() => { turns.spawn(self.clone().turn(term.clone(), turn, fence.clone())); }
                Some(_) = turns.join_next() => {}
                _ = resync.tick() => self.wake_all(&term, Cause::Resync),
                _ = tick.tick() => self.tick(&term, &fence, &mut turns),
            }
        };
        if orderly {
            term.queue.stop_intake();
            tracing::info!(running = turns.len(), grace = ?self.settings.grace, "finishing what runs");
            let drained = async { while turns.join_next().await.is_some() {} };
            tokio::select! {
                () = fence.lost() => {}
                _ = tokio::time::timeout(self.settings.grace, drained) => {}
            }
        }
        *self.term.write().expect("no panic while the lock is held") = None;
        let cancelled = turns.len();
        turns.shutdown().await;
        for (kind, _) in self.kinds.all() {
            self.metrics.breaker(&kind, false);
            self.metrics.depth(&kind, 0, 0, 0);
        }
        self.metrics.leader(false);
        tracing::info!(epoch = fence.epoch(), orderly, cancelled, "no longer leading");
    }

    fn current_term(&self) -> Option<Arc<Term>> {
        self.term.read().expect("no panic while the lock is held").clone()
    }

    /// Opens the lane of a kind and looks at its objects: at all of them as new ones, or at those that another version served before.
    fn open(&self, term: &Term, kind: &GroupKind, watched: &Watched, before: Option<&Versions>) {
        self.open_lane(term, kind, watched);
        for object in watched.all() {
            let (key, claim) = (kinds::key(kind, &object.key), watched.claim(&object));
            match before {
                None => term.observe(&key, claim, &object, true),
                Some(before) if is_served_anew(&object, before, &watched.versions) => term.wake(&key, claim, &object, Cause::Reload),
                Some(_) => {}
            }
        }
    }

    /// Gives the lane of a kind its pace: the plugin's own, within what its circuit breaker lets through.
    fn open_lane(&self, term: &Term, kind: &GroupKind, watched: &Watched) {
        let newest = watched.versions.newest();
        let mut pace = newest.pace;
        let flow = term.breaker(kind, |breaker| breaker.flow());
        pace.concurrency = match flow {
            _ if watched.versions.paused => 0,
            Flow::Free => pace.concurrency,
            Flow::One => 1,
            Flow::None => 0,
        };
        term.queue.open(kind.clone(), pace);
        term.queue.prefer_sound(kind, flow == Flow::One);
    }

    /// Follows a change of a circuit breaker.
    fn switch(&self, term: &Term, kind: &GroupKind, watched: &Watched, switch: Option<Switch>) {
        let Some(switch) = switch else { return };
        let plugin = &watched.versions.stable.name;
        match switch {
            Switch::Opened => tracing::warn!(plugin, %kind, "the handler traps too often: its objects wait (circuit breaker open)"),
            Switch::Probes => tracing::info!(plugin, %kind, "one object probes whether the handler has healed"),
            Switch::Closed { .. } => tracing::info!(plugin, %kind, "the handler works again (circuit breaker closed)"),
        }
        self.metrics.breaker(kind, !matches!(switch, Switch::Closed { .. }));
        self.open_lane(term, kind, watched);
        if let Switch::Closed { healed: true } = switch {
            term.queue.redrive(kind);
        }
    }

    fn wake_all(&self, term: &Term, cause: Cause) {
        for (kind, watched) in self.kinds.all() {
            for object in watched.all() {
                term.wake(&kinds::key(&kind, &object.key), watched.claim(&object), &object, cause);
            }
        }
    }

    fn wake_readers_of(&self, term: &Term, kind: &GroupKind, change: &Change) {
        match change {
            Change::Applied { old, new, .. } => self.wake_readers(term, kind, old.as_deref(), Some(new)),
            Change::Deleted(object) => self.wake_readers(term, kind, Some(object), None),
            Change::Synced => {}
        }
    }

    /// Wakes the objects whose last run has read what changed here.
    fn wake_readers(&self, term: &Term, kind: &GroupKind, before: Option<&Object>, now: Option<&Object>) {
        self.wake_keys(term, term.reads.affected(kind, before, now));
    }

    fn wake_keys(&self, term: &Term, readers: Vec<Key>) {
        for key in readers {
            let Some(watched) = self.kinds.get(&key.kind) else { continue };
            match watched.get(&key.object) {
                Some(_) if term.read_later(&key) => {}
                Some(object) => term.wake(&key, watched.claim(&object), &object, Cause::Read),
                None => term.reads.forget(&key),
            }
        }
    }

    fn tick(self: &Arc<Self>, term: &Arc<Term>, fence: &Fence, turns: &mut JoinSet<()>) {
        for (kind, depth) in term.queue.depth() {
            self.metrics.depth(&kind, depth.ready, depth.delayed, depth.running);
        }
        for (kind, watched) in self.kinds.all() {
            self.watch_trial(term, &kind, &watched);
            let switch = term.breaker(&kind, |breaker| breaker.tick(|| term.queue.has_to_probe(&kind)));
            self.switch(term, &kind, &watched, switch);
        }
        self.wake_keys(term, term.due_readers());
        for key in term.unmirrored(MIRRORS) {
            let (controller, term, fence) = (self.clone(), term.clone(), fence.clone());
            turns.spawn(async move { controller.mirror_waiting(&term, &key, fence).await });
        }
    }

    /// Gives an object that still waits for its first run the label by which the queue is listed.
    async fn mirror_waiting(&self, term: &Term, key: &Key, fence: Fence) {
        let Some(watched) = self.kinds.get(&key.kind) else { return };
        let Some(object) = watched.get(&key.object) else { return };
        let (serving, trial) = watched.versions.pick(&object.uid);
        let work = Work { key, watched: &watched, serving, trial, term, fence };
        match self.write_metadata(&work, &State::of(object), &[], Moment::Waiting).await {
            // What was merged in is news: the object's next event says so.
            Ok(Some(State { object: written, merged: false, .. })) => term.wrote(key, &written),
            Err(WriteError::Later { .. } | WriteError::Lost { .. }) => term.mirror_after(key, MIRROR_AGAIN),
            _ => {}
        }
    }

    /// One turn, whatever happens in it.
    async fn turn(self: Arc<Self>, term: Arc<Term>, turn: Turn, fence: Fence) {
        let key = turn.key.clone();
        let Some(watched) = self.kinds.get(&key.kind) else {
            return turn.done(Then::Wait);
        };
        let (serving, trial) = watched.versions.pick(&turn.uid);
        let span = tracing::info_span!(
            "reconcile",
            plugin = serving.name,
            digest = serving.version.digest.short(),
            object = %key,
            cause = turn.cause.as_str(),
        );
        let work = Work { key: &key, watched: &watched, serving, trial, term: &term, fence };
        let step = AssertUnwindSafe(self.attempt(&work, &turn)).catch_unwind().instrument(span.clone());
        let end = step.await.unwrap_or_else(|panic| {
            let cause = format!("the host panicked: {}", panic_text(&*panic));
            tracing::error!(parent: &span, cause, "this is a fault of the host; please report it");
            End::of(Then::Fail { cause, after: None }, Verdict::HostError, None)
        });
        self.metrics.turn(&key.kind, end.verdict);
        match &end.fault {
            Some(fault) => term.failed(&key, &fault.version, &fault.cause),
            None if end.ran.is_some() => term.recovered(&key),
            None => {}
        }
        if let Some(broken) = end.ran_broken() {
            let run = Run { object: Run::object(&key), sound: turn.failures == 0, broken };
            self.switch(&term, &key.kind, &watched, term.breaker(&key.kind, |breaker| breaker.record(run)));
        }
        span.in_scope(|| match end.verdict {
            Verdict::Settled | Verdict::Requeue => tracing::debug!(result = %end.verdict, "turn"),
            verdict => tracing::info!(result = %verdict, then = ?end.then, "turn"),
        });
        // What is watched now, which is not what was watched before if the CRD is another one or the plugin is gone.
        let current = || self.kinds.get(&key.kind)?.get(&key.object);
        term.finish(turn, end.then, end.last.as_deref(), &serving.claim, current);
        self.look_after_children(&term, &key);
    }
}

impl Listener for Controller {
    fn object(&self, kind: &GroupKind, change: Change) {
        if let (Change::Deleted(gone), Some(brood)) = (&change, self.children.of(kind)) {
            brood.leave(&gone.uid);
        }
        let (Some(term), Some(watched)) = (self.current_term(), self.kinds.get(kind)) else { return };
        self.wake_readers_of(&term, kind, &change);
        match change {
            // The store knows better than the event, which may be late, or of an informer that another one has replaced.
            Change::Applied { new, listed, .. } => {
                if let Some(now) = watched.get(&new.key) {
                    // Its text is whole.
                    let now = if now.resource_version == new.resource_version { new } else { now };
                    term.observe(&kinds::key(kind, &now.key), watched.claim(&now), &now, listed);
                }
            }
            Change::Deleted(object) => {
                if watched.get(&object.key).is_none() {
                    term.gone(&kinds::key(kind, &object.key));
                }
            }
            Change::Synced => {}
        }
    }

    fn read(&self, kind: &GroupKind, change: Change) {
        if let Some(term) = self.current_term() {
            self.wake_readers_of(&term, kind, &change);
        }
    }

    fn moved(&self, kind: &GroupKind) {
        if let Some(term) = self.current_term() {
            self.wake_keys(&term, term.reads.readers(kind));
        }
    }

    fn serves(&self, kind: &GroupKind, watched: &Arc<Watched>, before: Option<&Arc<Watched>>) {
        self.metrics.kind_added(kind);
        self.pruned.lock().expect("no panic while the lock is held").retain(|(known, _)| known != kind);
        let owner = &watched.versions.stable.claim.reconciles;
        let unknown_children = self.children.serve(owner, children::owned(&watched.versions), &self.on_drift);
        let Some(term) = self.current_term() else { return };
        if unknown_children {
            term.mistrust_children(kind);
        }
        match before {
            Some(before) if !before.same_informers(watched) => term.close(kind),
            // What trapped was another version.
            Some(before) if before.versions.newest() != watched.versions.newest() => {
                term.breaker(kind, |breaker| *breaker = Breaker::default());
                self.metrics.breaker(kind, false);
            }
            _ => {}
        }
        self.open(&term, kind, watched, before.map(|before| &*before.versions));
    }

    fn removed(&self, kind: &GroupKind, watched: &Arc<Watched>) {
        self.metrics.kind_removed(kind);
        self.children.remove(kind);
        self.report_orphans(kind, watched);
        if let Some(term) = self.current_term() {
            term.close(kind);
        }
    }
}

/// Whether another version serves the object than before, or may do now what the one before it kept it from: to try again what was given
/// up on, or to let go of what waits for a finalizer that nobody claims any more.
fn is_served_anew(object: &Object, before: &Versions, now: &Versions) -> bool {
    let lets_go = object.deleting && before.stable.claim.finalizer && !now.stable.claim.finalizer;
    let redrives = now.stable.redrive && now.candidate.is_none() && before.stable != now.stable;
    lets_go || redrives || before.pick(&object.uid).0 != now.pick(&object.uid).0
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().map(str::to_owned).or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "no message".to_owned())
}

#[cfg(test)]
mod tests;
