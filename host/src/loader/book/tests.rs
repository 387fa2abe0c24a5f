//! What serves, after any order of deliveries, refusals, trials and facts.

use futures::FutureExt;
use proptest::prelude::*;

use super::*;
use crate::{
    catalog::Versions,
    loader::crd::tests as crd,
    package::{CONFIG_FILE, Digest, Refusal},
    reconcile::{Next, Outcome, Request},
    trial::Trial,
};

const MAP: Place = Place::ConfigMap;

/// A plugin in a ConfigMap: its age is the order of the names.
fn delivery(name: &str, version: u32) -> Delivery {
    let (uid, created) = (Some(format!("uid of {name}")), format!("2026-01-01T00:00:00Z {name}"));
    let files = vec![("number".to_owned(), version.to_string().into())];
    Delivery { place: MAP, name: name.into(), uid, created, version: version.to_string(), files }
}

/// With this `plugin.yaml`.
fn with_config(config: &'static str, delivery: Delivery) -> Delivery {
    let files = [delivery.files.clone(), vec![(CONFIG_FILE.to_owned(), config.into())]].concat();
    Delivery { files, ..delivery }
}

fn version(code: &str) -> Arc<Loaded> {
    let handler = |_: Request| async { Ok(Outcome::just(Next::AwaitChange)) }.boxed();
    let claim = Arc::new(Claim::full());
    let version = Version { digest: Digest::of(code.as_bytes()), config_hash: String::new() };
    let delivery = Arc::new(delivery("p", 1));
    Arc::new(Loaded { version, delivery, config: Config::default(), claim, handler: Arc::new(handler) })
}

/// One that claims another API version of the kind, which is not served before [`serve_v0`].
fn of_v0(code: &str) -> Arc<Loaded> {
    let mut claim = Claim::full();
    claim.reconciles.version = "v0".into();
    Arc::new(Loaded { claim: Arc::new(claim), ..Arc::into_inner(version(code)).expect("one owner") })
}

fn serve_v0(facts: &mut Facts) {
    let mut definition = crd::definition("crd");
    definition["spec"]["versions"][1]["served"] = true.into();
    definition["spec"]["versions"][1]["subresources"] = serde_json::json!({ "status": {} });
    facts.crds.apply(&crd::object(&definition));
}

fn refused(code: &str) -> Finished {
    Err(Refused { digest: Some(Digest::of(code.as_bytes())), refusal: Refusal::new(reason::COMPILE_FAILED, "It is broken.") })
}

/// A cluster with the definition and all permissions.
fn facts() -> Facts {
    let mut facts = Facts::default();
    facts.crds.apply(&crd::object(&crd::definition("crd")));
    facts.crds.set_synced();
    facts.access.insert(Needs::of(&Claim::full()), Access::Granted);
    facts
}

impl Book {
    fn load(&mut self, name: &str, number: u32, finished: Finished) {
        let job = self.deliver(delivery(name, number)).expect("a job");
        assert!(self.finish(name, job.number, finished));
    }

    /// The plugin and the code that serve the kind, on trial or not.
    fn serving(&mut self, facts: &Facts) -> Option<(String, Digest)> {
        let table = self.settle(facts).table;
        assert!(table.len() <= 1);
        let newest = |versions: Arc<Versions>| (versions.newest().name.clone(), versions.newest().version.digest);
        table.into_values().next().map(newest)
    }

    fn reason(&mut self, name: &str, facts: &Facts) -> Option<&'static str> {
        self.settle(facts).plugins[name].refused.as_ref().map(|refused| refused.refusal.reason)
    }
}

fn code(name: &str, code: &str) -> Option<(String, Digest)> {
    Some((name.to_owned(), Digest::of(code.as_bytes())))
}

#[test]
fn the_last_delivery_wins_whichever_is_loaded_first() {
    let mut book = Book::default();
    let slow = book.deliver(delivery("p", 1)).expect("a job");
    let quick = book.deliver(delivery("p", 2)).expect("a job");
    assert!(book.finish("p", quick.number, Ok(version("2"))));
    assert!(!book.finish("p", slow.number, Ok(version("1"))));
    assert_eq!(book.serving(&facts()), code("p", "2"));
}

