//! The attribute macros of `berth-sdk`, which re-exports and documents them.

use proc_macro::TokenStream;

mod data;
mod reconciler;
mod resource;

/// Turns a struct into the spec of a resource, and makes the type of the resource.
///
/// ```ignore
/// #[resource(group = "notify.acme.io", version = "v1", kind = "EmailRequest", namespaced, status = EmailStatus)]
/// pub struct EmailSpec { pub to: String }
/// ```
///
/// | argument | meaning |
/// |---|---|
/// | `group`, `version`, `kind` | as in `apiVersion` and `kind` |
/// | `plural` | resource name; derived from the kind where it is not given |
/// | `namespaced` | objects live in namespaces |
/// | `status` | the type of the status, itself `#[data]` |
/// | `shortname`, `category` | for kubectl; may be repeated |
/// | `column("NAME", ".status.field", "string")` | a column of `kubectl get`; may be repeated; AGE follows by itself |
/// | `rule("CEL", "sentence")` | what the API server checks of the whole object; may be repeated |
///
/// Fields take what they take under [`macro@data`].
#[proc_macro_attribute]
pub fn resource(args: TokenStream, item: TokenStream) -> TokenStream {
    resource::expand(args.into(), item.into()).unwrap_or_else(syn::Error::into_compile_error).into()
}

/// Derives what a type within a spec or status needs: serde with `camelCase` fields, `Clone`, `Debug`, `PartialEq`, and the
/// schema of the CRD.
///
/// An `Option` that is `None` is not written. A field may carry `#[rule("CEL", "sentence")]`, which the API server checks, and
/// `#[schemars(…)]`, such as `#[schemars(length(min = 1, max = 64))]`; both concern the CRD alone. `#[serde(…)]` is obeyed.
#[proc_macro_attribute]
pub fn data(args: TokenStream, item: TokenStream) -> TokenStream {
    data::expand(args.into(), item.into()).unwrap_or_else(syn::Error::into_compile_error).into()
}

/// Exports an `impl Reconciler` as a plugin, with its claim.
///
/// | argument | meaning |
/// |---|---|
/// | `progress(settled = ["Done", "Failed"], phase = "status.phase", mirror_label = "acme.io/phase")` | how the status tells that a version of the spec is finished; `phase` is `status.phase` where it is not given |
/// | `dead_letter(after = 5, phase = "Failed", retries = "status.retries", message = "status.message")` | lets the host account for failures; without `after` only a `give_up` ends the runs; the others are as shown where not given |
/// | `priority = "spec.priority"` | higher runs first |
/// | `hosts("https://mail.example.com", "$settings.gateway")` | where it sends HTTP requests |
/// | `read(ConfigMap, all_namespaces, selector = "app=x")` | what it reads, by a type that is `Readable`: in the object's own namespace, or in all; may be repeated, once a kind |
/// | `owns(Job)` | kinds of its children; may be repeated |
/// | `finalizer` | wants `finalize` runs; the `impl` needs a `finalize` then, and only then |
/// | `label_prefixes("acme.io/")` | labels that it sets |
#[proc_macro_attribute]
pub fn reconciler(args: TokenStream, item: TokenStream) -> TokenStream {
    reconciler::expand(args.into(), item.into()).unwrap_or_else(syn::Error::into_compile_error).into()
}
