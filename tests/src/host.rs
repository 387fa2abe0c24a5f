//! A host under test: `berth run` as a process, behind a fault proxy of its own.

use std::{
    net::SocketAddr,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::PathBuf,
    process::Command,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::Context;
use rustix::process::Signal;

use crate::{
    client::{Answer, Client},
    cluster::Cluster,
    eventually::eventually,
    exposition::Exposition,
    laws::Ground,
    process::{Process, free_address},
    proxy::{Credential, Proxy},
    stage, workspace,
};

/// `--lease-duration`, unless a test gives another.
pub const LEASE: Duration = Duration::from_secs(6);
/// `--grace`, unless a test gives another.
pub const GRACE: Duration = Duration::from_secs(5);
/// How long a host may take to get ready; it takes about a second where nothing else runs.
const READY: Duration = Duration::from_secs(60);
/// How long a host may take to end after SIGTERM: its grace period here, and time for a busy machine.
const END: Duration = Duration::from_secs(20);
/// How many requests to the API server are shown on failure.
const SHOWN: usize = 40;

/// What a host is started with.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    /// Namespaces of objects beside that of the test.
    pub more_namespaces: Vec<String>,
    /// Where names lead: `mail.demo:80` and an address.
    pub resolve: Vec<(String, SocketAddr)>,
    /// Name of the replica; a new one for each start without it.
    pub identity: Option<String>,
    /// The file with the token of the host's account; without it the token is in the kubeconfig.
    pub token_file: Option<PathBuf>,
    /// Further flags, which win over those of the harness.
    pub more: Vec<String>,
}

/// A running host. Dropping it holds the case to the [laws](crate::laws), and kills it; on failure its log and its requests are shown.
#[derive(Debug)]
pub struct Host {
    /// Between the host and the API server.
    pub proxy: Proxy,
    name: String,
    process: Process,
    admin: SocketAddr,
    program: PathBuf,
    arguments: Vec<String>,
    log: PathBuf,
    client: Client,
    ground: Ground,
    /// Whether the test has sent it a signal by which it ends.
    told_to_end: AtomicBool,
}

impl Host {
    /// Starts a host and waits until it is ready. The name is for the log alone.
    pub async fn start(cluster: &Cluster, name: &str, flags: &Flags) -> Self {
        let mut host = Self::launch(cluster, name, flags).await.unwrap_or_else(|error| panic!("starting the host {name}: {error:#}"));
        host.until_ready().await;
        host
    }

    /// Starts a host that may never get ready.
    pub async fn launch(cluster: &Cluster, name: &str, flags: &Flags) -> anyhow::Result<Self> {
        let proxy = Proxy::start(&cluster.plane().control().config()).await?;
        Self::launch_behind(proxy, cluster, name, flags)
    }

    /// The same behind a proxy that has rules already.
    pub fn launch_behind(proxy: Proxy, cluster: &Cluster, name: &str, flags: &Flags) -> anyhow::Result<Self> {
        let Flags { more_namespaces, resolve, identity, token_file, more } = flags;
        let directory = cluster.directory().join(name);
        std::fs::create_dir_all(&directory).with_context(|| format!("creating {}", directory.display()))?;
        let credential = token_file.as_ref().map_or_else(|| Credential::Token(cluster.token()), |file| Credential::File(file));
        let kubeconfig = proxy.kubeconfig(&directory, credential)?;
        let admin = free_address()?;
        // Compiled once for all tests of a process; whether a cache may be shared is tested by doing it.
        let cache = cluster.plane().control().directory().join("compiled");
        let mut arguments: Vec<String> = vec![
            "--log=info,berth_host=debug".into(),
            "run".into(),
            format!("--kubeconfig={}", kubeconfig.display()),
            format!("--namespace={}", cluster.system()),
            format!("--admin-address={admin}"),
        ];
        arguments.extend(more_namespaces.iter().map(|namespace| format!("--watch-namespace={namespace}")));
        arguments.extend(resolve.iter().map(|(name, address)| format!("--resolve={name}={address}")));
        arguments.extend(identity.iter().map(|identity| format!("--identity={identity}")));
        // A default of the harness gives way to a flag of the test.
        let defaults = [
            format!("--lease-duration={}s", LEASE.as_secs()),
            "--lease-renew-deadline=4s".into(),
            "--lease-retry=1s".into(),
            "--lease-margin=1s".into(),
            format!("--grace={}s", GRACE.as_secs()),
            format!("--cache-dir={}", cache.display()),
            format!("--watch-namespace={}", cluster.namespace()),
        ];
        let named = |flag: &str| more.iter().any(|given| given.split('=').next() == flag.split('=').next());
        arguments.extend(defaults.into_iter().filter(|flag| !named(flag)));
        arguments.extend(more.iter().cloned());
        let (program, log) = (workspace::berth()?, directory.join("log"));
        let process = Process::start(name, command(&program, &arguments), &log)?;
        let (client, ground, told_to_end) = (Client::new(), ground(cluster, flags), AtomicBool::new(false));
        Ok(Self { proxy, name: name.to_owned(), process, admin, program, arguments, log, client, ground, told_to_end })
    }

    /// Starts it again after it has ended, and waits until it is ready. Its log goes on in the same file.
    pub async fn restart(&mut self) {
        self.relaunch();
        self.until_ready().await;
    }

    /// Starts it again after it has ended; it may never get ready.
    pub fn relaunch(&mut self) {
        self.has_not_ended_by_itself();
        self.told_to_end.store(false, Ordering::Relaxed);
        self.process = Process::start(&self.name, command(&self.program, &self.arguments), &self.log).expect("it started before");
    }

