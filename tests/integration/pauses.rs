//! Processes that stand still, are cut off, or are asked to end in the middle of runs: nothing leaves them after their time.

use std::time::{Duration, Instant};

use berth_tests::{
    behaviour::{Behaviour, Hold},
    cluster::Cluster,
    eventually::{always, eventually, scaled},
    host::{Flags, Host, LEASE},
    proxy::{Effect, Entry, Outcome, Rule, Verb},
    resource::Resource,
    stage::{SOON, Stage, probe},
};
use serde_json::{Value, json};

const MAIL: &str = "EmailRequest.notify.acme.io";
const PROBE: &str = "Probe.probe.acme.io";
/// What Kubernetes gives a pod beyond the grace period: 30 s in all, of 20.
const BEYOND_GRACE: Duration = Duration::from_secs(10);

async fn until_leader(host: &Host, leads: f64) {
    eventually(SOON, async || match host.metric("berth_leader", &[]).await {
        Some(now) if now == leads => Ok(()),
        other => Err(format!("berth_leader is {other:?}")),
    })
    .await;
}

async fn holder(cluster: &Cluster) -> Value {
    cluster.get_in(cluster.system(), Resource::LEASE, "berth").await["spec"]["holderIdentity"].clone()
}

/// The handlers of a host are in the middle of a run each: one of a mail at the gateway, one in a host call that never ends.
async fn in_the_middle(stage: &Stage, host: &Host) {
    stage.gateway.control(Behaviour::hold(Hold::After));
    stage.mail("e1", "a@example.com").await;
    stage.cluster.create(Resource::PROBE, "p", json!({"do": "hostblock"})).await;
    eventually(SOON, async || if stage.gateway.held() == 1 { Ok(()) } else { Err("the gateway holds nothing") }).await;
    for kind in [MAIL, PROBE] {
        host.until_queued(kind, "running", 1.0).await;
    }
}

