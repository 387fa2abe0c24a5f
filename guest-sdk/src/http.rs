//! A small blocking HTTP client. Requests leave through the host, and only to where the plugin's ConfigMap allows.
//!
//! ```
//! # use berth_sdk::{Context, Error, http};
//! # fn send(ctx: &Context) -> Result<(), Error> {
//! let answer = http::post(ctx, format!("{}/send", ctx.setting("gateway")?))
//!     .idempotency_key()
//!     .json(&["hello"])
//!     .handle([409])
//!     .send()?;
//! if answer.status() == 409 {
//!     return Err(answer.error().into_retry());
//! }
//! # Ok(())
//! # }
//! ```
//!
//! What `?` makes of an answer:
//!
//! | answer | becomes |
//! |---|---|
//! | 2xx, and statuses given to [`handle`](Request::handle) | a [`Response`] |
//! | 408, 425, 429, 5xx, no connection, an answer that broke off | a failure to retry, not before `Retry-After` where it is given |
//! | not allowed by the plugin's ConfigMap, a URL that is none | a failure to retry: an edit of the ConfigMap heals it |
//! | anything else, redirects too | a failure that cannot heal: give up |

use std::{fmt, time::Duration};

use serde::{Serialize, de::DeserializeOwned};

use crate::{
    action::to_json,
    context::Context,
    error::{self, OrFail},
    json,
    time::Timestamp,
};

/// A GET.
pub fn get(ctx: &Context, url: impl Into<String>) -> Request<'_> {
    Request::new(ctx, "GET", url)
}

/// A POST.
pub fn post(ctx: &Context, url: impl Into<String>) -> Request<'_> {
    Request::new(ctx, "POST", url)
}

/// A PUT.
pub fn put(ctx: &Context, url: impl Into<String>) -> Request<'_> {
    Request::new(ctx, "PUT", url)
}

/// A DELETE.
pub fn delete(ctx: &Context, url: impl Into<String>) -> Request<'_> {
    Request::new(ctx, "DELETE", url)
}

/// A text as one segment of a URL's path: everything but letters, digits and `-._~` is escaped.
///
/// ```
/// assert_eq!(berth_sdk::http::segment("reportjobs.batch.acme.io/a b"), "reportjobs.batch.acme.io%2Fa%20b");
/// ```
pub fn segment(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => escaped.push(byte.into()),
            _ => escape(&mut escaped, byte),
        }
    }
    escaped
}

fn escape(text: &mut String, byte: u8) {
    text.push('%');
    for half in [byte >> 4, byte & 15] {
        text.push(char::from_digit(half.into(), 16).expect("four bits are one digit").to_ascii_uppercase());
    }
}

/// A request as it leaves the handler: what a test sees of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outgoing {
    /// Such as `POST`.
    pub method: String,
    /// The whole URL.
    pub url: String,
    /// In the order in which they were set.
    pub headers: Vec<(String, String)>,
    /// Empty where there is none.
    pub body: Vec<u8>,
    /// How long to wait for a connection, and for the first byte; the host's limits hold as well.
    pub timeout: Option<Duration>,
}

impl Outgoing {
    /// The first header of this name, whatever its case.
    pub fn header(&self, name: &str) -> Option<&str> {
        find(&self.headers, name)
    }
}

/// A request to be sent.
#[must_use = "a request is sent by `send`"]
pub struct Request<'c> {
    ctx: &'c Context,
    outgoing: Outgoing,
    handled: Vec<u16>,
    unwritten: Option<String>,
}

impl<'c> Request<'c> {
    /// A request with any method.
    pub fn new(ctx: &'c Context, method: &str, url: impl Into<String>) -> Self {
        let outgoing = Outgoing { method: method.to_owned(), url: url.into(), headers: Vec::new(), body: Vec::new(), timeout: None };
        Self { ctx, outgoing, handled: Vec::new(), unwritten: None }
    }

    /// Adds a header.
    pub fn header(mut self, name: &str, value: impl Into<String>) -> Self {
        self.outgoing.headers.push((name.to_owned(), value.into()));
        self
    }

    /// Has the other side do this once, however often the run is repeated: an `Idempotency-Key` (draft-ietf-httpapi-idempotency-key-header)
    /// that is the object's own.
    ///
    /// A second such request of one run gets a key of its own by its number, so send them in the same order in every run, or name
    /// them with [`idempotency_step`](Self::idempotency_step).
    pub fn idempotency_key(self) -> Self {
        let key = self.ctx.next_key();
        self.keyed(&key)
    }

    /// The same for one of several steps, by name.
    pub fn idempotency_step(self, step: &str) -> Self {
        let key = format!("{}/{step}", self.ctx.idempotency_key());
        self.keyed(&key)
    }

    fn keyed(self, key: &str) -> Self {
        self.header("Idempotency-Key", structured_string(key))
    }

