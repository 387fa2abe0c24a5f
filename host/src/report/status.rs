//! What a `Plugin` object says.

use serde::{Deserialize, Serialize};

use super::figures::Figures;
use crate::{
    catalog::Candidate,
    loader::{Refused, Standing},
    package::{Digest, Refusal, Version, reason},
    trial::Rollout,
};

/// The track of the contract that every plugin which loads speaks.
const CONTRACT: &str = "0.1";

/// Status of a `Plugin` object, as the leader writes it.
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
    /// What serves all objects, or all but the share of a candidate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serving_digest: Option<String>,
    /// The same with its configuration: digits of both digests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serving_version: Option<String>,
    /// What has proven itself, and takes over where a candidate does worse.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stable_version: Option<String>,
    /// What is on trial.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub candidate_version: Option<String>,
    /// Of what is on trial.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub candidate_digest: Option<String>,
    /// The track of the contract that it speaks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub contract: Option<String>,
    /// What it was built with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sdk: Option<String>,
    /// What was refused, where the delivered version was and has a digest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused_digest: Option<String>,
    /// Why, in a sentence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused_reason: Option<String>,
    /// The version of the delivery that this is about: the resourceVersion of the ConfigMap.
    pub observed_version: String,
    /// `Loaded`, `Compatible`, `Authorized` of the delivered version; `Healthy` and `Ready` of the plugin.
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

/// The reasons of conditions beside those of a [`Refusal`].
mod word {
    pub const SERVING: &str = "Serving";
    pub const ON_TRIAL: &str = "OnTrial";
    pub const PAUSED: &str = "Paused";
    pub const LOADING: &str = "Loading";
    pub const WATCH_FAILING: &str = "WatchFailing";
    pub const CIRCUIT_OPEN: &str = "CircuitOpen";
    pub const NOT_KNOWN: &str = "NotKnownYet";
    pub const PASSED: &str = "Passed";
}

/// A verdict: `True`, `False` or `Unknown`, a word and a sentence.
type Judgement = (&'static str, &'static str, String);

impl Status {
    /// What is to be said of a standing. `trouble` is what keeps its kind from being watched; `before` is what is said now.
    pub fn of(standing: &Standing, trouble: Option<&str>, figures: Option<&Figures>, before: Option<&Self>, now: &str) -> Self {
        let ready = ready(standing, trouble, figures);
        let reason = ready.2.clone();
        let [loaded, compatible, authorized] = gates(standing);
        let healthy = healthy(standing, trouble, figures);
        let conditions =
            [("Loaded", loaded), ("Compatible", compatible), ("Authorized", authorized), ("Healthy", healthy), ("Ready", ready)];
        let conditions = conditions.map(|(name, judgement)| Condition::of(name, judgement, before, now));
        let version = |version: &Version| version.to_string();
        let serving = standing.serving();
        let candidate = standing.candidate.as_ref().map(|candidate| &candidate.serving.version);
        let refused = standing.refused.as_ref();
        Self {
            kind: standing.kind.as_ref().map(|kind| kind.group_kind().to_string()),
            digest: serving.map(|serving| serving.version.digest.short()),
            reason,
            serving_digest: serving.map(|serving| serving.version.digest.to_string()),
            serving_version: serving.map(|serving| version(&serving.version)),
            stable_version: standing.stable.as_ref().map(|stable| version(&stable.version)),
            candidate_version: candidate.map(version),
            candidate_digest: candidate.map(|version| version.digest.to_string()),
            contract: serving.map(|_| CONTRACT.to_owned()),
            sdk: serving.map(|serving| serving.claim.sdk.clone()).filter(|sdk| !sdk.is_empty()),
            refused_digest: refused.and_then(|refused| refused.digest).map(|digest| digest.to_string()),
            refused_reason: refused.map(|refused| refused.refusal.message.clone()),
            observed_version: standing.version.clone(),
            conditions: conditions.into(),
        }
    }

