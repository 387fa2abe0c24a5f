//! The demo report exporter: makes a report as a real file, once per key, and can be told to fail or never to answer.

use std::{
    fs::File,
    io::{self, Write},
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use anyhow::Context;
use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Path as Segment, State},
    http::{HeaderMap, HeaderValue, StatusCode, Uri, header},
    response::Response,
    routing::{get, post, put},
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::sync::oneshot;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    behaviour::{Behaviour, Script, answer, control, problem},
    ledger::{Ledger, unix_ms},
    server::{HangUp, Server, hang_up},
};

/// What is wanted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    /// Name of the report.
    pub report: String,
    /// Such as `pdf`; also the end of the file's name.
    pub format: String,
}

/// A report that exists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Export {
    /// Its key.
    pub key: String,
    /// What was ordered.
    #[serde(flatten)]
    pub order: Order,
    /// When it was made, in milliseconds since 1970.
    pub at_ms: u64,
}

/// A `PUT`, whatever became of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Received {
    /// Its key.
    pub key: String,
    /// What was ordered, if it could be read.
    pub order: Option<Order>,
    /// When, in milliseconds since 1970.
    pub at_ms: u64,
    /// The status of the answer; none while there is none, and for good where the exporter hung up.
    pub status: Option<u16>,
}

/// A running exporter.
#[derive(Debug)]
pub struct Exporter {
    server: Server,
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    script: Script,
    reports: PathBuf,
    exports: Ledger<Export>,
    received: Mutex<Vec<Received>>,
    /// Requests go on when their client hangs up, as on a real server.
    work: TaskTracker,
    stop: CancellationToken,
}

impl Exporter {
    /// An exporter on a free port of 127.0.0.1 that keeps its reports in `data`.
    pub async fn start(data: &Path) -> anyhow::Result<Self> {
        Self::start_on(([127, 0, 0, 1], 0).into(), data).await
    }

    /// The same on a given address.
    pub async fn start_on(listen: SocketAddr, data: &Path) -> anyhow::Result<Self> {
        let reports = data.join("reports");
        std::fs::create_dir_all(&reports).with_context(|| format!("creating {}", reports.display()))?;
        let file = data.join("exports.jsonl");
        let inner = Arc::new(Inner {
            script: Script::default(),
            reports,
            exports: Ledger::open(&file).with_context(|| format!("reading {}", file.display()))?,
            received: Mutex::default(),
            work: TaskTracker::new(),
            stop: CancellationToken::new(),
        });
        let router = Router::new()
            .route("/reports/{key}", put(make).get(serve))
            .route("/control", post(|State(inner): State<Arc<Inner>>, body: Bytes| async move { control(&inner.script, &body) }))
            .route(
                "/exports",
                get(|State(inner): State<Arc<Inner>>| async move { answer(StatusCode::OK, &json!(inner.exports.entries())) }),
            )
            .route("/requests", get(|State(inner): State<Arc<Inner>>| async move { answer(StatusCode::OK, &json!(inner.received())) }))
            .with_state(inner.clone());
        let server = Server::start(listen, router).await.with_context(|| format!("listening on {listen}"))?;
        Ok(Self { server, inner })
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.server.addr()
    }

    /// `http://ADDRESS`.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr())
    }

    /// Behaves so from now on; held requests go on.
    pub fn control(&self, behaviour: Behaviour) {
        self.inner.script.set(behaviour);
    }

    /// Forgets what it was told; held requests go on.
    pub fn behave(&self) {
        self.inner.script.behave();
    }

    /// How many reports were made.
    pub fn exported(&self) -> usize {
        self.inner.exports.len()
    }

    /// How many requests are held now.
    pub fn held(&self) -> usize {
        self.inner.script.held()
    }

    /// Refuses connections.
    pub async fn down(&self) {
        self.server.down().await;
    }

    /// Accepts connections again.
    pub fn up(&self) -> io::Result<()> {
        self.server.up()
    }

    /// Every making of a report, oldest first: the first of each key, and each that replaced another order.
    pub fn exports(&self) -> Vec<Export> {
        self.inner.exports.entries()
    }

    /// What was asked for, oldest first.
    pub fn requests(&self) -> Vec<Received> {
        self.inner.received()
    }

    /// What was asked for under keys that contain `part`, such as `/namespace/name/`.
    pub fn requests_for(&self, part: &str) -> Vec<Received> {
        self.requests().into_iter().filter(|request| request.key.contains(part)).collect()
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        self.inner.stop.cancel();
    }
}

