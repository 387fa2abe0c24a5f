//! `berth:plugin/log`, stdout and stderr: guest text as `tracing` events with plugin, digest and object, within a budget.
//!
//! # Guarantees
//! One event is one line: control characters are escaped. A run writes at most its budget, as the lines are written and with what
//! comes with each; how many lines were dropped beyond is said once, at the end of the run. Nothing is escaped that is not written. The target is `guest`, so that a filter tells guests from the host.

use std::{
    io,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll},
};

use bytes::Bytes;
use tokio::io::AsyncWrite;
use wasmtime_wasi::{
    cli::{IsTerminal, StdoutStream},
    p2::{OutputStream, Pollable, StreamResult},
};

use super::gate::Call;
use crate::{
    plugin::{
        bindings::berth::plugin::log::{Host, Level},
        instance::State,
        limits::{self, Limits, Size},
        text::one_line,
    },
    text::cut,
};

/// Lines of stderr that are remembered as the guest's last words: a panic has its place and message on two or three.
const LAST_WORDS: usize = 8;

/// Who is speaking.
#[derive(Clone, Debug)]
pub struct Speaker {
    /// Name of the plugin.
    pub plugin: Arc<str>,
    /// Short digest of its component.
    pub digest: Arc<str>,
    /// The object of the run, or `describe`.
    pub object: Arc<str>,
}

/// The log of one run.
#[derive(Debug)]
pub struct Log {
    speaker: Speaker,
    budget: Limits,
    state: Mutex<Written>,
}

#[derive(Debug)]
struct Written {
    left: usize,
    dropped: u64,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    last_words: Vec<String>,
}

impl Log {
    /// An empty one, with the budget of these limits.
    pub fn new(speaker: Speaker, budget: Limits) -> Arc<Self> {
        let state = Written { left: budget.run.log, dropped: 0, stdout: Vec::new(), stderr: Vec::new(), last_words: Vec::new() };
        Arc::new(Self { speaker, budget, state: Mutex::new(state) })
    }

    /// A line of the host's about the run, which costs the guest nothing.
    pub fn host(&self, sentence: &str) {
        let Speaker { plugin, digest, object } = &self.speaker;
        tracing::warn!(target: "guest", %plugin, %digest, %object, "{}", one_line(sentence));
    }

    /// A line of the host's about what the guest must not do. It is taken from the budget, as its words may be the guest's, and yet said
    /// where nothing is left: a guest cannot hide what it was denied.
    pub fn denial(&self, sentence: &str) {
        let mut state = self.written();
        state.left = state.left.saturating_sub(sentence.len() + limits::LOG_OVERHEAD);
        drop(state);
        self.host(sentence);
    }

    /// What the guest wrote to stderr at last: the place and message of a panic, or the last line.
    pub fn last_words(&self) -> Option<String> {
        let mut state = self.written();
        let unfinished = std::mem::take(&mut state.stderr);
        self.line(&mut state, Stream::Stderr, &unfinished);
        let lines = &state.last_words;
        let words = match lines.iter().rposition(|line| line.contains("panicked at ")) {
            Some(at) => {
                let place = lines[at].find("panicked at ").map_or("", |start| &lines[at][start..]);
                let message = lines[at + 1..].iter().map(String::as_str).take_while(|line| !line.starts_with("note: "));
                std::iter::once(place).chain(message).collect::<Vec<_>>().join(" ")
            }
            None => lines.last()?.clone(),
        };
        Some(cut(&words, limits::SENTENCE))
    }

    fn emit(&self, level: Level, message: &str, fields: &[(String, String)]) {
        let (message, fields) = (fit(message), shown(fields));
        if self.written().afford(message.len() + fields.len()) {
            self.write(level, &message, &fields);
        }
    }

    fn write(&self, level: Level, message: &str, fields: &str) {
        let Speaker { plugin, digest, object } = &self.speaker;
        let fields = (!fields.is_empty()).then_some(fields);
        match level {
            Level::Trace => tracing::trace!(target: "guest", %plugin, %digest, %object, fields, "{message}"),
            Level::Debug => tracing::debug!(target: "guest", %plugin, %digest, %object, fields, "{message}"),
            Level::Info => tracing::info!(target: "guest", %plugin, %digest, %object, fields, "{message}"),
            Level::Warn => tracing::warn!(target: "guest", %plugin, %digest, %object, fields, "{message}"),
            Level::Error => tracing::error!(target: "guest", %plugin, %digest, %object, fields, "{message}"),
        }
    }

    /// Takes bytes of a stream and writes the lines that are finished by them.
    fn stream(&self, stream: Stream, bytes: &[u8]) {
        let mut state = self.written();
        let mut open = std::mem::take(state.buffer(stream));
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let room = limits::LOG_LINE.saturating_sub(open.len());
            open.extend_from_slice(&piece[..piece.len().min(room)]);
            if piece.ends_with(b"\n") {
                self.line(&mut state, stream, &open);
                open.clear();
            }
        }
        *state.buffer(stream) = open;
    }

    fn line(&self, state: &mut Written, stream: Stream, line: &[u8]) {
        let line = String::from_utf8_lossy(line);
        let line = fit(line.trim_end_matches(['\r', '\n']));
        if line.is_empty() {
            return;
        }
        if stream == Stream::Stderr {
            // Kept even where the budget is spent: they explain the failure.
            if state.last_words.len() == LAST_WORDS {
                state.last_words.remove(0);
            }
            state.last_words.push(cut(&line, limits::SENTENCE));
        }
        if state.afford(line.len()) {
            self.write(if stream == Stream::Stderr { Level::Warn } else { Level::Info }, &line, "");
        }
    }

    fn written(&self) -> MutexGuard<'_, Written> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        for stream in [Stream::Stdout, Stream::Stderr] {
            let unfinished = std::mem::take(self.written().buffer(stream));
            self.line(&mut self.written(), stream, &unfinished);
        }
        let dropped = self.written().dropped;
        if dropped > 0 {
            let (most, how) = (Size(self.budget.run.log as u64), self.budget.how("limits.log"));
            self.host(&format!("dropped {dropped} lines beyond the {most} that a run may log{how}"));
        }
    }
}

