//! The informer: keeps a [`Store`] equal to one collection of the API server, and tells what changed.
//!
//! # Expected flow
//! List in pages, then watch from the list's version with bookmarks. A watch that ends is opened again where it left off; a version
//! that the server no longer knows (410, as HTTP status or inside the stream) leads to one new list.
//!
//! # Guarantees
//! - The store never goes back: an object is replaced only by a later version of it, whether it came from the watch, a list or the
//!   answer to one of our own writes ([`Store::observe`]).
//! - Whatever the server does, attempts are spaced by exponential backoff with jitter, also when it answers 200 and closes at once.
//! - A watch whose server falls silent ends by a deadline a little beyond the time that the server was asked to keep it open.
//!
//! # Caveats
//! Events may be missed and merged; only the state counts.

use std::{collections::HashSet, sync::Arc, time::Duration};

use http::{HeaderValue, header::ACCEPT_ENCODING};
use kube::{
    Client,
    core::{
        Status, WatchEvent,
        params::{ListParams, WatchParams},
        request::Request,
    },
};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::time::Instant;

pub use self::store::{Health, Store};
use crate::{memory, object::Object};

mod lines;
mod store;

/// Objects of a page of a list, where they are of the usual size: a page of large ones is a few megabytes, and two are held at a time.
pub const PAGE: u32 = 500;
/// How many of them are read before others get a turn.
const AT_A_TIME: usize = 50;
/// What the server is given beyond the time that a watch may stay open, before the connection is taken for dead.
const SILENCE: Duration = Duration::from_secs(30);
/// An ordinary request of the informer (a page of a list, or the answer that starts a watch).
const REQUEST: Duration = Duration::from_secs(60);
/// A watch that ends earlier than this counts as a failure, so that a server that closes at once is not hammered.
const SHORT: Duration = Duration::from_secs(5);
/// Also what servers that are too busy usually ask for.
const BACKOFF_BASE: Duration = Duration::from_secs(1);
/// Half a minute with its jitter: so long after its return, a server has been asked.
const BACKOFF_MAX: Duration = Duration::from_secs(25);
/// The same while credentials are refused: they are rotated without notice, and read again from their file at the next request.
const BACKOFF_MAX_UNAUTHORIZED: Duration = Duration::from_secs(8);
/// The longest that a server may ask to wait.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);
/// How often a collection that does not exist is asked for again.
const ABSENT: Duration = Duration::from_secs(10);

/// What to watch.
#[derive(Clone, Debug)]
pub struct Target {
    /// Path of the collection, such as `/apis/batch.acme.io/v1/reportjobs`.
    pub path: String,
    /// As in `kubectl -l`.
    pub label_selector: Option<String>,
    /// How long the server is asked to keep a watch open.
    pub watch_timeout: Duration,
    /// How many objects of a list are asked for at a time.
    pub page: u32,
}

/// A change of the store.
#[derive(Clone, Debug)]
pub enum Change {
    /// An object is new or later than before.
    Applied {
        /// What the store held before.
        old: Option<Arc<Object>>,
        /// What it holds now.
        new: Arc<Object>,
        /// Whether it came with a list rather than as a live event.
        listed: bool,
    },
    /// An object is gone.
    Deleted(Arc<Object>),
    /// A list is complete.
    Synced,
}

/// Why a list or watch ended.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("the server no longer knows version {0}")]
    Expired(String),
    #[error("the server does not know {0}")]
    Absent(String),
    #[error("the server closed the watch after {0:?}")]
    Short(Duration),
    #[error("no answer within {0:?}")]
    Silent(Duration),
    #[error("the watch is open, and nothing has come within {0:?}")]
    Mute(Duration),
    #[error("{verb} {path}: {source}")]
    Request { verb: &'static str, path: String, source: Box<kube::Error> },
    #[error("unreadable answer to {verb} {path}: {source}")]
    Malformed { verb: &'static str, path: String, source: serde_json::Error },
}

#[derive(Deserialize)]
struct RawList<'a> {
    metadata: RawListMeta,
    #[serde(borrow, default)]
    items: Option<Vec<&'a RawValue>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct RawListMeta {
    #[serde(default)]
    resource_version: String,
    #[serde(default, rename = "continue")]
    next: Option<String>,
}

