//! Ring: a nonce passes from namespace to namespace.

use std::sync::Arc;

use kube::{
    Api, CustomResource, ResourceExt,
    api::{Patch, PatchParams},
    runtime::controller::Action,
};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{Context, Error};

/// A station of the ring.
#[derive(CustomResource, Clone, Debug, Deserialize, Serialize)]
#[kube(group = "bench.acme.io", version = "v1", kind = "Ring", namespaced, status = "RingStatus", schema = "disabled")]
pub struct RingSpec {
    /// What goes round; larger ones are newer.
    pub nonce: i64,
    /// The namespace that gets it next.
    pub next: String,
}

/// What it has passed on.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct RingStatus {
    pub nonce: Option<i64>,
}

/// Passes a new nonce on, unless it is the last one.
pub async fn reconcile(ring: Arc<Ring>, ctx: Arc<Context>) -> Result<Action, Error> {
    let nonce = ring.spec.nonce;
    if nonce > ring.status.as_ref().and_then(|status| status.nonce).unwrap_or(0) {
        if nonce < ctx.ring_last {
            let next: Api<Ring> = Api::namespaced(ctx.client.clone(), &ring.spec.next);
            next.patch("ring", &PatchParams::default(), &Patch::Merge(&json!({"spec": {"nonce": nonce}}))).await?;
        }
        let own: Api<Ring> = Api::namespaced(ctx.client.clone(), &ring.namespace().unwrap_or_default());
        own.patch_status(&ring.name_any(), &PatchParams::default(), &Patch::Merge(&json!({"status": {"nonce": nonce}}))).await?;
    }
    Ok(Action::requeue(ctx.resync))
}
