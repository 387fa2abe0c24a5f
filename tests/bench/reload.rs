//! P4: a plugin is changed while it works. From the write of its ConfigMap to the first object that the new version has finished.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use berth_tests::{component::relabelled, resource::Resource, stage::guest};
use futures::TryStreamExt;
use kube::api::WatchEvent;

use crate::{
    bed::{Bed, from_now},
    figure::{Aim, Figure, percentile},
    idle::{deliver, until_serving},
    latency::Seen,
    system::{Operator, System, Work},
};

const RELOADS: usize = 100;
/// Other kinds on the host: the one that is measured, and those that idle.
const OTHERS: u32 = 49;
/// Between two new jobs.
const BEAT: Duration = Duration::from_millis(20);
/// Jobs that are there at a time: those of ten seconds.
const KEPT: usize = 500;
const PATIENCE: Duration = Duration::from_secs(30);

pub async fn measure() -> anyhow::Result<Vec<Figure>> {
    let bed = Bed::new("reload").await?;
    bed.plugin(Resource::EMAIL).await?;
    bed.plugin(Resource::JOB).await?;
    deliver(&bed, OTHERS - 1).await?;
    let work = Work::on(&[Resource::EMAIL, Resource::JOB]);
    let mut host = Operator::synced(&bed, System::Berth, &work).await?;
    until_serving(&mut host, OTHERS + 1).await?;
    let stop = AtomicBool::new(false);
    let jobs = bed.keep_filling(Resource::JOB, "j", BEAT, KEPT, &stop);
    let reloads = async {
        // Both are as busy before as during.
        let alone = Seen::sample(&bed, "alone", RELOADS * 2).await?;
        let before = settled(&host).await?;
        let (fresh, during) = tokio::try_join!(reload_all(&bed, true), Seen::sample(&bed, "fresh", RELOADS * 2))?;
        let known = reload_all(&bed, false).await?;
        let after = settled(&host).await?;
        stop.store(true, Ordering::Relaxed);
        anyhow::Ok((alone, during, fresh, known, after - before))
    };
    let (created, (alone, during, fresh, known, drift)) = tokio::try_join!(jobs, reloads)?;
    bed.until_all_settled(Resource::JOB).await;
    let lost = created.saturating_sub(bed.exporter.exported());
    host.kill();
    #[expect(clippy::cast_precision_loss, reason = "a number of objects")]
    let lost = lost as f64;
    let others = percentile(&during, 0.99) / percentile(&alone, 0.99);
    eprintln!("P4: p99 of mails {:.1} ms alone, {:.1} ms during reloads", percentile(&alone, 0.99), percentile(&during, 0.99));
    Ok(vec![
        Figure::alone(
            "P4",
            &format!("ConfigMap → first object done by the new version, {RELOADS} new components"),
            "s",
            &fresh,
            &[Aim::AtMost(0.5)],
        ),
        Figure::alone("P4", &format!("the same, {RELOADS} times a component that was compiled before"), "s", &known, &[Aim::AtMost(0.1)]),
        Figure::alone("P4", "p99 of another kind meanwhile, over that without reloads", "×", &[others], &[Aim::AtMost(1.2)]),
        Figure::alone("P4", &format!("memory after {} reloads, less that before", 2 * RELOADS), "MB", &[drift / 1e6], &[Aim::AtMost(5.0)]),
        Figure::alone("P4", "objects lost", "objects", &[lost], &[Aim::AtMost(0.0)]),
    ])
}

/// The host's memory once the last version has been stable for a while.
async fn settled(host: &Operator) -> anyhow::Result<f64> {
    tokio::time::sleep(Duration::from_secs(15)).await;
    Ok(host.memory()?.private)
}

/// Seconds for each of a hundred reloads, between two versions that differ in what they write. `fresh` gives each a digest of its own.
async fn reload_all(bed: &Bed, fresh: bool) -> anyhow::Result<Vec<f64>> {
    let mut times = Vec::new();
    for number in 0..RELOADS {
        let second = number % 2 == 0;
        let component = guest(if second { "report_job_v2" } else { "report_job" });
        let component = if fresh { relabelled(&component, &format!("reload {number}")) } else { component };
        // Both are known from the second time on, the first from the start.
        if !fresh && number == 0 {
            bed.plugin_as(Resource::JOB, &component).await?;
            until_done_by(bed, second).await?;
            continue;
        }
        let started = Instant::now();
        tokio::try_join!(bed.plugin_as(Resource::JOB, &component), until_done_by(bed, second))?;
        times.push(started.elapsed().as_secs_f64());
        // On to the next once the trial is over: one reload at a time.
        tokio::time::sleep(Duration::from_millis(700)).await;
    }
    Ok(times)
}

/// Waits for a job that this version has finished, as its message tells.
async fn until_done_by(bed: &Bed, second: bool) -> anyhow::Result<()> {
    let mut events = from_now(&bed.cluster.api(Resource::JOB)).await?;
    let found = async {
        while let Some(event) = events.try_next().await? {
            if let WatchEvent::Modified(object) = event
                && object.data["status"]["phase"] == "Done"
                && object.data["status"]["message"].is_null() != second
            {
                return anyhow::Ok(());
            }
        }
        anyhow::bail!("the watch of jobs ended")
    };
    tokio::time::timeout(PATIENCE, found).await?
}
