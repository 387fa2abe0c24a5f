//! The way to an allowed host: through which client, which trusts whom, and with which credentials.
//!
//! # Guarantees
//! A host with a CA of its own has a client of its own, so a connection is never used under another CA than the one that verified it.
//! Credentials go only where both `allowedHosts` and their Secret say; the Secret names the plugin too. With credentials, a CA is trusted
//! only from the same Secret, or from what names the plugin as that does: whoever may write `plugin.yaml` cannot have the credentials
//! sent to whom they vouch for themselves.

use std::sync::Arc;

use http::{HeaderName, HeaderValue};
use rustls::{
    RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};

use tokio::time::Instant;

use super::{client::Client, kept::Kept};
use crate::{
    package::{AllowedHost, Ca, Credentials, Digest, Holder, HostPattern, Origin},
    secrets::{self, CREDENTIALS_FOR, Found, Read, ReadError},
};

/// What all routes of a plugin have in common.
#[derive(Clone)]
pub struct Outside {
    /// Name of the plugin.
    pub plugin: Arc<str>,
    /// The client that trusts the roots of the web.
    pub web: Arc<Client>,
    /// Reads Secrets and ConfigMaps.
    pub read: Read,
}

/// One entry of `allowedHosts`.
pub struct Route {
    /// The entry.
    pub host: AllowedHost,
    outside: Outside,
    private: Kept<Private>,
    credential: Kept<Credential>,
}

/// A client that trusts one authority.
#[derive(Clone)]
struct Private {
    certificates: Digest,
    client: Arc<Client>,
}

/// The header of a Secret and where it may go.
#[derive(Clone)]
struct Credential {
    value: HeaderValue,
    hosts: Arc<[HostPattern]>,
}

impl Route {
    /// With nothing read yet.
    pub fn new(host: AllowedHost, outside: Outside) -> Self {
        Self { host, outside, private: Kept::default(), credential: Kept::default() }
    }

    /// The client for it, or in a sentence why there is none.
    pub async fn client(&self) -> Result<Arc<Client>, String> {
        let Some(ca) = &self.host.ca else { return Ok(self.outside.web.clone()) };
        let read = async |before: Option<&Private>| {
            let found = (self.outside.read)(ca.holder.clone()).await?;
            self.may_vouch(ca, &found)?;
            let pem = found.data.get(&ca.key).ok_or_else(|| ReadError::Refused(format!("it has no key {:?}", ca.key)))?;
            let certificates = Digest::of(pem);
            match before.filter(|before| before.certificates == certificates) {
                Some(same) => Ok(same.clone()),
                None => Ok(Private { certificates, client: Arc::new(self.outside.web.trusting(roots(pem)?)) }),
            }
        };
        self.private.get(read).await.map(|private| private.client).map_err(|error| self.without("the CA", &ca_holder(ca), &error))
    }

    /// Whether credentials may be sent to whom this CA vouches for.
    fn may_vouch(&self, ca: &Ca, found: &Found) -> Result<(), ReadError> {
        let Some(Credentials { secret, .. }) = &self.host.credentials else { return Ok(()) };
        if matches!(&ca.holder, Holder::Secret(name) if name == secret) || self.is_named(found) {
            return Ok(());
        }
        Err(ReadError::Refused(format!(
            "credentials are sent to whom it vouches for, and its annotation {CREDENTIALS_FOR} does not name the plugin {}; add it there, \
             or put the CA into the Secret {secret:?} of the credentials",
            self.outside.plugin
        )))
    }

    fn is_named(&self, found: &Found) -> bool {
        listed(found, CREDENTIALS_FOR).any(|name| name == &*self.outside.plugin)
    }

    /// The header to set on a request to this place; none where the route has no credentials. Or in a sentence why it cannot be set.
    pub async fn credential(&self, place: &Origin) -> Result<Option<(HeaderName, HeaderValue)>, String> {
        let Some(credentials) = &self.host.credentials else { return Ok(None) };
        let credential = self.credential.get(async |_| self.read(credentials).await).await;
        let allowed = credential.and_then(|credential| match credential.hosts.iter().any(|host| host.covers(place)) {
            true => Ok(Some((credentials.header.clone(), credential.value))),
            false => Err(ReadError::Refused(format!(
                "its annotation {} does not name {place}; add it there if the Secret is meant for it",
                secrets::ALLOWED_HOSTS
            ))),
        });
        allowed.map_err(|error| self.without("the credentials", &format!("Secret {:?}", credentials.secret), &error))
    }

    /// Whether the Secret has another value now than the one that a server has just turned down.
    pub async fn rotated(&self, turned_down: &HeaderValue) -> bool {
        let Some(credentials) = &self.host.credentials else { return false };
        let now = self.credential.since(Instant::now(), async |_| self.read(credentials).await).await;
        now.is_ok_and(|credential| credential.value != turned_down)
    }

