//! `berth retry`: has objects tried again that the host gave up on, or that wait out a backoff.

use std::process::ExitCode;

use anyhow::{Context, ensure};
use kube::{
    Api, ResourceExt,
    api::{DynamicObject, ListParams, Patch, PatchParams},
};
use serde_json::json;

use super::{cluster::ClusterArgs, kinds};
use crate::{
    client,
    controller::mark::{GAVE_UP, Mark, RETRY},
};

/// How many objects are read at once.
const PAGE: u32 = 500;

/// Have objects tried again: those that were given up on are re-opened, those that wait out a backoff run at once.
///
/// Sets the annotation berth.acme.io/retry, which the host takes away as it acts; `kubectl annotate` does the same. Whoever may patch
/// an object may have it retried. What is finished otherwise is left alone.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  berth retry reportjob/report-042
  berth retry reportjobs.batch.acme.io --all                    every one that was given up on, in this namespace
  berth retry emailrequest --all --all-namespaces")]
pub struct Args {
    /// KIND/NAME, or with --all just KIND: the kind or its plural, with or without its group
    #[arg(value_name = "KIND[/NAME]")]
    what: String,
    /// Every object of the kind that was given up on
    #[arg(long)]
    all: bool,
    /// Namespace of the object [default: that of the context]
    #[arg(long, short)]
    namespace: Option<String>,
    /// In all namespaces
    #[arg(long, short = 'A', requires = "all", conflicts_with = "namespace")]
    all_namespaces: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

impl Args {
    /// Marks the objects.
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        let Self { what, all, namespace, all_namespaces, cluster } = self;
        let (kind, name) = match what.split_once('/') {
            Some((kind, name)) => (kind, Some(name)),
            None => (&*what, None),
        };
        ensure!(name.is_some() != all, "name one object as KIND/NAME, or give --all with a KIND alone");
        let config = cluster.config().await?;
        let namespace = namespace.unwrap_or_else(|| config.default_namespace.clone());
        let client = client::connect(config).context("setting up the connection to the API server")?;
        let found = kinds::find(&client, kind).await?;
        let api = |namespace: &str| -> Api<DynamicObject> {
            match found.namespaced {
                true => Api::namespaced_with(client.clone(), namespace, &found.resource),
                false => Api::all_with(client.clone(), &found.resource),
            }
        };
        if let Some(name) = name {
            let object = api(&namespace).get(name).await.with_context(|| format!("reading {kind}/{name}"))?;
            ensure!(mark(&api(&namespace), name).await?, "{kind}/{name} is gone");
            match gave_up(&object) {
                Some(cause) => println!("{kind}/{name} is tried again; it had been given up on: {cause}"),
                None => println!("{kind}/{name} runs at once if it waits out a backoff; nobody has given up on it"),
            }
            return Ok(ExitCode::SUCCESS);
        }
        let listed = match all_namespaces || !found.namespaced {
            true => Api::all_with(client.clone(), &found.resource),
            false => api(&namespace),
        };
        let objects = given_up(&listed).await.with_context(|| format!("listing {kind}"))?;
        let mut marked = 0;
        for object in &objects {
            let (name, namespace) = (object.name_any(), object.namespace().unwrap_or_default());
            let place = if namespace.is_empty() { name.clone() } else { format!("{namespace}/{name}") };
            if mark(&api(&namespace), &name).await? {
                marked += 1;
                println!("{place} is tried again; it had been given up on: {}", gave_up(object).unwrap_or_default());
            } else {
                println!("{place} is gone");
            }
        }
        println!("{marked} objects");
        Ok(ExitCode::SUCCESS)
    }
}

/// Whether the object was still there to be marked.
async fn mark(api: &Api<DynamicObject>, name: &str) -> anyhow::Result<bool> {
    let now = jiff::Timestamp::now().to_string();
    let patch = json!({ "metadata": { "annotations": { RETRY: now } } });
    match api.patch_metadata(name, &PatchParams::default(), &Patch::Merge(patch)).await {
        Err(kube::Error::Api(answer)) if answer.code == 404 => Ok(false),
        answer => answer.map(|_| true).with_context(|| format!("annotating {name}")),
    }
}

async fn given_up(api: &Api<DynamicObject>) -> kube::Result<Vec<DynamicObject>> {
    let (mut found, mut page) = (Vec::new(), ListParams::default().limit(PAGE));
    loop {
        let list = api.list(&page).await?;
        let more = list.metadata.continue_.clone().filter(|more| !more.is_empty());
        found.extend(list.items.into_iter().filter(|object| gave_up(object).is_some()));
        match more {
            Some(more) => page = ListParams::default().limit(PAGE).continue_token(&more),
            None => return Ok(found),
        }
    }
}

/// Why the host gave up on the object as it is now, if it did.
fn gave_up(object: &DynamicObject) -> Option<String> {
    let mark: Mark = serde_json::from_str(object.annotations().get(GAVE_UP)?).ok()?;
    let metadata = &object.metadata;
    mark.is_of(metadata.uid.as_deref()?, metadata.generation?).then_some(mark.cause)
}
