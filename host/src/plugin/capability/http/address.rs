//! Where a name leads: looked up without holding up others, and never to what guests must not reach.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs},
};

use http::Uri;

use super::client::{DialError, Resolve};
use crate::plugin::shares::Part;

/// The system's resolver, or that of a test. It blocks.
pub type LookUp = fn(&str, u16) -> io::Result<Vec<SocketAddr>>;

/// Asks the system's resolver.
pub fn of_system(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    (host, port).to_socket_addrs().map(Iterator::collect)
}

/// The addresses to connect to.
pub async fn addresses(uri: &Uri, resolve: &[Resolve], look_up: LookUp, part: &Part) -> Result<Vec<SocketAddr>, DialError> {
    let host = uri.host().unwrap_or_default().to_ascii_lowercase();
    let port = uri.port_u16().unwrap_or(if uri.scheme_str() == Some("https") { 443 } else { 80 });
    if let Some(address) = resolve.iter().find_map(|entry| entry.of(&host, port)) {
        return Ok(vec![address]);
    }
    if let Ok(address) = host.trim_start_matches('[').trim_end_matches(']').parse() {
        // The grant matched it literally, so somebody wrote this very address down.
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let place = part.take(1).await;
    let name = host.clone();
    // The place is held by the thread: it goes on when nobody waits any more, and so many threads and no more may be stuck like this.
    let looked = tokio::task::spawn_blocking(move || {
        let _place = place;
        look_up(&name, port)
    });
    let found = looked.await.map_err(io::Error::other).flatten().map_err(DialError::NoName)?;
    check(&host, port, found)
}

/// Keeps the addresses that a guest may reach; an error where there is none.
fn check(host: &str, port: u16, found: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, DialError> {
    let (refused, open): (Vec<_>, Vec<_>) = found.into_iter().partition(|address| prohibited(address.ip()).is_some());
    match refused.first() {
        Some(first) if open.is_empty() => {
            let why = prohibited(first.ip()).unwrap_or_default();
            Err(DialError::Prohibited { host: host.to_owned(), port, address: first.ip(), why })
        }
        None if open.is_empty() => Err(DialError::NoName(io::ErrorKind::NotFound.into())),
        _ => Ok(open),
    }
}

/// Why no name that a guest uses may lead there. Private networks are open: services of the cluster live in them.
fn prohibited(address: IpAddr) -> Option<&'static str> {
    match address.to_canonical() {
        IpAddr::V4(v4) => prohibited_v4(v4),
        IpAddr::V6(v6) => prohibited_v6(v6).or_else(|| carried(v6)),
    }
}

const MACHINE: &str = "an address of this machine";
const NO_HOST: &str = "no address of a host";
const NOT_ONE: &str = "no address of one host";
const LINK: &str = "a link-local address, where clouds keep credentials";
const METADATA: &str = "the metadata service of a cloud";

fn prohibited_v4(v4: Ipv4Addr) -> Option<&'static str> {
    match v4.octets() {
        _ if v4.is_loopback() => Some(MACHINE),
        [0, ..] => Some(NO_HOST),
        _ if v4.is_link_local() => Some(LINK),
        // Alibaba, Azure, Oracle.
        [100, 100, 100, 200] | [168, 63, 129, 16] | [192, 0, 0, 192] => Some(METADATA),
        _ if v4.is_multicast() || v4.is_broadcast() => Some(NOT_ONE),
        _ => None,
    }
}

fn prohibited_v6(v6: Ipv6Addr) -> Option<&'static str> {
    match v6.segments() {
        _ if v6.is_loopback() => Some(MACHINE),
        _ if v6.is_unspecified() => Some(NO_HOST),
        _ if v6.is_unicast_link_local() => Some(LINK),
        // Amazon, also for its pods, Google, Scaleway.
        [0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254 | 0x23] | [0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254] | [0xfd00, 0x42, 0, 0, 0, 0, 0, 0x42] => {
            Some(METADATA)
        }
        _ if v6.is_multicast() => Some(NOT_ONE),
        _ => None,
    }
}

