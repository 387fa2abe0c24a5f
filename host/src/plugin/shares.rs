//! What plugins have in common and must not take from each other: sandboxes, memory, connections, and threads that look up names.
//!
//! # Guarantees
//! Of each there is so much for the host and so much for one plugin, however many versions of it run. Who waits is served in order, and
//! waits for the plugin's own part first, so that a plugin that has used its part up is in nobody else's way.
//!
//! # Caveats
//! A run holds the memory that it may need, not what it uses: what is admitted is there.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::limits::{LOOK_UPS, Size};

/// Memory is counted in these.
const UNIT: u64 = 1 << 20;

/// One for the host.
pub struct Shares {
    sandboxes: Arc<Semaphore>,
    memory: Pool,
    connections: Pool,
    look_ups: Pool,
    plugins: Mutex<HashMap<Arc<str>, Weak<Share>>>,
}

/// What one plugin may use.
#[derive(Debug)]
pub struct Share {
    sandboxes: Arc<Semaphore>,
    memory: Part,
    /// Of open connections.
    pub connections: Part,
    /// Of names that are looked up.
    pub look_ups: Part,
}

/// So much of something for all, and so much for one.
struct Pool {
    all: Arc<Semaphore>,
    most: u32,
    of_one: u32,
}

/// One plugin's part of a pool.
#[derive(Clone, Debug)]
pub struct Part {
    own: Arc<Semaphore>,
    all: Arc<Semaphore>,
    most: u32,
}

/// What is taken, until it is dropped.
#[derive(Debug)]
pub struct Taken {
    _own: OwnedSemaphorePermit,
    _all: OwnedSemaphorePermit,
}

/// A sandbox and its memory.
#[derive(Debug)]
pub struct Admitted {
    _memory: Taken,
    _sandbox: OwnedSemaphorePermit,
}

impl Shares {
    /// For so many sandboxes, with so much memory in bytes together, and so many connections.
    pub fn new(sandboxes: u32, memory: u64, connections: u32) -> Self {
        let units = units(memory);
        Self {
            sandboxes: semaphore(sandboxes),
            memory: Pool::new(units, units / 2),
            connections: Pool::new(connections, connections / 4),
            look_ups: Pool::new(LOOK_UPS, LOOK_UPS / 4),
            plugins: Mutex::default(),
        }
    }

    /// That of the plugin of this name: the same for all versions of it.
    pub fn of(&self, plugin: &str) -> Arc<Share> {
        let mut plugins = self.plugins.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(share) = plugins.get(plugin).and_then(Weak::upgrade) {
            return share;
        }
        plugins.retain(|_, share| share.strong_count() > 0);
        let share = Arc::new(Share {
            sandboxes: self.sandboxes.clone(),
            memory: self.memory.part(),
            connections: self.connections.part(),
            look_ups: self.look_ups.part(),
        });
        plugins.insert(plugin.into(), Arc::downgrade(&share));
        share
    }

    /// Waits for memory that is no guest's; never for more than there is.
    pub async fn memory_for_compiling(&self, bytes: u64) -> OwnedSemaphorePermit {
        take(&self.memory.all, units(bytes).min(self.memory.most)).await
    }
}

impl Share {
    /// Whether a run with so much memory can ever be admitted, or else the most that one can have.
    pub fn check_memory(&self, bytes: u64) -> Result<(), String> {
        let most = self.memory.most;
        if units(bytes) <= most { Ok(()) } else { Err(Size(u64::from(most) * UNIT).to_string()) }
    }

    /// Waits for a sandbox with so much memory.
    pub async fn admit(&self, bytes: u64) -> Admitted {
        let memory = self.memory.take(units(bytes).min(self.memory.most)).await;
        Admitted { _memory: memory, _sandbox: take(&self.sandboxes, 1).await }
    }
}

impl Pool {
    fn new(most: u32, of_one: u32) -> Self {
        Self { all: semaphore(most), most, of_one: of_one.max(1) }
    }

    fn part(&self) -> Part {
        Part { own: semaphore(self.of_one), all: self.all.clone(), most: self.of_one }
    }
}

impl Part {
    /// How much there is of it.
    pub fn most(&self) -> u32 {
        self.most
    }

    /// Waits for so much of it.
    pub async fn take(&self, amount: u32) -> Taken {
        Taken { _own: take(&self.own, amount).await, _all: take(&self.all, amount).await }
    }
}

fn semaphore(permits: u32) -> Arc<Semaphore> {
    Arc::new(Semaphore::new(usize::try_from(permits).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS)))
}

async fn take(semaphore: &Arc<Semaphore>, amount: u32) -> OwnedSemaphorePermit {
    semaphore.clone().acquire_many_owned(amount).await.expect("the semaphore is never closed")
}

fn units(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    const MEMORY: u64 = 128 << 20;

    #[tokio::test]
    async fn what_one_plugin_holds_is_never_more_than_its_part_and_others_go_on() {
        let shares = Shares::new(8, 4 * MEMORY, 16);
        let (greedy, modest) = (shares.of("greedy"), shares.of("modest"));
        let held = [greedy.admit(MEMORY).await, greedy.admit(MEMORY).await];
        assert!(greedy.admit(MEMORY).now_or_never().is_none(), "half of the memory is all that it gets");
        let others = [modest.admit(MEMORY).await, modest.admit(MEMORY).await];
        assert!(shares.memory_for_compiling(MEMORY).now_or_never().is_none(), "and now there is none");
        drop((held, others));
        assert!(shares.of("greedy").admit(2 * MEMORY).now_or_never().is_some());
        assert_eq!(greedy.check_memory(2 * MEMORY), Ok(()));
        assert_eq!(greedy.check_memory(2 * MEMORY + 1), Err("256Mi".into()));
    }

    #[tokio::test]
    async fn memory_is_given_in_the_order_in_which_it_is_asked_for() {
        let shares = Shares::new(8, 2 * MEMORY, 16);
        let (one, other) = (shares.of("one"), shares.of("other"));
        let held = one.admit(MEMORY).await;
        let mut compiling = Box::pin(shares.memory_for_compiling(2 * MEMORY));
        assert!(compiling.as_mut().now_or_never().is_none());
        assert!(other.admit(1 << 20).now_or_never().is_none(), "a small one does not overtake a large one for ever");
        drop(held);
        assert!(compiling.now_or_never().is_some());
    }

    #[test]
    fn all_versions_of_a_plugin_have_one_share_and_it_goes_with_the_last() {
        let shares = Shares::new(8, MEMORY, 16);
        let share = shares.of("p");
        assert!(Arc::ptr_eq(&share, &shares.of("p")) && !Arc::ptr_eq(&share, &shares.of("q")));
        drop(share);
        let _other = shares.of("r");
        assert_eq!(shares.plugins.lock().expect("no panic").len(), 1);
    }
}
