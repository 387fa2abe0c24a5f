//! One server process of a control plane, which never outlives the process that started it.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// Runs a program and ends it as soon as standard input ends, which the kernel sees to when our process is gone, however it went.
/// (`PR_SET_PDEATHSIG` would fire when the *thread* that started the child ends, and needs unsafe code or a program of our own in between.)
/// A line on standard input ends the program too, but leaves the directory to us.
const WATCH: &str = r#"
directory=$1; shift
exec 3<&0 </dev/null
"$@" 3<&- &
program=$!
(
    asked=
    read -r asked <&3
    kill -KILL "$program"
    [ -n "$asked" ] || rm -rf "$directory" || { sleep 1; rm -rf "$directory"; }
) >/dev/null 2>&1 &
watch=$!
exec 3<&-
wait "$program" 2>/dev/null
status=$?
kill "$watch" 2>/dev/null
wait "$watch" 2>/dev/null
exit "$status"
"#;

/// How much of a log's end is read for a failure's message.
const TAIL_BYTES: u64 = 16 * 1024;
const TAIL_LINES: usize = 15;

/// A running program with its log file.
#[derive(Debug)]
pub struct Process {
    name: &'static str,
    log: PathBuf,
    watch: Child,
    /// Its end ends the program.
    lifeline: Option<ChildStdin>,
}

impl Process {
    /// Starts `program`, which logs to `<name>.log` in `directory`. If our process dies the program is killed and `directory` removed.
    pub fn start(name: &'static str, program: &Path, flags: &[String], directory: &Path) -> Result<Self> {
        // It starts in the directory, where a relative path would lead elsewhere.
        let program = std::path::absolute(program).with_context(|| format!("cannot find {}", program.display()))?;
        let log = directory.join(format!("{name}.log"));
        let output = File::options().create(true).append(true).open(&log).with_context(|| format!("cannot open {}", log.display()))?;
        let errors = output.try_clone().context("cannot share a log file")?;
        let mut watch = Command::new("/bin/sh")
            .args(["-c", WATCH, name])
            .arg(directory)
            .arg(&program)
            .args(flags)
            .current_dir(directory)
            .stdin(Stdio::piped())
            .stdout(output)
            .stderr(errors)
            // Not in the terminal's group: Ctrl-C reaches us alone, and we end things in order.
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let lifeline = watch.stdin.take();
        Ok(Self { name, log, watch, lifeline })
    }

    /// The program's short name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The exit status, if the program has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.watch.try_wait().ok().flatten()
    }

    /// The last lines of the log.
    pub fn log_tail(&self) -> String {
        tail(&self.log).unwrap_or_else(|error| format!("(its log cannot be read: {error})"))
    }

    /// Asks for the end without waiting for it.
    pub fn ask_to_end(&mut self) {
        if let Some(mut lifeline) = self.lifeline.take() {
            // An error means that the watch is gone, and the program with it.
            let _ = lifeline.write_all(b"end\n");
            // Closed only once the watch has ended, lest it take the end of the pipe for ours.
            self.lifeline = Some(lifeline);
        }
    }

    /// Ends the program and waits until it is gone.
    pub fn end(&mut self) {
        /// SIGKILL cannot be refused; what takes this long is a machine that hardly runs.
        const PATIENCE: Duration = Duration::from_secs(10);
        self.ask_to_end();
        let start = Instant::now();
        while self.ended().is_none() && start.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(2));
        }
        self.lifeline = None;
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

fn tail(log: &Path) -> std::io::Result<String> {
    let mut file = File::open(log)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    Ok(lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn until(what: &str, mut holds: impl FnMut() -> bool) {
        let start = Instant::now();
        while !holds() {
            assert!(start.elapsed() < Duration::from_secs(20), "not within 20 s: {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn alive(pid: &str) -> bool {
        std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
    }

    fn sleeper(directory: &Path) -> (Process, String) {
        let script = "echo $$ >pid.new; mv pid.new pid; exec sleep 1000".to_owned();
        let process = Process::start("sleeper", Path::new("/bin/sh"), &["-c".to_owned(), script], directory).unwrap();
        until("the program runs", || directory.join("pid").exists());
        (process, std::fs::read_to_string(directory.join("pid")).unwrap().trim().to_owned())
    }

    #[test]
    fn ending_a_process_ends_the_program_and_leaves_the_directory() {
        let directory = tempfile::tempdir().unwrap();
        let (mut process, pid) = sleeper(directory.path());
        assert!(alive(&pid) && process.ended().is_none());
        process.end();
        assert!(!alive(&pid));
        assert!(directory.path().join("pid").exists());
    }

    #[test]
    fn when_the_pipe_to_us_breaks_the_program_is_killed_and_the_directory_removed() {
        let directory = tempfile::tempdir().unwrap();
        let (mut process, pid) = sleeper(directory.path());
        process.lifeline = None; // what the kernel does when our process is killed
        until("the program is gone", || !alive(&pid));
        until("the directory is gone", || !directory.path().exists());
    }

    #[test]
    fn a_program_that_ends_by_itself_is_seen_with_its_status_and_the_end_of_its_log() {
        let directory = tempfile::tempdir().unwrap();
        let script = "for i in $(seq 100); do echo line $i; done; echo the reason >&2; exit 7".to_owned();
        let mut process = Process::start("failing", Path::new("/bin/sh"), &["-c".to_owned(), script], directory.path()).unwrap();
        until("the end is seen", || process.ended().is_some());
        assert_eq!(process.ended().unwrap().code(), Some(7));
        let tail = process.log_tail();
        assert!(tail.ends_with("line 100\nthe reason"), "{tail}");
        assert_eq!(tail.lines().count(), TAIL_LINES);
    }
}
