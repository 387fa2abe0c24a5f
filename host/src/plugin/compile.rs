//! Compilation in a child process of `berth`, so that a hostile or merely large component costs no more than it may.
//!
//! # Expected flow
//! The [`Compiler`] starts `berth compile-component OUT MEMORY CPU SIZE`, whose `main` calls [`child_main`]: it bounds itself, reads the
//! component from stdin and writes the artefact to `OUT`.
//!
//! # Guarantees
//! One compilation at a time, on a few cores. A child ends with its parent, at its own limits, or at the latest at [`CompileLimits::wall`].
//!
//! # Assumptions
//! The thread that calls [`Compiler::compile`] is one of the runtime's workers, which live as long as the process: the kernel kills
//! the child when the *thread* that started it ends.

use std::{
    ffi::OsString,
    io::Read,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use rustix::process::{Resource, Rlimit, Signal, nice, set_parent_process_death_signal, setrlimit};
use tokio::{io::AsyncWriteExt, process::Command, sync::Semaphore};

use super::{
    engine,
    limits::{CompileLimits, SENTENCE, Size},
    text::one_line,
};
use crate::{package::MAX_COMPONENT, text::cut};

/// The hidden verb.
pub const VERB: &str = "compile-component";

/// How much the child gives way to the host: renewing the lease comes first.
const NICENESS: i32 = 10;

/// More cores than this the child leaves alone: a thread takes memory, and few components have so much code.
const THREADS: usize = 4;

/// Compiles one component after the other.
pub struct Compiler {
    binary: PathBuf,
    limits: CompileLimits,
    turn: Semaphore,
}

/// Why there is no artefact.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// The component is to blame; a sentence.
    #[error("{0}")]
    Component(String),
    /// The host is to blame.
    #[error("cannot run the compiler {0}: {1}")]
    Host(PathBuf, std::io::Error),
    /// Nobody of here is to blame, as far as is known.
    #[error("the compiler was ended from outside, most likely for lack of memory on the machine")]
    Killed,
}

impl Compiler {
    /// With the `berth` binary.
    pub fn new(binary: PathBuf, limits: CompileLimits) -> Self {
        Self { binary, limits, turn: Semaphore::new(1) }
    }

    /// What a compilation may take, in bytes.
    pub fn memory(&self) -> u64 {
        self.limits.memory
    }

    /// Waits for the turn to compile. Whoever has it looks into the cache again first.
    pub async fn turn(&self) -> tokio::sync::SemaphorePermit<'_> {
        self.turn.acquire().await.expect("the semaphore is never closed")
    }

    /// Compiles `component` to the file `out`. Dropping the future kills the child.
    pub async fn compile(&self, component: &Bytes, out: &Path) -> Result<(), CompileError> {
        let host = |error| CompileError::Host(self.binary.clone(), error);
        let CompileLimits { memory, cpu, wall, size } = self.limits;
        let mut child = Command::new(&self.binary)
            .arg(VERB)
            .arg(out)
            .args([memory.to_string(), cpu.as_secs().max(1).to_string(), size.to_string()])
            .env_clear()
            // Each thread's own would take 64 MiB of the address space that the child may have.
            .env("MALLOC_ARENA_MAX", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(host)?;
        let mut input = child.stdin.take().expect("stdin is piped");
        let work = async {
            // A child that ends early closes the pipe; its status says why.
            let _ = input.write_all(component).await;
            drop(input);
            child.wait_with_output().await
        };
        match tokio::time::timeout(wall, work).await {
            Ok(output) => {
                let output = output.map_err(host)?;
                match output.status {
                    status if status.success() => Ok(()),
                    // No limit of its own ends it like this.
                    status if status.signal() == Some(Signal::KILL.as_raw()) => Err(CompileError::Killed),
                    status => Err(CompileError::Component(self.reason(status, &output.stderr))),
                }
            }
            Err(_) => Err(CompileError::Component(format!("Compiling it took more than {wall:?} (`--compile-time` of berth run)."))),
        }
    }

    fn reason(&self, status: ExitStatus, stderr: &[u8]) -> String {
        let said = String::from_utf8_lossy(stderr);
        let out_of_memory = said.contains("memory allocation of") || said.contains("out of memory");
        let signal = status.signal().and_then(Signal::from_named_raw);
        match signal {
            Some(Signal::XCPU) => format!("Compiling it took more than {:?} of CPU (`--compile-cpu` of berth run).", self.limits.cpu),
            Some(Signal::XFSZ) => {
                format!("Compiling it makes more than {} of machine code (`--compile-size` of berth run).", Size(self.limits.size))
            }
            _ if out_of_memory => {
                format!("Compiling it needs more than {} of memory (`--compile-memory` of berth run).", Size(self.limits.memory))
            }
            Some(signal) => format!("Compiling it ended with {signal:?}."),
            None => {
                let line = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ");
                format!("It cannot be compiled: {}.", one_line(&cut(&line, SENTENCE / 2)).trim_end_matches('.'))
            }
        }
    }
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(THREADS)
}

/// What the child does; `arguments` are those after the verb.
pub fn child_main(mut arguments: impl Iterator<Item = OsString>) -> Result<()> {
    let out = PathBuf::from(arguments.next().context("the path of the artefact is missing")?);
    let mut number = || arguments.next().and_then(|text| text.to_str()?.parse::<u64>().ok()).context("a number is missing");
    let (memory, cpu, size) = (number()?, number()?, number()?);
    confine(memory, Duration::from_secs(cpu), size)?;
    let mut component = Vec::new();
    std::io::stdin().take(MAX_COMPONENT as u64 + 1).read_to_end(&mut component)?;
    ensure!(component.len() <= MAX_COMPONENT, "the component is larger than {}", Size(MAX_COMPONENT as u64));
    // Where no more threads may be, one does it all.
    let parallel = rayon::ThreadPoolBuilder::new().num_threads(threads()).build_global().is_ok();
    let artefact = engine::for_compiling(parallel)?.precompile_component(&component)?;
    if let Err(error) = std::fs::write(&out, artefact) {
        bail!("cannot write the artefact to {}: {error}", out.display());
    }
    Ok(())
}

fn confine(memory: u64, cpu: Duration, size: u64) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let most = |limit| Rlimit { current: Some(limit), maximum: Some(limit) };
    setrlimit(Resource::Core, most(0))?;
    setrlimit(Resource::As, most(memory))?;
    setrlimit(Resource::Fsize, most(size))?;
    // The signal that can be told apart comes first.
    setrlimit(Resource::Cpu, Rlimit { current: Some(cpu.as_secs()), maximum: Some(cpu.as_secs() + 1) })?;
    nice(NICENESS)?;
    Ok(())
}