async fn push(stage: &Stage) -> [(&'static str, String); 2] {
    let probes = stage.cluster.push("probe", &probe(&json!({})), "timeout: 1m\n").await;
    [("email-request", stage.push_email_request().await), ("probe", probes)]
}

async fn until_serving(stage: &Stage, plugins: &[(&str, String)]) {
    for (name, version) in plugins {
        stage.cluster.until_serving(name, version).await;
    }
}

/// What a host wrote to objects.
fn writes(host: &Host, mark: usize) -> Vec<String> {
    let of_objects = |path: &str| path.contains("/emailrequests/") || path.contains("/probes/");
    let entries = host.proxy.since(mark).into_iter().filter(|entry| entry.seen.writes() && of_objects(&entry.seen.path));
    entries.map(|entry| entry.to_string()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_stood_still_for_longer_than_its_lease_does_nothing_when_it_wakes() {
    let stage = Stage::shared().await;
    let plugins = push(&stage).await;
    let named = |name: &str| Flags { identity: Some(name.to_owned()), ..stage.flags() };
    let first = Host::start(&stage.cluster, "first", &named("first")).await;
    until_serving(&stage, &plugins).await;
    let second = Host::start(&stage.cluster, "second", &named("second")).await;
    in_the_middle(&stage, &first).await;
    let mark = first.proxy.mark();
    first.suspend();
    until_leader(&second, 1.0).await;
    stage.gateway.behave();
    let mail = stage.until_mail("e1", "Sent").await;
    // The answer of the gateway lies in its socket, and its timers are long due.
    first.resume();
    until_leader(&first, 0.0).await;
    stage.mail("e2", "a@example.com").await;
    stage.until_mail("e2", "Sent").await;
    eventually(SOON, async || match first.get("/readyz").await {
        Ok(answer) if answer.status == 200 => Ok(()),
        Ok(answer) => Err(answer.text()),
        Err(error) => Err(error.to_string()),
    })
    .await;
    assert!(writes(&first, mark).is_empty(), "{:#?}", writes(&first, mark));
    assert_eq!(holder(&stage.cluster).await, "second");
    assert_eq!(stage.cluster.get(Resource::EMAIL, "e1").await["status"], mail["status"]);
    let asked = [stage.gateway.requests_for(&stage.key("e1")).len(), stage.gateway.requests_for(&stage.key("e2")).len()];
    assert_eq!((stage.gateway.deliveries().len(), asked), (2, [2, 1]), "the second asked once more, under the same key");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_hold_after_a_suspension_and_cut_off_nobody_at_once() {
    let cluster = Cluster::shared().await;
    let claim = json!({
        "progress": {"phaseField": "status.phase", "settled": ["Done", "Failed"]},
        "deadLetter": {"phase": "Failed", "messageField": "status.message"},
    });
    let version = cluster.push("probe", &probe(&claim), "timeout: 5s\ncpu: 1s\nbackoff: {base: 5m, max: 5m}\n").await;
    let flags = Flags { more: vec!["--lease-duration=60s".into(), "--lease-renew-deadline=50s".into()], ..Flags::default() };
    let host = Host::start(&cluster, "host", &flags).await;
    cluster.until_serving("probe", &version).await;
    cluster.create(Resource::PROBE, "spins", json!({"do": "loop"})).await;
    host.until_queued(PROBE, "running", 1.0).await;
    host.suspend();
    for name in ["sleeps", "works"] {
        let what = if name == "sleeps" { json!({"do": "sleep", "ms": 1500}) } else { json!({"do": "ok"}) };
        cluster.create(Resource::PROBE, name, what).await;
    }
    // Longer than each limit.
    tokio::time::sleep(Duration::from_secs(7)).await;
    host.resume();
    cluster.until_phase(Resource::PROBE, "works", "Done", SOON).await;
    cluster.until(Resource::PROBE, "sleeps", SOON, |object| object["status"]["observedGeneration"] == 1).await;
    cluster.create(Resource::PROBE, "again", json!({"do": "loop"})).await;
    let says = |object: &Value| object["status"]["message"].as_str().is_some_and(|message| message.contains("limit of"));
    for name in ["spins", "again"] {
        cluster.until(Resource::PROBE, name, SOON, says).await;
    }
    host.until_queued(PROBE, "running", 0.0).await;

    // Idle for longer than the clock that interrupts guests stands still without a look (5 s).
    always(scaled(Duration::from_secs(6), Duration::from_secs(60)), async || {
        match host.metric("berth_queue_depth", &[("kind", PROBE), ("state", "running")]).await {
            Some(0.0) => Ok(()),
            other => Err(format!("{other:?} run")),
        }
    })
    .await;
    cluster.create(Resource::PROBE, "late", json!({"do": "loop"})).await;
    cluster.until(Resource::PROBE, "late", SOON, says).await;
    cluster.create(Resource::PROBE, "works-late", json!({"do": "ok"})).await;
    cluster.until_phase(Resource::PROBE, "works-late", "Done", SOON).await;
    host.until_queued(PROBE, "running", 0.0).await;
    assert!(!host.log().contains("lease lost"), "{}", host.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_cut_off_in_the_middle_of_runs_ends_them_before_its_lease_is_over() {
    let stage = Stage::shared().await;
    let plugins = push(&stage).await;
    let mut host = Host::start(&stage.cluster, "host", &stage.flags()).await;
    until_serving(&stage, &plugins).await;
    in_the_middle(&stage, &host).await;
    let _cut = host.proxy.rule(Rule::any(Effect::BlackHole));
    host.proxy.watches("").stall();
    let ended = "no longer leading";
    eventually(SOON, async || if host.log().contains(ended) { Ok(()) } else { Err("it goes on") }).await;
    let stopped = Instant::now();
    let renewals = host.proxy.entries();
    let held = |entry: &&Entry| {
        entry.seen.writes() && entry.seen.path.contains("/leases") && matches!(entry.outcome, Outcome::Answered(200 | 201))
    };
    let renewed = renewals.iter().rfind(held).expect("it led").seen.at;
    assert!(stopped - renewed < LEASE, "{:?} after the last renewal was sent", stopped - renewed);
    let log = host.log();
    let line = log.lines().find(|line| line.contains(ended)).unwrap_or_default();
    let cancelled: usize = line.rsplit_once("cancelled=").and_then(|(_, number)| number.parse().ok()).expect("it says how many");
    let stopped = log.lines().filter(|line| line.contains("result=fenced")).count();
    assert!(line.contains("orderly=false") && cancelled + stopped >= 2, "{line}");
    // What the gateway does now reaches nobody, and the other guest waits no longer.
    stage.gateway.behave();
    assert!(host.runs());
    let unsent = writes(&host, 0);
    assert!(unsent.is_empty(), "{unsent:#?}");
    assert!(stage.cluster.get(Resource::EMAIL, "e1").await["status"].is_null());
    host.kill();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn runs_that_outlast_the_grace_period_are_ended_and_their_objects_taken_up_again() {
    let stage = Stage::shared().await;
    let plugins = push(&stage).await;
    let grace = Duration::from_secs(2);
    let flags = Flags { more: vec![format!("--grace={}s", grace.as_secs())], ..stage.flags() };
    let mut host = Host::start(&stage.cluster, "host", &flags).await;
    until_serving(&stage, &plugins).await;
    in_the_middle(&stage, &host).await;
    let asked = Instant::now();
    assert_eq!(host.terminate().await, Some(0));
    assert!(asked.elapsed() >= grace, "it did not wait for them");
    assert!(asked.elapsed() < grace + BEYOND_GRACE, "{:?}", asked.elapsed());
    let released = host.proxy.entries().into_iter().rfind(|entry| entry.seen.verb == Verb::Update && entry.seen.path.contains("/leases/"));
    assert!(released.is_some_and(|entry| entry.seen.json()["spec"]["holderIdentity"].is_null()), "the Lease was not released");
    stage.gateway.behave();
    host.restart().await;
    stage.until_mail("e1", "Sent").await;
    assert_eq!(stage.gateway.deliveries().len(), 1);
    host.until_queued(PROBE, "running", 1.0).await;
}

/// A host that was told to end in the middle of a mail, and waits for the gateway.
async fn finishing(stage: &Stage, tell: impl Fn(&Host)) -> Host {
    let version = stage.push_email_request().await;
    let flags = Flags { more: vec!["--grace=20s".into()], ..stage.flags() };
    let host = Host::start(&stage.cluster, "host", &flags).await;
    stage.cluster.until_serving("email-request", &version).await;
    stage.gateway.control(Behaviour::hold(Hold::After));
    stage.mail("e1", "a@example.com").await;
    eventually(SOON, async || if stage.gateway.held() == 1 { Ok(()) } else { Err("the gateway holds nothing") }).await;
    tell(&host);
    eventually(SOON, async || if host.log().contains("finishing what runs") { Ok(()) } else { Err("it has not heard") }).await;
    host
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_sigterm_does_not_end_the_run_that_is_being_finished() {
    let stage = Stage::shared().await;
    let mut host = finishing(&stage, Host::ask_to_end).await;
    host.ask_to_end();
    always(Duration::from_millis(500), async || if host.runs() { Ok(()) } else { Err("it has ended") }).await;
    stage.gateway.behave();
    assert_eq!(host.end().await, Some(0));
    let mail = stage.cluster.get(Resource::EMAIL, "e1").await;
    assert_eq!(mail["status"]["phase"], "Sent", "{mail}");
    assert_eq!((stage.gateway.requests().len(), stage.gateway.deliveries().len()), (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_interrupt_ends_at_once_and_the_restart_goes_on() {
    let stage = Stage::shared().await;
    let mut host = finishing(&stage, Host::interrupt).await;
    host.interrupt();
    assert_eq!(host.end().await, Some(130));
    assert_eq!(stage.gateway.held(), 1, "nobody waited for the gateway");
    assert!(stage.cluster.get(Resource::EMAIL, "e1").await["status"]["phase"].is_null());
    stage.gateway.behave();
    host.restart().await;
    stage.until_mail("e1", "Sent").await;
    assert_eq!((stage.gateway.requests().len(), stage.gateway.deliveries().len()), (2, 1));
}
