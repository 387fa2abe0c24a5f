//! Plugins in a folder: `NAME.wasm[.gz|.zst]` with an optional `NAME.yaml` beside it, or a sub-folder with a `plugin.yaml`, as a mounted
//! ConfigMap shows it.
//!
//! # Expected flow
//! The folder is read every second; a plugin whose files are others than before, by identity, size and time of the files that links
//! lead to, is read and sent.
//!
//! # Guarantees
//! Swaps of a link (`..data`) are seen like any other change. Files that are still being written are left until one poll finds them as
//! the poll before did. A plugin is gone when two polls in a row miss it. While the folder itself cannot be read nothing changes.
//!
//! # Caveats
//! What is there at the start is sent at once: a half-written file then fails its gates, and is read again when it has grown.

use std::{
    collections::BTreeMap,
    fs, io,
    io::Read,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use tokio::sync::mpsc;
use tracing::warn;

use super::{Change, Content, Delivery, Place, Shelf};
use crate::package::{CONFIG_FILE, Digest, Encoding, MAX_COMPONENT, ceiling};

/// How often the folder is read.
const POLL: Duration = Duration::from_secs(1);

/// Sends the changes of a folder until nobody receives them any more.
pub async fn run(directory: PathBuf, shelf: Shelf, changes: mpsc::UnboundedSender<Change>) {
    let mut folder = Folder::default();
    let mut ticks = tokio::time::interval(POLL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let (path, shelf) = (directory.clone(), shelf.clone());
        let polled = tokio::task::spawn_blocking(move || {
            let mut changes = folder.poll(&path);
            changes.iter_mut().for_each(|change| change.lay_down(&shelf));
            (folder, changes)
        });
        let seen;
        (folder, seen) = match polled.await {
            Ok(polled) => polled,
            Err(panic) => std::panic::resume_unwind(panic.into_panic()),
        };
        for change in seen {
            if changes.send(change).is_err() {
                return;
            }
        }
    }
}

/// Tells one content of a file from another without reading it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stamp {
    path: PathBuf,
    device: u64,
    inode: u64,
    size: u64,
    modified: Option<SystemTime>,
}

/// The files of a plugin by their name within its package.
type Files = BTreeMap<String, Stamp>;

/// What is known of the folder.
#[derive(Debug, Default)]
struct Folder {
    synced: bool,
    complained: bool,
    last_seen: BTreeMap<String, Files>,
    sent: BTreeMap<String, Files>,
}

impl Folder {
    fn poll(&mut self, directory: &Path) -> Vec<Change> {
        let found = match scan(directory) {
            Ok(found) => found,
            Err(error) => {
                if !std::mem::replace(&mut self.complained, true) {
                    warn!(directory = %directory.display(), %error, "the plugin directory cannot be read");
                }
                return Vec::new();
            }
        };
        self.complained = false;
        let mut changes = self.gone(&found);
        for (name, files) in &found {
            let settled = !self.synced || self.last_seen.get(name) == Some(files);
            if settled && self.sent.get(name) != Some(files) {
                changes.extend(self.read(name, files));
            }
        }
        if !std::mem::replace(&mut self.synced, true) {
            changes.push(Change::Synced(Place::Directory));
        }
        self.last_seen = found;
        changes
    }

    fn gone(&mut self, found: &BTreeMap<String, Files>) -> Vec<Change> {
        let is_gone = |name: &String| !found.contains_key(name) && !self.last_seen.contains_key(name);
        let gone: Vec<String> = self.sent.keys().filter(|name| is_gone(name)).cloned().collect();
        let withdraw = |name: String| {
            self.sent.remove(&name);
            Change::Withdrawn { place: Place::Directory, name }
        };
        gone.into_iter().map(withdraw).collect()
    }

