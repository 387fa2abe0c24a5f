//! Writes to the API server: status patches and label patches, fenced, with a deadline, and only of what differs.
//!
//! # Guarantees
//! - A status patch carries the resourceVersion that it was computed from (a uid in a patch of `/status` is ignored by the API
//!   server), so it can never reach a later object of the same name.
//! - On a conflict the object is read. If uid, generation and status are as they were, the same patch is sent again; else the
//!   caller hears [`WriteError::Changed`].
//! - Nothing is retried here that took time: 429 and 5xx come back as [`WriteError::Later`] and an unknown end as
//!   [`WriteError::Lost`], so that no slot is held while waiting.

use std::time::Duration;

use http::{Method, StatusCode, header};
use http_body_util::BodyExt;
use kube::{Client, client::Body};
use serde_json::{Map, Value, json};

use crate::{
    fence::{Fence, Stopped},
    object::{Kind, Object, at},
    text::{chain, cut},
};

/// <https://www.rfc-editor.org/rfc/rfc7396>
pub(crate) const MERGE_PATCH: &str = "application/merge-patch+json";
/// Conflicts in a row after which a write waits for calmer times.
pub(crate) const CONFLICTS: usize = 10;
/// The longest text of a message field, in bytes; longer ones are cut and marked.
pub const MESSAGE_MAX: usize = 1024;

/// Why a write did not happen, or is not known to have.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The object is another now; this is its present state.
    #[error("the object has changed")]
    Changed(Box<Object>),
    /// There is no such object any more.
    #[error("the object is gone")]
    Gone,
    /// The CRD has no status subresource.
    #[error("the CRD of {0} lacks `subresources.status`, so no status can be written: add it to the CRD")]
    NoSubresource(String),
    /// The API server will never accept it.
    #[error("the API server refused it: {0}")]
    Refused(String),
    /// The API server cannot take it now. Its own matter: never counted against the object.
    #[error("the API server asks to wait {after:?}: {cause}")]
    Later {
        /// How long to wait, as the server asked or one second.
        after: Duration,
        /// Its words.
        cause: String,
    },
    /// No answer, or one that says nothing of it: it may have happened.
    #[error("the answer was lost: {cause}")]
    Lost {
        /// How long to wait, as the server asked or one second.
        after: Duration,
        /// What came instead.
        cause: String,
    },
    /// The lease is in doubt.
    #[error("stopped because the lease is in doubt")]
    Fenced,
}

/// Sends writes for one host.
#[derive(Clone)]
pub struct Writer {
    client: Client,
    deadline: Duration,
}

/// What a write made of the object.
#[derive(Debug)]
pub struct Written {
    /// As the API server has it now.
    pub object: Object,
    /// Whether somebody else's change, which the run has not seen, is in it.
    pub merged: bool,
}

/// What is to be set in the metadata of an object; `None` removes.
#[derive(Clone, Copy, Debug)]
pub struct Metadata<'a> {
    /// By key.
    pub labels: &'a [(String, Option<String>)],
    /// By key.
    pub annotations: &'a [(String, Option<String>)],
}

impl Metadata<'_> {
    fn fields(self) -> Map<String, Value> {
        let named = [("labels", self.labels), ("annotations", self.annotations)].into_iter().filter(|(_, entries)| !entries.is_empty());
        let fields = |entries: &[(String, Option<String>)]| entries.iter().map(|(key, value)| (key.clone(), json!(value))).collect();
        named.map(|(name, entries)| (name.to_owned(), Value::Object(fields(entries)))).collect()
    }
}

enum Answer {
    Object(Box<Object>),
    Conflict,
    NotFound,
}

impl Writer {
    /// A writer whose requests end after `deadline` each.
    pub fn new(client: Client, deadline: Duration) -> Self {
        Self { client, deadline }
    }

