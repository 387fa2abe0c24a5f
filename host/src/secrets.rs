//! Secrets and ConfigMaps of the host's own namespace that `plugin.yaml` refers to, read by name, one at a time.
//!
//! # Guarantees
//! Nothing is listed or watched: what the host's account may `get` by name is all that can be read. No content is ever logged.

use std::{collections::BTreeMap, fmt, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use kube::{Api, Client};

use crate::package::Holder;

/// Annotation of a Secret: the plugins that may use it as credentials, separated by commas.
pub const CREDENTIALS_FOR: &str = "berth.acme.io/credentials-for";

/// Annotation of a Secret: where it may be sent to, as in `allowedHosts`, separated by commas.
pub const ALLOWED_HOSTS: &str = "berth.acme.io/allowed-hosts";

/// Longest that one read may take: it is part of the call of a handler.
const READ_DEADLINE: Duration = Duration::from_secs(2);

/// What was found.
#[derive(Clone, Default)]
pub struct Found {
    /// Of the object.
    pub annotations: BTreeMap<String, String>,
    /// Its data, decoded.
    pub data: BTreeMap<String, Bytes>,
}

impl fmt::Debug for Found {
    /// Keys alone.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Found").field("annotations", &self.annotations).field("data", &self.data.keys()).finish()
    }
}

/// Why there is nothing, in words to be read after a colon.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The API server says so: it is not there, or not for the host.
    #[error("{0}")]
    Refused(String),
    /// There was no answer, which says nothing about the object.
    #[error("{0}")]
    Away(String),
}

/// Reads one object.
pub type Read = Arc<dyn Fn(Holder) -> BoxFuture<'static, Result<Found, ReadError>> + Send + Sync>;

/// From the host's namespace.
pub fn of_namespace(client: Client, namespace: &str) -> Read {
    let namespace: Arc<str> = namespace.into();
    Arc::new(move |holder| {
        let (client, namespace) = (client.clone(), namespace.clone());
        async move {
            let read = tokio::time::timeout(READ_DEADLINE, get(client, &namespace, &holder));
            match read.await {
                Ok(Ok(found)) => Ok(found),
                Ok(Err(error)) => Err(explain(&error, &namespace, &holder)),
                Err(_) => Err(ReadError::Away(format!("the API server did not answer within {READ_DEADLINE:?}"))),
            }
        }
        .boxed()
    })
}

/// For a process without a cluster.
pub fn nowhere() -> Read {
    Arc::new(|_| futures::future::ready(Err(ReadError::Refused("this process reads no Secrets".into()))).boxed())
}

async fn get(client: Client, namespace: &str, holder: &Holder) -> kube::Result<Found> {
    match holder {
        Holder::Secret(name) => {
            let secret = Api::<Secret>::namespaced(client, namespace).get(name).await?;
            let data = secret.data.unwrap_or_default().into_iter().map(|(key, value)| (key, value.0.into())).collect();
            Ok(Found { annotations: secret.metadata.annotations.unwrap_or_default(), data })
        }
        Holder::ConfigMap(name) => {
            let map = Api::<ConfigMap>::namespaced(client, namespace).get(name).await?;
            let text = map.data.unwrap_or_default().into_iter().map(|(key, value)| (key, Bytes::from(value)));
            let binary = map.binary_data.unwrap_or_default().into_iter().map(|(key, value)| (key, value.0.into()));
            Ok(Found { annotations: map.metadata.annotations.unwrap_or_default(), data: text.chain(binary).collect() })
        }
    }
}

fn explain(error: &kube::Error, namespace: &str, holder: &Holder) -> ReadError {
    match error {
        kube::Error::Api(status) if status.code == 404 => ReadError::Refused(format!("it is not in the namespace {namespace}")),
        kube::Error::Api(status) if status.code == 403 => {
            let (resource, name) = match holder {
                Holder::Secret(name) => ("secrets", name),
                Holder::ConfigMap(name) => ("configmaps", name),
            };
            ReadError::Refused(format!(
                "the host's ServiceAccount may not get {resource} named {name:?} in the namespace {namespace}: bind it to a Role with \
                 that name in `resourceNames` (\"berth push\" makes one)"
            ))
        }
        other => ReadError::Away(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_does_not_show_its_content() {
        let found = Found { data: BTreeMap::from([("token".to_owned(), Bytes::from_static(b"hunter2"))]), ..Found::default() };
        assert!(!format!("{found:?}").contains("hunter2") && format!("{found:?}").contains("token"));
    }

    #[test]
    fn a_missing_rule_is_told_with_the_rule_that_lacks() {
        let denied = |code| kube::Error::Api(Box::new(kube::core::Status { code, ..kube::core::Status::default() }));
        let ReadError::Refused(sentence) = explain(&denied(403), "berth-system", &Holder::Secret("mail".into())) else { panic!("refused") };
        assert!(sentence.contains("may not get secrets named \"mail\" in the namespace berth-system"), "{sentence}");
        assert!(matches!(explain(&denied(500), "n", &Holder::ConfigMap("c".into())), ReadError::Away(_)));
    }
}
