//! How an outcome reaches the API server: children, then the status, which acknowledges them, then labels, annotations and Events, or at
//! a deletion the finalizer; what cannot be written now is owed.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use serde_json::Value;

use super::{
    Controller, End, Fault, Work,
    mark::{Mark, Moment},
    settle::{Settlement, farewell, mirror, settle},
    term::Pending,
};
use crate::{
    metrics::Verdict,
    object::{Key, Object, at, label},
    queue::Then,
    reconcile::{Event, Failure},
    status::{Metadata, WriteError, Written, holds, prune, pruned, same_work},
};

/// The first pause before a write that the API server could not take is tried again; doubled up to [`OWED_MAX`].
pub(super) const OWED_BASE: Duration = Duration::from_secs(1);
const OWED_MAX: Duration = Duration::from_secs(30);

/// An object as it was given, or after a write.
pub(super) struct State {
    pub object: Arc<Object>,
    /// Whether somebody else's change, which the run has not seen, is in it.
    pub merged: bool,
    value: OnceLock<Value>,
}

impl State {
    /// As it was given, or as the API server answered.
    pub fn of(object: Arc<Object>) -> Self {
        Self { object, merged: false, value: OnceLock::new() }
    }

    /// The same, parsed already.
    pub fn parsed(object: Arc<Object>, value: Value) -> Self {
        Self { value: value.into(), ..Self::of(object) }
    }

    /// The object, parsed when it is first asked for.
    pub fn value(&self) -> &Value {
        self.value.get_or_init(|| self.object.value())
    }

    /// The object, and what it was parsed to.
    pub fn into_parts(self) -> (Arc<Object>, Value) {
        let value = self.value.into_inner().unwrap_or_else(|| self.object.value());
        (self.object, value)
    }
}

/// A write that is still owed, as it is handed on: what it is, and whether it may have happened.
pub(super) struct Owed {
    pub settlement: Settlement,
    pub uncertain: bool,
}

impl Owed {
    /// It is known not to have happened.
    pub fn all_of(settlement: Settlement) -> Self {
        Self { settlement, uncertain: false }
    }
}

impl Controller {
    /// Writes an outcome: first the children, then the status, which is the acknowledgement, then the rest.
    pub(super) async fn write(&self, work: &Work<'_>, given: State, settlement: Settlement) -> End {
        let settlement = match self.write_children(work, &given.object, settlement).await {
            Ok(settlement) => settlement,
            Err(end) => return end,
        };
        let patch = settlement.status.as_ref().and_then(|patch| self.without_pruned(work.key, patch));
        let state = match &patch {
            None => given,
            Some(patch) => match self.write_status(work, &given.object, patch).await {
                Ok(state) => state,
                Err(WriteError::Refused(sentence)) => {
                    let refused = Failure::Refused(format!("its status: {sentence}"));
                    return self.write_refusal(work, given.object, refused, settlement.failures).await;
                }
                Err(error) => {
                    return self.unwritten(work, given.object, Some(Owed::all_of(settlement)), error);
                }
            },
        };
        self.written(work, state, settlement).await
    }

    /// What comes after the status: the account of failures, labels and events. Labels that cannot be written now are owed.
    pub(super) async fn written(&self, work: &Work<'_>, state: State, settlement: Settlement) -> End {
        let Settlement { children, ran_well, status: _, labels, events, then, verdict, counted, gave_up, failures, release, late } =
            settlement;
        if counted {
            work.term.counted(work.key, state.object.generation);
        }
        self.publish(work, &events);
        if release {
            return self.release(work, state.object, Settlement { failures, release, ..Settlement::nothing(then, verdict) }).await;
        }
        let moment = match verdict {
            Verdict::Settled => Moment::Settled,
            _ if state.merged || late => Moment::Overtaken(gave_up.as_deref()),
            _ => Moment::Ran(gave_up.as_deref()),
        };
        let written = self.write_metadata(work, &state, &labels, moment).await;
        let State { object, merged, .. } = state;
        match written {
            // With the former state as the last one seen, what was merged in counts as news, and leads to another run.
            Ok(after) if merged || after.as_ref().is_some_and(|after| after.merged) => End::of(then, verdict, None),
            Ok(after) => End::of(then, verdict, Some(after.map_or(object, |after| after.object))),
            Err(error @ (WriteError::Later { .. } | WriteError::Lost { .. })) => {
                let rest = Settlement { children, ran_well, labels, gave_up, failures, ..Settlement::nothing(then, verdict) };
                self.unwritten(work, object, Some(Owed::all_of(rest)), error)
            }
            Err(WriteError::Changed(current)) => {
                self.observe(work, *current);
                End::of(then, verdict, Some(object))
            }
            Err(error) => {
                if !matches!(error, WriteError::Gone | WriteError::Fenced) {
                    tracing::warn!(%error, "labels and annotations not written");
                }
                End::of(then, verdict, Some(object))
            }
        }
    }

