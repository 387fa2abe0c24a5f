//! The wasmtime engine: one that runs guests, with its clock, and one that only compiles, with the same settings.

use std::thread;

use anyhow::{Context, Result};
use wasmtime::{Config, Engine, InstanceAllocationStrategy, PoolingAllocationConfig};

use super::limits::{self, TICK, shape};

/// An engine for the child that compiles: it allocates nothing.
pub fn for_compiling() -> Result<Engine> {
    Ok(Engine::new(&common())?)
}

/// An engine that runs up to `sandboxes` guests at once. Its epochs tick for as long as it lives.
///
/// Whoever instantiates has to hold a permit for it: a full pool fails at once instead of waiting.
pub fn for_running(sandboxes: u32) -> Result<Engine> {
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
    let mut config = common();
    config.allocation_strategy(InstanceAllocationStrategy::Pooling(pool));
    let engine = Engine::new(&config).map_err(anyhow::Error::from).context("cannot set up the engine for plugins")?;
    tick(&engine)?;
    Ok(engine)
}

/// Everything that the machine code depends on. The memory reservation of 4 GiB is wasmtime's default on 64 bits: a smaller one
/// needs bounds checks and ran 30 % slower.
fn common() -> Config {
    let mut config = Config::new();
    config.epoch_interruption(true).max_wasm_stack(limits::STACK).wasm_memory64(false).wasm_backtrace_max_frames(None);
    config
}

/// The ticker is an OS thread, so that no guest and no busy worker can hold it up; it ends with the engine.
fn tick(engine: &Engine) -> Result<()> {
    let engine = engine.weak();
    let tick = move || {
        while let Some(engine) = engine.upgrade() {
            engine.increment_epoch();
            drop(engine);
            thread::sleep(TICK);
        }
    };
    thread::Builder::new().name("epoch".into()).spawn(tick).context("cannot start the thread that interrupts guests")?;
    Ok(())
}
