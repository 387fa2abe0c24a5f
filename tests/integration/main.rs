//! The proofs of Berth on a real API server.
//!
//! Each test has namespaces, plugins, back ends and a host process of its own, on a control plane that all of them share. On failure it
//! shows its objects, the host's log and the host's last requests to the API server.

/// Children: applied as the plugin's own account, kept as they are wanted, never taken from anybody.
mod children;
/// Objects that wait: circuit breaker and pause, and what the `Plugin` object says of it.
mod circuit;

mod connections;
/// Private authorities and credentials of allowed hosts.
mod credentials;
/// The life of a CustomResourceDefinition beside its plugin.
mod definitions;
/// What ships under `deploy/`: CRDs that refuse bad input, the label of a new job, pods for the restricted profile.
mod deploy;
/// EmailRequest, end to end: sent once, whatever happens in between.
mod email_request;
/// A host that is killed, ended, cut off or lied to at any of its effects comes to the same end.
mod explore;
/// Faults of the API server and of the way to it, by the fault proxy.
mod faults;
/// What is not the handler's to change stays as it is; what is too long, too large or no label is still dealt with.
mod fidelity;
/// Finalizers: an object that a plugin has to undo something for is gone only when that is done.
mod finalizer;
/// Plugins come, change, are refused and go, without a restart; one plugin does not disturb another.
mod host;
/// The laws are held to at the end of each test that has a host.
mod laws;
/// The host's source code keeps its layers.
mod layers;
/// What was given up on: marks, redrive and `berth retry`.
mod letters;
/// Objects that no schema has checked, beside healthy ones.
mod malformed;
/// Guests and files that misbehave in every known way, side by side with healthy ones.
mod misbehaviour;
/// An API server that is away, refuses, asks to wait or restarts, for as long as it likes.
mod outage;
/// Processes that stand still, are cut off, or are asked to end in the middle of runs.
mod pauses;
/// `berth push`: the guide's example, a refusal, a host that is not there.
mod push;
/// A quiet cluster sees no requests but watches and lease renewals.
mod quiet;
/// Reads of the cluster: who may read what, and what wakes an object whose handler has read.
mod reads;
/// Leader election: one active, warm standbys, no double effect.
mod replicas;
/// ReportJob, end to end: drained by priority, dead-lettered, labelled.
mod report_job;
/// When a failing object is tried again, and when anew.
mod retries;
/// Versions that undo themselves: trial, rollback, staged rollout, and what survives a restart.
mod rollout;
/// Many objects at once: a restart among finished ones, a compiler at work beside them, all of them failing.
mod scale;
/// `docs/security.md` and `docs/reliability.md` name a test for each promise, and each test is there.
mod security;
/// Churn of everything at once, after which nothing has grown; long by `make soak`.
mod soak;
