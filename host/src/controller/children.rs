//! How the children that a run wants come about, and what it means when somebody touches them.

use std::sync::Arc;

use super::{
    Controller, End, Work,
    settle::Settlement,
    term::Term,
    write::{OWED_BASE, Owed},
};
use crate::{
    catalog::Versions,
    children::{Applicant, Child, Hindrance, Owned, Unapplied, desired},
    kinds,
    metrics::Verdict,
    object::{GroupKind, Key, Object, ObjectKey},
    queue::Then,
    reconcile::{Event, Failure, Outcome},
    status::{MESSAGE_MAX, WriteError},
    text::cut,
};

impl Controller {
    /// Makes the children as the run wants them, or says how the turn ends instead.
    pub(super) async fn write_children(&self, work: &Work<'_>, object: &Arc<Object>, settlement: Settlement) -> Result<Settlement, End> {
        let brood = self.children.of(&work.key.kind);
        let applied = match (&settlement.children, &brood) {
            (Some(children), Some(brood)) => {
                let by = Applicant { claim: &work.serving.claim, actor: work.serving.actor() };
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
                    // Of another brood nothing is known: it has yet to look at the children.
                    let still = || match (&brood, self.children.of(&work.key.kind)) {
                        (Some(brood), Some(now)) => Arc::ptr_eq(brood, &now),
                        (brood, now) => brood.is_none() && now.is_none(),
                    };
                    work.term.children_done(work.key, still);
                }
                return Ok(settlement);
            }
            Err(Unapplied::Refused(sentence)) => {
                return Err(self.write_refusal(work, object.clone(), Failure::Refused(sentence), settlement.failures).await);
            }
            Err(Unapplied::Hindered(hindrance)) => {
                self.publish(work, &[hindered(&hindrance)]);
                let error = WriteError::Later { after: OWED_BASE, cause: hindrance.sentence };
                // Nothing is owed: the next run, or another version, may want it otherwise.
                let end = self.unwritten(work, object.clone(), None, error);
                return Err(End { verdict: Verdict::ChildrenHindered, ..end });
            }
            // What may have been applied is simply applied again.
            Err(Unapplied::Write(WriteError::Lost { after, cause })) => WriteError::Later { after, cause },
            Err(Unapplied::Write(error)) => error,
        };
        Err(self.unwritten(work, object.clone(), Some(Owed::all_of(settlement)), error))
    }

    /// After a turn: what happened to the children meanwhile, or was overlooked as the answer to a write was on its way.
    pub(super) fn look_after_children(&self, term: &Term, key: &Key) {
        if !term.take_held_drift(key) && term.children_due(key) {
            return;
        }
        let Some(owner) = self.kinds.get(&key.kind).and_then(|watched| watched.get(&key.object)) else { return };
        if self.children.of(&key.kind).is_some_and(|brood| brood.drifted(&owner.uid)) {
            self.drifted(&key.kind, &key.object, &owner.uid);
        }
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
                Some(known) => known.actor = known.actor.take().or_else(|| serving.actor()),
                None => owned.push(Owned { kind: kind.clone(), actor: serving.actor() }),
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
