//! One run of a guest: a fresh store, its limits, and what it means when the call ends badly.

use std::sync::Arc;

use tokio::time::Instant;
use wasmtime::{
    Engine, ResourceLimiter, Store, Trap, UpdateDeadline,
    component::{Linker, ResourceTable, ResourceTableError},
};
use wasmtime_wasi::{I32Exit, WasiCtx, WasiCtxView, WasiView};
use wasmtime_wasi_http::{WasiHttpCtx, WasiHttpCtxView, WasiHttpView};

use super::{
    bindings::Reconciler,
    capability::{
        cluster::Reads,
        gate::Gate,
        http::{Hooks, Outlet},
        log::{Lines, Log, Stream},
        sockets,
    },
    limits::{self, Limits, Size, shape},
    meter::{Meter, Metered},
};
use crate::reconcile::Failure;

/// What belongs to one run and dies with it.
pub struct State {
    pub(super) gate: Arc<Gate>,
    pub(super) reads: Reads,
    table: ResourceTable,
    wasi: WasiCtx,
    http: WasiHttpCtx,
    hooks: Hooks,
    quota: Quota,
}

impl WasiView for State {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        WasiCtxView { ctx: &mut self.wasi, table: &mut self.table }
    }
}

impl WasiHttpView for State {
    fn http(&mut self) -> WasiHttpCtxView<'_> {
        WasiHttpCtxView { ctx: &mut self.http, table: &mut self.table, hooks: &mut self.hooks }
    }
}

/// Everything that a guest can import. WASI is linked whole, because some languages import all of it whether they use it or not;
/// what it reaches is nothing but clocks and random numbers, and what asks for more is told so by the gate.
pub fn linker(engine: &Engine) -> wasmtime::Result<Linker<State>> {
    let mut linker = Linker::new(engine);
    wasmtime_wasi::p2::add_to_linker_async(&mut linker)?;
    sockets::add_to_linker(&mut linker)?;
    wasmtime_wasi_http::p2::add_only_http_to_linker_async(&mut linker)?;
    Reconciler::add_to_linker::<_, wasmtime::component::HasSelf<State>>(&mut linker, |state| state)?;
    Ok(linker)
}

/// A store for one run.
pub struct Sandbox {
    store: Store<State>,
    meter: Arc<Meter>,
    limits: Limits,
}

impl Sandbox {
    /// A fresh one.
    pub fn new(engine: &Engine, limits: Limits, gate: Arc<Gate>, outlet: Option<Outlet>, reads: Reads) -> Self {
        let mut table = ResourceTable::new();
        // A handle of the guest may stand on two entries here: a pollable and what it waits for.
        table.set_max_capacity(2 * limits::HANDLES);
        let state = State {
            wasi: wasi(gate.log()),
            hooks: Hooks::new(gate.clone(), limits, outlet),
            gate,
            reads,
            table,
            http: WasiHttpCtx::new(),
            quota: Quota::new(limits.memory),
        };
        let mut store = Store::new(engine, state);
        store.limiter(|state| &mut state.quota);
        store.set_hostcall_fuel(limits::HOST_CALL_BYTES);
        store.set_max_component_handles(limits::HANDLES);
        store.set_epoch_deadline(1);
        let meter = Meter::new(limits.cpu);
        let seen = meter.clone();
        store.epoch_deadline_callback(move |_| {
            if seen.is_spent() {
                return Err(CpuSpent.into());
            }
            // Not `Yield`: that wakes itself at once and starves tokio's timers.
            Ok(UpdateDeadline::YieldCustom(1, Box::pin(tokio::task::yield_now())))
        });
        Self { store, meter, limits }
    }

    /// Runs a call in it to its end. Dropping the future stops the guest and aborts its requests.
    pub async fn run<T>(self, call: impl AsyncFnOnce(&mut Store<State>) -> wasmtime::Result<T> + Send) -> Ended<T> {
        let Self { mut store, meter, limits } = self;
        let result = Metered { meter, call: Box::pin(call(&mut store)) }.await;
        let state = store.data();
        let exceeded = state.hooks.exceeded();
        match result {
            Ok(value) => Ended::Returned(value, exceeded),
            Err(error) => Ended::Failed(cause(&error, state, limits, exceeded)),
        }
    }
}

/// How a call ended.
pub enum Ended<T> {
    /// With a value, and where a limit of HTTP was reached on the way, a sentence about it.
    Returned(T, Option<String>),
    /// Without one.
    Failed(Failure),
}

/// The sentence for a call that took too long.
pub fn too_long(limits: &Limits) -> Failure {
    Failure::Deadline(format!("the call took longer than its limit of {:?}{}", limits.timeout, limits.how("timeout")))
}

