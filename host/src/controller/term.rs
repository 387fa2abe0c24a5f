//! What is remembered of each object during one term of leadership, and which changes wake it.
//!
//! # Guarantees
//! - An object is woken by a difference in generation, deletion, labels, annotations or status from what the host last saw *or wrote*;
//!   contents are compared, so an own write never wakes and a foreign reset does.
//! - What happens to an object while it runs is held until its write has settled, and compared then.
//!
//! # Assumptions
//! The store is updated before [`Term::observe`] is called.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use serde_json::Value;
use tokio::time::Instant;

use super::{
    breaker::Breaker,
    mark::{RETRY, asked_again},
    settle::{Settlement, label, mirror},
};
use crate::{
    claim::Claim,
    object::{GroupKind, Key, Object, at},
    package::Version,
    queue::{Cause, Queue, Then, Turn},
    reads::Index,
    report::LastFailure,
    status::MESSAGE_MAX,
    text::cut,
};

/// How long an object may lack its mirror label before the host sets it: a run that comes at once sets it anyway.
const MIRROR_AFTER: Duration = Duration::from_secs(1);
/// The shortest time from the beginning of a run to that of one which a change of what it has read leads to.
const READ_FLOOR: Duration = Duration::from_secs(1);

/// One term. Dropped when leadership ends, with everything that waits in it.
#[derive(Debug)]
pub struct Term {
    /// Its queue.
    pub queue: Queue,
    /// What was read by the last run of each object.
    pub reads: Index,
    tracked: Mutex<HashMap<Key, Tracked>>,
    unmirrored: Mutex<VecDeque<(Instant, Key)>>,
    late_reads: Mutex<VecDeque<(Instant, Key)>>,
    breakers: Mutex<HashMap<GroupKind, Breaker>>,
    /// The last failure of each kind, and whether its object has not had a good run since.
    failures: Mutex<HashMap<GroupKind, (LastFailure, bool)>>,
    paused: Mutex<HashSet<Key>>,
}

#[derive(Debug)]
struct Tracked {
    seen: Seen,
    running: bool,
    /// The generation for which the status counts failures, as far as this term knows.
    counted_for: Option<i64>,
    /// Apart, because hardly any object has one.
    pending: Option<Box<Pending>>,
    /// How often in a row a write could not be made.
    delays: u32,
    /// Whether its children may not be as they are to be, as far as this term knows.
    children_due: bool,
    /// Whether somebody touched them while it ran.
    drift_held: bool,
    /// When its last run began.
    began: Option<Instant>,
    /// Whether it is among the late reads.
    read_due: bool,
}

/// An outcome whose write is owed.
#[derive(Debug)]
pub struct Pending {
    /// The version whose run it is of.
    pub version: Version,
    /// The state that it was computed from.
    pub given: Arc<Object>,
    /// What to write.
    pub settlement: Settlement,
    /// Whether the write may have happened.
    pub uncertain: bool,
}

/// What of an object decides whether it is looked at again.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Seen {
    uid: Arc<str>,
    generation: i64,
    deleting: bool,
    rest: u64,
}

impl Seen {
    fn of(object: &Object) -> Self {
        let Object { uid, generation, deleting, rest, .. } = object;
        Self { uid: uid.clone(), generation: *generation, deleting: *deleting, rest: *rest }
    }

    fn is_new_spec_after(&self, before: &Self) -> bool {
        self.uid != before.uid || (self.generation != before.generation && !self.deleting)
    }
}

impl Term {
    /// A term without lanes.
    pub fn new() -> Self {
        Self {
            queue: Queue::new(),
            reads: Index::default(),
            tracked: Mutex::default(),
            unmirrored: Mutex::default(),
            late_reads: Mutex::default(),
            breakers: Mutex::default(),
            failures: Mutex::default(),
            paused: Mutex::default(),
        }
    }

