//! The world of a handler on wasm: WIT. Nothing outside this file and `wasi.rs` knows of it.

use std::{cell::Cell, marker::PhantomData, time::Duration};

use crate::{
    action::Event,
    claim::{self, Describe, SDK},
    context::{Context, Level, ReadError},
    http::{Fault, Outgoing, Response},
    resource::Kind,
    run::{self, Reconciler},
    time::Timestamp,
    wasi,
};

/// What `wit-bindgen` makes of `wit/`.
#[allow(unsafe_code, missing_docs, clippy::all, reason = "generated")]
pub mod bindings {
    wit_bindgen::generate!({
        path: "../wit",
        world: "reconciler",
        pub_export_macro: true,
        export_macro_name: "export",
        generate_all,
    });
}

use bindings::{
    berth::plugin::{cluster, log, types},
    exports::berth::plugin::handler,
};

/// A handler as a component.
pub struct Component<R>(PhantomData<R>);

impl<R: Reconciler + Describe> handler::Guest for Component<R> {
    fn describe() -> types::Claim {
        claim(&R::CLAIM)
    }

    fn reconcile(request: types::Request) -> types::Outcome {
        std::panic::set_hook(Box::new(|panic| log::emit(log::Level::Error, &panic.to_string(), &[])));
        let ctx = Context {
            settings: request.settings,
            idempotency_key: request.idempotency_key,
            attempt: request.attempt,
            last_failure: request.last_failure,
            keyed_requests: Cell::new(0),
            world: World,
        };
        outcome(run::run::<R>(&request.object, request.phase == types::Phase::Finalize, &ctx))
    }
}

/// Where effects and reads go: the host.
pub(crate) struct World;

impl World {
    pub fn now(&self) -> Timestamp {
        Timestamp::now()
    }

    pub fn log(&self, level: Level, message: &str, fields: Vec<(String, String)>) {
        let level = match level {
            Level::Debug => log::Level::Debug,
            Level::Info => log::Level::Info,
            Level::Warn => log::Level::Warn,
            Level::Error => log::Level::Error,
        };
        log::emit(level, message, &fields);
    }

    pub fn send(&self, outgoing: Outgoing) -> Result<Response, Fault> {
        wasi::send(outgoing)
    }

    pub fn get(&self, kind: &Kind, namespace: Option<&str>, name: &str) -> Result<Option<String>, ReadError> {
        let target = types::ObjectRef {
            group: kind.group.to_owned(),
            version: kind.version.to_owned(),
            kind: kind.kind.to_owned(),
            namespace: namespace.map(str::to_owned),
            name: name.to_owned(),
        };
        cluster::get(&target).map_err(read_error)
    }

    pub fn list(
        &self,
        kind: &Kind,
        namespace: Option<&str>,
        labels: &str,
        next: Option<String>,
    ) -> Result<(Vec<String>, Option<String>), ReadError> {
        let page = cluster::list(&wit_kind(kind), namespace, labels, 0, next.as_deref()).map_err(read_error)?;
        Ok((page.items, page.continue_))
    }
}

fn read_error(error: cluster::ReadError) -> ReadError {
    match error {
        cluster::ReadError::Forbidden(sentence) => ReadError::Forbidden(sentence),
        cluster::ReadError::NotSynced => ReadError::NotSynced,
        cluster::ReadError::Other(sentence) => ReadError::Other(sentence),
    }
}

fn wit_kind(kind: &Kind) -> types::Kind {
    types::Kind {
        group: kind.group.to_owned(),
        version: kind.version.to_owned(),
        kind: kind.kind.to_owned(),
        plural: kind.plural.to_owned(),
        namespaced: kind.namespaced,
    }
}

fn claim(claim: &claim::Claim) -> types::Claim {
    let texts = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
    types::Claim {
        reconciles: wit_kind(&claim.reconciles),
        progress: claim.progress.map(|progress| types::Progress {
            phase_field: progress.phase_field.to_owned(),
            settled: texts(progress.settled),
            mirror_label: progress.mirror_label.map(str::to_owned),
        }),
        dead_letter: claim.dead_letter.map(|dead_letter| types::DeadLetter {
            after: dead_letter.after,
            phase: dead_letter.phase.to_owned(),
            retries_field: dead_letter.retries_field.map(str::to_owned),
            message_field: dead_letter.message_field.to_owned(),
        }),
        priority_field: claim.priority_field.map(str::to_owned),
        reads: claim.reads.iter().map(read).collect(),
        owns: claim.owns.iter().map(wit_kind).collect(),
        hosts: texts(claim.hosts),
        finalizer: claim.finalizer,
        label_prefixes: texts(claim.label_prefixes),
        sdk: SDK.to_owned(),
        extensions: Vec::new(),
    }
}

fn read(read: &claim::Read) -> types::Read {
    types::Read {
        kind: wit_kind(&read.kind),
        reach: if read.all_namespaces { types::Reach::AllNamespaces } else { types::Reach::SameNamespace },
        label_selector: read.label_selector.to_owned(),
    }
}

fn outcome(outcome: run::Outcome) -> types::Outcome {
    let run::Outcome { status, labels, children, events, next } = outcome;
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    types::Outcome {
        status,
        labels,
        children,
        events: events.into_iter().map(event).collect(),
        next: match next {
            run::Next::AwaitChange => types::Next::AwaitChange,
            run::Next::After(after) => types::Next::AfterMs(millis(after)),
            run::Next::Retry(cause) => types::Next::Retry(cause),
            run::Next::RetryAfter(delay, cause) => types::Next::RetryAfterMs((millis(delay), cause)),
            run::Next::GiveUp(cause) => types::Next::GiveUp(cause),
        },
        extensions: Vec::new(),
    }
}

fn event(event: Event) -> types::Event {
    let Event { warning, reason, action, note } = event;
    types::Event { kind: if warning { types::EventType::Warning } else { types::EventType::Normal }, reason, action, note }
}
