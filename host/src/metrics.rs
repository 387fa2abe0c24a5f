//! What the host counts, in the Prometheus text format.
//!
//! Labels are closed sets and the names of kinds and plugins, never of objects; every series of a kind is there from its start.

use std::{fmt, ops::Deref, sync::atomic::AtomicI64, time::Duration};

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder, text},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use crate::{denial::Denial, object::GroupKind, trial::Evidence};

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// Done with this version of the spec.
    Success,
    /// Look again later.
    Requeue,
    /// Failed, to be tried again.
    Failure,
    /// Failed for the last time.
    DeadLetter,
    /// The handler gave up.
    GiveUp,
    /// Already finished for this version of the spec: the handler was not run.
    Settled,
    /// Stopped because the lease was in doubt.
    Fenced,
    /// The host could not run the handler.
    HostError,
    /// The API server could not take the outcome; it is kept and written later.
    WriteDelayed,
    /// A child could not be written, as a grant is missing or somebody else is in the way; the outcome is kept and written later.
    ChildrenHindered,
    /// The object changed or went away during the run, so the outcome was dropped.
    Outdated,
}

impl Verdict {
    /// All of them.
    pub const ALL: [Self; 11] = [
        Self::Success,
        Self::Requeue,
        Self::Failure,
        Self::DeadLetter,
        Self::GiveUp,
        Self::Settled,
        Self::Fenced,
        Self::HostError,
        Self::WriteDelayed,
        Self::ChildrenHindered,
        Self::Outdated,
    ];

    /// The label's value.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::Requeue => "requeue",
            Self::Failure => "failure",
            Self::DeadLetter => "dead_letter",
            Self::GiveUp => "give_up",
            Self::Settled => "settled",
            Self::Fenced => "fenced",
            Self::HostError => "host_error",
            Self::WriteDelayed => "write_delayed",
            Self::ChildrenHindered => "children_hindered",
            Self::Outdated => "outdated",
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl EncodeLabelValue for Verdict {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> Result<(), fmt::Error> {
        self.as_str().encode(encoder)
    }
}

/// How a read of the cluster was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Answered {
    /// With what is there, be it nothing.
    Ok,
    /// Not claimed or not granted.
    Forbidden,
    /// Not listed yet.
    NotSynced,
    /// It could not be answered.
    Error,
}

impl Answered {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Ok, Self::Forbidden, Self::NotSynced, Self::Error];
}

