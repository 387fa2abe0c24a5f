//! Builds the binaries of a control plane with Go, from the pinned module that rides inside this program, into Berth's cache.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use super::assets::Assets;
use super::progress::{Progress, elapsed};

const GO_MOD: &str = include_str!("module/go.mod");
const GO_SUM: &str = include_str!("module/go.sum");

/// What Go calls the programs (the last element of their import paths), and what everyone else does.
const PROGRAMS: [(&str, &str); 3] =
    [("server", "etcd"), ("kube-apiserver", "kube-apiserver"), ("kube-controller-manager", "kube-controller-manager")];

/// Lines of Go's output kept for the message of a failure.
const KEPT_LINES: usize = 15;

/// The binaries in the cache, after building them if they are not there. Blocks; one builder at a time.
pub fn cached_or_built(cache: &Path, progress: &Progress) -> Result<Assets> {
    let home = cache.join("controlplane");
    let flags = link_flags();
    let key = key(&flags);
    let ready = home.join(&key);
    if let Some(assets) = in_cache(&ready) {
        return Ok(assets);
    }
    let go = go_version().context(
        "there is no local control plane: etcd and kube-apiserver were found neither through TEST_ASSET_ETCD and \
         TEST_ASSET_KUBE_APISERVER, KUBEBUILDER_ASSETS, the store of setup-envtest, /usr/local/kubebuilder/bin and PATH nor in \
         Berth's cache, and there is no Go to build them with; install Go (https://go.dev/dl), or run `setup-envtest use` and \
         set KUBEBUILDER_ASSETS to the directory it prints",
    )?;
    std::fs::create_dir_all(&home).with_context(|| format!("cannot create the cache {}", home.display()))?;
    let _turn = wait_for_turn(&home.join(format!("{key}.lock")), progress)?;
    if let Some(assets) = in_cache(&ready) {
        return Ok(assets);
    }
    // Left by a builder that was killed: the turn is ours, so nobody else uses it.
    let partial = home.join(format!("{key}.partial"));
    let _ = std::fs::remove_dir_all(&partial);
    build(&partial, &flags, &go, progress)?;
    std::fs::rename(&partial, &ready).with_context(|| format!("cannot move the binaries to {}", ready.display()))?;
    in_cache(&ready).with_context(|| format!("the binaries are not in {}", ready.display()))
}

fn build(directory: &Path, flags: &str, go: &str, progress: &Progress) -> Result<()> {
    let start = Instant::now();
    progress.say(&format!(
        "building etcd {}, kube-apiserver and kube-controller-manager {} with {go}, once; this takes minutes",
        pinned("go.etcd.io/etcd/server/v3"),
        pinned("k8s.io/kubernetes")
    ));
    let module = directory.join("module");
    std::fs::create_dir_all(&module).with_context(|| format!("cannot create {}", module.display()))?;
    for (name, text) in [("go.mod", GO_MOD), ("go.sum", GO_SUM)] {
        std::fs::write(module.join(name), text).with_context(|| format!("cannot write {name} to {}", module.display()))?;
    }
    let mut fetched = 0_usize;
    let packages = run_go(&module, &["list", "-deps", "tool"], |_| {
        fetched += 1;
        progress.step(|| format!("  1/2 fetching the sources: {fetched} modules, {}", elapsed(start)));
    })?;
    let mut compiled = 0_usize;
    run_go(&module, &["build", "-v", "-trimpath", "-ldflags", flags, "-o", "../", "tool"], |_| {
        compiled += 1;
        progress.step(|| format!("  2/2 compiling and linking: {compiled} of {packages} packages, {}", elapsed(start)));
    })?;
    for (from, to) in PROGRAMS {
        std::fs::rename(directory.join(from), directory.join(to)).with_context(|| format!("go build did not make {from}"))?;
    }
    std::fs::remove_dir_all(&module).context("cannot remove the module's copy")?;
    progress.say(&format!("built the control plane in {}", elapsed(start)));
    Ok(())
}

