//! Private authorities and credentials of allowed hosts: whom a plugin's requests trust, and what the host adds to them.

use berth_tests::{
    cluster::Cluster,
    eventually::eventually,
    host::{Flags, Host},
    resource::Resource,
    stage::{SOON, probe},
    tls::{Authority, TlsServer},
};
use serde_json::{Value, json};

/// Puts the certificate of an authority where `plugin.yaml` can name it, for the credentials of this plugin too.
async fn publish(cluster: &Cluster, name: &str, authority: &Authority, plugin: &str) {
    let annotations = json!({"berth.acme.io/credentials-for": plugin});
    let metadata = json!({"name": name, "namespace": cluster.system(), "annotations": annotations});
    cluster.install([json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"ca.crt": authority.pem()}})]).await;
}

/// A Secret with a token, and what its annotations say.
async fn keep(cluster: &Cluster, token: &str, plugin: &str, hosts: &str) {
    let annotations = json!({"berth.acme.io/credentials-for": plugin, "berth.acme.io/allowed-hosts": hosts});
    let metadata = json!({"name": "mail", "namespace": cluster.system(), "annotations": annotations});
    cluster.install([json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"token": token}})]).await;
}

/// What `berth push` grants for it.
async fn allow_to_read(cluster: &Cluster, secret: &str) {
    let metadata = json!({"name": "berth-plugin-probe", "namespace": cluster.system()});
    let rules = json!([{"apiGroups": [""], "resources": ["secrets"], "resourceNames": [secret], "verbs": ["get"]}]);
    let subject = json!({"kind": "ServiceAccount", "name": "berth", "namespace": cluster.system()});
    let reference = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "berth-plugin-probe"});
    let version = "rbac.authorization.k8s.io/v1";
    cluster
        .install([
            json!({"apiVersion": version, "kind": "Role", "metadata": metadata, "rules": rules}),
            json!({"apiVersion": version, "kind": "RoleBinding", "metadata": metadata, "roleRef": reference, "subjects": [subject]}),
        ])
        .await;
}

/// A host whose probe may send to these, which all lead to the server.
async fn probing(cluster: &Cluster, server: &TlsServer, hosts: &[&str], config: &str) -> Host {
    let version = push(cluster, hosts, config).await;
    let resolve = hosts.iter().map(|host| (format!("{host}:443"), server.addr())).collect();
    let host = Host::start(cluster, "host", &Flags { resolve, ..Flags::default() }).await;
    cluster.until_serving("probe", &version).await;
    host
}

async fn push(cluster: &Cluster, hosts: &[&str], config: &str) -> String {
    let claimed: Vec<_> = hosts.iter().map(|host| format!("https://{host}")).collect();
    let config = format!("backoff: {{base: 200ms, max: 1s}}\nallowedHosts:\n{config}");
    cluster.push("probe", &probe(&json!({"hosts": claimed})), &config).await
}

/// Has the probe send, with a header of its own.
async fn send(cluster: &Cluster, name: &str, host: &str) {
    let spec = json!({"do": "http", "url": format!("https://{host}/"), "headers": {"authorization": "Bearer of-the-guest"}});
    cluster.create(Resource::PROBE, name, spec).await;
}

async fn until_sent(cluster: &Cluster, name: &str) {
    cluster.until(Resource::PROBE, name, SOON, |object| object["status"]["code"] == 200).await;
}

async fn until_failed(cluster: &Cluster, name: &str, words: &str) -> Value {
    let says = |object: &Value| object["status"]["error"].as_str().is_some_and(|error| error.contains(words));
    cluster.until(Resource::PROBE, name, SOON, says).await
}

