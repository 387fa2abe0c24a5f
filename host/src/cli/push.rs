//! `berth push`: a component into a ConfigMap, with what it needs beside it, and the verdict of the host.

use std::{collections::BTreeMap, path::PathBuf, process::ExitCode, str::FromStr, sync::Arc, time::Duration};

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use clap::ValueEnum;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use tokio_util::sync::CancellationToken;

use self::{
    bundle::{Bundle, Edits},
    verdict::Verdict,
};
use super::{cluster::ClusterArgs, span::Span};
use crate::{
    claim::Claim,
    client,
    install::{Manifests, Mode},
    loader::access::Needs,
    package::{CONFIG_FILE, Ceilings, Encoding, HostPattern, MAX_COMPONENT, Refusal, reason},
    plugin::{Runtime, RuntimeConfig, limits::HostLimits},
};

mod bundle;
mod verdict;

/// The longest that one request of this verb may take.
const REQUEST: Duration = Duration::from_secs(10);

/// Put a plugin into a cluster and wait until the host serves or refuses it.
///
/// Applies the CustomResourceDefinitions, the permissions of the host for the plugin's kind and the ConfigMap, all server-side. The
/// component is opened and described here first, so that what cannot work is refused before anything is written. Ends with 0 if the
/// pushed version serves, and with 1 if it was refused or nothing was heard in time.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  berth push target/wasm32-wasip2/guest/email_request.wasm --crd crd.yaml \\
      --set gateway=http://mail.demo --allow-host http://mail.demo
  berth push report_job.wasm                     a new version, with the configuration that is there
  berth push report_job.wasm --config plugin.yaml --dry-run=print | less")]
pub struct Args {
    /// The component: *.wasm, *.wasm.gz or *.wasm.zst
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Name of the plugin [default: that of the file]
    #[arg(long)]
    name: Option<String>,
    /// Namespace of the host
    #[arg(long, short, default_value = "berth-system")]
    namespace: String,
    /// Apply these CustomResourceDefinitions too; can be repeated
    #[arg(long = "crd", value_name = "FILE")]
    crds: Vec<PathBuf>,
    /// Allow HTTP requests to scheme://host[:port], where host may be *.NAME; can be repeated
    #[arg(long = "allow-host", value_name = "URL")]
    allowed_hosts: Vec<HostPattern>,
    /// A setting of the plugin, as a text; can be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<Setting>,
    /// The plugin.yaml, which --set and --allow-host add to [default: the one that is in the cluster]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    cluster: ClusterArgs,
    /// ServiceAccount of the host, which gets the permissions for the plugin's kind
    #[arg(long, default_value = "berth", value_name = "NAME")]
    service_account: String,
    /// Leave the permissions of the host as they are
    #[arg(long)]
    no_rbac: bool,
    /// How long to wait for the host's verdict
    #[arg(long, default_value = "60s", value_name = "TIME")]
    wait: Span,
    /// Do not wait for the host's verdict
    #[arg(long, conflicts_with = "wait")]
    no_wait: bool,
    /// Change nothing: print what would be applied
    #[arg(long, value_enum, value_name = "HOW")]
    dry_run: Option<DryRun>,
}

/// How not to do it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DryRun {
    /// Print YAML to standard output, without a cluster
    Print,
}

/// `KEY=VALUE`
#[derive(Clone, Debug, PartialEq, Eq)]
struct Setting {
    key: String,
    value: String,
}

impl FromStr for Setting {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.split_once('=') {
            Some((key, value)) if !key.is_empty() => Ok(Self { key: key.to_owned(), value: value.to_owned() }),
            _ => Err("has to be KEY=VALUE"),
        }
    }
}

impl Args {
    /// Pushes, unless it is interrupted.
    pub async fn run(self, shutdown: CancellationToken) -> anyhow::Result<ExitCode> {
        tokio::select! {
            pushed = self.push() => pushed,
            () = shutdown.cancelled() => bail!("interrupted"),
        }
    }

