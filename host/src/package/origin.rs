//! Where HTTP requests go: an [`Origin`] is one place, a [`HostPattern`] the places that a claim asks for or a grant gives.

use std::{fmt, net::Ipv6Addr, str::FromStr};

/// `scheme://host[:port]` of an outgoing request. Two are the same place exactly if they are equal.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Origin {
    tls: bool,
    host: String,
    port: u16,
}

/// An [`Origin`], or all whose name has exactly one more label: `https://*.example.com` covers `https://a.example.com` and neither
/// `https://example.com` nor `https://a.b.example.com`, as in certificates.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostPattern {
    wildcard: bool,
    /// What comes after `*.`, where there is one.
    origin: Origin,
}

impl Origin {
    /// Of the URL of a request, which may have a path. Userinfo is refused: it is where `http://good@evil` hides.
    pub fn of_url(url: &str) -> Result<Self, InvalidHost> {
        let (scheme, rest) = url.split_once("://").ok_or(InvalidHost::NoScheme)?;
        Self::new(scheme, authority(rest))
    }

    /// From a scheme and an authority (`host` or `host:port`).
    pub fn new(scheme: &str, authority: &str) -> Result<Self, InvalidHost> {
        let tls = match scheme.to_ascii_lowercase().as_str() {
            "http" => false,
            "https" => true,
            _ => return Err(InvalidHost::NoScheme),
        };
        if authority.contains('@') {
            return Err(InvalidHost::Userinfo);
        }
        let (host, port) = split_port(authority)?;
        let port = match port {
            Some(text) if text.bytes().all(|b| b.is_ascii_digit()) => {
                text.parse().ok().filter(|port| *port != 0).ok_or(InvalidHost::Port)?
            }
            Some(_) => return Err(InvalidHost::Port),
            None if tls => 443,
            None => 80,
        };
        Ok(Self { tls, host: check_host(host)?, port })
    }

    /// `http` or `https`.
    pub fn scheme(&self) -> &'static str {
        if self.tls { "https" } else { "http" }
    }

    /// In lower case; an IPv6 address in brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port, the scheme's own where none was given.
    pub fn port(&self) -> u16 {
        self.port
    }
}

impl HostPattern {
    /// Of a URL or a pattern with a path, as a claim may have it.
    pub fn of_url(url: &str) -> Result<Self, InvalidHost> {
        let (scheme, rest) = url.split_once("://").ok_or(InvalidHost::NoScheme)?;
        let authority = authority(rest);
        let Some(rest) = authority.strip_prefix("*.") else {
            return Ok(Self { wildcard: false, origin: Origin::new(scheme, authority)? });
        };
        let origin = Origin::new(scheme, rest)?;
        // Two labels at least, as `*.com` is no grant; and no address, whose parts are no labels.
        let labels: Vec<_> = origin.host.split('.').collect();
        let is_name = labels.last().is_some_and(|last| !last.bytes().all(|byte| byte.is_ascii_digit()));
        if labels.len() < 2 || !is_name { Err(InvalidHost::Wildcard) } else { Ok(Self { wildcard: true, origin }) }
    }

    /// Whether requests go over TLS.
    pub fn is_tls(&self) -> bool {
        self.origin.tls
    }

    /// Whether it names one place.
    pub fn is_exact(&self) -> bool {
        !self.wildcard
    }

    /// Whether a request to this place is within it.
    pub fn covers(&self, place: &Origin) -> bool {
        if !self.wildcard {
            return self.origin == *place;
        }
        let Origin { tls, host, port } = &self.origin;
        let label = place.host.strip_suffix(host.as_str()).and_then(|rest| rest.strip_suffix('.'));
        (*tls, *port) == (place.tls, place.port) && label.is_some_and(|label| !label.is_empty() && !label.contains('.'))
    }

    /// Whether everything that the other one covers is within it.
    pub fn includes(&self, other: &Self) -> bool {
        self == other || (other.is_exact() && self.covers(&other.origin))
    }
}

