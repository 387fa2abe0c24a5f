//! Every limit of a run, of a trial and of a compilation, in one table.

use std::{fmt, time::Duration};

use crate::package::Config;

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

/// Log text of a run, stdout and stderr included.
pub const LOG_BYTES: usize = 64 << 10;

/// Log text of one line.
pub const LOG_LINE: usize = 4 << 10;

/// An outcome, all its texts together.
pub const OUTCOME_BYTES: usize = 1 << 20;

/// Nesting of a JSON value in an outcome.
pub const JSON_DEPTH: usize = 64;

/// Events of a run: the first ones are kept.
pub const EVENTS: usize = 10;

/// The cause of a failure, an event's note and the like: what the Events API takes as a note.
pub const SENTENCE: usize = 1 << 10;

/// Children of an object.
pub const CHILDREN: usize = 100;

/// Labels of an outcome.
pub const LABELS: usize = 64;

/// The longest `after-ms` and `retry-after-ms` that are kept; the guest may say any number.
pub const LONGEST_WAIT: Duration = Duration::from_secs(366 * 24 * 3600);

/// HTTP requests of a run.
pub const HTTP_REQUESTS: u32 = 20;

/// Body of an HTTP response.
pub const HTTP_RESPONSE_BYTES: usize = 1 << 20;

/// From the start of a connection to the end of its TLS handshake, name resolution included.
pub const HTTP_CONNECT: Duration = Duration::from_secs(2);

/// From sending a request to the head of its response.
pub const HTTP_FIRST_BYTE: Duration = Duration::from_secs(5);

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
    /// Whether `plugin.yaml` can raise them, so that sentences say so.
    pub raisable: bool,
}

impl Limits {
    /// For `describe`, which only returns a constant. The time by the clock is generous: on a busy machine it says little.
    pub const TRIAL: Self = Self { timeout: Duration::from_secs(5), cpu: Duration::from_millis(500), memory: 64 << 20, raisable: false };

    /// For the runs of a plugin.
    pub fn of(config: &Config) -> Self {
        Self { timeout: config.timeout, cpu: config.cpu, memory: config.memory, raisable: true }
    }

    /// How to raise one of them, to be read after its value.
    pub(super) fn how(&self, setting: &str) -> String {
        if self.raisable { format!(" (`{setting}` in plugin.yaml)") } else { String::new() }
    }
}

/// Bounds of one compilation, in a process of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompileLimits {
    /// Address space in bytes.
    pub memory: u64,
    /// CPU time.
    pub cpu: Duration,
    /// Time by the clock: on a busy machine the CPU time alone says little.
    pub wall: Duration,
}

impl Default for CompileLimits {
    fn default() -> Self {
        Self { memory: 1 << 30, cpu: Duration::from_secs(60), wall: Duration::from_secs(180) }
    }
}

/// Every default as a name and a value, for help texts.
pub fn table() -> Vec<(&'static str, String)> {
    let run = Limits::of(&Config::default());
    let compile = CompileLimits::default();
    vec![
        ("guest CPU", format!("{:?}", run.cpu)),
        ("call", format!("{:?}", run.timeout)),
        ("memory", Size(run.memory).to_string()),
        ("stack", Size(STACK as u64).to_string()),
        ("bytes of a host call", Size(HOST_CALL_BYTES as u64).to_string()),
        ("handles", HANDLES.to_string()),
        ("logs of a run", Size(LOG_BYTES as u64).to_string()),
        ("outcome", format!("{}, depth {JSON_DEPTH}", Size(OUTCOME_BYTES as u64))),
        ("events of a run", EVENTS.to_string()),
        ("HTTP requests of a run", HTTP_REQUESTS.to_string()),
        ("HTTP response", Size(HTTP_RESPONSE_BYTES as u64).to_string()),
        ("HTTP connect, first byte", format!("{HTTP_CONNECT:?}, {HTTP_FIRST_BYTE:?}")),
        ("page of a list", format!("{READ_OBJECTS} objects, {}", Size(READ_BYTES as u64))),
        ("component", Size(crate::package::MAX_COMPONENT as u64).to_string()),
        ("compile", format!("{:?} CPU, {}", compile.cpu, Size(compile.memory))),
        ("sandboxes at once", SANDBOXES.to_string()),
    ]
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
        assert!(table.contains(&("memory", "64Mi".into())) && table.contains(&("guest CPU", "2s".into())), "{table:?}");
        assert_eq!((Size(1000).to_string(), Size(1 << 30).to_string()), ("1000".into(), "1Gi".into()));
    }
}
