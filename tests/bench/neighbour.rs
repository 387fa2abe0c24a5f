//! P9: how long mails take while the handler of another kind misbehaves on the same host.

use std::time::Instant;

use berth_tests::{resource::Resource, stage::probe};
use serde_json::json;

use crate::{
    bed::Bed,
    figure::{Aim, Figure, percentile},
    idle::until_serving,
    latency::Seen,
    system::{Operator, System, Work},
};

const SAMPLES: usize = 200;

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
        bed.push("probe", &probe(&json!({})), "").await?;
        let mut host = Operator::synced(&bed, System::Berth, &Work::of(Resource::EMAIL)).await?;
        until_serving(&mut host, 2).await?;
        let alone = Seen::sample(&bed, "alone", SAMPLES).await?;
        let object = |number| Resource::PROBE.object(bed.cluster.namespace(), &format!("n{number}"), spec.clone());
        bed.create(Resource::PROBE, (0..count).map(object).collect()).await?;
        let started = Instant::now();
        let beside = Seen::sample(&bed, "beside", SAMPLES).await?;
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
