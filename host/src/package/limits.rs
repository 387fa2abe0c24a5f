//! The limits of a call under `limits` in `plugin.yaml`: what hardly anybody has to touch.

use std::time::Duration;

use clap::{Args, builder::RangedU64ValueParser};
use serde_json::{Map, Value};

use super::{
    Refusal,
    field::{amount, number, time, unknown},
    quantity::{self, show_bytes, show_duration},
};

/// How much of each a call may have. The same fields are what a plugin asks for, what a host gives at most (its flags), and what any
/// host can give at most ([`RunLimits::CEILING`]).
#[derive(Args, Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunLimits {
    /// Most HTTP requests of a call (`limits.httpRequests`)
    #[arg(long = "max-http-requests", default_value = "1000", value_name = "NUMBER", value_parser = RangedU64ValueParser::<u32>::new().range(20..=1000))]
    pub http_requests: u32,
    /// Largest body of an HTTP response (`limits.httpResponse`)
    #[arg(long = "max-http-response", default_value = "64Mi", value_name = "AMOUNT", value_parser = |text: &str| bytes(text, |limits| limits.http_response))]
    pub http_response: usize,
    /// Longest from the start of a connection to the end of its TLS handshake, name resolution included (`limits.httpConnect`)
    #[arg(long = "max-http-connect", default_value = "30s", value_name = "TIME", value_parser = |text: &str| span(text, |limits| limits.http_connect))]
    pub http_connect: Duration,
    /// Longest from sending an HTTP request to the head of its response (`limits.httpFirstByte`)
    #[arg(long = "max-http-first-byte", default_value = "5m", value_name = "TIME", value_parser = |text: &str| span(text, |limits| limits.http_first_byte))]
    pub http_first_byte: Duration,
    /// Most log text of a call, stdout and stderr included (`limits.log`)
    #[arg(long = "max-log", default_value = "4Mi", value_name = "AMOUNT", value_parser = |text: &str| bytes(text, |limits| limits.log))]
    pub log: usize,
    /// Most Events of a call (`limits.events`)
    #[arg(long = "max-events", default_value = "100", value_name = "NUMBER", value_parser = RangedU64ValueParser::<usize>::new().range(10..=100))]
    pub events: usize,
    /// Largest outcome of a call, all its texts together (`limits.outcome`)
    #[arg(long = "max-outcome", default_value = "4Mi", value_name = "AMOUNT", value_parser = |text: &str| bytes(text, |limits| limits.outcome))]
    pub outcome: usize,
    /// Deepest nesting of a JSON value in an outcome (`limits.jsonDepth`)
    #[arg(long = "max-json-depth", default_value = "100", value_name = "NUMBER", value_parser = RangedU64ValueParser::<usize>::new().range(64..=100))]
    pub json_depth: usize,
    /// Most children of an object (`limits.children`)
    #[arg(long = "max-children", default_value = "500", value_name = "NUMBER", value_parser = RangedU64ValueParser::<usize>::new().range(100..=500))]
    pub children: usize,
    /// Most handles that a call holds at once (`limits.handles`)
    #[arg(long = "max-handles", default_value = "10000", value_name = "NUMBER", value_parser = RangedU64ValueParser::<usize>::new().range(1000..=10_000))]
    pub handles: usize,
    /// Most data of one call of a host function, or of the outcome on its way (`limits.hostCall`)
    #[arg(long = "max-host-call", default_value = "16Mi", value_name = "AMOUNT", value_parser = |text: &str| bytes(text, |limits| limits.host_call))]
    pub host_call: usize,
}

impl Default for RunLimits {
    /// For a plugin that says nothing.
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// For suggestions.
const KEYS: &[&str] = &[
    "httpRequests",
    "httpResponse",
    "httpConnect",
    "httpFirstByte",
    "log",
    "events",
    "outcome",
    "jsonDepth",
    "children",
    "handles",
    "hostCall",
];

impl RunLimits {
    /// For a plugin that says nothing.
    pub const DEFAULT: Self = Self {
        http_requests: 20,
        http_response: 1 << 20,
        http_connect: Duration::from_secs(2),
        http_first_byte: Duration::from_secs(5),
        log: 64 << 10,
        events: 10,
        outcome: 1 << 20,
        json_depth: 64,
        children: 100,
        handles: 1000,
        host_call: 4 << 20,
    };

    /// The most of each that any host gives: an answer lies in the memory of the guest; a log line costs its reader; the API server
    /// keeps Events in etcd and each object within 1.5 MiB; what reads JSON goes down 128 levels; a handle lives in the host's memory.
    pub const CEILING: Self = Self {
        http_requests: 1000,
        http_response: 64 << 20,
        http_connect: Duration::from_secs(30),
        http_first_byte: Duration::from_secs(300),
        log: 4 << 20,
        events: 100,
        outcome: 4 << 20,
        json_depth: 100,
        children: 500,
        handles: 10_000,
        host_call: 16 << 20,
    };

