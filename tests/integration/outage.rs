//! An API server that is away, refuses everybody, or asks to wait, for as long as it likes; and one that restarts, with its etcd, in the middle
//! of the work.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use berth_tests::{
    behaviour::Behaviour,
    cluster::Cluster,
    eventually::{always, eventually, scaled},
    host::{Flags, Host},
    process::resident,
    proxy::{Answer, Effect, Entry, Rule, Verb},
    resource::Resource,
    stage::{SOON, Stage},
};
use kube::api::{DeleteParams, ListParams};
use serde_json::json;

/// Within this much time of its return, everything that happened while the API server was away is known.
const BACK: Duration = Duration::from_secs(60);
/// What resident memory may grow by while nothing can be done: allocators and the log.
const GROWTH: u64 = 16 << 20;

async fn readiness(host: &Host) -> (u16, String) {
    match host.get("/readyz").await {
        Ok(answer) => (answer.status, answer.text()),
        Err(error) => (0, format!("{error:#}")),
    }
}

async fn until_unready(host: &Host, words: &str) {
    eventually(SOON, async || match readiness(host).await {
        (503, text) if text.to_lowercase().contains(words) => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await;
}

async fn until_leading(host: &Host, leads: bool) {
    eventually(BACK, async || match host.metric("berth_leader", &[]).await {
        Some(now) if (now == 1.0) == leads => Ok(()),
        other => Err(format!("berth_leader is {other:?}")),
    })
    .await;
}

/// When each collection was asked for, but for the Lease, which is asked for at a pace of its own.
fn attempts(entries: &[Entry]) -> BTreeMap<String, Vec<Instant>> {
    let mut attempts: BTreeMap<String, Vec<Instant>> = BTreeMap::new();
    for entry in entries.iter().filter(|entry| !entry.seen.path.contains("/leases")) {
        attempts.entry(entry.seen.path.clone()).or_default().push(entry.seen.at);
    }
    attempts
}

/// Each collection is asked for after 1, 2, 4, … s, up to half a minute.
fn assert_backed_off(entries: &[Entry], time: Duration) {
    let attempts = attempts(entries);
    assert!(!attempts.is_empty());
    for (path, times) in attempts {
        // The first two may be those of a watch that broke and of the list that follows it.
        for (number, pair) in times.windows(2).skip(1).enumerate() {
            let least = Duration::from_secs(1 << number.min(4)).min(Duration::from_secs(25)).mul_f64(0.9);
            assert!(pair[1] - pair[0] >= least, "{path} was asked for again after {:?}: attempt {}", pair[1] - pair[0], number + 2);
        }
        let most = Duration::from_secs(31);
        let gap = times.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default();
        assert!(gap <= most, "{path} was not asked for during {gap:?} of {time:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_starts_without_its_api_server_is_alive_and_unready_and_asks_ever_less() {
    let stage = Stage::shared().await;
    let mut host = stage.email_host().await;
    host.kill();
    let away = host.proxy.rule(Rule::any(Effect::Close));
    let mark = host.proxy.mark();
    host.relaunch();
    until_unready(&host, "api server").await;
    let (before, time) = (resident(host.id()).expect("it runs"), scaled(Duration::from_secs(14), Duration::from_secs(120)));
    always(time, async || match (readiness(&host).await.0, host.get("/livez").await.map(|answer| answer.status)) {
        (503, Ok(200)) => Ok(()),
        other => Err(format!("ready and live: {other:?}")),
    })
    .await;
    let asked = host.proxy.since(mark);
    assert_backed_off(&asked, time);
    // Once a second by the elector, whose retry is scaled, and its watch.
    let leases = asked.iter().filter(|entry| entry.seen.path.contains("/leases")).count();
    assert!(leases as u64 <= 3 * (time.as_secs() + 10), "{leases} requests for the Lease");
    let after = resident(host.id()).expect("it runs");
    assert!(after <= before + GROWTH, "{} MiB, {} before", after >> 20, before >> 20);
    away.release();
    stage.mail("e1", "a@example.com").await;
    stage.cluster.until_phase(Resource::EMAIL, "e1", "Sent", BACK).await;
    host.until_ready().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_happened_during_an_outage_is_known_soon_after_it() {
    let stage = Stage::shared().await;
    let mails = stage.push_email_request().await;
    let mut host = stage.report_host("").await;
    stage.cluster.until_serving("email-request", &mails).await;
    stage.exporter.control(Behaviour::fail(400).only("broken"));
    stage.mail("e1", "a@example.com").await;
    stage.job("r1", "broken", 0).await;
    stage.until_mail("e1", "Sent").await;
    stage.until_job("r1", "Failed").await;
    let away = host.proxy.rule(Rule::any(Effect::Close));
    let mark = host.proxy.mark();
    host.proxy.watches("").cut();
    stage.cluster.patch(Resource::JOB, "r1", json!({"spec": {"report": "sales"}})).await;
    stage.cluster.api(Resource::EMAIL).delete("e1", &DeleteParams::default()).await.expect("it is there");
    until_unready(&host, "api server").await;
    let time = scaled(Duration::from_secs(5), Duration::from_secs(300));
    always(time, async || if host.runs() { Ok(()) } else { Err("the host has ended") }).await;
    assert_backed_off(&host.proxy.since(mark), time);
    away.release();
    stage.cluster.until_phase(Resource::JOB, "r1", "Done", BACK).await;
    eventually(BACK, async || match host.metric("berth_objects", &[("kind", "EmailRequest.notify.acme.io")]).await {
        Some(0.0) => Ok(()),
        objects => Err(format!("{objects:?} mails are in the cache")),
    })
    .await;
    host.until_ready().await;
    assert_eq!(stage.gateway.deliveries().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn credentials_that_are_refused_for_minutes_end_the_term_and_neither_the_process_nor_an_object() {
    let stage = Stage::shared().await;
    let mut host = stage.report_host("").await;
    until_leading(&host, true).await;
    let refused = host.proxy.rule(Rule::any(Effect::Answer(Answer::failure(401, "Unauthorized"))));
    let mark = host.proxy.mark();
    host.proxy.watches("").end();
    stage.job("during", "sales", 0).await;
    until_unready(&host, "unauthorized").await;
    until_leading(&host, false).await;
    let time = scaled(Duration::from_secs(10), Duration::from_secs(600));
    always(time, async || match host.get("/livez").await {
        Ok(answer) if answer.status == 200 => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await;
    let asked = attempts(&host.proxy.since(mark));
    for (path, times) in &asked {
        let paced = times.windows(2).skip(4).all(|pair| pair[1] - pair[0] >= Duration::from_secs(7));
        assert!(paced, "{path} was asked for {} times", times.len());
    }
    // At most the run of an event that was under way when the watches ended.
    assert!(stage.exporter.requests().len() <= 1);
    refused.release();
    let job = stage.cluster.until_phase(Resource::JOB, "during", "Done", BACK).await;
    assert_eq!(job["status"]["retries"].as_i64().unwrap_or(0), 0, "{job}");
    host.until_ready().await;
    until_leading(&host, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewals_that_are_asked_to_wait_cost_the_lease_at_its_deadline_and_not_the_election() {
    let stage = Stage::shared().await;
    let mut host = stage.email_host().await;
    until_leading(&host, true).await;
    let busy = Answer::new(429, "text/plain", "too many requests, please try again later").retry_after(60);
    let busy = host.proxy.rule(Rule::on(Verb::Update, Effect::Answer(busy)).path("/leases/"));
    busy.reached(1).await;
    let told = Instant::now();
    until_leading(&host, false).await;
    // The renew deadline is 4 s here, and the Lease lasts 6 s less its margin.
    assert!(told.elapsed() < Duration::from_secs(5), "{:?}", told.elapsed());
    stage.mail("e1", "a@example.com").await;
    until_unready(&host, "too many requests").await;
    assert!(host.runs());
    busy.release();
    stage.until_mail("e1", "Sent").await;
    until_leading(&host, true).await;
    host.until_ready().await;
    assert_eq!(stage.gateway.requests().len(), 1);
}

/// What is stopped in the middle of a drain.
#[derive(Clone, Copy, Debug)]
enum Stopped {
    ApiServer,
    Etcd,
}

async fn restart(stage: &mut Stage, what: Stopped) {
    let control = stage.cluster.plane_mut().control_mut();
    match what {
        Stopped::ApiServer => control.start_api_server().await.expect("it starts again"),
        Stopped::Etcd => control.start_etcd().await.expect("it starts again"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn five_hundred_jobs_drain_over_restarts_of_the_api_server_and_of_etcd() {
    const JOBS: usize = 500;
    let mut stage = Stage::on(Cluster::alone().await).await;
    let version = stage.push_report_job("concurrency: 8\n").await;
    // At a pace at which each restart falls into the middle.
    stage.exporter.control(Behaviour { delay_ms: 300, ..Behaviour::default() });
    let names: Vec<String> = (0..JOBS).map(|number| format!("job-{number}")).collect();
    for some in names.chunks(50) {
        futures::future::join_all(some.iter().map(|name| stage.job(name, "sales", 0))).await;
    }
    let mut host = Host::start(&stage.cluster, "host", &Flags { ..stage.flags() }).await;
    stage.cluster.until_serving("report-job", &version).await;
    for (round, what) in [Stopped::ApiServer, Stopped::Etcd, Stopped::ApiServer].into_iter().enumerate() {
        let made = JOBS * (round + 1) / 5;
        eventually(BACK, async || match stage.exporter.exports().len() {
            exports if exports >= made => Ok(()),
            exports => Err(format!("{exports} of {made} reports")),
        })
        .await;
        restart(&mut stage, what).await;
    }
    eventually(Duration::from_secs(180), async || {
        let done = ListParams::default().labels("workqueue.acme.io/phase=done");
        let done = stage.cluster.api(Resource::JOB).list(&done).await.map_err(|error| error.to_string())?;
        let statuses = done.items.iter().map(|job| &job.data["status"]);
        match statuses.filter(|status| status["phase"] == "Done" && status["retries"].as_i64().unwrap_or(0) == 0).count() {
            JOBS => Ok(()),
            count => Err(format!("{count} are done, with their label and without a failure")),
        }
    })
    .await;
    assert!(host.runs());
    let exports = stage.exporter.exports();
    let keys: std::collections::BTreeSet<&str> = exports.iter().map(|export| export.key.as_str()).collect();
    assert_eq!((keys.len(), exports.len()), (JOBS, JOBS), "nothing lost, nothing twice");
}
