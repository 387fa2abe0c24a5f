//! What one run must not do to another, to the host, or to the world.

use std::time::{Duration, Instant};

use berth_host::{fence::BootTime, reconcile::Failure};
use serde_json::json;

use crate::bench::*;

#[tokio::test]
async fn a_trap_does_not_poison_the_next_run_and_a_panic_is_told_with_its_place() {
    let bench = Bench::new("").await;
    for _ in 0..3 {
        let failure = bench.failure(json!({ "do": "trap" })).await;
        assert!(failure.to_string().starts_with("the handler trapped: wasm trap: "), "{failure}");
        let failure = bench.failure(json!({ "do": "panic" })).await;
        let text = failure.to_string();
        assert!(
            text.starts_with("the handler trapped: panicked at ") && text.ends_with("the probe was told to panic over two lines"),
            "{text}"
        );
        let failure = bench.failure(json!({ "do": "exit" })).await;
        assert!(matches!(&failure, Failure::Trap(cause) if cause.contains("exit")), "{failure}");
        bench.still_works().await;
    }
}

#[tokio::test]
async fn a_looping_guest_does_not_starve_timers_of_its_own_thread() {
    let bench = Bench::new("cpu: 1s").await;
    let sleeps = async {
        let mut longest = Duration::ZERO;
        for _ in 0..20 {
            let began = Instant::now();
            tokio::time::sleep(Duration::from_millis(1)).await;
            longest = longest.max(began.elapsed());
        }
        longest
    };
    let (failure, longest) = tokio::join!(bench.failure(json!({ "do": "loop" })), sleeps);
    assert!(matches!(failure, Failure::Limit(_)), "{failure}");
    // About one tick of 10 ms where the machine is idle; without the yields it is the whole second.
    assert!(longest < Duration::from_millis(500), "{longest:?}");
}

#[tokio::test]
async fn a_lost_lease_stops_the_run_in_the_middle_and_none_starts_after() {
    let bench = Bench::new("").await;
    for what in ["loop", "hostblock"] {
        let began = Instant::now();
        bench.gate.open(BootTime::now() + Duration::from_secs(60));
        let request = |fence| berth_host::reconcile::Request { fence, ..bench.request(&json!({ "do": what }).to_string()) };
        let (gate, leadership) = berth_host::fence::gate();
        gate.open(BootTime::now() + Duration::from_secs(60));
        let fence = leadership.current().expect("open");
        let close = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            gate.close();
        };
        let (result, ()) = tokio::join!(bench.handler.reconcile(request(fence.clone())), close);
        assert_eq!(result, Err(Failure::Fenced), "{what}");
        assert!(began.elapsed() < Duration::from_millis(1500), "{:?}", began.elapsed());
        assert_eq!(bench.handler.reconcile(request(fence)).await, Err(Failure::Fenced), "{what}");
    }
}

#[tokio::test]
async fn a_dropped_run_gives_its_sandbox_back() {
    let bench = Bench::with(probe(), "", |config| config.sandboxes = 2).await;
    for _ in 0..10 {
        let run = bench.run(json!({ "do": "hostblock" }));
        assert!(tokio::time::timeout(Duration::from_millis(30), run).await.is_err());
    }
    bench.still_works().await;
}

#[tokio::test]
async fn more_runs_than_sandboxes_wait_for_their_turn() {
    let bench = Bench::with(probe(), "timeout: 2s", |config| config.sandboxes = 2).await;
    let runs = (0..12).map(|_| bench.run(json!({ "do": "sleep", "ms": 20 })));
    for result in futures::future::join_all(runs).await {
        result.expect("each has its turn");
    }
}

#[tokio::test]
async fn nothing_but_clocks_and_random_numbers_is_in_reach() {
    let bench = Bench::new("").await;
    let reach = bench.status(json!({ "do": "reach" })).await;
    assert_eq!((reach["environment"].as_u64(), reach["arguments"].as_u64()), (Some(0), Some(0)), "{reach}");
    for denied in ["file", "directory", "connect", "listen", "udp"] {
        assert!(reach[denied].is_string(), "{denied}: {reach}");
    }
    assert!(reach["now"].as_u64() > Some(1_700_000_000), "{reach}");
    assert_ne!(reach["random"], bench.status(json!({ "do": "reach" })).await["random"]);
}
