//! The text of an object, which is most of what an informer holds: whole while it is used, packed while the object rests.
//!
//! LZ4 takes microseconds for an object of the usual size. Alone, such a text is too short to repeat itself much; but objects of a kind
//! have their fields in common, so each is packed as if it came after one of them, the [`Model`].

use std::{borrow::Cow, sync::Arc};

use lz4_flex::block::{compress_with_dict, decompress_with_dict};

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
                let text = decompress_with_dict(bytes, *length, &model.0).expect("it was packed with this model");
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
        let bytes = compress_with_dict(text.as_bytes(), &model.0).into();
        Self(Form::Packed { bytes, length: text.len(), model: model.clone() })
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