/// Judges the IPv4 address that an IPv6 one carries.
fn carried(v6: Ipv6Addr) -> Option<&'static str> {
    let octets = v6.octets();
    let at = |places: [usize; 4]| Ipv4Addr::from(places.map(|place| octets[place]));
    match v6.segments() {
        // NAT64, and what was once an IPv4-compatible address.
        [0x64, 0xff9b, 0, 0, 0, 0, ..] | [0, 0, 0, 0, 0, 0, ..] => prohibited_v4(at([12, 13, 14, 15])),
        // NAT64 of a site, which chooses a length from 48 bits upwards: <https://www.rfc-editor.org/rfc/rfc6052#section-2.2>
        [0x64, 0xff9b, 1, ..] => {
            let carried = [[6, 7, 9, 10], [7, 9, 10, 11], [9, 10, 11, 12], [12, 13, 14, 15]].map(at);
            let mut likely = carried.into_iter().filter(|v4| v4.octets()[0] != 0).peekable();
            if likely.peek().is_none() { Some(NO_HOST) } else { likely.find_map(prohibited_v4) }
        }
        // 6to4.
        [0x2002, ..] => prohibited_v4(at([2, 3, 4, 5])),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Condvar, Mutex},
        time::Duration,
    };

    use super::*;
    use crate::plugin::shares::Shares;

    fn part() -> Part {
        Shares::new(1, 1 << 20, 4).of("p").look_ups.clone()
    }

    #[test]
    fn names_must_not_lead_to_this_machine_or_to_metadata() {
        let of = |text: &str| prohibited(text.parse().expect(text));
        for address in [
            "127.0.0.1",
            "127.9.9.9",
            "0.0.0.0",
            "0.1.2.3",
            "169.254.169.254",
            "100.100.100.200",
            "224.0.0.1",
            "255.255.255.255",
            "::1",
            "::",
            "fe80::1",
            "fd00:ec2::254",
            "fd00:ec2::23",
            "fd20:ce::254",
            "fd00:42::42",
            "168.63.129.16",
            "192.0.0.192",
            "::ffff:168.63.129.16",
            "::127.0.0.1",
            "::169.254.169.254",
            "64:ff9b::7f00:1",
            "64:ff9b:1:a9fe:a9:fe00::",
            "64:ff9b:1:a9:fe:a9fe::",
            "64:ff9b:1::a9:fea9:fe00:0",
            "64:ff9b:1::a9fe:a9fe",
            "64:ff9b:1::",
            "2002:a9fe:a9fe::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "64:ff9b::a9fe:a9fe",
            "2002:7f00:1::",
        ] {
            assert!(of(address).is_some(), "{address}");
        }
        for address in [
            "10.0.0.1",
            "192.168.1.1",
            "172.16.0.1",
            "93.184.216.34",
            "2001:db8::1",
            "fd00::1",
            "fd20:ce::255",
            "64:ff9b::5db8:d822",
            "64:ff9b:1::5db8:d822",
            "64:ff9b:1:5db8:d8:2200::",
            "::93.184.216.34",
        ] {
            assert_eq!(of(address), None, "{address}");
        }
    }

    #[test]
    fn a_name_with_one_open_address_connects_to_that_one_only() {
        let of = |list: &[&str]| check("n", 80, list.iter().map(|ip| SocketAddr::new(ip.parse().expect("valid"), 80)).collect());
        assert_eq!(of(&["127.0.0.1", "10.0.0.1"]).expect("one is open"), ["10.0.0.1:80".parse().expect("valid")]);
        let denied = of(&["169.254.169.254"]).expect_err("all refused").to_string();
        assert!(denied.contains("--resolve n:80=169.254.169.254"), "{denied}");
        assert!(matches!(of(&[]), Err(DialError::NoName(_))));
    }

    #[tokio::test]
    async fn literal_addresses_and_resolve_entries_are_trusted_and_localhost_is_not() {
        let entry = ["a:80=127.0.0.1:9".parse().expect("valid")];
        let part = part();
        let of = async |uri: &'static str| addresses(&Uri::from_static(uri), &entry, of_system, &part).await;
        assert_eq!(of("http://A/x").await.expect("resolved"), ["127.0.0.1:9".parse().expect("valid")]);
        assert_eq!(of("http://127.0.0.1:8080/").await.expect("literal"), ["127.0.0.1:8080".parse().expect("valid")]);
        assert_eq!(of("https://[::1]/").await.expect("literal"), ["[::1]:443".parse().expect("valid")]);
        assert!(matches!(of("http://localhost/").await, Err(DialError::Prohibited { .. })));
    }

    /// How many look-ups have begun, and whether the server answers.
    static SERVER: Mutex<(u32, bool)> = Mutex::new((0, false));
    static ANSWERS: Condvar = Condvar::new();

    fn slow(_: &str, _: u16) -> io::Result<Vec<SocketAddr>> {
        let mut server = SERVER.lock().expect("no panic");
        server.0 += 1;
        drop(ANSWERS.wait_while(server, |(_, answers)| !*answers).expect("no panic"));
        Ok(vec![SocketAddr::new(IpAddr::from([10, 0, 0, 1]), 80)])
    }

    #[tokio::test]
    async fn look_ups_that_hang_hold_a_bounded_number_of_threads_even_when_nobody_waits_any_more() {
        let (part, uri) = (part(), Uri::from_static("http://slow.demo/"));
        for _ in 0..100 {
            let waiting = addresses(&uri, &[], slow, &part);
            assert!(tokio::time::timeout(Duration::from_millis(2), waiting).await.is_err());
        }
        let begun = std::mem::replace(&mut *SERVER.lock().expect("no panic"), (0, true)).0;
        ANSWERS.notify_all();
        assert_eq!(begun, crate::plugin::limits::LOOK_UPS / 4);
        assert_eq!(addresses(&uri, &[], slow, &part).await.expect("found").len(), 1);
    }
}
