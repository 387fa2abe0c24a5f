//! One run: from an object's text to an outcome.

use std::time::Duration;

use crate::{
    action::{Action, Event, Writes, to_json},
    context::Context,
    error::{Error, Verdict},
    json,
    resource::Resource,
};

/// The reconcile handler of one kind.
///
/// # Expected flow
/// The object is read from JSON, `reconcile` takes one step towards the spec, and what it returns is written by the host.
///
/// # Guarantees
/// A fresh instance for each run: nothing in memory is kept. One run of an object at a time.
///
/// # Assumptions
/// Runs are deduplicated, coalesced and repeated, after a crash at any point too: no handler may count them or expect an order.
/// An effect is idempotent, keyed by [`Context::idempotency_key`].
///
/// # Children and deletion
/// ```
/// use berth_sdk::{Kind, Readable, json, prelude::*};
///
/// /// A page under a name of its own.
/// #[resource(group = "web.acme.io", version = "v1", kind = "Website", namespaced)]
/// pub struct WebsiteSpec {
///     /// What is shown.
///     pub text: String,
/// }
///
/// pub struct ConfigMap;
///
/// impl Readable for ConfigMap {
///     const KIND: Kind = Kind { group: "", version: "v1", kind: "ConfigMap", plural: "configmaps", namespaced: true };
///
///     fn read(_: &str) -> Result<Self, String> {
///         Ok(Self)
///     }
/// }
///
/// pub struct Sites;
///
/// #[reconciler(owns(ConfigMap), finalizer, hosts("$settings.dns"))]
/// impl Reconciler for Sites {
///     type Object = Website;
///
///     fn reconcile(site: &Website, ctx: &Context) -> Result<Action, Error> {
///         http::put(ctx, format!("{}/{}", ctx.setting("dns")?, site.name())).send()?;
///         let page = Child::new::<ConfigMap>(format!("{}-page", site.name())).field("data", json!({ "index.html": site.spec.text }));
///         Ok(Action::await_change().children([page]))
///     }
///
///     // The ConfigMap goes with its owner; the name outside of the cluster does not.
///     fn finalize(site: &Website, ctx: &Context) -> Result<Action, Error> {
///         http::delete(ctx, format!("{}/{}", ctx.setting("dns")?, site.name())).send()?;
///         Ok(Action::await_change())
///     }
/// }
///
/// let site = testing::json!({ "metadata": { "name": "blog" }, "spec": { "text": "Hello!" } });
/// let context = || testing::Script::new().setting("dns", "http://dns").respond(|_| Ok(testing::Response::new(200))).context();
/// let child = &testing::reconcile::<Sites>(&site, &context()).children.unwrap()[0];
/// assert!(child.contains(r#""metadata":{"name":"blog-page"},"data":{"index.html":"Hello!"}"#));
/// let ctx = context();
/// assert_eq!(testing::finalize::<Sites>(&site, &ctx).next, testing::Next::AwaitChange);
/// assert_eq!(ctx.sent()[0].url, "http://dns/blog");
/// ```
pub trait Reconciler {
    /// The resource.
    type Object: Resource;

    /// One step towards the spec.
    fn reconcile(object: &Self::Object, ctx: &Context) -> Result<Action, Error>;

    /// The object is being deleted: undo what lies outside the cluster. Called only where the claim has `finalizer`, and needed there.
    ///
    /// The object stays until this returns [`Action::await_change`]. An error that may heal leads to another try, as often as it takes;
    /// one that gives up keeps the object, with an Event, until somebody changes it or the next resync. Children need no undoing: they go
    /// with their owner.
    fn finalize(object: &Self::Object, ctx: &Context) -> Result<Action, Error> {
        let _ = (object, ctx);
        Ok(Action::await_change())
    }
}

/// Everything that a run wants written, and what happens next, as the host gets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The whole status as JSON; none leaves it.
    pub status: Option<String>,
    /// Labels to set, or with none to remove.
    pub labels: Vec<(String, Option<String>)>,
    /// Objects that are to exist, as JSON; none leaves them.
    pub children: Option<Vec<String>>,
    /// Events about the object.
    pub events: Vec<Event>,
    /// What happens next.
    pub next: Next,
}

/// What happens next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Done with this version of the spec.
    AwaitChange,
    /// No failure: look again.
    After(Duration),
    /// Failed: backoff.
    Retry(String),
    /// Failed, and the other side said when to try again.
    RetryAfter(Duration, String),
    /// Cannot heal for this version of the spec.
    GiveUp(String),
}

/// One run of a handler on the text of an object.
pub fn run<R: Reconciler>(text: &str, finalize: bool, ctx: &Context) -> Outcome {
    let object: R::Object = match json::object(text) {
        Ok(object) => object,
        Err(sentence) => return failed(&format!("the object does not read as a {}: {sentence}", R::Object::KIND.kind)),
    };
    let (writes, next) = match if finalize { R::finalize(&object, ctx) } else { R::reconcile(&object, ctx) } {
        Ok(Action { after: None, writes }) => (writes, Next::AwaitChange),
        Ok(Action { after: Some(after), writes }) => (writes, Next::After(after)),
        Err(Error { verdict, cause, writes }) => (
            *writes,
            match verdict {
                Verdict::Retry => Next::Retry(cause),
                Verdict::RetryAfter(delay) => Next::RetryAfter(delay, cause),
                Verdict::GiveUp => Next::GiveUp(cause),
            },
        ),
    };
    let old = object.status().and_then(|status| to_json(status).ok());
    settle(text, old.as_deref(), writes, next).unwrap_or_else(|sentence| failed(&sentence))
}