impl Inner {
    fn received(&self) -> Vec<Received> {
        self.received.lock().expect("no holder panics").clone()
    }

    /// The latest export under `key`.
    fn latest(&self, key: &str) -> Option<Export> {
        self.exports.entries().into_iter().rev().find(|export| export.key == key)
    }

    fn file(&self, key: &str, format: &str) -> PathBuf {
        let digest: String = Sha256::digest(key).iter().map(|byte| format!("{byte:02x}")).collect();
        self.reports.join(format!("{digest}.{format}"))
    }

    /// Makes the report unless it exists as ordered: written aside, then moved into place.
    fn make(&self, key: &str, order: &Order) -> io::Result<()> {
        let before = self.latest(key);
        if before.as_ref().is_some_and(|export| export.order == *order) {
            return Ok(());
        }
        let file = self.file(key, &order.format);
        let aside = file.with_extension("part");
        let mut part = File::create(&aside)?;
        part.write_all(content(order).as_bytes())?;
        part.sync_all()?;
        std::fs::rename(&aside, &file)?;
        self.exports.append(Export { key: key.to_owned(), order: order.clone(), at_ms: unix_ms() })?;
        match before {
            Some(before) if before.order.format != order.format => std::fs::remove_file(self.file(key, &before.order.format)),
            _ => Ok(()),
        }
    }
}

async fn make(State(inner): State<Arc<Inner>>, Segment(key): Segment<String>, uri: Uri, headers: HeaderMap, body: Bytes) -> Response {
    let order: Result<Order, String> = serde_json::from_slice(&body).map_err(|error| error.to_string()).and_then(proper);
    let number = {
        let mut received = inner.received.lock().expect("no holder panics");
        received.push(Received { key: key.clone(), order: order.as_ref().ok().cloned(), at_ms: unix_ms(), status: None });
        received.len() - 1
    };
    let response = match order {
        Err(detail) => problem(StatusCode::BAD_REQUEST, "The order cannot be read", &detail),
        Ok(order) => {
            let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or("localhost").to_owned();
            let url = format!("http://{host}{}", uri.path());
            let (done, response) = oneshot::channel();
            let (worker, stop) = (inner.clone(), inner.stop.clone());
            let work = async move {
                let turn = worker.script.turn(&[&order.report, &key]);
                let export = || match worker.make(&key, &order) {
                    Ok(()) => answer(StatusCode::OK, &json!({"url": url})),
                    Err(error) => problem(StatusCode::INSUFFICIENT_STORAGE, "No report", &error.to_string()),
                };
                worker.script.perform(turn, export).await
            };
            // Dropped on stop; and who waits for it may be gone.
            inner.work.spawn(async move { stop.run_until_cancelled_owned(work).await.and_then(|response| done.send(response).ok()) });
            response.await.unwrap_or_else(|_| hang_up())
        }
    };
    if response.extensions().get::<HangUp>().is_none() {
        inner.received.lock().expect("no holder panics")[number].status = Some(response.status().as_u16());
    }
    response
}

/// The format becomes part of a file's name.
fn proper(order: Order) -> Result<Order, String> {
    let format = &order.format;
    let good = (1..=8).contains(&format.len()) && format.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
    if good && format != "part" { Ok(order) } else { Err(format!("cannot export as {format:?}")) }
}

async fn serve(State(inner): State<Arc<Inner>>, Segment(key): Segment<String>) -> Response {
    let Some(export) = inner.latest(&key) else {
        return problem(StatusCode::NOT_FOUND, "No such report", &format!("nothing was exported under {key}"));
    };
    match std::fs::read(inner.file(&key, &export.order.format)) {
        Ok(content) => {
            let mut response = Response::new(Body::from(content));
            response.headers_mut().insert(header::CONTENT_TYPE, media_type(&export.order.format));
            response
        }
        Err(error) => problem(StatusCode::INTERNAL_SERVER_ERROR, "The report cannot be read", &error.to_string()),
    }
}

fn media_type(format: &str) -> HeaderValue {
    HeaderValue::from_static(match format {
        "csv" => "text/csv",
        "html" => "text/html",
        "json" => "application/json",
        "pdf" => "application/pdf",
        "txt" => "text/plain",
        _ => "application/octet-stream",
    })
}

/// A small report of the wanted kind.
fn content(order: &Order) -> String {
    let report = &order.report;
    match order.format.as_str() {
        "csv" => format!("report,rows\n\"{}\",0\n", report.replace('"', "\"\"")),
        "html" => format!("<!doctype html><title>Report</title><h1>{}</h1>\n", report.replace('&', "&amp;").replace('<', "&lt;")),
        "json" => format!("{}\n", json!({"report": report, "rows": []})),
        "pdf" => pdf(report),
        _ => format!("Report {report}\n"),
    }
}

