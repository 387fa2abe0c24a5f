//! What comes of deliveries, refusals and withdrawals of one plugin.

use super::*;

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
fn a_plugin_that_is_gone_for_long_is_forgotten() {
    let facts = facts();
    let mut book = serving(&facts);
    book.keep(kept("1", Some("2")));
    book.withdraw(MAP, "p");
    book.lose("uid of kept 1");
    book.retry();
    book.retry();
    assert!(book.kept.is_empty());
    book.load("p", 3, Ok(version("2")));
    assert_eq!(book.serving(&facts), code("p", "2"), "it is a new one");
}
