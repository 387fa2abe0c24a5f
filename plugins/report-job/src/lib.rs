//! ReportJob: one object is one report, exported once its time has come.
//!
//! # Expected flow
//! `PUT {exporter}/reports/<key>` with the spec as JSON, the key being the object's own; the exporter answers `{"url": …}`: `Done`.
//! Before `notBefore` the job looks again then, which is no failure.
//!
//! # Guarantees
//! A repeated run makes the same report again, under the same key.
//!
//! # Errors
//! No answer, 408, 425, 429, 5xx and an answer without a URL are failures to retry: the host counts them, and the fifth is `Failed`.
//! Any other status is `Failed` at once.

mod job;

use berth_sdk::prelude::*;

pub use job::{Format, JobSpec, JobStatus, Phase, ReportJob, export};

/// The handler.
pub struct Exporter;

#[reconciler(
    progress(settled = ["Done", "Failed"], mirror_label = "workqueue.acme.io/phase"),
    dead_letter(after = 5),
    priority = "spec.priority",
    hosts("$settings.exporter")
)]
impl Reconciler for Exporter {
    type Object = ReportJob;

    fn reconcile(job: &ReportJob, ctx: &Context) -> Result<Action, Error> {
        export(job, ctx, None)
    }
}

#[cfg(test)]
mod tests;
