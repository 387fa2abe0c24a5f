//! Rules of the fault proxy: which requests, how many of them, and what is done to them.

use std::{
    fmt,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    body::Body,
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::Response,
};
use bytes::Bytes;
use serde_json::json;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::record::{Seen, Verb};
use crate::eventually::eventually;

/// What is done to a request.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Sent on after this time.
    Delay(Duration),
    /// Sent on when the handle says so; not at all if the client goes away before.
    Hold,
    /// Sent on at once, and answered when the handle says so.
    HoldAnswer,
    /// Sent on; the connection is closed instead of an answer.
    CommitThenClose,
    /// Sent on; answered so, whatever the server answered.
    CommitThenAnswer(Answer),
    /// Not sent on; the connection is closed.
    Close,
    /// Not sent on, and never answered.
    BlackHole,
    /// Not sent on; answered so.
    Answer(Answer),
    /// Not sent on; answered 200 with a body of which nothing ever comes.
    SilentStream,
}

/// An answer of the proxy's own.
#[derive(Clone, Debug)]
pub struct Answer {
    status: StatusCode,
    headers: Vec<(HeaderName, HeaderValue)>,
    body: Bytes,
}

impl Answer {
    /// An answer with a body of this type.
    pub fn new(status: u16, content_type: &'static str, body: impl Into<Bytes>) -> Self {
        let status = StatusCode::from_u16(status).expect("tests give real statuses");
        Self { status, headers: vec![(header::CONTENT_TYPE, HeaderValue::from_static(content_type))], body: body.into() }
    }

    /// A `Status` object as the API server sends with a failure, such as `(403, "Forbidden")`.
    pub fn failure(status: u16, reason: &str) -> Self {
        Self::new(status, "application/json", failure(status, reason).to_string())
    }

    /// A watch that ends at once.
    pub fn empty_watch() -> Self {
        Self::new(200, "application/json", "")
    }

    /// A watch that tells of an expired resourceVersion and ends.
    pub fn expired_watch() -> Self {
        Self::new(200, "application/json", format!("{}\n", expired_event()))
    }

    /// The same with a `Retry-After` header.
    #[must_use]
    pub fn retry_after(mut self, seconds: u64) -> Self {
        self.headers.push((header::RETRY_AFTER, HeaderValue::from(seconds)));
        self
    }

    pub(super) fn response(&self) -> Response {
        let mut response = Response::new(Body::from(self.body.clone()));
        *response.status_mut() = self.status;
        response.headers_mut().extend(self.headers.iter().cloned());
        response
    }
}

fn failure(status: u16, reason: &str) -> serde_json::Value {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": format!("{reason}, says the fault proxy"),
        "reason": reason, "code": status})
}

/// The line with which the API server ends a watch whose resourceVersion is gone.
pub(super) fn expired_event() -> String {
    json!({"type": "ERROR", "object": failure(410, "Expired")}).to_string()
}

type Condition = Arc<dyn Fn(&Seen) -> bool + Send + Sync>;

/// Which requests, how many, and what is done to them.
#[derive(Clone)]
pub struct Rule {
    verb: Option<Verb>,
    path: String,
    condition: Option<Condition>,
    times: usize,
    effect: Effect,
}

impl Rule {
    /// For every request.
    pub fn any(effect: Effect) -> Self {
        Self { verb: None, path: String::new(), condition: None, times: usize::MAX, effect }
    }

    /// For requests with this verb.
    pub fn on(verb: Verb, effect: Effect) -> Self {
        Self { verb: Some(verb), ..Self::any(effect) }
    }

    /// Only where the path contains this.
    #[must_use]
    pub fn path(self, part: &str) -> Self {
        Self { path: part.to_owned(), ..self }
    }

    /// Only where this holds. It is asked once for each request that no newer rule acts on, in the order in which they come.
    #[must_use]
    pub fn when(self, condition: impl Fn(&Seen) -> bool + Send + Sync + 'static) -> Self {
        Self { condition: Some(Arc::new(condition)), ..self }
    }

    /// Only so many times.
    #[must_use]
    pub fn times(self, times: usize) -> Self {
        Self { times, ..self }
    }

    fn matches(&self, seen: &Seen) -> bool {
        self.verb.is_none_or(|verb| verb == seen.verb)
            && seen.path.contains(&self.path)
            && self.condition.as_ref().is_none_or(|condition| condition(seen))
    }
}

impl fmt::Debug for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { verb, path, condition, times, effect } = self;
        write!(f, "Rule({verb:?} {path:?} if {} ×{times}: {effect:?})", condition.is_some())
    }
}

/// The rules in force, oldest first.
#[derive(Debug, Default)]
pub(super) struct Rules {
    active: Arc<Mutex<Vec<Arc<Active>>>>,
}

