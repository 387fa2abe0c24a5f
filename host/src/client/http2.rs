//! Requests that share HTTP/2 connections, each with as many as API servers allow.
//!
//! # Guarantees
//! - One connection is opened at a time, however many requests wait for it; where that fails, all of them hear why.
//! - A connection that is dead is found out by pings within a minute, for all that is on it. One on which a request was given up before
//!   its answer came has no others sent on it.
//! - A request is sent on another connection only where this one has not sent it.

use std::{
    error::Error,
    fmt, mem,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{
            AtomicUsize,
            Ordering::{AcqRel, Acquire},
        },
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use futures::{
    FutureExt,
    future::{BoxFuture, Shared},
};
use http::{Request, Response, Uri};
use http_body::{Body as HttpBody, Frame, SizeHint};
use hyper::{
    body::Incoming,
    client::conn::http2::{self, SendRequest},
};
use hyper_util::{
    client::legacy::connect::Connection,
    rt::{TokioExecutor, TokioTimer},
};
use kube::client::Body;
use tokio::task::JoinError;
use tower_service::Service;

use super::{BoxError, Connector};
use crate::text::chain;

/// Requests on one connection at most: what kube-apiserver takes. More than the server takes would wait until others end.
const REQUESTS: usize = 100;

/// How many are sent before the server has told how many it takes, which is the first thing that it sends; how often that is looked for,
/// and for how long.
const UNTOLD: usize = 1;
const LOOK: Duration = Duration::from_millis(1);
const SETTINGS: Duration = Duration::from_millis(100);

/// How long a connection may be silent before it is pinged, and how long it then has to answer. Those of Kubernetes' own client.
const PING_AFTER: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(15);

/// What one request may have on its way to us, and what all of a connection may: a few that are not read hold up nobody else.
const REQUEST_WINDOW: u32 = 1 << 20;
const WINDOW: u32 = 16 << 20;

/// The connections to one server. Clones are the same.
#[derive(Clone)]
pub(super) struct Connections(Arc<Inner>);

struct Inner {
    connector: Connector,
    server: Uri,
    lines: Mutex<Lines>,
}

#[derive(Default)]
struct Lines {
    open: Vec<Line>,
    opening: Option<Opening>,
}

type Opening = Shared<BoxFuture<'static, Result<Line, NoConnection>>>;

/// One connection.
#[derive(Clone)]
struct Line {
    sender: SendRequest<Body>,
    /// How many requests are on it.
    load: Arc<AtomicUsize>,
    /// How many the server takes.
    most: usize,
}

/// A request's place on a connection.
struct Place(Arc<AtomicUsize>);

impl Line {
    /// A place, if there is one. To be asked by one at a time.
    fn place(&self) -> Option<Place> {
        if self.load.load(Acquire) >= self.most {
            return None;
        }
        self.load.fetch_add(1, AcqRel);
        Some(Place(self.load.clone()))
    }

    fn is_idle(&self) -> bool {
        self.load.load(Acquire) == 0
    }

    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.load, &other.load)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, AcqRel);
    }
}

/// Why there is no connection.
#[derive(Clone, Debug)]
enum NoConnection {
    /// The server has chosen another protocol.
    NoHttp2,
    /// Anything else.
    Failed(Arc<BoxError>),
}

/// Why there is no response.
pub(super) enum Unanswered {
    /// The server does not know HTTP/2, and has not been sent the request.
    NoHttp2(Box<Request<Body>>),
    /// Anything else.
    Failed(BoxError),
}

impl Connections {
    pub(super) fn new(connector: Connector, server: Uri) -> Self {
        Self(Arc::new(Inner { connector, server, lines: Mutex::default() }))
    }

    /// The response, which has its place on the connection until it is dropped.
    pub(super) async fn send(&self, mut request: Request<Body>) -> Result<Response<Answer>, Unanswered> {
        loop {
            let (mut line, place, is_new) = match self.line().await {
                Ok(found) => found,
                Err(NoConnection::NoHttp2) => return Err(Unanswered::NoHttp2(request.into())),
                Err(error) => return Err(Unanswered::Failed(error.into())),
            };
            let sent = line.sender.try_send_request(request);
            let doubt = Doubt { connections: self, line: &line };
            let mut error = match sent.await {
                Ok(response) => {
                    doubt.dispel();
                    return Ok(response.map(|body| Answer { body, _place: Some(place) }));
                }
                Err(error) => error,
            };
            match error.take_message() {
                // It was closed meanwhile, as others may be that were opened before.
                Some(unsent) if !is_new => request = unsent,
                _ => {
                    doubt.dispel();
                    return Err(Unanswered::Failed(error.into_error().into()));
                }
            }
        }
    }

