//! Faults of the API server and of the way to it, by the fault proxy.

use std::time::Duration;

use berth_tests::{
    behaviour::Behaviour,
    cluster::{Cluster, ready_reason, ready_status},
    eventually::{always, eventually, full, scaled},
    host::{Flags, Host},
    proxy::{Answer, Effect, Outcome, Rule, Verb},
    resource::Resource,
    stage::{SOON, Stage},
};
use serde_json::{Value, json};

/// Part of the paths of EmailRequests.
const MAILS: &str = "/emailrequests";

/// The statuses that a host has sent for a mail, with what became of each.
fn status_writes(host: &Host, name: &str) -> Vec<(Value, Outcome)> {
    let path = format!("{MAILS}/{name}/status");
    host.proxy
        .entries()
        .into_iter()
        .filter(|entry| entry.seen.path.ends_with(&path))
        .map(|entry| (entry.seen.json()["status"].clone(), entry.outcome))
        .collect()
}

async fn watching(host: &Host) {
    until_watched(host, MAILS).await;
}

async fn until_watched(host: &Host, path: &str) {
    eventually(SOON, async || match host.proxy.watches(path).count() {
        0 => Err(format!("{path} is not watched")),
        _ => Ok(()),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_that_expires_in_either_form_is_listed_again_once_and_nothing_is_missed() {
    let stage = Stage::shared().await;
    let host = stage.email_host().await;
    for (name, http) in [("e1", false), ("e2", true)] {
        watching(&host).await;
        let mark = host.proxy.mark();
        let gone =
            http.then(|| host.proxy.rule(Rule::on(Verb::Watch, Effect::Answer(Answer::failure(410, "Expired"))).path(MAILS).times(1)));
        host.proxy.watches(MAILS).deafen();
        stage.mail(name, "a@example.com").await;
        if http {
            host.proxy.watches(MAILS).end()
        } else {
            host.proxy.watches(MAILS).expire()
        }
        stage.until_mail(name, "Sent").await;
        let again = host.proxy.since(mark);
        // A list is a request of its own, or a watch that sends the initial events.
        let lists = again.iter().filter(|entry| {
            entry.seen.path.contains(MAILS) && (entry.seen.verb == Verb::List || entry.seen.query.contains("sendInitialEvents=true"))
        });
        assert_eq!(lists.count(), 1, "{again:#?}");
        drop(gone);
    }
    assert_eq!((stage.gateway.requests().len(), stage.gateway.deliveries().len()), (2, 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watches_that_close_at_once_are_opened_at_a_bounded_rate_and_recover() {
    let stage = Stage::shared().await;
    let host = stage.email_host().await;
    watching(&host).await;
    let closing = host.proxy.rule(Rule::on(Verb::Watch, Effect::Answer(Answer::empty_watch())).path(MAILS));
    host.proxy.watches(MAILS).end();
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!((2..=20).contains(&closing.hits()), "{} watches in 10 s", closing.hits());
    stage.mail("e1", "a@example.com").await;
    closing.release();
    stage.cluster.until_phase(Resource::EMAIL, "e1", "Sent", SOON).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_start_that_is_refused_with_any_body_is_waited_out() {
    let stage = Stage::shared().await;
    let host = stage.email_host().await;
    watching(&host).await;
    let pretty = "{\n  \"kind\": \"Status\",\n  \"message\": \"storage is (re)initializing\",\n  \"code\": 429\n}\n";
    let html = host
        .proxy
        .rule(Rule::on(Verb::Watch, Effect::Answer(Answer::new(502, "text/html", "<html>bad gateway</html>"))).path(MAILS).times(1));
    let busy = Answer::new(429, "application/json", pretty).retry_after(1);
    let busy = host.proxy.rule(Rule::on(Verb::Watch, Effect::Answer(busy)).path(MAILS).times(3));
    host.proxy.watches(MAILS).end();
    stage.mail("e1", "a@example.com").await;
    stage.cluster.until_phase(Resource::EMAIL, "e1", "Sent", Duration::from_secs(60)).await;
    assert_eq!((busy.hits(), html.hits()), (3, 1));
    let log = host.log();
    let told =
        |words: &str| log.lines().filter(|line| line.contains(MAILS) && line.contains("interrupted") && line.contains(words)).count();
    assert_eq!((told("storage is (re)initializing"), told("bad gateway")), (3, 1), "{log}");
    assert!(!log.contains("unreadable answer") && !log.contains("left out an object"), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_that_went_silent_is_noticed_and_nothing_is_missed() {
    let stage = Stage::shared().await;
    let version = stage.push_email_request().await;
    let flags = Flags { more: vec!["--watch-timeout=10s".into()], ..stage.flags() };
    let host = Host::start(&stage.cluster, "host", &flags).await;
    stage.cluster.until_serving("email-request", &version).await;
    watching(&host).await;
    host.proxy.watches(MAILS).stall();
    stage.mail("e1", "a@example.com").await;
    eventually(SOON, async || match host.metric("berth_watch_age_seconds", &[("kind", "EmailRequest.notify.acme.io")]).await {
        Some(10.0..) => Ok(()),
        age => Err(format!("the watch was heard of {age:?} s ago")),
    })
    .await;
    // The watch timeout and a minute.
    stage.cluster.until_phase(Resource::EMAIL, "e1", "Sent", Duration::from_secs(75)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_status_that_cannot_be_written_at_first_is_written_later_and_mails_once() {
    let stage = Stage::shared().await;
    let host = stage.email_host().await;
    let refusals = [("e1", 500, "InternalError"), ("e2", 401, "Unauthorized"), ("e3", 403, "Forbidden")];
    let failing = refusals.map(|(name, status, reason)| {
        let refused = Rule::on(Verb::Patch, Effect::Answer(Answer::failure(status, reason)));
        host.proxy.rule(refused.path(&format!("/{name}/status")).times(5))
    });
    for (name, ..) in refusals {
        stage.mail(name, "a@example.com").await;
    }
    for ((name, status, _), failing) in refusals.iter().zip(&failing) {
        stage.cluster.until_phase(Resource::EMAIL, name, "Sent", Duration::from_secs(90)).await;
        let (requests, deliveries) = (stage.gateway.requests_for(&stage.key(name)), stage.gateway.deliveries_for(&stage.key(name)));
        assert_eq!((failing.hits(), requests.len(), deliveries.len()), (5, 1, 1), "{status}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_status_that_the_api_server_does_not_take_is_no_failure_of_its_object() {
    let stage = Stage::shared().await;
    let host = stage.report_host("").await;
    let refusals = [
        ("r401", 401, "Unauthorized"),
        ("r403", 403, "Forbidden"),
        ("r409", 409, "Conflict"),
        ("r429", 429, "TooManyRequests"),
        ("r500", 500, "InternalError"),
    ];
    // Of each job the first run fails, and the status that says so is refused.
    let refused = refusals.map(|(name, status, reason)| {
        stage.exporter.control(Behaviour::fail(503).times(1).only(&stage.key(name)));
        let refused = Rule::on(Verb::Patch, Effect::Answer(Answer::failure(status, reason)));
        host.proxy.rule(refused.path(&format!("/{name}/status")).times(3))
    });
    for (name, ..) in refusals {
        stage.job(name, "sales", 0).await;
    }
    for ((name, ..), refused) in refusals.iter().zip(&refused) {
        let job = stage.until_job(name, "Done").await;
        assert_eq!((refused.hits(), &job["status"]["retries"]), (3, &json!(0)), "{job}");
        let path = format!("/{name}/status");
        let writes = host.proxy.entries().into_iter().filter(|entry| entry.seen.verb == Verb::Patch && entry.seen.path.ends_with(&path));
        let retries: Vec<_> = writes.map(|entry| entry.seen.json()["status"]["retries"].clone()).collect();
        assert_eq!(retries, [1, 1, 1, 1, 0], "{name}: one failure, which was the handler's, and the success");
        assert_eq!(stage.exporter.requests_for(&stage.key(name)).len(), 2, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_busy_api_server_is_waited_for_as_long_as_it_asks_and_given_the_same_status_once() {
    let stage = Stage::shared().await;
    let host = stage.email_host().await;
    let (times, seconds) = scaled((2, 3), (3, 7));
    let texts = Answer::new(429, "text/plain", "too many requests, please try again later");
    let answers = [("e1", texts), ("e2", Answer::failure(429, "TooManyRequests"))];
    let busy = answers.map(|(name, answer)| {
        let status = Rule::on(Verb::Patch, Effect::Answer(answer.retry_after(seconds))).path(&format!("/{name}/status"));
        (name, host.proxy.rule(status.times(times)))
    });
    for (name, _) in &busy {
        stage.mail(name, "a@example.com").await;
    }
    for (name, busy) in &busy {
        stage.cluster.until_phase(Resource::EMAIL, name, "Sent", Duration::from_secs(60)).await;
        let path = format!("{MAILS}/{name}/status");
        let writes: Vec<_> = host.proxy.entries().into_iter().filter(|entry| entry.seen.path.ends_with(&path)).collect();
        assert_eq!((writes.len(), busy.hits()), (times + 1, times), "{writes:#?}");
        for pair in writes.windows(2) {
            assert!(pair[1].seen.at - pair[0].seen.at >= Duration::from_secs(seconds), "{:?}", pair[1].seen.at - pair[0].seen.at);
            assert_eq!(pair[0].seen.json()["status"], pair[1].seen.json()["status"]);
        }
        assert_eq!(stage.gateway.requests_for(&stage.key(name)).len(), 1, "the outcome is kept, not worked out again");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_status_whose_answer_was_lost_is_seen_and_not_written_again() {
    let stage = Stage::shared().await;
    let host = stage.email_host().await;
    let lost = host.proxy.rule(Rule::on(Verb::Patch, Effect::CommitThenClose).path("/e1/status").times(1));
    stage.mail("e1", "a@example.com").await;
    stage.until_mail("e1", "Sent").await;
    stage.mail("e2", "a@example.com").await;
    stage.until_mail("e2", "Sent").await;
    host.until_queued("EmailRequest.notify.acme.io", "delayed", 0.0).await;
    assert_eq!(lost.hits(), 1);
    assert_eq!((stage.gateway.requests_for(&stage.key("e1")).len(), stage.gateway.deliveries().len()), (1, 2));
    let stored =
        status_writes(&host, "e1").into_iter().filter(|(_, outcome)| matches!(outcome, Outcome::Answered(200) | Outcome::Dropped(200)));
    assert_eq!(stored.count(), 1, "{:#?}", status_writes(&host, "e1"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_that_is_never_answered_frees_its_slot_and_delays_nobody() {
    let stage = Stage::shared().await;
    let version = stage.push_email_request().await;
    let flags = Flags { more: vec!["--write-deadline=2s".into()], ..stage.flags() };
    let host = Host::start(&stage.cluster, "host", &flags).await;
    stage.cluster.until_serving("email-request", &version).await;
    let hole = host.proxy.rule(Rule::on(Verb::Patch, Effect::BlackHole).path("/e1/status").times(1));
    stage.mail("e1", "a@example.com").await;
    hole.reached(1).await;
    stage.mail("e2", "a@example.com").await;
    stage.cluster.until_phase(Resource::EMAIL, "e2", "Sent", Duration::from_secs(10)).await;
    stage.cluster.until_phase(Resource::EMAIL, "e1", "Sent", Duration::from_secs(20)).await;
    assert_eq!(stage.gateway.deliveries().len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conflicts_however_many_lead_to_the_same_outcome_without_another_run() {
    let stage = Stage::shared().await;
    let host = stage.report_host("").await;
    let hold = || host.proxy.rule(Rule::on(Verb::Patch, Effect::Hold).path("/r1/status").times(1));
    let mut write = hold();
    stage.job("r1", "sales", 0).await;
    // More than are tried in one go.
    for number in 0..20 {
        write.reached(1).await;
        stage.cluster.patch(Resource::JOB, "r1", json!({"metadata": {"annotations": {"x": number.to_string()}}})).await;
        let next = hold();
        std::mem::replace(&mut write, next).release();
    }
    write.reached(1).await;
    write.release();
    let job = stage.until_job("r1", "Done").await;
    assert_eq!(stage.exporter.requests().len(), 1, "a conflict is no failure");
    assert_eq!((job["status"]["retries"].as_i64().unwrap_or(0), &job["metadata"]["annotations"]["x"]), (0, &json!("19")), "{job}");
    let statuses: Vec<_> = host.proxy.entries().into_iter().filter(|entry| entry.seen.path.ends_with("/r1/status")).collect();
    assert!(statuses.iter().all(|entry| entry.seen.json()["status"] == statuses[0].seen.json()["status"]), "{statuses:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_deleted_during_its_run_is_no_error_and_not_tried_again() {
    let stage = Stage::shared().await;
    let host = stage.email_host().await;
    let status = host.proxy.rule(Rule::on(Verb::Patch, Effect::Hold).path("/e1/status").times(1));
    stage.mail("e1", "a@example.com").await;
    status.reached(1).await;
    stage.cluster.delete(Resource::EMAIL, "e1").await;
    status.release();
    stage.mail("e2", "a@example.com").await;
    stage.until_mail("e2", "Sent").await;
    for state in ["ready", "delayed", "running"] {
        host.until_queued("EmailRequest.notify.acme.io", state, 0.0).await;
    }
    assert_eq!(stage.gateway.requests_for(&stage.key("e1")).len(), 1);
    assert!(!host.log().contains("ERROR"), "{}", host.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_forbidden_watch_is_named_on_its_plugin_and_leaves_the_other_alone() {
    let stage = Stage::shared().await;
    let jobs = stage.push_report_job("").await;
    let mails = stage.push_email_request().await;
    let host = stage.host().await;
    stage.cluster.until_serving("report-job", &jobs).await;
    stage.cluster.until_serving("email-request", &mails).await;
    // One that is on its way would be neither refused nor ended.
    until_watched(&host, "/reportjobs").await;
    let forbidden = host.proxy.rule(Rule::on(Verb::Watch, Effect::Answer(Answer::failure(403, "Forbidden"))).path("/reportjobs"));
    host.proxy.watches("/reportjobs").end();
    let plugin = stage.cluster.until_plugin("report-job", &jobs, |plugin| ready_status(plugin) == "False").await;
    let reason = plugin["status"]["reason"].as_str().unwrap_or_default();
    assert!(reason.contains("watch") && reason.contains("reportjobs"), "{reason}");
    let warned =
        |line: &str| line.contains("WARN") && line.contains("watch interrupted") && line.contains("/reportjobs") && line.contains("403");
    assert!(host.log().lines().any(warned), "{}", host.log());
    // The host is ready, and one plugin is not.
    until_said(&host, "ReportJob.batch.acme.io", "[!]", "403").await;
    until_said(&host, "EmailRequest.notify.acme.io", "[+]", "ok").await;
    stage.mail("e1", "a@example.com").await;
    stage.until_mail("e1", "Sent").await;
    forbidden.release();
    stage.cluster.until_serving("report-job", &jobs).await;
}

/// What is never answered is given up after a minute, and has to be so for a while.
const LONG: Duration = Duration::from_secs(150);

/// Waits until `/readyz`, by which the host is ready, says this of the watch of a kind.
async fn until_said(host: &Host, kind: &str, mark: &str, words: &str) {
    let about = format!("{mark} watch of {kind}");
    eventually(LONG, async || match host.get("/readyz").await {
        Ok(answer) if answer.status == 200 && answer.text().lines().any(|line| line.starts_with(&about) && line.contains(words)) => Ok(()),
        Ok(answer) => Err(format!("{} {}", answer.status, answer.text())),
        Err(error) => Err(format!("{error:#}")),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_that_does_not_work_is_told_of_its_plugin_and_by_readyz_whatever_keeps_it_from_working() {
    const JOBS: &str = "/reportjobs";
    const JOB: &str = "ReportJob.batch.acme.io";
    let stage = Stage::shared().await;
    let mails = stage.push_email_request().await;
    let jobs = stage.push_report_job("").await;
    // A silent watch is given up half a minute after that.
    let flags = Flags { more: vec!["--watch-timeout=10s".into()], ..stage.flags() };
    let host = Host::start(&stage.cluster, "host", &flags).await;
    stage.cluster.until_serving("email-request", &mails).await;
    stage.cluster.until_serving("report-job", &jobs).await;
    let until_ready = async |ready: &str| {
        let is = |plugin: &Value| ready_status(plugin) == ready;
        stage.cluster.until_in(stage.cluster.system(), Resource::PLUGIN, "report-job", LONG, is).await
    };
    let html = Answer::new(502, "text/html", "<html>bad gateway</html>");
    // And whether the age of what was heard last grows.
    let mut faults = vec![
        (Effect::Answer(html), "bad gateway", true),
        (Effect::Answer(Answer::empty_watch()), "the server closed the watch after", false),
    ];
    if full() {
        faults.push((Effect::BlackHole, "no answer within", true));
        faults.push((Effect::SilentStream, "nothing has come within", false));
    }
    for (effect, words, ages) in faults {
        until_watched(&host, JOBS).await;
        let silent = matches!(effect, Effect::SilentStream);
        let failing = host.proxy.rule(Rule::on(Verb::Watch, effect).path(JOBS));
        host.proxy.watches(JOBS).end();
        // By the first cause, which may be that the watch was ended early: each other one would be a write.
        let plugin = until_ready("False").await;
        assert_eq!(ready_reason(&plugin), "WatchFailing", "{words}: {plugin}");
        until_said(&host, JOB, "[!]", words).await;
        if silent {
            let times = failing.hits();
            eventually(LONG, async || if failing.hits() > times { Ok(()) } else { Err("it is not opened again") }).await;
            // That it is open is no sign of life.
            always(Duration::from_secs(3), async || match host.get("/readyz").await {
                Ok(answer) if answer.text().contains(&format!("[!] watch of {JOB}")) => Ok(()),
                answer => Err(format!("{answer:?}")),
            })
            .await;
        }
        until_said(&host, "EmailRequest.notify.acme.io", "[+]", "ok").await;
        let other = stage.cluster.get_in(stage.cluster.system(), Resource::PLUGIN, "email-request").await;
        assert_eq!(ready_status(&other), "True", "{words}: {other}");
        let age = host.metric("berth_watch_age_seconds", &[("kind", JOB)]).await;
        assert!(age.is_some_and(|age| !ages || age >= 15.0), "{words}: heard of {age:?} s ago");
        failing.release();
        until_ready("True").await;
        until_said(&host, JOB, "[+]", "ok").await;
    }
    stage.job("r1", "sales", 0).await;
    stage.until_job("r1", "Done").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_api_server_is_found_again_with_all_that_happened_meanwhile() {
    let mut stage = Stage::on(Cluster::alone().await).await;
    let mut host = stage.email_host().await;
    stage.mail("e1", "a@example.com").await;
    stage.until_mail("e1", "Sent").await;
    let mark = host.proxy.mark();
    stage.cluster.plane_mut().control_mut().stop_api_server();
    tokio::time::sleep(Duration::from_secs(10)).await;
    let asked = host.proxy.since(mark).iter().filter(|entry| !entry.seen.path.contains("/leases")).count();
    // Three watches, each at most once a second.
    assert!(asked <= 30, "{asked} requests in 10 s to an API server that is down");
    assert!(host.runs());
    stage.cluster.plane_mut().control_mut().start_api_server().await.expect("it starts again");
    stage.mail("e2", "a@example.com").await;
    stage.cluster.until_phase(Resource::EMAIL, "e2", "Sent", Duration::from_secs(60)).await;
    host.until_ready().await;
    assert_eq!(stage.gateway.requests().len(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rotated_token_is_taken_up_and_counts_against_nobody() {
    let stage = Stage::shared().await;
    let version = stage.push_report_job("").await;
    let tokens = stage.cluster.directory().join("tokens");
    std::fs::create_dir(&tokens).expect("a folder");
    let kubeconfig_token = |name: &str, token: &str| std::fs::write(tokens.join(name), token).expect("written");
    kubeconfig_token("first", stage.cluster.token());
    std::os::unix::fs::symlink("first", tokens.join("token")).expect("a link");
    // The Lease outlasts the time until the file is read again, so that runs go on.
    let more = vec!["--lease-duration=120s".into(), "--lease-renew-deadline=100s".into()];
    let flags = Flags { token_file: Some(tokens.join("token")), more, ..stage.flags() };
    let host = Host::start(&stage.cluster, "host", &flags).await;
    stage.cluster.until_serving("report-job", &version).await;
    until_watched(&host, "/reportjobs").await;
    let second = stage.cluster.new_token().await;
    let expected = second.clone();
    let expired =
        Rule::any(Effect::Answer(Answer::failure(401, "Unauthorized"))).when(move |seen| seen.bearer() != Some(expected.as_str()));
    let expired = host.proxy.rule(expired);
    // The watches that are open tell of this one, and what it comes to meets the 401.
    stage.job("before", "sales", 0).await;
    let refused = || {
        let entries = host.proxy.entries();
        entries.iter().filter(|entry| entry.seen.path.ends_with("/before/status") && entry.outcome == Outcome::Answered(401)).count()
    };
    eventually(SOON, async || match refused() {
        2.. => Ok(()),
        count => Err(format!("its status was answered 401 {count} times")),
    })
    .await;
    host.proxy.watches("").end();
    stage.job("after", "sales", 0).await;
    kubeconfig_token("second", &second);
    std::os::unix::fs::symlink("second", tokens.join("aside")).expect("a link");
    std::fs::rename(tokens.join("aside"), tokens.join("token")).expect("swapped");
    for name in ["before", "after"] {
        // The file is read again every 50 s, and what is owed is tried again after half a minute at most.
        let job = stage.cluster.until_phase(Resource::JOB, name, "Done", Duration::from_secs(90)).await;
        assert_eq!(job["status"]["retries"].as_i64().unwrap_or(0), 0, "{job}");
        assert_eq!(stage.exporter.requests_for(&stage.key(name)).len(), 1, "the outcome is kept, not worked out again");
    }
    assert!(expired.hits() > refused());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_label_that_cannot_be_written_at_first_is_written_later_without_another_run() {
    let stage = Stage::shared().await;
    let host = stage.report_host("").await;
    let busy = Answer::failure(429, "TooManyRequests");
    let label = Rule::on(Verb::Patch, Effect::Answer(busy)).path("/reportjobs/r1").when(|seen| !seen.path.ends_with("/status"));
    let refused = host.proxy.rule(label.times(2));
    stage.job("r1", "sales", 0).await;
    stage.cluster.until(Resource::JOB, "r1", SOON, |job| job["metadata"]["labels"]["workqueue.acme.io/phase"] == "done").await;
    assert_eq!(refused.hits(), 2);
    assert_eq!(stage.exporter.requests_for(&stage.key("r1")).len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_whose_write_was_lost_and_cannot_be_looked_up_at_once_is_counted_once() {
    let stage = Stage::shared().await;
    let host = stage.report_host("").await;
    stage.exporter.control(Behaviour::fail(503).times(1));
    let lost = host.proxy.rule(Rule::on(Verb::Patch, Effect::CommitThenClose).path("/reportjobs/r1/status").times(1));
    let unread =
        host.proxy.rule(Rule::on(Verb::Get, Effect::Answer(Answer::failure(503, "ServiceUnavailable"))).path("/reportjobs/r1").times(2));
    stage.job("r1", "sales", 0).await;
    lost.reached(1).await;
    unread.reached(2).await;
    let job = stage.cluster.until(Resource::JOB, "r1", SOON, |job| job["status"]["phase"] == "Done").await;
    assert_eq!(job["status"]["retries"], 0, "{job}");
    let counted = host.proxy.entries().iter().filter(|entry| entry.seen.path.ends_with("/reportjobs/r1/status")).count();
    assert_eq!(counted, 2, "one write of the failure, one of the success");
}