#[derive(Debug)]
pub(super) struct Active {
    rule: Rule,
    hits: watch::Sender<usize>,
    committed: watch::Sender<usize>,
    holding: AtomicUsize,
    released: CancellationToken,
}

impl Rules {
    pub(super) fn add(&self, rule: Rule) -> Handle {
        let active = Arc::new(Active {
            rule,
            hits: watch::Sender::new(0),
            committed: watch::Sender::new(0),
            holding: AtomicUsize::new(0),
            released: CancellationToken::new(),
        });
        let mut rules = self.active.lock().expect("no holder panics");
        rules.push(active.clone());
        Handle { active, rules: Arc::downgrade(&self.active) }
    }

    /// The newest rule that matches, counted.
    pub(super) fn pick(&self, seen: &Seen) -> Option<Arc<Active>> {
        let rules = self.active.lock().expect("no holder panics");
        let rule = rules.iter().rev().find(|active| *active.hits.borrow() < active.rule.times && active.rule.matches(seen))?;
        rule.hits.send_modify(|hits| *hits += 1);
        Some(rule.clone())
    }
}

impl Active {
    pub(super) fn effect(&self) -> &Effect {
        &self.rule.effect
    }

    /// One more request has been answered by the server, and its answer kept back.
    pub(super) fn committed(&self) {
        self.committed.send_modify(|committed| *committed += 1);
    }

    /// Holds a request until it is let go, or its client goes away.
    pub(super) async fn released(&self) {
        let _held = Held::of(&self.holding);
        self.released.cancelled().await;
    }
}

/// One request that is held.
struct Held<'a>(&'a AtomicUsize);

impl<'a> Held<'a> {
    fn of(holding: &'a AtomicUsize) -> Self {
        holding.fetch_add(1, Ordering::Relaxed);
        Self(holding)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A rule in force. Dropping it ends the rule and lets go of what it holds.
#[derive(Debug)]
#[must_use = "the rule is in force until this is dropped"]
pub struct Handle {
    active: Arc<Active>,
    rules: Weak<Mutex<Vec<Arc<Active>>>>,
}

impl Handle {
    /// How many requests it acted on.
    pub fn hits(&self) -> usize {
        *self.active.hits.borrow()
    }

    /// How many requests it holds now, whose clients still wait for an answer.
    pub fn holding(&self) -> usize {
        self.active.holding.load(Ordering::Relaxed)
    }

    /// Waits until it has acted on `count` requests, for as long as a test may wait for anything.
    ///
    /// # Panics
    /// After a minute.
    #[track_caller]
    pub fn reached(&self, count: usize) -> impl Future<Output = ()> + use<> {
        counted(&self.active, &self.active.hits, count)
    }

    /// Waits until the server has answered `count` of them, whose answers are held or lost.
    ///
    /// # Panics
    /// After a minute.
    #[track_caller]
    pub fn committed(&self, count: usize) -> impl Future<Output = ()> + use<> {
        counted(&self.active, &self.active.committed, count)
    }

    /// Waits until it has acted on a request, however long that takes.
    pub fn hit(&self) -> impl Future<Output = ()> + use<> {
        let mut hits = self.active.hits.subscribe();
        // The sender is the rule's, and a rule that has gone acts on nothing.
        async move {
            if hits.wait_for(|hits| *hits > 0).await.is_err() {
                std::future::pending().await
            }
        }
    }

    /// Waits until the clients of all that it holds are gone, so that nothing of theirs goes on at its release.
    ///
    /// # Panics
    /// After a minute.
    #[track_caller]
    pub fn abandoned(&self) -> impl Future<Output = ()> {
        eventually(Duration::from_secs(60), async || match self.holding() {
            0 => Ok(()),
            held => Err(format!("{held} requests are held for somebody")),
        })
    }

    /// Ends the rule and lets go of what it holds.
    pub fn release(self) {
        drop(self);
    }
}

#[track_caller]
fn counted(active: &Arc<Active>, of: &watch::Sender<usize>, count: usize) -> impl Future<Output = ()> + use<> {
    let caller = std::panic::Location::caller();
    let (mut counter, active) = (of.subscribe(), active.clone());
    async move {
        let reached = counter.wait_for(|counted| *counted >= count);
        let in_time = tokio::time::timeout(Duration::from_secs(60), reached).await.is_ok();
        assert!(in_time, "{:?} acted on {} of {count} requests within a minute, as asked at {caller}", active.rule, *active.hits.borrow());
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let Some(rules) = self.rules.upgrade() {
            rules.lock().expect("no holder panics").retain(|active| !Arc::ptr_eq(active, &self.active));
        }
        self.active.released.cancel();
    }
}