    /// The plugin's content; none where it changed while it was read, so that the next poll decides.
    fn read(&mut self, name: &str, files: &Files) -> Option<Change> {
        let contents: Vec<(String, Content)> =
            files.iter().map(|(file, stamp)| Ok((file.clone(), read_capped(&stamp.path)?.into()))).collect::<io::Result<_>>().ok()?;
        if files.values().any(|stamp| Stamp::of(&stamp.path).as_ref() != Some(stamp)) {
            return None;
        }
        self.sent.insert(name.to_owned(), files.clone());
        Some(Change::Delivered(Delivery {
            place: Place::Directory,
            name: name.to_owned(),
            uid: None,
            created: String::new(),
            version: Digest::of(format!("{files:?}").as_bytes()).short(),
            files: contents,
        }))
    }
}

impl Stamp {
    /// Of what the path leads to, if that is a regular file: reading a pipe or a device may never end.
    fn of(path: &Path) -> Option<Self> {
        use std::os::unix::fs::MetadataExt;
        let data = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
        let (device, inode, size, modified) = (data.dev(), data.ino(), data.len(), data.modified().ok());
        Some(Self { path: path.to_owned(), device, inode, size, modified })
    }
}

/// One byte more than is allowed is enough for the package to be refused.
fn read_capped(path: &Path) -> io::Result<Bytes> {
    let mut bytes = Vec::new();
    fs::File::open(path)?.take(MAX_COMPONENT.max(ceiling::CONFIG_BYTES) as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes.into())
}

/// Every plugin of the folder. Names that begin with a dot are not looked at: they are how mounts keep their versions.
fn scan(directory: &Path) -> io::Result<BTreeMap<String, Files>> {
    let mut plugins: BTreeMap<String, Files> = BTreeMap::new();
    let mut configs = Vec::new();
    for (file, path) in entries(directory)? {
        if path.is_dir() {
            let files = sub_folder(&path);
            if files.contains_key(CONFIG_FILE) {
                plugins.entry(file).or_default().extend(files);
            }
        } else if let Some((stem, _)) = Encoding::of(&file) {
            plugins.entry(plugin_name(stem)).or_default().extend(Stamp::of(&path).map(|stamp| (file.clone(), stamp)));
        } else if let Some(stem) = file.strip_suffix(".yaml") {
            configs.push((plugin_name(stem), path));
        }
    }
    for (name, path) in configs {
        if let Some(files) = plugins.get_mut(&name) {
            files.extend(Stamp::of(&path).map(|stamp| (CONFIG_FILE.to_owned(), stamp)));
        }
    }
    plugins.retain(|_, files| !files.is_empty());
    Ok(plugins)
}

fn sub_folder(directory: &Path) -> Files {
    let files = entries(directory).unwrap_or_default().into_iter();
    files.filter_map(|(file, path)| Stamp::of(&path).map(|stamp| (file, stamp))).collect()
}

fn entries(directory: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let mut entries = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if let Some(name) = entry.file_name().to_str().filter(|name| !name.starts_with('.')) {
            entries.push((name.to_owned(), entry.path()));
        }
    }
    Ok(entries)
}

