//! A local control plane: real etcd, kube-apiserver and kube-controller-manager, for `berth dev`, the demo and the tests.
//!
//! # Expected flow
//! [`ControlPlane::start`] finds or builds the binaries, starts them and returns when the API server serves, roles and the `default`
//! namespace exist and the controllers work. [`ControlPlane::stop`], or dropping it, ends them and removes their directory.
//!
//! # Guarantees
//! The servers listen on 127.0.0.1 and on sockets in a directory that only its owner can enter. They never outlive this process, even if
//! it is killed; nor does the directory. Any number of control planes can run at once, started from any runtime or thread.
//!
//! # Caveats
//! There are no nodes, no scheduler and no controllers but garbage collection, namespaces, ServiceAccounts and role aggregation.

mod assets;
mod build;
mod credentials;
mod process;
mod progress;

use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use kube::api::PostParams;
use kube::{Api, Client};

pub use assets::{Assets, Places};
pub use credentials::{client_config, kubeconfig};
pub use progress::{Progress, elapsed};

use credentials::Credentials;
use process::Process;

use crate::install::expecting_failures;

/// It takes three to four seconds on two idle cores; a machine that builds at the same time may need many times that.
const READY_PATIENCE: Duration = Duration::from_secs(120);
const READY_PACE: Duration = Duration::from_millis(50);
/// Below the ports that systems give to outgoing connections, so that a stopped server finds its port free when it starts again.
const PORTS: std::ops::Range<u16> = 20_000..32_000;
/// Another process may take a port between our look and the server's; three times in a row is no accident.
const PORT_TRIES: usize = 3;
/// The name of a unix socket has about 100 bytes on every system; `/etcd.sock` and the directory's own name need 40.
const LONGEST_PARENT: usize = 60;
/// As long as a control plane may plausibly live, so that nobody has to renew tokens.
const TOKEN_SECONDS: i64 = 365 * 24 * 3600;

const CONTROLLERS: &str = "garbage-collector-controller,namespace-controller,serviceaccount-controller,clusterrole-aggregation-controller";

/// How to start a control plane.
#[derive(Clone, Debug)]
pub struct Options {
    /// More flags for kube-apiserver, after ours.
    pub api_server_flags: Vec<String>,
    /// Leave the directory with logs and data after an orderly stop.
    pub keep: bool,
    /// Who is told of builds and of what is missing.
    pub progress: Arc<Progress>,
}

impl Default for Options {
    fn default() -> Self {
        Self { api_server_flags: Vec::new(), keep: false, progress: Arc::new(Progress::stderr()) }
    }
}

/// A running control plane.
#[derive(Debug)]
pub struct ControlPlane {
    // In this order they are dropped: clients of a server before it, the directory last.
    controller_manager: Option<Process>,
    api_server: Option<Process>,
    etcd: Option<Process>,
    setup: Setup,
}

/// What stays the same over restarts of a server.
#[derive(Debug)]
struct Setup {
    assets: Assets,
    api_server_flags: Vec<String>,
    port: u16,
    credentials: Credentials,
    kubeconfig: PathBuf,
    config: kube::Config,
    directory: tempfile::TempDir,
}

/// Why a server did not get ready.
#[derive(Debug, thiserror::Error)]
enum NotReady {
    #[error("another process took the API server's port")]
    PortTaken,
    #[error(transparent)]
    Other(#[from] anyhow::Error),
}

impl ControlPlane {
    /// Starts one and waits until it is ready.
    pub async fn start(options: Options) -> Result<Self> {
        let Options { api_server_flags, keep, progress } = options;
        let assets = locate(progress).await?;
        for _ in 1..PORT_TRIES {
            match Self::start_once(assets.clone(), api_server_flags.clone(), keep).await {
                Err(NotReady::PortTaken) => {}
                Err(NotReady::Other(error)) => return Err(error),
                Ok(started) => return Ok(started),
            }
        }
        Self::start_once(assets, api_server_flags, keep).await.map_err(anyhow::Error::from)
    }

    /// Finds the binaries, or builds them, without starting anything.
    pub async fn prepare(progress: Arc<Progress>) -> Result<Assets> {
        locate(progress).await
    }