#[test]
fn a_delivery_that_is_known_or_older_is_no_job() {
    let mut book = Book::default();
    book.load("p", 10, Ok(version("1")));
    assert!(book.deliver(delivery("p", 10)).is_none());
    assert!(book.deliver(delivery("p", 9)).is_none());
    let recreated = Delivery { uid: Some("another".into()), ..delivery("p", 9) };
    assert!(book.deliver(recreated).is_some());
}

#[test]
fn a_refused_version_keeps_the_last_good_one_and_says_why() {
    let mut book = Book::default();
    book.load("p", 1, Ok(version("1")));
    assert_eq!(book.serving(&facts()), code("p", "1"));
    book.load("p", 2, refused("2"));
    assert_eq!(book.serving(&facts()), code("p", "1"));
    let standing = book.settle(&facts()).plugins.remove("p").expect("stands");
    assert_eq!(standing.refused.expect("refused").digest, Some(Digest::of(b"2")));
    let back = book.deliver(delivery("p", 3)).expect("a job");
    assert!(back.known.iter().any(|known| known.version == version("1").version), "the good version need not be loaded again");
}

#[test]
fn while_a_version_is_loaded_the_plugin_stands_as_before() {
    let mut book = Book::default();
    book.deliver(delivery("p", 1));
    assert!(book.settle(&facts()).plugins["p"].loading);
    let job = book.deliver(delivery("p", 2)).expect("a job");
    book.finish("p", job.number, Ok(version("1")));
    assert!(!book.settle(&facts()).plugins["p"].loading);
    book.deliver(delivery("p", 3));
    let standing = book.settle(&facts()).plugins.remove("p").expect("stands");
    assert_eq!((standing.loading, standing.version.as_str(), standing.stable.is_some()), (true, "2", true));
}

#[test]
fn a_withdrawn_plugin_is_gone_and_a_delivered_one_is_back() {
    let mut book = Book::default();
    book.load("p", 1, Ok(version("1")));
    let in_flight = book.deliver(delivery("p", 2)).expect("a job");
    assert!(book.withdraw(MAP, "p").is_none());
    assert!(!book.finish("p", in_flight.number, Ok(version("2"))));
    assert_eq!(book.serving(&facts()), None);
    book.load("p", 3, Ok(version("1")));
    assert_eq!(book.serving(&facts()), code("p", "1"));
}

#[test]
fn the_oldest_plugin_has_the_kind_and_the_next_takes_over() {
    let mut book = Book::default();
    book.load("b", 1, Ok(version("b")));
    assert_eq!(book.serving(&facts()), code("b", "b"));
    let older = book.deliver(delivery("a", 2)).expect("a job");
    assert_eq!(book.serving(&facts()), code("b", "b"), "until the older one can serve");
    book.finish("a", older.number, Ok(version("a")));
    assert_eq!(book.serving(&facts()), code("a", "a"));
    let told = book.settle(&facts()).plugins.remove("b").expect("stands");
    assert!(told.stable.is_none() && told.refused.expect("refused").refusal.message.contains("\"a\""));
    book.withdraw(MAP, "a");
    assert_eq!(book.serving(&facts()), code("b", "b"));
    assert_eq!(book.reason("b", &facts()), None);
}

#[test]
fn at_the_start_a_younger_plugin_waits_until_the_older_ones_are_known() {
    let mut book = Book::default();
    let mut facts = Facts { start: Start::Listing, ..facts() };
    book.load("b", 1, Ok(version("b")));
    assert_eq!(book.serving(&facts), None);
    assert!(book.settle(&facts).plugins["b"].loading);
    let older = book.deliver(delivery("a", 2)).expect("a job");
    facts.start = Start::Loading;
    assert_eq!(book.serving(&facts), None);
    book.finish("a", older.number, Ok(version("a")));
    assert_eq!(book.serving(&facts), code("a", "a"));
    book.withdraw(MAP, "a");
    assert_eq!(book.serving(&facts), code("b", "b"));
    book.deliver(delivery("a", 3));
    assert_eq!(book.serving(&facts), code("b", "b"), "what serves goes on");
}

