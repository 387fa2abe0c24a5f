//! The demo mail gateway: delivers a message once per idempotency key, keeps its deliveries on disk, and can be told to fail.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    path::Path,
    sync::{Arc, Mutex},
};

use anyhow::Context;
use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::Response,
    routing::{get, post},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    behaviour::{Behaviour, Script, answer, control, problem},
    ledger::{Ledger, unix_ms},
    server::{HangUp, Server, hang_up},
};

/// A message that went out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Delivery {
    /// Its idempotency key.
    pub key: String,
    /// What was sent.
    pub payload: Value,
    /// The gateway's own name for it.
    pub id: String,
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
}

/// A request to `/send`, whatever became of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Received {
    /// Its idempotency key, if it had a proper one.
    pub key: Option<String>,
    /// What was to be sent; null if it was not JSON.
    pub payload: Value,
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// The status of the answer; none while there is none, and for good where the gateway hung up.
    pub status: Option<u16>,
}

/// A running gateway.
#[derive(Debug)]
pub struct Gateway {
    server: Server,
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    script: Script,
    deliveries: Ledger<Delivery>,
    in_progress: Mutex<BTreeMap<String, Value>>,
    received: Mutex<Vec<Received>>,
    /// Requests go on when their client hangs up, as on a real server.
    work: TaskTracker,
    stop: CancellationToken,
}

impl Gateway {
    /// A gateway on a free port of 127.0.0.1 that keeps its deliveries in `data`.
    pub async fn start(data: &Path) -> anyhow::Result<Self> {
        Self::start_on(([127, 0, 0, 1], 0).into(), data).await
    }

    /// The same on a given address.
    pub async fn start_on(listen: SocketAddr, data: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(data).with_context(|| format!("creating {}", data.display()))?;
        let file = data.join("deliveries.jsonl");
        let inner = Arc::new(Inner {
            script: Script::default(),
            deliveries: Ledger::open(&file).with_context(|| format!("reading {}", file.display()))?,
            in_progress: Mutex::default(),
            received: Mutex::default(),
            work: TaskTracker::new(),
            stop: CancellationToken::new(),
        });
        let router = Router::new()
            .route("/send", post(send))
            .route("/control", post(|State(inner): State<Arc<Inner>>, body: Bytes| async move { control(&inner.script, &body) }))
            .route(
                "/deliveries",
                get(|State(inner): State<Arc<Inner>>| async move { answer(StatusCode::OK, &json!(inner.deliveries.entries())) }),
            )
            .route("/requests", get(|State(inner): State<Arc<Inner>>| async move { answer(StatusCode::OK, &json!(inner.received())) }))
            .with_state(inner.clone());
        let server = Server::start(listen, router).await.with_context(|| format!("listening on {listen}"))?;
        Ok(Self { server, inner })
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.server.addr()
    }

    /// `http://ADDRESS`.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr())
    }

    /// Behaves so from now on; held requests go on.
    pub fn control(&self, behaviour: Behaviour) {
        self.inner.script.set(behaviour);
    }

    /// Forgets what it was told; held requests go on.
    pub fn behave(&self) {
        self.inner.script.behave();
    }

    /// How many messages went out.
    pub fn delivered(&self) -> usize {
        self.inner.deliveries.len()
    }

    /// How many requests are held now.
    pub fn held(&self) -> usize {
        self.inner.script.held()
    }

    /// Refuses connections.
    pub async fn down(&self) {
        self.server.down().await;
    }

    /// Accepts connections again.
    pub fn up(&self) -> io::Result<()> {
        self.server.up()
    }

    /// What went out, oldest first.
    pub fn deliveries(&self) -> Vec<Delivery> {
        self.inner.deliveries.entries()
    }

    /// What went out under keys that contain `part`, such as `/namespace/name/`.
    pub fn deliveries_for(&self, part: &str) -> Vec<Delivery> {
        self.deliveries().into_iter().filter(|delivery| delivery.key.contains(part)).collect()
    }

    /// What was asked for, oldest first.
    pub fn requests(&self) -> Vec<Received> {
        self.inner.received()
    }

    /// What was asked for under keys that contain `part`.
    pub fn requests_for(&self, part: &str) -> Vec<Received> {
        self.requests().into_iter().filter(|request| request.key.as_ref().is_some_and(|key| key.contains(part))).collect()
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.inner.stop.cancel();
    }
}

impl Inner {
    fn received(&self) -> Vec<Received> {
        self.received.lock().expect("no holder panics").clone()
    }

