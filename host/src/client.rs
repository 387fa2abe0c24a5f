//! The connection to the API server: kube's client without its hidden retries.

use std::time::Duration;

use kube::{Client, Config};

/// To reach a server in the same cluster, TLS included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// For a peer that no longer takes bytes.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// A client for this cluster, with a connection pool of its own. Must be called within a tokio runtime.
///
/// kube's own retry layer is off: it repeats 429, 503 and 504 up to 15 times, and kept one write of a Lease for 266 s. Here an answer
/// is an answer, and retries have deadlines. There is no read timeout either, because a watch may be silent for minutes: who sends an
/// ordinary request bounds it.
pub fn connect(mut config: Config) -> kube::Result<Client> {
    config.default_retry = false;
    config.connect_timeout = Some(CONNECT_TIMEOUT);
    config.write_timeout = Some(WRITE_TIMEOUT);
    config.read_timeout = None;
    Client::try_from(config)
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

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
}