#[test]
fn a_plugin_starts_with_its_definition_stops_without_it_and_starts_again() {
    let mut book = Book::default();
    book.load("p", 1, Ok(version("1")));
    let mut facts = facts();
    facts.crds.remove("ks.g.io");
    assert_eq!((book.serving(&facts), book.reason("p", &facts)), (None, Some(reason::WAITING_FOR_CRD)));
    for uid in ["first", "second"] {
        facts.crds.apply(&crd::object(&crd::definition(uid)));
        let table = book.settle(&facts).table;
        assert_eq!(table.values().next().map(|serving| &*serving.stable.crd_uid), Some(uid));
        facts.crds.remove("ks.g.io");
        assert_eq!(book.serving(&facts), None);
    }
}

#[test]
fn permissions_are_asked_for_before_a_version_serves_and_not_after() {
    let mut book = Book::default();
    book.load("p", 1, Ok(version("1")));
    let mut facts = facts();
    facts.access.clear();
    let needs = Needs::of(&Claim::full());
    let verdict = book.settle(&facts);
    assert!(verdict.table.is_empty() && verdict.wanted.contains(&needs) && verdict.plugins["p"].loading);
    let missing = needs.permissions().nth(1).expect("watch");
    facts.access.insert(needs.clone(), Access::Denied(missing, None));
    assert_eq!((book.serving(&facts), book.reason("p", &facts)), (None, Some(reason::FORBIDDEN)));
    facts.access.insert(needs, Access::Granted);
    assert_eq!(book.serving(&facts), code("p", "1"));
    facts.access.clear();
    assert!(book.settle(&facts).wanted.is_empty());
    assert_eq!(book.serving(&facts), code("p", "1"));
}

#[test]
fn a_new_version_that_the_definition_does_not_serve_keeps_the_good_one() {
    let mut book = Book::default();
    book.load("p", 1, Ok(version("1")));
    assert!(book.serving(&facts()).is_some());
    let mut claim = Claim::full();
    claim.reconciles.version = "v2".into();
    let next = Loaded { claim: Arc::new(claim), ..Arc::into_inner(version("2")).expect("one owner") };
    book.load("p", 2, Ok(Arc::new(next)));
    assert_eq!((book.serving(&facts()), book.reason("p", &facts())), (code("p", "1"), Some(reason::VERSION_NOT_SERVED)));
}

#[test]
fn a_folder_hides_a_config_map_of_the_same_name_for_as_long_as_it_has_the_plugin() {
    let mut book = Book::default();
    book.load("p", 1, Ok(version("map")));
    let folder = Delivery { place: Place::Directory, uid: None, ..delivery("p", 1) };
    let job = book.deliver(folder).expect("a job");
    book.finish("p", job.number, Ok(version("folder")));
    assert!(book.deliver(delivery("p", 2)).is_none());
    assert_eq!(book.serving(&facts()), code("p", "folder"));
    let job = book.withdraw(Place::Directory, "p").expect("a job");
    assert_eq!(job.delivery.version, "2");
}

#[test]
fn only_what_failed_for_the_hosts_own_reasons_is_tried_again() {
    let mut book = Book::default();
    book.load("a", 1, refused("1"));
    book.load("b", 1, host_failure());
    assert_eq!(book.retry().into_iter().map(|job| job.name).collect::<Vec<_>>(), ["b"]);
    assert!(book.retry().is_empty());
}

fn versions(book: &mut Book, facts: &Facts) -> Arc<Versions> {
    book.settle(facts).table.into_values().next().expect("serves")
}

fn judged(code: &str, judgement: Judgement) -> Judged {
    Judged { name: "p".into(), version: version(code).version.clone(), judgement }
}

fn kept(code: &str, rolled_back: Option<&str>) -> Kept {
    let rolled_back = rolled_back.map(|code| RolledBack { version: version(code).version.clone(), why: "it trapped".into() });
    let (name, uid, owner) = ("p".to_owned(), format!("uid of kept {code}"), Some("uid of p".into()));
    let files = vec![("kept".to_owned(), code.to_owned().into())];
    Kept { name, uid, owner, version: version(code).version.clone(), rolled_back: rolled_back.into_iter().collect(), files }
}

fn host_failure() -> Finished {
    Err(Refused { digest: None, refusal: Refusal::new(reason::HOST_FAILURE, "The disk is full.") })
}

