//! What is known of children: what there is, by the informers, and what was last found or made right.
//!
//! # Guarantees
//! An own write is no drift, whichever comes first, its answer or its event. A change of a field that the handler did not ask for, such
//! as the status of a child, is none either.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
};

use serde_json::{Value, value::RawValue};

use super::desired::{APPLIED, Child, OWNER_UID};
use crate::{
    object::{GroupKind, Object, ObjectKey, annotation, at, label, newer},
    status::same,
};

/// How many deleted children are remembered, in case that the answer to a write comes after the event of the deletion.
const BURIED: usize = 1024;

/// A child by kind, namespace and name.
pub type ChildId = (GroupKind, ObjectKey);

/// The children of all objects of a kind.
#[derive(Debug, Default)]
pub struct Families {
    by_owner: HashMap<Arc<str>, Family>,
    /// Uid and last known version of children that went.
    buried: VecDeque<(Arc<str>, Box<str>)>,
}

#[derive(Debug, Default)]
struct Family {
    owner: Option<ObjectKey>,
    live: BTreeMap<ChildId, Live>,
    right: BTreeMap<ChildId, Right>,
    /// Whether `right` is all that is to be.
    whole: bool,
}

#[derive(Clone, Debug)]
struct Live {
    object: Arc<Object>,
    shape: u64,
}

/// A child as it was when it was found or made right.
#[derive(Debug)]
struct Right {
    uid: Arc<str>,
    shape: u64,
    hash: String,
    wanted: Box<str>,
}

impl Families {
    /// Takes in a state of a child. The owner, where the child is not as it is to be.
    pub fn seen(&mut self, kind: &GroupKind, object: &Arc<Object>) -> Option<(ObjectKey, Arc<str>)> {
        let uid = owner_uid(object)?;
        if self.is_buried(object) {
            return None;
        }
        let family = self.by_owner.entry(uid.clone()).or_default();
        let id = (kind.clone(), object.key.clone());
        let live = Live { object: object.clone(), shape: shape(object) };
        let drifted = match family.right.get_mut(&id) {
            Some(right) if right.uid == object.uid => !right.still_holds(&live),
            Some(_) => true,
            None => family.whole && !object.deleting,
        };
        family.live.insert(id, live);
        family.owner.clone().filter(|_| drifted).map(|owner| (owner, uid))
    }

    /// Takes in that a child is gone. The owner, where it is missing.
    pub fn gone(&mut self, kind: &GroupKind, object: &Object) -> Option<(ObjectKey, Arc<str>)> {
        let uid = owner_uid(object)?;
        self.bury(object);
        let family = self.by_owner.get_mut(&uid)?;
        let id = (kind.clone(), object.key.clone());
        if family.live.get(&id).is_some_and(|live| live.object.uid == object.uid) {
            family.live.remove(&id);
        }
        let missing = family.right.get(&id).is_some_and(|right| right.uid == object.uid);
        let owner = family.owner.clone().filter(|_| missing);
        if family.live.is_empty() && family.right.is_empty() && !family.whole {
            self.by_owner.remove(&uid);
        }
        owner.map(|owner| (owner, uid))
    }

    /// The children of an owner that there are.
    pub fn live(&self, owner: &str) -> BTreeMap<ChildId, Arc<Object>> {
        let live = self.by_owner.get(owner).map(|family| &family.live);
        live.into_iter().flatten().map(|(id, live)| (id.clone(), live.object.clone())).collect()
    }

    /// Whether this child is known to be right as it is, without looking at its fields.
    pub fn is_right(&self, owner: &str, child: &Child) -> bool {
        let id = (child.kind.group_kind(), child.key.clone());
        let family = self.by_owner.get(owner);
        let found = family.and_then(|family| Some((family.live.get(&id)?, family.right.get(&id)?)));
        found.is_some_and(|(live, right)| right.hash == child.hash && right.uid == live.object.uid && right.shape == live.shape)
    }

    /// This state of a child is right: it was found so, or is the answer to the write that made it so.
    pub fn keep(&mut self, owner: &Object, child: &Child, object: &Arc<Object>) {
        let is_buried = self.is_buried(object);
        let family = self.by_owner.entry(owner.uid.clone()).or_default();
        family.owner = Some(owner.key.clone());
        let (id, shape) = ((child.kind.group_kind(), child.key.clone()), shape(object));
        let known = family.live.get(&id).is_some_and(|live| live.object.uid == object.uid && !object.newer_than(&live.object));
        if !known && !is_buried {
            family.live.insert(id.clone(), Live { object: object.clone(), shape });
        }
        let wanted = child.document.to_string().into();
        family.right.insert(id, Right { uid: object.uid.clone(), shape, hash: child.hash.clone(), wanted });
    }

