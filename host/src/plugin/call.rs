//! A call of a guest, polled where it belongs: by the task of its object while it computes little, aside once it has computed for a while.
//!
//! # Guarantees
//! - Guests that compute go on one after the other, each for an epoch, on no more cores than [`Cores`] has. One that waits for something
//!   else is not in line and takes up nobody's place.
//! - Each poll is on the [`Meter`], wherever it is.
//!
//! # Caveats
//! Dropping a call that computes aside ends it there, within an epoch of the thread: the next run of the object may have begun by then.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll, Waker},
    thread,
};

use futures::{FutureExt, future::BoxFuture};
use tokio::{
    runtime::Handle,
    sync::{OwnedSemaphorePermit, oneshot},
};
use tracing::{Span, dispatcher};

use super::{cores::Cores, meter::Meter};

/// By which a guest that is interrupted says that it has more to compute.
#[derive(Debug, Default)]
pub struct Wish(AtomicBool);

impl Wish {
    /// To be awaited by the guest. Nothing wakes it: it goes on when it has a core.
    pub async fn for_a_core(self: Arc<Self>) {
        let mut wished = false;
        futures::future::poll_fn(|_| {
            if std::mem::replace(&mut wished, true) {
                return Poll::Ready(());
            }
            self.0.store(true, Relaxed);
            Poll::Pending
        })
        .await;
    }

    fn take(&self) -> bool {
        self.0.swap(false, Relaxed)
    }
}

/// See the module.
pub struct Call<T> {
    meter: Arc<Meter>,
    wish: Arc<Wish>,
    cores: Cores,
    at: At<T>,
}

type Guest<T> = BoxFuture<'static, T>;
/// A guest that has been polled aside, and what came of it.
type Back<T> = (Guest<T>, thread::Result<Poll<T>>);

enum At<T> {
    Here(Guest<T>),
    InLine(Guest<T>, BoxFuture<'static, OwnedSemaphorePermit>),
    Aside(oneshot::Receiver<Back<T>>),
    Over,
}

impl<T: Send + 'static> Call<T> {
    /// Of a guest that spends from this and wishes by that.
    pub fn new(meter: Arc<Meter>, wish: Arc<Wish>, cores: Cores, guest: Guest<T>) -> Self {
        Self { meter, wish, cores, at: At::Here(guest) }
    }

    /// Has the guest polled once by another thread.
    fn aside(&self, mut guest: Guest<T>, core: OwnedSemaphorePermit, waker: &Waker) -> oneshot::Receiver<Back<T>> {
        let (tell, told) = oneshot::channel();
        let (meter, waker) = (self.meter.clone(), waker.clone());
        // It may sleep or log there as it does here.
        let (runtime, log, span) = (Handle::current(), dispatcher::get_default(Clone::clone), Span::current());
        self.cores.run(Box::new(move || {
            let (_runtime, _log, _span) = (runtime.enter(), dispatcher::set_default(&log), span.enter());
            let polled = catch_unwind(AssertUnwindSafe(|| meter.count(|| guest.as_mut().poll(&mut Context::from_waker(&waker)))));
            drop(core);
            // Nobody may want it any more: then it ends here, whatever happens at that.
            let _ = catch_unwind(AssertUnwindSafe(|| drop(tell.send((guest, polled)))));
        }));
        told
    }
}