/// A book in which version 2 is on trial after version 1, and its trial.
fn on_trial(facts: &Facts) -> (Book, Arc<Trial>) {
    let mut book = Book::default();
    book.load("p", 1, Ok(version("1")));
    versions(&mut book, facts);
    book.load("p", 2, Ok(version("2")));
    let trial = trial(&versions(&mut book, facts)).expect("on trial");
    (book, trial)
}

fn trial(versions: &Versions) -> Option<Arc<Trial>> {
    versions.candidate.as_ref().map(|candidate| candidate.trial.clone())
}

#[test]
fn a_version_that_follows_a_good_one_is_on_trial_until_it_is_judged() {
    let (mut book, facts) = (Book::default(), facts());
    book.load("p", 1, Ok(version("1")));
    assert!(versions(&mut book, &facts).candidate.is_none(), "there is nothing to fall back on");
    book.load("p", 2, Ok(version("2")));
    let first = versions(&mut book, &facts);
    assert_eq!(first.stable.version, version("1").version);
    assert_eq!(first, versions(&mut book, &facts), "the trial goes on");
    assert!(!book.judge(judged("1", Judgement::Passed)), "it is not on trial");
    assert!(book.judge(judged("2", Judgement::Passed)));
    let passed = versions(&mut book, &facts);
    assert_eq!((&passed.stable.version, passed.candidate.is_none()), (&version("2").version, true));
    assert!(!book.judge(judged("2", Judgement::Failed("late".into()))));
}

#[test]
fn a_version_that_failed_its_trial_is_not_tried_again_and_another_one_is() {
    let (mut book, facts) = (Book::default(), facts());
    book.load("p", 1, Ok(version("1")));
    versions(&mut book, &facts);
    book.load("p", 2, Ok(version("2")));
    versions(&mut book, &facts);
    book.judge(judged("2", Judgement::Failed("it trapped".into())));
    for number in 3..5 {
        assert_eq!((book.serving(&facts), book.reason("p", &facts)), (code("p", "1"), Some(reason::ROLLED_BACK)));
        book.load("p", number, Ok(version("2")));
    }
    book.load("p", 5, Ok(version("3")));
    assert_eq!((book.serving(&facts), book.reason("p", &facts)), (code("p", "3"), None));
    assert!(versions(&mut book, &facts).candidate.is_some());
}

#[test]
fn a_version_of_another_api_version_takes_over_without_a_trial() {
    let (mut book, mut facts) = (Book::default(), facts());
    serve_v0(&mut facts);
    book.load("p", 1, Ok(version("1")));
    versions(&mut book, &facts);
    book.load("p", 2, Ok(of_v0("2")));
    assert!(versions(&mut book, &facts).candidate.is_none());
    assert_eq!(book.serving(&facts), code("p", "2"));
}

#[test]
fn what_is_good_is_to_be_kept_until_it_is() {
    let (mut book, facts) = (Book::default(), facts());
    let keep = |book: &mut Book| book.settle(&facts).plugins.remove("p").expect("stands").keep.expect("keeps");
    book.load("p", 1, Ok(version("1")));
    assert!(!keep(&mut book).is_kept);
    book.keep(kept("1", None));
    assert!(keep(&mut book).is_kept);
    book.load("p", 2, Ok(version("2")));
    assert!(keep(&mut book).is_kept, "the stable version is");
    book.judge(judged("2", Judgement::Failed("it trapped".into())));
    assert!(!keep(&mut book).is_kept);
    book.keep(kept("1", Some("2")));
    assert!(keep(&mut book).is_kept);
    book.lose("uid of kept 1");
    assert!(!keep(&mut book).is_kept);
}

#[test]
fn after_a_restart_the_kept_version_is_the_stable_one() {
    for delivered in [Ok(version("2")), refused("2")] {
        let (mut book, facts) = (Book::default(), facts());
        book.keep(kept("1", None));
        let passes = delivered.is_ok();
        book.load("p", 1, delivered);
        let verdict = book.settle(&facts);
        assert!(verdict.table.is_empty() && verdict.restore == ["p"]);
        let job = book.restore("p").expect("a job");
        assert!(book.settle(&facts).restore.is_empty(), "it is being loaded");
        assert!(book.finish("p", job.number, Ok(version("1"))));
        let versions = versions(&mut book, &facts);
        assert_eq!((&versions.stable.version, versions.candidate.is_some()), (&version("1").version, passes));
    }
}