    /// Waits for `/readyz`.
    ///
    /// # Panics
    /// When the host ends instead.
    pub async fn until_ready(&mut self) {
        let (client, url, process) = (self.client.clone(), format!("http://{}/readyz", self.admin), &mut self.process);
        let ended = eventually(READY, async || match client.get(&url).await {
            Ok(answer) if answer.status == 200 => Ok(None),
            Ok(answer) => Err(format!("{} {}", answer.status, answer.text())),
            Err(error) => process.ended().map(Some).ok_or_else(|| format!("{error:#}")),
        })
        .await;
        if let Some(status) = ended {
            panic!("the host {} ended before it was ready: {status}", self.name);
        }
    }

    /// Waits until it leads.
    pub async fn until_leading(&self) {
        eventually(READY, async || match self.metric("berth_leader", &[]).await {
            Some(1.0) => Ok(()),
            other => Err(format!("berth_leader is {other:?}")),
        })
        .await;
    }

    /// Asks the admin face.
    pub async fn get(&self, path: &str) -> anyhow::Result<Answer> {
        self.client.get(&format!("http://{}{path}", self.admin)).await
    }

    /// The value of a metric whose labels contain these.
    pub async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        self.metrics().await.ok()?.value(name, labels)
    }

    async fn metrics(&self) -> anyhow::Result<Exposition> {
        Ok(Exposition(self.get("/metrics").await?.text()))
    }

    /// Waits until so many objects of a kind (`ReportJob.batch.acme.io`) are in this state (`ready`, `delayed`, `running`) in the queue.
    pub async fn until_queued(&self, kind: &str, state: &str, count: f64) {
        eventually(READY, async || match self.metric("berth_queue_depth", &[("kind", kind), ("state", state)]).await {
            Some(depth) if depth == count => Ok(()),
            depth => Err(format!("{depth:?} of {count} {kind} are {state}")),
        })
        .await;
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Its log.
    pub fn log(&self) -> String {
        self.process.log()
    }

    /// Whether it runs.
    pub fn runs(&mut self) -> bool {
        self.process.ended().is_none()
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.has_not_ended_by_itself();
        self.told_to_end.store(true, Ordering::Relaxed);
        self.process.kill();
    }

    /// SIGTERM, without waiting.
    pub fn ask_to_end(&self) {
        self.told_to_end.store(true, Ordering::Relaxed);
        self.process.signal(Signal::TERM).expect("it runs");
    }

    /// SIGINT, as by Ctrl-C, without waiting.
    pub fn interrupt(&self) {
        self.told_to_end.store(true, Ordering::Relaxed);
        self.process.signal(Signal::INT).expect("it runs");
    }

    /// SIGSTOP: it stands still, as in a machine that is suspended.
    pub fn suspend(&self) {
        self.process.signal(Signal::STOP).expect("it runs");
    }

    /// SIGCONT after [`Host::suspend`].
    pub fn resume(&self) {
        self.process.signal(Signal::CONT).expect("it is there");
    }

    /// Waits for its end and returns its exit code; none if a signal ended it.
    pub async fn end(&mut self) -> Option<i32> {
        self.process.end(END).await.unwrap_or_else(|error| panic!("{error}")).code()
    }

    /// SIGTERM; returns the exit code.
    pub async fn terminate(&mut self) -> Option<i32> {
        self.ask_to_end();
        self.end().await
    }

    /// Waits until the laws hold.
    ///
    /// # Panics
    /// When they do not: with the laws that are broken, and by what.
    pub async fn until_lawful(&mut self) {
        let ground = self.ground.clone();
        let this = &mut *self;
        ground
            .hold(async move || {
                this.has_not_ended_by_itself();
                if this.runs() { this.metrics().await.map(Some) } else { Ok(None) }
            })
            .await;
    }

    fn has_not_ended_by_itself(&mut self) {
        if let Some(status) = self.process.ended() {
            assert!(self.told_to_end.load(Ordering::Relaxed), "L8: the host {} has ended by itself: {status}", self.name);
        }
    }

    /// The same from where nothing can be awaited.
    fn judge(&mut self) -> std::thread::Result<()> {
        let runtime = tokio::runtime::Handle::current();
        catch_unwind(AssertUnwindSafe(|| tokio::task::block_in_place(|| runtime.block_on(self.until_lawful()))))
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let judgement = if std::thread::panicking() { Ok(()) } else { self.judge() };
        if judgement.is_err() || std::thread::panicking() {
            eprintln!("{}", self.process.log_tail());
            let entries = self.proxy.entries();
            eprintln!("--- the last requests of {}", self.name);
            for entry in &entries[entries.len().saturating_sub(SHOWN)..] {
                eprintln!("{:?} ago: {entry}", entry.seen.at.elapsed());
            }
            eprintln!("---");
        }
        if let Err(broken) = judgement {
            resume_unwind(broken);
        }
    }
}

/// Where the laws of a case with such a host are looked at.
fn ground(cluster: &Cluster, flags: &Flags) -> Ground {
    let leads_to = |name: &str| flags.resolve.iter().find(|(from, _)| from == name).map(|(_, address)| *address);
    Ground {
        client: cluster.client().clone(),
        system: cluster.system().to_owned(),
        namespaces: std::iter::once(cluster.namespace().to_owned()).chain(flags.more_namespaces.iter().cloned()).collect(),
        gateway: leads_to(stage::MAIL),
        exporter: leads_to(stage::REPORTS),
    }
}

fn command(program: &PathBuf, arguments: &[String]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).env("NO_COLOR", "1");
    command
}
