//! What a delivered file holds. A component is needed once, when it is loaded, and perhaps once more, when it is kept as the stable
//! version: meanwhile it lies on disk, as the memory of hundreds of plugins would be mostly that of their files.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use bytes::Bytes;

use crate::package::Digest;

/// What is not larger stays in memory: a `plugin.yaml` is read again and again, and a file costs more than that.
const SMALL: usize = 4096;

/// What a file holds. Cheap to clone; equal where the bytes are.
#[derive(Clone, Debug)]
pub struct Content {
    digest: Digest,
    held: Held,
}

#[derive(Clone, Debug)]
enum Held {
    Memory(Bytes),
    /// A file without a name, which is gone with its last handle however the process ends.
    Disk(Arc<File>, usize),
}

impl Content {
    /// The bytes.
    ///
    /// # Errors
    /// They lie on a disk that cannot be read any more.
    pub fn read(&self) -> io::Result<Bytes> {
        match &self.held {
            Held::Memory(bytes) => Ok(bytes.clone()),
            Held::Disk(file, length) => {
                let mut bytes = vec![0; *length];
                file.read_exact_at(&mut bytes, 0)?;
                Ok(bytes.into())
            }
        }
    }
}

impl PartialEq for Content {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest
    }
}

impl<B: Into<Bytes>> From<B> for Content {
    fn from(bytes: B) -> Self {
        let bytes = bytes.into();
        Self { digest: Digest::of(&bytes), held: Held::Memory(bytes) }
    }
}

/// The folder in which contents are laid down; none keeps them in memory.
#[derive(Clone, Debug, Default)]
pub struct Shelf(Option<PathBuf>);

impl Shelf {
    /// Lays down in this folder, which has to exist by then.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self(Some(folder.into()))
    }

    /// Frees the memory of files that are large. One that cannot be written stays where it is.
    pub fn lay_down(&self, files: &mut [(String, Content)]) {
        let Some(folder) = &self.0 else { return };
        for (name, content) in files {
            let Held::Memory(bytes) = &content.held else { continue };
            if bytes.len() <= SMALL {
                continue;
            }
            match written(folder, bytes) {
                Ok(file) => content.held = Held::Disk(Arc::new(file), bytes.len()),
                Err(error) => tracing::warn!(file = name, folder = %folder.display(), %error, "a delivered file stays in memory"),
            }
        }
    }
}

fn written(folder: &Path, bytes: &[u8]) -> io::Result<File> {
    let file = tempfile::tempfile_in(folder)?;
    file.write_all_at(bytes, 0)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_large_lies_on_disk_and_is_the_same_as_before() {
        let folder = tempfile::tempdir().expect("a folder");
        let large: Vec<u8> = (0..100_000_u32).map(|number| number.to_le_bytes()[0]).collect();
        let mut files = vec![("plugin.wasm".to_owned(), Content::from(large.clone())), ("plugin.yaml".to_owned(), Content::from("a: b"))];
        let before = files.clone();
        Shelf::at(folder.path()).lay_down(&mut files);
        assert!(matches!((&files[0].1.held, &files[1].1.held), (Held::Disk(..), Held::Memory(_))));
        assert_eq!(files, before);
        assert_eq!(files[0].1.read().expect("readable"), large);
        assert_eq!(files[1].1.read().expect("in memory"), "a: b");
        assert_eq!(std::fs::read_dir(folder.path()).expect("there").count(), 0, "nothing is left behind, whatever happens");
    }

    #[test]
    fn what_cannot_be_written_stays_in_memory() {
        let mut files = vec![("plugin.wasm".to_owned(), Content::from(vec![7; 2 * SMALL]))];
        for shelf in [Shelf::at("/nowhere/at/all"), Shelf::default()] {
            shelf.lay_down(&mut files);
            assert_eq!(files[0].1.read().expect("in memory"), vec![7; 2 * SMALL]);
        }
    }
}