    /// A body of JSON.
    pub fn json(mut self, body: &impl Serialize) -> Self {
        match to_json(body) {
            Ok(text) => self.body("application/json", text),
            Err(error) => {
                self.unwritten = Some(error);
                self
            }
        }
    }

    /// A body of any type.
    pub fn body(mut self, content_type: &str, body: impl Into<Vec<u8>>) -> Self {
        self.outgoing.body = body.into();
        self.header("Content-Type", content_type)
    }

    /// Statuses that the caller deals with: they come back as responses.
    pub fn handle(mut self, statuses: impl IntoIterator<Item = u16>) -> Self {
        self.handled.extend(statuses);
        self
    }

    /// How long to wait for a connection, and for the first byte. The host's limits hold as well.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.outgoing.timeout = Some(timeout);
        self
    }

    /// Sends it, and waits for the whole answer.
    pub fn send(self) -> Result<Response, Error> {
        let Self { ctx, outgoing, handled, unwritten } = self;
        let what = format!("{} {}", outgoing.method, public(&outgoing.url));
        if let Some(error) = unwritten {
            return Err(Error { what, fault: Fault::Invalid(format!("the body cannot be written as JSON: {error}")) });
        }
        let mut response = match ctx.world.send(outgoing) {
            Ok(response) => response,
            Err(fault) => return Err(Error { what, fault }),
        };
        response.what = what;
        response.arrived = Some(ctx.now());
        let good = (200..300).contains(&response.status) || handled.contains(&response.status);
        if good { Ok(response) } else { Err(response.error()) }
    }
}

/// A string of RFC 9651, quoted; what it cannot hold is escaped as in a URL.
fn structured_string(text: &str) -> String {
    let mut quoted = String::from('"');
    for byte in text.bytes() {
        match byte {
            b'"' | b'\\' => quoted.extend(['\\', byte.into()]),
            b' '..=b'~' => quoted.push(byte.into()),
            _ => escape(&mut quoted, byte),
        }
    }
    quoted.push('"');
    quoted
}

/// A URL without its query, where secrets live.
fn public(url: &str) -> &str {
    url.split(['?', '#']).next().unwrap_or_default()
}

fn find<'h>(headers: &'h [(String, String)], name: &str) -> Option<&'h str> {
    headers.iter().find(|(there, _)| there.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Response {
    what: String,
    arrived: Option<Timestamp>,
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Response {
    pub(crate) fn from_parts(status: u16, headers: Vec<(String, String)>, body: Vec<u8>) -> Self {
        Self { what: String::new(), arrived: None, status, headers, body }
    }

    #[cfg(not(target_family = "wasm"))]
    pub(crate) fn into_parts(self) -> (u16, Vec<(String, String)>, Vec<u8>) {
        (self.status, self.headers, self.body)
    }

    /// The status, such as 200.
    pub fn status(&self) -> u16 {
        self.status
    }

    /// The first header of this name, whatever its case.
    pub fn header(&self, name: &str) -> Option<&str> {
        find(&self.headers, name)
    }

    /// The body.
    pub fn body(&self) -> &[u8] {
        &self.body
    }

    /// The body as a type. What does not read is a failure to retry: the other side may mend its answer.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, error::Error> {
        let text = std::str::from_utf8(&self.body).or_retry(format_args!("{}: the answer", self.what))?;
        json::from_json(text).or_retry(format_args!("{}: the answer", self.what))
    }

    /// How long the other side wants us to wait.
    pub fn retry_after(&self) -> Option<Duration> {
        let value = self.header("Retry-After")?.trim();
        match value.parse() {
            Ok(seconds) => Some(Duration::from_secs(seconds)),
            Err(_) => Some(Timestamp::parse_http(value)?.since(self.arrived?)),
        }
    }

    /// The error that this answer is where it is not [handled](Request::handle).
    pub fn error(&self) -> Error {
        let fault = Fault::Status { status: self.status, retry_after: self.retry_after(), excerpt: excerpt(&self.body) };
        Error { what: self.what.clone(), fault }
    }
}

/// The first line of a body, for people.
fn excerpt(body: &[u8]) -> String {
    const LONGEST: usize = 200;
    let text = String::from_utf8_lossy(&body[..body.len().min(4 * LONGEST)]);
    let line = text.trim().lines().next().unwrap_or_default();
    line.chars().filter(|char| !char.is_control()).take(LONGEST).collect()
}

/// Why a request came to nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    what: String,
    fault: Fault,
}

/// What went wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The other side answered with a status that is no success.
    Status {
        /// The status.
        status: u16,
        /// How long it wants us to wait.
        retry_after: Option<Duration>,
        /// The first line of the body.
        excerpt: String,
    },
    /// There was no answer, or it broke off.
    Io(String),
    /// The host does not let the plugin send there.
    Denied,
    /// There was nothing to send: the URL is none, say.
    Invalid(String),
}

impl Error {
    /// What went wrong.
    pub fn fault(&self) -> &Fault {
        &self.fault
    }

