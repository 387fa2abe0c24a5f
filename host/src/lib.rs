//! Berth: a Kubernetes reconcile host whose handlers are WebAssembly components.
//!
//! # The picture
//! ```text
//!  kube-apiserver                                              ConfigMaps (*.wasm)
//!       │ watch                                                       │ watch
//!       ▼                                                             ▼
//!   watch, kinds ──object──▶ controller::Term ◀──serves── catalog ◀─ loader ◀─ source
//!  (every replica)             │  (leader only)     (stable, on trial) (gates)   │
//!                              ▼                                                 ▼
//!                            queue ──turn──▶ controller ──Request──▶ Reconcile   report
//!                    (dedup, one at a time,   │    ▲                 (a plugin:   (Plugin objects)
//!                     priority, backoff)      ▼    └────Outcome───── fresh sandbox,
//!                                    settle: one match                limits, grants)
//!                                             │
//!                                             └──▶ children, status, labels, events, finalizer — each under the fence of the lease
//! ```
//!
//! # Where to go
//! [`host`] puts everything together; [`controller`] is the loop; [`reconcile`] is the one trait; [`plugin`] runs components.
//! The layers, from the bottom up, and what each module is for, are in `CONTRIBUTING.md`; a test keeps them.

pub mod account;
pub mod admin;
pub mod authority;
pub mod backoff;
pub mod catalog;
pub mod children;
pub mod claim;
pub mod cli;
pub mod client;
pub mod controller;
pub mod controlplane;
pub mod denial;
pub mod events;
pub mod fence;
pub mod finalizer;
pub mod host;
pub mod install;
pub mod keep;
pub mod kinds;
pub mod label;
pub mod lease;
pub mod loader;
pub mod log;
pub mod memory;
pub mod metrics;
pub mod object;
pub mod package;
pub mod plugin;
pub mod queue;
pub mod reader;
pub mod reads;
pub mod reconcile;
pub mod report;
pub mod secrets;
pub mod shutdown;
pub mod source;
pub mod status;
pub mod text;
pub mod trial;
pub mod watch;
