//! P10: every object is looked at again although there is nothing to do.

use std::{collections::BTreeMap, time::Duration};

use berth_tests::resource::Resource;

use crate::{
    bed::Bed,
    figure::{Aim, Figure},
    quick,
    system::{Operator, System, Work},
};

const KIND: Resource = Resource::EMAIL;
/// How many times each object is looked at while it is measured.
const ROUNDS: u32 = 3;
/// How long a system is watched at least that looks at nothing.
const QUIET: Duration = Duration::from_secs(20);

pub async fn measure() -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for &(count, period) in quick(&[(10_000_u32, 10)][..], &[(10_000, 10), (100_000, 60)]) {
        let bed = Bed::new("resync").await?;
        bed.plugin(KIND).await?;
        bed.seed(KIND, count as usize, 500).await?;
        let mut costs = BTreeMap::new();
        // kopf has no resync.
        for system in [System::Berth, System::KubeRs, System::ControllerRuntime] {
            let cost = cost_of_a_look(&bed, system, count, Duration::from_secs(period), ROUNDS).await?;
            eprintln!("P10: {system:>18}: {count} objects: {:.1} µs a look", cost * 1e6);
            costs.insert(system, vec![cost * 1e6]);
        }
        // 5,000 a second on one core are 200 µs each.
        let aims = [Aim::AtMost(200.0), Aim::BelowPeer(1.0, System::ControllerRuntime), Aim::BelowPeer(2.0, System::KubeRs)];
        figures.push(Figure::new("P10", &format!("CPU per look, {count} objects with nothing to do"), "µs", &costs, &aims));
    }
    Ok(figures)
}

/// CPU seconds for each time that an object is looked at, of so many times for each object.
pub async fn cost_of_a_look(bed: &Bed, system: System, count: u32, period: Duration, rounds: u32) -> anyhow::Result<f64> {
    let (quiet, time) = (period.max(QUIET), period * rounds);
    let idle = spent(bed, system, Duration::from_secs(3600), quiet).await?.div_duration_f64(quiet);
    let busy = spent(bed, system, period, time).await?;
    Ok((busy.as_secs_f64() - idle * time.as_secs_f64()) / f64::from(count * rounds))
}

/// CPU of a system that has listed everything, over some time.
async fn spent(bed: &Bed, system: System, resync: Duration, time: Duration) -> anyhow::Result<Duration> {
    let operator = Operator::synced(bed, system, &Work { resync, ..Work::of(KIND) }).await?;
    // Past what a start costs.
    tokio::time::sleep(Duration::from_secs(8)).await;
    let before = operator.cpu()?;
    tokio::time::sleep(time).await;
    let spent = operator.cpu()? - before;
    // Not killed: the next one would have to wait for its Lease, and would look at everything for the first time while it is measured.
    operator.end().await?;
    Ok(spent)
}
