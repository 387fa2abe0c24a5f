//! How the children that a run wants come about, and what it means when somebody touches them.

use std::sync::Arc;

use super::{
    Controller, End, Work,
    settle::Settlement,
    write::{OWED_BASE, Owed},
};
use crate::{
    catalog::Versions,
    children::{Applicant, Child, Hindrance, Owned, Unapplied, desired},
    kinds,
    metrics::Verdict,
    object::{GroupKind, Object, ObjectKey},
    queue::Then,
    reconcile::{Event, Failure, Outcome},
    status::{MESSAGE_MAX, WriteError, cut},
};

impl Controller {
    /// Makes the children as the run wants them, or says how the turn ends instead.
    pub(super) async fn write_children(&self, work: &Work<'_>, object: &Arc<Object>, settlement: Settlement) -> Result<Settlement, End> {
        let brood = self.children.of(&work.key.kind);
        let applied = match (&settlement.children, &brood) {
            (Some(children), Some(brood)) => {
                let by = Applicant { claim: &work.serving.claim, account: work.serving.service_account.as_deref() };
                brood.apply(by, object, children, &work.fence).await
            }
            // The plugin went during the run.
            (Some(_), None) => return Err(End::of(Then::Wait, Verdict::Outdated, None)),
            (None, Some(brood)) => {
                if settlement.ran_well {
                    brood.leave(&object.uid);
                }
                Ok(0)
            }
            (None, None) => Ok(0),
        };
        let error = match applied {
            Ok(written) => {
                self.wrote(work, "children", written);
                if settlement.ran_well {
                    work.term.children_done(work.key);
                }
                return Ok(settlement);
            }
            Err(Unapplied::Refused(sentence)) => {
                return Err(self.write_refusal(work, object.clone(), Failure::Refused(sentence), settlement.failures).await);
            }
            Err(Unapplied::Hindered(hindrance)) => {
                self.publish(work, &[hindered(&hindrance)]);
                let error = WriteError::Later { after: OWED_BASE, cause: hindrance.sentence };
                let end = self.unwritten(work, object.clone(), Some(Owed::all_of(settlement)), error);
                return Err(End { verdict: Verdict::ChildrenHindered, ..end });
            }
            // What may have been applied is simply applied again.
            Err(Unapplied::Write(WriteError::Lost { after, cause })) => WriteError::Later { after, cause },
            Err(Unapplied::Write(error)) => error,
        };
        Err(self.unwritten(work, object.clone(), Some(Owed::all_of(settlement)), error))
    }

    /// Somebody else has changed or deleted a child.
    pub(super) fn drifted(&self, kind: &GroupKind, owner: &ObjectKey, uid: &str) {
        let (Some(term), Some(watched)) = (self.current_term(), self.kinds.get(kind)) else { return };
        // The garbage collector takes the children of an object that goes.
        if let Some(object) = watched.get(owner).filter(|object| &*object.uid == uid && !object.deleting) {
            term.drifted(&kinds::key(kind, owner), watched.claim(&object), &object);
        }
    }
}

/// The kinds of children of the versions that serve, each with the account by which it is watched: that of the stable version where it
/// owns the kind, so that one on trial cannot blind it.
pub(super) fn owned(versions: &Versions) -> Vec<Owned> {
    let both = std::iter::once(&versions.stable).chain(versions.candidate.as_ref().map(|candidate| &candidate.serving));
    let mut owned: Vec<Owned> = Vec::new();
    for serving in both {
        for kind in &serving.claim.owns {
            match owned.iter_mut().find(|known| known.kind.group_kind() == kind.group_kind()) {
                Some(known) => known.account = known.account.take().or_else(|| serving.service_account.clone()),
                None => owned.push(Owned { kind: kind.clone(), account: serving.service_account.clone() }),
            }
        }
    }
    owned
}

/// The children that a run wants, judged: an outcome with one that cannot be is refused whole.
pub(super) fn with_children(
    work: &Work<'_>,
    owner: &Object,
    result: Result<Outcome, Failure>,
) -> (Result<Outcome, Failure>, Option<Vec<Child>>) {
    let Ok(mut outcome) = result else { return (result, None) };
    match outcome.children.take().map(|wanted| desired(&work.serving.claim, owner, wanted)).transpose() {
        Ok(children) => (Ok(outcome), children),
        Err(sentence) => (Err(Failure::Refused(sentence)), None),
    }
}

fn hindered(Hindrance { reason, sentence }: &Hindrance) -> Event {
    Event { warning: true, reason: (*reason).to_owned(), action: "Apply".into(), note: cut(sentence, MESSAGE_MAX) }
}
