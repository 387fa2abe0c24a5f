//! The systems that are compared, each as one process that does the same work on the same cluster.

use std::{collections::BTreeMap, fmt, net::SocketAddr, path::PathBuf, process::Command, time::Duration};

use berth_tests::{
    client::Client,
    eventually::eventually,
    exposition::Exposition,
    process::{Process, cpu, free_address, kernel_number},
    resource::Resource,
    stage, workspace,
};
use rustix::process::Signal;

use crate::bed::Bed;

/// How long a system may take until it has listed its objects: kopf reads 100,000 of them in minutes.
const SYNCED: Duration = Duration::from_secs(600);
/// How long it may take to end.
const END: Duration = Duration::from_secs(30);

/// One of the systems.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum System {
    /// This one.
    Berth,
    /// `kube::runtime::Controller`, Rust.
    KubeRs,
    /// controller-runtime, Go.
    ControllerRuntime,
    /// kopf, Python.
    Kopf,
}

impl System {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Berth, Self::KubeRs, Self::ControllerRuntime, Self::Kopf];
}

impl fmt::Display for System {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Berth => "Berth",
            Self::KubeRs => "kube-rs",
            Self::ControllerRuntime => "controller-runtime",
            Self::Kopf => "kopf",
        })
    }
}

/// What an operator is started for.
#[derive(Clone, Debug)]
pub struct Work {
    /// EmailRequest, ReportJob.
    pub kinds: Vec<Resource>,
    /// How often every object is looked at although nothing changed.
    pub resync: Duration,
    /// Instead of the administrator's own.
    pub kubeconfig: Option<PathBuf>,
    /// The namespaces of a ring, for a peer that has it.
    pub ring: Vec<String>,
}

impl Work {
    /// On objects of one kind that nobody resyncs meanwhile.
    pub fn of(kind: Resource) -> Self {
        Self::on(&[kind])
    }

    /// The same of several kinds, or of none that have to be listed.
    pub fn on(kinds: &[Resource]) -> Self {
        Self { kinds: kinds.to_vec(), resync: Duration::from_secs(3600), kubeconfig: None, ring: Vec::new() }
    }
}

/// A running operator.
pub struct Operator {
    system: System,
    process: Process,
    face: SocketAddr,
    client: Client,
    kinds: Vec<Resource>,
}

/// Memory of a process, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// Resident, and of this process alone: what it has written, and the pages of its own program and files that it has read.
    pub private: f64,
    /// Of that, what it has written.
    pub dirty: f64,
    /// The most that was ever resident beside what files hold.
    pub peak: f64,
}

impl Operator {
    /// Starts one in the namespace of this bed. Berth serves the plugins that the bed was given.
    pub async fn start(bed: &Bed, system: System, work: &Work) -> anyhow::Result<Self> {
        let face = free_address()?;
        let kubeconfig = work.kubeconfig.clone().unwrap_or_else(|| bed.cluster.plane().control().kubeconfig().to_owned());
        let mut command = if system == System::Berth { berth(bed, face, work)? } else { peer(bed, system, face, work)? };
        if system == System::Berth {
            command.arg("--kubeconfig").arg(&kubeconfig);
        } else {
            command.env("KUBECONFIG", &kubeconfig);
        }
        let log = bed.folder().join(format!("{system}-{}.log", face.port()));
        let process = Process::start(&system.to_string(), command, &log)?;
        Ok(Self { system, process, face, client: Client::new(), kinds: work.kinds.clone() })
    }

    /// The same, once it has listed its objects.
    pub async fn synced(bed: &Bed, system: System, work: &Work) -> anyhow::Result<Self> {
        let mut operator = Self::start(bed, system, work).await?;
        operator.until_synced(bed.objects()).await;
        Ok(operator)
    }

    /// Waits until it has listed its objects: so many in all.
    pub async fn until_synced(&mut self, objects: usize) {
        let (client, face, system, process, kinds) = (&self.client, self.face, self.system, &mut self.process, &self.kinds);
        eventually(SYNCED, async || {
            if let Some(status) = process.ended() {
                panic!("{system} has ended: {status}\n{}", process.log_tail());
            }
            let seen = match system {
                System::Berth => listed(client, face, kinds).await,
                _ => client.get(&format!("http://{face}/count")).await.map(|answer| (answer.json()["synced"] == true).then_some(objects)),
            };
            match seen {
                Ok(Some(seen)) if seen >= objects => Ok(()),
                Ok(seen) => Err(format!("{system} has listed {seen:?} of {objects} objects")),
                Err(error) => Err(format!("{error:#}")),
            }
        })
        .await;
    }

    /// How many turns Berth has done.
    pub async fn reconciles(&self) -> anyhow::Result<f64> {
        let metrics = self.metrics().await?.0;
        let turns = metrics.lines().filter(|line| line.starts_with("berth_reconcile_total{"));
        Ok(turns.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum())
    }

