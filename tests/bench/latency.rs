//! P8: from the creation of an object to its `Sent`, on systems that have nothing else to do.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::Context;
use berth_tests::{client::Client, resource::Resource};
use futures::TryStreamExt;
use kube::{
    Api,
    api::{DynamicObject, Patch, PatchParams, PostParams, WatchEvent},
};
use serde_json::json;
use tokio::{sync::mpsc, task::AbortHandle};

use crate::{
    bed::{Bed, from_now},
    figure::{Aim, Figure, percentile},
    system::{Operator, System, Work},
};

const SAMPLES: usize = 200;
const KIND: Resource = Resource::EMAIL;
/// Between two samples, so that none stands in the way of the next.
const PAUSE: Duration = Duration::from_millis(20);
/// No system takes so long.
const PATIENCE: Duration = Duration::from_secs(60);

pub async fn measure() -> anyhow::Result<Vec<Figure>> {
    let mut running = Vec::new();
    for system in System::ALL {
        let bed = Bed::new("latency").await?;
        if system == System::Berth {
            bed.plugin(KIND).await?;
        }
        let operator = Operator::synced(&bed, system, &Work::of(KIND)).await?;
        let seen = Seen::of(&bed).await?;
        running.push((system, bed, operator, seen));
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    let mut times = BTreeMap::<System, Vec<f64>>::new();
    let mut floor = Vec::new();
    for number in 0..SAMPLES {
        for (system, bed, _, seen) in &mut running {
            times.entry(*system).or_default().push(seen.until_sent(bed, &format!("m{number}")).await? * 1e3);
            tokio::time::sleep(PAUSE).await;
        }
        floor.push(by_hand(&running[0].1, number).await?.as_secs_f64() * 1e3);
    }
    let at = |share: f64| -> BTreeMap<System, Vec<f64>> {
        times.iter().map(|(system, times)| (*system, vec![percentile(times, share)])).collect()
    };
    let least = percentile(&floor, 0.5);
    let below = Aim::BelowPeer(1.0, System::ControllerRuntime);
    let figures = vec![
        Figure::new("P8", "create → Sent, p50", "ms", &at(0.5), &[below, Aim::AtMost(least + 3.0)]),
        Figure::new("P8", "create → Sent, p99", "ms", &at(0.99), &[below]),
        Figure::alone("P8", "create, send and one write by hand, p50", "ms", &[least], &[]),
    ];
    for (.., mut operator, _) in running {
        operator.kill();
    }
    Ok(figures)
}

/// Which mails a watch has shown to be sent, and when.
pub struct Seen {
    sent: mpsc::UnboundedReceiver<(String, Instant)>,
    watch: AbortHandle,
}

impl Drop for Seen {
    fn drop(&mut self) {
        self.watch.abort();
    }
}

impl Seen {
    /// From now on.
    pub async fn of(bed: &Bed) -> anyhow::Result<Self> {
        let mut events = from_now(&bed.cluster.api(KIND)).await?;
        let (sender, sent) = mpsc::unbounded_channel();
        let watch = tokio::spawn(async move {
            while let Some(event) = events.try_next().await? {
                if let WatchEvent::Modified(object) = event
                    && object.data["status"]["phase"] == "Sent"
                {
                    // Whoever measured may be done.
                    let _ = sender.send((object.metadata.name.unwrap_or_default(), Instant::now()));
                }
            }
            anyhow::Ok(())
        });
        Ok(Self { sent, watch: watch.abort_handle() })
    }

    /// How long mails take from their creation until they are sent, one after the other: milliseconds of each.
    pub async fn sample(bed: &Bed, prefix: &str, count: usize) -> anyhow::Result<Vec<f64>> {
        let mut seen = Self::of(bed).await?;
        let mut times = Vec::new();
        for number in 0..count {
            times.push(seen.until_sent(bed, &format!("{prefix}{number}")).await? * 1e3);
            tokio::time::sleep(PAUSE).await;
        }
        Ok(times)
    }

    /// Creates a mail and waits until it is sent: in seconds from the one to the other.
    pub async fn until_sent(&mut self, bed: &Bed, name: &str) -> anyhow::Result<f64> {
        let started = Instant::now();
        bed.cluster.api(KIND).create(&PostParams::default(), &bed.wanting(KIND, name)).await?;
        loop {
            let next = tokio::time::timeout(PATIENCE, self.sent.recv()).await.with_context(|| format!("{name} is not sent"))?;
            let (sent, at) = next.context("the watch of mails has ended")?;
            if sent == name {
                return Ok((at - started).as_secs_f64());
            }
        }
    }
}

/// The same without an operator, watched by nobody: what cannot be had for less.
async fn by_hand(bed: &Bed, number: usize) -> anyhow::Result<Duration> {
    // In a namespace where no system looks for its objects.
    let namespace = bed.cluster.system();
    let api: Api<DynamicObject> = KIND.api(bed.cluster.client(), Some(namespace));
    let name = format!("hand{number}");
    let mut object = bed.wanting(KIND, &name);
    object.metadata.namespace = Some(namespace.to_owned());
    let client = Client::new();
    // As operators do, on a connection that is open already.
    client.post(&format!("{}/send", bed.gateway.url()), &[("idempotency-key", "\"warm\"")], &object.data["spec"]).await?;
    let started = Instant::now();
    api.create(&PostParams::default(), &object).await?;
    let key = format!("\"hand/{name}\"");
    let answer = client.post(&format!("{}/send", bed.gateway.url()), &[("idempotency-key", &key)], &object.data["spec"]).await?;
    anyhow::ensure!(answer.status < 300, "the gateway answered {}", answer.status);
    let status = json!({"status": {"phase": "Sent", "observedGeneration": 1}});
    api.patch_status(&name, &PatchParams::default(), &Patch::Merge(status)).await.context("writing a status")?;
    Ok(started.elapsed())
}
