//! Leader election by a Lease: which of the replicas may act, and until when.
//!
//! # Expected flow
//! [`start`] starts the elector on a thread of its own, and hands out the [`Leadership`] that it drives. It watches the Lease, takes it
//! when nobody holds it, and renews it. After its last effect, the host calls [`Elector::release`], and a standby takes over at once.
//!
//! # Guarantees
//! - The gate is open only while this process holds the Lease by its own knowledge: from a successful write until `duration` after that
//!   write was *sent*, less the margin, by the local boot-time clock. Others wait `duration` from when they *saw* the write.
//! - The gate closes at once when a renewal is refused or the watch shows that the Lease is not ours, and when none succeeded
//!   for the renew deadline.
//! - Timestamps in the Lease are never compared with the local clock, so skewed clocks make neither two leaders nor none. The
//!   duration that a holder recorded is honoured, counted from the last change that was seen here.
//! - Errors of the API server never end the election: it goes on until `release`.
//!
//! # Assumptions
//! The identity is unique to the process, and all candidates have clocks that run at about the same rate (the margin absorbs
//! 1 s in 15).
//!
//! # Caveats
//! A standby that starts waits a full duration even if the Lease expired long ago: it cannot know for how long nobody renewed it.

use std::{
    thread,
    time::{Duration, Instant},
};

use kube::{Api, Client};
use tokio::sync::{oneshot, watch};

use crate::{
    client,
    fence::{self, Leadership},
};

/// For how long a renewal holds: as with Kubernetes' own components, like the next two.
pub const DURATION: Duration = Duration::from_secs(15);
/// How long leadership lasts without a successful renewal.
pub const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// Time between renewals.
pub const RETRY: Duration = Duration::from_secs(2);
/// Absorbs clocks that differ in rate by 1 s in 15.
pub const MARGIN: Duration = Duration::from_secs(1);

mod candidate;
mod election;
mod record;

/// Which Lease, and how it is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Namespace of the Lease.
    pub namespace: String,
    /// Name of the Lease.
    pub name: String,
    /// Of this process; another one, even on the same machine, has another.
    pub identity: String,
    /// For how long a renewal holds. Recorded in whole seconds, rounded up.
    pub duration: Duration,
    /// Without a successful renewal for this long, leadership is given up. Shorter than `duration` less `margin`.
    pub renew_deadline: Duration,
    /// Time between renewals, and between attempts after an error.
    pub retry: Duration,
    /// The gate closes this long before the Lease expires.
    pub margin: Duration,
}

impl Settings {
    /// The usual times, which are those of Kubernetes' own components.
    pub fn new(namespace: &str, name: &str, identity: &str) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
            identity: identity.into(),
            duration: DURATION,
            renew_deadline: RENEW_DEADLINE,
            retry: RETRY,
            margin: MARGIN,
        }
    }
}

/// What the elector knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Whether this process holds the Lease.
    pub leads: bool,
    /// Who holds it, as last seen.
    pub holder: Option<String>,
    /// How often it changed hands, as last seen.
    pub transitions: i32,
    /// What keeps the elector from doing its work; none while requests succeed.
    pub trouble: Option<Trouble>,
}

/// Requests that do not succeed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// The last error, as a sentence.
    pub message: String,
    /// When the first one of this row came.
    pub since: Instant,
}

/// Why the elector could not be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The times contradict each other.
    #[error(
        "lease times must satisfy retry < renew deadline < duration - margin, not {} s < {} s < {} s - {} s",
        .0.retry.as_secs_f64(), .0.renew_deadline.as_secs_f64(), .0.duration.as_secs_f64(), .0.margin.as_secs_f64()
    )]
    Times(Box<Settings>),
    /// No thread or runtime.
    #[error("cannot start the thread of the leader election")]
    Thread(#[from] std::io::Error),
    /// The configuration of the connection is unusable.
    #[error("cannot set up the connection of the leader election")]
    Connection(#[from] Box<kube::Error>),
}

/// The running election. Dropping it ends the election without releasing the Lease.
#[derive(Debug)]
pub struct Elector {
    stop: oneshot::Sender<oneshot::Sender<()>>,
    status: watch::Receiver<Status>,
}

/// Starts the elector on a thread of its own, with its own runtime and its own connection, so that no load delays a renewal.
pub fn start(config: kube::Config, settings: Settings) -> Result<(Leadership, Elector), StartError> {
    start_with(|| client::connect(config), settings)
}

fn start_with(
    connect: impl FnOnce() -> kube::Result<Client> + Send + 'static,
    settings: Settings,
) -> Result<(Leadership, Elector), StartError> {
    if settings.retry >= settings.renew_deadline || settings.renew_deadline + settings.margin >= settings.duration {
        return Err(StartError::Times(Box::new(settings)));
    }
    let (gate, leadership) = fence::gate();
    let (stop, stopped) = oneshot::channel();
    let (status_sender, status) = watch::channel(Status::default());
    let (started, start) = std::sync::mpsc::sync_channel(1);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    thread::Builder::new().name("lease".into()).spawn(move || {
        runtime.block_on(async {
            // kube's client spawns, so it has to be made within the runtime.
            let client = match connect() {
                Ok(client) => client,
                Err(error) => return drop(started.send(Err(error))),
            };
            if started.send(Ok(())).is_ok() {
                let leases = Api::namespaced(client, &settings.namespace);
                candidate::run(leases, settings, gate, status_sender, stopped).await;
            }
        });
    })?;
    start.recv().unwrap_or(Ok(())).map_err(Box::new)?;
    Ok((leadership, Elector { stop, status }))
}

impl Elector {
    /// What it knows now.
    pub fn status(&self) -> Status {
        self.status.borrow().clone()
    }

    /// What it knows, and goes on to learn. The channel closes when the election ends.
    pub fn watch(&self) -> watch::Receiver<Status> {
        self.status.clone()
    }

    /// Closes the gate and, if this process holds the Lease, empties its holder, so that a standby takes over at once. To be called
    /// after the last effect. Returns when that is done, or when the API server did not let it happen within the renew deadline.
    pub async fn release(self) {
        let (done, wait) = oneshot::channel();
        if self.stop.send(done).is_ok() {
            // An error means that the thread is gone, and the gate with it.
            let _ended = wait.await;
        }
    }
}

#[cfg(test)]
mod tests;
