//! Manifests: the objects of YAML files, each with the place that it was read from.

use std::fmt;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use kube::core::{GroupVersion, GroupVersionKind};
use serde_json::Value;

use super::kustomization;

/// Objects to install, in the order in which they were written.
#[derive(Clone, Debug, Default)]
pub struct Manifests {
    documents: Vec<Document>,
}

/// One object.
#[derive(Clone, Debug)]
pub struct Document {
    origin: String,
    object: Value,
}

impl Manifests {
    /// The documents of a YAML text. `origin` names it in messages.
    pub fn parse(origin: &str, yaml: &str) -> Result<Self> {
        let objects: Vec<Value> = serde_saphyr::from_multiple(yaml).map_err(|error| anyhow!("{origin} is not valid YAML: {error}"))?;
        let single = objects.len() == 1;
        let documents = objects.into_iter().enumerate().map(|(index, object)| {
            let origin = if single { origin.to_owned() } else { format!("{origin}, document {}", index + 1) };
            Document::new(origin, object)
        });
        Ok(Self { documents: documents.collect::<Result<_>>()? })
    }

    /// Objects that were made, not read. `origin` names them in messages.
    pub fn of(origin: &str, objects: impl IntoIterator<Item = Value>) -> Result<Self> {
        let documents = objects.into_iter().map(|object| Document::new(origin.to_owned(), object));
        Ok(Self { documents: documents.collect::<Result<_>>()? })
    }

    /// A YAML file, a directory with a `kustomization.yaml`, or the YAML files of a directory without one.
    pub fn read(path: &Path) -> Result<Self> {
        let read = |file: &str| std::fs::read(file).with_context(|| format!("cannot read {file}"));
        let name = path.to_str().with_context(|| format!("{} is not valid UTF-8", path.display()))?;
        if !path.is_dir() {
            return Self::parse_bytes(name, &read(name)?);
        }
        if path.join(kustomization::FILE).exists() {
            return kustomization::build(name, &read);
        }
        let entries = std::fs::read_dir(path).with_context(|| format!("cannot list {name}"))?;
        let mut files: Vec<_> = entries
            .filter_map(|entry| entry.ok()?.path().to_str().map(str::to_owned))
            .filter(|file| file.ends_with(".yaml") || file.ends_with(".yml"))
            .collect();
        files.sort();
        let mut manifests = Self::default();
        for file in files {
            manifests.extend(Self::parse_bytes(&file, &read(&file)?)?);
        }
        Ok(manifests)
    }

    /// The kustomization in `directory` of a table of files, path and content, such as one that rides inside the program.
    pub fn embedded(directory: &str, files: &[(&str, &str)]) -> Result<Self> {
        kustomization::build(directory, &|path| {
            let file = files.iter().find(|(name, _)| *name == path);
            file.map(|(_, content)| content.as_bytes().to_vec()).with_context(|| format!("{path} is not in this program"))
        })
    }

    /// The objects.
    pub fn documents(&self) -> &[Document] {
        &self.documents
    }

    /// Adds those of `other` at the end.
    pub fn extend(&mut self, other: Self) {
        self.documents.extend(other.documents);
    }

    pub(super) fn parse_bytes(origin: &str, bytes: &[u8]) -> Result<Self> {
        Self::parse(origin, std::str::from_utf8(bytes).with_context(|| format!("{origin} is not valid UTF-8"))?)
    }
}

impl Document {
    fn new(origin: String, object: Value) -> Result<Self> {
        for field in ["/apiVersion", "/kind", "/metadata/name"] {
            if object.pointer(field).and_then(Value::as_str).is_none_or(str::is_empty) {
                bail!("{origin} is no Kubernetes object: it has no {}", field[1..].replace('/', "."));
            }
        }
        Ok(Self { origin, object })
    }

    /// The object as it is sent.
    pub fn object(&self) -> &Value {
        &self.object
    }

    /// The object's kind.
    pub fn kind(&self) -> &str {
        self.text("/kind").unwrap_or_default()
    }

    /// The object's name.
    pub fn name(&self) -> &str {
        self.text("/metadata/name").unwrap_or_default()
    }

    /// The namespace that the object names.
    pub fn namespace(&self) -> Option<&str> {
        self.text("/metadata/namespace")
    }

    pub(super) fn group_version_kind(&self) -> Result<GroupVersionKind> {
        let version: GroupVersion = self.text("/apiVersion").unwrap_or_default().parse().context("its apiVersion is not valid")?;
        Ok(version.with_kind(self.kind()))
    }

    fn text(&self, pointer: &str) -> Option<&str> {
        self.object.pointer(pointer)?.as_str()
    }
}

impl fmt::Display for Document {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {} ", self.origin, self.kind())?;
        if let Some(namespace) = self.namespace() {
            write!(out, "{namespace}/")?;
        }
        out.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_document_of_a_text_is_an_object_and_comments_alone_are_none() {
        let yaml = "# about\n---\napiVersion: v1\nkind: Namespace\nmetadata: {name: a}\n---\n# nothing\n---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: b, namespace: a}\n";
        let manifests = Manifests::parse("x.yaml", yaml).unwrap();
        let shown: Vec<String> = manifests.documents().iter().map(Document::to_string).collect();
        assert_eq!(shown, ["x.yaml, document 1: Namespace a", "x.yaml, document 2: ConfigMap a/b"]);
    }

    #[test]
    fn what_is_no_object_is_refused_with_its_place() {
        let sentence = Manifests::parse("x.yaml", "apiVersion: v1\nkind: ConfigMap\n").unwrap_err().to_string();
        assert_eq!(sentence, "x.yaml is no Kubernetes object: it has no metadata.name");
    }

    #[test]
    fn a_directory_without_a_kustomization_gives_its_yaml_files_in_order() {
        let directory = tempfile::tempdir().unwrap();
        for (file, name) in [("b.yaml", "second"), ("a.yml", "first"), ("c.txt", "none")] {
            std::fs::write(directory.path().join(file), format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: {name}}}\n")).unwrap();
        }
        let manifests = Manifests::read(directory.path()).unwrap();
        assert_eq!(manifests.documents().iter().map(Document::name).collect::<Vec<_>>(), ["first", "second"]);
    }
}
