//! P12: the same with more objects and with more plugins. What is aimed at is a cost that does not grow with the number.

use std::{collections::BTreeMap, time::Duration};

use berth_tests::resource::Resource;

use crate::{
    bed::Bed,
    cache::at_rest,
    drain::drain_on,
    figure::{Aim, Figure},
    idle::{deliver, until_serving},
    resync::cost_of_a_look,
    system::{Operator, System, Work},
};

const KIND: Resource = Resource::EMAIL;
const OBJECTS: u32 = 1_000;
const FACTORS: [u32; 3] = [1, 4, 16];
/// At objects that have nothing to do.
const LOOKS: u32 = 32_000;
/// What is measured twice differs by so much here.
const NOISE: f64 = 1.25;

pub async fn measure() -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    let none = Bed::new("growth").await?;
    none.plugin(KIND).await?;
    let (empty, _) = at_rest(&none, System::Berth).await?;
    let mut first = None;
    for factor in FACTORS {
        let count = OBJECTS * factor;
        let (mut rates, mut costs) = (BTreeMap::new(), BTreeMap::new());
        // What the API server needs for more objects is in both.
        for system in [System::Berth, System::KubeRs] {
            let bed = Bed::new("growth").await?;
            bed.plugin(KIND).await?;
            let (rate, cpu) = drain_on(&bed, system, KIND, count as usize).await?;
            eprintln!("P12: {count} objects: {system}: {rate:.0}/s, {:.3} ms", cpu * 1e3);
            rates.insert(system, vec![rate]);
            costs.insert(system, vec![cpu * 1e3]);
        }
        let bed = Bed::new("growth").await?;
        bed.plugin(KIND).await?;
        bed.seed(KIND, count as usize, 2_400).await?;
        let (full, _) = at_rest(&bed, System::Berth).await?;
        let each = (full.dirty - empty.dirty) / f64::from(count);
        // As many looks a second, and as many of them in all, whatever the number.
        let period = Duration::from_secs(factor.into());
        let look = cost_of_a_look(&bed, System::Berth, count, period, LOOKS / count).await? * 1e6;
        eprintln!("P12: {count} objects: {each:.0} B, {look:.1} µs");
        let cpu = costs[&System::Berth][0];
        let (cpu_of_one, each_of_one, look_of_one) = *first.get_or_insert((cpu, each, look));
        let aims = |of_one: f64| if factor == 1 { vec![] } else { vec![Aim::AtMost(of_one * NOISE)] };
        figures.push(Figure::new("P12", &format!("{count} objects: drain"), "objects/s", &rates, &[]));
        figures.push(Figure::new("P12", &format!("{count} objects: CPU of a reconcile"), "ms", &costs, &aims(cpu_of_one)));
        figures.push(Figure::alone("P12", &format!("{count} objects of 2,400 B: memory of each"), "B", &[each], &aims(each_of_one)));
        figures.push(Figure::alone("P12", &format!("{count} objects: CPU of a look"), "µs", &[look], &aims(look_of_one)));
    }
    let mut first = None;
    for plugins in [1_u32, 4, 16, 64] {
        let bed = Bed::new("plugins").await?;
        bed.plugin(KIND).await?;
        deliver(&bed, plugins - 1).await?;
        // Compiled before, so that no compiler runs beside what is measured.
        let mut host = Operator::start(&bed, System::Berth, &Work::of(KIND)).await?;
        until_serving(&mut host, plugins).await?;
        host.end().await?;
        let (rate, cpu) = drain_on(&bed, System::Berth, KIND, OBJECTS as usize).await?;
        eprintln!("P12: {plugins} plugins: {rate:.0}/s, {:.3} ms", cpu * 1e3);
        let of_one = *first.get_or_insert(cpu);
        let aims = if plugins == 1 { vec![] } else { vec![Aim::AtMost(of_one * 1e3 * NOISE)] };
        figures.push(Figure::alone("P12", &format!("{plugins} plugins: drain of {OBJECTS} objects"), "objects/s", &[rate], &[]));
        figures.push(Figure::alone("P12", &format!("{plugins} plugins: CPU of a reconcile"), "ms", &[cpu * 1e3], &aims));
    }
    Ok(figures)
}
