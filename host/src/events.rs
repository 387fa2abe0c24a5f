//! Kubernetes Events: published beside the work, never in its way.
//!
//! # Guarantees
//! At most one Event per object and state: what was last said of an object is not said again, and repeats of older states become the
//! series of one Event. Events that cannot be sent in time are dropped; none leaves after the fence.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    sync::{Arc, Mutex},
    time::Duration,
};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{self as kube_events, EventType, Reporter},
};
use tokio::sync::mpsc;

use crate::{
    fence::Fence,
    object::{Kind, Object},
    reconcile::Event,
    status::cut,
};

/// Events that wait to be sent; more are dropped.
const WAITING: usize = 256;
/// Objects of which the last state is remembered, so that it is not told twice.
const REMEMBERED: usize = 10_000;
const DEADLINE: Duration = Duration::from_secs(10);
/// Limits of the Events API, in bytes.
const NOTE_MAX: usize = 1024;
const WORD_MAX: usize = 128;

/// Where Events are handed in. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Recorder {
    sender: mpsc::Sender<Said>,
    last: Arc<Mutex<HashMap<Arc<str>, u64>>>,
}

#[derive(Debug)]
struct Said {
    about: ObjectReference,
    event: Event,
    fence: Fence,
}

/// A recorder, and the task that sends what it is given until every recorder is gone. `instance` names this process.
pub fn recorder(client: Client, instance: String) -> (Recorder, impl Future<Output = ()>) {
    let (sender, mut receiver) = mpsc::channel::<Said>(WAITING);
    let sending = async move {
        let reporter = Reporter { controller: "berth.acme.io/host".into(), instance: Some(cut(&instance, WORD_MAX)) };
        let recorder = kube_events::Recorder::new(client, reporter);
        while let Some(Said { about, event, fence }) = receiver.recv().await {
            let published = kube_events::Event {
                type_: if event.warning { EventType::Warning } else { EventType::Normal },
                reason: cut(&event.reason, WORD_MAX),
                note: Some(cut(&event.note, NOTE_MAX)),
                action: cut(&event.action, WORD_MAX),
                secondary: None,
            };
            match fence.guard(DEADLINE, recorder.publish(&published, &about)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(object = about.name, %error, "event not published"),
                Err(error) => tracing::debug!(object = about.name, %error, "event not published"),
            }
        }
    };
    (Recorder { sender, last: Arc::default() }, sending)
}

impl Recorder {
    /// Publishes an Event about an object, unless it says what was last said of it.
    pub fn publish(&self, kind: &Kind, object: &Object, event: &Event, fence: &Fence) {
        let mut hasher = DefaultHasher::new();
        (&event.reason, &event.note, event.warning, object.generation).hash(&mut hasher);
        let said = hasher.finish();
        {
            let mut last = self.last.lock().expect("no panic while the lock is held");
            if last.len() >= REMEMBERED {
                last.clear();
            }
            if last.insert(object.uid.clone(), said) == Some(said) {
                return;
            }
        }
        let about = ObjectReference {
            api_version: Some(kind.api_version()),
            kind: Some(kind.kind.clone()),
            namespace: object.key.namespace.as_deref().map(str::to_owned),
            name: Some(object.key.name.to_string()),
            uid: Some(object.uid.to_string()),
            resource_version: Some(object.resource_version.to_string()),
            field_path: None,
        };
        if self.sender.try_send(Said { about, event: event.clone(), fence: fence.clone() }).is_err() {
            tracing::debug!(object = %object.key, reason = event.reason, "event dropped: too many wait");
        }
    }
}
