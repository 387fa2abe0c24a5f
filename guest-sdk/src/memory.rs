//! The world of a handler natively: all of it in memory and scripted by the test.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
};

use serde_json::Value;

use crate::{
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

    /// Answers the handler's requests.
    pub fn respond(mut self, responder: impl FnMut(&Outgoing) -> Result<Response, Fault> + 'static) -> Self {
        self.responder = Box::new(responder);
        self
    }

    /// The context.
    pub fn context(self) -> Context {
        let Self { settings, idempotency_key, attempt, last_failure, now, objects, responder } = self;
        Context {
            settings: serde_json::to_string(&settings).expect("JSON values are JSON"),
            idempotency_key,
            attempt,
            last_failure,
            keyed_requests: Cell::new(0),
            world: World { now, objects, responder: responder.into(), sent: RefCell::default(), lines: RefCell::default() },
        }
    }
}

/// A run on the JSON of an object, from reading it to the status laid over the given one.
pub fn reconcile<R: Reconciler>(object: &Value, ctx: &Context) -> Outcome {
    run::<R>(&object.to_string(), false, ctx)
}

/// A finalize run on the JSON of an object.
pub fn finalize<R: Reconciler>(object: &Value, ctx: &Context) -> Outcome {
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
    responder: RefCell<Responder>,
    sent: RefCell<Vec<Outgoing>>,
    lines: RefCell<Vec<Line>>,
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
        Ok(self.of(kind, namespace).find(|object| object["metadata"]["name"] == name).map(Value::to_string))
    }

    pub fn list(
        &self,
        kind: &Kind,
        namespace: Option<&str>,
        labels: &str,
        _: Option<String>,
    ) -> Result<(Vec<String>, Option<String>), ReadError> {
        let mut wanted = Vec::new();
        for term in labels.split(',').filter(|term| !term.is_empty()) {
            let pair = term.split_once('=').filter(|(key, _)| !key.ends_with('!'));
            wanted.push(pair.ok_or_else(|| ReadError::Other(format!("the in-memory context knows only `key=value`, not `{term}`")))?);
        }
        let fits = |object: &&Value| wanted.iter().all(|(key, value)| object["metadata"]["labels"][key] == *value);
        let mut found: Vec<&Value> = self.of(kind, namespace).filter(fits).collect();
        found.sort_by_key(|object| ["namespace", "name"].map(|field| object["metadata"][field].as_str().unwrap_or_default()));
        Ok((found.into_iter().map(Value::to_string).collect(), None))
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
