//! What is accepted, and what is refused before it serves, with which sentence.

use berth_host::package::reason;
use serde_json::json;

use crate::bench::*;

#[tokio::test]
async fn the_probe_is_accepted_and_describes_itself() {
    let claim = prepare(probe()).await.expect("accepted").claim;
    assert_eq!((claim.reconciles.resource().as_str(), claim.reconciles.namespaced), ("probes.probe.acme.io", true));
    assert_eq!(claim.label_prefixes, ["probe.acme.io/"]);
    let claimed = json!({
        "hosts": ["$settings.url"], "priorityField": "spec.priority",
        "progress": {"phaseField": "status.phase", "settled": ["Done", "Failed"], "mirrorLabel": "probe.acme.io/phase"},
        "deadLetter": {"after": 5, "phase": "Failed", "retriesField": "status.retries", "messageField": "status.message"},
    });
    let claim = prepare(&claiming(&claimed)).await.expect("accepted").claim;
    assert_eq!(claim.dead_letter.as_ref().and_then(|letter| letter.after), Some(5));
    assert_eq!(claim.progress.as_ref().map(|progress| progress.settled.len()), Some(2));
}

#[tokio::test]
async fn half_a_component_is_refused_for_what_it_is() {
    let refusal = refusal(&probe()[..probe().len() / 2]).await;
    assert_eq!(refusal.reason, reason::NOT_A_COMPONENT);
    assert!(refusal.message.contains("not whole"), "{refusal}");
}

#[tokio::test]
async fn another_version_of_the_contract_or_of_wasi_is_named_with_the_one_that_is_there() {
    for (from, to, words) in [
        ("berth:plugin/handler@0.1.0", "berth:plugin/handler@0.9.0", ["berth:plugin/handler in version 0.9.0", "speaks 0.1"]),
        ("berth:plugin/log@0.1.0", "berth:plugin/log@0.7.0", ["berth:plugin/log in version 0.7.0", "has 0.1"]),
        ("wasi:io/poll@0.2.", "wasi:io/poll@0.8.", ["wasi:io/poll in version 0.8.", "has 0.2"]),
        ("berth:plugin/cluster@0.1.0", "berth:plugin/secrets@0.1.0", ["berth:plugin/secrets@0.1.0", "does not have"]),
    ] {
        let refusal = refusal(&replaced(probe(), from, to)).await;
        assert_eq!(refusal.reason, reason::UNKNOWN_WORLD);
        assert!(words.iter().all(|word| refusal.message.contains(word)), "{refusal}");
    }
}

#[tokio::test]
async fn a_function_that_the_host_does_not_have_is_named() {
    let refusal = refusal(&replaced(probe(), "subscribe-duration", "subscribe-duratiox")).await;
    assert_eq!(refusal.reason, reason::UNKNOWN_WORLD);
    assert!(refusal.message.contains("subscribe-duratiox"), "{refusal}");
}

#[tokio::test]
async fn a_describe_that_panics_loops_or_hangs_is_refused_in_the_trial() {
    for (what, words) in [("panic", "panicked at"), ("loop", "more than its limit of 500ms of CPU"), ("sleep", "limit of 5s.")] {
        let refusal = refusal(&claiming(&json!({ "describe": what }))).await;
        assert_eq!(refusal.reason, reason::TRIAL_FAILED);
        // Where the machine is busy, a loop meets the clock first.
        let late = what == "loop" && refusal.message.contains("limit of 5s.");
        assert!(refusal.message.contains(words) || late, "{what}: {refusal}");
    }
}

#[tokio::test]
async fn children_and_a_finalizer_may_be_claimed() {
    let claim = prepare(&claiming(&json!({ "owns": ["ConfigMap", "Secret"], "finalizer": true }))).await.expect("accepted").claim;
    assert!(claim.finalizer);
    assert_eq!(claim.owns.iter().map(|kind| kind.resource()).collect::<Vec<_>>(), ["configmaps", "secrets"]);
}

#[tokio::test]
async fn what_is_read_is_part_of_the_claim_and_judged_with_it() {
    let reads =
        json!([{}, {"group": "apps", "kind": "Deployment", "plural": "deployments", "allNamespaces": true, "selector": "app in (a)"}]);
    let claim = prepare(&claiming(&json!({ "reads": reads }))).await.expect("accepted").claim;
    let said: Vec<_> = claim.reads.iter().map(|read| (read.kind.resource(), read.all_namespaces, read.label_selector.as_str())).collect();
    assert_eq!(said, [("configmaps".into(), false, ""), ("deployments.apps".into(), true, "app in (a)")]);
    let refusal = refusal(&claiming(&json!({ "reads": [{}, {"selector": "app>1"}] }))).await;
    assert_eq!(refusal.reason, reason::INVALID_CLAIM);
    assert!(refusal.message.contains("`reads` has ConfigMap (v1)"), "{refusal}");
}

#[tokio::test]
async fn an_invalid_claim_is_refused_with_the_field() {
    let refusal = refusal(&claiming(&json!({ "priorityField": "status.priority" }))).await;
    assert_eq!(refusal.reason, reason::INVALID_CLAIM);
    assert!(refusal.message.contains("priority-field"), "{refusal}");
}

#[tokio::test]
async fn a_setting_that_the_claim_needs_has_to_be_there() {
    let component = claiming(&json!({ "hosts": ["$settings.gateway"] }));
    let prepared = prepare(&component).await.expect("accepted");
    let refusal = prepared.handler(&package(component.clone(), "")).err().expect("refused");
    assert_eq!(refusal.reason, reason::INVALID_CONFIG);
    assert!(refusal.message.contains("settings.gateway"), "{refusal}");
    assert!(prepared.handler(&package(component, "settings: {gateway: 'http://mail.demo'}")).is_ok());
}
