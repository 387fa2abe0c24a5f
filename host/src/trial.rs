//! A new version on trial: which objects it serves, what is held against it, and when it has proven itself.
//!
//! # Expected flow
//! The loader puts a version that is to take the place of a good one on [`Trial`]; the controller asks [`Trial::takes_part`] for each
//! object, runs the former version too where the new one fails (a second opinion), and [records](Trial::record) what came of both. A
//! trial ends with one [`Judgement`], by what was recorded or [by time](Trial::tick).
//!
//! # Guarantees
//! - Only what the former version can do counts against the new one: a back end that is down, or an object that cannot be handled, is
//!   no evidence.
//! - Time alone proves nothing where something was amiss: with failures that both versions have, or with outcomes that could not be
//!   written, the trial goes on until a run is good. A kind whose objects are all settled, or that has none, has nothing to prove it with:
//!   there the time is enough.
//! - There is one judgement, whoever asks first.
//! - At least one object takes part, once there is one.
//!
//! # Assumptions
//! It is ticked several times a second while the process leads and the plugin is not paused; time without ticks does not count.

use std::{
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

/// How a new version takes over from the former one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rollout {
    /// It serves every object at once, and is watched during its first runs.
    #[default]
    Immediate,
    /// It serves a share of the objects first.
    Staged {
        /// In percent, from 1 to 99.
        share: u8,
        /// For how long.
        time: Duration,
    },
}

/// Runs after which an immediate rollout has proven itself: enough to meet each path of a usual handler, and over in a second when busy.
pub const RUNS: u32 = 20;
/// Time after which it has proven itself, however few runs there were.
pub const TIME: Duration = Duration::from_secs(60);
/// The longest time between two ticks that counts: what is longer is a time in which nobody led.
const STEP: Duration = Duration::from_secs(1);
/// Failures that the former version does not have after which a version is rolled back. One may be a back end that came back in
/// between; three are none.
const FAILURES: u32 = 3;

/// What a run of the new version came to, as far as it counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Evidence {
    /// It did what it was to do.
    Good,
    /// It failed where the former version did not, with this cause.
    Worse {
        /// A sentence.
        cause: String,
        /// Whether it trapped or broke a limit, which no back end can make it do: once is enough.
        broken: bool,
    },
    /// It failed, and so did the former version.
    Same,
    /// It could not show what it does: the host could not run it or write its outcome, and no better that of the former version; or
    /// the other side told it to wait.
    Hindered,
}

impl Evidence {
    /// For a metric label.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Worse { .. } => "worse",
            Self::Same => "same",
            Self::Hindered => "hindered",
        }
    }

    /// All that [`as_str`](Self::as_str) can say, for metrics that exist before they count.
    pub const WORDS: [&str; 4] = ["good", "worse", "same", "hindered"];
}

/// How a trial ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Judgement {
    /// The version is the stable one now.
    Passed,
    /// The version is rolled back; the sentence says why.
    Failed(String),
}

/// One trial of one version.
#[derive(Debug)]
pub struct Trial {
    rollout: Rollout,
    /// Objects whose hash is at most this take part.
    threshold: AtomicU64,
    /// Whether any object is known to take part.
    has_objects: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// When it was ticked last.
    ticked: Option<Instant>,
    /// The time that it has had.
    time: Duration,
    good: u32,
    same: u32,
    worse: u32,
    hindered: u32,
    judged: bool,
}

impl Trial {
    /// Begins when it is ticked for the first time.
    pub fn new(rollout: Rollout) -> Self {
        let threshold = match rollout {
            Rollout::Immediate => u64::MAX,
            Rollout::Staged { share, .. } => u64::MAX / 100 * u64::from(share),
        };
        let has_objects = AtomicBool::new(rollout == Rollout::Immediate);
        Self { rollout, threshold: threshold.into(), has_objects, state: Mutex::default() }
    }

    /// How the version takes over.
    pub fn rollout(&self) -> Rollout {
        self.rollout
    }

    /// Whether the new version serves the object with this uid.
    pub fn takes_part(&self, uid: &str) -> bool {
        hash(uid) <= self.threshold.load(Ordering::Relaxed)
    }

    /// Whether no object is known to take part.
    pub fn lacks_objects(&self) -> bool {
        !self.has_objects.load(Ordering::Relaxed)
    }

