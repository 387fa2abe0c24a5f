//! The private cache of compiled components on disk.
//!
//! # Guarantees
//! Only a file whose checksum matches, owned by this user in a directory that nobody else can enter, is ever mapped. A file is whole
//! or absent: it is written under another name first. The total size is bounded; what was unused longest goes first.
//!
//! # Caveats
//! The checksum finds damage and careless hands. A file that nobody has written to since it was compared is not read again. Against
//! somebody who can write as this user there is no defence here, or anywhere.

use std::{
    fs::{self, DirBuilder, File},
    hash::{DefaultHasher, Hash, Hasher},
    io::{self, Seek},
    os::{
        fd::AsRawFd,
        unix::fs::{DirBuilderExt, MetadataExt},
    },
    path::{Path, PathBuf},
    sync::Mutex,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest as _, Sha256};
use wasmtime::{Engine, component::Component};

use super::{limits::CACHE_BYTES, mapped};
use crate::package::Digest;

const ARTEFACT: &str = "artefact";
const CHECKSUM: &str = "sha256";
const UNFINISHED: &str = "unfinished";

/// After this an unfinished file belongs to a process that is gone.
const ABANDONED: Duration = Duration::from_secs(3600);

/// A directory of artefacts.
pub struct Cache {
    directory: PathBuf,
    /// Engine settings, wasmtime version and target: artefacts of another are other files.
    compatibility: u64,
    most: u64,
}

impl Cache {
    /// Opens or creates the directory, for artefacts that `engine` can map.
    pub fn open(directory: PathBuf, engine: &Engine) -> Result<Self> {
        let shown = directory.display();
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&directory)
            .with_context(|| format!("cannot create the plugin cache {shown}"))?;
        let metadata = fs::symlink_metadata(&directory).with_context(|| format!("cannot read the plugin cache {shown}"))?;
        ensure!(metadata.is_dir(), "the plugin cache {shown} has to be a directory, not a link");
        private(&metadata).with_context(|| {
            format!("the plugin cache {shown} holds native code, so it must be private to this user: chmod 700 it, or name another with --cache-dir")
        })?;
        let mut hasher = DefaultHasher::new();
        engine.precompile_compatibility_hash().hash(&mut hasher);
        let cache = Self { directory, compatibility: hasher.finish(), most: CACHE_BYTES };
        cache.shrink(0);
        Ok(cache)
    }

    /// The artefact of a component, if it is here. What is in it is checked when it is mapped.
    ///
    /// # Errors
    /// It is not as it was stored; it is removed.
    pub fn load(&self, digest: &Digest) -> Result<Option<Artefact>> {
        let path = self.path(digest, ARTEFACT);
        self.open_private(digest, &path).inspect_err(|_| self.remove(digest)).with_context(|| path.display().to_string())
    }

    fn open_private(&self, digest: &Digest, path: &Path) -> Result<Option<Artefact>> {
        let file = match File::options().read(true).open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        private(&fs::symlink_metadata(path)?)?;
        let sum = fs::read_to_string(self.path(digest, CHECKSUM)).context("it has no checksum")?.trim().to_owned();
        // Marks the use, for the order in which files go; a failure costs at most a compilation.
        let _ = File::options().append(true).open(path).and_then(|file| file.set_modified(SystemTime::now()));
        Ok(Some(Artefact { file, path: path.to_owned(), sum, checked: Mutex::default() }))
    }

    /// Where a compiler may write before [`Self::store`].
    pub fn unfinished(&self) -> Unfinished {
        // Random, as others may use the same folder: another runtime of this process, or another container's process of the same number.
        Unfinished(self.directory.join(format!("{:016x}.{UNFINISHED}", rand::random::<u64>())))
    }

    /// Takes over what a compiler wrote.
    pub fn store(&self, digest: &Digest, written: Unfinished) -> Result<()> {
        let mut file = File::open(&written.0)?;
        let sum = checksum(&mut file)?;
        // Room first: the volume has an end.
        self.shrink(file.metadata()?.len());
        let sidecar = self.unfinished();
        fs::write(&sidecar.0, sum)?;
        // The checksum first: an artefact without one is refused, one without an artefact does nothing.
        fs::rename(&sidecar.0, self.path(digest, CHECKSUM))?;
        fs::rename(&written.0, self.path(digest, ARTEFACT))?;
        Ok(())
    }

    fn path(&self, digest: &Digest, kind: &str) -> PathBuf {
        self.directory.join(format!("{}-{:016x}.{kind}", digest.hex(), self.compatibility))
    }

    /// Drops an artefact, such as one that cannot be mapped.
    pub fn remove(&self, digest: &Digest) {
        for kind in [ARTEFACT, CHECKSUM] {
            let _ = fs::remove_file(self.path(digest, kind));
        }
    }

    /// Removes abandoned files, and artefacts beyond the bound with so many bytes more, the longest unused first.
    fn shrink(&self, more: u64) {
        let Ok(entries) = fs::read_dir(&self.directory) else { return };
        let files = entries.flatten().filter_map(|entry| {
            let metadata = entry.metadata().ok()?;
            Some((metadata.modified().ok()?, metadata.len(), entry.path()))
        });
        let is = |path: &Path, kind: &str| path.extension().is_some_and(|extension| extension == kind);
        let (unfinished, mut artefacts): (Vec<_>, Vec<_>) =
            files.filter(|(_, _, path)| is(path, ARTEFACT) || is(path, UNFINISHED)).partition(|(_, _, path)| is(path, UNFINISHED));
        for (modified, _, path) in unfinished {
            if modified.elapsed().is_ok_and(|age| age > ABANDONED) {
                let _ = fs::remove_file(path);
            }
        }
        artefacts.sort();
        let mut total = more + artefacts.iter().map(|(_, size, _)| size).sum::<u64>();
        for (_, size, path) in artefacts {
            if total <= self.most {
                break;
            }
            // A mapped file lives on until nobody maps it.
            let _ = fs::remove_file(path.with_extension(CHECKSUM));
            if fs::remove_file(path).is_ok() {
                total = total.saturating_sub(size);
            }
        }
    }
}

