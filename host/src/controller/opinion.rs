//! A version on trial: where it fails, the former version is asked for a second opinion, and what that makes of the object counts.

use crate::{
    catalog::{Candidate, Serving},
    kinds::{self, Watched},
    metrics::Verdict,
    object::GroupKind,
    package::Version,
    queue::{Cause, Turn},
    reconcile::{Failure, Next, Outcome},
    trial::{Evidence, Judgement},
};

use super::{Controller, End, Fault, Work, term::Term};

impl Fault {
    /// What a run says against its handler: nothing, where it went well or the host is to blame.
    pub(super) fn of(result: &Result<Outcome, Failure>, version: &Version) -> Option<Self> {
        let (cause, broken) = match result {
            Ok(outcome) => match &outcome.next {
                Next::AwaitChange | Next::After(_) => return None,
                Next::Retry(cause) | Next::RetryAfter(_, cause) | Next::GiveUp(cause) => (cause.clone(), false),
            },
            Err(failure) if !failure.counts() => return None,
            Err(failure) => (failure.to_string(), failure.is_broken()),
        };
        Some(Self { cause, broken, version: version.clone() })
    }
}

impl Controller {
    /// The step of the version that serves the object; or of the former version, where one on trial fails.
    pub(super) async fn attempt(&self, work: &Work<'_>, turn: &Turn) -> End {
        let mut end = self.step(work, turn).await;
        let Some(trial) = work.trial else { return end };
        // A second try is often luckier, whoever makes it: on a back end that fails now and then, the former version must not have it alone.
        if end.fault.as_ref().is_some_and(|fault| !fault.broken) {
            end = self.step(work, turn).await;
        }
        let went_well = |verdict| matches!(verdict, Verdict::Success | Verdict::Requeue);
        let (end, evidence) = match end.fault {
            None if went_well(end.verdict) => (end, Evidence::Good),
            None => return end,
            Some(Fault { cause, broken, .. }) => {
                tracing::warn!(cause, "the version on trial failed; the former one runs instead");
                let stable = Work { serving: &work.watched.versions.stable, trial: None, fence: work.fence.clone(), ..*work };
                let second = self.step(&stable, turn).await;
                let evidence = match second.fault {
                    Some(_) => Evidence::Same,
                    None if went_well(second.verdict) => Evidence::Worse { cause, broken },
                    None => return second,
                };
                (second, evidence)
            }
        };
        if let Some(judgement) = trial.record(evidence) {
            self.judge(work.serving, judgement);
        }
        end
    }

    /// Gives a version on trial the time that has passed, and an object if none is within its share.
    pub(super) fn watch_trial(&self, term: &Term, kind: &GroupKind, watched: &Watched) {
        let Some(Candidate { serving, trial }) = watched.versions.candidate.as_ref().filter(|_| !watched.versions.paused) else { return };
        if trial.lacks_objects() {
            let objects = watched.all();
            let included = trial.include_one(objects.iter().map(|object| &*object.uid));
            if let Some(object) = included.and_then(|uid| objects.iter().find(|object| &*object.uid == uid)) {
                term.wake(&kinds::key(kind, &object.key), &serving.claim, object, Cause::Reload);
            }
        }
        if let Some(judgement) = trial.tick() {
            self.judge(serving, judgement);
        }
    }

    fn judge(&self, serving: &Serving, judgement: Judgement) {
        match &judgement {
            Judgement::Passed => tracing::info!(plugin = serving.name, version = %serving.version, "the version has proven itself"),
            Judgement::Failed(why) => {
                tracing::warn!(plugin = serving.name, version = %serving.version, why, "the version is rolled back");
            }
        }
        self.catalog.judge(serving, judgement);
    }
}
