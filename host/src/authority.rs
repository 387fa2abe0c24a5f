//! What a plugin's ServiceAccount may read, asked of the API server by SubjectAccessReview and remembered for a short while.
//!
//! # Expected flow
//! A read of a run calls [`Authority::check`]. The account itself is looked at first: only one that is [labelled](crate::account) for it can be acted
//! as, so that who may write a plugin's ConfigMap gains nothing by naming any other.
//!
//! # Guarantees
//! Nothing is allowed that the API server has not said yes to within [`ALLOWED`]. A question that is open is asked once, however many
//! runs wait for its answer; a run that is dropped while it waits leaves the question to the next one. At most [`AT_ONCE`] questions
//! are open, and [`REMEMBERED`] answers are kept. What could not be asked is not remembered.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::{Api, Client, api::PostParams};
use tokio::{sync::Semaphore, time::Instant};

use crate::account::{Accounts, Actor, Unusable};

/// How long a yes is good for: the longest that a right is used after it was taken away.
const ALLOWED: Duration = Duration::from_secs(60);
/// How long a no is good for: as often as the host asks again for its own rights, so that a grant is noticed about as soon.
const DENIED: Duration = Duration::from_secs(10);
/// The longest that one question may take.
const ASK: Duration = Duration::from_secs(5);
/// Questions at once: the first reads of a plugin in many namespaces are not to crowd out the host's own requests.
const AT_ONCE: usize = 8;
/// Answers that are kept: some 200 bytes each.
const REMEMBERED: usize = 4096;

/// Whether an account of the host's namespace may read objects.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Question {
    /// Name of the account.
    pub account: String,
    /// `get` or `list`.
    pub verb: &'static str,
    /// API group, empty for the core group.
    pub group: String,
    /// Plural resource name.
    pub plural: String,
    /// None for all namespaces, and for a kind without.
    pub namespace: Option<String>,
}

/// The answer: yes, or in a sentence why not and what to do.
pub type Answer = Result<(), String>;

/// Asks the API server. An error, in a sentence, where it has no answer.
pub type Ask = Box<dyn Fn(Question) -> BoxFuture<'static, Result<Answer, String>> + Send + Sync>;

/// Why something is not allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Denial {
    /// The API server said no.
    Forbidden(String),
    /// It is not known.
    Unknown(String),
}

/// See the module.
pub struct Authority {
    accounts: Arc<Accounts>,
    ask: Ask,
    answers: Mutex<HashMap<Question, Arc<Remembered>>>,
    open: Semaphore,
}

/// The lock is held by who asks; the others wait for it.
#[derive(Debug, Default)]
struct Remembered(tokio::sync::Mutex<Option<(Instant, Answer)>>);

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Authority")
    }
}

impl Authority {
    /// Remembers what `ask` answers about accounts that may be acted as.
    pub fn new(accounts: Arc<Accounts>, ask: Ask) -> Self {
        Self { accounts, ask, answers: Mutex::default(), open: Semaphore::new(AT_ONCE) }
    }

    /// Whether the plugin may act as its account, and that may do this.
    pub async fn check(&self, actor: &Actor, verb: &'static str, group: &str, plural: &str, namespace: Option<&str>) -> Result<(), Denial> {
        let account = self.accounts.get(Some(actor)).map_err(|unusable| match unusable {
            Unusable::Unknown(_) => Denial::Unknown(unusable.to_string()),
            _ => Denial::Forbidden(unusable.to_string()),
        })?;
        let namespace = namespace.map(str::to_owned);
        let (account, group, plural) = (account.name().to_owned(), group.to_owned(), plural.to_owned());
        self.answer(Question { account, verb, group, plural, namespace }).await
    }

    async fn answer(&self, question: Question) -> Result<(), Denial> {
        let remembered = self.remembered(&question);
        let mut answer = remembered.0.lock().await;
        if let Some((_, answer)) = answer.as_ref().filter(|(at, answer)| is_good(*at, answer)) {
            return answer.clone().map_err(Denial::Forbidden);
        }
        let _permit = self.open.acquire().await.expect("the semaphore is never closed");
        let asked = tokio::time::timeout(ASK, (self.ask)(question)).await;
        let new = asked.unwrap_or_else(|_| Err(format!("no answer within {ASK:?}"))).map_err(|error| {
            Denial::Unknown(format!("the API server cannot be asked what the plugin's ServiceAccount may read: {error}"))
        })?;
        *answer = Some((Instant::now(), new.clone()));
        new.map_err(Denial::Forbidden)
    }

    fn remembered(&self, question: &Question) -> Arc<Remembered> {
        let mut answers = self.answers.lock().expect("no panic while the lock is held");
        if answers.len() >= REMEMBERED && !answers.contains_key(question) {
            answers.retain(|_, remembered| match remembered.0.try_lock() {
                Ok(answer) => answer.as_ref().is_some_and(|(at, answer)| is_good(*at, answer)),
                Err(_) => true,
            });
            if answers.len() >= REMEMBERED {
                answers.clear();
            }
        }
        answers.entry(question.clone()).or_default().clone()
    }
}

fn is_good(at: Instant, answer: &Answer) -> bool {
    at.elapsed() < if answer.is_ok() { ALLOWED } else { DENIED }
}

