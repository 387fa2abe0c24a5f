//! What an outcome means: one function, one match, in which every way that a run can end gets its status, requeue, event and metric.

use std::time::Duration;

use serde_json::{Map, Value};

use crate::{
    children::Child,
    claim::{Claim, DeadLetter, Progress},
    finalizer,
    metrics::Verdict,
    object::{Object, at},
    queue::Then,
    reconcile::{Event, Failure, Next, Outcome},
    status::{MESSAGE_MAX, difference},
    text::cut,
};

/// The pause after the host itself could not run a handler.
const HOST_PAUSE: Duration = Duration::from_secs(1);

/// What follows from a run.
#[derive(Debug)]
pub struct Settlement {
    /// What is to exist before the status is written; none leaves it as it is.
    pub children: Option<Vec<Child>>,
    /// Whether it is of a run that did not fail, so that its children are as they are to be.
    pub ran_well: bool,
    /// Merge patch of the status; none where nothing differs.
    pub status: Option<Value>,
    /// Labels that the handler wants, without the mirror label.
    pub labels: Vec<(String, Option<String>)>,
    /// Events to publish once the status is written.
    pub events: Vec<Event>,
    /// What the queue does with the key.
    pub then: Then,
    /// For the metrics and the log line.
    pub verdict: Verdict,
    /// Whether a failure is counted in the status.
    pub counted: bool,
    /// Why the object was given up on, if it was.
    pub gave_up: Option<String>,
    /// Failures that were counted before the run.
    pub failures: u32,
    /// Whether the finalizer is taken off the object at the end.
    pub release: bool,
    /// Whether it is written later than it was worked out, so that the run has not seen what was asked for since.
    pub late: bool,
}

impl Settlement {
    /// Writes nothing.
    pub fn nothing(then: Then, verdict: Verdict) -> Self {
        let (labels, events) = (Vec::new(), Vec::new());
        Self {
            children: None,
            ran_well: false,
            status: None,
            labels,
            events,
            then,
            verdict,
            counted: false,
            gave_up: None,
            failures: 0,
            release: false,
            late: false,
        }
    }

    /// Re-opens an object of a claim that can be settled. It runs once that is written.
    pub fn reopening(claim: &Claim) -> Self {
        Self { status: reopen(claim), ..Self::nothing(Then::Again(Duration::ZERO), Verdict::Requeue) }
    }
}

/// Decides. `value` is `object` parsed; `failures` is how many failures are counted so far for this version of the spec.
pub fn settle(claim: &Claim, object: &Object, value: &Value, failures: u32, result: Result<Outcome, Failure>) -> Settlement {
    let outcome = match outcome(result) {
        Ok(outcome) => outcome,
        Err(not_run) => return *not_run,
    };
    let own_status = outcome.status.is_some();
    let mut status = Status::new(value, outcome.status);
    let mut events = outcome.events;
    let cause = match &outcome.next {
        Next::GiveUp(cause) | Next::Retry(cause) | Next::RetryAfter(_, cause) => Some(cause.clone()),
        Next::AwaitChange | Next::After(_) => None,
    };
    let (then, verdict) = match outcome.next {
        Next::AwaitChange => {
            status.forgive(claim, failures, own_status);
            status.stamp(claim, object, own_status);
            (Then::Wait, Verdict::Success)
        }
        Next::After(after) => {
            status.forgive(claim, failures, own_status);
            (Then::After(after), Verdict::Requeue)
        }
        Next::GiveUp(cause) => {
            status.give_up(claim, object, &cause, own_status);
            events.push(warning("GaveUp", &cause));
            (Then::Stop, Verdict::GiveUp)
        }
        Next::Retry(cause) => status.fail(claim, object, failures, cause, None, &mut events),
        Next::RetryAfter(after, cause) => status.fail(claim, object, failures, cause, Some(after), &mut events),
    };
    Settlement {
        status: difference(&status.given, &status.fields),
        labels: outcome.labels,
        events,
        counted: matches!(verdict, Verdict::Failure | Verdict::DeadLetter),
        ran_well: ran_well(verdict),
        gave_up: cause.filter(|_| matches!(verdict, Verdict::GiveUp | Verdict::DeadLetter)),
        failures,
        ..Settlement::nothing(then, verdict)
    }
}

