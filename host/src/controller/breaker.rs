//! The circuit breaker of a plugin: where its handler mostly traps, its objects wait, and one at a time probes whether it has healed.
//!
//! # Guarantees
//! - Nothing is dropped: objects are delayed while it is open, and their own backoff goes on within.
//! - Objects that make the handler trap hold up the others for one pause at most: one object alone does not open it, objects that have
//!   not failed are the first to probe, and the pauses grow only where one of these traps.
//! - It is not open for longer than there is something to probe with.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    time::Duration,
};

use tokio::time::Instant;

use crate::object::Key;

/// Traps and broken limits within a [`WINDOW`] that open it: a handler that does this to one object in a hundred is left alone.
const TRAPS: u32 = 20;
/// How many objects they have to be of: fewer are the objects' affair, and their backoff is pause enough.
const OBJECTS: usize = 3;
/// The time that is looked back at, in steps.
const WINDOW: Duration = Duration::from_secs(60);
const STEP: Duration = Duration::from_secs(10);
const STEPS: usize = (WINDOW.as_secs() / STEP.as_secs()) as usize;
/// How long it is open at first; doubled for each probe that traps, up to [`PAUSE_MAX`].
const PAUSE: Duration = Duration::from_secs(10);
const PAUSE_MAX: Duration = Duration::from_secs(300);

/// See the module.
#[derive(Debug, Default)]
pub struct Breaker {
    state: State,
    began: Option<Instant>,
    /// Of each step of the window: its number, and how many runs there were and were broken.
    steps: [(u64, u32, u32); STEPS],
    /// The objects that trapped, each with the number of the last step in which it did.
    trapped: HashMap<u64, u64>,
}

/// A run of the handler.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// Tells objects apart.
    pub object: u64,
    /// Whether its object had not failed before.
    pub sound: bool,
    /// Whether the handler trapped or broke a limit.
    pub broken: bool,
}

impl Run {
    /// What tells an object apart from others of its kind.
    pub fn object(key: &Key) -> u64 {
        let mut hasher = DefaultHasher::new();
        key.object.hash(&mut hasher);
        hasher.finish()
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Closed,
    Open {
        until: Instant,
        pause: Duration,
    },
    HalfOpen {
        pause: Duration,
    },
}

/// What has become of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Objects wait from now on.
    Opened,
    /// One may probe.
    Probes,
    /// All run again.
    Closed {
        /// Whether it works on an object that it failed on before: the others need not wait out their backoff either.
        healed: bool,
    },
}

/// How many objects may run at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// As the plugin has it.
    Free,
    /// One.
    One,
    /// None.
    None,
}

impl Breaker {
    /// Takes in a run. What that changes, if anything.
    pub fn record(&mut self, run: Run) -> Option<Change> {
        let now = Instant::now();
        match self.state {
            State::Open { .. } => None,
            State::HalfOpen { pause } if run.broken => {
                // That an object fails again says nothing of the others, which must not wait the longer for it.
                let pause = if run.sound { pause * 2 } else { pause };
                Some(self.open(now, pause.min(PAUSE_MAX)))
            }
            State::HalfOpen { .. } => {
                *self = Self::default();
                Some(Change::Closed { healed: !run.sound })
            }
            State::Closed => {
                let (runs, traps) = self.count(now, run);
                let many = traps >= TRAPS && traps.saturating_mul(2) >= runs && self.trapped.len() >= OBJECTS;
                many.then(|| self.open(now, PAUSE))
            }
        }
    }

    /// Looks at the time, and where it is half open at whether anything is left to probe with. What that changes, if anything.
    pub fn tick(&mut self, has_to_probe: impl FnOnce() -> bool) -> Option<Change> {
        match self.state {
            State::HalfOpen { .. } if !has_to_probe() => {
                *self = Self::default();
                Some(Change::Closed { healed: false })
            }
            State::Open { until, pause } if until <= Instant::now() => {
                self.state = State::HalfOpen { pause };
                Some(Change::Probes)
            }
            _ => None,
        }
    }

    /// How many objects may run at once.
    pub fn flow(&self) -> Flow {
        match self.state {
            State::Closed => Flow::Free,
            State::HalfOpen { .. } => Flow::One,
            State::Open { .. } => Flow::None,
        }
    }

    fn open(&mut self, now: Instant, pause: Duration) -> Change {
        self.state = State::Open { until: now + pause, pause };
        Change::Opened
    }

