//! THE trait: what the controller asks for each object, and what comes back.

use std::{sync::Arc, time::Duration};

use futures::future::BoxFuture;
use serde_json::Value;

use crate::{
    fence::Fence,
    object::{Key, Object},
    reads::Reader,
};

/// One run for one object.
#[derive(Clone, Debug)]
pub struct Request {
    /// Which object.
    pub key: Key,
    /// The object as it is now.
    pub object: Arc<Object>,
    /// What for.
    pub phase: Phase,
    /// Failures in a row for this version of the spec.
    pub attempt: u32,
    /// The cause of the last one.
    pub last_failure: Option<String>,
    /// `<resource>.<group>/<namespace>/<name>/<uid>`.
    pub idempotency_key: String,
    /// Effects of this run leave the host only under it.
    pub fence: Fence,
    /// Answers what the run reads of the cluster.
    pub reader: Arc<dyn Reader>,
}

/// What a run is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Make the world match the spec.
    Apply,
    /// The object goes away: undo what lies outside the cluster.
    Finalize,
}

/// Everything that a run wants written, as data.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The whole status as the handler wants it (an object); none leaves it.
    pub status: Option<Value>,
    /// Labels to set, or with `None` to remove.
    pub labels: Vec<(String, Option<String>)>,
    /// Objects that are to exist; `None` leaves them as they are.
    pub children: Option<Vec<Value>>,
    /// Events about the object.
    pub events: Vec<Event>,
    /// What happens next.
    pub next: Next,
}

impl Outcome {
    /// An outcome that writes nothing.
    pub fn just(next: Next) -> Self {
        Self { status: None, labels: Vec::new(), children: None, events: Vec::new(), next }
    }
}

/// An Event about an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// `Warning` rather than `Normal`.
    pub warning: bool,
    /// UpperCamelCase.
    pub reason: String,
    /// UpperCamelCase.
    pub action: String,
    /// A sentence.
    pub note: String,
}

/// What happens with the object after a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Done with this version of the spec.
    AwaitChange,
    /// Not a failure: look again after this time.
    After(Duration),
    /// Failed with this cause: backoff.
    Retry(String),
    /// The same, with the other side's own delay.
    RetryAfter(Duration, String),
    /// Cannot heal for this version of the spec.
    GiveUp(String),
}

/// Why a run has no outcome. Each has a sentence for the object's status.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The handler trapped: a panic, an unreachable instruction, a stack overflow.
    #[error("the handler trapped: {0}")]
    Trap(String),
    /// The whole call took longer than it may.
    #[error("{0}")]
    Deadline(String),
    /// A limit other than the deadline was reached; the sentence names the limit, its value and how to raise it.
    #[error("{0}")]
    Limit(String),
    /// The outcome cannot be accepted; the sentence says why.
    #[error("the handler's outcome was refused: {0}")]
    Refused(String),
    /// The lease was in doubt, so the run was stopped. Never counted against the object.
    #[error("stopped because the lease is in doubt")]
    Fenced,
    /// The host itself could not run the handler. Not counted against the object.
    #[error("the host could not run the handler: {0}")]
    Host(String),
}

impl Failure {
    /// Whether it is the handler's failure, so that it counts against the object.
    pub fn counts(&self) -> bool {
        !matches!(self, Self::Fenced | Self::Host(_))
    }

    /// Whether the handler itself is to blame, whatever the other side did.
    pub fn is_broken(&self) -> bool {
        matches!(self, Self::Trap(_) | Self::Limit(_) | Self::Refused(_))
    }
}

/// The reconcile handler of one kind. A plugin is one; so is a closure, in tests.
pub trait Reconcile: Send + Sync {
    /// One step towards the spec. Dropping the future stops the run and aborts its effects.
    fn reconcile(&self, request: Request) -> BoxFuture<'_, Result<Outcome, Failure>>;
}

impl<F> Reconcile for F
where
    F: Fn(Request) -> BoxFuture<'static, Result<Outcome, Failure>> + Send + Sync,
{
    fn reconcile(&self, request: Request) -> BoxFuture<'_, Result<Outcome, Failure>> {
        self(request)
    }
}
