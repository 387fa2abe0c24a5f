//! A first plugin: every Greeting gets its greeting. `docs/first-plugin.md` walks through it.

use berth_sdk::prelude::*;

/// Whom to greet.
#[resource(group = "demo.acme.io", version = "v1", kind = "Greeting", namespaced, status = GreetingStatus, column("GREETING", ".status.text"))]
pub struct GreetingSpec {
    /// A name, such as `Ada`.
    #[schemars(length(min = 1, max = 64))]
    pub name: String,
}

/// The greeting.
#[data]
#[derive(Default)]
pub struct GreetingStatus {
    /// What is said.
    pub text: Option<String>,
    /// The version of the spec that it is about.
    pub observed_generation: Option<i64>,
}

/// The handler.
pub struct Greeter;

#[reconciler]
impl Reconciler for Greeter {
    type Object = Greeting;

    fn reconcile(greeting: &Greeting, ctx: &Context) -> Result<Action, Error> {
        let word = ctx.setting("word").unwrap_or_else(|_| "Hello".to_owned());
        let mut status = greeting.status.clone().unwrap_or_default();
        status.text = Some(format!("{word}, {}!", greeting.spec.name));
        Ok(Action::await_change().status(status))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greeting_is_written() {
        let object = testing::json!({ "metadata": { "name": "ada" }, "spec": { "name": "Ada" } });
        let ctx = testing::Script::new().setting("word", "Good morning").context();
        let outcome = testing::reconcile::<Greeter>(&object, &ctx);
        assert_eq!(outcome.status.as_deref(), Some(r#"{"text":"Good morning, Ada!"}"#));
    }

    #[test]
    fn crd_file_is_current() {
        berth_sdk::crd::check::<Greeting>(concat!(env!("CARGO_MANIFEST_DIR"), "/greetings.demo.acme.io.yaml"));
    }
}
