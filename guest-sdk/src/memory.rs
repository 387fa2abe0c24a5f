//! The world of a handler natively: all of it in memory and scripted by the test.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
};

use serde_json::Value;

use crate::{
    claim::{Describe, Read},
    context::{Context, Level, ReadError},
    http::{Fault, Outgoing, Response},
    resource::Kind,
    run::{Outcome, Reconciler, run},
    time::Timestamp,
};

type Responder = Box<dyn FnMut(&Outgoing) -> Result<Response, Fault>>;

/// What a [`Context`] of a test is made from.
///
/// ```
/// use berth_sdk::{http, testing::{Response, Script}};
///
/// let ctx = Script::new().setting("gateway", "http://mail").respond(|_| Ok(Response::new(503))).context();
/// let error = http::get(&ctx, ctx.setting("gateway")?).send().unwrap_err();
/// assert_eq!(error.to_string(), "GET http://mail was answered with 503");
/// # Ok::<(), berth_sdk::Error>(())
/// ```
#[must_use = "a script becomes a context by `context`"]
pub struct Script {
    settings: BTreeMap<String, Value>,
    idempotency_key: String,
    attempt: u32,
    last_failure: Option<String>,
    now: Option<Timestamp>,
    objects: Vec<Value>,
    unreadable: Option<ReadError>,
    responder: Responder,
}

impl Default for Script {
    fn default() -> Self {
        Self::new()
    }
}

impl Script {
    /// No settings, no objects, the clock of the machine, and no connection to anywhere.
    pub fn new() -> Self {
        Self {
            settings: BTreeMap::new(),
            idempotency_key: "tests.example/default/test/uid".to_owned(),
            attempt: 0,
            last_failure: None,
            now: None,
            objects: Vec::new(),
            unreadable: None,
            responder: Box::new(|_| Err(Fault::Io("connection refused".to_owned()))),
        }
    }

    /// A setting of `plugin.yaml`.
    pub fn setting(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.settings.insert(name.to_owned(), value.into());
        self
    }

    /// The object's idempotency key.
    pub fn idempotency_key(mut self, key: &str) -> Self {
        self.idempotency_key = key.to_owned();
        self
    }

    /// So many failures in a row, and the cause of the last one.
    pub fn attempt(mut self, attempt: u32, last_failure: &str) -> Self {
        (self.attempt, self.last_failure) = (attempt, Some(last_failure.to_owned()));
        self
    }

    /// The time, in RFC 3339.
    ///
    /// # Panics
    /// Where the text is no time.
    pub fn at(mut self, time: &str) -> Self {
        self.now = Some(Timestamp::parse(time).unwrap_or_else(|| panic!("`{time}` is no time")));
        self
    }

    /// An object that the handler can read, with `apiVersion` and `kind`.
    pub fn object(mut self, object: Value) -> Self {
        self.objects.push(object);
        self
    }

    /// Answers every read with this error.
    pub fn unreadable(mut self, error: ReadError) -> Self {
        self.unreadable = Some(error);
        self
    }

    /// Answers the handler's requests.
    pub fn respond(mut self, responder: impl FnMut(&Outgoing) -> Result<Response, Fault> + 'static) -> Self {
        self.responder = Box::new(responder);
        self
    }

    /// The context.
    pub fn context(self) -> Context {
        let Self { settings, idempotency_key, attempt, last_failure, now, objects, unreadable, responder } = self;
        Context {
            settings: serde_json::to_string(&settings).expect("JSON values are JSON"),
            idempotency_key,
            attempt,
            last_failure,
            keyed_requests: Cell::new(0),
            world: World {
                now,
                objects,
                unreadable,
                claimed: RefCell::default(),
                responder: responder.into(),
                sent: RefCell::default(),
                lines: RefCell::default(),
            },
        }
    }
}

/// A run on the JSON of an object, from reading it to the status laid over the given one. As in the host, it reads what its claim
/// covers.
pub fn reconcile<R: Reconciler + Describe>(object: &Value, ctx: &Context) -> Outcome {
    ctx.world.claimed.replace(Some(Claimed::new::<R>(object)));
    run::<R>(&object.to_string(), false, ctx)
}

