//! The finalizer in the life of an object: added before the first run, taken off after the last, reported where nobody will.

use std::sync::Arc;

use serde_json::Value;

use super::{
    Controller, End, Fault, Work,
    children::with_children,
    settle::{Settlement, farewell},
    step::ran,
    write::{Owed, State},
};
use crate::{
    catalog::Serving,
    finalizer,
    kinds::Watched,
    metrics::Verdict,
    object::{GroupKind, Object},
    queue::{Then, Turn},
    reconcile::{Event, Phase},
    status::{WriteError, Written},
};

/// How many objects are told that the plugin which their finalizer waits for is gone; the log has the count of all.
const ORPHANS: usize = 100;

impl Controller {
    /// Gives the object the finalizer before anything is done that would have to be undone.
    pub(super) async fn add_finalizer(&self, work: &Work<'_>, object: &Arc<Object>) -> Result<Arc<Object>, WriteError> {
        let added = finalizer::add(&self.writer, &work.serving.claim.reconciles, object, &work.fence).await?;
        self.wrote(work, "finalizer", 1);
        Ok(self.observe(work, added.object))
    }

    /// The object is being deleted and waits for the finalizer.
    pub(super) async fn say_farewell(&self, work: &Work<'_>, turn: &Turn, object: Arc<Object>, value: &Value) -> End {
        let claim = &work.serving.claim;
        if !claim.finalizer {
            // A version on trial lets go of nothing that the former one has yet to undo.
            if work.trial.is_some() && work.watched.versions.stable.claim.finalizer {
                return Box::pin(self.say_farewell(&work.of_stable(), turn, object, value)).await;
            }
            let settlement = Settlement { release: true, ..Settlement::nothing(Then::Wait, Verdict::Settled) };
            return self.written(work, State::of(object), settlement).await;
        }
        let result = self.handle(work, turn, object.clone(), value, turn.failures, Phase::Finalize).await;
        let (result, children) = with_children(work, &object, result);
        let (ran, fault) = (ran(work, &result), Fault::of(&result, &work.serving.version));
        if work.trial.is_some() && fault.is_some() {
            return End::of(Then::Wait, Verdict::Failure, Some(object)).after_run(ran, fault);
        }
        let settlement = Settlement { children, ..farewell(claim, &object, value, turn.failures, result) };
        self.write(work, State::of(object), settlement).await.after_run(ran, fault)
    }

    /// Takes the finalizer off an object that is done with, which is the last that is written to it: as a rule it is gone then.
    pub(super) async fn release(&self, work: &Work<'_>, object: Arc<Object>, settlement: Settlement) -> End {
        match finalizer::remove(&self.writer, &work.serving.claim.reconciles, &object, &work.fence).await {
            Ok(Written { object: answer, .. }) => {
                tracing::debug!("finalizer taken off");
                self.wrote(work, "finalizer", 1);
                End::of(settlement.then, settlement.verdict, Some(self.observe(work, answer)))
            }
            Err(error) => self.unwritten(work, object, Some(Owed::all_of(settlement)), error),
        }
    }

    /// Tells of the objects whose deletion waits, or would wait, for a plugin that is gone, and how a person lets go of them.
    pub(super) fn report_orphans(&self, kind: &GroupKind, watched: &Watched) {
        let orphans: Vec<_> = watched.all().into_iter().filter(|object| finalizer::holds(object, kind)).collect();
        let Some(fence) = self.leadership.current().filter(|_| !orphans.is_empty()) else { return };
        let Serving { name, claim, .. } = &**watched.versions.newest();
        let finalizer = finalizer::name(kind);
        tracing::warn!(plugin = name, %kind, finalizer, objects = orphans.len(), "finalizers wait for a plugin that is gone");
        for object in orphans.iter().take(ORPHANS) {
            let command = finalizer::removal(&claim.reconciles, object);
            let note = format!(
                "Its finalizer {finalizer} waits for the plugin {name}, which is gone: deliver a plugin for {} again, or give up on what \
                 it would have undone: {command}",
                claim.reconciles.kind
            );
            let event = Event { warning: true, reason: "FinalizerOrphaned".into(), action: "Withdraw".into(), note };
            self.recorder.publish(&claim.reconciles, object, &event, &fence);
        }
    }
}
