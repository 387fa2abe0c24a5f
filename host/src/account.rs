//! The ServiceAccounts that plugins act as: which may be impersonated now, and a client that does.
//!
//! # Expected flow
//! Every replica watches the ServiceAccounts of the host's own namespace that carry the label [`LABEL`]. Whoever acts for a plugin asks
//! [`Accounts::get`] each time, so that a label that is taken away counts at once.
//!
//! # Guarantees
//! An account without the label, of another namespace, or the host's own is never impersonated, and none for a plugin that its annotation
//! [`PLUGINS`] does not name: who may write a plugin's ConfigMap gains nothing by naming another plugin's account. All this alone gives
//! nothing: the API server also asks whether the host's account may impersonate this one by name, and then what this one may do.

use std::{
    convert::Infallible,
    fmt,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};

use http::{HeaderValue, Request, Response};
use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use kube::{Api, Client, api::PostParams, client::Body};
use tokio::sync::watch;
use tower_service::Service;

use crate::{
    backoff,
    object::{Object, ObjectKey, annotation},
    watch::{self as informer, Store, Target},
};

/// A ServiceAccount with this label set to `true` may be impersonated by the host.
pub const LABEL: &str = "berth.acme.io/impersonate";
/// Annotation of a ServiceAccount: the plugins that may act as it, separated by commas.
pub const PLUGINS: &str = "berth.acme.io/plugins";
/// The longest that the question for the host's own account may take.
const REVIEW: Duration = Duration::from_secs(10);
/// When it is asked again after a failure, at first and at last.
const REVIEW_AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(25));

/// A plugin, and the name of the account that it wants to act as.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Actor {
    /// Name of the plugin.
    pub plugin: String,
    /// Name of the account.
    pub account: String,
}

/// The accounts of one namespace. One for the process, shared.
#[derive(Debug)]
pub struct Accounts {
    namespace: String,
    labelled: Arc<Store>,
    own: Mutex<Own>,
    changes: watch::Sender<u64>,
}

/// What is known of the host's own account.
#[derive(Debug)]
enum Own {
    Unknown(String),
    Known(String),
}

/// An account that may be impersonated, as of the moment when it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Account {
    namespace: String,
    name: String,
}

/// Why a plugin cannot act as the account that it names, in a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// `plugin.yaml` names none.
    #[error("plugin.yaml names no `serviceAccountName`, so it may neither read nor write other objects")]
    Unnamed,
    /// It is not there, or is not meant for this.
    #[error("there is no ServiceAccount {1}/{0} with the label {LABEL}: \"true\": create it, or label it if plugins may act as it")]
    Unlabelled(String, String),
    /// It is another plugin's.
    #[error(
        "the ServiceAccount {1} is not for the plugin {0}: add {0} to its annotation {PLUGINS} (names of plugins, separated by commas) if \
         this plugin may act as it"
    )]
    NotFor(String, String),
    /// It is the host's own.
    #[error("the ServiceAccount {0} is the host's own, and no plugin may act as the host: name another one in plugin.yaml")]
    Own(String),
    /// The host does not know enough yet.
    #[error("the host does not know yet {0}")]
    Unknown(String),
}

impl Unusable {
    /// A word for the reason of an Event.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Unnamed => "AccountUnnamed",
            Self::Unlabelled(..) => "AccountUnlabelled",
            Self::NotFor(..) => "AccountOfAnother",
            Self::Own(_) => "AccountOfHost",
            Self::Unknown(_) => "AccountUnknown",
        }
    }
}

impl Accounts {
    /// None yet.
    pub fn new(namespace: &str) -> Arc<Self> {
        Arc::new(Self {
            namespace: namespace.to_owned(),
            labelled: Arc::default(),
            own: Mutex::new(Own::Unknown("which account it is itself".into())),
            changes: watch::Sender::new(0),
        })
    }

    /// Keeps up with the cluster until it is dropped.
    pub async fn run(self: Arc<Self>, client: Client, watch_timeout: Duration) -> Infallible {
        let path = format!("/api/v1/namespaces/{}/serviceaccounts", self.namespace);
        let target = Target { path, label_selector: Some(format!("{LABEL}=true")), watch_timeout, page: informer::PAGE };
        let accounts = self.clone();
        let following = informer::run(client.clone(), target, self.labelled.clone(), move |_| accounts.changed());
        let ((), never) = tokio::join!(self.know_own(client), following);
        never
    }