    /// The API server will never take what the run wants: the object says so instead, as a failure of the handler. Of a version on trial
    /// the object says nothing.
    pub(super) async fn write_refusal(&self, work: &Work<'_>, object: Arc<Object>, refused: Failure, failures: u32) -> End {
        let cause = refused.to_string();
        let fault = Some(Fault { cause: cause.clone(), broken: true, waits: false, version: work.serving.version.clone() });
        if work.trial.is_some() {
            return End { fault, ..End::of(Then::Wait, Verdict::Failure, Some(object)) };
        }
        let decide = if object.deleting { farewell } else { settle };
        let settlement = decide(&work.serving.claim, &object, &object.value(), failures, Err(refused));
        let written = match &settlement.status {
            Some(patch) => self.write_status(work, &object, patch).await,
            None => Ok(State::of(object.clone())),
        };
        let end = match written {
            Ok(state) => self.written(work, state, settlement).await,
            Err(WriteError::Refused(_)) => {
                self.publish(work, &settlement.events);
                End::of(Then::Fail { cause, after: None }, Verdict::Failure, Some(object))
            }
            Err(error) => self.unwritten(work, object, Some(Owed::all_of(settlement)), error),
        };
        End { fault, ..end }
    }

    /// Writes the status. A write that the server knows of already, as its answer was lost, counts as written.
    pub(super) async fn write_status(&self, work: &Work<'_>, object: &Arc<Object>, patch: &Value) -> Result<State, WriteError> {
        let kind = &work.serving.claim.reconciles;
        let Written { object: answer, merged } = match self.writer.patch_status(kind, object, patch, &work.fence).await {
            Err(WriteError::Changed(current)) if is_state_after(object, &current, patch) => Written { object: *current, merged: true },
            answer => answer?,
        };
        self.wrote(work, "status", 1);
        let state = State { merged, ..State::of(self.observe(work, answer)) };
        let lost = pruned(patch, at(state.value(), "status").unwrap_or(&Value::Null));
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
        Ok(state)
    }

    /// Whether the labels and annotations of a settled object are as they are to be.
    pub(super) fn says_so(&self, work: &Work<'_>, settled: &State) -> bool {
        let is_valid = !matches!(mirror(&work.serving.claim, settled.value()), Some(Err(_)));
        is_valid && Changes::to(work, settled, &[], Moment::Settled).is_none()
    }

    /// Sets the mirror label, `labels` and the host's annotations where they differ; none where nothing does.
    pub(super) async fn write_metadata(
        &self,
        work: &Work<'_>,
        given: &State,
        labels: &[(String, Option<String>)],
        moment: Moment<'_>,
    ) -> Result<Option<State>, WriteError> {
        let (claim, object) = (&work.serving.claim, &given.object);
        if let Some(Err(phase)) = mirror(claim, given.value()) {
            self.publish(work, &[invalid_label(&phase)]);
        }
        let Some(Changes { labels: wanted, annotations }) = Changes::to(work, given, labels, moment) else { return Ok(None) };
        let patch = async |annotations: &[_]| {
            let patch = Metadata { labels: &wanted, annotations };
            self.writer.patch_metadata(&claim.reconciles, object, patch, &work.fence).await
        };
        let Written { object: answer, merged } = match patch(&annotations).await {
            // Where annotations of others leave no room for ours, the queue is still to be listed right.
            Err(WriteError::Refused(cause)) if !wanted.is_empty() && !annotations.is_empty() => {
                tracing::warn!(cause, "annotations not written");
                patch(&[]).await?
            }
            answer => answer?,
        };
        self.wrote(work, "metadata", 1);
        Ok(Some(State { merged, ..State::of(self.observe(work, answer)) }))
    }