    /// CPU time since its start.
    pub fn cpu(&self) -> anyhow::Result<Duration> {
        cpu(self.process.id())
    }

    /// Its memory now.
    pub fn memory(&self) -> anyhow::Result<Memory> {
        memory(self.process.id())
    }

    /// What went wrong, for a message.
    pub fn log_tail(&self) -> String {
        self.process.log_tail()
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// SIGTERM, without waiting.
    pub fn ask_to_end(&self) -> anyhow::Result<()> {
        self.process.signal(Signal::TERM)
    }

    /// SIGTERM, and waits for its end.
    pub async fn end(mut self) -> anyhow::Result<()> {
        self.ask_to_end()?;
        self.process.end(END).await.map(drop)
    }

    /// What Berth counts.
    pub async fn metrics(&self) -> anyhow::Result<Exposition> {
        Ok(Exposition(self.client.get(&format!("http://{}/metrics", self.face)).await?.text()))
    }

    /// Whether Berth says that it is ready.
    pub async fn is_ready(&self) -> bool {
        self.client.get(&format!("http://{}/readyz", self.face)).await.is_ok_and(|answer| answer.status == 200)
    }
}

/// How many objects Berth has listed; none while it serves fewer kinds than it should.
async fn listed(client: &Client, face: SocketAddr, kinds: &[Resource]) -> anyhow::Result<Option<usize>> {
    let text = Exposition(client.get(&format!("http://{face}/metrics")).await?.text());
    let mut sum = 0.0;
    for kind in kinds {
        let name = format!("{}.{}", kind.kind, kind.group);
        let labels = [("kind", name.as_str())];
        // A kind that was never heard of has not been listed.
        let (Some(objects), Some(_)) = (text.value("berth_objects", &labels), text.value("berth_watch_age_seconds", &labels)) else {
            return Ok(None);
        };
        sum += objects;
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a number of objects")]
    Ok(Some(sum as usize))
}

fn berth(bed: &Bed, face: SocketAddr, work: &Work) -> anyhow::Result<Command> {
    let mut command = Command::new(workspace::berth()?);
    command.env("NO_COLOR", "1").args([
        "--log=warn".to_owned(),
        "run".to_owned(),
        format!("--namespace={}", bed.cluster.system()),
        format!("--watch-namespace={}", bed.cluster.namespace()),
        format!("--admin-address={face}"),
        format!("--resolve={}={}", stage::MAIL, bed.gateway.addr()),
        format!("--resolve={}={}", stage::REPORTS, bed.exporter.addr()),
        format!("--cache-dir={}", bed.cache().display()),
        format!("--resync={}s", work.resync.as_secs()),
    ]);
    Ok(command)
}

fn peer(bed: &Bed, system: System, face: SocketAddr, work: &Work) -> anyhow::Result<Command> {
    let built = workspace::target()?.join("bench");
    let mut command = match system {
        System::KubeRs => Command::new(built.join("kube-rs/release/peer-kube-rs")),
        System::ControllerRuntime => Command::new(built.join("controller-runtime")),
        _ => {
            let mut command = Command::new(built.join("kopf/bin/python"));
            command.arg(workspace::root().join("tests/bench/peers/kopf/peer.py"));
            command
        }
    };
    let words = BTreeMap::from([(Resource::EMAIL.kind, "email"), (Resource::JOB.kind, "report")]);
    let mut kinds: Vec<&str> = work.kinds.iter().filter_map(|kind| words.get(kind.kind).copied()).collect();
    if !work.ring.is_empty() {
        kinds.push("ring");
        command.env("RING_NAMESPACES", work.ring.join(",")).env("RING_LAST", i64::MAX.to_string());
    }
    command
        .env("WATCH_NAMESPACE", bed.cluster.namespace())
        .env("KINDS", kinds.join(","))
        .env("GATEWAY", bed.gateway.url())
        .env("EXPORTER", bed.exporter.url())
        .env("CONCURRENCY", "16")
        .env("RESYNC_SECONDS", work.resync.as_secs().to_string())
        .env("COUNT_ADDRESS", face.to_string());
    Ok(command)
}

fn memory(id: u32) -> anyhow::Result<Memory> {
    #[expect(clippy::cast_precision_loss, reason = "bytes")]
    let bytes = |file: &str, field: &str| anyhow::Ok((kernel_number(id, file, field)? * 1024) as f64);
    let peak = bytes("status", "VmHWM")? - bytes("status", "RssFile")?;
    let dirty = bytes("smaps_rollup", "Private_Dirty")?;
    Ok(Memory { private: dirty + bytes("smaps_rollup", "Private_Clean")?, dirty, peak })
}
