//! A host that is killed, ended, cut off or lied to at any of its effects comes to the same end.
//!
//! A spread selection of points and faults runs each time; `make test-faults` tries them all.

use berth_tests::explore::{
    Extent, Scenario, explore,
    scenario::{CHILDREN, FAILOVER, MAILS, RELOAD, REPORTS},
};

/// Explores as the environment says, or else so many faults.
async fn same_end(scenario: &Scenario, count: usize) {
    let report = explore(scenario, &Extent::or(count)).await;
    println!("{scenario:?}: {report}");
    assert!(report.failed.is_empty(), "{scenario:?}: {report}");
    assert!(report.passed > 0 || report.strikes == 0, "no fault happened: {scenario:?}: {report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mails_end_the_same_whatever_happens_at_an_effect() {
    same_end(&MAILS, 7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reports_and_their_dead_letters_end_the_same_whatever_happens_at_an_effect() {
    same_end(&REPORTS, 7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn children_and_finalizers_end_the_same_whatever_happens_at_an_effect() {
    same_end(&CHILDREN, 7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_ends_the_same_whatever_happens_at_an_effect() {
    same_end(&RELOAD, 5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_ends_the_same_whatever_happens_at_an_effect() {
    same_end(&FAILOVER, 7).await;
}
