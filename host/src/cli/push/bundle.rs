//! What is pushed: the ConfigMap of a plugin and the permissions of the host for its kind.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use anyhow::{Context, anyhow};
use bytes::Bytes;
use k8s_openapi::{ByteString, api::core::v1::ConfigMap};
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::{Map, Value, json};

use crate::{
    claim::Read,
    install::FIELD_MANAGER,
    loader::access::Needs,
    package::{self, AllowedHost, CONFIG_FILE, Digest, Holder, HostPattern, Package, Refusal, reason},
    source::configmap::LABEL,
};

/// Under which name the component is in the ConfigMap.
pub const COMPONENT: &str = "plugin.wasm.zst";

/// What a ConfigMap holds at most, all files together.
const CONFIG_MAP: usize = 1 << 20;

/// The highest level whose window the host's decoder accepts for components of every size.
const ZSTD_LEVEL: i32 = 19;

/// A plugin that has passed the gates which need no component.
pub struct Bundle {
    namespace: String,
    package: Package,
    compressed: Bytes,
    config: Option<String>,
}

impl Bundle {
    /// Opens a component file as the host would, and compresses it.
    pub fn new(name: &str, namespace: &str, file: (String, Bytes), config: Option<String>) -> Result<Self, Refusal> {
        let config_file = config.iter().map(|text| (CONFIG_FILE.to_owned(), Bytes::from(text.clone())));
        let package = package::open(name, config_file.chain([file]))?;
        let compressed = zstd::encode_all(&*package.component, ZSTD_LEVEL)
            .map_err(|error| Refusal::new(reason::HOST_FAILURE, format!("The component cannot be compressed: {error}.")))?;
        let size = compressed.len() + config.as_ref().map_or(0, String::len);
        if size > CONFIG_MAP {
            let message = format!(
                "The plugin has {size} bytes after compression, and a ConfigMap holds {CONFIG_MAP}: build it for size (opt-level \"s\", lto, \
                 panic = \"abort\", strip), or run wasm-opt on it."
            );
            return Err(Refusal::new(reason::TOO_LARGE, message));
        }
        Ok(Self { namespace: namespace.to_owned(), package, compressed: compressed.into(), config })
    }

    /// Name of the plugin.
    pub fn name(&self) -> &str {
        &self.package.name
    }

    /// Where the host is.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Of the component.
    pub fn digest(&self) -> Digest {
        self.package.digest
    }

    /// As the host will open it.
    pub fn package(&self) -> &Package {
        &self.package
    }

    /// The ConfigMap.
    pub fn config_map(&self) -> Value {
        let data: Map<String, Value> = self.config.iter().map(|text| (CONFIG_FILE.to_owned(), Value::from(text.as_str()))).collect();
        json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": { "name": self.name(), "namespace": self.namespace, "labels": { LABEL: "true" } },
            "binaryData": { COMPONENT: ByteString(self.compressed.to_vec()) },
            "data": data,
        })
    }

    /// A ClusterRole with the needs and with what the host watches for the plugin to read, and its binding to the host's account; and
    /// what the host needs in its own namespace.
    pub fn permissions(&self, needs: &[Needs], reads: &[Read], service_account: &str) -> Vec<Value> {
        let name = format!("berth-plugin-{}", self.name());
        let mut rules: Vec<Value> = needs.iter().flat_map(|needs| needs.rules().as_array().cloned().unwrap_or_default()).collect();
        rules.extend(
            reads.iter().map(|read| json!({ "apiGroups": [read.kind.group], "resources": [read.kind.plural], "verbs": ["list", "watch"] })),
        );
        let role = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": { "name": name }, "rules": rules,
        });
        let binding = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": { "name": name },
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name },
            "subjects": [{ "kind": "ServiceAccount", "name": service_account, "namespace": self.namespace }],
        });
        [role, binding].into_iter().chain(self.local_permissions(service_account)).collect()
    }

    /// A Role with what `plugin.yaml` names in the host's namespace, by name and nothing else, and its binding to the host's account: to
    /// impersonate the account that the plugin acts as, and to get its Secrets. ConfigMaps the host reads anyway. The Role is there with
    /// no rules too, so that what a former `plugin.yaml` named is taken back.
    fn local_permissions(&self, service_account: &str) -> [Value; 2] {
        let of = |host: &AllowedHost| {
            let ca = host.ca.as_ref().and_then(|ca| if let Holder::Secret(name) = &ca.holder { Some(name.clone()) } else { None });
            host.credentials.as_ref().map(|credentials| credentials.secret.clone()).into_iter().chain(ca)
        };
        let secrets: BTreeSet<String> = self.package.config.allowed_hosts.iter().flat_map(of).collect();
        let accounts: BTreeSet<String> = self.package.config.service_account.iter().cloned().collect();
        let rules: Vec<Value> = [("serviceaccounts", accounts, "impersonate"), ("secrets", secrets, "get")]
            .into_iter()
            .filter(|(_, names, _)| !names.is_empty())
            .map(|(resource, names, verb)| json!({ "apiGroups": [""], "resources": [resource], "resourceNames": names, "verbs": [verb] }))
            .collect();
        let metadata = json!({ "name": format!("berth-plugin-{}", self.name()), "namespace": self.namespace });
        let role = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": metadata,
            "rules": rules,
        });
        let binding = json!({
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": metadata["name"] },
            "subjects": [{ "kind": "ServiceAccount", "name": service_account, "namespace": self.namespace }],
        });
        [role, binding]
    }

    /// Puts the plugin in and takes these files out, in one write.
    pub async fn swap(&self, client: &Client, files: &[String], limit: Duration) -> anyhow::Result<()> {
        let mut patch = self.config_map();
        for file in files {
            patch["binaryData"][file] = Value::Null;
            patch["data"][file] = Value::Null;
        }
        let api: Api<ConfigMap> = Api::namespaced(client.clone(), &self.namespace);
        let (parameters, patch) =
            (PatchParams { field_manager: Some(FIELD_MANAGER.into()), ..PatchParams::default() }, Patch::Merge(patch));
        let patched =
            tokio::time::timeout(limit, api.patch(self.name(), &parameters, &patch)).await.context("the API server does not answer")?;
        patched.map(drop).with_context(|| format!("writing the ConfigMap {}/{}", self.namespace, self.name()))
    }
}

