//! Counts what the controllers do, and serves it as JSON.

use std::{
    convert::Infallible,
    future::ready,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
};

use anyhow::Context;
use hyper::{Method, Request, Response, StatusCode, body::Incoming, header, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::net::TcpListener;

/// Over all controllers.
pub struct Counts {
    reconciles: AtomicU64,
    errors: AtomicU64,
    /// Controllers that have not got their first list yet.
    unsynced: AtomicUsize,
}

impl Counts {
    pub fn new(controllers: usize) -> Self {
        Self { reconciles: AtomicU64::new(0), errors: AtomicU64::new(0), unsynced: AtomicUsize::new(controllers) }
    }

    pub fn reconcile(&self) {
        self.reconciles.fetch_add(1, Relaxed);
    }

    pub fn error(&self) {
        self.errors.fetch_add(1, Relaxed);
    }

    pub fn synced(&self) {
        self.unsynced.fetch_sub(1, Relaxed);
    }

    fn answer(&self, request: &Request<Incoming>) -> Response<String> {
        let mut response = Response::new(String::new());
        if request.method() != Method::GET || request.uri().path() != "/count" {
            *response.status_mut() = StatusCode::NOT_FOUND;
            return response;
        }
        response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
        let (reconciles, errors) = (self.reconciles.load(Relaxed), self.errors.load(Relaxed));
        *response.body_mut() = json!({"reconciles": reconciles, "errors": errors, "synced": self.unsynced.load(Relaxed) == 0}).to_string();
        response
    }
}

/// Serves `GET /count` from now on.
pub async fn serve(address: SocketAddr, counts: Arc<Counts>) -> anyhow::Result<()> {
    let listener = TcpListener::bind(address).await.with_context(|| format!("listening on {address}"))?;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let counts = counts.clone();
            let service = service_fn(move |request| ready(Ok::<_, Infallible>(counts.answer(&request))));
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
    Ok(())
}
