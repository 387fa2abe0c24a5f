//! Where one plugin may send to: what its claim asks for and its `plugin.yaml` gives.

use std::{collections::BTreeSet, sync::Arc};

use serde_json::{Map, Value};

use super::route::{Outside, Route};
use crate::package::{Config, HostPattern, Origin, Refusal, reason};

/// The places, both asked for and given.
pub struct Grant {
    claimed: BTreeSet<HostPattern>,
    routes: Vec<Arc<Route>>,
}

impl Grant {
    /// Of a claim's `hosts` with `$settings.KEY` filled in.
    pub fn new(claimed: &[String], config: &Config, outside: &Outside) -> Result<Self, Refusal> {
        let claimed = claimed.iter().map(|host| place(host, &config.settings)).collect::<Result<_, _>>()?;
        let mut routes: Vec<_> = config.allowed_hosts.iter().map(|host| Arc::new(Route::new(host.clone(), outside.clone()))).collect();
        // What names one host comes before a wildcard that covers it too.
        routes.sort_by_key(|route| !route.host.pattern.is_exact());
        Ok(Self { claimed, routes })
    }

    /// What is asked for and not given.
    pub fn missing(&self) -> impl Iterator<Item = &HostPattern> {
        self.claimed.iter().filter(|claimed| !self.routes.iter().any(|route| route.host.pattern.includes(claimed)))
    }

    /// The way that a request may take, or the sentence on how to allow it.
    pub fn route(&self, place: &Origin) -> Result<Arc<Route>, String> {
        let claimed = self.claimed.iter().any(|claimed| claimed.covers(place));
        match (claimed, self.routes.iter().find(|route| route.host.pattern.covers(place))) {
            (true, Some(route)) => Ok(route.clone()),
            (true, None) => Err(format!(
                "denied a request to {place}: to allow it, add {place} to `allowedHosts` in plugin.yaml of the plugin's ConfigMap"
            )),
            (false, Some(_)) => Err(format!(
                "denied a request to {place}: `allowedHosts` gives it, but the handler's claim does not ask for it; to allow it, add it to `hosts` of the claim"
            )),
            (false, None) => Err(format!(
                "denied a request to {place}: to allow it, add it to `hosts` of the handler's claim, and to `allowedHosts` in plugin.yaml of the plugin's ConfigMap"
            )),
        }
    }
}

fn place(host: &str, settings: &Map<String, Value>) -> Result<HostPattern, Refusal> {
    let Some(key) = host.strip_prefix("$settings.") else {
        let invalid = |error| Refusal::new(reason::INVALID_CLAIM, format!("The claim asks for the host {host:?}, which {error}."));
        return HostPattern::of_url(host).map_err(invalid);
    };
    let invalid = |what: String| Refusal::new(reason::INVALID_CONFIG, format!("plugin.yaml: {what}."));
    let value =
        settings.get(key).ok_or_else(|| invalid(format!("`settings.{key}` is missing; the handler sends its requests to that URL")))?;
    let url = value.as_str().ok_or_else(|| invalid(format!("`settings.{key}` has to be a URL, as text")))?;
    Origin::of_url(url).map(HostPattern::from).map_err(|error| invalid(format!("`settings.{key}` has to be a URL, and {url:?} {error}")))
}

#[cfg(test)]
mod tests {
    use super::{super::client::tests::client, *};

    fn config(text: &str) -> Config {
        Config::parse(text.as_bytes()).expect("valid")
    }

    fn outside() -> Outside {
        Outside { plugin: "p".into(), web: Arc::new(client()), read: crate::secrets::nowhere() }
    }

    #[tokio::test]
    async fn only_what_is_both_claimed_and_allowed_passes_and_the_sentence_says_what_lacks() {
        let config = config("settings: {gateway: 'http://mail.demo/send'}\nallowedHosts: ['http://mail.demo', 'https://other']");
        let grant = Grant::new(&["$settings.gateway".into(), "https://claimed:8443/x".into()], &config, &outside()).expect("valid");
        let route = |url: &str| grant.route(&Origin::of_url(url).expect("valid")).map(|route| route.host.pattern.to_string());
        assert_eq!(route("http://mail.demo:80").as_deref(), Ok("http://mail.demo:80"));
        for (place, lacking) in [
            ("https://mail.demo", "`hosts` of the handler's claim, and to `allowedHosts`"),
            ("http://mail.demo:8080", "`hosts` of the handler's claim, and to `allowedHosts`"),
            ("https://claimed:8443", "to allow it, add https://claimed:8443 to `allowedHosts`"),
            ("https://other", "add it to `hosts` of the claim"),
        ] {
            assert!(route(place).is_err_and(|sentence| sentence.contains(lacking)), "{place}: {:?}", route(place));
        }
        assert_eq!(grant.missing().map(ToString::to_string).collect::<Vec<_>>(), ["https://claimed:8443"]);
    }

    #[tokio::test]
    async fn wildcards_of_claim_and_grant_meet_in_what_both_cover_and_the_exact_entry_wins() {
        let config = config("allowedHosts: ['https://*.a.io', {url: 'https://x.a.io', credentials: {secret: s}}, 'https://y.b.io']");
        let claimed = ["https://*.a.io".into(), "https://*.b.io".into()];
        let grant = Grant::new(&claimed, &config, &outside()).expect("valid");
        let route = |url: &str| grant.route(&Origin::of_url(url).expect("valid")).map(|route| route.host.clone());
        assert!(route("https://x.a.io").is_ok_and(|host| host.credentials.is_some()));
        assert!(route("https://z.a.io").is_ok_and(|host| host.credentials.is_none()));
        assert!(route("https://y.b.io").is_ok());
        assert!(route("https://z.b.io").is_err_and(|sentence| sentence.contains("add https://z.b.io:443 to `allowedHosts`")));
        assert_eq!(grant.missing().map(ToString::to_string).collect::<Vec<_>>(), ["https://*.b.io:443"]);
    }

    #[tokio::test]
    async fn a_setting_that_names_no_host_is_refused() {
        for (text, words) in [
            ("", "`settings.gateway` is missing"),
            ("settings: {gateway: 7}", "as text"),
            ("settings: {gateway: mail}", "has to start"),
            ("settings: {gateway: 'https://*.a.io'}", "wildcard"),
        ] {
            let refusal = Grant::new(&["$settings.gateway".into()], &config(text), &outside()).err().expect(text);
            assert!(refusal.reason == reason::INVALID_CONFIG && refusal.message.contains(words), "{refusal}");
        }
    }
}
