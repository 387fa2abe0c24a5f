//! The demo mail gateway as a process: prints its address, and runs until it is told to stop.

use std::{net::SocketAddr, path::PathBuf};

use berth_tests::gateway::Gateway;
use clap::Parser;

/// Delivers each message once per Idempotency-Key (`POST /send`), and misbehaves when told (`POST /control`).
#[derive(Debug, Parser)]
#[command(after_help = "Examples:
  curl -d '{\"fail\": 503, \"times\": 3}' http://ADDRESS/control
  curl -d '{\"drop_answer\": 1}' http://ADDRESS/control
  curl http://ADDRESS/deliveries")]
struct Args {
    /// Where to listen; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Folder for the deliveries.
    #[arg(long)]
    data: PathBuf,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let Args { listen, data } = Args::parse();
    let gateway = Gateway::start_on(listen, &data).await?;
    println!("{}", gateway.url());
    berth_tests::process::told_to_stop().await
}