    /// Takes care that one of these objects takes part. Returns the one that does from now on, if it did not before.
    pub fn include_one<'u>(&self, uids: impl Iterator<Item = &'u str>) -> Option<&'u str> {
        let first = uids.map(|uid| (hash(uid), uid)).min()?;
        self.has_objects.store(true, Ordering::Relaxed);
        let before = self.threshold.fetch_max(first.0, Ordering::Relaxed);
        (first.0 > before).then_some(first.1)
    }

    /// Takes in what a run came to. A judgement, if that decides.
    pub fn record(&self, evidence: Evidence) -> Option<Judgement> {
        let mut state = self.lock();
        let failed = match evidence {
            Evidence::Good => {
                state.good += 1;
                None
            }
            Evidence::Same => {
                state.same += 1;
                None
            }
            Evidence::Hindered => {
                state.hindered += 1;
                None
            }
            Evidence::Worse { cause, broken } => {
                state.worse += 1;
                (broken || state.worse >= FAILURES).then_some(cause)
            }
        };
        let judgement = match failed {
            Some(cause) => {
                let runs = state.good + state.same + state.worse;
                Judgement::Failed(format!(
                    "it failed in {} of {runs} runs where the former version did not; the last time: {cause}",
                    state.worse
                ))
            }
            None if self.rollout == Rollout::Immediate && state.good >= RUNS && state.worse == 0 => Judgement::Passed,
            None => return None,
        };
        state.judge(judgement)
    }

    /// Looks at the time. A judgement, if that is up.
    pub fn tick(&self) -> Option<Judgement> {
        let mut state = self.lock();
        let now = Instant::now();
        let step = state.ticked.replace(now).map_or(Duration::ZERO, |before| now.duration_since(before));
        state.time += step.min(STEP);
        let time = match self.rollout {
            Rollout::Immediate => TIME,
            Rollout::Staged { time, .. } => time,
        };
        let State { good, same, worse, hindered, .. } = *state;
        let judgement = match () {
            () if state.time < time => return None,
            () if worse > good => {
                Judgement::Failed(format!("it failed in {worse} of {} runs where the former version did not", good + worse))
            }
            () if good > 0 || same + hindered == 0 => Judgement::Passed,
            () => return None,
        };
        state.judge(judgement)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn judge(&mut self, judgement: Judgement) -> Option<Judgement> {
        (!std::mem::replace(&mut self.judged, true)).then_some(judgement)
    }
}

