//! The laws are held to at the end of each test that has a host, whether it asks for that or not.

use berth_tests::{
    client::Client,
    eventually::eventually,
    stage::{SOON, Stage},
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[should_panic(expected = "L8: the host host has ended by itself")]
async fn a_case_whose_host_ends_by_itself_fails() {
    let stage = Stage::shared().await;
    let mut host = stage.host().await;
    // The harness does not know of this signal.
    let id = Pid::from_raw(host.id().try_into().expect("a process id")).expect("not zero");
    kill_process(id, Signal::KILL).expect("it runs");
    eventually(SOON, async || if host.runs() { Err("it runs") } else { Ok(()) }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[should_panic(expected = "was delivered 2 times")]
async fn a_case_in_which_a_mail_went_out_twice_fails() {
    let stage = Stage::shared().await;
    let _host = stage.email_host().await;
    let uid = stage.mail("e1", "a@example.com").await;
    stage.until_mail("e1", "Sent").await;
    let key = format!("\"another/{}/e1/{uid}\"", stage.cluster.namespace());
    let url = format!("{}/send", stage.gateway.url());
    Client::new().post(&url, &[("idempotency-key", &key)], &json!({})).await.expect("the gateway answers");
}
