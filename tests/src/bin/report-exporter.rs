//! The demo report exporter as a process: prints its address, and runs until it is told to stop.

use std::{net::SocketAddr, path::PathBuf};

use berth_tests::exporter::Exporter;
use clap::Parser;

/// Makes each report once per key (`PUT /reports/KEY`), and misbehaves when told (`POST /control`).
#[derive(Debug, Parser)]
#[command(after_help = "Examples:
  curl -d '{\"only\": \"broken\", \"fail\": 503}' http://ADDRESS/control
  curl -d '{\"only\": \"slow\", \"hold\": \"before\"}' http://ADDRESS/control
  curl http://ADDRESS/exports")]
struct Args {
    /// Where to listen; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Folder for the reports.
    #[arg(long)]
    data: PathBuf,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let Args { listen, data } = Args::parse();
    let exporter = Exporter::start_on(listen, &data).await?;
    println!("{}", exporter.url());
    berth_tests::process::told_to_stop().await
}
