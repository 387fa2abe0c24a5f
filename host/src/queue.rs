//! The work queue: which object runs next, and when.
//!
//! # Expected flow
//! There is one queue per term of leadership, dropped with it. A plugin's kind gets a lane with [`Queue::open`]. The watch calls
//! [`Queue::wake`] for each object that may need work and [`Queue::forget`] for each that is gone. Workers take a [`Turn`] from
//! [`Queue::next`], run the object, and end the turn with [`Turn::done`].
//!
//! # Guarantees
//! - Wakes of one key are folded into one run, and a key never has two turns at once, not even when its lane was closed and opened
//!   again in between. A wake during a turn leads to another one.
//! - Nothing is lost: a woken key of an open lane gets a turn, unless it is forgotten or its lane is closed. None starves.
//! - *Backoff* (after [`Then::Fail`]) doubles with each failure in a row. It ends early only with a new spec, a deletion, a redrive, a reload or another uid;
//!   other wakes are folded into the waiting run, which stays when it was. A *timer* (after [`Then::After`]) gives way to any wake.
//!   [`Then::Again`] gives way to nothing.
//! - Order within a lane: by priority, where every 30 s of waiting count as one more; then a live change before a retry or a change of
//!   what was read, before what a reload or the first list brought (5 s and 15 s of waiting outweigh that); resyncs, and what a list
//!   finds done, last, until they have waited 2 min.
//! - Lanes take fair turns, each within its own concurrency. A concurrency of 0 holds the lane: its objects wait. A lane may
//!   [prefer](Queue::prefer_sound) objects without failures to all others.
//!
//! # Assumptions
//! Own writes do not wake: who calls `wake` tells a change from its echo. A known object has one uid; another one is a new object.
//!
//! # Caveats
//! All is in memory. After a restart, age and backoff begin anew; the count of failures that matters is in the object's status.
//! A wake for a kind without an open lane does nothing: its objects come with the first list once there is one.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::Notify, time::Instant};

use crate::{
    claim::Pace,
    object::{GroupKind, Key},
};

mod entry;
mod lane;
mod state;
#[cfg(test)]
mod tests;

use state::{Start, State};

/// Handle to a queue. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Queue {
    shared: Arc<Shared>,
}

/// Why a key is woken, or a turn starts. Where several are folded into one run, the first in this order is named.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Cause {
    /// The object is new, or its generation is.
    NewSpec,
    /// It is to be deleted.
    Deletion,
    /// Something else of it changed: labels, annotations, status, a child.
    Change,
    /// Somebody asks to try again at once what failed.
    Redrive,
    /// The time came that the handler asked for.
    Timer,
    /// The backoff after a failure is over.
    Retry,
    /// Something that its last run has read has changed.
    Read,
    /// Another version of the plugin serves now.
    Reload,
    /// It was in the first list of its kind, and is not done.
    FirstList,
    /// It is looked at although nothing is known to have changed, or to be left to do.
    Resync,
}

/// One run of one object. Dropping it unfinished, as a panic does, counts as a failure.
#[derive(Debug)]
#[must_use = "dropping a turn counts as a failure of the object"]
pub struct Turn {
    /// Which object.
    pub key: Key,
    /// Its identity when it was last woken.
    pub uid: Arc<str>,
    /// Why it runs.
    pub cause: Cause,
    /// Failures in a row, for this version of the spec.
    pub failures: u32,
    /// The cause of the last of them.
    pub last_failure: Option<String>,
    /// How long it was runnable before.
    pub waited: Duration,
    shared: Option<Arc<Shared>>,
}

/// What happens after a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Then {
    /// Success: it runs again when woken.
    Wait,
    /// Success: it runs again when woken, and else after this time, of which at least one second is waited.
    After(Duration),
    /// A failure: it runs again after the backoff.
    Fail {
        /// A sentence.
        cause: String,
        /// At least this is waited.
        after: Option<Duration>,
    },
    /// Given up: it runs again when woken, with no failures remembered.
    Stop,
    /// The host's own affair, neither success nor failure: it runs again after this time, with the failures so far.
    Again(Duration),
}

/// How much of a kind is where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Depth {
    /// Objects that wait for a free worker.
    pub ready: usize,
    /// Objects that wait for a time.
    pub delayed: usize,
    /// Objects that run.
    pub running: usize,
}

#[derive(Debug)]
struct Shared {
    made: Instant,
    inner: Mutex<Inner>,
    /// Tells one of the waiting `next` calls to look again. Whoever looked tells another one, so that one permit is enough.
    look: Notify,
    /// Tells that no turn runs any more.
    idle: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    state: State,
    intake_stopped: bool,
}

impl Queue {
    /// An empty queue without lanes. Its time starts now, by tokio's clock.
    #[allow(clippy::new_without_default, reason = "reads the clock")]
    pub fn new() -> Self {
        let shared = Shared { made: Instant::now(), inner: Mutex::default(), look: Notify::new(), idle: Notify::new() };
        Self { shared: Arc::new(shared) }
    }

    /// Opens the lane of a kind, or gives it another pace.
    pub fn open(&self, kind: GroupKind, pace: Pace) {
        self.shared.lock().state.open(kind, pace);
        self.shared.look.notify_one();
    }

    /// Forgets the failures of every object of a kind that does not run: those that wait out a backoff run again now.
    pub fn redrive(&self, kind: &GroupKind) {
        let now = self.shared.now();
        self.shared.lock().state.redrive(kind, now);
        self.shared.look.notify_one();
    }

