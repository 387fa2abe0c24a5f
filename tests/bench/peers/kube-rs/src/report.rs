//! ReportJob: one object is one report, exported once its time has come.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{
    Api, CustomResource, ResourceExt,
    api::{Patch, PatchParams},
    runtime::controller::Action,
};
use reqwest::Url;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{Context, Error, idempotency_key};

/// Mirrors the phase.
const LABEL: &str = "workqueue.acme.io/phase";
/// The failure that is the last one.
const ATTEMPTS: i64 = 5;

/// Asks for one report.
#[derive(CustomResource, Clone, Debug, Deserialize, Serialize)]
#[kube(group = "batch.acme.io", version = "v1", kind = "ReportJob", namespaced, status = "JobStatus", schema = "disabled")]
#[serde(rename_all = "camelCase")]
pub struct JobSpec {
    pub report: String,
    pub format: String,
    #[serde(default)]
    pub priority: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_before: Option<Time>,
}

/// What became of the report.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct JobStatus {
    #[serde(default)]
    pub phase: Phase,
    pub retries: Option<i64>,
    pub message: Option<String>,
    pub url: Option<String>,
    pub observed_generation: Option<i64>,
}

/// Where a job stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub enum Phase {
    #[default]
    Pending,
    Done,
    Failed,
}

/// The exporter's answer.
#[derive(Deserialize)]
struct Exported {
    url: String,
}

/// Has the report exported unless that is done, or given up, for this version of the spec.
pub async fn reconcile(job: Arc<ReportJob>, ctx: Arc<Context>) -> Result<Action, Error> {
    let generation = job.metadata.generation;
    let mut status = job.status.clone().unwrap_or_default();
    if status.phase != Phase::Pending {
        if status.observed_generation == generation {
            return Ok(Action::requeue(ctx.resync));
        }
        // Settled for a former version of the spec: its failures do not count.
        status.retries = status.retries.map(|_| 0);
    }
    if let Some(Time(not_before)) = job.spec.not_before
        && let Ok(wait) = Duration::try_from(not_before.duration_since(Timestamp::now()))
        && !wait.is_zero()
    {
        return Ok(Action::requeue(wait.min(ctx.resync)));
    }
    let error = match export(&job, &ctx).await {
        Ok(url) => {
            let mut done = json!({"phase": Phase::Done, "url": url, "observedGeneration": generation});
            // What earlier failures have left.
            if job.status.as_ref().is_some_and(|status| status.retries.is_some_and(|retries| retries > 0)) {
                done["retries"] = 0.into();
            }
            if status.message.is_some() {
                done["message"] = Value::Null;
            }
            write(&job, &ctx, done).await?;
            mirror(&job, &ctx, "done").await?;
            return Ok(Action::requeue(ctx.resync));
        }
        Err(error) => error,
    };
    let retries = status.retries.unwrap_or(0) + 1;
    if retries < ATTEMPTS {
        write(&job, &ctx, json!({"phase": Phase::Pending, "retries": retries, "message": error.to_string()})).await?;
        return Err(error);
    }
    let failed = json!({"phase": Phase::Failed, "retries": retries, "message": error.to_string(), "observedGeneration": generation});
    write(&job, &ctx, failed).await?;
    mirror(&job, &ctx, "failed").await?;
    tracing::warn!(name = job.name_any(), "given up: {error}");
    Ok(Action::requeue(ctx.resync))
}

/// The answer is where the report is.
async fn export(job: &ReportJob, ctx: &Context) -> Result<String, Error> {
    let mut url = Url::parse(&ctx.backend).map_err(|_| Error::Address)?;
    // Escapes the slashes of the key.
    url.path_segments_mut().map_err(|()| Error::Address)?.pop_if_empty().extend(["reports", &idempotency_key(job)]);
    let answer = ctx.http.put(url).json(&job.spec).send().await?;
    if !answer.status().is_success() {
        return Err(Error::Refused { url: answer.url().clone(), status: answer.status() });
    }
    Ok(answer.json::<Exported>().await?.url)
}

async fn write(job: &ReportJob, ctx: &Context, status: Value) -> Result<(), Error> {
    let patch = json!({"metadata": {"resourceVersion": job.metadata.resource_version}, "status": status});
    jobs(job, ctx).patch_status(&job.name_any(), &PatchParams::default(), &Patch::Merge(&patch)).await?;
    Ok(())
}

async fn mirror(job: &ReportJob, ctx: &Context, phase: &str) -> Result<(), Error> {
    let patch = json!({"metadata": {"labels": {LABEL: phase}}});
    jobs(job, ctx).patch(&job.name_any(), &PatchParams::default(), &Patch::Merge(&patch)).await?;
    Ok(())
}

fn jobs(job: &ReportJob, ctx: &Context) -> Api<ReportJob> {
    Api::namespaced(ctx.client.clone(), &job.namespace().unwrap_or_default())
}