/// A finalize run on the JSON of an object.
pub fn finalize<R: Reconciler + Describe>(object: &Value, ctx: &Context) -> Outcome {
    ctx.world.claimed.replace(Some(Claimed::new::<R>(object)));
    run::<R>(&object.to_string(), true, ctx)
}

/// A line that a handler logged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// How much it matters.
    pub level: Level,
    /// The message.
    pub message: String,
    /// Names and values.
    pub fields: Vec<(String, String)>,
}

impl Context {
    /// The requests that were sent, in order.
    pub fn sent(&self) -> Vec<Outgoing> {
        self.world.sent.borrow().clone()
    }

    /// The lines that were logged, in order.
    pub fn lines(&self) -> Vec<Line> {
        self.world.lines.borrow().clone()
    }
}

impl Response {
    /// An answer with an empty body, for a script.
    pub fn new(status: u16) -> Self {
        Self::from_parts(status, Vec::new(), Vec::new())
    }

    /// The same with a header.
    pub fn with_header(self, name: &str, value: &str) -> Self {
        let (status, mut headers, body) = self.into_parts();
        headers.push((name.to_owned(), value.to_owned()));
        Self::from_parts(status, headers, body)
    }

    /// The same with a body.
    pub fn with_body(self, body: impl Into<Vec<u8>>) -> Self {
        let (status, headers, _) = self.into_parts();
        Self::from_parts(status, headers, body.into())
    }
}

/// Where effects and reads go.
pub(crate) struct World {
    now: Option<Timestamp>,
    objects: Vec<Value>,
    unreadable: Option<ReadError>,
    /// None where no run of a handler has begun: then everything can be read.
    claimed: RefCell<Option<Claimed>>,
    responder: RefCell<Responder>,
    sent: RefCell<Vec<Outgoing>>,
    lines: RefCell<Vec<Line>>,
}

/// What a run may read.
#[derive(Clone)]
struct Claimed {
    reads: &'static [Read],
    home: Option<String>,
}

impl Claimed {
    fn new<R: Describe>(object: &Value) -> Self {
        Self { reads: R::CLAIM.reads, home: object["metadata"]["namespace"].as_str().map(str::to_owned) }
    }

    /// The selector of the read that covers it.
    fn covers(&self, kind: &Kind, namespace: Option<&str>) -> Result<&'static str, ReadError> {
        let name = kind.kind;
        let Some(read) = self.reads.iter().find(|read| read.kind == *kind) else {
            let sentence = format!("the handler does not claim to read {name}: add `read({name})` to #[reconciler]");
            return Err(ReadError::Forbidden(sentence));
        };
        if kind.namespaced && !read.all_namespaces && (namespace.is_none() || namespace != self.home.as_deref()) {
            let sentence = format!(
                "the handler claims to read {name} in the namespace of its object alone: claim `read({name}, all_namespaces)` in #[reconciler]"
            );
            return Err(ReadError::Forbidden(sentence));
        }
        Ok(read.label_selector)
    }
}

impl World {
    pub fn now(&self) -> Timestamp {
        self.now.unwrap_or_else(Timestamp::now)
    }

    pub fn log(&self, level: Level, message: &str, fields: Vec<(String, String)>) {
        self.lines.borrow_mut().push(Line { level, message: message.to_owned(), fields });
    }

    pub fn send(&self, outgoing: Outgoing) -> Result<Response, Fault> {
        let answer = (self.responder.borrow_mut())(&outgoing);
        self.sent.borrow_mut().push(outgoing);
        answer
    }

    pub fn get(&self, kind: &Kind, namespace: Option<&str>, name: &str) -> Result<Option<String>, ReadError> {
        let found = self.readable(kind, namespace, "")?;
        Ok(found.into_iter().find(|object| object["metadata"]["name"] == name).map(Value::to_string))
    }

