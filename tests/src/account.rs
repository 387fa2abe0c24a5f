//! The ServiceAccount that a test's plugin acts as, and what is granted for it.

use serde_json::{Value, json};

use crate::cluster::Cluster;

/// Its name, as in `serviceAccountName`.
pub const MAKER: &str = "maker";
/// All that children take.
pub const EVERYTHING: [&str; 6] = ["get", "list", "watch", "create", "patch", "delete"];

/// The account, with these labels.
pub fn account(cluster: &Cluster, labels: Value) -> Value {
    json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": MAKER, "namespace": cluster.system(), "labels": labels}})
}

/// The account, with the label that lets plugins act as it, and the names of those that may.
pub fn labelled(cluster: &Cluster) -> Value {
    let mut account = account(cluster, json!({"berth.acme.io/impersonate": "true"}));
    account["metadata"]["annotations"] = json!({"berth.acme.io/plugins": "another, probe"});
    account
}

/// The host may act as the account, and as no other.
pub fn impersonation(cluster: &Cluster) -> [Value; 2] {
    let rule = json!({"apiGroups": [""], "resources": ["serviceaccounts"], "resourceNames": [MAKER], "verbs": ["impersonate"]});
    role(cluster, "impersonate-maker", cluster.system(), "berth", rule)
}

/// What the account itself may do to ConfigMaps in the test's namespace.
pub fn rights(cluster: &Cluster, verbs: &[&str]) -> [Value; 2] {
    let rule = json!({"apiGroups": [""], "resources": ["configmaps"], "verbs": verbs});
    role(cluster, "maker", cluster.namespace(), MAKER, rule)
}

/// The account with every grant that children take.
pub async fn grant_children(cluster: &Cluster) {
    cluster.install([labelled(cluster)].into_iter().chain(impersonation(cluster)).chain(rights(cluster, &EVERYTHING))).await;
}

/// A role in a namespace, and its binding to a ServiceAccount of the host's namespace.
pub fn role(cluster: &Cluster, name: &str, namespace: &str, subject: &str, rule: Value) -> [Value; 2] {
    [
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": name, "namespace": namespace},
            "rules": [rule]}),
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": name, "namespace": namespace},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": subject, "namespace": cluster.system()}]}),
    ]
}
