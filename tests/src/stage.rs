//! A cluster with the demo back ends and the plugins that ship: where most tests begin.

use std::{process::Command, time::Duration};

use serde_json::{Value, json};

use crate::{
    behaviour::Behaviour,
    cluster::Cluster,
    exporter::Exporter,
    gateway::Gateway,
    host::{Flags, Host},
    resource::Resource,
    workspace,
};

/// Where the plugin for EmailRequests sends.
pub const MAIL: &str = "mail.demo:80";
/// Where the plugin for ReportJobs sends.
pub const REPORTS: &str = "reports.demo:80";
/// Long enough for anything that happens at once, on a machine that is busy.
pub const SOON: Duration = Duration::from_secs(30);

/// A cluster, the back ends, and a way to start hosts.
pub struct Stage {
    /// The test's part of the control plane.
    pub cluster: Cluster,
    /// Where mails go.
    pub gateway: Gateway,
    /// Where reports are made.
    pub exporter: Exporter,
}

impl Stage {
    /// On the shared control plane.
    pub async fn shared() -> Self {
        Self::on(Cluster::shared().await).await
    }

    /// On some cluster.
    pub async fn on(cluster: Cluster) -> Self {
        let gateway = Gateway::start(&cluster.directory().join("gateway")).await.expect("the gateway starts");
        let exporter = Exporter::start(&cluster.directory().join("exporter")).await.expect("the exporter starts");
        Self { cluster, gateway, exporter }
    }

    /// Flags with which a host finds the back ends.
    pub fn flags(&self) -> Flags {
        let resolve = vec![(MAIL.to_owned(), self.gateway.addr()), (REPORTS.to_owned(), self.exporter.addr())];
        Flags { resolve, ..Flags::default() }
    }

    /// A host that is ready.
    pub async fn host(&self) -> Host {
        Host::start(&self.cluster, "host", &self.flags()).await
    }

    /// A host with the plugin for EmailRequests as it ships, serving.
    pub async fn email_host(&self) -> Host {
        let version = self.push_email_request().await;
        let host = self.host().await;
        self.cluster.until_serving("email-request", &version).await;
        host
    }

    /// A host with the plugin for ReportJobs as it ships and these lines added to its `plugin.yaml`, serving.
    pub async fn report_host(&self, more: &str) -> Host {
        let version = self.push_report_job(more).await;
        let host = self.host().await;
        self.cluster.until_serving("report-job", &version).await;
        host
    }

    /// Delivers the plugin for EmailRequests as it ships.
    pub async fn push_email_request(&self) -> String {
        let config = workspace::deploy("plugins/email-request.yaml").expect("it ships");
        self.cluster.push("email-request", &guest("email_request"), &config).await
    }

    /// Delivers the plugin for ReportJobs as it ships, with these lines added to its `plugin.yaml`.
    pub async fn push_report_job(&self, more: &str) -> String {
        self.push_report_job_as("report_job", more).await
    }

    /// Delivers another component as the plugin for ReportJobs.
    pub async fn push_report_job_as(&self, component: &str, more: &str) -> String {
        let config = workspace::deploy("plugins/report-job.yaml").expect("it ships");
        self.cluster.push("report-job", &guest(component), &format!("{config}{more}")).await
    }

    /// Asks for a mail to this address.
    pub async fn mail(&self, name: &str, to: &str) -> String {
        let spec = json!({"to": to, "template": "welcome", "locale": "en-GB"});
        self.cluster.create(Resource::EMAIL, name, spec).await.metadata.uid.expect("the API server gives one")
    }

    /// Asks for a report.
    pub async fn job(&self, name: &str, report: &str, priority: i64) -> String {
        let spec = json!({"report": report, "format": "pdf", "priority": priority});
        self.cluster.create(Resource::JOB, name, spec).await.metadata.uid.expect("the API server gives one")
    }

    /// Waits for a mail's phase.
    #[track_caller]
    pub fn until_mail(&self, name: &str, phase: &str) -> impl Future<Output = Value> {
        self.cluster.until_phase(Resource::EMAIL, name, phase, SOON)
    }

    /// Waits for a job's phase.
    #[track_caller]
    pub fn until_job(&self, name: &str, phase: &str) -> impl Future<Output = Value> {
        self.cluster.until_phase(Resource::JOB, name, phase, SOON)
    }

    /// A job for a report that cannot be made, once it is a dead letter. The exporter goes on failing to make it.
    pub async fn dead_letter(&self, name: &str) {
        self.exporter.control(Behaviour::fail(503).only("broken"));
        self.job(name, "broken", 0).await;
        self.until_job(name, "Failed").await;
    }

    /// What a key of the object contains, and of no other.
    pub fn key(&self, name: &str) -> String {
        format!("/{}/{name}/", self.cluster.namespace())
    }
}

/// A host on which the probe serves, as this component with this configuration.
pub async fn probing(cluster: &Cluster, component: &[u8], config: &str) -> Host {
    let version = cluster.push("probe", component, config).await;
    let host = Host::start(cluster, "host", &Flags::default()).await;
    cluster.until_serving("probe", &version).await;
    host
}

/// Runs `berth` as a person does, and returns what it says.
///
/// # Panics
/// When it fails.
pub async fn berth(cluster: &Cluster, arguments: &[&str]) -> String {
    let mut command = Command::new(workspace::berth().expect("the binary is built"));
    command.args(arguments).arg("--kubeconfig").arg(cluster.plane().control().kubeconfig());
    let output = tokio::task::spawn_blocking(move || command.output().expect("it runs")).await.expect("it ends");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {text}");
    text
}

/// The bytes of a component that was built.
pub fn guest(name: &str) -> Vec<u8> {
    let path = workspace::guest(name).unwrap_or_else(|error| panic!("{error}"));
    std::fs::read(&path).unwrap_or_else(|error| panic!("reading {}: {error}", path.display()))
}

/// A probe that settles and dead-letters.
pub fn settling() -> Vec<u8> {
    probe(&letters(5))
}

/// A claim of objects that are settled in two phases, one of which is a dead letter: at this failure.
pub fn letters(after: u32) -> Value {
    json!({
        "progress": {"phaseField": "status.phase", "settled": ["Done", "Failed"]},
        "deadLetter": {"after": after, "phase": "Failed", "retriesField": "status.retries", "messageField": "status.message"},
    })
}

/// The probe with this claim. The claim lies in a slot of the component's bytes, which is as long as it is.
pub fn probe(claim: &Value) -> Vec<u8> {
    const MARKER: &[u8] = b"PROBE-CLAIM:";
    const SLOT: usize = 2048;
    let mut component = guest("probe");
    let start =
        component.windows(MARKER.len()).position(|window| window == MARKER).expect("the probe has a slot for its claim") + MARKER.len();
    let text = claim.to_string();
    let slot = &mut component[start..start + SLOT - MARKER.len()];
    assert!(text.len() <= slot.len(), "the claim is longer than its slot: {text}");
    slot.fill(b' ');
    slot[..text.len()].copy_from_slice(text.as_bytes());
    component
}
