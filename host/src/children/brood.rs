//! The children of all objects of one kind: informers on them, and the writes that make them as they are wanted.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use http::{Method, StatusCode};
use kube::Client;
use serde_json::{Value, json};
use tokio::task::AbortHandle;

use super::{
    OnDrift, Owned, Settings,
    answer::{Hindrance, Unapplied, forbidden},
    desired::{Child, OWNER_KIND},
    family::{self, ChildId, Families, belongs, is_applied, is_owned, was_applied},
};
use crate::{
    account::{Account, Accounts, Actor, Unusable},
    claim::Claim,
    fence::Fence,
    object::{GroupKind, Kind, Object, ObjectKey},
    status::{Reply, WriteError, Writer},
    watch::{self, Change, Store, Target},
};

/// <https://kubernetes.io/docs/reference/using-api/server-side-apply/>; JSON is YAML.
const APPLY_PATCH: &str = "application/apply-patch+yaml";
/// What the API server takes as the name of a field manager.
const MANAGER_MAX: usize = 128;

/// The children of all objects of one kind, under one account.
pub struct Brood {
    owner: Kind,
    owned: Vec<Owned>,
    manager: String,
    client: Client,
    accounts: Arc<Accounts>,
    deadline: Duration,
    writers: Mutex<HashMap<Account, Writer>>,
    families: Arc<Mutex<Families>>,
    informers: Vec<Informer>,
    tasks: Vec<AbortHandle>,
}

/// An informer on the children of one kind, in one namespace or in all.
struct Informer {
    kind: Kind,
    actor: Actor,
    namespace: Option<String>,
    store: Arc<Store>,
}

/// On whose behalf children are written: a version of a plugin.
#[derive(Clone, Debug)]
pub struct Applicant<'a> {
    /// What it claims.
    pub claim: &'a Claim,
    /// As whom it acts.
    pub actor: Option<Actor>,
}

impl Drop for Brood {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Brood {
    /// Starts to watch the children of the objects of a kind; those of an account that may not be used, only once it may.
    pub(super) fn start(
        client: Client,
        accounts: Arc<Accounts>,
        settings: &Settings,
        owner: &Kind,
        owned: Vec<Owned>,
        on_drift: &OnDrift,
    ) -> Self {
        let mut brood = Self {
            manager: manager(&owner.group_kind()),
            owner: owner.clone(),
            client,
            accounts,
            deadline: settings.deadline,
            writers: Mutex::default(),
            families: Arc::default(),
            informers: Vec::new(),
            tasks: Vec::new(),
            owned: owned.clone(),
        };
        for Owned { kind, actor } in owned {
            let Some(actor) = actor else { continue };
            let (kind, actor) = (&kind, &actor);
            match &settings.namespaces[..] {
                names if !names.is_empty() && kind.namespaced => {
                    names.iter().for_each(|name| brood.watch(kind, Some(name), actor, settings.watch_timeout, on_drift));
                }
                _ => brood.watch(kind, None, actor, settings.watch_timeout, on_drift),
            }
        }
        brood
    }

    fn watch(&mut self, kind: &Kind, namespace: Option<&str>, actor: &Actor, watch_timeout: Duration, on_drift: &OnDrift) {
        let store = Arc::new(Store::default());
        let owner = self.owner.group_kind();
        let label_selector = Some(format!("{OWNER_KIND}={}", owner.mark()));
        let target = Target { path: kind.collection_path(namespace), label_selector, watch_timeout, page: watch::PAGE };
        let on = follow(owner, kind.group_kind(), self.families.clone(), on_drift.clone());
        let informer = inform(self.accounts.clone(), actor.clone(), self.client.clone(), target, store.clone(), on);
        self.tasks.push(tokio::spawn(informer).abort_handle());
        self.informers.push(Informer { kind: kind.clone(), actor: actor.clone(), namespace: namespace.map(str::to_owned), store });
    }

    /// Whether it is what a plugin for this kind that owns these needs.
    pub(super) fn is_for(&self, owner: &Kind, owned: &[Owned]) -> bool {
        self.owner == *owner && self.owned == owned
    }

    /// Makes the children of `owner` equal to `wanted`: what differs is applied, and what is not wanted any more is deleted. Returns how
    /// many requests changed something.
    pub async fn apply(&self, by: Applicant<'_>, owner: &Object, wanted: &[Child], fence: &Fence) -> Result<usize, Unapplied> {
        let owns = &by.claim.owns;
        if owns.is_empty() {
            return Ok(0);
        }
        let account = self.ready(&by)?;
        let (mut written, mut hindered) = (0, None);
        for child in wanted {
            if self.families().is_right(&owner.uid, child) {
                continue;
            }
            match self.bring_about(&account, owner, child, fence).await {
                Ok(wrote) => written += usize::from(wrote),
                // One that is in somebody's way keeps none of the others from being there.
                Err(Unapplied::Hindered(hindrance)) => hindered = hindered.or(Some(hindrance)),
                Err(error) => return Err(error),
            }
        }
        if let Some(hindrance) = hindered {
            return Err(hindrance.into());
        }
        let live = self.families().live(&owner.uid);
        let keep: BTreeSet<ChildId> = wanted.iter().map(|child| (child.kind.group_kind(), child.key.clone())).collect();
        for (id, object) in live.iter().filter(|(id, object)| !keep.contains(id) && is_owned(object, &owner.uid)) {
            // What another version owns is that one's to delete.
            let Some(kind) = owns.iter().find(|kind| kind.group_kind() == id.0) else { continue };
            if !object.deleting {
                self.delete(&account, kind, object, fence).await?;
                written += 1;
            }
            self.families().deleted(&owner.uid, id);
        }
        self.families().whole(owner, wanted);
        Ok(written)
    }

