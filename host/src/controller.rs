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
use serde_json::Value;
use tokio::{task::JoinSet, time::MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tracing::Instrument;

use crate::{
    catalog::Catalog,
    events::Recorder,
    fence::{Fence, Leadership},
    kinds::{self, Kinds, Listener, Scope, Watched},
    metrics::{Metrics, Verdict},
    object::{GroupKind, Key, Object, at},
    queue::{Cause, Then, Turn},
    reconcile::{Event, Failure, Outcome, Phase, Request},
    status::{WriteError, Writer, Written, holds, prune, pruned, same_work},
    watch::Change,
};

mod settle;
mod term;

use settle::{Settlement, Standing, mirror, reopen, retries, settle, standing};
use term::{Pending, Term};

/// An object with this annotation set to `true` is not run.
pub const PAUSED: &str = "berth.acme.io/paused";
/// The first pause before a write that the API server could not take is tried again; doubled up to [`OWED_MAX`].
const OWED_BASE: Duration = Duration::from_secs(1);
const OWED_MAX: Duration = Duration::from_secs(30);
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

/// An object after a write.
struct State {
    object: Arc<Object>,
    /// Whether somebody else's change, which the run has not seen, is in it.
    merged: bool,
}

/// A write that is still owed, as it is handed on: what it is, how often it was tried, and whether it may have happened.
struct Owed {
    settlement: Settlement,
    attempts: u32,
    uncertain: bool,
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

    async fn step(&self, work: &Work<'_>, turn: &Turn) -> End {
        let Some(mut object) = work.watched.get(&work.key.object) else {
            return End { then: Then::Wait, verdict: Verdict::Outdated, last: None };
        };
        let (pending, counted_for) = work.term.begin(work.key, &object);
        if let Some(pending) = pending {
            match self.settle_debt(work, &mut object, pending).await {
                Ok(end) => return end,
                // The object has moved on: what was owed no longer holds.
                Err(moved_on) => object = moved_on,
            }
        }
        let claim = &work.watched.serving.claim;
        let mut value = object.value();
        let finished = |object: Arc<Object>| End { then: Then::Wait, verdict: Verdict::Settled, last: Some(object) };
        if at(&value, "metadata.annotations").and_then(|all| all.get(PAUSED)).and_then(Value::as_str) == Some("true") {
            return finished(object);
        }
        match standing(claim, &object, &value) {
            Standing::Settled => {
                let only_labels = Settlement {
                    status: None,
                    labels: Vec::new(),
                    events: Vec::new(),
                    then: Then::Wait,
                    verdict: Verdict::Settled,
                    counted: false,
                };
                let state = State { object, merged: false };
                return self.written(work, state, only_labels, 0).await;
            }
            Standing::Stale => match self.reopen(work, &object).await {
                Ok(reopened) => {
                    value = reopened.value();
                    object = reopened;
                }
                Err(error) => return self.unwritten(work, object, None, error),
            },
            Standing::Open if object.deleting => return finished(object),
            Standing::Open => {}
        }
        let failures = match retries(claim, &value) {
            // What is counted there belongs to a former version of the spec.
            Some(_) if counted_for.is_some_and(|generation| generation != object.generation) => 0,
            Some(retries) => retries,
            None => turn.failures,
        };
        let result = self.handle(work, turn, object.clone(), &value, failures).await;
        let settlement = settle(claim, &object, &value, failures, result);
        self.write(work, object, settlement, failures).await
    }

    async fn handle(&self, work: &Work<'_>, turn: &Turn, object: Arc<Object>, value: &Value, failures: u32) -> Result<Outcome, Failure> {
        let serving = &work.watched.serving;
        let said = |field: &String| at(value, field).and_then(Value::as_str).map(str::to_owned);
        let in_status =
            serving.claim.dead_letter.as_ref().filter(|_| failures > 0).and_then(|dead_letter| said(&dead_letter.message_field));
        let request = Request {
            key: work.key.clone(),
            phase: Phase::Apply,
            attempt: failures.max(turn.failures),
            last_failure: turn.last_failure.clone().or(in_status),
            idempotency_key: idempotency_key(work, &object),
            object,
            fence: work.fence.clone(),
        };
        let started = tokio::time::Instant::now();
        let result = tokio::select! {
            biased;
            () = work.fence.lost() => Err(Failure::Fenced),
            result = serving.handler.reconcile(request) => result,
        };
        self.metrics.ran(&work.key.kind, started.elapsed());
        result
    }

    /// Writes an outcome: the status first, which is the acknowledgement, then labels, then events.
    async fn write(&self, work: &Work<'_>, object: Arc<Object>, settlement: Settlement, failures: u32) -> End {
        let patch = settlement.status.as_ref().and_then(|patch| self.without_pruned(work.key, patch));
        let state = match &patch {
            None => State { object, merged: false },
            Some(patch) => match self.write_status(work, &object, patch).await {
                Ok(state) => state,
                Err(WriteError::Refused(sentence)) => return self.write_refusal(work, object, sentence, failures).await,
                Err(error) => {
                    let owed = Owed { settlement, attempts: 0, uncertain: false };
                    return self.unwritten(work, object, Some(owed), error);
                }
            },
        };
        self.written(work, state, settlement, 0).await
    }

    /// What comes after the status: the account of failures, labels and events. Labels that cannot be written now are owed.
    async fn written(&self, work: &Work<'_>, state: State, settlement: Settlement, attempts: u32) -> End {
        let Settlement { labels, events, then, verdict, counted, .. } = settlement;
        if counted {
            work.term.counted(work.key, state.object.generation);
        }
        self.publish(work, &events);
        let State { object, merged } = state;
        match self.write_labels(work, &object, &labels).await {
            Ok(State { object: last, merged: later }) => {
                // With the former state as the last one seen, what was merged in counts as news, and leads to another run.
                let last = if merged || later { None } else { Some(last) };
                End { then, verdict, last }
            }
            Err(error @ (WriteError::Later { .. } | WriteError::Lost { .. })) => {
                let rest = Settlement { status: None, labels, events: Vec::new(), then, verdict, counted: false };
                self.unwritten(work, object, Some(Owed { settlement: rest, attempts, uncertain: false }), error)
            }
            Err(WriteError::Changed(current)) => {
                self.observe(work, *current);
                End { then, verdict, last: Some(object) }
            }
            Err(error) => {
                if !matches!(error, WriteError::Gone | WriteError::Fenced) {
                    tracing::warn!(%error, "label not written");
                }
                End { then, verdict, last: Some(object) }
            }
        }
    }

    /// The API server will never take this status: the object says so instead, as a failure of the handler.
    async fn write_refusal(&self, work: &Work<'_>, object: Arc<Object>, sentence: String, failures: u32) -> End {
        let refused = Failure::Refused(format!("its status: {sentence}"));
        let cause = refused.to_string();
        let settlement = settle(&work.watched.serving.claim, &object, &object.value(), failures, Err(refused));
        let written = match &settlement.status {
            Some(patch) => self.write_status(work, &object, patch).await,
            None => Ok(State { object: object.clone(), merged: false }),
        };
        match written {
            Ok(state) => self.written(work, state, settlement, 0).await,
            Err(WriteError::Refused(_)) => {
                self.publish(work, &settlement.events);
                End { then: Then::Fail { cause, after: None }, verdict: Verdict::Failure, last: Some(object) }
            }
            Err(error) => self.unwritten(work, object, Some(Owed { settlement, attempts: 0, uncertain: false }), error),
        }
    }

    /// Writes the status. A write that the server knows of already, as its answer was lost, counts as written.
    async fn write_status(&self, work: &Work<'_>, object: &Arc<Object>, patch: &Value) -> Result<State, WriteError> {
        let kind = &work.watched.serving.claim.reconciles;
        let Written { object: answer, merged } = match self.writer.patch_status(kind, object, patch, &work.fence).await {
            Err(WriteError::Changed(current)) if is_state_after(object, &current, patch) => Written { object: *current, merged: true },
            answer => answer?,
        };
        self.metrics.wrote(&work.key.kind, "status");
        let lost = pruned(patch, at(&answer.value(), "status").unwrap_or(&Value::Null));
        if !lost.is_empty() {
            let mut known = self.pruned.lock().expect("no panic while the lock is held");
            for field in lost {
                if known.insert((work.key.kind.clone(), field.clone())) {
                    tracing::warn!(
                        field = format!("status.{field}"),
                        crd = kind.resource(),
                        "the CRD's schema has no such field, so it is lost"
                    );
                }
            }
        }
        Ok(State { object: self.observe(work, answer), merged })
    }

    /// Sets the mirror label and `labels` where they differ.
    async fn write_labels(&self, work: &Work<'_>, object: &Arc<Object>, labels: &[(String, Option<String>)]) -> Result<State, WriteError> {
        let claim = &work.watched.serving.claim;
        let unchanged = || Ok(State { object: object.clone(), merged: false });
        let has_mirror = claim.progress.as_ref().is_some_and(|progress| progress.mirror_label.is_some());
        if labels.is_empty() && !has_mirror {
            return unchanged();
        }
        let have = term::labels(object);
        let mut wanted = labels.to_vec();
        match mirror(claim, &object.value()) {
            Some(Ok(label)) => wanted.push(label),
            Some(Err(phase)) => self.publish(work, &[invalid_label(&phase)]),
            None => {}
        }
        wanted.retain(|(key, value)| have.get(key) != value.as_ref());
        if wanted.is_empty() {
            return unchanged();
        }
        let Written { object: answer, merged } = self.writer.patch_labels(&claim.reconciles, object, &wanted, &work.fence).await?;
        self.metrics.wrote(&work.key.kind, "labels");
        Ok(State { object: self.observe(work, answer), merged })
    }

    async fn reopen(&self, work: &Work<'_>, object: &Arc<Object>) -> Result<Arc<Object>, WriteError> {
        let patch = reopen(&work.watched.serving.claim).expect("an object can only be stale by its claim's progress");
        let reopened = self.write_status(work, object, &patch).await?;
        Ok(self.write_labels(work, &reopened.object, &[]).await?.object)
    }

    /// Takes the answer to a write into the cache, so that no later run sees an older state. Returns the answer, not what the cache
    /// holds: that may be later, and then it is news.
    fn observe(&self, work: &Work<'_>, answer: Object) -> Arc<Object> {
        let answer = Arc::new(answer);
        self.latest(work, answer.clone());
        answer
    }

    /// The same, but returns what the cache holds then.
    fn latest(&self, work: &Work<'_>, seen: Arc<Object>) -> Arc<Object> {
        match work.watched.store(&seen.key) {
            Some(store) => store.observe(seen),
            None => seen,
        }
    }

    /// Writes what is owed to the object, if it is still as it was. `Err` is the object as it is now, to be run again.
    async fn settle_debt(&self, work: &Work<'_>, object: &mut Arc<Object>, pending: Pending) -> Result<End, Arc<Object>> {
        let Pending { given, settlement, uncertain, attempts } = pending;
        if uncertain {
            match self.writer.read(&work.watched.serving.claim.reconciles, object, &work.fence).await {
                Ok(Some(current)) => *object = self.latest(work, Arc::new(current)),
                Ok(None) => return Ok(self.unwritten(work, object.clone(), None, WriteError::Gone)),
                Err(error) => return Ok(self.unwritten(work, given.clone(), Some(Owed { settlement, attempts, uncertain }), error)),
            }
        }
        let patch = settlement.status.as_ref().and_then(|patch| self.without_pruned(work.key, patch));
        match patch {
            None if same_work(&given, object) => {
                let state = State { object: object.clone(), merged: false };
                Ok(self.written(work, state, settlement, attempts).await)
            }
            Some(patch) if same_work(&given, object) => match self.write_status(work, object, &patch).await {
                Ok(state) => Ok(self.written(work, state, settlement, 0).await),
                Err(error) => {
                    let owed = Owed { settlement, attempts, uncertain: false };
                    Ok(self.unwritten(work, object.clone(), Some(owed), error))
                }
            },
            // The answer was lost, but the write was not.
            Some(patch) if is_state_after(&given, object, &patch) => {
                let state = State { object: object.clone(), merged: false };
                Ok(self.written(work, state, settlement, 0).await)
            }
            _ => Err(object.clone()),
        }
    }

    /// A write did not happen, or is not known to have. What is owed is kept, where waiting can help.
    fn unwritten(&self, work: &Work<'_>, object: Arc<Object>, owed: Option<Owed>, error: WriteError) -> End {
        let again = |after, verdict| End { then: Then::Again(after), verdict, last: Some(object.clone()) };
        match error {
            WriteError::Changed(current) => {
                self.observe(work, *current);
                again(Duration::ZERO, Verdict::Outdated)
            }
            WriteError::Gone => {
                if let Some(store) = work.watched.store(&object.key) {
                    store.forget(&object.key, &object.uid);
                }
                End { then: Then::Wait, verdict: Verdict::Outdated, last: None }
            }
            WriteError::Fenced => again(OWED_BASE, Verdict::Fenced),
            WriteError::Later { after, .. } | WriteError::Lost { after, .. } => {
                let attempts = owed.as_ref().map_or(0, |owed| owed.attempts);
                let after = OWED_BASE.saturating_mul(2_u32.saturating_pow(attempts)).min(OWED_MAX).max(after);
                tracing::warn!(%error, ?after, "the outcome is kept and written later");
                if let Some(Owed { settlement, uncertain, .. }) = owed {
                    let uncertain = uncertain || matches!(error, WriteError::Lost { .. });
                    work.term.owe(work.key, Pending { given: object.clone(), settlement, uncertain, attempts: attempts + 1 });
                }
                again(after, Verdict::WriteDelayed)
            }
            error @ (WriteError::NoSubresource(_) | WriteError::Refused(_)) => {
                tracing::warn!(%error, "not written");
                End { then: Then::Fail { cause: error.to_string(), after: Some(OWED_MAX) }, verdict: Verdict::Failure, last: Some(object) }
            }
        }
    }

    fn without_pruned(&self, key: &Key, patch: &Value) -> Option<Value> {
        let known = self.pruned.lock().expect("no panic while the lock is held");
        let fields: Vec<&str> = known.iter().filter(|(kind, _)| *kind == key.kind).map(|(_, field)| field.as_str()).collect();
        prune(patch, &fields)
    }

    fn publish(&self, work: &Work<'_>, events: &[Event]) {
        let Some(object) = work.watched.get(&work.key.object) else { return };
        for event in events {
            self.recorder.publish(&work.watched.serving.claim.reconciles, &object, event, &work.fence);
        }
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

/// Whether `current` is what the merge patch made, or would have made, of `given`.
fn is_state_after(given: &Object, current: &Object, patch: &Value) -> bool {
    let same_object = given.uid == current.uid && given.generation == current.generation;
    same_object && holds(at(&current.value(), "status").unwrap_or(&Value::Null), patch)
}

/// `<resource>.<group>/<namespace>/<name>/<uid>`: the same for every run of the object, and for no other.
fn idempotency_key(work: &Work<'_>, object: &Object) -> String {
    let resource = work.watched.serving.claim.reconciles.resource();
    format!("{resource}/{}/{}/{}", object.key.namespace.as_deref().unwrap_or_default(), object.key.name, object.uid)
}

fn invalid_label(phase: &str) -> Event {
    Event {
        warning: true,
        reason: "InvalidLabel".into(),
        action: "Reconcile".into(),
        note: format!(
            "the phase {:?} cannot be the value of a label (at most 63 letters, digits, '-', '_' and '.'), so the mirror label was left as it is",
            crate::status::cut(phase, 100)
        ),
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().map(str::to_owned).or_else(|| panic.downcast_ref::<String>().cloned());
    text.unwrap_or_else(|| "no message".to_owned())
}
