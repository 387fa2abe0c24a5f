//! JSON text to typed values with errors that name the field, and a typed status laid over what others wrote in it.

use std::collections::BTreeMap;

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::value::RawValue;

use crate::resource::{Metadata, Resource};

#[derive(Deserialize)]
struct Envelope<'a> {
    #[serde(default)]
    metadata: Metadata,
    #[serde(borrow)]
    spec: Option<&'a RawValue>,
    #[serde(borrow)]
    status: Option<&'a RawValue>,
}

/// An object from its text. A status that cannot be read as the kind's is given as none: it is not what the work is derived from.
pub fn object<R: Resource>(text: &str) -> Result<R, String> {
    let Envelope { metadata, spec, status }: Envelope<'_> = value(text, "")?;
    let spec = spec.ok_or("the object has no spec")?;
    Ok(R::assemble(metadata, value(spec.get(), "spec")?, status.and_then(|status| serde_json::from_str(status.get()).ok())))
}

/// The status of an object as text, where there is one.
pub fn status(text: &str) -> Option<&str> {
    let envelope: Envelope<'_> = serde_json::from_str(text).ok()?;
    envelope.status.map(RawValue::get)
}

/// A value from JSON text; the error is a sentence that names the field at fault.
///
/// ```
/// # use berth_sdk::data;
/// #[data]
/// #[derive(Default)]
/// struct Settings { retries: u32 }
///
/// assert_eq!(berth_sdk::from_json::<Settings>(r#"{"retries": 3}"#), Ok(Settings { retries: 3 }));
/// assert_eq!(berth_sdk::from_json::<Settings>(r#"{"retries": "x"}"#), Err(r#"retries: invalid type: string "x", expected u32"#.into()));
/// ```
pub fn from_json<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    value(text, "")
}

fn value<'a, T: Deserialize<'a>>(text: &'a str, root: &str) -> Result<T, String> {
    serde_json::from_str(text).map_err(|error| {
        let message = error.to_string();
        let mut steps = steps(text, offset(text, error.line(), error.column()));
        if message.starts_with("missing field") {
            // Found missing at the end of the object, behind the last field that is there.
            steps.pop();
        }
        let path = steps.into_iter().fold(root.to_owned(), |path, step| match step {
            Step::Key(key) if key.is_empty() => path,
            Step::Key(key) if path.is_empty() => key,
            Step::Key(key) => format!("{path}.{key}"),
            Step::Index(index) => format!("{path}[{index}]"),
        });
        let message = message.rsplit_once(" at line ").map_or(message.as_str(), |(message, _)| message);
        if path.is_empty() { message.to_owned() } else { format!("{path}: {message}") }
    })
}

/// The byte offset of a line and column, both from 1, as `serde_json` counts them.
fn offset(text: &str, line: usize, column: usize) -> usize {
    let start: usize = text.split_inclusive('\n').take(line.saturating_sub(1)).map(str::len).sum();
    (start + column).min(text.len())
}

/// An object with its current key, or an array with its current index.
enum Step {
    Key(String),
    Index(usize),
}

