//! What is counted as an effect of a host, and by which name the same one is found again in another run.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use serde_json::Value;

use super::scenario::MORE;
use crate::{
    cluster::{Cluster, ready_reason},
    proxy::{Entry, Seen, Verb},
};

/// How many of the effects of one name are points, where more of them show nothing new or come and go with time.
const FEW: [(&str, usize); 4] = [("lease renew", 1), ("figures", 1), ("bulk", 1), (MORE, 0)];

/// Where a request goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// To the API server.
    Api,
    /// To the mail gateway.
    Mail,
    /// To the report exporter.
    Reports,
}

/// The namespaces of one run, which are no part of a name.
#[derive(Clone, Debug)]
pub struct Names {
    /// Of objects.
    pub namespace: String,
    /// Of plugins.
    pub system: String,
}

/// The nth effect of a name: other effects may come before it in one run and after it in another.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Point {
    /// What it is.
    pub name: String,
    /// Which of them, from 1.
    pub nth: usize,
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{}", self.name, self.nth)
    }
}

impl Names {
    /// Those of a cluster.
    pub fn of(cluster: &Cluster) -> Self {
        Self { namespace: cluster.namespace().to_owned(), system: cluster.system().to_owned() }
    }

    /// The name of an effect; none where a request is none.
    pub fn effect(&self, place: Place, seen: &Seen) -> Option<String> {
        match place {
            Place::Mail if seen.path == "/send" => {
                let key = seen.headers.get("idempotency-key")?.to_str().ok()?.trim_matches('"');
                Some(format!("send mail {}", object_of(key)))
            }
            Place::Reports if seen.verb == Verb::Update => {
                let key = seen.path.rsplit('/').next()?.replace("%2F", "/").replace("%2f", "/");
                Some(format!("make report {}", object_of(&key)))
            }
            Place::Api if seen.writes() => Some(self.write(seen)),
            _ => None,
        }
    }

    fn write(&self, seen: &Seen) -> String {
        let body = seen.json();
        let path = self.short(&seen.path);
        match path.split('/').next() {
            Some("leases") => format!("lease {}", lease_word(seen.verb, &body["spec"])),
            Some("events") if seen.verb == Verb::Create => {
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                format!("event {} {}", text(&body["reason"]), plain(&text(&body["regarding"]["name"])))
            }
            Some("events") => "event again".to_owned(),
            Some("plugins") if seen.query.contains("-host-") => format!("figures of {path}"),
            Some("plugins") if path.ends_with("/status") => format!("say {} in {path}", ready_reason(&body)),
            _ => format!("{} {}{}", verb_word(seen.verb), plain(&path), part_word(&path, &body)),
        }
    }

    /// A path from its resource on, without namespaces.
    fn short(&self, path: &str) -> String {
        let segments: Vec<&str> = path.trim_start_matches('/').split('/').collect();
        let rest = if segments.first() == Some(&"api") { segments.get(2..) } else { segments.get(3..) };
        match rest.unwrap_or_default() {
            ["namespaces", namespace, rest @ ..] if [&self.namespace, &self.system].contains(&&(*namespace).to_owned()) => rest.join("/"),
            rest => rest.join("/"),
        }
    }
}

fn verb_word(verb: Verb) -> &'static str {
    match verb {
        Verb::Create => "create",
        Verb::Update => "update",
        Verb::Patch => "patch",
        Verb::Delete => "delete",
        Verb::Get | Verb::List | Verb::Watch => "read",
    }
}

/// What of an object is written.
fn part_word(path: &str, body: &Value) -> &'static str {
    match &body["metadata"]["finalizers"] {
        _ if path.starts_with("plugins/") || path.starts_with("configmaps") || path.ends_with("/status") => "",
        Value::Null => " metadata",
        _ => " finalizers",
    }
}

fn lease_word(verb: Verb, spec: &Value) -> &'static str {
    match (verb, spec["holderIdentity"].as_str()) {
        (Verb::Create, _) => "create",
        (_, None | Some("")) => "release",
        _ if spec["acquireTime"] == spec["renewTime"] => "acquire",
        _ => "renew",
    }
}

/// The name of the object in an idempotency key.
fn object_of(key: &str) -> String {
    plain(key.split('/').nth(2).unwrap_or(key))
}

/// `bulk-7` is as good as any other of them.
fn plain(name: &str) -> String {
    let segments = name.split('/').map(|segment| if segment.starts_with("bulk-") { "bulk" } else { segment });
    segments.collect::<Vec<_>>().join("/")
}

