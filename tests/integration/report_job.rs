//! ReportJob, end to end: drained by priority, dead-lettered, labelled.

use std::{
    collections::BTreeSet,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use berth_tests::{
    behaviour::{Behaviour, Hold},
    cluster::Cluster,
    eventually::{eventually, scaled},
    proxy::{Effect, Rule, Verb},
    resource::Resource,
    stage::{SOON, Stage, probe},
};
use serde_json::{Value, json};

const KIND: &str = "ReportJob.batch.acme.io";
/// Backoff scaled down: the tests are about what happens, and one about EmailRequest is about when.
const QUICK: &str = "backoff: {base: 100ms, max: 1s}\n";

/// Waits until so many jobs have this phase, and their labels say the same.
async fn until_all(cluster: &Cluster, phase: &str, count: usize, deadline: Duration) {
    eventually(deadline, async || {
        let jobs = cluster.list(Resource::JOB, "").await;
        let so = jobs.iter().filter(|job| job["status"]["phase"] == phase && label(job) == phase.to_lowercase()).count();
        if so == count { Ok(()) } else { Err(format!("{so} of {count} are {phase}, with their label")) }
    })
    .await;
}

fn label(job: &Value) -> &str {
    job["metadata"]["labels"]["workqueue.acme.io/phase"].as_str().unwrap_or_default()
}

async fn held(stage: &Stage, count: usize) {
    eventually(SOON, async || match stage.exporter.held() {
        held if held == count => Ok(()),
        held => Err(format!("the exporter holds {held} of {count}")),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_jobs_drain_each_with_its_own_report() {
    let stage = Stage::shared().await;
    let _host = stage.report_host("").await;
    let jobs = (0..100).map(|number| format!("job-{number}")).collect::<Vec<_>>();
    futures::future::join_all(jobs.iter().map(|name| stage.job(name, "sales", 0))).await;
    until_all(&stage.cluster, "Done", 100, Duration::from_secs(120)).await;
    let keys: BTreeSet<String> = stage.exporter.exports().into_iter().map(|export| export.key).collect();
    assert_eq!((keys.len(), stage.exporter.requests().len()), (100, 100));
    let url = stage.cluster.get(Resource::JOB, "job-7").await["status"]["url"].as_str().unwrap_or_default().to_owned();
    let url = url.replace("http://reports.demo", &stage.exporter.url());
    let report = berth_tests::client::Client::new().get(&url).await.expect("the exporter answers");
    assert!(report.status == 200 && report.text().starts_with("%PDF"), "{url}: {}", report.status);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_fifth_failure_is_a_dead_letter_with_its_cause_while_the_others_go_on() {
    let stage = Stage::shared().await;
    let mut host = stage.report_host(QUICK).await;
    stage.exporter.control(Behaviour::fail(503).only("broken"));
    stage.job("bad", "broken", 9).await;
    stage.job("good", "sales", 0).await;
    stage.until_job("good", "Done").await;
    let job = stage.until_job("bad", "Failed").await;
    let status = &job["status"];
    assert_eq!(status["retries"], 5, "{job}");
    assert!(status["message"].as_str().is_some_and(|message| message.contains("503")), "{job}");
    assert_eq!(status["observedGeneration"], job["metadata"]["generation"], "{job}");
    stage.cluster.until(Resource::JOB, "bad", SOON, |job| label(job) == "failed").await;
    host.until_queued(KIND, "delayed", 0.0).await;
    assert_eq!(stage.exporter.requests_for(&stage.key("bad")).len(), 5);
    // A restart does not forget it, and a mended spec is worked on with all its tries.
    host.kill();
    host.restart().await;
    stage.job("later", "sales", 0).await;
    stage.until_job("later", "Done").await;
    assert_eq!(stage.exporter.requests_for(&stage.key("bad")).len(), 5);
    stage.exporter.control(Behaviour::fail(503).only("mended").times(2));
    stage.cluster.patch(Resource::JOB, "bad", json!({"spec": {"report": "mended"}})).await;
    let mended = stage.until_job("bad", "Done").await;
    assert_eq!((&mended["status"]["retries"], &mended["status"]["observedGeneration"]), (&json!(0), &json!(2)), "{mended}");
    assert_eq!(stage.exporter.requests_for(&stage.key("bad")).len(), 8);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retries_and_their_cause_are_seen_while_a_job_is_tried_again() {
    let stage = Stage::shared().await;
    let _host = stage.report_host("").await;
    stage.exporter.control(Behaviour::fail(500).times(2));
    stage.job("job", "sales", 0).await;
    let waiting = stage.cluster.until(Resource::JOB, "job", SOON, |job| job["status"]["retries"] == 1).await;
    assert!(waiting["status"]["message"].as_str().is_some_and(|message| message.contains("500")), "{waiting}");
    assert_eq!((&waiting["status"]["phase"], label(&waiting)), (&json!("Pending"), "pending"));
    assert!(waiting["status"]["observedGeneration"].is_null(), "a failing object is not observed: {waiting}");
    let done = stage.until_job("job", "Done").await;
    assert!(done["status"]["message"].is_null(), "{done}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trapping_handler_is_dead_lettered_with_the_trap_as_the_cause() {
    let stage = Stage::shared().await;
    let claim = json!({
        "group": "batch.acme.io", "version": "v1", "kind": "ReportJob", "plural": "reportjobs",
        "progress": {"phaseField": "status.phase", "settled": ["Done", "Failed"], "mirrorLabel": "workqueue.acme.io/phase"},
        "deadLetter": {"after": 5, "phase": "Failed", "retriesField": "status.retries", "messageField": "status.message"},
    });
    let version = stage.cluster.push("report-job", &probe(&claim), &format!("settings: {{do: trap}}\n{QUICK}")).await;
    let _host = stage.host().await;
    stage.cluster.until_serving("report-job", &version).await;
    stage.job("job", "sales", 0).await;
    let job = stage.until_job("job", "Failed").await;
    assert_eq!(job["status"]["retries"], 5, "{job}");
    assert!(job["status"]["message"].as_str().is_some_and(|message| message.contains("trap")), "{job}");
    stage.cluster.until(Resource::JOB, "job", SOON, |job| label(job) == "failed").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_in_the_middle_loses_nothing_and_counts_on() {
    let stage = Stage::shared().await;
    let mut host = stage.report_host("backoff: {base: 3s, max: 3s}\nconcurrency: 4\n").await;
    stage.exporter.control(Behaviour { delay_ms: 100, ..Behaviour::default() });
    stage.exporter.control(Behaviour::fail(503).only("broken"));
    stage.job("bad", "broken", 99).await;
    stage.cluster.until(Resource::JOB, "bad", SOON, |job| job["status"]["retries"] == 1).await;
    let jobs = (0..40).map(|number| format!("job-{number}")).collect::<Vec<_>>();
    futures::future::join_all(jobs.iter().map(|name| stage.job(name, "sales", 0))).await;
    eventually(SOON, async || match stage.exporter.exports().len() {
        made if made >= 10 => Ok(()),
        made => Err(format!("{made} reports")),
    })
    .await;
    host.kill();
    host.restart().await;
    until_all(&stage.cluster, "Done", 40, Duration::from_secs(90)).await;
    let bad = stage.until_job("bad", "Failed").await;
    assert_eq!(bad["status"]["retries"], 5, "the count survives a restart: {bad}");
    let keys: BTreeSet<String> = stage.exporter.exports().into_iter().map(|export| export.key).collect();
    assert_eq!((keys.len(), stage.exporter.exports().len()), (40, 40));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_label_equals_the_phase_and_the_queue_is_listable_from_the_first_second() {
    let stage = Stage::shared().await;
    let _host = stage.report_host("").await;
    stage.exporter.control(Behaviour::hold(Hold::Before));
    for number in 0..5 {
        stage.job(&format!("job-{number}"), "sales", 0).await;
    }
    assert_eq!(stage.cluster.list(Resource::JOB, "workqueue.acme.io/phase=pending").await.len(), 5);
    held(&stage, 5).await;
    assert_eq!(stage.cluster.list(Resource::JOB, "workqueue.acme.io/phase=pending").await.len(), 5);
    stage.exporter.behave();
    until_all(&stage.cluster, "Done", 5, SOON).await;
    assert_eq!(stage.cluster.list(Resource::JOB, "workqueue.acme.io/phase=pending").await.len(), 0);
    assert_eq!(stage.cluster.list(Resource::JOB, "workqueue.acme.io/phase=done").await.len(), 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_label_that_somebody_changed_or_removed_is_put_right() {
    let stage = Stage::shared().await;
    let _host = stage.report_host("").await;
    stage.job("job", "sales", 0).await;
    until_all(&stage.cluster, "Done", 1, SOON).await;
    for wrong in [json!("pending"), Value::Null] {
        stage.cluster.patch(Resource::JOB, "job", json!({"metadata": {"labels": {"workqueue.acme.io/phase": wrong}}})).await;
        stage.cluster.until(Resource::JOB, "job", SOON, |job| label(job) == "done").await;
    }
    let later = json!({"report": "sales", "format": "pdf", "notBefore": "2999-01-01T00:00:00Z"});
    stage.cluster.create(Resource::JOB, "waiting", later).await;
    stage.cluster.patch(Resource::JOB, "waiting", json!({"metadata": {"labels": {"workqueue.acme.io/phase": null}}})).await;
    stage.cluster.until(Resource::JOB, "waiting", SOON, |job| label(job) == "pending").await;
    assert_eq!(stage.exporter.requests().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_finished_job_is_never_processed_again() {
    let stage = Stage::shared().await;
    let mut host = stage.report_host(QUICK).await;
    stage.exporter.control(Behaviour::fail(400).only("broken"));
    stage.job("done", "sales", 0).await;
    stage.job("failed", "broken", 0).await;
    stage.until_job("done", "Done").await;
    stage.until_job("failed", "Failed").await;
    for name in ["done", "failed"] {
        stage.cluster.patch(Resource::JOB, name, json!({"metadata": {"annotations": {"seen": "yes"}}})).await;
    }
    host.kill();
    host.restart().await;
    stage.job("later", "sales", 0).await;
    stage.until_job("later", "Done").await;
    for name in ["done", "failed", "later"] {
        assert_eq!(stage.exporter.requests_for(&stage.key(name)).len(), 1, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_jobs_run_by_priority_and_never_pre_empt_a_running_one() {
    let stage = Stage::shared().await;
    let host = stage.report_host("concurrency: 1\n").await;
    stage.exporter.control(Behaviour::hold(Hold::Before).only("first"));
    stage.job("first", "first", i64::MIN).await;
    held(&stage, 1).await;
    let priorities = [3, -5, 9, 0, i64::MAX, 5];
    for (number, priority) in priorities.iter().enumerate() {
        stage.job(&format!("job-{number}"), "sales", *priority).await;
    }
    host.until_queued(KIND, "ready", 6.0).await;
    stage.exporter.behave();
    until_all(&stage.cluster, "Done", 7, SOON).await;
    let order: Vec<String> =
        stage.exporter.exports().iter().map(|export| export.key.split('/').nth(2).unwrap_or_default().to_owned()).collect();
    assert_eq!(order, ["first", "job-4", "job-2", "job-5", "job-0", "job-3", "job-1"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_low_priority_has_its_turn_beside_a_steady_stream_of_higher_ones_also_after_a_restart() {
    /// How many of the stream wait at any time.
    const WAITING: usize = 10;
    let stage = Stage::shared().await;
    let mut host = stage.report_host("concurrency: 1\n").await;
    stage.exporter.control(Behaviour { delay_ms: 500, ..Behaviour::default() });
    let above: i64 = scaled(1, 8);
    let mut came = 0;
    let mut stream = async || {
        let made = stage.exporter.exports().len();
        while came < made + WAITING {
            stage.job(&format!("high-{came}"), "sales", 1 + above).await;
            came += 1;
        }
        (came, made)
    };
    stream().await;
    stage.job("low", "sales", 1).await;
    eventually(SOON, async || match stream().await {
        (_, WAITING..) => Ok(()),
        (_, made) => Err(format!("{made} reports")),
    })
    .await;
    assert_eq!(host.terminate().await, Some(0));
    let (before, _) = stream().await;
    host.restart().await;
    // What waits counts as one priority more for each 30 s, and the first list as 15 s younger than what comes later.
    let bound = Duration::from_secs(30 * above.unsigned_abs() + 15) + SOON * 2;
    let low = stage.key("low");
    eventually(bound, async || {
        let (came, made) = stream().await;
        if stage.exporter.requests_for(&low).is_empty() { Err(format!("{made} of {came} reports, and not the low one")) } else { Ok(()) }
    })
    .await;
    let earlier = stage.exporter.requests().iter().take_while(|request| !request.key.contains(&low)).count();
    assert!(earlier >= before, "what came with it goes first: {before} had come, {earlier} had their turn");
    stage.exporter.behave();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_is_not_run_before_its_time_and_waits_in_the_queue_meanwhile() {
    let stage = Stage::shared().await;
    let _host = stage.report_host("").await;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    let at = now + 4;
    let not_before = k8s_openapi::jiff::Timestamp::from_second(at as i64).expect("a time").to_string();
    stage.cluster.create(Resource::JOB, "job", json!({"report": "sales", "format": "pdf", "notBefore": not_before})).await;
    assert_eq!(stage.cluster.list(Resource::JOB, "workqueue.acme.io/phase=pending").await.len(), 1);
    let job = stage.until_job("job", "Done").await;
    let requests = stage.exporter.requests();
    assert_eq!(requests.len(), 1);
    assert!(requests[0].at_ms >= at * 1000, "{} ms early", at * 1000 - requests[0].at_ms);
    assert!(job["status"]["retries"].as_i64().unwrap_or(0) == 0, "to wait is no failure: {job}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_whose_time_is_moved_forward_runs_then() {
    let stage = Stage::shared().await;
    let host = stage.report_host("").await;
    stage.cluster.create(Resource::JOB, "job", json!({"report": "sales", "format": "pdf", "notBefore": "2999-01-01T00:00:00Z"})).await;
    host.until_queued(KIND, "delayed", 1.0).await;
    stage.cluster.patch(Resource::JOB, "job", json!({"spec": {"notBefore": "2020-01-01T00:00:00Z"}})).await;
    stage.until_job("job", "Done").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_edit_reopens_a_failed_job_and_is_refused_for_a_done_one() {
    let stage = Stage::shared().await;
    let _host = stage.report_host(QUICK).await;
    stage.dead_letter("job").await;
    stage.exporter.control(Behaviour::hold(Hold::Before).only("sales"));
    stage.cluster.patch(Resource::JOB, "job", json!({"spec": {"report": "sales"}})).await;
    let reopened = stage.until_job("job", "Pending").await;
    assert!(reopened["status"]["retries"].as_i64().unwrap_or(0) == 0, "{reopened}");
    stage.cluster.until(Resource::JOB, "job", SOON, |job| label(job) == "pending").await;
    stage.exporter.behave();
    let done = stage.until_job("job", "Done").await;
    assert_eq!(done["status"]["observedGeneration"], 2, "{done}");
    stage.cluster.until(Resource::JOB, "job", SOON, |job| label(job) == "done").await;
    let error = stage.cluster.try_patch(Resource::JOB, "job", json!({"spec": {"report": "x"}})).await.expect_err("done").to_string();
    assert!(error.contains("the report is done") && error.contains("create another ReportJob"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changes_of_metadata_during_the_backoff_neither_shorten_it_nor_count() {
    let stage = Stage::shared().await;
    let host = stage.report_host("backoff: {base: 2s, max: 2s}\n").await;
    stage.exporter.control(Behaviour::fail(503).times(2));
    stage.job("job", "sales", 0).await;
    host.until_queued(KIND, "delayed", 1.0).await;
    for number in 0..20 {
        stage.cluster.patch(Resource::JOB, "job", json!({"metadata": {"annotations": {"x": number.to_string()}}})).await;
    }
    stage.until_job("job", "Done").await;
    let times: Vec<u64> = stage.exporter.requests().iter().map(|request| request.at_ms).collect();
    assert_eq!(times.len(), 3, "{times:?}");
    assert!(times.windows(2).all(|pair| pair[1] - pair[0] >= 2000), "{times:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_label_that_was_not_written_before_a_crash_is_written_after_the_restart() {
    let stage = Stage::shared().await;
    let mut host = stage.report_host("").await;
    let label_write = Rule::on(Verb::Patch, Effect::Hold).when(|seen| seen.path.ends_with("/reportjobs/job"));
    let label_write = host.proxy.rule(label_write);
    stage.job("job", "sales", 0).await;
    label_write.reached(1).await;
    host.kill();
    label_write.abandoned().await;
    label_write.release();
    let torn = stage.cluster.get(Resource::JOB, "job").await;
    assert_eq!((&torn["status"]["phase"], label(&torn)), (&json!("Done"), "pending"), "the status is written first");
    host.restart().await;
    stage.cluster.until(Resource::JOB, "job", SOON, |job| label(job) == "done").await;
    assert_eq!(stage.exporter.requests().len(), 1);
}