    /// The host deleted a child.
    pub fn deleted(&mut self, owner: &str, id: &ChildId) {
        let Some(family) = self.by_owner.get_mut(owner) else { return };
        family.right.remove(id);
        if let Some(live) = family.live.remove(id) {
            self.bury(&live.object);
        }
    }

    /// Everything that is to be has been kept, and everything else dropped.
    pub fn whole(&mut self, owner: &Object, wanted: &[Child]) {
        let family = self.by_owner.entry(owner.uid.clone()).or_default();
        family.owner = Some(owner.key.clone());
        family.whole = true;
        family.right.retain(|(kind, key), _| wanted.iter().any(|child| child.kind.group_kind() == *kind && child.key == *key));
    }

    /// Nothing is known of what is to be: the children are left as they are.
    pub fn leave(&mut self, owner: &str) {
        if let Some(family) = self.by_owner.get_mut(owner) {
            family.right.clear();
            family.whole = false;
            if family.live.is_empty() {
                self.by_owner.remove(owner);
            }
        }
    }

    /// Whether the children of an owner are not as they were when they were last right.
    pub fn drifted(&self, owner: &str) -> bool {
        let Some(family) = self.by_owner.get(owner) else { return false };
        let as_it_was = |(id, right): (&ChildId, &Right)| {
            family.live.get(id).is_some_and(|live| live.object.uid == right.uid && live.shape == right.shape)
        };
        let extra = |(id, live): (&ChildId, &Live)| !family.right.contains_key(id) && !live.object.deleting;
        !family.right.iter().all(as_it_was) || (family.whole && family.live.iter().any(extra))
    }

    fn bury(&mut self, object: &Object) {
        if self.buried.len() == BURIED {
            self.buried.pop_front();
        }
        self.buried.push_back((object.uid.clone(), object.resource_version.clone()));
    }

    /// A later state is of a child that only left the informer's sight, as its label was taken off.
    fn is_buried(&self, object: &Object) -> bool {
        self.buried.iter().any(|(uid, version)| *uid == object.uid && !newer(&object.resource_version, version))
    }
}

impl Right {
    /// Whether this state is right too. It is remembered then.
    fn still_holds(&mut self, live: &Live) -> bool {
        if live.shape == self.shape {
            return true;
        }
        let wanted = serde_json::from_str(&self.wanted).expect("it was a value");
        let holds = contains(&live.object.value(), &wanted);
        if holds {
            self.shape = live.shape;
        }
        holds
    }
}

/// Whether a live child already is what is wanted, as far as that can be seen.
pub fn is_applied(live: &Object, child: &Child) -> bool {
    let value = live.value();
    annotation(&value, APPLIED) == Some(&child.hash) && contains(&value, &child.document)
}

/// Whether exactly this was applied to the child before, so that what differs now was done by somebody else since.
pub fn was_applied(live: &Object, child: &Child) -> bool {
    annotation(&live.value(), APPLIED) == Some(&child.hash)
}

/// Whether the object belongs to the owner: by its reference, or where somebody took that off, by its label or by what was applied.
pub fn belongs(object: &Object, owner: &str, child: &Child) -> bool {
    let value = object.value();
    let references = at(&value, "metadata.ownerReferences").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let controlled = references.iter().any(|reference| reference["controller"] == true);
    let marked = || owner_uid(object).is_some_and(|uid| &*uid == owner) || was_applied(object, child);
    is_owned(object, owner) || (!controlled && marked())
}

/// Whether the object has an owner reference with this uid.
pub fn is_owned(object: &Object, owner: &str) -> bool {
    let value = object.value();
    at(&value, "metadata.ownerReferences").and_then(Value::as_array).is_some_and(|all| all.iter().any(|one| one["uid"] == owner))
}

/// The uid of the owner by the child's label.
pub fn owner_uid(object: &Object) -> Option<Arc<str>> {
    label(&object.value(), OWNER_UID).map(Arc::from)
}

