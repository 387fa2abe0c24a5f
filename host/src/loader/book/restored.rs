//! What has become of the version that was kept of a plugin: it is loaded where the plugin has nothing better to go on with.

use std::sync::Arc;

use super::{Finished, Loaded};
use crate::package::{Refusal, reason};

/// How often the host may fail to load what was kept before a delivered version that passes every gate serves without it.
const TRIES: u32 = 3;

/// See the module.
#[derive(Debug, Default)]
pub(super) enum Restored {
    /// It has not been asked for.
    #[default]
    Unasked,
    /// It is being loaded.
    Loading(Attempt),
    /// The host could not load it, for this reason of its own, and will try again.
    Waiting { attempt: Attempt, due: bool, why: String },
    /// It can never be loaded: it is as if there were none.
    Failed { uid: String },
    /// It has been loaded.
    Done { uid: String },
}

/// An attempt to load what was kept.
#[derive(Clone, Debug)]
pub(super) struct Attempt {
    /// Number of the job.
    pub(super) number: u64,
    /// Uid of the ConfigMap that it is in.
    uid: String,
    /// How often the host has failed so far.
    failures: u32,
}

impl Restored {
    /// Whether it may be asked for now.
    pub(super) fn may_begin(&self) -> bool {
        matches!(self, Self::Unasked | Self::Waiting { due: true, .. })
    }

    /// It is asked for.
    pub(super) fn begin(&mut self, number: u64, uid: &str) {
        let failures = match self {
            Self::Waiting { attempt, .. } if attempt.uid == uid => attempt.failures,
            _ => 0,
        };
        *self = Self::Loading(Attempt { number, uid: uid.to_owned(), failures });
    }

    /// Whether it is being loaded.
    pub(super) fn is_loading(&self) -> bool {
        matches!(self, Self::Loading(_))
    }

    /// Whether this job is the one that loads it.
    pub(super) fn is_loaded_by(&self, number: u64) -> bool {
        matches!(self, Self::Loading(attempt) if attempt.number == number)
    }

    /// What came of it: the version, if it was loaded.
    pub(super) fn finish(&mut self, name: &str, finished: Finished) -> Option<Arc<Loaded>> {
        let Self::Loading(attempt) = std::mem::take(self) else { return None };
        let uid = attempt.uid.clone();
        let refused = match finished {
            Ok(loaded) => {
                *self = Self::Done { uid };
                return Some(loaded);
            }
            Err(refused) => refused.refusal,
        };
        let (reason, why) = (refused.reason, refused.message);
        tracing::warn!(plugin = name, reason, why, "the stable version that was kept cannot be loaded");
        *self = if reason == reason::HOST_FAILURE {
            Self::Waiting { attempt: Attempt { failures: attempt.failures + 1, ..attempt }, due: false, why }
        } else {
            Self::Failed { uid }
        };
        None
    }

    /// Some time has passed.
    pub(super) fn retry(&mut self) {
        if let Self::Waiting { due, .. } = self {
            *due = true;
        }
    }

    /// What is kept is in the ConfigMap with this uid now, whose content cannot change.
    pub(super) fn observe(&mut self, uid: &str) {
        if let Self::Failed { uid: known } | Self::Done { uid: known } | Self::Waiting { attempt: Attempt { uid: known, .. }, .. } = self
            && known != uid
        {
            *self = Self::Unasked;
        }
    }

    /// Whether nothing is to be hoped for any more; or not for as long as `another` version waits for it that could serve.
    pub(super) fn is_hopeless(&self, another: bool) -> bool {
        match self {
            Self::Failed { .. } => true,
            Self::Waiting { attempt, .. } => another && attempt.failures >= TRIES,
            Self::Unasked | Self::Loading(_) | Self::Done { .. } => false,
        }
    }

    /// Why it is not there yet, where the host has failed.
    pub(super) fn trouble(&self) -> Option<Refusal> {
        let Self::Waiting { why, .. } = self else { return None };
        let message = format!("The stable version that was kept cannot be loaded: {why} It is tried again every 10 s.");
        Some(Refusal::new(reason::HOST_FAILURE, message))
    }
}
