//! Guests that misbehave in every way that we know, on one host: each hurts its own object alone, with a sentence that says why.
//!
//! Beside them a healthy object of the same kind and one of another kind are served, the Lease stays where it is, and the memory of
//! the host comes back to [`FACTOR`] times what it was.

use std::time::Duration;

use berth_tests::{
    cluster::{Cluster, ready_reason},
    component::{gzip, of_version, said_to_be_utf16, slow_to_compile},
    eventually::eventually,
    host::{Flags, Host},
    process::resident,
    resource::Resource,
    stage::{SOON, Stage, guest, probe},
};
use serde_json::{Value, json};

/// How many times the memory of before there may be afterwards: a version more is mapped by then, and allocators keep some of what
/// they had.
const FACTOR: u64 = 2;

/// How a misbehaviour shows.
enum Shows {
    /// In the object's message.
    Message(&'static str),
    /// In the object's phase, as nothing is wrong with what it returns.
    Phase(&'static str),
    /// In the host's log.
    Log(&'static str),
}

use Shows::{Log, Message, Phase};

/// What is in `spec.do`, what else is in the spec, and how it shows.
fn misbehaviours() -> Vec<(&'static str, Value, Shows)> {
    let plain = || json!({});
    vec![
        ("trap", plain(), Message("the handler trapped: ")),
        ("panic", plain(), Message("panicked at ")),
        ("exit", plain(), Message("exit")),
        ("loop", plain(), Message("of 500ms of CPU (`cpu` in plugin.yaml)")),
        ("bomb", plain(), Message("memory limit of 64Mi (`memory` in plugin.yaml)")),
        ("deep", plain(), Message("call stack exhausted (the limit is 512Ki")),
        ("deephost", plain(), Message("call stack exhausted")),
        ("wide", plain(), Message("recursion too deep")),
        ("hostblock", plain(), Message("longer than its limit of 15s (`timeout` in plugin.yaml)")),
        ("hostflood", plain(), Message("more than the 4Mi of data that one call may have")),
        ("greedy", plain(), Message("more than the 1000 handles")),
        ("hoard", json!({"what": "bodies", "count": 900}), Phase("Done")),
        ("hoard", json!({"what": "methods", "count": 20}), Phase("Done")),
        ("random", json!({"bytes": 65_537}), Message("the 64Ki of random bytes that one call gives")),
        ("bigstatus", plain(), Message("xxxxxxxx")),
        ("deepjson", plain(), Message("nested deeper than the 64 levels")),
        ("rawstatus", json!({"text": "{"}), Message("its status is not JSON")),
        ("rawstatus", json!({"text": "[]"}), Message("its status is not a JSON object")),
        ("badlabel", plain(), Message("outside the `label-prefixes`")),
        ("http", json!({"url": "http://not.allowed"}), Message("HttpRequestDenied")),
        ("flaky", json!({"fails": 9}), Message("attempt 0")),
        ("sockets", json!({"times": 2000}), Phase("Done")),
        ("roundtrip", json!({"phase": "Done", "big": 9_007_199_254_740_993_u64}), Phase("Done")),
        ("requeue0", plain(), Log("requeue0")),
        ("requeuemax", plain(), Log("requeuemax")),
        ("logflood", plain(), Log("lines beyond the 64Ki that a run may log")),
        ("loginject", plain(), Log("first\\nlevel=ERROR second \\u{1b}[31mred")),
    ]
}

fn claim() -> Value {
    json!({
        "progress": {"phaseField": "status.phase", "settled": ["Done", "Failed"]},
        "deadLetter": {"phase": "Failed", "messageField": "status.message"},
    })
}

/// Who holds the Lease, and how often it changed hands.
async fn lease(cluster: &Cluster) -> (Value, Value) {
    let lease = cluster.get_in(cluster.system(), Resource::LEASE, "berth").await;
    (lease["spec"]["holderIdentity"].clone(), lease["spec"]["leaseTransitions"].clone())
}

/// A host that serves mails, and the probe with its failures in its status.
async fn probing(stage: &Stage, more: &[&str]) -> Host {
    let config = "timeout: 15s\ncpu: 500ms\nbackoff: {base: 5m, max: 5m}\n";
    let mails = stage.push_email_request().await;
    let probes = stage.cluster.push("probe", &probe(&claim()), config).await;
    let flags = stage.flags();
    let more = more.iter().map(|flag| (*flag).to_owned()).collect();
    let host = Host::start(&stage.cluster, "host", &Flags { more, ..flags }).await;
    stage.cluster.until_serving("email-request", &mails).await;
    stage.cluster.until_serving("probe", &probes).await;
    host.until_leading().await;
    host
}

/// That objects of both kinds are still served.
async fn neighbours_are_well(stage: &Stage, name: &str) {
    stage.cluster.create(Resource::PROBE, &format!("ok-{name}"), json!({"do": "ok"})).await;
    stage.mail(&format!("mail-{name}"), "a@example.com").await;
    stage.until_mail(&format!("mail-{name}"), "Sent").await;
    stage.cluster.until_phase(Resource::PROBE, &format!("ok-{name}"), "Done", SOON).await;
}

async fn until_it_shows(stage: &Stage, host: &Host, name: &str, shows: &Shows) {
    match shows {
        Message(words) => {
            let says = |object: &Value| object["status"]["message"].as_str().is_some_and(|message| message.contains(words));
            let object = stage.cluster.until(Resource::PROBE, name, SOON, says).await;
            let length = object["status"]["message"].as_str().map_or(0, str::len);
            assert!(length <= 1024, "a message of {length} bytes");
        }
        Phase(phase) => drop(stage.cluster.until_phase(Resource::PROBE, name, phase, SOON).await),
        Log(words) => {
            let log = || if host.log().contains(words) { Ok(()) } else { Err(format!("{words:?} is not in the log")) };
            eventually(SOON, async || log()).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_a_guest_does_only_its_own_object_is_hurt() {
    let stage = Stage::shared().await;
    let mut host = probing(&stage, &[]).await;
    neighbours_are_well(&stage, "before").await;
    let (held, before) = (lease(&stage.cluster).await, resident(host.id()).expect("it runs"));
    let cases = misbehaviours();
    // All at once, and each once: so many more would open the circuit breaker.
    for (number, (word, more, _)) in cases.iter().enumerate() {
        let mut spec = json!({"do": word});
        spec.as_object_mut().expect("a mapping").extend(more.as_object().expect("a mapping").clone());
        stage.cluster.create(Resource::PROBE, &format!("{word}-{number}"), spec).await;
    }
    neighbours_are_well(&stage, "beside").await;
    for (number, (word, _, shows)) in cases.iter().enumerate() {
        until_it_shows(&stage, &host, &format!("{word}-{number}"), shows).await;
    }
    neighbours_are_well(&stage, "after").await;
    assert!(host.runs());
    assert_eq!(lease(&stage.cluster).await, held, "the Lease is where it was");
    until_memory_is_back(&host, before, SOON).await;
    let echoed = stage.cluster.list(Resource::PROBE, "").await;
    let echoed = echoed.iter().find(|object| object["spec"]["do"] == "roundtrip").expect("it was created");
    assert_eq!(echoed["status"]["big"], json!(9_007_199_254_740_993_u64), "no digit is lost");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_that_is_no_good_plugin_is_refused_and_the_good_version_goes_on() {
    let stage = Stage::shared().await;
    let mut host = probing(&stage, &["--compile-cpu=6s"]).await;
    let (held, before) = (lease(&stage.cluster).await, resident(host.id()).expect("it runs"));
    let good = probe(&claim());
    let files: [(&str, Vec<u8>, &str, &str); 6] = [
        ("zeros", vec![0; 4096], "NotAComponent", "4096 zero bytes"),
        ("trunc", good[..good.len() / 2].to_vec(), "NotAComponent", "not whole"),
        ("core", b"\0asm\x01\0\0\0".to_vec(), "NotAComponent", "core module"),
        ("page", b"<!DOCTYPE html><title>404</title>".to_vec(), "NotAComponent", "web page"),
        ("oldwit", of_version(&good, "0.0.9"), "UnknownWorld", "version 0.0.9, this host speaks 0.1"),
        ("newwit", of_version(&good, "0.2.0"), "UnknownWorld", "version 0.2.0, this host speaks 0.1"),
    ];
    for (name, bytes, reason, words) in files {
        let version = stage.cluster.push("probe", &bytes, "").await;
        until_refused(&stage.cluster, &version, reason, words).await;
        neighbours_are_well(&stage, name).await;
    }
    // What it says of itself is no text any more, or no claim.
    let version = stage.cluster.push("probe", &said_to_be_utf16(&good), "").await;
    let plugin = stage.cluster.until_plugin("probe", &version, |plugin| plugin["status"]["refusedReason"].is_string()).await;
    assert!(["TrialFailed", "InvalidClaim"].contains(&ready_reason(&plugin)), "{plugin}");
    // The compiler works on this one for as long as it may, and nobody else notices.
    let slow = gzip(&slow_to_compile(&good));
    let version = stage.cluster.push_file("probe", "plugin.wasm.gz", &slow, "").await;
    neighbours_are_well(&stage, "meanwhile").await;
    until_refused(&stage.cluster, &version, "CompileFailed", "Compiling it").await;
    // One that is in the way of the next version is given up for it.
    stage.cluster.push_file("probe", "plugin.wasm.gz", &slow, "timeout: 5s\n").await;
    let mended = stage.cluster.push("probe", &guest("probe"), "timeout: 4s\n").await;
    stage.cluster.until_serving("probe", &mended).await;
    neighbours_are_well(&stage, "at-last").await;
    assert!(host.runs());
    assert_eq!(lease(&stage.cluster).await, held, "the Lease is where it was");
    until_memory_is_back(&host, before, Duration::from_secs(60)).await;
}

/// Waits until the host is at most [`FACTOR`] times as large as before.
async fn until_memory_is_back(host: &Host, before: u64, patience: Duration) {
    eventually(patience, async || match resident(host.id()).expect("it runs") {
        now if now <= before * FACTOR => Ok(()),
        now => Err(format!("{} MiB, {} before", now >> 20, before >> 20)),
    })
    .await;
}

async fn until_refused(cluster: &Cluster, version: &str, reason: &str, words: &str) {
    let plugin = cluster.until_plugin("probe", version, |plugin| ready_reason(plugin) == reason).await;
    let sentence = plugin["status"]["refusedReason"].as_str().unwrap_or_default();
    assert!(sentence.contains(words), "{sentence:?} does not speak of {words:?}");
    assert!(plugin["status"]["servingDigest"].is_string(), "{plugin}");
}
