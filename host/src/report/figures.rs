//! What one host tells of a plugin at work: how many objects, and the last failure. One entry a host, so that several can write.

use serde::{Deserialize, Serialize};

/// An entry of `status.hosts`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Figures {
    /// Name of the Lease under which the host works.
    pub name: String,
    /// Who holds it.
    pub holder: String,
    /// Objects of the kind.
    pub objects: u64,
    /// Of these: waiting for a free worker.
    pub waiting: u64,
    /// Of these: waiting for a time, after a failure or because the handler asked for it.
    pub delayed: u64,
    /// Of these: paused by their annotation.
    pub paused: u64,
    /// `open` or `half-open` while objects wait because the handler traps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub circuit: Option<String>,
    /// The last one, if there was one since the host leads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_failure: Option<LastFailure>,
}

/// A run that failed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LastFailure {
    /// `namespace/name`.
    pub object: String,
    /// In a sentence.
    pub cause: String,
    /// The version of the plugin that failed.
    pub version: String,
    /// When this object failed so for the first time in a row.
    pub time: String,
}

impl Figures {
    /// Whether objects wait because the handler traps.
    pub fn is_open(&self) -> bool {
        self.circuit.is_some()
    }
}
