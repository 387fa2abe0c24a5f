//! Where one plugin may send to: what its claim asks for and its `plugin.yaml` gives.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::package::{AllowedHost, Config, Refusal, reason};

/// The places, both asked for and given.
#[derive(Debug)]
pub struct Grant {
    claimed: BTreeSet<AllowedHost>,
    allowed: BTreeSet<AllowedHost>,
}

impl Grant {
    /// Of a claim's `hosts` with `$settings.KEY` filled in.
    pub fn new(claimed: &[String], config: &Config) -> Result<Self, Refusal> {
        let claimed = claimed.iter().map(|host| place(host, &config.settings)).collect::<Result<_, _>>()?;
        Ok(Self { claimed, allowed: config.allowed_hosts.iter().cloned().collect() })
    }

    /// What is asked for and not given.
    pub fn missing(&self) -> impl Iterator<Item = &AllowedHost> {
        self.claimed.difference(&self.allowed)
    }

    /// Whether a request may go there, or the sentence on how to allow it.
    pub fn check(&self, place: &AllowedHost) -> Result<(), String> {
        match (self.claimed.contains(place), self.allowed.contains(place)) {
            (true, true) => Ok(()),
            (true, false) => Err(format!(
                "denied a request to {place}: to allow it, add {place} to `allowedHosts` in plugin.yaml of the plugin's ConfigMap"
            )),
            (false, true) => Err(format!(
                "denied a request to {place}: `allowedHosts` gives it, but the handler's claim does not ask for it; to allow it, add it to `hosts` of the claim"
            )),
            (false, false) => Err(format!(
                "denied a request to {place}: to allow it, add it to `hosts` of the handler's claim, and to `allowedHosts` in plugin.yaml of the plugin's ConfigMap"
            )),
        }
    }
}

fn place(host: &str, settings: &Map<String, Value>) -> Result<AllowedHost, Refusal> {
    let Some(key) = host.strip_prefix("$settings.") else {
        let invalid = |error| Refusal::new(reason::INVALID_CLAIM, format!("The claim asks for the host {host:?}, which {error}."));
        return AllowedHost::of_url(host).map_err(invalid);
    };
    let invalid = |what: String| Refusal::new(reason::INVALID_CONFIG, format!("plugin.yaml: {what}."));
    let value =
        settings.get(key).ok_or_else(|| invalid(format!("`settings.{key}` is missing; the handler sends its requests to that URL")))?;
    let url = value.as_str().ok_or_else(|| invalid(format!("`settings.{key}` has to be a URL, as text")))?;
    AllowedHost::of_url(url).map_err(|error| invalid(format!("`settings.{key}` has to be a URL, and {url:?} {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        Config::parse(text.as_bytes()).expect("valid")
    }

    #[test]
    fn only_what_is_both_claimed_and_allowed_passes_and_the_sentence_says_what_lacks() {
        let config = config("settings: {gateway: 'http://mail.demo/send'}\nallowedHosts: ['http://mail.demo', 'https://other']");
        let grant = Grant::new(&["$settings.gateway".into(), "https://claimed:8443/x".into()], &config).expect("valid");
        let check = |place: &str| grant.check(&place.parse().expect("valid"));
        assert_eq!(check("http://mail.demo:80"), Ok(()));
        for (place, lacking) in [
            ("https://mail.demo", "`hosts` of the handler's claim, and to `allowedHosts`"),
            ("http://mail.demo:8080", "`hosts` of the handler's claim, and to `allowedHosts`"),
            ("https://claimed:8443", "to allow it, add https://claimed:8443 to `allowedHosts`"),
            ("https://other", "add it to `hosts` of the claim"),
        ] {
            assert!(check(place).is_err_and(|sentence| sentence.contains(lacking)), "{place}: {:?}", check(place));
        }
        assert_eq!(grant.missing().map(ToString::to_string).collect::<Vec<_>>(), ["https://claimed:8443"]);
    }

    #[test]
    fn a_setting_that_names_no_host_is_refused() {
        for (text, words) in
            [("", "`settings.gateway` is missing"), ("settings: {gateway: 7}", "as text"), ("settings: {gateway: mail}", "has to start")]
        {
            let refusal = Grant::new(&["$settings.gateway".into()], &config(text)).expect_err(text);
            assert!(refusal.reason == reason::INVALID_CONFIG && refusal.message.contains(words), "{refusal}");
        }
    }
}
