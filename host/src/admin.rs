//! The admin face: `/livez`, `/readyz` and `/metrics` over HTTP.
//!
//! Live means that the process answers at all. Ready means that the host can do its work: it reads its plugins, and its API server
//! answers. One bad plugin does not make the host unready; it is told beside, as are kinds whose watch does not work.

use std::{fmt::Write, net::SocketAddr, sync::Arc};

use anyhow::Context;
use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::IntoResponse,
    routing::get,
};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::{controller::Controller, metrics::Metrics};

/// Name and state of each thing that the host depends on: `Ok`, or a sentence that says what is wrong.
pub type Checks = Vec<(&'static str, Result<(), String>)>;

/// Everything that the admin face shows.
#[derive(Clone)]
pub struct Admin {
    /// Metrics to render.
    pub metrics: Arc<Metrics>,
    /// For the gauges of informers.
    pub controller: Arc<Controller>,
    /// Asks for the checks of `/readyz`.
    pub checks: Arc<dyn Fn() -> Checks + Send + Sync>,
}

/// Binds the address, so that a port in use is an error at start. Port 0 takes a free one.
pub async fn bind(address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("listening on {address} for health and metrics"))
}

/// Answers until `shutdown`.
pub async fn serve(listener: TcpListener, admin: Admin, shutdown: CancellationToken) -> anyhow::Result<()> {
    let router = Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(admin);
    axum::serve(listener, router).with_graceful_shutdown(shutdown.cancelled_owned()).await.context("serving health and metrics")
}

async fn readyz(State(admin): State<Admin>) -> impl IntoResponse {
    let checks = (admin.checks)();
    let ready = checks.iter().all(|(_, state)| state.is_ok());
    let mut text = String::new();
    for (name, state) in &checks {
        let _ = match state {
            Ok(()) => writeln!(text, "[+] {name} ok"),
            Err(sentence) => writeln!(text, "[-] {name}: {sentence}"),
        };
    }
    for (kind, watched) in admin.controller.kinds().all() {
        let _ = match watched.health().trouble() {
            None => writeln!(text, "[+] watch of {kind} ok"),
            Some(sentence) => writeln!(text, "[!] watch of {kind}: {sentence}"),
        };
    }
    for (kind, collection) in admin.controller.kinds().all_read() {
        let _ = match collection.health().trouble() {
            None => writeln!(text, "[+] watch of {kind}, to be read, ok"),
            Some(sentence) => writeln!(text, "[!] watch of {kind}, to be read: {sentence}"),
        };
    }
    (if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, text)
}

async fn metrics(State(admin): State<Admin>) -> impl IntoResponse {
    for (kind, watched) in admin.controller.kinds().all() {
        let age = watched.health().last_contact.map(|at| at.elapsed());
        admin.metrics.informer(&kind, watched.len(), age);
    }
    admin.metrics.read_only(admin.controller.kinds().all_read().into_iter().map(|(kind, collection)| (kind, collection.len())));
    ([(header::CONTENT_TYPE, "application/openmetrics-text; version=1.0.0; charset=utf-8")], admin.metrics.render())
}
