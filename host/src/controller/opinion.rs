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

/// What is said of a version whose children could not be written where those of the former one could.
const HINDERED: &str = "its children could not be written; Events of the objects say why";

impl Fault {
    /// What a run says against its handler: nothing, where it went well or the host is to blame.
    pub(super) fn of(result: &Result<Outcome, Failure>, version: &Version) -> Option<Self> {
        let fault = |cause, broken, waits| Some(Self { cause, broken, waits, version: version.clone() });
        match result {
            Ok(outcome) => match &outcome.next {
                Next::AwaitChange | Next::After(_) => None,
                Next::Retry(cause) | Next::GiveUp(cause) => fault(cause.clone(), false, false),
                Next::RetryAfter(_, cause) => fault(cause.clone(), false, true),
            },
            Err(failure) if !failure.counts() => None,
            Err(failure) => fault(failure.to_string(), failure.is_broken(), false),
        }
    }
}

impl Controller {
    /// The step of the version that serves the object; or of the former version, where one on trial fails.
    pub(super) async fn attempt(&self, work: &Work<'_>, turn: &Turn) -> End {
        let mut end = self.step(work, turn).await;
        let Some(trial) = work.trial else { return end };
        // A second try is often luckier, whoever makes it: on a back end that fails now and then, the former version must not have it
        // alone. Who is told to wait does not try again at once.
        if end.fault.as_ref().is_some_and(|fault| !fault.broken && !fault.waits) {
            end = self.step(work, turn).await;
        }
        let (evidence, end) = match first_opinion(&end, &work.serving.version) {
            First::Evidence(evidence) => (Some(evidence), end),
            First::Doubt(fault) => {
                tracing::warn!(fault.cause, "the version on trial failed; the former one runs instead");
                let second = self.step(&work.of_stable(), turn).await;
                (second_opinion(fault, &second), second)
            }
            First::Nothing => (None, end),
        };
        if let Some(evidence) = evidence {
            self.metrics.tried(&work.key.kind, &evidence);
            if let Some(judgement) = trial.record(evidence) {
                self.judge(work.serving, judgement);
            }
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

/// What a turn says of the version on trial before anybody else is asked.
enum First {
    /// This.
    Evidence(Evidence),
    /// It failed, for what that is worth.
    Doubt(Fault),
    /// Nothing: its handler was not run, or what came of that is not known yet.
    Nothing,
}

/// Judges by the run alone: a debt that was paid is no run, and says nothing of whoever serves now.
fn first_opinion(end: &End, version: &Version) -> First {
    let ran = end.ran.as_ref() == Some(version);
    match (&end.fault, end.verdict) {
        (Some(fault), _) if fault.version == *version => First::Doubt(fault.clone()),
        (None, Verdict::HostError) => First::Evidence(Evidence::Hindered),
        (None, Verdict::Success | Verdict::Requeue) if ran => First::Evidence(Evidence::Good),
        (None, Verdict::ChildrenHindered) if ran => {
            First::Doubt(Fault { cause: HINDERED.into(), broken: false, waits: false, version: version.clone() })
        }
        _ => First::Nothing,
    }
}

/// What the former version's turn on the same object makes of that.
fn second_opinion(Fault { cause, broken, waits, .. }: Fault, second: &End) -> Option<Evidence> {
    match (&second.fault, second.verdict) {
        (Some(_), _) => Some(Evidence::Same),
        (None, Verdict::ChildrenHindered) => Some(Evidence::Hindered),
        (None, Verdict::Success | Verdict::Requeue) if second.ran.is_some() => {
            // The other side may have had enough of one moment, and not of the next.
            Some(if waits { Evidence::Hindered } else { Evidence::Worse { cause, broken } })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{package::Digest, queue::Then};

    fn version(code: &[u8]) -> Version {
        Version { digest: Digest::of(code), config_hash: String::new() }
    }

    /// The end of a turn in which this version ran, if one did, with this result.
    fn end(ran: Option<&[u8]>, result: &Result<Outcome, Failure>, verdict: Verdict) -> End {
        let fault = ran.and_then(|code| Fault::of(result, &version(code)));
        End { fault, ran: ran.map(version), ..End::of(Then::Wait, verdict, None) }
    }

    fn well() -> Result<Outcome, Failure> {
        Ok(Outcome::just(Next::AwaitChange))
    }

    fn trap() -> Result<Outcome, Failure> {
        Err(Failure::Trap("unreachable".into()))
    }

    /// The evidence for version 2 of a turn of its own, and of another one of version 1 if that is asked for.
    fn evidence(first: &End, second: &End) -> Option<Evidence> {
        match first_opinion(first, &version(b"2")) {
            First::Evidence(evidence) => Some(evidence),
            First::Doubt(fault) => second_opinion(fault, second),
            First::Nothing => None,
        }
    }

    #[test]
    fn what_the_former_version_can_do_counts_against_a_new_one_that_cannot() {
        let good = end(Some(b"1"), &well(), Verdict::Success);
        assert_eq!(evidence(&end(Some(b"2"), &well(), Verdict::Requeue), &good), Some(Evidence::Good));
        let cause = trap().expect_err("it trapped").to_string();
        let trapped = end(Some(b"2"), &trap(), Verdict::Failure);
        assert_eq!(evidence(&trapped, &good), Some(Evidence::Worse { cause, broken: true }));
        assert_eq!(evidence(&trapped, &end(Some(b"1"), &trap(), Verdict::Failure)), Some(Evidence::Same));
        let hindered = end(Some(b"2"), &well(), Verdict::ChildrenHindered);
        assert_eq!(evidence(&hindered, &good), Some(Evidence::Worse { cause: HINDERED.into(), broken: false }));
        assert_eq!(evidence(&hindered, &end(Some(b"1"), &well(), Verdict::ChildrenHindered)), Some(Evidence::Hindered));
    }

    #[test]
    fn a_debt_that_is_paid_is_no_run_of_whoever_serves_now() {
        let good = end(Some(b"1"), &well(), Verdict::Success);
        assert_eq!(evidence(&end(None, &well(), Verdict::Success), &good), None);
        assert_eq!(evidence(&end(Some(b"1"), &trap(), Verdict::Failure), &good), None, "of another version");
        let trapped = end(Some(b"2"), &trap(), Verdict::Failure);
        assert_eq!(evidence(&trapped, &end(Some(b"1"), &well(), Verdict::WriteDelayed)), None, "not known yet");
        assert_eq!(evidence(&trapped, &end(None, &well(), Verdict::Success)), None);
        assert_eq!(end(None, &well(), Verdict::Success).ran_broken(), None, "no run closes a circuit but one");
        assert_eq!(end(Some(b"1"), &well(), Verdict::WriteDelayed).ran_broken(), Some(false));
    }

    #[test]
    fn who_could_not_run_or_was_told_to_wait_has_shown_nothing() {
        let good = end(Some(b"1"), &well(), Verdict::Success);
        assert_eq!(evidence(&end(None, &well(), Verdict::HostError), &good), Some(Evidence::Hindered));
        let told_to_wait = Ok(Outcome::just(Next::RetryAfter(Duration::from_secs(9), "429".into())));
        let waits = end(Some(b"2"), &told_to_wait, Verdict::Failure);
        assert!(waits.fault.as_ref().is_some_and(|fault| fault.waits));
        assert_eq!(evidence(&waits, &good), Some(Evidence::Hindered));
    }
}
