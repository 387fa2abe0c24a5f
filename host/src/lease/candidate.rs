//! The election's connection to the world: requests, the watch of the Lease, and the gate.

use std::{
    convert::Infallible,
    pin::{Pin, pin},
    time::{Duration, Instant},
};

use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use kube::{
    Api,
    api::{PostParams, WatchParams},
    core::WatchEvent,
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{sleep, timeout},
};

use super::{
    Settings, Status, Trouble,
    election::{Action, Election, Move},
    record::Record,
};
use crate::fence::{BootTime, Gate};

/// The API server ends a watch after this time, so that a connection that died silently is noticed soon after.
const WATCH_TIME: u32 = 45;

/// What is granted to the server beyond `WATCH_TIME` before the connection counts as dead.
const WATCH_SLACK: Duration = Duration::from_secs(10);

/// Least and greatest time between two watch requests, also where the server closes them at once (which kube does not slow down).
const WATCH_PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(8));

/// What the watch of the Lease tells.
#[allow(clippy::large_enum_variant, reason = "one at a time, and short-lived")]
enum Seen {
    Present(Record),
    Deleted(Option<String>),
}

struct Answer {
    action: &'static str,
    sent: BootTime,
    result: Result<Reply, Fault>,
}

enum Reply {
    Found(Record),
    Absent,
    Wrote(Record),
}

/// Why a request did not do what was asked.
enum Fault {
    /// The Lease is not as it was.
    Conflict,
    /// There is none, or not even its namespace.
    Gone(String),
    Other(String),
}

struct Candidate {
    leases: Api<Lease>,
    settings: Settings,
    election: Election,
    gate: Gate,
    status: watch::Sender<Status>,
}

/// Takes part in the election until told to stop, then releases the Lease and answers. If the sender is dropped, ends without releasing.
pub(super) async fn run(
    leases: Api<Lease>,
    settings: Settings,
    gate: Gate,
    status: watch::Sender<Status>,
    mut stop: oneshot::Receiver<oneshot::Sender<()>>,
) {
    let (seen_sender, mut seen) = mpsc::channel(16);
    let watching = watch_lease(leases.clone(), settings.name.clone(), seen_sender);
    let mut candidate = Candidate { leases, election: Election::new(settings.clone()), settings, gate, status };
    let asked = tokio::select! {
        asked = &mut stop => asked,
        never = watching => match never {},
        never = candidate.take_part(&mut seen) => match never {},
    };
    candidate.gate.close();
    if let Ok(done) = asked {
        let limit = candidate.settings.renew_deadline;
        if timeout(limit, candidate.release()).await.is_err() {
            tracing::warn!("lease not released in time");
        }
        // Whoever asked may have stopped waiting.
        let _heard = done.send(());
    }
}