    pub fn list(
        &self,
        kind: &Kind,
        namespace: Option<&str>,
        labels: &str,
        _: Option<String>,
    ) -> Result<(Vec<String>, Option<String>), ReadError> {
        let mut found = self.readable(kind, namespace, labels)?;
        found.sort_by_key(|object| ["namespace", "name"].map(|field| object["metadata"][field].as_str().unwrap_or_default()));
        Ok((found.into_iter().map(Value::to_string).collect(), None))
    }

    /// The objects that a selector and the claim's own mean.
    fn readable(&self, kind: &Kind, namespace: Option<&str>, labels: &str) -> Result<Vec<&Value>, ReadError> {
        if let Some(error) = &self.unreadable {
            return Err(error.clone());
        }
        let claimed = self.claimed.borrow().as_ref().map(|claimed| claimed.covers(kind, namespace)).transpose()?;
        selects(labels, &Value::Null)?;
        let mut found = Vec::new();
        for object in self.of(kind, namespace) {
            let has = &object["metadata"]["labels"];
            if selects(labels, has)? && selects(claimed.unwrap_or_default(), has)? {
                found.push(object);
            }
        }
        Ok(found)
    }

    fn of(&self, kind: &Kind, namespace: Option<&str>) -> impl Iterator<Item = &Value> {
        let api_version = if kind.group.is_empty() { kind.version.to_owned() } else { format!("{}/{}", kind.group, kind.version) };
        let (kind, namespace) = (kind.kind, namespace.map(str::to_owned));
        self.objects.iter().filter(move |object| {
            object["apiVersion"] == api_version.as_str()
                && object["kind"] == kind
                && namespace.as_deref().is_none_or(|namespace| object["metadata"]["namespace"] == namespace)
        })
    }
}

/// Whether a selector as in `kubectl -l` means an object with these labels.
fn selects(selector: &str, labels: &Value) -> Result<bool, ReadError> {
    let mut depth = 0_u32;
    let terms = selector.split(|c| {
        depth = match c {
            '(' => depth + 1,
            ')' => depth.saturating_sub(1),
            _ => depth,
        };
        c == ',' && depth == 0
    });
    let mut all = true;
    for term in terms.map(str::trim).filter(|term| !term.is_empty()) {
        let is = |key: &str, value: &str| labels[key.trim()] == value.trim();
        let is_one_of = |key: &str, set: &str| set.trim().trim_matches(['(', ')']).split(',').any(|value| is(key, value));
        let word = |text: &str| !text.is_empty() && !text.contains([' ', '=', '(', '!', '<', '>']);
        all &= match () {
            () if word(term) => !labels[term].is_null(),
            () if term.strip_prefix('!').is_some_and(|key| word(key.trim())) => labels[term[1..].trim()].is_null(),
            () => match (term.split_once("!="), term.split_once(['=']), term.split_once(" notin "), term.split_once(" in ")) {
                (Some((key, value)), ..) => !is(key, value),
                (None, Some((key, value)), ..) => is(key, value.trim_start_matches('=')),
                (None, None, Some((key, set)), _) => !is_one_of(key, set),
                (None, None, None, Some((key, set))) => is_one_of(key, set),
                _ => return Err(ReadError::Other(format!("the label selector `{selector}` is not valid at `{term}`"))),
            },
        };
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::selects;

    #[test]
    fn selectors_mean_what_kubectl_means() {
        let labels = json!({ "app": "web", "tier": "" });
        for (selector, expected) in [
            ("", true),
            ("app", true),
            ("!app", false),
            ("! none", true),
            ("app=web", true),
            ("app == web", true),
            ("app!=web", false),
            ("none!=web", true),
            ("tier=", true),
            ("app in (db, web),!none", true),
            ("app notin (db,web)", false),
            ("none notin (db)", true),
            ("app=web,tier=x", false),
        ] {
            assert_eq!(selects(selector, &labels), Ok(expected), "{selector:?}");
        }
        assert!(selects("app > 1", &labels).is_err() && selects("app web", &labels).is_err());
    }
}
