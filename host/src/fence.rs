//! The fence: what lets an effect leave the host only while leadership is certain.
//!
//! # Expected flow
//! The lease keeps a [`Gate`]: it opens a term when it becomes leader, extends its deadline with each renewal and closes it when
//! leadership is in doubt. The controller asks [`Leadership::fence`] before each run and hands the [`Fence`] down; whoever has an
//! effect wraps it in [`Fence::guard`].
//!
//! # Guarantees
//! An effect under `guard` does not start after the term's deadline, and is dropped at it. A term, once closed, never opens again:
//! a fence of a former term stays shut in a later one.
//!
//! # Caveats
//! What was already on the wire cannot be recalled: resourceVersion and the idempotency key make it harmless.

use std::{future::poll_fn, pin::pin, task::Poll, time::Duration};

use tokio::sync::watch;

use crate::object::Key;

/// How often a deadline is looked at although no timer says so.
const LOOK: Duration = Duration::from_millis(250);

/// A point of the local boot-time clock, which goes on while the machine is suspended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootTime(Duration);

impl BootTime {
    /// Now.
    pub fn now() -> Self {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        Self(Duration::new(now.tv_sec.unsigned_abs(), u32::try_from(now.tv_nsec).unwrap_or(0)))
    }

    /// What is left until this point; none once it is reached.
    pub fn remaining(self) -> Option<Duration> {
        self.0.checked_sub(Self::now().0).filter(|left| !left.is_zero())
    }
}

impl std::ops::Add<Duration> for BootTime {
    type Output = Self;

    fn add(self, after: Duration) -> Self {
        Self(self.0.saturating_add(after))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Term {
    epoch: u64,
    deadline: BootTime,
}

#[derive(Clone, Copy, Debug, Default)]
struct State {
    last_epoch: u64,
    term: Option<Term>,
}

/// The side that the lease holds.
#[derive(Debug)]
pub struct Gate {
    state: watch::Sender<State>,
}

/// The side that everyone else asks. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Leadership {
    state: watch::Receiver<State>,
}

/// Permission for the effects of one run, in the term in which it was asked for. Its deadline moves with the renewals of the lease.
#[derive(Clone, Debug)]
pub struct Fence {
    epoch: u64,
    state: watch::Receiver<State>,
}

/// Why a guarded effect has no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Stopped {
    /// The term is over.
    #[error("the lease is in doubt")]
    Fenced,
    /// The effect's own time is over.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
}

/// A gate without a term, and the handle to ask it.
pub fn gate() -> (Gate, Leadership) {
    let (sender, receiver) = watch::channel(State::default());
    (Gate { state: sender }, Leadership { state: receiver })
}

impl Gate {
    /// Opens a new term, which ends at `deadline` unless it is extended. Returns its epoch.
    pub fn open(&self, deadline: BootTime) -> u64 {
        let mut epoch = 0;
        self.state.send_modify(|state| {
            state.last_epoch += 1;
            epoch = state.last_epoch;
            state.term = Some(Term { epoch, deadline });
        });
        epoch
    }

    /// Moves the deadline of the open term. False where the term is over, by its deadline too: then a new one has to be opened.
    pub fn extend(&self, deadline: BootTime) -> bool {
        let mut extended = false;
        self.state.send_modify(|state| match &mut state.term {
            Some(term) if term.deadline.remaining().is_some() => {
                term.deadline = deadline;
                extended = true;
            }
            _ => state.term = None,
        });
        extended
    }

    /// Ends the term: every effect under a fence of it is dropped.
    pub fn close(&self) {
        self.state.send_modify(|state| state.term = None);
    }
}

impl Leadership {
    /// Permission for effects on `key`, if this process may act on it now. There is one shard today, so the key does not matter yet.
    pub fn fence(&self, _key: &Key) -> Option<Fence> {
        self.current()
    }

