//! An API server in memory that knows Leases, and can be told to misbehave.

use std::sync::{Arc, Mutex};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::State,
    http::{Method, StatusCode, Uri, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
};
use futures::{StreamExt, stream};
use kube::Client;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::Duration;

/// How it answers everything but the watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mood {
    Fine,
    /// 429, as an overloaded one.
    Busy,
    /// Never answers.
    Silent,
    /// Does what is asked, and then never answers.
    Mute,
}

#[derive(Clone, Debug)]
pub(super) struct Server {
    /// The Lease, if there is one, and the last resourceVersion.
    lease: Arc<watch::Sender<(Option<Value>, u64)>>,
    mood: Arc<Mutex<Mood>>,
}

impl Server {
    pub(super) fn new() -> Self {
        Self { lease: Arc::new(watch::Sender::new((None, 0))), mood: Arc::new(Mutex::new(Mood::Fine)) }
    }

    /// A client of it, as if over a network.
    pub(super) fn client(&self) -> Client {
        Client::new(Router::new().fallback(answer).with_state(self.clone()), "default")
    }

    pub(super) fn set_mood(&self, mood: Mood) {
        *self.mood.lock().expect("no panic under the lock") = mood;
    }

    fn mood(&self) -> Mood {
        *self.mood.lock().expect("no panic under the lock")
    }

    /// The field of the spec, as text.
    pub(super) fn spec(&self, field: &str) -> String {
        let (lease, _) = &*self.lease.borrow();
        lease.as_ref().map(|lease| lease["spec"][field].to_string().trim_matches('"').to_owned()).unwrap_or_default()
    }

    /// As `kubectl patch` would, or deletes it.
    pub(super) fn edit(&self, edit: impl FnOnce(&mut Option<Value>)) {
        self.lease.send_modify(|(lease, version)| {
            edit(lease);
            *version += 1;
            if let Some(lease) = lease {
                lease["metadata"]["resourceVersion"] = json!(version.to_string());
            }
        });
    }

    fn write(&self, mut lease: Value) -> Response {
        let mut refused = None;
        self.lease.send_if_modified(|(stored, version)| {
            let given = lease["metadata"]["resourceVersion"].as_str();
            refused = match &stored {
                Some(stored) if given != stored["metadata"]["resourceVersion"].as_str() => Some(StatusCode::CONFLICT),
                None if given.is_some() => Some(StatusCode::NOT_FOUND),
                _ => None,
            };
            if refused.is_some() {
                return false;
            }
            *version += 1;
            lease["metadata"]["resourceVersion"] = json!(version.to_string());
            *stored = Some(lease.clone());
            true
        });
        refused.map_or_else(|| json_response(StatusCode::OK, &lease), error)
    }

    fn watch(&self) -> Response {
        let states = stream::unfold((self.lease.subscribe(), true), |(mut states, first)| async move {
            if !first {
                states.changed().await.ok()?;
            }
            let (lease, version) = states.borrow_and_update().clone();
            let event = match (lease, first) {
                (Some(lease), true) => json!({"type": "ADDED", "object": lease}),
                (Some(lease), false) => json!({"type": "MODIFIED", "object": lease}),
                (None, true) => return Some((String::new(), (states, false))),
                (None, false) => {
                    json!({"type": "DELETED", "object": {"metadata": {"name": "berth", "resourceVersion": version.to_string()}}})
                }
            };
            Some((format!("{event}\n"), (states, false)))
        });
        Body::from_stream(states.map(Ok::<_, std::convert::Infallible>)).into_response()
    }
}

async fn answer(State(server): State<Server>, method: Method, uri: Uri, body: Bytes) -> Response {
    if uri.query().is_some_and(|query| query.contains("watch=true")) {
        return server.watch();
    }
    match server.mood() {
        Mood::Fine | Mood::Mute => {}
        Mood::Busy => return error(StatusCode::TOO_MANY_REQUESTS),
        Mood::Silent => return std::future::pending().await,
    }
    let response = if method == Method::GET {
        let lease = server.lease.borrow().0.clone();
        lease.map_or_else(|| error(StatusCode::NOT_FOUND), |lease| json_response(StatusCode::OK, &lease))
    } else {
        server.write(serde_json::from_slice(&body).expect("JSON"))
    };
    if server.mood() == Mood::Mute {
        return std::future::pending().await;
    }
    response
}

fn error(code: StatusCode) -> Response {
    let status = json!({"kind": "Status", "status": "Failure", "message": code.to_string(), "code": code.as_u16()});
    json_response(code, &status)
}

fn json_response(code: StatusCode, value: &Value) -> Response {
    (code, [(CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

/// Waits until what is seen is as it should be, which may take some renewals.
pub(super) async fn eventually<T: std::fmt::Debug>(what: &str, mut see: impl FnMut() -> T, holds: impl Fn(&T) -> bool) {
    let mut last = see();
    for _ in 0..1000 {
        if holds(&last) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
        last = see();
    }
    panic!("not within 5 s: {what}; last seen: {last:?}");
}