/// Asks with the host's client about accounts of its namespace.
pub fn review(client: Client, namespace: &str) -> Ask {
    let namespace = namespace.to_owned();
    Box::new(move |question| {
        let (client, home) = (client.clone(), namespace.clone());
        async move {
            let Question { account, verb, group, plural, namespace } = question;
            let attributes = ResourceAttributes {
                verb: Some(verb.to_owned()),
                group: Some(group),
                resource: Some(plural.clone()),
                namespace: namespace.clone(),
                ..ResourceAttributes::default()
            };
            let allowed = reviewed(&client, &home, &account, attributes).await?;
            let place = namespace.map_or_else(|| "in all namespaces".to_owned(), |namespace| format!("in the namespace {namespace:?}"));
            Ok(if allowed {
                Ok(())
            } else {
                Err(format!("the plugin's ServiceAccount {home}/{account} may not {verb} {plural} {place}: bind it to a role with {verb} on {plural}"))
            })
        }
        .boxed()
    })
}

/// As the API server sees an account that has authenticated.
async fn reviewed(client: &Client, home: &str, account: &str, attributes: ResourceAttributes) -> Result<bool, String> {
    let groups = vec!["system:serviceaccounts".to_owned(), format!("system:serviceaccounts:{home}"), "system:authenticated".to_owned()];
    let review = SubjectAccessReview {
        spec: SubjectAccessReviewSpec {
            user: Some(format!("system:serviceaccount:{home}:{account}")),
            groups: Some(groups),
            resource_attributes: Some(attributes),
            ..SubjectAccessReviewSpec::default()
        },
        ..SubjectAccessReview::default()
    };
    let answer = Api::<SubjectAccessReview>::all(client.clone()).create(&PostParams::default(), &review).await;
    Ok(answer.map_err(|error| error.to_string())?.status.is_some_and(|status| status.allowed))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use super::*;

    fn accounts() -> Arc<Accounts> {
        Accounts::fixed("sys", "system:serviceaccount:sys:berth", &["p", "berth"])
    }

    /// An API server that counts the questions about reads, takes a second for each, and answers as told.
    fn authority(answer: fn(usize) -> Result<Answer, String>) -> (Arc<Authority>, Arc<AtomicUsize>) {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        let authority = Authority::new(
            accounts(),
            Box::new(move |_| {
                let count = count.clone();
                async move {
                    let number = count.fetch_add(1, Relaxed);
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    answer(number)
                }
                .boxed()
            }),
        );
        (Arc::new(authority), asked)
    }

    async fn check(authority: &Authority, namespace: &str) -> Result<(), Denial> {
        authority.check(&Actor::p("p"), "get", "", "configmaps", Some(namespace)).await
    }

    #[tokio::test(start_paused = true)]
    async fn a_yes_is_good_for_a_minute_and_a_no_for_ten_seconds() {
        for (answer, good) in [(Ok(()), ALLOWED), (Err("no".to_owned()), DENIED)] {
            let (authority, asked) = authority(if answer.is_ok() { |_| Ok(Ok(())) } else { |_| Ok(Err("no".into())) });
            for _ in 0..3 {
                assert_eq!(check(&authority, "a").await, answer.clone().map_err(Denial::Forbidden));
            }
            assert_eq!(asked.load(Relaxed), 1);
            assert!(check(&authority, "b").await.is_ok() == answer.is_ok());
            assert_eq!(asked.load(Relaxed), 2, "another namespace is another question");
            tokio::time::advance(good).await;
            check(&authority, "a").await.ok();
            assert_eq!(asked.load(Relaxed), 3);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn many_runs_ask_once_and_one_that_is_dropped_leaves_the_question_to_the_next() {
        let (authority, asked) = authority(|_| Ok(Ok(())));
        let dropped = tokio::time::timeout(Duration::from_millis(500), check(&authority, "a")).await;
        assert!(dropped.is_err());
        let checks = (0..100).map(|_| check(&authority, "a"));
        assert!(futures::future::join_all(checks).await.iter().all(Result::is_ok));
        assert_eq!(asked.load(Relaxed), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn what_could_not_be_asked_is_not_remembered() {
        let (authority, _) = authority(|number| if number == 0 { Err("connection refused".into()) } else { Ok(Ok(())) });
        let unknown = check(&authority, "a").await;
        assert!(matches!(&unknown, Err(Denial::Unknown(why)) if why.contains("connection refused")), "{unknown:?}");
        assert_eq!(check(&authority, "a").await, Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_never_answers_is_given_up() {
        let authority = Authority::new(accounts(), Box::new(|_| std::future::pending().boxed()));
        let started = Instant::now();
        assert!(matches!(check(&authority, "a").await, Err(Denial::Unknown(why)) if why.contains("no answer within 5s")));
        assert_eq!(started.elapsed(), ASK);
    }

    #[tokio::test(start_paused = true)]
    async fn an_account_that_nobody_may_act_as_is_not_asked_about_further() {
        let authority = Authority::new(accounts(), Box::new(|_| unreachable!("nobody is to be asked")));
        for (account, words) in [("other", "with the label"), ("berth", "the host's own")] {
            let denied = authority.check(&Actor::p(account), "get", "", "configmaps", None).await;
            assert!(matches!(&denied, Err(Denial::Forbidden(why)) if why.contains(words)), "{denied:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn no_more_than_a_bounded_number_of_answers_is_kept() {
        let authority = Authority::new(accounts(), Box::new(|_| async { Ok(Ok(())) }.boxed()));
        for number in 0..REMEMBERED + 100 {
            check(&authority, &number.to_string()).await.expect("allowed");
        }
        assert!(authority.answers.lock().expect("no panic").len() <= REMEMBERED);
    }
}