    /// Permission for effects that belong to no object, such as writing a `Plugin`.
    pub fn current(&self) -> Option<Fence> {
        let term = self.state.borrow().term?;
        term.deadline.remaining()?;
        Some(Fence { epoch: term.epoch, state: self.state.clone() })
    }

    /// Whether this process leads now.
    pub fn leads(&self) -> bool {
        self.current().is_some()
    }

    /// Waits until a term other than `not` is open, and returns its fence. None when the gate is gone.
    pub async fn acquired(&mut self, not: Option<u64>) -> Option<Fence> {
        loop {
            if let Some(fence) = self.current().filter(|fence| Some(fence.epoch) != not) {
                return Some(fence);
            }
            self.state.changed().await.ok()?;
        }
    }
}

impl Fence {
    /// Which term this is of; later terms have higher ones.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// What is left of the term as known now; none once it is over.
    pub fn remaining(&self) -> Option<Duration> {
        self.state.borrow().term.filter(|term| term.epoch == self.epoch)?.deadline.remaining()
    }

    /// Completes when the term is over.
    pub async fn lost(&self) {
        let mut state = self.state.clone();
        while let Some(left) = self.remaining() {
            tokio::select! {
                changed = state.changed() => if changed.is_err() {
                    tokio::time::sleep(self.remaining().unwrap_or_default()).await;
                    return;
                },
                // Timers stop while the machine is suspended, and the deadline does not: look again before long.
                () = tokio::time::sleep(left.min(LOOK)) => {}
            }
        }
    }

    /// Runs an effect for at most `limit` and not beyond the term. The deadline is looked at before every step of the effect.
    pub async fn guard<T>(&self, limit: Duration, effect: impl Future<Output = T>) -> Result<T, Stopped> {
        if self.remaining().is_none() {
            return Err(Stopped::Fenced);
        }
        let mut lost = pin!(self.lost());
        let mut effect = pin!(tokio::time::timeout(limit, effect));
        poll_fn(|context| {
            if self.remaining().is_none() || lost.as_mut().poll(context).is_ready() {
                return Poll::Ready(Err(Stopped::Fenced));
            }
            effect.as_mut().poll(context).map(|done| done.map_err(|_| Stopped::TimedOut(limit)))
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOON: Duration = Duration::from_millis(40);

    #[tokio::test]
    async fn an_effect_is_dropped_at_the_deadline_and_never_starts_after_it() {
        let (gate, leadership) = gate();
        assert!(leadership.current().is_none());
        gate.open(BootTime::now() + SOON);
        let fence = leadership.current().expect("open");
        assert_eq!(fence.guard(Duration::from_secs(9), std::future::pending::<()>()).await, Err(Stopped::Fenced));
        let mut started = false;
        assert_eq!(fence.guard(SOON, async { started = true }).await, Err(Stopped::Fenced));
        assert!(!started);
    }

    #[tokio::test]
    async fn renewals_extend_a_fence_and_a_new_term_does_not_reopen_it() {
        let (gate, leadership) = gate();
        let first = gate.open(BootTime::now() + SOON);
        let fence = leadership.current().expect("open");
        assert!(gate.extend(BootTime::now() + Duration::from_secs(60)));
        assert_eq!(fence.guard(Duration::from_secs(9), tokio::time::sleep(SOON * 2)).await, Ok(()));
        assert_eq!(fence.guard(SOON, std::future::pending::<()>()).await, Err(Stopped::TimedOut(SOON)));
        gate.close();
        fence.lost().await;
        assert!(gate.open(BootTime::now() + Duration::from_secs(60)) > first);
        assert!(fence.remaining().is_none());
        assert!(leadership.leads());
    }

    #[test]
    fn a_term_past_its_deadline_cannot_be_extended() {
        let (gate, leadership) = gate();
        gate.open(BootTime::now());
        assert!(!gate.extend(BootTime::now() + Duration::from_secs(60)));
        assert!(!leadership.leads());
    }
}