/// What the flags add to a `plugin.yaml`.
pub struct Edits {
    /// Keys of `settings`, with texts.
    pub settings: BTreeMap<String, String>,
    /// Entries of `allowedHosts`.
    pub allowed_hosts: Vec<HostPattern>,
}

impl Edits {
    /// The edited text; the text as it is, comments included, where there is nothing to add.
    pub fn of(self, text: Option<String>) -> anyhow::Result<Option<String>> {
        let Self { settings, allowed_hosts } = self;
        if settings.is_empty() && allowed_hosts.is_empty() {
            return Ok(text);
        }
        let text = text.filter(|text| !text.trim().is_empty());
        let parsed: Option<Value> =
            text.as_deref().map(serde_saphyr::from_str).transpose().map_err(|error| anyhow!("plugin.yaml cannot be read: {error}"))?;
        let mut config = match parsed {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(config)) => config,
            Some(_) => return Err(anyhow!("plugin.yaml has to be a mapping")),
        };
        for (key, value) in settings {
            let all = config
                .entry("settings")
                .and_modify(|value| {
                    if value.is_null() {
                        *value = json!({})
                    }
                })
                .or_insert_with(|| json!({}));
            all.as_object_mut().context("\"settings\" in plugin.yaml has to be a mapping")?.insert(key, value.into());
        }
        for host in allowed_hosts {
            let all = config
                .entry("allowedHosts")
                .and_modify(|value| {
                    if value.is_null() {
                        *value = json!([])
                    }
                })
                .or_insert_with(|| json!([]));
            let all = all.as_array_mut().context("\"allowedHosts\" in plugin.yaml has to be a list")?;
            let url = |entry: &Value| entry.as_str().or(entry["url"].as_str()).and_then(|text| text.parse().ok());
            if !all.iter().any(|entry| url(entry) == Some(host.clone())) {
                all.push(host.to_string().into());
            }
        }
        Ok(Some(serde_saphyr::to_string(&config)?))
    }
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng, rngs::StdRng};

    use super::*;
    use crate::{object::Kind, package::Config};

    fn edited(text: &str, settings: &[(&str, &str)], hosts: &[&str]) -> anyhow::Result<Config> {
        let edits = Edits {
            settings: settings.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
            allowed_hosts: hosts.iter().map(|host| host.parse().expect("a host")).collect(),
        };
        Ok(Config::parse(edits.of(Some(text.to_owned()))?.expect("a text").as_bytes())?)
    }

    #[test]
    fn flags_are_added_to_what_is_there() {
        let text = "settings: { gateway: \"http://old\", retries: 3 }\nallowedHosts: [\"http://a\"]\nconcurrency: 2\n";
        let config = edited(text, &[("gateway", "http://new"), ("text", "yes")], &["http://a:80", "https://b"]).expect("edits");
        assert_eq!(Value::Object(config.settings), json!({ "gateway": "http://new", "retries": 3, "text": "yes" }));
        assert_eq!(config.allowed_hosts.iter().map(|host| host.pattern.to_string()).collect::<Vec<_>>(), ["http://a:80", "https://b:443"]);
        assert_eq!(config.concurrency, 2);
    }

    #[test]
    fn an_empty_text_and_empty_sections_can_be_added_to() {
        for text in ["", "# nothing yet\n", "settings:\nallowedHosts:\n"] {
            let config = edited(text, &[("a", "1.50")], &["http://a"]).expect("edits");
            assert_eq!((config.settings["a"].as_str(), config.allowed_hosts.len()), (Some("1.50"), 1), "{text:?}");
        }
        assert!(edited("settings: []", &[("a", "b")], &[]).is_err());
        assert!(edited("- a", &[("a", "b")], &[]).is_err());
    }

    #[test]
    fn without_flags_the_text_stays_as_it_is() {
        let edits = || Edits { settings: BTreeMap::new(), allowed_hosts: vec![] };
        assert_eq!(edits().of(Some("# why\npaused: true\n".into())).expect("edits").as_deref(), Some("# why\npaused: true\n"));
        assert_eq!(edits().of(None).expect("edits"), None);
    }

    #[test]
    fn the_config_map_is_what_the_host_opens() {
        let bundle = Bundle::new("p", "ns", ("x.wasm".into(), Bytes::from_static(b"\0asm")), Some("paused: true".into())).expect("bundles");
        let map: ConfigMap = serde_json::from_value(bundle.config_map()).expect("a ConfigMap");
        assert_eq!(map.metadata.labels.expect("labels")[LABEL], "true");
        let files = map.binary_data.expect("files").into_iter().map(|(file, ByteString(bytes))| (file, Bytes::from(bytes)));
        let data = map.data.expect("data").into_iter().map(|(file, text)| (file, Bytes::from(text)));
        assert_eq!(package::open("p", files.chain(data)), Ok(bundle.package().clone()));
    }

    #[test]
    fn what_a_config_map_cannot_hold_is_refused_with_what_to_do() {
        let noise: Vec<u8> = StdRng::seed_from_u64(1).random_iter().take(CONFIG_MAP + 4096).collect();
        let refusal = Bundle::new("p", "ns", ("x.wasm".into(), noise.into()), None).map(drop).expect_err("refused");
        assert!(refusal.reason == reason::TOO_LARGE && refusal.message.contains("wasm-opt"), "{refusal}");
    }

    #[test]
    fn what_is_named_may_be_used_by_name_and_what_is_named_no_more_is_taken_back() {
        let permissions = |config: &str| {
            let bundle = Bundle::new("p", "ns", ("x.wasm".into(), Bytes::new()), Some(config.into())).expect("bundles");
            bundle.local_permissions("berth")
        };
        assert_eq!(permissions("allowedHosts: ['https://a', {url: 'https://b', ca: {configMap: c}}]")[0]["rules"], json!([]));
        let given = permissions(
            "serviceAccountName: website\nallowedHosts: [{url: 'https://a', credentials: {secret: t}}, {url: 'https://b', ca: {secret: c}}]",
        );
        let rules = json!([
            { "apiGroups": [""], "resources": ["serviceaccounts"], "resourceNames": ["website"], "verbs": ["impersonate"] },
            { "apiGroups": [""], "resources": ["secrets"], "resourceNames": ["c", "t"], "verbs": ["get"] },
        ]);
        assert_eq!((&given[0]["rules"], &given[0]["metadata"]["namespace"]), (&rules, &json!("ns")));
        assert_eq!(given[1]["roleRef"]["name"], given[0]["metadata"]["name"]);
        assert_eq!(given[1]["subjects"][0]["name"], "berth");
    }

    #[test]
    fn the_role_is_bound_to_the_hosts_account() {
        let bundle = Bundle::new("p", "ns", ("x.wasm".into(), Bytes::new()), None).expect("bundles");
        let secrets =
            Kind { group: String::new(), version: "v1".into(), kind: "Secret".into(), plural: "secrets".into(), namespaced: true };
        let reads = [Read { kind: secrets, all_namespaces: false, label_selector: "a=b".into() }];
        let permissions = bundle.permissions(&[Needs::new("g".into(), "ks".into())], &reads, "berth");
        let [role, binding, ..] = &permissions[..] else { panic!("less than a role and its binding: {permissions:?}") };
        assert_eq!((permissions.len(), &permissions[2]["rules"]), (4, &json!([])));
        assert_eq!(role["rules"][2], json!({ "apiGroups": [""], "resources": ["secrets"], "verbs": ["list", "watch"] }));
        assert_eq!((&role["metadata"]["name"], &role["rules"][1]["resources"][0]), (&json!("berth-plugin-p"), &json!("ks/status")));
        assert_eq!(binding["roleRef"]["name"], role["metadata"]["name"]);
        assert_eq!(binding["subjects"], json!([{ "kind": "ServiceAccount", "name": "berth", "namespace": "ns" }]));
    }

    #[test]
    fn the_host_may_impersonate_the_plugins_account_by_name_and_no_other() {
        let config = Some("serviceAccountName: website".into());
        let bundle = Bundle::new("p", "ns", ("x.wasm".into(), Bytes::new()), config).expect("bundles");
        let permissions = bundle.permissions(&[], &[], "berth");
        assert_eq!((&permissions[2]["kind"], &permissions[2]["metadata"]["namespace"]), (&json!("Role"), &json!("ns")));
        let rule = json!({ "apiGroups": [""], "resources": ["serviceaccounts"], "resourceNames": ["website"], "verbs": ["impersonate"] });
        assert_eq!(permissions[2]["rules"], json!([rule]));
        assert_eq!(permissions[3]["subjects"], json!([{ "kind": "ServiceAccount", "name": "berth", "namespace": "ns" }]));
    }
}
