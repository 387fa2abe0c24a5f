//! The body of a response on its way to the guest: bounded in size, and in time where the guest asked for it.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body::{Body, Frame};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep};
use wasmtime_wasi_http::Error;

/// A response body with a limit. Dropping it closes a connection that is not at its end.
pub struct Answer<F> {
    body: Option<Incoming>,
    left: usize,
    pause: Option<(Duration, Pin<Box<Sleep>>)>,
    on_excess: Option<F>,
}

impl<F: FnOnce() + Unpin> Answer<F> {
    /// Of at most `limit` bytes, no two further apart than `pause`. `on_excess` is told when there are more.
    pub fn new(body: Incoming, limit: usize, pause: Option<Duration>, on_excess: F) -> Self {
        let pause = pause.map(|pause| (pause, Box::pin(tokio::time::sleep(pause))));
        Self { body: Some(body), left: limit, pause, on_excess: Some(on_excess) }
    }

    fn end(&mut self, error: Error) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        self.body = None;
        Poll::Ready(Some(Err(error)))
    }
}

impl<F: FnOnce() + Unpin> Body for Answer<F> {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let frame = match Pin::new(body).poll_frame(context) {
            Poll::Ready(frame) => frame,
            Poll::Pending => {
                let Some((_, timer)) = &mut self.pause else { return Poll::Pending };
                ready!(timer.as_mut().poll(context));
                return self.end(Error::ConnectionReadTimeout);
            }
        };
        if let Some((pause, timer)) = &mut self.pause {
            timer.as_mut().reset(Instant::now() + *pause);
        }
        match frame {
            None => Poll::Ready(None),
            Some(Err(error)) => self.end(if error.is_incomplete_message() { Error::HttpResponseIncomplete } else { error.into() }),
            Some(Ok(frame)) => match self.left.checked_sub(frame.data_ref().map_or(0, Bytes::len)) {
                Some(left) => {
                    self.left = left;
                    Poll::Ready(Some(Ok(frame)))
                }
                None => {
                    if let Some(told) = self.on_excess.take() {
                        told();
                    }
                    self.end(Error::HttpResponseBodySize(None))
                }
            },
        }
    }
}
