//! The queue as a pure state machine: every call is given the time, and nothing waits.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use super::{
    Cause, Depth, Then,
    entry::{Entry, Place, Slot, Time, Wait},
    lane::Lane,
};
use crate::{
    backoff,
    claim::Pace,
    object::{GroupKind, Key},
};

/// Shortest delay of `Then::After`: a handler that asks for "now" must not loop at full speed.
pub(super) const SHORTEST_TIMER: Duration = Duration::from_secs(1);

/// What a turn starts with.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Start {
    pub(super) key: Key,
    pub(super) uid: Arc<str>,
    pub(super) cause: Cause,
    pub(super) failures: u32,
    pub(super) last_failure: Option<String>,
    pub(super) waited: Duration,
}

#[derive(Debug, Default)]
pub(super) struct State {
    lanes: HashMap<GroupKind, Lane>,
    /// The lanes that may start a turn, in the order of their turns. One that no longer can falls out when it comes up.
    ring: VecDeque<GroupKind>,
    timers: BTreeMap<Slot, Key>,
    last_serial: u64,
    running: usize,
}

impl State {
    pub(super) fn open(&mut self, kind: GroupKind, pace: Pace) {
        let lane = self.lanes.entry(kind.clone()).or_insert_with(|| Lane::new(pace));
        lane.pace = pace;
        lane.open = true;
        self.enlist(&kind);
    }

    pub(super) fn prefer_sound(&mut self, kind: &GroupKind, prefer: bool) {
        if let Some(lane) = self.lanes.get_mut(kind) {
            lane.sound_first = prefer;
        }
    }

    pub(super) fn has_to_probe(&self, kind: &GroupKind) -> bool {
        self.lanes.get(kind).is_some_and(Lane::has_to_probe)
    }

    pub(super) fn close(&mut self, kind: &GroupKind) {
        let Some(lane) = self.lanes.get_mut(kind) else { return };
        for slot in lane.close() {
            self.timers.remove(&slot);
        }
        self.drop_if_spent(kind);
    }

    pub(super) fn wake(&mut self, key: &Key, uid: &str, cause: Cause, priority: i64, now: Time) -> bool {
        let Some(lane) = self.lanes.get_mut(&key.kind).filter(|lane| lane.open) else { return false };
        let Some(entry) = lane.entries.get_mut(&key.object) else {
            self.enqueue(key, Entry::new(uid, cause, priority), now);
            return true;
        };
        if *entry.uid == *uid {
            if let Some(since) = entry.wake(cause, priority, now) {
                let entry = self.take(key);
                self.enqueue(key, entry, since);
            }
        } else if let Place::Running(news) = &mut entry.place {
            // Another object by the same name: what woke the former one is of no interest either.
            (news.woken, news.afresh, news.outlived) = (None, false, true);
            news.add(cause);
            (entry.uid, entry.priority) = (uid.into(), priority);
        } else {
            self.take(key);
            self.enqueue(key, Entry::new(uid, cause, priority), now);
        }
        true
    }

    pub(super) fn redrive(&mut self, kind: &GroupKind, now: Time) {
        let Some(lane) = self.lanes.get_mut(kind) else { return };
        let mut waiting = Vec::new();
        for (object, entry) in &mut lane.entries {
            match entry.place {
                Place::Running(_) => continue,
                Place::Delayed { wait: Wait::Backoff, .. } => waiting.push(Key { kind: kind.clone(), object: object.clone() }),
                Place::Delayed { .. } | Place::Ready { .. } | Place::Resync { .. } => {}
            }
            entry.forgive();
        }
        for key in waiting {
            let mut entry = self.take(&key);
            entry.cause = Cause::Redrive;
            self.enqueue(&key, entry, now);
        }
    }

    pub(super) fn forget(&mut self, key: &Key) {
        let Some(entry) = self.lanes.get_mut(&key.kind).and_then(|lane| lane.entries.get_mut(&key.object)) else { return };
        if let Place::Running(news) = &mut entry.place {
            (news.woken, news.afresh, news.outlived) = (None, false, true);
        } else {
            self.take(key);
        }
    }

    /// Starts the turn that is next, if one can start now.
    pub(super) fn next(&mut self, now: Time) -> Option<Start> {
        self.fire_timers(now);
        while let Some(kind) = self.ring.pop_front() {
            let lane = self.lanes.get_mut(&kind).expect("the ring names only lanes that exist");
            lane.in_ring = false;
            if !lane.can_run() {
                continue;
            }
            let (object, entry, since) = lane.start_first(now).expect("a lane that can run has a first");
            let start = Start {
                key: Key { kind: kind.clone(), object },
                uid: entry.uid.clone(),
                cause: entry.cause,
                failures: entry.failures,
                last_failure: entry.last_failure.clone(),
                waited: now.saturating_sub(since),
            };
            self.running += 1;
            self.enlist(&kind);
            return Some(start);
        }
        None
    }