    /// Takes note of an object as the store has it now, and wakes it if that says something new.
    pub fn observe(&self, key: &Key, claim: &Claim, object: &Object, listed: bool) {
        let seen = Seen::of(object);
        let mut tracked = self.lock();
        let cause = match tracked.get_mut(key) {
            None => {
                tracked.insert(key.clone(), Tracked::new(seen));
                if listed { Cause::FirstList } else { Cause::NewSpec }
            }
            Some(known) if known.running || known.seen == seen => return,
            Some(known) => known.cause(seen, object),
        };
        if !self.queue.wake(key, &object.uid, cause, priority(claim, object)) {
            // Its lane is not open yet: who opens it looks at all objects, and has to find this one new.
            tracked.remove(key);
            return;
        }
        drop(tracked);
        if lacks_mirror(claim, object) {
            self.mirror_after(key, MIRROR_AFTER);
        }
    }

    /// The object's mirror label is to be looked at after this time.
    pub fn mirror_after(&self, key: &Key, after: Duration) {
        self.unmirrored.lock().expect("no panic while the lock is held").push_back((Instant::now() + after, key.clone()));
    }

    /// Wakes an object although nothing is known to have changed.
    pub fn wake(&self, key: &Key, claim: &Claim, object: &Object, cause: Cause) {
        let priority = priority(claim, object);
        let mut tracked = self.lock();
        if self.queue.wake(key, &object.uid, cause, priority) {
            let known = tracked.entry(key.clone()).or_insert_with(|| Tracked::new(Seen::of(object)));
            // Another version may want other children.
            known.children_due |= cause == Cause::Reload;
        }
    }

    /// The object is gone. While it runs, the end of the run finds out.
    pub fn gone(&self, key: &Key) {
        self.pause(key, false);
        let mut tracked = self.lock();
        if tracked.get(key).is_some_and(|known| !known.running) {
            tracked.remove(key);
            self.queue.forget(key);
            self.reads.forget(key);
        }
    }

    /// Does something with the circuit breaker of a kind.
    pub fn breaker<T>(&self, kind: &GroupKind, with: impl FnOnce(&mut Breaker) -> T) -> T {
        with(self.breakers.lock().expect("no panic while the lock is held").entry(kind.clone()).or_default())
    }

    /// A handler has failed. The same failure of the same object again is no news.
    pub fn failed(&self, key: &Key, version: &Version, cause: &str) {
        let (object, version, cause) = (key.object.to_string(), version.to_string(), cut(cause, MESSAGE_MAX));
        let mut failures = self.failures.lock().expect("no panic while the lock is held");
        let (last, goes_on) = failures.entry(key.kind.clone()).or_default();
        if !*goes_on || (&last.object, &last.version, &last.cause) != (&object, &version, &cause) {
            let time = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
            (*last, *goes_on) = (LastFailure { object, cause, version, time }, true);
        }
    }

    /// A handler has done its work: if its object fails again, that is news.
    pub fn recovered(&self, key: &Key) {
        let mut failures = self.failures.lock().expect("no panic while the lock is held");
        if let Some((_, goes_on)) = failures.get_mut(&key.kind).filter(|(last, _)| last.object == key.object.to_string()) {
            *goes_on = false;
        }
    }

    /// The last failure of a kind's handler.
    pub fn last_failure(&self, kind: &GroupKind) -> Option<LastFailure> {
        self.failures.lock().expect("no panic while the lock is held").get(kind).map(|(last, _)| last.clone())
    }

    /// An object was found paused, or not. True where that is news.
    pub fn pause(&self, key: &Key, paused: bool) -> bool {
        let mut known = self.paused.lock().expect("no panic while the lock is held");
        if paused { known.insert(key.clone()) } else { known.remove(key) }
    }

    /// How many objects of a kind were found paused.
    pub fn paused(&self, kind: &GroupKind) -> usize {
        self.paused.lock().expect("no panic while the lock is held").iter().filter(|key| key.kind == *kind).count()
    }

    /// Forgets a kind.
    pub fn close(&self, kind: &GroupKind) {
        self.queue.close(kind);
        self.reads.forget_kind(kind);
        self.breakers.lock().expect("no panic while the lock is held").remove(kind);
        self.failures.lock().expect("no panic while the lock is held").remove(kind);
        self.paused.lock().expect("no panic while the lock is held").retain(|key| key.kind != *kind);
        self.lock().retain(|key, known| key.kind != *kind || known.running);
    }

