//! EmailRequest: one object is one mail, sent once through the mail gateway.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{
    Api, CustomResource, ResourceExt,
    api::{Patch, PatchParams},
    runtime::controller::Action,
};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{Context, Error, idempotency_key};

/// Asks for one mail, sent once.
#[derive(CustomResource, Clone, Debug, Deserialize, Serialize)]
#[kube(group = "notify.acme.io", version = "v1", kind = "EmailRequest", namespaced, status = "EmailStatus", schema = "disabled")]
pub struct EmailSpec {
    pub to: String,
    pub template: String,
    pub locale: String,
}

/// What became of the mail.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct EmailStatus {
    pub phase: Option<EmailPhase>,
    pub observed_generation: Option<i64>,
    pub message: Option<String>,
    #[serde(default)]
    pub conditions: Vec<Condition>,
}

/// How a mail ends.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub enum EmailPhase {
    Sent,
    Failed,
}

/// Sends the mail unless that is done for this version of the spec.
pub async fn reconcile(mail: Arc<EmailRequest>, ctx: Arc<Context>) -> Result<Action, Error> {
    let generation = mail.metadata.generation;
    if mail.status.as_ref().is_some_and(|status| status.observed_generation == generation) {
        return Ok(Action::requeue(ctx.resync));
    }
    let key = format!("\"{}\"", idempotency_key(&*mail));
    let url = format!("{}/send", ctx.backend.trim_end_matches('/'));
    let answer = ctx.http.post(url).header("idempotency-key", key).json(&mail.spec).send().await?;
    if !answer.status().is_success() {
        return Err(Error::Refused { url: answer.url().clone(), status: answer.status() });
    }
    // Read to its end, so that the connection can be used again.
    answer.bytes().await?;

    let sent = Condition {
        type_: "Sent".into(),
        status: "True".into(),
        reason: "Delivered".into(),
        message: "the gateway has taken the mail".into(),
        last_transition_time: Time(Timestamp::now()),
        observed_generation: generation,
    };
    let patch = json!({
        "metadata": { "resourceVersion": mail.metadata.resource_version },
        "status": { "phase": EmailPhase::Sent, "observedGeneration": generation, "conditions": [sent] },
    });
    let mails: Api<EmailRequest> = Api::namespaced(ctx.client.clone(), &mail.namespace().unwrap_or_default());
    mails.patch_status(&mail.name_any(), &PatchParams::default(), &Patch::Merge(&patch)).await?;
    Ok(Action::requeue(ctx.resync))
}
