//! P6: what the informer's cache costs, at rest and at its highest while it fills, and how long that takes.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use berth_tests::resource::Resource;

use crate::{
    bed::Bed,
    figure::{Aim, Figure},
    quick,
    system::{Memory, Operator, System, Work},
};

/// After the list is complete, as long as idle handlers have.
const QUIET: Duration = Duration::from_secs(30);
const MB: f64 = 1e6;
const KIND: Resource = Resource::EMAIL;

pub async fn measure() -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    let none = Bed::new("empty").await?;
    none.plugin(KIND).await?;
    let (empty, _) = at_rest(&none, System::Berth).await?;
    let sizes = quick(&[(10_000, 2_400)][..], &[(10_000, 500), (10_000, 2_400), (10_000, 10_000), (100_000, 500)]);
    for &(count, size) in sizes {
        let bed = Bed::new("cache").await?;
        bed.plugin(KIND).await?;
        bed.seed(KIND, count, size).await?;
        #[expect(clippy::cast_precision_loss, reason = "bytes")]
        let json = bed.bytes(KIND).await as f64;
        let (mut steady, mut peaks, mut times) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for system in System::ALL {
            if system == System::Kopf && count > 10_000 {
                continue;
            }
            let (memory, time) = at_rest(&bed, system).await?;
            eprintln!(
                "P6: {system:>18}: {count} objects, {:.1} MB of JSON: {:.1} MB, at most {:.1} MB, in {time:.1?}",
                json / MB,
                memory.private / MB,
                memory.peak / MB
            );
            steady.insert(system, vec![memory.private / MB]);
            peaks.insert(system, vec![memory.peak / MB]);
            times.insert(system, vec![time.as_secs_f64()]);
        }
        let what = format!("{count} objects of {size} B");
        #[expect(clippy::cast_precision_loss, reason = "a number of objects")]
        let bound = (1.3 * json + 400.0 * count as f64) / MB;
        let ours = steady[&System::Berth][0];
        let cache = ours - empty.private / MB;
        let aims: &[Aim] = if size == 2_400 { &[Aim::AtMost(40.0)] } else { &[] };
        figures.push(Figure::new("P6", &format!("{what}, memory in all"), "MB", &steady, aims));
        let name = format!("{what} ({:.1} MB of JSON), what they add", json / MB);
        figures.push(Figure::alone("P6", &name, "MB", &[cache], &[Aim::AtMost(bound)]));
        figures.push(Figure::new("P6", &format!("{what}, most memory during the list"), "MB", &peaks, &[Aim::AtMost(1.3 * ours)]));
        figures.push(Figure::new("P6", &format!("{what}, start until listed"), "s", &times, &[]));
    }
    Ok(figures)
}

/// Memory of a system that has listed everything, and how long that took.
pub async fn at_rest(bed: &Bed, system: System) -> anyhow::Result<(Memory, Duration)> {
    let started = Instant::now();
    let operator = Operator::synced(bed, system, &Work::of(KIND)).await?;
    let time = started.elapsed();
    tokio::time::sleep(QUIET).await;
    let memory = operator.memory()?;
    operator.end().await?;
    Ok((memory, time))
}