impl EncodeLabelValue for Answered {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> Result<(), fmt::Error> {
        match self {
            Self::Ok => "ok",
            Self::Forbidden => "forbidden",
            Self::NotSynced => "not_synced",
            Self::Error => "error",
        }
        .encode(encoder)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReadLabels {
    kind: String,
    result: Answered,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabels {
    kind: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabels {
    kind: String,
    result: Verdict,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DepthLabels {
    kind: String,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PluginLabels {
    plugin: String,
    kind: String,
    digest: String,
}

/// The host's metrics. One per process, shared.
pub struct Metrics {
    registry: Registry,
    runs: Family<ResultLabels, Counter>,
    duration: Family<KindLabels, Histogram, fn() -> Histogram>,
    depth: Family<DepthLabels, Gauge>,
    objects: Family<KindLabels, Gauge>,
    watch_age: Family<KindLabels, Gauge<f64, std::sync::atomic::AtomicU64>>,
    plugins: Family<PluginLabels, Gauge>,
    refused: Gauge,
    breakers: Family<KindLabels, Gauge>,
    leader: Gauge<i64, AtomicI64>,
    writes: Family<WriteLabels, Counter>,
    reads: Family<ReadLabels, Counter>,
    read_objects: Family<KindLabels, Gauge>,
    denied: Family<DeniedLabels, Counter>,
    tried: Family<TriedLabels, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TriedLabels {
    kind: String,
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DeniedLabels {
    kind: String,
    capability: &'static str,
    reason: &'static str,
}

/// Where an object of a kind may be in the queue.
const STATES: [&str; 3] = ["ready", "delayed", "running"];
/// What is written for an object of a kind.
const WRITES: [&str; 4] = ["status", "metadata", "children", "finalizer"];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WriteLabels {
    kind: String,
    write: &'static str,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metrics")
    }
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("berth");
        // From a no-op of some 100 µs to the whole-call deadline.
        fn buckets() -> Histogram {
            Histogram::new([0.0005, 0.002, 0.01, 0.05, 0.2, 1.0, 5.0, 10.0, 30.0])
        }
        let metrics = Self {
            runs: Family::default(),
            duration: Family::new_with_constructor(buckets as fn() -> Histogram),
            depth: Family::default(),
            objects: Family::default(),
            watch_age: Family::default(),
            plugins: Family::default(),
            refused: Gauge::default(),
            breakers: Family::default(),
            leader: Gauge::default(),
            writes: Family::default(),
            reads: Family::default(),
            read_objects: Family::default(),
            denied: Family::default(),
            tried: Family::default(),
            registry: Registry::default(),
        };
        registry.register("reconcile", "Turns of objects by how they ended", metrics.runs.clone());
        registry.register("reconcile_duration_seconds", "Time that a handler took, host calls included", metrics.duration.clone());
        registry.register("queue_depth", "Objects in the work queue by state", metrics.depth.clone());
        registry.register("objects", "Objects in the informer's cache", metrics.objects.clone());
        registry.register("watch_age_seconds", "Time since the API server last sent something for the kind", metrics.watch_age.clone());
        registry.register("plugin_info", "1 for each plugin that serves", metrics.plugins.clone());
        registry.register("plugins_refused", "Plugins whose present version is refused", metrics.refused.clone());
        registry.register("breaker_open", "1 while a plugin's objects wait because its handler traps", metrics.breakers.clone());
        registry.register("leader", "Whether this process leads", metrics.leader.clone());
        registry.register("writes", "Writes to objects by what was written", metrics.writes.clone());
        registry.register("reads", "Reads of the cluster by handlers of the kind, by how they were answered", metrics.reads.clone());
        registry.register("read_objects", "Objects in the cache only because a plugin reads their kind", metrics.read_objects.clone());
        registry.register("denied", "Host calls of handlers that were denied", metrics.denied.clone());
        registry.register("candidate_runs", "Runs of versions on trial by what they say of the version", metrics.tried.clone());
        Self { registry, ..metrics }
    }
}

impl Metrics {
    /// Creates the series of a kind at zero.
    pub fn kind_added(&self, kind: &GroupKind) {
        for result in Verdict::ALL {
            drop(self.runs.get_or_create(&ResultLabels { kind: kind.to_string(), result }));
        }
        drop(self.duration.get_or_create(&KindLabels { kind: kind.to_string() }));
        self.breaker(kind, false);
        for state in STATES {
            drop(self.depth.get_or_create(&DepthLabels { kind: kind.to_string(), state }));
        }
        for write in WRITES {
            drop(self.writes.get_or_create(&WriteLabels { kind: kind.to_string(), write }));
        }
        for result in Answered::ALL {
            drop(self.reads.get_or_create(&ReadLabels { kind: kind.to_string(), result }));
        }
        for denial in Denial::ALL {
            drop(self.denials(kind, denial));
        }
        for result in Evidence::WORDS {
            drop(self.tried.get_or_create(&TriedLabels { kind: kind.to_string(), result }));
        }
    }

    /// Drops the gauges of a kind; its counters stay, as counters must not go back.
    pub fn kind_removed(&self, kind: &GroupKind) {
        for state in STATES {
            self.depth.remove(&DepthLabels { kind: kind.to_string(), state });
        }
        self.objects.remove(&KindLabels { kind: kind.to_string() });
        self.breakers.remove(&KindLabels { kind: kind.to_string() });
        self.watch_age.remove(&KindLabels { kind: kind.to_string() });
    }

    /// A turn has ended.
    pub fn turn(&self, kind: &GroupKind, result: Verdict) {
        self.runs.get_or_create(&ResultLabels { kind: kind.to_string(), result }).inc();
    }

    /// A run of a version on trial has ended.
    pub fn tried(&self, kind: &GroupKind, evidence: &Evidence) {
        self.tried.get_or_create(&TriedLabels { kind: kind.to_string(), result: evidence.as_str() }).inc();
    }

    /// A handler has run for so long.
    pub fn ran(&self, kind: &GroupKind, duration: Duration) {
        self.duration.get_or_create(&KindLabels { kind: kind.to_string() }).observe(duration.as_secs_f64());
    }

    /// Whether the circuit breaker of a kind's plugin is open, or half open.
    pub fn breaker(&self, kind: &GroupKind, open: bool) {
        self.breakers.get_or_create(&KindLabels { kind: kind.to_string() }).set(i64::from(open));
    }

    /// Writes have been answered: `status`, `metadata`, `children` or `finalizer`.
    pub fn wrote(&self, kind: &GroupKind, write: &'static str, times: usize) {
        self.writes.get_or_create(&WriteLabels { kind: kind.to_string(), write }).inc_by(times as u64);
    }

    /// A read by a handler of the kind has been answered.
    pub fn read(&self, kind: &GroupKind, result: Answered) {
        self.reads.get_or_create(&ReadLabels { kind: kind.to_string(), result }).inc();
    }

    /// The kinds that are watched only to be read, each with the objects of one informer.
    pub fn read_only(&self, informers: impl Iterator<Item = (GroupKind, usize)>) {
        self.read_objects.clear();
        for (kind, objects) in informers {
            let gauge = self.read_objects.get_or_create(&KindLabels { kind: kind.to_string() });
            gauge.inc_by(i64::try_from(objects).unwrap_or(i64::MAX));
        }
    }

    /// A host call of the kind's handler was denied.
    pub fn denied(&self, kind: &GroupKind, denial: Denial) {
        self.denials(kind, denial).inc();
    }

    fn denials(&self, kind: &GroupKind, denial: Denial) -> impl Deref<Target = Counter> {
        let labels = DeniedLabels { kind: kind.to_string(), capability: denial.capability(), reason: denial.reason() };
        self.denied.get_or_create(&labels)
    }

    /// The queue's depth for a kind.
    pub fn depth(&self, kind: &GroupKind, ready: usize, delayed: usize, running: usize) {
        for (state, depth) in STATES.into_iter().zip([ready, delayed, running]) {
            self.depth.get_or_create(&DepthLabels { kind: kind.to_string(), state }).set(i64::try_from(depth).unwrap_or(i64::MAX));
        }
    }

    /// The informer's cache of a kind, and when the API server last spoke.
    pub fn informer(&self, kind: &GroupKind, objects: usize, age: Option<Duration>) {
        let labels = KindLabels { kind: kind.to_string() };
        self.objects.get_or_create(&labels).set(i64::try_from(objects).unwrap_or(i64::MAX));
        if let Some(age) = age {
            self.watch_age.get_or_create(&labels).set(age.as_secs_f64());
        }
    }

    /// The plugins that serve now, as (plugin, kind, digest), and how many versions are refused.
    pub fn plugins(&self, serving: impl Iterator<Item = (String, String, String)>, refused: usize) {
        self.plugins.clear();
        for (plugin, kind, digest) in serving {
            self.plugins.get_or_create(&PluginLabels { plugin, kind, digest }).set(1);
        }
        self.refused.set(i64::try_from(refused).unwrap_or(i64::MAX));
    }

    /// Whether this process leads.
    pub fn leader(&self, leads: bool) {
        self.leader.set(i64::from(leads));
    }

    /// The text that `/metrics` answers with.
    pub fn render(&self) -> String {
        let mut out = String::new();
        text::encode(&mut out, &self.registry).expect("a string takes all that is written");
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_result_of_a_kind_is_there_at_zero() {
        let metrics = Metrics::default();
        let kind = GroupKind { group: "batch.acme.io".into(), kind: "ReportJob".into() };
        metrics.kind_added(&kind);
        let text = metrics.render();
        for verdict in Verdict::ALL {
            assert!(text.contains(&format!(r#"berth_reconcile_total{{kind="ReportJob.batch.acme.io",result="{verdict}"}} 0"#)), "{text}");
        }
        for result in ["ok", "forbidden", "not_synced", "error"] {
            assert!(text.contains(&format!(r#"berth_reads_total{{kind="ReportJob.batch.acme.io",result="{result}"}} 0"#)), "{text}");
        }
        metrics.tried(&kind, &Evidence::Same);
        metrics.denied(&kind, Denial::Socket);
        let text = metrics.render();
        for result in Evidence::WORDS {
            let count = u8::from(result == "same");
            let series = format!(r#"berth_candidate_runs_total{{kind="ReportJob.batch.acme.io",result="{result}"}} {count}"#);
            assert!(text.contains(&series), "{text}");
        }
        for denial in Denial::ALL {
            let (capability, reason, count) = (denial.capability(), denial.reason(), u8::from(denial == Denial::Socket));
            let series =
                format!(r#"berth_denied_total{{kind="ReportJob.batch.acme.io",capability="{capability}",reason="{reason}"}} {count}"#);
            assert!(text.contains(&series), "{text}");
        }
    }
}
