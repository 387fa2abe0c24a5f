//! One kind's share of the queue: its objects, and the order in which the runnable ones come.

use std::{
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use super::{
    Cause, Depth,
    entry::{Entry, News, Place, RESYNC_PATIENCE, Slot, Time},
};
use crate::{claim::Pace, object::ObjectKey};

/// Waiting this long counts as one priority (decided in cases.md).
const PRIORITY_STEP: Duration = Duration::from_secs(30);

/// By how much the others count as older. At most half a priority, so that a priority outweighs the cause.
fn handicap(cause: Cause) -> Duration {
    match cause {
        Cause::NewSpec | Cause::Deletion | Cause::Change | Cause::Redrive | Cause::Timer => Duration::ZERO,
        Cause::Retry | Cause::Read => Duration::from_secs(5),
        Cause::Reload | Cause::FirstList | Cause::Resync => Duration::from_secs(15),
    }
}

/// So many places for entries a lane keeps when they are free.
const ROOM: usize = 1_024;

/// Place in the order; lower comes first. All objects age at the same rate, so the order of two ranks never changes with time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    /// Nanoseconds. Any `i64` priority times the step is below 2^99, so nothing overflows.
    score: i128,
    /// Makes ranks unique; the earlier one comes first.
    serial: u64,
}

impl Rank {
    fn new(entry: &Entry, (since, serial): Slot) -> Self {
        let nanos = |time: Duration| i128::try_from(time.as_nanos()).expect("a Duration is below 2^94 ns");
        Self { score: nanos(since) + nanos(handicap(entry.cause)) - i128::from(entry.priority) * nanos(PRIORITY_STEP), serial }
    }
}

#[derive(Debug)]
pub(super) struct Lane {
    pub(super) pace: Pace,
    /// A closed lane exists only while turns of it run.
    pub(super) open: bool,
    /// Whether objects without failures come first.
    pub(super) sound_first: bool,
    pub(super) entries: HashMap<ObjectKey, Entry>,
    ready: BTreeMap<Rank, ObjectKey>,
    resyncs: BTreeMap<Slot, ObjectKey>,
    running: usize,
    /// Whether the lane has a place in the round robin.
    pub(super) in_ring: bool,
}

impl Lane {
    pub(super) fn new(pace: Pace) -> Self {
        Self {
            pace,
            open: true,
            sound_first: false,
            entries: HashMap::new(),
            ready: BTreeMap::new(),
            resyncs: BTreeMap::new(),
            running: 0,
            in_ring: false,
        }
    }

    /// Whether a turn could start now.
    pub(super) fn can_run(&self) -> bool {
        self.open && self.running < self.pace.concurrency && self.runnable() > 0
    }

    /// Whether nothing of it is left to remember.
    pub(super) fn is_spent(&self) -> bool {
        !self.open && self.running == 0
    }

    /// Whether something is runnable or runs, or has failed and is to run again.
    pub(super) fn has_to_probe(&self) -> bool {
        self.runnable() + self.running > 0 || self.entries.values().any(|entry| entry.failures > 0)
    }

    /// Number of objects that wait only for their turn.
    pub(super) fn runnable(&self) -> usize {
        self.ready.len() + self.resyncs.len()
    }

    /// Number of objects that wait for a time.
    pub(super) fn delayed(&self) -> usize {
        self.entries.len() - self.runnable() - self.running
    }

    /// What is where.
    pub(super) fn depth(&self) -> Depth {
        Depth { ready: self.runnable(), delayed: self.delayed(), running: self.running }
    }

    /// Gives an entry its place among the runnable.
    pub(super) fn enqueue(&mut self, object: ObjectKey, mut entry: Entry, slot: Slot) {
        entry.place = if entry.cause == Cause::Resync {
            self.resyncs.insert(slot, object.clone());
            Place::Resync { slot }
        } else {
            let rank = Rank::new(&entry, slot);
            self.ready.insert(rank, object.clone());
            Place::Ready { since: slot.0, rank }
        };
        self.entries.insert(object, entry);
    }