    async fn push(self) -> anyhow::Result<ExitCode> {
        let client = match self.dry_run {
            None => Some(client::connect(self.cluster.config().await?).context("setting up the connection to the API server")?),
            Some(DryRun::Print) => None,
        };
        let name = self.name()?;
        let there = match &client {
            Some(client) => There::find(client, &self.namespace, &name).await?,
            None => There::default(),
        };
        let config = self.config_text(&there)?;
        let bundle = match Bundle::new(&name, &self.namespace, self.component_file()?, config) {
            Ok(bundle) => bundle,
            Err(refusal) => return Ok(refused(&name, &refusal)),
        };
        let definitions = self.definitions()?;
        let (needs, reads) = match self.describe(&bundle).await? {
            Ok(Some(claim)) => (vec![Needs::of(&claim)], claim.reads.clone()),
            Ok(None) => (needs_of(&definitions), Vec::new()),
            Err(refusal) => return Ok(refused(&name, &refusal)),
        };
        let mut manifests = definitions;
        if !self.no_rbac {
            manifests.extend(Manifests::of("the plugin's permissions", bundle.permissions(&needs, &reads, &self.service_account))?);
        }
        let Some(client) = client else {
            manifests.extend(Manifests::of("the plugin", [bundle.config_map()])?);
            print(&manifests)?;
            return Ok(ExitCode::SUCCESS);
        };
        for read in reads.iter().filter(|_| !self.no_rbac) {
            println!("{name} reads {}: the host's account may list and watch them in the whole cluster", read.kind.resource());
        }
        self.apply(&client, &bundle, manifests, &there).await?;
        if self.no_wait {
            return Ok(ExitCode::SUCCESS);
        }
        let version = There::find(&client, &self.namespace, &name).await?.version;
        Ok(match verdict::wait(&client, &bundle, &version, self.wait.0).await {
            Verdict::Serves(sentence) => {
                println!("{name} {} serves: {sentence}", bundle.digest());
                ExitCode::SUCCESS
            }
            Verdict::Refused(sentence) => {
                eprintln!("{name} {} was refused: {sentence}", bundle.digest());
                ExitCode::FAILURE
            }
            Verdict::Unheard(sentence) => {
                eprintln!("{name} {} is applied, but {sentence}", bundle.digest());
                ExitCode::FAILURE
            }
        })
    }

    /// The file's name without its suffix, as Kubernetes allows it.
    fn name(&self) -> anyhow::Result<String> {
        if let Some(name) = &self.name {
            return Ok(name.clone());
        }
        let (stem, _) = self.encoding()?;
        Ok(stem.to_lowercase().replace('_', "-"))
    }

    fn encoding(&self) -> anyhow::Result<(&str, Encoding)> {
        let file = self.file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        Encoding::of(file).with_context(|| format!("{} is named neither *.wasm nor *.wasm.gz nor *.wasm.zst", self.file.display()))
    }

    fn component_file(&self) -> anyhow::Result<(String, Bytes)> {
        use std::io::Read;
        self.encoding()?;
        let reading = || format!("reading {}", self.file.display());
        let mut bytes = Vec::new();
        let file = std::fs::File::open(&self.file).with_context(reading)?;
        file.take(MAX_COMPONENT as u64 + 1).read_to_end(&mut bytes).with_context(reading)?;
        let name = self.file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        Ok((name, bytes.into()))
    }

    /// The text of `plugin.yaml`: from the file or else from the cluster, with the flags added; none where there is nothing to say.
    fn config_text(&self, there: &There) -> anyhow::Result<Option<String>> {
        let base = match &self.config {
            Some(path) => Some(std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?),
            None => there.config.clone(),
        };
        let settings: BTreeMap<_, _> = self.settings.iter().map(|setting| (setting.key.clone(), setting.value.clone())).collect();
        Edits { settings, allowed_hosts: self.allowed_hosts.clone() }.of(base)
    }

