//! P2: what it costs to run a handler in a fresh sandbox with all limits on, beside the same handler natively.

use std::{
    collections::BTreeMap,
    hint::black_box,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::anyhow;
use berth_host::{
    fence::{self, BootTime},
    object::{GroupKind, Key, Object, ObjectKey},
    package::{Config, Digest, Package},
    plugin::{Runtime, RuntimeConfig},
    reads::{Page, Query, ReadError, Reader, Target},
    reconcile::{Next, Phase, Request},
};
use berth_sdk::prelude::*;
use berth_tests::{stage::guest, workspace};
use futures::future::{BoxFuture, FutureExt};
use serde_json::json;

use crate::figure::{Aim, Figure, Spread};

// Not the crate: as a library too, what ships would be a third larger.
#[path = "../../plugins/report-job/src/job.rs"]
mod job;

/// The handler of ReportJob, to be run natively.
struct Exporter;

#[reconciler(progress(settled = ["Done", "Failed"]), dead_letter(after = 5), hosts("$settings.exporter"))]
impl Reconciler for Exporter {
    type Object = job::ReportJob;

    fn reconcile(job: &job::ReportJob, ctx: &Context) -> Result<Action, Error> {
        job::export(job, ctx, None)
    }
}

const ROUNDS: usize = 20;
const RUNS: u32 = 500;
/// After so long a handler's code is no longer in memory.
const REST: Duration = Duration::from_secs(16);
const RESTS: usize = 5;
/// How long a reconcile with one write takes at least, in µs: that is the CPU time of the API server for the write.
const TIME: f64 = 4e3;
/// CPU of a reconcile by kube-rs, in µs, by P1.
const CPU: f64 = 0.55e3;

pub async fn measure() -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    let folder = tempfile::tempdir()?;
    let runtime = Runtime::new(RuntimeConfig::new(workspace::berth()?, folder.path().join("compiled")))?;
    let component: bytes::Bytes = guest("report_job").into();
    let refused = |refusal| anyhow!("{refusal:?}");
    let config = Config::parse(workspace::deploy("plugins/report-job.yaml")?.as_bytes()).map_err(refused)?;
    let digest = Digest::of(&component);
    let package = Package { name: "report-job".into(), component, digest, config, config_hash: String::new() };
    let handler = runtime.prepare(&package).await.map_err(refused)?.handler(&package).map_err(refused)?;
    let (gate, leadership) = fence::gate();
    gate.open(BootTime::now() + Duration::from_secs(3600));
    let fence = leadership.current().ok_or_else(|| anyhow!("the gate is open"))?;
    for (size, most) in [(2_000, Some(60.0)), (16_000, None), (100_000, None)] {
        // Its time has not come: the handler reads all of the object and has nothing to send.
        let text = object(size);
        let request = Request {
            key: Key {
                kind: GroupKind { group: "batch.acme.io".into(), kind: "ReportJob".into() },
                object: ObjectKey::new(Some("t1"), "j1"),
            },
            object: Arc::new(Object::parse(&text)?),
            phase: Phase::Apply,
            attempt: 0,
            last_failure: None,
            idempotency_key: "reportjobs.batch.acme.io/t1/j1/u1".into(),
            fence: fence.clone(),
            reader: Arc::new(Nothing),
        };
        let outcome = handler.reconcile(request.clone()).await?;
        anyhow::ensure!(matches!(outcome.next, Next::After(_)), "the handler has done something else: {outcome:?}");
        let (mut native, mut fresh) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            native.push(per_run(|| {
                let ctx = testing::Script::new().setting("exporter", "http://reports.demo").at("2026-11-29T12:00:00Z").context();
                let value: serde_json::Value = serde_json::from_str(black_box(&text)).expect("it was parsed before");
                drop(black_box(testing::reconcile::<Exporter>(&value, &ctx)));
            }));
            let started = Instant::now();
            for _ in 0..RUNS {
                drop(black_box(handler.reconcile(request.clone()).await?));
            }
            fresh.push(started.elapsed().as_secs_f64() * 1e6 / f64::from(RUNS));
        }
        eprintln!("P2: {size} B: {:?} natively, {:?} in a sandbox", Spread::of(&native), Spread::of(&fresh));
        let aims: Vec<Aim> = most.map(Aim::AtMost).into_iter().collect();
        figures.push(Figure::alone("P2", &format!("a run in a fresh sandbox with all limits, object of {size} B"), "µs", &fresh, &aims));
        figures.push(Figure::alone("P2", &format!("the same handler natively, object of {size} B"), "µs", &native, &[]));
        if size == 2_000 {
            let adds = Spread::of(&fresh).median - Spread::of(&native).median;
            for (name, of, aims) in [
                ("what the sandbox adds, of the time of a reconcile with one write (4 ms)", TIME, &[Aim::AtMost(3.0)][..]),
                ("what the sandbox adds, of the CPU of a reconcile by kube-rs (0.55 ms)", CPU, &[]),
            ] {
                figures.push(Figure::alone("P2", name, "%", &[adds / of * 100.0], aims));
            }
            let mut cold = Vec::new();
            for _ in 0..RESTS {
                tokio::time::sleep(REST).await;
                let started = Instant::now();
                drop(handler.reconcile(request.clone()).await?);
                cold.push(started.elapsed().as_secs_f64() * 1e3 - Spread::of(&fresh).median / 1e3);
            }
            let name = "a run after a rest, its code mapped anew, less one without";
            figures.push(Figure::alone("P2", name, "ms", &cold, &[Aim::AtMost(2.0)]));
        }
    }
    Ok(figures)
}

fn per_run(mut run: impl FnMut()) -> f64 {
    let started = Instant::now();
    for _ in 0..RUNS {
        run();
    }
    started.elapsed().as_secs_f64() * 1e6 / f64::from(RUNS)
}

/// A job of this size whose time is far off.
fn object(size: usize) -> String {
    let of = |annotations: BTreeMap<String, String>| {
        json!({
            "apiVersion": "batch.acme.io/v1", "kind": "ReportJob",
            "metadata": {
                "name": "j1", "namespace": "t1", "uid": "u1", "generation": 1, "resourceVersion": "1",
                "labels": {"workqueue.acme.io/phase": "pending"}, "annotations": annotations,
            },
            "spec": {"report": "sales", "format": "pdf", "priority": 0, "notBefore": "2999-01-01T00:00:00Z"},
            "status": {"phase": "Pending"},
        })
        .to_string()
    };
    let mut annotations = BTreeMap::new();
    while of(annotations.clone()).len() < size {
        annotations.insert(format!("example.com/note-{}", annotations.len()), "a value as people and tools leave them ".repeat(3));
    }
    of(annotations)
}

#[derive(Debug)]
struct Nothing;

impl Reader for Nothing {
    fn get(&self, _: Target) -> BoxFuture<'_, Result<Option<Arc<Object>>, ReadError>> {
        async { Ok(None) }.boxed()
    }

    fn list(&self, _: Query) -> BoxFuture<'_, Result<Page, ReadError>> {
        async { Ok(Page { items: Vec::new(), next: None }) }.boxed()
    }
}
