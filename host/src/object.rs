//! What a Kubernetes object is to the host: a kind, a key, and its JSON text with a few fields parsed.

use std::{
    collections::BTreeMap,
    fmt,
    hash::{DefaultHasher, Hash, Hasher},
    ops::Range,
    sync::Arc,
};

use serde::Deserialize;
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

pub use self::text::{Model, Text};
use crate::label::Labels;

mod text;

/// A resource type.
///
/// Two versions of one CRD are the same objects, so equality of *kinds that Berth reconciles* is [`Kind::group_kind`];
/// `Eq` compares all fields.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Kind {
    /// API group, empty for the core group.
    pub group: String,
    /// API version, such as `v1`.
    pub version: String,
    /// Kind, such as `EmailRequest`.
    pub kind: String,
    /// Plural resource name as in a URL.
    pub plural: String,
    /// Whether objects live in a namespace.
    pub namespaced: bool,
}

impl Kind {
    /// The identity of the kind across versions.
    pub fn group_kind(&self) -> GroupKind {
        GroupKind { group: self.group.as_str().into(), kind: self.kind.as_str().into() }
    }

    /// `group/version`, or `version` alone for the core group.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.clone() } else { format!("{}/{}", self.group, self.version) }
    }

    /// The same for kube's dynamic API.
    pub fn api_resource(&self) -> kube::core::ApiResource {
        kube::core::ApiResource {
            group: self.group.clone(),
            version: self.version.clone(),
            api_version: self.api_version(),
            kind: self.kind.clone(),
            plural: self.plural.clone(),
        }
    }

    /// The path of the collection: of one namespace, or of all (and of a cluster-scoped kind) with `None`.
    pub fn collection_path(&self, namespace: Option<&str>) -> String {
        let root = if self.group.is_empty() { format!("/api/{}", self.version) } else { format!("/apis/{}/{}", self.group, self.version) };
        match namespace {
            Some(namespace) if self.namespaced => format!("{root}/namespaces/{namespace}/{}", self.plural),
            _ => format!("{root}/{}", self.plural),
        }
    }

    /// The path of one object.
    pub fn object_path(&self, key: &ObjectKey) -> String {
        format!("{}/{}", self.collection_path(key.namespace.as_deref()), key.name)
    }

    /// `plural.group`, the name of the CRD.
    pub fn resource(&self) -> String {
        if self.group.is_empty() { self.plural.clone() } else { format!("{}.{}", self.plural, self.group) }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.kind, self.api_version())
    }
}

/// Group and kind: what one plugin owns. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupKind {
    /// API group, empty for the core group.
    pub group: Arc<str>,
    /// Kind.
    pub kind: Arc<str>,
}

impl GroupKind {
    /// Ten hexadecimal digits that stand for the kind where a name of fixed length is needed, such as in a label or a finalizer. They
    /// are of the kind and not of the plugin, so that a plugin under another name goes on with what it finds.
    pub fn mark(&self) -> String {
        let digest = Sha256::digest(self.to_string());
        digest[..5].iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Display for GroupKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.group.is_empty() { f.write_str(&self.kind) } else { write!(f, "{}.{}", self.kind, self.group) }
    }
}

/// Namespace and name of an object within its kind. Cheap to clone; ordered by namespace, then name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKey {
    /// None for a cluster-scoped object.
    pub namespace: Option<Arc<str>>,
    /// Name.
    pub name: Arc<str>,
}

impl ObjectKey {
    /// A key from plain strings.
    pub fn new(namespace: Option<&str>, name: &str) -> Self {
        Self { namespace: namespace.map(Arc::from), name: name.into() }
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.namespace {
            Some(namespace) => write!(f, "{namespace}/{}", self.name),
            None => f.write_str(&self.name),
        }
    }
}

/// An object of a kind that a plugin reconciles: unit of the work queue.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// The kind, whatever the version.
    pub kind: GroupKind,
    /// The object.
    pub object: ObjectKey,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.object)
    }
}

