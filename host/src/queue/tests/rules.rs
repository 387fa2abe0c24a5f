//! Each rule of the queue, on the pure state machine.

use super::*;

/// The state machine with a clock of its own, for one kind `K`.
struct Bench {
    state: State,
    now: Duration,
}

impl Bench {
    fn new(concurrency: usize) -> Self {
        let mut state = State::default();
        state.open(kind("K"), pace(concurrency));
        Self { state, now: Duration::ZERO }
    }

    fn wake(&mut self, name: &str, cause: Cause) {
        self.state.wake(&key("K", name), "u", cause, 0, self.now);
    }

    fn wake_with(&mut self, name: &str, cause: Cause, priority: i64) {
        self.state.wake(&key("K", name), "u", cause, priority, self.now);
    }

    fn pass(&mut self, time: Duration) -> &mut Self {
        self.now += time;
        self
    }

    fn next(&mut self) -> Option<(String, Cause, u32)> {
        self.state.next(self.now).map(|start| (start.key.object.name.to_string(), start.cause, start.failures))
    }

    fn names(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.next()).map(|(name, ..)| name).collect()
    }

    fn done(&mut self, name: &str, then: Then) {
        self.state.done(&key("K", name), then, self.now, 0.0);
    }

    /// Runs `a` and ends the turn.
    fn run(&mut self, then: Then) {
        assert_eq!(self.next().expect("a is runnable").0, "a");
        self.done("a", then);
    }

    /// The time until the next turn, which is started.
    fn wait(&mut self) -> Duration {
        let before = self.now;
        loop {
            if self.next().is_some() {
                return self.now - before;
            }
            self.now = self.state.next_due().expect("something is waiting");
        }
    }
}

#[test]
fn failures_in_a_row_wait_1_2_4_8_seconds_and_a_success_starts_anew() {
    let mut bench = Bench::new(1);
    bench.wake("a", Cause::NewSpec);
    bench.run(fail());
    let mut waits = Vec::new();
    for _ in 0..4 {
        waits.push(bench.wait().as_secs());
        bench.done("a", fail());
    }
    assert_eq!(waits, [1, 2, 4, 8]);
    bench.pass(seconds(16)).run(Then::After(seconds(600)));
    bench.wake("a", Cause::Change);
    bench.run(fail());
    assert_eq!(bench.wait(), seconds(1));
}

#[test]
fn an_object_is_as_old_as_the_time_since_it_could_run() {
    let mut bench = Bench::new(1);
    bench.wake("a", Cause::NewSpec);
    bench.run(Then::After(seconds(10)));
    bench.pass(seconds(12)).wake("b", Cause::NewSpec);
    let start = bench.state.next(bench.now).expect("a is due");
    assert_eq!((start.key, start.waited), (key("K", "a"), seconds(2)));
}

#[test]
fn a_failure_waits_as_long_as_the_other_side_asked() {
    let mut bench = Bench::new(1);
    bench.wake("a", Cause::NewSpec);
    bench.run(Then::Fail { cause: "busy".into(), after: Some(seconds(7)) });
    assert_eq!(bench.wait(), seconds(7));
    bench.done("a", Then::Fail { cause: "busy".into(), after: Some(Duration::from_millis(1)) });
    assert_eq!(bench.wait(), seconds(2));
}

#[test]
fn foreign_wakes_neither_shorten_nor_consume_the_backoff() {
    let mut bench = Bench::new(1);
    bench.wake("a", Cause::NewSpec);
    bench.run(fail());
    bench.pass(seconds(1)).run(fail());
    for _ in 0..20 {
        bench.pass(Duration::from_millis(90));
        bench.wake("a", Cause::Change);
        bench.wake("a", Cause::Read);
        bench.wake("a", Cause::Resync);
        assert_eq!(bench.next(), None);
    }
    bench.pass(Duration::from_millis(200));
    assert_eq!(bench.next(), Some(("a".into(), Cause::Retry, 2)));
    bench.done("a", fail());
    assert_eq!(bench.wait(), seconds(4));
}

#[test]
fn a_new_spec_and_a_reload_end_the_backoff_and_forget_the_failures() {
    for cause in [Cause::NewSpec, Cause::Reload] {
        let mut bench = Bench::new(1);
        bench.wake("a", Cause::FirstList);
        bench.run(fail());
        bench.pass(seconds(1)).run(fail());
        bench.wake("a", cause);
        assert_eq!(bench.next(), Some(("a".into(), cause, 0)));
        bench.done("a", fail());
        assert_eq!(bench.wait(), seconds(1));
    }
}

