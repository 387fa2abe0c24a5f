//! Child processes of tests and demo: the log goes to a file, and none outlives its owner.

use std::{
    fs::OpenOptions,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};

/// How much of a log is shown when something fails.
const TAIL: usize = 80;

/// Kills the process whose id it is given when its standard input ends: by the kernel, however its owner ended.
const GUARD: &str = r#"read -r _; kill -KILL "$1""#;

/// A running child. Dropping it kills it; the death of its owner does too.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    guard: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `command`, whose output is appended to the file `log`.
    pub fn start(name: &str, mut command: Command, log: &Path) -> anyhow::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(log).with_context(|| format!("opening {}", log.display()))?;
        let both = file.try_clone().context("sharing the log file")?;
        // A group of its own: Ctrl-C at the terminal reaches its owner alone, which ends it.
        command.stdin(Stdio::null()).stdout(file).stderr(both).process_group(0);
        let mut child = command.spawn().with_context(|| format!("starting {name} ({})", command.get_program().display()))?;
        let guard = Command::new("/bin/sh")
            .args(["-c", GUARD, "guard", &child.id().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn();
        match guard {
            Ok(guard) => Ok(Self { name: name.to_owned(), child, guard, log: log.to_owned() }),
            Err(error) => {
                child.kill().ok();
                child.wait().ok();
                Err(error).context("starting the guard of a child")
            }
        }
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Everything that it logged.
    pub fn log(&self) -> String {
        std::fs::read(&self.log).map(|log| String::from_utf8_lossy(&log).into_owned()).unwrap_or_default()
    }

    /// The last lines of its log, for a message about a failure.
    pub fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        let tail = &lines[lines.len().saturating_sub(TAIL)..];
        format!("--- the last {} lines of {} ({})\n{}\n---", tail.len(), self.name, self.log.display(), tail.join("\n"))
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let id = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw).context("a child has a process id")?;
        kill_process(id, signal).with_context(|| format!("sending {signal:?} to {}", self.name))
    }

    /// SIGKILL, and waits for its end.
    pub fn kill(&mut self) {
        self.dismiss_guard();
        // It may have ended by itself.
        self.child.kill().ok();
        self.child.wait().ok();
    }

    /// Before the child is waited for: until then its process id is nobody else's.
    fn dismiss_guard(&mut self) {
        self.guard.kill().ok();
        self.guard.wait().ok();
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        let ended = self.child.try_wait().ok().flatten();
        if ended.is_some() {
            self.dismiss_guard();
        }
        ended
    }

    /// Waits for its end.
    pub async fn end(&mut self, deadline: Duration) -> anyhow::Result<ExitStatus> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.ended() {
                return Ok(status);
            }
            if start.elapsed() > deadline {
                bail!("{} did not end within {deadline:?}\n{}", self.name, self.log_tail());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// SIGTERM, and waits for its end.
    pub async fn terminate(&mut self, deadline: Duration) -> anyhow::Result<ExitStatus> {
        self.signal(Signal::TERM)?;
        self.end(deadline).await
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// An address on 127.0.0.1 that nobody listens on now.
pub fn free_address() -> anyhow::Result<std::net::SocketAddr> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").context("looking for a free port")?;
    listener.local_addr().context("looking for a free port")
}

/// Resident memory of a process in bytes.
pub fn resident(id: u32) -> anyhow::Result<u64> {
    Ok(kernel_number(id, "status", "VmRSS")? * 1024)
}

/// A number that the kernel tells of a process, such as `Threads` of `status`; what is memory is in KiB.
pub fn kernel_number(id: u32, file: &str, field: &str) -> anyhow::Result<u64> {
    let path = format!("/proc/{id}/{file}");
    let text = std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    let value = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let value = value.with_context(|| format!("{path} has no {field}: the process has ended"))?;
    value.trim().trim_end_matches(" kB").parse().with_context(|| format!("reading {field} of {path}"))
}

/// CPU time that a process has had so far.
pub fn cpu(id: u32) -> anyhow::Result<Duration> {
    let path = format!("/proc/{id}/stat");
    let text = std::fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
    // The second field is a name in parentheses, which may hold anything.
    let fields: Vec<&str> = text.rsplit_once(')').context("a process has a name")?.1.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<u64>().ok()).context("Linux counts CPU time");
    // In ticks of 10 ms on every Linux.
    Ok(Duration::from_millis(10 * (ticks(11)? + ticks(12)?)))
}

/// Waits for SIGTERM or Ctrl-C.
pub async fn told_to_stop() -> anyhow::Result<()> {
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()).context("listening for SIGTERM")?;
    tokio::select! {
        _ = terminate.recv() => Ok(()),
        interrupted = tokio::signal::ctrl_c() => interrupted.context("listening for Ctrl-C"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[tokio::test]
    async fn a_child_logs_to_its_file_and_ends_on_sigterm() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let script = "trap 'echo bye; exit 3' TERM; echo ready; while true; do sleep 0.01; done";
        let mut process = Process::start("child", shell(script), &dir.path().join("log")).expect("starts");
        crate::eventually::eventually(
            Duration::from_secs(5),
            async || if process.log() == "ready\n" { Ok(()) } else { Err(process.log()) },
        )
        .await;
        assert_eq!(process.terminate(Duration::from_secs(5)).await.expect("ends").code(), Some(3));
        assert!(process.log_tail().contains("ready\nbye\n---"), "{}", process.log_tail());
    }

    #[tokio::test]
    async fn a_child_ends_with_its_owner() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let process = Process::start("child", shell("exec sleep 600"), &dir.path().join("log")).expect("starts");
        let id = process.id();
        assert!(resident(id).is_ok() && cpu(id).is_ok());
        drop(process);
        assert!(resident(id).is_err() && cpu(id).is_err());
    }

    #[tokio::test]
    async fn a_child_is_killed_when_the_pipe_to_its_owner_breaks() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let mut process = Process::start("child", shell("exec sleep 600"), &dir.path().join("log")).expect("starts");
        process.guard.stdin = None; // what the kernel does when we are killed
        assert_eq!(process.end(Duration::from_secs(5)).await.expect("ends").code(), None);
    }

    #[tokio::test]
    async fn a_child_that_does_not_end_is_told_with_its_log() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let mut process = Process::start("child", shell("echo stuck; exec sleep 600"), &dir.path().join("log")).expect("starts");
        crate::eventually::eventually(Duration::from_secs(5), async || if process.log().is_empty() { Err("no log") } else { Ok(()) }).await;
        let error = process.end(Duration::from_millis(50)).await.expect_err("it sleeps").to_string();
        assert!(error.contains("child did not end within 50ms") && error.contains("stuck"), "{error}");
    }
}
