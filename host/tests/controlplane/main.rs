//! The local control plane and what is installed into it, on the real binaries.

#![allow(clippy::unwrap_used, reason = "a test that unwraps fails with the line; clippy takes helpers of tests for other code")]

mod deploy;
mod dev;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use berth_host::controlplane::{ControlPlane, Options, Progress};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, ServiceAccount};
use kube::api::{DeleteParams, ObjectMeta, PostParams};
use kube::{Api, Client};

async fn start() -> ControlPlane {
    ControlPlane::start(Options::default()).await.unwrap()
}

fn client(plane: &ControlPlane) -> Client {
    Client::try_from(plane.config()).unwrap()
}

async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Result<T, String>) -> T {
    let start = Instant::now();
    loop {
        match look().await {
            Ok(seen) => return seen,
            Err(last) if start.elapsed() > Duration::from_secs(150) => panic!("not within 150 s: {what}; last seen: {last}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

fn named(name: &str) -> ObjectMeta {
    ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() }
}

/// The processes that were started with a file of `directory` among their arguments.
fn processes_of(directory: &Path) -> Vec<String> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let command = |entry: std::fs::DirEntry| std::fs::read(entry.path().join("cmdline")).ok();
    let lines = processes.filter_map(command).map(|bytes| String::from_utf8_lossy(&bytes).replace('\0', " "));
    lines.filter(|line| line.contains(directory.to_str().unwrap())).collect()
}

// A runtime of one thread is the most that a test may have.
#[tokio::test]
async fn a_control_plane_serves_with_rbac_and_working_controllers_and_leaves_nothing_behind() {
    let begin = Instant::now();
    let plane = start().await;
    println!("ready after {:?}", begin.elapsed());
    let admin = client(&plane);
    assert!(admin.apiserver_version().await.unwrap().git_version.starts_with("v1."));

    // The namespace controller and the ServiceAccount controller work.
    let namespaces = Api::<Namespace>::all(admin.clone());
    namespaces.create(&PostParams::default(), &Namespace { metadata: named("short-lived"), ..Namespace::default() }).await.unwrap();
    let accounts = Api::<ServiceAccount>::namespaced(admin.clone(), "short-lived");
    eventually("a default ServiceAccount", async || accounts.get("default").await.map_err(|error| error.to_string())).await;

    // A ServiceAccount is who it says, and may do nothing that it was not granted.
    let guest = Client::try_from(plane.config_of("short-lived", "default").await.unwrap()).unwrap();
    let denied = Api::<ConfigMap>::namespaced(guest.clone(), "short-lived").list(&Default::default()).await.unwrap_err().to_string();
    assert!(denied.contains("system:serviceaccount:short-lived:default"), "{denied}");
    let someone = Client::try_from(plane.config_for("jane", &["readers"])).unwrap();
    let denied = Api::<ConfigMap>::namespaced(someone, "short-lived").list(&Default::default()).await.unwrap_err().to_string();
    assert!(denied.contains("User \"jane\" cannot list"), "{denied}");
    let review = SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec {
            resource_attributes: Some(ResourceAttributes {
                verb: Some("list".to_owned()),
                resource: Some("configmaps".to_owned()),
                ..ResourceAttributes::default()
            }),
            ..SelfSubjectAccessReviewSpec::default()
        },
        ..SelfSubjectAccessReview::default()
    };
    let answer = Api::<SelfSubjectAccessReview>::all(guest).create(&PostParams::default(), &review).await.unwrap();
    assert!(!answer.status.unwrap().allowed);

    namespaces.delete("short-lived", &DeleteParams::default()).await.unwrap();
    eventually("the end of the namespace", async || match namespaces.get_opt("short-lived").await {
        Ok(None) => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await;

    let directory = plane.directory().to_owned();
    assert!(!processes_of(&directory).is_empty());
    plane.stop().await;
    assert_eq!(processes_of(&directory), Vec::<String>::new());
    assert!(!directory.exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn control_planes_run_side_by_side_and_an_api_server_comes_back_on_its_address_with_its_data() {
    let (mut one, other) = tokio::join!(start(), start());
    assert_ne!(one.url(), other.url());
    let maps = Api::<ConfigMap>::namespaced(client(&one), "default");
    maps.create(&PostParams::default(), &ConfigMap { metadata: named("kept"), ..ConfigMap::default() }).await.unwrap();
    let url = one.url();

    one.stop_api_server();
    assert!(maps.get("kept").await.is_err());
    one.start_api_server().await.unwrap();

    assert_eq!(one.url(), url);
    assert!(maps.get("kept").await.is_ok());
    assert!(Api::<ConfigMap>::namespaced(client(&other), "default").get_opt("kept").await.unwrap().is_none());
}

#[tokio::test]
async fn a_server_that_does_not_start_is_reported_with_the_end_of_its_log() {
    let options =
        Options { api_server_flags: vec!["--no-such-flag".to_owned()], progress: Progress::silent().into(), ..Options::default() };
    let error = ControlPlane::start(options).await.unwrap_err().to_string();
    assert!(error.contains("kube-apiserver ended (exit status: 1) before the API server serves"), "{error}");
    assert!(error.contains("unknown flag: --no-such-flag"), "{error}");
}

/// Not a test of itself: what the next one runs in a process of its own and kills.
#[tokio::test]
async fn parent_to_be_killed() {
    if let Some(file) = std::env::var_os("BERTH_TEST_DIRECTORY_FILE") {
        let plane = start().await;
        std::fs::write(file, plane.directory().to_str().unwrap()).unwrap();
        std::future::pending::<()>().await;
    }
}

#[tokio::test]
async fn nothing_outlives_a_parent_that_is_killed() {
    let temporary = tempfile::tempdir().unwrap();
    let file = temporary.path().join("directory");
    let mut parent = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "parent_to_be_killed"])
        .env("BERTH_TEST_DIRECTORY_FILE", &file)
        .spawn()
        .unwrap();
    let directory = eventually("a control plane in the other process", async || match std::fs::read_to_string(&file) {
        Ok(directory) if !directory.is_empty() => Ok(directory),
        other => Err(format!("{other:?}")),
    })
    .await;
    let directory = Path::new(&directory);
    assert!(processes_of(directory).len() >= 3);
    parent.kill().unwrap();
    parent.wait().unwrap();
    eventually("the end of its children", async || match processes_of(directory) {
        left if left.is_empty() && !directory.exists() => Ok(()),
        left => Err(format!("{left:?}")),
    })
    .await;
}
