//! The host put together: sources, loader, informers, controller, lease and admin, as one set of supervised tasks.
//!
//! # Expected flow
//! Every replica reads plugins, compiles them and keeps its informers warm; the one that holds the Lease reconciles. On shutdown the
//! controller finishes its runs, then the Lease is released, and last the admin face goes.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, bail};
use futures::FutureExt;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::mpsc;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use crate::{
    account::Accounts,
    admin::{self, Admin, Checks},
    authority::{self, Authority},
    children::{self, Children},
    client, controller,
    controller::{Controller, Means},
    events,
    keep::Keeper,
    lease,
    loader::{self, Loader, Standings, access},
    memory,
    metrics::Metrics,
    plugin::{Resolve, Runtime, RuntimeConfig, limits::HostLimits},
    report::Reporter,
    secrets,
    source::{self, Place, Shelf},
    watch::{self, Health, Store, Target},
};

/// How often every object is looked at although nothing changed.
pub const RESYNC: Duration = Duration::from_secs(600);
/// How long the API server is asked to keep a watch open; it would take up to an hour.
pub const WATCH_TIMEOUT: Duration = Duration::from_secs(240);
/// Deadline of each write. An API server that needs longer is in trouble, and the write is tried again.
pub const WRITE_DEADLINE: Duration = Duration::from_secs(10);
/// How long runs may go on after SIGTERM: within the 30 s that Kubernetes gives a pod.
pub const GRACE: Duration = Duration::from_secs(20);
/// How long the API server may be out of reach before the host says that it is not ready.
const OUT_OF_REACH: Duration = Duration::from_secs(10);
/// Definitions of a page of the list: those of large operators are a megabyte.
const CRD_PAGE: u32 = 20;
/// How long the last reports may take once the runs have ended.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// What `berth run` decided.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Namespace of the plugins' ConfigMaps, their `Plugin` objects and the Lease.
    pub namespace: String,
    /// Name of this replica.
    pub identity: String,
    /// A folder of plugins.
    pub plugin_dir: Option<PathBuf>,
    /// What plugins may have at most.
    pub limits: HostLimits,
    /// Names that lead elsewhere.
    pub resolve: Vec<Resolve>,
    /// Where the admin face listens.
    pub admin_address: SocketAddr,
    /// Where compiled plugins are kept.
    pub cache_dir: PathBuf,
    /// Leader election.
    pub lease: lease::Settings,
    /// The reconcile loop.
    pub controller: controller::Settings,
}

/// A name for this replica: the pod's, or else the machine's, made unique to the process, as a restarted container is another holder.
pub fn identity() -> String {
    let pod = std::env::var("POD_NAME").ok().filter(|name| !name.is_empty());
    let name = pod.unwrap_or_else(|| std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default());
    format!("{}_{:08x}", name.trim(), rand::random::<u32>())
}

/// Where compiled plugins are kept unless told otherwise: the user's cache directory.
pub fn default_cache_dir() -> anyhow::Result<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
    let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    let cache = cache.or_else(home).context("neither XDG_CACHE_HOME nor HOME is set: give --cache-dir DIR")?;
    Ok(cache.join("berth").join("compiled"))
}

