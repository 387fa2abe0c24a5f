//! What a turn does: pays what is owed, leaves what is settled, re-opens what is stale, runs the handler, and has the outcome written.
//!
//! # Guarantees
//! Where the claim asks for it, an object has the finalizer before its first run, whichever phase it is in; it is deleted only after a
//! `finalize` run has succeeded. A finalizer that the serving version does not claim any more is taken off by the host at the deletion.

use std::{sync::Arc, time::Duration};

use serde_json::Value;

use super::{
    Controller, End, Fault, PAUSED, Work,
    children::with_children,
    mark::{Mark, Moment, asked_again, standing as standing_by},
    settle::{Settlement, Standing, is_dead, reopen, retries, settle},
    term::Rest,
    write::{Owed, State},
};
use crate::{
    finalizer,
    metrics::Verdict,
    object::{Object, annotation, at},
    package::Version,
    queue::{Then, Turn},
    reconcile::{Event, Failure, Outcome, Phase, Request},
    status::WriteError,
};

impl Controller {
    /// One version's step. That of a version on trial writes nothing if its handler fails.
    pub(super) async fn step(&self, work: &Work<'_>, turn: &Turn) -> End {
        let Some(object) = work.watched.get(&work.key.object) else {
            return End::of(Then::Wait, Verdict::Outdated, None);
        };
        let finished = |object: Arc<Object>| End::of(Then::Wait, Verdict::Settled, Some(object));
        let (pending, counted_for) = work.term.begin(work.key, &object, turn.cause);
        let rest = Rest::of(&object, &work.serving.version, redrives(work));
        let children_due = || !work.serving.claim.owns.is_empty() && work.term.children_due(work.key);
        if pending.is_none() && work.term.rests(work.key, rest) && !children_due() {
            return finished(object);
        }
        let mut object = object.whole();
        if let Some(pending) = pending {
            let payer = payer(work, &pending.version);
            match self.settle_debt(payer.as_ref().unwrap_or(work), &mut object, pending).await {
                // What happened while it was owed was folded into this turn, and the handler has not seen it.
                Ok(end @ End { then: Then::Wait | Then::After(_) | Then::Stop, last: Some(_), .. }) => {
                    return End { then: Then::Again(Duration::ZERO), ..end };
                }
                // Somebody asked meanwhile to try again at once.
                Ok(end @ End { then: Then::Fail { .. }, .. }) if asked_again(&object.value()) => {
                    return End { then: Then::Again(Duration::ZERO), ..end };
                }
                Ok(end) => return end,
                // The object has moved on: what was owed no longer holds.
                Err(moved_on) => object = moved_on,
            }
        }
        let claim = &work.serving.claim;
        let mut value = object.value();
        let paused = annotation(&value, PAUSED) == Some("true");
        if work.term.pause(work.key, paused) && paused {
            self.publish(work, &[on_hold()]);
        }
        if paused {
            return finished(object);
        }
        match (object.deleting, finalizer::holds(&object, &work.key.kind)) {
            (true, true) => return self.say_farewell(work, turn, object, &value).await,
            (false, false) if claim.finalizer => match self.add_finalizer(work, &object).await {
                Ok(with_finalizer) => {
                    value = with_finalizer.value();
                    object = with_finalizer;
                }
                Err(error) => return self.unwritten(work, object, None, error),
            },
            _ => {}
        }
        match self.standing(work, &object, &value) {
            Standing::Settled if self.tends_children(work, &object, &value) => {}
            Standing::Settled => {
                let settled = State::parsed(object, value);
                if self.says_so(work, &settled) {
                    work.term.lay_to_rest(work.key, Rest::of(&settled.object, &work.serving.version, redrives(work)));
                    return finished(settled.object);
                }
                let only_marks = Settlement::nothing(Then::Wait, Verdict::Settled);
                return self.written(work, settled, only_marks).await;
            }
            Standing::Stale => match self.reopen(work, &object).await {
                Ok(reopened) => (object, value) = reopened.into_parts(),
                Err(error) => {
                    let owed = Owed::all_of(Settlement::reopening(claim));
                    return self.unwritten(work, object, Some(owed), error);
                }
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
        let result = self.handle(work, turn, object.clone(), &value, failures, Phase::Apply).await;
        let (result, children) = with_children(work, &object, result);
        let (ran, fault) = (ran(work, &result), Fault::of(&result, &work.serving.version));
        if work.trial.is_some() && fault.is_some() {
            return End::of(Then::Wait, Verdict::Failure, Some(object)).after_run(ran, fault);
        }
        let settlement = Settlement { children, ..settle(claim, &object, &value, failures, result) };
        self.write(work, State::parsed(object, value), settlement).await.after_run(ran, fault)
    }

    /// Where the object stands for the version that serves it.
    fn standing(&self, work: &Work<'_>, object: &Object, value: &Value) -> Standing {
        let serving = work.serving;
        standing_by(&serving.claim, object, value, redrives(work).then(|| serving.version.to_string()).as_deref())
    }

    /// Whether a settled object is run because its children may not be as they were: they are part of what it is settled with. Those of
    /// one that was given up on are left alone.
    fn tends_children(&self, work: &Work<'_>, object: &Object, value: &Value) -> bool {
        let claim = &work.serving.claim;
        let given_up = || is_dead(claim, value) || Mark::of(object, value).is_some();
        !object.deleting && !claim.owns.is_empty() && work.term.children_due(work.key) && !given_up()
    }

    pub(super) async fn handle(
        &self,
        work: &Work<'_>,
        turn: &Turn,
        object: Arc<Object>,
        value: &Value,
        failures: u32,
        phase: Phase,
    ) -> Result<Outcome, Failure> {
        let serving = &work.serving;
        let said = |field: &String| at(value, field).and_then(Value::as_str).map(str::to_owned);
        let in_status =
            serving.claim.dead_letter.as_ref().filter(|_| failures > 0).and_then(|dead_letter| said(&dead_letter.message_field));
        let request = Request {
            key: work.key.clone(),
            phase,
            attempt: failures.max(turn.failures),
            last_failure: turn.last_failure.clone().or(in_status),
            idempotency_key: idempotency_key(work, &object),
            object,
            fence: work.fence.clone(),
            reader: self.cluster.reader(serving, work.key, work.term.reads.begin(work.key)),
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

    async fn reopen(&self, work: &Work<'_>, object: &Arc<Object>) -> Result<State, WriteError> {
        let patch = reopen(&work.serving.claim).expect("an object can only be stale by its claim's progress");
        let reopened = self.write_status(work, object, &patch).await?;
        Ok(self.write_metadata(work, &reopened, &[], Moment::Ran(None)).await?.unwrap_or(reopened))
    }
}

/// Whether the version tries again what a former one gave up on. One on trial has to prove itself first on what works.
fn redrives(work: &Work<'_>) -> bool {
    work.serving.redrive && work.watched.versions.candidate.is_none()
}

/// Who pays what the stable version owes where another one serves the object by now.
fn payer<'w>(work: &Work<'w>, version: &Version) -> Option<Work<'w>> {
    let stable = &work.watched.versions.stable;
    let is_stables = *version == stable.version && *version != work.serving.version;
    is_stables.then(|| work.of_stable())
}

/// Which version has run, where the handler is what the result is of.
pub(super) fn ran(work: &Work<'_>, result: &Result<Outcome, Failure>) -> Option<Version> {
    let by_handler = result.as_ref().err().is_none_or(Failure::counts);
    by_handler.then(|| work.serving.version.clone())
}

fn on_hold() -> Event {
    let note = format!("not run while it has the annotation {PAUSED}: \"true\"");
    Event { warning: false, reason: "Paused".into(), action: "Reconcile".into(), note }
}

/// `<resource>.<group>/<namespace>/<name>/<uid>`: the same for every run of the object, and for no other.
fn idempotency_key(work: &Work<'_>, object: &Object) -> String {
    let resource = work.serving.claim.reconciles.resource();
    format!("{resource}/{}/{}/{}", object.key.namespace.as_deref().unwrap_or_default(), object.key.name, object.uid)
}
