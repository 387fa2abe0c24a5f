//! `berth run`: the flags of the host.

use std::{net::SocketAddr, path::PathBuf};

use clap::Args as ClapArgs;
use tokio_util::sync::CancellationToken;

use super::{cluster::ClusterArgs, span::Span};
use crate::{
    controller, host, kinds, lease,
    plugin::{
        Resolve,
        limits::{self, HostLimits},
    },
};

/// Flags of `berth run`.
#[derive(ClapArgs, Clone, Debug)]
#[command(after_long_help = after_help())]
pub struct Args {
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    host: HostArgs,
}

/// What `run` and `dev` have in common.
#[derive(ClapArgs, Clone, Debug)]
pub struct HostArgs {
    /// Watch only this namespace; may be given several times
    #[arg(long = "watch-namespace", value_name = "NAMESPACE")]
    pub watch_namespaces: Vec<String>,
    /// Namespace of the plugins' ConfigMaps and of the Lease
    #[arg(long, env = "POD_NAMESPACE", default_value = "berth-system", value_name = "NAMESPACE")]
    pub namespace: String,
    /// Also serve the plugins of this folder: `.wasm` files, each with its `NAME.yaml` beside it, or folders
    #[arg(long, value_name = "DIR")]
    pub plugin_dir: Option<PathBuf>,
    /// Send what plugins send to HOST:PORT to ADDR instead, as curl does; for development
    #[arg(long, value_name = "HOST:PORT=ADDR")]
    pub resolve: Vec<Resolve>,
    /// Where /livez, /readyz and /metrics are served
    #[arg(long, default_value = "0.0.0.0:8081", value_name = "ADDRESS")]
    pub admin_address: SocketAddr,
    /// Folder for compiled plugins; private to this user
    #[arg(long, env = "BERTH_CACHE_DIR", value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
    /// Name of this process in the Lease; no other may have it [default: the pod's or the machine's name with a random part]
    #[arg(long, value_name = "NAME")]
    pub identity: Option<String>,
    /// Name of the Lease
    #[arg(long, default_value = "berth", value_name = "NAME")]
    pub lease_name: String,
    /// How long a Lease is valid after a renewal
    #[arg(long, default_value_t = Span(lease::DURATION), value_name = "TIME")]
    pub lease_duration: Span,
    /// How long a renewal may take before leadership is given up
    #[arg(long, default_value_t = Span(lease::RENEW_DEADLINE), value_name = "TIME")]
    pub lease_renew_deadline: Span,
    /// How often the Lease is renewed, or tried for
    #[arg(long, default_value_t = Span(lease::RETRY), value_name = "TIME")]
    pub lease_retry: Span,
    /// How long before the Lease runs out every effect stops
    #[arg(long, default_value_t = Span(lease::MARGIN), value_name = "TIME")]
    pub lease_margin: Span,
    /// How often every object is looked at although nothing changed
    #[arg(long, default_value_t = Span(host::RESYNC), value_name = "TIME")]
    pub resync: Span,
    /// How long the API server is asked to keep a watch open
    #[arg(long, default_value_t = Span(host::WATCH_TIMEOUT), value_name = "TIME")]
    pub watch_timeout: Span,
    /// Deadline of each write to the API server
    #[arg(long, default_value_t = Span(host::WRITE_DEADLINE), value_name = "TIME")]
    pub write_deadline: Span,
    /// How long runs may go on after SIGTERM
    #[arg(long, default_value_t = Span(host::GRACE), value_name = "TIME")]
    pub grace: Span,
    /// What plugins may have at most.
    #[command(flatten)]
    pub limits: HostLimits,
}

impl Args {
    /// Runs until `shutdown`.
    pub async fn run(self, shutdown: CancellationToken) -> anyhow::Result<()> {
        let Self { cluster, host } = self;
        host::run(cluster.config().await?, host.settings()?, shutdown, |_| ()).await
    }
}

impl HostArgs {
    /// Checks the flags against each other.
    pub fn settings(self) -> anyhow::Result<host::Settings> {
        let Self {
            watch_namespaces,
            namespace,
            plugin_dir,
            resolve,
            admin_address,
            cache_dir,
            identity,
            lease_name,
            lease_duration,
            lease_renew_deadline,
            lease_retry,
            lease_margin,
            resync,
            watch_timeout,
            write_deadline,
            grace,
            limits,
        } = self;
        let identity = identity.unwrap_or_else(host::identity);
        let lease = lease::Settings {
            duration: lease_duration.0,
            renew_deadline: lease_renew_deadline.0,
            retry: lease_retry.0,
            margin: lease_margin.0,
            ..lease::Settings::new(&namespace, &lease_name, &identity)
        };
        Ok(host::Settings {
            namespace,
            identity,
            plugin_dir,
            limits,
            resolve,
            admin_address,
            cache_dir: match cache_dir {
                Some(directory) => directory,
                None => host::default_cache_dir()?,
            },
            lease,
            controller: controller::Settings {
                scope: kinds::Scope { namespaces: watch_namespaces, watch_timeout: watch_timeout.0 },
                resync: resync.0,
                write_deadline: write_deadline.0,
                grace: grace.0,
            },
        })
    }
}

fn after_help() -> String {
    let limits: String = limits::table().iter().map(|[name, value, raise]| format!("  {name:<28} {value:>6}  {raise}\n")).collect();
    format!(
        "Limits of every plugin, and what changes them, `keys` of plugin.yaml or flags:\n{limits}\n\
         Examples:\n  \
         berth run                                        in a pod, or with kubectl's configuration\n  \
         berth run --kubeconfig admin.yaml --watch-namespace shop\n  \
         berth run --plugin-dir ./plugins --resolve mail.demo:80=127.0.0.1:8025"
    )
}