/// A cached object: its JSON text without `metadata.managedFields`, and the few fields that the host decides by.
///
/// The text is what a handler gets. It is never parsed into numbers and back, so every digit survives.
#[derive(Clone, Debug)]
pub struct Object {
    /// Namespace and name.
    pub key: ObjectKey,
    /// Identity across deletion and re-creation.
    pub uid: Arc<str>,
    /// `metadata.generation`; 0 where the API server keeps none.
    pub generation: i64,
    /// `metadata.resourceVersion`.
    pub resource_version: Box<str>,
    /// Whether `metadata.deletionTimestamp` is set.
    pub deleting: bool,
    /// Hash of its labels, annotations and status. The API server encodes the same content the same way.
    pub rest: u64,
    /// The text.
    pub json: Text,
}

/// How deep an object may nest. serde_json reads values of up to 128 levels, and what is kept as text has to be readable as a value.
const DEPTH: usize = 100;

/// The text is not a Kubernetes object that the host can work with.
#[derive(Debug, thiserror::Error)]
pub enum MalformedObject {
    /// It is no JSON, or lacks what every object has.
    #[error("not a Kubernetes object: {0}")]
    Json(#[from] serde_json::Error),
    /// It nests too deep.
    #[error("the object nests more than {DEPTH} levels deep")]
    TooDeep,
}

#[derive(Deserialize)]
struct Parts<'a> {
    #[serde(borrow)]
    metadata: ObjectMeta<'a>,
    #[serde(borrow)]
    status: Option<&'a RawValue>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ObjectMeta<'a> {
    name: &'a str,
    namespace: Option<&'a str>,
    #[serde(default)]
    uid: &'a str,
    #[serde(default)]
    generation: i64,
    #[serde(default)]
    resource_version: &'a str,
    #[serde(borrow)]
    deletion_timestamp: Option<&'a RawValue>,
    #[serde(borrow)]
    labels: Option<&'a RawValue>,
    #[serde(borrow)]
    annotations: Option<&'a RawValue>,
    #[serde(borrow)]
    managed_fields: Option<&'a RawValue>,
}

impl Object {
    /// Reads an object from the text that the API server sent.
    pub fn parse(text: &str) -> Result<Self, MalformedObject> {
        if depth(text) > DEPTH {
            return Err(MalformedObject::TooDeep);
        }
        let Parts { metadata, status } = serde_json::from_str(text)?;
        let mut hasher = DefaultHasher::new();
        for part in [metadata.labels, metadata.annotations, status] {
            part.map(RawValue::get).hash(&mut hasher);
        }
        let json = match metadata.managed_fields.and_then(|fields| field(text, "managedFields", fields)) {
            Some(Range { start, end }) => [&text[..start], &text[end..]].concat().into(),
            None => text.into(),
        };
        Ok(Self {
            key: ObjectKey::new(metadata.namespace.filter(|n| !n.is_empty()), metadata.name),
            uid: metadata.uid.into(),
            generation: metadata.generation,
            resource_version: metadata.resource_version.into(),
            deleting: metadata.deletion_timestamp.is_some(),
            rest: hasher.finish(),
            json,
        })
    }

    /// Keeps the names and the identity that both have only once.
    pub fn share(&mut self, other: &Object) {
        if self.key.namespace == other.key.namespace {
            self.key.namespace.clone_from(&other.key.namespace);
        }
        if self.key.name == other.key.name {
            self.key.name.clone_from(&other.key.name);
        }
        if self.uid == other.uid {
            self.uid.clone_from(&other.uid);
        }
    }

    /// The whole object as a value, for the rare reader of fields that are not kept parsed.
    pub fn value(&self) -> serde_json::Value {
        serde_json::from_str(&self.json.read()).expect("the text was parsed when the object was made")
    }

    /// Its labels.
    pub fn labels(&self) -> Labels {
        #[derive(Deserialize)]
        struct Parts {
            metadata: Meta,
        }
        #[derive(Deserialize)]
        struct Meta {
            labels: Option<Labels>,
        }
        // The API server has only texts for labels; whatever else a test has there is none.
        serde_json::from_str(&self.json.read()).ok().and_then(|Parts { metadata }| metadata.labels).unwrap_or_default()
    }

