//! The laws of the queue under random use, against a model that knows only what is promised.

use std::collections::HashMap;

use proptest::{collection::vec, prelude::*};

use super::*;

const KINDS: [&str; 3] = ["A", "B", "C"];

#[derive(Clone, Debug)]
enum Step {
    Open(usize, usize),
    Close(usize),
    Redrive(usize),
    Wake { kind: usize, object: u8, uid: u8, cause: Cause, priority: i64 },
    Forget { kind: usize, object: u8 },
    Next,
    Done { which: prop::sample::Index, then: Then },
    Pass(Duration),
}

fn step() -> impl Strategy<Value = Step> {
    let cause = prop::sample::select(Cause::ALL.to_vec());
    let priority = prop_oneof![4 => -2..3_i64, 1 => any::<i64>()];
    let millis = |most: u64| (0..most).prop_map(Duration::from_millis);
    let then = prop_oneof![
        3 => Just(Then::Wait),
        1 => Just(Then::Stop),
        1 => millis(20_000).prop_map(Then::After),
        3 => prop::option::of(millis(5_000)).prop_map(|after| Then::Fail { cause: "no".into(), after }),
        1 => millis(9_000).prop_map(Then::Again),
    ];
    prop_oneof![
        1 => (0..3_usize, 0..4_usize).prop_map(|(kind, concurrency)| Step::Open(kind, concurrency)),
        1 => (0..3_usize).prop_map(Step::Close),
        1 => (0..3_usize).prop_map(Step::Redrive),
        12 => (0..3_usize, 0..5_u8, prop_oneof![9 => Just(0), 1 => Just(1_u8)], cause, priority)
            .prop_map(|(kind, object, uid, cause, priority)| Step::Wake { kind, object, uid, cause, priority }),
        1 => (0..3_usize, 0..5_u8).prop_map(|(kind, object)| Step::Forget { kind, object }),
        10 => Just(Step::Next),
        8 => (any::<prop::sample::Index>(), then).prop_map(|(which, then)| Step::Done { which, then }),
        4 => millis(4_000).prop_map(Step::Pass),
    ]
}

/// What is promised of one key.
#[derive(Debug, Default)]
struct Promise {
    uid: String,
    /// Whether a turn is to come.
    owed: bool,
    failures: u32,
    /// No turn starts before this.
    not_before: Duration,
    /// Whether not even a new spec changes that.
    held: bool,
}

#[derive(Debug)]
struct Run {
    key: Key,
    /// Whether its end says nothing about the object that has the name now.
    outlived: bool,
    /// Whether the object has a new spec or version of the plugin since.
    afresh: bool,
}

#[derive(Default)]
struct Model {
    state: State,
    now: Duration,
    concurrency: HashMap<GroupKind, usize>,
    promises: HashMap<Key, Promise>,
    running: Vec<Run>,
}

impl Model {
    fn take(&mut self, step: Step) -> Result<(), TestCaseError> {
        let key_of = |kind: usize, object: u8| key(KINDS[kind], &object.to_string());
        match step {
            Step::Open(index, concurrency) => self.open(index, concurrency),
            Step::Close(index) => self.close(&kind(KINDS[index])),
            Step::Redrive(index) => self.redrive(&kind(KINDS[index])),
            Step::Wake { kind, object, uid, cause, priority } => self.wake(&key_of(kind, object), &uid.to_string(), cause, priority),
            Step::Forget { kind, object } => {
                let key = key_of(kind, object);
                self.state.forget(&key);
                self.promises.remove(&key);
                self.running.iter_mut().filter(|run| run.key == key).for_each(|run| run.outlived = true);
            }
            Step::Next => drop(self.next()?),
            Step::Done { which, then } if !self.running.is_empty() => self.done(which.index(self.running.len()), then),
            Step::Done { .. } => {}
            Step::Pass(time) => self.now += time,
        }
        Ok(())
    }

    fn open(&mut self, index: usize, concurrency: usize) {
        self.state.open(kind(KINDS[index]), pace(concurrency));
        self.concurrency.insert(kind(KINDS[index]), concurrency);
    }

    fn close(&mut self, kind: &GroupKind) {
        self.state.close(kind);
        self.concurrency.remove(kind);
        let Self { running, promises, .. } = self;
        promises.retain(|key, promise| {
            promise.owed &= key.kind != *kind;
            key.kind != *kind || running.iter().any(|run| run.key == *key)
        });
        running.iter_mut().filter(|run| run.key.kind == *kind).for_each(|run| run.afresh = false);
    }

    fn redrive(&mut self, kind: &GroupKind) {
        self.state.redrive(kind, self.now);
        let Self { running, promises, .. } = self;
        for (_, promise) in promises.iter_mut().filter(|(key, _)| key.kind == *kind && running.iter().all(|run| run.key != **key)) {
            promise.failures = 0;
            if !promise.held {
                promise.not_before = Duration::ZERO;
            }
        }
    }

    fn wake(&mut self, key: &Key, uid: &str, cause: Cause, priority: i64) {
        self.state.wake(key, uid, cause, priority, self.now);
        if !self.concurrency.contains_key(&key.kind) {
            return;
        }
        let run = self.running.iter_mut().find(|run| run.key == *key);
        let promise = self.promises.entry(key.clone()).or_default();
        if promise.uid != uid {
            *promise = Promise { uid: uid.into(), ..Promise::default() };
            run.into_iter().for_each(|run| run.outlived = true);
        } else if matches!(cause, Cause::NewSpec | Cause::Deletion | Cause::Redrive | Cause::Reload) {
            promise.failures = 0;
            if !promise.held {
                promise.not_before = Duration::ZERO;
            }
            run.into_iter().for_each(|run| run.afresh = true);
        }
        promise.owed = true;
    }

