//! Where plugins come from: each source turns one outside world into a stream of [`Change`]s.
//!
//! # Expected flow
//! A source sends what is there when it starts, then [`Change::Synced`], then every later change. The loader is at the other end.
//!
//! # Guarantees
//! A delivery is the whole plugin as it is at one moment. What changes quickly may be seen as one change, the last.

use serde::{Deserialize, Serialize};

use crate::package::Version;

pub use content::{Content, Shelf};

pub mod configmap;
mod content;
pub mod directory;

/// What happened in a source.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// A plugin is there, or is there in another state.
    Delivered(Delivery),
    /// A plugin is gone.
    Withdrawn {
        /// From which source.
        place: Place,
        /// Its name.
        name: String,
    },
    /// A stable version is kept, or is kept otherwise than before.
    Kept(Kept),
    /// What was kept is gone: the uid of its ConfigMap.
    Lost(String),
    /// Everything that was there at the start has been sent.
    Synced(Place),
}

/// A kind of source. Where two deliver the same name the first counts: a folder, which only developers use, hides a ConfigMap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// `--plugin-dir`
    Directory,
    /// A ConfigMap in the host's namespace.
    ConfigMap,
}

/// A plugin as it is in its source, unchecked.
#[derive(Clone, Debug, PartialEq)]
pub struct Delivery {
    /// Where it is.
    pub place: Place,
    /// Name of the ConfigMap, or of the file.
    pub name: String,
    /// Uid of the ConfigMap.
    pub uid: Option<String>,
    /// When the ConfigMap was created, as the API server wrote it (texts of that form sort by time); empty for a folder.
    pub created: String,
    /// Changes with the content: the resourceVersion of the ConfigMap, or a stamp of the files.
    pub version: String,
    /// Name and content of each file.
    pub files: Vec<(String, Content)>,
}

/// The stable version of a plugin, as the host keeps it in a ConfigMap of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct Kept {
    /// The plugin.
    pub name: String,
    /// Uid of the ConfigMap that holds it; empty where that is gone and what was in it is remembered.
    pub uid: String,
    /// Uid of the plugin's own ConfigMap.
    pub owner: Option<String>,
    /// Which version it is.
    pub version: Version,
    /// The versions that are not to be tried again, the last one last.
    pub rolled_back: Vec<RolledBack>,
    /// Name and content of each file.
    pub files: Vec<(String, Content)>,
}

/// A version that is not to be tried again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RolledBack {
    /// Which one.
    #[serde(flatten)]
    pub version: Version,
    /// The end of a sentence.
    pub why: String,
}

impl Change {
    /// Frees the memory of what it delivers.
    fn lay_down(&mut self, shelf: &Shelf) {
        if let Self::Delivered(Delivery { files, .. }) | Self::Kept(Kept { files, .. }) = self {
            shelf.lay_down(files);
        }
    }
}

impl Kept {
    /// Whether it was kept of this very plugin, not of a former one of that name.
    pub fn is_of(&self, delivery: &Delivery) -> bool {
        self.owner.is_some() && self.owner == delivery.uid
    }
}

impl Delivery {
    /// Orders plugins by age, the older first; it decides which one gets a kind that two claim. A folder is older than any ConfigMap,
    /// and within a folder the name decides, so that a restart changes nothing.
    pub fn seniority(&self) -> (Place, String, String) {
        (self.place, self.created.clone(), self.name.clone())
    }
}
