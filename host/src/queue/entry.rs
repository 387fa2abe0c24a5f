//! One object in the queue, and what a wake means for it.

use std::{sync::Arc, time::Duration};

use super::{Cause, lane::Rank};

/// A time, as the span since the queue was made.
pub(super) type Time = Duration;

/// A place among things ordered by time; the serial makes it unique.
pub(super) type Slot = (Time, u64);

/// A resync comes after everything else of its kind, until it has waited this long. Then it takes its place by
/// priority and its full age, so that it cannot starve. Worth four priorities; well under the resync period of 10 minutes.
pub(super) const RESYNC_PATIENCE: Duration = Duration::from_secs(120);

/// An object that is runnable, delayed or running. Others have no entry: there is nothing to remember about them.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) uid: Arc<str>,
    pub(super) priority: i64,
    /// Why it will run, or runs.
    pub(super) cause: Cause,
    /// In a row, for this version of the spec.
    pub(super) failures: u32,
    pub(super) last_failure: Option<String>,
    pub(super) place: Place,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    /// Among the runnable, in the order.
    Ready { since: Time, rank: Rank },
    /// Among the resyncs, which come last.
    Resync { slot: Slot },
    /// Among the timers.
    Delayed { slot: Slot, wait: Wait },
    /// With a worker.
    Running(News),
}

/// What happened to an object while it ran.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct News {
    /// What woke it.
    pub(super) woken: Option<Cause>,
    /// Whether one of the wakes starts afresh.
    pub(super) afresh: bool,
    /// Whether the object that runs is gone, or another one has its name: what the turn says is of no interest.
    pub(super) outlived: bool,
}

/// Why an object is delayed, which decides what may cut it short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// After a failure: only a new spec or a reload.
    Backoff,
    /// The handler asked to look again: any wake.
    Timer,
    /// The host's own affair, such as a 429 of the API server: nothing.
    Hold,
}

impl Entry {
    /// A new object. Its place is given by whoever puts it somewhere.
    pub(super) fn new(uid: &str, cause: Cause, priority: i64) -> Self {
        let place = Place::Resync { slot: (Time::ZERO, 0) };
        Self { uid: uid.into(), priority, cause, failures: 0, last_failure: None, place }
    }

    /// Forgets the failures.
    pub(super) fn forgive(&mut self) {
        self.failures = 0;
        self.last_failure = None;
    }

    /// Takes note of a wake of this very object. If that changes its place, returns since when it counts as runnable.
    pub(super) fn wake(&mut self, cause: Cause, priority: i64, now: Time) -> Option<Time> {
        let reprioritized = std::mem::replace(&mut self.priority, priority) != priority;
        let earlier_cause = self.cause;
        if cause.starts_afresh() {
            self.forgive();
        }
        match self.place {
            Place::Running(ref mut news) => {
                news.add(cause);
                None
            }
            Place::Ready { since, .. } | Place::Resync { slot: (since, _) } => {
                self.cause = cause.min(earlier_cause);
                (self.cause != earlier_cause || reprioritized).then_some(since)
            }
            Place::Delayed { wait: Wait::Hold, .. } => {
                self.cause = cause.min(earlier_cause);
                None
            }
            Place::Delayed { slot: (due, _), wait } => {
                let cut = match wait {
                    Wait::Backoff => cause.starts_afresh(),
                    // A resync comes last: where the timer is due before its patience is over, cutting it would only delay the object.
                    Wait::Timer => cause != Cause::Resync || due > now.saturating_add(RESYNC_PATIENCE),
                    Wait::Hold => false,
                };
                if !cut {
                    return None;
                }
                self.cause = cause;
                Some(now)
            }
        }
    }
}

impl News {
    pub(super) fn add(&mut self, cause: Cause) {
        self.woken = Some(self.woken.map_or(cause, |other| other.min(cause)));
        self.afresh |= cause.starts_afresh();
    }
}
