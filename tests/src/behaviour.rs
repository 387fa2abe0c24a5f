//! How a demo back end misbehaves on request: it fails, waits, holds, drips or hangs up.

use std::{
    collections::BTreeMap,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, StatusCode, header},
    response::Response,
};
use futures::StreamExt;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::server::hang_up;

/// How long a dripping answer takes: one byte a second, then the answer.
const DRIPS: u64 = 120;

/// What is to happen to requests, until told otherwise or for a number of them. The default is to behave.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Behaviour {
    /// Only for requests whose key or report name contains this; without it for all that no other behaviour is for.
    pub only: Option<String>,
    /// For so many requests, after which it behaves again.
    pub times: Option<u64>,
    /// Do nothing and answer with this status.
    #[serde(deserialize_with = "status")]
    pub fail: Option<u16>,
    /// Seconds for the `Retry-After` header of a failure.
    pub retry_after: Option<u64>,
    /// Wait before doing anything.
    pub delay_ms: u64,
    /// Stop at this point until another behaviour is told.
    pub hold: Option<Hold>,
    /// Do it, and then close the connection instead of answering, for so many requests.
    pub drop_answer: u64,
    /// Do it, and then answer with one byte a second.
    pub drip: bool,
}

/// Where a request is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Hold {
    /// Received, nothing done yet.
    Before,
    /// Done, not answered yet.
    After,
}

impl Behaviour {
    /// Answers with `status` and does nothing.
    pub fn fail(status: u16) -> Self {
        Self { fail: Some(status), ..Self::default() }
    }

    /// Holds requests at a point until another behaviour is told.
    pub fn hold(hold: Hold) -> Self {
        Self { hold: Some(hold), ..Self::default() }
    }

    /// Does the work and hangs up on the next `times` requests.
    pub fn drop_answer(times: u64) -> Self {
        Self { drop_answer: times, ..Self::default() }
    }

    /// Does the work and answers with one byte a second.
    pub fn drip() -> Self {
        Self { drip: true, ..Self::default() }
    }

    /// The same for requests whose key or report name contains `only`.
    #[must_use]
    pub fn only(self, only: &str) -> Self {
        Self { only: Some(only.to_owned()), ..self }
    }

    /// The same for so many requests.
    #[must_use]
    pub fn times(self, times: u64) -> Self {
        Self { times: Some(times), ..self }
    }

    /// The answer of a back end that fails as told.
    fn failure(&self) -> Option<Response> {
        let status = StatusCode::from_u16(self.fail?).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = problem(status, "Told to fail", "this back end was told to fail");
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        Some(response)
    }
}

/// A status as a number or as text.
fn status<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u16>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Status {
        Number(u16),
        Text(String),
    }
    let number = match Option::<Status>::deserialize(deserializer)? {
        None => return Ok(None),
        Some(Status::Number(number)) => number,
        Some(Status::Text(text)) => text.parse().map_err(|_| serde::de::Error::custom(format!("{text:?} is no HTTP status")))?,
    };
    if (400..600).contains(&number) { Ok(Some(number)) } else { Err(serde::de::Error::custom(format!("{number} is no failure"))) }
}

/// The behaviours in force.
#[derive(Debug, Default)]
pub struct Script {
    rules: Mutex<BTreeMap<Option<String>, Behaviour>>,
    /// Moves with every change, so that whoever is held looks again.
    revision: watch::Sender<u64>,
    held: AtomicUsize,
}

/// What applies to one request.
#[derive(Debug)]
pub struct Turn {
    behaviour: Behaviour,
    hangs_up: bool,
    revision: watch::Receiver<u64>,
}

impl Script {
    /// Replaces the behaviour for the same `only`; what it held goes on unless it is to be held again.
    pub fn set(&self, behaviour: Behaviour) {
        self.rules.lock().expect("no holder panics").insert(behaviour.only.clone(), behaviour);
        self.revision.send_modify(|revision| *revision += 1);
    }

    /// Forgets all behaviours and lets go of what is held.
    pub fn behave(&self) {
        self.rules.lock().expect("no holder panics").clear();
        self.revision.send_modify(|revision| *revision += 1);
    }

