//! One run of a guest: a fresh store, its limits, and what it means when the call ends badly.

use std::{sync::Arc, time::Duration};

use futures::future::BoxFuture;
use tokio::time::Instant;
use wasmtime::{
    Engine, ResourceLimiter, Store, Trap, UpdateDeadline,
    component::{Linker, ResourceTable, ResourceTableError},
};
use wasmtime_wasi::{I32Exit, WasiCtx, WasiCtxView, WasiView};
use wasmtime_wasi_http::{WasiHttpCtx, WasiHttpCtxView, WasiHttpView};

use super::{
    bindings::Reconciler,
    call::{Call, Wish},
    capability::{
        cluster::Reads,
        gate::Gate,
        http::{Hooks, Life, Met, Outlet, head},
        log::{Lines, Log, Stream},
        sockets,
    },
    engine::Running,
    limits::{self, FIXED, Limits, Size, shape},
    meter::Meter,
    shares::Admitted,
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

impl State {
    /// Takes what the host keeps for the guest from the guest's memory.
    pub(super) fn keep(&mut self, bytes: usize) -> wasmtime::Result<()> {
        if self.quota.take(bytes) { Ok(()) } else { Err(MemorySpent.into()) }
    }

    /// What the functions of `wasi:http` work on.
    pub(super) fn for_http(&mut self) -> WasiHttpCtxView<'_> {
        WasiHttpCtxView { ctx: &mut self.http, table: &mut self.table, hooks: &mut self.hooks }
    }
}

impl WasiView for State {
    fn ctx(&mut self) -> WasiCtxView<'_> {
        WasiCtxView { ctx: &mut self.wasi, table: &mut self.table }
    }
}

impl WasiHttpView for State {
    fn http(&mut self) -> WasiHttpCtxView<'_> {
        self.for_http()
    }
}

/// Everything that a guest can import. WASI is linked whole, because some languages import all of it whether they use it or not;
/// what it reaches is nothing but clocks and random numbers, and what asks for more is told so by the gate.
pub fn linker(engine: &Engine) -> wasmtime::Result<Linker<State>> {
    let mut linker = Linker::new(engine);
    wasmtime_wasi::p2::add_to_linker_async(&mut linker)?;
    sockets::add_to_linker(&mut linker)?;
    wasmtime_wasi_http::p2::add_only_http_to_linker_async(&mut linker)?;
    head::add_to_linker(&mut linker)?;
    Reconciler::add_to_linker::<_, wasmtime::component::HasSelf<State>>(&mut linker, |state| state)?;
    Ok(linker)
}

/// A guest that has computed for no longer than this since it last waited is not interrupted: half an epoch.
const LITTLE: Duration = Duration::from_millis(1);

/// A store for one run.
pub struct Sandbox {
    store: Store<State>,
    life: Life,
    meter: Arc<Meter>,
    wish: Arc<Wish>,
    limits: Limits,
}

impl Sandbox {
    /// A fresh one.
    pub fn new(engine: &Running, limits: Limits, gate: Arc<Gate>, outlet: Option<Outlet>, reads: Reads) -> Self {
        let mut table = ResourceTable::new();
        // A handle of the guest may stand on two entries here: a pollable and what it waits for.
        table.set_max_capacity(2 * limits.run.handles);
        let life = Life::default();
        let mut http = WasiHttpCtx::new();
        http.set_field_size_limit(limits::HEADERS);
        let state = State {
            wasi: wasi(gate.log()),
            hooks: Hooks::new(gate.clone(), limits, outlet, &life),
            gate,
            reads,
            table,
            http,
            quota: Quota::new(limits.memory),
        };
        let mut store = Store::new(&engine.engine, state);
        store.limiter(|state| &mut state.quota);
        store.set_hostcall_fuel(limits.run.host_call);
        store.set_max_component_handles(limits.run.handles);
        store.set_epoch_deadline(1);
        let (meter, wish) = (Meter::new(limits.cpu), Arc::<Wish>::default());
        let (seen, wishes) = (meter.clone(), wish.clone());
        store.epoch_deadline_callback(move |_| {
            if seen.is_spent() {
                return Err(CpuSpent.into());
            }
            // The epochs went by while it waited, or others computed.
            if !seen.computes_for(LITTLE) {
                return Ok(UpdateDeadline::Continue(1));
            }
            Ok(UpdateDeadline::YieldCustom(1, Box::pin(wishes.clone().for_a_core())))
        });
        Self { store, life, meter, wish, limits }
    }

    /// Runs a call in it to its end, with the place among the sandboxes that it was admitted to. When the future is dropped, the guest
    /// ends with all its requests, where it computes within an epoch; it can begin none from then on.
    pub async fn run<T: Send + 'static>(
        self,
        engine: &Running,
        admitted: Admitted,
        call: impl for<'s> FnOnce(&'s mut Store<State>) -> BoxFuture<'s, wasmtime::Result<T>> + Send + 'static,
    ) -> Ended<T> {
        let Self { store, life, meter, wish, limits } = self;
        let ticking = engine.ticker.guest();
        let guest = async move {
            // In this order, as the store is gone before its place is free.
            let (_ticking, admitted, mut store) = (ticking, admitted, store);
            let result = call(&mut store).await;
            (result, store, admitted)
        };
        let mut call = std::pin::pin!(Call::new(meter, wish, engine.cores.clone(), Box::pin(guest)));
        // Declared after the call, so that it ends before all that the run writes to.
        let life = life;
        let (result, store, admitted) = call.as_mut().await;
        drop(life);
        let state = store.data();
        let met = state.hooks.met();
        let ended = match result {
            Ok(value) => Ended::Returned(value, met),
            Err(error) => Ended::Failed(cause(&error, state, &limits, engine.stack, &met)),
        };
        // In this order, as above.
        drop(store);
        drop(admitted);
        ended
    }
}

