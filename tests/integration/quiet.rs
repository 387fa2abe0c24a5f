//! A quiet cluster sees no requests but watches and lease renewals.

use std::time::Duration;

use berth_tests::{
    behaviour::Behaviour,
    eventually::scaled,
    proxy::{Entry, Verb},
    resource::Resource,
    stage::{SOON, Stage},
};
use serde_json::Value;

/// Whether a request is of the kind that never ends: a watch, or the Lease.
fn expected(entry: &Entry) -> bool {
    entry.seen.verb == Verb::Watch || entry.seen.path.contains("/leases/")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn once_everything_is_settled_there_are_watches_and_lease_renewals_and_nothing_else() {
    let stage = Stage::shared().await;
    let mails = stage.push_email_request().await;
    let host = stage.report_host("backoff: {base: 100ms, max: 1s}\n").await;
    stage.cluster.until_serving("email-request", &mails).await;
    stage.exporter.control(Behaviour::fail(503).only("broken"));
    for number in 0..10 {
        stage.mail(&format!("e{number}"), "a@example.com").await;
        stage.job(&format!("job-{number}"), "sales", number).await;
    }
    stage.job("bad", "broken", 0).await;
    for number in 0..10 {
        stage.until_mail(&format!("e{number}"), "Sent").await;
        stage.until_job(&format!("job-{number}"), "Done").await;
    }
    stage.until_job("bad", "Failed").await;
    for kind in ["EmailRequest.notify.acme.io", "ReportJob.batch.acme.io"] {
        for state in ["ready", "delayed", "running"] {
            host.until_queued(kind, state, 0.0).await;
        }
    }
    // The figures of the `Plugin` objects trail by some seconds, labels and events by a moment.
    for (plugin, objects) in [("email-request", 10), ("report-job", 11)] {
        let told = |plugin: &Value| {
            let host = &plugin["status"]["hosts"][0];
            host["objects"] == objects && host["waiting"] == 0 && host["delayed"] == 0
        };
        stage.cluster.until_in(stage.cluster.system(), Resource::PLUGIN, plugin, SOON, told).await;
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    let (mark, watches) = (host.proxy.mark(), host.proxy.watches("").count());
    let time = scaled(12, 60);
    tokio::time::sleep(Duration::from_secs(time)).await;
    let requests = host.proxy.since(mark);
    let others: Vec<String> = requests.iter().filter(|entry| !expected(entry)).map(ToString::to_string).collect();
    assert!(others.is_empty(), "{others:#?}");
    let leases = requests.iter().filter(|entry| entry.seen.path.contains("/leases/")).count();
    assert!((time / 2 - 1..=time + 2).contains(&(leases as u64)), "{leases} requests about the Lease in {time} s, renewed every second");
    assert_eq!(host.proxy.watches("").count(), watches);
    for number in 0..10 {
        let (mail, job) = (stage.key(&format!("e{number}")), stage.key(&format!("job-{number}")));
        assert_eq!((stage.gateway.requests_for(&mail).len(), stage.exporter.requests_for(&job).len()), (1, 1), "an own write wakes nobody");
    }
    assert!(requests.len() - leases <= watches * scaled(1, 2), "watches are opened again and again: {requests:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_costs_one_write_of_its_status_and_one_of_its_label() {
    let stage = Stage::shared().await;
    let host = stage.report_host("").await;
    stage.job("warm", "sales", 0).await;
    stage.until_job("warm", "Done").await;
    stage.job("job", "sales", 0).await;
    stage.until_job("job", "Done").await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    let entries = host.proxy.entries();
    let writes: Vec<String> = entries
        .iter()
        .filter(|entry| entry.seen.writes() && entry.seen.path.contains("/reportjobs/job"))
        .map(ToString::to_string)
        .collect();
    let statuses = writes.iter().filter(|write| write.contains("/status")).count();
    assert!(statuses == 1 && writes.len() == 2, "one status and one label: {writes:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_leader_says_of_a_plugin_what_was_said_before_and_not_that_it_has_yet_to_load_it() {
    let stage = Stage::shared().await;
    let mut host = stage.report_host("").await;
    let (system, told) = (stage.cluster.system(), |plugin: &Value| plugin["status"]["hosts"][0]["holder"].as_str().map(str::to_owned));
    let before = stage.cluster.until_in(system, Resource::PLUGIN, "report-job", SOON, |plugin| told(plugin).is_some()).await;
    let mark = host.proxy.mark();
    assert_eq!(host.terminate().await, Some(0));
    host.restart().await;
    let after = stage.cluster.until_in(system, Resource::PLUGIN, "report-job", SOON, |plugin| told(plugin) != told(&before)).await;
    assert_eq!(after["status"]["conditions"], before["status"]["conditions"]);
    let about_it = |entry: &Entry| entry.seen.writes() && entry.seen.path.contains("/plugins/report-job");
    let own = |entry: &Entry| entry.seen.query.contains("fieldManager=berth-host-");
    let writes: Vec<String> =
        host.proxy.since(mark).iter().filter(|entry| about_it(entry) && !own(entry)).map(ToString::to_string).collect();
    assert!(writes.is_empty(), "{writes:#?}");
}
