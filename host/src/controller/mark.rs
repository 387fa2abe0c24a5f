//! What stands on an object in annotations of the host's: that it was given up on and by which version, and that it is to be tried again.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::settle::{self, Standing};
use crate::{
    claim::Claim,
    object::{Object, annotation, at},
    package::Version,
    text::cut,
};

/// Annotation of an object that was given up on: a [`Mark`] as JSON.
pub const GAVE_UP: &str = "berth.acme.io/gave-up";
/// Somebody sets this annotation, to any value, to have an object tried again at once; the host takes it away.
pub const RETRY: &str = "berth.acme.io/retry";

/// The longest cause in a mark, in bytes. The status has the whole.
const CAUSE_MAX: usize = 256;

/// Who gave up on an object, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Mark {
    /// Uid of the object: an annotation goes with a copy, and with what comes back from a backup. A mark without one is of no object.
    #[serde(default)]
    pub uid: String,
    /// The version of the plugin.
    pub version: String,
    /// The generation of the object that it gave up on.
    pub generation: i64,
    /// Why, in a sentence.
    pub cause: String,
}

/// Why marks are looked at.
#[derive(Clone, Copy, Debug)]
pub enum Moment<'a> {
    /// The object waits for its first run.
    Waiting,
    /// Its turn has found nothing to do.
    Settled,
    /// A run has ended; with a cause if it gave up.
    Ran(Option<&'a str>),
    /// The same, on an object that somebody has changed meanwhile: what is asked for there, the run has not seen.
    Overtaken(Option<&'a str>),
}

impl Mark {
    /// That of this version of the spec.
    pub fn of(object: &Object, value: &Value) -> Option<Self> {
        let text = annotation(value, GAVE_UP)?;
        serde_json::from_str(text).ok().filter(|mark: &Self| mark.is_of(&object.uid, object.generation))
    }

    /// Whether it was given up on this object with this generation.
    pub fn is_of(&self, uid: &str, generation: i64) -> bool {
        self.uid == uid && self.generation == generation
    }

    /// The annotations to change at this moment, so that they say what is true of the object.
    pub fn changes(claim: &Claim, version: &Version, object: &Object, value: &Value, moment: Moment<'_>) -> Vec<(String, Option<String>)> {
        if let Moment::Waiting = moment {
            return Vec::new();
        }
        let known = Self::of(object, value);
        let new = |cause: &str| Self {
            uid: object.uid.to_string(),
            version: version.to_string(),
            generation: object.generation,
            cause: cut(cause, CAUSE_MAX),
        };
        let wanted = match (dead_letter(claim, object, value), moment) {
            (Some(cause), _) => Some(known.unwrap_or_else(|| new(cause))),
            (None, Moment::Ran(Some(cause)) | Moment::Overtaken(Some(cause))) => Some(new(cause)),
            (None, Moment::Ran(None) | Moment::Overtaken(None)) => None,
            (None, _) => known,
        };
        let written = annotation(value, GAVE_UP);
        let mut changes = Vec::new();
        if written.is_some() != wanted.is_some() || written.and_then(|text| serde_json::from_str(text).ok()) != wanted {
            changes.push((GAVE_UP.to_owned(), wanted.map(|mark| serde_json::to_string(&mark).expect("a mark is JSON"))));
        }
        if asked_again(value) && !matches!(moment, Moment::Overtaken(_)) {
            changes.push((RETRY.to_owned(), None));
        }
        changes
    }
}

/// Where an object stands, by its claim and by what was said of it before. `redriver` is the version that tries again what another one
/// gave up on, if it does.
pub fn standing(claim: &Claim, object: &Object, value: &Value, redriver: Option<&str>) -> Standing {
    let by_fields = settle::standing(claim, object, value);
    let mark = Mark::of(object, value);
    // A crash between two writes leaves a dead letter without a mark.
    let is_letter = dead_letter(claim, object, value).is_some();
    if object.deleting || (mark.is_none() && !is_letter) {
        return by_fields;
    }
    let redrive = redriver.is_some_and(|version| mark.is_none_or(|mark| mark.version != version));
    let again = redrive || asked_again(value);
    let has_fields = claim.progress.is_some() && claim.dead_letter.is_some();
    match by_fields {
        Standing::Settled if again => Standing::Stale,
        // The mark is the only record where no field can say that the object was given up on.
        Standing::Open if !has_fields && !again => Standing::Settled,
        by_fields => by_fields,
    }
}

/// The cause, where the object is a dead letter by the fields of its claim.
fn dead_letter<'v>(claim: &Claim, object: &Object, value: &'v Value) -> Option<&'v str> {
    let (progress, letter) = (claim.progress.as_ref()?, claim.dead_letter.as_ref()?);
    let is_letter = at(value, &progress.phase_field).and_then(Value::as_str) == Some(&letter.phase);
    let observed = at(value, "status.observedGeneration").and_then(Value::as_i64) == Some(object.generation);
    (is_letter && observed).then(|| at(value, &letter.message_field).and_then(Value::as_str).unwrap_or_default())
}

