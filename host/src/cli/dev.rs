//! `berth dev`: a local control plane and the host against it, under the host's own identity.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use clap::Args as ClapArgs;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tokio_util::sync::CancellationToken;

use super::run::HostArgs;
use crate::{
    controlplane::{ControlPlane, Options, elapsed},
    host,
    install::{Manifests, Mode, shipped},
};

/// The host's account in `deploy/`.
const NAMESPACE: &str = "berth-system";
const SERVICE_ACCOUNT: &str = "berth";

/// The first line of a kubeconfig file that is ours to replace and remove.
const MARK: &str = "# Written by `berth dev`, and removed when it ends.\n";

/// Flags of `berth dev`.
#[derive(ClapArgs, Clone, Debug)]
#[command(after_long_help = EXAMPLES)]
pub struct Args {
    /// Write the administrator's kubeconfig to this file, for kubectl and `berth push`
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Also install this YAML file or folder (a CRD, a role for another plugin, samples); may be given several times
    #[arg(long, value_name = "PATH")]
    apply: Vec<PathBuf>,
    /// Leave the control plane's logs and data when it ends
    #[arg(long)]
    keep: bool,
    /// Only find or build the binaries of the control plane
    #[arg(long)]
    prepare: bool,
    #[command(flatten)]
    host: HostArgs,
}

const EXAMPLES: &str = "The binaries of the control plane are found as envtest finds them (TEST_ASSET_ETCD, TEST_ASSET_KUBE_APISERVER,
KUBEBUILDER_ASSETS, the store of setup-envtest, /usr/local/kubebuilder/bin, PATH), or else built once with Go.

Examples:
  berth dev
  berth dev --plugin-dir deploy/plugins --resolve mail.demo:80=127.0.0.1:8025
  berth dev --kubeconfig dev.kubeconfig --apply my-crd.yaml --apply my-role.yaml --plugin-dir ./target/plugins";

impl Args {
    /// Runs until `shutdown`, and then ends the control plane too.
    pub async fn run(self, shutdown: CancellationToken) -> anyhow::Result<()> {
        let Self { kubeconfig, apply, keep, prepare, host } = self;
        if prepare {
            return only_prepare().await;
        }
        let settings = host.settings()?;
        if let Some(file) = &kubeconfig {
            check_replaceable(file)?;
        }
        let mut manifests = shipped()?;
        for path in &apply {
            manifests.extend(Manifests::read(path)?);
        }
        let options = Options { keep, ..Options::default() };
        let progress = options.progress.clone();
        let start = Instant::now();
        progress.say("starting the control plane");
        let mut plane = tokio::select! {
            plane = ControlPlane::start(options) => plane?,
            () = shutdown.cancelled() => return Ok(()),
        };
        progress.say(&format!("the control plane is up after {}", elapsed(start)));
        let end = serve(&mut plane, &manifests, kubeconfig.as_deref(), settings, start, shutdown).await;
        if let Some(file) = &kubeconfig {
            // Only ours: `serve` may have failed before it wrote it.
            if check_replaceable(file).is_ok() {
                let _ = std::fs::remove_file(file);
            }
        }
        let directory = plane.directory().to_owned();
        plane.stop().await;
        if keep {
            progress.say(&format!("logs and data of the control plane: {}", directory.display()));
        }
        end
    }
}

async fn only_prepare() -> anyhow::Result<()> {
    let assets = ControlPlane::prepare(Options::default().progress).await?;
    for binary in [Some(assets.etcd), Some(assets.api_server), assets.controller_manager].into_iter().flatten() {
        println!("{}", binary.display());
    }
    Ok(())
}

async fn serve(
    plane: &mut ControlPlane,
    manifests: &Manifests,
    kubeconfig: Option<&Path>,
    settings: host::Settings,
    start: Instant,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let admin = kube::Client::try_from(plane.config()).context("no client for the control plane")?;
    let prepare = async {
        manifests.apply(&admin, Mode::Store).await.context("cannot install")?;
        plane.config_of(NAMESPACE, SERVICE_ACCOUNT).await
    };
    let config = tokio::select! {
        config = prepare => config?,
        () = shutdown.cancelled() => return Ok(()),
    };
    let kubeconfig = match kubeconfig {
        Some(file) => {
            write_private(file, &format!("{MARK}{}", plane.admin_kubeconfig()))?;
            std::path::absolute(file).unwrap_or_else(|_| file.to_owned())
        }
        None => plane.kubeconfig().to_owned(),
    };
    let what_next = what_next(&kubeconfig, plane.directory());
    let (bound, address) = tokio::sync::oneshot::channel();
    let running = host::run(config, settings, shutdown.clone(), |address| {
        // Nobody waits for it once shutdown began.
        let _ = bound.send(address);
    });
    let announce = async {
        if let Ok(address) = address.await {
            until_ready(address).await;
            println!("\nReady after {}. {what_next}", elapsed(start));
        }
        std::future::pending::<()>().await
    };
    tokio::select! {
        end = running => end,
        error = plane.broken() => Err(error),
        () = announce => unreachable!("it never ends"),
    }
}

fn what_next(kubeconfig: &Path, directory: &Path) -> String {
    format!(
        "In another terminal:

  export KUBECONFIG={}
  kubectl get plugins -n {NAMESPACE}
  kubectl apply -f deploy/samples/welcome-42.yaml
  kubectl get emailrequests,reportjobs -A
  berth push FILE.wasm --kubeconfig $KUBECONFIG

Logs of the control plane are in {}. Ctrl-C ends everything.
",
        kubeconfig.display(),
        directory.display()
    )
}

/// Asks the host's own `/readyz`, as a kubelet would.
async fn until_ready(admin: SocketAddr) {
    const PACE: Duration = Duration::from_millis(100);
    let address = if admin.ip().is_unspecified() { SocketAddr::new([127, 0, 0, 1].into(), admin.port()) } else { admin };
    let ask = async || -> std::io::Result<bool> {
        let mut connection = TcpStream::connect(address).await?;
        connection.write_all(format!("GET /readyz HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").as_bytes()).await?;
        let mut answer = Vec::new();
        connection.read_to_end(&mut answer).await?;
        Ok(answer.starts_with(b"HTTP/1.1 200"))
    };
    while !ask().await.unwrap_or(false) {
        tokio::time::sleep(PACE).await;
    }
}

/// Somebody's own configuration is not overwritten.
fn check_replaceable(file: &Path) -> anyhow::Result<()> {
    match std::fs::read_to_string(file) {
        Ok(text) if !text.starts_with(MARK) => bail!("{} exists and is not of `berth dev`; name another file", file.display()),
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error).with_context(|| format!("cannot read {}", file.display())),
        _ => Ok(()),
    }
}

/// It makes its reader the administrator.
fn write_private(file: &Path, text: &str) -> anyhow::Result<()> {
    use std::{io::Write, os::unix::fs::OpenOptionsExt};
    let open = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(file);
    open.and_then(|mut file| file.write_all(text.as_bytes())).with_context(|| format!("cannot write {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kubeconfig_of_someone_else_is_not_replaced_and_one_of_a_former_run_is() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("config");
        check_replaceable(&file).unwrap();
        write_private(&file, &format!("{MARK}apiVersion: v1\n")).unwrap();
        check_replaceable(&file).unwrap();
        std::fs::write(&file, "apiVersion: v1\n").unwrap();
        let sentence = check_replaceable(&file).unwrap_err().to_string();
        assert!(sentence.ends_with("exists and is not of `berth dev`; name another file"), "{sentence}");
    }
}
