//! The CustomResourceDefinition of a resource, off wasm.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{CustomResourceDefinition, JSON, JSONSchemaProps, ValidationRule};
use kube_core::CustomResourceExt;

/// The rules that the API server checks of the whole object, as expression and sentence. `#[resource]` implements it.
pub trait Rules {
    /// Expressions with their sentences.
    const RULES: &'static [(&'static str, &'static str)];
}

/// The CRD of a resource: kube's, with the rules of `#[resource]`, and with a status that shows its defaults before it is written.
///
/// # Panics
/// Where the derived CRD has no version with a schema, which kube does not make.
pub fn crd<R: Rules + CustomResourceExt>() -> CustomResourceDefinition {
    let mut crd = R::crd();
    let version = crd.spec.versions.first_mut().expect("kube derives one version");
    let schema = version.schema.as_mut().and_then(|schema| schema.open_api_v3_schema.as_mut()).expect("kube derives its schema");
    schema.description = None;
    if !R::RULES.is_empty() {
        let rule = |(rule, sentence): &(&str, &str)| ValidationRule {
            rule: (*rule).to_owned(),
            message: Some((*sentence).to_owned()),
            ..ValidationRule::default()
        };
        schema.x_kubernetes_validations.get_or_insert_default().extend(R::RULES.iter().map(rule));
    }
    if let Some(status) = schema.properties.as_mut().and_then(|properties| properties.get_mut("status")) {
        // A default is applied only within something that is there.
        let has_defaults = status.properties.as_ref().is_some_and(|fields| fields.values().any(|field| field.default.is_some()));
        if has_defaults {
            status.default = Some(JSON(serde_json::json!({})));
        }
    }
    tidy(schema);
    crd
}

/// Rust's line breaks in a doc comment are no paragraphs.
fn tidy(schema: &mut JSONSchemaProps) {
    if let Some(text) = &mut schema.description {
        *text = text.replace("\n\n", "\u{0}").replace('\n', " ").replace('\u{0}', "\n\n");
    }
    schema.properties.iter_mut().flat_map(|properties| properties.values_mut()).for_each(tidy);
}

/// Checks that a file holds the CRD of a resource, and writes it where the environment has `UPDATE_CRDS=1`: a test that keeps the
/// file current.
///
/// ```no_run
/// # use berth_sdk::prelude::*;
/// # #[resource(group = "demo.acme.io", version = "v1", kind = "Greeting", namespaced, status = GreetingStatus)]
/// # pub struct GreetingSpec { pub name: String }
/// # #[data]
/// # pub struct GreetingStatus { pub text: Option<String> }
/// berth_sdk::crd::check::<Greeting>(concat!(env!("CARGO_MANIFEST_DIR"), "/greetings.demo.acme.io.yaml"));
/// ```
///
/// # Panics
/// Where the file does not hold it, with the command that makes it, or cannot be written.
pub fn check<R: Rules + CustomResourceExt>(path: &str) {
    let crd = serde_json::to_value(crd::<R>()).expect("a CRD is JSON");
    let yaml = serde_saphyr::to_string(&crd).expect("JSON is YAML");
    let expected = format!("# Written from the Rust types by `UPDATE_CRDS=1 cargo test crd`.\n{yaml}");
    if std::env::var_os("UPDATE_CRDS").is_some_and(|set| set == "1") {
        std::fs::write(path, &expected).unwrap_or_else(|error| panic!("cannot write {path}: {error}"));
    }
    let found = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        found == expected,
        "{path} is not the CRD of the Rust types: run `UPDATE_CRDS=1 cargo test crd`, look at the difference, and commit it"
    );
}