    /// Asks who the host is: outside of a cluster nothing else says it.
    async fn know_own(&self, client: Client) {
        let reviews = Api::<SelfSubjectReview>::all(client);
        let mut warned = None;
        for failures in 1.. {
            let asked = tokio::time::timeout(REVIEW, reviews.create(&PostParams::default(), &SelfSubjectReview::default())).await;
            let user = asked.map_err(|_| format!("no answer within {REVIEW:?}")).and_then(|answer| {
                let review = answer.map_err(|error| error.to_string())?;
                review.status.and_then(|status| status.user_info?.username).ok_or_else(|| "the answer names no user".to_owned())
            });
            let (own, known) = match user {
                Ok(user) => (Own::Known(user), true),
                Err(error) => {
                    if warned.as_ref() != Some(&error) {
                        tracing::warn!(error, "the host's own account could not be asked for");
                        warned = Some(error.clone());
                    }
                    (Own::Unknown(format!("which account it is itself: {error}")), false)
                }
            };
            *self.own.lock().expect("no panic while the lock is held") = own;
            self.changed();
            if known {
                return;
            }
            tokio::time::sleep(backoff::delay(REVIEW_AGAIN.0, REVIEW_AGAIN.1, failures, rand::random())).await;
        }
    }

    fn changed(&self) {
        self.changes.send_modify(|number| *number += 1);
    }

    /// The account, if this plugin may act as it now.
    ///
    /// # Errors
    /// A sentence that says what to do.
    pub fn get(&self, actor: Option<&Actor>) -> Result<Account, Unusable> {
        let Actor { plugin, account } = actor.ok_or(Unusable::Unnamed)?;
        let account = Account { namespace: self.namespace.clone(), name: account.clone() };
        match &*self.own.lock().expect("no panic while the lock is held") {
            Own::Known(user) if *user == account.user() => return Err(Unusable::Own(account.to_string())),
            Own::Known(_) => {}
            Own::Unknown(what) => return Err(Unusable::Unknown(what.clone())),
        }
        let labelled = self.labelled.get(&ObjectKey::new(Some(&self.namespace), &account.name)).filter(|object| !object.deleting);
        if let Some(object) = labelled {
            return if names(&object, plugin) { Ok(account) } else { Err(Unusable::NotFor(plugin.clone(), account.to_string())) };
        }
        let health = self.labelled.health();
        Err(match health.trouble().filter(|_| !health.synced) {
            Some(trouble) => Unusable::Unknown(format!("the ServiceAccounts of {}: {trouble}", self.namespace)),
            None => Unusable::Unlabelled(account.name, account.namespace),
        })
    }

    /// Waits until the account is as `usable` says, and returns it where that is so.
    pub async fn until(&self, actor: &Actor, usable: bool) -> Option<Account> {
        let mut changes = self.changes.subscribe();
        loop {
            changes.borrow_and_update();
            let account = self.get(Some(actor)).ok();
            if account.is_some() == usable {
                return account;
            }
            // The sender lives in `self`.
            changes.changed().await.expect("the sender outlives this call");
        }
    }
}

/// Whether an account is meant for a plugin.
fn names(account: &Object, plugin: &str) -> bool {
    let value = account.value();
    let plugins = annotation(&value, PLUGINS).unwrap_or_default();
    plugins.split(',').any(|name| name.trim() == plugin)
}

impl Account {
    /// Its name within its namespace.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The user's name for the API server.
    pub fn user(&self) -> String {
        format!("system:serviceaccount:{}:{}", self.namespace, self.name)
    }

    /// A client that acts as this account, over the connections of `client`. The API server adds the groups of ServiceAccounts by
    /// itself, so the host needs no right to impersonate groups.
    pub fn client(&self, client: &Client) -> Client {
        let user = HeaderValue::from_str(&self.user()).expect("names of namespaces and accounts are visible ASCII");
        Client::new(Impersonate { client: client.clone(), user }, self.namespace.clone())
    }
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Sends each request as another user.
#[derive(Clone)]
struct Impersonate {
    client: Client,
    user: HeaderValue,
}

impl Service<Request<Body>> for Impersonate {
    type Response = Response<Body>;
    type Error = kube::Error;
    type Future = Pin<Box<dyn Future<Output = kube::Result<Response<Body>>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<kube::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        request.headers_mut().insert("Impersonate-User", self.user.clone());
        let client = self.client.clone();
        Box::pin(async move { client.send(request).await })
    }
}

