//! What the probe claims: a probe of `probe.acme.io/v1` that asks for nothing, unless the slot in its bytes says otherwise.

use serde_json::Value;

use crate::berth::plugin::types::{Claim, DeadLetter, Kind, Progress, Reach, Read};

/// Length of the slot, its marker included.
const SLOT: usize = 2048;

/// The slot that tests overwrite: the marker, then JSON, then spaces.
#[used]
static CLAIM: [u8; SLOT] = slot();

const fn slot() -> [u8; SLOT] {
    let marker = b"PROBE-CLAIM:{}";
    let mut slot = [b' '; SLOT];
    let mut at = 0;
    while at < marker.len() {
        slot[at] = marker[at];
        at += 1;
    }
    slot
}

pub fn describe() -> Claim {
    // Volatile, or the optimiser would read the slot at build time.
    let slot = unsafe { std::ptr::read_volatile(&CLAIM) };
    let text = std::str::from_utf8(&slot["PROBE-CLAIM:".len()..]).expect("a test wrote text");
    let wanted: Value = serde_json::from_str(text).expect("a test wrote JSON");
    match wanted["describe"].as_str() {
        Some("panic") => panic!("no claim today"),
        Some("loop") => crate::behaviour::spin(),
        // More than its memory can hold, if each were kept.
        Some("hoard") => drop(["bodies", "fields", "bodies"].map(|what| (0..9).map(|_| crate::hoard::hoard(what, 900)).sum::<u64>())),
        Some("sleep") => std::thread::sleep(std::time::Duration::from_secs(3600)),
        _ => {}
    }
    let word = |name: &str, default: &str| wanted[name].as_str().unwrap_or(default).to_owned();
    let optional = |value: &Value| value.as_str().map(str::to_owned);
    let reconciles = Kind {
        group: word("group", "probe.acme.io"),
        version: word("version", "v1"),
        kind: word("kind", "Probe"),
        plural: word("plural", "probes"),
        namespaced: wanted["namespaced"].as_bool().unwrap_or(true),
    };
    let progress = wanted["progress"].as_object().map(|progress| Progress {
        phase_field: optional(&progress["phaseField"]).unwrap_or_default(),
        settled: words(&progress["settled"]),
        mirror_label: progress.get("mirrorLabel").and_then(optional),
    });
    let dead_letter = wanted["deadLetter"].as_object().map(|letter| DeadLetter {
        after: letter.get("after").and_then(Value::as_u64).map(|after| after as u32),
        phase: optional(&letter["phase"]).unwrap_or_default(),
        retries_field: letter.get("retriesField").and_then(optional),
        message_field: optional(&letter["messageField"]).unwrap_or_default(),
    });
    let core = |kind: &str| {
        let plural = format!("{}s", kind.to_lowercase());
        Kind { group: String::new(), version: "v1".into(), kind: kind.into(), plural, namespaced: true }
    };
    Claim {
        progress,
        dead_letter,
        priority_field: optional(&wanted["priorityField"]),
        reads: wanted["reads"].as_array().into_iter().flatten().map(read).collect(),
        owns: words(&wanted["owns"]).iter().map(|kind| core(kind)).collect(),
        hosts: words(&wanted["hosts"]),
        finalizer: wanted["finalizer"] == true,
        label_prefixes: if wanted["labelPrefixes"].is_null() { vec!["probe.acme.io/".into()] } else { words(&wanted["labelPrefixes"]) },
        sdk: "probe (raw wit-bindgen)".into(),
        extensions: Vec::new(),
        reconciles,
    }
}

fn read(wanted: &Value) -> Read {
    Read {
        kind: kind(wanted),
        reach: if wanted["allNamespaces"] == true { Reach::AllNamespaces } else { Reach::SameNamespace },
        label_selector: wanted["selector"].as_str().unwrap_or_default().to_owned(),
    }
}

/// A kind that is read; a ConfigMap where nothing else is said.
pub fn kind(wanted: &Value) -> Kind {
    let word = |name: &str, default: &str| wanted[name].as_str().unwrap_or(default).to_owned();
    Kind {
        group: word("group", ""),
        version: word("version", "v1"),
        kind: word("kind", "ConfigMap"),
        plural: word("plural", "configmaps"),
        namespaced: wanted["namespaced"].as_bool().unwrap_or(true),
    }
}

fn words(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}
