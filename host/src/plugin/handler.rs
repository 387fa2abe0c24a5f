//! A plugin that serves: one version of a component with one configuration, as a [`Reconcile`].

use std::sync::Arc;

use futures::future::BoxFuture;

use super::{
    Runtime,
    bindings::ReconcilerPre,
    capability::{
        cluster::Reads,
        gate::{Gate, Rights},
        http::Outlet,
        log::{Log, Speaker},
    },
    convert,
    instance::{Ended, Sandbox, State, deadline, too_long},
    limits::Limits,
};
use crate::{
    claim::Claim,
    fence::Stopped,
    reconcile::{Failure, Next, Outcome, Reconcile, Request},
};

/// Everything that the runs of it have in common.
pub(super) struct Handler {
    pub runtime: Arc<Runtime>,
    pub component: ReconcilerPre<State>,
    pub claim: Arc<Claim>,
    pub plugin: Arc<str>,
    pub digest: Arc<str>,
    pub settings: String,
    pub rights: Rights,
    pub limits: Limits,
}

impl Reconcile for Handler {
    fn reconcile(&self, request: Request) -> BoxFuture<'_, Result<Outcome, Failure>> {
        Box::pin(self.run(request))
    }
}

impl Handler {
    async fn run(&self, request: Request) -> Result<Outcome, Failure> {
        let fence = request.fence.clone();
        // Waiting for a sandbox is the host's affair, so it does not count towards the call's time.
        let _permit = tokio::select! {
            biased;
            () = fence.lost() => return Err(Failure::Fenced),
            permit = self.runtime.permit() => permit,
        };
        match fence.guard(self.limits.timeout, self.call(&request)).await {
            Ok(ended) => ended,
            Err(Stopped::TimedOut(_)) => Err(too_long(&self.limits)),
            Err(Stopped::Fenced) => Err(Failure::Fenced),
        }
    }

    async fn call(&self, request: &Request) -> Result<Outcome, Failure> {
        let object = request.key.object.to_string().into();
        let log = Log::new(Speaker { plugin: self.plugin.clone(), digest: self.digest.clone(), object }, self.limits);
        let gate = Gate::new(log.clone(), Some(self.rights.clone()));
        let outlet = Outlet { fence: request.fence.clone(), deadline: deadline(&self.limits) };
        let reads = Reads::new(Some(request.reader.clone()));
        let sandbox = Sandbox::new(&self.runtime.engine, self.limits, gate, Some(outlet), reads.clone());
        let given = convert::request(request, &self.settings);
        let ended = sandbox
            .run(async |store| {
                let instance = self.component.instantiate_async(&mut *store).await?;
                instance.berth_plugin_handler().call_reconcile(store, &given).await
            })
            .await;
        match ended {
            Ended::Failed(failure) => Err(failure),
            Ended::Returned(outcome, exceeded) => {
                let outcome = convert::outcome(outcome, &self.claim, &self.limits, |note| log.host(note))?;
                let asks_for_another_try = matches!(outcome.next, Next::Retry(_) | Next::RetryAfter(..));
                match (exceeded, reads.unanswered()) {
                    // A handler that coped has its way.
                    _ if !asks_for_another_try => Ok(outcome),
                    // It would only meet the limit again.
                    (Some(sentence), _) => Err(Failure::Limit(sentence)),
                    // It was the host that did not answer.
                    (None, Some(sentence)) => Err(Failure::Host(sentence)),
                    (None, None) => Ok(outcome),
                }
            }
        }
    }
}
