//! From signals to an orderly end: the first SIGTERM or SIGINT asks for it, a second SIGINT ends at once.

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// The exit code of a process that a second interrupt ended, as a shell would report it.
pub const INTERRUPTED: i32 = 130;

/// Cancels the returned token at the first signal. The listener lives in a task of its own until the process ends; only a second
/// interrupt by hand is impatient, as a second SIGTERM (which some supervisors send) must not kill runs that are being finished.
pub fn on_signal() -> anyhow::Result<CancellationToken> {
    let token = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate()).context("listening for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("listening for SIGINT")?;
    let asked = token.clone();
    tokio::spawn(async move {
        let mut interrupts = 0;
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => interrupts += 1,
            }
            if interrupts >= 2 {
                tracing::warn!("interrupted twice; ending at once");
                std::process::exit(INTERRUPTED);
            }
            if !asked.is_cancelled() {
                tracing::info!("stopping");
                asked.cancel();
            }
        }
    });
    Ok(token)
}
