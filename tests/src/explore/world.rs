//! One run of a scenario: a part of the control plane, back ends, hosts, and a fault proxy before each of them.

use std::time::{Duration, Instant};

use futures::future::{BoxFuture, FutureExt, select_all};
use serde_json::Value;
use tokio::sync::{Mutex, MutexGuard};

use super::{
    Strike,
    point::{Names, Place, Point, Trigger, points},
};
use crate::{
    cluster::Cluster,
    eventually::eventually,
    host::{Flags, Host},
    laws::KINDS,
    proxy::{Entry, Handle, Proxy, Rule},
    resource::Resource,
    stage::{MAIL, REPORTS, Stage},
};

/// Short, so that a run with a takeover takes seconds; long enough for a renewal on a machine that does four runs at once.
const TIMES: [&str; 6] = [
    "--lease-duration=3s",
    "--lease-renew-deadline=2s",
    "--lease-retry=500ms",
    "--lease-margin=500ms",
    "--write-deadline=2s",
    "--grace=5s",
];
/// How long anything in a scenario may take: several takeovers, and a write of a `Plugin` object that is never answered.
pub const PATIENCE: Duration = Duration::from_secs(90);
/// Without a write for this long, a host has nothing more to do.
const QUIET: Duration = Duration::from_millis(600);

/// Everything that takes part in a run. Hosts go first.
pub struct World {
    hosts: Vec<Mutex<Host>>,
    /// The cluster and the back ends themselves.
    pub stage: Stage,
    names: Names,
    mail: Proxy,
    reports: Proxy,
    /// Before the hosts, until these are launched.
    before: Vec<Proxy>,
    rules: Vec<(Option<usize>, Handle)>,
}

impl World {
    /// Without its hosts.
    pub async fn new(name: &str, replicas: usize) -> anyhow::Result<Self> {
        let stage = Stage::on(Cluster::shared_as(name).await).await;
        let mut before = Vec::new();
        for _ in 0..replicas {
            before.push(Proxy::start(&stage.cluster.plane().control().config()).await?);
        }
        let mail = Proxy::of_back_end(stage.gateway.addr()).await?;
        let reports = Proxy::of_back_end(stage.exporter.addr()).await?;
        Ok(Self { hosts: Vec::new(), names: Names::of(&stage.cluster), stage, mail, reports, before, rules: Vec::new() })
    }

    /// Prepares for a fault, before the hosts are there.
    pub fn arm(&mut self, strike: &Strike) {
        let trigger = Trigger::new(self.names.clone(), strike.point.clone());
        let rule = |place: Place| {
            let trigger = trigger.clone();
            Rule::any(strike.fault.effect()).when(move |seen| trigger.is_it(place, seen)).times(1)
        };
        let mut rules: Vec<_> = self.before.iter().enumerate().map(|(host, proxy)| (Some(host), proxy.rule(rule(Place::Api)))).collect();
        rules.push((None, self.mail.rule(rule(Place::Mail))));
        rules.push((None, self.reports.rule(rule(Place::Reports))));
        self.rules = rules;
    }

    /// Launches the hosts. They may take their time to get ready.
    pub fn launch(&mut self) -> anyhow::Result<()> {
        let resolve = vec![(MAIL.to_owned(), self.mail.addr()), (REPORTS.to_owned(), self.reports.addr())];
        let flags = Flags { resolve, more: TIMES.map(str::to_owned).into(), ..Flags::default() };
        for (number, proxy) in std::mem::take(&mut self.before).into_iter().enumerate() {
            let host = Host::launch_behind(proxy, &self.stage.cluster, &format!("host-{number}"), &flags)?;
            self.hosts.push(Mutex::new(host));
        }
        Ok(())
    }

