//! What was given up on: dead letters and their marks, redrive by a new version, and `berth retry`.

use std::time::Duration;

use berth_tests::{
    behaviour::Behaviour,
    cluster::{Cluster, ready_reason},
    eventually::{always, eventually},
    proxy::{Answer, Effect, Rule, Verb},
    resource::Resource,
    stage::{SOON, Stage, berth, probe, probing, settling},
};
use serde_json::{Value, json};

const KIND: &str = "Probe.probe.acme.io";
const QUICK: &str = "backoff: {base: 100ms, max: 300ms}\n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_letter_is_tried_again_by_hand() {
    let stage = Stage::shared().await;
    let _host = stage.report_host(QUICK).await;
    stage.exporter.control(Behaviour::fail(503).only("broken"));
    for name in ["one", "two", "three"] {
        stage.job(name, "broken", 0).await;
    }
    for name in ["one", "two", "three"] {
        stage.until_job(name, "Failed").await;
        let marked =
            stage.cluster.until(Resource::JOB, name, SOON, |job| job["metadata"]["annotations"]["berth.acme.io/gave-up"].is_string()).await;
        let mark: Value =
            serde_json::from_str(marked["metadata"]["annotations"]["berth.acme.io/gave-up"].as_str().expect("text")).expect("JSON");
        assert!(mark["cause"].as_str().is_some_and(|cause| cause.contains("503")) && mark["generation"] == 1, "{mark}");
    }
    stage.exporter.behave();
    let said = berth(&stage.cluster, &["retry", "reportjob/one", "--namespace", stage.cluster.namespace()]).await;
    assert!(said.contains("had been given up on") && said.contains("503"), "{said}");
    let done = stage.until_job("one", "Done").await;
    assert_eq!(done["status"]["retries"].as_u64().unwrap_or_default(), 0, "{done}");
    let clean =
        stage.cluster.until(Resource::JOB, "one", SOON, |job| job["metadata"]["annotations"]["berth.acme.io/gave-up"].is_null()).await;
    assert!(clean["metadata"]["annotations"]["berth.acme.io/retry"].is_null(), "{clean}");
    assert_eq!(stage.cluster.get(Resource::JOB, "two").await["status"]["phase"], "Failed");
    let said = berth(&stage.cluster, &["retry", "reportjobs.batch.acme.io", "--all", "--namespace", stage.cluster.namespace()]).await;
    assert!(said.contains("2 objects"), "{said}");
    for name in ["two", "three"] {
        stage.until_job(name, "Done").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_letter_is_tried_again_by_a_new_version_if_its_plugin_yaml_says_so() {
    let stage = Stage::shared().await;
    let _host = stage.report_host(QUICK).await;
    stage.dead_letter("bad").await;
    stage.exporter.behave();
    let next = stage.push_report_job_as("report_job_v2", &format!("redrive: true\n{QUICK}")).await;
    stage.cluster.until_plugin("report-job", &next, |plugin| ready_reason(plugin) == "OnTrial").await;
    // A version on trial has to prove itself first.
    for number in 0..20 {
        stage.job(&format!("job-{number}"), "sales", 0).await;
    }
    assert_eq!(stage.until_job("bad", "Done").await["status"]["message"], "exported by version 2");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_given_up_on_without_a_field_for_it_is_remembered_after_a_restart() {
    let cluster = Cluster::shared().await;
    let mut host = probing(&cluster, &probe(&json!({})), "").await;
    cluster.create(Resource::PROBE, "p", json!({"do": "giveup"})).await;
    cluster.until(Resource::PROBE, "p", SOON, |object| object["metadata"]["annotations"]["berth.acme.io/gave-up"].is_string()).await;
    host.kill();
    host.restart().await;
    let count =
        async |result: &'static str| host.metric("berth_reconcile_total", &[("kind", KIND), ("result", result)]).await.unwrap_or_default();
    eventually(SOON, async || match count("settled").await {
        1.0.. => Ok(()),
        settled => Err(format!("{settled} settled")),
    })
    .await;
    assert_eq!(count("give_up").await, 0.0, "it is not run again");
    cluster.patch(Resource::PROBE, "p", json!({"spec": {"do": "ok"}})).await;
    cluster.until_phase(Resource::PROBE, "p", "Done", SOON).await;
    cluster.until(Resource::PROBE, "p", SOON, |object| object["metadata"]["annotations"]["berth.acme.io/gave-up"].is_null()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_letter_is_left_alone_by_a_new_version_that_does_not_say_otherwise() {
    let stage = Stage::shared().await;
    let _host = stage.report_host(QUICK).await;
    stage.dead_letter("bad").await;
    stage.exporter.behave();
    let next = stage.push_report_job_as("report_job_v2", QUICK).await;
    stage.cluster.until_plugin("report-job", &next, |plugin| ready_reason(plugin) == "OnTrial").await;
    for number in 0..20 {
        stage.job(&format!("job-{number}"), "sales", 0).await;
    }
    stage.cluster.until_plugin("report-job", &next, |plugin| ready_reason(plugin) == "Serving").await;
    always(Duration::from_secs(2), async || match stage.cluster.get(Resource::JOB, "bad").await {
        job if job["status"]["phase"] == "Failed" => Ok(()),
        job => Err(job.to_string()),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_of_an_object_that_was_given_up_on_is_run() {
    let cluster = Cluster::shared().await;
    let _host = probing(&cluster, &probe(&json!({})), "").await;
    cluster.create(Resource::PROBE, "p", json!({"do": "giveup"})).await;
    let mark = "berth.acme.io/gave-up";
    let original = cluster.until(Resource::PROBE, "p", SOON, |object| object["metadata"]["annotations"][mark].is_string()).await;
    let mut copy = Resource::PROBE.object(cluster.namespace(), "copy", json!({"do": "ok"}));
    let text = original["metadata"]["annotations"][mark].as_str().expect("text").to_owned();
    copy.metadata.annotations = Some([(mark.to_owned(), text)].into());
    cluster.api(Resource::PROBE).create(&kube::api::PostParams::default(), &copy).await.expect("created");
    cluster.until_phase(Resource::PROBE, "copy", "Done", SOON).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_to_try_again_during_a_run_is_honoured_after_it() {
    let cluster = Cluster::shared().await;
    let config = "timeout: 2s\nbackoff: {base: 5m, max: 5m}\n";
    let host = probing(&cluster, &settling(), config).await;
    cluster.create(Resource::PROBE, "p", json!({"do": "hostblock"})).await;
    host.until_queued(KIND, "running", 1.0).await;
    berth(&cluster, &["retry", "probe/p", "--namespace", cluster.namespace()]).await;
    cluster.until(Resource::PROBE, "p", SOON, |object| object["status"]["retries"] == 2).await;
    cluster.until(Resource::PROBE, "p", SOON, |object| object["metadata"]["annotations"]["berth.acme.io/retry"].is_null()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_to_try_again_while_a_failure_waits_to_be_written_is_honoured_after_it() {
    let cluster = Cluster::shared().await;
    let host = probing(&cluster, &settling(), "backoff: {base: 5m, max: 5m}\n").await;
    let busy = Answer::new(429, "text/plain", "too many requests, please try again later").retry_after(5);
    let busy = host.proxy.rule(Rule::on(Verb::Patch, Effect::Answer(busy)).path("/p/status").times(1));
    cluster.create(Resource::PROBE, "p", json!({"do": "retry"})).await;
    busy.reached(1).await;
    berth(&cluster, &["retry", "probe/p", "--namespace", cluster.namespace()]).await;
    cluster.until(Resource::PROBE, "p", SOON, |object| object["status"]["retries"] == 2).await;
    cluster.until(Resource::PROBE, "p", SOON, |object| object["metadata"]["annotations"]["berth.acme.io/retry"].is_null()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_aggregated_api_does_not_keep_anybody_from_trying_again() {
    let cluster = Cluster::alone().await;
    let _host = probing(&cluster, &probe(&json!({})), "").await;
    cluster.create(Resource::PROBE, "p", json!({"do": "giveup"})).await;
    let given_up = |object: &Value| object["metadata"]["annotations"]["berth.acme.io/gave-up"].is_string();
    cluster.until(Resource::PROBE, "p", SOON, given_up).await;
    cluster
        .install([json!({"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": "v1.gone.acme.io"},
            "spec": {"group": "gone.acme.io", "version": "v1", "groupPriorityMinimum": 100, "versionPriority": 100,
                "insecureSkipTLSVerify": true, "service": {"name": "gone", "namespace": cluster.namespace()}}})])
        .await;
    let said = berth(&cluster, &["retry", "probe", "--all", "--namespace", cluster.namespace()]).await;
    assert!(said.contains("1 objects"), "{said}");
}
