//! What the API server's answer about a child means, in a sentence that says what to do.

use http::StatusCode;
use serde_json::Value;

use crate::{
    account::Account,
    object::{Kind, ObjectKey},
    status::{MESSAGE_MAX, Reply, WriteError},
    text::cut,
};

/// Why the children are not as a run wants them.
#[derive(Debug, thiserror::Error)]
pub enum Unapplied {
    /// The API server will never take it: the handler's failure.
    #[error("{0}")]
    Refused(String),
    /// A grant is missing, or somebody else is in the way. A person has to do something, and then it goes on by itself.
    #[error("{0}")]
    Hindered(Hindrance),
    /// The API server cannot take it now, or the lease is in doubt.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// What a person has to do something about.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{sentence}")]
pub struct Hindrance {
    /// The reason of the Event. The Events API folds what has one reason into the first that had it, so each cause has its own.
    pub reason: &'static str,
    /// What is wrong, and what to do.
    pub sentence: String,
}

impl Hindrance {
    pub(super) fn new(reason: &'static str, sentence: impl Into<String>) -> Self {
        Self { reason, sentence: sentence.into() }
    }
}

impl From<Hindrance> for Unapplied {
    fn from(hindrance: Hindrance) -> Self {
        Self::Hindered(hindrance)
    }
}

impl Unapplied {
    /// Of an answer that is no success.
    pub(super) fn of(reply: &Reply, account: &Account, verb: &str, kind: &Kind, key: &ObjectKey) -> Self {
        let shown = format!("{} {key}", kind.kind);
        match reply.status {
            StatusCode::FORBIDDEN => forbidden(account, verb, kind, key.namespace.as_deref(), &reply.sentence()).into(),
            StatusCode::CONFLICT => Hindrance::new("ChildConflict", conflict(&shown, reply)).into(),
            StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED => {
                let sentence = format!("{shown} cannot be written: the API server does not serve {kind}, or its namespace is not there");
                Hindrance::new("ChildNotServed", sentence).into()
            }
            _ => match reply.error(verb == "get") {
                WriteError::Refused(sentence) => Self::Refused(format!("its child {shown}: {sentence}")),
                error => Self::Write(error),
            },
        }
    }
}

/// The sentence for a 403 with this message. Beside missing grants there are quotas, policies and namespaces that go away.
pub(super) fn forbidden(account: &Account, verb: &str, kind: &Kind, namespace: Option<&str>, message: &str) -> Hindrance {
    let message = cut(message, MESSAGE_MAX / 2);
    if message.contains("cannot impersonate") {
        let sentence = format!(
            "the host may not impersonate the ServiceAccount {account}: grant its own account the verb impersonate on serviceaccounts \
             with that resourceName, by a Role in the same namespace"
        );
        return Hindrance::new("ImpersonationForbidden", sentence);
    }
    // The server knows best which verb it was: applying what does not exist yet is to create it.
    let Some((_, denied)) = message.split_once(" cannot ") else {
        let sentence = format!("the API server forbids the ServiceAccount {account} to {verb} {}: {message}", kind.resource());
        return Hindrance::new("ChildForbidden", sentence);
    };
    let verb = denied.split(' ').next().unwrap_or(verb);
    let place = match namespace {
        Some(namespace) => format!(" in the namespace {namespace}"),
        None if kind.namespaced => " in all namespaces".to_owned(),
        None => String::new(),
    };
    let sentence = format!(
        "the ServiceAccount {account} may not {verb} {}{place}: bind it to a role with get, list, watch, create, patch and delete on {} \
         in the group {:?}",
        kind.resource(),
        kind.plural,
        kind.group
    );
    Hindrance::new("AccountForbidden", sentence)
}

/// Which field belongs to which field manager.
fn conflict(shown: &str, reply: &Reply) -> String {
    let status: Value = serde_json::from_str(&reply.text).unwrap_or_default();
    let causes = status["details"]["causes"].as_array().into_iter().flatten();
    let fields: Vec<String> = causes
        .filter_map(|cause| {
            let (field, message) = (cause["field"].as_str()?, cause["message"].as_str()?);
            let manager = message.split('"').nth(1).unwrap_or(message);
            Some(format!("{field} belongs to the field manager {manager:?}"))
        })
        .collect();
    if fields.is_empty() {
        return format!("{shown} is in conflict: {}", reply.sentence());
    }
    let fields = cut(&fields.join(", "), MESSAGE_MAX / 2);
    format!("{shown} is in conflict: {fields}; let the handler leave it out, or have the other manager give it up")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::account::Accounts;

    fn sentence(status: StatusCode, body: Value) -> String {
        let account = Accounts::fixed("sys", "host", &["p"]).get(Some(&crate::account::Actor::p("p"))).expect("labelled");
        let kind = super::super::desired::tests::config_maps();
        let reply = Reply { status, retry_after: Duration::from_secs(1), text: body.to_string() };
        let unapplied = Unapplied::of(&reply, &account, "patch", &kind, &ObjectKey::new(Some("t1"), "c"));
        assert!(matches!(unapplied, Unapplied::Hindered(_)) || status == StatusCode::UNPROCESSABLE_ENTITY, "{unapplied}");
        unapplied.to_string()
    }

    #[test]
    fn a_missing_rule_names_verb_resource_namespace_and_account() {
        let message = r#"configmaps "c" is forbidden: User "system:serviceaccount:sys:p" cannot create resource "configmaps" in API group "" in the namespace "t1""#;
        let sentence = sentence(StatusCode::FORBIDDEN, json!({ "message": message }));
        assert!(sentence.contains("the ServiceAccount sys/p may not create configmaps in the namespace t1"), "{sentence}");
    }

    #[test]
    fn a_host_that_may_not_impersonate_says_so() {
        let message = r#"serviceaccounts "p" is forbidden: User "system:serviceaccount:sys:berth" cannot impersonate resource "serviceaccounts" in API group "" in the namespace "sys""#;
        let sentence = sentence(StatusCode::FORBIDDEN, json!({ "message": message }));
        assert!(sentence.contains("the host may not impersonate the ServiceAccount sys/p"), "{sentence}");
    }

    #[test]
    fn a_quota_is_told_in_the_servers_words() {
        let sentence = sentence(StatusCode::FORBIDDEN, json!({ "message": "configmaps \"c\" is forbidden: exceeded quota: small" }));
        assert!(sentence.contains("exceeded quota: small"), "{sentence}");
    }

    #[test]
    fn a_conflict_names_field_and_manager() {
        let causes = json!([{ "reason": "FieldManagerConflict", "message": "conflict with \"kubectl\" using v1", "field": ".data.a" }]);
        let sentence = sentence(StatusCode::CONFLICT, json!({ "message": "Apply failed", "details": { "causes": causes } }));
        assert!(sentence.contains("ConfigMap t1/c is in conflict: .data.a belongs to the field manager \"kubectl\""), "{sentence}");
    }

    #[test]
    fn what_the_api_server_never_takes_is_the_handlers_failure() {
        assert!(
            sentence(StatusCode::UNPROCESSABLE_ENTITY, json!({ "message": "data: Invalid value" }))
                .contains("its child ConfigMap t1/c: 422")
        );
    }
}
