//! The fault proxy: stands between a client and the real kube-apiserver, or a back end, shows every request, and does to it what a rule
//! says.
//!
//! # Expected flow
//! [`Proxy::start`] before the cluster that is under test gets its kubeconfig from [`Proxy::kubeconfig`]. A test adds a [`Rule`] and
//! keeps its [`Handle`]: the rule is in force until the handle is dropped. [`Proxy::watches`] acts on streams that are open.
//!
//! # Guarantees
//! A request reaches the API server at most once. A rule acts on exactly `times` requests. The newest rule that matches acts, alone.
//!
//! # Caveats
//! It ends the client's TLS, so clients need a token rather than a certificate. What closes a connection closes of HTTP/2, which watches
//! come by, the stream.

mod record;
mod rule;
mod watches;

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};

use anyhow::Context;
use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::{HeaderMap, HeaderValue, StatusCode, Uri, header, uri::PathAndQuery},
    response::Response,
};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_rustls::HttpsConnector;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use k8s_openapi::ByteString;
use kube::client::ConfigExt;

pub use record::{Entry, Outcome, Seen, Verb};
use rule::{Active, Rules};
pub use rule::{Answer, Effect, Handle, Rule};
use watches::Open;
pub use watches::Watches;

use crate::{
    behaviour::problem,
    server::{HangUp, Server, Tls, hang_up},
    tls::Authority,
};

/// More than the API server takes.
const MAX_BODY: usize = 16 << 20;