    /// Takes an entry out, and out of the order. What it holds among the timers is the caller's.
    pub(super) fn remove(&mut self, object: &ObjectKey) -> Option<Entry> {
        let entry = self.entries.remove(object)?;
        match entry.place {
            Place::Ready { rank, .. } => drop(self.ready.remove(&rank)),
            Place::Resync { slot } => drop(self.resyncs.remove(&slot)),
            Place::Running(_) => self.running -= 1,
            Place::Delayed { .. } => {}
        }
        self.give_room_back();
        Some(entry)
    }

    /// All objects have an entry when a term begins, and few later. What it costs is shared by the many that go between two times.
    fn give_room_back(&mut self) {
        if self.entries.capacity() > ROOM && self.entries.len() < self.entries.capacity() / 8 {
            self.entries.shrink_to(2 * self.entries.len());
        }
    }

    /// The first in the order, now running, and since when it was runnable.
    pub(super) fn start_first(&mut self, now: Time) -> Option<(ObjectKey, &Entry, Time)> {
        self.promote_resyncs(now);
        let object = match self.first_sound() {
            Some(object) => object,
            None => match self.ready.pop_first() {
                Some((_, object)) => object,
                None => self.resyncs.pop_first()?.1,
            },
        };
        let entry = self.entries.get_mut(&object).expect("what is in the order has an entry");
        let since = match entry.place {
            Place::Ready { since, .. } | Place::Resync { slot: (since, _) } => since,
            Place::Delayed { .. } | Place::Running(_) => unreachable!("what is in the order is runnable"),
        };
        entry.place = Place::Running(News::default());
        self.running += 1;
        Some((object, entry, since))
    }

    /// The first in the order that has not failed, out of it; none where those have no privilege.
    fn first_sound(&mut self) -> Option<ObjectKey> {
        if !self.sound_first {
            return None;
        }
        let sound = |object: &ObjectKey| self.entries.get(object).is_some_and(|entry| entry.failures == 0);
        if let Some(rank) = self.ready.iter().find(|(_, object)| sound(object)).map(|(rank, _)| *rank) {
            return self.ready.remove(&rank);
        }
        let slot = self.resyncs.iter().find(|(_, object)| sound(object)).map(|(slot, _)| *slot)?;
        self.resyncs.remove(&slot)
    }

    fn promote_resyncs(&mut self, now: Time) {
        while let Some(first) = self.resyncs.first_entry() {
            let slot = *first.key();
            if slot.0.saturating_add(RESYNC_PATIENCE) > now {
                return;
            }
            let object = first.remove();
            let entry = self.entries.get_mut(&object).expect("what is in the order has an entry");
            let rank = Rank::new(entry, slot);
            entry.place = Place::Ready { since: slot.0, rank };
            self.ready.insert(rank, object);
        }
    }

    /// Drops everything but what runs, and returns the places among the timers that are free now.
    pub(super) fn close(&mut self) -> Vec<Slot> {
        self.open = false;
        self.ready.clear();
        self.resyncs.clear();
        let mut slots = Vec::new();
        self.entries.retain(|_, entry| match &mut entry.place {
            Place::Running(news) => {
                (news.woken, news.afresh) = (None, false);
                true
            }
            Place::Delayed { slot, .. } => {
                slots.push(*slot);
                false
            }
            Place::Ready { .. } | Place::Resync { .. } => false,
        });
        slots
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_for_many_entries_is_given_back_once_they_are_gone() {
        let second = Duration::from_secs(1);
        let mut lane = Lane::new(Pace { concurrency: 1, backoff_base: second, backoff_max: second });
        let names: Vec<ObjectKey> = (0..10_000).map(|number| ObjectKey::new(None, &number.to_string())).collect();
        for (serial, name) in (0..).zip(&names) {
            lane.enqueue(name.clone(), Entry::new("u", Cause::FirstList, 0), (Time::ZERO, serial));
        }
        let (gone, left) = names.split_at(9_990);
        for name in gone {
            lane.remove(name).expect("it is there");
        }
        assert!(lane.entries.capacity() <= ROOM, "{}", lane.entries.capacity());
        assert_eq!(lane.runnable(), left.len());
        assert!(left.iter().all(|name| lane.remove(name).is_some()));
    }
}
