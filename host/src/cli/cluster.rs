//! Which cluster a verb talks to.

use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use kube::config::{KubeConfigOptions, Kubeconfig};

/// Where the cluster is. Without any of these: the pod's own cluster, or else what kubectl would use.
#[derive(Args, Clone, Debug, Default)]
pub struct ClusterArgs {
    /// Kubeconfig file
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig
    #[arg(long, value_name = "NAME")]
    pub context: Option<String>,
}

impl ClusterArgs {
    /// Reads the configuration.
    pub async fn config(&self) -> anyhow::Result<kube::Config> {
        let options = KubeConfigOptions { context: self.context.clone(), ..KubeConfigOptions::default() };
        match (&self.kubeconfig, &self.context) {
            (Some(file), _) => {
                let kubeconfig = Kubeconfig::read_from(file).with_context(|| format!("reading {}", file.display()))?;
                kube::Config::from_custom_kubeconfig(kubeconfig, &options).await.with_context(|| format!("using {}", file.display()))
            }
            (None, Some(context)) => kube::Config::from_kubeconfig(&options).await.with_context(|| format!("using context {context}")),
            (None, None) => kube::Config::infer().await.context(
                "no cluster: this is no pod, and there is no kubeconfig; give --kubeconfig FILE, or try `berth dev` for a local cluster",
            ),
        }
    }
}
