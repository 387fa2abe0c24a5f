//! The set of the demo: control plane, back ends, two hosts, and what is shown on the terminal.

use std::{
    io::IsTerminal,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use berth_host::{
    controlplane::{ControlPlane, Options},
    install::{Manifests, Mode},
};
use berth_tests::{
    exporter::Exporter,
    gateway::Gateway,
    process::{Process, free_address},
    resource::Resource,
    workspace,
};
use kube::{
    Api, Client,
    api::{DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};

/// Where the demo's objects are.
pub const NAMESPACE: &str = "default";
/// Where the host is.
const SYSTEM: &str = "berth-system";
const REPLICAS: [&str; 2] = ["berth-a", "berth-b"];
/// How often something that is waited for is looked at.
const PACE: Duration = Duration::from_millis(200);
const SOON: Duration = Duration::from_secs(60);

/// Everything that the demo plays with.
pub struct Set {
    started: Instant,
    acts: usize,
    shown: Vec<String>,
    plane: ControlPlane,
    client: Client,
    hosts: Vec<(&'static str, Process)>,
    directory: tempfile::TempDir,
    /// Where mails go.
    pub gateway: Gateway,
    /// Where reports are made.
    pub exporter: Exporter,
}

/// The phase in an object's status, empty where there is none.
pub fn phase_of(object: &Value) -> String {
    object["status"]["phase"].as_str().unwrap_or_default().to_owned()
}

fn plain(object: DynamicObject) -> Value {
    serde_json::to_value(object).expect("an object is JSON")
}

impl Set {
    /// Starts everything and waits until both plugins serve.
    pub async fn build() -> anyhow::Result<Self> {
        let started = Instant::now();
        println!("Starting etcd, kube-apiserver and kube-controller-manager (the first time they are built, which takes some 8 minutes) …");
        let plane = ControlPlane::start(Options::default()).await?;
        let client = Client::try_from(plane.config())?;
        let directory = tempfile::Builder::new().prefix("berth-demo-").tempdir()?;
        let gateway = Gateway::start(&directory.path().join("gateway")).await?;
        let exporter = Exporter::start(&directory.path().join("exporter")).await?;
        let mut set = Self { started, acts: 0, shown: Vec::new(), plane, client, hosts: Vec::new(), directory, gateway, exporter };
        set.say("a real Kubernetes API server is up");
        for path in ["deploy", "deploy/plugins"] {
            set.command(&format!("kubectl apply --server-side -k {path}"));
            let applied = Manifests::read(&workspace::root().join(path))?.apply(&set.client, Mode::Store).await?;
            set.output(&format!("{} objects", applied.len()));
        }
        for replica in REPLICAS {
            set.start_host(replica).await?;
        }
        set.say("two hosts run under the account system:serviceaccount:berth-system:berth; one will lead");
        for plugin in ["email-request", "report-job"] {
            let object = set.until_plugin(plugin, |plugin| ready(plugin) && plugin["status"]["refusedReason"].is_null()).await?;
            set.output(&format!("{plugin}: {}", object["status"]["reason"].as_str().unwrap_or_default()));
        }
        Ok(set)
    }

    async fn start_host(&mut self, name: &'static str) -> anyhow::Result<()> {
        let kubeconfig = self.plane.kubeconfig_of(SYSTEM, "berth").await?;
        let mut command = Command::new(workspace::berth()?);
        command.arg("run").arg("--kubeconfig").arg(kubeconfig).arg("--identity").arg(name);
        command.arg("--admin-address").arg(free_address()?.to_string());
        command.arg("--cache-dir").arg(self.directory.path().join("compiled"));
        command.arg("--resolve").arg(format!("mail.demo:80={}", self.gateway.addr()));
        command.arg("--resolve").arg(format!("reports.demo:80={}", self.exporter.addr()));
        let log = self.directory.path().join(format!("{name}.log"));
        self.hosts.push((name, Process::start(name, command, &log)?));
        Ok(())
    }

    /// The heading of the next act.
    pub fn act(&mut self, title: &str) {
        self.acts += 1;
        let line = format!("{}. {title}", self.acts);
        println!("\n{}", if std::io::stdout().is_terminal() { format!("\x1b[1m{line}\x1b[0m") } else { line });
    }

    /// A remark with the time since the start.
    pub fn say(&self, line: &str) {
        println!("  {:>6.1} s  {line}", self.started.elapsed().as_secs_f64());
    }

    /// What a person would type.
    pub fn command(&self, command: &str) {
        println!("  {:>6.1} s  $ {command}", self.started.elapsed().as_secs_f64());
    }

    /// What that prints.
    pub fn output(&self, text: &str) {
        for line in text.lines() {
            println!("             {line}");
        }
    }

    /// What the act has proved.
    pub fn shown(&mut self, line: &str) {
        self.say(&format!("✔ {line}"));
        self.shown.push(line.to_owned());
    }

    /// Applies a file of this repository.
    pub async fn apply(&self, path: &str) -> anyhow::Result<()> {
        Manifests::read(&workspace::root().join(path))?.apply(&self.client, Mode::Store).await?;
        Ok(())
    }

    /// Creates an object.
    pub async fn create(&self, resource: Resource, name: &str, spec: Value) -> anyhow::Result<()> {
        let object = resource.object(NAMESPACE, name, spec);
        self.api(resource).create(&PostParams::default(), &object).await.with_context(|| format!("creating {name}"))?;
        Ok(())
    }

    /// The objects that a selector finds.
    pub async fn list(&self, resource: Resource, selector: &str) -> anyhow::Result<Vec<Value>> {
        let list = self.api(resource).list(&ListParams::default().labels(selector)).await?;
        Ok(list.items.into_iter().map(plain).collect())
    }

    /// Replaces the component of a plugin. Returns when it was written.
    pub async fn push(&self, plugin: &str, component: &[u8]) -> anyhow::Result<Instant> {
        let file = format!("{plugin}.wasm");
        let patch = json!({"binaryData": {file: k8s_openapi::ByteString(component.to_vec())}});
        let api = Resource::CONFIG_MAP.api(&self.client, Some(SYSTEM));
        api.patch(plugin, &PatchParams::default(), &Patch::Merge(patch)).await.with_context(|| format!("pushing {plugin}"))?;
        Ok(Instant::now())
    }

    /// Replaces the `plugin.yaml` of a plugin by the shipped one with these lines added.
    pub async fn configure(&self, plugin: &str, more: &str) -> anyhow::Result<()> {
        let config = workspace::deploy(&format!("plugins/{plugin}.yaml"))?;
        let patch = json!({"data": {"plugin.yaml": format!("{config}{more}")}});
        let api = Resource::CONFIG_MAP.api(&self.client, Some(SYSTEM));
        api.patch(plugin, &PatchParams::default(), &Patch::Merge(patch)).await.with_context(|| format!("configuring {plugin}"))?;
        Ok(())
    }

    /// Waits for a state of an object.
    pub async fn until(&self, resource: Resource, name: &str, within: Duration, is: impl Fn(&Value) -> bool) -> anyhow::Result<Value> {
        let api = self.api(resource);
        until(name, within, async || Ok(api.get_opt(name).await?.map(plain)), is).await
    }

    /// Waits for a state of a `Plugin` that speaks of the ConfigMap as it is now.
    pub async fn until_plugin(&self, name: &str, is: impl Fn(&Value) -> bool) -> anyhow::Result<Value> {
        let configmap = Resource::CONFIG_MAP.api(&self.client, Some(SYSTEM)).get(name).await?;
        let version = json!(configmap.metadata.resource_version);
        let api = Resource::PLUGIN.api(&self.client, Some(SYSTEM));
        let look = async || Ok(api.get_opt(name).await?.map(plain));
        until(name, SOON, look, |plugin| plugin["status"]["observedVersion"] == version && is(plugin)).await
    }

    /// Waits until some ReportJob is so, and returns it.
    pub async fn until_job(&self, what: &str, within: Duration, is: impl Fn(&Value) -> bool) -> anyhow::Result<Value> {
        let look = async || Ok(self.list(Resource::JOB, "").await?.into_iter().find(&is));
        until(what, within, look, |_| true).await
    }

    /// Waits until so many ReportJobs are `Done`, and shows how it goes.
    pub async fn until_jobs_done(&self, count: usize, within: Duration) -> anyhow::Result<()> {
        let mut told = 0;
        let look = async || {
            let done = self.list(Resource::JOB, "workqueue.acme.io/phase=done").await?.len();
            if done / 20 > told / 20 {
                self.say(&format!("{done} of 100 Done"));
            }
            told = done;
            Ok(Some(json!(done)))
        };
        until("the jobs", within, look, |done| done.as_u64().is_some_and(|done| done >= count as u64)).await?;
        Ok(())
    }

    /// Waits until so many reports with such keys are made.
    pub async fn until_reports(&self, mine: impl Fn(&str) -> bool, count: usize, within: Duration) -> anyhow::Result<()> {
        let look = async || Ok(Some(json!(self.exporter.exports().iter().filter(|export| mine(&export.key)).count())));
        until("the reports", within, look, |made| made.as_u64().is_some_and(|made| made >= count as u64)).await?;
        Ok(())
    }

    /// The priorities of the jobs in the order in which their reports were made.
    pub fn priorities_in_order_of_export(&self, jobs: &[Value]) -> Vec<i64> {
        let of = |key: &str| {
            let job = jobs.iter().find(|job| job["metadata"]["uid"].as_str().is_some_and(|uid| key.contains(uid)))?;
            Some(job["spec"]["priority"].as_i64().unwrap_or_default())
        };
        self.exporter.exports().iter().filter_map(|export| of(&export.key)).collect()
    }

    async fn leader(&self) -> anyhow::Result<Option<String>> {
        let lease = Resource::LEASE.api(&self.client, Some(SYSTEM)).get_opt("berth").await?;
        Ok(lease.and_then(|lease| lease.data["spec"]["holderIdentity"].as_str().map(str::to_owned)).filter(|holder| !holder.is_empty()))
    }

    /// SIGKILL to the host that leads. Returns its name.
    pub async fn kill_leader(&mut self) -> anyhow::Result<String> {
        let leader = self.leader().await?.context("nobody leads")?;
        let (_, process) =
            self.hosts.iter_mut().find(|(name, _)| *name == leader).with_context(|| format!("{leader} is not of the demo"))?;
        process.kill();
        Ok(leader)
    }

    /// Waits for another leader.
    pub async fn until_led_by_other_than(&self, former: &str) -> anyhow::Result<String> {
        let look = async || Ok(self.leader().await?.map(Value::from));
        let leader = until("another leader", SOON, look, |leader| leader != former).await?;
        Ok(leader.as_str().unwrap_or_default().to_owned())
    }

    /// What went by.
    pub fn summary(&self) {
        println!("\nIn {:.0} s, on a real API server:", self.started.elapsed().as_secs_f64());
        for line in &self.shown {
            println!("  ✔ {line}");
        }
    }

    /// What to try while it is up.
    pub fn invite(&self) {
        println!(
            "\nIt is still up. In another terminal:

  export KUBECONFIG={}
  kubectl get plugins.berth.acme.io -n {SYSTEM}
  kubectl get emailrequests,reportjobs
  kubectl create -f - <<< '{{\"apiVersion\":\"notify.acme.io/v1\",\"kind\":\"EmailRequest\",\"metadata\":{{\"name\":\"mine\"}},
    \"spec\":{{\"to\":\"me@example.com\",\"template\":\"welcome\",\"locale\":\"en\"}}}}'
  curl {}/deliveries
  curl -d '{{\"fail\": 503}}' {}/control        # and -d '{{}}' to behave again
  target/debug/berth push FILE.wasm --kubeconfig $KUBECONFIG

Logs of the hosts are in {}. Ctrl-C ends everything.",
            self.plane.kubeconfig().display(),
            self.gateway.url(),
            self.gateway.url(),
            self.directory.path().display()
        );
    }

    /// Ends everything in order.
    pub async fn strike(mut self) -> anyhow::Result<()> {
        for (name, process) in &mut self.hosts {
            if process.ended().is_none() {
                let status = process.terminate(Duration::from_secs(30)).await?;
                anyhow::ensure!(status.success(), "{name} ended with {status}");
            }
        }
        self.plane.stop().await;
        Ok(())
    }

    /// The ends of the hosts' logs.
    pub fn show_logs(&self) {
        for (_, process) in &self.hosts {
            eprintln!("{}", process.log_tail());
        }
    }

    fn api(&self, resource: Resource) -> Api<DynamicObject> {
        resource.api(&self.client, Some(NAMESPACE))
    }
}

fn ready(plugin: &Value) -> bool {
    let conditions = plugin["status"]["conditions"].as_array();
    conditions.is_some_and(|all| all.iter().any(|condition| condition["type"] == "Ready" && condition["status"] == "True"))
}

/// Looks again and again; the error says what was seen last.
async fn until(
    what: &str,
    within: Duration,
    mut look: impl AsyncFnMut() -> anyhow::Result<Option<Value>>,
    is: impl Fn(&Value) -> bool,
) -> anyhow::Result<Value> {
    let deadline = Instant::now() + within;
    loop {
        let seen = look().await?;
        match seen {
            Some(value) if is(&value) => return Ok(value),
            seen if Instant::now() > deadline => {
                let last = seen.map_or_else(|| "nothing".to_owned(), |value| value.to_string());
                bail!("waited {within:?} for {what}; the last state seen: {last}");
            }
            _ => tokio::time::sleep(PACE).await,
        }
    }
}
