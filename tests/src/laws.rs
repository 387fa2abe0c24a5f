//! The laws: what holds at the end of every case, whatever was done to the host in it.
//!
//! | law | |
//! |---|---|
//! | L1 | one delivery per namespace, name and uid at the mail gateway |
//! | L2 | every object of a served kind is terminal or has a next run scheduled |
//! | L3 | `status.observedGeneration` is at most `metadata.generation`, and the phase is true of that generation |
//! | L4 | the label `workqueue.acme.io/phase` is the lower-cased phase |
//! | L8 | the host has not exited but by a signal of the test |
//!
//! # Expected flow
//! A [`Host`](crate::host::Host) that goes out of scope is held to them, so no case that has one can end without.
//!
//! # Guarantees
//! They are looked at until they have held for a moment without a break; a case that does not come to that fails with the law and the
//! object. A back end that still fails is no excuse: what waits for it has to be scheduled.
//!
//! # Caveats
//! L2 to L4 are about the kinds of [`KINDS`]. Of what is scheduled only the number is known, by the host's metrics.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::Context;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DynamicObject, ListParams};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::{client::Client, eventually::eventually, exporter::Export, exposition::Exposition, gateway::Delivery, resource::Resource};

mod object;

use object::{identity, is_open, name_of};

/// The kinds that are looked at, with the phases in which their objects are finished; without phases, what is observed is finished.
pub const KINDS: [(Resource, &[&str]); 3] =
    [(Resource::EMAIL, &["Sent", "Failed"]), (Resource::JOB, &["Done", "Failed"]), (Resource::PROBE, &[])];
/// The label that mirrors the phase of a ReportJob.
pub const PHASE_LABEL: &str = "workqueue.acme.io/phase";
/// How long a case may take to become quiet.
const QUIET: Duration = Duration::from_secs(30);
/// How long the laws have to hold: longer than the host takes to bring its gauges up to date.
const STEADY: Duration = Duration::from_millis(300);
/// A Lease that was renewed within this time is held.
const HELD: Duration = Duration::from_secs(10);

/// Where to look.
#[derive(Clone)]
pub struct Ground {
    /// The administrator.
    pub client: kube::Client,
    /// The namespace of the Lease.
    pub system: String,
    /// The namespaces of objects.
    pub namespaces: Vec<String>,
    /// The mail gateway, where there is one.
    pub gateway: Option<SocketAddr>,
    /// The report exporter, where there is one.
    pub exporter: Option<SocketAddr>,
}

impl std::fmt::Debug for Ground {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ground({:?})", self.namespaces)
    }
}

/// A kind that a host serves.
#[derive(Clone, Debug)]
pub struct Served {
    /// The kind.
    pub resource: Resource,
    /// How many of its objects are in the queue; none where the host does not lead.
    pub scheduled: Option<f64>,
}

/// Everything that the laws are about, as it is at one moment.
#[derive(Clone, Debug, Default)]
pub struct Sight {
    /// The kinds that are served; none where no host can be asked.
    pub served: Vec<Served>,
    /// Every object of [`KINDS`].
    pub objects: Vec<(Resource, Value)>,
    /// What the gateway has delivered.
    pub deliveries: Option<Vec<Delivery>>,
    /// What the exporter has made.
    pub exports: Option<Vec<Export>>,
}

impl Ground {
    /// Waits until the laws hold. `metrics` asks the host, or says that it has ended as it was told.
    ///
    /// # Panics
    /// When they do not within half a minute: with the laws that are broken, and by what.
    pub async fn hold(&self, mut metrics: impl AsyncFnMut() -> anyhow::Result<Option<Exposition>>) {
        let mut lawful: Option<Instant> = None;
        eventually(QUIET, async || {
            let broken = match metrics().await {
                Ok(metrics) => self.broken(metrics.as_ref()).await,
                Err(error) => Err(error),
            };
            let broken = broken.unwrap_or_else(|error| vec![format!("the laws cannot be looked at: {error:#}")]);
            assert!(!broken.iter().any(|law| law.starts_with("L1")), "what was delivered stays delivered:\n{}", broken.join("\n"));
            if !broken.is_empty() {
                lawful = None;
                return Err(broken.join("\n"));
            }
            let since = lawful.get_or_insert_with(Instant::now);
            if since.elapsed() >= STEADY { Ok(()) } else { Err(format!("they hold since {:?}", since.elapsed())) }
        })
        .await;
    }

    async fn broken(&self, metrics: Option<&Exposition>) -> anyhow::Result<Vec<String>> {
        let mut broken = self.look(metrics).await?.broken();
        if metrics.is_some_and(|metrics| metrics.value("berth_leader", &[]) != Some(1.0)) && !self.is_led().await? {
            broken.push("L2: nobody leads, so nothing is scheduled".to_owned());
        }
        Ok(broken)
    }

    /// What there is to see.
    async fn look(&self, metrics: Option<&Exposition>) -> anyhow::Result<Sight> {
        let mut sight = Sight::default();
        for (resource, _) in KINDS {
            let kind = format!("{}.{}", resource.kind, resource.group);
            let value = |name: &str, labels: &[(&str, &str)]| metrics.and_then(|metrics| metrics.value(name, labels));
            if value("berth_plugin_info", &[("kind", &kind)]) == Some(1.0) {
                let leads = value("berth_leader", &[]) == Some(1.0);
                let depth = |state: &str| value("berth_queue_depth", &[("kind", &kind), ("state", state)]).unwrap_or_default();
                let scheduled = leads.then(|| depth("ready") + depth("delayed") + depth("running"));
                sight.served.push(Served { resource, scheduled });
            }
            for namespace in &self.namespaces {
                let list = resource.api(&self.client, Some(namespace)).list(&ListParams::default()).await;
                let list = list.with_context(|| format!("listing {}", resource.plural))?;
                sight.objects.extend(list.items.into_iter().map(|object| (resource, plain(object))));
            }
        }
        sight.deliveries = self.ask(self.gateway, "deliveries").await?;
        sight.exports = self.ask(self.exporter, "exports").await?;
        Ok(sight)
    }