    /// A connection, a place on it, and whether it was opened for this.
    async fn line(&self) -> Result<(Line, Place, bool), NoConnection> {
        loop {
            let opening = {
                let mut lines = self.lines();
                lines.open.retain(|line| !line.sender.is_closed());
                let found = lines.open.iter().enumerate().find_map(|(index, line)| Some((index, line.clone(), line.place()?)));
                if let Some((index, line, place)) = found {
                    // Of those behind it the ones that nobody uses end: there were more requests once.
                    let behind = lines.open.split_off(index + 1);
                    lines.open.extend(behind.into_iter().filter(|line| !line.is_idle()));
                    return Ok((line, place, false));
                }
                lines.opening.get_or_insert_with(|| self.opening()).clone()
            };
            let line = opening.await?;
            // Also on one that is closed already: whoever uses it finds out.
            let _one_at_a_time = self.lines();
            if let Some(place) = line.place() {
                return Ok((line, place, true));
            }
        }
    }

    /// Opens another one, whether or not those who wait for it go on to do so.
    fn opening(&self) -> Opening {
        let this = self.clone();
        let opening = tokio::spawn(async move {
            let opened = open(this.0.connector.clone(), this.0.server.clone()).await;
            let mut lines = this.lines();
            lines.opening = None;
            lines.open.extend(opened.iter().cloned());
            opened
        });
        let this = self.clone();
        let panicked = move |panic: JoinError| {
            this.lines().opening = None;
            Err(NoConnection::Failed(Arc::new(panic.into())))
        };
        opening.map(|opened| opened.unwrap_or_else(panicked)).boxed().shared()
    }

    fn lines(&self) -> MutexGuard<'_, Lines> {
        self.0.lines.lock().expect("no holder panics")
    }
}

/// What is to be thought of a connection until it has answered: dropped before, it is not sent anything more.
struct Doubt<'c> {
    connections: &'c Connections,
    line: &'c Line,
}

impl Doubt<'_> {
    fn dispel(self) {
        mem::forget(self);
    }
}

impl Drop for Doubt<'_> {
    fn drop(&mut self) {
        self.connections.lines().open.retain(|line| !line.is(self.line));
    }
}

async fn open(mut connector: Connector, server: Uri) -> Result<Line, NoConnection> {
    let failed = |error: BoxError| NoConnection::Failed(Arc::new(error));
    let stream = connector.call(server).await.map_err(failed)?;
    if !stream.connected().is_negotiated_h2() {
        return Err(NoConnection::NoHttp2);
    }
    let handshake = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_AFTER)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(REQUEST_WINDOW)
        .initial_connection_window_size(WINDOW)
        .initial_max_send_streams(UNTOLD)
        .handshake(stream);
    let (sender, connection) = handshake.await.map_err(|error| failed(error.into()))?;
    let mut left = SETTINGS;
    while connection.current_max_send_streams() == UNTOLD && !left.is_zero() {
        tokio::time::sleep(LOOK).await;
        left -= LOOK;
    }
    let most = connection.current_max_send_streams().min(REQUESTS);
    tokio::spawn(async move {
        if let Err(error) = connection.await {
            tracing::debug!(error = chain(&error), "a connection to the API server broke");
        }
    });
    Ok(Line { sender, load: Arc::default(), most })
}

impl fmt::Display for NoConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoHttp2 => f.write_str("the server does not speak HTTP/2"),
            Self::Failed(error) => write!(f, "no connection: {}", chain(&***error)),
        }
    }
}

impl Error for NoConnection {}

/// The body of a response, with its place on a connection that others share.
pub(super) struct Answer {
    body: Incoming,
    _place: Option<Place>,
}

/// Of a connection of its own.
impl From<Incoming> for Answer {
    fn from(body: Incoming) -> Self {
        Self { body, _place: None }
    }
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
