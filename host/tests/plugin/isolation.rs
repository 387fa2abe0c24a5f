//! What one run must not do to another, to the host, or to the world.

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use berth_host::{denial::Denial, fence::BootTime, metrics::Metrics, reconcile::Failure};
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
    let bench = Bench::new("cpu: 3s").await;
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
    // About one tick of 2 ms where the machine is idle; without the yields it is all the 3 s.
    assert!(longest < Duration::from_millis(1500), "{longest:?}");
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
    let bench = Bench::with(probe(), "", |config| config.limits.sandboxes = 2).await;
    for _ in 0..10 {
        let run = bench.run(json!({ "do": "hostblock" }));
        assert!(tokio::time::timeout(Duration::from_millis(30), run).await.is_err());
    }
    bench.still_works().await;
}

#[tokio::test]
async fn more_runs_than_sandboxes_wait_for_their_turn() {
    let bench = Bench::with(probe(), "timeout: 2s", |config| config.limits.sandboxes = 2).await;
    let runs = (0..12).map(|_| bench.run(json!({ "do": "sleep", "ms": 20 })));
    for result in futures::future::join_all(runs).await {
        result.expect("each has its turn");
    }
}

#[tokio::test]
async fn nothing_but_clocks_and_random_numbers_is_in_reach_and_every_denial_is_counted() {
    let events = Events::record();
    let metrics = Arc::new(Metrics::default());
    let bench = Bench::with(probe(), "", |config| config.metrics = metrics.clone()).await;
    let reach = bench.status(json!({ "do": "reach" })).await;
    assert_eq!((reach["environment"].as_u64(), reach["arguments"].as_u64()), (Some(0), Some(0)), "{reach}");
    for denied in ["file", "directory", "connect", "listen", "udp", "lookup", "http", "cluster"] {
        assert!(reach[denied].is_string(), "{denied}: {reach}");
    }
    assert!(reach["now"].as_u64() > Some(1_700_000_000), "{reach}");
    assert_ne!(reach["random"], bench.status(json!({ "do": "reach" })).await["random"]);
    let count = |denial: Denial| {
        let labels = format!("capability=\"{}\",reason=\"{}\"}} ", denial.capability(), denial.reason());
        let text = metrics.render();
        text.lines().find_map(|line| line.split_once(&labels)?.1.parse::<u64>().ok()).unwrap_or_default()
    };
    // Two runs; connect, listen and udp are sockets.
    assert_eq!((count(Denial::Socket), count(Denial::NameLookup)), (6, 2));
    assert_eq!((count(Denial::HttpHost), count(Denial::ClusterRead)), (2, 2));
    // The question for folders, which a guest asks once however many files it tries.
    assert_eq!(count(Denial::Files), 2);
    assert_eq!(events.of_guests().iter().filter(|line| line.to_string().contains("denied files")).count(), 2);
    let said = events.of_guests().iter().filter(|line| line.to_string().contains("denied a socket")).count();
    assert_eq!(said, 2, "once a run, with what to do instead");
}

#[tokio::test]
async fn a_guest_that_asks_again_and_again_is_told_of_once() {
    let events = Events::record();
    let bench = Bench::new("").await;
    assert_eq!(bench.status(json!({ "do": "sockets", "times": 2000 })).await["denied"], 2000);
    assert_eq!(events.of_guests().len(), 1);
}

/// Each interface that a guest can import either passes the gate or reaches nothing. One that is added has to be put here, and there.
#[test]
fn every_import_is_asked_for_at_the_gate_or_reaches_nothing() {
    const GATED: &[&str] = &[
        "berth:plugin/cluster",
        "berth:plugin/log",
        "wasi:filesystem/preopens",
        "wasi:http/outgoing-handler",
        "wasi:sockets/ip-name-lookup",
        "wasi:sockets/tcp-create-socket",
        "wasi:sockets/udp-create-socket",
    ];
    const REACH_NOTHING: &[&str] = &[
        // Types, and what acts only on a handle that the gate has let be made.
        "berth:plugin/types",
        "wasi:http/types",
        "wasi:sockets/instance-network",
        "wasi:sockets/network",
        "wasi:sockets/tcp",
        "wasi:sockets/udp",
        "wasi:io/",
        // No folder, no variable, no argument, no input; output is the log of the run.
        "wasi:filesystem/types",
        "wasi:cli/",
        // The time, and numbers.
        "wasi:clocks/",
        "wasi:random/",
    ];
    let imports = imports(probe());
    let covers =
        |list: &[&str], import: &str| list.iter().any(|known| import == *known || (known.ends_with('/') && import.starts_with(known)));
    for import in &imports {
        assert!(covers(GATED, import) != covers(REACH_NOTHING, import), "{import} is not judged");
    }
    for gated in GATED {
        assert!(imports.iter().any(|import| import == gated), "the probe does not try {gated}");
    }
}

/// The interfaces that a component imports, without their versions.
fn imports(component: &[u8]) -> Vec<String> {
    use wasmparser::{Parser, Payload};
    let mut depth = 0_usize;
    let mut names = Vec::new();
    for payload in Parser::new(0).parse_all(component) {
        match payload.expect("a component") {
            Payload::ModuleSection { .. } | Payload::ComponentSection { .. } => depth += 1,
            Payload::End(_) => depth = depth.saturating_sub(1),
            Payload::ComponentImportSection(section) if depth == 0 => {
                names.extend(
                    section.into_iter().map(|import| import.expect("an import").name.name.split('@').next().unwrap_or_default().to_owned()),
                );
            }
            _ => {}
        }
    }
    names
}

/// Whether code from this folder is mapped.
fn is_mapped(folder: &Path) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("Linux says so");
    let folder = folder.to_str().expect("a plain path");
    maps.lines().any(|line| line.contains(" r-xp ") && line.contains(folder))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn code_that_rests_is_given_back_and_mapped_again_even_if_it_has_left_the_cache() {
    let folder = tempfile::tempdir().expect("a folder");
    let cache = folder.path().join("compiled");
    let bench = Bench::with(probe(), "", |config| config.cache_dir.clone_from(&cache)).await;
    bench.still_works().await;
    assert!(is_mapped(&cache));
    std::fs::remove_dir_all(&cache).expect("it is there");
    let began = Instant::now();
    while is_mapped(&cache) {
        assert!(began.elapsed() < Duration::from_secs(60), "it is still mapped");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    bench.still_works().await;
    assert!(is_mapped(&cache));
}
