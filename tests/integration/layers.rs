//! The layers of the host: lower ones know nothing of higher ones, and only the plugin folder names wasmtime.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// From the bottom up. A module may name those of its own row and of the rows above it here.
const LAYERS: [&[&str]; 4] = [
    &["text", "object", "label", "claim", "reads", "reconcile", "denial", "fence", "backoff", "queue", "trial"],
    &[
        "client",
        "memory",
        "package",
        "secrets",
        "metrics",
        "status",
        "watch",
        "account",
        "authority",
        "children",
        "finalizer",
        "events",
        "lease",
        "source",
        "plugin",
        "controlplane",
        "install",
    ],
    &["catalog", "kinds", "reader", "loader", "controller", "keep", "report"],
    &["admin", "log", "shutdown", "host", "cli"],
];

fn source_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../host/src")
}

fn files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).expect("the host's sources are there") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The code of a file: without comments, and without the tests at its end.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).expect("readable");
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    let code = lines.collect::<Vec<_>>().join("\n");
    code.split("#[cfg(test)]\nmod tests").next().unwrap_or_default().to_owned()
}

/// The modules that `crate::…` names in this code, grouped imports included.
fn named(code: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        match rest.strip_prefix('{') {
            None => names.extend(identifier(rest)),
            Some(group) => {
                let mut depth = 0;
                let mut item = true;
                for (offset, c) in group.char_indices() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => item = true,
                        c if depth == 0 && item && !c.is_whitespace() => {
                            names.extend(identifier(&group[offset..]));
                            item = false;
                        }
                        _ => {}
                    }
                }
            }
        }
    }
    names
}

fn identifier(text: &str) -> Option<String> {
    let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len());
    (end > 0).then(|| text[..end].to_owned())
}

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&module))
}

#[test]
fn lower_layers_know_nothing_of_higher_ones() {
    let mut found = Vec::new();
    files(&source_root(), &mut found);
    let mut wrong = Vec::new();
    for path in found {
        let relative = path.strip_prefix(source_root()).expect("below the root").to_owned();
        let module = relative.iter().next().expect("a name").to_string_lossy().trim_end_matches(".rs").to_owned();
        let is_tests = relative.iter().any(|part| part == "tests.rs" || part == "tests");
        if is_tests || ["lib", "main"].contains(&module.as_str()) {
            continue;
        }
        let Some(own) = layer(&module) else {
            wrong.push(format!("{}: `{module}` is in no layer: add it to tests/integration/layers.rs", relative.display()));
            continue;
        };
        for name in named(&code(&path)) {
            if layer(&name).is_some_and(|other| other > own) {
                wrong.push(format!("{}: layer {own} names `{name}` of layer {}", relative.display(), layer(&name).unwrap_or_default()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn only_the_plugin_folder_names_wasmtime() {
    let mut found = Vec::new();
    files(&source_root(), &mut found);
    let outside = found.iter().filter(|path| {
        let relative = path.strip_prefix(source_root()).expect("below the root");
        !relative.starts_with("plugin") && relative != Path::new("plugin.rs")
    });
    let wrong: Vec<_> = outside.filter(|path| code(path).contains("wasmtime")).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
}

#[test]
fn grouped_and_nested_imports_are_read() {
    let code = "use crate::{\n    a::{b, c},\n    d,\n};\nfn f() { crate::e::g() }\n";
    assert_eq!(named(code).into_iter().collect::<Vec<_>>(), ["a", "d", "e"]);
}
