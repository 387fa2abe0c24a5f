//! P5: the leader ends, and the standby goes on. From the signal to the first effect of the standby, while objects keep coming.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use berth_tests::{ledger::unix_ms, resource::Resource};

use crate::{
    bed::Bed,
    figure::{Aim, Figure},
    idle::{deliver, until_serving},
    system::{Operator, System, Work},
};

const KIND: Resource = Resource::EMAIL;
const HANDLERS: u32 = 100;
const OBJECTS: usize = 10_000;
const ROUNDS: usize = 5;
/// Between two new objects: how exact the figure is.
const BEAT: Duration = Duration::from_millis(10);
/// New objects that are there at a time, for longer than it takes until the standby leads.
const KEPT: usize = 3_000;
/// The defaults of `berth run`.
const LEASE: f64 = 15.0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Signal {
    Term,
    Kill,
}

pub async fn measure() -> anyhow::Result<Vec<Figure>> {
    let bed = Bed::new("failover").await?;
    bed.plugin(KIND).await?;
    deliver(&bed, HANDLERS).await?;
    bed.seed(KIND, OBJECTS, 500).await?;
    let mut leader = start(&bed).await?;
    let (mut ended, mut killed) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        for (signal, into) in [(Signal::Term, &mut ended), (Signal::Kill, &mut killed)] {
            let standby = start(&bed).await?;
            let gap = takeover(&bed, leader, signal, round).await?;
            eprintln!("P5: {signal:?}: {:.0} ms", gap * 1e3);
            into.push(gap);
            leader = standby;
        }
    }
    leader.kill();
    let milliseconds: Vec<f64> = ended.iter().map(|gap| gap * 1e3).collect();
    let what = format!("{HANDLERS} handlers, {OBJECTS} objects");
    Ok(vec![
        Figure::alone("P5", &format!("SIGTERM → first run of the standby, {what}"), "ms", &milliseconds, &[Aim::AtMost(300.0)]),
        Figure::alone(
            "P5",
            &format!("SIGKILL → first run of the standby, {what}, Lease of 15 s"),
            "s",
            &killed,
            &[Aim::AtMost(LEASE + 1.0)],
        ),
    ])
}

async fn start(bed: &Bed) -> anyhow::Result<Operator> {
    let mut host = Operator::synced(bed, System::Berth, &Work::of(KIND)).await?;
    until_serving(&mut host, HANDLERS + 1).await?;
    Ok(host)
}

/// Seconds from the signal to the end of the longest gap between two effects after it.
async fn takeover(bed: &Bed, mut leader: Operator, signal: Signal, round: usize) -> anyhow::Result<f64> {
    let stop = AtomicBool::new(false);
    let prefix = format!("{signal:?}-{round}-").to_lowercase();
    let stream = bed.keep_filling(KIND, &prefix, BEAT, KEPT, &stop);
    let before = bed.gateway.delivered();
    let act = async {
        bed.until_effects(KIND, before + 100, Duration::from_secs(60)).await?;
        let at = unix_ms();
        match signal {
            Signal::Term => leader.ask_to_end()?,
            Signal::Kill => leader.kill(),
        }
        tokio::time::sleep(if signal == Signal::Term { Duration::from_secs(5) } else { Duration::from_secs_f64(LEASE + 5.0) }).await;
        stop.store(true, Ordering::Relaxed);
        anyhow::Ok(at)
    };
    let (created, at) = tokio::try_join!(stream, act)?;
    bed.until_effects(KIND, before + created, Duration::from_secs(120)).await?;
    bed.remove(KIND, (created.saturating_sub(KEPT)..created).map(|number| format!("{prefix}{number}"))).await?;
    // What was under way at the signal may still come; the gap after it is the takeover.
    let mut times: Vec<u64> = bed.gateway.deliveries()[before..].iter().map(|delivery| delivery.at_ms).filter(|time| *time >= at).collect();
    times.push(at);
    // They stand in the order in which they were written down, which differs by a millisecond here and there.
    times.sort_unstable();
    let (_, end) = times.windows(2).map(|pair| (pair[1] - pair[0], pair[1])).max().unwrap_or_default();
    #[expect(clippy::cast_precision_loss, reason = "milliseconds")]
    Ok((end - at) as f64 / 1e3)
}