    async fn start_once(assets: Assets, api_server_flags: Vec<String>, keep: bool) -> Result<Self, NotReady> {
        let setup = Setup::create(assets, api_server_flags, keep).await?;
        let mut started = Self { controller_manager: None, api_server: None, etcd: None, setup };
        started.run_etcd()?;
        started.run_api_server().await?;
        started.run_controller_manager().await?;
        Ok(started)
    }

    /// The administrator's kubeconfig file.
    pub fn kubeconfig(&self) -> &Path {
        &self.setup.kubeconfig
    }

    /// The text of the administrator's kubeconfig file, for a copy elsewhere.
    pub fn admin_kubeconfig(&self) -> String {
        kubeconfig(&self.url(), self.authority(), self.admin_token())
    }

    /// The administrator's client configuration.
    pub fn config(&self) -> kube::Config {
        self.setup.config.clone()
    }

    /// A client configuration that acts as `user` with `groups`, whoever that is, by impersonation.
    pub fn config_for(&self, user: &str, groups: &[&str]) -> kube::Config {
        let mut config = self.config();
        config.auth_info.impersonate = Some(user.to_owned());
        config.auth_info.impersonate_groups = Some(groups.iter().map(|group| (*group).to_owned()).collect());
        config
    }

    /// The API server's address.
    pub fn url(&self) -> String {
        self.setup.url()
    }

    /// The certificate, in PEM, that the API server's own is trusted by.
    pub fn authority(&self) -> &str {
        &self.setup.credentials.authority
    }

    /// The administrator's bearer token.
    pub fn admin_token(&self) -> &str {
        &self.setup.credentials.admin_token
    }

    /// Where data and logs (`etcd.log`, `kube-apiserver.log`, `kube-controller-manager.log`) are.
    pub fn directory(&self) -> &Path {
        self.setup.directory.path()
    }

    /// Whether there is a kube-controller-manager.
    pub fn has_controllers(&self) -> bool {
        self.controller_manager.is_some()
    }

    /// A token of a ServiceAccount that exists.
    pub async fn token_of(&self, namespace: &str, service_account: &str) -> Result<String> {
        let accounts = Api::<ServiceAccount>::namespaced(Client::try_from(self.config())?, namespace);
        let spec = TokenRequestSpec { expiration_seconds: Some(TOKEN_SECONDS), ..TokenRequestSpec::default() };
        let request = TokenRequest { spec: Some(spec), ..TokenRequest::default() };
        let answer = accounts
            .create_token_request(service_account, &PostParams::default(), &request)
            .await
            .with_context(|| format!("no token for the ServiceAccount {namespace}/{service_account}"))?;
        answer.status.and_then(|status| status.token).context("a token request was answered without a token")
    }

    /// The client configuration of a ServiceAccount that exists.
    pub async fn config_of(&self, namespace: &str, service_account: &str) -> Result<kube::Config> {
        let token = self.token_of(namespace, service_account).await?;
        client_config(&kubeconfig(&self.url(), self.authority(), &token)).await
    }

    /// A kubeconfig file of a ServiceAccount that exists, in the control plane's directory.
    pub async fn kubeconfig_of(&self, namespace: &str, service_account: &str) -> Result<PathBuf> {
        let token = self.token_of(namespace, service_account).await?;
        let file = self.directory().join(format!("{namespace}-{service_account}.kubeconfig"));
        std::fs::write(&file, kubeconfig(&self.url(), self.authority(), &token))
            .with_context(|| format!("cannot write {}", file.display()))?;
        Ok(file)
    }

    /// Kills the API server, as a crash of its machine would. etcd and the data stay.
    pub fn stop_api_server(&mut self) {
        self.api_server = None;
    }

    /// Starts the API server again, at the same address on the same data, and waits until it is ready.
    pub async fn start_api_server(&mut self) -> Result<()> {
        self.stop_api_server();
        self.run_api_server().await.map_err(anyhow::Error::from)
    }

    /// Kills etcd, as a crash of its machine would. The data stay, and the API server goes on without them.
    pub fn stop_etcd(&mut self) {
        self.etcd = None;
    }

