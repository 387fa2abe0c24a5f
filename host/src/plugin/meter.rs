//! CPU time of a guest: what it computes counts, what it waits for does not.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};

use rustix::time::{ClockId, clock_gettime};

use super::cores::Place;

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

    fn in_this_poll(&self) -> u64 {
        thread_cpu().saturating_sub(self.started.load(Relaxed))
    }
}

fn thread_cpu() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

/// A future whose polls are counted, and which takes no core between them.
pub struct Metered<F> {
    pub meter: Arc<Meter>,
    pub place: Arc<Place>,
    pub call: Pin<Box<F>>,
}

impl<F: Future> Future for Metered<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let started = thread_cpu();
        self.meter.started.store(started, Relaxed);
        let polled = self.call.as_mut().poll(context);
        self.place.leave();
        self.meter.spent.fetch_add(thread_cpu().saturating_sub(started), Relaxed);
        polled
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::{super::cores::Cores, *};

    #[tokio::test]
    async fn computing_is_counted_and_waiting_is_not() {
        let meter = Meter::new(Duration::from_millis(20));
        let seen = meter.clone();
        let call = Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(60)).await;
            let waited = seen.is_spent();
            let began = Instant::now();
            while !seen.is_spent() && began.elapsed() < Duration::from_secs(20) {
                std::hint::spin_loop();
            }
            (waited, seen.is_spent())
        });
        let place = Cores::of_machine().place();
        assert_eq!(Metered { meter, place, call }.await, (false, true));
    }
}