/// When a call that starts now has to be over.
pub fn deadline(limits: &Limits) -> Instant {
    Instant::now() + limits.timeout
}

/// No file, no socket, no environment, no arguments.
fn wasi(log: &Arc<Log>) -> WasiCtx {
    let lines = |stream| Lines { log: log.clone(), stream };
    WasiCtx::builder()
        .stdout(lines(Stream::Stdout))
        .stderr(lines(Stream::Stderr))
        .allow_tcp(false)
        .allow_udp(false)
        .allow_ip_name_lookup(false)
        .max_random_size(limits::RANDOM_BYTES)
        .build()
}

/// The CPU budget is spent.
#[derive(Debug, thiserror::Error)]
#[error("the CPU budget is spent")]
struct CpuSpent;

/// Turns the error of a call into the sentence that the object's status shows.
fn cause(error: &wasmtime::Error, state: &State, limits: Limits, exceeded: Option<String>) -> Failure {
    if error.is::<CpuSpent>() {
        return Failure::Limit(format!("the handler used more than its limit of {:?} of CPU{}", limits.cpu, limits.how("cpu")));
    }
    if state.quota.refused {
        let memory = Size(limits.memory);
        return Failure::Limit(format!("the handler needs more than its memory limit of {memory}{}", limits.how("memory")));
    }
    if state.quota.refused_table {
        let elements = shape::TABLE_ELEMENTS;
        return Failure::Limit(format!("the handler needs a table of more than the {elements} elements that a component may have"));
    }
    if let Some(sentence) = exceeded {
        return Failure::Limit(sentence);
    }
    if matches!(error.downcast_ref(), Some(ResourceTableError::Full)) || says(error, "handles") {
        return Failure::Limit(format!(
            "the handler holds more than the {} handles that a run may have: drop those it is done with",
            limits::HANDLES
        ));
    }
    if says(error, "fuel allocated for hostcalls") {
        let most = Size(limits::HOST_CALL_BYTES as u64);
        return Failure::Limit(format!("the handler handed over more than the {most} of data that one call may have"));
    }
    if let Some(I32Exit(code)) = error.downcast_ref() {
        return Failure::Trap(with_last_words(format!("it called exit({code})"), state));
    }
    match error.downcast_ref::<Trap>() {
        Some(Trap::StackOverflow) => {
            Failure::Trap(format!("call stack exhausted (the limit is {}; recurse less)", Size(limits::STACK as u64)))
        }
        Some(Trap::MemoryOutOfBounds) => {
            let trap = "out of bounds memory access, perhaps a recursion too deep for the stack that its compiler gave it";
            Failure::Trap(with_last_words(trap.into(), state))
        }
        Some(trap) => Failure::Trap(with_last_words(trap.to_string(), state)),
        None => Failure::Trap(with_last_words(error.root_cause().to_string(), state)),
    }
}

/// The guest's own words say more than the trap; without any, the trap has to do.
fn with_last_words(trap: String, state: &State) -> String {
    state.gate.log().last_words().unwrap_or_else(|| super::text::shorten(&super::text::one_line(&trap), limits::SENTENCE))
}

/// For errors of wasmtime that have no public type.
fn says(error: &wasmtime::Error, words: &str) -> bool {
    error.chain().any(|cause| cause.to_string().contains(words))
}

/// Linear memory and tables of a store, all together.
struct Quota {
    left: usize,
    refused: bool,
    refused_table: bool,
}

impl Quota {
    fn new(memory: u64) -> Self {
        Self { left: usize::try_from(memory).unwrap_or(usize::MAX), refused: false, refused_table: false }
    }
}

impl ResourceLimiter for Quota {
    fn memory_growing(&mut self, current: usize, desired: usize, _maximum: Option<usize>) -> wasmtime::Result<bool> {
        match self.left.checked_sub(desired.saturating_sub(current)) {
            Some(left) => {
                self.left = left;
                Ok(true)
            }
            None => {
                self.refused = true;
                Ok(false)
            }
        }
    }

    fn table_growing(&mut self, _current: usize, desired: usize, _maximum: Option<usize>) -> wasmtime::Result<bool> {
        let fits = desired <= shape::TABLE_ELEMENTS;
        self.refused_table |= !fits;
        Ok(fits)
    }

    fn instances(&self) -> usize {
        shape::CORE_INSTANCES as usize
    }

    fn tables(&self) -> usize {
        shape::TABLES as usize
    }

    fn memories(&self) -> usize {
        shape::MEMORIES as usize
    }
}
