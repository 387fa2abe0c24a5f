//! What a turn does: pays what is owed, leaves what is settled, re-opens what is stale, runs the handler, and has the outcome written.

use std::sync::Arc;

use serde_json::Value;

use super::{
    Controller, End, PAUSED, Work,
    settle::{Settlement, Standing, reopen, retries, settle, standing},
    write::State,
};
use crate::{
    metrics::Verdict,
    object::{Object, at},
    queue::{Then, Turn},
    reconcile::{Failure, Outcome, Phase, Request},
    status::WriteError,
};

impl Controller {
    pub(super) async fn step(&self, work: &Work<'_>, turn: &Turn) -> End {
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

    async fn reopen(&self, work: &Work<'_>, object: &Arc<Object>) -> Result<Arc<Object>, WriteError> {
        let patch = reopen(&work.watched.serving.claim).expect("an object can only be stale by its claim's progress");
        let reopened = self.write_status(work, object, &patch).await?;
        Ok(self.write_labels(work, &reopened.object, &[]).await?.object)
    }
}

/// `<resource>.<group>/<namespace>/<name>/<uid>`: the same for every run of the object, and for no other.
fn idempotency_key(work: &Work<'_>, object: &Object) -> String {
    let resource = work.watched.serving.claim.reconciles.resource();
    format!("{resource}/{}/{}/{}", object.key.namespace.as_deref().unwrap_or_default(), object.key.name, object.uid)
}
