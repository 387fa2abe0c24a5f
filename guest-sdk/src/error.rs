//! Why a run failed, and whether that may heal.

use std::{fmt, time::Duration};

use crate::{
    action::{Event, Writes, to_json},
    resource::Status,
};

/// A failure of a run, with its cause in a sentence: it is what people read in the object's status.
///
/// ```
/// use std::time::Duration;
/// use berth_sdk::Error;
///
/// Error::retry("the exporter is busy");                             // again, with exponential backoff
/// Error::retry_after(Duration::from_secs(30), "over the quota");    // again, when the other side says
/// Error::give_up("there is no report of this name");                // cannot heal until the spec is edited
/// ```
#[derive(Clone, Debug)]
#[must_use = "an error does nothing until it is returned"]
pub struct Error {
    pub(crate) verdict: Verdict,
    pub(crate) cause: String,
    // Boxed, so that a `Result` stays small.
    pub(crate) writes: Box<Writes>,
}

/// Whether a failure may heal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It may: run again with exponential backoff.
    Retry,
    /// It may, and the other side said when.
    RetryAfter(Duration),
    /// It cannot for this version of the spec.
    GiveUp,
}

impl Error {
    /// A failure that may heal.
    pub fn retry(cause: impl fmt::Display) -> Self {
        Self::new(Verdict::Retry, cause)
    }

    /// A failure that may heal, with the delay that the other side asked for.
    pub fn retry_after(delay: Duration, cause: impl fmt::Display) -> Self {
        Self::new(Verdict::RetryAfter(delay), cause)
    }

    /// A failure that cannot heal for this version of the spec.
    pub fn give_up(cause: impl fmt::Display) -> Self {
        Self::new(Verdict::GiveUp, cause)
    }

    fn new(verdict: Verdict, cause: impl fmt::Display) -> Self {
        Self { verdict, cause: cause.to_string(), writes: Box::default() }
    }

    /// Says what was being done: `what: cause`.
    pub fn context(mut self, what: impl fmt::Display) -> Self {
        self.cause = format!("{what}: {}", self.cause);
        self
    }

    /// A status to write with the failure. The host adds the phase, the cause and the count as the claim's `dead_letter` says.
    pub fn status(mut self, status: impl Status) -> Self {
        self.writes.status = Some(to_json(&status));
        self
    }

    /// An Event to go with the failure.
    pub fn event(mut self, event: Event) -> Self {
        self.writes.events.push(event);
        self
    }

    /// Whether it may heal.
    pub fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// The cause in a sentence.
    pub fn cause(&self) -> &str {
        &self.cause
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.cause)
    }
}

impl std::error::Error for Error {}

/// Says of any result or option whether its failure may heal.
///
/// ```
/// use berth_sdk::{Error, OrFail};
///
/// fn port(text: &str) -> Result<u16, Error> {
///     text.parse().or_give_up("spec.port")
/// }
/// assert_eq!(port("x").unwrap_err().cause(), "spec.port: invalid digit found in string");
/// ```
pub trait OrFail<T> {
    /// The failure may heal; `what` says what was being done.
    fn or_retry(self, what: impl fmt::Display) -> Result<T, Error>;
    /// The failure cannot heal for this version of the spec; `what` says what was being done.
    fn or_give_up(self, what: impl fmt::Display) -> Result<T, Error>;
}

impl<T, E: fmt::Display> OrFail<T> for Result<T, E> {
    fn or_retry(self, what: impl fmt::Display) -> Result<T, Error> {
        self.map_err(|error| Error::retry(error).context(what))
    }

    fn or_give_up(self, what: impl fmt::Display) -> Result<T, Error> {
        self.map_err(|error| Error::give_up(error).context(what))
    }
}

impl<T> OrFail<T> for Option<T> {
    fn or_retry(self, what: impl fmt::Display) -> Result<T, Error> {
        self.ok_or_else(|| Error::retry(what))
    }

    fn or_give_up(self, what: impl fmt::Display) -> Result<T, Error> {
        self.ok_or_else(|| Error::give_up(what))
    }
}
