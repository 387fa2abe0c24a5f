//! What the host's operator decides: the flags, and the table of every limit that `berth run --help` prints.

use std::time::Duration;

use clap::{Args, builder::RangedU64ValueParser};

use super::{
    CONNECTIONS, HEADERS, LABELS, LOG_LINE, LOOK_UPS, Limits, PATH, RANDOM_BYTES, READ_BYTES, READ_OBJECTS, SANDBOX_MEMORY, SANDBOXES,
    SENTENCE, STACK, Size, shape,
};
use crate::package::{Ceilings, Config, MAX_COMPONENT, flag, quantity};

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
    /// Largest machine code of a plugin
    #[arg(long = "compile-size", default_value = "256Mi", value_name = "AMOUNT", value_parser = amount)]
    pub size: u64,
}

impl Default for CompileLimits {
    fn default() -> Self {
        Self { memory: 1 << 30, cpu: Duration::from_secs(60), wall: Duration::from_secs(180), size: 256 << 20 }
    }
}

fn amount(text: &str) -> Result<u64, &'static str> {
    quantity::bytes(text).ok_or("not an amount such as 1Gi")
}

fn time(text: &str) -> Result<Duration, &'static str> {
    quantity::duration(text).ok_or("not a length of time such as 1m")
}

/// At least twice what one call has unless it asks for more: a plugin has half.
fn sandbox_memory(text: &str) -> Result<u64, &'static str> {
    quantity::bytes(text).filter(|bytes| (128 << 20..1 << 42).contains(bytes)).ok_or("not an amount of at least 128Mi")
}

fn stack(text: &str) -> Result<usize, &'static str> {
    let amount = quantity::bytes(text).and_then(|bytes| usize::try_from(bytes).ok());
    amount.filter(|bytes| (64 << 10..=8 << 20).contains(bytes)).ok_or("not an amount from 64Ki to 8Mi")
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
    /// Memory of all handlers that run at once, of which one plugin has half at most, and of the child that compiles
    #[arg(long, default_value = "2Gi", value_name = "AMOUNT", value_parser = sandbox_memory)]
    pub sandbox_memory: u64,
    /// Connections of all plugins at once, of which one plugin has a quarter at most
    #[arg(long, default_value_t = CONNECTIONS, value_name = "NUMBER", value_parser = RangedU64ValueParser::<u32>::new().range(4..=65_536))]
    pub connections: u32,
    /// Stack of each handler
    #[arg(long, default_value = "512Ki", value_name = "AMOUNT", value_parser = stack)]
    pub stack: usize,
}

impl Default for HostLimits {
    fn default() -> Self {
        Self {
            ceilings: Ceilings::default(),
            compile: CompileLimits::default(),
            sandboxes: SANDBOXES,
            sandbox_memory: SANDBOX_MEMORY,
            connections: CONNECTIONS,
            stack: STACK,
        }
    }
}

/// Every limit with its default and with what raises it, for help texts.
pub fn table() -> Vec<[String; 3]> {
    let rows = of_a_call().into_iter().chain(of_the_host());
    rows.map(|(name, value, raise)| [name.to_owned(), value, raise]).collect()
}

