//! The client that performs the requests of all guests: pooled connections, rustls with the web's roots, addresses checked.

use std::{
    error::Error as StdError,
    fmt, io,
    net::{IpAddr, SocketAddr},
    str::FromStr,
    sync::Arc,
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
use rustls::{ClientConfig, ConfigBuilder, RootCertStore, WantsVerifier};
use tokio::net::TcpStream;
use tower_service::Service;
use wasmtime_wasi_http::{Error, WasiBody};

use super::Boxed;
use crate::plugin::limits;

/// How long a connection is kept for the next request.
const IDLE: Duration = Duration::from_secs(30);

/// Connections kept for one place.
const IDLE_PER_HOST: usize = 32;

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
    /// For the guest, and for the host's own log.
    Failed(Error, String),
}

/// Connections that were verified under the same roots. One for the web is shared by all plugins: what a connection leads to depends
/// on the place alone. A private CA has another.
pub struct Client {
    pool: legacy::Client<Timely<HttpsConnector<Dialer>>, WasiBody>,
    dialer: Dialer,
}

impl Client {
    /// With the operator's own name resolution and the roots of the web.
    pub fn new(resolve: Vec<Resolve>) -> Self {
        Self::of(Dialer { resolve: resolve.into() }, tls().with_webpki_roots().with_no_client_auth())
    }

    /// One that goes the same ways and trusts these roots and no others.
    pub fn trusting(&self, roots: RootCertStore) -> Self {
        Self::of(self.dialer.clone(), tls().with_root_certificates(roots).with_no_client_auth())
    }

    fn of(dialer: Dialer, tls: ClientConfig) -> Self {
        let https =
            HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1().enable_http2().wrap_connector(dialer.clone());
        let pool = legacy::Client::builder(TokioExecutor::new())
            .timer(TokioTimer::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(IDLE_PER_HOST)
            .build(Timely(https));
        Self { pool, dialer }
    }

    /// Sends it, and waits for the head of the response. Never follows a redirect.
    pub async fn send(&self, request: Request<WasiBody>) -> Sent {
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
                DialError::TooSlow => failed(Error::ConnectionTimeout),
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
struct Timely<C>(C);

impl<C> Service<Uri> for Timely<C>
where
    C: Service<Uri, Error = Box<dyn StdError + Send + Sync>>,
    C::Future: Send + 'static,
{
    type Response = C::Response;
    type Error = C::Error;
    type Future = Boxed<C::Response, C::Error>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), C::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = tokio::time::timeout(limits::HTTP_CONNECT, self.0.call(uri));
        Box::pin(async { connecting.await.unwrap_or_else(|_| Err(DialError::TooSlow.into())) })
    }
}

/// Opens TCP connections to checked addresses: the address that was checked is the one that is connected to.
#[derive(Clone)]
struct Dialer {
    resolve: Arc<[Resolve]>,
}

#[derive(Debug, thiserror::Error)]
enum DialError {
    #[error(
        "denied a request to {host}: it leads to {address}, {why}, which guests must not reach; \
         to allow it, name the address itself in the claim and in `allowedHosts`, or start the host with --resolve {host}:{port}={address}"
    )]
    Prohibited { host: String, port: u16, address: IpAddr, why: &'static str },
    #[error("the name has no address: {0}")]
    NoName(io::Error),
    #[error("no connection within {:?}", limits::HTTP_CONNECT)]
    TooSlow,
    #[error("cannot connect: {0}")]
    Unreachable(io::Error),
}

impl Service<Uri> for Dialer {
    type Response = TokioIo<TcpStream>;
    type Error = DialError;
    type Future = Boxed<Self::Response, DialError>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), DialError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let resolve = self.resolve.clone();
        Box::pin(async move {
            let addresses = addresses(&uri, &resolve).await?;
            let stream = TcpStream::connect(&*addresses).await.map_err(DialError::Unreachable)?;
            // Requests of guests are small and wait for their answer.
            let _ = stream.set_nodelay(true);
            Ok(TokioIo::new(stream))
        })
    }
}