    /// Whether both say the same apart from the version. The API server encodes the same content the same way, so texts are compared.
    pub fn same_content(&self, other: &Object) -> bool {
        let (one, two) = (self.json.read(), other.json.read());
        one == two || content(&one) == content(&two)
    }

    /// The same object with its text packed.
    pub fn packed(&self, model: &Model) -> Self {
        Self { json: self.json.pack(model), ..self.clone() }
    }

    /// The same object with its text whole, for who reads it more than once.
    pub fn whole(self: Arc<Self>) -> Arc<Self> {
        if self.json.is_packed() { Arc::new(Self { json: self.json.unpack(), ..Self::clone(&self) }) } else { self }
    }

    /// Whether this is a later state than `other` of the same object. Resource versions are ordered numbers
    /// (KEP-5504, since Kubernetes 1.35); where one is not a number, any difference counts as later.
    pub fn newer_than(&self, other: &Object) -> bool {
        newer(&self.resource_version, &other.resource_version)
    }
}

/// Where a field of an object stands in a text, with the comma that belongs to it. `value` is its value, as a part of the text.
fn field(text: &str, name: &str, value: &RawValue) -> Option<Range<usize>> {
    let at = value.get().as_ptr().addr().checked_sub(text.as_ptr().addr())?;
    let (before, after) = (text.get(..at)?, text.get(at + value.get().len()..)?);
    let key = before.trim_end().strip_suffix(':')?.trim_end().strip_suffix('"')?.strip_suffix(name)?.strip_suffix('"')?;
    let next = after.trim_start();
    match (key.trim_end().strip_suffix(','), next.strip_prefix(',')) {
        (Some(before), _) => Some(before.len()..text.len() - after.len()),
        (None, Some(next)) => Some(key.len()..text.len() - next.len()),
        (None, None) => Some(key.len()..text.len() - after.len()),
    }
}

/// The fields of the metadata without the version, and all others.
fn content(object: &str) -> [BTreeMap<&str, &str>; 2] {
    let mut others = fields(object);
    let mut metadata = others.remove("metadata").map(fields).unwrap_or_default();
    metadata.remove("resourceVersion");
    [metadata, others]
}

/// The fields of a JSON object, each as its text.
fn fields(text: &str) -> BTreeMap<&str, &str> {
    let fields: BTreeMap<&str, &RawValue> = serde_json::from_str(text).expect("the text was parsed when the object was made");
    fields.into_iter().map(|(name, value)| (name, value.get())).collect()
}

/// Whether resource version `a` comes after `b`.
pub fn newer(a: &str, b: &str) -> bool {
    match (a.parse::<u64>(), b.parse::<u64>()) {
        (Ok(a), Ok(b)) => a > b,
        _ => a != b,
    }
}

/// How deep brackets nest in a JSON text, counted before it is parsed.
pub fn depth(text: &str) -> usize {
    let (mut now, mut most, mut rest) = (0_usize, 0, text.as_bytes());
    while let [byte, behind @ ..] = rest {
        rest = behind;
        match byte {
            b'"' => rest = behind_text(behind),
            b'{' | b'[' => {
                now += 1;
                most = most.max(now);
            }
            b'}' | b']' => now = now.saturating_sub(1),
            _ => {}
        }
    }
    most
}

/// What comes behind a text that has begun. Most of what is large is one, such as a component in a ConfigMap.
fn behind_text(mut rest: &[u8]) -> &[u8] {
    while let Some(at) = memchr::memchr2(b'"', b'\\', rest) {
        let escapes = rest[at] == b'\\';
        rest = rest.get(at + 1 + usize::from(escapes)..).unwrap_or_default();
        if !escapes {
            return rest;
        }
    }
    &[]
}

/// The value at a dotted path such as `status.phase`.
pub fn at<'v>(value: &'v serde_json::Value, path: &str) -> Option<&'v serde_json::Value> {
    path.split('.').try_fold(value, |value, field| value.get(field))
}

