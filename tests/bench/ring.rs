//! P11: a nonce passes through a chain of operators, each of which waits for the one before it. One host with a plugin each, beside one
//! process of kube-rs with a controller each, as in the published experiment with a ring of operators: whoever measures closes the ring.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::Context;
use berth_host::install::{Manifests, Mode};
use berth_tests::{account::role, cluster::Cluster, stage::probe};
use futures::{TryStreamExt, stream};
use kube::{
    Api,
    api::{ApiResource, DynamicObject, Patch, PatchParams, WatchEvent},
    core::GroupVersionKind,
};
use serde_json::{Value, json};

use crate::{
    bed::{Bed, from_now},
    figure::{Aim, Figure, Spread},
    idle::{Made, until_serving},
    quick,
    system::{Operator, System, Work},
};

/// The group of the kinds, one for each plugin.
const GROUP: &str = "chain.acme.io";
/// The name of every object.
const NAME: &str = "ring";
/// The account by which plugins read each other's objects.
const ACCOUNT: &str = "chain";
/// Between two rounds, in each of which an object that reads others is run for their sake twice: for more it would have one a second.
const PAUSE: Duration = Duration::from_secs(2);
/// After which the code of a plugin is no longer in memory.
const REST: Duration = Duration::from_secs(25);
const COLD_ROUNDS: usize = 4;
const PATIENCE: Duration = Duration::from_secs(60);

pub async fn measure() -> anyhow::Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for (stations, rounds) in quick([(10, 20), (100, 5)], [(10, 100), (100, 20)]) {
        let (peers, operator) = Chain::of_kube_rs(stations).await?;
        let theirs = (peers.rounds(rounds, PAUSE).await?, peers.rounds(COLD_ROUNDS, REST).await?);
        operator.end().await?;
        let (plugins, mut host) = Chain::of_plugins(stations).await?;
        let ours = (plugins.rounds(rounds, PAUSE).await?, plugins.rounds(COLD_ROUNDS, REST).await?);
        host.kill();
        let (mut measured, mut colder) = (BTreeMap::new(), BTreeMap::new());
        for (system, (warm, cold)) in [(System::Berth, ours), (System::KubeRs, theirs)] {
            let usual = Spread::of(&warm).median;
            eprintln!("P11: {stations} stations: {system} {usual:.1} ms a hop, {:.1} ms after a rest", Spread::of(&cold).median);
            measured.insert(system, warm);
            // Whatever rested with it (the API server, the connections, the machine) is in both.
            colder.insert(system, cold.iter().map(|cold| cold - usual).collect());
        }
        let aim = Aim::BelowPeer(1.15, System::KubeRs);
        figures.push(Figure::new("P11", &format!("a hop in a chain of {stations}, {rounds} rounds"), "ms", &measured, &[aim]));
        let name = format!("the same after a rest, less that, chain of {stations}");
        figures.push(Figure::new("P11", &name, "ms", &colder, &[Aim::AtMost(2.0)]));
    }
    Ok(figures)
}

/// A chain that operators serve.
struct Chain {
    first: Api<DynamicObject>,
    last: Api<DynamicObject>,
    /// Where the nonce shows at the last station.
    arrives: &'static str,
    /// From the first station to where it shows.
    hops: u32,
    bed: Bed,
}