    /// What keeps the children from being watched, in a sentence; none while all watches work.
    pub fn trouble(&self) -> Option<String> {
        self.informers.iter().find_map(|Informer { kind, actor, store, .. }| {
            // Before the account may be used there is no watch, and the objects that want children say why.
            self.accounts.get(Some(actor)).ok()?;
            Some(format!("watching its {}: {}", kind.resource(), store.health().trouble()?))
        })
    }

    /// The run of this owner wants its children left as they are.
    pub fn leave(&self, owner: &str) {
        self.families().leave(owner);
    }

    /// Whether the children of this owner are not as they were when they were last made right.
    pub fn drifted(&self, owner: &str) -> bool {
        self.families().drifted(owner)
    }

    fn families(&self) -> MutexGuard<'_, Families> {
        self.families.lock().expect("no panic while the lock is held")
    }

    fn writer(&self, account: &Account) -> Writer {
        let mut writers = self.writers.lock().expect("no panic while the lock is held");
        writers.entry(account.clone()).or_insert_with(|| Writer::new(account.client(&self.client), self.deadline)).clone()
    }

    /// The account, once it may be used and everything that the claim owns is listed: nothing can be said of what is not known.
    fn ready(&self, by: &Applicant<'_>) -> Result<Account, Unapplied> {
        let account = self.usable(by.actor.as_ref())?;
        for kind in &by.claim.owns {
            let of_kind = || self.informers.iter().filter(|informer| informer.kind.group_kind() == kind.group_kind());
            if of_kind().next().is_none() {
                return Err(soon(format!("the {} are not watched yet", kind.resource())));
            }
            for Informer { actor, namespace, store, .. } in of_kind() {
                let health = store.health();
                match health.error {
                    // What cannot be watched any more is known as it was: drift would go unseen.
                    Some(error) if error.contains("is forbidden") => {
                        return Err(forbidden(&self.usable(Some(actor))?, "list", kind, namespace.as_deref(), &error).into());
                    }
                    _ if health.synced => {}
                    Some(error) => {
                        let sentence = format!("which {} there are is not known: {error}", kind.resource());
                        return Err(Hindrance::new("ChildrenUnknown", sentence).into());
                    }
                    None => return Err(soon(format!("the {} have not been listed yet", kind.resource()))),
                }
            }
        }
        Ok(account)
    }

    fn usable(&self, actor: Option<&Actor>) -> Result<Account, Unapplied> {
        self.accounts.get(actor).map_err(|why| match why {
            Unusable::Unknown(_) => soon(why.to_string()),
            why => Hindrance::new(why.reason(), why.to_string()).into(),
        })
    }

    /// Makes one child as it is wanted. Whether that took a write.
    async fn bring_about(&self, account: &Account, owner: &Object, child: &Child, fence: &Fence) -> Result<bool, Unapplied> {
        let id = (child.kind.group_kind(), child.key.clone());
        let live = self.families().live(&owner.uid).remove(&id);
        let live = match live {
            Some(live) => Some(live),
            // It may exist without being known, as it is somebody else's: applying would take it over, and delete it with the owner.
            None => self.read(account, child, fence).await?.map(Arc::new),
        };
        let Some(live) = live else { return self.create(account, owner, child, fence).await };
        if !belongs(&live, &owner.uid, child) {
            return Err(exists(child));
        }
        // What is being deleted is made anew once it is gone.
        if live.deleting || is_applied(&live, child) {
            self.families().keep(owner, child, &live);
            return Ok(false);
        }
        // A field that was this plugin's before is taken back; one that never was is not taken from whoever has it.
        self.patch(account, owner, child, was_applied(&live, child), fence).await
    }

    async fn read(&self, account: &Account, child: &Child, fence: &Fence) -> Result<Option<Object>, Unapplied> {
        let reply = self.writer(account).exchange(Method::GET, &child.kind.object_path(&child.key), None, fence).await?;
        match reply.status {
            status if status.is_success() => Ok(Some(reply.object(true)?)),
            StatusCode::NOT_FOUND => Ok(None),
            _ => Err(Unapplied::of(&reply, account, "get", &child.kind, &child.key)),
        }
    }

