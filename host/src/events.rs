//! Kubernetes Events: published beside the work, never in its way.
//!
//! # Guarantees
//! - What was last said of an object is not said again.
//! - One state of an object (its generation, and a reason) has at most [`DISTINCT`] Events, whatever is said: further texts, such as
//!   one that differs with each retry, count into the series of the last one, which is written once in [`HEARTBEAT`].
//! - Events that cannot be sent in time are dropped; none leaves after the fence.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    sync::{Arc, Mutex},
    time::Duration,
};

use jiff::Timestamp;
use k8s_openapi::{
    api::{core::v1::ObjectReference, events::v1 as api},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::json;
use tokio::{sync::mpsc, time::Instant};

use crate::{
    fence::Fence,
    object::{Kind, Object},
    reconcile::Event,
    text::cut,
};

/// Events that wait to be sent; more are dropped.
const WAITING: usize = 256;
/// Objects of which the last state is remembered, so that it is not told twice.
const REMEMBERED: usize = 10_000;
const DEADLINE: Duration = Duration::from_secs(10);
/// Texts that one state of an object has Events of their own for.
const DISTINCT: usize = 3;
/// How often a series is written.
const HEARTBEAT: Duration = Duration::from_secs(60);
/// Who speaks.
const REPORTER: &str = "berth.acme.io/host";
/// Limits of the Events API, in bytes.
const NOTE_MAX: usize = 1024;
const WORD_MAX: usize = 128;
/// The longest name that an object may have.
const NAME_MAX: usize = 253;

/// Where Events are handed in. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Recorder {
    sender: mpsc::Sender<Said>,
    last: Arc<Mutex<HashMap<Arc<str>, u64>>>,
}

#[derive(Debug)]
struct Said {
    about: ObjectReference,
    /// What the Events of one state have in common.
    state: u64,
    event: Event,
    fence: Fence,
}

/// An Event that was published.
#[derive(Debug)]
struct Told {
    text: u64,
    name: String,
    count: i32,
    written: Instant,
}

/// What was published, by state.
struct Teller {
    client: Client,
    instance: String,
    told: HashMap<u64, Vec<Told>>,
}

/// A recorder, and the task that sends what it is given until every recorder is gone. `instance` names this process.
pub fn recorder(client: Client, instance: String) -> (Recorder, impl Future<Output = ()>) {
    let (sender, mut receiver) = mpsc::channel::<Said>(WAITING);
    let sending = async move {
        let mut teller = Teller { client, instance: cut(&instance, WORD_MAX), told: HashMap::new() };
        while let Some(said) = receiver.recv().await {
            match said.fence.guard(DEADLINE, teller.tell(&said)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(object = said.about.name, %error, "event not published"),
                Err(error) => tracing::debug!(object = said.about.name, %error, "event not published"),
            }
        }
    };
    (Recorder { sender, last: Arc::default() }, sending)
}

impl Teller {
    /// Publishes an Event, or counts it into the series of one that is there.
    async fn tell(&mut self, Said { about, state, event, .. }: &Said) -> kube::Result<()> {
        let events = Api::<api::Event>::namespaced(self.client.clone(), about.namespace.as_deref().unwrap_or("default"));
        if self.told.len() >= REMEMBERED {
            self.told.clear();
        }
        let text = hash(&event.note);
        let told = self.told.entry(*state).or_default();
        let full = told.len() >= DISTINCT;
        if let Some(at) = told.iter().position(|told| told.text == text).or(if full { told.len().checked_sub(1) } else { None }) {
            let known = &mut told[at];
            known.count = known.count.saturating_add(1);
            if known.written.elapsed() < HEARTBEAT {
                return Ok(());
            }
            known.written = Instant::now();
            let series = json!({ "series": { "count": known.count, "lastObservedTime": MicroTime(Timestamp::now()) } });
            match events.patch(&known.name, &PatchParams::default(), &Patch::Merge(series)).await {
                // Events go after an hour or so.
                Err(kube::Error::Api(status)) if status.code == 404 => drop(told.remove(at)),
                answer => return answer.map(drop),
            }
        }
        let name = name(about, Timestamp::now());
        events.create(&PostParams::default(), &object(about, event, &name, &self.instance)).await?;
        told.push(Told { text, name, count: 1, written: Instant::now() });
        Ok(())
    }
}

