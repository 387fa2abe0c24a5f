//! The threat model of `docs/security.md` and `docs/reliability.md` name a test for each promise; here is that each of them is there.

use std::{fs, path::Path};

use berth_tests::workspace;

/// Where tests are.
const ROOTS: [&str; 4] = ["host/src", "host/tests", "tests/integration", "tests/src"];

/// The rows of the tables that end with a column of proofs, each with the tests that it names `like_this`.
fn promises(text: &str) -> Vec<(&str, Vec<&str>)> {
    let mut found = Vec::new();
    let mut within = false;
    for line in text.lines() {
        within = line.ends_with("| proven by |") || (within && line.starts_with('|'));
        if within && !line.ends_with("| proven by |") && !line.starts_with("|---") {
            let last = line.trim_end_matches('|').rsplit('|').next().unwrap_or_default();
            found.push((line, last.split('`').skip(1).step_by(2).collect()));
        }
    }
    found
}

fn sources(directory: &Path, text: &mut String) {
    for entry in fs::read_dir(directory).expect("the sources are there") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            sources(&path, text);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&fs::read_to_string(&path).expect("readable"));
        }
    }
}

/// Every promise of a page, which has at least so many, has a proof.
fn is_proven(page: &str, least: usize) {
    let page = fs::read_to_string(workspace::root().join(page)).expect("the page is there");
    let mut code = String::new();
    ROOTS.iter().for_each(|root| sources(&workspace::root().join(root), &mut code));
    let promises = promises(&page);
    assert!(promises.len() >= least, "{} rows were found", promises.len());
    for (row, tests) in promises {
        assert!(!tests.is_empty(), "a promise without a proof: {row}");
        for test in tests {
            assert!(code.contains(&format!("fn {test}(")), "there is no test {test:?}, which is to prove: {row}");
        }
    }
}

#[test]
fn every_promise_of_the_threat_model_names_tests_that_exist() {
    is_proven("docs/security.md", 21);
}

#[test]
fn every_promise_about_reliability_names_tests_that_exist() {
    is_proven("docs/reliability.md", 70);
}