    /// Delivers unless the key says that this was done, is being done, or was done with something else.
    async fn process(self: Arc<Self>, key: String, payload: Value) -> Response {
        let turn = self.script.turn(&[&key]);
        if let Some(done) = self.deliveries.find(|delivery| delivery.key == key) {
            return if done.payload == payload { self.script.perform(turn, || accepted(&done)).await } else { other_payload() };
        }
        match self.in_progress.lock().expect("no holder panics").entry(key.clone()) {
            std::collections::btree_map::Entry::Occupied(first) if *first.get() == payload => return busy(),
            std::collections::btree_map::Entry::Occupied(_) => return other_payload(),
            std::collections::btree_map::Entry::Vacant(slot) => slot.insert(payload.clone()),
        };
        let delivery = Delivery { id: format!("mail-{:08x}", rand::random::<u32>()), at_ms: 0, key, payload };
        let response = self.script.perform(turn, || self.deliver(&delivery)).await;
        self.in_progress.lock().expect("no holder panics").remove(&delivery.key);
        response
    }

    fn deliver(&self, delivery: &Delivery) -> Response {
        let delivery = Delivery { at_ms: unix_ms(), ..delivery.clone() };
        match self.deliveries.append(delivery.clone()) {
            Ok(()) => accepted(&delivery),
            Err(error) => problem(StatusCode::INSUFFICIENT_STORAGE, "Not delivered", &error.to_string()),
        }
    }
}

async fn send(State(inner): State<Arc<Inner>>, headers: HeaderMap, body: Bytes) -> Response {
    let key = idempotency_key(&headers);
    let payload: Result<Value, _> = serde_json::from_slice(&body);
    let number = {
        let mut received = inner.received.lock().expect("no holder panics");
        let payload = payload.as_ref().map_or(Value::Null, Clone::clone);
        received.push(Received { key: key.as_ref().ok().cloned(), payload, at_ms: unix_ms(), status: None });
        received.len() - 1
    };
    let response = match (key, payload) {
        (Err(detail), _) => problem(StatusCode::BAD_REQUEST, "Idempotency-Key is missing or malformed", detail),
        (_, Err(error)) => problem(StatusCode::BAD_REQUEST, "The message is not JSON", &error.to_string()),
        (Ok(key), Ok(payload)) => {
            let (done, response) = oneshot::channel();
            let (work, stop) = (inner.clone().process(key, payload), inner.stop.clone());
            // Dropped on stop; and who waits for it may be gone.
            inner.work.spawn(async move { stop.run_until_cancelled_owned(work).await.and_then(|response| done.send(response).ok()) });
            response.await.unwrap_or_else(|_| hang_up())
        }
    };
    if response.extensions().get::<HangUp>().is_none() {
        inner.received.lock().expect("no holder panics")[number].status = Some(response.status().as_u16());
    }
    response
}

fn accepted(delivery: &Delivery) -> Response {
    answer(StatusCode::ACCEPTED, &json!({"id": delivery.id}))
}

fn busy() -> Response {
    let mut response = problem(StatusCode::CONFLICT, "In progress", "a request with this Idempotency-Key is still in progress");
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    response
}

fn other_payload() -> Response {
    problem(StatusCode::UNPROCESSABLE_ENTITY, "Idempotency-Key is already used", "another message was sent under this Idempotency-Key")
}

/// The key of draft-ietf-httpapi-idempotency-key-header: a string of RFC 8941, in quotes.
fn idempotency_key(headers: &HeaderMap) -> Result<String, &'static str> {
    let mut values = headers.get_all("idempotency-key").iter();
    let (Some(value), None) = (values.next(), values.next()) else { return Err("exactly one Idempotency-Key header is needed") };
    let not_quoted = "the Idempotency-Key must be a string in double quotes (RFC 8941)";
    let text = value.to_str().map_err(|_| not_quoted)?.trim();
    let text = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).ok_or(not_quoted)?;
    let mut key = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(char) = chars.next() {
        match char {
            '\\' => key.push(chars.next().filter(|next| matches!(next, '"' | '\\')).ok_or("only \\\" and \\\\ are escapes")?),
            '"' => return Err(not_quoted),
            char => key.push(char),
        }
    }
    if key.is_empty() { Err("the Idempotency-Key must not be empty") } else { Ok(key) }
}

#[cfg(test)]
mod tests {
    use std::{path::PathBuf, time::Duration};

    use super::*;
    use crate::{behaviour::Hold, client::Client, eventually::eventually};

    async fn gateway() -> (Gateway, Client, tempfile::TempDir) {
        let dir = tempfile::tempdir().expect("temporary directory");
        let gateway = Gateway::start(dir.path()).await.expect("starts");
        (gateway, Client::new(), dir)
    }

    async fn send(client: &Client, gateway: &Gateway, key: &str, to: &str) -> u16 {
        let answer = client.post(&format!("{}/send", gateway.url()), &[("idempotency-key", key)], &json!({"to": to})).await;
        answer.map_or(0, |answer| answer.status)
    }

