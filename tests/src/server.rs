//! An HTTP/1 server that can hang up instead of answering, and refuse connections for a while on an address that stays its own.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{Router, response::Response};
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    net::{TcpListener, TcpSocket},
    task::{JoinHandle, JoinSet},
};
use tokio_util::sync::CancellationToken;

/// As an extension of a response: close the connection instead of sending it.
#[derive(Clone, Copy, Debug)]
pub struct HangUp;

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
    router: Router,
    accepted: Arc<AtomicUsize>,
    running: Mutex<Option<Running>>,
}

#[derive(Debug)]
struct Running {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Server {
    /// Listens on `listen` (port 0 for any) and serves `router`.
    pub async fn start(listen: SocketAddr, router: Router) -> io::Result<Self> {
        let reservation = bind(listen)?;
        let server = Self {
            addr: reservation.local_addr()?,
            _reservation: reservation,
            router,
            accepted: Arc::default(),
            running: Mutex::default(),
        };
        server.up()?;
        Ok(server)
    }

    /// Where it listens.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// How many connections were accepted so far.
    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::Relaxed)
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
            let task = tokio::spawn(accept(listener, self.router.clone(), self.accepted.clone(), stop.clone()));
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
async fn accept(listener: TcpListener, router: Router, accepted: Arc<AtomicUsize>, stop: CancellationToken) {
    let mut connections = JoinSet::new();
    loop {
        let stream = tokio::select! {
            () = stop.cancelled() => return,
            Some(_) = connections.join_next() => continue,
            Ok((stream, _)) = listener.accept() => stream,
        };
        accepted.fetch_add(1, Ordering::Relaxed);
        stream.set_nodelay(true).ok();
        let service = TowerToHyperService::new(router.clone());
        connections.spawn(async move {
            let service = service_fn(|request| {
                let answer = hyper::service::Service::call(&service, request);
                async {
                    let Ok(response) = answer.await;
                    if response.extensions().get::<HangUp>().is_some() { Err(HungUp) } else { Ok(response) }
                }
            });
            // A connection that breaks is the client's affair, or what the test asked for.
            http1::Builder::new().timer(TokioTimer::new()).serve_connection(TokioIo::new(stream), service).await.ok();
        });
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
