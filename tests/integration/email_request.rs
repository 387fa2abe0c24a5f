//! EmailRequest, end to end: sent once, whatever happens in between.

use std::time::{Duration, Instant};

use berth_tests::{
    behaviour::{Behaviour, Hold},
    eventually::{eventually, scaled},
    gateway::Gateway,
    host::{Flags, GRACE, Host},
    proxy::{Effect, Rule, Verb},
    resource::Resource,
    stage::{SOON, Stage, guest},
    workspace,
};
use kube::api::DeleteParams;
use serde_json::{Value, json};

/// Waits until the gateway holds a request.
async fn held(gateway: &Gateway) {
    eventually(SOON, async || if gateway.held() > 0 { Ok(()) } else { Err("the gateway holds nothing") }).await;
}

/// Waits until the gateway has got so many requests for the key.
async fn requests(gateway: &Gateway, key: &str, count: usize) {
    eventually(SOON, async || match gateway.requests_for(key).len() {
        got if got >= count => Ok(()),
        got => Err(format!("{got} of {count} requests")),
    })
    .await;
}

fn observed(mail: &Value) -> bool {
    mail["status"]["observedGeneration"] == mail["metadata"]["generation"]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mail_is_sent_once_under_its_own_key_and_observed() {
    let stage = Stage::shared().await;
    let _host = stage.email_host().await;
    let uid = stage.mail("e1", "a@example.com").await;
    let mail = stage.until_mail("e1", "Sent").await;
    assert!(observed(&mail), "{mail}");
    assert!(mail["metadata"]["finalizers"].is_null(), "nobody asked for one: {mail}");
    let deliveries = stage.gateway.deliveries();
    assert_eq!(deliveries.len(), 1);
    assert_eq!(deliveries[0].key, format!("emailrequests.notify.acme.io/{}/e1/{uid}", stage.cluster.namespace()));
    assert_eq!(deliveries[0].payload, json!({"to": "a@example.com", "template": "welcome", "locale": "en-GB"}));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_observed_mail_is_not_given_to_the_handler_again_after_changes_of_metadata_or_a_restart() {
    let stage = Stage::shared().await;
    let mut host = stage.email_host().await;
    stage.mail("e1", "a@example.com").await;
    stage.until_mail("e1", "Sent").await;
    stage.cluster.patch(Resource::EMAIL, "e1", json!({"metadata": {"annotations": {"seen": "yes"}, "labels": {"team": "a"}}})).await;
    stage.mail("e2", "a@example.com").await;
    stage.until_mail("e2", "Sent").await;
    assert_eq!(host.terminate().await, Some(0));
    host.restart().await;
    stage.mail("e3", "a@example.com").await;
    stage.until_mail("e3", "Sent").await;
    for name in ["e1", "e2", "e3"] {
        assert_eq!(stage.gateway.requests_for(&stage.key(name)).len(), 1, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failing_gateway_is_asked_again_after_1_2_and_4_seconds_and_delivers_once() {
    let stage = Stage::shared().await;
    let _host = stage.email_host().await;
    stage.gateway.control(Behaviour::fail(503).times(3));
    stage.mail("e1", "a@example.com").await;
    stage.until_mail("e1", "Sent").await;
    let times: Vec<u64> = stage.gateway.requests_for(&stage.key("e1")).iter().map(|request| request.at_ms).collect();
    let waits: Vec<u64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(waits.len(), 3, "{waits:?}");
    for (wait, base) in waits.iter().zip([1000, 2000, 4000]) {
        // Up to 10 % jitter, and a second for a busy machine. Never early.
        assert!((base..base * 11 / 10 + 1000).contains(wait), "{waits:?}");
    }
    assert_eq!(stage.gateway.deliveries().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_out_of_reach_is_asked_until_it_is_back() {
    let stage = Stage::shared().await;
    let host = stage.email_host().await;
    stage.gateway.down().await;
    stage.mail("e1", "a@example.com").await;
    host.until_queued("EmailRequest.notify.acme.io", "delayed", 1.0).await;
    assert!(stage.cluster.get(Resource::EMAIL, "e1").await["status"]["phase"].is_null());
    stage.gateway.up().expect("its port is its own");
    stage.until_mail("e1", "Sent").await;
    assert_eq!(stage.gateway.deliveries().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_is_lost_after_the_delivery_does_not_deliver_twice() {
    let stage = Stage::shared().await;
    let _host = stage.email_host().await;
    stage.gateway.control(Behaviour::drop_answer(2));
    stage.mail("e1", "a@example.com").await;
    stage.until_mail("e1", "Sent").await;
    assert_eq!((stage.gateway.requests().len(), stage.gateway.deliveries().len()), (3, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dripping_gateway_is_given_up_at_the_deadline_frees_the_slot_and_delivers_once() {
    let stage = Stage::shared().await;
    let config = workspace::deploy("plugins/email-request.yaml").expect("it ships");
    let config = format!("{config}timeout: 2s\nconcurrency: 1\n");
    let version = stage.cluster.push("email-request", &guest("email_request"), &config).await;
    let _host = stage.host().await;
    stage.cluster.until_serving("email-request", &version).await;
    // It drips for two minutes, and there is one slot.
    stage.gateway.control(Behaviour::drip().times(1));
    stage.mail("e1", "a@example.com").await;
    requests(&stage.gateway, &stage.key("e1"), 1).await;
    stage.mail("e2", "a@example.com").await;
    stage.until_mail("e2", "Sent").await;
    stage.until_mail("e1", "Sent").await;
    let of = |name: &str| (stage.gateway.requests_for(&stage.key(name)).len(), stage.gateway.deliveries_for(&stage.key(name)).len());
    assert_eq!((of("e1"), of("e2")), ((2, 1), (1, 1)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_killed_between_accept_and_answer_mails_once() {
    let stage = Stage::shared().await;
    let mut host = stage.email_host().await;
    stage.gateway.control(Behaviour::hold(Hold::After));
    stage.mail("e1", "a@example.com").await;
    held(&stage.gateway).await;
    host.kill();
    stage.gateway.behave();
    host.restart().await;
    let mail = stage.until_mail("e1", "Sent").await;
    assert!(observed(&mail), "{mail}");
    assert_eq!((stage.gateway.requests_for(&stage.key("e1")).len() > 1, stage.gateway.deliveries().len()), (true, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_killed_between_answer_and_status_mails_once() {
    let stage = Stage::shared().await;
    let mut host = stage.email_host().await;
    let status = host.proxy.rule(Rule::on(Verb::Patch, Effect::Hold).path("/emailrequests/e1/status"));
    stage.mail("e1", "a@example.com").await;
    status.reached(1).await;
    host.kill();
    status.abandoned().await;
    status.release();
    assert!(stage.cluster.get(Resource::EMAIL, "e1").await["status"]["phase"].is_null(), "the status was not written");
    host.restart().await;
    stage.until_mail("e1", "Sent").await;
    assert_eq!((stage.gateway.requests().len(), stage.gateway.deliveries().len()), (2, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_edit_before_the_gateway_accepts_is_what_is_sent() {
    let stage = Stage::shared().await;
    let _host = stage.email_host().await;
    stage.gateway.control(Behaviour::fail(503));
    stage.mail("e1", "a@example.com").await;
    requests(&stage.gateway, &stage.key("e1"), 1).await;
    stage.cluster.patch(Resource::EMAIL, "e1", json!({"spec": {"to": "b@example.com"}})).await;
    requests(&stage.gateway, &stage.key("e1"), 2).await;
    stage.gateway.behave();
    let mail = stage.until_mail("e1", "Sent").await;
    assert!(observed(&mail) && mail["metadata"]["generation"] == 2, "{mail}");
    let deliveries = stage.gateway.deliveries();
    assert_eq!((deliveries.len(), &deliveries[0].payload["to"]), (1, &json!("b@example.com")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_edit_between_accept_and_status_ends_in_sent_with_a_message_and_no_second_mail() {
    let stage = Stage::shared().await;
    let _host = stage.email_host().await;
    stage.gateway.control(Behaviour::hold(Hold::After));
    stage.mail("e1", "a@example.com").await;
    held(&stage.gateway).await;
    stage.cluster.patch(Resource::EMAIL, "e1", json!({"spec": {"to": "b@example.com"}})).await;
    stage.gateway.behave();
    let mail = stage.cluster.until(Resource::EMAIL, "e1", SOON, |mail| mail["status"]["phase"] == "Sent" && observed(mail)).await;
    let message = mail["status"]["message"].as_str().unwrap_or_default();
    assert!(message.contains("earlier version"), "{mail}");
    let deliveries = stage.gateway.deliveries();
    assert_eq!((deliveries.len(), &deliveries[0].payload["to"]), (1, &json!("a@example.com")));
    let asked = stage.gateway.requests().len();
    stage.mail("e2", "a@example.com").await;
    stage.until_mail("e2", "Sent").await;
    assert_eq!(stage.gateway.requests().len(), asked + 1, "it loops");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_edit_after_sent_is_refused_by_the_api_server_with_what_to_do() {
    let stage = Stage::shared().await;
    let _host = stage.email_host().await;
    stage.mail("e1", "a@example.com").await;
    stage.until_mail("e1", "Sent").await;
    let error =
        stage.cluster.try_patch(Resource::EMAIL, "e1", json!({"spec": {"to": "b@example.com"}})).await.expect_err("sent").to_string();
    assert!(error.contains("the mail is sent") && error.contains("create another EmailRequest"), "{error}");
    stage.cluster.patch(Resource::EMAIL, "e1", json!({"metadata": {"labels": {"still": "possible"}}})).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_cannot_heal_is_failed_with_its_cause_and_an_edit_reopens_it() {
    let stage = Stage::shared().await;
    let _host = stage.email_host().await;
    stage.gateway.control(Behaviour::fail(400));
    stage.mail("e1", "a@example.com").await;
    let mail = stage.until_mail("e1", "Failed").await;
    assert!(observed(&mail) && mail["status"]["message"].as_str().is_some_and(|message| message.contains("400")), "{mail}");
    stage.gateway.behave();
    stage.mail("e2", "a@example.com").await;
    stage.until_mail("e2", "Sent").await;
    assert_eq!(stage.gateway.requests_for(&stage.key("e1")).len(), 1, "a failed mail is not tried again");
    stage.cluster.patch(Resource::EMAIL, "e1", json!({"spec": {"to": "b@example.com"}})).await;
    let mail = stage.until_mail("e1", "Sent").await;
    assert!(observed(&mail) && mail["status"]["message"].is_null(), "{mail}");
    assert_eq!(stage.gateway.deliveries_for(&stage.key("e1")).len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_name_in_two_namespaces_is_two_mails() {
    let stage = Stage::shared().await;
    let other = stage.cluster.another_namespace().await;
    let version = stage.push_email_request().await;
    let flags = Flags { more_namespaces: vec![other.clone()], ..stage.flags() };
    let _host = Host::start(&stage.cluster, "host", &flags).await;
    stage.cluster.until_serving("email-request", &version).await;
    stage.mail("e1", "a@example.com").await;
    let twin = Resource::EMAIL.object(&other, "e1", json!({"to": "a@example.com", "template": "welcome", "locale": "en-GB"}));
    Resource::EMAIL.api(stage.cluster.client(), Some(&other)).create(&Default::default(), &twin).await.expect("another namespace");
    stage.until_mail("e1", "Sent").await;
    stage.cluster.until_in(&other, Resource::EMAIL, "e1", SOON, |mail| mail["status"]["phase"] == "Sent").await;
    assert_eq!(stage.gateway.deliveries().len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_and_recreated_mail_is_a_new_message_and_inherits_nothing() {
    let stage = Stage::shared().await;
    let _host = stage.email_host().await;
    let first = stage.mail("e1", "a@example.com").await;
    stage.until_mail("e1", "Sent").await;
    stage.cluster.delete(Resource::EMAIL, "e1").await;
    // Of this one the host keeps a backoff, which must not be that of the next.
    stage.gateway.control(Behaviour::fail(503));
    let second = stage.mail("e1", "a@example.com").await;
    requests(&stage.gateway, &second, 3).await;
    stage.cluster.delete(Resource::EMAIL, "e1").await;
    stage.gateway.behave();
    let third = stage.mail("e1", "a@example.com").await;
    stage.cluster.until_phase(Resource::EMAIL, "e1", "Sent", Duration::from_secs(3)).await;
    let keys: Vec<String> = stage.gateway.deliveries().into_iter().map(|delivery| delivery.key).collect();
    assert_eq!(keys.len(), 2, "{keys:?}");
    assert!(keys[0].ends_with(&first) && keys[1].ends_with(&third), "{keys:?}");
    assert_eq!(stage.gateway.deliveries_for(&second).len(), 0);
    // At once, while the former one may still be in a run, a queue or a cache.
    for round in 0..10 {
        stage.cluster.api(Resource::EMAIL).delete("e1", &DeleteParams::default()).await.expect("it is there");
        let uid = stage.mail("e1", "a@example.com").await;
        if round % 2 == 0 {
            stage.until_mail("e1", "Sent").await;
            assert_eq!(stage.gateway.deliveries_for(&uid).len(), 1, "round {round}");
        }
    }
    let last = stage.until_mail("e1", "Sent").await;
    let uid = last["metadata"]["uid"].as_str().expect("the API server gives one");
    assert_eq!(stage.gateway.deliveries_for(uid).len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sigterm_at_any_moment_of_a_run_ends_in_order_and_mails_once() {
    let stage = Stage::shared().await;
    let mut host = stage.email_host().await;
    let (steps, pace) = scaled((8, 40), (50, 100));
    stage.gateway.control(Behaviour { delay_ms: steps * pace / 2, ..Behaviour::default() });
    for step in 0..steps {
        let name = format!("e{step}");
        stage.mail(&name, "a@example.com").await;
        tokio::time::sleep(Duration::from_millis(step * pace)).await;
        let asked = Instant::now();
        assert_eq!(host.terminate().await, Some(0), "step {step}");
        assert!(asked.elapsed() <= scaled(GRACE * 2, GRACE), "step {step}: {:?}", asked.elapsed());
        host.restart().await;
        stage.until_mail(&name, "Sent").await;
        assert_eq!(stage.gateway.deliveries_for(&stage.key(&name)).len(), 1, "step {step}");
    }
}
