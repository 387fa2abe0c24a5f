//! The stable version that is kept in the cluster: after a restart, on a standby, and where it cannot be loaded.

use super::*;

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
    let facts = facts();
    let mut book = serving(&facts);
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
    let facts = facts();
    let mut book = serving(&facts);
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