/// Whether somebody asks for another try.
pub fn asked_again(value: &Value) -> bool {
    annotation(value, RETRY).is_some()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::package::Digest;

    fn version(code: &[u8]) -> Version {
        Version { digest: Digest::of(code), config_hash: "0123456789".into() }
    }

    fn object(generation: i64, annotations: &Value, status: &Value) -> (Object, Value) {
        let metadata = json!({ "name": "n", "uid": "u", "generation": generation, "annotations": annotations });
        let object = Object::parse(&json!({ "metadata": metadata, "status": status }).to_string()).expect("parses");
        let value = object.value();
        (object, value)
    }

    fn changes(claim: &Claim, annotations: &Value, status: &Value, moment: Moment<'_>) -> Vec<(String, Option<Value>)> {
        let (object, value) = object(3, annotations, status);
        let parse = |text: String| serde_json::from_str(&text).expect("a mark");
        let changes = Mark::changes(claim, &version(b"1"), &object, &value, moment);
        changes.into_iter().map(|(key, text)| (key, text.map(parse))).collect()
    }

    fn mark(generation: i64) -> Value {
        json!({ "uid": "u", "version": version(b"1").to_string(), "generation": generation, "cause": "no paper" })
    }

    #[test]
    fn a_dead_letter_is_marked_once_with_its_cause_whoever_finds_it() {
        let failed = json!({ "phase": "Failed", "observedGeneration": 3, "message": "no paper" });
        for moment in [Moment::Settled, Moment::Ran(None), Moment::Ran(Some("another cause"))] {
            assert_eq!(changes(&Claim::full(), &json!({}), &failed, moment), [(GAVE_UP.to_owned(), Some(mark(3)))]);
        }
        let marked = json!({ GAVE_UP: mark(3).to_string() });
        assert!(changes(&Claim::full(), &marked, &failed, Moment::Settled).is_empty());
        assert!(changes(&Claim::full(), &json!({}), &failed, Moment::Waiting).is_empty());
    }

    #[test]
    fn a_mark_of_a_former_spec_or_of_an_object_that_works_again_is_taken_away() {
        let old = json!({ GAVE_UP: mark(2).to_string() });
        let done = json!({ "phase": "Done", "observedGeneration": 3 });
        for claim in [Claim::full(), Claim::plain()] {
            assert_eq!(changes(&claim, &old, &done, Moment::Settled), [(GAVE_UP.to_owned(), None)]);
        }
        let new = json!({ GAVE_UP: mark(3).to_string() });
        assert_eq!(changes(&Claim::plain(), &new, &done, Moment::Ran(None)), [(GAVE_UP.to_owned(), None)]);
    }

    #[test]
    fn without_fields_in_the_status_the_mark_is_the_only_record_and_stays() {
        assert_eq!(changes(&Claim::plain(), &json!({}), &json!({}), Moment::Ran(Some("no paper"))), [(GAVE_UP.to_owned(), Some(mark(3)))]);
        let marked = json!({ GAVE_UP: mark(3).to_string() });
        assert!(changes(&Claim::plain(), &marked, &json!({}), Moment::Settled).is_empty());
    }

    #[test]
    fn a_request_to_try_again_is_taken_away_by_a_turn_and_not_before() {
        let asked = json!({ RETRY: "now" });
        assert!(changes(&Claim::plain(), &asked, &json!({}), Moment::Waiting).is_empty());
        for moment in [Moment::Settled, Moment::Ran(None)] {
            assert_eq!(changes(&Claim::plain(), &asked, &json!({}), moment), [(RETRY.to_owned(), None)]);
        }
    }

    #[test]
    fn what_is_asked_for_during_a_run_is_left_to_the_next_one() {
        assert!(changes(&Claim::plain(), &json!({ RETRY: "now" }), &json!({}), Moment::Overtaken(None)).is_empty());
    }

    #[test]
    fn a_mark_that_cannot_be_read_or_came_with_a_copy_is_none() {
        let mut copied = mark(3);
        copied["uid"] = "of the original".into();
        let mut old = mark(3);
        old.as_object_mut().expect("an object").remove("uid");
        for text in ["yes".to_owned(), copied.to_string(), old.to_string()] {
            let (object, value) = object(3, &json!({ GAVE_UP: text }), &json!({}));
            assert_eq!(Mark::of(&object, &value), None, "{text}");
            assert_eq!(standing(&Claim::plain(), &object, &value, None), Standing::Open, "{text}");
        }
    }

    fn standing_of(claim: &Claim, annotations: &Value, status: &Value, redriver: Option<&str>) -> Standing {
        let (object, value) = object(3, annotations, status);
        standing(claim, &object, &value, redriver)
    }

    #[test]
    fn what_was_given_up_on_stays_so_whichever_fields_the_claim_has() {
        let marked = json!({ GAVE_UP: mark(3).to_string() });
        let no_letter = Claim { dead_letter: None, ..Claim::full() };
        let no_progress = Claim { progress: None, ..Claim::full() };
        for claim in [Claim::plain(), no_letter, no_progress] {
            let pending = json!({ "phase": "Pending" });
            assert_eq!(standing_of(&claim, &marked, &pending, None), Standing::Settled);
            assert_eq!(standing_of(&claim, &marked, &pending, Some("another version")), Standing::Open);
            assert_eq!(standing_of(&claim, &json!({ GAVE_UP: mark(2).to_string() }), &pending, None), Standing::Open);
        }
        assert_eq!(standing_of(&Claim::full(), &marked, &json!({ "phase": "Pending" }), None), Standing::Open, "its fields say more");
    }

    #[test]
    fn a_dead_letter_is_tried_again_where_somebody_asks_or_another_version_may_with_a_mark_or_without() {
        let letter = json!({ "phase": "Failed", "observedGeneration": 3 });
        let own = version(b"1").to_string();
        for annotations in [json!({}), json!({ GAVE_UP: mark(3).to_string() })] {
            let asked = |key: &str| {
                let mut annotations = annotations.clone();
                annotations[key] = "now".into();
                annotations
            };
            assert_eq!(standing_of(&Claim::full(), &annotations, &letter, None), Standing::Settled);
            assert_eq!(standing_of(&Claim::full(), &asked(RETRY), &letter, None), Standing::Stale);
            assert_eq!(standing_of(&Claim::full(), &annotations, &letter, Some("another version")), Standing::Stale);
        }
        assert_eq!(standing_of(&Claim::full(), &json!({ GAVE_UP: mark(3).to_string() }), &letter, Some(&own)), Standing::Settled);
        let done = json!({ "phase": "Done", "observedGeneration": 3 });
        assert_eq!(standing_of(&Claim::full(), &json!({ RETRY: "now" }), &done, Some("another")), Standing::Settled, "it is no letter");
    }
}
