//! Plugins come, change, are refused and go, without a restart; one plugin does not disturb another.

use std::time::Duration;

use berth_tests::{
    behaviour::{Behaviour, Hold},
    cluster::{Cluster, ready_reason, ready_status},
    eventually::{always, eventually, scaled},
    host::{Flags, Host},
    process::kernel_number,
    resource::Resource,
    stage::{self, SOON, Stage, guest, letters, probe},
};
use futures::future::join_all;
use kube::api::DeleteParams;
use serde_json::{Value, json};

/// Deletes a plugin's ConfigMap.
async fn withdraw(cluster: &Cluster, name: &str) {
    let configmaps = Resource::CONFIG_MAP.api(cluster.client(), Some(cluster.system()));
    configmaps.delete(name, &DeleteParams::default()).await.expect("it was there");
}

/// A probe that serves its own kind, on a host that is ready.
async fn probing(cluster: &Cluster) -> Host {
    stage::probing(cluster, &probe(&json!({})), "timeout: 3s\ncpu: 500ms\n").await
}

fn digest(plugin: &Value) -> String {
    plugin["status"]["servingDigest"].as_str().unwrap_or_default().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plugin_is_changed_in_its_configmap_without_a_restart() {
    let stage = Stage::shared().await;
    let mut host = stage.report_host("").await;
    let process = host.id();
    stage.job("before", "sales", 0).await;
    assert!(stage.until_job("before", "Done").await["status"]["message"].is_null());
    let version = stage.push_report_job_as("report_job_v2", "").await;
    stage.cluster.until_serving("report-job", &version).await;
    stage.job("after", "sales", 0).await;
    assert_eq!(stage.until_job("after", "Done").await["status"]["message"], "exported by version 2");
    assert!(stage.cluster.get(Resource::JOB, "before").await["status"]["message"].is_null(), "a finished job is left alone");
    assert_eq!(host.id(), process);
    // What changes while the host is down is found at its start.
    assert_eq!(host.terminate().await, Some(0));
    let version = stage.push_report_job("").await;
    host.restart().await;
    stage.cluster.until_serving("report-job", &version).await;
    stage.job("restarted", "sales", 0).await;
    assert!(stage.until_job("restarted", "Done").await["status"]["message"].is_null());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_in_flight_ends_on_the_version_that_it_began_with() {
    let stage = Stage::shared().await;
    let _host = stage.report_host("").await;
    stage.exporter.control(Behaviour::hold(Hold::Before).only("first"));
    stage.job("job", "first", 0).await;
    eventually(SOON, async || if stage.exporter.held() == 1 { Ok(()) } else { Err("nothing is held") }).await;
    let version = stage.push_report_job_as("report_job_v2", "").await;
    stage.cluster.until_serving("report-job", &version).await;
    stage.job("next", "sales", 0).await;
    assert_eq!(stage.until_job("next", "Done").await["status"]["message"], "exported by version 2");
    assert_eq!(stage.exporter.held(), 1, "one at a time across versions");
    stage.exporter.behave();
    assert!(stage.until_job("job", "Done").await["status"]["message"].is_null());
    assert_eq!(stage.exporter.requests_for(&stage.key("job")).len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failing_object_is_looked_at_at_once_by_a_new_version() {
    let stage = Stage::shared().await;
    let host = stage.report_host("backoff: {base: 5m, max: 5m}\n").await;
    stage.exporter.control(Behaviour::fail(503).times(1));
    stage.job("job", "sales", 0).await;
    host.until_queued("ReportJob.batch.acme.io", "delayed", 1.0).await;
    stage.push_report_job_as("report_job_v2", "backoff: {base: 5m, max: 5m}\n").await;
    assert_eq!(stage.until_job("job", "Done").await["status"]["message"], "exported by version 2");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_version_keeps_the_last_good_one_serving_and_says_why() {
    let stage = Stage::shared().await;
    let mut host = stage.report_host("").await;
    let good = guest("report_job");
    let serving = digest(&stage.cluster.get_in(stage.cluster.system(), Resource::PLUGIN, "report-job").await);
    let shipped = berth_tests::workspace::deploy("plugins/report-job.yaml").expect("it ships");
    let shipped = shipped.as_str();
    let core_module = b"\0asm\x01\0\0\0".to_vec();
    let job = |more: Value| {
        let mut claim = json!({"group": "batch.acme.io", "kind": "ReportJob", "plural": "reportjobs"});
        claim.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        probe(&claim)
    };
    let cases: [(Vec<u8>, &str, &str, &str); 7] = [
        (vec![0; 4096], shipped, "NotAComponent", "no WebAssembly"),
        (good[..good.len() / 2].to_vec(), shipped, "NotAComponent", "not whole"),
        (core_module, shipped, "NotAComponent", "module"),
        (job(json!({"describe": "panic"})), shipped, "TrialFailed", "describe"),
        (job(json!({"describe": "loop"})), shipped, "TrialFailed", "describe"),
        (good.clone(), "settings: {}\n", "InvalidConfig", "exporter"),
        (good, "timeOut: 3s\n", "InvalidConfig", "timeout"),
    ];
    for (number, (bytes, config, reason, words)) in cases.into_iter().enumerate() {
        let version = stage.cluster.push("report-job", &bytes, config).await;
        let plugin = stage.cluster.until_plugin("report-job", &version, |plugin| plugin["status"]["refusedReason"].is_string()).await;
        assert_eq!(digest(&plugin), serving, "{plugin}");
        assert_eq!((ready_status(&plugin), ready_reason(&plugin)), ("True", reason), "case {number}: {plugin}");
        let sentence = plugin["status"]["refusedReason"].as_str().unwrap_or_default();
        assert!(sentence.contains(words) && sentence.ends_with('.'), "case {number}: {sentence:?} does not speak of {words}");
        let name = format!("job-{number}");
        stage.job(&name, "sales", 0).await;
        stage.until_job(&name, "Done").await;
    }
    assert!(host.runs());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_to_a_host_that_is_not_allowed_is_denied_with_how_to_allow_it() {
    let stage = Stage::shared().await;
    let config = "settings: {exporter: 'http://reports.demo'}\nbackoff: {base: 100ms, max: 1s}\n";
    let version = stage.cluster.push("report-job", &guest("report_job"), config).await;
    let _host = stage.host().await;
    stage.cluster.until_serving("report-job", &version).await;
    stage.job("job", "sales", 0).await;
    let failed = stage.until_job("job", "Failed").await;
    let message = failed["status"]["message"].as_str().unwrap_or_default();
    assert!(message.contains("reports.demo") && message.contains("allowedHosts"), "{message}");
    assert_eq!(stage.exporter.requests().len(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_plugin_from_the_start_keeps_nobody_else_from_serving() {
    let stage = Stage::shared().await;
    let zeros = stage.cluster.push("report-job", &[0; 4096], "").await;
    let host = stage.email_host().await;
    let refused = stage.cluster.until_plugin("report-job", &zeros, |plugin| ready_reason(plugin) == "NotAComponent").await;
    assert!(refused["status"]["servingDigest"].is_null(), "{refused}");
    assert_eq!(host.metric("berth_plugins_refused", &[]).await, Some(1.0));
    stage.mail("e1", "a@example.com").await;
    stage.until_mail("e1", "Sent").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_plugin_stops_its_kind_and_a_recreated_one_goes_on() {
    let stage = Stage::shared().await;
    let host = stage.report_host("").await;
    withdraw(&stage.cluster, "report-job").await;
    eventually(SOON, async || match host.metric("berth_plugin_info", &[("plugin", "report-job")]).await {
        None | Some(0.0) => Ok(()),
        Some(_) => Err("it still serves"),
    })
    .await;
    stage.job("job", "sales", 0).await;
    let untouched = stage.cluster.get(Resource::JOB, "job").await["metadata"]["resourceVersion"].clone();
    always(Duration::from_secs(3), async || {
        let job = stage.cluster.get(Resource::JOB, "job").await;
        if job["metadata"]["resourceVersion"] == untouched { Ok(()) } else { Err(job.to_string()) }
    })
    .await;
    assert_eq!(stage.exporter.requests().len(), 0);
    stage.push_report_job("").await;
    stage.until_job("job", "Done").await;
    // As `kubectl replace --force` does it.
    withdraw(&stage.cluster, "report-job").await;
    let version = stage.push_report_job("backoff: {base: 2s}\n").await;
    stage.cluster.until_serving("report-job", &version).await;
    stage.job("replaced", "sales", 0).await;
    stage.until_job("replaced", "Done").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_without_a_permission_names_it_and_goes_on_when_it_is_granted() {
    let stage = Stage::shared().await;
    let other = stage.cluster.another_namespace().await;
    stage.cluster.forbid("berth-plugin-report-job").await;
    let version = stage.push_report_job("").await;
    let flags = Flags { more_namespaces: vec![other.clone()], ..stage.flags() };
    let _host = Host::start(&stage.cluster, "host", &flags).await;
    let forbidden = async |namespace: &str| {
        let told = |plugin: &Value| {
            let reason = plugin["status"]["reason"].as_str().unwrap_or_default();
            ready_reason(plugin) == "Forbidden" && reason.contains("may not list reportjobs") && reason.contains(namespace)
        };
        stage.cluster.until_plugin("report-job", &version, told).await
    };
    forbidden(stage.cluster.namespace()).await;
    // In one of two namespaces: the other one is named now.
    let binding = |namespace: &str| {
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": "report-job", "namespace": namespace},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "berth-plugin-report-job"},
            "subjects": [{"kind": "ServiceAccount", "name": "berth", "namespace": stage.cluster.system()}]})
    };
    stage.cluster.install([binding(stage.cluster.namespace())]).await;
    forbidden(&format!("{other:?}")).await;
    stage.cluster.install([binding(&other)]).await;
    stage.cluster.until_serving("report-job", &version).await;
    stage.job("job", "sales", 0).await;
    stage.until_job("job", "Done").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_older_of_two_plugins_of_one_kind_serves_and_the_other_takes_over_when_it_goes() {
    let stage = Stage::shared().await;
    let _host = stage.report_host("").await;
    // A ConfigMap's age has whole seconds.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let config = berth_tests::workspace::deploy("plugins/report-job.yaml").expect("it ships");
    let version = stage.cluster.push("another", &guest("report_job_v2"), &config).await;
    let refused = stage.cluster.until_plugin("another", &version, |plugin| ready_reason(plugin) == "KindTaken").await;
    assert!(refused["status"]["reason"].as_str().is_some_and(|reason| reason.contains("report-job")), "{refused}");
    stage.job("first", "sales", 0).await;
    assert!(stage.until_job("first", "Done").await["status"]["message"].is_null());
    withdraw(&stage.cluster, "report-job").await;
    stage.cluster.until_serving("another", &version).await;
    stage.job("second", "sales", 0).await;
    assert_eq!(stage.until_job("second", "Done").await["status"]["message"], "exported by version 2");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handlers_that_loop_or_hang_delay_nobody_else() {
    let stage = Stage::shared().await;
    stage.cluster.push("probe", &probe(&json!({})), "timeout: 10s\ncpu: 1s\n").await;
    let host = stage.email_host().await;
    // At once, as the first have to run yet when the last come.
    let create = async |number: u32| {
        let (name, what) = if number.is_multiple_of(2) { ("loop", "loop") } else { ("hang", "hostblock") };
        stage.cluster.create(Resource::PROBE, &format!("{name}-{number}"), json!({ "do": what })).await
    };
    join_all((0..16).map(create)).await;
    host.until_queued("Probe.probe.acme.io", "running", 16.0).await;
    stage.mail("e1", "a@example.com").await;
    stage.cluster.until_phase(Resource::EMAIL, "e1", "Sent", Duration::from_secs(10)).await;
    // Each fails by its own limit, and the slots are free again.
    eventually(SOON, async || {
        match host.metric("berth_reconcile_total", &[("kind", "Probe.probe.acme.io"), ("result", "failure")]).await {
            Some(failures) if failures >= 16.0 => Ok(()),
            failures => Err(format!("{failures:?} of 16 have failed")),
        }
    })
    .await;
    stage.cluster.create(Resource::PROBE, "good", json!({"do": "ok"})).await;
    stage.cluster.until_phase(Resource::PROBE, "good", "Done", SOON).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backlog_of_handlers_that_hang_delays_no_other_plugin() {
    let stage = Stage::shared().await;
    // None of those that run ends before the test does.
    stage.cluster.push("probe", &probe(&json!({})), "timeout: 5m\n").await;
    let host = stage.email_host().await;
    let names: Vec<String> = (0..200).map(|number| format!("hang-{number}")).collect();
    for some in names.chunks(50) {
        join_all(some.iter().map(|name| stage.cluster.create(Resource::PROBE, name, json!({"do": "hostblock"})))).await;
    }
    for (state, count) in [("running", 16.0), ("ready", 184.0)] {
        host.until_queued("Probe.probe.acme.io", state, count).await;
    }
    stage.mail("e1", "a@example.com").await;
    stage.cluster.until_phase(Resource::EMAIL, "e1", "Sent", scaled(SOON, Duration::from_secs(2))).await;
    host.until_queued("Probe.probe.acme.io", "ready", 184.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trap_on_one_object_poisons_no_other() {
    let cluster = Cluster::shared().await;
    let mut host = probing(&cluster).await;
    for (name, what) in [("x", "trap"), ("deep", "deep"), ("bomb", "bomb"), ("y", "ok"), ("z", "ok")] {
        cluster.create(Resource::PROBE, name, json!({"do": what})).await;
    }
    for name in ["y", "z"] {
        cluster.until_phase(Resource::PROBE, name, "Done", SOON).await;
    }
    cluster.patch(Resource::PROBE, "x", json!({"spec": {"do": "ok"}})).await;
    cluster.until_phase(Resource::PROBE, "x", "Done", SOON).await;
    assert!(host.runs());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_edit_during_a_run_is_followed_by_a_run_with_the_new_spec() {
    let cluster = Cluster::shared().await;
    // It outlasts the edits.
    let host = stage::probing(&cluster, &probe(&json!({})), "timeout: 30s\n").await;
    cluster.create(Resource::PROBE, "p", json!({"do": "sleep", "ms": 15_000})).await;
    host.until_queued("Probe.probe.acme.io", "running", 1.0).await;
    for number in 0..49 {
        cluster.patch(Resource::PROBE, "p", json!({"spec": {"number": number}})).await;
    }
    cluster.patch(Resource::PROBE, "p", json!({"spec": {"do": "ok"}})).await;
    let running = host.metric("berth_queue_depth", &[("kind", "Probe.probe.acme.io"), ("state", "running")]).await;
    assert!(running.is_some_and(|running| running <= 1.0), "{running:?}");
    let done = cluster.until_phase(Resource::PROBE, "p", "Done", SOON).await;
    assert_eq!(done["status"]["observedGeneration"], done["metadata"]["generation"], "{done}");
    let runs = host.metric("berth_reconcile_duration_seconds_count", &[("kind", "Probe.probe.acme.io")]).await;
    assert!(runs.is_some_and(|runs| runs <= 3.0), "{runs:?} runs for 51 versions");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_asks_for_now_is_run_about_once_a_second() {
    let cluster = Cluster::shared().await;
    let host = probing(&cluster).await;
    cluster.create(Resource::PROBE, "p", json!({"do": "requeue0"})).await;
    let runs =
        async || host.metric("berth_reconcile_total", &[("kind", "Probe.probe.acme.io"), ("result", "requeue")]).await.unwrap_or(0.0);
    eventually(SOON, async || match runs().await {
        1.0.. => Ok(()),
        runs => Err(format!("{runs} runs")),
    })
    .await;
    let before = runs().await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    let after = runs().await;
    assert!((1.0..=5.0).contains(&(after - before)), "{} runs in 4 s", after - before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_digit_of_a_number_comes_back_from_a_handler_that_echoes() {
    let cluster = Cluster::shared().await;
    let _host = probing(&cluster).await;
    let numbers = json!({"do": "roundtrip", "phase": "Done", "big": 9_007_199_254_740_993_i64, "one": 1.0, "negative": -7});
    cluster.create(Resource::PROBE, "p", numbers).await;
    let echo = cluster.until_phase(Resource::PROBE, "p", "Done", SOON).await;
    assert_eq!(echo["status"]["big"].to_string(), "9007199254740993");
    assert_eq!(echo["status"]["negative"], -7);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_folder_of_plugins_serves_and_a_symlink_swap_reloads() {
    let cluster = Cluster::shared().await;
    let folder = cluster.directory().join("plugins");
    let (old, new) = (cluster.directory().join("old.wasm"), cluster.directory().join("new.wasm"));
    std::fs::create_dir(&folder).expect("a folder");
    std::fs::write(&old, probe(&json!({}))).expect("written");
    std::fs::write(&new, probe(&json!({"labelPrefixes": ["other.acme.io/"]}))).expect("written");
    std::os::unix::fs::symlink(&old, folder.join("probe.wasm")).expect("a link");
    std::fs::write(folder.join("probe.yaml"), "settings: {do: ok}\n").expect("written");
    let flags = Flags { more: vec![format!("--plugin-dir={}", folder.display())], ..Flags::default() };
    let _host = Host::start(&cluster, "host", &flags).await;
    cluster.create(Resource::PROBE, "first", json!({})).await;
    cluster.until_phase(Resource::PROBE, "first", "Done", SOON).await;
    let before = cluster.until_in(cluster.system(), Resource::PLUGIN, "probe", SOON, |plugin| !digest(plugin).is_empty()).await;
    std::os::unix::fs::symlink(&new, folder.join("aside")).expect("a link");
    std::fs::rename(folder.join("aside"), folder.join("probe.wasm")).expect("swapped");
    cluster.until_in(cluster.system(), Resource::PLUGIN, "probe", SOON, |plugin| digest(plugin) != digest(&before)).await;
    cluster.create(Resource::PROBE, "second", json!({})).await;
    cluster.until_phase(Resource::PROBE, "second", "Done", SOON).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outcome_that_cannot_be_taken_is_a_sentence_and_not_a_loop() {
    let cluster = Cluster::shared().await;
    let host = stage::probing(&cluster, &probe(&letters(1)), "").await;
    for (what, words) in [("deepjson", "64"), ("badlabel", "elsewhere.io/phase"), ("trap", "trap")] {
        cluster.create(Resource::PROBE, what, json!({"do": what})).await;
        let object = cluster.until_phase(Resource::PROBE, what, "Failed", SOON).await;
        let message = object["status"]["message"].as_str().unwrap_or_default();
        assert!(message.contains(words) && message.len() < 2048, "{what}: {message:?} does not speak of {words}");
        assert_eq!(object["status"]["retries"], 1, "{object}");
    }
    // A status that is too large only because of its message is not lost.
    cluster.create(Resource::PROBE, "large", json!({"do": "bigstatus"})).await;
    let object = cluster.until_phase(Resource::PROBE, "large", "Done", SOON).await;
    let message = object["status"]["message"].as_str().unwrap_or_default();
    assert!(message.len() < 2048 && message.ends_with('…'), "{} bytes: {:?}", message.len(), &message[..40]);
    for state in ["ready", "delayed", "running"] {
        host.until_queued("Probe.probe.acme.io", state, 0.0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn twenty_memory_bombs_at_once_are_refused_their_memory_and_the_host_lives() {
    let cluster = Cluster::shared().await;
    let mut host = probing(&cluster).await;
    for number in 0..20 {
        cluster.create(Resource::PROBE, &format!("bomb-{number}"), json!({"do": "bomb"})).await;
    }
    eventually(SOON, async || {
        match host.metric("berth_reconcile_total", &[("kind", "Probe.probe.acme.io"), ("result", "failure")]).await {
            Some(failures) if failures >= 20.0 => Ok(()),
            failures => Err(format!("{failures:?} of 20 have failed")),
        }
    })
    .await;
    assert!(host.runs());
    // Sixteen at once with 64 MiB each is what the limits allow; the rest is the host. In KiB, the most that it had at any time.
    let peak = kernel_number(host.id(), "status", "VmHWM").expect("it runs");
    assert!(peak < 1300 << 10, "{} MiB at once", peak >> 10);
}