#[test]
fn after_a_restart_a_version_that_was_rolled_back_stays_so_and_is_tried_again_once_that_is_taken_away() {
    let (mut book, facts) = (Book::default(), facts());
    book.keep(kept("1", Some("2")));
    book.load("p", 1, Ok(version("2")));
    assert!(book.settle(&facts).table.is_empty());
    let job = book.restore("p").expect("a job");
    book.finish("p", job.number, Ok(version("1")));
    assert_eq!((book.serving(&facts), book.reason("p", &facts)), (code("p", "1"), Some(reason::ROLLED_BACK)));
    book.keep(kept("1", None));
    assert_eq!((book.serving(&facts), book.reason("p", &facts)), (code("p", "2"), None));
}

#[test]
fn a_kept_version_that_is_the_delivered_one_or_cannot_be_loaded_or_is_of_another_owner_is_not_waited_for() {
    let facts = facts();
    let mut same = Book::default();
    same.keep(kept("1", None));
    same.load("p", 1, Ok(version("1")));
    assert_eq!(same.serving(&facts), code("p", "1"));

    let mut broken = Book::default();
    broken.keep(kept("1", Some("2")));
    broken.load("p", 1, Ok(version("2")));
    assert_eq!(broken.settle(&facts).restore, ["p"]);
    let job = broken.restore("p").expect("a job");
    broken.finish("p", job.number, refused("1"));
    assert_eq!(broken.serving(&facts), code("p", "2"), "better than nothing");

    let mut foreign = Book::default();
    foreign.keep(Kept { owner: Some("a former one".into()), ..kept("1", Some("2")) });
    foreign.load("p", 1, Ok(version("2")));
    assert_eq!(foreign.serving(&facts), code("p", "2"));
}

#[test]
fn a_standby_follows_what_the_leader_has_kept() {
    let (mut book, facts) = (Book::default(), facts());
    book.load("p", 1, Ok(version("1")));
    versions(&mut book, &facts);
    book.load("p", 2, Ok(version("2")));
    assert!(versions(&mut book, &facts).candidate.is_some());
    book.keep(kept("2", None));
    assert!(versions(&mut book, &facts).candidate.is_none());
    book.load("p", 3, Ok(version("3")));
    versions(&mut book, &facts);
    book.keep(kept("2", Some("3")));
    assert_eq!((book.serving(&facts), book.reason("p", &facts)), (code("p", "2"), Some(reason::ROLLED_BACK)));
}

#[test]
fn a_trial_goes_on_while_a_later_version_is_loaded_and_after_that_is_refused() {
    let facts = facts();
    let (mut book, first) = on_trial(&facts);
    let goes_on = |book: &mut Book| {
        let now = versions(book, &facts);
        assert_eq!(now.newest().version, version("2").version);
        assert!(trial(&now).is_some_and(|trial| Arc::ptr_eq(&trial, &first)), "{now:?}");
    };
    let job = book.deliver(delivery("p", 3)).expect("a job");
    goes_on(&mut book);
    book.finish("p", job.number, refused("3"));
    goes_on(&mut book);
    assert_eq!(book.reason("p", &facts), Some(reason::COMPILE_FAILED));
    assert!(book.judge(judged("2", Judgement::Passed)));
    let passed = versions(&mut book, &facts);
    assert_eq!((&passed.stable.version, passed.candidate.is_none()), (&version("2").version, true));
}

#[test]
fn a_version_that_never_served_does_not_begin_to_after_a_later_one_was_delivered() {
    let (mut book, mut facts) = (Book::default(), facts());
    book.load("p", 1, Ok(version("1")));
    versions(&mut book, &facts);
    book.load("p", 2, Ok(of_v0("2")));
    assert_eq!(book.reason("p", &facts), Some(reason::VERSION_NOT_SERVED));
    book.load("p", 3, refused("3"));
    serve_v0(&mut facts);
    assert_eq!(book.serving(&facts), code("p", "1"));
}

#[test]
fn the_same_content_is_no_news_whatever_else_was_written() {
    let facts = facts();
    let (mut book, first) = on_trial(&facts);
    let touched = Delivery { version: "7".into(), ..delivery("p", 2) };
    assert!(book.deliver(touched).is_none());
    let verdict = book.settle(&facts);
    assert_eq!((verdict.plugins["p"].version.as_str(), verdict.plugins["p"].loading), ("7", false));
    let now = verdict.table.into_values().next().expect("serves");
    assert!(trial(&now).is_some_and(|trial| Arc::ptr_eq(&trial, &first)));
}

