//! What the proxy saw: a request, and what became of it.

use std::{sync::Arc, time::Instant};

use axum::http::{HeaderMap, Method, Version, header, request::Parts};
use bytes::Bytes;
use serde_json::Value;

use crate::server::Connection;

/// What a request is to Kubernetes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Of one object, or of no resource at all, such as `/version`.
    Get,
    /// Of a collection.
    List,
    /// `?watch=true`.
    Watch,
    /// POST.
    Create,
    /// PUT.
    Update,
    /// PATCH.
    Patch,
    /// DELETE, of one or many.
    Delete,
}

/// A request.
#[derive(Clone, Debug)]
pub struct Seen {
    /// When it had arrived whole.
    pub at: Instant,
    /// Which connection it came by, counted from 0.
    pub connection: usize,
    /// The version of HTTP that is spoken on it.
    pub version: Version,
    /// HTTP method.
    pub method: Method,
    /// What it is to Kubernetes.
    pub verb: Verb,
    /// Path without the query.
    pub path: String,
    /// Query, empty if there is none.
    pub query: String,
    /// Headers.
    pub headers: HeaderMap,
    /// Body.
    pub body: Bytes,
}

impl Seen {
    pub(crate) fn new(parts: Parts, body: Bytes) -> Self {
        let (path, query) = (parts.uri.path().to_owned(), parts.uri.query().unwrap_or_default().to_owned());
        Self {
            at: Instant::now(),
            connection: parts.extensions.get::<Connection>().map_or(0, |connection| connection.0),
            version: parts.version,
            verb: verb(&parts.method, &path, &query),
            method: parts.method,
            path,
            query,
            headers: parts.headers,
            body,
        }
    }

    pub(super) fn path_and_query(&self) -> String {
        if self.query.is_empty() { self.path.clone() } else { format!("{}?{}", self.path, self.query) }
    }

    /// The bearer token.
    pub fn bearer(&self) -> Option<&str> {
        self.headers.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ")
    }

    /// The body as JSON; null if it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// Whether it asks the API server to change something. Reviews, which are POSTs, do not.
    pub fn writes(&self) -> bool {
        match self.verb {
            Verb::Get | Verb::List | Verb::Watch => false,
            Verb::Create => !self.path.ends_with("reviews"),
            Verb::Update | Verb::Patch | Verb::Delete => true,
        }
    }
}

impl std::fmt::Display for Seen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} {}", self.verb, self.path_and_query())
    }
}

/// A request and what became of it.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The request.
    pub seen: Arc<Seen>,
    /// What became of it.
    pub outcome: Outcome,
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing yet: on its way, held, or its client is gone.
    Pending,
    /// The client was given this status.
    Answered(u16),
    /// The API server answered with this status, which is held.
    Held(u16),
    /// The API server answered with this status, which the client was not given.
    Dropped(u16),
    /// The connection was closed; the API server was not asked.
    Closed,
    /// Never answered; the API server was not asked.
    Unanswered,
}

impl std::fmt::Display for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} -> {:?}", self.seen, self.outcome)
    }
}

fn verb(method: &Method, path: &str, query: &str) -> Verb {
    match *method {
        Method::POST => Verb::Create,
        Method::PUT => Verb::Update,
        Method::PATCH => Verb::Patch,
        Method::DELETE => Verb::Delete,
        _ if query.split('&').any(|pair| matches!(pair, "watch=true" | "watch=1")) => Verb::Watch,
        _ if is_collection(path) => Verb::List,
        _ => Verb::Get,
    }
}

/// `/api/v1[/namespaces/NS]/PLURAL` and `/apis/GROUP/VERSION[/namespaces/NS]/PLURAL`.
fn is_collection(path: &str) -> bool {
    let segments: Vec<&str> = path.split('/').filter(|segment| !segment.is_empty()).collect();
    let rest = match segments.as_slice() {
        ["api", _, rest @ ..] | ["apis", _, _, rest @ ..] => rest,
        _ => return false,
    };
    matches!(rest, [_]) || matches!(rest, ["namespaces", _, plural] if *plural != "status")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verbs_are_those_of_kubernetes() {
        for (path, query, expected) in [
            ("/api/v1/configmaps", "", Verb::List),
            ("/api/v1/configmaps", "watch=true&x=y", Verb::Watch),
            ("/api/v1/namespaces", "", Verb::List),
            ("/api/v1/namespaces/a", "", Verb::Get),
            ("/api/v1/namespaces/a/status", "", Verb::Get),
            ("/api/v1/namespaces/a/configmaps", "limit=5", Verb::List),
            ("/api/v1/namespaces/a/configmaps/b", "", Verb::Get),
            ("/apis/notify.acme.io/v1/emailrequests", "", Verb::List),
            ("/apis/notify.acme.io/v1/namespaces/a/emailrequests", "", Verb::List),
            ("/apis/notify.acme.io/v1/namespaces/a/emailrequests/b", "", Verb::Get),
            ("/apis/notify.acme.io/v1", "", Verb::Get),
            ("/version", "", Verb::Get),
        ] {
            assert_eq!(verb(&Method::GET, path, query), expected, "{path}?{query}");
        }
    }
}
