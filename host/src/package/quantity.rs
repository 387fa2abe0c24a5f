//! Durations and amounts of memory as people write them: `10s`, `2m`, `500ms`, `64Mi`.

use std::time::Duration;

/// Reads `500ms`, `10s`, `2m`, `1h` and sums such as `1m30s`. None for anything else, such as a number without its unit.
pub fn duration(text: &str) -> Option<Duration> {
    let mut rest = text;
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let (number, unit) = split_number(rest)?;
        let end = unit.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(unit.len());
        let milliseconds = match &unit[..end] {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            _ => return None,
        };
        total = total.checked_add(Duration::from_millis(number.checked_mul(milliseconds)?))?;
        rest = &unit[end..];
    }
    (!text.is_empty()).then_some(total)
}

/// Reads an amount of bytes as Kubernetes writes it: `64Mi`, `1Gi`, `500M`, `1048576`. None for anything else.
pub fn bytes(text: &str) -> Option<u64> {
    let (number, unit) = split_number(text)?;
    let scale = match unit {
        "" => 1,
        "k" => 1_000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        _ => return None,
    };
    number.checked_mul(scale)
}

/// For messages: the largest unit without a remainder.
pub fn show_bytes(bytes: u64) -> String {
    match bytes {
        0 => "0".to_owned(),
        b if b % (1 << 30) == 0 => format!("{}Gi", b >> 30),
        b if b % (1 << 20) == 0 => format!("{}Mi", b >> 20),
        b if b % (1 << 10) == 0 => format!("{}Ki", b >> 10),
        b => b.to_string(),
    }
}

/// For messages: the largest unit without a remainder.
pub fn show_duration(duration: Duration) -> String {
    match duration.as_millis() {
        ms if ms % 60_000 == 0 && ms > 0 => format!("{}m", ms / 60_000),
        ms if ms % 1_000 == 0 => format!("{}s", ms / 1_000),
        ms => format!("{ms}ms"),
    }
}

fn split_number(text: &str) -> Option<(u64, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    Some((text[..end].parse().ok()?, &text[end..]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn durations_need_a_unit_and_may_be_sums() {
        assert_eq!(duration("500ms"), Some(Duration::from_millis(500)));
        assert_eq!(duration("1m30s"), Some(Duration::from_secs(90)));
        assert_eq!(duration("1h"), Some(Duration::from_secs(3600)));
        for text in ["", "10", "s", "1.5s", "-1s", "1 s", "10S", "1d", "99999999999999999999s", "18446744073709551615h"] {
            assert_eq!(duration(text), None, "{text}");
        }
    }

    #[test]
    fn amounts_are_binary_with_an_i_and_decimal_without() {
        assert_eq!((bytes("64Mi"), bytes("64M"), bytes("1048576")), (Some(64 << 20), Some(64_000_000), Some(1 << 20)));
        for text in ["", "Mi", "64MB", "64mi", "1.5Gi", "-1Mi", "18446744073709551615Gi"] {
            assert_eq!(bytes(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_not_without_a_panic(text in ".{0,40}") {
            let _ = (duration(&text), bytes(&text));
        }

        #[test]
        fn what_is_shown_can_be_read(ms in any::<u32>(), amount in any::<u32>()) {
            let time = Duration::from_millis(ms.into());
            prop_assert_eq!(duration(&show_duration(time)), Some(time));
            prop_assert_eq!(bytes(&show_bytes(amount.into())), Some(amount.into()));
        }
    }
}
