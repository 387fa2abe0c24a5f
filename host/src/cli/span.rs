//! A length of time on the command line, such as `15s`, `2m` or `500ms`.

use std::{fmt, str::FromStr, time::Duration};

use crate::package::quantity;

/// A length of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span(pub Duration);

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        quantity::duration(text).map(Self).ok_or_else(|| "not a length of time such as 15s, 2m or 500ms".to_owned())
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&quantity::show_duration(self.0))
    }
}