    /// Applies `patch`, a merge patch of the status computed from `given`, and returns the object as the server has it then.
    pub async fn patch_status(&self, kind: &Kind, given: &Object, patch: &Value, fence: &Fence) -> Result<Written, WriteError> {
        let path = format!("{}/status", kind.object_path(&given.key));
        let (mut version, mut merged) = (given.resource_version.to_string(), false);
        for _ in 0..CONFLICTS {
            let body = json!({ "metadata": { "resourceVersion": version }, "status": patch });
            match self.send(Method::PATCH, &path, Some(&body), fence).await? {
                Answer::Object(object) => return Ok(Written { object: *object, merged }),
                Answer::Conflict => {
                    version = self.unchanged(kind, given, fence).await?;
                    merged = true;
                }
                Answer::NotFound => {
                    return Err(match self.read(kind, given, fence).await {
                        Ok(Some(current)) if current.uid == given.uid => WriteError::NoSubresource(kind.resource()),
                        Ok(Some(current)) => WriteError::Changed(Box::new(current)),
                        Ok(None) => WriteError::Gone,
                        Err(error) => error,
                    });
                }
            }
        }
        Err(WriteError::Later { after: Duration::from_secs(1), cause: format!("{CONFLICTS} conflicts in a row") })
    }

    /// Sets labels and annotations of the object that `given` is a state of. The patch carries the resourceVersion too: they say
    /// something about the state that was seen.
    pub async fn patch_metadata(&self, kind: &Kind, given: &Object, patch: Metadata<'_>, fence: &Fence) -> Result<Written, WriteError> {
        let patch = patch.fields();
        let path = kind.object_path(&given.key);
        let (mut version, mut merged) = (given.resource_version.to_string(), false);
        for _ in 0..CONFLICTS {
            let mut metadata = patch.clone();
            metadata.insert("resourceVersion".into(), version.into());
            let body = json!({ "metadata": metadata });
            match self.send(Method::PATCH, &path, Some(&body), fence).await? {
                Answer::Object(object) => return Ok(Written { object: *object, merged }),
                Answer::Conflict => {
                    version = self.unchanged(kind, given, fence).await?;
                    merged = true;
                }
                Answer::NotFound => return Err(WriteError::Gone),
            }
        }
        Err(WriteError::Later { after: Duration::from_secs(1), cause: format!("{CONFLICTS} conflicts in a row") })
    }

    /// The object as the API server has it now.
    pub async fn read(&self, kind: &Kind, object: &Object, fence: &Fence) -> Result<Option<Object>, WriteError> {
        match self.send(Method::GET, &kind.object_path(&object.key), None, fence).await? {
            Answer::Object(object) => Ok(Some(*object)),
            Answer::NotFound => Ok(None),
            Answer::Conflict => Err(WriteError::Refused("a read was answered with a conflict".into())),
        }
    }

    /// The present version of the object, if uid, generation and status are as they were in `given`.
    async fn unchanged(&self, kind: &Kind, given: &Object, fence: &Fence) -> Result<String, WriteError> {
        match self.read(kind, given, fence).await? {
            None => Err(WriteError::Gone),
            Some(current) if same_work(given, &current) => Ok(current.resource_version.into()),
            Some(current) => Err(WriteError::Changed(Box::new(current))),
        }
    }

    async fn send(&self, method: Method, path: &str, body: Option<&Value>, fence: &Fence) -> Result<Answer, WriteError> {
        let read_only = body.is_none();
        let reply = self.exchange(method, path, body.map(|body| (MERGE_PATCH, body)), fence).await?;
        match reply.status {
            status if status.is_success() => Ok(Answer::Object(Box::new(reply.object(read_only)?))),
            StatusCode::CONFLICT => Ok(Answer::Conflict),
            StatusCode::NOT_FOUND => Ok(Answer::NotFound),
            _ => Err(reply.error(read_only)),
        }
    }