    async fn read(&self, credentials: &Credentials) -> Result<Credential, ReadError> {
        let Credentials { secret, key, prefix, header: _ } = credentials;
        let found = (self.outside.read)(Holder::Secret(secret.clone())).await?;
        let plugin = &self.outside.plugin;
        if !self.is_named(&found) {
            return Err(ReadError::Refused(format!(
                "its annotation {CREDENTIALS_FOR} does not name the plugin {plugin}; add it there if the Secret is meant for it"
            )));
        }
        let hosts = listed(&found, secrets::ALLOWED_HOSTS).map(|host| {
            let why = |error| ReadError::Refused(format!("its annotation {} has {host:?}, which {error}", secrets::ALLOWED_HOSTS));
            host.parse().map_err(why)
        });
        let hosts = hosts.collect::<Result<_, _>>()?;
        let value = found.data.get(key).ok_or_else(|| ReadError::Refused(format!("it has no key {key:?}")))?;
        // Whoever made the Secret from a file or by `echo` has a line end in it.
        let text = [prefix.as_bytes(), value.trim_ascii()].concat();
        let mut value = HeaderValue::from_bytes(&text).map_err(|_| {
            ReadError::Refused(format!("its key {key:?} holds what no header can: more than one line, or control characters"))
        })?;
        value.set_sensitive(true);
        Ok(Credential { value, hosts })
    }

    fn without(&self, what: &str, holder: &str, error: &ReadError) -> String {
        format!("denied a request to {}: {what} in the {holder} cannot be used: {error}", self.host.pattern)
    }
}

fn ca_holder(ca: &Ca) -> String {
    match &ca.holder {
        Holder::ConfigMap(name) => format!("ConfigMap {name:?}"),
        Holder::Secret(name) => format!("Secret {name:?}"),
    }
}

/// The words of an annotation that is a list.
fn listed<'f>(found: &'f Found, annotation: &str) -> impl Iterator<Item = &'f str> {
    let text = found.annotations.get(annotation).map_or("", String::as_str);
    text.split(|c: char| c == ',' || c.is_whitespace()).filter(|word| !word.is_empty())
}

