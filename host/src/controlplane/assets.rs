//! Where the binaries of a control plane are: found by the conventions of envtest, else in Berth's own cache, else built there.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::build;
use super::progress::Progress;

/// The first release that serves MutatingAdmissionPolicy, which `deploy/` uses, as v1.
const OLDEST: Version = Version { major: 1, minor: 36 };

/// The program files of a control plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assets {
    /// etcd.
    pub etcd: PathBuf,
    /// kube-apiserver.
    pub api_server: PathBuf,
    /// kube-controller-manager, which the assets of envtest lack.
    pub controller_manager: Option<PathBuf>,
}

/// Everything of the environment that says where to look.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// `TEST_ASSET_ETCD`.
    pub etcd: Option<PathBuf>,
    /// `TEST_ASSET_KUBE_APISERVER`.
    pub api_server: Option<PathBuf>,
    /// `TEST_ASSET_KUBE_CONTROLLER_MANAGER`.
    pub controller_manager: Option<PathBuf>,
    /// `KUBEBUILDER_ASSETS`.
    pub kubebuilder_assets: Option<PathBuf>,
    /// The directory in which setup-envtest keeps one directory a release.
    pub envtest_store: Option<PathBuf>,
    /// `/usr/local/kubebuilder/bin`, then the directories of `PATH`.
    pub fallbacks: Vec<PathBuf>,
    /// Berth's cache.
    pub cache: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Version {
    major: u32,
    minor: u32,
}

impl Places {
    /// As the environment of this process says.
    pub fn from_env() -> Self {
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let home = variable("HOME");
        let under_home = |path: &str| home.as_ref().map(|home| home.join(path));
        let data = variable("XDG_DATA_HOME").or_else(|| under_home(".local/share"));
        let envtest_store = match std::env::consts::OS {
            "macos" => under_home("Library/Application Support/io.kubebuilder.envtest/k8s"),
            _ => data.map(|data| data.join("kubebuilder-envtest/k8s")),
        };
        let path = std::env::var_os("PATH").unwrap_or_default();
        Self {
            etcd: variable("TEST_ASSET_ETCD"),
            api_server: variable("TEST_ASSET_KUBE_APISERVER"),
            controller_manager: variable("TEST_ASSET_KUBE_CONTROLLER_MANAGER"),
            kubebuilder_assets: variable("KUBEBUILDER_ASSETS"),
            envtest_store,
            fallbacks: std::iter::once(PathBuf::from("/usr/local/kubebuilder/bin")).chain(std::env::split_paths(&path)).collect(),
            cache: variable("XDG_CACHE_HOME").or_else(|| under_home(".cache")).map(|cache| cache.join("berth")),
        }
    }

    /// The assets, built if they are nowhere. Blocks, for minutes if it has to build.
    pub fn assets(&self, progress: &Progress) -> Result<Assets> {
        if let Some(assets) = self.find(progress)? {
            return Ok(assets);
        }
        let cache = self.cache.as_ref().context("neither XDG_CACHE_HOME nor HOME says where to keep the control plane's binaries")?;
        build::cached_or_built(cache, progress)
    }

    /// The assets that are there by envtest's conventions. What the user names must be right; what merely lies around is passed over if it is not.
    fn find(&self, progress: &Progress) -> Result<Option<Assets>> {
        for (variable, named) in [
            ("TEST_ASSET_ETCD", &self.etcd),
            ("TEST_ASSET_KUBE_APISERVER", &self.api_server),
            ("TEST_ASSET_KUBE_CONTROLLER_MANAGER", &self.controller_manager),
        ] {
            if let Some(file) = named.as_ref().filter(|file| !is_program(file)) {
                bail!("{variable} says {}, which is no program file", file.display());
            }
        }
        let named = match (&self.etcd, &self.api_server, &self.kubebuilder_assets) {
            (Some(etcd), Some(api_server), _) => {
                Some(Assets { etcd: etcd.clone(), api_server: api_server.clone(), controller_manager: self.controller_manager.clone() })
            }
            (_, _, Some(directory)) => match self.complete(directory) {
                Some(assets) => Some(assets),
                None => bail!("KUBEBUILDER_ASSETS says {}, where etcd and kube-apiserver are not", directory.display()),
            },
            _ => None,
        };
        if let Some(assets) = named {
            let version = version_of(&assets.api_server)?;
            if version < OLDEST {
                let Assets { api_server, .. } = assets;
                bail!("{} is of Kubernetes {version}; Berth needs {OLDEST} or newer", api_server.display());
            }
            return Ok(Some(self.accept(assets, progress)));
        }
        for directory in self.store_by_release().iter().chain(&self.fallbacks) {
            let Some(assets) = self.complete(directory) else { continue };
            match version_of(&assets.api_server) {
                Ok(version) if version >= OLDEST => return Ok(Some(self.accept(assets, progress))),
                Ok(version) => {
                    progress.say(&format!("passing over Kubernetes {version} in {}: Berth needs {OLDEST} or newer", directory.display()))
                }
                Err(error) => progress.say(&format!("passing over {}: {error:#}", directory.display())),
            }
        }
        Ok(None)
    }