#[test]
fn a_wake_during_a_turn_leads_to_another_one_at_once() {
    for then in [Then::Wait, Then::Stop, Then::After(seconds(60))] {
        let mut bench = Bench::new(4);
        bench.wake("a", Cause::NewSpec);
        assert!(bench.next().is_some());
        bench.wake("a", Cause::Change);
        bench.wake("a", Cause::Change);
        assert_eq!(bench.next(), None, "one turn at a time");
        bench.done("a", then);
        assert_eq!(bench.next(), Some(("a".into(), Cause::Change, 0)));
        bench.done("a", Then::Wait);
        assert_eq!(bench.next(), None);
    }
}

#[test]
fn a_change_during_a_failing_turn_keeps_the_backoff_and_a_new_spec_does_not() {
    let mut bench = Bench::new(1);
    bench.wake("a", Cause::NewSpec);
    assert!(bench.next().is_some());
    bench.wake("a", Cause::Change);
    bench.done("a", fail());
    assert_eq!(bench.wait(), seconds(1));
    bench.wake("a", Cause::NewSpec);
    bench.wake("a", Cause::Change);
    bench.done("a", fail());
    assert_eq!(bench.next(), Some(("a".into(), Cause::NewSpec, 0)));
}

#[test]
fn a_reload_that_is_folded_with_a_change_still_starts_afresh() {
    let mut bench = Bench::new(1);
    bench.wake("a", Cause::NewSpec);
    assert!(bench.next().is_some());
    bench.wake("a", Cause::Reload);
    bench.wake("a", Cause::Change);
    bench.done("a", fail());
    assert_eq!(bench.next(), Some(("a".into(), Cause::Change, 0)));
}

#[test]
fn a_timer_gives_way_to_any_wake_and_is_at_least_a_second() {
    let mut bench = Bench::new(1);
    bench.wake("a", Cause::NewSpec);
    bench.run(Then::After(Duration::ZERO));
    assert_eq!(bench.wait(), seconds(1));
    for cause in [Cause::NewSpec, Cause::Change, Cause::Read, Cause::Reload, Cause::FirstList, Cause::Resync] {
        bench.done("a", Then::After(seconds(3600)));
        bench.wake("a", cause);
        assert_eq!(bench.next(), Some(("a".into(), cause, 0)));
    }
    bench.done("a", Then::After(Duration::MAX));
    assert_eq!(bench.next(), None);
    assert_eq!(bench.pass(Duration::MAX / 2).next(), None);
}

#[test]
fn a_resync_does_not_delay_what_its_timer_would_run_soon() {
    let mut bench = Bench::new(1);
    bench.wake("a", Cause::NewSpec);
    bench.run(Then::After(seconds(5)));
    bench.wake("a", Cause::Resync);
    assert_eq!(bench.next(), None);
    assert_eq!(bench.pass(seconds(5)).next(), Some(("a".into(), Cause::Timer, 0)));
}

#[test]
fn the_hosts_own_delay_gives_way_to_nothing_and_counts_nothing() {
    let mut bench = Bench::new(1);
    bench.wake("a", Cause::NewSpec);
    bench.run(fail());
    bench.pass(seconds(1));
    assert_eq!(bench.next(), Some(("a".into(), Cause::Retry, 1)));
    bench.wake("a", Cause::Change);
    bench.done("a", Then::Again(seconds(7)));
    bench.wake("a", Cause::Change);
    assert_eq!(bench.wait(), seconds(7));
    bench.done("a", fail());
    assert_eq!(bench.wait(), seconds(2), "the second failure");
    bench.done("a", Then::Again(seconds(7)));
    bench.wake("a", Cause::NewSpec);
    assert_eq!(bench.pass(seconds(6)).next(), None);
    assert_eq!(bench.pass(seconds(1)).next(), Some(("a".into(), Cause::NewSpec, 0)));
}

#[test]
fn another_uid_is_a_new_object() {
    let mut bench = Bench::new(1);
    bench.wake("a", Cause::NewSpec);
    bench.run(fail());
    bench.state.wake(&key("K", "a"), "u2", Cause::NewSpec, 0, bench.now);
    let start = bench.state.next(bench.now).expect("runs at once");
    assert_eq!((&*start.uid, start.failures, start.last_failure), ("u2", 0, None));
    bench.state.wake(&key("K", "a"), "u3", Cause::Change, 0, bench.now);
    assert_eq!(bench.next(), None, "the turn of the former object is not over");
    bench.done("a", fail());
    let start = bench.state.next(bench.now).expect("runs at once");
    assert_eq!((&*start.uid, start.failures), ("u3", 0));
}

