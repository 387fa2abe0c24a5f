//! How each plugin stands: what the loader tells everyone else.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    catalog::{Candidate, Serving},
    object::Kind,
    package::{Digest, Refusal, Version},
    source::{Delivery, Place, RolledBack},
    trial::Rollout,
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
    /// The version that has proven itself, or the first, if any serves: the delivered one, or an earlier one.
    pub stable: Option<Arc<Serving>>,
    /// The delivered version, while it is on trial.
    pub candidate: Option<Candidate>,
    /// Whether no object of the kind is run for now, by the last `plugin.yaml` that could be read.
    pub paused: bool,
    /// Why the delivered version does not serve.
    pub refused: Option<Refused>,
    /// Whether the delivered version has yet to pass its gates.
    pub loading: bool,
    /// What of it has to outlive the process.
    pub keep: Option<Keep>,
}

impl Standing {
    /// What serves most objects of its kind, if anything does.
    pub fn serving(&self) -> Option<&Arc<Serving>> {
        let whole = self.candidate.as_ref().filter(|candidate| candidate.trial.rollout() == Rollout::Immediate);
        whole.map(|candidate| &candidate.serving).or(self.stable.as_ref())
    }
}

/// What has to outlive the process: which version is stable, and which ones were rolled back.
#[derive(Clone, Debug)]
pub struct Keep {
    /// The stable version.
    pub version: Version,
    /// Its files.
    pub delivery: Arc<Delivery>,
    /// Uid of the plugin's own ConfigMap.
    pub owner: Option<String>,
    /// The versions that are not to be tried again, the last one last.
    pub rolled_back: Vec<RolledBack>,
    /// What is kept now: uid of the ConfigMap, and which version is in it if it is this very plugin's.
    pub kept: Option<(String, Option<Version>)>,
    /// Whether that is what is to be kept.
    pub is_kept: bool,
}

/// Without the content, which the version stands for.
impl PartialEq for Keep {
    fn eq(&self, other: &Self) -> bool {
        let Self { version, delivery: _, owner, rolled_back, kept, is_kept } = self;
        (version, owner, rolled_back, kept, is_kept) == (&other.version, &other.owner, &other.rolled_back, &other.kept, &other.is_kept)
    }
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