/// How a call ended.
pub enum Ended<T> {
    /// With a value, and with the limits of HTTP that were met on the way.
    Returned(T, Met),
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

/// What the host would have to keep does not fit into the guest's memory.
#[derive(Debug, thiserror::Error)]
#[error("the memory is used up")]
struct MemorySpent;

/// Turns the error of a call into the sentence that the object's status shows.
fn cause(error: &wasmtime::Error, state: &State, limits: &Limits, stack: usize, met: &Met) -> Failure {
    if let Some(sentence) = limit(error, state, limits).or_else(|| met.exceeded.get().cloned()) {
        return Failure::Limit(sentence);
    }
    if let Some(I32Exit(code)) = error.downcast_ref() {
        return Failure::Trap(with_last_words(format!("it called exit({code})"), state));
    }
    match error.downcast_ref::<Trap>() {
        Some(Trap::StackOverflow) => {
            Failure::Trap(format!("call stack exhausted (the limit is {}, `--stack` of berth run; recurse less)", Size(stack as u64)))
        }
        Some(Trap::MemoryOutOfBounds) => {
            let trap = "out of bounds memory access, perhaps a recursion too deep for the stack that its compiler gave it";
            Failure::Trap(with_last_words(trap.into(), state))
        }
        Some(trap) => Failure::Trap(with_last_words(trap.to_string(), state)),
        None => Failure::Trap(with_last_words(error.root_cause().to_string(), state)),
    }
}

/// The limit that ended the call, with its value and what raises it.
fn limit(error: &wasmtime::Error, state: &State, limits: &Limits) -> Option<String> {
    let Limits { cpu, memory, run, .. } = *limits;
    if error.is::<CpuSpent>() {
        return Some(format!("the handler used more than its limit of {cpu:?} of CPU{}", limits.how("cpu")));
    }
    if state.quota.refused {
        return Some(format!("the handler needs more than its memory limit of {}{}", Size(memory), limits.how("memory")));
    }
    if state.quota.refused_table {
        let elements = shape::TABLE_ELEMENTS;
        return Some(format!("the handler needs a table of more than the {elements} elements that a component may have{FIXED}"));
    }
    if matches!(error.downcast_ref(), Some(ResourceTableError::Full)) || says(error, "handles") {
        let how = limits.how("limits.handles");
        return Some(format!(
            "the handler holds more than the {} handles that a run may have{how}: drop those it is done with",
            run.handles
        ));
    }
    if says(error, "fuel allocated for hostcalls") {
        let (most, how) = (Size(run.host_call as u64), limits.how("limits.hostCall"));
        return Some(format!("the handler handed over more than the {most} of data that one call may have{how}"));
    }
    if says(error, "total size of fields") {
        let most = Size(limits::HEADERS as u64);
        return Some(format!("the handler made headers of more than the {most} that a request may have{FIXED}"));
    }
    if says(error, "requested len") {
        let most = Size(limits::RANDOM_BYTES);
        return Some(format!("the handler asked for more than the {most} of random bytes that one call gives{FIXED}"));
    }
    None
}

/// The guest's own words say more than the trap; without any, the trap has to do.
fn with_last_words(trap: String, state: &State) -> String {
    state.gate.log().last_words().unwrap_or_else(|| crate::text::cut(&super::text::one_line(&trap), limits::SENTENCE))
}

/// For errors of wasmtime that have no public type.
fn says(error: &wasmtime::Error, words: &str) -> bool {
    error.chain().any(|cause| cause.to_string().contains(words))
}

/// Linear memory and tables of a store, and what the host keeps beside them, all together.
struct Quota {
    left: usize,
    refused: bool,
    refused_table: bool,
}

impl Quota {
    fn new(memory: u64) -> Self {
        Self { left: usize::try_from(memory).unwrap_or(usize::MAX), refused: false, refused_table: false }
    }

    /// False where there is not so much left.
    fn take(&mut self, bytes: usize) -> bool {
        match self.left.checked_sub(bytes) {
            Some(left) => self.left = left,
            None => self.refused = true,
        }
        !self.refused
    }
}

impl ResourceLimiter for Quota {
    fn memory_growing(&mut self, current: usize, desired: usize, _maximum: Option<usize>) -> wasmtime::Result<bool> {
        Ok(self.take(desired.saturating_sub(current)))
    }

    fn table_growing(&mut self, current: usize, desired: usize, _maximum: Option<usize>) -> wasmtime::Result<bool> {
        let fits = desired <= shape::TABLE_ELEMENTS;
        self.refused_table |= !fits;
        Ok(fits && self.take(desired.saturating_sub(current).saturating_mul(size_of::<usize>())))
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