type Row = (&'static str, String, String);

fn fixed() -> String {
    "fixed".to_owned()
}

fn size(bytes: usize) -> String {
    Size(bytes as u64).to_string()
}

fn of_a_call() -> Vec<Row> {
    let Limits { timeout, cpu, memory, run, raisable: _ } = Limits::of(&Config::default());
    let time = quantity::show_duration;
    let held = |key: &str| format!("`{key}`, up to --max-{key}");
    let key = |key: &str| format!("`limits.{key}`, up to {}", flag(key));
    vec![
        ("guest CPU of a call", time(cpu), held("cpu")),
        ("a whole call", time(timeout), held("timeout")),
        ("memory of a call", Size(memory).to_string(), held("memory")),
        ("objects of a kind at once", Config::default().concurrency.to_string(), held("concurrency")),
        ("HTTP requests of a call", run.http_requests.to_string(), key("httpRequests")),
        ("HTTP response", size(run.http_response), key("httpResponse")),
        ("HTTP connect", time(run.http_connect), key("httpConnect")),
        ("HTTP first byte", time(run.http_first_byte), key("httpFirstByte")),
        ("HTTP headers of a request", size(HEADERS), fixed()),
        ("HTTP path of a request", size(PATH), fixed()),
        ("log of a call", size(run.log), key("log")),
        ("log line", size(LOG_LINE), fixed()),
        ("Events of a call", run.events.to_string(), key("events")),
        ("outcome", size(run.outcome), key("outcome")),
        ("nesting of JSON", run.json_depth.to_string(), key("jsonDepth")),
        ("children of an object", run.children.to_string(), key("children")),
        ("labels of an outcome", LABELS.to_string(), fixed()),
        ("sentence (cause, note)", size(SENTENCE), fixed()),
        ("data of one host call", size(run.host_call), key("hostCall")),
        ("handles", run.handles.to_string(), key("handles")),
        ("random bytes of one call", Size(RANDOM_BYTES).to_string(), fixed()),
        ("page of a list", format!("{READ_OBJECTS} objects, {}", size(READ_BYTES)), fixed()),
        ("elements of a table", shape::TABLE_ELEMENTS.to_string(), fixed()),
        ("stack", size(STACK), "--stack".into()),
    ]
}

fn of_the_host() -> Vec<Row> {
    let compile = CompileLimits::default();
    let time = quantity::show_duration;
    vec![
        ("handlers at once", SANDBOXES.to_string(), "--sandboxes".into()),
        ("memory of all handlers", Size(SANDBOX_MEMORY).to_string(), "--sandbox-memory; half of it for one plugin".into()),
        ("connections at once", CONNECTIONS.to_string(), "--connections; a quarter of them for one plugin".into()),
        ("look-ups of names at once", LOOK_UPS.to_string(), "fixed; a quarter of them for one plugin".into()),
        ("component", size(MAX_COMPONENT), "--max-component, downwards".into()),
        ("compiling: CPU", time(compile.cpu), "--compile-cpu".into()),
        ("compiling: by the clock", time(compile.wall), "--compile-time".into()),
        ("compiling: memory", Size(compile.memory).to_string(), "--compile-memory".into()),
        ("compiling: machine code", Size(compile.size).to_string(), "--compile-size".into()),
    ]
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        limits: HostLimits,
    }

    #[test]
    fn without_flags_the_host_has_its_defaults_and_no_flag_makes_it_useless() {
        let flags = |text: &str| {
            let words = std::iter::once("berth").chain(text.split_whitespace());
            Flags::try_parse_from(words).map(|flags| flags.limits).map_err(|error| error.to_string())
        };
        assert_eq!(flags(""), Ok(HostLimits::default()));
        assert_eq!(flags("--stack 1Mi --sandbox-memory 3Gi").map(|limits| (limits.stack, limits.sandbox_memory)), Ok((1 << 20, 3 << 30)));
        for text in ["--stack 1Ki", "--stack 9Mi", "--sandbox-memory 127Mi", "--sandbox-memory much", "--connections 3"] {
            assert!(flags(text).is_err(), "{text}");
        }
    }

    #[test]
    fn the_table_shows_values_as_plugin_yaml_would() {
        let table = table();
        let row = |name: &str| table.iter().find(|row| row[0] == name).cloned().expect(name);
        assert_eq!(row("memory of a call")[1..], ["64Mi", "`memory`, up to --max-memory"]);
        assert_eq!(row("guest CPU of a call")[1], "2s");
        assert_eq!(row("HTTP first byte")[1..], ["5s", "`limits.httpFirstByte`, up to --max-http-first-byte"]);
        assert_eq!((Size(1000).to_string(), Size(1 << 30).to_string()), ("1000".into(), "1Gi".into()));
    }
}
