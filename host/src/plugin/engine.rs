//! The wasmtime engine: one that runs guests, with its clock, and one that only compiles, with the same settings.

use anyhow::{Context, Result};
use wasmtime::{Config, Engine, InstanceAllocationStrategy, PoolingAllocationConfig};

use super::{
    cores::Cores,
    limits::{self, shape},
    ticker::Ticker,
};

/// An engine that runs guests, and what it was set up with.
pub struct Running {
    /// The engine.
    pub engine: Engine,
    /// Bytes of each guest's stack.
    pub stack: usize,
    /// Interrupts the guests.
    pub ticker: Ticker,
    /// What those that compute share.
    pub cores: Cores,
}

/// An engine for the child that compiles, on all threads of its pool or on one: it allocates nothing.
pub fn for_compiling(parallel: bool) -> Result<Engine> {
    let mut config = common(limits::STACK);
    config.parallel_compilation(parallel);
    Ok(Engine::new(&config)?)
}

/// An engine that runs up to `sandboxes` guests at once, each with such a stack. Its epochs tick while any runs.
///
/// Whoever instantiates has to hold a permit for it: a full pool fails at once instead of waiting.
pub fn for_running(sandboxes: u32, stack: usize) -> Result<Running> {
    let mut pool = PoolingAllocationConfig::new();
    pool.total_component_instances(sandboxes)
        .total_stacks(sandboxes)
        .total_core_instances(sandboxes.saturating_mul(shape::CORE_INSTANCES))
        .total_memories(sandboxes.saturating_mul(shape::MEMORIES))
        .total_tables(sandboxes.saturating_mul(shape::TABLES))
        .max_core_instances_per_component(shape::CORE_INSTANCES)
        .max_memories_per_component(shape::MEMORIES)
        .max_tables_per_component(shape::TABLES)
        .table_elements(shape::TABLE_ELEMENTS)
        .max_component_instance_size(4 << 20);
    let mut config = common(stack);
    config.allocation_strategy(InstanceAllocationStrategy::Pooling(pool));
    let engine = Engine::new(&config).map_err(anyhow::Error::from).context("cannot set up the engine for plugins")?;
    let ticker = Ticker::start(&engine)?;
    Ok(Running { engine, stack, ticker, cores: Cores::of_machine() })
}

/// Everything that the machine code depends on. The memory reservation of 4 GiB is wasmtime's default on 64 bits: a smaller one
/// needs bounds checks and ran 30 % slower. (On the stack it does not depend.) Nobody walks a guest's stack, so the tables for that are
/// left out: a seventh of an artefact, and work for each time that it is mapped.
fn common(stack: usize) -> Config {
    let mut config = Config::new();
    config
        .epoch_interruption(true)
        .max_wasm_stack(stack)
        .async_stack_size(stack + limits::HOST_STACK)
        .wasm_memory64(false)
        .native_unwind_info(false)
        .generate_address_map(false)
        .wasm_backtrace_max_frames(None);
    config
}
