//! `berth:plugin/cluster`: reads of a guest, handed to the reader of its run.

use std::sync::{Arc, OnceLock};

use super::gate::{Call, Denied};
use crate::{
    denial::Denial,
    object::{self, Object, ObjectKey},
    plugin::{
        bindings::berth::plugin::cluster::{Host, Json, Kind, ObjectRef, Page, ReadError},
        instance::State,
        limits::{self, FIXED, Size},
    },
    reads::{self, Query, Reader, Target},
    text::cut,
};

/// The reads of one run.
#[derive(Clone)]
pub struct Reads {
    /// None in a trial, which has no capability.
    reader: Option<Arc<dyn Reader>>,
    unanswered: Arc<OnceLock<String>>,
}

impl Reads {
    /// Through this reader.
    pub fn new(reader: Option<Arc<dyn Reader>>) -> Self {
        Self { reader, unanswered: Arc::default() }
    }

    /// The first read that the host owes an answer, in a sentence: no fault of the handler's, if it asks for another try.
    pub fn unanswered(&self) -> Option<String> {
        self.unanswered.get().cloned()
    }
}

impl crate::plugin::bindings::berth::plugin::types::Host for State {}

impl Host for State {
    async fn get(&mut self, target: ObjectRef) -> Result<Option<Json>, ReadError> {
        let ObjectRef { group, version, kind, namespace, name } = target;
        self.asked(&[&group, &version, &kind, namespace.as_deref().unwrap_or_default(), &name])?;
        let target = Target { group, version, kind, key: ObjectKey::new(namespace.as_deref(), &name) };
        let found = self.reader()?.get(target).await;
        found.map(|found| found.as_deref().map(text)).map_err(|error| self.unread(error))
    }

    async fn list(
        &mut self,
        kind: Kind,
        namespace: Option<String>,
        label_selector: String,
        limit: u32,
        after: Option<String>,
    ) -> Result<Page, ReadError> {
        let Kind { group, version, kind, plural, namespaced } = kind;
        let kind = object::Kind { group, version, kind, plural, namespaced };
        let names = [&kind.group, &kind.version, &kind.kind, &kind.plural, &label_selector].map(String::as_str);
        self.asked(&[&names[..], &[namespace.as_deref().unwrap_or_default(), after.as_deref().unwrap_or_default()]].concat())?;
        let query = Query { kind, namespace, label_selector, limit, after };
        let page = self.reader()?.list(query).await;
        let page =
            page.map(|reads::Page { items, next }| Page { items: items.iter().map(|object| text(object)).collect(), continue_: next });
        page.map_err(|error| self.unread(error))
    }
}

impl State {
    /// The reader of the run, past the gate. It judges claim and permissions itself, as it knows which informer would answer.
    fn reader(&self) -> Result<Arc<dyn Reader>, ReadError> {
        self.gate.check(&Call::Read).map_err(|denied| ReadError::Forbidden(denied.sentence))?;
        self.reads.reader.clone().ok_or_else(|| ReadError::Other("this run has nothing to read from".into()))
    }

    /// The host remembers what a run has read, so that it counts towards the run's memory.
    fn asked(&mut self, names: &[&str]) -> Result<(), ReadError> {
        if names.iter().any(|name| name.len() > limits::READ_NAME) {
            let most = Size(limits::READ_NAME as u64);
            return Err(ReadError::Other(format!("a name or selector in it is longer than the {most} that one may have{FIXED}")));
        }
        let bytes = limits::READ_KEPT + names.iter().map(|name| name.len()).sum::<usize>();
        self.keep(bytes).map_err(|_| ReadError::Other("this run has read so much that its memory is used up".into()))
    }

    fn unread(&self, error: reads::ReadError) -> ReadError {
        let sentence = cut(&error.to_string(), limits::SENTENCE);
        match error {
            reads::ReadError::Forbidden(_) => {
                self.gate.deny(&Denied::new(Denial::ClusterRead, &format!("denied a read: {sentence}")));
                ReadError::Forbidden(sentence)
            }
            reads::ReadError::NotSynced => {
                self.reads.unanswered.get_or_init(|| sentence);
                ReadError::NotSynced
            }
            reads::ReadError::Unavailable(_) => ReadError::Other(self.reads.unanswered.get_or_init(|| sentence).clone()),
            reads::ReadError::Other(_) => ReadError::Other(sentence),
        }
    }
}

fn text(object: &Object) -> String {
    object.json.read().into_owned()
}
