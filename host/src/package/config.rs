//! `plugin.yaml`: what the person who installs a plugin decides.

use std::time::Duration;

use serde_json::{Map, Value};

use super::{
    AllowedHost, Refusal, RunLimits, allowed,
    field::{amount, expected, invalid, mapping, name_of, number, time, unknown},
    quantity::show_bytes,
    reason,
};
use crate::{claim::Pace, trial::Rollout};

/// The share of the objects that a staged rollout begins with.
const STAGED_SHARE: u8 = 10;
/// For how long it stays with them.
const STAGED_TIME: Duration = Duration::from_secs(120);

/// Beyond these no host can go, whatever its [`Ceilings`](super::Ceilings).
pub mod ceiling {
    use std::time::Duration;

    /// Objects of a kind that run at once: the sandboxes of a large host.
    pub const CONCURRENCY: usize = 4096;
    /// A whole call. A run holds its object's turn, so a longer effect belongs into several runs.
    pub const TIMEOUT: Duration = Duration::from_secs(3600);
    /// Guest CPU of a call.
    pub const CPU: Duration = Duration::from_secs(3600);
    /// Linear memory of a call: what 32 bits can address.
    pub const MEMORY: u64 = 4 << 30;
    /// Delay after a failure.
    pub const BACKOFF: Duration = Duration::from_secs(3600);
    /// The first stage of a rollout.
    pub const STAGE: Duration = Duration::from_secs(24 * 3600);
    /// Text of `plugin.yaml`.
    pub const CONFIG_BYTES: usize = 256 << 10;
}

/// The least that makes sense, below which a value is surely a slip.
mod floor {
    use std::time::Duration;

    pub const TIMEOUT: Duration = Duration::from_millis(10);
    pub const BACKOFF: Duration = Duration::from_millis(100);
    pub const STAGE: Duration = Duration::from_secs(1);
    /// One page of a guest compiled by Rust plus its 1 MiB stack.
    pub const MEMORY: u64 = 2 << 20;
}

/// What `plugin.yaml` says; [`Config::default`] where it says nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Given to the handler as they are.
    pub settings: Map<String, Value>,
    /// The grant for HTTP.
    pub allowed_hosts: Vec<AllowedHost>,
    /// Name of the ServiceAccount, in the host's namespace, that the plugin acts as for reads and children; none gives it neither.
    pub service_account: Option<String>,
    /// Objects of the kind that run at once.
    pub concurrency: usize,
    /// Longest a whole call may take.
    pub timeout: Duration,
    /// CPU time of the guest within a call.
    pub cpu: Duration,
    /// Linear memory of a call, in bytes.
    pub memory: u64,
    /// Further limits of a call.
    pub limits: RunLimits,
    /// Delays after failures.
    pub backoff: Backoff,
    /// How a new version takes over from the former one.
    pub rollout: Rollout,
    /// Whether a new version is to try again what a former one gave up on.
    pub redrive: bool,
    /// Whether no object of the kind is run for now.
    pub paused: bool,
}

/// Delays after failures: `base`, doubled each time, at most `max`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// After the first failure.
    pub base: Duration,
    /// The longest.
    pub max: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            settings: Map::new(),
            allowed_hosts: Vec::new(),
            service_account: None,
            concurrency: 16,
            timeout: Duration::from_secs(10),
            cpu: Duration::from_secs(2),
            memory: 64 << 20,
            limits: RunLimits::default(),
            backoff: Backoff { base: Duration::from_secs(1), max: Duration::from_secs(300) },
            rollout: Rollout::Immediate,
            redrive: false,
            paused: false,
        }
    }
}

impl Config {
    /// Reads the text of `plugin.yaml`; an empty one is all defaults.
    pub fn parse(text: &[u8]) -> Result<Self, Refusal> {
        if text.len() > ceiling::CONFIG_BYTES {
            let message = format!("plugin.yaml is larger than {}.", show_bytes(ceiling::CONFIG_BYTES as u64));
            return Err(Refusal::new(reason::TOO_LARGE, message));
        }
        let text = std::str::from_utf8(text).map_err(|_| invalid("is not UTF-8"))?;
        match yaml(text)? {
            Value::Null => Ok(Self::default()),
            Value::Object(fields) => Self::from_fields(fields),
            _ => Err(invalid("has to be a mapping such as \"settings: {}\"")),
        }
    }

