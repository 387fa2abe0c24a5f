//! A server that speaks TLS under an authority of the test's own, asks for a token, and remembers what it was sent.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderMap, StatusCode, header},
    response::IntoResponse,
    serve::Listener,
};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, KeyUsagePurpose};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        ServerConfig, crypto,
        pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
    },
    server::TlsStream,
};

/// A certificate authority.
pub struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

impl Authority {
    /// A new one, which nobody trusts yet.
    pub fn new() -> Self {
        let mut parameters = CertificateParams::default();
        parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().expect("a key");
        Self { issuer: CertifiedIssuer::self_signed(parameters, key).expect("signs itself") }
    }

    /// Its certificate.
    pub fn pem(&self) -> String {
        self.issuer.pem()
    }

    /// Its certificate, as configurations of clients hold it.
    pub fn der(&self) -> Vec<u8> {
        self.issuer.der().to_vec()
    }

    /// A server's side for these names, which speaks these protocols (as ALPN names them).
    pub fn serving(&self, names: &[&str], protocols: &[&str]) -> TlsAcceptor {
        let parameters = CertificateParams::new(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>()).expect("valid names");
        let key = KeyPair::generate().expect("a key");
        let certificate = parameters.signed_by(&key, &self.issuer).expect("signed");
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let mut config = ServerConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("ring has what TLS needs")
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key)
            .expect("key and certificate belong together");
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
        TlsAcceptor::from(Arc::new(config))
    }
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}

impl Default for Authority {
    fn default() -> Self {
        Self::new()
    }
}

/// A running server; dropping it ends it.
pub struct TlsServer {
    address: SocketAddr,
    desk: Desk,
    task: JoinHandle<()>,
}

#[derive(Clone, Default)]
struct Desk {
    token: Arc<Mutex<Option<String>>>,
    seen: Arc<Mutex<Vec<HeaderMap>>>,
}

impl TlsServer {
    /// With a certificate of the authority for these names.
    pub async fn start(authority: &Authority, names: &[&str]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let listener = Handshakes { listener, acceptor: authority.serving(names, &[]) };
        let desk = Desk::default();
        let router = Router::new().fallback(answer).with_state(desk.clone());
        let task = tokio::spawn(async move { axum::serve(listener, router).await.expect("serves") });
        Self { address, desk, task }
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.address
    }

    /// From now on only requests with `Authorization: Bearer TOKEN` are answered with 200, others with 401.
    pub fn ask_for(&self, token: &str) {
        *self.desk.token.lock().expect("no holder panics") = Some(token.to_owned());
    }

    /// The headers of the requests so far.
    pub fn seen(&self) -> Vec<HeaderMap> {
        self.desk.seen.lock().expect("no holder panics").clone()
    }
}

impl Drop for TlsServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn answer(State(desk): State<Desk>, request: Request) -> impl IntoResponse {
    let headers = request.headers().clone();
    let wanted = desk.token.lock().expect("no holder panics").as_ref().map(|token| format!("Bearer {token}"));
    let let_in = wanted.is_none_or(|wanted| headers.get(header::AUTHORIZATION).is_some_and(|given| given == wanted.as_str()));
    desk.seen.lock().expect("no holder panics").push(headers);
    if let_in { (StatusCode::OK, "welcome") } else { (StatusCode::UNAUTHORIZED, "who are you?") }
}

struct Handshakes {
    listener: TcpListener,
    acceptor: TlsAcceptor,
}

impl Listener for Handshakes {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        loop {
            let Ok((stream, address)) = self.listener.accept().await else { continue };
            // A client that does not trust the certificate hangs up.
            if let Ok(stream) = self.acceptor.accept(stream).await {
                return (stream, address);
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}