impl Candidate {
    async fn take_part(&mut self, seen: &mut mpsc::Receiver<Seen>) -> Infallible {
        let mut request: Option<Pin<Box<dyn Future<Output = Answer> + Send>>> = None;
        loop {
            let now = BootTime::now();
            let lapsed = self.election.lapse(now);
            self.apply(lapsed);
            let mut wake = None;
            if request.is_none() {
                match self.election.decide(now, Timestamp::now()) {
                    Action::Wait(until) => wake = Some(until),
                    action => request = Some(Box::pin(self.request(action))),
                }
            }
            let answered = async {
                match &mut request {
                    Some(request) => request.await,
                    None => std::future::pending().await,
                }
            };
            let woken = async {
                match wake {
                    Some(until) => sleep(until.remaining().unwrap_or_default()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                Some(seen) = seen.recv() => {
                    let moved = match seen {
                        Seen::Present(record) => self.election.observe(record, BootTime::now()),
                        Seen::Deleted(version) => self.election.observe_absence(version),
                    };
                    self.apply(moved);
                }
                answer = answered => {
                    request = None;
                    self.take(answer);
                }
                () = woken => {}
            }
        }
    }

    /// A request with its deadline: two fit into the renew deadline, so that one that is swallowed does not cost the Lease.
    fn request(&self, action: Action) -> impl Future<Output = Answer> + Send + use<> {
        let half = self.settings.renew_deadline / 2;
        let limit = self.election.lapses().and_then(BootTime::remaining).map_or(half, |left| left.min(half));
        let (leases, name) = (self.leases.clone(), self.settings.name.clone());
        async move {
            let sent = BootTime::now();
            let (name_of_action, result) = match action {
                Action::Read | Action::Wait(_) => ("read", bounded(limit, leases.get(&name)).await.map(Reply::found).or_else(absent)),
                Action::Create(record) => ("create", bounded(limit, leases.create(&writer(), &record.0)).await.map(Reply::wrote)),
                Action::Replace(record) => {
                    ("update", bounded(limit, leases.replace(&name, &writer(), &record.0)).await.map(Reply::wrote).or_else(absent))
                }
            };
            Answer { action: name_of_action, sent, result }
        }
    }

    fn take(&mut self, Answer { action, sent, result }: Answer) {
        let now = BootTime::now();
        let (moved, trouble) = match result {
            Ok(Reply::Found(record)) => (self.election.observe(record, now), None),
            Ok(Reply::Absent) => (self.election.observe_absence(None), None),
            Ok(Reply::Wrote(record)) => (self.election.wrote(record, sent, now), None),
            Err(Fault::Conflict) => (self.election.refused(now), None),
            Err(Fault::Gone(message) | Fault::Other(message)) => (None, Some(message)),
        };
        if trouble.is_some() {
            self.election.failed(now);
        }
        self.note(trouble.map(|message| {
            let Settings { namespace, name, .. } = &self.settings;
            format!("cannot {action} the lease {namespace}/{name}: {message}")
        }));
        self.apply(moved);
    }

    /// Moves the gate first, and then tells about it.
    fn apply(&mut self, moved: Option<Move>) {
        match moved {
            Some(Move::Open(deadline)) => {
                let epoch = self.gate.open(deadline);
                tracing::info!(epoch, identity = self.settings.identity, "leading");
            }
            Some(Move::Extend(deadline)) if self.gate.extend(deadline) => {}
            Some(Move::Extend(deadline)) => {
                let epoch = self.gate.open(deadline);
                tracing::warn!(epoch, "lease renewed too late, new term");
            }
            Some(Move::Close) => {
                self.gate.close();
                tracing::warn!(holder = self.election.record().and_then(Record::holder), "lease lost");
            }
            None => {}
        }
        let leads = self.election.leads();
        let (holder, transitions) =
            self.election.record().map(|record| (record.holder().map(str::to_owned), record.transitions())).unwrap_or_default();
        self.status.send_if_modified(|status| {
            let trouble = status.trouble.clone();
            let next = Status { leads, holder, transitions, trouble };
            let changed = *status != next;
            *status = next;
            changed
        });
    }

    fn note(&self, message: Option<String>) {
        self.status.send_if_modified(|status| {
            let before = status.trouble.as_ref();
            if before.map(|trouble| &trouble.message) == message.as_ref() {
                return false;
            }
            match &message {
                Some(error) => tracing::warn!(error, "lease request failed"),
                None => tracing::info!("lease requests succeed again"),
            }
            let since = before.map_or_else(Instant::now, |trouble| trouble.since);
            status.trouble = message.map(|message| Trouble { message, since });
            true
        });
    }

    /// Empties the holder if that is us. The state known may be old, or a renewal on its way: so look again on a conflict.
    async fn release(&mut self) {
        let limit = self.settings.renew_deadline / 2;
        let mut known = self.election.record().cloned();
        loop {
            let record = match known.take() {
                Some(record) => record,
                None => match bounded(limit, self.leases.get(&self.settings.name)).await {
                    Ok(lease) => Record(lease),
                    Err(Fault::Gone(_)) => return,
                    Err(Fault::Conflict | Fault::Other(_)) => {
                        sleep(self.settings.retry / 4).await;
                        continue;
                    }
                },
            };
            if record.holder() != Some(&self.settings.identity) {
                return;
            }
            let released = record.released();
            match bounded(limit, self.leases.replace(&self.settings.name, &writer(), &released.0)).await {
                Ok(_) => return tracing::info!("lease released"),
                Err(Fault::Gone(_)) => return,
                Err(Fault::Conflict) => {}
                Err(Fault::Other(_)) => sleep(self.settings.retry / 4).await,
            }
        }
    }
}

impl Reply {
    fn found(lease: Lease) -> Self {
        Self::Found(Record(lease))
    }

    fn wrote(lease: Lease) -> Self {
        Self::Wrote(Record(lease))
    }
}

fn absent(fault: Fault) -> Result<Reply, Fault> {
    if let Fault::Gone(_) = fault { Ok(Reply::Absent) } else { Err(fault) }
}

fn writer() -> PostParams {
    PostParams { field_manager: Some("berth".into()), ..PostParams::default() }
}

async fn bounded<T>(limit: Duration, request: impl Future<Output = kube::Result<T>>) -> Result<T, Fault> {
    match timeout(limit, request).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(kube::Error::Api(status))) => {
            let message = format!("{} {}", status.code, status.message);
            Err(match status.code {
                404 => Fault::Gone(message),
                409 => Fault::Conflict,
                _ => Fault::Other(message),
            })
        }
        Ok(Err(error)) => Err(Fault::Other(format!("{:#}", anyhow::Error::from(error)))),
        Err(_) => Err(Fault::Other(format!("no answer within {limit:?}"))),
    }
}

/// Tells each state of the Lease, for ever. A watch that fails or is closed is opened again, from the state as it is then.
async fn watch_lease(leases: Api<Lease>, name: String, seen: mpsc::Sender<Seen>) -> Infallible {
    let params = WatchParams::default().fields(&format!("metadata.name={name}")).timeout(WATCH_TIME);
    let patience = Duration::from_secs(WATCH_TIME.into()) + WATCH_SLACK;
    let mut pause = WATCH_PAUSE.0;
    loop {
        let started = Instant::now();
        // Without a resourceVersion, a watch begins with the most recent state.
        match timeout(patience, follow(&leases, &params, &seen)).await {
            Ok(Ok(())) | Err(_) => pause = WATCH_PAUSE.0,
            Ok(Err(error)) => {
                tracing::debug!(error = format!("{:#}", anyhow::Error::from(error)), "lease watch failed");
                pause = (pause * 2).min(WATCH_PAUSE.1);
            }
        }
        sleep(pause.saturating_sub(started.elapsed())).await;
    }
}

/// One watch, until it ends.
async fn follow(leases: &Api<Lease>, params: &WatchParams, seen: &mpsc::Sender<Seen>) -> kube::Result<()> {
    let mut events = pin!(leases.watch(params, "").await?);
    while let Some(event) = events.next().await {
        let told = match event? {
            WatchEvent::Added(lease) | WatchEvent::Modified(lease) => Seen::Present(Record(lease)),
            WatchEvent::Deleted(lease) => Seen::Deleted(lease.metadata.resource_version),
            WatchEvent::Bookmark(_) => continue,
            WatchEvent::Error(status) => return Err(kube::Error::Api(status)),
        };
        // The receiver lives as long as this future is polled.
        let _taken = seen.send(told).await;
    }
    Ok(())
}