    /// How the runs of its kind are paced.
    pub fn pace(&self) -> Pace {
        Pace { concurrency: self.concurrency, backoff_base: self.backoff.base, backoff_max: self.backoff.max }
    }

    fn from_fields(fields: Map<String, Value>) -> Result<Self, Refusal> {
        let mut config = Self::default();
        for (key, value) in fields {
            match key.as_str() {
                "settings" => config.settings = mapping(&key, value)?,
                "allowedHosts" => config.allowed_hosts = allowed::all(value)?,
                "serviceAccountName" => config.service_account = account(&value)?,
                "concurrency" => config.concurrency = number(&key, &value, 1..=ceiling::CONCURRENCY)?,
                "timeout" => config.timeout = time(&key, &value, floor::TIMEOUT..=ceiling::TIMEOUT)?,
                "cpu" => config.cpu = time(&key, &value, floor::TIMEOUT..=ceiling::CPU)?,
                "memory" => config.memory = amount(&key, &value, floor::MEMORY..=ceiling::MEMORY)?,
                "limits" => config.limits = RunLimits::parse(mapping(&key, value)?)?,
                "backoff" => config.backoff = backoff(mapping(&key, value)?)?,
                "rollout" => config.rollout = rollout(&value)?,
                "redrive" => config.redrive = flag(&key, &value)?,
                "paused" => config.paused = flag(&key, &value)?,
                _ => return Err(unknown(&key, "", KEYS)),
            }
        }
        if config.backoff.base > config.backoff.max {
            return Err(invalid("has a \"backoff.base\" that is longer than its \"backoff.max\""));
        }
        Ok(config)
    }
}

/// All that can be said, for suggestions and made-up files.
pub(super) const KEYS: &[&str] = &[
    "settings",
    "allowedHosts",
    "serviceAccountName",
    "concurrency",
    "timeout",
    "cpu",
    "memory",
    "limits",
    "backoff",
    "rollout",
    "redrive",
    "paused",
];

/// One document within a budget that is far above any real configuration and far below what harms.
fn yaml(text: &str) -> Result<Value, Refusal> {
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! { max_depth: 64, max_nodes: 20_000, max_events: 50_000, max_aliases: 100, max_anchors: 100 },
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: 20_000, max_replay_stack_depth: 8 },
        strict_booleans: true,
        with_snippet: false,
    };
    if text.trim().is_empty() {
        return Ok(Value::Null);
    }
    serde_saphyr::from_str_with_options(text, options).map_err(|error| {
        let error = error.to_string();
        invalid(&format!("cannot be read: {}", error.split_whitespace().collect::<Vec<_>>().join(" ").trim_end_matches('.')))
    })
}

fn flag(key: &str, value: &Value) -> Result<bool, Refusal> {
    value.as_bool().ok_or_else(|| expected(key, "true or false", value))
}

fn backoff(fields: Map<String, Value>) -> Result<Backoff, Refusal> {
    let mut backoff = Config::default().backoff;
    for (key, value) in fields {
        let read = |name| time(name, &value, floor::BACKOFF..=ceiling::BACKOFF);
        match key.as_str() {
            "base" => backoff.base = read("backoff.base")?,
            "max" => backoff.max = read("backoff.max")?,
            _ => return Err(unknown(&key, "backoff.", &["base", "max"])),
        }
    }
    Ok(backoff)
}

fn rollout(value: &Value) -> Result<Rollout, Refusal> {
    let fields = match value {
        Value::Null => return Ok(Rollout::Immediate),
        Value::String(word) if word == "immediate" => return Ok(Rollout::Immediate),
        Value::Object(fields) => fields,
        other => return Err(expected("rollout", "\"immediate\" or { staged: { share: 10%, for: 2m } }", other)),
    };
    let (mut share, mut time) = (STAGED_SHARE, STAGED_TIME);
    for (key, value) in fields {
        let Value::Object(stage) = value else { return Err(expected("rollout", "{ staged: { share: 10%, for: 2m } }", value)) };
        if key != "staged" {
            return Err(unknown(key, "rollout.", &["staged"]));
        }
        for (key, value) in stage {
            match key.as_str() {
                "share" => share = percent(value)?,
                "for" => time = self::time("rollout.staged.for", value, floor::STAGE..=ceiling::STAGE)?,
                _ => return Err(unknown(key, "rollout.staged.", &["share", "for"])),
            }
        }
    }
    if fields.is_empty() {
        return Err(expected("rollout", "\"immediate\" or { staged: { share: 10%, for: 2m } }", value));
    }
    Ok(Rollout::Staged { share, time })
}