    /// Starts etcd again on the same data, and waits until the API server is ready with it.
    pub async fn start_etcd(&mut self) -> Result<()> {
        self.stop_etcd();
        self.run_etcd()?;
        self.until_served().await.map_err(anyhow::Error::from)
    }

    /// Waits until a server ends that nobody asked to, and says which.
    pub async fn broken(&mut self) -> anyhow::Error {
        const PACE: Duration = Duration::from_millis(500);
        loop {
            if let Some((process, status)) = self.ended() {
                return anyhow!("{} has ended ({status}); the end of its log:\n{}", process.name(), process.log_tail());
            }
            tokio::time::sleep(PACE).await;
        }
    }

    /// Ends everything and removes the directory.
    pub async fn stop(self) {
        // Dropping waits for the processes to go, a few milliseconds: on a thread of its own, so that no runtime is held up.
        let (done, wait) = tokio::sync::oneshot::channel::<()>();
        std::thread::spawn(move || {
            let mut ending = self;
            ending.ask_to_end();
            drop(ending);
            drop(done);
        });
        // The channel breaks when the thread is done: that is the message.
        let _ = wait.await;
    }

    fn ask_to_end(&mut self) {
        self.processes().for_each(Process::ask_to_end);
    }

    fn processes(&mut self) -> impl Iterator<Item = &mut Process> {
        self.etcd.iter_mut().chain(&mut self.api_server).chain(&mut self.controller_manager)
    }

    fn ended(&mut self) -> Option<(&Process, ExitStatus)> {
        self.processes().find_map(|process| process.ended().map(|status| (&*process, status)))
    }

    fn run_etcd(&mut self) -> Result<()> {
        self.etcd = Some(Process::start("etcd", &self.setup.assets.etcd, &self.setup.etcd_flags(), self.setup.directory.path())?);
        Ok(())
    }

    async fn run_api_server(&mut self) -> Result<(), NotReady> {
        let flags = self.setup.api_server_flags();
        self.api_server = Some(Process::start("kube-apiserver", &self.setup.assets.api_server, &flags, self.setup.directory.path())?);
        self.until_served().await
    }

    async fn until_served(&mut self) -> Result<(), NotReady> {
        let client = Client::try_from(self.config()).context("no client for the API server")?;
        let ready = async || {
            let request = http::Request::get("/readyz").body(Vec::new()).expect("a constant request is valid");
            client.request_text(request).await.is_ok() && Api::<Namespace>::all(client.clone()).get("default").await.is_ok()
        };
        self.wait_until("the API server serves", ready).await
    }

    /// Not there is lived without, and said where the binaries are found.
    async fn run_controller_manager(&mut self) -> Result<(), NotReady> {
        let Some(program) = self.setup.assets.controller_manager.clone() else { return Ok(()) };
        let flags = self.setup.controller_manager_flags();
        self.controller_manager = Some(Process::start("kube-controller-manager", &program, &flags, self.setup.directory.path())?);
        let client = Client::try_from(self.config()).context("no client for the API server")?;
        let accounts = Api::<ServiceAccount>::namespaced(client, "default");
        self.wait_until("the controllers work", async || accounts.get("default").await.is_ok()).await
    }

