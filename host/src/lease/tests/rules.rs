//! Each rule of the election, on the pure state machine.

use jiff::{SignedDuration, Timestamp};

use super::{
    super::{
        election::{Action, Election, Move},
        record::Record,
    },
    *,
};
use crate::fence::BootTime;

/// An election of `us` with a clock of its own.
struct Bench {
    election: Election,
    start: BootTime,
    now: BootTime,
    version: u64,
}

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn settings(identity: &str) -> Settings {
    Settings::new("berth-system", "berth", identity)
}

impl Bench {
    fn new() -> Self {
        let start = BootTime::now();
        Self { election: Election::new(settings("us")), start, now: start, version: 100 }
    }

    /// A bench whose election leads since its start.
    fn leading() -> Self {
        let mut bench = Self::new();
        assert_eq!(bench.election.observe_absence(None), None);
        assert!(matches!(bench.decide(), Action::Create(_)));
        assert_eq!(bench.write_succeeds(), Some(Move::Open(bench.at(14))));
        bench
    }

    fn at(&self, second: u64) -> BootTime {
        self.start + seconds(second)
    }

    fn pass_to(&mut self, second: u64) -> &mut Self {
        self.now = self.at(second);
        self
    }

    fn decide(&self) -> Action {
        self.election.decide(self.now, Timestamp::now())
    }

    fn next_version(&mut self) -> String {
        self.version += 1;
        self.version.to_string()
    }

    /// The Lease as another one wrote it, with its clock off by `skew`.
    fn written_by(&mut self, holder: &str, duration: u64, skew: SignedDuration) -> Record {
        let other = Settings { duration: seconds(duration), ..settings(holder) };
        let mut record = Record::first(&other, Timestamp::now() + skew);
        record.0.metadata.resource_version = Some(self.next_version());
        record
    }

    fn observe(&mut self, record: &Record) -> Option<Move> {
        self.election.observe(record.clone(), self.now)
    }

    /// The write that was decided is answered at once.
    fn write_succeeds(&mut self) -> Option<Move> {
        let (Action::Create(mut record) | Action::Replace(mut record)) = self.decide() else { panic!("{:?}", self.decide()) };
        record.0.metadata.resource_version = Some(self.next_version());
        self.election.wrote(record, self.now, self.now)
    }
}

#[test]
fn nothing_is_written_before_the_lease_was_read() {
    assert_eq!(Bench::new().decide(), Action::Read);
}

#[test]
fn the_gate_is_open_until_the_duration_after_the_write_was_sent_less_the_margin() {
    let mut bench = Bench::new();
    bench.election.observe_absence(None);
    let Action::Create(mut record) = bench.decide() else { panic!("{:?}", bench.decide()) };
    record.0.metadata.resource_version = Some("7".into());
    let (sent, answered) = (bench.now, bench.at(4));
    assert_eq!(bench.election.wrote(record, sent, answered), Some(Move::Open(bench.at(14))));
}

#[test]
fn a_leader_renews_every_two_seconds_and_the_count_of_transitions_stays() {
    let mut bench = Bench::leading();
    assert_eq!(bench.decide(), Action::Wait(bench.at(2)));
    let Action::Replace(record) = bench.pass_to(2).decide() else { panic!("{:?}", bench.decide()) };
    assert_eq!((record.version(), record.transitions()), ("101", 0));
    assert_eq!(bench.write_succeeds(), Some(Move::Extend(bench.at(16))));
}

#[test]
fn another_ones_lease_is_taken_only_after_its_own_duration_without_a_change_seen_here() {
    for skew in [SignedDuration::from_mins(-10), SignedDuration::ZERO, SignedDuration::from_mins(10)] {
        let mut bench = Bench::new();
        let theirs = bench.written_by("them", 40, skew);
        assert_eq!(bench.observe(&theirs), None);
        assert_eq!(bench.decide(), Action::Wait(bench.at(40)));
        let mut renewed = theirs.held_by(&Settings { duration: seconds(40), ..settings("them") }, Timestamp::now() + skew);
        renewed.0.metadata.resource_version = Some(bench.next_version());
        bench.pass_to(39).observe(&renewed);
        assert_eq!(bench.pass_to(78).decide(), Action::Wait(bench.at(79)));
        let Action::Replace(ours) = bench.pass_to(79).decide() else { panic!("{:?}", bench.decide()) };
        assert_eq!((ours.holder(), ours.duration(), ours.transitions()), (Some("us"), Some(seconds(15)), 1));
        assert_eq!(ours.version(), renewed.version(), "so that the API server refuses it if it was renewed meanwhile");
    }
}

#[test]
fn a_change_that_is_no_renewal_does_not_keep_another_ones_lease_alive() {
    let mut bench = Bench::new();
    let mut theirs = bench.written_by("them", 15, SignedDuration::ZERO);
    bench.observe(&theirs);
    theirs.0.metadata.annotations = Some([("note".to_owned(), "x".to_owned())].into());
    theirs.0.metadata.resource_version = Some(bench.next_version());
    bench.pass_to(14).observe(&theirs);
    assert!(matches!(bench.pass_to(15).decide(), Action::Replace(_)));
}

