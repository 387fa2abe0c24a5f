//! What is remembered of one object. There is one record for each object of every kind, so what few of them have lies apart.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    num::NonZeroU64,
    sync::Arc,
};

use tokio::time::Instant;

use super::super::{
    mark::{RETRY, asked_again},
    settle::Settlement,
};
use crate::{
    object::{GroupKind, Key, Object, ObjectKey},
    package::Version,
    queue::Cause,
};

/// The records of all objects.
#[derive(Debug, Default)]
pub(super) struct Tracking {
    kinds: HashMap<GroupKind, HashMap<ObjectKey, Tracked>>,
}

#[derive(Debug)]
pub(super) struct Tracked {
    pub seen: Seen,
    pub running: bool,
    /// Whether its children may not be as they are to be, as far as this term knows.
    pub children_due: bool,
    /// Whether somebody touched them while it ran.
    pub drift_held: bool,
    /// What the last look was at that found nothing to do.
    pub rest: Option<Rest>,
    pub seldom: Option<Box<Seldom>>,
}

/// What most objects do not have.
#[derive(Debug, Default)]
pub(super) struct Seldom {
    /// The generation for which the status counts failures, as far as this term knows.
    pub counted_for: Option<i64>,
    pub pending: Option<Box<Pending>>,
    /// How often in a row a write could not be made.
    pub delays: u32,
    /// When all the runs that changes of what it has read led to will be made up for.
    pub reads_paid: Option<Instant>,
    /// Whether it is among the late reads.
    pub read_due: bool,
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
pub(super) struct Seen {
    uid: Arc<str>,
    generation: i64,
    deleting: bool,
    rest: u64,
}

/// All that decides whether a settled object is left as it is, hashed: its state and who serves it. Not its children.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rest(NonZeroU64);

impl Rest {
    /// Of an object for a version that tries again what another one gave up on, or does not.
    pub fn of(object: &Object, version: &Version, redrives: bool) -> Self {
        let mut hasher = DefaultHasher::new();
        (&object.uid, &object.resource_version, version, redrives).hash(&mut hasher);
        Self(NonZeroU64::new(hasher.finish()).unwrap_or(NonZeroU64::MIN))
    }
}

impl Tracking {
    pub fn get(&self, key: &Key) -> Option<&Tracked> {
        self.kinds.get(&key.kind)?.get(&key.object)
    }

    pub fn get_mut(&mut self, key: &Key) -> Option<&mut Tracked> {
        self.kinds.get_mut(&key.kind)?.get_mut(&key.object)
    }

    pub fn get_or_insert(&mut self, key: &Key, new: impl FnOnce() -> Tracked) -> &mut Tracked {
        self.kind(&key.kind).entry(key.object.clone()).or_insert_with(new)
    }

    pub fn insert(&mut self, key: &Key, tracked: Tracked) {
        self.kind(&key.kind).insert(key.object.clone(), tracked);
    }

    pub fn remove(&mut self, key: &Key) {
        if let Some(objects) = self.kinds.get_mut(&key.kind) {
            objects.remove(&key.object);
        }
    }

    pub fn of_kind(&mut self, kind: &GroupKind) -> impl Iterator<Item = &mut Tracked> {
        self.kinds.get_mut(kind).into_iter().flat_map(HashMap::values_mut)
    }

    pub fn retain(&mut self, kind: &GroupKind, mut keep: impl FnMut(&Tracked) -> bool) {
        if let Some(objects) = self.kinds.get_mut(kind) {
            objects.retain(|_, tracked| keep(tracked));
            if objects.is_empty() {
                self.kinds.remove(kind);
            }
        }
    }

    fn kind(&mut self, kind: &GroupKind) -> &mut HashMap<ObjectKey, Tracked> {
        self.kinds.entry(kind.clone()).or_default()
    }
}

impl Tracked {
    pub fn new(seen: Seen) -> Self {
        Self { seen, running: false, children_due: true, drift_held: false, rest: None, seldom: None }
    }

    pub fn seldom(&mut self) -> &mut Seldom {
        self.seldom.get_or_insert_default()
    }

    /// Takes in the state of an object and says why that wakes it.
    pub fn cause(&mut self, seen: Seen, object: &Object) -> Cause {
        match self.renew(seen) {
            Cause::Change if object.json.read().contains(RETRY) && asked_again(&object.value()) => Cause::Redrive,
            cause => cause,
        }
    }

    /// Takes in another state and says what kind of difference it is.
    pub fn renew(&mut self, seen: Seen) -> Cause {
        let cause = match () {
            () if seen.is_new_spec_after(&self.seen) => Cause::NewSpec,
            () if seen.deleting && !self.seen.deleting => Cause::Deletion,
            () => Cause::Change,
        };
        if seen.uid != self.seen.uid {
            self.seldom = None;
            self.children_due = true;
        } else if cause == Cause::NewSpec && self.seldom.as_ref().is_none_or(|seldom| seldom.counted_for.is_none()) {
            self.seldom().counted_for = Some(self.seen.generation);
        }
        self.seen = seen;
        cause
    }
}

impl Seen {
    pub fn of(object: &Object) -> Self {
        let Object { uid, generation, deleting, rest, .. } = object;
        Self { uid: uid.clone(), generation: *generation, deleting: *deleting, rest: *rest }
    }

    fn is_new_spec_after(&self, before: &Self) -> bool {
        self.uid != before.uid || (self.generation != before.generation && !self.deleting)
    }
}
