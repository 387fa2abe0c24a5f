//! Finds the kind that somebody names on the command line, as kubectl does.

use anyhow::{Context, bail};
use kube::{
    Client,
    api::ApiResource,
    discovery::{Discovery, Scope},
};

/// A kind, and whether its objects live in a namespace.
#[derive(Clone, Debug)]
pub struct Found {
    /// How it is addressed.
    pub resource: ApiResource,
    /// Whether its objects live in a namespace.
    pub namespaced: bool,
}

/// Finds a kind by its kind, plural or singular name, each with or without the group: `ReportJob`, `reportjobs`,
/// `reportjobs.batch.acme.io`.
///
/// # Errors
/// There is none, or there are several of that name in different groups.
pub async fn find(client: &Client, name: &str) -> anyhow::Result<Found> {
    // Groups of an aggregated API server that does not answer are left out; asked for one by one, they would be an error.
    let discovery = Discovery::new(client.clone()).run_aggregated().await.context("asking the API server which kinds it has")?;
    let wanted = name.to_lowercase();
    let mut found: Vec<Found> = Vec::new();
    for group in discovery.groups() {
        for (resource, capabilities) in group.recommended_resources() {
            let words = [resource.kind.to_lowercase(), resource.plural.clone()];
            if words.iter().any(|word| *word == wanted || format!("{word}.{}", resource.group) == wanted) {
                found.push(Found { resource, namespaced: capabilities.scope == Scope::Namespaced });
            }
        }
    }
    match &found[..] {
        [] => bail!("the cluster has no kind {name:?}"),
        [one] => Ok(one.clone()),
        several => {
            let names: Vec<_> = several.iter().map(|found| format!("{}.{}", found.resource.plural, found.resource.group)).collect();
            bail!("{name:?} is ambiguous: it may be {}", names.join(" or "))
        }
    }
}