/// The way to the byte just before `end` of a JSON text.
fn steps(text: &str, end: usize) -> Vec<Step> {
    let bytes = text.as_bytes();
    let (mut steps, mut expects_key, mut at) = (Vec::new(), false, 0);
    while at < end {
        match bytes[at] {
            b'{' => {
                steps.push(Step::Key(String::new()));
                expects_key = true;
            }
            b'[' => {
                steps.push(Step::Index(0));
                expects_key = false;
            }
            b'}' | b']' if at + 1 < end => {
                steps.pop();
            }
            b',' if at + 1 < end => match steps.last_mut() {
                Some(Step::Index(index)) => *index += 1,
                _ => expects_key = true,
            },
            b'"' => {
                let start = at + 1;
                at = start;
                while at < end && bytes[at] != b'"' {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                if expects_key && let Some(Step::Key(key)) = steps.last_mut() {
                    *key = text.get(start..at).unwrap_or_default().to_owned();
                    expects_key = false;
                }
            }
            _ => {}
        }
        at += 1;
    }
    steps
}

type Fields<'a> = BTreeMap<String, &'a RawValue>;

/// `new` laid over `given`: what the typed view of the given status had (`old`) and `new` does not is removed, what `new` has is set,
/// and everything else, which others wrote, stays digit for digit.
pub fn overlay(given: Option<&str>, old: Option<&str>, new: &str) -> String {
    let fields =
        |text: Option<&str>| text.and_then(|text| serde_json::from_str::<BTreeMap<String, Box<RawValue>>>(text).ok()).unwrap_or_default();
    let Ok(new) = serde_json::from_str::<Fields<'_>>(new) else { return new.to_owned() };
    let (mut merged, old) = (fields(given), fields(old));
    merged.retain(|field, _| !old.contains_key(field) || new.contains_key(field));
    for (field, value) in new {
        let both_objects = merged.get(&field).is_some_and(|there| there.get().starts_with('{')) && value.get().starts_with('{');
        let text = if both_objects {
            overlay(merged.get(&field).map(|there| there.get()), old.get(&field).map(|was| was.get()), value.get())
        } else {
            value.get().to_owned()
        };
        merged.insert(field, RawValue::from_string(text).expect("a field of a JSON object, or an overlay, which is one"));
    }
    serde_json::to_string(&merged).expect("a map with text keys is a JSON object")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data;

    #[data]
    struct Inner {
        list: Vec<i64>,
        name: String,
    }

    #[data]
    struct Spec {
        to: String,
        priority: Option<i64>,
        inner: Option<Inner>,
    }

    #[track_caller]
    fn fails(text: &str, sentence: &str) {
        assert_eq!(value::<Spec>(text, "spec").expect_err("must not decode"), sentence);
    }

    #[test]
    fn a_wrong_value_is_named_by_its_field() {
        fails("7", "spec: invalid type: integer `7`, expected struct Spec");
        fails(r#""x""#, "spec: invalid type: string \"x\", expected struct Spec");
        fails(r#"{"to":[1]}"#, "spec.to: invalid type: sequence, expected a string");
        fails(r#"{"to":{"a":1}}"#, "spec.to: invalid type: map, expected a string");
        fails(r#"{"to":"a","priority":"high"}"#, "spec.priority: invalid type: string \"high\", expected i64");
        fails(r#"{"to":"a","priority":1.5,"x":1}"#, "spec.priority: invalid type: floating point `1.5`, expected i64");
        fails("{\"to\":\"a\",\n \"priority\" : true }", "spec.priority: invalid type: boolean `true`, expected i64");
        fails(r#"{"priority":1}"#, "spec: missing field `to`");
        fails(r#"{"to":"a","inner":{"list":[]}}"#, "spec.inner: missing field `name`");
        fails(r#"{"to":"a","inner":{"list":[1,2,"3"],"name":""}}"#, "spec.inner.list[2]: invalid type: string \"3\", expected i64");
        fails(r#"{"to":"a","inner":{"name":"x, \" {","list":[[]]}}"#, "spec.inner.list[0]: invalid type: sequence, expected i64");
        fails(r#"{"to":null}"#, "spec.to: invalid type: null, expected a string");
    }

    #[track_caller]
    fn lays(given: &str, old: &str, new: &str, merged: &str) {
        assert_eq!(overlay(Some(given), Some(old), new), merged);
    }

    #[test]
    fn an_overlay_keeps_the_fields_of_others_digit_for_digit() {
        lays(
            r#"{"foreign":9007199254740993,"one":1.0,"e":1e3,"phase":"A"}"#,
            r#"{"phase":"A"}"#,
            r#"{"phase":"B"}"#,
            r#"{"e":1e3,"foreign":9007199254740993,"one":1.0,"phase":"B"}"#,
        );
    }

    #[test]
    fn an_overlay_removes_what_the_handler_had_and_dropped() {
        lays(r#"{"message":"m","x":1}"#, r#"{"message":"m"}"#, "{}", r#"{"x":1}"#);
    }

    #[test]
    fn an_overlay_goes_into_objects() {
        lays(
            r#"{"a":{"own":1,"gone":2,"foreign":3}}"#,
            r#"{"a":{"own":1,"gone":2}}"#,
            r#"{"a":{"own":9}}"#,
            r#"{"a":{"foreign":3,"own":9}}"#,
        );
    }

    #[test]
    fn an_overlay_replaces_what_is_no_object() {
        assert_eq!(overlay(None, None, r#"{"a":1}"#), r#"{"a":1}"#);
        assert_eq!(overlay(Some("7"), None, r#"{"a":1}"#), r#"{"a":1}"#);
        lays(r#"{"a":[1]}"#, "{}", r#"{"a":{"b":1}}"#, r#"{"a":{"b":1}}"#);
    }
}
