//! The asynchronous shell, under a paused clock.

use std::collections::HashSet;

use tokio::{
    task::JoinSet,
    time::{advance, timeout},
};

use super::*;

fn queue(concurrency: usize) -> Queue {
    let queue = Queue::new();
    queue.open(kind("K"), pace(concurrency));
    queue
}

async fn nothing_within(queue: &Queue, time: Duration) {
    assert!(timeout(time, queue.next()).await.is_err(), "a turn that nobody is to have");
}

#[tokio::test(start_paused = true)]
async fn next_waits_for_a_wake_and_for_the_backoff() {
    let queue = queue(4);
    nothing_within(&queue, seconds(3600)).await;
    queue.wake(&key("K", "a"), "u", Cause::NewSpec, 0);
    let mut ends = Vec::new();
    let start = Instant::now();
    for _ in 0..5 {
        let turn = queue.next().await;
        ends.push(start.elapsed().as_secs_f64());
        turn.done(fail());
    }
    for (end, expected) in ends.iter().zip([0.0, 1.0, 3.0, 7.0, 15.0]) {
        assert!((expected..=expected * 1.1 + 0.01).contains(end), "{ends:?}");
    }
    assert_eq!(queue.depth(), [(kind("K"), Depth { ready: 0, delayed: 1, running: 0 })]);
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_is_dropped_is_a_failure() {
    let queue = queue(4);
    queue.wake(&key("K", "a"), "u", Cause::NewSpec, 0);
    let turn = queue.next().await;
    let run = tokio::spawn(async move {
        let _turn = turn;
        panic!("as a bug would");
    });
    assert!(run.await.is_err_and(|error| error.is_panic()));
    let turn = queue.next().await;
    assert_eq!((turn.failures, turn.cause), (1, Cause::Retry));
    assert!(turn.last_failure.as_deref().is_some_and(|cause| cause.contains("panicked")), "{:?}", turn.last_failure);
    turn.done(Then::Wait);
    nothing_within(&queue, seconds(3600)).await;
}

#[tokio::test(start_paused = true)]
async fn many_workers_share_the_turns_and_none_is_left_asleep() {
    let queue = queue(8);
    let mut workers = JoinSet::new();
    for _ in 0..16 {
        let queue = queue.clone();
        workers.spawn(async move {
            let mut names = Vec::new();
            while let Ok(turn) = timeout(seconds(60), queue.next()).await {
                names.push(turn.key.object.name.to_string());
                tokio::time::sleep(seconds(1)).await;
                turn.done(Then::Wait);
            }
            names
        });
    }
    tokio::task::yield_now().await;
    let start = Instant::now();
    for object in 0..80 {
        queue.wake(&key("K", &object.to_string()), "u", Cause::NewSpec, 0);
    }
    let names: Vec<String> = workers.join_all().await.into_iter().flatten().collect();
    assert_eq!(names.len(), 80);
    assert_eq!(names.iter().collect::<HashSet<_>>().len(), 80);
    // 80 turns of a second, eight at once, then the workers' own patience.
    assert!((seconds(69)..=seconds(71)).contains(&start.elapsed()), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_stops_waiting_hands_over_what_it_knew() {
    let queue = queue(4);
    for name in ["late", "soon"] {
        queue.wake(&key("K", name), "u", Cause::NewSpec, 0);
    }
    let (late, soon) = (queue.next().await, queue.next().await);
    let (mut stays, mut leaves) = (Box::pin(queue.next()), Box::pin(queue.next()));
    assert!(futures::poll!(&mut stays).is_pending() && futures::poll!(&mut leaves).is_pending());
    late.done(Then::After(seconds(100)));
    assert!(futures::poll!(&mut stays).is_pending(), "sleeps for 100 s");
    soon.done(Then::After(seconds(10)));
    assert!(futures::poll!(&mut leaves).is_pending(), "sleeps for 10 s");
    drop(leaves);
    let turn = timeout(seconds(11), stays).await.expect("looked again");
    assert_eq!(turn.key, key("K", "soon"));
    turn.done(Then::Wait);
}

#[tokio::test(start_paused = true)]
async fn after_the_intake_stopped_running_turns_finish_and_none_starts() {
    let queue = queue(4);
    for name in ["a", "b"] {
        queue.wake(&key("K", name), "u", Cause::NewSpec, 0);
    }
    let turn = queue.next().await;
    queue.stop_intake();
    nothing_within(&queue, seconds(60)).await;
    assert!(timeout(seconds(1), queue.idle()).await.is_err());
    let (_, ()) = tokio::join!(queue.idle(), async {
        advance(seconds(3)).await;
        turn.done(Then::Wait);
    });
    assert!(queue.is_idle());
}

#[tokio::test(start_paused = true)]
async fn a_lane_that_opens_lets_waiting_workers_go_on() {
    let queue = queue(0);
    queue.wake(&key("K", "a"), "u", Cause::NewSpec, 0);
    let worker = tokio::spawn({
        let queue = queue.clone();
        async move { queue.next().await.waited }
    });
    advance(seconds(9)).await;
    queue.open(kind("K"), pace(1));
    assert_eq!(worker.await.expect("no panic"), seconds(9));
}