    async fn wait_until(&mut self, what: &str, ready: impl AsyncFn() -> bool) -> Result<(), NotReady> {
        /// One look that hangs is not the end of the wait.
        const LOOK: Duration = Duration::from_secs(2);
        let start = Instant::now();
        loop {
            if tokio::time::timeout(LOOK, expecting_failures(ready())).await.unwrap_or(false) {
                return Ok(());
            }
            if let Some((process, status)) = self.ended() {
                let log = process.log_tail();
                if log.contains("address already in use") {
                    return Err(NotReady::PortTaken);
                }
                return Err(anyhow!("{} ended ({status}) before {what}; the end of its log:\n{log}", process.name()).into());
            }
            if start.elapsed() > READY_PATIENCE {
                let server = self.api_server.as_ref().map(Process::log_tail).unwrap_or_default();
                return Err(anyhow!("after {READY_PATIENCE:?} not yet: {what}; the end of kube-apiserver's log:\n{server}").into());
            }
            tokio::time::sleep(READY_PACE).await;
        }
    }
}

impl Setup {
    async fn create(assets: Assets, api_server_flags: Vec<String>, keep: bool) -> Result<Self> {
        let mut parent = std::env::temp_dir();
        if parent.as_os_str().len() > LONGEST_PARENT {
            parent = PathBuf::from("/tmp");
        }
        let mut directory = tempfile::Builder::new()
            .prefix("berth-controlplane-")
            .tempdir_in(&parent)
            .with_context(|| format!("cannot create a directory in {}", parent.display()))?;
        directory.disable_cleanup(keep);
        let credentials = Credentials::create(directory.path())?;
        let port = free_port()?;
        let text = kubeconfig(&format!("https://127.0.0.1:{port}"), &credentials.authority, &credentials.admin_token);
        let file = directory.path().join("admin.kubeconfig");
        std::fs::write(&file, &text).with_context(|| format!("cannot write {}", file.display()))?;
        let config = client_config(&text).await?;
        Ok(Self { assets, api_server_flags, port, credentials, kubeconfig: file, config, directory })
    }

    fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    fn socket(&self, name: &str) -> String {
        format!("unix://{}", self.directory.path().join(name).display())
    }

    fn etcd_flags(&self) -> Vec<String> {
        let (clients, peers) = (self.socket("etcd.sock"), self.socket("peer.sock"));
        vec![
            "--name=local".into(),
            format!("--data-dir={}", self.directory.path().join("etcd").display()),
            format!("--listen-client-urls={clients}"),
            format!("--advertise-client-urls={clients}"),
            format!("--listen-peer-urls={peers}"),
            format!("--initial-advertise-peer-urls={peers}"),
            format!("--initial-cluster=local={peers}"),
            // The data live no longer than the directory; what a power cut would lose is lost anyway.
            "--unsafe-no-fsync".into(),
            "--log-level=warn".into(),
        ]
    }

    fn api_server_flags(&self) -> Vec<String> {
        let Credentials { serving_certificate, serving_key, service_account_key, service_account_public_key, token_file, .. } =
            &self.credentials;
        let file = |flag: &str, path: &Path| format!("--{flag}={}", path.display());
        let mut flags = vec![
            format!("--etcd-servers={}", self.socket("etcd.sock")),
            "--bind-address=127.0.0.1".into(),
            "--advertise-address=127.0.0.1".into(),
            format!("--secure-port={}", self.port),
            // Endpoints of the `kubernetes` Service may not be loopback addresses: without this it complains for ever.
            "--endpoint-reconciler-type=none".into(),
            "--service-cluster-ip-range=10.0.0.0/24".into(),
            "--authorization-mode=RBAC".into(),
            file("tls-cert-file", serving_certificate),
            file("tls-private-key-file", serving_key),
            file("token-auth-file", token_file),
            "--service-account-issuer=https://kubernetes.default.svc".into(),
            file("service-account-signing-key-file", service_account_key),
            file("service-account-key-file", service_account_public_key),
            "--profiling=false".into(),
        ];
        flags.extend(self.api_server_flags.iter().cloned());
        flags
    }

    fn controller_manager_flags(&self) -> Vec<String> {
        vec![
            format!("--kubeconfig={}", self.kubeconfig.display()),
            format!("--controllers={CONTROLLERS}"),
            "--leader-elect=false".into(),
            // It serves nothing.
            "--secure-port=0".into(),
        ]
    }
}

/// On a thread of its own: a build takes minutes, and a runtime that ends waits for its blocking threads.
async fn locate(progress: Arc<Progress>) -> Result<Assets> {
    let (send, receive) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        // Nobody listens any more if the start was given up.
        let _ = send.send(Places::from_env().assets(&progress));
    });
    receive.await.context("looking for the control plane's binaries panicked")?
}

fn free_port() -> Result<u16> {
    const TRIES: usize = 100;
    for _ in 0..TRIES {
        let port = rand::random_range(PORTS);
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return Ok(port);
        }
    }
    bail!("no free port on 127.0.0.1 between {} and {}", PORTS.start, PORTS.end)
}
