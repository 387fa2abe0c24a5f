//! What a run may use: settings, its idempotency key, the log, the clock, reads of the cluster.

use std::{cell::Cell, collections::BTreeMap, fmt};

use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use crate::{
    error::{Error, OrFail},
    json,
    resource::{Kind, Readable},
    time::Timestamp,
    world::World,
};

/// What a run may use. Natively it is made by [`testing::Script`](crate::testing::Script).
pub struct Context {
    pub(crate) settings: String,
    pub(crate) idempotency_key: String,
    pub(crate) attempt: u32,
    pub(crate) last_failure: Option<String>,
    pub(crate) keyed_requests: Cell<u32>,
    pub(crate) world: World,
}

/// How much a log line matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// For the author.
    Debug,
    /// For the operator.
    Info,
    /// Something to look at.
    Warn,
    /// Something to act on.
    Error,
}

/// Why a read was not answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadError {
    /// Not claimed or not granted; the sentence says what to add and where.
    Forbidden(String),
    /// The host has not listed the kind yet.
    NotSynced,
    /// Anything else.
    Other(String),
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Forbidden(sentence) | Self::Other(sentence) => f.write_str(sentence),
            Self::NotSynced => f.write_str("the host has not listed the kind yet"),
        }
    }
}

impl Context {
    /// A text of the plugin's settings. Where it is missing the run is to be tried again: someone will add it.
    pub fn setting(&self, name: &str) -> Result<String, Error> {
        let fields: BTreeMap<String, Box<RawValue>> = json::from_json(&self.settings).or_retry("settings")?;
        let value =
            fields.get(name).or_retry(format_args!("the setting `{name}` is missing: add it to `settings` in the plugin's plugin.yaml"))?;
        json::from_json(value.get()).or_retry(format_args!("the setting `{name}`"))
    }

    /// All settings as a type of the author's.
    pub fn settings<T: DeserializeOwned>(&self) -> Result<T, Error> {
        json::from_json(&self.settings).or_retry("settings in the plugin's plugin.yaml")
    }

    /// The same for every run of one object and for no other object: `<resource>.<group>/<namespace>/<name>/<uid>`.
    pub fn idempotency_key(&self) -> &str {
        &self.idempotency_key
    }

    /// The key for the next request of this run that carries one: the first has the object's own, the others a suffix.
    pub(crate) fn next_key(&self) -> String {
        let before = self.keyed_requests.replace(self.keyed_requests.get() + 1);
        if before == 0 { self.idempotency_key.clone() } else { format!("{}/{}", self.idempotency_key, before + 1) }
    }

    /// 0 for the first run of this version of the spec, then the number of failures in a row.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// The cause of the last failure, while [`attempt`](Self::attempt) is above 0.
    pub fn last_failure(&self) -> Option<&str> {
        self.last_failure.as_deref()
    }

    /// The time. It is the host's, so that a run can be replayed.
    pub fn now(&self) -> Timestamp {
        self.world.now()
    }

    /// An object of a kind that the claim reads; none where there is no such object.
    pub fn get<T: Readable>(&self, namespace: Option<&str>, name: &str) -> Result<Option<T>, Error> {
        let text = self.world.get(&T::KIND, namespace, name).or_retry(reading(&T::KIND))?;
        text.map(|text| T::read(&text).or_retry(format_args!("{} {name}", reading(&T::KIND)))).transpose()
    }

    /// The objects of a kind that the claim reads, in the order of namespace and name.
    pub fn list<T: Readable>(&self, namespace: Option<&str>, label_selector: &str) -> Result<Vec<T>, Error> {
        let (mut objects, mut next) = (Vec::new(), None);
        loop {
            let (texts, more) = self.world.list(&T::KIND, namespace, label_selector, next).or_retry(reading(&T::KIND))?;
            for text in texts {
                objects.push(T::read(&text).or_retry(reading(&T::KIND))?);
            }
            match more {
                Some(more) => next = Some(more),
                None => return Ok(objects),
            }
        }
    }

    /// Writes a log line. The host adds plugin, version and object.
    pub fn log(&self, level: Level, message: &str, fields: &[(&str, &dyn fmt::Display)]) {
        let fields = fields.iter().map(|(name, value)| ((*name).to_owned(), value.to_string())).collect();
        self.world.log(level, message, fields);
    }

    /// A log line for the author.
    pub fn debug(&self, message: &str, fields: &[(&str, &dyn fmt::Display)]) {
        self.log(Level::Debug, message, fields);
    }

    /// A log line for the operator.
    pub fn info(&self, message: &str, fields: &[(&str, &dyn fmt::Display)]) {
        self.log(Level::Info, message, fields);
    }

    /// A log line about something to look at.
    pub fn warn(&self, message: &str, fields: &[(&str, &dyn fmt::Display)]) {
        self.log(Level::Warn, message, fields);
    }
}

fn reading(kind: &Kind) -> String {
    format!("reading {}", kind.plural)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::prelude::*;

    #[resource(group = "g.example", version = "v1", kind = "Thing", namespaced)]
    struct ThingSpec {
        size: u32,
    }

    fn thing(namespace: &str, name: &str, size: u32) -> serde_json::Value {
        let metadata = json!({ "name": name, "namespace": namespace, "labels": { "app": name } });
        json!({ "apiVersion": "g.example/v1", "kind": "Thing", "metadata": metadata, "spec": { "size": size } })
    }

    fn sizes(things: &[Thing]) -> Vec<u32> {
        things.iter().map(|thing| thing.spec.size).collect()
    }

    #[test]
    fn objects_are_read_by_name_namespace_and_label() {
        let ctx = testing::Script::new().object(thing("b", "y", 3)).object(thing("a", "x", 1)).object(thing("b", "x", 2)).context();
        assert_eq!(ctx.get::<Thing>(Some("b"), "x").expect("allowed").map(|thing| thing.spec.size), Some(2));
        assert!(ctx.get::<Thing>(Some("c"), "x").expect("allowed").is_none());
        assert_eq!(sizes(&ctx.list(None, "").expect("allowed")), [1, 2, 3]);
        assert_eq!(sizes(&ctx.list(Some("b"), "").expect("allowed")), [2, 3]);
        assert_eq!(sizes(&ctx.list(None, "app=x").expect("allowed")), [1, 2]);
    }

    #[test]
    fn an_object_of_another_shape_is_named_by_its_field() {
        let mut odd = thing("a", "x", 1);
        odd["spec"]["size"] = json!("large");
        let ctx = testing::Script::new().object(odd).context();
        let error = ctx.get::<Thing>(Some("a"), "x").expect_err("does not read");
        assert_eq!(error.cause(), "reading things x: spec.size: invalid type: string \"large\", expected u32");
    }

    #[data]
    struct Settings {
        limit: u32,
    }

    #[test]
    fn settings_are_read_as_a_type_or_say_what_is_wrong() {
        let ctx = testing::Script::new().setting("limit", 3).context();
        assert_eq!(ctx.settings::<Settings>().expect("reads").limit, 3);
        let error = ctx.setting("limit").expect_err("no text");
        assert_eq!(error.cause(), "the setting `limit`: invalid type: integer `3`, expected a string");
        let error = testing::Script::new().context().settings::<Settings>().expect_err("missing");
        assert_eq!((error.verdict(), error.cause()), (Verdict::Retry, "settings in the plugin's plugin.yaml: missing field `limit`"));
    }
}