/// What comes before a path, a query or a fragment.
fn authority(rest: &str) -> &str {
    &rest[..rest.find(['/', '?', '#']).unwrap_or(rest.len())]
}

/// Splits `host[:port]`, where the host may be an IPv6 address in brackets.
fn split_port(authority: &str) -> Result<(&str, Option<&str>), InvalidHost> {
    let after_brackets = match (authority.starts_with('['), authority.rfind(']')) {
        (true, Some(end)) => end + 1,
        (false, None) => 0,
        _ => return Err(InvalidHost::Name),
    };
    match authority[after_brackets..].find(':').map(|at| after_brackets + at) {
        Some(colon) => Ok((&authority[..colon], Some(&authority[colon + 1..]))),
        None => Ok((authority, None)),
    }
}

fn check_host(host: &str) -> Result<String, InvalidHost> {
    if let Some(address) = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        return address.parse::<Ipv6Addr>().map(|address| format!("[{address}]")).map_err(|_| InvalidHost::Name);
    }
    if host.contains('*') {
        return Err(InvalidHost::Wildcard);
    }
    let label = |label: &str| !label.is_empty() && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
    if host.len() <= 253 && host.split('.').all(label) { Ok(host.to_ascii_lowercase()) } else { Err(InvalidHost::Name) }
}

impl FromStr for HostPattern {
    type Err = InvalidHost;

    /// As in `allowedHosts`: nothing after the port.
    fn from_str(text: &str) -> Result<Self, InvalidHost> {
        let (_, authority) = text.split_once("://").ok_or(InvalidHost::NoScheme)?;
        if authority.contains(['/', '?', '#']) {
            return Err(InvalidHost::Path);
        }
        Self::of_url(text)
    }
}

impl From<Origin> for HostPattern {
    fn from(origin: Origin) -> Self {
        Self { wildcard: false, origin }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}:{}", self.scheme(), self.host, self.port)
    }
}

impl fmt::Display for HostPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Origin { host, port, .. } = &self.origin;
        write!(f, "{}://{}{host}:{port}", self.origin.scheme(), if self.wildcard { "*." } else { "" })
    }
}

