//! The ReportJob handler once more, visibly different in what it writes: what a hot reload changes to.

// Not the crate: its export would be linked in beside this one's.
#[path = "../../../../plugins/report-job/src/job.rs"]
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
        export(job, ctx, Some("exported by version 2"))
    }
}