#[test]
fn a_forgotten_object_gets_no_turn_and_its_last_one_counts_for_nothing() {
    let mut bench = Bench::new(1);
    bench.wake("a", Cause::NewSpec);
    bench.state.forget(&key("K", "a"));
    assert_eq!(bench.next(), None);
    bench.wake("a", Cause::NewSpec);
    assert!(bench.next().is_some());
    bench.wake("a", Cause::Change);
    bench.state.forget(&key("K", "a"));
    bench.done("a", fail());
    assert_eq!(bench.state.next_due(), None);
    assert_eq!(bench.next(), None);
    assert_eq!(bench.state.depth(), [(kind("K"), Depth::default())]);
}

#[test]
fn a_closed_lane_drops_what_waits_and_a_key_still_has_one_turn_when_it_is_opened_again() {
    let mut bench = Bench::new(8);
    for name in ["a", "b", "c"] {
        bench.wake(name, Cause::NewSpec);
    }
    assert_eq!(bench.names(), ["a", "b", "c"]);
    bench.done("b", fail());
    bench.wake("d", Cause::NewSpec);
    bench.wake("a", Cause::Change);
    bench.state.close(&kind("K"));
    bench.wake("e", Cause::NewSpec);
    assert_eq!(bench.next(), None);
    bench.done("c", fail());
    bench.state.open(kind("K"), pace(8));
    bench.wake("a", Cause::Reload);
    assert_eq!(bench.pass(seconds(60)).next(), None, "a runs since before the lane was closed");
    bench.done("a", fail());
    assert_eq!(bench.next(), Some(("a".into(), Cause::Reload, 0)));
    bench.done("a", Then::Wait);
    bench.state.close(&kind("K"));
    assert_eq!(bench.state.depth(), []);
}

#[test]
fn a_higher_priority_runs_first_and_any_integer_will_do() {
    let mut bench = Bench::new(9);
    for (name, priority) in [("zero", 0), ("lowest", i64::MIN), ("five", 5), ("highest", i64::MAX), ("minus", -1)] {
        bench.wake_with(name, Cause::NewSpec, priority);
    }
    assert_eq!(bench.names(), ["highest", "five", "zero", "minus", "lowest"]);
}

#[test]
fn the_priority_given_last_counts() {
    let mut bench = Bench::new(9);
    bench.wake_with("a", Cause::NewSpec, 0);
    bench.wake_with("b", Cause::NewSpec, 1);
    bench.wake_with("a", Cause::Change, 2);
    assert_eq!(bench.names(), ["a", "b"]);
}

#[test]
fn thirty_seconds_of_waiting_are_worth_one_priority() {
    let mut bench = Bench::new(9);
    bench.wake_with("old", Cause::NewSpec, 1);
    bench.pass(seconds(59)).wake_with("better", Cause::NewSpec, 3);
    bench.pass(seconds(2)).wake_with("late", Cause::NewSpec, 3);
    assert_eq!(bench.names(), ["better", "old", "late"]);
}

#[test]
fn at_equal_priority_live_changes_come_before_retries_before_the_first_list_before_resyncs() {
    let mut bench = Bench::new(1);
    bench.wake("a", Cause::NewSpec);
    bench.run(fail());
    bench.pass(seconds(1));
    for (name, cause) in [
        ("resync", Cause::Resync),
        ("reload", Cause::Reload),
        ("list", Cause::FirstList),
        ("read", Cause::Read),
        ("new", Cause::NewSpec),
        ("change", Cause::Change),
    ] {
        bench.wake(name, cause);
    }
    bench.state.open(kind("K"), pace(9));
    assert_eq!(bench.names(), ["new", "change", "read", "a", "reload", "list", "resync"]);
}

#[test]
fn priority_comes_before_the_cause_except_for_resyncs() {
    let mut bench = Bench::new(9);
    bench.wake_with("live", Cause::Change, 1);
    bench.wake_with("resync", Cause::Resync, 100);
    bench.wake_with("list", Cause::FirstList, 2);
    assert_eq!(bench.names(), ["list", "live", "resync"]);
}

#[test]
fn a_low_priority_and_a_resync_run_beside_a_steady_stream_of_better_ones() {
    let mut bench = Bench::new(1);
    bench.wake_with("low", Cause::FirstList, 1);
    bench.wake_with("resync", Cause::Resync, 9);
    let mut ran = Vec::new();
    for second in 0..300 {
        bench.wake_with(&format!("hot{second}"), Cause::NewSpec, 9);
        bench.wake_with(&format!("hotter{second}"), Cause::NewSpec, 9);
        let (name, ..) = bench.next().expect("something is runnable");
        if !name.starts_with("hot") {
            ran.push((name.clone(), second));
        }
        bench.done(&name, Then::Wait);
        bench.pass(seconds(1));
    }
    // The stream's own backlog grows by half a second each second, so what arrived at 0 is overtaken only by what waits longer.
    assert_eq!(ran.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["resync"], "{ran:?}");
    assert!(ran[0].1 <= 120, "{ran:?}");
    for _ in 0..300 {
        let (name, ..) = bench.next().expect("something is runnable");
        bench.done(&name, Then::Wait);
        bench.pass(seconds(1));
        if name == "low" {
            return;
        }
    }
    panic!("the low priority starved");
}

