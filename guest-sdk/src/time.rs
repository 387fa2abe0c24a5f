//! Points in time: RFC 3339 as Kubernetes writes them, and the dates of HTTP.

use std::{
    fmt,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A point in time. In JSON it is a text such as `2026-11-29T22:38:41Z`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp {
    seconds: i64,
    nanos: u32,
}

impl Timestamp {
    pub(crate) fn now() -> Self {
        SystemTime::now().into()
    }

    /// How long until this, seen from `now`; zero where it has passed.
    pub fn since(self, now: Self) -> Duration {
        if self <= now {
            return Duration::ZERO;
        }
        let whole = Duration::from_secs(self.seconds.abs_diff(now.seconds));
        (whole + Duration::from_nanos(self.nanos.into())).saturating_sub(Duration::from_nanos(now.nanos.into()))
    }

    /// Reads RFC 3339, such as `2026-11-29T22:38:41.5+01:00`. An offset is needed.
    pub fn parse(text: &str) -> Option<Self> {
        let mut rest = Scan(text.as_bytes());
        let (year, month, day) = (rest.digits(4)?, rest.skip(b"-")?.digits(2)?, rest.skip(b"-")?.digits(2)?);
        rest.skip(b"Tt ")?;
        let (hour, minute, second) = (rest.digits(2)?, rest.skip(b":")?.digits(2)?, rest.skip(b":")?.digits(2)?);
        let nanos = if rest.skip(b".").is_some() { rest.fraction()? } else { 0 };
        let offset = if rest.skip(b"Zz").is_some() {
            0
        } else {
            let sign = if rest.skip(b"+").is_some() { 1 } else { rest.skip(b"-").map(|_| -1)? };
            let (hours, minutes) = (rest.digits(2)?, rest.skip(b":")?.digits(2)?);
            (hours < 24 && minutes < 60).then_some(sign * (hours * 3600 + minutes * 60))?
        };
        let seconds = seconds(year, month, day, hour, minute, second)?;
        rest.0.is_empty().then_some(Self { seconds: seconds - offset, nanos })
    }

    /// Reads a date of HTTP, such as `Sun, 29 Nov 2026 22:38:41 GMT`.
    pub fn parse_http(text: &str) -> Option<Self> {
        const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
        let (_, date) = text.split_once(", ")?;
        let mut rest = Scan(date.strip_suffix(" GMT")?.as_bytes());
        let day = rest.digits(2)?;
        let name = rest.skip(b" ")?.0.get(..3)?;
        let month = MONTHS.iter().position(|month| month.as_bytes() == name)? as i64 + 1;
        rest.0 = &rest.0[3..];
        let year = rest.skip(b" ")?.digits(4)?;
        let (hour, minute, second) = (rest.skip(b" ")?.digits(2)?, rest.skip(b":")?.digits(2)?, rest.skip(b":")?.digits(2)?);
        let seconds = seconds(year, month, day, hour, minute, second)?;
        rest.0.is_empty().then_some(Self { seconds, nanos: 0 })
    }
}

/// Seconds since 1970 of a date in UTC. A leap second is the second that follows it.
fn seconds(year: i64, month: i64, day: i64, hour: i64, minute: i64, second: i64) -> Option<i64> {
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let longest = match month {
        2 => 28 + i64::from(leap),
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => return None,
    };
    if !(1..=longest).contains(&day) || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    // Years from March, so that the leap day ends one: https://howardhinnant.github.io/date_algorithms.html
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400) + (153 * month + 2) / 5 + day - 1 - 719_468;
    Some(((days * 24 + hour) * 60 + minute) * 60 + second)
}

/// What is left of a text.
struct Scan<'t>(&'t [u8]);

impl Scan<'_> {
    fn digits(&mut self, count: usize) -> Option<i64> {
        let (digits, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        digits.iter().try_fold(0, |sum, digit| digit.is_ascii_digit().then(|| sum * 10 + i64::from(digit - b'0')))
    }

    fn skip(&mut self, any_of: &[u8]) -> Option<&mut Self> {
        let (first, rest) = self.0.split_first()?;
        if !any_of.contains(first) {
            return None;
        }
        self.0 = rest;
        Some(self)
    }

    /// Nanoseconds from the digits behind a point; more digits than nine are read and dropped.
    fn fraction(&mut self) -> Option<u32> {
        let count = self.0.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let (digits, rest) = self.0.split_at(count);
        self.0 = rest;
        let nanos = digits.iter().chain([b'0'; 9].iter()).take(9).fold(0, |sum, digit| sum * 10 + u32::from(digit - b'0'));
        (count > 0).then_some(nanos)
    }
}