#[test]
fn a_pause_holds_as_soon_as_it_is_read_and_for_as_long_as_nothing_else_is_said() {
    let facts = facts();
    let (mut book, _) = on_trial(&facts);
    let paused = |book: &mut Book| (versions(book, &facts).paused, book.settle(&facts).plugins["p"].paused);
    assert_eq!(paused(&mut book), (false, false));
    let job = book.deliver(with_config("paused: true", delivery("p", 3))).expect("a job");
    assert_eq!(paused(&mut book), (true, true), "before it is loaded");
    book.finish("p", job.number, refused("3"));
    assert_eq!(paused(&mut book), (true, true), "although it is refused");
    let unreadable = book.deliver(with_config("paused: perhaps", delivery("p", 4))).expect("a job");
    book.finish("p", unreadable.number, refused("4"));
    assert_eq!(paused(&mut book), (true, true), "a slip does not undo it");
    book.deliver(delivery("p", 5));
    assert_eq!(paused(&mut book), (false, false));
}

#[test]
fn what_differs_in_its_pause_alone_needs_no_trial() {
    let (mut book, facts) = (Book::default(), facts());
    book.load("p", 1, Ok(version("1")));
    versions(&mut book, &facts);
    let Loaded { version: Version { digest, .. }, .. } = *version("1");
    let paused = Loaded {
        version: Version { digest, config_hash: "paused".into() },
        config: Config { paused: true, ..Config::default() },
        ..Arc::into_inner(version("1")).expect("one owner")
    };
    let job = book.deliver(with_config("paused: true", delivery("p", 2))).expect("a job");
    book.finish("p", job.number, Ok(Arc::new(paused)));
    let now = versions(&mut book, &facts);
    assert!(now.paused && now.candidate.is_none(), "{now:?}");
    assert_eq!(now.stable.version.config_hash, "paused");
}

#[test]
fn a_kept_version_that_the_host_fails_to_load_is_tried_again_and_not_given_up_for_a_bad_one() {
    let (mut book, facts) = (Book::default(), facts());
    book.keep(kept("1", Some("2")));
    book.load("p", 1, Ok(version("2")));
    for _ in 0..9 {
        assert_eq!(book.settle(&facts).restore, ["p"]);
        let job = book.restore("p").expect("a job");
        assert!(book.finish("p", job.number, host_failure()));
        let verdict = book.settle(&facts);
        assert!(verdict.table.is_empty() && verdict.restore.is_empty(), "not before it is time");
        let standing = &verdict.plugins["p"];
        let refusal = &standing.refused.as_ref().expect("trouble").refusal;
        assert_eq!((refusal.reason, standing.keep.is_none()), (reason::HOST_FAILURE, true));
        assert!(refusal.message.contains("The disk is full."), "{refusal}");
        assert!(book.retry().is_empty());
    }
    book.settle(&facts);
    let job = book.restore("p").expect("a job");
    book.finish("p", job.number, Ok(version("1")));
    assert_eq!((book.serving(&facts), book.reason("p", &facts)), (code("p", "1"), Some(reason::ROLLED_BACK)));
}

#[test]
fn a_version_that_nothing_is_held_against_does_not_wait_for_ever_for_one_that_cannot_be_loaded() {
    let (mut book, facts) = (Book::default(), facts());
    book.keep(kept("1", None));
    book.load("p", 1, Ok(version("2")));
    for tries in 0..3 {
        assert_eq!(book.serving(&facts), None, "after {tries}");
        let job = book.restore("p").expect("a job");
        book.finish("p", job.number, host_failure());
        book.retry();
    }
    assert_eq!(book.serving(&facts), code("p", "2"));
}

