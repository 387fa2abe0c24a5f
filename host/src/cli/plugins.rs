//! `berth plugins`: the plugins of a host, which versions of them serve, and how their objects are doing.

use std::process::ExitCode;

use anyhow::Context;
use kube::{
    Api, ResourceExt,
    api::{DynamicObject, ListParams},
};
use serde::Deserialize;

use super::cluster::ClusterArgs;
use crate::{
    client,
    report::{Figures, Status, plugin_kind},
};

/// Show the plugins of a host and how they are doing.
///
/// Reads the `Plugin` objects that the host writes; its figures are some seconds old. The version is the beginning of the digest of the
/// component, and that of its configuration.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  berth plugins
  berth plugins report-job                   one plugin, with its conditions")]
pub struct Args {
    /// One plugin alone
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// Namespace of the host
    #[arg(long, short, default_value = "berth-system")]
    namespace: String,
    #[command(flatten)]
    cluster: ClusterArgs,
}

impl Args {
    /// Prints them.
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        let Self { name, namespace, cluster } = self;
        let client = client::connect(cluster.config().await?).context("setting up the connection to the API server")?;
        let api: Api<DynamicObject> = Api::namespaced_with(client, &namespace, &plugin_kind().api_resource());
        let objects = match &name {
            Some(name) => vec![api.get(name).await.with_context(|| format!("reading the Plugin {name:?} in {namespace}"))?],
            None => api.list(&ListParams::default()).await.with_context(|| format!("listing the Plugin objects in {namespace}"))?.items,
        };
        let seen: Vec<Seen> = objects.iter().map(Seen::of).collect();
        if seen.is_empty() {
            println!("No plugins in {namespace}. \"berth push FILE.wasm\" brings one.");
            return Ok(ExitCode::SUCCESS);
        }
        print!("{}", table(&seen));
        for plugin in &seen {
            print!("{}", plugin.more(name.is_some()));
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// What is shown of a plugin.
struct Seen {
    name: String,
    status: Status,
    hosts: Vec<Figures>,
}

impl Seen {
    fn of(object: &DynamicObject) -> Self {
        let status = &object.data["status"];
        let hosts = status["hosts"].as_array().into_iter().flatten();
        Self {
            name: object.name_any(),
            status: Status::deserialize(status).unwrap_or_default(),
            hosts: hosts.filter_map(|entry| Figures::deserialize(entry).ok()).collect(),
        }
    }

    fn row(&self) -> [String; 10] {
        let Self { name, status, hosts } = self;
        let text = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".into());
        let sum =
            |figure: fn(&Figures) -> u64| if hosts.is_empty() { "-".into() } else { hosts.iter().map(figure).sum::<u64>().to_string() };
        [
            name.clone(),
            text(&status.kind),
            text(&status.stable_version),
            text(&status.candidate_version),
            status.ready().map_or_else(|| "-".into(), |ready| ready.status.clone()),
            sum(|host| host.objects),
            sum(|host| host.waiting),
            sum(|host| host.delayed),
            sum(|host| host.paused),
            status.reason.clone(),
        ]
    }

    /// What has gone wrong last, and with `all` every condition and host.
    fn more(&self, all: bool) -> String {
        let mut text = String::new();
        if all {
            for condition in &self.status.conditions {
                text += &format!("\n{:<11} {:<8} {}: {}", condition.r#type, condition.status, condition.reason, condition.message);
            }
            text.extend(self.hosts.iter().map(|host| format!("\nreconciled by {} (Lease {})", host.holder, host.name)));
            text += "\n";
        }
        for failure in self.hosts.iter().filter_map(|host| host.last_failure.as_ref()) {
            text += &format!(
                "\n{}: the last to fail was {}, first at {}, on {}: {}\n",
                self.name, failure.object, failure.time, failure.version, failure.cause
            );
        }
        text
    }
}

/// Columns as wide as what is in them.
fn table(seen: &[Seen]) -> String {
    let head = ["NAME", "KIND", "STABLE", "ON TRIAL", "READY", "OBJECTS", "WAITING", "DELAYED", "PAUSED", "REASON"].map(str::to_owned);
    let rows: Vec<_> = std::iter::once(head).chain(seen.iter().map(Seen::row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default();
    let widths: Vec<usize> = (0..rows[0].len()).map(width).collect();
    let line = |row: &[String; 10]| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect::<Vec<_>>().join("   ");
        format!("{}\n", cells.trim_end())
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn plugin(status: serde_json::Value) -> Seen {
        let object =
            json!({ "apiVersion": "berth.acme.io/v1alpha1", "kind": "Plugin", "metadata": { "name": "report-job" }, "status": status });
        Seen::of(&serde_json::from_value(object).expect("an object"))
    }

    #[test]
    fn a_plugin_is_a_line_with_its_figures_and_its_last_failure_below() {
        let seen = plugin(json!({
            "kind": "ReportJob.batch.acme.io", "stableVersion": "b47ffc5dd4fa-e3b0c4", "reason": "Serving.",
            "conditions": [{ "type": "Ready", "status": "True", "reason": "Serving", "message": "Serving." }],
            "hosts": [{ "name": "berth", "holder": "berth-a", "objects": 100, "waiting": 3, "delayed": 1, "paused": 0,
                "lastFailure": { "object": "ns/report-042", "cause": "no paper", "version": "v", "time": "2026-01-02T03:04:05Z" } }]
        }));
        let text = table(std::slice::from_ref(&seen));
        let words: Vec<_> = text.lines().nth(1).expect("a line").split_whitespace().collect();
        assert_eq!(words, ["report-job", "ReportJob.batch.acme.io", "b47ffc5dd4fa-e3b0c4", "-", "True", "100", "3", "1", "0", "Serving."]);
        assert_eq!(seen.more(false), "\nreport-job: the last to fail was ns/report-042, first at 2026-01-02T03:04:05Z, on v: no paper\n");
        assert!(seen.more(true).contains("reconciled by berth-a"));
    }

    #[test]
    fn a_plugin_of_which_nothing_is_known_is_shown_too() {
        let text = table(&[plugin(json!(null))]);
        assert_eq!(text.lines().count(), 2);
    }
}