    /// Takes the answer to a write into the cache, so that no later run sees an older state. Returns the answer, not what the cache
    /// holds: that may be later, and then it is news.
    pub(super) fn observe(&self, work: &Work<'_>, mut answer: Object) -> Arc<Object> {
        if let Some(held) = work.watched.get(&answer.key) {
            answer.share(&held);
        }
        let answer = Arc::new(answer);
        self.latest(work, answer.clone());
        answer
    }

    /// The same, but returns what the cache holds then.
    pub(super) fn latest(&self, work: &Work<'_>, seen: Arc<Object>) -> Arc<Object> {
        let Some(store) = work.watched.store(&seen.key) else { return seen };
        let before = store.get(&seen.key);
        let now = store.observe(seen);
        // The watch will find it in the cache already, so nobody else tells those who have read it.
        self.wake_readers(work.term, &work.key.kind, before.as_deref(), Some(&now));
        now
    }

    /// Writes what is owed to the object, if it is still as it was. `Err` is the object as it is now, to be run again.
    pub(super) async fn settle_debt(&self, work: &Work<'_>, object: &mut Arc<Object>, pending: Pending) -> Result<End, Arc<Object>> {
        let Pending { version, given, settlement, uncertain } = pending;
        if uncertain {
            match self.writer.read(&work.serving.claim.reconciles, object, &work.fence).await {
                Ok(Some(current)) => *object = self.latest(work, Arc::new(current)),
                Ok(None) => return Ok(self.unwritten(work, object.clone(), None, WriteError::Gone)),
                Err(error) => return Ok(self.unwritten(work, given.clone(), Some(Owed { settlement, uncertain }), error)),
            }
        }
        let patch = settlement.status.as_ref().and_then(|patch| self.without_pruned(work.key, patch));
        let as_it_is = State::of(object.clone());
        // What a version that serves no more has not yet acknowledged is for the one that does to work out.
        let versions = &work.watched.versions;
        let serves = version == versions.stable.version || version == versions.newest().version;
        let of_another = !serves && (patch.is_some() || settlement.children.is_some());
        match patch {
            // The answer was lost, but the write was not.
            Some(patch) if !same_work(&given, object) && is_state_after(&given, object, &patch) => {
                Ok(self.written(work, as_it_is, settlement).await)
            }
            _ if of_another || !same_work(&given, object) => Err(object.clone()),
            patch => {
                let settlement = match self.write_children(work, object, settlement).await {
                    Ok(settlement) => settlement,
                    Err(end) => return Ok(end),
                };
                let Some(patch) = patch else { return Ok(self.written(work, as_it_is, settlement).await) };
                match self.write_status(work, object, &patch).await {
                    Ok(state) => Ok(self.written(work, state, settlement).await),
                    Err(error) => Ok(self.unwritten(work, object.clone(), Some(Owed::all_of(settlement)), error)),
                }
            }
        }
    }

    /// Writes were made for the object.
    pub(super) fn wrote(&self, work: &Work<'_>, what: &'static str, count: usize) {
        self.metrics.wrote(&work.key.kind, what, count);
        if count > 0 {
            work.term.on_time(work.key);
        }
    }