/// That of the object as far as there is room, and the time, as kubectl and others have it.
fn name(about: &ObjectReference, now: Timestamp) -> String {
    let time = format!(".{:016x}", now.as_nanosecond());
    let stem = about.name.as_deref().unwrap_or_default();
    let stem = &stem[..stem.floor_char_boundary(NAME_MAX - time.len())];
    format!("{}{time}", stem.trim_end_matches(['.', '-']))
}

fn object(about: &ObjectReference, event: &Event, name: &str, instance: &str) -> api::Event {
    api::Event {
        metadata: ObjectMeta { namespace: about.namespace.clone(), name: Some(name.to_owned()), ..ObjectMeta::default() },
        type_: Some(if event.warning { "Warning" } else { "Normal" }.into()),
        reason: Some(cut(&event.reason, WORD_MAX)),
        action: Some(cut(&event.action, WORD_MAX)),
        note: Some(cut(&event.note, NOTE_MAX)),
        regarding: Some(about.clone()),
        event_time: Some(MicroTime(Timestamp::now())),
        reporting_controller: Some(REPORTER.into()),
        reporting_instance: Some(instance.to_owned()),
        ..api::Event::default()
    }
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

impl Recorder {
    /// Publishes an Event about an object, unless it says what was last said of it.
    pub fn publish(&self, kind: &Kind, object: &Object, event: &Event, fence: &Fence) {
        // What has no generation, such as a ConfigMap, is another state with each version.
        let version = if object.generation == 0 { &*object.resource_version } else { "" };
        let state = hash((&object.uid, object.generation, version, event.warning, &event.reason, &event.action));
        let said = hash((state, &event.note));
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
        if self.sender.try_send(Said { about, state, event: event.clone(), fence: fence.clone() }).is_err() {
            tracing::debug!(object = %object.key, reason = event.reason, "event dropped: too many wait");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::fence::{self, BootTime};
    use axum::{
        Router,
        routing::{patch, post},
    };

    fn object(name: &str, generation: i64) -> Object {
        let metadata =
            json!({"name": name, "namespace": "n", "uid": name, "generation": generation, "resourceVersion": generation.to_string()});
        Object::parse(&json!({ "metadata": metadata }).to_string()).expect("parses")
    }

    fn kind() -> Kind {
        Kind { group: "g".into(), version: "v1".into(), kind: "K".into(), plural: "ks".into(), namespaced: true }
    }

    #[tokio::test]
    async fn texts_that_differ_with_each_retry_are_a_few_events_and_a_series() {
        let (made, patched) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (count_made, count_patched) = (made.clone(), patched.clone());
        let router = Router::new()
            .route(
                "/apis/events.k8s.io/v1/namespaces/n/events",
                post(async move |event: String| {
                    count_made.fetch_add(1, Ordering::Relaxed);
                    event
                }),
            )
            .route(
                "/apis/events.k8s.io/v1/namespaces/n/events/{name}",
                patch(async move |event: String| {
                    count_patched.fetch_add(1, Ordering::Relaxed);
                    event
                }),
            );
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("binds");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let _server = tokio::spawn(async move { axum::serve(listener, router).await });
        let client = Client::try_from(kube::Config::new(url.parse().expect("a URL"))).expect("a client");
        let (gate, leadership) = fence::gate();
        gate.open(BootTime::now() + Duration::from_secs(60));
        let fence = leadership.current().expect("open");
        let (recorder, sending) = recorder(client, "host".into());
        let event = |note: String| Event { warning: true, reason: "Failed".into(), action: "Reconcile".into(), note };
        for attempt in 0..50 {
            recorder.publish(&kind(), &object("a", 1), &event(format!("attempt {attempt}")), &fence);
        }
        recorder.publish(&kind(), &object("a", 2), &event("attempt 0".into()), &fence);
        for _ in 0..2 {
            recorder.publish(&kind(), &object("b", 1), &event("attempt 0".into()), &fence);
        }
        drop(recorder);
        sending.await;
        assert_eq!((made.load(Ordering::Relaxed), patched.load(Ordering::Relaxed)), (DISTINCT + 2, 0));
    }

    #[test]
    fn the_name_of_an_event_is_one_however_long_that_of_its_object_is() {
        for stem in ["a".into(), "a".repeat(253), format!("{}.{}", "a".repeat(235), "b".repeat(17)), format!("{}-b", "a".repeat(251))] {
            let about = ObjectReference { name: Some(stem), ..ObjectReference::default() };
            let name = name(&about, Timestamp::now());
            assert!(name.len() <= NAME_MAX && !name.contains("..") && !name.contains("-."), "{name}");
        }
    }
}
