//! Who may compute on: a guest that has computed for a while waits in line with all others of its like, and they never have all cores.
//!
//! # Guarantees
//! - At most one core less than there are computes for such guests, or the only one; the rest is left to those that compute little.
//! - They go on one after the other, each for an epoch. A guest that waits for something else is not in line and takes up nobody's place.

use std::{
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The cores of the machine that guests may compute on.
#[derive(Clone, Debug)]
pub struct Cores(Arc<Semaphore>);

/// One guest's place.
#[derive(Debug)]
pub struct Place {
    cores: Arc<Semaphore>,
    taken: Mutex<Option<OwnedSemaphorePermit>>,
}

impl Cores {
    /// Those of this machine but one.
    pub fn of_machine() -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Self::new(cores.saturating_sub(1).max(1))
    }

    fn new(cores: usize) -> Self {
        Self(Arc::new(Semaphore::new(cores)))
    }

    /// For one guest, which has none yet.
    pub fn place(&self) -> Arc<Place> {
        Arc::new(Place { cores: self.0.clone(), taken: Mutex::default() })
    }
}

impl Place {
    /// Gives way, and waits until it is this guest's turn to compute for another epoch.
    pub async fn turn(self: Arc<Self>) {
        // Also where nobody else waits in line: others wait for the thread.
        tokio::task::yield_now().await;
        // The semaphore is never closed.
        let permit = self.cores.clone().acquire_owned().await.ok();
        *self.taken.lock().unwrap_or_else(PoisonError::into_inner) = permit;
    }

    /// Leaves the core to the next in line. To be called whenever the guest stops computing, for whatever reason.
    pub fn leave(&self) {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

#[cfg(test)]
mod tests {
    use std::{pin::Pin, task::Poll};

    use futures::poll;

    use super::*;

    type Turn = Pin<Box<dyn Future<Output = ()>>>;

    /// As a guest's future is polled: the place is left after each poll that waits.
    async fn computes(place: &Arc<Place>, turn: &mut Turn) -> bool {
        let polled = poll!(turn.as_mut());
        if polled == Poll::Pending {
            place.leave();
        }
        polled == Poll::Ready(())
    }

    #[tokio::test]
    async fn guests_that_compute_go_on_in_turn_on_no_more_cores_than_there_are() {
        let cores = Cores::new(2);
        let places: Vec<_> = (0..5).map(|_| cores.place()).collect();
        let mut turns: Vec<Turn> = places.iter().map(|place| Box::pin(place.clone().turn()) as Turn).collect();
        let mut order = Vec::new();
        for _ in 0..8 {
            let mut computing = Vec::new();
            for number in 0..5 {
                if computes(&places[number], &mut turns[number]).await {
                    computing.push(number);
                }
            }
            assert!(computing.len() <= 2, "{computing:?}");
            for number in computing {
                order.push(number);
                // Its epoch is over.
                turns[number] = Box::pin(places[number].clone().turn());
                assert!(!computes(&places[number], &mut turns[number]).await, "it gives way first");
            }
        }
        let mut times = [0; 5];
        order.iter().for_each(|number| times[*number] += 1);
        assert!(times.iter().max() <= times.iter().min().map(|least| least + 2).as_ref(), "nobody is left behind: {order:?}");
    }

    #[tokio::test]
    async fn a_guest_that_waits_for_something_else_or_ends_leaves_its_core() {
        let cores = Cores::new(1);
        let (first, second) = (cores.place(), cores.place());
        first.clone().turn().await;
        let mut turn: Turn = Box::pin(second.clone().turn());
        assert!(!computes(&second, &mut turn).await && !computes(&second, &mut turn).await);
        first.leave();
        assert!(computes(&second, &mut turn).await);
        drop((second, turn));
        first.turn().await;
    }
}
