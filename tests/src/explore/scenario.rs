//! What is explored: what the host is given to do, step by step, without regard to which host does it and when.

use berth_host::package::Digest;
use futures::future::{FutureExt, LocalBoxFuture};
use serde_json::{Value, json};

use super::world::{PATIENCE, World};
use crate::{
    account::grant_children,
    behaviour::{Behaviour, Hold},
    cluster::ready_reason,
    eventually::eventually,
    resource::Resource,
    stage::{guest, letters, probe},
    workspace,
};

/// Short pauses.
const QUICK: &str = "backoff: {base: 100ms, max: 500ms}\n";
/// Enough runs for a version on trial to prove itself.
const TRIAL: usize = 20;
/// The names of jobs that only some runs need.
pub const MORE: &str = "more-";

/// A step of a scenario.
type Step = for<'w> fn(&'w World) -> LocalBoxFuture<'w, ()>;

/// A scenario. It is about what comes of it: each step waits for what is to be true in the end, however long a fault delays it.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// A word.
    pub name: &'static str,
    /// How many hosts there are.
    pub replicas: usize,
    /// What is there before the hosts are.
    pub prepare: Step,
    /// What happens then.
    pub script: Step,
    /// What of the end depends on when a fault happens, taken out.
    pub forget: fn(&mut Value),
}

impl std::fmt::Debug for Scenario {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// Mails: one is sent, one is refused and then edited.
pub const MAILS: Scenario = Scenario {
    name: "mails",
    replicas: 1,
    prepare: |world| {
        async {
            world.stage.gateway.control(Behaviour::fail(400).only("/refused/"));
            push_mails(world).await;
        }
        .boxed_local()
    },
    script: |world| mails(world).boxed_local(),
    forget: |_| {},
};

/// Reports: one is made, one at the third try, one never.
pub const REPORTS: Scenario = Scenario {
    name: "reports",
    replicas: 1,
    prepare: |world| {
        async {
            world.stage.exporter.control(Behaviour::fail(503).only("flaky").times(2));
            world.stage.exporter.control(Behaviour::fail(503).only("broken"));
            world.stage.push_report_job(QUICK).await;
        }
        .boxed_local()
    },
    script: |world| reports(world).boxed_local(),
    forget: |_| {},
};

/// Children and finalizers: made, changed, taken away, undone.
pub const CHILDREN: Scenario = Scenario {
    name: "children",
    replicas: 1,
    prepare: |world| {
        async {
            let mut claim = letters(5);
            (claim["owns"], claim["finalizer"]) = (json!(["ConfigMap"]), true.into());
            grant_children(&world.stage.cluster).await;
            world.stage.cluster.push("probe", &probe(&claim), &format!("serviceAccountName: maker\n{QUICK}")).await;
        }
        .boxed_local()
    },
    script: |world| children(world).boxed_local(),
    forget: |_| {},
};

/// A reload in the middle of a run, until the new version is the stable one.
pub const RELOAD: Scenario = Scenario {
    name: "reload",
    replicas: 1,
    prepare: |world| {
        async {
            world.stage.exporter.control(Behaviour::hold(Hold::Before).only("held"));
            world.stage.push_report_job(QUICK).await;
        }
        .boxed_local()
    },
    script: |world| reload(world).boxed_local(),
    // Either version may have made a report; on trial, the former one makes it where the new one failed.
    forget: |end| {
        if let Some(objects) = end["objects"].as_object_mut() {
            objects.retain(|name, _| !name.contains(MORE));
            objects.values_mut().for_each(|object| drop(object["status"]["message"].take()));
        }
        if let Some(reports) = end["reports"].as_array_mut() {
            reports.retain(|report| !report.to_string().contains(MORE));
        }
    },
};

/// Two replicas, of which the leader ends.
pub const FAILOVER: Scenario = Scenario {
    name: "failover",
    replicas: 2,
    prepare: |world| push_mails(world).boxed_local(),
    script: |world| failover(world).boxed_local(),
    forget: |_| {},
};

async fn push_mails(world: &World) {
    let shipped = workspace::deploy("plugins/email-request.yaml").expect("it ships");
    world.stage.cluster.push("email-request", &guest("email_request"), &format!("{shipped}{QUICK}")).await;
}

async fn mails(world: &World) {
    for name in ["sent", "refused"] {
        world.stage.mail(name, "a@example.com").await;
    }
    world.until_phase(Resource::EMAIL, "sent", "Sent").await;
    world.until_phase(Resource::EMAIL, "refused", "Failed").await;
    world.stage.gateway.behave();
    world.stage.cluster.patch(Resource::EMAIL, "refused", json!({"spec": {"to": "b@example.com"}})).await;
    world.until_phase(Resource::EMAIL, "refused", "Sent").await;
}

async fn reports(world: &World) {
    for name in ["good", "flaky", "broken"] {
        world.stage.job(name, name, 0).await;
    }
    for name in ["good", "flaky"] {
        world.until_phase(Resource::JOB, name, "Done").await;
    }
    world.until_phase(Resource::JOB, "broken", "Failed").await;
}

async fn children(world: &World) {
    let cluster = &world.stage.cluster;
    let child =
        |name: &str, value: &str| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"v": value}});
    let wants = |children: &[Value]| json!({"do": "children", "children": children, "finalize": "flaky", "fails": 1});
    cluster.create(Resource::PROBE, "kept", wants(&[child("a", "1"), child("b", "1")])).await;
    cluster.create(Resource::PROBE, "deleted", wants(&[child("c", "1")])).await;
    for name in ["kept", "deleted"] {
        world.until_phase(Resource::PROBE, name, "Done").await;
    }
    cluster.patch(Resource::PROBE, "kept", json!({"spec": wants(&[child("b", "2"), child("d", "1")])})).await;
    world.until_phase(Resource::PROBE, "kept", "Done").await;
    let probes = cluster.api(Resource::PROBE);
    probes.delete("deleted", &kube::api::DeleteParams::default()).await.expect("it is there");
    eventually(PATIENCE, async || match probes.get_opt("deleted").await {
        Ok(None) => Ok(()),
        Ok(Some(_)) => Err("its finalizer holds it".to_owned()),
        Err(error) => Err(error.to_string()),
    })
    .await;
}