#[test]
fn a_released_lease_is_taken_at_once_and_keeps_foreign_fields() {
    let mut bench = Bench::new();
    let mut theirs = bench.written_by("them", 15, SignedDuration::ZERO);
    theirs.0.metadata.labels = Some([("team".to_owned(), "mail".to_owned())].into());
    bench.observe(&theirs);
    let mut released = theirs.released();
    released.0.metadata.resource_version = Some(bench.next_version());
    assert_eq!(released.holder(), None);
    bench.pass_to(1).observe(&released);
    let Action::Replace(ours) = bench.decide() else { panic!("{:?}", bench.decide()) };
    assert_eq!(ours.0.metadata.labels, theirs.0.metadata.labels);
    assert_eq!(bench.write_succeeds(), Some(Move::Open(bench.at(15))));
}

#[test]
fn a_refused_renewal_closes_the_gate_at_once_and_the_lease_is_read_again() {
    let mut bench = Bench::leading();
    bench.pass_to(2);
    assert_eq!(bench.election.refused(bench.now), Some(Move::Close));
    assert_eq!(bench.decide(), Action::Wait(bench.at(4)), "no request loop");
    assert_eq!(bench.pass_to(4).decide(), Action::Read);
}

#[test]
fn seeing_another_holder_none_or_no_lease_closes_the_gate_at_once() {
    let mut bench = Bench::leading();
    let theirs = bench.written_by("them", 15, SignedDuration::ZERO);
    assert_eq!(bench.observe(&theirs), Some(Move::Close));
    assert_eq!(bench.decide(), Action::Wait(bench.at(15)));

    let mut bench = Bench::leading();
    let mut emptied = bench.written_by("them", 15, SignedDuration::ZERO).released();
    emptied.0.metadata.resource_version = Some(bench.next_version());
    assert_eq!(bench.observe(&emptied), Some(Move::Close));

    let mut bench = Bench::leading();
    let version = bench.next_version();
    assert_eq!(bench.election.observe_absence(Some(version)), Some(Move::Close));
    assert!(matches!(bench.decide(), Action::Create(_)));
}

#[test]
fn what_the_watch_tells_late_is_ignored() {
    let mut bench = Bench::new();
    let theirs = bench.written_by("them", 15, SignedDuration::ZERO);
    let mut released = theirs.released();
    released.0.metadata.resource_version = Some(bench.next_version());
    bench.observe(&released);
    assert!(bench.write_succeeds().is_some());
    assert_eq!(bench.observe(&theirs), None);
    assert_eq!(bench.observe(&released), None);
    assert_eq!(bench.election.observe_absence(Some("99".into())), None);
    assert!(bench.election.leads());
}

#[test]
fn an_answer_that_was_overtaken_by_another_holder_or_a_deletion_opens_nothing() {
    for deleted in [false, true] {
        let mut bench = Bench::new();
        bench.election.observe_absence(None);
        let Action::Create(mut ours) = bench.decide() else { panic!("{:?}", bench.decide()) };
        ours.0.metadata.resource_version = Some(bench.next_version());
        if deleted {
            let version = bench.next_version();
            bench.election.observe_absence(Some(version));
        } else {
            let theirs = bench.written_by("them", 15, SignedDuration::ZERO);
            bench.observe(&theirs);
        }
        assert_eq!(bench.election.wrote(ours, bench.now, bench.now), None);
        assert!(!bench.election.leads());
    }
}

#[test]
fn errors_are_retried_until_the_renew_deadline_and_then_leadership_is_given_up() {
    let mut bench = Bench::leading();
    for second in [2, 4, 6, 8] {
        assert!(matches!(bench.pass_to(second).decide(), Action::Replace(_)));
        assert_eq!(bench.election.lapse(bench.now), None);
        bench.election.failed(bench.now);
    }
    assert_eq!(bench.decide(), Action::Wait(bench.at(10)));
    bench.pass_to(10);
    assert_eq!(bench.election.lapse(bench.now), Some(Move::Close));
    assert_eq!(bench.election.lapse(bench.now), None);
}

#[test]
fn after_an_outage_of_45_seconds_the_lease_is_ours_again_in_a_new_term() {
    let mut bench = Bench::leading();
    let mut second = 2;
    while second <= 45 {
        bench.pass_to(second);
        let now = bench.now;
        bench.election.lapse(now);
        if !matches!(bench.decide(), Action::Wait(_)) {
            bench.election.failed(now);
        }
        second += 1;
    }
    assert!(!bench.election.leads());
    assert!(matches!(bench.pass_to(48).decide(), Action::Replace(_)));
    assert_eq!(bench.write_succeeds(), Some(Move::Open(bench.at(62))));
}

#[test]
fn odd_durations_are_survived() {
    let mut bench = Bench::new();
    let mut theirs = bench.written_by("them", 15, SignedDuration::ZERO);
    let spec = theirs.0.spec.as_mut().expect("written with one");
    spec.lease_duration_seconds = Some(-5);
    bench.observe(&theirs);
    assert_eq!(bench.decide(), Action::Wait(bench.at(15)), "our own duration, where none is recorded");
    let ours = Record::first(&Settings { duration: Duration::from_millis(1500), ..settings("us") }, Timestamp::now());
    assert_eq!(ours.duration(), Some(seconds(2)), "others wait rather longer than shorter");
}
