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

    /// An object of a kind that the claim reads; none where there is no such object, or where the claim's selector does not mean it.
    ///
    /// It comes from the host's cache. When it changes, or comes to be, the host runs the handler again for the object of this run,
    /// unless that one is settled: a handler that follows other objects does not call that phase settled. What cannot be read now
    /// (the claim or the plugin's ServiceAccount does not allow it, or the host has not listed it yet) is tried again.
    ///
    /// ```
    /// use std::collections::BTreeMap;
    /// use berth_sdk::{Kind, Readable, prelude::*};
    ///
    /// #[data]
    /// struct ConfigMap { data: Option<BTreeMap<String, String>> }
    ///
    /// impl Readable for ConfigMap {
    ///     const KIND: Kind = Kind { group: "", version: "v1", kind: "ConfigMap", plural: "configmaps", namespaced: true };
    ///     fn read(text: &str) -> Result<Self, String> { berth_sdk::from_json(text) }
    /// }
    ///
    /// #[resource(group = "demo.acme.io", version = "v1", kind = "Banner", namespaced, status = BannerStatus)]
    /// struct BannerSpec { texts: String }
    ///
    /// #[data]
    /// struct BannerStatus { text: Option<String> }
    ///
    /// struct Handler;
    ///
    /// #[reconciler(read(ConfigMap))]
    /// impl Reconciler for Handler {
    ///     type Object = Banner;
    ///
    ///     fn reconcile(banner: &Banner, ctx: &Context) -> Result<Action, Error> {
    ///         let texts: Option<ConfigMap> = ctx.get(banner.namespace(), &banner.spec.texts)?;
    ///         let text = texts.and_then(|texts| texts.data?.remove("banner"));
    ///         Ok(Action::await_change().status(BannerStatus { text }))
    ///     }
    /// }
    ///
    /// let banner = testing::json!({ "metadata": { "namespace": "shop" }, "spec": { "texts": "en" } });
    /// let texts = testing::json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "namespace": "shop", "name": "en" },
    ///     "data": { "banner": "Welcome" } });
    /// let outcome = testing::reconcile::<Handler>(&banner, &testing::Script::new().object(texts).context());
    /// assert_eq!(outcome.status.as_deref(), Some(r#"{"text":"Welcome"}"#));
    /// ```
    pub fn get<T: Readable>(&self, namespace: Option<&str>, name: &str) -> Result<Option<T>, Error> {
        let text = self.get_json(&T::KIND, namespace, name).or_retry(reading(&T::KIND))?;
        text.map(|text| T::read(&text).or_retry(format_args!("{} {name}", reading(&T::KIND)))).transpose()
    }

    /// The objects of a kind that the claim reads, in the order of namespace and name: of one namespace, or with none of all, which
    /// needs `all_namespaces` in the claim. The selector is as in `kubectl -l`, and empty for all.
    ///
    /// Any object that enters the list, changes in it or leaves it has the handler run again, as with [`get`](Self::get).
    pub fn list<T: Readable>(&self, namespace: Option<&str>, label_selector: &str) -> Result<Vec<T>, Error> {
        let texts = self.list_json(&T::KIND, namespace, label_selector).or_retry(reading(&T::KIND))?;
        texts.iter().map(|text| T::read(text).or_retry(reading(&T::KIND))).collect()
    }

    /// [`get`](Self::get) without a type of the author's: the object as JSON, or why it cannot be read.
    pub fn get_json(&self, kind: &Kind, namespace: Option<&str>, name: &str) -> Result<Option<String>, ReadError> {
        self.world.get(kind, namespace, name)
    }

    /// [`list`](Self::list) without a type of the author's: each object as JSON, or why they cannot be read.
    pub fn list_json(&self, kind: &Kind, namespace: Option<&str>, label_selector: &str) -> Result<Vec<String>, ReadError> {
        let (mut all, mut next) = (Vec::new(), None);
        loop {
            let (texts, more) = self.world.list(kind, namespace, label_selector, next)?;
            all.extend(texts);
            match more {
                Some(more) => next = Some(more),
                None => return Ok(all),
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

    use super::ReadError;
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
    fn an_object_can_be_read_as_json_with_the_cause_where_it_cannot() {
        let kind = <Thing as Resource>::KIND;
        let ctx = testing::Script::new().object(thing("a", "x", 1)).context();
        assert!(ctx.get_json(&kind, Some("a"), "x").expect("allowed").is_some_and(|text| text.contains(r#""size":1"#)));
        assert_eq!(ctx.list_json(&kind, None, "none").expect("allowed"), Vec::<String>::new());
        let ctx = testing::Script::new().object(thing("a", "x", 1)).unreadable(ReadError::NotSynced).context();
        assert_eq!(ctx.get_json(&kind, Some("a"), "x"), Err(ReadError::NotSynced));
        let error = ctx.list::<Thing>(None, "").expect_err("not synced");
        assert_eq!((error.verdict(), error.cause()), (Verdict::Retry, "reading things: the host has not listed the kind yet"));
    }

    struct Handler;

    #[reconciler(read(Thing, selector = "app in (x, y),!hidden"))]
    impl Reconciler for Handler {
        type Object = Thing;

        fn reconcile(thing: &Thing, ctx: &Context) -> Result<Action, Error> {
            let found = match thing.name() {
                "all" => ctx.list::<Thing>(None, "")?.len(),
                name => usize::from(ctx.get::<Thing>(Some(name), "x")?.is_some()) + ctx.list::<Thing>(Some(name), "")?.len(),
            };
            Ok(Action::look_again(std::time::Duration::from_secs(found as u64)))
        }
    }

    #[reconciler()]
    impl Reconciler for ThingSpec {
        type Object = Thing;

        fn reconcile(_: &Thing, ctx: &Context) -> Result<Action, Error> {
            ctx.list::<Thing>(Some("a"), "").map(|_| Action::await_change())
        }
    }

    #[test]
    fn a_run_reads_what_its_claim_covers_and_no_more() {
        let ctx = || testing::Script::new().object(thing("a", "x", 1)).object(thing("a", "z", 1)).object(thing("b", "x", 1)).context();
        let run = |name: &str| testing::reconcile::<Handler>(&thing("a", name, 1), &ctx()).next;
        assert_eq!(run("a"), testing::Next::After(std::time::Duration::from_secs(2)));
        let forbidden =
            |next: testing::Next, words: &str| assert!(matches!(&next, testing::Next::Retry(why) if why.contains(words)), "{next:?}");
        forbidden(run("b"), "`read(Thing, all_namespaces)`");
        forbidden(run("all"), "`read(Thing, all_namespaces)`");
        forbidden(testing::reconcile::<ThingSpec>(&thing("a", "a", 1), &ctx()).next, "add `read(Thing)`");
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