    /// A write did not happen, or is not known to have. What is owed is kept, where waiting can help. The pause grows until a write
    /// of the object succeeds, whichever it is.
    pub(super) fn unwritten(&self, work: &Work<'_>, object: Arc<Object>, owed: Option<Owed>, error: WriteError) -> End {
        let again = |after, verdict| End::of(Then::Again(after), verdict, Some(object.clone()));
        match error {
            WriteError::Changed(current) => {
                self.observe(work, *current);
                again(Duration::ZERO, Verdict::Outdated)
            }
            WriteError::Gone => {
                if let Some(store) = work.watched.store(&object.key) {
                    store.forget(&object.key, &object.uid);
                    self.wake_readers(work.term, &work.key.kind, Some(&object), None);
                }
                if let Some(brood) = self.children.of(&work.key.kind) {
                    brood.leave(&object.uid);
                }
                End::of(Then::Wait, Verdict::Outdated, None)
            }
            WriteError::Fenced => again(OWED_BASE, Verdict::Fenced),
            WriteError::Later { after, .. } | WriteError::Lost { after, .. } => {
                let before = work.term.delayed(work.key);
                let after = OWED_BASE.saturating_mul(2_u32.saturating_pow(before)).min(OWED_MAX).max(after);
                tracing::warn!(%error, ?after, owed = owed.is_some(), "not written now, later again");
                if let Some(Owed { settlement, uncertain }) = owed {
                    let settlement = Settlement { late: true, ..settlement };
                    let uncertain = uncertain || matches!(error, WriteError::Lost { .. });
                    let version = work.serving.version.clone();
                    work.term.owe(work.key, Pending { version, given: object.clone(), settlement, uncertain });
                }
                again(after, Verdict::WriteDelayed)
            }
            error @ (WriteError::NoSubresource(_) | WriteError::Refused(_)) => {
                tracing::warn!(%error, "not written");
                End::of(Then::Fail { cause: error.to_string(), after: Some(OWED_MAX) }, Verdict::Failure, Some(object))
            }
        }
    }

    pub(super) fn without_pruned(&self, key: &Key, patch: &Value) -> Option<Value> {
        let known = self.pruned.lock().expect("no panic while the lock is held");
        let fields: Vec<&str> = known.iter().filter(|(kind, _)| *kind == key.kind).map(|(_, field)| field.as_str()).collect();
        prune(patch, &fields)
    }

    pub(super) fn publish(&self, work: &Work<'_>, events: &[Event]) {
        let Some(object) = work.watched.get(&work.key.object) else { return };
        for event in events {
            self.recorder.publish(&work.serving.claim.reconciles, &object, event, &work.fence);
        }
    }
}

/// What differs of an object's metadata.
struct Changes {
    labels: Vec<(String, Option<String>)>,
    annotations: Vec<(String, Option<String>)>,
}

impl Changes {
    /// From `given` to the labels that the handler wants, the mirror label and the host's annotations; none where nothing differs.
    fn to(work: &Work<'_>, given: &State, labels: &[(String, Option<String>)], moment: Moment<'_>) -> Option<Self> {
        let (claim, value) = (&work.serving.claim, given.value());
        let annotations = Mark::changes(claim, &work.serving.version, &given.object, value, moment);
        let mirrored = mirror(claim, value).and_then(Result::ok);
        let mut labels: Vec<_> = labels.iter().cloned().chain(mirrored).collect();
        labels.retain(|(key, wanted)| label(value, key) != wanted.as_deref());
        (!labels.is_empty() || !annotations.is_empty()).then_some(Self { labels, annotations })
    }
}

/// Whether `current` is what the merge patch made, or would have made, of `given`.
fn is_state_after(given: &Object, current: &Object, patch: &Value) -> bool {
    let same_object = given.uid == current.uid && given.generation == current.generation;
    same_object && holds(at(&current.value(), "status").unwrap_or(&Value::Null), patch)
}

fn invalid_label(phase: &str) -> Event {
    Event {
        warning: true,
        reason: "InvalidLabel".into(),
        action: "Reconcile".into(),
        note: format!(
            "the phase {:?} cannot be the value of a label (at most 63 letters, digits, '-', '_' and '.'), so the mirror label was left as it is",
            crate::text::cut(phase, 100)
        ),
    }
}