/// The certificates in PEM; anything else beside them is passed over, a private key too.
fn roots(pem: &[u8]) -> Result<RootCertStore, ReadError> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem) {
        let certificate = certificate.map_err(|_| ReadError::Refused("it is no PEM".into()))?;
        roots.add(certificate).map_err(|error| ReadError::Refused(format!("a certificate in it cannot be used: {error}")))?;
    }
    if roots.is_empty() { Err(ReadError::Refused("it has no certificate in PEM".into())) } else { Ok(roots) }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        sync::{Mutex, PoisonError},
    };

    use futures::FutureExt;

    use super::*;
    use crate::{
        package::Config,
        plugin::capability::http::{client::tests::client, kept::FRESH},
    };

    type Shelf = Arc<Mutex<BTreeMap<&'static str, Found>>>;

    fn found(annotations: &[(&str, &str)], data: &[(&str, &str)]) -> Found {
        let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        Found {
            annotations: annotations.iter().map(owned).collect(),
            data: data.iter().map(owned).map(|(key, value)| (key, value.into())).collect(),
        }
    }

    fn route(shelf: &Shelf, yaml: &str) -> Route {
        let shelf = shelf.clone();
        let read: Read = Arc::new(move |holder| {
            let (Holder::ConfigMap(name) | Holder::Secret(name)) = holder;
            let found = shelf.lock().unwrap_or_else(PoisonError::into_inner).get(name.as_str()).cloned();
            futures::future::ready(found.ok_or_else(|| ReadError::Refused("it is not there".into()))).boxed()
        });
        let config = Config::parse(format!("allowedHosts: [{yaml}]").as_bytes()).expect("valid");
        let web = Arc::new(client());
        Route::new(config.allowed_hosts[0].clone(), Outside { plugin: "mailer".into(), web, read })
    }

    fn place() -> Origin {
        Origin::of_url("https://mail.corp").expect("valid")
    }

    const YAML: &str = "{url: 'https://mail.corp', credentials: {secret: s}}";
    const BOTH: &[(&str, &str)] = &[(CREDENTIALS_FOR, "other, mailer"), (secrets::ALLOWED_HOSTS, "https://mail.corp https://*.b.corp")];

    #[tokio::test]
    async fn a_secret_is_used_only_if_it_names_the_plugin_and_the_host_itself() {
        let shelf = Shelf::default();
        for (secret, words) in [
            (None, "it is not there"),
            (Some(found(&[], &[("token", "t")])), "does not name the plugin mailer"),
            (Some(found(&[(CREDENTIALS_FOR, "mailer2")], &[("token", "t")])), "does not name the plugin mailer"),
            (Some(found(&[(CREDENTIALS_FOR, "mailer")], &[("token", "t")])), "does not name https://mail.corp:443"),
            (Some(found(&[BOTH[0], (secrets::ALLOWED_HOSTS, "http://mail.corp")], &[("token", "t")])), "does not name https://mail.corp"),
            (Some(found(&[BOTH[0], (secrets::ALLOWED_HOSTS, "mail.corp")], &[("token", "t")])), "\"mail.corp\", which has to start"),
            (Some(found(BOTH, &[("other", "t")])), "no key \"token\""),
            (Some(found(BOTH, &[("token", "a\nb")])), "holds what no header can"),
        ] {
            shelf.lock().expect("no panic").clear();
            shelf.lock().expect("no panic").extend(secret.map(|secret| ("s", secret)));
            let sentence = route(&shelf, YAML).credential(&place()).await.expect_err(words);
            assert!(sentence.contains(words) && sentence.contains("Secret \"s\"") && !sentence.contains("a\nb"), "{sentence}");
        }
        shelf.lock().expect("no panic").insert("s", found(BOTH, &[("token", " t0ken\n")]));
        let (name, value) = route(&shelf, YAML).credential(&place()).await.expect("allowed").expect("a header");
        assert_eq!((name.as_str(), value.as_bytes(), value.is_sensitive()), ("authorization", &b"Bearer t0ken"[..], true));
        assert_eq!(route(&shelf, "'https://mail.corp'").credential(&place()).await, Ok(None));
    }

    #[tokio::test(start_paused = true)]
    async fn a_rotated_secret_is_used_after_a_while_and_at_once_where_the_old_one_was_turned_down() {
        let shelf = Shelf::default();
        let put = |token| drop(shelf.lock().expect("no panic").insert("s", found(BOTH, &[("token", token)])));
        put("old");
        let route = route(&shelf, YAML);
        let value = async || route.credential(&place()).await.expect("allowed").expect("a header").1;
        let old = value().await;
        put("new");
        assert_eq!(value().await, old);
        tokio::time::advance(FRESH).await;
        assert_eq!(value().await, "Bearer new");
        put("newer");
        assert!(route.rotated(&HeaderValue::from_static("Bearer new")).await);
        assert_eq!(value().await, "Bearer newer");
        assert!(!route.rotated(&HeaderValue::from_static("Bearer newer")).await, "it was turned down for another reason");
    }

    fn pem() -> String {
        let key = rcgen::KeyPair::generate().expect("a key");
        rcgen::CertificateParams::new(["ca".to_owned()]).expect("valid").self_signed(&key).expect("signed").pem()
    }

    #[tokio::test]
    async fn credentials_are_not_sent_to_whom_only_plugin_yaml_vouches_for() {
        let (shelf, pem) = (Shelf::default(), pem());
        let put = |name, annotations| drop(shelf.lock().expect("no panic").insert(name, found(annotations, &[("ca.crt", &pem)])));
        let with = |ca: &str| format!("{{url: 'https://mail.corp', ca: {{{ca}}}, credentials: {{secret: s}}}}");
        put("c", &[]);
        put("s", BOTH);
        for ca in ["configMap: c", "secret: c"] {
            let sentence = route(&shelf, &with(ca)).client().await.err().expect("refused");
            assert!(sentence.contains("does not name the plugin mailer") && sentence.contains("into the Secret \"s\""), "{sentence}");
        }
        assert!(route(&shelf, &with("secret: s")).client().await.is_ok());
        assert!(route(&shelf, "{url: 'https://mail.corp', ca: {configMap: c}}").client().await.is_ok(), "without credentials");
        put("c", &[(CREDENTIALS_FOR, "mailer")]);
        assert!(route(&shelf, &with("configMap: c")).client().await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_ca_has_a_client_of_its_own_that_lasts_as_long_as_its_certificates() {
        let shelf = Shelf::default();
        let put = |pem: &str| drop(shelf.lock().expect("no panic").insert("c", found(&[], &[("ca.crt", pem)])));
        let yaml = "{url: 'https://mail.corp', ca: {configMap: c}}";
        for (text, words) in
            [("", "no certificate"), ("x", "no certificate"), ("-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----", "PEM")]
        {
            put(text);
            let sentence = route(&shelf, yaml).client().await.err().expect(words);
            assert!(sentence.contains(words) && sentence.contains("ConfigMap \"c\""), "{sentence}");
        }
        put(&pem());
        let route = route(&shelf, yaml);
        let client = async || route.client().await.expect("trusts");
        let first = client().await;
        assert!(!Arc::ptr_eq(&first, &route.outside.web));
        tokio::time::advance(FRESH).await;
        assert!(Arc::ptr_eq(&first, &client().await), "the same certificates keep their connections");
        put(&pem());
        tokio::time::advance(FRESH).await;
        assert!(!Arc::ptr_eq(&first, &client().await), "others do not");
    }
}
