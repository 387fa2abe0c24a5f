//! Leader election: one active, warm standbys, no double effect.

use std::time::{Duration, Instant};

use berth_tests::{
    behaviour::{Behaviour, Hold},
    cluster::Cluster,
    eventually::{always, eventually, scaled},
    host::{Flags, Host},
    proxy::{Effect, Outcome, Rule, Verb},
    resource::Resource,
    stage::{SOON, Stage},
};
use futures::TryStreamExt;
use kube::{
    api::{Patch, PatchParams},
    runtime::{WatchStreamExt, watcher},
};
use serde_json::{Value, json};

/// The name of the Lease.
const LEASE: &str = "berth";

/// Two hosts with the plugin for EmailRequests, the first of which leads.
async fn two_hosts(stage: &Stage) -> (Host, Host) {
    two_hosts_with(stage, Vec::new()).await
}

/// The same with further flags for the second.
async fn two_hosts_with(stage: &Stage, more: Vec<String>) -> (Host, Host) {
    let version = stage.push_email_request().await;
    let named = |name: &str| Flags { identity: Some(name.to_owned()), ..stage.flags() };
    let first = Host::start(&stage.cluster, "first", &named("first")).await;
    stage.cluster.until_serving("email-request", &version).await;
    let second = Host::start(&stage.cluster, "second", &Flags { more, ..named("second") }).await;
    // A standby is warm: it holds what serves.
    eventually(SOON, async || match second.metric("berth_plugin_info", &[("plugin", "email-request")]).await {
        Some(1.0) => Ok(()),
        other => Err(format!("the standby's plugin: {other:?}")),
    })
    .await;
    (first, second)
}

async fn holder(cluster: &Cluster) -> String {
    let lease = cluster.get_in(cluster.system(), Resource::LEASE, LEASE).await;
    lease["spec"]["holderIdentity"].as_str().unwrap_or_default().to_owned()
}

async fn until_held_by(cluster: &Cluster, identity: &str) {
    eventually(SOON, async || match holder(cluster).await {
        holder if holder == identity => Ok(()),
        holder => Err(format!("held by {holder:?}")),
    })
    .await;
}

async fn held(stage: &Stage) {
    eventually(SOON, async || if stage.gateway.held() > 0 { Ok(()) } else { Err("the gateway holds nothing") }).await;
}

