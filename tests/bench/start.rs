//! P13: from the start of a process until it is ready with every plugin serving, and until it has listed every object as well.

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
        deliver(&bed, handlers - 2).await?;
        bed.seed(Resource::EMAIL, OBJECTS, 500).await?;
        let (cold, _) = start(&bed, System::Berth, handlers).await?;
        let cold = cold.as_secs_f64();
        eprintln!("P13: {handlers} plugins, nothing compiled yet: {cold:.2} s");
        let (mut ready, mut listed) = (Vec::new(), BTreeMap::<System, Vec<f64>>::new());
        for _ in 0..ROUNDS {
            for system in [System::Berth, System::KubeRs, System::ControllerRuntime] {
                if system != System::Berth && handlers > 2 {
                    continue;
                }
                let (serving, all) = start(&bed, system, handlers).await?;
                listed.entry(system).or_default().push(all.as_secs_f64() * 1e3);
                if system == System::Berth {
                    ready.push(serving.as_secs_f64() * 1e3);
                }
            }
        }
        eprintln!("P13: {handlers} plugins, compiled before: {ready:.0?} ms; all listed: {listed:.0?} ms");
        let what = format!("start → ready, {handlers} plugins serving");
        figures.push(Figure::alone("P13", &format!("{what}, compiled before"), "ms", &ready, &[Aim::AtMost(most)]));
        figures.push(Figure::new("P13", &format!("start → {OBJECTS} objects listed, {handlers} plugins"), "ms", &listed, &[]));
        figures.push(Figure::alone("P13", &format!("{what}, nothing compiled yet"), "s", &[cold], &[]));
    }
    Ok(figures)
}

/// Until it is ready and serves, and until it has listed all objects too.
async fn start(bed: &Bed, system: System, handlers: u32) -> anyhow::Result<(Duration, Duration)> {
    // A Lease that the last one held has run out, or was released.
    let started = Instant::now();
    let work = Work::on(&[Resource::EMAIL, Resource::JOB]);
    let mut operator = Operator::start(bed, system, &work).await?;
    if system == System::Berth {
        until_serving(&mut operator, handlers).await?;
    }
    let ready = started.elapsed();
    operator.until_synced(OBJECTS).await;
    let listed = started.elapsed();
    operator.end().await?;
    Ok((ready, listed))
}