    /// What `directory` and the variables for single files give together.
    fn complete(&self, directory: &Path) -> Option<Assets> {
        let program =
            |named: &Option<PathBuf>, name: &str| named.clone().or_else(|| Some(directory.join(name)).filter(|file| is_program(file)));
        Some(Assets {
            etcd: program(&self.etcd, "etcd")?,
            api_server: program(&self.api_server, "kube-apiserver")?,
            controller_manager: program(&self.controller_manager, "kube-controller-manager"),
        })
    }

    fn accept(&self, assets: Assets, progress: &Progress) -> Assets {
        if assets.controller_manager.is_none() {
            progress.say(&format!(
                "there is no kube-controller-manager beside {}: nothing will be garbage-collected, namespaces will not finish their \
                 deletion and get no default ServiceAccount",
                assets.api_server.display()
            ));
        }
        assets
    }

    /// The releases in setup-envtest's store (`1.37.2-linux-amd64`) for this machine, newest first.
    fn store_by_release(&self) -> Vec<PathBuf> {
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        let system = if std::env::consts::OS == "macos" { "darwin" } else { std::env::consts::OS };
        let suffix = format!("-{system}-{architecture}");
        let entries = self.envtest_store.as_ref().and_then(|store| std::fs::read_dir(store).ok());
        let mut releases: Vec<(Vec<u32>, PathBuf)> = entries
            .into_iter()
            .flatten()
            .filter_map(|entry| {
                let entry = entry.ok()?;
                let name = entry.file_name();
                let release = name.to_str()?.strip_suffix(&suffix)?;
                let numbers = release.split('.').map(|number| number.parse().ok()).collect::<Option<Vec<u32>>>()?;
                Some((numbers, entry.path()))
            })
            .collect();
        releases.sort();
        releases.into_iter().rev().map(|(_, directory)| directory).collect()
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}.{}", self.major, self.minor)
    }
}