    /// Makes a child that was not there a moment ago. An apply takes over what somebody else has made since, as it cannot be told to
    /// create only; its answer says which it did.
    async fn create(&self, account: &Account, owner: &Object, child: &Child, fence: &Fence) -> Result<bool, Unapplied> {
        let reply = self.send(account, child, &child.document, false, fence).await?;
        if reply.status == StatusCode::CREATED {
            return self.applied(owner, child, &reply);
        }
        // Applying nothing gives back all that the manager owns alone: owner reference, labels and fields that they did not have.
        let ObjectKey { namespace, name } = &child.key;
        let mut nothing = json!({ "apiVersion": child.kind.api_version(), "kind": child.kind.kind, "metadata": { "name": **name } });
        if let Some(namespace) = namespace {
            nothing["metadata"]["namespace"] = (**namespace).into();
        }
        self.send(account, child, &nothing, false, fence).await?;
        tracing::warn!(child = %child, "somebody else made a child at the same time; it was given back");
        Err(exists(child))
    }

    async fn patch(&self, account: &Account, owner: &Object, child: &Child, force: bool, fence: &Fence) -> Result<bool, Unapplied> {
        let reply = self.send(account, child, &child.document, force, fence).await?;
        self.applied(owner, child, &reply)
    }

    async fn send(&self, account: &Account, child: &Child, document: &Value, force: bool, fence: &Fence) -> Result<Reply, Unapplied> {
        let path = format!("{}?fieldManager={}&force={force}", child.kind.object_path(&child.key), self.manager);
        let reply = self.writer(account).exchange(Method::PATCH, &path, Some((APPLY_PATCH, document)), fence).await?;
        if reply.status.is_success() { Ok(reply) } else { Err(Unapplied::of(&reply, account, "patch", &child.kind, &child.key)) }
    }

    fn applied(&self, owner: &Object, child: &Child, reply: &Reply) -> Result<bool, Unapplied> {
        let object = Arc::new(reply.object(false)?);
        tracing::debug!(child = %child, "child applied");
        self.families().keep(owner, child, &object);
        Ok(true)
    }

    async fn delete(&self, account: &Account, kind: &Kind, object: &Object, fence: &Fence) -> Result<(), Unapplied> {
        let key = &object.key;
        let options = json!({
            "apiVersion": "v1", "kind": "DeleteOptions", "preconditions": { "uid": *object.uid }, "propagationPolicy": "Background",
        });
        let reply =
            self.writer(account).exchange(Method::DELETE, &kind.object_path(key), Some(("application/json", &options)), fence).await?;
        match reply.status {
            // Gone already, or another one has its name.
            StatusCode::NOT_FOUND | StatusCode::CONFLICT => Ok(()),
            status if status.is_success() => {
                tracing::debug!(child = %key, kind = kind.kind, "child deleted");
                Ok(())
            }
            _ => Err(Unapplied::of(&reply, account, "delete", kind, key)),
        }
    }
}

fn exists(child: &Child) -> Unapplied {
    let sentence = format!("{child} exists already and does not belong to this object: delete it, or let the handler choose another name");
    Hindrance::new("ChildExists", sentence).into()
}

fn soon(cause: String) -> Unapplied {
    Unapplied::Write(WriteError::Later { after: Duration::from_secs(1), cause })
}

/// Takes changes of children into the families, and tells of drift.
fn follow(owner: GroupKind, kind: GroupKind, families: Arc<Mutex<Families>>, on_drift: OnDrift) -> impl FnMut(Change) + Send {
    move |change| {
        let lock = || families.lock().expect("no panic while the lock is held");
        let drifted = match &change {
            Change::Applied { old, new, .. } => {
                let moved = old.as_ref().filter(|old| family::owner_uid(old) != family::owner_uid(new));
                let missed = moved.and_then(|old| lock().gone(&kind, old));
                [missed, lock().seen(&kind, new)]
            }
            Change::Deleted(gone) => [lock().gone(&kind, gone), None],
            Change::Synced => [None, None],
        };
        for (key, uid) in drifted.iter().flatten() {
            on_drift(&owner, key, uid);
        }
    }
}

/// One informer, for as long as the account may be used.
async fn inform(
    accounts: Arc<Accounts>,
    actor: Actor,
    client: Client,
    target: Target,
    store: Arc<Store>,
    mut on: impl FnMut(Change) + Send,
) {
    loop {
        let Some(account) = accounts.until(&actor, true).await else { continue };
        let informer = watch::run(account.client(&client), target.clone(), store.clone(), &mut on);
        tokio::select! {
            never = informer => match never {},
            _ = accounts.until(&actor, false) => tracing::warn!(%account, path = target.path, "an account of a plugin may no longer be used"),
        }
    }
}

/// The name under which fields are owned: of the kind, which has one plugin, so that it stays when the plugin gets another name.
fn manager(kind: &GroupKind) -> String {
    let name = format!("berth:{kind}");
    if name.len() <= MANAGER_MAX { name } else { format!("berth:{}", kind.mark()) }
}
