//! Waiting for a condition with a deadline, and saying what was last seen when it passes.

use std::{
    fmt::Display,
    time::{Duration, Instant},
};

/// Whether tests run at full length and with all objects, as `make test-faults` has them do, rather than scaled down.
pub fn full() -> bool {
    std::env::var_os("BERTH_TEST_FULL").is_some_and(|value| value == "1")
}

/// A number or a time of a test: the one of the short set, or the other at full length.
pub fn scaled<T>(short: T, long: T) -> T {
    if full() { long } else { short }
}

/// Time between two looks.
const LOOK: Duration = Duration::from_millis(50);

/// Looks until `look` gives a value. `Err` says what was seen instead.
///
/// # Panics
/// When `deadline` is over: with the last thing seen.
#[track_caller]
pub fn eventually<T, E: Display>(deadline: Duration, look: impl AsyncFnMut() -> Result<T, E>) -> impl Future<Output = T> {
    let caller = std::panic::Location::caller();
    within(deadline, look, move |last| panic!("not so within {deadline:?}, as asked at {caller}; last seen: {last}"))
}

/// Looks for all of `time` and fails as soon as `look` does.
///
/// # Panics
/// With what was seen.
#[track_caller]
pub fn always<E: Display>(time: Duration, mut look: impl AsyncFnMut() -> Result<(), E>) -> impl Future<Output = ()> {
    let caller = std::panic::Location::caller();
    async move {
        let start = Instant::now();
        while start.elapsed() < time {
            if let Err(seen) = look().await {
                panic!("so for {:?} only, not for {time:?} as asked at {caller}; seen: {seen}", start.elapsed());
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

async fn within<T, E: Display>(deadline: Duration, mut look: impl AsyncFnMut() -> Result<T, E>, give_up: impl FnOnce(String) -> T) -> T {
    let start = Instant::now();
    let mut last = String::from("nothing: the first look did not end");
    loop {
        let left = deadline.saturating_sub(start.elapsed());
        match tokio::time::timeout(left.max(LOOK), look()).await {
            Ok(Ok(value)) => return value,
            Ok(Err(seen)) => last = seen.to_string(),
            Err(_) => {}
        }
        if start.elapsed() >= deadline {
            return give_up(last);
        }
        tokio::time::sleep(LOOK).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_value_comes_as_soon_as_the_condition_holds() {
        let mut looks = 0;
        let value = eventually(Duration::from_secs(5), async || {
            looks += 1;
            if looks == 3 { Ok(looks) } else { Err("not yet") }
        });
        assert_eq!(value.await, 3);
    }

    #[tokio::test]
    #[should_panic(expected = "last seen: 2 of 3")]
    async fn the_panic_says_what_was_last_seen() {
        eventually(Duration::from_millis(60), async || Err::<(), _>("2 of 3")).await;
    }

    #[tokio::test]
    #[should_panic(expected = "the first look did not end")]
    async fn a_look_that_hangs_is_given_up_at_the_deadline() {
        eventually(Duration::from_millis(60), async || std::future::pending::<Result<(), String>>().await).await;
    }

    #[tokio::test]
    #[should_panic(expected = "seen: changed")]
    async fn what_is_to_stay_so_fails_when_it_changes() {
        let mut looks = 0;
        always(Duration::from_secs(5), async || {
            looks += 1;
            if looks < 3 { Ok(()) } else { Err("changed") }
        })
        .await;
    }
}
