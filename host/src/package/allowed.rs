//! An entry of `allowedHosts`: where requests may go, whom to trust there, and which credentials the host adds.

use http::{HeaderName, header};
use serde_json::{Map, Value};

use super::{
    HostPattern, Refusal,
    field::{expected, invalid, mapping, name_of, unknown},
};

/// Most entries of `allowedHosts`: beyond, a wildcard says it better.
const MOST: usize = 64;

/// The default key of a CA's certificates.
const CA_KEY: &str = "ca.crt";

/// The default key of credentials.
const CREDENTIALS_KEY: &str = "token";

/// A grant for HTTP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowedHost {
    /// Where to.
    pub pattern: HostPattern,
    /// The authority to trust there, and no other; none for those of the web.
    pub ca: Option<Ca>,
    /// What the host adds to each request.
    pub credentials: Option<Credentials>,
}

/// The certificates of an authority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ca {
    /// What they are in.
    pub holder: Holder,
    /// Under which key, in PEM.
    pub key: String,
}

/// An object in the host's namespace.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Holder {
    /// A ConfigMap by name.
    ConfigMap(String),
    /// A Secret by name.
    Secret(String),
}

/// A header that the host sets and the guest never sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Name of the Secret in the host's namespace.
    pub secret: String,
    /// Key of the value.
    pub key: String,
    /// The header.
    pub header: HeaderName,
    /// What comes before the value in the header.
    pub prefix: String,
}

/// Everything under `allowedHosts`.
pub fn all(value: Value) -> Result<Vec<AllowedHost>, Refusal> {
    let items = match value {
        Value::Null => Vec::new(),
        Value::Array(items) if items.len() > MOST => return Err(invalid(&format!("has more than {MOST} entries in \"allowedHosts\""))),
        Value::Array(items) => items,
        other => return Err(expected("allowedHosts", "a list such as [\"https://mail.example.com\"]", &other)),
    };
    let hosts = items.into_iter().map(one).collect::<Result<Vec<_>, _>>()?;
    for (at, host) in hosts.iter().enumerate() {
        if hosts[..at].iter().any(|before| before.pattern == host.pattern && before != host) {
            return Err(invalid(&format!("allows the host {} twice, in different ways", host.pattern)));
        }
    }
    Ok(hosts)
}

fn one(item: Value) -> Result<AllowedHost, Refusal> {
    match item {
        Value::String(text) => Ok(AllowedHost { pattern: pattern(&text)?, ca: None, credentials: None }),
        Value::Object(fields) => entry(fields),
        other => Err(expected("allowedHosts", "a list of texts, or of mappings with a \"url\"", &other)),
    }
}

fn pattern(text: &str) -> Result<HostPattern, Refusal> {
    text.parse().map_err(|error| invalid(&format!("allows the host {:?}, which {error}", shown(text))))
}

fn shown(text: &str) -> &str {
    &text[..text.floor_char_boundary(100)]
}

fn entry(fields: Map<String, Value>) -> Result<AllowedHost, Refusal> {
    let (mut url, mut ca, mut credentials) = (None, None, None);
    for (key, value) in fields {
        match key.as_str() {
            "url" => url = Some(pattern(value.as_str().ok_or_else(|| expected("allowedHosts.url", "a text", &value))?)?),
            "ca" => ca = Some(self::ca(mapping("allowedHosts.ca", value)?)?),
            "credentials" => credentials = Some(self::credentials(mapping("allowedHosts.credentials", value)?)?),
            _ => return Err(unknown(&key, "allowedHosts.", &["url", "ca", "credentials"])),
        }
    }
    let pattern = url.ok_or_else(|| invalid("has an entry in \"allowedHosts\" without a \"url\""))?;
    let clear = |what: &str| invalid(&format!("has {what} for {pattern}, which only https:// can have"));
    match (&ca, &credentials) {
        _ if pattern.is_tls() => Ok(AllowedHost { pattern, ca, credentials }),
        (Some(_), _) => Err(clear("a \"ca\"")),
        (None, Some(_)) => Err(clear("\"credentials\"")),
        (None, None) => Ok(AllowedHost { pattern, ca, credentials }),
    }
}

