//! P14: a million reconciles, with traps, reloads and hardly a write; memory must not grow with them.

use std::time::{Duration, Instant};

use berth_tests::{
    component::relabelled,
    resource::Resource,
    stage::{guest, probe},
};
use serde_json::json;

use crate::{
    bed::Bed,
    figure::{Aim, Figure},
    idle::until_serving,
    system::{Operator, System, Work},
};

const RECONCILES: f64 = 1e6;
/// Objects that run again and again, each once a second at most.
const OBJECTS: usize = 2_000;
/// Objects whose handler traps once a second, so that one run in a hundred is a trap.
const TRAPPING: usize = OBJECTS / 100;
const CONFIG: &str = "backoff: {base: 1s, max: 1s}\n";
const RELOAD: Duration = Duration::from_secs(60);
/// Until which nothing that is built up once is held against the host.
const WARM_UP: f64 = 0.2;
/// No system takes longer than a few milliseconds each.
const PATIENCE: Duration = Duration::from_secs(3 * 3600);

pub async fn measure() -> anyhow::Result<Vec<Figure>> {
    let bed = Bed::new("endurance").await?;
    bed.plugin(Resource::EMAIL).await?;
    bed.push("probe", &probe(&json!({})), CONFIG).await?;
    let mut host = Operator::start(&bed, System::Berth, &Work::on(&[])).await?;
    until_serving(&mut host, 2).await?;
    for number in 0..OBJECTS {
        bed.cluster.create(Resource::PROBE, &format!("again{number}"), json!({"do": "requeue0"})).await;
    }
    for number in 0..TRAPPING {
        bed.cluster.create(Resource::PROBE, &format!("trap{number}"), json!({"do": "trap"})).await;
    }
    let (started, mut reloaded, mut reloads) = (Instant::now(), Instant::now(), 0);
    let mut before = None;
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let done = host.reconciles().await?;
        if before.is_none() && done >= RECONCILES * WARM_UP {
            before = Some((done, host.memory()?.dirty));
        }
        if done >= RECONCILES {
            break;
        }
        anyhow::ensure!(started.elapsed() < PATIENCE, "{done} reconciles after {PATIENCE:?}\n{}", host.log_tail());
        if reloaded.elapsed() >= RELOAD {
            (reloaded, reloads) = (Instant::now(), reloads + 1);
            bed.push("probe", &relabelled(&probe(&json!({})), &format!("reload {reloads}")), CONFIG).await?;
            bed.plugin_as(Resource::EMAIL, &relabelled(&guest("email_request"), &format!("reload {reloads}"))).await?;
        }
    }
    let rate = RECONCILES / started.elapsed().as_secs_f64();
    let (from, memory) = before.ok_or_else(|| anyhow::anyhow!("the warm-up is part of it"))?;
    let done = host.reconciles().await?;
    let growth = (host.memory()?.dirty - memory) / (done - from) * 1e5 / 1e6;
    eprintln!("P14: {done} reconciles at {rate:.0}/s, {reloads} reloads: {growth:.2} MB per 100,000");
    host.kill();
    Ok(vec![
        Figure::alone("P14", &format!("growth per 100,000 reconciles, {reloads} reloads"), "MB", &[growth], &[Aim::AtMost(1.0)]),
        Figure::alone("P14", "reconciles without a write", "1/s", &[rate], &[]),
    ])
}