async fn until_denied(host: &Host, reason: &str, times: f64) {
    let labels = [("kind", "Probe.probe.acme.io"), ("capability", "http"), ("reason", reason)];
    eventually(SOON, async || match host.metric("berth_denied_total", &labels).await {
        Some(count) if count >= times => Ok(()),
        other => Err(format!("{other:?} of {times} denials for {reason}")),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_private_authority_is_trusted_for_its_own_host_and_no_other() {
    let cluster = Cluster::shared().await;
    let (ours, theirs) = (Authority::new(), Authority::new());
    publish(&cluster, "ours", &ours, "").await;
    publish(&cluster, "theirs", &theirs, "").await;
    let server = TlsServer::start(&ours, &["mail.corp"]).await;
    let hosts = ["mail.corp", "web.corp", "misnamed.corp", "theirs.corp", "lost.corp"];
    let config = "
- {url: 'https://mail.corp', ca: {configMap: ours}}
- https://web.corp
- {url: 'https://misnamed.corp', ca: {configMap: ours}}
- {url: 'https://theirs.corp', ca: {configMap: theirs}}
- {url: 'https://lost.corp', ca: {configMap: nowhere}}
";
    let host = probing(&cluster, &server, &hosts, config).await;
    for name in ["mail", "web", "misnamed", "theirs", "lost"] {
        send(&cluster, name, &format!("{name}.corp")).await;
    }
    until_sent(&cluster, "mail").await;
    for name in ["web", "misnamed", "theirs"] {
        until_failed(&cluster, name, "TlsCertificateError").await;
    }
    let lost = until_failed(&cluster, "lost", "ConfigMap").await;
    assert!(lost["status"]["error"].as_str().is_some_and(|error| error.contains("is not in the namespace")), "{lost}");
    until_denied(&host, "certificate", 3.0).await;
    until_denied(&host, "secret", 1.0).await;
    assert!(host.log().contains("name it as `ca` of its entry in `allowedHosts`"), "the log says how to trust it");
    assert_eq!(server.seen().len(), 1, "nothing is sent before the certificate is trusted");

    // A connection that our authority has vouched for is idle now, and of no use to a version that trusts only theirs. (The former
    // version sends in its place then, as the new one is on trial.)
    let version = push(&cluster, &hosts, "- {url: 'https://mail.corp', ca: {configMap: theirs}}\n").await;
    cluster.until_serving("probe", &version).await;
    send(&cluster, "again", "mail.corp").await;
    let denied = "denied a request to https://mail.corp:443: its certificate is not trusted by the `ca`";
    eventually(SOON, async || if host.log().contains(denied) { Ok(()) } else { Err("the connection was used") }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn credentials_are_added_by_the_host_rotate_and_never_show() {
    let cluster = Cluster::shared().await;
    let authority = Authority::new();
    publish(&cluster, "ours", &authority, "probe").await;
    keep(&cluster, "first-t0ken", "probe", "https://mail.corp").await;
    let server = TlsServer::start(&authority, &["mail.corp", "evil.corp"]).await;
    server.ask_for("first-t0ken");
    let config = "
- {url: 'https://mail.corp', ca: {configMap: ours}, credentials: {secret: mail}}
- {url: 'https://evil.corp', ca: {configMap: ours}, credentials: {secret: mail}}
";
    let host = probing(&cluster, &server, &["mail.corp", "evil.corp"], config).await;
    send(&cluster, "early", "mail.corp").await;
    until_failed(&cluster, "early", "may not get secrets named").await;
    assert_eq!(server.seen().len(), 0);
    allow_to_read(&cluster, "mail").await;
    until_sent(&cluster, "early").await;

    send(&cluster, "astray", "evil.corp").await;
    until_failed(&cluster, "astray", "does not name https://evil.corp:443").await;
    until_denied(&host, "secret", 2.0).await;

    // The server takes only the new one at once, and the host knows only the old one: no object may give up for it.
    server.ask_for("second-t0ken");
    keep(&cluster, "second-t0ken", "probe", "https://mail.corp").await;
    send(&cluster, "late", "mail.corp").await;
    until_sent(&cluster, "late").await;

    let given: Vec<_> = server.seen().iter().map(|headers| headers["authorization"].to_str().unwrap_or_default().to_owned()).collect();
    assert!(given.iter().all(|value| value == "Bearer first-t0ken" || value == "Bearer second-t0ken"), "{given:?}");
    let told = format!("{}{:?}", host.log(), cluster.list(Resource::PROBE, "").await);
    assert!(!told.contains("t0ken"), "a token shows");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_secret_that_does_not_name_the_plugin_is_not_used() {
    let cluster = Cluster::shared().await;
    let authority = Authority::new();
    publish(&cluster, "ours", &authority, "another").await;
    keep(&cluster, "t0ken", "another", "https://mail.corp").await;
    allow_to_read(&cluster, "mail").await;
    let server = TlsServer::start(&authority, &["mail.corp"]).await;
    let config = "\n- {url: 'https://mail.corp', ca: {configMap: ours}, credentials: {secret: mail}}\n";
    let _host = probing(&cluster, &server, &["mail.corp"], config).await;
    send(&cluster, "stolen", "mail.corp").await;
    until_failed(&cluster, "stolen", "credentials are sent to whom it vouches for").await;
    publish(&cluster, "ours", &authority, "probe").await;
    until_failed(&cluster, "stolen", "berth.acme.io/credentials-for does not name the plugin probe").await;
    keep(&cluster, "t0ken", "another probe", "https://mail.corp").await;
    until_sent(&cluster, "stolen").await;
    assert_eq!(server.seen().len(), 1);
}
