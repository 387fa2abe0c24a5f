//! CPU time of a guest: what it computes counts, what it waits for does not.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use rustix::time::{ClockId, clock_gettime};

/// Counts the CPU time of the thread while the guest's future is polled. Only the polling thread writes to it.
#[derive(Debug)]
pub struct Meter {
    budget: u64,
    spent: AtomicU64,
    started: AtomicU64,
}

impl Meter {
    /// With so much to spend.
    pub fn new(budget: Duration) -> Arc<Self> {
        let budget = u64::try_from(budget.as_nanos()).unwrap_or(u64::MAX);
        Arc::new(Self { budget, spent: AtomicU64::new(0), started: AtomicU64::new(0) })
    }

    /// Whether the budget is spent; asked by the guest's own thread in the middle of a poll.
    pub fn is_spent(&self) -> bool {
        self.spent.load(Relaxed).saturating_add(self.in_this_poll()) > self.budget
    }

    /// Whether the guest computes for longer than this in this poll; asked as above.
    pub fn computes_for(&self, time: Duration) -> bool {
        u128::from(self.in_this_poll()) > time.as_nanos()
    }

    /// Does a poll of the guest on this thread.
    pub fn count<T>(&self, poll: impl FnOnce() -> T) -> T {
        let started = thread_cpu();
        self.started.store(started, Relaxed);
        let polled = poll();
        self.spent.fetch_add(thread_cpu().saturating_sub(started), Relaxed);
        polled
    }

    fn in_this_poll(&self) -> u64 {
        thread_cpu().saturating_sub(self.started.load(Relaxed))
    }
}

fn thread_cpu() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn computing_in_polls_is_counted_and_what_lies_between_is_not() {
        let meter = Meter::new(Duration::from_millis(20));
        let compute = |time: Duration| {
            let began = Instant::now();
            while began.elapsed() < time && !meter.is_spent() {
                std::hint::spin_loop();
            }
            meter.is_spent()
        };
        assert!(!meter.count(|| compute(Duration::from_millis(5))));
        compute(Duration::from_millis(40));
        meter.count(|| std::thread::sleep(Duration::from_millis(60)));
        assert!(!meter.count(|| compute(Duration::from_millis(5))), "neither was computing in a poll");
        assert!(meter.count(|| compute(Duration::from_secs(20))));
    }
}
