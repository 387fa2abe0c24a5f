//! P12: the same with more objects and with more plugins. What is aimed at is a cost that does not grow with the number.

use std::time::Duration;

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
/// What is measured twice differs by so much here.
const NOISE: f64 = 1.25;

pub async fn measure() -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    let mut first = None;
    for factor in [1_u32, 4, 16] {
        let count = OBJECTS * factor;
        let bed = Bed::new("growth").await?;
        bed.plugin(KIND).await?;
        let (rate, cpu) = drain_on(&bed, System::Berth, KIND, count as usize).await?;
        let bed = Bed::new("growth").await?;
        bed.plugin(KIND).await?;
        let (empty, _) = at_rest(&bed, System::Berth).await?;
        bed.seed(KIND, count as usize, 2_400).await?;
        let (full, _) = at_rest(&bed, System::Berth).await?;
        let each = (full.dirty - empty.dirty) / f64::from(count);
        let look = cost_of_a_look(&bed, System::Berth, count, Duration::from_secs(10)).await?;
        eprintln!("P12: {count} objects: {rate:.0}/s, {:.3} ms, {each:.0} B, {:.1} µs", cpu * 1e3, look * 1e6);
        let (cpu_of_one, each_of_one, look_of_one) = *first.get_or_insert((cpu, each, look));
        let aims = |of_one: f64| if factor == 1 { vec![] } else { vec![Aim::AtMost(of_one * NOISE)] };
        figures.push(Figure::alone("P12", &format!("{count} objects: drain"), "objects/s", &[rate], &[]));
        figures.push(Figure::alone("P12", &format!("{count} objects: CPU of a reconcile"), "ms", &[cpu * 1e3], &aims(cpu_of_one * 1e3)));
        figures.push(Figure::alone("P12", &format!("{count} objects of 2,400 B: memory of each"), "B", &[each], &aims(each_of_one)));
        figures.push(Figure::alone("P12", &format!("{count} objects: CPU of a look"), "µs", &[look * 1e6], &aims(look_of_one * 1e6)));
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
