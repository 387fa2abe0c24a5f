//! Children: the objects that exist because another one does, applied as the plugin's own ServiceAccount.
//!
//! # Expected flow
//! While a plugin serves that owns kinds, every replica has a [`Brood`] for it: informers on the children of its objects. A run's
//! children are judged by [`desired`]; [`Brood::apply`] makes the cluster equal to them. What somebody else does to a child afterwards
//! is told as drift, and leads to another run of its owner.
//!
//! # Guarantees
//! - Every request, the informers' too, is sent as the plugin's account; the host's own account needs no right to any child.
//! - A child is written only where it is not as it is wanted. It is never taken over from somebody else: what exists already without
//!   belonging to the owner is left alone, and so is a field that another field manager owns, unless it was this plugin's before.
//! - Only what has an owner reference to the very owner is ever deleted.
//! - To apply again what was applied is harmless, so an interrupted one is simply repeated.
//!
//! # Caveats
//! Where only some namespaces are watched, a child of a cluster-scoped owner in another namespace is applied, and its drift is not seen.

use std::{
    collections::HashMap,
    sync::{Arc, RwLock},
    time::Duration,
};

use kube::Client;

pub use self::{
    answer::{Hindrance, Unapplied},
    brood::{Applicant, Brood},
    desired::{Child, desired},
};
use crate::{
    account::{Accounts, Actor},
    object::{GroupKind, Kind, ObjectKey},
};

mod answer;
mod brood;
mod desired;
mod family;

/// A kind of children, and by whom its objects are watched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owned {
    /// The kind.
    pub kind: Kind,
    /// As whom they are watched; they are not without it.
    pub actor: Option<Actor>,
}

/// Hears of an owner (namespace, name, uid) whose children are not as they are to be.
pub type OnDrift = Arc<dyn Fn(&GroupKind, &ObjectKey, &str) + Send + Sync>;

/// How and where children are written and watched.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Namespaces to watch; empty for all.
    pub namespaces: Vec<String>,
    /// How long the server is asked to keep a watch open.
    pub watch_timeout: Duration,
    /// The deadline of each request.
    pub deadline: Duration,
}

/// The broods of all kinds that are served.
pub struct Children {
    client: Client,
    accounts: Arc<Accounts>,
    settings: Settings,
    broods: RwLock<HashMap<GroupKind, Arc<Brood>>>,
}

impl Children {
    /// None yet.
    pub fn new(client: Client, accounts: Arc<Accounts>, settings: Settings) -> Self {
        Self { client, accounts, settings, broods: RwLock::default() }
    }

    /// A plugin for `owner` that owns these kinds serves from now on. Informers go on where all is as it was. True where they are new, so
    /// that nothing is known of any child yet.
    pub fn serve(&self, owner: &Kind, owned: Vec<Owned>, on_drift: &OnDrift) -> bool {
        let kind = owner.group_kind();
        if self.of(&kind).is_some_and(|brood| brood.is_for(owner, &owned)) {
            return false;
        }
        let brood = Brood::start(self.client.clone(), self.accounts.clone(), &self.settings, owner, owned, on_drift);
        self.broods.write().expect("no panic while the lock is held").insert(kind, Arc::new(brood));
        true
    }

    /// The kind is no longer served.
    pub fn remove(&self, kind: &GroupKind) {
        self.broods.write().expect("no panic while the lock is held").remove(kind);
    }

    /// The brood of a kind that is served.
    pub fn of(&self, kind: &GroupKind) -> Option<Arc<Brood>> {
        self.broods.read().expect("no panic while the lock is held").get(kind).cloned()
    }
}
