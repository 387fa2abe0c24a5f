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
    cell::LazyCell,
    collections::{BTreeSet, HashMap, HashSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use serde_json::Value;
use tokio::time::Instant;

pub use self::tracking::{Pending, Rest};
use self::tracking::{Seen, Tracked, Tracking};
use super::{
    breaker::Breaker,
    mark::asked_again,
    settle::{Standing, is_dead, mirror, standing},
};
use crate::{
    claim::Claim,
    object::{GroupKind, Key, Object, at, label},
    package::Version,
    queue::{Cause, Queue, Then, Turn},
    reads::Index,
    report::LastFailure,
    status::MESSAGE_MAX,
    text::cut,
};

mod tracking;

/// How long an object may lack its mirror label before the host sets it: a run that comes at once sets it anyway.
const MIRROR_AFTER: Duration = Duration::from_secs(1);
/// After this time an object has one run more that a change of what it has read may lead to at once.
const READ_EVERY: Duration = Duration::from_secs(1);
/// How many such runs it has at most. Objects that read each other would wake each other without end.
const READS_AT_ONCE: u32 = 10;

/// One term. Dropped when leadership ends, with everything that waits in it.
#[derive(Debug)]
pub struct Term {
    /// Its queue.
    pub queue: Queue,
    /// What was read by the last run of each object.
    pub reads: Index,
    tracked: Mutex<Tracking>,
    unmirrored: Mutex<VecDeque<(Instant, Key)>>,
    late_reads: Mutex<BTreeSet<(Instant, Key)>>,
    breakers: Mutex<HashMap<GroupKind, Breaker>>,
    /// The last failure of each kind, and whether its object has not had a good run since.
    failures: Mutex<HashMap<GroupKind, (LastFailure, bool)>>,
    paused: Mutex<HashSet<Key>>,
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
        let value = LazyCell::new(|| object.value());
        // A leader that takes over finds work among what is done. Read before the lock is taken that all turns need.
        let settled = listed && self.lock().get(key).is_none() && seems_settled(claim, object, &value);
        let mut tracked = self.lock();
        let cause = match tracked.get_mut(key) {
            None => {
                tracked.insert(key, Tracked::new(seen));
                match listed {
                    true if settled => Cause::Resync,
                    true => Cause::FirstList,
                    false => Cause::NewSpec,
                }
            }
            Some(known) if known.running || known.seen == seen => return,
            Some(known) => known.cause(seen, object),
        };
        if !self.queue.wake(key, &object.uid, cause, priority_in(claim, &value)) {
            // Its lane is not open yet: who opens it looks at all objects, and has to find this one new.
            tracked.remove(key);
            return;
        }
        drop(tracked);
        if lacks_mirror(claim, &value) {
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
            let known = tracked.get_or_insert(key, || Tracked::new(Seen::of(object)));
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
        self.lock().retain(kind, |known| known.running);
    }

    /// A turn begins: from here on events of the key are held. Returns the write that is owed and the generation counted for.
    pub fn begin(&self, key: &Key, object: &Object, cause: Cause) -> (Option<Pending>, Option<i64>) {
        let mut tracked = self.lock();
        let seen = Seen::of(object);
        let known = tracked.get_or_insert(key, || Tracked::new(seen.clone()));
        let again = std::mem::replace(&mut known.running, true);
        // A turn may have several steps, and is one run here.
        if cause == Cause::Read && !again {
            let now = Instant::now();
            let paid = &mut known.seldom().reads_paid;
            *paid = Some(paid.map_or(now, |paid| paid.max(now)) + READ_EVERY);
        }
        if known.seen != seen {
            known.renew(seen);
        }
        match &mut known.seldom {
            Some(seldom) => (seldom.pending.take().map(|pending| *pending), seldom.counted_for),
            None => (None, None),
        }
    }

    /// A look has found nothing to do. Until one of what `rest` is made of changes, another one would find the same.
    pub fn lay_to_rest(&self, key: &Key, rest: Rest) {
        if let Some(known) = self.lock().get_mut(key) {
            known.rest = Some(rest);
        }
    }

    /// Whether the last look that found nothing to do was at just this.
    pub fn rests(&self, key: &Key, rest: Rest) -> bool {
        self.lock().get(key).is_some_and(|known| known.rest == Some(rest))
    }

    /// Keeps an outcome whose write is owed.
    pub fn owe(&self, key: &Key, pending: Pending) {
        if let Some(known) = self.lock().get_mut(key) {
            known.seldom().pending = Some(pending.into());
        }
    }

    /// A write of the object could not be made now. Returns how many before it could not, since the last that was.
    pub fn delayed(&self, key: &Key) -> u32 {
        self.lock().get_mut(key).map_or(0, |known| {
            let delays = &mut known.seldom().delays;
            std::mem::replace(delays, delays.saturating_add(1))
        })
    }

    /// A write of the object was made.
    pub fn on_time(&self, key: &Key) {
        if let Some(seldom) = self.lock().get_mut(key).and_then(|known| known.seldom.as_mut()) {
            seldom.delays = 0;
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
        self.lock().of_kind(kind).for_each(|known| known.children_due = true);
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

    /// What the object has read has changed. True where that has led to so many runs of late that it is looked at later.
    pub fn read_later(&self, key: &Key) -> bool {
        let mut tracked = self.lock();
        let Some(seldom) = tracked.get_mut(key).and_then(|known| known.seldom.as_mut()) else { return false };
        let (now, in_advance) = (Instant::now(), READ_EVERY * (READS_AT_ONCE - 1));
        let Some(paid) = seldom.reads_paid.filter(|paid| *paid > now + in_advance) else { return false };
        if !std::mem::replace(&mut seldom.read_due, true) {
            self.late_reads.lock().expect("no panic while the lock is held").insert((paid - in_advance, key.clone()));
        }
        true
    }

    /// The objects whose moment has come.
    pub fn due_readers(&self) -> Vec<Key> {
        let mut late = self.late_reads.lock().expect("no panic while the lock is held");
        let now = Instant::now();
        let due: Vec<Key> = late.extract_if(.., |(due, _)| *due <= now).map(|(_, key)| key).collect();
        drop(late);
        let mut tracked = self.lock();
        let mut is_due = |key: &Key| {
            let seldom = tracked.get_mut(key).and_then(|known| known.seldom.as_mut());
            seldom.is_some_and(|seldom| std::mem::take(&mut seldom.read_due))
        };
        due.into_iter().filter(|key| is_due(key)).collect()
    }

    /// Failures of this generation are in the status now.
    pub fn counted(&self, key: &Key, generation: i64) {
        if let Some(known) = self.lock().get_mut(key) {
            known.seldom().counted_for = Some(generation);
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

    fn lock(&self) -> MutexGuard<'_, Tracking> {
        self.tracked.lock().expect("no panic while the lock is held")
    }
}

/// The priority that the object asks for; 0 where it asks for none that is an integer.
fn priority(claim: &Claim, object: &Object) -> i64 {
    priority_in(claim, &LazyCell::new(|| object.value()))
}

/// The same of an object that others read too.
fn priority_in(claim: &Claim, value: &LazyCell<Value, impl FnOnce() -> Value>) -> i64 {
    let Some(field) = &claim.priority_field else { return 0 };
    match at(value, field) {
        Some(Value::Number(number)) => number.as_i64().unwrap_or_else(|| match number.as_f64() {
            Some(huge) if huge > 0.0 => i64::MAX,
            Some(_) => i64::MIN,
            None => 0,
        }),
        _ => 0,
    }
}

/// Whether nothing is to be done for the object as far as its status tells.
fn seems_settled(claim: &Claim, object: &Object, value: &LazyCell<Value, impl FnOnce() -> Value>) -> bool {
    // What somebody asks for does not show there, nor does a handler that has yet to be told of the end.
    if claim.progress.is_none() || object.deleting || asked_again(value) {
        return false;
    }
    // A version may try again what a former one has given up on.
    standing(claim, object, value) == Standing::Settled && !is_dead(claim, value)
}

fn lacks_mirror(claim: &Claim, value: &LazyCell<Value, impl FnOnce() -> Value>) -> bool {
    if claim.progress.as_ref().is_none_or(|progress| progress.mirror_label.is_none()) {
        return false;
    }
    match mirror(claim, value) {
        Some(Ok((name, wanted))) => label(value, &name) != wanted.as_deref(),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