/// What a kubeconfig identifies its user by.
#[derive(Clone, Copy, Debug)]
pub enum Credential<'c> {
    /// A bearer token.
    Token(&'c str),
    /// A file with one, which may change.
    File(&'c Path),
}

/// A running proxy.
#[derive(Debug)]
pub struct Proxy {
    server: Server,
    /// Whom clients have to trust; none where the proxy speaks plain HTTP.
    authority: Option<Authority>,
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    upstream: Uri,
    /// Whether the header `Host` is passed on as it came.
    keeps_host: bool,
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    rules: Rules,
    entries: Mutex<Vec<Entry>>,
    open: Open,
}

impl Proxy {
    /// A proxy on a free port of 127.0.0.1 for the API server of `upstream`, of which it takes the URL and the CA, not the identity. It
    /// speaks what an API server does: HTTP/1.1 and HTTP/2 within TLS.
    pub async fn start(upstream: &kube::Config) -> anyhow::Result<Self> {
        Self::taking(upstream, 100).await
    }

    /// One that takes so many requests at a time on one connection of HTTP/2.
    pub async fn taking(upstream: &kube::Config, streams: u32) -> anyhow::Result<Self> {
        Self::before(upstream, Some((&["h2", "http/1.1"], streams))).await
    }

    /// One that does not know HTTP/2.
    pub async fn without_http2(upstream: &kube::Config) -> anyhow::Result<Self> {
        Self::before(upstream, Some((&["http/1.1"], 0))).await
    }

    /// A proxy for a back end that speaks plain HTTP, which sees by the header `Host` how it was called.
    pub async fn of_back_end(address: SocketAddr) -> anyhow::Result<Self> {
        let url = format!("http://{address}").parse().context("an address makes a URL")?;
        Self::before(&kube::Config::new(url), None).await
    }

    /// With the protocols within TLS, if it speaks TLS, and the requests at a time.
    async fn before(upstream: &kube::Config, tls: Option<(&[&str], u32)>) -> anyhow::Result<Self> {
        let mut anonymous = upstream.clone();
        anonymous.auth_info = kube::config::AuthInfo::default();
        let connector = anonymous.rustls_https_connector().context("preparing TLS to the server")?;
        let inner = Arc::new(Inner {
            upstream: upstream.cluster_url.clone(),
            keeps_host: tls.is_none(),
            client: Client::builder(TokioExecutor::new()).build(connector),
            rules: Rules::default(),
            entries: Mutex::default(),
            open: Open::default(),
        });
        let router = Router::new().fallback(pass).with_state(inner.clone());
        let authority = tls.is_some().then(Authority::new);
        let serving =
            |(authority, (protocols, streams)): (&Authority, _)| Tls { acceptor: authority.serving(&["127.0.0.1"], protocols), streams };
        let tls = authority.as_ref().zip(tls).map(serving);
        let server = Server::behind(tls, ([127, 0, 0, 1], 0).into(), router).await.context("listening on 127.0.0.1")?;
        Ok(Self { server, authority, inner })
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.server.addr()
    }

    /// `http://ADDRESS` or `https://ADDRESS`.
    pub fn url(&self) -> String {
        let scheme = if self.authority.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.addr())
    }

    /// The identity of `base`, through the proxy.
    pub fn config(&self, base: &kube::Config) -> kube::Config {
        let mut config = base.clone();
        config.cluster_url = self.url().parse().expect("an address makes a URL");
        config.root_cert = self.authority.as_ref().map(|authority| vec![authority.der()]);
        config.root_cert_file = None;
        config.tls_server_name = None;
        config.auth_info.client_certificate = None;
        config.auth_info.client_certificate_data = None;
        config.auth_info.client_key = None;
        config.auth_info.client_key_data = None;
        config
    }

    /// Writes a kubeconfig to `DIR/kubeconfig-proxy`.
    pub fn kubeconfig(&self, dir: &Path, credential: Credential<'_>) -> anyhow::Result<PathBuf> {
        let path = dir.join("kubeconfig-proxy");
        let user = match credential {
            Credential::Token(token) => serde_json::json!({"token": token}),
            Credential::File(file) => serde_json::json!({"tokenFile": file}),
        };
        let authority = self.authority.as_ref().map(|authority| ByteString(authority.pem().into_bytes()));
        let text = serde_json::json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "proxy",
            "clusters": [{"name": "proxy", "cluster": {"server": self.url(), "certificate-authority-data": authority}}],
            "users": [{"name": "user", "user": user}],
            "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "user"}}],
        });
        std::fs::write(&path, text.to_string()).with_context(|| format!("writing {}", path.display()))?;
        Ok(path)
    }

    /// Puts a rule in force until the handle is dropped.
    pub fn rule(&self, rule: Rule) -> Handle {
        self.inner.rules.add(rule)
    }

    /// The open watches whose path contains `part`.
    pub fn watches(&self, part: &str) -> Watches {
        self.inner.open.watches(part)
    }

    /// Every request so far, oldest first.
    pub fn entries(&self) -> Vec<Entry> {
        self.inner.entries.lock().expect("no holder panics").clone()
    }

    /// How many requests there were so far: a mark for [`Proxy::since`].
    pub fn mark(&self) -> usize {
        self.inner.entries.lock().expect("no holder panics").len()
    }

    /// The requests after a mark.
    pub fn since(&self, mark: usize) -> Vec<Entry> {
        self.entries().split_off(mark)
    }

    /// How many connections were accepted so far.
    pub fn accepted(&self) -> usize {
        self.server.accepted()
    }

    /// From now on nothing comes by the connections that are open, as where a network has lost them. New ones work.
    pub fn fall_silent(&self) {
        self.server.fall_silent();
    }

    /// Refuses connections and closes those that are open.
    pub async fn down(&self) {
        self.server.down().await;
    }

    /// Accepts connections again.
    pub fn up(&self) -> anyhow::Result<()> {
        self.server.up().context("listening again")
    }
}