/// A compiled component. The file is open, so it can be mapped even when it is no longer in the cache.
#[derive(Debug)]
pub struct Artefact {
    file: File,
    /// Where it was, for messages.
    path: PathBuf,
    sum: String,
    /// What the file was like when its checksum was last found to match.
    checked: Mutex<Option<Stamp>>,
}

/// When a file was last changed in any way, in seconds and nanoseconds, and its size. Whoever writes to it cannot set this time.
type Stamp = (i64, i64, u64);

impl Artefact {
    /// Maps it.
    ///
    /// # Errors
    /// It is not as it was stored, or wasmtime cannot use it.
    pub fn map(&self, engine: &Engine) -> Result<Component> {
        self.checked(engine).with_context(|| self.path.display().to_string())
    }

    fn checked(&self, engine: &Engine) -> Result<Component> {
        // Taken before it is read: what is written meanwhile is found the next time.
        let metadata = self.file.metadata()?;
        let stamp = (metadata.ctime(), metadata.ctime_nsec(), metadata.len());
        let mut checked = self.checked.lock().expect("no panic while the lock is held");
        if *checked != Some(stamp) {
            let mut file = &self.file;
            file.rewind()?;
            ensure!(checksum(&mut file)? == self.sum, "its checksum does not match");
            *checked = Some(stamp);
        }
        // By its descriptor, not by its name: what was checked is what is mapped.
        Ok(mapped::component(engine, Path::new(&format!("/proc/self/fd/{}", self.file.as_raw_fd())))?)
    }
}

/// A file that is not an artefact yet, removed unless it becomes one.
pub struct Unfinished(PathBuf);