/// Runs the host until `shutdown`, and then until everything has ended in order. `started` hears the address of the admin face.
pub async fn run(
    config: kube::Config,
    settings: Settings,
    shutdown: CancellationToken,
    started: impl FnOnce(SocketAddr),
) -> anyhow::Result<()> {
    let Settings { namespace, identity, plugin_dir, limits, resolve, admin_address, cache_dir, lease, controller } = settings;
    allow_files();
    let client = client::connect(config.clone()).context("setting up the connection to the API server")?;
    let metrics = Arc::new(Metrics::default());
    let listener = admin::bind(admin_address).await?;
    let compiler = std::env::current_exe().context("finding the berth binary, which compiles plugins")?;
    let shelf = Shelf::at(&cache_dir);
    let secrets = secrets::of_namespace(client.clone(), &namespace);
    let runtime = Runtime::new(RuntimeConfig { compiler, cache_dir, resolve, secrets, metrics: metrics.clone(), limits })?;

    let (lease_name, holder) = (lease.name.clone(), identity.clone());
    let (leadership, elector) = lease::start(config, lease)?;
    let election = elector.watch();
    let places = std::iter::once(Place::ConfigMap).chain(plugin_dir.is_some().then_some(Place::Directory));
    let ask = access::self_review(client.clone(), controller.scope.namespaces.clone());
    let loader = Loader::new(prepare(runtime), ask, places);
    let (catalog, standings) = (loader.catalog(), loader.standings());
    let (recorder, publishing) = events::recorder(client.clone(), identity);
    let watch_timeout = controller.scope.watch_timeout;
    let accounts = Accounts::new(&namespace);
    let authority = Authority::new(accounts.clone(), authority::review(client.clone(), &namespace));
    let children =
        children::Settings { namespaces: controller.scope.namespaces.clone(), watch_timeout, deadline: controller.write_deadline };
    let children = Children::new(client.clone(), accounts.clone(), children);
    let accounts = accounts.run(client.clone(), watch_timeout);
    let means = Means {
        client: client.clone(),
        catalog,
        leadership: leadership.clone(),
        metrics: metrics.clone(),
        recorder: recorder.clone(),
        authority,
        children,
    };
    let controller = Controller::new(means, controller);

    let (changes, deliveries) = mpsc::unbounded_channel();
    let plugins = Arc::new(Store::without_text());
    let configmaps = source::configmap::run(client.clone(), &namespace, watch_timeout, plugins.clone(), shelf.clone(), changes.clone());
    let directory = match plugin_dir {
        Some(directory) => source::directory::run(directory, shelf, changes).boxed(),
        None => std::future::pending().boxed(),
    };
    let (definitions_sent, definitions) = mpsc::unbounded_channel();
    let crds = Arc::new(Store::without_text());
    let crd_target = Target {
        path: "/apis/apiextensions.k8s.io/v1/customresourcedefinitions".into(),
        label_selector: None,
        watch_timeout,
        page: CRD_PAGE,
    };
    let crd_informer = watch::run(client.clone(), crd_target, crds, move |change| {
        // Without a loader the process is about to end.
        let _ = definitions_sent.send(change);
    });
    let keeper = Keeper { client: client.clone(), namespace: namespace.clone(), standings: standings.clone() }.run(leadership.clone());
    let kinds = controller.clone();
    let reporting = Reporter {
        client,
        namespace,
        standings: standings.clone(),
        live: Box::new(move |kind| kinds.live(kind)),
        lease: lease_name,
        identity: holder,
        recorder,
        metrics: metrics.clone(),
        watch_timeout,
    }
    .run(leadership);

    let admin_stop = CancellationToken::new();
    let checks = {
        let (election, plugins, standings) = (election.clone(), plugins.clone(), standings.clone());
        Arc::new(move || checks(&plugins.health(), &election.borrow(), &standings.borrow()))
    };
    started(listener.local_addr().context("the address of the admin face")?);
    let admin = Admin { metrics, controller: controller.clone(), checks };
    let admin = tokio::spawn(admin::serve(listener, admin, admin_stop.clone()));

    // Every object's turn wakes it: it runs where the turns do, and without waking all of the others.
    let reconciling = {
        let controller = controller.clone();
        AbortOnDropHandle::new(tokio::spawn(async move { controller.run(shutdown).await }))
    };
    tokio::select! {
        ended = reconciling => ended.context("the reconcile loop")?,
        () = publishing => bail!("the recorder of events has ended"),
        () = loader.run(deliveries, definitions) => bail!("the loader has ended"),
        () = reporting => bail!("the reporter has ended"),
        () = keeper => bail!("the keeper of stable versions has ended"),
        () = directory => bail!("the watch of the plugin folder has ended"),
        never = configmaps => match never {},
        never = crd_informer => match never {},
        never = accounts => match never {},
        never = memory::give_back() => match never {},
        () = gone(election) => bail!("the elector has ended"),
    }
    tracing::info!("every effect is done; releasing the lease");
    elector.release().await;
    admin_stop.cancel();
    // A scraper that keeps its connection open does not hold up the end.
    let _ = tokio::time::timeout(LAST_WORDS, admin).await;
    tracing::info!("stopped");
    Ok(())
}

/// As many open files as this process may have at most: each connection, watch and delivered plugin is one, and the usual limit of 1,024
/// is there for programs that cannot count further.
fn allow_files() {
    let most = getrlimit(Resource::Nofile).maximum;
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most }) {
        tracing::debug!(%error, "the limit of open files stays as it is");
    }
}

/// The runtime as the loader sees it.
fn prepare(runtime: Arc<Runtime>) -> loader::Prepare {
    Arc::new(move |package| {
        let runtime = runtime.clone();
        async move {
            let prepared = runtime.prepare(&package).await?;
            let handler = prepared.handler(&package)?;
            Ok(loader::Prepared { claim: prepared.claim.clone(), handler })
        }
        .boxed()
    })
}

async fn gone(mut election: tokio::sync::watch::Receiver<lease::Status>) {
    while election.changed().await.is_ok() {}
}

/// What `/readyz` asks. A standby is as ready as a leader; a plugin that is refused makes nobody unready.
fn checks(plugins: &Health, election: &lease::Status, standings: &Standings) -> Checks {
    let reach = match plugins {
        Health { error: Some(error), last_contact, .. } if last_contact.is_none_or(|at| at.elapsed() > OUT_OF_REACH) => Err(error.clone()),
        _ => Ok(()),
    };
    let read = if standings.synced { Ok(()) } else { Err("the plugins have not been listed yet".to_owned()) };
    let elected = match &election.trouble {
        Some(trouble) if trouble.since.elapsed() > OUT_OF_REACH => Err(trouble.message.clone()),
        _ => Ok(()),
    };
    vec![("API server", reach), ("plugins", read), ("lease", elected)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_host_is_unready_once_the_api_server_has_been_out_of_reach_for_a_while() {
        let health = Health { synced: true, last_contact: Some(tokio::time::Instant::now()), error: Some("401 Unauthorized".into()) };
        let standings = Standings { synced: true, ..Standings::default() };
        let reach = |health: &Health| checks(health, &lease::Status::default(), &standings)[0].1.clone();
        assert_eq!(reach(&health), Ok(()));
        tokio::time::advance(OUT_OF_REACH * 2).await;
        assert_eq!(reach(&health), Err("401 Unauthorized".into()));
        assert_eq!(reach(&Health { error: None, ..health }), Ok(()));
    }
}
