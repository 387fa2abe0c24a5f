//! What a `Plugin` object says.

use serde::{Deserialize, Serialize};

use crate::{
    loader::{Refused, Standing},
    package::{Digest, Refusal},
};

/// Status of a `Plugin` object.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Status {
    /// `Kind.group`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// The first digits of `servingDigest`, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// How the plugin stands, in a sentence.
    pub reason: String,
    /// What serves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serving_digest: Option<String>,
    /// What was refused, where the delivered version was and has a digest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused_digest: Option<String>,
    /// Why, in a sentence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused_reason: Option<String>,
    /// The version of the delivery that this is about: the resourceVersion of the ConfigMap.
    pub observed_version: String,
    /// `Ready` alone: whether a version of the plugin serves its kind.
    pub conditions: Vec<Condition>,
}

/// A condition as Kubernetes has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Condition {
    /// Name of the condition.
    pub r#type: String,
    /// `True` or `False`.
    pub status: String,
    /// When `status` became what it is.
    pub last_transition_time: String,
    /// A word for machines.
    pub reason: String,
    /// A sentence.
    pub message: String,
}

/// The reasons of `Ready` beside those of a [`Refusal`].
mod word {
    pub const SERVING: &str = "Serving";
    pub const PAUSED: &str = "Paused";
    pub const LOADING: &str = "Loading";
    pub const WATCH_FAILING: &str = "WatchFailing";
}

impl Status {
    /// What is to be said of a standing. `trouble` is what keeps its kind from being watched; `before` is what is said now.
    pub fn of(standing: &Standing, trouble: Option<&str>, before: Option<&Self>, now: &str) -> Self {
        let (ready, reason, message) = judge(standing, trouble);
        let status = if ready { "True" } else { "False" };
        let since =
            before.and_then(Self::ready).filter(|before| before.status == status).map(|before| before.last_transition_time.as_str());
        let serving = standing.serving.as_ref().map(|serving| serving.digest);
        let refused = standing.refused.as_ref();
        Self {
            kind: standing.kind.as_ref().map(|kind| kind.group_kind().to_string()),
            digest: serving.map(|digest| digest.short()),
            reason: message.clone(),
            serving_digest: serving.map(|digest| digest.to_string()),
            refused_digest: refused.and_then(|refused| refused.digest).map(|digest| digest.to_string()),
            refused_reason: refused.map(|refused| refused.refusal.message.clone()),
            observed_version: standing.version.clone(),
            conditions: vec![Condition {
                r#type: "Ready".into(),
                status: status.into(),
                last_transition_time: since.unwrap_or(now).into(),
                reason: reason.into(),
                message,
            }],
        }
    }

    /// The condition `Ready`.
    pub fn ready(&self) -> Option<&Condition> {
        self.conditions.iter().find(|condition| condition.r#type == "Ready")
    }

    /// Whether it says that something is not as it was meant.
    pub fn is_warning(&self) -> bool {
        self.refused_reason.is_some() || self.ready().is_none_or(|ready| ready.status != "True")
    }

    /// Whether there is only to be said that a verdict will come.
    pub fn is_loading(&self) -> bool {
        self.ready().is_none_or(|ready| ready.reason == word::LOADING)
    }
}

fn judge(standing: &Standing, trouble: Option<&str>) -> (bool, &'static str, String) {
    match (&standing.serving, &standing.refused, trouble) {
        (None, None, _) => (false, word::LOADING, "The plugin is being loaded.".into()),
        (None, Some(Refused { refusal: Refusal { reason, message }, .. }), _) => (false, reason, message.clone()),
        (Some(_), _, Some(trouble)) => {
            let message = format!("The plugin is loaded, but its objects cannot be watched: {}.", trouble.trim_end_matches('.'));
            (false, word::WATCH_FAILING, message)
        }
        (Some(serving), Some(Refused { digest, refusal }), None) => {
            let refused = digest.as_ref().map(Digest::short).unwrap_or_default();
            let gap = if refused.is_empty() { "" } else { " " };
            let message = format!(
                "The last good version {} serves; the delivered one{gap}{refused} was refused: {}",
                serving.digest.short(),
                refusal.message
            );
            (true, refusal.reason, message)
        }
        (Some(serving), None, None) if serving.paused => {
            (true, word::PAUSED, format!("{} is paused by plugin.yaml: its objects are not run.", serving.claim.reconciles))
        }
        (Some(serving), None, None) => (true, word::SERVING, format!("Serving {}.", serving.claim.reconciles)),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{catalog::tests::serving, package::reason, source::Place};

    fn standing() -> Standing {
        let serving = serving(b"1", "");
        let kind = Some(serving.claim.reconciles.clone());
        let (uid, version) = (Some("u".into()), "7".into());
        Standing { place: Place::ConfigMap, uid, version, kind, serving: Some(serving), refused: None, loading: false }
    }

    fn refused() -> Option<Refused> {
        Some(Refused { digest: Some(Digest::of(b"2")), refusal: Refusal::new(reason::COMPILE_FAILED, "It is broken.") })
    }

    #[test]
    fn a_serving_plugin_is_ready_with_its_digest_and_kind() {
        let status = Status::of(&standing(), None, None, "now");
        assert_eq!((status.kind.as_deref(), status.reason.as_str()), (Some("K.g.io"), "Serving K (g.io/v1)."));
        assert_eq!(status.serving_digest, Some(Digest::of(b"1").to_string()));
        assert!(!status.is_warning() && status.refused_reason.is_none());
    }

    #[test]
    fn a_refused_version_leaves_a_plugin_with_a_good_one_ready_and_says_why() {
        let status = Status::of(&Standing { refused: refused(), ..standing() }, None, None, "now");
        let ready = status.ready().expect("ready");
        assert_eq!((ready.status.as_str(), ready.reason.as_str()), ("True", reason::COMPILE_FAILED));
        assert!(status.is_warning() && status.reason.ends_with("was refused: It is broken."), "{status:?}");
        assert_eq!(status.refused_digest, Some(Digest::of(b"2").to_string()));
        let alone = Status::of(&Standing { serving: None, refused: refused(), ..standing() }, None, None, "now");
        assert_eq!(alone.ready().map(|ready| (ready.status.as_str(), ready.reason.as_str())), Some(("False", reason::COMPILE_FAILED)));
    }

    #[test]
    fn a_kind_that_cannot_be_watched_is_not_ready() {
        let status = Status::of(&standing(), Some("watch ks: forbidden"), None, "now");
        assert_eq!(status.ready().map(|ready| ready.reason.as_str()), Some(word::WATCH_FAILING));
        assert!(status.reason.contains("cannot be watched: watch ks: forbidden."));
    }

    #[test]
    fn the_time_of_the_condition_moves_only_with_its_status() {
        let first = Status::of(&standing(), None, None, "1");
        let second = Status::of(&Standing { refused: refused(), ..standing() }, None, Some(&first), "2");
        assert_eq!(second.ready().expect("ready").last_transition_time, "1");
        let third = Status::of(&Standing { serving: None, refused: refused(), ..standing() }, None, Some(&second), "3");
        assert_eq!(third.ready().expect("ready").last_transition_time, "3");
        assert_eq!(Status::of(&standing(), None, Some(&first), "4"), first);
    }

    #[test]
    fn a_paused_plugin_says_so() {
        let mut serving = Arc::into_inner(serving(b"1", "")).expect("one owner");
        serving.paused = true;
        let status = Status::of(&Standing { serving: Some(Arc::new(serving)), ..standing() }, None, None, "now");
        assert!(status.reason.contains("paused by plugin.yaml"), "{status:?}");
    }
}
