//! New versions beside a good one: on trial, passed, rolled back.

use super::*;

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
    let facts = facts();
    let (mut book, _) = on_trial(&facts);
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
    let mut facts = facts();
    serve_v0(&mut facts);
    let mut book = serving(&facts);
    book.load("p", 2, Ok(of_v0("2")));
    assert!(versions(&mut book, &facts).candidate.is_none());
    assert_eq!(book.serving(&facts), code("p", "2"));
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
    let mut facts = facts();
    let mut book = serving(&facts);
    book.load("p", 2, Ok(of_v0("2")));
    assert_eq!(book.reason("p", &facts), Some(reason::VERSION_NOT_SERVED));
    book.load("p", 3, refused("3"));
    serve_v0(&mut facts);
    assert_eq!(book.serving(&facts), code("p", "1"));
}

#[test]
fn what_differs_in_its_pause_alone_needs_no_trial() {
    let facts = facts();
    let mut book = serving(&facts);
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
fn a_plugin_that_is_withdrawn_and_comes_back_has_its_good_version_and_its_quarantine() {
    for (uid, is_collected_first) in [("uid of p", false), ("another uid", false), ("another uid", true)] {
        let facts = facts();
        let (mut book, _) = on_trial(&facts);
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
