//! Every limit of a run, of a trial and of a compilation, in one table.

use std::{fmt, time::Duration};

pub use self::flags::{CompileLimits, HostLimits, table};
use crate::package::{Config, RunLimits};

mod flags;

/// Sandboxes that run at once, over all plugins. Each reserves address space, not memory: two linear memories of 4 GiB.
pub const SANDBOXES: u32 = 512;

/// The guest's stack, unless the host's flags say otherwise.
pub const STACK: usize = 512 << 10;

/// What is left of a fiber for the host's functions, so that an overflow is always the guest's.
pub const HOST_STACK: usize = 1536 << 10;

/// Memory of all the guests that run at once, and of the child that compiles, in bytes.
pub const SANDBOX_MEMORY: u64 = 2 << 30;

/// Connections of all guests at once: within the 1,024 files that many systems let a process open.
pub const CONNECTIONS: u32 = 512;

/// Names that are looked up at once. Each look-up holds a thread, of the 512 that compiling and its cache need too, until the system's
/// resolver answers, whether anybody still waits for it or not.
pub const LOOK_UPS: u32 = 32;

/// Bytes of a write to the body of a request. Two of them are kept for a body that is not read.
pub const BODY_CHUNK: usize = 8 << 10;

/// Bytes of the headers of a request or response that a guest makes: what servers accept.
pub const HEADERS: usize = 16 << 10;

/// Bytes of a request's path with its query: what servers accept.
pub const PATH: usize = 8 << 10;

/// Bytes of a request's authority: the longest name, and a port.
pub const AUTHORITY: usize = 260;

/// Bytes of a request's method.
pub const METHOD: usize = 32;

/// Bytes of the head of a response, and of what is read of its body before the guest takes it.
pub const HTTP_BUFFER: u32 = 64 << 10;

/// Bytes of each name in a read of the cluster, and of a selector.
pub const READ_NAME: usize = 4 << 10;

/// What a read costs of the run's memory beside its names: the host remembers it.
pub const READ_KEPT: usize = 512;

/// Random bytes of one call.
pub const RANDOM_BYTES: u64 = 64 << 10;

/// Log text of one line.
pub const LOG_LINE: usize = 4 << 10;

/// What a line costs of the log beside its text: time, level, plugin, digest and object.
pub const LOG_OVERHEAD: usize = 128;

/// What a guest may write to stdout or stderr at once.
pub const LOG_WRITE: usize = 64 << 10;

/// The cause of a failure, an event's note and the like: what the Events API takes as a note.
pub const SENTENCE: usize = 1 << 10;

/// Labels of an outcome.
pub const LABELS: usize = 64;

/// The longest `after-ms` and `retry-after-ms` that are kept; the guest may say any number.
pub const LONGEST_WAIT: Duration = Duration::from_secs(366 * 24 * 3600);

/// Objects of a page of a list, also where the guest asks for more.
pub const READ_OBJECTS: usize = 500;

/// Their text, all together; one object is given however large it is. A quarter of what a call may hand over, as guests copy it.
pub const READ_BYTES: usize = 1 << 20;

/// Artefacts kept on disk, all together; the longest unused go first. With one that is being written they fit into the volume of 1 GiB
/// that `deploy/` gives them.
pub const CACHE_BYTES: u64 = 512 << 20;

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

/// To be read after the value of a limit that nothing raises.
pub(super) const FIXED: &str = " (fixed)";

/// What `plugin.yaml` may raise, of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The whole call, waiting included.
    pub timeout: Duration,
    /// CPU time of the guest.
    pub cpu: Duration,
    /// Bytes of linear memory and tables, all together, and of what the host keeps for the guest beside them.
    pub memory: u64,
    /// The rest.
    pub run: RunLimits,
    /// Whether `plugin.yaml` can raise them, so that sentences say so.
    pub raisable: bool,
}

impl Limits {
    /// For `describe`, which only returns a constant. The time by the clock is generous: on a busy machine it says little.
    pub const TRIAL: Self = Self {
        timeout: Duration::from_secs(5),
        cpu: Duration::from_millis(500),
        memory: 64 << 20,
        // The gate denies each request.
        run: RunLimits { http_response: 0, http_first_byte: Duration::ZERO, events: 0, children: 0, ..RunLimits::DEFAULT },
        raisable: false,
    };

    /// For the runs of a plugin.
    pub fn of(config: &Config) -> Self {
        let Config { timeout, cpu, memory, limits: run, .. } = *config;
        Self { timeout, cpu, memory, run, raisable: true }
    }

    /// How to raise one of them, to be read after its value.
    pub(super) fn how(&self, setting: &str) -> String {
        if self.raisable { format!(" (`{setting}` in plugin.yaml)") } else { String::new() }
    }
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