/// What `kube-apiserver --version` says: `Kubernetes v1.37.2`.
fn version_of(api_server: &Path) -> Result<Version> {
    let output = Command::new(api_server).arg("--version").output().with_context(|| format!("{} does not start", api_server.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    parse_version(&text).with_context(|| format!("{} does not tell its version: {:?}", api_server.display(), text.trim()))
}

fn parse_version(text: &str) -> Option<Version> {
    let mut numbers = text.trim().strip_prefix("Kubernetes v")?.split('.').map(str::parse);
    Some(Version { major: numbers.next()?.ok()?, minor: numbers.next()?.ok()? })
}

fn is_program(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    file.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(directory: &Path, name: &str, version: &str) -> PathBuf {
        use std::os::unix::fs::PermissionsExt;
        std::fs::create_dir_all(directory).unwrap();
        let file = directory.join(name);
        std::fs::write(&file, format!("#!/bin/sh\necho Kubernetes v{version}\n")).unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
        file
    }

    fn release(directory: &Path, version: &str) {
        program(directory, "etcd", "");
        program(directory, "kube-apiserver", version);
    }

    fn find(places: &Places) -> Result<Option<Assets>> {
        places.find(&Progress::silent())
    }

    #[test]
    fn the_directory_that_the_user_names_comes_before_what_lies_around() {
        let root = tempfile::tempdir().unwrap();
        let (named, store, other) = (root.path().join("named"), root.path().join("k8s"), root.path().join("bin"));
        release(&named, "1.36.0");
        release(&store.join("1.37.0-linux-amd64"), "1.37.0");
        release(&other, "1.38.0");
        let mut places = Places {
            kubebuilder_assets: Some(named.clone()),
            envtest_store: Some(store.clone()),
            fallbacks: vec![other.clone()],
            ..Places::default()
        };
        assert_eq!(find(&places).unwrap().unwrap().etcd, named.join("etcd"));
        places.kubebuilder_assets = None;
        places.envtest_store = None;
        assert_eq!(find(&places).unwrap().unwrap().etcd, other.join("etcd"));
    }

    #[test]
    fn a_single_file_that_the_user_names_replaces_that_of_the_directory() {
        let root = tempfile::tempdir().unwrap();
        release(&root.path().join("bin"), "1.37.2");
        let own = program(&root.path().join("own"), "my-etcd", "");
        let places = Places { etcd: Some(own.clone()), fallbacks: vec![root.path().join("bin")], ..Places::default() };
        let assets = find(&places).unwrap().unwrap();
        assert_eq!((assets.etcd, assets.api_server), (own, root.path().join("bin/kube-apiserver")));
    }

    #[cfg(all(target_os = "linux", target_arch = "x86_64"))]
    #[test]
    fn the_newest_release_of_the_store_is_taken_and_those_of_other_machines_are_not() {
        let root = tempfile::tempdir().unwrap();
        for (name, version) in [
            ("1.36.9-linux-amd64", "1.36.9"),
            ("1.36.10-linux-amd64", "1.36.10"),
            ("1.40.0-darwin-arm64", "1.40.0"),
            ("1.40-rc-linux-amd64", "1.40.0"),
        ] {
            release(&root.path().join(name), version);
        }
        let places = Places { envtest_store: Some(root.path().to_owned()), ..Places::default() };
        assert_eq!(find(&places).unwrap().unwrap().etcd, root.path().join("1.36.10-linux-amd64/etcd"));
    }

    #[test]
    fn a_release_that_is_too_old_is_refused_where_named_and_passed_over_elsewhere() {
        let root = tempfile::tempdir().unwrap();
        release(root.path(), "1.35.4");
        let named = Places { kubebuilder_assets: Some(root.path().to_owned()), ..Places::default() };
        let sentence = find(&named).unwrap_err().to_string();
        assert!(sentence.ends_with("is of Kubernetes 1.35; Berth needs 1.36 or newer"), "{sentence}");
        let around = Places { fallbacks: vec![root.path().to_owned()], ..Places::default() };
        assert_eq!(find(&around).unwrap(), None);
    }

    #[test]
    fn a_named_place_without_the_binaries_is_an_error_and_not_passed_over() {
        let root = tempfile::tempdir().unwrap();
        release(&root.path().join("bin"), "1.37.2");
        let fallbacks = vec![root.path().join("bin")];
        let empty = Places { kubebuilder_assets: Some(root.path().to_owned()), fallbacks: fallbacks.clone(), ..Places::default() };
        assert!(find(&empty).unwrap_err().to_string().starts_with("KUBEBUILDER_ASSETS says"));
        let gone = Places { api_server: Some(root.path().join("gone")), fallbacks, ..Places::default() };
        assert!(find(&gone).unwrap_err().to_string().starts_with("TEST_ASSET_KUBE_APISERVER says"));
    }

    #[test]
    fn a_controller_manager_is_taken_where_it_lies_beside_and_lived_without_elsewhere() {
        let root = tempfile::tempdir().unwrap();
        release(root.path(), "1.37.2");
        let places = Places { fallbacks: vec![root.path().to_owned()], ..Places::default() };
        assert_eq!(find(&places).unwrap().unwrap().controller_manager, None);
        let manager = program(root.path(), "kube-controller-manager", "");
        assert_eq!(find(&places).unwrap().unwrap().controller_manager, Some(manager));
    }
}
