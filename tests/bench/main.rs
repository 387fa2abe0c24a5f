//! `make bench`: Berth beside operators written with other frameworks, on one machine, one API server and the same back ends.
//!
//! Without arguments every part runs that has no result yet; `--only P3` runs one part again. Each part is a process of its own with a
//! control plane of its own, so that none finds what another left behind.
//!
//! Whatever is compared is measured within one run, in turn, because the speed of a machine changes from hour to hour.

mod bed;
mod cache;
mod drain;
mod endurance;
mod failover;
mod figure;
mod growth;
mod idle;
mod latency;
mod neighbour;
mod reload;
mod requests;
mod resync;
mod ring;
mod sandbox;
mod start;
mod system;

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, bail, ensure};
use berth_tests::workspace;
use clap::Parser;
use figure::Figure;
use futures::future::{FutureExt, LocalBoxFuture};

/// Measure Berth beside its peers.
#[derive(Parser)]
struct Args {
    /// Run these parts alone, such as P3, whether they have results or not
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    only: Vec<String>,
    /// Run one part in this process, and write its figures to a file
    #[arg(long, hide = true, value_name = "FILE", requires = "only")]
    into: Option<PathBuf>,
}

/// The first for a quick look (`BENCH_QUICK=1`), the second otherwise.
fn quick<T>(look: T, whole: T) -> T {
    if std::env::var_os("BENCH_QUICK").is_some_and(|value| value == "1") { look } else { whole }
}

/// A part: what it is called, what it measures, and how.
struct Part {
    id: &'static str,
    about: &'static str,
    measure: fn() -> LocalBoxFuture<'static, anyhow::Result<Vec<Figure>>>,
}

const PARTS: [Part; 14] = [
    Part { id: "P1", about: "drain of EmailRequests and ReportJobs", measure: || drain::measure().boxed_local() },
    Part { id: "P2", about: "cost of the sandbox", measure: || sandbox::measure().boxed_local() },
    Part { id: "P3", about: "memory of idle handlers", measure: || idle::measure().boxed_local() },
    Part { id: "P4", about: "hot reload under load", measure: || reload::measure().boxed_local() },
    Part { id: "P5", about: "failover", measure: || failover::measure().boxed_local() },
    Part { id: "P6", about: "memory of the informer's cache", measure: || cache::measure().boxed_local() },
    Part { id: "P7", about: "requests to the API server", measure: || requests::measure().boxed_local() },
    Part { id: "P8", about: "time from apply to done", measure: || latency::measure().boxed_local() },
    Part { id: "P9", about: "noisy neighbours", measure: || neighbour::measure().boxed_local() },
    Part { id: "P10", about: "resync with nothing to do", measure: || resync::measure().boxed_local() },
    Part { id: "P11", about: "a nonce through a chain of operators", measure: || ring::measure().boxed_local() },
    Part { id: "P12", about: "growth with objects and plugins", measure: || growth::measure().boxed_local() },
    Part { id: "P13", about: "start", measure: || start::measure().boxed_local() },
    Part { id: "P14", about: "a million reconciles", measure: || endurance::measure().boxed_local() },
];

fn main() -> anyhow::Result<()> {
    let Args { only, into } = Args::parse();
    for id in &only {
        ensure!(PARTS.iter().any(|part| part.id == id), "there is no part {id}: there are {}", PARTS.map(|part| part.id).join(", "));
    }
    match into {
        Some(file) => {
            let part = PARTS.iter().find(|part| part.id == only[0]).context("it was looked up above")?;
            // The driver stands in for users and back ends, and is given no more threads than they need.
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
            figure::write(&file, &runtime.block_on((part.measure)())?)
        }
        None => all(&only),
    }
}

/// Runs parts one after the other, and writes all results that there are.
fn all(only: &[String]) -> anyhow::Result<()> {
    let folder = workspace::target()?.join("bench");
    let host = workspace::berth()?;
    let mut failed = Vec::new();
    for part in &PARTS {
        let file = folder.join("parts").join(format!("{}.json", part.id));
        let wanted = if only.is_empty() { !is_newer(&file, &host) } else { only.iter().any(|id| id == part.id) };
        if !wanted {
            continue;
        }
        eprintln!("{}: {}", part.id, part.about);
        let started = std::time::Instant::now();
        let status = Command::new(std::env::current_exe()?).args(["--only", part.id, "--into"]).arg(&file).status()?;
        eprintln!("{}: {} s", part.id, started.elapsed().as_secs());
        if !status.success() {
            failed.push(part.id);
        }
    }
    let mut figures = Vec::new();
    for part in &PARTS {
        let file = folder.join("parts").join(format!("{}.json", part.id));
        if file.is_file() {
            figures.extend(figure::read(&file)?);
        }
    }
    let results = folder.join("results.json");
    figure::write(&results, &figures)?;
    print!("{}", figure::table(&figures));
    eprintln!("written to {}", results.display());
    if failed.is_empty() { Ok(()) } else { bail!("not measured: {}", failed.join(", ")) }
}

/// A result of a host that has been built anew since is none.
fn is_newer(file: &Path, than: &Path) -> bool {
    let modified = |path: &Path| path.metadata().and_then(|metadata| metadata.modified()).ok();
    matches!((modified(file), modified(than)), (Some(file), Some(than)) if file > than)
}
