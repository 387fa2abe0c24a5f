//! The clock that interrupts guests: short, so that those which compute delay the others little, and still while none runs.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread::{self, Thread},
    time::Duration,
};

use anyhow::{Context, Result};
use wasmtime::Engine;

/// Length of an epoch: how often a guest that computes gives way to others and its CPU time is looked at.
const TICK: Duration = Duration::from_millis(2);
/// How often a clock that stands still looks whether its engine is gone.
const LOOK: Duration = Duration::from_secs(5);

/// Counts the guests that run, and has the clock go while there are any.
#[derive(Clone)]
pub struct Ticker {
    guests: Arc<AtomicUsize>,
    clock: Thread,
}

/// A guest that runs. Dropping it tells its end.
pub struct Ticking(Arc<AtomicUsize>);

impl Drop for Ticking {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Ticker {
    /// Starts the clock of an engine. It is an OS thread, so that no guest and no busy worker can hold it up; it ends with the engine.
    pub fn start(engine: &Engine) -> Result<Self> {
        let guests = Arc::<AtomicUsize>::default();
        let (engine, running) = (engine.weak(), guests.clone());
        let tick = move || {
            loop {
                while running.load(Ordering::Acquire) == 0 {
                    thread::park_timeout(LOOK);
                    if engine.upgrade().is_none() {
                        return;
                    }
                }
                thread::sleep(TICK);
                let Some(engine) = engine.upgrade() else { return };
                engine.increment_epoch();
            }
        };
        let clock = thread::Builder::new().name("epoch".into()).spawn(tick).context("cannot start the thread that interrupts guests")?;
        Ok(Self { guests, clock: clock.thread().clone() })
    }

    /// For as long as a guest runs.
    pub fn guest(&self) -> Ticking {
        if self.guests.fetch_add(1, Ordering::AcqRel) == 0 {
            self.clock.unpark();
        }
        Ticking(self.guests.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use wasmtime::{Config, Module, Store};

    use super::*;

    /// How long a loop without an end runs until it is interrupted.
    fn interrupted(engine: &Engine, loops: &Module) -> Duration {
        let mut store = Store::new(engine, ());
        store.set_epoch_deadline(1);
        let began = Instant::now();
        wasmtime::Instance::new(&mut store, loops, &[]).expect_err("its start function never ends");
        began.elapsed()
    }

    #[test]
    fn it_goes_while_guests_run_and_again_after_it_stood_still() {
        let engine = Engine::new(Config::new().epoch_interruption(true)).expect("an engine");
        // (module (func (loop (br 0))) (start 0))
        let loops =
            [b"\0asm\x01\0\0\0".as_slice(), &[1, 4, 1, 0x60, 0, 0, 3, 2, 1, 0, 8, 1, 0, 10, 9, 1, 7, 0, 3, 0x40, 0x0c, 0, 0x0b, 0x0b]];
        let loops = Module::new(&engine, loops.concat()).expect("a module");
        let ticker = Ticker::start(&engine).expect("a thread");
        for _ in 0..2 {
            let guest = ticker.guest();
            assert!(interrupted(&engine, &loops) < Duration::from_secs(5));
            drop(guest);
            thread::sleep(5 * TICK);
            assert_eq!(ticker.guests.load(Ordering::Acquire), 0);
        }
    }
}
