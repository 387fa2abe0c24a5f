//! The client that performs the requests of all guests: pooled connections, rustls with the web's roots, addresses checked.

use std::{
    error::Error as StdError,
    fmt, io,
    net::{IpAddr, SocketAddr},
    str::FromStr,
    sync::{Arc, LazyLock},
    task::{Context, Poll},
    time::Duration,
};

use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper_rustls::{ConfigBuilderExt, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy,
    rt::{TokioExecutor, TokioIo, TokioTimer},
};
use rustls::{ClientConfig, ConfigBuilder, RootCertStore, WantsVerifier, client::Resumption};
use tokio::net::TcpStream;
use tower_service::Service;
use wasmtime_wasi_http::Error;

use super::{
    Boxed,
    address::{LookUp, addresses, of_system},
    asked::Asked,
    line::Line,
};
use crate::plugin::{limits, shares::Share};

/// How long a connection is kept for the next request. It has a place among those of its plugin all the while.
const IDLE: Duration = Duration::from_secs(10);

/// Connections kept for one place: for as many objects as run at once by default.
const IDLE_PER_HOST: usize = 16;

/// TLS sessions of a plugin that are kept to be resumed: eight of each server. Their room is taken from the start.
const TLS_SESSIONS: usize = 32;

/// `HOST:PORT=ADDR` or `HOST:PORT=ADDR:PORT`: connections to a name go to an address of the operator's choice, as with curl.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolve {
    host: String,
    port: u16,
    address: SocketAddr,
}

/// Why a text is no [`Resolve`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected HOST:PORT=ADDRESS or HOST:PORT=ADDRESS:PORT, such as mail.demo:80=127.0.0.1:8025")]
pub struct InvalidResolve;

impl FromStr for Resolve {
    type Err = InvalidResolve;

    fn from_str(text: &str) -> Result<Self, InvalidResolve> {
        let (place, address) = text.split_once('=').ok_or(InvalidResolve)?;
        let (host, port) = place.rsplit_once(':').ok_or(InvalidResolve)?;
        let port = port.parse().map_err(|_| InvalidResolve)?;
        let bare = address.trim_start_matches('[').trim_end_matches(']');
        let address = address.parse().or_else(|_| bare.parse().map(|ip| SocketAddr::new(ip, port))).map_err(|_| InvalidResolve)?;
        if host.is_empty() || host.contains(['/', '@', '=']) {
            return Err(InvalidResolve);
        }
        Ok(Self { host: host.to_ascii_lowercase(), port, address })
    }
}

impl Resolve {
    /// The address for this place, if the entry is about it.
    pub(super) fn of(&self, host: &str, port: u16) -> Option<SocketAddr> {
        (self.host == host && self.port == port).then_some(self.address)
    }
}

impl fmt::Display for Resolve {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}={}", self.host, self.port, self.address)
    }
}

/// How a request ended.
pub enum Sent {
    /// With the head of a response.
    Response(Response<Incoming>),
    /// The name leads to an address that the host keeps from guests; the sentence says how to allow it.
    Refused(String),
    /// There was no connection in time.
    Late,
    /// The plugin has as many connections as it may have, which is so many.
    Crowded(u32),
    /// For the guest, and for the host's own log.
    Failed(Error, String),
}

/// How the requests of a plugin reach the world.
#[derive(Clone)]
pub struct Ways {
    /// Names that the operator leads elsewhere.
    pub resolve: Arc<[Resolve]>,
    /// The plugin's part of connections and look-ups.
    pub share: Arc<Share>,
    /// From the start of a connection to the end of its TLS handshake.
    pub connect: Duration,
}

/// Connections of one plugin that were verified under the same roots: those of the web, or a private CA.
pub struct Client {
    pool: legacy::Client<Timely<HttpsConnector<Dialer>>, Asked>,
    ways: Ways,
}

impl Client {
    /// With the roots of the web.
    pub fn new(ways: Ways) -> Self {
        static WEB: LazyLock<ClientConfig> = LazyLock::new(|| tls().with_webpki_roots().with_no_client_auth());
        Self::of(ways, WEB.clone())
    }