    /// One request under the fence, whatever is answered. `body` comes with its content type; without one nothing is changed.
    pub(crate) async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Option<(&'static str, &Value)>,
        fence: &Fence,
    ) -> Result<Reply, WriteError> {
        let read_only = body.is_none();
        let mut request = http::Request::builder().method(method).uri(path).header(header::ACCEPT, "application/json");
        if let Some((content_type, _)) = body {
            request = request.header(header::CONTENT_TYPE, content_type);
        }
        let bytes = body.map_or_else(Vec::new, |(_, body)| serde_json::to_vec(body).expect("a value serializes"));
        let request = request.body(Body::from(bytes)).map_err(|error| WriteError::Refused(error.to_string()))?;
        let exchange = async {
            let response = self.client.send(request).await.map_err(|error| chain(&error))?;
            let (head, body) = response.into_parts();
            let body = body.collect().await.map_err(|error| chain(&error))?.to_bytes();
            Ok::<_, String>((head, body))
        };
        match fence.guard(self.deadline, exchange).await {
            Err(Stopped::Fenced) => Err(WriteError::Fenced),
            Err(timed_out @ Stopped::TimedOut(_)) => Err(unanswered(read_only, timed_out.to_string())),
            Ok(Err(cause)) => Err(unanswered(read_only, cause)),
            Ok(Ok((head, body))) => {
                let asked = head.headers.get(header::RETRY_AFTER).and_then(|after| after.to_str().ok()?.trim().parse().ok());
                let retry_after = Duration::from_secs(asked.unwrap_or(1).clamp(1, 120));
                Ok(Reply { status: head.status, retry_after, text: String::from_utf8_lossy(&body).into_owned() })
            }
        }
    }
}

/// What the API server answered.
pub(crate) struct Reply {
    pub status: StatusCode,
    /// How long it asks to wait, or one second.
    pub retry_after: Duration,
    pub text: String,
}

impl Reply {
    /// The object that it holds.
    pub(crate) fn object(&self, read_only: bool) -> Result<Object, WriteError> {
        Object::parse(&self.text).map_err(|error| unanswered(read_only, error.to_string()))
    }

    /// What it says, where it says that something went wrong.
    pub(crate) fn sentence(&self) -> String {
        sentence(&self.text)
    }

    /// What a failure means for a write.
    pub(crate) fn error(&self, read_only: bool) -> WriteError {
        let Self { status, retry_after: after, .. } = *self;
        let cause = format!("{status}: {}", self.sentence());
        match status {
            // It will never fit, however often it is sent.
            StatusCode::INTERNAL_SERVER_ERROR if is_too_large(&cause) => WriteError::Refused(cause),
            // A 5xx can come after the commit; what is there is read before the next attempt.
            status if status.is_server_error() && !read_only => WriteError::Lost { after, cause },
            status if waits(status) => WriteError::Later { after, cause },
            _ => WriteError::Refused(cause),
        }
    }
}

fn unanswered(read_only: bool, cause: String) -> WriteError {
    let after = Duration::from_secs(1);
    if read_only { WriteError::Later { after, cause } } else { WriteError::Lost { after, cause } }
}

/// Answers that are the API server's own affair. 401 and 403 heal when a token is rotated or a role is granted.
fn waits(status: StatusCode) -> bool {
    matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS)
        || status.is_server_error()
}

/// What the API server says where etcd, or the way to it, has no room for an object. (Its own limit is answered with a 413.)
fn is_too_large(cause: &str) -> bool {
    cause.contains("etcdserver: request is too large") || cause.contains("trying to send message larger than max")
}

/// The message of a `Status` object, or the start of whatever was sent instead.
fn sentence(text: &str) -> String {
    let message = serde_json::from_str::<Value>(text).ok().and_then(|status| Some(status.get("message")?.as_str()?.to_owned()));
    let line = message.unwrap_or_else(|| text.split_whitespace().collect::<Vec<_>>().join(" "));
    cut(&line, MESSAGE_MAX)
}

/// Whether an outcome computed from `given` is still true of `current`.
pub fn same_work(given: &Object, current: &Object) -> bool {
    given.uid == current.uid
        && given.generation == current.generation
        && given.deleting == current.deleting
        && same(status_of(&given.value()), status_of(&current.value()))
}

fn status_of(object: &Value) -> &Value {
    at(object, "status").unwrap_or(&Value::Null)
}

