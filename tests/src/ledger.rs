//! An append-only file of JSON lines that survives a crash of its writer.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    path::Path,
    sync::Mutex,
    time::{SystemTime, UNIX_EPOCH},
};

use serde::{Serialize, de::DeserializeOwned};

/// Milliseconds since 1970.
pub fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// Entries that are on disk before anyone is told of them.
#[derive(Debug)]
pub struct Ledger<T> {
    inner: Mutex<Inner<T>>,
}

#[derive(Debug)]
struct Inner<T> {
    file: File,
    entries: Vec<T>,
}

impl<T: Serialize + DeserializeOwned + Clone> Ledger<T> {
    /// Opens or creates the file and reads what is there. A last line without its end was never acknowledged and is cut off.
    pub fn open(path: &Path) -> io::Result<Self> {
        let text = match std::fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        let entries = text[..whole]
            .split(|byte| *byte == b'\n')
            .filter(|line| !line.is_empty())
            .map(|line| serde_json::from_slice(line).map_err(io::Error::from))
            .collect::<io::Result<Vec<T>>>()?;
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        file.set_len(whole as u64)?;
        Ok(Self { inner: Mutex::new(Inner { file, entries }) })
    }

    /// Adds an entry; it is on disk when this returns.
    pub fn append(&self, entry: T) -> io::Result<()> {
        let mut line = serde_json::to_vec(&entry)?;
        line.push(b'\n');
        let mut inner = self.inner.lock().expect("no holder panics");
        inner.file.write_all(&line)?;
        inner.file.sync_data()?;
        inner.entries.push(entry);
        Ok(())
    }

    /// All entries, oldest first.
    pub fn entries(&self) -> Vec<T> {
        self.inner.lock().expect("no holder panics").entries.clone()
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.inner.lock().expect("no holder panics").entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The oldest entry that is so.
    pub fn find(&self, is: impl Fn(&T) -> bool) -> Option<T> {
        self.inner.lock().expect("no holder panics").entries.iter().find(|entry| is(entry)).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_last_line_is_cut_off_and_the_next_entry_is_readable() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("ledger");
        Ledger::open(&path).expect("new").append(1).expect("written");
        OpenOptions::new().append(true).open(&path).expect("there").write_all(b"23").expect("torn");
        let ledger = Ledger::<u32>::open(&path).expect("survives");
        assert_eq!(ledger.entries(), [1]);
        ledger.append(4).expect("written");
        assert_eq!(Ledger::<u32>::open(&path).expect("whole").entries(), [1, 4]);
    }

    #[test]
    fn a_whole_line_that_cannot_be_read_is_an_error() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("ledger");
        std::fs::write(&path, "1\nx\n2\n").expect("written");
        assert!(Ledger::<u32>::open(&path).is_err());
    }
}
