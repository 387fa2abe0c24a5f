//! The `berth` binary: parses, calls the library, and turns the end into an exit code.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    berth_host::memory::few_arenas();
    let cli = berth_host::cli::Cli::parse();
    match cli.run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("berth: {error:#}");
            ExitCode::FAILURE
        }
    }
}
