//! Remembers which objects failed, and until when they wait.

use std::{
    collections::HashMap,
    sync::Mutex,
    time::{Duration, Instant},
};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

const BASE: Duration = Duration::from_secs(1);
const MAX: Duration = Duration::from_secs(300);

/// By uid.
#[derive(Default)]
pub struct Backoff(Mutex<HashMap<String, Pause>>);

struct Pause {
    generation: Option<i64>,
    failures: u32,
    until: Instant,
}

impl Backoff {
    /// How long this version of the object still has to wait, if at all.
    pub fn left(&self, meta: &ObjectMeta) -> Option<Duration> {
        let pauses = self.0.lock().expect("no holder panics");
        let pause = pauses.get(meta.uid.as_deref()?).filter(|pause| pause.generation == meta.generation)?;
        Some(pause.until.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero())
    }

    /// Counts a failure; the answer is how long to wait.
    pub fn failed(&self, meta: &ObjectMeta) -> Duration {
        let mut pauses = self.0.lock().expect("no holder panics");
        let pause = pauses.entry(meta.uid.clone().unwrap_or_default()).or_insert(Pause {
            generation: meta.generation,
            failures: 0,
            until: Instant::now(),
        });
        if pause.generation != meta.generation {
            (pause.generation, pause.failures) = (meta.generation, 0);
        }
        let wait = BASE.saturating_mul(1 << pause.failures.min(30)).min(MAX);
        pause.failures += 1;
        pause.until = Instant::now() + wait;
        wait
    }

    /// The object is well again, or gone.
    pub fn forget(&self, uid: Option<&str>) {
        self.0.lock().expect("no holder panics").remove(uid.unwrap_or_default());
    }
}
