//! Write the reconcile handler of a Kubernetes custom resource; Berth does the rest.
//!
//! A handler is a plugin: one WebAssembly component that Berth runs in a sandbox. Berth watches the objects, queues and paces the runs,
//! accounts for failures and writes the status.
//!
//! ```
//! use berth_sdk::prelude::*;
//!
//! /// Asks for one mail.
//! #[resource(group = "notify.acme.io", version = "v1", kind = "EmailRequest", namespaced, status = EmailStatus)]
//! pub struct EmailSpec {
//!     /// Whom to send it to.
//!     #[rule("self.contains('@')", "to must be a mail address")]
//!     #[schemars(length(max = 254))]
//!     pub to: String,
//! }
//!
//! #[data]
//! #[derive(Default)]
//! pub struct EmailStatus {
//!     pub phase: Option<String>,
//!     pub observed_generation: Option<i64>,
//!     pub message: Option<String>,
//! }
//!
//! pub struct Mailer;
//!
//! #[reconciler(progress(settled = ["Sent", "Failed"]), dead_letter(), hosts("$settings.gateway"))]
//! impl Reconciler for Mailer {
//!     type Object = EmailRequest;
//!
//!     fn reconcile(mail: &EmailRequest, ctx: &Context) -> Result<Action, Error> {
//!         http::post(ctx, format!("{}/send", ctx.setting("gateway")?)).idempotency_key().json(&mail.spec).send()?;
//!         Ok(Action::await_change().status(EmailStatus { phase: Some("Sent".into()), ..EmailStatus::default() }))
//!     }
//! }
//!
//! // What `cargo test` can do natively, without a cluster or a sandbox:
//! let ctx = testing::Script::new().setting("gateway", "http://mail").respond(|_| Ok(testing::Response::new(202))).context();
//! let object = testing::json!({ "metadata": { "name": "a" }, "spec": { "to": "a@example.com" }, "status": { "foreign": 1 } });
//! let outcome = testing::reconcile::<Mailer>(&object, &ctx);
//! assert_eq!(outcome.next, testing::Next::AwaitChange);
//! assert_eq!(outcome.status.as_deref(), Some(r#"{"foreign":1,"phase":"Sent"}"#));
//! assert_eq!(ctx.sent()[0].header("Idempotency-Key"), Some(r#""tests.example/default/test/uid""#));
//! ```
//!
//! Build it with `cargo build --target wasm32-wasip2 --release`, and give it to Berth with `berth push`. `docs/first-plugin.md` goes
//! through it step by step.

mod action;
mod child;
pub mod claim;
mod condition;
mod context;
#[cfg(not(target_family = "wasm"))]
pub mod crd;
mod error;
#[cfg(target_family = "wasm")]
mod guest;
pub mod http;
mod json;
#[cfg(not(target_family = "wasm"))]
mod memory;
mod resource;
mod run;
mod time;
#[cfg(target_family = "wasm")]
mod wasi;

// Lets the paths that the macros write be the same within this crate.
extern crate self as berth_sdk;

#[cfg(target_family = "wasm")]
use guest as world;
#[cfg(not(target_family = "wasm"))]
use memory as world;

pub use action::{Action, Event, to_json};
pub use berth_sdk_macros::{data, reconciler, resource};
pub use child::Child;
pub use condition::{Condition, Conditions};
pub use context::{Context, Level, ReadError};
pub use error::{Error, OrFail, Verdict};
pub use json::from_json;
pub use resource::{Kind, Metadata, Readable, Resource, Status};
pub use run::Reconciler;
pub use serde_json::json;
pub use time::Timestamp;

/// What most handlers use.
pub mod prelude {
    #[cfg(not(target_family = "wasm"))]
    pub use crate::testing;
    pub use crate::{
        Action, Child, Condition, Conditions, Context, Error, Event, OrFail, Reconciler, Resource, Timestamp, Verdict, data, http,
        reconciler, resource,
    };
}

/// Runs handlers natively against a world in memory.
#[cfg(not(target_family = "wasm"))]
pub mod testing {
    pub use serde_json::{Value, from_slice, from_str, json};

    pub use crate::{
        context::ReadError,
        http::{Fault, Outgoing, Response},
        memory::{Line, Script, finalize, reconcile},
        run::{Next, Outcome},
    };
}

/// For the macros alone.
#[doc(hidden)]
pub mod __private {
    pub use serde;
    pub use serde_json;

    #[cfg(target_family = "wasm")]
    pub use crate::guest::{Component, bindings, bindings::export};

    #[cfg(not(target_family = "wasm"))]
    pub use {k8s_openapi, schemars};

    /// What kube's derive expects under one name.
    #[cfg(not(target_family = "wasm"))]
    pub mod kube {
        pub use kube_core as core;
        pub use kube_derive::CustomResource;
    }
}