#[test]
fn nothing_that_comes_long_after_a_low_priority_runs_before_it_nor_after_a_restart() {
    // Eight priorities of 30 s each, and what the first list counts as younger.
    let bound = 8 * 30 + 15;
    for cause in [Cause::NewSpec, Cause::FirstList] {
        // A restart is a new queue, which finds everything in its first list.
        let mut bench = Bench::new(1);
        bench.wake_with("low", cause, 1);
        (0..500).for_each(|number| bench.wake_with(&format!("old{number}"), cause, 9));
        let ran_at = (0..2_000).find(|second| {
            bench.wake_with(&format!("{second}"), Cause::NewSpec, 9);
            let (name, ..) = bench.next().expect("something is runnable");
            bench.done(&name, Then::Wait);
            bench.pass(seconds(1));
            assert!(name.parse::<u64>().is_ok_and(|came| came <= bound) || name == "low" || name.starts_with("old"), "{name} came later");
            name == "low"
        });
        assert!(ran_at.is_some_and(|second| second <= 500 + bound), "{ran_at:?}");
    }
}

#[test]
fn lanes_take_turns_however_much_one_of_them_has() {
    let mut state = State::default();
    for (name, objects) in [("A", 100), ("B", 3), ("C", 3)] {
        state.open(kind(name), pace(1000));
        for object in 0..objects {
            state.wake(&key(name, &object.to_string()), "u", Cause::NewSpec, 0, Duration::ZERO);
        }
    }
    let kinds: String = std::iter::from_fn(|| state.next(Duration::ZERO)).take(12).map(|start| start.key.kind.kind.to_string()).collect();
    assert_eq!(kinds, "ABCABCABCAAA");
}

#[test]
fn a_lane_that_is_full_or_held_does_not_block_the_others() {
    let mut state = State::default();
    let now = Duration::ZERO;
    for (name, concurrency) in [("full", 2), ("held", 0), ("free", 8)] {
        state.open(kind(name), pace(concurrency));
        for object in ["a", "b", "c"] {
            state.wake(&key(name, object), "u", Cause::NewSpec, 0, now);
        }
    }
    let mut kinds: Vec<String> = std::iter::from_fn(|| state.next(now)).map(|start| start.key.kind.kind.to_string()).collect();
    kinds.sort();
    assert_eq!(kinds, ["free", "free", "free", "full", "full"]);
    state.open(kind("held"), pace(1));
    assert_eq!(state.next(now).map(|start| start.key), Some(key("held", "a")));
    state.done(&key("full", "a"), Then::Wait, now, 0.0);
    assert_eq!(state.next(now).map(|start| start.key), Some(key("full", "c")));
}

#[test]
fn a_hundred_thousand_objects_are_no_matter() {
    let mut bench = Bench::new(1);
    for object in 0..100_000 {
        bench.wake_with(&object.to_string(), Cause::FirstList, object % 10);
    }
    let mut last_priority = 9;
    for _ in 0..100_000 {
        let (name, ..) = bench.next().expect("something is runnable");
        let priority = name.parse::<i64>().expect("a number") % 10;
        assert!(priority <= last_priority);
        last_priority = priority;
        bench.done(&name, Then::After(seconds(60)));
    }
    assert_eq!(bench.state.depth(), [(kind("K"), Depth { ready: 0, delayed: 100_000, running: 0 })]);
}

#[test]
fn a_lane_that_prefers_the_sound_starts_them_first_and_the_others_when_there_are_none() {
    let mut bench = Bench::new(1);
    bench.wake("a", Cause::NewSpec);
    bench.run(Then::Fail { cause: "trap".into(), after: None });
    assert!(bench.state.has_to_probe(&kind("K")), "it runs again");
    bench.pass(Duration::from_secs(60));
    bench.wake_with("resynced", Cause::Resync, 0);
    bench.wake_with("sound", Cause::NewSpec, -100);
    bench.state.prefer_sound(&kind("K"), true);
    for name in ["sound", "resynced", "a"] {
        assert_eq!(bench.next().map(|(name, ..)| name).as_deref(), Some(name));
        bench.done(name, Then::Wait);
    }
    assert!(!bench.state.has_to_probe(&kind("K")));
}

#[test]
fn an_object_that_looks_again_some_time_is_not_there_to_probe() {
    let mut bench = Bench::new(1);
    bench.wake("a", Cause::NewSpec);
    assert!(bench.state.has_to_probe(&kind("K")));
    bench.run(Then::After(Duration::from_secs(3600)));
    assert!(!bench.state.has_to_probe(&kind("K")));
}