    /// The condition `Ready`.
    pub fn ready(&self) -> Option<&Condition> {
        self.condition("Ready")
    }

    /// A condition by its name.
    pub fn condition(&self, name: &str) -> Option<&Condition> {
        self.conditions.iter().find(|condition| condition.r#type == name)
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

impl Condition {
    fn of(name: &str, (status, reason, message): Judgement, before: Option<&Status>, now: &str) -> Self {
        let known = before.and_then(|before| before.condition(name)).filter(|known| known.status == status);
        let since = known.map_or(now, |known| &known.last_transition_time);
        Self { r#type: name.into(), status: status.into(), last_transition_time: since.into(), reason: reason.into(), message }
    }
}

/// How far the delivered version came: each gate that it passed, the one that it did not, and none of those behind.
fn gates(standing: &Standing) -> [Judgement; 3] {
    const SENTENCES: [&str; 3] = [
        "The component is whole, keeps its contract and has a valid claim.",
        "The CustomResourceDefinition serves the kind as it is claimed.",
        "The host's account has the permissions for the kind.",
    ];
    let shut = match &standing.refused {
        _ if standing.loading => Some((0, None)),
        None => None,
        Some(Refused { refusal, .. }) => match refusal.reason {
            reason::ROLLED_BACK => None,
            reason::FORBIDDEN => Some((2, Some(refusal))),
            reason::KIND_TAKEN
            | reason::WAITING_FOR_CRD
            | reason::KIND_MISMATCH
            | reason::VERSION_NOT_SERVED
            | reason::NO_STATUS_SUBRESOURCE
            | reason::NO_STATUS_FIELD => Some((1, Some(refusal))),
            _ => Some((0, Some(refusal))),
        },
    };
    std::array::from_fn(|gate| match shut {
        Some((at, Some(Refusal { reason, message }))) if at == gate => ("False", *reason, message.clone()),
        Some((at, _)) if gate >= at => ("Unknown", word::NOT_KNOWN, "The delivered version has not come so far.".into()),
        _ => ("True", word::PASSED, SENTENCES[gate].into()),
    })
}

fn healthy(standing: &Standing, trouble: Option<&str>, figures: Option<&Figures>) -> Judgement {
    match (&standing.stable, &standing.refused, trouble) {
        (None, ..) => ("Unknown", word::NOT_KNOWN, "No version serves.".into()),
        (Some(_), _, Some(trouble)) => ("False", word::WATCH_FAILING, watch_failing(trouble)),
        _ if figures.is_some_and(Figures::is_open) => ("False", word::CIRCUIT_OPEN, circuit_open()),
        (_, Some(Refused { refusal, .. }), _) if refusal.reason == reason::ROLLED_BACK => {
            ("False", reason::ROLLED_BACK, refusal.message.clone())
        }
        _ => ("True", word::PASSED, "Its objects are watched, and its handler does not trap too often.".into()),
    }
}

fn watch_failing(trouble: &str) -> String {
    format!("The plugin is loaded, but its objects cannot be watched: {}.", trouble.trim_end_matches('.'))
}

fn circuit_open() -> String {
    "The handler traps too often, so its objects wait; one at a time is tried until it works again or another version is delivered.".into()
}

fn ready(standing: &Standing, trouble: Option<&str>, figures: Option<&Figures>) -> Judgement {
    let Some(serving) = standing.serving() else {
        return match &standing.refused {
            None => ("False", word::LOADING, "The plugin is being loaded.".into()),
            Some(Refused { refusal: Refusal { reason, message }, .. }) => ("False", reason, message.clone()),
        };
    };
    if let Some(trouble) = trouble {
        return ("False", word::WATCH_FAILING, watch_failing(trouble));
    }
    if figures.is_some_and(Figures::is_open) {
        return ("False", word::CIRCUIT_OPEN, circuit_open());
    }
    if let Some(Refused { digest, refusal }) = &standing.refused {
        let refused = digest.as_ref().map(Digest::short).unwrap_or_default();
        let gap = if refused.is_empty() { "" } else { " " };
        let pause = if standing.paused { " Its objects are not run, as plugin.yaml paused them before." } else { "" };
        let message = format!(
            "The last good version {} serves; the delivered one{gap}{refused} was refused: {}{pause}",
            serving.version.digest.short(),
            refusal.message
        );
        return ("True", refusal.reason, message);
    }
    let kind = &serving.claim.reconciles;
    if standing.paused {
        return ("True", word::PAUSED, format!("{kind} is paused by plugin.yaml: its objects are not run."));
    }
    match (&standing.candidate, &standing.stable) {
        (Some(candidate), Some(stable)) => ("True", word::ON_TRIAL, on_trial(candidate, &stable.version, &kind.to_string())),
        _ => ("True", word::SERVING, format!("Serving {kind}.")),
    }
}

fn on_trial(Candidate { serving, trial }: &Candidate, stable: &Version, kind: &str) -> String {
    match trial.rollout() {
        Rollout::Immediate => {
            format!(
                "Serving {kind}. The new version {} is on trial: if it does worse than {stable}, that one takes over again.",
                serving.version
            )
        }
        Rollout::Staged { share, .. } => {
            format!("Serving {kind}. The new version {} serves {share}% of the objects, and {stable} the rest.", serving.version)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{catalog::tests::serving, source::Place, trial::Trial};

    fn standing() -> Standing {
        let serving = serving(b"1", "");
        let kind = Some(serving.claim.reconciles.clone());
        let (uid, version) = (Some("u".into()), "7".into());
        Standing {
            place: Place::ConfigMap,
            uid,
            version,
            kind,
            stable: Some(serving),
            candidate: None,
            paused: false,
            refused: None,
            loading: false,
            keep: None,
        }
    }

    fn refused() -> Option<Refused> {
        Some(Refused { digest: Some(Digest::of(b"2")), refusal: Refusal::new(reason::COMPILE_FAILED, "It is broken.") })
    }

    #[test]
    fn a_serving_plugin_is_ready_with_its_digest_and_kind() {
        let status = Status::of(&standing(), None, None, None, "now");
        assert_eq!((status.kind.as_deref(), status.reason.as_str()), (Some("K.g.io"), "Serving K (g.io/v1)."));
        assert_eq!(status.serving_digest, Some(Digest::of(b"1").to_string()));
        assert!(!status.is_warning() && status.refused_reason.is_none());
    }

    #[test]
    fn a_refused_version_leaves_a_plugin_with_a_good_one_ready_and_says_why() {
        let status = Status::of(&Standing { refused: refused(), ..standing() }, None, None, None, "now");
        let ready = status.ready().expect("ready");
        assert_eq!((ready.status.as_str(), ready.reason.as_str()), ("True", reason::COMPILE_FAILED));
        assert!(status.is_warning() && status.reason.ends_with("was refused: It is broken."), "{status:?}");
        assert_eq!(status.refused_digest, Some(Digest::of(b"2").to_string()));
        let alone = Status::of(&Standing { stable: None, refused: refused(), ..standing() }, None, None, None, "now");
        assert_eq!(alone.ready().map(|ready| (ready.status.as_str(), ready.reason.as_str())), Some(("False", reason::COMPILE_FAILED)));
    }

    #[test]
    fn a_kind_that_cannot_be_watched_is_not_ready() {
        let status = Status::of(&standing(), Some("watch ks: forbidden"), None, None, "now");
        assert_eq!(status.ready().map(|ready| ready.reason.as_str()), Some(word::WATCH_FAILING));
        assert!(status.reason.contains("cannot be watched: watch ks: forbidden."));
    }

    #[test]
    fn the_time_of_the_condition_moves_only_with_its_status() {
        let first = Status::of(&standing(), None, None, None, "1");
        let second = Status::of(&Standing { refused: refused(), ..standing() }, None, None, Some(&first), "2");
        assert_eq!(second.ready().expect("ready").last_transition_time, "1");
        let third = Status::of(&Standing { stable: None, refused: refused(), ..standing() }, None, None, Some(&second), "3");
        assert_eq!(third.ready().expect("ready").last_transition_time, "3");
        assert_eq!(Status::of(&standing(), None, None, Some(&first), "4"), first);
    }

    #[test]
    fn a_paused_plugin_says_so() {
        let status = Status::of(&Standing { paused: true, ..standing() }, None, None, None, "now");
        assert!(status.reason.contains("paused by plugin.yaml"), "{status:?}");
        let status = Status::of(&Standing { paused: true, refused: refused(), ..standing() }, None, None, None, "now");
        assert!(status.reason.contains("was refused") && status.reason.ends_with("paused them before."), "{status:?}");
    }

    fn conditions(status: &Status) -> Vec<(&str, &str, &str)> {
        status.conditions.iter().map(|condition| (&*condition.r#type, &*condition.status, &*condition.reason)).collect()
    }

    fn on_trial(rollout: Rollout) -> Standing {
        let candidate = Candidate { serving: serving(b"2", "abcdef"), trial: Arc::new(Trial::new(rollout)) };
        Standing { candidate: Some(candidate), ..standing() }
    }

    #[test]
    fn a_version_on_trial_is_named_with_the_one_that_would_take_over() {
        let whole = Status::of(&on_trial(Rollout::Immediate), None, None, None, "now");
        assert_eq!(whole.serving_digest, Some(Digest::of(b"2").to_string()));
        assert_eq!((whole.serving_version.clone(), whole.stable_version.is_some()), (whole.candidate_version.clone(), true));
        assert!(whole.reason.contains("is on trial"), "{}", whole.reason);
        let share = Rollout::Staged { share: 10, time: std::time::Duration::from_secs(1) };
        let staged = Status::of(&on_trial(share), None, None, None, "now");
        assert_eq!(staged.serving_digest, Some(Digest::of(b"1").to_string()));
        assert_eq!(staged.candidate_digest, Some(Digest::of(b"2").to_string()));
        assert!(staged.reason.contains("10% of the objects"), "{}", staged.reason);
        assert!(!staged.is_warning());
    }

    #[test]
    fn each_gate_says_how_far_the_delivered_version_came() {
        let of = |word| {
            let refused = Some(Refused { digest: None, refusal: Refusal::new(word, "No.") });
            Status::of(&Standing { refused, ..standing() }, None, None, None, "now")
        };
        let (passed, unknown) = (("True", word::PASSED), ("Unknown", word::NOT_KNOWN));
        let cases = [
            (reason::COMPILE_FAILED, [("False", reason::COMPILE_FAILED), unknown, unknown, passed]),
            (reason::KIND_TAKEN, [passed, ("False", reason::KIND_TAKEN), unknown, passed]),
            (reason::FORBIDDEN, [passed, passed, ("False", reason::FORBIDDEN), passed]),
            (reason::ROLLED_BACK, [passed, passed, passed, ("False", reason::ROLLED_BACK)]),
        ];
        for (word, expected) in cases {
            let status = of(word);
            let found: Vec<_> = conditions(&status).into_iter().take(4).map(|(_, status, reason)| (status, reason)).collect();
            assert_eq!(found, expected, "{word}");
        }
        let alone = Standing { stable: None, loading: true, ..standing() };
        let status = Status::of(&alone, None, None, None, "now");
        assert_eq!(conditions(&status)[3..], [("Healthy", "Unknown", word::NOT_KNOWN), ("Ready", "False", word::LOADING)]);
    }

    #[test]
    fn an_open_circuit_makes_a_plugin_unready() {
        let figures = Figures { circuit: Some("open".into()), ..Figures::default() };
        let status = Status::of(&standing(), None, Some(&figures), None, "now");
        assert_eq!(conditions(&status)[3..], [("Healthy", "False", word::CIRCUIT_OPEN), ("Ready", "False", word::CIRCUIT_OPEN)]);
    }
}
