//! The circuit breaker of a plugin: where its handler mostly traps, its objects wait, and one at a time probes whether it has healed.
//!
//! # Guarantees
//! Nothing is dropped: objects are delayed while it is open, and their own backoff goes on within.

use std::time::Duration;

use tokio::time::Instant;

/// Traps and broken limits within a [`WINDOW`] that open it: a handler that does this to one object in a hundred is left alone.
const TRAPS: u32 = 20;
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
    Closed,
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
    pub fn record(&mut self, broken: bool) -> Option<Change> {
        let now = Instant::now();
        match self.state {
            State::Open { .. } => None,
            State::HalfOpen { pause } if broken => Some(self.open(now, (pause * 2).min(PAUSE_MAX))),
            State::HalfOpen { .. } => {
                *self = Self::default();
                Some(Change::Closed)
            }
            State::Closed => {
                let (runs, traps) = self.count(now, broken);
                (traps >= TRAPS && traps.saturating_mul(2) >= runs).then(|| self.open(now, PAUSE))
            }
        }
    }

    /// Looks at the time. What that changes, if anything.
    pub fn tick(&mut self) -> Option<Change> {
        match self.state {
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
    fn count(&mut self, now: Instant, broken: bool) -> (u32, u32) {
        let step = now.duration_since(*self.began.get_or_insert(now)).as_secs() / STEP.as_secs();
        let slot = &mut self.steps[usize::try_from(step).unwrap_or_default() % STEPS];
        if slot.0 != step {
            *slot = (step, 0, 0);
        }
        slot.1 = slot.1.saturating_add(1);
        slot.2 = slot.2.saturating_add(u32::from(broken));
        let recent = self.steps.iter().filter(|(at, ..)| at + STEPS as u64 > step);
        recent
            .fold((0, 0), |(runs, traps), (_, more_runs, more_traps)| (runs.saturating_add(*more_runs), traps.saturating_add(*more_traps)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traps(breaker: &mut Breaker, number: u32) -> Option<Change> {
        (0..number).filter_map(|_| breaker.record(true)).next_back()
    }

    #[tokio::test(start_paused = true)]
    async fn it_opens_at_many_traps_a_minute_probes_with_growing_pauses_and_closes_at_a_good_run() {
        let mut breaker = Breaker::default();
        assert_eq!((traps(&mut breaker, TRAPS - 1), breaker.flow()), (None, Flow::Free));
        assert_eq!((traps(&mut breaker, 1), breaker.flow()), (Some(Change::Opened), Flow::None));
        assert_eq!(breaker.record(false), None, "what ran on when it opened");
        for pause in [10, 20, 40, 80, 160, 300, 300] {
            tokio::time::advance(Duration::from_secs(pause) - Duration::from_millis(1)).await;
            assert_eq!(breaker.tick(), None, "{pause} s");
            tokio::time::advance(Duration::from_millis(1)).await;
            assert_eq!((breaker.tick(), breaker.flow()), (Some(Change::Probes), Flow::One));
            assert_eq!(breaker.record(true), Some(Change::Opened));
        }
        tokio::time::advance(PAUSE_MAX).await;
        breaker.tick();
        assert_eq!((breaker.record(false), breaker.flow()), (Some(Change::Closed), Flow::Free));
        assert_eq!(traps(&mut breaker, TRAPS - 1), None, "it begins anew");
    }

    #[tokio::test(start_paused = true)]
    async fn traps_that_are_few_among_good_runs_or_long_ago_do_not_open_it() {
        let mut breaker = Breaker::default();
        for _ in 0..10 * TRAPS {
            assert_eq!((breaker.record(true), breaker.record(false), breaker.record(false)), (None, None, None));
        }
        let mut slow = Breaker::default();
        for _ in 0..10 * TRAPS {
            assert_eq!(slow.record(true), None);
            tokio::time::advance(Duration::from_millis(3_200)).await;
        }
        tokio::time::advance(WINDOW).await;
        assert_eq!(traps(&mut slow, TRAPS - 1), None);
    }
}
