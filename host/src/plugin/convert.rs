//! Between the generated types of the contract and the host's own words: requests out, outcomes in, each checked.

use std::time::Duration;

use serde_json::Value;

use super::{
    bindings::berth::plugin::types as wit,
    limits::{self, FIXED, Limits, Size},
};
use crate::{
    claim::{Claim, DeadLetter, Progress, Read},
    object::{Kind, depth},
    reconcile::{Event, Failure, Next, Outcome, Phase, Request},
    text::cut,
};

/// A request as the guest gets it.
pub fn request(request: &Request, settings: &str) -> wit::Request {
    wit::Request {
        object: request.object.json.read().into_owned(),
        phase: match request.phase {
            Phase::Apply => wit::Phase::Apply,
            Phase::Finalize => wit::Phase::Finalize,
        },
        attempt: request.attempt,
        last_failure: request.last_failure.clone(),
        idempotency_key: request.idempotency_key.clone(),
        settings: settings.to_owned(),
        extensions: Vec::new(),
    }
}

/// A claim in the host's words, not judged yet.
pub fn claim(claim: wit::Claim) -> Claim {
    let wit::Claim { reconciles, progress, dead_letter, priority_field, reads, owns, hosts, finalizer, label_prefixes, sdk, extensions: _ } =
        claim;
    Claim {
        reconciles: kind(reconciles),
        progress: progress.map(|wit::Progress { phase_field, settled, mirror_label }| Progress { phase_field, settled, mirror_label }),
        dead_letter: dead_letter.map(|wit::DeadLetter { after, phase, retries_field, message_field }| DeadLetter {
            after,
            phase,
            retries_field,
            message_field,
        }),
        priority_field,
        reads: reads
            .into_iter()
            .map(|wit::Read { kind: of, reach, label_selector }| Read {
                kind: kind(of),
                all_namespaces: reach == wit::Reach::AllNamespaces,
                label_selector,
            })
            .collect(),
        owns: owns.into_iter().map(kind).collect(),
        hosts,
        finalizer,
        label_prefixes,
        sdk: cut(&super::text::one_line(&sdk), 128),
    }
}

fn kind(kind: wit::Kind) -> Kind {
    let wit::Kind { group, version, kind, plural, namespaced } = kind;
    Kind { group, version, kind, plural, namespaced }
}

/// An outcome that keeps the contract and the claim; else the failure that says what does not. `note` gets what was cut.
pub fn outcome(outcome: wit::Outcome, claim: &Claim, limits: &Limits, note: impl Fn(&str)) -> Result<Outcome, Failure> {
    let wit::Outcome { status, labels, children, mut events, next, extensions: _ } = outcome;
    let most = limits.run.events;
    if events.len() > most {
        note(&format!("kept the first {most} of {} events of the run{}", events.len(), limits.how("limits.events")));
        events.truncate(most);
    }
    let others = size(&labels, &events) + children.iter().flatten().map(String::len).sum::<usize>();
    let status = status.map(|text| self::status(&text, others, claim, limits, &note)).transpose()?;
    if status.is_none() && others > limits.run.outcome {
        return Err(too_large(others, limits));
    }
    Ok(Outcome {
        status,
        labels: self::labels(labels, claim)?,
        children: children.map(|children| self::children(children, limits)).transpose()?,
        events: events.into_iter().map(event).collect::<Result<_, _>>()?,
        next: self::next(next),
    })
}

fn refused(why: impl Into<String>) -> Failure {
    Failure::Refused(why.into())
}

fn too_large(bytes: usize, limits: &Limits) -> Failure {
    let (most, how) = (Size(limits.run.outcome as u64), limits.how("limits.outcome"));
    Failure::Limit(format!("the handler's outcome of {bytes} bytes is larger than the {most} that one may have{how}"))
}

fn too_deep(what: &str, limits: &Limits) -> Failure {
    let (most, how) = (limits.run.json_depth, limits.how("limits.jsonDepth"));
    refused(format!("{what} is nested deeper than the {most} levels that one may have{how}"))
}

fn size(labels: &[(String, Option<String>)], events: &[wit::Event]) -> usize {
    let labels = labels.iter().map(|(key, value)| key.len() + value.as_ref().map_or(0, String::len));
    let events = events.iter().map(|event| event.reason.len() + event.action.len() + event.note.len());
    labels.chain(events).sum()
}