    /// When `next` may have something although nothing else was called; none if it cannot.
    pub(super) fn next_due(&self) -> Option<Time> {
        self.timers.first_key_value().map(|(slot, _)| slot.0)
    }

    /// The end of a turn. `random` in `0.0..1.0` chooses the jitter of the backoff.
    pub(super) fn done(&mut self, key: &Key, then: Then, now: Time, random: f64) {
        let entry = self.take(key);
        self.running -= 1;
        let Place::Running(news) = entry.place else { unreachable!("a key that has a turn is running until it is done") };
        if self.lanes.get(&key.kind).is_some_and(|lane| lane.open) {
            if news.outlived {
                if let Some(cause) = news.woken {
                    self.enqueue(key, Entry::new(&entry.uid, cause, entry.priority), now);
                }
            } else {
                self.follow(key, entry, then, now, random);
            }
            self.enlist(&key.kind);
        } else {
            self.drop_if_spent(&key.kind);
        }
    }

    /// Where an object goes after a turn: the one place that decides what `Then` means.
    fn follow(&mut self, key: &Key, mut entry: Entry, then: Then, now: Time, random: f64) {
        let Place::Running(news) = entry.place else { unreachable!("called with what ran") };
        if news.afresh || matches!(then, Then::Wait | Then::After(_) | Then::Stop) {
            entry.forgive();
        }
        match (then, news.woken) {
            (Then::Again(after), woken) => {
                entry.cause = woken.map_or(entry.cause, |cause| cause.min(entry.cause));
                self.delay(key, entry, now.saturating_add(after), Wait::Hold);
            }
            (Then::Fail { cause, after }, _) if !news.afresh => {
                entry.failures = entry.failures.saturating_add(1);
                entry.last_failure = Some(cause);
                entry.cause = Cause::Retry;
                let Pace { backoff_base, backoff_max, .. } = self.lanes[&key.kind].pace;
                let backoff = backoff::delay(backoff_base, backoff_max, entry.failures, random);
                self.delay(key, entry, now.saturating_add(backoff.max(after.unwrap_or_default())), Wait::Backoff);
            }
            (_, Some(cause)) => {
                entry.cause = cause;
                self.enqueue(key, entry, now);
            }
            (Then::After(after), None) => {
                entry.cause = Cause::Timer;
                self.delay(key, entry, now.saturating_add(after.max(SHORTEST_TIMER)), Wait::Timer);
            }
            (Then::Wait | Then::Stop | Then::Fail { .. }, None) => {}
        }
    }

    pub(super) fn depth(&self) -> Vec<(GroupKind, Depth)> {
        self.lanes.iter().map(|(kind, lane)| (kind.clone(), lane.depth())).collect()
    }

    pub(super) fn depth_of(&self, kind: &GroupKind) -> Depth {
        self.lanes.get(kind).map(Lane::depth).unwrap_or_default()
    }

    /// Number of turns that run.
    pub(super) fn running(&self) -> usize {
        self.running
    }

    fn slot(&mut self, time: Time) -> Slot {
        self.last_serial += 1;
        (time, self.last_serial)
    }

    /// Takes an entry out of wherever it is.
    fn take(&mut self, key: &Key) -> Entry {
        let entry = self.lanes.get_mut(&key.kind).and_then(|lane| lane.remove(&key.object));
        let entry = entry.expect("only what has an entry is taken");
        if let Place::Delayed { slot, .. } = entry.place {
            self.timers.remove(&slot);
        }
        entry
    }

    fn enqueue(&mut self, key: &Key, entry: Entry, since: Time) {
        let slot = self.slot(since);
        let lane = self.lanes.get_mut(&key.kind).expect("only objects of an open lane are enqueued");
        lane.enqueue(key.object.clone(), entry, slot);
        self.enlist(&key.kind);
    }

    fn delay(&mut self, key: &Key, mut entry: Entry, due: Time, wait: Wait) {
        let slot = self.slot(due);
        entry.place = Place::Delayed { slot, wait };
        self.timers.insert(slot, key.clone());
        let lane = self.lanes.get_mut(&key.kind).expect("only objects of an open lane are delayed");
        lane.entries.insert(key.object.clone(), entry);
    }

    fn fire_timers(&mut self, now: Time) {
        while let Some(due) = self.next_due().filter(|due| *due <= now) {
            let Some((_, key)) = self.timers.pop_first() else { return };
            let entry = self.take(&key);
            self.enqueue(&key, entry, due);
        }
    }

    fn enlist(&mut self, kind: &GroupKind) {
        if let Some(lane) = self.lanes.get_mut(kind).filter(|lane| !lane.in_ring && lane.can_run()) {
            lane.in_ring = true;
            self.ring.push_back(kind.clone());
        }
    }

    fn drop_if_spent(&mut self, kind: &GroupKind) {
        if self.lanes.get(kind).is_some_and(Lane::is_spent) {
            self.lanes.remove(kind);
            self.ring.retain(|other| other != kind);
        }
    }
}
