//! `berth push` as a person uses it: the example of the guide into a cluster with a running host.

use std::process::{Command, Output};

use berth_tests::{
    cluster::Cluster,
    component::of_size,
    host::{Flags, Host},
    resource::Resource,
    stage::{self, SOON, probe},
    workspace,
};
use serde_json::json;

const GREETING: Resource = Resource { group: "demo.acme.io", version: "v1", kind: "Greeting", plural: "greetings" };

async fn push(cluster: &Cluster, arguments: &[&str]) -> Output {
    let mut command = Command::new(workspace::berth().expect("the binary is built"));
    command.arg("push").args(arguments).arg("--namespace").arg(cluster.system());
    command.arg("--kubeconfig").arg(cluster.plane().control().kubeconfig());
    tokio::task::spawn_blocking(move || command.output().expect("it runs")).await.expect("it ends")
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pushed_plugin_with_its_crd_serves_and_its_next_version_takes_over_with_its_settings() {
    let cluster = Cluster::shared().await;
    let _host = Host::start(&cluster, "host", &Flags::default()).await;
    let hello = workspace::guest("hello").expect("built");
    let hello = hello.to_str().expect("UTF-8");
    let crd = workspace::root().join("guest-sdk/examples/hello/greetings.demo.acme.io.yaml");

    let pushed = push(&cluster, &[hello, "--crd", crd.to_str().expect("UTF-8")]).await;
    assert!(pushed.status.success(), "{}", text(&pushed));
    cluster.create(GREETING, "ada", json!({"name": "Ada"})).await;
    cluster.until(GREETING, "ada", SOON, |greeting| greeting["status"]["text"] == "Hello, Ada!").await;

    let pushed = push(&cluster, &[hello, "--set", "word=Good morning"]).await;
    assert!(pushed.status.success(), "{}", text(&pushed));
    cluster.until(GREETING, "ada", SOON, |greeting| greeting["status"]["text"] == "Good morning, Ada!").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_component_that_cannot_serve_is_refused_before_anything_is_written() {
    let cluster = Cluster::shared().await;
    let half = cluster.directory().join("half.wasm");
    let whole = std::fs::read(workspace::guest("hello").expect("built")).expect("readable");
    std::fs::write(&half, &whole[..whole.len() / 2]).expect("written");
    let pushed = push(&cluster, &[half.to_str().expect("UTF-8")]).await;
    assert_eq!(pushed.status.code(), Some(1), "{}", text(&pushed));
    assert!(text(&pushed).contains("not whole"), "{}", text(&pushed));
    let configmaps = Resource::CONFIG_MAP.api(cluster.client(), Some(cluster.system()));
    assert!(configmaps.get_opt("half").await.expect("answers").is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_component_of_600_kb_serves_however_it_is_applied_and_1200_kb_are_refused_with_what_to_do() {
    let cluster = Cluster::shared().await;
    let component = probe(&json!({}));
    // As `kubectl apply --server-side` does it, as it is.
    let _host = stage::probing(&cluster, &of_size(&component, 600_000), "").await;
    cluster.create(Resource::PROBE, "applied", json!({"do": "ok"})).await;
    cluster.until_phase(Resource::PROBE, "applied", "Done", SOON).await;
    let file = |name: &str, bytes: usize| {
        let path = cluster.directory().join(name);
        std::fs::write(&path, of_size(&component, bytes)).expect("written");
        path.to_str().expect("UTF-8").to_owned()
    };
    // The role of the probe is the whole cluster's.
    let pushed = push(&cluster, &[file("large.wasm", 600_001).as_str(), "--name", "probe", "--no-rbac"]).await;
    assert!(pushed.status.success(), "{}", text(&pushed));
    cluster.create(Resource::PROBE, "pushed", json!({"do": "ok"})).await;
    cluster.until_phase(Resource::PROBE, "pushed", "Done", SOON).await;

    let before = cluster.get_in(cluster.system(), Resource::CONFIG_MAP, "probe").await;
    // So much beside the component, of which the compression leaves less.
    let pushed = push(&cluster, &[file("larger.wasm", component.len() + 1_200_000).as_str(), "--name", "probe", "--no-rbac"]).await;
    assert_eq!(pushed.status.code(), Some(1), "{}", text(&pushed));
    let says = text(&pushed);
    assert!(says.contains("a ConfigMap holds 1048576") && says.contains("build it for size"), "{says}");
    assert_eq!(cluster.get_in(cluster.system(), Resource::CONFIG_MAP, "probe").await, before, "nothing was applied");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_that_no_host_hears_says_so() {
    let cluster = Cluster::shared().await;
    let hello = workspace::guest("hello").expect("built");
    // A name of its own: the roles of a plugin are the whole cluster's.
    let pushed = push(&cluster, &[hello.to_str().expect("UTF-8"), "--name", "unheard", "--wait", "2s"]).await;
    assert_eq!(pushed.status.code(), Some(1), "{}", text(&pushed));
    assert!(text(&pushed).contains("is applied, but"), "{}", text(&pushed));
}