    /// A failure to retry whatever the status, not before `Retry-After` where it is given.
    pub fn into_retry(self) -> error::Error {
        match self.fault {
            Fault::Status { retry_after: Some(delay), .. } => error::Error::retry_after(delay, self),
            _ => error::Error::retry(self),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        match &self.fault {
            Fault::Status { status, excerpt, .. } => {
                write!(f, " was answered with {status}")?;
                if (300..400).contains(status) {
                    f.write_str(", and redirects are not followed")?;
                }
                if excerpt.is_empty() { Ok(()) } else { write!(f, ": {excerpt}") }
            }
            Fault::Io(cause) => write!(f, ": {cause}"),
            Fault::Denied => f.write_str(" is not allowed: name scheme, host and port in `allowedHosts` of the plugin's plugin.yaml, and in the `hosts` of its claim"),
            Fault::Invalid(cause) => write!(f, ": {cause}"),
        }
    }
}

impl std::error::Error for Error {}

impl From<Error> for error::Error {
    fn from(error: Error) -> Self {
        match error.fault {
            Fault::Status { status, .. } if !matches!(status, 408 | 425 | 429 | 500..=599) => Self::give_up(error),
            _ => error.into_retry(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{error::Verdict, testing::Script};

    fn answered(response: Response) -> Context {
        Script::new().at("2026-11-29T12:00:00Z").respond(move |_| Ok(response.clone())).context()
    }

    fn verdict(response: Response) -> Verdict {
        error::Error::from(get(&answered(response), "http://a/").send().expect_err("no success")).verdict()
    }

    #[test]
    fn statuses_become_what_they_mean() {
        for status in [408, 425, 429, 500, 502, 599] {
            assert_eq!(verdict(Response::new(status)), Verdict::Retry, "{status}");
        }
        for status in [100, 301, 307, 400, 401, 404, 409, 422, 451] {
            assert_eq!(verdict(Response::new(status)), Verdict::GiveUp, "{status}");
        }
    }

    #[test]
    fn retry_after_is_seconds_or_a_date_and_else_ignored() {
        let after = |value: &str| verdict(Response::new(503).with_header("retry-after", value));
        assert_eq!(after(" 120 "), Verdict::RetryAfter(Duration::from_secs(120)));
        assert_eq!(after("Sun, 29 Nov 2026 12:00:05 GMT"), Verdict::RetryAfter(Duration::from_secs(5)));
        assert_eq!(after("Sun, 29 Nov 2020 12:00:05 GMT"), Verdict::RetryAfter(Duration::ZERO));
        for nonsense in ["", "soon", "-1", "1.5"] {
            assert_eq!(after(nonsense), Verdict::Retry, "{nonsense}");
        }
    }

    #[test]
    fn each_keyed_request_of_a_run_has_a_key_of_its_own() {
        let ctx = Script::new().idempotency_key("ks.g/ns/n/u").respond(|_| Ok(Response::new(200))).context();
        for request in [
            post(&ctx, "http://a").idempotency_key(),
            post(&ctx, "http://a").idempotency_key(),
            post(&ctx, "http://a").idempotency_step("bill"),
        ] {
            request.send().expect("answered with 200");
        }
        let keys: Vec<_> = ctx.sent().iter().map(|sent| sent.header("Idempotency-Key").map(str::to_owned)).collect();
        assert_eq!(keys, [r#""ks.g/ns/n/u""#, r#""ks.g/ns/n/u/2""#, r#""ks.g/ns/n/u/bill""#].map(|key| Some(key.to_owned())));
    }

    #[test]
    fn a_key_is_a_quoted_string_whatever_is_in_it() {
        assert_eq!(structured_string(r#"a"\é"#), r#""a\"\\%C3%A9""#);
    }

    #[test]
    fn an_error_shows_neither_the_query_nor_control_characters() {
        let ctx = answered(Response::new(400).with_body("\n bad \u{1b}[31mred\nsecond"));
        let error = get(&ctx, "http://a/b?token=secret").send().expect_err("no success");
        assert_eq!(error.to_string(), "GET http://a/b was answered with 400: bad [31mred");
    }

    #[test]
    fn a_long_answer_is_cut_for_people() {
        let ctx = answered(Response::new(400).with_body("é".repeat(5000)));
        let error = get(&ctx, "http://a").send().expect_err("no success");
        assert_eq!(error.to_string().chars().filter(|&char| char == 'é').count(), 200);
    }

    #[test]
    fn handled_statuses_come_back_as_responses() {
        let response = get(&answered(Response::new(404)), "http://a").handle([404]).send().expect("handled");
        assert_eq!(response.status(), 404);
    }

    #[test]
    fn a_body_that_is_no_json_is_not_sent() {
        let ctx = answered(Response::new(200));
        let error = post(&ctx, "http://a").json(&std::collections::BTreeMap::from([((1, 2), 3)])).send().expect_err("no JSON");
        assert!(error.to_string().contains("the body cannot be written as JSON"), "{error}");
        assert!(ctx.sent().is_empty());
    }
}