/// One page with one line of text.
fn pdf(title: &str) -> String {
    let line: String = title.chars().filter(|char| char.is_ascii() && !matches!(char, '(' | ')' | '\\') && !char.is_control()).collect();
    let stream = format!("BT /F1 24 Tf 72 720 Td (Report {line}) Tj ET");
    let objects = [
        "<< /Type /Catalog /Pages 2 0 R >>".to_owned(),
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>".to_owned(),
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>".to_owned(),
        format!("<< /Length {} >>\nstream\n{stream}\nendstream", stream.len()),
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>".to_owned(),
    ];
    let mut text = String::from("%PDF-1.4\n");
    let mut table = format!("xref\n0 {}\n0000000000 65535 f \n", objects.len() + 1);
    for (number, object) in objects.iter().enumerate() {
        table += &format!("{:010} 00000 n \n", text.len());
        text += &format!("{} 0 obj\n{object}\nendobj\n", number + 1);
    }
    let start = text.len();
    text + &table + &format!("trailer << /Size {} /Root 1 0 R >>\nstartxref\n{start}\n%%EOF\n", objects.len() + 1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{behaviour::Hold, client::Client};

    async fn exporter() -> (Exporter, Client, tempfile::TempDir) {
        let dir = tempfile::tempdir().expect("temporary directory");
        let exporter = Exporter::start(dir.path()).await.expect("starts");
        (exporter, Client::new(), dir)
    }

    const KEY: &str = "reportjobs.batch.acme.io%2Fns%2Fname%2Fuid";

    #[tokio::test]
    async fn a_report_is_made_once_per_key_and_served_under_its_url() {
        let (exporter, client, dir) = exporter().await;
        let url = format!("{}/reports/{KEY}", exporter.url());
        for _ in 0..2 {
            let made = client.put(&url, &json!({"report": "sales", "format": "pdf", "priority": 3})).await.expect("answered");
            assert_eq!((made.status, made.json()), (200, json!({"url": url})));
        }
        let served = client.get(&url).await.expect("answered");
        assert_eq!(served.headers["content-type"], "application/pdf");
        assert!(served.text().starts_with("%PDF-1.4\n") && served.text().contains("(Report sales)"), "{}", served.text());
        let exports = exporter.exports();
        assert_eq!((exports.len(), exports[0].key.as_str()), (1, "reportjobs.batch.acme.io/ns/name/uid"));
        assert_eq!(std::fs::read_dir(dir.path().join("reports")).expect("there").count(), 1);
    }

    #[tokio::test]
    async fn another_order_under_a_key_replaces_the_report() {
        let (exporter, client, dir) = exporter().await;
        let url = format!("{}/reports/{KEY}", exporter.url());
        client.put(&url, &json!({"report": "sales", "format": "csv"})).await.expect("answered");
        client.put(&url, &json!({"report": "stock", "format": "json"})).await.expect("answered");
        assert_eq!(client.get(&url).await.expect("answered").json()["report"], "stock");
        assert_eq!(std::fs::read_dir(dir.path().join("reports")).expect("there").count(), 1);
        assert_eq!(client.put(&url, &json!({"report": "x", "format": "../x"})).await.expect("answered").status, 400);
        assert_eq!(client.get(&format!("{}/reports/none", exporter.url())).await.expect("answered").status, 404);
    }

    #[tokio::test]
    async fn a_named_report_fails_or_is_never_answered_while_others_are_made() {
        let (exporter, client, _dir) = exporter().await;
        let put = |key: &str, report: &str| {
            let (url, order) = (format!("{}/reports/{key}", exporter.url()), json!({"report": report, "format": "csv"}));
            let client = client.clone();
            async move { client.put(&url, &order).await.map_or(0, |made| made.status) }
        };
        exporter.control(Behaviour::fail(503).only("broken"));
        exporter.control(Behaviour::hold(Hold::Before).only("stuck"));
        assert_eq!((put("a", "broken").await, put("b", "sales").await), (503, 200));
        assert!(tokio::time::timeout(Duration::from_millis(100), put("c", "stuck")).await.is_err());
        assert_eq!((exporter.held(), exporter.exports().len()), (1, 1));
        exporter.control(Behaviour::default().only("broken"));
        assert_eq!((put("a", "broken").await, exporter.held()), (200, 1));
    }
}
