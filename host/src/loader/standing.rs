//! How each plugin stands: what the loader tells everyone else.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    catalog::Serving,
    object::Kind,
    package::{Digest, Refusal},
    source::Place,
};

/// How a plugin stands.
#[derive(Clone, Debug, PartialEq)]
pub struct Standing {
    /// From which source it is.
    pub place: Place,
    /// Uid of its ConfigMap.
    pub uid: Option<String>,
    /// The version of the delivery that this is about.
    pub version: String,
    /// The kind that it serves or would serve, where that is known.
    pub kind: Option<Kind>,
    /// What serves its kind, if anything: the delivered version, or an earlier one that was good.
    pub serving: Option<Arc<Serving>>,
    /// Why the delivered version does not serve.
    pub refused: Option<Refused>,
    /// Whether the delivered version has yet to pass its gates.
    pub loading: bool,
}

/// A version that was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Of its component, where it has one.
    pub digest: Option<Digest>,
    /// Why.
    pub refusal: Refusal,
}

/// All plugins by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Standings {
    /// By name.
    pub plugins: BTreeMap<String, Standing>,
    /// Whether every source has told what it had at the start: only then is a plugin that is not here really gone.
    pub synced: bool,
    /// Whether all of these have been loaded or refused once: only then is a standby warm.
    pub warm: bool,
}
