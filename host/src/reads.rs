//! Reads of the cluster: what a handler may ask for during a run, how it is answered, and what is remembered of it.
//!
//! # Expected flow
//! A run is given a [`Reader`], which answers from the host's informers what its claim [covers](grant) and its ServiceAccount may
//! read, and notes each read in the run's [`Footprint`]. A change of something that was read wakes the object again, by the
//! [`Index`].

use std::{fmt, sync::Arc};

use futures::future::BoxFuture;

pub use self::index::{Footprint, Index, Scope};
use crate::object::{Kind, Object, ObjectKey};

pub mod grant;
mod index;

/// What one run may read the cluster through.
pub trait Reader: fmt::Debug + Send + Sync {
    /// One object; none where there is no such object, or where the claim's selector does not mean it.
    fn get(&self, target: Target) -> BoxFuture<'_, Result<Option<Arc<Object>>, ReadError>>;

    /// One page of the objects of a kind, in the order of namespace and name.
    fn list(&self, query: Query) -> BoxFuture<'_, Result<Page, ReadError>>;
}

/// Names one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// API group, empty for the core group.
    pub group: String,
    /// API version.
    pub version: String,
    /// Kind.
    pub kind: String,
    /// Namespace and name.
    pub key: ObjectKey,
}

/// Asks for objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Query {
    /// Of which kind.
    pub kind: Kind,
    /// In which namespace; none for all.
    pub namespace: Option<String>,
    /// As in `kubectl -l`.
    pub label_selector: String,
    /// How many at most; 0 for the host's page size.
    pub limit: u32,
    /// What the page before said of the next one.
    pub after: Option<String>,
}

/// A part of a list.
#[derive(Clone, Debug, Default)]
pub struct Page {
    /// The objects.
    pub items: Vec<Arc<Object>>,
    /// Leads to the next page; none on the last one.
    pub next: Option<String>,
}

/// Why a read is not answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// Not claimed or not granted; the sentence says what to add and where.
    #[error("{0}")]
    Forbidden(String),
    /// The informer has not listed yet.
    #[error("the host has not listed the kind yet")]
    NotSynced,
    /// The API server could not be asked: the host's affair, which passes.
    #[error("{0}")]
    Unavailable(String),
    /// Anything else.
    #[error("{0}")]
    Other(String),
}

impl Page {
    /// The token for what comes after this object. It names a place in the order, so that no change in between invalidates it.
    pub fn token(last: &ObjectKey) -> String {
        format!("{}/{}", last.namespace.as_deref().unwrap_or_default(), last.name)
    }

    /// The object that a token names.
    pub fn place(token: &str) -> Result<ObjectKey, ReadError> {
        match token.split_once('/') {
            Some((namespace, name)) if !name.is_empty() && !name.contains('/') => {
                Ok(ObjectKey::new(Some(namespace).filter(|namespace| !namespace.is_empty()), name))
            }
            _ => Err(ReadError::Other(format!("{:?} is no token of a former page", token.chars().take(100).collect::<String>()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_leads_back_to_its_place() {
        for key in [ObjectKey::new(Some("n"), "o.x"), ObjectKey::new(None, "o")] {
            assert_eq!(Page::place(&Page::token(&key)), Ok(key));
        }
        for wrong in ["", "n", "n/", "a/b/c"] {
            assert!(Page::place(wrong).is_err(), "{wrong:?}");
        }
    }
}
