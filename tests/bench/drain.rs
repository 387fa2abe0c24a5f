//! P1: a backlog is worked off. Rate from the first effect to the last, and CPU of the operator's process in that time.

use std::{collections::BTreeMap, time::Duration};

use berth_tests::resource::Resource;

use crate::{
    bed::Bed,
    figure::{Aim, Figure},
    quick,
    system::{Operator, System, Work},
};

/// No system needs a tenth of a second an object.
const PATIENCE: Duration = Duration::from_secs(1000);

pub async fn measure() -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for &(count, rounds) in quick(&[(1_000, 3)][..], &[(1_000, 3), (10_000, 1)]) {
        for kind in [Resource::EMAIL, Resource::JOB] {
            let (mut rates, mut costs) = (BTreeMap::<_, Vec<_>>::new(), BTreeMap::<_, Vec<_>>::new());
            for round in 0..rounds {
                for system in System::ALL {
                    // The slowest by far says nothing new on more objects.
                    if system == System::Kopf && count > 1_000 {
                        continue;
                    }
                    let (rate, cost) = drain(system, kind, count).await?;
                    eprintln!("P1: {system:>18} round {round}: {count} {} at {rate:.0}/s, {:.3} ms each", kind.plural, cost * 1e3);
                    rates.entry(system).or_default().push(rate);
                    costs.entry(system).or_default().push(cost * 1e3);
                }
            }
            let aims = [Aim::AbovePeer(1.2, System::ControllerRuntime), Aim::AbovePeer(0.97, System::KubeRs)];
            figures.push(Figure::new("P1", &format!("drain of {count} {}", kind.plural), "objects/s", &rates, &aims));
            let aims = [Aim::BelowPeer(1.0, System::KubeRs)];
            figures.push(Figure::new("P1", &format!("CPU per object, {count} {}", kind.plural), "ms", &costs, &aims));
        }
    }
    Ok(figures)
}

/// Objects a second, and CPU seconds an object.
async fn drain(system: System, kind: Resource, count: usize) -> anyhow::Result<(f64, f64)> {
    let bed = Bed::new("drain").await?;
    if system == System::Berth {
        bed.plugin(kind).await?;
    }
    drain_on(&bed, system, kind, count).await
}

/// The same where there are no objects of the kind yet, and all plugins.
pub async fn drain_on(bed: &Bed, system: System, kind: Resource, count: usize) -> anyhow::Result<(f64, f64)> {
    bed.fill(kind, count).await?;
    let operator = Operator::start(bed, system, &Work::of(kind)).await?;
    let first = bed.until_effects(kind, 1, PATIENCE).await?;
    let (cpu, done) = (operator.cpu()?, bed.effects(kind));
    let last = bed.until_effects(kind, count, PATIENCE).await?;
    bed.until_all_settled(kind).await;
    let cpu = operator.cpu()? - cpu;
    operator.end().await?;
    #[expect(clippy::cast_precision_loss, reason = "a number of objects")]
    let drained = (count - done) as f64;
    Ok((drained / (last - first).as_secs_f64(), cpu.as_secs_f64() / drained))
}