/// Keeps `store` equal to the collection until it is dropped, calling `on` for each change.
pub async fn run(client: Client, target: Target, store: Arc<Store>, mut on: impl FnMut(Change) + Send) -> std::convert::Infallible {
    let informer = Informer { client, target, store };
    let mut version: Option<String> = None;
    let mut failures = 0_u32;
    // Whether nothing has come since a watch was given up that was open and mute.
    let mut mute = false;
    // What was last warned of.
    let mut warned = None;
    loop {
        let started = Instant::now();
        let ended = match version.take() {
            None => match informer.list(&mut on).await {
                Ok(listed) => {
                    version = Some(listed);
                    continue;
                }
                Err(ended) => ended,
            },
            Some(mut at) => {
                let ended = informer.watch(&mut at, &mut mute, &mut on).await;
                version = Some(at);
                match ended {
                    Ok(()) if started.elapsed() >= SHORT => {
                        (failures, warned) = (0, None);
                        continue;
                    }
                    Ok(()) => Ended::Short(started.elapsed()),
                    Err(ended) => ended,
                }
            }
        };
        if started.elapsed() >= SHORT {
            (failures, warned) = (0, None);
        }
        failures += 1;
        mute |= matches!(ended, Ended::Mute(_));
        report(&informer.target.path, &ended, failures, &mut warned);
        let delay = informer.ended(ended, failures, &mut version, &mut on);
        tokio::time::sleep(delay).await;
    }
}

struct Informer {
    client: Client,
    target: Target,
    store: Arc<Store>,
}

impl Informer {
    /// Decides what follows an end: from which version to go on, and after which delay.
    fn ended(&self, ended: Ended, failures: u32, version: &mut Option<String>, on: &mut impl FnMut(Change)) -> Duration {
        let path = &self.target.path;
        let delay = match &ended {
            Ended::Expired(_) => {
                *version = None;
                // The first new list follows at once; a server that keeps saying 410 gets the backoff.
                if failures <= 1 { Duration::ZERO } else { backoff(failures) }
            }
            Ended::Absent(_) => {
                *version = None;
                let gone = self.store.clear();
                self.store.note(|health| health.synced = false);
                if !gone.is_empty() || failures == 1 {
                    tracing::warn!(path, dropped = gone.len(), "the API server does not serve this resource; waiting for it");
                }
                gone.into_iter().for_each(on);
                ABSENT
            }
            Ended::Request { source, .. } if is_unauthorized(source) => backoff(failures).min(jittered(BACKOFF_MAX_UNAUTHORIZED)),
            Ended::Short(_) | Ended::Silent(_) | Ended::Mute(_) | Ended::Request { .. } | Ended::Malformed { .. } => backoff(failures),
        };
        self.store.note(|health| health.error = Some(ended.to_string()));
        delay.max(asked_to_wait(&ended))
    }

    async fn list(&self, on: &mut impl FnMut(Change)) -> Result<String, Ended> {
        let mut listed = HashSet::new();
        let mut params =
            ListParams { limit: Some(self.target.page), label_selector: self.target.label_selector.clone(), ..ListParams::default() };
        let mut text = self.page(&params).await?;
        let version = loop {
            let malformed = |source| Ended::Malformed { verb: "list", path: self.target.path.clone(), source };
            let RawList { metadata, items } = serde_json::from_str(&text).map_err(malformed)?;
            let read = async {
                for (number, item) in items.into_iter().flatten().enumerate() {
                    if number % AT_A_TIME == AT_A_TIME - 1 {
                        tokio::task::yield_now().await;
                    }
                    let Some(object) = self.parse(item.get()) else { continue };
                    listed.insert(object.key.clone());
                    self.store.apply(object, true).into_iter().for_each(&mut *on);
                }
            };
            let Some(next) = metadata.next.filter(|next| !next.is_empty()) else {
                read.await;
                break metadata.resource_version;
            };
            params.continue_token = Some(next);
            // The server works at the next page while this one is read.
            let (following, ()) = futures::join!(self.page(&params), read);
            text = following?;
        };
        self.store.retain(&listed, &version).into_iter().for_each(&mut *on);
        self.store.note(|health| health.synced = true);
        memory::burst();
        on(Change::Synced);
        Ok(version)
    }

