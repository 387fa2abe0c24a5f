//! Which plugin has a kind, by definitions, permissions and age.

use super::*;

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