/// A status that is too large only for its message is kept, with the message cut: the phase matters more.
fn status(text: &str, others: usize, claim: &Claim, limits: &Limits, note: impl Fn(&str)) -> Result<Value, Failure> {
    if depth(text) > limits.run.json_depth {
        return Err(too_deep("its status", limits));
    }
    let mut status: Value = serde_json::from_str(text).map_err(|error| refused(format!("its status is not JSON: {error}")))?;
    if !status.is_object() {
        return Err(refused("its status is not a JSON object"));
    }
    let bytes = text.len() + others;
    if bytes <= limits.run.outcome {
        return Ok(status);
    }
    let field = claim.dead_letter.as_ref().and_then(|letter| letter.message_field.strip_prefix("status."));
    let pointer = field.map(|field| format!("/{}", field.replace('.', "/")));
    match pointer.and_then(|pointer| status.pointer_mut(&pointer)) {
        Some(Value::String(message)) if bytes - message.len() + limits::SENTENCE <= limits.run.outcome => {
            note(&format!("cut the status message of {} bytes to {}", message.len(), Size(limits::SENTENCE as u64)));
            *message = cut(message, limits::SENTENCE);
            Ok(status)
        }
        _ => Err(too_large(bytes, limits)),
    }
}

/// Whether they may exist is judged where they are written.
fn children(children: Vec<String>, limits: &Limits) -> Result<Vec<Value>, Failure> {
    let (count, most, how) = (children.len(), limits.run.children, limits.how("limits.children"));
    if count > most {
        return Err(Failure::Limit(format!(
            "the handler's outcome has {count} children, more than the {most} that an object may have{how}"
        )));
    }
    let child = |text: String| {
        if depth(&text) > limits.run.json_depth {
            return Err(too_deep("one of its children", limits));
        }
        serde_json::from_str(&text).map_err(|error| refused(format!("one of its children is not JSON: {error}")))
    };
    children.into_iter().map(child).collect()
}

fn labels(labels: Vec<(String, Option<String>)>, claim: &Claim) -> Result<Vec<(String, Option<String>)>, Failure> {
    if labels.len() > limits::LABELS {
        return Err(Failure::Limit(format!(
            "the handler's outcome has {} labels, more than the {} that one may have{FIXED}",
            labels.len(),
            limits::LABELS
        )));
    }
    for (key, value) in &labels {
        let shown = cut(key, 100);
        if claim.progress.as_ref().and_then(|progress| progress.mirror_label.as_ref()) == Some(key) {
            return Err(refused(format!("it sets the label {shown:?}, which the host itself keeps equal to the phase")));
        }
        if !claim.label_prefixes.iter().any(|prefix| key.starts_with(prefix)) {
            return Err(refused(format!("it sets the label {shown:?}, which is outside the `label-prefixes` of its claim")));
        }
        if !crate::label::is_key(key) {
            return Err(refused(format!("it sets the label {shown:?}, which is no valid key of a label")));
        }
        if let Some(value) = value.as_ref().filter(|value| !crate::label::is_value(value)) {
            let value = cut(value, 100);
            return Err(refused(format!(
                "it sets the label {shown:?} to {value:?}: at most 63 letters, digits, '-', '_' and '.' are allowed"
            )));
        }
    }
    Ok(labels)
}

fn event(event: wit::Event) -> Result<Event, Failure> {
    let wit::Event { kind, reason, action, note } = event;
    for (what, word) in [("reason", &reason), ("action", &action)] {
        if word.is_empty() || word.len() > 128 || !word.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            let word = cut(word, 100);
            return Err(refused(format!("the {what} {word:?} of an event is not one UpperCamelCase word of at most 128 characters")));
        }
    }
    Ok(Event { warning: kind == wit::EventType::Warning, reason, action, note: cut(&note, limits::SENTENCE) })
}

fn next(next: wit::Next) -> Next {
    let wait = |guest_ms| Duration::from_millis(guest_ms).min(limits::LONGEST_WAIT);
    let cause = |text: String| if text.is_empty() { "the handler gave no cause".into() } else { cut(&text, limits::SENTENCE) };
    match next {
        wit::Next::AwaitChange => Next::AwaitChange,
        wit::Next::AfterMs(guest_ms) => Next::After(wait(guest_ms)),
        wit::Next::Retry(text) => Next::Retry(cause(text)),
        wit::Next::RetryAfterMs((guest_ms, text)) => Next::RetryAfter(wait(guest_ms), cause(text)),
        wit::Next::GiveUp(text) => Next::GiveUp(cause(text)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_status_text_is_a_value_or_a_sentence(text in "[\\[\\]{}\":,a\\\\0-9 ]{0,40}") {
            let claim = crate::claim::Claim::plain();
            match status(&text, 0, &claim, &Limits::TRIAL, |_| {}) {
                Ok(value) => prop_assert!(value.is_object()),
                Err(failure) => prop_assert!(matches!(failure, Failure::Refused(_))),
            }
        }

        #[test]
        fn guest_numbers_never_overflow(ms in any::<u64>()) {
            let Next::After(wait) = next(wit::Next::AfterMs(ms)) else { panic!("another word") };
            prop_assert!(wait <= limits::LONGEST_WAIT);
        }
    }
}
