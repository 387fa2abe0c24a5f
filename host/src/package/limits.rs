//! The limits of a call under `limits` in `plugin.yaml`: what hardly anybody has to touch.

use std::time::Duration;

use serde_json::{Map, Value};

use super::{
    Refusal,
    field::{amount, number, time, unknown},
};

/// How much of each a call may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunLimits {
    /// `httpRequests`: how many are sent.
    pub http_requests: u32,
    /// `httpResponse`: bytes of the body of one.
    pub http_response: usize,
    /// `httpFirstByte`: from sending a request to the head of its response.
    pub http_first_byte: Duration,
    /// `log`: bytes of log text, stdout and stderr included.
    pub log: usize,
    /// `events`: the first ones are kept.
    pub events: usize,
}

impl Default for RunLimits {
    fn default() -> Self {
        Self { http_requests: 20, http_response: 1 << 20, http_first_byte: Duration::from_secs(5), log: 64 << 10, events: 10 }
    }
}

impl RunLimits {
    /// The most of each: an answer lies in the memory of the guest; a log line costs its reader; the API server keeps Events in etcd.
    pub const CEILING: Self =
        Self { http_requests: 1000, http_response: 64 << 20, http_first_byte: Duration::from_secs(300), log: 4 << 20, events: 100 };

    pub(super) fn parse(fields: Map<String, Value>) -> Result<Self, Refusal> {
        const KEYS: &[&str] = &["httpRequests", "httpResponse", "httpFirstByte", "log", "events"];
        const MOST: RunLimits = RunLimits::CEILING;
        let mut limits = Self::default();
        for (key, value) in fields {
            let name = format!("limits.{key}");
            match key.as_str() {
                "httpRequests" => limits.http_requests = number(&name, &value, 0..=MOST.http_requests as usize)? as u32,
                "httpResponse" => limits.http_response = amount(&name, &value, 0..=MOST.http_response as u64)? as usize,
                "httpFirstByte" => limits.http_first_byte = time(&name, &value, Duration::from_millis(10)..=MOST.http_first_byte)?,
                "log" => limits.log = amount(&name, &value, 0..=MOST.log as u64)? as usize,
                "events" => limits.events = number(&name, &value, 0..=MOST.events)?,
                _ => return Err(unknown(&key, "limits.", KEYS)),
            }
        }
        Ok(limits)
    }
}
