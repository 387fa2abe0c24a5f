//! Churn: objects come, change and go, plugins are reloaded, leaders change, back ends fail; in the end nothing was lost and nothing has
//! grown.
//!
//! A few seconds in the short set; `make soak` runs it for as long as is asked for.

use std::time::{Duration, Instant};

use berth_tests::{
    behaviour::Behaviour,
    cluster::Cluster,
    eventually::eventually,
    host::{Flags, Host},
    process::kernel_number,
    resource::Resource,
    stage::Stage,
};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use serde_json::json;

/// For how many seconds objects are churned.
const SECONDS: &str = "BERTH_SOAK_SECONDS";
/// The same in the short set.
const SHORT: Duration = Duration::from_secs(16);
/// The part of the time after which everything that is built up once is built up.
const WARM_UP: f64 = 0.25;
/// How many objects of each kind there are at most.
const POPULATION: usize = 150;
/// How long it may take until all that was asked for is done once the back ends work.
const SETTLED: Duration = Duration::from_secs(180);
/// What a host may grow by, in KiB, beside a tenth: memory that an allocator keeps for the next burst.
const SLACK: u64 = 8 << 10;

/// What must not grow, of one host.
#[derive(Debug)]
struct Size {
    /// Memory of its own, in KiB.
    memory: u64,
    threads: u64,
    watches: usize,
    series: usize,
}

/// How often each thing was done.
#[derive(Debug, Default)]
struct Done {
    created: usize,
    edited: usize,
    deleted: usize,
    reloaded: usize,
    leaders: usize,
}

/// The hosts go first, and are held to the laws then.
struct Soak {
    /// Killed and started again.
    first: Host,
    /// Never ends, so that what it has grown by can be seen.
    second: Host,
    stage: Stage,
    random: StdRng,
    done: Done,
}

