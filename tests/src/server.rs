//! A server of HTTP/1.1 and, within TLS, HTTP/2, that can hang up instead of answering, fall silent, and refuse connections for a while
//! on an address that stays its own.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{Router, response::Response};
use hyper::{
    server::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpSocket},
    sync::watch,
    task::{JoinHandle, JoinSet},
};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

/// As an extension of a response: close the connection instead of sending it; of an HTTP/2 connection, the stream.
#[derive(Clone, Copy, Debug)]
pub struct HangUp;

/// As an extension of a request: which connection it came by, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection(pub usize);

/// A response that is never sent: the connection is closed.
pub fn hang_up() -> Response {
    let mut response = Response::default();
    response.extensions_mut().insert(HangUp);
    response
}

/// The connection is to be closed without an answer.
#[derive(Debug)]
struct HungUp;

impl std::fmt::Display for HungUp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("hung up as told")
    }
}

impl std::error::Error for HungUp {}

/// A running server; dropping it closes its connections.
#[derive(Debug)]
pub struct Server {
    addr: SocketAddr,
    /// Bound but never listening: keeps the port while the server is down, so that connections to it are refused.
    _reservation: TcpSocket,
    face: Face,
    running: Mutex<Option<Running>>,
}

/// How a server speaks TLS, and HTTP/2 within it.
#[derive(Clone)]
pub struct Tls {
    /// Its certificate and protocols.
    pub acceptor: TlsAcceptor,
    /// How many requests it takes at a time on one connection of HTTP/2.
    pub streams: u32,
}

/// What every connection is served by.
#[derive(Clone)]
struct Face {
    router: Router,
    tls: Option<Tls>,
    accepted: Arc<AtomicUsize>,
    /// The connections before this one are silent.
    silent_before: watch::Sender<usize>,
}

impl std::fmt::Debug for Face {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Face").field("accepted", &self.accepted).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Running {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Server {
    /// Listens on `listen` (port 0 for any) and serves `router`.
    pub async fn start(listen: SocketAddr, router: Router) -> io::Result<Self> {
        Self::behind(None, listen, router).await
    }

    /// The same within TLS, if there is any.
    pub async fn behind(tls: Option<Tls>, listen: SocketAddr, router: Router) -> io::Result<Self> {
        let reservation = bind(listen)?;
        let face = Face { router, tls, accepted: Arc::default(), silent_before: watch::Sender::new(0) };
        let server = Self { addr: reservation.local_addr()?, _reservation: reservation, face, running: Mutex::default() };
        server.up()?;
        Ok(server)
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// How many connections were accepted so far.
    pub fn accepted(&self) -> usize {
        self.face.accepted.load(Ordering::Relaxed)
    }

    /// From now on nothing comes by the connections that are open, and nothing is read from them, as where a network has lost them.
    pub fn fall_silent(&self) {
        self.face.silent_before.send_replace(self.accepted());
    }

    /// Closes every connection and refuses new ones.
    pub async fn down(&self) {
        let running = self.running.lock().expect("no holder panics").take();
        if let Some(running) = running {
            running.stop.cancel();
            running.task.await.ok();
        }
    }

    /// Listens again after [`Server::down`].
    pub fn up(&self) -> io::Result<()> {
        let mut running = self.running.lock().expect("no holder panics");
        if running.is_none() {
            let listener = bind(self.addr)?.listen(1024)?;
            let stop = CancellationToken::new();
            let task = tokio::spawn(accept(listener, self.face.clone(), stop.clone()));
            *running = Some(Running { stop, task });
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(running) = self.running.get_mut().expect("no holder panics").take() {
            running.stop.cancel();
        }
    }
}

fn bind(addr: SocketAddr) -> io::Result<TcpSocket> {
    let socket = if addr.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(addr)?;
    Ok(socket)
}

/// Accepts until told to stop; then its connections end with it.
async fn accept(listener: TcpListener, face: Face, stop: CancellationToken) {
    let mut connections = JoinSet::new();
    loop {
        let stream = tokio::select! {
            () = stop.cancelled() => return,
            Some(_) = connections.join_next() => continue,
            Ok((stream, _)) = listener.accept() => stream,
        };
        let number = face.accepted.fetch_add(1, Ordering::Relaxed);
        stream.set_nodelay(true).ok();
        let mut silent = face.silent_before.subscribe();
        let router = face.router.clone();
        let serving = match face.tls.clone() {
            None => futures::future::Either::Left(serve(stream, router, number, None)),
            Some(tls) => futures::future::Either::Right(async move {
                // A client that does not trust the certificate hangs up.
                let Ok(stream) = tls.acceptor.accept(stream).await else { return };
                let is_http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                serve(stream, router, number, is_http2.then_some(tls.streams)).await;
            }),
        };
        connections.spawn(async move {
            let mut serving = std::pin::pin!(serving);
            tokio::select! {
                () = &mut serving => return,
                _ = silent.wait_for(|before| number < *before) => {}
            }
            // Held, and not looked at any more.
            std::future::pending::<()>().await;
        });
    }
}

/// A connection that breaks is the client's affair, or what the test asked for.
async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, router: Router, number: usize, streams: Option<u32>) {
    let service = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
        request.extensions_mut().insert(Connection(number));
        let answer = hyper::service::Service::call(&service, request);
        async {
            let Ok(response) = answer.await;
            if response.extensions().get::<HangUp>().is_some() { Err(HungUp) } else { Ok(response) }
        }
    });
    let io = TokioIo::new(stream);
    if let Some(streams) = streams {
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder.timer(TokioTimer::new()).max_concurrent_streams(streams).serve_connection(io, service).await.ok();
    } else {
        http1::Builder::new().timer(TokioTimer::new()).serve_connection(io, service).await.ok();
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpStream,
    };

    use super::*;

    async fn get(addr: SocketAddr, path: &str) -> io::Result<String> {
        let mut stream = TcpStream::connect(addr).await?;
        stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes()).await?;
        let mut text = String::new();
        stream.read_to_string(&mut text).await?;
        Ok(text)
    }

    #[tokio::test]
    async fn a_server_answers_hangs_up_refuses_and_comes_back_on_its_port() {
        let router =
            Router::new().route("/ok", axum::routing::get(|| async { "fine" })).route("/hang", axum::routing::get(|| async { hang_up() }));
        let server = Server::start(([127, 0, 0, 1], 0).into(), router).await.expect("listens");
        assert!(get(server.addr(), "/ok").await.expect("answers").ends_with("fine"));
        assert_eq!(get(server.addr(), "/hang").await.expect("closed in order"), "");
        let mut open = TcpStream::connect(server.addr()).await.expect("connects");
        open.write_all(b"GET /ok HTTP/1.1\r\nhost: x\r\n\r\n").await.expect("sent");
        assert!(open.read(&mut [0; 512]).await.expect("answered") > 0);
        server.down().await;
        assert_eq!(open.read_to_end(&mut Vec::new()).await.expect("closed in order"), 0);
        assert_eq!(get(server.addr(), "/ok").await.expect_err("down").kind(), io::ErrorKind::ConnectionRefused);
        server.up().expect("the port is still ours");
        assert!(get(server.addr(), "/ok").await.expect("answers").ends_with("fine"));
        assert_eq!(server.accepted(), 4);
    }
}
