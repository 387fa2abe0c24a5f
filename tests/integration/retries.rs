//! When a failing object is tried again: after the backoff, whatever else happens to it, and anew after a success or an edit.

use std::time::Duration;

use berth_tests::{
    cluster::Cluster,
    host::Host,
    resource::Resource,
    stage::{SOON, probing, settling},
};
use serde_json::{Value, json};

/// The statuses that a host wrote to an object, with the time since the one before.
fn statuses(host: &Host, name: &str) -> Vec<(Duration, Value)> {
    let path = format!("/probes/{name}/status");
    let entries: Vec<_> =
        host.proxy.entries().into_iter().filter(|entry| entry.seen.writes() && entry.seen.path.ends_with(&path)).collect();
    let first = entries.first().map(|entry| entry.seen.at);
    let before = first.into_iter().chain(entries.iter().map(|entry| entry.seen.at));
    before.zip(&entries).map(|(before, entry)| (entry.seen.at - before, entry.seen.json()["status"].clone())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failing_object_is_run_after_1_2_and_4_seconds_whatever_is_written_and_anew_after_a_success() {
    let cluster = Cluster::shared().await;
    let host = probing(&cluster, &settling(), "").await;
    cluster.create(Resource::PROBE, "p", json!({"do": "flaky", "fails": 3})).await;
    cluster.until(Resource::PROBE, "p", SOON, |object| object["status"]["retries"] == 2).await;
    // While it waits out its backoff, others write too: metadata of theirs, and a field of theirs in its status.
    for number in 0..20 {
        cluster.patch(Resource::PROBE, "p", json!({"metadata": {"annotations": {"x": number.to_string()}}})).await;
    }
    let theirs = kube::api::Patch::Merge(json!({"status": {"theirs": "x"}}));
    cluster.api(Resource::PROBE).patch_status("p", &Default::default(), &theirs).await.expect("written");
    let done = cluster.until_phase(Resource::PROBE, "p", "Done", SOON).await;
    assert_eq!((&done["status"]["retries"], &done["status"]["attempt"]), (&json!(0), &json!(3)), "{done}");
    let written = statuses(&host, "p");
    let retries: Vec<_> = written.iter().map(|(_, status)| status["retries"].as_i64()).collect();
    assert_eq!(retries, [Some(1), Some(2), Some(3), Some(0)], "{written:#?}");
    for ((wait, _), least) in written[1..].iter().zip([1, 2, 4]) {
        // Never early; up to 10 % jitter and a second for a busy machine.
        let least = Duration::from_secs(least);
        assert!((least.mul_f64(0.98)..least.mul_f64(1.1) + Duration::from_secs(1)).contains(wait), "{written:#?}");
    }

    // Neither the failures nor the backoff of before count for another version of the spec.
    cluster.patch(Resource::PROBE, "p", json!({"spec": {"fails": 1}})).await;
    let again = |object: &Value| object["status"]["observedGeneration"] == 2 && object["status"]["phase"] == "Done";
    let done = cluster.until(Resource::PROBE, "p", SOON, again).await;
    assert_eq!((&done["status"]["retries"], &done["status"]["attempt"]), (&json!(0), &json!(1)), "{done}");
    let written = statuses(&host, "p").split_off(4);
    let (wait, _) = written.last().expect("the success");
    assert!((Duration::from_millis(980)..Duration::from_millis(2100)).contains(wait), "{written:#?}");
    assert_eq!(written.iter().filter(|(_, status)| status["retries"] == 1).count(), 1, "{written:#?}");
}
