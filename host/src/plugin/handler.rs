//! A plugin that serves: one version of a component with one configuration, as a [`Reconcile`].

use std::sync::Arc;

use futures::future::BoxFuture;

use super::{
    Linked, Runtime,
    capability::{
        cluster::Reads,
        gate::{Gate, Rights},
        http::{Met, Outlet},
        log::{Log, Speaker},
    },
    code::Code,
    convert,
    instance::{Ended, Sandbox, deadline, too_long},
    limits::{Limits, SENTENCE},
    shares::{Admitted, Share},
};
use crate::{
    claim::Claim,
    fence::Stopped,
    reconcile::{Failure, Next, Outcome, Reconcile, Request},
    text::cut,
};

/// Everything that the runs of it have in common.
pub(super) struct Handler {
    pub runtime: Arc<Runtime>,
    pub code: Arc<Code<Linked>>,
    pub claim: Arc<Claim>,
    pub plugin: Arc<str>,
    pub share: Arc<Share>,
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
        // Waiting for a sandbox and its memory is the host's affair, so it does not count towards the call's time.
        let admitted = tokio::select! {
            biased;
            () = fence.lost() => return Err(Failure::Fenced),
            admitted = self.share.admit(self.limits.memory) => admitted,
        };
        // As is mapping its code, where it has not run for a while.
        let component = self.code.get().await.map_err(|error| Failure::Host(format!("loading the code of the plugin: {error:#}")))?;
        match fence.guard(self.limits.timeout, self.call(component, admitted, &request)).await {
            Ok(ended) => ended,
            Err(Stopped::TimedOut(_)) => Err(too_long(&self.limits)),
            Err(Stopped::Fenced) => Err(Failure::Fenced),
        }
    }

    async fn call(&self, component: Linked, admitted: Admitted, request: &Request) -> Result<Outcome, Failure> {
        let object = request.key.object.to_string().into();
        let log = Log::new(Speaker { plugin: self.plugin.clone(), digest: self.digest.clone(), object }, self.limits);
        let gate = Gate::new(log.clone(), Some(self.rights.clone()));
        let outlet = Outlet { fence: request.fence.clone(), deadline: deadline(&self.limits) };
        let reads = Reads::new(Some(request.reader.clone()));
        let engine = &self.runtime.engine;
        let sandbox = Sandbox::new(engine, self.limits, gate, Some(outlet), reads.clone());
        let given = convert::request(request, &self.settings);
        let ended = sandbox.run(engine, admitted, move |store| {
            Box::pin(async move {
                let instance = component.instantiate_async(&mut *store).await?;
                instance.berth_plugin_handler().call_reconcile(store, &given).await
            })
        });
        let ended = ended.await;
        match ended {
            Ended::Failed(failure) => Err(failure),
            Ended::Returned(outcome, met) => {
                let outcome = convert::outcome(outcome, &self.claim, &self.limits, |note| log.host(note))?;
                self.judge(outcome, &met, reads.unanswered())
            }
        }
    }

    /// What a returned outcome is worth, by what was met on the way to it.
    fn judge(&self, mut outcome: Outcome, met: &Met, unanswered: Option<String>) -> Result<Outcome, Failure> {
        let (Next::Retry(cause) | Next::RetryAfter(_, cause)) = &mut outcome.next else {
            // A handler that coped has its way.
            return Ok(outcome);
        };
        if let Some(sentence) = met.exceeded.get() {
            // It would only meet the limit again.
            return Err(Failure::Limit(sentence.clone()));
        }
        if let Some(sentence) = unanswered {
            // It was the host that did not answer.
            return Err(Failure::Host(sentence));
        }
        if let Some(sentence) = met.late.get() {
            *cause = cut(&format!("{} ({sentence})", cut(cause, SENTENCE / 2)), SENTENCE);
        }
        Ok(outcome)
    }
}
