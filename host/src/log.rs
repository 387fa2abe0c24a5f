//! Logging to standard error: text for people, JSON for collectors.

use std::io::IsTerminal;

use clap::{Args, ValueEnum};
use tracing_subscriber::EnvFilter;

/// How the host logs.
#[derive(Args, Clone, Debug)]
pub struct LogArgs {
    /// What is logged: a level, or filters such as `info,berth_host=debug,guest=trace`
    #[arg(long = "log", env = "BERTH_LOG", default_value = "info", value_name = "FILTER")]
    filter: String,
    /// The format of log lines
    #[arg(long, env = "BERTH_LOG_FORMAT", default_value = "text", value_name = "FORMAT")]
    log_format: Format,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    Text,
    Json,
}

/// kube's own stack, by which `berth dev` reaches its control plane, reports each request that fails as an error of its own, beside the
/// line of whoever sent it, who knows whether it is one. To see these lines, name the target in the filter.
const NOT_OURS: &str = "kube_client::client::builder=off";

impl LogArgs {
    /// Sets the process up. Called once.
    pub fn init(&self) -> anyhow::Result<()> {
        let filter = EnvFilter::try_new(format!("{NOT_OURS},{}", self.filter))
            .map_err(|error| anyhow::anyhow!("--log {:?}: {error}", self.filter))?;
        let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
        let done = match self.log_format {
            Format::Text => builder.with_ansi(std::io::stderr().is_terminal()).try_init(),
            Format::Json => builder.json().with_current_span(true).with_span_list(false).try_init(),
        };
        done.map_err(|error| anyhow::anyhow!("setting up the log: {error}"))
    }
}