/// Runs go and tells each line of its messages. Returns how many lines it printed as its result.
fn run_go(module: &Path, arguments: &[&str], mut told: impl FnMut(&str)) -> Result<usize> {
    let mut go = Command::new("go")
        .args(arguments)
        .current_dir(module)
        .env("CGO_ENABLED", "0")
        .env("GOWORK", "off")
        // The user's flags are for the user's modules: `-mod=vendor`, say, would break this one.
        .env("GOFLAGS", "-mod=readonly")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start go")?;
    let stdout = go.stdout.take().expect("standard output was asked to be a pipe");
    let results = std::thread::spawn(move || BufReader::new(stdout).lines().count());
    let stderr = go.stderr.take().expect("standard error was asked to be a pipe");
    let mut kept = std::collections::VecDeque::with_capacity(KEPT_LINES);
    for line in BufReader::new(stderr).lines().map_while(Result::ok) {
        told(&line);
        if kept.len() == KEPT_LINES {
            kept.pop_front();
        }
        kept.push_back(line);
    }
    let status = go.wait().context("cannot wait for go")?;
    if !status.success() {
        bail!("`go {}` ended with {status}:\n{}", arguments[0], Vec::from(kept).join("\n"));
    }
    results.join().map_err(|_| anyhow::anyhow!("reading the output of go panicked"))
}

/// Holds the lock until dropped.
fn wait_for_turn(lock: &Path, progress: &Progress) -> Result<File> {
    let file = File::create(lock).with_context(|| format!("cannot open {}", lock.display()))?;
    if file.try_lock().is_err() {
        progress.say("another process builds the control plane; waiting for it");
        file.lock().with_context(|| format!("cannot lock {}", lock.display()))?;
    }
    Ok(file)
}

fn in_cache(directory: &Path) -> Option<Assets> {
    let program = |name: &str| Some(directory.join(name)).filter(|file| file.is_file());
    let [etcd, api_server, controller_manager] = PROGRAMS.map(|(_, name)| program(name));
    Some(Assets { etcd: etcd?, api_server: api_server?, controller_manager: Some(controller_manager?) })
}

/// Built from a module the binaries call themselves v0.0.0, which clients and the API server's own emulation of older versions take as said.
fn link_flags() -> String {
    let version = pinned("k8s.io/kubernetes");
    let mut numbers = version.trim_start_matches('v').split('.');
    let (major, minor) = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
    let variable = "-X k8s.io/component-base/version";
    format!("-s -w {variable}.gitVersion={version} {variable}.gitMajor={major} {variable}.gitMinor={minor}")
}

/// Names the binaries by everything that they are made from.
fn key(flags: &str) -> String {
    let machine = format!("{} {}", std::env::consts::OS, std::env::consts::ARCH);
    let digest = Sha256::new().chain_update(GO_MOD).chain_update(GO_SUM).chain_update(flags).chain_update(machine).finalize();
    let digest = format!("{digest:x}");
    format!("{}-{}", pinned("k8s.io/kubernetes"), &digest[..16])
}

/// The version that `go.mod` requires of `module`.
fn pinned(module: &str) -> &'static str {
    let version = |line: &'static str| {
        let mut words = line.split_whitespace();
        words.next().filter(|word| *word == module).and(words.next()).filter(|word| word.starts_with('v'))
    };
    GO_MOD.lines().find_map(version).expect("go.mod requires each of the programs' modules")
}

fn go_version() -> Result<String> {
    let output = Command::new("go").arg("version").output().context("cannot start go")?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.split(' ').nth(2).unwrap_or("go").to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_binaries_are_told_the_version_that_the_module_pins() {
        assert!(pinned("k8s.io/kubernetes").starts_with("v1."));
        let version = pinned("k8s.io/kubernetes");
        assert!(link_flags().contains(&format!("version.gitVersion={version} ")));
        assert!(!link_flags().contains("gitMinor= ") && !link_flags().ends_with('='));
    }

    #[test]
    fn a_cache_that_lacks_a_binary_counts_as_empty() {
        let cache = tempfile::tempdir().unwrap();
        for name in ["etcd", "kube-apiserver"] {
            std::fs::write(cache.path().join(name), "").unwrap();
        }
        assert_eq!(in_cache(cache.path()), None);
        std::fs::write(cache.path().join("kube-controller-manager"), "").unwrap();
        assert_eq!(in_cache(cache.path()).unwrap().etcd, cache.path().join("etcd"));
    }
}