/// Cargo names what it builds `email_request.wasm`; Kubernetes allows no such name.
fn plugin_name(stem: &str) -> String {
    stem.to_lowercase().replace('_', "-")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn write(path: impl AsRef<Path>, text: &str) {
        fs::create_dir_all(path.as_ref().parent().expect("parent")).expect("folder");
        fs::write(path, text).expect("writes");
    }

    /// Changes as text: `name[file=content …]`, `-name`, `synced`.
    fn polled(folder: &mut Folder, directory: &Path) -> Vec<String> {
        let show = |change| match change {
            Change::Delivered(Delivery { name, files, .. }) => {
                let files: Vec<_> = files
                    .iter()
                    .map(|(file, content)| format!("{file}={}", String::from_utf8_lossy(&content.read().expect("in memory"))))
                    .collect();
                format!("{name}[{}]", files.join(" "))
            }
            Change::Withdrawn { name, .. } => format!("-{name}"),
            Change::Kept(_) | Change::Lost(_) => unreachable!("a folder keeps nothing"),
            Change::Synced(_) => "synced".to_owned(),
        };
        folder.poll(directory).into_iter().map(show).collect()
    }

    #[test]
    fn files_with_their_configuration_and_sub_folders_are_plugins() {
        let temporary = tempfile::tempdir().expect("folder");
        let root = temporary.path();
        write(root.join("email_request.wasm"), "m");
        write(root.join("email-request.yaml"), "y");
        write(root.join("other.yaml"), "y");
        write(root.join("report-job/plugin.wasm.zst"), "z");
        write(root.join("report-job/plugin.yaml"), "c");
        write(root.join("deps/lib.wasm"), "no plugin: no plugin.yaml");
        write(root.join(".hidden.wasm"), "h");
        let expected = ["email-request[email_request.wasm=m plugin.yaml=y]", "report-job[plugin.wasm.zst=z plugin.yaml=c]", "synced"];
        let mut folder = Folder::default();
        assert_eq!(polled(&mut folder, root), expected);
        assert!(polled(&mut folder, root).is_empty());
    }

    #[test]
    fn a_file_that_is_being_written_is_left_until_it_stays_the_same() {
        let temporary = tempfile::tempdir().expect("folder");
        let root = temporary.path();
        let mut folder = Folder::default();
        assert_eq!(polled(&mut folder, root), ["synced"]);
        for half in ["a", "ab", "abc"] {
            write(root.join("p.wasm"), half);
            assert!(polled(&mut folder, root).is_empty(), "{half}");
        }
        assert_eq!(polled(&mut folder, root), ["p[p.wasm=abc]"]);
        assert!(polled(&mut folder, root).is_empty());
    }

    #[test]
    fn a_swap_of_the_data_link_of_a_mounted_config_map_is_seen() {
        let temporary = tempfile::tempdir().expect("folder");
        let root = temporary.path().join("p");
        for version in ["..1", "..2"] {
            write(root.join(version).join("plugin.yaml"), version);
            write(root.join(version).join("p.wasm"), version);
        }
        symlink("..1", root.join("..data")).expect("link");
        for file in ["plugin.yaml", "p.wasm"] {
            symlink(format!("..data/{file}"), root.join(file)).expect("link");
        }
        let mut folder = Folder::default();
        assert_eq!(polled(&mut folder, temporary.path()), ["p[p.wasm=..1 plugin.yaml=..1]", "synced"]);
        symlink("..2", root.join("..next")).expect("link");
        fs::rename(root.join("..next"), root.join("..data")).expect("swap");
        assert!(polled(&mut folder, temporary.path()).is_empty());
        assert_eq!(polled(&mut folder, temporary.path()), ["p[p.wasm=..2 plugin.yaml=..2]"]);
    }

    #[test]
    fn a_plugin_is_gone_after_two_polls_and_never_because_the_folder_is_unreadable() {
        let temporary = tempfile::tempdir().expect("folder");
        let root = temporary.path().join("plugins");
        write(root.join("p.wasm"), "m");
        let mut folder = Folder::default();
        assert_eq!(polled(&mut folder, &root).len(), 2);
        fs::rename(&root, temporary.path().join("away")).expect("moves");
        assert!(polled(&mut folder, &root).is_empty());
        assert!(polled(&mut folder, &root).is_empty());
        fs::rename(temporary.path().join("away"), &root).expect("moves");
        fs::remove_file(root.join("p.wasm")).expect("removes");
        assert!(polled(&mut folder, &root).is_empty());
        assert_eq!(polled(&mut folder, &root), ["-p"]);
        assert!(polled(&mut folder, &root).is_empty());
    }

    #[test]
    fn a_pipe_is_never_read() {
        let temporary = tempfile::tempdir().expect("folder");
        let path = temporary.path().join("p.wasm");
        let made = std::process::Command::new("mkfifo").arg(&path).status().expect("mkfifo runs");
        assert!(made.success());
        assert_eq!(polled(&mut Folder::default(), temporary.path()), ["synced"]);
    }

    #[test]
    fn two_components_of_one_name_are_delivered_together_so_that_the_package_is_refused() {
        let temporary = tempfile::tempdir().expect("folder");
        write(temporary.path().join("a_b.wasm"), "1");
        write(temporary.path().join("a-b.wasm.gz"), "2");
        assert_eq!(polled(&mut Folder::default(), temporary.path()), ["a-b[a-b.wasm.gz=2 a_b.wasm=1]", "synced"]);
    }
}