    /// A host.
    pub async fn host(&self, number: usize) -> MutexGuard<'_, Host> {
        self.hosts[number].lock().await
    }

    /// The number of the host that leads.
    pub async fn leader(&self) -> Option<usize> {
        for (number, host) in self.hosts.iter().enumerate() {
            if host.lock().await.metric("berth_leader", &[]).await == Some(1.0) {
                return Some(number);
            }
        }
        None
    }

    /// Waits for the fault's point, if there is one and it is reached: which host it is, and what is held of the request.
    pub fn struck(&mut self) -> impl Future<Output = (Option<usize>, Handle)> + use<> {
        let rules = std::mem::take(&mut self.rules);
        async move {
            if rules.is_empty() {
                std::future::pending::<()>().await;
            }
            let hits: Vec<BoxFuture<'static, ()>> = rules.iter().map(|(_, rule)| rule.hit().boxed()).collect();
            let ((), which, _) = select_all(hits).await;
            rules.into_iter().nth(which).expect("one of them")
        }
    }

    /// Whether all that was to be done is done: nothing waits in the queue of whoever leads, and nothing was written for a moment.
    pub async fn quiet(&self) -> Result<(), String> {
        let leader = self.leader().await.ok_or("nobody leads")?;
        let host = self.host(leader).await;
        for (resource, _) in KINDS {
            let kind = format!("{}.{}", resource.kind, resource.group);
            for state in ["ready", "delayed", "running"] {
                match host.metric("berth_queue_depth", &[("kind", &kind), ("state", state)]).await {
                    None | Some(0.0) => {}
                    Some(depth) => return Err(format!("{depth} {kind} are {state}")),
                }
            }
        }
        drop(host);
        let last = self
            .entries()
            .await
            .into_iter()
            .filter(|(place, entry)| self.names.effect(*place, &entry.seen).is_some_and(|name| !name.starts_with("lease")));
        match last.max_by_key(|(_, entry)| entry.seen.at) {
            Some((_, entry)) if entry.seen.at.elapsed() < QUIET => Err(format!("{:?} ago: {entry}", entry.seen.at.elapsed())),
            _ => Ok(()),
        }
    }

    /// The points that a run has passed.
    pub async fn points(&self) -> Vec<Point> {
        points(&self.names, self.entries().await.into_iter())
    }

    async fn entries(&self) -> Vec<(Place, Entry)> {
        let mut entries: Vec<_> = self.mail.entries().into_iter().map(|entry| (Place::Mail, entry)).collect();
        entries.extend(self.reports.entries().into_iter().map(|entry| (Place::Reports, entry)));
        for host in &self.hosts {
            entries.extend(host.lock().await.proxy.entries().into_iter().map(|entry| (Place::Api, entry)));
        }
        entries
    }

    /// Waits until an object is so.
    #[track_caller]
    pub fn until(&self, resource: Resource, name: &str, is: impl Fn(&Value) -> bool) -> impl Future<Output = Value> {
        self.stage.cluster.until(resource, name, PATIENCE, is)
    }

    /// Waits for a phase of the present version of a spec.
    #[track_caller]
    pub fn until_phase(&self, resource: Resource, name: &str, phase: &str) -> impl Future<Output = Value> {
        self.until(resource, name, move |object| {
            object["status"]["phase"] == phase && object["status"]["observedGeneration"] == object["metadata"]["generation"]
        })
    }

    /// Ends whoever leads, in order, and waits for that end; it may be struck meanwhile, and run again.
    pub async fn hand_over(&self) {
        let leader = eventually(PATIENCE, async || self.leader().await.ok_or("nobody leads")).await;
        let process = {
            let mut host = self.host(leader).await;
            if !host.runs() {
                return;
            }
            host.ask_to_end();
            host.id()
        };
        let asked = Instant::now();
        eventually(PATIENCE, async || {
            let mut host = self.host(leader).await;
            if host.id() != process || !host.runs() { Ok(()) } else { Err(format!("it runs {:?} after SIGTERM", asked.elapsed())) }
        })
        .await;
    }
}