    fn next(&mut self) -> Result<bool, TestCaseError> {
        let Some(start) = self.state.next(self.now) else { return Ok(false) };
        let key = start.key;
        prop_assert!(self.running.iter().all(|run| run.key != key), "two turns of {key} at once");
        let running = self.running.iter().filter(|run| run.key.kind == key.kind).count();
        prop_assert!(running < self.concurrency.get(&key.kind).copied().unwrap_or(0), "too many turns of {}", key.kind);
        let Some(promise) = self.promises.get_mut(&key).filter(|promise| promise.owed) else {
            return Err(TestCaseError::fail(format!("nobody asked for a turn of {key}")));
        };
        prop_assert_eq!(&*start.uid, &promise.uid);
        prop_assert_eq!(start.failures, promise.failures);
        prop_assert!(self.now >= promise.not_before, "{} ran at {:?} and not after {:?}", key, self.now, promise.not_before);
        promise.owed = false;
        self.running.push(Run { key, outlived: false, afresh: false });
        Ok(true)
    }

    fn done(&mut self, index: usize, then: Then) {
        let Run { key, outlived, afresh } = self.running.swap_remove(index);
        self.state.done(&key, then.clone(), self.now, 0.5);
        if !self.concurrency.contains_key(&key.kind) {
            self.promises.remove(&key);
            return;
        }
        let Some(promise) = self.promises.get_mut(&key).filter(|_| !outlived) else { return };
        (promise.not_before, promise.held) = (Duration::ZERO, false);
        match then {
            Then::Wait | Then::Stop => promise.failures = 0,
            Then::After(_) => (promise.failures, promise.owed) = (0, true),
            Then::Again(after) => (promise.not_before, promise.held, promise.owed) = (self.now + after, true, true),
            Then::Fail { .. } if afresh => {}
            Then::Fail { after, .. } => {
                promise.failures += 1;
                let least = seconds(1) * 2_u32.pow((promise.failures - 1).min(9));
                promise.not_before = self.now + least.min(seconds(300)).max(after.unwrap_or_default());
                promise.owed = true;
            }
        }
    }

    /// Lets everything run until the queue is empty.
    fn drain(&mut self) -> Result<(), TestCaseError> {
        (0..KINDS.len()).for_each(|index| self.open(index, 2));
        loop {
            if self.next()? {
                continue;
            }
            if !self.running.is_empty() {
                self.done(0, Then::Wait);
            } else if let Some(due) = self.state.next_due() {
                prop_assert!(due > self.now, "a timer is due and its object is not runnable");
                self.now = due;
            } else {
                return Ok(());
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_key_has_two_turns_nothing_is_lost_and_no_backoff_is_cut(steps in vec(step(), 1..120)) {
        let mut model = Model::default();
        (0..2).for_each(|index| model.open(index, 2));
        for step in steps {
            model.take(step)?;
            let depth = model.state.depth();
            prop_assert_eq!(depth.iter().map(|(_, depth)| depth.running).sum::<usize>(), model.state.running());
            prop_assert_eq!(model.running.len(), model.state.running());
        }
        model.drain()?;
        let lost: Vec<_> = model.promises.iter().filter(|(_, promise)| promise.owed).collect();
        prop_assert!(lost.is_empty(), "never ran: {:?}", lost);
        prop_assert!(model.state.depth().iter().all(|(_, depth)| *depth == Depth::default()));
    }

    #[test]
    fn every_key_runs_within_a_bound_beside_a_steady_stream(
        priorities in vec(-5..5_i64, 1..20), cause in prop::sample::select(Cause::ALL.to_vec()), stream in 0..5_i64,
    ) {
        let mut state = State::default();
        state.open(kind("A"), pace(1));
        for (object, priority) in priorities.iter().enumerate() {
            state.wake(&key("A", &object.to_string()), "u", cause, *priority, Duration::ZERO);
        }
        // One turn a second, and one better object a second: without ageing none of the others would ever run.
        let mut waiting: Vec<String> = (0..priorities.len()).map(|object| object.to_string()).collect();
        // Ten priorities, patience of a resync, and once around for all that waits.
        let bound = 10 * 30 + 120 + 2 * priorities.len() as u64 + 15;
        for second in 0..bound {
            let now = seconds(second);
            state.wake(&key("A", &format!("hot{second}")), "u", Cause::NewSpec, stream, now);
            if let Some(start) = state.next(now) {
                waiting.retain(|name| *name != *start.key.object.name);
                state.done(&start.key, Then::Wait, now, 0.0);
            }
        }
        prop_assert!(waiting.is_empty(), "still waiting after {bound} s: {waiting:?}");
    }

    #[test]
    fn jitter_lengthens_a_backoff_by_a_tenth_at_most(failures in 1..40_u32, random in 0.0..1.0_f64) {
        let (mut state, mut now) = (State::default(), Duration::ZERO);
        state.open(kind("A"), pace(1));
        state.wake(&key("A", "a"), "u", Cause::NewSpec, 0, now);
        for failure in 1..=failures {
            prop_assert!(state.next(now).is_some());
            state.done(&key("A", "a"), fail(), now, random);
            let due = state.next_due().expect("the retry");
            let plain = 2_u64.pow((failure - 1).min(16)).min(300) as f64;
            let share = (due - now).as_secs_f64() / plain;
            prop_assert!((0.999..1.101).contains(&share), "failure {}: {} of {} s", failure, share, plain);
            now = due;
        }
    }
}