    async fn page(&self, params: &ListParams) -> Result<String, Ended> {
        let request =
            Request::new(&self.target.path).list(params).map_err(|error| self.failed("list", kube::Error::BuildRequest(error)))?;
        let text = tokio::time::timeout(REQUEST, self.client.request_text(request)).await;
        let text = text.map_err(|_| Ended::Silent(REQUEST))?.map_err(|error| self.failed("list", error))?;
        self.store.contact();
        Ok(text)
    }

    /// Watches from `at`, moving it along, until the server ends the watch. After a mute one, that it is opened proves nothing.
    async fn watch(&self, at: &mut String, mute: &mut bool, on: &mut impl FnMut(Change)) -> Result<(), Ended> {
        let timeout = jittered(self.target.watch_timeout);
        let params = WatchParams {
            label_selector: self.target.label_selector.clone(),
            timeout: Some(u32::try_from(timeout.as_secs().clamp(1, 290)).expect("at most 290")),
            bookmarks: true,
            ..WatchParams::default()
        };
        let deadline = Instant::now() + timeout + SILENCE;
        let mut request =
            Request::new(&self.target.path).watch(&params, at).map_err(|error| self.failed("watch", kube::Error::BuildRequest(error)))?;
        // Servers would pack each event by itself.
        request.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        // Not as kube's events: each watch would hold 8 KiB for the next event, or as much as the largest one took.
        let stream = tokio::time::timeout(REQUEST, self.client.request_stream(request))
            .await
            .map_err(|_| Ended::Silent(REQUEST))?
            .map_err(|error| self.failed("watch", error))?;
        let mut stream = std::pin::pin!(stream);
        if !*mute {
            self.store.contact();
        }
        loop {
            let line = tokio::time::timeout_at(deadline, lines::next(&mut stream)).await.map_err(|_| Ended::Mute(timeout + SILENCE))?;
            let line = match line {
                Ok(line) => line,
                // What is wrong with the server, if anything is, shows when the watch is opened again where it broke off.
                Err(error) => {
                    tracing::debug!(path = self.target.path, %error, "a watch was cut off");
                    return Ok(());
                }
            };
            // Also its end, which the server was asked for.
            *mute = false;
            self.store.contact();
            let Some(line) = line else { return Ok(()) };
            let event = self.event(&line)?;
            drop(line);
            match event {
                WatchEvent::Added(raw) | WatchEvent::Modified(raw) => {
                    let Some(object) = self.parse(raw.get()) else { continue };
                    object.resource_version.as_ref().clone_into(at);
                    self.store.apply(object, false).into_iter().for_each(&mut *on);
                }
                WatchEvent::Deleted(raw) => {
                    let Some(object) = self.parse(raw.get()) else { continue };
                    object.resource_version.as_ref().clone_into(at);
                    self.store.delete(&object).into_iter().for_each(&mut *on);
                }
                WatchEvent::Bookmark(bookmark) => {
                    *at = bookmark.metadata.resource_version;
                    if self.store.pack_resting().await > AT_A_TIME {
                        memory::burst();
                    }
                }
                WatchEvent::Error(status) => return Err(self.failed("watch", kube::Error::Api(status))),
            }
        }
    }

    fn event(&self, line: &[u8]) -> Result<WatchEvent<Box<RawValue>>, Ended> {
        serde_json::from_slice(line).map_err(|source| match serde_json::from_slice::<Status>(line) {
            Ok(status) => self.failed("watch", kube::Error::Api(status.boxed())),
            Err(_) => Ended::Malformed { verb: "watch", path: self.target.path.clone(), source },
        })
    }

