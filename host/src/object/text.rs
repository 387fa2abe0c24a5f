//! The text of an object, which is most of what an informer holds: whole while it is used, packed while the object rests.
//!
//! Packing takes microseconds for an object of the usual size. Alone, such a text is too short to repeat itself much; but objects of a
//! kind have their fields in common, so each is packed as if it came after one of them, the [`Model`].

use std::{
    borrow::Cow,
    sync::{Arc, Mutex},
};

use zstd::zstd_safe::{CCtx, DCtx, compress_bound};

/// Level of zstd: a higher one takes three times as long for a twentieth less.
const LEVEL: i32 = 1;
/// Contexts of each sort that are kept for the next text; they take some hundred KiB, and to make one takes longer than to use it.
const SPARE: usize = 2;
static PACKERS: Mutex<Vec<CCtx<'static>>> = Mutex::new(Vec::new());
static UNPACKERS: Mutex<Vec<DCtx<'static>>> = Mutex::new(Vec::new());

/// What is taken of the beginning of a model, and as much of its end: enough for the fields of most kinds.
const EDGE: usize = 2 << 10;

/// What the texts of a collection are packed with: the edges of one of them.
#[derive(Clone, Debug)]
pub struct Model(Arc<Vec<u8>>);

impl Model {
    /// Of the first text that is to be packed with it.
    pub fn of(text: &Text) -> Self {
        let text = text.read();
        let edges = match text.as_bytes() {
            short if short.len() <= 2 * EDGE => short.to_vec(),
            long => [&long[..EDGE], &long[long.len() - EDGE..]].concat(),
        };
        Self(Arc::new(edges))
    }
}

/// See the module. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Text(Form);

#[derive(Clone, Debug)]
enum Form {
    Whole(Arc<str>),
    Packed { bytes: Arc<[u8]>, length: usize, model: Model },
}

impl Text {
    /// The text; a copy of it where it is packed.
    pub fn read(&self) -> Cow<'_, str> {
        match &self.0 {
            Form::Whole(text) => Cow::Borrowed(text),
            Form::Packed { bytes, length, model } => {
                let mut text = Vec::with_capacity(*length);
                let unpacked = with(&UNPACKERS, DCtx::create, |context| context.decompress_using_dict(&mut text, bytes, &model.0));
                unpacked.expect("it was packed with this model");
                Cow::Owned(String::from_utf8(text).expect("it was a text"))
            }
        }
    }

    /// How long it is, in bytes.
    pub fn len(&self) -> usize {
        match &self.0 {
            Form::Whole(text) => text.len(),
            Form::Packed { length, .. } => *length,
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether it is packed.
    pub fn is_packed(&self) -> bool {
        matches!(self.0, Form::Packed { .. })
    }

    /// The same text, packed.
    pub fn pack(&self, model: &Model) -> Self {
        let text = self.read();
        let mut bytes = Vec::with_capacity(compress_bound(text.len()));
        let packed = with(&PACKERS, CCtx::create, |context| context.compress_using_dict(&mut bytes, text.as_bytes(), &model.0, LEVEL));
        packed.expect("there is room for the worst case");
        Self(Form::Packed { bytes: bytes.into(), length: text.len(), model: model.clone() })
    }

    /// The same text, whole.
    pub fn unpack(&self) -> Self {
        match self.read() {
            Cow::Borrowed(_) => self.clone(),
            Cow::Owned(text) => text.into(),
        }
    }
}

impl<T: Into<Arc<str>>> From<T> for Text {
    fn from(text: T) -> Self {
        Self(Form::Whole(text.into()))
    }
}

/// Does something with a context that was kept, or else with a new one.
fn with<C, R>(spare: &Mutex<Vec<C>>, new: fn() -> C, work: impl FnOnce(&mut C) -> R) -> R {
    let spare = || spare.lock().expect("no panic while the lock is held");
    let kept = spare().pop();
    let mut context = kept.unwrap_or_else(new);
    let result = work(&mut context);
    let mut spare = spare();
    if spare.len() < SPARE {
        spare.push(context);
    }
    result
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_text_comes_out_as_it_went_in(texts in prop::collection::vec("\\PC{0,60}|[ab]{0,9000}", 1..6), long in 0..300_000_usize) {
            let long: String = texts.concat().chars().cycle().take(if texts.concat().is_empty() { 0 } else { long }).collect();
            let texts: Vec<Text> = texts.into_iter().chain([long]).map(Text::from).collect();
            let model = Model::of(&texts[0]);
            for text in &texts {
                let packed = text.pack(&model);
                prop_assert!(packed.is_packed() && !packed.unpack().is_packed());
                prop_assert_eq!(packed.len(), text.len());
                prop_assert_eq!(packed.read(), text.read());
                let again = packed.pack(&Model::of(&packed)).unpack();
                prop_assert_eq!(again.read(), text.read());
            }
        }
    }

    #[test]
    fn what_texts_have_in_common_at_either_end_takes_little() {
        let object = |number: u32, middle: &str| {
            let text =
                format!(r#"{{"apiVersion":"batch.acme.io/v1","kind":"ReportJob","metadata":{{"name":"r{number}"}},"data":"{middle}","#);
            Text::from(format!(r#"{text}"spec":{{"report":"sales","format":"pdf"}},"status":{{"phase":"Done","observedGeneration":1}}}}"#))
        };
        for middle in [String::new(), (0..3_000).map(|number| number.to_string()).collect()] {
            let text = object(1, "");
            let packed = text.pack(&Model::of(&object(0, &middle)));
            let Form::Packed { bytes, .. } = &packed.0 else { panic!("it is packed") };
            assert!(bytes.len() * 4 < text.len(), "{} of {}", bytes.len(), text.len());
        }
    }
}