impl Unfinished {
    /// Its path.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn private(metadata: &fs::Metadata) -> Result<()> {
    if metadata.uid() != rustix::process::geteuid().as_raw() {
        bail!("it belongs to another user");
    }
    // A file may be readable by others: they cannot enter the directory.
    let harmful = if metadata.is_dir() { 0o077 } else { 0o022 };
    ensure!(metadata.mode() & harmful == 0, "others have access to it");
    Ok(())
}

fn checksum(file: &mut impl io::Read) -> Result<String> {
    let mut hash = Sha256::new();
    io::copy(file, &mut hash)?;
    Ok(format!("{:x}", hash.finalize()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::plugin::engine;

    fn cache(directory: &Path) -> Cache {
        Cache::open(directory.join("cache"), &engine::for_compiling(false).expect("an engine")).expect("a cache")
    }

    fn store(cache: &Cache, digest: &Digest, bytes: &[u8]) {
        let written = cache.unfinished();
        fs::write(written.path(), bytes).expect("writable");
        cache.store(digest, written).expect("stored");
    }

    #[test]
    fn a_directory_that_others_can_enter_is_refused_with_a_way_out() {
        let directory = tempfile::tempdir().expect("a directory");
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).expect("mine");
        let engine = engine::for_compiling(false).expect("an engine");
        let error = Cache::open(directory.path().into(), &engine).err().expect("refused").to_string();
        assert!(error.contains("chmod 700"), "{error}");
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(directory.path(), &link).expect("linked");
        assert!(Cache::open(link, &engine).is_err());
    }

    #[test]
    fn unfinished_files_of_two_runtimes_in_one_folder_never_meet() {
        let directory = tempfile::tempdir().expect("a directory");
        let (one, other) = (cache(directory.path()), cache(directory.path()));
        assert_ne!(one.unfinished().path(), other.unfinished().path());
    }

    #[test]
    fn what_is_written_to_after_it_was_checked_is_checked_again() {
        let directory = tempfile::tempdir().expect("a directory");
        let engine = engine::for_compiling(false).expect("an engine");
        let (cache, digest) = (cache(directory.path()), Digest::of(b"a"));
        store(&cache, &digest, b"no machine code");
        let artefact = cache.load(&digest).expect("as it was stored").expect("there");
        let refused = || format!("{:#}", artefact.map(&engine).map(drop).expect_err("refused"));
        for _ in 0..2 {
            assert!(!refused().contains("checksum"), "{}", refused());
        }
        // As exact as the clock of file systems is.
        std::thread::sleep(Duration::from_millis(20));
        fs::write(cache.path(&digest, ARTEFACT), b"no machine Code").expect("mine");
        for _ in 0..2 {
            assert!(refused().contains("its checksum does not match"), "{}", refused());
        }
    }

    #[test]
    fn what_was_unused_longest_goes_first_and_unfinished_files_go_with_their_owner() {
        let directory = tempfile::tempdir().expect("a directory");
        let cache = Cache { most: 25, ..cache(directory.path()) };
        let [old, used, new] = [b"a", b"b", b"c"].map(|bytes| Digest::of(bytes));
        for (digest, age) in [(&old, 30), (&used, 20)] {
            store(&cache, digest, &[0; 10]);
            let file = File::options().append(true).open(cache.path(digest, ARTEFACT)).expect("stored");
            file.set_modified(SystemTime::now() - Duration::from_secs(age)).expect("mine");
        }
        drop(cache.unfinished());
        store(&cache, &new, &[0; 10]);
        let there = [&old, &used, &new].map(|digest| cache.path(digest, ARTEFACT).exists());
        assert_eq!(there, [false, true, true]);
        assert_eq!(fs::read_dir(&cache.directory).expect("there").count(), 4, "two artefacts with their checksums");
        let large = Digest::of(b"d");
        store(&cache, &large, &[0; 30]);
        let there = [&used, &new, &large].map(|digest| cache.path(digest, ARTEFACT).exists());
        assert_eq!(there, [false, false, true], "room is made for what comes, and not by what has just come");
    }
}
