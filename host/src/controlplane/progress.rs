//! What a long preparation tells the person who waits for it.

use std::io::{IsTerminal, Write};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How often a step is told where lines cannot be rewritten.
const PLAIN_PACE: Duration = Duration::from_secs(15);
/// How often it is rewritten on a terminal.
const TERMINAL_PACE: Duration = Duration::from_millis(200);

/// Where progress goes.
#[derive(Debug)]
pub struct Progress {
    to: To,
    told: Mutex<Option<Instant>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum To {
    Terminal,
    Lines,
    Nowhere,
}

impl Progress {
    /// To standard error: a line rewritten in place on a terminal, a line now and then elsewhere.
    pub fn stderr() -> Self {
        Self::new(if std::io::stderr().is_terminal() { To::Terminal } else { To::Lines })
    }

    /// Says nothing.
    pub fn silent() -> Self {
        Self::new(To::Nowhere)
    }

    fn new(to: To) -> Self {
        Self { to, told: Mutex::new(None) }
    }

    /// A remark that stays.
    pub fn say(&self, line: &str) {
        match self.to {
            To::Terminal => write(&format!("\r\x1b[K{line}\n")),
            To::Lines => write(&format!("{line}\n")),
            To::Nowhere => {}
        }
    }

    /// Where a step is now. Told only now and then, so it may be called for every small thing.
    pub fn step(&self, line: impl FnOnce() -> String) {
        let pace = match self.to {
            To::Terminal => TERMINAL_PACE,
            To::Lines => PLAIN_PACE,
            To::Nowhere => return,
        };
        {
            let mut told = self.told.lock().expect("no panic while the time of the last line is held");
            if told.is_some_and(|at| at.elapsed() < pace) {
                return;
            }
            *told = Some(Instant::now());
        }
        match self.to {
            To::Terminal => write(&format!("\r\x1b[K{}", line())),
            _ => write(&format!("{}\n", line())),
        }
    }
}

/// A closed standard error is no reason to stop.
fn write(text: &str) {
    let mut stderr = std::io::stderr().lock();
    let _ = stderr.write_all(text.as_bytes());
    let _ = stderr.flush();
}

/// `1m 05s`
pub fn elapsed(since: Instant) -> String {
    let seconds = since.elapsed().as_secs();
    if seconds < 60 { format!("{seconds}s") } else { format!("{}m {:02}s", seconds / 60, seconds % 60) }
}