fn percent(value: &Value) -> Result<u8, Refusal> {
    let number = value.as_str().and_then(|text| text.strip_suffix('%')?.parse().ok());
    number
        .filter(|number| (1..=99).contains(number))
        .ok_or_else(|| expected("rollout.staged.share", "a share from \"1%\" to \"99%\"", value))
}

fn account(value: &Value) -> Result<Option<String>, Refusal> {
    if value.is_null() { Ok(None) } else { name_of("serviceAccountName", "ServiceAccount", value).map(Some) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn refused(text: &str) -> Refusal {
        Config::parse(text.as_bytes()).expect_err(text)
    }

    #[test]
    fn everything_that_can_be_said_is_read() {
        let text = r#"
            settings: { gateway: "http://mail.demo", big: 9007199254740993, no: no }
            allowedHosts: [http://mail.demo:80]
            serviceAccountName: email-request
            concurrency: 4
            timeout: 20s
            cpu: 500ms
            memory: 128Mi
            limits: { httpRequests: 30, httpResponse: 2Mi, httpFirstByte: 30s, log: 1Mi, events: 0 }
            backoff: { base: 2s, max: 1m30s }
            rollout: { staged: { share: 25%, for: 90s } }
            redrive: true
            paused: true
        "#;
        let config = Config::parse(text.as_bytes()).expect("parses");
        let expected = Config {
            settings: serde_json::from_str(r#"{"gateway":"http://mail.demo","big":9007199254740993,"no":"no"}"#).expect("json"),
            allowed_hosts: vec![AllowedHost { pattern: "http://mail.demo".parse().expect("host"), ca: None, credentials: None }],
            service_account: Some("email-request".into()),
            concurrency: 4,
            timeout: Duration::from_secs(20),
            cpu: Duration::from_millis(500),
            memory: 128 << 20,
            limits: RunLimits {
                http_requests: 30,
                http_response: 2 << 20,
                http_first_byte: Duration::from_secs(30),
                log: 1 << 20,
                events: 0,
                ..RunLimits::default()
            },
            backoff: Backoff { base: Duration::from_secs(2), max: Duration::from_secs(90) },
            rollout: Rollout::Staged { share: 25, time: Duration::from_secs(90) },
            redrive: true,
            paused: true,
        };
        assert_eq!(config, expected);
    }

    #[test]
    fn nothing_said_is_all_defaults() {
        for text in ["", "\n", "# only a comment\n", "{}", "settings:\nbackoff:\n"] {
            assert_eq!(Config::parse(text.as_bytes()), Ok(Config::default()), "{text:?}");
        }
    }

    #[test]
    fn an_unknown_key_is_refused_with_the_nearest_known_one() {
        for (text, hint) in [
            ("allowedHost: []", "did you mean \"allowedHosts\"?"),
            ("allowed_hosts: []", "did you mean \"allowedHosts\"?"),
            ("Timeout: 1s", "did you mean \"timeout\"?"),
            ("limits: { httpRequest: 1 }", "unknown key \"limits.httpRequest\" (did you mean \"limits.httpRequests\"?)"),
            ("backoff: { bse: 1s }", "unknown key \"backoff.bse\" (did you mean \"backoff.base\"?)"),
            ("xyzzy-plugh: 1", "the known ones are settings, allowedHosts"),
        ] {
            let refusal = refused(text);
            assert!(refusal.message.contains(hint) && refusal.reason == reason::INVALID_CONFIG, "{refusal}");
        }
    }

    #[test]
    fn values_outside_the_ceilings_are_refused_with_the_range() {
        for (text, range) in [
            ("concurrency: 0", "from 1 to 4096"),
            ("concurrency: 4097", "from 1 to 4096"),
            ("concurrency: 1.5", "from 1 to 4096"),
            ("timeout: 61m", "from 10ms to 60m"),
            ("timeout: 10", "such as \"10s\""),
            ("cpu: 2h", "from 10ms to 60m"),
            ("memory: 5Gi", "from 2Mi to 4Gi"),
            ("memory: 1Ki", "from 2Mi to 4Gi"),
            ("backoff: { base: 1ms }", "from 100ms to 60m"),
            ("backoff: { base: 10s, max: 5s }", "longer than its \"backoff.max\""),
            ("limits: { httpRequests: 1001 }", "\"limits.httpRequests\" of 1001, where a whole number from 0 to 1000"),
            ("limits: { httpResponse: 65Mi }", "from 0 to 64Mi"),
            ("limits: { httpFirstByte: 6m }", "from 10ms to 5m"),
            ("limits: { log: 5Mi }", "from 0 to 4Mi"),
            ("limits: { events: -1 }", "from 0 to 100"),
            ("limits: { httpConnect: 31s }", "from 10ms to 30s"),
            ("limits: { outcome: 5Mi }", "from 1Ki to 4Mi"),
            ("limits: { jsonDepth: 101 }", "from 1 to 100"),
            ("limits: { children: 501 }", "from 0 to 500"),
            ("limits: { handles: 9 }", "from 10 to 10000"),
            ("limits: { hostCall: 17Mi }", "from 64Ki to 16Mi"),
            ("paused: yes", "true or false"),
            ("allowedHosts: http://a", "a list such as"),
            ("allowedHosts: [\"http://a/b\"]", "\"http://a/b\", which must end after the host"),
            ("settings: []", "a mapping"),
            ("serviceAccountName: kube-system/default", "the name of a ServiceAccount in the host's namespace"),
            ("- a", "has to be a mapping"),
            ("a: 1\na: 2", "cannot be read"),
            ("paused: true\n---\npaused: false", "cannot be read"),
            ("settings: { x: .nan }", "cannot be read"),
            ("a: [", "cannot be read"),
        ] {
            let refusal = refused(text);
            assert!(refusal.message.contains(range), "{text}: {refusal}");
        }
    }

    #[test]
    fn a_rollout_is_immediate_or_staged_with_defaults() {
        let of = |text: &str| Config::parse(text.as_bytes()).map(|config| config.rollout).map_err(|refusal| refusal.message);
        assert_eq!(of("rollout: immediate"), Ok(Rollout::Immediate));
        assert_eq!(of("rollout: { staged: {} }"), Ok(Rollout::Staged { share: STAGED_SHARE, time: STAGED_TIME }));
        for (text, words) in [
            ("rollout: slowly", "\"immediate\" or"),
            ("rollout: {}", "\"immediate\" or"),
            ("rollout: { stagd: {} }", "did you mean \"rollout.staged\"?"),
            ("rollout: { staged: 10% }", "{ staged:"),
            ("rollout: { staged: { share: 10 } }", "\"1%\" to \"99%\""),
            ("rollout: { staged: { share: 100% } }", "\"1%\" to \"99%\""),
            ("rollout: { staged: { for: 2d } }", "a time from"),
            ("rollout: { staged: { form: 2m } }", "did you mean"),
        ] {
            assert!(of(text).is_err_and(|message| message.contains(words)), "{text}: {:?}", of(text));
        }
    }

    #[test]
    fn a_bomb_of_aliases_is_refused() {
        let mut text = String::from("settings:\n  a0: &a0 [x, x, x, x, x, x, x, x, x]\n");
        for level in 1..9 {
            let before = format!("*a{}", level - 1);
            text += &format!("  a{level}: &a{level} [{}]\n", [before.as_str(); 9].join(", "));
        }
        assert!(refused(&text).message.contains("cannot be read"));
        assert_eq!(refused(&format!("a: {}", "x".repeat(ceiling::CONFIG_BYTES))).reason, reason::TOO_LARGE);
        assert!(refused(&format!("settings: {}", "[".repeat(5000))).message.contains("cannot be read"));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused_with_a_sentence(text in ".{0,200}") {
            if let Err(refusal) = Config::parse(text.as_bytes()) {
                prop_assert!(refusal.message.ends_with('.') && refusal.message.len() <= Refusal::MAX_MESSAGE, "{refusal}");
            }
        }

        #[test]
        fn any_value_of_any_key_stays_within_the_ceilings(key in prop::sample::select(KEYS), value in "[-0-9a-zA-Z.:/\\[\\]{} ]{0,20}") {
            if let Ok(config) = Config::parse(format!("{key}: {value}").as_bytes()) {
                prop_assert!((1..=ceiling::CONCURRENCY).contains(&config.concurrency));
                prop_assert!(config.timeout <= ceiling::TIMEOUT && config.cpu <= ceiling::CPU && config.memory <= ceiling::MEMORY);
                prop_assert!(config.backoff.base <= config.backoff.max && config.backoff.max <= ceiling::BACKOFF);
            }
        }
    }
}
