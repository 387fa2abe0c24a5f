//! The command line: one file a verb.

use std::{ffi::OsString, process::ExitCode};

use clap::{Parser, Subcommand};
use tokio_util::sync::CancellationToken;

use crate::{log::LogArgs, plugin::compile, shutdown};

pub mod cluster;
pub mod dev;
mod kinds;
pub mod plugins;
pub mod push;
pub mod retry;
pub mod run;
pub mod span;

/// Run Kubernetes reconcile handlers as WebAssembly plugins.
#[derive(Debug, Parser)]
#[command(name = "berth", version, arg_required_else_help = true)]
pub struct Cli {
    #[command(flatten)]
    log: LogArgs,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Run the host against a cluster
    Run(Box<run::Args>),
    /// Run a local cluster and the host against it, for development
    Dev(Box<dev::Args>),
    /// Put a plugin into a cluster and wait until it serves or is refused
    Push(Box<push::Args>),
    /// Show the plugins of a host and how they are doing
    Plugins(Box<plugins::Args>),
    /// Have objects tried again that were given up on
    Retry(Box<retry::Args>),
    /// The compiler child: reads a component from standard input
    #[command(name = compile::VERB, hide = true)]
    Compile {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
}

impl Cli {
    /// Does what was asked for.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let Self { log, verb } = self;
        let verb = match verb {
            // The child has nothing to log and no runtime to start.
            Verb::Compile { arguments } => return compile::child_main(arguments.into_iter()).map(|()| ExitCode::SUCCESS),
            verb => verb,
        };
        log.init()?;
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        let code = runtime.block_on(async {
            let shutdown = shutdown::on_signal()?;
            match verb {
                Verb::Run(args) => args.run(shutdown).await.map(|()| ExitCode::SUCCESS),
                Verb::Dev(args) => args.run(shutdown).await.map(|()| ExitCode::SUCCESS),
                Verb::Push(args) => args.run(shutdown).await,
                Verb::Plugins(args) => unless(shutdown, args.run()).await,
                Verb::Retry(args) => unless(shutdown, args.run()).await,
                Verb::Compile { .. } => unreachable!("handled above"),
            }
        });
        // A guest or a lookup that still blocks a thread does not hold up the end.
        runtime.shutdown_background();
        code
    }
}

/// Does what ends by itself, unless it is interrupted.
async fn unless(shutdown: CancellationToken, work: impl Future<Output = anyhow::Result<ExitCode>>) -> anyhow::Result<ExitCode> {
    tokio::select! {
        done = work => done,
        () = shutdown.cancelled() => anyhow::bail!("interrupted"),
    }
}