    /// A turn begins: from here on events of the key are held. Returns the write that is owed and the generation counted for.
    pub fn begin(&self, key: &Key, object: &Object) -> (Option<Pending>, Option<i64>) {
        let mut tracked = self.lock();
        let seen = Seen::of(object);
        let known = tracked.entry(key.clone()).or_insert_with(|| Tracked::new(seen.clone()));
        known.running = true;
        known.began = Some(Instant::now());
        if known.seen != seen {
            known.renew(seen);
        }
        (known.pending.take().map(|pending| *pending), known.counted_for)
    }

    /// Keeps an outcome whose write is owed.
    pub fn owe(&self, key: &Key, pending: Pending) {
        if let Some(known) = self.lock().get_mut(key) {
            known.pending = Some(pending.into());
        }
    }

    /// A write of the object could not be made now. Returns how many before it could not, since the last that was.
    pub fn delayed(&self, key: &Key) -> u32 {
        self.lock().get_mut(key).map_or(0, |known| {
            let before = known.delays;
            known.delays = before.saturating_add(1);
            before
        })
    }

    /// A write of the object was made.
    pub fn on_time(&self, key: &Key) {
        if let Some(known) = self.lock().get_mut(key) {
            known.delays = 0;
        }
    }

    /// The children of an object are not as they are to be: it is woken, or if it runs, what that means is left to its end.
    pub fn drifted(&self, key: &Key, claim: &Claim, object: &Object) {
        let mut tracked = self.lock();
        match tracked.get_mut(key) {
            Some(known) if known.running => known.drift_held = true,
            Some(known) => {
                known.children_due = true;
                self.queue.wake(key, &object.uid, Cause::Change, priority(claim, object));
            }
            None => {}
        }
    }

    /// Whether somebody touched the object's children while it ran. Asked once, after its end.
    pub fn take_held_drift(&self, key: &Key) -> bool {
        self.lock().get_mut(key).is_some_and(|known| std::mem::take(&mut known.drift_held))
    }

    /// Nothing is known any more of the children of all objects of a kind.
    pub fn mistrust_children(&self, kind: &GroupKind) {
        self.lock().iter_mut().filter(|(key, _)| key.kind == *kind).for_each(|(_, known)| known.children_due = true);
    }

    /// Whether the object's children have yet to be looked at, in this term or since somebody touched them.
    pub fn children_due(&self, key: &Key) -> bool {
        self.lock().get(key).is_some_and(|known| known.children_due)
    }

    /// The object's children are as its last run wants them, if what watches them is still what they were judged by.
    pub fn children_done(&self, key: &Key, still: impl FnOnce() -> bool) {
        if let Some(known) = self.lock().get_mut(key) {
            known.children_due &= !still();
        }
    }

    /// What the object has read has changed. True where that is so soon after its last run began that it is looked at a moment later.
    pub fn read_later(&self, key: &Key) -> bool {
        let mut tracked = self.lock();
        let Some(Tracked { began: Some(began), read_due, .. }) = tracked.get_mut(key) else { return false };
        if began.elapsed() >= READ_FLOOR {
            return false;
        }
        if !std::mem::replace(read_due, true) {
            self.late_reads.lock().expect("no panic while the lock is held").push_back((*began + READ_FLOOR, key.clone()));
        }
        true
    }

    /// The objects whose moment has come.
    pub fn due_readers(&self) -> Vec<Key> {
        let mut late = self.late_reads.lock().expect("no panic while the lock is held");
        let now = Instant::now();
        let due: Vec<Key> = std::iter::from_fn(|| late.pop_front_if(|(due, _)| *due <= now)).map(|(_, key)| key).collect();
        drop(late);
        let mut tracked = self.lock();
        let mut is_due = |key: &Key| tracked.get_mut(key).is_some_and(|known| std::mem::take(&mut known.read_due));
        due.into_iter().filter(|key| is_due(key)).collect()
    }

    /// Failures of this generation are in the status now.
    pub fn counted(&self, key: &Key, generation: i64) {
        if let Some(known) = self.lock().get_mut(key) {
            known.counted_for = Some(generation);
        }
    }