async fn reload(world: &World) {
    let stage = &world.stage;
    stage.job("before", "before", 0).await;
    world.until_phase(Resource::JOB, "before", "Done").await;
    stage.job("during", "held", 0).await;
    eventually(PATIENCE, async || if stage.exporter.held() > 0 { Ok(()) } else { Err("nothing is held") }).await;
    let next = stage.push_report_job_as("report_job_v2", QUICK).await;
    stage.cluster.until_serving("report-job", &next).await;
    stage.exporter.behave();
    world.until_phase(Resource::JOB, "during", "Done").await;
    let bulk: Vec<String> = (0..TRIAL).map(|number| format!("bulk-{number}")).collect();
    for name in &bulk {
        stage.job(name, "after", 0).await;
    }
    for name in &bulk {
        world.until_phase(Resource::JOB, name, "Done").await;
    }
    // What counts for a version on trial is counted by the process: one that was started again needs more, or time.
    for number in 0..3 * TRIAL {
        let plugin = stage.cluster.get_in(stage.cluster.system(), Resource::PLUGIN, "report-job").await;
        // Only once it is kept, as a process that ends before that leaves the trial to the next one, which begins with the former version.
        if ready_reason(&plugin) == "Serving" && is_kept(world, &Digest::of(&guest("report_job_v2"))).await {
            break;
        }
        let name = format!("{MORE}{number}");
        stage.job(&name, "after", 0).await;
        world.until_phase(Resource::JOB, &name, "Done").await;
    }
}

/// Whether this component is kept as the stable version of the plugin.
async fn is_kept(world: &World, digest: &Digest) -> bool {
    let configmaps = Resource::CONFIG_MAP.api(world.stage.cluster.client(), Some(world.stage.cluster.system()));
    let kept = configmaps.get_opt("report-job-stable").await.expect("the administrator may");
    let version = kept.and_then(|kept| kept.metadata.annotations?.remove("berth.acme.io/version"));
    version.is_some_and(|version| version.contains(&digest.to_string()))
}

async fn failover(world: &World) {
    world.stage.mail("before", "a@example.com").await;
    world.until_phase(Resource::EMAIL, "before", "Sent").await;
    world.stage.mail("during", "a@example.com").await;
    world.hand_over().await;
    world.stage.mail("after", "a@example.com").await;
    for name in ["during", "after"] {
        world.until_phase(Resource::EMAIL, name, "Sent").await;
    }
}