/// The writes as text, the typed status laid over what others wrote in it.
fn settle(text: &str, old: Option<&str>, writes: Writes, next: Next) -> Result<Outcome, String> {
    let Writes { status, labels, children, events } = writes;
    let status = status.transpose().map_err(|error| format!("the handler's status cannot be written as JSON: {error}"))?;
    let children = children.map(|children| children.into_iter().collect::<Result<Vec<_>, _>>()).transpose();
    Ok(Outcome {
        status: status.map(|new| json::overlay(json::status(text), old, &new)),
        labels,
        children: children.map_err(|error| format!("a child cannot be written as JSON: {error}"))?,
        events,
        next,
    })
}

fn failed(sentence: &str) -> Outcome {
    Outcome { status: None, labels: Vec::new(), children: None, events: Vec::new(), next: Next::GiveUp(sentence.to_owned()) }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::Next;
    use crate::{prelude::*, testing};

    #[resource(group = "g.example", version = "v1", kind = "Thing", namespaced, status = ThingStatus)]
    pub struct ThingSpec {
        wish: String,
    }

    #[data]
    #[derive(Default)]
    pub struct ThingStatus {
        seen: Option<String>,
    }

    struct Handler;

    #[reconciler(finalizer, owns(Thing), read(Thing, all_namespaces, selector = "a=b"), label_prefixes("acme.io/"))]
    impl Reconciler for Handler {
        type Object = Thing;

        fn reconcile(thing: &Thing, _: &Context) -> Result<Action, Error> {
            let status = ThingStatus { seen: Some(thing.spec.wish.clone()) };
            match thing.spec.wish.as_str() {
                "wait" => Ok(Action::look_again(std::time::Duration::from_secs(5)).status(status)),
                "fail" => Err(Error::retry("no").context("asking").status(status).event(Event::warning("Asked", "Ask", "said no"))),
                "write" => Ok(Action::await_change()
                    .label("acme.io/a", "b")
                    .no_label("acme.io/c")
                    .children([Child::new::<Thing>("child").spec(&thing.spec)])
                    .event(Event::normal("Asked", "Ask", "said yes"))),
                _ => Ok(Action::await_change()),
            }
        }

        fn finalize(_: &Thing, _: &Context) -> Result<Action, Error> {
            Err(Error::give_up("cannot be undone"))
        }
    }

    fn run(wish: &str) -> testing::Outcome {
        testing::reconcile::<Handler>(&json!({ "spec": { "wish": wish } }), &testing::Script::new().context())
    }

    #[test]
    fn a_status_goes_with_a_failure_too() {
        let outcome = run("fail");
        assert_eq!((outcome.next, outcome.status.as_deref()), (Next::Retry("asking: no".into()), Some(r#"{"seen":"fail"}"#)));
        assert_eq!(outcome.events, [Event::warning("Asked", "Ask", "said no")]);
    }

    #[test]
    fn a_look_again_is_no_failure() {
        assert_eq!(run("wait").next, Next::After(std::time::Duration::from_secs(5)));
    }

    #[test]
    fn writes_are_data() {
        let outcome = run("write");
        assert_eq!(outcome.labels, [("acme.io/a".to_owned(), Some("b".to_owned())), ("acme.io/c".to_owned(), None)]);
        let child = r#"{"apiVersion":"g.example/v1","kind":"Thing","metadata":{"name":"child"},"spec":{"wish":"write"}}"#;
        assert_eq!(outcome.children, Some(vec![child.to_owned()]));
        assert_eq!((outcome.events.len(), outcome.status), (1, None));
    }

    #[test]
    fn nothing_is_written_that_was_not_asked_for() {
        let outcome = run("nothing");
        assert_eq!((outcome.status, outcome.children, outcome.labels.len()), (None, None, 0));
    }

    #[test]
    fn a_deletion_is_finalized() {
        let outcome = testing::finalize::<Handler>(&json!({ "spec": { "wish": "x" } }), &testing::Script::new().context());
        assert_eq!(outcome.next, Next::GiveUp("cannot be undone".into()));
    }

    #[test]
    fn the_claim_has_what_the_attribute_says() {
        use crate::claim::{Describe, Read};
        let claim = Handler::CLAIM;
        assert_eq!((claim.finalizer, claim.owns, claim.label_prefixes), (true, &[Thing::KIND][..], &["acme.io/"][..]));
        assert_eq!(claim.reads, [Read { kind: Thing::KIND, all_namespaces: true, label_selector: "a=b" }]);
        assert_eq!((claim.progress, claim.dead_letter, claim.priority_field), (None, None, None));
    }
}