fn ca(fields: Map<String, Value>) -> Result<Ca, Refusal> {
    let (mut holders, mut of) = (Vec::new(), CA_KEY.to_owned());
    for (key, value) in fields {
        match key.as_str() {
            "configMap" => holders.push(Holder::ConfigMap(name_of("allowedHosts.ca.configMap", "ConfigMap", &value)?)),
            "secret" => holders.push(Holder::Secret(name_of("allowedHosts.ca.secret", "Secret", &value)?)),
            "key" => of = data_key("allowedHosts.ca.key", &value)?,
            _ => return Err(unknown(&key, "allowedHosts.ca.", &["configMap", "secret", "key"])),
        }
    }
    match (holders.pop(), holders.is_empty()) {
        (Some(holder), true) => Ok(Ca { holder, key: of }),
        _ => Err(invalid("has an \"allowedHosts.ca\" that does not name one \"configMap\" or one \"secret\"")),
    }
}

fn credentials(fields: Map<String, Value>) -> Result<Credentials, Refusal> {
    let (mut secret, mut of, mut header, mut prefix) = (None, CREDENTIALS_KEY.to_owned(), header::AUTHORIZATION, None);
    for (key, value) in fields {
        match key.as_str() {
            "secret" => secret = Some(name_of("allowedHosts.credentials.secret", "Secret", &value)?),
            "key" => of = data_key("allowedHosts.credentials.key", &value)?,
            "header" => header = self::header(&value)?,
            "prefix" => prefix = Some(self::prefix(&value)?),
            _ => return Err(unknown(&key, "allowedHosts.credentials.", &["secret", "key", "header", "prefix"])),
        }
    }
    let secret = secret.ok_or_else(|| invalid("has \"allowedHosts.credentials\" without a \"secret\""))?;
    let usual = if header == header::AUTHORIZATION { "Bearer " } else { "" };
    Ok(Credentials { secret, key: of, prefix: prefix.unwrap_or_else(|| usual.to_owned()), header })
}

/// As Kubernetes allows keys of a ConfigMap or Secret.
fn data_key(key: &str, value: &Value) -> Result<String, Refusal> {
    let valid = |text: &&str| {
        (1..=253).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.'))
    };
    value.as_str().filter(valid).map(str::to_owned).ok_or_else(|| expected(key, "a key of its data", value))
}

/// Not one that says where a request goes or where it ends: that is the client's.
fn header(value: &Value) -> Result<HeaderName, Refusal> {
    const CLIENTS: [HeaderName; 9] = [
        header::HOST,
        header::CONTENT_LENGTH,
        header::TRANSFER_ENCODING,
        header::CONNECTION,
        header::TE,
        header::TRAILER,
        header::UPGRADE,
        header::EXPECT,
        HeaderName::from_static("keep-alive"),
    ];
    let name = value.as_str().and_then(|text| text.parse::<HeaderName>().ok());
    let wanted = || expected("allowedHosts.credentials.header", "the name of a header such as \"Authorization\" or \"X-Api-Key\"", value);
    name.filter(|name| !CLIENTS.contains(name)).ok_or_else(wanted)
}

