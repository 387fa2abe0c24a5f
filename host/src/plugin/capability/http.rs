//! `wasi:http`: a guest's requests, performed by the host's pooled client within the grant, the fence and the limits.
//!
//! # Expected flow
//! [`Hooks`] belong to one run. A request is counted, passes the [`Gate`], gets the credentials of its [`Route`], and is sent by the
//! route's [`Client`] under the run's fence. Responses stream to the guest through [`Answer`].
//!
//! # Guarantees
//! Nothing is sent to a place that is not both claimed and allowed, nor to an address that the host keeps from guests. No redirect is
//! followed. No request starts after the fence's deadline; one in flight is aborted at it. Credentials go to the places that both
//! `allowedHosts` and their Secret name; the guest can neither see them nor set their header.
//!
//! # Caveats
//! A denied request's body is read to its end first: some guest clients report a closed stream instead of the denial. A back end that
//! answers with the headers of its request shows the guest its own credentials.

mod address;
mod answer;
mod asked;
mod client;
mod grant;
pub mod head;
mod kept;
mod line;
mod route;

use std::{
    pin::Pin,
    sync::{Arc, OnceLock},
    time::Duration,
};

use http::{HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body::Body;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::Instant;
use wasmtime_wasi_http::{Error, RequestOptions, WasiBody, WasiHttpHooks};

pub use self::asked::Life;
use self::{
    answer::Answer,
    asked::{Asked, Ended},
    client::Sent,
};
pub use self::{
    client::{Client, InvalidResolve, Resolve, Ways},
    grant::Grant,
    route::{Outside, Route},
};
use super::gate::{Call, Denied, Gate, Permit};
use crate::{
    denial::Denial,
    fence::{Fence, Stopped},
    package::{Origin, RunLimits},
    plugin::limits::{self, Limits, Size},
};

/// The HTTP of one run.
pub struct Hooks {
    gate: Arc<Gate>,
    limits: Limits,
    outlet: Option<Outlet>,
    sent: u32,
    run: Ended,
    met: Met,
}

/// The limits that the requests of a run have met, each the first time, in a sentence.
#[derive(Clone, Debug, Default)]
pub struct Met {
    /// One of number or size: it would be met again.
    pub exceeded: Arc<OnceLock<String>>,
    /// One of time: the other side may be faster the next time.
    pub late: Arc<OnceLock<String>>,
}

/// Until when the requests of a run may go out.
#[derive(Clone)]
pub struct Outlet {
    /// Of the run.
    pub fence: Fence,
    /// The end of the whole call.
    pub deadline: Instant,
}

impl Hooks {
    /// For the run of this life. Without an outlet nothing is sent, whatever the gate says: a trial has no capability.
    pub fn new(gate: Arc<Gate>, limits: Limits, outlet: Option<Outlet>, life: &Life) -> Self {
        Self { gate, limits, outlet, sent: 0, run: life.ended(), met: Met::default() }
    }

    /// What was met so far.
    pub fn met(&self) -> Met {
        self.met.clone()
    }
}

type Io = Box<dyn Future<Output = Result<(), Error>> + Send>;
type Answered = Result<(Response<WasiBody>, Io), Error>;
type Sending = Box<dyn Future<Output = Answered> + Send>;

impl WasiHttpHooks for Hooks {
    fn p2_outgoing_body_chunk_size(&mut self) -> usize {
        limits::BODY_CHUNK
    }

    fn send_request(&mut self, request: Request<WasiBody>, options: Option<RequestOptions>, _: Io) -> Sending {
        self.sent = self.sent.saturating_add(1);
        let most = self.limits.run.http_requests;
        if self.sent > most {
            let how = self.limits.how("limits.httpRequests");
            let sentence =
                self.met.exceeded.get_or_init(|| format!("the handler sent more than the {most} HTTP requests that a run may{how}"));
            return Box::new(deny(request, Error::InternalError(Some(sentence.clone()))));
        }
        let permit = self.gate.check(&Call::Http { method: request.method(), uri: request.uri() });
        // A guest that still computes when its run is over begins nothing.
        match (permit, self.outlet.clone().filter(|_| !self.run.is_over())) {
            (Ok(Permit::Http(place, route)), Some(outlet)) => {
                let sender = Sender { gate: self.gate.clone(), limits: self.limits, met: self.met.clone(), outlet, place, route };
                let run = self.run.clone();
                Box::new(sender.send(request.map(|body| Asked::new(body, run)), options.unwrap_or_default()))
            }
            _ => Box::new(deny(request, Error::HttpRequestDenied)),
        }
    }
}

async fn deny<B: Body + Unpin>(request: Request<B>, error: Error) -> Answered {
    let mut body = request.into_body();
    while let Some(Ok(_)) = body.frame().await {}
    Err(error)
}

/// One request on its way.
struct Sender {
    gate: Arc<Gate>,
    limits: Limits,
    met: Met,
    outlet: Outlet,
    place: Origin,
    route: Arc<Route>,
}

impl Sender {
    async fn send(self, mut request: Request<Asked>, options: RequestOptions) -> Answered {
        let prepared = self.outlet.fence.guard(self.left(), self.prepare()).await;
        let (client, credential) = match prepared {
            Ok(Ok(prepared)) => prepared,
            Ok(Err(sentence)) => {
                self.gate.deny(&Denied::new(Denial::HttpSecret, &sentence));
                return deny(request, Error::InternalError(Some(sentence))).await;
            }
            Err(stopped) => return Err(ended(&stopped)),
        };
        if let Some((header, value)) = credential.clone() {
            // Whatever the guest has put there goes.
            request.headers_mut().insert(header, value);
        }
        let response = self.deliver(&client, request, &options).await?;
        if response.status() == StatusCode::UNAUTHORIZED && self.was_rotated(credential.as_ref()).await {
            // The guest would take the 401 for final.
            return Err(Error::InternalError(Some(format!("the credentials for {} were being rotated", self.place))));
        }
        let most = self.limits.run.http_response;
        let (place, how, exceeded) = (self.place, self.limits.how("limits.httpResponse"), self.met.exceeded);
        let on_excess = move || {
            let size = Size(most as u64);
            let _ = exceeded.set(format!("a response from {} is larger than the {size} that one may have{how}", place.host()));
        };
        let body = |body| Answer::new(body, most, options.between_bytes_timeout, on_excess).boxed_unsync();
        Ok((response.map(body), Box::new(async { Ok(()) })))
    }

    /// Waits for the head of the response.
    async fn deliver(&self, client: &Client, request: Request<Asked>, options: &RequestOptions) -> Result<Response<Incoming>, Error> {
        let RunLimits { http_connect, http_first_byte, .. } = self.limits.run;
        let connect = smaller(options.connect_timeout, http_connect);
        let first_byte = smaller(options.first_byte_timeout, http_first_byte);
        let both = first_byte.saturating_add(connect).min(self.left());
        match self.outlet.fence.guard(both, client.send(request)).await {
            Ok(Sent::Response(response)) => Ok(response),
            Ok(Sent::Refused(sentence)) => {
                self.gate.deny(&Denied::new(Denial::HttpAddress, &sentence));
                Err(Error::DestinationIpProhibited)
            }
            Ok(Sent::Late) => {
                self.late("connection to", http_connect, "limits.httpConnect");
                Err(Error::ConnectionTimeout)
            }
            Ok(Sent::Crowded(most)) => {
                let sentence =
                    || format!("all of the {most} connections that one plugin may have are in use (`--connections` of berth run)");
                self.met.late.get_or_init(sentence);
                Err(Error::ConnectionLimitReached)
            }
            Ok(Sent::Failed(error, cause)) => {
                if matches!(error, Error::TlsCertificateError) {
                    self.gate.deny(&self.untrusted(&cause));
                }
                tracing::debug!(place = %self.place, %cause, "HTTP request of a guest failed");
                Err(error)
            }
            Err(stopped) => {
                // The guest's own time, or the end of the call, is no limit of ours.
                if first_byte == http_first_byte && !self.left().is_zero() {
                    self.late("answer from", http_first_byte, "limits.httpFirstByte");
                }
                Err(ended(&stopped))
            }
        }
    }

    fn late(&self, what: &str, limit: Duration, setting: &str) {
        let how = self.limits.how(setting);
        let sentence = || format!("there was no {what} {} within the {limit:?} that it may take{how}", self.place);
        self.met.late.get_or_init(sentence);
    }

    /// The client that trusts whom it should, and the header to set.
    async fn prepare(&self) -> Result<(Arc<Client>, Option<(HeaderName, HeaderValue)>), String> {
        Ok((self.route.client().await?, self.route.credential(&self.place).await?))
    }

    async fn was_rotated(&self, credential: Option<&(HeaderName, HeaderValue)>) -> bool {
        let Some((_, value)) = credential else { return false };
        self.outlet.fence.guard(self.left(), self.route.rotated(value)).await.unwrap_or(false)
    }

    fn untrusted(&self, cause: &str) -> Denied {
        let whom = match &self.route.host.ca {
            Some(_) => "by the `ca` of its entry in `allowedHosts`",
            None => "by the authorities of the web; to trust another, name it as `ca` of its entry in `allowedHosts`",
        };
        let sentence = format!("denied a request to {}: its certificate is not trusted {whom} ({cause})", self.place);
        Denied::new(Denial::HttpCertificate, &sentence)
    }

    fn left(&self) -> Duration {
        self.outlet.deadline.saturating_duration_since(Instant::now())
    }
}

/// Of a request that took too long, or of a run that is being stopped, which the guest does not live to see.
fn ended(stopped: &Stopped) -> Error {
    match stopped {
        Stopped::TimedOut(_) => Error::HttpResponseTimeout,
        Stopped::Fenced => Error::ConnectionTerminated,
    }
}

fn smaller(guest: Option<Duration>, host: Duration) -> Duration {
    guest.map_or(host, |guest| guest.min(host))
}

/// Boxed futures of the connector.
type Boxed<T, E> = Pin<Box<dyn Future<Output = Result<T, E>> + Send>>;
