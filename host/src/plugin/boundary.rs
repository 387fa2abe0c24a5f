//! What guests return, made up by the structure of the contract: always a value within the limits or a sentence, never a panic.

use proptest::prelude::*;

use super::{bindings::berth::plugin::types as wit, claim, convert, limits::Limits};
use crate::{
    claim::Claim,
    object::depth,
    package::{Config, Refusal},
    reconcile::{Failure, Next},
};

/// Words that a field could have, or that somebody would try.
fn word() -> impl Strategy<Value = String> {
    prop_oneof![
        prop::sample::select(vec![
            "",
            "status.phase",
            "status.retries",
            "status.message",
            "spec.priority",
            "status.observedGeneration",
            "status..",
            "Done",
            "Failed",
            "Done with warnings",
            "acme.io/",
            "acme.io/team-a",
            "workqueue.acme.io/phase",
            "kubernetes.io/x",
            "berth.acme.io/",
            "notify.acme.io",
            "v1",
            "EmailRequest",
            "emailrequests",
            "e/../secrets",
            "$settings.url",
            "$settings.",
            "https://*.a.io",
            "https://a@b",
            "\0",
            "a\nb",
            "\u{202e}",
        ])
        .prop_map(str::to_owned),
        "[A-Za-z0-9./_-]{0,20}",
        ".{0,20}",
        "x{60,70}",
        "é{600,700}",
    ]
}

fn words() -> impl Strategy<Value = Vec<String>> {
    prop_oneof![8 => prop::collection::vec(word(), 0..4), 1 => prop::collection::vec(word(), 60..70)]
}

fn kind() -> impl Strategy<Value = wit::Kind> {
    let fields = (word(), word(), word(), word(), any::<bool>());
    let made = fields.prop_map(|(group, version, kind, plural, namespaced)| wit::Kind { group, version, kind, plural, namespaced });
    let good = Just(wit::Kind { group: "g.io".into(), version: "v1".into(), kind: "K".into(), plural: "ks".into(), namespaced: true });
    prop_oneof![good, made]
}

fn claims() -> impl Strategy<Value = wit::Claim> {
    let progress = prop::option::of((word(), words(), prop::option::of(word())))
        .prop_map(|made| made.map(|(phase_field, settled, mirror_label)| wit::Progress { phase_field, settled, mirror_label }));
    let letter = prop::option::of((prop::option::of(any::<u32>()), word(), prop::option::of(word()), word())).prop_map(|made| {
        made.map(|(after, phase, retries_field, message_field)| wit::DeadLetter { after, phase, retries_field, message_field })
    });
    let fields = (kind(), progress, letter, prop::option::of(word()), words(), words(), word());
    fields.prop_map(|(reconciles, progress, dead_letter, priority_field, hosts, label_prefixes, sdk)| wit::Claim {
        reconciles,
        progress,
        dead_letter,
        priority_field,
        reads: Vec::new(),
        owns: Vec::new(),
        hosts,
        finalizer: false,
        label_prefixes,
        sdk,
        extensions: Vec::new(),
    })
}

/// A status as JSON, or nearly.
fn status() -> impl Strategy<Value = String> {
    prop_oneof![
        (word(), any::<i64>(), 0..3_000_usize).prop_map(|(word, number, length)| {
            serde_json::json!({ "phase": word, "retries": number, "message": "m".repeat(length), "list": [number, word] }).to_string()
        }),
        (1_000_000..1_100_000_usize)
            .prop_map(|length| serde_json::json!({ "phase": "Done", "message": "é".repeat(length / 2) }).to_string()),
        (1..100_usize, any::<bool>()).prop_map(|(levels, whole)| format!(
            "{}1{}",
            "{\"a\":".repeat(levels),
            "}".repeat(levels - usize::from(!whole))
        )),
        "[\\[\\]{}\":,a\\\\0-9. eE+-]{0,40}",
        ".{0,40}",
    ]
}

fn outcomes() -> impl Strategy<Value = wit::Outcome> {
    let event = (any::<bool>(), word(), word(), word()).prop_map(|(warning, reason, action, note)| wit::Event {
        kind: if warning { wit::EventType::Warning } else { wit::EventType::Normal },
        reason: if warning { reason } else { "Sent".into() },
        action,
        note,
    });
    let next = prop_oneof![
        Just(wit::Next::AwaitChange),
        any::<u64>().prop_map(wit::Next::AfterMs),
        word().prop_map(wit::Next::Retry),
        (any::<u64>(), word()).prop_map(wit::Next::RetryAfterMs),
        word().prop_map(wit::Next::GiveUp),
    ];
    let labels = prop::collection::vec((word(), prop::option::of(word())), 0..4);
    let children = prop_oneof![
        6 => prop::collection::vec(status(), 0..4),
        1 => prop::collection::vec(Just("{\"kind\":\"Job\"}".to_owned()), 95..110),
    ];
    let fields = (prop::option::of(status()), labels, prop::option::of(children), prop::collection::vec(event, 0..15), next);
    fields.prop_map(|(status, labels, children, events, next)| wit::Outcome {
        status,
        labels,
        children,
        events,
        next,
        extensions: Vec::new(),
    })
}

proptest! {
    #[test]
    fn any_claim_is_accepted_or_refused_with_a_sentence(made in claims()) {
        let claim = convert::claim(made);
        prop_assert!(claim.sdk.len() <= 128 && !claim.sdk.contains('\n'));
        if let Err(refusal) = claim::check(&claim) {
            prop_assert!(refusal.message.ends_with('.') && refusal.message.len() <= Refusal::MAX_MESSAGE, "{refusal}");
            prop_assert!(!refusal.message.contains('\n'), "{refusal:?}");
        }
    }

    #[test]
    fn any_outcome_is_accepted_or_refused_with_a_sentence(made in outcomes()) {
        let limits = Limits::of(&Config::default());
        let claim = Claim::full();
        match convert::outcome(made, &claim, &limits, |_| {}) {
            Ok(outcome) => {
                prop_assert!(outcome.events.len() <= limits.run.events && outcome.events.iter().all(|event| event.note.len() <= 1024));
                prop_assert!(outcome.labels.iter().all(|(key, _)| key.starts_with("acme.io/")), "{:?}", outcome.labels);
                let text = outcome.status.map(|status| status.to_string()).unwrap_or_default();
                prop_assert!(text.len() <= 2 << 20 && depth(&text) <= 64);
                let children = outcome.children.unwrap_or_default();
                prop_assert!(children.len() <= limits.run.children && children.iter().all(|child| depth(&child.to_string()) <= 64));
                prop_assert!(children.iter().map(|child| child.to_string().len()).sum::<usize>() <= 2 << 20);
                let cause = match outcome.next {
                    Next::Retry(cause) | Next::RetryAfter(_, cause) | Next::GiveUp(cause) => cause,
                    Next::AwaitChange | Next::After(_) => String::from("none"),
                };
                prop_assert!((1..=1024).contains(&cause.len()));
            }
            Err(failure) => {
                prop_assert!(matches!(failure, Failure::Refused(_) | Failure::Limit(_)));
                prop_assert!(failure.to_string().len() <= 2048, "{failure}");
            }
        }
    }
}
