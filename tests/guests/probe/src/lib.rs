//! A guest that does what the object's `spec.do` (or else the settings' `do`) says: one component for every way to behave.
//!
//! What it claims lies in the bytes of the component: [`CLAIM`] is a slot of fixed length that a test overwrites with JSON of
//! the same length, so one build serves every claim too.
#![cfg(target_family = "wasm")]
#![allow(missing_docs, unsafe_code, reason = "generated bindings")]

mod behaviour;
mod claim;
mod hoard;
mod http;

wit_bindgen::generate!({ path: "../../../wit", world: "reconciler" });

use exports::berth::plugin::handler::{Claim, Guest, Outcome, Request};

struct Probe;

impl Guest for Probe {
    fn describe() -> Claim {
        claim::describe()
    }

    fn reconcile(request: Request) -> Outcome {
        behaviour::reconcile(&request)
    }
}

export!(Probe);
