//! P3: handlers that have nothing to do. One host with all of them, beside one process each of the peers.

use std::{collections::BTreeMap, time::Duration};

use berth_tests::{cluster::cluster_role, resource::Resource, stage::probe};
use futures::{TryStreamExt, stream};
use serde_json::{Value, json};

use crate::{
    bed::Bed,
    figure::{Aim, Figure},
    quick,
    system::{Memory, Operator, System, Work},
};

/// After its start, until what it needed for that is given back.
const QUIET: Duration = Duration::from_secs(30);
/// How long a handler may take to be compiled and to serve.
const SERVING: Duration = Duration::from_secs(10);
const MB: f64 = 1e6;
/// The group of the made-up kinds.
const GROUP: &str = "idle.acme.io";

pub async fn measure() -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    let mut of_none = BTreeMap::new();
    let mut of_ten = BTreeMap::new();
    for system in [System::KubeRs, System::ControllerRuntime, System::Kopf] {
        for (objects, into) in [(0, &mut of_none), (10, &mut of_ten)] {
            let bed = Bed::new("idle").await?;
            bed.seed(Resource::EMAIL, objects, 0).await?;
            let mut operator = Operator::synced(&bed, system, &Work::of(Resource::EMAIL)).await?;
            tokio::time::sleep(QUIET).await;
            let Memory { private, dirty, .. } = operator.memory()?;
            let memory = private / MB;
            eprintln!("P3: {system:>18}: a process with {objects} objects: {memory:.1} MB, {:.1} MB of it written", dirty / MB);
            into.insert(system, memory);
            operator.kill();
        }
    }
    let mut before = None;
    for &handlers in quick(&[0_u32, 100][..], &[0, 1, 10, 100, 1_000]) {
        let memory = hosted(handlers, 0).await?;
        let name = format!("{handlers} idle handlers, memory of the host or of a process each");
        let peers = |one: &BTreeMap<System, f64>| one.iter().map(|(peer, memory)| (*peer, vec![memory * f64::from(handlers)])).collect();
        let mut measured: BTreeMap<System, Vec<f64>> = if handlers == 0 { BTreeMap::new() } else { peers(&of_none) };
        measured.insert(System::Berth, vec![memory]);
        let aims: &[Aim] = match handlers {
            0 => &[Aim::AtMost(20.0)],
            100 => &[Aim::AtMost(40.0), Aim::BelowPeer(1.0 / 21.0, System::KubeRs), Aim::BelowPeer(1.0 / 79.0, System::ControllerRuntime)],
            1_000 => &[Aim::AtMost(200.0)],
            _ => &[],
        };
        figures.push(Figure::new("P3", &name, "MB", &measured, aims));
        if let Some((fewer, less)) = before.filter(|_| handlers >= 100) {
            let each = (memory - less) / f64::from(handlers - fewer);
            figures.push(Figure::alone("P3", &format!("each handler from {fewer} to {handlers}"), "MB", &[each], &[Aim::AtMost(0.15)]));
        }
        before = Some((handlers, memory));
    }
    if quick(true, false) {
        return Ok(figures);
    }
    let memory = hosted(100, 10).await?;
    let mut measured: BTreeMap<System, Vec<f64>> = of_ten.iter().map(|(peer, memory)| (*peer, vec![memory * 100.0])).collect();
    measured.insert(System::Berth, vec![memory]);
    figures.push(Figure::new("P3", "100 idle handlers with 10 objects each", "MB", &measured, &[]));
    Ok(figures)
}

/// Megabytes of a host with so many handlers, each a component and a kind of its own, with so many objects each.
async fn hosted(handlers: u32, objects: usize) -> anyhow::Result<f64> {
    let bed = Bed::new("hosted").await?;
    deliver(&bed, handlers).await?;
    let mut host = Operator::start(&bed, System::Berth, &Work::on(&[])).await?;
    until_serving(&mut host, handlers).await?;
    for number in 0..handlers {
        let object = |object| Made(GROUP, number).object(bed.cluster.namespace(), &format!("o{object}"), &json!({}));
        bed.cluster.install((0..objects).map(object)).await;
    }
    // What it compiled with is another process, and what it started with is given back by a new start.
    host.kill();
    host = Operator::start(&bed, System::Berth, &Work::on(&[])).await?;
    until_serving(&mut host, handlers).await?;
    // What was opened for a thousand first runs at once is closed after 90 s.
    tokio::time::sleep(if objects > 0 { QUIET * 8 } else { QUIET }).await;
    let Memory { private, dirty, .. } = host.memory()?;
    eprintln!("P3: a host with {handlers} handlers, {objects} objects each: {:.1} MB, {:.1} MB of it written", private / MB, dirty / MB);
    host.kill();
    Ok(private / MB)
}

/// Kinds of which nothing is asked, and a plugin for each.
pub async fn deliver(bed: &Bed, handlers: u32) -> anyhow::Result<()> {
    if handlers == 0 {
        return Ok(());
    }
    let role = format!("berth-bench-{}", bed.cluster.namespace());
    bed.cluster.install([cluster_role(&role, GROUP, "*")]).await;
    bed.cluster.install((0..handlers).map(|number| Made(GROUP, number).crd())).await;
    let push = async |number| {
        let kind = Made(GROUP, number);
        bed.push(&kind.plural(), &probe(&kind.reference()), "").await
    };
    stream::iter((0..handlers).map(Ok)).try_for_each_concurrent(4, push).await
}

/// Waits until the host serves so many plugins.
pub async fn until_serving(host: &mut Operator, handlers: u32) -> anyhow::Result<()> {
    let start = std::time::Instant::now();
    loop {
        let serving = match host.metrics().await {
            Ok(metrics) => metrics.0.lines().filter(|line| line.starts_with("berth_plugin_info{")).count(),
            Err(_) => 0,
        };
        if serving >= handlers as usize && host.is_ready().await {
            return Ok(());
        }
        let deadline = SERVING * (handlers + 6);
        anyhow::ensure!(start.elapsed() < deadline, "{serving} of {handlers} serve after {deadline:?}\n{}", host.log_tail());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// One of many kinds of a group.
pub struct Made(pub &'static str, pub u32);

impl Made {
    /// Its kind.
    pub fn kind(&self) -> String {
        format!("Made{}", self.1)
    }

    /// Its plural.
    pub fn plural(&self) -> String {
        format!("made{}s", self.1)
    }

    /// What names it in the claim of the probe.
    pub fn reference(&self) -> Value {
        json!({"group": self.0, "kind": self.kind(), "plural": self.plural()})
    }

    /// An object of it, with this spec.
    pub fn object(&self, namespace: &str, name: &str, spec: &Value) -> Value {
        json!({"apiVersion": format!("{}/v1", self.0), "kind": self.kind(), "metadata": {"name": name, "namespace": namespace}, "spec": spec})
    }

    /// Its definition.
    pub fn crd(&self) -> Value {
        let open = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
        json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": format!("{}.{}", self.plural(), self.0)},
            "spec": {
                "group": self.0, "scope": "Namespaced",
                "names": {"kind": self.kind(), "plural": self.plural(), "singular": self.kind().to_lowercase(), "listKind": format!("{}List", self.kind())},
                "versions": [{
                    "name": "v1", "served": true, "storage": true, "subresources": {"status": {}},
                    "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": open, "status": open}}},
                }],
            },
        })
    }
}
