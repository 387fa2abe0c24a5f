//! What the host says of a version that was pushed.

use std::time::Duration;

use kube::{Api, Client, api::DynamicObject};
use tokio::time::Instant;

use super::{REQUEST, bundle::Bundle};
use crate::{
    object::newer,
    package::{Digest, reason},
    report::{Status, plugin_kind},
};

/// How often the host's word is looked for.
const POLL: Duration = Duration::from_millis(500);

/// What came of a push.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The pushed version serves.
    Serves(String),
    /// It was refused; why, in a sentence.
    Refused(String),
    /// Nothing was heard of it in time; what was seen, in a sentence.
    Unheard(String),
}

/// What a status says about the delivery of a version.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Said {
    Nothing,
    /// A refusal that may heal by itself, as when the host has not seen a permission yet.
    NotYet(String),
    Final(Verdict),
}

/// Waits for the host's word on the ConfigMap at `version`.
pub async fn wait(client: &Client, bundle: &Bundle, version: &str, limit: Duration) -> Verdict {
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), bundle.namespace(), &plugin_kind().api_resource());
    let deadline = Instant::now() + limit;
    let mut last = None;
    loop {
        let seen = tokio::time::timeout(REQUEST, api.get_opt(bundle.name())).await;
        match seen {
            Ok(Ok(Some(object))) => match judge(&status(&object), bundle.digest(), version) {
                Said::Final(verdict) => return verdict,
                Said::NotYet(sentence) => last = Some(Verdict::Refused(sentence)),
                Said::Nothing => last = None,
            },
            Ok(Ok(None)) | Err(_) => {}
            Ok(Err(error)) => last = Some(Verdict::Unheard(format!("its Plugin object cannot be read: {error}"))),
        }
        if Instant::now() + POLL > deadline {
            let namespace = bundle.namespace();
            let unheard = format!("no host has said anything of it within {limit:?}: does one run with the namespace {namespace}?");
            return last.unwrap_or(Verdict::Unheard(unheard));
        }
        tokio::time::sleep(POLL).await;
    }
}

fn status(object: &DynamicObject) -> Status {
    serde_json::from_value(object.data["status"].clone()).unwrap_or_default()
}

fn judge(status: &Status, digest: Digest, version: &str) -> Said {
    let about_it = status.observed_version == version || newer(&status.observed_version, version);
    if status.observed_version.is_empty() || !about_it || status.is_loading() {
        return Said::Nothing;
    }
    if let Some(why) = &status.refused_reason {
        let heals = [reason::WAITING_FOR_CRD, reason::FORBIDDEN, reason::HOST_FAILURE];
        let word = status.ready().map(|ready| ready.reason.as_str()).unwrap_or_default();
        return if heals.contains(&word) { Said::NotYet(why.clone()) } else { Said::Final(Verdict::Refused(why.clone())) };
    }
    if ![&status.serving_digest, &status.candidate_digest].contains(&&Some(digest.to_string())) {
        return Said::Final(Verdict::Refused("another version has taken its place.".into()));
    }
    match status.ready().is_some_and(|ready| ready.status == "True") {
        true => Said::Final(Verdict::Serves(status.reason.clone())),
        false => Said::NotYet(status.reason.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Condition;

    fn status(ready: &str, reason: &str, refused: Option<&str>) -> Status {
        Status {
            reason: "Sentence.".into(),
            serving_digest: Some(Digest::of(b"1").to_string()),
            refused_reason: refused.map(str::to_owned),
            observed_version: "7".into(),
            conditions: vec![Condition { r#type: "Ready".into(), status: ready.into(), reason: reason.into(), ..Condition::default() }],
            ..Status::default()
        }
    }

    #[test]
    fn only_a_word_about_the_pushed_version_counts() {
        let serves = status("True", "Serving", None);
        assert_eq!(judge(&serves, Digest::of(b"1"), "7"), Said::Final(Verdict::Serves("Sentence.".into())));
        assert_eq!(judge(&serves, Digest::of(b"1"), "6"), Said::Final(Verdict::Serves("Sentence.".into())));
        assert_eq!(judge(&serves, Digest::of(b"1"), "8"), Said::Nothing);
        assert_eq!(judge(&Status::default(), Digest::of(b"1"), "7"), Said::Nothing);
        assert!(matches!(judge(&serves, Digest::of(b"2"), "7"), Said::Final(Verdict::Refused(_))));
    }

    #[test]
    fn a_refusal_is_final_unless_it_may_heal_by_itself() {
        let broken = status("True", reason::COMPILE_FAILED, Some("It is broken."));
        assert_eq!(judge(&broken, Digest::of(b"1"), "7"), Said::Final(Verdict::Refused("It is broken.".into())));
        let waiting = status("False", reason::WAITING_FOR_CRD, Some("No definition."));
        assert_eq!(judge(&waiting, Digest::of(b"1"), "7"), Said::NotYet("No definition.".into()));
        assert_eq!(judge(&status("False", "Loading", None), Digest::of(b"1"), "7"), Said::Nothing);
        assert_eq!(judge(&status("False", "WatchFailing", None), Digest::of(b"1"), "7"), Said::NotYet("Sentence.".into()));
    }
}
