//! `make demo`: the main job on a real API server, one act after the other, each with its proof on the terminal.

use std::{process::ExitCode, time::Duration};

use anyhow::{Context, bail, ensure};
use berth_tests::{behaviour::Behaviour, resource::Resource, stage::guest};
use clap::Parser;
use serde_json::{Value, json};

use set::{NAMESPACE, Set, phase_of};

mod set;

/// Shows what Berth does, and fails if any of it does not happen.
#[derive(Debug, Parser)]
struct Args {
    /// Leave everything up at the end, and say what to try
    #[arg(long)]
    keep: bool,
}

/// For what happens at once, on a machine that may be busy.
const SOON: Duration = Duration::from_secs(60);
/// For a hundred reports, one of which has to fail five times (after 1, 2, 4 and 8 s), on a slow exporter.
const DRAIN: Duration = Duration::from_secs(180);

#[tokio::main]
async fn main() -> ExitCode {
    let Args { keep } = Args::parse();
    match show(keep).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("\nThe demo did not go as it should: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn show(keep: bool) -> anyhow::Result<()> {
    let mut set = Set::build().await?;
    let acts = async {
        one_mail(&mut set).await.context("act 1")?;
        no_second_mail(&mut set).await.context("act 2")?;
        hundred_reports_and_a_reload(&mut set).await.context("act 3")?;
        refused_plugin(&mut set).await.context("act 4")?;
        failover(&mut set).await.context("act 5")
    };
    let ended = tokio::select! {
        ended = acts => ended,
        _ = tokio::signal::ctrl_c() => bail!("interrupted"),
    };
    if let Err(error) = ended {
        set.show_logs();
        return Err(error);
    }
    set.summary();
    if keep {
        set.invite();
        tokio::signal::ctrl_c().await.context("waiting for Ctrl-C")?;
    }
    set.strike().await
}

async fn one_mail(set: &mut Set) -> anyhow::Result<()> {
    set.act("An EmailRequest is sent");
    set.command("kubectl apply -f deploy/samples/welcome-42.yaml");
    set.apply("deploy/samples/welcome-42.yaml").await?;
    set.command("kubectl get emailrequest welcome-42 -o jsonpath='{.status.phase}'");
    let mail = set.until(Resource::EMAIL, "welcome-42", SOON, |mail| phase_of(mail) == "Sent").await?;
    set.output(&phase_of(&mail));
    ensure!(set.gateway.deliveries_for("/welcome-42/").len() == 1, "the gateway has not delivered exactly one mail");
    set.shown("welcome-42 is Sent, and the gateway has delivered one mail");
    Ok(())
}

async fn no_second_mail(set: &mut Set) -> anyhow::Result<()> {
    set.act("The gateway is down, then takes the mail and hangs up before it answers");
    set.gateway.control(Behaviour::fail(503).times(2));
    set.create(Resource::EMAIL, "welcome-43", json!({"to": "grace@example.com", "template": "welcome", "locale": "en-GB"})).await?;
    let waiting = set.until(Resource::EMAIL, "welcome-43", SOON, |mail| !mail["status"]["message"].is_null()).await?;
    set.say(&format!("waiting, and saying why: {}", waiting["status"]["message"].as_str().unwrap_or_default()));
    set.gateway.control(Behaviour::drop_answer(1));
    set.until(Resource::EMAIL, "welcome-43", SOON, |mail| phase_of(mail) == "Sent").await?;
    let (requests, deliveries) = (set.gateway.requests_for("/welcome-43/").len(), set.gateway.deliveries_for("/welcome-43/").len());
    set.say(&format!("Sent after {requests} requests with the same Idempotency-Key"));
    ensure!(requests >= 2 && deliveries == 1, "{requests} requests led to {deliveries} mails");
    set.shown(&format!("{requests} requests, 1 mail"));
    Ok(())
}

async fn hundred_reports_and_a_reload(set: &mut Set) -> anyhow::Result<()> {
    set.act("A hundred ReportJobs drain by priority; the handler is replaced meanwhile; one job is a dead letter");
    set.say("the plugin is paused while the jobs are put in, so that the queue is whole when it opens");
    set.configure("report-job", "paused: true\n").await?;
    set.until_plugin("report-job", |plugin| reason_of(plugin) == "Paused").await?;
    set.command("kubectl apply -f deploy/samples/reports.yaml");
    set.apply("deploy/samples/reports.yaml").await?;
    set.command("kubectl get reportjobs -l workqueue.acme.io/phase=pending --no-headers | wc -l");
    let waiting = set.list(Resource::JOB, "workqueue.acme.io/phase=pending").await?.len();
    set.output(&waiting.to_string());
    ensure!(waiting == 100, "{waiting} of 100 jobs can be listed as pending");
    set.exporter.control(Behaviour { delay_ms: 300, ..Behaviour::default() });
    set.exporter.control(Behaviour::fail(503).only("broken"));
    set.configure("report-job", "concurrency: 8\n").await?;
    set.until_jobs_done(20, DRAIN).await?;
    // Compiling takes longer on a busy machine: the jobs must not be over before it is done.
    set.exporter.control(Behaviour { delay_ms: 8_000, ..Behaviour::default() });
    set.command("berth push report_job_v2.wasm --name report-job   # while jobs run");
    let pushed = set.push("report-job", &guest("report_job_v2")).await?;
    set.until_plugin("report-job", |plugin| ["Serving", "OnTrial"].contains(&reason_of(plugin))).await?;
    set.say(&format!(
        "version 2 serves {:.1} s after its ConfigMap was written, on trial; runs that had begun end on version 1",
        pushed.elapsed().as_secs_f64()
    ));
    set.exporter.control(Behaviour { delay_ms: 300, ..Behaviour::default() });
    let first = set.until_job("the first job on version 2", SOON, |job| job["status"]["message"] == "exported by version 2").await?;
    set.say(&format!("{} says {:?}", name_of(&first), "exported by version 2"));
    set.until_jobs_done(99, DRAIN).await?;
    let broken = set.until_job("the dead letter", DRAIN, |job| phase_of(job) == "Failed").await?;
    set.command(&format!("kubectl get reportjob {} -o jsonpath='{{.status}}'", name_of(&broken)));
    set.output(&broken["status"].to_string());
    ensure!(broken["status"]["retries"] == 5, "the dead letter has {} retries", broken["status"]["retries"]);
    let jobs = set.list(Resource::JOB, "").await?;
    let version_2 = jobs.iter().filter(|job| job["status"]["message"] == "exported by version 2").count();
    let order: Vec<i64> = set.priorities_in_order_of_export(&jobs);
    let third = order.len() / 3;
    let mean = |part: &[i64]| part.iter().sum::<i64>() as f64 / part.len() as f64;
    let (early, late) = (mean(&order[..third]), mean(&order[order.len() - third..]));
    set.say(&format!("mean priority of the first third {early:.1}, of the last third {late:.1}"));
    ensure!(order.len() == 99, "{} reports were made", order.len());
    ensure!(early > late + 2.0, "the jobs did not drain by priority");
    ensure!((1..99).contains(&version_2), "{version_2} jobs ran on version 2");
    set.shown(&format!("99 Done ({} on version 1, {version_2} on version 2), 1 dead letter after 5 failures, none twice", 99 - version_2));
    set.exporter.behave();
    Ok(())
}

async fn refused_plugin(set: &mut Set) -> anyhow::Result<()> {
    set.act("A bad version is pushed; the last good one goes on");
    let good = guest("report_job_v2");
    set.push("report-job", &good[..good.len() / 2]).await?;
    let plugin = set.until_plugin("report-job", |plugin| !plugin["status"]["refusedReason"].is_null()).await?;
    set.command("kubectl get plugins.berth.acme.io report-job -n berth-system -o jsonpath='{.status.reason}'");
    set.output(plugin["status"]["reason"].as_str().unwrap_or_default());
    set.create(Resource::JOB, "after-the-bad-version", json!({"report": "sales", "format": "pdf"})).await?;
    set.until(Resource::JOB, "after-the-bad-version", SOON, |job| phase_of(job) == "Done").await?;
    set.shown("half a component was refused with a sentence, and a new job was Done by the last good version");
    set.push("report-job", &good).await?;
    set.until_plugin("report-job", |plugin| plugin["status"]["refusedReason"].is_null()).await?;
    Ok(())
}

async fn failover(set: &mut Set) -> anyhow::Result<()> {
    set.act("The leader is killed while jobs run; the standby goes on");
    set.exporter.control(Behaviour { delay_ms: 400, ..Behaviour::default() });
    for number in 1..=40 {
        set.create(Resource::JOB, &format!("failover-{number:02}"), json!({"report": "audit", "format": "csv"})).await?;
    }
    set.until_reports(|key| key.contains("failover-"), 5, SOON).await?;
    let killed = set.kill_leader().await?;
    let is_mine = |job: &Value| name_of(job).starts_with("failover-");
    let done = set.list(Resource::JOB, "").await?.iter().filter(|job| is_mine(job) && phase_of(job) == "Done").count();
    set.say(&format!("SIGKILL to {killed}; {done} of 40 are Done; the Lease has to run out first (15 s)"));
    let at = std::time::Instant::now();
    let leader = set.until_led_by_other_than(&killed).await?;
    set.say(&format!("{leader} leads after {:.1} s", at.elapsed().as_secs_f64()));
    for number in 1..=40 {
        set.until(Resource::JOB, &format!("failover-{number:02}"), SOON, |job| phase_of(job) == "Done").await?;
    }
    let exports = set.exporter.exports();
    let made = exports.iter().filter(|export| export.key.contains("failover-")).count();
    ensure!(made == 40, "{made} reports were made for 40 jobs");
    set.shown("40 jobs Done, 40 reports made: none lost, none twice");
    set.exporter.behave();
    Ok(())
}

/// The reason of a plugin's condition `Ready`.
fn reason_of(plugin: &Value) -> &str {
    let conditions = plugin["status"]["conditions"].as_array();
    let ready = conditions.and_then(|all| all.iter().find(|condition| condition["type"] == "Ready"));
    ready.and_then(|ready| ready["reason"].as_str()).unwrap_or_default()
}

fn name_of(object: &Value) -> String {
    object["metadata"]["name"].as_str().unwrap_or(NAMESPACE).to_owned()
}