    /// A turn ends. `last` is the state that the run was given or last wrote; `current` reads what the store holds now, which is
    /// later if someone else was there meanwhile.
    pub fn finish(&self, turn: Turn, then: Then, last: Option<&Object>, claim: &Claim, current: impl FnOnce() -> Option<Arc<Object>>) {
        self.reads.ended(&turn.key);
        let mut tracked = self.lock();
        match (current(), tracked.get_mut(&turn.key)) {
            (Some(current), Some(known)) => {
                known.running = false;
                if let Some(last) = last {
                    known.seen = Seen::of(last);
                }
                let seen = Seen::of(&current);
                if known.seen != seen {
                    let cause = known.cause(seen, &current);
                    self.queue.wake(&turn.key, &current.uid, cause, priority(claim, &current));
                }
                drop(tracked);
                turn.done(then);
            }
            (None, _) => {
                tracked.remove(&turn.key);
                self.queue.forget(&turn.key);
                self.reads.forget(&turn.key);
                drop(tracked);
                turn.done(Then::Wait);
            }
            (Some(_), None) => turn.done(Then::Wait),
        }
    }

    /// Objects, at most so many, that have lacked their mirror label for long enough and do not run now.
    pub fn unmirrored(&self, limit: usize) -> Vec<Key> {
        let mut queue = self.unmirrored.lock().expect("no panic while the lock is held");
        let now = Instant::now();
        let due = queue.iter().take(limit).take_while(|(due, _)| *due <= now).count();
        let keys: Vec<Key> = queue.drain(..due).map(|(_, key)| key).collect();
        drop(queue);
        let tracked = self.lock();
        keys.into_iter().filter(|key| tracked.get(key).is_some_and(|known| !known.running)).collect()
    }

    /// An own write outside of a turn: it does not wake.
    pub fn wrote(&self, key: &Key, answer: &Object) {
        if let Some(known) = self.lock().get_mut(key).filter(|known| !known.running) {
            known.seen = Seen::of(answer);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Tracked>> {
        self.tracked.lock().expect("no panic while the lock is held")
    }
}

impl Tracked {
    fn new(seen: Seen) -> Self {
        Self {
            seen,
            running: false,
            counted_for: None,
            pending: None,
            delays: 0,
            children_due: true,
            drift_held: false,
            began: None,
            read_due: false,
        }
    }

    /// Takes in the state of an object and says why that wakes it.
    fn cause(&mut self, seen: Seen, object: &Object) -> Cause {
        match self.renew(seen) {
            Cause::Change if object.json.contains(RETRY) && asked_again(&object.value()) => Cause::Redrive,
            cause => cause,
        }
    }

    /// Takes in another state and says what kind of difference it is.
    fn renew(&mut self, seen: Seen) -> Cause {
        let cause = match () {
            () if seen.is_new_spec_after(&self.seen) => Cause::NewSpec,
            () if seen.deleting && !self.seen.deleting => Cause::Deletion,
            () => Cause::Change,
        };
        if seen.uid != self.seen.uid {
            self.counted_for = None;
            self.pending = None;
            self.delays = 0;
            self.children_due = true;
        } else if cause == Cause::NewSpec && self.counted_for.is_none() {
            self.counted_for = Some(self.seen.generation);
        }
        self.seen = seen;
        cause
    }
}

/// The priority that the object asks for; 0 where it asks for none that is an integer.
fn priority(claim: &Claim, object: &Object) -> i64 {
    let Some(field) = &claim.priority_field else { return 0 };
    let value = object.value();
    match at(&value, field) {
        Some(Value::Number(number)) => number.as_i64().unwrap_or_else(|| match number.as_f64() {
            Some(huge) if huge > 0.0 => i64::MAX,
            Some(_) => i64::MIN,
            None => 0,
        }),
        _ => 0,
    }
}

fn lacks_mirror(claim: &Claim, object: &Object) -> bool {
    if claim.progress.as_ref().is_none_or(|progress| progress.mirror_label.is_none()) {
        return false;
    }
    let value = object.value();
    match mirror(claim, &value) {
        Some(Ok((name, wanted))) => label(&value, &name) != wanted.as_deref(),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