async fn addresses(uri: &Uri, resolve: &[Resolve]) -> Result<Vec<SocketAddr>, DialError> {
    let host = uri.host().unwrap_or_default().to_ascii_lowercase();
    let port = uri.port_u16().unwrap_or(if uri.scheme_str() == Some("https") { 443 } else { 80 });
    if let Some(entry) = resolve.iter().find(|entry| entry.host == host && entry.port == port) {
        return Ok(vec![entry.address]);
    }
    if let Ok(address) = host.trim_start_matches('[').trim_end_matches(']').parse() {
        // The grant matched it literally, so somebody wrote this very address down.
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let found: Vec<_> = tokio::net::lookup_host((&*host, port)).await.map_err(DialError::NoName)?.collect();
    check(&host, port, found)
}

/// Keeps the addresses that a guest may reach; an error where there is none.
fn check(host: &str, port: u16, found: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, DialError> {
    let (refused, open): (Vec<_>, Vec<_>) = found.into_iter().partition(|address| prohibited(address.ip()).is_some());
    match refused.first() {
        Some(first) if open.is_empty() => {
            let why = prohibited(first.ip()).unwrap_or_default();
            Err(DialError::Prohibited { host: host.to_owned(), port, address: first.ip(), why })
        }
        None if open.is_empty() => Err(DialError::NoName(io::ErrorKind::NotFound.into())),
        _ => Ok(open),
    }
}

/// Why no name that a guest uses may lead there. Private networks are open: services of the cluster live in them.
fn prohibited(address: IpAddr) -> Option<&'static str> {
    match address.to_canonical() {
        IpAddr::V4(v4) if v4.is_loopback() => Some("an address of this machine"),
        IpAddr::V4(v4) if v4.octets()[0] == 0 => Some("no address of a host"),
        IpAddr::V4(v4) if v4.is_link_local() => Some("a link-local address, where clouds keep credentials"),
        IpAddr::V4(v4) if v4.octets() == [100, 100, 100, 200] => Some("the metadata service of a cloud"),
        IpAddr::V4(v4) if v4.is_multicast() || v4.is_broadcast() => Some("no address of one host"),
        IpAddr::V6(v6) if v6.is_loopback() => Some("an address of this machine"),
        IpAddr::V6(v6) if v6.is_unspecified() => Some("no address of a host"),
        IpAddr::V6(v6) if v6.is_unicast_link_local() => Some("a link-local address, where clouds keep credentials"),
        IpAddr::V6(v6) if v6.segments() == [0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254] => Some("the metadata service of a cloud"),
        IpAddr::V6(v6) if v6.is_multicast() => Some("no address of one host"),
        IpAddr::V6(v6) => match v6.segments() {
            // NAT64 and 6to4 carry an IPv4 address.
            [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x2002, high, low, ..] => {
                let [a, b] = high.to_be_bytes();
                let [c, d] = low.to_be_bytes();
                prohibited(IpAddr::from([a, b, c, d]))
            }
            _ => None,
        },
        IpAddr::V4(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn names_must_not_lead_to_this_machine_or_to_metadata() {
        let of = |text: &str| prohibited(text.parse().expect(text));
        for address in [
            "127.0.0.1",
            "127.9.9.9",
            "0.0.0.0",
            "0.1.2.3",
            "169.254.169.254",
            "100.100.100.200",
            "224.0.0.1",
            "255.255.255.255",
            "::1",
            "::",
            "fe80::1",
            "fd00:ec2::254",
            "ff02::1",
            "::ffff:127.0.0.1",
            "64:ff9b::a9fe:a9fe",
            "2002:7f00:1::",
        ] {
            assert!(of(address).is_some(), "{address}");
        }
        for address in ["10.0.0.1", "192.168.1.1", "172.16.0.1", "93.184.216.34", "2001:db8::1", "fd00::1", "64:ff9b::5db8:d822"] {
            assert_eq!(of(address), None, "{address}");
        }
    }

    #[test]
    fn a_name_with_one_open_address_connects_to_that_one_only() {
        let of = |list: &[&str]| check("n", 80, list.iter().map(|ip| SocketAddr::new(ip.parse().expect("valid"), 80)).collect());
        assert_eq!(of(&["127.0.0.1", "10.0.0.1"]).expect("one is open"), ["10.0.0.1:80".parse().expect("valid")]);
        let denied = of(&["169.254.169.254"]).expect_err("all refused").to_string();
        assert!(denied.contains("--resolve n:80=169.254.169.254"), "{denied}");
        assert!(matches!(of(&[]), Err(DialError::NoName(_))));
    }

    #[tokio::test]
    async fn literal_addresses_and_resolve_entries_are_trusted_and_localhost_is_not() {
        let entry = ["a:80=127.0.0.1:9".parse().expect("valid")];
        let of = async |uri: &'static str| addresses(&Uri::from_static(uri), &entry).await;
        assert_eq!(of("http://A/x").await.expect("resolved"), ["127.0.0.1:9".parse().expect("valid")]);
        assert_eq!(of("http://127.0.0.1:8080/").await.expect("literal"), ["127.0.0.1:8080".parse().expect("valid")]);
        assert_eq!(of("https://[::1]/").await.expect("literal"), ["[::1]:443".parse().expect("valid")]);
        assert!(matches!(of("http://localhost/").await, Err(DialError::Prohibited { .. })));
    }
}