/// Spreads uids evenly, and the same on every replica and in every version of the host.
fn hash(uid: &str) -> u64 {
    let digest: [u8; 32] = Sha256::digest(uid).into();
    let (first, _) = digest.split_first_chunk().expect("a digest has 32 bytes");
    u64::from_be_bytes(*first)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STAGED: Rollout = Rollout::Staged { share: 10, time: Duration::from_secs(120) };

    fn worse(broken: bool) -> Evidence {
        Evidence::Worse { cause: "the mail server said no".into(), broken }
    }

    fn failed(judgement: Option<Judgement>) -> String {
        match judgement {
            Some(Judgement::Failed(why)) => why,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn one_trap_that_the_former_version_has_not_is_enough() {
        let trial = Trial::new(Rollout::Immediate);
        assert_eq!(trial.record(Evidence::Good), None);
        let why = failed(trial.record(worse(true)));
        assert_eq!(why, "it failed in 1 of 2 runs where the former version did not; the last time: the mail server said no");
    }

    #[test]
    fn other_failures_need_three_and_what_the_former_version_shares_is_none() {
        let trial = Trial::new(STAGED);
        for evidence in [Evidence::Same, worse(false), Evidence::Same, Evidence::Same, worse(false), Evidence::Good] {
            assert_eq!(trial.record(evidence), None);
        }
        assert!(failed(trial.record(worse(false))).contains("3 of 7 runs"));
    }

    #[test]
    fn an_immediate_rollout_is_proven_by_runs_and_one_in_doubt_is_not() {
        let trial = Trial::new(Rollout::Immediate);
        let doubted = Trial::new(Rollout::Immediate);
        assert_eq!(doubted.record(worse(false)), None);
        for _ in 1..RUNS {
            assert_eq!((trial.record(Evidence::Good), doubted.record(Evidence::Good)), (None, None));
        }
        assert_eq!((trial.record(Evidence::Good), doubted.record(Evidence::Good)), (Some(Judgement::Passed), None));
        assert_eq!(trial.record(worse(true)), None, "it has been judged");
    }

    /// Ticks for a time as a leader does, until there is a judgement.
    async fn tick_for(trial: &Trial, time: Duration) -> Option<Judgement> {
        const TICK: Duration = Duration::from_millis(250);
        let mut judged = trial.tick();
        for _ in 0..time.as_millis() / TICK.as_millis() {
            tokio::time::advance(TICK).await;
            judged = judged.or(trial.tick());
        }
        judged
    }

    #[tokio::test(start_paused = true)]
    async fn time_proves_a_version_that_does_more_good_than_harm() {
        for (evidence, passes) in [(vec![], true), (vec![worse(false)], false), (vec![worse(false), Evidence::Good], true)] {
            let trial = Trial::new(Rollout::Immediate);
            for evidence in evidence {
                trial.record(evidence);
            }
            assert_eq!(tick_for(&trial, TIME - Duration::from_secs(1)).await, None);
            assert_eq!(tick_for(&trial, Duration::from_secs(1)).await == Some(Judgement::Passed), passes);
            assert_eq!(trial.tick(), None, "it has been judged");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn time_proves_nothing_where_all_that_happened_was_amiss_until_a_run_is_good() {
        for amiss in [Evidence::Same, Evidence::Hindered] {
            let trial = Trial::new(Rollout::Immediate);
            trial.record(amiss.clone());
            assert_eq!(tick_for(&trial, TIME * 10).await, None, "{amiss:?}");
            trial.record(Evidence::Good);
            assert_eq!(trial.tick(), Some(Judgement::Passed), "{amiss:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn time_in_which_nobody_leads_does_not_count() {
        let trial = Trial::new(Rollout::Immediate);
        assert_eq!(tick_for(&trial, TIME / 2).await, None);
        tokio::time::advance(TIME * 10).await;
        assert_eq!(tick_for(&trial, TIME / 2 - Duration::from_secs(2)).await, None);
        assert_eq!(tick_for(&trial, Duration::from_secs(2)).await, Some(Judgement::Passed));
    }

    #[tokio::test(start_paused = true)]
    async fn a_staged_rollout_takes_its_time_however_well_it_goes() {
        let trial = Trial::new(STAGED);
        for _ in 0..10 * RUNS {
            assert_eq!(trial.record(Evidence::Good), None);
        }
        assert_eq!(tick_for(&trial, Duration::from_secs(119)).await, None);
        assert_eq!(tick_for(&trial, Duration::from_secs(1)).await, Some(Judgement::Passed));
    }

    #[test]
    fn a_share_is_about_that_many_objects_and_at_least_one() {
        let uids: Vec<String> = (0..10_000).map(|number| format!("uid-{number}")).collect();
        let trial = Trial::new(STAGED);
        let part = uids.iter().filter(|uid| trial.takes_part(uid)).count();
        assert!((900..1100).contains(&part), "{part}");
        assert!(uids.iter().all(|uid| Trial::new(Rollout::Immediate).takes_part(uid)));
        let outside = uids.iter().filter(|uid| !trial.takes_part(uid)).take(3).map(String::as_str).collect::<Vec<_>>();
        let included = trial.include_one(outside.iter().copied()).expect("one of three");
        assert!(trial.takes_part(included));
        assert!(!trial.lacks_objects());
        assert_eq!(trial.include_one(outside.iter().copied()), None, "it takes part already");
        assert_eq!(trial.include_one(std::iter::empty()), None);
    }

    proptest! {
        #[test]
        fn no_order_of_evidence_leads_to_a_second_judgement(steps in prop::collection::vec(0..5_u8, 0..200)) {
            let trial = Trial::new(Rollout::Immediate);
            let judged = steps.into_iter().filter_map(|step| trial.record(match step {
                0 => worse(true),
                1 => worse(false),
                2 => Evidence::Same,
                3 => Evidence::Hindered,
                _ => Evidence::Good,
            }));
            prop_assert!(judged.count() <= 1);
        }
    }
}
