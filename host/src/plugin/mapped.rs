//! The unsafe code of the plugin runtime: mapping an artefact that this host compiled itself.

use std::path::Path;

use wasmtime::{Engine, component::Component};

/// Maps the artefact at `path`.
///
/// The caller vouches for it: a file that Berth's own compiler wrote, in a directory that only this user can write, whose checksum
/// was just compared. wasmtime itself checks that it is of the same version and settings.
#[allow(unsafe_code, reason = "deserialize_file trusts the file: it is native code")]
pub(super) fn component(engine: &Engine, path: &Path) -> wasmtime::Result<Component> {
    // SAFETY: see above; `Artefact::checked` is the only caller and does what the contract asks.
    unsafe { Component::deserialize_file(engine, path) }
}