    /// An object that cannot be read is left out, and nothing else.
    fn parse(&self, text: &str) -> Option<Object> {
        match Object::parse(text) {
            Ok(mut object) => {
                self.store.share(&mut object);
                Some(object)
            }
            Err(error) => {
                tracing::warn!(path = self.target.path, %error, "left out an object");
                None
            }
        }
    }

    fn failed(&self, verb: &'static str, error: kube::Error) -> Ended {
        match &error {
            kube::Error::Api(status) if status.code == 410 || status.reason == "Expired" => Ended::Expired(status.message.clone()),
            kube::Error::Api(status) if status.code == 404 => Ended::Absent(self.target.path.clone()),
            _ => Ended::Request { verb, path: self.target.path.clone(), source: Box::new(error) },
        }
    }
}

/// One warning of each cause in a row of failures; a watch that ended early is a cause that may be told by the next failure.
fn report(path: &str, ended: &Ended, failures: u32, warned: &mut Option<String>) {
    let cause = ended.to_string();
    match ended {
        Ended::Absent(_) => {}
        Ended::Short(_) => tracing::debug!(path, failures, cause, "watch ended early"),
        _ if warned.as_ref() == Some(&cause) => tracing::debug!(path, failures, cause, "watch still interrupted"),
        _ => {
            tracing::warn!(path, cause, "watch interrupted");
            *warned = Some(cause);
        }
    }
}

/// How long the server asks to wait, within reason.
fn asked_to_wait(ended: &Ended) -> Duration {
    let Ended::Request { source, .. } = ended else { return Duration::ZERO };
    let kube::Error::Api(status) = &**source else { return Duration::ZERO };
    let seconds = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
    Duration::from_secs(seconds.into()).min(RETRY_AFTER_MAX)
}

fn is_unauthorized(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 401)
}

/// Exponential with up to 20 % added, so that replicas that lost the same server do not come back in step.
fn backoff(failures: u32) -> Duration {
    jittered(BACKOFF_BASE.saturating_mul(2_u32.saturating_pow(failures.saturating_sub(1).min(10))).min(BACKOFF_MAX))
}

fn jittered(duration: Duration) -> Duration {
    duration.mul_f64(1.0 + rand::random::<f64>() * 0.2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_of_an_interruption_is_warned_of_once_whatever_came_before_it() {
        let mut warned = None;
        let failed = |code: u16| {
            let status = kube::core::Status::failure("no", "Forbidden").with_code(code);
            Ended::Request { verb: "watch", path: "/p".into(), source: Box::new(kube::Error::Api(Box::new(status))) }
        };
        report("/p", &Ended::Short(Duration::ZERO), 1, &mut warned);
        assert_eq!(warned, None);
        report("/p", &Ended::Silent(SILENCE), 2, &mut warned);
        let silent = warned.clone();
        report("/p", &failed(403), 3, &mut warned);
        assert!(silent.is_some() && warned != silent && warned.is_some());
    }

    #[test]
    fn a_server_that_says_how_long_to_wait_is_waited_for() {
        let busy = |seconds: u32| {
            let details = serde_json::from_value(serde_json::json!({"retryAfterSeconds": seconds})).expect("details");
            let status =
                kube::core::Status { details: Some(details), ..kube::core::Status::failure("busy", "TooManyRequests").with_code(429) };
            asked_to_wait(&Ended::Request { verb: "watch", path: "/p".into(), source: Box::new(kube::Error::Api(Box::new(status))) })
        };
        assert_eq!((busy(0), busy(7), busy(u32::MAX)), (Duration::ZERO, Duration::from_secs(7), RETRY_AFTER_MAX));
        assert_eq!(asked_to_wait(&Ended::Short(Duration::ZERO)), Duration::ZERO);
    }

    #[test]
    fn backoff_grows_to_its_cap_with_jitter() {
        assert!(backoff(1) >= BACKOFF_BASE && backoff(1) <= BACKOFF_BASE.mul_f64(1.2));
        assert!(backoff(40) >= BACKOFF_MAX && backoff(40) <= BACKOFF_MAX.mul_f64(1.2));
    }
}