    /// What a back end tells of the objects of this case.
    async fn ask<T: DeserializeOwned>(&self, address: Option<SocketAddr>, what: &str) -> anyhow::Result<Option<Vec<T>>> {
        let Some(address) = address else { return Ok(None) };
        let answer = Client::new().get(&format!("http://{address}/{what}")).await?;
        serde_json::from_slice(&answer.body).map(Some).with_context(|| format!("reading the {what}"))
    }

    /// Whether somebody holds the Lease.
    async fn is_led(&self) -> anyhow::Result<bool> {
        let leases = Resource::LEASE.api(&self.client, Some(&self.system)).list(&ListParams::default()).await?;
        let is_held = |lease: &DynamicObject| {
            let spec = &lease.data["spec"];
            let renewed = spec["renewTime"].as_str().and_then(|time| time.parse::<Timestamp>().ok());
            let fresh = renewed.is_some_and(|renewed| renewed.duration_until(Timestamp::now()).unsigned_abs() < HELD);
            fresh && spec["holderIdentity"].as_str().is_some_and(|holder| !holder.is_empty())
        };
        Ok(leases.items.iter().any(is_held))
    }
}

impl Sight {
    /// The laws that do not hold, each with the object by which it is broken.
    pub fn broken(&self) -> Vec<String> {
        let objects = self.objects.iter().flat_map(|(resource, object)| self.broken_by(*resource, object));
        self.delivered_more_than_once().chain(objects).chain(self.unscheduled()).collect()
    }

    fn delivered_more_than_once(&self) -> impl Iterator<Item = String> {
        let mut times: BTreeMap<&str, usize> = BTreeMap::new();
        for delivery in self.deliveries.iter().flatten() {
            *times.entry(identity(&delivery.key)).or_default() += 1;
        }
        let twice = times.into_iter().filter(|(_, times)| *times > 1);
        twice.map(|(object, times)| format!("L1: {object} was delivered {times} times")).collect::<Vec<_>>().into_iter()
    }

    fn unscheduled(&self) -> impl Iterator<Item = String> + '_ {
        self.served.iter().filter_map(|Served { resource, scheduled }| {
            let scheduled = (*scheduled)?;
            let open = self.objects.iter().filter(|(of, object)| of == resource && is_open(*resource, object));
            let open: Vec<String> = open.map(|(_, object)| name_of(object)).collect();
            let lost = open.len() as f64 > scheduled;
            lost.then(|| {
                format!("L2: {} of these {} are in the queue, none of which is finished: {}", scheduled, resource.plural, open.join(", "))
            })
        })
    }

    fn broken_by(&self, resource: Resource, object: &Value) -> Vec<String> {
        let name = format!("{} {}", resource.kind, name_of(object));
        let (status, metadata) = (&object["status"], &object["metadata"]);
        let (observed, generation) = (status["observedGeneration"].as_i64(), metadata["generation"].as_i64());
        let mut broken = Vec::new();
        if observed > generation {
            broken.push(format!("L3: {name} has observed generation {observed:?} of {generation:?}"));
        }
        if !self.served.iter().any(|served| served.resource == resource) || !metadata["deletionTimestamp"].is_null() {
            return broken;
        }
        let finished = KINDS.iter().any(|(of, phases)| *of == resource && phases.iter().any(|phase| status["phase"] == *phase));
        if finished && observed != generation {
            broken.push(format!("L3: {name} is {} for generation {observed:?}, and now at {generation:?}", status["phase"]));
        }
        broken.extend(self.untrue(resource, object).map(|why| format!("L3: {name} is {}, but {why}", status["phase"])));
        if resource == Resource::JOB {
            let (label, phase) = (metadata["labels"][PHASE_LABEL].as_str(), status["phase"].as_str());
            if label.map(str::to_owned) != phase.map(str::to_lowercase) {
                broken.push(format!("L4: {name} has the label {label:?} and the phase {phase:?}"));
            }
        }
        broken
    }

    /// Why a success that an object tells of is not one, if it is not.
    fn untrue(&self, resource: Resource, object: &Value) -> Option<String> {
        let (status, spec) = (&object["status"], &object["spec"]);
        let of_object = format!("/{}/{}", name_of(object), object["metadata"]["uid"].as_str().unwrap_or_default());
        if resource == Resource::EMAIL && status["phase"] == "Sent" {
            let delivered = self.deliveries.as_ref()?.iter().find(|delivery| delivery.key.ends_with(&of_object));
            return match delivered {
                None => Some("nothing was delivered".to_owned()),
                Some(delivery) if delivery.payload != *spec && status["message"].is_null() => {
                    Some(format!("{} was delivered", delivery.payload))
                }
                Some(_) => None,
            };
        }
        if resource == Resource::JOB && status["phase"] == "Done" {
            let made = self.exports.as_ref()?.iter().rev().find(|export| export.key.ends_with(&of_object));
            let wanted = json!({"report": spec["report"], "format": spec["format"]});
            return match made {
                None => Some("no report was made".to_owned()),
                Some(export) if json!(export.order) != wanted => Some(format!("{} was made", json!(export.order))),
                Some(_) if !status["url"].is_string() => Some("it does not say where the report is".to_owned()),
                Some(_) => None,
            };
        }
        None
    }
}

fn plain(object: DynamicObject) -> Value {
    serde_json::to_value(object).expect("an object is JSON")
}

#[cfg(test)]
mod tests;