/// How many writes a host has sent to EmailRequests.
fn writes(host: &Host, mark: usize) -> Vec<String> {
    let writes = host.proxy.since(mark).into_iter().filter(|entry| entry.seen.writes() && entry.seen.path.contains("/emailrequests/"));
    writes.map(|entry| entry.to_string()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_replicas_one_is_active_and_both_are_ready() {
    let stage = Stage::shared().await;
    let (first, second) = two_hosts(&stage).await;
    for number in 0..20 {
        stage.mail(&format!("e{number}"), "a@example.com").await;
    }
    for number in 0..20 {
        stage.until_mail(&format!("e{number}"), "Sent").await;
    }
    assert_eq!(holder(&stage.cluster).await, "first");
    assert_eq!((first.metric("berth_leader", &[]).await, second.metric("berth_leader", &[]).await), (Some(1.0), Some(0.0)));
    assert_eq!((writes(&second, 0), stage.gateway.requests().len()), (Vec::new(), 20));
    for host in [&first, &second] {
        assert_eq!(host.get("/readyz").await.expect("it answers").status, 200);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_the_leader_is_killed_in_the_middle_of_a_send_the_standby_goes_on_and_nothing_is_sent_twice() {
    let stage = Stage::shared().await;
    let compiled = stage.cluster.directory().join("compiled");
    let own_cache = vec![format!("--cache-dir={}", compiled.display())];
    let (mut first, _second) = two_hosts_with(&stage, own_cache).await;
    // A standby that had to compile, or to compile again, would leave a file.
    std::fs::remove_dir_all(&compiled).expect("the standby has compiled");
    stage.gateway.control(Behaviour::hold(Hold::After));
    stage.mail("e1", "a@example.com").await;
    held(&stage).await;
    first.kill();
    stage.gateway.behave();
    stage.mail("e2", "a@example.com").await;
    stage.until_mail("e1", "Sent").await;
    stage.until_mail("e2", "Sent").await;
    assert_eq!(holder(&stage.cluster).await, "second");
    assert_eq!((stage.gateway.deliveries_for(&stage.key("e1")).len(), stage.gateway.deliveries_for(&stage.key("e2")).len()), (1, 1));
    assert!(!compiled.exists(), "the first run after a failover compiles nothing");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_sigterm_the_leader_finishes_its_run_and_hands_over_at_once() {
    let stage = Stage::shared().await;
    // Long enough to show that nobody waits for it to run out.
    let version = stage.push_email_request().await;
    let named = |name: &str| Flags { identity: Some(name.to_owned()), more: vec!["--lease-duration=60s".into()], ..stage.flags() };
    let mut first = Host::start(&stage.cluster, "first", &named("first")).await;
    stage.cluster.until_serving("email-request", &version).await;
    let second = Host::start(&stage.cluster, "second", &named("second")).await;
    let leases = Resource::LEASE.api(stage.cluster.client(), Some(stage.cluster.system()));
    let holders = watcher(leases, watcher::Config::default().fields("metadata.name=berth")).applied_objects();
    let holders = holders.map_ok(|lease| lease.data["spec"]["holderIdentity"].as_str().unwrap_or_default().to_owned());
    let handover = tokio::spawn(holders.try_fold(Vec::new(), async |mut seen: Vec<String>, holder| {
        if seen.last() != Some(&holder) {
            seen.push(holder);
        }
        // An error ends the fold: that is how it says that it is done.
        if seen.last().is_some_and(|holder| holder == "second") { Err(watcher::Error::NoResourceVersion) } else { Ok(seen) }
    }));
    stage.gateway.control(Behaviour { delay_ms: 1000, ..Behaviour::default() });
    stage.mail("e1", "a@example.com").await;
    eventually(SOON, async || if stage.gateway.requests().is_empty() { Err("no request yet") } else { Ok(()) }).await;
    let asked = Instant::now();
    first.ask_to_end();
    assert_eq!(first.end().await, Some(0));
    until_held_by(&stage.cluster, "second").await;
    second.until_leading().await;
    // The run in flight, and what is left of it is waited for, included.
    assert!(asked.elapsed() < Duration::from_secs(scaled(10, 3)), "{:?}", asked.elapsed());
    let mail = stage.cluster.get(Resource::EMAIL, "e1").await;
    assert_eq!(mail["status"]["phase"], "Sent", "the run in flight was finished and written: {mail}");
    assert!(handover.await.expect("the watch ends").is_err(), "the second was seen to hold the Lease");
    assert!(first.log().contains("releasing the lease"), "{}", first.log());
    let released = first.proxy.entries().into_iter().rfind(|entry| entry.seen.verb == Verb::Update && entry.seen.path.contains("/leases/"));
    assert!(released.is_some_and(|entry| entry.seen.json()["spec"]["holderIdentity"].is_null()), "held by nobody in between");
    stage.mail("e2", "a@example.com").await;
    stage.until_mail("e2", "Sent").await;
    assert_eq!((stage.gateway.requests().len(), stage.gateway.deliveries().len()), (2, 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_taken_away_in_the_middle_of_a_run_stops_it_and_nothing_is_written_after() {
    let stage = Stage::shared().await;
    let (first, _second) = two_hosts(&stage).await;
    stage.gateway.control(Behaviour::hold(Hold::After));
    stage.mail("e1", "a@example.com").await;
    held(&stage).await;
    let mark = first.proxy.mark();
    let thief = json!({"spec": {"holderIdentity": "thief", "leaseDurationSeconds": 6, "leaseTransitions": 7}});
    let leases = Resource::LEASE.api(stage.cluster.client(), Some(stage.cluster.system()));
    leases.patch(LEASE, &PatchParams::default(), &Patch::Merge(thief)).await.expect("the administrator may");
    eventually(Duration::from_secs(3), async || match first.metric("berth_leader", &[]).await {
        Some(0.0) => Ok(()),
        other => Err(format!("berth_leader is {other:?}")),
    })
    .await;
    stage.gateway.behave();
    // The thief never renews: after six seconds one of the two takes over and finds out that the mail is out.
    let mail = stage.until_mail("e1", "Sent").await;
    let transitions = stage.cluster.get_in(stage.cluster.system(), Resource::LEASE, LEASE).await["spec"]["leaseTransitions"].clone();
    assert!(transitions.as_i64() >= Some(8), "{transitions}");
    assert_eq!(stage.gateway.deliveries().len(), 1, "{mail}");
    // Up to the request by which it took the Lease again, if it was the first to.
    let afterwards = first.proxy.since(mark).into_iter();
    let in_doubt = afterwards.take_while(|entry| !(entry.seen.verb == Verb::Update && entry.outcome == Outcome::Answered(200)));
    let written: Vec<String> = in_doubt
        .filter(|entry| entry.seen.path.contains("/emailrequests/"))
        .filter(|entry| entry.seen.writes())
        .map(|entry| entry.to_string())
        .collect();
    assert!(written.is_empty(), "{written:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_cut_off_from_the_api_server_stops_before_its_lease_is_over_and_comes_back_as_a_standby() {
    let stage = Stage::shared().await;
    let (mut first, second) = two_hosts(&stage).await;
    let cut = first.proxy.rule(Rule::any(Effect::BlackHole));
    first.proxy.watches("").stall();
    eventually(Duration::from_secs(10), async || match first.metric("berth_leader", &[]).await {
        Some(0.0) => Ok(()),
        other => Err(format!("berth_leader is {other:?}")),
    })
    .await;
    assert_eq!(holder(&stage.cluster).await, "first", "it stopped while the Lease was still its own");
    second.until_leading().await;
    stage.mail("e1", "a@example.com").await;
    stage.until_mail("e1", "Sent").await;
    cut.release();
    first.proxy.watches("").cut();
    eventually(SOON, async || match first.get("/readyz").await {
        Ok(answer) if answer.status == 200 => Ok(()),
        Ok(answer) => Err(answer.text()),
        Err(error) => Err(error.to_string()),
    })
    .await;
    assert_eq!(first.metric("berth_leader", &[]).await, Some(0.0));
    assert!(first.runs());
    assert_eq!((holder(&stage.cluster).await.as_str(), stage.gateway.requests().len()), ("second", 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_single_replica_regains_the_lease_after_an_outage_of_the_api_server() {
    let stage = Stage::shared().await;
    let mut host = stage.email_host().await;
    host.proxy.down().await;
    eventually(SOON, async || match host.metric("berth_leader", &[]).await {
        Some(0.0) => Ok(()),
        other => Err(format!("berth_leader is {other:?}")),
    })
    .await;
    stage.mail("e1", "a@example.com").await;
    // Three renew deadlines.
    always(Duration::from_secs(12), async || if host.runs() { Ok(()) } else { Err("the host has ended") }).await;
    assert_eq!(host.get("/livez").await.expect("it answers").status, 200);
    assert_ne!(host.get("/readyz").await.expect("it answers").status, 200);
    assert_eq!(stage.gateway.requests().len(), 0);
    host.proxy.up().expect("its port is its own");
    stage.cluster.until_phase(Resource::EMAIL, "e1", "Sent", Duration::from_secs(60)).await;
    host.until_ready().await;
    assert_eq!(stage.gateway.deliveries().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clocks_that_differ_make_no_second_leader() {
    let stage = Stage::shared().await;
    let (first, second) = two_hosts(&stage).await;
    for renewed in ["2001-01-01T00:00:00.000000Z", "2999-01-01T00:00:00.000000Z"] {
        let leases = Resource::LEASE.api(stage.cluster.client(), Some(stage.cluster.system()));
        let skewed: Value = json!({"spec": {"renewTime": renewed}});
        leases.patch(LEASE, &PatchParams::default(), &Patch::Merge(skewed)).await.expect("the administrator may");
        always(Duration::from_secs(3), async || match second.metric("berth_leader", &[]).await {
            Some(0.0) => Ok(()),
            other => Err(format!("the standby's berth_leader is {other:?}")),
        })
        .await;
    }
    first.until_leading().await;
    assert_eq!(holder(&stage.cluster).await, "first");
}