impl From<SystemTime> for Timestamp {
    fn from(time: SystemTime) -> Self {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { seconds: since.as_secs() as i64, nanos: since.subsec_nanos() }
    }
}

/// In UTC to the second, as Kubernetes' `metav1.Time`.
impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (days, second) = (self.seconds.div_euclid(86_400) + 719_468, self.seconds.rem_euclid(86_400));
        let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
        let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year + year / 4 - year / 100);
        let month = (5 * of_year + 2) / 153;
        let day = of_year - (153 * month + 2) / 5 + 1;
        let (year, month) = if month < 10 { (era * 400 + year, month + 3) } else { (era * 400 + year + 1, month - 9) };
        write!(f, "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", second / 3600, second / 60 % 60, second % 60)
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.to_string())
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| de::Error::custom(format_args!("`{text}` is not a time as in 2026-11-29T22:38:41Z")))
    }
}

#[cfg(not(target_family = "wasm"))]
impl schemars::JsonSchema for Timestamp {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Timestamp".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "type": "string", "format": "date-time" })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_no_time_is_refused() {
        for text in [
            "",
            "x",
            "2026-11-29",
            "2026-11-29T22:38:41",
            "2026-13-01T00:00:00Z",
            "2026-02-29T00:00:00Z",
            "2026-01-01T24:00:00Z",
            "2026-01-01T00:00:00Zx",
            "2026-01-01T00:00:00.Z",
            "2026-01-01T00:00:00+1:00",
            "2026-01-01T00:00:00+25:00",
            "+026-01-01T00:00:00Z",
        ] {
            assert_eq!(Timestamp::parse(text), None, "{text}");
        }
        for text in ["", "soon", "Sun, 29 Nov 2026 22:38:41", "Sun, 29 Foo 2026 22:38:41 GMT", "Sun, 29 Nov 2026 22:38 GMT", "Sun, 2é"] {
            assert_eq!(Timestamp::parse_http(text), None, "{text}");
        }
    }

    #[test]
    fn a_date_of_http_is_the_same_time() {
        assert_eq!(Timestamp::parse_http("Sun, 29 Nov 2026 22:38:41 GMT"), Timestamp::parse("2026-11-29T22:38:41Z"));
    }

    #[test]
    fn an_offset_and_a_fraction_count() {
        let (a, b) = (Timestamp::parse("2026-11-29T23:38:41.25+01:00"), Timestamp::parse("2026-11-29t22:38:42z"));
        let (a, b) = (a.expect("a time"), b.expect("a time"));
        assert_eq!(b.since(a), Duration::from_millis(750));
        assert_eq!(a.since(b), Duration::ZERO);
    }

    proptest! {
        #[test]
        fn times_are_read_and_written_as_another_library_does(seconds in -62_000_000_000i64..253_000_000_000, nanos in 0i32..1_000_000_000, offset in -23 * 60i32..23 * 60) {
            let theirs = jiff::Timestamp::new(seconds, 0).expect("in range");
            prop_assert_eq!(Timestamp { seconds, nanos: 0 }.to_string(), format!("{theirs}"));
            let offset = jiff::tz::Offset::from_seconds(offset * 60).expect("in range");
            let whole = jiff::SignedDuration::from_nanos(nanos.into());
            if let Ok(theirs) = theirs.checked_add(whole) {
                let text = theirs.display_with_offset(offset).to_string();
                prop_assert_eq!(Timestamp::parse(&text).map(|ours| ours.to_string()), Some(Timestamp { seconds, nanos: 0 }.to_string()), "{}", text);
            }
        }

        #[test]
        fn no_text_panics(text in ".{0,40}") {
            let _ = (Timestamp::parse(&text), Timestamp::parse_http(&text));
        }
    }
}