/// The points of a run, by name.
pub fn points(names: &Names, entries: impl Iterator<Item = (Place, Entry)>) -> Vec<Point> {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for (place, entry) in entries {
        if let Some(name) = names.effect(place, &entry.seen) {
            *counts.entry(name).or_default() += 1;
        }
    }
    let few = |name: &str| FEW.iter().find(|(part, _)| name.contains(part)).map_or(usize::MAX, |(_, few)| *few);
    let of = |(name, count): (String, usize)| {
        let most = count.min(few(&name));
        (1..=most).map(move |nth| Point { name: name.clone(), nth })
    };
    counts.into_iter().flat_map(of).collect()
}

/// Recognises one point among the requests of a run.
#[derive(Clone, Debug)]
pub struct Trigger {
    names: Names,
    point: Point,
    seen: Arc<AtomicUsize>,
}

impl Trigger {
    /// For this point.
    pub fn new(names: Names, point: Point) -> Self {
        Self { names, point, seen: Arc::default() }
    }

    /// Whether a request is it. To be asked once for each.
    pub fn is_it(&self, place: Place, seen: &Seen) -> bool {
        self.names.effect(place, seen).as_ref() == Some(&self.point.name) && self.seen.fetch_add(1, Ordering::Relaxed) + 1 == self.point.nth
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> Names {
        Names { namespace: "t1".into(), system: "t1-sys".into() }
    }

    fn seen(method: &str, path: &str, body: &str) -> Seen {
        let request = http::Request::builder().method(method).uri(path).header("idempotency-key", "\"emailrequests.x/t1/a/u\"");
        Seen::new(request.body(()).expect("a request").into_parts().0, body.to_owned().into())
    }

    fn name(place: Place, method: &str, path: &str, body: &str) -> Option<String> {
        names().effect(place, &seen(method, path, body))
    }

    #[test]
    fn effects_are_named_without_what_differs_from_run_to_run() {
        let api = |method, path, body| name(Place::Api, method, path, body);
        for (method, path, body, expected) in [
            ("PATCH", "/apis/batch.acme.io/v1/namespaces/t1/reportjobs/a/status", "{}", "patch reportjobs/a/status"),
            (
                "PATCH",
                "/apis/batch.acme.io/v1/namespaces/t1/reportjobs/bulk-7",
                r#"{"metadata":{"labels":{}}}"#,
                "patch reportjobs/bulk metadata",
            ),
            ("PATCH", "/apis/p.io/v1/namespaces/t1/probes/p", r#"{"metadata":{"finalizers":[]}}"#, "patch probes/p finalizers"),
            ("PATCH", "/api/v1/namespaces/t1/configmaps/c", "{}", "patch configmaps/c"),
            ("DELETE", "/api/v1/namespaces/t1-sys/configmaps/x-stable", "", "delete configmaps/x-stable"),
            (
                "PATCH",
                "/apis/berth.acme.io/v1alpha1/namespaces/t1-sys/plugins/p/status?fieldManager=berth-host-berth",
                "{}",
                "figures of plugins/p/status",
            ),
            (
                "PUT",
                "/apis/coordination.k8s.io/v1/namespaces/t1-sys/leases/berth",
                r#"{"spec":{"holderIdentity":"x","renewTime":"1"}}"#,
                "lease renew",
            ),
            ("PUT", "/apis/coordination.k8s.io/v1/namespaces/t1-sys/leases/berth", r#"{"spec":{}}"#, "lease release"),
            ("POST", "/apis/events.k8s.io/v1/namespaces/t1/events", r#"{"reason":"GaveUp","regarding":{"name":"a"}}"#, "event GaveUp a"),
        ] {
            assert_eq!(api(method, path, body).as_deref(), Some(expected), "{path}");
        }
        assert_eq!(api("GET", "/api/v1/namespaces/t1/configmaps/c", ""), None);
        assert_eq!(api("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", "{}"), None);
        let report = name(Place::Reports, "PUT", "/reports/reportjobs.batch.acme.io%2Ft1%2Fa%2Fu", "");
        assert_eq!(report.as_deref(), Some("make report a"));
        assert_eq!(name(Place::Mail, "POST", "/send", "").as_deref(), Some("send mail a"));
        assert_eq!(name(Place::Mail, "GET", "/deliveries", ""), None);
    }

    #[test]
    fn a_trigger_is_the_nth_of_its_name_and_no_other() {
        let trigger = Trigger::new(names(), Point { name: "patch configmaps/c".into(), nth: 2 });
        let seen = |name: &str| seen("PATCH", &format!("/api/v1/namespaces/t1/configmaps/{name}"), "{}");
        let hits: Vec<bool> = ["c", "d", "c", "c"].iter().map(|name| trigger.is_it(Place::Api, &seen(name))).collect();
        assert_eq!(hits, [false, false, true, false]);
    }
}