/// Whether two values are the same to the API server, which does not tell 1 from 1.0.
pub fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a == b || ((a.is_f64() || b.is_f64()) && a.as_f64() == b.as_f64()),
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Value::Object(a), Value::Object(b)) => a.len() == b.len() && a.iter().all(|(key, a)| b.get(key).is_some_and(|b| same(a, b))),
        (a, b) => a == b,
    }
}

/// The merge patch that turns `from` into `to`; none where they are the same.
pub fn difference(from: &Value, to: &Value) -> Option<Value> {
    let empty = Map::new();
    let (from, to) = match (from, to) {
        (Value::Object(from), Value::Object(to)) => (from, to),
        (Value::Null, Value::Object(to)) => (&empty, to),
        (from, to) => return (!same(from, to)).then(|| to.clone()),
    };
    let mut patch = Map::new();
    for key in from.keys().filter(|key| !to.contains_key(*key)) {
        patch.insert(key.clone(), Value::Null);
    }
    for (key, to) in to {
        match from.get(key) {
            Some(Value::Object(_)) if to.is_object() => {
                if let Some(nested) = difference(&from[key], to) {
                    patch.insert(key.clone(), nested);
                }
            }
            Some(from) if same(from, to) => {}
            None if to.is_null() => {}
            _ => {
                patch.insert(key.clone(), to.clone());
            }
        }
    }
    (!patch.is_empty()).then_some(Value::Object(patch))
}

/// Whether `status` already says everything that the merge patch would make it say.
pub fn holds(status: &Value, patch: &Value) -> bool {
    match patch {
        Value::Null => status.is_null(),
        Value::Object(fields) => fields.iter().all(|(key, patch)| holds(status.get(key).unwrap_or(&Value::Null), patch)),
        patch => same(status, patch),
    }
}

/// Dotted paths of what a patch set and the server did not keep, as its schema does not know it.
pub fn pruned(patch: &Value, status: &Value) -> Vec<String> {
    let Value::Object(fields) = patch else { return Vec::new() };
    let mut lost = Vec::new();
    for (key, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
        match status.get(key) {
            None => lost.push(key.clone()),
            Some(kept) => lost.extend(pruned(value, kept).into_iter().map(|below| format!("{key}.{below}"))),
        }
    }
    lost
}

