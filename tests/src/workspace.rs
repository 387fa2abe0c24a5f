//! Where the things are that a build made: the `berth` binary and the guests.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

/// The root of the workspace.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate is a folder of the workspace")
}

/// Cargo's target directory, in which the running test is.
pub fn target() -> anyhow::Result<PathBuf> {
    let executable = std::env::current_exe().context("finding the running executable")?;
    let target = executable.ancestors().find(|dir| dir.join("CACHEDIR.TAG").is_file());
    Ok(target.map_or_else(|| root().join("target"), Path::to_path_buf))
}

/// The `berth` binary of the same profile as the running test.
pub fn berth() -> anyhow::Result<PathBuf> {
    let executable = std::env::current_exe().context("finding the running executable")?;
    // A test is in `deps`, a binary of this package beside `berth`.
    let beside = executable.ancestors().skip(1).take(2).map(|dir| dir.join("berth")).find(|berth| berth.is_file());
    beside.context("there is no `berth` binary beside the tests: run `cargo build -p berth-host`, or `make test`")
}

/// A component built for the `guest` profile: `email_request`, `report_job`, or a test guest such as `ok_v1`.
pub fn guest(name: &str) -> anyhow::Result<PathBuf> {
    let path = target()?.join("wasm32-wasip2/guest").join(format!("{}.wasm", name.replace('-', "_")));
    if !path.is_file() {
        bail!("there is no {}: run `make guests`", path.display());
    }
    Ok(path)
}

/// A file under `deploy/`, byte for byte as it ships.
pub fn deploy(path: &str) -> anyhow::Result<String> {
    let path = root().join("deploy").join(path);
    std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_was_not_built_is_told_with_the_way_to_build_it() {
        let error = guest("no-such-guest").expect_err("nobody built it").to_string();
        assert!(error.contains("no_such_guest.wasm: run `make guests`"), "{error}");
    }

    #[test]
    fn the_target_directory_is_that_of_the_running_test() {
        let target = target().expect("found");
        assert!(std::env::current_exe().expect("running").starts_with(target));
    }
}