/// Decides for a run at the deletion of the object. Failures are not counted in the status, and none is the last one: only the
/// handler's success takes the finalizer off. `failures` is how many there were in a row.
pub fn farewell(claim: &Claim, object: &Object, value: &Value, failures: u32, result: Result<Outcome, Failure>) -> Settlement {
    let outcome = match outcome(result) {
        Ok(outcome) => outcome,
        Err(not_run) => return *not_run,
    };
    let mut status = Status::new(value, outcome.status);
    status.keep("status.observedGeneration");
    if let Some(retries) = claim.dead_letter.as_ref().and_then(|letter| letter.retries_field.as_ref()) {
        status.keep(retries);
    }
    let cause = match &outcome.next {
        Next::Retry(cause) | Next::RetryAfter(_, cause) | Next::GiveUp(cause) => Some(cause),
        Next::AwaitChange | Next::After(_) => None,
    };
    if let (Some(cause), Some(letter)) = (cause, &claim.dead_letter) {
        status.set(&letter.message_field, cut(cause, MESSAGE_MAX).into());
    }
    let mut events = outcome.events;
    let fail = |cause: String, after, events: &mut Vec<Event>| {
        if failures == 0 {
            events.push(warning("FinalizeFailed", &cause));
        }
        (Then::Fail { cause, after }, Verdict::Failure)
    };
    let (then, verdict) = match outcome.next {
        Next::AwaitChange => (Then::Wait, Verdict::Success),
        Next::After(after) => (Then::After(after), Verdict::Requeue),
        Next::GiveUp(cause) => {
            let command = finalizer::removal(&claim.reconciles, object);
            events
                .push(warning("FinalizeGaveUp", &format!("{}; the object stays until its finalizer is gone: {command}", cut(&cause, 400))));
            (Then::Stop, Verdict::GiveUp)
        }
        Next::Retry(cause) => fail(cause, None, &mut events),
        Next::RetryAfter(after, cause) => fail(cause, Some(after), &mut events),
    };
    Settlement {
        status: difference(&status.given, &status.fields),
        labels: outcome.labels,
        events,
        failures,
        ran_well: ran_well(verdict),
        release: verdict == Verdict::Success,
        ..Settlement::nothing(then, verdict)
    }
}

fn ran_well(verdict: Verdict) -> bool {
    matches!(verdict, Verdict::Success | Verdict::Requeue | Verdict::GiveUp)
}

/// The outcome of a run; a run without one is a failure to be retried, unless the handler had no part in it.
fn outcome(result: Result<Outcome, Failure>) -> Result<Outcome, Box<Settlement>> {
    let not_run = |verdict| Err(Box::new(Settlement::nothing(Then::Again(HOST_PAUSE), verdict)));
    match result {
        Ok(outcome) => Ok(outcome),
        Err(Failure::Fenced) => not_run(Verdict::Fenced),
        Err(failure @ Failure::Host(_)) => {
            tracing::error!(%failure, "not run");
            not_run(Verdict::HostError)
        }
        Err(failure) => Ok(Outcome::just(Next::Retry(failure.to_string()))),
    }
}

/// What re-opening a settled object writes: the phase and the failure account go, so that the schema's defaults show.
pub fn reopen(claim: &Claim) -> Option<Value> {
    let progress = claim.progress.as_ref()?;
    let mut patch = Value::Null;
    set(&mut patch, &progress.phase_field, Value::Null);
    if let Some(dead_letter) = &claim.dead_letter {
        if let Some(retries) = &dead_letter.retries_field {
            set(&mut patch, retries, 0.into());
        }
        set(&mut patch, &dead_letter.message_field, Value::Null);
    }
    Some(patch)
}

/// Where an object stands, by its claim's `progress`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Work to do.
    Open,
    /// Finished for this version of the spec.
    Settled,
    /// Finished for a former version of the spec: to be re-opened first.
    Stale,
}

/// Reads it off the object. The generation bump of a deletion is no new spec.
pub fn standing(claim: &Claim, object: &Object, value: &Value) -> Standing {
    let Some(Progress { phase_field, settled, .. }) = &claim.progress else { return Standing::Open };
    let phase = at(value, phase_field).and_then(Value::as_str);
    if !phase.is_some_and(|phase| settled.iter().any(|settled| settled == phase)) {
        return Standing::Open;
    }
    match at(value, "status.observedGeneration").and_then(Value::as_i64) {
        _ if object.deleting => Standing::Settled,
        Some(observed) if observed == object.generation => Standing::Settled,
        _ => Standing::Stale,
    }
}

/// Whether the object is settled because it failed for good.
pub fn is_dead(claim: &Claim, value: &Value) -> bool {
    let (Some(progress), Some(letter)) = (&claim.progress, &claim.dead_letter) else { return false };
    at(value, &progress.phase_field).and_then(Value::as_str) == Some(letter.phase.as_str())
}

/// How many failures the status accounts for.
pub fn retries(claim: &Claim, value: &Value) -> Option<u32> {
    let field = claim.dead_letter.as_ref()?.retries_field.as_ref()?;
    Some(at(value, field).and_then(Value::as_u64).map_or(0, |retries| u32::try_from(retries).unwrap_or(u32::MAX)))
}

/// The mirror label and the value that it ought to have, where the claim has one. `Err` names a phase that no label can hold.
pub fn mirror(claim: &Claim, value: &Value) -> Option<Result<(String, Option<String>), String>> {
    let progress = claim.progress.as_ref()?;
    let label = progress.mirror_label.clone()?;
    let phase = at(value, &progress.phase_field).and_then(Value::as_str).map(str::to_lowercase);
    match phase {
        Some(phase) if !is_label_value(&phase) => Some(Err(phase)),
        phase => Some(Ok((label, phase))),
    }
}

