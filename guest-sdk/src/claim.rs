//! What a handler is and what it asks for. `#[reconciler]` writes it.

use crate::resource::Kind;

/// The claim of a handler, all of it known when it is compiled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Claim {
    /// The kind that it reconciles.
    pub reconciles: Kind,
    /// How the status tells that a version of the spec is finished.
    pub progress: Option<Progress>,
    /// How the host accounts for failures in the status.
    pub dead_letter: Option<DeadLetter>,
    /// An integer of the spec, such as `spec.priority`: higher runs first.
    pub priority_field: Option<&'static str>,
    /// What it reads.
    pub reads: &'static [Read],
    /// Kinds of its children.
    pub owns: &'static [Kind],
    /// URLs that it sends to, or `$settings.KEY`.
    pub hosts: &'static [&'static str],
    /// Whether it wants `finalize` runs.
    pub finalizer: bool,
    /// Prefixes of the labels that it sets.
    pub label_prefixes: &'static [&'static str],
}

/// How the status tells that a version of the spec is finished.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress {
    /// Such as `status.phase`.
    pub phase_field: &'static str,
    /// The phases that end the work.
    pub settled: &'static [&'static str],
    /// A label that the host keeps equal to the lower-cased phase.
    pub mirror_label: Option<&'static str>,
}

/// How the host accounts for failures in the status.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeadLetter {
    /// The number of failures that ends the runs; with none only a `give_up` does.
    pub after: Option<u32>,
    /// The phase that is then written.
    pub phase: &'static str,
    /// Such as `status.retries`.
    pub retries_field: Option<&'static str>,
    /// Such as `status.message`.
    pub message_field: &'static str,
}

/// Objects that a handler reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Read {
    /// What.
    pub kind: Kind,
    /// Not only in the object's own namespace.
    pub all_namespaces: bool,
    /// As in `kubectl -l`; empty for all.
    pub label_selector: &'static str,
}

/// A handler with its claim. `#[reconciler]` implements it.
pub trait Describe {
    /// The claim.
    const CLAIM: Claim;
}

/// Name and version of the SDK, for people.
pub const SDK: &str = concat!("berth-sdk ", env!("CARGO_PKG_VERSION"), " (rust)");
