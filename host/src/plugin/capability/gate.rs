//! The one place that every host call of every capability asks whether it may: default deny, counted, and said once with what to add.
//!
//! # Expected flow
//! A run has one [`Gate`]. Each capability describes what it is asked for as a [`Call`] and goes on with the [`Permit`]. What turns out
//! to be denied only later (a name that leads to this machine) is told by [`Gate::deny`].
//!
//! # Guarantees
//! [`Call`] is matched in full: a capability that is added cannot be forgotten here. A denial is one line of the log for each sentence
//! and run, at most [`SENTENCES`], however often the guest asks; it is taken from what the run may log. Its sentence is of bounded
//! length and on one line, whatever the guest asked for.
//!
//! # Caveats
//! Clocks, random numbers and streams of the run's own are not asked for: they reach nothing. Of files only the question for folders
//! comes this far, as there is none to open them in.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, PoisonError},
};

use http::{Method, Uri};

use super::{
    http::{Grant, Route},
    log::Log,
};
use crate::{
    denial::Denial,
    metrics::Metrics,
    object::GroupKind,
    package::Origin,
    plugin::{limits, text::one_line},
    text::cut,
};

/// Different denials that a run has in the log.
const SENTENCES: usize = 10;

/// What a guest asks for.
pub enum Call<'c> {
    /// To write a line.
    Log,
    /// To send a request.
    Http {
        /// Its method.
        method: &'c Method,
        /// Its whole URL.
        uri: &'c Uri,
    },
    /// To read an object or a list of the cluster.
    Read,
    /// To open a socket of its own.
    Socket,
    /// To look up a name.
    NameLookup,
    /// For the folders that files could be opened in.
    Files,
}

/// What the host does then.
pub enum Permit {
    /// Just that.
    Plain,
    /// Send it there, by this way.
    Http(Origin, Arc<Route>),
}

/// What the host does not do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denied {
    /// The kind of it.
    pub denial: Denial,
    /// Why, and what to add where.
    pub sentence: String,
}

impl Denied {
    /// With as much of the sentence as is fit to be shown: there may be words of the guest in it.
    pub fn new(denial: Denial, sentence: &str) -> Self {
        let sentence = cut(&one_line(&cut(sentence, limits::SENTENCE)), limits::SENTENCE);
        Self { denial, sentence }
    }
}

/// What a run may do.
pub struct Gate {
    log: Arc<Log>,
    rights: Option<Rights>,
    said: Mutex<BTreeSet<String>>,
}

/// Of the plugin that runs.
#[derive(Clone)]
pub struct Rights {
    /// Where it may send to.
    pub grant: Arc<Grant>,
    /// Where denials are counted, and as whose.
    pub metrics: Arc<Metrics>,
    /// The kind that it reconciles.
    pub kind: GroupKind,
}

impl Gate {
    /// Without rights nothing but the log is allowed: a trial has no capability.
    pub fn new(log: Arc<Log>, rights: Option<Rights>) -> Arc<Self> {
        Arc::new(Self { log, rights, said: Mutex::default() })
    }

    /// The log of the run.
    pub fn log(&self) -> &Arc<Log> {
        &self.log
    }

    /// Whether the call may be made. A denial has been counted and said when this returns.
    pub fn check(&self, call: &Call<'_>) -> Result<Permit, Denied> {
        self.judge(call).inspect_err(|denied| self.deny(denied))
    }

    /// Counts a denial and says it.
    pub fn deny(&self, denied: &Denied) {
        if let Some(Rights { metrics, kind, .. }) = &self.rights {
            metrics.denied(kind, denied.denial);
        }
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if said.len() < SENTENCES && said.insert(denied.sentence.clone()) {
            self.log.denial(&denied.sentence);
        }
    }

    fn judge(&self, call: &Call<'_>) -> Result<Permit, Denied> {
        let denied = |denial, sentence| Err(Denied::new(denial, sentence));
        match (call, &self.rights) {
            (Call::Log, _) => Ok(Permit::Plain),
            (Call::Http { .. }, None) => denied(Denial::HttpHost, "describe must not send requests"),
            (Call::Http { method, uri }, Some(rights)) => http(method, uri, &rights.grant),
            (Call::Read, None) => denied(Denial::ClusterRead, "describe must not read the cluster"),
            // Which objects, the reader of the run judges: it knows the claim, the account and what is watched.
            (Call::Read, Some(_)) => Ok(Permit::Plain),
            (Call::Socket, _) => denied(
                Denial::Socket,
                "denied a socket: plugins have none; send requests by wasi:http, to hosts that `allowedHosts` in plugin.yaml gives",
            ),
            (Call::NameLookup, _) => {
                denied(Denial::NameLookup, "denied the look-up of a name: the host looks up names itself, for requests by wasi:http")
            }
            (Call::Files, _) => denied(Denial::Files, "denied files: plugins have none; what a handler has to know is in its `settings`"),
        }
    }
}

fn http(method: &Method, uri: &Uri, grant: &Grant) -> Result<Permit, Denied> {
    let denied = |sentence: &str| Denied::new(Denial::HttpRequest, sentence);
    if method == Method::CONNECT {
        return Err(denied("denied a CONNECT request: guests open no tunnels"));
    }
    // A server that answers to these shows a request's headers, with the credentials that the host has added.
    if method == Method::TRACE || method.as_str().eq_ignore_ascii_case("track") {
        return Err(denied(&format!("denied a {method} request: its answer would show what the host adds to requests")));
    }
    let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
        return Err(denied("denied a request without a scheme or host"));
    };
    let place = Origin::new(scheme, authority.as_str())
        .map_err(|error| denied(&format!("denied a request to \"{scheme}://{authority}\", which {error}")))?;
    let route = grant.route(&place).map_err(|sentence| Denied::new(Denial::HttpHost, &sentence))?;
    Ok(Permit::Http(place, route))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sentence_with_words_of_the_guest_is_short_and_on_one_line() {
        let denied = Denied::new(Denial::ClusterRead, &format!("denied a read of {}", "\u{1b}\n".repeat(1 << 20)));
        assert!(denied.sentence.len() <= limits::SENTENCE && !denied.sentence.contains(char::is_control), "{denied:?}");
        assert!(denied.sentence.starts_with("denied a read of \\u{1b}\\n"), "{denied:?}");
    }
}
