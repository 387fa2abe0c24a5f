//! Whole electors, each on its thread, with short times, against an API server in memory.

use std::time::Instant;

use serde_json::{Value, json};

use super::{
    api::{Mood, Server, eventually},
    *,
};

/// A thousandth of the duration of the leases here: long enough that a busy machine does not decide the tests.
const MILLI: Duration = Duration::from_millis(3);

fn settings(identity: &str) -> Settings {
    Settings {
        duration: MILLI * 1000,
        renew_deadline: MILLI * 600,
        retry: MILLI * 100,
        margin: MILLI * 100,
        ..Settings::new("berth-system", "berth", identity)
    }
}

fn elector(server: &Server, identity: &str) -> (Leadership, Elector) {
    let server = server.clone();
    start_with(move || Ok(server.client()), settings(identity)).expect("starts")
}

async fn leader(server: &Server, identity: &str) -> (Leadership, Elector) {
    let (leadership, elector) = elector(server, identity);
    eventually("the first leads", || elector.status(), |status| status.leads).await;
    (leadership, elector)
}

#[tokio::test]
async fn a_released_lease_is_taken_over_at_once() {
    let server = Server::new();
    let (first, elector_of_first) = leader(&server, "first").await;
    let (second, elector_of_second) = elector(&server, "second");
    eventually("the second knows the holder", || elector_of_second.status(), |status| status.holder.as_deref() == Some("first")).await;
    tokio::time::sleep(MILLI * 300).await;
    assert!(first.leads() && !second.leads());
    let released = Instant::now();
    elector_of_first.release().await;
    assert!(!first.leads());
    eventually("the second leads", || elector_of_second.status(), |status| status.leads).await;
    assert!(released.elapsed() < MILLI * 500, "{:?}", released.elapsed());
    assert_eq!((server.spec("holderIdentity").as_str(), server.spec("leaseTransitions").as_str()), ("second", "1"));
    elector_of_second.release().await;
    assert_eq!(server.spec("holderIdentity"), "null");
}

#[tokio::test]
async fn a_leader_that_vanishes_is_followed_after_its_duration_and_there_are_never_two() {
    let server = Server::new();
    let (first, elector_of_first) = leader(&server, "first").await;
    let (second, elector) = elector(&server, "second");
    tokio::time::sleep(MILLI * 300).await;
    drop(elector_of_first);
    eventually("the first is gone", || first.leads(), |leads| !leads).await;
    let gone = Instant::now();
    eventually("the second leads", || elector.status(), |status| status.leads).await;
    assert!(second.leads() && !first.leads());
    assert!(gone.elapsed() > MILLI * 850, "{:?}", gone.elapsed());
}

#[tokio::test]
async fn a_holder_set_by_hand_closes_the_gate_at_once() {
    let server = Server::new();
    let (first, elector) = leader(&server, "first").await;
    let fence = first.current().expect("leads");
    server.edit(|lease| lease.as_mut().expect("there is one")["spec"]["holderIdentity"] = json!("somebody"));
    let edited = Instant::now();
    fence.lost().await;
    assert!(edited.elapsed() < MILLI * 80, "before the next renewal: {:?}", edited.elapsed());
    // The gate moves first, and then the status tells.
    eventually("it says so", || elector.status(), |status| !status.leads).await;
    eventually("it leads again after the other's duration", || elector.status(), |status| status.leads).await;
    assert!(edited.elapsed() > MILLI * 900, "{:?}", edited.elapsed());
    assert!(fence.remaining().is_none(), "in a new term");
    elector.release().await;
}

#[tokio::test]
async fn an_overloaded_or_silent_server_costs_the_term_at_the_deadline_and_never_the_election() {
    for mood in [Mood::Busy, Mood::Silent] {
        let server = Server::new();
        let (first, elector) = leader(&server, "first").await;
        let fence = first.current().expect("leads");
        server.set_mood(mood);
        let began = Instant::now();
        tokio::time::sleep(MILLI * 400).await;
        assert!(first.leads(), "{mood:?}");
        fence.lost().await;
        assert!((MILLI * 480..MILLI * 750).contains(&began.elapsed()), "{mood:?}: {:?}", began.elapsed());
        tokio::time::sleep(MILLI * 500).await;
        let trouble = elector.status().trouble.expect("known");
        assert!(trouble.message.starts_with("cannot update the lease berth-system/berth: "), "{}", trouble.message);
        assert!(trouble.since.elapsed() > MILLI * 300, "{mood:?}");
        server.set_mood(Mood::Fine);
        eventually("it leads again", || elector.status(), |status| status.leads).await;
        eventually("no trouble is left", || elector.status().trouble, Option::is_none).await;
        elector.release().await;
    }
}

#[tokio::test]
async fn a_renewal_whose_answer_is_lost_does_not_cost_the_term() {
    let server = Server::new();
    let (first, elector) = leader(&server, "first").await;
    let epoch = first.current().expect("leads").epoch();
    let before = server.spec("renewTime");
    server.set_mood(Mood::Mute);
    eventually("a renewal arrives", || server.spec("renewTime"), |time| *time != before).await;
    server.set_mood(Mood::Fine);
    tokio::time::sleep(MILLI * 700).await;
    assert_eq!(first.current().map(|fence| fence.epoch()), Some(epoch));
    elector.release().await;
    assert_eq!(server.spec("holderIdentity"), "null");
}

#[tokio::test]
async fn a_deleted_lease_is_created_again_in_a_new_term() {
    let server = Server::new();
    let (first, elector) = leader(&server, "first").await;
    let fence = first.current().expect("leads");
    server.edit(|lease| *lease = None::<Value>);
    fence.lost().await;
    eventually("it leads again", || elector.status(), |status| status.leads).await;
    elector.release().await;
}

#[tokio::test]
async fn release_ends_although_the_server_is_silent() {
    let server = Server::new();
    let (first, elector) = leader(&server, "first").await;
    server.set_mood(Mood::Silent);
    let began = Instant::now();
    elector.release().await;
    assert!(!first.leads());
    assert!(began.elapsed() < MILLI * 900, "{:?}", began.elapsed());
}

#[test]
fn times_that_contradict_each_other_are_refused() {
    let server = Server::new();
    let contradictory = Settings { renew_deadline: MILLI * 950, ..settings("first") };
    let error = start_with(move || Ok(server.client()), contradictory).expect_err("refused");
    assert!(error.to_string().contains("retry < renew deadline < duration - margin, not 0.3 s < 2.85 s < 3 s - 0.3 s"), "{error}");
}
