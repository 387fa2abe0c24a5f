//! A small HTTP client for talking to the back ends and to the host's admin address.

use std::time::Duration;

use anyhow::Context;
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Uri, header};
use http_body_util::{BodyExt, Full};
use hyper_util::{client::legacy::connect::HttpConnector, rt::TokioExecutor};
use serde_json::Value;

/// An answer, read to its end.
#[derive(Clone, Debug)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// Headers.
    pub headers: HeaderMap,
    /// Body.
    pub body: Bytes,
}

impl Answer {
    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON; null if it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
}

/// Opens a connection for each request, so that nothing is left of one.
#[derive(Clone, Debug)]
pub struct Client {
    client: hyper_util::client::legacy::Client<HttpConnector, Full<Bytes>>,
}

impl Default for Client {
    fn default() -> Self {
        Self::new()
    }
}

impl Client {
    /// A client without a pool.
    pub fn new() -> Self {
        Self { client: hyper_util::client::legacy::Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build_http() }
    }

    /// `GET URL`.
    pub async fn get(&self, url: &str) -> anyhow::Result<Answer> {
        self.send(Method::GET, url, &[], Bytes::new()).await
    }

    /// `POST URL` with a JSON body.
    pub async fn post(&self, url: &str, headers: &[(&str, &str)], body: &Value) -> anyhow::Result<Answer> {
        self.send(Method::POST, url, headers, body.to_string().into()).await
    }

    /// `PUT URL` with a JSON body.
    pub async fn put(&self, url: &str, body: &Value) -> anyhow::Result<Answer> {
        self.send(Method::PUT, url, &[], body.to_string().into()).await
    }

    /// Any request; the answer has to be complete within a minute.
    pub async fn send(&self, method: Method, url: &str, headers: &[(&str, &str)], body: Bytes) -> anyhow::Result<Answer> {
        let uri: Uri = url.parse().with_context(|| format!("{url} is no URL"))?;
        let mut request = Request::builder().method(method).uri(uri).header(header::CONTENT_TYPE, "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body)).context("the headers are no headers")?;
        let answer = async {
            let (parts, body) = self.client.request(request).await?.into_parts();
            anyhow::Ok(Answer { status: parts.status.as_u16(), headers: parts.headers, body: body.collect().await?.to_bytes() })
        };
        tokio::time::timeout(Duration::from_secs(60), answer).await.with_context(|| format!("no answer from {url} within a minute"))?
    }
}