#[test]
fn a_version_that_was_rolled_back_is_never_kept_in_the_place_of_a_good_one() {
    let (mut book, facts) = (Book::default(), facts());
    book.keep(kept("1", Some("2")));
    book.load("p", 1, Ok(version("2")));
    book.settle(&facts);
    let job = book.restore("p").expect("a job");
    book.finish("p", job.number, refused("1"));
    assert_eq!(book.serving(&facts), code("p", "2"), "better than nothing");
    assert_eq!(book.settle(&facts).plugins["p"].keep, None);
    book.load("p", 2, Ok(version("3")));
    versions(&mut book, &facts);
    book.judge(judged("3", Judgement::Passed));
    let keep = book.settle(&facts).plugins.remove("p").expect("stands").keep.expect("keeps");
    assert_eq!(keep.version, version("3").version);
}

#[test]
fn a_plugin_that_is_withdrawn_and_comes_back_has_its_good_version_and_its_quarantine() {
    for (uid, is_collected_first) in [("uid of p", false), ("another uid", false), ("another uid", true)] {
        let (mut book, facts) = (Book::default(), facts());
        book.load("p", 1, Ok(version("1")));
        versions(&mut book, &facts);
        book.load("p", 2, Ok(version("2")));
        versions(&mut book, &facts);
        book.judge(judged("2", Judgement::Failed("it trapped".into())));
        book.keep(kept("1", Some("2")));
        assert_eq!(book.serving(&facts), code("p", "1"));
        book.withdraw(MAP, "p");
        assert_eq!(book.serving(&facts), None);
        if is_collected_first {
            book.lose("uid of kept 1");
        }
        let job = book.deliver(Delivery { uid: Some(uid.into()), ..delivery("p", 3) }).expect("a job");
        assert_eq!(book.settle(&facts).restore, ["p"]);
        let restore = book.restore("p").expect("a job");
        assert!(!restore.delivery.files.is_empty(), "although what was kept had not to be remembered");
        // The garbage collector takes what belonged to the former ConfigMap.
        book.lose("uid of kept 1");
        book.finish("p", job.number, Ok(version("2")));
        assert_eq!(book.serving(&facts), None);
        book.finish("p", restore.number, Ok(version("1")));
        assert_eq!((book.serving(&facts), book.reason("p", &facts)), (code("p", "1"), Some(reason::ROLLED_BACK)));
        let keep = book.settle(&facts).plugins.remove("p").expect("stands").keep.expect("keeps");
        assert_eq!((keep.is_kept, keep.kept), (false, None), "it is to be kept again");
    }
}

#[test]
fn a_plugin_that_is_gone_for_long_is_forgotten() {
    let (mut book, facts) = (Book::default(), facts());
    book.load("p", 1, Ok(version("1")));
    versions(&mut book, &facts);
    book.keep(kept("1", Some("2")));
    book.withdraw(MAP, "p");
    book.lose("uid of kept 1");
    book.retry();
    book.retry();
    assert!(book.kept.is_empty());
    book.load("p", 3, Ok(version("2")));
    assert_eq!(book.serving(&facts), code("p", "2"), "it is a new one");
}

#[test]
fn several_versions_stay_rolled_back_the_last_ones_and_each_until_it_is_taken_off_the_list() {
    let (mut book, facts) = (Book::default(), facts());
    book.load("p", 1, Ok(version("0")));
    for number in 1..=9_u32 {
        versions(&mut book, &facts);
        let code = number.to_string();
        book.load("p", number + 1, Ok(version(&code)));
        versions(&mut book, &facts);
        book.judge(judged(&code, Judgement::Failed("it trapped".into())));
    }
    let keep = book.settle(&facts).plugins.remove("p").expect("stands").keep.expect("keeps");
    assert_eq!(
        keep.rolled_back.iter().map(|one| one.version.digest).collect::<Vec<_>>(),
        (2..=9).map(|n: u32| Digest::of(n.to_string().as_bytes())).collect::<Vec<_>>()
    );
    book.load("p", 20, Ok(version("5")));
    assert_eq!(book.reason("p", &facts), Some(reason::ROLLED_BACK));
    let with = |rolled_back: Vec<RolledBack>| Kept { rolled_back, ..kept("0", None) };
    book.keep(with(keep.rolled_back.clone()));
    let without: Vec<_> = keep.rolled_back.into_iter().filter(|one| one.version != version("5").version).collect();
    book.keep(with(without.clone()));
    assert_eq!((book.serving(&facts), book.reason("p", &facts)), (code("p", "5"), None));
    assert_eq!(book.settle(&facts).plugins["p"].keep.as_ref().expect("keeps").rolled_back, without);
}