/// The patch without the given paths; none where nothing is left of it.
pub fn prune(patch: &Value, paths: &[&str]) -> Option<Value> {
    let Value::Object(fields) = patch else { return Some(patch.clone()) };
    let mut left = Map::new();
    for (key, value) in fields.iter().filter(|(key, _)| !paths.contains(&key.as_str())) {
        let below: Vec<&str> = paths.iter().filter_map(|path| path.strip_prefix(key.as_str())?.strip_prefix('.')).collect();
        if let Some(value) = if below.is_empty() { Some(value.clone()) } else { prune(value, &below) } {
            left.insert(key.clone(), value);
        }
    }
    (!left.is_empty()).then_some(Value::Object(left))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn apply(target: &mut Value, patch: &Value) {
        let Value::Object(patch) = patch else {
            *target = patch.clone();
            return;
        };
        if !target.is_object() {
            *target = json!({});
        }
        let fields = target.as_object_mut().expect("just made one");
        for (key, value) in patch {
            if value.is_null() {
                fields.remove(key);
            } else {
                apply(fields.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
    }

    fn status() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![any::<bool>().prop_map(Value::from), any::<i64>().prop_map(Value::from), "[a-c]{0,3}".prop_map(Value::from)];
        let nested = leaf.prop_recursive(3, 24, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
                prop::collection::btree_map("[a-d]", inner, 0..4).prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        });
        prop::collection::btree_map("[a-d]", nested, 0..4).prop_map(|map| Value::Object(map.into_iter().collect()))
    }

    proptest! {
        #[test]
        fn the_difference_turns_the_one_into_the_other(from in status(), to in status()) {
            let mut result = from.clone();
            match difference(&from, &to) {
                Some(patch) => apply(&mut result, &patch),
                None => prop_assert!(same(&from, &to)),
            }
            prop_assert_eq!(result, to);
        }
    }

    #[test]
    fn what_is_gone_is_removed_and_what_is_the_same_is_not_sent() {
        let patch = difference(&json!({"a": 1, "b": {"c": 1, "d": 2}, "e": 1.0}), &json!({"b": {"c": 1, "d": 3}, "e": 1, "f": null}));
        assert_eq!(patch, Some(json!({"a": null, "b": {"d": 3}})));
        assert_eq!(difference(&json!({"a": 1}), &json!({"a": 1.0})), None);
        assert_eq!(difference(&Value::Null, &json!({"a": 1})), Some(json!({"a": 1})));
    }

    #[test]
    fn what_the_schema_pruned_is_found_and_left_out_from_then_on() {
        let patch = json!({"phase": "Done", "x": 1, "at": {"a": 1, "b": null, "c": 2}});
        let lost = pruned(&patch, &json!({"phase": "Done", "at": {"a": 1}}));
        assert_eq!(lost, ["at.c", "x"]);
        assert_eq!(prune(&patch, &["at.c", "x"]), Some(json!({"phase": "Done", "at": {"a": 1, "b": null}})));
        assert_eq!(prune(&json!({"x": 1}), &["x"]), None);
    }

    #[test]
    fn a_write_whose_answer_was_lost_is_recognised() {
        let patch = json!({"retries": 2, "message": "down", "url": null});
        assert!(holds(&json!({"retries": 2, "message": "down", "phase": "Pending"}), &patch));
        assert!(!holds(&json!({"retries": 1, "message": "down"}), &patch));
        assert!(!holds(&json!({"retries": 2, "message": "down", "url": "u"}), &patch));
    }

    #[test]
    fn what_is_too_large_for_etcd_is_refused_and_no_other_error_of_the_server_is() {
        let error = |status, message: &str| {
            let text = json!({"kind": "Status", "message": message}).to_string();
            Reply { status, retry_after: Duration::from_secs(1), text }.error(false)
        };
        for message in ["etcdserver: request is too large", "rpc error: trying to send message larger than max (2098000 vs. 2097152)"] {
            assert!(matches!(error(StatusCode::INTERNAL_SERVER_ERROR, message), WriteError::Refused(_)), "{message}");
        }
        assert!(matches!(error(StatusCode::PAYLOAD_TOO_LARGE, "limit is 3145728"), WriteError::Refused(_)));
        assert!(matches!(error(StatusCode::INTERNAL_SERVER_ERROR, "etcdserver: leader changed"), WriteError::Lost { .. }));
    }

    #[test]
    fn what_is_the_api_servers_own_affair_is_waited_for_and_all_else_is_refused() {
        let error = |code: u16, read_only| {
            let status = StatusCode::from_u16(code).expect("a status");
            Reply { status, retry_after: Duration::from_secs(7), text: String::new() }.error(read_only)
        };
        let asked = Duration::from_secs(7);
        for code in [401, 403, 408, 429] {
            for read_only in [true, false] {
                assert!(matches!(error(code, read_only), WriteError::Later { after, .. } if after == asked), "{code}");
            }
        }
        for code in [500, 502, 503, 504] {
            assert!(matches!(error(code, true), WriteError::Later { after, .. } if after == asked), "{code}");
            assert!(matches!(error(code, false), WriteError::Lost { after, .. } if after == asked), "{code}: it may have been written");
        }
        for code in [400, 405, 406, 410, 413, 415, 422] {
            for read_only in [true, false] {
                assert!(matches!(error(code, read_only), WriteError::Refused(_)), "{code}");
            }
        }
    }

    #[test]
    fn a_refusal_is_told_in_the_servers_words() {
        assert_eq!(sentence(r#"{"kind":"Status","message":"too long"}"#), "too long");
        assert_eq!(sentence("<html>\n  bad  gateway</html>"), "<html> bad gateway</html>");
    }
}
