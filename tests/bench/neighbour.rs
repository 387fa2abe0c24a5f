//! P9: how long mails take while the handler of another kind misbehaves on the same host.

use std::time::{Duration, Instant};

use berth_tests::{eventually::eventually, resource::Resource, stage::probe};
use futures::{StreamExt, stream};
use serde_json::{Value, json};

use crate::{
    bed::Bed,
    figure::{Aim, Figure, percentile},
    latency::Seen,
    system::{Operator, System, Work},
};

const SAMPLES: usize = 200;
/// Between two samples.
const PAUSE: Duration = Duration::from_millis(20);

pub async fn measure() -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    let neighbours = [
        ("50 that loop until their CPU is spent", json!({"do": "loop"}), 50),
        ("50 that take memory until there is none", json!({"do": "bomb"}), 50),
        ("50 that trap at once", json!({"do": "trap"}), 50),
        ("10,000 in the queue that take 1 s each", json!({"do": "sleep", "ms": 1_000}), 10_000),
    ];
    for (what, spec, count) in neighbours {
        let bed = Bed::new("neighbour").await?;
        bed.plugin(Resource::EMAIL).await?;
        bed.cluster.push("probe", &probe(&json!({})), "").await;
        let mut host = Operator::synced(&bed, System::Berth, &Work::of(Resource::EMAIL)).await?;
        eventually(Duration::from_secs(30), async || match host.metrics().await {
            Ok(metrics) if metrics.value("berth_plugin_info", &[("plugin", "probe")]).is_some() => Ok(()),
            _ => Err("the probe does not serve"),
        })
        .await;
        let alone = sample(&bed, "alone").await?;
        fill(&bed, &spec, count).await;
        let started = Instant::now();
        let beside = sample(&bed, "beside").await?;
        let time = started.elapsed();
        host.kill();
        let (alone, beside) = (percentile(&alone, 0.99), percentile(&beside, 0.99));
        eprintln!("P9: {what}: p99 {beside:.1} ms instead of {alone:.1} ms, in {time:.0?}");
        figures.push(Figure::alone(
            "P9",
            &format!("p99 of mails beside {what}, over that alone"),
            "×",
            &[beside / alone],
            &[Aim::AtMost(1.5)],
        ));
    }
    Ok(figures)
}

async fn sample(bed: &Bed, prefix: &str) -> anyhow::Result<Vec<f64>> {
    let mut seen = Seen::of(bed).await?;
    let mut times = Vec::new();
    for number in 0..SAMPLES {
        times.push(seen.until_sent(bed, &format!("{prefix}{number}")).await? * 1e3);
        tokio::time::sleep(PAUSE).await;
    }
    Ok(times)
}

async fn fill(bed: &Bed, spec: &Value, count: usize) {
    stream::iter(0..count)
        .for_each_concurrent(32, async |number| drop(bed.cluster.create(Resource::PROBE, &format!("n{number}"), spec.clone()).await))
        .await;
}