impl<T: Send + 'static> Future for Call<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        loop {
            let (guest, polled) = match std::mem::replace(&mut self.at, At::Over) {
                At::Here(mut guest) => {
                    let polled = self.meter.count(|| guest.as_mut().poll(context));
                    if polled.is_pending() && !self.wish.take() {
                        self.at = At::Here(guest);
                        return Poll::Pending;
                    }
                    (guest, polled)
                }
                At::InLine(guest, mut turn) => match turn.poll_unpin(context) {
                    Poll::Ready(core) => {
                        self.at = At::Aside(self.aside(guest, core, context.waker()));
                        continue;
                    }
                    Poll::Pending => {
                        self.at = At::InLine(guest, turn);
                        return Poll::Pending;
                    }
                },
                At::Aside(mut back) => match back.poll_unpin(context) {
                    Poll::Ready(Ok((guest, Ok(polled)))) => {
                        if polled.is_pending() && !self.wish.take() {
                            // What it waits for may have come before this did.
                            self.at = At::Here(guest);
                            continue;
                        }
                        (guest, polled)
                    }
                    Poll::Ready(Ok((_, Err(panic)))) => resume_unwind(panic),
                    Poll::Ready(Err(_)) => unreachable!("every job is done, and tells of it"),
                    Poll::Pending => {
                        self.at = At::Aside(back);
                        return Poll::Pending;
                    }
                },
                At::Over => panic!("polled after its end"),
            };
            match polled {
                Poll::Ready(value) => return Poll::Ready(value),
                Poll::Pending => self.at = At::InLine(guest, self.cores.clone().turn().boxed()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Mutex, atomic::AtomicUsize},
        time::{Duration, Instant},
    };

    use super::*;

    /// One that has so many epochs to compute, with a wait after each `waits`, and tells what thread each was on.
    fn guest(wish: Arc<Wish>, epochs: usize, waits: usize, ran: impl Fn() + Send + 'static) -> Guest<Vec<bool>> {
        Box::pin(async move {
            let mut aside = Vec::new();
            for epoch in 1..=epochs {
                ran();
                aside.push(thread::current().name() == Some("guest"));
                if epoch % waits == 0 {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                } else {
                    wish.clone().for_a_core().await;
                }
            }
            aside
        })
    }

    fn call<T: Send + 'static>(cores: &Cores, guest: impl FnOnce(Arc<Wish>) -> Guest<T>) -> Call<T> {
        let wish = Arc::<Wish>::default();
        Call::new(Meter::new(Duration::from_secs(60)), wish.clone(), cores.clone(), guest(wish))
    }

    #[tokio::test]
    async fn a_guest_computes_aside_from_its_second_epoch_and_here_again_once_it_has_waited() {
        let aside = call(&Cores::new(1), |wish| guest(wish, 6, 3, || ())).await;
        assert_eq!(aside, [false, true, true, false, true, true]);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn guests_that_compute_go_on_in_turn_on_no_more_cores_than_there_are() {
        const GUESTS: usize = 5;
        const CORES: usize = 2;
        const EPOCHS: usize = 20;
        let cores = Cores::new(CORES);
        let (at_once, order) = (Arc::<AtomicUsize>::default(), Arc::<Mutex<Vec<usize>>>::default());
        let calls = (0..GUESTS).map(|number| {
            let (at_once, order) = (at_once.clone(), order.clone());
            let ran = move || {
                if thread::current().name() == Some("guest") {
                    assert!(at_once.fetch_add(1, Relaxed) < CORES);
                    thread::sleep(Duration::from_millis(1));
                    order.lock().expect("no panic").push(number);
                    at_once.fetch_sub(1, Relaxed);
                }
            };
            tokio::spawn(call(&cores, |wish| guest(wish, EPOCHS, EPOCHS + 1, ran)))
        });
        for ended in futures::future::join_all(calls).await {
            ended.expect("no panic");
        }
        let order = order.lock().expect("no panic");
        assert_eq!(order.len(), GUESTS * (EPOCHS - 1));
        // Those at the start and at the end are not all in line.
        for window in order[GUESTS..order.len() - 2 * GUESTS].windows(3 * GUESTS) {
            assert!((0..GUESTS).all(|number| window.contains(&number)), "nobody is left behind: {order:?}");
        }
    }

    #[tokio::test]
    async fn a_panic_aside_is_the_callers_and_leaves_the_thread() {
        let cores = Cores::new(1);
        let panics = call(&cores, |wish| {
            Box::pin(async move {
                wish.for_a_core().await;
                "no number".parse().expect("as a bug would")
            }) as Guest<u32>
        });
        assert!(AssertUnwindSafe(panics).catch_unwind().await.is_err());
        assert_eq!(call(&cores, |wish| guest(wish, 2, 3, || ())).await, [false, true]);
    }

    #[tokio::test]
    async fn a_call_that_is_dropped_ends_wherever_it_is_and_leaves_its_core() {
        let cores = Cores::new(1);
        let (left, ended) = oneshot::channel::<()>();
        let endless = call(&cores, |wish| {
            Box::pin(async move {
                let _left = left;
                for _ in 0..u64::MAX {
                    thread::sleep(Duration::from_millis(1));
                    wish.clone().for_a_core().await;
                }
            }) as Guest<()>
        });
        assert!(tokio::time::timeout(Duration::from_millis(50), endless).await.is_err());
        assert!(ended.await.is_err(), "its state is gone");
        let began = Instant::now();
        call(&cores, |wish| guest(wish, 3, 9, || ())).await;
        assert!(began.elapsed() < Duration::from_secs(5));
    }

    #[tokio::test]
    async fn what_a_guest_computes_aside_is_counted() {
        let (wish, meter) = (Arc::<Wish>::default(), Meter::new(Duration::from_millis(20)));
        let (seen, wishes) = (meter.clone(), wish.clone());
        let computes: Guest<usize> = Box::pin(async move {
            for epoch in 0.. {
                if seen.is_spent() {
                    return epoch;
                }
                let began = Instant::now();
                while began.elapsed() < Duration::from_millis(2) {
                    std::hint::spin_loop();
                }
                wishes.clone().for_a_core().await;
            }
            0
        });
        let epochs = Call::new(meter, wish, Cores::new(1), computes).await;
        assert!(epochs >= 5, "{epochs}");
    }
}