fn duration() -> Duration {
    match std::env::var(SECONDS) {
        Ok(text) => Duration::from_secs(text.parse().unwrap_or_else(|_| panic!("{SECONDS} is {text:?}, which is no number of seconds"))),
        Err(_) => SHORT,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_churn_of_everything_all_is_done_once_and_nothing_has_grown() {
    let (duration, seed) = (duration(), rand::random::<u64>());
    eprintln!("churn for {duration:?} with the seed {seed}");
    let mut soak = Soak::start(seed).await;
    soak.churn(duration.mul_f64(WARM_UP)).await;
    soak.settle().await;
    let before = soak.size().await;
    soak.churn(duration.mul_f64(1.0 - WARM_UP)).await;
    soak.settle().await;
    let after = eventually(Duration::from_secs(60), async || {
        let after = soak.size().await;
        if after.has_not_grown_from(&before) { Ok(after) } else { Err(format!("{before:?} has become {after:?}")) }
    })
    .await;
    eprintln!("{:?}: {before:?} has become {after:?}", soak.done);
    let Done { created, edited, deleted, reloaded, leaders } = soak.done;
    assert!([created, edited, deleted, reloaded, leaders].iter().all(|times| *times > 0), "{:?}", soak.done);
}

impl Size {
    fn has_not_grown_from(&self, before: &Self) -> bool {
        self.memory <= before.memory + before.memory / 10 + SLACK
            && self.threads <= before.threads + 2
            && self.watches <= before.watches
            && self.series <= before.series
    }
}

impl Soak {
    async fn start(seed: u64) -> Self {
        let stage = Stage::on(Cluster::shared().await).await;
        let versions = [stage.push_email_request().await, stage.push_report_job("backoff: {base: 100ms, max: 1s}\n").await];
        let named = |name: &str| Flags { identity: Some(name.to_owned()), ..stage.flags() };
        let first = Host::start(&stage.cluster, "first", &named("first")).await;
        let second = Host::start(&stage.cluster, "second", &named("second")).await;
        for (name, version) in ["email-request", "report-job"].iter().zip(&versions) {
            stage.cluster.until_serving(name, version).await;
        }
        Self { stage, random: StdRng::seed_from_u64(seed), first, second, done: Done::default() }
    }

    /// Everything at once, one thing after the other.
    async fn churn(&mut self, time: Duration) {
        let end = Instant::now() + time;
        let (mut reload, mut leader) = (Instant::now(), Instant::now());
        let reloads = Duration::from_secs(3);
        let leaders = time.div_f64(2.0).min(Duration::from_secs(60));
        let mut beat = tokio::time::interval(Duration::from_millis(50));
        while Instant::now() < end {
            beat.tick().await;
            match self.random.random_range(0..100) {
                0..60 => self.create().await,
                60..75 => self.edit().await,
                75..97 => self.delete().await,
                _ => self.upset(),
            }
            if reload.elapsed() >= reloads {
                reload = Instant::now();
                self.reload().await;
            }
            if leader.elapsed() >= leaders {
                leader = Instant::now();
                self.change_leader().await;
            }
        }
    }

    fn kind(&mut self) -> Resource {
        if self.random.random_bool(0.5) { Resource::EMAIL } else { Resource::JOB }
    }

    async fn names(&self, kind: Resource) -> Vec<String> {
        let list = self.stage.cluster.api(kind).list_metadata(&ListParams::default()).await.expect("the API server answers");
        list.items.into_iter().filter_map(|object| object.metadata.name).collect()
    }

    async fn any(&mut self, kind: Resource) -> Option<String> {
        let names = self.names(kind).await;
        (!names.is_empty()).then(|| names[self.random.random_range(0..names.len())].clone())
    }

    async fn create(&mut self) {
        let kind = self.kind();
        if self.names(kind).await.len() >= POPULATION {
            return self.delete().await;
        }
        // Names come again, of other objects.
        let name = format!("o{}", self.random.random_range(0..2 * POPULATION));
        let (to, priority) = (format!("{}@example.com", self.done.created), self.random.random_range(0..10));
        let spec = match kind {
            Resource::EMAIL => json!({"to": to, "template": "welcome", "locale": "en-GB"}),
            _ => json!({"report": to.replace('@', "-at-"), "format": "pdf", "priority": priority}),
        };
        self.done.created += usize::from(self.stage.cluster.try_create(kind, &name, spec).await.is_ok());
    }

    /// What is finished refuses it, and is given another annotation instead.
    async fn edit(&mut self) {
        let kind = self.kind();
        let Some(name) = self.any(kind).await else { return };
        let change = match kind {
            Resource::EMAIL => json!({"spec": {"locale": "de-DE"}, "metadata": {"annotations": {"edited": self.done.edited.to_string()}}}),
            _ => json!({"spec": {"format": "csv"}, "metadata": {"annotations": {"edited": self.done.edited.to_string()}}}),
        };
        let annotations = json!({"metadata": change["metadata"]});
        for change in [change, annotations] {
            if self.stage.cluster.api(kind).patch(&name, &PatchParams::default(), &Patch::Merge(change)).await.is_ok() {
                self.done.edited += 1;
                break;
            }
        }
    }

    async fn delete(&mut self) {
        let kind = self.kind();
        let Some(name) = self.any(kind).await else { return };
        self.done.deleted += usize::from(self.stage.cluster.api(kind).delete(&name, &DeleteParams::default()).await.is_ok());
    }

    /// The back ends fail a few times, or do their work and do not answer.
    fn upset(&mut self) {
        let behaviour = match self.random.random_range(0..3) {
            0 => Behaviour::fail(503).times(3),
            1 => Behaviour::drop_answer(2),
            _ => Behaviour::default(),
        };
        self.stage.gateway.control(behaviour.clone());
        self.stage.exporter.control(behaviour);
    }

    /// Another version, the same one again, or one that cannot serve.
    async fn reload(&mut self) {
        let pace = "backoff: {base: 100ms, max: 1s}\n";
        match self.random.random_range(0..5) {
            0 => self.stage.push_report_job_as("report_job_v2", pace).await,
            1 => self.stage.cluster.push("report-job", &[0; 4096], pace).await,
            2 => self.stage.push_email_request().await,
            _ => self.stage.push_report_job(&format!("{pace}concurrency: {}\n", self.random.random_range(1..32))).await,
        };
        self.done.reloaded += 1;
    }

    /// By a signal to the one that may end, or by the loss of the Lease.
    async fn change_leader(&mut self) {
        match self.random.random_range(0..3) {
            0 => {
                self.first.kill();
                self.first.restart().await;
            }
            1 => {
                self.first.terminate().await;
                self.first.restart().await;
            }
            _ => {
                let thief = json!({"spec": {"holderIdentity": "thief", "leaseDurationSeconds": 2}});
                let leases = Resource::LEASE.api(self.stage.cluster.client(), Some(self.stage.cluster.system()));
                leases.patch("berth", &PatchParams::default(), &Patch::Merge(thief)).await.expect("the administrator may");
            }
        }
        self.done.leaders += 1;
    }

    /// Everything is done, and then gone.
    async fn settle(&mut self) {
        self.stage.gateway.behave();
        self.stage.exporter.behave();
        let version = self.stage.push_report_job("backoff: {base: 100ms, max: 1s}\n").await;
        self.stage.cluster.until_plugin("report-job", &version, |_| true).await;
        for (kind, settled) in [(Resource::EMAIL, ["Sent", "Failed"]), (Resource::JOB, ["Done", "Failed"])] {
            eventually(SETTLED, async || {
                let objects = self.stage.cluster.list(kind, "").await;
                let waiting = objects.iter().find(|object| !settled.contains(&object["status"]["phase"].as_str().unwrap_or_default()));
                waiting.map_or(Ok(()), |object| Err(object.to_string()))
            })
            .await;
        }
        for kind in [Resource::EMAIL, Resource::JOB] {
            let objects = self.stage.cluster.api(kind);
            objects.delete_collection(&DeleteParams::default(), &ListParams::default()).await.expect("they may be deleted");
            eventually(SETTLED, async || match self.names(kind).await.len() {
                0 => Ok(()),
                left => Err(format!("{left} {} are left", kind.plural)),
            })
            .await;
        }
    }

    async fn size(&self) -> Size {
        let field = |name: &str| kernel_number(self.second.id(), "status", name).expect("it runs");
        let series = self.second.get("/metrics").await.expect("it answers").text();
        Size {
            memory: field("RssAnon"),
            threads: field("Threads"),
            watches: self.second.proxy.watches("").count(),
            series: series.lines().filter(|line| !line.starts_with('#')).count(),
        }
    }
}
