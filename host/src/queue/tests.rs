//! Tests of the queue: its rules one by one, its laws under random use, and the asynchronous shell.

mod laws;
mod rules;
mod shell;

use std::time::Duration;

use super::{state::State, *};
use crate::object::ObjectKey;

fn kind(name: &str) -> GroupKind {
    GroupKind { group: "test".into(), kind: name.into() }
}

fn key(kind_name: &str, name: &str) -> Key {
    Key { kind: kind(kind_name), object: ObjectKey::new(Some("t1"), name) }
}

fn pace(concurrency: usize) -> Pace {
    Pace { concurrency, backoff_base: seconds(1), backoff_max: seconds(300) }
}

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn fail() -> Then {
    Then::Fail { cause: "no".into(), after: None }
}
