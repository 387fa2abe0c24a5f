//! `berth dev` from outside: a process, its output and what it leaves.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client};

use crate::{eventually, processes_of};

/// Killed if the test fails, so that it does not linger.
struct Dev(Child);

impl Drop for Dev {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn interrupt(child: &Child) {
    let pid = rustix::process::Pid::from_child(child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
}

#[tokio::test]
async fn dev_runs_the_host_under_its_own_identity_and_an_interrupt_leaves_nothing_behind() {
    let temporary = tempfile::tempdir().unwrap();
    let kubeconfig = temporary.path().join("dev.kubeconfig");
    let mut command = Command::new(env!("CARGO_BIN_EXE_berth"));
    command.arg("dev").arg("--kubeconfig").arg(&kubeconfig).args(["--admin-address", "127.0.0.1:0"]);
    command.arg("--cache-dir").arg(temporary.path().join("compiled"));
    let mut dev = Dev(command.stdout(Stdio::piped()).spawn().unwrap());
    let output = BufReader::new(dev.0.stdout.take().unwrap());
    let (lines, said) = std::sync::mpsc::channel();
    std::thread::spawn(move || output.lines().map_while(Result::ok).try_for_each(|line| lines.send(line)));
    eventually("Ready on standard output", async || match said.try_recv() {
        Ok(line) if line.starts_with("Ready after") => Ok(()),
        other => Err(format!("{other:?}")),
    })
    .await;
    let logs = eventually("where the logs are", async || match said.try_recv() {
        Ok(line) => line.strip_prefix("Logs of the control plane are in ").map(str::to_owned).ok_or(line),
        Err(error) => Err(error.to_string()),
    })
    .await;
    let directory = Path::new(logs.split(". ").next().unwrap());
    assert!(processes_of(directory).len() >= 3);

    let parsed = Kubeconfig::read_from(&kubeconfig).unwrap();
    let config = kube::Config::from_custom_kubeconfig(parsed, &KubeConfigOptions::default()).await.unwrap();
    let client = Client::try_from(config).unwrap();
    Api::<CustomResourceDefinition>::all(client.clone()).get("reportjobs.batch.acme.io").await.unwrap();
    let leases = Api::<Lease>::namespaced(client, "berth-system");
    // Written with the ServiceAccount's token: the host got no other.
    eventually("the host leads", async || {
        let lease = leases.get("berth").await.map_err(|error| error.to_string())?;
        let holder = lease.spec.as_ref().and_then(|spec| spec.holder_identity.clone()).unwrap_or_default();
        if holder.is_empty() { Err(format!("{lease:?}")) } else { Ok(()) }
    })
    .await;

    interrupt(&dev.0);
    let asked = Instant::now();
    let status = loop {
        match dev.0.try_wait().unwrap() {
            Some(status) => break status,
            None if asked.elapsed() > Duration::from_secs(30) => panic!("still there 30 s after the interrupt"),
            None => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    assert!(status.success(), "{status}");
    assert_eq!(processes_of(directory), Vec::<String>::new());
    assert!(!directory.exists() && !kubeconfig.exists());
}