/// Whether `live` has everything that `wanted` says; what it has beyond that is of no interest. Lists are compared whole.
fn contains(live: &Value, wanted: &Value) -> bool {
    match (live, wanted) {
        (live, Value::Null) => live.is_null(),
        (Value::Object(live), Value::Object(wanted)) => wanted
            .iter()
            // The items of a list of Kubernetes' own kinds do not say what they are.
            .filter(|(field, _)| !matches!(field.as_str(), "apiVersion" | "kind") || live.contains_key(*field))
            .all(|(field, wanted)| contains(live.get(field).unwrap_or(&Value::Null), wanted)),
        (Value::Array(live), Value::Array(wanted)) => {
            live.len() == wanted.len() && live.iter().zip(wanted).all(|(live, wanted)| contains(live, wanted))
        }
        (Value::Null, Value::Object(wanted)) => wanted.is_empty(),
        (Value::Null, Value::Array(wanted)) => wanted.is_empty(),
        (live, wanted) => same(live, wanted),
    }
}

/// A hash of everything of a child but its status and what the API server counts.
fn shape(object: &Object) -> u64 {
    const COUNTED: [&str; 4] = ["resourceVersion", "generation", "managedFields", "creationTimestamp"];
    let mut hasher = DefaultHasher::new();
    let text = object.json.read();
    let fields: BTreeMap<&str, &RawValue> = serde_json::from_str(&text).expect("the text was parsed when the object was made");
    for (field, value) in fields.iter().filter(|(field, _)| !matches!(**field, "status" | "metadata" | "apiVersion" | "kind")) {
        (field, value.get()).hash(&mut hasher);
    }
    let metadata = fields.get("metadata").map_or("{}", |metadata| metadata.get());
    let metadata: BTreeMap<&str, &RawValue> = serde_json::from_str(metadata).expect("the text was parsed when the object was made");
    for (field, value) in metadata.iter().filter(|(field, _)| !COUNTED.contains(*field)) {
        (field, value.get()).hash(&mut hasher);
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{
        super::desired::{
            desired,
            tests::{claim, config_map, owner},
        },
        *,
    };

    struct Bench {
        families: Families,
        owner: Object,
        child: Child,
        kind: GroupKind,
    }

    impl Bench {
        fn new() -> Self {
            let owner = owner(Some("t1"));
            let child = desired(&claim(), &owner, vec![config_map("c", json!({"a": "1"}))]).expect("valid").remove(0);
            Self { families: Families::default(), owner, kind: child.kind.group_kind(), child }
        }

        /// The child as the API server has it, changed.
        fn object(&self, uid: &str, version: u32, change: impl FnOnce(&mut Value)) -> Arc<Object> {
            let mut document = self.child.document.clone();
            document["metadata"]["uid"] = uid.into();
            document["metadata"]["resourceVersion"] = version.to_string().into();
            change(&mut document);
            Arc::new(Object::parse(&document.to_string()).expect("parses"))
        }

        fn seen(&mut self, object: &Arc<Object>) -> bool {
            self.families.seen(&self.kind.clone(), object).is_some()
        }

        fn applied(&mut self, object: &Arc<Object>) {
            let (owner, child) = (self.owner.clone(), self.child.clone());
            self.families.keep(&owner, &child, object);
            self.families.whole(&owner, &[child]);
        }

        fn drifted(&self) -> bool {
            self.families.drifted("u1")
        }
    }

    #[test]
    fn an_own_write_is_no_drift_whichever_comes_first_its_answer_or_its_event() {
        let mut bench = Bench::new();
        let first = bench.object("c1", 5, |_| {});
        bench.applied(&first);
        assert!(!bench.seen(&first) && !bench.drifted());
        let mut bench = Bench::new();
        let first = bench.object("c1", 5, |_| {});
        assert!(!bench.seen(&first), "before the first write nothing is known of what is to be");
        bench.applied(&first);
        assert!(!bench.drifted());
        assert!(bench.families.is_right("u1", &bench.child));
    }

    #[test]
    fn a_changed_field_is_drift_and_one_that_nobody_asked_for_is_not() {
        let mut bench = Bench::new();
        let first = bench.object("c1", 5, |_| {});
        bench.applied(&first);
        let noted = bench.object("c1", 6, |value| {
            value["metadata"]["annotations"]["someone.io/note"] = "x".into();
            value["status"] = json!({"n": 1});
        });
        assert!(!bench.seen(&noted) && !bench.drifted());
        let edited = bench.object("c1", 7, |value| value["data"]["a"] = "2".into());
        assert!(bench.seen(&edited) && bench.drifted() && !is_applied(&edited, &bench.child) && was_applied(&edited, &bench.child));
        let back = bench.object("c1", 8, |_| {});
        bench.applied(&back);
        assert!(!bench.drifted() && is_applied(&back, &bench.child));
    }

    #[test]
    fn a_status_alone_changes_no_shape() {
        let bench = Bench::new();
        let running = bench.object("c1", 6, |value| value["status"] = json!({"n": 1}));
        assert_eq!(shape(&bench.object("c1", 5, |_| {})), shape(&running));
    }

    #[test]
    fn a_child_that_goes_is_missed_and_one_that_the_host_deleted_is_not() {
        let mut bench = Bench::new();
        let first = bench.object("c1", 5, |_| {});
        bench.applied(&first);
        assert!(bench.families.gone(&bench.kind, &first).is_some() && bench.drifted());
        let second = bench.object("c2", 8, |_| {});
        bench.applied(&second);
        assert!(!bench.drifted());
        bench.families.deleted("u1", &(bench.kind.clone(), second.key.clone()));
        bench.families.whole(&bench.owner, &[]);
        let dying = bench.object("c2", 9, |value| value["metadata"]["deletionTimestamp"] = "now".into());
        assert!(!bench.seen(&dying) && bench.families.gone(&bench.kind, &dying).is_none() && !bench.drifted());
    }

    #[test]
    fn an_answer_that_comes_after_the_deletion_brings_nothing_back() {
        let mut bench = Bench::new();
        let first = bench.object("c1", 5, |_| {});
        bench.families.gone(&bench.kind, &first);
        bench.applied(&first);
        assert!(bench.drifted());
    }

    #[test]
    fn a_child_that_lost_its_label_is_known_again_once_it_has_it_back() {
        let mut bench = Bench::new();
        let first = bench.object("c1", 5, |_| {});
        bench.applied(&first);
        assert!(bench.families.gone(&bench.kind, &first).is_some());
        let restored = bench.object("c1", 8, |_| {});
        bench.applied(&restored);
        assert!(!bench.drifted() && !bench.seen(&restored));
        assert!(bench.families.is_right("u1", &bench.child));
    }

    #[test]
    fn a_child_that_nobody_wants_any_more_is_drift_until_it_is_dropped() {
        let mut bench = Bench::new();
        let first = bench.object("c1", 5, |_| {});
        bench.families.whole(&bench.owner, &[]);
        assert!(bench.seen(&first) && bench.drifted());
        bench.families.leave("u1");
        assert!(!bench.drifted());
        assert_eq!(bench.families.live("u1").len(), 1);
    }

    #[test]
    fn whose_a_child_is_stands_in_its_reference_or_else_in_the_marks_of_the_host() {
        let bench = Bench::new();
        let belongs = |object: &Object| belongs(object, "u1", &bench.child);
        assert!(belongs(&bench.object("c1", 1, |_| {})));
        let cut_off = bench.object("c1", 1, |value| value["metadata"]["ownerReferences"] = json!([]));
        assert!(belongs(&cut_off) && !is_owned(&cut_off, "u1"));
        let taken = bench.object("c1", 1, |value| value["metadata"]["ownerReferences"] = json!([{"uid": "x", "controller": true}]));
        assert!(!belongs(&taken));
        let stripped = bench.object("c1", 1, |value| {
            value["metadata"]["ownerReferences"] = Value::Null;
            value["metadata"]["labels"] = Value::Null;
        });
        assert!(belongs(&stripped));
        assert!(!belongs(&bench.object("c1", 1, |value| value["metadata"] = json!({"name": "c"}))));
    }

    #[test]
    fn more_than_what_is_wanted_may_be_there() {
        assert!(contains(&json!({"a": 1, "b": {"c": [{"x": 1, "y": 2}], "d": 3}}), &json!({"b": {"c": [{"x": 1.0}]}})));
        assert!(!contains(&json!({"b": {"c": [1, 2]}}), &json!({"b": {"c": [1]}})));
        assert!(!contains(&json!({"a": 1}), &json!({"b": 1})));
        assert!(contains(&json!({"spec": {}}), &json!({"apiVersion": "v1", "kind": "K", "spec": {"a": {}, "b": null}})));
    }
}
