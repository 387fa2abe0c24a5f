//! The watches that go through the fault proxy: passed on line by line, so that a test can stop, thin out, add to or end them.

use std::{
    io,
    sync::{Arc, Mutex, Weak},
};

use axum::{body::Body, response::Response};
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use tokio::sync::{mpsc, watch};

use super::{record::Seen, rule::expired_event};

/// What happens to the lines of a watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    Passing,
    /// Nothing moves, and nothing is closed.
    Stalled,
    /// Lines are read and lost.
    Deaf,
}

enum Order {
    Add(String),
    End,
    Cut,
}

#[derive(Debug)]
struct Stream {
    seen: Arc<Seen>,
    flow: watch::Sender<Flow>,
    orders: mpsc::UnboundedSender<Order>,
}

/// The open watches.
#[derive(Debug, Default)]
pub(super) struct Open {
    streams: Mutex<Vec<Weak<Stream>>>,
}

/// Some watches that were open when they were asked for.
#[derive(Debug)]
pub struct Watches {
    streams: Vec<Arc<Stream>>,
}

impl Open {
    pub(super) fn watches(&self, part: &str) -> Watches {
        let mut streams = self.streams.lock().expect("no holder panics");
        streams.retain(|stream| stream.strong_count() > 0);
        let streams = streams
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|stream| stream.seen.path.contains(part) && !stream.orders.is_closed())
            .collect();
        Watches { streams }
    }

    /// Takes the stream in charge.
    pub(super) fn follow(&self, seen: &Arc<Seen>, response: Response) -> Response {
        let (orders, taken) = mpsc::unbounded_channel();
        let stream = Arc::new(Stream { seen: seen.clone(), flow: watch::Sender::new(Flow::Passing), orders });
        self.streams.lock().expect("no holder panics").push(Arc::downgrade(&stream));
        let (parts, body) = response.into_parts();
        let (client, lines) = mpsc::channel(16);
        tokio::spawn(pump(body, stream, taken, client));
        let lines = futures::stream::unfold(lines, |mut lines| async { Some((lines.recv().await?, lines)) });
        Response::from_parts(parts, Body::from_stream(lines))
    }
}

impl Watches {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.streams.len()
    }

    /// Nothing is passed on any more, and nothing is closed.
    pub fn stall(&self) {
        self.set(Flow::Stalled);
    }

    /// Events are lost from now on.
    pub fn deafen(&self) {
        self.set(Flow::Deaf);
    }

    /// Passes on again what was stalled and what comes.
    pub fn resume(&self) {
        self.set(Flow::Passing);
    }

    /// Tells of an expired resourceVersion and ends the watch.
    pub fn expire(&self) {
        self.inject(&expired_event());
        self.end();
    }

    /// Adds a line.
    pub fn inject(&self, line: &str) {
        self.order(|| Order::Add(format!("{line}\n")));
    }

    /// Ends the watch in order.
    pub fn end(&self) {
        self.order(|| Order::End);
    }

    /// Breaks the connection in the middle.
    pub fn cut(&self) {
        self.order(|| Order::Cut);
    }

    fn set(&self, flow: Flow) {
        for stream in &self.streams {
            stream.flow.send_replace(flow);
        }
    }

    fn order(&self, order: impl Fn() -> Order) {
        for stream in &self.streams {
            // Whoever watched may be gone by now.
            stream.orders.send(order()).ok();
        }
    }
}

/// Passes on whole lines until either side ends.
async fn pump(body: Body, stream: Arc<Stream>, mut orders: mpsc::UnboundedReceiver<Order>, client: mpsc::Sender<Result<Bytes, io::Error>>) {
    let mut body = body.into_data_stream();
    let mut flow = stream.flow.subscribe();
    let mut waiting = BytesMut::new();
    let cut = || Err(io::Error::other("cut by the fault proxy"));
    loop {
        let now = *flow.borrow_and_update();
        if now == Flow::Passing
            && let Some(end) = waiting.iter().rposition(|byte| *byte == b'\n')
        {
            let lines = waiting.split_to(end + 1).freeze();
            if client.send(Ok(lines)).await.is_err() {
                return;
            }
        }
        tokio::select! {
            () = client.closed() => return,
            // The sender is in `stream`, which lives as long as this.
            _ = flow.changed() => {}
            Some(order) = orders.recv() => match order {
                Order::Add(line) => { client.send(Ok(line.into())).await.ok(); }
                Order::End => return,
                Order::Cut => { client.send(cut()).await.ok(); return }
            },
            chunk = body.next(), if now != Flow::Stalled => match chunk {
                Some(Ok(chunk)) => {
                    waiting.extend_from_slice(&chunk);
                    if now == Flow::Deaf && let Some(end) = waiting.iter().rposition(|byte| *byte == b'\n') {
                        let _lost = waiting.split_to(end + 1);
                    }
                }
                Some(Err(_)) => { client.send(cut()).await.ok(); return }
                None => {
                    client.send(Ok(waiting.split().freeze())).await.ok();
                    return;
                }
            },
        }
    }
}