impl Written {
    /// Takes a line with a text of this size from the budget. Once a line did not fit, none does: a log with holes misleads.
    fn afford(&mut self, size: usize) -> bool {
        match self.left.checked_sub(size + limits::LOG_OVERHEAD) {
            Some(left) if self.dropped == 0 => {
                self.left = left;
                true
            }
            _ => {
                self.dropped += 1;
                false
            }
        }
    }

    fn buffer(&mut self, stream: Stream) -> &mut Vec<u8> {
        match stream {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        }
    }
}

/// A text as it is written: cut before it is escaped, so that no more is escaped than is written, and again after it has grown.
fn fit(text: &str) -> String {
    cut(&one_line(&cut(text, limits::LOG_LINE)), limits::LOG_LINE)
}

/// The fields as they are written, as far as a line goes.
fn shown(fields: &[(String, String)]) -> String {
    let mut text = String::new();
    for (key, value) in fields {
        let Some(room) = limits::LOG_LINE.checked_sub(text.len()) else { break };
        let gap = if text.is_empty() { "" } else { " " };
        let (key, value) = (cut(key, room), cut(value, room));
        text.push_str(&format!("{gap}{}={value:?}", one_line(&key)));
    }
    fit(&text)
}

impl Host for State {
    fn emit(&mut self, level: Level, message: String, fields: Vec<(String, String)>) {
        if self.gate.check(&Call::Log).is_ok() {
            self.gate.log().emit(level, &message, &fields);
        }
    }
}

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Becomes info.
    Stdout,
    /// Becomes warnings, and the last words.
    Stderr,
}

/// Stdout or stderr of a guest, as lines of its log. Never blocks and never fails.
#[derive(Clone, Debug)]
pub struct Lines {
    /// Where the lines go.
    pub log: Arc<Log>,
    /// As which stream.
    pub stream: Stream,
}

impl IsTerminal for Lines {
    fn is_terminal(&self) -> bool {
        false
    }
}

impl StdoutStream for Lines {
    fn async_stream(&self) -> Box<dyn AsyncWrite + Send + Sync> {
        Box::new(self.clone())
    }

    fn p2_stream(&self) -> Box<dyn OutputStream> {
        Box::new(self.clone())
    }
}

#[wasmtime_wasi::async_trait]
impl Pollable for Lines {
    async fn ready(&mut self) {}
}

impl OutputStream for Lines {
    fn write(&mut self, bytes: Bytes) -> StreamResult<()> {
        self.log.stream(self.stream, &bytes);
        Ok(())
    }

    fn flush(&mut self) -> StreamResult<()> {
        Ok(())
    }

    fn check_write(&mut self) -> StreamResult<usize> {
        Ok(limits::LOG_WRITE)
    }
}

impl AsyncWrite for Lines {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.log.stream(self.stream, bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log() -> Arc<Log> {
        Log::new(Speaker { plugin: "p".into(), digest: "d".into(), object: "ns/o".into() }, Limits::TRIAL)
    }

    #[test]
    fn a_panic_is_told_by_its_place_and_message() {
        let log = log();
        log.stream(Stream::Stderr, b"warming up\n\nthread '<unnamed>' (1) panicked at src/lib.rs:3:5:\nno ");
        log.stream(Stream::Stderr, b"way\nnote: run with `RUST_BACKTRACE=1`");
        assert_eq!(log.last_words().as_deref(), Some("panicked at src/lib.rs:3:5: no way"));
    }

    #[test]
    fn what_grows_when_it_is_escaped_counts_as_it_is_written() {
        let log = log();
        let before = log.written().left;
        let fields: Vec<_> = (0..100_000).map(|_| ("\u{202e}".repeat(9), "\u{1b}".repeat(9))).collect();
        log.emit(Level::Info, &"\u{1b}".repeat(1 << 20), &fields);
        let spent = before - log.written().left;
        let line = limits::LOG_LINE;
        assert!((2 * line - 200..=2 * line + limits::LOG_OVERHEAD).contains(&spent), "{spent}");
        for _ in 0..before {
            log.emit(Level::Info, "", &[]);
        }
        assert!(log.written().left < limits::LOG_OVERHEAD, "an empty line costs its overhead");
        let denied = log.written().dropped;
        log.denial("denied a socket");
        assert_eq!(log.written().left, 0);
        assert_eq!(log.written().dropped, denied, "a denial is never dropped");
    }

    #[test]
    fn last_words_survive_a_spent_budget_and_are_bounded() {
        let log = log();
        for _ in 0..200 {
            log.stream(Stream::Stderr, &[b'x'; 1000]);
            log.stream(Stream::Stderr, b"\n");
        }
        log.stream(Stream::Stderr, &[b'y'; 100_000]);
        assert!(log.written().stderr.len() <= limits::LOG_LINE);
        assert!(log.written().dropped > 100, "{:?}", log.written().dropped);
        assert!(log.last_words().is_some_and(|words| words.starts_with("yyy") && words.len() <= limits::SENTENCE));
    }
}
