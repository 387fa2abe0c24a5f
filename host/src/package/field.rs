//! Reads the fields of `plugin.yaml`, each with the sentence for what it may not be.

use std::{fmt::Display, ops::RangeInclusive, time::Duration};

use serde_json::{Map, Value};

use super::{
    Refusal, is_name,
    quantity::{bytes, duration, show_bytes, show_duration},
    reason,
};

/// A mapping; nothing is an empty one.
pub fn mapping(key: &str, value: Value) -> Result<Map<String, Value>, Refusal> {
    match value {
        Value::Null => Ok(Map::new()),
        Value::Object(fields) => Ok(fields),
        other => Err(expected(key, "a mapping", &other)),
    }
}

/// A whole number within a range.
pub fn number(key: &str, value: &Value, range: RangeInclusive<usize>) -> Result<usize, Refusal> {
    let wanted = || expected(key, format!("a whole number from {} to {}", range.start(), range.end()), value);
    let number = value.as_u64().and_then(|number| usize::try_from(number).ok());
    number.filter(|number| range.contains(number)).ok_or_else(wanted)
}

/// A length of time within a range.
pub fn time(key: &str, value: &Value, range: RangeInclusive<Duration>) -> Result<Duration, Refusal> {
    let wanted = || {
        let (least, most) = (show_duration(*range.start()), show_duration(*range.end()));
        expected(key, format!("a time from {least} to {most}, such as \"10s\" or \"500ms\""), value)
    };
    value.as_str().and_then(duration).filter(|time| range.contains(time)).ok_or_else(wanted)
}

/// An amount of bytes within a range.
pub fn amount(key: &str, value: &Value, range: RangeInclusive<u64>) -> Result<u64, Refusal> {
    let wanted = || {
        let (least, most) = (show_bytes(*range.start()), show_bytes(*range.end()));
        expected(key, format!("an amount from {least} to {most}, such as \"64Mi\""), value)
    };
    let amount = value.as_u64().or_else(|| value.as_str().and_then(bytes));
    amount.filter(|amount| range.contains(amount)).ok_or_else(wanted)
}

/// The name of an object of this kind in the host's namespace.
pub fn name_of(key: &str, kind: &str, value: &Value) -> Result<String, Refusal> {
    let name = value.as_str().filter(|name| is_name(name));
    name.map(str::to_owned).ok_or_else(|| expected(key, format!("the name of a {kind} in the host's namespace"), value))
}

/// A text of `plugin.yaml` that is wrong, to be read after "plugin.yaml".
pub fn invalid(what: &str) -> Refusal {
    Refusal::new(reason::INVALID_CONFIG, format!("plugin.yaml {what}."))
}

/// A value that is not what it has to be. The value is shown, but only the beginning: it may be anything.
pub fn expected(key: &str, wanted: impl Display, value: &Value) -> Refusal {
    let shown = value.to_string();
    let end = shown.floor_char_boundary(60);
    let dots = if end < shown.len() { "…" } else { "" };
    invalid(&format!("has a {key:?} of {}{dots}, where {wanted} is expected", &shown[..end]))
}

/// A key that is not known, with the nearest one that is.
pub fn unknown(key: &str, within: &str, known: &[&str]) -> Refusal {
    let shown = &key[..key.floor_char_boundary(60)];
    let near = known
        .iter()
        .map(|candidate| (strsim::damerau_levenshtein(&shown.to_lowercase(), &candidate.to_lowercase()), candidate))
        .min()
        .filter(|(distance, candidate)| *distance <= candidate.len() / 3 + 1);
    let hint = match near {
        Some((_, candidate)) => format!("did you mean \"{within}{candidate}\"?"),
        None => format!("the known ones are {}", known.join(", ")),
    };
    Refusal::new(reason::INVALID_CONFIG, format!("plugin.yaml has the unknown key \"{within}{}\" ({hint}).", shown.escape_debug()))
}