    #[tokio::test]
    async fn a_repeated_key_gets_the_first_answer_and_no_second_delivery() {
        let (gateway, client, dir) = gateway().await;
        let url = format!("{}/send", gateway.url());
        let first = client.post(&url, &[("idempotency-key", r#""k""#)], &json!({"to": "a", "b": 1})).await.expect("answered");
        let second = client.post(&url, &[("idempotency-key", r#""k""#)], &json!({"b": 1, "to": "a"})).await.expect("answered");
        assert_eq!((first.status, &first.body), (202, &second.body));
        assert_eq!(send(&client, &gateway, r#""k""#, "b").await, 422);
        drop(gateway);
        let again = Gateway::start(dir.path()).await.expect("starts again");
        let third = client.post(&format!("{}/send", again.url()), &[("idempotency-key", r#""k""#)], &json!({"to": "a", "b": 1})).await;
        assert_eq!(third.expect("answered").body, first.body);
        assert_eq!(again.deliveries().len(), 1);
    }

    #[tokio::test]
    async fn a_key_that_is_missing_bare_or_empty_is_a_problem() {
        let (gateway, client, _dir) = gateway().await;
        for key in ["k", r#""""#, r#""a"b""#, r#""a\n""#] {
            assert_eq!(send(&client, &gateway, key, "a").await, 400, "{key}");
        }
        let without = client.post(&format!("{}/send", gateway.url()), &[], &json!({})).await.expect("answered");
        assert_eq!(without.status, 400);
        assert!(without.json()["detail"].as_str().is_some_and(|detail| detail.contains("Idempotency-Key")));
        assert_eq!(send(&client, &gateway, r#""a\"\\b""#, "a").await, 202);
        assert_eq!(gateway.deliveries()[0].key, r#"a"\b"#);
    }

    #[tokio::test]
    async fn a_request_in_progress_is_a_conflict_and_goes_on_when_its_client_is_gone() {
        let (gateway, client, _dir) = gateway().await;
        gateway.control(Behaviour::hold(Hold::Before));
        let gone = tokio::time::timeout(Duration::from_millis(200), send(&client, &gateway, r#""k""#, "a"));
        assert!(gone.await.is_err(), "held");
        assert_eq!(send(&client, &gateway, r#""k""#, "a").await, 409);
        assert_eq!(send(&client, &gateway, r#""k""#, "b").await, 422);
        assert_eq!((gateway.held(), gateway.deliveries().len()), (1, 0));
        gateway.behave();
        eventually(Duration::from_secs(5), async || (gateway.deliveries().len() == 1).then_some(()).ok_or("no delivery")).await;
        assert_eq!(send(&client, &gateway, r#""k""#, "a").await, 202);
        assert_eq!(gateway.deliveries().len(), 1);
    }

    #[tokio::test]
    async fn a_failure_delivers_nothing_and_a_dropped_answer_does() {
        let (gateway, client, _dir) = gateway().await;
        let told = client.post(&format!("{}/control", gateway.url()), &[], &json!({"fail": "503", "retry_after": 7, "times": 1})).await;
        assert_eq!(told.expect("answered").status, 200);
        assert_eq!(send(&client, &gateway, r#""k""#, "a").await, 503);
        assert_eq!(gateway.deliveries().len(), 0);
        gateway.control(Behaviour::drop_answer(1));
        assert_eq!(send(&client, &gateway, r#""k""#, "a").await, 0);
        assert_eq!(gateway.deliveries().len(), 1);
        assert_eq!(send(&client, &gateway, r#""k""#, "a").await, 202);
        let statuses: Vec<_> = gateway.requests().iter().map(|request| request.status).collect();
        assert_eq!((statuses, gateway.deliveries_for("k").len()), (vec![Some(503), None, Some(202)], 1));
    }

    #[tokio::test]
    async fn a_dripping_answer_begins_and_takes_too_long_after_the_delivery() {
        let (gateway, client, _dir) = gateway().await;
        gateway.control(Behaviour::drip());
        assert!(tokio::time::timeout(Duration::from_millis(300), send(&client, &gateway, r#""k""#, "a")).await.is_err());
        assert_eq!((gateway.requests()[0].status, gateway.deliveries().len()), (Some(202), 1));
    }

    #[tokio::test]
    async fn a_delivery_ledger_that_cannot_be_read_stops_the_gateway_with_its_path() {
        let error = Gateway::start(&PathBuf::from("/proc/nowhere")).await.expect_err("no such place");
        assert!(format!("{error:#}").contains("/proc/nowhere"));
    }
}