/// <https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#syntax-and-character-set>
fn is_label_value(value: &str) -> bool {
    let ends = |c: Option<char>| c.is_none_or(|c| c.is_ascii_alphanumeric());
    value.len() <= 63
        && ends(value.chars().next())
        && ends(value.chars().next_back())
        && value.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

fn warning(reason: &str, note: &str) -> Event {
    Event { warning: true, reason: reason.into(), action: "Reconcile".into(), note: cut(note, MESSAGE_MAX) }
}

/// The status as it was given and as it is to be.
struct Status {
    given: Value,
    fields: Value,
}

impl Status {
    /// Of an object, with the status that the handler returned, if any.
    fn new(value: &Value, own: Option<Value>) -> Self {
        let given = at(value, "status").cloned().unwrap_or(Value::Null);
        Self { fields: own.unwrap_or_else(|| given.clone()), given }
    }

    /// Success sets the failure account back. Where the handler sent no status, the host takes its own message away too.
    fn forgive(&mut self, claim: &Claim, failures: u32, own_status: bool) {
        let Some(DeadLetter { retries_field, message_field, .. }) = &claim.dead_letter else { return };
        if let Some(retries) = retries_field {
            match self.given_at(retries).and_then(Value::as_u64) {
                Some(0) | None => self.keep(retries),
                Some(_) => self.set(retries, 0.into()),
            }
        }
        if failures > 0 && !own_status {
            self.set(message_field, Value::Null);
        }
    }

    fn stamp(&mut self, claim: &Claim, object: &Object, own_status: bool) {
        if claim.progress.is_some() || own_status {
            self.set("status.observedGeneration", object.generation.into());
        }
    }

    fn give_up(&mut self, claim: &Claim, object: &Object, cause: &str, own_status: bool) {
        self.stamp(claim, object, own_status);
        let Some(dead_letter) = &claim.dead_letter else { return };
        self.set(&dead_letter.phase_field(claim), dead_letter.phase.clone().into());
        let own_message = own_status && at_status(&self.fields, &dead_letter.message_field).is_some_and(|message| !message.is_null());
        if !own_message {
            self.set(&dead_letter.message_field, cut(cause, MESSAGE_MAX).into());
        }
        if let Some(retries) = &dead_letter.retries_field {
            self.keep(retries);
        }
    }

    fn fail(
        &mut self,
        claim: &Claim,
        object: &Object,
        failures: u32,
        cause: String,
        after: Option<Duration>,
        events: &mut Vec<Event>,
    ) -> (Then, Verdict) {
        let failures = failures.saturating_add(1);
        self.keep("status.observedGeneration");
        if let Some(dead_letter) = &claim.dead_letter {
            self.set(&dead_letter.message_field, cut(&cause, MESSAGE_MAX).into());
            if let Some(retries) = &dead_letter.retries_field {
                self.set(retries, failures.into());
            }
            if dead_letter.after.is_some_and(|after| failures >= after) {
                self.set(&dead_letter.phase_field(claim), dead_letter.phase.clone().into());
                self.stamp(claim, object, true);
                events.push(warning("DeadLettered", &format!("gave up after {failures} failures: {cause}")));
                return (Then::Stop, Verdict::DeadLetter);
            }
        }
        if failures == 1 {
            events.push(warning("ReconcileFailed", &cause));
        }
        (Then::Fail { cause, after }, Verdict::Failure)
    }

    fn given_at(&self, path: &str) -> Option<&Value> {
        at_status(&self.given, path)
    }

    fn set(&mut self, path: &str, value: Value) {
        set(&mut self.fields, path, value);
    }

    /// A field of the host's own stays as it was, whatever the handler's status says of it.
    fn keep(&mut self, path: &str) {
        let value = self.given_at(path).cloned().unwrap_or(Value::Null);
        set(&mut self.fields, path, value);
    }
}

impl DeadLetter {
    /// The dead letter's phase is written where `progress` reads it.
    fn phase_field(&self, claim: &Claim) -> String {
        claim.progress.as_ref().map_or_else(|| "status.phase".to_owned(), |progress| progress.phase_field.clone())
    }
}

fn at_status<'v>(status: &'v Value, path: &str) -> Option<&'v Value> {
    at(status, path.strip_prefix("status.").unwrap_or(path))
}

/// Sets the value at a path such as `status.phase`, of a value that is the status.
fn set(status: &mut Value, path: &str, value: Value) {
    let mut place = status;
    for field in path.strip_prefix("status.").unwrap_or(path).split('.') {
        if !place.is_object() {
            *place = Value::Object(Map::new());
        }
        place = place.as_object_mut().expect("just made one").entry(field).or_insert(Value::Null);
    }
    *place = value;
}

#[cfg(test)]
mod tests;
