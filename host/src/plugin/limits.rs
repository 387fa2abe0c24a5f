//! Every limit of a run, of a trial and of a compilation, in one table.

use std::{fmt, time::Duration};

use clap::{Args, builder::RangedU64ValueParser};

use crate::package::{Ceilings, Config, MAX_COMPONENT, RunLimits, quantity};

/// Length of an epoch: how often a guest that computes gives way to others and its CPU time is looked at.
pub const TICK: Duration = Duration::from_millis(10);

/// Sandboxes that run at once, over all plugins. Each reserves address space, not memory: two linear memories of 4 GiB.
pub const SANDBOXES: u32 = 512;

/// The guest's stack. What is left of the 2 MiB of a fiber is for the host's functions, so an overflow is always the guest's.
pub const STACK: usize = 512 << 10;

/// Bytes that a guest may hand over in one call of a host function, or as its outcome. wasmtime's own default is 128 MiB.
pub const HOST_CALL_BYTES: usize = 4 << 20;

/// Handles that a run may hold at once, on either side.
pub const HANDLES: usize = 1_000;

/// Random bytes of one call.
pub const RANDOM_BYTES: u64 = 64 << 10;

/// Log text of one line.
pub const LOG_LINE: usize = 4 << 10;

/// An outcome, all its texts together.
pub const OUTCOME_BYTES: usize = 1 << 20;

/// Nesting of a JSON value in an outcome.
pub const JSON_DEPTH: usize = 64;

/// The cause of a failure, an event's note and the like: what the Events API takes as a note.
pub const SENTENCE: usize = 1 << 10;

/// Children of an object.
pub const CHILDREN: usize = 100;

/// Labels of an outcome.
pub const LABELS: usize = 64;

/// The longest `after-ms` and `retry-after-ms` that are kept; the guest may say any number.
pub const LONGEST_WAIT: Duration = Duration::from_secs(366 * 24 * 3600);

/// From the start of a connection to the end of its TLS handshake, name resolution included.
pub const HTTP_CONNECT: Duration = Duration::from_secs(2);

/// Objects of a page of a list, also where the guest asks for more.
pub const READ_OBJECTS: usize = 500;

/// Their text, all together; one object is given however large it is. A quarter of what a call may hand over, as guests copy it.
pub const READ_BYTES: usize = 1 << 20;

/// Artefacts kept on disk, all together; the longest unused go first.
pub const CACHE_BYTES: u64 = 1 << 30;

/// Tables, memories and core instances of one component. Guests of languages with an interpreter link a dozen core modules.
pub mod shape {
    /// Core module instances.
    pub const CORE_INSTANCES: u32 = 64;
    /// Linear memories.
    pub const MEMORIES: u32 = 2;
    /// Tables.
    pub const TABLES: u32 = 16;
    /// Elements of a table; interpreters have more than ten thousand functions.
    pub const TABLE_ELEMENTS: usize = 32 << 10;
}

/// What `plugin.yaml` may raise, of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The whole call, waiting included.
    pub timeout: Duration,
    /// CPU time of the guest.
    pub cpu: Duration,
    /// Bytes of linear memory, all memories together.
    pub memory: u64,
    /// HTTP requests.
    pub http_requests: u32,
    /// Bytes of the body of an HTTP response.
    pub http_response: usize,
    /// From sending an HTTP request to the head of its response.
    pub http_first_byte: Duration,
    /// Log text, stdout and stderr included.
    pub log_bytes: usize,
    /// Events: the first ones are kept.
    pub events: usize,
    /// Whether `plugin.yaml` can raise them, so that sentences say so.
    pub raisable: bool,
}

impl Limits {
    /// For `describe`, which only returns a constant. The time by the clock is generous: on a busy machine it says little.
    pub const TRIAL: Self = Self {
        timeout: Duration::from_secs(5),
        cpu: Duration::from_millis(500),
        memory: 64 << 20,
        // The gate denies each of them.
        http_requests: 20,
        http_response: 0,
        http_first_byte: Duration::ZERO,
        log_bytes: 64 << 10,
        events: 0,
        raisable: false,
    };

    /// For the runs of a plugin.
    pub fn of(config: &Config) -> Self {
        let RunLimits { http_requests, http_response, http_first_byte, log, events } = config.limits;
        Self {
            timeout: config.timeout,
            cpu: config.cpu,
            memory: config.memory,
            http_requests,
            http_response,
            http_first_byte,
            log_bytes: log,
            events,
            raisable: true,
        }
    }

    /// How to raise one of them, to be read after its value.
    pub(super) fn how(&self, setting: &str) -> String {
        if self.raisable { format!(" (`{setting}` in plugin.yaml)") } else { String::new() }
    }
}

/// Bounds of one compilation, in a process of its own.
#[derive(Args, Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompileLimits {
    /// Address space for compiling a plugin
    #[arg(long = "compile-memory", default_value = "1Gi", value_name = "AMOUNT", value_parser = amount)]
    pub memory: u64,
    /// CPU time for compiling a plugin
    #[arg(long = "compile-cpu", default_value = "1m", value_name = "TIME", value_parser = time)]
    pub cpu: Duration,
    /// Time by the clock for compiling a plugin: on a busy machine the CPU time alone says little
    #[arg(long = "compile-time", default_value = "3m", value_name = "TIME", value_parser = time)]
    pub wall: Duration,
}

