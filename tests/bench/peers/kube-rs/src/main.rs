//! The handlers of Berth's plugins as an operator of kube-rs. README.md beside this folder has the environment variables.

mod backoff;
mod counts;
mod email;
mod report;
mod ring;

use std::{env, fmt::Debug, net::SocketAddr, str::FromStr, sync::Arc, time::Duration};

use anyhow::Context as _;
use futures::{StreamExt, TryStreamExt, future::join_all};
use kube::{
    Api, Client, Resource,
    runtime::{
        WatchStreamExt,
        controller::{self, Action, Controller},
        reflector, watcher,
    },
};
use serde::de::DeserializeOwned;
use tokio::task::JoinHandle;

use crate::{backoff::Backoff, counts::Counts};

/// What the reconcile functions share.
struct Context {
    client: Client,
    http: reqwest::Client,
    /// Where the mail gateway is, or the exporter.
    backend: String,
    /// From this nonce on, none is passed on.
    ring_last: i64,
    resync: Duration,
    backoff: Backoff,
    counts: Arc<Counts>,
}

/// Why a reconcile has to be repeated.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Kube(#[from] kube::Error),
    #[error("{0}")]
    Http(#[from] reqwest::Error),
    #[error("{url} answered {status}")]
    Refused { url: reqwest::Url, status: reqwest::StatusCode },
    #[error("the backend's address is malformed")]
    Address,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stderr).init();
    let kinds = list("KINDS")?;
    let concurrency = parsed("CONCURRENCY", Some(16))?;
    let resync = Duration::from_secs(parsed("RESYNC_SECONDS", Some(600))?);
    let client = Client::try_default().await?;
    let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(30)).build()?;
    let rings = if kinds.iter().any(|kind| kind == "ring") { list("RING_NAMESPACES")? } else { Vec::new() };
    let counts = Arc::new(Counts::new(kinds.iter().filter(|kind| *kind != "ring").count() + rings.len()));
    counts::serve(parsed("COUNT_ADDRESS", None::<SocketAddr>)?, counts.clone()).await?;

    let context = |backend: String, ring_last| {
        let (client, http, counts) = (client.clone(), http.clone(), counts.clone());
        Arc::new(Context { client, http, backend, ring_last, resync, backoff: Backoff::default(), counts })
    };
    let mut controllers = Vec::new();
    for kind in &kinds {
        match kind.as_str() {
            "email" => {
                let mails = Api::namespaced(client.clone(), &required("WATCH_NAMESPACE")?);
                controllers.push(start(mails, concurrency, context(required("GATEWAY")?, 0), email::reconcile));
            }
            "report" => {
                let jobs = Api::namespaced(client.clone(), &required("WATCH_NAMESPACE")?);
                controllers.push(start(jobs, concurrency, context(required("EXPORTER")?, 0), report::reconcile));
            }
            "ring" => {
                let last = parsed("RING_LAST", None)?;
                for namespace in &rings {
                    let rings = Api::namespaced(client.clone(), namespace);
                    controllers.push(start(rings, concurrency, context(String::new(), last), ring::reconcile));
                }
            }
            other => anyhow::bail!("KINDS: there is no {other:?}"),
        }
    }
    join_all(controllers).await.into_iter().collect::<Result<(), _>>().context("a controller ended")
}

/// Runs a controller until the process is told to end.
fn start<K, Run>(objects: Api<K>, concurrency: u16, context: Arc<Context>, reconcile: fn(Arc<K>, Arc<Context>) -> Run) -> JoinHandle<()>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
    Run: Future<Output = Result<Action, Error>> + Send + 'static,
{
    let counts = context.counts.clone();
    // As `Controller::new` has it, but with an ear for the end of the first list: the store wakes only one who waits for it, the controller.
    let (store, writer) = reflector::store();
    let mut listed = false;
    let events = reflector::reflector(writer, watcher(objects, watcher::Config::default())).inspect_ok(move |event| {
        if matches!(event, watcher::Event::InitDone) && !std::mem::replace(&mut listed, true) {
            counts.synced();
        }
    });
    let controller = Controller::for_stream(events.applied_objects(), store)
        .with_config(controller::Config::default().concurrency(concurrency))
        .shutdown_on_signal();
    let counted = move |object: Arc<K>, context: Arc<Context>| {
        context.counts.reconcile();
        let run = reconcile(object.clone(), context.clone());
        async move {
            // A failure that wrote to the status comes back at once as an event: it still has to wait.
            if let Some(left) = context.backoff.left(object.meta()) {
                return Ok(Action::requeue(left));
            }
            let action = run.await?;
            context.backoff.forget(object.meta().uid.as_deref());
            Ok::<_, Error>(action)
        }
    };
    let failed = |object: Arc<K>, error: &Error, context: Arc<Context>| {
        context.counts.error();
        let wait = context.backoff.failed(object.meta());
        tracing::warn!(namespace = object.meta().namespace, name = object.meta().name, ?wait, "{error}");
        Action::requeue(wait)
    };
    let gone = context.clone();
    let run = controller.run(counted, failed, context).for_each(move |result| {
        match result {
            Ok(_) | Err(controller::Error::ReconcilerFailed(..)) => {}
            Err(controller::Error::ObjectNotFound(object)) => gone.backoff.forget(object.extra.uid.as_deref()),
            Err(error) => tracing::warn!("{error}"),
        }
        std::future::ready(())
    });
    tokio::spawn(run)
}

/// The key of the object at a backend: the same for every run, and for no other object.
fn idempotency_key<K: Resource<DynamicType = ()>>(object: &K) -> String {
    let meta = object.meta();
    let [namespace, name, uid] = [&meta.namespace, &meta.name, &meta.uid].map(|part| part.as_deref().unwrap_or_default());
    format!("{}.{}/{namespace}/{name}/{uid}", K::plural(&()), K::group(&()))
}

fn required(name: &str) -> anyhow::Result<String> {
    env::var(name).with_context(|| format!("{name} is not set"))
}

fn list(name: &str) -> anyhow::Result<Vec<String>> {
    Ok(required(name)?.split(',').map(str::trim).filter(|entry| !entry.is_empty()).map(str::to_owned).collect())
}

fn parsed<T: FromStr<Err: std::error::Error + Send + Sync + 'static>>(name: &str, default: Option<T>) -> anyhow::Result<T> {
    match (env::var(name), default) {
        (Err(_), Some(default)) => Ok(default),
        (value, _) => value.with_context(|| format!("{name} is not set"))?.parse().with_context(|| name.to_owned()),
    }
}
