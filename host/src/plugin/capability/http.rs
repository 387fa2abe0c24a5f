//! `wasi:http`: a guest's requests, performed by the host's pooled client within the grant, the fence and the limits.
//!
//! # Expected flow
//! [`Hooks`] belong to one run. A request is counted, its place compared with the [`Grant`], and then sent by the [`Client`] under
//! the run's fence. Responses stream to the guest through [`Answer`].
//!
//! # Guarantees
//! Nothing is sent to a place that is not both claimed and allowed, nor to an address that the host keeps from guests. No redirect is
//! followed. No request starts after the fence's deadline; one in flight is aborted at it.
//!
//! # Caveats
//! A denied request's body is read to its end first: some guest clients report a closed stream instead of the denial.

mod answer;
mod client;
mod grant;

use std::{
    pin::Pin,
    sync::{Arc, OnceLock},
    time::Duration,
};

use http::{Method, Request, Response};
use http_body_util::BodyExt;
use tokio::time::Instant;
use wasmtime_wasi_http::{Error, RequestOptions, WasiBody, WasiHttpHooks};

use self::{answer::Answer, client::Sent};
pub use self::{
    client::{Client, InvalidResolve, Resolve},
    grant::Grant,
};
use super::log::Log;
use crate::{
    fence::{Fence, Stopped},
    package::AllowedHost,
    plugin::limits::{self, Size},
};

/// The HTTP of one run.
pub struct Hooks {
    pub(in crate::plugin) log: Arc<Log>,
    outlet: Option<Outlet>,
    sent: u32,
    exceeded: Arc<OnceLock<String>>,
}

/// What the requests of a run go out through.
#[derive(Clone)]
pub struct Outlet {
    /// The host's client.
    pub client: Arc<Client>,
    /// Where to.
    pub grant: Arc<Grant>,
    /// Until when.
    pub fence: Fence,
    /// The end of the whole call.
    pub deadline: Instant,
}

impl Hooks {
    /// Without an outlet every request is denied: a trial has no capability.
    pub fn new(log: Arc<Log>, outlet: Option<Outlet>) -> Self {
        Self { log, outlet, sent: 0, exceeded: Arc::default() }
    }

    /// The first limit that was reached, in a sentence.
    pub fn exceeded(&self) -> Option<String> {
        self.exceeded.get().cloned()
    }
}

type Io = Box<dyn Future<Output = Result<(), Error>> + Send>;
type Sending = Box<dyn Future<Output = Result<(Response<WasiBody>, Io), Error>> + Send>;

impl WasiHttpHooks for Hooks {
    fn send_request(&mut self, request: Request<WasiBody>, options: Option<RequestOptions>, _: Io) -> Sending {
        self.sent = self.sent.saturating_add(1);
        let (log, exceeded) = (self.log.clone(), self.exceeded.clone());
        if self.sent > limits::HTTP_REQUESTS {
            let sentence = format!("the handler sent more than the {} HTTP requests that a run may", limits::HTTP_REQUESTS);
            let sentence = exceeded.get_or_init(|| sentence).clone();
            return Box::new(deny(request, log, sentence.clone(), Error::InternalError(Some(sentence))));
        }
        let outlet = match self.outlet.clone() {
            Some(outlet) => outlet,
            None => return Box::new(deny(request, log, "describe must not send requests".into(), Error::HttpRequestDenied)),
        };
        match permitted(&outlet.grant, &request) {
            Ok(()) => Box::new(send(outlet, request, options.unwrap_or_default(), log, exceeded)),
            Err(sentence) => Box::new(deny(request, log, sentence, Error::HttpRequestDenied)),
        }
    }
}

fn permitted(grant: &Grant, request: &Request<WasiBody>) -> Result<(), String> {
    let uri = request.uri();
    if request.method() == Method::CONNECT {
        return Err("denied a CONNECT request: guests open no tunnels".into());
    }
    let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
        return Err("denied a request without a scheme or host".into());
    };
    let place = AllowedHost::new(scheme, authority.as_str())
        .map_err(|error| format!("denied a request to \"{scheme}://{authority}\", which {error}"))?;
    grant.check(&place)
}

async fn deny(request: Request<WasiBody>, log: Arc<Log>, sentence: String, error: Error) -> Result<(Response<WasiBody>, Io), Error> {
    log.host(&sentence);
    let mut body = request.into_body();
    while let Some(Ok(_)) = body.frame().await {}
    Err(error)
}

async fn send(
    outlet: Outlet,
    request: Request<WasiBody>,
    options: RequestOptions,
    log: Arc<Log>,
    exceeded: Arc<OnceLock<String>>,
) -> Result<(Response<WasiBody>, Io), Error> {
    let place = request.uri().clone();
    let left = outlet.deadline.saturating_duration_since(Instant::now());
    let connect = smaller(options.connect_timeout, limits::HTTP_CONNECT);
    let first_byte = smaller(options.first_byte_timeout, limits::HTTP_FIRST_BYTE).saturating_add(connect).min(left);
    let response = match outlet.fence.guard(first_byte, outlet.client.send(request)).await {
        Ok(Sent::Response(response)) => response,
        Ok(Sent::Refused(sentence)) => {
            log.host(&sentence);
            return Err(Error::DestinationIpProhibited);
        }
        Ok(Sent::Failed(error, cause)) => {
            tracing::debug!(%place, %cause, "HTTP request of a guest failed");
            return Err(error);
        }
        Err(Stopped::TimedOut(_)) => return Err(Error::HttpResponseTimeout),
        // The run itself is being stopped; the guest never sees this.
        Err(Stopped::Fenced) => return Err(Error::ConnectionTerminated),
    };
    let on_excess = move || {
        let most = Size(limits::HTTP_RESPONSE_BYTES as u64);
        let _ = exceeded.set(format!("a response from {} is larger than the {most} that one may have", place.host().unwrap_or_default()));
    };
    let body = |body| Answer::new(body, limits::HTTP_RESPONSE_BYTES, options.between_bytes_timeout, on_excess).boxed_unsync();
    Ok((response.map(body), Box::new(async { Ok(()) })))
}

fn smaller(guest: Option<Duration>, host: Duration) -> Duration {
    guest.map_or(host, |guest| guest.min(host))
}

/// Boxed futures of the connector.
type Boxed<T, E> = Pin<Box<dyn Future<Output = Result<T, E>> + Send>>;