    /// One that goes the same ways and trusts these roots and no others.
    pub fn trusting(&self, roots: RootCertStore) -> Self {
        Self::of(self.ways.clone(), tls().with_root_certificates(roots).with_no_client_auth())
    }

    fn of(ways: Ways, mut tls: ClientConfig) -> Self {
        // Its own: a plugin resumes no session of another one.
        tls.resumption = Resumption::in_memory_sessions(TLS_SESSIONS);
        let dialer = Dialer { ways: ways.clone(), look_up: of_system };
        let https = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1().enable_http2().wrap_connector(dialer);
        let pool = legacy::Client::builder(TokioExecutor::new())
            .timer(TokioTimer::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(IDLE_PER_HOST)
            .http1_max_buf_size(limits::HTTP_BUFFER as usize)
            .http2_max_header_list_size(limits::HTTP_BUFFER)
            .http2_initial_stream_window_size(limits::HTTP_BUFFER)
            .http2_initial_connection_window_size(4 * limits::HTTP_BUFFER)
            .http2_max_send_buf_size(limits::HTTP_BUFFER as usize)
            .build(Timely { connector: https, most: ways.connect });
        Self { pool, ways }
    }

    /// Sends it, and waits for the head of the response. Never follows a redirect.
    pub async fn send(&self, request: Request<Asked>) -> Sent {
        match self.pool.request(request).await {
            Ok(response) => Sent::Response(response),
            Err(error) => ended(&error),
        }
    }
}

fn tls() -> ConfigBuilder<ClientConfig, WantsVerifier> {
    ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring has the ciphers of TLS 1.2 and 1.3")
}

fn ended(error: &legacy::Error) -> Sent {
    let chain = || std::iter::successors(Some(error as &(dyn StdError + 'static)), |error: &&(dyn StdError + 'static)| (*error).source());
    let failed = |answer| Sent::Failed(answer, chain().map(ToString::to_string).collect::<Vec<_>>().join(": "));
    for cause in chain() {
        if let Some(dial) = cause.downcast_ref::<DialError>() {
            return match dial {
                DialError::Prohibited { .. } => Sent::Refused(dial.to_string()),
                DialError::NoName(_) => failed(Error::DnsError { rcode: None, info_code: None }),
                DialError::TooSlow => Sent::Late,
                DialError::Crowded(most) => Sent::Crowded(*most),
                DialError::Unreachable(_) => failed(Error::ConnectionRefused),
            };
        }
        match tls_error(cause) {
            Some(rustls::Error::InvalidCertificate(_)) => return failed(Error::TlsCertificateError),
            Some(_) => return failed(Error::TlsProtocolError),
            None => {}
        }
        // A guest's own body error is its own affair, with its own code.
        if let Some(hyper) = cause.downcast_ref::<hyper::Error>() {
            let code = if hyper.is_incomplete_message() || hyper.is_canceled() || hyper.is_closed() {
                Error::ConnectionTerminated
            } else {
                Error::HttpProtocolError
            };
            return failed(code);
        }
    }
    failed(Error::ConnectionTerminated)
}

/// The TLS error within I/O errors: each hides the one that it wraps from `source`.
fn tls_error<'e>(error: &'e (dyn StdError + 'static)) -> Option<&'e rustls::Error> {
    let inner = error.downcast_ref::<io::Error>()?.get_ref()?;
    inner.downcast_ref::<rustls::Error>().or_else(|| tls_error(inner))
}

/// Bounds the whole connection with its handshake, which the TLS connector does not.
#[derive(Clone)]
struct Timely<C> {
    connector: C,
    most: Duration,
}

impl<C> Service<Uri> for Timely<C>
where
    C: Service<Uri, Error = Box<dyn StdError + Send + Sync>>,
    C::Future: Send + 'static,
{
    type Response = C::Response;
    type Error = C::Error;
    type Future = Boxed<C::Response, C::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), C::Error>> {
        self.connector.poll_ready(context)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = tokio::time::timeout(self.most, self.connector.call(uri));
        Box::pin(async { connecting.await.unwrap_or_else(|_| Err(DialError::TooSlow.into())) })
    }
}

/// Opens TCP connections to checked addresses: the address that was checked is the one that is connected to.
#[derive(Clone)]
struct Dialer {
    ways: Ways,
    look_up: LookUp,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum DialError {
    #[error(
        "denied a request to {host}: it leads to {address}, {why}, which guests must not reach; \
         to allow it, name the address itself in the claim and in `allowedHosts`, or start the host with --resolve {host}:{port}={address}"
    )]
    Prohibited { host: String, port: u16, address: IpAddr, why: &'static str },
    #[error("the name has no address: {0}")]
    NoName(io::Error),
    #[error("no connection in time")]
    TooSlow,
    #[error("all of {0} connections are in use")]
    Crowded(u32),
    #[error("cannot connect: {0}")]
    Unreachable(io::Error),
}

impl Service<Uri> for Dialer {
    type Response = TokioIo<Line>;
    type Error = DialError;
    type Future = Boxed<Self::Response, DialError>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), DialError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let Self { ways: Ways { resolve, share, connect }, look_up } = self.clone();
        Box::pin(async move {
            // Not all the time that a connection may take, so that it is known what it was spent on.
            let place = tokio::time::timeout(connect * 3 / 4, share.connections.take(1)).await;
            let place = place.map_err(|_| DialError::Crowded(share.connections.most()))?;
            let addresses = addresses(&uri, &resolve, look_up, &share.look_ups).await?;
            let stream = TcpStream::connect(&*addresses).await.map_err(DialError::Unreachable)?;
            // Requests of guests are small and wait for their answer.
            let _ = stream.set_nodelay(true);
            Ok(TokioIo::new(Line::new(stream, place)))
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::plugin::shares::Shares;

    /// One that leads nowhere in particular.
    pub fn client() -> Client {
        let share = Shares::new(1, 1 << 20, 8).of("p");
        Client::new(Ways { resolve: Arc::default(), share, connect: Duration::from_secs(2) })
    }

    #[tokio::test]
    async fn a_plugin_has_its_part_of_the_connections_and_waits_for_one_to_be_closed() {
        let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let uri: Uri = format!("http://{}/", server.local_addr().expect("bound")).parse().expect("valid");
        let shares = Shares::new(1, 1 << 20, 8);
        let soon = Duration::from_millis(400);
        let dialer = |plugin| Dialer { ways: Ways { share: shares.of(plugin), connect: soon, ..client().ways }, look_up: of_system };
        let connect = async |plugin| dialer(plugin).call(uri.clone()).await;
        let (greedy, modest) = (shares.of("greedy"), shares.of("modest"));
        let held = [connect("greedy").await.expect("free"), connect("greedy").await.expect("free")];
        assert!(matches!(connect("greedy").await, Err(DialError::Crowded(2))), "a quarter of eight");
        assert!(connect("modest").await.is_ok(), "and nobody else's affair");
        drop(held);
        assert!(connect("greedy").await.is_ok());
        drop((greedy, modest));
    }

    #[test]
    fn resolve_entries_are_read_as_curl_writes_them_and_with_a_port() {
        let shown = |text: &str| text.parse::<Resolve>().map(|entry| entry.to_string());
        assert_eq!(shown("Mail.Demo:80=127.0.0.1").as_deref(), Ok("mail.demo:80=127.0.0.1:80"));
        assert_eq!(shown("a:80=127.0.0.1:8025").as_deref(), Ok("a:80=127.0.0.1:8025"));
        assert_eq!(shown("a:80=[::1]").as_deref(), Ok("a:80=[::1]:80"));
        for text in ["", "a", "a:80", "a=127.0.0.1", "a:x=127.0.0.1", "a:80=b", ":80=127.0.0.1", "a:80="] {
            assert_eq!(shown(text), Err(InvalidResolve), "{text}");
        }
    }
}