/// A label of an object.
pub fn label<'v>(value: &'v serde_json::Value, name: &str) -> Option<&'v str> {
    at(value, "metadata.labels")?.get(name)?.as_str()
}

/// An annotation of an object.
pub fn annotation<'v>(value: &'v serde_json::Value, name: &str) -> Option<&'v str> {
    at(value, "metadata.annotations")?.get(name)?.as_str()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_have_in_common_what_is_the_same_and_nothing_else() {
        let parse = |text: &str| Object::parse(text).expect("parses");
        let held = parse(r#"{"metadata":{"name":"n","namespace":"a","uid":"1"}}"#);
        let names = |object: &Object| [Some(object.key.name.clone()), object.key.namespace.clone(), Some(object.uid.clone())];
        for (text, common) in [
            (r#"{"metadata":{"name":"n","namespace":"a","uid":"1"}}"#, [true, true, true]),
            (r#"{"metadata":{"name":"n","namespace":"a","uid":"2"}}"#, [true, true, false]),
            (r#"{"metadata":{"name":"m","namespace":"a","uid":"3"}}"#, [false, true, false]),
            (r#"{"metadata":{"name":"m","uid":"3"}}"#, [false, false, false]),
        ] {
            let (apart, mut object) = (parse(text), parse(text));
            object.share(&held);
            assert_eq!(names(&object), names(&apart));
            let pairs = names(&object).into_iter().zip(names(&held));
            let found: Vec<bool> = pairs.map(|pair| matches!(pair, (Some(a), Some(b)) if Arc::ptr_eq(&a, &b))).collect();
            assert_eq!(found, common, "{text}");
        }
    }

    const TEXT: &str = r#"{"apiVersion":"a/v1","kind":"K","metadata":{"name":"n","namespace":"ns","uid":"u","generation":3,
        "resourceVersion":"12","managedFields":[{"manager":"x"}],"annotations":{"a":"\u00e9"}},"spec":{"big":9007199254740993,"one":1.0,"e":1e3}}"#;

    #[test]
    fn parse_drops_managed_fields_and_keeps_every_digit() {
        let object = Object::parse(TEXT).expect("parses");
        assert_eq!((object.key.to_string().as_str(), &*object.uid, object.generation), ("ns/n", "u", 3));
        assert!(!object.json.read().contains("managedFields"));
        assert!(object.json.read().contains(r#"{"big":9007199254740993,"one":1.0,"e":1e3}"#), "{object:?}");
        assert!(!object.deleting);
    }

    #[test]
    fn managed_fields_go_wherever_they_stand_and_nothing_else_does() {
        for (metadata, left) in [
            (r#"{"managedFields":[{"a":"}],"}],"name":"n"}"#, r#"{"name":"n"}"#),
            (r#"{"name":"n","managedFields":[]}"#, r#"{"name":"n"}"#),
            (r#"{ "name":"n" , "managedFields" : [ ] , "uid":"u"}"#, r#"{ "name":"n"  , "uid":"u"}"#),
            (r#"{"name":"n","annotations":{"a":"\"managedFields\":[],"}}"#, r#"{"name":"n","annotations":{"a":"\"managedFields\":[],"}}"#),
        ] {
            let text = |metadata: &str| format!(r#"{{"managedFields":[],"metadata":{metadata},"spec":{{"managedFields":[1]}}}}"#);
            let object = Object::parse(&text(metadata)).expect("parses");
            assert_eq!(object.json.read(), text(left));
            assert!(object.value()["spec"].is_object());
        }
    }

    #[test]
    fn the_rest_is_labels_annotations_and_status() {
        let text = r#"{"metadata":{"name":"n","generation":1,"labels":{"a":"b"},"annotations":{"c":"d"},"managedFields":[]},"spec":1,"status":{"e":2}}"#;
        let rest = |text: &str| Object::parse(text).expect("parses").rest;
        for (from, to, same) in [
            (r#""a":"b""#, r#""a":"c""#, false),
            (r#""c":"d""#, "", false),
            (r#""e":2"#, r#""e":3"#, false),
            (r#""labels":{"a":"b"},"annotations":{"c":"d"}"#, r#""annotations":{"a":"b"},"labels":{"c":"d"}"#, false),
            (r#""spec":1"#, r#""spec":2"#, true),
            ("[]", "[{}]", true),
            (r#""generation":1"#, r#""generation":2"#, true),
        ] {
            assert_eq!(rest(text) == rest(&text.replace(from, to)), same, "{to}");
        }
    }

    #[test]
    fn the_content_is_everything_but_the_version() {
        let object = Object::parse(TEXT).expect("parses");
        let with = |from: &str, to: &str| Object::parse(&TEXT.replace(from, to)).expect("parses");
        assert!(object.same_content(&with(r#""12""#, r#""13""#)) && object.same_content(&with(r#""x""#, r#""y""#)));
        for (from, to) in
            [("1.0", "1.1"), (r#""a":"#, r#""b":"#), (r#""generation":3"#, r#""generation":4"#), (r#""uid":"u""#, r#""uid":"v""#)]
        {
            assert!(!object.same_content(&with(from, to)), "{to}");
        }
    }

    #[test]
    fn labels_are_read_off_the_text() {
        let object = Object::parse(r#"{"metadata":{"name":"n","labels":{"a":"b"}}}"#).expect("parses");
        assert_eq!(object.labels(), Labels::from([("a".into(), "b".into())]));
        assert!(Object::parse(TEXT).expect("parses").labels().is_empty());
    }

    #[test]
    fn resource_versions_compare_as_numbers_and_else_by_difference() {
        assert!(newer("10", "9"));
        assert!(!newer("9", "10"));
        assert!(newer("a", "b") && newer("b", "a") && !newer("a", "a"));
    }

    #[test]
    fn depth_counts_brackets_outside_of_texts() {
        for (text, expected) in [("{}", 1), (r#"{"a":[{"b":"]}{[\"{"}]}"#, 3), ("7", 0), ("[[],[[]]]", 3), (r#""\\"[["#, 2)] {
            assert_eq!(depth(text), expected, "{text}");
        }
    }

    #[test]
    fn what_was_parsed_can_be_read_as_a_value_however_deep_it_nests() {
        let nested = |levels: usize| format!(r#"{{"metadata":{{"name":"n"}},"spec":{}{}}}"#, "[".repeat(levels), "]".repeat(levels));
        for levels in [1, DEPTH - 1, DEPTH, 127, 128, 10_000] {
            match Object::parse(&nested(levels)) {
                Ok(object) => assert!(object.value()["spec"].is_array(), "{levels}"),
                Err(error) => assert!(levels >= DEPTH && matches!(error, MalformedObject::TooDeep), "{levels}: {error}"),
            }
        }
    }

    #[test]
    fn an_object_without_a_name_is_malformed() {
        assert!(Object::parse(r#"{"metadata":{}}"#).is_err());
        assert!(Object::parse("<html>").is_err());
    }

    #[test]
    fn the_mark_of_a_kind_never_changes() {
        let kind = GroupKind { group: "batch.acme.io".into(), kind: "ReportJob".into() };
        assert_eq!(kind.mark(), "bd74272ff9");
        assert_ne!(kind.mark(), GroupKind { kind: "ReportJobs".into(), ..kind.clone() }.mark());
    }

    #[test]
    fn paths_are_of_the_kind_and_scope() {
        let kind = Kind { group: "g".into(), version: "v1".into(), kind: "K".into(), plural: "ks".into(), namespaced: true };
        assert_eq!(kind.object_path(&ObjectKey::new(Some("n"), "o")), "/apis/g/v1/namespaces/n/ks/o");
        assert_eq!(kind.collection_path(None), "/apis/g/v1/ks");
    }
}