    /// How many requests are held now.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// What applies to a request about `subjects`; counts it where the behaviour is for a number of requests.
    pub fn turn(&self, subjects: &[&str]) -> Turn {
        let revision = self.revision.subscribe();
        let mut rules = self.rules.lock().expect("no holder panics");
        let own = rules.keys().flatten().find(|only| subjects.iter().any(|subject| subject.contains(only.as_str()))).cloned();
        let Some(rule) = rules.get_mut(&own) else { return Turn { behaviour: Behaviour::default(), hangs_up: false, revision } };
        let behaviour = match &mut rule.times {
            Some(0) => Behaviour::default(),
            Some(left) => {
                *left -= 1;
                rule.clone()
            }
            None => rule.clone(),
        };
        let hangs_up = behaviour.drop_answer > 0;
        rule.drop_answer = rule.drop_answer.saturating_sub(1);
        Turn { behaviour, hangs_up, revision }
    }

    async fn hold(&self, turn: &mut Turn, point: Hold) {
        if turn.behaviour.hold != Some(point) {
            return;
        }
        self.held.fetch_add(1, Ordering::Relaxed);
        while self.rules.lock().expect("no holder panics").get(&turn.behaviour.only).is_some_and(|rule| rule.hold == Some(point)) {
            // The sender lives in `self`, so this ends by a change only.
            turn.revision.changed().await.ok();
        }
        self.held.fetch_sub(1, Ordering::Relaxed);
    }

    /// Performs `work` the way that `turn` asks for.
    pub async fn perform(&self, mut turn: Turn, work: impl FnOnce() -> Response) -> Response {
        if turn.behaviour.delay_ms > 0 {
            tokio::time::sleep(Duration::from_millis(turn.behaviour.delay_ms)).await;
        }
        if let Some(failure) = turn.behaviour.failure() {
            return failure;
        }
        self.hold(&mut turn, Hold::Before).await;
        let answer = work();
        self.hold(&mut turn, Hold::After).await;
        match () {
            () if turn.hangs_up => hang_up(),
            () if turn.behaviour.drip => drip(answer),
            () => answer,
        }
    }
}

/// Spaces, which JSON allows, one a second, and then the answer.
fn drip(answer: Response) -> Response {
    let (mut parts, body) = answer.into_parts();
    parts.headers.remove(header::CONTENT_LENGTH);
    let spaces = futures::stream::iter(0..DRIPS).then(|_| async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        Ok::<_, axum::Error>(Bytes::from_static(b" "))
    });
    Response::from_parts(parts, Body::from_stream(spaces.chain(body.into_data_stream())))
}

/// A JSON answer.
pub fn answer(status: StatusCode, value: &Value) -> Response {
    let mut response = Response::new(Body::from(value.to_string()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// A JSON problem (RFC 9457).
pub fn problem(status: StatusCode, title: &str, detail: &str) -> Response {
    let mut response = answer(status, &json!({"title": title, "status": status.as_u16(), "detail": detail}));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    response
}

/// What `POST /control` does.
pub fn control(script: &Script, body: &[u8]) -> Response {
    match serde_json::from_slice(body) {
        Ok(behaviour) => {
            script.set(behaviour);
            answer(StatusCode::OK, &json!({"ok": true}))
        }
        Err(error) => problem(StatusCode::BAD_REQUEST, "Unknown behaviour", &error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_behaviour_is_for_its_subject_and_its_number_of_requests() {
        let script = Script::default();
        script.set(Behaviour::fail(503).times(1));
        script.set(Behaviour::fail(500).only("broken"));
        assert_eq!(script.turn(&["broken"]).behaviour.fail, Some(500));
        assert_eq!(script.turn(&["x"]).behaviour.fail, Some(503));
        assert_eq!(script.turn(&["x"]).behaviour.fail, None);
        assert_eq!(script.turn(&["my", "is broken"]).behaviour.fail, Some(500));
        script.behave();
        assert_eq!(script.turn(&["broken"]).behaviour.fail, None);
    }

    #[test]
    fn the_control_takes_a_status_as_text_or_number_and_refuses_what_it_does_not_know() {
        for text in [r#"{"fail": "503", "retry_after": 7}"#, r#"{"fail": 503, "retry_after": 7}"#] {
            assert_eq!(serde_json::from_str::<Behaviour>(text).expect("known"), Behaviour { retry_after: Some(7), ..Behaviour::fail(503) });
        }
        for text in [r#"{"fail": 200}"#, r#"{"fail": "x"}"#, r#"{"flail": 503}"#] {
            assert!(serde_json::from_str::<Behaviour>(text).is_err(), "{text}");
        }
    }
}