impl Default for CompileLimits {
    fn default() -> Self {
        Self { memory: 1 << 30, cpu: Duration::from_secs(60), wall: Duration::from_secs(180) }
    }
}

fn amount(text: &str) -> Result<u64, &'static str> {
    quantity::bytes(text).ok_or("not an amount such as 1Gi")
}

fn time(text: &str) -> Result<Duration, &'static str> {
    quantity::duration(text).ok_or("not a length of time such as 1m")
}

/// Flags of the host: what its plugins may have at most.
#[derive(Args, Clone, Copy, Debug, PartialEq, Eq)]
#[command(next_help_heading = "Limits of plugins")]
pub struct HostLimits {
    /// What `plugin.yaml` is held against.
    #[command(flatten)]
    pub ceilings: Ceilings,
    /// Of each compilation.
    #[command(flatten)]
    pub compile: CompileLimits,
    /// Handlers that run at once, over all plugins
    #[arg(long, default_value_t = SANDBOXES, value_name = "NUMBER", value_parser = RangedU64ValueParser::<u32>::new().range(1..=4096))]
    pub sandboxes: u32,
}

impl Default for HostLimits {
    fn default() -> Self {
        Self { ceilings: Ceilings::default(), compile: CompileLimits::default(), sandboxes: SANDBOXES }
    }
}

/// Every limit with its default and with what raises it, for help texts.
pub fn table() -> Vec<[String; 3]> {
    let run = Limits::of(&Config::default());
    let compile = CompileLimits::default();
    let size = |bytes: usize| Size(bytes as u64).to_string();
    let time = quantity::show_duration;
    let fixed = || "fixed".to_owned();
    let key = |key: &str| format!("`{key}` in plugin.yaml");
    let held = |key: &str| format!("`{key}` in plugin.yaml, up to --max-{key}");
    let rows = [
        ("guest CPU of a call", time(run.cpu), held("cpu")),
        ("a whole call", time(run.timeout), held("timeout")),
        ("memory of a call", Size(run.memory).to_string(), held("memory")),
        ("objects of a kind at once", Config::default().concurrency.to_string(), held("concurrency")),
        ("handlers at once", SANDBOXES.to_string(), "--sandboxes".into()),
        ("HTTP requests of a call", run.http_requests.to_string(), key("limits.httpRequests")),
        ("HTTP response", size(run.http_response), key("limits.httpResponse")),
        ("HTTP first byte", time(run.http_first_byte), key("limits.httpFirstByte")),
        ("HTTP connect", time(HTTP_CONNECT), fixed()),
        ("log of a call", size(run.log_bytes), key("limits.log")),
        ("log line", size(LOG_LINE), fixed()),
        ("Events of a call", run.events.to_string(), key("limits.events")),
        ("outcome", size(OUTCOME_BYTES), fixed()),
        ("children of an object", CHILDREN.to_string(), fixed()),
        ("nesting of JSON", JSON_DEPTH.to_string(), fixed()),
        ("labels of an outcome", LABELS.to_string(), fixed()),
        ("sentence (cause, note)", size(SENTENCE), fixed()),
        ("data of one host call", size(HOST_CALL_BYTES), fixed()),
        ("page of a list", format!("{READ_OBJECTS} objects, {}", size(READ_BYTES)), fixed()),
        ("handles", HANDLES.to_string(), fixed()),
        ("stack", size(STACK), fixed()),
        ("component", size(MAX_COMPONENT), "--max-component, downwards".into()),
        ("compiling: CPU", time(compile.cpu), "--compile-cpu".into()),
        ("compiling: by the clock", time(compile.wall), "--compile-time".into()),
        ("compiling: memory", Size(compile.memory).to_string(), "--compile-memory".into()),
    ];
    rows.into_iter().map(|(name, value, raise)| [name.to_owned(), value, raise]).collect()
}

/// A number of bytes as `plugin.yaml` would say it.
pub(super) struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            bytes if bytes >= 1 << 30 && bytes % (1 << 30) == 0 => write!(f, "{}Gi", bytes >> 30),
            bytes if bytes >= 1 << 20 && bytes % (1 << 20) == 0 => write!(f, "{}Mi", bytes >> 20),
            bytes if bytes >= 1 << 10 && bytes % (1 << 10) == 0 => write!(f, "{}Ki", bytes >> 10),
            bytes => write!(f, "{bytes}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_shows_values_as_plugin_yaml_would() {
        let table = table();
        let row = |name: &str| table.iter().find(|row| row[0] == name).cloned().expect(name);
        assert_eq!(row("memory of a call")[1..], ["64Mi", "`memory` in plugin.yaml, up to --max-memory"]);
        assert_eq!(row("guest CPU of a call")[1], "2s");
        assert_eq!((Size(1000).to_string(), Size(1 << 30).to_string()), ("1000".into(), "1Gi".into()));
    }
}
