//! The resource ReportJob, and what its handler does.

use std::time::Duration;

use berth_sdk::prelude::*;

/// Far timers are cut in pieces, so that a clock set right meanwhile, or an edit missed, is noticed within an hour.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// Asks for one report.
#[resource(
    group = "batch.acme.io",
    version = "v1",
    kind = "ReportJob",
    namespaced,
    status = JobStatus,
    column("REPORT", ".spec.report"),
    column("PRIORITY", ".spec.priority", "integer"),
    column("PHASE", ".status.phase"),
    column("RETRIES", ".status.retries", "integer"),
    column("URL", ".status.url"),
    column("MESSAGE", ".status.message"),
    rule(
        "!has(oldSelf.status) || !has(oldSelf.status.phase) || oldSelf.status.phase != 'Done' || self.spec == oldSelf.spec",
        "the report is done, so its spec can no longer change: create another ReportJob, or delete this one first to use its name again"
    )
)]
pub struct JobSpec {
    /// Name of the report.
    #[rule(
        "self.matches('^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$')",
        "report must be a name of letters, digits, dots, underscores and dashes, such as sales"
    )]
    #[schemars(length(min = 1, max = 128))]
    pub report: String,
    /// File format of the report.
    pub format: Format,
    /// Jobs of a higher priority run first among those that wait.
    #[serde(default)]
    pub priority: i64,
    /// Not to be exported earlier than this.
    pub not_before: Option<Timestamp>,
}

/// A file format. The API server refuses others by name of these.
#[data]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Portable Document Format.
    Pdf,
    /// Comma-separated values.
    Csv,
    /// A spreadsheet.
    Xlsx,
}

/// What became of the report.
#[data]
#[derive(Default)]
pub struct JobStatus {
    /// Where the job stands.
    #[serde(default)]
    pub phase: Phase,
    /// Failures in a row for this version of the spec.
    pub retries: Option<i64>,
    /// The cause of the last failure, in a sentence.
    pub message: Option<String>,
    /// Where the report is.
    pub url: Option<String>,
    /// The version of the spec that the phase is about.
    pub observed_generation: Option<i64>,
}

/// Where a job stands.
#[data]
#[derive(Default)]
pub enum Phase {
    /// In the queue.
    #[default]
    Pending,
    /// The report is there.
    Done,
    /// Given up; an edit of the spec re-opens the job.
    Failed,
}

/// The exporter's answer.
#[data]
struct Exported {
    url: String,
}

/// Has the report exported once its time has come; the message says more of a report that is done, where there is more to say.
pub fn export(job: &ReportJob, ctx: &Context, message: Option<&str>) -> Result<Action, Error> {
    if let Some(not_before) = job.spec.not_before {
        let wait = not_before.since(ctx.now());
        if !wait.is_zero() {
            // The timer has whole milliseconds: rounded up, it never rings early.
            return Ok(Action::look_again(wait.saturating_add(Duration::from_millis(1)).min(LONGEST_WAIT)));
        }
    }
    let exporter = ctx.setting("exporter")?;
    let url = format!("{}/reports/{}", exporter.trim_end_matches('/'), http::segment(ctx.idempotency_key()));
    let Exported { url } = http::put(ctx, url).json(&job.spec).send()?.json()?;
    let mut status = job.status.clone().unwrap_or_default();
    status.phase = Phase::Done;
    status.url = Some(url);
    status.message = message.map(str::to_owned);
    Ok(Action::await_change().status(status))
}