    /// Counts a run in, and what lies in the window.
    fn count(&mut self, now: Instant, run: Run) -> (u32, u32) {
        let step = now.duration_since(*self.began.get_or_insert(now)).as_secs() / STEP.as_secs();
        let is_recent = |at: u64| at + STEPS as u64 > step;
        let slot = &mut self.steps[usize::try_from(step).unwrap_or_default() % STEPS];
        if slot.0 != step {
            *slot = (step, 0, 0);
            self.trapped.retain(|_, at| is_recent(*at));
        }
        slot.1 = slot.1.saturating_add(1);
        slot.2 = slot.2.saturating_add(u32::from(run.broken));
        if run.broken {
            self.trapped.insert(run.object, step);
        }
        let recent = self.steps.iter().filter(|(at, ..)| is_recent(*at));
        recent
            .fold((0, 0), |(runs, traps), (_, more_runs, more_traps)| (runs.saturating_add(*more_runs), traps.saturating_add(*more_traps)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(object: u64, sound: bool, broken: bool) -> Run {
        Run { object, sound, broken }
    }

    /// Traps of ten objects.
    fn traps(breaker: &mut Breaker, number: u32) -> Option<Change> {
        (0..number).filter_map(|number| breaker.record(run(u64::from(number % 10), true, true))).next_back()
    }

    /// One that has been opened.
    fn open() -> Breaker {
        let mut breaker = Breaker::default();
        assert_eq!(traps(&mut breaker, TRAPS), Some(Change::Opened));
        breaker
    }

    /// Lets its pause go by.
    async fn until_it_probes(breaker: &mut Breaker, pause: Duration) {
        tokio::time::advance(pause - Duration::from_millis(1)).await;
        assert_eq!(breaker.tick(|| true), None, "{pause:?}");
        tokio::time::advance(Duration::from_millis(1)).await;
        assert_eq!((breaker.tick(|| true), breaker.flow()), (Some(Change::Probes), Flow::One));
    }

    #[tokio::test(start_paused = true)]
    async fn it_opens_at_many_traps_a_minute_probes_with_growing_pauses_and_closes_at_a_good_run() {
        let mut breaker = Breaker::default();
        assert_eq!((traps(&mut breaker, TRAPS - 1), breaker.flow()), (None, Flow::Free));
        assert_eq!((traps(&mut breaker, 1), breaker.flow()), (Some(Change::Opened), Flow::None));
        assert_eq!(breaker.record(run(0, true, false)), None, "what ran on when it opened");
        for pause in [10, 20, 40, 80, 160, 300, 300] {
            until_it_probes(&mut breaker, Duration::from_secs(pause)).await;
            assert_eq!(breaker.record(run(99, true, true)), Some(Change::Opened));
        }
        until_it_probes(&mut breaker, PAUSE_MAX).await;
        assert_eq!((breaker.record(run(99, false, false)), breaker.flow()), (Some(Change::Closed { healed: true }), Flow::Free));
        assert_eq!(traps(&mut breaker, TRAPS - 1), None, "it begins anew");
    }

    #[tokio::test(start_paused = true)]
    async fn one_object_does_not_open_it_and_those_that_fail_again_do_not_make_the_others_wait_longer() {
        let mut breaker = Breaker::default();
        for number in 0..10 * TRAPS {
            assert_eq!(breaker.record(run(u64::from(number % 2), false, true)), None, "two objects");
        }
        let mut breaker = open();
        for _ in 0..5 {
            until_it_probes(&mut breaker, PAUSE).await;
            assert_eq!(breaker.record(run(1, false, true)), Some(Change::Opened));
        }
        until_it_probes(&mut breaker, PAUSE).await;
        let closed = breaker.record(run(99, true, false));
        assert_eq!(closed, Some(Change::Closed { healed: false }), "those that failed wait out their own backoff");
    }

    #[tokio::test(start_paused = true)]
    async fn it_closes_where_nothing_is_left_to_probe_with() {
        let mut breaker = open();
        assert_eq!(breaker.tick(|| false), None, "its pause is not over");
        until_it_probes(&mut breaker, PAUSE).await;
        assert_eq!((breaker.tick(|| false), breaker.flow()), (Some(Change::Closed { healed: false }), Flow::Free));
    }

    #[tokio::test(start_paused = true)]
    async fn traps_that_are_few_among_good_runs_or_long_ago_do_not_open_it() {
        let mut breaker = Breaker::default();
        for number in 0..10 * TRAPS {
            for broken in [true, false, false] {
                assert_eq!(breaker.record(run(u64::from(number), true, broken)), None);
            }
        }
        let mut slow = Breaker::default();
        for number in 0..10 * TRAPS {
            assert_eq!(slow.record(run(u64::from(number), true, true)), None);
            tokio::time::advance(Duration::from_millis(3_200)).await;
        }
        tokio::time::advance(WINDOW).await;
        assert_eq!(traps(&mut slow, TRAPS - 1), None);
    }
}