    /// Whether the objects of a kind that have not failed of late come before all others.
    pub fn prefer_sound(&self, kind: &GroupKind, prefer: bool) {
        self.shared.lock().state.prefer_sound(kind, prefer);
    }

    /// Whether an object of a kind waits for its turn or runs, or has failed and will have another one.
    pub fn has_to_probe(&self, kind: &GroupKind) -> bool {
        self.shared.lock().state.has_to_probe(kind)
    }

    /// Closes the lane of a kind and drops what waits there. Turns that run go on; what they end with counts only if the lane is open then.
    pub fn close(&self, kind: &GroupKind) {
        self.shared.lock().state.close(kind);
    }

    /// Asks for a turn of this object. The priority given last is the one that counts. False where its kind has no open lane.
    pub fn wake(&self, key: &Key, uid: &str, cause: Cause, priority: i64) -> bool {
        let now = self.shared.now();
        let taken = self.shared.lock().state.wake(key, uid, cause, priority, now);
        self.shared.look.notify_one();
        taken
    }

    /// The object is gone: it gets no more turns, and what a running one ends with does not count.
    pub fn forget(&self, key: &Key) {
        self.shared.lock().state.forget(key);
    }

    /// Waits for the next turn. May be called by any number of workers, and dropped at any time.
    pub async fn next(&self) -> Turn {
        let _baton = Baton(&self.shared.look);
        loop {
            let look = self.shared.look.notified();
            let due = match self.shared.look_now() {
                Ok(start) => return Turn::new(start, self.shared.clone()),
                Err(due) => due,
            };
            tokio::select! {
                () = look => {}
                () = sleep_for(due) => {}
            }
        }
    }

    /// What is where, of each kind with a lane.
    pub fn depth(&self) -> Vec<(GroupKind, Depth)> {
        self.shared.lock().state.depth()
    }

    /// What of one kind is where.
    pub fn depth_of(&self, kind: &GroupKind) -> Depth {
        self.shared.lock().state.depth_of(kind)
    }

    /// From now on no turn starts: `next` waits forever.
    pub fn stop_intake(&self) {
        self.shared.lock().intake_stopped = true;
    }

    /// Whether no turn runs.
    pub fn is_idle(&self) -> bool {
        self.shared.lock().state.running() == 0
    }

    /// Waits until no turn runs.
    pub async fn idle(&self) {
        loop {
            let idle = self.shared.idle.notified();
            tokio::pin!(idle);
            idle.as_mut().enable();
            if self.is_idle() {
                return;
            }
            idle.await;
        }
    }
}

impl Cause {
    /// All, for metrics that exist before they count.
    pub const ALL: [Self; 10] = [
        Self::NewSpec,
        Self::Deletion,
        Self::Change,
        Self::Redrive,
        Self::Timer,
        Self::Retry,
        Self::Read,
        Self::Reload,
        Self::FirstList,
        Self::Resync,
    ];

    /// For spans and metric labels.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NewSpec => "new-spec",
            Self::Deletion => "deletion",
            Self::Change => "change",
            Self::Redrive => "redrive",
            Self::Timer => "timer",
            Self::Retry => "retry",
            Self::Read => "read",
            Self::Reload => "reload",
            Self::FirstList => "first-list",
            Self::Resync => "resync",
        }
    }

    /// Whether the failures so far say nothing about the run to come.
    fn starts_afresh(self) -> bool {
        matches!(self, Self::NewSpec | Self::Deletion | Self::Redrive | Self::Reload)
    }
}

impl Turn {
    fn new(start: Start, shared: Arc<Shared>) -> Self {
        let Start { key, uid, cause, failures, last_failure, waited } = start;
        Self { key, uid, cause, failures, last_failure, waited, shared: Some(shared) }
    }

    /// Ends the turn.
    pub fn done(mut self, then: Then) {
        self.end(then);
    }

    fn end(&mut self, then: Then) {
        let Some(shared) = self.shared.take() else { return };
        let now = shared.now();
        let idle = {
            let mut inner = shared.lock();
            inner.state.done(&self.key, then, now, rand::random());
            inner.state.running() == 0
        };
        shared.look.notify_one();
        if idle {
            shared.idle.notify_waiters();
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.end(Then::Fail { cause: "the host panicked or gave up while it ran this object".into(), after: None });
    }
}

impl Shared {
    fn now(&self) -> Duration {
        self.made.elapsed()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A turn, or how long to wait for one if nothing else happens; none for ever.
    fn look_now(&self) -> Result<Start, Option<Duration>> {
        let now = self.now();
        let mut inner = self.lock();
        if inner.intake_stopped {
            return Err(None);
        }
        inner.state.next(now).ok_or_else(|| inner.state.next_due().map(|due| due.saturating_sub(now)))
    }
}

/// Hands the duty to look on to another waiting `next` when this one ends, be it with a turn or because it is dropped: the state may
/// have more, and the others may sleep until a later time.
struct Baton<'a>(&'a Notify);

impl Drop for Baton<'_> {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

async fn sleep_for(time: Option<Duration>) {
    match time {
        // Timers of tokio have a resolution of a millisecond and never fire early.
        Some(time) => tokio::time::sleep(time).await,
        None => std::future::pending().await,
    }
}