#[cfg(test)]
impl Actor {
    /// For tests: the plugin `p`.
    pub(crate) fn p(account: &str) -> Self {
        Self { plugin: "p".into(), account: account.into() }
    }
}

#[cfg(test)]
impl Accounts {
    /// For tests: the host is `own`, and these accounts are labelled and meant for the plugin `p`.
    pub(crate) fn fixed(namespace: &str, own: &str, labelled: &[&str]) -> Arc<Self> {
        let accounts = Self::new(namespace);
        *accounts.own.lock().expect("new") = Own::Known(own.to_owned());
        for name in labelled {
            accounts.labelled.insert(account(namespace, name, "p"));
        }
        accounts.labelled.set_synced();
        accounts
    }
}

#[cfg(test)]
fn account(namespace: &str, name: &str, plugins: &str) -> Object {
    let annotations = serde_json::json!({ PLUGINS: plugins });
    let metadata =
        serde_json::json!({"name": name, "namespace": namespace, "uid": name, "resourceVersion": "1", "annotations": annotations});
    Object::parse(&serde_json::json!({ "metadata": metadata }).to_string()).expect("parses")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_is_used_by_the_plugins_that_it_names_alone() {
        let accounts = Accounts::fixed("sys", "admin", &[]);
        accounts.labelled.insert(account("sys", "shared", "p, website"));
        accounts.labelled.insert(account("sys", "nobodys", ""));
        let get = |plugin: &str, account: &str| accounts.get(Some(&Actor { plugin: plugin.into(), account: account.into() }));
        assert!(get("p", "shared").is_ok() && get("website", "shared").is_ok());
        for (plugin, account) in [("web", "shared"), ("p", "nobodys"), ("", "nobodys2")] {
            assert!(get(plugin, account).is_err(), "{plugin} as {account}");
        }
        let sentence = get("web", "shared").expect_err("refused").to_string();
        assert!(sentence.contains("add web to its annotation berth.acme.io/plugins"), "{sentence}");
    }

    #[test]
    fn only_a_labelled_account_that_is_not_the_hosts_own_is_used() {
        let accounts = Accounts::fixed("sys", "system:serviceaccount:sys:berth", &["mailer", "berth"]);
        assert_eq!(accounts.get(Some(&Actor::p("mailer"))).map(|account| account.user()), Ok("system:serviceaccount:sys:mailer".into()));
        let sentence = |name: Option<&str>| accounts.get(name.map(Actor::p).as_ref()).expect_err("refused").to_string();
        assert!(sentence(Some("berth")).contains("host's own"));
        assert!(
            sentence(Some("other")).contains("sys/other with the label berth.acme.io/impersonate: \"true\""),
            "{}",
            sentence(Some("other"))
        );
        assert!(sentence(None).contains("serviceAccountName"));
    }

    #[test]
    fn before_the_host_knows_itself_nobody_is_impersonated() {
        let accounts = Accounts::new("sys");
        assert!(matches!(accounts.get(Some(&Actor::p("mailer"))), Err(Unusable::Unknown(_))));
    }

    #[test]
    fn an_account_outside_of_the_cluster_is_nobodys_own() {
        let accounts = Accounts::fixed("sys", "kubernetes-admin", &["berth"]);
        assert!(accounts.get(Some(&Actor::p("berth"))).is_ok());
    }

    #[tokio::test]
    async fn who_waits_hears_of_a_change() {
        let accounts = Accounts::fixed("sys", "admin", &[]);
        let waiting = tokio::spawn({
            let accounts = accounts.clone();
            async move { accounts.until(&Actor::p("mailer"), true).await }
        });
        tokio::task::yield_now().await;
        accounts.labelled.insert(account("sys", "mailer", "p"));
        accounts.changed();
        assert!(waiting.await.expect("no panic").is_some());
    }
}
