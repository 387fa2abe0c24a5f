//! The part of kustomize that `deploy/` uses: resources, and ConfigMaps generated from files.
//!
//! What this part does not know is refused: manifests are never installed other than `kubectl apply -k` would.

use std::collections::BTreeMap;

use anyhow::{Context, Result, anyhow, bail};
use k8s_openapi::ByteString;
use serde::Deserialize;
use serde_json::{Value, json};

use super::manifests::Manifests;

/// The file's name.
pub(super) const FILE: &str = "kustomization.yaml";

/// Directories within directories; a circle would never end.
const DEEPEST: usize = 8;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Kustomization {
    #[serde(rename = "apiVersion")]
    _api_version: Option<String>,
    #[serde(rename = "kind")]
    _kind: Option<String>,
    #[serde(default)]
    resources: Vec<String>,
    #[serde(default)]
    generator_options: GeneratorOptions,
    #[serde(default)]
    config_map_generator: Vec<ConfigMapGenerator>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ConfigMapGenerator {
    name: String,
    namespace: Option<String>,
    #[serde(default)]
    files: Vec<String>,
    #[serde(default)]
    options: GeneratorOptions,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct GeneratorOptions {
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
    #[serde(default)]
    disable_name_suffix_hash: bool,
}

/// The objects of the kustomization in `directory`, whose files `read` gives.
pub(super) fn build(directory: &str, read: &dyn Fn(&str) -> Result<Vec<u8>>) -> Result<Manifests> {
    build_within(directory, read, 0)
}

fn build_within(directory: &str, read: &dyn Fn(&str) -> Result<Vec<u8>>, depth: usize) -> Result<Manifests> {
    let file = join(directory, FILE);
    if depth > DEEPEST {
        bail!("{file} is more than {DEEPEST} kustomizations deep");
    }
    let text = read(&file)?;
    let text = std::str::from_utf8(&text).with_context(|| format!("{file} is not valid UTF-8"))?;
    let Kustomization { resources, generator_options, config_map_generator, .. } =
        serde_saphyr::from_str(text).map_err(|error| anyhow!("{file} is not a kustomization that Berth can read: {error}"))?;
    let mut manifests = Manifests::default();
    for resource in resources {
        let path = join(directory, &resource);
        manifests.extend(if resource.ends_with(".yaml") || resource.ends_with(".yml") {
            Manifests::parse_bytes(&path, &read(&path)?)?
        } else {
            build_within(&path, read, depth + 1)?
        });
    }
    for generator in &config_map_generator {
        let object =
            generator.object(directory, &generator_options, read).with_context(|| format!("{file}, ConfigMap {}", generator.name))?;
        manifests.extend(Manifests::of(&file, [object])?);
    }
    Ok(manifests)
}

impl ConfigMapGenerator {
    fn object(&self, directory: &str, common: &GeneratorOptions, read: &dyn Fn(&str) -> Result<Vec<u8>>) -> Result<Value> {
        let Self { name, namespace, files, options } = self;
        if !(common.disable_name_suffix_hash || options.disable_name_suffix_hash) {
            bail!("Berth can read it only with disableNameSuffixHash: true");
        }
        let (mut data, mut binary) = (BTreeMap::new(), BTreeMap::new());
        for file in files {
            let (key, path) = file.split_once('=').unwrap_or_else(|| (file.rsplit('/').next().unwrap_or(file), file));
            match String::from_utf8(read(&join(directory, path))?) {
                Ok(text) => _ = data.insert(key.to_owned(), text),
                Err(error) => _ = binary.insert(key.to_owned(), ByteString(error.into_bytes())),
            }
        }
        let merged = |common: &BTreeMap<String, String>, own: &BTreeMap<String, String>| {
            common.iter().chain(own).map(|(key, value)| (key.clone(), value.clone())).collect::<BTreeMap<_, _>>()
        };
        let mut object = json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": name,
                "labels": merged(&common.labels, &options.labels),
                "annotations": merged(&common.annotations, &options.annotations),
            },
            "data": data,
            "binaryData": binary,
        });
        if let Some(namespace) = namespace {
            object["metadata"]["namespace"] = json!(namespace);
        }
        Ok(object)
    }
}

fn join(directory: &str, path: &str) -> String {
    let mut parts: Vec<&str> = directory.split('/').collect();
    for part in path.split('/') {
        match part {
            "." | "" => {}
            ".." if parts.last().is_some_and(|last| !last.is_empty() && *last != "..") => _ = parts.pop(),
            _ => parts.push(part),
        }
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMESPACE: &str = "apiVersion: v1\nkind: Namespace\nmetadata: {name: one}\n";

    #[test]
    fn resources_are_followed_through_files_and_directories() {
        let manifests = Manifests::embedded(
            "deploy",
            &[
                ("deploy/kustomization.yaml", "resources: [namespace.yaml, plugins]\n"),
                ("deploy/namespace.yaml", NAMESPACE),
                ("deploy/plugins/kustomization.yaml", "resources: [../roles/role.yaml]\n"),
                ("deploy/roles/role.yaml", "apiVersion: v1\nkind: Namespace\nmetadata: {name: two}\n"),
            ],
        );
        let shown: Vec<String> = manifests.unwrap().documents().iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["deploy/namespace.yaml: Namespace one", "deploy/roles/role.yaml: Namespace two"]);
    }

    #[test]
    fn a_generated_config_map_keeps_text_as_data_and_other_bytes_as_binary_data() {
        let directory = tempfile::tempdir().unwrap();
        let kustomization = "
generatorOptions: {disableNameSuffixHash: true, labels: {common: a}}
configMapGenerator:
- name: mail
  namespace: berth-system
  files: [plugin.wasm=built.wasm, settings/plugin.yaml]
  options: {labels: {own: b}}
";
        std::fs::create_dir(directory.path().join("settings")).unwrap();
        for (file, content) in [(FILE, kustomization.as_bytes()), ("built.wasm", b"\0asm\xff"), ("settings/plugin.yaml", b"paused: true\n")]
        {
            std::fs::write(directory.path().join(file), content).unwrap();
        }
        let manifests = Manifests::read(directory.path()).unwrap();
        assert_eq!(
            manifests.documents()[0].object(),
            &json!({
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "mail", "namespace": "berth-system", "labels": {"common": "a", "own": "b"}, "annotations": {}},
                "data": {"plugin.yaml": "paused: true\n"},
                "binaryData": {"plugin.wasm": "AGFzbf8="},
            })
        );
    }

    #[test]
    fn what_is_not_understood_is_refused_and_not_skipped() {
        let refused = |text: &'static str| Manifests::embedded("d", &[("d/kustomization.yaml", text)]).unwrap_err();
        assert!(format!("{:#}", refused("namePrefix: x-\n")).contains("namePrefix"));
        assert!(format!("{:#}", refused("configMapGenerator: [{name: a}]\n")).contains("disableNameSuffixHash"));
        assert!(format!("{:#}", refused("resources: ['.']\n")).contains("deep"));
    }
}