impl Chain {
    /// A plugin and a kind for each station, each of which reads the object of the one before it.
    async fn of_plugins(stations: u32) -> anyhow::Result<(Self, Operator)> {
        let bed = Bed::new("chain").await?;
        let namespace = bed.cluster.namespace();
        let kind = |number| Made(GROUP, number);
        bed.cluster.install((0..stations).map(|number| kind(number).crd())).await;
        bed.cluster.install(account(&bed.cluster, stations)).await;
        let push = async |number: u32| {
            let mut claim = kind(number).reference();
            if let Some(before) = number.checked_sub(1) {
                claim["reads"] = json!([kind(before).reference()]);
            }
            bed.push(&kind(number).plural(), &probe(&claim), &format!("serviceAccountName: {ACCOUNT}\n")).await
        };
        stream::iter((0..stations).map(Ok)).try_for_each_concurrent(4, push).await?;
        let object = |number: u32| {
            let mut spec = json!({"do": "pass", "nonce": 0, "namespace": namespace});
            if let Some(before) = number.checked_sub(1) {
                spec["of"] = kind(before).reference();
                spec["name"] = NAME.into();
            }
            kind(number).object(namespace, NAME, &spec)
        };
        bed.cluster.install((0..stations).map(object)).await;
        let mut host = Operator::start(&bed, System::Berth, &Work::on(&[])).await?;
        until_serving(&mut host, stations).await?;
        let api = |number: u32| {
            let kind = Made(GROUP, number);
            let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(GROUP, "v1", &kind.kind()), &kind.plural());
            Api::namespaced_with(bed.cluster.client().clone(), namespace, &resource)
        };
        let (first, last) = (api(0), api(stations - 1));
        Ok((Self { first, last, arrives: "status", hops: stations, bed }, host))
    }

    /// A controller and a namespace for each station, each of which writes the object of the one behind it.
    async fn of_kube_rs(stations: u32) -> anyhow::Result<(Self, Operator)> {
        let bed = Bed::new("chain").await?;
        let namespace = |number: u32| format!("{}-{}", bed.cluster.namespace(), number % stations);
        Manifests::parse("ring.yaml", include_str!("peers/ring.yaml"))?.apply(bed.cluster.client(), Mode::Store).await?;
        let namespaces =
            (0..stations).map(|number| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace(number)}}));
        bed.cluster.install(namespaces).await;
        bed.cluster
            .install((0..stations).map(|number| {
                let spec = json!({"nonce": 0, "next": namespace(number + 1)});
                json!({"apiVersion": "bench.acme.io/v1", "kind": "Ring", "metadata": {"name": NAME, "namespace": namespace(number)}, "spec": spec})
            }))
            .await;
        let work = Work { ring: (0..stations).map(namespace).collect(), ..Work::on(&[]) };
        let operator = Operator::synced(&bed, System::KubeRs, &work).await?;
        let api = |number| {
            let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("bench.acme.io", "v1", "Ring"), "rings");
            Api::namespaced_with(bed.cluster.client().clone(), &namespace(number), &resource)
        };
        let (first, last) = (api(0), api(stations - 1));
        Ok((Self { first, last, arrives: "spec", hops: stations - 1, bed }, operator))
    }

    /// Milliseconds a hop in each of so many rounds, with a pause before each.
    async fn rounds(&self, rounds: usize, pause: Duration) -> anyhow::Result<Vec<f64>> {
        let mut times = Vec::new();
        let known = self.first.get(NAME).await?.data["spec"]["nonce"].as_u64().unwrap_or_default();
        for nonce in (known + 1..).take(rounds) {
            tokio::time::sleep(pause).await;
            let time = self.round(nonce).await.with_context(|| format!("nonce {nonce} in {}", self.bed.cluster.namespace()))?;
            times.push(time.as_secs_f64() * 1e3 / f64::from(self.hops));
        }
        Ok(times)
    }

    async fn round(&self, nonce: u64) -> anyhow::Result<Duration> {
        let mut events = from_now(&self.last).await?;
        let started = Instant::now();
        self.first.patch(NAME, &PatchParams::default(), &Patch::Merge(json!({"spec": {"nonce": nonce}}))).await?;
        let arrived = async {
            while let Some(event) = events.try_next().await? {
                if let WatchEvent::Added(object) | WatchEvent::Modified(object) = event
                    && object.data[self.arrives]["nonce"] == nonce
                {
                    return Ok(started.elapsed());
                }
            }
            anyhow::bail!("the watch of the last station ended")
        };
        tokio::time::timeout(PATIENCE, arrived).await?
    }
}

/// The account of the plugins, and what it may read.
fn account(cluster: &Cluster, plugins: u32) -> [Value; 3] {
    let names: Vec<String> = (0..plugins).map(|number| Made(GROUP, number).plural()).collect();
    let metadata = json!({
        "name": ACCOUNT, "namespace": cluster.system(),
        "labels": {"berth.acme.io/impersonate": "true"}, "annotations": {"berth.acme.io/plugins": names.join(",")},
    });
    let rule = json!({"apiGroups": [GROUP], "resources": ["*"], "verbs": ["get", "list"]});
    let [role, binding] = role(cluster, ACCOUNT, cluster.namespace(), ACCOUNT, rule);
    [json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}), role, binding]
}
