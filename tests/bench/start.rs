//! P13: from the start of a process until it serves: ready, every plugin serving, every object listed.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use berth_tests::resource::Resource;

use crate::{
    bed::Bed,
    figure::{Aim, Figure},
    idle::{deliver, until_serving},
    system::{Operator, System, Work},
};

const OBJECTS: usize = 10_000;
const ROUNDS: usize = 5;

pub async fn measure() -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for (handlers, most) in [(2_u32, 300.0), (100, 2_000.0)] {
        let bed = Bed::new("start").await?.with_cold_cache();
        bed.plugin(Resource::EMAIL).await?;
        bed.plugin(Resource::JOB).await?;
        deliver(&bed, handlers - 2).await;
        bed.seed(Resource::EMAIL, OBJECTS, 500).await?;
        let cold = start(&bed, System::Berth, handlers).await?.as_secs_f64();
        eprintln!("P13: {handlers} plugins, nothing compiled yet: {cold:.2} s");
        let mut times = BTreeMap::<System, Vec<f64>>::new();
        for _ in 0..ROUNDS {
            for system in [System::Berth, System::KubeRs, System::ControllerRuntime] {
                if system != System::Berth && handlers > 2 {
                    continue;
                }
                times.entry(system).or_default().push(start(&bed, system, handlers).await?.as_secs_f64() * 1e3);
            }
        }
        eprintln!("P13: {handlers} plugins, compiled before: {times:.0?} ms");
        let what = format!("start → serving {handlers} plugins with {OBJECTS} objects");
        figures.push(Figure::new("P13", &format!("{what}, compiled before"), "ms", &times, &[Aim::AtMost(most)]));
        figures.push(Figure::alone("P13", &format!("{what}, nothing compiled yet"), "s", &[cold], &[]));
    }
    Ok(figures)
}

async fn start(bed: &Bed, system: System, handlers: u32) -> anyhow::Result<Duration> {
    // A Lease that the last one held has run out, or was released.
    let started = Instant::now();
    let work = Work::on(&[Resource::EMAIL, Resource::JOB]);
    let mut operator = Operator::start(bed, system, &work).await?;
    if system == System::Berth {
        until_serving(&mut operator, handlers).await?;
    }
    operator.until_synced(OBJECTS).await;
    let time = started.elapsed();
    operator.end().await?;
    Ok(time)
}