    fn definitions(&self) -> anyhow::Result<Manifests> {
        let mut manifests = Manifests::default();
        for path in &self.crds {
            manifests.extend(Manifests::read(path)?);
        }
        for document in manifests.documents() {
            ensure!(document.kind() == "CustomResourceDefinition", "{document} is no CustomResourceDefinition, which --crd is for");
        }
        Ok(manifests)
    }

    /// The component's own claim, which says what the host needs. None where it cannot be compiled here for a reason of this
    /// machine's: then the definitions have to do.
    async fn describe(&self, bundle: &Bundle) -> anyhow::Result<Result<Option<Arc<Claim>>, Refusal>> {
        let cache = tempfile::tempdir().context("making a directory for the compiled component")?;
        let compiler = std::env::current_exe().context("finding the berth binary, which compiles plugins")?;
        // How much the host gives is for the host to say.
        let ceilings = Ceilings::highest();
        let runtime = Runtime::new(RuntimeConfig {
            limits: HostLimits { ceilings, ..HostLimits::default() },
            ..RuntimeConfig::new(compiler, cache.path().join("compiled"))
        })?;
        let described = match runtime.prepare(bundle.package()).await {
            Ok(prepared) => prepared.handler(bundle.package()).map(|_| Some(prepared.claim.clone())),
            Err(refusal) => Err(refusal),
        };
        match described {
            Err(refusal) if refusal.reason == reason::HOST_FAILURE && (self.no_rbac || !self.crds.is_empty()) => {
                eprintln!("The component cannot be described here: {}", refusal.message);
                Ok(Ok(None))
            }
            other => Ok(other),
        }
    }

    async fn apply(&self, client: &Client, bundle: &Bundle, mut manifests: Manifests, there: &There) -> anyhow::Result<()> {
        let plugin = Manifests::of("the plugin", [bundle.config_map()])?;
        if there.other_components.is_empty() {
            manifests.extend(plugin);
        }
        for applied in manifests.apply(client, Mode::Store).await? {
            let place = applied.namespace.map(|namespace| format!("{namespace}/")).unwrap_or_default();
            println!("applied {} {place}{}", applied.kind, applied.name);
        }
        if !there.other_components.is_empty() {
            // Server-side apply leaves what others have put there, and two components would be refused: one write swaps them.
            bundle.swap(client, &there.other_components, REQUEST).await?;
            println!("replaced {} in ConfigMap {}/{}", there.other_components.join(", "), self.namespace, bundle.name());
        }
        Ok(())
    }
}

/// What is in the cluster under the plugin's name.
#[derive(Debug, Default)]
struct There {
    version: String,
    config: Option<String>,
    /// Components under other names than [`bundle::COMPONENT`].
    other_components: Vec<String>,
}

impl There {
    async fn find(client: &Client, namespace: &str, name: &str) -> anyhow::Result<Self> {
        let api: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
        let found = tokio::time::timeout(REQUEST, api.get_opt(name)).await.context("the API server does not answer")?;
        let Some(map) = found.with_context(|| format!("reading the ConfigMap {namespace}/{name}"))? else { return Ok(Self::default()) };
        let labels = map.metadata.labels.unwrap_or_default();
        ensure!(
            labels.contains_key(crate::source::configmap::LABEL),
            "the ConfigMap {namespace}/{name} is there and is no plugin (it lacks the label {}): choose another --name",
            crate::source::configmap::LABEL
        );
        let mut data = map.data.unwrap_or_default();
        let config = data.remove(CONFIG_FILE);
        let keys = data.into_keys().chain(map.binary_data.unwrap_or_default().into_keys());
        let other_components = keys.filter(|key| key != bundle::COMPONENT && Encoding::of(key).is_some()).collect();
        Ok(Self { version: map.metadata.resource_version.unwrap_or_default(), config, other_components })
    }
}

