//! What deliveries and versions say by themselves: whether they pause, differ, can serve side by side, and whose their kind is.

use std::sync::Arc;

use super::Loaded;
use crate::{
    catalog::{Serving, Table},
    package::{CONFIG_FILE, Config},
    source::{Delivery, Kept},
};

/// Whether the plugin is paused by the `plugin.yaml` of a delivery; none where that cannot be read.
pub(super) fn paused(delivery: &Delivery) -> Option<bool> {
    let text = delivery.files.iter().find(|(name, _)| name == CONFIG_FILE);
    text.map_or(Some(false), |(_, text)| Config::parse(&text.read().ok()?).ok().map(|config| config.paused))
}

/// Whether a delivery has just the files that are kept, in whatever order.
pub(super) fn same_files(kept: &Kept, delivery: &Delivery) -> bool {
    kept.files.len() == delivery.files.len() && kept.files.iter().all(|file| delivery.files.contains(file))
}

/// Whether both can serve side by side, as they reconcile the same objects in the same version of their API, and differ in what they do.
pub(super) fn can_be_tried(good: &Loaded, loaded: &Loaded) -> bool {
    let unpaused = |config: &Config| Config { paused: false, ..config.clone() };
    let same = good.version.digest == loaded.version.digest && unpaused(&good.config) == unpaused(&loaded.config);
    good.version != loaded.version && good.claim.reconciles == loaded.claim.reconciles && !same
}

/// The older plugin that has the kind, if there is one: the table holds only what older ones serve.
pub(super) fn owner<'t>(loaded: &Loaded, table: &'t Table) -> Option<&'t str> {
    table.get(&loaded.claim.reconciles.group_kind()).map(|versions| versions.stable.name.as_str())
}

pub(super) fn taken(name: &str, loaded: &Loaded, table: &Table) -> bool {
    owner(loaded, table).is_some_and(|owner| owner != name)
}

pub(super) fn serving(name: &str, loaded: &Loaded, crd_uid: &Arc<str>) -> Arc<Serving> {
    Arc::new(Serving {
        name: name.to_owned(),
        version: loaded.version.clone(),
        claim: loaded.claim.clone(),
        pace: loaded.config.pace(),
        timeout: loaded.config.timeout,
        service_account: loaded.config.service_account.clone(),
        redrive: loaded.config.redrive,
        crd_uid: crd_uid.clone(),
        handler: loaded.handler.clone(),
    })
}