#[test]
fn a_kept_version_serves_while_the_delivered_one_takes_long_to_load() {
    let (mut book, facts) = (Book::default(), facts());
    book.keep(kept("1", None));
    let slow = book.deliver(with_config("paused: true", delivery("p", 2))).expect("a job");
    assert_eq!(book.settle(&facts).restore, ["p"]);
    let job = book.restore("p").expect("a job");
    book.finish("p", job.number, Ok(version("1")));
    let verdict = book.settle(&facts);
    let standing = &verdict.plugins["p"];
    assert_eq!((standing.loading, standing.version.as_str()), (true, ""), "nothing is said of the delivered one");
    let serves = verdict.table.values().next().expect("serves");
    assert!(serves.paused && serves.stable.version == version("1").version, "{serves:?}");
    book.finish("p", slow.number, Ok(version("2")));
    assert!(versions(&mut book, &facts).candidate.is_some());

    let mut same = Book::default();
    same.keep(Kept { files: delivery("p", 1).files, ..kept("1", None) });
    same.deliver(delivery("p", 1));
    assert!(same.settle(&facts).restore.is_empty(), "it is the delivered one");
}

#[test]
fn where_two_hosts_differ_on_the_stable_version_what_was_kept_counts() {
    let (mut book, facts) = (Book::default(), facts());
    book.load("p", 1, Ok(version("1")));
    versions(&mut book, &facts);
    book.keep(kept("1", None));
    // The leader has seen version 2 pass before this one has loaded it, and a third is delivered.
    book.load("p", 3, Ok(version("3")));
    versions(&mut book, &facts);
    book.keep(kept("2", None));
    let verdict = book.settle(&facts);
    assert_eq!((verdict.restore, verdict.table.len()), (vec!["p".to_owned()], 1), "what serves goes on meanwhile");
    let job = book.restore("p").expect("a job");
    book.finish("p", job.number, Ok(version("2")));
    let now = versions(&mut book, &facts);
    assert_eq!((&now.stable.version, &now.newest().version), (&version("2").version, &version("3").version));
    assert!(book.settle(&facts).plugins["p"].keep.as_ref().expect("keeps").is_kept);
    // What this one finds out itself is what is to be kept.
    book.judge(judged("3", Judgement::Passed));
    let verdict = book.settle(&facts);
    assert_eq!((verdict.restore.len(), verdict.plugins["p"].keep.as_ref().expect("keeps").is_kept), (0, false));
}

proptest! {
    #[test]
    fn once_a_plugin_serves_no_delivery_or_failure_stops_it(steps in prop::collection::vec((0..3_u8, any::<bool>()), 1..40)) {
        let mut book = Book::default();
        book.load("p", 1, Ok(version("1")));
        prop_assert!(book.serving(&facts()).is_some());
        let mut jobs = vec![];
        let mut denied = facts();
        let missing = Needs::of(&Claim::full()).permissions().next().expect("list");
        denied.access.insert(Needs::of(&Claim::full()), Access::Denied(missing, None));
        for (at, (step, good)) in steps.into_iter().enumerate() {
            let at = u32::try_from(at).expect("few");
            match step {
                0 => jobs.extend(book.deliver(delivery("p", at + 2))),
                1 => if let Some(job) = jobs.pop() {
                    book.finish("p", job.number, if good { Ok(version(&at.to_string())) } else { refused("bad") });
                },
                _ => jobs.reverse(),
            }
            let granted = facts();
            let serving = book.serving(if good { &denied } else { &granted });
            prop_assert!(serving.is_some());
        }
    }

    #[test]
    fn the_kind_always_belongs_to_the_oldest_that_is_loaded(steps in prop::collection::vec((0..4_u8, any::<bool>()), 1..40)) {
        let mut book = Book::default();
        let mut loaded = BTreeSet::new();
        for (at, (plugin, there)) in steps.into_iter().enumerate() {
            let name = format!("p{plugin}");
            if there {
                book.load(&name, u32::try_from(at).expect("few") + 1, Ok(version(&name)));
                loaded.insert(name);
            } else {
                book.withdraw(MAP, &name);
                loaded.remove(&name);
            }
            prop_assert_eq!(book.serving(&facts()).map(|(name, _)| name), loaded.first().cloned());
        }
    }
}