fn prefix(value: &Value) -> Result<String, Refusal> {
    let valid = |text: &&str| text.len() <= 64 && text.bytes().all(|byte| (0x20..0x7f).contains(&byte));
    value
        .as_str()
        .filter(valid)
        .map(str::to_owned)
        .ok_or_else(|| expected("allowedHosts.credentials.prefix", "a text such as \"Bearer \", of at most 64 printable characters", value))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_text_is_a_plain_grant_and_a_mapping_may_name_ca_and_credentials() {
        let hosts = all(json!([
            "http://mail.demo",
            { "url": "https://*.example.com:8443" },
            { "url": "https://mail.corp", "ca": { "configMap": "corp" }, "credentials": { "secret": "mail" } },
            { "url": "https://b.corp", "ca": { "secret": "s", "key": "root.pem" }, "credentials": { "secret": "b", "key": "k", "header": "X-Api-Key" } },
            { "url": "https://c.corp", "credentials": { "secret": "c", "prefix": "Basic " } },
        ]))
        .expect("valid");
        assert_eq!((&hosts[0].ca, &hosts[0].credentials, hosts[1].pattern.is_exact()), (&None, &None, false));
        assert_eq!(hosts[2].ca, Some(Ca { holder: Holder::ConfigMap("corp".into()), key: "ca.crt".into() }));
        let credentials = |at: usize| hosts[at].credentials.clone().expect("credentials");
        let Credentials { secret, key, header, prefix } = credentials(2);
        assert_eq!((secret.as_str(), key.as_str(), header.as_str(), prefix.as_str()), ("mail", "token", "authorization", "Bearer "));
        assert_eq!(hosts[3].ca, Some(Ca { holder: Holder::Secret("s".into()), key: "root.pem".into() }));
        assert_eq!((credentials(3).header.as_str(), credentials(3).prefix.as_str()), ("x-api-key", ""));
        assert_eq!(credentials(4).prefix, "Basic ");
    }

    #[test]
    fn what_is_wrong_is_refused_with_its_key() {
        let host = |more: Value| {
            let mut entry = json!({ "url": "https://a.b" });
            entry.as_object_mut().expect("a mapping").extend(more.as_object().expect("a mapping").clone());
            json!([entry])
        };
        for (value, words) in [
            (json!("http://a"), "a list such as"),
            (json!([7]), "a list of texts, or of mappings"),
            (json!(["http://a/b"]), "\"http://a/b\", which must end after the host"),
            (json!(["https://*.com"]), "has a wildcard in the wrong place"),
            (json!([{ "ca": { "secret": "a" } }]), "without a \"url\""),
            (json!([{ "urls": "https://a" }]), "did you mean \"allowedHosts.url\"?"),
            (json!(["https://a", { "url": "https://a:443", "ca": { "secret": "a" } }]), "https://a:443 twice"),
            (json!(vec!["https://a"; 65]), "more than 64 entries"),
            (json!([{ "url": "http://a", "credentials": { "secret": "a" } }]), "\"credentials\" for http://a:80, which only https://"),
            (json!([{ "url": "http://a", "ca": { "secret": "a" } }]), "a \"ca\" for http://a:80, which only https://"),
            (host(json!({ "ca": {} })), "does not name one"),
            (host(json!({ "ca": { "secret": "a", "configMap": "b" } })), "does not name one"),
            (host(json!({ "ca": { "secret": "kube-system/a" } })), "the name of a Secret in the host's namespace"),
            (host(json!({ "ca": { "configMap": "a", "keys": "x" } })), "did you mean \"allowedHosts.ca.key\"?"),
            (host(json!({ "ca": { "configMap": "a", "key": "../x" } })), "a key of its data"),
            (host(json!({ "credentials": {} })), "without a \"secret\""),
            (host(json!({ "credentials": { "secret": "a", "header": "Host" } })), "the name of a header"),
            (host(json!({ "credentials": { "secret": "a", "header": "a b" } })), "the name of a header"),
            (host(json!({ "credentials": { "secret": "a", "prefix": "a\r\nb" } })), "printable"),
            (host(json!({ "credentials": { "secrets": "a" } })), "did you mean \"allowedHosts.credentials.secret\"?"),
        ] {
            let refusal = all(value.clone()).expect_err(words);
            assert!(refusal.message.contains(words), "{value}: {refusal}");
        }
    }
}
