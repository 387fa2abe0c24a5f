//! What the host's own account needs for a kind, and the question to the API server whether it may.

use std::{sync::Arc, time::Duration};

use futures::{
    FutureExt,
    future::{BoxFuture, try_join_all},
};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec};
use kube::{Api, Client, api::PostParams};
use serde_json::{Value, json};
use tokio::{sync::Semaphore, time::timeout};

use crate::{
    claim::Claim,
    object::Kind,
    package::{Refusal, reason},
};

/// Questions under way at a time, of all plugins: each has a connection of its own.
const AT_ONCE: usize = 8;

/// The longest that an answer may take.
const ANSWER: Duration = Duration::from_secs(10);

/// The permissions that the host needs to serve a claim.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Needs {
    group: String,
    plural: String,
}

/// One permission: a verb on the kind or on its status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permission {
    verb: &'static str,
    status: bool,
}

/// The answer for some [`Needs`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// Everything is allowed.
    Granted,
    /// This is not, in that namespace or in the whole cluster; what comes after it may not be either.
    Denied(Permission, Option<String>),
}

impl Needs {
    /// Of a claim: to watch the kind, to read one object afresh, and to write its status, labels and annotations.
    pub fn of(claim: &Claim) -> Self {
        let Kind { group, plural, .. } = &claim.reconciles;
        Self::new(group.clone(), plural.clone())
    }

    /// Of a kind by group and plural name.
    pub fn new(group: String, plural: String) -> Self {
        Self { group, plural }
    }

    /// The rules of a role that grants all of this.
    pub fn rules(&self) -> Value {
        let verbs = |status: bool| self.permissions().filter(|permission| permission.status == status).map(|p| p.verb).collect::<Vec<_>>();
        json!([
            { "apiGroups": [self.group], "resources": [self.plural], "verbs": verbs(false) },
            { "apiGroups": [self.group], "resources": [format!("{}/status", self.plural)], "verbs": verbs(true) },
        ])
    }

    /// Each permission; of several that are missing, the first is named.
    pub fn permissions(&self) -> impl Iterator<Item = Permission> {
        let on_kind = |verb| Permission { verb, status: false };
        ["list", "watch", "get"].into_iter().map(on_kind).chain([Permission { verb: "patch", status: true }, on_kind("patch")])
    }

    /// The sentence for a permission that is missing, in a namespace or in the whole cluster.
    pub fn refusal(&self, missing: Permission, namespace: Option<&str>) -> Refusal {
        let resource = if missing.status { format!("{}/status", self.plural) } else { self.plural.clone() };
        let place = namespace.map(|namespace| format!(" in the namespace {namespace:?}")).unwrap_or_default();
        let message = format!(
            "The host's ServiceAccount may not {} {resource} in the group {:?}{place}: bind it to a ClusterRole with get, list, watch and patch on {} and \
             patch on {}/status (\"berth push\" makes one). It is asked for again every 10 s.",
            missing.verb, self.group, self.plural, self.plural
        );
        Refusal::new(reason::FORBIDDEN, message)
    }
}

/// Asks one time whether the needs are granted, beginning with the permission that was denied last, so that waiting for one costs one
/// request a time. An error, in a sentence, where there is no answer.
pub type Ask = Box<dyn Fn(Needs, Option<Permission>) -> BoxFuture<'static, Result<Access, String>> + Send + Sync>;

/// Asks by SelfSubjectAccessReview: for each of these namespaces, or with none for the whole cluster.
pub fn self_review(client: Client, namespaces: Vec<String>) -> Ask {
    let places: Vec<_> = if namespaces.is_empty() { vec![None] } else { namespaces.into_iter().map(Some).collect() };
    let turns = Arc::new(Semaphore::new(AT_ONCE));
    Box::new(move |needs, first| {
        let (client, places, turns) = (client.clone(), places.clone(), turns.clone());
        async move {
            let denied = async |permissions: Vec<Permission>| {
                let questions = permissions.iter().flat_map(|permission| places.iter().map(move |place| (*permission, place)));
                let asked = questions.map(async |(permission, place)| {
                    let _turn = turns.acquire().await.expect("it is never closed");
                    // Without the time that it waited for its turn.
                    let answer = timeout(ANSWER, allowed(&client, place.as_deref(), &needs, permission)).await;
                    let allowed = answer.unwrap_or_else(|_| Err(format!("no answer within {ANSWER:?}")))?;
                    Ok::<_, String>((!allowed).then(|| Access::Denied(permission, place.clone())))
                });
                Ok::<_, String>(try_join_all(asked).await?.into_iter().flatten().next())
            };
            if let Some(denied) = denied(first.into_iter().collect()).await? {
                return Ok(denied);
            }
            let others = needs.permissions().filter(|permission| Some(*permission) != first).collect();
            Ok(denied(others).await?.unwrap_or(Access::Granted))
        }
        .boxed()
    })
}

async fn allowed(client: &Client, namespace: Option<&str>, needs: &Needs, permission: Permission) -> Result<bool, String> {
    let attributes = ResourceAttributes {
        namespace: namespace.map(str::to_owned),
        verb: Some(permission.verb.to_owned()),
        group: Some(needs.group.clone()),
        resource: Some(needs.plural.clone()),
        subresource: permission.status.then(|| "status".to_owned()),
        ..ResourceAttributes::default()
    };
    let review = SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec { resource_attributes: Some(attributes), ..SelfSubjectAccessReviewSpec::default() },
        ..SelfSubjectAccessReview::default()
    };
    let answer = Api::<SelfSubjectAccessReview>::all(client.clone()).create(&PostParams::default(), &review).await;
    Ok(answer.map_err(|error| error.to_string())?.status.is_some_and(|status| status.allowed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_has_a_rule_for_the_kind_and_one_for_its_status() {
        let rules = Needs::new("g".into(), "ks".into()).rules();
        assert_eq!(rules[0], json!({ "apiGroups": ["g"], "resources": ["ks"], "verbs": ["list", "watch", "get", "patch"] }));
        assert_eq!(rules[1], json!({ "apiGroups": ["g"], "resources": ["ks/status"], "verbs": ["patch"] }));
    }

    #[test]
    fn the_sentence_names_verb_resource_and_what_to_add() {
        let needs = Needs::new("g".into(), "ks".into());
        let refusal = needs.refusal(Permission { verb: "patch", status: true }, None);
        assert!(refusal.message.contains("may not patch ks/status in the group \"g\""), "{refusal}");
        assert!(refusal.message.contains("ClusterRole with get, list, watch and patch on ks and patch on ks/status"), "{refusal}");
        let refusal = needs.refusal(Permission { verb: "list", status: false }, Some("there"));
        assert!(refusal.message.contains("may not list ks in the group \"g\" in the namespace \"there\": bind"), "{refusal}");
    }
}