impl Inner {
    /// Sends the request on. The answer's body is still on its way when this returns.
    async fn forward(&self, seen: &Seen) -> Response {
        let mut parts = self.upstream.clone().into_parts();
        parts.path_and_query = seen.path_and_query().parse::<PathAndQuery>().ok();
        let uri = Uri::from_parts(parts).expect("the parts are of two valid URIs");
        let mut request = Request::new(Full::new(seen.body.clone()));
        *request.method_mut() = seen.method.clone();
        *request.headers_mut() = end_to_end(&seen.headers);
        let own = seen.headers.get(header::HOST).filter(|_| self.keeps_host).cloned();
        if let Some(host) = own.or_else(|| HeaderValue::from_str(uri.authority()?.as_str()).ok()) {
            request.headers_mut().insert(header::HOST, host);
        }
        *request.uri_mut() = uri;
        match self.client.request(request).await {
            Ok(response) => {
                let (mut parts, body) = response.into_parts();
                parts.headers = end_to_end(&parts.headers);
                parts.version = axum::http::Version::HTTP_11;
                Response::from_parts(parts, Body::new(body))
            }
            Err(error) => {
                tracing::warn!(path = seen.path, %error, "no answer from the server");
                problem(StatusCode::BAD_GATEWAY, "No answer from the server", &error.to_string())
            }
        }
    }

    /// The same on a task of its own, so that what was sent is committed whether or not the client waits for it.
    async fn commit(self: &Arc<Self>, seen: &Arc<Seen>) -> Response {
        let (inner, seen) = (self.clone(), seen.clone());
        tokio::spawn(async move { inner.forward(&seen).await }).await.unwrap_or_else(|_| hang_up())
    }

    /// Does what the rule says.
    async fn act(self: &Arc<Self>, rule: &Active, seen: &Arc<Seen>, number: usize) -> Response {
        match rule.effect() {
            Effect::Delay(time) => {
                tokio::time::sleep(*time).await;
                self.forward(seen).await
            }
            Effect::Hold => {
                rule.released().await;
                self.forward(seen).await
            }
            Effect::HoldAnswer => {
                let response = self.commit(seen).await;
                self.end(number, Outcome::Held(response.status().as_u16()));
                rule.committed();
                rule.released().await;
                response
            }
            effect @ (Effect::CommitThenClose | Effect::CommitThenAnswer(_)) => {
                let response = self.commit(seen).await;
                self.end(number, Outcome::Dropped(response.status().as_u16()));
                rule.committed();
                if let Effect::CommitThenAnswer(answer) = effect { answer.response() } else { hang_up() }
            }
            Effect::Close => {
                self.end(number, Outcome::Closed);
                hang_up()
            }
            Effect::BlackHole => {
                self.end(number, Outcome::Unanswered);
                std::future::pending().await
            }
            Effect::Answer(answer) => answer.response(),
            Effect::SilentStream => Response::new(Body::from_stream(futures::stream::pending::<Result<Bytes, std::io::Error>>())),
        }
    }

    fn end(&self, number: usize, outcome: Outcome) {
        self.entries.lock().expect("no holder panics")[number].outcome = outcome;
    }
}

async fn pass(State(inner): State<Arc<Inner>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let Ok(body) = http_body_util::Limited::new(body, MAX_BODY).collect().await else { return hang_up() };
    let seen = Arc::new(Seen::new(parts, body.to_bytes()));
    let number = {
        let mut entries = inner.entries.lock().expect("no holder panics");
        entries.push(Entry { seen: seen.clone(), outcome: Outcome::Pending });
        entries.len() - 1
    };
    let response = match inner.rules.pick(&seen) {
        None => inner.forward(&seen).await,
        Some(rule) => inner.act(&rule, &seen, number).await,
    };
    if response.extensions().get::<HangUp>().is_some() {
        return response;
    }
    inner.end(number, Outcome::Answered(response.status().as_u16()));
    if seen.verb == Verb::Watch && response.status().is_success() { inner.open.follow(&seen, response) } else { response }
}

/// The headers without those that belong to one connection.
fn end_to_end(headers: &HeaderMap) -> HeaderMap {
    let mut headers = headers.clone();
    for name in
        [header::CONNECTION, header::TRANSFER_ENCODING, header::CONTENT_LENGTH, header::HOST, header::UPGRADE, header::TE, header::TRAILER]
    {
        headers.remove(name);
    }
    headers.remove("keep-alive");
    headers
}

#[cfg(test)]
mod tests;
