//! What serves, after any order of deliveries, refusals, trials and facts.

mod deliveries;
mod kinds;
mod laws;
mod stable;
mod trials;

use futures::FutureExt;

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

/// A book in which version 1 serves.
fn serving(facts: &Facts) -> Book {
    let mut book = Book::default();
    book.load("p", 1, Ok(version("1")));
    versions(&mut book, facts);
    book
}

/// A book in which version 2 is on trial after version 1, and its trial.
fn on_trial(facts: &Facts) -> (Book, Arc<Trial>) {
    let mut book = serving(facts);
    book.load("p", 2, Ok(version("2")));
    let trial = trial(&versions(&mut book, facts)).expect("on trial");
    (book, trial)
}

fn trial(versions: &Versions) -> Option<Arc<Trial>> {
    versions.candidate.as_ref().map(|candidate| candidate.trial.clone())
}
