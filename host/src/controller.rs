//! The reconcile loop: takes turns from the queue, runs handlers, and settles what they return.
//!
//! # Expected flow
//! Informers run on every replica. While this process leads, there is a [`Term`] with a queue; each turn of it reads the object from
//! the cache, runs the handler that serves the kind, and writes what follows. When the lease is in doubt, the term and everything that
//! runs in it is dropped.
//!
//! # Guarantees
//! - At most one run per object at a time, across versions of a plugin.
//! - Every effect of a turn, the handler's and ours, happens under the fence of the term.
//! - A run's outcome is written, or the run is repeated on the object as it is then; an outcome that the API server cannot take now is
//!   kept and written later without another run.
//! - A panic in a turn ends that turn alone.

use std::{
    collections::HashSet,
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, RwLock},
    time::Duration,
};

use futures::FutureExt;
use kube::Client;
use tokio::{task::JoinSet, time::MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::{
    catalog::Catalog,
    events::Recorder,
    fence::{Fence, Leadership},
    kinds::{self, Kinds, Listener, Scope, Watched},
    metrics::{Metrics, Verdict},
    object::{GroupKind, Key, Object},
    queue::{Cause, Then, Turn},
    status::{WriteError, Writer},
    watch::Change,
};

mod settle;
mod step;
mod term;
mod write;

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

/// See the module.
pub struct Controller {
    client: Client,
    catalog: Catalog,
    leadership: Leadership,
    settings: Settings,
    metrics: Arc<Metrics>,
    recorder: Recorder,
    writer: Writer,
    kinds: Kinds,
    term: RwLock<Option<Arc<Term>>>,
    pruned: Mutex<HashSet<(GroupKind, String)>>,
}

/// How a turn ended.
struct End {
    then: Then,
    verdict: Verdict,
    /// The state that was last given or written.
    last: Option<Arc<Object>>,
}

/// Everything that one turn works with.
struct Work<'a> {
    key: &'a Key,
    watched: &'a Watched,
    term: &'a Term,
    fence: Fence,
}

impl Controller {
    /// A controller that does nothing until it is [run](Self::run).
    pub fn new(
        client: Client,
        catalog: Catalog,
        leadership: Leadership,
        settings: Settings,
        metrics: Arc<Metrics>,
        recorder: Recorder,
    ) -> Arc<Self> {
        Arc::new(Self {
            writer: Writer::new(client.clone(), settings.write_deadline),
            kinds: Kinds::new(settings.scope.clone()),
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
        self.metrics.leader(false);
        tracing::info!(epoch = fence.epoch(), orderly, cancelled, "no longer leading");
    }

    fn current_term(&self) -> Option<Arc<Term>> {
        self.term.read().expect("no panic while the lock is held").clone()
    }

    /// Opens the lane of a kind and looks at all its objects, for `cause` or as new ones.
    fn open(&self, term: &Term, kind: &GroupKind, watched: &Watched, cause: Option<Cause>) {
        let serving = &watched.serving;
        let mut pace = serving.pace;
        if serving.paused {
            pace.concurrency = 0;
        }
        term.queue.open(kind.clone(), pace);
        for object in watched.all() {
            let key = kinds::key(kind, &object.key);
            match cause {
                None => term.observe(&key, &serving.claim, &object, true),
                Some(cause) => term.wake(&key, &serving.claim, &object, cause),
            }
        }
    }

    fn wake_all(&self, term: &Term, cause: Cause) {
        for (kind, watched) in self.kinds.all() {
            for object in watched.all() {
                term.wake(&kinds::key(&kind, &object.key), &watched.serving.claim, &object, cause);
            }
        }
    }

    fn tick(self: &Arc<Self>, term: &Arc<Term>, fence: &Fence, turns: &mut JoinSet<()>) {
        for (kind, depth) in term.queue.depth() {
            self.metrics.depth(&kind, depth.ready, depth.delayed, depth.running);
        }
        for key in term.unmirrored(MIRRORS) {
            let (controller, term, fence) = (self.clone(), term.clone(), fence.clone());
            turns.spawn(async move { controller.mirror_waiting(&term, &key, fence).await });
        }
    }

    /// Gives an object that still waits for its first run the label by which the queue is listed.
    async fn mirror_waiting(&self, term: &Term, key: &Key, fence: Fence) {
        let Some(watched) = self.kinds.get(&key.kind) else { return };
        let Some(object) = watched.get(&key.object) else { return };
        let work = Work { key, watched: &watched, term, fence };
        match self.write_labels(&work, &object, &[]).await {
            // What was merged in is news: the object's next event says so.
            Ok(State { object: written, merged: false }) if !Arc::ptr_eq(&written, &object) => term.wrote(key, &written),
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
        let serving = &watched.serving;
        let span = tracing::info_span!(
            "reconcile",
            plugin = serving.name,
            digest = serving.digest.short(),
            object = %key,
            cause = turn.cause.as_str(),
        );
        let work = Work { key: &key, watched: &watched, term: &term, fence };
        let step = AssertUnwindSafe(self.step(&work, &turn)).catch_unwind().instrument(span.clone());
        let end = step.await.unwrap_or_else(|panic| {
            let cause = format!("the host panicked: {}", panic_text(&*panic));
            tracing::error!(parent: &span, cause, "this is a fault of the host; please report it");
            End { then: Then::Fail { cause, after: None }, verdict: Verdict::HostError, last: None }
        });
        self.metrics.turn(&key.kind, end.verdict);
        span.in_scope(|| match end.verdict {
            Verdict::Settled | Verdict::Requeue => tracing::debug!(result = %end.verdict, "turn"),
            verdict => tracing::info!(result = %verdict, then = ?end.then, "turn"),
        });
        // What is watched now, which is not what was watched before if the CRD is another one or the plugin is gone.
        let current = || self.kinds.get(&key.kind)?.get(&key.object);
        term.finish(turn, end.then, end.last.as_deref(), &serving.claim, current);
    }
}

impl Listener for Controller {
    fn object(&self, kind: &GroupKind, change: Change) {
        let (Some(term), Some(watched)) = (self.current_term(), self.kinds.get(kind)) else { return };
        match change {
            // The store knows better than the event, which may be late, or of an informer that another one has replaced.
            Change::Applied { new, listed, .. } => {
                if let Some(now) = watched.get(&new.key) {
                    term.observe(&kinds::key(kind, &now.key), &watched.serving.claim, &now, listed);
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

    fn serves(&self, kind: &GroupKind, watched: &Arc<Watched>, before: Option<&Arc<Watched>>) {
        self.metrics.kind_added(kind);
        self.pruned.lock().expect("no panic while the lock is held").retain(|(known, _)| known != kind);
        let Some(term) = self.current_term() else { return };
        if before.is_some_and(|before| !before.same_informers(watched)) {
            term.close(kind);
        }
        self.open(&term, kind, watched, before.map(|_| Cause::Reload));
    }

    fn removed(&self, kind: &GroupKind) {
        self.metrics.kind_removed(kind);
        if let Some(term) = self.current_term() {
            term.close(kind);
        }
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().map(str::to_owned).or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "no message".to_owned())
}