    pub(super) fn parse(fields: Map<String, Value>) -> Result<Self, Refusal> {
        const MOST: RunLimits = RunLimits::CEILING;
        let mut limits = Self::default();
        for (key, value) in fields {
            let name = format!("limits.{key}");
            let count = |least, most| number(&name, &value, least..=most);
            let size = |least: u64, most: usize| amount(&name, &value, least..=most as u64).map(|bytes| bytes as usize);
            let wait = |most| time(&name, &value, Duration::from_millis(10)..=most);
            match key.as_str() {
                "httpRequests" => limits.http_requests = count(0, MOST.http_requests as usize)? as u32,
                "httpResponse" => limits.http_response = size(0, MOST.http_response)?,
                "httpConnect" => limits.http_connect = wait(MOST.http_connect)?,
                "httpFirstByte" => limits.http_first_byte = wait(MOST.http_first_byte)?,
                "log" => limits.log = size(0, MOST.log)?,
                "events" => limits.events = count(0, MOST.events)?,
                "outcome" => limits.outcome = size(1 << 10, MOST.outcome)?,
                "jsonDepth" => limits.json_depth = count(1, MOST.json_depth)?,
                "children" => limits.children = count(0, MOST.children)?,
                "handles" => limits.handles = count(10, MOST.handles)?,
                "hostCall" => limits.host_call = size(64 << 10, MOST.host_call)?,
                _ => return Err(unknown(&key, "limits.", KEYS)),
            }
        }
        Ok(limits)
    }

    /// The first that is beyond what `most` has, as key, flag, what is asked and what there is.
    pub(super) fn beyond(&self, most: &Self) -> Option<[String; 4]> {
        let count = |key: &str, asked: usize, most: usize| (asked > most).then(|| said(key, asked.to_string(), most.to_string()));
        let size =
            |key: &str, asked: usize, most: usize| (asked > most).then(|| said(key, show_bytes(asked as u64), show_bytes(most as u64)));
        let wait =
            |key: &str, asked: Duration, most: Duration| (asked > most).then(|| said(key, show_duration(asked), show_duration(most)));
        let Self {
            http_requests,
            http_response,
            http_connect,
            http_first_byte,
            log,
            events,
            outcome,
            json_depth,
            children,
            handles,
            host_call,
        } = *self;
        count("httpRequests", http_requests as usize, most.http_requests as usize)
            .or_else(|| size("httpResponse", http_response, most.http_response))
            .or_else(|| wait("httpConnect", http_connect, most.http_connect))
            .or_else(|| wait("httpFirstByte", http_first_byte, most.http_first_byte))
            .or_else(|| size("log", log, most.log))
            .or_else(|| count("events", events, most.events))
            .or_else(|| size("outcome", outcome, most.outcome))
            .or_else(|| count("jsonDepth", json_depth, most.json_depth))
            .or_else(|| count("children", children, most.children))
            .or_else(|| count("handles", handles, most.handles))
            .or_else(|| size("hostCall", host_call, most.host_call))
    }
}

fn said(key: &str, asked: String, most: String) -> [String; 4] {
    [format!("limits.{key}"), flag(key), asked, most]
}

/// The flag of the host for a key: `--max-http-requests` for `httpRequests`.
pub fn flag(key: &str) -> String {
    key.chars().fold("--max-".to_owned(), |mut flag, c| {
        if c.is_ascii_uppercase() {
            flag.push('-');
        }
        flag.push(c.to_ascii_lowercase());
        flag
    })
}

/// An amount from the default to the ceiling of a field.
fn bytes(text: &str, of: fn(&RunLimits) -> usize) -> Result<usize, String> {
    let (least, most) = (of(&RunLimits::default()), of(&RunLimits::CEILING));
    let amount = quantity::bytes(text).and_then(|amount| usize::try_from(amount).ok()).filter(|amount| (least..=most).contains(amount));
    amount.ok_or_else(|| format!("not an amount from {} to {}", show_bytes(least as u64), show_bytes(most as u64)))
}

/// A time from the default to the ceiling of a field.
fn span(text: &str, of: fn(&RunLimits) -> Duration) -> Result<Duration, String> {
    let (least, most) = (of(&RunLimits::default()), of(&RunLimits::CEILING));
    let time = quantity::duration(text).filter(|time| (least..=most).contains(time));
    time.ok_or_else(|| format!("not a time from {} to {}", show_duration(least), show_duration(most)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_may_be_set_and_goes_up_to_the_flag_of_its_name() {
        let ceiling = RunLimits::CEILING;
        for (key, value, beyond) in [
            ("httpRequests", "21", "--max-http-requests"),
            ("httpResponse", "2Mi", "--max-http-response"),
            ("httpConnect", "3s", "--max-http-connect"),
            ("httpFirstByte", "6s", "--max-http-first-byte"),
            ("log", "65Ki", "--max-log"),
            ("events", "11", "--max-events"),
            ("outcome", "2Mi", "--max-outcome"),
            ("jsonDepth", "65", "--max-json-depth"),
            ("children", "101", "--max-children"),
            ("handles", "1001", "--max-handles"),
            ("hostCall", "5Mi", "--max-host-call"),
        ] {
            let value = value.parse::<u64>().map_or_else(|_| Value::from(value), Value::from);
            let fields = Map::from_iter([(key.to_owned(), value)]);
            let limits = RunLimits::parse(fields).expect(key);
            assert_ne!(limits, RunLimits::default(), "{key}");
            assert_eq!(limits.beyond(&ceiling), None, "{key}");
            let [name, flag, ..] = limits.beyond(&RunLimits::default()).expect(key);
            assert_eq!((name, flag.as_str()), (format!("limits.{key}"), beyond));
        }
        assert_eq!(KEYS.len(), 11);
    }
}
