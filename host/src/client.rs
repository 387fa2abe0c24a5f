//! The connections to the API server: kube's client over HTTP/2 connections that are shared, as Kubernetes' own clients share them.
//!
//! # Guarantees
//! - An answer is an answer: nothing is asked again behind the back of whoever asked, who has a deadline. kube's own layer repeats 429,
//!   503 and 504 up to 15 times, and kept one write of a Lease for 266 s.
//! - Watches have connections of their own ([`http2`]), so no write waits behind events.
//! - A server that does not know HTTP/2 is served by HTTP/1.1.
//!
//! # Caveats
//! There is no read timeout, because a watch may be silent for minutes: whoever sends an ordinary request bounds it.

use std::{
    error::Error,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture};
use http::{Request, Response, Uri};
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_timeout::TimeoutConnector;
use hyper_util::{
    client::legacy::{self, connect::HttpConnector},
    rt::{TokioExecutor, TokioTimer},
};
use kube::{
    Client, Config,
    client::{Body, ClientBuilder, ConfigExt},
};
use rustls::client::Resumption;
use tower_service::Service;

use self::http2::{Answer, Unanswered};

mod http2;

/// To reach a server in the same cluster, TLS included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// For a peer that no longer takes bytes.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a connection of HTTP/1.1 without a request is kept.
const IDLE: Duration = Duration::from_secs(90);

/// So that whatever lies between does not forget a connection on which nothing happens.
const TCP_KEEPALIVE: Duration = Duration::from_secs(30);

/// TLS sessions that are kept to be resumed. Their room is taken from the start.
const TLS_SESSIONS: usize = 8;

type BoxError = Box<dyn Error + Send + Sync>;
type Connector = TimeoutConnector<HttpsConnector<HttpConnector>>;
type Pool = legacy::Client<Connector, Body>;

/// A client for this cluster, with connections of its own. Must be called within a tokio runtime.
pub fn connect(config: Config) -> kube::Result<Client> {
    if let Some(proxy_url) = config.proxy_url {
        return Err(kube::Error::ProxyProtocolDisabled { proxy_url: Box::new(proxy_url), protocol_feature: "http-proxy" });
    }
    let http1 = legacy::Client::builder(TokioExecutor::new())
        .timer(TokioTimer::new())
        .pool_timer(TokioTimer::new())
        .pool_idle_timeout(IDLE)
        .build(connector(&config, Versions::Http1)?);
    let http2 = connector(&config, Versions::All)?;
    let shared = || http2::Connections::new(http2.clone(), config.cluster_url.clone());
    // HTTP/2 is agreed on within TLS.
    let has_tls = config.cluster_url.scheme_str() == Some("https");
    let service = Connections { requests: shared(), watches: shared(), http1, is_http2: Arc::new(has_tls.into()) };
    let (base, headers) = (config.base_uri_layer(), config.extra_headers_layer()?);
    let client = ClientBuilder::new(service, &*config.default_namespace).with_layer(&headers);
    Ok(match config.auth_layer()? {
        Some(authorization) => client.with_layer(&authorization).with_layer(&base).build(),
        None => client.with_layer(&base).build(),
    })
}

/// The versions of HTTP that the server is offered.
enum Versions {
    Http1,
    All,
}

fn connector(config: &Config, versions: Versions) -> kube::Result<Connector> {
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_nodelay(true);
    http.set_keepalive(Some(TCP_KEEPALIVE));
    let mut tls = config.rustls_client_config()?;
    tls.resumption = Resumption::in_memory_sessions(TLS_SESSIONS);
    let mut https = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http();
    if let Some(name) = &config.tls_server_name {
        let name = name.clone().try_into().map_err(|error| kube::Error::Service(Box::new(error)))?;
        https = https.with_server_name_resolver(FixedServerNameResolver::new(name));
    }
    let https = match versions {
        Versions::Http1 => https.enable_http1().wrap_connector(http),
        Versions::All => https.enable_all_versions().wrap_connector(http),
    };
    let mut timely = TimeoutConnector::new(https);
    timely.set_connect_timeout(Some(CONNECT_TIMEOUT));
    timely.set_write_timeout(Some(WRITE_TIMEOUT));
    Ok(timely)
}

/// Sends each request over the connections of its sort.
#[derive(Clone)]
struct Connections {
    requests: http2::Connections,
    watches: http2::Connections,
    http1: Pool,
    /// Until the server has shown that it does not know HTTP/2.
    is_http2: Arc<AtomicBool>,
}

impl Service<Request<Body>> for Connections {
    type Response = Response<Answer>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Response<Answer>, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        self.clone().send(request).boxed()
    }
}

impl Connections {
    async fn send(self, mut request: Request<Body>) -> Result<Response<Answer>, BoxError> {
        if self.is_http2.load(Relaxed) {
            let shared = if is_watch(request.uri()) { &self.watches } else { &self.requests };
            match shared.send(request).await {
                Err(Unanswered::NoHttp2(unsent)) => request = *unsent,
                Err(Unanswered::Failed(error)) => return Err(error),
                Ok(answer) => return Ok(answer),
            }
            if self.is_http2.swap(false, Relaxed) {
                tracing::info!("the API server does not speak HTTP/2: each watch and each request at work has a connection of its own");
            }
        }
        Ok(self.http1.request(request).await?.map(Answer::from))
    }
}

fn is_watch(uri: &Uri) -> bool {
    uri.query().is_some_and(|query| query.split('&').any(|pair| pair == "watch=true"))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::{Router, http::StatusCode};
    use k8s_openapi::api::core::v1::Namespace;
    use kube::Api;

    use super::*;

    #[tokio::test]
    async fn an_overloaded_server_is_asked_once() {
        let asked = Arc::new(AtomicUsize::new(0));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("binds");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let server = Router::new().fallback({
            let asked = asked.clone();
            async move || {
                asked.fetch_add(1, Ordering::Relaxed);
                (StatusCode::TOO_MANY_REQUESTS, [("Retry-After", "0")], "busy")
            }
        });
        let server = tokio::spawn(async move { axum::serve(listener, server).await });
        let client = connect(Config::new(url.parse().expect("a URL"))).expect("connects");
        let error = Api::<Namespace>::all(client).get("x").await.expect_err("429");
        assert!(matches!(&error, kube::Error::Api(status) if status.code == 429), "{error}");
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        server.abort();
    }

    #[test]
    fn a_watch_is_what_says_so() {
        for (uri, expected) in
            [("/a", false), ("/a?watch=true", true), ("/a?limit=5&watch=true", true), ("/a?labelSelector=watch%3Dtrue", false)]
        {
            assert_eq!(is_watch(&uri.parse().expect("a URI")), expected, "{uri}");
        }
    }
}
