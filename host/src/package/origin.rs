//! Where a plugin may send HTTP requests to: scheme, host and port, matched exactly.

use std::{fmt, net::Ipv6Addr, str::FromStr};

/// `scheme://host[:port]` of an outgoing request. Two are the same place exactly if they are equal: there are no wildcards.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AllowedHost {
    tls: bool,
    host: String,
    port: u16,
}

impl AllowedHost {
    /// Of the URL of a request, which may have a path. Userinfo is refused: it is where `http://good@evil` hides.
    pub fn of_url(url: &str) -> Result<Self, InvalidHost> {
        let (scheme, rest) = url.split_once("://").ok_or(InvalidHost::NoScheme)?;
        let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
        Self::new(scheme, &rest[..end])
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

impl FromStr for AllowedHost {
    type Err = InvalidHost;

    /// As in `allowedHosts`: nothing after the port.
    fn from_str(text: &str) -> Result<Self, InvalidHost> {
        let (scheme, authority) = text.split_once("://").ok_or(InvalidHost::NoScheme)?;
        if authority.contains(['/', '?', '#']) {
            return Err(InvalidHost::Path);
        }
        Self::new(scheme, authority)
    }
}

impl fmt::Display for AllowedHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}:{}", self.scheme(), self.host, self.port)
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
    /// `*.example.com`
    #[error("must not have a wildcard: hosts are matched exactly")]
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

    #[test]
    fn default_ports_and_letter_case_do_not_matter() {
        let parse = |text: &str| text.parse::<AllowedHost>().expect(text);
        assert_eq!(parse("HTTP://Mail.Demo"), parse("http://mail.demo:80"));
        assert_eq!(parse("https://a"), parse("https://a:443"));
        assert_ne!(parse("https://a"), parse("http://a:443"));
        assert_eq!(parse("http://[0:0::1]:8080").to_string(), "http://[::1]:8080");
        assert_eq!(AllowedHost::of_url("http://mail.demo/send?x=1#y"), Ok(parse("http://mail.demo")));
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
            assert_eq!(text.parse::<AllowedHost>(), Err(error), "{text}");
        }
        assert_eq!(AllowedHost::of_url("http://good@evil/x"), Err(InvalidHost::Userinfo));
    }

    proptest! {
        #[test]
        fn any_text_parses_or_not_and_what_parses_survives_its_own_text(text in "(https?://)?[a-zA-Z0-9.:@/\\[\\]*é-]{0,40}") {
            if let Ok(host) = text.parse::<AllowedHost>() {
                prop_assert_eq!(host.to_string().parse::<AllowedHost>(), Ok(host.clone()));
                prop_assert_eq!(AllowedHost::of_url(&text), Ok(host));
            }
        }

        #[test]
        fn no_text_panics(text in ".{0,60}") {
            let _ = (text.parse::<AllowedHost>(), AllowedHost::of_url(&text));
        }
    }
}
