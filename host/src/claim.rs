//! What a handler is and asks for, as its `describe` returned it. The contract is in `wit/types.wit`.

use std::time::Duration;

use crate::object::Kind;

/// The claim of one version of a plugin.
#[derive(Clone, Debug, PartialEq)]
pub struct Claim {
    /// The kind that it reconciles.
    pub reconciles: Kind,
    /// How the status tells that an object is settled.
    pub progress: Option<Progress>,
    /// How failures are accounted for in the status.
    pub dead_letter: Option<DeadLetter>,
    /// Field of the spec with the priority, such as `spec.priority`.
    pub priority_field: Option<String>,
    /// Objects that it reads.
    pub reads: Vec<Read>,
    /// Kinds of its children.
    pub owns: Vec<Kind>,
    /// URLs that it sends to, or `$settings.KEY`.
    pub hosts: Vec<String>,
    /// Whether it wants `finalize` runs.
    pub finalizer: bool,
    /// Prefixes of label keys that it may set.
    pub label_prefixes: Vec<String>,
    /// The SDK it was built with.
    pub sdk: String,
}

/// See `progress` in `wit/types.wit`.
#[derive(Clone, Debug, PartialEq)]
pub struct Progress {
    /// Such as `status.phase`.
    pub phase_field: String,
    /// Phases that end the work on a version of the spec.
    pub settled: Vec<String>,
    /// Label kept equal to the lower-cased phase.
    pub mirror_label: Option<String>,
}

/// See `dead-letter` in `wit/types.wit`.
#[derive(Clone, Debug, PartialEq)]
pub struct DeadLetter {
    /// Number of failures that ends the runs; none for no limit.
    pub after: Option<u32>,
    /// The phase to write, one of [`Progress::settled`].
    pub phase: String,
    /// Such as `status.retries`.
    pub retries_field: Option<String>,
    /// Such as `status.message`.
    pub message_field: String,
}

/// See `read` in `wit/types.wit`.
#[derive(Clone, Debug, PartialEq)]
pub struct Read {
    /// What is read.
    pub kind: Kind,
    /// Whether in all namespaces.
    pub all_namespaces: bool,
    /// As in `kubectl -l`.
    pub label_selector: String,
}

/// How the runs of a kind are paced: from `plugin.yaml`, within the host's ceilings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// How many objects of the kind run at once.
    pub concurrency: usize,
    /// Delay after the first failure.
    pub backoff_base: Duration,
    /// Longest delay after a failure.
    pub backoff_max: Duration,
}

#[cfg(test)]
impl Claim {
    /// For tests: claims `K` in `g.io/v1` and asks for nothing.
    pub(crate) fn plain() -> Self {
        Self {
            reconciles: Kind { group: "g.io".into(), version: "v1".into(), kind: "K".into(), plural: "ks".into(), namespaced: true },
            progress: None,
            dead_letter: None,
            priority_field: None,
            reads: Vec::new(),
            owns: Vec::new(),
            hosts: Vec::new(),
            finalizer: false,
            label_prefixes: Vec::new(),
            sdk: String::new(),
        }
    }

    /// For tests: the same, with phases `Done` and `Failed`, a mirror label, five tries and a priority.
    pub(crate) fn full() -> Self {
        Self {
            progress: Some(Progress {
                phase_field: "status.phase".into(),
                settled: vec!["Done".into(), "Failed".into()],
                mirror_label: Some("workqueue.acme.io/phase".into()),
            }),
            dead_letter: Some(DeadLetter {
                after: Some(5),
                phase: "Failed".into(),
                retries_field: Some("status.retries".into()),
                message_field: "status.message".into(),
            }),
            priority_field: Some("spec.priority".into()),
            label_prefixes: vec!["acme.io/".into(), "acme.io/team-".into()],
            ..Self::plain()
        }
    }
}
