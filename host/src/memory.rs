//! Memory of the process that nobody needs any more, given back to the system.
//!
//! What a burst has needed (a list, a component that is loaded, code that rests again) the allocator keeps for the next one, and it lies
//! between what is still needed. A host that has listed ten thousand objects, or loaded a hundred plugins, would look for ever as if it
//! were doing so.

use std::{convert::Infallible, time::Duration};

use tokio::sync::Notify;

/// How long after a burst: the next one is often part of it.
const AFTER: Duration = Duration::from_secs(3);

/// For what goes by itself, such as connections that were needed for a while.
const NOW_AND_THEN: Duration = Duration::from_secs(120);

static BURST: Notify = Notify::const_new();

/// Much of what was allocated a moment ago has been freed, or is about to be.
pub fn burst() {
    BURST.notify_one();
}

/// Gives memory back some time after each [`burst`], and now and then. One for the process.
pub async fn give_back() -> Infallible {
    loop {
        if tokio::time::timeout(NOW_AND_THEN, BURST.notified()).await.is_ok() {
            tokio::time::sleep(AFTER).await;
        }
        // It takes the locks of the allocator for some milliseconds.
        let _ = tokio::task::spawn_blocking(trim).await;
    }
}

/// One arena for each core rather than eight. Each is a heap of its own, with holes of its own that no other can use: the more there
/// are, the less of a burst can be given back. To be called before there are other threads.
#[cfg(target_env = "gnu")]
#[allow(unsafe_code, reason = "a function of the C library that Rust has no name for")]
pub fn few_arenas() {
    // Whoever runs the host knows better.
    if std::env::var_os("MALLOC_ARENA_MAX").is_some() {
        return;
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // SAFETY: `mallopt` only sets a number, and no other thread allocates yet. https://man7.org/linux/man-pages/man3/mallopt.3.html
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, libc::c_int::try_from(cores).unwrap_or(libc::c_int::MAX));
    }
}

/// Other C libraries have no arenas.
#[cfg(not(target_env = "gnu"))]
pub fn few_arenas() {}

#[cfg(target_env = "gnu")]
#[allow(unsafe_code, reason = "a function of the C library that Rust has no name for")]
fn trim() {
    // SAFETY: `malloc_trim` may be called at any time from any thread, and touches nothing that is allocated.
    // https://man7.org/linux/man-pages/man3/malloc_trim.3.html
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Other C libraries give back what they can by themselves.
#[cfg(not(target_env = "gnu"))]
fn trim() {}

#[cfg(test)]
mod tests {
    use super::*;

    fn resident() -> usize {
        let text = std::fs::read_to_string("/proc/self/statm").expect("Linux says so");
        text.split_whitespace().nth(1).and_then(|pages| pages.parse::<usize>().ok()).expect("a number of pages") * 4096
    }

    #[cfg(all(target_env = "gnu", target_os = "linux"))]
    #[tokio::test]
    async fn what_lies_between_what_is_needed_is_given_back_after_a_burst() {
        // So much that what other tests of the process hold meanwhile does not count.
        const PIECES: usize = 8_000;
        const FREED: usize = 160 << 20;
        let mut pieces: Vec<Vec<u8>> = (0..PIECES).map(|_| vec![1; 32 << 10]).collect();
        // Every hundredth stays, so that the end of the heap cannot shrink over the others.
        let mut number = 0;
        pieces.retain(|_| {
            number += 1;
            number % 100 == 0
        });
        let before = resident();
        burst();
        tokio::select! {
            never = give_back() => match never {},
            () = async { while resident() + FREED > before { tokio::time::sleep(Duration::from_millis(50)).await } } => {}
            () = tokio::time::sleep(Duration::from_secs(30)) => panic!("{before} bytes have become {}", resident()),
        }
        assert_eq!(pieces.len(), PIECES / 100);
    }
}
