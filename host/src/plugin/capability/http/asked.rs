//! The body of a request on its way out: it ends cleanly only while the run that writes it lives.
//!
//! A run that is stopped in the middle drops its end of the body, which looks like the end of the body itself: without a length the
//! server would take half a request for a whole one.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use wasmtime_wasi_http::{Error, WasiBody};

/// Says that a run is over. Whoever drives the run drops it before everything that the run writes to.
#[derive(Debug, Default)]
pub struct Life(Arc<AtomicBool>);

/// Whether the run is over.
#[derive(Clone, Debug)]
pub struct Ended(Arc<AtomicBool>);

impl Life {
    /// To be looked at by others.
    pub fn ended(&self) -> Ended {
        Ended(self.0.clone())
    }
}

impl Ended {
    /// Whether it is over.
    pub fn is_over(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// A request's body.
pub struct Asked {
    body: WasiBody,
    run: Ended,
}

impl Asked {
    /// What this run writes.
    pub fn new(body: WasiBody, run: Ended) -> Self {
        Self { body, run }
    }
}

impl Body for Asked {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        match ready!(Pin::new(&mut self.body).poll_frame(context)) {
            None if self.run.is_over() => Poll::Ready(Some(Err(Error::ConnectionTerminated))),
            frame => Poll::Ready(frame),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
