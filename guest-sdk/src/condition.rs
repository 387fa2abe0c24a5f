//! Conditions of a status, as in Kubernetes' API conventions.

use serde::{Deserialize, Serialize};

use crate::{context::Context, time::Timestamp};

/// One condition of an object.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// What it is about, such as `Ready`.
    #[serde(rename = "type")]
    pub type_: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// The version of the spec that it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Since when the status is as it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_transition_time: Option<Timestamp>,
    /// Why, in UpperCamelCase.
    #[serde(default)]
    pub reason: String,
    /// A sentence for people.
    #[serde(default)]
    pub message: String,
}

impl Condition {
    /// A condition that holds, or does not.
    pub fn new(type_: &str, holds: bool, reason: &str, message: impl Into<String>) -> Self {
        Self {
            type_: type_.to_owned(),
            status: if holds { "True" } else { "False" }.to_owned(),
            observed_generation: None,
            last_transition_time: None,
            reason: reason.to_owned(),
            message: message.into(),
        }
    }

    /// The version of the spec that it is about.
    pub fn of_generation(mut self, generation: i64) -> Self {
        self.observed_generation = Some(generation);
        self
    }
}

/// The conditions of an object, at most one of each type.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Conditions(Vec<Condition>);

impl Conditions {
    /// Sets a condition in the place of the one of its type; `lastTransitionTime` moves only with the status.
    pub fn set(&mut self, ctx: &Context, mut condition: Condition) {
        let there = self.0.iter_mut().find(|there| there.type_ == condition.type_);
        condition.last_transition_time = match &there {
            Some(there) if there.status == condition.status => there.last_transition_time,
            _ => None,
        };
        condition.last_transition_time.get_or_insert_with(|| ctx.now());
        match there {
            Some(there) => *there = condition,
            None => self.0.push(condition),
        }
    }

    /// The condition of a type.
    pub fn get(&self, type_: &str) -> Option<&Condition> {
        self.0.iter().find(|condition| condition.type_ == type_)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(not(target_family = "wasm"))]
mod schema {
    use std::borrow::Cow;

    use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

    use super::Conditions;

    /// As `metav1.Condition`; a map by type, so that server-side apply merges the conditions of several writers.
    impl JsonSchema for Conditions {
        fn schema_name() -> Cow<'static, str> {
            "Conditions".into()
        }

        fn inline_schema() -> bool {
            true
        }

        fn json_schema(_: &mut SchemaGenerator) -> Schema {
            json_schema!({
                "type": "array",
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
                "items": {
                    "type": "object",
                    "required": ["type", "status", "lastTransitionTime", "reason", "message"],
                    "properties": {
                        "type": { "type": "string", "maxLength": 316 },
                        "status": { "type": "string", "enum": ["True", "False", "Unknown"] },
                        "observedGeneration": { "type": "integer", "format": "int64", "minimum": 0 },
                        "lastTransitionTime": { "type": "string", "format": "date-time" },
                        "reason": { "type": "string", "minLength": 1, "maxLength": 1024 },
                        "message": { "type": "string", "maxLength": 32768 },
                    },
                },
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Script;

    #[test]
    fn the_time_of_a_condition_moves_only_with_its_status() {
        let early = Script::new().at("2026-01-01T00:00:00Z").context();
        let late = Script::new().at("2026-01-02T00:00:00Z").context();
        let mut conditions = Conditions::default();
        conditions.set(&early, Condition::new("Ready", false, "Busy", "busy"));
        conditions.set(&late, Condition::new("Ready", false, "Broken", "broken"));
        let ready = conditions.get("Ready").expect("set above");
        assert_eq!((ready.reason.as_str(), ready.last_transition_time), ("Broken", Some(early.now())));
        conditions.set(&late, Condition::new("Ready", true, "Done", "done"));
        assert_eq!(conditions.get("Ready").and_then(|ready| ready.last_transition_time), Some(late.now()));
    }

    #[test]
    fn conditions_of_other_types_stay() {
        let ctx = Script::new().context();
        let mut conditions: Conditions = serde_json::from_str(r#"[{"type":"Foreign","status":"True"}]"#).expect("a condition");
        conditions.set(&ctx, Condition::new("Ready", true, "Done", "done"));
        assert!(conditions.get("Foreign").is_some() && conditions.get("Ready").is_some());
    }
}