/// The needs for every definition, labels included, for want of a claim.
fn needs_of(definitions: &Manifests) -> Vec<Needs> {
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let specs = definitions.documents().iter().map(|document| &document.object()["spec"]);
    specs.map(|spec| Needs::new(text(&spec["group"]), text(&spec["names"]["plural"]))).collect()
}

fn refused(name: &str, refusal: &Refusal) -> ExitCode {
    eprintln!("{name} is refused, and nothing was applied: {}", refusal.message);
    ExitCode::FAILURE
}

fn print(manifests: &Manifests) -> anyhow::Result<()> {
    for document in manifests.documents() {
        println!("---\n{}", serde_saphyr::to_string(document.object())?.trim_end());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str]) -> Result<Args, clap::Error> {
        use clap::Parser;

        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            args: Args,
        }
        Line::try_parse_from(std::iter::once("push").chain(arguments.iter().copied())).map(|line| line.args)
    }

    #[test]
    fn the_name_is_that_of_the_file_as_kubernetes_allows_it() {
        let name = |arguments: &[&str]| parse(arguments).expect("parses").name();
        assert_eq!(name(&["dir/Email_Request.wasm.zst"]).expect("a name"), "email-request");
        assert_eq!(name(&["x.wasm", "--name", "mail"]).expect("a name"), "mail");
        assert!(name(&["x.txt"]).expect_err("no component").to_string().contains("named neither *.wasm"));
    }

    #[test]
    fn flags_are_checked_before_anything_is_done() {
        for wrong in [
            &["x.wasm", "--allow-host", "http://a/path"][..],
            &["x.wasm", "--set", "novalue"],
            &["x.wasm", "--set", "=v"],
            &["x.wasm", "--wait", "60"],
            &["x.wasm", "--wait", "6s", "--no-wait"],
            &["x.wasm", "--dry-run=guess"],
            &[],
        ] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
        let setting = parse(&["x.wasm", "--set", "url=http://a?b=c"]).expect("parses").settings.remove(0);
        assert_eq!((setting.key.as_str(), setting.value.as_str()), ("url", "http://a?b=c"));
    }

    #[test]
    fn the_configuration_in_the_cluster_is_kept_unless_a_file_replaces_it() {
        let temporary = tempfile::tempdir().expect("folder");
        let path = temporary.path().join("c.yaml");
        std::fs::write(&path, "concurrency: 2\n").expect("writes");
        let there = There { config: Some("paused: true\n".into()), ..There::default() };
        let text = |arguments: &[&str]| parse(arguments).expect("parses").config_text(&there).expect("reads");
        assert_eq!(text(&["x.wasm"]).as_deref(), Some("paused: true\n"));
        assert_eq!(text(&["x.wasm", "--config", path.to_str().expect("UTF-8")]).as_deref(), Some("concurrency: 2\n"));
        let edited = text(&["x.wasm", "--set", "a=b"]).expect("a text");
        assert!(edited.contains("paused: true") && edited.contains("a: b"), "{edited}");
    }

    #[test]
    fn without_a_claim_the_definitions_say_which_kinds_the_host_needs() {
        let crd = "apiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\nmetadata: {name: ks.g}\nspec: {group: g, names: {plural: ks}}\n";
        let needs = needs_of(&Manifests::parse("crd.yaml", crd).expect("parses"));
        assert_eq!(needs, [Needs::new("g".into(), "ks".into())]);
    }

    #[test]
    fn crd_is_for_definitions_only() {
        let temporary = tempfile::tempdir().expect("folder");
        let path = temporary.path().join("other.yaml");
        std::fs::write(&path, "apiVersion: v1\nkind: Secret\nmetadata: {name: s}\n").expect("writes");
        let args = parse(&["x.wasm", "--crd", path.to_str().expect("UTF-8")]).expect("parses");
        assert!(args.definitions().expect_err("refused").to_string().contains("which --crd is for"));
    }
}
