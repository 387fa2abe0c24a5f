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
//! - There is one judgement, whoever asks first.
//! - At least one object takes part, once there is one.
//!
//! # Assumptions
//! Time is tokio's, and stands still while the process does not lead: nobody ticks then.

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
    since: Option<Instant>,
    good: u32,
    same: u32,
    worse: u32,
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
        let since = *state.since.get_or_insert_with(Instant::now);
        let time = match self.rollout {
            Rollout::Immediate => TIME,
            Rollout::Staged { time, .. } => time,
        };
        if since.elapsed() < time {
            return None;
        }
        let State { good, worse, .. } = *state;
        let judgement = if worse > good {
            Judgement::Failed(format!("it failed in {worse} of {} runs where the former version did not", good + worse))
        } else {
            Judgement::Passed
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

    #[tokio::test(start_paused = true)]
    async fn time_proves_a_version_that_does_more_good_than_harm() {
        for (evidence, passes) in [(vec![], true), (vec![worse(false)], false), (vec![worse(false), Evidence::Good], true)] {
            let trial = Trial::new(Rollout::Immediate);
            assert_eq!(trial.tick(), None);
            for evidence in evidence {
                trial.record(evidence);
            }
            tokio::time::advance(TIME).await;
            assert_eq!(trial.tick() == Some(Judgement::Passed), passes);
            assert_eq!(trial.tick(), None, "it has been judged");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_staged_rollout_takes_its_time_however_well_it_goes() {
        let trial = Trial::new(STAGED);
        assert_eq!(trial.tick(), None);
        for _ in 0..10 * RUNS {
            assert_eq!(trial.record(Evidence::Good), None);
        }
        tokio::time::advance(Duration::from_secs(119)).await;
        assert_eq!(trial.tick(), None);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(trial.tick(), Some(Judgement::Passed));
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
        fn no_order_of_evidence_leads_to_a_second_judgement(steps in prop::collection::vec(0..4_u8, 0..200)) {
            let trial = Trial::new(Rollout::Immediate);
            let judged = steps.into_iter().filter_map(|step| trial.record(match step {
                0 => worse(true),
                1 => worse(false),
                2 => Evidence::Same,
                _ => Evidence::Good,
            }));
            prop_assert!(judged.count() <= 1);
        }
    }
}
