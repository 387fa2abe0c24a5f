//! What authors of plugins deliver, made up by the structure that it should have: always a value or a sentence, never a panic.

use std::io::Write;

use proptest::{prelude::*, sample::Index};
use serde_json::{Value, json};

use super::*;

/// Texts that a field could have, or that somebody would try.
fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        "[a-z0-9.-]{0,12}",
        "(http|https|ftp)://(\\*\\.)?[a-z]{1,4}(\\.[a-z0-9]{1,3}){0,3}(:[0-9]{0,6})?/?",
        "[0-9]{1,20}(ms|s|m|h|k|Mi|Gi|)",
        prop::sample::select(vec!["", "immediate", "true", "null", "Authorization", "Host", "../x", "\u{202e}", "é", "\0"])
            .prop_map(str::to_owned),
        ".{0,30}",
    ]
}

/// A value of any shape, a few levels deep.
fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(|number| json!(number)),
        text().prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 6, |inner| {
        let key = prop_oneof![
            prop::sample::select(vec![
                "url",
                "ca",
                "credentials",
                "secret",
                "configMap",
                "key",
                "header",
                "prefix",
                "base",
                "max",
                "httpRequests",
                "httpResponse",
                "httpFirstByte",
                "log",
                "events",
                "httpConnect",
                "outcome",
                "jsonDepth",
                "children",
                "handles",
                "hostCall",
                "staged",
                "share",
                "for",
            ])
            .prop_map(str::to_owned),
            text(),
        ];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::btree_map(key, inner, 0..6).prop_map(|map| json!(map)),
        ]
    })
}

/// The keys of `plugin.yaml`, or nearly.
fn configuration() -> impl Strategy<Value = Value> {
    let keys = [config::KEYS, &["Timeout", "limit", ""]].concat();
    prop::collection::btree_map(prop::sample::select(keys), value(), 0..5).prop_map(|map| json!(map))
}

/// What was once found, and what somebody thought of.
fn corpus() -> Vec<(String, Vec<u8>)> {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/corpus/plugin.yaml");
    let files = std::fs::read_dir(directory).expect("the corpus is there").map(|entry| entry.expect("readable").path());
    files.map(|path| (path.display().to_string(), std::fs::read(&path).expect("readable"))).collect()
}

/// Cuts, doubles and overwrites parts.
fn mutated(mut bytes: Vec<u8>, edits: &[(u8, Index, Index, Vec<u8>)]) -> Vec<u8> {
    for (kind, from, to, new) in edits {
        if bytes.is_empty() {
            break;
        }
        let (from, to) = (from.index(bytes.len()), to.index(bytes.len()));
        let range = from.min(to)..(from.max(to) + 1).min(from.min(to) + 64);
        match kind % 3 {
            0 => drop(bytes.splice(range, [])),
            1 => {
                let copy = bytes[range.clone()].to_vec();
                drop(bytes.splice(range.start..range.start, copy));
            }
            _ => drop(bytes.splice(range, new.iter().copied())),
        }
    }
    bytes
}

fn edits() -> impl Strategy<Value = Vec<(u8, Index, Index, Vec<u8>)>> {
    prop::collection::vec((any::<u8>(), any::<Index>(), any::<Index>(), prop::collection::vec(any::<u8>(), 0..8)), 0..6)
}

fn judge(text: &[u8]) -> Result<(), TestCaseError> {
    match Config::parse(text) {
        Err(refusal) => is_a_sentence(&refusal),
        Ok(config) => {
            prop_assert!((1..=ceiling::CONCURRENCY).contains(&config.concurrency) && config.memory <= ceiling::MEMORY);
            prop_assert!(config.timeout <= ceiling::TIMEOUT && config.cpu <= ceiling::CPU && config.backoff.base <= config.backoff.max);
            prop_assert!(Ceilings::highest().check(&config).is_ok() && config.allowed_hosts.len() <= 64);
            for host in &config.allowed_hosts {
                prop_assert!(host.pattern.is_tls() || (host.ca.is_none() && host.credentials.is_none()), "{host:?}");
            }
            Ok(())
        }
    }
}

fn is_a_sentence(refusal: &Refusal) -> Result<(), TestCaseError> {
    let message = &refusal.message;
    prop_assert!(message.ends_with('.') && message.len() <= Refusal::MAX_MESSAGE && !message.contains('\n'), "{message:?}");
    Ok(())
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).expect("a vector takes all that is written");
    encoder.finish().expect("a vector takes all that is written")
}

#[test]
fn the_corpus_is_read_or_refused_with_a_sentence() {
    let corpus = corpus();
    assert!(corpus.len() >= 10, "{} files", corpus.len());
    for (name, text) in corpus {
        judge(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

proptest! {
    #[test]
    fn any_configuration_is_read_or_refused_with_a_sentence(made in configuration(), seed in any::<Index>(), edits in edits()) {
        judge(made.to_string().as_bytes())?;
        if let Ok(yaml) = serde_saphyr::to_string(&made) {
            judge(yaml.as_bytes())?;
        }
        let corpus = corpus();
        judge(&mutated(corpus[seed.index(corpus.len())].1.clone(), &edits))?;
    }

    #[test]
    fn any_package_is_opened_or_refused_with_a_sentence(
        name in prop_oneof!["[a-z][a-z0-9-]{0,8}", ".{0,8}"],
        files in prop::collection::vec(
            (prop::sample::select(vec!["a.wasm", "a.wasm.gz", "a.wasm.zst", "plugin.yaml", "plugin.yml", "README.md", ".wasm"]), 0..4_u8, 0..200_000_usize, any::<u8>(), edits()),
            0..4,
        ),
    ) {
        let delivered = files.into_iter().map(|(file, encoding, length, byte, edits)| {
            let plain = vec![byte; length];
            let packed = match encoding {
                0 => plain,
                1 => gzip(&plain),
                2 => zstd::encode_all(&*plain, 1).expect("compresses"),
                _ => gzip(&gzip(&plain)),
            };
            (file.to_owned(), Bytes::from(mutated(packed, &edits)))
        });
        match open(&name, delivered) {
            Ok(package) => prop_assert!(package.component.len() <= MAX_COMPONENT && package.digest == Digest::of(&package.component)),
            Err(refusal) => is_a_sentence(&refusal)?,
        }
    }
}
