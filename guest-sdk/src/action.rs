//! What a handler returns: what is to be written, and what happens next.

use std::time::Duration;

use serde::Serialize;

use crate::resource::Status;

/// A text of JSON, or why there is none.
pub(crate) type Json = Result<String, String>;

/// A value as JSON text; the error says what cannot be JSON.
pub fn to_json(value: &impl Serialize) -> Json {
    serde_json::to_string(value).map_err(|error| error.to_string())
}

/// The end of a run that did not fail.
///
/// Writes are data: the host writes the status, labels, children and events after the run, and only what differs.
#[derive(Clone, Debug)]
#[must_use = "an action does nothing until it is returned"]
pub struct Action {
    pub(crate) after: Option<Duration>,
    pub(crate) writes: Writes,
}

/// What a run wants written; a failure can carry it as well.
#[derive(Clone, Debug, Default)]
pub(crate) struct Writes {
    pub(crate) status: Option<Json>,
    pub(crate) labels: Vec<(String, Option<String>)>,
    pub(crate) children: Option<Vec<Json>>,
    pub(crate) events: Vec<Event>,
}

impl Action {
    /// Done with this version of the spec. The next run follows a change or a resync.
    pub fn await_change() -> Self {
        Self { after: None, writes: Writes::default() }
    }

    /// Not done, and no failure: look again after this time (at least a second is waited). Any change comes first.
    pub fn look_again(after: Duration) -> Self {
        Self { after: Some(after), writes: Writes::default() }
    }

    /// The status as it is to be. Fields of it that are not in the type, which others wrote, stay.
    ///
    /// What the status had and this one does not is removed, so start from the object's own status where something is to be kept.
    /// The host adds `observedGeneration` and what the claim's `dead_letter` names.
    pub fn status(mut self, status: impl Status) -> Self {
        self.writes.status = Some(to_json(&status));
        self
    }

    /// A label to set, within the claim's `label_prefixes`.
    pub fn label(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.writes.labels.push((key.into(), Some(value.into())));
        self
    }

    /// A label to remove, within the claim's `label_prefixes`.
    pub fn no_label(mut self, key: impl Into<String>) -> Self {
        self.writes.labels.push((key.into(), None));
        self
    }

    /// All the objects that are to exist because this one does: what it had before and is not named here is deleted. Without this call
    /// they stay as they are.
    ///
    /// Each is a [`Child`](crate::Child), or anything else that serializes to a whole object. Its kind has to be one that the claim
    /// `owns`. They are applied before the status is written, so a status may speak of them. When somebody changes or deletes one, the
    /// handler runs again.
    ///
    /// ```
    /// use berth_sdk::{Action, Child, json};
    /// # use berth_sdk::{Kind, Readable};
    /// # struct ConfigMap;
    /// # impl Readable for ConfigMap {
    /// #     const KIND: Kind = Kind { group: "", version: "v1", kind: "ConfigMap", plural: "configmaps", namespaced: true };
    /// #     fn read(_: &str) -> Result<Self, String> { Ok(Self) }
    /// # }
    ///
    /// Action::await_change().children([Child::new::<ConfigMap>("web-config").field("data", json!({ "port": "80" }))]);
    /// ```
    pub fn children<C: Serialize>(mut self, children: impl IntoIterator<Item = C>) -> Self {
        self.writes.children = Some(children.into_iter().map(|child| to_json(&child)).collect());
        self
    }

    /// An Event about the object.
    pub fn event(mut self, event: Event) -> Self {
        self.writes.events.push(event);
        self
    }
}

/// An Event about the object, for `kubectl describe`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// `Warning` rather than `Normal`.
    pub warning: bool,
    /// Why, in UpperCamelCase, at most 128 characters.
    pub reason: String,
    /// What was done, in UpperCamelCase, at most 128 characters.
    pub action: String,
    /// A sentence for people, at most 1 KiB.
    pub note: String,
}

impl Event {
    /// Something went as it should.
    pub fn normal(reason: impl Into<String>, action: impl Into<String>, note: impl Into<String>) -> Self {
        Self { warning: false, reason: reason.into(), action: action.into(), note: note.into() }
    }

    /// Something to look at.
    pub fn warning(reason: impl Into<String>, action: impl Into<String>, note: impl Into<String>) -> Self {
        Self { warning: true, ..Self::normal(reason, action, note) }
    }
}