/// Why a text names no host, to be read after the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidHost {
    /// Neither of the two schemes.
    #[error("has to start with http:// or https://")]
    NoScheme,
    /// `user:password@`
    #[error("must not have a user or password in it")]
    Userinfo,
    /// Something after host and port.
    #[error("must end after the host or port: a grant is for a whole host, not for a path")]
    Path,
    /// `a*.example.com`, `*.com`, `*.0.0.1`, or any in the URL of a request.
    #[error(
        "has a wildcard in the wrong place: one is allowed, as the first label before a name of at least two, as in https://*.example.com"
    )]
    Wildcard,
    /// Not a name or address.
    #[error("has no valid host name (ASCII, without a trailing dot) or address")]
    Name,
    /// Not from 1 to 65535.
    #[error("has no valid port")]
    Port,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pattern(text: &str) -> HostPattern {
        text.parse().expect(text)
    }

    fn origin(url: &str) -> Origin {
        Origin::of_url(url).expect(url)
    }

    #[test]
    fn default_ports_and_letter_case_do_not_matter() {
        assert_eq!(pattern("HTTP://Mail.Demo"), pattern("http://mail.demo:80"));
        assert_eq!(pattern("https://a"), pattern("https://a:443"));
        assert_ne!(pattern("https://a"), pattern("http://a:443"));
        assert_eq!(pattern("http://[0:0::1]:8080").to_string(), "http://[::1]:8080");
        assert_eq!(origin("http://mail.demo/send?x=1#y"), origin("http://mail.demo"));
        assert_eq!(HostPattern::of_url("https://*.Example.com/x"), Ok(pattern("https://*.example.com:443")));
    }

    #[test]
    fn what_is_no_plain_origin_is_refused_and_says_why() {
        for (text, error) in [
            ("mail.demo", InvalidHost::NoScheme),
            ("ftp://a", InvalidHost::NoScheme),
            ("http://good@evil", InvalidHost::Userinfo),
            ("http://a/", InvalidHost::Path),
            ("http://a?b", InvalidHost::Path),
            ("http://*.a", InvalidHost::Wildcard),
            ("http://*", InvalidHost::Wildcard),
            ("http://*.0.0.1", InvalidHost::Wildcard),
            ("http://a.*.b", InvalidHost::Wildcard),
            ("http://a*.b.c", InvalidHost::Wildcard),
            ("http://*.*.b.c", InvalidHost::Wildcard),
            ("http://*.[::1]", InvalidHost::Wildcard),
            ("http://", InvalidHost::Name),
            ("http://a..b", InvalidHost::Name),
            ("http://a.", InvalidHost::Name),
            ("http://a b", InvalidHost::Name),
            ("http://é", InvalidHost::Name),
            ("http://::1", InvalidHost::Port),
            ("http://[::1", InvalidHost::Name),
            ("http://a:", InvalidHost::Port),
            ("http://a:0", InvalidHost::Port),
            ("http://a:65536", InvalidHost::Port),
            ("http://a:+80", InvalidHost::Port),
            ("http://a:80:81", InvalidHost::Port),
            ("http://[::1]x", InvalidHost::Name),
        ] {
            assert_eq!(text.parse::<HostPattern>(), Err(error), "{text}");
        }
        assert_eq!(Origin::of_url("http://good@evil/x"), Err(InvalidHost::Userinfo));
        assert_eq!(Origin::of_url("https://*.example.com/x"), Err(InvalidHost::Wildcard), "a request goes to one place");
    }

    #[test]
    fn a_wildcard_stands_for_exactly_one_label_of_the_same_scheme_and_port() {
        let grant = pattern("https://*.example.com:8443");
        assert!(grant.covers(&origin("https://A.example.com:8443/x")));
        for url in [
            "https://example.com:8443",
            "https://a.b.example.com:8443",
            "https://aexample.com:8443",
            "https://a.example.com",
            "http://a.example.com:8443",
            "https://a.example.com.evil.org:8443",
        ] {
            assert!(!grant.covers(&origin(url)), "{url}");
        }
        assert!(grant.includes(&grant) && grant.includes(&pattern("https://a.example.com:8443")));
        assert!(!pattern("https://a.example.com:8443").includes(&grant));
        assert!(!grant.includes(&pattern("https://*.a.example.com:8443")));
    }

    proptest! {
        #[test]
        fn any_text_parses_or_not_and_what_parses_survives_its_own_text(text in "(https?://)?[a-zA-Z0-9.:@/\\[\\]*é-]{0,40}") {
            if let Ok(host) = text.parse::<HostPattern>() {
                prop_assert_eq!(host.to_string().parse::<HostPattern>(), Ok(host.clone()));
                prop_assert_eq!(HostPattern::of_url(&text), Ok(host));
            }
        }

        #[test]
        fn what_a_pattern_includes_it_covers(label in "[a-z]{1,3}", name in "[a-z]{1,3}(\\.[a-z]{1,3}){0,2}", other in "(\\*\\.)?[a-z]{1,3}(\\.[a-z]{1,3}){1,3}") {
            let (Ok(wide), Ok(narrow)) = (format!("https://*.{name}").parse::<HostPattern>(), format!("https://{other}").parse::<HostPattern>()) else {
                return Ok(());
            };
            let place = origin(&format!("https://{}", other.replace('*', &label)));
            prop_assert!(narrow.covers(&place));
            prop_assert!(!wide.includes(&narrow) || wide.covers(&place), "{} {} {}", wide, narrow, place);
        }

        #[test]
        fn no_text_panics(text in ".{0,60}") {
            let _ = (text.parse::<HostPattern>(), Origin::of_url(&text));
        }
    }
}
